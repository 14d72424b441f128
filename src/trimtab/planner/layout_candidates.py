"""Let formulas propose layouts of a large decoder, so that a plan traces only the best of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING, Any

from trimtab.catalog.tables import recipes
from trimtab.errors import WrongUse
from trimtab.jobs.decoder_shape import read_decoder_shape
from trimtab.planner.layout_plans import (
    AXES,
    LayoutModel,
    LayoutStudy,
    describe_alternative,
    explain_degree,
    list_layout_rejections,
    make_setting,
    place_ranks,
    study_layouts,
)
from trimtab.planner.layouts import ALIKE, OWN, count_splits
from trimtab.planner.space import Family, Space, count_workers, make_layout, pick_precision
from trimtab.planner.usual_batch import LARGE
from trimtab.predict.calibration import find_speed
from trimtab.spec import Allocator, Objective, Precision, Reason, Recompute, Schedule
from trimtab.strategies import STRATEGIES
from trimtab.units import format_figure, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trimtab.planner.decision import PlanQuestion
    from trimtab.planner.layouts import RankedLayout
    from trimtab.spec import Cluster, Plan

ERROR = 0.1
"""Error of the formulas' step times over several nodes (docs/layouts.md): smaller gains are not believed."""
MOST_TRACED_GPUS = 2048
"""On more GPUs, the groups of ranks take longer to set up than the step takes to trace."""
TRACED_MESHES = 2
"""Meshes that are traced together."""
ROUNDS = 2
"""How often the next meshes are traced if none of the first fits."""
SHOWN = 3
"""Layouts by formulas among the alternatives of a plan."""
WORTH_A_NOTE = 0.03
"""Share of the step that a layout of another trainer has to save to be named."""
HOPELESS = 1.3
"""Memory over the limit from which a layout without recomputation is not traced."""
FORMULA_DTYPES = Precision.BF16.dtypes
"""What the formulas assume."""
FREE_PINS = frozenset({"workers", "allocator"})
"""Pins that formulas need not know."""
PINNED_DEGREES = frozenset({"tp", "cp", "pp", "ep", "dp_shard", "dp_replicate"})
"""Pins that formulas can follow."""
SLOW = 1e9
"""Weights of a model of which all schedules of a pinned pipeline take minutes to trace."""
NOT_COMPILED = "trimtab does not compile steps with tp, cp, ep or pp"
USUAL_TOKENS = 1 << 20
"""Tokens of a step below which a plan of a large model asks whether the batch is meant so."""


@dataclass(frozen=True)
class LayoutProposal:
    """Layouts that formulas propose for a job."""

    study: LayoutStudy
    runnable: tuple[RankedLayout, ...]
    """The fastest layout of each mesh that `trimtab train` runs, the fastest first."""
    data_parallel_s: float | None
    """Least time of a step by data parallelism alone, on as many GPUs as the batch allows."""

    @property
    def is_traced(self) -> bool:
        """Whether the layouts can be traced in reasonable time."""
        return bool(self.runnable) and self.runnable[0].layout.gpus <= MOST_TRACED_GPUS

    @property
    def needs_search(self) -> bool:
        """Whether all data-parallel settings are traced too: they fit, and the model is small enough."""
        return self.data_parallel_s is not None and self.study.model.shape.parameters < LARGE

    @property
    def best(self) -> RankedLayout:
        """The layout to plan with, by formulas alone."""
        return self.runnable[0] if self.runnable else self.study.search.best_by_mesh()[0]


def propose_layouts(
    question: PlanQuestion,
    overrides: Mapping[str, Any],
    *,
    notice: Callable[[RankedLayout], None] = lambda _: None,
    cache: bool = False,
) -> LayoutProposal | None:
    """Return the layouts to plan with; None if data parallelism is as good, or formulas cannot tell.

    `notice` is called with the best by formulas, which is known long before anything is traced. With `cache`,
    rankings are cached on disk.
    """
    study = _study_question(question, overrides, cache=cache)
    if study is None or not study.search.found:
        return None
    runnable = _put_simplest_first(list(_list_runnable(study)))
    if study.model.pins and not runnable:
        return None
    notice(runnable[0] if runnable else study.search.best_by_mesh()[0])
    alone_s = None if study.model.pins else _find_data_parallel_s(study)
    if alone_s is not None:
        best_s = runnable[0].time.total_s if runnable else alone_s
        is_large = study.model.shape.parameters >= LARGE
        if not runnable or (best_s > alone_s * (1 - ERROR) and not is_large):
            return None
    return LayoutProposal(study, runnable, alone_s)


