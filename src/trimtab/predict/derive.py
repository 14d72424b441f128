"""Derive the trace of a setting from traces of simpler settings, without tracing it.

A replica runs the same program as a single device, with gradients in all-reduced buckets. Another number of
shards only changes the sizes. So planning traces one device and two numbers of shards, and derives the rest.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from trimtab.predict.step_time import gradient_bytes
from trimtab.spec import PARTS, Work
from trimtab.spec.trace import GRADIENT, ZERO_GRADIENTS
from trimtab.strategies import strategy_of
from trimtab.strategies.base import Derivation
from trimtab.strategies.fsdp import ANCHORS
from trimtab.strategies.limits import BUCKET_BYTES
from trimtab.trace.workspace_formulas import evaluate_cause

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from trimtab.spec import Setting, SizeCause, Trace


# Interpolation between two micro-batches.
#
# A job runs the same program at every micro-batch, on longer tensors: allocations and frees have the same
# order, and every size is a + b x micro-batch. Two traces give a and b of every allocation, and so the trace
# at any other micro-batch. The sizes of some workspaces are not linear: the trace has their formula, which is
# evaluated again. If the two programs differ, the result is None, and the caller has to trace the setting.


Number = int | Fraction
MIXED_COLUMNS = ("host_sizes", "pinned_sizes")
"""Sizes besides those of the device, mixed entry by entry."""
EQUAL_FIELDS = ("marks", "streams", "parts", "recomputed", "phases", "part", "stage_layers", "block_work")
"""Fields that are equal in all traces of one program."""
MIXED_FIELDS = (
    "recomputed_flops",
    "parameters",
    "trainable",
    "kept_bytes",
    "handed_bytes",
    "host_state_bytes",
    "checkpoint_bytes",
)
"""Totals of a trace that are mixed in the same way as sizes."""
TOLERANCE = 0.001
NEAR = 0.005
"""Largest difference of two programs that may stand for each other."""
MAX_COLUMNS = 64
"""Cached columns: more than the number of different ones in a plan."""


def interpolate_trace(
    low: Trace, high: Trace, micro_low: Number, micro_high: Number, micro: Number
) -> Trace | None:
    """Return the trace at `micro` from traces at two other micro-batches; None if their programs differ.

    Also works for other quantities in which sizes are affine, such as Fraction(1, shards).
    """
    if micro_low == micro_high or not has_same_program(low, high):
        return None
    if micro in {micro_low, micro_high}:
        return low if micro == micro_low else high
    share = Fraction(micro - micro_low) / Fraction(micro_high - micro_low)
    return _mix_traces((low, high), lambda first, second: _interpolate(first, second, share))


def combine_changes(origin: Trace, trace: Trace, other: Trace) -> Trace | None:
    """Return the trace with two changes, from the original and a trace with each: second + third - first.

    The changes are independent: a larger micro-batch makes activations larger, more shards make shards
    smaller. None if the programs differ.
    """
    if not (has_same_program(origin, trace) and has_same_program(origin, other)):
        return None
    return _mix_traces((origin, trace, other), lambda first, second, third: max(0, second + third - first))


def _mix_traces(traces: tuple[Trace, ...], mix: Callable[..., int]) -> Trace:
    """Return a trace whose numbers are mixed from several traces of the same program."""
    first = traces[0]
    # A trace has thousands of allocations, but only some hundred different sizes.
    columns = list(zip(*(trace.sizes for trace in traces), strict=True))
    mixed = {values: values[0] if len(set(values)) == 1 else mix(*values) for values in set(columns)}
    sizes = [mixed[values] for values in columns]
    causes = _mix_causes(traces, mix)
    places = {cause: place for place, cause in enumerate(dict.fromkeys(causes.values()))}
    computed = {cause: evaluate_cause(cause) for cause in places}
    for number, cause in causes.items():
        size = computed[cause]
        sizes[number] = sizes[number] if size is None else size
    works, sequence = _mix_works(traces, mix)
    return first.replace(
        sizes=tuple(sizes),
        causes=tuple(places),
        caused=tuple((number, places[cause]) for number, cause in causes.items()),
        works=works,
        sequence=sequence,
        **{name: mix(*(getattr(trace, name) for trace in traces)) for name in MIXED_FIELDS},
        **{
            name: tuple(
                mix(*sizes) for sizes in zip(*(getattr(trace, name) for trace in traces), strict=True)
            )
            for name in MIXED_COLUMNS
        },
        beside=tuple(
            _mix_traces(each, mix) for each in zip(*(trace.beside for trace in traces), strict=True)
        ),
        assumptions=tuple(dict.fromkeys(note for trace in traces for note in trace.assumptions)),
    )


def is_close(guess: Trace | None, truth: Trace) -> bool:
    """Return whether an interpolated trace has the real one's program, and sizes within 0.1 %."""
    if guess is None or not has_same_program(guess, truth):
        return False
    off = sum(abs(size - other) for size, other in zip(guess.sizes, truth.sizes, strict=True))
    return off <= TOLERANCE * sum(truth.sizes)


