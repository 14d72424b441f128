"""Where the micro-batch goes after an out-of-memory, and when it comes back: pure sums.

The global batch never changes: another micro-batch means other parts of the same samples. Memory is nearly
affine in the micro-batch, `fixed + samples x sample_bytes`, so one look at what there is says where to go.
"""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from trimtab.spec.base import Noun, check_minimum
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import Estimate


RETRY_AFTER_STEPS = 50
"""Optimizer steps after a failure before a larger micro-batch is tried again; doubled with every failure."""
MAX_RETRY_STEPS = 10_000
USABLE_SHARE = 0.97
"""Share of the limit that a new micro-batch may be expected to use: the allocator loses some."""
GROW_BELOW = 0.60
"""Below this share of the limit the micro-batch may grow beyond the plan."""
SHRINK_ABOVE = 0.985
"""Above this share of the limit it shrinks before it fails."""
MAX_SLOWDOWN = 1.02
"""A larger micro-batch that takes this much longer a sample is taken back."""

_OOM_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cufft_alloc_failed",
)
_OOM_ERRORS = ("OutOfMemoryError", "MemoryError")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, says that memory ran out, on a GPU or on the host.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    True
    >>> is_out_of_memory(RuntimeError("shapes do not match"))
    False
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if any(one.__name__ in _OOM_ERRORS for one in type(error).__mro__):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OOM_MESSAGES):
            return True
        seen.append(error)
        error = error.__cause__
    return False


class MemoryBudget(Noun, frozen=True, kw_only=True):
    """What is known of the memory of this process. Unknown is None."""

    limit_bytes: int | None = None
    """What the process may use in all: what is really free and what it has."""
    fixed_bytes: int | None = None
    """What lies there before the first sample comes: weights, gradients, optimizer state."""
    sample_bytes: float | None = None
    """What one more sample in a micro-batch takes."""

    @property
    def most(self) -> int | None:
        """The largest micro-batch that is expected to fit."""
        if not self.limit_bytes or self.fixed_bytes is None or not self.sample_bytes or self.sample_bytes < 1:
            return None
        return int((self.limit_bytes * USABLE_SHARE - self.fixed_bytes) / self.sample_bytes)

    def said(self) -> str:
        """The numbers, for an event."""
        if not self.limit_bytes or self.fixed_bytes is None or not self.sample_bytes:
            return "nothing is known of its memory"
        return (
            f"{format_bytes(self.limit_bytes)} in all, {format_bytes(self.fixed_bytes)} before the first "
            f"sample, {format_bytes(int(self.sample_bytes))} a sample"
        )


class MicroBatchSizes(Noun, frozen=True, kw_only=True):
    """The micro-batch in use, and what has been learnt about others."""

    planned: int
    current: int
    changed_at: int = 0
    """Optimizer step at which it last changed."""
    failed: dict[str, tuple[int, int]] = {}  # noqa: RUF012 - msgspec copies it
    """Micro-batches that ran out of memory: how often, and the step from which one may be tried again."""
    slow: int | None = None
    """From this size up a sample took longer."""

    def faults(self) -> list[str]:
        """A micro-batch has a sample."""
        return check_minimum(1, planned=self.planned, current=self.current)

    def barred(self, size: int, step: int) -> bool:
        """Whether a size, or a smaller one, failed and is not to be tried again yet."""
        held = any(int(known) <= size and step < again for known, (_, again) in self.failed.items())
        return held or (self.slow is not None and size >= self.slow)


class SizeChange(Noun, frozen=True, kw_only=True):
    """Another micro-batch, with the reason."""

    sizes: MicroBatchSizes
    why: str


