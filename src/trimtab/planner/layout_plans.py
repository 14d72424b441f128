"""Turn layouts that formulas rank into settings, estimates and plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from trimtab.cache import LAYOUTS, code_fingerprint, fingerprint
from trimtab.catalog.facts import facts_of
from trimtab.errors import WrongUse
from trimtab.planner.explanations import add_run_totals, compare_step, compute_cost
from trimtab.planner.layouts import OWN, TRAINERS, LayoutQuestion, LayoutSearch, StoredRanking
from trimtab.planner.space import make_layout
from trimtab.predict.calibration import find_speed, read_own_calibration
from trimtab.predict.communication import describe_network, find_links
from trimtab.predict.estimate import describe_public_steps, find_public_correction
from trimtab.predict.layout import LayoutEstimator, Sharding
from trimtab.predict.nccl_memory import sum_communicators
from trimtab.spec import (
    Band,
    Candidate,
    Estimate,
    Footprint,
    LayoutRow,
    Mesh,
    PipelineEstimate,
    Plan,
    Policy,
    Precision,
    Reason,
    Recompute,
    Rejection,
    Schedule,
    Setting,
    StepTime,
    Verdict,
)
from trimtab.strategies import STRATEGIES, find_training_refusal, strategy_by_degrees
from trimtab.trace.tracer import NOT_TRACING
from trimtab.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trimtab.catalog.tables import PublicCorrection
    from trimtab.planner.estimator_interface import Layout
    from trimtab.planner.layouts import RankedLayout
    from trimtab.predict.calibration import Speed
    from trimtab.predict.communication import Links
    from trimtab.predict.layout import DecoderLayout
    from trimtab.spec import Cluster, DecoderShape, Device, Workload

NOT_ESTIMATING = NOT_TRACING - {"predict", "planner"}
"""Packages of trimtab that no plan depends on."""
ROOM = 1.05
"""Reserved memory over allocated memory: the caching allocator leaves gaps."""
MEMORY_ERROR = 0.1
"""Largest known error of the formulas' memory (docs/layouts.md)."""
BY_FORMULAS = "by formulas, not traced: docs/layouts.md states how far off they are"
PRECISION_NOTE = (
    "bf16 with weights, gradients and AdamW in float32; attention by a flash kernel; norms are fused"
)
OPTIMIZER_NOTE = "data-parallel ranks share the states of the optimizer (Megatron-LM's distributed optimizer)"
STAGES_NOTE = "with pipeline stages, weights stay gathered between micro-batches"
OWN_STAGES_NOTE = (
    "pipeline stages gather weights in every pass; the first has the embedding, the last has the head; steps "
    "that split layers, sequences, experts or stages are not compiled"
)
RUNNERS_UP = 5
LOADERS = 4
"""Loader processes per rank."""
AXES = {
    "tp": "tensor parallel ranks split every layer",
    "cp": "context parallel ranks split every sequence",
    "pp": "pipeline stages hold different layers",
    "ep": "expert parallel ranks hold different experts",
}


class LayoutModel(NamedTuple):
    """A decoder, its batch, and the devices to spread it over."""

    shape: DecoderShape
    cluster: Cluster
    sequence: int
    global_batch: int
    trainer: str = "torchtitan"
    memory_share: float = Policy().memory_share
    pins: Mapping[str, int] = {}
    is_cached: bool = False
    """Whether the fastest layout of each mesh is enough, so that the ranking can be cached on disk."""


