"""From a Trace to bytes: what is allocated, what is reserved, what the driver shows, and what it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.catalog.facts import fallback_facts
from trimtab.predict.allocator import Config, Event, replay
from trimtab.spec import PARTS, Band, Footprint, Trace

if TYPE_CHECKING:
    from trimtab.catalog.facts import MemoryFacts

GRADIENTS = PARTS.index("gradients")
BLOCK = 512
"""The allocator rounds every request up to this."""


@dataclass(frozen=True, kw_only=True)
class Memory:
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
) -> Memory:
    """Replay a trace through the allocator's model.

    Peaks are those of the steps, building left out, as a training run meets them; what building leaves cached
    counts as reserved, because it stays. `facts` are the device's; without them, those of the fallback.
    """
    facts = facts or fallback_facts().memory
    begin = trace.marks.get("step0", 0)
    building = _events(trace, 0, begin)
    events = building + _events(trace, begin)
    steps = replay(events, Config(expandable=expandable), reset_peak_at=[len(building)]).windows[-1]
    position, live = _fullest(trace, begin)
    context = facts.sharded_context_bytes if sharded else facts.context_bytes
    reserved = steps.reserved
    process = reserved + context
    low = facts.compiled_band_low if compiled else facts.band_low
    return Memory(
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
    return tuple(sorted(sums.items(), key=lambda one: -one[1])[:count])


def _operation(trace: Trace, position: int) -> str:
    if not trace.order:
        return ""
    number = trace.order[position]
    return trace.op_names[trace.ops[number if number >= 0 else ~number]].removeprefix("aten::")


def _phase(trace: Trace, position: int) -> str:
    names = [name for name, at in sorted(trace.marks.items(), key=lambda one: one[1]) if at <= position]
    return names[-1] if names else ""
