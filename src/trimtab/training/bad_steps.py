"""Climbs the ladder: what `ladder` decides about a bad step is done here, on all ranks alike."""

from __future__ import annotations

import contextlib
import functools
from enum import StrEnum
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from trimtab.engine.pipeline_stage import StandIn
from trimtab.engine.precision import HALF
from trimtab.errors import JobFailed
from trimtab.spec import IncidentKind
from trimtab.spec.base import Noun, below
from trimtab.training.events import STOPPED
from trimtab.training.task import gather_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from trimtab.training.checkpoints import CheckpointManager
    from trimtab.training.events import EventLog
    from trimtab.training.loading import Window
    from trimtab.training.run import Run, StepOutcome


# What to do about a step whose numbers are bad: a ladder, climbed while trouble lasts.
#
# A bad step has already been computed twice by the time it comes here, with the same result. The rungs:
#
#     skip        leave the weights as they are and go on to the next batch
#     fp32        find the first module that makes a bad number, and keep it in fp32 from now on
#     lower-rate  take 20 % off the learning rate
#     roll-back   go back to the last good checkpoint
#     stop        end the run with a report
#
# A loss that is merely far too high has no bad module, so its ladder has no second rung. Bad steps that are
# far apart are each other's strangers: after CALM good steps the ladder begins at the bottom again. What was
# changed on the way up (modules in fp32, the rate) stays.


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


class BadStepAction(StrEnum):
    """One answer to a bad step."""

    SKIP = "skip"
    FP32 = "fp32"
    LOWER_RATE = "lower-rate"
    ROLL_BACK = "roll-back"
    STOP = "stop"


RUNGS = tuple(BadStepAction)


class BadStepPolicy(Noun, frozen=True, kw_only=True):
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


def after_good_step(ladder: BadStepPolicy, loss: float) -> BadStepPolicy:
    """After a step that went well."""
    calm = ladder.calm + 1
    losses = (*ladder.losses, loss)[-REMEMBERED:] if isfinite(loss) else ladder.losses
    return ladder.replace(calm=calm, height=0 if calm >= CALM else ladder.height, losses=losses)


def after_bad_step(
    ladder: BadStepPolicy, kind: IncidentKind, *, can_keep: bool = True, can_roll_back: bool = True
) -> tuple[BadStepPolicy, BadStepAction]:
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
        if rung is BadStepAction.FP32 and (kind is IncidentKind.LOSS_SPIKE or not can_keep):
            continue
        if rung is BadStepAction.ROLL_BACK and not can_roll_back:
            continue
        break
    changed = ladder.replace(height=height, calm=0)
    return (with_lower_rate(changed) if rung is BadStepAction.LOWER_RATE else changed), rung


def with_lower_rate(ladder: BadStepPolicy) -> BadStepPolicy:
    """With the rate lowered once more."""
    return ladder.replace(rate=ladder.rate * SLOWER)


def with_fp32_module(ladder: BadStepPolicy, module: str) -> BadStepPolicy:
    """With one module more in fp32."""
    return ladder if module in ladder.kept else ladder.replace(kept=(*ladder.kept, module))


def after_rollback(ladder: BadStepPolicy, saved: BadStepPolicy) -> BadStepPolicy:
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
    spread = NORMAL * median(abs(loss - middle) for loss in losses)
    reach = max(losses) - middle
    return middle + max(FAR_SPREADS * spread, FAR_REACH * reach, FAR_SHARE * abs(middle))


