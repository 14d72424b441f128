"""Read plan files, and refuse a stale plan: one whose job, versions or cluster have changed."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from trimtab.cache import fingerprint
from trimtab.catalog.torch_release import find_torch_release
from trimtab.errors import BrokenFile, UnknownName, WrongUse
from trimtab.files import is_file
from trimtab.jobs.load import find_job_name
from trimtab.planner.estimator_interface import available_bytes
from trimtab.spec import Plan
from trimtab.trace.job_summary import hash_source_file, summarize_job
from trimtab.units import format_bytes
from trimtab.version import VERSION

if TYPE_CHECKING:
    from trimtab.spec import Cluster, RankPlacement, Workload

FILE_PREFIX = "file "
"""Prefix of a fingerprint's key for a source file."""
UNCHECKED = (
    "torch is not installed here: the source files of the plan's job were compared, and its batch and the "
    "release of torch were not."
)


def read_plan_file(file: Path) -> Plan:
    """Return the plan in a file, without checking whether it is stale."""
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
    """Return what a plan depends on, by name: job, batch, cluster, source files and versions."""
    return {
        "job": job.rpartition("/")[2],
        "batch": f"{workload.global_batch} samples a step",
        "cluster": describe_places(places),
        **{f"{FILE_PREFIX}{name}": digest for name, digest in workload.files.items()},
        **versions,
    }


def describe_places(places: tuple[RankPlacement, ...]) -> str:
    """Return the devices of a plan by node, as in: 2 nodes of 8 x H100 SXM5 80GB.

    >>> from trimtab.spec import RankPlacement
    >>> places = [RankPlacement(node=0, node_name="a", device=index, name="T4") for index in range(2)]
    >>> describe_places(tuple(places))
    '2 x T4'
    """
    nodes: dict[int, dict[str, int]] = {}
    for place in places:
        counts = nodes.setdefault(place.node, {})
        counts[place.name] = counts.get(place.name, 0) + 1
    texts = [" + ".join(f"{count} x {name}" for name, count in counts.items()) for counts in nodes.values()]
    counted = {text: texts.count(text) for text in texts}
    return ", ".join(text if count == 1 else f"{count} nodes of {text}" for text, count in counted.items())


def list_changes(plan: Plan, now: dict[str, str], cluster: Cluster | None) -> list[str]:
    """Return what has changed since the plan was made; empty if the plan still holds.

    A cluster may have more devices than the plan uses; versions and files must be the same.
    """
    wrong = [
        f"{_name_key(key)} was {before}, and is {now[key]}"
        if not key.startswith(FILE_PREFIX)
        else f"{_name_key(key)} has changed"
        for key, before in plan.fingerprints.items()
        # A config file has two: as it was, and with the changes of the plan.
        if key in now and key != "cluster" and now[key] not in (before, *before.split())
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
    """Return what the cluster lacks for the plan; nodes are matched with the most devices first."""
    needed: dict[int, Counter[str]] = {}
    for place in plan.places:
        needed.setdefault(place.node, Counter())[place.name] += 1
    there = [Counter(device.kind for device in node.devices) for node in cluster.nodes]
    left = sorted(there, key=lambda counts: -counts.total())
    for counts in sorted(needed.values(), key=lambda counts: -counts.total()):
        seat = next((node for node in left if counts <= node), None)
        if seat is None:
            found = ", ".join(
                " + ".join(f"{many} x {name}" for name, many in counts.items()) for counts in there if counts
            )
            return [f"the plan needs {describe_places(plan.places)}, and there is {found or 'no GPU'}"]
        left.remove(seat)
    return _check_memory(plan, cluster)


def _check_memory(plan: Plan, cluster: Cluster) -> list[str]:
    """Return what is missing if too few devices have the free memory that the plan needs."""
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


def is_plan_file(file: Path) -> bool:
    """Return whether a file is a plan that trimtab wrote, by its keys."""
    if file.suffix != ".json" or not is_file(file):
        return False
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"choice", "estimate", "fingerprints"} <= content.keys()


def write_plan_command(plan: Plan, out: str = "") -> str:
    """Return the command line that makes a plan again."""
    option = f" --out {quote(out)}" if out else ""
    if plan.script is not None:
        return f"trimtab plan{_on_option(plan)}{option} -- {plan.script.original}"
    return f"trimtab plan {plan.job}{_on_option(plan)}{option}"


