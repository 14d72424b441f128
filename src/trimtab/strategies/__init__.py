"""Strategies: how a job is spread over devices, one object in one file each.

`STRATEGIES` finds one by its word, `strategy_of` that of a setting. docs/architecture.md has the recipe for a
new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.strategies.base import ParallelStrategy, Refusal, usual_strategy
from trimtab.strategies.branch import BranchStrategy, HybridStrategy
from trimtab.strategies.ddp import DdpStrategy
from trimtab.strategies.fsdp import FsdpStrategy
from trimtab.strategies.hsdp import HsdpStrategy
from trimtab.strategies.pipeline import PipelineStrategy
from trimtab.strategies.single import SingleStrategy, one_micro_batch, one_replica

if TYPE_CHECKING:
    from trimtab.spec import Setting, Strategy

__all__ = [
    "STRATEGIES",
    "ParallelStrategy",
    "find_training_refusal",
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
        PipelineStrategy(),
    )
}
"""By word, in the order in which a plan considers and lists them."""


def strategy_of(setting: Setting) -> ParallelStrategy:
    """Return the strategy of a setting."""
    return STRATEGIES[setting.strategy]


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


def find_training_refusal(setting: Setting) -> Refusal | None:
    """Return why `trimtab train` cannot run the mesh of a setting; None if it can."""
    mesh, strategy = setting.mesh, strategy_of(setting)
    if mesh.pp > 1 and not (strategy.has_schedule and mesh.shards == mesh.tp == 1):
        return Refusal(
            f"pp {mesh.pp} with ranks that shard weights, or split layers or sequences",
            "Use torchtitan or Megatron-LM, or plan with --pin pp=1.",
        )
    if mesh.ep > 1 and mesh.tp > 1:
        return Refusal(
            f"ep {mesh.ep} with ranks that split layers (tp {mesh.tp})",
            "Use torchtitan or Megatron-LM, or plan with --pin tp=1 or --pin ep=1.",
        )
    refusals = (strategy.tensor_refusal(mesh.tp), strategy.context_refusal(mesh.cp))
    return next(filter(None, refusals), strategy.expert_refusal(mesh.ep))
