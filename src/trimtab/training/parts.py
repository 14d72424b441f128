"""A part of a step, as a loop handles it, and what becomes of a step."""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec
import torch

from trimtab.errors import WrongUse
from trimtab.training.batches import on_device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from trimtab.spec import Setting
    from trimtab.training.precision import LossScale
    from trimtab.training.reduce import Groups
    from trimtab.training.world import World


class StepRunner(Protocol):
    """What the passes of a step ask of the object that runs the step: a Stepper, or one in a test."""

    setting: Setting
    world: World
    groups: Groups
    device: torch.device
    autocast: torch.dtype | None
    scale: LossScale

    def at(self, point: str) -> Any:
        """Inject the fault that is scheduled for a point, if there is one."""

    def enter(self, part: Part) -> None:
        """Prepare the forward pass of a micro-batch."""

    def left(self) -> None:
        """Finish the backward pass of a micro-batch."""

    def backward(self, loss: Any, share: Any) -> None:
        """Run the backward pass of a loss that has this share in the loss of the step."""

    def backward_from(self, surrogate: torch.Tensor) -> None:
        """Run the backward pass of a micro-batch whose loss has been counted already."""

    def counts(self, loss: torch.Tensor) -> None:
        """Take a loss as this rank's part in the loss of the step."""

    def gives_up(self, why: str) -> None:
        """End the run on all ranks with a cause: no smaller micro-batch helps."""

    def count_statistics(self, ready: Any, part: Part) -> None:
        """Let BatchNorm's statistics over all ranks see only samples that count."""

    def swallows(self, error: BaseException) -> str | None:
        """Describe an error that the step recovers from; return None for any other."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one optimizer step; the same on all ranks but for `parts` and `micro_batch`."""

    step: int
    epoch: int
    loss: float
    """Of the whole global batch."""
    weight: float
    """What the loss is a mean over."""
    samples: int
    """Of the whole global batch."""
    grad_norm: float
    """Of the whole gradient, before clipping."""
    skipped: str = ""
    """Why nothing was learnt from it; empty where something was."""
    attempts: int = 1
    parts: int = 1
    """Forward passes on this rank, in the attempt that counted."""
    micro_batch: int
    """For the next step."""
    rollback_needed: bool = False
    """A rank's weights are not what the others have: go back to a checkpoint."""
    asked: float = 0.0
    """Sum over ranks of what Run.asked was."""
    ended_s: float | None = None
    """When the device was done with the passes, by time.perf_counter(), where the host was a step ahead and
    came to know of it later; None where the host waited."""


class Part:
    """Some of the samples of a step: one forward and one backward pass.

    with part:
        part.backward(loss(model, part.batch))
    """

    __slots__ = (
        "_batch",
        "_cast",
        "_entered",
        "_share",
        "_stepper",
        "count",
        "done",
        "error",
        "host",
        "number",
        "samples",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - made by the stepper alone
        self, stepper: StepRunner, host: Any, *, samples: int, share: Any, number: int, count: int
    ) -> None:
        self._stepper = stepper
        self.host = host
        """The samples where they were read; None once they have been let go."""
        self._batch: Any = None
        self._share = share
        self._cast: Any = None
        self._entered = False
        self.samples = samples
        """0 for a part that only keeps the other ranks company."""
        self.number = number
        self.count = count
        self.done = False
        self.error: str | None = None
        """Why this part, and with it this attempt, came to nothing."""

    @property
    def batch(self) -> Any:
        """The samples, on the device."""
        if self._batch is None:
            self._stepper.at("forward")
            self._batch = on_device(self.host, self._stepper.device)
        return self._batch

    @property
    def share(self) -> Any:
        """Of this part's loss in the loss of the whole global batch."""
        return self._share

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A forward pass by itself, as a stage of a pipeline makes it; its samples are let go afterwards."""
        stepper = self._stepper
        try:
            with torch.autocast(
                stepper.device.type, dtype=stepper.autocast, enabled=stepper.autocast is not None
            ):
                yield
        finally:
            self._batch = None

    def __enter__(self) -> Self:
        self._entered = True
        self._stepper.enter(self)
        if self._stepper.autocast is not None:
            self._cast = torch.autocast(self._stepper.device.type, dtype=self._stepper.autocast)
            self._cast.__enter__()
        return self

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of this part's loss, weighted by its share of the global batch."""
        if not self._entered or self.done:
            raise WrongUse(
                "part.backward()",
                found="it was called twice" if self.done else "it was called outside of `with part:`",
                cure="Call it once inside of `with part:`.",
            )
        self._leave_autocast()
        self._stepper.backward(loss, self._share)
        self.done = True

    def backward_from(self, surrogate: torch.Tensor) -> None:
        """The backward pass of gradient caching, whose loss was computed before, over the global batch."""
        self._leave_autocast()
        self._stepper.backward_from(surrogate)
        self.done = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._leave_autocast()
        self._entered = False
        self._batch = None
        if error is None:
            if not self.done:
                raise WrongUse(
                    "with part:",
                    found="part.backward() was not called",
                    cure="Call it with the loss of the part.",
                )
            self._stepper.left()
            return False
        self.error = self._stepper.swallows(error)
        if self.error is None:
            return False
        # What the failed pass left behind hangs on the frames that it came through.
        traceback.clear_frames(trace)
        return True

    def let_go(self) -> None:
        """Of the samples, so that their memory can be given back."""
        self._batch = self.host = None

    def _leave_autocast(self) -> None:
        if self._cast is not None:
            cast, self._cast = self._cast, None
            cast.__exit__(None, None, None)
