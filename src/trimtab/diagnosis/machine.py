"""doctor without a log: what of this machine would make training fail, hang or crawl.

Everything is asked through a World, so that machines can be recorded and looked at again. `detect` has
findings of its own about drivers, versions, variables, tenants and power; these are added to them.
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import TYPE_CHECKING, Any

from trimtab.catalog.tables import bad_versions
from trimtab.diagnosis.findings import SEVERITIES, Diagnosed, Diagnosis
from trimtab.errors import find_nearest
from trimtab.probe.detect import detect
from trimtab.probe.host import memory_cgroups
from trimtab.probe.machine import Machine, NvmlFault, this_machine
from trimtab.spec import Finding, Severity
from trimtab.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.spec import Cluster

CHECKED = (
    "driver, torch, CUDA and NCCL versions",
    "visible GPUs and variables of the process group",
    "other tenants, power limits, throttling, ECC, PCIe, peer access",
    "shared memory, RAM and cgroup limits, open files, locked memory",
    "disk space, clock, network interfaces, InfiniBand",
)
SMALL_SHM = GIB
"""Containers get 64 MiB by default; a loader worker passes batches of hundreds of MiB."""
FEW_FILES = 1024
GOOD_FILES = 4096
FEW_LOCKED = GIB
LITTLE_DISK, NO_DISK = 5 * GIB, 512 * MIB
FEW_INODES = 1000
LITTLE_RAM = 2 * GIB
UNCORRECTED, VOLATILE = 1, 0
P2P_READ, P2P_OK, P2P_NOT_FOR_THIS_GPU = 0, 0, 2

THROTTLES = {
    0x08: ("it slows itself down: heat, power or an external signal", "HW slowdown"),
    0x20: ("it is too hot for its clocks", "SW thermal slowdown"),
    0x40: ("it is too hot", "HW thermal slowdown"),
    0x80: ("the machine's power supply tells it to slow down", "HW power brake"),
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons, nvml.h. The power cap's, 0x04, is what a busy GPU shows."""
ALLOCATOR_KEYS = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "roundup_bypass_threshold_mb",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
)
"""pytorch c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h, 2.11 to 2.13."""
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SLOWING = {
    "CUDA_LAUNCH_BLOCKING": "Every kernel is waited for.",
    "TORCH_DISTRIBUTED_DEBUG": "Every collective is checked against the other ranks first.",
    "NCCL_P2P_DISABLE": "GPUs do not reach each other directly.",
    "NCCL_IB_DISABLE": "Nodes talk over sockets, not InfiniBand.",
    "NCCL_SHM_DISABLE": "Processes of a node do not use shared memory.",
}
QUIET = ("", "0", "OFF", "INFO", "false", "False")
"""Values of those that slow nothing down."""


