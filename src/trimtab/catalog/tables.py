"""Load the catalogue's TOML files as rows, cached."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.units import GIB

if TYPE_CHECKING:
    from collections.abc import Mapping

USABLE_SHARE = 0.98
"""Usable share of the label memory, for a device without a measured total: the lowest ratio among the
measured rows that reserve nothing for ECC (0.977 to 0.999)."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of facts with its source and how it was verified."""

    source: str
    verification: tuple[str, ...]


class DeviceRow(Row, frozen=True, kw_only=True):
    """A device; the comments of devices.toml explain each key."""

    name: str
    vendor: str = "nvidia"
    drivers: tuple[str, ...]
    typed: tuple[str, ...]
    taken: dict[str, str] = {}
    compute_capability: str
    multiprocessors: int | None = None
    clock_ghz: float | None = None
    flop_per_clock: int | None = None
    memory_gb: float
    usable_gib: float | None = None
    usable_source: str = ""
    bandwidth_gbs: float
    fp32: float
    tf32: float | None = None
    fp16: float
    bf16: float | None = None
    fp8: float | None = None
    matmul_tflops: float | None = None
    matmul_fp32_tflops: float | None = None
    link: str
    link_gbs: float
    nvlinks: int | None = None
    board: str | None = None
    pcie: int
    note: str = ""

    @property
    def usable_bytes(self) -> int:
        """Memory that processes can use: the measured value, or a share of the label."""
        if self.usable_gib is not None:
            return round(self.usable_gib * GIB)
        return round(self.memory_gb * USABLE_SHARE * GIB)


class LinkRow(Row, frozen=True, kw_only=True):
    """A kind of link."""

    name: str
    gbs: float
    per_lane_gbs: float | None = None
    pair_gbs: float | None = None
    bus_share: float | None = None
    assumes: str = ""


class FabricRow(Row, frozen=True, kw_only=True):
    """The usual network of nodes with some devices: per device, or per node and shared."""

    devices: tuple[str, ...]
    gbs: float | None = None
    node_gbs: float | None = None
    nvlink_domain: int | None = None

    def per_gpu_gbs(self, gpus: int) -> float:
        """Return GB/s, one way, per GPU of a node with this many GPUs."""
        return self.gbs if self.gbs is not None else (self.node_gbs or 0.0) / max(1, gpus)


class CollectivesRow(Row, frozen=True, kw_only=True):
    """Speed of collectives over any link; the comments of links.toml explain each key."""

    bus_share: float
    network_share: float
    unknown_bytes_per_s: float
    overlapped: float
    ll_share: float
    ll128_share: float
    tree_share: float
    tree_ll_share: float
    tree_ll128_share: tuple[float, float]
    pat_share: float
    post_us: float
    simple_posts: float
    plateau: float
    pat_rank_us: float
    pat_hop_share: float
    ring_ports: int
    network_us: float
    leaf_nodes: int
    board_cards: int


class ProtocolRow(Row, frozen=True, kw_only=True):
    """Latencies of an algorithm of collectives under a protocol, in microseconds."""

    algorithm: str
    protocol: str
    begin_us: float
    nvlink_us: float
    pcie_us: float
    network_us: float


class GenerationRow(Row, frozen=True, kw_only=True):
    """Limits of collectives on a generation of GPUs; the comments of links.toml explain each key."""

    name: str
    capability: float
    ll: tuple[float, float, float]
    ring_ll128: tuple[float, float, float]
    tree: tuple[float, float, float]
    tree_ll128: tuple[float, float, float]
    nvls_tree: tuple[float, float, float]
    nvls_share: float
    nvls: float


class SocketRow(Row, frozen=True, kw_only=True):
    """The link between two sockets of hosts with a PCIe generation."""

    pcie: int
    gbs: float


class RampRow(Row, frozen=True, kw_only=True):
    """Share of the bandwidth that collectives of medium sizes reach."""

    ring_bytes: tuple[float, ...]
    ring: tuple[float, ...]
    tree_ll: tuple[float, ...]
    tree_ll128: tuple[float, ...]
    tree_simple: tuple[float, ...]


