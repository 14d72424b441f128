"""Operations on weights of 4 and 8 bits: `torch.ops.trimtab.*`, on the CPU, on CUDA and on fake tensors.

On the CPU they are plain torch. On CUDA they call the kernels of bitsandbytes, so that a plan runs as fast as
in the trainers that use it. On fake tensors only sizes are known, so an estimate needs no other package.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from trimtab.errors import EnvironmentFault

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
"""The values of nf4: means of 16 equal shares of a normal distribution, with an exact 0."""
FP4_VALUES = (
    0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25,
    -0.0, -0.0052083333, -0.66666667, -1.0, -0.33333333, -0.5, -0.16666667, -0.25,
)  # fmt: skip
"""The values of fp4: a sign, two bits of exponent and one of mantissa, divided by the largest."""
CODEBOOKS = {"nf4": NF4_VALUES, "fp4": FP4_VALUES}
LARGEST_INT8 = 127
LIBRARY = torch.library.Library("trimtab", "DEF")
DEFINITIONS = (
    "quantize_4bit(Tensor weight, int block, str codebook) -> (Tensor, Tensor)",
    "dequantize_4bit(Tensor packed, Tensor scales, int block, str codebook, int[] shape, ScalarType dtype) -> Tensor",  # noqa: E501
    "quantize_scales(Tensor scales, int block) -> (Tensor, Tensor, Tensor)",
    "dequantize_scales(Tensor codes, Tensor scales, Tensor mean, int block) -> Tensor",
    "quantize_rows(Tensor values, float limit) -> (Tensor, Tensor, Tensor)",
    "product_int8(Tensor left, Tensor right) -> Tensor",
    "scale_product(Tensor product, Tensor row_scales, Tensor column_scales) -> Tensor",
)
for definition in DEFINITIONS:
    LIBRARY.define(definition)


@functools.cache
def bitsandbytes_ops() -> Any:
    """Return the operations of bitsandbytes, which has the CUDA kernels."""
    try:
        importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise EnvironmentFault(
            "weights of 4 or 8 bits on a GPU",
            found=f"bitsandbytes cannot be imported ({error})",
            cure="Install it with `pip install bitsandbytes`, or use --base none.",
        ) from error
    return torch.ops.bitsandbytes


def dynamic_codes() -> torch.Tensor:
    """Return the 256 values of the 8-bit format of scales: more exact near 0 than at the ends.

    The positive values are the middles of 2**k equal parts of [0.1, 1], times 10**(k - 6), for k from 0 to 6;
    the negative ones are the same with a minus; and 0 and 1.
    """
    values = [0.0, 1.0]
    for power in range(7):
        ends = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float64)
        middles = ((ends[:-1] + ends[1:]) / 2 * 10.0 ** (power - 6)).tolist()
        values += [*middles, *(-middle for middle in middles)]
    return torch.tensor(sorted(values), dtype=torch.float32)


def _blocks(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return values as rows of one block each, padded with zeros."""
    flat = values.flatten()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block)).view(-1, block)


