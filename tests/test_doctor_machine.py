"""doctor without a log: machines that have one thing wrong, and the finding that they get."""

from __future__ import annotations

import json
from typing import Any

import pytest

import machines as m
from test_cli import trimtab_cli
from trimtab.catalog.tables import bad_versions
from trimtab.diagnosis.findings import Diagnosis
from trimtab.diagnosis.machine import ALLOCATOR_KEYS, examine_machine
from trimtab.probe.machine import record_machine, replay_machine, this_machine
from trimtab.units import GIB, MIB

SYNCED = {"timedatectl show --property=NTPSynchronized --value": "yes\n"}
GOOD_HOST: dict[str, Any] = {
    "limit:nofile": [65536, 65536],
    "limit:memlock": [None, None],
    "folder": "/w",
    "home": "/home/ana",
    "disk:/w": {"total": 900 * GIB, "free": 400 * GIB, "files": 10**8, "files_free": 10**7},
    "disk:/tmp": {"total": 90 * GIB, "free": 40 * GIB, "files": 10**8, "files_free": 10**7},
    "disk:/home/ana/.cache": {"total": 50 * GIB, "free": 20 * GIB, "files": 10**8, "files_free": 10**7},
}


def look(
    gpus: list[m.Gpu] | None = None,
    *,
    host: dict[str, Any] | None = None,
    nvml: dict[str, Any] | None = None,
    **changes: Any,
) -> Diagnosis:
    record = m.machine(
        [m.h100()] if gpus is None else gpus,
        host=GOOD_HOST | (host or {}),
        **{"run": SYNCED} | changes,
    )
    record["nvml"] |= {question: {"answer": answer} for question, answer in (nvml or {}).items()}
    return examine_machine(replay_machine(record))


def told(found: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.severity.value, finding.what) for finding in found.findings]


def test_a_machine_in_order_has_no_findings() -> None:
    found = look([m.h100(), m.h100()], nvml={"nvmlDeviceGetP2PStatus gpu0 gpu1 0": 0})
    assert told(found) == []
    assert found.exit_code == 0
    assert found.notes == ()


THROTTLED = "nvmlDeviceGetCurrentClocksEventReasons gpu0"