class NcclMemoryRow(Row, frozen=True, kw_only=True):
    """Device memory of NCCL; the comments of links.toml explain each key."""

    kernels_mib: int
    communicator_mib: int
    channel_mib: int
    connection_mib: int
    sharp_mib: int
    nvlink_channels: int
    network_channels: int
    bus_channels: int
    pair_channels: int
    board_pair_channels: int
    error: float


class HostRow(Row, frozen=True, kw_only=True):
    """Copies between a device and its host; the comments of links.toml explain each key."""

    usable_share: float
    unknown_bytes_per_s: float
    lanes: int


class HostLinkRow(Row, frozen=True, kw_only=True):
    """The link between some devices and their host, if it is not PCIe."""

    name: str
    devices: tuple[str, ...]
    gbs: float


class MfuRow(Row, frozen=True, kw_only=True):
    """MFU of published runs of a kind of model, in percent."""

    devices: tuple[str, ...]
    model: str
    low: float
    high: float
    figures: str


class RecipeRow(Row, frozen=True, kw_only=True):
    """How others train a large decoder; the comments of recipes.toml explain each key."""

    name: str
    model: str
    layers: int
    width: int
    experts: int = 0
    trainer: str
    degrees: dict[str, int]
    sequence: tuple[int, int]


class PublicCorrection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A factor for predicted step times, from the rows of all GPUs with the same chip."""

    factor: float
    rows: int
    sources: tuple[str, ...]
    before: float
    """Mean error of a source that was left out, without the factor of the others."""
    after: float
    """The same with that factor."""

    def describe(self) -> str:
        """Return the factor and its evidence in words."""
        return (
            f"corrected by {self.rows:,} public measurements ({', '.join(self.sources)}): steps take "
            f"{self.factor:g} times as long; a source that was left out is predicted to {self.after:.0%} "
            f"with it and to {self.before:.0%} without"
        )


class PublicRow(Row, frozen=True, kw_only=True):
    """Published step times on a device over predicted ones: rows and median ratio by source."""

    name: str
    sources: dict[str, tuple[int, float]]
    correction: PublicCorrection | None = None
    """None: it made the sources that were left out no better."""

    @property
    def rows(self) -> int:
        """All measurements."""
        return sum(rows for rows, _ in self.sources.values())

    def describe(self) -> str:
        """Return the number of measurements and the range of their medians in words."""
        medians = sorted(median for _, median in self.sources.values())
        among = " to ".join(f"{median:g}" for median in dict.fromkeys((medians[0], medians[-1])))
        by = f"medians of {len(medians)} sources" if len(medians) > 1 else "median of one source"
        return f"{self.rows:,} public measurements on this GPU took {among} times as long as predicted ({by})"


class AmbiguousName(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name of several devices with different memory sizes."""

    typed: str
    choices: tuple[str, ...]


class DriverRow(Row, frozen=True, kw_only=True):
    """The oldest driver and compute capability that a CUDA release supports."""

    cuda_major: int
    oldest_driver: str
    oldest_capability: str


class TorchRow(Row, frozen=True, kw_only=True):
    """The torch releases that trimtab supports, both ends included."""

    oldest: str
    newest: str


class TorchBuildRow(Row, frozen=True, kw_only=True):
    """The compute capabilities in torch's build for a CUDA release."""

    cuda: str
    capabilities: tuple[str, ...]
    ptx: bool


class BadVersionRow(Row, frozen=True, kw_only=True):
    """A range of versions with a known problem for training."""

    what: str
    first: str
    fixed: str
    """The first version with the fix."""
    trouble: str


def _load_toml(name: str) -> Mapping[str, Any]:
    return tomllib.loads(files("trimtab.catalog").joinpath(name).read_text(encoding="utf-8"))


@cache
def devices() -> tuple[DeviceRow, ...]:
    """Return every device row, in the file's order."""
    return msgspec.convert(_load_toml("devices.toml")["device"], tuple[DeviceRow, ...])


