"""Predict a training run of another framework, and choose a micro-batch that fits.

The framework's own choices are pinned: precision, recomputation, optimizer, number of ranks. Only the split
of the global batch into micro-batches may change, and only to sizes that divide it evenly.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from trimtab.api.detecting import detect
from trimtab.errors import NothingFits, TrimtabError, WrongUse
from trimtab.integrations.run_estimates import OutOfTimeError, RunEstimator
from trimtab.planner.estimator_interface import available_bytes
from trimtab.planner.explanations import add_run_totals
from trimtab.planner.plan_files import collect_fingerprints, describe_places, read_plan_file, read_versions
from trimtab.planner.space import make_layout
from trimtab.probe.detect import as_cluster
from trimtab.spec import EstimatedSetting, Plan, Policy, Reason, Workload
from trimtab.training.task import build_cpu_plan, repeat_node
from trimtab.units import format_bytes, plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.integrations.run_facts import RunFacts
    from trimtab.planner.estimator_interface import Layout
    from trimtab.spec import Cluster, Device, Estimate

ADAPT = ("if-needed", "fastest", "never")
LIMIT_S = 60.0
"""Seconds after which training starts without a prediction, unless the user says otherwise."""


class RunPrediction(NamedTuple):
    """The plan of a run, and notes for the user."""

    plan: Plan
    notes: tuple[str, ...] = ()
    is_predicted: bool = True
    took_s: float | None = None
    """Seconds that the prediction took; None if none was made now."""

    @property
    def micro_batch(self) -> int:
        """Samples per forward pass on a rank."""
        return self.plan.choice.micro_batch


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a number, largest first.

    >>> list_divisors(12)
    [12, 6, 4, 3, 2, 1]
    """
    return [size for size in range(number, 0, -1) if number % size == 0]


def find_cluster(on: str | Cluster | None, nodes: int) -> Cluster | None:
    """Return the devices to predict for; None if this machine has no GPU and none were named."""
    if on is not None:
        return as_cluster(on)
    here = detect()
    return repeat_node(add_own_memory(here), nodes) if here.devices else None


def add_own_memory(cluster: Cluster) -> Cluster:
    """Return this machine with the memory as free that this process holds: a prediction counts it again.

    Other ranks hold about as much on their devices. A limit of torch for this process counts too.
    """
    if not torch.cuda.is_initialized():
        return cluster
    own = torch.cuda.memory_reserved()
    share = torch.cuda.get_per_process_memory_fraction()

    def add(device: Device) -> Device:
        free = device.memory_bytes if device.free_bytes is None else device.free_bytes + own
        return device.replace(free_bytes=min(free, int(share * device.memory_bytes)))

    nodes = (node.replace(devices=tuple(map(add, node.devices))) for node in cluster.nodes)
    return cluster.replace(nodes=tuple(nodes))


