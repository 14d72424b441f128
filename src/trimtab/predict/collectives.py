"""Estimate one collective as NCCL does when it chooses: the fastest of its algorithms and protocols.

Each algorithm under each protocol is a line: a latency, and seconds for each byte. The figures are NCCL's own
(`catalog/links.toml` names the version); the formulas are written here from what the algorithms send.

- A ring passes each byte through every rank: n - 1 steps to gather or to scatter, twice as many to reduce.
- A tree sends each byte up and down once: fewer steps, and two nodes send half as much as more nodes do.
- NVLink SHARP adds in the switch: a GPU sends 1 + 1/n of the bytes instead of 2 (n - 1)/n.
- PAT gathers and scatters in a logarithmic number of steps, where each node has one rank of the group.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cache
from typing import NamedTuple

from trimtab.catalog.tables import (
    GenerationRow,
    collective_ramp,
    collectives,
    generations,
    protocols,
)

MICRO = 1e-6
GIGA = 1e9
TREE_SMALLEST = 6
"""Power of two of the first size that NCCL corrects for trees: 64 bytes."""
PROTOCOLS = ("ll", "ll128", "simple")


class Paths(NamedTuple):
    """What the ranks of a collective have to send over."""

    local: int
    """Ranks in one node, or in one NVLink domain."""
    nodes: int
    inside: float
    """Bytes per second that collectives reach between the ranks of a node, one way, for each rank."""
    port: float
    """The same between nodes, for the port of each rank."""
    nvlink: bool
    switched: bool
    """Whether NVLink goes through a switch that can add."""
    generation: int
    """Index into `generations()`."""
    network_extra_s: float = 0.0
    """Latency of each network hop above that of NCCL's figures."""

    @property
    def ranks(self) -> int:
        """Ranks of the collective."""
        return self.local * self.nodes

    @property
    def limits(self) -> GenerationRow:
        """Limits of the generation of GPUs."""
        return generations()[self.generation]

    @property
    def across(self) -> float:
        """Bytes per second between nodes: the ports of a node add up, as far as channels use them."""
        return self.port * min(self.local, collectives().ring_ports)

    @property
    def node_rate(self) -> float:
        """Bus bandwidth of the links of a node; infinite where a node has one rank."""
        return self.inside if self.local > 1 else math.inf

    @property
    def network_rate(self) -> float:
        """Bus bandwidth of a ring between nodes; infinite in one node."""
        return self.across if self.nodes > 1 else math.inf

    @property
    def tree_rate(self) -> float:
        """Bus bandwidth of a tree between nodes; infinite in one node.

        Of two nodes each sends what it has once. With more, half of them pass on what two others sent.
        """
        return self.network_rate * (2 if self.nodes == 2 else 1)  # noqa: PLR2004

    def limit(self, figures: tuple[float, float, float]) -> float:
        """Return the limit of all channels between nodes; infinite in one node, where none is reached."""
        if self.nodes == 1:
            return math.inf
        return figures[min(self.nodes, 3) - 1] * GIGA * self.local


class Line(NamedTuple):
    """Seconds of a collective by bytes: a latency, and the bytes over the slower of two rates."""

    latency_s: float
    node_bytes_per_s: float
    """Bytes of the whole collective per second by the links of a node; medium sizes reach less."""
    network_bytes_per_s: float = math.inf
    """The same by the network and by NCCL's limits."""
    ramp: str = ""
    """Correction of the first rate for medium sizes: ring, tree_ll, tree_ll128, tree_simple, or none."""

    def seconds(self, size: int) -> float:
        """Return the seconds for `size` bytes."""
        if size <= 0:
            return self.latency_s
        reached = min(self.node_bytes_per_s * find_ramp(self.ramp, size), self.network_bytes_per_s)
        return self.latency_s + size / reached


@cache
def _ramp_points() -> tuple[tuple[float, ...], tuple[float, ...]]:
    ramp = collective_ramp()
    return tuple(map(math.log2, ramp.ring_bytes)), ramp.ring


