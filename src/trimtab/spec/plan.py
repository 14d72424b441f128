"""Policy and Plan: what best means, and what was decided, with every reason."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

from trimtab.spec.base import Noun, below
from trimtab.spec.estimate import Estimate
from trimtab.spec.setting import Setting
from trimtab.spec.workload import Workload


class Objective(StrEnum):
    """What a plan makes as good as it can."""

    SPEED = "speed"
    GPUS = "gpus"
    """The fewest devices that meet the deadline."""
    COST = "cost"


class Policy(Noun, frozen=True, kw_only=True):
    """What best means, and what may not be moved."""

    objective: Objective = Objective.SPEED
    memory_share: float = 0.9
    """Share of the really free memory that a plan may use, by its upper band."""
    deadline_s: float | None = None
    price_per_gpu_hour: float | None = None
    pins: dict[str, str | int | bool] = {}
    """Choices that the user has fixed, by the name of the Setting's field."""

    def faults(self) -> list[str]:
        """A share lies in (0, 1]."""
        wrong = below(0, deadline_s=self.deadline_s, price_per_gpu_hour=self.price_per_gpu_hour)
        if not 0 < self.memory_share <= 1:
            wrong.append(f"memory_share is {self.memory_share}, and must lie in (0, 1]")
        return wrong


class Reason(Noun, frozen=True, kw_only=True):
    """One choice, and why it was made, with its numbers."""

    subject: str
    value: str
    why: str

    def faults(self) -> list[str]:
        """A reason says why."""
        return [] if self.why.strip() else [f"the reason for {self.subject} is empty"]


class Candidate(Noun, frozen=True, kw_only=True):
    """A setting under test, with its estimate and why it was not chosen."""

    setting: Setting
    estimate: Estimate
    why: str


class Look(Noun, frozen=True, kw_only=True):
    """A setting that the search looked at closely, in the few figures that a comparison needs."""

    setting: Setting
    process_bytes: int
    high_bytes: int
    """The upper end of the band."""
    samples_per_s: float | None = None
    fits: bool
    """In the memory that the policy allows."""

    def faults(self) -> list[str]:
        """Figures are not negative."""
        return below(
            0, process_bytes=self.process_bytes, high_bytes=self.high_bytes, samples_per_s=self.samples_per_s
        )


class Rejection(Noun, frozen=True, kw_only=True):
    """Settings that were refused for one cause."""

    why: str
    count: int = 1
    """How many settings this cause removed."""
    example: Setting | None = None

    def faults(self) -> list[str]:
        """A cause that removed nothing is no rejection."""
        return below(1, count=self.count)


class Comparison(Noun, frozen=True, kw_only=True):
    """The best plan for one number of devices."""

    gpus: int
    setting: Setting | None = None
    """None where nothing fits."""
    estimate: Estimate | None = None
    cost: float | None = None
    epoch_s: float | None = None
    """Seconds that one pass over the samples takes."""
    free_share: float | None = None
    """Share of the devices left for others."""
    scaling_efficiency: float | None = None
    meets_deadline: bool | None = None
    why: str = ""

    def faults(self) -> list[str]:
        """A comparison is about at least one device."""
        return below(1, gpus=self.gpus)


class WhatIf(Noun, frozen=True, kw_only=True):
    """How the run would change with the job: twice the samples, half the batch."""

    change: str
    gpus: int
    """The fewest that still meet the deadline where one was given, else as many as the plan uses."""
    setting: Setting | None = None
    estimate: Estimate | None = None
    cost: float | None = None
    meets_deadline: bool | None = None
    why: str = ""
    unpinned: tuple[str, ...] = ()
    """Pins that the change leaves no room for, as in micro_batch=8; `why` says why."""

    def faults(self) -> list[str]:
        """It is about at least one device."""
        return below(1, gpus=self.gpus)


class Change(Noun, frozen=True, kw_only=True):
    """Something that would fit where nothing does, with its estimate."""

    what: str
    """As an instruction: 'use 16 of these GPUs'."""
    setting: Setting
    estimate: Estimate


class Place(Noun, frozen=True, kw_only=True):
    """The device that a rank runs on."""

    node: int
    """Number of the node in the cluster, from 0."""
    node_name: str
    device: int
    """Its index on that node."""
    name: str
    """The catalogue's name of the device, or the driver's."""

    def faults(self) -> list[str]:
        """Numbers start at 0."""
        return below(0, node=self.node, device=self.device)


