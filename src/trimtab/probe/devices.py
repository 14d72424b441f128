"""Build Device objects from driver data and the catalogue; read devices with nvidia-smi or torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.catalog.devices import (
    derive_bandwidth,
    derive_peaks,
    find_reported_device,
    has_bf16,
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
    """Key of the device: "gpu0", or "gpu0/mig1" for a MIG slice."""
    source: str
    """NVML, nvidia-smi or torch."""
    name: str
    memory_bytes: int
    free_bytes: int | None = None
    memory_source: str | None = None
    """Source of the two memory fields, if it is not the driver."""
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
    """Usable and free memory of a device, in bytes."""

    usable: int
    free: int | None
    source: str | None
    """Set if the driver does not report memory."""


def read_shared_memory(world: Machine) -> UsableMemory | None:
    """Return the host's memory, for a device without memory of its own; None if it is unknown too."""
    ram = world.host("ram") or {}
    total, free = ram.get("total"), ram.get("available")
    return UsableMemory(usable=total, free=free, source=SHARED) if total else None


def build_device(seen: SeenDevice, index: int) -> tuple[Device, list[Finding]]:
    """Build the Device with a source for each field, and findings about what is unusual."""
    row = find_reported_device(seen.name)
    findings = []
    if row is not None and (oddity := _difference_from_row(seen, row)):
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
    detected = f"detected: {seen.source}"
    reported = seen.compute_capability if CAPABILITY.fullmatch(seen.compute_capability or "") else None
    capability = reported or (row.compute_capability if row else None)
    capability_source = detected if reported else f"catalogued: {row.name}" if row else detected
    memory_source = seen.memory_source or detected
    facts: dict[str, tuple[Any, str]] = {
        "index": (index, detected),
        "name": (seen.name, detected),
        "model": (row.name if row else None, "catalogued: by the driver's name"),
        "vendor": (row_vendor(row) if row else seen.vendor, detected),
        "memory_bytes": (seen.memory_bytes, memory_source),
        "free_bytes": (seen.free_bytes, memory_source),
        "compute_capability": (capability, capability_source),
        "bf16": (
            has_bf16(capability) if capability else None,
            "derived: native from compute capability 8.0; below, it is emulated",
        ),
        "peaks": (peaks, peaks_source),
        "bandwidth_bytes_per_s": (bandwidth, bandwidth_source),
        "multiprocessors": (seen.multiprocessors, detected),
        "clock_hz": (seen.clock_hz, detected),
        "power_limit_w": (seen.power_limit_w, detected),
        "power_default_w": (seen.power_default_w, detected),
        "ecc": (seen.ecc, detected),
        "uuid": (seen.uuid, detected),
        "bus_id": (seen.bus_id, detected),
        # Virtual machines and chips without a PCIe port answer 0.
        "pcie_generation": (_value_in_range(seen.pcie_generation, PCIE_GENERATIONS), detected),
        "pcie_width": (_value_in_range(seen.pcie_width, PCIE_WIDTHS), detected),
        "numa_node": (seen.numa_node, "detected: /sys/bus/pci/devices"),
        "slice": (seen.slice, detected),
        "processes": (seen.processes, detected),
    }
    present = {field: fact for field, fact in facts.items() if fact[0] is not None}
    return (
        Device(
            **{field: value for field, (value, _) in present.items()},
            sources={field: source for field, (_, source) in present.items()},
        ),
        findings,
    )


def _value_in_range(value: int | None, possible: range) -> int | None:
    return value if value in possible else None


def _difference_from_row(seen: SeenDevice, row: Any) -> str:
    """Return how a device differs from the catalogue row of its name; empty if it does not."""
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
        return row_peaks(row).scale(share), f"catalogued: {row.name}{cut}"
    if not (seen.compute_capability and seen.multiprocessors and seen.clock_hz):
        return None, ""
    # A slice reports its own multiprocessors, so the rule needs no share.
    peaks = derive_peaks(seen.name, seen.compute_capability, seen.multiprocessors, seen.clock_hz)
    clock = f"{seen.clock_hz / 1e9:.2f} GHz"
    return peaks, (
        f"derived: {seen.multiprocessors} multiprocessors at {clock}, the highest clock; "
        "a specified peak is up to 20 % lower"
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
        bandwidth = derive_bandwidth(seen.bus_width_bits, seen.memory_clock_hz)
        clock = f"{seen.memory_clock_hz / 1e6:.0f} MHz"
        return bandwidth * share, f"derived: {seen.bus_width_bits} bits at {clock}, twice a clock"
    return None, ""


# Without NVML, devices are read from nvidia-smi, or from torch in a separate process.


_COLUMNS = (
    "index,uuid,name,memory.total,memory.free,memory.reserved,compute_cap,power.limit,power.default_limit,"
    "ecc.mode.current,pci.bus_id,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,driver_version"
)
_QUERY = ("nvidia-smi", f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits")

_TORCH_SCRIPT = """
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


NOT_AVAILABLE = ("[N/A]", "[Not Supported]", "N/A")
"""Values that nvidia-smi prints for a column that a device does not have."""


def read_nvidia_smi(world: Machine) -> tuple[tuple[SeenDevice, ...], str | None, tuple[Finding, ...]]:
    """Return devices, driver version and findings from nvidia-smi; no devices if it is missing."""
    text = world.run(_QUERY)
    rows = [line.split(", ") for line in (text or "").strip().splitlines()]
    names = _COLUMNS.split(",")
    tables = [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]
    devices = [(table, _parse_smi_row(world, table)) for table in tables]
    findings = tuple(_no_memory_finding(table) for table, device in devices if device is None)
    driver = tables[0]["driver_version"] if tables else None
    return tuple(device for _, device in devices if device is not None), driver, findings


def _no_memory_finding(table: dict[str, str]) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"GPU {table['index']} does not report how much memory it has.",
        evidence=f"nvidia-smi: memory.total is {table['memory.total']}",
        cause="The driver answered with an error.",
        cure="Run `nvidia-smi`: if it shows ERR! there, the driver needs a restart or the node a reboot.",
    )


def _parse_smi_row(world: Machine, table: dict[str, str]) -> SeenDevice | None:
    """Return the device of a line; None if its memory is neither reported nor shared with the host."""

    def number(column: str) -> float | None:
        try:
            return float(table[column])
        except ValueError:
            # nvidia-smi writes [N/A] or [Not Supported] there.
            return None

    def integer(column: str) -> int | None:
        value = number(column)
        return None if value is None else int(value)

    usable = int(((number("memory.total") or 0) - (number("memory.reserved") or 0)) * MIB)
    free_mib, source = number("memory.free"), None
    free = None if free_mib is None else min(int(free_mib * MIB), usable)
    if usable <= 0:
        shared = read_shared_memory(world) if table["memory.total"].strip() in NOT_AVAILABLE else None
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
        pcie_generation=integer("pcie.link.gen.max"),
        pcie_width=integer("pcie.link.width.max"),
    )


def read_torch_devices(world: Machine) -> tuple[SeenDevice, ...]:
    """Return the devices that torch sees, after CUDA_VISIBLE_DEVICES.

    Runs in a separate process: importing torch is slow, and starting CUDA here would take memory.
    """
    text = world.run((world.host("executable") or "python3", "-c", _TORCH_SCRIPT))
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
