"""Read devices, links and live gauges from NVML.

Covers NVIDIA GPUs and MIG slices. Does not apply CUDA_VISIBLE_DEVICES: NVML shows every GPU of the host or
container, in PCI order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trimtab.catalog.devices import cores_per_multiprocessor
from trimtab.probe.devices import SeenDevice, UsableMemory, read_shared_memory
from trimtab.probe.host import list_pci_accelerators
from trimtab.probe.machine import (
    NVML_LIBRARY_NOT_FOUND,
    NVML_NO_PYTHON_PACKAGE,
    NVML_NOT_SUPPORTED,
    Machine,
    NvmlFault,
)
from trimtab.spec import DeviceProcess, Finding, GpuReading, Severity, Slice
from trimtab.units import GIB, parse_whole

if TYPE_CHECKING:
    from trimtab.probe.machine import Machine


MEMORY_V2 = 0x2000028
"""nvmlMemory_v2: reports the driver's reserved memory apart from what processes use."""
CLOCK_SM, CLOCK_MEMORY = 1, 2
MOST_NVLINKS = 36
REMOTE_IS_SWITCH = 2
NVLINK_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}
"""NVLink generation by nvmlDeviceGetNvLinkVersion, an enum (1.0, 2.0, 2.2, 3.0, 3.1, 4.0, 5.0, 6.0):
an A100 and an RTX 3090 answer 5, which is NVLink 3.1. See NVML_NVLINK_VERSION_* in nvml.h and
https://github.com/open-mpi/hwloc/issues/658."""

NVML_MISSING = (NVML_LIBRARY_NOT_FOUND, NVML_NO_PYTHON_PACKAGE)
"""Codes for a missing NVML: the machine itself may be fine."""
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
GPU_LOST = (1, 15, 16)
"""Uninitialised, lost, waiting for a reset: further answers are meaningless."""

