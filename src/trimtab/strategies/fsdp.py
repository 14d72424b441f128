"""Shards: every device keeps a share of weights, gradients and optimizer state, and gathers them for use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import Mesh, Strategy
from trimtab.spec.precision import DTYPE_BYTES
from trimtab.strategies.base import (
    Call,
    Derivation,
    ParallelStrategy,
    Traffic,
    Wrapping,
    describe_degrees,
    explain_context,
    explain_experts,
    on_mesh,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from trimtab.spec import Setting, Work

ANCHORS = (4, 16)
"""Numbers of shards that are traced, where several are asked about."""


def explain_tensor_ranks(mesh: Mesh) -> str:
    """Return what the ranks do that split layers between them; empty where none do."""
    return "" if mesh.tp == 1 else f"; {mesh.tp} neighbouring GPUs split every layer between them"


def _find_call(work: Work, mesh: Mesh) -> Call:
    """Return a traced collective of weights or gradients with the ranks that take part.

    Experts are sharded over the ranks that hold the same ones, which are `ep` apart. Such a collective is
    known by its bytes: those of all ranks over those of one.
    """
    collective = "all_gather" if "gather" in work.op else "reduce_scatter"
    same = mesh.expert_ranks // mesh.ep
    if same != mesh.shards and work.read_bytes == same * work.write_bytes:
        return Call(collective, work.read_bytes, same, mesh.ep)
    return Call(collective, work.read_bytes, mesh.shards, mesh.tp)


class FsdpStrategy(ParallelStrategy):
    """Shards over all devices, by FSDP2; frozen weights are sharded too."""

    word = Strategy.FSDP
    wrapping = Wrapping.SHARDS
    complexity = 4
    # What it shards, others hold whole.
    probe_order = 0
    spans_shard_lines = True
    degrees = (False, True)
    accelerate_flags = ("--use_fsdp", "--fsdp_version=2")

    def usual_mesh(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Mesh:
        """Return as many shards as there are devices."""
        return Mesh(dp_shard=gpus)

    def traced_as(self, mesh: Mesh) -> tuple[Strategy, Mesh]:
        """Return itself: what a rank holds depends on the number of shards."""
        return self.word, mesh

    def trace_parts(self, setting: Setting, direct: Collection[int]) -> list[Setting]:
        """Return two anchors, which give any number of shards; or that number itself."""
        shards = setting.mesh.dp_shard
        is_direct = shards in ANCHORS or shards in direct or max(setting.mesh.cp, setting.mesh.ep) > 1
        numbers = (shards,) if is_direct else ANCHORS
        mesh = setting.mesh.replace(dp_replicate=1)
        return [on_mesh(setting, Strategy.FSDP, mesh.replace(dp_shard=number)) for number in numbers]

    def derivation(self, setting: Setting) -> Derivation:
        """Find the number of shards on the line through two anchors."""
        return Derivation.SHARD_LINE

    def weight_shares(self, mesh: Mesh) -> int | None:
        """Return the number of shards of all parts of a layer together."""
        return mesh.shards * mesh.tp

    def exposed_s(self, traffic: Traffic) -> float:
        """Return what is not hidden of shards, of split layers, of experts and of shared statistics."""
        inside = traffic.within_layers_s() + traffic.experts_s() + traffic.statistics_s()
        return find_shards_s(traffic) + inside

    def explain(self, mesh: Mesh) -> str:
        """Say what is cut, and in how many parts."""
        shards = f"weights, gradients and optimizer state are cut in {mesh.shards}"
        return shards + explain_context(mesh) + explain_tensor_ranks(mesh) + explain_experts(mesh)

    def describe(self, mesh: Mesh) -> str:
        """Return its word, with the ranks that split sequences or layers: fsdp 8 x tp 8."""
        return describe_degrees(self.word, mesh)

    def config_mesh(self, gpus: int, shards: int | None) -> Mesh:
        """Return shards over all devices."""
        return Mesh(dp_shard=gpus)


def find_shards_s(traffic: Traffic) -> float:
    """Return what is not hidden of gathering weights before each use and scattering gradients after.

    Each runs while the block before it computes. Ranks that hold shards of the same part of a layer are
    as far apart as there are ranks that split layers; what those exchange is never hidden.
    """
    setting, links = traffic.setting, traffic.links
    shards, tp = setting.mesh.shards, setting.mesh.tp
    gathers = [_find_call(work, setting.mesh) for work in traffic.collectives() if "gather" in work.op]
    scatters = [_find_call(work, setting.mesh) for work in traffic.collectives() if "scatter" in work.op]
    gathered = sum(links.all_gather_s(call.size, call.ranks, apart=call.apart) for call in gathers)
    scattered = sum(links.reduce_scatter_s(call.size, call.ranks, apart=call.apart) for call in scatters)
    largest = max(gathers, key=lambda call: call.size, default=Call("all_gather", 0, shards, tp))
    first = links.all_gather_s(largest.size, largest.ranks, apart=largest.apart)
    passes = setting.accumulation
    forward = max(first, gathered / 2 - traffic.hidden_forward_s)
    backward = max(0.0, gathered / 2 + scattered - traffic.hidden_backward_s)
    last = backward
    if setting.mesh.dp_replicate > 1:
        # In the last backward pass copies of shards are summed while shards are gathered and scattered.
        # Gathers and scatters are calls of one communicator, which runs them in turn.
        own = [*scatters, *gathers[: len(gathers) // 2]]
        # Copies of a shard are a whole shard group apart: one in each node, where a node holds a group.
        shard_bytes = traffic.trace.trainable * DTYPE_BYTES[setting.dtypes.reductions] // (shards * tp)
        copies = [Call("all_reduce", shard_bytes, setting.mesh.dp_replicate, shards * tp)]
        last = max(backward, links.together_s([own, copies]) - traffic.hidden_backward_s)
    return passes * forward + (passes - 1) * backward + last
