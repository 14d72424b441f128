"""The functions `plan` and `read_plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.api.estimating import SCRIPT_FIELDS, first_device, refuse_job_options
from trimtab.errors import WrongUse
from trimtab.spec.requests import PlanRequest, accepts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trimtab.spec import Cluster, Plan, Policy


@accepts(PlanRequest)
def plan(request: PlanRequest) -> Plan:
    """Find the best configuration that fits, with reasons, without a GPU.

    trimtab.plan("job.py:MyJob", "4xA100-40GB").choice
    trimtab.plan(MyJob, "8xH100", deadline="12h", objective="gpus", compare=[1, 2, 4, 8]).recommendation
    trimtab.plan(on="4xH100", command=["torchrun", "train.py", "--batch-size", "64"]).script.command

    `say` gets each activity in words, `say_best` the best setting so far. With `partial`, Ctrl-C gives the
    best so far as a plan that is not `complete`; otherwise KeyboardInterrupt is raised.
    """
    from trimtab.jobs.load import find_job_name
    from trimtab.jobs.model_sizes import read_job_sizes
    from trimtab.planner.degrees import explain_degrees
    from trimtab.planner.pins import check_degree_pins
    from trimtab.planner.plan import make_plan
    from trimtab.probe.detect import as_cluster

    if request.command:
        return plan_command(request)
    if request.job is None:
        raise TypeError("plan() needs a job, or the words of a training command as `command`")
    if request.vary:
        raise WrongUse(
            f"--vary {request.vary[0]}",
            found="it names an option of a training command, and a job was given",
            cure="Give --pin to fix a choice of a job's plan; all others vary.",
        )
    policy = make_policy(
        request.memory, request.deadline, request.objective, request.price, request.pins, request.allow
    )
    policy = pin_stored_base(policy, request.job)
    cluster = as_cluster(request.on, network=request.network, host_memory=request.host_memory)
    first_device(cluster)
    name, changed = find_job_name(request.job)
    options = changed | (request.options or {})
    sizes = read_job_sizes(name, options)
    check_degree_pins(policy.pins, sizes, cluster, request.global_batch)
    made = make_plan(
        name,
        options,
        cluster,
        policy,
        given={key: getattr(request, key) for key in ("global_batch", "samples", "epochs")},
        compare=request.compare,
        clip=request.clip,
        cache=request.cache,
        say=request.say,
        say_best=request.say_best,
        partial=request.partial,
        verify_s=request.verify,
    )
    warnings = check_degree_pins(policy.pins, sizes, cluster, made.choice.global_batch)
    return made.replace(reasons=(*made.reasons, *explain_degrees(warnings)))


PLAN_FIELDS = SCRIPT_FIELDS | {
    "vary",
    "global_batch",
    "samples",
    "epochs",
    "memory",
    "deadline",
    "price",
    "pins",
}
"""Fields of a request that concern the plan of a training command."""


def plan_command(request: PlanRequest) -> Plan:
    """Find the best command line for a training command, with reasons; each setting is followed once."""
    import os
    from functools import partial

    from trimtab.probe.detect import as_cluster
    from trimtab.scripts.command import parse_command
    from trimtab.scripts.estimate import estimate_script
    from trimtab.scripts.knobs import find_knobs, select_knobs
    from trimtab.scripts.plan import plan_script
    from trimtab.scripts.sources import read_sources

    refuse_job_options(request, PLAN_FIELDS)
    if request.deadline is not None and request.samples is None:
        raise WrongUse(
            f"--deadline {request.deadline}",
            found="it is not known how many samples the command trains on",
            cure="Give --samples, and --epochs if there are several.",
        )
    policy = make_policy(
        request.memory, request.deadline, request.objective, request.price, request.pins, request.allow
    )
    cluster = as_cluster(request.on, network=request.network)
    first_device(cluster)
    command = parse_command(request.command, environment=os.environ)
    sources = read_sources(command)
    knobs = select_knobs(find_knobs(command, sources), command, request.vary)
    made = plan_script(
        command,
        cluster,
        policy,
        knobs,
        partial(estimate_script, cache=request.cache),
        given={key: getattr(request, key) for key in ("global_batch", "samples", "epochs")},
        sources=sources,
        say=request.say,
        say_best=request.say_best,
    )
    if not (made.complete or request.partial):
        raise KeyboardInterrupt
    return made


def pin_stored_base(policy: Policy, job: Any) -> Policy:
    """Pin the base to the format in which the job's folder stores its weights, unless it is pinned."""
    from trimtab.jobs.load import find_job_name
    from trimtab.jobs.stored_base import find_stored_base

    base = find_stored_base(find_job_name(job)[0])
    if "base" in policy.pins or not base.storage.is_quantized:
        return policy
    return policy.replace(pins={**policy.pins, "base": base.value})


def make_policy(  # noqa: PLR0913, PLR0917 - the fields of Policy
    memory: float,
    deadline: str | float | None,
    objective: str,
    price: float | None,
    pins: Mapping[str, Any] | Iterable[str],
    allow: str | Iterable[str] = (),
) -> Policy:
    """Return a Policy from what people type."""
    from collections.abc import Mapping as AnyMapping

    from trimtab.planner.pins import check_pins, read_pins
    from trimtab.planner.ways import check_allowed
    from trimtab.spec import Objective, Policy
    from trimtab.units import parse_duration

    if not 0 < memory <= 1:
        raise WrongUse(
            f"--memory {memory:g}", found="it is no share of the free memory", cure="Give one from 0.1 to 1."
        )
    if objective not in set(Objective):
        known = ", ".join(word.value for word in Objective)
        raise WrongUse(f"--objective {objective}", found=f"it is none of {known}", cure="Use one of those.")
    if price is not None and not 0 <= price < float("inf"):
        found = "it is below 0" if price < 0 else "it is no amount of money"
        raise WrongUse(f"--price {price:g}", found=found, cure="Give a price per GPU and hour.")
    return Policy(
        objective=Objective(objective),
        memory_share=memory,
        deadline_s=parse_duration(deadline, "--deadline") if isinstance(deadline, str) else deadline,
        price_per_gpu_hour=price,
        pins=check_pins(pins) if isinstance(pins, AnyMapping) else read_pins(pins),
        allow=check_allowed(allow.split(",") if isinstance(allow, str) else allow),
    )


def read_plan(file: Path, *, job: Any = None, on: str | Cluster | None = None) -> Plan:
    """Read a plan from its file; raise if the job, the versions or the cluster have changed.

    Without `job` the job that the plan names is looked at; without `on` the cluster is left out, so that a
    plan can be read anywhere.
    """
    from trimtab.planner.plan_files import check_plan, read_plan_file

    found = read_plan_file(file)
    check_plan(found, str(file), job=job, on=on)
    return found


def plan_from(file: Path | str) -> tuple[Plan, str]:
    """Return the plan in a file, and a note on where its job was found; refuse a stale plan."""
    from trimtab.planner.plan_files import read_checked_plan

    return read_checked_plan(Path(file))
