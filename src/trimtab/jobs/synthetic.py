"""Made-up data that is the same on every machine, and that a model can learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
"""Data is made on the host, whatever the default device is."""


class Synthetic(Dataset[Any]):
    """Samples made when they are asked for; number 7 is the same whenever and wherever it is made."""

    def __init__(self, count: int, sample: Callable[[torch.Generator], Any]) -> None:
        self.count = count
        self.sample = sample

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        with CPU:
            return self.sample(torch.Generator().manual_seed(index))


def walk(generator: torch.Generator, length: int, vocab: int) -> torch.Tensor:
    """Tokens of which each follows from the last by one of four strides, some likelier than others.

    A model that has learnt which tokens may follow which is left with 1.21 nats a token of the ln(vocab)
    that it starts from.
    """
    odds = torch.tensor([0.5, 0.25, 0.125, 0.125])
    strides = torch.tensor([1, 5, 11, 23])[torch.multinomial(odds, length, True, generator=generator)]
    start = torch.randint(vocab, (1,), generator=generator)
    return (start + strides.cumsum(0)) % vocab


def integer(generator: torch.Generator, low: int, high: int) -> int:
    """One whole number from low to high - 1."""
    return int(torch.randint(low, high, (), generator=generator))
