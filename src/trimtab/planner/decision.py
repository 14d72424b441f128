"""Choose the plan of a job on a cluster: search, compare GPU counts, estimate what-ifs, and explain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from trimtab.errors import NothingFits, TrimtabError, WrongUse
from trimtab.planner import batch_loss_rules
from trimtab.planner.explanations import (
    add_run_totals,
    compute_cost,
    list_candidates,
    list_looks,
    list_reasons,
    list_rejections,
    write_recommendation,
)
from trimtab.planner.mixed_devices import search_mixed
from trimtab.planner.pins import IN_BACKWARD, read_ways
from trimtab.planner.search import (
    MARGIN,
    RECOMPUTES,
    Evaluation,
    SearchResult,
    compute_run_s,
    end_splits,
    ignore_notice,
    is_late,
    search_space,
)
from trimtab.planner.search_cache import ChangedEstimate
from trimtab.planner.space import (
    FailedPrecision,
    Space,
    build_space,
    make_sentence,
    pick_precision,
)
from trimtab.planner.suggestions import make_nothing_fits
from trimtab.planner.ways import compare_ways, join_pins, list_changed, list_variants
from trimtab.spec import Comparison, Objective, Plan, Reason, WhatIf
from trimtab.units import format_duration, format_value, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.planner.estimator_interface import Estimator
    from trimtab.planner.search import Notice
    from trimtab.planner.ways import WayToFit
    from trimtab.spec import Cluster, Policy, Rejection, Setting, Workload


@dataclass(frozen=True)
class PlanQuestion:
    """The job, cluster and policy to make a plan for."""

    job: str
    """Name of the job as the user gave it."""
    workload: Workload
    cluster: Cluster
    policy: Policy
    compare: tuple[int, ...] = ()
    """GPU counts to compare; the plan then uses one of them."""


def choose_plan(
    question: PlanQuestion,
    estimator: Estimator,
    fingerprints: dict[str, str] | None = None,
    *,
    notice: Notice = ignore_notice,
) -> Plan:
    """Return the plan; if nothing fits, raise an error that names the nearest changes that would fit.

    `notice` is called with every setting that is better than all before it. After Ctrl-C the plan is the
    best so far, and not `complete`.
    """
    check_question(question)
    counts = tuple(dict.fromkeys(question.compare))
    # The search runs first, so that its evaluations do not depend on the comparison and the what-ifs.
    used, outcome = _search_ways(question, estimator, counts, notice)
    space, mixed, _, result = outcome
    rows: tuple[Comparison, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    complete = result.complete
    best = result.best
    try:
        if complete:
            rows = _compare_counts(space, estimator, mixed, question, counts)
        if best is None:
            raise _make_no_plan_error(question, space, result, estimator)
        if complete:
            what_if = (
                *_list_what_ifs(_pin_ways(question, used), estimator, best, rows),
                *_list_ways(question, estimator, best),
            )
    except KeyboardInterrupt:
        if best is None:
            raise
        complete = False
    if is_late(question.workload, question.policy, best.estimate.step_s, margin=0.0):
        raise _make_too_late_error(question, best)
    return _compose_plan(
        question,
        used,
        outcome,
        best,
        rows=rows,
        what_if=what_if,
        fingerprints=fingerprints,
        complete=complete,
    )


def choose_among(
    space: Space, question: PlanQuestion, estimator: Estimator, *, notice: Notice = ignore_notice
) -> Plan | TrimtabError | None:
    """Return the plan with the best setting of a space; None if none fits, an error if none was estimated.

    Only these settings are estimated: there are no what-ifs, and nothing is compared.
    """
    check_question(question)
    result = _search_fitting(space, estimator, [], notice)
    best = result.best
    if best is None and _has_only_failures(result):
        return next(iter(result.failed.values()))[1]
    if best is None or is_late(question.workload, question.policy, best.estimate.step_s, margin=0.0):
        return None
    return _compose_plan(question, (), _SearchOutcome(space, [], [], result), best, complete=result.complete)


def _compose_plan(  # noqa: PLR0913 - parts of a plan
    question: PlanQuestion,
    used: tuple[WayToFit, ...],
    outcome: _SearchOutcome,
    best: Evaluation,
    *,
    rows: tuple[Comparison, ...] = (),
    what_if: tuple[WhatIf, ...] = (),
    fingerprints: dict[str, str] | None = None,
    complete: bool = True,
) -> Plan:
    """Return the plan of a setting, with reasons and what was rejected."""
    space, _, refused, result = outcome
    estimate = add_run_totals(best.estimate, best.setting, question.workload)
    return Plan(
        job=question.job,
        choice=_fix_stages(best),
        estimate=estimate,
        policy=question.policy,
        reasons=(
            *list_reasons(best, result, space, question.cluster),
            *_explain_ways(used, question.policy),
            *batch_loss_rules.explain_batch_loss(question.workload, best.setting),
        ),
        runners_up=list_candidates(result, question.workload),
        looked_at=list_looks(result),
        rejected=list_rejections(result, space, refused),
        comparison=rows,
        what_if=what_if,
        places=best.layout.places,
        workload=question.workload,
        cost=compute_cost(estimate, question.policy),
        left_out=_list_left_out(question.cluster),
        recommendation=write_recommendation(best, space, question.cluster, rows, result.fastest),
        fingerprints=fingerprints or {},
        complete=complete,
    )


def _fix_stages(best: Evaluation) -> Setting:
    """Return the setting with the blocks of each pipeline stage: training divides them as predicted."""
    pipeline = best.estimate.pipeline
    return best.setting if pipeline is None else best.setting.replace(stage_layers=pipeline.layers)


def _search_ways(
    question: PlanQuestion, estimator: Estimator, counts: tuple[int, ...], notice: Notice
) -> tuple[tuple[WayToFit, ...], _SearchOutcome]:
    """Search; then also with the ways to fit that the policy allows, and return the best with its ways.

    Ways that need no permission are only searched if nothing fits without them, or only tightly.
    """
    first = _search_precisions(question, estimator, counts, notice)
    found: tuple[tuple[WayToFit, ...], _SearchOutcome] = (), first
    if not first.result.complete or _has_only_failures(first.result):
        return found
    for ways in list_variants(question.policy, allowed=True):
        best = found[1].result.best
        if best is not None and not best.is_tight and not any(way.allow for way in ways):
            continue
        try:
            outcome = _search_precisions(_pin_ways(question, ways), estimator, counts, notice)
        except TrimtabError:
            # The job cannot use this way, as a model without frozen layers cannot store them in 4 bits.
            continue
        other = outcome.result.best
        if other is None:
            continue
        has_room = best is not None and best.is_tight and not other.is_tight
        if best is None or has_room or _is_clearly_better(other, best, question.policy):
            found = ways, outcome
    return found


def _pin_ways(question: PlanQuestion, ways: tuple[WayToFit, ...]) -> PlanQuestion:
    """Return the question about settings that use the ways."""
    return replace(question, policy=question.policy.replace(pins=question.policy.pins | join_pins(ways)))


WORTH_A_CHANGE = 0.02
"""A plan changes results only if it is this much better."""


def _is_clearly_better(other: Evaluation, best: Evaluation, policy: Policy) -> bool:
    """Whether a setting is better by the objective, by more than the uncertainty of a comparison."""
    times = [seen.estimate.step_s for seen in (other, best)]
    if times[0] is None or times[1] is None:
        return False
    # Other objectives count the GPUs too.
    gpus = [1 if policy.objective is Objective.SPEED else seen.setting.gpus for seen in (other, best)]
    return times[0] * gpus[0] < times[1] * gpus[1] * (1 - WORTH_A_CHANGE)


def _explain_ways(used: tuple[WayToFit, ...], policy: Policy) -> list[Reason]:
    """Return a reason for each way that the plan uses."""
    reasons = []
    for way in used:
        allowed = f"allowed by --allow {way.allow}" if way.allow else "the same numbers in less memory"
        reasons += [
            Reason(subject=key, value=value, why=f"{way.name}: {allowed}") for key, value in way.pins.items()
        ]
    ways = read_ways(policy.pins)
    reasons += [
        Reason(subject=key, value=_format_way(value), why="pinned")
        for key, value in ways.items()
        if key in REASONED
    ]
    return reasons


def _format_way(value: object) -> str:
    """Return the value of a field as users type it; several words are separated by commas."""
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


NOT_TRACED = "not traced, because that takes long: plan with this pin to see what it buys"
REASONED = ("base", "loss", "offload", "optimizer_rule", IN_BACKWARD)
"""Fields of a setting that get a reason only if they are not as usual."""


def _list_ways(question: PlanQuestion, estimator: Estimator, best: Evaluation) -> Iterator[WhatIf]:
    """Yield what each way to fit that the plan does not use would buy, at the same micro-batch."""
    rows: list[ChangedEstimate] = estimator.searches.list_ways(
        best.setting, lambda: _estimate_ways(question.policy, estimator, best)
    )
    for change, setting, estimate in ((row.change, row.setting, row.estimate) for row in rows):
        if estimate is None:
            yield WhatIf(change=change, gpus=setting.gpus, why=NOT_TRACED)
            continue
        totals = add_run_totals(estimate, setting, question.workload)
        yield WhatIf(
            change=change,
            gpus=setting.gpus,
            setting=setting,
            estimate=totals,
            cost=compute_cost(totals, question.policy),
            why=compare_ways(best.estimate, estimate),
        )


def _estimate_ways(policy: Policy, estimator: Estimator, best: Evaluation) -> Iterator[ChangedEstimate]:
    """Yield the plan's setting with each way to fit that saves memory."""
    trace = estimator.get_trace(best.setting, best.layout)
    for way, setting in list_changed(best.setting, best.estimate, best.allowed_bytes, policy, trace):
        change = f"{way.name} ({way.typed})"
        if way.is_slow_to_trace and not estimator.has_traces(setting, best.layout):
            yield ChangedEstimate(change, setting, None)
            continue
        try:
            estimate = estimator.estimate(setting, best.layout)
        except TrimtabError:
            continue
        if estimate.process_bytes < best.estimate.process_bytes:
            yield ChangedEstimate(change, setting, estimate)


