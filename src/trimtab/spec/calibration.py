"""Calibration: how long operations took on one device, and the host beside it."""

from __future__ import annotations

from trimtab.spec.base import Noun, below
from trimtab.spec.trace import Work


class Calibration(Noun, frozen=True, kw_only=True):
    """Measured once on a device and remembered. Columns `works` and `seconds` belong together."""

    device: str
    """The catalogue's row, or the driver's name where the catalogue has none."""
    versions: dict[str, str] = {}
    taken_on: str = ""
    works: tuple[Work, ...] = ()
    seconds: tuple[float, ...] = ()
    host: dict[str, float] = {}
    """Seconds of the host for each thing a step does: plain_s, forward_s, view_s, call_s, ..."""
    copy_bytes_per_s: dict[str, float] = {}
    """Between host and device: to_device, to_host."""
    link_bytes_per_s: dict[str, float] = {}
    """From one device of this machine to another, one way, as 0-1; empty with one device."""
    left_out: tuple[str, ...] = ()
    """What there was no time or memory for."""

    def faults(self) -> list[str]:
        """A time for each work, none negative."""
        wrong = below(0, **self.host)
        if len(self.works) != len(self.seconds):
            wrong.append(f"{len(self.works)} works have {len(self.seconds)} times")
        if any(second <= 0 for second in self.seconds):
            wrong.append("a time is not positive")
        return wrong
