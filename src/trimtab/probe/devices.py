"""SeenDevice: what some driver said of one device, before the catalogue is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.catalog.devices import (
    derived_bandwidth,
    derived_peaks,
    has_bf16,
    reported,
    row_peaks,
    row_vendor,
)
from trimtab.spec import Device, DeviceProcess, Finding, Peaks, Severity, Slice, Vendor
from trimtab.spec.hardware import CAPABILITY, PCIE_GENERATIONS, PCIE_WIDTHS
from trimtab.units import MIB, format_bytes

if TYPE_CHECKING:
    from trimtab.probe.machine import Machine


SHARED = "assumed: shared with the host"
MEMORY_TOLERANCE = 0.12
"""A device whose memory differs from its row by more than this is another device of the same name; ECC
on GDDR moves the total by 7 %."""


@dataclass(frozen=True, kw_only=True)
class SeenDevice:
    """One device as NVML, nvidia-smi or torch reports it. Unknown is None."""

    key: str
    """How the driver's own calls name it; "gpu0" or "gpu0/mig1"."""
    source: str
    """Who said so: NVML, nvidia-smi, torch."""
    name: str
    memory_bytes: int
    free_bytes: int | None = None
    memory_source: str | None = None
    """How the two above are known, where it was not the driver who said so."""
    uuid: str | None = None
    legacy_mig_name: str | None = None
    """MIG-GPU-<uuid>/gi/ci, the form of drivers before R470."""
    compute_capability: str | None = None
    multiprocessors: int | None = None
    clock_hz: float | None = None
    memory_clock_hz: float | None = None
    bus_width_bits: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    ecc: bool | None = None
    bus_id: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    numa_node: int | None = None
    processes: tuple[DeviceProcess, ...] | None = None
    slice: Slice | None = None
    parent_memory_bytes: int | None = None
    """Memory of the GPU that a slice is cut from."""
    vendor: Vendor = Vendor.NVIDIA


class UsableMemory(NamedTuple):
    """What processes can use of a device's memory, and what is free now."""

    usable: int
    free: int | None
    source: str | None
    """Set where the driver does not tell."""


def shared_memory(world: Machine) -> UsableMemory | None:
    """The host's memory, for a device that has none of its own; None where the host's is unknown too."""
    ram = world.host("ram") or {}
    total, free = ram.get("total"), ram.get("available")
    return UsableMemory(usable=total, free=free, source=SHARED) if total else None


def device(seen: SeenDevice, index: int) -> tuple[Device, list[Finding]]:
    """The Device that this is, and what is odd about it."""
    row = reported(seen.name)
    findings = []
    if row is not None and (oddity := _unlike_row(seen, row)):
        findings.append(
            Finding(
                severity=Severity.INFO,
                what=f"GPU {index} calls itself {seen.name}, but is not the one in the catalogue.",
                evidence=oddity,
                cause="Several devices are sold under one name.",
                cure="Nothing to do: its rates are derived from its own properties.",
            )
        )
        row = None
    peaks, peaks_source = _peaks(seen, row)
    bandwidth, bandwidth_source = _bandwidth(seen, row)
    said = f"detected: {seen.source}"
    told = seen.compute_capability if CAPABILITY.fullmatch(seen.compute_capability or "") else None
    capability = told or (row.compute_capability if row else None)
    capability_source = said if told else f"catalogued: {row.name}" if row else said
    held = seen.memory_source or said
    facts: dict[str, tuple[Any, str]] = {
        "index": (index, said),
        "name": (seen.name, said),
        "model": (row.name if row else None, "catalogued: by the driver's name"),
        "vendor": (row_vendor(row) if row else seen.vendor, said),
        "memory_bytes": (seen.memory_bytes, held),
        "free_bytes": (seen.free_bytes, held),
        "compute_capability": (capability, capability_source),
        "bf16": (
            has_bf16(capability) if capability else None,
            "derived: native from compute capability 8.0; below, it is emulated",
        ),
        "peaks": (peaks, peaks_source),
        "bandwidth_bytes_per_s": (bandwidth, bandwidth_source),
        "multiprocessors": (seen.multiprocessors, said),
        "clock_hz": (seen.clock_hz, said),
        "power_limit_w": (seen.power_limit_w, said),
        "power_default_w": (seen.power_default_w, said),
        "ecc": (seen.ecc, said),
        "uuid": (seen.uuid, said),
        "bus_id": (seen.bus_id, said),
        # Virtual machines and chips without a PCIe port answer 0.
        "pcie_generation": (_within(seen.pcie_generation, PCIE_GENERATIONS), said),
        "pcie_width": (_within(seen.pcie_width, PCIE_WIDTHS), said),
        "numa_node": (seen.numa_node, "detected: /sys/bus/pci/devices"),
        "slice": (seen.slice, said),
        "processes": (seen.processes, said),
    }
    known = {field: fact for field, fact in facts.items() if fact[0] is not None}
    return (
        Device(
            **{field: value for field, (value, _) in known.items()},
            sources={field: source for field, (_, source) in known.items()},
        ),
        findings,
    )


