"""Time what ranks send to each other: the links between them, collectives over them, and several at once."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.tables import collectives, generations, sockets
from trimtab.catalog.tables import links as link_rows
from trimtab.predict.collectives import Paths, time_all_to_all, time_collective, time_message
from trimtab.units import format_bandwidth

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.spec import Calibration, Cluster, Link
    from trimtab.strategies.base import Call


class MeasuredCollective(NamedTuple):
    """Latency and bandwidth of a collective that was measured."""

    collective: str
    ranks: int
    nodes: int
    latency_s: float
    bytes_per_s: float

    def seconds(self, size: int) -> float:
        """Return the seconds for `size` bytes."""
        return self.latency_s + size / self.bytes_per_s


class Links(NamedTuple):
    """Bandwidths between the ranks of a setting."""

    within: float
    """Bytes per second, one way, from a device to its peers in the node."""
    between: float
    """The same between nodes, per device: every GPU has a network port, or a share of its node's."""
    per_node: int
    """Consecutive ranks that NVLink or the bus of a node joins."""
    nodes: int
    host_memory: float = 50e9
    """Bytes per second that the optimizer of one process reads and writes in the memory of its host."""
    kind: str = "NVLink4"
    """Name of the link within a node."""
    pair: float | None = None
    """Bytes per second between two devices, where that is less than `within`: boards without a switch."""
    generation: int = 2
    """Generation of the GPUs: index into the `generation` rows of links.toml."""
    latency_s: float | None = None
    """Stated latency between two nodes, one way."""
    rails: bool = True
    """Whether the ports of GPU i of all nodes are on one switch."""
    oversubscription: float = 1.0
    """Bandwidth into the switches that join switches, over the bandwidth out of them."""
    measured: tuple[MeasuredCollective, ...] = ()
    """Collectives of these links that were measured, which the model follows."""

    def all_gather_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds of an all-gather of `size` bytes, of which each rank has a share."""
        return _time_call(self, "all_gather", size, ranks, apart)

    def reduce_scatter_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds of a reduce-scatter of `size` bytes, of which each rank keeps a share."""
        return _time_call(self, "reduce_scatter", size, ranks, apart)

    def all_reduce_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds of an all-reduce of `size` bytes."""
        return _time_call(self, "all_reduce", size, ranks, apart)

    def all_to_all_s(self, size: int, ranks: int, *, apart: int = 1) -> float:
        """Return the seconds of an all-to-all: each rank sends an equal share of `size` bytes to each."""
        return _time_call(self, "all_to_all", size, ranks, apart)

    def send_s(self, size: int, apart: int) -> float:
        """Return the seconds to send `size` bytes to the rank whose number differs by `apart`."""
        return _time_call(self, "send", size, 2, apart)

    def together_s(self, streams: Sequence[Sequence[Call]]) -> float:
        """Return the seconds of several streams at the same time; the calls of one follow each other.

        Streams that use the same link share it: nothing ends before the link has carried the bytes of all.

        >>> from trimtab.strategies.base import Call
        >>> links = Links(within=450e9, between=50e9, per_node=8, nodes=4)
        >>> gather = Call("all_gather", 2**30, 32)
        >>> both = links.together_s([[gather], [gather]])
        >>> round(both / links.together_s([[gather]]), 1)
        1.8
        """
        alone = max((sum(self.time(call) for call in stream) for stream in streams), default=0.0)
        inside = across = 0.0
        for call in (call for stream in streams for call in stream):
            busy = _busy_s(self, call.collective, call.ranks, call.apart)
            inside += call.repeats * call.size * busy[0]
            across += call.repeats * call.size * busy[1]
        return max(alone, inside, across)

    def time(self, call: Call) -> float:
        """Return the seconds of a call."""
        return call.repeats * _time_call(self, call.collective, call.size, call.ranks, call.apart)


@lru_cache(maxsize=65536)
def _time_call(links: Links, collective: str, size: int, ranks: int, apart: int) -> float:
    """Return the seconds of one collective; cached, because a search asks for the same thousands of times.

    Where such a collective was measured on such links, its time is the measured one; for other numbers of
    ranks the model is scaled by measured over modelled time of the nearest number.
    """
    if ranks <= 1:
        return 0.0
    paths = find_paths(links, ranks, apart)
    modelled = _model_call(collective, size, paths)
    nearest = _find_measured(links, collective, paths)
    if nearest is None:
        return modelled
    if (nearest.ranks, nearest.nodes) == (ranks, paths.nodes):
        return nearest.seconds(size)
    local = max(1, nearest.ranks // nearest.nodes)
    there = paths._replace(local=local, nodes=nearest.nodes)
    return modelled * nearest.seconds(size) / _model_call(collective, size, there)


def _model_call(collective: str, size: int, paths: Paths) -> float:
    if collective == "send":
        return time_message(size, paths)
    if collective == "all_to_all":
        return time_all_to_all(size, paths)
    return time_collective(collective, size, paths)


def _find_measured(links: Links, collective: str, paths: Paths) -> MeasuredCollective | None:
    """Return the measured collective of the same kind nearest to these paths: within nodes, or between."""
    return min(
        (
            entry
            for entry in links.measured
            if entry.collective == collective and (entry.nodes > 1) == (paths.nodes > 1)
        ),
        # Groups with one rank in each node differ most from others.
        key=lambda entry: (
            (entry.ranks == entry.nodes) != (paths.local == 1),
            abs(entry.nodes - paths.nodes),
            abs(entry.ranks - paths.ranks),
        ),
        default=None,
    )


@lru_cache(maxsize=4096)
def _busy_s(links: Links, collective: str, ranks: int, apart: int) -> tuple[float, float]:
    """Return the seconds for each byte that a call uses the links of a node, and the port of a GPU."""
    if ranks <= 1:
        return 0.0, 0.0
    paths = find_paths(links, ranks, apart)
    inside = 1 / paths.inside if paths.local > 1 else 0.0
    across = 1 / paths.port if paths.nodes > 1 else 0.0
    if collective == "send":
        return (0.0, across) if paths.nodes > 1 else (inside, 0.0)
    if collective == "all_to_all":
        return inside * (paths.local - 1) / ranks, across * (ranks - paths.local) / ranks
    # A ring passes all but a share of the bytes through each rank, and each port has its part of them.
    bytes_each = (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks
    return inside * bytes_each, across * bytes_each / min(paths.local, collectives().ring_ports)


@lru_cache(maxsize=4096)
def find_paths(links: Links, ranks: int, apart: int = 1) -> Paths:
    """Return what ranks send over whose numbers differ by `apart`."""
    figures = collectives()
    spread = group_ranks(ranks, links, apart)
    share = _find_bus_share(links.kind)
    within = links.within
    if links.pair is not None:
        within = min(within, links.pair * max(1, spread.local - 1))
    inside = within * share
    nvlink = not links.kind.startswith("PCIe")
    if not nvlink and spread.local > figures.board_cards:
        socket = sockets().get(int(links.kind[4]) if links.kind[4:5].isdigit() else 0)
        inside = min(inside, socket.gbs * 1e9) if socket else inside
    extra = max(0.0, links.latency_s - figures.network_us * 1e-6) if links.latency_s is not None else 0.0
    return Paths(
        local=spread.local,
        nodes=spread.nodes,
        inside=inside,
        port=links.between * figures.network_share / _oversubscribed(links, spread, apart),
        nvlink=nvlink,
        switched=nvlink and links.pair is None and links.per_node > 2,  # noqa: PLR2004 - a bridge joins two
        generation=links.generation,
        network_extra_s=extra,
    )


def _find_bus_share(kind: str) -> float:
    """Return the share of its bandwidth that collectives reach on a kind of link."""
    rows = link_rows()
    row = rows.get(kind) or rows.get(kind.split(" ", maxsplit=1)[0])
    row = row or next((row for name, row in rows.items() if name.startswith(kind)), None)
    return row.bus_share if row and row.bus_share else collectives().bus_share


def _oversubscribed(links: Links, spread: NodeGroup, apart: int) -> float:
    """Return the oversubscription that traffic between nodes meets.

    With rails, GPU i of each node reaches GPU i of the others over one switch: so do groups of such ranks,
    and rings and trees over whole nodes, whose channels keep to one port of each node. Only groups larger
    than a switch serves pass the switches above. Without rails, all traffic between nodes does.
    """
    on_rail = links.rails and (spread.local == links.per_node or apart % links.per_node == 0)
    return 1.0 if on_rail and spread.nodes <= collectives().leaf_nodes else links.oversubscription


_KNOWN: list[tuple[Cluster, int, Calibration | None, Links]] = []
"""The links of the last clusters, found by identity: a cluster may have thousands of nodes."""
KNOWN_CLUSTERS = 16


def find_links(cluster: Cluster, gpus: int, own: Calibration | None = None) -> Links:
    """Return the links between the first `gpus` devices of a cluster, filled node by node.

    `own` is the calibration of the device, which may have measured collectives; the cluster's come first.
    """
    for known, count, calibration, links in _KNOWN:
        if known is cluster and count == gpus and calibration is own:
            return links
    links = _read_links(cluster, gpus)
    measured = cluster.collectives or (own.collectives if own is not None else ())
    links = links._replace(
        measured=tuple(
            MeasuredCollective(entry.collective, entry.ranks, entry.nodes, entry.latency_s, entry.bytes_per_s)
            for entry in measured
        )
    )
    _KNOWN.insert(0, (cluster, gpus, own, links))
    del _KNOWN[KNOWN_CLUSTERS:]
    return links


def _read_links(cluster: Cluster, gpus: int) -> Links:
    in_node = max((len(node.devices) for node in cluster.nodes), default=1) or 1
    between = _slowest([link for link in cluster.links if link.node is None])
    within = _slowest([link for link in cluster.links if link.node is not None])
    domain = between.nvlink_domain if between and between.nvlink_domain else 0
    per_node = max(in_node, domain)
    unknown = collectives().unknown_bytes_per_s
    pair = within.bandwidth_bytes_per_s if within else None
    total = (_node_bandwidth(within) if within else None) or unknown
    return Links(
        within=total,
        between=(between.bandwidth_bytes_per_s if between else None) or unknown,
        per_node=min(per_node, gpus),
        nodes=-(-gpus // per_node),
        host_memory=_host_memory_bytes_per_s(cluster, min(in_node, gpus)),
        kind=within.kind if within else "PCIe3 x16",
        pair=pair if pair and pair < total else None,
        generation=_find_generation(cluster),
        latency_s=between.latency_s if between else None,
        rails=between.rails is not False if between else True,
        oversubscription=(between.oversubscription if between else None) or 1.0,
    )


def _node_bandwidth(link: Link) -> float | None:
    return link.total_bytes_per_s or link.bandwidth_bytes_per_s


def _slowest(links: list[Link]) -> Link | None:
    """Return the link with the lowest bandwidth of those whose bandwidth is known."""
    rated = [link for link in links if _node_bandwidth(link)]
    return min(rated, key=lambda link: _node_bandwidth(link) or 0.0, default=links[0] if links else None)


def _find_generation(cluster: Cluster) -> int:
    """Return the oldest generation of the cluster's GPUs; AMD's count as Ampere."""
    found = {device.compute_capability for node in cluster.nodes[:1] for device in node.devices} - {None}
    rows = generations()
    numbers = [
        sum(row.capability <= float(capability) for row in rows) - 1
        if capability and capability[0].isdigit()
        else next(place for place, row in enumerate(rows) if row.name == "Ampere")
        for capability in found
    ]
    return min(numbers, default=0)


HOST_BYTES_PER_S = 100e9
"""What an optimizer reads and writes in the memory of a node, in all processes. Assumed, not measured."""
CORE_BYTES_PER_S = 8e9
"""The most of it that one core reaches. Assumed, not measured."""


def _host_memory_bytes_per_s(cluster: Cluster, ranks: int) -> float:
    """Return the share of one process in the memory bandwidth of its node."""
    cores = [node.cpu_cores for node in cluster.nodes if node.cpu_cores]
    limit = CORE_BYTES_PER_S * min(cores) if cores else HOST_BYTES_PER_S
    return min(HOST_BYTES_PER_S, limit) / max(1, ranks)


def describe_collectives(cluster: Cluster, own: Calibration | None) -> str:
    """Return a note on what the time of collectives is from."""
    measured = cluster.collectives or (own.collectives if own is not None else ())
    if not measured:
        return "time: collectives by the bandwidth of the links and NCCL's own model, not measured"
    backend, most = measured[0].backend, max(entry.ranks for entry in measured)
    return f"time: collectives as measured by `calibrate --links` between up to {most} ranks ({backend})"


def describe_network(cluster: Cluster, gpus: int) -> str | None:
    """Return a note on the assumed network between nodes and its source; None for a single node."""
    links = find_links(cluster, gpus)
    in_node = max((len(node.devices) for node in cluster.nodes), default=1) or 1
    joined = f"NVLink joins {links.per_node} GPUs over nodes" if links.per_node > in_node else ""
    source = next(
        (link.source for link in cluster.links if link.node is None and link.bandwidth_bytes_per_s), ""
    )
    kind, _, ground = (source or "assumed: nothing is known of it").partition(": ")
    if links.nodes < 2:  # noqa: PLR2004 - several
        return f"{joined}; {kind}: {ground}" if joined else None
    rate = f"{format_bandwidth(links.between)} ({_format_bits(links.between)})"
    speed = f"network between nodes: {rate} a GPU each way"
    details = [joined] if joined else []
    if links.latency_s is not None:
        details.append(f"latency {links.latency_s * 1e6:.4g} us")
    if not links.rails:
        details.append("no rails")
    if links.oversubscription > 1:
        details.append(f"oversubscription {links.oversubscription:g}")
    speed = ", ".join([speed, *details])
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
