"""Runs: measurements, incidents, attempts, summaries, queued jobs, and live readings."""

from __future__ import annotations

from enum import StrEnum

from trimtab.spec.base import Noun, check_minimum
from trimtab.spec.hardware import DeviceProcess, Versions
from trimtab.spec.setting import Setting


class Measurement(Noun, frozen=True, kw_only=True):
    """Measured memory and speed of a job with one setting, on named hardware."""

    job: str
    setting: Setting
    device: str
    """The driver's name."""
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
        """Check that allocated memory is not above reserved memory."""
        wrong = check_minimum(0, allocated_bytes=self.allocated_bytes, step_s=self.step_s)
        if self.allocated_bytes > self.reserved_bytes:
            wrong.append(
                f"allocated_bytes {self.allocated_bytes} is above reserved_bytes {self.reserved_bytes}"
            )
        return wrong


class IncidentKind(StrEnum):
    """Why an attempt ended or was interrupted."""

    OUT_OF_MEMORY = "out-of-memory"
    NOT_A_NUMBER = "not-a-number"
    LOSS_SPIKE = "loss-spike"
    LOST_RANK = "lost-rank"
    PREEMPTION = "preemption"
    INTERRUPT = "interrupt"
    """The user pressed Ctrl-C or closed the terminal."""
    TIME_LIMIT = "time-limit"
    HANG = "hang"
    BAD_CHECKPOINT = "bad-checkpoint"
    FULL_DISK = "full-disk"
    RESIZE = "resize"
    REQUEUE = "requeue"
    """The scheduler restarted the job."""
    RESUME = "resume"
    """An attempt continues from a checkpoint."""
    MICRO_BATCH = "micro-batch"
    """The micro-batch changed between two steps; the global batch did not."""
    COMPILE = "compile"
    PIPELINE = "pipeline"
    """What stages are balanced by, or what all of them hold, if trimtab could not follow the loss."""
    STAGE = "stage"
    """A stage of a curriculum started with the weights of the previous one, or ended."""
    FAILED = "failed"
    """An error with a known cause ended the attempt."""
    BUG = "bug"


class Incident(Noun, frozen=True, kw_only=True):
    """An event in a run: what happened, when, why, and what trimtab did."""

    kind: IncidentKind
    at_s: float
    """Seconds since 1970."""
    step: int | None = None
    """Optimizer step at which it happened."""
    rank: int | None = None
    why: str
    done: str
    """What trimtab did."""

    @property
    def text(self) -> str:
        """Line that `trimtab train` prints; `doctor` recognizes these lines.

        >>> Incident(kind=IncidentKind.RESUME, at_s=0.0, step=4, why="it was found", done="it goes on").text
        'resume at step 4: it was found; it goes on'
        """
        return f"{self.kind}{'' if self.step is None else f' at step {self.step}'}: {self.why}; {self.done}"

    def faults(self) -> list[str]:
        """Check that steps and ranks are not negative."""
        return check_minimum(0, step=self.step, rank=self.rank, at_s=self.at_s)


class Attempt(Noun, frozen=True, kw_only=True):
    """One attempt at a run, between two restarts; attempt.json holds the last one."""

    attempt: int = 1
    procs: int = 1
    nodes: int = 1
    state: str = "running"
    """"running" until the attempt has reported its end."""
    began_s: float = 0.0
    """Seconds since 1970."""
    at_s: float = 0.0
    """When this was written, in seconds since 1970."""
    steps: int | None = None
    """Optimizer steps of the whole run; None until known."""
    earlier_s: float = 0.0
    """Total duration of the earlier attempts."""
    earlier_proc_s: float = 0.0
    """Total process-seconds of the earlier attempts: duration times processes."""
    job_id: str | None = None
    """Job id of the scheduler; None without a scheduler."""
    restarts: int = 0
    """How often the scheduler has restarted the job."""
    host: str = ""
    pid: int = 0
    """Process to signal in order to end the whole run."""

    def faults(self) -> list[str]:
        """Check that counts are at least 1 and times are not negative."""
        return check_minimum(
            1, attempt=self.attempt, procs=self.procs, nodes=self.nodes, steps=self.steps
        ) + check_minimum(
            0,
            began_s=self.began_s,
            at_s=self.at_s,
            earlier_s=self.earlier_s,
            earlier_proc_s=self.earlier_proc_s,
            restarts=self.restarts,
        )


