"""Links between the devices of this node, from what NVML said of NVLink and of the PCI tree."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.devices import reported
from trimtab.catalog.tables import links as link_rows
from trimtab.spec import Link

if TYPE_CHECKING:
    from trimtab.probe.devices import SeenDevice
    from trimtab.probe.nvml import NvLinks, NvmlReading

LEVELS = {
    0: "on one board",
    10: "through one PCIe switch",
    20: "through several PCIe switches",
    30: "through one PCIe host bridge",
    40: "through the bridges of one NUMA node",
    50: "through the processors' own link",
}
"""What NVML's levels of the PCI tree mean."""

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
"""The NVLink generation that a chip was built with. Drivers misreport it (an H100 has been seen to answer
5), and the chip cannot be of another generation than its own."""

FULL_WIDTH = 16
"""Lanes of the PCIe rows."""


class Path(NamedTuple):
    """The path between two devices."""

    kind: str
    speed: float | None
    """Bytes per second, one way."""
    source: str


def device_links(seen: list[SeenDevice], reading: NvmlReading, node: int = 0) -> tuple[Link, ...]:
    """One Link where all pairs are alike, otherwise one for each pair. MIG slices have no peers."""
    if len(seen) < 2 or any(seen_device.slice for seen_device in seen):  # noqa: PLR2004 - two ends
        return ()
    everyone = range(len(seen))
    paths = {
        (one, two): _path(seen[one], seen[two], reading) for one in everyone for two in everyone if one < two
    }
    alike = len(set(paths.values())) == 1
    groups = [(tuple(everyone), paths[0, 1])] if alike else list(paths.items())
    return tuple(
        Link(
            kind=path.kind,
            node=node,
            devices=devices,
            bandwidth_bytes_per_s=path.speed,
            total_bytes_per_s=_total(path, [seen[device] for device in devices], reading),
            source=path.source,
        )
        for devices, path in groups
    )


def _total(path: Path, joined: list[SeenDevice], reading: NvmlReading) -> float | None:
    """What one device sends to all the others: links that run straight to each peer add up."""
    if path.speed is None:
        return None
    nvlinks = reading.nvlinks.get(joined[0].key)
    straight = path.kind.startswith("NVLink") and nvlinks is not None and not nvlinks.to_switch
    return path.speed * (len(joined) - 1) if straight else path.speed


def _path(seen_device: SeenDevice, two: SeenDevice, reading: NvmlReading) -> Path:
    nvlinks, other = reading.nvlinks.get(seen_device.key), reading.nvlinks.get(two.key)
    if nvlinks and other:
        count = min(nvlinks.to_switch, other.to_switch) or nvlinks.to_peer.get(two.bus_id or "", 0)
        if count:
            return _nvlink_path(seen_device, nvlinks, count)
    level = reading.ancestors.get((seen_device.key, two.key))
    source = f"detected: {seen_device.source}" + (f": {LEVELS[level]}" if level in LEVELS else "")
    generation = min(seen_device.pcie_generation or 0, two.pcie_generation or 0)
    width = min(seen_device.pcie_width or 0, two.pcie_width or 0)
    row = link_rows().get(f"PCIe{generation} x16")
    if not row or not width:
        return Path("PCIe", None, source)
    return Path(f"PCIe{generation} x{width}", row.gbs * 1e9 * width / FULL_WIDTH, source)


def _nvlink_path(seen_device: SeenDevice, nvlinks: NvLinks, count: int) -> Path:
    """The path over some NVLinks of a card.

    The rate of one is that of the card's own row over its links, since cards of one generation differ; for a
    card that has no row it is the generation's.
    """
    generation, ground = _generation(seen_device, nvlinks)
    through = "through a switch" if nvlinks.to_switch else "straight"
    source = f"detected: {seen_device.source}: {count} links {through}{ground}"
    if generation is None:
        return Path("NVLink", None, source)
    kind = f"NVLink{generation}"
    row = reported(seen_device.name)
    if row and row.nvlinks and row.link.startswith(kind):
        return Path(kind, row.link_gbs * 1e9 * count / row.nvlinks, f"{source}, each as in {row.name}")
    chip = f"{kind} on sm_{(seen_device.compute_capability or '').replace('.', '')}"
    rate = link_rows().get(chip) or link_rows().get(kind)
    if rate is None or rate.per_lane_gbs is None:
        return Path(kind, None, source)
    return Path(kind, rate.per_lane_gbs * 1e9 * count, f"{source}, each as in {rate.name}")


def _generation(seen_device: SeenDevice, nvlinks: NvLinks) -> tuple[int | None, str]:
    """The generation of a card's NVLinks: by its row, its chip or the driver's word, in that order."""
    row = reported(seen_device.name)
    catalogued = re.match(r"NVLink(\d)", row.link) if row else None
    if catalogued:
        known: int | None = int(catalogued.group(1))
    else:
        known = GENERATION_BY_CAPABILITY.get(seen_device.compute_capability or "")
    said = nvlinks.generation
    if known is None or said in (None, known):
        return known or said, ""
    return known, f" (the driver calls them generation {said})"
