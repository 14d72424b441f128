"""Find out which blocks of scores a block mask of FlexAttention leaves.

The mask is evaluated at the corners of every block, which finds the blocks of documents, windows and causal
masks. The compiler does not follow the code of this module: masks are made outside of compiled code.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from trimtab.trace.data_dependent import REAL_ATTRIBUTE

if TYPE_CHECKING:
    from collections.abc import Callable

MILLION = 1_000_000
SHARE_ATTRIBUTE = "_trimtab_share"
"""Attribute of a block mask: computed blocks of a million, as text, which is a constant to the compiler."""
SAMPLES = 8
"""A mask that differs between samples is evaluated for so many of them."""
COMPILED_NOTE = (
    "flex_attention is taken to be compiled, as torch advises: without it, all scores are in memory"
)
HALF_NOTE = (
    "half of the scores of a block mask that follows from data are taken to be computed (flex_attention)"
)


def wrap_mask_maker(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Return `create_block_mask` with a result that knows its share of computed blocks."""

    @functools.wraps(make_mask)
    def create_block_mask(*args: Any, **kwargs: Any) -> Any:
        # A compiled mask needs less memory while it is made; the mask is the same.
        kwargs.pop("_compile", None)
        mask = make_mask(*args, **kwargs)
        share = measure_share(mask)
        if share is not None:
            setattr(mask, SHARE_ATTRIBUTE, str(round(share * MILLION)))
        elif (recorder := find_recorder()) is not None:
            recorder.kernels.assume(HALF_NOTE)
        return mask

    return create_block_mask


def note_assumptions(mask: Any) -> None:
    """Note what is assumed about a call with this mask."""
    recorder = find_recorder()
    if recorder is None:
        return
    recorder.kernels.assume(COMPILED_NOTE)
    if mask is not None and not getattr(mask, SHARE_ATTRIBUTE, "") and measure_share(mask) is None:
        recorder.kernels.assume(HALF_NOTE)


def find_recorder() -> Any:
    """Return the recorder of the running trace, or None."""
    return next((mode for mode in _get_current_dispatch_mode_stack() if hasattr(mode, "kernels")), None)


def measure_share(mask: Any) -> float | None:
    """Return the share of blocks of scores that are computed; None if that follows from unknown data."""
    # A compiled mask function would return no values.
    evaluate = torch.compiler.disable(_evaluate_mask) if "torch._dynamo" in sys.modules else _evaluate_mask
    recorder = find_recorder()
    if recorder is None:
        return evaluate(mask)
    before, recorder.records_work = recorder.records_work, False
    try:
        with recorder.discard_changes():
            return evaluate(mask)
    finally:
        recorder.records_work = before


def _evaluate_mask(mask: Any) -> float | None:
    counts = mask.kv_num_blocks
    blocks = mask.BLOCK_SIZE if isinstance(mask.BLOCK_SIZE, tuple) else (mask.BLOCK_SIZE,) * 2
    lengths = getattr(mask, "seq_lengths", None) or (
        counts.shape[-1] * blocks[0],
        mask.kv_indices.shape[-1] * blocks[1],
    )
    corners = []
    for length, block in zip(lengths, blocks, strict=True):
        first = torch.arange(0, length, block, device=counts.device)
        corners.append((first, (first + (block - 1)).clamp(max=length - 1)))
    head = torch.zeros((), dtype=torch.int64, device=counts.device)
    shares = []
    for number in range(min(counts.shape[0], SAMPLES)):
        sample = head + number
        found = None
        for queries, keys in itertools.product(*corners):
            with contextlib.suppress(RuntimeError, TypeError, IndexError):
                set_here = _read_real(mask.mask_mod(sample, head, queries[:, None], keys[None, :]))
                if set_here is None:
                    return None
                with _disable_current_modes():
                    found = set_here if found is None else found | set_here
        if found is None:
            return None
        with _disable_current_modes():
            shares.append(float(found.double().mean()))
    return sum(shares) / len(shares)


def _read_real(values: Any) -> torch.Tensor | None:
    """Return a mask on the host, or None if its values are unknown."""
    if not isinstance(values, FakeTensor):
        return values if isinstance(values, torch.Tensor) and values.dtype == torch.bool else None
    real: torch.Tensor | None = getattr(values, REAL_ATTRIBUTE, None)
    return real if real is not None and real.dtype == torch.bool else None
