"""Devices and their links as NVML reports them.

Covers NVIDIA GPUs and MIG slices. Does not apply CUDA_VISIBLE_DEVICES: NVML shows every GPU of the host or
container, in PCI order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trimtab.catalog.devices import cores_per_multiprocessor
from trimtab.probe.devices import SeenDevice, UsableMemory, shared_memory
from trimtab.probe.host import pci_accelerators
from trimtab.probe.machine import (
    NVML_LIBRARY_NOT_FOUND,
    NVML_NO_PYTHON_PACKAGE,
    NVML_NOT_SUPPORTED,
    Machine,
    NvmlFault,
)
from trimtab.spec import DeviceProcess, Finding, Gauge, Severity, Slice
from trimtab.units import GIB, parse_whole

if TYPE_CHECKING:
    from trimtab.probe.machine import Machine


MEMORY_V2 = 0x2000028
"""nvmlMemory_v2: tells what the driver keeps for itself apart from what processes use."""
CLOCK_SM, CLOCK_MEMORY = 1, 2
MOST_NVLINKS = 36
REMOTE_IS_SWITCH = 2
NVLINK_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
"""What nvmlDeviceGetNvLinkVersion answers is an enum (1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0, 6.0), not the
generation: an A100 and an RTX 3090 answer 5, which is NVLink 3.1. See NVML_NVLINK_VERSION_* in nvml.h and
https://github.com/open-mpi/hwloc/issues/658."""

ABSENT = (NVML_LIBRARY_NOT_FOUND, NVML_NO_PYTHON_PACKAGE)
"""NVML is not here, which says nothing about the machine."""
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
GONE = (1, 15, 16)
"""Uninitialised, lost, waiting for a reset: no further answer is worth having."""

CURES = {
    8: ("The GPU's power cables are not all attached.", "Ask whoever runs the machine."),
    9: ("The NVIDIA kernel module is not loaded.", "Run `sudo modprobe nvidia`, or install the driver."),
    15: (
        "The GPU fell off the bus: overheating, power or a hardware fault.",
        "Reboot the node, or leave this GPU out with CUDA_VISIBLE_DEVICES. If it returns, have it replaced.",
    ),
    16: (
        "The GPU waits for a reset.",
        "Ask an administrator to run `nvidia-smi --gpu-reset -i N`, or reboot.",
    ),
    18: (
        "The driver was updated while the old kernel module stayed loaded.",
        "Reboot, or unload and load the nvidia kernel modules.",
    ),
}
"""Cause and cure by NVML's return code."""
DEFAULT_CURE = (
    "The driver answered with an error.",
    "Run `nvidia-smi`: if it fails too, the driver needs a restart or the node a reboot.",
)


@dataclass(frozen=True, kw_only=True)
class NvLinks:
    """The live NVLinks of one GPU."""

    generation: int | None
    """As the driver says; see `links.py` for whether to believe it."""
    to_switch: int
    """How many lead to a switch, which joins all GPUs of the board."""
    to_peer: dict[str, int] = field(default_factory=dict)
    """How many lead straight to a GPU, by its PCI address."""


@dataclass(frozen=True, kw_only=True)
class NvmlReading:
    """All that NVML said."""

    absent: str = ""
    """Why NVML could not be asked at all; empty when it answered."""
    devices: tuple[SeenDevice, ...] = ()
    """In PCI order, each GPU that is cut into MIG slices followed by them."""
    mig_parents: frozenset[str] = frozenset()
    """Keys of GPUs that only their slices can be used of."""
    nvlinks: dict[str, NvLinks] = field(default_factory=dict)
    ancestors: dict[tuple[str, str], int] = field(default_factory=dict)
    """Level of the nearest common point on the PCI tree, by pair of keys."""
    driver: str | None = None
    driver_cuda: str | None = None
    findings: tuple[Finding, ...] = ()


