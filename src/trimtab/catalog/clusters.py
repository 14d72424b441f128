"""Parse a Cluster from text: `4xA100-40GB`, `2x8xH100`, `2xRTX3090+1xRTX4090`, or a detect file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from trimtab.catalog.devices import find_typed_device, has_bf16, row_peaks, row_vendor
from trimtab.catalog.tables import DeviceRow, FabricRow, fabrics, links
from trimtab.errors import BrokenFile, UnknownName, WrongUse, shorten
from trimtab.spec import Calibration, Cluster, Device, Link, Node
from trimtab.units import format_bandwidth, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


# The network between nodes: the catalogue's assumption for a device, or the user's `--network`.
# Every bandwidth is one way. `--network` states it per GPU or per node; a Link has it per GPU.


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
_OPTIONS_CURE = (
    "Write it like 400Gb/gpu,latency=5us,rails=yes,oversubscription=2,nvlink=72: each option may be left out."
)
_TIME = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>ns|us|\u00b5s|ms|s)")
_TIME_UNITS = {"ns": 1e9, "us": 1e6, "\u00b5s": 1e6, "ms": 1e3, "s": 1.0}
_YES = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
MOST_LATENCY_S = 1.0
MOST_OVERSUBSCRIPTION = 100.0


class Network(NamedTuple):
    """A stated bandwidth between nodes, one way."""

    bytes_per_s: float
    per_node: bool
    """Whether the GPUs of a node share it; otherwise each GPU has it."""
    text: str
    """The text that the user wrote."""
    latency_s: float | None = None
    rails: bool | None = None
    oversubscription: float | None = None
    nvlink_domain: int | None = None

    def per_gpu(self, gpus: int) -> float:
        """Return the bytes per second of each GPU on a node with this many GPUs."""
        return self.bytes_per_s / max(1, gpus) if self.per_node else self.bytes_per_s


def parse_network(text: str, option: str = "--network") -> Network:
    """Parse a network such as 400Gb/gpu,latency=5us; an error names the option or the file that it is from.

    >>> parse_network("400Gb/gpu").bytes_per_s, parse_network("8x400Gb/node").per_gpu(8)
    (50000000000.0, 50000000000.0)
    >>> parse_network("50GB/s/gpu").bytes_per_s, parse_network("100Gbit/s/node").per_gpu(4)
    (50000000000.0, 3125000000.0)
    >>> parse_network("400Gb/gpu,latency=5us,rails=no").latency_s
    5e-06
    """
    given = f"{option} {shorten(text)}" if text.strip() else f"{option} ''"
    text, *stated = text.split(",")
    options = _parse_network_options(stated, given)
    match = _FORM.fullmatch(text)
    if match is None:
        raise WrongUse(given, found=_explain_fault(text), cure=_CURE)
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
        fault = (
            "it is not a bandwidth" if rate < 1 else f"{format_bandwidth(rate)} is more than any network has"
        )
        raise WrongUse(given, found=fault, cure=_CURE)
    return Network(rate, per == "node", ",".join([text, *stated]).strip(), **options)


def _parse_network_options(stated: list[str], given: str) -> dict[str, Any]:
    """Return the fields of a Network that follow its bandwidth: latency=5us, rails=yes and others."""
    fields: dict[str, Any] = {}
    for option in stated:
        name, equals, value = (part.strip() for part in option.partition("="))
        name, value = name.lower(), value.lower()
        if not equals or name not in NETWORK_OPTIONS:
            known = ", ".join(NETWORK_OPTIONS)
            raise WrongUse(
                given, found=f"{option.strip() or 'an empty option'} is none of {known}", cure=_OPTIONS_CURE
            )
        field, parse = NETWORK_OPTIONS[name]
        if field in fields:
            raise WrongUse(given, found=f"it states {name} twice", cure=_OPTIONS_CURE)
        fields[field] = parse(value)
        if fields[field] is None:
            raise WrongUse(given, found=f"{name}={value} {_OPTION_FORMS[name]}", cure=_OPTIONS_CURE)
    return fields


def _parse_latency(text: str) -> float | None:
    match = _TIME.fullmatch(text)
    seconds = float(match["number"]) / _TIME_UNITS[match["unit"]] if match else -1.0
    return seconds if 0 <= seconds <= MOST_LATENCY_S else None


def _parse_oversubscription(text: str) -> float | None:
    # 2:1 is how network engineers write it.
    number = text.removesuffix(":1")
    if not re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,6})?", number):
        return None
    return float(number) if 1 <= float(number) <= MOST_OVERSUBSCRIPTION else None


def _parse_domain(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,5}", text) and int(text) > 1 else None


NETWORK_OPTIONS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "latency": ("latency_s", _parse_latency),
    "rails": ("rails", _YES.get),
    "oversubscription": ("oversubscription", _parse_oversubscription),
    "nvlink": ("nvlink_domain", _parse_domain),
}
"""Options that may follow a bandwidth: the field of a Network, and how to read it."""
_OPTION_FORMS = {
    "latency": "is not a time up to 1s, as in latency=5us",
    "rails": "is neither yes nor no",
    "oversubscription": "is not a number from 1 to 100, as in oversubscription=2",
    "nvlink": "is not a number of GPUs that NVLink joins, as in nvlink=72",
}


def _explain_fault(text: str) -> str:
    """Return what is wrong with a text that is not a bandwidth."""
    if not text.strip():
        return "it is empty"
    if re.fullmatch(r"\s*[0-9.]+\s*", text):
        return "it has no unit"
    if not re.search(r"(?:/|per )\s*(?:gpu|node)\s*$", text, re.IGNORECASE):
        return "it does not say whether each GPU or each node has it"
    return "it is not a bandwidth"


def with_network(cluster: Cluster, text: str, option: str = "--network") -> Cluster:
    """Return the cluster with this network between its nodes instead of the assumed one.

    A file of `trimtab calibrate --links` states collectives as they were measured, in nodes and between them.
    """
    if text.strip().endswith(".json"):
        return _with_measured_links(cluster, text.strip(), option)
    network = parse_network(text, option)
    if len(cluster.nodes) < 2:  # noqa: PLR2004 - several
        note = f"{option} {network.text} changes nothing: there is one node"
        return cluster.replace(notes=(*cluster.notes, note))
    # With nodes of different sizes, GPUs of the largest have the smallest share, and all wait for them.
    gpus = max(len(node.devices) for node in cluster.nodes)
    link = Link(
        kind="network",
        node=None,
        bandwidth_bytes_per_s=network.per_gpu(gpus),
        latency_s=network.latency_s,
        rails=network.rails,
        oversubscription=network.oversubscription,
        nvlink_domain=network.nvlink_domain or _known_domain(cluster),
        source=f"stated: {option} {network.text}",
    )
    return cluster.replace(links=(*(link for link in cluster.links if link.node is not None), link))


def _with_measured_links(cluster: Cluster, file: str, option: str) -> Cluster:
    """Return the cluster with the collectives of a calibration file."""
    calibration = Calibration.from_file(Path(file))
    measured = calibration.collectives if calibration is not None else ()
    if calibration is None or not measured:
        raise WrongUse(
            f"{option} {shorten(file)}",
            found="the file holds no measured collectives" if calibration else "it is no calibration file",
            cure="Write one with: trimtab calibrate --links",
        )
    ranks = max(times.ranks for times in measured)
    where = f"on {calibration.device} with {measured[0].backend}, up to {ranks} ranks"
    note = f"collectives: measured {where} ({file})"
    return cluster.replace(collectives=measured, notes=(*cluster.notes, note))


def _known_domain(cluster: Cluster) -> int | None:
    """Return the GPUs that NVLink joins in the cluster, which a stated network leaves as it is."""
    return next((link.nvlink_domain for link in cluster.links if link.nvlink_domain), None)


def with_host_memory(cluster: Cluster, text: str) -> Cluster:
    """Return the cluster with this memory of the host in every node."""
    size, source = parse_bytes(text), f"stated: --host-memory {text}"
    return cluster.replace(
        nodes=tuple(
            node.replace(ram_bytes=size, sources={**node.sources, "ram_bytes": source})
            for node in cluster.nodes
        )
    )


def assume_network_link(models: Collection[str], gpus: int = 1) -> Link:
    """Return the usual network link between nodes with `gpus` devices of these models.

    Of several models, the one with the slowest network decides.
    """
    if not models:
        return Link(kind="network", node=None, source="assumed: nodes are joined somehow")
    row = min((_fabric_row(model) for model in models), key=lambda row: row.per_gpu_gbs(gpus))
    return Link(
        kind="network",
        node=None,
        bandwidth_bytes_per_s=row.per_gpu_gbs(gpus) * 1e9,
        nvlink_domain=row.nvlink_domain,
        source=f"assumed: {row.source}",
    )


def _fabric_row(model: str) -> FabricRow:
    named = (row for row in fabrics() if model in row.devices)
    return next(named, None) or next(row for row in fabrics() if ANY in row.devices)


MOST_DEVICES = 16384
"""Clusters larger than this are typing errors."""
MOST_DIGITS = 9

_COUNT = re.compile(r"\s*([0-9]+)\s*[xX*\u00d7]\s*(?=\S)")
_FORMS = "Forms: H200, 4xA100-40GB, 2x8xH100 (2 nodes of 8), 2xRTX3090+1xRTX4090, or a detect file."


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that an `--on` string or file describes.

    >>> [len(node.devices) for node in parse_cluster("2x8xH100").nodes]
    [8, 8]
    """
    if not text.strip():
        raise WrongUse("--on ''", found="it is empty", cure=_FORMS)
    if text.endswith(".json") or any(separator and separator in text for separator in (os.sep, os.altsep)):
        return read_cluster_file(Path(text))
    try:
        return _parse_device_string(text)
    except UnknownName:
        # A device name takes precedence over a file of the same name.
        if _is_file(text):
            return read_cluster_file(Path(text))
        raise


