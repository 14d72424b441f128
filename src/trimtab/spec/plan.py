"""Plan: the policy of a search, the chosen setting with its reasons, stages, and the launch command."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

from trimtab.spec.base import Noun, check_minimum
from trimtab.spec.estimate import Estimate
from trimtab.spec.script import PhasePeak, ScriptPlan
from trimtab.spec.setting import Setting
from trimtab.spec.workload import Workload


class Objective(StrEnum):
    """What a plan optimizes."""

    SPEED = "speed"
    GPUS = "gpus"
    """The fewest devices that meet the deadline."""
    COST = "cost"


class Policy(Noun, frozen=True, kw_only=True):
    """Objective and constraints of a plan."""

    objective: Objective = Objective.SPEED
    memory_share: float = 0.9
    """Share of the free memory that a plan may use, by the upper end of its band."""
    deadline_s: float | None = None
    price_per_gpu_hour: float | None = None
    pins: dict[str, str | int | bool] = {}
    """Choices that the user has fixed, by the name of the field of Setting."""
    allow: tuple[str, ...] = ()
    """Changes of results or speed that the plan may make: quantised, optimizer."""

    def faults(self) -> list[str]:
        """Check that the memory share is in (0, 1]."""
        wrong = check_minimum(0, deadline_s=self.deadline_s, price_per_gpu_hour=self.price_per_gpu_hour)
        if not 0 < self.memory_share <= 1:
            wrong.append(f"memory_share is {self.memory_share}, and must lie in (0, 1]")
        return wrong


class Reason(Noun, frozen=True, kw_only=True):
    """One choice of a plan and the reason for it, with numbers."""

    subject: str
    value: str
    why: str

    def faults(self) -> list[str]:
        """Check that the reason is not empty."""
        return [] if self.why.strip() else [f"the reason for {self.subject} is empty"]


class Candidate(Noun, frozen=True, kw_only=True):
    """A setting with its estimate, and why it was not chosen."""

    setting: Setting
    estimate: Estimate
    why: str


class EstimatedSetting(Noun, frozen=True, kw_only=True):
    """A setting that the search estimated, with the main figures of the estimate."""

    setting: Setting
    process_bytes: int
    high_bytes: int
    """Upper end of the band."""
    samples_per_s: float | None = None
    fits: bool
    """Whether it fits in the memory that the policy allows."""

    def faults(self) -> list[str]:
        """Check that figures are not negative."""
        return check_minimum(
            0, process_bytes=self.process_bytes, high_bytes=self.high_bytes, samples_per_s=self.samples_per_s
        )


class Rejection(Noun, frozen=True, kw_only=True):
    """Settings that were rejected for the same cause."""

    why: str
    count: int = 1
    """Number of settings rejected for this cause."""
    example: Setting | None = None

    def faults(self) -> list[str]:
        """Check that at least one setting was rejected."""
        return check_minimum(1, count=self.count)


class Comparison(Noun, frozen=True, kw_only=True):
    """The best plan for one number of devices."""

    gpus: int
    setting: Setting | None = None
    """None if nothing fits."""
    estimate: Estimate | None = None
    cost: float | None = None
    epoch_s: float | None = None
    """Seconds of one epoch."""
    free_share: float | None = None
    """Share of the cluster's devices that stays free."""
    scaling_efficiency: float | None = None
    meets_deadline: bool | None = None
    why: str = ""

    def faults(self) -> list[str]:
        """Check that there is at least one device, and that figures are not negative."""
        wrong = check_minimum(1, gpus=self.gpus)
        return wrong + check_minimum(
            0, cost=self.cost, epoch_s=self.epoch_s, scaling_efficiency=self.scaling_efficiency
        )


class WhatIf(Noun, frozen=True, kw_only=True):
    """How the run would change with another job: twice the samples, half the batch."""

    change: str
    gpus: int
    """Fewest devices that meet the deadline if there is one, else as many as the plan uses."""
    setting: Setting | None = None
    estimate: Estimate | None = None
    cost: float | None = None
    meets_deadline: bool | None = None
    why: str = ""
    unpinned: tuple[str, ...] = ()
    """Pins that are impossible after the change, such as micro_batch=8; `why` gives the reason."""

    def faults(self) -> list[str]:
        """Check that there is at least one device."""
        return check_minimum(1, gpus=self.gpus)


class SuggestedChange(Noun, frozen=True, kw_only=True):
    """A change that would make the job fit if nothing fits, with its estimate."""

    what: str
    """The change as an instruction: 'use 16 of these GPUs'."""
    setting: Setting
    estimate: Estimate


class RankPlacement(Noun, frozen=True, kw_only=True):
    """The device that a rank runs on."""

    node: int
    """Number of the node in the cluster, from 0."""
    node_name: str
    device: int
    """Index of the device on that node."""
    name: str
    """Name of the device in the catalogue, or from the driver."""

    def faults(self) -> list[str]:
        """Check that numbers start at 0."""
        return check_minimum(0, node=self.node, device=self.device)


