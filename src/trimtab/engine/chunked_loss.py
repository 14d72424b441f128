"""Compute the loss of a causal language model of transformers without ever holding all of its logits.

Such a model computes `lm_head(hidden)` and passes the logits to its `loss_function`. Here the head passes the
hidden states on instead, and the loss multiplies them with the weights of the head, some tokens at a time.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from trimtab.engine.liger_loss import check_liger, fused_linear_loss
from trimtab.errors import WrongUse
from trimtab.jobs.head import IGNORE_INDEX, mean_token_loss, weighted_token_loss
from trimtab.spec import LossForm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

USUAL_PIECES = 8
MOST_PIECES = 128
LARGEST_PIECE = 512 * 2**20
"""Most bytes of the logits of a piece in fp32, for one sample."""
CHANGED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Config entries of models that change the logits before the loss."""


def apply_loss_form(model: nn.Module, form: LossForm) -> None:
    """Let a model compute its loss in pieces, if the setting asks for it."""
    if form is LossForm.WHOLE:
        return
    found = next((module for module in model.modules() if _has_own_loss(module)), None)
    if found is None:
        raise WrongUse(
            f"--loss {form}",
            found="the model is no causal language model of transformers that computes its own loss",
            cure="Compute the loss in pieces in loss(), or leave --loss out.",
        )
    changed = [name for name in CHANGED_LOGITS if _changes_logits(found, name)]
    if changed:
        raise WrongUse(
            f"--loss {form}",
            found=f"{type(found).__name__} changes its logits before the loss ({changed[0]})",
            cure="Leave --loss out.",
        )
    if form is LossForm.LIGER:
        head: Any = found.lm_head
        check_liger(head.weight)
    _compute_in_pieces(found, sum_fused if form is LossForm.LIGER else sum_pieces)


def _has_own_loss(module: nn.Module) -> bool:
    """Whether a module passes the result of `lm_head` to `loss_function`, and nothing else uses it."""
    head: Any = getattr(module, "lm_head", None)
    if head is None or not hasattr(module, "loss_function") or getattr(head, "bias", None) is not None:
        return False
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return False
    return "self.lm_head(" in source and "self.loss_function(" in source


def _changes_logits(module: nn.Module, name: str) -> bool:
    config: Any = getattr(module, "config", None)
    return getattr(config, name, None) not in (None, 1, 1.0)


def count_pieces(vocabulary: int, width: int, tokens: int) -> int:
    """Return the pieces of the tokens of samples of that length.

    Each piece reads and writes the gradient of the head, so few pieces are faster: 8, or fewer if the logits
    are hardly larger than the hidden states. Long samples get more, so that a piece of one has at most 512
    MiB of logits in fp32. The micro-batch makes pieces longer, not more: the program is always the same.

    >>> [count_pieces(128_256, 4096, tokens) for tokens in (2048, 8192, 32_768, 131_072)]
    [8, 8, 32, 128]
    >>> count_pieces(1000, 4096, 2048), count_pieces(16_000, 4096, 2048)
    (1, 4)
    """
    usual = min(USUAL_PIECES, _round_up(-(-vocabulary // width)))
    return max(usual, min(MOST_PIECES, _round_up(-(-4 * tokens * vocabulary // LARGEST_PIECE))))


def _round_up(count: int) -> int:
    """Return the next power of two."""
    return 1 << max(0, (count - 1).bit_length())


def _compute_in_pieces(module: Any, sum_losses: Callable[..., torch.Tensor]) -> None:
    head, forward, whole_loss = module.lm_head, module.forward, module.loss_function
    takes = inspect.signature(forward)
    state = {"pieces": False}

    @functools.wraps(forward)
    def forward_in_pieces(*args: Any, **kwargs: Any) -> Any:
        state["pieces"] = takes.bind_partial(*args, **kwargs).arguments.get("labels") is not None
        try:
            out = forward(*args, **kwargs)
            if state["pieces"]:
                # What would be here are hidden states: better nothing than numbers that mean something else.
                out.logits = None
        finally:
            state["pieces"] = False
        return out

    run_head = head.forward

    @functools.wraps(run_head)
    def pass_on(hidden: torch.Tensor) -> Any:
        return hidden if state["pieces"] else run_head(hidden)

    def loss_in_pieces(logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not state["pieces"]:
            whole: torch.Tensor = whole_loss(logits, labels, *args, **kwargs)
            return whole
        return sum_losses(logits, head.weight, labels, **kwargs)

    module.forward = forward_in_pieces
    head.forward = pass_on
    module.loss_function = loss_in_pieces


def sum_pieces(  # noqa: PLR0913 - the keywords are those of transformers
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: Any = None,
    ignore_index: int = IGNORE_INDEX,
    **_: Any,
) -> torch.Tensor:
    """Return the mean loss of the next tokens, or their sum divided by `num_items_in_batch`."""
    if shift_labels is None:
        hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
    targets = _place_targets(shift_labels, hidden, ignore_index)
    pieces = count_pieces(weight.shape[0], weight.shape[1], hidden.shape[-2])
    if num_items_in_batch is None:
        return mean_token_loss(hidden, weight, targets, pieces=pieces)
    shares = (targets != IGNORE_INDEX).to(hidden.dtype) / num_items_in_batch
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return weighted_token_loss(hidden, weight, targets, shares.to(wide), pieces=pieces)


def _place_targets(labels: torch.Tensor, hidden: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the labels on the device of the hidden states; those to ignore are IGNORE_INDEX."""
    targets = labels.to(hidden.device)
    if ignore_index == IGNORE_INDEX:
        return targets
    return targets.masked_fill(targets == ignore_index, IGNORE_INDEX)


def sum_fused(  # noqa: PLR0913 - the keywords are those of transformers
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: Any = None,
    ignore_index: int = IGNORE_INDEX,
    **_: Any,
) -> torch.Tensor:
    """Return the loss of `sum_pieces` by Liger's kernels, which get all tokens: the last ones are ignored."""
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = _place_targets(shift_labels, hidden, ignore_index)
    loss = fused_linear_loss(hidden, weight, targets, mean=num_items_in_batch is None)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
