"""Keeps the micro-batch of a rank fitting: measures memory and pace, and asks `recovery` where to go."""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from trimtab.training import recovery

if TYPE_CHECKING:
    from trimtab.spec import Estimate
    from trimtab.training.recovery import Move, Room, Sizes

LOOKS_EVERY = 25
"""Steps between two looks at the memory: asking takes longer than it should in every step."""
_PACES = 10


class Fitting:
    """The micro-batch of this rank, and what has been measured with it."""

    def __init__(
        self,
        sizes: Sizes,
        *,
        device: torch.device,
        estimate: Estimate | None,
        estimated_for: int,
        grows_beyond: bool,
    ) -> None:
        """`grows_beyond` allows more than the plan where there is much room."""
        self.sizes = sizes
        self._device = device
        self._cuda = device.type == "cuda"
        self._grows_beyond = grows_beyond and self._cuda
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
        self._measured_at: int | None = None

    def release(self) -> None:
        """Give back what nobody holds."""
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()

    def failed(self, *, size: int, share: int, step: int) -> Move | None:
        """After an out-of-memory with `size` samples, and after release(); None: nothing smaller is left."""
        if size > 1 and self._measured_at == size:
            # It went well before at this size, so what was measured then does not tell.
            self._sample_bytes = None
        move = recovery.after_failure(self.sizes, size=size, share=share, room=self.room(), step=step)
        if move is not None:
            self.take(move)
        return move

    def take(self, move: Move) -> None:
        """Use another micro-batch from now on."""
        before, self.sizes = self.sizes, move.sizes
        pace = median(self._paces) if len(self._paces) >= _PACES // 2 else None
        grew = move.sizes.current > before.current and pace is not None and self._cuda
        self._before = (before, pace) if grew and pace is not None else None
        self._paces, self._last = [], None
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def after_step(self, *, share: int, step: int) -> Move | None:
        """A move that the last step suggests; mostly none."""
        now = time.perf_counter()
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
        if move is None and self._cuda:
            peak = torch.cuda.max_memory_allocated(self._device)
            move = recovery.adjusted(self.sizes, share=share, room=room, peak_bytes=peak, step=step)
            beyond = move is not None and move.sizes.current > self.sizes.planned
            move = None if beyond and not self._grows_beyond else move
        return move

    def room(self, *, measure: bool = False) -> Room:
        """What is known of memory now."""
        if not self._cuda:
            return recovery.Room()
        fixed = torch.cuda.memory_allocated(self._device)
        if measure:
            peak = torch.cuda.max_memory_allocated(self._device)
            if peak > fixed:
                self._sample_bytes = (peak - fixed) / self.sizes.current
                self._measured_at = self.sizes.current
        return recovery.Room(
            limit_bytes=limit_bytes(self._device),
            fixed_bytes=max(fixed, self._fixed_bytes),
            sample_bytes=self._sample_bytes,
        )


def limit_bytes(device: torch.device) -> int:
    """What this process may use on a GPU: what it holds and what is free, within its share."""
    free, total = torch.cuda.mem_get_info(device)
    share: Any = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
    allowed = int(total * share(device)) if share is not None else total
    return min(allowed, torch.cuda.memory_reserved(device) + free)
