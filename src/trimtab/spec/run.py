"""What a run really used, why an attempt at it ended, and what came of it in all."""

from __future__ import annotations

from enum import StrEnum

from trimtab.spec.base import Noun, below
from trimtab.spec.hardware import DeviceProcess, Versions
from trimtab.spec.setting import Setting


class Measurement(Noun, frozen=True, kw_only=True):
    """What a job really used under one setting, on named hardware."""

    job: str
    setting: Setting
    device: str
    """What the driver calls it."""
    versions: Versions
    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int | None = None
    step_s: float | None = None
    """Median over the measured steps."""
    samples_per_s: float | None = None
    taken_on: str = ""
    """ISO date."""

    def faults(self) -> list[str]:
        """Live tensors fit in what is reserved."""
        wrong = below(0, allocated_bytes=self.allocated_bytes, step_s=self.step_s)
        if self.allocated_bytes > self.reserved_bytes:
            wrong.append(
                f"allocated_bytes {self.allocated_bytes} is above reserved_bytes {self.reserved_bytes}"
            )
        return wrong


class IncidentKind(StrEnum):
    """Why an attempt ended or was disturbed."""

    OUT_OF_MEMORY = "out-of-memory"
    NOT_A_NUMBER = "not-a-number"
    LOSS_SPIKE = "loss-spike"
    LOST_RANK = "lost-rank"
    PREEMPTION = "preemption"
    INTERRUPT = "interrupt"
    """Somebody pressed Ctrl-C, or closed the terminal."""
    TIME_LIMIT = "time-limit"
    HANG = "hang"
    BAD_CHECKPOINT = "bad-checkpoint"
    FULL_DISK = "full-disk"
    RESIZE = "resize"
    REQUEUE = "requeue"
    """The scheduler started the job again."""
    RESUME = "resume"
    """An attempt goes on from a checkpoint."""
    MICRO_BATCH = "micro-batch"
    """Another micro-batch between two steps; the global batch stays."""
    COMPILE = "compile"
    STAGE = "stage"
    """A stage of a curriculum begins with the weights of the one before, or has ended."""
    FAILED = "failed"
    """An error with a cause that is known ended the attempt."""
    BUG = "bug"


class Incident(Noun, frozen=True, kw_only=True):
    """What happened, when, why, and what was done about it."""

    kind: IncidentKind
    at_s: float
    """Seconds since 1970."""
    step: int | None = None
    """Optimizer step it struck at."""
    rank: int | None = None
    why: str
    done: str
    """The answer to it."""

    @property
    def text(self) -> str:
        """As `trimtab train` prints it; `doctor` knows these lines.

        >>> Incident(kind=IncidentKind.RESUME, at_s=0.0, step=4, why="it was found", done="it goes on").text
        'resume at step 4: it was found; it goes on'
        """
        return f"{self.kind}{'' if self.step is None else f' at step {self.step}'}: {self.why}; {self.done}"

    def faults(self) -> list[str]:
        """Steps and ranks count from zero."""
        return below(0, step=self.step, rank=self.rank, at_s=self.at_s)


class Attempt(Noun, frozen=True, kw_only=True):
    """One life of a run, between two restarts; attempt.json holds the last one."""

    attempt: int = 1
    procs: int = 1
    nodes: int = 1
    state: str = "running"
    """"running" until the attempt has said that it ended."""
    began_s: float = 0.0
    """Seconds since 1970."""
    at_s: float = 0.0
    """When this was noted."""
    steps: int | None = None
    """Optimizer steps of the whole run; None until the job has said."""
    earlier_s: float = 0.0
    """What the attempts before this one took together."""
    earlier_proc_s: float = 0.0
    """The same, times the processes that each of them had."""
    job_id: str | None = None
    """Of the scheduler; None where nobody scheduled it."""
    restarts: int = 0
    """How often the scheduler had started the job again."""
    host: str = ""
    pid: int = 0
    """The process that ends the whole run when it is asked to."""

    def faults(self) -> list[str]:
        """An attempt has a number and a process."""
        return below(1, attempt=self.attempt, procs=self.procs, nodes=self.nodes, steps=self.steps) + below(
            0,
            began_s=self.began_s,
            at_s=self.at_s,
            earlier_s=self.earlier_s,
            earlier_proc_s=self.earlier_proc_s,
            restarts=self.restarts,
        )


class Check(Noun, frozen=True, kw_only=True):
    """One quantity as it was predicted and as it came; unknown is None."""

    what: str
    predicted: float | None = None
    real: float | None = None

    derived = ("error",)

    @property
    def error(self) -> float | None:
        """Predicted over real, less one; None where either is unknown.

        >>> Check(what="step_s", predicted=1.1, real=1.0).error
        0.1
        """
        if self.predicted is None or not self.real:
            return None
        return round(self.predicted / self.real - 1, 6)


