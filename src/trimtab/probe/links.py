"""Find the links between the devices of this node from NVML's NVLink and PCI data."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.devices import find_reported_device
from trimtab.catalog.tables import links as link_rows
from trimtab.spec import Link

if TYPE_CHECKING:
    from trimtab.probe.devices import SeenDevice
    from trimtab.probe.nvml import NvLinks, NvmlReading

PCI_LEVELS = {
    0: "on one board",
    10: "through one PCIe switch",
    20: "through several PCIe switches",
    30: "through one PCIe host bridge",
    40: "through the bridges of one NUMA node",
    50: "through the processors' own link",
}
"""Meaning of NVML's levels of the PCI tree."""

GENERATION_BY_CAPABILITY = {
    "6.0": 1,
    "7.0": 2,
    "7.5": 2,
    "8.0": 3,
    "8.6": 3,
    "9.0": 4,
    "10.0": 5,
    "10.3": 5,
}
"""NVLink generation by compute capability. Preferred to the driver's answer, which can be wrong: an H100
has been seen to answer 5."""

FULL_WIDTH = 16
"""Lanes of the PCIe rows."""


class DevicePath(NamedTuple):
    """The path between two devices."""

    kind: str
    speed: float | None
    """Bytes per second, one way."""
    source: str


def find_device_links(seen: list[SeenDevice], reading: NvmlReading, node: int = 0) -> tuple[Link, ...]:
    """Return one Link if all pairs are alike, otherwise one per pair. MIG slices have no links."""
    if len(seen) < 2 or any(seen_device.slice for seen_device in seen):  # noqa: PLR2004 - two ends
        return ()
    indices = range(len(seen))
    paths = {(a, b): _find_path(seen[a], seen[b], reading) for a in indices for b in indices if a < b}
    alike = len(set(paths.values())) == 1
    groups = [(tuple(indices), paths[0, 1])] if alike else list(paths.items())
    return tuple(
        Link(
            kind=path.kind,
            node=node,
            devices=devices,
            bandwidth_bytes_per_s=path.speed,
            total_bytes_per_s=_total_bandwidth(path, [seen[device] for device in devices], reading),
            source=path.source,
        )
        for devices, path in groups
    )


def _total_bandwidth(path: DevicePath, joined: list[SeenDevice], reading: NvmlReading) -> float | None:
    """Return the bandwidth of one device to all others: direct links to several peers add up."""
    if path.speed is None:
        return None
    nvlinks = reading.nvlinks.get(joined[0].key)
    straight = path.kind.startswith("NVLink") and nvlinks is not None and not nvlinks.to_switch
    return path.speed * (len(joined) - 1) if straight else path.speed


def _find_path(seen_device: SeenDevice, peer: SeenDevice, reading: NvmlReading) -> DevicePath:
    nvlinks, other = reading.nvlinks.get(seen_device.key), reading.nvlinks.get(peer.key)
    if nvlinks and other:
        count = min(nvlinks.to_switch, other.to_switch) or nvlinks.to_peer.get(peer.bus_id or "", 0)
        if count:
            return _nvlink_path(seen_device, nvlinks, count)
    level = reading.ancestors.get((seen_device.key, peer.key))
    source = f"detected: {seen_device.source}" + (f": {PCI_LEVELS[level]}" if level in PCI_LEVELS else "")
    generation = min(seen_device.pcie_generation or 0, peer.pcie_generation or 0)
    width = min(seen_device.pcie_width or 0, peer.pcie_width or 0)
    row = link_rows().get(f"PCIe{generation} x16")
    if not row or not width:
        return DevicePath("PCIe", None, source)
    return DevicePath(f"PCIe{generation} x{width}", row.gbs * 1e9 * width / FULL_WIDTH, source)


def _nvlink_path(seen_device: SeenDevice, nvlinks: NvLinks, count: int) -> DevicePath:
    """Return the path over some NVLinks of a card.

    The rate per link is the card's catalogue rate divided by its number of links, since cards of one
    generation differ. A card without a row gets the rate of its generation.
    """
    generation, remark = _nvlink_generation(seen_device, nvlinks)
    through = "through a switch" if nvlinks.to_switch else "straight"
    source = f"detected: {seen_device.source}: {count} links {through}{remark}"
    if generation is None:
        return DevicePath("NVLink", None, source)
    kind = f"NVLink{generation}"
    row = find_reported_device(seen_device.name)
    if row and row.nvlinks and row.link.startswith(kind):
        return DevicePath(kind, row.link_gbs * 1e9 * count / row.nvlinks, f"{source}, each as in {row.name}")
    chip = f"{kind} on sm_{(seen_device.compute_capability or '').replace('.', '')}"
    rate = link_rows().get(chip) or link_rows().get(kind)
    if rate is None or rate.per_lane_gbs is None:
        return DevicePath(kind, None, source)
    return DevicePath(kind, rate.per_lane_gbs * 1e9 * count, f"{source}, each as in {rate.name}")


def _nvlink_generation(seen_device: SeenDevice, nvlinks: NvLinks) -> tuple[int | None, str]:
    """Return the NVLink generation by row, chip or driver, in that order, and a remark if they differ."""
    row = find_reported_device(seen_device.name)
    catalogued = re.match(r"NVLink(\d)", row.link) if row else None
    if catalogued:
        expected: int | None = int(catalogued.group(1))
    else:
        expected = GENERATION_BY_CAPABILITY.get(seen_device.compute_capability or "")
    reported = nvlinks.generation
    if expected is None or reported in (None, expected):
        return expected or reported, ""
    return expected, f" (the driver calls them generation {reported})"