class Plan(Noun, frozen=True, kw_only=True):
    """The chosen setting, its estimate, and why; tied to job and cluster by fingerprints."""

    job: str
    """The job as it was named."""
    options: dict[str, Any] = {}
    """Members of the job that were set from outside."""
    choice: Setting
    estimate: Estimate
    policy: Policy = Policy()
    reasons: tuple[Reason, ...] = ()
    runners_up: tuple[Candidate, ...] = ()
    looked_at: tuple[Look, ...] = ()
    """Every setting that was estimated, the choice included; what bounds ruled out is not among them."""
    rejected: tuple[Rejection, ...] = ()
    comparison: tuple[Comparison, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    places: tuple[Place, ...] = ()
    """One a rank, in the order of ranks."""
    workload: Workload | None = None
    """What the job said of itself, options of the command line included."""
    cost: float | None = None
    """Of the whole run, where a price was given."""
    left_out: tuple[str, ...] = ()
    """What the search did not look at, and why."""
    recommendation: str = ""
    """The answer in a sentence."""
    fingerprints: dict[str, str] = {}
    """What the plan assumed: job, cluster, versions."""
    complete: bool = True
    """False where the search was interrupted: the choice is the best that it had found."""
    folder: str = ""
    """The folder it was made in, from which the paths in `job` and `options` start; empty in older plans."""


# Stage: a part of a training that changes the job; and the plans of all stages of one.


_NAME = re.compile(r"\w[\w.-]*")


class Stage(Noun, frozen=True, kw_only=True):
    """What a job is for some epochs, before it becomes what the next stage says."""

    name: str
    """Also of its folder in the run's."""
    options: dict[str, Any] = {}
    """Members of the job that it sets, epochs and rate included."""
    epochs: int | None = None
    rate: float | None = None
    """Of learning."""

    def faults(self) -> list[str]:
        """A name that a folder can have, and something to do."""
        wrong = below(1, epochs=self.epochs) + below(0, rate=self.rate)
        if not _NAME.fullmatch(self.name):
            wrong.append(f"name {self.name!r} cannot be that of a folder")
        return wrong


class PlannedStage(Noun, frozen=True, kw_only=True):
    """A stage, and how it will run."""

    stage: Stage
    plan: Plan


class StagedPlan(Noun, frozen=True, kw_only=True):
    """The plans of all stages of a job: each with its own cut of one global batch."""

    derived = ("global_batch", "hours", "gpu_hours")

    job: str
    stages: tuple[PlannedStage, ...]

    @property
    def global_batch(self) -> int:
        """Of every stage."""
        return self.stages[0].plan.choice.global_batch

    @property
    def hours(self) -> float | None:
        """Of all of them, one after the other; None where one is not known."""
        return _sum([stage.plan.estimate.hours for stage in self.stages])

    @property
    def gpu_hours(self) -> float | None:
        """Of all devices."""
        return _sum([stage.plan.estimate.gpu_hours for stage in self.stages])

    def faults(self) -> list[str]:
        """There is a stage, no two have one name, and all have one global batch."""
        if not self.stages:
            return ["there is no stage"]
        names = [stage.stage.name for stage in self.stages]
        wrong = [f"two stages are named {name}" for name in {*names} if names.count(name) > 1]
        batches = sorted({stage.plan.choice.global_batch for stage in self.stages})
        return wrong + ([f"global_batch differs between stages: {batches}"] if len(batches) > 1 else [])


def _sum(hours: list[float | None]) -> float | None:
    return None if any(hour is None for hour in hours) else sum(hour for hour in hours if hour is not None)


# Launch: what would be run, as text, before anything is.


class LaunchKind(StrEnum):
    """Who starts the processes."""

    TORCHRUN = "torchrun"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    """An Indexed Job and a headless Service."""
    KUBEFLOW = "kubeflow"
    """A TrainJob."""
    SKY = "sky"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"


class Launch(Noun, frozen=True, kw_only=True):
    """A command with its variables, and the script or manifest that it is given."""

    kind: LaunchKind
    command: tuple[str, ...]
    """The words of the command that starts it all."""
    environment: dict[str, str] = {}
    """Variables that it is given beside those that are there."""
    why: dict[str, str] = {}
    """The reason for each variable."""
    script: str | None = None
    """The batch script or manifest; None where the command is all there is."""
    script_file: str | None = None
    """Where the script is written."""
    files: dict[str, str] = {}
    """Other files that it needs, by their paths."""
    starts: tuple[str, ...] = ()
    """What the command starts on every node in turn; the words of torchrun."""
    out: str | None = None
    """The run's folder."""
    notes: tuple[str, ...] = ()
    """What was chosen and what was not checked, in sentences."""
    fault: str = ""
    """Why the run would end before its first step; empty where nothing is known against it."""
    job_id: str | None = None
    """The scheduler's number, once it is submitted."""

    def faults(self) -> list[str]:
        """A command has a word, a script a place, and every reason a variable."""
        wrong = [] if self.command and self.command[0] else ["command is empty"]
        if (self.script is None) != (self.script_file is None):
            wrong.append("a script and the file for it go together")
        return wrong + [
            f"there is a reason for {name}, and no such variable"
            for name in self.why
            if name not in self.environment
        ]