def examine_machine(world: Machine | None = None) -> Diagnosis:
    """Return what is wrong with this machine, the worst first. Never raises for a broken machine."""
    world = world or this_machine()
    cluster = detect(world)
    findings = [*cluster.findings, *(finding for check in CHECKS for finding in check(world, cluster))]
    unique = {(finding.severity, finding.what): finding for finding in findings}
    ordered = sorted(unique.values(), key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(
        findings=tuple(
            Diagnosed(
                severity=finding.severity,
                what=finding.what,
                evidence=finding.evidence,
                cause=finding.cause,
                cure=finding.cure,
            )
            for finding in ordered
        ),
        read=("this machine",),
        notes=(*cluster.notes, *_note_no_gpu(cluster), *_note_unknown_clock(world)),
    )


def _note_no_gpu(cluster: Cluster) -> list[str]:
    return [] if cluster.devices else ["No GPU is visible: what concerns one could not be checked."]


def _note_unknown_clock(world: Machine) -> list[str]:
    return (
        [] if _is_synchronised(world) is not None else ["Whether the clock is synchronised is not told here."]
    )


def _ask_nvml(world: Machine, function: str, *args: Any) -> Any:
    """Ask NVML; return None if it does not answer."""
    try:
        return world.nvml(function, *args)
    except NvmlFault:
        return None


def _list_devices(cluster: Cluster) -> Iterator[tuple[int, str]]:
    """Yield index and PCI address of each whole NVIDIA device here."""
    for device in cluster.nodes[0].devices:
        if device.vendor.value == "nvidia" and device.slice is None and device.bus_id:
            yield device.index, device.bus_id


def _list_handles(world: Machine, cluster: Cluster) -> list[tuple[int, str]]:
    """List index and NVML key ("gpu0") of each whole device that this process may use."""
    count = _ask_nvml(world, "nvmlDeviceGetCount")
    by_bus = {}
    for number in range(count if isinstance(count, int) else 0):
        pci = _ask_nvml(world, "nvmlDeviceGetPciInfo", f"gpu{number}")
        if isinstance(pci, dict):
            by_bus[pci.get("busId")] = f"gpu{number}"
    return [(index, by_bus[bus]) for index, bus in _list_devices(cluster) if bus in by_bus]


def _check_shared_memory(_: Machine, cluster: Cluster) -> Iterator[Finding]:
    size = cluster.nodes[0].shm_bytes
    if size is not None and size < SMALL_SHM:
        yield Finding(
            severity=Severity.WARNING,
            what=f"Shared memory has only {format_bytes(size)}.",
            evidence=f"statvfs of /dev/shm: {size} bytes",
            cause="Loader workers and NCCL pass data through it, and die with a bus error when it is full. "
            "Containers get 64 MiB unless they are told.",
            cure="Docker: --shm-size=16g or --ipc=host; Kubernetes: an emptyDir of medium Memory there.",
        )


def _check_open_files(world: Machine, _: Cluster) -> Iterator[Finding]:
    limits = world.host("limit:nofile")
    soft = limits[0] if limits else None
    if soft is not None and soft < GOOD_FILES:
        hard = limits[1]
        most = "65536" if hard is None or hard >= 2**16 else str(hard)
        yield Finding(
            severity=Severity.WARNING if soft < FEW_FILES else Severity.INFO,
            what=f"A process may open {soft} files.",
            evidence=f"ulimit -n: {soft}, hard limit {'unlimited' if hard is None else hard}",
            cause="Each tensor that a loader worker passes holds one, and so does each connection of NCCL.",
            cure=f"Run `ulimit -n {most}` before the job.",
        )


def _check_locked_memory(world: Machine, _: Cluster) -> Iterator[Finding]:
    limits = world.host("limit:memlock")
    soft = limits[0] if limits else None
    if soft is not None and soft < FEW_LOCKED and world.names("/sys/class/infiniband"):
        yield Finding(
            severity=Severity.WARNING,
            what=f"A process may lock {format_bytes(soft)} of memory, and InfiniBand needs more.",
            evidence=f"ulimit -l: {soft} bytes",
            cause="InfiniBand pins its buffers; NCCL fails with 'Cannot allocate memory' where it may not.",
            cure="Set LimitMEMLOCK=infinity for slurmd, or start the container with --ulimit memlock=-1.",
        )


def _check_memory(world: Machine, cluster: Cluster) -> Iterator[Finding]:
    node = cluster.nodes[0]
    if node.ram_free_bytes is not None and node.ram_free_bytes < LITTLE_RAM:
        yield Finding(
            severity=Severity.WARNING,
            what=f"Only {format_bytes(node.ram_free_bytes)} of RAM are free to this process.",
            evidence=node.sources.get("ram_free_bytes", "the operating system"),
            cause="The kernel kills a process that asks for more, mostly a loader worker.",
            cure="Ask the scheduler for more memory, or end what holds it.",
        )
    for folder in memory_cgroups(world):
        killed = re.search(r"^oom_kill ([0-9]+)$", world.read(f"{folder}/memory.events") or "", re.MULTILINE)
        if killed and int(killed.group(1)):
            yield Finding(
                severity=Severity.WARNING,
                what=f"The kernel has killed {killed.group(1)} processes of this cgroup for memory.",
                evidence=f"{folder}/memory.events: oom_kill {killed.group(1)}",
                cause="Its limit on RAM was reached.",
                cure="Ask for more memory (`#SBATCH --mem`, resources.limits.memory), or use fewer workers.",
            )
            return


def _check_disks(world: Machine, _: Cluster) -> Iterator[Finding]:
    home = world.host("home") or ""
    places = {
        "the working folder": world.host("folder"),
        "temporary files": world.env.get("TMPDIR") or "/tmp",  # noqa: S108 - asked for its room only
        "the cache of Hugging Face": world.env.get("HF_HOME") or (f"{home}/.cache" if home else None),
    }
    seen: set[tuple[int, int]] = set()
    for what, path in places.items():
        disk = world.host(f"disk:{path}") if path else None
        if not disk or (disk["total"], disk["free"]) in seen:
            continue
        seen.add((disk["total"], disk["free"]))
        if disk["free"] < LITTLE_DISK:
            yield Finding(
                severity=Severity.ERROR if disk["free"] < NO_DISK else Severity.WARNING,
                what=f"The disk for {what} has {format_bytes(disk['free'])} left.",
                evidence=f"{path}: {format_bytes(disk['free'])} of {format_bytes(disk['total'])}",
                cause="Checkpoints, caches and compiled kernels go there; a run that cannot save is lost.",
                cure="Free some room, or set TMPDIR, HF_HOME and the output to another disk.",
            )
        elif disk["files"] and disk["files_free"] < FEW_INODES:
            yield Finding(
                severity=Severity.WARNING,
                what=f"The disk for {what} has room for {disk['files_free']} more files.",
                evidence=f"{path}: {disk['files_free']} of {disk['files']} inodes",
                cause="Inodes can run out before bytes do.",
                cure="Delete small files, as those of old caches.",
            )


def _is_synchronised(world: Machine) -> bool | None:
    answer = world.run(("timedatectl", "show", "--property=NTPSynchronized", "--value"))
    return {"yes": True, "no": False}.get((answer or "").strip())


def _check_clock(world: Machine, _: Cluster) -> Iterator[Finding]:
    if _is_synchronised(world) is False:
        yield Finding(
            severity=Severity.INFO,
            what="The clock of this machine is not synchronised.",
            evidence="timedatectl: NTPSynchronized=no",
            cause="Logs of several nodes cannot be put in order, and certificates may be refused.",
            cure="Start chrony or systemd-timesyncd; in a container the host's clock counts.",
        )


def _check_throttling(world: Machine, cluster: Cluster) -> Iterator[Finding]:
    for index, key in _list_handles(world, cluster):
        reasons = _ask_nvml(world, "nvmlDeviceGetCurrentClocksEventReasons", key)
        if reasons is None:
            reasons = _ask_nvml(world, "nvmlDeviceGetCurrentClocksThrottleReasons", key)
        for bit, (why, name) in THROTTLES.items():
            if isinstance(reasons, int) and reasons & bit:
                yield Finding(
                    severity=Severity.WARNING,
                    what=f"GPU {index} is throttled: {why}.",
                    evidence=f"NVML: {name} is active",
                    cause="Clocks below the normal ones; all ranks wait for the slowest.",
                    cure="Look at `nvidia-smi -q -d PERFORMANCE,TEMPERATURE`; tell whoever runs the machine.",
                )


def _check_ecc(world: Machine, cluster: Cluster) -> Iterator[Finding]:
    for index, key in _list_handles(world, cluster):
        errors = _ask_nvml(world, "nvmlDeviceGetTotalEccErrors", key, UNCORRECTED, VOLATILE)
        if isinstance(errors, int) and errors:
            yield Finding(
                severity=Severity.ERROR,
                what=f"GPU {index} has met {errors} memory errors that ECC could not correct.",
                evidence=f"NVML: {errors} uncorrected ECC errors since the driver was loaded",
                cause="Its memory is failing; processes that touch it are killed.",
                cure="Leave it out with CUDA_VISIBLE_DEVICES, and have it reset or replaced.",
            )
        rows = _ask_nvml(world, "nvmlDeviceGetRemappedRows", key)
        if isinstance(rows, list) and len(rows) == 4 and (rows[2] or rows[3]):  # noqa: PLR2004 - as NVML has it
            broken = bool(rows[3])
            yield Finding(
                severity=Severity.ERROR if broken else Severity.WARNING,
                what=f"GPU {index} "
                + (
                    "could not replace a bad row of its memory."
                    if broken
                    else "waits for a reset to replace a row."
                ),
                evidence="NVML: remapped rows (corrected, uncorrected, pending, failed) "
                + ", ".join(str(count) for count in rows),
                cause="Bad rows of memory are replaced by spare ones at the next reset, while there are any.",
                cure="Have the GPU replaced."
                if broken
                else f"Have it reset: `nvidia-smi -r -i {index}`, or reboot.",
            )


def _check_pcie(world: Machine, cluster: Cluster) -> Iterator[Finding]:
    for index, key in _list_handles(world, cluster):
        now = _ask_nvml(world, "nvmlDeviceGetCurrPcieLinkWidth", key)
        most = _ask_nvml(world, "nvmlDeviceGetMaxPcieLinkWidth", key)
        if isinstance(now, int) and isinstance(most, int) and 0 < now < most:
            yield Finding(
                severity=Severity.WARNING,
                what=f"GPU {index} has {now} of {most} PCIe lanes.",
                evidence=f"NVML: current link width {now}, maximum {most}",
                cause="A slot with fewer lanes, a bad riser, or lanes shared with another device.",
                cure="Move the card to a full slot, or expect copies from the host to be slower.",
            )


def _check_peers(world: Machine, cluster: Cluster) -> Iterator[Finding]:
    handles = _list_handles(world, cluster)
    refused = [
        (index, two, status)
        for (index, first), (two, second) in combinations(handles, 2)
        if isinstance(status := _ask_nvml(world, "nvmlDeviceGetP2PStatus", first, second, P2P_READ), int)
        and status != P2P_OK
    ]
    if refused:
        index, two, status = refused[0]
        pairs = len(handles) * (len(handles) - 1) // 2
        by_design = all(other == P2P_NOT_FOR_THIS_GPU for _, _, other in refused)
        yield Finding(
            severity=Severity.INFO if by_design else Severity.WARNING,
            what=f"{len(refused)} of {pairs} pairs of GPUs cannot reach each other directly.",
            evidence=f"NVML: peer-to-peer status {status} between GPU {index} and {two}",
            cause="These GPUs do not support it."
            if by_design
            else "An IOMMU, a virtual machine or the board's topology is in the way.",
            cure="Expect collectives to go through the host."
            if by_design
            else "Look at `nvidia-smi topo -p2p r`; turn ACS off in the BIOS, or live with it.",
        )


def _check_versions(_: Machine, cluster: Cluster) -> Iterator[Finding]:
    have = cluster.versions
    linux = re.match(r"Linux (\S+)", have.system or "")
    present = {"linux": linux.group(1) if linux else None, "nccl": have.nccl, "driver": have.driver}
    for row in bad_versions():
        version = present.get(row.what)
        if version and _version_numbers(row.first) <= _version_numbers(version) < _version_numbers(row.fixed):
            name = {"linux": "Linux", "nccl": "NCCL", "driver": "The NVIDIA driver"}[row.what]
            yield Finding(
                severity=Severity.WARNING,
                what=f"{name} {version} is known to be bad for training.",
                evidence=f"{version} is before {row.fixed}; {row.source}",
                cause=row.trouble,
                cure=f"Update to {row.fixed} or newer.",
            )


def _version_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,9}", text.partition("-")[0]))