CURES = {
    8: ("The GPU's power cables are not all attached.", "Ask the administrator of the machine."),
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
    """As the driver reports it, which can be wrong; see `links.py`."""
    to_switch: int
    """Links to a switch, which joins all GPUs of the board."""
    to_peer: dict[str, int] = field(default_factory=dict)
    """Direct links to another GPU, by its PCI address."""


@dataclass(frozen=True, kw_only=True)
class NvmlReading:
    """Everything that NVML reported."""

    absent: str = ""
    """Why NVML could not be queried; empty if it answered."""
    devices: tuple[SeenDevice, ...] = ()
    """In PCI order; the MIG slices of a GPU follow it."""
    mig_parents: frozenset[str] = frozenset()
    """Keys of GPUs in MIG mode: only their slices can be used."""
    nvlinks: dict[str, NvLinks] = field(default_factory=dict)
    ancestors: dict[tuple[str, str], int] = field(default_factory=dict)
    """Level of the nearest common point on the PCI tree, by pair of keys."""
    driver: str | None = None
    driver_cuda: str | None = None
    findings: tuple[Finding, ...] = ()


def read_nvml(world: Machine) -> NvmlReading:
    """Read all devices from NVML; a GPU that fails is left out, with a finding."""
    try:
        world.nvml("nvmlInit")
    except NvmlFault as fault:
        # Many container images include the library; without a GPU, no driver is loaded.
        idle = fault.code == DRIVER_NOT_LOADED and not _nvidia_on_bus(world)
        if fault.code in NVML_MISSING or idle:
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
            gpu = _read_device(world, key)
            slices = _read_slices(world, gpu)
        except NvmlFault as fault:
            # A cgroup hides the GPUs of other jobs this way.
            if fault.code != NO_PERMISSION:
                findings.append(_fault_finding(f"GPU {number}", fault))
            continue
        devices += [gpu, *slices]
        if slices or _mig_is_on(world, key):
            parents.add(key)
        if not slices and key in parents:
            findings.append(_no_slices_finding(number))
    gpu_keys = [device.key for device in devices if "/" not in device.key]
    reading = NvmlReading(
        devices=tuple(devices),
        mig_parents=frozenset(parents),
        driver=_query_driver(world, "nvmlSystemGetDriverVersion"),
        driver_cuda=_format_cuda_version(_query_driver(world, "nvmlSystemGetCudaDriverVersion_v2")),
        findings=tuple(findings),
    )
    try:
        return replace(
            reading,
            nvlinks={key: links for key in gpu_keys if (links := _read_nvlinks(world, key))},
            ancestors=_read_common_ancestors(world, gpu_keys),
        )
    except NvmlFault as fault:
        # A GPU was lost between two queries: keep what was read from the others.
        findings_with_fault = (*reading.findings, _fault_finding("A GPU", fault))
        return replace(reading, findings=findings_with_fault)


def _query_optional(world: Machine, function: str, *args: Any) -> Any:
    """Return an NVML answer; None if the driver does not give one.

    Raises NvmlFault for a GPU that is lost.
    """
    try:
        return world.nvml(function, *args)
    except NvmlFault as fault:
        if fault.code in GPU_LOST:
            raise
        return None


def _query_driver(world: Machine, function: str) -> Any:
    """Return an NVML answer about the driver itself; None on any fault."""
    try:
        return world.nvml(function)
    except NvmlFault:
        return None


def _nvidia_on_bus(world: Machine) -> bool:
    return any(pci_accelerator.endswith("NVIDIA") for pci_accelerator in list_pci_accelerators(world))


def _no_slices_finding(number: int) -> Finding:
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


def _format_cuda_version(number: int | None) -> str | None:
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _read_device(world: Machine, key: str) -> SeenDevice:
    memory = _read_memory(world, key)
    capability = _query_optional(world, "nvmlDeviceGetCudaComputeCapability", key)
    text = f"{capability[0]}.{capability[1]}" if capability else None
    cores = _query_optional(world, "nvmlDeviceGetNumGpuCores", key)
    lanes = cores_per_multiprocessor(text) if text else None
    ecc = _query_optional(world, "nvmlDeviceGetEccMode", key)
    pci = _query_optional(world, "nvmlDeviceGetPciInfo", key)
    return SeenDevice(
        key=key,
        source="NVML",
        name=str(world.nvml("nvmlDeviceGetName", key)),
        memory_bytes=memory.usable,
        free_bytes=memory.free,
        memory_source=memory.source,
        uuid=_query_optional(world, "nvmlDeviceGetUUID", key),
        compute_capability=text,
        multiprocessors=cores // lanes if cores and lanes else None,
        clock_hz=_scale(_query_optional(world, "nvmlDeviceGetMaxClockInfo", key, CLOCK_SM), 1e6),
        memory_clock_hz=_scale(_query_optional(world, "nvmlDeviceGetMaxClockInfo", key, CLOCK_MEMORY), 1e6),
        bus_width_bits=_query_optional(world, "nvmlDeviceGetMemoryBusWidth", key),
        power_limit_w=_scale(_query_optional(world, "nvmlDeviceGetPowerManagementLimit", key), 1e-3),
        power_default_w=_scale(_query_optional(world, "nvmlDeviceGetPowerManagementDefaultLimit", key), 1e-3),
        ecc=bool(ecc[0]) if ecc else None,
        bus_id=pci["busId"] if pci else None,
        pcie_generation=_query_optional(world, "nvmlDeviceGetMaxPcieLinkGeneration", key),
        pcie_width=_query_optional(world, "nvmlDeviceGetMaxPcieLinkWidth", key),
        numa_node=_read_numa_node(world, pci["busId"]) if pci else None,
        processes=_read_processes(world, key),
    )


def _read_numa_node(world: Machine, bus_id: str) -> int | None:
    """Return the NUMA node of a PCI device; None without one, where the kernel writes -1.

    NVML's own answer differs: it is the node that a GPU's memory forms on machines that share it.
    """
    domain, _, rest = bus_id.lower().partition(":")
    text = world.read(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node")
    return parse_whole(text or "")


def _scale(value: float | None, factor: float) -> float | None:
    return None if not value else value * factor


def _read_memory(world: Machine, key: str) -> UsableMemory:
    """Return usable and free memory, without the driver's reserved part if it is reported.

    A GPU without memory of its own (GB10, Jetson) does not support the query.
    """
    memory = _query_optional(world, "nvmlDeviceGetMemoryInfo", key, MEMORY_V2)
    try:
        memory = memory or world.nvml("nvmlDeviceGetMemoryInfo", key)
    except NvmlFault as fault:
        shared = read_shared_memory(world)
        if fault.code != NVML_NOT_SUPPORTED or shared is None:
            raise
        return shared
    usable = memory["total"] - memory.get("reserved", 0)
    return UsableMemory(usable=usable, free=min(memory["free"], usable), source=None)


def _read_processes(world: Machine, key: str) -> tuple[DeviceProcess, ...] | None:
    """Return the other processes on a device, each once; None if unknown."""
    lists = [
        _query_optional(world, "nvmlDeviceGetComputeRunningProcesses", key),
        _query_optional(world, "nvmlDeviceGetGraphicsRunningProcesses", key),
    ]
    if all(items is None for items in lists):
        return None
    own_pid = world.host("pid")
    by_pid = {entry["pid"]: entry for listed in lists for entry in listed or () if entry["pid"] != own_pid}
    return tuple(
        DeviceProcess(
            pid=pid,
            used_bytes=entry.get("usedGpuMemory"),
            name=world.host(f"process:{pid}"),
        )
        for pid, entry in sorted(by_pid.items())
    )


def _read_slices(world: Machine, parent: SeenDevice) -> list[SeenDevice]:
    """Return the MIG slices of a GPU; none if MIG is off or not supported."""
    if not _mig_is_on(world, parent.key):
        return []
    most = _query_optional(world, "nvmlDeviceGetMaxMigDeviceCount", parent.key) or 0
    slices = []
    for number in range(most):
        key = f"{parent.key}/mig{number}"
        uuid = _query_optional(world, "nvmlDeviceGetUUID", key)
        if uuid is not None:
            slices.append(_read_slice(world, parent, key, uuid))
    return slices


def _mig_is_on(world: Machine, key: str) -> bool:
    mode = _query_optional(world, "nvmlDeviceGetMigMode", key)
    return bool(mode and mode[0])


def _read_slice(world: Machine, parent: SeenDevice, key: str, uuid: str) -> SeenDevice:
    memory = _read_memory(world, key)
    shape = _query_optional(world, "nvmlDeviceGetAttributes_v2", key) or {}
    gpu_instance = _query_optional(world, "nvmlDeviceGetGpuInstanceId", key)
    compute_instance = _query_optional(world, "nvmlDeviceGetComputeInstanceId", key)
    multiprocessors = shape.get("multiprocessorCount")
    share = multiprocessors / parent.multiprocessors if multiprocessors and parent.multiprocessors else 1
    name = str(_query_optional(world, "nvmlDeviceGetName", key) or parent.name)
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
        processes=_read_processes(world, key),
        slice=Slice(profile=profile, parent=parent.uuid or parent.key, sm_share=min(share, 1.0)),
        parent_memory_bytes=parent.memory_bytes,
    )


def _read_nvlinks(world: Machine, key: str) -> NvLinks | None:
    """Return the live NVLinks of a GPU; None if it has none."""
    version, to_switch = 0, 0
    to_peer: dict[str, int] = {}
    for number in range(MOST_NVLINKS):
        try:
            if not world.nvml("nvmlDeviceGetNvLinkState", key, number):
                continue
        except NvmlFault:
            # A GPU without NVLink, or past its last link.
            break
        version = _query_optional(world, "nvmlDeviceGetNvLinkVersion", key, number) or version
        remote = _query_optional(world, "nvmlDeviceGetNvLinkRemoteDeviceType", key, number)
        pci = _query_optional(world, "nvmlDeviceGetNvLinkRemotePciInfo", key, number)
        if remote == REMOTE_IS_SWITCH:
            to_switch += 1
        elif pci:
            to_peer[pci["busId"]] = to_peer.get(pci["busId"], 0) + 1
    if not to_switch and not to_peer:
        return None
    return NvLinks(generation=NVLINK_GENERATIONS.get(version), to_switch=to_switch, to_peer=to_peer)


def _read_common_ancestors(world: Machine, keys: list[str]) -> dict[tuple[str, str], int]:
    pairs = [(key, peer) for index, key in enumerate(keys) for peer in keys[index + 1 :]]
    levels = {pair: _query_optional(world, "nvmlDeviceGetTopologyCommonAncestor", *pair) for pair in pairs}
    return {pair: level for pair, level in levels.items() if level is not None}


# Live gauges: utilization, power, temperature and clocks.


TEMPERATURE_OF_CHIP = 0
THROTTLE_REASONS = {
    0x2: "application clocks setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clock setting",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons, from nvml.h, without 0x1 (idle)."""
MOST_SLICES = 8


def read_gauges(world: Machine) -> tuple[tuple[GpuReading, ...], str]:
    """Return a gauge per GPU or MIG slice in PCI order, and the reason if there are none."""
    try:
        world.nvml("nvmlInit")
        count = int(world.nvml("nvmlDeviceGetCount"))
    except NvmlFault as fault:
        return (), fault.text
    gauges: list[GpuReading] = []
    for index in range(count):
        try:
            gauges += _read_gpu_gauges(world, index)
        except NvmlFault as fault:
            # A cgroup hides the GPUs of other jobs this way.
            if fault.code != NO_PERMISSION:
                gauges.append(GpuReading(key=f"gpu{index}", index=index, fault=fault.text))
    return tuple(gauges), "" if gauges else "the driver shows none"


def _read_gpu_gauges(world: Machine, index: int) -> list[GpuReading]:
    key = f"gpu{index}"
    if not _mig_is_on(world, key):
        return [_read_gauge(world, key, index)]
    slices = [f"{key}/mig{number}" for number in range(MOST_SLICES)]
    existing = [
        slice_ for slice_ in slices if _query_optional(world, "nvmlDeviceGetUUID", slice_) is not None
    ]
    return [_read_gauge(world, slice_, index) for slice_ in existing] or [_read_gauge(world, key, index)]


def _read_gauge(world: Machine, key: str, index: int) -> GpuReading:
    memory = _read_memory(world, key)
    rates = _query_optional(world, "nvmlDeviceGetUtilizationRates", key) or {}
    gpu = key.partition("/")[0]
    return GpuReading(
        key=key,
        index=index,
        name=str(
            _query_optional(world, "nvmlDeviceGetName", key)
            or _query_optional(world, "nvmlDeviceGetName", gpu)
            or ""
        ),
        uuid=_query_optional(world, "nvmlDeviceGetUUID", key),
        memory_bytes=memory.usable,
        used_bytes=None if memory.free is None else max(0, memory.usable - memory.free),
        busy=_percent_to_share(rates.get("gpu")),
        memory_busy=_percent_to_share(rates.get("memory")),
        # Power, temperature and clocks are those of the GPU that a slice belongs to.
        power_w=_scale(_query_optional(world, "nvmlDeviceGetPowerUsage", gpu), 1e-3),
        power_limit_w=_scale(_query_optional(world, "nvmlDeviceGetPowerManagementLimit", gpu), 1e-3),
        temperature_c=_query_optional(world, "nvmlDeviceGetTemperature", gpu, TEMPERATURE_OF_CHIP),
        clock_hz=_scale(_query_optional(world, "nvmlDeviceGetClockInfo", gpu, CLOCK_SM), 1e6),
        top_clock_hz=_scale(_query_optional(world, "nvmlDeviceGetMaxClockInfo", gpu, CLOCK_SM), 1e6),
        throttles=_read_throttle_reasons(world, gpu),
        processes=_read_processes(world, key),
    )


def _percent_to_share(percent: Any) -> float | None:
    """Return a share from 0 to 1; None if unknown, for which drivers answer 2**32 - 1."""
    return percent / 100 if isinstance(percent, int | float) and 0 <= percent <= 100 else None  # noqa: PLR2004


def _read_throttle_reasons(world: Machine, key: str) -> tuple[str, ...]:
    bits = _query_optional(world, "nvmlDeviceGetCurrentClocksEventReasons", key)
    if bits is None:
        # Older name, for drivers before R535.
        bits = _query_optional(world, "nvmlDeviceGetCurrentClocksThrottleReasons", key)
    return tuple(name for bit, name in THROTTLE_REASONS.items() if isinstance(bits, int) and bits & bit)