def _parse_device_string(text: str) -> Cluster:
    """Return the cluster of a string such as 2x8xH100."""
    given = f"--on {shorten(text)}"
    parts = [_parse_part(word, given) for word in text.split("+")]
    total = sum(max(nodes, 1) * count for nodes, count, _, _ in parts)
    if total > MOST_DEVICES:
        raise WrongUse(
            given,
            found=f"that is {total} devices, and the maximum is {MOST_DEVICES}",
            cure="Name fewer.",
        )
    # Parts without a node count share one node: 2xRTX3090+1xRTX4090 is one machine with three cards.
    shared = [row for nodes, count, row, _ in parts if not nodes for row in [row] * count]
    layouts = ([shared] if shared else []) + [
        [row] * count for nodes, count, row, _ in parts for _ in range(nodes)
    ]
    return _build_cluster(layouts, given, notes=[note for *_, note in parts if note])


def read_cluster_file(path: Path) -> Cluster:
    """Return the cluster in a file that `trimtab detect --json` wrote."""
    given = f"--on {shorten(str(path))}"
    try:
        text = path.read_bytes()
    except IsADirectoryError:
        fault = "it is a folder"
    except FileNotFoundError:
        fault = "there is no such file"
    except OSError as error:
        fault = f"it cannot be read ({error.strerror})"
    except ValueError:
        fault = "no file can have that name"
    else:
        return _decode_cluster(text, given)
    raise BrokenFile(given, found=fault, cure="Write one with: trimtab detect --json > FILE")


