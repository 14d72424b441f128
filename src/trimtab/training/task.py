"""Task: what one `trimtab train` is asked to do, as its processes tell each other."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from trimtab.catalog.clusters import assume_network_link
from trimtab.errors import BrokenFile, JobFailed, TrimtabError, WrongUse
from trimtab.planner import batch_loss_rules
from trimtab.planner.batch_split import find_split, list_splits
from trimtab.planner.pins import find_contradictions
from trimtab.planner.space import format_pin
from trimtab.probe.detect import detect
from trimtab.spec import (
    Band,
    Estimate,
    Footprint,
    Mesh,
    OptimizerImplementation,
    Plan,
    Policy,
    Precision,
    Reason,
    Recompute,
    Setting,
    Strategy,
)
from trimtab.spec.base import Noun, check_minimum
from trimtab.strategies import STRATEGIES, strategy_of, usual_strategy
from trimtab.training.fault_injection import Fault
from trimtab.training.rank_files import LAUNCHER_VARIABLES
from trimtab.training.signals import exit_code
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trimtab.spec import Cluster, Workload
    from trimtab.training.process_group import World


CHECKPOINT_S = 600.0
CHECKPOINTS_KEPT = 3
RUNS_FOLDER = Path("runs")
"""Where runs are kept that are given no folder."""


class TrainTask(Noun, frozen=True, kw_only=True):
    """A job, a plan, where to keep the run, and how far to go."""

    job: str
    """As load() finds it."""
    options: dict[str, Any] = {}
    """Members of the job that were set from outside."""
    plan: Plan | None = None
    """None in a rank that learns it from rank 0."""
    out: str
    begin_from: str = ""
    """The folder of a run whose weights this one begins with, as a stage of a curriculum does."""
    steps: int | None = None
    """Optimizer steps in all; None: to the job's horizon."""
    seed: int = 0
    checkpoint_steps: int | None = None
    """Steps between checkpoints, beside the time between them."""
    checkpoint_s: float = CHECKPOINT_S
    keep: int = CHECKPOINTS_KEPT
    """Checkpoints that are kept beside the best."""
    evaluate_steps: int | None = None
    """Steps between evaluations; None: at the end of every epoch."""
    every: int | None = None
    """Steps between printed lines; None: by the length of the run."""
    json: bool = False
    faults_due: tuple[Fault, ...] = ()
    """Of a drill."""
    timeout_min: float = 10.0
    """How long a collective may wait for a rank."""

    def faults(self) -> list[str]:
        """Counts start at one."""
        return [
            *check_minimum(
                1,
                steps=self.steps,
                checkpoint_steps=self.checkpoint_steps,
                evaluate_steps=self.evaluate_steps,
                every=self.every,
                keep=self.keep,
            ),
            *check_minimum(0, seed=self.seed, checkpoint_s=self.checkpoint_s),
        ]


class RunEnding(Noun, frozen=True, kw_only=True):
    """How a run, or this attempt at it, ended."""

    step: int
    """Optimizer steps that the run has taken."""
    loss: float | None = None
    """Of the last step."""
    out: str
    """The run's folder."""
    asked: str = ""
    """The signal that ended it before its time; empty where it is done."""

    @property
    def exit_code(self) -> int:
        """What the command line leaves with: 0, or 128 and the signal's number."""
        return exit_code(Signals[self.asked]) if self.asked else 0


def check_counts(**counts: float | None) -> None:
    """Raise for a count of the command line that cannot be; some may be 0."""
    for name, value in counts.items():
        least = 0 if name in {"seed", "checkpoint_minutes"} else 1
        if value is not None and not least <= value < float("inf"):  # false for not-a-number too
            option = f"--{name.replace('_', '-')}"
            found = f"it is below {least}" if value < least else "it is no finite number"
            raise WrongUse(f"{option} {value:g}", found=found, cure=f"Give {option} at least {least}.")


def check_trainable(job: Any, name: str) -> None:
    """Raise for a job that can be planned and not trained."""
    if not callable(getattr(job, "dataset", None)):
        raise JobFailed(
            f"job {name}",
            found="it has no dataset(), which planning does without and training does not",
            cure="Give it dataset(): a torch dataset whose items collate to what batch() returns.",
        )


