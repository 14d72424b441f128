"""Run the optimizer step and the status exchange between ranks before it.

A fused optimizer on CUDA is launched before the host knows whether the step is good: the device skips a bad
step itself. The module also has the loss scale of fp16.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from trimtab.spec.base import Noun
from trimtab.training.oom_recovery import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.spec import Dtypes


_MAX_ATTEMPTS = 3


class OptimizerInterrupted(Exception):  # noqa: N818 - it reads as a sentence in `raise`
    """The optimizer ran out of memory after it had changed something."""


class OptimizerStep:
    """Runs the optimizers of one loss, and detects whether a failed step has changed any weights."""

    def __init__(self, *optimizers: Any, clip: float | None, sharded: bool, cuda: bool) -> None:
        self.optimizers = optimizers
        self.due = optimizers
        """Those that update in the current step."""
        self.clip = clip
        # A fused optimizer reads on the device whether to skip the step. Sharded parameters cannot be mixed
        # with plain tensors in one call.
        amp = all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers)
        self._can_skip_on_device = amp and cuda and not sharded
        self.before: Callable[[], Any] | None = None
        """Called before every attempt: fault injection may raise from it."""
        self._watched_states: list[tuple[int, int]] = []
        self._old_state_ids: frozenset[int] = frozenset()
        self._tensors: list[torch.Tensor] = []

    @property
    def skips_on_device(self) -> bool:
        """Whether the device itself can skip the step, so that the host need not wait before it."""
        # If its first step is skipped, SGD keeps a momentum buffer of uninitialised memory.
        begun = all(
            optimizer.state or isinstance(optimizer, torch.optim.Adam) for optimizer in self.optimizers
        )
        return self._can_skip_on_device and begun

    def launch(
        self, bad_flag: torch.Tensor, divisor: torch.Tensor | None, release: Callable[[], None]
    ) -> None:
        """Launch the step before the host knows whether it is good; `bad_flag` skips it on the device."""
        for optimizer in self.due:
            optimizer.found_inf = bad_flag
            optimizer.grad_scale = divisor
        try:
            self.step(release)
        finally:
            for optimizer in self.due:
                del optimizer.found_inf, optimizer.grad_scale

    def apply(
        self, gradients: list[torch.Tensor], norm: float, scale: float, release: Callable[[], None]
    ) -> None:
        """Clip and unscale the gradients, then step; for a step that the host knows to be good."""
        factor = 1.0 / scale
        if self.clip is not None:
            factor *= min(1.0, self.clip / (norm + 1e-6))
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self.step(release)

    def step(self, release: Callable[[], None]) -> None:
        """Step; retry after an out-of-memory error that changed nothing.

        Raise OptimizerInterrupted after an error that changed something.
        """
        watched = self._watched_tensors()
        versions = [tensor._version for tensor in watched]
        for attempt in range(_MAX_ATTEMPTS):
            try:
                if self.before is not None:
                    self.before()
                for optimizer in self.due:
                    optimizer.step()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if versions != [tensor._version for tensor in watched]:
                    raise OptimizerInterrupted(str(error)) from error
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
            else:
                return
            self._drop_new_state()
            release()
            if attempt:
                self._disable_foreach()

    def _watched_tensors(self) -> list[torch.Tensor]:
        """Return parameters and optimizer state; their versions increase with every in-place change.

        State that the step itself creates is not included: it is dropped if the step fails.
        """
        states = [optimizer.state for optimizer in self.optimizers]
        watched = [(id(state), len(state)) for state in states]
        if self._watched_states != watched:
            self._watched_states = watched
            self._old_state_ids = frozenset(id(parameter) for state in states for parameter in state)
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            tensors = [parameter for group in groups for parameter in group["params"]]
            tensors += [
                tensor for state in states for entry in state.values() for tensor in _state_tensors(entry)
            ]
            self._tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        return self._tensors

    def _drop_new_state(self) -> None:
        """Drop state that the failed step created: the next step would take it for complete."""
        for state in (optimizer.state for optimizer in self.optimizers):
            for parameter in [key for key in state if id(key) not in self._old_state_ids]:
                del state[parameter]

    def _disable_foreach(self) -> None:
        """Update one parameter at a time: a foreach step needs copies of all of them at once."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            if group.get("foreach") is not False and not group.get("fused"):
                group["foreach"] = False


def _state_tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, dict):
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value


# Status exchange: one small all-reduce at the end of a step, judged on the device. The sums are copied to the
# host before the optimizer is launched, and the host waits only for that copy, never for the optimizer.


class StepStatus(NamedTuple):
    """Status of a step: sums over all ranks."""

    failed: float = 0.0
    """Ranks that could not compute their samples."""
    fatal: float = 0.0
    """Ranks that cannot continue at all."""
    loss: float = 0.0
    squares: float = 0.0
    """The squared norm of all gradients, loss scale included."""
    weight: float = 0.0
    """Weight that the loss is a mean over: samples, or tokens."""
    samples: float = 0.0
    asked: float = 0.0
    rollback: float = 0.0
    """Ranks whose optimizer was interrupted halfway."""
    strays: float = 0.0
    """Buffers that changed unexpectedly."""
    resize: float = 0.0
    """Ranks that want another micro-batch."""


