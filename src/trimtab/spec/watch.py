"""Gauge, WatchedRun, Advice and Sample: devices and runs at one moment, and what would make a run faster."""

from __future__ import annotations

from trimtab.spec.base import Noun, below
from trimtab.spec.hardware import DeviceProcess
from trimtab.spec.run import Incident


class Gauge(Noun, frozen=True, kw_only=True):
    """One GPU, or one slice of it, at one moment. Unknown is None."""

    key: str
    """As the driver's calls name it: "gpu0", "gpu0/mig1"."""
    index: int
    """Number of the GPU on this machine."""
    name: str = ""
    uuid: str | None = None
    memory_bytes: int | None = None
    """What processes can use."""
    used_bytes: int | None = None
    busy: float | None = None
    """Share of the time in which some kernel ran, from 0 to 1; says nothing of how well it used the GPU."""
    memory_busy: float | None = None
    """Share of the time in which the GPU's memory was read or written."""
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_hz: float | None = None
    top_clock_hz: float | None = None
    throttles: tuple[str, ...] = ()
    """What holds its clock down, in the driver's words."""
    processes: tuple[DeviceProcess, ...] | None = None
    fault: str = ""
    """Why it does not answer; empty where it does."""

    def faults(self) -> list[str]:
        """Figures are not negative."""
        return below(
            0,
            index=self.index,
            memory_bytes=self.memory_bytes,
            used_bytes=self.used_bytes,
            busy=self.busy,
            memory_busy=self.memory_busy,
            power_w=self.power_w,
            clock_hz=self.clock_hz,
        )


class Advice(Noun, frozen=True, kw_only=True):
    """Why a run is slower than it could be, or in danger, and what to do; from measurements alone."""

    kind: str
    """data-bound, launch-bound, memory-bound, throttled, full, shared, uneven or slow."""
    where: str
    """The GPU that it is about, such as "GPU 0"; empty where it is about the run."""
    what: str
    """With the numbers that it rests on."""
    cure: str

    def faults(self) -> list[str]:
        """Nothing but the place is empty."""
        return [f"{part} is empty" for part in ("kind", "what", "cure") if not getattr(self, part).strip()]


class WatchedRun(Noun, frozen=True, kw_only=True):
    """A run at one moment. Unknown is None."""

    folder: str
    job: str = ""
    state: str
    """starting, running, stalled, done, ended or gone."""
    why: str = ""
    """What the state rests on, where it is not plain."""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    step_s: float | None = None
    """Median of the last steps."""
    samples_per_s: float | None = None
    """Median of the last steps."""
    recent: int | None = None
    """How many steps those are."""
    planned_samples_per_s: float | None = None
    mfu: float | None = None
    mfu_rating: str | None = None
    reserved_bytes: int | None = None
    """By the allocator of the first rank."""
    planned_reserved_bytes: int | None = None
    data_wait: float | None = None
    """Share of the last steps that waited for data."""
    left_s: float | None = None
    silent_s: float | None = None
    """Since the last line of the log."""
    events: tuple[Incident, ...] = ()
    """The last ones."""
    devices: tuple[str, ...] = ()
    """Keys of the GPUs of this machine that are known to be its."""
    advice: tuple[Advice, ...] = ()

    def faults(self) -> list[str]:
        """Counts start at 0."""
        return below(0, step=self.step, steps=self.steps)


class Sample(Noun, frozen=True, kw_only=True):
    """Everything that is watched, at one moment."""

    at_s: float
    """Seconds since 1970."""
    gpus: tuple[Gauge, ...] = ()
    no_gpus: str = ""
    """Why there are none; empty where there are some."""
    runs: tuple[WatchedRun, ...] = ()
