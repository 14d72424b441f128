"""The last step of a language model: losses of tokens, without the logits of all of them at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

IGNORED = -100
"""A target that costs nothing."""


def token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, pieces: int
) -> torch.Tensor:
    """Cross entropy of every token, in the shape of `targets`; ignored ones are 0.

    Logits in fp32 take 4 x vocab bytes a token: 2.3 GiB for 20 x 1024 tokens and a vocabulary of 30,000.
    So they are made for one of so many `pieces` at a time, and made again in backward; 1 makes them all at
    once. The number is fixed, not the size, so that the program is the same for every batch.
    """
    rows, wanted = hidden.flatten(0, -2), targets.flatten()
    if not 1 < pieces <= rows.size(0):
        return _losses(rows, weight, wanted).view_as(targets)
    parts = [
        checkpoint(_losses, some, weight, right, use_reentrant=False, preserve_rng_state=False)
        for some, right in zip(rows.chunk(pieces), wanted.chunk(pieces), strict=True)
    ]
    return torch.cat(parts).view_as(targets)


def _losses(rows: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        # Cast here, piece by piece: autocast would cast once, and then add up the gradients in bf16.
        weight = weight.to(torch.get_autocast_dtype(kind))
    logits = functional.linear(rows, weight)
    # Left to itself, autocast takes the logarithm of the softmax in bf16.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, wanted, ignore_index=IGNORED, reduction="none")


def mean_token_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, pieces: int
) -> torch.Tensor:
    """The mean cross entropy of the tokens that are not ignored.

    As the mean is all that is asked for, the gradients are known as soon as the logits of a piece are: they
    are worked out then and there, and no logits are made twice. `token_losses` makes them again in backward,
    a third more of the head's arithmetic, because it cannot know what each token's loss will count.
    """
    rows, wanted = hidden.flatten(0, -2), targets.flatten()
    kind = rows.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    learns = torch.is_grad_enabled()
    return _MeanLoss.apply(rows, weight, wanted, max(1, min(pieces, rows.size(0))), half, learns)


class _MeanLoss(torch.autograd.Function):
    """Logits, losses and gradients of one piece after the other."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - torch hands them over by position
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        wanted: torch.Tensor,
        pieces: int,
        half: torch.dtype,
        learns: bool,
    ) -> torch.Tensor:
        """The mean over tokens; gradients are kept for backward, of the sum over tokens."""
        for_rows, for_weight = (learns and one for one in ctx.needs_input_grad[:2])
        wide = torch.promote_types(half, torch.float32)
        table = weight.to(half)
        total = torch.zeros((), device=rows.device, dtype=wide)
        weight_gradient = torch.zeros_like(weight, dtype=wide) if for_weight else None
        row_gradients = []
        names = torch.arange(weight.size(0), device=weight.device)
        for some, right in zip(rows.chunk(pieces), wanted.chunk(pieces), strict=True):
            narrow = some.to(half)
            with torch.autocast(rows.device.type, enabled=False):
                logits = narrow @ table.t()
                counts = right != IGNORED
                norm = logits.to(wide).logsumexp(-1)
                score = logits.gather(1, (right * counts)[:, None]).squeeze(1).to(wide)
                total = total + ((norm - score) * counts).sum()
                if not (for_rows or for_weight):
                    continue
                chance = (logits.to(wide) - norm[:, None]).exp()
                slope = ((chance - (names[None, :] == right[:, None]).to(wide)) * counts[:, None]).to(half)
                if for_rows:
                    row_gradients.append(slope @ table)
                if weight_gradient is not None:
                    weight_gradient = weight_gradient + (slope.t() @ narrow).to(wide)
        count = (wanted != IGNORED).sum().clamp(min=1).to(wide)
        ctx.save_for_backward(torch.cat(row_gradients) if for_rows else None, weight_gradient, count)
        ctx.kinds = rows.dtype, weight.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """What was kept, times what the mean counts."""
        row_gradient, weight_gradient, count = ctx.saved_tensors
        share = above[0] / count
        rows, weight = ctx.kinds
        return (
            None if row_gradient is None else (row_gradient * share).to(rows),
            None if weight_gradient is None else (weight_gradient * share).to(weight),
            None,
            None,
            None,
            None,
        )
