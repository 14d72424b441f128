"""Handle steps with bad numbers: NaN, infinity, or a loss far too high.

A bad step has been computed twice, with the same result, before it is handled here. The actions, in order:

    skip        leave the weights as they are and go on to the next batch
    fp32        find the first module that makes a bad number, and run it in fp32 from now on
    lower-rate  multiply the learning rate by 0.8
    roll-back   go back to the last good checkpoint
    stop        end the run with a report

Each further bad step gets the next action. A loss that is only too high has no bad module, so `fp32` is left
out for it. After GOOD_STEPS_TO_RESET good steps the actions begin with `skip` again; modules in fp32 and the
lower rate stay. All ranks take the same action.
"""

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
from trimtab.engine.stage_placement import AbsentWeight
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


GOOD_STEPS_TO_RESET = 100
"""Good steps after which the actions begin with the first again."""
RATE_FACTOR = 0.8
"""Factor by which the learning rate is lowered."""
LOSS_HISTORY = 64
"""Good losses that are kept to tell what is usual."""
LEAST_LOSSES = 32
"""Losses needed before a loss can be called a spike."""
SPIKE_SPREADS = 10.0
"""A spike is at least this many robust standard deviations above the median,"""
SPIKE_REACH = 3.0
"""this many times as far above the median as the largest good loss (heavy tails are not spikes),"""
SPIKE_SHARE = 0.5
"""and this share of the median above it, which matters where losses hardly move."""
MAD_TO_SIGMA = 1.4826
"""Turns the median absolute deviation into a standard deviation, for normally distributed losses."""


class BadStepAction(StrEnum):
    """What is done about a bad step."""

    SKIP = "skip"
    FP32 = "fp32"
    LOWER_RATE = "lower-rate"
    ROLL_BACK = "roll-back"
    STOP = "stop"


ACTIONS = tuple(BadStepAction)


class BadStepPolicy(Noun, frozen=True, kw_only=True):
    """State of the bad-step handling. It is saved in checkpoints, so that a resumed run goes on with it."""

    height: int = 0
    """Index of the next action: how many were taken or passed over since the last reset."""
    calm: int = GOOD_STEPS_TO_RESET
    """Good steps since the last bad one."""
    rate: float = 1.0
    """Product of all factors applied to the job's learning rate."""
    kept: tuple[str, ...] = ()
    """Names of the modules that run in fp32 because they made a bad number."""
    losses: tuple[float, ...] = ()
    """The last good losses, oldest first."""

    def faults(self) -> list[str]:
        """List what is wrong: negative counts, or a rate outside (0, 1]."""
        wrong = check_minimum(0, height=self.height, calm=self.calm)
        if not 0 < self.rate <= 1:
            wrong.append(f"rate is {self.rate}, and must lie in (0, 1]")
        return wrong


def record_good_step(policy: BadStepPolicy, loss: float) -> BadStepPolicy:
    """Return the policy after a good step with this loss."""
    calm = policy.calm + 1
    losses = (*policy.losses, loss)[-LOSS_HISTORY:] if isfinite(loss) else policy.losses
    return policy.replace(
        calm=calm, height=0 if calm >= GOOD_STEPS_TO_RESET else policy.height, losses=losses
    )


def choose_action(
    policy: BadStepPolicy, kind: IncidentKind, *, can_keep: bool = True, can_roll_back: bool = True
) -> tuple[BadStepPolicy, BadStepAction]:
    """Choose the action for a bad step; return the changed policy and the action.

    `can_keep` says whether a module could be moved to fp32 (False if all is fp32 already), and
    `can_roll_back` whether there is a checkpoint.

    >>> policy, action = choose_action(BadStepPolicy(), IncidentKind.NOT_A_NUMBER)
    >>> action, choose_action(policy, IncidentKind.NOT_A_NUMBER)[1]
    (<BadStepAction.SKIP: 'skip'>, <BadStepAction.FP32: 'fp32'>)
    """
    height = policy.height
    while True:
        action = ACTIONS[min(height, len(ACTIONS) - 1)]
        height += 1
        if action is BadStepAction.FP32 and (kind is IncidentKind.LOSS_SPIKE or not can_keep):
            continue
        if action is BadStepAction.ROLL_BACK and not can_roll_back:
            continue
        break
    changed = policy.replace(height=height, calm=0)
    return (lower_rate(changed) if action is BadStepAction.LOWER_RATE else changed), action


def lower_rate(policy: BadStepPolicy) -> BadStepPolicy:
    """Return the policy with the rate lowered once more."""
    return policy.replace(rate=policy.rate * RATE_FACTOR)


