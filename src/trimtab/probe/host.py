"""What this process may use of its host: cores and memory, after affinity, cgroups and the scheduler."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.probe.world import World
    from trimtab.spec import Scheduler

UNLIMITED_V1 = 2**60
"""cgroup v1 writes "no limit" as a number just below 2**63."""

NVIDIA_PCI_VENDOR, AMD_PCI_VENDOR = "0x10de", "0x1002"
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x1200")
"""VGA controller, 3D controller, processing accelerator."""


class Limit(NamedTuple):
    """A number and who sets it."""

    value: int
    source: str


class Host(NamedTuple):
    """What may be used, with sources by field of Node."""

    cpu_cores: int | None
    cpu_cores_total: int | None
    ram_bytes: int | None
    ram_free_bytes: int | None
    shm_bytes: int | None
    sources: dict[str, str]


def read(world: World, scheduler: Scheduler) -> Host:
    """The tightest of all limits on cores and on memory."""
    cores = min(_core_limits(world, scheduler), default=None, key=lambda limit: limit.value)
    ram = world.host("ram") or {}
    memory = min(_memory_limits(world, scheduler, ram), default=None, key=lambda limit: limit.value)
    free = ram.get("available")
    if free is not None and memory is not None:
        # What a cgroup's other processes use is not told here; the limit is the most that can be free.
        free = min(free, memory.value)
    total, shm = world.host("cpus"), world.host("shm")
    known = {
        "cpu_cores": cores.source if cores else None,
        "cpu_cores_total": "detected: the operating system" if total else None,
        "ram_bytes": memory.source if memory else None,
        "ram_free_bytes": "detected: the operating system" if free is not None else None,
        "shm_bytes": "detected: /dev/shm" if shm else None,
        "name": "detected: the operating system",
    }
    return Host(
        cpu_cores=cores.value if cores else None,
        cpu_cores_total=total,
        ram_bytes=memory.value if memory else None,
        ram_free_bytes=free,
        shm_bytes=shm or None,
        sources={field: source for field, source in known.items() if source},
    )


def _core_limits(world: World, scheduler: Scheduler) -> Iterator[Limit]:
    total, affinity = world.host("cpus"), world.host("affinity")
    if total:
        yield Limit(total, "detected: the operating system")
    if affinity:
        yield Limit(affinity, "detected: CPU affinity")
    for folder in _cgroup_folders(world, "cpu"):
        quota = _cpu_quota(world, folder)
        if quota is not None:
            yield Limit(quota, f"detected: cgroup {folder}")
    if scheduler.cpus_on_node:
        yield Limit(scheduler.cpus_on_node, "detected: SLURM_CPUS_ON_NODE")


def _cpu_quota(world: World, folder: str) -> int | None:
    """Cores that a cgroup's quota amounts to, at least one; None where it sets none."""
    both = world.read(f"{folder}/cpu.max")
    if both:
        quota, _, period = both.strip().partition(" ")
    else:
        quota = (world.read(f"{folder}/cpu.cfs_quota_us") or "max").strip()
        period = (world.read(f"{folder}/cpu.cfs_period_us") or "100000").strip()
    if quota in ("max", "-1") or not quota.isdigit() or not period.isdigit() or not int(period):
        return None
    return max(1, math.floor(int(quota) / int(period)))


def _memory_limits(world: World, scheduler: Scheduler, ram: dict[str, int]) -> Iterator[Limit]:
    if ram.get("total"):
        yield Limit(ram["total"], "detected: the operating system")
    for folder in _cgroup_folders(world, "memory"):
        for file in ("memory.max", "memory.limit_in_bytes"):
            text = (world.read(f"{folder}/{file}") or "").strip()
            if text.isdigit() and 0 < int(text) < UNLIMITED_V1:
                yield Limit(int(text), f"detected: cgroup {folder}")
    if scheduler.memory_bytes:
        yield Limit(scheduler.memory_bytes, scheduler.sources["memory_bytes"])


def _cgroup_folders(world: World, controller: str) -> list[str]:
    """The folders whose limits bind this process: its own cgroup and every one above it."""
    found = []
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
        found += ["/".join([root, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return found


def pci_accelerators(world: World) -> list[str]:
    """GPUs on the PCI bus as "0000:01:00.0 NVIDIA", whether or not a driver runs them."""
    vendors = {NVIDIA_PCI_VENDOR: "NVIDIA", AMD_PCI_VENDOR: "AMD"}
    found = []
    for address in world.names("/sys/bus/pci/devices"):
        folder = f"/sys/bus/pci/devices/{address}"
        vendor = vendors.get((world.read(f"{folder}/vendor") or "").strip())
        kind = (world.read(f"{folder}/class") or "").strip() if vendor else ""
        if vendor and kind.startswith(_DISPLAY_CLASSES):
            found.append(f"{address} {vendor}")
    return found
