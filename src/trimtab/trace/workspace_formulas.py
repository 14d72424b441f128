"""Formulas for workspace sizes that do not grow linearly with the micro-batch.

A trace stores the integers of a formula with the size. So the size at another micro-batch is computed,
instead of interpolated between two traces. This module does not import torch: readers of traces run without
it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from trimtab.trace import convolution, convolution_search

if TYPE_CHECKING:
    from trimtab.spec import SizeCause

WARP = 32
MULTIPROCESSOR_THREADS = 2048
MAX_THREADS = 512
LAUNCH_CHUNKS, CHUNK_NUMBERS, LAUNCH_TENSORS = 320, 65536, 110
"""Limits of one launch of torch's multi-tensor kernels: chunks, numbers in a chunk, and tensors."""
UNSORTED_INDICES = 3072
"""Up to this many indices, the gradient of an embedding needs no sorting (Embedding.cu)."""
COLUMN_SUM = "column sum"
SORTED_SUM = "sorted sum"
CONVOLUTION = "convolution "
"""Prefix of the rule; the phase follows."""
SEARCH = "search "
"""Prefix of the rule of a search for the fastest convolution; the phase follows."""


def column_sum_bytes(rows: int, columns: int) -> int:
    """Return the bytes of partial sums of a sum over rows, such as the gradient of a bias.

    Each block of threads sums some rows of 32 columns (or of all, if fewer) times the width of a vector load.
    If one pass over the rows would leave multiprocessors idle, several blocks share a column and combine
    their sums in this buffer. From torch's sources (Reduce.cuh); exact on an H200.

    >>> [column_sum_bytes(*shape) for shape in [(131_072, 256), (32_768, 64), (40_000, 40)]]
    [138412032, 4194304, 803840]
    """
    vector = next(width for width in (4, 2, 1) if columns % width == 0)
    threads = MAX_THREADS // vector
    max_width = _round_down_to_power_of_two(min(columns // vector, threads))
    height = min(_round_down_to_power_of_two(min(max(1, rows), threads)), threads // min(max_width, WARP))
    width = min(max_width, threads // height)
    rows_per_thread = -(-rows // height)
    if rows_per_thread < 256:  # noqa: PLR2004 - too few rows to divide
        return 0
    grid = -(-(columns // vector) // width)
    target = convolution.reference_multiprocessors() * (MULTIPROCESSOR_THREADS // (width * height))
    if grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-rows_per_thread // 16)), -(-rows_per_thread // 256))
    return 4 * columns * blocks * width * vector if blocks > 1 else 0


def sorted_sum_bytes(indices: int, width: int) -> int:
    """Return the bytes of partial sums of an embedding's gradient, over sorted indices in fp32.

    >>> sorted_sum_bytes(3072, 768), sorted_sum_bytes(4096, 768)
    (0, 13839360)
    """
    return 0 if indices <= UNSORTED_INDICES else (indices + indices // 10) * width * 4


def _round_down_to_power_of_two(number: int) -> int:
    """Return the largest power of two that is at most `number`."""
    return 1 << (number.bit_length() - 1)


def count_launches(tensors: int, numbers: int) -> int:
    """Return the number of kernel launches of a multi-tensor operation.

    >>> count_launches(290, 1_000_000), count_launches(3, 50_000_000)
    (3, 3)
    """
    return max(1, -(-numbers // (LAUNCH_CHUNKS * CHUNK_NUMBERS)), -(-tensors // LAUNCH_TENSORS))


def flatten_shape(shape: convolution.ConvolutionShape) -> tuple[int, ...]:
    """Return a convolution as integers: the number of image dimensions, then all fields in order."""
    numbers = [len(shape.image)]
    for field in fields(shape):
        value = getattr(shape, field.name)
        if field.name != "arithmetic":
            numbers += value if isinstance(value, tuple) else [int(value)]
    return tuple(numbers)


def unflatten_shape(numbers: tuple[int, ...], arithmetic: str) -> convolution.ConvolutionShape:
    """Return the convolution that `flatten_shape` encoded."""
    count, *rest = numbers
    values: dict[str, int | tuple[int, ...]] = {}
    for field in fields(convolution.ConvolutionShape):
        if field.name in ("image", "out_image", "kernel"):
            values[field.name], rest = tuple(rest[:count]), rest[count:]
        elif field.name != "arithmetic":
            values[field.name], *rest = rest
    values["is_channels_last"] = bool(values["is_channels_last"])
    return convolution.ConvolutionShape(**values, arithmetic=arithmetic)  # type: ignore[arg-type]


def evaluate_cause(cause: SizeCause) -> int | None:
    """Return the bytes of workspace, or None if this version does not have the rule."""
    if cause.rule == COLUMN_SUM:
        rows, columns = cause.numbers
        return cause.beside + column_sum_bytes(rows, columns)
    if cause.rule == SORTED_SUM:
        indices, width = cause.numbers
        return cause.beside + sorted_sum_bytes(indices, width)
    if cause.rule.startswith(CONVOLUTION):
        shape = unflatten_shape(cause.numbers, cause.word)
        return cause.beside + convolution.workspace_bytes(shape, cause.rule.removeprefix(CONVOLUTION))
    if cause.rule.startswith(SEARCH):
        shape = unflatten_shape(cause.numbers, cause.word)
        sizes = convolution_search.list_search_bytes(shape, cause.rule.removeprefix(SEARCH))
        return max(sizes, default=0)
    return None
