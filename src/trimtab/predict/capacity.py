"""Replay a trace within a limited capacity: does it run, and what is the smallest capacity that works?

    steps = training_steps(trace)
    find_least_capacity(steps)                 # bytes of segments, the CUDA context not included
    replay_within(steps, 20 << 30).releases    # cache releases per step of a long run

When `cudaMalloc` fails, torch first releases every cached segment that holds no live tensor and tries again;
only then it raises out of memory. So a job can run in less than it would reserve on a large device. A trace
has three steps, and some jobs that complete three steps in little memory fail in the fifth: each release
leaves other gaps. The last step is therefore repeated until the allocator returns to an earlier state, from
which it would repeat forever, or for `MAX_STEPS` steps.

Not covered, as in `allocator`: private pools of CUDA graphs. Convolutions whose workspace does not fit fall
back to another algorithm in cuDNN; here they count as out of memory, so the result is conservative.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from trimtab.catalog.facts import fallback_facts
from trimtab.predict.allocator import LARGE_SEGMENT, ROUND_LARGE, AllocatorConfig, CachingAllocator
from trimtab.predict.estimate import estimate_rank_memory
from trimtab.predict.memory import allocator_events
from trimtab.spec import Allocator, Verdict
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from trimtab.predict.allocator import Event
    from trimtab.spec import Estimate, Setting, Trace


MAX_STEPS = 12
"""Steps to replay if the allocator does not return to an earlier state."""
COUNTED_STEPS = 4
"""The last of these steps, whose releases are counted."""
TOLERANCE = 0.002
"""Precision of the smallest capacity, as a share of it. Errors of predicted memory are larger."""
RETRY_SHARES = (0.005, 0.01, 0.02, 0.04, 0.07, 0.12)
"""Shares above the smallest capacity at which the job is replayed again. With more memory torch releases
less often and leaves other gaps, so a job can fail although it ran with less."""


@dataclass(frozen=True)
class TrainingSteps:
    """Allocator events of a job, step by step."""

    building: list[Event]
    """Events before the first step."""
    steps: list[list[Event]]
    """Events of each traced step."""
    repeats: tuple[list[Event], list[Event]] | None
    """Two further steps, to be repeated alternately; None if the last step does not repeat itself."""
    places: dict[int, int]
    """Place in the step (below 0) of each allocation of a repeated step, by allocation id."""

    def run_steps(self) -> Iterator[list[Event]]:
        """Yield the events of every step of a long run."""
        yield from self.steps
        if self.repeats is not None:
            for number in range(MAX_STEPS - len(self.steps)):
                yield self.repeats[number % 2]


@dataclass(frozen=True, kw_only=True)
class CapacityRun:
    """How a job runs within a capacity."""

    runs: bool
    """False: out of memory."""
    reserved_bytes: int
    """Peak of reserved bytes."""
    allocated_bytes: int
    """Peak of bytes of live tensors."""
    releases: float = 0.0
    """Cache releases, each followed by a new `cudaMalloc`, per steady step."""
    first_releases: int = 0
    """Cache releases while the model is built and in the first three steps."""


def training_steps(trace: Trace) -> TrainingSteps:
    """Split the events of a trace into steps; determine whether the last one repeats itself."""
    order, marks = trace.order, trace.marks
    begin, end = marks.get("step0", 0), marks.get("end", len(order))
    later = sorted(at for name, at in marks.items() if name.startswith("step") and begin < at < end)
    steps = [order[first:last] for first, last in pairwise([begin, *later, end])]
    partners = _match_steps(trace, *steps[-2:]) if len(steps) > 1 else None
    repeats, places = None, {}
    if partners is not None:
        # Two sets of ids alternate, because a step frees tensors of the step before it.
        other = {**partners, **{second: first for first, second in partners.items()}}
        odd = [other.get(step, step) if step >= 0 else ~other.get(~step, ~step) for step in steps[-1]]
        repeats = allocator_events(trace, odd), allocator_events(trace, steps[-1])
        places = {number: ~place for place, pair in enumerate(partners.items()) for number in pair}
    return TrainingSteps(
        allocator_events(trace, order[:begin]),
        [allocator_events(trace, step) for step in steps],
        repeats,
        places,
    )


def _match_steps(trace: Trace, earlier: Sequence[int], last: Sequence[int]) -> dict[int, int] | None:
    """Map allocations of one step to those at the same place of the next; None if a third step would differ.

    A third step is the same if both steps allocate the same, if the last one frees nothing older than the
    step before it, and if it leaves the same allocations to the next step as it got from the one before.
    """
    first, second = ([number for number in step if number >= 0] for step in (earlier, last))
    if len(first) != len(second):
        return None
    partners = dict(zip(first, second, strict=True))
    kinds = zip(trace.sizes, trace.streams, strict=True)
    kind_of = dict(enumerate(kinds))
    if any(kind_of[key] != kind_of[other] for key, other in partners.items()):
        return None
    freed = {~number for number in last if number < 0}
    inherited = freed.difference(second)
    left = set(first).difference(~number for number in earlier if number < 0)
    if inherited != left or {partners[number] for number in inherited} != set(second).difference(freed):
        return None
    return partners


def replay_within(
    steps: TrainingSteps, capacity_bytes: int | None, *, expandable: bool = False, by_fraction: bool = False
) -> CapacityRun:
    """Replay a long run on a device with this many bytes for the allocator; None: unlimited.

    With `by_fraction` the bytes are a limit set by `torch.cuda.set_per_process_memory_fraction`. For
    expandable segments that is stricter: torch checks the whole request against it, not the missing pages.
    """
    plain = AllocatorConfig(expandable=expandable)
    limited = replace(plain, limit_bytes=capacity_bytes)
    allocator = CachingAllocator(limited if by_fraction else replace(plain, capacity_bytes=capacity_bytes))
    seen: dict[Hashable, int] = {}
    releases = [0]
    """Total number of releases after each step."""
    runs = all(allocator.apply(event) == 0 for event in steps.building)
    for step in steps.run_steps() if runs else ():
        runs = all(allocator.apply(event) == 0 for event in step)
        if not runs:
            break
        releases.append(allocator.num_retries)
        if len(releases) <= len(steps.steps):
            continue
        state = allocator.state(steps.places)
        if state in seen:
            # From here on the steps repeat in a cycle.
            return _summarize_run(allocator, releases, steps, since=seen[state])
        seen[state] = len(releases) - 1
    since = max(len(steps.steps) - 1, len(releases) - 1 - COUNTED_STEPS)
    return _summarize_run(allocator, releases, steps, since=since, runs=runs)


def _summarize_run(
    allocator: CachingAllocator, releases: list[int], steps: TrainingSteps, *, since: int, runs: bool = True
) -> CapacityRun:
    peaks = allocator.reset_peaks()
    count = len(releases) - 1 - since
    return CapacityRun(
        runs=runs,
        reserved_bytes=peaks.reserved,
        allocated_bytes=peaks.allocated,
        releases=(releases[-1] - releases[since]) / count if count > 0 else 0.0,
        first_releases=releases[min(len(steps.steps), len(releases) - 1)],
    )


def find_least_capacity(steps: TrainingSteps, *, expandable: bool = False, by_fraction: bool = False) -> int:
    """Return the smallest capacity at which the job runs and above which none of the tried ones fails.

    Found by bisection, to within `TOLERANCE`. A GPT-2 of 124 million weights at micro-batch 16 allocates
    14.5 GiB, reserves 18.2 GiB on a large device, and runs from 16.6 GiB on.
    """
    run = partial(replay_within, steps, expandable=expandable, by_fraction=by_fraction)
    free = run(None)
    low, high = free.allocated_bytes - 1, free.reserved_bytes
    if expandable and by_fraction:
        events = (event for step in (steps.building, *steps.steps) for event in step)
        high += -(-max((event[2] for event in events), default=0) // LARGE_SEGMENT) * LARGE_SEGMENT
    while True:
        least = _bisect_capacity(run, low, high, down_to_reserved=not (expandable and by_fraction))
        tried = (round(least * (1 + share)) for share in RETRY_SHARES)
        fails = [capacity for capacity in tried if capacity < high and not run(capacity).runs]
        if not fails:
            return least
        low = fails[-1]


def _bisect_capacity(
    run: Callable[[int], CapacityRun], low: int, high: int, *, down_to_reserved: bool
) -> int:
    """Bisect between a capacity that fails and one that runs; return one that runs, just above a failure.

    With `down_to_reserved`, a run is the same at every capacity down to the bytes that it reserves.
    """
    while high - low > max(ROUND_LARGE, high * TOLERANCE):
        middle = (low + high) // 2
        result = run(middle)
        if not result.runs:
            low = middle
        else:
            high = max(low + 1, result.reserved_bytes) if down_to_reserved else middle
    return high


# The verdict: fits, fits only by releasing cached blocks, or does not fit.
#
# `judge_quickly` compares the capacity with what torch reserves; `judge_fully` also replays within the
# capacity. All verdicts use the upper end of the band. The band is a share of the predicted process memory,
# and the same share is added to the smallest capacity that runs: if the band ends 5 % above the prediction,
# a job fits tightly if it is predicted to run on a device with 5 % less memory.


def judge_fully(  # noqa: PLR0913 - an estimate, its inputs, and options
    estimate: Estimate,
    trace: Trace,
    setting: Setting,
    *,
    limit_bytes: int | None = None,
    always_least: bool = False,
    explain: bool = True,
) -> Estimate:
    """Judge an estimate by replays within the capacity, if torch would reserve more than that.

    Args:
        estimate: the estimate of the setting, including all additions to its trace.
        trace: the trace of the setting, or the one that the setting's trace was derived from.
        setting: the setting that was estimated.
        limit_bytes: usable memory, if that is less than the capacity of the estimate.
        always_least: compute `least_bytes` also if it fits, and if nothing can make it fit.
        explain: also try expandable segments, for `verdict_reason`.
    """
    capacity = estimate.capacity_bytes
    limit = capacity if limit_bytes is None else limit_bytes
    if capacity is None or limit is None:
        return estimate
    is_short = estimate.host is not None and estimate.host.fits is False
    fits = estimate.band.high_bytes <= limit
    if is_short or (fits and not always_least):
        return estimate.judge_quickly(capacity)
    usable = _usable_bytes(estimate, limit)
    if estimate.least_possible_bytes > usable and not always_least:
        return _reject_estimate(estimate, limit)
    ranks = _split_ranks(estimate, trace, setting)
    expandable = setting.allocator is Allocator.EXPANDABLE
    least = min(estimate.process_bytes, max(rank.least_bytes(expandable=expandable) for rank in ranks))
    if fits:
        return estimate.judge_quickly(capacity).replace(least_bytes=least)
    if least > usable:
        estimate = _reject_estimate(estimate, limit, least)
    else:
        runs = [rank.run(usable, expandable=expandable) for rank in ranks]
        releases = max(run.releases for run in runs)
        estimate = estimate.replace(
            fits=True,
            verdict=Verdict.FITS_TIGHT,
            verdict_reason=_tight_reason(estimate, limit, least, releases),
            least_bytes=least,
            releases_per_step=releases,
        )
    if explain and not expandable:
        return estimate.replace(
            verdict_reason=f"{estimate.verdict_reason}; {_describe_expandable(estimate, ranks, limit)}"
        )
    return estimate


def _usable_bytes(estimate: Estimate, limit: int) -> int:
    """Return the largest process memory that stays within a limit including its band."""
    return limit * estimate.process_bytes // max(1, estimate.band.high_bytes)


@dataclass(frozen=True)
class _RankSteps:
    """Steps of one kind of rank, and its memory outside of the replay."""

    steps: TrainingSteps
    other_bytes: int
    """The CUDA context, micro-batches in flight in a pipeline, accumulated gradients."""

    def least_bytes(self, *, expandable: bool) -> int:
        return find_least_capacity(self.steps, expandable=expandable) + self.other_bytes

    def reserved_bytes(self, *, expandable: bool) -> int:
        return replay_within(self.steps, None, expandable=expandable).reserved_bytes + self.other_bytes

    def run(self, usable: int, *, expandable: bool) -> CapacityRun:
        return replay_within(self.steps, max(0, usable - self.other_bytes), expandable=expandable)


def _split_ranks(estimate: Estimate, trace: Trace, setting: Setting) -> list[_RankSteps]:
    """Return the steps of every kind of rank. What accumulation adds is the same for all of them."""
    facts = fallback_facts().memory.with_context(estimate.parts.context)
    replayed = [estimate_rank_memory(rank, setting, facts) for rank in trace.ranks]
    added = estimate.process_bytes - max(peaks.process_bytes for peaks, _ in replayed)
    return [
        _RankSteps(training_steps(rank), memory.process_bytes - alone.reserved_bytes + max(0, added))
        for rank, (memory, alone) in zip(trace.ranks, replayed, strict=True)
    ]


def _reject_estimate(estimate: Estimate, limit: int, least: int | None = None) -> Estimate:
    need = estimate.with_band(estimate.least_possible_bytes if least is None else least)
    why = (
        f"{format_bytes(estimate.allocated_bytes)} allocated, "
        f"{format_bytes(estimate.reserved_bytes)} reserved; "
        f"even after releasing cached blocks it needs {format_bytes(need)}{' or more' * (least is None)} "
        f"of {format_bytes(limit)}, with context and band"
    )
    return estimate.replace(
        fits=False,
        verdict=Verdict.DOES_NOT_FIT,
        verdict_reason=why,
        least_bytes=least,
        releases_per_step=None,
    )


def _tight_reason(estimate: Estimate, limit: int, least: int, releases: float) -> str:
    often = "in the first steps only, and later steps run at full speed"
    if releases:
        times = "about once" if round(releases) <= 1 else f"about {round(releases)} times"
        often = (
            f"{times} in every step; each time it waits for the GPU, gives unused memory back to the "
            "driver and asks for new memory, so that steps take longer than predicted"
        )
    return (
        f"it would reserve {format_bytes(estimate.band.high_bytes)} of {format_bytes(limit)}, "
        f"with context and band; torch can release cached blocks and run in "
        f"{format_bytes(estimate.with_band(least))}: {often}"
    )


def _describe_expandable(estimate: Estimate, ranks: list[_RankSteps], limit: int) -> str:
    """Describe what expandable segments would change."""
    need = estimate.with_band(max(rank.reserved_bytes(expandable=True) for rank in ranks))
    if need <= limit:
        return f"--allocator expandable: fits in {format_bytes(need)}"
    least = estimate.with_band(max(rank.least_bytes(expandable=True) for rank in ranks))
    if least <= limit:
        return f"--allocator expandable: runs in {format_bytes(least)}, by releasing memory too"
    return f"--allocator expandable: does not fit either, {format_bytes(least)}"
