"""Traces of settings that need no tracing of their own, from those of simpler ones.

Replicas do what one device does, with a copy of every gradient to reduce; shards of another number hold the
same in other portions. So planning traces one device and two numbers of shards, and derives the rest.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from trimtab.predict.affine import at
from trimtab.predict.time import BUCKET_BYTES, gradient_bytes
from trimtab.spec import PARTS, Mesh, Strategy

if TYPE_CHECKING:
    from collections.abc import Collection

    from trimtab.spec import Setting, Trace

ANCHORS = (4, 16)
"""Numbers of shards that are traced, where several are asked about."""


def simpler(setting: Setting, direct: Collection[int] = ()) -> list[Setting]:
    """Return the settings to trace instead of one: one device for replicas, two anchors for shards.

    Of branches and of pipelines, one copy each. Numbers of shards in `direct` are traced as they are.
    """
    if setting.strategy is Strategy.DDP:
        return [_on(setting, Strategy.SINGLE, Mesh())]
    if setting.strategy in (Strategy.BRANCH, Strategy.HYBRID):
        return [_on(setting, Strategy.BRANCH, Mesh(branch=setting.mesh.branch))]
    if setting.strategy is Strategy.PIPELINE:
        return [_on(setting, Strategy.PIPELINE, Mesh(pp=setting.mesh.pp))]
    if setting.strategy in (Strategy.FSDP, Strategy.HSDP):
        shards = setting.mesh.dp_shard
        numbers = (shards,) if shards in ANCHORS or shards in direct else ANCHORS
        return [_on(setting, Strategy.FSDP, Mesh(dp_shard=number)) for number in numbers]
    return [setting]


def direct_shards(numbers: Collection[int]) -> set[int]:
    """Return the numbers of shards to trace as they are, of all that a plan may use.

    Two anchors give any number of shards. Where a plan has at most two numbers, tracing these takes no
    longer, and is exact.

    >>> direct_shards([2]), direct_shards([2, 4, 8])
    ({2}, set())
    """
    several = set(numbers)
    return several if len(several) <= len(ANCHORS) else set()


def _on(setting: Setting, strategy: Strategy, mesh: Mesh) -> Setting:
    return setting.replace(
        strategy=strategy, mesh=mesh, accumulation=1, global_batch=setting.micro_batch * mesh.data_parallel
    )


def derived(setting: Setting, traces: list[Trace]) -> Trace | None:
    """The trace of a setting from those of `simpler`; None where shards do not lie on a line."""
    if setting.strategy is Strategy.DDP:
        return with_buckets(traces[0], gradient_bytes(traces[0], setting))
    if len(traces) == 1:
        return traces[0]
    few, many = ANCHORS
    return at(traces[0], traces[1], Fraction(1, few), Fraction(1, many), Fraction(1, setting.mesh.dp_shard))


def with_buckets(trace: Trace, size: int) -> Trace:
    """The trace with the buckets that gradients are reduced in, taken before the first batch comes."""
    sizes = [BUCKET_BYTES] * (size // BUCKET_BYTES) + [size % BUCKET_BYTES] * bool(size % BUCKET_BYTES)
    count, place = len(sizes), trace.marks.get("batch", 0)
    first = len(trace.sizes)
    order = (*trace.order[:place], *range(first, first + count), *trace.order[place:])
    later = {name: at + count if at > place else at for name, at in trace.marks.items()}
    return trace.replace(
        order=order,
        sizes=(*trace.sizes, *sizes),
        streams=(*trace.streams, *[0] * count),
        parts=(*trace.parts, *[PARTS.index("communication")] * count),
        modules=(*trace.modules, *[0] * count),
        ops=(*trace.ops, *[0] * count),
        marks=later,
    )