_LOSS, _SQUARES, _WEIGHT = (StepStatus._fields.index(name) for name in ("loss", "squares", "weight"))
_STOPPERS = torch.tensor([name in ("failed", "fatal", "rollback") for name in StepStatus._fields])


class StatusExchange:
    """Sums the status of each step over ranks, without making the host wait for the optimizer."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._size = size
        self._async = device.type == "cuda"
        length = len(StepStatus._fields)
        self._sent = torch.zeros(length, dtype=torch.float64, pin_memory=self._async)
        self._received = torch.zeros(length, dtype=torch.float64, pin_memory=self._async)
        self._sums = torch.zeros(length, dtype=torch.float64, device=device)
        self._stoppers = _STOPPERS.to(device)
        # Two alternating events: they measure the time between steps that ended before the host waited.
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._async else []
        self._turn = 0
        self._last_event: tuple[torch.cuda.Event, float] | None = None
        self.ended_s = 0.0
        """When the device had the sums that wait() last returned, by time.perf_counter()."""

    def send(
        self,
        status: StepStatus,
        *,
        loss: torch.Tensor | None,
        squares: torch.Tensor | None,
        weight: Any = None,
    ) -> None:
        """Start the sum over ranks; loss, squares and a tensor weight are on the device already."""
        self._sent.copy_(torch.tensor(status, dtype=torch.float64))
        sums = self._sums
        sums.copy_(self._sent, non_blocking=True)
        if loss is not None:
            sums[_LOSS] = loss
        if squares is not None:
            sums[_SQUARES] = squares
        if isinstance(weight, torch.Tensor):
            sums[_WEIGHT] = weight
        if self._size > 1:
            dist.all_reduce(sums)
        self._received.copy_(sums, non_blocking=True)
        if self._events:
            self._turn = 1 - self._turn
            self._events[self._turn].record()
        else:
            self.ended_s = time.perf_counter()

    def bad_flag(self, limit: float | None) -> torch.Tensor:
        """Return 1.0 on the device if the update must be skipped, as optimizers take `found_inf`."""
        sums = self._sums
        bad = ~torch.isfinite(sums[_LOSS : _SQUARES + 1]).all() | (sums * self._stoppers).any()
        if limit is not None:
            bad |= sums[_LOSS] > limit
        return bad.to(torch.float32)

    def divisor(self, clip: float | None, scale: float) -> torch.Tensor | None:
        """Return the divisor of the gradients (loss scale and clipping) on the device; None if it is 1."""
        if clip is None:
            if scale == 1.0:
                return None
            return torch.full((), scale, dtype=torch.float32, device=self._device)
        norm = self._sums[_SQUARES].sqrt()
        return torch.clamp((norm / scale + _EPSILON) / clip, min=1.0).mul(scale).to(torch.float32)

    def wait(self) -> StepStatus:
        """Wait for the sums and return them, on the host."""
        if self._events:
            event = self._events[self._turn]
            late = event.query()
            event.synchronize()
            self.ended_s = time.perf_counter()
            if late and self._last_event is not None:
                # The device finished this step while the host was busy with the next passes.
                first, first_s = self._last_event
                self.ended_s = min(self.ended_s, first_s + first.elapsed_time(event) / 1e3)
            self._last_event = event, self.ended_s
        return StepStatus(*self._received.tolist())


_EPSILON = 1e-6
"""The same as in torch.nn.utils.clip_grad_norm_."""


class StepVerdict(NamedTuple):
    """What all ranks do after a status, and why."""

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
    """Return what all ranks do after a status; all decide the same, since they have the same sums.

    >>> judge_status(StepStatus(loss=float("nan")), limit=None).why
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
    """Return the minimum (`least`) or maximum of a number over all ranks; all ranks call it."""
    if size == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN if least else dist.ReduceOp.MAX)
    return float(tensor.item())


MIN_SCALE = 2.0**-10
MAX_SCALE = 2.0**24
GROW_AFTER_UPDATES = 2000
"""Updates without an overflow before the loss scale is doubled."""


class LossScale(Noun, frozen=True, kw_only=True):
    """Factor of the loss that keeps fp16 gradients from underflowing; 1 if the loss is not scaled.

    Gradients are summed over ranks before they are checked, so all ranks always have the same scale.
    """

    value: float = 1.0
    good: int = 0
    """Updates since the last change."""

    @property
    def can_shrink(self) -> bool:
        """Whether this scale may have caused a gradient that is not finite."""
        return self.value > MIN_SCALE and self.value != 1.0

    def after_overflow(self) -> LossScale:
        """Return the scale after an overflow: half."""
        return LossScale(value=self.value / 2)

    def after_update(self) -> LossScale:
        """Return the scale after a good update: doubled after many updates without an overflow."""
        if self.value == 1.0:
            return self
        if self.good + 1 < GROW_AFTER_UPDATES or self.value >= MAX_SCALE:
            return LossScale(value=self.value, good=self.good + 1)
        return LossScale(value=self.value * 2)


def initial_scale(dtypes: Dtypes) -> LossScale:
    """Return the loss scale at the start of a run."""
    return LossScale(value=2.0**16) if dtypes.scales_loss else LossScale()
