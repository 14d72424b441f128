"""Get the traces of settings with little tracing: from the cache, by interpolation, or else traced.

Settings that differ only in the micro-batch are a family. Traces of two members give all others
(`predict.derive`). So a request for one member also traces a second one, on another core, and later requests
for the family need no tracing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.cache import TRACES, MemoryCache
from trimtab.errors import TrimtabError
from trimtab.predict.derive import combine_changes, has_near_totals, interpolate_trace, is_close
from trimtab.spec import Trace
from trimtab.strategies import one_micro_batch, strategy_of
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import cached_family, family_key, trace_key, trace_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trimtab.spec import Device, Setting
    from trimtab.trace.server import WorkerProcess

Family = dict[int, Trace | TrimtabError]
"""Traces or errors of a family, by micro-batch."""


def get_traces(  # noqa: PLR0913 - the fields of a TraceRequest, with several settings
    job: str,
    settings: Sequence[Setting],
    device: Device,
    *,
    overrides: dict[str, Any] | None = None,
    clip: float | None = None,
    cache: bool = True,
    families: dict[str, Family] | None = None,
    worker: WorkerProcess | None = None,
    partner: bool = True,
    timeout_s: float | None = None,
) -> list[Trace | TrimtabError]:
    """Return the trace or the error of each of several settings of one job.

    Without `cache`, nothing is read from disk and nothing is traced for later requests; settings of one
    family are still interpolated. `families` has traces of earlier calls; new ones are added to it. Without
    `worker`, a worker process is started for this call. Without `partner`, no second micro-batch is traced
    for later requests. Tracing fails after `timeout_s` seconds; None: after the usual limits.
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
    for choose in (_choose_ends, _choose_all):
        chosen = _choose_missing(list(zip(names, settings, strict=True)), known, choose)
        if cache and partner and choose is _choose_ends and _needs_partner(chosen, known):
            name, first = chosen[0]
            chosen.append((name, with_micro_batch(first, partner_micro_batch(first.micro_batch))))
        corners = _find_corners(chosen) if choose is _choose_ends else {}
        chosen = [pair for pair in chosen if pair not in corners]
        if chosen:
            these = [setting for _, setting in chosen]
            answers = trace_settings(
                job,
                these,
                device,
                overrides=overrides,
                clip=clip,
                cache=cache,
                worker=worker,
                timeout_s=timeout_s,
            )
            for (name, setting), answer in zip(chosen, answers, strict=True):
                known[name][setting.micro_batch] = answer
                # The key changes with the first trace that turns out to serve one GPU only.
                families.setdefault(family_key(requests[0].replace(setting=setting)), known[name])
        for (name, setting), parts in corners.items():
            fourth = _combine_corner([known[own][micro] for own, micro in parts])
            if fourth is not None:
                known[name][setting.micro_batch] = fourth
                if cache:
                    TRACES.store(trace_key(requests[0].replace(setting=setting)), fourth.to_json())
    every = [
        interpolate_family(known[name], setting.micro_batch)
        for name, setting in zip(names, settings, strict=True)
    ]
    return [answer for answer in every if answer is not None]


def _choose_missing(
    asked: list[tuple[str, Setting]], known: dict[str, Family], choose: Callable[[list[int]], list[int]]
) -> list[tuple[str, Setting]]:
    """Return the settings of each family to trace now."""
    chosen = []
    for name, family_traces in known.items():
        mine = {setting.micro_batch: setting for family, setting in asked if family == name}
        missing = [micro for micro in sorted(mine) if interpolate_family(family_traces, micro) is None]
        chosen += [(name, mine[micro]) for micro in choose(missing)]
    return chosen


def has_trace(request: TraceRequest) -> bool:
    """Return whether a request needs no tracing."""
    return cached_trace(request) is not None


def cached_trace(request: TraceRequest) -> Trace | None:
    """Return the trace of a request from the cache, directly or interpolated; None if it has to be traced."""
    trace = interpolate_family(cached_family(request), request.setting.micro_batch)
    return trace if isinstance(trace, Trace) else None


def _choose_ends(missing: list[int]) -> list[int]:
    """Return the micro-batches of a family that give the others: the smallest and the largest.

    Micro-batch 1 is always traced: such a batch can be broadcast, and has several memory layouts.
    """
    several = [micro for micro in missing if micro > 1]
    return sorted({*missing[:1], *several[:1], *several[-1:]})


def _find_corners(chosen: list[tuple[str, Setting]]) -> dict[tuple[str, Setting], list[tuple[str, int]]]:
    """Return settings to compute from three others: of 2 x 2 micro-batches and shards, the largest of both.

    The three are given by family and micro-batch: first the smallest of both, then those with one change.
    """
    corners = {}
    by_shards: dict[Setting, dict[int, tuple[str, list[Setting]]]] = {}
    for name, setting in chosen:
        if strategy_of(setting).spans_shard_lines and setting.micro_batch > 1:
            alike = one_micro_batch(setting).replace(micro_batch=1, global_batch=1)
            several = by_shards.setdefault(alike, {})
            several.setdefault(setting.mesh.dp_shard, (name, []))[1].append(setting)
    for several in by_shards.values():
        first, mine = several[min(several)]
        sizes = sorted(setting.micro_batch for setting in mine)
        for name, theirs in several.values():
            if name == first or sizes[0] not in {their.micro_batch for their in theirs}:
                continue
            for their in theirs:
                if their.micro_batch in sizes[1:]:
                    corners[name, their] = [(first, sizes[0]), (first, their.micro_batch), (name, sizes[0])]
    return corners


