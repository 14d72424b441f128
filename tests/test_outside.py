"""Other people's measurements: the data, the replay of each row, and the scores."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import Counter

import msgspec
import pytest

import trimtab
from trimtab.catalog.tables import devices, public_steps
from trimtab.errors import WrongUse
from trimtab.exams.finetuning import FineTuning, TunedDecoder
from trimtab.exams.outside import (
    FAR_STEP,
    MEMORY,
    STEP,
    VERDICT,
    OutsideResult,
    answer_row,
    check_corrections,
    compare_devices,
    make_layout,
    make_shape,
    read_replays,
    read_rows,
    run_outside,
)
from trimtab.exams.outside_facts import OutsideRow, read_facts
from trimtab.exams.replays import make_request, replay_row
from trimtab.planner.layout_plans import LayoutModel, LayoutStudy, study_layouts
from trimtab.planner.layouts import OWN
from trimtab.predict.estimate import describe_public_steps
from trimtab.predict.memory import estimate_memory
from trimtab.spec import Trace
from trimtab.trace.tracer import trace_settings

pytestmark = pytest.mark.xdist_group("outside")  # its fixture is made once


@pytest.fixture(scope="module")
def result() -> OutsideResult:
    return run_outside()


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimtab", "exam", "--outside", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"COLUMNS": "80"}
    )


def test_every_row_has_a_source_a_path_and_a_figure() -> None:
    facts = read_facts()
    for row in read_rows():
        assert facts["source"][row.source].keys() >= {"repository", "read"}
        assert row.path
        assert row.gpus >= 1
        memory = [getattr(row, f"{kind}_gib") for kind in (*MEMORY, "unstated")]
        figures = [figure for figure in (row.step_s, *memory) if figure is not None]
        assert figures or row.out_of_memory or row.source == "Primus"
        assert all(figure > 0 for figure in figures)
    assert len(read_rows()) == 1579
    assert sum(row.out_of_memory for row in read_rows()) == 9


def test_every_row_is_replayed_or_has_a_reason(result: OutsideResult) -> None:
    facts = read_facts()
    for row in read_rows():
        if row.reason:
            assert row.reason in facts["reason"]
        elif row.is_job:
            assert row.model in facts["decoder"]
            assert row.key in read_replays()
            assert row.global_batch % (row.micro_batch * row.gpus) == 0
        else:
            assert row.trainer in facts["trainer"]
            layout = make_layout(row)
            assert layout.gpus == row.gpus
            assert layout.micro_batch * layout.micro_batches * layout.dp == row.global_batch
            assert make_shape(row.model, row.layers).parameters > 0
    left_out = sum(count for reasons in result.left_out.values() for count in reasons.values())
    assert result.replayed + left_out == result.rows == 1579
    assert result.replayed == len(result.answers)


def test_at_most_one_number_is_fitted_for_a_source() -> None:
    for name, facts in read_facts()["source"].items():
        assert len(facts.keys() & {"efficiency", "host"}) <= 1, name


def test_scores_are_those_of_the_rows() -> None:
    rows = [row for row in read_rows() if row.source == "NeMo" and not row.reason]
    errors = [abs(answer_row(row).predicted[step_of(row.gpus)] / (row.step_s or 0) - 1) for row in rows]
    scores = {score.figure: score for score in run_outside("NeMo").scores}
    assert scores[STEP].rows + scores[FAR_STEP].rows == len(rows)
    mean = sum((score.mean or 0) * score.rows for score in scores.values()) / len(rows)
    assert mean == pytest.approx(sum(errors) / len(errors))
    assert max(score.worst or 0 for score in scores.values()) == pytest.approx(max(errors))


def step_of(gpus: int) -> str:
    return STEP if gpus <= 8 else FAR_STEP


@pytest.mark.parametrize(
    ("source", "figure", "most"),
    [
        ("vTrain", STEP, 0.085),
        ("vTrain", FAR_STEP, 0.12),
        ("SimuMax", STEP, 0.08),
        ("SimuMax", "allocated", 0.05),
        ("llm-foundry", STEP, 0.08),
        ("llm-foundry", FAR_STEP, 0.12),
        ("InternEvo", FAR_STEP, 0.12),
        ("NeMo", FAR_STEP, 0.12),
        ("torchtitan", STEP, 0.08),
        ("torchtitan", FAR_STEP, 0.11),
        ("torchtitan", "reserved", 0.05),
    ],
)
def test_predictions_are_as_near_as_the_documentation_says(
    result: OutsideResult, source: str, figure: str, most: float
) -> None:
    score = next(score for score in result.scores if (score.source, score.figure) == (source, figure))
    assert score.mean is not None
    assert score.mean < most


def test_rivals_stand_beside_the_rows_that_they_predicted(result: OutsideResult) -> None:
    rivals = {(score.source, score.figure): score.rival for score in result.scores if score.rival}
    assert rivals["vTrain", STEP] == "vTrain 8.37%"
    assert rivals["SimuMax", STEP].startswith("SimuMax 5.")
    verdicts = [score for score in result.scores if score.figure == VERDICT]
    assert all(score.right is not None and score.right <= score.rows for score in verdicts)


def test_the_command_shows_one_source_and_json() -> None:
    done = run("--source", "NeMo")
    assert done.returncode == 0
    assert "NeMo: 8 rows" in done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "replayed: 8 of 10 rows" in done.stdout
    answer = json.loads(run("--source", "NeMo", "--json").stdout)
    assert Counter(score["figure"] for score in answer["scores"]) == {STEP: 1, FAR_STEP: 1}
    assert len(answer["answers"]) == 8


def test_unknown_sources_and_other_options_are_refused() -> None:
    with pytest.raises(WrongUse, match="vTrain"):
        run_outside("vtrain")
    assert "Leave them out" in run("--only", "gpt-*").stderr


def test_the_catalogue_has_what_published_steps_took_with_nothing_fitted() -> None:
    compared = compare_devices()
    # Estimates for an H200 use its own calibration.
    del compared["H200 SXM 141GB"]
    assert compared == {row.name: row.sources for row in public_steps()}
    names = {device.name for device in devices()}
    assert compared.keys() <= names


def test_a_correction_is_in_the_catalogue_where_sources_that_were_left_out_get_better() -> None:
    checks = check_corrections()
    applied = {chip: check for chip, check in checks.items() if check.is_applied}
    assert [*applied] == ["A100"]
    check = applied["A100"]
    corrected = {row.name: row.correction for row in public_steps() if row.correction is not None}
    assert {*corrected} == {"A100 40GB SXM4", "A100 80GB SXM4"}
    for correction in corrected.values():
        assert correction.factor == pytest.approx(check.factor, abs=0.005)
        assert correction.rows == check.rows
        assert sorted(correction.sources) == sorted(check.medians)
        assert correction.before == pytest.approx(statistics.mean(check.before.values()), abs=0.0005)
        assert correction.after == pytest.approx(statistics.mean(check.after.values()), abs=0.0005)


def test_one_source_cannot_tell_its_own_speed_from_that_of_a_gpu() -> None:
    check = check_corrections()["MI300X"]
    assert statistics.mean(check.after.values()) < statistics.mean(check.before.values())
    assert not check.is_applied


def test_layouts_of_other_trainers_are_corrected_by_public_measurements() -> None:
    def study(trainer: str, name: str) -> LayoutStudy:
        cluster = trimtab.cluster(f"8x{name}")
        return study_layouts(LayoutModel(make_shape("llama-3.1-8b"), cluster, 4096, 64, trainer))

    corrected = study("torchtitan", "A100-80GB")
    assert corrected.correction is not None
    estimator = corrected.search.estimator
    layout = corrected.search.found[0].layout
    seconds = estimator.estimate_time(layout).total_s
    estimator.slowdown = 1.0
    assert seconds == pytest.approx(corrected.correction.factor * estimator.estimate_time(layout).total_s)
    (note,) = (text for text in corrected.list_assumptions() if "not calibrated" in text)
    assert (
        "corrected by 1,139 public measurements (InternEvo, llm-foundry, torchtitan, vTrain, xtuner)" in note
    )
    assert not any("took" in text for text in corrected.list_assumptions())
    # The plans of `trimtab plan` compete with traced ones, and an H100 gets worse by such a factor.
    assert study(OWN, "A100-80GB").correction is None
    plain = study("torchtitan", "H100")
    assert plain.correction is None
    assert any("public measurements on this GPU took" in text for text in plain.list_assumptions())


def test_an_estimate_shows_the_public_measurements_of_its_gpu() -> None:
    (note,) = describe_public_steps(trimtab.cluster("H100").devices[0])
    medians = next(row for row in public_steps() if row.name == "H100 SXM5 80GB").sources
    count = sum(rows for rows, _ in medians.values())
    low, high = (end(ratio for _, ratio in medians.values()) for end in (min, max))
    assert note == (
        f"time: {count} public measurements on this GPU took {low:g} to {high:g} times as long as "
        f"predicted (medians of {len(medians)} sources)"
    )
    (alone,) = describe_public_steps(trimtab.cluster("MI300X").devices[0])
    assert alone.endswith("took 1.89 times as long as predicted (median of one source)")
    # Two rows are too few, and other GPUs have none.
    assert describe_public_steps(trimtab.cluster("GB200").devices[0]) == []
    assert describe_public_steps(trimtab.cluster("T4").devices[0]) == []


@pytest.mark.slow
def test_a_replayed_job_is_predicted_as_recorded() -> None:
    """One row of each kind is traced again: LoRA on a 4-bit base whose layers keep their inputs."""
    row = next(row for row in read_rows() if row.is_job and row.model == "llama-3.2-1b" and row.base)
    predicted, recorded = replay_row(row), read_replays()[row.key]
    assert predicted.allocated_bytes == pytest.approx(recorded.allocated_bytes, rel=0.005)
    assert predicted.reserved_bytes == pytest.approx(recorded.reserved_bytes, rel=0.01)
    assert predicted.step_s == pytest.approx(recorded.step_s, rel=0.02)


def make_row(**changes: object) -> OutsideRow:
    row = next(row for row in read_rows() if row.is_job and row.model == "llama-3.2-1b" and row.base)
    return msgspec.structs.replace(row, **changes)


def test_a_recipe_sets_the_options_of_the_job() -> None:
    request, beside = make_request(make_row())
    assert request.overrides["kept_inputs"] == 2
    assert request.overrides["chunk"] == 128
    assert "tied" not in request.overrides
    assert beside["keeps_logits"] is True
    # Without a base in 4 bits nothing is kept; without adapters there is no dropout.
    plain, _ = make_request(make_row(base="", lora=0))
    assert "kept_inputs" not in plain.overrides
    assert "dropout" not in plain.overrides
    sharded, _ = make_request(make_row(gpus=2, global_batch=8, strategy="fsdp"))
    assert sharded.setting.mesh.dp_shard == 2
    assert sharded.setting.accumulation == 2


def test_a_base_in_4_bits_changes_the_options_of_a_recipe() -> None:
    rows = [row for row in read_rows() if row.is_job and row.model == "llama-3-8b"]
    tuned = next(row for row in rows if row.trainer == "torchtune" and row.base)
    request, beside = make_request(tuned)
    assert (request.overrides["chunks"], request.overrides["keeps_head"]) == (8, True)
    # Compiled graphs of trimtab keep the 16-bit copies of such layers, and those of torchtune do not.
    assert request.overrides["compiled_blocks"] is False
    assert beside["compile"] is True
    plain, _ = make_request(msgspec.structs.replace(tuned, base=""))
    assert plain.overrides["compiled_blocks"] is True
    assert "keeps_head" not in plain.overrides


def test_a_head_and_its_chunks_follow_the_options_of_the_job() -> None:
    job = FineTuning()
    job.layers, job.width, job.heads, job.feed_forward, job.vocabulary, job.seq = 1, 32, 2, 64, 64, 16
    assert TunedDecoder(job).get_output_embeddings() is None
    job.chunks, job.keeps_head = 4, True
    model = TunedDecoder(job)
    assert model.chunk == 4
    assert model.get_output_embeddings() is model.head


@pytest.mark.slow
def test_blocks_compiled_on_their_own_keep_less_than_eager_ones() -> None:
    row = next(row for row in read_rows() if row.trainer == "torchtune" and row.recompute == "none")
    request, _ = make_request(row)
    small = {"layers": 2, "width": 512, "heads": 4, "feed_forward": 2048, "vocabulary": 1024, "seq": 1024}
    peaks = []
    for compiled in (False, True):
        options = request.overrides | small | {"key_value_heads": 2, "compiled_blocks": compiled}
        (trace,) = trace_settings(request.job, [request.setting], request.device, overrides=options)
        assert isinstance(trace, Trace)
        peaks.append(estimate_memory(trace).allocated_bytes)
    assert peaks[1] < 0.8 * peaks[0]


def test_memory_of_torchtune_without_recomputation_is_predicted(result: OutsideResult) -> None:
    """The loss in chunks is compiled; the whole loss ran eagerly, as the recipe drops its compiled form."""
    rows = [answer for answer in result.answers if answer.source == "torchtune" and "none" in answer.row]
    assert len(rows) == 2
    for answer in rows:
        assert answer.predicted["active"] == pytest.approx(answer.measured["active"], rel=0.01)
    score = next(score for score in result.scores if (score.source, score.figure) == ("torchtune", "active"))
    assert score.mean is not None
    assert score.mean < 0.05


def test_rows_of_fsdp_qlora_have_the_layers_and_seconds_of_the_source() -> None:
    """Each table has the seconds of 1,024 samples; the tokens per second of its text are those of one GPU."""
    rows = [row for row in read_rows() if row.source == "fsdp_qlora"]
    assert {row.targets for row in rows} == {"q,k,v,mlp"}
    (long,) = (row for row in rows if row.model == "mistral-7b")
    assert long.step_s == pytest.approx(7809 / (1024 / long.global_batch), rel=1e-3)


def test_jobs_that_ran_out_of_memory_are_predicted_to(result: OutsideResult) -> None:
    verdicts = [score for score in result.scores if score.figure == VERDICT]
    assert sum(score.right or 0 for score in verdicts) >= sum(score.rows for score in verdicts) - 1


def test_rows_that_no_rule_was_made_with_are_scored_on_their_own(result: OutsideResult) -> None:
    checked = {score.source: score.check_rows for score in result.scores if score.check_mean is not None}
    assert checked.keys() <= {row.source for row in read_rows() if row.check}
    assert checked
    assert result.jobs == sum(row.is_job and not row.reason for row in read_rows())


def test_replaying_needs_outside() -> None:
    command = [sys.executable, "-m", "trimtab", "exam", "--replay"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Add --outside" in done.stderr
