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

from trimtab.engine.pipeline_stage import RemoteBlock
from trimtab.engine.precision import HALF
from trimtab.errors import JobFailed
from trimtab.spec import IncidentKind
from trimtab.spec.base import Noun, check_minimum
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


GOOD_STEPS_TO_RESET = 100
"""Good steps after which a bad one is a new trouble."""
RATE_FACTOR = 0.8
"""What the rate is multiplied by."""
LOSS_HISTORY = 64
"""Losses that say what is usual."""
LEAST_LOSSES = 32
"""Losses before anything can be called unusual."""
SPIKE_SPREADS = 10.0
"""Robust standard deviations above the median."""
SPIKE_REACH = 3.0
"""Times as far above the median as any loss that was taken for good; heavy tails are not spikes."""
SPIKE_SHARE = 0.5
"""Of the median itself, where the losses hardly move."""
MAD_TO_SIGMA = 1.4826
"""Makes the median distance from the median a standard deviation, for normal losses."""


class BadStepAction(StrEnum):
    """One answer to a bad step."""

    SKIP = "skip"
    FP32 = "fp32"
    LOWER_RATE = "lower-rate"
    ROLL_BACK = "roll-back"
    STOP = "stop"


ACTIONS = tuple(BadStepAction)


class BadStepPolicy(Noun, frozen=True, kw_only=True):
    """Where a run stands. It travels in the checkpoint, so that a resumed run answers as this one would."""

    height: int = 0
    """Rungs climbed in the present trouble."""
    calm: int = GOOD_STEPS_TO_RESET
    """Good steps since the last bad one."""
    rate: float = 1.0
    """What the job's learning rate has been multiplied by."""
    kept: tuple[str, ...] = ()
    """Modules that compute in fp32 since they made a bad number."""
    losses: tuple[float, ...] = ()
    """The last good ones, oldest first."""

    def faults(self) -> list[str]:
        """Counts are not negative, and the rate is lowered, never raised."""
        wrong = check_minimum(0, height=self.height, calm=self.calm)
        if not 0 < self.rate <= 1:
            wrong.append(f"rate is {self.rate}, and must lie in (0, 1]")
        return wrong


def record_good_step(policy: BadStepPolicy, loss: float) -> BadStepPolicy:
    """After a step that went well."""
    calm = policy.calm + 1
    losses = (*policy.losses, loss)[-LOSS_HISTORY:] if isfinite(loss) else policy.losses
    return policy.replace(
        calm=calm, height=0 if calm >= GOOD_STEPS_TO_RESET else policy.height, losses=losses
    )


def choose_action(
    policy: BadStepPolicy, kind: IncidentKind, *, can_keep: bool = True, can_roll_back: bool = True
) -> tuple[BadStepPolicy, BadStepAction]:
    """After a step that went badly: the answer, and where that leaves the policy.

    `can_keep` says whether there may be a module to keep in fp32 (not where all is fp32 already), and
    `can_roll_back` whether there is a checkpoint.

    >>> ladder, rung = bad(Ladder(), IncidentKind.NOT_A_NUMBER)
    >>> rung, bad(ladder, IncidentKind.NOT_A_NUMBER)[1]
    (<Rung.SKIP: 'skip'>, <Rung.FP32: 'fp32'>)
    """
    height = policy.height
    while True:
        rung = ACTIONS[min(height, len(ACTIONS) - 1)]
        height += 1
        if rung is BadStepAction.FP32 and (kind is IncidentKind.LOSS_SPIKE or not can_keep):
            continue
        if rung is BadStepAction.ROLL_BACK and not can_roll_back:
            continue
        break
    changed = policy.replace(height=height, calm=0)
    return (lower_rate(changed) if rung is BadStepAction.LOWER_RATE else changed), rung


def lower_rate(policy: BadStepPolicy) -> BadStepPolicy:
    """With the rate lowered once more."""
    return policy.replace(rate=policy.rate * RATE_FACTOR)


def add_fp32_module(policy: BadStepPolicy, module: str) -> BadStepPolicy:
    """With one module more in fp32."""
    return policy if module in policy.kept else policy.replace(kept=(*policy.kept, module))


def restore_losses(policy: BadStepPolicy, saved: BadStepPolicy) -> BadStepPolicy:
    """After a roll-back: the losses are those of the checkpoint, all else is what was learnt since."""
    return policy.replace(losses=saved.losses)


