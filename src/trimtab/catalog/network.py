"""The network between nodes: the catalogue's assumption for a device, or what the user states.

Every figure is one way. A node file or `--network` states it for each GPU or for each node; a Link holds
it for each GPU.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.tables import FabricRow, fabrics
from trimtab.errors import WrongUse, shortened
from trimtab.spec import Cluster, Link
from trimtab.units import format_bandwidth

if TYPE_CHECKING:
    from collections.abc import Collection

BITS = 8
ANY = "*"
"""In a row of links.toml: every device that no other row names."""
MOST_BYTES_PER_S = 1e14
"""More than this for one GPU is a typing error: a GPU's own memory is slower."""

_FORM = re.compile(
    r"\s*(?:(?P<count>[0-9]{1,4})\s*[xX\u00d7]\s*)?(?P<number>[0-9]+(?:\.[0-9]+)?)\s*"
    r"(?P<scale>[MGTmgt])(?P<unit>bit|b|B)(?:/s|ps)?\s*(?:/|per )\s*(?P<per>[A-Za-z]+)\s*"
)
_SCALES = {"m": 1e6, "g": 1e9, "t": 1e12}
_CURE = "Write it like 400Gb/gpu, 8x400Gb/node or 50GB/s/gpu: Gb are bits, GB are bytes."


class Network(NamedTuple):
    """A stated bandwidth between nodes, one way."""

    bytes_per_s: float
    per_node: bool
    """Whether the GPUs of a node share it; otherwise each GPU has it."""
    text: str
    """As it was stated."""

    def per_gpu(self, gpus: int) -> float:
        """Bytes a second for each GPU of a node with so many."""
        return self.bytes_per_s / max(1, gpus) if self.per_node else self.bytes_per_s


def parse_network(text: str, option: str = "--network") -> Network:
    """Read a bandwidth as people write it; an error names the option or the file that it is from.

    >>> parse_network("400Gb/gpu").bytes_per_s, parse_network("8x400Gb/node").per_gpu(8)
    (50000000000.0, 50000000000.0)
    >>> parse_network("50GB/s/gpu").bytes_per_s, parse_network("100Gbit/s/node").per_gpu(4)
    (50000000000.0, 3125000000.0)
    """
    given = f"{option} {shortened(text)}" if text.strip() else f"{option} ''"
    match = _FORM.fullmatch(text)
    if match is None:
        raise WrongUse(given, found=_fault(text), cure=_CURE)
    per = match["per"].lower()
    if per not in {"gpu", "node"}:
        raise WrongUse(given, found=f"{match['per']} is neither gpu nor node", cure=_CURE)
    if match["scale"].islower() and match["unit"] == "b":
        raise WrongUse(given, found=f"{match['scale']}b may mean bits or bytes", cure=_CURE)
    count = int(match["count"] or 1)
    rate = count * float(match["number"]) * _SCALES[match["scale"].lower()]
    if match["unit"] != "B":
        rate /= BITS
    if not 1 <= rate <= MOST_BYTES_PER_S:
        found = (
            "that is no bandwidth" if rate < 1 else f"{format_bandwidth(rate)} is more than any network has"
        )
        raise WrongUse(given, found=found, cure=_CURE)
    return Network(rate, per == "node", text.strip())


def _fault(text: str) -> str:
    """What is wrong with a text that has not the form of a bandwidth."""
    if not text.strip():
        return "it is empty"
    if re.fullmatch(r"\s*[0-9.]+\s*", text):
        return "it has no unit"
    if not re.search(r"(?:/|per )\s*(?:gpu|node)\s*$", text, re.IGNORECASE):
        return "it does not say whether each GPU or each node has it"
    return "it is not a bandwidth"


def with_network(cluster: Cluster, text: str, option: str = "--network") -> Cluster:
    """The cluster with this network between its nodes, in place of the one that was assumed."""
    network = parse_network(text, option)
    if len(cluster.nodes) < 2:  # noqa: PLR2004 - several
        note = f"{option} {network.text} changes nothing: there is one node"
        return cluster.replace(notes=(*cluster.notes, note))
    # Nodes of other sizes: the GPUs of the largest have the smallest share each, and all wait for them.
    gpus = max(len(node.devices) for node in cluster.nodes)
    link = Link(
        kind="network",
        node=None,
        bandwidth_bytes_per_s=network.per_gpu(gpus),
        source=f"stated: {option} {network.text}",
    )
    return cluster.replace(links=(*(one for one in cluster.links if one.node is not None), link))


def network_link(models: Collection[str], gpus: int = 1) -> Link:
    """The link between nodes of such devices, `gpus` in each node: the usual network of such nodes.

    Of several models the one with the slowest network decides.
    """
    if not models:
        return Link(kind="network", node=None, source="assumed: nodes are joined somehow")
    row = min((_row(model) for model in models), key=lambda one: one.per_gpu_gbs(gpus))
    return Link(
        kind="network",
        node=None,
        bandwidth_bytes_per_s=row.per_gpu_gbs(gpus) * 1e9,
        source=f"assumed: {row.source}",
    )


def _row(model: str) -> FabricRow:
    named = (row for row in fabrics() if model in row.devices)
    return next(named, None) or next(row for row in fabrics() if ANY in row.devices)
