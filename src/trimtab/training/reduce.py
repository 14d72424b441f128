"""Sums gradients over ranks while the backward pass still runs.

torch's own reducer cannot go on after an exception in the backward pass. This one can: the order of its
buckets is fixed, so a rank that fails sends what is left as it is, says so in the status, and all ranks try
again. Sums, not means: losses are weighted before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from trimtab.errors import JobFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from trimtab.spec import Setting
    from trimtab.training.world import World

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Groups:
    """Who this rank shares data and gradients with.

    Ranks that hold the same count one after the other: the ranks of the first branch, or of the first stage
    of a pipeline, come first.
    """

    size: int = 1
    branch: int = 0
    """Number of the branch that this rank computes."""
    stage: int = 0
    """Number of the pipeline stage that this rank computes."""
    stages: int = 1
    data_rank: int = 0
    data_parallel: int = 1
    data_group: Any = None
    """Ranks of the same branch or stage; None where these are all ranks, or this one alone."""
    first: int = 0
    """The first rank of the same branch or stage."""

    @property
    def data_alone(self) -> bool:
        """Whether no other rank has the same branch or stage."""
        return self.data_parallel == 1

    @property
    def counts(self) -> bool:
        """Whether samples are counted on this rank: all branches and all stages see the same ones."""
        return self.branch == 0 and self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the loss comes to be on this rank."""
        return self.stage == self.stages - 1

    @property
    def settles(self) -> int:
        """The rank whose buffers count for all: the last stage of a pipeline meets all that are shared."""
        return (self.stages - 1) * self.data_parallel

    def next_to(self, stage: int) -> int:
        """The rank that has another stage of the same samples."""
        return stage * self.data_parallel + self.data_rank


def make_groups(setting: Setting, world: World) -> Groups:
    """The groups of a setting; every rank makes all of them, in the same order."""
    mesh = setting.mesh
    ranks = mesh.branch_ranks if mesh.branch > 1 else (mesh.data_parallel,) * mesh.pp
    if len(ranks) == 1:
        return Groups(size=world.size, data_rank=world.rank, data_parallel=world.size)
    found = Groups()
    first = 0
    for number, count in enumerate(ranks):
        held = range(first, first + count)
        group = dist.new_group(list(held)) if count > 1 else None
        if world.rank in held:
            found = Groups(
                size=world.size,
                branch=number if mesh.branch > 1 else 0,
                stage=number if mesh.pp > 1 else 0,
                stages=mesh.pp,
                data_rank=world.rank - first,
                data_parallel=count,
                data_group=group,
                first=first,
            )
        first += count
    return found


class Bucket:
    """Some gradients that lie in one piece of memory and are summed together."""

    __slots__ = ("alone", "flat", "group", "holders", "left", "parameters", "sent", "views", "work")

    def __init__(self, parameters: list[nn.Parameter], group: Any, holders: int) -> None:
        first = parameters[0]
        length = sum(one.numel() for one in parameters)
        self.parameters = parameters
        self.flat = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.views = []
        start = 0
        for one in parameters:
            # Strides as the parameter's, so that fused optimizers and channels-last weights are content.
            self.views.append(_like(self.flat[start : start + one.numel()], one))
            start += one.numel()
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

    equal_parts = False
    """Whether all ranks have to run the same number of parts."""
    rehearsed = True
    """Whether it needs no pass of one sample before the first step."""

    def __init__(
        self, parameters: Sequence[tuple[nn.Parameter, Any, int]], bucket_bytes: int | None = None
    ) -> None:
        """`parameters` come with the group that sums them and the number of ranks in it."""
        self.buckets = _buckets(parameters, bucket_bytes or BUCKET_BYTES)
        self.arrivals = len(parameters)
        self.next = 0
        self.armed = False
        self.sent_any = False
        self._seen: set[int] = set()
        self._flats = [one.flat for one in self.buckets]
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


