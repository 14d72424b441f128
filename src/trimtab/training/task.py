"""The task of a `trimtab train`, plans for CPUs, and how ranks agree on one plan for all of them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from trimtab.catalog.clusters import assume_network_link
from trimtab.engine.in_backward_rules import find_in_backward_refusal
from trimtab.errors import BrokenFile, JobFailed, TrimtabError, WrongUse
from trimtab.planner import batch_loss_rules
from trimtab.planner.batch_split import find_split, list_splits
from trimtab.planner.pins import (
    find_contradictions,
    find_wrong_degree,
    has_budget,
    read_ways,
    refuse_unused_processes,
)
from trimtab.planner.space import format_pins
from trimtab.probe.detect import detect
from trimtab.spec import (
    Band,
    Estimate,
    Footprint,
    Incident,
    Mesh,
    Plan,
    Policy,
    Precision,
    Reason,
    Recompute,
    Schedule,
    Setting,
    Strategy,
)
from trimtab.spec.base import Noun, check_minimum
from trimtab.strategies import STRATEGIES, strategy_by_degrees, strategy_of, usual_strategy
from trimtab.training.fault_injection import Fault
from trimtab.training.rank_messages import LAUNCHER_VARIABLES
from trimtab.training.signals import exit_code
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trimtab.spec import Cluster, Workload
    from trimtab.strategies import ParallelStrategy
    from trimtab.training.process_group import World


CHECKPOINT_S = 600.0
CHECKPOINTS_KEPT = 3
RUNS_FOLDER = Path("runs")
"""Where run folders are created by default."""


class TrainTask(Noun, frozen=True, kw_only=True):
    """What to train: a job, a plan, the run folder, and the number of steps. Sent to every rank."""

    job: str
    """Name of the job, as on the command line."""
    options: dict[str, Any] = {}
    """Job options that were set from outside."""
    plan: Plan | None = None
    """None on a rank that gets it from rank 0."""
    out: str
    begin_from: str = ""
    """Folder of a run whose weights this one begins with, as in a training in stages."""
    steps: int | None = None
    """Optimizer steps in total; None: as many as the job's samples and epochs make."""
    seed: int = 0
    checkpoint_steps: int | None = None
    """Steps between checkpoints, in addition to `checkpoint_s`."""
    checkpoint_s: float = CHECKPOINT_S
    keep: int = CHECKPOINTS_KEPT
    """Checkpoints to keep, besides the best."""
    evaluate_steps: int | None = None
    """Steps between evaluations; None: at the end of every epoch."""
    every: int | None = None
    """Steps between printed lines; None: 1 or 10, by the length of the run."""
    json: bool = False
    faults_due: tuple[Fault, ...] = ()
    """Faults to inject."""
    timeout_min: float = 10.0
    """How long a collective may wait for a rank."""

    def faults(self) -> list[str]:
        """List what is wrong: counts below 1, or a negative seed or time."""
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


class TrainOutput(Noun, frozen=True, kw_only=True):
    """Last line of `trimtab train --json`; every line before it is a StepLine."""

    events: tuple[Incident, ...]
    steps: int
    """Optimizer steps of the run so far."""
    out: str
    """The run folder."""
    asked: str | None
    """Signal that ended the run; null if it ended by itself."""


class RunEnding(Noun, frozen=True, kw_only=True):
    """How a run, or this attempt at it, ended."""

    step: int
    """Optimizer steps of the run so far."""
    loss: float | None = None
    """Loss of the last step."""
    out: str
    """The run's folder."""
    asked: str = ""
    """Name of the signal that ended it early; empty if it is finished."""

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0, or 128 + the signal's number."""
        return exit_code(Signals[self.asked]) if self.asked else 0


def check_counts(**counts: float | None) -> None:
    """Raise if an option of the command line is below 1 (some: below 0) or not finite."""
    for name, value in counts.items():
        least = 0 if name in {"seed", "checkpoint_minutes"} else 1
        if value is not None and not least <= value < float("inf"):  # false for not-a-number too
            option = f"--{name.replace('_', '-')}"
            found = f"it is below {least}" if value < least else "it is no finite number"
            raise WrongUse(f"{option} {value:g}", found=found, cure=f"Give {option} at least {least}.")


def check_trainable(job: Any, name: str) -> None:
    """Raise if the job has no dataset(): it can be planned but not trained."""
    if not callable(getattr(job, "dataset", None)):
        raise JobFailed(
            f"job {name}",
            found="it has no dataset(), which planning does without and training does not",
            cure="Give it dataset(): a torch dataset whose items collate to what batch() returns.",
        )


def choose_run_folder(out: Path | str | None, job: str) -> Path:
    """Return the run folder: `out`, or a folder in RUNS_FOLDER named after the job.

    >>> choose_run_folder(None, "work/job.py:MyJob").as_posix()
    'runs/job-MyJob'
    >>> choose_run_folder(None, "slm:tiny").as_posix()
    'runs/slm-tiny'
    """
    if out is not None:
        return Path(out)
    file, _, attribute = job.rpartition(":")
    stem = Path(file).stem if file.endswith(".py") else Path(file).name if file else ""
    name = "-".join(part for part in (stem, Path(attribute).name) if part)
    return RUNS_FOLDER / "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in name)


