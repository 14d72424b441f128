"""How each strategy spreads a job over GPUs, and when it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import WrongUse
from trimtab.spec import Mesh, Strategy

if TYPE_CHECKING:
    from collections.abc import Collection


def spread(how: Strategy, gpus: int, *, nodes: int = 1, branches: int = 0) -> Mesh:
    """The mesh of a strategy on all GPUs of some nodes of one size, for a job of some branches."""
    if how is Strategy.SINGLE:
        return Mesh()
    if gpus < 2:  # noqa: PLR2004 - several
        raise _refused(how, "there is one GPU", "Name several, as in --on 8xH100.")
    if how is Strategy.DDP:
        return Mesh(dp_replicate=gpus)
    if how is Strategy.FSDP:
        return Mesh(dp_shard=gpus)
    if how is Strategy.PIPELINE:
        return Mesh(pp=gpus)
    return _by_node(how, gpus, nodes) if how is Strategy.HSDP else _by_branch(how, gpus, branches)


def _by_node(how: Strategy, gpus: int, nodes: int) -> Mesh:
    """Shards within a node, copies across nodes: the fast links carry most."""
    if nodes < 2 or gpus % nodes or gpus == nodes:  # noqa: PLR2004 - several
        there = f"{gpus} GPUs in {nodes} node{'s' * (nodes > 1)}"
        raise _refused(
            how,
            f"it shards within a node and copies across nodes, and there are {there}",
            "Name nodes of several GPUs each, as in --on 2x8xH100, or use fsdp.",
        )
    return Mesh(dp_replicate=nodes, dp_shard=gpus // nodes)


def _by_branch(how: Strategy, gpus: int, branches: int) -> Mesh:
    """As many groups as there are branches, as even as GPUs allow; the first ones get what is left over."""
    if branches < 2:  # noqa: PLR2004 - several
        raise _refused(
            how,
            f"the job has {'one branch' if branches else 'no branches'}",
            "Give it losses(model, batch) and branches = {name: submodule}, or use ddp or fsdp.",
        )
    if gpus < branches:
        more = f"{gpus} GPUs are fewer than the {branches} branches of the job"
        raise _refused(how, more, f"Use {branches} GPUs or more.")
    if how is Strategy.BRANCH and gpus % branches:
        more = f"{gpus} GPUs do not divide among {branches} branches"
        raise _refused(how, more, f"Use --strategy hybrid, or {branches} GPUs, or {2 * branches}.")
    if how is Strategy.HYBRID and gpus == branches:
        more = f"with {gpus} GPUs for {branches} branches there are no copies of a branch"
        raise _refused(how, more, f"Use --strategy branch, or {branches + 1} GPUs or more.")
    return by_branch(gpus, branches, range(gpus % branches))


def by_branch(gpus: int, branches: int, larger: Collection[int]) -> Mesh:
    """The mesh of branches with as even numbers of ranks as there can be, `larger` naming who has one more.

    >>> by_branch(3, 2, [0]).copies, by_branch(4, 2, []).dp_replicate
    ((2, 1), 2)
    """
    fewest = gpus // branches
    copies = tuple(fewest + (number in larger) for number in range(branches))
    return Mesh(branch=branches, dp_replicate=fewest, copies=copies if larger else ())


def _refused(how: Strategy, found: str, cure: str) -> WrongUse:
    return WrongUse(f"--strategy {how.value}", found=found, cure=cure)
