"""Strategies: how a job is spread over devices, one object in one file each.

`STRATEGIES` finds one by its word, `strategy_of` that of a setting. docs/architecture.md has the recipe for a
new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.errors import WrongUse
from trimtab.spec import Mesh
from trimtab.strategies.base import ParallelStrategy, Refusal, usual_strategy
from trimtab.strategies.branch import BranchStrategy, HybridStrategy
from trimtab.strategies.ddp import DdpStrategy
from trimtab.strategies.fsdp import FsdpStrategy
from trimtab.strategies.hsdp import HsdpStrategy
from trimtab.strategies.pipeline import STAGES
from trimtab.strategies.single import SingleStrategy, one_micro_batch, one_replica

if TYPE_CHECKING:
    from trimtab.spec import Setting, Strategy

__all__ = [
    "STRATEGIES",
    "ParallelStrategy",
    "find_training_refusal",
    "make_mesh",
    "one_micro_batch",
    "one_replica",
    "strategy_by_degrees",
    "strategy_by_speed",
    "strategy_of",
    "usual_strategy",
]

STRATEGIES: dict[str, ParallelStrategy] = {
    strategy.word: strategy
    for strategy in (
        SingleStrategy(),
        DdpStrategy(),
        FsdpStrategy(),
        HsdpStrategy(),
        BranchStrategy(),
        HybridStrategy(),
        STAGES,
    )
}
"""By word, in the order in which a plan considers and lists them."""


def strategy_of(setting: Setting) -> ParallelStrategy:
    """Return the strategy of a setting, as it is on the mesh of the setting."""
    return STRATEGIES[setting.strategy].on(setting.mesh)


def strategy_by_degrees(*, replicated: bool, sharded: bool, staged: bool = False) -> Strategy:
    """Return the strategy of a config that says how many replicas, shards and stages there are.

    >>> strategy_by_degrees(replicated=True, sharded=True).value
    'hsdp'
    """
    if staged:
        return next(strategy.word for strategy in STRATEGIES.values() if strategy.has_schedule)
    degrees = (replicated, sharded)
    return next(strategy.word for strategy in STRATEGIES.values() if strategy.degrees == degrees)


def strategy_by_speed() -> ParallelStrategy:
    """Return the strategy that shares the batch out by speed among different devices."""
    return next(strategy for strategy in STRATEGIES.values() if strategy.shares_by_speed)


def make_mesh(  # noqa: PLR0913 - the degrees are named
    rules: ParallelStrategy,
    gpus: int,
    *,
    nodes: int = 1,
    branches: int = 0,
    pp: int = 1,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
) -> tuple[ParallelStrategy, Mesh]:
    """Return a strategy with its usual mesh; raise if there is none.

    With `pp` stages, `rules` say what the GPUs of a stage hold; a strategy of stages has copies of each.

    >>> make_mesh(STRATEGIES["fsdp"], 8, pp=2)[1].dp_shard
    4
    """
    if pp == 1:
        return rules, rules.mesh(gpus, nodes=nodes, branches=branches, tp=tp, cp=cp, ep=ep)
    given = f"--pp {pp}"
    if gpus % pp:
        legal = [str(each) for each in range(1, gpus + 1) if gpus % each == 0]
        raise WrongUse(
            given,
            found=f"there are {gpus} GPUs, which do not divide by {pp}",
            cure=f"Use one of {', '.join(legal[:8])}.",
        )
    if not (rules.runs_whole_model or rules.has_schedule):
        raise WrongUse(
            f"{given} with --strategy {rules.word}",
            found="the GPUs of a stage hold shards or copies of it",
            cure="Use fsdp, hsdp, ddp or pipeline.",
        )
    ranks = gpus // pp
    inner = STRATEGIES[usual_strategy(ranks)[0]] if rules.has_schedule else rules
    if rules.has_schedule and (inner.tensor_refusal(tp) or inner.expert_refusal(ep)):
        # Only shards can be split further, or hold different experts.
        inner = STRATEGIES[strategy_by_degrees(replicated=False, sharded=True)]
    mesh = Mesh()
    if max(ranks, tp, cp, ep) > 1:
        nodes = nodes // pp if nodes % pp == 0 else 1
        mesh = inner.mesh(ranks, nodes=nodes, tp=tp, cp=cp, ep=ep)
    mesh = mesh.replace(pp=pp)
    return STAGES.on(mesh), mesh


def find_training_refusal(setting: Setting) -> Refusal | None:
    """Return why `trimtab train` cannot run the mesh of a setting; None if it can."""
    mesh, strategy = setting.mesh, strategy_of(setting)
    if mesh.pp > 1 and not strategy.has_schedule:
        return Refusal(
            f"pp {mesh.pp} with ranks that split layers or sequences, or hold different experts or states",
            "Use torchtitan or Megatron-LM, or plan with --pin pp=1.",
        )
    refusals = (strategy.tensor_refusal(mesh.tp), strategy.context_refusal(mesh.cp))
    return next(filter(None, refusals), strategy.expert_refusal(mesh.ep))
