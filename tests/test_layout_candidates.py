"""Plans of large decoders: formulas propose layouts, the best ones are traced, and the plan says which."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

import trimtab
from trimtab.catalog.clusters import parse_cluster
from trimtab.planner.decision import PlanQuestion
from trimtab.planner.layout_candidates import LayoutProposal, add_layouts, list_spaces, propose_layouts
from trimtab.planner.layout_plans import make_layout_plan, make_setting
from trimtab.planner.plan import JobTracer
from trimtab.planner.space import build_space
from trimtab.planner.usual_batch import assume_batch, find_usual_batch
from trimtab.predict.layout import DecoderLayout
from trimtab.spec import BatchLoss, Device, Mesh, Objective, Plan, Policy, Recompute, Workload
from trimtab.strategies import STRATEGIES, find_training_refusal
from trimtab.trace.server import WorkerProcess

MODELS = Path(__file__).parent.parent / "bench" / "models"


def ask(model: str, on: str, *, seq: int = 1024, batch: int = 64, **policy: Any) -> PlanQuestion:
    workload = Workload(
        name=model, global_batch=batch, sample_length=seq, batch_loss=BatchLoss(additive=True, stated=True)
    )
    job = f"hf:{MODELS / model}"
    return PlanQuestion(job=job, workload=workload, cluster=parse_cluster(on), policy=Policy(**policy))


def propose(question: PlanQuestion) -> LayoutProposal:
    proposal = propose_layouts(question, {})
    assert proposal is not None
    return proposal


def plan_by_formulas(question: PlanQuestion) -> Plan:
    proposal = propose(question)
    made = make_layout_plan(
        proposal.study, proposal.best, job=question.job, workload=question.workload, policy=question.policy
    )
    return add_layouts(made, proposal)


@pytest.fixture(scope="module")
def large() -> PlanQuestion:
    return ask("llama-70b", "32x8xH100")


def test_a_small_model_is_left_to_data_parallelism() -> None:
    assert propose_layouts(ask("llama-8b", "8xH100"), {}) is None


def test_a_large_model_on_many_gpus_gets_layouts_that_train_runs(large: PlanQuestion) -> None:
    proposal = propose(large)
    best = make_setting(proposal.best.layout)
    # Few samples: weights are gathered for few tokens, so that stages which need not gather any are faster.
    assert best.mesh == Mesh(dp_replicate=4, tp=8, pp=8)
    assert best.gpus == 256
    for ranked in proposal.runnable:
        setting = make_setting(ranked.layout)
        assert find_training_refusal(setting) is None
        assert (setting.mesh.pp > 1) == STRATEGIES[setting.strategy].has_schedule
    assert any(ranked.layout.tp > 1 and ranked.layout.cp > 1 for ranked in proposal.runnable)
    # 64 samples leave 64 GPUs for data parallelism alone.
    assert proposal.data_parallel_s is not None
    assert proposal.data_parallel_s > proposal.best.time.total_s


def test_a_long_context_does_not_fit_by_data_parallelism_alone() -> None:
    proposal = propose(ask("llama-8b", "8xH100", seq=131_072))
    assert proposal.data_parallel_s is None
    assert proposal.best.layout.cp * proposal.best.layout.tp > 1


@pytest.mark.slow
def test_stages_of_trimtab_gather_weights_in_every_pass_and_only_the_ends_have_a_table() -> None:
    search = propose(ask("llama-70b", "32x8xH100", seq=8192, batch=512)).study.search
    ranked = next(ranked for ranked in search.found if ranked.layout.pp == 4 and ranked.layout.dp_shard > 1)
    own, estimator = ranked.layout, search.estimator
    other = dataclasses.replace(own, relayed=False)
    assert own.relayed
    table = estimator.shape.table_weights // own.tp
    assert [estimator.count_weights(own, stage)[2] for stage in range(4)] == [table, 0, 0, table]
    assert estimator.estimate_memory(own).working < estimator.estimate_memory(other).working
    assert estimator.estimate_time(own).compute_s > estimator.estimate_time(other).compute_s
    # Without recomputation the head takes longer than a block, so that the last stage has fewer blocks.
    own, other = (dataclasses.replace(layout, full_recompute=False) for layout in (own, other))
    counts = [estimator.count_layers(own, stage) for stage in range(4)]
    assert sum(counts) == 80
    assert counts[3] < min(counts[:3])
    slowest, even = (max(time.device_s for time in estimator.time_stages(layout)) for layout in (own, other))
    assert slowest < even


def test_only_ranks_with_the_same_experts_gather_them() -> None:
    estimator = propose(ask("mixtral-8x7b", "2x8xH100", seq=4096, batch=1024)).study.search.estimator
    layout = DecoderLayout(micro_batch=1, micro_batches=64, sequence=4096, dp_shard=16, ep=8)
    two_nodes = estimator.estimate_time(layout).data_s
    # Two ranks in different nodes share each expert. With ep 16 none do, and only other weights are gathered.
    alone = estimator.estimate_time(dataclasses.replace(layout, ep=16)).data_s
    assert alone < 0.5 * two_nodes


@pytest.mark.parametrize("gpus", [16, 24, 256, 2048, 10_240, 16_384])
def test_the_usual_batch_is_4_to_17_million_tokens_and_divides(gpus: int) -> None:
    batch = find_usual_batch(8192, gpus)
    assert 3.9e6 < 8192 * batch < 21.1e6
    assert any(batch % (gpus >> halves) == 0 for halves in range(4))


def test_a_batch_is_assumed_for_large_models_and_several_nodes_only() -> None:
    large, small = (f"hf:{MODELS / name}" for name in ("llama-70b", "llama-8b"))
    nodes, node = parse_cluster("32x8xH100"), parse_cluster("8xH100")
    assumed = assume_batch(large, {}, {}, nodes)
    assert assumed.options == {"seq": 4096}
    assert assumed.given["global_batch"] == 1024
    assert "4.19 million" in assumed.reasons[0].why
    assert assume_batch(small, {"seq": 8192}, {}, nodes).given["global_batch"] == 512
    assert assume_batch(small, {"seq": 131_072}, {}, node).reasons == ()
    assert assume_batch(large, {}, {"global_batch": 64}, nodes).reasons == ()
    assert assume_batch(large, {"lora": 8}, {}, nodes).reasons == ()
    assert assume_batch("slm", {}, {}, nodes).reasons == ()
    assert assume_batch("hf:nowhere", {}, {}, nodes).reasons == ()


@pytest.mark.slow
def test_a_plan_shows_what_published_recipes_take() -> None:
    made = plan_by_formulas(ask("llama-70b", "32x8xH100", seq=8192, batch=512))
    recipes = {reason.value: reason.why for reason in made.reasons if reason.subject == "recipe"}
    assert recipes.keys() == {"torchtitan", "Megatron-Bridge"}
    assert "tp 4, cp 2, pp 4 x 5" in recipes["Megatron-Bridge"]
    fewer = plan_by_formulas(ask("llama-70b", "3x8xH100", seq=8192, batch=48))
    texts = [reason.why for reason in fewer.reasons if reason.value == "Megatron-Bridge"]
    assert texts == ["Llama 3 70B, it does not fit on these GPUs, or its degrees do not divide them"]


def test_ranks_that_split_layers_may_hold_different_experts() -> None:
    proposal = propose(ask("mixtral-8x7b", "2x8xH100", seq=4096, batch=1024))
    assert any(ranked.layout.tp > 1 and ranked.layout.ep > 1 for ranked in proposal.runnable)


@pytest.mark.parametrize(
    "policy",
    [
        {"objective": Objective.GPUS},
        {"pins": {"tp": 8}},
        {"pins": {"pp": 2, "micro_batch": 1}},
        {"pins": {"pp": 2, "compile": False}},
        {"pins": {"strategy": "fsdp"}},
        {"pins": {"precision": "fp32"}},
        {"allow": ("offload",)},
    ],
)
def test_formulas_propose_nothing_for_what_they_do_not_know(policy: dict[str, Any]) -> None:
    assert propose_layouts(ask("llama-70b", "32x8xH100", **policy), {}) is None


def test_formulas_propose_nothing_for_other_jobs_and_devices(large: PlanQuestion) -> None:
    assert propose_layouts(large, {"lora": 8}) is None
    assert propose_layouts(ask("llama-70b", "4xH100+4xA100-80GB"), {}) is None
    assert propose_layouts(ask("llama-70b", "H100"), {}) is None
    assert propose_layouts(ask("nothing", "32x8xH100"), {}) is None


@pytest.mark.slow
def test_only_the_best_meshes_are_traced_and_each_with_its_micro_batch(large: PlanQuestion) -> None:
    proposal = propose(large)
    first, second = list_spaces(proposal, large)
    meshes = [{family.mesh for family in space.families} for space in (first, second)]
    assert [len(each) for each in meshes] == [2, 2]
    assert not meshes[0] & meshes[1]
    for family in first.families:
        assert len(family.splits) <= 2
        assert not family.compile or family.mesh.tp == family.mesh.cp == 1
    assert {family.recompute for family in first.families} >= {Recompute.NONE, Recompute.FULL}


@pytest.mark.slow
def test_a_faster_layout_of_another_trainer_is_named_with_its_command(large: PlanQuestion) -> None:
    made = plan_by_formulas(large)
    reason = next(reason for reason in made.reasons if reason.subject == "faster")
    words = shlex.split(reason.why.partition("trimtab layouts ")[2])
    options = dict(zip(words[1::2], words[2::2], strict=True))
    ranking = trimtab.layouts(
        words[0],
        options["--on"],
        seq=int(options["--seq"]),
        global_batch=int(options["--global-batch"]),
        pins=[options["--pin"]],
    )
    assert made.estimate.step_s is not None
    assert ranking.rows[0].step_s < 0.97 * made.estimate.step_s


@pytest.mark.slow
def test_a_plan_says_how_many_layouts_there_were_and_that_the_batch_is_small(large: PlanQuestion) -> None:
    made = plan_by_formulas(large)
    reasons = {reason.subject: reason for reason in made.reasons}
    assert int(reasons["layouts"].value.replace(",", "")) == propose(large).study.search.examined
    assert "65536 tokens a step" in reasons["global_batch"].why
    assert "does not fit in memory" in {rejection.why for rejection in made.rejected}
    assert made.runners_up
    assert made.by_formulas


def test_split_layers_are_not_compiled() -> None:
    question = ask("llama-8b", "8xH100", pins={"tp": 8})
    space = build_space(question.workload, question.cluster, question.policy)
    assert {(family.mesh.tp, family.compile) for family in space.families} == {(8, False)}
    with pytest.raises(trimtab.TrimtabError, match="tp=8 with compile=true"):
        build_space(question.workload, question.cluster, Policy(pins={"tp": 8, "compile": True}))


def test_nothing_is_traced_after_the_time_limit() -> None:
    setting = make_setting(propose(ask("llama-8b", "8xH100", seq=131_072)).best.layout)
    device: Device = parse_cluster("H100").devices[0]
    with WorkerProcess() as worker:
        tracing = JobTracer(job="slm", overrides={}, worker=worker, ends_at=monotonic() - 1)
        (answer,) = tracing.trace_all([setting], device, {})
    assert tracing.is_cut_short, "a plan without it is not cached"
    assert isinstance(answer, trimtab.TrimtabError)
    assert "not traced" in answer.found


# whole plans


@pytest.fixture
def small_decoder(tmp_path: Path) -> str:
    config = json.loads((MODELS / "llama-8b" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}), encoding="utf-8")
    return f"hf:{tmp_path}"


@pytest.mark.slow
def test_proposed_layouts_are_traced_and_the_answer_does_not_depend_on_earlier_ones(
    small_decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.planner.plan.LAYOUTS_TRACED_S", 300.0)
    # The logits of one sequence take more than an H100 has.
    options: dict[str, Any] = {"on": "4xH100", "global_batch": 4, "options": {"seq": 98_304}}
    first = trimtab.plan(small_decoder, **options)
    mesh = first.choice.mesh
    assert not first.by_formulas
    assert mesh.tp * mesh.cp > 1
    assert first.choice.gpus == 4
    assert first.estimate.fits
    assert not first.choice.compile
    assert {"layouts"} <= {reason.subject for reason in first.reasons}
    trimtab.plan(small_decoder, **{**options, "global_batch": 8})
    again = trimtab.plan(small_decoder, **options, cache=False)
    assert again.choice == first.choice
    assert again.estimate.step_s == first.estimate.step_s


@pytest.mark.slow
def test_a_plan_without_time_to_trace_says_that_it_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.planner.plan.LAYOUTS_TRACED_S", -1.0)
    monkeypatch.setattr("trimtab.planner.plan.LEAST_TRACED_S", -1.0)
    made = trimtab.plan(f"hf:{MODELS / 'llama-70b'}", "4x8xH100", global_batch=64)
    assert made.by_formulas
    assert made.is_cut_short


@pytest.mark.slow
def test_a_plan_for_ten_thousand_gpus_is_by_formulas() -> None:
    made = trimtab.plan(f"hf:{MODELS / 'llama-70b'}", "1280x8xH100", global_batch=2560, options={"seq": 8192})
    assert made.by_formulas
    assert not made.is_cut_short
    assert made.choice.gpus == len(made.places) == 10_240
    figures = next(reason for reason in made.reasons if reason.subject == "figures")
    assert "2,048 GPUs" in figures.why
    assert made.options == {"seq": 8192}


@pytest.mark.slow
def test_a_cached_ranking_gives_the_same_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from trimtab.cache import LAYOUTS
    from trimtab.predict.layout import LayoutEstimator

    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    question = ask("llama-70b", "4x8xH100")

    def plan_with(*, cache: bool) -> Plan:
        proposal = propose_layouts(question, {}, cache=cache)
        assert proposal is not None
        made = make_layout_plan(
            proposal.study,
            proposal.best,
            job=question.job,
            workload=question.workload,
            policy=question.policy,
        )
        return add_layouts(made, proposal)

    first = plan_with(cache=False)
    assert LAYOUTS.keys("") == []
    assert plan_with(cache=True) == first
    for key in LAYOUTS.keys("")[1:]:
        LAYOUTS.file(key).write_text("{", encoding="utf-8")
    assert plan_with(cache=True) == first, "a damaged entry is ranked again"
    monkeypatch.setattr(LayoutEstimator, "estimate_memory", lambda *_: pytest.fail("it is ranked again"))
    assert plan_with(cache=True) == first


def test_pinned_pipelines_of_a_large_model_are_ranked_by_formulas() -> None:
    question = ask("llama-8b", "8xH100", pins={"pp": 2, "tp": 2})
    proposal = propose(question)
    meshes = {make_setting(ranked.layout).mesh for ranked in proposal.runnable}
    assert meshes
    assert {(mesh.pp, mesh.tp, mesh.size) for mesh in meshes} == {(2, 2, 8)}
    assert not proposal.needs_search
    for space in list_spaces(proposal, question):
        assert {family.mesh for family in space.families} <= meshes
    plan = plan_by_formulas(question)
    (layouts,) = [reason for reason in plan.reasons if reason.subject == "layouts"]
    assert "all have the pinned degrees" in layouts.why
    assert layouts.why.endswith("none the schedule that formulas do not know (--pin schedule=zero-bubble)")
    assert {reason.subject: reason.why for reason in plan.reasons}["pp"].endswith("pinned")


def test_pinned_pipelines_of_a_small_model_are_all_traced(tmp_path: Path) -> None:
    config = json.loads((MODELS / "llama-8b" / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 2, "vocab_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    question = dataclasses.replace(ask("llama-8b", "8xH100", pins={"pp": 2, "tp": 2}), job=f"hf:{tmp_path}")
    assert propose_layouts(question, {}) is None
