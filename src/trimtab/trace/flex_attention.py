"""Follow FlexAttention: its memory and the cost of the blocks that its mask leaves.

torch compiles FlexAttention to kernels of its own, which fake tensors cannot run. Here it is one operation
that returns what the kernels return. A block mask says which blocks of scores are computed. It is evaluated
at the corners of every block, which finds the blocks of documents, windows and causal masks.
"""

from __future__ import annotations

# ruff: noqa: ARG001 - the operations have no kernels that would use their arguments
import contextlib
import functools
import importlib
import itertools
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from trimtab.trace.data_dependent import REAL_ATTRIBUTE

MODULE = "torch.nn.attention.flex_attention"
HOLDERS = ("transformers.masking_utils", "transformers.integrations.flex_attention")
"""Modules that hold functions of torch's own; they may have been imported before."""
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


@torch.library.custom_op("trimtab::flex_attention", mutates_args=())
def _flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: int
) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("a fake tensor reached a kernel")


@torch.library.custom_op("trimtab::flex_attention_backward", mutates_args=())
def _flex_backward(  # noqa: PLR0913, PLR0917 - what the kernel reads
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    share: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    raise AssertionError("a fake tensor reached a kernel")


@_flex.register_fake
def _make_results(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: int
) -> tuple[torch.Tensor, torch.Tensor]:
    del key, share
    batch, heads, length, size = *query.shape[:3], value.shape[-1]
    # As the kernel: heads of a token lie together where those of the query do.
    out = torch.empty_like(query) if size == query.shape[-1] else query.new_empty(batch, heads, length, size)
    return out, query.new_empty((batch, heads, length), dtype=torch.float32)


@_flex_backward.register_fake
def _make_gradients(  # noqa: PLR0913, PLR0917
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    share: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del grad, out, lse, share
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.share = inputs[3]


def _differentiate(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
    return (*torch.ops.trimtab.flex_attention_backward(grad, *ctx.saved_tensors, ctx.share), None)


_flex.register_autograd(_differentiate, setup_context=_save)


def patch_flex_attention() -> None:
    """Let torch's flex_attention run on fake tensors, and its block masks know what they leave."""
    try:
        module: Any = importlib.import_module(MODULE)
    except ImportError:
        return
    make_mask, attend = module.create_block_mask, module.flex_attention

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

    def flex_attention(  # noqa: PLR0913, PLR0917 - torch's own
        query: Any,
        key: Any,
        value: Any,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        del score_mod, scale, enable_gqa
        if not torch.compiler.is_compiling():
            _note_assumptions(block_mask)
        device = query.device.type
        if torch.is_autocast_enabled(device):
            # As torch does it since 2.13; a model may turn queries and keys in fp32.
            dtype = torch.get_autocast_dtype(device)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        out, lse = torch.ops.trimtab.flex_attention(query, key, value, _find_share(block_mask))
        if not return_lse and options.get("return_aux") is None:
            return out
        return (out, lse) if return_lse else (out, module.AuxOutput(lse=lse))

    for place in (module, *(sys.modules[name] for name in HOLDERS if name in sys.modules)):
        _replace(place, make_mask, create_block_mask)
        _replace(place, attend, flex_attention)


def _replace(module: Any, before: Any, after: Any) -> None:
    """Replace a function in a module that may have imported it, by whatever name."""
    for name in [name for name, value in vars(module).items() if value is before]:
        setattr(module, name, after)


def _find_share(mask: Any) -> int:
    """Return how many of a million blocks are computed."""
    if mask is None:
        return MILLION
    known = getattr(mask, SHARE_ATTRIBUTE, "")
    if known:
        return int(known)
    if torch.compiler.is_compiling():
        return MILLION // 2
    share = measure_share(mask)
    return MILLION // 2 if share is None else round(share * MILLION)


def _note_assumptions(mask: Any) -> None:
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
    recorder = find_recorder()
    if recorder is None:
        return _evaluate_mask(mask)
    before, recorder.records_work = recorder.records_work, False
    try:
        with recorder.discard_changes():
            return _evaluate_mask(mask)
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
