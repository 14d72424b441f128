"""Machines to probe without having them.

`recorded("h200")` is a real one: `trimtab detect --record` wrote its file on an NVIDIA H200 (the name of its
cgroup was changed). The others cannot exist where the tests run, so `machine(...)` writes records of the same
form from what such machines are known to answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20
GIB = 2**30
FOLDER = Path(__file__).parent / "machines"
MEMORY_V2 = 0x2000028


def recorded(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return record


@dataclass(kw_only=True)
class Mig:
    uuid: str
    profile: str
    multiprocessors: int
    memory_mib: int
    instance: int


@dataclass(kw_only=True)
class Gpu:
    name: str
    total_mib: int
    capability: tuple[int, int]
    cores: int
    reserved_mib: int = 600
    used_mib: int = 0
    clock_mhz: int = 1980
    memory_clock_mhz: int = 2619
    bus_width: int = 5120
    power_w: float = 700
    default_w: float = 700
    ecc: bool | None = True
    pcie: tuple[int, int] = (5, 16)
    uuid: str = ""
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    nvlink_version: int = 0
    """NVML's enum, not the generation: 5 is NVLink 3.1, 6 is NVLink 4.0."""
    switch_links: int = 0
    peer_links: dict[int, int] = field(default_factory=dict)
    """Number of straight links, by index of the other GPU."""
    migs: list[Mig] = field(default_factory=list)
    mig_mode: bool = False
    """On also without slices."""
    faults: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Functions that answer with an error."""


def on_bus(*addresses: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What /sys says where NVIDIA GPUs sit at these PCI addresses: folders and files."""
    files = {}
    for address in addresses:
        files[f"/sys/bus/pci/devices/{address}/vendor"] = "0x10de\n"
        files[f"/sys/bus/pci/devices/{address}/class"] = "0x030200\n"
    return {"/sys/bus/pci/devices": list(addresses)}, files


def bus_id(index: int) -> str:
    return f"00000000:{index + 1:02X}:00.0"


def uuid_of(index: int, gpu: Gpu) -> str:
    return gpu.uuid or f"GPU-0000000{index}-aaaa-bbbb-cccc-00000000000{index}"


def machine(
    gpus: list[Gpu] | None = None,
    *,
    driver: str = "580.95.05",
    driver_cuda: int = 13000,
    env: dict[str, str] | None = None,
    read: dict[str, str] | None = None,
    names: dict[str, list[str]] | None = None,
    run: dict[str, str] | None = None,
    host: dict[str, Any] | None = None,
    torch: str | None = "2.13.0",
    torch_cuda: str | None = "13.0",
    nvml_fault: tuple[int, str] | None = None,
) -> dict[str, Any]:
    nvml: dict[str, Any] = {}
    if nvml_fault is not None:
        nvml["nvmlInit"] = {"fault": list(nvml_fault)}
    elif gpus is not None:
        nvml |= {
            "nvmlInit": {"answer": None},
            "nvmlDeviceGetCount": {"answer": len(gpus)},
            "nvmlSystemGetDriverVersion": {"answer": driver},
            "nvmlSystemGetCudaDriverVersion_v2": {"answer": driver_cuda},
        }
        for index, gpu in enumerate(gpus):
            nvml |= _gpu_answers(index, gpu, len(gpus))
    cuda_line = f"cuda: Optional[str] = {torch_cuda!r}\nhip: Optional[str] = None\n"
    facts: dict[str, Any] = {
        "name": "box",
        "system": "Linux 6.8.0 x86_64",
        "python": "3.12.3",
        "executable": "python3",
        "pid": 4242,
        "cpus": 64,
        "affinity": 64,
        "ram": {"total": 512 * GIB, "available": 480 * GIB},
        "shm": 256 * GIB,
        "package:torch": torch,
        f"package:nvidia-nccl-cu{(torch_cuda or '0').partition('.')[0]}": "2.28.9" if torch_cuda else None,
        "torch_version_file": cuda_line if torch else None,
    }
    return {
        "env": env or {},
        "read": read or {},
        "names": names or {},
        "run": run or {},
        "host": facts | (host or {}),
        "nvml": nvml,
    }