def find_ramp(name: str, size: int) -> float:
    """Return the share of its bandwidth that a collective of `size` bytes reaches."""
    if not name:
        return 1.0
    power = math.log2(size)
    if name == "ring":
        sizes, shares = _ramp_points()
        above = bisect_right(sizes, power)
        if above == 0:
            return shares[0]
        if above == len(sizes):
            return shares[-1]
        low, high = sizes[above - 1], sizes[above]
        return shares[above - 1] + (shares[above] - shares[above - 1]) * (power - low) / (high - low)
    steps: tuple[float, ...] = getattr(collective_ramp(), name)
    place = int(power) - TREE_SMALLEST
    return steps[place] if 0 <= place < len(steps) else 1.0


def hop_s(paths: Paths, algorithm: str, protocol: str, *, network: bool) -> float:
    """Return the latency of one step inside a node, or between nodes."""
    row = protocols()[algorithm, protocol]
    if not network:
        return (row.nvlink_us if paths.nvlink else row.pcie_us) * MICRO
    # With one rank a node nothing hides the network, and NCCL counts with the latency of trees.
    exposed = protocols()["tree", protocol] if paths.local == 1 and algorithm == "ring" else row
    flushes = 2 if protocol == "simple" else 1
    return exposed.network_us * MICRO + flushes * paths.network_extra_s


def _is_usable(paths: Paths, protocol: str) -> bool:
    """Whether NCCL uses the protocol: LL128 relies on stores of 128 bytes that NVLink keeps whole."""
    return protocol != "ll128" or paths.nvlink


def ring_lines(paths: Paths, *, reducing: bool) -> list[Line]:
    """List the lines of a ring that gathers or scatters; an all-reduce does both."""
    figures, ranks = collectives(), paths.ranks
    rounds = 2 if reducing else 1
    steps, network_steps = rounds * (ranks - 1), rounds * (paths.nodes - 1)
    found = []
    for protocol in PROTOCOLS:
        if not _is_usable(paths, protocol):
            continue
        share, limit = 1.0, math.inf
        if protocol == "ll":
            share, limit = figures.ll_share, paths.limits.ll[min(paths.nodes, 3) - 1] * GIGA
        elif protocol == "ll128":
            share, limit = figures.ll128_share, paths.limit(paths.limits.ring_ll128)
        inside = hop_s(paths, "ring", protocol, network=False)
        if network_steps:
            posts = figures.simple_posts if protocol == "simple" else 1
            inside = max(inside, posts * figures.post_us * MICRO)
        latency = (steps - network_steps) * inside
        if network_steps:
            latency += network_steps * hop_s(paths, "ring", protocol, network=True)
        latency += protocols()["ring", protocol].begin_us * MICRO
        if reducing and network_steps and protocol == "simple":
            latency *= figures.plateau
        each = ranks / steps
        node, network = share * paths.node_rate, min(share * paths.network_rate, limit)
        found.append(Line(latency, each * node, each * network, _ring_ramp(paths, protocol)))
    return found


def _ring_ramp(paths: Paths, protocol: str = "simple") -> str:
    """Return the correction of rings for medium sizes, which was measured over NVLink."""
    return "ring" if paths.nvlink and protocol != "ll" else ""


def tree_lines(paths: Paths) -> list[Line]:
    """List the lines of an all-reduce over a tree: chains in nodes, two binary trees between nodes."""
    figures, limits = collectives(), paths.limits
    found = []
    for protocol in PROTOCOLS:
        if not _is_usable(paths, protocol):
            continue
        share, limit = figures.tree_share, paths.limit(limits.tree)
        if protocol == "ll":
            share *= figures.tree_ll_share
            limit = min(limit, limits.ll[min(paths.nodes, 3) - 1] * GIGA)
        elif protocol == "ll128":
            share *= figures.tree_ll128_share[paths.nodes > 1]
            limit = min(limit, paths.limit(limits.tree_ll128))
        latency = (paths.local - 1) * hop_s(paths, "tree", protocol, network=False)
        if paths.nodes > 1:
            latency += _halvings(paths.nodes) * hop_s(paths, "tree", protocol, network=True)
        latency = protocols()["tree", protocol].begin_us * MICRO + 2 * latency
        # NCCL's correction of trees is of the whole estimate, so the slower rate gets it.
        rate = min(share * paths.node_rate, share * paths.tree_rate, limit)
        found.append(Line(latency, rate / 2, ramp=f"tree_{protocol}"))
    return found


