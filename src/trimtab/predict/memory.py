"""Estimate the memory of a Trace: peaks of allocated, reserved and process bytes, by purpose and module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.facts import fallback_facts
from trimtab.predict.allocator import AllocatorConfig, Event, replay
from trimtab.spec import PARTS, Band, Estimate, Footprint, Noun, Trace
from trimtab.spec.trace import DRAWN_STEP, EMPTY_CACHE, SEARCH
from trimtab.strategies import strategy_of
from trimtab.strategies.limits import keeps_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trimtab.catalog.facts import MemoryFacts
    from trimtab.spec import Setting


GRADIENTS_INDEX = PARTS.index("gradients")
BLOCK_BYTES = 512
"""The allocator rounds every request up to a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class MemoryPeaks:
    """Peaks over the first steps of a job on one device."""

    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int
    parts: Footprint
    """Bytes by purpose at the peak of allocated memory."""
    band: Band
    modules: tuple[tuple[str, int], ...]
    """The modules with most live bytes at the peak, largest first."""
    operation: str
    """The operation at the peak."""
    phase: str
    """The phase of the peak."""
    gradients_bytes: int = 0
    """Peak bytes of gradients at any moment of the steps; `parts` has those at the peak of all memory."""
    logits_bytes: int = 0
    """Bytes of logits, their copies and gradients at the peak, if a cross-entropy is computed from them."""


def estimate_memory(
    trace: Trace,
    facts: MemoryFacts | None = None,
    *,
    expandable: bool = False,
    sharded: bool = False,
    compiled: bool = False,
) -> MemoryPeaks:
    """Replay a trace through the model of the allocator and return its peaks.

    Peaks are those of the training steps, without building the model. Memory that stays cached after building
    counts as reserved. `facts` are those of the device; default: of the fallback device.
    """
    facts = facts or fallback_facts().memory
    begin = trace.marks.get("step0", 0)
    building = allocator_events(trace, trace.order[:begin])
    events = building + allocator_events(trace, trace.order[begin:])
    steps = replay(events, AllocatorConfig(expandable=expandable), reset_peak_at=[len(building)]).windows[-1]
    position, live = _find_peak(trace, begin)
    orders = [
        replay(
            building + allocator_events(order, order.order[begin:]),
            AllocatorConfig(expandable=expandable),
            reset_peak_at=[len(building)],
        ).windows[-1].reserved
        for order in list_step_orders(trace)
    ]  # fmt: skip
    orders.append(steps.reserved)
    context = facts.sharded_context_bytes if sharded else facts.context_bytes
    reserved = int(median(orders))
    process = reserved + context
    least, most = min(orders) + context, max(orders) + context
    low = facts.compiled_band_low if compiled else facts.band_low
    if SEARCH in trace.op_names:
        # cuDNN does not document which kernels it tries: the band begins where it tries none.
        plain = allocator_events(trace, trace.order[begin:], without=SEARCH)
        config = AllocatorConfig(expandable=expandable)
        least = replay(building + plain, config, reset_peak_at=[len(building)]).windows[-1].reserved + context
    return MemoryPeaks(
        allocated_bytes=steps.allocated,
        reserved_bytes=reserved,
        process_bytes=process,
        parts=_footprint(trace, live, steps.allocated, context),
        band=Band(low_bytes=round(least * low), high_bytes=round(most * facts.band_high)),
        modules=_largest_modules(trace, live),
        operation=_operation_at(trace, position),
        phase=_phase_at(trace, position),
        gradients_bytes=_peak_gradients(trace, begin),
        logits_bytes=_count_logits(trace, live),
    )