def _nearest(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the number of the nearest code of each value."""
    order = codes.argsort()
    ranked = codes[order]
    places = torch.bucketize(values, (ranked[1:] + ranked[:-1]) / 2)
    return order[places].to(torch.uint8)


# On the CPU.


def _quantize_4bit(weight: torch.Tensor, block: int, codebook: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _blocks(weight.float(), block)
    scales = rows.abs().amax(1)
    codes = torch.tensor(CODEBOOKS[codebook], device=weight.device)
    numbers = _nearest(rows / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None], codes)
    numbers = numbers.flatten()[: weight.numel() + weight.numel() % 2].view(-1, 2)
    return (numbers[:, :1] << 4 | numbers[:, 1:]), scales


def _dequantize_4bit(  # noqa: PLR0913, PLR0917 - the arguments of the operation
    packed: torch.Tensor,
    scales: torch.Tensor,
    block: int,
    codebook: str,
    shape: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    codes = torch.tensor(CODEBOOKS[codebook], device=packed.device)
    numbers = torch.cat([packed >> 4, packed & 15], dim=1).flatten().int()
    rows = _blocks(codes[numbers], block) * scales[:, None]
    count = 1
    for size in shape:
        count *= size
    return rows.flatten()[:count].view(shape).to(dtype)


def _quantize_scales(scales: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = scales.mean()
    rows = _blocks(scales - mean, block)
    second = rows.abs().amax(1)
    numbers = _nearest(
        rows / second.clamp(min=torch.finfo(torch.float32).tiny)[:, None], dynamic_codes().to(scales.device)
    )
    return numbers.flatten()[: scales.numel()], second, mean


def _dequantize_scales(
    codes: torch.Tensor, scales: torch.Tensor, mean: torch.Tensor, block: int
) -> torch.Tensor:
    values = _blocks(dynamic_codes().to(codes.device)[codes.int()], block) * scales[:, None]
    return values.flatten()[: codes.numel()] + mean


def _quantize_rows(values: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 8-bit rows, their scales and the columns with values from the limit on, which become 0."""
    wide = values.float()
    large = wide.abs() >= (limit or torch.inf)
    columns = large.any(0).nonzero().flatten()
    kept = wide.masked_fill(large, 0)
    scales = kept.abs().amax(1)
    factor = LARGEST_INT8 / scales.clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (kept * factor[:, None]).round().to(torch.int8)
    numbers[:, columns] = 0
    return numbers, scales, columns


def _product_int8(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left.double() @ right.double().t()).to(torch.int32)


def _scale_product(
    product: torch.Tensor, row_scales: torch.Tensor, column_scales: torch.Tensor
) -> torch.Tensor:
    return (product * row_scales[:, None] * column_scales / LARGEST_INT8**2).half()


# On CUDA.


def _quantize_4bit_cuda(weight: torch.Tensor, block: int, codebook: str) -> tuple[torch.Tensor, torch.Tensor]:
    packed, scales = bitsandbytes_ops().quantize_4bit(weight, block, codebook, torch.uint8)
    return packed, scales


def _dequantize_4bit_cuda(  # noqa: PLR0913, PLR0917 - the arguments of the operation
    packed: torch.Tensor,
    scales: torch.Tensor,
    block: int,
    codebook: str,
    shape: list[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    out: torch.Tensor = bitsandbytes_ops().dequantize_4bit(packed, scales, block, codebook, shape, dtype)
    return out


def _quantize_scales_cuda(
    scales: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = scales.mean()
    codes, second = bitsandbytes_ops().quantize_blockwise(scales - mean, _codes_on(scales.device), block)
    return codes, second, mean


def _dequantize_scales_cuda(
    codes: torch.Tensor, scales: torch.Tensor, mean: torch.Tensor, block: int
) -> torch.Tensor:
    restored: torch.Tensor = bitsandbytes_ops().dequantize_blockwise(
        codes, scales, _codes_on(codes.device), block, torch.float32
    )
    return restored.add_(mean)


@functools.cache
def _codes_on(device: torch.device) -> torch.Tensor:
    return dynamic_codes().to(device)


def _quantize_rows_cuda(
    values: torch.Tensor, limit: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers, scales, columns = bitsandbytes_ops().int8_vectorwise_quant(values, limit)
    if columns is None:
        columns = values.new_empty(0, dtype=torch.int64)
    return numbers, scales, columns


def _product_int8_cuda(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = bitsandbytes_ops().int8_linear_matmul(left, right)
    return product


def _scale_product_cuda(
    product: torch.Tensor, row_scales: torch.Tensor, column_scales: torch.Tensor
) -> torch.Tensor:
    scaled: torch.Tensor = bitsandbytes_ops().int8_mm_dequant(
        product, row_scales, column_scales, torch.float16, None
    )
    return scaled


# On fake tensors.


def _shape_4bit(weight: torch.Tensor, block: int, _: str) -> tuple[torch.Tensor, torch.Tensor]:
    count = weight.numel()
    return (
        weight.new_empty((-(-count // 2), 1), dtype=torch.uint8),
        weight.new_empty(-(-count // block), dtype=torch.float32),
    )


def _shape_restored(
    packed: torch.Tensor, _: torch.Tensor, __: int, ___: str, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    return packed.new_empty(shape, dtype=dtype)


def _shape_scales(scales: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(scales, dtype=torch.uint8),
        scales.new_empty(-(-scales.numel() // block)),
        scales.new_empty(()),
    )


def _shape_restored_scales(codes: torch.Tensor, scales: torch.Tensor, _: torch.Tensor, __: int) -> Any:
    return torch.empty_like(codes, dtype=scales.dtype)


def _shape_rows(values: torch.Tensor, _: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # No column is taken to have outliers: how many there are depends on values.
    return (
        torch.empty_like(values, dtype=torch.int8),
        values.new_empty(values.shape[0], dtype=torch.float32),
        values.new_empty(0, dtype=torch.int64),
    )


def _shape_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.new_empty((left.shape[0], right.shape[0]), dtype=torch.int32)


def _shape_scaled(product: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(product, dtype=torch.float16)


for name, on_cpu, on_cuda, on_fake in (
    ("quantize_4bit", _quantize_4bit, _quantize_4bit_cuda, _shape_4bit),
    ("dequantize_4bit", _dequantize_4bit, _dequantize_4bit_cuda, _shape_restored),
    ("quantize_scales", _quantize_scales, _quantize_scales_cuda, _shape_scales),
    ("dequantize_scales", _dequantize_scales, _dequantize_scales_cuda, _shape_restored_scales),
    ("quantize_rows", _quantize_rows, _quantize_rows_cuda, _shape_rows),
    ("product_int8", _product_int8, _product_int8_cuda, _shape_product),
    ("scale_product", _scale_product, _scale_product_cuda, _shape_scaled),
):
    LIBRARY.impl(name, on_cpu, "CPU")
    LIBRARY.impl(name, on_cuda, "CUDA")
    LIBRARY.impl(name, on_fake, "Meta")
