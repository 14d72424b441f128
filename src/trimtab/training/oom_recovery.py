"""Choose another micro-batch size: smaller after an out-of-memory error, larger again later.

The global batch never changes: the same samples are split into micro-batches of another size. Memory is
nearly affine in the micro-batch, `fixed + samples x sample_bytes`, so one measurement is enough to choose.
"""

from __future__ import annotations

import gc
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from trimtab.spec.base import Noun, check_minimum
from trimtab.units import format_bytes, plural

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trimtab.spec import Estimate, Mesh, Setting


RETRY_AFTER_STEPS = 50
"""Optimizer steps after a failure before a larger micro-batch is tried again; doubled with every failure."""
MAX_RETRY_STEPS = 10_000
USABLE_SHARE = 0.97
"""Share of the limit that a new micro-batch may be expected to use: fragmentation takes the rest."""
GROW_BELOW = 0.60
"""Below this share of the limit the micro-batch may grow beyond the plan."""
SHRINK_ABOVE = 0.985
"""Above this share of the limit the micro-batch shrinks before it fails."""
MAX_SLOWDOWN = 1.02
"""A larger micro-batch is reverted if a sample takes more than this factor of the time."""

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
    """Return whether an error, or its cause, is an out-of-memory error, on a GPU or on the host.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    True
    >>> is_out_of_memory(RuntimeError("shapes do not match"))
    False
    """
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if any(base.__name__ in _OOM_ERRORS for base in type(error).__mro__):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OOM_MESSAGES):
            return True
        seen.append(error)
        error = error.__cause__
    return False


class MemoryBudget(Noun, frozen=True, kw_only=True):
    """Memory that this process may use, and what a micro-batch needs. None means unknown."""

    limit_bytes: int | None = None
    """Bytes that the process may use: what it has reserved plus what is free on the device."""
    fixed_bytes: int | None = None
    """Bytes in use without any sample: weights, gradients, optimizer state."""
    sample_bytes: float | None = None
    """Bytes per additional sample in a micro-batch."""

    @property
    def max_micro_batch(self) -> int | None:
        """Largest micro-batch that is expected to fit; 0 or less if none does, None if unknown."""
        if not self.limit_bytes or self.fixed_bytes is None or not self.sample_bytes or self.sample_bytes < 1:
            return None
        return int((self.limit_bytes * USABLE_SHARE - self.fixed_bytes) / self.sample_bytes)

    def describe(self) -> str:
        """Return the numbers as text, for an event."""
        if not self.limit_bytes or self.fixed_bytes is None or not self.sample_bytes:
            return "nothing is known of its memory"
        return (
            f"{format_bytes(self.limit_bytes)} in all, {format_bytes(self.fixed_bytes)} before the first "
            f"sample, {format_bytes(int(self.sample_bytes))} a sample"
        )


class MicroBatchSizes(Noun, frozen=True, kw_only=True):
    """The micro-batch size in use, and which sizes failed or were slow."""

    planned: int
    current: int
    changed_at: int = 0
    """Optimizer step at which it last changed."""
    failed: dict[str, tuple[int, int]] = {}  # noqa: RUF012 - msgspec copies it
    """Micro-batch sizes that ran out of memory: number of failures, and the step from which to retry."""
    slow: int | None = None
    """From this size up, a sample took longer."""

    def faults(self) -> list[str]:
        """Return what is wrong: a micro-batch has at least one sample."""
        return check_minimum(1, planned=self.planned, current=self.current)

    def is_blocked(self, size: int, step: int) -> bool:
        """Return whether a size must not be tried now: it, or a smaller size, failed recently or was slow."""
        failed = any(int(other) <= size and step < retry_at for other, (_, retry_at) in self.failed.items())
        return failed or (self.slow is not None and size >= self.slow)


