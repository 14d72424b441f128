"""Go on after an out-of-memory error: run the same batch again in smaller parts, with the same gradient.

The gradients of an optimizer step are accumulated on each rank without communication, so that a rank that
needs several attempts keeps no other rank waiting in a collective. They are averaged over the ranks at the
end.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from trimtab.integrations.batches import (
    MOST_SAMPLES,
    SplitRule,
    count_samples,
    find_split_rule,
    split_rows,
    why_not_rows,
)
from trimtab.strategies import limits
from trimtab.training.oom_recovery import (
    MemoryGauge,
    MicroBatchFitter,
    MicroBatchSizes,
    even_micro_batch,
    is_out_of_memory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from trimtab.spec import Estimate

NO_LIMIT = 1 << 40
"""Micro-batch size before anything ran out of memory: a batch is not split."""


class StepFunctions(NamedTuple):
    """What the recovery needs from a framework."""

    run: Callable[[Any, float], torch.Tensor]
    """Forward and backward pass of a batch with its loss multiplied by a factor; returns that loss."""
    loss: Callable[[Any], Any]
    """Loss of a batch, without a backward pass and without communication."""
    record: Callable[[str, str], None]
    """Writes an out-of-memory event: why, and what was done."""
    step: Callable[[], int]
    """Number of the optimizer step, from 1."""


class RankFlags(NamedTuple):
    """What the ranks tell each other before gradients are averaged."""

    failed: bool = False
    unused: bool = False
    """Whether some parameter has no gradient on this rank."""
    events: bool = False
    """Whether this rank has events that rank 0 does not have."""


class RecoveryFailedError(RuntimeError):
    """Raised on all ranks if a rank ran out of memory and could not go on."""


def why_not_recoverable(model: Any) -> str:
    """Return why trimtab cannot go on after an out-of-memory error of this model; empty if it can."""
    if isinstance(model, DistributedDataParallel):
        if getattr(model, "_comm_hooks", None):
            return "DistributedDataParallel has a communication hook"
        return "DistributedDataParallel has a static graph" if model.static_graph else ""
    names = {base.__name__ for base in type(model).__mro__}
    sharded = names & {"FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine"}
    if sharded:
        return f"{min(sharded)} communicates in every pass, so a rank cannot repeat one alone"
    return ""


class MicroBatchRecovery:
    """Runs the micro-batches of an optimizer step, in parts where they do not fit."""

    def __init__(
        self,
        model: nn.Module,
        functions: StepFunctions,
        *,
        group: Any = None,
        micro_batch: int | None = None,
        estimate: Estimate | None = None,
    ) -> None:
        """With `micro_batch`, larger batches are split from the start. `group` is for flags between ranks."""
        self.model = model
        self.inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
        self.functions = functions
        self.group = group
        device = next(self.inner.parameters()).device
        size = micro_batch or NO_LIMIT
        self._fitter = MicroBatchFitter(
            MicroBatchSizes(planned=size, current=size),
            gauge=MemoryGauge(device) if device.type == "cuda" else None,
            estimate=estimate,
            estimated_for=micro_batch or 0,
            may_exceed_plan=False,
        )
        self._window: list[Any] = []
        self._rule: SplitRule | None = None
        self.attempts = 1
        """How often the current optimizer step was computed."""
        self.has_events = False
        self.gathered_events: Callable[[], None] | None = None
        """Called on all ranks when a rank has events."""

    @property
    def micro_batch(self) -> int | None:
        """The current size; None if batches are not split."""
        current = self._fitter.sizes.current
        return None if current == NO_LIMIT else current

    @property
    def is_wrapped(self) -> bool:
        """Whether the model is wrapped by DistributedDataParallel, even with a single rank."""
        return isinstance(self.model, DistributedDataParallel)

    @property
    def is_distributed(self) -> bool:
        """Whether gradients are averaged over ranks."""
        return self.is_wrapped and dist.get_world_size() > 1

    def begin_step(self) -> None:
        """Begin an optimizer step, with no gradients."""
        self._window, self.attempts = [], 1
        if self.is_distributed:
            model: Any = self.model
            model.require_forward_param_sync = True
            if model.will_sync_module_buffers():
                model._sync_buffers()  # noqa: SLF001 - once a step, where a failed pass cannot repeat it

    def run(self, batch: Any, *, last: bool) -> torch.Tensor:
        """Run a micro-batch; after the last one of a step, average the gradients over the ranks."""
        waiting = [batch]
        while True:
            error: BaseException | None = None
            try:
                with self._without_sync():
                    losses = [self._run_batch(item) for item in waiting]
            except Exception as caught:
                if not is_out_of_memory(caught):
                    raise
                # The frames of the error hold the tensors of the failed pass.
                error = caught.with_traceback(None)
                error.__context__ = None
            if error is None:
                break
            self._shrink(batch, error)
            self._drop_gradients()
            self.attempts += 1
            # A failed backward pass leaves a part of its gradients, so the whole step is computed again.
            waiting = [*self._window, batch]
        self._window.append(batch)
        if last:
            self._finish_step()
        return losses[-1]

    def _run_batch(self, batch: Any) -> torch.Tensor:
        samples, size = count_samples(batch), self._fitter.sizes.current
        if samples <= size:
            return self.functions.run(batch, 1.0)
        if self._rule is None:
            self._rule = self._find_rule(batch)
        parts = split_rows(batch, even_micro_batch(size, samples))
        shares = self._rule.shares(parts)
        # The mean over no labels is not a number.
        losses = [self.functions.run(part, share) for part, share in zip(parts, shares, strict=True) if share]
        return torch.stack([loss.detach() for loss in losses]).sum()

    def _find_rule(self, batch: Any) -> SplitRule:
        rule, why = self._examine_loss(batch)
        if rule is None:
            raise _CannotSplitError(why)
        return rule

    def _examine_loss(self, batch: Any) -> tuple[SplitRule | None, str]:
        """Return how the loss can be split, or None and the reason; use fewer samples if memory runs out."""
        most = MOST_SAMPLES
        while most > 1:
            try:
                return find_split_rule(self.inner, self.functions.loss, batch, most=most)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            self._fitter.release()
            most //= 2
        return None, "2 samples do not fit, so their loss cannot be compared with that of each"

    def _shrink(self, batch: Any, error: BaseException) -> None:
        """Choose a smaller micro-batch, or give up on all ranks."""
        self._fitter.release()
        samples = count_samples(batch)
        size = min(self._fitter.sizes.current, samples)
        first = str(error).strip().split("\n")[0][:160]
        why = why_not_rows(batch)
        if not why and self._rule is None and samples > 1:
            self._rule, why = self._examine_loss(batch)
        change = None if why else self._fitter.shrink_after_oom(size=size, share=samples, step=0)
        self._fitter.release()
        if change is None:
            reason = why or "a single sample does not fit"
            self._record(f"{size} samples ran out of memory: {first}", f"the run ends: {reason}")
            self._exchange(RankFlags(failed=True, events=self.has_events))
            raise error
        assert self._rule is not None  # noqa: S101 - two samples have a rule
        self._record(
            f"{size} samples at once ran out of memory: {first}",
            f"the same {samples} samples are run {change.sizes.current} at a time with the same gradient "
            f"(the loss is {self._rule.name}); the global batch stays",
        )

    def _record(self, why: str, done: str) -> None:
        self.functions.record(why, done)
        self.has_events = True

    def _drop_gradients(self) -> None:
        for parameter in self.inner.parameters():
            parameter.grad = None

    @contextlib.contextmanager
    def _without_sync(self) -> Iterator[None]:
        if not self.is_wrapped:
            yield
            return
        model: Any = self.model
        model.require_forward_param_sync = False
        with model.no_sync():
            yield

    def _finish_step(self) -> None:
        if not self.is_distributed:
            return
        trained = [parameter for parameter in self.inner.parameters() if parameter.requires_grad]
        unused = any(parameter.grad is None for parameter in trained)
        flags = self._exchange(RankFlags(unused=unused, events=self.has_events))
        if flags.failed:
            raise RecoveryFailedError("another rank ran out of memory and could not go on; see its error")
        if flags.unused:
            trained = self._fill_missing(trained)
        average_gradients([parameter.grad for parameter in trained if parameter.grad is not None], self.model)

    def _exchange(self, mine: RankFlags) -> RankFlags:
        """Return the flags that any rank has set; all ranks call it once a step."""
        self.has_events = False
        if not self.is_distributed:
            if mine.events and self.gathered_events is not None:
                self.gathered_events()
            return mine
        values = torch.tensor([int(flag) for flag in mine])
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        flags = RankFlags(*(bool(value) for value in values.tolist()))
        if flags.events and self.gathered_events is not None:
            self.gathered_events()
        return flags

    def _fill_missing(self, trained: list[Any]) -> list[Any]:
        """Give a parameter zeros if only other ranks have a gradient; return those with a gradient."""
        has = torch.tensor([int(parameter.grad is not None) for parameter in trained])
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=self.group)
        used = [parameter for parameter, any_rank in zip(trained, has.tolist(), strict=True) if any_rank]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return used


class _CannotSplitError(RuntimeError):
    """The planned micro-batch needs a split that would change the training."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the batch cannot be split exactly: {why}")


def average_gradients(gradients: list[torch.Tensor], model: Any) -> None:
    """Average gradients over the ranks of a DistributedDataParallel model, a bucket at a time."""
    group = model.process_group
    world = dist.get_world_size(group)
    buckets: list[list[torch.Tensor]] = []
    room, dtype = 0, None
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if gradient.dtype != dtype or size > room:
            buckets.append([])
            room, dtype = limits.BUCKET_BYTES, gradient.dtype
        buckets[-1].append(gradient)
        room -= size
    for bucket in buckets:
        flat = _flatten_dense_tensors(bucket).div_(world)
        dist.all_reduce(flat, group=group)
        for gradient, summed in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(summed)
