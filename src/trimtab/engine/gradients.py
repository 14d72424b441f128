"""Where gradients are stored, and how they are summed over ranks while the backward pass still runs.

`OwnGradients`: one process, gradients as autograd makes them. `Reducer`: gradients are views of flat buckets
that are summed over ranks. `trimtab.engine.fsdp.ShardedGradients`: FSDP2 scatters them.

torch's own reducer cannot go on after an exception in the backward pass. This one can: the order of its
buckets is fixed, so a rank that fails sends what is left as it is, says so in the status, and all ranks try
again. Sums, not means: losses are weighted before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from trimtab.errors import JobFailed
from trimtab.strategies import limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn


class Gradients(Protocol):
    """How the gradients of a rank become those of all ranks."""

    equal_parts: bool
    """Whether all ranks have to run the same number of micro-batches."""
    arrivals: int
    """How often at most gradients come in a backward pass."""

    @property
    def sent_any(self) -> bool:
        """Whether other ranks have got something of this attempt."""

    @property
    def rehearsed(self) -> bool:
        """Whether it needs no more passes of one sample before the first step."""

    def begin(self) -> None:
        """Prepare for an attempt: gradients are zero."""

    def before(self, number: int, count: int) -> None:
        """Prepare for micro-batch `number` of `count`."""

    def abandon(self) -> None:
        """Let go of what the failed micro-batch holds."""

    def finish(self, failed_at: int | None, count: int) -> None:
        """Send what the other ranks still wait for, also where micro-batch `failed_at` failed."""

    def squares(self) -> torch.Tensor:
        """Return this rank's part in the squared norm of the whole gradient."""

    def gradients(self) -> list[torch.Tensor]:
        """Return what this rank holds of it."""

    def close(self) -> None:
        """Leave the model as it was found."""


class Bucket:
    """Some gradients that lie in one piece of memory and are summed together."""

    __slots__ = ("alone", "flat", "group", "holders", "left", "parameters", "sent", "views", "work")

    def __init__(self, parameters: list[nn.Parameter], group: Any, holders: int) -> None:
        first = parameters[0]
        length = sum(parameter.numel() for parameter in parameters)
        self.parameters = parameters
        self.flat = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.views = []
        start = 0
        for parameter in parameters:
            # Strides as the parameter's, so that fused optimizers and channels-last weights are content.
            self.views.append(_like(self.flat[start : start + parameter.numel()], parameter))
            start += parameter.numel()
        self.group = group
        self.holders = holders
        """Ranks that end up with the same sum."""
        self.alone = holders == 1
        self.left = len(parameters)
        self.sent = False
        self.work: Any = None