@dataclass(frozen=True)
class LayoutStudy:
    """All layouts of a decoder on a cluster, estimated by formulas."""

    model: LayoutModel
    search: LayoutSearch
    device: Device
    context_bytes: int
    """The CUDA context."""
    links: Links
    speed: Speed
    correction: PublicCorrection | None = None
    """By public measurements of other trainers on this GPU."""

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step."""
        return self.model.sequence * self.model.global_batch

    def describe(self, ranked: RankedLayout) -> LayoutRow:
        """Return a layout as a row of a ranking."""
        layout, time, memory = ranked
        kinds = {name: getattr(memory, name) for name in memory._fields if name != "stage"}
        return LayoutRow(
            dp_replicate=layout.dp_replicate,
            dp_shard=layout.dp_shard,
            cp=layout.cp,
            tp=layout.tp,
            pp=layout.pp,
            ep=layout.ep,
            virtual_stages=layout.virtual_stages,
            micro_batch=layout.micro_batch,
            accumulation=layout.micro_batches,
            recompute="full" if layout.full_recompute else "none",
            step_s=time.total_s,
            times={name.removesuffix("_s"): getattr(time, name) for name in time._fields},
            tokens_per_s_per_gpu=self.tokens / time.total_s / layout.gpus,
            mfu=self._compute_mfu(ranked),
            memory_bytes=round(memory.total * ROOM) + self.context_bytes + self._count_nccl_bytes(layout),
            memory=kinds,
            fullest_stage=memory.stage,
        )

    def estimate(self, ranked: RankedLayout) -> Estimate:
        """Return the figures of a layout as an estimate of the fullest rank."""
        layout, time, memory = ranked
        reserved = round(memory.total * ROOM)
        nccl_bytes = self._count_nccl_bytes(layout)
        process = reserved + self.context_bytes + nccl_bytes
        low, high = (round(process * factor) for factor in (1 - MEMORY_ERROR, 1 + MEMORY_ERROR))
        return Estimate(
            allocated_bytes=memory.total,
            reserved_bytes=reserved,
            process_bytes=process,
            capacity_bytes=self.device.memory_bytes,
            fits=high <= self.device.memory_bytes,
            verdict=Verdict.FITS if high <= self.device.memory_bytes else Verdict.DOES_NOT_FIT,
            parts=Footprint(
                weights=memory.weights,
                gradients=memory.gradients,
                optimizer=memory.optimizer,
                activations=memory.activations + memory.logits,
                workspace=memory.working,
                communication=nccl_bytes,
                context=self.context_bytes,
            ),
            gradients_bytes=memory.gradients,
            band=Band(low_bytes=low, high_bytes=high),
            fullest_rank=f"stage {memory.stage + 1} of {layout.pp}" if layout.pp > 1 else "",
            pipeline=self._describe_stages(ranked) if layout.pp > 1 else None,
            step_s=time.total_s,
            step_time=StepTime(
                compute_s=time.compute_s + time.update_s,
                launch_s=time.launch_s,
                communication_s=time.within_layers_s + time.send_s + time.data_s,
                bubble_s=time.bubble_s,
            ),
            mfu=self._compute_mfu(ranked),
            assumptions=tuple(self.list_assumptions()),
        )

    def list_assumptions(self) -> Iterator[str]:
        """Yield what the figures take for granted."""
        trainer, shape, devices = self.model.trainer, self.model.shape, self.model.cluster
        yield PRECISION_NOTE
        if TRAINERS[trainer] is Sharding.OPTIMIZER:
            yield OPTIMIZER_NOTE
        else:
            yield "data-parallel ranks share weights, gradients and states (FSDP2)"
            yield OWN_STAGES_NOTE if trainer == OWN else STAGES_NOTE
        yield BY_FORMULAS
        if shape.experts:
            yield "experts get equal numbers of tokens; no capacity limit drops any"
        if self.speed.imported:
            yield f"time: by the calibration of {self.speed.source} from {self.speed.imported}"
        if not self.speed.own:
            name = self.device.name
            more = f", {self.correction.describe()}" if self.correction is not None else ""
            yield f"time: {name} was not calibrated; its datasheet with the efficiencies of an H200{more}"
            if self.correction is None:
                yield from describe_public_steps(self.device)
        if (network := describe_network(devices, len(devices.devices))) is not None:
            yield network

    def _count_nccl_bytes(self, layout: DecoderLayout) -> int:
        return sum_communicators(make_mesh(layout), self.links)

    def _compute_mfu(self, ranked: RankedLayout) -> float | None:
        shape, peak = self.model.shape, self.device.peaks.bf16
        attention = 6 * shape.layers * shape.heads * shape.head_size * self.model.sequence
        flops = self.tokens * (6 * shape.active_parameters + attention)
        return flops / (ranked.time.total_s * ranked.layout.gpus * peak) if peak else None

    def _describe_stages(self, ranked: RankedLayout) -> PipelineEstimate:
        layout, estimator = ranked.layout, self.search.estimator
        stages = range(layout.pp)
        return PipelineEstimate(
            layers=tuple(estimator.count_layers(layout, stage) for stage in stages),
            held_micro_batches=tuple(float(estimator.count_held(layout, stage)) for stage in stages),
            bubble_share=ranked.time.bubble_s / ranked.time.total_s,
        )


def study_layouts(model: LayoutModel) -> LayoutStudy:
    """Estimate all layouts of a decoder on a cluster of equal devices."""
    cluster = model.cluster
    device, gpus = find_only_device(cluster), len(cluster.devices)
    own = read_own_calibration(device)
    speed = find_speed(device, own)
    if speed is None:
        raise WrongUse(
            f"--on {device.name}",
            found=f"the catalogue has no speed of {device.name}",
            cure="Run `trimtab calibrate`.",
        )
    context = facts_of(device).memory.sharded_context_bytes
    links = find_links(cluster, gpus, own)
    # A plan for trimtab's own trainer fits by its upper band, as traced plans do.
    room = ROOM * (1 + MEMORY_ERROR) if model.trainer == OWN else ROOM
    usable = device.memory_bytes * model.memory_share
    # The band is of the whole process, the CUDA context and NCCL's buffers included.
    margin = 1 + MEMORY_ERROR * (model.trainer == OWN)
    usable -= context * margin
    question = LayoutQuestion(
        shape=model.shape,
        sequence=model.sequence,
        global_batch=model.global_batch,
        gpus=gpus,
        per_node=max(len(node.devices) for node in cluster.nodes),
        trainer=model.trainer,
        budget_bytes=int(usable / room),
        pins=model.pins,
        refuse=explain_refusal if model.trainer == OWN else lambda _: "",
        count_nccl_bytes=lambda layout: int(sum_communicators(make_mesh(layout), links) * margin / room),
    )
    # Candidates of `trimtab plan` compete with traced ones, which are not corrected.
    correct = model.trainer != OWN and not speed.own and not speed.imported
    correction = find_public_correction(device) if correct else None
    estimator = LayoutEstimator(
        model.shape,
        speed.pace,
        speed.host,
        links,
        slowdown=1.0 if correction is None else correction.factor,
    )
    search = LayoutSearch(question, estimator)
    if not model.is_cached:
        search.run()
        return LayoutStudy(model, search, device, context, links, speed, correction)
    key = fingerprint(code_fingerprint(NOT_ESTIMATING), model, own)
    stored = LAYOUTS.load(key, _read_ranking)
    if stored is None:
        stored = search.run().store()
        LAYOUTS.store(key, msgspec.json.encode(stored))
    return LayoutStudy(model, search.restore(stored), device, context, links, speed, correction)


def _read_ranking(data: bytes) -> StoredRanking:
    return msgspec.json.decode(data, type=StoredRanking)


def find_only_device(cluster: Cluster) -> Device:
    """Return the device of a cluster whose devices are all the same."""
    names = {device.model or device.name for device in cluster.devices}
    if len(names) != 1:
        there = f"it has {' and '.join(sorted(names))}" if names else "it has no GPU"
        raise WrongUse("--on", found=there, cure="Name devices of one kind, as in --on 32x8xH100.")
    return cluster.devices[0]


def make_mesh(layout: DecoderLayout) -> Mesh:
    """Return the mesh of a layout; the ranks of Megatron-LM's data parallelism have copies of the weights."""
    copies, shards = layout.dp_replicate, layout.dp_shard
    if _has_copies(layout):
        copies, shards = layout.dp, 1
    return Mesh(dp_replicate=copies, dp_shard=shards, **{axis: getattr(layout, axis) for axis in AXES})