def _decode_cluster(text: bytes, given: str) -> Cluster:
    """Return the cluster of a file, in which `"network": "400Gb/gpu"` may replace the link between nodes."""
    try:
        values = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or "network" not in values:
        return Cluster.from_json(text, origin=given)
    network = values.pop("network")
    cluster = Cluster.from_json(msgspec.json.encode(values), origin=given)
    if network is None:
        return cluster
    return with_network(cluster, network if isinstance(network, str) else repr(network), f"{given}, network")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:
        # The text is too long for a file name.
        return False


def _parse_part(text: str, given: str) -> tuple[int, int, DeviceRow, str]:
    """Return node count (0 if not given), device count, row and note of a part between plus signs."""
    counts: list[int] = []
    rest = text
    while (match := _COUNT.match(rest)) and len(counts) < 3:  # noqa: PLR2004 - one more than is legal
        digits = match.group(1)
        if len(digits) > MOST_DIGITS:
            raise WrongUse(given, found=f"a count has {len(digits)} digits", cure="Name fewer.")
        counts.append(int(digits))
        rest = rest[match.end() :]
    if not rest.strip():
        raise WrongUse(given, found="a part between plus signs is empty", cure=_FORMS)
    if len(counts) > 2:  # noqa: PLR2004 - nodes x devices
        raise WrongUse(given, found=f"{text.strip()} has more than two counts", cure=_FORMS)
    if 0 in counts:
        raise WrongUse(given, found="the count is 0", cure=f"Ask for at least one, as in 1x{rest.strip()}.")
    row, note = find_typed_device(rest.strip(), given=given)
    nodes, count = (counts if len(counts) == 2 else [0, *counts, 1])[:2]  # noqa: PLR2004
    return nodes, count, row, note


