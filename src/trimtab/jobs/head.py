"""The last step of a language model: losses of tokens, without the logits of all of them at once."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Lesson(NamedTuple):
    """What a teacher would say in the place of each token, and how much of it counts."""

    hidden: torch.Tensor
    """The teacher's last hidden state, in the shape of the pupil's."""
    shares: torch.Tensor
    """What each token's distance from the teacher counts in the loss."""
    temperature: float
    """Above 1, what the teacher finds unlikely counts for more."""


def mean_token_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, pieces: int
) -> torch.Tensor:
    """The mean cross entropy of the tokens that are not ignored.

    As the mean is all that is asked for, the gradients are known as soon as the logits of a piece are: they
    are worked out then and there, and no logits are made twice. `token_losses` makes them again in backward,
    a third more of the head's arithmetic, because it cannot know what each token's loss will count.
    """
    counts = targets.flatten() != IGNORED
    divisor = counts.sum().clamp(min=1)
    return _summed(hidden, weight, targets, counts, divisor, pieces=pieces)


def weighted_token_loss(  # noqa: PLR0913 - a head, what it is asked, and how
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    shares: torch.Tensor,
    *,
    pieces: int,
    lesson: Lesson | None = None,
) -> torch.Tensor:
    """The sum over tokens of cross entropy times share, by pieces, with gradients as above.

    With a lesson, plus what the pupil's choices differ from the teacher's: temperature squared times the
    Kullback-Leibler divergence, times the lesson's share. Of both models there are the logits of one piece.
    """
    # Gradients are kept in units of the largest share: in fp16, a share of one in many tokens would vanish.
    largest = shares.amax() if lesson is None else torch.maximum(shares.amax(), lesson.shares.amax())
    unit = torch.where(largest > 0, largest, 1)
    if lesson is not None:
        lesson = lesson._replace(shares=lesson.shares / unit)
    return _summed(hidden, weight, targets, (shares / unit).flatten(), 1 / unit, pieces=pieces, lesson=lesson)


def _summed(  # noqa: PLR0913 - as above
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    shares: torch.Tensor,
    divisor: torch.Tensor,
    *,
    pieces: int,
    lesson: Lesson | None = None,
) -> torch.Tensor:
    """The sum over tokens of loss times share, divided."""
    rows, wanted = hidden.flatten(0, -2), targets.flatten()
    kind = rows.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    taught: tuple[Any, ...] = (None, None, 1.0)
    if lesson is not None:
        taught = lesson.hidden.flatten(0, -2), lesson.shares.flatten(), lesson.temperature
    found = max(1, min(pieces, rows.size(0)))
    learns = torch.is_grad_enabled()
    loss: torch.Tensor = _SummedLoss.apply(
        rows, weight, wanted, shares, divisor, *taught, found, half, learns
    )
    return loss


class _SummedLoss(torch.autograd.Function):
    """Logits, losses and gradients of one piece after the other."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - torch hands them over by position
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        wanted: torch.Tensor,
        shares: torch.Tensor,
        divisor: torch.Tensor,
        taught: torch.Tensor | None,
        taught_shares: torch.Tensor | None,
        temperature: float,
        pieces: int,
        half: torch.dtype,
        learns: bool,
    ) -> torch.Tensor:
        """The sum, divided; gradients are kept for backward, of the sum before it is."""
        for_rows, for_weight = (learns and one for one in ctx.needs_input_grad[:2])
        wide = torch.promote_types(half, torch.float32)
        table = weight.to(half)
        total = torch.zeros((), device=rows.device, dtype=wide)
        weight_gradient = torch.zeros_like(weight, dtype=wide) if for_weight else None
        row_gradients = []
        lessons: Any = (None,) * pieces
        if taught is not None and taught_shares is not None:
            lessons = zip(taught.chunk(pieces), taught_shares.chunk(pieces), strict=True)
        for some, right, counts, lesson in zip(
            rows.chunk(pieces), wanted.chunk(pieces), shares.chunk(pieces), lessons, strict=False
        ):
            narrow = some.to(half)
            with torch.autocast(rows.device.type, enabled=False):
                logits = narrow @ table.t()
                norm = logits.to(wide).logsumexp(-1)
                places = right.clamp(min=0)[:, None]
                score = logits.gather(1, places).squeeze(1).to(wide)
                total = total + ((norm - score) * counts).sum()
                more = None
                if lesson is not None:
                    far, more = _distance(logits, lesson[0].to(half) @ table.t(), lesson[1], temperature)
                    total = total + far
                if not (for_rows or for_weight):
                    continue
                # The share goes into the exponent, and the token that is right gets its own slope after: one
                # exponential an element is all that is worked out for the others.
                slope = (logits.to(wide) - (norm - counts.to(wide).log())[:, None]).exp()
                at_right = ((score - norm).exp() - 1) * counts
                if more is not None:
                    slope, at_right = slope + more, at_right + more.gather(1, places).squeeze(1)
                slope = slope.to(half)
                slope.scatter_(1, places, at_right.to(half)[:, None])
                if for_rows:
                    row_gradients.append(slope @ table)
                if weight_gradient is not None:
                    weight_gradient = weight_gradient + (slope.t() @ narrow).to(wide)
        ctx.save_for_backward(torch.cat(row_gradients) if for_rows else None, weight_gradient, divisor)
        ctx.kinds = rows.dtype, weight.dtype
        return total / divisor

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """What was kept, times what the sum counts."""
        row_gradient, weight_gradient, divisor = ctx.saved_tensors
        share = above[0] / divisor
        rows, weight = ctx.kinds
        return (
            None if row_gradient is None else (row_gradient * share).to(rows),
            None if weight_gradient is None else (weight_gradient * share).to(weight),
            *(None,) * 9,
        )


def _distance(
    logits: torch.Tensor, taught: torch.Tensor, shares: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far a pupil's choices are from a teacher's in all, and how that changes with the pupil's logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    said = functional.log_softmax(logits.to(wide) / temperature, dim=-1)
    right = functional.log_softmax(taught.to(wide) / temperature, dim=-1)
    chance = right.exp()
    far = (chance * (right - said)).sum(-1) * temperature**2
    return (far * shares).sum(), (said.exp() - chance) * (temperature * shares)[:, None]
