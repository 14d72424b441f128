"""What to do about a step whose numbers are bad: a ladder, climbed while trouble lasts.

A bad step has already been computed twice by the time it comes here, with the same result. The rungs:

    skip        leave the weights as they are and go on to the next batch
    fp32        find the first module that makes a bad number, and keep it in fp32 from now on
    lower-rate  take 20 % off the learning rate
    roll-back   go back to the last good checkpoint
    stop        end the run with a report

A loss that is merely far too high has no bad module, so its ladder has no second rung. Bad steps that are
far apart are each other's strangers: after CALM good steps the ladder begins at the bottom again. What was
changed on the way up (modules in fp32, the rate) stays.
"""

from __future__ import annotations

from enum import StrEnum
from math import isfinite
from statistics import median

from trimtab.spec import IncidentKind
from trimtab.spec.base import Noun, below

CALM = 100
"""Good steps after which a bad one is a new trouble."""
SLOWER = 0.8
"""What the rate is multiplied by."""
REMEMBERED = 64
"""Losses that say what is usual."""
ENOUGH = 32
"""Losses before anything can be called unusual."""
FAR_SPREADS = 10.0
"""Robust standard deviations above the median."""
FAR_REACH = 3.0
"""Times as far above the median as any loss that was taken for good; heavy tails are not spikes."""
FAR_SHARE = 0.5
"""Of the median itself, where the losses hardly move."""
NORMAL = 1.4826
"""Makes the median distance from the median a standard deviation, for normal losses."""


class Rung(StrEnum):
    """One answer to a bad step."""

    SKIP = "skip"
    FP32 = "fp32"
    LOWER_RATE = "lower-rate"
    ROLL_BACK = "roll-back"
    STOP = "stop"


RUNGS = tuple(Rung)


class Ladder(Noun, frozen=True, kw_only=True):
    """Where a run stands. It travels in the checkpoint, so that a resumed run answers as this one would."""

    height: int = 0
    """Rungs climbed in the present trouble."""
    calm: int = CALM
    """Good steps since the last bad one."""
    rate: float = 1.0
    """What the job's learning rate has been multiplied by."""
    kept: tuple[str, ...] = ()
    """Modules that compute in fp32 since they made a bad number."""
    losses: tuple[float, ...] = ()
    """The last good ones, oldest first."""

    def faults(self) -> list[str]:
        """Counts are not negative, and the rate is lowered, never raised."""
        wrong = below(0, height=self.height, calm=self.calm)
        if not 0 < self.rate <= 1:
            wrong.append(f"rate is {self.rate}, and must lie in (0, 1]")
        return wrong


def good(ladder: Ladder, loss: float) -> Ladder:
    """After a step that went well."""
    calm = ladder.calm + 1
    losses = (*ladder.losses, loss)[-REMEMBERED:] if isfinite(loss) else ladder.losses
    return ladder.replace(calm=calm, height=0 if calm >= CALM else ladder.height, losses=losses)


def bad(
    ladder: Ladder, kind: IncidentKind, *, can_keep: bool = True, can_roll_back: bool = True
) -> tuple[Ladder, Rung]:
    """After a step that went badly: the answer, and where that leaves the ladder.

    `can_keep` says whether there may be a module to keep in fp32 (not where all is fp32 already), and
    `can_roll_back` whether there is a checkpoint.

    >>> ladder, rung = bad(Ladder(), IncidentKind.NOT_A_NUMBER)
    >>> rung, bad(ladder, IncidentKind.NOT_A_NUMBER)[1]
    (<Rung.SKIP: 'skip'>, <Rung.FP32: 'fp32'>)
    """
    height = ladder.height
    while True:
        rung = RUNGS[min(height, len(RUNGS) - 1)]
        height += 1
        if rung is Rung.FP32 and (kind is IncidentKind.LOSS_SPIKE or not can_keep):
            continue
        if rung is Rung.ROLL_BACK and not can_roll_back:
            continue
        break
    changed = ladder.replace(height=height, calm=0)
    return (slowed(changed) if rung is Rung.LOWER_RATE else changed), rung


def slowed(ladder: Ladder) -> Ladder:
    """With the rate lowered once more."""
    return ladder.replace(rate=ladder.rate * SLOWER)


def keeping(ladder: Ladder, module: str) -> Ladder:
    """With one module more in fp32."""
    return ladder if module in ladder.kept else ladder.replace(kept=(*ladder.kept, module))


def rolled_back(ladder: Ladder, saved: Ladder) -> Ladder:
    """After a roll-back: the losses are those of the checkpoint, all else is what was learnt since."""
    return ladder.replace(losses=saved.losses)


def spike_limit(losses: tuple[float, ...]) -> float | None:
    """The loss above which a step is called a spike; None while too few losses are known.

    Far above the median both by the spread of the losses and by how far any good one of late has been:
    losses that fall quickly or that have heavy tails do not set it off.

    >>> spike_limit((1.0,) * 40)
    1.5
    >>> spike_limit((1.0,) * 10) is None
    True
    """
    if len(losses) < ENOUGH:
        return None
    middle = median(losses)
    spread = NORMAL * median(abs(one - middle) for one in losses)
    reach = max(losses) - middle
    return middle + max(FAR_SPREADS * spread, FAR_REACH * reach, FAR_SHARE * abs(middle))


def report(  # noqa: PLR0913 - what happened, and what was done
    ladder: Ladder, kind: IncidentKind, step: int, why: str, seen: tuple[str, ...], *, went_back: bool = True
) -> str:
    """Why a run was stopped, in a few sentences: what was tried, and where to look."""
    tried = ["the step was skipped"]
    if ladder.kept:
        tried.append(f"{', '.join(ladder.kept)} computed in fp32")
    if ladder.rate < 1:
        tried.append(f"the rate was multiplied by {ladder.rate:g}")
    if went_back:
        tried.append("the run went back to its last good checkpoint")
    usual = f" Losses of late had a median of {median(ladder.losses):.6g}." if ladder.losses else ""
    what = "the loss is far above what was usual" if kind is IncidentKind.LOSS_SPIKE else "numbers are bad"
    before = f" Before that: {'; '.join(seen)}." if seen else ""
    return f"At step {step} {what} again ({why}), after {', '.join(tried)}.{usual}{before}"
