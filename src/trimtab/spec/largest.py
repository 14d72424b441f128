"""LargestValue: the largest value of an option that fits, and what twice as much would need."""

from __future__ import annotations

from enum import StrEnum

from trimtab.spec.base import Noun, check_minimum
from trimtab.spec.estimate import Estimate, Verdict
from trimtab.spec.plan import SuggestedChange
from trimtab.spec.setting import Setting


class ValueLimit(StrEnum):
    """What keeps a value from being larger."""

    MEMORY = "memory"
    """The next value does not fit."""
    JOB = "job"
    """The job states a limit, such as the positions of a model, or fails at the next value."""
    SEARCH = "search"
    """Larger values were not tried."""


class TriedValue(Noun, frozen=True, kw_only=True):
    """A value that was tried, with the memory that it needs."""

    value: int
    verdict: Verdict | None
    """None if the job fails at this value."""
    process_bytes: int | None = None
    error: str = ""
    """Why the job fails at this value."""


class TriedChange(Noun, frozen=True, kw_only=True):
    """A change that was tried to make twice as much fit."""

    what: str
    """The change as flags of the command line, such as --recompute full."""
    verdict: Verdict | None
    """None if it could not be estimated."""
    process_bytes: int | None = None
    error: str = ""


class TwiceAsMuch(Noun, frozen=True, kw_only=True):
    """What twice the largest value would need."""

    value: int
    """Twice the largest value."""
    change: SuggestedChange | None = None
    """The cheapest change of those tried with which it fits; if it fits with none of them, the cheapest with
    which it fits tightly; else None."""
    why_not: str = ""
    """Why there is no change; empty if there is one."""
    tried: tuple[TriedChange, ...] = ()
    """The changes tried, the cheapest first, up to the first that fits."""


class LargestValue(Noun, frozen=True, kw_only=True):
    """The largest value of an option that fits, with its estimate."""

    job: str
    of: str
    """The option: micro_batch, or an option of the job such as seq."""
    largest: int
    """The largest value with the verdict fits; with fits-tight only if no value fits otherwise."""
    step: int = 1
    """Values tried are multiples of this number."""
    limit: ValueLimit
    limit_reason: str
    """Why a larger value is not possible, in words."""
    on: str = ""
    """The devices."""
    setting: Setting
    estimate: Estimate
    """The estimate at the largest value."""
    next: TwiceAsMuch
    tried: tuple[TriedValue, ...] = ()
    """Every value that was tried, in order of size."""
    notes: tuple[str, ...] = ()

    def faults(self) -> list[str]:
        """Check that values start at 1."""
        return check_minimum(1, largest=self.largest, step=self.step)
