"""Cross entropy of a language model's head, computed in pieces to limit the memory of logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trimtab.jobs.loss_kernel import find_slopes, score_labels

IGNORE_INDEX = -100
"""Targets with this value have no loss."""
ALIGNED_ROWS, PADDED_ROWS = 8, 64
"""A vocabulary that is no multiple of the first fits no load of 16 bytes, and is padded to the second."""
HALF_BYTES = 2


def token_losses(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, pieces: int
) -> torch.Tensor:
    """Return the cross entropy of every token, in the shape of `targets`; ignored tokens are 0.

    Logits in fp32 take 4 x vocab bytes per token: 2.3 GiB for 20 x 1024 tokens and a vocabulary of 30,000.
    They are computed for one of the `pieces` at a time and recomputed in backward; 1 computes all at once.
    The number of pieces is fixed, not their size, so that the compiled program is the same for every batch.
    """
    rows, labels = hidden.flatten(0, -2), targets.flatten()
    if not 1 < pieces <= rows.size(0):
        return _piece_losses(rows, weight, labels).view_as(targets)
    parts = [
        checkpoint(_piece_losses, piece, weight, piece_labels, use_reentrant=False, preserve_rng_state=False)
        for piece, piece_labels in zip(rows.chunk(pieces), labels.chunk(pieces), strict=True)
    ]
    return torch.cat(parts).view_as(targets)


def _piece_losses(rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        # Cast per piece: autocast would cast once, and then sum the gradients in bf16.
        weight = weight.to(torch.get_autocast_dtype(kind))
    logits = functional.linear(rows, weight)
    # Autocast alone would compute the log-softmax in bf16.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, labels, ignore_index=IGNORE_INDEX, reduction="none")


class TeacherTargets(NamedTuple):
    """Distillation targets: a teacher's hidden states and their weight in the loss."""

    hidden: torch.Tensor
    """The teacher's last hidden state, in the shape of the student's."""
    shares: torch.Tensor
    """Weight of each token's divergence from the teacher."""
    temperature: float
    """Softmax temperature; above 1, unlikely tokens have more weight."""


def mean_token_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, pieces: int
) -> torch.Tensor:
    """Return the mean cross entropy of the tokens that are not ignored.

    For a mean, the gradients are known as soon as the logits of a piece are: they are computed at once, and
    no logits are computed twice. `token_losses` recomputes them in backward, a third more of the head's
    arithmetic, because it does not know the weight of each token's loss in advance.
    """
    counts = targets.flatten() != IGNORE_INDEX
    divisor = counts.sum().clamp(min=1)
    return _sum_losses(hidden, weight, targets, counts, divisor, pieces=pieces)


def weighted_token_loss(  # noqa: PLR0913 - a head, targets and settings
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    shares: torch.Tensor,
    *,
    pieces: int,
    teacher: TeacherTargets | None = None,
) -> torch.Tensor:
    """Return the sum over tokens of cross entropy times share, by pieces, with gradients as in the mean.

    With a teacher, add the student's divergence from it: temperature squared times the Kullback-Leibler
    divergence, times the teacher's share. Of both models, only the logits of one piece exist at a time.
    """
    # Gradients are in units of the largest share: in fp16, the share of one token among many would underflow.
    largest = shares.amax() if teacher is None else torch.maximum(shares.amax(), teacher.shares.amax())
    unit = torch.where(largest > 0, largest, 1)
    if teacher is not None:
        teacher = teacher._replace(shares=teacher.shares / unit)
    return _sum_losses(
        hidden, weight, targets, (shares / unit).flatten(), 1 / unit, pieces=pieces, teacher=teacher
    )


def _sum_losses(  # noqa: PLR0913 - as above
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    shares: torch.Tensor,
    divisor: torch.Tensor,
    *,
    pieces: int,
    teacher: TeacherTargets | None = None,
) -> torch.Tensor:
    """Return the sum over tokens of loss times share, divided by `divisor`."""
    rows, labels = hidden.flatten(0, -2), targets.flatten()
    kind = rows.device.type
    half = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    teacher_args: tuple[Any, ...] = (None, None, 1.0)
    if teacher is not None:
        teacher_args = teacher.hidden.flatten(0, -2), teacher.shares.flatten(), teacher.temperature
    count = max(1, min(pieces, rows.size(0)))
    needs_grad = torch.is_grad_enabled()
    loss: torch.Tensor = _SummedLoss.apply(
        rows, weight, labels, shares, divisor, *teacher_args, count, half, needs_grad
    )
    return loss