def even_micro_batch(size: int, share: int) -> int:
    """The micro-batch not above `size` with which a share falls into parts of nearly equal size.

    >>> even(7, 16), even(8, 16), even(5, 3), even(1, 0)
    (6, 8, 3, 1)
    """
    size = max(1, size)
    if share <= 0:
        return size
    parts = -(-share // size)
    return -(-share // parts)


def part_sizes(size: int, share: int) -> list[int]:
    """The parts of a share: full ones, and what is left.

    >>> part_sizes(6, 16)
    [6, 6, 4]
    """
    return [min(size, share - start) for start in range(0, share, max(1, size))]


def shrink_micro_batch(
    sizes: MicroBatchSizes, *, size: int, share: int, room: MemoryBudget, step: int
) -> SizeChange | None:
    """The next micro-batch after `size` samples ran out of memory; None where one sample did.

    What the numbers say is taken where they say less than what failed. Where they do not, they are wrong by
    more than a little, and three quarters are the next guess; half, from the second failure of a size on.
    """
    if size <= 1:
        return None
    times = sizes.failed.get(str(size), (0, 0))[0] + 1
    wait = min(RETRY_AFTER_STEPS * 2 ** (times - 1), MAX_RETRY_STEPS)
    failed = {**sizes.failed, str(size): (times, step + wait)}
    most = room.most
    if most is not None and 1 <= most < size:
        wanted, ground = most, f"{most} are expected to fit ({room.said()})"
    elif most is not None and most < 1:
        wanted, ground = 1, f"hardly one sample is expected to fit ({room.said()})"
    else:
        guess = size // 2 if times > 1 or most is None else size * 3 // 4
        wanted, ground = max(1, min(guess, size - 1)), room.said()
    current = min(even_micro_batch(wanted, share), size - 1)
    why = f"{size} samples at once ran out of memory; {current} are tried: {ground}"
    return SizeChange(sizes=sizes.replace(current=current, changed_at=step, failed=failed), why=why)


def grow_micro_batch(
    sizes: MicroBatchSizes, *, share: int, room: MemoryBudget, step: int
) -> SizeChange | None:
    """A larger micro-batch after a failure has been some while ago; None to stay.

    Never above the plan, one part less at a time or what the numbers say, and not a size that failed lately.
    """
    if sizes.current >= min(sizes.planned, share) or step - sizes.changed_at < RETRY_AFTER_STEPS:
        return None
    goal = min(sizes.planned, share)
    parts = -(-share // sizes.current)
    if parts <= 1:
        return None
    known = room.most
    for wanted in (goal, even_micro_batch(-(-share // (parts - 1)), share)):
        size = even_micro_batch(wanted, share)
        fits = known is None or size <= known
        if size > sizes.current and fits and not sizes.barred(size, step):
            why = f"{step - sizes.changed_at} steps went well with {sizes.current} samples at once"
            return SizeChange(
                sizes=sizes.replace(current=size, changed_at=step), why=f"{why}; {size} are tried"
            )
    return None


def adjust_micro_batch(
    sizes: MicroBatchSizes, *, share: int, room: MemoryBudget, peak_bytes: int, step: int
) -> SizeChange | None:
    """Another micro-batch because of what was measured; None where it is right.

    Much room: it grows beyond the plan to what fits. Close to the limit: it shrinks before it fails.
    """
    limit, most = room.limit_bytes, room.most
    if not limit or most is None or step - sizes.changed_at < RETRY_AFTER_STEPS:
        return None
    used = peak_bytes / limit
    said = f"the peak is {format_bytes(peak_bytes)} of {format_bytes(limit)}"
    if used > SHRINK_ABOVE and sizes.current > 1:
        size = min(even_micro_batch(min(most, sizes.current - 1), share), sizes.current - 1)
        moved = sizes.replace(current=max(1, size), changed_at=step)
        return SizeChange(
            sizes=moved, why=f"{said}, close to the limit; {moved.current} samples at once are enough"
        )
    if used < GROW_BELOW and sizes.current < share:
        size = even_micro_batch(min(most, share), share)
        if size > sizes.current and not sizes.barred(size, step):
            moved = sizes.replace(current=size, changed_at=step)
            return SizeChange(sizes=moved, why=f"{said}; {size} samples at once fit as well ({room.said()})")
    return None


def revert_if_slower(
    sizes: MicroBatchSizes, before: MicroBatchSizes, *, seconds: float, seconds_before: float, step: int
) -> SizeChange | None:
    """Back to the smaller micro-batch where the larger one takes longer a sample."""
    if sizes.current <= before.current or seconds <= seconds_before * MAX_SLOWDOWN:
        return None
    back = sizes.replace(current=before.current, changed_at=step, slow=sizes.current)
    why = f"{sizes.current} samples at once take {seconds / seconds_before:.2f} x the time a sample"
    return SizeChange(sizes=back, why=f"{why} that {before.current} take")


# Keeps the micro-batch of a rank fitting: measures memory and pace, and asks `recovery` where to go.


CHECK_EVERY_STEPS = 25
"""Steps between two looks at the memory: asking takes longer than it should in every step."""
_TIMED_STEPS = 10


class MemoryGauge:
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


class MicroBatchFitter:
    """The micro-batch of this rank, and what has been measured with it."""

    def __init__(  # noqa: PLR0913 - what is measured, and by what
        self,
        sizes: MicroBatchSizes,
        *,
        gauge: MemoryGauge | None,
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
        self._before: tuple[MicroBatchSizes, float] | None = None
        self._last: float | None = None

    def release(self) -> None:
        """Give back what nobody holds."""
        gc.collect()
        if self._gauge is not None:
            self._gauge.give_back()

    def failed(self, *, size: int, share: int, step: int) -> SizeChange | None:
        """After an out-of-memory with `size` samples, and after release(); None: nothing smaller is left."""
        move = shrink_micro_batch(self.sizes, size=size, share=share, room=self.room(), step=step)
        if move is not None:
            self.take(move)
        return move

    def take(self, move: SizeChange) -> None:
        """Use another micro-batch from now on."""
        before, self.sizes = self.sizes, move.sizes
        pace = median(self._paces) if len(self._paces) >= _TIMED_STEPS // 2 else None
        grew = move.sizes.current > before.current and self._gauge is not None
        self._before = (before, pace) if grew and pace is not None else None
        self._paces, self._last = [], None
        if self._gauge is not None:
            self._gauge.reset()

    def after_step(self, *, share: int, step: int) -> SizeChange | None:
        """A move that the last step suggests; mostly none."""
        now = self._clock()
        if self._last is not None and share:
            self._paces = [*self._paces[1 - _TIMED_STEPS :], (now - self._last) / share]
        self._last = now
        if self._before is not None and len(self._paces) == _TIMED_STEPS:
            before, pace = self._before
            self._before = None
            seconds = median(self._paces)
            return revert_if_slower(self.sizes, before, seconds=seconds, seconds_before=pace, step=step)
        if (step - self.sizes.changed_at) % CHECK_EVERY_STEPS or step == self.sizes.changed_at:
            return None
        room = self.room(measure=True)
        move = grow_micro_batch(self.sizes, share=share, room=room, step=step)
        if move is None and self._gauge is not None:
            peak = self._gauge.peak()
            move = adjust_micro_batch(self.sizes, share=share, room=room, peak_bytes=peak, step=step)
            beyond = move is not None and move.sizes.current > self.sizes.planned
            move = None if beyond and not self._grows_beyond else move
        return move

    def room(self, *, measure: bool = False) -> MemoryBudget:
        """What is known of memory now."""
        if self._gauge is None:
            return MemoryBudget()
        fixed = self._gauge.allocated()
        if measure:
            peak = self._gauge.peak()
            if peak > fixed:
                self._sample_bytes = (peak - fixed) / self.sizes.current
        return MemoryBudget(
            limit_bytes=self._gauge.limit(),
            fixed_bytes=max(fixed, self._fixed_bytes),
            sample_bytes=self._sample_bytes,
        )
