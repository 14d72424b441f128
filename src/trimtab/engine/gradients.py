"""Store gradients and sum them over ranks during the backward pass.

`LocalGradients`: one process, gradients as autograd makes them. `Reducer`: gradients are views of flat
buckets that are summed over ranks. `trimtab.engine.fsdp.ShardedGradients`: FSDP2 reduce-scatters them.

torch's own reducer cannot continue after an exception in the backward pass. This one can, because the order
of its buckets is fixed: a rank that fails sends the remaining buckets as they are and reports the failure in
the status, and all ranks retry. Gradients are sums, not means: losses are weighted before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from trimtab.errors import JobFailed
from trimtab.strategies import limits
from trimtab.strategies.schedules import Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


class StagePass(NamedTuple):
    """A pass of a pipeline schedule on this rank, as far as gradients depend on it."""

    kind: Pass
    place: int = 0
    """Index of its stage among those of this rank."""
    ends_stage: bool = False
    """Whether it is the last of its stage in a step that adds to gradients."""
    ends_step: bool = False
    """Whether it is the last of this rank."""

    @property
    def adds_gradients(self) -> bool:
        """Whether it adds to gradients."""
        return self.kind is not Pass.FORWARD


class Gradients(Protocol):
    """Interface for combining the gradients of all ranks."""

    equal_micro_batches: bool
    """Whether all ranks must run the same number of micro-batches."""
    max_arrivals: int
    """Largest number of gradient events in a backward pass."""

    @property
    def sent_any(self) -> bool:
        """Whether this rank has sent anything to other ranks in this attempt."""

    @property
    def is_rehearsed(self) -> bool:
        """Whether passes of one sample have recorded all collectives, or none are needed."""

    def start_attempt(self) -> None:
        """Prepare for an attempt at a step: reset the gradients."""

    def prepare_micro_batch(self, number: int, count: int) -> None:
        """Prepare for micro-batch `number` of `count`."""

    def start_pass(self, stage_pass: StagePass) -> None:
        """Prepare for a pass of a pipeline."""

    def finish_pass(self, stage_pass: StagePass) -> None:
        """Complete the gradients of a pass of a pipeline that succeeded."""

    def abandon_pass(self) -> None:
        """Free everything that a failed pass of a pipeline holds, and join its remaining collectives."""

    def skip_pass(self, stage_pass: StagePass) -> None:
        """Join the collectives of a pass of a pipeline that this rank does not run, because it failed."""

    def discard_micro_batch(self) -> None:
        """Free everything that the failed micro-batch holds."""

    def finish_attempt(self, failed_at: int | None, count: int) -> None:
        """Send what the other ranks still wait for, also if micro-batch `failed_at` failed."""

    def squared_norm(self) -> torch.Tensor:
        """Return this rank's part of the squared norm of the gradient."""

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the gradient tensors of this rank."""

    def close(self) -> None:
        """Remove hooks from the model."""


class Bucket:
    """Gradients in one flat buffer that are summed together."""

    __slots__ = ("flat", "group", "holders", "is_local", "parameters", "pending", "sent", "views", "work")

    def __init__(self, parameters: list[nn.Parameter], group: Any, holders: int) -> None:
        first = parameters[0]
        length = sum(parameter.numel() for parameter in parameters)
        self.parameters = parameters
        self.flat = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.views = []
        start = 0
        for parameter in parameters:
            # Same strides as the parameter: fused optimizers and channels-last weights need them.
            self.views.append(_make_view(self.flat[start : start + parameter.numel()], parameter))
            start += parameter.numel()
        self.group = group
        self.holders = holders
        """Number of ranks that get the same sum."""
        self.is_local = holders == 1
        self.pending = len(parameters)
        self.sent = False
        self.work: Any = None


def _make_view(buffer: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    no_overlap = parameter.is_contiguous() or torch._debug_has_internal_overlap(parameter) == 0
    if no_overlap and _is_dense(parameter):
        return buffer.as_strided(parameter.shape, parameter.stride(), buffer.storage_offset())
    return buffer.view(parameter.shape)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill contiguous memory without gaps, in any order."""
    if not tensor.numel():
        return False
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return extent == tensor.numel()


class WholeGradients:
    """What gradients do around the passes of a pipeline if no pass has collectives of its own."""

    def prepare_micro_batch(self, number: int, count: int) -> None:
        """Prepare for micro-batch `number` of `count`."""

    def start_pass(self, stage_pass: StagePass) -> None:
        """Prepare for a pass; the last one of the rank completes all gradients."""
        if stage_pass.adds_gradients:
            self.prepare_micro_batch(0, 1 if stage_pass.ends_step else 2)

    def finish_pass(self, stage_pass: StagePass) -> None:
        """Do nothing: autograd has completed the gradients."""

    def abandon_pass(self) -> None:
        """Do nothing: a pass has no collectives."""

    def skip_pass(self, stage_pass: StagePass) -> None:
        """Do nothing: a pass has no collectives."""


