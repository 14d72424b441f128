"""Predict a training run of another framework, and choose a micro-batch that fits.

The framework's own choices are pinned: precision, recomputation, optimizer, number of ranks. Only the split
of the global batch into micro-batches may change, and only to sizes that divide it evenly.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.api.detecting import detect
from trimtab.api.estimating import first_device, look_at_all, make_setting
from trimtab.api.planning import plan as make_plan
from trimtab.errors import NothingFits, TrimtabError, WrongUse
from trimtab.planner.plan_files import read_plan_file
from trimtab.probe.detect import as_cluster
from trimtab.spec import Plan, Reason, Workload
from trimtab.training.task import build_cpu_plan, repeat_node

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import Cluster

ADAPT = ("if-needed", "fastest", "never")


class RunFacts(NamedTuple):
    """How the framework will train, as far as a prediction depends on it."""

    micro_batch: int
    accumulation: int
    ranks: int = 1
    nodes: int = 1
    precision: str = "fp32"
    recompute: str = "none"
    compile: bool = False
    optimizer: str = "fused"
    strategy: str = "single"
    clip: float | None = None
    samples: int | None = None
    epochs: int = 1

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.ranks

    @property
    def pins(self) -> dict[str, Any]:
        """What a plan must not change."""
        return {
            "gpus": self.ranks,
            "strategy": self.strategy,
            "precision": self.precision,
            "recompute": self.recompute,
            "compile": self.compile,
            "optimizer": self.optimizer,
        }


class RunPrediction(NamedTuple):
    """The plan of a run, and notes for the user."""

    plan: Plan
    notes: tuple[str, ...] = ()
    is_predicted: bool = True

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
    return repeat_node(here, nodes) if here.devices else None


def predict_run(
    job: str, facts: RunFacts, cluster: Cluster, *, adapt: str = "if-needed", memory: float = 0.9
) -> RunPrediction:
    """Predict the run; choose another micro-batch if the framework's own does not fit.

    Raises NothingFits if no micro-batch fits.
    """
    share = facts.micro_batch * facts.accumulation
    own = _plan_micro_batch(job, facts, cluster, facts.micro_batch, memory)
    if adapt == "never":
        return _keep_own(job, facts, cluster, own)
    if adapt == "if-needed" and isinstance(own, Plan):
        return RunPrediction(own)
    sizes = list_divisors(share)
    if adapt == "if-needed":
        sizes = [size for size in sizes if size < facts.micro_batch]
    _trace_together(job, facts, cluster, sizes)
    plans = []
    last = own
    for size in sizes:
        last = _plan_micro_batch(job, facts, cluster, size, memory)
        if isinstance(last, Plan):
            plans.append(last)
            if adapt == "if-needed":
                break
    if not plans:
        assert isinstance(last, NothingFits)  # noqa: S101 - the smallest size did not fit either
        raise last
    best = max(plans, key=lambda plan: plan.estimate.samples_per_s or 0.0)
    choice = best.choice
    note = (
        f"micro-batch {facts.micro_batch} x accumulation {facts.accumulation} is changed to "
        f"{choice.micro_batch} x {choice.accumulation}; the global batch of {facts.global_batch} stays"
    )
    if choice.micro_batch == facts.micro_batch:
        return RunPrediction(best)
    why = own.found if isinstance(own, NothingFits) else "it is predicted to be the fastest that fits"
    return RunPrediction(best, (f"{note}: {why}",))


def _trace_together(job: str, facts: RunFacts, cluster: Cluster, sizes: list[int]) -> None:
    """Trace all sizes in one process, so that their plans need none; what fails is said by the plans."""
    words: Any = facts.pins
    settings = [
        make_setting(micro_batch=size, allocator="default", nodes=facts.nodes, **words) for size in sizes
    ]
    with contextlib.suppress(TrimtabError):
        look_at_all(job, settings, first_device(cluster), where=cluster, clip=facts.clip)


def _keep_own(job: str, facts: RunFacts, cluster: Cluster, own: Plan | NothingFits) -> RunPrediction:
    if isinstance(own, Plan):
        return RunPrediction(own)
    # Plan it on all of the memory, to have figures to compare with; if even that does not fit, say so.
    roomy = _plan_micro_batch(job, facts, cluster, facts.micro_batch, 1.0)
    if isinstance(roomy, Plan):
        return RunPrediction(roomy, (f"little memory is left: {own.found}",))
    note = f"predicted to run out of memory: {own.found}. {own.cure}"
    return RunPrediction(make_measured_plan(job, facts, note), (note,), is_predicted=False)


def _plan_micro_batch(
    job: str, facts: RunFacts, cluster: Cluster, size: int, memory: float
) -> Plan | NothingFits:
    try:
        return make_plan(
            job, cluster, pins=facts.pins | {"micro_batch": size}, memory=memory, clip=facts.clip
        )
    except NothingFits as error:
        return error


def make_measured_plan(job: str, facts: RunFacts, why: str) -> Plan:
    """Return a plan without a prediction, for a run that is only measured."""
    workload = Workload(
        name=job.rpartition("/")[2],
        global_batch=facts.global_batch,
        samples=facts.samples,
        epochs=max(1, facts.epochs),
    )
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
) -> RunPrediction:
    """Return the plan of a run: checked, predicted, or without a prediction and with the reason.

    A plan that does not match is an error, and so is a model of which no micro-batch fits. A model that
    cannot be rebuilt is not.
    """
    if plan is not None:
        return check_given_plan(plan, facts)
    try:
        cluster = find_cluster(on, facts.nodes)
        if cluster is None:
            why = "this machine has no GPU (name one with on=, as in on='H200')"
            return RunPrediction(make_measured_plan(name, facts, why), (why,), is_predicted=False)
        job, notes = build_job()
        found = predict_run(job, facts, cluster, adapt=adapt, memory=memory)
    except NothingFits:
        raise
    except TrimtabError as error:
        why = f"{error.given}: {error.found}. {error.cure}"
        return RunPrediction(make_measured_plan(name, facts, why), (why,), is_predicted=False)
    return found._replace(notes=(*found.notes, *notes))
