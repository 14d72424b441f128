"""Compute the resources that a plan needs: nodes, GPUs, cores, host memory and time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import WrongUse
from trimtab.spec.base import Noun, check_minimum
from trimtab.training.torchrun import parse_node_range
from trimtab.units import format_duration, plural

if TYPE_CHECKING:
    from trimtab.spec import Plan

MARGIN = 1.25
"""How much longer than estimated a run may take before its time limit strikes: a choice, not a measurement.
Beyond it the run is not lost, since it is warned, saves and is queued again."""
START_S = 900.0
"""For what an estimate does not count: starting, loading, compiling, the first and the last checkpoint."""


class Resources(Noun, frozen=True, kw_only=True):
    """Nodes, devices, cores, host memory and time."""

    nodes: int = 1
    least_nodes: int = 1
    """With how many of them the run goes on."""
    procs: int = 1
    """Processes on each node; one a GPU."""
    gpus: int = 0
    """GPUs of each node; 0 for a run on CPUs."""
    devices: tuple[str, ...] = ()
    """What the catalogue calls the GPUs, each name once."""
    cpus: int = 1
    """Cores of each node: one for every process, and one for each of its data loaders."""
    memory_bytes: int = 0
    """Host memory of each node that the plan is known to take: weights and optimizer state of its ranks,
    which pass through it when they are saved. What Python, CUDA and the data take is not known."""
    seconds: float | None = None
    """What the run is estimated to take; None where nobody knows."""

    @property
    def nodes_text(self) -> str:
        """The nodes as torchrun takes them: 2, or 1:2.

        >>> Resources(nodes=2).nodes_text, Resources(nodes=2, least_nodes=2).nodes_text
        ('1:2', '2')
        """
        return str(self.nodes) if self.least_nodes == self.nodes else f"{self.least_nodes}:{self.nodes}"

    def faults(self) -> list[str]:
        """There is at least one of everything, and no more needed than there are."""
        wrong = check_minimum(
            1, nodes=self.nodes, least_nodes=self.least_nodes, procs=self.procs, cpus=self.cpus
        ) + check_minimum(0, gpus=self.gpus, memory_bytes=self.memory_bytes, seconds=self.seconds)
        if self.least_nodes > self.nodes:
            wrong.append(f"least_nodes {self.least_nodes} is above nodes {self.nodes}")
        if self.gpus and self.gpus != self.procs:
            wrong.append(f"{self.procs} processes share {self.gpus} GPUs, and each needs its own")
        return wrong


def compute_resources(plan: Plan, *, nodes: str | None = None, steps: int | None = None) -> Resources:
    """Compute the resources of a plan. `nodes` is as for `trimtab train`; its maximum must be the plan's."""
    least, most = (None, None) if nodes is None else parse_node_range(nodes)
    by_node: dict[int, int] = {}
    for place in plan.places:
        by_node[place.node] = by_node.get(place.node, 0) + 1
    if len(set(by_node.values())) > 1:
        counts = " and ".join(map(str, by_node.values()))
        raise WrongUse(
            f"plan for {plan.job}",
            found=f"it takes {counts} GPUs of its nodes, and a launch starts as many processes on each",
            cure="Plan for nodes that are alike: --on 2x4xA100-40GB.",
        )
    count = len(by_node) or most or 1
    if most is not None and most != count:
        raise WrongUse(
            f"--nodes {nodes}",
            found=f"the plan is for {plural(count, 'node')}",
            cure=f"Leave it out, or plan again: trimtab plan {plan.job} --on {most}x...",
        )
    ranks = plan.choice.gpus
    if ranks % count:
        raise WrongUse(
            f"--nodes {nodes}",
            found=f"{ranks} processes do not divide over {count} nodes",
            cure="Give a number of nodes that divides them.",
        )
    procs = ranks // count
    kept = plan.estimate.parts.weights + plan.estimate.parts.optimizer
    return Resources(
        nodes=count,
        least_nodes=least or count,
        procs=procs,
        gpus=procs if plan.places else 0,
        devices=tuple(dict.fromkeys(place.name for place in plan.places)),
        cpus=procs * (1 + plan.choice.workers),
        memory_bytes=procs * kept,
        seconds=_estimate_seconds(plan, steps),
    )


def _estimate_seconds(plan: Plan, steps: int | None) -> float | None:
    if steps is not None:
        return None if plan.estimate.step_s is None else plan.estimate.step_s * steps
    return None if plan.estimate.hours is None else plan.estimate.hours * 3600


def add_margin(seconds: float) -> float:
    """Return the time to ask for, in whole minutes.

    >>> add_margin(3600) / 60
    90.0
    """
    return -(-(seconds * MARGIN + START_S) // 60) * 60.0


def explain_time(resources: Resources, asked_s: float) -> str:
    """Explain the time limit."""
    if resources.seconds is None:
        return f"a time limit of {format_duration(asked_s)}"
    return (
        f"a time limit of {format_duration(asked_s)}: {format_duration(resources.seconds)} estimated, a "
        "quarter "
        f"more, and {format_duration(START_S)} to start and save"
    )