def _within(value: int | None, possible: range) -> int | None:
    return value if value in possible else None


def _unlike_row(seen: SeenDevice, row: Any) -> str:
    """How a device differs from the row of its name; empty when it does not."""
    if seen.slice is not None:
        return ""
    if seen.multiprocessors and row.multiprocessors and seen.multiprocessors != row.multiprocessors:
        return f"{seen.multiprocessors} multiprocessors, and {row.name} has {row.multiprocessors}"
    if seen.memory_source is None and abs(seen.memory_bytes / row.usable_bytes - 1) > MEMORY_TOLERANCE:
        mine, theirs = format_bytes(seen.memory_bytes), format_bytes(row.usable_bytes)
        return f"{mine} of memory, and {row.name} has {theirs}"
    return ""


def _peaks(seen: SeenDevice, row: Any) -> tuple[Peaks | None, str]:
    share = seen.slice.sm_share if seen.slice else 1.0
    if row is not None:
        cut = "" if share == 1 else f", times {share:.3f} of its multiprocessors"
        return row_peaks(row).scaled(share), f"catalogued: {row.name}{cut}"
    if not (seen.compute_capability and seen.multiprocessors and seen.clock_hz):
        return None, ""
    # A slice reports its own multiprocessors, so the rule needs no share.
    peaks = derived_peaks(seen.name, seen.compute_capability, seen.multiprocessors, seen.clock_hz)
    clock = f"{seen.clock_hz / 1e9:.2f} GHz"
    return peaks, (
        f"derived: {seen.multiprocessors} multiprocessors at {clock}, the highest clock; "
        "a specified peak lies up to 20 % lower"
    )


def _bandwidth(seen: SeenDevice, row: Any) -> tuple[float | None, str]:
    share = 1.0
    if seen.slice and seen.parent_memory_bytes:
        # MIG cuts memory and its bandwidth in eighths.
        share = max(1, round(8 * seen.memory_bytes / seen.parent_memory_bytes)) / 8
    if row is not None:
        cut = "" if share == 1 else f", times {share:.3f} of its memory"
        return row.bandwidth_gbs * 1e9 * share, f"catalogued: {row.name}{cut}"
    if seen.bus_width_bits and seen.memory_clock_hz:
        whole = derived_bandwidth(seen.bus_width_bits, seen.memory_clock_hz)
        clock = f"{seen.memory_clock_hz / 1e6:.0f} MHz"
        return whole * share, f"derived: {seen.bus_width_bits} bits at {clock}, twice a clock"
    return None, ""


# Devices where NVML is missing: from nvidia-smi, or from torch in a process of its own.


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


def from_nvidia_smi(world: Machine) -> tuple[tuple[SeenDevice, ...], str | None, tuple[Finding, ...]]:
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


def _smi_device(world: Machine, table: dict[str, str]) -> SeenDevice | None:
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


def from_torch(world: Machine) -> tuple[SeenDevice, ...]:
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
            name=answer["name"],
            memory_bytes=answer["total"],
            free_bytes=min(answer["free"], answer["total"]),
            uuid=answer["uuid"],
            compute_capability=answer["capability"] or None,
            multiprocessors=answer["multiprocessors"],
            vendor=Vendor.AMD if answer["hip"] else Vendor.NVIDIA,
        )
        for index, answer in enumerate(answers)
    )