def compute_spike_limit(losses: tuple[float, ...]) -> float | None:
    """The loss above which a step is called a spike; None while too few losses are known.

    Far above the median both by the spread of the losses and by how far any good one of late has been:
    losses that fall quickly or that have heavy tails do not set it off.

    >>> spike_limit((1.0,) * 40)
    1.5
    >>> spike_limit((1.0,) * 10) is None
    True
    """
    if len(losses) < LEAST_LOSSES:
        return None
    middle = median(losses)
    spread = MAD_TO_SIGMA * median(abs(loss - middle) for loss in losses)
    reach = max(losses) - middle
    return middle + max(SPIKE_SPREADS * spread, SPIKE_REACH * reach, SPIKE_SHARE * abs(middle))


def describe_stop_by_policy(  # noqa: PLR0913 - what happened, and what was done
    policy: BadStepPolicy,
    kind: IncidentKind,
    step: int,
    why: str,
    seen: tuple[str, ...],
    *,
    went_back: bool = True,
) -> str:
    """Why a run was stopped, in a few sentences: what was tried, and where to look."""
    tried = ["the step was skipped"]
    if policy.kept:
        tried.append(f"{', '.join(policy.kept)} computed in fp32")
    if policy.rate < 1:
        tried.append(f"the rate was multiplied by {policy.rate:g}")
    if went_back:
        tried.append("the run went back to its last good checkpoint")
    usual = f" Losses of late had a median of {median(policy.losses):.6g}." if policy.losses else ""
    what = "the loss is far above what was usual" if kind is IncidentKind.LOSS_SPIKE else "numbers are bad"
    before = f" Before that: {'; '.join(seen)}." if seen else ""
    return f"At step {step} {what} again ({why}), after {', '.join(tried)}.{usual}{before}"


# Finds the first module that makes a number that is not finite, and keeps a module in fp32.
#
# Runs only after a step has gone wrong twice, so it may be slow: every module is asked, forward and backward.


FORWARD, BACKWARD, BATCH, LOSS = "forward", "backward", "batch", "loss"
_PHASES = (BATCH, FORWARD, LOSS, BACKWARD)
"""In the order in which they come in a step."""
_MODULES_PER_STAGE = 10**6
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
    def text(self) -> str:
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
    found = None if all(_is_finite(batch) for batch in batches) else BadModule(phase=BATCH)
    for run in passes:
        with _watch_modules(model) as seen:
            is_bad = not _is_finite(run())
        found = (
            found
            or _find_bad_forward(seen)
            or (BadModule(phase=LOSS) if is_bad else _find_bad_backward(seen, model))
        )
    return found


def offset_by_stage(found: BadModule | None, stage: int, stages: int) -> BadModule | None:
    """What a stage of a pipeline found, counted behind all that the stages before it in the pass had asked.

    >>> in_stage(Suspect(phase=BACKWARD, order=3), 0, 2).order, in_stage(Suspect(phase=BACKWARD), 1, 2).order
    (1000003, 0)
    """
    if found is None:
        return None
    before = stages - 1 - stage if found.phase == BACKWARD else stage
    return found.replace(order=found.order + before * _MODULES_PER_STAGE)


def pick_earliest(found: Iterable[BadModule | None]) -> BadModule | None:
    """What ranks agree on: the earliest in the step."""
    known = [bad_module for bad_module in found if bad_module is not None]
    return min(known, key=lambda one: (_PHASES.index(one.phase), one.order), default=None)