def _check_torch(world: Machine, cluster: Cluster) -> Iterator[Finding]:
    if cluster.versions.torch is None:
        yield Finding(
            severity=Severity.WARNING,
            what="torch is not installed for this Python.",
            evidence=f"{world.host('executable')}, Python {world.host('python')}: no package torch",
            cause="Another environment is active than the one that training uses, or none.",
            cure="Activate it, and run trimtab from there. Reading plans, logs and runs, and launching a "
            "plan, need no torch.",
        )


def _check_allocator(world: Machine, _: Cluster) -> Iterator[Finding]:
    for variable in world.env:
        near = variable.startswith("PYTORCH") and find_nearest(variable, ALLOCATOR_VARIABLES, count=1)
        if near and variable not in ALLOCATOR_VARIABLES and "ALLOC" in variable.replace("ALOC", "ALLOC"):
            yield Finding(
                severity=Severity.WARNING,
                what=f"{variable} is no variable of torch: {near[0]} is.",
                evidence=f"{variable}={world.env[variable]}",
                cause="A misspelt variable is ignored without a word.",
                cure=f"Rename it to {near[0]}.",
            )
    for variable in ALLOCATOR_VARIABLES:
        yield from _check_allocator_options(variable, world.env.get(variable) or "")


def _check_allocator_options(variable: str, value: str) -> Iterator[Finding]:
    for option in re.sub(r"\[[^\]]*\]", "", value).split(",") if value.strip() else []:
        key, colon, setting = (part.strip() for part in option.partition(":"))
        near = find_nearest(key, ALLOCATOR_KEYS, count=1)
        if key not in ALLOCATOR_KEYS:
            meant = f": {near[0]} is" if near else ""
            yield _option_finding(variable, value, f"{key!r} is no option of torch's allocator{meant}", near)
        elif not colon or (not setting and "[" not in value):
            yield _option_finding(variable, value, f"{key} has no value", [f"{key}:VALUE"])
        elif key == "expandable_segments" and setting not in ("True", "False"):
            yield _option_finding(
                variable, value, f"{key} is {setting!r}, and must be True or False", [f"{key}:True"]
            )


