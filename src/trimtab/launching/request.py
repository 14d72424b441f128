"""Build the launch that was requested: torchrun, Slurm, a manifest, `accelerate launch` or `deepspeed`.

Pure functions: facts about the machine are passed in. `accelerate launch` and `deepspeed` run your own
script; they get processes, nodes, precision, compiling and sharding from the plan. The batch is the
script's own: `trimtab apply` writes it into the config.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import WrongUse
from trimtab.launching.commands import build_command_launch, build_command_sbatch, refuse_kind
from trimtab.launching.job_spec import (
    PROGRAM,
    JobSpec,
    build_environment,
    build_train_command,
    name_command,
)
from trimtab.launching.manifests import build_indexed_job, build_sky_task, build_train_job
from trimtab.launching.quoting import check_path
from trimtab.launching.resources import compute_resources
from trimtab.launching.slurm import build_sbatch_launch
from trimtab.spec import Launch, LaunchKind
from trimtab.spec.base import Noun, check_minimum
from trimtab.spec.precision import BFLOAT16, FLOAT16
from trimtab.strategies import strategy_of
from trimtab.training.task import choose_run_folder
from trimtab.training.torchrun import (
    LOGS_FOLDER,
    RESTARTS,
    Rendezvous,
    TorchrunOptions,
    build_arguments,
    make_run_id,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.launching.defaults import LaunchDefaults
    from trimtab.launching.slurm import SlurmCluster
    from trimtab.spec import Plan


def build_local_launch(
    job_spec: JobSpec,
    defaults: LaunchDefaults,
    *,
    cores: int | None,
    here: Mapping[str, str],
    rendezvous: str | None = None,
) -> Launch:
    """Build the command to run here; over several nodes, run the same one on each."""
    resources = job_spec.resources
    given = build_environment(job_spec, cores=cores, offline=defaults.offline, here=here)
    given |= {name: (value, "trimtab.toml says so") for name, value in defaults.environment.items()}
    # What the user has set stays, but for the devices, which follow from it.
    kept = {
        name
        for name in given
        if name in here and name != "CUDA_VISIBLE_DEVICES" and name not in defaults.environment
    }
    given = {name: variable for name, variable in given.items() if name not in kept}
    fleet = TorchrunOptions(
        procs=resources.procs,
        nodes=resources.nodes_text,
        rendezvous=rendezvous or "",
        logs=f"{job_spec.out}/{LOGS_FOLDER}",
        restarts=RESTARTS if job_spec.restarts is None else job_spec.restarts,
    )
    several = resources.nodes > 1
    torchrun = resources.procs > 1 or rendezvous is not None
    notes = [f"run it on each of the {resources.nodes} nodes, {rendezvous} included"] if several else []
    notes += [f"{name} stays {here[name]}, as it is set" for name in sorted(kept)]
    return Launch(
        kind=LaunchKind.TORCHRUN,
        command=tuple(build_train_command(job_spec, rendezvous=rendezvous)),
        environment={name: value for name, (value, _) in given.items()},
        why={name: why for name, (_, why) in given.items()},
        starts=("torchrun", *build_arguments(fleet, Path("TASK"), make_run_id(job_spec.out)))
        if torchrun
        else (),
        out=job_spec.out,
        notes=tuple(notes),
    )


MIXED = {BFLOAT16: "bf16", FLOAT16: "fp16", None: "no"}
"""The dtypes of autocast in the words of accelerate."""
PORT = 29500


def build_script_launch(  # noqa: PLR0913 - a job spec, a script and where it runs
    kind: LaunchKind,
    job_spec: JobSpec,
    defaults: LaunchDefaults,
    *,
    script: str | None,
    rendezvous: str | None,
    cores: int | None,
    here: Mapping[str, str],
) -> Launch:
    """Build the command line that runs your own script."""
    if not script:
        raise WrongUse(
            f"--{kind}",
            found="no script is named",
            cure="Give your own with --script train.py, and its words after --.",
        )
    check_path("--script", script)
    strategy = strategy_of(job_spec.plan.choice)
    if not strategy.is_in_frameworks:
        raise WrongUse(
            f"--{kind} with a plan of strategy {strategy.word}",
            found=f"{kind} has nothing like it",
            cure="Plan again with --pin strategy=ddp or fsdp, or launch `trimtab train` without this option.",
        )
    words = (
        _accelerate_words(job_spec, rendezvous)
        if kind is LaunchKind.ACCELERATE
        else _deepspeed_words(job_spec, rendezvous)
    )
    given = build_environment(job_spec, cores=cores, offline=defaults.offline, here=here)
    given |= {name: (value, "trimtab.toml says so") for name, value in defaults.environment.items()}
    choice = job_spec.plan.choice
    batch = f"micro-batch {choice.micro_batch}, {choice.accumulation} accumulated"
    return Launch(
        kind=kind,
        command=(*words, script, *job_spec.extra),
        environment={name: value for name, (value, _) in given.items()},
        why={name: why for name, (_, why) in given.items()},
        notes=(f"the batch is the script's own ({batch}): `trimtab apply PLAN --to CONFIG` writes it",),
    )


def _accelerate_words(job_spec: JobSpec, rendezvous: str | None) -> list[str]:
    """Build the `accelerate launch` command. Source: `accelerate launch --help`."""
    resources, choice = job_spec.resources, job_spec.plan.choice
    ranks = resources.nodes * resources.procs
    words = ["accelerate", "launch", f"--num_processes={ranks}", f"--num_machines={resources.nodes}"]
    words.append(f"--mixed_precision={MIXED[choice.dtypes.autocast]}")
    words.append(f"--dynamo_backend={'inductor' if choice.compile else 'no'}")
    if not resources.gpus:
        words.append("--cpu")
    elif flags := strategy_of(choice).accelerate_flags:
        words += flags
    elif ranks > 1:
        words.append("--multi_gpu")
    if resources.nodes > 1:
        place = _read_meeting(rendezvous, resources.nodes)
        words += [f"--main_process_ip={place.host}", f"--main_process_port={place.port}"]
        words += ["--rdzv_backend=c10d"]
    return words


def _deepspeed_words(job_spec: JobSpec, rendezvous: str | None) -> list[str]:
    """Build the `deepspeed` command. Source: https://www.deepspeed.ai/getting-started."""
    resources = job_spec.resources
    words = ["deepspeed", f"--num_gpus={resources.procs}"]
    if resources.nodes > 1:
        place = _read_meeting(rendezvous, resources.nodes)
        words += [f"--num_nodes={resources.nodes}", "--hostfile=hostfile"]
        words += [f"--master_addr={place.host}", f"--master_port={place.port}"]
    return words


