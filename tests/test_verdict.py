"""Verdicts: replays within a capacity, the smallest one that runs, and what estimates and plans say of it.

Expected values are derived by hand from c10/cuda/CUDACachingAllocator.cpp: requests of 10 MiB and more get a
segment of their own, rounded up to 2 MiB; when `cudaMalloc` fails, segments without a live block are
released and it is called again.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from bench.least_cap import CASES, case_named, request_of, search_limit
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from outlooks import Law, workload
from trimtab import render
from trimtab.catalog.clusters import parse_cluster
from trimtab.catalog.facts import facts_of
from trimtab.errors import NothingFits
from trimtab.planner import decision, plan_files
from trimtab.planner.decision import PlanQuestion
from trimtab.predict.capacity import (
    MAX_STEPS,
    TrainingSteps,
    find_least_capacity,
    judge_fully,
    replay_within,
    training_steps,
)
from trimtab.predict.estimate import estimate_trace
from trimtab.predict.memory import add_accumulation
from trimtab.spec import Allocator, Mesh, Policy, Setting, Strategy, Trace, Verdict
from trimtab.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.spec import Estimate, Plan

H200 = parse_cluster("H200").devices[0]
CONTEXT_BYTES = facts_of(H200).memory.context_bytes
SINGLE = Setting(micro_batch=1, global_batch=1)
Move = tuple[str, int] | tuple[str, int, int] | str
"""A name, its size in MiB and a stream, to allocate; or a name to free, of this step or the one before."""


def trace_of(weights: Sequence[int], *steps: Sequence[Move]) -> Trace:
    """A trace of weights and of three steps, or of the steps that are given."""
    order: list[int] = []
    sizes: list[int] = []
    streams: list[int] = []
    live: dict[str, int] = {}
    marks = {"build": 0}

    def allocate(size: int, stream: int = 0) -> int:
        order.append(len(sizes))
        sizes.append(size * MIB)
        streams.append(stream)
        return order[-1]

    for size in weights:
        allocate(size)
    for number, step in enumerate(steps * (3 if len(steps) == 1 else 1)):
        marks[f"step{number}"] = len(order)
        for move in step:
            if isinstance(move, str):
                if move in live:
                    order.append(~live.pop(move))
            else:
                live[move[0]] = allocate(*move[1:])
    marks["end"] = len(order)
    zeros = (0,) * len(sizes)
    return Trace(
        order=tuple(order),
        sizes=tuple(sizes),
        streams=tuple(streams),
        parts=zeros,
        modules=zeros,
        ops=zeros,
        module_names=("",),
        op_names=("op",),
        marks=marks,
    )


GROWING = trace_of([100], [("a", 30), "a", ("b", 50), "b"])
"""On a large device 100 + 30 + 50 MiB. With 150 the 30 are released for the 50, which then serve both."""
TURNS = trace_of([100], [("a", 50, 0), "a", ("b", 50, 1), "b"])
"""Two streams do not serve each other: within 150 MiB each releases what the other has cached."""
PINNED = trace_of([20], [("a", 60), "a", ("b", 12), ("c", 80), "c", "b"])
"""b is cut from the cached 60 MiB of a, which then cannot be released for c."""
LATE = trace_of(
    [30, 12, 30],
    [
        "keep", ("a", 25), ("keep", 25), ("b", 3), ("c", 14), ("d", 14), ("e", 11),
        "d", "a", "b", ("f", 40), "c", "f", "e",
    ],
)  # fmt: skip
"""Three steps run within 204 MiB; a later one finds other gaps, and needs 210."""


# --- replays within a capacity


def test_a_cached_segment_is_released_for_a_larger_one() -> None:
    steps = training_steps(GROWING)
    free = replay_within(steps, None)
    assert (free.allocated_bytes, free.reserved_bytes) == (150 * MIB, 180 * MIB)
    tight = replay_within(steps, 150 * MIB)
    assert (tight.runs, tight.reserved_bytes, tight.first_releases) == (True, 150 * MIB, 1)
    # The 50 MiB serve the 30 as well from then on.
    assert tight.releases == 0
    assert not replay_within(steps, 150 * MIB - 1).runs
    assert find_least_capacity(steps) == 150 * MIB


def test_a_split_block_pins_its_segment_unless_segments_expand() -> None:
    steps = training_steps(PINNED)
    # 20 and 60 for a and b; c's 80 beside them.
    assert replay_within(steps, None).reserved_bytes == 160 * MIB
    assert find_least_capacity(steps) == 160 * MIB
    # One range: 20, then b in front of a's 60, of which 48 are free; c takes those and two pages of 20.
    expanding = replay_within(steps, None, expandable=True)
    assert expanding.reserved_bytes == 120 * MIB
    assert find_least_capacity(steps, expandable=True) == 120 * MIB


def test_streams_that_take_turns_release_in_every_step() -> None:
    steps = training_steps(TURNS)
    tight = replay_within(steps, 150 * MIB)
    assert tight.runs
    assert tight.releases == 2
    assert replay_within(steps, 200 * MIB).releases == 0


def test_a_limit_by_fraction_counts_whole_requests_of_expandable_segments() -> None:
    # 15 MiB are mapped as 20; 6 more need one more page, but torch holds 20 against the limit all the same.
    steps = training_steps(trace_of([15], [("a", 26), "a"]))
    assert find_least_capacity(steps, expandable=True) == 60 * MIB
    by_fraction = find_least_capacity(steps, expandable=True, by_fraction=True)
    assert not replay_within(steps, 40 * MIB, expandable=True, by_fraction=True).runs
    assert replay_within(steps, by_fraction, expandable=True, by_fraction=True).runs
    default = training_steps(GROWING)
    assert find_least_capacity(default, by_fraction=True) == find_least_capacity(default)


def test_a_job_that_fails_after_the_traced_steps_needs_more() -> None:
    steps = training_steps(LATE)
    traced = TrainingSteps(steps.building, steps.steps, None, {})
    assert find_least_capacity(traced) == 204 * MIB
    assert replay_within(traced, 204 * MIB).runs
    assert not replay_within(steps, 204 * MIB).runs
    assert find_least_capacity(steps) == 210 * MIB


def test_steps_are_repeated_only_where_they_repeat_themselves() -> None:
    assert len(list(training_steps(GROWING).run_steps())) == MAX_STEPS
    growing = [("a", 30), "a"], [("a", 30), "a"], [("a", 40), "a"]
    leaking = [("a", 30)], [("b", 30)], [("c", 30)]
    handing = [("a", 30)], ["a", ("a", 30)], ["a", ("b", 30)]
    older = [("a", 30), ("b", 20)], [("c", 20), "c"], ["a", ("c", 20), "c"]
    for steps, many in ((growing, 3), (leaking, 3), (handing, MAX_STEPS), (older, 3)):
        assert len(list(training_steps(trace_of([10], *steps)).run_steps())) == many


def test_what_a_step_hands_on_is_freed_by_the_next_in_every_repeat() -> None:
    steps = training_steps(trace_of([10], ["grad", ("a", 30), ("grad", 20), "a"]))
    run = replay_within(steps, None)
    assert run.runs
    assert (run.allocated_bytes, run.reserved_bytes) == (60 * MIB, 60 * MIB)


def test_a_trace_without_marks_is_one_step() -> None:
    trace = trace_of([100], [("a", 30), "a"]).replace(marks={})
    assert len(list(training_steps(trace).run_steps())) == 1
    assert replay_within(training_steps(trace), None).reserved_bytes == 130 * MIB


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Weights, and a step of tensors that are freed in any order; one may stay until the next step."""
    size = st.sampled_from([1, 3, 6, 9, 11, 14, 25, 40, 60])
    sizes = draw(st.lists(size, min_size=1, max_size=8))
    stream = st.sampled_from([0, 0, 0, 1])
    step: list[Move] = ["keep"]
    live: list[str] = []
    for number, one in enumerate(sizes):
        step.append((str(number), one, draw(stream)))
        live.append(str(number))
        gone = draw(st.permutations(live))[: draw(st.integers(0, len(live)))]
        step += gone
        live = [text for text in live if text not in gone]
    step += [("keep", draw(size)), *live]
    return trace_of(draw(st.lists(size, max_size=3)), step)