class RestartWithSmaller(Exception):  # noqa: N818 - it asks for a restart, and says with what
    """A rank ran out of memory inside a pass that it computes together with others, which now wait for it.

    They cannot repeat the step: all ranks have to start again from the last checkpoint.
    """

    def __init__(self, why: str, size: int) -> None:
        super().__init__(
            f"{why}; other ranks wait for it in the middle of a pass and cannot repeat the step: all ranks "
            f"must start again from the last checkpoint, with {plural(size, 'sample')} at once"
        )
        self.why, self.size = why, size


def restarts_after_oom(mesh: Mesh) -> bool:
    """Return whether ranks start again after one of them ran out of memory, as they cannot repeat the step.

    Ranks that split layers wait inside of them. Ranks that split sequences or hold different experts go on
    with zeros instead, but not in a pipeline: there, passes of several micro-batches alternate.
    """
    return mesh.tp > 1 or (mesh.pp > 1 and mesh.cp * mesh.ep > 1)


SMALLER_SIZE = "micro-batch.json"
"""File in a run folder with the largest micro-batch for the next start, until the run has ended."""


class SmallerSize(msgspec.Struct, frozen=True, kw_only=True):
    """The micro-batch with which a rank that ran out of memory asked all ranks to start again."""

    planned: int
    """Micro-batch of the plan; a request for another plan is ignored."""
    size: int
    rank: int
    why: str


def write_smaller_size(folder: Path, setting: Setting, error: RestartWithSmaller, rank: int) -> None:
    """Write into a run folder with which micro-batch all ranks have to start again."""
    request = SmallerSize(planned=setting.micro_batch, size=error.size, rank=rank, why=error.why)
    # Several ranks may run out of memory at the same time.
    draft = folder / f"{SMALLER_SIZE}.{rank}"
    draft.write_bytes(msgspec.json.encode(request))
    draft.replace(folder / SMALLER_SIZE)


def read_smaller_size(folder: Path, setting: Setting) -> SmallerSize | None:
    """Return the micro-batch that a rank asked for in an earlier attempt; None if there is none."""
    try:
        request = msgspec.json.decode((folder / SMALLER_SIZE).read_bytes(), type=SmallerSize)
    except (OSError, msgspec.MsgspecError):
        return None
    return request if request.planned == setting.micro_batch else None


class SizeChange(Noun, frozen=True, kw_only=True):
    """A change of the micro-batch size, with its reason."""

    sizes: MicroBatchSizes
    why: str


