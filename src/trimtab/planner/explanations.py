"""Write the reasons, rejections and recommendation of a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trimtab.planner.batch_split import divide_evenly, is_exact, list_micro_batches
from trimtab.planner.estimator_interface import available_bytes
from trimtab.planner.search import RECOMPUTES, TIE, compute_run_s
from trimtab.planner.space import TRACED_RECOMPUTES, USUAL_WORKERS, make_sentence
from trimtab.spec import Allocator, Candidate, EstimatedSetting, Objective, Reason, Recompute, Rejection
from trimtab.strategies import strategy_of
from trimtab.units import format_bytes, format_duration, format_figure, format_flops, format_seconds, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trimtab.planner.search import Evaluation, SearchResult
    from trimtab.planner.space import Family, Space
    from trimtab.spec import Cluster, Comparison, Estimate, Policy, Setting, Workload

SMALL_DIFFERENCE = 0.1
"""Smaller differences are printed with one decimal."""
NOISE = 0.005
"""Times that differ by less are called equal."""


def add_run_totals(estimate: Estimate, setting: Setting, workload: Workload) -> Estimate:
    """Return the estimate with samples per second, hours and GPU-hours of the whole run."""
    if estimate.step_s is None:
        return estimate
    seconds = compute_run_s(workload, estimate.step_s)
    hours = None if seconds is None else seconds / 3600
    return estimate.replace(
        samples_per_s=setting.global_batch / estimate.step_s if estimate.step_s else None,
        hours=hours,
        gpu_hours=None if hours is None else hours * setting.gpus,
    )


def compute_cost(estimate: Estimate | None, policy: Policy) -> float | None:
    """Return the cost of the whole run in the currency of the price; None if it is unknown."""
    if estimate is None or estimate.gpu_hours is None or policy.price_per_gpu_hour is None:
        return None
    return estimate.gpu_hours * policy.price_per_gpu_hour


def list_reasons(
    best: Evaluation, result: SearchResult, space: Space, cluster: Cluster
) -> tuple[Reason, ...]:
    """Return every choice of the plan with its reason."""
    setting = best.setting
    texts = [
        ("gpus", f"{setting.gpus} of {len(cluster.devices)}", _explain_gpus(best, result, space, cluster)),
        ("strategy", setting.strategy.value, _explain_strategy(best, result, space)),
        ("micro_batch", str(setting.micro_batch), _explain_micro_batch(best, result, space)),
        ("accumulation", str(setting.accumulation), _explain_accumulation(setting)),
        ("precision", setting.precision.value, _explain_precision(best, space)),
        ("recompute", setting.recompute.value, _explain_recompute(best, result, space)),
        (
            "compile",
            "yes" if setting.compile else "no",
            _explain_compile(best, result, space) + VERIFIED * best.estimate.verified,
        ),
        (
            "optimizer",
            setting.optimizer.value,
            _explain_pin(space, "optimizer") or "one kernel updates all weights",
        ),
        ("allocator", setting.allocator.value, _explain_allocator(best, space)),
        ("workers", str(setting.workers), _explain_workers(best, space)),
    ]
    return tuple(Reason(subject=subject, value=value, why=why) for subject, value, why in texts)


def _explain_pin(space: Space, key: str) -> str:
    return "pinned" if key in space.policy.pins else ""


def _compare_others(best: Evaluation, result: SearchResult, get: Callable[[Setting], Any]) -> list[str]:
    """Return a text for each other value of a choice, with its best result."""
    others: dict[Any, list[Evaluation]] = {}
    for evaluation in result.evaluations:
        if get(evaluation.setting) != get(best.setting):
            others.setdefault(get(evaluation.setting), []).append(evaluation)
    unseen: dict[Any, float] = {}
    for family, (_, least) in result.beaten.items():
        name = get(family.setting(family.splits[-1]))
        # If a bound is clearly below the estimates, the best of this value is not known.
        times = [item.estimate.step_s or 0.0 for item in others.get(name, ()) if item.fits]
        if name != get(best.setting) and least and least * (1 + TIE) < min(times, default=math.inf):
            unseen[name] = min(least, unseen.get(name, least))
    texts = [_describe_value(str(value), seen, best) for value, seen in others.items() if value not in unseen]
    return texts + [f"{name} takes at least {format_seconds(least)} a step" for name, least in unseen.items()]


def _describe_value(name: str, seen: list[Evaluation], best: Evaluation) -> str:
    fitting = [evaluated for evaluated in seen if evaluated.fits]
    if not fitting:
        least = min(evaluated.estimate.need_bytes for evaluated in seen)
        return f"{name} does not fit ({format_bytes(least)} of {format_bytes(seen[0].allowed_bytes)})"
    times = [evaluation.estimate.step_s for evaluation in fitting if evaluation.estimate.step_s is not None]
    if not times or best.estimate.step_s is None:
        return f"{name} fits too"
    return f"{name} {compare_step(min(times), best.estimate.step_s)}"


def compare_step(step_s: float, best_s: float) -> str:
    """Return the time of a step, compared with that of the choice."""
    more = step_s / best_s - 1
    if abs(more) < NOISE:
        return f"takes as long ({format_seconds(step_s)} a step)"
    shown = f"{more:+.1%}" if abs(more) < SMALL_DIFFERENCE else f"{more:+.0%}"
    return f"takes {format_seconds(step_s)} a step ({shown})"


def _explain_gpus(best: Evaluation, result: SearchResult, space: Space, cluster: Cluster) -> str:
    if pinned := _explain_pin(space, "gpus"):
        return pinned
    names = " and ".join(best.layout.kinds)
    texts = [f"{best.setting.gpus} x {names}"]
    if best.estimate.step_s is not None:
        texts.append(f"{format_seconds(best.estimate.step_s)} a step")
    tied = _explain_tie(best, result, _gpus_subject)
    if best.layout.device.slice and len(cluster.devices) > 1:
        texts.append("MIG slices cannot work on one job together")
    elif tied:
        texts.append(tied)
    elif best.setting.gpus < len(cluster.devices):
        texts += _compare_others(best, result, _gpus_subject)[-2:] or ["more would not be better"]
    return ", ".join(texts)


def _gpus_subject(setting: Setting) -> str:
    """Return a GPU count as the subject of a sentence."""
    return f"on {setting.gpus} it"


def _explain_tie(best: Evaluation, result: SearchResult, get: Callable[[Setting], Any]) -> str:
    """Return the text for a faster setting within TIE that is less simple; empty if there is none."""
    first = result.fastest
    if first is None or get(first.setting) == get(best.setting):
        return ""
    if first.estimate.step_s is None or best.estimate.step_s is None:
        return f"{get(first.setting)} would be no better"
    less = 1 - first.estimate.step_s / best.estimate.step_s
    return (
        f"{get(first.setting)} would take {format_seconds(first.estimate.step_s)} (-{less:.1%}); the "
        f"difference is within {TIE:.0%}, below the prediction error, so the simpler one is chosen"
    )


def _explain_strategy(best: Evaluation, result: SearchResult, space: Space) -> str:
    if pinned := _explain_pin(space, "strategy"):
        return pinned
    setting = best.setting
    strategy = strategy_of(setting)
    what = strategy.explain(setting.mesh)
    if not strategy.needs_several_gpus:
        return what
    if setting.shares:
        return f"{what}; the batch is divided by GPU speed: {describe_shares(best)}"
    alike = _restrict_result(result, lambda setting: setting.gpus, best)
    others = _compare_others(best, alike, lambda setting: setting.strategy.value)
    first = result.fastest
    tied = _explain_tie(best, alike, lambda setting: setting.strategy.value)
    if first is not None and tied and first.setting.gpus == setting.gpus:
        others = [tied, *(text for text in others if not text.startswith(f"{first.setting.strategy} "))]
    return "; ".join([what, *others])


def _restrict_result(result: SearchResult, alike: Callable[[Setting], Any], best: Evaluation) -> SearchResult:
    """Return the part of a result with settings that equal the choice in one respect."""
    beaten = {
        family: beaten_by
        for family, beaten_by in result.beaten.items()
        if alike(family.setting(family.splits[-1])) == alike(best.setting)
    }
    evaluations = [
        evaluation for evaluation in result.evaluations if alike(evaluation.setting) == alike(best.setting)
    ]
    return replace(result, evaluations=evaluations, beaten=beaten)


def describe_shares(best: Evaluation) -> str:
    """Return the share of the batch of each kind of GPU."""
    named: dict[tuple[str, int, int, int], int] = {}
    for place, share in zip(best.layout.places, best.setting.shares, strict=True):
        key = (place.name, share.samples, share.micro_batch, share.accumulation)
        named[key] = named.get(key, 0) + 1
    return ", ".join(
        f"{count} x {name} {samples} samples ({micro} x {rounds})"
        for (name, samples, micro, rounds), count in named.items()
    )


COMPARABLE = 8
"""How many times smaller a micro-batch may be that the choice is compared with."""


def _explain_micro_batch(best: Evaluation, result: SearchResult, space: Space) -> str:
    setting = best.setting
    if setting.shares:
        return "the largest of the ranks"
    if pinned := _explain_pin(space, "micro_batch"):
        return pinned
    same = [
        evaluation
        for evaluation in result.evaluations
        if (
            evaluation.setting.mesh,
            evaluation.setting.recompute,
            evaluation.setting.compile,
            evaluation.setting.strategy,
        )
        == (setting.mesh, setting.recompute, setting.compile, setting.strategy)
    ]
    texts = []
    larger = [evaluation for evaluation in same if evaluation.setting.micro_batch > setting.micro_batch]
    # Two samples say little about 64.
    smaller = [
        evaluation
        for evaluation in same
        if setting.micro_batch / COMPARABLE <= evaluation.setting.micro_batch < setting.micro_batch
    ]
    limit = next((most for key, most in result.limits.items() if _is_in_family(setting, key, best)), None)
    if limit == setting.micro_batch:
        texts.append("the largest that fits")
    if larger:
        nearest = min(larger, key=lambda evaluation: evaluation.setting.micro_batch)
        texts.append(_describe_value(str(nearest.setting.micro_batch), [nearest], best))
    elif setting.accumulation == 1:
        texts.append("a rank's whole share of the batch")
    elif limit is None:
        texts.append("larger ones would be no faster")
    if smaller:
        nearest = max(smaller, key=lambda evaluation: evaluation.setting.micro_batch)
        texts.append(_describe_value(str(nearest.setting.micro_batch), [nearest], best))
    return "; ".join(texts)


def _is_in_family(setting: Setting, family: Family, best: Evaluation) -> bool:
    own = (setting.strategy, setting.mesh, setting.recompute, setting.compile, best.layout)
    return own == (family.strategy, family.mesh, family.recompute, family.compile, family.layout)


def _explain_accumulation(setting: Setting) -> str:
    """Return how micro-batch, accumulation and ranks give the global batch, in numbers."""
    micro, rounds, ranks, global_batch = (
        setting.micro_batch,
        setting.accumulation,
        setting.data_parallel,
        setting.global_batch,
    )
    if setting.shares:
        return f"{' + '.join(str(share.samples) for share in setting.shares)} = {global_batch}, exactly"
    if is_exact(global_batch, ranks, micro, rounds):
        return f"{micro} x {rounds} x {ranks} data-parallel = {global_batch}, exactly"
    sizes = {
        samples: list_micro_batches(samples, micro)[-1] for samples in divide_evenly(global_batch, ranks)
    }
    last = ", ".join(f"{samples} samples end in a micro-batch of {size}" for samples, size in sizes.items())
    product = f"{micro} x {rounds} x {ranks} is more than {global_batch}"
    return f"{product}: the last is smaller, so that it is {global_batch} exactly ({last})"


def _explain_precision(best: Evaluation, space: Space) -> str:
    if pinned := _explain_pin(space, "precision"):
        return pinned
    device = best.layout.device
    name = device.kind
    if space.failed_precisions:
        return "; ".join(
            f"{failed_precision.precision} fails: {failed_precision.why}"
            for failed_precision in space.failed_precisions
        )
    dtypes = best.setting.dtypes
    if not dtypes.is_narrow:
        return f"no peak rates are known for {name}"
    rate = device.peaks.get_rate(dtypes.products)
    peak = f", {format_flops(rate)} dense" if rate else ""
    if dtypes.scales_loss:
        return f"{name} only emulates bf16; {best.setting.precision} with loss scaling{peak}"
    return f"{name} has it in hardware{peak}; weights stay fp32"


def _explain_recompute(best: Evaluation, result: SearchResult, space: Space) -> str:
    if pinned := _explain_pin(space, "recompute"):
        return pinned
    # Of the steps between none and full, only the next one with less recomputation says anything.
    less = RECOMPUTES[max(0, RECOMPUTES.index(best.setting.recompute) - 1)]
    shown = {*TRACED_RECOMPUTES, less, best.setting.recompute}
    alike = _restrict_result(result, lambda setting: setting.mesh, best)
    alike = replace(
        alike,
        evaluations=[seen for seen in alike.evaluations if seen.setting.recompute in shown],
        beaten={family: why for family, why in alike.beaten.items() if family.recompute in shown},
    )
    others = _compare_others(best, alike, lambda setting: setting.recompute.value)
    if best.setting.recompute is Recompute.NONE:
        return "; ".join(["fits without recompute", *others])
    return "; ".join(others) or "it needs less memory"


VERIFIED = "; verified: torch's compiler ran for the figures of this plan"


def _explain_compile(best: Evaluation, result: SearchResult, space: Space) -> str:
    if pinned := _explain_pin(space, "compile"):
        return pinned
    if best.setting.sync_batchnorm and best.setting.gpus > 1:
        return "sync_batchnorm is not compiled on several GPUs"
    others = _compare_others(
        best,
        _restrict_result(result, lambda setting: setting.mesh, best),
        lambda setting: "compiled" if setting.compile else "eager",
    )
    if others:
        return "; ".join(others)
    failed = [error.found for _, error in result.failed.values()]
    if failed and not best.setting.compile:
        return failed[0]
    return "it takes fewer and larger kernels" if best.setting.compile else "it would be no better"


def _explain_allocator(best: Evaluation, space: Space) -> str:
    pinned = _explain_pin(space, "allocator")
    if best.is_tight:
        return f"{pinned}; {best.estimate.verdict_reason}" if pinned else best.estimate.verdict_reason
    if pinned:
        return pinned
    high, most = format_bytes(best.estimate.band.high_bytes), format_bytes(best.allowed_bytes)
    if best.setting.allocator is Allocator.DEFAULT:
        return f"{high} at most, {most} may be used"
    return f"the default allocator would fragment beyond the memory limit; this way {high} of {most}"


def _explain_workers(best: Evaluation, space: Space) -> str:
    if pinned := _explain_pin(space, "workers"):
        return pinned
    nodes = best.layout.cluster.nodes
    cores = [node.cpu_cores for node in nodes if node.cpu_cores]
    if len(cores) < len(nodes):
        return f"the cores are not known; {USUAL_WORKERS} per GPU is usual"
    count = len(nodes[0].devices)
    return f"{min(cores)} cores for {plural(count, 'GPU')}, one each kept for the rank itself"


def list_rejections(
    result: SearchResult, space: Space, more: Iterable[Rejection] = ()
) -> tuple[Rejection, ...]:
    """Return all refused settings by cause: results of the search first, then fixed rules."""
    listed = _list_too_large(result, space)
    if result.too_late:
        deadline = format_duration(space.policy.deadline_s or 0.0)
        listed.append(
            Rejection(why=f"ends later than the deadline of {deadline} allows", count=result.too_late)
        )
    listed += [
        Rejection(why=f"could not be predicted: {found}", count=many)
        for found, (many, _) in result.failed.items()
    ]
    listed += [
        Rejection(
            why=f"{failed_precision.precision} could not be predicted: {failed_precision.why}",
            count=failed_precision.count,
        )
        for failed_precision in space.failed_precisions
    ]
    return (*listed, *_list_beaten(result, space.policy), *space.refused, *more)


def _list_too_large(result: SearchResult, space: Space) -> list[Rejection]:
    by_strategy: dict[str, list[tuple[int, int, Family]]] = {}
    for family, (many, least) in result.too_large.items():
        by_strategy.setdefault(family.strategy.value, []).append((many, least, family))
    listed = []
    for strategy, rows in by_strategy.items():
        needs = [least for _, least, _ in rows if least]
        need = f" {format_bytes(min(needs))} or more are needed," if needs else ""
        first = rows[0][2]
        most = format_bytes(space.policy.memory_share * available_bytes(first.layout.device))
        listed.append(
            Rejection(
                why=f"{strategy}: too large,{need} {most} may be used",
                count=sum(many for many, _, _ in rows),
                example=first.setting(first.splits[-1]),
            )
        )
    return listed


def _list_beaten(result: SearchResult, policy: Policy) -> list[Rejection]:
    by_strategy: dict[str, tuple[int, float]] = {}
    for family, (many, least) in result.beaten.items():
        had, lowest = by_strategy.get(family.strategy.value, (0, least))
        by_strategy[family.strategy.value] = (had + many, min(lowest, least))
    best_s = None if result.best is None else result.best.estimate.step_s
    return [
        Rejection(why=f"{strategy}: {explain_beaten(least, best_s, policy)}", count=many)
        for strategy, (many, least) in by_strategy.items()
    ]


def explain_beaten(least: float, best_s: float | None, policy: Policy) -> str:
    """Return why settings that take at least `least` seconds a step were not estimated."""
    if policy.objective is Objective.SPEED and best_s and 0 < least < best_s:
        return (
            f"at most {best_s / least - 1:.1%} faster than the choice, below the prediction error; "
            "the choice is simpler"
        )
    return f"cannot be better than the choice{_format_bound(least, policy)}"


def _format_bound(least: float, policy: Policy) -> str:
    """Return the bound that rules settings out, as a text for the objective."""
    if policy.objective is Objective.SPEED and least:
        return f", at least {format_seconds(least)} a step"
    return {Objective.GPUS: ", by GPUs and time", Objective.COST: ", by GPU-hours"}.get(policy.objective, "")


def list_candidates(result: SearchResult, workload: Workload) -> tuple[Candidate, ...]:
    """Return the runners-up, each with why it was not chosen."""
    assert result.best is not None  # noqa: S101 - runners-up need a choice
    best = result.best
    return tuple(
        Candidate(
            setting=evaluation.setting,
            estimate=add_run_totals(evaluation.estimate, evaluation.setting, workload),
            why=_explain_loss(evaluation, best)
            + _name_other_devices(evaluation, best)
            + "; releases cached blocks" * evaluation.is_tight,
        )
        for evaluation in result.runners_up
    )


def _name_other_devices(evaluated: Evaluation, best: Evaluation) -> str:
    """Return the names of the devices if they differ from those of the choice."""
    return "" if evaluated.layout.kinds == best.layout.kinds else f" ({' and '.join(evaluated.layout.kinds)})"


def list_looks(result: SearchResult) -> tuple[EstimatedSetting, ...]:
    """Return all estimated settings, each once."""
    each = {
        evaluation.setting: evaluation
        for evaluation in (*result.evaluations, *([result.best] if result.best else []))
    }
    return tuple(
        EstimatedSetting(
            setting=setting,
            process_bytes=evaluation.estimate.process_bytes,
            high_bytes=evaluation.estimate.band.high_bytes,
            samples_per_s=setting.global_batch / evaluation.estimate.step_s
            if evaluation.estimate.step_s
            else None,
            fits=evaluation.fits,
        )
        for setting, evaluation in each.items()
    )


def _explain_loss(evaluated: Evaluation, best: Evaluation) -> str:
    if evaluated.estimate.step_s is None or best.estimate.step_s is None:
        return "more rounds, more recomputing or fewer GPUs; times are not known"
    more = evaluated.estimate.step_s / best.estimate.step_s - 1
    if evaluated.setting.gpus > best.setting.gpus and more < NOISE:
        more = evaluated.setting.gpus - best.setting.gpus
        return plural(more, "more GPU")
    if abs(more) < NOISE:
        return "no faster"
    if more < 0:
        return f"{more:+.1%} a step, less simple"
    return f"{more:+.1%} a step" if abs(more) < 1 else f"{more + 1:.1f} times as long"


def write_recommendation(
    best: Evaluation,
    space: Space,
    cluster: Cluster,
    rows: tuple[Comparison, ...],
    fastest: Evaluation | None = None,
) -> str:
    """Return the recommendation; `fastest` is a slightly better setting that is less simple."""
    answer = _write_answer(best, space, cluster, rows, fastest)
    return f"{answer} {_warn_tight(best, space.policy)}" if best.is_tight else answer


def _warn_tight(best: Evaluation, policy: Policy) -> str:
    """Return the warning of a plan that fits only because torch releases cached blocks."""
    answer = (
        "It fits only because torch releases cached blocks: "
        f"{format_bytes(best.estimate.band.high_bytes)} are wanted and {format_bytes(best.allowed_bytes)} "
        "may be used"
    )
    if policy.memory_share < 1:
        answer += (
            f" (--memory {policy.memory_share:g}; torch takes more as long as the GPU has it, unless "
            "torch.cuda.set_per_process_memory_fraction stops it)"
        )
    releases = best.estimate.releases_per_step
    slower = "steps take longer than predicted" if releases else "only the first steps take longer"
    return f"{answer}; {slower}."


def _write_answer(
    best: Evaluation, space: Space, cluster: Cluster, rows: tuple[Comparison, ...], fastest: Evaluation | None
) -> str:
    policy, workload, setting = space.policy, space.workload, best.setting
    count, total = setting.gpus, len(cluster.devices)
    gpus = plural(count, "GPU")
    estimate = add_run_totals(best.estimate, setting, workload)
    if estimate.samples_per_s is None:
        fit = format_bytes(estimate.process_bytes)
        answer = f"Use {gpus}: it fits in {fit}. The time is unknown because this device has no speed data."
        return f"{answer}{_warn_short_epoch(workload)}"
    if estimate.hours is None or estimate.gpu_hours is None:
        rate = f"{format_figure(estimate.samples_per_s)} samples/s"
        return f"Use {gpus} of {total}: {rate}. The job does not say how many samples there are."
    took = format_duration(estimate.hours * 3600)
    spent = f"{format_figure(estimate.gpu_hours)} GPU-hours"
    price = compute_cost(estimate, policy)
    spent += f", cost {price:,.2f}" if price is not None else ""
    free = f", {total - count} of {total} left free" if total > count else ""
    words = {
        Objective.SPEED: ("fastest", "as fast as"),
        Objective.COST: ("cheapest", "as cheap as"),
        Objective.GPUS: ("enough", "as good as"),
    }[policy.objective]
    lead = f"{gpus} {'are' if count > 1 else 'is'} {words[0]}"
    if fastest is not None and fastest.setting.gpus != count:
        lead = f"{gpus} {'are' if count > 1 else 'is'} {words[1]} {fastest.setting.gpus}, within {TIE:.0%}"
    answer = f"{lead}: {took} for {_format_horizon(workload)} ({spent}{free}).{_warn_short_epoch(workload)}"
    if policy.deadline_s is not None:
        spare = 1 - estimate.hours * 3600 / policy.deadline_s
        answer += f" The deadline of {format_duration(policy.deadline_s)} leaves {spare:.0%} to spare."
    others = [_describe_row(row, best) for row in rows if row.gpus != count]
    texts = [text for text in others if text]
    return f"{answer} {make_sentence('; '.join(texts))}" if texts else answer


def _format_horizon(workload: Workload) -> str:
    epochs = plural(workload.epochs, "epoch")
    return f"{epochs} of {workload.samples:,} samples"


def _warn_short_epoch(workload: Workload) -> str:
    """Return a warning if an epoch has fewer samples than a step; empty if it has enough.

    >>> from trimtab.spec import Workload
    >>> _warn_short_epoch(Workload(name="a", global_batch=16, samples=16))
    ''
    """
    if workload.samples is None or workload.samples >= workload.global_batch:
        return ""
    return (
        f" An epoch of {workload.samples:,} samples is less than one step of {workload.global_batch:,}, and "
        "`trimtab train` refuses it: give a smaller --global-batch, or more samples."
    )


def _describe_row(row: Comparison, best: Evaluation) -> str:
    if row.estimate is None or row.estimate.hours is None or best.estimate.step_s is None:
        return f"{row.gpus}: {row.why or 'nothing fits'}" if row.estimate is None else ""
    took = format_duration(row.estimate.hours * 3600)
    late = ", too late" if row.meets_deadline is False else ""
    return f"{row.gpus} would take {took}{late}"