def _has_copies(layout: DecoderLayout) -> bool:
    return layout.sharding is Sharding.OPTIMIZER and layout.ep == 1


def make_setting(layout: DecoderLayout) -> Setting:
    """Return the setting of a layout, under the strategy whose ranks hold the same.

    Ranks that shard only the states of the optimizer, as in Megatron-LM, have copies of the weights.
    """
    mesh = make_mesh(layout)
    has_copies = _has_copies(layout)
    is_alone = layout.gpus == 1
    strategy = strategy_by_degrees(
        replicated=not is_alone and (has_copies or mesh.dp_replicate > 1),
        sharded=not is_alone and not has_copies,
        staged=not has_copies and layout.pp > 1,
    )
    return Setting(
        strategy=strategy,
        mesh=mesh,
        micro_batch=layout.micro_batch,
        accumulation=layout.micro_batches,
        global_batch=layout.micro_batch * layout.micro_batches * layout.dp,
        precision=Precision.BF16,
        recompute=Recompute.FULL if layout.full_recompute else Recompute.NONE,
        workers=LOADERS,
        schedule=Schedule.INTERLEAVED if layout.virtual_stages > 1 else Schedule.ONE_F_ONE_B,
        virtual_stages=layout.virtual_stages,
    )


def explain_refusal(layout: DecoderLayout) -> str:
    """Return why `trimtab train` does not run a layout; empty if it does."""
    setting = make_setting(layout)
    if find_training_refusal(setting) is not None:
        return "trimtab train does not run these degrees together"
    is_illegal = layout.pp > 1 and STRATEGIES[setting.strategy].explain_illegal(setting)
    return "the micro-batches do not suit the schedule" if is_illegal else ""