class PredictionCheck(Noun, frozen=True, kw_only=True):
    """Predicted and real value of one quantity; unknown is None."""

    what: str
    predicted: float | None = None
    real: float | None = None

    derived = ("error",)

    @property
    def error(self) -> float | None:
        """Relative error: predicted / real - 1; None if either is unknown.

        >>> PredictionCheck(what="step_s", predicted=1.1, real=1.0).error
        0.1
        """
        if self.predicted is None or not self.real:
            return None
        return round(self.predicted / self.real - 1, 6)


class Summary(Noun, frozen=True, kw_only=True):
    """Summary of a completed run, over all its attempts."""

    job: str
    device: str | None = None
    """The driver's name of the device; None for a run on the CPU."""
    gpus: int
    """GPUs of the last attempt; 0 for a run on the CPU."""
    processes: int
    nodes: int = 1
    gpus_there: int | None = None
    """GPUs on the nodes of the run; None if unknown."""
    strategy: str
    precision: str
    micro_batch: int
    accumulation: int
    global_batch: int
    steps: int
    samples: int
    """Samples in all optimizer steps; every epoch counts them again."""
    epochs: float
    loss: float | None = None
    """Loss of the last step."""
    runtime_s: float
    """From the first start to the end, without the time between attempts."""
    steps_s: float
    """Part of `runtime_s` spent in optimizer steps that count."""
    gpu_hours: float = 0.0
    """GPU hours of the run, including start-up and lost work."""
    attempts: int = 1
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    checks: tuple[PredictionCheck, ...] = ()
    """Predicted and real values; for step times, the real value is the median."""
    median_of: int = 0
    """Number of steps in that median: those with the last attempt's processes, without the first few."""
    incidents: dict[str, int] = {}
    """Number of incidents of each kind."""
    ended_on: str = ""
    """ISO date and time."""

    derived = ("samples_per_s", "minutes_per_epoch", "gpus_free")

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of all steps, including the first ones."""
        return self.samples / self.steps_s if self.steps_s else None

    @property
    def minutes_per_epoch(self) -> float | None:
        """Minutes per epoch at that speed."""
        return self.steps_s / 60 / self.epochs if self.epochs else None

    @property
    def gpus_free(self) -> int | None:
        """GPUs on the nodes of the run that it did not use."""
        return None if self.gpus_there is None else max(0, self.gpus_there - self.gpus)

    def faults(self) -> list[str]:
        """Check that counts and times are possible."""
        return check_minimum(
            1, processes=self.processes, nodes=self.nodes, global_batch=self.global_batch
        ) + check_minimum(
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


# Jobs: state from the scheduler, progress from the run folder, and both together.


class QueuedJob(Noun, frozen=True, kw_only=True):
    """One job as Slurm reports it. Unknown is None."""

    job_id: str
    name: str = ""
    user: str = ""
    partition: str = ""
    state: str
    """Slurm's state, such as PENDING."""
    reason: str | None = None
    """Slurm's reason why it does not run, or why it ended."""
    num_nodes: int | None = None
    nodes: tuple[str, ...] = ()
    """Names of its nodes; empty while it waits."""
    ran_s: float | None = None
    limit_s: float | None = None
    """Time limit; None without a limit."""
    starts: str | None = None
    """Start time, real or expected, as Slurm writes it."""
    comment: str = ""
    script: str | None = None
    work_dir: str | None = None
    output: str | None = None
    """File of its output."""
    restarts: int | None = None

    def faults(self) -> list[str]:
        """Check that the job has an id and a state."""
        wrong = check_minimum(0, num_nodes=self.num_nodes, ran_s=self.ran_s, restarts=self.restarts)
        return wrong + [f"{name} is empty" for name in ("job_id", "state") if not getattr(self, name)]


class JobProgress(Noun, frozen=True, kw_only=True):
    """Progress of a run, read from its folder."""

    folder: str
    job: str | None = None
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    """Throughput of the last steps."""
    recent: int | None = None
    """Number of last steps in the throughput."""
    left_s: float | None = None
    """Remaining seconds at that speed."""
    processes: int | None = None
    attempt: int | None = None
    last_incident: Incident | None = None
    damage: tuple[str, ...] = ()
    """What the files of its folder have lost, such as the end of a cut one."""

    def faults(self) -> list[str]:
        """Check that counts are not negative."""
        return check_minimum(0, step=self.step, left_s=self.left_s)