def _like(piece: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    dense = parameter.is_contiguous() or torch._debug_has_internal_overlap(parameter) == 0
    if dense and _fills(parameter):
        return piece.as_strided(parameter.shape, parameter.stride(), piece.storage_offset())
    return piece.view(parameter.shape)


def _fills(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one piece of memory without gaps, in whatever order."""
    if not tensor.numel():
        return False
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach == tensor.numel()


class Reducer:
    """Gradients of trainable parameters as views of buckets, and hooks that send full buckets."""

    rehearsed = True

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Any, int]],
        bucket_bytes: int | None = None,
        *,
        equal_parts: bool = False,
    ) -> None:
        """`parameters` come with the group that sums them and the number of ranks in it."""
        self.equal_parts = equal_parts
        self.buckets = _buckets(parameters, bucket_bytes or limits.BUCKET_BYTES)
        self.arrivals = len(parameters)
        self.next = 0
        self.armed = False
        self.sent_any = False
        self._seen: set[int] = set()
        self._flats = [bucket.flat for bucket in self.buckets]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket, view))
            for bucket in self.buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        ]

    def begin(self) -> None:
        """Gradients are zero, and nothing has been sent."""
        for bucket in self.buckets:
            bucket.left, bucket.sent, bucket.work = len(bucket.parameters), False, None
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view
        torch._foreach_zero_(self._flats)
        self.next = 0
        self.armed = self.sent_any = False
        self._seen.clear()

    def before(self, number: int, count: int) -> None:
        """Part `number` of `count` follows; buckets are sent in the backward pass of the last."""
        self.armed = number == count - 1

    def abandon(self) -> None:
        """The part under way has failed; what the others have got already cannot be taken back."""
        self.armed = False
        if not self.sent_any:
            self.begin()

    def finish(self, failed_at: int | None, count: int) -> None:
        """Send what is left, in order, and wait (on a GPU its stream waits, not the host).

        After a failure too: what is sent then counts for nothing, and nobody waits for it in vain.
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

    def squares(self) -> torch.Tensor:
        """This rank's part in the squared norm of all gradients: a sum that many ranks hold is shared out."""
        norms = torch._foreach_norm(self._flats)
        return sum(  # type: ignore[return-value]  # there is at least one bucket
            norm.double().square() / bucket.holders for norm, bucket in zip(norms, self.buckets, strict=True)
        )

    def gradients(self) -> list[torch.Tensor]:
        """What holds all gradients, in few pieces."""
        return self._flats

    def close(self) -> None:
        """Take the hooks away; gradients become the optimizer's own again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, bucket: Bucket, view: torch.Tensor) -> Callable[[torch.Tensor], None]:
        def arrived(parameter: torch.Tensor) -> None:
            if not self.armed:
                return
            if parameter.grad is not view:
                _into(view, parameter)
            key = id(parameter)
            if key in self._seen:
                if bucket.sent:
                    raise JobFailed(
                        "backward()",
                        found="a parameter got a second gradient after its first had been sent to the others",
                        cure="Use torch.utils.checkpoint with use_reentrant=False.",
                    )
                return
            self._seen.add(key)
            bucket.left -= 1
            if not bucket.left:
                self._send()

        return arrived

    def _collect(self, bucket: Bucket) -> None:
        """A gradient that somebody has replaced is put back in its place."""
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            if parameter.grad is not view and not bucket.sent:
                _into(view, parameter)

    def _send(self, *, everything: bool = False) -> None:
        while self.next < len(self.buckets):
            bucket = self.buckets[self.next]
            if bucket.left and not everything:
                return
            bucket.sent = True
            if not bucket.alone:
                self.sent_any = True
                bucket.work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)
            self.next += 1


def _into(view: torch.Tensor, parameter: torch.Tensor) -> None:
    if parameter.grad is None:
        view.zero_()
    else:
        view.copy_(parameter.grad)
    parameter.grad = view


def _buckets(parameters: Sequence[tuple[nn.Parameter, Any, int]], most: int) -> list[Bucket]:
    """Last parameters first, as their gradients come; one dtype, device and group to a bucket."""
    open_ones: dict[Any, list[nn.Parameter]] = {}
    closed: list[Bucket] = []
    ends: dict[Any, tuple[Any, int]] = {}
    for parameter, group, holders in reversed(list(parameters)):
        key = (parameter.dtype, parameter.device, id(group), holders)
        ends[key] = (group, holders)
        held = open_ones.setdefault(key, [])
        held.append(parameter)
        if sum(one.numel() * one.element_size() for one in held) >= most:
            closed.append(Bucket(open_ones.pop(key), group, holders))
    return closed + [Bucket(held, *ends[key]) for key, held in open_ones.items()]


class OwnGradients:
    """One process: gradients as autograd makes them."""

    equal_parts = False
    sent_any = False
    rehearsed = True

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = parameters
        self.arrivals = len(parameters)

    def begin(self) -> None:
        """No gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def before(self, number: int, count: int) -> None:
        """Nothing to arrange before part `number` of `count`."""

    def abandon(self) -> None:
        """The part under way has failed."""
        self.begin()

    def finish(self, failed_at: int | None, count: int) -> None:
        """Nobody to tell."""

    def squares(self) -> torch.Tensor:
        """The squared norm of all gradients."""
        return summed_squares(self.gradients(), self._parameters[0].device)

    def gradients(self) -> list[torch.Tensor]:
        """Those that there are."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    def close(self) -> None:
        """Nothing was changed."""


def summed_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The squared norm of all of them together."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
