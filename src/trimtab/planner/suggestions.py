"""Explain that nothing fits, and find the nearest changes that would fit, each with an estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trimtab.errors import NothingFits, TrimtabError
from trimtab.jobs.registry import FOLDER
from trimtab.planner.estimator_interface import available_bytes
from trimtab.planner.search import RECOMPUTES, Evaluation, memory_limit, search_space
from trimtab.planner.space import build_space, format_pins
from trimtab.planner.ways import join_pins, list_variants
from trimtab.spec import Node, Objective, SuggestedChange
from trimtab.units import format_bytes, format_figure, format_value, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.planner.estimator_interface import Estimator
    from trimtab.planner.search import SearchResult
    from trimtab.planner.space import Space
    from trimtab.spec import Cluster, Device, Policy, Workload

RANK = 16
"""Rank of adapters that are proposed."""
MOST_GPUS = 64
GPUS_PER_NODE = 8
"""GPUs in a node of an imagined cluster."""
OTHERS_TRIED = 3
MOVABLE = (
    "recompute",
    "strategy",
    "precision",
    "micro_batch",
    "accumulation",
    "gpus",
    "data_parallel",
    "allocator",
)
"""Pins that affect memory, in the order in which leaving them out is tried."""


def make_nothing_fits(  # noqa: PLR0913 - what a plan depends on, and what was found
    job: str,
    workload: Workload,
    cluster: Cluster,
    *,
    space: Space,
    result: SearchResult,
    estimator: Estimator,
) -> NothingFits:
    """Return the error, with the changes that would fit in its `nearest`."""
    seen = (*result.evaluations, _find_closest(space, result, estimator))
    near = min(filter(None, seen), key=lambda evaluation: evaluation.missing_bytes, default=None)
    least = min((least for _, least in result.too_large.values() if least), default=0)
    need = least if near is None else near.estimate.need_bytes
    # Frozen weights have no optimizer state: a job with little of it trains adapters already.
    trains_all = near is None or near.estimate.parts.optimizer >= near.estimate.parts.weights
    adapters = (
        _try_adapters(workload, cluster, space.policy, estimator)
        if job.startswith(FOLDER) and trains_all
        else ()
    )
    is_static = near is not None and near.estimate.parts.weights > near.allowed_bytes
    changes = (*adapters, *_list_changes(workload, cluster, space, need, estimator, is_static=is_static))
    pinned = format_pins(space.policy.pins)
    error = NothingFits(
        f"{workload.name or 'the job'} on {format_devices(cluster)}{' with ' * bool(pinned)}{pinned}",
        found=_describe_shortage(near, least, space.policy, cluster),
        cure=_describe_changes(changes),
    )
    error.nearest = changes
    error.closest = None if near is None else near.setting
    return error


def _find_closest(space: Space, result: SearchResult, estimator: Estimator) -> Evaluation | None:
    """Return the setting that needs least: bounds and other micro-batches may have ruled it out."""
    rows = [
        (least, RECOMPUTES[::-1].index(key.recompute), key) for key, (_, least) in result.too_large.items()
    ]
    for _, _, family in sorted(rows, key=lambda row: row[:2]):
        setting = family.setting(family.splits[-1], space.allocators[-1])
        try:
            estimate = estimator.estimate(setting, family.layout)
        except TrimtabError:
            continue
        return Evaluation(setting, family.layout, estimate, memory_limit(family.layout, space.policy))
    return None


def format_devices(cluster: Cluster) -> str:
    """Return the devices of a cluster in words, such as 4 x NVIDIA A100."""
    counts: dict[str, int] = {}
    for device in cluster.devices:
        counts[device.kind] = counts.get(device.kind, 0) + 1
    return " + ".join(f"{count} x {name}" for name, count in counts.items())


def _describe_shortage(near: Evaluation | None, least: int, policy: Policy, cluster: Cluster) -> str:
    if near is None:
        most = policy.memory_share * max(available_bytes(device) for device in cluster.devices)
        return f"nothing fits: {format_bytes(least)} or more are needed, {format_bytes(most)} may be used"
    setting, estimate = near.setting, near.estimate
    if estimate.host is not None and estimate.host.shortage:
        return (
            f"nothing fits: {estimate.host.shortage}, with offload {','.join(setting.offload)} and "
            f"{setting.strategy} on {plural(setting.gpus, 'GPU')}"
        )
    released = ", even after releasing cached blocks" * (estimate.need_bytes < estimate.band.high_bytes)
    return (
        f"nothing fits: the nearest needs {format_bytes(estimate.need_bytes)} (upper band{released}; "
        f"{format_bytes(estimate.allocated_bytes)} allocated, {format_bytes(estimate.reserved_bytes)} "
        f"reserved) with {setting.strategy} on {plural(setting.gpus, 'GPU')}, "
        f"micro-batch {setting.micro_batch}, {setting.precision}, recompute {setting.recompute}; "
        f"{format_bytes(near.allowed_bytes)} may be used, {format_bytes(near.missing_bytes)} are missing"
    )


def _describe_changes(changes: tuple[SuggestedChange, ...]) -> str:
    if not changes:
        return (
            "Nothing near fits either: a smaller model, a shorter sample, or trimtab plan --on larger GPUs."
        )
    texts = [f"{change.what} ({_describe_change(change)})" for change in changes]
    return "Any of these would fit: " + "; ".join(texts) + "."


def _describe_change(change: SuggestedChange) -> str:
    setting, estimate = change.setting, change.estimate
    speed = ""
    if estimate.step_s is not None:
        speed = f", {format_figure(setting.global_batch / estimate.step_s)} samples/s or more"
    return (
        f"{setting.strategy}, micro-batch {setting.micro_batch}, recompute {setting.recompute}: "
        f"{format_bytes(estimate.process_bytes)}{speed}"
    )


def _list_changes(  # noqa: PLR0913 - what a plan depends on, and what it needs
    workload: Workload,
    cluster: Cluster,
    space: Space,
    need_bytes: int,
    estimator: Estimator,
    *,
    is_static: bool,
) -> Iterator[SuggestedChange]:
    """Yield the changes that would fit; with `is_static`, the weights alone are too large."""
    policy = space.policy.replace(deadline_s=None, objective=Objective.SPEED)
    ways = (
        _try_ways(workload, cluster, policy, estimator),
        _try_fewer_pins(workload, cluster, policy, estimator),
        _try_more_memory(workload, cluster, policy, estimator),
        () if is_static else _try_shorter_samples(workload, cluster, policy, estimator),
        _try_smaller_batch(workload, cluster, policy, estimator),
        _try_more_gpus(workload, cluster, policy, estimator),
        _try_other_gpus(workload, cluster, policy, estimator, need_bytes),
    )
    for way in ways:
        yield from way


def _search_best(
    workload: Workload, cluster: Cluster, policy: Policy, estimator: Estimator
) -> Evaluation | None:
    """Return a setting that fits after a change: the one that needs least memory, if the job can run it.

    It shows in one trace whether the change is enough. Larger micro-batches and less recomputation are found
    by the plan that you ask for next. None if nothing fits or the search fails.
    """
    for pins in (SMALLEST, RECOMPUTED, {}):
        result = _search_all(workload, cluster, policy.replace(pins=pins | policy.pins), estimator)
        if result is not None and (result.best is not None or not result.failed):
            return result.best
    return None


def _search_all(
    workload: Workload, cluster: Cluster, policy: Policy, estimator: Estimator
) -> SearchResult | None:
    """Return the result of a search; None if it fails or there is nothing to search."""
    try:
        legal = build_space(workload, cluster, policy)
        # Mixing devices does not save memory: the smallest must hold as much as the others.
        return search_space(replace(legal, mixed=()), estimator) if legal.families else None
    except TrimtabError:
        return None


def _make_change(what: str, seen: Evaluation | None) -> list[SuggestedChange]:
    return [] if seen is None else [SuggestedChange(what=what, setting=seen.setting, estimate=seen.estimate)]


def _drop_pin(pins: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in pins.items() if name != key}


def _try_ways(
    workload: Workload, cluster: Cluster, policy: Policy, estimator: Estimator
) -> Iterator[SuggestedChange]:
    """Try ways to fit that the policy does not allow; the first set of them that fits."""
    for ways in list_variants(policy, allowed=False):
        pinned = policy.replace(pins=policy.pins | join_pins(ways))
        seen = _search_best(workload, cluster, pinned, estimator)
        if seen is not None:
            names = " and ".join(way.name for way in ways)
            typed = " ".join(way.typed for way in ways)
            yield from _make_change(f"use {names} with {typed}", seen)
            return


def _try_adapters(
    workload: Workload, cluster: Cluster, policy: Policy, estimator: Estimator
) -> Iterator[SuggestedChange]:
    """Try adapters on frozen layers in 4 bits."""
    if "base" in policy.pins:
        return
    adapted = estimator.with_changes(lora=RANK)
    for loss in ({"loss": "chunked"}, {}):
        pins = policy.pins | loss | {"base": "nf4"}
        seen = _search_best(workload, cluster, policy.replace(pins=pins), adapted)
        if seen is not None:
            what = f"train adapters on layers in 4 bits with --lora {RANK} --allow quantised"
            yield from _make_change(what, seen)
            return


def _try_fewer_pins(
    workload: Workload, cluster: Cluster, policy: Policy, estimator: Estimator
) -> Iterator[SuggestedChange]:
    """Try to leave out each pin that affects memory."""
    for key in MOVABLE:
        if key in policy.pins:
            free = policy.replace(pins=_drop_pin(policy.pins, key))
            result = _search_all(workload, cluster, free, estimator)
            seen = None if result is None else result.best
            if seen is not None:
                value = getattr(seen.setting, key)
                yield from _make_change(
                    f"leave out --pin {key}={format_value(policy.pins[key])}, for {value}", seen
                )


def _try_more_memory(
    workload: Workload, cluster: Cluster, policy: Policy, estimator: Estimator
) -> Iterator[SuggestedChange]:
    """Try to use all free memory."""
    if policy.memory_share < 1:
        seen = _search_best(workload, cluster, policy.replace(memory_share=1.0), estimator)
        yield from _make_change("allow all that is free with --memory 1.0", seen)


def _try_shorter_samples(
    workload: Workload, cluster: Cluster, policy: Policy, estimator: Estimator
) -> Iterator[SuggestedChange]:
    """Try shorter samples, if the job has a sequence length."""
    seq = workload.seq
    while seq is not None and seq >= 2 * 64:
        seq //= 2
        try:
            seen = _search_best(workload, cluster, policy, estimator.with_changes(seq=seq))
        except TrimtabError:
            return
        if seen is not None:
            yield from _make_change(f"shorten samples to seq {seq}", seen)
            return


def _try_smaller_batch(
    workload: Workload, cluster: Cluster, policy: Policy, estimator: Estimator
) -> Iterator[SuggestedChange]:
    """Try a smaller global batch; it only helps if the accumulation is pinned."""
    batch = workload.global_batch
    while "accumulation" in policy.pins and batch > 1:
        batch //= 2
        seen = _search_best(workload.replace(global_batch=batch), cluster, policy, estimator)
        if seen is not None:
            yield from _make_change(f"lower the global batch to {batch}", seen)
            return


def _try_more_gpus(
    workload: Workload, cluster: Cluster, policy: Policy, estimator: Estimator
) -> Iterator[SuggestedChange]:
    """Try more GPUs of the same kind, over which weights and optimizer state can be sharded."""
    free = policy.replace(pins=_drop_pin(_drop_pin(policy.pins, "gpus"), "strategy"))
    first = max(cluster.devices, key=available_bytes)
    if first.slice:
        # MIG slices cannot be used together.
        return
    count = 2 * len(cluster.devices)
    while count <= MOST_GPUS:
        pinned = free.replace(pins={**free.pins, "gpus": count})
        many = imagine_cluster(cluster, first, count)
        sharded = pinned.replace(pins=SHARDED | pinned.pins)
        can_shard = _has_settings(workload, many, sharded)
        seen = _search_best(workload, many, sharded if can_shard else pinned, estimator)
        if seen is not None:
            yield from _make_change(f"use {count} of these GPUs", seen)
            return
        count *= 2


def _has_settings(workload: Workload, cluster: Cluster, policy: Policy) -> bool:
    try:
        return bool(build_space(workload, cluster, policy).families)
    except TrimtabError:
        return False


RECOMPUTED = {"recompute": "full", "compile": False}
SMALLEST = {**RECOMPUTED, "micro_batch": 1}
"""Pins of the settings that need least memory."""
SHARDED = {"strategy": "fsdp"}
"""How more GPUs are tried first: every job that can be sharded needs less on each of them."""


def imagine_cluster(cluster: Cluster, device: Device, count: int) -> Cluster:
    """Return a cluster of so many devices of one kind, linked as in the given one, in nodes of 8 GPUs."""
    from trimtab.catalog.clusters import parse_cluster
    from trimtab.catalog.tables import devices

    row = next((row for row in devices() if row.name == device.model), None)
    if row is not None:
        nodes = -(-count // GPUS_PER_NODE)
        if nodes == 1:
            return parse_cluster(f"{count}x{row.typed[0]}")
        found = parse_cluster(f"{nodes}x{count // nodes}x{row.typed[0]}")
        # A network that the user stated is assumed for more nodes as well.
        own = [link for link in cluster.links if link.node is None and link.source.startswith("stated")]
        return (
            found.replace(links=(*(link for link in found.links if link.node is not None), *own))
            if own
            else found
        )
    alike = tuple(device.replace(index=index) for index in range(count))
    return cluster.replace(nodes=(Node(name="imagined", devices=alike),), links=())


def _try_other_gpus(
    workload: Workload, cluster: Cluster, policy: Policy, estimator: Estimator, need_bytes: int
) -> Iterator[SuggestedChange]:
    """Try the smallest GPUs of the catalogue that are large enough, as many as the cluster has."""
    from trimtab.catalog.tables import devices

    need = need_bytes / policy.memory_share
    count = 1 if any(device.slice for device in cluster.devices) else len(cluster.devices)
    enough = [row for row in devices() if row.usable_bytes >= need and row.vendor == "nvidia"]
    larger = sorted(enough, key=lambda row: row.usable_bytes)
    for row in larger[:OTHERS_TRIED]:
        device = cluster.devices[0].replace(model=row.name, slice=None)
        seen = _search_best(workload, imagine_cluster(cluster, device, count), policy, estimator)
        if seen is not None:
            yield from _make_change(f"use {count} x {row.typed[0]}", seen)
            return
