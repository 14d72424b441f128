"""Which of a cluster's devices a plan could use."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from trimtab.planner.outlook import Layout, kind, room_bytes
from trimtab.spec import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trimtab.spec import Cluster, Device, Link

MOST_MIXES = 64
"""More ways than this to mix unlike devices are not listed: then only all of them together are."""

Picks = list[tuple[int, "Device"]]
"""Number of the node, and the device."""


def layouts(cluster: Cluster) -> list[Layout]:
    """Every set of devices worth trying, the smallest first.

    Within a node any number; over several nodes whole nodes only. Of equal devices those with the most free
    memory, and beside them those with the fastest link, where the two differ.
    """
    by_kind: dict[str, Picks] = {}
    for number, node in enumerate(cluster.nodes):
        for device in node.devices:
            by_kind.setdefault(kind(device), []).append((number, device))
    found: dict[tuple[Place, ...], Layout] = {}
    for held in by_kind.values():
        for picks in _alike(cluster, held):
            one = layout(cluster, picks)
            found.setdefault(one.places, one)
    for picks in _mixed(list(by_kind.values())):
        one = layout(cluster, picks)
        found.setdefault(one.places, one)
    return sorted(found.values(), key=lambda one: one.gpus)


def _alike(cluster: Cluster, held: Picks) -> Iterator[Picks]:
    """Sets of devices of one kind."""
    nodes: dict[int, list[Device]] = {}
    for number, device in held:
        nodes.setdefault(number, []).append(device)
    # The roomiest node first: it serves all numbers up to its own.
    order = sorted(nodes, key=lambda one: (-len(nodes[one]), -sum(map(room_bytes, nodes[one])), one))
    first = order[0]
    within = [link for link in cluster.links if link.node == first]
    for count in range(1, len(nodes[first]) + 1):
        for devices in _within(nodes[first], within, count):
            yield [(first, one) for one in devices]
    for count in range(2, len(order) + 1):
        yield [(number, one) for number in order[:count] for one in nodes[number]]


def _within(devices: list[Device], links: list[Link], count: int) -> list[list[Device]]:
    """Of one node: the devices with the most room, and those that the fastest link joins."""
    roomy = sorted(devices, key=lambda one: (-room_bytes(one), one.index))
    choices = [roomy[:count]]
    if 1 < count < len(devices):
        ends = {one.index for one in devices}
        fast = max(
            (link for link in links if len(ends & set(link.devices)) >= count),
            key=lambda link: link.bandwidth_bytes_per_s or 0.0,
            default=None,
        )
        if fast is not None:
            choices.append([one for one in roomy if one.index in fast.devices][:count])
    return [sorted(one, key=lambda device: device.index) for one in choices]


def _mixed(kinds: list[Picks]) -> Iterator[Picks]:
    """Sets that hold devices of several kinds."""
    if len(kinds) < 2:  # noqa: PLR2004 - unlike ones
        return
    ways = 1
    for held in kinds:
        ways *= len(held) + 1
    numbers: Iterable[tuple[int, ...]] = (
        product(*(range(len(held) + 1) for held in kinds))
        if ways <= MOST_MIXES
        else [tuple(len(held) for held in kinds)]
    )
    for counts in numbers:
        if sum(count > 0 for count in counts) > 1:
            yield [one for held, count in zip(kinds, counts, strict=True) for one in held[:count]]


def layout(cluster: Cluster, picks: Picks) -> Layout:
    """The part of a cluster that holds these devices and no others."""
    picks = sorted(picks, key=lambda one: (one[0], one[1].index))
    used = sorted({number for number, _ in picks})
    chosen = {number: [device for node, device in picks if node == number] for number in used}
    links = []
    for link in cluster.links:
        if link.node is None:
            links += [link] if len(used) > 1 else []
        elif link.node in chosen:
            ends = tuple(one.index for one in chosen[link.node] if one.index in link.devices)
            if len(ends) > 1:
                links.append(link.replace(node=used.index(link.node), devices=ends))
    part = cluster.replace(
        nodes=tuple(cluster.nodes[number].replace(devices=tuple(chosen[number])) for number in used),
        links=tuple(links),
    )
    places = tuple(
        Place(node=number, node_name=cluster.nodes[number].name, device=device.index, name=kind(device))
        for number, device in picks
    )
    return Layout(places=places, cluster=part)
