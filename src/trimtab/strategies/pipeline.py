"""Layers over ranks: each stage holds some of the layers and sends its activations to the next."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from trimtab.spec import Mesh, Schedule, Strategy
from trimtab.strategies.base import (
    ParallelStrategy,
    RankKind,
    Refusal,
    Waits,
    Wrapping,
    explain_context,
    explain_experts,
    on_mesh,
    usual_strategy,
)
from trimtab.strategies.fsdp import explain_tensor_ranks, find_shards_s
from trimtab.strategies.schedules import (
    PipelineShape,
    StageTimes,
    build_actions,
    count_held,
    explain_illegal,
    simulate_step,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from trimtab.spec import Setting, Trace
    from trimtab.strategies.base import LinkCosts, PassTimes, Traffic

MOST_STAGES = 16
"""That a plan considers: with more of them most wait most of the time. Who names the strategy and nothing
else gets one stage a device, however many."""
SEARCHED_VIRTUAL_STAGES = (2, 4)
"""Stages of each rank that a plan considers for an interleaved schedule."""
FORWARD_SHARE = 0.25
"""The least part of a micro-batch's time that its forward pass takes: as much as each of recomputation,
gradients of activations and gradients of weights."""
STAGES_NOT_GIVEN = Refusal(
    "it is not said how many stages there are, and so not how many ranks a stage has",
    "Say it too, as in pp=2.",
)
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
            "pipeline: the time of the ranks between the second and the last follows from that of the second "
            "by the work of their layers; a pipeline was never measured on several GPUs"
        ),
    )
    why_not_compiled = "a stage ends in the middle of the model, which a compiler cannot follow"

    def on(self, mesh: Mesh) -> ParallelStrategy:
        """Return the strategy of sharded stages, where several ranks hold shards of a stage."""
        return _SHARDED if mesh.shards * mesh.tp > 1 else self

    def explain_illegal(self, setting: Setting) -> str:
        """Return why the schedule of a setting cannot have its micro-batches; empty if it can."""
        return explain_illegal(find_shape(setting))

    def tensor_refusal(self, tp: int) -> Refusal | None:
        """Refuse to split layers, unless it is known how many ranks a stage has."""
        return None if tp == 1 else STAGES_NOT_GIVEN

    def context_refusal(self, cp: int) -> Refusal | None:
        """Refuse to split sequences, unless it is known how many ranks a stage has."""
        return None if cp == 1 else STAGES_NOT_GIVEN

    def expert_refusal(self, ep: int) -> Refusal | None:
        """Refuse different experts, unless it is known how many ranks a stage has."""
        return None if ep == 1 else STAGES_NOT_GIVEN

    def usual_mesh(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Mesh:
        """Return one stage a device."""
        return Mesh(pp=gpus)

    def meshes(self, gpus: int, *, nodes: int = 1, branches: int = 0) -> Iterator[Mesh]:
        """Yield every number of stages that divides the devices."""
        for stages in range(2, min(gpus, MOST_STAGES) + 1):
            if gpus % stages == 0:
                yield Mesh(pp=stages, dp_replicate=gpus // stages)

    def meshes_within(  # noqa: PLR0913 - the degrees are named
        self,
        gpus: int,
        *,
        nodes: int = 1,
        branches: int = 0,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        pp: int | None = None,
        dp_shard: int | None = None,
        dp_replicate: int | None = None,
    ) -> Iterator[Mesh]:
        """Yield the meshes with copies of each stage; with a fixed `pp`, the one with so many shards of it.

        If the ranks of a stage split layers or sequences, or hold different experts, all others hold shards.
        """
        if pp is None or max(dp_shard or 1, tp, cp, ep) == 1:
            yield from super().meshes_within(gpus, nodes=nodes, branches=branches, tp=tp, cp=cp, ep=ep)
            return
        ranks, left = divmod(gpus, pp * tp * cp)
        if pp == 1 or left:
            return
        shards = dp_shard or ranks // (dp_replicate or 1)
        if shards and ranks % shards == 0 and shards * cp % ep == 0:
            yield Mesh(pp=pp, dp_shard=shards, tp=tp, cp=cp, ep=ep, dp_replicate=ranks // shards)

    def resized(self, mesh: Mesh, ranks: int, *, nodes: int = 1, branches: int = 0) -> tuple[Strategy, Mesh]:
        """Return as many stages as until now, or fewer on fewer ranks; else shards.

        Nobody knows here whether there are layers for more stages.
        """
        if ranks == 1:
            return usual_strategy(ranks)
        if ranks < mesh.pp or ranks % mesh.pp == 0:
            stages = min(mesh.pp, ranks)
            return self.word, self._share_stage(Mesh(pp=stages), mesh, ranks // stages)
        return Strategy.FSDP, Mesh(dp_shard=ranks)

    def _share_stage(self, stages: Mesh, mesh: Mesh, ranks: int) -> Mesh:
        """Return the mesh of stages with so many ranks each; `mesh` is the one until now."""
        return stages.replace(dp_replicate=ranks)

    def least_rounds(self, mesh: Mesh) -> int:
        """Return as many micro-batches as keep all stages busy."""
        return FILLED * mesh.pp

    def list_schedules(self, mesh: Mesh) -> Iterator[tuple[Schedule, int]]:
        """Yield every schedule, and several virtual stages as long as there are not too many stages."""
        yield Schedule.ONE_F_ONE_B, 1
        yield Schedule.ZERO_BUBBLE, 1
        for stages in SEARCHED_VIRTUAL_STAGES:
            if mesh.pp * stages <= MOST_STAGES:
                yield Schedule.INTERLEAVED, stages

    def uses_global_batch(self, mesh: Mesh) -> bool:
        """Say yes: how long stages idle depends on the number of micro-batches."""
        return True

    def rank_kinds(self, mesh: Mesh, branches: Sequence[str]) -> list[RankKind]:
        """Return the first rank, which holds the most micro-batches, the second, and the last.

        The second may have more layers than the first; those after it hold fewer micro-batches. The last has
        the head.
        """
        return [
            RankKind(stage=stage, number=stage, words=f"stage {stage + 1} of {mesh.pp}")
            for stage in sorted({0, min(1, mesh.pp - 1), mesh.pp - 1})
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
        stages = setting.mesh.pp
        # Virtual stages divide the bubble.
        rounds = setting.accumulation * setting.virtual_stages
        # If weight gradients fill the bubble, only the first forward pass to the last rank is left of it.
        share = FORWARD_SHARE if setting.schedule.splits_backward else 1.0
        return alone_s() / stages * (rounds + share * (stages - 1)) / rounds

    def held_micro_batches(self, setting: Setting, part: int) -> float:
        """Return the most that the schedule holds on a rank; with v virtual stages, each counts 1 / v."""
        shape = find_shape(setting)
        # More micro-batches change nothing.
        most = shape._replace(micro_batches=min(shape.micro_batches, 4 * shape.ranks))
        # Before its backward passes, a rank holds all its stages of a micro-batch.
        return max(1.0, count_held(build_actions(most)[part]) / setting.virtual_stages)

    def find_waits(
        self, setting: Setting, passes: Sequence[PassTimes], slowest: int, links: LinkCosts
    ) -> Waits:
        """Return the difference between the simulated passes of all ranks and those of the slowest alone."""
        shape = find_shape(setting)
        first = passes[0]
        work = find_stage_work(first.trace, shape)
        kinds = [
            _spread(work, shape, [getattr(times, kind) for times in passes])
            for kind in ("forward_s", "input_s", "weight_s")
        ]
        stages = tuple(StageTimes(*seconds) for seconds in zip(*kinds, strict=True))
        alone = simulate_step(shape, stages)
        rank = passes[slowest].trace.part
        send_s = links.send_s(first.trace.handed_bytes, setting.mesh.size // setting.mesh.pp)
        sent = simulate_step(shape, stages, send_s)
        return Waits(max(0.0, alone.total_s - alone.busy_s[rank]), max(0.0, sent.total_s - alone.total_s))

    def exposed_s(self, traffic: Traffic) -> float:
        """Return the seconds of summing gradients: by copies, and over the stages that hold the same weights.

        Activations that stages send each other are part of `find_waits`.
        """
        trace, mesh, links = traffic.trace, traffic.setting.mesh, traffic.links
        width = traffic.gradient_bytes / max(1, trace.trainable)
        holders = trace.shared_stages * mesh.data_parallel
        shared = links.all_reduce_s(int(trace.shared * width), holders) if trace.shared else 0.0
        own = links.all_reduce_s(int((trace.trainable - trace.shared) * width), mesh.data_parallel)
        return shared + max(0.0, own - traffic.hidden_backward_s)

    def describe(self, mesh: Mesh) -> str:
        """Return the stages, their copies and their shards: pipeline of 2 stages x 2, or x 2 shards."""
        copies = f" x {mesh.dp_replicate}" * (mesh.dp_replicate > 1)
        shards = f" x {mesh.dp_shard} shards" * (mesh.dp_shard > 1)
        inner = "".join(
            f" x {axis} {getattr(mesh, axis)}" for axis in ("cp", "tp") if getattr(mesh, axis) > 1
        )
        experts = f" with ep {mesh.ep}" * (mesh.ep > 1)
        return f"pipeline of {mesh.pp} stages{copies}{shards}{inner}{experts}"

    def explain(self, mesh: Mesh) -> str:
        """Say in how many stages the layers are cut."""
        copies = f", each on {mesh.dp_replicate} GPUs" * (mesh.dp_replicate > 1)
        shards = f"; weights, gradients and optimizer state of a stage are cut in {mesh.shards}"
        inner = explain_context(mesh) + explain_tensor_ranks(mesh) + explain_experts(mesh)
        return f"the layers are cut in {mesh.pp} stages{copies}{shards * (mesh.shards > 1)}{inner}"

    def config_form(self, setting: Setting) -> Setting:
        """Return the strategy of the ranks of a stage, beside which frameworks have a degree of stages."""
        mesh = setting.mesh
        if mesh.dp_shard > 1:
            return setting.replace(strategy=Strategy.HSDP if mesh.dp_replicate > 1 else Strategy.FSDP)
        return setting if mesh.dp_replicate == 1 else setting.replace(strategy=Strategy.DDP)


class ShardedPipelineStrategy(PipelineStrategy):
    """Stages whose weights, gradients and optimizer state are cut over several ranks each, by FSDP2.

    These ranks may also split layers or sequences between them, or hold different experts.
    """

    wrapping = Wrapping.STAGE_SHARDS

    def tensor_refusal(self, tp: int) -> Refusal | None:
        """Let the ranks of a stage split its layers."""
        return None

    def context_refusal(self, cp: int) -> Refusal | None:
        """Let the ranks of a stage split sequences."""
        return None

    def expert_refusal(self, ep: int) -> Refusal | None:
        """Let the ranks of a stage hold different experts."""
        return None

    def on(self, mesh: Mesh) -> ParallelStrategy:
        """Return the strategy of whole stages, where a rank holds all of its stage."""
        return self if mesh.shards * mesh.tp > 1 else STAGES

    def traced_as(self, mesh: Mesh) -> tuple[Strategy, Mesh]:
        """Return the same shards of each stage; two replicas stand for any number."""
        return self.word, mesh.replace(dp_replicate=min(2, mesh.dp_replicate))

    def trace_parts(self, setting: Setting, direct: Collection[int]) -> list[Setting]:
        """Return one replica of each stage, with its shards."""
        return [on_mesh(setting, self.word, setting.mesh.replace(dp_replicate=1))]

    def exposed_s(self, traffic: Traffic) -> float:
        """Return the seconds of shards, and of summing over stages what several of them hold.

        Ranks of a stage have consecutive numbers. Stages sum after all passes, so that nothing hides it.
        """
        trace, mesh = traffic.trace, traffic.setting.mesh
        ranks = mesh.shards * mesh.tp
        width = traffic.gradient_bytes / max(1, trace.trainable)
        shared = int(trace.shared * width / ranks)
        # The first and the last stage of a tied embedding are the farthest apart.
        stages = max(1, trace.shared_stages)
        apart = ranks * mesh.dp_replicate * max(1, (mesh.pp - 1) // max(1, stages - 1))
        summed = traffic.links.all_reduce_s(shared, stages, apart=apart) if shared else 0.0
        return find_shards_s(traffic) + traffic.within_layers_s() + traffic.experts_s() + summed

    def _share_stage(self, stages: Mesh, mesh: Mesh, ranks: int) -> Mesh:
        """Return stages that are split as until now where the ranks allow it; all others hold shards."""
        tp = mesh.tp if ranks % mesh.tp == 0 else 1
        cp = mesh.cp if ranks % (tp * mesh.cp) == 0 else 1
        shards = ranks // (tp * cp)
        copies = mesh.dp_replicate if shards % mesh.dp_replicate == 0 else 1
        shared = stages.replace(tp=tp, cp=cp, dp_shard=shards // copies, dp_replicate=copies)
        return shared.replace(ep=mesh.ep if shared.expert_ranks % mesh.ep == 0 else 1)

    def weight_shares(self, mesh: Mesh) -> int | None:
        """Return the number of stages times their shards."""
        return mesh.pp * mesh.shards * mesh.tp


STAGES = PipelineStrategy()
_SHARDED = ShardedPipelineStrategy()


def find_shape(setting: Setting) -> PipelineShape:
    """Return what the actions of a setting's schedule follow from."""
    return PipelineShape(setting.schedule, setting.mesh.pp, setting.virtual_stages, setting.accumulation)