class Reducer(WholeGradients):
    """Sum gradients over ranks: they are views of buckets, and hooks send each bucket when it is full."""

    is_rehearsed = True

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Any, int]],
        bucket_bytes: int | None = None,
        *,
        equal_micro_batches: bool = False,
    ) -> None:
        """Take `parameters`, each with the group that sums it and the number of ranks in that group."""
        self.equal_micro_batches = equal_micro_batches
        self.buckets = _make_buckets(parameters, bucket_bytes or limits.BUCKET_BYTES)
        self.max_arrivals = len(parameters)
        self.next = 0
        self.armed = False
        self.sent_any = False
        self._seen: set[int] = set()
        self._flats = [bucket.flat for bucket in self.buckets]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(bucket, view))
            for bucket in self.buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        ]

    def start_attempt(self) -> None:
        """Set all gradients to zero and mark all buckets as not sent."""
        for bucket in self.buckets:
            bucket.pending, bucket.sent, bucket.work = len(bucket.parameters), False, None
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view
        torch._foreach_zero_(self._flats)
        self.next = 0
        self.armed = self.sent_any = False
        self._seen.clear()

    def prepare_micro_batch(self, number: int, count: int) -> None:
        """Prepare for micro-batch `number` of `count`; the backward pass of the last one sends buckets."""
        self.armed = number == count - 1

    def discard_micro_batch(self) -> None:
        """Reset the gradients after a failure, unless some were already sent."""
        self.armed = False
        if not self.sent_any:
            self.start_attempt()

    def finish_attempt(self, failed_at: int | None, count: int) -> None:
        """Send the remaining buckets in order, and wait (on a GPU the stream waits, not the host).

        After a failure the buckets are sent too, because other ranks wait for them; the values are not used.
        """
        del failed_at, count
        self.armed = False
        for bucket in self.buckets:
            self._collect(bucket)
        self._send(everything=True)
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def squared_norm(self) -> torch.Tensor:
        """Return this rank's part of the squared norm: each bucket counts 1 / (ranks that hold it)."""
        norms = torch._foreach_norm(self._flats)
        return sum(  # type: ignore[return-value]  # there is at least one bucket
            norm.double().square() / bucket.holders for norm, bucket in zip(norms, self.buckets, strict=True)
        )

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the flat buffers of all buckets."""
        return self._flats

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _make_hook(self, bucket: Bucket, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def collect_gradient(parameter: torch.Tensor) -> None:
            if not self.armed:
                return
            if parameter.grad is not view:
                _copy_into_view(view, parameter)
            key = id(parameter)
            if key in self._seen:
                if bucket.sent:
                    raise JobFailed(
                        "backward()",
                        found="a parameter got a second gradient after its first was sent to other ranks",
                        cure="Use torch.utils.checkpoint with use_reentrant=False.",
                    )
                return
            self._seen.add(key)
            bucket.pending -= 1
            if not bucket.pending:
                self._send()

        return collect_gradient

    def _collect(self, bucket: Bucket) -> None:
        """Copy gradients that other code has replaced back into the bucket."""
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is not view and not bucket.sent:
                _copy_into_view(view, parameter)

    def _send(self, *, everything: bool = False) -> None:
        while self.next < len(self.buckets):
            bucket = self.buckets[self.next]
            if bucket.pending and not everything:
                return
            bucket.sent = True
            if not bucket.is_local:
                self.sent_any = True
                bucket.work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)
            self.next += 1


def _copy_into_view(view: torch.Tensor, parameter: torch.Tensor) -> None:
    if parameter.grad is None:
        view.zero_()
    else:
        view.copy_(parameter.grad)
    parameter.grad = view


def _make_buckets(parameters: Sequence[tuple[nn.Parameter, Any, int]], max_bytes: int) -> list[Bucket]:
    """Return buckets of one dtype, device and group each; last parameters first, as gradients arrive."""
    open_buckets: dict[Any, list[nn.Parameter]] = {}
    closed: list[Bucket] = []
    groups: dict[Any, tuple[Any, int]] = {}
    for parameter, group, holders in reversed(list(parameters)):
        key = (parameter.dtype, parameter.device, id(group), holders)
        groups[key] = (group, holders)
        members = open_buckets.setdefault(key, [])
        members.append(parameter)
        if sum(member.numel() * member.element_size() for member in members) >= max_bytes:
            closed.append(Bucket(open_buckets.pop(key), group, holders))
    return closed + [Bucket(members, *groups[key]) for key, members in open_buckets.items()]


class LocalGradients(WholeGradients):
    """Gradients of a single process, as autograd makes them."""

    equal_micro_batches = False
    sent_any = False
    is_rehearsed = True

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self.max_arrivals = len(parameters)

    def start_attempt(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def discard_micro_batch(self) -> None:
        """Drop all gradients."""
        self.start_attempt()

    def finish_attempt(self, failed_at: int | None, count: int) -> None:
        """Do nothing: there are no other ranks."""

    def squared_norm(self) -> torch.Tensor:
        """Return the squared norm of all gradients."""
        return sum_squares(self.local_gradients(), self._parameters[0].device)

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that exist."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def close(self) -> None:
        """Do nothing: there are no hooks."""


def sum_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the squared norm of all tensors together."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
