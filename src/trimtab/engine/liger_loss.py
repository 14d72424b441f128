"""Liger's fused linear cross entropy: its own kernels on a GPU, and its program step by step on fake tensors.

Liger cuts the tokens into pieces whose logits take about the memory of all hidden states. It computes the
logits of a piece, overwrites them with their gradients in one kernel, and adds up the gradients of the hidden
states and of the head at once. So an estimate needs no package, and training needs `liger-kernel`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.engine.low_bit import LIBRARY
from trimtab.errors import EnvironmentFault
from trimtab.jobs.head import IGNORE_INDEX

PACKAGE = "liger-kernel"
MODULE = "liger_kernel.transformers.fused_linear_cross_entropy"
HALF_DTYPES = (torch.float16, torch.bfloat16)
LIBRARY.define("liger_cross_entropy(Tensor(a!) logits, Tensor labels, Tensor(b!) losses, Tensor count) -> ()")


def fused_linear_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, mean: bool
) -> torch.Tensor:
    """Return the mean or the sum of the losses of all tokens that are not ignored."""
    rows, labels = hidden.flatten(0, -2), targets.flatten()
    if isinstance(rows, FakeTensor) or rows.device.type != "cuda":
        loss: torch.Tensor = FusedLinearLoss.apply(rows, weight, labels, mean)
        return loss
    made: Any = _load_liger()(reduction="mean" if mean else "sum", ignore_index=IGNORE_INDEX)
    result: torch.Tensor = made(weight, rows, labels)
    return result


def check_liger(weight: torch.Tensor) -> None:
    """Raise EnvironmentFault if a real model has no GPU, or the package is missing."""
    if isinstance(weight, FakeTensor) or weight.device.type == "meta":
        return
    if weight.device.type != "cuda":
        raise EnvironmentFault(
            "--loss liger",
            found=f"the model is on {weight.device.type}, and Liger's kernels run on a GPU",
            cure="Use --loss chunked, which runs everywhere; an estimate of liger needs no GPU.",
        )
    _load_liger()


def _load_liger() -> Any:
    try:
        return importlib.import_module(MODULE).LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        raise EnvironmentFault(
            "--loss liger",
            found=f"{PACKAGE} cannot be imported ({error})",
            cure=f"Install it with `pip install {PACKAGE}`, or use --loss chunked.",
        ) from error


def piece_tokens(tokens: int, vocabulary: int, width: int) -> int:
    """Return the tokens of a piece by Liger's formula; the last piece may have fewer.

    >>> piece_tokens(16384, 32000, 4096), piece_tokens(100, 300, 4096)
    (2048, 100)
    """
    factor = -(-vocabulary // width)
    return min(1 << (-(-tokens // factor) - 1).bit_length(), tokens)


class FusedLinearLoss(torch.autograd.Function):
    """Liger's program in plain torch, with the same tensors."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, mean: bool
    ) -> torch.Tensor:
        """Return the loss; keep the gradients, which are known already."""
        needs_rows, needs_weight = ctx.needs_input_grad[:2]
        tokens, size = len(rows), piece_tokens(len(rows), *weight.shape)
        row_gradients = torch.zeros_like(rows)
        weight_gradient = torch.zeros_like(weight) if needs_rows and needs_weight else None
        losses = torch.zeros(tokens, dtype=torch.float32, device=rows.device)
        counted = (labels != IGNORE_INDEX).sum()
        divisor = counted if mean else torch.ones_like(counted)
        is_plain = rows.dtype == weight.dtype and not torch.is_autocast_enabled(rows.device.type)
        buffer = rows.new_empty(size, weight.shape[0]) if is_plain else None
        for start in range(0, tokens, size):
            piece = rows[start : start + size]
            if buffer is not None:
                logits = torch.mm(piece, weight.t(), out=buffer[: len(piece)])
            else:
                logits = piece @ weight.t()
            places = slice(start, start + len(piece))
            torch.ops.trimtab.liger_cross_entropy(logits, labels[places], losses[places], divisor)
            if needs_rows:
                row_gradients[places] = logits @ weight
            if weight_gradient is not None:
                _add_product(weight_gradient, logits, piece)
            del logits
        del buffer
        ctx.save_for_backward(row_gradients if needs_rows else None, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the gradients in place, as Liger does."""
        rows, weight = (
            None if gradient is None else gradient.detach().mul_(above[0]) for gradient in ctx.saved_tensors
        )
        return rows, weight, None, None


def _add_product(total: torch.Tensor, logits: torch.Tensor, piece: torch.Tensor) -> None:
    """Add the gradient of the head by a piece, without a second tensor of that size where a GPU can do so."""
    piece = piece.to(logits.dtype)
    if total.dtype == logits.dtype:
        torch.addmm(total, logits.t(), piece, out=total)
    elif total.device.type == "cuda" and logits.dtype in HALF_DTYPES:
        torch.addmm(total, logits.t(), piece, out_dtype=total.dtype, out=total)
    else:
        total += (logits.t() @ piece).to(total.dtype)


def _overwrite_logits(
    logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, count: torch.Tensor
) -> None:
    """Write each token's loss, and its gradient over the logits, both divided by `count`."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = labels != IGNORE_INDEX
    places = labels.clamp(min=0)[:, None]
    norm = wide.logsumexp(-1)
    losses.copy_((norm - wide.gather(1, places).squeeze(1)) * counted / count)
    slope = (wide - norm[:, None]).exp()
    slope.scatter_add_(1, places, slope.new_full(places.shape, -1.0))
    logits.copy_(slope * counted[:, None] / count)


def _overwrite_nothing(*_: torch.Tensor) -> None:
    """Know only sizes: a fake tensor has no values."""


LIBRARY.impl("liger_cross_entropy", _overwrite_logits, "CPU")
torch.library.register_fake("trimtab::liger_cross_entropy", _overwrite_nothing, lib=LIBRARY)
