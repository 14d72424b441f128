"""Made-up data that is the same on every machine, and that a model can learn."""

from __future__ import annotations

import warnings
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


# What the CPU of this machine can compute in half precision.


NO_BF16 = "this CPU has no bf16 matrix products"
WARNING = "mkldnn_matmul failed, switching to BLAS"
"""How torch's own warning about it begins; it prints a stack trace of C++ with it."""


def has_bf16() -> bool:
    """Return whether this CPU multiplies bf16 matrices in hardware, as torch sees it."""
    question = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    # A torch without oneDNN does not say; it has kernels of its own and does not warn.
    return question is None or bool(question())


def trains_on_slow_cpu() -> bool:
    """Return whether jobs can only run on this CPU, and it has no bf16 matrix products."""
    return not torch.cuda.is_available() and not has_bf16()


def silence_bf16_warning() -> None:
    """Keep torch from warning at the first bf16 matrix product; whoever calls this says it in words."""
    warnings.filterwarnings("ignore", message=WARNING)
