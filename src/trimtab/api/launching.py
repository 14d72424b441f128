"""From a plan to running processes, and what became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.api.asking import detect, load
from trimtab.api.planning import make_policy, plan, plan_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from trimtab.errors import TrimtabError
    from trimtab.spec import (
        Cluster,
        JobView,
        Launch,
        LaunchKind,
        Plan,
    )


def launch(plan_or_job: Any, **asked: Any) -> Launch | tuple[Launch, ...]:
    """What would be run for a plan: a command, a batch script, a manifest; with `yes` it is run.

    trimtab.launch("plan.json").command
    trimtab.launch("plan.json", kind="slurm", partition="gpu", yes=True).job_id
    trimtab.launch("slm", on="4xH100", kind="slurm", compare=[1, 2, 4])[0].script

    `asked` is what `prepare_launch` takes. With `compare` there is one for each number of GPUs.
    """
    yes = asked.pop("yes", False)
    found = prepare_launch(plan_or_job, **asked)
    if yes:
        found = tuple(start_launch(one) for one in found)
    return found if asked.get("compare") else found[0]


def start_launch(one: Launch) -> Launch:
    """Submit a launch, or run it here to its end."""
    import os

    from trimtab.launching import doing

    doing.check_runs(one)
    return doing.submit(one) if one.script is not None else doing.run(one, os.environ)


def prepare_launch(  # noqa: PLR0913 - each is an option of the command
    plan_or_job: Any,
    *,
    kind: str = "torchrun",
    on: str | Cluster | None = None,
    nodes: str | None = None,
    procs: int | None = None,
    rendezvous: str | None = None,
    restarts: int | None = None,
    out: Path | str | None = None,
    steps: int | None = None,
    time: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    qos: str | None = None,
    activate: str | None = None,
    image: str | None = None,
    script: str | None = None,
    compare: Iterable[int] = (),
    pins: Mapping[str, Any] | Iterable[str] = (),
    extra: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    cache: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Launch, ...]:
    """What would be run, as text; nothing is written or started.

    `procs` are processes on each node, for a job on CPUs; `nodes` 2, or 1:2 for a run that goes on with what
    is left; `extra` are further words for `trimtab train`, or for `script` where accelerate or deepspeed run
    one; the rest is as in trimtab.toml, and wins over it.
    """
    import os
    import sys
    from pathlib import Path

    from trimtab.launching import doing, habits, orders
    from trimtab.spec import LaunchKind

    wanted = LaunchKind(kind)
    named = {"partition": partition, "account": account, "qos": qos, "activate": activate}
    others = {"time": time, "rendezvous": rendezvous, "image": image, "script": script}
    orders.refuse_unheard(wanted, named | others)
    told = habits.read(Path.cwd())
    given = {name: value for name, value in (named | {"image": image}).items() if value is not None}
    told = told.replace(**given)
    order = orders.Order(
        kind=wanted,
        nodes=nodes,
        rendezvous=rendezvous,
        restarts=restarts,
        out=None if out is None else str(out),
        steps=steps,
        time=time,
        script=script,
        extra=tuple(extra),
        folder=str(Path.cwd()),
        python=sys.executable,
        compares=bool(tuple(compare)),
    )
    site, silence = doing.slurm_site() if wanted is LaunchKind.SLURM else (None, "")
    question = (options or {}, pins, tuple(compare), cache, say)
    plans = plans_to_launch(plan_or_job, on, procs, start_nodes(nodes), question)
    fault = _fault(plans[0][0], wanted, cache=cache)
    cores = detect().cpu_cores if wanted is LaunchKind.TORCHRUN else None
    return tuple(
        orders.ordered(
            order, found, file, told, site=site, silence=silence, cores=cores, here=os.environ
        ).replace(fault=fault)
        for found, file in plans
    )


def _fault(found: Plan, kind: LaunchKind, *, cache: bool) -> str:
    """Why the run of a plan would fail at once, where a launch runs the job and not a user's script."""
    from trimtab.spec import LaunchKind
    from trimtab.training.questions import fault_of

    if kind in {LaunchKind.ACCELERATE, LaunchKind.DEEPSPEED}:
        return ""
    fault = fault_of(found.job, found.options, cache=cache)
    return "" if fault is None else f"{fault.given}: {fault.found}. {fault.cure}"


