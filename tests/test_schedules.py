"""Pipeline schedules: every action once, in a possible order, with the bubbles that theory gives them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from trimtab.api.estimating import make_setting
from trimtab.catalog.clusters import parse_cluster
from trimtab.errors import WrongUse
from trimtab.planner.space import build_space
from trimtab.spec import Mesh, Policy, Setting, Strategy, Workload
from trimtab.spec.schedule import Schedule
from trimtab.strategies import STRATEGIES
from trimtab.strategies.schedules import (
    Action,
    DeadlockError,
    Pass,
    PipelineShape,
    StageTimes,
    build_actions,
    count_held,
    explain_illegal,
    list_inputs,
    simulate_actions,
    simulate_step,
)

EVEN = StageTimes(1.0, 1.0, 1.0)


@st.composite
def shapes(draw: st.DrawFn) -> PipelineShape:
    schedule = draw(st.sampled_from(list(Schedule)))
    fewest = 2 if schedule is Schedule.INTERLEAVED else 1
    virtual = draw(st.integers(fewest, 3)) if schedule.is_looped else 1
    return PipelineShape(schedule, draw(st.integers(2, 6)), virtual, draw(st.integers(1, 20)))


@settings(deadline=None)
@given(shapes())
def test_every_rank_runs_each_of_its_passes_once(shape: PipelineShape) -> None:
    rows = build_actions(shape)
    kinds = [Pass.FORWARD, Pass.INPUT, Pass.WEIGHT]
    if not shape.schedule.splits_backward:
        kinds = [Pass.FORWARD, Pass.BACKWARD]
    for rank, row in enumerate(rows):
        expected = {
            Action(kind, stage, number)
            for kind in kinds
            for stage in shape.stages_of(rank)
            for number in range(shape.micro_batches)
        }
        assert len(row) == len(expected)
        assert set(row) == expected


@settings(deadline=None)
@given(shapes(), st.floats(0.0, 2.0), st.lists(st.floats(0.1, 3.0), min_size=18, max_size=18))
def test_no_schedule_deadlocks_and_inputs_are_ready_in_any_time(
    shape: PipelineShape, send_s: float, seconds: list[float]
) -> None:
    times = [StageTimes(value, value * 0.9, value * 1.1) for value in seconds[: shape.stages]]
    found = simulate_actions(shape, times, send_s)
    # No step is faster than its busiest rank, or than one micro-batch through all stages and back.
    assert found.total_s >= max(found.busy_s) - 1e-9
    there_and_back = sum(time.forward_s + time.input_s for time in times)
    assert found.total_s >= there_and_back + 2 * (shape.ranks - 1) * send_s - 1e-9
    assert 0 <= found.bubble_share < 1


@settings(deadline=None)
@given(shapes())
def test_a_rank_runs_its_own_inputs_first(shape: PipelineShape) -> None:
    for rank, row in enumerate(build_actions(shape)):
        places = {action: place for place, action in enumerate(row)}
        for action in row:
            own = [needed for needed in list_inputs(action, shape) if shape.rank_of(needed.stage) == rank]
            assert all(places[needed] < places[action] for needed in own)


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(1, 40))
def test_the_bubble_of_1f1b_is_the_known_one(ranks: int, micro_batches: int) -> None:
    shape = PipelineShape(Schedule.ONE_F_ONE_B, ranks, 1, micro_batches)
    found = simulate_actions(shape, [EVEN] * ranks)
    assert found.bubble_share == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert found.held == tuple(min(ranks - rank, micro_batches) for rank in range(ranks))


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 5))
def test_virtual_stages_divide_the_bubble(ranks: int, virtual_stages: int, rounds: int) -> None:
    micro_batches = rounds * ranks
    shape = PipelineShape(Schedule.INTERLEAVED, ranks, virtual_stages, micro_batches)
    assert not explain_illegal(shape)
    found = simulate_actions(shape, [EVEN] * shape.stages)
    known = (ranks - 1) / (virtual_stages * micro_batches + ranks - 1)
    assert found.bubble_share == pytest.approx(known)


@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 5))
def test_zero_bubble_waits_less_and_holds_no_more_than_the_first_rank(
    ranks: int, virtual_stages: int, rounds: int
) -> None:
    kind = Schedule.ONE_F_ONE_B if virtual_stages == 1 else Schedule.INTERLEAVED
    usual = PipelineShape(kind, ranks, virtual_stages, rounds * ranks)
    split = usual._replace(schedule=Schedule.ZERO_BUBBLE)
    times = [EVEN] * usual.stages
    with_bubble, without = simulate_actions(usual, times), simulate_actions(split, times)
    assert without.total_s < with_bubble.total_s
    assert max(without.held) <= max(with_bubble.held)


@settings(deadline=None)
@given(shapes(), st.integers(8, 16), st.floats(0.0, 0.5))
def test_later_rounds_take_a_constant_time(shape: PipelineShape, rounds: int, send_s: float) -> None:
    shape = shape._replace(micro_batches=rounds * shape.ranks)
    times = tuple(StageTimes(1.0 + 0.1 * (stage % 3), 1.0, 0.8) for stage in range(shape.stages))
    quick, full = simulate_step(shape, times, send_s), simulate_actions(shape, times, send_s)
    assert quick.total_s == pytest.approx(full.total_s, rel=0.02)
    assert quick.busy_s == pytest.approx(full.busy_s)
    assert quick.held == full.held


def test_ranks_that_wait_for_each_other_are_found() -> None:
    shape = PipelineShape(Schedule.ONE_F_ONE_B, 2, 1, 1)
    first, last = build_actions(shape)
    with pytest.raises(DeadlockError, match="wait for each other"):
        simulate_actions(shape, [EVEN] * 2, rows=(first, last[::-1]))


@pytest.mark.parametrize("schedule", list(Schedule))
def test_torch_has_every_schedule_by_its_word(schedule: Schedule) -> None:
    found = torch_schedules.get_schedule_class(schedule.torch_word)
    assert found.__name__ == f"Schedule{schedule.torch_word}"
    assert issubclass(found, torch_schedules.PipelineScheduleMulti) == schedule.is_looped


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((Schedule.ONE_F_ONE_B, 2, 2, 4), "one stage a rank"),
        ((Schedule.INTERLEAVED, 2, 1, 4), "needs virtual_stages of 2 or more"),
        ((Schedule.ZERO_BUBBLE, 4, 2, 11), "11 is no multiple of 2"),
        ((Schedule.ZERO_BUBBLE, 4, 2, 10), ""),
        ((Schedule.ONE_F_ONE_B, 4, 1, 11), ""),
    ],
)
def test_illegal_shapes_are_explained(shape: tuple[Schedule, int, int, int], text: str) -> None:
    found = explain_illegal(PipelineShape(*shape))
    assert text in found
    assert bool(found) == bool(text)


def test_the_interleaved_actions_are_those_of_torch() -> None:
    row = build_actions(PipelineShape(Schedule.INTERLEAVED, 2, 2, 4))[0]
    assert " ".join(map(str, row)) == ("0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3")
    assert count_held(row) == 5


def list_searched(pins: dict[str, Any], batch: int = 48) -> set[tuple[int, Schedule, int]]:
    """Return the stages, schedule and virtual stages of every pipeline that a plan on 4 GPUs considers."""
    space = build_space(
        Workload(name="job", global_batch=batch), parse_cluster("4xH100"), Policy(pins={"gpus": 4, **pins})
    )
    settings = [
        family.setting(split)
        for family in space.families
        for split in family.splits
        if family.strategy is Strategy.PIPELINE
    ]
    return {(setting.mesh.pp, setting.schedule, setting.virtual_stages) for setting in settings}


def test_a_plan_considers_every_schedule_and_a_pin_leaves_one() -> None:
    interleaved, zero = Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE
    assert list_searched({}) == {
        (stages, schedule, virtual)
        for stages in (2, 4)
        for schedule, virtual in ((Schedule.ONE_F_ONE_B, 1), (zero, 1), (interleaved, 2), (interleaved, 4))
    }
    assert list_searched({"schedule": "1f1b"}) == {(2, Schedule.ONE_F_ONE_B, 1), (4, Schedule.ONE_F_ONE_B, 1)}
    assert list_searched({"schedule": "zero-bubble", "virtual_stages": 2, "pp": 4}) == {(4, zero, 2)}
    # 9 micro-batches are no 2 rounds of 4 ranks.
    nine = {"micro_batch": 1, "pp": 4}
    assert list_searched(nine, batch=9) == {(4, Schedule.ONE_F_ONE_B, 1)}
    assert (4, interleaved, 2) in list_searched(nine, batch=8)


def test_the_bound_of_a_schedule_is_below_its_simulated_step() -> None:
    strategy = STRATEGIES[Strategy.PIPELINE]
    for schedule, virtual in strategy.list_schedules(Mesh(pp=4)):
        setting = Setting(
            strategy=Strategy.PIPELINE,
            mesh=Mesh(pp=4),
            micro_batch=1,
            accumulation=8,
            global_batch=8,
            schedule=schedule,
            virtual_stages=virtual,
        )
        shape = PipelineShape(schedule, 4, virtual, 8)
        for shares in ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (0.25, 0.35, 0.4)):
            times = (StageTimes(*(share / virtual for share in shares)),) * shape.stages
            alone_s = 8 * 4 * sum(shares)
            bound = strategy.least_step_s(setting, functools.partial(float, alone_s))
            assert bound is not None
            assert bound <= simulate_step(shape, times).total_s * (1 + 1e-9)


def test_max_adds_micro_batches_that_a_schedule_can_have() -> None:
    asked: dict[str, Any] = {
        "gpus": 4, "strategy": "pipeline", "schedule": "interleaved-1f1b", "micro_batch": 1,
        "global_batch": 9, "precision": "bf16", "recompute": "none", "compile": False, "optimizer": "fused",
        "allocator": "default",
    }  # fmt: skip
    with pytest.raises(WrongUse, match="9 is no multiple of 2"):
        make_setting(**asked)
    setting = make_setting(**asked, any_batch=True)
    assert (setting.accumulation, setting.global_batch) == (10, 10)
