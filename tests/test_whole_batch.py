"""Plans of jobs whose loss is more than the mean over the parts of a batch."""

from __future__ import annotations

from typing import Any

import pytest

from outlooks import workload
from trimtab import cluster
from trimtab.errors import WrongUse
from trimtab.planner import batch_loss_rules
from trimtab.planner.space import build_space
from trimtab.spec import BatchLoss, Mesh, Policy, Setting, Strategy
from trimtab.training.task import build_cpu_setting

APART = BatchLoss(additive=False, gap=0.3, why="the loss of 8 samples is 2.8, the mean of its halves 2.1")


def indivisible(**changes: Any) -> Any:
    return workload(global_batch=32, batch_loss=APART, **changes)


def test_only_one_rank_with_the_whole_batch_is_legal_and_the_others_are_rejected_rows() -> None:
    found = build_space(indivisible(), cluster("4xA100-40GB"), Policy())
    assert {family.mesh.data_parallel for family in found.families} == {1}
    assert {cut for family in found.families for cut in family.splits} == {(32, 1)}
    causes = [one.why for one in found.refused]
    assert any(why.startswith("several data-parallel GPUs") and APART.why in why for why in causes)
    assert any(why.startswith("micro-batches below the global batch") and APART.why in why for why in causes)


@pytest.mark.parametrize("pins", [{"strategy": "ddp"}, {"micro_batch": 8}, {"data_parallel": 2}])
def test_pins_that_cut_the_batch_are_refused_with_ways_out(pins: dict[str, Any]) -> None:
    with pytest.raises(WrongUse) as error:
        build_space(indivisible(), cluster("4xA100-40GB"), Policy(pins=pins))
    assert "the batch cannot be cut" in error.value.found
    assert "embed(model, batch)" in error.value.cure
    assert "additive = True" in error.value.cure


def test_gradient_caching_cuts_the_batch_over_replicas_and_shards_alone() -> None:
    found = build_space(workload(global_batch=32, cached=True), cluster("4xA100-40GB"), Policy())
    assert {family.strategy for family in found.families} == {Strategy.SINGLE, Strategy.DDP, Strategy.FSDP}
    assert any("pipeline: embed() and loss_of()" in one.why for one in found.refused)


def setting(micro: int, rounds: int, ranks: int = 1) -> Setting:
    return Setting(
        strategy=Strategy.DDP if ranks > 1 else Strategy.SINGLE, mesh=Mesh(dp_replicate=ranks),
        micro_batch=micro, accumulation=rounds, global_batch=32,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("known", "chosen", "values"),
    [
        ({"batch_loss": BatchLoss(additive=True)}, setting(8, 4), []),
        ({"batch_loss": BatchLoss(additive=None, why="too large")}, setting(8, 4), ["assumed additive"]),
        ({"batch_loss": BatchLoss(additive=None, why="too large")}, setting(32, 1), []),
        (
            {"batch_loss": BatchLoss(additive=True, is_near=True, why="apart")},
            setting(8, 4),
            ["nearly additive"],
        ),
        ({"batch_loss": APART}, setting(32, 1), ["whole batch"]),
        ({"cached": True}, setting(8, 2, 2), ["gradient caching"]),
        ({"batch_loss": BatchLoss(additive=True, batch_norms=3)}, setting(8, 2, 2), ["sees 8 samples"]),
        ({"batch_loss": BatchLoss(additive=True, batch_norms=3)}, setting(32, 1), []),
    ],
)
def test_a_plan_says_how_the_batch_is_cut(known: dict[str, Any], chosen: Setting, values: list[str]) -> None:
    found = batch_loss_rules.explain_batch_loss(workload(global_batch=32, **known), chosen)
    assert [one.value for one in found] == values


def test_processes_without_a_gpu_do_not_cut_it_either() -> None:
    assert build_cpu_setting(indivisible(), 1, {}).micro_batch == 32
    for procs, pins in ((2, {}), (1, {"micro_batch": 8}), (1, {"accumulation": 4})):
        with pytest.raises(WrongUse, match="the batch cannot be cut"):
            build_cpu_setting(indivisible(), procs, pins)
