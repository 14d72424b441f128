"""Batches of any shape, brought to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch on a device; from pinned memory without waiting for the copy.

    >>> on_device({"ids": [torch.ones(2)], "name": "a"}, torch.device("cpu"))
    {'ids': [tensor([1., 1.])], 'name': 'a'}
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {key: on_device(one, device) for key, one in batch.items()}
        return moved if type(batch) is dict else _rebuilt(batch, moved)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(one, device) for one in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(one, device) for one in batch)
    return batch


def _rebuilt(batch: Any, moved: dict[Any, Any]) -> Any:
    """A mapping of some other class, as tokenizers give it; a plain one where the class takes no dict."""
    try:
        return type(batch)(moved)
    except TypeError:
        return moved
