"""Links between the devices of this node, from what NVML said of NVLink and of the PCI tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.catalog.tables import links as link_rows
from trimtab.spec import Link

if TYPE_CHECKING:
    from trimtab.probe.nvml import NvLinks, NvmlReading
    from trimtab.probe.seen import SeenDevice

LEVELS = {
    0: "on one board",
    10: "through one PCIe switch",
    20: "through several PCIe switches",
    30: "through one PCIe host bridge",
    40: "through the bridges of one NUMA node",
    50: "through the processors' own link",
}
"""What NVML's levels of the PCI tree mean."""

Path = tuple[str, float | None, str]
"""Kind, bandwidth one way and source of the path between two devices."""


def device_links(seen: list[SeenDevice], reading: NvmlReading, node: int = 0) -> tuple[Link, ...]:
    """One Link where all pairs are alike, otherwise one for each pair. MIG slices have no peers."""
    if len(seen) < 2 or any(one.slice for one in seen):  # noqa: PLR2004 - two ends
        return ()
    everyone = range(len(seen))
    paths = {
        (one, two): _path(seen[one], seen[two], reading) for one in everyone for two in everyone if one < two
    }
    groups = [(tuple(everyone), paths[0, 1])] if len(set(paths.values())) == 1 else list(paths.items())
    return tuple(
        Link(kind=kind, node=node, devices=devices, bandwidth_bytes_per_s=speed, source=source)
        for devices, (kind, speed, source) in groups
    )


def _path(one: SeenDevice, two: SeenDevice, reading: NvmlReading) -> Path:
    nvlinks, other = reading.nvlinks.get(one.key), reading.nvlinks.get(two.key)
    if nvlinks and other:
        lanes = min(nvlinks.to_switch, other.to_switch) or nvlinks.to_peer.get(two.bus_id or "", 0)
        if lanes:
            return _nvlink_path(nvlinks, lanes)
    level = reading.ancestors.get((one.key, two.key))
    where = f": {LEVELS[level]}" if level in LEVELS else ""
    generation = min(one.pcie_generation or 0, two.pcie_generation or 0)
    width = min(one.pcie_width or 0, two.pcie_width or 0)
    row = link_rows().get(f"PCIe{generation} x16")
    if not row or not row.per_lane_gbs or not width:
        return "PCIe", None, f"detected: NVML{where}"
    speed = round(row.per_lane_gbs * width) * 1e9
    return f"PCIe{generation} x{width}", speed, f"detected: NVML{where}"


def _nvlink_path(nvlinks: NvLinks, lanes: int) -> Path:
    kind = f"NVLink{nvlinks.version}" if nvlinks.version else "NVLink"
    row = link_rows().get(kind)
    through = "through a switch" if nvlinks.to_switch else "straight"
    source = f"detected: NVML: {lanes} links {through}"
    if row is None or row.per_lane_gbs is None:
        return kind, None, source
    return kind, row.per_lane_gbs * lanes * 1e9, source
