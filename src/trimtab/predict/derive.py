"""Traces of settings that need no tracing of their own, from those of simpler ones.

Replicas do what one device does, with gradients in buckets that are summed; shards of another number hold the
same in other portions. So planning traces one device and two numbers of shards, and derives the rest.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from trimtab.predict.affine import at
from trimtab.predict.time import gradient_bytes
from trimtab.spec import PARTS, Work
from trimtab.spec.trace import GRADIENT
from trimtab.strategies import strategy_of
from trimtab.strategies.base import Derivation
from trimtab.strategies.fsdp import ANCHORS
from trimtab.strategies.limits import BUCKET_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection

    from trimtab.spec import Setting, Trace


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
    for size in gradients:
        sizes[-1] += size
        if sizes[-1] >= BUCKET_BYTES:
            sizes.append(0)
    sizes[-1] += max(0, whole - sum(gradients))
    return [size for size in sizes if size]


def _with_sums(trace: Trace, gradients: list[int], whole: int) -> Trace:
    """The operations with those of buckets: they are zeroed, and every gradient is added to its view."""
    if not trace.sequence or "optimizer" not in trace.phases:
        return trace
    dtype = next((one.dtype for one in trace.works if one.kind == "optimizer"), "float32")
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
