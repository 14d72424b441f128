"""Policy and Plan: what best means, and what was decided, with every reason."""

from __future__ import annotations

from enum import StrEnum

from trimtab.spec.base import Noun, below
from trimtab.spec.estimate import Estimate
from trimtab.spec.setting import Setting


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
    free_share: float | None = None
    """Share of the cluster left for others."""
    scaling_efficiency: float | None = None
    meets_deadline: bool | None = None
    why: str = ""

    def faults(self) -> list[str]:
        """A comparison is about at least one device."""
        return below(1, gpus=self.gpus)


class Plan(Noun, frozen=True, kw_only=True):
    """The chosen setting, its estimate, and why; tied to job and cluster by fingerprints."""

    job: str
    """The job as it was named."""
    choice: Setting
    estimate: Estimate
    policy: Policy = Policy()
    reasons: tuple[Reason, ...] = ()
    runners_up: tuple[Candidate, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    comparison: tuple[Comparison, ...] = ()
    recommendation: str = ""
    """The answer in a sentence."""
    fingerprints: dict[str, str] = {}
    """What the plan assumed: job, cluster, versions."""