class _SearchOutcome(NamedTuple):
    """A space and the result of a search in it."""

    space: Space
    mixed: list[Evaluation]
    refused: list[Rejection]
    result: SearchResult


def _search_precisions(
    question: PlanQuestion, estimator: Estimator, counts: tuple[int, ...], notice: Notice
) -> _SearchOutcome:
    """Search with the best precision; if every setting fails with it, search with the next one that works."""
    failed: tuple[FailedPrecision, ...] = ()
    first: _SearchOutcome | None = None
    while True:
        space = build_space(question.workload, question.cluster, question.policy, failed)
        if first is not None and (not space.families or _try_plainest(space, estimator) is not None):
            return first
        mixed, refused = search_mixed(space, estimator)
        among = [evaluation for evaluation in mixed if not counts or evaluation.setting.gpus in counts]
        outcome = _SearchOutcome(
            space, mixed, refused, _search_fitting(_restrict_counts(space, counts), estimator, among, notice)
        )
        if outcome.result.best is not None or not _has_only_failures(outcome.result):
            return outcome._replace(
                space=replace(space, failed_precisions=_drop_shared_causes(failed, outcome.result))
            )
        first = first or outcome
        now = space.precision(question.cluster.devices)
        causes = outcome.result.failed.values()
        failed = (*failed, *(FailedPrecision(now, error.found, many) for many, error in causes))
        if pick_precision(question.cluster.devices, question.policy, failed) in [
            failed_precision.precision for failed_precision in failed
        ]:
            return first


