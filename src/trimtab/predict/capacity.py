"""Replay a trace on a device of limited capacity: whether it runs, and the smallest capacity that does.

    steps = training_steps(trace)
    least_capacity(steps)                      # bytes of segments, the CUDA context not included
    run_within(steps, 20 << 30).releases       # how often a step of a long run has to release its cache

When `cudaMalloc` fails, torch first releases every cached segment that holds no live tensor and tries again;
only then it raises out of memory. So a job can run on less than it would reserve on a large device. A trace
has three steps, and some jobs that take three steps in little memory fail in the fifth: each release leaves
other gaps. The last step is therefore repeated until the allocator's state is one that it has been in
before, which then goes on for ever, or for `MOST_STEPS` steps.

Not covered, as in `allocator`: private pools of CUDA graphs. Convolutions whose workspace does not fit fall
back to another algorithm in cuDNN; here they count as out of memory, so the answer is on the safe side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from trimtab.catalog.facts import fallback_facts
from trimtab.predict.allocator import LARGE_SEGMENT, ROUND_LARGE, AllocatorConfig, CachingAllocator
from trimtab.predict.estimate import rank_memory
from trimtab.spec import Allocator, Verdict
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from trimtab.predict.allocator import Event
    from trimtab.spec import Estimate, Setting, Trace


MOST_STEPS = 12
"""Steps that are replayed where the allocator's state does not come back."""
LATEST = 4
"""Of those, the last ones whose releases are counted."""
TOLERANCE = 0.002
"""How close the smallest capacity is found, as a share of it. Errors of predicted memory are larger."""
ABOVE = (0.005, 0.01, 0.02, 0.04, 0.07, 0.12)
"""How far above the smallest capacity it is tried again, as shares: with more memory torch releases less
often, leaves other gaps, and can fail where it ran with less."""


@dataclass(frozen=True)
class TrainingSteps:
    """What the steps of a job ask of the allocator."""

    building: list[Event]
    """Before the first step."""
    steps: list[list[Event]]
    """The steps as they were traced."""
    repeats: tuple[list[Event], list[Event]] | None
    """Two further steps, to be repeated in turns; None where the last step does not repeat itself."""
    places: dict[int, int]
    """What is the same in every repeated step, by id of the allocation: its place in the step, below 0."""

    def each(self) -> Iterator[list[Event]]:
        """Every step of a long run."""
        yield from self.steps
        if self.repeats is not None:
            for number in range(MOST_STEPS - len(self.steps)):
                yield self.repeats[number % 2]


@dataclass(frozen=True, kw_only=True)
class CapacityRun:
    """How a job runs within a capacity."""

    runs: bool
    """False: out of memory."""
    reserved_bytes: int
    """The most that was reserved at once."""
    allocated_bytes: int
    """The most that live tensors took."""
    releases: float = 0.0
    """How often a steady step releases cached blocks and calls `cudaMalloc` again."""
    first_releases: int = 0
    """How often building the model and the first three steps did."""


def training_steps(trace: Trace) -> TrainingSteps:
    """Split the events of a trace into steps, and find out whether the last one repeats itself."""
    order, marks = trace.order, trace.marks
    begin, end = marks.get("step0", 0), marks.get("end", len(order))
    later = sorted(at for name, at in marks.items() if name.startswith("step") and begin < at < end)
    steps = [order[first:last] for first, last in pairwise([begin, *later, end])]
    twins = _twins(trace, *steps[-2:]) if len(steps) > 1 else None
    repeats, places = None, {}
    if twins is not None:
        # Two sets of ids take turns, since a step frees what the step before it has left.
        other = {**twins, **{second: first for first, second in twins.items()}}
        odd = [other.get(step, step) if step >= 0 else ~other.get(~step, ~step) for step in steps[-1]]
        repeats = _events(trace, odd), _events(trace, steps[-1])
        places = {one: ~place for place, pair in enumerate(twins.items()) for one in pair}
    return TrainingSteps(
        _events(trace, order[:begin]), [_events(trace, step) for step in steps], repeats, places
    )


def _twins(trace: Trace, earlier: Sequence[int], last: Sequence[int]) -> dict[int, int] | None:
    """Allocations of one step with those in the same place of the next; None where a third step would differ.

    It would not where both steps allocate the same, where the last one frees nothing older than the one
    before it, and where it leaves for the next step what it found of the one before.
    """
    first, second = ([one for one in step if one >= 0] for step in (earlier, last))
    if len(first) != len(second):
        return None
    twins = dict(zip(first, second, strict=True))
    kinds = zip(trace.sizes, trace.streams, strict=True)
    known = dict(enumerate(kinds))
    if any(known[key] != known[other] for key, other in twins.items()):
        return None
    freed = {~number for number in last if number < 0}
    found = freed.difference(second)
    left = set(first).difference(~number for number in earlier if number < 0)
    if found != left or {twins[one] for one in found} != set(second).difference(freed):
        return None
    return twins


