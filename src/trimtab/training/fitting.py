"""Keeps the micro-batch of a rank fitting: measures memory and pace, and asks `recovery` where to go."""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from trimtab.training import recovery

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import Estimate
    from trimtab.training.recovery import Move, Room, Sizes

LOOKS_EVERY = 25
"""Steps between two looks at the memory: asking takes longer than it should in every step."""
_PACES = 10


class Gauge:
    """The memory of this process on its GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """The most since the last reset()."""
        return torch.cuda.max_memory_allocated(self._device)

    def limit(self) -> int:
        """What this process may use: what it holds and what is free, within its share of the device."""
        free, total = torch.cuda.mem_get_info(self._device)
        share: Any = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
        allowed = int(total * share(self._device)) if share is not None else total
        return min(allowed, torch.cuda.memory_reserved(self._device) + free)

    def reset(self) -> None:
        """Begin a new peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def give_back(self) -> None:
        """What the allocator keeps for later."""
        torch.cuda.empty_cache()


class Fitting:
    """The micro-batch of this rank, and what has been measured with it."""

    def __init__(  # noqa: PLR0913 - what is measured, and by what
        self,
        sizes: Sizes,
        *,
        gauge: Gauge | None,
        estimate: Estimate | None,
        estimated_for: int,
        grows_beyond: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`grows_beyond` allows more than the plan where there is much room; no gauge: nothing is known."""
        self.sizes = sizes
        self._gauge = gauge
        self._grows_beyond = grows_beyond
        self._clock = clock
        self._sample_bytes: float | None = None
        self._fixed_bytes = 0
        if estimate is not None and estimated_for:
            parts = estimate.parts
            self._sample_bytes = (parts.activations + parts.inputs) / estimated_for or None
            # In the first step there are no gradients and no optimizer state yet that could be measured.
            self._fixed_bytes = parts.weights + parts.gradients + parts.optimizer + parts.communication
        self._paces: list[float] = []
        self._before: tuple[Sizes, float] | None = None
        self._last: float | None = None

    def release(self) -> None:
        """Give back what nobody holds."""
        gc.collect()
        if self._gauge is not None:
            self._gauge.give_back()

    def failed(self, *, size: int, share: int, step: int) -> Move | None:
        """After an out-of-memory with `size` samples, and after release(); None: nothing smaller is left."""
        move = recovery.after_failure(self.sizes, size=size, share=share, room=self.room(), step=step)
        if move is not None:
            self.take(move)
        return move

    def take(self, move: Move) -> None:
        """Use another micro-batch from now on."""
        before, self.sizes = self.sizes, move.sizes
        pace = median(self._paces) if len(self._paces) >= _PACES // 2 else None
        grew = move.sizes.current > before.current and self._gauge is not None
        self._before = (before, pace) if grew and pace is not None else None
        self._paces, self._last = [], None
        if self._gauge is not None:
            self._gauge.reset()

    def after_step(self, *, share: int, step: int) -> Move | None:
        """A move that the last step suggests; mostly none."""
        now = self._clock()
        if self._last is not None and share:
            self._paces = [*self._paces[1 - _PACES :], (now - self._last) / share]
        self._last = now
        if self._before is not None and len(self._paces) == _PACES:
            before, pace = self._before
            self._before = None
            seconds = median(self._paces)
            return recovery.slower(self.sizes, before, seconds=seconds, seconds_before=pace, step=step)
        if (step - self.sizes.changed_at) % LOOKS_EVERY or step == self.sizes.changed_at:
            return None
        room = self.room(measure=True)
        move = recovery.grown(self.sizes, share=share, room=room, step=step)
        if move is None and self._gauge is not None:
            peak = self._gauge.peak()
            move = recovery.adjusted(self.sizes, share=share, room=room, peak_bytes=peak, step=step)
            beyond = move is not None and move.sizes.current > self.sizes.planned
            move = None if beyond and not self._grows_beyond else move
        return move

    def room(self, *, measure: bool = False) -> Room:
        """What is known of memory now."""
        if self._gauge is None:
            return recovery.Room()
        fixed = self._gauge.allocated()
        if measure:
            peak = self._gauge.peak()
            if peak > fixed:
                self._sample_bytes = (peak - fixed) / self.sizes.current
        return recovery.Room(
            limit_bytes=self._gauge.limit(),
            fixed_bytes=max(fixed, self._fixed_bytes),
            sample_bytes=self._sample_bytes,
        )
