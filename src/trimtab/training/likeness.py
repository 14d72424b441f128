"""Sets a batch that was read from a dataset beside one that the job's batch() makes, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trimtab.engine.precision import dtype_name

SHOWN = 3
"""Differences that are told of."""
_KEYS = 8
"""Entries of a container that are shown."""


def sketch(batch: Any) -> str:
    """What a batch is made of; n stands for its samples.

    >>> sketch({"x": torch.zeros(4, 8), "y": [torch.zeros(4), "a"]})
    '{x: float32 (n, 8), y: [float32 (n), str]}'
    """
    if isinstance(batch, torch.Tensor):
        shape = ["n", *map(str, batch.shape[1:])] if batch.dim() else []
        return f"{dtype_name(batch.dtype)} ({', '.join(shape)})"
    if isinstance(batch, Mapping):
        return "{" + _listed([f"{key}: {sketch(one)}" for key, one in batch.items()]) + "}"
    if isinstance(batch, list | tuple):
        return "[" + _listed([sketch(one) for one in batch]) + "]"
    return type(batch).__name__


def differences(made: Any, read: Any, at: str = "batch") -> list[str]:
    """A phrase for each place in which what dataset() gives is not like what batch() makes.

    How many samples there are does not count, and neither do lists for tuples: stacking makes them so.

    >>> differences({"x": torch.zeros(2, 8)}, {"x": torch.zeros(4, 8, dtype=torch.float64)})
    ["batch['x'] is float32 (n, 8) from batch() and float64 (n, 8) from dataset()"]
    """
    if _kind(made) == _kind(read):
        return []
    if isinstance(made, Mapping) and isinstance(read, Mapping):
        both = [key for key in made if key in read]
        inside = [one for key in both for one in differences(made[key], read[key], f"{at}[{key!r}]")]
        if len(both) == len(made) == len(read):
            return inside
        here, there = (_listed([str(key) for key in one]) or "nothing" for one in (made, read))
        return [f"{at} has {here} from batch() and {there} from dataset()", *inside]
    if isinstance(made, list | tuple) and isinstance(read, list | tuple) and len(made) == len(read):
        pairs = enumerate(zip(made, read, strict=True))
        return [one for number, pair in pairs for one in differences(*pair, f"{at}[{number}]")]
    return [f"{at} is {sketch(made)} from batch() and {sketch(read)} from dataset()"]


def _kind(one: Any) -> Any:
    """What two leaves are alike in; containers are none, but for a list with a text for each sample."""
    if isinstance(one, torch.Tensor):
        return one.dtype, one.dim(), one.shape[1:]
    if isinstance(one, Mapping | list | tuple):
        return "texts" if _texts(one) else id(one)
    return type(one)


def _texts(one: Any) -> bool:
    """Whether it is a list of texts, one a sample."""
    return isinstance(one, list | tuple) and bool(one) and all(isinstance(text, str | bytes) for text in one)


def _listed(words: list[str]) -> str:
    left = len(words) - _KEYS
    return ", ".join(words[:_KEYS] + ([f"and {left} more"] if left > 0 else []))