def describe_stop_by_policy(  # noqa: PLR0913 - what happened, and what was done
    ladder: BadStepPolicy,
    kind: IncidentKind,
    step: int,
    why: str,
    seen: tuple[str, ...],
    *,
    went_back: bool = True,
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


# Finds the first module that makes a number that is not finite, and keeps a module in fp32.
#
# Runs only after a step has gone wrong twice, so it may be slow: every module is asked, forward and backward.


FORWARD, BACKWARD, BATCH, LOSS = "forward", "backward", "batch", "loss"
_EARLIER = (BATCH, FORWARD, LOSS, BACKWARD)
"""In the order in which they come in a step."""
_MOST_MODULES = 10**6
"""More than a stage of a pipeline asks."""


class BadModule(Noun, frozen=True, kw_only=True):
    """The first place where a step went wrong."""

    module: str = ""
    """Its name in the model; empty where it is no module."""
    kind: str = ""
    """Its class."""
    phase: str
    """forward, backward, the batch itself, or the loss."""
    order: int = 0
    """How many modules had been asked before."""

    @property
    def words(self) -> str:
        """As a sentence's end."""
        if self.phase == BATCH:
            return "the batch itself holds a value that is not finite"
        if self.phase == LOSS:
            return "every module's output is finite, and the loss is not"
        return f"{self.module or 'the model'} ({self.kind}) is the first whose {self.phase} is not finite"


def find_first_bad(
    model: nn.Module, passes: Iterable[Callable[[], torch.Tensor | None]], batches: Iterable[Any] = ()
) -> BadModule | None:
    """The first module that makes a bad number in the given passes, forward and then backward.

    A pass returns its loss, or None where another rank has that. Every one is run to its end, whatever was
    found before, since ranks that compute together must all run the same number. Gradients are left behind:
    the caller clears them.
    """
    found = None if all(_finite(batch) for batch in batches) else BadModule(phase=BATCH)
    for run in passes:
        with _watch_modules(model) as seen:
            is_bad = not _finite(run())
        found = found or _forward(seen) or (BadModule(phase=LOSS) if is_bad else _backward(seen, model))
    return found


def in_stage(found: BadModule | None, stage: int, stages: int) -> BadModule | None:
    """What a stage of a pipeline found, counted behind all that the stages before it in the pass had asked.

    >>> in_stage(Suspect(phase=BACKWARD, order=3), 0, 2).order, in_stage(Suspect(phase=BACKWARD), 1, 2).order
    (1000003, 0)
    """
    if found is None:
        return None
    before = stages - 1 - stage if found.phase == BACKWARD else stage
    return found.replace(order=found.order + before * _MOST_MODULES)


def earliest(found: Iterable[BadModule | None]) -> BadModule | None:
    """What ranks agree on: the earliest in the step."""
    known = [bad_module for bad_module in found if bad_module is not None]
    return min(known, key=lambda one: (_EARLIER.index(one.phase), one.order), default=None)


class _Seen:
    """What the hooks of one pass saw, in the order of time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, nn.Module, bool, bool]] = []
        """Module, whether its inputs were finite, whether its outputs were."""
        self.gradients: list[tuple[str, str, bool]] = []
        """Module, the side of it ("in" or "out"), whether the gradient there was finite."""


@contextlib.contextmanager
def _watch_modules(model: nn.Module) -> Iterator[_Seen]:
    seen = _Seen()
    handles: list[Any] = []

    def watch(name: str, side: str, values: Any) -> None:
        handles.extend(
            leaf.register_hook(lambda grad: seen.gradients.append((name, side, _finite(grad))))
            for leaf in tree_leaves(values)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        )

    def before(name: str, _: nn.Module, values: Any, named: Any) -> None:
        watch(name, "in", (values, named))

    def after(name: str, module: nn.Module, values: Any, named: Any, output: Any) -> None:
        seen.calls.append((name, module, _finite((values, named)), _finite(output)))
        watch(name, "out", output)

    for name, module in model.named_modules():
        if isinstance(module, StandIn):
            # What it is given and gives is on another rank.
            continue
        handles.extend(
            (
                module.register_forward_pre_hook(functools.partial(before, name), with_kwargs=True),
                module.register_forward_hook(functools.partial(after, name), with_kwargs=True),
            )
        )
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _forward(seen: _Seen) -> BadModule | None:
    """The innermost comes first: a module is done after those inside it."""
    for order, (name, module, fine_in, fine_out) in enumerate(seen.calls):
        if fine_in and not fine_out:
            return BadModule(module=name, kind=type(module).__name__, phase=FORWARD, order=order)
    return None


def _backward(seen: _Seen, model: nn.Module) -> BadModule | None:
    """The first whose gradient is good where it comes in and bad where it goes out, or on its weights."""
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    bad_out = {name for name, side, fine in seen.gradients if side == "out" and not fine}
    for order, (name, side, fine) in enumerate(seen.gradients):
        if side == "in" and not fine and name not in bad_out:
            return BadModule(module=name, kind=kinds.get(name, ""), phase=BACKWARD, order=order)
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not _finite(weight.grad):
            owner = name.rpartition(".")[0]
            return BadModule(
                module=owner, kind=kinds.get(owner, ""), phase=BACKWARD, order=len(seen.gradients)
            )
    return None


def _finite(values: Any) -> bool:
    return all(
        bool(torch.isfinite(leaf.detach()).all())
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel()
    )


def keep_fp32(model: nn.Module, name: str) -> bool:
    """Let one module compute in fp32 from now on; False where this rank has no such module.

    Its weights stay in the dtype they have, for the optimizer's sake: they are cast on the way in. What
    comes out is fp32 under autocast, where whatever follows casts for itself; elsewhere it is cast back.
    """
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return False
    if isinstance(module, StandIn):
        return False
    if getattr(module, "_trimtab_fp32", False):
        return True
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kind = _device_type(module, args)
        autocast = torch.is_autocast_enabled(kind)
        before = _half_of((args, kwargs), module)
        wide_args, wide_kwargs = tree_map_only(torch.Tensor, _wide, (args, kwargs))
        with torch.autocast(kind, enabled=False), _wide_weights(module):
            output = inner(*wide_args, **wide_kwargs)
        if autocast or before is None:
            return output
        return tree_map_only(torch.Tensor, lambda one: _narrow(one, before), output)

    # As plain attributes: what torch makes of an assignment to a module is of no use here.
    module.__dict__.update(forward=forward, _trimtab_fp32=True)
    return True


def _device_type(module: nn.Module, args: Any) -> str:
    tensors = [
        parameter
        for parameter in (*module.parameters(), *tree_leaves(args))
        if isinstance(parameter, torch.Tensor)
    ]
    return tensors[0].device.type if tensors else "cpu"


def _half_of(values: Any, module: nn.Module) -> torch.dtype | None:
    """The 16-bit dtype that a module works in, if it does."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return next((tensor.dtype for tensor in (*tensors, *module.parameters()) if tensor.dtype in HALF), None)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _narrow(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor


@contextlib.contextmanager
def _wide_weights(module: nn.Module) -> Iterator[None]:
    """The module's 16-bit weights in fp32 for a while; gradients flow back through the cast."""
    taken = [
        (part, name, weight)
        for part in module.modules()
        for name, weight in part._parameters.items()  # noqa: SLF001 - the only way in that is undone without a trace
        if weight is not None and weight.dtype in HALF
    ]
    try:
        for part, name, weight in taken:
            part._parameters[name] = weight.float()  # type: ignore[assignment]  # noqa: SLF001
        yield
    finally:
        for part, name, weight in taken:
            part._parameters[name] = weight  # noqa: SLF001


AGAIN = "once more"
"""How the engine speaks of the repetition that every bad step gets: no answer of the ladder."""
BACK = "goes back to its last good checkpoint"


class BadStepHandler:
    """The ladder of one run, and the hands that climb it."""

    def __init__(self, run: Run, keeper: CheckpointManager, scribe: EventLog) -> None:
        self.run = run
        self.keeper = keeper
        self.scribe = scribe
        self.ladder = BadStepPolicy()
        self.since: int | None = None
        """The first bad step of the present trouble."""

    @property
    def limit(self) -> float | None:
        """The loss above which a step is a spike."""
        watched = bool(getattr(self.run.job, "spikes", True))
        return spike_limit(self.ladder.losses) if watched else None

    def after_good(self, loss: float) -> None:
        """A step went well."""
        self.ladder = after_good_step(self.ladder, loss)
        if self.ladder.height == 0:
            self.since = None

    def answer(self, window: Window, outcome: StepOutcome) -> bool:
        """Do what the ladder says about a bad step; True where the run has to go back before `since`."""
        done = window.step + 1
        self.since = done if self.since is None else self.since
        spike = isfinite(outcome.loss) and isfinite(outcome.grad_norm)
        kind = IncidentKind.LOSS_SPIKE if spike else IncidentKind.NOT_A_NUMBER
        # In float32 there is nothing to keep in a wider dtype.
        can_keep = self.run.setting.dtypes.is_narrow
        why = outcome.skipped
        rung = self._climb(kind, can_keep=can_keep)
        if rung is BadStepAction.FP32:
            found = suspect(self.run, window)
            if found is not None and found.module and found.module not in self.ladder.kept:
                self._keep(found, kind, why, done)
                return False
            why += f"; {found.words}" if found is not None else "; no module was found that makes it"
            is_data = found is not None and found.phase == BATCH
            rung = BadStepAction.SKIP if is_data else self._climb(kind, can_keep=False)
        if rung is BadStepAction.STOP:
            self._stop(kind, done, why)
        if rung is BadStepAction.LOWER_RATE:
            self.multiply_rate(SLOWER)
            slower = f"the learning rate is now {self.ladder.rate:g} of the job's"
            self.scribe.tell(kind, why, f"the step is skipped, and {slower}", step=done)
        elif rung is BadStepAction.SKIP:
            self.scribe.tell(kind, why, "the step is skipped: the weights stay", step=done)
        else:
            self.scribe.tell(kind, why, f"the run {BACK}", step=done)
        return rung is BadStepAction.ROLL_BACK

    def restored(self, saved: BadStepPolicy, *, rolled_back: bool) -> None:
        """After a checkpoint was loaded: the ladder of that run, or what was learnt before going back."""
        if rolled_back:
            self.ladder = after_rollback(self.ladder, saved)
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

    def _climb(self, kind: IncidentKind, *, can_keep: bool) -> BadStepAction:
        self.ladder, rung = after_bad_step(
            self.ladder, kind, can_keep=can_keep, can_roll_back=self._can_roll_back()
        )
        return rung

    def _can_roll_back(self) -> bool:
        """Whether there is a checkpoint from before the trouble; rank 0 looks, when all of it is written."""
        self.keeper.finish()
        assert self.since is not None  # noqa: S101 - there is trouble
        there = any(checkpoint.step < self.since for checkpoint in self.keeper.checkpoints())
        return bool(gather_values(self.run.world, there, everyone=True)[0])

    def _keep(self, found: BadModule, kind: IncidentKind, why: str, done: int) -> None:
        self.ladder = with_fp32_module(self.ladder, found.module)
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
        seen = tuple(f"at step {answer.step} {answer.done}" for answer in answers)
        went_back = any(BACK in answer.done for answer in answers)
        text = describe_stop_by_policy(self.ladder, kind, done, why, seen[-4:], went_back=went_back)
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


def suspect(run: Run, window: Window) -> BadModule | None:
    """The first bad module on any rank; all ranks make as many passes, and hear the same."""
    # The loss of a part that counts for nothing may be any number, and says nothing of the modules.
    parts = [part.batch for part in window.parts(run.micro_batch) if float(run.weight_of(part.batch))]
    most = max(gather_values(run.world, len(parts), everyone=True))
    batches = [run.on_device(part) for part in parts]
    passes: list[Callable[[], torch.Tensor | None]] = [
        functools.partial(run.passed, batch) for batch in batches
    ]
    along = run.on_device(window.filler())
    passes += [functools.partial(_passed_along, run, along)] * (most - len(parts))
    with run.quiet():
        found = find_first_bad(run.model, passes, batches)
    run.optimizer.zero_grad(set_to_none=True)
    mine = in_stage(found, run.groups.stage, run.groups.stages)
    told = gather_values(run.world, None if mine is None else mine.to_json(), everyone=True)
    return earliest(None if one is None else BadModule.from_json(one) for one in told)