def choose_layout(cluster: Cluster, facts: RunFacts, *, is_here: bool) -> Layout:
    """Return the devices of the ranks: this process's own if it is alone, else the first of each node."""
    first = torch.cuda.current_device() if is_here and facts.ranks == 1 and torch.cuda.is_initialized() else 0
    each = -(-facts.ranks // facts.nodes)
    picks = [
        (number, device)
        for number, node in enumerate(cluster.nodes[: facts.nodes])
        for device in node.devices[first : first + each]
    ]
    if len(picks) < facts.ranks:
        raise WrongUse(
            f"a prediction for {plural(len(picks), 'GPU')}",
            found=f"{facts.ranks} ranks train on {plural(facts.nodes, 'node')}",
            cure="Name as many GPUs with on=, as in on='2x8xH100' for 2 nodes.",
        )
    return make_layout(cluster, picks[: facts.ranks])


def predict_run(  # noqa: PLR0913 - a run, its devices and what may be changed
    job: str,
    facts: RunFacts,
    layout: Layout,
    *,
    adapt: str = "if-needed",
    memory: float = 0.9,
    ends_at: float = float("inf"),
) -> RunPrediction:
    """Predict the run with its own micro-batch; choose another one only if that does not fit, or if asked.

    Raises NothingFits if no micro-batch fits, and OutOfTimeError at the time `ends_at`.
    """
    most = memory * available_bytes(layout.device)
    with RunEstimator(job, facts, layout, ends_at=ends_at) as estimator:
        own = estimator.estimate(facts.micro_batch)
        own_fits = own.band.high_bytes <= most
        best = facts.micro_batch
        notes: tuple[str, ...] = ()
        if adapt == "never" and not own_fits:
            notes = (f"the micro-batch may not fit: {_describe_shortage(own, most)}",)
        elif adapt == "fastest" or not own_fits:
            best, notes = _search_sizes(estimator, most, fastest=adapt == "fastest")
        plan = _make_checked_plan(estimator, best, memory, notes)
    return RunPrediction(plan, notes)


def _search_sizes(estimator: RunEstimator, most: float, *, fastest: bool) -> tuple[int, tuple[str, ...]]:
    """Return the micro-batch to train with, and notes on why it is not the script's own."""
    facts = estimator.facts
    own = estimator.estimates[facts.micro_batch]
    own_fits = own.band.high_bytes <= most
    try:
        best = _find_fitting(estimator, most, fastest=fastest)
    except (OutOfTimeError, TrimtabError) as error:
        why = "there was no time to estimate other sizes"
        if isinstance(error, TrimtabError):
            why = f"other sizes could not be estimated: {error.found}"
        if own_fits:
            return facts.micro_batch, (why,)
        return facts.micro_batch, (f"the micro-batch may not fit: {_describe_shortage(own, most)}; {why}",)
    if best is None:
        (least,) = {min(estimator.estimates)}
        raise NothingFits(
            f"micro-batch {facts.micro_batch} x accumulation {facts.accumulation}",
            found=f"no smaller micro-batch fits either: with {least}, "
            + _describe_shortage(estimator.estimates[least], most),
            cure=f"Use less memory: gradient checkpointing, a shorter sequence, or other GPUs. "
            f"`trimtab plan {estimator.job}` says what would fit; adapt='never' trains anyway.",
        )
    if best == facts.micro_batch:
        return best, ()
    share = facts.micro_batch * facts.accumulation
    why = "it is predicted to be the fastest that fits" if own_fits else _describe_shortage(own, most)
    change = (
        f"micro-batch {facts.micro_batch} x accumulation {facts.accumulation} is changed to {best} x "
        f"{share // best}; the global batch of {facts.global_batch} stays"
    )
    return best, (f"{change}: {why}",)


def _find_fitting(estimator: RunEstimator, most: float, *, fastest: bool) -> int | None:
    """Return the largest micro-batch that fits, or the fastest; None if there is none.

    Sizes are estimated from the middle, so that most are between two that were traced. A single sample takes
    a trace of its own, and is tried last.
    """
    facts = estimator.facts
    sizes = sorted(list_divisors(facts.micro_batch * facts.accumulation))
    several = [size for size in sizes if size > 1 and (fastest or size < facts.micro_batch)]

    def is_too_large(size: int) -> bool:
        return estimator.estimate(size).band.high_bytes > most

    fitting = several[: bisect_left(several, True, key=is_too_large)]
    if not fitting:
        return None if is_too_large(1) else 1
    if not fastest:
        return fitting[-1]
    # All split the same global batch, so the shortest step is the fastest.
    return min(fitting, key=lambda size: (estimator.estimate(size).step_s or 0.0, -size))


def _describe_shortage(estimate: Estimate, most: float) -> str:
    need, room = format_bytes(estimate.band.high_bytes), format_bytes(int(most))
    return f"up to {need} are predicted, and {room} may be used"


def _make_checked_plan(estimator: RunEstimator, size: int, memory: float, notes: tuple[str, ...]) -> Plan:
    """Return the plan of a micro-batch that was estimated."""
    facts, layout = estimator.facts, estimator.layout
    workload = _make_workload(estimator.job, facts)
    setting = estimator.make_setting(size)
    limit = int(memory * available_bytes(layout.device))
    looks = tuple(
        EstimatedSetting(
            setting=estimator.make_setting(micro_batch),
            process_bytes=estimate.process_bytes,
            high_bytes=estimate.band.high_bytes,
            samples_per_s=estimate.samples_per_s,
            fits=estimate.band.high_bytes <= limit,
        )
        for micro_batch, estimate in estimator.estimates.items()
    )
    estimate = add_run_totals(estimator.estimates[size], setting, workload)
    why = notes[0] if notes else "as the script has it, and it fits"
    return Plan(
        job=estimator.job,
        choice=setting,
        estimate=estimate,
        policy=Policy(memory_share=memory, pins=facts.pins | {"micro_batch": size}),
        reasons=(Reason(subject="micro_batch", value=str(size), why=why),),
        looked_at=looks,
        places=layout.places,
        workload=workload,
        recommendation=f"Trains as the script says, with micro-batch {size}: {why}.",
        fingerprints=collect_fingerprints(estimator.job, workload, layout.places, read_versions()),
        folder=str(Path.cwd()),
    )


def _make_workload(job: str, facts: RunFacts) -> Workload:
    return Workload(
        name=job.rpartition("/")[2],
        global_batch=facts.global_batch,
        samples=facts.samples,
        epochs=max(1, facts.epochs),
    )


def make_measured_plan(job: str, facts: RunFacts, why: str) -> Plan:
    """Return a plan without a prediction, for a run that is only measured."""
    workload = _make_workload(job, facts)
    pins = facts.pins | {"micro_batch": facts.micro_batch}
    pins.pop("gpus")
    plan = build_cpu_plan(job, workload, facts.ranks, pins, {})
    note = f"nothing was predicted: {why}"
    return plan.replace(
        estimate=plan.estimate.replace(assumptions=(note,)),
        reasons=(Reason(subject="micro_batch", value=str(facts.micro_batch), why="as the script has it"),),
        recommendation=f"Trains as the script says; {note}",
    )


def check_given_plan(given: Plan | str | Path, facts: RunFacts) -> RunPrediction:
    """Return the given plan; raise WrongUse if it is for another training than the script's.

    The micro-batch may differ: the caller uses that of the plan.
    """
    plan = given if isinstance(given, Plan) else read_plan_file(Path(given))
    choice = plan.choice
    planned = {
        "global_batch": choice.global_batch,
        "ranks": choice.gpus,
        "precision": str(choice.precision),
        "recompute": str(choice.recompute),
        "strategy": str(choice.strategy),
    }
    actual = {name: getattr(facts, name) for name in planned}
    wrong = [
        f"{name} {planned[name]}, not {actual[name]}" for name in planned if planned[name] != actual[name]
    ]
    name = "the plan" if isinstance(given, Plan) else f"plan {given}"
    if wrong:
        raise WrongUse(
            name,
            found=f"it is for another training than this script runs: it has {'; '.join(wrong)}",
            cure="Set the script's arguments to the plan, or plan again.",
        )
    share = facts.micro_batch * facts.accumulation
    if share % choice.micro_batch:
        smaller = next(size for size in list_divisors(share) if size < choice.micro_batch)
        raise WrongUse(
            name,
            found=f"its micro-batch {choice.micro_batch} does not divide the {share} samples of a rank",
            cure=f"Plan with --pin micro_batch={smaller}.",
        )
    notes: tuple[str, ...] = ()
    if choice.micro_batch != facts.micro_batch:
        change = f"micro-batch {facts.micro_batch} is changed to {choice.micro_batch}, as planned"
        notes = (f"{change}; the global batch of {facts.global_batch} stays",)
    return RunPrediction(plan, notes, is_predicted=bool(plan.estimate.allocated_bytes))


def predict_or_measure(  # noqa: PLR0913 - a run and what may be changed
    build_job: Callable[[], tuple[str, list[str]]],
    facts: RunFacts,
    *,
    name: str,
    plan: Plan | str | Path | None,
    on: str | Cluster | None,
    adapt: str,
    memory: float,
    limit_s: float = LIMIT_S,
    say: Callable[[str], None] = lambda _: None,
) -> RunPrediction:
    """Return the plan of a run: checked, predicted, or without a prediction and with the reason.

    A plan that does not match is an error, and so is a model of which no micro-batch fits. A model that
    cannot be rebuilt is not, nor is a prediction that takes more than `limit_s` seconds.
    """
    if plan is not None:
        return check_given_plan(plan, facts)
    began = time.monotonic()
    try:
        if limit_s <= 0:
            return _only_measure(name, facts, "limit_s=0")
        cluster = find_cluster(on, facts.nodes)
        if cluster is None:
            return _only_measure(name, facts, "this machine has no GPU (name one with on=, as in on='H200')")
        layout = choose_layout(cluster, facts, is_here=on is None)
        job, notes = build_job()
        say(
            f"predicting {name} with micro-batch {facts.micro_batch} on "
            f"{describe_places(layout.places)}, in at most {limit_s:g} s"
        )
        found = predict_run(job, facts, layout, adapt=adapt, memory=memory, ends_at=began + limit_s)
    except NothingFits:
        raise
    except Exception as error:  # noqa: BLE001 - a fault of ours must not end the user's training
        return _only_measure(name, facts, _explain_failure(error, limit_s))
    return found._replace(notes=(*found.notes, *notes), took_s=time.monotonic() - began)


def _explain_failure(error: Exception, limit_s: float) -> str:
    """Return why a prediction ended without a result."""
    if isinstance(error, OutOfTimeError):
        return f"it took more than {limit_s:g} s; training goes on (limit_s= gives it more time)"
    if isinstance(error, TrimtabError):
        return f"{error.given}: {error.found}. {error.cure}"
    first = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {first}. This is a bug in trimtab: please report it."


def _only_measure(name: str, facts: RunFacts, why: str) -> RunPrediction:
    """Return a plan without a prediction."""
    note = f"nothing is predicted: {why}"
    return RunPrediction(make_measured_plan(name, facts, why), (note,), is_predicted=False)