def _events(trace: Trace, order: Sequence[int]) -> list[Event]:
    sizes, streams = trace.sizes, trace.streams
    return [
        ("alloc", number, sizes[number], streams[number]) if number >= 0 else ("free", ~number, 0, 0)
        for number in order
        if sizes[number if number >= 0 else ~number]
    ]


def run_within(
    steps: TrainingSteps, capacity_bytes: int | None, *, expandable: bool = False, by_fraction: bool = False
) -> CapacityRun:
    """Replay a long run on a device that gives the allocator so many bytes; None: without end.

    With `by_fraction` the bytes are a limit set by `torch.cuda.set_per_process_memory_fraction`. For
    expandable segments that is stricter: torch holds the whole request against it, not the missing pages.
    """
    plain = AllocatorConfig(expandable=expandable)
    limited = replace(plain, limit_bytes=capacity_bytes)
    allocator = CachingAllocator(limited if by_fraction else replace(plain, capacity_bytes=capacity_bytes))
    seen: dict[Hashable, int] = {}
    releases = [0]
    """After each step, all of them so far."""
    runs = all(allocator.apply(event) == 0 for event in steps.building)
    for step in steps.each() if runs else ():
        runs = all(allocator.apply(event) == 0 for event in step)
        if not runs:
            break
        releases.append(allocator.num_retries)
        if len(releases) <= len(steps.steps):
            continue
        state = allocator.state(steps.places)
        if state in seen:
            # From here on it goes round in a circle.
            return _run(allocator, releases, steps, since=seen[state])
        seen[state] = len(releases) - 1
    since = max(len(steps.steps) - 1, len(releases) - 1 - LATEST)
    return _run(allocator, releases, steps, since=since, runs=runs)


def _run(
    allocator: CachingAllocator, releases: list[int], steps: TrainingSteps, *, since: int, runs: bool = True
) -> CapacityRun:
    peaks = allocator.reset_peaks()
    many = len(releases) - 1 - since
    return CapacityRun(
        runs=runs,
        reserved_bytes=peaks.reserved,
        allocated_bytes=peaks.allocated,
        releases=(releases[-1] - releases[since]) / many if many > 0 else 0.0,
        first_releases=releases[min(len(steps.steps), len(releases) - 1)],
    )


