"""Plan files: reads them, and refuses a plan whose job, versions or cluster are not what it assumed."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from trimtab.errors import BrokenFile, UnknownName, WrongUse
from trimtab.jobs.load import find_job_name
from trimtab.planner.protocol import available_bytes
from trimtab.spec import Plan
from trimtab.trace.job_summary import summarize_job
from trimtab.units import format_bytes
from trimtab.version import VERSION

if TYPE_CHECKING:
    from trimtab.spec import Cluster, RankPlacement, Workload

FILE_PREFIX = "file "
"""What the key of a source file begins with."""


def read_plan_file(file: Path) -> Plan:
    """Return the plan in a file, whether it still holds or not."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise BrokenFile(
            f"plan {file}",
            found=f"it cannot be read ({error.strerror})",
            cure="Write one: trimtab plan JOB --out FILE",
        ) from error
    return Plan.from_json(text, origin=f"plan {file}")


def collect_fingerprints(
    job: str, workload: Workload, places: tuple[RankPlacement, ...], versions: dict[str, str]
) -> dict[str, str]:
    """What a plan assumes, by name, in words where words will do: job, files, cluster, versions."""
    return {
        "job": job.rpartition("/")[2],
        "batch": f"{workload.global_batch} samples a step",
        "cluster": describe_places(places),
        **{f"{FILE_PREFIX}{name}": digest for name, digest in workload.files.items()},
        **versions,
    }


def describe_places(places: tuple[RankPlacement, ...]) -> str:
    """Devices by node: 2 nodes of 8 x H100 SXM5 80GB.

    >>> from trimtab.spec import RankPlacement
    >>> used(tuple(RankPlacement(node=0, node_name="a", device=index, name="T4") for index in range(2)))
    '2 x T4'
    """
    nodes: dict[int, dict[str, int]] = {}
    for place in places:
        held = nodes.setdefault(place.node, {})
        held[place.name] = held.get(place.name, 0) + 1
    texts = [" + ".join(f"{count} x {name}" for name, count in held.items()) for held in nodes.values()]
    counted = {text: texts.count(text) for text in texts}
    return ", ".join(text if count == 1 else f"{count} nodes of {text}" for text, count in counted.items())


def list_changes(plan: Plan, now: dict[str, str], cluster: Cluster | None) -> list[str]:
    """What is other than the plan assumed; empty where it still holds.

    A cluster may have more devices than the plan uses; versions and files have to be the same.
    """
    wrong = [
        f"{_name_key(key)} was {told}, and is {now[key]}"
        if not key.startswith(FILE_PREFIX)
        else f"{_name_key(key)} has changed"
        for key, told in plan.fingerprints.items()
        if key in now and key != "cluster" and now[key] != told
    ]
    wrong += [
        f"{_name_key(key)} is gone"
        for key in plan.fingerprints
        if key.startswith(FILE_PREFIX) and key not in now
    ]
    return wrong + ([] if cluster is None else _check_cluster(plan, cluster))


def _name_key(key: str) -> str:
    return (
        key.removeprefix(FILE_PREFIX)
        if key.startswith(FILE_PREFIX)
        else f"the {key}"
        if key in ("job", "batch")
        else key
    )


def _check_cluster(plan: Plan, cluster: Cluster) -> list[str]:
    """Whether the cluster can seat the plan, node by node, the fullest first."""
    wanted: dict[int, dict[str, int]] = {}
    for place in plan.places:
        held = wanted.setdefault(place.node, {})
        held[place.name] = held.get(place.name, 0) + 1
    there = []
    for node in cluster.nodes:
        counts: dict[str, int] = {}
        for device in node.devices:
            counts[device.kind] = counts.get(device.kind, 0) + 1
        there.append(counts)
    left = sorted(there, key=lambda one: -sum(one.values()))
    for held in sorted(wanted.values(), key=lambda number: -sum(number.values())):
        seat = next(
            (one for one in left if all(one.get(name, 0) >= many for name, many in held.items())), None
        )
        if seat is None:
            found = ", ".join(
                " + ".join(f"{many} x {name}" for name, many in one.items()) for one in there if one
            )
            return [f"the plan needs {describe_places(plan.places)}, and there is {found or 'no GPU'}"]
        left.remove(seat)
    return _check_memory(plan, cluster)


def _check_memory(plan: Plan, cluster: Cluster) -> list[str]:
    """Whether enough devices have the memory free that the plan counted on."""
    need = plan.estimate.need_bytes
    names = {place.name for place in plan.places}
    rooms = sorted(
        (available_bytes(device) for device in cluster.devices if device.kind in names), reverse=True
    )
    count = len(plan.places)
    if len(rooms) >= count and count and rooms[count - 1] < need:
        return [
            f"the plan needs {format_bytes(need)} on each GPU, and {format_bytes(rooms[count - 1])} is free"
        ]
    return []


