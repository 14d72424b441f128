"""From a job and a cluster to a Plan: the search, the comparison of GPU counts, and what to say about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from trimtab.errors import NothingFits, TrimtabError, WrongUse
from trimtab.planner import batch_loss_rules
from trimtab.planner.explanations import (
    candidates,
    cost,
    finished,
    looks,
    reasons,
    recommendation,
    rejections,
    sentence,
)
from trimtab.planner.mixed_devices import mixed
from trimtab.planner.search import MARGIN, RECOMPUTES, Evaluated, Result, ends, is_late, run_s, search
from trimtab.planner.space import FailedPrecision, Space, pick_precision, space, word
from trimtab.planner.suggestions import nothing_fits
from trimtab.spec import Comparison, Objective, Plan, WhatIf
from trimtab.units import format_duration, plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.planner.protocol import Estimator
    from trimtab.planner.search import Notice
    from trimtab.spec import Cluster, Policy, Rejection, Workload


@dataclass(frozen=True)
class PlanQuestion:
    """What is to be planned."""

    job: str
    """As it was named."""
    workload: Workload
    cluster: Cluster
    policy: Policy
    compare: tuple[int, ...] = ()
    """Numbers of devices to set side by side; the choice is then one of them."""


def decide(
    question: PlanQuestion,
    outlook: Estimator,
    fingerprints: dict[str, str] | None = None,
    *,
    notice: Notice = lambda _: None,
) -> Plan:
    """The plan, or the error that says what would be one.

    `notice` is given every setting that is better than all before it. After Ctrl-C the plan is the best so
    far, and not `complete`.
    """
    check(question)
    counts = tuple(dict.fromkeys(question.compare))
    # First, so that what it looks at does not depend on what else is asked.
    whole, unlike, refused, result = _searched(question, outlook, counts, notice)
    rows: tuple[Comparison, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    complete = result.complete
    best = result.best
    try:
        if complete:
            rows = _compared(whole, outlook, unlike, question, counts)
        if best is None:
            raise _none(question, whole, result, outlook)
        if complete:
            what_if = _what_ifs(question, outlook, best, rows)
    except KeyboardInterrupt:
        if best is None:
            raise
        complete = False
    if is_late(question.workload, question.policy, best.estimate.step_s, margin=0.0):
        raise _too_late(question, best)
    estimate = finished(best.estimate, best.setting, question.workload)
    return Plan(
        job=question.job,
        choice=best.setting,
        estimate=estimate,
        policy=question.policy,
        reasons=(
            *reasons(best, result, whole, question.cluster),
            *batch_loss_rules.notes(question.workload, best.setting),
        ),
        runners_up=candidates(result, question.workload),
        looked_at=looks(result),
        rejected=rejections(result, whole, refused),
        comparison=rows,
        what_if=what_if,
        places=best.layout.places,
        workload=question.workload,
        cost=cost(estimate, question.policy),
        left_out=_left_out(question.cluster),
        recommendation=recommendation(best, whole, question.cluster, rows, result.fastest),
        fingerprints=fingerprints or {},
        complete=complete,
    )


class _Searched(NamedTuple):
    """A space, and what a search found in it."""

    whole: Space
    unlike: list[Evaluated]
    refused: list[Rejection]
    result: Result


def _searched(
    question: PlanQuestion, outlook: Estimator, counts: tuple[int, ...], notice: Notice
) -> _Searched:
    """Search with the best precision; where every setting fails with it, with the next one that works."""
    failed: tuple[FailedPrecision, ...] = ()
    first: _Searched | None = None
    while True:
        whole = space(question.workload, question.cluster, question.policy, failed)
        if first is not None and (not whole.families or _plainest_failure(whole, outlook) is not None):
            return first
        unlike, refused = mixed(whole, outlook)
        among = [one for one in unlike if not counts or one.setting.gpus in counts]
        found = _Searched(whole, unlike, refused, _found(_among(whole, counts), outlook, among, notice))
        if found.result.best is not None or not _fails(found.result):
            return found._replace(whole=replace(whole, failed_precisions=_own_causes(failed, found.result)))
        first = first or found
        now = whole.precision(question.cluster.devices)
        causes = found.result.failed.values()
        failed = (*failed, *(FailedPrecision(now, error.found, many) for many, error in causes))
        if pick_precision(question.cluster.devices, question.policy, failed) in [
            failed_precision.precision for failed_precision in failed
        ]:
            return first


def _own_causes(failed: tuple[FailedPrecision, ...], result: Result) -> tuple[FailedPrecision, ...]:
    """Leave out what fails in the precision that was taken as well: precision is not its cause."""
    return (
        tuple(failed_precision for failed_precision in failed if failed_precision.why not in result.failed)
        or failed
    )


def _fails(result: Result) -> bool:
    """Whether nothing could be estimated."""
    return bool(result.failed) and not result.seen and not result.too_large


def _plainest_failure(whole: Space, outlook: Estimator) -> TrimtabError | None:
    """Return why the plainest setting cannot be estimated; None if it can be, or if there is no setting."""
    plainest = min(
        whole.families,
        key=lambda family: (family.layout.gpus, RECOMPUTES.index(family.recompute), family.compile),
        default=None,
    )
    if plainest is None:
        return None
    try:
        outlook.estimate(plainest.setting(ends(plainest.cuts)[-1]), plainest.layout)
    except TrimtabError as error:
        return error
    return None


def check(question: PlanQuestion) -> None:
    """Raise for what cannot be meant."""
    available = len(question.cluster.devices)
    for one in question.compare:
        if not 1 <= one <= available:
            raise WrongUse(
                f"--compare {','.join(map(str, question.compare))}",
                found=f"there are {available} GPUs, and {one} cannot be compared",
                cure=f"Give numbers from 1 to {available}, or name more GPUs with --on.",
            )
    if question.policy.deadline_s is not None and question.workload.samples is None:
        raise WrongUse(
            f"--deadline {format_duration(question.policy.deadline_s)}",
            found="the job does not say how many samples it has",
            cure="Give the job `samples`, or use --samples N.",
        )


def _among(whole: Space, counts: tuple[int, ...]) -> Space:
    if not counts:
        return whole
    parts = [whole.only(count) for count in counts]
    return replace(
        whole,
        families=tuple(family for part in parts for family in part.families),
        mixed=tuple(layout for part in parts for layout in part.mixed),
    )


def _found(
    among: Space, outlook: Estimator, unlike: list[Evaluated], notice: Notice = lambda _: None
) -> Result:
    """The best that fits. Only where nothing does: the best that fits by releasing cached blocks."""
    found = _chosen(among, outlook, unlike, notice)
    if found.best is not None or found.too_late or not found.seen:
        return found
    tight = _chosen(replace(among, tight=True), outlook, unlike, notice)
    if tight.best is None:
        return tight if tight.seen else found
    best = tight.best
    explained = outlook.judge_within(best.setting, best.layout, best.allowed_bytes, explain=True)
    tight.best = replace(best, estimate=explained)
    return tight


def _chosen(among: Space, outlook: Estimator, unlike: list[Evaluated], notice: Notice) -> Result:
    """The best by the objective; where a deadline binds, with margin if that can be."""
    if among.policy.deadline_s is None or among.policy.objective is Objective.SPEED:
        return search(among, outlook, known=unlike, notice=notice)
    found = Result()
    for margin in (MARGIN, 0.0):
        found = search(among, outlook, known=unlike, margin=margin, notice=notice)
        if found.best is not None:
            return found
    # Nothing is in time: the fastest says by how much.
    return search(_faster(among), outlook, known=unlike, notice=notice) if found.too_late else found


def _faster(space: Space) -> Space:
    return replace(space, policy=space.policy.replace(objective=Objective.SPEED))


def _compared(
    whole: Space, outlook: Estimator, unlike: list[Evaluated], question: PlanQuestion, counts: tuple[int, ...]
) -> tuple[Comparison, ...]:
    """The fastest that fits for every number of devices."""
    fast = _faster(whole)
    best = {
        count: _finished(
            _found(fast.only(count), outlook, [seen for seen in unlike if seen.setting.gpus == count])
        )
        for count in counts
    }
    base = next((found.best for found in best.values() if found.best is not None), None)
    return tuple(_row(count, best[count], base, question) for count in counts)


def _finished(result: Result) -> Result:
    """Return the result of a search; KeyboardInterrupt where the search was interrupted."""
    if not result.complete:
        raise KeyboardInterrupt
    return result


def _row(count: int, result: Result, base: Evaluated | None, question: PlanQuestion) -> Comparison:
    total = len(question.cluster.devices)
    free = 1 - count / total
    seen = result.best
    if seen is None:
        return Comparison(gpus=count, free_share=free, why=_why_none(count, result, question.cluster))
    estimate = finished(seen.estimate, seen.setting, question.workload)
    efficiency = None
    if base is not None and base.estimate.step_s and seen.estimate.step_s:
        efficiency = base.estimate.step_s * base.setting.gpus / (seen.estimate.step_s * count)
    horizon = run_s(question.workload, estimate.step_s)
    late = is_late(question.workload, question.policy, estimate.step_s, margin=0.0)
    return Comparison(
        gpus=count,
        setting=seen.setting,
        estimate=estimate,
        cost=cost(estimate, question.policy),
        epoch_s=None if horizon is None else horizon / question.workload.epochs,
        free_share=free,
        scaling_efficiency=efficiency,
        meets_deadline=None if question.policy.deadline_s is None or horizon is None else not late,
    )


def _why_none(count: int, result: Result, cluster: Cluster) -> str:
    from trimtab.units import format_bytes

    if count > sum(device.slice is None for device in cluster.devices) and any(
        device.slice for device in cluster.devices
    ):
        return "MIG slices do not join"
    missing = [one.missing_bytes for one in result.seen if one.missing_bytes]
    if missing:
        return f"nothing fits: {format_bytes(min(missing))} are missing"
    if result.too_large:
        return "nothing fits"
    return f"{count} GPUs are no whole nodes here, or more than the batch has samples"


def _what_ifs(
    question: PlanQuestion, outlook: Estimator, best: Evaluated, rows: tuple[Comparison, ...]
) -> tuple[WhatIf, ...]:
    """Twice the samples, twice the epochs, half the batch."""
    workload = question.workload
    found = []
    if workload.samples is not None and best.estimate.step_s is not None:
        doubled = workload.replace(samples=workload.samples * 2)
        found.append(_if(f"{doubled.samples:,} samples", doubled, question, best, rows))
        longer = workload.replace(epochs=workload.epochs * 2)
        found.append(_if(f"{longer.epochs} epochs", longer, question, best, rows))
    if workload.global_batch > 1 and best.estimate.step_s is not None:
        found += _if_half(question, outlook, best)
    return tuple(found)


def _if(
    change: str, workload: Workload, question: PlanQuestion, best: Evaluated, rows: tuple[Comparison, ...]
) -> WhatIf:
    """A longer run of the same steps, on as few of the compared devices as end in time."""
    setting, estimate = best.setting, finished(best.estimate, best.setting, workload)
    policy = question.policy
    if policy.deadline_s is not None and policy.objective is Objective.GPUS:
        ahead = [row for row in rows if row.setting is not None and row.estimate is not None]
        for row in sorted(ahead, key=lambda one: one.gpus):
            assert row.setting is not None  # noqa: S101 - chosen so
            assert row.estimate is not None  # noqa: S101
            if not is_late(workload, policy, row.estimate.step_s):
                setting, estimate = row.setting, finished(row.estimate, row.setting, workload)
                break
    late = is_late(workload, policy, estimate.step_s, margin=0.0)
    return WhatIf(
        change=change,
        gpus=setting.gpus,
        setting=setting,
        estimate=estimate,
        cost=cost(estimate, policy),
        meets_deadline=None if policy.deadline_s is None else not late,
        why="the same steps, more of them",
    )


BATCH_PINS = ("micro_batch", "accumulation", "data_parallel")
"""Pins that half a batch may leave no room for, in the order in which they are given up."""


def _if_half(question: PlanQuestion, outlook: Estimator, best: Evaluated) -> list[WhatIf]:
    """Half the batch the same way on as many devices: searched again, since other micro-batches make it.

    Every pin is kept that can be; the row says which cannot, and why.
    """
    half = question.workload.replace(global_batch=question.workload.global_batch // 2)
    one = best.setting
    alike = {
        "precision": one.precision.value,
        "recompute": one.recompute.value,
        "compile": one.compile,
        "strategy": one.strategy.value,
        "gpus": one.gpus,
    }
    change = f"global batch {half.global_batch}"
    policy = question.policy.replace(objective=Objective.SPEED, deadline_s=None)
    given_up: list[str] = []
    why = ""
    for dropped in _fewer(question.policy.pins):
        pins = {key: value for key, value in question.policy.pins.items() if key not in dropped}
        try:
            legal = space(half, question.cluster, policy.replace(pins={**pins, **alike}))
        except WrongUse as error:
            why = why or error.found
            continue
        given_up = [f"{key}={word(question.policy.pins[key])}" for key in dropped]
        break
    else:
        return [WhatIf(change=change, gpus=one.gpus, why=why)]
    unlike, _ = mixed(legal, outlook)
    seen = _finished(_found(legal, outlook, unlike)).best
    lost = f"without the pin {' and '.join(given_up)}, which cannot hold: {why}" if given_up else ""
    if seen is None:
        return [WhatIf(change=change, gpus=one.gpus, why=f"nothing fits{', ' * bool(lost)}{lost}")]
    estimate = finished(seen.estimate, seen.setting, half)
    late = is_late(half, question.policy, estimate.step_s, margin=0.0)
    return [
        WhatIf(
            change=change,
            gpus=seen.setting.gpus,
            setting=seen.setting,
            estimate=estimate,
            cost=cost(estimate, question.policy),
            meets_deadline=None if question.policy.deadline_s is None else not late,
            why=lost or "twice the optimizer steps, each on half the samples: another training run",
            unpinned=tuple(given_up),
        )
    ]


def _fewer(pins: dict[str, str | int | bool]) -> Iterator[tuple[str, ...]]:
    """Which pins to give up: none, then one, then more of those that cut the batch."""
    held = [batch_pin for batch_pin in BATCH_PINS if batch_pin in pins]
    for count in range(len(held) + 1):
        yield from combinations(held, count)


def _left_out(cluster: Cluster) -> tuple[str, ...]:
    """What the space does not hold."""
    if len(cluster.nodes) > 1:
        return ("parts of several nodes: over nodes, whole ones only",)
    return ()


def _none(question: PlanQuestion, whole: Space, result: Result, outlook: Estimator) -> Exception:
    """Why there is no plan."""
    if _fails(result):
        # Every strategy failed. The plainest one has no causes of its own beside the job's.
        return _plainest_failure(whole, outlook) or next(iter(result.failed.values()))[1]
    return nothing_fits(question.workload, question.cluster, whole, result, outlook)


def _too_late(question: PlanQuestion, best: Evaluated) -> NothingFits:
    """Nothing ends before the deadline: how long the fastest takes, and what would be in time."""
    policy, workload = question.policy, question.workload
    needed = run_s(workload, best.estimate.step_s) or 0.0
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
        cure=sentence("; ".join(cures)),
    )
