"""The functions `launch`, `list_jobs` and `cancel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.api.detecting import detect, load
from trimtab.api.planning import make_policy, plan, plan_from
from trimtab.spec.requests import LaunchRequest, accepts

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.errors import TrimtabError
    from trimtab.spec import JobView, Launch, LaunchKind, Plan


@accepts(LaunchRequest)
def launch(request: LaunchRequest) -> Launch | tuple[Launch, ...]:
    """Return what would be run for a plan: a command, a batch script or a manifest; with `yes`, run it.

    trimtab.launch("plan.json").command
    trimtab.launch("plan.json", kind="slurm", partition="gpu", yes=True).job_id
    trimtab.launch("slm", on="4xH100", kind="slurm", compare=[1, 2, 4])[0].script
    trimtab.launch(command=["torchrun", "train.py"], on="8xH100", kind="slurm").script

    With `compare` there is one for each number of GPUs. Options that are not given are those of trimtab.toml.
    """
    launches = prepare_launch(request)
    if request.yes:
        launches = tuple(start_launch(prepared) for prepared in launches)
    return launches if request.compare else launches[0]


def start_launch(launch: Launch) -> Launch:
    """Submit a launch, or run it here to its end."""
    import os

    from trimtab.launching import submit

    submit.check_startable(launch)
    if launch.script is not None:
        return submit.submit_launch(launch)
    return submit.run_launch(launch, os.environ)


@accepts(LaunchRequest)
def prepare_launch(request: LaunchRequest) -> tuple[Launch, ...]:
    """Return what would be run, as text; nothing is written or started."""
    import os
    import sys
    from pathlib import Path

    from trimtab.launching import request as launch_request
    from trimtab.launching import submit
    from trimtab.launching.defaults import read_defaults
    from trimtab.spec import LaunchKind

    if request.plan_or_job is None and not request.command:
        raise TypeError("launch() needs a plan, a job, or the words of a training command as `command`")
    kind = LaunchKind(request.kind)
    given = {name: getattr(request, name) for name in launch_request.USED_BY}
    launch_request.refuse_unused(kind, given)
    site_defaults = read_defaults(Path.cwd())
    site_options = ("partition", "account", "qos", "activate", "image")
    site_defaults = site_defaults.replace(
        **{name: given[name] for name in site_options if given[name] is not None}
    )
    compare = tuple(request.compare)
    order = launch_request.LaunchOrder(
        kind=kind,
        nodes=request.nodes,
        rendezvous=request.rendezvous,
        restarts=request.restarts,
        out=None if request.out is None else str(request.out),
        steps=request.steps,
        time=request.time,
        script=request.script,
        extra=tuple(request.extra),
        folder=str(Path.cwd()),
        python=sys.executable,
        compares=bool(compare),
    )
    site, silence = submit.read_slurm_cluster() if kind is LaunchKind.SLURM else (None, "")
    if request.command:
        plans: list[tuple[Plan, str | None]] = [(_plan_command(request), None)]
        unchecked = ""
    else:
        plans, unchecked = _plans_to_launch(request, compare)
    fault = _fault(plans[0][0], kind, cache=request.cache)
    cores = detect().cpu_cores if kind is LaunchKind.TORCHRUN else None
    launches = (
        launch_request.build_launch(
            order, plan, file, site_defaults, site=site, silence=silence, cores=cores, here=os.environ
        )
        for plan, file in plans
    )
    notes = (unchecked,) if unchecked else ()
    return tuple(launch.replace(fault=fault, notes=(*launch.notes, *notes)) for launch in launches)


def _fault(found: Plan, kind: LaunchKind, *, cache: bool) -> str:
    """Return why the run of a plan would fail at once; empty for a launch of your own script."""
    from trimtab.spec import LaunchKind
    from trimtab.strategies import find_training_refusal
    from trimtab.training.job_queries import find_job_fault

    if found.script is not None:
        from trimtab.scripts.apply import list_missing_edits

        missing = list_missing_edits(found)
        return f"the plan needs other values in config files: {'; '.join(missing)}" if missing else ""
    if kind in {LaunchKind.ACCELERATE, LaunchKind.DEEPSPEED}:
        return ""
    if (refusal := find_training_refusal(found.choice)) is not None:
        return f"trimtab train cannot run this layout: {refusal.found}. {refusal.cure}"
    fault = find_job_fault(found.job, found.options, cache=cache)
    return "" if fault is None else f"{fault.given}: {fault.found}. {fault.cure}"


def _plans_to_launch(
    request: LaunchRequest, counts: tuple[int, ...]
) -> tuple[list[tuple[Plan, str | None]], str]:
    """Return the plans to launch, and a note on what could not be checked.

    There is one plan, or one for each of `counts`. Each comes with its file if it has one.
    """
    from pathlib import Path

    from trimtab.errors import WrongUse
    from trimtab.jobs.load import find_job_name
    from trimtab.planner.plan_files import rebuild_cluster
    from trimtab.probe.detect import as_cluster
    from trimtab.spec import Plan
    from trimtab.trace.job_summary import describe_job
    from trimtab.training.task import build_cpu_plan

    plan_or_job, procs, options = request.plan_or_job, request.procs, request.options or {}
    nodes = _most_nodes(request.nodes)
    fixed = make_policy(0.9, None, "speed", None, request.pins).pins
    file, unchecked = None, ""
    found = plan_or_job if isinstance(plan_or_job, Plan) else None
    if isinstance(plan_or_job, str | Path) and _is_plan_file(str(plan_or_job)):
        file = str(plan_or_job)
        found, unchecked = plan_from(file)
    if found is not None:
        if fixed or options or request.on is not None or request.network is not None or procs is not None:
            raise WrongUse(
                "--pin, --set, --on or --procs with a plan",
                found="the plan has made its choices",
                cure="Give them where it is made: trimtab plan JOB --on DEVICES --pin KEY=VALUE --out FILE.",
            )
        if found.script is not None and counts:
            raise WrongUse(
                f"--compare {','.join(map(str, counts))} with the plan of a training command",
                found="its number of GPUs is part of the command",
                cure="Plan the command for each: trimtab plan --on 2xH100 -- COMMAND.",
            )
        where: Any = rebuild_cluster(found)
        if not counts:
            return [(found, file)], unchecked
        name, overrides = found.job, found.options
    else:
        name, changed = find_job_name(plan_or_job)
        overrides, where = changed | options, as_cluster(request.on, network=request.network)
    if not where.devices:
        if counts:
            raise WrongUse(
                f"--compare {','.join(map(str, counts))}",
                found="there is no GPU here to compare numbers of",
                cure="Say for which devices: --on 4xA100-40GB.",
            )
        loaded = load(name, **overrides)
        count = (procs or 1) * nodes
        return [(build_cpu_plan(name, describe_job(loaded, name), count, fixed, overrides), None)], ""
    if procs is not None:
        fixed = fixed | {"gpus": procs * nodes}
    return [
        (plan(name, where, pins=pins, options=overrides, cache=request.cache, say=request.say), None)
        for pins in [fixed | {"gpus": count} for count in counts] or [fixed]
    ], unchecked


def _plan_command(request: LaunchRequest) -> Plan:
    """Plan the training command of a request."""
    from trimtab.api.estimating import refuse_job_options
    from trimtab.spec.requests import PlanRequest, list_options

    refuse_job_options(request, frozenset(list_options(LaunchRequest)) - {"procs", "compare", "options"})
    return plan(
        PlanRequest(
            on=request.on,
            network=request.network,
            command=request.command,
            vary=request.vary,
            pins=request.pins,
            say=request.say,
        )
    )


def _most_nodes(nodes: str | None) -> int:
    """Return the most nodes of MIN:MAX."""
    from trimtab.training.torchrun import parse_node_range

    return 1 if nodes is None else parse_node_range(nodes)[1]


def _is_plan_file(name: str) -> bool:
    """Return whether a word names a plan, not a job: a job's file is Python and has a name behind it."""
    from pathlib import Path

    return name.endswith(".json") or (Path(name).is_file() and not name.endswith(".py"))


def list_jobs(*places: Path | str, tail: int = 5) -> list[JobView]:
    """List trimtab's jobs: in Slurm's queue, in run folders (default: those in ./runs), on this machine.

    >>> [job.state for job in trimtab.list_jobs()]  # doctest: +SKIP
    ['running', 'pending']
    """
    found, silences = find_jobs(*places, tail=tail)
    if silences and not found:
        raise silences[0]
    return found


def find_jobs(*places: Path | str, tail: int = 5) -> tuple[list[JobView], list[TrimtabError]]:
    """Return trimtab's jobs, and the errors for those that could not be looked up."""
    from pathlib import Path

    from trimtab.launching.jobs import list_jobs
    from trimtab.launching.submit import real_slurm

    return list_jobs(real_slurm(), [Path(place) for place in places], lines=tail)


def cancel(job_id: str | int, *, force: bool = False) -> JobView:
    """Cancel a job by its number, its id or its run's folder; return its last state.

    >>> trimtab.cancel(4711).state  # doctest: +SKIP
    'running'
    """
    from trimtab.launching.jobs import cancel_job as end
    from trimtab.launching.submit import real_slurm

    return end(str(job_id), real_slurm(), force=force)
