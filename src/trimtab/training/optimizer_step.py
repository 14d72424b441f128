"""The optimizer step: skipped by the device itself where it can be, tried again where it changed nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from trimtab.spec import Allocator
from trimtab.spec.base import Noun
from trimtab.training.oom_recovery import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trimtab.spec import Dtypes, Setting


_MAX_ATTEMPTS = 3


class OptimizerInterrupted(Exception):  # noqa: N818 - it reads as a sentence in `raise`
    """The optimizer ran out of memory after it had changed something."""


class OptimizerStep:
    """Runs the optimizer, and knows whether a failed step has left a trace."""

    def __init__(self, optimizer: Any, *, clip: float | None, sharded: bool, cuda: bool) -> None:
        self.optimizer = optimizer
        self.clip = clip
        # A fused optimizer reads on the device whether to do anything. Sharded parameters do not mix with
        # plain tensors in one call.
        amp = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._called_off_on_device = amp and cuda and not sharded
        self.before: Callable[[], Any] | None = None
        """Called before every try: a drill may raise from it."""
        self._of: Any = None
        self._states = -1
        self._ready: frozenset[int] = frozenset()
        self._tensors: list[torch.Tensor] = []

    @property
    def on_device(self) -> bool:
        """Whether the device itself can call the step off, so that the host need not wait before it."""
        # The first step of SGD leaves its momentum as it found the memory where it is called off.
        begun = bool(self.optimizer.state) or isinstance(self.optimizer, torch.optim.Adam)
        return self._called_off_on_device and begun

    def launch(
        self, found_bad: torch.Tensor, divisor: torch.Tensor | None, release: Callable[[], None]
    ) -> None:
        """Start the step before the host knows whether it is wanted; `found_bad` decides on the device."""
        optimizer = self.optimizer
        optimizer.found_inf = found_bad
        optimizer.grad_scale = divisor
        try:
            self.step(release)
        finally:
            del optimizer.found_inf, optimizer.grad_scale

    def apply(
        self, gradients: list[torch.Tensor], norm: float, scale: float, release: Callable[[], None]
    ) -> None:
        """Clip and unscale, then step; the host knows that it is wanted."""
        factor = 1.0 / scale
        if self.clip is not None:
            factor *= min(1.0, self.clip / (norm + 1e-6))
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self.step(release)

    def step(self, release: Callable[[], None]) -> None:
        """The step, again after an out-of-memory that changed nothing; Interrupted after one that did."""
        watched = self._watched()
        versions = [one._version for one in watched]
        for attempt in range(_MAX_ATTEMPTS):
            try:
                if self.before is not None:
                    self.before()
                self.optimizer.step()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if versions != [one._version for one in watched]:
                    raise OptimizerInterrupted(str(error)) from error
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
            else:
                return
            self._forget_half_made()
            release()
            if attempt:
                self._plainly()

    def _watched(self) -> list[torch.Tensor]:
        """Parameters and states, whose versions count up with every change in place.

        States that a step makes are not among them: where it fails, they are thrown away.
        """
        state = self.optimizer.state
        if self._of is not state or self._states != len(state):
            self._of, self._states = state, len(state)
            self._ready = frozenset(id(parameter) for parameter in state)
            found = [one for group in self.optimizer.param_groups for one in group["params"]]
            found += [tensor for held in state.values() for tensor in _state_tensors(held)]
            self._tensors = [getattr(one, "_local_tensor", one) for one in found]
        return self._tensors

    def _forget_half_made(self) -> None:
        """A state without all of its tensors would be taken for a whole one."""
        state = self.optimizer.state
        for parameter in [one for one in state if id(one) not in self._ready]:
            del state[parameter]

    def _plainly(self) -> None:
        """One parameter after the other: without the copies that a step over all of them at once makes."""
        for group in self.optimizer.param_groups:
            if group.get("foreach") is not False and not group.get("fused"):
                group["foreach"] = False


def _state_tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, dict):
        for one in state.values():
            if isinstance(one, torch.Tensor):
                yield one


# What ranks tell each other at the end of a step: one tiny sum, judged on the device.
#
# The host never waits for the optimizer: the sum is copied to the host before the optimizer is launched, and
# only that copy is waited for.


class StepStatus(NamedTuple):
    """Sums over all ranks."""

    failed: float = 0.0
    """Ranks that could not compute their part."""
    fatal: float = 0.0
    """Ranks that cannot go on at all."""
    loss: float = 0.0
    squares: float = 0.0
    """The squared norm of all gradients, loss scale included."""
    weight: float = 0.0
    """What the loss is a mean over."""
    samples: float = 0.0
    asked: float = 0.0
    rollback: float = 0.0
    """Ranks whose optimizer was interrupted halfway."""
    strays: float = 0.0
    """Buffers that changed and were not known to."""
    resize: float = 0.0
    """Ranks that want another micro-batch."""


_LOSS, _SQUARES, _WEIGHT = (StepStatus._fields.index(name) for name in ("loss", "squares", "weight"))
_STOPPERS = torch.tensor([name in ("failed", "fatal", "rollback") for name in StepStatus._fields])


class StatusExchange:
    """Sends and receives the status of each step."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._size = size
        self._async = device.type == "cuda"
        length = len(StepStatus._fields)
        self._told = torch.zeros(length, dtype=torch.float64, pin_memory=self._async)
        self._seen = torch.zeros(length, dtype=torch.float64, pin_memory=self._async)
        self._sums = torch.zeros(length, dtype=torch.float64, device=device)
        self._stoppers = _STOPPERS.to(device)
        # Two in turns: they tell the time between two steps that the device ended before the host asked.
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._async else []
        self._turn = 0
        self._before: tuple[torch.cuda.Event, float] | None = None
        self.ended_s = 0.0
        """When the device had the sums that wait() returned last, by time.perf_counter()."""

    def send(
        self, told: StepStatus, *, loss: torch.Tensor | None, squares: torch.Tensor | None, weight: Any = None
    ) -> None:
        """Sum over ranks; loss, squares and, where it is a tensor, weight are on the device already."""
        self._told.copy_(torch.tensor(told, dtype=torch.float64))
        sums = self._sums
        sums.copy_(self._told, non_blocking=True)
        if loss is not None:
            sums[_LOSS] = loss
        if squares is not None:
            sums[_SQUARES] = squares
        if isinstance(weight, torch.Tensor):
            sums[_WEIGHT] = weight
        if self._size > 1:
            dist.all_reduce(sums)
        self._seen.copy_(sums, non_blocking=True)
        if self._events:
            self._turn = 1 - self._turn
            self._events[self._turn].record()
        else:
            self.ended_s = time.perf_counter()

    def found_bad(self, limit: float | None) -> torch.Tensor:
        """1.0 on the device where the update must not happen, as optimizers take `found_inf`."""
        sums = self._sums
        bad = ~torch.isfinite(sums[_LOSS : _SQUARES + 1]).all() | (sums * self._stoppers).any()
        if limit is not None:
            bad |= sums[_LOSS] > limit
        return bad.to(torch.float32)

    def divisor(self, clip: float | None, scale: float) -> torch.Tensor | None:
        """What gradients are divided by, on the device: loss scale and clipping; None where it is one."""
        if clip is None:
            if scale == 1.0:
                return None
            return torch.full((), scale, dtype=torch.float32, device=self._device)
        norm = self._sums[_SQUARES].sqrt()
        return torch.clamp((norm / scale + _EPSILON) / clip, min=1.0).mul(scale).to(torch.float32)

    def wait(self) -> StepStatus:
        """The sums, on the host."""
        if self._events:
            event = self._events[self._turn]
            late = event.query()
            event.synchronize()
            self.ended_s = time.perf_counter()
            if late and self._before is not None:
                # The host was busy with the next passes when the device was done with this step.
                first, first_s = self._before
                self.ended_s = min(self.ended_s, first_s + first.elapsed_time(event) / 1e3)
            self._before = event, self.ended_s
        return StepStatus(*self._seen.tolist())