def refuse_stale(plan: Plan, origin: str, wrong: list[str]) -> None:
    """Raise for a plan that no longer holds."""
    if wrong:
        raise WrongUse(
            f"plan {origin}",
            found="it is stale: " + "; ".join(wrong),
            cure=f"Plan again: trimtab plan {plan.job}{_on_option(plan)} --out {origin}",
        )


def _on_option(plan: Plan) -> str:
    """The devices of a plan as --on takes them; nothing where they are on several nodes.

    The GPUs may be others by now: without --on, a plan is for those that are here.
    """
    names = [place.name for place in plan.places]
    if not names or any(place.node for place in plan.places):
        return ""
    counted = "+".join(f"{names.count(fromkey)}x{fromkey}" for fromkey in dict.fromkeys(names))
    return f" --on {quote(counted)}"


def read_versions() -> dict[str, str]:
    """Return the versions that a plan depends on."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch").partition("+")[0]
    except PackageNotFoundError:
        torch = "none"
    return {"trimtab": VERSION, "torch": torch}


def check_plan(
    plan: Plan,
    origin: str,
    *,
    job: Any = None,
    on: str | Cluster | None = None,
    is_moved: bool = False,
) -> None:
    """Raise if the job, the versions or the cluster are not what the plan assumed.

    Without `job`, check the job that the plan names; without `on`, leave the cluster out. With `is_moved`,
    `job` is the plan's own job by a longer path. `origin` names the plan in the error.
    """
    from trimtab.probe.detect import as_cluster

    name, overrides = find_job_name(plan.job if job is None else job)
    workload = summarize_job(name, overrides or plan.options)
    if plan.workload is not None:
        # A global batch from the command line belongs to the plan, not to the job.
        workload = workload.replace(global_batch=plan.workload.global_batch)
    cluster = None if on is None else as_cluster(on)
    now = collect_fingerprints(plan.job if is_moved else name, workload, plan.places, read_versions())
    refuse_stale(plan, origin, list_changes(plan, now, cluster))


def read_checked_plan(file: Path) -> tuple[Plan, str]:
    """Return the plan in a file, and a note on where its job was found; refuse it if it is stale.

    A relative path in the plan starts at the folder where the plan was made. If the job is not there any
    more, it is searched beside the plan's file and in the current folder. The plan comes back with the path
    at which its job was found.
    """
    plan = read_plan_file(file)
    prefix, place, rest = _split_job(plan.job)
    if not place:
        try:
            check_plan(plan, str(file))
        except UnknownName as problem:
            if ":" not in plan.job:
                raise
            return plan, f"Whether the plan still holds was not checked: {problem.found}."
        return plan, ""
    bases = dict.fromkeys(
        base.resolve() for base in (Path(plan.folder or "."), file.resolve().parent, Path())
    )
    places = list(dict.fromkeys(base / place for base in bases))
    there = [path for path in places if (path / "config.json" if prefix else path).is_file()]
    if not there:
        looked = " and ".join(dict.fromkeys(str(path.parent) for path in places))
        return plan, (
            f"{place} is not here: whether the plan still holds for it was not checked. Looked in {looked}."
        )
    stale: list[WrongUse] = []
    for path in there:
        try:
            return _check_at(plan, str(file), f"{prefix}{path}{rest}", place)
        except WrongUse as problem:
            stale.append(problem)
    raise stale[0]


def _check_at(plan: Plan, origin: str, job: str, place: str) -> tuple[Plan, str]:
    """Return the plan with its job at this path, and a note if it is elsewhere; refuse a stale plan."""
    path = Path(_split_job(job)[1])
    name = plan.job if Path(place).is_absolute() or Path(place).resolve() == path else job
    check_plan(plan, origin, job=name, is_moved=True)
    if name == plan.job:
        return plan, ""
    return plan.replace(job=job), f"{place} is {path}: paths in a plan start where it was made."


def _split_job(job: str) -> tuple[str, str, str]:
    """Split a job's name around the path in it: hf:FOLDER, FILE.py:NAME; the path is empty if it has none."""
    if job.startswith("hf:"):
        return "hf:", job.removeprefix("hf:"), ""
    source, colon, name = job.rpartition(":")
    return ("", source, f"{colon}{name}") if source.endswith(".py") else ("", "", "")


def rebuild_cluster(plan: Plan) -> Cluster:
    """Return the devices that a plan is for; this machine for a plan without devices."""
    from trimtab.probe.detect import as_cluster

    nodes = len({place.node for place in plan.places})
    if not nodes:
        return as_cluster(None)
    each = "+".join(describe_places(plan.places).removeprefix(f"{nodes} nodes of ").split(" + "))
    return as_cluster(f"{nodes}x{each}" if nodes > 1 else each)