def choose_run_folder(out: Path | str | None, job: str) -> Path:
    """The folder of a run: the one given, or one by the name of the job.

    >>> place(None, "work/job.py:MyJob").as_posix(), place(None, "slm:tiny").as_posix()
    ('runs/job-MyJob', 'runs/slm-tiny')
    """
    if out is not None:
        return Path(out)
    file, _, attribute = job.rpartition(":")
    stem = Path(file).stem if file.endswith(".py") else Path(file).name if file else ""
    name = "-".join(part for part in (stem, Path(attribute).name) if part)
    return RUNS_FOLDER / "".join(one if one.isalnum() or one in "-._" else "-" for one in name)


# The same global batch on another number of processes, and the settings of machines without a GPU.


NOT_ESTIMATED = "nothing was estimated: the memory and the speed of a CPU are not predicted"


def build_cpu_plan(
    job: str, workload: Workload, procs: int, pins: Mapping[str, Any], options: dict[str, Any]
) -> Plan:
    """A plan for processes without a GPU: the batch divided, in fp32, unless pins say otherwise."""
    choice = build_cpu_setting(workload, procs, pins)
    return Plan(
        job=job,
        options=options,
        choice=choice,
        estimate=Estimate(
            allocated_bytes=0,
            reserved_bytes=0,
            process_bytes=0,
            parts=Footprint(),
            band=Band(low_bytes=0, high_bytes=0),
            assumptions=(NOT_ESTIMATED,),
        ),
        policy=Policy(pins=dict(pins)),
        reasons=(
            Reason(subject="device", value="cpu", why="this process may use no GPU"),
            Reason(
                subject="micro_batch",
                value=str(choice.micro_batch),
                why=f"the global batch of {workload.global_batch} over {choice.data_parallel} "
                f"data-parallel process{'es' * (choice.data_parallel > 1)}, in "
                f"{plural(choice.accumulation, 'part')}",
            ),
        ),
        workload=workload,
        recommendation="Trains on the CPU: there is no GPU that this process may use.",
    )


def repeat_node(cluster: Cluster, nodes: int) -> Cluster:
    """A cluster of so many nodes like this one: what a rank knows of the machines it cannot see."""
    if nodes <= 1:
        return cluster
    node, within = cluster.nodes[0], [link for link in cluster.links if link.node == 0]
    joined = [link.replace(node=number) for number in range(nodes) for link in within]
    models = {device.model or device.name for device in node.devices}
    return cluster.replace(
        nodes=tuple(node.replace(name=f"{node.name}-{number}") for number in range(nodes)),
        links=(*joined, assume_network_link(models, len(node.devices))),
    )


def build_cpu_setting(workload: Workload, procs: int, pins: Mapping[str, Any]) -> Setting:
    """How processes without a GPU share the work."""
    strategy = Strategy(pins.get("strategy", usual_strategy(procs)[0]))
    wrong = find_contradictions({**pins, "gpus": procs, "strategy": strategy}, workload, procs)
    if pins.get("gpus", procs) != procs:
        wrong.append((f"gpus={pins['gpus']}, and there are {procs} processes", f"use --procs {pins['gpus']}"))
    if wrong:
        what, cure = wrong[0]
        given = " ".join(f"--pin {key}={format_pin(value)}" for key, value in pins.items())
        raise WrongUse(
            given or f"--procs {procs}",
            found=what.replace("GPUs", "processes").replace("GPU", "process"),
            cure=cure.replace("GPUs", "processes").capitalize() + ".",
        )
    rules = STRATEGIES[strategy]
    mesh = rules.mesh(procs, branches=len(workload.branches))
    _refuse_cut(workload, strategy, mesh, pins)
    least = rules.least_rounds(mesh)
    micro, rounds = _split_batch(workload.global_batch, mesh.data_parallel, pins, least=least)
    return Setting(
        strategy=strategy,
        mesh=mesh,
        micro_batch=micro,
        accumulation=rounds,
        global_batch=workload.global_batch,
        precision=Precision(pins.get("precision", Precision.FP32)),
        recompute=Recompute(pins.get("recompute", Recompute.NONE)),
        compile=bool(pins.get("compile", False)),
        optimizer=OptimizerImplementation(pins.get("optimizer", OptimizerImplementation.FUSED)),
        workers=int(pins.get("workers", 0)),
        sync_batchnorm=bool(pins.get("sync_batchnorm", False)),
    )