def _option_finding(variable: str, value: str, wrong: str, meant: list[str]) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"{variable} cannot be read: {wrong}.",
        evidence=f"{variable}={value}",
        cause="torch stops at the first use of the GPU where it does not know an option.",
        cure=f"Write {meant[0]}, as in {variable}=expandable_segments:True."
        if meant
        else f"Take it out of {variable}.",
    )


def _check_variables(world: Machine, _: Cluster) -> Iterator[Finding]:
    for variable, why in SLOWING.items():
        value = world.env.get(variable)
        if value is not None and value not in QUIET:
            yield Finding(
                severity=Severity.WARNING,
                what=f"{variable}={value} is set, which makes training slower.",
                evidence=f"{variable}={value}",
                cause=why,
                cure=f"Run `unset {variable}`, unless you are looking for a fault.",
            )


def _check_interfaces(world: Machine, _: Cluster) -> Iterator[Finding]:
    asked, there = world.env.get("NCCL_SOCKET_IFNAME"), world.names("/sys/class/net")
    if not asked or not there or asked.startswith("^"):
        return
    exact, wanted = asked.startswith("="), asked.lstrip("=").split(",")
    if not any(
        name == prefix or (not exact and name.startswith(prefix))
        for prefix in wanted
        if prefix
        for name in there
    ):
        yield Finding(
            severity=Severity.ERROR,
            what=f"NCCL_SOCKET_IFNAME={asked} names no network interface of this machine.",
            evidence=f"interfaces: {', '.join(there)}",
            cause="NCCL stops with 'no socket interface found'.",
            cure=f"Set it to one of {', '.join(name for name in there if name != 'lo')}, or unset it.",
        )


