"""The search, with laws of memory and time that are made up (see outlooks.py)."""

from __future__ import annotations

import doctest
import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from outlooks import Law, workload
from trimtab import spec
from trimtab.catalog.clusters import device_from_row, parse_cluster
from trimtab.catalog.tables import devices
from trimtab.errors import JobFailed, NothingFits, UnknownName, WrongUse
from trimtab.planner import batch_split, decision, explanations, pins, plan_files
from trimtab.planner import search as searching
from trimtab.planner.batch_split import (
    divide_evenly,
    divide_in_proportion,
    find_split,
    list_micro_batches,
    list_splits,
    make_share,
)
from trimtab.planner.decision import PlanQuestion
from trimtab.planner.estimator import TraceEstimator
from trimtab.planner.search import TIE, is_tie, objective_value, search_space, simplicity_key
from trimtab.planner.space import build_space, list_layouts
from trimtab.spec import (
    Allocator,
    BaseFormat,
    Cluster,
    Link,
    LossForm,
    Mesh,
    Node,
    Objective,
    OptimizerRule,
    Plan,
    Policy,
    Precision,
    Recompute,
    Setting,
    Slice,
    Strategy,
    Trace,
    Work,
)
from trimtab.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.planner.estimator_interface import Layout
    from trimtab.spec import Workload

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def planned(
    on: str | Cluster,
    law: Law | None = None,
    job: Workload | None = None,
    compare: tuple[int, ...] = (),
    **policy: Any,
) -> Plan:
    where = parse_cluster(on) if isinstance(on, str) else on
    question = PlanQuestion(
        job="fake", workload=job or workload(), cluster=where, policy=Policy(**policy), compare=compare
    )
    return decision.choose_plan(question, law or Law())


def is_kept(setting: Setting, whole: int) -> bool:
    """Whether every global batch has exactly that many samples, by what each rank really runs."""
    if setting.shares:
        ranks = [list_micro_batches(share.samples, share.micro_batch) for share in setting.shares]
        rounds = [share.accumulation for share in setting.shares]
    else:
        samples = divide_evenly(whole, setting.data_parallel)
        ranks = [list_micro_batches(sample, setting.micro_batch) for sample in samples]
        rounds = [setting.accumulation] * len(ranks)
    return (
        sum(map(sum, ranks)) == whole
        and len(ranks) == setting.data_parallel
        and all(len(sizes) <= most for sizes, most in zip(ranks, rounds, strict=True))
        and all(max(sizes) <= setting.micro_batch for sizes in ranks)
    )


# --- the batch