def add_fp32_module(policy: BadStepPolicy, module: str) -> BadStepPolicy:
    """Return the policy with one more module in fp32."""
    return policy if module in policy.kept else policy.replace(kept=(*policy.kept, module))


def restore_losses(policy: BadStepPolicy, saved: BadStepPolicy) -> BadStepPolicy:
    """Return the policy after a roll-back: with the losses of the checkpoint, otherwise unchanged."""
    return policy.replace(losses=saved.losses)


def compute_spike_limit(losses: tuple[float, ...]) -> float | None:
    """Return the loss above which a step counts as a spike; None if fewer than LEAST_LOSSES are known.

    The limit depends on the spread of the losses and on the largest recent good loss, so losses that fall
    quickly or have heavy tails do not trigger it.

    >>> compute_spike_limit((1.0,) * 40)
    1.5
    >>> compute_spike_limit((1.0,) * 10) is None
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
    """Return a few sentences on why the run was stopped and what was tried before."""
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


# The search for the first bad module runs only after a step was bad twice, so it may be slow: it puts hooks
# on every module, forward and backward.

FORWARD, BACKWARD, BATCH, LOSS = "forward", "backward", "batch", "loss"
_PHASES = (BATCH, FORWARD, LOSS, BACKWARD)
"""In the order of a step."""
_MODULES_PER_STAGE = 10**6
"""More than the hook calls of one pipeline stage; orders of later stages are offset by it."""


class BadModule(Noun, frozen=True, kw_only=True):
    """The first place in a step where a number is not finite."""

    module: str = ""
    """Name in the model; empty if the place is not a module."""
    kind: str = ""
    """Its class."""
    phase: str
    """FORWARD, BACKWARD, BATCH or LOSS."""
    order: int = 0
    """Hook calls before it in the same phase."""

    @property
    def text(self) -> str:
        """Describe it, as the end of a sentence."""
        if self.phase == BATCH:
            return "the batch itself holds a value that is not finite"
        if self.phase == LOSS:
            return "every module's output is finite, and the loss is not"
        return f"{self.module or 'the model'} ({self.kind}) is the first whose {self.phase} is not finite"


def find_first_bad(
    model: nn.Module, passes: Iterable[Callable[[], torch.Tensor | None]], batches: Iterable[Any] = ()
) -> BadModule | None:
    """Return the first module that makes a bad number in the given passes, forward and then backward.

    A pass returns its loss, or None if another rank has the loss. All passes are run even after a bad module
    was found, because ranks with collectives must run the same number of passes. The caller clears the
    gradients afterwards.
    """
    bad_module = None if all(_is_finite(batch) for batch in batches) else BadModule(phase=BATCH)
    for run in passes:
        with _watch_modules(model) as seen:
            is_bad = not _is_finite(run())
        bad_module = (
            bad_module
            or _find_bad_forward(seen)
            or (BadModule(phase=LOSS) if is_bad else _find_bad_backward(seen, model))
        )
    return bad_module


def offset_by_stage(bad_module: BadModule | None, stage: int, stages: int) -> BadModule | None:
    """Return a stage's finding with its order moved behind those of the stages that run before it.

    Forward passes run from stage 0 up, backward passes from the last stage down.

    >>> offset_by_stage(BadModule(phase=BACKWARD, order=3), 0, 2).order
    1000003
    >>> offset_by_stage(BadModule(phase=BACKWARD), 1, 2).order
    0
    """
    if bad_module is None:
        return None
    before = stages - 1 - stage if bad_module.phase == BACKWARD else stage
    return bad_module.replace(order=bad_module.order + before * _MODULES_PER_STAGE)


def pick_earliest(findings: Iterable[BadModule | None]) -> BadModule | None:
    """Return the finding that comes first in a step; None if no rank found a bad module."""
    modules = [bad_module for bad_module in findings if bad_module is not None]
    return min(modules, key=lambda module: (_PHASES.index(module.phase), module.order), default=None)


class _PassRecord:
    """What the hooks of one pass saw, in order of time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, nn.Module, bool, bool]] = []
        """Name, module, whether its inputs were finite, whether its outputs were."""
        self.gradients: list[tuple[str, str, bool]] = []
        """Name, side of the module ("in" or "out"), whether the gradient there was finite."""


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
            # Its inputs and outputs are on another rank.
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
    """Return the first module with finite inputs and a bad output.

    An inner module comes before the module that contains it, because its forward ends first.
    """
    for order, (name, module, fine_in, fine_out) in enumerate(seen.calls):
        if fine_in and not fine_out:
            return BadModule(module=name, kind=type(module).__name__, phase=FORWARD, order=order)
    return None