def least_capacity(steps: TrainingSteps, *, expandable: bool = False, by_fraction: bool = False) -> int:
    """The smallest capacity at which the job runs, and above which no larger one was found to fail.

    It is found to within `TOLERANCE`, by halving. A GPT-2 of 124 million weights at micro-batch 16 allocates
    14.5 GiB, reserves 18.2 GiB on a large device, and runs from 16.6 GiB on.
    """
    run = partial(run_within, steps, expandable=expandable, by_fraction=by_fraction)
    free = run(None)
    low, high = free.allocated_bytes - 1, free.reserved_bytes
    if expandable and by_fraction:
        events = (event for step in (steps.building, *steps.steps) for event in step)
        high += -(-max((event[2] for event in events), default=0) // LARGE_SEGMENT) * LARGE_SEGMENT
    while True:
        least = _halved(run, low, high, down_to_reserved=not (expandable and by_fraction))
        tried = (round(least * (1 + share)) for share in ABOVE)
        fails = [one for one in tried if one < high and not run(one).runs]
        if not fails:
            return least
        low = fails[-1]


def _halved(run: Callable[[int], CapacityRun], low: int, high: int, *, down_to_reserved: bool) -> int:
    """A capacity that runs, between one that fails and one that runs, with a failure close below it.

    With `down_to_reserved`, a run goes the same way at every capacity down to what it reserves.
    """
    while high - low > max(ROUND_LARGE, high * TOLERANCE):
        middle = (low + high) // 2
        found = run(middle)
        if not found.runs:
            low = middle
        else:
            high = max(low + 1, found.reserved_bytes) if down_to_reserved else middle
    return high


# Say whether an estimate fits a capacity: fits, fits only by releasing cached blocks, or does not fit.
#
# `judge_quickly` compares with what torch reserves; `judge_fully` also replays within the capacity.
#
# All three verdicts are by the upper end of the band. The band is a share of the predicted process memory,
# and the same share is added to the smallest capacity that runs: where the band ends 5 % above the
# prediction, a job fits tightly if it is predicted to run on a device that has 5 % less to give.


def judge_fully(  # noqa: PLR0913 - an estimate with what it was made from, and what is asked
    found: Estimate,
    trace: Trace,
    setting: Setting,
    *,
    limit_bytes: int | None = None,
    always_least: bool = False,
    explain: bool = True,
) -> Estimate:
    """Judge by replays within the capacity, where what torch would reserve is beyond it.

    Args:
        found: the estimate of the setting, with everything that is added to its trace.
        trace: of the setting, or of the one that it was derived from.
        setting: the one that was estimated.
        limit_bytes: how much may be used, where that is less than the capacity of the estimate.
        always_least: find `least_bytes` also where it fits, and where nothing can make it fit.
        explain: try expandable segments too, for `verdict_reason`.
    """
    capacity = found.capacity_bytes
    limit = capacity if limit_bytes is None else limit_bytes
    if capacity is None or limit is None:
        return found
    fits = found.band.high_bytes <= limit
    if fits and not always_least:
        return found.judge_quickly(capacity)
    usable = _usable(found, limit)
    if found.least_possible_bytes > usable and not always_least:
        return _refused(found, limit)
    ranks = _ranks(found, trace, setting)
    expandable = setting.allocator is Allocator.EXPANDABLE
    least = min(found.process_bytes, max(rank.least(expandable=expandable) for rank in ranks))
    if fits:
        return found.judge_quickly(capacity).replace(least_bytes=least)
    if least > usable:
        found = _refused(found, limit, least)
    else:
        runs = [rank.run(usable, expandable=expandable) for rank in ranks]
        releases = max(run.releases for run in runs)
        found = found.replace(
            fits=True,
            verdict=Verdict.FITS_TIGHT,
            verdict_reason=_tight_reason(found, limit, least, releases),
            least_bytes=least,
            releases_per_step=releases,
        )
    if explain and not expandable:
        return found.replace(verdict_reason=f"{found.verdict_reason}; {_expandable(found, ranks, limit)}")
    return found


def _usable(found: Estimate, limit: int) -> int:
    """The most process memory that stays within a limit with its band."""
    return limit * found.process_bytes // max(1, found.band.high_bytes)


@dataclass(frozen=True)
class _Rank:
    """One kind of rank: what its trace asks for, and what it has beside that."""

    steps: TrainingSteps
    beside_bytes: int
    """The context, micro-batches on their way through a pipeline, gradients that add up."""

    def least(self, *, expandable: bool) -> int:
        return least_capacity(self.steps, expandable=expandable) + self.beside_bytes

    def reserved(self, *, expandable: bool) -> int:
        return run_within(self.steps, None, expandable=expandable).reserved_bytes + self.beside_bytes

    def run(self, usable: int, *, expandable: bool) -> CapacityRun:
        return run_within(self.steps, max(0, usable - self.beside_bytes), expandable=expandable)


def _ranks(found: Estimate, trace: Trace, setting: Setting) -> list[_Rank]:
    """Every kind of rank. What accumulation adds is the same for all of them."""
    facts = fallback_facts().memory.with_context(found.parts.context)
    replayed = [rank_memory(rank, setting, facts) for rank in trace.ranks]
    added = found.process_bytes - max(one.process_bytes for one, _ in replayed)
    return [
        _Rank(training_steps(rank), memory.process_bytes - alone.reserved_bytes + max(0, added))
        for rank, (memory, alone) in zip(trace.ranks, replayed, strict=True)
    ]


def _refused(found: Estimate, limit: int, least: int | None = None) -> Estimate:
    need = found.with_band(found.least_possible_bytes if least is None else least)
    why = (
        f"{format_bytes(found.allocated_bytes)} allocated, {format_bytes(found.reserved_bytes)} reserved; "
        f"even after releasing cached blocks it needs {format_bytes(need)}{' or more' * (least is None)} "
        f"of {format_bytes(limit)}, with context and band"
    )
    return found.replace(
        fits=False,
        verdict=Verdict.DOES_NOT_FIT,
        verdict_reason=why,
        least_bytes=least,
        releases_per_step=None,
    )


def _tight_reason(found: Estimate, limit: int, least: int, releases: float) -> str:
    often = "in the first steps only, and later steps run at full speed"
    if releases:
        times = "about once" if round(releases) <= 1 else f"about {round(releases)} times"
        often = (
            f"{times} in every step; each time it waits for the GPU, gives unused memory back to the "
            "driver and asks for new memory, so that steps take longer than predicted"
        )
    return (
        f"it would reserve {format_bytes(found.band.high_bytes)} of {format_bytes(limit)}, with context and "
        f"band; torch can release cached blocks and run in {format_bytes(found.with_band(least))}: {often}"
    )


def _expandable(found: Estimate, ranks: list[_Rank], limit: int) -> str:
    """What expandable segments would change."""
    need = found.with_band(max(rank.reserved(expandable=True) for rank in ranks))
    if need <= limit:
        return f"--allocator expandable: fits in {format_bytes(need)}"
    least = found.with_band(max(rank.least(expandable=True) for rank in ranks))
    if least <= limit:
        return f"--allocator expandable: runs in {format_bytes(least)}, by releasing memory too"
    return f"--allocator expandable: does not fit either, {format_bytes(least)}"