def make_layout_plan(  # noqa: PLR0913 - parts of a plan
    study: LayoutStudy,
    chosen: RankedLayout,
    *,
    job: str,
    workload: Workload,
    policy: Policy,
    among: Sequence[RankedLayout] = (),
) -> Plan:
    """Return the plan of a layout: its setting with the figures of the formulas, reasons and alternatives.

    `among` are the layouts to compare it with; default: all that fit.
    """
    cluster = study.model.cluster
    setting = make_setting(chosen.layout)
    estimate = add_run_totals(study.estimate(chosen), setting, workload)
    others = [ranked for ranked in study.search.best_by_mesh() if ranked is not chosen][:RUNNERS_UP]
    return Plan(
        job=job,
        options={"seq": study.model.sequence},
        choice=setting,
        estimate=estimate,
        policy=policy,
        reasons=tuple(list_layout_reasons(study, chosen, among or study.search.found)),
        runners_up=tuple(describe_alternative(study, other, chosen, workload) for other in others),
        rejected=list_layout_rejections(study),
        places=place_ranks(cluster).places,
        workload=workload,
        cost=compute_cost(estimate, policy),
        left_out=() if len(cluster.nodes) == 1 else ("fewer GPUs than all: formulas rank layouts of all",),
        recommendation=write_layout_recommendation(study, chosen),
        by_formulas=True,
    )


def place_ranks(cluster: Cluster) -> Layout:
    """Return the layout of all devices of a cluster."""
    picks = [(number, device) for number, node in enumerate(cluster.nodes) for device in node.devices]
    return make_layout(cluster, picks)


def describe_alternative(
    study: LayoutStudy, other: RankedLayout, chosen: RankedLayout, workload: Workload
) -> Candidate:
    """Return another layout as a runner-up."""
    setting = make_setting(other.layout)
    return Candidate(
        setting=setting,
        estimate=add_run_totals(study.estimate(other), setting, workload),
        why=compare_step(other.time.total_s, chosen.time.total_s),
    )