def _gpu_answers(index: int, gpu: Gpu, count: int) -> dict[str, Any]:
    key = f"gpu{index}"
    answers = {
        "nvmlDeviceGetName": gpu.name,
        "nvmlDeviceGetUUID": uuid_of(index, gpu),
        f"nvmlDeviceGetMemoryInfo {MEMORY_V2}": _memory(gpu.total_mib, gpu.reserved_mib, gpu.used_mib),
        "nvmlDeviceGetCudaComputeCapability": list(gpu.capability),
        "nvmlDeviceGetNumGpuCores": gpu.cores,
        "nvmlDeviceGetMaxClockInfo 1": gpu.clock_mhz,
        "nvmlDeviceGetMaxClockInfo 2": gpu.memory_clock_mhz,
        "nvmlDeviceGetMemoryBusWidth": gpu.bus_width,
        "nvmlDeviceGetPowerManagementLimit": round(gpu.power_w * 1000),
        "nvmlDeviceGetPowerManagementDefaultLimit": round(gpu.default_w * 1000),
        "nvmlDeviceGetPciInfo": {"busId": bus_id(index)},
        "nvmlDeviceGetMaxPcieLinkGeneration": gpu.pcie[0],
        "nvmlDeviceGetMaxPcieLinkWidth": gpu.pcie[1],
        "nvmlDeviceGetComputeRunningProcesses": [
            {"pid": pid, "usedGpuMemory": used} for pid, used in gpu.processes
        ],
        "nvmlDeviceGetMigMode": [int(bool(gpu.migs) or gpu.mig_mode)] * 2,
        "nvmlDeviceGetMaxMigDeviceCount": 7,
    }
    if gpu.ecc is not None:
        answers["nvmlDeviceGetEccMode"] = [int(gpu.ecc)] * 2
    found = {_question(question, key): {"answer": answer} for question, answer in answers.items()}
    found |= _nvlink_answers(key, gpu)
    for number, mig in enumerate(gpu.migs):
        found |= _mig_answers(f"{key}/mig{number}", gpu, mig)
    for other in range(index + 1, count):
        found[f"nvmlDeviceGetTopologyCommonAncestor {key} gpu{other}"] = {"answer": 30}
    for function, fault in gpu.faults.items():
        found[_question(function, key)] = {"fault": list(fault)}
    return found


def _question(question: str, key: str) -> str:
    function, _, argument = question.partition(" ")
    return f"{function} {key} {argument}".strip()


def _memory(total_mib: int, reserved_mib: int, used_mib: int) -> dict[str, int]:
    return {
        "total": total_mib * MIB,
        "reserved": reserved_mib * MIB,
        "used": used_mib * MIB,
        "free": (total_mib - reserved_mib - used_mib) * MIB,
    }


def _nvlink_answers(key: str, gpu: Gpu) -> dict[str, Any]:
    ends: list[tuple[int, str]] = [(2, "00000000:C0:00.0")] * gpu.switch_links
    ends += [(0, bus_id(peer)) for peer, count in gpu.peer_links.items() for _ in range(count)]
    found: dict[str, Any] = {}
    for number, (kind, where) in enumerate(ends):
        found[f"nvmlDeviceGetNvLinkState {key} {number}"] = {"answer": 1}
        found[f"nvmlDeviceGetNvLinkVersion {key} {number}"] = {"answer": gpu.nvlink_version}
        found[f"nvmlDeviceGetNvLinkRemoteDeviceType {key} {number}"] = {"answer": kind}
        found[f"nvmlDeviceGetNvLinkRemotePciInfo {key} {number}"] = {"answer": {"busId": where}}
    return found


def _mig_answers(key: str, gpu: Gpu, mig: Mig) -> dict[str, Any]:
    slices = int(mig.profile.partition("g")[0])
    answers = {
        "nvmlDeviceGetName": f"{gpu.name} MIG {mig.profile}",
        "nvmlDeviceGetUUID": mig.uuid,
        f"nvmlDeviceGetMemoryInfo {MEMORY_V2}": _memory(mig.memory_mib, 0, 20),
        "nvmlDeviceGetAttributes_v2": {
            "multiprocessorCount": mig.multiprocessors,
            "gpuInstanceSliceCount": slices,
            "memorySizeMB": mig.memory_mib,
        },
        "nvmlDeviceGetGpuInstanceId": mig.instance,
        "nvmlDeviceGetComputeInstanceId": 0,
    }
    return {_question(question, key): {"answer": answer} for question, answer in answers.items()}


def t4(**changes: Any) -> Gpu:
    facts: dict[str, Any] = {
        "name": "Tesla T4",
        "total_mib": 15360,
        "reserved_mib": 448,
        "capability": (7, 5),
        "cores": 2560,
        "clock_mhz": 1590,
        "memory_clock_mhz": 5001,
        "bus_width": 256,
        "power_w": 70,
        "default_w": 70,
        "pcie": (3, 16),
    }
    return Gpu(**(facts | changes))


def h100(**changes: Any) -> Gpu:
    facts: dict[str, Any] = {
        "name": "NVIDIA H100 80GB HBM3",
        "total_mib": 81559,
        "reserved_mib": 472,
        "capability": (9, 0),
        "cores": 16896,
        "nvlink_version": 6,
        "switch_links": 18,
    }
    return Gpu(**(facts | changes))


