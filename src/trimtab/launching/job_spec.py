"""The job to launch: a plan, its resources and folders, and the `trimtab train` command for every node."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse, shorten
from trimtab.jobs.registry import FOLDER
from trimtab.launching.quoting import check_path
from trimtab.launching.resources import Resources
from trimtab.spec import Allocator, Plan
from trimtab.spec.base import Noun
from trimtab.training.torchrun import allocator_variables
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PROGRAM = "trimtab"
SHAPES = ("seq", "lora")
"""Options of hf:FOLDER that have a name of their own on the command line."""


class JobSpec(Noun, frozen=True, kw_only=True):
    """A plan, its resources, and the folder of the run."""

    plan: Plan
    plan_file: str
    """Where the nodes find the plan."""
    resources: Resources
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
    def name(self) -> str:
        """The name for a scheduler: the job, or the script of a training command."""
        script = self.plan.script
        return self.plan.job if script is None else name_command(script.words)

    @property
    def title(self) -> str:
        """The name for people."""
        script = self.plan.script
        what = self.plan.job if script is None else script.command
        return f"{what}: {self.plan.choice.strategy}, {_count_processes(self.resources)}"

    def faults(self) -> list[str]:
        """It can be started, and what is kept has a place."""
        return [
            f"{name} is empty"
            for name in ("program", "plan_file", "out", "folder")
            if not getattr(self, name)
        ]


def name_command(words: tuple[str, ...]) -> str:
    """Return the name of a training command for its folder: that of its script.

    >>> name_command(("torchrun", "--nproc-per-node", "4", "src/train.py", "--lr", "1"))
    'train'
    """
    script = next((word for word in words if word.endswith(".py")), "")
    module = next((second for first, second in pairwise(words) if first == "-m"), "")
    return Path(script).stem if script else module.rpartition(".")[2] or "command"


def _count_processes(resources: Resources) -> str:
    each = f"{resources.procs} {'GPU' if resources.gpus else 'process'}"
    each += ("s" if resources.gpus else "es") * (resources.procs > 1)
    return f"{resources.nodes} nodes of {each}" if resources.nodes > 1 else each


def build_train_command(
    job_spec: JobSpec, *, nodes: str | None = None, rendezvous: str | None = None
) -> list[str]:
    """Build the command that every node runs: it starts torchrun with the node's processes.

    `nodes` and `rendezvous` may be words of a script's own, such as "$address:$port".
    """
    for what, path in (("plan", job_spec.plan_file), ("--out", job_spec.out), ("job", job_spec.plan.job)):
        check_path(what, path)
    meeting = [] if rendezvous is None else ["--nodes", nodes or job_spec.resources.nodes_text]
    meeting += [] if rendezvous is None else ["--rendezvous", rendezvous]
    restarts = [] if job_spec.restarts is None else ["--restarts", str(job_spec.restarts)]
    return [
        *job_spec.program,
        "train",
        job_spec.plan.job,
        "--plan",
        job_spec.plan_file,
        "--out",
        job_spec.out,
        "--procs",
        str(job_spec.resources.procs),
        *meeting,
        *restarts,
        *_option_words(job_spec.plan.job, job_spec.plan.options),
        *job_spec.extra,
    ]


def _option_words(job: str, options: dict[str, Any]) -> Iterator[str]:
    """Yield the options of the job as command-line words."""
    for name, value in options.items():
        if not isinstance(value, str | int | float):
            raise WrongUse(
                f"the job's {name}",
                found=f"it is {shorten(repr(value))}, which no command line can say",
                cure="Set it in the job's own code, and plan again.",
            )
        if job.startswith(FOLDER) and name in SHAPES:
            yield from (f"--{name}", str(value))
        elif job.startswith(FOLDER) and name == "frozen":
            yield from ["--frozen"] if value else []
        else:
            yield from ("--set", f"{name}={value}")


def build_environment(
    job_spec: JobSpec, *, cores: int | None, offline: bool, here: Mapping[str, str] | None = None
) -> dict[str, tuple[str, str]]:
    """Return the variables of the run, each with its reason.

    `cores` are those of a node that the run may use; `here` is this process's own environment where the run
    starts on this machine, and None where a scheduler assigns the devices.
    """
    resources, choice = job_spec.resources, job_spec.plan.choice
    variables: dict[str, tuple[str, str]] = {}
    if choice.allocator is Allocator.EXPANDABLE:
        for name, value in allocator_variables(choice, here or {}).items():
            variables[name] = value, "the plan's allocator: expandable segments"
    if cores:
        threads = max(1, cores // resources.procs)
        variables["OMP_NUM_THREADS"] = str(threads), _explain_threads(cores, resources.procs)
    if resources.gpus and resources.gpus * resources.nodes > 1:
        variables["NCCL_DEBUG"] = "WARN", "NCCL says why, where it fails"
    if offline or job_spec.plan.job.startswith(FOLDER):
        why = "trimtab.toml says offline" if offline else "all that the job needs is in its folder"
        variables["HF_HUB_OFFLINE"] = "1", why
    if here is not None and resources.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = (
            visible_devices(job_spec.plan, here),
            "the devices that the plan chose",
        )
    return variables


def visible_devices(plan: Plan, here: Mapping[str, str]) -> str:
    """Return CUDA_VISIBLE_DEVICES for the ranks of this node, in the order of ranks.

    A plan counts devices as the process that made it saw them, so that what is hidden now stays hidden.
    """
    first = plan.places[0].node
    numbers = [place.device for place in plan.places if place.node == first]
    shown = [device.strip() for device in here.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()]
    if not shown:
        return ",".join(map(str, numbers))
    if max(numbers) >= len(shown):
        raise WrongUse(
            f"CUDA_VISIBLE_DEVICES={here['CUDA_VISIBLE_DEVICES']}",
            found=f"it shows {plural(len(shown), 'device')}, and the plan uses {len(numbers)}",
            cure="Unset it, or plan again with it set.",
        )
    return ",".join(shown[number] for number in numbers)


def _explain_threads(cores: int, procs: int) -> str:
    """Explain the number of threads.

    >>> _explain_threads(5, 1)
    '5 cores over 1 process a node'
    """
    of_cores, of_procs = "core" if cores == 1 else "cores", "process" if procs == 1 else "processes"
    return f"{cores} {of_cores} over {procs} {of_procs} a node"