NOT_ESTIMATED = "nothing was estimated: the memory and the speed of a CPU are not predicted"


def build_cpu_plan(
    job: str, workload: Workload, procs: int, pins: Mapping[str, Any], options: dict[str, Any]
) -> Plan:
    """Build a plan for processes without a GPU: fp32 and an even split of the batch, unless pinned."""
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
    """Return a cluster of `nodes` copies of the first node; a rank cannot see the other machines."""
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
    """Build the setting for processes without a GPU; raise if the pins contradict."""
    usual = usual_strategy(procs)[0]
    tp, ep, pp = (int(pins.get(name) or 1) for name in ("tp", "ep", "pp"))
    if pp > 1:
        usual = strategy_by_degrees(replicated=False, sharded=False, staged=True)
    elif STRATEGIES[usual].tensor_refusal(tp) or STRATEGIES[usual].expert_refusal(ep):
        usual = strategy_by_degrees(replicated=False, sharded=True)
    strategy = Strategy(pins.get("strategy", usual))
    wrong = find_contradictions({**pins, "gpus": procs, "strategy": strategy}, workload, procs)
    if pins.get("gpus", procs) != procs:
        wrong.append((f"gpus={pins['gpus']}, and there are {procs} processes", f"use --procs {pins['gpus']}"))
    if wrong:
        what, cure = wrong[0]
        given = format_pins(pins)
        raise WrongUse(
            given or f"--procs {procs}",
            found=what.replace("GPUs", "processes").replace("GPU", "process"),
            cure=cure.replace("GPUs", "processes").capitalize() + ".",
        )
    rules = STRATEGIES[strategy]
    mesh = _pick_mesh(rules, procs, len(workload.branches), pins)
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
        compile=bool(pins.get("compile", has_budget(pins))),
        **read_ways(pins),
        workers=int(pins.get("workers", 0)),
        sync_batchnorm=bool(pins.get("sync_batchnorm", False)),
    )


def _pick_mesh(rules: ParallelStrategy, procs: int, branches: int, pins: Mapping[str, Any]) -> Mesh:
    """Return the mesh of the pinned degrees, else the usual one; raise if there is none of them."""
    refuse_unused_processes(pins, procs)
    inner = {name: int(pins.get(name) or 1) for name in ("tp", "cp", "ep")}
    stages = {name: int(pins[name]) for name in ("pp", "dp_shard", "dp_replicate") if name in pins}
    meshes = rules.meshes_within(procs, branches=branches, **inner, **stages)
    if stages.get("pp", 1) == 1:
        usual = rules.mesh(procs, branches=branches, **inner)
        meshes = itertools.chain((usual,), meshes)
    mesh = next((mesh for mesh in meshes if not find_wrong_degree(pins, mesh)), None)
    if mesh is None:
        raise WrongUse(
            format_pins(pins),
            found=f"{rules.word} on {procs} process{'es' * (procs > 1)} has no such mesh",
            cure="Leave the degree out, or pin another strategy.",
        )
    return mesh


def _refuse_cut(workload: Workload, strategy: Strategy, mesh: Mesh, pins: Mapping[str, Any]) -> None:
    """Raise if the setting would split a batch that the job declares indivisible."""
    refused = batch_loss_rules.explain_refusal(workload, strategy, mesh)
    cuts_it = (
        pins.get("micro_batch", workload.global_batch) < workload.global_batch
        or pins.get("accumulation", 1) > 1
    )
    if not refused and workload.is_indivisible and cuts_it:
        refused = batch_loss_rules.explain_uncut_batch(workload)
    if refused:
        given = format_pins(pins)
        given = given or f"--procs {mesh.size}"
        raise WrongUse(
            given, found=refused.replace("GPUs", "processes"), cure=batch_loss_rules.suggest_fix(workload)
        )


def _split_batch(
    global_batch: int, data_parallel: int, pins: Mapping[str, Any], *, least: int
) -> tuple[int, int]:
    """Return the largest micro-batch with at least `least` rounds that fits the pins, and its rounds."""
    if "micro_batch" in pins:
        split = find_split(global_batch, data_parallel, micro_batch=int(pins["micro_batch"]))
        if split is not None:
            return split
    if "accumulation" in pins:
        rounds = int(pins["accumulation"])
        fitting = [cut for cut in list_splits(global_batch, data_parallel) if cut[1] == rounds]
        if fitting:
            return fitting[0]
        raise WrongUse(
            f"--pin accumulation={rounds}",
            found=f"a share of the global batch {global_batch} cannot be cut into that many even parts",
            cure=f"Pin one of {', '.join(str(cut[1]) for cut in list_splits(global_batch, data_parallel))}.",
        )
    splits = list_splits(global_batch, data_parallel)
    return next((split for split in splits if split[1] >= least), splits[-1])


