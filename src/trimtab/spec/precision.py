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
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
"""8-bit floats: with 3 bits of fraction up to 448, and with 2 bits up to 57,344."""
FLOAT8 = (E4M3, E5M2)


class ProductsFormat(Noun, frozen=True, kw_only=True):
    """How linear layers multiply in 8 bits. Results and all other operations keep their dtypes.

    Matrices are scaled by their largest absolute value, cast, multiplied, and the result is scaled back.
    """

    values: str = E4M3
    """dtype of inputs and weights in a product."""
    gradients: str = E5M2
    """dtype of gradients in a product."""
    scales_rows: bool = False
    """Whether every row of a matrix has its own scale; otherwise the whole matrix has one."""
    rounds_scales: bool = False
    """Whether scales are rounded down to a power of two, so that scaling itself rounds nothing."""
    block: int = 0
    """Neighbours in a row that share a scale of 8 bits, as in MX formats; 0: no blocks."""
    too_small: tuple[tuple[int, int], ...] = ()
    """Layers with at most so many outputs and so many inputs are not converted: scaling takes longer than
    the product gains. 0: any number."""

    def faults(self) -> list[str]:
        """Check that dtypes have 8 bits and that sizes are not negative."""
        wrong = [
            f"{dtype} is none of {', '.join(FLOAT8)}"
            for dtype in (self.values, self.gradients)
            if dtype not in FLOAT8
        ]
        sizes = [self.block, *(size for pair in self.too_small for size in pair)]
        return wrong + ["block or a size of too_small is negative"] * any(size < 0 for size in sizes)

    @property
    def multiple(self) -> int:
        """Return what the sizes of a layer have to be a multiple of."""
        return self.block or 16

    def gains(self, outputs: int, inputs: int) -> bool:
        """Whether a layer of this size is faster in 8 bits.

        >>> Precision.FP8_TENSORWISE.dtypes.products_format.gains(1024, 4096)
        False
        """
        return not any(
            (not most_outputs or outputs <= most_outputs) and (not most_inputs or inputs <= most_inputs)
            for most_outputs, most_inputs in self.too_small
        )


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
    products_format: ProductsFormat | None = None
    """How large linear layers multiply in 8 bits; None: they multiply in the dtype of other operations."""

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
        """Return the dtype of most matrix products, or tf32."""
        return self.products_format.values if self.products_format else self.reference_products

    @property
    def reference_products(self) -> str:
        """Return the dtype whose peak MFU is a share of: that of products which are not in 8 bits.

        Attention and the head of a model do not multiply in 8 bits, and MFU stays comparable in this way.
        """
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
        """Whether weights and sums of gradients stay in float32, and products have 16 bits at least.

        Otherwise training results change.
        """
        stored = self.weights == self.frozen_weights == self.reductions == FLOAT32
        return stored and self.products_format is None


SCALED_PRODUCT, BY_ROW = "aten::_scaled_mm", " by row"
"""The operation that multiplies in 8 bits, and what follows its name in traces if it has a scale per row."""
TENSORWISE = ProductsFormat(too_small=((1024, 4096),))
"""One scale per matrix. Layers that do not gain are those that torchao publishes, measured on H100."""
ROWWISE = ProductsFormat(
    gradients=E4M3,
    scales_rows=True,
    rounds_scales=True,
    too_small=((2048, 0), (0, 1024), (4096, 2048)),
)
"""One scale per row. Layers that do not gain also by torchao."""


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
    FP8_TENSORWISE = "fp8-tensorwise", Dtypes(autocast=BFLOAT16, products_format=TENSORWISE)
    """bf16 autocast, fp32 weights; large linear layers multiply in 8 bits, with a scale per matrix."""
    FP8_ROWWISE = "fp8-rowwise", Dtypes(autocast=BFLOAT16, products_format=ROWWISE)
    """The same with a scale per row, which loses less, and takes longer."""
    FP8_TENSORWISE_TRUE = "fp8-tensorwise-true", BF16_TRUE[1].replace(products_format=TENSORWISE)
    """bf16 weights; large linear layers multiply in 8 bits, with a scale per matrix."""
    FP8_ROWWISE_TRUE = "fp8-rowwise-true", BF16_TRUE[1].replace(products_format=ROWWISE)
    """The same with a scale per row."""
    MXFP8 = "mxfp8", Dtypes(autocast=BFLOAT16, products_format=ProductsFormat(gradients=E4M3, block=32))
    """bf16 autocast, fp32 weights; a scale for every 32 numbers, as Blackwell GPUs multiply them."""


def without_float8(precision: Precision) -> Precision:
    """Return the precision that does the same with products in 16 bits; itself if they are not in 8."""
    wide = precision.dtypes.replace(products_format=None)
    return next((other for other in Precision if other.dtypes == wide), precision)
