"""Whether a plan still holds: what it assumed against what there is."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING

from trimtab.errors import BrokenFile, WrongUse
from trimtab.planner.outlook import kind, room_bytes
from trimtab.spec import Plan
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.spec import Cluster, Place, Workload

FILE = "file "
"""What the key of a source file begins with."""


def read(file: Path) -> Plan:
    """A plan as its file has it, whether it still holds or not."""
    try:
        text = file.read_bytes()
    except OSError as error:
        raise BrokenFile(
            f"plan {file}",
            found=f"it cannot be read ({error.strerror})",
            cure="Write one: trimtab plan JOB --out FILE",
        ) from error
    return Plan.from_json(text, origin=f"plan {file}")


def fingerprints(
    job: str, workload: Workload, places: tuple[Place, ...], versions: dict[str, str]
) -> dict[str, str]:
    """What a plan assumes, by name, in words where words will do: job, files, cluster, versions."""
    return {
        "job": job.rpartition("/")[2],
        "batch": f"{workload.global_batch} samples a step",
        "cluster": used(places),
        **{f"{FILE}{name}": digest for name, digest in workload.files.items()},
        **versions,
    }


def used(places: tuple[Place, ...]) -> str:
    """Devices by node: 2 nodes of 8 x H100 SXM5 80GB.

    >>> from trimtab.spec import Place
    >>> used(tuple(Place(node=0, node_name="a", device=index, name="T4") for index in range(2)))
    '2 x T4'
    """
    nodes: dict[int, dict[str, int]] = {}
    for one in places:
        held = nodes.setdefault(one.node, {})
        held[one.name] = held.get(one.name, 0) + 1
    texts = [" + ".join(f"{count} x {name}" for name, count in held.items()) for held in nodes.values()]
    counted = {text: texts.count(text) for text in texts}
    return ", ".join(text if count == 1 else f"{count} nodes of {text}" for text, count in counted.items())


def changes(plan: Plan, now: dict[str, str], cluster: Cluster | None) -> list[str]:
    """What is other than the plan assumed; empty where it still holds.

    A cluster may have more devices than the plan uses; versions and files have to be the same.
    """
    wrong = [
        f"{_named(key)} was {told}, and is {now[key]}"
        if not key.startswith(FILE)
        else f"{_named(key)} has changed"
        for key, told in plan.fingerprints.items()
        if key in now and key != "cluster" and now[key] != told
    ]
    wrong += [
        f"{_named(key)} is gone" for key in plan.fingerprints if key.startswith(FILE) and key not in now
    ]
    return wrong + ([] if cluster is None else _cluster(plan, cluster))


def _named(key: str) -> str:
    return (
        key.removeprefix(FILE) if key.startswith(FILE) else f"the {key}" if key in ("job", "batch") else key
    )


def _cluster(plan: Plan, cluster: Cluster) -> list[str]:
    """Whether the cluster can seat the plan, node by node, the fullest first."""
    wanted: dict[int, dict[str, int]] = {}
    for one in plan.places:
        held = wanted.setdefault(one.node, {})
        held[one.name] = held.get(one.name, 0) + 1
    there = []
    for node in cluster.nodes:
        counts: dict[str, int] = {}
        for device in node.devices:
            counts[kind(device)] = counts.get(kind(device), 0) + 1
        there.append(counts)
    left = sorted(there, key=lambda one: -sum(one.values()))
    for held in sorted(wanted.values(), key=lambda one: -sum(one.values())):
        seat = next(
            (one for one in left if all(one.get(name, 0) >= many for name, many in held.items())), None
        )
        if seat is None:
            found = ", ".join(
                " + ".join(f"{many} x {name}" for name, many in one.items()) for one in there if one
            )
            return [f"the plan needs {used(plan.places)}, and there is {found or 'no GPU'}"]
        left.remove(seat)
    return _room(plan, cluster)


def _room(plan: Plan, cluster: Cluster) -> list[str]:
    """Whether enough devices have the memory free that the plan counted on."""
    need = plan.estimate.need_bytes
    names = {one.name for one in plan.places}
    rooms = sorted((room_bytes(one) for one in cluster.devices if kind(one) in names), reverse=True)
    count = len(plan.places)
    if len(rooms) >= count and count and rooms[count - 1] < need:
        return [
            f"the plan needs {format_bytes(need)} on each GPU, and {format_bytes(rooms[count - 1])} is free"
        ]
    return []


def refuse(plan: Plan, origin: str, wrong: list[str]) -> None:
    """Raise for a plan that no longer holds."""
    if wrong:
        raise WrongUse(
            f"plan {origin}",
            found="it is stale: " + "; ".join(wrong),
            cure=f"Plan again: trimtab plan {plan.job}{_devices(plan)} --out {origin}",
        )


def _devices(plan: Plan) -> str:
    """The devices of a plan as --on takes them; nothing where they are on several nodes.

    The GPUs may be others by now: without --on, a plan is for those that are here.
    """
    names = [one.name for one in plan.places]
    if not names or any(one.node for one in plan.places):
        return ""
    counted = "+".join(f"{names.count(one)}x{one}" for one in dict.fromkeys(names))
    return f" --on {quote(counted)}"