def read_nvml(world: Machine) -> NvmlReading:
    """Ask NVML everything; a GPU that fails half way is left out, with a finding."""
    try:
        world.nvml("nvmlInit")
    except NvmlFault as fault:
        # The library comes with many container images; without a GPU its driver has nothing to load for.
        idle = fault.code == DRIVER_NOT_LOADED and not _nvidia_on_bus(world)
        if fault.code in ABSENT or idle:
            return NvmlReading(absent=fault.text)
        return NvmlReading(absent=fault.text, findings=(_fault_finding("NVML", fault),))
    try:
        count = int(world.nvml("nvmlDeviceGetCount"))
    except NvmlFault as fault:
        return NvmlReading(absent=fault.text, findings=(_fault_finding("NVML", fault),))
    devices: list[SeenDevice] = []
    findings: list[Finding] = []
    parents: set[str] = set()
    for number in range(count):
        key = f"gpu{number}"
        try:
            whole = _device(world, key)
            slices = _slices(world, whole)
        except NvmlFault as fault:
            # A cgroup hides the other jobs' GPUs this way: they are none of our business.
            if fault.code != NO_PERMISSION:
                findings.append(_fault_finding(f"GPU {number}", fault))
            continue
        devices += [whole, *slices]
        if slices or _mig_is_on(world, key):
            parents.add(key)
        if not slices and key in parents:
            findings.append(_uncut(number))
    whole_keys = [device.key for device in devices if "/" not in device.key]
    reading = NvmlReading(
        devices=tuple(devices),
        mig_parents=frozenset(parents),
        driver=_told(world, "nvmlSystemGetDriverVersion"),
        driver_cuda=_cuda(_told(world, "nvmlSystemGetCudaDriverVersion_v2")),
        findings=tuple(findings),
    )
    try:
        return replace(
            reading,
            nvlinks={key: links for key in whole_keys if (links := _nvlinks(world, key))},
            ancestors=_ancestors(world, whole_keys),
        )
    except NvmlFault as fault:
        # A GPU that is lost between two questions: what was read of the others stands.
        lost = (*reading.findings, _fault_finding("A GPU", fault))
        return replace(reading, findings=lost)


def _may(world: Machine, function: str, *args: Any) -> Any:
    """An answer that may be missing: None where the driver does not tell, for whatever reason.

    A GPU that is gone is another matter, and raises.
    """
    try:
        return world.nvml(function, *args)
    except NvmlFault as fault:
        if fault.code in GONE:
            raise
        return None


def _told(world: Machine, function: str) -> Any:
    """An answer about the driver itself; None where there is none, for whatever reason."""
    try:
        return world.nvml(function)
    except NvmlFault:
        return None


def _nvidia_on_bus(world: Machine) -> bool:
    return any(pci_accelerator.endswith("NVIDIA") for pci_accelerator in pci_accelerators(world))


def _uncut(number: int) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"GPU {number} is in MIG mode and has no slices: CUDA cannot use it.",
        evidence="NVML: MIG mode is on, and no slice answers",
        cause="No slice was made, or none was given to this process.",
        cure=f"Ask an administrator for slices (`nvidia-smi mig -i {number} -cgi PROFILE -C`), or for MIG "
        f"mode off (`nvidia-smi -i {number} -mig 0`).",
    )


def _fault_finding(subject: str, fault: NvmlFault) -> Finding:
    cause, cure = CURES.get(fault.code, DEFAULT_CURE)
    return Finding(
        severity=Severity.ERROR,
        what=f"{subject} does not answer.",
        evidence=f"NVML: {fault.text} (code {fault.code})",
        cause=cause,
        cure=cure,
    )


def _cuda(number: int | None) -> str | None:
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _device(world: Machine, key: str) -> SeenDevice:
    memory = _memory(world, key)
    capability = _may(world, "nvmlDeviceGetCudaComputeCapability", key)
    text = f"{capability[0]}.{capability[1]}" if capability else None
    cores = _may(world, "nvmlDeviceGetNumGpuCores", key)
    lanes = cores_per_multiprocessor(text) if text else None
    ecc = _may(world, "nvmlDeviceGetEccMode", key)
    pci = _may(world, "nvmlDeviceGetPciInfo", key)
    return SeenDevice(
        key=key,
        source="NVML",
        name=str(world.nvml("nvmlDeviceGetName", key)),
        memory_bytes=memory.usable,
        free_bytes=memory.free,
        memory_source=memory.source,
        uuid=_may(world, "nvmlDeviceGetUUID", key),
        compute_capability=text,
        multiprocessors=cores // lanes if cores and lanes else None,
        clock_hz=_scaled(_may(world, "nvmlDeviceGetMaxClockInfo", key, CLOCK_SM), 1e6),
        memory_clock_hz=_scaled(_may(world, "nvmlDeviceGetMaxClockInfo", key, CLOCK_MEMORY), 1e6),
        bus_width_bits=_may(world, "nvmlDeviceGetMemoryBusWidth", key),
        power_limit_w=_scaled(_may(world, "nvmlDeviceGetPowerManagementLimit", key), 1e-3),
        power_default_w=_scaled(_may(world, "nvmlDeviceGetPowerManagementDefaultLimit", key), 1e-3),
        ecc=bool(ecc[0]) if ecc else None,
        bus_id=pci["busId"] if pci else None,
        pcie_generation=_may(world, "nvmlDeviceGetMaxPcieLinkGeneration", key),
        pcie_width=_may(world, "nvmlDeviceGetMaxPcieLinkWidth", key),
        numa_node=_numa_node(world, pci["busId"]) if pci else None,
        processes=_processes(world, key),
    )