def switch_lines(paths: Paths) -> list[Line]:
    """List the lines of an all-reduce that NVLink switches add; empty where they cannot."""
    limits = paths.limits
    if not (paths.switched and limits.nvls_share) or paths.local < 3:  # noqa: PLR2004 - two need no switch
        return []
    sent = 2 * (paths.local - 1) / (paths.local + 1)
    node = min(paths.inside * limits.nvls_share * sent, limits.nvls * GIGA)
    network = min(paths.tree_rate, paths.limit(limits.nvls_tree))
    latency = hop_s(paths, "nvls", "simple", network=False)
    if paths.nodes > 1:
        latency += 2 * _halvings(paths.nodes) * hop_s(paths, "nvls", "simple", network=True)
    each = paths.ranks / (2 * (paths.ranks - 1))
    return [Line(latency, each * node, each * network, _ring_ramp(paths))]


def pat_lines(paths: Paths) -> list[Line]:
    """List the lines of PAT, which gathers and scatters between nodes with one rank each."""
    figures = collectives()
    if paths.local > 1 or paths.nodes == 1:
        return []
    hops = _halvings(paths.nodes) * hop_s(paths, "pat", "simple", network=True) * figures.pat_hop_share
    latency = protocols()["pat", "simple"].begin_us * MICRO + hops + paths.ranks * figures.pat_rank_us * MICRO
    return [Line(latency, math.inf, figures.pat_share * paths.network_rate)]


def _halvings(nodes: int) -> int:
    return nodes.bit_length() - 1


@cache
def collective_lines(kind: str, paths: Paths) -> tuple[Line, ...]:
    """Return the lines of a collective over these paths: all_reduce, or all_gather and reduce_scatter."""
    if kind == "all_reduce":
        return (*ring_lines(paths, reducing=True), *tree_lines(paths), *switch_lines(paths))
    return (*ring_lines(paths, reducing=False), *pat_lines(paths))


def time_collective(kind: str, size: int, paths: Paths) -> float:
    """Return the seconds of the fastest algorithm and protocol."""
    return min(line.seconds(size) for line in collective_lines(kind, paths))


def time_all_to_all(size: int, paths: Paths) -> float:
    """Return the seconds of an all-to-all: a message to every other rank, all of them at once.

    Messages for other nodes leave by the port of their own GPU, while those for the same node use its links.
    """
    figures, ranks = collectives(), paths.ranks
    inside = size * (paths.local - 1) / ranks / paths.inside
    across = size * (ranks - paths.local) / ranks / paths.port if paths.nodes > 1 else 0.0
    posts = (ranks - paths.local) * figures.post_us * MICRO
    return _fastest_message(max(inside, across), paths, network=paths.nodes > 1) + posts


def time_message(size: int, paths: Paths) -> float:
    """Return the seconds of one message, between nodes where the paths have several."""
    rate = paths.port if paths.nodes > 1 else paths.inside
    return _fastest_message(size / rate, paths, network=paths.nodes > 1)


def _fastest_message(transfer_s: float, paths: Paths, *, network: bool) -> float:
    """Return the seconds of messages that take `transfer_s` at full bandwidth: the best of LL and Simple."""
    shares = {"ll": collectives().ll_share, "simple": 1.0}
    return min(
        protocols()["ring", protocol].begin_us * MICRO
        + hop_s(paths, "ring", protocol, network=network)
        + transfer_s / share
        for protocol, share in shares.items()
    )