def _refuse_cut(workload: Workload, strategy: Strategy, mesh: Mesh, pins: Mapping[str, Any]) -> None:
    """Raise where the batch would be cut, and the job says that it cannot be."""
    refused = batch_loss_rules.explain_refusal(workload, strategy, mesh)
    cuts_it = (
        pins.get("micro_batch", workload.global_batch) < workload.global_batch
        or pins.get("accumulation", 1) > 1
    )
    if not refused and workload.is_indivisible and cuts_it:
        refused = batch_loss_rules.explain_uncut_batch(workload)
    if refused:
        given = " ".join(f"--pin {key}={format_pin(value)}" for key, value in pins.items())
        given = given or f"--procs {mesh.size}"
        raise WrongUse(
            given, found=refused.replace("GPUs", "processes"), cure=batch_loss_rules.suggest_fix(workload)
        )


def _split_batch(
    global_batch: int, data_parallel: int, pins: Mapping[str, Any], *, least: int
) -> tuple[int, int]:
    """The largest micro-batch that agrees with the pins and makes so many rounds, where that can be."""
    if "micro_batch" in pins:
        found = find_split(global_batch, data_parallel, micro_batch=int(pins["micro_batch"]))
        if found is not None:
            return found
    if "accumulation" in pins:
        wanted = int(pins["accumulation"])
        fitting = [cut for cut in list_splits(global_batch, data_parallel) if cut[1] == wanted]
        if fitting:
            return fitting[0]
        raise WrongUse(
            f"--pin accumulation={wanted}",
            found=f"a share of the global batch {global_batch} cannot be cut into that many even parts",
            cure=f"Pin one of {', '.join(str(cut[1]) for cut in list_splits(global_batch, data_parallel))}.",
        )
    known = list_splits(global_batch, data_parallel)
    return next((one for one in known if one[1] >= least), known[-1])


