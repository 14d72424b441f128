"""Let compiled models of transformers use causal attention without a mask, as they do in eager mode.

transformers creates no mask if no token is masked: attention then gets `is_causal=True`. While a model is
traced it does not decide that, because an exported program would run with other lengths. So a compiled
model has a mask of (samples, 1, tokens, tokens), and attention computes both halves of every square, which
takes twice as long. A compiled training step always runs with the lengths that it was compiled for, so a call
that passes neither an attention mask nor positions is decided here as in eager mode.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

MASKS = "transformers.masking_utils"
DECISIONS = ("is_tracing", "find_packed_sequence_indices")
"""Functions of it by which a mask is created or not."""
MARK = "_decides_masks"
"""Attribute of a model whose forward pass is wrapped."""


class _RunningCall:
    """What is known about the innermost running call of a model."""

    is_plain = False
    """Whether it got neither an attention mask nor positions."""


def decide_masks_as_in_eager_mode(model: nn.Module) -> None:
    """Wrap the models of transformers inside a model that is going to be compiled."""
    masks: Any = sys.modules.get(MASKS)
    kind: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None or not all(hasattr(masks, name) for name in DECISIONS):
        return
    models = [
        module for module in model.modules() if isinstance(module, kind) and MARK not in module.__dict__
    ]
    if models and not hasattr(masks.is_tracing, "__wrapped__"):
        masks.is_tracing = _wrap_is_tracing(masks.is_tracing)
        masks.find_packed_sequence_indices = _wrap_find_packed(masks.find_packed_sequence_indices)
    for module in models:
        module.__dict__[MARK] = True
        module.forward = _wrap_forward(module.forward)


def _wrap_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    takes = inspect.signature(forward)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = takes.bind_partial(*args, **kwargs).arguments
        before = _RunningCall.is_plain
        _RunningCall.is_plain = given.get("attention_mask") is None and given.get("position_ids") is None
        try:
            return forward(*args, **kwargs)
        finally:
            _RunningCall.is_plain = before

    return run


def _wrap_is_tracing(is_tracing: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(is_tracing)
    def run(tensor: torch.Tensor | None = None) -> bool:
        # Without a tensor, nothing but lengths decides about the mask.
        return False if tensor is None and _RunningCall.is_plain else is_tracing(tensor)

    return run


def _wrap_find_packed(find: Callable[..., torch.Tensor | None]) -> Callable[..., torch.Tensor | None]:
    @functools.wraps(find)
    def run(position_ids: torch.Tensor) -> torch.Tensor | None:
        # The model numbered the tokens itself: each sample is one sequence.
        return None if _RunningCall.is_plain else find(position_ids)

    return run
