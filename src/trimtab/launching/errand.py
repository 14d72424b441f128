"""What is to be trained where, and the words of `trimtab train` that do it on every node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse, shortened
from trimtab.jobs.load import FOLDER
from trimtab.launching.need import Need
from trimtab.launching.quoting import check_path
from trimtab.spec import Allocator, Plan
from trimtab.spec.base import Noun
from trimtab.training.precision import allocator_variables
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PROGRAM = "trimtab"
SHAPES = ("seq", "lora")
"""Options of hf:FOLDER that have a name of their own on the command line."""


class Errand(Noun, frozen=True, kw_only=True):
    """A plan, its need, and where the run is kept."""

    plan: Plan
    plan_file: str
    """Where the nodes find the plan."""
    need: Need
    out: str
    """The run's folder, which all nodes share."""
    folder: str
    """Where relative names of files hold."""
    program: tuple[str, ...] = (PROGRAM,)
    """How trimtab is started there."""
    restarts: int | None = None
    extra: tuple[str, ...] = ()
    """Further options of `trimtab train`."""

    @property
    def title(self) -> str:
        """What people call it."""
        return f"{self.plan.job}: {self.plan.choice.strategy}, {_count(self.need)}"

    def faults(self) -> list[str]:
        """It can be started, and what is kept has a place."""
        return [
            f"{name} is empty"
            for name in ("program", "plan_file", "out", "folder")
            if not getattr(self, name)
        ]


def _count(need: Need) -> str:
    each = f"{need.procs} {'GPU' if need.gpus else 'process'}"
    each += ("s" if need.gpus else "es") * (need.procs > 1)
    return f"{need.nodes} nodes of {each}" if need.nodes > 1 else each


def train_words(errand: Errand, *, nodes: str | None = None, rendezvous: str | None = None) -> list[str]:
    """The command that every node runs: it starts torchrun with the node's processes.

    `nodes` and `rendezvous` may be words of a script's own, such as "$address:$port".
    """
    for what, path in (("plan", errand.plan_file), ("--out", errand.out), ("job", errand.plan.job)):
        check_path(what, path)
    meeting = [] if rendezvous is None else ["--nodes", nodes or errand.need.nodes_text]
    meeting += [] if rendezvous is None else ["--rendezvous", rendezvous]
    restarts = [] if errand.restarts is None else ["--restarts", str(errand.restarts)]
    return [
        *errand.program,
        "train",
        errand.plan.job,
        "--plan",
        errand.plan_file,
        "--out",
        errand.out,
        "--procs",
        str(errand.need.procs),
        *meeting,
        *restarts,
        *_shaped(errand.plan.job, errand.plan.options),
        *errand.extra,
    ]


def _shaped(job: str, options: dict[str, Any]) -> Iterator[str]:
    """What was set on the job, as the command line says it."""
    for name, value in options.items():
        if not isinstance(value, str | int | float):
            raise WrongUse(
                f"the job's {name}",
                found=f"it is {shortened(repr(value))}, which no command line can say",
                cure="Set it in the job's own code, and plan again.",
            )
        if job.startswith(FOLDER) and name in SHAPES:
            yield from (f"--{name}", str(value))
        elif job.startswith(FOLDER) and name == "frozen":
            yield from ["--frozen"] if value else []
        else:
            yield from ("--set", f"{name}={value}")


def variables(
    errand: Errand, *, cores: int | None, offline: bool, here: Mapping[str, str] | None = None
) -> dict[str, tuple[str, str]]:
    """Variables of the run, each with its reason.

    `cores` are those of a node that the run may use; `here` is this process's own environment where the run
    starts on this machine, and None where a scheduler hands out the devices.
    """
    need, choice = errand.need, errand.plan.choice
    found: dict[str, tuple[str, str]] = {}
    if choice.allocator is Allocator.EXPANDABLE:
        for name, value in allocator_variables(choice, here or {}).items():
            found[name] = value, "the plan's allocator: expandable segments"
    if cores:
        threads = max(1, cores // need.procs)
        found["OMP_NUM_THREADS"] = str(threads), _threads(cores, need.procs)
    if need.gpus and need.gpus * need.nodes > 1:
        found["NCCL_DEBUG"] = "WARN", "NCCL says why, where it fails"
    if offline or errand.plan.job.startswith(FOLDER):
        why = "trimtab.toml says offline" if offline else "all that the job needs is in its folder"
        found["HF_HUB_OFFLINE"] = "1", why
    if here is not None and need.gpus:
        found["CUDA_VISIBLE_DEVICES"] = visible(errand.plan, here), "the devices that the plan chose"
    return found


def visible(plan: Plan, here: Mapping[str, str]) -> str:
    """CUDA_VISIBLE_DEVICES for the ranks of this node, in the order of ranks.

    A plan counts devices as the process that made it saw them, so that what is hidden now stays hidden.
    """
    first = plan.places[0].node
    numbers = [place.device for place in plan.places if place.node == first]
    shown = [one.strip() for one in here.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    if not shown:
        return ",".join(map(str, numbers))
    if max(numbers) >= len(shown):
        raise WrongUse(
            f"CUDA_VISIBLE_DEVICES={here['CUDA_VISIBLE_DEVICES']}",
            found=f"it shows {plural(len(shown), 'device')}, and the plan uses {len(numbers)}",
            cure="Unset it, or plan again with it set.",
        )
    return ",".join(shown[number] for number in numbers)


def _threads(cores: int, procs: int) -> str:
    """Why so many threads.

    >>> _threads(5, 1)
    '5 cores over 1 process a node'
    """
    of_cores, of_procs = "core" if cores == 1 else "cores", "process" if procs == 1 else "processes"
    return f"{cores} {of_cores} over {procs} {of_procs} a node"