class _PassRecord:
    """What the hooks of one pass saw, in the order of time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, nn.Module, bool, bool]] = []
        """Module, whether its inputs were finite, whether its outputs were."""
        self.gradients: list[tuple[str, str, bool]] = []
        """Module, the side of it ("in" or "out"), whether the gradient there was finite."""


@contextlib.contextmanager
def _watch_modules(model: nn.Module) -> Iterator[_PassRecord]:
    seen = _PassRecord()
    handles: list[Any] = []

    def watch(name: str, side: str, values: Any) -> None:
        handles.extend(
            leaf.register_hook(lambda grad: seen.gradients.append((name, side, _is_finite(grad))))
            for leaf in tree_leaves(values)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        )

    def before(name: str, _: nn.Module, values: Any, named: Any) -> None:
        watch(name, "in", (values, named))

    def after(name: str, module: nn.Module, values: Any, named: Any, output: Any) -> None:
        seen.calls.append((name, module, _is_finite((values, named)), _is_finite(output)))
        watch(name, "out", output)

    for name, module in model.named_modules():
        if isinstance(module, RemoteBlock):
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


def _find_bad_forward(seen: _PassRecord) -> BadModule | None:
    """The innermost comes first: a module is done after those inside it."""
    for order, (name, module, fine_in, fine_out) in enumerate(seen.calls):
        if fine_in and not fine_out:
            return BadModule(module=name, kind=type(module).__name__, phase=FORWARD, order=order)
    return None


def _find_bad_backward(seen: _PassRecord, model: nn.Module) -> BadModule | None:
    """The first whose gradient is good where it comes in and bad where it goes out, or on its weights."""
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    bad_out = {name for name, side, fine in seen.gradients if side == "out" and not fine}
    for order, (name, side, fine) in enumerate(seen.gradients):
        if side == "in" and not fine and name not in bad_out:
            return BadModule(module=name, kind=kinds.get(name, ""), phase=BACKWARD, order=order)
    for name, weight in reversed(list(model.named_parameters())):
        if weight.grad is not None and not _is_finite(weight.grad):
            owner = name.rpartition(".")[0]
            return BadModule(
                module=owner, kind=kinds.get(owner, ""), phase=BACKWARD, order=len(seen.gradients)
            )
    return None


def _is_finite(values: Any) -> bool:
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
    if isinstance(module, RemoteBlock):
        return False
    if getattr(module, "_trimtab_fp32", False):
        return True
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        kind = _device_type(module, args)
        autocast = torch.is_autocast_enabled(kind)
        before = _find_half_dtype((args, kwargs), module)
        wide_args, wide_kwargs = tree_map_only(torch.Tensor, _to_fp32, (args, kwargs))
        with torch.autocast(kind, enabled=False), _fp32_weights(module):
            output = inner(*wide_args, **wide_kwargs)
        if autocast or before is None:
            return output
        return tree_map_only(torch.Tensor, lambda one: _to_half(one, before), output)

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


def _find_half_dtype(values: Any, module: nn.Module) -> torch.dtype | None:
    """The 16-bit dtype that a module works in, if it does."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return next((tensor.dtype for tensor in (*tensors, *module.parameters()) if tensor.dtype in HALF), None)


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _to_half(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor


@contextlib.contextmanager
def _fp32_weights(module: nn.Module) -> Iterator[None]:
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


REPEATED = "once more"
"""How the engine speaks of the repetition that every bad step gets: no answer of the policy."""
WENT_BACK = "goes back to its last good checkpoint"


class BadStepHandler:
    """The ladder of one run, and the hands that climb it."""

    def __init__(self, run: Run, checkpoints: CheckpointManager, events: EventLog) -> None:
        self.run = run
        self.checkpoints = checkpoints
        self.events = events
        self.policy = BadStepPolicy()
        self.first_bad_step: int | None = None
        """The first bad step of the present trouble."""

    @property
    def spike_limit(self) -> float | None:
        """The loss above which a step is a spike."""
        watched = bool(getattr(self.run.job, "spikes", True))
        return compute_spike_limit(self.policy.losses) if watched else None

    def record_good(self, loss: float) -> None:
        """A step went well."""
        self.policy = record_good_step(self.policy, loss)
        if self.policy.height == 0:
            self.first_bad_step = None

    def handle(self, window: Window, outcome: StepOutcome) -> bool:
        """Do what the ladder says about a bad step; True where the run has to go back before `since`."""
        done = window.step + 1
        self.first_bad_step = done if self.first_bad_step is None else self.first_bad_step
        spike = isfinite(outcome.loss) and isfinite(outcome.grad_norm)
        kind = IncidentKind.LOSS_SPIKE if spike else IncidentKind.NOT_A_NUMBER
        # In float32 there is nothing to keep in a wider dtype.
        can_keep = self.run.setting.dtypes.is_narrow
        why = outcome.skipped
        rung = self._climb(kind, can_keep=can_keep)
        if rung is BadStepAction.FP32:
            found = find_bad_module(self.run, window)
            if found is not None and found.module and found.module not in self.policy.kept:
                self._keep(found, kind, why, done)
                return False
            why += f"; {found.text}" if found is not None else "; no module was found that makes it"
            is_data = found is not None and found.phase == BATCH
            rung = BadStepAction.SKIP if is_data else self._climb(kind, can_keep=False)
        if rung is BadStepAction.STOP:
            self._stop(kind, done, why)
        if rung is BadStepAction.LOWER_RATE:
            self.multiply_rate(RATE_FACTOR)
            slower = f"the learning rate is now {self.policy.rate:g} of the job's"
            self.events.record(kind, why, f"the step is skipped, and {slower}", step=done)
        elif rung is BadStepAction.SKIP:
            self.events.record(kind, why, "the step is skipped: the weights stay", step=done)
        else:
            self.events.record(kind, why, f"the run {WENT_BACK}", step=done)
        return rung is BadStepAction.ROLL_BACK

    def restore(self, saved: BadStepPolicy, *, rolled_back: bool) -> None:
        """After a checkpoint was loaded: the ladder of that run, or what was learnt before going back."""
        if rolled_back:
            self.policy = restore_losses(self.policy, saved)
            self.multiply_rate(self.policy.rate / saved.rate)
        else:
            self.policy = saved
        for name in self.policy.kept:
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
        self.policy, rung = choose_action(
            self.policy, kind, can_keep=can_keep, can_roll_back=self._can_roll_back()
        )
        return rung

    def _can_roll_back(self) -> bool:
        """Whether there is a checkpoint from before the trouble; rank 0 looks, when all of it is written."""
        self.checkpoints.finish()
        assert self.first_bad_step is not None  # noqa: S101 - there is trouble
        there = any(
            checkpoint.step < self.first_bad_step for checkpoint in self.checkpoints.list_checkpoints()
        )
        return bool(gather_values(self.run.world, there, everyone=True)[0])

    def _keep(self, found: BadModule, kind: IncidentKind, why: str, done: int) -> None:
        self.policy = add_fp32_module(self.policy, found.module)
        self._widen(found.module)
        answer = f"the step is skipped, and {found.module} computes in fp32 from now on"
        self.events.record(kind, f"{why}; {found.text}", answer, step=done)

    def _widen(self, name: str) -> None:
        keep_fp32(self.run.model, name)
        if self.run.setting.compile:
            import torch

            # What was compiled was compiled with the module as it was.
            torch._dynamo.reset()  # noqa: SLF001 - its public name loads the whole compiler

    def _stop(self, kind: IncidentKind, done: int, why: str) -> NoReturn:
        answers = [one for one in self.events.written if one.kind is kind and REPEATED not in one.done]
        seen = tuple(f"at step {answer.step} {answer.done}" for answer in answers)
        went_back = any(WENT_BACK in answer.done for answer in answers)
        text = describe_stop_by_policy(self.policy, kind, done, why, seen[-4:], went_back=went_back)
        kept = any((self.events.folder.root / "checkpoints").glob("*"))
        left = "The last good checkpoint is kept." if kept else "There was no checkpoint to go back to yet."
        self.events.record(kind, why, f"{STOPPED}. {text}", step=done)
        raise JobFailed(
            f"step {done} of {self.events.folder.root}",
            found=text.rstrip("."),
            cure="Look at the samples of that step and at the learning rate; `clip = 1.0` on the job clips "
            f"gradients. {left}",
        )


def _run_filler_pass(run: Run, batch: Any) -> None:
    """A pass for the sake of the others: its loss is nobody's."""
    run.forward_backward(batch)


def find_bad_module(run: Run, window: Window) -> BadModule | None:
    """The first bad module on any rank; all ranks make as many passes, and hear the same."""
    # The loss of a part that counts for nothing may be any number, and says nothing of the modules.
    parts = [part.batch for part in window.micro_batches(run.micro_batch) if float(run.weight_of(part.batch))]
    most = max(gather_values(run.world, len(parts), everyone=True))
    batches = [run.on_device(part) for part in parts]
    passes: list[Callable[[], torch.Tensor | None]] = [
        functools.partial(run.passed, batch) for batch in batches
    ]
    along = run.on_device(window.filler())
    passes += [functools.partial(_run_filler_pass, run, along)] * (most - len(parts))
    with run.quiet():
        found = find_first_bad(run.model, passes, batches)
    run.optimizer.zero_grad(set_to_none=True)
    mine = offset_by_stage(found, run.groups.stage, run.groups.stages)
    told = gather_values(run.world, None if mine is None else mine.to_json(), everyone=True)
    return pick_earliest(None if one is None else BadModule.from_json(one) for one in told)