def _drop_shared_causes(
    failed: tuple[FailedPrecision, ...], result: SearchResult
) -> tuple[FailedPrecision, ...]:
    """Drop failures that also occur in the chosen precision: precision is not their cause."""
    return (
        tuple(failed_precision for failed_precision in failed if failed_precision.why not in result.failed)
        or failed
    )


def _has_only_failures(result: SearchResult) -> bool:
    """Whether no setting could be estimated."""
    return bool(result.failed) and not result.evaluations and not result.too_large


def _try_plainest(space: Space, estimator: Estimator) -> TrimtabError | None:
    """Return why the plainest setting cannot be estimated; None if it can be, or if there is no setting."""
    plainest = min(
        space.families,
        key=lambda family: (family.layout.gpus, RECOMPUTES.index(family.recompute), family.compile),
        default=None,
    )
    if plainest is None:
        return None
    try:
        estimator.estimate(plainest.setting(end_splits(plainest.splits)[-1]), plainest.layout)
    except TrimtabError as error:
        return error
    return None


def check_question(question: PlanQuestion) -> None:
    """Raise if the comparison or the deadline makes no sense for the job and cluster."""
    available = len(question.cluster.devices)
    for count in question.compare:
        if not 1 <= count <= available:
            raise WrongUse(
                f"--compare {','.join(map(str, question.compare))}",
                found=f"there are {available} GPUs, and {count} cannot be compared",
                cure=f"Give numbers from 1 to {available}, or name more GPUs with --on.",
            )
    if question.policy.deadline_s is not None and question.workload.samples is None:
        raise WrongUse(
            f"--deadline {format_duration(question.policy.deadline_s)}",
            found="the job does not say how many samples it has",
            cure="Give the job `samples`, or use --samples N.",
        )


