"""Shards within a node, replicas across nodes: the fast links carry most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import Mesh, Strategy
from trimtab.strategies.base import Refusal, explain_context, explain_experts
from trimtab.strategies.fsdp import FsdpStrategy, explain_tensor_ranks
from trimtab.units import plural

if TYPE_CHECKING:
    from trimtab.spec import Setting


class HsdpStrategy(FsdpStrategy):
    """Groups of ranks that shard, one a node; each group is a replica."""

    word = Strategy.HSDP
    complexity = 3
    probe_order = 3
    spans_shard_lines = False
    degrees = (True, True)

    def refusal(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Refusal | None:
        """Refuse what is not several nodes of several GPUs each."""
        if found := super().refusal(gpus, nodes=nodes, branches=branches):
            return found
        if nodes < 2 or gpus % nodes or gpus == nodes:  # noqa: PLR2004 - several
            there = f"{gpus} GPUs in {plural(nodes, 'node')}"
            return Refusal(
                f"it shards within a node and copies across nodes, and there are {there}",
                "Name nodes of several GPUs each, as in --on 2x8xH100, or use fsdp.",
            )
        return None

    def usual_mesh(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Mesh:
        """Return one group of shards a node."""
        return Mesh(dp_replicate=nodes, dp_shard=gpus // nodes)

    def traced_as(self, mesh: Mesh) -> tuple[Strategy, Mesh]:
        """Return two groups: two replicas stand for any number."""
        return self.word, mesh.replace(dp_replicate=2)

    def explain(self, mesh: Mesh) -> str:
        """Say how large a group is, and how many there are."""
        copies = f"cut in {mesh.shards} within a node, copied {mesh.dp_replicate} times"
        return copies + explain_context(mesh) + explain_tensor_ranks(mesh) + explain_experts(mesh)

    def config_mesh(self, gpus: int, shards: int | None) -> Mesh:
        """Return groups of the size that the config says; one group where it does not."""
        shards = shards or gpus
        return Mesh(dp_shard=shards, dp_replicate=max(1, gpus // shards))

    def config_form(self, setting: Setting) -> Setting:
        """Return plain sharding for one group of shards, and plain replicas for groups of one rank."""
        mesh = setting.mesh
        if 1 not in {mesh.dp_replicate, mesh.dp_shard} or (mesh.dp_replicate > 1 and mesh.tp > 1):
            return setting
        plain = Strategy.FSDP if setting.mesh.dp_replicate == 1 else Strategy.DDP
        return setting.replace(strategy=plain)
