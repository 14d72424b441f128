"""Read the CPU cores and memory this process may use, after affinity, cgroups and the scheduler."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from trimtab.units import parse_whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.probe.machine import Machine
    from trimtab.spec import Scheduler

UNLIMITED_V1 = 2**60
"""cgroup v1 writes "no limit" as a number just below 2**63."""

NVIDIA_PCI_VENDOR, AMD_PCI_VENDOR = "0x10de", "0x1002"
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x1200")
"""VGA controller, 3D controller, processing accelerator."""


class HostLimit(NamedTuple):
    """A limit and its source."""

    value: int
    source: str


class MemoryFiles(NamedTuple):
    """File names of a cgroup version: memory limit, usage, and the reclaimable part of the usage."""

    limit: str
    usage: str
    reclaimable: str


CGROUP_MEMORY = (
    MemoryFiles("memory.max", "memory.current", "inactive_file"),
    MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Version 2, version 1."""


class HostLimits(NamedTuple):
    """Cores and bytes this process may use, with sources by field of Node."""

    cpu_cores: int | None
    cpu_cores_total: int | None
    ram_bytes: int | None
    ram_free_bytes: int | None
    shm_bytes: int | None
    sources: dict[str, str]


def read_host(world: Machine, scheduler: Scheduler) -> HostLimits:
    """Return the tightest of all limits on cores and on memory."""
    cores = min(_core_limits(world, scheduler), default=None, key=lambda limit: limit.value)
    ram = world.host("ram") or {}
    memory = min(_memory_limits(world, scheduler, ram), default=None, key=lambda limit: limit.value)
    free = min(_free_limits(world, ram, memory), default=None, key=lambda limit: limit.value)
    total, shm = world.host("cpus"), world.host("shm")
    sources = {
        "cpu_cores": cores.source if cores else None,
        "cpu_cores_total": "detected: the operating system" if total else None,
        "ram_bytes": memory.source if memory else None,
        "ram_free_bytes": free.source if free else None,
        "shm_bytes": "detected: /dev/shm" if shm else None,
        "name": "detected: the operating system",
    }
    return HostLimits(
        cpu_cores=cores.value if cores else None,
        cpu_cores_total=total,
        ram_bytes=memory.value if memory else None,
        ram_free_bytes=free.value if free else None,
        shm_bytes=shm or None,
        sources={field: source for field, source in sources.items() if source},
    )


def _core_limits(world: Machine, scheduler: Scheduler) -> Iterator[HostLimit]:
    total, affinity = world.host("cpus"), world.host("affinity")
    if total:
        yield HostLimit(total, "detected: the operating system")
    if affinity:
        yield HostLimit(affinity, "detected: CPU affinity")
    for folder in _cgroup_folders(world, "cpu"):
        quota = _cpu_quota(world, folder)
        if quota is not None:
            yield HostLimit(quota, f"detected: cgroup {folder}")
    if scheduler.cpus_on_node:
        yield HostLimit(scheduler.cpus_on_node, "detected: SLURM_CPUS_ON_NODE")


def _cpu_quota(world: Machine, folder: str) -> int | None:
    """Return the cores of a cgroup's CPU quota, at least 1; None without a quota."""
    cpu_max = world.read(f"{folder}/cpu.max")
    if cpu_max:
        quota, _, period = cpu_max.strip().partition(" ")
    else:
        quota = (world.read(f"{folder}/cpu.cfs_quota_us") or "max").strip()
        period = (world.read(f"{folder}/cpu.cfs_period_us") or "100000").strip()
    quota_us, period_us = parse_whole(quota), parse_whole(period)
    return max(1, math.floor(quota_us / period_us)) if quota_us is not None and period_us else None


def _memory_limits(world: Machine, scheduler: Scheduler, ram: dict[str, int]) -> Iterator[HostLimit]:
    if ram.get("total"):
        yield HostLimit(ram["total"], "detected: the operating system")
    for folder in _cgroup_folders(world, "memory"):
        for files in CGROUP_MEMORY:
            if limit := _memory_limit(world, folder, files):
                yield HostLimit(limit, f"detected: cgroup {folder}")
    if scheduler.memory_bytes:
        yield HostLimit(scheduler.memory_bytes, scheduler.sources["memory_bytes"])


def _memory_limit(world: Machine, folder: str, files: MemoryFiles) -> int | None:
    limit = _read_integer(world, f"{folder}/{files.limit}")
    return limit if limit and limit < UNLIMITED_V1 else None


def _free_limits(world: Machine, ram: dict[str, int], memory: HostLimit | None) -> Iterator[HostLimit]:
    """Yield the free memory of the host, the free memory under each cgroup limit, and the tightest limit."""
    if ram.get("available") is None:
        return
    yield HostLimit(ram["available"], "detected: the operating system")
    for folder in _cgroup_folders(world, "memory"):
        for files in CGROUP_MEMORY:
            limit, used = _memory_limit(world, folder, files), _read_integer(world, f"{folder}/{files.usage}")
            if limit and used is not None:
                # The kernel reclaims inactive file cache under pressure, so it counts as free.
                needed = max(0, used - _parse_stat(world.read(f"{folder}/memory.stat"), files.reclaimable))
                source = f"detected: cgroup {folder}: its limit less {files.usage}"
                yield HostLimit(max(0, limit - needed), source)
    if memory is not None:
        yield memory


def _read_integer(world: Machine, path: str) -> int | None:
    return parse_whole(world.read(path) or "")


def _parse_stat(text: str | None, name: str) -> int:
    """Return a value of memory.stat, which has one per line; 0 if it is missing."""
    match = re.search(rf"^{name} ([0-9]+)$", text or "", re.MULTILINE)
    return int(match.group(1)) if match else 0


def memory_cgroups(world: Machine) -> list[str]:
    """Return the cgroups whose memory limits apply to this process, its own first."""
    return _cgroup_folders(world, "memory")


def _cgroup_folders(world: Machine, controller: str) -> list[str]:
    """Return the folders of this process's cgroup and of every cgroup above it."""
    folders = []
    for line in (world.read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            root = "/sys/fs/cgroup"
        elif controller in controllers.split(","):
            root = f"/sys/fs/cgroup/{controllers}"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        folders += ["/".join([root, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return folders


def list_pci_accelerators(world: Machine) -> list[str]:
    """Return the GPUs on the PCI bus as "0000:01:00.0 NVIDIA", with or without a driver."""
    vendors = {NVIDIA_PCI_VENDOR: "NVIDIA", AMD_PCI_VENDOR: "AMD"}
    accelerators = []
    for address in world.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{address}"
        vendor = vendors.get((world.read(f"{folder}/vendor") or "").strip())
        kind = (world.read(f"{folder}/class") or "").strip() if vendor else ""
        if vendor and kind.startswith(_DISPLAY_CLASSES):
            accelerators.append(f"{address} {vendor}")
    return accelerators