def _check_infiniband(world: Machine, _: Cluster) -> Iterator[Finding]:
    root = "/sys/class/infiniband"
    ports = [(card, port) for card in world.names(root) for port in world.names(f"{root}/{card}/ports")]
    states = {
        f"{card} port {port}": (world.read(f"{root}/{card}/ports/{port}/state") or "").strip()
        for card, port in ports
    }
    down = [name for name, state in states.items() if state and not state.endswith("ACTIVE")]
    if down:
        some = len(down) < len(states)
        yield Finding(
            severity=Severity.WARNING if some else Severity.INFO,
            what=f"{len(down)} of {len(states)} InfiniBand ports are not active: {', '.join(down[:4])}.",
            evidence=f"{down[0]}: {states[down[0]]}",
            cause="A cable or switch port is down, or it was never connected.",
            cure="Look at `ibstat`. If others work, leave it out: NCCL_IB_HCA=^" + down[0].split()[0] + ".",
        )


CHECKS: tuple[Callable[[Machine, Cluster], Iterator[Finding]], ...] = (
    _check_ecc,
    _check_torch,
    _check_versions,
    _check_allocator,
    _check_interfaces,
    _check_throttling,
    _check_pcie,
    _check_peers,
    _check_infiniband,
    _check_shared_memory,
    _check_memory,
    _check_disks,
    _check_open_files,
    _check_locked_memory,
    _check_variables,
    _check_clock,
)
"""In the order in which findings of one severity are listed."""