@settings(max_examples=40, deadline=None)
@given(traces(), st.booleans(), st.booleans())
def test_the_smallest_capacity_runs_and_is_between_allocated_and_reserved(
    trace: Trace, expandable: bool, by_fraction: bool
) -> None:
    steps = training_steps(trace)
    free = replay_within(steps, None, expandable=expandable)
    least = find_least_capacity(steps, expandable=expandable, by_fraction=by_fraction)
    assert free.allocated_bytes <= least
    assert replay_within(steps, least, expandable=expandable, by_fraction=by_fraction).runs
    if not by_fraction:
        assert least <= free.reserved_bytes
        enough = replay_within(steps, free.reserved_bytes, expandable=expandable)
        assert (enough.runs, enough.releases, enough.first_releases) == (True, 0, 0)


# --- the verdict of an estimate


def judged(trace: Trace, capacity: int, setting: Setting = SINGLE, **asked: Any) -> Estimate:
    found, _ = estimate_trace(trace, setting, H200)
    return judge_fully(
        add_accumulation(found, trace, setting).judge_quickly(capacity), trace, setting, **asked
    )


def with_band(size: int) -> int:
    """What a device must have for a process of so many bytes."""
    return -(-size * 105 // 100) + 1


@pytest.mark.parametrize(
    ("reserved", "verdict"),
    [
        (180 * MIB, Verdict.FITS),
        (179 * MIB, Verdict.FITS_TIGHT),
        (150 * MIB, Verdict.FITS_TIGHT),
        (149 * MIB, Verdict.DOES_NOT_FIT),
    ],
)
def test_the_verdict_is_by_the_upper_end_of_the_band(reserved: int, verdict: Verdict) -> None:
    found = judged(GROWING, with_band(reserved + CONTEXT_BYTES))
    assert found.verdict is verdict
    assert found.fits is (verdict is not Verdict.DOES_NOT_FIT)
    assert (found.releases_per_step == 0) is found.fits
    assert bool(found.verdict_reason) is (verdict is not Verdict.FITS)


@settings(max_examples=25, deadline=None)
@given(traces(), st.sampled_from(Allocator), st.lists(st.floats(0.5, 1.3), min_size=2, max_size=5))
def test_verdicts_never_get_worse_with_more_memory(
    trace: Trace, allocator: Allocator, shares: list[float]
) -> None:
    setting = SINGLE.replace(allocator=allocator)
    high = judged(trace, 1 << 40, setting).band.high_bytes
    rank = {Verdict.DOES_NOT_FIT: 0, Verdict.FITS_TIGHT: 1, Verdict.FITS: 2}
    found = [judged(trace, int(high * share), setting, explain=False) for share in sorted(shares)]
    ranks = [rank[one.verdict] for one in found if one.verdict is not None]
    assert len(ranks) == len(found)
    assert ranks == sorted(ranks)
    for one in found:
        assert (one.verdict is Verdict.FITS) is (one.band.high_bytes <= (one.capacity_bytes or 0))
        assert one.need_bytes >= one.allocated_bytes
        if one.fits:
            assert one.need_bytes <= (one.capacity_bytes or 0)


def test_the_smallest_capacity_counts_the_context_and_is_asked_for() -> None:
    roomy = judged(GROWING, GIB * 10)
    assert (roomy.verdict, roomy.least_bytes) == (Verdict.FITS, None)
    assert judged(GROWING, GIB * 10, always_least=True).least_bytes == 150 * MIB + CONTEXT_BYTES
    assert judged(GROWING, MIB, always_least=True).least_bytes == 150 * MIB + CONTEXT_BYTES
    # No replay can help where live tensors alone are too much.
    assert judged(GROWING, MIB).least_bytes is None


def test_a_tight_verdict_says_how_often_and_whether_expandable_segments_help() -> None:
    turns = judged(TURNS, with_band(150 * MIB + CONTEXT_BYTES))
    assert turns.releases_per_step == 2
    assert "about 2 times in every step" in turns.verdict_reason
    assert "longer than predicted" in turns.verdict_reason
    first = judged(GROWING, with_band(150 * MIB + CONTEXT_BYTES))
    assert "in the first steps only" in first.verdict_reason
    # Pages of 20 MiB: 100 and 60, and the 30 in the same ones.
    assert (
        "--allocator expandable: fits in"
        in judged(GROWING, with_band(160 * MIB + CONTEXT_BYTES)).verdict_reason
    )
    refused = judged(PINNED, with_band(130 * MIB + CONTEXT_BYTES))
    assert refused.verdict is Verdict.DOES_NOT_FIT
    assert re.match(r"112\.0 MiB allocated, 160\.0 MiB reserved; even after", refused.verdict_reason)
    assert "--allocator expandable: fits in" in refused.verdict_reason


def test_what_comes_on_top_of_a_trace_is_in_the_smallest_capacity() -> None:
    # A pipeline stage holds the activations of as many micro-batches as there are stages behind it.
    trace = GROWING.replace(kept_bytes=40 * MIB)
    setting = Setting(
        strategy=Strategy.PIPELINE, mesh=Mesh(pp=4), micro_batch=1, accumulation=8, global_batch=8
    )
    found = judged(trace, GIB * 10, setting, always_least=True)
    assert found.least_bytes == (150 + 3 * 40) * MIB + CONTEXT_BYTES
    summed = GROWING.replace(parts=(0, 1, 0, 1, 0, 1, 0), kept_bytes=0)
    once = judged(summed, GIB * 10, always_least=True)
    several = judged(summed, GIB * 10, SINGLE.replace(accumulation=2, global_batch=2), always_least=True)
    more = several.process_bytes - once.process_bytes
    assert more > 0
    assert (several.least_bytes or 0) - (once.least_bytes or 0) == more


def test_of_unlike_ranks_the_one_that_needs_most_decides() -> None:
    trace = GROWING.replace(beside=(PINNED.replace(rank="b", part=1),), rank="a")
    # The first reserves 180 and needs 150; the second reserves and needs 160.
    found = judged(trace, with_band(170 * MIB + CONTEXT_BYTES))
    assert (found.verdict, found.least_bytes) == (Verdict.FITS_TIGHT, 160 * MIB + CONTEXT_BYTES)
    assert judged(trace, with_band(155 * MIB + CONTEXT_BYTES)).verdict is Verdict.DOES_NOT_FIT


def test_people_read_the_verdict_and_its_reason() -> None:
    found = judged(GROWING, with_band(170 * MIB + CONTEXT_BYTES))
    _, details = estimate_trace(GROWING, SINGLE, H200)
    console = Console(width=80, file=None, record=True, quiet=False)
    with console.capture() as caught:
        console.print(render.render_estimate(found, details, heading="job on H200"))
    text = " ".join(caught.get().split())
    assert "job on H200: fits tightly, " in text
    assert "torch can release cached blocks and run in" in text


def test_a_verdict_that_contradicts_itself_is_refused() -> None:
    found = judged(GROWING, GIB * 10)
    with pytest.raises(ValueError, match="contradicts the verdict"):
        found.replace(fits=False)
    with pytest.raises(ValueError, match="least"):
        found.replace(least_bytes=1)


# --- plans


def planned(law: Law, **policy: Any) -> Plan:
    question = PlanQuestion(
        job="fake", workload=workload(), cluster=parse_cluster("1xA100-40GB"), policy=Policy(**policy)
    )
    return decision.choose_plan(question, law)


ONLY_ONE = {"pins": {"recompute": "none", "compile": False, "micro_batch": 32}}
"""About 41 GiB with the default allocator, 38 with expandable segments, with the band."""


def test_a_plan_fits_tightly_only_where_nothing_else_fits() -> None:
    roomy = planned(Law(cached_share=0.3))
    assert roomy.estimate.verdict is Verdict.FITS
    with pytest.raises(NothingFits):
        planned(Law(cached_share=0.0), **ONLY_ONE)
    tight = planned(Law(cached_share=0.3), **ONLY_ONE)
    assert tight.estimate.verdict is Verdict.FITS_TIGHT
    assert tight.estimate.fits
    reason = next(reason.why for reason in tight.reasons if reason.subject == "allocator")
    assert reason == "cached blocks are released, explained"
    assert "It fits only because torch releases cached blocks" in tight.recommendation
    assert "--memory 0.9" in tight.recommendation


def test_the_largest_tight_micro_batch_is_found() -> None:
    pins = {"recompute": "none", "compile": False, "allocator": "default"}
    # Of 35.5 GiB: one sample reserves 37.2 and two 43.7; with 30 % released two need 32.3, and three 37.
    found = planned(Law(cached_share=0.3, static_bytes=30 * GIB, sample_bytes=6 * GIB), pins=pins)
    assert found.estimate.verdict is Verdict.FITS_TIGHT
    assert found.choice.micro_batch == 2
    assert found.estimate.need_bytes <= 0.9 * (found.estimate.capacity_bytes or 0)
    why = next(reason.why for reason in found.reasons if reason.subject == "micro_batch")
    assert why.startswith("the largest that fits; ")


def test_a_tight_plan_holds_on_the_gpu_that_it_was_made_for() -> None:
    plan = planned(Law(cached_share=0.3), **ONLY_ONE)
    prints = plan.fingerprints
    assert plan.estimate.band.high_bytes > plan.estimate.need_bytes
    assert plan_files.list_changes(plan, prints, parse_cluster("1xA100-40GB")) == []
    text = " ".join(_shown(plan).split())
    assert "torch releases cached blocks, and runs in" in text


def test_nothing_fits_says_what_is_allocated_and_reserved() -> None:
    with pytest.raises(NothingFits) as caught:
        planned(Law(cached_share=0.02, static_bytes=34 * GIB, sample_bytes=6 * GIB))
    sizes = r"\S+ GiB allocated, \S+ GiB reserved"
    assert re.search(rf"\(upper band, even after releasing cached blocks; {sizes}\)", caught.value.found)


def _shown(plan: Plan) -> str:
    console = Console(width=80)
    with console.capture() as caught:
        console.print(render.render_plan(plan))
    return caught.get()


# --- the program that measures


def test_the_search_on_the_gpu_finds_the_limit_from_any_guess() -> None:
    for true in (1001, 1234, 1999):
        for guess in (900, 1100, 1234, 2500):
            low, high = search_limit(lambda limit: limit >= true, 1000, 2000, guess=guess)  # noqa: B023
            assert low < true <= high
            assert high - low <= 0.003 * high


def test_the_cases_to_measure_are_recorded_ones_of_all_kinds() -> None:
    chosen = [request_of(case_named(name)).setting for name in CASES]
    assert sum(one.compile for one in chosen) >= 3
    assert sum(one.strategy is Strategy.FSDP for one in chosen) >= 3
    assert len(chosen) >= 8
