from __future__ import annotations

from typing import Any

import pytest

import machines as m
from trimtab.probe import host
from trimtab.probe.machine import replay_machine
from trimtab.spec import Scheduler

GIB = 2**30
V2 = {"/proc/self/cgroup": "0::/a/b\n"}
V1 = {"/proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n"}


def read(files: dict[str, str], scheduler: Scheduler | None = None, **facts: Any) -> host.HostLimits:
    world = replay_machine(m.machine(None, read=files, host=facts))
    return host.read_host(world, scheduler or Scheduler())


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        (V2 | {"/sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 64),
        (V2 | {"/sys/fs/cgroup/a/b/cpu.max": "400000 100000\n"}, 4),
        (V2 | {"/sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2),
        (V2 | {"/sys/fs/cgroup/a/b/cpu.max": "50000 100000\n"}, 1),
        (V2 | {"/sys/fs/cgroup/a/b/cpu.max": "garbage\n"}, 64),
        (V2 | {"/sys/fs/cgroup/a/b/cpu.max": "100000 0\n"}, 64),
        (
            V1
            | {
                "/sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "800000\n",
                "/sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        (V1 | {"/sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "-1\n"}, 64),
    ],
)
def test_cores_are_bound_by_the_tightest_cgroup(files: dict[str, str], cores: int) -> None:
    assert read(files).cpu_cores == cores


def test_cores_are_bound_by_affinity_and_by_slurm() -> None:
    assert read({}, affinity=6).cpu_cores == 6
    assert read({}, Scheduler(cpus_on_node=12)).cpu_cores == 12
    assert read({}, Scheduler(cpus_on_node=12)).sources["cpu_cores"] == "detected: SLURM_CPUS_ON_NODE"


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 512),
        (V2 | {"/sys/fs/cgroup/a/b/memory.max": "max\n"}, 512),
        (V2 | {"/sys/fs/cgroup/a/b/memory.max": f"{64 * GIB}\n"}, 64),
        (V2 | {"/sys/fs/cgroup/a/memory.max": f"{32 * GIB}\n"}, 32),
        (V1 | {"/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{16 * GIB}\n"}, 16),
        (V1 | {"/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "9223372036854771712\n"}, 512),
    ],
)
def test_memory_is_bound_by_the_tightest_cgroup(files: dict[str, str], gib: int) -> None:
    found = read(files)
    assert found.ram_bytes == gib * GIB
    assert found.ram_free_bytes == min(480, gib) * GIB


@pytest.mark.parametrize(
    ("files", "gib", "source"),
    [
        (
            V2
            | {
                "/sys/fs/cgroup/a/b/memory.max": f"{64 * GIB}\n",
                "/sys/fs/cgroup/a/b/memory.current": f"{24 * GIB}\n",
            },
            40,
            "detected: cgroup /sys/fs/cgroup/a/b: its limit less memory.current",
        ),
        (
            V2
            | {
                "/sys/fs/cgroup/a/memory.max": f"{64 * GIB}\n",
                "/sys/fs/cgroup/a/memory.current": f"{24 * GIB}\n",
                "/sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {4 * GIB}\nactive_file 7\n",
            },
            44,
            "detected: cgroup /sys/fs/cgroup/a: its limit less memory.current",
        ),
        (
            V1
            | {
                "/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{16 * GIB}\n",
                "/sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": f"{20 * GIB}\n",
            },
            0,
            "detected: cgroup /sys/fs/cgroup/memory/docker/x: its limit less memory.usage_in_bytes",
        ),
        (V2 | {"/sys/fs/cgroup/a/b/memory.max": f"{64 * GIB}\n"}, 64, "detected: cgroup /sys/fs/cgroup/a/b"),
        ({}, 480, "detected: the operating system"),
    ],
)
def test_free_memory_is_what_the_cgroup_has_left(files: dict[str, str], gib: int, source: str) -> None:
    found = read(files)
    assert found.ram_free_bytes == gib * GIB
    assert found.sources["ram_free_bytes"] == source


def test_an_amd_gpu_on_the_bus_is_named_and_a_network_card_is_not() -> None:
    record = m.machine(
        None,
        names={"/sys/bus/pci/devices": ["0000:03:00.0", "0000:04:00.0"]},
        read={
            "/sys/bus/pci/devices/0000:03:00.0/vendor": "0x1002",
            "/sys/bus/pci/devices/0000:03:00.0/class": "0x120000",
            "/sys/bus/pci/devices/0000:04:00.0/vendor": "0x10de",
            "/sys/bus/pci/devices/0000:04:00.0/class": "0x020000",
        },
    )
    assert host.list_pci_accelerators(replay_machine(record)) == ["0000:03:00.0 AMD"]