def list_step_orders(trace: Trace) -> list[Trace]:
    """Return the trace with its later steps rotated, where sizes follow from random numbers.

    A step that takes more than all before it needs new memory, and what was cached for smaller sizes stays
    reserved. So the reserved memory depends on the order: 21 to 34 GB in 8 orders of 8 steps of a masked
    diffusion model. The steps ask for the same tensors one by one, so exchanging sizes exchanges steps.
    """
    marks = sorted(at for name, at in trace.marks.items() if name.startswith(DRAWN_STEP))
    if not marks:
        return []
    bounds = [*marks, *(trace.marks[name] for name in ("step1", "step2", "end"))]
    steps = [[event for event in trace.order[first:last] if event >= 0] for first, last in pairwise(bounds)]
    if len({len(step) for step in steps}) > 1:
        return []
    found = []
    for number in range(1, len(steps)):
        sizes = list(trace.sizes)
        for step, other in zip(steps, steps[number:] + steps[:number], strict=True):
            for allocation, source in zip(step, other, strict=True):
                sizes[allocation] = trace.sizes[source]
        found.append(trace.replace(sizes=tuple(sizes)))
    return found


def allocator_events(trace: Trace, order: Sequence[int], *, without: str = "") -> list[Event]:
    """Return the allocator events of a part of a trace's order; torch requests no block for size 0.

    `without` names an operation whose allocations are left out.
    """
    sizes, streams, ops = trace.sizes, trace.streams, trace.ops
    empty, left_out = (_find_operation(trace, name) for name in (EMPTY_CACHE, without))
    events: list[Event] = []
    for event in order:
        number = event if event >= 0 else ~event
        if ops[number] == empty and event >= 0:
            events.append(("empty_cache", 0, 0, 0))
        elif sizes[number] and ops[number] != left_out:
            events.append(
                ("alloc", number, sizes[number], streams[number]) if event >= 0 else ("free", number, 0, 0)
            )
    return events


def _find_operation(trace: Trace, name: str) -> int:
    """Return the index of an operation's name; -1 if the trace does not have it."""
    return trace.op_names.index(name) if name and name in trace.op_names else -1


def round_to_block(size: int) -> int:
    """Return the bytes that the allocator uses for a request.

    >>> round_to_block(1), round_to_block(512)
    (512, 512)
    """
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def _find_peak(trace: Trace, begin: int) -> tuple[int, set[int]]:
    """Return the position in the order with most live bytes, and the allocations live there."""
    sizes = [round_to_block(size) for size in trace.sizes]
    changes = [sizes[number] if number >= 0 else -sizes[~number] for number in trace.order]
    totals = list(accumulate(changes))
    best = max(totals[begin:], default=0)
    best_at = totals.index(best, begin) if best > 0 else 0
    live: set[int] = set()
    for number in trace.order[: best_at + 1]:
        if number >= 0:
            live.add(number)
        else:
            live.discard(~number)
    return best_at, live


def _peak_gradients(trace: Trace, begin: int) -> int:
    """Return the peak bytes of live gradients in the steps."""
    parts, sizes = trace.parts, trace.sizes
    alive = most = 0
    for number in trace.order[begin:]:
        if parts[number if number >= 0 else ~number] == GRADIENTS_INDEX:
            alive += round_to_block(sizes[number]) if number >= 0 else -round_to_block(sizes[~number])
            most = max(most, alive)
    return most


def _footprint(trace: Trace, live: set[int], allocated: int, context: int) -> Footprint:
    """Return the bytes by part; further rounding by the allocator counts as activations."""
    sums = dict.fromkeys(PARTS, 0)
    for number in live:
        sums[PARTS[trace.parts[number]]] += round_to_block(trace.sizes[number])
    sums["activations"] += max(0, allocated - sum(sums.values()))
    return Footprint(**sums, context=context)


def _largest_modules(trace: Trace, live: set[int], count: int = 5) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for number in live:
        name = trace.module_names[trace.modules[number]]
        if name:
            sums[name] = sums.get(name, 0) + round_to_block(trace.sizes[number])
    return tuple(sorted(sums.items(), key=lambda item: -item[1])[:count])


NUMBERED = re.compile(r"(?<![^.])\d+(?![^.])")
"""Numbers in the names of modules, as in blocks.3.mlp."""
OTHERS = "others"


class PartOwner(NamedTuple):
    """Modules of the same name but for numbers, and their bytes in a part of the memory."""

    module: str
    """The name, with * for numbers that differ; empty: outside of all modules."""
    modules: int
    size: int


