"""SeenDevice: what some driver said of one device, before the catalogue is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.catalog.describe import derived_bandwidth, derived_peaks, has_bf16, row_peaks, row_vendor
from trimtab.catalog.lookup import reported
from trimtab.spec import Device, DeviceProcess, Finding, Peaks, Severity, Slice, Vendor
from trimtab.spec.hardware import CAPABILITY, PCIE_GENERATIONS, PCIE_WIDTHS
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from trimtab.probe.world import World

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


class Memory(NamedTuple):
    """What processes can use of a device's memory, and what is free now."""

    usable: int
    free: int | None
    source: str | None
    """Set where the driver does not tell."""


def shared_memory(world: World) -> Memory | None:
    """The host's memory, for a device that has none of its own; None where the host's is unknown too."""
    ram = world.host("ram") or {}
    total, free = ram.get("total"), ram.get("available")
    return Memory(usable=total, free=free, source=SHARED) if total else None


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
