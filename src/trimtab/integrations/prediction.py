"""Predict a training run of another framework, and choose a micro-batch that fits.

The framework's own choices are pinned: precision, recomputation, optimizer, number of ranks. Only the split
of the global batch into micro-batches may change, and only to sizes that divide it evenly.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.api.detecting import detect
from trimtab.api.estimating import first_device, look_at_all, make_setting
from trimtab.api.planning import plan as make_plan
from trimtab.errors import NothingFits, TrimtabError, WrongUse
from trimtab.planner.estimator_interface import available_bytes
from trimtab.planner.plan_files import read_plan_file
from trimtab.probe.detect import as_cluster
from trimtab.spec import Plan, Reason, Workload
from trimtab.training.task import build_cpu_plan, repeat_node
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import Cluster, Estimate

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
    device = first_device(cluster)
    most = memory * available_bytes(device)
    (own,) = _estimate_sizes(job, facts, cluster, [facts.micro_batch])
    own_fits = own.band.high_bytes <= most
    if adapt == "never" and not own_fits:
        return _keep_own(job, facts, own, most)
    if adapt != "fastest" and own_fits:
        return RunPrediction(_plan_micro_batch(job, facts, cluster, facts.micro_batch, memory))
    sizes = list_divisors(facts.micro_batch * facts.accumulation)
    if adapt == "if-needed":
        sizes = [size for size in sizes if size < facts.micro_batch] or [facts.micro_batch]
    # One process traces all sizes, and two traces give the others.
    estimates = zip(sizes, _estimate_sizes(job, facts, cluster, sizes), strict=True)
    fitting = {size: estimate for size, estimate in estimates if estimate.band.high_bytes <= most}
    if not fitting:
        # This raises NothingFits, with what would help.
        return RunPrediction(_plan_micro_batch(job, facts, cluster, sizes[-1], memory))
    best = max(fitting)
    if adapt == "fastest":
        best = max(fitting, key=lambda size: (fitting[size].samples_per_s or 0.0, size))
    plan = _plan_micro_batch(job, facts, cluster, best, memory)
    if best == facts.micro_batch:
        return RunPrediction(plan)
    why = "it is predicted to be the fastest that fits" if own_fits else _describe_shortage(own, most)
    change = (
        f"micro-batch {facts.micro_batch} x accumulation {facts.accumulation} is changed to {best} x "
        f"{plan.choice.accumulation}; the global batch of {facts.global_batch} stays"
    )
    return RunPrediction(plan, (f"{change}: {why}",))


def _estimate_sizes(job: str, facts: RunFacts, cluster: Cluster, sizes: list[int]) -> list[Estimate]:
    """Return the estimate of each micro-batch size; raise what fails."""
    words: Any = {key: value for key, value in facts.pins.items() if key != "micro_batch"}
    share = facts.micro_batch * facts.accumulation
    settings = [
        make_setting(micro_batch=size, allocator="default", nodes=facts.nodes, **words).replace(
            accumulation=share // size, global_batch=facts.global_batch
        )
        for size in sizes
    ]
    answers = look_at_all(job, settings, first_device(cluster), where=cluster, clip=facts.clip)
    estimates = []
    for answer in answers:
        if isinstance(answer, TrimtabError):
            raise answer
        estimates.append(answer[0])
    return estimates


def _describe_shortage(estimate: Estimate, most: float) -> str:
    need, room = format_bytes(estimate.band.high_bytes), format_bytes(int(most))
    return f"up to {need} are predicted, and {room} may be used"


def _keep_own(job: str, facts: RunFacts, own: Estimate, most: float) -> RunPrediction:
    """Return a plan for a micro-batch that is not expected to fit, because nothing may change."""
    note = f"the micro-batch may not fit: {_describe_shortage(own, most)}"
    plan = make_measured_plan(job, facts, note).replace(estimate=own, recommendation=note)
    return RunPrediction(plan, (note,))


def _plan_micro_batch(job: str, facts: RunFacts, cluster: Cluster, size: int, memory: float) -> Plan:
    pins = facts.pins | {"micro_batch": size}
    return make_plan(job, cluster, pins=pins, memory=memory, clip=facts.clip)


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
