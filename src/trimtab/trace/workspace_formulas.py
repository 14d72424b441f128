"""Sizes of workspaces that are no straight line in the micro-batch, from a few whole numbers.

A trace keeps the numbers beside the size, so that the size at another micro-batch can be worked out again
instead of being read off a line between two others. No torch here: whoever reads a trace has none.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from trimtab.trace import convolution

if TYPE_CHECKING:
    from trimtab.spec import Cause

WARP = 32
MULTIPROCESSOR_THREADS = 2048
MOST_THREADS = 512
CHUNKS, CHUNK, TENSORS = 320, 65536, 110
"""What one launch of torch's many-tensor kernels takes: chunks of so many numbers, and so many tensors."""
COLUMN_SUM = "column sum"
CONVOLUTION = "convolution "
"""Followed by the phase."""


def column_sum(rows: int, columns: int) -> int:
    """Partial sums of a sum over rows, as for the gradient of a bias, by torch's own way to divide the work.

    Each block of threads adds up some rows of 32 columns (or fewer, where there are fewer) times the width of
    a vector load; where one pass over the rows would leave multiprocessors idle, several blocks share a
    column and meet in this buffer. From torch's sources (Reduce.cuh); exact on an H200.

    >>> column_sum(131_072, 256), column_sum(32_768, 64), column_sum(40_000, 40)
    (138412032, 4194304, 803840)
    """
    vector = next(width for width in (4, 2, 1) if columns % width == 0)
    threads = MOST_THREADS // vector
    most = _power_of_two(min(columns // vector, threads))
    height = min(_power_of_two(min(max(1, rows), threads)), threads // min(most, WARP))
    width = min(most, threads // height)
    each = -(-rows // height)
    if each < 256:  # noqa: PLR2004 - too few rows to divide
        return 0
    grid = -(-(columns // vector) // width)
    target = convolution.multiprocessors() * (MULTIPROCESSOR_THREADS // (width * height))
    if grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-each // 16)), -(-each // 256))
    return 4 * columns * blocks * width * vector if blocks > 1 else 0


def _power_of_two(number: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1)


def launches(tensors: int, numbers: int) -> int:
    """Kernels of an operation on many tensors at once, by what one launch of torch's takes.

    >>> launches(290, 1_000_000), launches(3, 50_000_000)
    (3, 3)
    """
    return max(1, -(-numbers // (CHUNKS * CHUNK)), -(-tensors // TENSORS))


def flat(shape: convolution.Shape) -> tuple[int, ...]:
    """A convolution as whole numbers: the number of image dimensions, then field by field."""
    numbers = [len(shape.image)]
    for field in fields(shape):
        value = getattr(shape, field.name)
        if field.name != "arithmetic":
            numbers += value if isinstance(value, tuple) else [int(value)]
    return tuple(numbers)


def unflat(numbers: tuple[int, ...], arithmetic: str) -> convolution.Shape:
    """The convolution that `flat` wrote down."""
    count, *rest = numbers
    values: dict[str, int | tuple[int, ...]] = {}
    for field in fields(convolution.Shape):
        if field.name in ("image", "made", "kernel"):
            values[field.name], rest = tuple(rest[:count]), rest[count:]
        elif field.name != "arithmetic":
            values[field.name], *rest = rest
    values["last"] = bool(values["last"])
    return convolution.Shape(**values, arithmetic=arithmetic)  # type: ignore[arg-type]


def size(cause: Cause) -> int | None:
    """Bytes of workspace; None where the rule is not known here."""
    if cause.rule == COLUMN_SUM:
        rows, columns = cause.numbers
        return cause.beside + column_sum(rows, columns)
    if cause.rule.startswith(CONVOLUTION):
        shape = unflat(cause.numbers, cause.word)
        return cause.beside + convolution.workspace(shape, cause.rule.removeprefix(CONVOLUTION))
    return None
