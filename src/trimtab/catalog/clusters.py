"""A Cluster without the hardware: `4xA100-40GB`, `2x8xH100`, `2xRTX3090+1xRTX4090`, or a file of ours."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from trimtab.catalog.describe import has_bf16, row_peaks, row_vendor
from trimtab.catalog.lookup import typed
from trimtab.catalog.network import network_link, with_network
from trimtab.catalog.tables import DeviceRow, links
from trimtab.errors import BrokenFile, UnknownName, WrongUse, shortened
from trimtab.spec import Cluster, Device, Link, Node

MOST_DEVICES = 16384
"""Larger clusters than this are typing errors."""
MOST_DIGITS = 9

_COUNT = re.compile(r"\s*([0-9]+)\s*[xX*\u00d7]\s*(?=\S)")
_FORMS = "Forms: H200, 4xA100-40GB, 2x8xH100 (2 nodes of 8), 2xRTX3090+1xRTX4090, or a detect file."


def stated(text: str) -> Cluster:
    """The cluster that an `--on` string or file describes.

    >>> [len(node.devices) for node in stated("2x8xH100").nodes]
    [8, 8]
    """
    if not text.strip():
        raise WrongUse("--on ''", found="it is empty", cure=_FORMS)
    if text.endswith(".json") or any(one and one in text for one in (os.sep, os.altsep)):
        return from_file(Path(text))
    try:
        return _named(text)
    except UnknownName:
        # A name that is known is never shadowed by a file that happens to be called so.
        if _is_file(text):
            return from_file(Path(text))
        raise


def _named(text: str) -> Cluster:
    """The cluster of a string such as 2x8xH100."""
    given = f"--on {shortened(text)}"
    parts = [_part(one, given) for one in text.split("+")]
    total = sum(max(nodes, 1) * count for nodes, count, _, _ in parts)
    if total > MOST_DEVICES:
        raise WrongUse(
            given,
            found=f"that is {total} devices, and the most is {MOST_DEVICES}",
            cure="Name fewer.",
        )
    # Parts without a node count share one node: 2xRTX3090+1xRTX4090 is one machine with three cards.
    shared = [row for nodes, count, row, _ in parts if not nodes for row in [row] * count]
    layouts = ([shared] if shared else []) + [
        [row] * count for nodes, count, row, _ in parts for _ in range(nodes)
    ]
    return _cluster(layouts, given, notes=[note for *_, note in parts if note])


def from_file(path: Path) -> Cluster:
    """The cluster in a file that `trimtab detect --json` wrote."""
    given = f"--on {shortened(str(path))}"
    try:
        text = path.read_bytes()
    except IsADirectoryError:
        found = "it is a folder"
    except FileNotFoundError:
        found = "there is no such file"
    except OSError as error:
        found = f"it cannot be read ({error.strerror})"
    except ValueError:
        found = "no file can have that name"
    else:
        return _read_cluster(text, given)
    raise BrokenFile(given, found=found, cure="Write one with: trimtab detect --json > FILE")


def _read_cluster(text: bytes, given: str) -> Cluster:
    """The cluster of a file, in which `"network": "400Gb/gpu"` may stand for the link between nodes."""
    try:
        values = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        values = None
    if not isinstance(values, dict) or "network" not in values:
        return Cluster.from_json(text, origin=given)
    network = values.pop("network")
    found = Cluster.from_json(msgspec.json.encode(values), origin=given)
    if network is None:
        return found
    return with_network(found, network if isinstance(network, str) else repr(network), f"{given}, network")


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:
        # Longer than any file's name.
        return False


def _part(text: str, given: str) -> tuple[int, int, DeviceRow, str]:
    """Node count (0 where none was said), device count, row and note of one part between plus signs."""
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
    row, note = typed(rest.strip(), given=given)
    nodes, count = (counts if len(counts) == 2 else [0, *counts, 1])[:2]  # noqa: PLR2004
    return nodes, count, row, note


def _cluster(layouts: list[list[DeviceRow]], given: str, notes: list[str]) -> Cluster:
    nodes = tuple(
        Node(
            name=f"node{index}",
            devices=tuple(row_device(row, position, given) for position, row in enumerate(rows)),
            sources={"name": f"stated: {given}", "devices": f"stated: {given}"},
        )
        for index, rows in enumerate(layouts)
    )
    joined = [link for index, rows in enumerate(layouts) for link in _node_links(rows, index)]
    if len(layouts) > 1:
        largest = max(len(rows) for rows in layouts)
        joined.append(network_link({row.name for rows in layouts for row in rows}, largest))
    notes += [
        f"{row.name}: taken is {links()[row.board].assumes}"
        for rows in layouts
        for row in rows
        if len(rows) > 1 and row.board and links()[row.board].assumes
    ]
    return Cluster(nodes=nodes, links=tuple(joined), notes=tuple(dict.fromkeys(notes)))


def row_device(row: DeviceRow, index: int, given: str) -> Device:
    """A device as its catalogue row describes it."""
    seen = f"catalogued: {row.name}"
    usable = seen if row.usable_gib is not None else f"derived: 0.98 of {row.memory_gb:g} GiB as sold"
    known = {
        "vendor": seen,
        "compute_capability": seen,
        "bf16": seen,
        "peaks": seen,
        "bandwidth_bytes_per_s": seen,
        "multiprocessors": seen if row.multiprocessors else None,
        "pcie_generation": seen,
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
        sources={key: source for key, source in known.items() if source},
    )


def _node_links(rows: list[DeviceRow], node: int) -> list[Link]:
    """How the devices of a stated node reach each other.

    Boards with a switch (SXM) join all devices at full speed; boards without one (OAM, V100) share a
    device's links out among its peers. A bridge joins one pair and is bought apart, and unlike cards share
    only the PCIe bus: for those the bus is assumed.
    """
    if len(rows) < 2:  # noqa: PLR2004 - two ends
        return []
    everyone = tuple(range(len(rows)))
    first = rows[0]
    alike = all(row.name == first.name for row in rows)
    on_board = alike and not first.link.startswith("PCIe") and not _is_bridge(first)
    if on_board:
        return [_board_link(first, node, everyone)]
    generation = min(row.pcie for row in rows)
    kind = f"PCIe{generation} x16"
    bridged = alike and _is_bridge(first)
    ground = "no bridge, since none was named" if bridged else f"a slot of PCIe{generation} x16 for each card"
    speed = links()[kind].gbs * 1e9
    return [
        Link(
            kind=kind,
            node=node,
            devices=everyone,
            bandwidth_bytes_per_s=speed,
            total_bytes_per_s=speed,
            source=f"assumed: {ground}",
        )
    ]


def _board_link(row: DeviceRow, node: int, devices: tuple[int, ...]) -> Link:
    """The link of a board full of one device: through its switch, or straight from pair to pair."""
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
