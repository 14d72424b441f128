"""Replace logits by the gradients of their loss: `torch.ops.trimtab.token_loss_slopes`, for every device.

Written with torch's own operations, the gradients are a second tensor as large as the logits, and the logits
are read from memory three times. On CUDA a Triton kernel reads them twice and writes over them.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("trimtab", "FRAGMENT")
LIBRARY.define("token_loss_slopes(Tensor(a!) logits, Tensor labels, Tensor shares) -> Tensor")
"""Return cross entropy times share of each row, and write the gradient of that over the logits.

Labels below 0 are taken for 0, so their share must be 0.
"""
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def overwrite_logits(logits: torch.Tensor, labels: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Do what `token_loss_slopes` does, in plain torch."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    places = labels.clamp(min=0)[:, None]
    norm = wide.logsumexp(-1)
    score = wide.gather(1, places).squeeze(1)
    # The share is part of the exponent, and the slope at the label is set afterwards: this takes one
    # exponential per element.
    logits.copy_((wide - (norm - shares.log())[:, None]).exp())
    logits.scatter_(1, places, (((score - norm).exp() - 1) * shares).to(logits.dtype)[:, None])
    return (norm - score) * shares


def _overwrite_on_cuda(logits: torch.Tensor, labels: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    # Importing Triton takes a while, and only a GPU needs it.
    from trimtab.jobs.triton_loss import HAS_TRITON, launch

    can_launch = HAS_TRITON and logits.dtype in KERNEL_DTYPES and logits.stride(1) == 1
    if not can_launch or not logits.numel():
        return overwrite_logits(logits, labels, shares)
    losses = torch.empty_like(shares)
    launch(logits, labels.contiguous(), shares.contiguous(), losses)
    return losses


def _know_sizes(logits: torch.Tensor, labels: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    del logits, labels
    return torch.empty_like(shares)


LIBRARY.impl("token_loss_slopes", overwrite_logits, "CPU")
LIBRARY.impl("token_loss_slopes", _overwrite_on_cuda, "CUDA")
torch.library.register_fake("trimtab::token_loss_slopes", _know_sizes, lib=LIBRARY)
