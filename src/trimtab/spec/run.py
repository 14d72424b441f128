"""Measurement and Incident: what a run really used, and why an attempt ended."""

from __future__ import annotations

from enum import StrEnum

from trimtab.spec.base import Noun, below
from trimtab.spec.hardware import Versions
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
    TIME_LIMIT = "time-limit"
    HANG = "hang"
    BAD_CHECKPOINT = "bad-checkpoint"
    FULL_DISK = "full-disk"
    RESIZE = "resize"
    RESUME = "resume"
    """An attempt goes on from a checkpoint."""
    MICRO_BATCH = "micro-batch"
    """Another micro-batch between two steps; the global batch stays."""
    COMPILE = "compile"
    STAGE = "stage"
    """A stage of a curriculum begins with the weights of the one before, or has ended."""
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

    def faults(self) -> list[str]:
        """Steps and ranks count from zero."""
        return below(0, step=self.step, rank=self.rank, at_s=self.at_s)
