"""Hardware: devices, links, nodes and clusters, with the scheduler and software versions.

The larger classes have `sources`: how each known field is known ("detected: NVML", "catalogued: H200 SXM
141GB", "stated: --on 4xA100-40GB").
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

from trimtab.spec.base import Noun, check_minimum, check_sources
from trimtab.spec.calibration import CollectiveTimes
from trimtab.spec.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable


CAPABILITY = re.compile(r"[0-9]{1,2}\.[0-9]|gfx[0-9a-f]{3,6}", re.ASCII)
"""NVIDIA's 9.0, AMD's gfx942."""
PCIE_GENERATIONS = range(1, 9)
PCIE_WIDTHS = range(1, 33)


class Vendor(StrEnum):
    """Vendor of the device."""

    NVIDIA = "nvidia"
    AMD = "amd"


PEAK_NAMES = {
    "float32": "fp32",
    "tf32": "tf32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
"""Field of Peaks for each dtype of matrix products."""


class Peaks(Noun, frozen=True, kw_only=True):
    """Dense operations per second by dtype, with fp32 accumulation. None: the device has no such path."""

    fp32: float | None = None
    """Plain fp32, no tensor cores."""
    tf32: float | None = None
    """fp32 matrix products on tensor cores."""
    fp16: float | None = None
    """fp16 inputs, fp32 accumulation."""
    bf16: float | None = None
    """bf16 inputs, fp32 accumulation; None if bf16 is only emulated."""
    fp8: float | None = None
    """fp8 inputs, fp32 accumulation; None if the device has no fp8."""

    def faults(self) -> list[str]:
        """Check that rates are positive."""
        return check_minimum(1, fp32=self.fp32, tf32=self.tf32, fp16=self.fp16, bf16=self.bf16, fp8=self.fp8)

    def get_rate(self, dtype: str) -> float | None:
        """Return the rate of matrix products in a dtype, as torch names it, or in tf32."""
        return getattr(self, PEAK_NAMES[dtype]) if dtype in PEAK_NAMES else None

    def scale(self, share: float) -> Peaks:
        """Return the peaks of a share of the device, such as a MIG slice."""
        rates = {key: getattr(self, key) for key in self.__struct_fields__}
        return Peaks(**{key: rate and rate * share for key, rate in rates.items()})


class DeviceProcess(Noun, frozen=True, kw_only=True):
    """Another process that uses memory on a device."""

    pid: int
    """Process id, as the driver reports it (outside a container it may be another number)."""
    used_bytes: int | None = None
    """Device memory that it uses; None if the driver does not report it."""
    name: str | None = None
    """Its command; None if this user may not see it."""


class Slice(Noun, frozen=True, kw_only=True):
    """A MIG slice: a part of a GPU that acts as a separate device."""

    profile: str
    """NVIDIA's name of the slice, such as 3g.20gb."""
    parent: str
    """UUID of the parent GPU."""
    sm_share: float
    """Its share of the parent's multiprocessors."""

    def faults(self) -> list[str]:
        """Check that the share is in (0, 1]."""
        return [] if 0 < self.sm_share <= 1 else [f"sm_share is {self.sm_share}, not in (0, 1]"]