def divide_setting(setting: Setting, procs: int, *, nodes: int = 1, branches: int = 0) -> tuple[Setting, str]:
    """A setting for another number of processes, with the same global batch, and what was done in words.

    The micro-batch never grows, so that what fitted one device still does where weights are replicated; a
    strategy that the new number does not allow gives way to its nearest kin.
    """
    strategy, mesh = strategy_of(setting).resized(setting.mesh, procs, nodes=nodes, branches=branches)
    share = -(-setting.global_batch // mesh.data_parallel)
    micro = min(setting.micro_batch, share)
    rounds = -(-share // micro)
    # As even as that many rounds allow.
    micro = -(-share // rounds)
    found = setting.replace(
        strategy=strategy, mesh=mesh, micro_batch=micro, accumulation=-(-share // micro), shares=()
    )
    words = f"{setting.gpus} -> {procs} processes"
    if found.compile and found.sync_batchnorm and procs > 1:
        found = found.replace(compile=False)
        words += ", not compiled any more, for the sake of sync_batchnorm"
    if strategy is not setting.strategy:
        words += f", {setting.strategy} -> {strategy}"
    words += (
        f", micro-batch {setting.micro_batch} x {setting.accumulation} -> "
        f"{found.micro_batch} x {found.accumulation}; the global batch stays {setting.global_batch}"
    )
    return found, words


# What ranks settle before the first step: the plan, and what rank 0 found out for all.


REPLAN_TIMEOUT_S = 300.0
"""How long ranks wait for a new plan before they divide the old one."""


def gather_values(world: World, value: Any, *, everyone: bool = False) -> list[Any]:
    """What each rank said, in the order of ranks; other ranks than 0 get an empty list unless `everyone`."""
    if world.size == 1:
        return [value]
    import torch.distributed as dist

    found: list[Any] = [None] * world.size
    if everyone:
        dist.all_gather_object(found, value)
        return found
    dist.gather_object(value, found if world.is_main else None)
    return found if world.is_main else []


def run_on_rank_zero(world: World, act: Callable[[], Any]) -> Any:
    """Let rank 0 do something for all: its answer, or its error on every rank."""
    answer, error = None, None
    if world.is_main:
        try:
            answer = act()
        except TrimtabError as found:
            error = found
    if world.size > 1:
        import torch.distributed as dist

        told = [(answer, error)]
        dist.broadcast_object_list(told, src=0)
        answer, error = told[0]
    if error is not None:
        raise error
    return answer


def agree_on_plan(task: TrainTask, job: Any, world: World) -> tuple[Plan, str]:
    """The plan for the processes that there are, and in words what had to be changed for it."""

    def decide() -> tuple[str, str]:
        plan = task.plan
        if plan is None:
            raise WrongUse("trimtab train", found="rank 0 was given no plan", cure="Start every rank alike.")
        words = ""
        if plan.choice.gpus != world.size:
            plan, words = resize_plan(task, plan, job, world)
        return plan.to_json(), words

    text, words = run_on_rank_zero(world, decide)
    return Plan.from_json(text), words


def resize_plan(task: TrainTask, plan: Plan, job: Any, world: World) -> tuple[Plan, str]:
    """A plan for another number of processes, with the same global batch."""
    nodes = count_nodes(world)
    choice, words = divide_setting(
        plan.choice, world.size, nodes=nodes, branches=len(getattr(job, "branches", {}) or {})
    )
    if world.device.startswith("cuda"):
        # Of the other nodes no more is known than that they are like this one.
        where = repeat_node(detect(), nodes) if nodes > 1 else None
        planned = replan_in_child(task, plan, world.size, where)
        if planned is not None:
            over = f" on {nodes} nodes" if nodes > 1 else ""
            return (
                planned,
                f"planned again for {world.size} GPUs{over}; the global batch stays {choice.global_batch}",
            )
    return plan.replace(choice=choice, places=(), estimate=scale_estimate(plan, world.size)), words


def scale_estimate(plan: Plan, gpus: int) -> Estimate:
    """The estimate of a plan as if time went down with the devices: the work of a step stays the same."""
    known, ratio = plan.estimate, plan.choice.gpus / gpus
    return known.replace(
        step_s=None if known.step_s is None else known.step_s * ratio,
        samples_per_s=None if known.samples_per_s is None else known.samples_per_s / ratio,
        step_time=None,
        hours=None,
        gpu_hours=None,
        assumptions=(
            *known.assumptions,
            f"divided for {gpus} processes, not planned again: times are scaled",
        ),
    )


def count_nodes(world: World) -> int:
    """On how many nodes the ranks are, as far as the launcher says."""
    together_here = os.environ.get("LOCAL_WORLD_SIZE", "")
    per_node = int(together_here) if together_here.isdigit() and int(together_here) else world.size
    return max(1, world.size // per_node)


def replan_in_child(task: TrainTask, plan: Plan, gpus: int, where: Cluster | None) -> Plan | None:
    """A new plan from `trimtab plan`, in a process of its own: a rank has no business tracing.

    None `where` is the machine that this process sees. None comes where there is no plan to be had.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        pins = {
            key: value
            for key, value in plan.policy.pins.items()
            if key not in ("gpus", "data_parallel", "micro_batch", "accumulation", "strategy")
        }
        command = [
            sys.executable,
            "-m",
            "trimtab",
            "plan",
            task.job,
            "--pin",
            f"gpus={gpus}",
            "--memory",
            str(plan.policy.memory_share),
            "--out",
            str(file),
        ]
        if "global_batch" not in task.options:
            # The plan's own: it may have been made for another batch than the job names.
            command += ["--global-batch", str(plan.choice.global_batch)]
        if where is not None:
            machine = Path(folder) / "cluster.json"
            machine.write_text(where.to_json(), encoding="utf-8")
            command += ["--on", str(machine)]
        for key, value in pins.items():
            command += ["--pin", f"{key}={value}"]
        for key, value in task.options.items():
            command += ["--set", f"{key}={value}"]
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        try:
            subprocess.run(command, env=env, capture_output=True, timeout=REPLAN_TIMEOUT_S, check=True)  # noqa: S603
            return Plan.from_json(file.read_bytes(), origin=str(file))
        except (OSError, subprocess.SubprocessError, BrokenFile):
            return None
