"""What the GPUs of this machine do at this moment, as NVML tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.probe.nvml import CLOCK_SM, NO_PERMISSION, _may, _memory, _mig_is_on, _processes, _scaled
from trimtab.probe.world import NvmlFault
from trimtab.spec import Gauge

if TYPE_CHECKING:
    from trimtab.probe.world import World

TEMPERATURE_OF_CHIP = 0
REASONS = {
    0x2: "application clocks setting",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clock setting",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons, as nvml.h has them; 0x1, an idle GPU, is no reason."""
MOST_SLICES = 8


def gauges(world: World) -> tuple[tuple[Gauge, ...], str]:
    """Every GPU in PCI order, one that is cut into slices as its slices; and why there are none."""
    try:
        world.nvml("nvmlInit")
        count = int(world.nvml("nvmlDeviceGetCount"))
    except NvmlFault as fault:
        return (), fault.text
    found: list[Gauge] = []
    for index in range(count):
        try:
            found += _read(world, index)
        except NvmlFault as fault:
            # A cgroup hides the other jobs' GPUs this way: they are none of our business.
            if fault.code != NO_PERMISSION:
                found.append(Gauge(key=f"gpu{index}", index=index, fault=fault.text))
    return tuple(found), "" if found else "the driver shows none"


def _read(world: World, index: int) -> list[Gauge]:
    key = f"gpu{index}"
    if not _mig_is_on(world, key):
        return [_gauge(world, key, index)]
    slices = [f"{key}/mig{number}" for number in range(MOST_SLICES)]
    there = [one for one in slices if _may(world, "nvmlDeviceGetUUID", one) is not None]
    return [_gauge(world, one, index) for one in there] or [_gauge(world, key, index)]


def _gauge(world: World, key: str, index: int) -> Gauge:
    memory = _memory(world, key)
    rates = _may(world, "nvmlDeviceGetUtilizationRates", key) or {}
    whole = key.partition("/")[0]
    return Gauge(
        key=key,
        index=index,
        name=str(_may(world, "nvmlDeviceGetName", key) or _may(world, "nvmlDeviceGetName", whole) or ""),
        uuid=_may(world, "nvmlDeviceGetUUID", key),
        memory_bytes=memory.usable,
        used_bytes=None if memory.free is None else max(0, memory.usable - memory.free),
        busy=_share(rates.get("gpu")),
        memory_busy=_share(rates.get("memory")),
        # Power, heat and clocks belong to the whole GPU, of which a slice is a part.
        power_w=_scaled(_may(world, "nvmlDeviceGetPowerUsage", whole), 1e-3),
        power_limit_w=_scaled(_may(world, "nvmlDeviceGetPowerManagementLimit", whole), 1e-3),
        temperature_c=_may(world, "nvmlDeviceGetTemperature", whole, TEMPERATURE_OF_CHIP),
        clock_hz=_scaled(_may(world, "nvmlDeviceGetClockInfo", whole, CLOCK_SM), 1e6),
        top_clock_hz=_scaled(_may(world, "nvmlDeviceGetMaxClockInfo", whole, CLOCK_SM), 1e6),
        throttles=_throttles(world, whole),
        processes=_processes(world, key),
    )


def _share(percent: Any) -> float | None:
    """A share of 1; drivers answer 2**32 - 1 where they do not know."""
    return percent / 100 if isinstance(percent, int | float) and 0 <= percent <= 100 else None  # noqa: PLR2004


def _throttles(world: World, key: str) -> tuple[str, ...]:
    bits = _may(world, "nvmlDeviceGetCurrentClocksEventReasons", key)
    if bits is None:
        # Drivers before R535 know it by another name.
        bits = _may(world, "nvmlDeviceGetCurrentClocksThrottleReasons", key)
    return tuple(name for bit, name in REASONS.items() if isinstance(bits, int) and bits & bit)
