"""Read the clock of this process's GPU now and then, for the step log; count the graphs that were compiled.

`trimtab doctor` compares measured steps with the plan, and needs these to tell a slow clock and recompilation
from other causes.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import GpuReading

INTERVAL_S = 10.0
"""The driver is asked this seldom: an answer takes a few milliseconds."""


class DeviceGauge:
    """The clock, utilization and throttle reasons of one GPU."""

    def __init__(
        self,
        uuid: str | None,
        read_all: Callable[[], tuple[GpuReading, ...]] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._uuid = uuid
        self._read_all = read_all or read_all_gauges
        self._now = now
        self._read_at: float | None = None
        self._last: dict[str, Any] = {}

    def read_fields(self) -> dict[str, Any]:
        """Return fields of a StepLine, at most INTERVAL_S old; empty if there is no such GPU."""
        if self._uuid is None:
            return {}
        now = self._now()
        if self._read_at is None or now - self._read_at >= INTERVAL_S:
            self._read_at = now
            self._last = self._ask()
        return self._last

    def _ask(self) -> dict[str, Any]:
        try:
            gauges = self._read_all()
        except Exception:  # noqa: BLE001 - no gauge is worth a run
            return {}
        mine = next((gauge for gauge in gauges if self._is_mine(gauge)), None)
        if mine is None:
            return {}
        return {
            "clock_hz": mine.clock_hz,
            "top_clock_hz": mine.top_clock_hz,
            "gpu_busy": mine.busy,
            "throttles": mine.throttles,
        }

    def _is_mine(self, gauge: GpuReading) -> bool:
        # The driver writes GPU-8f0c..., torch only 8f0c...
        return bool(gauge.uuid and self._uuid) and str(gauge.uuid).endswith(str(self._uuid))


def read_all_gauges() -> tuple[GpuReading, ...]:
    """Return the gauges of all GPUs of this machine."""
    from trimtab.probe.machine import this_machine
    from trimtab.probe.nvml import read_gauges

    return read_gauges(this_machine())[0]


def find_uuid(device: Any) -> str | None:
    """Return the UUID of a torch device; None if it is not an NVIDIA GPU."""
    if device.type != "cuda":
        return None
    import torch

    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


def count_compiled_graphs() -> int | None:
    """Return how many graphs torch.compile has compiled in this process; None if it was not used."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    if not counters or "stats" not in counters:
        return None
    return int(counters["stats"].get("unique_graphs", 0)) or None
