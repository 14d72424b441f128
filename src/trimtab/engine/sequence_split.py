"""Split the sequences of a batch over the ranks of a context-parallel group.

A job says how: `split_sequence(batch, part)` returns the batch with only the positions of one rank. The
labels must be aligned with the inputs before the split, because the next token of the last position of a part
is on another rank. The positions must be those in the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist

from trimtab.errors import JobFailed, WrongUse
from trimtab.spec import ContextMethod

if TYPE_CHECKING:
    from trimtab.spec import Setting

CHUNKS = 2
"""Chunks of a balanced part: one from the head of the sequence and one from its tail."""


@dataclass(frozen=True, kw_only=True)
class SequencePart:
    """The positions of a sequence that one rank holds.

    Under causal attention, late positions have more work than early ones. A balanced part is chunk `rank`
    from the head and the same chunk counted from the tail, so that all ranks have the same work.
    """

    rank: int
    size: int
    """Number of ranks that share a sequence: `cp` of the mesh."""
    balanced: bool = True

    @property
    def multiple(self) -> int:
        """Number that the length of a sequence must be divisible by."""
        return self.size * (CHUNKS if self.balanced else 1)

    def positions(self, length: int) -> torch.Tensor:
        """Return this rank's positions in a sequence of that length, in the order that `select` uses.

        >>> SequencePart(rank=0, size=2).positions(8).tolist()
        [0, 1, 6, 7]
        >>> SequencePart(rank=1, size=2, balanced=False).positions(8).tolist()
        [4, 5, 6, 7]
        """
        return torch.cat([torch.arange(start, start + count) for start, count in self._ranges(length)])

    def select(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's positions of a tensor whose dimension `dim` is the sequence."""
        ranges = self._ranges(tensor.shape[dim])
        return torch.cat([tensor.narrow(dim, start, count) for start, count in ranges], dim)

    def _ranges(self, length: int) -> list[tuple[int, int]]:
        """Return the start and the length of each chunk."""
        check_length(length, self.size, balanced=self.balanced)
        count = length // self.multiple
        if not self.balanced:
            return [(self.rank * count, count)]
        return [(self.rank * count, count), ((self.multiple - 1 - self.rank) * count, count)]


def choose_part(setting: Setting) -> SequencePart:
    """Return the part of every sequence that this rank of the process group holds."""
    mesh = setting.mesh
    rank = dist.get_rank() // mesh.tp % mesh.cp if dist.is_initialized() else 0
    return SequencePart(rank=rank, size=mesh.cp, balanced=setting.cp_method is ContextMethod.RING)


def check_length(length: int, size: int, *, balanced: bool = True) -> None:
    """Raise if a sequence of that length cannot be split, and name the nearest lengths that can."""
    multiple = size * (CHUNKS if balanced else 1)
    if length > 0 and length % multiple == 0:
        return
    below, above = length // multiple * multiple, -(-length // multiple) * multiple
    nearest = " or ".join(str(value) for value in dict.fromkeys((below, above)) if value)
    divisors = [cp for cp in range(size - 1, 1, -1) if length % (multiple // size * cp) == 0]
    cure = f"Use --seq {nearest}" + (f", or cp={divisors[0]}." if divisors else ", or cp=1.")
    chunks = f"{CHUNKS} x cp = {multiple} chunks" if balanced else f"cp = {multiple} parts"
    raise WrongUse(
        f"cp={size}", found=f"a sequence of {length} tokens has no {chunks} of one length", cure=cure
    )


def check_heads(query_heads: int, key_heads: int, size: int) -> None:
    """Raise if all-to-all cannot give every rank the same number of heads, and name the nearest that can."""
    if query_heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0):
        return
    legal = [
        cp
        for cp in range(2, query_heads + 1)
        if query_heads % cp == 0 and (key_heads % cp == 0 or cp % key_heads == 0)
    ]
    nearest = sorted(sorted(legal, key=lambda cp: abs(cp - size))[:2])
    listed = " or ".join(f"cp={cp}" for cp in nearest)
    raise WrongUse(
        f"cp={size} with cp_method=all-to-all",
        found=f"{query_heads} heads of queries and {key_heads} of keys cannot be shared by {size} ranks",
        cure=f"Use {listed}, or cp_method=ring." if legal else "Use cp_method=ring.",
    )


def refuse_job_without_split(size: int) -> NoReturn:
    """Raise for a job that has no split_sequence()."""
    raise WrongUse(
        f"cp={size}",
        found="the job does not say which dimension of its batch is the sequence: it has no split_sequence()",
        cure="Give it split_sequence(batch, part), which returns part.select(tensor, dim) of every tensor "
        "with a sequence: labels shifted before, positions from part.positions(length).",
    )


def split_batch(job: Any, batch: Any, part: SequencePart) -> Any:
    """Return one rank's part of a batch, by the job's split_sequence()."""
    split = getattr(job, "split_sequence", None)
    if not callable(split):
        refuse_job_without_split(part.size)
    result = split(batch, part)
    if result is None:
        raise JobFailed("split_sequence()", found="it returned None", cure="Return the batch of one rank.")
    return result