class Device(Noun, frozen=True, kw_only=True):
    """One accelerator as the framework addresses it: a GPU, a MIG slice, an AMD GCD."""

    index: int
    """The N of cuda:N for this process."""
    name: str
    """The driver's name, or the catalogue's name for a stated device."""
    model: str | None = None
    """Matching name in the catalogue; None if the catalogue does not have the device."""
    vendor: Vendor = Vendor.NVIDIA
    memory_bytes: int
    """Total memory that processes can use; less than the label, because drivers and ECC use some."""
    free_bytes: int | None = None
    """Memory that is free now; None for a stated device."""
    compute_capability: str | None = None
    """"9.0" for sm_90; AMD's gfx name for an AMD device."""
    bf16: bool | None = None
    """Whether bf16 runs at full speed; emulation does not count."""
    peaks: Peaks = Peaks()
    bandwidth_bytes_per_s: float | None = None
    """Device memory bandwidth, read plus write."""
    multiprocessors: int | None = None
    """SMs, or CUs on AMD."""
    clock_hz: float | None = None
    """Highest SM clock that the driver reports."""
    power_limit_w: float | None = None
    """The limit in force; below `power_default_w` the device is capped."""
    power_default_w: float | None = None
    ecc: bool | None = None
    """Whether ECC is on."""
    uuid: str | None = None
    bus_id: str | None = None
    """PCI address."""
    pcie_generation: int | None = None
    pcie_width: int | None = None
    numa_node: int | None = None
    slice: Slice | None = None
    """Set when the device is a MIG slice."""
    processes: tuple[DeviceProcess, ...] | None = None
    """Other processes on it; None if the driver does not report them."""
    sources: dict[str, str] = {}

    @property
    def kind(self) -> str:
        """Name that equal devices share; a MIG slice differs from the whole GPU."""
        name = self.model or self.name
        return f"{name} MIG {self.slice.profile}" if self.slice else name

    def faults(self) -> list[str]:
        """Check that sizes and counts are possible and that each source names a field."""
        wrong = check_minimum(0, index=self.index, free_bytes=self.free_bytes)
        wrong += check_minimum(
            1,
            memory_bytes=self.memory_bytes,
            multiprocessors=self.multiprocessors,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            clock_hz=self.clock_hz,
            power_limit_w=self.power_limit_w,
            power_default_w=self.power_default_w,
        )
        wrong += _check_range(PCIE_GENERATIONS, pcie_generation=self.pcie_generation)
        wrong += _check_range(PCIE_WIDTHS, pcie_width=self.pcie_width)
        if self.compute_capability is not None and not CAPABILITY.fullmatch(self.compute_capability):
            wrong.append(f"compute_capability is {self.compute_capability!r}, not like 9.0 or gfx942")
        if self.free_bytes is not None and self.free_bytes > self.memory_bytes:
            wrong.append(f"free_bytes {self.free_bytes} is more than memory_bytes {self.memory_bytes}")
        if not self.name:
            wrong.append("name is empty")
        return wrong + check_sources(self.sources, self.json_fields())


def _check_range(possible: range, **values: int | None) -> list[str]:
    """Return a sentence for each value that is known and outside of the range."""
    return [
        f"{name} is {value}, and must lie from {possible.start} to {possible.stop - 1}"
        for name, value in values.items()
        if value is not None and value not in possible
    ]


class Link(Noun, frozen=True, kw_only=True):
    """Connection between each pair of some devices of a node, or between nodes."""

    kind: str
    """NVLink4, PCIe5 x16, Infinity Fabric, network, ..."""
    node: int | None
    """Node whose devices it connects; None for the link between nodes."""
    devices: tuple[int, ...] = ()
    """Indices of the devices that it connects pairwise; empty between nodes."""
    bandwidth_bytes_per_s: float | None = None
    """One-way bandwidth between two of its devices; between nodes, one way per device."""
    total_bytes_per_s: float | None = None
    """One-way bandwidth from one device to all others at once. Through a switch or a bus it equals the
    bandwidth of a pair; with direct links between devices it is more. None if unknown."""
    latency_s: float | None = None
    """Latency between two nodes, one way; None if nobody stated it."""
    rails: bool | None = None
    """Whether GPU i of every node has its port on the same switch; None if nobody stated it."""
    oversubscription: float | None = None
    """How much more bandwidth nodes have than the switches that join their switches; None if not stated."""
    nvlink_domain: int | None = None
    """GPUs that NVLink joins, where that is more than a node has, as in NVL72; None otherwise."""
    source: str
    """How the link is known, as in `sources` of a device."""

    def faults(self) -> list[str]:
        """Check that a link within a node connects at least two devices."""
        wrong = check_minimum(
            1,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            total_bytes_per_s=self.total_bytes_per_s,
            oversubscription=self.oversubscription,
            nvlink_domain=self.nvlink_domain,
        )
        wrong += check_minimum(0, latency_s=self.latency_s)
        if (self.node is None) != (not self.devices):
            wrong.append("a link has a node and devices, or neither")
        if self.devices and len(set(self.devices)) < 2:  # noqa: PLR2004 - two ends
            wrong.append("a link within a node joins two devices or more")
        return wrong + check_sources({"source": self.source}, ("source",))


