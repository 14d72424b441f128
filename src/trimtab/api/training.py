"""The functions `train`, `plan_stages` and `train_stages`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.api.detecting import detect
from trimtab.api.planning import make_policy, plan
from trimtab.spec.requests import PlanStagesRequest, TrainRequest, TrainStagesRequest, accepts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trimtab.spec import Cluster, Plan, Stage, StagedPlan
    from trimtab.training.task import RunEnding, TrainTask
    from trimtab.training.torchrun import TorchrunOptions


@accepts(TrainRequest)
def train(request: TrainRequest) -> RunEnding:
    """Train a job, elastically: by a plan, or by one that is made here for this machine.

    trimtab.train("slm:tiny", steps=20, out="runs/first")
    trimtab.train(MyJob, "plan.json", out="runs/big")
    trimtab.train("bridge:tiny", procs=2, pins={"strategy": "branch"}, steps=20)

    A run in `out` is resumed, on any number of processes. Started by torchrun or srun, this is one rank;
    otherwise it starts the ranks that the plan asks for.
    """
    return run_training(*prepare_training(request))


@accepts(TrainRequest)
def prepare_training(request: TrainRequest) -> tuple[TrainTask, TorchrunOptions | None]:
    """Return what is to be trained, checked and planned, and the processes that have to be started for it."""
    import os
    from pathlib import Path

    from trimtab.catalog.torch_release import require_supported_torch

    require_supported_torch()
    from trimtab.errors import WrongUse
    from trimtab.jobs.load import find_job_name
    from trimtab.jobs.load import load_job as find
    from trimtab.training import task, torchrun
    from trimtab.training.fault_injection import read_faults
    from trimtab.training.process_group import ALONE, SRUN, World, read_world
    from trimtab.units import parse_whole

    procs, seed = request.procs, request.seed or 0
    name, changed = find_job_name(request.job)
    overrides = changed | (request.options or {})
    here = detect()
    world = read_world(os.environ, len(here.devices))
    places, meeting = torchrun.check_nodes(request.nodes, request.rendezvous)
    if world.launcher == SRUN and meeting:
        # srun has started one of us a node, and torchrun will start the ranks of it.
        world = World()
    if world.launcher != ALONE and procs is not None:
        raise WrongUse(
            f"--procs {procs}",
            found=f"this process is rank {world.rank} of {world.size} already (started {world.launcher})",
            cure="Leave --procs out, or start `trimtab train` without the launcher.",
        )
    schedule = () if request.faults is None else read_faults(Path(request.faults))
    minutes = None if request.checkpoint_s is None else request.checkpoint_s / 60
    task.check_counts(
        procs=procs,
        steps=request.steps,
        checkpoint_every=request.checkpoint_steps,
        checkpoint_minutes=minutes,
        keep=request.keep,
        evaluate_every=request.evaluate_steps,
        every=request.every,
        seed=seed,
        timeout_min=request.timeout_min,
    )
    loaded = find(name, overrides)
    task.check_trainable(loaded, name)
    chosen = None
    if world.is_main:
        # One rank plans; the others learn it from that one.
        most_nodes = torchrun.parse_node_range(places)[1]
        ranks = world.size if world.launcher != ALONE else procs and procs * most_nodes
        local_size = parse_whole(os.environ.get("LOCAL_WORLD_SIZE", ""))
        together = local_size or min(world.size, len(here.devices) or world.size)
        per_node = together if world.launcher != ALONE else procs if meeting else None
        question = (name, loaded, overrides, here)
        chosen = _plan_to_train(question, request, ranks, per_node=per_node)
    asked = task.TrainTask(
        job=name,
        options=overrides,
        plan=chosen,
        out=str(task.choose_run_folder(request.out, name)),
        steps=request.steps,
        seed=seed,
        checkpoint_steps=request.checkpoint_steps,
        checkpoint_s=task.CHECKPOINT_S if request.checkpoint_s is None else request.checkpoint_s,
        keep=task.CHECKPOINTS_KEPT if request.keep is None else request.keep,
        evaluate_steps=request.evaluate_steps,
        every=request.every,
        json=request.json,
        faults_due=tuple(schedule),
        timeout_min=request.timeout_min,
    )
    count = procs or (1 if chosen is None else -(-chosen.choice.gpus // torchrun.parse_node_range(places)[1]))
    if world.launcher != ALONE or (count == 1 and not meeting):
        return asked, None
    restarts = torchrun.RESTARTS if request.restarts is None else request.restarts
    return asked, torchrun.TorchrunOptions(procs=count, nodes=places, rendezvous=meeting, restarts=restarts)


def run_training(task: TrainTask, fleet: TorchrunOptions | None) -> RunEnding:
    """Train, in this process or in those that it starts."""
    from trimtab.errors import EnvironmentFault
    from trimtab.training import torchrun, worker
    from trimtab.training.rank_messages import is_lost_peer

    if fleet is not None:
        return torchrun.launch_ranks(task, fleet)
    try:
        return worker.run_task(task)
    except Exception as error:
        if not is_lost_peer(error):
            raise
        raise EnvironmentFault(
            "trimtab train",
            found=f"another rank is gone: {str(error).splitlines()[0][:200]}",
            cure="Look at what that rank said; the same command resumes from the last checkpoint.",
        ) from error


def _plan_to_train(
    question: tuple[str, Any, dict[str, Any], Cluster],
    request: TrainRequest,
    ranks: int | None,
    *,
    per_node: int | None = None,
) -> Plan:
    """Return the plan that a run follows: the one given, one made for these GPUs, or a plain one for the CPU.

    The question is the job's name, the job, what was changed on it, and this machine. `ranks` is how many
    processes there will be, if that is settled, and `per_node` how many of them a launcher has started on
    this node.
    """
    from pathlib import Path

    from trimtab.errors import WrongUse
    from trimtab.planner.plan_files import check_plan, read_plan_file
    from trimtab.spec import Plan
    from trimtab.strategies import find_training_refusal
    from trimtab.trace.job_summary import describe_job
    from trimtab.training.process_group import SHARE_VARIABLE
    from trimtab.training.task import build_cpu_plan, repeat_node
    from trimtab.units import plural

    name, job, overrides, here = question
    given: Any = request.plan
    policy = make_policy(0.9, None, "speed", None, request.pins)
    if given is not None:
        if policy.pins:
            raise WrongUse(
                "--plan with --pin",
                found="the plan has made its choices",
                cure="Pin them where it is made: trimtab plan JOB --pin KEY=VALUE --out FILE.",
            )
        found = given if isinstance(given, Plan) else read_plan_file(Path(given))
        if found.script is not None:
            raise WrongUse(
                "--plan",
                found="it is the plan of a training command, which trains by itself",
                cure=f"Type its command: {found.script.command}",
            )
        if (refusal := find_training_refusal(found.choice)) is not None:
            raise WrongUse(
                "--plan", found=f"trimtab train cannot run its layout: {refusal.found}", cure=refusal.cure
            )
        if not isinstance(given, Plan):
            # Other nodes are assumed to be like this one.
            planned_nodes = len({place.node for place in found.places}) if per_node is not None else 1
            check_plan(found, str(given), job=name, on=repeat_node(here, planned_nodes))
        if ranks is not None and per_node is None and ranks != found.choice.gpus:
            raise WrongUse(
                f"--procs {ranks} with a plan for {found.choice.gpus} processes",
                found="they are not as many",
                cure=f"Leave --procs out, or plan again with --pin gpus={ranks}.",
            )
        return found
    if _is_shared(here, ranks):
        return _plan_shared(question, request, ranks or 1, policy.pins)
    if not here.devices:
        return build_cpu_plan(name, describe_job(job, name), ranks or 1, policy.pins, overrides)
    nodes = 1 if per_node is None or ranks is None else max(1, ranks // per_node)
    if ranks is not None and ranks > nodes * len(here.devices):
        raise WrongUse(
            f"--procs {ranks}",
            found=f"this machine has {plural(len(here.devices), 'GPU')}",
            cure=f"Use --procs {len(here.devices)} or fewer: one process trains on one GPU. For a rehearsal, "
            f"{SHARE_VARIABLE}=1 lets processes share a GPU.",
        )
    fixed = policy.pins | ({"gpus": ranks} if ranks is not None else {})
    return plan(name, repeat_node(here, nodes), pins=fixed, options=overrides, say=request.say)


def _is_shared(here: Cluster, ranks: int | None) -> bool:
    """Return whether several ranks will share a GPU, because the user has allowed it."""
    import os

    from trimtab.training.process_group import SHARE_VARIABLE

    return os.environ.get(SHARE_VARIABLE) == "1" and 0 < len(here.devices) < (ranks or 1)


def _plan_shared(
    question: tuple[str, Any, dict[str, Any], Cluster],
    request: TrainRequest,
    ranks: int,
    pins: dict[str, str | int | bool],
) -> Plan:
    """Return a plain plan for ranks that share a GPU; raise for what gloo cannot do on a GPU."""
    from trimtab.errors import WrongUse
    from trimtab.trace.job_summary import describe_job
    from trimtab.training.process_group import SHARE_VARIABLE
    from trimtab.training.task import build_cpu_plan
    from trimtab.units import plural

    name, job, overrides, here = question
    shared = build_cpu_plan(name, describe_job(job, name), ranks, pins, overrides)
    if shared.choice.mesh.tp > 1:
        raise WrongUse(
            f"{SHARE_VARIABLE}=1 with tp={shared.choice.mesh.tp}",
            found="ranks that split layers gather them through gloo, which ends the process on a GPU; NCCL "
            "refuses two processes on a GPU",
            cure="Use another strategy here, or rehearse on the CPU with CUDA_VISIBLE_DEVICES= .",
        )
    request.say(
        f"{SHARE_VARIABLE}=1: {ranks} processes share {plural(len(here.devices), 'GPU')} through gloo. It is "
        "a rehearsal: slower than one process, and its memory and time are not planned."
    )
    return shared


def _stages_of(
    job: Any, files: str | Path | None = None, options: dict[str, Any] | None = None
) -> tuple[str, dict[str, Any], tuple[Stage, ...]]:
    """Return the name of a job, what was changed on it, and its stages: its own, or those of a folder."""
    from trimtab.errors import WrongUse
    from trimtab.jobs.load import find_job_name
    from trimtab.jobs.load import load_job as find

    name, changed = find_job_name(job)
    overrides = changed | (options or {})
    # Only to find the stages: what they set is all that counts from then on, wherever the files are.
    loaded = find(name, overrides | ({} if files is None else {"stage_files": str(files)}))
    own = getattr(loaded, "stages", None)
    if not callable(own):
        raise WrongUse(
            f"--stages for job {name}",
            found="it has no stages()",
            cure="Leave --stages out, or give the job stages(): a list of trimtab.Stage.",
        )
    return name, overrides, tuple(own())


@accepts(PlanStagesRequest)
def plan_stages(request: PlanStagesRequest) -> StagedPlan:
    """Plan every stage of a job: each with the fastest micro-batch for one global batch.

    trimtab.plan_stages("naics", "H200").stages[0].plan.choice.micro_batch

    `files` is a folder of stages. What a stage changes without a step feeling it (rates, which samples) costs
    no tracing.
    """
    from trimtab.jobs.load import load_job as find
    from trimtab.probe.detect import as_cluster
    from trimtab.spec import PlannedStage, StagedPlan
    from trimtab.trace.job_summary import describe_job

    name, overrides, stages = _stages_of(request.job, request.files, request.options)
    asked = request.arguments() | {
        "job": name,
        "on": as_cluster(request.on, network=request.network),
        "network": None,
        "partial": False,
    }
    del asked["files"]
    planned = []
    for stage in stages:
        request.say(f"stage {stage.name}")
        options = overrides | stage.options
        job = find(name, options)
        unfelt = getattr(job, "unfelt", ())
        horizon = describe_job(job, name)
        asked |= {
            "options": {key: value for key, value in options.items() if key not in unfelt},
            "global_batch": request.global_batch or horizon.global_batch,
            "samples": request.samples or horizon.samples,
            "epochs": request.epochs or stage.epochs or horizon.epochs,
        }
        planned.append(PlannedStage(stage=stage, plan=plan(**asked).replace(options=options)))
    return StagedPlan(job=name, stages=tuple(planned))


@accepts(TrainStagesRequest)
def train_stages(request: TrainStagesRequest) -> RunEnding:
    """Train the stages of a job one after the other, each with the weights of the one before.

    trimtab.train_stages("naics:tiny", out="runs/curriculum", steps=20)

    Each has a folder in `out` and takes `steps` steps, or its epochs; the same call resumes wherever the last
    one ended.
    """
    import os
    from pathlib import Path

    from trimtab.catalog.torch_release import require_supported_torch

    require_supported_torch()
    from trimtab.errors import WrongUse
    from trimtab.training import stages as stages_module
    from trimtab.training import task
    from trimtab.training.process_group import ALONE, read_world

    job, files, options = request.job, request.files, request.options
    name, overrides, stages = _stages_of(job, files, options)
    here = detect()
    launcher = read_world(os.environ, len(here.devices)).launcher
    if launcher != ALONE:
        raise WrongUse(
            "--stages in a process that was started by a launcher",
            found=f"each stage starts its own, and this one is a rank already (started {launcher})",
            cure="Start `trimtab train JOB --stages ...` by itself, with --procs for several processes.",
        )
    plan: Any = request.plan
    if isinstance(plan, str | Path):
        plan = _staged(Path(plan))
    pins = request.pins
    if plan is None and here.devices:
        gpus = {} if request.procs is None else {"gpus": request.procs}
        fixed = make_policy(0.9, None, "speed", None, pins).pins | gpus
        plan, pins = plan_stages(job, here, files=files, options=options, pins=fixed, say=request.say), ()
    planned = _plans_of(plan, stages)

    def train_one(stage: Stage, place: Path, before: Path | None) -> RunEnding:
        asked = request.replace(
            job=name, plan=planned.get(stage.name), options=overrides | stage.options, out=place, pins=pins
        )
        ready, fleet = prepare_training(asked)
        return run_training(ready.replace(begin_from="" if before is None else str(before)), fleet)

    identity = stages_module.StageChain(
        job=name, options=overrides, stages=stages, steps=request.steps, seed=request.seed or 0
    )
    return stages_module.run_stages(identity, task.choose_run_folder(request.out, name), train_one, _say)


def _say(text: str) -> None:
    import sys

    sys.stderr.write(f"trimtab: {text}\n")


def _staged(file: Path) -> StagedPlan:
    """Read the plans of all stages from the file of `trimtab plan --stages --out`."""
    from trimtab.errors import WrongUse
    from trimtab.spec import StagedPlan

    try:
        return StagedPlan.from_json(file.read_bytes(), origin=str(file))
    except OSError as error:
        raise WrongUse(
            f"--plan {file}",
            found=f"it cannot be read ({error.strerror})",
            cure="Name a file that `trimtab plan JOB --stages ... --out FILE` wrote.",
        ) from error


def _plans_of(plan: StagedPlan | None, stages: Sequence[Stage]) -> dict[str, Plan]:
    """Return the plan of each stage by its name; raise if other stages were planned."""
    from trimtab.errors import WrongUse

    if plan is None:
        return {}
    if tuple(planned.stage for planned in plan.stages) != tuple(stages):
        raise WrongUse(
            "--plan with --stages",
            found="the plan is for other stages: " + ", ".join(planned.stage.name for planned in plan.stages),
            cure="Plan again: trimtab plan JOB --stages ... --out FILE.",
        )
    return {planned.stage.name: planned.plan for planned in plan.stages}