def _study_question(
    question: PlanQuestion, overrides: Mapping[str, Any], *, cache: bool
) -> LayoutStudy | None:
    """Estimate all layouts of the job on all GPUs; None where the formulas do not hold."""
    policy, workload, cluster = question.policy, question.workload, question.cluster
    is_plain = policy.objective is Objective.SPEED and not policy.allow and not question.compare
    degrees = {name: int(degree) for name, degree in policy.pins.items() if name in PINNED_DEGREES}
    is_plain = is_plain and (FREE_PINS | degrees.keys()).issuperset(policy.pins)
    # Other pinned meshes are few, and quickly traced.
    is_staged = degrees.get("pp", 1) > 1
    if not is_plain or (degrees and not is_staged) or not {"seq"}.issuperset(overrides):
        return None
    if workload.is_indivisible or workload.cached or not workload.sample_length or not _are_alike(cluster):
        return None
    device = cluster.devices[0]
    dtypes = pick_precision(cluster.devices, policy).dtypes
    if find_speed(device, None) is None or dtypes != FORMULA_DTYPES:
        return None
    try:
        shape, _ = read_decoder_shape(question.job)
    except WrongUse:
        return None
    if degrees and shape.parameters < SLOW:
        return None
    return study_layouts(
        LayoutModel(
            shape=shape,
            cluster=cluster,
            sequence=workload.sample_length,
            global_batch=workload.global_batch,
            memory_share=policy.memory_share,
            trainer=OWN,
            pins=degrees,
            is_cached=cache,
        )
    )


def _are_alike(cluster: Cluster) -> bool:
    """Whether there are several whole GPUs of one kind, equally many on each node."""
    kinds = {device.kind for device in cluster.devices}
    counts = {len(node.devices) for node in cluster.nodes}
    is_sliced = any(device.slice for device in cluster.devices)
    return len(cluster.devices) > 1 and len(kinds) == len(counts) == 1 and not is_sliced


def _put_simplest_first(runnable: list[RankedLayout]) -> tuple[RankedLayout, ...]:
    """Return layouts with the simplest of those first that are as fast as formulas can tell."""
    if not runnable:
        return ()
    alike = [ranked for ranked in runnable if ranked.time.total_s <= ALIKE * runnable[0].time.total_s]
    # Of tensor and context parallelism, the first asks less of a job.
    first = min(
        alike, key=lambda ranked: (count_splits(ranked.layout), ranked.layout.cp > 1, ranked.time.total_s)
    )
    others = [ranked for ranked in runnable if ranked is not first]
    # Data parallelism alone comes next: it can be compiled, which formulas do not know.
    return (first, *sorted(others, key=is_split))


def _list_runnable(study: LayoutStudy) -> Iterator[RankedLayout]:
    """Yield the fastest layout of each mesh that a strategy has."""
    cluster = study.model.cluster
    seen = set()
    for ranked in study.search.found:
        setting = make_setting(ranked.layout)
        mesh = setting.mesh
        degrees: dict[str, Any] = {"tp": mesh.tp, "cp": mesh.cp, "ep": mesh.ep}
        if mesh.pp > 1:
            degrees |= {"pp": mesh.pp, "dp_shard": mesh.dp_shard, "dp_replicate": mesh.dp_replicate}
        meshes = STRATEGIES[setting.strategy].meshes_within(mesh.size, nodes=len(cluster.nodes), **degrees)
        if mesh in seen or mesh not in meshes:
            continue
        seen.add(mesh)
        yield ranked