def refuse_stale(plan: Plan, origin: str, wrong: list[str]) -> None:
    """Raise if there are changes since the plan was made."""
    if wrong:
        raise WrongUse(
            f"plan {origin}",
            found="it is stale: " + "; ".join(wrong),
            cure=f"Plan again: {write_plan_command(plan, origin)}",
        )


def check_script_plan(plan: Plan, origin: str, cluster: Cluster | None = None) -> None:
    """Raise if the files of a training command, the versions or the cluster are not what its plan assumed."""
    now = dict(read_versions())
    for key in plan.fingerprints:
        if key.startswith(FILE_PREFIX):
            file = Path(plan.folder, key.removeprefix(FILE_PREFIX))
            with contextlib.suppress(OSError, UnicodeDecodeError):
                now[key] = fingerprint(file.read_text(encoding="utf-8"))
    refuse_stale(plan, origin, list_changes(plan, now, cluster))


def _on_option(plan: Plan) -> str:
    """Return the --on option for the devices of a plan; an empty string for several nodes.

    Without --on, the new plan is for the GPUs of this machine, which may differ.
    """
    names = [place.name for place in plan.places]
    if not names or any(place.node for place in plan.places):
        return ""
    counted = "+".join(f"{names.count(name)}x{name}" for name in dict.fromkeys(names))
    return f" --on {quote(counted)}"


def read_versions() -> dict[str, str]:
    """Return the versions that a plan depends on; without torch where it is not installed."""
    torch = find_torch_release()
    return {"trimtab": VERSION} | ({} if torch is None else {"torch": torch.partition("+")[0]})


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
    `job` is the plan's own job by a longer path. `origin` names the plan in the error. Without torch, the
    job cannot be loaded: its source files are compared, and its batch is not.
    """
    from trimtab.probe.detect import as_cluster

    if plan.script is not None:
        if job is not None:
            raise WrongUse(
                f"plan {origin}",
                found="it is for a training command, not for a job",
                cure=f"Type its command: {plan.script.command}",
            )
        check_script_plan(plan, origin, None if on is None else as_cluster(on))
        return
    name, overrides = find_job_name(plan.job if job is None else job)
    cluster = None if on is None else as_cluster(on)
    if find_torch_release() is None:
        now = read_versions() | _read_job_files(plan, name)
        refuse_stale(plan, origin, list_changes(plan, now, cluster))
        return
    workload = summarize_job(name, overrides or plan.options)
    if plan.workload is not None:
        # A global batch from the command line belongs to the plan, not to the job.
        workload = workload.replace(global_batch=plan.workload.global_batch)
    now = collect_fingerprints(plan.job if is_moved else name, workload, plan.places, read_versions())
    refuse_stale(plan, origin, list_changes(plan, now, cluster))


def _read_job_files(plan: Plan, job: str) -> dict[str, str]:
    """Return the fingerprints of a job's source files as they are now, without importing the job.

    Files of a package are assumed to be unchanged: only an import finds them.
    """
    place = _split_job(job)[1]
    then = {key: digest for key, digest in plan.fingerprints.items() if key.startswith(FILE_PREFIX)}
    if not place:
        return then
    paths = {key: Path(place).resolve().parent / key.removeprefix(FILE_PREFIX) for key in then}
    return {key: hash_source_file(path) for key, path in paths.items() if path.is_file()}


def read_checked_plan(file: Path) -> tuple[Plan, str]:
    """Return the plan in a file, and a note on where its job was found; refuse it if it is stale.

    A relative path in the plan starts at the folder where the plan was made. If the job is not there any
    more, it is searched beside the plan's file and in the current folder. The plan comes back with the path
    at which its job was found. Without torch, the note says what was not checked.
    """
    plan, note = _find_checked_plan(file)
    return plan, note if find_torch_release() else " ".join(filter(None, (note, UNCHECKED)))


def _find_checked_plan(file: Path) -> tuple[Plan, str]:
    """Return the plan in a file with its job where it is now, and a note on that; refuse a stale plan."""
    plan = read_plan_file(file)
    if plan.script is not None:
        check_script_plan(plan, str(file))
        return plan, ""
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
    there = [path for path in places if is_file(path / "config.json" if prefix else path)]
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
