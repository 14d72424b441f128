"""Store weights in 4 and 8 bits as torchao does it: in plain torch, on the CPU, on CUDA and on fake tensors.

Unlike the kernels of bitsandbytes, these restore a matrix step by step. So a product needs buffers for the
steps: 14 bytes a weight for nf4 in bf16, of which 8 are the numbers of the values as 64-bit integers.
"""

from __future__ import annotations

from typing import Any

import torch

NF4_VALUES = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip
"""The values of nf4, as torchao rounds them."""
LARGEST_INT8 = 127
SMALLEST = 1e-30
"""Smallest absolute value that a scale is made for, so that rows of zeros get one."""
STEPS = 256
"""Values of a scale in 8 bits."""


def _rows_of(values: torch.Tensor, length: int) -> torch.Tensor:
    """Return values as rows of a length, padded with zeros."""
    flat = values.flatten()
    missing = -flat.numel() % length
    return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, length)


def _largest_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of each row, and never 0."""
    return rows.abs().amax(1).clamp_(min=SMALLEST)


def store_nf4(matrix: torch.Tensor, block: int, scale_block: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a matrix in nf4 with scales in 8 bits; scales have the dtype of the matrix.

    torchao takes only matrices whose scales fill their blocks; here the last block is padded.
    """
    values = torch.tensor(NF4_VALUES, dtype=matrix.dtype, device=matrix.device)
    rows = _rows_of(matrix, block)
    scales = _largest_of_rows(rows)
    numbers = torch.bucketize(rows / scales[:, None], (values[1:] + values[:-1]) / 2, out_int32=True)
    pairs = numbers.flatten().to(torch.uint8).view(-1, 2)
    mean = scales.mean()
    centred = _rows_of(scales - mean, scale_block)
    factors = STEPS / (2 * _largest_of_rows(centred))
    codes = (centred * factors[:, None]).round_().clamp_(-STEPS // 2, STEPS // 2 - 1).to(torch.int8)
    return {
        "weight": pairs[:, 0] << 4 | pairs[:, 1],
        "scales": codes.flatten(),
        "scale_scales": factors,
        "scale_mean": mean,
        "table": values,
    }


def restore_nf4(tensors: Any, shape: tuple[int, int], block: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a stored matrix; all intermediate tensors stay until the end, as in torchao."""
    table = tensors.table
    first_numbers = (tensors.weight >> 4).to(torch.long)
    second_numbers = (tensors.weight & 15).to(torch.long)
    first, second = table[first_numbers], table[second_numbers]
    codes = tensors.scales.view(tensors.scale_scales.numel(), -1)
    scales = (codes / tensors.scale_scales.unsqueeze(-1)).flatten().to(table.dtype) + tensors.scale_mean
    # The last block of scales may be padded, and so may the last block of weights.
    blocks = tensors.weight.numel() * 2 // block
    repeated = scales[:blocks].unsqueeze(-1).expand(blocks, block // 2)
    scaled_first = first * repeated.flatten()
    scaled_second = second * repeated.flatten()
    restored = torch.stack([scaled_first, scaled_second], dim=-1).flatten()
    return restored[: shape[0] * shape[1]].view(shape).to(dtype)


def store_int8(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a matrix in 8-bit integers with a scale per row, which has the dtype of the matrix."""
    scales = _largest_of_rows(matrix) / LARGEST_INT8
    factors = 1 / scales.float()
    numbers = (matrix.float() * factors[:, None]).round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
    return {"weight": numbers.to(torch.int8), "scales": scales}


class Int8Product(torch.autograd.Function):
    """Product with 8-bit weights that are cast for it, and scaled afterwards; the cast is never kept."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the product of the input with the restored weight."""
        # The weight and its scales are parameters: they are there in the backward pass anyway.
        ctx.save_for_backward(weight, scales)
        return (given @ weight.t().to(given.dtype)) * scales.to(given.dtype)

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        """Return the gradient of the input."""
        (gradient,) = above
        weight, scales = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return (gradient * scales.to(gradient.dtype)) @ weight.to(gradient.dtype), None, None