class _SummedLoss(torch.autograd.Function):
    """Compute logits, losses and gradients piece by piece."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - torch passes them by position
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        shares: torch.Tensor,
        divisor: torch.Tensor,
        teacher_hidden: torch.Tensor | None,
        teacher_shares: torch.Tensor | None,
        temperature: float,
        pieces: int,
        half: torch.dtype,
        needs_grad: bool,
    ) -> torch.Tensor:
        """Return the divided sum; save the gradients of the undivided sum for backward."""
        for_rows, for_weight = (needs_grad and needed for needed in ctx.needs_input_grad[:2])
        wide = torch.promote_types(half, torch.float32)
        # The kernel has no rule for logits that are split over ranks (DTensor).
        in_place = (for_rows or for_weight) and teacher_hidden is None and not hasattr(weight, "placements")
        vocabulary = weight.shape[0]
        table = align_rows(weight.to(half)) if in_place else weight.to(half)
        total = torch.zeros((), device=rows.device, dtype=wide)
        weight_gradient = None
        row_gradients = []
        teachers: Any = (None,) * pieces
        if teacher_hidden is not None and teacher_shares is not None:
            teachers = zip(teacher_hidden.chunk(pieces), teacher_shares.chunk(pieces), strict=True)
        for piece, piece_labels, counts, teacher in zip(
            rows.chunk(pieces), labels.chunk(pieces), shares.chunk(pieces), teachers, strict=False
        ):
            narrow = piece.to(half)
            with torch.autocast(rows.device.type, enabled=False):
                slope = logits = narrow @ table.t()
                if in_place:
                    losses = torch.ops.trimtab.token_loss_slopes(
                        logits, piece_labels, counts.to(wide), vocabulary
                    )
                    total = total + losses.sum()
                else:
                    divergence = teacher_slope = None
                    if teacher is not None:
                        divergence, teacher_slope = _teacher_divergence(
                            logits, teacher[0].to(half) @ table.t(), teacher[1], temperature
                        )
                    norm, score = score_labels(logits, piece_labels)
                    piece_sum = ((norm - score) * counts).sum()
                    total = total + piece_sum if divergence is None else total + piece_sum + divergence
                    if not (for_rows or for_weight):
                        continue
                    slope = find_slopes(logits, piece_labels, counts, norm, score, teacher_slope)
                if for_rows:
                    row_gradients.append(slope @ table)
                if for_weight:
                    part = (slope.t() @ narrow).to(wide)
                    weight_gradient = part if weight_gradient is None else weight_gradient + part
        if weight_gradient is not None and weight_gradient.shape[0] > vocabulary:
            weight_gradient = weight_gradient[:vocabulary]
        ctx.save_for_backward(torch.cat(row_gradients) if for_rows else None, weight_gradient, divisor)
        ctx.kinds = rows.dtype, weight.dtype
        return total / divisor

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the saved gradients times the gradient of the sum."""
        row_gradient, weight_gradient, divisor = ctx.saved_tensors
        share = above[0] / divisor
        rows, weight = ctx.kinds
        return (
            None if row_gradient is None else (row_gradient * share).to(rows),
            None if weight_gradient is None else (weight_gradient * share).to(weight),
            *(None,) * 9,
        )


def align_rows(table: torch.Tensor) -> torch.Tensor:
    """Return the weights of a head with rows of zeros, so that products with them are fast on a GPU.

    A vocabulary of 50,257 tokens makes rows of logits that no fast load fits. A column of zeros has no loss
    and no gradient: the kernel does not read it.
    """
    rows = table.shape[0]
    if rows % ALIGNED_ROWS == 0 or table.device.type != "cuda" or table.element_size() != HALF_BYTES:
        return table
    return functional.pad(table, (0, 0, 0, -rows % PADDED_ROWS))


def _teacher_divergence(
    logits: torch.Tensor, teacher_logits: torch.Tensor, shares: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sum of a student's divergence from its teacher, and its gradient by the logits."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    student = functional.log_softmax(logits.to(wide) / temperature, dim=-1)
    target = functional.log_softmax(teacher_logits.to(wide) / temperature, dim=-1)
    probability = target.exp()
    divergence = (probability * (target - student)).sum(-1) * temperature**2
    return (divergence * shares).sum(), (student.exp() - probability) * (temperature * shares)[:, None]
