"""What ranks settle before the first step: the plan, and what rank 0 found out for all."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import BrokenFile, TrimtabError, WrongUse
from trimtab.probe.detect import detect
from trimtab.spec import Plan
from trimtab.training.resize import divided, several_nodes
from trimtab.training.start import LAUNCHED

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import Cluster, Estimate
    from trimtab.training.task import Task
    from trimtab.training.world import World

PLAN_S = 300.0
"""How long ranks wait for a new plan before they divide the old one."""


def gathered(world: World, value: Any, *, everyone: bool = False) -> list[Any]:
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


def together(world: World, act: Callable[[], Any]) -> Any:
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


def settled(task: Task, job: Any, world: World) -> tuple[Plan, str]:
    """The plan for the processes that there are, and in words what had to be changed for it."""

    def decide() -> tuple[str, str]:
        plan = task.plan
        if plan is None:
            raise WrongUse("trimtab train", found="rank 0 was given no plan", cure="Start every rank alike.")
        words = ""
        if plan.choice.gpus != world.size:
            plan, words = resized(task, plan, job, world)
        return plan.to_json(), words

    text, words = together(world, decide)
    return Plan.from_json(text), words


def resized(task: Task, plan: Plan, job: Any, world: World) -> tuple[Plan, str]:
    """A plan for another number of processes, with the same global batch."""
    nodes = nodes_of(world)
    choice, words = divided(
        plan.choice, world.size, nodes=nodes, branches=len(getattr(job, "branches", {}) or {})
    )
    if world.device.startswith("cuda"):
        # Of the other nodes no more is known than that they are like this one.
        where = several_nodes(detect(), nodes) if nodes > 1 else None
        planned = replanned(task, plan, world.size, where)
        if planned is not None:
            over = f" on {nodes} nodes" if nodes > 1 else ""
            return (
                planned,
                f"planned again for {world.size} GPUs{over}; the global batch stays {choice.global_batch}",
            )
    return plan.replace(choice=choice, places=(), estimate=scaled(plan, world.size)), words


def scaled(plan: Plan, gpus: int) -> Estimate:
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


def nodes_of(world: World) -> int:
    """On how many nodes the ranks are, as far as the launcher says."""
    together_here = os.environ.get("LOCAL_WORLD_SIZE", "")
    per_node = int(together_here) if together_here.isdigit() and int(together_here) else world.size
    return max(1, world.size // per_node)


def replanned(task: Task, plan: Plan, gpus: int, where: Cluster | None) -> Plan | None:
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
        env = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
        try:
            subprocess.run(command, env=env, capture_output=True, timeout=PLAN_S, check=True)  # noqa: S603
            return Plan.from_json(file.read_bytes(), origin=str(file))
        except (OSError, subprocess.SubprocessError, BrokenFile):
            return None
