"""Why a run sits low, from what was measured on each of its GPUs; never from a sum over them.

A cause is only named where the measurement shows that cause. A GPU that is busy all the time and slow is not
"data-bound" because its memory happens to be full, and a run of four GPUs is not roomy because three of them
are.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from trimtab.spec import Advice
from trimtab.units import format_bytes, format_duration, format_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trimtab.spec import GpuReading, Plan, WatchedRun

LOW_RATINGS = ("poor", "fair")
SLOW = 0.85
"""Of the plan's speed: further below than the predictor's own error, see `trimtab exam`."""
WAITING = 0.1
"""Of a step: a tenth of it spent on waiting for data is worth a worker or two."""
IDLE = 0.75
"""Of the time: a GPU that runs a kernel less often than this waits for someone."""
ALWAYS_BUSY = 0.9
MEMORY_BUSY = 0.6
"""Of the time: streaming kernels reach 0.8 and more, large matrix products stay below a half."""
FULL = 0.95
"""Of the memory: the next larger batch or an evaluation will not fit."""
ROOMY = 0.6
UNEVEN = 0.2
"""Difference of two GPUs of one run, in shares of the time."""
HELD_DOWN = 0.9
"""Of the highest clock: a cap on power that costs less than this is how large GPUs run anyway."""
HOT = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown", "power brake")
"""Reasons that are a fault of the machine, however little they cost now."""
ENOUGH = 3
"""Looks at a GPU, at least, before something is said of it."""
STEPS_ENOUGH = 5
"""Steps, the same."""


def advise(
    run: WatchedRun, plan: Plan | None, looks: Mapping[str, Sequence[GpuReading]], *, steps: int
) -> tuple[Advice, ...]:
    """Return advice about a running run.

    `looks` are the last looks at each of its GPUs, by key, and `steps` how many of its steps were seen.
    """
    if run.state != "running" or steps < STEPS_ENOUGH:
        return ()
    seen = {key: list(looks[key]) for key in run.devices if len(looks.get(key, ())) >= ENOUGH}
    advice = [*_advise_throttling(seen), *_advise_full(seen), *_advise_shared(seen)]
    if is_low(run):
        waiting = _advise_data(run, plan)
        advice += waiting or [*_advise_launches(run, seen), *_advise_uneven(seen), *_advise_memory(run, seen)]
        if not advice:
            advice = _advise_slow(run)
    return tuple(advice)


def is_low(run: WatchedRun) -> bool:
    """Return whether a run is slower than it should be: by its rating, or by its plan.

    Where neither is known, it may be.
    """
    is_rated = run.mfu_rating is not None or bool(run.planned_samples_per_s)
    return not is_rated or run.mfu_rating in LOW_RATINGS or _is_behind(run)


def _is_behind(run: WatchedRun) -> bool:
    if not run.planned_samples_per_s or run.samples_per_s is None:
        return False
    return run.samples_per_s < SLOW * run.planned_samples_per_s


def _advise_data(run: WatchedRun, plan: Plan | None) -> list[Advice]:
    if run.data_wait is None or run.data_wait < WAITING or not run.step_s:
        return []
    workers = plan.choice.workers if plan is not None else None
    now = f" (now {workers} a process)" if workers is not None else ""
    return [
        Advice(
            kind="data-bound",
            where="",
            what=f"{run.data_wait:.0%} of a step of {format_duration(run.step_s)} waits for data",
            cure=f"use more data loader workers{now}, or prepare the samples beforehand",
        )
    ]


def _advise_launches(run: WatchedRun, seen: Mapping[str, list[GpuReading]]) -> list[Advice]:
    """Advise on GPUs that are idle though data is there: the host launches too slowly."""
    advice = []
    waits = "" if run.data_wait is None else f", and {run.data_wait:.0%} of a step waits for data"
    shares = [share for looks in seen.values() if (share := _full_share(looks)) is not None]
    fullest = max(shares, default=None)
    room = fullest is not None and fullest < ROOMY
    larger = f"; a larger micro-batch has room, the fullest GPU is {fullest:.0%} full" if room else ""
    for key, looks in seen.items():
        busy = _mean(look.busy for look in looks)
        if busy is not None and busy < IDLE:
            advice.append(
                Advice(
                    kind="launch-bound",
                    where=_device_name(key),
                    what=f"runs a kernel {busy:.0%} of the time{waits}: it waits for the host to launch",
                    cure=f"compile, so that there are fewer and larger kernels{larger}",
                )
            )
    return advice


def _advise_memory(run: WatchedRun, seen: Mapping[str, list[GpuReading]]) -> list[Advice]:
    """Advise on GPUs that are busy moving bytes, at a low share of their peak."""
    advice = []
    for key, looks in seen.items():
        busy, moving = _mean(look.busy for look in looks), _mean(look.memory_busy for look in looks)
        if busy is None or moving is None or busy < ALWAYS_BUSY or moving < MEMORY_BUSY:
            continue
        rated = f"MFU {run.mfu:.1%}" if run.mfu is not None else "its speed"
        advice.append(
            Advice(
                kind="memory-bound",
                where=_device_name(key),
                what=f"is busy {busy:.0%} of the time, with moving bytes {moving:.0%} of it; {rated} is low",
                cure="compile, which fuses passes over memory, or use bf16 if it is not in use",
            )
        )
    return advice


def _advise_throttling(seen: Mapping[str, list[GpuReading]]) -> list[Advice]:
    advice = []
    for key, looks in seen.items():
        last = looks[-1]
        is_slowed = bool(
            last.clock_hz and last.top_clock_hz and last.clock_hz < HELD_DOWN * last.top_clock_hz
        )
        reasons = [
            throttle
            for throttle in last.throttles
            if throttle in HOT or (throttle == "power cap" and is_slowed)
        ]
        lasting = [reason for reason in reasons if all(reason in look.throttles for look in looks[-ENOUGH:])]
        if lasting:
            advice.append(
                Advice(
                    kind="throttled",
                    where=_device_name(key),
                    what=f"is held down by {' and '.join(lasting)}{_format_clocks(last)}",
                    cure="look at its cooling and at its power limit (nvidia-smi -q -d PERFORMANCE,POWER)",
                )
            )
    return advice


def _format_clocks(last: GpuReading) -> str:
    parts = []
    if last.clock_hz and last.top_clock_hz:
        parts.append(f"{last.clock_hz / 1e6:.0f} of {last.top_clock_hz / 1e6:.0f} MHz")
    if last.power_w and last.power_limit_w:
        parts.append(f"{last.power_w:.0f} of {last.power_limit_w:.0f} W")
    if last.temperature_c is not None:
        parts.append(f"{last.temperature_c:.0f} C")
    return f": {', '.join(parts)}" if parts else ""


def _advise_full(seen: Mapping[str, list[GpuReading]]) -> list[Advice]:
    advice = []
    for key, looks in seen.items():
        last, share = looks[-1], _full_share(looks)
        if share is not None and share >= FULL and last.used_bytes is not None and last.memory_bytes:
            advice.append(
                Advice(
                    kind="full",
                    where=_device_name(key),
                    what=f"is {share:.0%} full: {format_bytes(last.used_bytes)} of "
                    f"{format_bytes(last.memory_bytes)}",
                    cure="a longer batch may not fit; use a smaller micro-batch, the global batch stays",
                )
            )
    return advice


def _advise_shared(seen: Mapping[str, list[GpuReading]]) -> list[Advice]:
    """Advise on other processes on the GPU of a run."""
    advice = []
    for key, looks in seen.items():
        several = looks[-1].processes or ()
        if len(several) > 1:
            listed = ", ".join(
                f"{process.name or 'process'} {process.pid}"
                + (f" ({format_bytes(process.used_bytes)})" if process.used_bytes else "")
                for process in several[:4]
            )
            advice.append(
                Advice(
                    kind="shared",
                    where=_device_name(key),
                    what=f"has {len(several)} processes on it: {listed}",
                    cure="end what is not needed there, or give the run another GPU",
                )
            )
    return advice


def _advise_uneven(seen: Mapping[str, list[GpuReading]]) -> list[Advice]:
    """Advise on one GPU that does much more than another, which waits for it."""
    busy = {
        key: share for key, looks in seen.items() if (share := _mean(look.busy for look in looks)) is not None
    }
    if len(busy) < 2:  # noqa: PLR2004 - one is even with itself
        return []
    most, least = max(busy, key=lambda key: busy[key]), min(busy, key=lambda key: busy[key])
    if busy[most] - busy[least] < UNEVEN:
        return []
    return [
        Advice(
            kind="uneven",
            where=_device_name(least),
            what=f"is busy {busy[least]:.0%} of the time, and {_device_name(most)} {busy[most]:.0%}: it "
            "waits",
            cure="give the GPUs equal work, or plan again with both named, so that shares follow speed",
        )
    ]


def _advise_slow(run: WatchedRun) -> list[Advice]:
    """Say that the run is slow and that no measurement shows why."""
    if not _is_behind(run) or run.samples_per_s is None or not run.planned_samples_per_s:
        return []
    share = run.samples_per_s / run.planned_samples_per_s
    return [
        Advice(
            kind="slow",
            where="",
            what=f"{format_figure(run.samples_per_s)} samples/s are {share:.0%} of the plan's",
            cure="nothing measured here says why; `trimtab profile` sets a few steps against the prediction",
        )
    ]


def _full_share(looks: Sequence[GpuReading]) -> float | None:
    last = looks[-1]
    return last.used_bytes / last.memory_bytes if last.used_bytes is not None and last.memory_bytes else None


def _mean(values: object) -> float | None:
    numbers = [value for value in values if value is not None]  # type: ignore[attr-defined]
    return statistics.fmean(numbers) if numbers else None


def _device_name(key: str) -> str:
    """Return the name of a device for people.

    >>> _device_name("gpu0"), _device_name("gpu1/mig2")
    ('GPU 0', 'GPU 1 slice 2')
    """
    return key.replace("gpu", "GPU ").replace("/mig", " slice ")