def has_near_totals(trace: Trace, other: Trace) -> bool:
    """Return whether two traces allocate, read, write and compute the same within 0.5 %."""
    return all(
        abs(total - second) <= NEAR * max(total, second)
        for total, second in zip(_sum_totals(trace), _sum_totals(other), strict=True)
    )


def _sum_totals(trace: Trace) -> tuple[int, int, int, int]:
    """Return the bytes that a trace allocates, then the bytes, operations and kernels of its sequence."""
    works = [trace.works[index] for index in trace.sequence]
    return (
        sum(trace.sizes),
        sum(work.read_bytes + work.write_bytes for work in works),
        sum(work.flops for work in works),
        sum(work.kernels for work in works),
    )


def has_same_program(trace: Trace, other: Trace) -> bool:
    """Return whether two traces allocate and free the same things in the same order, whatever their sizes.

    Frees with no allocation between them may have any order: torch frees the autocast cache in order of
    memory addresses, and the allocator's state afterwards is the same.
    """
    return (
        len(trace.order) == len(other.order)
        and all(getattr(trace, name) == getattr(other, name) for name in EQUAL_FIELDS)
        and _expand_names(trace.ops, trace.op_names) == _expand_names(other.ops, other.op_names)
        and _expand_names(trace.modules, trace.module_names)
        == _expand_names(other.modules, other.module_names)
        and _sort_frees(trace.order, _phase_starts(trace)) == _sort_frees(other.order, _phase_starts(other))
        and _formulas(trace) == _formulas(other)
        and _work_kinds(trace) == _work_kinds(other)
        and all(len(getattr(trace, name)) == len(getattr(other, name)) for name in MIXED_COLUMNS)
        and len(trace.beside) == len(other.beside)
        and all(map(has_same_program, trace.beside, other.beside))
    )