@cache
def ambiguous_names() -> tuple[AmbiguousName, ...]:
    """Return the names that fit several devices."""
    return msgspec.convert(_load_toml("devices.toml")["ambiguous"], tuple[AmbiguousName, ...])


@cache
def links() -> dict[str, LinkRow]:
    """Return every kind of link, by name."""
    rows = msgspec.convert(_load_toml("links.toml")["link"], tuple[LinkRow, ...])
    return {row.name: row for row in rows}


@cache
def fabrics() -> tuple[FabricRow, ...]:
    """Return the usual networks between nodes."""
    return msgspec.convert(_load_toml("links.toml")["fabric"], tuple[FabricRow, ...])


@cache
def collectives() -> CollectivesRow:
    """Return the speed of collectives over any link."""
    return msgspec.convert(_load_toml("links.toml")["collectives"], CollectivesRow)


@cache
def protocols() -> dict[tuple[str, str], ProtocolRow]:
    """Return the latencies of collectives, by algorithm and protocol."""
    rows = msgspec.convert(_load_toml("links.toml")["protocol"], tuple[ProtocolRow, ...])
    return {(row.algorithm, row.protocol): row for row in rows}


@cache
def generations() -> tuple[GenerationRow, ...]:
    """Return the limits of collectives by generation of GPUs, oldest first."""
    return msgspec.convert(_load_toml("links.toml")["generation"], tuple[GenerationRow, ...])


@cache
def sockets() -> dict[int, SocketRow]:
    """Return the links between sockets, by PCIe generation of the host."""
    rows = msgspec.convert(_load_toml("links.toml")["socket"], tuple[SocketRow, ...])
    return {row.pcie: row for row in rows}


@cache
def collective_ramp() -> RampRow:
    """Return the share of the bandwidth that collectives of medium sizes reach."""
    return msgspec.convert(_load_toml("links.toml")["ramp"], RampRow)


@cache
def nccl_memory() -> NcclMemoryRow:
    """Return the device memory of NCCL."""
    return msgspec.convert(_load_toml("links.toml")["nccl_memory"], NcclMemoryRow)


@cache
def host_copies() -> HostRow:
    """Return the speed of copies between a device and its host."""
    return msgspec.convert(_load_toml("links.toml")["host"], HostRow)


@cache
def host_links() -> tuple[HostLinkRow, ...]:
    """Return the links between devices and their host that are not PCIe."""
    return msgspec.convert(_load_toml("links.toml")["host_link"], tuple[HostLinkRow, ...])


@cache
def mfu_references() -> tuple[MfuRow, ...]:
    """Return the MFU of published runs, by device and kind of model."""
    return msgspec.convert(_load_toml("mfu.toml")["reference"], tuple[MfuRow, ...])


@cache
def recipes() -> tuple[RecipeRow, ...]:
    """Return published recipes of large decoders."""
    return msgspec.convert(_load_toml("recipes.toml")["recipe"], tuple[RecipeRow, ...])


@cache
def public_steps() -> tuple[PublicRow, ...]:
    """Return published step times over predicted ones, by device."""
    return msgspec.convert(_load_toml("public.toml")["device"], tuple[PublicRow, ...])


@cache
def drivers() -> tuple[DriverRow, ...]:
    """Return the requirements of each CUDA release, oldest release first."""
    return msgspec.convert(_load_toml("versions.toml")["cuda"], tuple[DriverRow, ...])


@cache
def torch_releases() -> TorchRow:
    """Return the torch releases that trimtab supports."""
    return msgspec.convert(_load_toml("versions.toml")["torch"], TorchRow)


@cache
def torch_builds() -> dict[str, TorchBuildRow]:
    """Return the contents of torch's builds, by CUDA release."""
    rows = msgspec.convert(_load_toml("versions.toml")["torch_build"], tuple[TorchBuildRow, ...])
    return {row.cuda: row for row in rows}


@cache
def bad_versions() -> tuple[BadVersionRow, ...]:
    """Return the versions with known problems."""
    return msgspec.convert(_load_toml("versions.toml")["bad"], tuple[BadVersionRow, ...])
