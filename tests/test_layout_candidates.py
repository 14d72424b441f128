"""Plans of large decoders: formulas propose layouts, the best ones are traced, and the plan says which."""

from __future__ import annotations

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
from trimtab.spec import BatchLoss, Device, Mesh, Objective, Plan, Policy, Recompute, Workload
from trimtab.strategies import find_training_refusal
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
    assert best.mesh == Mesh(dp_shard=32, tp=8)
    assert best.gpus == 256
    layouts = [ranked.layout for ranked in proposal.runnable]
    for layout in layouts:
        assert layout.pp == 1
        assert find_training_refusal(make_setting(layout)) is None
    assert any(layout.tp > 1 and layout.cp > 1 for layout in layouts)
    # 64 samples leave 64 GPUs for data parallelism alone.
    assert proposal.data_parallel_s is not None
    assert proposal.data_parallel_s > proposal.best.time.total_s


def test_a_long_context_does_not_fit_by_data_parallelism_alone() -> None:
    proposal = propose(ask("llama-8b", "8xH100", seq=131_072))
    assert proposal.data_parallel_s is None
    assert proposal.best.layout.cp * proposal.best.layout.tp > 1


def test_ranks_that_split_layers_may_hold_different_experts() -> None:
    proposal = propose(ask("mixtral-8x7b", "2x8xH100", seq=4096, batch=1024))
    assert any(ranked.layout.tp > 1 and ranked.layout.ep > 1 for ranked in proposal.runnable)


@pytest.mark.parametrize(
    "policy",
    [
        {"objective": Objective.GPUS},
        {"pins": {"tp": 8}},
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
    options: dict[str, Any] = {"on": "4xH100", "global_batch": 4, "options": {"seq": 131_072}}
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
def test_a_plan_for_ten_thousand_gpus_is_by_formulas() -> None:
    made = trimtab.plan(f"hf:{MODELS / 'llama-70b'}", "1280x8xH100", global_batch=2560, options={"seq": 8192})
    assert made.by_formulas
    assert made.choice.gpus == len(made.places) == 10_240
    figures = next(reason for reason in made.reasons if reason.subject == "figures")
    assert "2,048 GPUs" in figures.why
    assert made.options == {"seq": 8192}