def find_stage_work(trace: Trace, shape: PipelineShape, *, around: bool = True) -> tuple[float, ...]:
    """Return the share of the work of each stage; of a trace that does not know it, as much for all.

    With `around`, the first stage has what is before the blocks, and the last what is after them.
    """
    if len(trace.stage_layers) != shape.stages:
        return (1.0,) * shape.stages
    before, *blocks, after = trace.block_work or (0.0, *[1.0] * sum(trace.stage_layers), 0.0)
    bounds = list(accumulate(trace.stage_layers, initial=0))
    work = [sum(blocks[first:stop]) for first, stop in pairwise(bounds)]
    work[0] += before * around
    work[-1] += after * around
    return tuple(work)


def _spread(work: Sequence[float], shape: PipelineShape, seconds: Sequence[float]) -> Iterator[float]:
    """Yield the seconds of each stage, from those of all stages of the first, the second and the last rank.

    On the ranks between, work takes as long as on the second, or on the first of two. The last stage takes
    what is left of the last rank.
    """

    def find_pace(rank: int) -> float:
        return seconds[rank] / sum(work[stage] for stage in shape.stages_of(rank))

    between_s = find_pace(0 if len(seconds) < 3 else 1)  # noqa: PLR2004 - a rank between two others
    for stage in range(shape.stages - 1):
        yield (find_pace(0) if shape.rank_of(stage) == 0 else between_s) * work[stage]
    others = sum(work[stage] for stage in shape.stages_of(shape.ranks - 1)) - work[-1]
    yield max(0.0, seconds[-1] - between_s * others)