def _restrict_counts(space: Space, counts: tuple[int, ...]) -> Space:
    if not counts:
        return space
    parts = [space.only(count) for count in counts]
    return replace(
        space,
        families=tuple(family for part in parts for family in part.families),
        mixed=tuple(layout for part in parts for layout in part.mixed),
    )


def _search_fitting(
    space: Space, estimator: Estimator, mixed: list[Evaluation], notice: Notice = ignore_notice
) -> SearchResult:
    """Return the best that fits; if nothing fits, the best that fits by releasing cached blocks."""
    result = _search_in_time(space, estimator, mixed, notice)
    if result.best is not None or result.too_late or not result.evaluations:
        return result
    tight = _search_in_time(replace(space, tight=True), estimator, mixed, notice)
    if tight.best is None:
        return tight if tight.evaluations else result
    best = tight.best
    explained = estimator.judge_within(best.setting, best.layout, best.allowed_bytes, explain=True)
    tight.best = replace(best, estimate=explained)
    return tight


def _search_in_time(
    space: Space, estimator: Estimator, mixed: list[Evaluation], notice: Notice
) -> SearchResult:
    """Return the best by the objective; with a deadline, keep the margin if a setting can."""
    if space.policy.deadline_s is None or space.policy.objective is Objective.SPEED:
        return _search_cached(space, estimator, mixed, notice)
    result = SearchResult()
    for margin in (MARGIN, 0.0):
        result = _search_cached(space, estimator, mixed, notice, margin)
        if result.best is not None:
            return result
    # Nothing meets the deadline: the fastest setting shows by how much.
    return _search_cached(_optimize_speed(space), estimator, mixed, notice) if result.too_late else result


def _search_cached(
    space: Space,
    estimator: Estimator,
    mixed: list[Evaluation],
    notice: Notice,
    margin: float | None = None,
) -> SearchResult:
    """Return the result of a search, cached unless settings of different devices compete."""

    def search() -> SearchResult:
        return search_space(space, estimator, known=mixed, margin=margin, notice=notice)

    if mixed:
        return search()
    result: SearchResult = estimator.searches.search(space, search, margin=margin)
    return result


def _optimize_speed(space: Space) -> Space:
    return replace(space, policy=space.policy.replace(objective=Objective.SPEED))


def _compare_counts(
    space: Space,
    estimator: Estimator,
    mixed: list[Evaluation],
    question: PlanQuestion,
    counts: tuple[int, ...],
) -> tuple[Comparison, ...]:
    """Return a row with the fastest setting that fits for every GPU count."""
    fast = _optimize_speed(space)
    best = {
        count: _require_complete(
            _search_fitting(
                fast.only(count), estimator, [seen for seen in mixed if seen.setting.gpus == count]
            )
        )
        for count in counts
    }
    base = next((result.best for result in best.values() if result.best is not None), None)
    return tuple(_make_row(count, best[count], base, question) for count in counts)


def _require_complete(result: SearchResult) -> SearchResult:
    """Return the result of a search; raise KeyboardInterrupt if the search was interrupted."""
    if not result.complete:
        raise KeyboardInterrupt
    return result


