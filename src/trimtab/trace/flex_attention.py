"""Follow FlexAttention: its memory and the cost of the blocks that its mask leaves.

torch compiles FlexAttention to kernels of its own, which fake tensors cannot run. Here it is one operation
that returns what the kernels return. A block mask says which blocks of scores are computed (`block_masks`).
The compiler follows the code of this module, as it follows torch's own.
"""

from __future__ import annotations

# ruff: noqa: ARG001 - the operations have no kernels that would use their arguments
import importlib
import sys
from typing import Any

import torch

from trimtab.trace.block_masks import (
    MILLION,
    SHARE_ATTRIBUTE,
    measure_share,
    note_assumptions,
    wrap_mask_maker,
)

MODULE = "torch.nn.attention.flex_attention"
HOLDERS = ("transformers.masking_utils", "transformers.integrations.flex_attention")
"""Modules that hold functions of torch's own; they may have been imported before."""


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
    create_block_mask = wrap_mask_maker(make_mask)

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
            note_assumptions(block_mask)
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