def even_micro_batch(size: int, share: int) -> int:
    """Return the micro-batch up to `size` that splits a rank's `share` of samples nearly evenly.

    >>> [even_micro_batch(size, share) for size, share in ((7, 16), (8, 16), (5, 3), (1, 0))]
    [6, 8, 3, 1]
    """
    size = max(1, size)
    if share <= 0:
        return size
    passes = -(-share // size)
    return -(-share // passes)


def shrink_micro_batch(
    sizes: MicroBatchSizes, *, size: int, share: int, budget: MemoryBudget, step: int
) -> SizeChange | None:
    """Return a smaller micro-batch after `size` samples ran out of memory; None if `size` was one sample.

    Use the size that the budget predicts, if it is smaller than the one that failed. If not, the prediction
    is wrong: try three quarters, and half from the second failure of a size on or without a prediction.
    """
    if size <= 1:
        return None
    times = sizes.failed.get(str(size), (0, 0))[0] + 1
    wait = min(RETRY_AFTER_STEPS * 2 ** (times - 1), MAX_RETRY_STEPS)
    failed = {**sizes.failed, str(size): (times, step + wait)}
    most = budget.max_micro_batch
    if most is not None and 1 <= most < size:
        target, reason = most, f"{most} are expected to fit ({budget.describe()})"
    elif most is not None and most < 1:
        target, reason = 1, f"hardly one sample is expected to fit ({budget.describe()})"
    else:
        guess = size // 2 if times > 1 or most is None else size * 3 // 4
        target, reason = max(1, min(guess, size - 1)), budget.describe()
    current = min(even_micro_batch(target, share), size - 1)
    why = f"{size} samples at once ran out of memory; {current} are tried: {reason}"
    return SizeChange(sizes=sizes.replace(current=current, changed_at=step, failed=failed), why=why)


def grow_micro_batch(
    sizes: MicroBatchSizes, *, share: int, budget: MemoryBudget, step: int
) -> SizeChange | None:
    """Return a larger micro-batch some time after a failure; None to keep the current one.

    It is never above the plan, nor a size that failed recently. First the planned size is tried, then the
    size that saves one forward pass; both must be expected to fit.
    """
    if sizes.current >= min(sizes.planned, share) or step - sizes.changed_at < RETRY_AFTER_STEPS:
        return None
    goal = min(sizes.planned, share)
    passes = -(-share // sizes.current)
    if passes <= 1:
        return None
    most = budget.max_micro_batch
    for target in (goal, even_micro_batch(-(-share // (passes - 1)), share)):
        size = even_micro_batch(target, share)
        fits = most is None or size <= most
        if size > sizes.current and fits and not sizes.is_blocked(size, step):
            why = f"{step - sizes.changed_at} steps went well with {sizes.current} samples at once"
            return SizeChange(
                sizes=sizes.replace(current=size, changed_at=step), why=f"{why}; {size} are tried"
            )
    return None


def adjust_micro_batch(
    sizes: MicroBatchSizes, *, share: int, budget: MemoryBudget, peak_bytes: int, step: int
) -> SizeChange | None:
    """Return another micro-batch that the measured peak memory suggests; None if the current one is right.

    With much free memory it grows, also beyond the plan. Close to the limit it shrinks before it fails.
    """
    limit, most = budget.limit_bytes, budget.max_micro_batch
    if not limit or most is None or step - sizes.changed_at < RETRY_AFTER_STEPS:
        return None
    used = peak_bytes / limit
    peak = f"the peak is {format_bytes(peak_bytes)} of {format_bytes(limit)}"
    if used > SHRINK_ABOVE and sizes.current > 1:
        size = min(even_micro_batch(min(most, sizes.current - 1), share), sizes.current - 1)
        changed = sizes.replace(current=max(1, size), changed_at=step)
        return SizeChange(
            sizes=changed, why=f"{peak}, close to the limit; {changed.current} samples at once are enough"
        )
    if used < GROW_BELOW and sizes.current < share:
        size = even_micro_batch(min(most, share), share)
        if size > sizes.current and not sizes.is_blocked(size, step):
            changed = sizes.replace(current=size, changed_at=step)
            return SizeChange(
                sizes=changed, why=f"{peak}; {size} samples at once fit as well ({budget.describe()})"
            )
    return None


def revert_if_slower(
    sizes: MicroBatchSizes, before: MicroBatchSizes, *, seconds: float, seconds_before: float, step: int
) -> SizeChange | None:
    """Return to the smaller micro-batch if a sample takes longer with the larger one; else None."""
    if sizes.current <= before.current or seconds <= seconds_before * MAX_SLOWDOWN:
        return None
    back = sizes.replace(current=before.current, changed_at=step, slow=sizes.current)
    why = f"{sizes.current} samples at once take {seconds / seconds_before:.2f} x the time a sample"
    return SizeChange(sizes=back, why=f"{why} that {before.current} take")


CHECK_EVERY_STEPS = 25
"""Steps between two memory measurements: they take too long to be made in every step."""
_TIMED_STEPS = 10


class MemoryGauge:
    """Measures the memory of this process on its GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        """Return the bytes of live tensors."""
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        """Return the peak of allocated bytes since the last reset()."""
        return torch.cuda.max_memory_allocated(self._device)

    def limit(self) -> int:
        """Return the bytes that this process may use: reserved plus free, within its memory fraction."""
        free, total = torch.cuda.mem_get_info(self._device)
        share: Any = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
        allowed = int(total * share(self._device)) if share is not None else total
        return min(allowed, torch.cuda.memory_reserved(self._device) + free)

    def reset(self) -> None:
        """Reset the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def empty_cache(self) -> None:
        """Release the cached blocks of the allocator."""
        torch.cuda.empty_cache()


class MicroBatchFitter:
    """Measures memory and time on this rank, and chooses its micro-batch."""

    def __init__(  # noqa: PLR0913 - tests replace the gauge and the clock
        self,
        sizes: MicroBatchSizes,
        *,
        gauge: MemoryGauge | None,
        estimate: Estimate | None,
        estimated_for: int,
        may_exceed_plan: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Without a gauge, nothing is measured. `may_exceed_plan` allows growth beyond the planned size."""
        self.sizes = sizes
        self._gauge = gauge
        self._may_exceed_plan = may_exceed_plan
        self._clock = clock
        self._sample_bytes: float | None = None
        self._fixed_bytes = 0
        if estimate is not None and estimated_for:
            memory = estimate.parts
            self._sample_bytes = (memory.activations + memory.inputs) / estimated_for or None
            # In the first step gradients and optimizer state do not exist yet and cannot be measured.
            self._fixed_bytes = memory.weights + memory.gradients + memory.optimizer + memory.communication
            # The gauge measures what is left beside NCCL.
            self._fixed_bytes -= estimate.nccl_bytes
        self._sample_times: list[float] = []
        self._before: tuple[MicroBatchSizes, float] | None = None
        self._last: float | None = None

    def release(self) -> None:
        """Release unused memory to the device."""
        gc.collect()
        if self._gauge is not None:
            self._gauge.empty_cache()

    def shrink_after_oom(self, *, size: int, share: int, step: int) -> SizeChange | None:
        """Shrink after `size` samples ran out of memory; return None for one sample. Call release() first."""
        change = shrink_micro_batch(
            self.sizes, size=size, share=share, budget=self.measure_budget(), step=step
        )
        if change is not None:
            self.apply(change)
        return change

    def apply(self, change: SizeChange) -> None:
        """Use another micro-batch from the next pass on."""
        before, self.sizes = self.sizes, change.sizes
        sample_s = median(self._sample_times) if len(self._sample_times) >= _TIMED_STEPS // 2 else None
        grew = change.sizes.current > before.current and self._gauge is not None
        self._before = (before, sample_s) if grew and sample_s is not None else None
        self._sample_times, self._last = [], None
        if self._gauge is not None:
            self._gauge.reset()

    def after_step(self, *, share: int, step: int) -> SizeChange | None:
        """Return a change that the last step suggests; usually None."""
        now = self._clock()
        if self._last is not None and share:
            self._sample_times = [*self._sample_times[1 - _TIMED_STEPS :], (now - self._last) / share]
        self._last = now
        if self._before is not None and len(self._sample_times) == _TIMED_STEPS:
            before, sample_s = self._before
            self._before = None
            seconds = median(self._sample_times)
            return revert_if_slower(self.sizes, before, seconds=seconds, seconds_before=sample_s, step=step)
        if (step - self.sizes.changed_at) % CHECK_EVERY_STEPS or step == self.sizes.changed_at:
            return None
        budget = self.measure_budget(update=True)
        change = grow_micro_batch(self.sizes, share=share, budget=budget, step=step)
        if change is None and self._gauge is not None:
            peak = self._gauge.peak()
            change = adjust_micro_batch(self.sizes, share=share, budget=budget, peak_bytes=peak, step=step)
            beyond = change is not None and change.sizes.current > self.sizes.planned
            change = None if beyond and not self._may_exceed_plan else change
        return change

    def measure_budget(self, *, update: bool = False) -> MemoryBudget:
        """Return the memory budget now; with `update`, measure the bytes per sample from the peak."""
        if self._gauge is None:
            return MemoryBudget()
        fixed = self._gauge.allocated()
        if update:
            peak = self._gauge.peak()
            if peak > fixed:
                self._sample_bytes = (peak - fixed) / self.sizes.current
        return MemoryBudget(
            limit_bytes=self._gauge.limit(),
            fixed_bytes=max(fixed, self._fixed_bytes),
            sample_bytes=self._sample_bytes,
        )
