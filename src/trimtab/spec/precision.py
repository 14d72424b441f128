"""Precision: the named choices of dtypes for a training step.

Each precision is one row here. Other modules ask for a property of the row, never for its name, so that a
new precision needs no edit elsewhere. dtypes are names as torch has them: `spec` does not import torch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from trimtab.spec.base import Noun

FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"
TF32 = "tf32"
"""How tensor cores multiply float32 matrices: no dtype of a tensor, but a rate and kernels of its own."""
DTYPE_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}


class Dtypes(Noun, frozen=True, kw_only=True):
    """The dtypes of a training step, by what each is used for."""

    autocast: str | None = None
    """dtype that autocast casts to; None: there is no autocast, and the weights' dtype computes."""
    weights: str = FLOAT32
    """Trainable weights in memory, and the default dtype while the job builds its model.

    Where this and `frozen_weights` are float32, weights stay as the job builds them."""
    frozen_weights: str = FLOAT32
    """Weights that do not train, in memory."""
    reductions: str = FLOAT32
    """dtype in which fsdp and hsdp sum gradients over ranks. Other strategies sum them as they are kept."""
    scales_loss: bool = False
    """Whether the loss is multiplied by a scale, so that small gradients do not become 0."""
    tf32_products: bool = False
    """Whether matrix products of float32 use TF32."""
    tf32_convolutions: bool = True
    """Whether convolutions of float32 use TF32, as they do by torch's default."""

    def faults(self) -> list[str]:
        """Every dtype is known, and autocast narrows."""
        used = (self.autocast or FLOAT32, self.weights, self.frozen_weights, self.reductions)
        wrong = [f"{dtype} is none of {', '.join(DTYPE_BYTES)}" for dtype in used if dtype not in DTYPE_BYTES]
        if self.autocast == FLOAT32:
            wrong.append("autocast to float32 casts nothing: leave it out")
        return wrong

    @property
    def compute(self) -> str:
        """The dtype that most operations compute in."""
        return self.autocast or self.weights

    @property
    def products(self) -> str:
        """What matrix products compute in: the dtype, or tf32."""
        return TF32 if self.tf32_products and self.compute == FLOAT32 else self.compute

    @property
    def gradients(self) -> str:
        """Gradients in memory: torch keeps each in the dtype of its weight."""
        return self.weights

    @property
    def optimizer_states(self) -> str:
        """Moments of the optimizer in memory: torch makes them like the weights."""
        return self.weights

    @property
    def is_narrow(self) -> bool:
        """Whether it computes in fewer than 32 bits."""
        return DTYPE_BYTES[self.compute] < DTYPE_BYTES[FLOAT32]

    @property
    def is_bf16(self) -> bool:
        """Whether it computes in bf16, which older devices only emulate."""
        return self.compute == BFLOAT16

    @property
    def keeps_float32(self) -> bool:
        """Whether weights and sums of gradients stay in float32; else training itself is another one."""
        return self.weights == self.frozen_weights == self.reductions == FLOAT32


class Precision(StrEnum):
    """Which dtype computes and which one the weights are kept in."""

    _value_: str
    dtypes: Dtypes

    def __new__(cls, word: str, dtypes: Dtypes | None = None) -> Self:
        """Make a member from its row. Its value is the word alone, as users type it and JSON has it."""
        member = str.__new__(cls, word)
        member._value_ = word
        member.dtypes = dtypes or Dtypes()
        return member

    FP32 = "fp32", Dtypes(tf32_convolutions=False)
    TF32 = "tf32", Dtypes(tf32_products=True)
    BF16 = "bf16", Dtypes(autocast=BFLOAT16)
    """bf16 autocast, fp32 weights."""
    FP16 = "fp16", Dtypes(autocast=FLOAT16, scales_loss=True)
    """fp16 autocast with loss scaling, fp32 weights."""
    BF16_TRUE = "bf16-true", Dtypes(weights=BFLOAT16, frozen_weights=BFLOAT16, reductions=BFLOAT16)
    """bf16 weights."""
