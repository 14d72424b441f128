"""Traces of settings that need no tracing of their own, from those of simpler ones.

Replicas do what one device does, with gradients in buckets that are summed; shards of another number hold the
same in other portions. So planning traces one device and two numbers of shards, and derives the rest.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from trimtab.predict.step_time import gradient_bytes
from trimtab.spec import PARTS, Work
from trimtab.spec.trace import GRADIENT
from trimtab.strategies import strategy_of
from trimtab.strategies.base import Derivation
from trimtab.strategies.fsdp import ANCHORS
from trimtab.strategies.limits import BUCKET_BYTES
from trimtab.trace.workspace_formulas import size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from trimtab.spec import Cause, Setting, Trace


# From traces at two micro-batches to the trace at any other.
#
# A job runs the same program at every micro-batch, on longer tensors: allocations and frees come in the same
# order, and every size is a + b x micro-batch. Two traces give a and b of every allocation, and so the trace
# that any other micro-batch would have, for the allocator's model to replay. Workspaces that are no straight
# line have their formula beside them, which is worked out again. Where the program is another one, there is
# no answer, and the caller traces for real.


Number = int | Fraction
SAME = ("marks", "streams", "parts", "recomputed", "phases", "part")
"""What has to be equal in two traces of one program, as it stands."""
COUNTS = ("recomputed_flops", "parameters", "trainable", "kept_bytes", "handed_bytes")
"""Numbers of a whole trace that are mixed as sizes are."""
TOLERANCE = 0.001
MAX_COLUMNS = 64
"""Columns in the cache: more than a plan has different ones."""


def at(low: Trace, high: Trace, micro_low: Number, micro_high: Number, micro: Number) -> Trace | None:
    """The trace at `micro`, from those at two other micro-batches; None where their programs differ.

    Works the same for anything else that sizes are affine in, such as Fraction(1, shards).
    """
    if micro_low == micro_high or not same_program(low, high):
        return None
    if micro in {micro_low, micro_high}:
        return low if micro == micro_low else high
    share = Fraction(micro - micro_low) / Fraction(micro_high - micro_low)
    return _mixed((low, high), lambda one, other: _between(one, other, share))


def corner(origin: Trace, trace: Trace, other: Trace) -> Trace | None:
    """The fourth corner of a rectangle: what two changes of the first trace make together.

    A longer micro-batch makes activations longer, and more shards make shards shorter, neither by what the
    other does. None where the programs differ.
    """
    if not (same_program(origin, trace) and same_program(origin, other)):
        return None
    return _mixed((origin, trace, other), lambda first, second, third: max(0, second + third - first))


def _mixed(traces: tuple[Trace, ...], mix: Callable[..., int]) -> Trace:
    """A trace whose numbers are mixed from those of others of the same program."""
    first = traces[0]
    sizes = [
        values[0] if len(set(values)) == 1 else mix(*values)
        for values in zip(*(trace.sizes for trace in traces), strict=True)
    ]
    causes = _causes(traces, mix)
    for number, cause in causes.items():
        known = size(cause)
        sizes[number] = sizes[number] if known is None else known
    places = {cause: place for place, cause in enumerate(dict.fromkeys(causes.values()))}
    works, sequence = _works(traces, mix)
    return first.replace(
        sizes=tuple(sizes),
        causes=tuple(places),
        caused=tuple((number, places[cause]) for number, cause in causes.items()),
        works=works,
        sequence=sequence,
        **{name: mix(*(getattr(trace, name) for trace in traces)) for name in COUNTS},
        beside=tuple(_mixed(each, mix) for each in zip(*(trace.beside for trace in traces), strict=True)),
        assumptions=tuple(dict.fromkeys(said for trace in traces for said in trace.assumptions)),
    )


def close(guess: Trace | None, truth: Trace) -> bool:
    """Whether a trace from a line is as good as the real one: the same program, sizes within a thousandth."""
    if guess is None or not same_program(guess, truth):
        return False
    off = sum(abs(size - other) for size, other in zip(guess.sizes, truth.sizes, strict=True))
    return off <= TOLERANCE * sum(truth.sizes)


def same_program(trace: Trace, other: Trace) -> bool:
    """Whether two traces allocate and free the same things in the same order, whatever their sizes.

    Frees with no allocation between them may come in any order: torch gives back what autocast has cached by
    where it lies in memory, and the allocator's state after all of them is the same.
    """
    return (
        len(trace.order) == len(other.order)
        and all(getattr(trace, name) == getattr(other, name) for name in SAME)
        and _names(trace.ops, trace.op_names) == _names(other.ops, other.op_names)
        and _names(trace.modules, trace.module_names) == _names(other.modules, other.module_names)
        and _in_order(trace.order, _begins(trace)) == _in_order(other.order, _begins(other))
        and _rules(trace) == _rules(other)
        and _kinds(trace) == _kinds(other)
        and len(trace.beside) == len(other.beside)
        and all(map(same_program, trace.beside, other.beside))
    )


# Traces that were worked out from others share their columns, and are compared with each other many times.
@lru_cache(maxsize=MAX_COLUMNS)
def _names(column: tuple[int, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(names[index] for index in column)


def _begins(trace: Trace) -> frozenset[int]:
    return frozenset(trace.marks.values())


@lru_cache(maxsize=MAX_COLUMNS)
def _in_order(order: tuple[int, ...], begins: frozenset[int]) -> tuple[int, ...]:
    """The order, with frees in a row sorted; no run of them reaches over the beginning of a phase."""
    found: list[int] = []
    frees: list[int] = []
    for position, number in enumerate(order):
        if frees and (number >= 0 or position in begins):
            found += sorted(frees)
            frees = []
        if number >= 0:
            found.append(number)
        else:
            frees.append(number)
    return (*found, *sorted(frees))


def _rules(trace: Trace) -> list[tuple[int, str, str, int]]:
    """Which allocations have which formula."""
    each = [(cause.rule, cause.word, len(cause.numbers)) for cause in trace.causes]
    return [(number, *each[index]) for number, index in trace.caused]


def _causes(traces: tuple[Trace, ...], mix: Callable[..., int]) -> dict[int, Cause]:
    """What sizes follow from, mixed, by allocation."""
    found = {}
    for each in zip(*(trace.caused for trace in traces), strict=True):
        causes = [trace.causes[index] for trace, (_, index) in zip(traces, each, strict=True)]
        found[each[0][0]] = causes[0].replace(
            numbers=tuple(mix(*values) for values in zip(*(cause.numbers for cause in causes), strict=True)),
            beside=mix(*(cause.beside for cause in causes)),
        )
    return found


def _kinds(trace: Trace) -> list[tuple[str, str, str, bool, int]]:
    """What each operation of the sequence is, its size left out; a longer one may take more launches."""
    each = [(work.op, work.kind, work.dtype, work.kernels > 0, len(work.dims)) for work in trace.works]
    return [each[index] for index in trace.sequence]


def _works(traces: tuple[Trace, ...], mix: Callable[..., int]) -> tuple[tuple[Work, ...], tuple[int, ...]]:
    """The operations mixed, each different one once."""
    made: dict[tuple[int, ...], Work] = {}
    places: dict[Work, int] = {}
    sequence = []
    for numbers in zip(*(trace.sequence for trace in traces), strict=True):
        if numbers not in made:
            works = [trace.works[number] for trace, number in zip(traces, numbers, strict=True)]
            made[numbers] = works[0].replace(
                flops=mix(*(work.flops for work in works)),
                read_bytes=mix(*(work.read_bytes for work in works)),
                write_bytes=mix(*(work.write_bytes for work in works)),
                dims=tuple(mix(*values) for values in zip(*(work.dims for work in works), strict=True)),
                kernels=max(min(works[0].kernels, 1), mix(*(work.kernels for work in works))),
            )
        sequence.append(places.setdefault(made[numbers], len(places)))
    return tuple(places), tuple(sequence)


def _between(number: int, other: int, share: Fraction) -> int:
    """One plus a share of the way to the other, whole and not below zero.

    >>> _between(1536, 3072, Fraction(1, 2)), _between(100, 200, Fraction(-3, 2))
    (2304, 0)
    """
    if number == other:
        return number
    # What round(one + (other - one) * share) gives, many times faster.
    whole, rest = divmod(number * share.denominator + (other - number) * share.numerator, share.denominator)
    twice = 2 * rest
    if twice > share.denominator or (twice == share.denominator and whole % 2):
        whole += 1
    return max(0, whole)


def direct_shards(numbers: Collection[int]) -> set[int]:
    """Return the numbers of shards to trace as they are, of all that a plan may use.

    Two anchors give any number of shards. Where a plan has at most two numbers, tracing these takes no
    longer, and is exact.

    >>> direct_shards([2]), direct_shards([2, 4, 8])
    ({2}, set())
    """
    several = set(numbers)
    return several if len(several) <= len(ANCHORS) else set()


def derived(setting: Setting, traces: list[Trace]) -> Trace | None:
    """The trace of a setting from those of its `trace_parts`; None where shards do not lie on a line."""
    how = strategy_of(setting).derivation(setting)
    if how is Derivation.BUCKETS:
        return with_buckets(traces[0], gradient_bytes(traces[0], setting))
    if how is Derivation.AS_TRACED or len(traces) == 1:
        return traces[0]
    few, many = ANCHORS
    return at(traces[0], traces[1], Fraction(1, few), Fraction(1, many), Fraction(1, setting.mesh.dp_shard))


def with_buckets(trace: Trace, size: int) -> Trace:
    """The trace with gradients as views of buckets, which are taken before the first batch comes.

    `size` is the bytes of all gradients. Each gradient that autograd makes is added to its view as soon as it
    is complete, and freed there.
    """
    complete = _completed(trace)
    temporary = set(complete.values())
    one_step = _step_gradients(trace, temporary)
    buckets = bucket_sizes(one_step, size)
    first, count = len(trace.sizes), len(buckets)
    place = trace.marks.get("batch", 0)
    order: list[int] = []
    moved: list[int] = []
    """Where each position of the old order has come to."""
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
    return _with_sums(trace, one_step, size).replace(
        order=tuple(order),
        sizes=(*trace.sizes, *buckets),
        streams=(*trace.streams, *[0] * count),
        parts=(*parts, *[gradients] * count),
        modules=(*trace.modules, *[0] * count),
        ops=(*trace.ops, *[0] * count),
        marks={name: moved[at] for name, at in trace.marks.items()},
    )


def _completed(trace: Trace) -> dict[int, int]:
    """The gradient that is complete at each allocation that says so (`GRADIENT`)."""
    if GRADIENT not in trace.op_names:
        return {}
    mark, part = trace.op_names.index(GRADIENT), PARTS.index("gradients")
    waiting: dict[int, int] = {}
    found = {}
    for number in trace.order:
        if number < 0:
            continue
        parameter = trace.modules[number]
        if trace.parts[number] == part:
            waiting[parameter] = number
        elif trace.ops[number] == mark and parameter in waiting:
            found[number] = waiting.pop(parameter)
    return found


def _step_gradients(trace: Trace, temporary: set[int]) -> list[int]:
    """Bytes of the gradients of one step, in the order in which they come."""
    begin, end = trace.marks.get("step1", 0), trace.marks.get("step2", len(trace.order))
    return [trace.sizes[number] for number in trace.order[begin:end] if number in temporary]


def bucket_sizes(gradients: list[int], whole: int) -> list[int]:
    """Bytes of the buckets that gradients of these sizes fill; `whole` counts those that never come, too.

    A bucket is closed by the gradient that fills it, so a large gradient makes a large bucket.

    >>> [one >> 20 for one in bucket_sizes([10 << 20, 20 << 20, 100 << 20, 1 << 20], 132 << 20)]
    [30, 100, 2]
    """
    sizes = [0]
    for added in gradients:
        sizes[-1] += added
        if sizes[-1] >= BUCKET_BYTES:
            sizes.append(0)
    sizes[-1] += max(0, whole - sum(gradients))
    return [size for size in sizes if size]


def _with_sums(trace: Trace, gradients: list[int], whole: int) -> Trace:
    """The operations with those of buckets: they are zeroed, and every gradient is added to its view."""
    if not trace.sequence or "optimizer" not in trace.phases:
        return trace
    dtype = next((work.dtype for work in trace.works if work.kind == "optimizer"), "float32")
    zero = Work(op="aten::_foreach_zero_", kind="pointwise", dtype=dtype, write_bytes=whole, dims=(0, whole))
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
    places = [works.setdefault(one, len(works)) for one in (zero, *sums)]
    update = trace.phases["optimizer"]
    sequence = (places[0], *trace.sequence[:update], *places[1:], *trace.sequence[update:])
    phases = {"forward": 0, "backward": 1, "optimizer": 1 + len(sums)}
    return trace.replace(
        works=tuple(works),
        sequence=sequence,
        phases={name: at + phases.get(name, 0) for name, at in trace.phases.items()},
    )
