"""Devices where NVML is missing: from nvidia-smi, or from torch in a process of its own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trimtab.probe.seen import SeenDevice, shared_memory
from trimtab.spec import Finding, Severity, Vendor
from trimtab.units import MIB

if TYPE_CHECKING:
    from trimtab.probe.world import World

_COLUMNS = (
    "index,uuid,name,memory.total,memory.free,memory.reserved,compute_cap,power.limit,power.default_limit,"
    "ecc.mode.current,pci.bus_id,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,driver_version"
)
_QUERY = ("nvidia-smi", f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits")

_TORCH = """
import json, torch
seen = []
for index in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    seen.append({
        "name": p.name, "total": total, "free": free, "multiprocessors": p.multi_processor_count,
        "capability": getattr(p, "gcnArchName", "").split(":")[0] if torch.version.hip
                      else f"{p.major}.{p.minor}",
        "hip": bool(torch.version.hip),
        "uuid": f"GPU-{p.uuid}" if hasattr(p, "uuid") else None,
    })
print(json.dumps(seen))
"""


NOT_TOLD = ("[N/A]", "[Not Supported]", "N/A")
"""What nvidia-smi prints for a column that a device does not have."""


def from_nvidia_smi(world: World) -> tuple[tuple[SeenDevice, ...], str | None, tuple[Finding, ...]]:
    """Devices and driver version as nvidia-smi prints them; none where it is missing."""
    text = world.run(_QUERY)
    rows = [line.split(", ") for line in (text or "").strip().splitlines()]
    names = _COLUMNS.split(",")
    tables = [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]
    devices = [(table, _smi_device(world, table)) for table in tables]
    findings = tuple(_silent(table) for table, one in devices if one is None)
    driver = tables[0]["driver_version"] if tables else None
    return tuple(one for _, one in devices if one is not None), driver, findings


def _silent(table: dict[str, str]) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"GPU {table['index']} does not tell how much memory it has.",
        evidence=f"nvidia-smi: memory.total is {table['memory.total']}",
        cause="The driver answered with an error.",
        cure="Run `nvidia-smi`: if it shows ERR! there, the driver needs a restart or the node a reboot.",
    )


def _smi_device(world: World, table: dict[str, str]) -> SeenDevice | None:
    """The device of a line; None where its memory is neither told nor the host's."""

    def number(column: str) -> float | None:
        try:
            return float(table[column])
        except ValueError:
            # nvidia-smi writes [N/A] or [Not Supported] there.
            return None

    def whole(column: str) -> int | None:
        value = number(column)
        return None if value is None else int(value)

    usable = int(((number("memory.total") or 0) - (number("memory.reserved") or 0)) * MIB)
    told, source = number("memory.free"), None
    free = None if told is None else min(int(told * MIB), usable)
    if usable <= 0:
        shared = shared_memory(world) if table["memory.total"].strip() in NOT_TOLD else None
        if shared is None:
            return None
        usable, free, source = shared
    clock = number("clocks.max.sm")
    ecc = {"Enabled": True, "Disabled": False}.get(table["ecc.mode.current"])
    return SeenDevice(
        key=f"gpu{table['index']}",
        source="nvidia-smi",
        name=table["name"],
        memory_bytes=usable,
        free_bytes=free,
        memory_source=source,
        uuid=table["uuid"],
        compute_capability=table["compute_cap"] if number("compute_cap") else None,
        clock_hz=clock * 1e6 if clock else None,
        power_limit_w=number("power.limit"),
        power_default_w=number("power.default_limit"),
        ecc=ecc,
        bus_id=table["pci.bus_id"],
        pcie_generation=whole("pcie.link.gen.max"),
        pcie_width=whole("pcie.link.width.max"),
    )


def from_torch(world: World) -> tuple[SeenDevice, ...]:
    """Devices as torch sees them, which has already applied the visible-devices variables.

    Runs in a process of its own: importing torch is slow, and starting CUDA here would take memory.
    """
    text = world.run((world.host("executable") or "python3", "-c", _TORCH))
    try:
        answers: list[dict[str, Any]] = json.loads(text or "[]")
    except ValueError:
        return ()
    return tuple(
        SeenDevice(
            key=f"gpu{index}",
            source="torch",
            name=one["name"],
            memory_bytes=one["total"],
            free_bytes=min(one["free"], one["total"]),
            uuid=one["uuid"],
            compute_capability=one["capability"] or None,
            multiprocessors=one["multiprocessors"],
            vendor=Vendor.AMD if one["hip"] else Vendor.NVIDIA,
        )
        for index, one in enumerate(answers)
    )
