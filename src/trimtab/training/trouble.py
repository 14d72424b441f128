"""Climbs the ladder: what `ladder` decides about a bad step is done here, on all ranks alike."""

from __future__ import annotations

import functools
from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn

from trimtab.errors import JobFailed
from trimtab.spec import IncidentKind
from trimtab.training import ladder as rules
from trimtab.training.ladder import Ladder, Rung
from trimtab.training.scribe import STOPPED
from trimtab.training.settle import gathered
from trimtab.training.suspects import BATCH, Suspect, earliest, first_bad, in_stage, keep_fp32

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from trimtab.training.keep import Keeper
    from trimtab.training.loading import Window
    from trimtab.training.run import Outcome, Run
    from trimtab.training.scribe import Scribe

AGAIN = "once more"
"""How the engine speaks of the repetition that every bad step gets: no answer of the ladder."""
BACK = "goes back to its last good checkpoint"


class Trouble:
    """The ladder of one run, and the hands that climb it."""

    def __init__(self, run: Run, keeper: Keeper, scribe: Scribe) -> None:
        self.run = run
        self.keeper = keeper
        self.scribe = scribe
        self.ladder = Ladder()
        self.since: int | None = None
        """The first bad step of the present trouble."""

    @property
    def limit(self) -> float | None:
        """The loss above which a step is a spike."""
        watched = bool(getattr(self.run.job, "spikes", True))
        return rules.spike_limit(self.ladder.losses) if watched else None

    def after_good(self, loss: float) -> None:
        """A step went well."""
        self.ladder = rules.good(self.ladder, loss)
        if self.ladder.height == 0:
            self.since = None

    def answer(self, window: Window, outcome: Outcome) -> bool:
        """Do what the ladder says about a bad step; True where the run has to go back before `since`."""
        done = window.step + 1
        self.since = done if self.since is None else self.since
        spike = isfinite(outcome.loss) and isfinite(outcome.grad_norm)
        kind = IncidentKind.LOSS_SPIKE if spike else IncidentKind.NOT_A_NUMBER
        # In float32 there is nothing to keep in a wider dtype.
        can_keep = self.run.setting.dtypes.is_narrow
        why = outcome.skipped
        rung = self._climb(kind, can_keep=can_keep)
        if rung is Rung.FP32:
            found = suspect(self.run, window)
            if found is not None and found.module and found.module not in self.ladder.kept:
                self._keep(found, kind, why, done)
                return False
            why += f"; {found.words}" if found is not None else "; no module was found that makes it"
            is_data = found is not None and found.phase == BATCH
            rung = Rung.SKIP if is_data else self._climb(kind, can_keep=False)
        if rung is Rung.STOP:
            self._stop(kind, done, why)
        if rung is Rung.LOWER_RATE:
            self.multiply_rate(rules.SLOWER)
            slower = f"the learning rate is now {self.ladder.rate:g} of the job's"
            self.scribe.tell(kind, why, f"the step is skipped, and {slower}", step=done)
        elif rung is Rung.SKIP:
            self.scribe.tell(kind, why, "the step is skipped: the weights stay", step=done)
        else:
            self.scribe.tell(kind, why, f"the run {BACK}", step=done)
        return rung is Rung.ROLL_BACK

    def restored(self, saved: Ladder, *, rolled_back: bool) -> None:
        """After a checkpoint was loaded: the ladder of that run, or what was learnt before going back."""
        if rolled_back:
            self.ladder = rules.rolled_back(self.ladder, saved)
            self.multiply_rate(self.ladder.rate / saved.rate)
        else:
            self.ladder = saved
        for name in self.ladder.kept:
            self._widen(name)

    def multiply_rate(self, factor: float) -> None:
        """Change the learning rate, also for a schedule that computes it from where it began."""
        for group in self.run.optimizer.param_groups:
            for name in ("lr", "initial_lr"):
                if name in group:
                    group[name] = group[name] * factor
        schedule = self.run.schedule
        if schedule is not None and hasattr(schedule, "base_lrs"):
            schedule.base_lrs = [one * factor for one in schedule.base_lrs]

    def _climb(self, kind: IncidentKind, *, can_keep: bool) -> Rung:
        self.ladder, rung = rules.bad(
            self.ladder, kind, can_keep=can_keep, can_roll_back=self._can_roll_back()
        )
        return rung

    def _can_roll_back(self) -> bool:
        """Whether there is a checkpoint from before the trouble; rank 0 looks, when all of it is written."""
        self.keeper.finish()
        assert self.since is not None  # noqa: S101 - there is trouble
        there = any(one.step < self.since for one in self.keeper.checkpoints())
        return bool(gathered(self.run.world, there, everyone=True)[0])

    def _keep(self, found: Suspect, kind: IncidentKind, why: str, done: int) -> None:
        self.ladder = rules.keeping(self.ladder, found.module)
        self._widen(found.module)
        answer = f"the step is skipped, and {found.module} computes in fp32 from now on"
        self.scribe.tell(kind, f"{why}; {found.words}", answer, step=done)

    def _widen(self, name: str) -> None:
        keep_fp32(self.run.model, name)
        if self.run.setting.compile:
            import torch

            # What was compiled was compiled with the module as it was.
            torch._dynamo.reset()  # noqa: SLF001 - its public name loads the whole compiler

    def _stop(self, kind: IncidentKind, done: int, why: str) -> NoReturn:
        answers = [one for one in self.scribe.seen if one.kind is kind and AGAIN not in one.done]
        seen = tuple(f"at step {one.step} {one.done}" for one in answers)
        went_back = any(BACK in one.done for one in answers)
        text = rules.report(self.ladder, kind, done, why, seen[-4:], went_back=went_back)
        kept = any((self.scribe.folder.root / "checkpoints").glob("*"))
        left = "The last good checkpoint is kept." if kept else "There was no checkpoint to go back to yet."
        self.scribe.tell(kind, why, f"{STOPPED}. {text}", step=done)
        raise JobFailed(
            f"step {done} of {self.scribe.folder.root}",
            found=text.rstrip("."),
            cure="Look at the samples of that step and at the learning rate; `clip = 1.0` on the job clips "
            f"gradients. {left}",
        )


def _passed_along(run: Run, batch: Any) -> None:
    """A pass for the sake of the others: its loss is nobody's."""
    run.passed(batch)


def suspect(run: Run, window: Window) -> Suspect | None:
    """The first bad module on any rank; all ranks make as many passes, and hear the same."""
    # The loss of a part that counts for nothing may be any number, and says nothing of the modules.
    parts = [part.batch for part in window.parts(run.micro_batch) if float(run.weight_of(part.batch))]
    most = max(gathered(run.world, len(parts), everyone=True))
    batches = [run.on_device(one) for one in parts]
    passes: list[Callable[[], torch.Tensor | None]] = [functools.partial(run.passed, one) for one in batches]
    along = run.on_device(window.filler())
    passes += [functools.partial(_passed_along, run, along)] * (most - len(parts))
    with run.quiet():
        found = first_bad(run.model, passes, batches)
    run.optimizer.zero_grad(set_to_none=True)
    mine = in_stage(found, run.groups.stage, run.groups.stages)
    told = gathered(run.world, None if mine is None else mine.to_json(), everyone=True)
    return earliest(None if one is None else Suspect.from_json(one) for one in told)
