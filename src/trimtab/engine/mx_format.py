"""Linear layers that multiply in MXFP8: 8-bit floats, of which 32 neighbours share a scale of 8 bits.

The scale of a block is a power of two. A product needs blocks along the direction that it sums over, so every
matrix is cast twice: as it is, and transposed. Casting is one kernel that reads a matrix once and writes its
numbers and scales, as in torchao. Only Blackwell GPUs multiply such blocks. trimtab predicts them and does
not train with them on a GPU; on the CPU the same numbers are multiplied in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from trimtab.errors import EnvironmentFault

LIBRARY = torch.library.Library("trimtab", "FRAGMENT")
LIBRARY.define("cast_blocks(Tensor matrix, bool turned, int block, ScalarType dtype) -> (Tensor, Tensor)")
LIBRARY.define(
    "product_blocks(Tensor left, Tensor left_scales, Tensor right, Tensor right_scales, ScalarType dtype) -> Tensor"  # noqa: E501
)
BIAS = 127
"""A scale of 2**n is stored as n + BIAS."""


def _count_blocks(matrix: torch.Tensor, block: int, *, turned: bool) -> tuple[int, int]:
    """Return the rows of the cast matrix, and the blocks of each; the last block is filled with zeros."""
    rows, columns = (matrix.shape[1], matrix.shape[0]) if turned else matrix.shape
    return rows, -(-columns // block)


def _cast_sizes(
    matrix: torch.Tensor, turned: bool, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, blocks = _count_blocks(matrix, block, turned=turned)
    return matrix.new_empty(rows, blocks * block, dtype=dtype), matrix.new_empty(
        rows, blocks, dtype=torch.uint8
    )


def _cast(
    matrix: torch.Tensor, turned: bool, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, blocks = _count_blocks(matrix, block, turned=turned)
    straight = (matrix.t() if turned else matrix).float()
    padded = torch.nn.functional.pad(straight, (0, blocks * block - straight.shape[1]))
    parts = padded.reshape(rows, blocks, block)
    limits = torch.finfo(dtype)
    # The largest power of two in the block becomes the largest one of the dtype.
    largest = parts.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny).log2().floor()
    exponents = (largest - int(torch.tensor(limits.max).log2())).clamp(-BIAS, BIAS)
    scaled = (parts / exponents.exp2()[..., None]).clamp(limits.min, limits.max)
    return scaled.to(dtype).view(rows, blocks * block), (exponents + BIAS).to(torch.uint8)


def _restore(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    factors = (scales.float() - BIAS).exp2()
    return (numbers.float().view(*scales.shape, -1) * factors[..., None]).view(numbers.shape)


def _product(
    left: torch.Tensor,
    left_scales: torch.Tensor,
    right: torch.Tensor,
    right_scales: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return (_restore(left, left_scales) @ _restore(right, right_scales).t()).to(dtype)


def _product_sizes(
    left: torch.Tensor, _: torch.Tensor, right: torch.Tensor, __: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return left.new_empty(left.shape[0], right.shape[0], dtype=dtype)


def _refuse(*_: Any) -> Any:
    raise make_refusal()


def make_refusal() -> EnvironmentFault:
    """Return the error of training in MXFP8 on a GPU."""
    return EnvironmentFault(
        "training with precision mxfp8 on a GPU",
        found="trimtab predicts mxfp8, and has no kernels for it",
        cure="Train with torchtitan's converter quantize.linear.mx or torchao's MXLinear, or use --precision "
        "fp8-rowwise or bf16.",
    )


for key, cast, product in (("CPU", _cast, _product), ("Meta", _cast_sizes, _product_sizes)):
    LIBRARY.impl("cast_blocks", cast, key)
    LIBRARY.impl("product_blocks", product, key)
for name in ("cast_blocks", "product_blocks"):
    LIBRARY.impl(name, _refuse, "CUDA")


class BlockProduct(torch.autograd.Function):
    """A linear layer in MXFP8. Between the passes it keeps its input in 16 bits, as other layers do."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: torch.Tensor, block: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the product of the rows with the weight of (outputs, inputs)."""
        ctx.save_for_backward(given, weight)
        ctx.block, ctx.dtype = block, dtype
        ops = torch.ops.trimtab
        rows = ops.cast_blocks(given, False, block, dtype)
        columns = ops.cast_blocks(weight, False, block, dtype)
        out: torch.Tensor = ops.product_blocks(*rows, *columns, given.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the input and of the weight."""
        (gradient,) = above
        given, weight = ctx.saved_tensors
        ops, how = torch.ops.trimtab, (ctx.block, ctx.dtype)
        for_input = for_weight = None
        if ctx.needs_input_grad[0]:
            rows = ops.cast_blocks(gradient, False, *how)
            columns = ops.cast_blocks(weight, True, *how)
            for_input = ops.product_blocks(*rows, *columns, gradient.dtype)
            del rows, columns
        if ctx.needs_input_grad[1]:
            rows = ops.cast_blocks(gradient, True, *how)
            columns = ops.cast_blocks(given, True, *how)
            for_weight = ops.product_blocks(*rows, *columns, gradient.dtype)
        return for_input, for_weight, None, None