def list_part_owners(trace: Trace) -> dict[str, list[PartOwner]]:
    """Return which modules own each part of the memory at the peak, as far as the trace knows."""
    _, live = _find_peak(trace, trace.marks.get("step0", 0))
    sizes: dict[str, list[tuple[str, float]]] = {}
    for number in live:
        part, module = PARTS[trace.parts[number]], trace.module_names[trace.modules[number]]
        # Gradients are recorded with the name of their parameter.
        module = module.rpartition(".")[0] if part == "gradients" else module
        sizes.setdefault(part, []).append((module, round_to_block(trace.sizes[number])))
    return {part: group_owners(pairs) for part, pairs in sizes.items()}


def group_owners(sizes: Iterable[tuple[str, float]], count: int = 8) -> list[PartOwner]:
    """Return the owners of some bytes by module, largest first; modules of repeated blocks are one owner.

    After `count` entries, the rest is one entry with the name OTHERS.

    >>> group_owners([("blocks.0.mlp", 3), ("blocks.1.mlp", 3), ("norm", 1)])
    [PartOwner(module='blocks.*.mlp', modules=2, size=6), PartOwner(module='norm', modules=1, size=1)]
    """
    sums: dict[str, float] = {}
    names: dict[str, set[str]] = {}
    for module, size in sizes:
        name = NUMBERED.sub("*", module)
        names.setdefault(name, set()).add(module)
        sums[name] = sums.get(name, 0) + size
    listed = []
    for name, size in sorted(sums.items(), key=lambda item: -item[1]):
        modules = names[name]
        listed.append(PartOwner(name if len(modules) > 1 else next(iter(modules)), len(modules), round(size)))
    rest = listed[count:]
    others = PartOwner(OTHERS, sum(owner.modules for owner in rest), sum(owner.size for owner in rest))
    return [*listed[:count], *([others] if rest else [])]


CROSS_ENTROPY_OPS = frozenset({
    "aten::_log_softmax",
    "aten::_log_softmax_backward_data",
    "aten::nll_loss_backward",
    "aten::nll_loss2d_backward",
})  # fmt: skip
"""Operations of a cross-entropy whose result has a number for every logit."""