def _read_meeting(rendezvous: str | None, nodes: int) -> Rendezvous:
    if rendezvous is None:
        raise WrongUse(
            f"a plan for {nodes} nodes",
            found="they need a place to meet",
            cure=f"Give --rendezvous HOST:{PORT}, where HOST is one of them.",
        )
    return Rendezvous.parse(rendezvous)


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
USED_BY = {
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
    """The options of a launch."""

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
        return check_minimum(1, steps=self.steps) + check_minimum(0, restarts=self.restarts)


def refuse_unused(kind: LaunchKind, given: Mapping[str, str | None]) -> None:
    """Raise for an option that has no effect on this kind of launch."""
    for name, value in given.items():
        if value is not None and kind not in USED_BY[name]:
            kinds = " or ".join(f"--{other}" for other in USED_BY[name])
            raise WrongUse(
                f"--{name} {value}",
                found=f"it means nothing to a launch by {kind}",
                cure=f"Leave it out, or give {kinds} with it.".replace("--torchrun", "no other launcher"),
            )


def build_job_spec(
    order: LaunchOrder, plan: Plan, plan_file: str | None, defaults: LaunchDefaults
) -> JobSpec:
    """Build the job spec for a plan that is in a file or not yet."""
    name = plan.job if plan.script is None else name_command(plan.script.words)
    out = str(choose_run_folder(order.out, name))
    if order.compares:
        out += f"-{plan.choice.gpus}gpu{'s' * (plan.choice.gpus > 1)}"
    check_path("--out", out)
    shared = order.kind is LaunchKind.SLURM
    absolute = order.kind in (LaunchKind.SLURM, LaunchKind.SKY)
    file = plan_file or f"{out}/{PLAN}"
    steps = () if order.steps is None or plan.script is not None else ("--steps", str(order.steps))
    # Nodes share files with this machine; what is activated there brings its own program.
    program = (PROGRAM,) if defaults.activate or not shared else (order.python, "-m", PROGRAM)
    return JobSpec(
        plan=plan,
        plan_file=str(Path(order.folder, file)) if absolute else file,
        resources=compute_resources(plan, nodes=order.nodes, steps=order.steps),
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
    defaults: LaunchDefaults,
    *,
    site: SlurmCluster | None = None,
    silence: str = "",
    cores: int | None = None,
    here: Mapping[str, str],
) -> Launch:
    """Build the launch for a plan."""
    if plan.script is not None:
        refuse_kind(order.kind, order.extra)
    what = build_job_spec(order, plan, plan_file, defaults)
    files = {} if plan_file is not None else {what.plan_file: plan.to_json(indent=2) + "\n"}
    if order.kind is LaunchKind.SLURM:
        script = f"{what.out}/{SCRIPTS[order.kind]}"
        build = build_sbatch_launch if plan.script is None else build_command_sbatch
        launch = build(what, defaults, site, script_file=script, time=order.time, silence=silence)
    elif plan.script is not None:
        launch = build_command_launch(what, defaults, cores=cores, here=here)
        files = {}
    elif order.kind in MANIFESTS:
        script = f"{what.out}/{SCRIPTS[order.kind]}"
        launch = MANIFESTS[order.kind](what, defaults, script_file=script)
        # A manifest carries the plan itself.
        files = files if order.kind is LaunchKind.SKY else {}
    elif order.kind in OTHERS:
        launch = build_script_launch(
            order.kind,
            what,
            defaults,
            script=order.script,
            rendezvous=order.rendezvous,
            cores=cores,
            here=here,
        )
        files = {}
    else:
        if what.resources.nodes > 1 and not order.rendezvous:
            raise WrongUse(
                f"a plan for {what.resources.nodes} nodes",
                found="they need a place to meet",
                cure="Give --rendezvous HOST:PORT, where HOST is one of them; or --slurm, which finds one.",
            )
        launch = build_local_launch(what, defaults, cores=cores, here=here, rendezvous=order.rendezvous)
    return launch.replace(files={**files, **launch.files})
