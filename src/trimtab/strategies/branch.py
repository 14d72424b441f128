"""Branches of a loss: each group of ranks holds one branch, and all sum the gradients of the shared part.

`branch` has equal numbers of ranks a branch, as a rule one; `hybrid` has copies of branches.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar

from trimtab.spec import Mesh, Strategy
from trimtab.strategies.base import ParallelStrategy, RankKind, Refusal, Traffic, Wrapping, alone_or, on_mesh
from trimtab.strategies.ddp import exposed_buckets_s

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from trimtab.spec import Setting


class BranchStrategy(ParallelStrategy):
    """One rank a branch: it keeps its own frozen model and computes its own term of the loss."""

    word = Strategy.BRANCH
    wrapping = Wrapping.BRANCH
    complexity = 2
    probe_order = 4
    job_facts: ClassVar[tuple[str, ...]] = ("branches",)
    runs_whole_model = False

    def refusal(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Refusal | None:
        """Refuse a job without branches, and GPUs that do not divide among them."""
        if found := super().refusal(gpus, nodes=nodes, branches=branches):
            return found
        if branches < 2:  # noqa: PLR2004 - several
            return Refusal(
                f"the job has {'one branch' if branches else 'no branches'}",
                "Give it losses(model, batch) and branches = {name: submodule}, or use ddp or fsdp.",
            )
        if gpus < branches:
            return Refusal(
                f"{gpus} GPUs are fewer than the {branches} branches of the job",
                f"Use {branches} GPUs or more.",
            )
        return self._uneven(gpus, branches)

    def _uneven(self, gpus: int, branches: int) -> Refusal | None:
        """Refuse numbers of GPUs that are for the other strategy of branches."""
        if gpus % branches == 0:
            return None
        return Refusal(
            f"{gpus} GPUs do not divide among {branches} branches",
            f"Use --strategy hybrid, or {branches} GPUs, or {2 * branches}.",
        )

    def usual_mesh(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Mesh:
        """Return as even numbers of ranks as there can be; the first branches get what is left over."""
        return mesh_of_branches(gpus, branches, range(gpus % branches))

    def meshes(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Iterator[Mesh]:
        """Yield one rank a branch; with more, a plan says hybrid."""
        if gpus == branches:
            yield from super().meshes(gpus, nodes=nodes, branches=branches)

    def pin_conflicts(self, pins: Mapping[str, Any], available: int, branches: int) -> list[Refusal]:
        """List numbers of GPUs that do not go with the job's branches."""
        conflicts = super().pin_conflicts(pins, available, branches)
        gpus = pins.get("gpus")
        if branches < 2:  # noqa: PLR2004 - several
            what = f"{branches} branches" if branches else "no branches"
            conflicts.append(
                Refusal(f"strategy={self.word}, and the job has {what}", "give the job losses() and branches")
            )
        elif (gpus or available) < branches or (gpus and self._cannot_pin(gpus, branches)):
            conflicts.append(
                Refusal(
                    f"strategy={self.word} with gpus={gpus or available}, and the job has {branches} "
                    "branches",
                    f"pin a multiple of {branches} GPUs",
                )
            )
        return conflicts

    def _cannot_pin(self, gpus: int, branches: int) -> bool:
        return gpus % branches != 0

    def resized(self, mesh: Mesh, ranks: int, *, nodes: int = 1, branches: int = 0) -> tuple[Strategy, Mesh]:
        """Return branch or hybrid; with fewer ranks than branches, shards, which need the least room."""
        if not 1 < branches <= ranks:
            return super().resized(mesh, ranks, nodes=nodes, branches=0)
        kin = BranchStrategy() if ranks == branches else HybridStrategy()
        return alone_or(kin, ranks, branches=branches)

    def rank_kinds(self, mesh: Mesh, branches: Sequence[str]) -> list[RankKind]:
        """Return one kind a branch."""
        return [
            RankKind(branch=branch, number=number, words=f"branch {branch}")
            for number, branch in enumerate(branches)
        ]

    def traced_as(self, mesh: Mesh) -> tuple[Strategy, Mesh]:
        """Return one rank a branch: copies see other data and nothing else."""
        return Strategy.BRANCH, Mesh(branch=mesh.branch)

    def trace_parts(self, setting: Setting, direct: Collection[int]) -> list[Setting]:
        """Return one rank a branch."""
        return [on_mesh(setting, *self.traced_as(setting.mesh))]

    def weight_shares(self, mesh: Mesh) -> int | None:
        """Return None: branches are of different sizes."""
        return None

    def exposed_s(self, traffic: Traffic) -> float:
        """Return the seconds of summing gradients over all ranks, as replicas do."""
        return exposed_buckets_s(traffic)

    def explain(self, mesh: Mesh) -> str:
        """Say what a device holds."""
        return "every GPU holds the model of its own branch only"


class HybridStrategy(BranchStrategy):
    """More ranks than branches: some or all branches have copies, which see samples of their own."""

    word = Strategy.HYBRID
    complexity = 5
    probe_order = 5
    job_facts = ("branches", "global_batch")

    def _uneven(self, gpus: int, branches: int) -> Refusal | None:
        if gpus != branches:
            return None
        return Refusal(
            f"with {gpus} GPUs for {branches} branches there are no copies of a branch",
            f"Use --strategy branch, or {branches + 1} GPUs or more.",
        )

    def meshes(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Iterator[Mesh]:
        """Yield as even numbers of ranks as there can be; where some have one more, each may be that one."""
        if self.refusal(gpus, nodes=nodes, branches=branches) is None:
            for larger in combinations(range(branches), gpus % branches):
                yield mesh_of_branches(gpus, branches, larger)

    def pin_conflicts(self, pins: Mapping[str, Any], available: int, branches: int) -> list[Refusal]:
        """List numbers of GPUs that leave no branch a copy, too."""
        conflicts = super().pin_conflicts(pins, available, branches)
        if branches > 1 and (pins.get("gpus") or available) == branches:
            conflicts.append(
                Refusal(
                    f"strategy=hybrid with {branches} GPUs for {branches} branches: none has a copy",
                    f"pin strategy=branch, or use {branches + 1} GPUs or more",
                )
            )
        return conflicts

    def _cannot_pin(self, gpus: int, branches: int) -> bool:
        return False

    def uses_global_batch(self, mesh: Mesh) -> bool:
        """Whether branches have different numbers of ranks, and so take different numbers of rounds."""
        return bool(mesh.copies)

    def describe(self, mesh: Mesh) -> str:
        """Return the ranks of each branch: hybrid 2 + 1."""
        return f"hybrid {' + '.join(map(str, mesh.branch_ranks))}"

    def explain(self, mesh: Mesh) -> str:
        """Say how many devices each branch has."""
        return f"{mesh.branch} branches, on {' + '.join(map(str, mesh.branch_ranks))} GPUs"


def mesh_of_branches(gpus: int, branches: int, larger: Collection[int]) -> Mesh:
    """Return the mesh of branches with as even numbers of ranks as there can be.

    `larger` names the branches that have one rank more.

    >>> mesh_of_branches(3, 2, [0]).copies, mesh_of_branches(4, 2, []).dp_replicate
    ((2, 1), 2)
    """
    fewest = gpus // branches
    copies = tuple(fewest + (number in larger) for number in range(branches))
    return Mesh(branch=branches, dp_replicate=fewest, copies=copies if larger else ())
