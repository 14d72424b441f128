"""From a Trace to bytes: what is allocated, what is reserved, what the driver shows, and what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.catalog.facts import fallback_facts
from trimtab.predict.allocator import AllocatorConfig, Event, replay
from trimtab.spec import PARTS, Band, Estimate, Footprint, Noun, Trace
from trimtab.strategies import strategy_of
from trimtab.strategies.limits import keeps_whole

if TYPE_CHECKING:
    from trimtab.catalog.facts import MemoryFacts
    from trimtab.spec import Setting, Trace


GRADIENTS = PARTS.index("gradients")
BLOCK = 512
"""The allocator rounds every request up to this."""


@dataclass(frozen=True, kw_only=True)
class MemoryPeaks:
    """Peaks over the first steps of a job on one device."""

    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    parts: Footprint
    """At the moment when most is allocated."""
    band: Band
    modules: tuple[tuple[str, int], ...]
    """The modules whose tensors hold most at that moment, largest first."""
    operation: str
    """What was running then."""
    phase: str
    """Which phase that was in."""
    gradients_bytes: int = 0
    """The most that gradients hold at any moment of the steps; `parts` has what they hold at the peak."""


def memory(
    trace: Trace,
    facts: MemoryFacts | None = None,
    *,
    expandable: bool = False,
    sharded: bool = False,
    compiled: bool = False,
) -> MemoryPeaks:
    """Replay a trace through the allocator's model.

    Peaks are those of the steps, building left out, as a training run meets them; what building leaves cached
    counts as reserved, because it stays. `facts` are the device's; without them, those of the fallback.
    """
    facts = facts or fallback_facts().memory
    begin = trace.marks.get("step0", 0)
    building = _events(trace, 0, begin)
    events = building + _events(trace, begin)
    steps = replay(events, AllocatorConfig(expandable=expandable), reset_peak_at=[len(building)]).windows[-1]
    position, live = _fullest(trace, begin)
    context = facts.sharded_context_bytes if sharded else facts.context_bytes
    reserved = steps.reserved
    process = reserved + context
    low = facts.compiled_band_low if compiled else facts.band_low
    return MemoryPeaks(
        allocated_bytes=steps.allocated,
        reserved_bytes=reserved,
        process_bytes=process,
        parts=_footprint(trace, live, steps.allocated, context),
        band=Band(low_bytes=round(process * low), high_bytes=round(process * facts.band_high)),
        modules=_modules(trace, live),
        operation=_operation(trace, position),
        phase=_phase(trace, position),
        gradients_bytes=_most_gradients(trace, begin),
    )


def _events(trace: Trace, begin: int, end: int | None = None) -> list[Event]:
    """What the allocator is asked for; torch does not ask it for nothing."""
    sizes, streams = trace.sizes, trace.streams
    return [
        ("alloc", number, sizes[number], streams[number]) if number >= 0 else ("free", ~number, 0, 0)
        for number in trace.order[begin:end]
        if sizes[number if number >= 0 else ~number]
    ]


def rounded(size: int) -> int:
    """The bytes that the allocator hands out for so many.

    >>> rounded(1), rounded(512)
    (512, 512)
    """
    return -(-size // BLOCK) * BLOCK


def _fullest(trace: Trace, begin: int) -> tuple[int, set[int]]:
    """Where in the order most is live, and which allocations are."""
    alive = best = best_at = 0
    for position, number in enumerate(trace.order):
        alive += rounded(trace.sizes[number]) if number >= 0 else -rounded(trace.sizes[~number])
        if alive > best and position >= begin:
            best, best_at = alive, position
    live: set[int] = set()
    for number in trace.order[: best_at + 1]:
        if number >= 0:
            live.add(number)
        else:
            live.discard(~number)
    return best_at, live


def _most_gradients(trace: Trace, begin: int) -> int:
    """The largest sum of live gradients in the steps, whatever else is live then."""
    parts, sizes = trace.parts, trace.sizes
    alive = most = 0
    for number in trace.order[begin:]:
        if parts[number if number >= 0 else ~number] == GRADIENTS:
            alive += rounded(sizes[number]) if number >= 0 else -rounded(sizes[~number])
            most = max(most, alive)
    return most


def _footprint(trace: Trace, live: set[int], allocated: int, context: int) -> Footprint:
    """Bytes by part; what the allocator rounds up on top counts with the activations."""
    sums = dict.fromkeys(PARTS, 0)
    for number in live:
        sums[PARTS[trace.parts[number]]] += rounded(trace.sizes[number])
    sums["activations"] += max(0, allocated - sum(sums.values()))
    return Footprint(**sums, context=context)


def _modules(trace: Trace, live: set[int], count: int = 5) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for number in live:
        name = trace.module_names[trace.modules[number]]
        if name:
            sums[name] = sums.get(name, 0) + rounded(trace.sizes[number])
    return tuple(sorted(sums.items(), key=lambda item: -item[1])[:count])


def _operation(trace: Trace, position: int) -> str:
    if not trace.order:
        return ""
    number = trace.order[position]
    return trace.op_names[trace.ops[number if number >= 0 else ~number]].removeprefix("aten::")


def _phase(trace: Trace, position: int) -> str:
    names = [name for name, at in sorted(trace.marks.items(), key=lambda item: item[1]) if at <= position]
    return names[-1] if names else ""


# What a step holds at every moment, by what it is for: the curve whose highest point the estimate names.


MOMENTS = 240
"""Kept of a step: as many as a figure can show."""


class Timeline(Noun, frozen=True, kw_only=True):
    """Bytes of live tensors through one step, at some moments of it."""

    moments: tuple[int, ...]
    """How many allocations and frees of the step have passed."""
    held: tuple[tuple[int, ...], ...]
    """One a part, in the order of PARTS: bytes at each moment."""
    total: int
    """Allocations and frees in the step."""
    peak: int
    """Which of the moments holds most."""
    operation: str
    """That was running then."""
    first_gradient: int | None = None
    """When the first gradient was written; None where the step makes none."""

    def faults(self) -> list[str]:
        """Every part has a value for every moment."""
        wrong = [] if len(self.held) == len(PARTS) else ["held has another length than there are parts"]
        return wrong + [
            f"{name} has another length than moments"
            for name, one in zip(PARTS, self.held, strict=False)
            if len(one) != len(self.moments)
        ]


def timeline(trace: Trace, moments: int = MOMENTS) -> Timeline | None:
    """The last step of a trace, in which nothing is new any more; None where the trace has none.

    The step is cut into stretches, and of each the moment that holds most is kept: no peak is lost.
    """
    begin, end = trace.marks.get("step2"), trace.marks.get("end")
    if begin is None or end is None or end <= begin:
        return None
    now = _held_before(trace, begin)
    stretch = max(1, -(-(end - begin) // moments))
    kept: list[tuple[int, tuple[int, ...]]] = []
    first = None
    gradients = PARTS.index("gradients")
    best = -1
    for position in range(begin, end):
        number = trace.order[position]
        fresh = number >= 0
        number = number if fresh else ~number
        part = trace.parts[number]
        now[part] += rounded(trace.sizes[number]) if fresh else -rounded(trace.sizes[number])
        if fresh and part == gradients and first is None:
            first = position - begin + 1
        if (position - begin) % stretch == 0:
            best = -1
            kept.append((position - begin + 1, tuple(now)))
        if sum(now) > best:
            best = sum(now)
            kept[-1] = (position - begin + 1, tuple(now))
    peak = max(range(len(kept)), key=lambda index: sum(kept[index][1]))
    return Timeline(
        moments=tuple(at for at, _ in kept),
        held=tuple(zip(*(held for _, held in kept), strict=True)),
        total=end - begin,
        peak=peak,
        operation=_operation_timeline(trace, begin + kept[peak][0] - 1),
        first_gradient=first,
    )


def _held_before(trace: Trace, begin: int) -> list[int]:
    """Bytes by part when the step begins."""
    held = [0] * len(PARTS)
    for number in trace.order[:begin]:
        one = number if number >= 0 else ~number
        held[trace.parts[one]] += rounded(trace.sizes[one]) if number >= 0 else -rounded(trace.sizes[one])
    return held


def _operation_timeline(trace: Trace, position: int) -> str:
    number = trace.order[position]
    return trace.op_names[trace.ops[number if number >= 0 else ~number]].removeprefix("aten::")


# What accumulation adds to the peak of a step that was traced without it.


def accumulated(estimate: Estimate, trace: Trace, setting: Setting) -> Estimate:
    """The estimate of a step with several micro-batches.

    From the second micro-batch on, the gradients of the earlier ones lie there all the while, also where a
    step with one micro-batch has none yet. Each new gradient lies beside the sum until it is added; a
    compiled backward pass hands over all of them at once. Under fsdp, small gradients stay whole, in fp32,
    until the last micro-batch.
    """
    if setting.accumulation == 1:
        return estimate
    more = max(sum(gradients(rank)) if setting.compile else _risen(rank) for rank in trace.ranks)
    if strategy_of(setting).is_sharded and keeps_whole(trace.trainable, estimate.capacity_bytes or 0):
        more += 4 * trace.trainable
    if not more:
        return estimate
    band = estimate.band
    risen = estimate.replace(
        allocated_bytes=estimate.allocated_bytes + more,
        reserved_bytes=estimate.reserved_bytes + more,
        process_bytes=estimate.process_bytes + more,
        parts=estimate.parts.replace(gradients=estimate.parts.gradients + more),
        gradients_bytes=max(estimate.gradients_bytes or 0, estimate.parts.gradients + more),
        band=band.replace(low_bytes=band.low_bytes, high_bytes=band.high_bytes + more),
        assumptions=(
            *estimate.assumptions,
            "gradients lie beside the activations while micro-batches add up",
        ),
    )
    return risen if risen.capacity_bytes is None else risen.judge_quickly(risen.capacity_bytes)


def gradients(trace: Trace) -> list[int]:
    """Bytes of each gradient of one step."""
    begin, end = trace.marks.get("step1", 0), trace.marks.get("step2", len(trace.order))
    kind = PARTS.index("gradients")
    return [
        trace.sizes[number]
        for number in trace.order[begin:end]
        if number >= 0 and trace.parts[number] == kind
    ]


def _risen(trace: Trace) -> int:
    """How much higher the peak of a step is when the gradients of earlier micro-batches are there."""
    begin, end = trace.marks.get("step1", 0), trace.marks.get("step2", len(trace.order))
    kind = PARTS.index("gradients")
    whole = sum(gradients(trace))
    live = own = plain = summed = 0
    for position, number in enumerate(trace.order[:end]):
        allocation = number if number >= 0 else ~number
        size = trace.sizes[allocation] if number >= 0 else -trace.sizes[allocation]
        is_gradient = trace.parts[allocation] == kind
        live += size
        # A gradient counts for itself while it is new; then it is a part of the sum.
        new = size if is_gradient and number >= 0 else 0
        own += size if is_gradient else 0
        if position >= begin:
            plain = max(plain, live)
            summed = max(summed, live - own + new + whole)
    return max(0, summed - plain)