class Buffers:
    """Buffers that a forward pass changes: put back when a step is repeated, alike on all ranks after it."""

    def __init__(
        self, entries: Sequence[tuple[torch.Tensor, Any, int]], running: frozenset[int] = frozenset()
    ) -> None:
        """`entries` come with the group that shares them and the first rank in it; -1: nobody else has it.

        `running` names by id the running statistics of normalisations, which change without counting it.
        """
        self._entries = list(entries)
        self._running = [number for number, (one, *_) in enumerate(entries) if id(one) in running]
        self._followed: list[int] | None = None
        """Which of them change; None before the first step has shown it."""
        self._versions: list[int] = []
        self.copies: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """Remember what there is before a step."""
        if not self._entries:
            return
        watched = range(len(self._entries)) if self._followed is None else self._followed
        self.copies = {}
        by_kind: dict[Any, list[int]] = {}
        for number in watched:
            buffer = self._entries[number][0]
            by_kind.setdefault((buffer.dtype, buffer.device), []).append(number)
        for (kind, _), numbers in by_kind.items():
            buffers = [self._entries[number][0] for number in numbers]
            # Few launches for many small buffers.
            plain = kind in (torch.float32, torch.float16, torch.bfloat16, torch.int64)
            copied = torch._foreach_add(buffers, 0) if plain else [one.clone() for one in buffers]
            self.copies.update(zip(numbers, copied, strict=True))
        self._versions = [buffer._version for buffer, *_ in self._entries]

    def back(self) -> None:
        """As they were before the step."""
        for number, copy in self.copies.items():
            buffer = self._entries[number][0]
            buffer.copy_(copy)
            self._versions[number] = buffer._version

    def is_settled(self, ranks: int) -> bool:
        """Whether it is known which of them change, and no other rank has to hear of it after a step."""
        return not self._entries or (self._followed is not None and (ranks == 1 or not self._followed))

    def strays(self) -> int:
        """How many have changed that are not known to."""
        known = () if self._followed is None else self._followed
        return len(set(self._changed()).difference(known))

    def learn(self, device: Any) -> None:
        """All ranks agree on which buffers change; all call it when the status says that one has strays."""
        mine = {*self._changed(), *(self._followed or ())}
        # First what all ranks hold, then what only those of this branch hold: other branches have other ones.
        for shared in (True, False):
            numbers = [
                number
                for number, (_, group, source) in enumerate(self._entries)
                if source >= 0 and (group is None) is shared
            ]
            if numbers:
                flags = [int(number in mine) for number in numbers]
                mask = torch.tensor(flags, dtype=torch.int64, device=device)
                dist.all_reduce(mask, op=dist.ReduceOp.MAX, group=self._entries[numbers[0]][1])
                mine |= {number for number, flag in zip(numbers, mask.tolist(), strict=True) if flag}
        self._followed = sorted(mine)

    def settle(self) -> None:
        """After a step: rank 0's values on all ranks."""
        if self._entries and self._followed is None:
            self._followed = []
        self.copies = {}
        for number in self._followed or ():
            buffer, group, source = self._entries[number]
            if source >= 0:
                dist.broadcast(buffer, source, group=group)

    def _changed(self) -> list[int]:
        if not self._versions:
            return []
        counted = [
            number
            for number, (buffer, *_) in enumerate(self._entries)
            if buffer._version != self._versions[number]
        ]
        return [*counted, *self._running]


def running_statistics(model: nn.Module) -> frozenset[int]:
    """Buffers of normalisations that follow the batches, by id."""
    return frozenset(
        id(buffer)
        for module in model.modules()
        if getattr(module, "track_running_stats", False)
        for buffer in module.buffers(recurse=False)
    )


def make_alike(tensors: Iterable[tuple[torch.Tensor, Any, int]], device: Any) -> int:
    """Give every rank the first rank's values where they differ; how many did.

    Sums tell whether ranks differ, so that large models that all have read from one file are not sent around.
    """
    by_group: dict[int, list[tuple[torch.Tensor, Any, int]]] = {}
    for tensor, group, source in tensors:
        if source >= 0:
            by_group.setdefault(id(group), []).append((tensor, group, source))
    unlike = 0
    for entries in by_group.values():
        group = entries[0][1]
        sums = torch.stack([_fingerprint(tensor) for tensor, *_ in entries]).to(device)
        most, least = sums.clone(), sums.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        differs = (most != least).any(dim=1).tolist()
        for (tensor, _, source), other in zip(entries, differs, strict=True):
            if other:
                unlike += 1
                whole = tensor.detach()
                sent = whole.contiguous()
                dist.broadcast(sent, source, group=group)
                if sent is not whole:
                    whole.copy_(sent)
    return unlike


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.zeros(2, dtype=torch.float64, device=tensor.device)
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.is_floating_point():
        values = values.to(torch.float64)
    total = torch.stack([values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)])
    # Comparing with not-a-number would find ranks unlike that are alike.
    return torch.nan_to_num(total)


class Alone:
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
        return [one.grad for one in self._parameters if one.grad is not None]

    def close(self) -> None:
        """Nothing was changed."""


def summed_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The squared norm of all of them together."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