class Node(Noun, frozen=True, kw_only=True):
    """One host, with the cores, memory and devices that this process may use."""

    name: str
    devices: tuple[Device, ...] = ()
    cpu_cores: int | None = None
    """Cores that this process may use, after affinity, cgroups and the scheduler."""
    cpu_cores_total: int | None = None
    """Cores of the host."""
    ram_bytes: int | None = None
    """Memory that this process may use, after cgroups and the scheduler."""
    ram_free_bytes: int | None = None
    shm_bytes: int | None = None
    """Size of /dev/shm, through which data loader workers share batches."""
    sources: dict[str, str] = {}

    def faults(self) -> list[str]:
        """Check that counts are possible and device indices are distinct."""
        wrong = check_minimum(1, cpu_cores=self.cpu_cores, ram_bytes=self.ram_bytes) + check_minimum(
            0, ram_free_bytes=self.ram_free_bytes, shm_bytes=self.shm_bytes
        )
        if len({device.index for device in self.devices}) != len(self.devices):
            wrong.append("two devices of a node have the same index")
        return wrong + check_sources(self.sources, self.json_fields())


class Scheduler(Noun, frozen=True, kw_only=True):
    """Scheduler and launcher of this process, and the resources that it got."""

    name: str | None = None
    """slurm, kubernetes, or None without a scheduler."""
    launcher: str | None = None
    """torchrun, srun, or 'by hand' if neither set RANK and WORLD_SIZE; None for a single process."""
    job_id: str | None = None
    num_nodes: int | None = None
    node_names: tuple[str, ...] = ()
    partition: str | None = None
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_world_size: int | None = None
    gpus_on_node: int | None = None
    cpus_per_task: int | None = None
    cpus_on_node: int | None = None
    memory_bytes: int | None = None
    """Host memory granted per node."""
    ends_at_s: float | None = None
    """End of the job's time limit, in seconds since 1970."""
    restarts: int | None = None
    sources: dict[str, str] = {}

    def faults(self) -> list[str]:
        """Check that a rank is below its world size."""
        wrong = check_minimum(1, world_size=self.world_size, num_nodes=self.num_nodes)
        wrong += check_minimum(0, rank=self.rank, local_rank=self.local_rank)
        for low, high in (("rank", "world_size"), ("local_rank", "local_world_size")):
            rank, size = getattr(self, low), getattr(self, high)
            if rank is not None and size is not None and rank >= size:
                wrong.append(f"{low} is {rank}, and must be below {high} {size}")
        return wrong + check_sources(self.sources, self.json_fields())


class Versions(Noun, frozen=True, kw_only=True):
    """Versions of the software that must be compatible."""

    trimtab: str | None = None
    python: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    """CUDA release that torch was built for; None for a CPU build."""
    torch_hip: str | None = None
    nccl: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    """Newest CUDA release that the driver supports."""
    system: str | None = None
    sources: dict[str, str] = {}

    def faults(self) -> list[str]:
        """Check that each source names a field."""
        return check_sources(self.sources, self.json_fields())


class Cluster(Noun, frozen=True, kw_only=True):
    """The nodes that a job may use; a single machine is a cluster of one node."""

    derived = ("cpu_cores", "ram_bytes")

    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()
    scheduler: Scheduler = Scheduler()
    versions: Versions = Versions()
    collectives: tuple[CollectiveTimes, ...] = ()
    """Collectives that were measured on such links, as `--network FILE` states them."""
    notes: tuple[str, ...] = ()
    """Assumptions and their reasons: 'H100 is taken as the SXM5 card'."""
    findings: tuple[Finding, ...] = ()
    """Problems; a finding of severity error means that the devices cannot be used as they are."""

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices of all nodes."""
        return tuple(device for node in self.nodes for device in node.devices)

    @property
    def cpu_cores(self) -> int | None:
        """Usable cores of all nodes; None if unknown for a node."""
        return _sum_counts(node.cpu_cores for node in self.nodes)

    @property
    def ram_bytes(self) -> int | None:
        """Usable host memory of all nodes; None if unknown for a node."""
        return _sum_counts(node.ram_bytes for node in self.nodes)

    def faults(self) -> list[str]:
        """Check that the cluster has a node and that links name existing devices."""
        wrong = [] if self.nodes else ["a cluster has at least one node"]
        for link in self.links:
            if link.node is None:
                continue
            if not 0 <= link.node < len(self.nodes):
                wrong.append(f"a link names node {link.node}, and there are {len(self.nodes)}")
                continue
            indices = {device.index for device in self.nodes[link.node].devices}
            if not set(link.devices) <= indices:
                wrong.append(f"a link of node {link.node} names a device that is not there")
        return wrong


def _sum_counts(counts: Iterable[int | None]) -> int | None:
    values = list(counts)
    return None if None in values else sum(value for value in values if value is not None)