def divide_setting(setting: Setting, procs: int, *, nodes: int = 1, branches: int = 0) -> tuple[Setting, str]:
    """Return the setting for another number of processes, with the same global batch, and a description.

    The micro-batch never grows, so with replicated weights it still fits the device. A strategy that the new
    number does not allow is replaced by the nearest one.
    """
    strategy, mesh = strategy_of(setting).resized(setting.mesh, procs, nodes=nodes, branches=branches)
    share = -(-setting.global_batch // mesh.data_parallel)
    micro = min(setting.micro_batch, share)
    rounds = -(-share // micro)
    # Make the rounds as even as possible.
    micro = -(-share // rounds)
    divided = setting.replace(
        strategy=strategy, mesh=mesh, micro_batch=micro, accumulation=-(-share // micro), shares=()
    )
    if divided.mesh.pp != setting.mesh.pp:
        divided = divided.replace(stage_layers=())
    words = f"{setting.gpus} -> {procs} processes"
    if not STRATEGIES[strategy].has_schedule and setting.schedule is not Schedule.ONE_F_ONE_B:
        divided = divided.replace(schedule=Schedule.ONE_F_ONE_B, virtual_stages=1)
        words += f", no schedule {setting.schedule} any more"
    if divided.compile and divided.sync_batchnorm and procs > 1:
        divided = divided.replace(compile=False)
        words += ", not compiled any more, for the sake of sync_batchnorm"
    refusal = find_in_backward_refusal(divided)
    if refusal is not None:
        divided = divided.replace(optimizer_in_backward=False)
        words += f", optimizer not in backward any more ({refusal.found})"
    if strategy is not setting.strategy:
        words += f", {setting.strategy} -> {strategy}"
    words += (
        f", micro-batch {setting.micro_batch} x {setting.accumulation} -> "
        f"{divided.micro_batch} x {divided.accumulation}; the global batch stays {setting.global_batch}"
    )
    return divided, words


REPLAN_TIMEOUT_S = 300.0
"""How long ranks wait for a new plan before they adapt the old one."""


def gather_values(world: World, value: Any, *, everyone: bool = False) -> list[Any]:
    """Return the values of all ranks, in order, on rank 0; other ranks get [] unless `everyone`."""
    if world.size == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * world.size
    if everyone:
        dist.all_gather_object(values, value)
        return values
    dist.gather_object(value, values if world.is_main else None)
    return values if world.is_main else []


def run_on_rank_zero(world: World, act: Callable[[], Any]) -> Any:
    """Call `act` on rank 0; return its result, or raise its error, on every rank."""
    answer, error = None, None
    if world.is_main:
        try:
            answer = act()
        except TrimtabError as raised:
            error = raised
    if world.size > 1:
        import torch.distributed as dist

        results = [(answer, error)]
        dist.broadcast_object_list(results, src=0)
        answer, error = results[0]
    if error is not None:
        raise error
    return answer


def agree_on_plan(task: TrainTask, job: Any, world: World) -> tuple[Plan, str]:
    """Return rank 0's plan, adapted to the number of processes, and a description of the changes."""

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
    """Return a plan for the number of processes, with the same global batch, and a description."""
    nodes = count_nodes(world)
    choice, words = divide_setting(
        plan.choice, world.size, nodes=nodes, branches=len(getattr(job, "branches", {}) or {})
    )
    if world.device.startswith("cuda"):
        # The other nodes cannot be seen; they are assumed to be like this one.
        cluster = repeat_node(detect(), nodes) if nodes > 1 else None
        planned = replan_in_child(task, plan, world.size, cluster)
        if planned is not None:
            over = f" on {nodes} nodes" if nodes > 1 else ""
            return (
                planned,
                f"planned again for {world.size} GPUs{over}; the global batch stays {choice.global_batch}",
            )
    return plan.replace(choice=choice, places=(), estimate=scale_estimate(plan, world.size)), words


def scale_estimate(plan: Plan, gpus: int) -> Estimate:
    """Return the plan's estimate with times scaled by the number of GPUs; the work of a step is the same."""
    estimate, ratio = plan.estimate, plan.choice.gpus / gpus
    return estimate.replace(
        step_s=None if estimate.step_s is None else estimate.step_s * ratio,
        samples_per_s=None if estimate.samples_per_s is None else estimate.samples_per_s / ratio,
        step_time=None,
        hours=None,
        gpu_hours=None,
        assumptions=(
            *estimate.assumptions,
            f"divided for {gpus} processes, not planned again: times are scaled",
        ),
    )


def count_nodes(world: World) -> int:
    """Return the number of nodes, from LOCAL_WORLD_SIZE; 1 if it is not set."""
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    per_node = int(local_size) if local_size.isdigit() and int(local_size) else world.size
    return max(1, world.size // per_node)


def replan_in_child(task: TrainTask, plan: Plan, gpus: int, cluster: Cluster | None) -> Plan | None:
    """Make a new plan with `trimtab plan` in a child process; return None if that fails.

    `cluster` is the cluster; None is the machine that this process sees.
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
            # The plan may have been made for another global batch than the job's.
            command += ["--global-batch", str(plan.choice.global_batch)]
        if cluster is not None:
            machine = Path(folder) / "cluster.json"
            machine.write_text(cluster.to_json(), encoding="utf-8")
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