_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ has it."""


class StepVerdict(NamedTuple):
    """What a status means."""

    kind: str
    why: str = ""


GOOD, REPLAY, NOT_FINITE, SPIKE, FATAL, ROLLBACK = (
    "good",
    "replay",
    "not finite",
    "spike",
    "fatal",
    "rollback",
)


def judge_status(status: StepStatus, *, limit: float | None, scale: float = 1.0) -> StepVerdict:
    """What all ranks do about a status; the same everywhere, since the sums are.

    >>> judged(Status(loss=float("nan")), limit=None).why
    'the loss is nan'
    """
    from math import isfinite, sqrt

    if status.fatal or status.failed:
        return StepVerdict(FATAL if status.fatal else REPLAY)
    if status.rollback:
        return StepVerdict(ROLLBACK, "the optimizer of a rank was interrupted halfway")
    if not isfinite(status.loss):
        return StepVerdict(NOT_FINITE, f"the loss is {status.loss}")
    if not isfinite(status.squares):
        return StepVerdict(
            NOT_FINITE, f"the norm of the gradients is {status.squares}, and the loss {status.loss:.6g}"
        )
    if limit is not None and status.loss > limit:
        norm = sqrt(status.squares) / scale
        return StepVerdict(
            SPIKE, f"the loss is {status.loss:.6g}, above {limit:.6g} (gradient norm {norm:.4g})"
        )
    return StepVerdict(GOOD)


def all_reduce_extreme(value: float, device: Any, size: int, *, least: bool) -> float:
    """The least or the largest of a number over all ranks; all ranks call it."""
    if size == 1:
        return value
    held = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MIN if least else dist.ReduceOp.MAX)
    return float(held.item())


# The loss scale that fp16 needs, and the environment of the planned allocator.


MIN_SCALE = 2.0**-10
MAX_SCALE = 2.0**24
GROW_AFTER_UPDATES = 2000
"""Updates without an overflow before the loss scale is doubled."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


