"""Replicas: every device holds the whole model, sees samples of its own, and gradients are summed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import Mesh, Strategy
from trimtab.strategies import limits
from trimtab.strategies.base import (
    Derivation,
    ParallelStrategy,
    Traffic,
    Wrapping,
    describe_degrees,
    explain_context,
    on_mesh,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from trimtab.spec import Setting


class DdpStrategy(ParallelStrategy):
    """Replicas, whose gradients are summed in buckets while the backward pass runs.

    Frozen weights are replicated and not wrapped.
    """

    word = Strategy.DDP
    wrapping = Wrapping.WHOLE
    complexity = 1
    probe_order = 2
    shares_by_speed = True
    degrees = (True, False)
    needs_config_key = False

    def usual_mesh(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Mesh:
        """Return one replica a device."""
        return Mesh(dp_replicate=gpus)

    def traced_as(self, mesh: Mesh) -> tuple[Strategy, Mesh]:
        """Return two replicas: they see other data and nothing else, so that two stand for any number.

        Ranks that split sequences are several by themselves.
        """
        return self.word, Mesh(dp_replicate=2 if mesh.cp == 1 else 1, cp=mesh.cp)

    def trace_parts(self, setting: Setting, direct: Collection[int]) -> list[Setting]:
        """Return one device; with synchronised BatchNorm, whose layers are others, two replicas.

        Ranks that split sequences are traced as they are.
        """
        if setting.mesh.cp > 1:
            return [on_mesh(setting, self.word, setting.mesh)]
        if setting.sync_batchnorm:
            return [on_mesh(setting, self.word, Mesh(dp_replicate=2))]
        return [on_mesh(setting, Strategy.SINGLE, Mesh())]

    def derivation(self, setting: Setting) -> Derivation:
        """Add the buckets to the trace of one device."""
        is_traced = setting.sync_batchnorm or setting.mesh.cp > 1
        return Derivation.AS_TRACED if is_traced else Derivation.BUCKETS

    def weight_shares(self, mesh: Mesh) -> int | None:
        """Return one: nothing is cut."""
        return 1

    def exposed_s(self, traffic: Traffic) -> float:
        """Return the seconds of summing gradients.

        Nothing hides them with synchronised BatchNorm, or if ranks split sequences.
        """
        if traffic.setting.sync_batchnorm or traffic.setting.mesh.cp > 1:
            # Buckets are sent when the last backward pass is over.
            return buckets_s(traffic) + traffic.statistics_s()
        return exposed_buckets_s(traffic)

    def describe(self, mesh: Mesh) -> str:
        """Return its word, with the ranks that split sequences: ddp 2 x cp 4."""
        return describe_degrees(self.word, mesh)

    def explain(self, mesh: Mesh) -> str:
        """Say that nothing is cut."""
        return f"every GPU holds the whole model{explain_context(mesh)}"


def buckets_s(traffic: Traffic) -> float:
    """Return the seconds of summing all buckets of gradients over all ranks."""
    ranks, links = traffic.setting.gpus, traffic.links
    full, rest = divmod(traffic.gradient_bytes, limits.BUCKET_BYTES)
    return full * links.all_reduce_s(limits.BUCKET_BYTES, ranks) + (
        links.all_reduce_s(rest, ranks) if rest else 0.0
    )


def exposed_buckets_s(traffic: Traffic) -> float:
    """Return what the backward pass does not hide of them: the last bucket is only full when it is over."""
    last = traffic.links.all_reduce_s(min(traffic.gradient_bytes, limits.BUCKET_BYTES), traffic.setting.gpus)
    return max(last, buckets_s(traffic) - traffic.hidden_backward_s)