class JobView(Noun, frozen=True, kw_only=True):
    """One trimtab job: its state, and the progress of its run."""

    id: str
    """Job id of the scheduler, or `local-PID` for a run on this machine."""
    kind: str
    """slurm or local."""
    state: str
    """pending, running, ended, or the scheduler's own state."""
    why: str = ""
    """Explanation of the state, if needed."""
    queued: QueuedJob | None = None
    """None for a run on this machine."""
    run: JobProgress | None = None
    """None until the run folder exists."""
    log: str | None = None
    """File of its output; None if unknown."""
    tail: tuple[str, ...] = ()
    """The last lines of that file."""


# Live view: readings of GPUs and runs at one moment, and advice for faster runs.


class GpuReading(Noun, frozen=True, kw_only=True):
    """State of one GPU, or of one MIG slice, at one moment. Unknown is None."""

    key: str
    """Key of the device: "gpu0", "gpu0/mig1"."""
    index: int
    """Number of the GPU on this machine."""
    name: str = ""
    uuid: str | None = None
    memory_bytes: int | None = None
    """Memory that processes can use."""
    used_bytes: int | None = None
    busy: float | None = None
    """Share of time in which any kernel ran, from 0 to 1; not a measure of how well it used the GPU."""
    memory_busy: float | None = None
    """Share of time in which the GPU's memory was read or written."""
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None
    clock_hz: float | None = None
    top_clock_hz: float | None = None
    throttles: tuple[str, ...] = ()
    """Reasons for a reduced clock, in the driver's words."""
    processes: tuple[DeviceProcess, ...] | None = None
    fault: str = ""
    """Why it does not respond; empty if it does."""

    def faults(self) -> list[str]:
        """Check that figures are not negative."""
        return check_minimum(
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
    """Why a run is slow or at risk, and what to do; based on measurements only."""

    kind: str
    """data-bound, launch-bound, memory-bound, throttled, full, shared, uneven or slow."""
    where: str
    """GPU that it is about, such as "GPU 0"; empty if it is about the run."""
    what: str
    """The problem, with the numbers that show it."""
    cure: str

    def faults(self) -> list[str]:
        """Check that nothing but `where` is empty."""
        return [f"{part} is empty" for part in ("kind", "what", "cure") if not getattr(self, part).strip()]


class WatchedRun(Noun, frozen=True, kw_only=True):
    """State of a run at one moment. Unknown is None."""

    folder: str
    job: str = ""
    state: str
    """starting, running, stalled, done, ended or gone."""
    why: str = ""
    """Evidence for the state, if it is not obvious."""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    step_s: float | None = None
    """Median of the last steps."""
    samples_per_s: float | None = None
    """Median of the last steps."""
    recent: int | None = None
    """Number of last steps in the throughput."""
    planned_samples_per_s: float | None = None
    mfu: float | None = None
    mfu_rating: str | None = None
    reserved_bytes: int | None = None
    """Memory reserved by the allocator of rank 0."""
    planned_reserved_bytes: int | None = None
    data_wait: float | None = None
    """Share of the time of the last steps spent waiting for data."""
    left_s: float | None = None
    silent_s: float | None = None
    """Seconds since the last line of the log."""
    events: tuple[Incident, ...] = ()
    """The last events."""
    devices: tuple[str, ...] = ()
    """Keys of the GPUs of this machine that the run is known to use."""
    advice: tuple[Advice, ...] = ()
    damage: tuple[str, ...] = ()
    """What the files of its folder have lost, such as the end of a cut one."""

    def faults(self) -> list[str]:
        """Check that counts are not negative."""
        return check_minimum(0, step=self.step, steps=self.steps)


class WatchSample(Noun, frozen=True, kw_only=True):
    """GPUs and runs at one moment: one line of `trimtab watch --json`."""

    at_s: float
    """Seconds since 1970."""
    gpus: tuple[GpuReading, ...] = ()
    no_gpus: str = ""
    """Why there are no GPUs; empty if there are some."""
    runs: tuple[WatchedRun, ...] = ()
