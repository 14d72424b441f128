"""Numbers that are drawn again until all are within bounds: a loop without an end if there are no values."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.nn import init


def bound_redraws() -> None:
    """Let torch.nn.init.trunc_normal_ draw as often as it takes on average, and no longer."""
    # Before torch 2.13 it needed one draw.
    if "while" in inspect.getsource(init._no_grad_trunc_normal_):
        init._no_grad_trunc_normal_ = _truncated


def _truncated(  # noqa: PLR0913, PLR0917 - torch's own
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> torch.Tensor:
    """What torch does, with the number of rounds worked out instead of seen."""
    outside = 1 - (math.erf((b - mean) / std / 2**0.5) - math.erf((a - mean) / std / 2**0.5)) / 2
    with torch.no_grad():
        result = tensor.normal_(mean, std, generator=generator)
        for _ in range(redraws(tensor.numel(), outside)):
            wrong = (result < a) | (result > b)
            result = torch.where(wrong, torch.empty_like(result).normal_(mean, std), result)
        _ = (result < a) | (result > b)
        return tensor if tensor is result else tensor.copy_(result)


def redraws(count: int, outside: float) -> int:
    """Rounds until less than one of `count` numbers is expected outside: count * outside^(rounds + 1) < 1.

    >>> redraws(1_000_000, 0.0455), redraws(1_000_000, 0.0), redraws(10, 0.01)
    (4, 0, 0)
    """
    if count * outside < 1:
        return 0
    return math.ceil(math.log(count) / -math.log(min(outside, 0.99))) - 1
