"""Recompute blocks in the backward pass instead of storing their activations (gradient checkpointing)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import trimtab.engine.mx_format  # noqa: F401 - defines product_blocks
from trimtab.engine.build import find_repeated_blocks
from trimtab.errors import WrongUse
from trimtab.spec import Recompute

if TYPE_CHECKING:
    from torch import nn

SAVED_OPS = (
    "mm addmm bmm baddbmm _scaled_mm "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math"
)
"""Operations whose results selective recomputation stores: matrix products and attention."""


def enable_recompute(model: nn.Module, how: Recompute) -> list[str]:
    """Wrap the repeated blocks, or use the model's own switch; return the names of what is recomputed."""
    way = how.way
    if how is Recompute.NONE or way.budget is not None:
        # The compiler itself recomputes within a budget (`engine/compile.py`).
        return []
    own = getattr(model, "gradient_checkpointing_enable", None)
    lists = find_repeated_blocks(model)
    if way == Recompute.FULL.way and own is not None:
        own(gradient_checkpointing_kwargs={"use_reentrant": False})
        return [
            "the model's own switch",
            *(f"{name} ({len(list(blocks.children()))} blocks)" for name, blocks in lists),
        ]
    if not lists:
        raise WrongUse(
            f"--recompute {how}",
            found="this model has no list of repeated blocks",
            cure="Use --recompute none, or put the blocks of the model into an nn.ModuleList.",
        )
    chosen = [
        (name, [block for number, block in enumerate(blocks.children()) if way.has_block(number)])
        for name, blocks in lists
    ]
    for _, blocks in chosen:
        for block in blocks:
            _recompute_block(block, selective=way.keeps_products)
    return [f"{name} ({len(blocks)} blocks)" for name, blocks in chosen]


def _recompute_block(block: nn.Module, *, selective: bool) -> None:
    inner = block.forward
    context: dict[str, Any] = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}
    extra = context if selective else {}

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **extra, **kwargs)

    block.forward = forward


@functools.cache
def _saved_ops() -> frozenset[Any]:
    aten = torch.ops.aten
    products = [getattr(aten, name).default for name in SAVED_OPS.split() if hasattr(aten, name)]
    return frozenset([*products, torch.ops.trimtab.product_blocks.default])


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _saved_ops() else CheckpointPolicy.PREFER_RECOMPUTE
