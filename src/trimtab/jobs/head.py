"""The last step of a language model: losses of tokens, without the logits of all of them at once."""

from __future__ import annotations

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
    return functional.cross_entropy(logits.float(), wanted, ignore_index=IGNORED, reduction="none")