def _make_row(
    count: int, result: SearchResult, base: Evaluation | None, question: PlanQuestion
) -> Comparison:
    total = len(question.cluster.devices)
    free = 1 - count / total
    seen = result.best
    if seen is None:
        return Comparison(gpus=count, free_share=free, why=_explain_none(count, result, question.cluster))
    estimate = add_run_totals(seen.estimate, seen.setting, question.workload)
    efficiency = None
    if base is not None and base.estimate.step_s and seen.estimate.step_s:
        efficiency = base.estimate.step_s * base.setting.gpus / (seen.estimate.step_s * count)
    horizon = compute_run_s(question.workload, estimate.step_s)
    late = is_late(question.workload, question.policy, estimate.step_s, margin=0.0)
    return Comparison(
        gpus=count,
        setting=seen.setting,
        estimate=estimate,
        cost=compute_cost(estimate, question.policy),
        epoch_s=None if horizon is None else horizon / question.workload.epochs,
        free_share=free,
        scaling_efficiency=efficiency,
        meets_deadline=None if question.policy.deadline_s is None or horizon is None else not late,
    )


def _explain_none(count: int, result: SearchResult, cluster: Cluster) -> str:
    from trimtab.units import format_bytes

    if count > sum(device.slice is None for device in cluster.devices) and any(
        device.slice for device in cluster.devices
    ):
        return "MIG slices do not join"
    missing = [evaluation.missing_bytes for evaluation in result.evaluations if evaluation.missing_bytes]
    if missing:
        return f"nothing fits: {format_bytes(min(missing))} are missing"
    if result.too_large:
        return "nothing fits"
    return f"{count} GPUs are no whole nodes here, or more than the batch has samples"


def _list_what_ifs(
    question: PlanQuestion, estimator: Estimator, best: Evaluation, rows: tuple[Comparison, ...]
) -> tuple[WhatIf, ...]:
    """Return estimates for twice the samples, twice the epochs and half the batch."""
    workload = question.workload
    what_ifs = []
    if workload.samples is not None and best.estimate.step_s is not None:
        doubled = workload.replace(samples=workload.samples * 2)
        what_ifs.append(_estimate_longer_run(f"{doubled.samples:,} samples", doubled, question, best, rows))
        longer = workload.replace(epochs=workload.epochs * 2)
        what_ifs.append(_estimate_longer_run(f"{longer.epochs} epochs", longer, question, best, rows))
    if workload.global_batch > 1 and best.estimate.step_s is not None:
        what_ifs += _estimate_half_batch(question, estimator, best)
    return tuple(what_ifs)


def _estimate_longer_run(
    change: str, workload: Workload, question: PlanQuestion, best: Evaluation, rows: tuple[Comparison, ...]
) -> WhatIf:
    """Return the estimate of a longer run, on the fewest compared GPUs that meet the deadline."""
    setting, estimate = best.setting, add_run_totals(best.estimate, best.setting, workload)
    policy = question.policy
    if policy.deadline_s is not None and policy.objective is Objective.GPUS:
        ahead = [row for row in rows if row.setting is not None and row.estimate is not None]
        for row in sorted(ahead, key=lambda row: row.gpus):
            assert row.setting is not None  # noqa: S101 - chosen so
            assert row.estimate is not None  # noqa: S101
            if not is_late(workload, policy, row.estimate.step_s):
                setting, estimate = row.setting, add_run_totals(row.estimate, row.setting, workload)
                break
    late = is_late(workload, policy, estimate.step_s, margin=0.0)
    return WhatIf(
        change=change,
        gpus=setting.gpus,
        setting=setting,
        estimate=estimate,
        cost=compute_cost(estimate, policy),
        meets_deadline=None if policy.deadline_s is None else not late,
        why="the same steps, more of them",
    )


BATCH_PINS = ("micro_batch", "accumulation", "data_parallel")
"""Pins that may be impossible with half a batch, in the order in which they are dropped."""


