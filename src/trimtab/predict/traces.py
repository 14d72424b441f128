"""The traces of settings with as little tracing as possible: cached, between two cached ones, or traced.

Settings that differ in the micro-batch alone are a family. Two members give every other (`predict.affine`),
so a question about one member traces a second one beside it, on another core, and later questions about the
family need no tracing at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.cache import TRACES
from trimtab.errors import TrimtabError
from trimtab.predict.derive import at, close, corner
from trimtab.spec import Trace
from trimtab.strategies import one_micro_batch, strategy_of
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import cached_family, family_key, trace_key, traced_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trimtab.spec import Device, Setting
    from trimtab.trace.server import WorkerProcess

Family = dict[int, Trace | TrimtabError]
"""What is known of a family, by micro-batch."""


def traces(  # noqa: PLR0913 - what a Request has, with several settings
    job: str,
    settings: Sequence[Setting],
    device: Device,
    *,
    overrides: dict[str, Any] | None = None,
    clip: float | None = None,
    cache: bool = True,
    families: dict[str, Family] | None = None,
    worker: WorkerProcess | None = None,
) -> list[Trace | TrimtabError]:
    """The traces of several settings of one job, or why there is none.

    Without `cache` nothing is read from disk and nothing is traced for later; settings of one family help
    each other in any case. `families` are traces of earlier calls, and are added to. Without `worker`, a
    worker process is started for this call.
    """
    requests = [
        TraceRequest(job=job, overrides=overrides or {}, setting=setting, device=device, clip=clip)
        for setting in settings
    ]
    names = [family_key(request) for request in requests]
    families = {} if families is None else families
    for name, request in zip(names, requests, strict=True):
        if name not in families:
            families[name] = dict(cached_family(request)) if cache else {}
    known = {name: families[name] for name in names}
    for choose in (_ends, _every):
        chosen = _chosen(list(zip(names, settings, strict=True)), known, choose)
        if cache and choose is _ends and _is_alone(chosen, known):
            name, one = chosen[0]
            chosen.append((name, resized(one, partner_of(one.micro_batch))))
        corners = _corners(chosen) if choose is _ends else {}
        chosen = [pair for pair in chosen if pair not in corners]
        if chosen:
            these = [one for _, one in chosen]
            answers = traced_all(
                job, these, device, overrides=overrides, clip=clip, cache=cache, worker=worker
            )
            for (name, one), answer in zip(chosen, answers, strict=True):
                known[name][one.micro_batch] = answer
        for (name, one), parts in corners.items():
            fourth = _at_corner([known[own][micro] for own, micro in parts])
            if fourth is not None:
                known[name][one.micro_batch] = fourth
                if cache:
                    TRACES.store(trace_key(requests[0].replace(setting=one)), fourth.to_json())
    every = [between(known[name], setting.micro_batch) for name, setting in zip(names, settings, strict=True)]
    return [one for one in every if one is not None]


def _chosen(
    asked: list[tuple[str, Setting]], known: dict[str, Family], choose: Callable[[list[int]], list[int]]
) -> list[tuple[str, Setting]]:
    """What of each family is to be traced now."""
    chosen = []
    for name, found in known.items():
        mine = {one.micro_batch: one for own, one in asked if own == name}
        missing = [micro for micro in sorted(mine) if between(found, micro) is None]
        chosen += [(name, mine[micro]) for micro in choose(missing)]
    return chosen


def is_known(request: TraceRequest) -> bool:
    """Whether the trace of a request can be had without tracing."""
    return cached_trace(request) is not None


def cached_trace(request: TraceRequest) -> Trace | None:
    """Return the trace of a request from the cache, itself or by two others; None if it has to be traced."""
    found = between(cached_family(request), request.setting.micro_batch)
    return found if isinstance(found, Trace) else None


def _ends(missing: list[int]) -> list[int]:
    """Those micro-batches of a family that give the others: the smallest and the largest.

    One sample is traced for itself: a batch of one can be broadcast, or lie in memory both ways.
    """
    several = [micro for micro in missing if micro > 1]
    return sorted({*missing[:1], *several[:1], *several[-1:]})


def _corners(chosen: list[tuple[str, Setting]]) -> dict[tuple[str, Setting], list[tuple[str, int]]]:
    """Settings that three others give: of two micro-batches at two numbers of shards, the largest of both.

    Those three come by family and micro-batch: the corner that both differ from, then those beside it.
    """
    found = {}
    by_shards: dict[Setting, dict[int, tuple[str, list[Setting]]]] = {}
    for name, one in chosen:
        if strategy_of(one).spans_shard_lines and one.micro_batch > 1:
            alike = one_micro_batch(one).replace(micro_batch=1, global_batch=1)
            several = by_shards.setdefault(alike, {})
            several.setdefault(one.mesh.dp_shard, (name, []))[1].append(one)
    for several in by_shards.values():
        first, mine = several[min(several)]
        sizes = sorted(one.micro_batch for one in mine)
        for name, theirs in several.values():
            if name == first or sizes[0] not in {their.micro_batch for their in theirs}:
                continue
            for their in theirs:
                if their.micro_batch in sizes[1:]:
                    found[name, their] = [(first, sizes[0]), (first, their.micro_batch), (name, sizes[0])]
    return found


def _at_corner(parts: list[Trace | TrimtabError]) -> Trace | None:
    traced = [part for part in parts if isinstance(part, Trace)]
    found = corner(*traced) if len(traced) == len(parts) else None
    if found is None:
        return None
    said = "sizes are worked out from traces at another micro-batch and another number of shards"
    return found.replace(assumptions=(*found.assumptions, said))


def _every(missing: list[int]) -> list[int]:
    return missing


def _is_alone(chosen: list[tuple[str, Setting]], known: dict[str, Family]) -> bool:
    """Whether the first one to trace would be the only one of its family, so that a partner is of use."""
    if not chosen:
        return False
    name = chosen[0][0]
    return len([own for own, _ in chosen if own == name]) == 1 and not known[name]


def partner_of(micro: int) -> int:
    """The second micro-batch to trace beside a first one.

    >>> partner_of(8), partner_of(1)
    (16, 4)
    """
    return 2 * micro if micro > 1 else 4


def resized(setting: Setting, micro: int) -> Setting:
    """The setting at another micro-batch, without accumulation."""
    return setting.replace(micro_batch=micro, accumulation=1, global_batch=micro * setting.data_parallel)


def between(known: Mapping[int, Trace | TrimtabError], micro: int) -> Trace | TrimtabError | None:
    """What is known of a micro-batch: itself, or by two others of its family; None where they do not tell.

    A third one, where there is one, has to lie on the same line.
    """
    if micro in known:
        return known[micro]
    near = {size: number for size, number in known.items() if isinstance(number, Trace)}
    if known and not near:
        # It fails whatever the size.
        return next(iter(known.values()))
    if micro == 1 or len(near) < 2:  # noqa: PLR2004 - a line has two ends
        return None
    by_distance = sorted(near, key=lambda size: (size == 1, abs(size - micro)))
    below = next((size for size in by_distance if size < micro), None)
    above = next((size for size in by_distance if size > micro), None)
    ends = [below, above] if below is not None and above is not None else by_distance[:2]
    low, high = sorted(size for size in ends if size is not None)
    third = next((size for size in by_distance if size not in (low, high, 1)), None)
    if third is not None and not close(at(near[low], near[high], low, high, third), near[third]):
        return None
    found = at(near[low], near[high], low, high, micro)
    if found is None:
        return None
    said = f"sizes are read off a line through traces at micro-batches {low} and {high}"
    return found.replace(assumptions=(*found.assumptions, said))