@pytest.mark.parametrize(
    ("changes", "severity", "said"),
    [
        ({"host": {"shm": 64 * MIB}}, "warning", "Shared memory has only 64.0 MiB."),
        ({"host": {"limit:nofile": [1024, 4096]}}, "info", "A process may open 1024 files."),
        ({"host": {"limit:nofile": [256, None]}}, "warning", "A process may open 256 files."),
        ({"host": {"ram": {"total": 64 * GIB, "available": GIB}}}, "warning", "Only 1.0 GiB of RAM are free"),
        (
            {"host": {"disk:/w": {"total": GIB, "free": 5 * MIB, "files": 9, "files_free": 9}}},
            "error",
            "The disk for the working folder has 5.0 MiB left.",
        ),
        (
            {"host": {"disk:/tmp": {"total": 9 * GIB, "free": 2 * GIB, "files": 9, "files_free": 9}}},
            "warning",
            "The disk for temporary files has 2.0 GiB left.",
        ),
        (
            {"host": {"disk:/w": {"total": 900 * GIB, "free": 90 * GIB, "files": 10**6, "files_free": 3}}},
            "warning",
            "has room for 3 more files.",
        ),
        (
            {"run": {"timedatectl show --property=NTPSynchronized --value": "no\n"}},
            "info",
            "The clock of this machine is not synchronised.",
        ),
        ({"nvml": {THROTTLED: 0x40}}, "warning", "GPU 0 is throttled: it is too hot."),
        ({"nvml": {THROTTLED: 0x80}}, "warning", "GPU 0 is throttled: the machine's power supply"),
        (
            {"nvml": {"nvmlDeviceGetTotalEccErrors gpu0 1 0": 3}},
            "error",
            "GPU 0 has met 3 memory errors that ECC could not correct.",
        ),
        (
            {"nvml": {"nvmlDeviceGetRemappedRows gpu0": [0, 1, 1, 0]}},
            "warning",
            "GPU 0 waits for a reset to replace a row.",
        ),
        (
            {"nvml": {"nvmlDeviceGetRemappedRows gpu0": [0, 1, 0, 1]}},
            "error",
            "GPU 0 could not replace a bad row of its memory.",
        ),
        ({"nvml": {"nvmlDeviceGetCurrPcieLinkWidth gpu0": 4}}, "warning", "GPU 0 has 4 of 16 PCIe lanes."),
        (
            {"gpus": [m.h100(), m.h100()], "nvml": {"nvmlDeviceGetP2PStatus gpu0 gpu1 0": 3}},
            "warning",
            "1 of 1 pairs of GPUs cannot reach each other directly.",
        ),
        (
            {"gpus": [m.h100(), m.h100()], "nvml": {"nvmlDeviceGetP2PStatus gpu0 gpu1 0": 2}},
            "info",
            "1 of 1 pairs of GPUs cannot reach each other directly.",
        ),
        ({"host": {"system": "Linux 4.18.0-553.el8 x86_64"}}, "warning", "Linux 4.18.0-553.el8 is known"),
        ({"host": {"package:nvidia-nccl-cu13": "2.29.2"}}, "warning", "NCCL 2.29.2 is known to be bad"),
        ({"driver": "560.35.03", "torch_cuda": "12.6"}, "warning", "The NVIDIA driver 560.35.03 is known"),
        ({"torch": None}, "warning", "torch is not installed for this Python."),
        ({"torch_cuda": None}, "warning", "torch is a CPU build: it cannot use the GPU here."),
        ({"driver": "535.104.05"}, "error", "The NVIDIA driver is too old for this torch"),
        ({"env": {"RANK": "0"}}, "error", "RANK is set, but WORLD_SIZE is not."),
        (
            {"env": {"CUDA_VISIBLE_DEVICES": "7"}},
            "error",
            "CUDA_VISIBLE_DEVICES=7 names a GPU that cannot be used",
        ),
        (
            {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True"}},
            "error",
            "'expandable_segment' is no option of torch's allocator: expandable_segments is.",
        ),
        (
            {"env": {"PYTORCH_ALLOC_CONF": "expandable_segments:true"}},
            "error",
            "expandable_segments is 'true', and must be True or False.",
        ),
        ({"env": {"PYTORCH_ALLOC_CONF": "max_split_size_mb"}}, "error", "max_split_size_mb has no value."),
        (
            {"env": {"PYTORCH_CUDA_ALOC_CONF": "expandable_segments:True"}},
            "warning",
            "PYTORCH_CUDA_ALOC_CONF is no variable of torch: PYTORCH_CUDA_ALLOC_CONF is.",
        ),
        ({"env": {"CUDA_LAUNCH_BLOCKING": "1"}}, "warning", "CUDA_LAUNCH_BLOCKING=1 is set"),
        ({"env": {"NCCL_P2P_DISABLE": "1"}}, "warning", "NCCL_P2P_DISABLE=1 is set"),
        (
            {"env": {"NCCL_SOCKET_IFNAME": "ib0"}, "names": {"/sys/class/net": ["eth0", "lo"]}},
            "error",
            "NCCL_SOCKET_IFNAME=ib0 names no network interface of this machine.",
        ),
        (
            {
                "names": {
                    "/sys/class/infiniband": ["mlx5_0", "mlx5_1"],
                    "/sys/class/infiniband/mlx5_0/ports": ["1"],
                    "/sys/class/infiniband/mlx5_1/ports": ["1"],
                },
                "read": {
                    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
                    "/sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
                },
            },
            "warning",
            "1 of 2 InfiniBand ports are not active: mlx5_1 port 1.",
        ),
        (
            {
                "host": {"limit:memlock": [8 * MIB, 8 * MIB]},
                "names": {"/sys/class/infiniband": ["mlx5_0"]},
            },
            "warning",
            "A process may lock 8.0 MiB of memory, and InfiniBand needs more.",
        ),
        (
            {
                "read": {
                    "/proc/self/cgroup": "0::/job_1\n",
                    "/sys/fs/cgroup/job_1/memory.events": "low 0\noom 2\noom_kill 2\n",
                }
            },
            "warning",
            "The kernel has killed 2 processes of this cgroup for memory.",
        ),
        (
            {"gpus": [m.h100(processes=[(77, 20 * GIB)])]},
            "warning",
            "Another job holds 20.0 GiB of GPU 0.",
        ),
    ],
)
def test_one_thing_wrong_is_one_finding(changes: dict[str, Any], severity: str, said: str) -> None:
    found = look(**changes)
    assert len(found.findings) == 1, told(found)
    finding = found.findings[0]
    assert finding.severity.value == severity
    assert said in finding.what
    assert finding.evidence
    assert finding.cure
    assert found.exit_code == (5 if severity == "error" else 0)


@pytest.mark.parametrize(
    "env",
    [
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8"},
        {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2,>:4],backend:native"},
        {"PYTORCH_CUDA_ALLOC_CONF": "", "CUDA_LAUNCH_BLOCKING": "0", "TORCH_DISTRIBUTED_DEBUG": "INFO"},
        {"PYTORCH_KERNEL_CACHE_PATH": "/w/x", "NCCL_SOCKET_IFNAME": "^lo,docker0"},
    ],
)
def test_right_settings_are_not_complained_about(env: dict[str, str]) -> None:
    assert told(look(env=env, names={"/sys/class/net": ["eth0", "lo"]})) == []


@pytest.mark.parametrize(
    "value", [",", ":", "[", "]", ":::", "\x00", "a" * 9999, "[[:", "expandable_segments:"]
)
def test_a_broken_setting_of_the_allocator_is_one_sentence_and_no_error_of_ours(value: str) -> None:
    found = look(env={"PYTORCH_CUDA_ALLOC_CONF": value})
    assert all(finding.severity.value == "error" for finding in found.findings)


def test_the_recorded_h200_has_only_what_its_record_can_tell() -> None:
    found = examine_machine(replay_machine(m.recorded("h200")))
    assert told(found) == []


def test_a_machine_that_answers_nothing_is_no_error() -> None:
    assert isinstance(examine_machine(replay_machine({})), Diagnosis)


def test_this_machine_can_be_recorded_and_looked_at_again() -> None:
    world, notes = record_machine(this_machine())
    live = examine_machine(world)
    again = examine_machine(replay_machine(json.loads(json.dumps(notes))))
    assert told(again) == told(live)


def test_bad_versions_are_ranges_with_a_source() -> None:
    for row in bad_versions():
        assert row.what in ("linux", "nccl", "driver")
        assert row.source
        assert tuple(map(int, row.first.split("."))) < tuple(map(int, row.fixed.split(".")))
    assert tuple(sorted(ALLOCATOR_KEYS)) == ALLOCATOR_KEYS


def test_the_command_checks_this_machine_and_says_what_it_looked_at() -> None:
    done = trimtab_cli("doctor", env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segment:True"})
    assert done.returncode == 5
    assert "do: Write expandable_segments" in done.stdout