def _find_bad_backward(seen: _PassRecord, model: nn.Module) -> BadModule | None:
    """Return the first module whose incoming gradient is finite and whose outgoing one is not.

    If there is none, return the last module with a bad gradient on its weights.
    """
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
        if isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, AbsentWeight)
        and leaf.is_floating_point()
        and leaf.numel()
    )


def keep_fp32(model: nn.Module, name: str) -> bool:
    """Let one module compute in fp32 from now on; return False if this rank has no such module.

    The weights keep their dtype, because the optimizer holds them; they are cast in each forward. Under
    autocast the output stays fp32, and the next operation casts it; without autocast it is cast back.
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
        return tree_map_only(torch.Tensor, lambda tensor: _to_half(tensor, before), output)

    # Set in __dict__, to bypass what nn.Module does on attribute assignment.
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
    """Return the 16-bit dtype of a module's inputs or weights; None if it has none."""
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return next((tensor.dtype for tensor in (*tensors, *module.parameters()) if tensor.dtype in HALF), None)


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _to_half(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.dtype is torch.float32 else tensor


@contextlib.contextmanager
def _fp32_weights(module: nn.Module) -> Iterator[None]:
    """Replace the module's 16-bit weights by fp32 casts for a while; gradients flow through the casts."""
    replaced = [
        (part, name, weight)
        for part in module.modules()
        for name, weight in part._parameters.items()  # noqa: SLF001 - the only way in that is undone without a trace
        if weight is not None and weight.dtype in HALF
    ]
    try:
        for part, name, weight in replaced:
            part._parameters[name] = weight.float()  # type: ignore[assignment]  # noqa: SLF001
        yield
    finally:
        for part, name, weight in replaced:
            part._parameters[name] = weight  # noqa: SLF001


REPEATED = "once more"
"""In the message about the one repetition that every bad step gets; that is not an action of the policy."""
WENT_BACK = "goes back to its last good checkpoint"


class BadStepHandler:
    """Chooses and carries out the actions for the bad steps of one run."""

    def __init__(self, run: Run, checkpoints: CheckpointManager, events: EventLog) -> None:
        self.run = run
        self.checkpoints = checkpoints
        self.events = events
        self.policy = BadStepPolicy()
        self.first_bad_step: int | None = None
        """The first bad step since the last reset; None if there is none."""

    @property
    def spike_limit(self) -> float | None:
        """The loss above which a step counts as a spike; None if unknown or if the job sets spikes=False."""
        is_watched = bool(getattr(self.run.job, "spikes", True))
        return compute_spike_limit(self.policy.losses) if is_watched else None

    def record_good(self, loss: float) -> None:
        """Take note of a good step."""
        self.policy = record_good_step(self.policy, loss)
        if self.policy.height == 0:
            self.first_bad_step = None

    def handle(self, window: Window, outcome: StepOutcome) -> bool:
        """Act on a bad step; return True if the run has to go back before `first_bad_step`."""
        done = window.step + 1
        self.first_bad_step = done if self.first_bad_step is None else self.first_bad_step
        spike = isfinite(outcome.loss) and isfinite(outcome.grad_norm)
        kind = IncidentKind.LOSS_SPIKE if spike else IncidentKind.NOT_A_NUMBER
        # In fp32 no module can be moved to a wider dtype.
        can_keep = self.run.setting.dtypes.is_narrow
        why = outcome.skipped
        action = self._choose_action(kind, can_keep=can_keep)
        if action is BadStepAction.FP32:
            bad_module = find_bad_module(self.run, window)
            if bad_module is not None and bad_module.module and bad_module.module not in self.policy.kept:
                self._move_to_fp32(bad_module, kind, why, done)
                return False
            why += f"; {bad_module.text}" if bad_module is not None else "; no module was found that makes it"
            is_data = bad_module is not None and bad_module.phase == BATCH
            action = BadStepAction.SKIP if is_data else self._choose_action(kind, can_keep=False)
        if action is BadStepAction.STOP:
            self._stop(kind, done, why)
        if action is BadStepAction.LOWER_RATE:
            self.multiply_rate(RATE_FACTOR)
            slower = f"the learning rate is now {self.policy.rate:g} of the job's"
            self.events.record(kind, why, f"the step is skipped, and {slower}", step=done)
        elif action is BadStepAction.SKIP:
            self.events.record(kind, why, "the step is skipped: the weights stay", step=done)
        else:
            self.events.record(kind, why, f"the run {WENT_BACK}", step=done)
        return action is BadStepAction.ROLL_BACK

    def restore(self, saved: BadStepPolicy, *, rolled_back: bool) -> None:
        """Take over the policy of a loaded checkpoint; after a roll-back, only its losses."""
        if rolled_back:
            self.policy = restore_losses(self.policy, saved)
            self.multiply_rate(self.policy.rate / saved.rate)
        else:
            self.policy = saved
        for name in self.policy.kept:
            self._widen(name)

    def multiply_rate(self, factor: float) -> None:
        """Multiply the learning rate, and the initial rate that a schedule computes it from."""
        for optimizer in self.run.optimizers.values():
            for group in optimizer.param_groups:
                for name in ("lr", "initial_lr"):
                    if name in group:
                        group[name] = group[name] * factor
        for schedule in self.run.schedules.values():
            if hasattr(schedule, "base_lrs"):
                schedule.base_lrs = [rate * factor for rate in schedule.base_lrs]

    def _choose_action(self, kind: IncidentKind, *, can_keep: bool) -> BadStepAction:
        self.policy, action = choose_action(
            self.policy, kind, can_keep=can_keep, can_roll_back=self._can_roll_back()
        )
        return action

    def _can_roll_back(self) -> bool:
        """Return whether rank 0 has a checkpoint from before the first bad step; waits for the writer."""
        self.checkpoints.finish()
        assert self.first_bad_step is not None  # noqa: S101 - set by handle()
        there = any(
            checkpoint.step < self.first_bad_step for checkpoint in self.checkpoints.list_checkpoints()
        )
        return bool(gather_values(self.run.world, there, everyone=True)[0])

    def _move_to_fp32(self, bad_module: BadModule, kind: IncidentKind, why: str, done: int) -> None:
        self.policy = add_fp32_module(self.policy, bad_module.module)
        self._widen(bad_module.module)
        answer = f"the step is skipped, and {bad_module.module} computes in fp32 from now on"
        self.events.record(kind, f"{why}; {bad_module.text}", answer, step=done)

    def _widen(self, name: str) -> None:
        keep_fp32(self.run.model, name)
        if self.run.setting.compile:
            import torch

            # The compiled code has the module's old forward.
            torch._dynamo.reset()  # noqa: SLF001 - its public name loads the whole compiler

    def _stop(self, kind: IncidentKind, done: int, why: str) -> NoReturn:
        answers = [
            event for event in self.events.written if event.kind is kind and REPEATED not in event.done
        ]
        seen = tuple(f"at step {answer.step} {answer.done}" for answer in answers)
        went_back = any(WENT_BACK in answer.done for answer in answers)
        text = describe_stop_by_policy(self.policy, kind, done, why, seen[-4:], went_back=went_back)
        has_checkpoint = any((self.events.folder.root / "checkpoints").glob("*"))
        left = (
            "The last good checkpoint is kept."
            if has_checkpoint
            else "There was no checkpoint to go back to yet."
        )
        self.events.record(kind, why, f"{STOPPED}. {text}", step=done)
        raise JobFailed(
            f"step {done} of {self.events.folder.root}",
            found=text.rstrip("."),
            cure="Look at the samples of that step and at the learning rate; `clip = 1.0` on the job clips "
            f"gradients. {left}",
        )


def _run_filler_pass(run: Run, batch: Any) -> None:
    """Run a pass whose loss is ignored, so that this rank makes as many passes as the others."""
    run.forward_backward(batch)


def find_bad_module(run: Run, window: Window) -> BadModule | None:
    """Return the first bad module on any rank; all ranks get the same answer.

    Every rank makes the same number of passes.
    """
    # Micro-batches of weight 0 are left out: their loss may be any number.
    parts = [part.batch for part in window.micro_batches(run.micro_batch)]
    if run.groups.context_parallel == 1:
        parts = [part for part in parts if float(run.weight_of(part))]
    most = max(gather_values(run.world, len(parts), everyone=True))
    batches = [run.on_device(part) for part in parts]
    passes: list[Callable[[], torch.Tensor | None]] = [
        functools.partial(run.forward_backward, batch) for batch in batches
    ]
    along = run.on_device(window.filler())
    passes += [functools.partial(_run_filler_pass, run, along)] * (most - len(parts))
    with run.quiet():
        bad_module = find_first_bad(run.model, passes, batches)
    for optimizer in run.optimizers.values():
        optimizer.zero_grad(set_to_none=True)
    local = bad_module
    if bad_module is not None:
        local = offset_by_stage(bad_module, *run.find_stage(bad_module.module))
    texts = gather_values(run.world, None if local is None else local.to_json(), everyone=True)
    return pick_earliest(None if text is None else BadModule.from_json(text) for text in texts)