@given(st.integers(1, 3000), st.integers(1, 64))
def test_every_cut_covers_the_share_with_nothing_to_spare(whole: int, ranks: int) -> None:
    assume(ranks <= whole)
    share = -(-whole // ranks)
    found = list_splits(whole, ranks)
    assert found[0] == (share, 1)
    assert found[-1] == (1, share)
    for micro, rounds in found:
        assert micro * (rounds - 1) < share <= micro * rounds
        Setting(
            strategy=Strategy.DDP if ranks > 1 else Strategy.SINGLE,
            mesh=Mesh(dp_replicate=ranks),
            micro_batch=micro,
            accumulation=rounds,
            global_batch=whole,
        )
    divisors = {index for index in range(1, share + 1) if share % index == 0}
    assert divisors <= {micro for micro, _ in found}
    assert len(found) <= 2 * math.isqrt(share) + 1


def test_cuts_leave_out_only_what_another_cut_beats() -> None:
    kept = dict(list_splits(100, 1))
    for micro in range(1, 101):
        rounds = -(-100 // micro)
        better = min(key for key, many in kept.items() if many <= rounds)
        assert better <= micro


@given(st.integers(1, 500), st.integers(1, 64))
def test_ranks_differ_by_one_sample_at_most(whole: int, ranks: int) -> None:
    found = divide_evenly(whole, ranks)
    assert sum(found) == whole
    assert max(found) - min(found) <= 1


@given(st.integers(2, 500), st.lists(st.floats(0.01, 100), min_size=2, max_size=6))
def test_shares_in_proportion_add_up_exactly(whole: int, weights: list[float]) -> None:
    found = divide_in_proportion(whole, weights, [whole] * len(weights))
    if whole < len(weights):
        assert found is None
        return
    assert found is not None
    assert sum(found) == whole
    assert min(found) >= 1


def test_shares_stay_below_what_a_rank_can_take() -> None:
    assert divide_in_proportion(10, [1, 9], [8, 5]) == [5, 5]
    assert divide_in_proportion(10, [1, 1], [4, 5]) is None
    assert divide_in_proportion(10, [1, 1], [0, 20]) is None


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_share_is_cut_within_its_micro_batch(samples: int, micro: int) -> None:
    found = make_share(samples, micro)
    assert found.micro_batch <= micro
    assert found.samples == samples


def test_a_pinned_micro_batch_that_is_larger_than_the_share_has_no_cut() -> None:
    assert find_split(64, 8, micro_batch=9) is None
    assert find_split(64, 8, micro_batch=3) == (3, 3)


# --- the laws that every plan keeps


laws = st.builds(
    Law,
    static_bytes=st.integers(1, 120).map(lambda one: one * GIB),
    sample_bytes=st.integers(1, 4000).map(lambda one: one * 2**20),
    sample_flops=st.floats(1e9, 1e15),
    launch_s=st.floats(1e-4, 0.2),
)
names = st.sampled_from([row.typed[0] for row in devices()])
batches = st.integers(1, 300)


@QUICK
@given(law=laws, name=names, gpus=st.integers(1, 8), whole=batches, share=st.floats(0.3, 1.0))
@pytest.mark.slow
def test_a_plan_fits_by_its_upper_band_and_keeps_the_batch(
    law: Law, name: str, gpus: int, whole: int, share: float
) -> None:
    try:
        plan = planned(f"{gpus}x{name}", law, workload(global_batch=whole), memory_share=share)
    except NothingFits as error:
        for change in error.nearest:
            assert change.estimate.band.high_bytes <= (change.estimate.capacity_bytes or 0)
            assert is_kept(change.setting, change.setting.global_batch)
        return
    assert plan.estimate.capacity_bytes is not None
    assert plan.estimate.band.high_bytes <= share * plan.estimate.capacity_bytes
    for setting in (plan.choice, *(one.setting for one in plan.runners_up)):
        assert is_kept(setting, whole)
        assert setting.gpus <= gpus
        assert setting.data_parallel <= whole
    for one in plan.runners_up:
        assert one.estimate.band.high_bytes <= share * plan.estimate.capacity_bytes
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("row", devices(), ids=lambda row: row.typed[0])
def test_the_batch_is_kept_on_every_device_of_the_catalogue(row: Any) -> None:
    law = Law(static_bytes=GIB, sample_bytes=2**27)
    for whole in (1, 7, 64, 97):
        plan = planned(f"3x{row.typed[0]}", law, workload(global_batch=whole))
        assert is_kept(plan.choice, whole)
        emulated = device_from_row(row, 0, "test").bf16 is False
        assert plan.choice.precision is (Precision.FP16 if emulated else Precision.BF16)


@QUICK
@given(law=laws, whole=batches, more=st.integers(0, 100), gpus=st.integers(1, 4))
@pytest.mark.slow
def test_more_memory_never_gives_a_slower_plan(law: Law, whole: int, more: int, gpus: int) -> None:
    small = parse_cluster(f"{gpus}xA100-40GB")
    node = small.nodes[0]
    roomy = tuple(device.replace(memory_bytes=device.memory_bytes + more * GIB) for device in node.devices)
    large = small.replace(nodes=(node.replace(devices=roomy),))
    job = workload(global_batch=whole)
    try:
        before = planned(small, law, job)
    except NothingFits:
        return
    assert seconds(planned(large, law, job)) <= seconds(before) * (1 + TIE)


def seconds(plan: Plan) -> float:
    assert plan.estimate.step_s is not None
    return plan.estimate.step_s


@QUICK
@given(law=laws, whole=batches, gpus=st.integers(1, 7), name=st.sampled_from(["H100", "T4", "RTX4090"]))
@pytest.mark.slow
def test_another_gpu_never_gives_a_slower_plan(law: Law, whole: int, gpus: int, name: str) -> None:
    job = workload(global_batch=whole)
    try:
        before = planned(f"{gpus}x{name}", law, job)
    except NothingFits:
        return
    assert seconds(planned(f"{gpus + 1}x{name}", law, job)) <= seconds(before) * (1 + TIE)


@QUICK
@given(law=laws, whole=st.integers(1, 100), nodes=st.integers(1, 3))
@pytest.mark.slow
def test_another_node_never_gives_a_slower_plan(law: Law, whole: int, nodes: int) -> None:
    job = workload(global_batch=whole)
    try:
        before = planned(f"{nodes}x4xH100", law, job)
    except NothingFits:
        return
    assert seconds(planned(f"{nodes + 1}x4xH100", law, job)) <= seconds(before) * (1 + TIE)


@QUICK
@given(law=laws, whole=batches, gpus=st.integers(1, 6), objective=st.sampled_from(Objective))
@pytest.mark.slow
def test_bounds_change_no_choice(law: Law, whole: int, gpus: int, objective: Objective) -> None:
    job, where = workload(global_batch=whole), parse_cluster(f"{gpus}xA100-40GB")
    policy = Policy(objective=objective)
    bounded, blind = Law(**known(law)), Law(**known(law), bounds=False)
    quick = search_space(build_space(job, where, policy), bounded)
    slow = search_space(build_space(job, where, policy), blind)
    assert (quick.best is None) == (slow.best is None)
    if quick.best is not None and slow.best is not None:
        assert quick.best.estimate.step_s == slow.best.estimate.step_s


@pytest.mark.parametrize("objective", [Objective.SPEED, Objective.COST])
@pytest.mark.slow
def test_bounds_save_traces_over_many_jobs(objective: Objective) -> None:
    """A single search may trace more with bounds: they change the order in which it looks."""
    counts = [0, 0]
    for static_gib, gpus, whole in itertools.product((1, 10, 23), (1, 2, 4), (16, 96, 271)):
        for place, bounds in enumerate((True, False)):
            law = Law(static_bytes=static_gib * GIB, bounds=bounds)
            cluster = parse_cluster(f"{gpus}xA100-40GB")
            search_space(build_space(workload(global_batch=whole), cluster, Policy(objective=objective)), law)
            counts[place] += len(law.traced)
    assert counts[0] < counts[1]


def known(law: Law) -> dict[str, Any]:
    fields = ("static_bytes", "sample_bytes", "sample_flops", "launch_s")
    return {name: getattr(law, name) for name in fields}


@QUICK
@given(law=laws, whole=st.integers(1, 60), gpus=st.integers(1, 4), objective=st.sampled_from(Objective))
def test_the_choice_is_the_simplest_of_all_that_are_as_good_as_the_best(
    law: Law, whole: int, gpus: int, objective: Objective
) -> None:
    """Against every legal setting, one by one."""
    job, policy = workload(global_batch=whole), Policy(objective=objective)
    legal = build_space(job, parse_cluster(f"{gpus}xA100-40GB"), policy)
    fitting = []
    for family in legal.families:
        for split in family.splits:
            for allocator in Allocator:
                setting = family.setting(split, allocator)
                estimate = law.estimate(setting, family.layout)
                if estimate.band.high_bytes <= int(0.9 * (estimate.capacity_bytes or 0)):
                    fitting.append(
                        (objective_value(setting, estimate.step_s, objective), simplicity_key(setting))
                    )
    found = search_space(legal, law)
    if not fitting:
        assert found.best is None
        return
    assert found.best is not None
    best = min(one for one, _ in fitting)
    simplest = min((simple, one) for one, simple in fitting if is_tie(one, best))
    chosen = objective_value(found.best.setting, found.best.estimate.step_s, objective)
    assert (simplicity_key(found.best.setting), chosen) == simplest
    # What was given up for that is told.
    assert (found.fastest is None) == (chosen == best)


def test_few_settings_are_looked_at_closely_where_bounds_are_good() -> None:
    law = Law(static_bytes=60 * GIB)
    legal = build_space(workload(global_batch=512), parse_cluster("8x8xH100"), Policy())
    assert search_space(legal, law).best is not None
    assert sum(len(family.splits) for family in legal.families) > 2900
    assert len(law.asked) < 400


# --- choices


def test_the_choice_is_not_compared_with_far_smaller_micro_batches() -> None:
    cluster = parse_cluster("1xA100-40GB")
    space = build_space(workload(), cluster, Policy(pins={"recompute": "none", "compile": False}))
    result = search_space(space, Law(static_bytes=20 * GIB, sample_bytes=GIB // 4))
    best = result.best
    assert best is not None
    assert best.setting.micro_batch == 32
    whys = []
    for micro in (4, 2):
        far = replace(best, setting=best.setting.replace(micro_batch=micro, accumulation=64 // micro))
        only = replace(result, evaluations=[best, far])
        reasons = explanations.list_reasons(best, only, space, cluster)
        whys.append(next(reason.why for reason in reasons if reason.subject == "micro_batch"))
    assert "4 takes as long" in whys[0]
    assert whys[1] == "the largest that fits"


def test_recomputing_is_chosen_only_where_it_pays() -> None:
    roomy = planned("H200", Law(sample_bytes=2**20))
    tight = planned("RTX4090", Law(static_bytes=18 * GIB, sample_bytes=8 * GIB))
    assert roomy.choice.recompute is Recompute.NONE
    assert tight.choice.recompute is not Recompute.NONE


def test_the_expandable_allocator_is_taken_only_where_the_default_does_not_fit() -> None:
    law = Law(static_bytes=130 * GIB)
    plan = planned("8x8xH100", law, workload(global_batch=512))
    assert plan.choice.allocator is Allocator.EXPANDABLE
    default = law.need_bytes(plan.choice.replace(allocator=Allocator.DEFAULT))
    assert default * 1.05 > 0.9 * (plan.estimate.capacity_bytes or 0)
    assert planned("H200").choice.allocator is Allocator.DEFAULT


def test_branches_get_as_even_numbers_of_gpus_as_there_can_be_and_pipelines_every_divisor() -> None:
    legal = build_space(
        workload(global_batch=16, branches=("llama", "qwen")), parse_cluster("4xH100"), Policy()
    )
    found = {
        (family.layout.gpus, family.strategy, family.mesh.copies or family.mesh.branch_ranks)
        for family in legal.families
    }
    assert {one[2] for one in found if one[1] is Strategy.HYBRID} == {(2, 1), (1, 2), (2, 2)}
    assert {one[0] for one in found if one[1] is Strategy.BRANCH} == {2}
    piped = [family for family in legal.families if family.strategy is Strategy.PIPELINE]
    assert {(one.mesh.pp, one.mesh.dp_replicate) for one in piped} == {(2, 1), (3, 1), (4, 1), (2, 2)}
    assert not any(one.compile for one in piped)
    uneven = [family for family in legal.families if family.mesh.copies]
    # The branch with two ranks has shares of 8, and fills them.
    assert {one.splits[0] for one in uneven} == {(8, 2)}
    assert all(family.setting(family.splits[-1]).gpus == family.layout.gpus for family in legal.families)


@pytest.mark.slow
def test_two_frozen_models_are_split_by_the_number_of_gpus(tmp_path: Any, monkeypatch: Any) -> None:
    """2 GPUs: a model each; 3: two and one; 4: two each, sharing the batch."""
    import trimtab

    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    for gpus, how, ranks in ((2, "branch", (1, 1)), (3, "hybrid", (2, 1)), (4, "hybrid", (2, 2))):
        choice = trimtab.plan("bridge:tiny", f"{gpus}xA100-40GB", pins={"strategy": how, "gpus": gpus}).choice
        assert choice.strategy == how
        assert sorted(choice.mesh.branch_ranks, reverse=True) == list(ranks)
        assert choice.micro_batch * choice.accumulation * choice.data_parallel == 16


def test_branches_are_used_where_the_job_has_them() -> None:
    law = Law(static_bytes=36 * GIB, branch_share=0.4)
    with_branches = planned("2xA100-40GB", law, workload(branches=("llama", "qwen")))
    assert with_branches.choice.strategy is Strategy.BRANCH
    assert with_branches.choice.mesh.branch == 2
    assert with_branches.choice.data_parallel == 1
    four = planned("4xA100-40GB", law, workload(branches=("llama", "qwen")))
    assert four.choice.strategy is Strategy.HYBRID
    assert planned("2xA100-40GB", law).choice.strategy is Strategy.FSDP


def test_a_plan_may_leave_gpus_alone() -> None:
    slow_network = planned("2x8xH100", Law(static_bytes=40 * GIB, sample_flops=1e10))
    assert slow_network.choice.gpus < 16
    assert "left free" in slow_network.recommendation


def test_a_tie_goes_to_the_simpler_strategy_and_says_so() -> None:
    plan = planned("4xA100-40GB", Law(static_bytes=10 * GIB), pins={"gpus": 4})
    fsdp = next(one for one in plan.runners_up if one.setting.strategy is Strategy.FSDP)
    assert fsdp.estimate.step_s is not None
    assert fsdp.estimate.step_s < seconds(plan) < fsdp.estimate.step_s * (1 + TIE)
    assert plan.choice.strategy is Strategy.DDP
    assert "less simple" in fsdp.why
    told = {reason.subject: reason.why for reason in plan.reasons}
    assert (
        "fsdp would take 423 ms (-1.2%); the difference is within 2%, below the prediction error"
        in told["strategy"]
    )
    # Where it is clearly faster it is taken, and nothing is said of ties.
    clear = planned("4xA100-40GB", Law(static_bytes=18 * GIB, sample_flops=1e11), pins={"gpus": 4})
    assert clear.choice.strategy is Strategy.FSDP
    assert "prediction error" not in " ".join(reason.why for reason in clear.reasons)


def test_a_second_gpu_that_saves_next_to_nothing_is_left_free() -> None:
    law = Law(static_bytes=GIB // 64, sample_bytes=2**20, sample_flops=8e9, launch_s=0.05)
    plan = planned("2xA100-40GB", law, pins={"compile": False})
    assert plan.choice.strategy is Strategy.SINGLE
    assert plan.recommendation.startswith("1 GPU is as fast as 2, within 2%")
    told = {reason.subject: reason.why for reason in plan.reasons}
    assert "on 2 it would take" in told["gpus"]


def test_a_tie_never_costs_a_deadline() -> None:
    free = planned("4xA100-40GB", pins={"gpus": 4})
    fastest = min(one.estimate.hours or 0.0 for one in free.runners_up) * 3600
    assert free.choice.strategy is Strategy.DDP
    for share in (1.0, 0.9):
        late = planned("4xA100-40GB", pins={"gpus": 4}, deadline_s=fastest * 1.0001 / share)
        assert late.choice.strategy is Strategy.FSDP


def test_the_choice_has_a_reason_for_everything() -> None:
    plan = planned("4xA100-40GB")
    subjects = [reason.subject for reason in plan.reasons]
    assert subjects == [
        "gpus",
        "strategy",
        "micro_batch",
        "accumulation",
        "precision",
        "recompute",
        "compile",
        "optimizer",
        "allocator",
        "workers",
    ]
    told = {reason.subject: reason.why for reason in plan.reasons}
    assert told["accumulation"] == "16 x 1 x 4 data-parallel = 64, exactly"
    assert "312 TFLOP/s" in told["precision"]
    assert len(plan.runners_up) == 5
    times = [one.estimate.step_s or 0.0 for one in plan.runners_up]
    assert times == sorted(times)
    assert min(times) * (1 + TIE) >= seconds(plan)
    assert all(one.why for one in plan.runners_up)
    assert all(one.count >= 1 for one in plan.rejected)


def test_an_uneven_batch_is_said() -> None:
    plan = planned("8xH100", job=workload(global_batch=97))
    told = {reason.subject: reason.why for reason in plan.reasons}
    assert "the last is smaller" in told["accumulation"]
    assert "97 exactly" in told["accumulation"]


def test_workers_follow_from_the_cores_of_a_rank() -> None:
    where = parse_cluster("4xH100")
    cores = where.replace(nodes=(where.nodes[0].replace(cpu_cores=24),))
    assert planned(cores, pins={"gpus": 4}).choice.workers == 5
    assert planned(cores, pins={"gpus": 4, "workers": 2}).choice.workers == 2


def test_busy_gpus_are_passed_over() -> None:
    where = parse_cluster("4xA100-40GB")
    busy = [
        device.replace(free_bytes=4 * GIB if device.index == 0 else 39 * GIB)
        for device in where.nodes[0].devices
    ]
    plan = planned(
        where.replace(nodes=(where.nodes[0].replace(devices=tuple(busy)),)), Law(static_bytes=8 * GIB)
    )
    assert [place.device for place in plan.places] == [1, 2, 3]


def test_a_fast_link_is_tried_beside_the_roomiest_gpus() -> None:
    where = parse_cluster("4xRTX3090")
    bridge = Link(
        kind="NVLink3 bridge", node=0, devices=(2, 3), bandwidth_bytes_per_s=56e9, source="stated: test"
    )
    pairs = [
        layout for layout in list_layouts(where.replace(links=(*where.links, bridge))) if layout.gpus == 2
    ]
    assert [[place.device for place in pair.places] for pair in pairs] == [[0, 1], [2, 3]]


def sliced(count: int, whole: int = 0, profile: str = "3g.20gb") -> Cluster:
    """An A100 cut into so many slices alike, beside whole ones."""
    where = parse_cluster(f"{count + whole}xA100-40GB")
    devices = tuple(
        device.replace(slice=Slice(profile=profile, parent="GPU-1", sm_share=0.43), memory_bytes=19 * GIB)
        if device.index < count
        else device
        for device in where.nodes[0].devices
    )
    return where.replace(nodes=(where.nodes[0].replace(devices=devices),))


def test_mig_slices_are_planned_one_by_one() -> None:
    plan = planned(sliced(2), compare=(1, 2))
    assert plan.choice.gpus == 1
    assert plan.choice.strategy is Strategy.SINGLE
    assert any("each can run a job of its own" in one.why for one in plan.rejected)
    told = {reason.subject: reason.why for reason in plan.reasons}
    assert "MIG slices cannot work on one job together" in told["gpus"]
    assert plan.comparison[1].setting is None
    assert plan.comparison[1].why == "MIG slices do not join"
    assert "2: MIG slices do not join" in plan.recommendation


@pytest.mark.parametrize("pinned", [{"gpus": 2}, {"strategy": "ddp"}, {"data_parallel": 2}])
def test_a_pin_that_needs_several_mig_slices_is_refused_with_the_cure(pinned: dict[str, Any]) -> None:
    with pytest.raises(WrongUse, match=r"NCCL does not join slices.*Leave the pin out.*-mig 0") as caught:
        planned(sliced(2), pins=pinned)
    assert "3g.20gb" in caught.value.found
    # One slice is too few for another cause, and whole GPUs beside slices do work together.
    with pytest.raises(WrongUse) as alone:
        planned(sliced(1), pins={"strategy": "ddp"})
    assert "MIG" not in alone.value.found
    beside = planned(sliced(1, whole=2), pins=pinned)
    assert [place.device for place in beside.places] == [1, 2]


def test_what_does_not_fit_on_a_mig_slice_is_not_sent_to_more_of_them() -> None:
    with pytest.raises(NothingFits) as caught:
        planned(sliced(2), Law(static_bytes=24 * GIB, sample_bytes=2**20))
    whats = [one.what for one in caught.value.nearest]
    assert not any("of these GPUs" in what for what in whats)
    assert any(what.startswith("use 1 x ") for what in whats)


def test_a_device_of_unknown_speed_gets_a_plan_without_times() -> None:
    device = (
        parse_cluster("H100").devices[0].replace(model=None, name="Unheard Of", peaks=spec_peaks(), bf16=None)
    )
    where = Cluster(nodes=(Node(name="a", devices=(device,)),))
    law = Law(timed=False)
    plan = planned(where, law)
    assert plan.choice.precision is Precision.FP32
    assert plan.estimate.step_s is None
    assert plan.choice.recompute is Recompute.NONE
    assert "The time is unknown" in plan.recommendation
    assert len(law.asked) < 20


def spec_peaks() -> Any:
    from trimtab.spec import Peaks

    return Peaks()


# --- objectives, deadlines, comparison


def test_the_fewest_gpus_that_meet_the_deadline_are_taken() -> None:
    law: dict[str, Any] = {"static_bytes": GIB, "sample_bytes": 2**20}
    alone = planned("1xA100-40GB", Law(**law))
    hour = alone.estimate.hours
    assert hour is not None
    plan = planned(
        "8xA100-40GB",
        Law(**law),
        deadline_s=hour * 3600 / 2.5,
        objective=Objective.GPUS,
        compare=(1, 2, 4, 8),
    )
    assert plan.choice.gpus == 4
    assert [one.gpus for one in plan.comparison] == [1, 2, 4, 8]
    assert [one.meets_deadline for one in plan.comparison] == [False, False, True, True]
    assert plan.comparison[0].free_share == 7 / 8
    assert plan.comparison[0].scaling_efficiency == 1.0
    assert "4 GPUs are enough" in plan.recommendation
    doubled = plan.what_if[0]
    assert doubled.change == "20,000 samples"
    assert doubled.gpus == 8


def test_the_margin_of_a_deadline_is_kept_where_it_can_be() -> None:
    law: dict[str, Any] = {"static_bytes": GIB, "sample_bytes": 2**20}
    alone = planned("1xA100-40GB", Law(**law)).estimate.hours
    assert alone is not None
    tight = alone * 3600 * 1.02
    assert planned("2xA100-40GB", Law(**law), deadline_s=tight, objective=Objective.GPUS).choice.gpus == 2
    assert planned("1xA100-40GB", Law(**law), deadline_s=tight, objective=Objective.GPUS).choice.gpus == 1


def test_the_cheapest_plan_takes_the_fewest_gpu_hours() -> None:
    plan = planned("8xH100", objective=Objective.COST, price_per_gpu_hour=3.0, compare=(1, 2, 8))
    fastest = planned("8xH100")
    assert plan.cost == pytest.approx(3.0 * (plan.estimate.gpu_hours or 0))
    assert (plan.estimate.gpu_hours or 0) <= (fastest.estimate.gpu_hours or 0)
    assert plan.choice.gpus < fastest.choice.gpus
    assert "cheapest" in plan.recommendation


def test_hours_follow_from_steps_and_the_last_batch_of_an_epoch() -> None:
    plan = planned("H100", job=workload(samples=100, epochs=3, global_batch=64))
    assert plan.estimate.hours == pytest.approx(seconds(plan) * 2 * 3 / 3600)
    assert plan.estimate.gpu_hours == plan.estimate.hours


def test_half_the_batch_is_searched_again() -> None:
    plan = planned("2xH100", job=workload(global_batch=64))
    half = plan.what_if[-1]
    assert half.setting is not None
    assert half.setting.global_batch == 32
    assert is_kept(half.setting, 32)
    assert half.setting.gpus == plan.choice.gpus


def test_a_count_at_which_nothing_fits_has_a_row_that_says_so() -> None:
    plan = planned("8xH100", Law(static_bytes=200 * GIB), compare=(1, 8))
    assert plan.comparison[0].setting is None
    assert "nothing fits" in plan.comparison[0].why
    assert plan.choice.gpus == 8


def test_a_deadline_that_nothing_meets_says_what_would() -> None:
    with pytest.raises(
        NothingFits, match=r"the fastest plan takes .* on 4 GPUs.* Allow .*epoch.*samples"
    ) as caught:
        planned("4xH100", deadline_s=40)
    assert caught.value.exit_code == 3
    with pytest.raises(NothingFits, match="the fastest plan takes"):
        planned("4xH100", deadline_s=40, objective=Objective.GPUS)


def test_a_deadline_needs_a_horizon() -> None:
    with pytest.raises(WrongUse, match="how many samples"):
        planned("H100", job=workload(samples=None), deadline_s=60)


def test_an_epoch_that_is_less_than_a_step_is_said() -> None:
    few = planned("H100", job=workload(samples=63)).recommendation
    assert "An epoch of 63 samples is less than one step of 64" in few
    assert "smaller --global-batch" in few
    assert "less than one step" not in planned("H100", job=workload(samples=64)).recommendation
    assert "less than one step" not in planned("H100", job=workload(samples=None)).recommendation


@pytest.mark.parametrize("compare", [(0,), (1, 9), (-1,)])
def test_only_gpus_that_are_there_are_compared(compare: tuple[int, ...]) -> None:
    with pytest.raises(WrongUse, match="there are 4 GPUs"):
        planned("4xH100", compare=compare)


@pytest.mark.parametrize(
    ("key", "pinned"),
    [
        ("micro_batch", 4),
        ("accumulation", 2),
        ("data_parallel", 2),
        ("precision", "fp32"),
        ("optimizer", "foreach"),
        ("allocator", "expandable"),
        ("workers", 3),
        ("gpus", 3),
        ("strategy", "fsdp"),
        ("recompute", "full"),
        ("compile", False),
    ],
)
@pytest.mark.parametrize("objective", [Objective.SPEED, Objective.GPUS])
def test_what_if_keeps_every_pin(key: str, pinned: Any, objective: Objective) -> None:
    plan = planned(
        "4xH100", compare=(1, 2, 3, 4), pins={key: pinned}, objective=objective, deadline_s=10 * 3600.0
    )
    assert len(plan.what_if) == 3
    for row in plan.what_if:
        assert row.setting is not None
        assert getattr(row.setting, key) == pinned
        assert not row.unpinned


def test_what_if_says_which_pin_half_a_batch_cannot_keep_and_why() -> None:
    plan = planned("H100", pins={"micro_batch": 40, "workers": 3}, job=workload(global_batch=64))
    row = plan.what_if[-1]
    assert row.change == "global batch 32"
    assert row.unpinned == ("micro_batch=40",)
    assert row.why == (
        "without the pin micro_batch=40, which cannot hold: micro_batch=40, and a rank's share of the global "
        "batch 32 is 32"
    )
    assert row.setting is not None
    assert row.setting.workers == 3
    assert is_kept(row.setting, 32)
    # Of two pins that contradict each other in half the batch, one is enough to give up.
    both = planned("H100", pins={"micro_batch": 16, "accumulation": 4}).what_if[-1]
    assert both.unpinned == ("micro_batch=16",)
    assert both.setting is not None
    assert both.setting.accumulation == 4


def test_what_if_says_why_there_is_no_half_batch() -> None:
    row = planned("4xH100", pins={"gpus": 4, "strategy": "ddp"}, job=workload(global_batch=5)).what_if[-1]
    assert row.setting is None
    assert row.why == "4 data-parallel GPUs for a global batch of 2"


# --- pins and bad input


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("micro-batch=8", "micro_batch", 8),
        ("compile=false", "compile", False),
        ("COMPILE=True", "compile", True),
        ("strategy=fsdp", "strategy", "fsdp"),
        ("workers=0", "workers", 0),
    ],
)
def test_a_pin_is_read_as_people_type_it(text: str, key: str, value: Any) -> None:
    assert pins.read_pins([text]) == {key: value}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("micro_batch", "no ="),
        ("micro_batch=0", "from 1 up"),
        ("micro_batch=-1", "from 1 up"),
        ("micro_batch=2.5", "from 1 up"),
        ("strategy=ddq", "none of single"),
        ("compile=maybe", "neither true nor false"),
        ("global_batch=3", "--set global_batch=3"),
    ],
)
def test_a_pin_that_cannot_be_meant_is_refused(text: str, said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        pins.read_pins([text])


def test_an_unknown_pin_gives_the_nearest() -> None:
    with pytest.raises(UnknownName, match="micro_batch"):
        pins.read_pins(["microbatch=3"])
    with pytest.raises(WrongUse, match="two values"):
        pins.read_pins(["gpus=1", "gpus=2"])


@pytest.mark.parametrize(
    ("on", "pinned", "said"),
    [
        ("4xH100", {"strategy": "single", "gpus": 2}, "single runs on one GPU"),
        ("H100", {"strategy": "ddp"}, "needs several GPUs"),
        ("4xH100", {"gpus": 8}, "there are 4"),
        ("4xH100", {"strategy": "branch"}, "no branches"),
        ("4xH100", {"strategy": "pipeline", "compile": True}, "a compiler cannot follow"),
        ("H100", {"strategy": "pipeline"}, "needs several GPUs"),
        ("4xH100", {"gpus": 4, "strategy": "ddp", "micro_batch": 3, "accumulation": 2}, "Pin accumulation=6"),
        ("4xH100", {"gpus": 4, "strategy": "ddp", "micro_batch": 17}, "micro_batch=16 or less"),
        ("4xH100", {"gpus": 1, "accumulation": 65}, "accumulation=64 or less"),
        ("4xH100", {"gpus": 3, "data_parallel": 2}, "divisor of 3"),
        ("T4", {"precision": "bf16"}, "only emulates bf16.*fp16"),
        ("V100-32GB", {"precision": "bf16-true"}, "only emulates bf16"),
        ("T4", {"precision": "tf32"}, "no TF32"),
    ],
)
def test_pins_that_contradict_are_refused_with_the_cure(on: str, pinned: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        planned(on, pins=pinned)


def test_pins_that_only_the_search_finds_contradictory_are_refused() -> None:
    with pytest.raises(WrongUse, match="no setting agrees"):
        planned("2xH100", pins={"accumulation": 63, "gpus": 2})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpus", 3),
        ("strategy", "ddp"),
        ("micro_batch", 5),
        ("accumulation", 4),
        ("precision", "fp32"),
        ("recompute", "full"),
        ("compile", False),
        ("optimizer", "foreach"),
        ("allocator", "expandable"),
        ("workers", 3),
        ("data_parallel", 2),
    ],
)
def test_a_pin_is_kept(key: str, value: Any) -> None:
    plan = planned("4xH100", pins={key: value})
    assert getattr(plan.choice, key) == value
    assert is_kept(plan.choice, 64)


def test_more_gpus_than_samples_are_left_alone_or_refused_where_pinned() -> None:
    plan = planned("8xH100", job=workload(global_batch=3))
    assert plan.choice.data_parallel <= 3
    assert any("global batch of 3" in one.why for one in plan.rejected)
    with pytest.raises(WrongUse, match="Use 3 or fewer"):
        planned("8xH100", job=workload(global_batch=3), pins={"gpus": 8, "strategy": "ddp"})


def test_a_job_that_fails_everywhere_fails_as_itself() -> None:
    with pytest.raises(JobFailed, match="it raised"):
        planned("2xH100", Law(fails=True))


def test_a_job_that_fails_is_not_tried_in_every_way() -> None:
    law = Law(fails=True, bounds=False)
    with pytest.raises(JobFailed):
        planned("8xH100", law)
    # All strategies are asked about at once; after plain steps and one way of recomputing it is enough.
    assert Recompute.FULL not in {one.recompute for one in law.prepared}


def test_what_cannot_be_predicted_is_a_rejection() -> None:
    plan = planned("2xH100", Law(fails_compiled=True))
    assert not plan.choice.compile
    assert any("could not be predicted: it raised" in one.why for one in plan.rejected)


BROKEN: dict[str, Callable[[Setting], bool]] = {
    "fsdp": lambda one: one.strategy is Strategy.FSDP,
    "recompute": lambda one: one.recompute is not Recompute.NONE,
    "compile": lambda one: one.compile,
    "large micro-batches": lambda one: one.micro_batch > 2,
}


@pytest.mark.parametrize("bounds", [True, False])
@pytest.mark.parametrize("what", BROKEN)
def test_a_setting_that_fails_is_a_rejected_row_and_not_the_end(what: str, bounds: bool) -> None:
    broken = BROKEN[what]
    plan = planned("2xH100", Law(fails_with=broken, bounds=bounds), compare=(1, 2))
    assert not broken(plan.choice)
    assert plan.choice.precision is Precision.BF16
    assert all(row.setting is not None and not broken(row.setting) for row in plan.comparison)
    tried = what != "recompute" or not bounds
    assert any("it refuses bf16" in one.why for one in plan.rejected) or not tried


def test_a_number_of_gpus_on_which_all_fails_is_a_row_without_a_plan() -> None:
    plan = planned("2xH100", Law(fails_with=lambda one: one.gpus > 1), compare=(1, 2))
    assert [row.setting is None for row in plan.comparison] == [False, True]


def test_a_job_that_fails_under_autocast_is_planned_without_and_the_plan_says_so() -> None:
    plan = planned("2xH100", Law(fails_with=lambda one: one.precision is Precision.BF16))
    assert plan.choice.precision is Precision.TF32
    (said,) = [reason.why for reason in plan.reasons if reason.subject == "precision"]
    assert said == "bf16 fails: it refuses bf16"
    assert any(one.why == "bf16 could not be predicted: it refuses bf16" for one in plan.rejected)
    assert all(one.setting is None or one.setting.precision is Precision.TF32 for one in plan.what_if)


def test_a_gpu_without_tf32_takes_fp32() -> None:
    plan = planned("V100-32GB", Law(fails_with=lambda one: one.precision is Precision.FP16))
    assert plan.choice.precision is Precision.FP32


def test_a_pinned_precision_that_fails_is_not_changed() -> None:
    law = Law(fails_with=lambda one: one.precision is Precision.BF16)
    with pytest.raises(JobFailed, match="it refuses bf16"):
        planned("2xH100", law, pins={"precision": "bf16"})


def test_a_job_that_fails_in_every_precision_names_the_first_cause() -> None:
    with pytest.raises(JobFailed, match="it refuses bf16"):
        planned("2xH100", Law(fails_with=lambda _: True))


def test_a_job_that_fails_under_every_strategy_fails_as_on_one_gpu() -> None:
    def cause(setting: Setting) -> str:
        return "one GPU" if setting.gpus == 1 else setting.strategy.value

    with pytest.raises(JobFailed, match="one GPU"):
        planned("8xH100", Law(fails_with=lambda _: True, cause=cause))


# --- nothing fits


def test_nothing_fits_says_what_is_missing_and_what_would_fit() -> None:
    law = Law(static_bytes=14 * GIB, sample_bytes=8 * GIB)
    with pytest.raises(NothingFits) as caught:
        planned("T4", law, workload(seq=1024), pins={"strategy": "single"})
    error = caught.value
    assert error.exit_code == 3
    assert "GiB are missing" in error.found
    whats = [one.what for one in error.nearest]
    assert any(what.startswith("use 2 of these") for what in whats)
    assert any(what.startswith("use 1 x ") for what in whats)
    assert all(one.estimate.step_s for one in error.nearest)


def test_a_pin_that_leaves_nothing_is_named() -> None:
    with pytest.raises(NothingFits, match="leave out --pin recompute=none"):
        planned("A100-40GB", Law(static_bytes=30 * GIB, sample_bytes=5 * GIB), pins={"recompute": "none"})


def test_a_shorter_sample_is_offered_where_the_job_has_one() -> None:
    law = Law(static_bytes=8 * GIB, sample_bytes=80 * GIB)
    with pytest.raises(NothingFits, match="shorten samples to seq 512"):
        planned("RTX4090", law, workload(seq=1024), pins={"recompute": "full", "compile": False, "gpus": 1})
    with pytest.raises(NothingFits) as caught:
        planned("RTX4090", law, pins={"recompute": "full", "compile": False, "gpus": 1})
    assert "seq" not in caught.value.cure


def test_a_smaller_batch_is_offered_where_the_rounds_are_pinned() -> None:
    with pytest.raises(NothingFits, match=r"lower the global batch to 8 "):
        planned("RTX4090", pins={"accumulation": 1, "recompute": "none", "compile": False})


class AdapterLaw(Law):
    """A model that fits only with adapters, a loss in pieces and frozen layers in 4 bits."""

    def with_changes(self, **changes: int) -> Law:
        return LawInPieces() if changes == {"lora": 16} else super().with_changes(**changes)


class LawInPieces(Law):
    """A job that fits only with its loss in pieces."""

    def need_bytes(self, setting: Setting) -> int:
        return super().need_bytes(setting) + (0 if setting.loss is LossForm.CHUNKED else 600 * GIB)


def test_adapters_are_offered_for_a_model_that_is_too_large_to_train_whole() -> None:
    law = AdapterLaw(static_bytes=3000 * GIB)
    for job, offered in (("hf:./model", True), ("fake", False)):
        question = PlanQuestion(
            job=job, workload=workload(), cluster=parse_cluster("RTX 3060"), policy=Policy()
        )
        with pytest.raises(NothingFits) as caught:
            decision.choose_plan(question, law)
        assert (
            "adapters on layers in 4 bits with --lora 16 --allow quantised" in caught.value.cure
        ) is offered


def test_what_ifs_use_the_ways_of_the_plan() -> None:
    plan = planned("H100", LawInPieces())
    assert plan.choice.loss is LossForm.CHUNKED
    batches = [row for row in plan.what_if if row.change.startswith("global batch")]
    assert batches
    assert all(row.setting is not None and row.setting.loss is LossForm.CHUNKED for row in batches)


# --- unlike devices


@pytest.mark.slow
@QUICK
@given(
    law=st.builds(
        Law,
        static_bytes=st.integers(1, 8).map(lambda one: one * GIB),
        sample_bytes=st.integers(1, 500).map(lambda one: one * 2**20),
        sample_flops=st.floats(1e11, 1e14),
    ),
    whole=st.integers(3, 200),
)
def test_unlike_gpus_share_the_batch_exactly_and_never_slower_than_evenly(law: Law, whole: int) -> None:
    plan = planned("2xRTX3090+1xRTX4090", law, workload(global_batch=whole))
    assert is_kept(plan.choice, whole)
    for one in plan.runners_up:
        assert is_kept(one.setting, whole)
    if plan.choice.shares:
        names = [place.name for place in plan.places]
        held = dict(zip(names, plan.choice.shares, strict=True))
        assert held["GeForce RTX 4090"].samples >= held["GeForce RTX 3090"].samples
        assert sum(share.samples for share in plan.choice.shares) == whole


def test_unlike_gpus_are_shared_by_speed() -> None:
    plan = planned("2xRTX3090+1xRTX4090", Law(static_bytes=GIB, sample_bytes=2**20))
    assert [share.samples for share in plan.choice.shares] != divide_evenly(64, 3)
    assert plan.choice.strategy is Strategy.DDP
    assert "divided by GPU speed" in {reason.subject: reason.why for reason in plan.reasons}["strategy"]


def test_unlike_gpus_take_the_precision_that_all_have() -> None:
    plan = planned("1xA100-40GB+4xT4", Law(static_bytes=GIB, sample_bytes=2**20), pins={"gpus": 5})
    assert plan.choice.precision is Precision.FP16


def test_a_pinned_micro_batch_keeps_unlike_gpus_apart_with_a_reason() -> None:
    plan = planned("2xRTX3090+1xRTX4090", pins={"micro_batch": 4})
    assert not plan.choice.shares
    assert any("different micro-batches" in one.why for one in plan.rejected)


# --- plans are files


def prints(plan: Plan, **changes: str) -> dict[str, str]:
    assert plan.workload is not None
    versions = {"trimtab": "0.1.0", "torch": "2.13.0"}
    return {
        **plan_files.collect_fingerprints("a/job.py:Fake", plan.workload, plan.places, versions),
        **changes,
    }


def fresh() -> Plan:
    plan = planned("4xA100-40GB", job=workload(files={"job.py": "123"}))
    return plan.replace(fingerprints=prints(plan))


def test_a_plan_that_nothing_changed_for_still_holds() -> None:
    plan = fresh()
    assert plan_files.list_changes(plan, prints(plan), parse_cluster("4xA100-40GB")) == []
    assert plan_files.list_changes(plan, prints(plan), parse_cluster("8xA100-40GB")) == []
    assert plan_files.list_changes(plan, prints(plan), None) == []


@pytest.mark.parametrize(
    ("changes", "on", "said"),
    [
        ({"torch": "2.11.0"}, "4xA100-40GB", "torch was 2.13.0, and is 2.11.0"),
        ({"job": "job.py:Other"}, "4xA100-40GB", "the job was job.py:Fake, and is job.py:Other"),
        ({"file job.py": "456"}, "4xA100-40GB", "job.py has changed"),
        ({}, "2xA100-40GB", "the plan needs 4 x A100 40GB SXM4, and there is 2 x A100 40GB SXM4"),
        ({}, "4xH100", "and there is 4 x H100"),
        ({}, "2x2xA100-40GB", "the plan needs 4 x A100"),
    ],
)
def test_a_stale_plan_says_what_changed(changes: dict[str, str], on: str, said: str) -> None:
    plan = fresh()
    found = plan_files.list_changes(plan, prints(plan, **changes), parse_cluster(on))
    assert len(found) == 1
    assert said in found[0]
    with pytest.raises(WrongUse, match="it is stale"):
        plan_files.refuse_stale(plan, "plan.json", found)


def test_a_gpu_that_is_no_longer_free_makes_a_plan_stale() -> None:
    plan = fresh()
    where = parse_cluster("4xA100-40GB")
    busy = tuple(device.replace(free_bytes=GIB) for device in where.nodes[0].devices)
    found = plan_files.list_changes(
        plan, prints(plan), where.replace(nodes=(where.nodes[0].replace(devices=busy),))
    )
    assert "1.0 GiB is free" in found[0]


# --- the real estimator, on traces that are made up


def traced(setting: Setting) -> Trace:
    """Weights of 1 GiB and optimizer state of 2 GiB over the shards, activations, then gradients."""
    shards = setting.mesh.dp_shard
    sizes = (2**30 // shards, 2**31 // shards, setting.micro_batch * 2**28, 2**30 // shards)
    return Trace(
        order=(0, 1, 2, ~2, 3),
        sizes=sizes,
        streams=(0,) * 4,
        parts=(0, 2, 3, 1),
        modules=(0,) * 4,
        ops=(0,) * 4,
        module_names=("",),
        op_names=("",),
        marks={"step0": 2, "step1": 2, "step2": 5},
        works=(
            Work(
                op="mm",
                kind="matrix",
                dtype="bfloat16",
                flops=setting.micro_batch * 10**12,
                dims=(1, setting.micro_batch * 1000, 1000, 1000),
            ),
            Work(op="reduce", kind="collective", dtype="float32", read_bytes=10**9),
        ),
        sequence=(0, 0, 1),
        phases={"forward": 0, "backward": 1, "optimizer": 3},
    )


def ticking(trace: Trace, setting: Setting, layout: Layout, _: Any) -> float:
    rate = (layout.device.peaks.bf16 or 1e14) / 2
    one = sum(trace.works[number].flops for number in trace.sequence) / rate
    exchange = {Strategy.DDP: 0.01, Strategy.FSDP: 0.012}.get(setting.strategy, 0.0)
    return setting.accumulation * (one + 0.001) + exchange


def foresight(asked: list[Setting], **changes: Any) -> TraceEstimator:
    def trace_all(settings: Any, _: Any, __: Any) -> list[Any]:
        asked.extend(settings)
        return [traced(setting) for setting in settings]

    return TraceEstimator(trace_all=trace_all, clock=ticking, **changes)


def test_a_real_outlook_traces_few_settings_and_remembers_them() -> None:
    asked: list[Setting] = []
    first = foresight(asked)
    question = PlanQuestion(job="x", workload=workload(), cluster=parse_cluster("4xH100"), policy=Policy())
    plan = decision.choose_plan(question, first)
    assert is_kept(plan.choice, 64)
    assert plan.choice.gpus == 4
    # One device stands for replicas, and shards of every number lie on the line through two numbers.
    piped = [setting for setting in asked if setting.strategy is Strategy.PIPELINE]
    assert {setting.gpus for setting in asked if setting not in piped} <= {1, 4, 16}
    # Copies of a pipeline stand for one another too.
    assert {one.mesh.data_parallel for one in piped} <= {1}
    assert {setting.mesh.data_parallel for setting in asked if setting.strategy is Strategy.FSDP} <= {4, 16}
    # The next of the same kind needs no more of them.
    asked.clear()
    assert decision.choose_plan(question, first).choice == plan.choice
    assert asked == []


@pytest.mark.slow
@pytest.mark.parametrize("objective", Objective)
def test_what_is_asked_beside_changes_neither_runners_up_nor_rejections(objective: Objective) -> None:
    """Of one space: a price, a far deadline, a comparison of all counts, in whatever order they are asked."""

    def ask(compare: tuple[int, ...] = (), **policy: Any) -> tuple[Any, ...]:
        whole = Policy(objective=objective, **policy)
        question = PlanQuestion("x", workload(), parse_cluster("3xH100"), whole, compare)
        plan = decision.choose_plan(question, foresight([]))
        return plan.choice, plan.estimate, plan.runners_up, plan.rejected, plan.reasons, plan.looked_at

    plain = ask()
    assert len(plain[2]) == 5
    assert ask(price_per_gpu_hour=2.0) == plain
    assert ask(deadline_s=1e9) == plain
    assert ask((1, 2, 3)) == plain


@pytest.mark.usefixtures("own_cache")
def test_plans_and_estimates_come_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.cache import ESTIMATES, PLANS, SEARCHES
    from trimtab.planner import plan as plans
    from trimtab.predict.estimate import estimate_trace

    asked: list[Setting] = []

    def traces(_: str, settings: Any, __: Any, **___: Any) -> list[Any]:
        asked.extend(settings)
        return [traced(setting) for setting in settings]

    computed: list[Setting] = []

    def counting(trace: Trace, setting: Setting, *others: Any, **more: Any) -> Any:
        computed.append(setting)
        return estimate_trace(trace, setting, *others, **more)

    monkeypatch.setattr("trimtab.planner.estimator.judge", counting)
    monkeypatch.setattr(plans, "get_traces", traces)
    monkeypatch.setattr(plans, "has_summary", lambda *_: True)
    monkeypatch.setattr(plans, "summarize_job", lambda *_, **__: workload())
    additive = spec.BatchLoss(additive=True)
    monkeypatch.setattr("trimtab.trace.loss_check.check_batch_loss", lambda *_, **__: additive)

    def make(*, cache: bool = True, **policy: Any) -> Plan:
        asked.clear()
        computed.clear()
        return plans.make_plan("slm:tiny", {}, parse_cluster("4xH100"), Policy(**policy), cache=cache)

    first = make()
    assert asked
    assert computed
    assert make() == first
    assert asked == [], "the plan is cached"
    other = make(deadline_s=1e9)
    assert asked == [], "the searches are cached"
    assert (other.choice, other.estimate) == (first.choice, first.estimate)
    for part in ("reasons", "runners_up", "rejected", "looked_at"):
        assert getattr(other, part) == getattr(first, part)
    least = make(objective=Objective.COST)
    assert asked, "traces are asked for again, and may come from their own cache"
    assert least.policy.objective is Objective.COST
    for kind, count in ((PLANS, 3), (ESTIMATES, 1), (SEARCHES, 2)):
        (*_, last) = keys = kind.keys("")
        assert len(keys) == count
        kind.file(last).write_text("{", encoding="utf-8")
    again = make(deadline_s=1e9), make()
    assert [(plan.choice, plan.estimate) for plan in again] == [(first.choice, first.estimate)] * 2
    assert make(cache=False).choice == first.choice
    assert computed, "without the cache everything is computed again"


def test_runners_up_are_the_best_that_follow_from_what_was_traced() -> None:
    estimator = foresight([])
    question = PlanQuestion(job="x", workload=workload(), cluster=parse_cluster("4xH100"), policy=Policy())
    plan = decision.choose_plan(question, estimator)
    legal = build_space(workload(), parse_cluster("4xH100"), Policy())
    least: dict[Any, float] = {}
    for family in legal.families:
        for split in family.splits:
            setting = family.setting(split)
            if split[0] > 1 and estimator.has_traces(setting, family.layout):
                seconds_ = estimator.estimate(setting, family.layout).step_s or math.inf
                least[family] = min(seconds_, least.get(family, math.inf))
    best = sorted(least.values())[: len(plan.runners_up) + 1]
    found = sorted([seconds(plan), *(one.estimate.step_s or 0.0 for one in plan.runners_up)])
    assert found == best


def test_bounds_of_the_real_outlook_are_bounds() -> None:
    blind: list[Setting] = []
    where = parse_cluster("4xH100")
    legal = build_space(workload(global_batch=24), where, Policy())
    known = foresight([])
    known.prepare([(family.setting(family.splits[0]), family.layout) for family in legal.families[:1]])
    for family in legal.families:
        for split in family.splits:
            setting = family.setting(split)
            floor = known.lower_bound(setting, family.layout)
            truth = foresight(blind).estimate(setting, family.layout)
            assert truth.step_s is not None
            assert (floor.step_s or 0.0) <= truth.step_s + 1e-12
            assert floor.need_bytes <= truth.band.high_bytes


def test_accumulation_keeps_the_gradients_beside_the_activations() -> None:
    layout = list_layouts(parse_cluster("H100"))[0]
    estimator = foresight([])
    once = estimator.estimate(Setting(micro_batch=4, global_batch=4), layout)
    twice = estimator.estimate(Setting(micro_batch=4, accumulation=2, global_batch=8), layout)
    assert 0 < twice.allocated_bytes - once.allocated_bytes <= 2**30
    assert twice.band.high_bytes > once.band.high_bytes


def test_weights_that_are_too_large_rule_out_other_optimizers_without_a_trace() -> None:
    asked: list[Setting] = []
    estimator = foresight(asked)
    (layout,) = list_layouts(parse_cluster("H100"))
    eight_bit = Setting(micro_batch=4, global_batch=4, optimizer_rule=OptimizerRule.ADAMW_8BIT)
    assert estimator.lower_bound(eight_bit, layout).need_bytes == 0
    estimator.estimate(Setting(micro_batch=4, global_batch=4), layout)
    assert 0.9 * GIB < estimator.lower_bound(eight_bit, layout).need_bytes <= GIB
    quantised = eight_bit.replace(base=BaseFormat.NF4)
    assert estimator.lower_bound(quantised, layout).need_bytes == 0
    assert asked == [Setting(micro_batch=4, global_batch=4)]


def test_changes_that_do_not_fit_are_ruled_out_by_the_smallest_setting() -> None:
    """Activations of 16 GiB a sample never fit on 12 GB, whichever way is tried."""
    asked: list[Setting] = []

    def trace_all(settings: Any, _: Any, __: Any) -> list[Any]:
        asked.extend(settings)
        return [
            traced(setting).replace(sizes=(2**20, 2**21, setting.micro_batch * 2**34, 2**20))
            for setting in settings
        ]

    estimator = TraceEstimator(trace_all=trace_all, clock=ticking)
    question = PlanQuestion(job="x", workload=workload(), cluster=parse_cluster("RTX 3060"), policy=Policy())
    with pytest.raises(NothingFits) as caught:
        decision.choose_plan(question, estimator)
    assert caught.value.closest is not None
    assert caught.value.closest.micro_batch == 1
    eight_bit = [setting for setting in asked if setting.optimizer_rule is OptimizerRule.ADAMW_8BIT]
    assert eight_bit
    # Only with the optimizer in the backward pass a batch is not divided.
    assert {setting.recompute for setting in eight_bit} == {Recompute.FULL}
    assert {setting.micro_batch for setting in eight_bit if not setting.optimizer_in_backward} == {1}


def test_a_failure_is_remembered_and_told_again() -> None:
    calls = []

    def trace_all(settings: Any, _: Any, __: Any) -> list[Any]:
        calls.append(settings)
        return [JobFailed("loss()", found="it raised", cure="Fix it.") for _ in settings]

    estimator = TraceEstimator(trace_all=trace_all)
    layout = list_layouts(parse_cluster("H100"))[0]
    for _ in range(2):
        with pytest.raises(JobFailed, match="it raised"):
            estimator.estimate(Setting(micro_batch=4, global_batch=4), layout)
    assert len(calls) == 1


def test_bounds_with_some_blocks_recomputed_count_their_share() -> None:
    def slower(trace: Trace, setting: Setting, layout: Layout, own: Any) -> float:
        return ticking(trace, setting, layout, own) * (2.0 if setting.recompute is Recompute.FULL else 1.0)

    estimator = foresight([])
    estimator.clock, estimator.mixes = slower, True
    alone, both = (
        next(layout for layout in list_layouts(parse_cluster("2xH100")) if layout.gpus == gpus)
        for gpus in (1, 2)
    )
    ways = (Recompute.NONE, Recompute.FULL)
    single = Setting(micro_batch=8, global_batch=8)
    estimator.prepare([(single.replace(recompute=way), alone) for way in ways])
    sharded = Setting(micro_batch=8, global_batch=16, strategy=Strategy.FSDP, mesh=Mesh(dp_shard=2))
    none, some, full = (
        estimator.lower_bound(sharded.replace(recompute=way), both).step_s or 0.0
        for way in (Recompute.NONE, Recompute.EVERY_2, Recompute.FULL)
    )
    assert none * 1.2 < some < full * 0.9


@pytest.mark.parametrize("module", [explanations, batch_split, pins, searching, plan_files])
def test_the_examples_in_the_docstrings_hold(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("least", "text"),
    [
        (16.0, "cannot be better than the choice, at least 16 s a step"),
        (15.4, "at most 1.9% faster than the choice, below the prediction error; the choice is simpler"),
        (0.0, "cannot be better than the choice"),
    ],
)
def test_a_bound_below_the_choice_is_not_said_to_be_worse(least: float, text: str) -> None:
    assert explanations.explain_beaten(least, 15.7, Policy()) == text


def test_what_the_plan_says_of_ways_to_fit_is_traced_while_it_searches() -> None:
    law, quiet = Law(), Law()
    question = PlanQuestion(
        job="x", workload=workload(), cluster=parse_cluster("2xA100-40GB"), policy=Policy()
    )
    plan = decision.choose_plan(question, law, notice=lambda _: None)
    assert plan.choice.replace(loss=LossForm.CHUNKED) in law.prefetched
    assert not any(setting.offload == ("activations",) for setting in law.prefetched)
    # Nobody waits for a search without notices, such as that of a suggestion.
    assert decision.choose_plan(question, quiet) == plan
    assert quiet.prefetched == []


class LoneLaw(Law):
    """One sample needs a trace of its own."""

    def has_traces(self, setting: Setting, layout: Layout) -> bool:
        return setting.micro_batch > 1 and super().has_traces(setting, layout)


def test_one_sample_is_traced_only_if_it_could_be_the_best() -> None:
    # Without recomputation, ddp fits with one sample only.
    shape: dict[str, Any] = {"static_bytes": 30 * GIB, "sample_bytes": int(2.5 * GIB), "launch_s": 0.1}
    policy: dict[str, Any] = {"pins": {"compile": False, "recompute": "none"}}
    law, alone = LoneLaw(**shape), LoneLaw(**shape)
    plan = planned("2xA100-40GB", law, **policy)
    assert plan.choice.strategy is Strategy.FSDP
    assert min(setting.micro_batch for setting in law.asked) > 1
    policy["pins"]["strategy"] = "ddp"
    assert planned("2xA100-40GB", alone, **policy).choice.micro_batch == 1
