"""How long collectives take: bytes over the slowest link that they cross, and a latency for each hop."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.tables import collectives
from trimtab.units import format_bandwidth

if TYPE_CHECKING:
    from trimtab.spec import Cluster


class Links(NamedTuple):
    """What connects the ranks of a setting."""

    within: float
    """Bytes a second, one way, of a device to its peers in a node."""
    between: float
    """The same between nodes, for each device: every GPU has a network port, or a share of its node's."""
    per_node: int
    nodes: int

    def all_gather_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Each rank gets the `size` bytes that all of them hold a share of."""
        if ranks <= 1:
            return 0.0
        spread = group(ranks, self, apart)
        return _latency(spread) + size * (ranks - 1) / ranks / _rate(spread, self)

    def reduce_scatter_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Each rank ends with the sum of its share: an all-gather backwards."""
        return self.all_gather_s(size, ranks, apart=apart)

    def all_reduce_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Each rank gets the sum of `size` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather_s(size, ranks, apart=apart)

    def send_s(self, size: int, apart: int) -> float:
        """One rank gets `size` bytes from another, whose number is `apart` from its own."""
        figures = collectives()
        if apart < self.per_node:
            return figures.hop_s + size / (self.within * figures.bus_share)
        return figures.network_hop_s + size / (min(self.within, self.between) * figures.bus_share)


def links(cluster: Cluster, gpus: int) -> Links:
    """The links among the first `gpus` devices of a cluster, node by node."""
    per_node = max((len(node.devices) for node in cluster.nodes), default=1) or 1
    nodes = -(-gpus // per_node)
    within = [
        link.total_bytes_per_s or link.bandwidth_bytes_per_s
        for link in cluster.links
        if link.node is not None
    ]
    between = [link.bandwidth_bytes_per_s for link in cluster.links if link.node is None]
    return Links(
        within=min((one for one in within if one), default=collectives().unknown_bytes_per_s),
        between=min((one for one in between if one), default=collectives().unknown_bytes_per_s),
        per_node=min(per_node, gpus),
        nodes=nodes,
    )


def network_words(cluster: Cluster, gpus: int) -> str | None:
    """The bandwidth that was taken between nodes and where it is from; None within one node."""
    among = links(cluster, gpus)
    if among.nodes < 2:  # noqa: PLR2004 - several
        return None
    speed = (
        f"network between nodes: {format_bandwidth(among.between)} ({_bits(among.between)}) a GPU each way"
    )
    sources = [link.source for link in cluster.links if link.node is None and link.bandwidth_bytes_per_s]
    kind, _, ground = (sources[0] if sources else "assumed: nothing is known of it").partition(": ")
    if kind == "stated":
        return f"{speed}, as stated by {ground}"
    return f"{speed}; {kind}: {ground}. State yours: --network 400Gb/gpu or 100Gb/node"


def _bits(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.4g} Gb/s"


class NodeGroup(NamedTuple):
    """The ranks that one collective is among, as nodes split them."""

    local: int
    """Ranks of the group in one node."""
    nodes: int


def group(ranks: int, among: Links, apart: int = 1) -> NodeGroup:
    """How so many ranks, whose numbers are `apart` from one to the next, lie on the nodes.

    >>> links = Links(within=450e9, between=50e9, per_node=8, nodes=4)
    >>> group(32, links), group(4, links, apart=8), group(8, links, apart=4)
    (Group(local=8, nodes=4), Group(local=1, nodes=4), Group(local=2, nodes=4))
    """
    local = max(1, min(ranks, among.per_node // max(1, apart)))
    return NodeGroup(local, -(-ranks // local))


def _rate(spread: NodeGroup, among: Links) -> float:
    """Bytes a second that pass each rank of a ring.

    NCCL runs as many rings as a node has ports, and each ring leaves the node by another port. So the GPUs of
    a node add up: with eight ports of 50 GB/s a ring over all GPUs moves 400 GB/s between nodes, and NVLink
    with 450 GB/s is hardly faster. Groups that run at the same time, as the copies of hsdp do, each have the
    ports of their own GPUs.
    """
    if spread.nodes == 1:
        return among.within * collectives().bus_share
    across = among.between * spread.local
    return (min(among.within, across) if spread.local > 1 else across) * collectives().bus_share


def _latency(spread: NodeGroup) -> float:
    figures = collectives()
    inside = figures.hop_s * (spread.local - 1).bit_length()
    return inside + figures.network_hop_s * (spread.nodes - 1).bit_length()
