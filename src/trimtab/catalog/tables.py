"""Reads the catalogue's TOML files into rows, once."""

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
"""Usable over label, for a device nobody read the total of: the lowest ratio among the rows that have a
reading and keep nothing for ECC (0.977 to 0.999 there)."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of facts with where it comes from and how far it was checked."""

    source: str
    verification: tuple[str, ...]


class DeviceRow(Row, frozen=True, kw_only=True):
    """What the catalogue knows of a device; the comments of devices.toml say what each key means."""

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
    link: str
    link_gbs: float
    nvlinks: int | None = None
    board: str | None = None
    pcie: int
    note: str = ""

    @property
    def usable_bytes(self) -> int:
        """What a process is given in all: the reading, or a share of the label where none was seen."""
        if self.usable_gib is not None:
            return round(self.usable_gib * GIB)
        return round(self.memory_gb * USABLE_SHARE * GIB)


class LinkRow(Row, frozen=True, kw_only=True):
    """What the catalogue knows of a kind of link."""

    name: str
    gbs: float
    per_lane_gbs: float | None = None
    pair_gbs: float | None = None
    assumes: str = ""


class FabricRow(Row, frozen=True, kw_only=True):
    """The network that nodes of some devices usually have: of each device, or of a node that shares it."""

    devices: tuple[str, ...]
    gbs: float | None = None
    node_gbs: float | None = None

    def per_gpu_gbs(self, gpus: int) -> float:
        """GB/s one way for each GPU of a node with so many."""
        return self.gbs if self.gbs is not None else (self.node_gbs or 0.0) / max(1, gpus)


class CollectivesRow(Row, frozen=True, kw_only=True):
    """How fast collectives are over any link; the comments of links.toml say what each key means."""

    bus_share: float
    hop_s: float
    network_hop_s: float
    unknown_bytes_per_s: float
    overlapped: float


class MfuRow(Row, frozen=True, kw_only=True):
    """The MFU that published runs of a kind of model reach, in percent."""

    devices: tuple[str, ...]
    model: str
    low: float
    high: float
    figures: str


class Ambiguous(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A name that fits several devices of unlike memory."""

    typed: str
    choices: tuple[str, ...]


class DriverRow(Row, frozen=True, kw_only=True):
    """The oldest driver that runs programs of a CUDA release, and the devices that release can reach."""

    cuda_major: int
    oldest_driver: str
    oldest_capability: str


class TorchRow(Row, frozen=True, kw_only=True):
    """The releases of torch that trimtab is made for, both ends included."""

    oldest: str
    newest: str


class TorchBuildRow(Row, frozen=True, kw_only=True):
    """The devices that torch's own build for a CUDA release carries code for."""

    cuda: str
    capabilities: tuple[str, ...]
    ptx: bool


class BadRow(Row, frozen=True, kw_only=True):
    """Versions of something that are known to be bad for training."""

    what: str
    first: str
    fixed: str
    """The first that is good again."""
    trouble: str


def _read(name: str) -> Mapping[str, Any]:
    return tomllib.loads(files("trimtab.catalog").joinpath(name).read_text(encoding="utf-8"))


@cache
def devices() -> tuple[DeviceRow, ...]:
    """Every device row, in the file's order."""
    return msgspec.convert(_read("devices.toml")["device"], tuple[DeviceRow, ...])


@cache
def ambiguous() -> tuple[Ambiguous, ...]:
    """Names that are never guessed."""
    return msgspec.convert(_read("devices.toml")["ambiguous"], tuple[Ambiguous, ...])


@cache
def links() -> dict[str, LinkRow]:
    """Every kind of link, by name."""
    rows = msgspec.convert(_read("links.toml")["link"], tuple[LinkRow, ...])
    return {row.name: row for row in rows}


@cache
def fabrics() -> tuple[FabricRow, ...]:
    """The usual network between nodes, by device."""
    return msgspec.convert(_read("links.toml")["fabric"], tuple[FabricRow, ...])


@cache
def collectives() -> CollectivesRow:
    """How fast collectives are over any link."""
    return msgspec.convert(_read("links.toml")["collectives"], CollectivesRow)


@cache
def mfu_references() -> tuple[MfuRow, ...]:
    """What published runs reach, by device and kind of model."""
    return msgspec.convert(_read("mfu.toml")["reference"], tuple[MfuRow, ...])


@cache
def drivers() -> tuple[DriverRow, ...]:
    """What each CUDA release asks of drivers and devices, oldest release first."""
    return msgspec.convert(_read("versions.toml")["cuda"], tuple[DriverRow, ...])


@cache
def torch_releases() -> TorchRow:
    """The releases of torch that trimtab is made for."""
    return msgspec.convert(_read("versions.toml")["torch"], TorchRow)


@cache
def torch_builds() -> dict[str, TorchBuildRow]:
    """What torch's own builds carry, by CUDA release."""
    rows = msgspec.convert(_read("versions.toml")["torch_build"], tuple[TorchBuildRow, ...])
    return {row.cuda: row for row in rows}


@cache
def bad_versions() -> tuple[BadRow, ...]:
    """Versions that are known to be bad."""
    return msgspec.convert(_read("versions.toml")["bad"], tuple[BadRow, ...])