def plans_to_launch(
    plan_or_job: Any,
    on: str | Cluster | None,
    procs: int | None,
    nodes: int,
    question: tuple[dict[str, Any], Any, tuple[int, ...], bool, Callable[[str], None]],
) -> list[tuple[Plan, str | None]]:
    """The plans to launch, each with its file where it has one.

    The question holds what else a plan is made of: options, pins, numbers of GPUs to compare, whether traces
    are cached, and who is told.
    """
    from pathlib import Path

    from trimtab.errors import WrongUse
    from trimtab.jobs.load import name_of
    from trimtab.planner.stale import devices_of
    from trimtab.probe.detect import as_cluster
    from trimtab.spec import Plan
    from trimtab.trace.summary import described
    from trimtab.training.resize import cpu_plan

    options, pins, counts, cache, say = question
    fixed = make_policy(0.9, None, "speed", None, pins).pins
    file, found = None, plan_or_job if isinstance(plan_or_job, Plan) else None
    if isinstance(plan_or_job, str | Path) and _is_plan_file(str(plan_or_job)):
        file = str(plan_or_job)
        found, _ = plan_from(file)
    if found is not None:
        if fixed or options or on is not None or procs is not None:
            raise WrongUse(
                "--pin, --set, --on or --procs with a plan",
                found="the plan has made its choices",
                cure="Give them where it is made: trimtab plan JOB --on DEVICES --pin KEY=VALUE --out FILE.",
            )
        where: Any = devices_of(found)
        if not counts:
            return [(found, file)]
        name, overrides = found.job, found.options
    else:
        name, changed = name_of(plan_or_job)
        overrides, where = changed | options, as_cluster(on)
    if not where.devices:
        if counts:
            raise WrongUse(
                f"--compare {','.join(map(str, counts))}",
                found="there is no GPU here to compare numbers of",
                cure="Say for which devices: --on 4xA100-40GB.",
            )
        loaded = load(name, **overrides)
        return [(cpu_plan(name, described(loaded, name), (procs or 1) * nodes, fixed, overrides), None)]
    if procs is not None:
        fixed = fixed | {"gpus": procs * nodes}
    pinned = [fixed | {"gpus": one} for one in counts] or [fixed]
    return [(plan(name, where, pins=one, options=overrides, cache=cache, say=say), None) for one in pinned]


def start_nodes(nodes: str | None) -> int:
    """The most nodes of MIN:MAX."""
    from trimtab.training.start import node_range

    return 1 if nodes is None else node_range(nodes)[1]


def _is_plan_file(name: str) -> bool:
    """Whether a word names a plan rather than a job; a job's file is Python and has a name behind it."""
    from pathlib import Path

    return name.endswith(".json") or (Path(name).is_file() and not name.endswith(".py"))


def list_jobs(*places: Path | str, tail: int = 5) -> list[JobView]:
    """Our jobs: in Slurm's queue, in the folders of runs (those in ./runs, unless told), on this machine.

    >>> [job.state for job in trimtab.list_jobs()]  # doctest: +SKIP
    ['running', 'pending']
    """
    found, silences = find_jobs(*places, tail=tail)
    if silences and not found:
        raise silences[0]
    return found


def find_jobs(*places: Path | str, tail: int = 5) -> tuple[list[JobView], list[TrimtabError]]:
    """Our jobs, and why others could not be asked after."""
    from pathlib import Path

    from trimtab.launching.jobs import desk, listed

    return listed(desk(), [Path(one) for one in places], lines=tail)


def cancel(job_id: str | int, *, force: bool = False) -> JobView:
    """End a job, by its number, its id or its run's folder; what it was.

    >>> trimtab.cancel(4711).state  # doctest: +SKIP
    'running'
    """
    from trimtab.launching.jobs import cancel as end
    from trimtab.launching.jobs import desk

    return end(str(job_id), desk(), force=force)