def _find_data_parallel_s(study: LayoutStudy) -> float | None:
    """Return the least time by data parallelism alone; on fewer nodes if the batch has too few samples."""
    model, best = study.model, study.search.best_data_parallel()
    cluster, batch = model.cluster, model.global_batch
    if best is None and batch < len(cluster.devices):
        per_node = len(cluster.nodes[0].devices)
        nodes = next(
            (count for count in range(batch // per_node, 0, -1) if batch % (count * per_node) == 0), 0
        )
        if not nodes:
            return None
        picks = [(number, device) for number in range(nodes) for device in cluster.nodes[number].devices]
        pins = dict.fromkeys(AXES, 1)
        fewer = study_layouts(model._replace(cluster=make_layout(cluster, picks).cluster, pins=pins))
        best = fewer.search.best_data_parallel()
    return None if best is None else best.time.total_s


def list_spaces(proposal: LayoutProposal, question: PlanQuestion) -> Iterator[Space]:
    """Yield the settings to trace: of the best meshes, then of the next ones."""
    pinned = question.policy.pins.get("allocator")
    for begin in range(0, ROUNDS * TRACED_MESHES, TRACED_MESHES):
        chosen = proposal.runnable[begin : begin + TRACED_MESHES]
        if not chosen:
            return
        yield Space(
            families=tuple(
                family for ranked in chosen for family in _list_families(proposal, ranked, question)
            ),
            mixed=(),
            allocators=(Allocator(str(pinned)),) if pinned else (Allocator.DEFAULT, Allocator.EXPANDABLE),
            refused=list_layout_rejections(proposal.study),
            policy=question.policy,
            workload=question.workload,
        )


def _list_families(
    proposal: LayoutProposal, ranked: RankedLayout, question: PlanQuestion
) -> Iterator[Family]:
    layout, setting = ranked.layout, make_setting(ranked.layout)
    search = proposal.study.search
    places = place_ranks(question.cluster)
    recomputes = [Recompute.NONE, Recompute.FULL, *(way for way in Recompute if way.way.is_partial)]
    stored = search.estimator.estimate_memory(replace(layout, full_recompute=False)).total
    if stored > HOPELESS * search.question.budget_bytes:
        recomputes = [Recompute.FULL]
    # One sample at a time is the way out if a step needs more memory than formulas say.
    samples = setting.micro_batch * setting.accumulation
    splits = tuple(dict.fromkeys(((setting.micro_batch, setting.accumulation), (1, samples))))
    ways = (("schedule", setting.schedule), ("virtual_stages", setting.virtual_stages)) * (layout.pp > 1)
    for recompute in recomputes:
        for compiled in (False,) if is_split(ranked) else (False, True):
            yield Family(
                ways=ways,
                layout=places,
                strategy=setting.strategy,
                mesh=setting.mesh,
                precision=setting.precision,
                recompute=recompute,
                compile=compiled,
                workers=count_workers(places, question.policy),
                global_batch=setting.global_batch,
                splits=splits,
            )


def is_split(ranked: RankedLayout) -> bool:
    """Whether ranks of a layout split layers, sequences or experts."""
    return count_splits(ranked.layout) > 0


def add_layouts(plan: Plan, proposal: LayoutProposal) -> Plan:
    """Return a plan with what formulas say: degrees, alternatives, faster layouts of other trainers."""
    study = proposal.study
    chosen = next(
        (ranked for ranked in proposal.runnable if make_setting(ranked.layout).mesh == plan.choice.mesh),
        proposal.best,
    )
    assert plan.workload is not None  # noqa: S101 - plans of jobs have it
    runners_up = () if plan.by_formulas else plan.runners_up
    shown = {plan.choice.mesh, *(candidate.setting.mesh for candidate in runners_up)}
    others = [ranked for ranked in proposal.runnable if make_setting(ranked.layout).mesh not in shown]
    alternatives = [describe_alternative(study, ranked, chosen, plan.workload) for ranked in others[:SHOWN]]
    if not plan.by_formulas:
        alternatives = [
            candidate.replace(why=f"by formulas, not traced: {candidate.why}") for candidate in alternatives
        ]
    reasons = [*list_degree_reasons(proposal, plan, chosen), *note_other_trainers(proposal, plan, chosen)]
    known = [
        reason.replace(why=NOT_COMPILED) if reason.subject == "compile" and is_split(chosen) else reason
        for reason in plan.reasons
    ]
    return plan.replace(
        reasons=(*known, *reasons),
        runners_up=(*runners_up, *alternatives),
    )


def explain_formulas(plan: Plan, why: str) -> Plan:
    """Return a plan by formulas with the reason why no step was traced."""
    reasons = [reason.replace(why=why) if reason.subject == "figures" else reason for reason in plan.reasons]
    return plan.replace(reasons=tuple(reasons))


def list_degree_reasons(proposal: LayoutProposal, plan: Plan, chosen: RankedLayout) -> Iterator[Reason]:
    """Yield why the degrees are as they are, how many layouts there were, and whether the batch is small."""
    study = proposal.study
    for axis in AXES:
        degree = getattr(chosen.layout, axis)
        if degree > 1 and not plan.by_formulas:
            why = f"by formulas: {explain_degree(study, chosen, axis, proposal.runnable)}"
            yield Reason(subject=axis, value=str(degree), why=why)
    if not plan.by_formulas:
        yield Reason(
            subject="figures",
            value="traced",
            why=f"formulas say {format_figure(chosen.time.total_s)} s a step",
        )
    meshes = len({look.setting.mesh for look in plan.looked_at})
    traced = f", {meshes} traced of {len(proposal.runnable)} that trimtab train runs" if meshes else ""
    alone = "by formulas no data-parallel setting fits"
    if proposal.data_parallel_s is not None:
        alone = f"by formulas data parallelism alone takes {format_figure(proposal.data_parallel_s)} s a step"
    if study.model.pins:
        unknown = f"--pin schedule={Schedule.ZERO_BUBBLE}"
        alone = f"all have the pinned degrees, and none the schedule that formulas do not know ({unknown})"
    yield Reason(
        subject="layouts",
        value=f"{study.search.examined:,}",
        why=f"ranked by formulas{traced}; {alone}",
    )
    if study.tokens < USUAL_TOKENS and study.model.shape.parameters >= LARGE:
        yield Reason(
            subject="global_batch",
            value=str(study.model.global_batch),
            why=f"{plural(study.tokens, 'token')} a step: such models are mostly trained with millions; "
            "say what you want with --seq and --global-batch",
        )


def note_other_trainers(proposal: LayoutProposal, plan: Plan, chosen: RankedLayout) -> Iterator[Reason]:
    """Yield what published recipes take, and the command for a layout of another trainer that is faster."""
    model = proposal.study.model
    ours_s = chosen.time.total_s
    for recipe in recipes():
        shape, (least, most) = model.shape, recipe.sequence
        is_same = (recipe.layers, recipe.width, recipe.experts) == (shape.layers, shape.width, shape.experts)
        if not is_same or not least <= model.sequence <= most:
            continue
        pinned = model._replace(trainer=recipe.trainer, pins=recipe.degrees)
        found = study_layouts(pinned).search.found
        if not found and "ep" in recipe.degrees:
            found = study_layouts(pinned._replace(pins=_halve_experts(recipe.degrees))).search.found
        why = "it does not fit on these GPUs, or its degrees do not divide them"
        if found:
            why = f"{_name_degrees(found[0])}: {compare_formulas(found[0].time.total_s, ours_s)}"
        yield Reason(subject="recipe", value=recipe.name, why=f"{recipe.model}, {why}")
    fastest = next(iter(study_layouts(model._replace(trainer="torchtitan")).search.found), None)
    if fastest is None:
        return
    layout = fastest.layout
    if 1 - fastest.time.total_s / ours_s <= WORTH_A_NOTE:
        return
    pins = {axis: getattr(layout, axis) for axis in AXES if axis != "ep" or model.shape.experts}
    pins |= {"virtual_stages": layout.virtual_stages} if layout.pp > 1 else {}
    command = (
        f"trimtab layouts {plan.job} --on {_name_cluster(model.cluster)} --seq {model.sequence} "
        f"--global-batch {model.global_batch} --pin {','.join(f'{axis}={n}' for axis, n in pins.items())}"
    )
    yield Reason(
        subject="faster",
        value="torchtitan",
        why=f"{_name_degrees(fastest)}: {compare_formulas(fastest.time.total_s, ours_s)}; its steps are "
        f"compiled{', and its stages keep gathered weights' * (layout.pp > 1)}: {command}",
    )


def _halve_experts(degrees: Mapping[str, int]) -> dict[str, int]:
    """Return degrees with half as many ranks for the experts, for fewer ranks than a recipe has."""
    return {**degrees, "ep": max(1, degrees["ep"] // 2)}


def _name_degrees(ranked: RankedLayout) -> str:
    """Return the degrees of a layout in words."""
    layout = ranked.layout
    degrees = [f"{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    words = ", ".join(degrees) or "data parallelism alone"
    return (
        words.replace(f"pp {layout.pp}", f"pp {layout.pp} x {layout.virtual_stages}")
        if layout.virtual_stages > 1
        else words
    )


def compare_formulas(other_s: float, ours_s: float) -> str:
    """Return two step times by formulas in words."""
    return f"{format_figure(other_s)} s a step by formulas, this plan {format_figure(ours_s)} s"


def _name_cluster(cluster: Cluster) -> str:
    """Return the devices as --on takes them."""
    name, nodes, count = cluster.devices[0].kind, len(cluster.nodes), len(cluster.nodes[0].devices)
    return quote(f"{nodes}x{count}x{name}" if nodes > 1 else f"{count}x{name}")