class LossScale(Noun, frozen=True, kw_only=True):
    """What a loss is multiplied by so that fp16 gradients do not vanish; 1 where the loss is not scaled.

    Gradients are summed over ranks before they are judged, so that all ranks have the same scale always.
    """

    value: float = 1.0
    good: int = 0
    """Updates since it last changed."""

    @property
    def can_shrink(self) -> bool:
        """Whether a gradient that is not finite may be an overflow of this scale."""
        return self.value > MIN_SCALE and self.value != 1.0

    def halved(self) -> LossScale:
        """After an overflow."""
        return LossScale(value=self.value / 2)

    def after_good(self) -> LossScale:
        """After an update: doubled where there was no overflow for long."""
        if self.value == 1.0:
            return self
        if self.good + 1 < GROW_AFTER_UPDATES or self.value >= MAX_SCALE:
            return LossScale(value=self.value, good=self.good + 1)
        return LossScale(value=self.value * 2)


def initial_scale(dtypes: Dtypes) -> LossScale:
    """The scale that a run begins with."""
    return LossScale(value=2.0**16) if dtypes.scales_loss else LossScale()


def allocator_variables(setting: Setting, env: Mapping[str, str]) -> dict[str, str]:
    """What has to be in the environment before CUDA starts, so that the allocator is the planned one.

    >>> from trimtab.spec import Setting
    >>> plan = Setting(micro_batch=1, global_batch=1, allocator=Allocator.EXPANDABLE)
    >>> allocator_variables(plan, {})["PYTORCH_CUDA_ALLOC_CONF"]
    'expandable_segments:True'
    """
    if setting.allocator is not Allocator.EXPANDABLE:
        return {}
    changed = {}
    for name in ALLOCATOR_VARIABLES:
        there = env.get(name, "")
        if "expandable_segments" not in there:
            changed[name] = f"{there},{_EXPANDABLE}" if there else _EXPANDABLE
    return changed
