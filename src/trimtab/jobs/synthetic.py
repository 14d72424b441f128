"""Synthetic data that is the same on every machine, and bf16 support of the CPU."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable


CPU = torch.device("cpu")
"""Data is created on the host, even if the default device is a GPU."""


class Synthetic(Dataset[Any]):
    """Dataset whose samples are generated on access; a sample depends only on its index."""

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


def draw_integer(generator: torch.Generator, low: int, high: int) -> int:
    """Return a random integer from low to high - 1."""
    return int(torch.randint(low, high, (), generator=generator))


# bf16 support of the CPU.


NO_BF16 = "this CPU has no bf16 matrix products"
WARNING = "mkldnn_matmul failed, switching to BLAS"
"""Start of torch's warning about it, which includes a C++ stack trace."""


def has_bf16() -> bool:
    """Return whether this CPU multiplies bf16 matrices in hardware, as torch sees it."""
    check = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    # A torch without oneDNN has other kernels and does not warn.
    return check is None or bool(check())


def has_only_slow_cpu() -> bool:
    """Return whether jobs can only run on this CPU, and it has no bf16 matrix products."""
    return not torch.cuda.is_available() and not has_bf16()


def silence_bf16_warning() -> None:
    """Silence torch's warning at the first bf16 matrix product; the caller prints a note instead."""
    warnings.filterwarnings("ignore", message=WARNING)