# Derived traces share columns and are compared with each other many times, so results are cached.
@lru_cache(maxsize=MAX_COLUMNS)
def _expand_names(column: tuple[int, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(names[index] for index in column)


def _phase_starts(trace: Trace) -> frozenset[int]:
    return frozenset(trace.marks.values())


@lru_cache(maxsize=MAX_COLUMNS)
def _sort_frees(order: tuple[int, ...], begins: frozenset[int]) -> tuple[int, ...]:
    """Return the order with consecutive frees sorted, within a phase only."""
    entries: list[int] = []
    frees: list[int] = []
    for position, number in enumerate(order):
        if frees and (number >= 0 or position in begins):
            entries += sorted(frees)
            frees = []
        if number >= 0:
            entries.append(number)
        else:
            frees.append(number)
    return (*entries, *sorted(frees))


def _formulas(trace: Trace) -> list[tuple[int, str, str, int]]:
    """Return which allocations have which formula."""
    each = [(cause.rule, cause.word, len(cause.numbers)) for cause in trace.causes]
    return [(number, *each[index]) for number, index in trace.caused]


def _mix_causes(traces: tuple[Trace, ...], mix: Callable[..., int]) -> dict[int, SizeCause]:
    """Return the mixed inputs of the size formulas, by allocation."""
    mixed = {}
    made: dict[tuple[int, ...], SizeCause] = {}
    for each in zip(*(trace.caused for trace in traces), strict=True):
        places = tuple([index for _, index in each])
        if places not in made:
            causes = [trace.causes[index] for trace, index in zip(traces, places, strict=True)]
            made[places] = causes[0].replace(
                numbers=tuple(
                    mix(*values) for values in zip(*(cause.numbers for cause in causes), strict=True)
                ),
                beside=mix(*(cause.beside for cause in causes)),
            )
        mixed[each[0][0]] = made[places]
    return mixed


def _work_kinds(trace: Trace) -> list[tuple[str, str, str, bool, int]]:
    """Return each operation of the sequence without its size; a larger one may need more launches."""
    each = [(work.op, work.kind, work.dtype, work.kernels > 0, len(work.dims)) for work in trace.works]
    return [each[index] for index in trace.sequence]


def _mix_works(
    traces: tuple[Trace, ...], mix: Callable[..., int]
) -> tuple[tuple[Work, ...], tuple[int, ...]]:
    """Return the mixed operations, without duplicates, and the sequence of their indices."""
    places: dict[Work, int] = {}
    place_of: dict[tuple[int, ...], int] = {}
    entries = list(zip(*(trace.sequence for trace in traces), strict=True))
    for numbers in dict.fromkeys(entries):
        works = [trace.works[number] for trace, number in zip(traces, numbers, strict=True)]
        mixed = works[0].replace(
            flops=mix(*(work.flops for work in works)),
            read_bytes=mix(*(work.read_bytes for work in works)),
            write_bytes=mix(*(work.write_bytes for work in works)),
            additions=mix(*(work.additions for work in works)),
            waiting_additions=mix(*(work.waiting_additions for work in works)),
            instructions=mix(*(work.instructions for work in works)),
            dims=tuple(mix(*values) for values in zip(*(work.dims for work in works), strict=True)),
            kernels=max(min(works[0].kernels, 1), mix(*(work.kernels for work in works))),
        )
        place_of[numbers] = places.setdefault(mixed, len(places))
    return tuple(places), tuple([place_of[numbers] for numbers in entries])


def _interpolate(number: int, other: int, share: Fraction) -> int:
    """Return `number` plus a share of the way to `other`, rounded and at least 0.

    >>> _interpolate(1536, 3072, Fraction(1, 2)), _interpolate(100, 200, Fraction(-3, 2))
    (2304, 0)
    """
    if number == other:
        return number
    # The same as round(number + (other - number) * share), many times faster.
    whole, rest = divmod(number * share.denominator + (other - number) * share.numerator, share.denominator)
    twice = 2 * rest
    if twice > share.denominator or (twice == share.denominator and whole % 2):
        whole += 1
    return max(0, whole)


def direct_shards(numbers: Collection[int]) -> set[int]:
    """Return the numbers of shards to trace directly, of all that a plan may use.

    Traces at two anchors give any number of shards. If a plan has at most two numbers, tracing these takes
    no longer and is exact.

    >>> direct_shards([2]), direct_shards([2, 4, 8])
    ({2}, set())
    """
    several = set(numbers)
    return several if len(several) <= len(ANCHORS) else set()


def derive_trace(setting: Setting, traces: list[Trace]) -> Trace | None:
    """Return the trace of a setting from its `trace_parts`; None if sizes are not affine in 1/shards."""
    how = strategy_of(setting).derivation(setting)
    if how is Derivation.BUCKETS:
        return add_buckets(traces[0], gradient_bytes(traces[0], setting))
    if how not in {Derivation.AS_TRACED, Derivation.SHARD_LINE}:
        raise NotImplementedError(f"derive_trace has no rule for {how}")
    if how is Derivation.AS_TRACED or len(traces) == 1:
        return traces[0]
    few, many = ANCHORS
    return interpolate_trace(
        traces[0], traces[1], Fraction(1, few), Fraction(1, many), Fraction(1, setting.mesh.dp_shard)
    )


def add_buckets(trace: Trace, size: int) -> Trace:
    """Return the trace with gradients as views of buckets, which are allocated before the first batch.

    `size` is the bytes of all gradients. Each gradient from autograd is added to its view as soon as it is
    complete, and then freed.
    """
    complete = _find_completed(trace)
    temporary = set(complete.values())
    one_step = _step_gradients(trace, temporary)
    buckets = bucket_sizes(one_step, size)
    first, count = len(trace.sizes), len(buckets)
    place = trace.marks.get("batch", 0)
    order: list[int] = []
    moved: list[int] = []
    """New position of each entry of the old order."""
    for position, number in enumerate(trace.order):
        moved.append(len(order))
        if position == place:
            order += range(first, first + count)
        if number >= 0 or ~number not in temporary:
            order.append(number)
        if number < 0 and ~number in complete:
            order.append(~complete[~number])
    moved.append(len(order))
    workspace, gradients = PARTS.index("workspace"), PARTS.index("gradients")
    parts = [workspace if number in temporary else part for number, part in enumerate(trace.parts)]
    return _add_bucket_works(trace, one_step, size).replace(
        order=tuple(order),
        sizes=(*trace.sizes, *buckets),
        streams=(*trace.streams, *[0] * count),
        parts=(*parts, *[gradients] * count),
        modules=(*trace.modules, *[0] * count),
        ops=(*trace.ops, *[0] * count),
        marks={name: moved[at] for name, at in trace.marks.items()},
    )


def _find_completed(trace: Trace) -> dict[int, int]:
    """Map each allocation that marks a complete gradient (`GRADIENT`) to that gradient's allocation."""
    if GRADIENT not in trace.op_names:
        return {}
    mark, part = trace.op_names.index(GRADIENT), PARTS.index("gradients")
    waiting: dict[int, int] = {}
    completed = {}
    for number in trace.order:
        if number < 0:
            continue
        parameter = trace.modules[number]
        if trace.parts[number] == part:
            waiting[parameter] = number
        elif trace.ops[number] == mark and parameter in waiting:
            completed[number] = waiting.pop(parameter)
    return completed


def _step_gradients(trace: Trace, temporary: set[int]) -> list[int]:
    """Return the bytes of the gradients of one step, in order of allocation."""
    begin, end = trace.marks.get("step1", 0), trace.marks.get("step2", len(trace.order))
    return [trace.sizes[number] for number in trace.order[begin:end] if number in temporary]


def bucket_sizes(gradients: list[int], total: int) -> list[int]:
    """Return the bytes of the buckets for gradients of these sizes; `total` includes unused parameters.

    The gradient that fills a bucket closes it, so a large gradient makes a large bucket.

    >>> [bucket >> 20 for bucket in bucket_sizes([10 << 20, 20 << 20, 100 << 20, 1 << 20], 132 << 20)]
    [30, 100, 2]
    """
    sizes = [0]
    for added in gradients:
        sizes[-1] += added
        if sizes[-1] >= BUCKET_BYTES:
            sizes.append(0)
    sizes[-1] += max(0, total - sum(gradients))
    return [size for size in sizes if size]


def _add_bucket_works(trace: Trace, gradients: list[int], total: int) -> Trace:
    """Add the operations on buckets: zeroing them, and adding every gradient to its view."""
    if not trace.sequence or "optimizer" not in trace.phases:
        return trace
    dtype = next((work.dtype for work in trace.works if work.kind == "optimizer"), "float32")
    zero = Work(op=ZERO_GRADIENTS, kind="pointwise", dtype=dtype, write_bytes=total, dims=(0, total))
    sums = [
        Work(
            op="aten::add_",
            kind="pointwise",
            dtype=dtype,
            read_bytes=2 * size,
            write_bytes=size,
            dims=(0, size),
        )
        for size in gradients
    ]
    works = {work: place for place, work in enumerate(trace.works)}
    places = [works.setdefault(work, len(works)) for work in (zero, *sums)]
    update = trace.phases["optimizer"]
    sequence = (places[0], *trace.sequence[:update], *places[1:], *trace.sequence[update:])
    phases = {"forward": 1, "backward": 1, "optimizer": 1 + len(sums)}
    return trace.replace(
        works=tuple(works),
        sequence=sequence,
        phases={name: at + phases.get(name, 0) for name, at in trace.phases.items()},
    )
