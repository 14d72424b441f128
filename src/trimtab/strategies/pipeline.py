"""Layers over ranks: each stage holds some of the layers and sends its activations to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import Mesh, Strategy
from trimtab.strategies.base import ParallelStrategy, RankKind, Traffic, Wrapping, on_mesh, usual_strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from trimtab.spec import Setting

MOST_STAGES = 16
"""That a plan considers: with more of them most wait most of the time. Who names the strategy and nothing
else gets one stage a device, however many."""
FILLED = 2
"""Micro-batches for each stage that keep all stages busy."""


class PipelineStrategy(ParallelStrategy):
    """Stages, with replicas of each where there are more devices than stages."""

    word = Strategy.PIPELINE
    wrapping = Wrapping.STAGE
    complexity = 6
    probe_order = 6
    job_facts = ("global_batch",)
    runs_whole_model = False
    is_bounded_by_one_device = True
    time_assumptions = (
        (
            "pipeline: the stages between the first and the last are taken to be like the first, and what "
            "stages hand over is not hidden behind computing; a pipeline was never measured"
        ),
    )
    why_not_compiled = "a stage ends in the middle of the model, which a compiler cannot follow"

    def usual_mesh(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Mesh:
        """Return one stage a device."""
        return Mesh(pp=gpus)

    def meshes(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Iterator[Mesh]:
        """Yield every number of stages that divides the devices."""
        for stages in range(2, min(gpus, MOST_STAGES) + 1):
            if gpus % stages == 0:
                yield Mesh(pp=stages, dp_replicate=gpus // stages)

    def resized(self, mesh: Mesh, ranks: int, *, nodes: int = 1, branches: int = 0) -> tuple[Strategy, Mesh]:
        """Return as many stages as until now, or fewer on fewer ranks; else shards.

        Nobody knows here whether there are layers for more stages.
        """
        if ranks == 1:
            return usual_strategy(ranks)
        if ranks < mesh.pp or ranks % mesh.pp == 0:
            stages = min(mesh.pp, ranks)
            return self.word, Mesh(pp=stages, dp_replicate=ranks // stages)
        return Strategy.FSDP, Mesh(dp_shard=ranks)

    def least_rounds(self, mesh: Mesh) -> int:
        """Return as many micro-batches as keep all stages busy."""
        return FILLED * mesh.pp

    def uses_global_batch(self, mesh: Mesh) -> bool:
        """Say yes: how long stages idle depends on the number of micro-batches."""
        return True

    def rank_kinds(self, mesh: Mesh, branches: Sequence[str]) -> list[RankKind]:
        """Return the first stage, which holds the most micro-batches, and the last, which has the head."""
        return [
            RankKind(stage=stage, number=stage, words=f"stage {stage + 1} of {mesh.pp}")
            for stage in (0, mesh.pp - 1)
        ]

    def traced_as(self, mesh: Mesh) -> tuple[Strategy, Mesh]:
        """Return one replica of each stage."""
        return self.word, Mesh(pp=mesh.pp)

    def trace_parts(self, setting: Setting, direct: Collection[int]) -> list[Setting]:
        """Return one replica of each stage."""
        return [on_mesh(setting, self.word, Mesh(pp=setting.mesh.pp))]

    def weight_shares(self, mesh: Mesh) -> int | None:
        """Return the number of stages."""
        return mesh.pp

    def least_step_s(self, setting: Setting, alone_s: Callable[[], float]) -> float | None:
        """Return the time of stages that share the work evenly and wait no longer than they have to."""
        stages, rounds = setting.mesh.pp, setting.accumulation
        return alone_s() / stages * (rounds + stages - 1) / rounds

    def held_micro_batches(self, setting: Setting, part: int) -> int:
        """Return as many as there are stages from this one to the end: one forward, one backward in turns."""
        return min(setting.mesh.pp - part, setting.accumulation)

    def idle_s(self, setting: Setting, passes_s: Sequence[float], slowest: int) -> float:
        """Return the time of a micro-batch on all other stages: before the slowest is busy, and after.

        Those between the first and the last are like the first.
        """
        first, last = passes_s[0], passes_s[-1]
        return (setting.mesh.pp - 2) * first + (last if slowest == 0 else first)

    def exposed_s(self, traffic: Traffic) -> float:
        """Return the seconds of sending activations, there and back, and of summing gradients.

        A stage waits for what it receives, and for nothing that it sends on.
        """
        trace, setting, links = traffic.trace, traffic.setting, traffic.links
        mesh = setting.mesh
        crossings = 2 * (setting.accumulation + mesh.pp - 2)
        handed = crossings * links.send_s(trace.handed_bytes, mesh.data_parallel)
        width = traffic.gradient_bytes / max(1, trace.trainable)
        shared = links.all_reduce_s(int(trace.shared * width), setting.gpus)
        own = links.all_reduce_s(int((trace.trainable - trace.shared) * width), mesh.data_parallel)
        return handed + shared + max(0.0, own - traffic.hidden_backward_s)

    def describe(self, mesh: Mesh) -> str:
        """Return the stages and their copies: pipeline of 2 stages x 2."""
        copies = f" x {mesh.dp_replicate}" * (mesh.dp_replicate > 1)
        return f"pipeline of {mesh.pp} stages{copies}"

    def explain(self, mesh: Mesh) -> str:
        """Say in how many stages the layers are cut."""
        copies = f", each on {mesh.dp_replicate} GPUs" * (mesh.dp_replicate > 1)
        return f"the layers are cut in {mesh.pp} stages{copies}"