class Plan(Noun, frozen=True, kw_only=True):
    """The chosen setting with its estimate and reasons; fingerprints tie it to job and cluster."""

    job: str
    """Name of the job, as the user gave it."""
    options: dict[str, Any] = {}
    """Attributes of the job that the user has set."""
    choice: Setting
    estimate: Estimate
    policy: Policy = Policy()
    reasons: tuple[Reason, ...] = ()
    runners_up: tuple[Candidate, ...] = ()
    looked_at: tuple[EstimatedSetting, ...] = ()
    """Every setting that was estimated, including the choice; settings excluded by bounds are not listed."""
    rejected: tuple[Rejection, ...] = ()
    comparison: tuple[Comparison, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    places: tuple[RankPlacement, ...] = ()
    """Device of each rank, in the order of ranks."""
    workload: Workload | None = None
    """Batch, epochs and branches of the job, including options of the command line."""
    cost: float | None = None
    """Cost of the whole run; None without a price."""
    left_out: tuple[str, ...] = ()
    """What the search did not try, and why."""
    recommendation: str = ""
    """The result in one sentence."""
    fingerprints: dict[str, str] = {}
    """Fingerprints of what the plan depends on: job, cluster, versions."""
    complete: bool = True
    """False if the search was interrupted: the choice is the best found until then."""
    folder: str = ""
    """Folder of the planner; paths in `job` and `options` are relative to it. Empty in older plans."""
    script: ScriptPlan | None = None
    """The training command, if the plan is for one and not for a job."""
    phases: tuple[PhasePeak, ...] = ()
    """Peaks of the phases of a training command."""
    by_formulas: bool = False
    """Whether time and memory come from formulas over the sizes of a decoder: no step was traced."""
    is_cut_short: bool = False
    """Whether layouts were not traced because tracing took too long; on idle cores another may be chosen."""

    def faults(self) -> list[str]:
        """Check that the folder can be a path."""
        return ["folder has a zero byte, which no path has"] if "\0" in self.folder else []


# Stages: parts of a training run that change the job, and their plans.

_NAME = re.compile(r"\w[\w.-]*")


class Stage(Noun, frozen=True, kw_only=True):
    """Options of a job for some epochs of a staged training run."""

    name: str
    """Name of the stage and of its folder in the run folder."""
    options: dict[str, Any] = {}
    """Attributes of the job that it sets, including epochs and rate."""
    epochs: int | None = None
    rate: float | None = None
    """Learning rate."""

    def faults(self) -> list[str]:
        """Check that the name is valid for a folder and that counts are positive."""
        wrong = check_minimum(1, epochs=self.epochs) + check_minimum(0, rate=self.rate)
        if not _NAME.fullmatch(self.name):
            wrong.append(f"name {self.name!r} cannot be the name of a folder")
        return wrong


class PlannedStage(Noun, frozen=True, kw_only=True):
    """A stage and its plan."""

    stage: Stage
    plan: Plan


class StagedPlan(Noun, frozen=True, kw_only=True):
    """Plans of all stages of a job: each splits the same global batch in its own way."""

    derived = ("global_batch", "hours", "gpu_hours")

    job: str
    stages: tuple[PlannedStage, ...]

    @property
    def global_batch(self) -> int:
        """Global batch of every stage."""
        return self.stages[0].plan.choice.global_batch

    @property
    def hours(self) -> float | None:
        """Hours of all stages, one after the other; None if one is unknown."""
        return _sum_hours([stage.plan.estimate.hours for stage in self.stages])

    @property
    def gpu_hours(self) -> float | None:
        """GPU hours of all stages; None if one is unknown."""
        return _sum_hours([stage.plan.estimate.gpu_hours for stage in self.stages])

    def faults(self) -> list[str]:
        """Check that there is a stage, names are unique and all stages have the same global batch."""
        if not self.stages:
            return ["there is no stage"]
        names = [stage.stage.name for stage in self.stages]
        wrong = [f"two stages are named {name}" for name in {*names} if names.count(name) > 1]
        batches = sorted({stage.plan.choice.global_batch for stage in self.stages})
        return wrong + ([f"global_batch differs between stages: {batches}"] if len(batches) > 1 else [])


def _sum_hours(hours: list[float | None]) -> float | None:
    return None if any(hour is None for hour in hours) else sum(hour for hour in hours if hour is not None)


# Launch: the command, script and variables that start a run.


class LaunchKind(StrEnum):
    """Launcher that starts the processes."""

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
    """A launch command with its environment variables, and the script or manifest that it needs."""

    kind: LaunchKind
    command: tuple[str, ...]
    """Arguments of the command that starts the run."""
    environment: dict[str, str] = {}
    """Environment variables that are set in addition to the existing ones."""
    why: dict[str, str] = {}
    """The reason for each variable."""
    script: str | None = None
    """Batch script or manifest; None if only the command is needed."""
    script_file: str | None = None
    """Path of the script."""
    files: dict[str, str] = {}
    """Contents of other files that it needs, by path."""
    starts: tuple[str, ...] = ()
    """Arguments of the command that runs on every node (torchrun)."""
    out: str | None = None
    """The run folder."""
    notes: tuple[str, ...] = ()
    """Notes on choices and on facts that were not checked."""
    fault: str = ""
    """Why the run would fail before its first step; empty if no reason is known."""
    job_id: str | None = None
    """Job id of the scheduler, after submission."""

    def faults(self) -> list[str]:
        """Check that the command is not empty, a script has a file, and every reason has a variable."""
        wrong = [] if self.command and self.command[0] else ["command is empty"]
        if (self.script is None) != (self.script_file is None):
            wrong.append("script and script_file must both be set, or neither")
        return wrong + [
            f"there is a reason for {name}, but no such variable"
            for name in self.why
            if name not in self.environment
        ]