def _estimate_half_batch(question: PlanQuestion, estimator: Estimator, best: Evaluation) -> list[WhatIf]:
    """Return the what-if of half the batch on as many GPUs, from a new search over micro-batches.

    Keep every pin that is still possible; the row names the others and why.
    """
    half = question.workload.replace(global_batch=question.workload.global_batch // 2)
    setting = best.setting
    same_pins = {
        "precision": setting.precision.value,
        "recompute": setting.recompute.value,
        "compile": setting.compile,
        "strategy": setting.strategy.value,
        "gpus": setting.gpus,
    }
    change = f"global batch {half.global_batch}"
    policy = question.policy.replace(objective=Objective.SPEED, deadline_s=None)
    given_up: list[str] = []
    why = ""
    for dropped in _list_droppable_pins(question.policy.pins):
        pins = {key: value for key, value in question.policy.pins.items() if key not in dropped}
        try:
            legal = build_space(half, question.cluster, policy.replace(pins={**pins, **same_pins}))
        except WrongUse as error:
            why = why or error.found
            continue
        given_up = [f"{key}={format_value(question.policy.pins[key])}" for key in dropped]
        break
    else:
        return [WhatIf(change=change, gpus=setting.gpus, why=why)]
    mixed, _ = search_mixed(legal, estimator)
    seen = _require_complete(_search_fitting(legal, estimator, mixed)).best
    lost = f"without the pin {' and '.join(given_up)}, which cannot hold: {why}" if given_up else ""
    if seen is None:
        return [WhatIf(change=change, gpus=setting.gpus, why=f"nothing fits{', ' * bool(lost)}{lost}")]
    estimate = add_run_totals(seen.estimate, seen.setting, half)
    late = is_late(half, question.policy, estimate.step_s, margin=0.0)
    return [
        WhatIf(
            change=change,
            gpus=seen.setting.gpus,
            setting=seen.setting,
            estimate=estimate,
            cost=compute_cost(estimate, question.policy),
            meets_deadline=None if question.policy.deadline_s is None else not late,
            why=lost or "twice the optimizer steps, each on half the samples: another training run",
            unpinned=tuple(given_up),
        )
    ]


def _list_droppable_pins(pins: dict[str, str | int | bool]) -> Iterator[tuple[str, ...]]:
    """Yield the pins to drop: none, then one, then more of those that split the batch."""
    batch_pins = [batch_pin for batch_pin in BATCH_PINS if batch_pin in pins]
    for count in range(len(batch_pins) + 1):
        yield from combinations(batch_pins, count)


def _list_left_out(cluster: Cluster) -> tuple[str, ...]:
    """Return what the search does not try."""
    if len(cluster.nodes) > 1:
        return ("parts of several nodes: over nodes, whole ones only",)
    return ()


def _make_no_plan_error(
    question: PlanQuestion, space: Space, result: SearchResult, estimator: Estimator
) -> Exception:
    """Return the error that says why there is no plan."""
    if _has_only_failures(result):
        # Every strategy failed. A failure of the plainest setting is most likely the job's own.
        return _try_plainest(space, estimator) or next(iter(result.failed.values()))[1]
    return make_nothing_fits(
        question.job, question.workload, question.cluster, space=space, result=result, estimator=estimator
    )


def _make_too_late_error(question: PlanQuestion, best: Evaluation) -> NothingFits:
    """Return the error for a missed deadline: the time of the fastest plan, and what would be in time."""
    policy, workload = question.policy, question.workload
    needed = compute_run_s(workload, best.estimate.step_s) or 0.0
    deadline = policy.deadline_s or 0.0
    share = deadline * (1 - MARGIN) / needed
    took, gpus = format_duration(needed), best.setting.gpus
    cures = [f"allow {format_duration(needed / (1 - MARGIN))}"]
    epochs = int(workload.epochs * share)
    if epochs:
        cures.append(f"train {plural(epochs, 'epoch')} instead of {workload.epochs}")
    samples = int((workload.samples or 0) * share)
    if samples >= workload.global_batch:
        cures.append(f"use {samples:,} samples an epoch")
    more = -(-gpus * needed // (deadline * (1 - MARGIN)))
    cures.append(f"use {int(more)} or more such GPUs, if they scale")
    return NothingFits(
        f"--deadline {format_duration(deadline)}",
        found=f"the fastest plan takes {took}, on {plural(gpus, 'GPU')} ({best.setting.strategy})",
        cure=make_sentence("; ".join(cures)),
    )
