"""What ranks tell each other at the end of a step: one tiny sum, judged on the device.

The host never waits for the optimizer: the sum is copied to the host before the optimizer is launched, and
only that copy is waited for.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Status(NamedTuple):
    """Sums over all ranks."""

    failed: float = 0.0
    """Ranks that could not compute their part."""
    fatal: float = 0.0
    """Ranks that cannot go on at all."""
    loss: float = 0.0
    squares: float = 0.0
    """The squared norm of all gradients, loss scale included."""
    weight: float = 0.0
    """What the loss is a mean over."""
    samples: float = 0.0
    asked: float = 0.0
    rollback: float = 0.0
    """Ranks whose optimizer was interrupted halfway."""
    strays: float = 0.0
    """Buffers that changed and were not known to."""
    resize: float = 0.0
    """Ranks that want another micro-batch."""


_LOSS, _SQUARES, _WEIGHT = (Status._fields.index(name) for name in ("loss", "squares", "weight"))
_STOPPERS = torch.tensor([name in ("failed", "fatal", "rollback") for name in Status._fields])


class Exchange:
    """Sends and receives the status of each step."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._size = size
        self._async = device.type == "cuda"
        length = len(Status._fields)
        self._told = torch.zeros(length, dtype=torch.float64, pin_memory=self._async)
        self._seen = torch.zeros(length, dtype=torch.float64, pin_memory=self._async)
        self._sums = torch.zeros(length, dtype=torch.float64, device=device)
        self._stoppers = _STOPPERS.to(device)
        # Two in turns: they tell the time between two steps that the device ended before the host asked.
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._async else []
        self._turn = 0
        self._before: tuple[torch.cuda.Event, float] | None = None
        self.ended_s = 0.0
        """When the device had the sums that wait() returned last, by time.perf_counter()."""

    def send(
        self, told: Status, *, loss: torch.Tensor | None, squares: torch.Tensor | None, weight: Any = None
    ) -> None:
        """Sum over ranks; loss, squares and, where it is a tensor, weight are on the device already."""
        self._told.copy_(torch.tensor(told, dtype=torch.float64))
        sums = self._sums
        sums.copy_(self._told, non_blocking=True)
        if loss is not None:
            sums[_LOSS] = loss
        if squares is not None:
            sums[_SQUARES] = squares
        if isinstance(weight, torch.Tensor):
            sums[_WEIGHT] = weight
        if self._size > 1:
            dist.all_reduce(sums)
        self._seen.copy_(sums, non_blocking=True)
        if self._events:
            self._turn = 1 - self._turn
            self._events[self._turn].record()
        else:
            self.ended_s = time.perf_counter()

    def found_bad(self, limit: float | None) -> torch.Tensor:
        """1.0 on the device where the update must not happen, as optimizers take `found_inf`."""
        sums = self._sums
        bad = ~torch.isfinite(sums[_LOSS : _SQUARES + 1]).all() | (sums * self._stoppers).any()
        if limit is not None:
            bad |= sums[_LOSS] > limit
        return bad.to(torch.float32)

    def divisor(self, clip: float | None, scale: float) -> torch.Tensor | None:
        """What gradients are divided by, on the device: loss scale and clipping; None where it is one."""
        if clip is None:
            if scale == 1.0:
                return None
            return torch.full((), scale, dtype=torch.float32, device=self._device)
        norm = self._sums[_SQUARES].sqrt()
        return torch.clamp((norm / scale + _EPSILON) / clip, min=1.0).mul(scale).to(torch.float32)

    def wait(self) -> Status:
        """The sums, on the host."""
        if self._events:
            event = self._events[self._turn]
            late = event.query()
            event.synchronize()
            self.ended_s = time.perf_counter()
            if late and self._before is not None:
                # The host was busy with the next passes when the device was done with this step.
                first, first_s = self._before
                self.ended_s = min(self.ended_s, first_s + first.elapsed_time(event) / 1e3)
            self._before = event, self.ended_s
        return Status(*self._seen.tolist())


_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ has it."""


class Verdict(NamedTuple):
    """What a status means."""

    kind: str
    why: str = ""


GOOD, REPLAY, NOT_FINITE, SPIKE, FATAL, ROLLBACK = (
    "good",
    "replay",
    "not finite",
    "spike",
    "fatal",
    "rollback",
)


def judged(status: Status, *, limit: float | None, scale: float = 1.0) -> Verdict:
    """What all ranks do about a status; the same everywhere, since the sums are.

    >>> judged(Status(loss=float("nan")), limit=None).why
    'the loss is nan'
    """
    from math import isfinite, sqrt

    if status.fatal or status.failed:
        return Verdict(FATAL if status.fatal else REPLAY)
    if status.rollback:
        return Verdict(ROLLBACK, "the optimizer of a rank was interrupted halfway")
    if not isfinite(status.loss):
        return Verdict(NOT_FINITE, f"the loss is {status.loss}")
    if not isfinite(status.squares):
        return Verdict(
            NOT_FINITE, f"the norm of the gradients is {status.squares}, and the loss {status.loss:.6g}"
        )
    if limit is not None and status.loss > limit:
        norm = sqrt(status.squares) / scale
        return Verdict(SPIKE, f"the loss is {status.loss:.6g}, above {limit:.6g} (gradient norm {norm:.4g})")
    return Verdict(GOOD)


def agree(value: float, device: Any, size: int, *, least: bool) -> float:
    """The least or the largest of a number over all ranks; all ranks call it."""
    if size == 1:
        return value
    held = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MIN if least else dist.ReduceOp.MAX)
    return float(held.item())