class Summary(Noun, frozen=True, kw_only=True):
    """What came of a run that was trained to its end, over all its attempts."""

    job: str
    device: str | None = None
    """What the driver calls it; None for a run on the CPU."""
    gpus: int
    """Of the last attempt; 0 for a run on the CPU."""
    processes: int
    nodes: int = 1
    gpus_there: int | None = None
    """On those nodes, as far as it is known."""
    strategy: str
    precision: str
    micro_batch: int
    accumulation: int
    global_batch: int
    steps: int
    samples: int
    """That optimizer steps have seen, each epoch anew."""
    epochs: float
    loss: float | None = None
    """Of the last step."""
    runtime_s: float
    """From the first start to the end, less the time between attempts."""
    steps_s: float
    """Of that, in optimizer steps that count."""
    gpu_hours: float = 0.0
    """That the run has held devices for, start-up and lost work included."""
    attempts: int = 1
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    checks: tuple[Check, ...] = ()
    """Predicted against real: of the median step, where it is of steps."""
    median_of: int = 0
    """How many steps that median is of: those of the last attempt's processes, without the first few."""
    incidents: dict[str, int] = {}
    """How often what happened."""
    ended_on: str = ""
    """ISO date and time."""

    derived = ("samples_per_s", "minutes_per_epoch", "gpus_free")

    @property
    def samples_per_s(self) -> float | None:
        """While steps were taken: over all of them, the first ones included."""
        return self.samples / self.steps_s if self.steps_s else None

    @property
    def minutes_per_epoch(self) -> float | None:
        """At that speed."""
        return self.steps_s / 60 / self.epochs if self.epochs else None

    @property
    def gpus_free(self) -> int | None:
        """That the run has left to others on its nodes."""
        return None if self.gpus_there is None else max(0, self.gpus_there - self.gpus)

    def faults(self) -> list[str]:
        """Something was trained."""
        return below(1, processes=self.processes, nodes=self.nodes, global_batch=self.global_batch) + below(
            0,
            gpus=self.gpus,
            gpus_there=self.gpus_there,
            steps=self.steps,
            median_of=self.median_of,
            samples=self.samples,
            epochs=self.epochs,
            runtime_s=self.runtime_s,
            steps_s=self.steps_s,
            gpu_hours=self.gpu_hours,
        )


# Jobs as a scheduler has them, runs as their folders have them, and both together.


class QueuedJob(Noun, frozen=True, kw_only=True):
    """One job as Slurm tells of it. Unknown is None."""

    job_id: str
    name: str = ""
    user: str = ""
    partition: str = ""
    state: str
    """Slurm's word, such as PENDING."""
    reason: str | None = None
    """Slurm's word for why it does not run, or why it ended."""
    num_nodes: int | None = None
    nodes: tuple[str, ...] = ()
    """Those it has; empty while it waits."""
    ran_s: float | None = None
    limit_s: float | None = None
    """None where there is no limit."""
    starts: str | None = None
    """When it started, or is expected to, as Slurm writes it."""
    comment: str = ""
    script: str | None = None
    work_dir: str | None = None
    output: str | None = None
    """The file that its output goes to."""
    restarts: int | None = None

    def faults(self) -> list[str]:
        """A job has a number and a state."""
        wrong = below(0, num_nodes=self.num_nodes, ran_s=self.ran_s, restarts=self.restarts)
        return wrong + [f"{name} is empty" for name in ("job_id", "state") if not getattr(self, name)]


class Headway(Noun, frozen=True, kw_only=True):
    """How far a run has come, by its folder."""

    folder: str
    job: str | None = None
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    """Over the last steps."""
    recent: int | None = None
    """How many steps those are."""
    left_s: float | None = None
    """At that speed."""
    processes: int | None = None
    attempt: int | None = None
    last_incident: Incident | None = None

    def faults(self) -> list[str]:
        """Counts do not go below nothing."""
        return below(0, step=self.step, left_s=self.left_s)


class JobView(Noun, frozen=True, kw_only=True):
    """One job of ours: where it stands, and how far its run has come."""

    id: str
    """The scheduler's number, or `local-PID` for a run on this machine."""
    kind: str
    """slurm or local."""
    state: str
    """pending, running, ended, or what the scheduler calls it."""
    why: str = ""
    """Plain words for the state, where there is more to say."""
    queued: QueuedJob | None = None
    """None for a run on this machine."""
    run: Headway | None = None
    """None until its folder is there."""
    log: str | None = None
    """The file that its output goes to, where it is known."""
    tail: tuple[str, ...] = ()
    """The last lines of that file."""


# Gauge, WatchedRun, Advice and Sample: devices and runs at one moment, and what would make a run faster.


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
