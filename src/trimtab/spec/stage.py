"""Stage: a part of a training that changes the job; and the plans of all stages of one."""

from __future__ import annotations

import re
from typing import Any

from trimtab.spec.base import Noun, below
from trimtab.spec.plan import Plan

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
        return _sum([one.plan.estimate.hours for one in self.stages])

    @property
    def gpu_hours(self) -> float | None:
        """Of all devices."""
        return _sum([one.plan.estimate.gpu_hours for one in self.stages])

    def faults(self) -> list[str]:
        """There is a stage, no two have one name, and all have one global batch."""
        if not self.stages:
            return ["there is no stage"]
        names = [one.stage.name for one in self.stages]
        wrong = [f"two stages are named {one}" for one in {*names} if names.count(one) > 1]
        batches = sorted({one.plan.choice.global_batch for one in self.stages})
        return wrong + ([f"global_batch differs between stages: {batches}"] if len(batches) > 1 else [])


def _sum(hours: list[float | None]) -> float | None:
    return None if any(one is None for one in hours) else sum(one for one in hours if one is not None)
