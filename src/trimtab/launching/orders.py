"""What was asked of a launch, and the launch that answers it. Pure: what is outside is passed in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import WrongUse
from trimtab.launching.errand import PROGRAM, JobSpec
from trimtab.launching.kubernetes import build_indexed_job, build_train_job
from trimtab.launching.local import build_local_launch
from trimtab.launching.need import compute_resources
from trimtab.launching.quoting import check_path
from trimtab.launching.scripts import build_script_launch
from trimtab.launching.sky import build_sky_task
from trimtab.launching.slurm import build_sbatch_launch
from trimtab.spec import LaunchKind
from trimtab.spec.base import Noun, below
from trimtab.training.task import place

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.launching.habits import LaunchDefaults
    from trimtab.launching.site import SlurmCluster
    from trimtab.spec import Launch, Plan

PLAN = "launch-plan.json"
"""In the run's folder; plan.json there is the one that the run is under."""
SCRIPTS = {
    LaunchKind.SLURM: "launch.sbatch",
    LaunchKind.KUBERNETES: "launch.yaml",
    LaunchKind.KUBEFLOW: "launch.yaml",
    LaunchKind.SKY: "launch.sky.yaml",
}
MANIFESTS = {
    LaunchKind.KUBERNETES: build_indexed_job,
    LaunchKind.KUBEFLOW: build_train_job,
    LaunchKind.SKY: build_sky_task,
}
OTHERS = (LaunchKind.ACCELERATE, LaunchKind.DEEPSPEED)
HEARD_BY = {
    "partition": (LaunchKind.SLURM,),
    "account": (LaunchKind.SLURM,),
    "qos": (LaunchKind.SLURM,),
    "time": (LaunchKind.SLURM,),
    "activate": (LaunchKind.SLURM,),
    "rendezvous": (LaunchKind.TORCHRUN, LaunchKind.ACCELERATE, LaunchKind.DEEPSPEED),
    "image": (LaunchKind.KUBERNETES, LaunchKind.KUBEFLOW, LaunchKind.SKY),
    "script": (LaunchKind.ACCELERATE, LaunchKind.DEEPSPEED),
}
"""Options that mean something to some kinds only."""


class LaunchOrder(Noun, frozen=True, kw_only=True):
    """A launch as it was asked for."""

    kind: LaunchKind = LaunchKind.TORCHRUN
    nodes: str | None = None
    rendezvous: str | None = None
    restarts: int | None = None
    out: str | None = None
    steps: int | None = None
    time: str | None = None
    script: str | None = None
    extra: tuple[str, ...] = ()
    folder: str
    python: str = ""
    """The interpreter that runs now, for machines that share its files."""
    compares: bool = False
    """Whether there is one for each of several numbers of GPUs."""

    def faults(self) -> list[str]:
        """Counts are possible."""
        return below(1, steps=self.steps) + below(0, restarts=self.restarts)


def refuse_unused(kind: LaunchKind, given: Mapping[str, str | None]) -> None:
    """Raise for an option that this kind of launch would leave without effect."""
    for name, value in given.items():
        if value is not None and kind not in HEARD_BY[name]:
            kinds = " or ".join(f"--{other}" for other in HEARD_BY[name])
            raise WrongUse(
                f"--{name} {value}",
                found=f"it means nothing to a launch by {kind}",
                cure=f"Leave it out, or give {kinds} with it.".replace("--torchrun", "no other launcher"),
            )


def build_job_spec(order: LaunchOrder, plan: Plan, plan_file: str | None, habits: LaunchDefaults) -> JobSpec:
    """What is to be trained where, for a plan that is in a file or not yet."""
    out = str(place(order.out, plan.job))
    if order.compares:
        out += f"-{plan.choice.gpus}gpu{'s' * (plan.choice.gpus > 1)}"
    check_path("--out", out)
    shared = order.kind is LaunchKind.SLURM
    absolute = order.kind in (LaunchKind.SLURM, LaunchKind.SKY)
    file = plan_file or f"{out}/{PLAN}"
    steps = () if order.steps is None else ("--steps", str(order.steps))
    # Nodes share files with this machine; what is activated there brings its own program.
    program = (PROGRAM,) if habits.activate or not shared else (order.python, "-m", PROGRAM)
    return JobSpec(
        plan=plan,
        plan_file=str(Path(order.folder, file)) if absolute else file,
        need=compute_resources(plan, nodes=order.nodes, steps=order.steps),
        out=str(Path(order.folder, out)) if shared else out,
        folder=order.folder,
        program=program,
        restarts=order.restarts,
        extra=(*steps, *order.extra),
    )


def build_launch(  # noqa: PLR0913 - an order and the world it is for
    order: LaunchOrder,
    plan: Plan,
    plan_file: str | None,
    habits: LaunchDefaults,
    *,
    site: SlurmCluster | None = None,
    silence: str = "",
    cores: int | None = None,
    here: Mapping[str, str],
) -> Launch:
    """The launch for a plan."""
    what = build_job_spec(order, plan, plan_file, habits)
    files = {} if plan_file is not None else {what.plan_file: plan.to_json(indent=2) + "\n"}
    if order.kind is LaunchKind.SLURM:
        script = f"{what.out}/{SCRIPTS[order.kind]}"
        found = build_sbatch_launch(what, habits, site, script_file=script, time=order.time, silence=silence)
    elif order.kind in MANIFESTS:
        script = f"{what.out}/{SCRIPTS[order.kind]}"
        found = MANIFESTS[order.kind](what, habits, script_file=script)
        # A manifest carries the plan itself.
        files = files if order.kind is LaunchKind.SKY else {}
    elif order.kind in OTHERS:
        found = build_script_launch(
            order.kind,
            what,
            habits,
            script=order.script,
            rendezvous=order.rendezvous,
            cores=cores,
            here=here,
        )
        files = {}
    else:
        if what.need.nodes > 1 and not order.rendezvous:
            raise WrongUse(
                f"a plan for {what.need.nodes} nodes",
                found="they need a place to meet",
                cure="Give --rendezvous HOST:PORT, where HOST is one of them; or --slurm, which finds one.",
            )
        found = build_local_launch(what, habits, cores=cores, here=here, rendezvous=order.rendezvous)
    return found.replace(files={**files, **found.files})