def _count_logits(trace: Trace, live: set[int]) -> int:
    """Return the live bytes of logits: results of a cross-entropy, and others of as many numbers.

    A number has 2 or 4 bytes, so copies of the logits have the size of the largest such result, or half.
    """
    results = {number for number in live if trace.op_names[trace.ops[number]] in CROSS_ENTROPY_OPS}
    largest = max((trace.sizes[number] for number in results), default=0)
    alike = {number for number in live if largest and trace.sizes[number] in (largest, largest // 2)}
    return sum(trace.sizes[number] for number in results | alike)


def _operation_at(trace: Trace, position: int) -> str:
    if not trace.order:
        return ""
    number = trace.order[position]
    return trace.op_names[trace.ops[number if number >= 0 else ~number]].removeprefix("aten::")


def _phase_at(trace: Trace, position: int) -> str:
    names = [name for name, at in sorted(trace.marks.items(), key=lambda item: item[1]) if at <= position]
    return names[-1] if names else ""


# The timeline: live bytes by part at every moment of a step.


MAX_MOMENTS = 240
"""Moments in the timeline of a step: as many as a figure can show."""


class Timeline(Noun, frozen=True, kw_only=True):
    """Bytes of live tensors at some moments of one step."""

    moments: tuple[int, ...]
    """Number of allocations and frees of the step so far."""
    held: tuple[tuple[int, ...], ...]
    """Bytes at each moment, one tuple per part, in the order of PARTS."""
    total: int
    """Allocations and frees in the step."""
    peak: int
    """Index of the moment with most bytes."""
    operation: str
    """The operation at that moment."""
    first_gradient: int | None = None
    """When the first gradient was allocated; None if the step has none."""

    def faults(self) -> list[str]:
        """Return an error for every part without a value for every moment."""
        wrong = [] if len(self.held) == len(PARTS) else ["held has another length than there are parts"]
        return wrong + [
            f"{name} has another length than moments"
            for name, values in zip(PARTS, self.held, strict=False)
            if len(values) != len(self.moments)
        ]


def build_timeline(trace: Trace, moments: int = MAX_MOMENTS) -> Timeline | None:
    """Return the timeline of the last step of a trace, the steady state; None if the trace has no such step.

    The step is divided into intervals. The timeline has the fullest moment of each, so no peak is lost.
    """
    begin, end = trace.marks.get("step2"), trace.marks.get("end")
    if begin is None or end is None or end <= begin:
        return None
    now = _bytes_before(trace, begin)
    stretch = max(1, -(-(end - begin) // moments))
    peaks: list[tuple[int, tuple[int, ...]]] = []
    first = None
    best = -1
    for position in range(begin, end):
        number = trace.order[position]
        fresh = number >= 0
        number = number if fresh else ~number
        part = trace.parts[number]
        now[part] += round_to_block(trace.sizes[number]) if fresh else -round_to_block(trace.sizes[number])
        if fresh and part == GRADIENTS_INDEX and first is None:
            first = position - begin + 1
        if (position - begin) % stretch == 0:
            best = -1
            peaks.append((position - begin + 1, tuple(now)))
        if sum(now) > best:
            best = sum(now)
            peaks[-1] = (position - begin + 1, tuple(now))
    peak = max(range(len(peaks)), key=lambda index: sum(peaks[index][1]))
    return Timeline(
        moments=tuple(at for at, _ in peaks),
        held=tuple(zip(*(parts for _, parts in peaks), strict=True)),
        total=end - begin,
        peak=peak,
        operation=_operation_at(trace, begin + peaks[peak][0] - 1),
        first_gradient=first,
    )


def _bytes_before(trace: Trace, begin: int) -> list[int]:
    """Return the bytes by part at the beginning of a step."""
    totals = [0] * len(PARTS)
    for number in trace.order[:begin]:
        allocation = number if number >= 0 else ~number
        size = round_to_block(trace.sizes[allocation])
        totals[trace.parts[allocation]] += size if number >= 0 else -size
    return totals


# Gradient accumulation: steps are traced without it, and its memory is added here.


def add_accumulation(estimate: Estimate, trace: Trace, setting: Setting) -> Estimate:
    """Return the estimate of a step with several micro-batches.

    From the second micro-batch on, the sum of earlier gradients is live during the whole step, also where a
    step with one micro-batch has no gradients yet. Each new gradient is live beside the sum until it is added
    to it; a compiled backward pass returns all of them at once. Under fsdp, small gradients stay unsharded,
    in fp32, until the last micro-batch.
    """
    if setting.accumulation == 1:
        return estimate
    more = max(
        sum(gradient_sizes(rank)) if setting.compile else _accumulation_rise(rank) for rank in trace.ranks
    )
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


def gradient_sizes(trace: Trace) -> list[int]:
    """Return the bytes of each gradient of one step."""
    begin, end = trace.marks.get("step1", 0), trace.marks.get("step2", len(trace.order))
    return [
        trace.sizes[number]
        for number in trace.order[begin:end]
        if number >= 0 and trace.parts[number] == GRADIENTS_INDEX
    ]


def _accumulation_rise(trace: Trace) -> int:
    """Return by how much the gradients of earlier micro-batches raise the peak of a step."""
    begin, end = trace.marks.get("step1", 0), trace.marks.get("step2", len(trace.order))
    total = sum(gradient_sizes(trace))
    live = own = plain = summed = 0
    for position, number in enumerate(trace.order[:end]):
        allocation = number if number >= 0 else ~number
        size = trace.sizes[allocation] if number >= 0 else -trace.sizes[allocation]
        is_gradient = trace.parts[allocation] == GRADIENTS_INDEX
        live += size
        # A new gradient counts by itself; later it is a part of the sum.
        new = size if is_gradient and number >= 0 else 0
        own += size if is_gradient else 0
        if position >= begin:
            plain = max(plain, live)
            summed = max(summed, live - own + new + total)
    return max(0, summed - plain)
