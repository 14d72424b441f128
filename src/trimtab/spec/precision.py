"""Precision: named sets of dtypes for a training step.

Each precision is one row here. Other modules use properties of the row, never its name, so that a new
precision needs no change elsewhere. dtypes are names as in torch: `spec` does not import torch.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from trimtab.spec.base import Noun

FLOAT32, BFLOAT16, FLOAT16 = "float32", "bfloat16", "float16"
TF32 = "tf32"
"""Mode of tensor cores for float32 matrices: not a tensor dtype, but it has its own peak rate and kernels."""
DTYPE_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2}


class Dtypes(Noun, frozen=True, kw_only=True):
    """The dtypes of a training step, by what each is used for."""

    autocast: str | None = None
    """dtype of autocast; None: no autocast, operations compute in the dtype of the weights."""
    weights: str = FLOAT32
    """dtype of trainable weights in memory, and the default dtype while the job builds its model.

    If this and `frozen_weights` are float32, weights stay as the job builds them."""
    frozen_weights: str = FLOAT32
    """dtype of frozen weights in memory."""
    reductions: str = FLOAT32
    """dtype in which fsdp and hsdp sum gradients over ranks. Other strategies use the gradients' dtype."""
    scales_loss: bool = False
    """Whether the loss is multiplied by a scale, so that small gradients do not become 0."""
    tf32_products: bool = False
    """Whether matrix products of float32 use TF32."""
    tf32_convolutions: bool = True
    """Whether convolutions of float32 use TF32, as they do by torch's default."""

    def faults(self) -> list[str]:
        """Check that every dtype is known and autocast is narrower than float32."""
        used = (self.autocast or FLOAT32, self.weights, self.frozen_weights, self.reductions)
        wrong = [f"{dtype} is none of {', '.join(DTYPE_BYTES)}" for dtype in used if dtype not in DTYPE_BYTES]
        if self.autocast == FLOAT32:
            wrong.append("autocast to float32 casts nothing: leave it out")
        return wrong

    @property
    def compute(self) -> str:
        """Return the dtype that most operations compute in."""
        return self.autocast or self.weights

    @property
    def products(self) -> str:
        """Return the dtype of matrix products, or tf32."""
        return TF32 if self.tf32_products and self.compute == FLOAT32 else self.compute

    @property
    def gradients(self) -> str:
        """Return the dtype of gradients in memory: torch stores each in the dtype of its weight."""
        return self.weights

    @property
    def optimizer_states(self) -> str:
        """Return the dtype of optimizer moments in memory: torch uses the dtype of the weights."""
        return self.weights

    @property
    def is_narrow(self) -> bool:
        """Whether operations compute in fewer than 32 bits."""
        return DTYPE_BYTES[self.compute] < DTYPE_BYTES[FLOAT32]

    @property
    def is_bf16(self) -> bool:
        """Whether operations compute in bf16, which older devices only emulate."""
        return self.compute == BFLOAT16

    @property
    def keeps_float32(self) -> bool:
        """Whether weights and sums of gradients stay in float32; otherwise training results change."""
        return self.weights == self.frozen_weights == self.reductions == FLOAT32


class Precision(StrEnum):
    """Precision of a training step: dtypes of computation and of stored weights."""

    _value_: str
    dtypes: Dtypes

    def __new__(cls, name: str, dtypes: Dtypes | None = None) -> Self:
        """Make a member from its row; its value is the name alone, as in JSON and on the command line."""
        member = str.__new__(cls, name)
        member._value_ = name
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
