"""Triton kernel that writes the gradients of a cross entropy over its logits."""

from __future__ import annotations

import torch

try:
    import triton  # type: ignore[import-not-found, unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    # torch for CPUs, or on Windows.
    triton = None

HAS_TRITON = triton is not None
BLOCK, WARPS = 8192, 16
"""Columns at a time, and warps of a row: the fastest of six choices on an H200 for 50,304 columns."""


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def overwrite_row(logits, labels, shares, losses, columns, width, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201, N803, PLR0913, PLR0917
        """Handle one row of logits: first its sum of exponentials, then its gradients.

        Of the `width` entries of a row, the first `columns` are the vocabulary and the others become 0. Loads
        and stores go to the whole width: it is a multiple of 16 where the vocabulary is not, so that Triton
        moves 16 bytes at a time.
        """
        row = tl.program_id(0).to(tl.int64)
        start_of_row = logits + row * stride
        share = tl.load(shares + row)
        place = tl.maximum(tl.load(labels + row), 0)
        score = tl.load(start_of_row + place).to(tl.float32)
        # Exponentials have base 2, which is an instruction of the GPU: logits are multiplied by log2(e).
        # A lane without a column keeps this peak: it is finite, so that no difference is NaN.
        peak = tl.full((BLOCK,), -1e30, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            entry = tl.load(start_of_row + column, mask=column < width, other=0.0)
            power = tl.where(column < columns, entry.to(tl.float32) * 1.4426950408889634, float("-inf"))
            higher = tl.maximum(peak, power)
            total = total * tl.exp2(peak - higher) + tl.exp2(power - higher)
            peak = higher
        top = tl.max(peak, 0)
        norm = top + tl.log2(tl.sum(total * tl.exp2(peak - top), 0))
        tl.store(losses + row, (norm * 0.6931471805599453 - score) * share)
        # No thread may overwrite the row while another still reads it.
        tl.debug_barrier()
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            entry = tl.load(start_of_row + column, mask=column < width, other=0.0)
            slope = tl.exp2(entry.to(tl.float32) * 1.4426950408889634 - norm)
            slope = (slope - tl.where(column == place, 1.0, 0.0)) * share
            slope = tl.where(column < columns, slope, 0.0)
            tl.store(start_of_row + column, slope.to(logits.dtype.element_ty), mask=column < width)


def launch(
    logits: torch.Tensor, labels: torch.Tensor, shares: torch.Tensor, losses: torch.Tensor, columns: int
) -> None:
    """Run the kernel for all rows."""
    rows, width = logits.shape
    with torch.cuda.device(logits.device):
        overwrite_row[(rows,)](
            logits, labels, shares, losses, columns, width, logits.stride(0), BLOCK=BLOCK, num_warps=WARPS
        )