def _combine_corner(parts: list[Trace | TrimtabError]) -> Trace | None:
    traced = [part for part in parts if isinstance(part, Trace)]
    trace = combine_changes(*traced) if len(traced) == len(parts) else None
    if trace is None:
        return None
    note = "sizes are worked out from traces at another micro-batch and another number of shards"
    return trace.replace(assumptions=(*trace.assumptions, note))


def _choose_all(missing: list[int]) -> list[int]:
    return missing


def _needs_partner(chosen: list[tuple[str, Setting]], known: dict[str, Family]) -> bool:
    """Return whether the first setting to trace is the only one of its family, so that it needs a second.

    A compiled one does not get a second: that would double the time of the answer.
    """
    if not chosen or chosen[0][1].compile:
        return False
    name = chosen[0][0]
    return len([own for own, _ in chosen if own == name]) == 1 and not known[name]


def partner_micro_batch(micro: int) -> int:
    """Return the second micro-batch to trace with a first one.

    >>> partner_micro_batch(8), partner_micro_batch(1)
    (16, 4)
    """
    return 2 * micro if micro > 1 else 4


def with_micro_batch(setting: Setting, micro: int) -> Setting:
    """Return the setting at another micro-batch, without accumulation."""
    return setting.replace(micro_batch=micro, accumulation=1, global_batch=micro * setting.data_parallel)


def interpolate_family(family: Mapping[int, Trace | TrimtabError], micro: int) -> Trace | TrimtabError | None:
    """Return the trace or error at a micro-batch, directly or interpolated; None if it has to be traced.

    If the family has a third trace, it has to be on the same line. Where the program changes between the
    neighbours, the line through two on the same side is used, if the change is small.
    """
    if micro in family:
        return family[micro]
    traced = {size: trace for size, trace in family.items() if isinstance(trace, Trace)}
    if family and not traced:
        # It fails at every micro-batch.
        return next(iter(family.values()))
    if micro == 1 or len(traced) < 2:  # noqa: PLR2004 - a line has two ends
        return None
    by_distance = sorted(traced, key=lambda size: (size == 1, abs(size - micro)))
    below = next((size for size in by_distance if size < micro), None)
    above = next((size for size in by_distance if size > micro), None)
    ends = [below, above] if below is not None and above is not None else by_distance[:2]
    low, high = sorted(size for size in ends if size is not None)
    third = next((size for size in by_distance if size not in (low, high, 1)), None)
    trace = _interpolate_cached(traced[low], traced[high], low, high, micro)
    if trace is None:
        return _extrapolate(traced, micro)
    if third is not None and not is_close(
        _interpolate_cached(traced[low], traced[high], low, high, third), traced[third]
    ):
        return None
    return _note_line(trace, low, high)


MAX_INTERPOLATED = 32
_INTERPOLATED: MemoryCache[tuple[Trace, Trace, Trace | None]] = MemoryCache(max_entries=MAX_INTERPOLATED)


def _interpolate_cached(low: Trace, high: Trace, micro_low: int, micro_high: int, micro: int) -> Trace | None:
    """Return `interpolate_trace`; cached, as it is first asked whether a trace follows, and then for it."""
    # The entry keeps both traces alive, so no other trace can have their identity.
    key = id(low), id(high), micro_low, micro_high, micro
    return _INTERPOLATED.get(
        key, lambda: (low, high, interpolate_trace(low, high, micro_low, micro_high, micro))
    )[2]


def _note_line(trace: Trace, low: int, high: int) -> Trace:
    note = f"sizes are read off a line through traces at micro-batches {low} and {high}"
    return trace.replace(assumptions=(*trace.assumptions, note))


def _extrapolate(traced: Mapping[int, Trace], micro: int) -> Trace | None:
    """Return the trace from two smaller or two larger micro-batches, where the program changes in between.

    A kernel for few rows has other workspaces, for example. Return None unless the program beyond the change
    allocates nearly as many bytes as the line through the two: then it does not matter where it changes.
    """
    below = sorted((size for size in traced if 1 < size < micro), reverse=True)
    above = sorted(size for size in traced if size > micro)
    for pair, beyond in ((above[:2], below[:1]), (below[:2], above[:1])):
        if len(pair) < 2 or not beyond:  # noqa: PLR2004 - a line has two ends
            continue
        low, high = sorted(pair)
        there = _interpolate_cached(traced[low], traced[high], low, high, beyond[0])
        if there is None or not has_near_totals(there, traced[beyond[0]]):
            continue
        trace = _interpolate_cached(traced[low], traced[high], low, high, micro)
        if trace is not None:
            return _note_line(trace, low, high)
    return None
