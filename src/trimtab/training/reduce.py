"""Which ranks share data and gradients, and how weights and buffers become the same on all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from trimtab.spec import Setting
    from trimtab.training.world import World


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
                broadcast(tensor, source, group)
    return unlike


def broadcast(tensor: torch.Tensor, source: int = 0, group: Any = None) -> None:
    """Give a tensor the values of one rank, on all ranks of a group."""
    whole = tensor.detach()
    sent = whole.contiguous()
    dist.broadcast(sent, source, group=group)
    if sent is not whole:
        whole.copy_(sent)


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
