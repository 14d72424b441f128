"""How long collectives take: bytes over the slowest link that they cross, and a latency for each hop."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trimtab.spec import Cluster

BUS_SHARE = 0.78
"""Of a link's one-way bandwidth, what large collectives reach: about 350 of the 450 GB/s of NVLink 4."""
HOP_S = 6e-6
"""Latency of a collective for each doubling of the ranks, within a node."""
NETWORK_HOP_S = 18e-6
UNKNOWN_BYTES_PER_S = 12e9
"""Where the cluster says nothing of its links: a PCIe 3 bus of 16 lanes."""


class Links(NamedTuple):
    """What connects the ranks of a setting."""

    within: float
    """Bytes a second, one way, of a device to its peers in a node."""
    between: float
    """The same between nodes, for each device."""
    per_node: int
    nodes: int


def links(cluster: Cluster, gpus: int) -> Links:
    """The links among the first `gpus` devices of a cluster, node by node."""
    per_node = max((len(node.devices) for node in cluster.nodes), default=1) or 1
    nodes = -(-gpus // per_node)
    within = [
        one.total_bytes_per_s or one.bandwidth_bytes_per_s for one in cluster.links if one.node is not None
    ]
    between = [one.bandwidth_bytes_per_s for one in cluster.links if one.node is None]
    return Links(
        within=min((one for one in within if one), default=UNKNOWN_BYTES_PER_S),
        between=min((one for one in between if one), default=UNKNOWN_BYTES_PER_S),
        per_node=min(per_node, gpus),
        nodes=nodes,
    )


def all_gather_s(size: int, ranks: int, among: Links) -> float:
    """Each rank gets the `size` bytes that all of them hold a share of."""
    if ranks <= 1:
        return 0.0
    return _latency(ranks, among) + size * (ranks - 1) / ranks / _rate(ranks, among)


reduce_scatter_s = all_gather_s
"""The same way backwards: each rank ends with the sum of its share."""


def all_reduce_s(size: int, ranks: int, among: Links) -> float:
    """Each rank gets the sum of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * all_gather_s(size, ranks, among)


def send_s(size: int, apart: int, among: Links) -> float:
    """One rank gets `size` bytes from another, whose number is `apart` from its own."""
    if apart < among.per_node:
        return HOP_S + size / (among.within * BUS_SHARE)
    return NETWORK_HOP_S + size / (min(among.within, among.between) * BUS_SHARE)


def _rate(ranks: int, among: Links) -> float:
    if ranks <= among.per_node:
        return among.within * BUS_SHARE
    return min(among.within, among.between) * BUS_SHARE


def _latency(ranks: int, among: Links) -> float:
    inside = min(ranks, among.per_node)
    hops = HOP_S * (inside - 1).bit_length()
    return hops + (NETWORK_HOP_S * (among.nodes - 1).bit_length() if ranks > among.per_node else 0.0)