def a100_40(**changes: Any) -> Gpu:
    facts: dict[str, Any] = {
        "name": "NVIDIA A100-SXM4-40GB",
        "total_mib": 40960,
        "reserved_mib": 522,
        "capability": (8, 0),
        "cores": 6912,
        "clock_mhz": 1410,
        "memory_clock_mhz": 1215,
        "power_w": 400,
        "default_w": 400,
        "pcie": (4, 16),
        "nvlink_version": 5,
        "switch_links": 12,
    }
    return Gpu(**(facts | changes))


def rtx3090(**changes: Any) -> Gpu:
    facts: dict[str, Any] = {
        "name": "NVIDIA GeForce RTX 3090",
        "total_mib": 24576,
        "reserved_mib": 450,
        "capability": (8, 6),
        "cores": 10496,
        "clock_mhz": 2100,
        "memory_clock_mhz": 9751,
        "bus_width": 384,
        "power_w": 350,
        "default_w": 350,
        "ecc": None,
        "pcie": (4, 16),
    }
    return Gpu(**(facts | changes))


def rtx4090(**changes: Any) -> Gpu:
    facts: dict[str, Any] = {
        "name": "NVIDIA GeForce RTX 4090",
        "total_mib": 24564,
        "reserved_mib": 480,
        "capability": (8, 9),
        "cores": 16384,
        "clock_mhz": 3105,
        "memory_clock_mhz": 10501,
        "bus_width": 384,
        "power_w": 450,
        "default_w": 450,
        "ecc": False,
        "pcie": (4, 16),
    }
    return Gpu(**(facts | changes))


MIG_ONE = "MIG-11111111-2222-3333-4444-555555555555"
MIG_TWO = "MIG-66666666-7777-8888-9999-aaaaaaaaaaaa"


def cut_a100(**changes: Any) -> Gpu:
    """An A100 40GB cut into a 3g.20gb and a 1g.5gb slice."""
    migs = [
        Mig(uuid=MIG_ONE, profile="3g.20gb", multiprocessors=42, memory_mib=19968, instance=1),
        Mig(uuid=MIG_TWO, profile="1g.5gb", multiprocessors=14, memory_mib=4864, instance=9),
    ]
    return a100_40(**({"migs": migs, "switch_links": 0} | changes))


SLURM_TWO_NODES = {
    "SLURM_JOB_ID": "8812",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_PARTITION": "train",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_ON_NODE": "48",
    "SLURM_CPUS_PER_TASK": "6",
    "SLURM_MEM_PER_NODE": "409600",
    "SLURM_JOB_END_TIME": "1794700800",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_ID": "0",
    "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
}


def laptop() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": "laptop",
        "cpus": 8,
        "affinity": 8,
        "ram": {"total": 16 * GIB, "available": 9 * GIB},
        "shm": 8 * GIB,
    }
    return machine(None, host=facts, torch="2.13.0+cpu", torch_cuda=None)


def one_t4() -> dict[str, Any]:
    return machine([t4()], driver="570.124.06", driver_cuda=12080, torch="2.11.0", torch_cuda="12.8")


def eight_h100() -> dict[str, Any]:
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    cgroup = {
        "/proc/self/cgroup": "0::/kubepods/pod7\n",
        "/sys/fs/cgroup/kubepods/pod7/cpu.max": "3200000 100000\n",
        "/sys/fs/cgroup/kubepods/pod7/memory.max": str(256 * GIB),
        "/sys/fs/cgroup/kubepods/cpu.max": "max 100000\n",
    }
    return machine([h100() for _ in range(8)], env=env, read=cgroup)


def two_by_eight_a100() -> dict[str, Any]:
    return machine([a100_40() for _ in range(8)], env=SLURM_TWO_NODES, host={"name": "gpu07"})


def mig_slice() -> dict[str, Any]:
    return machine([cut_a100()], env={"CUDA_VISIBLE_DEVICES": MIG_TWO})


def mixed() -> dict[str, Any]:
    """Two RTX 3090 with a bridge, and an RTX 4090 on the PCI bus between them."""
    left = rtx3090(nvlink_version=5, peer_links={2: 4})
    right = rtx3090(nvlink_version=5, peer_links={0: 4})
    return machine([left, rtx4090(), right])


MACHINES: dict[str, Callable[[], dict[str, Any]]] = {
    "laptop": laptop,
    "one T4": one_t4,
    "8xH100": eight_h100,
    "2x8xA100": two_by_eight_a100,
    "MIG slice": mig_slice,
    "mixed cards": mixed,
    "H200 (real)": lambda: recorded("h200"),
}