def _build_cluster(layouts: list[list[DeviceRow]], given: str, notes: list[str]) -> Cluster:
    nodes = tuple(
        Node(
            name=f"node{index}",
            devices=tuple(device_from_row(row, position, given) for position, row in enumerate(rows)),
            sources={"name": f"stated: {given}", "devices": f"stated: {given}"},
        )
        for index, rows in enumerate(layouts)
    )
    joined = [link for index, rows in enumerate(layouts) for link in _node_links(rows, index)]
    if len(layouts) > 1:
        largest = max(len(rows) for rows in layouts)
        joined.append(assume_network_link({row.name for rows in layouts for row in rows}, largest))
    notes += [
        f"{row.name}: assumed is {links()[row.board].assumes}"
        for rows in layouts
        for row in rows
        if len(rows) > 1 and row.board and links()[row.board].assumes
    ]
    return Cluster(nodes=nodes, links=tuple(joined), notes=tuple(dict.fromkeys(notes)))


def device_from_row(row: DeviceRow, index: int, given: str) -> Device:
    """Build a device from its catalogue row."""
    row_source = f"catalogued: {row.name}"
    usable = row_source if row.usable_gib is not None else f"derived: 0.98 of {row.memory_gb:g} GiB as sold"
    sources = {
        "vendor": row_source,
        "compute_capability": row_source,
        "bf16": row_source,
        "peaks": row_source,
        "bandwidth_bytes_per_s": row_source,
        "multiprocessors": row_source if row.multiprocessors else None,
        "pcie_generation": row_source,
        "memory_bytes": usable,
        "name": f"stated: {given}",
        "model": f"stated: {given}",
        "index": f"stated: {given}",
    }
    return Device(
        index=index,
        name=row.drivers[0],
        model=row.name,
        vendor=row_vendor(row),
        memory_bytes=row.usable_bytes,
        compute_capability=row.compute_capability,
        bf16=has_bf16(row.compute_capability),
        peaks=row_peaks(row),
        bandwidth_bytes_per_s=row.bandwidth_gbs * 1e9,
        multiprocessors=row.multiprocessors,
        pcie_generation=row.pcie,
        sources={key: source for key, source in sources.items() if source},
    )


def _node_links(rows: list[DeviceRow], node: int) -> list[Link]:
    """Return the links between the devices of a node that was given as text.

    Boards with a switch (SXM) join all devices at full speed; boards without one (OAM, V100) divide a
    device's links among its peers. A bridge joins one pair and is sold separately, and different cards
    share only the PCIe bus: PCIe is assumed for both.
    """
    if len(rows) < 2:  # noqa: PLR2004 - two ends
        return []
    indices = tuple(range(len(rows)))
    first = rows[0]
    alike = all(row.name == first.name for row in rows)
    on_board = alike and not first.link.startswith("PCIe") and not _is_bridge(first)
    if on_board:
        return [_board_link(first, node, indices)]
    generation = min(row.pcie for row in rows)
    kind = f"PCIe{generation} x16"
    bridged = alike and _is_bridge(first)
    assumption = (
        "no bridge, since none was named" if bridged else f"a slot of PCIe{generation} x16 for each card"
    )
    speed = links()[kind].gbs * 1e9
    return [
        Link(
            kind=kind,
            node=node,
            devices=indices,
            bandwidth_bytes_per_s=speed,
            total_bytes_per_s=speed,
            source=f"assumed: {assumption}",
        )
    ]


def _board_link(row: DeviceRow, node: int, devices: tuple[int, ...]) -> Link:
    """Return the link of a board with one kind of device: through its switch, or direct between pairs."""
    board = links()[row.board] if row.board else None
    total = pair = row.link_gbs * 1e9
    source = f"catalogued: {row.name}"
    if board is not None and board.pair_gbs is not None:
        pair = board.pair_gbs * 1e9
        total = min(total, pair * (len(devices) - 1))
        source = f"assumed: {board.assumes}" if board.assumes else source
    return Link(
        kind=row.link,
        node=node,
        devices=devices,
        bandwidth_bytes_per_s=pair,
        total_bytes_per_s=total,
        source=source,
    )


def _is_bridge(row: DeviceRow) -> bool:
    # Turing's NVLink2 is a bridge too: the card has two links, a V100 six.
    return "bridge" in row.link or (row.link == "NVLink2" and row.link_gbs < links()["NVLink2"].gbs)
