"""Calibration: measured times of operations on one device and its host."""

from __future__ import annotations

from math import inf

from trimtab.spec.base import Noun, check_minimum
from trimtab.spec.trace import Work


class CollectiveTimes(Noun, frozen=True, kw_only=True):
    """Times of a collective that were measured between real processes, and the line through them."""

    collective: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send."""
    ranks: int
    nodes: int
    """Nodes that the ranks were on."""
    backend: str
    """nccl between GPUs, gloo between CPU processes."""
    sizes: tuple[int, ...] = ()
    """Bytes of all ranks together for all_gather and reduce_scatter, else bytes of each rank."""
    seconds: tuple[float, ...] = ()
    latency_s: float
    bytes_per_s: float

    def faults(self) -> list[str]:
        """Check that the line is possible and that each size has a time."""
        wrong = check_minimum(2, ranks=self.ranks) + check_minimum(1, nodes=self.nodes)
        wrong += check_minimum(0, latency_s=self.latency_s)
        if self.bytes_per_s <= 0:
            wrong.append(f"bytes_per_s is {self.bytes_per_s}, not positive")
        if len(self.sizes) != len(self.seconds):
            wrong.append(f"{len(self.sizes)} sizes have {len(self.seconds)} times")
        return wrong


CALIBRATION_FORMAT = 1
"""Changes when operations are described in another way, so that old times no longer match."""


class Calibration(Noun, frozen=True, kw_only=True):
    """Times measured once on a device and stored. `seconds` has one entry for each entry of `works`."""

    device: str
    """Name in the catalogue, or the driver's name if the catalogue does not have the device."""
    versions: dict[str, str] = {}
    taken_on: str = ""
    works: tuple[Work, ...] = ()
    seconds: tuple[float, ...] = ()
    host: dict[str, float] = {}
    """Host seconds for each kind of work in a step: plain_s, forward_s, view_s, call_s, ..."""
    copy_bytes_per_s: dict[str, float] = {}
    """Copy bandwidth between host and device: to_device, to_host."""
    link_bytes_per_s: dict[str, float] = {}
    """One-way bandwidth between two devices of this machine, by pair such as 0-1; empty with one device."""
    collectives: tuple[CollectiveTimes, ...] = ()
    """Collectives that `trimtab calibrate --links` measured; empty if it did not run."""
    left_out: tuple[str, ...] = ()
    """Measurements that were skipped for lack of time or memory."""
    owner: str = ""
    """Who measured it, as they name themselves; empty: they did not say."""
    imported_on: str = ""
    """Day of `trimtab calibrate --import`; empty: it was measured on this machine."""
    format: int = CALIBRATION_FORMAT

    def faults(self) -> list[str]:
        """Check that each work has a positive time."""
        wrong = check_minimum(0, **self.host)
        if self.format != CALIBRATION_FORMAT:
            wrong.append(
                f"its format is {self.format}, and this version of trimtab reads {CALIBRATION_FORMAT}"
            )
        if len(self.works) != len(self.seconds):
            wrong.append(f"{len(self.works)} works have {len(self.seconds)} times")
        if not all(0 < second < inf for second in self.seconds):
            wrong.append("a time is not positive and finite")
        return wrong
