"""The same global batch on another number of processes, and the settings of machines without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.catalog.network import network_link
from trimtab.errors import WrongUse
from trimtab.planner import whole_batch
from trimtab.planner.batch import cut, cuts
from trimtab.planner.pins import contradictions
from trimtab.planner.space import word
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
from trimtab.strategies import STRATEGIES, strategy_of, usual_strategy
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.spec import Cluster, Workload

UNKNOWN = "nothing was estimated: the memory and the speed of a CPU are not predicted"


def cpu_plan(
    job: str, workload: Workload, procs: int, pins: Mapping[str, Any], options: dict[str, Any]
) -> Plan:
    """A plan for processes without a GPU: the batch divided, in fp32, unless pins say otherwise."""
    choice = cpu_setting(workload, procs, pins)
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
            assumptions=(UNKNOWN,),
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


def several_nodes(one: Cluster, nodes: int) -> Cluster:
    """A cluster of so many nodes like this one: what a rank knows of the machines it cannot see."""
    if nodes <= 1:
        return one
    node, within = one.nodes[0], [link for link in one.links if link.node == 0]
    joined = [link.replace(node=number) for number in range(nodes) for link in within]
    models = {device.model or device.name for device in node.devices}
    return one.replace(
        nodes=tuple(node.replace(name=f"{node.name}-{number}") for number in range(nodes)),
        links=(*joined, network_link(models, len(node.devices))),
    )


def cpu_setting(workload: Workload, procs: int, pins: Mapping[str, Any]) -> Setting:
    """How processes without a GPU share the work."""
    strategy = Strategy(pins.get("strategy", usual_strategy(procs)[0]))
    wrong = contradictions({**pins, "gpus": procs, "strategy": strategy}, workload, procs)
    if pins.get("gpus", procs) != procs:
        wrong.append((f"gpus={pins['gpus']}, and there are {procs} processes", f"use --procs {pins['gpus']}"))
    if wrong:
        what, cure = wrong[0]
        given = " ".join(f"--pin {key}={word(value)}" for key, value in pins.items())
        raise WrongUse(
            given or f"--procs {procs}",
            found=what.replace("GPUs", "processes").replace("GPU", "process"),
            cure=cure.replace("GPUs", "processes").capitalize() + ".",
        )
    rules = STRATEGIES[strategy]
    mesh = rules.mesh(procs, branches=len(workload.branches))
    _refuse_cut(workload, strategy, mesh, pins)
    least = rules.least_rounds(mesh)
    micro, rounds = _cut(workload.global_batch, mesh.data_parallel, pins, least=least)
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
    refused = whole_batch.why_not(workload, strategy, mesh)
    cuts_it = (
        pins.get("micro_batch", workload.global_batch) < workload.global_batch
        or pins.get("accumulation", 1) > 1
    )
    if not refused and workload.is_indivisible and cuts_it:
        refused = whole_batch.why_one_piece(workload)
    if refused:
        given = " ".join(f"--pin {key}={word(value)}" for key, value in pins.items())
        given = given or f"--procs {mesh.size}"
        raise WrongUse(given, found=refused.replace("GPUs", "processes"), cure=whole_batch.cure(workload))


def _cut(global_batch: int, data_parallel: int, pins: Mapping[str, Any], *, least: int) -> tuple[int, int]:
    """The largest micro-batch that agrees with the pins and makes so many rounds, where that can be."""
    if "micro_batch" in pins:
        found = cut(global_batch, data_parallel, micro_batch=int(pins["micro_batch"]))
        if found is not None:
            return found
    if "accumulation" in pins:
        wanted = int(pins["accumulation"])
        fitting = [one for one in cuts(global_batch, data_parallel) if one[1] == wanted]
        if fitting:
            return fitting[0]
        raise WrongUse(
            f"--pin accumulation={wanted}",
            found=f"a share of the global batch {global_batch} cannot be cut into that many even parts",
            cure=f"Pin one of {', '.join(str(one[1]) for one in cuts(global_batch, data_parallel))}.",
        )
    known = cuts(global_batch, data_parallel)
    return next((one for one in known if one[1] >= least), known[-1])


def divided(setting: Setting, procs: int, *, nodes: int = 1, branches: int = 0) -> tuple[Setting, str]:
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