def _numa_node(world: Machine, bus_id: str) -> int | None:
    """The NUMA node that a device hangs on, by its PCI address; the kernel writes -1 where it has none.

    NVML's own answer is another thing: the node that a GPU's memory forms, on machines that share it.
    """
    domain, _, rest = bus_id.lower().partition(":")
    text = world.read(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node")
    return parse_whole(text or "")


def _scaled(value: float | None, factor: float) -> float | None:
    return None if not value else value * factor


def _memory(world: Machine, key: str) -> UsableMemory:
    """What processes can use and what is free; the driver's own share is taken off where it is told.

    A GPU that has no memory of its own (GB10, Jetson) does not support the question.
    """
    memory = _may(world, "nvmlDeviceGetMemoryInfo", key, MEMORY_V2)
    try:
        memory = memory or world.nvml("nvmlDeviceGetMemoryInfo", key)
    except NvmlFault as fault:
        shared = shared_memory(world)
        if fault.code != NVML_NOT_SUPPORTED or shared is None:
            raise
        return shared
    usable = memory["total"] - memory.get("reserved", 0)
    return UsableMemory(usable=usable, free=min(memory["free"], usable), source=None)


def _processes(world: Machine, key: str) -> tuple[DeviceProcess, ...] | None:
    """Other processes on a device, each once."""
    lists = [
        _may(world, "nvmlDeviceGetComputeRunningProcesses", key),
        _may(world, "nvmlDeviceGetGraphicsRunningProcesses", key),
    ]
    if all(items is None for items in lists):
        return None
    mine = world.host("pid")
    found = {one["pid"]: one for listed in lists for one in listed or () if one["pid"] != mine}
    return tuple(
        DeviceProcess(
            pid=pid,
            used_bytes=one.get("usedGpuMemory"),
            name=world.host(f"process:{pid}"),
        )
        for pid, one in sorted(found.items())
    )


def _slices(world: Machine, parent: SeenDevice) -> list[SeenDevice]:
    """The MIG slices of a GPU; none where MIG is off or unknown to the device."""
    if not _mig_is_on(world, parent.key):
        return []
    most = _may(world, "nvmlDeviceGetMaxMigDeviceCount", parent.key) or 0
    slices = []
    for number in range(most):
        key = f"{parent.key}/mig{number}"
        uuid = _may(world, "nvmlDeviceGetUUID", key)
        if uuid is not None:
            slices.append(_slice(world, parent, key, uuid))
    return slices


def _mig_is_on(world: Machine, key: str) -> bool:
    mode = _may(world, "nvmlDeviceGetMigMode", key)
    return bool(mode and mode[0])


def _slice(world: Machine, parent: SeenDevice, key: str, uuid: str) -> SeenDevice:
    memory = _memory(world, key)
    shape = _may(world, "nvmlDeviceGetAttributes_v2", key) or {}
    gpu_instance = _may(world, "nvmlDeviceGetGpuInstanceId", key)
    compute_instance = _may(world, "nvmlDeviceGetComputeInstanceId", key)
    multiprocessors = shape.get("multiprocessorCount")
    share = multiprocessors / parent.multiprocessors if multiprocessors and parent.multiprocessors else 1
    name = str(_may(world, "nvmlDeviceGetName", key) or parent.name)
    slices, gib = shape.get("gpuInstanceSliceCount", "?"), round(memory.usable / GIB)
    profile = name.rpartition(" MIG ")[2] if " MIG " in name else f"{slices}g.{gib}gb"
    return SeenDevice(
        key=key,
        source="NVML",
        name=parent.name,
        memory_bytes=memory.usable,
        free_bytes=memory.free,
        uuid=uuid,
        legacy_mig_name=f"MIG-{parent.uuid}/{gpu_instance}/{compute_instance}",
        compute_capability=parent.compute_capability,
        multiprocessors=multiprocessors,
        clock_hz=parent.clock_hz,
        memory_clock_hz=parent.memory_clock_hz,
        bus_width_bits=parent.bus_width_bits,
        ecc=parent.ecc,
        bus_id=parent.bus_id,
        pcie_generation=parent.pcie_generation,
        pcie_width=parent.pcie_width,
        numa_node=parent.numa_node,
        processes=_processes(world, key),
        slice=Slice(profile=profile, parent=parent.uuid or parent.key, sm_share=min(share, 1.0)),
        parent_memory_bytes=parent.memory_bytes,
    )


def _nvlinks(world: Machine, key: str) -> NvLinks | None:
    """The live NVLinks of a GPU; None where it has none."""
    version, to_switch = 0, 0
    to_peer: dict[str, int] = {}
    for number in range(MOST_NVLINKS):
        try:
            if not world.nvml("nvmlDeviceGetNvLinkState", key, number):
                continue
        except NvmlFault:
            # A GPU without NVLink, or past its last link.
            break
        version = _may(world, "nvmlDeviceGetNvLinkVersion", key, number) or version
        remote = _may(world, "nvmlDeviceGetNvLinkRemoteDeviceType", key, number)
        pci = _may(world, "nvmlDeviceGetNvLinkRemotePciInfo", key, number)
        if remote == REMOTE_IS_SWITCH:
            to_switch += 1
        elif pci:
            to_peer[pci["busId"]] = to_peer.get(pci["busId"], 0) + 1
    if not to_switch and not to_peer:
        return None
    return NvLinks(generation=NVLINK_GENERATIONS.get(version), to_switch=to_switch, to_peer=to_peer)


def _ancestors(world: Machine, keys: list[str]) -> dict[tuple[str, str], int]:
    pairs = [(key, two) for index, key in enumerate(keys) for two in keys[index + 1 :]]
    found = {pair: _may(world, "nvmlDeviceGetTopologyCommonAncestor", *pair) for pair in pairs}
    return {pair: level for pair, level in found.items() if level is not None}


# What the GPUs of this machine do at this moment, as NVML tells.


TEMPERATURE_OF_CHIP = 0
REASONS = {
    0x2: "application clocks setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clock setting",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons, as nvml.h has them; 0x1, an idle GPU, is no reason."""
MOST_SLICES = 8


def gauges(world: Machine) -> tuple[tuple[Gauge, ...], str]:
    """Every GPU in PCI order, one that is cut into slices as its slices; and why there are none."""
    try:
        world.nvml("nvmlInit")
        count = int(world.nvml("nvmlDeviceGetCount"))
    except NvmlFault as fault:
        return (), fault.text
    found: list[Gauge] = []
    for index in range(count):
        try:
            found += _read(world, index)
        except NvmlFault as fault:
            # A cgroup hides the other jobs' GPUs this way: they are none of our business.
            if fault.code != NO_PERMISSION:
                found.append(Gauge(key=f"gpu{index}", index=index, fault=fault.text))
    return tuple(found), "" if found else "the driver shows none"


def _read(world: Machine, index: int) -> list[Gauge]:
    key = f"gpu{index}"
    if not _mig_is_on(world, key):
        return [_gauge(world, key, index)]
    slices = [f"{key}/mig{number}" for number in range(MOST_SLICES)]
    there = [slice_ for slice_ in slices if _may(world, "nvmlDeviceGetUUID", slice_) is not None]
    return [_gauge(world, one, index) for one in there] or [_gauge(world, key, index)]


def _gauge(world: Machine, key: str, index: int) -> Gauge:
    memory = _memory(world, key)
    rates = _may(world, "nvmlDeviceGetUtilizationRates", key) or {}
    whole = key.partition("/")[0]
    return Gauge(
        key=key,
        index=index,
        name=str(_may(world, "nvmlDeviceGetName", key) or _may(world, "nvmlDeviceGetName", whole) or ""),
        uuid=_may(world, "nvmlDeviceGetUUID", key),
        memory_bytes=memory.usable,
        used_bytes=None if memory.free is None else max(0, memory.usable - memory.free),
        busy=_share(rates.get("gpu")),
        memory_busy=_share(rates.get("memory")),
        # Power, heat and clocks belong to the whole GPU, of which a slice is a part.
        power_w=_scaled(_may(world, "nvmlDeviceGetPowerUsage", whole), 1e-3),
        power_limit_w=_scaled(_may(world, "nvmlDeviceGetPowerManagementLimit", whole), 1e-3),
        temperature_c=_may(world, "nvmlDeviceGetTemperature", whole, TEMPERATURE_OF_CHIP),
        clock_hz=_scaled(_may(world, "nvmlDeviceGetClockInfo", whole, CLOCK_SM), 1e6),
        top_clock_hz=_scaled(_may(world, "nvmlDeviceGetMaxClockInfo", whole, CLOCK_SM), 1e6),
        throttles=_throttles(world, whole),
        processes=_processes(world, key),
    )


def _share(percent: Any) -> float | None:
    """A share of 1; drivers answer 2**32 - 1 where they do not know."""
    return percent / 100 if isinstance(percent, int | float) and 0 <= percent <= 100 else None  # noqa: PLR2004


def _throttles(world: Machine, key: str) -> tuple[str, ...]:
    bits = _may(world, "nvmlDeviceGetCurrentClocksEventReasons", key)
    if bits is None:
        # Drivers before R535 know it by another name.
        bits = _may(world, "nvmlDeviceGetCurrentClocksThrottleReasons", key)
    return tuple(name for bit, name in REASONS.items() if isinstance(bits, int) and bits & bit)
