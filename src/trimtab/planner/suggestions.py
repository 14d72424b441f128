"""When nothing fits: what is missing, and the nearest changes that would fit, each estimated."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trimtab.errors import NothingFits, TrimtabError
from trimtab.planner.protocol import kind, room_bytes
from trimtab.planner.search import RECOMPUTES, Evaluated, allowed, search
from trimtab.planner.space import space, word
from trimtab.spec import Change, Node, Objective
from trimtab.units import format_bytes, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.planner.protocol import Estimator
    from trimtab.planner.search import Result
    from trimtab.planner.space import Space
    from trimtab.spec import Cluster, Device, Policy, Workload

MOST_GPUS = 64
NODE = 8
"""Devices of a node, where more are imagined than there are."""
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
"""Pins that decide about memory, in the order in which they are doubted."""


def nothing_fits(
    workload: Workload, cluster: Cluster, whole: Space, result: Result, outlook: Estimator
) -> NothingFits:
    """The error, with the changes that would fit in `nearest`."""
    near = min(result.seen, key=lambda one: one.missing_bytes, default=None) or _closest(
        whole, result, outlook
    )
    least = min((least for _, least in result.too_large.values() if least), default=0)
    need = least if near is None else near.estimate.need_bytes
    changes = tuple(_changes(workload, cluster, whole, need, outlook))
    pinned = " ".join(f"--pin {key}={word(value)}" for key, value in whole.policy.pins.items())
    error = NothingFits(
        f"{workload.name or 'the job'} on {_counted(cluster)}{' with ' * bool(pinned)}{pinned}",
        found=_missing(near, least, whole.policy, cluster),
        cure=_cure(changes),
    )
    error.nearest = changes
    return error


def _closest(whole: Space, result: Result, outlook: Estimator) -> Evaluated | None:
    """The setting that needs least, where bounds alone ruled everything out."""
    rows = [
        (least, RECOMPUTES[::-1].index(key.recompute), key) for key, (_, least) in result.too_large.items()
    ]
    for _, _, family in sorted(rows, key=lambda row: row[:2]):
        setting = family.setting(family.cuts[-1], whole.allocators[-1])
        try:
            estimate = outlook.estimate(setting, family.layout)
        except TrimtabError:
            continue
        return Evaluated(setting, family.layout, estimate, allowed(family.layout, whole.policy))
    return None


def _counted(cluster: Cluster) -> str:
    counts: dict[str, int] = {}
    for device in cluster.devices:
        counts[kind(device)] = counts.get(kind(device), 0) + 1
    return " + ".join(f"{count} x {name}" for name, count in counts.items())


def _missing(near: Evaluated | None, least: int, policy: Policy, cluster: Cluster) -> str:
    if near is None:
        most = policy.memory_share * max(room_bytes(device) for device in cluster.devices)
        return f"nothing fits: {format_bytes(least)} or more are needed, {format_bytes(most)} may be used"
    setting, estimate = near.setting, near.estimate
    released = ", even after releasing cached blocks" * (estimate.need_bytes < estimate.band.high_bytes)
    return (
        f"nothing fits: the nearest needs {format_bytes(estimate.need_bytes)} (upper band{released}; "
        f"{format_bytes(estimate.allocated_bytes)} allocated, {format_bytes(estimate.reserved_bytes)} "
        f"reserved) with {setting.strategy} on {plural(setting.gpus, 'GPU')}, "
        f"micro-batch {setting.micro_batch}, {setting.precision}, recompute {setting.recompute}; "
        f"{format_bytes(near.allowed_bytes)} may be used, {format_bytes(near.missing_bytes)} are missing"
    )


def _cure(changes: tuple[Change, ...]) -> str:
    if not changes:
        return (
            "Nothing near fits either: a smaller model, a shorter sample, or trimtab plan --on larger GPUs."
        )
    told = [f"{change.what} ({_shown(change)})" for change in changes]
    return "Any of these would fit: " + "; ".join(told) + "."


def _shown(change: Change) -> str:
    setting, estimate = change.setting, change.estimate
    speed = "" if estimate.step_s is None else f", {setting.global_batch / estimate.step_s:.3g} samples/s"
    return (
        f"{setting.strategy}, micro-batch {setting.micro_batch}, recompute {setting.recompute}: "
        f"{format_bytes(estimate.process_bytes)}{speed}"
    )


def _changes(
    workload: Workload, cluster: Cluster, whole: Space, need_bytes: int, outlook: Estimator
) -> Iterator[Change]:
    policy = whole.policy.replace(deadline_s=None, objective=Objective.SPEED)
    ways = (
        _unpinned(workload, cluster, policy, outlook),
        _more_memory(workload, cluster, policy, outlook),
        _shorter(workload, cluster, policy, outlook),
        _smaller_batch(workload, cluster, policy, outlook),
        _more_gpus(workload, cluster, policy, outlook),
        _other_gpus(workload, cluster, policy, outlook, need_bytes),
    )
    for way in ways:
        yield from way


def _best(workload: Workload, cluster: Cluster, policy: Policy, outlook: Estimator) -> Evaluated | None:
    """The best setting that fits after a change; None where nothing does, or nothing can be said."""
    try:
        legal = space(workload, cluster, policy)
        # Unlike devices are no way out of too little memory: the smallest must hold what all hold.
        return search(replace(legal, mixed=()), outlook).best
    except TrimtabError:
        return None


def _change(what: str, seen: Evaluated | None) -> list[Change]:
    return [] if seen is None else [Change(what=what, setting=seen.setting, estimate=seen.estimate)]


def _without(pins: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in pins.items() if name != key}


def _unpinned(workload: Workload, cluster: Cluster, policy: Policy, outlook: Estimator) -> Iterator[Change]:
    """Another strategy, recompute or micro-batch than the pinned one."""
    for key in MOVABLE:
        if key in policy.pins:
            free = policy.replace(pins=_without(policy.pins, key))
            seen = _best(workload, cluster, free, outlook)
            if seen is not None:
                value = getattr(seen.setting, key)
                yield from _change(f"leave out --pin {key}={word(policy.pins[key])}, for {value}", seen)


def _more_memory(
    workload: Workload, cluster: Cluster, policy: Policy, outlook: Estimator
) -> Iterator[Change]:
    """More of what is free."""
    if policy.memory_share < 1:
        seen = _best(workload, cluster, policy.replace(memory_share=1.0), outlook)
        yield from _change("allow all that is free with --memory 1.0", seen)


def _shorter(workload: Workload, cluster: Cluster, policy: Policy, outlook: Estimator) -> Iterator[Change]:
    """Shorter samples, where the job can have them."""
    seq = workload.seq
    while seq is not None and seq >= 2 * 64:
        seq //= 2
        try:
            seen = _best(workload, cluster, policy, outlook.altered(seq=seq))
        except TrimtabError:
            return
        if seen is not None:
            yield from _change(f"shorten samples to seq {seq}", seen)
            return


def _smaller_batch(
    workload: Workload, cluster: Cluster, policy: Policy, outlook: Estimator
) -> Iterator[Change]:
    """A smaller global batch: a way out only where the number of rounds is pinned."""
    batch = workload.global_batch
    while "accumulation" in policy.pins and batch > 1:
        batch //= 2
        seen = _best(workload.replace(global_batch=batch), cluster, policy, outlook)
        if seen is not None:
            yield from _change(f"lower the global batch to {batch}", seen)
            return


def _more_gpus(workload: Workload, cluster: Cluster, policy: Policy, outlook: Estimator) -> Iterator[Change]:
    """More of the same, over which weights and optimizer state can be cut."""
    free = policy.replace(pins=_without(_without(policy.pins, "gpus"), "strategy"))
    first = max(cluster.devices, key=room_bytes)
    if first.slice:
        # More slices hold no more together.
        return
    count = 2 * len(cluster.devices)
    while count <= MOST_GPUS:
        pinned = free.replace(pins={**free.pins, "gpus": count})
        seen = _best(workload, imagined(cluster, first, count), pinned, outlook)
        if seen is not None:
            yield from _change(f"use {count} of these GPUs", seen)
            return
        count *= 2


def imagined(cluster: Cluster, device: Device, count: int) -> Cluster:
    """As many devices like that one, linked as the cluster's are, in nodes of eight."""
    from trimtab.catalog.clusters import stated
    from trimtab.catalog.tables import devices

    row = next((one for one in devices() if one.name == device.model), None)
    if row is not None:
        nodes = -(-count // NODE)
        if nodes == 1:
            return stated(f"{count}x{row.typed[0]}")
        found = stated(f"{nodes}x{count // nodes}x{row.typed[0]}")
        # A network that the user stated holds for more nodes of the kind too.
        own = [link for link in cluster.links if link.node is None and link.source.startswith("stated")]
        return (
            found.replace(links=(*(link for link in found.links if link.node is not None), *own))
            if own
            else found
        )
    alike = tuple(device.replace(index=index) for index in range(count))
    return cluster.replace(nodes=(Node(name="imagined", devices=alike),), links=())


def _other_gpus(
    workload: Workload, cluster: Cluster, policy: Policy, outlook: Estimator, need_bytes: int
) -> Iterator[Change]:
    """The smallest devices of the catalogue that are large enough, as many as there are."""
    from trimtab.catalog.tables import devices

    need = need_bytes / policy.memory_share
    count = 1 if any(device.slice for device in cluster.devices) else len(cluster.devices)
    enough = [row for row in devices() if row.usable_bytes >= need and row.vendor == "nvidia"]
    larger = sorted(enough, key=lambda row: row.usable_bytes)
    for row in larger[:OTHERS_TRIED]:
        device = cluster.devices[0].replace(model=row.name, slice=None)
        seen = _best(workload, imagined(cluster, device, count), policy, outlook)
        if seen is not None:
            yield from _change(f"use {count} x {row.typed[0]}", seen)
            return