def list_layout_rejections(study: LayoutStudy) -> tuple[Rejection, ...]:
    """Return how many layouts were ruled out by which rule."""
    search = study.search
    rejections = [Rejection(why=why, count=count) for why, count in search.ruled_out.items() if count]
    slower = search.fitting - 1
    if slower > 0:
        rejections.append(
            Rejection(why="layouts that fit, and are slower or split in more ways", count=slower)
        )
    return tuple(rejections)


def list_layout_reasons(
    study: LayoutStudy, chosen: RankedLayout, among: Sequence[RankedLayout]
) -> Iterator[Reason]:
    """Yield each choice of a layout with its reason, in figures."""
    layout, setting = chosen.layout, make_setting(chosen.layout)
    gpus = len(study.model.cluster.devices)
    yield Reason(subject="gpus", value=f"{layout.gpus} of {gpus}", why="formulas rank layouts of all GPUs")
    yield Reason(subject="strategy", value=setting.strategy.value, why=_explain_data_ranks(layout))
    for axis in AXES:
        degree = getattr(layout, axis)
        if axis == "ep" and not study.model.shape.experts:
            continue
        yield Reason(subject=axis, value=str(degree), why=explain_degree(study, chosen, axis, among))
    if layout.virtual_stages > 1:
        yield Reason(
            subject="virtual_stages", value=str(layout.virtual_stages), why="parts of the model on each stage"
        )
    yield Reason(
        subject="micro_batch",
        value=str(layout.micro_batch),
        why=f"x {layout.micro_batches} micro-batches x {layout.dp} data-parallel ranks",
    )
    full = "each block stores only its input" if layout.full_recompute else "everything fits"
    yield Reason(subject="recompute", value=setting.recompute.value, why=full)
    refusal = find_training_refusal(setting)
    if refusal is not None:
        runs = "Megatron-LM" if TRAINERS[study.model.trainer] is Sharding.OPTIMIZER else "torchtitan"
        yield Reason(subject="trainer", value=runs, why=f"trimtab train cannot run it: {refusal.found}")
    yield Reason(subject="figures", value="formulas", why="no step was traced; memory within 10 %")


def _explain_data_ranks(layout: DecoderLayout) -> str:
    if layout.sharding is Sharding.OPTIMIZER:
        return f"{layout.dp} data-parallel ranks share the states of the optimizer"
    copies = f"{layout.dp_replicate} copies of " * (layout.dp_replicate > 1)
    return f"{copies}{plural(layout.dp_shard * layout.cp, 'shard')} of the weights"


def explain_degree(study: LayoutStudy, chosen: RankedLayout, axis: str, among: Sequence[RankedLayout]) -> str:
    """Return what the best layout with another degree would cost; `among` has the fastest first."""
    degree, words = getattr(chosen.layout, axis), AXES[axis]
    if axis in study.model.pins:
        return f"{words}; pinned" if degree > 1 else "pinned"
    best: dict[int, float] = {}
    for ranked in among:
        best.setdefault(getattr(ranked.layout, axis), ranked.time.total_s)
    texts = []
    if degree > 1 and 1 not in best:
        texts.append(f"nothing fits without {axis}")
    other = min((value for value in best if value != degree), key=lambda value: best[value], default=None)
    if other is not None:
        texts.append(f"{axis} {other} {compare_step(best[other], chosen.time.total_s)}")
    prefix = f"{words}; " if degree > 1 else ""
    return prefix + ("; ".join(texts) or "no other degree is legal and fits")


def write_layout_recommendation(study: LayoutStudy, chosen: RankedLayout) -> str:
    """Return the result in one sentence."""
    row = study.describe(chosen)
    mfu = "" if row.mfu is None else f", {row.mfu:.0%} MFU"
    return (
        f"{format_seconds(row.step_s)} a step by formulas, {row.tokens_per_s_per_gpu:,.0f} "
        f"tokens/s/GPU{mfu}; {format_bytes(row.memory_bytes)} on the fullest GPU. No step was traced."
    )
