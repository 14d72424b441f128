"""Replace logits by the gradients of their loss: `torch.ops.trimtab.token_loss_slopes`, for every device.

Written with torch's own operations, the gradients are a second tensor as large as the logits, and the logits
are read from memory three times. On CUDA a Triton kernel reads them twice and writes over them.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("trimtab", "FRAGMENT")
LIBRARY.define("token_loss_slopes(Tensor(a!) logits, Tensor labels, Tensor shares, int columns) -> Tensor")
"""Return cross entropy times share of each row, and write the gradient of that over the logits.

Only the first `columns` of the logits are the vocabulary; the others become 0. Labels below 0 are
taken for 0, so their share must be 0.
"""
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def score_labels(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of each row's sum of exponentials, and the logit of each label."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    norm = logits.to(wide).logsumexp(-1)
    return norm, logits.gather(1, labels.clamp(min=0)[:, None]).squeeze(1).to(wide)


def find_slopes(  # noqa: PLR0913, PLR0917 - what `score_labels` takes and returns
    logits: torch.Tensor,
    labels: torch.Tensor,
    shares: torch.Tensor,
    norm: torch.Tensor,
    score: torch.Tensor,
    teacher_slope: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient by the logits of cross entropy times share."""
    places = labels.clamp(min=0)[:, None]
    # The share is part of the exponent, and the slope at the label is set afterwards: this takes one
    # exponential per element.
    slope = (logits.to(norm.dtype) - (norm - shares.to(norm.dtype).log())[:, None]).exp()
    at_label = ((score - norm).exp() - 1) * shares
    if teacher_slope is not None:
        slope = slope + teacher_slope
        at_label = at_label + teacher_slope.gather(1, places).squeeze(1)
    slope = slope.to(logits.dtype)
    slope.scatter_(1, places, at_label.to(logits.dtype)[:, None])
    return slope


def overwrite_logits(
    logits: torch.Tensor, labels: torch.Tensor, shares: torch.Tensor, columns: int
) -> torch.Tensor:
    """Do what `token_loss_slopes` does, in plain torch."""
    entries = logits[:, :columns]
    norm, score = score_labels(entries, labels)
    entries.copy_(find_slopes(entries, labels, shares, norm, score))
    if columns < logits.shape[1]:
        logits[:, columns:].zero_()
    return (norm - score) * shares


def _overwrite_on_cuda(
    logits: torch.Tensor, labels: torch.Tensor, shares: torch.Tensor, columns: int
) -> torch.Tensor:
    # Importing Triton takes a while, and only a GPU needs it.
    from trimtab.jobs.triton_loss import HAS_TRITON, launch

    can_launch = HAS_TRITON and logits.dtype in KERNEL_DTYPES and logits.stride(1) == 1
    if not can_launch or not logits.numel():
        return overwrite_logits(logits, labels, shares, columns)
    losses = torch.empty_like(shares)
    launch(logits, labels.contiguous(), shares.contiguous(), losses, columns)
    return losses


def _know_sizes(
    logits: torch.Tensor, labels: torch.Tensor, shares: torch.Tensor, columns: int
) -> torch.Tensor:
    del logits, labels, columns
    return torch.empty_like(shares)


LIBRARY.impl("token_loss_slopes", overwrite_logits, "CPU")
LIBRARY.impl("token_loss_slopes", _overwrite_on_cuda, "CUDA")
torch.library.register_fake("trimtab::token_loss_slopes", _know_sizes, lib=LIBRARY)
