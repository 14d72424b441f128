"""Sizes that decide how the engine stores gradients; without torch, so that predictions can read them."""

from __future__ import annotations

BUCKET_BYTES = 25 * 2**20
"""A bucket of gradients is summed over ranks as soon as it holds this much."""
KEEPS_WHOLE = 0.05
"""Under fsdp, gradients stay whole between the micro-batches of a step where they take less than this share
of the device; else every micro-batch scatters its own."""


def keeps_whole(trainable: int, device_bytes: int, element_bytes: int = 4) -> bool:
    """Whether the gradients of so many parameters stay whole while micro-batches add up.

    >>> keeps_whole(124_000_000, 80 * 2**30), keeps_whole(8_000_000_000, 80 * 2**30)
    (True, False)
    """
    return trainable * max(4, element_bytes) <= KEEPS_WHOLE * device_bytes
