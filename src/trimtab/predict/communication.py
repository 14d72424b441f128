"""Estimate the time of collectives: bytes over the slowest link on their way, plus a latency for each hop."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.tables import collectives
from trimtab.units import format_bandwidth

if TYPE_CHECKING:
    from trimtab.spec import Cluster


class Links(NamedTuple):
    """Bandwidths between the ranks of a setting."""

    within: float
    """Bytes per second, one way, from a device to its peers in the node."""
    between: float
    """The same between nodes, per device: every GPU has a network port, or a share of its node's."""
    per_node: int
    nodes: int
    host_memory: float = 50e9
    """Bytes per second that the optimizer of one process reads and writes in the memory of its host."""

    def all_gather_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds of an all-gather of `size` bytes, of which each rank has a share."""
        if ranks <= 1:
            return 0.0
        spread = group_ranks(ranks, self, apart)
        return _latency_s(spread) + size * (ranks - 1) / ranks / _ring_bytes_per_s(spread, self)

    def reduce_scatter_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds of a reduce-scatter: the same as of an all-gather."""
        return self.all_gather_s(size, ranks, apart=apart)

    def all_reduce_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds of an all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather_s(size, ranks, apart=apart)

    def all_to_all_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds of an all-to-all: each rank sends an equal share of `size` bytes to each.

        Shares for other nodes leave by the port of their own GPU, while shares for the same node go by its
        links.
        """
        if ranks <= 1:
            return 0.0
        spread = group_ranks(ranks, self, apart)
        inside = size * (spread.local - 1) / ranks / self.within
        across = size * (ranks - spread.local) / ranks / min(self.within, self.between)
        return _latency_s(spread) + max(inside, across) / collectives().bus_share

    def send_s(self, size: int, apart: int) -> float:
        """Return the seconds to send `size` bytes to the rank whose number differs by `apart`."""
        figures = collectives()
        if apart < self.per_node:
            return figures.hop_s + size / (self.within * figures.bus_share)
        return figures.network_hop_s + size / (min(self.within, self.between) * figures.bus_share)


def find_links(cluster: Cluster, gpus: int) -> Links:
    """Return the links between the first `gpus` devices of a cluster, filled node by node."""
    per_node = max((len(node.devices) for node in cluster.nodes), default=1) or 1
    nodes = -(-gpus // per_node)
    within = [
        link.total_bytes_per_s or link.bandwidth_bytes_per_s
        for link in cluster.links
        if link.node is not None
    ]
    between = [link.bandwidth_bytes_per_s for link in cluster.links if link.node is None]
    return Links(
        within=min((speed for speed in within if speed), default=collectives().unknown_bytes_per_s),
        between=min((speed for speed in between if speed), default=collectives().unknown_bytes_per_s),
        per_node=min(per_node, gpus),
        nodes=nodes,
        host_memory=_host_memory_bytes_per_s(cluster, min(per_node, gpus)),
    )


HOST_BYTES_PER_S = 100e9
"""What an optimizer reads and writes in the memory of a node, in all processes. Assumed, not measured."""
CORE_BYTES_PER_S = 8e9
"""The most of it that one core reaches. Assumed, not measured."""


def _host_memory_bytes_per_s(cluster: Cluster, ranks: int) -> float:
    """Return the share of one process in the memory bandwidth of its node."""
    cores = [node.cpu_cores for node in cluster.nodes if node.cpu_cores]
    limit = CORE_BYTES_PER_S * min(cores) if cores else HOST_BYTES_PER_S
    return min(HOST_BYTES_PER_S, limit) / max(1, ranks)


def describe_network(cluster: Cluster, gpus: int) -> str | None:
    """Return a note on the assumed bandwidth between nodes and its source; None for a single node."""
    links = find_links(cluster, gpus)
    if links.nodes < 2:  # noqa: PLR2004 - several
        return None
    rate = f"{format_bandwidth(links.between)} ({_format_bits(links.between)})"
    speed = f"network between nodes: {rate} a GPU each way"
    sources = [link.source for link in cluster.links if link.node is None and link.bandwidth_bytes_per_s]
    kind, _, ground = (sources[0] if sources else "assumed: nothing is known of it").partition(": ")
    if kind == "stated":
        return f"{speed}, as stated by {ground}"
    return f"{speed}; {kind}: {ground}. State yours: --network 400Gb/gpu or 100Gb/node"


def _format_bits(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.4g} Gb/s"


class NodeGroup(NamedTuple):
    """How the ranks of a collective are spread over nodes."""

    local: int
    """Ranks of the group in one node."""
    nodes: int


def group_ranks(ranks: int, links: Links, apart: int = 1) -> NodeGroup:
    """Return how ranks are spread over nodes if consecutive ones differ by `apart` in number.

    >>> links = Links(within=450e9, between=50e9, per_node=8, nodes=4)
    >>> group_ranks(32, links), group_ranks(4, links, apart=8), group_ranks(8, links, apart=4)
    (NodeGroup(local=8, nodes=4), NodeGroup(local=1, nodes=4), NodeGroup(local=2, nodes=4))
    """
    local = max(1, min(ranks, links.per_node // max(1, apart)))
    return NodeGroup(local, -(-ranks // local))


def _ring_bytes_per_s(spread: NodeGroup, links: Links) -> float:
    """Return the bytes per second through each rank of a ring.

    NCCL runs as many rings as a node has ports, and each ring leaves the node by another port. So the GPUs of
    a node add up: with eight ports of 50 GB/s a ring over all GPUs moves 400 GB/s between nodes, and NVLink
    with 450 GB/s is hardly faster. Groups that run at the same time, as the copies of hsdp do, each have the
    ports of their own GPUs.
    """
    if spread.nodes == 1:
        return links.within * collectives().bus_share
    across = links.between * spread.local
    return (min(links.within, across) if spread.local > 1 else across) * collectives().bus_share


def _latency_s(spread: NodeGroup) -> float:
    figures = collectives()
    inside = figures.hop_s * (spread.local - 1).bit_length()
    return inside + figures.network_hop_s * (spread.nodes - 1).bit_length()
