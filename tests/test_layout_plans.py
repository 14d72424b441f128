"""Layouts that formulas rank, as plans: their file, and what apply, launch and train make of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import trimtab
from config_samples import SAMPLES
from trimtab.errors import WrongUse
from trimtab.planner.plan_files import read_plan_file
from trimtab.spec import Launch, Mesh, Plan, Setting, Strategy
from trimtab.strategies import find_training_refusal

MODELS = Path(__file__).parent.parent / "bench" / "models"
JOB = f"hf:{MODELS / 'llama-70b'}"
QUESTION: dict[str, Any] = {"on": "8x8xH100", "seq": 8192, "global_batch": 256}


def plan(pins: str, **changes: Any) -> Plan:
    made = trimtab.plan_layout(JOB, **{**QUESTION, **changes}, pins=[pins])
    assert isinstance(made, Plan)
    return made


def batch(made: Plan) -> Launch:
    launch = trimtab.launch(made, kind="slurm")
    assert isinstance(launch, Launch)
    return launch


@pytest.fixture(scope="module")
def piped() -> Plan:
    return plan("tp=8,pp=2,virtual_stages=1,cp=1,dp_replicate=1")


@pytest.fixture(scope="module")
def split() -> Plan:
    return plan("tp=8,pp=1,cp=1,dp_replicate=1")


def sample(target: str, folder: Path) -> Path:
    name, text = SAMPLES[target][0]
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_a_layout_becomes_a_plan_with_its_degrees_and_figures(piped: Plan) -> None:
    row = trimtab.layouts(JOB, **QUESTION, pins=["tp=8,pp=2,virtual_stages=1,cp=1,dp_replicate=1"]).rows[0]
    choice, estimate = piped.choice, piped.estimate
    assert (choice.mesh.tp, choice.mesh.pp, choice.mesh.dp_shard) == (8, 2, 4)
    assert choice.gpus == len(piped.places) == 64
    assert choice.micro_batch * choice.accumulation * choice.data_parallel == choice.global_batch == 256
    assert estimate.step_s == row.step_s
    assert estimate.process_bytes == row.memory_bytes
    assert estimate.step_time is not None
    assert estimate.step_time.total_s == pytest.approx(row.step_s)
    assert estimate.pipeline is not None
    assert sum(estimate.pipeline.layers) == 80
    assert piped.by_formulas
    assert piped.options == {"seq": 8192}
    assert {reason.subject for reason in piped.reasons} >= {"tp", "cp", "pp", "figures"}


def test_a_plan_of_a_layout_survives_its_file(split: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(split.to_json(), encoding="utf-8")
    assert read_plan_file(file) == split
    assert trimtab.read_plan(file) == split


def test_torchtitan_gets_the_degrees(piped: Plan, tmp_path: Path) -> None:
    file = sample("torchtitan", tmp_path)
    trimtab.apply(piped, file)
    after = tomllib.loads(file.read_text(encoding="utf-8"))
    assert after["parallelism"]["tensor_parallel_degree"] == 8
    assert after["parallelism"]["pipeline_parallel_degree"] == 2
    # -1 stays: torchtitan shards over the ranks that are left.
    assert after["parallelism"]["data_parallel_shard_degree"] in {-1, 4}
    assert after["training"]["seq_len"] == 8192
    assert after["training"]["global_batch_size"] == 256


def test_accelerate_gets_the_degrees(split: Plan, tmp_path: Path) -> None:
    file = sample("accelerate", tmp_path)
    trimtab.apply(split, file)
    after = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert after["parallelism_config"]["parallelism_config_tp_size"] == 8
    assert after["parallelism_config"]["parallelism_config_dp_shard_size"] == 8
    assert (after["num_machines"], after["num_processes"]) == (8, 64)


def test_accelerate_has_no_pipelines(piped: Plan, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="pp=2"):
        trimtab.apply(piped, sample("accelerate", tmp_path))


@pytest.mark.parametrize("target", ["megatron-bridge", "nemo"])
def test_megatron_configs_get_the_degrees(piped: Plan, target: str, tmp_path: Path) -> None:
    file = sample(target, tmp_path)
    trimtab.apply(piped, file)
    model = yaml.safe_load(file.read_text(encoding="utf-8"))["model"]
    assert model["tensor_model_parallel_size"] == 8
    assert model["pipeline_model_parallel_size"] == 2


def test_experts_are_written_for_torchtitan_and_megatron(tmp_path: Path) -> None:
    made = trimtab.plan_layout(
        "hf:bench/models/mixtral-8x7b", "2x8xH100", pins=["ep=8,tp=1,pp=1,cp=1,dp_replicate=1"]
    )
    assert made.choice.mesh == Mesh(dp_shard=16, ep=8)
    file = sample("torchtitan", tmp_path)
    trimtab.apply(made, file)
    titan = tomllib.loads(file.read_text(encoding="utf-8"))["parallelism"]
    assert titan["expert_parallel_degree"] == 8
    file = sample("megatron-bridge", tmp_path)
    trimtab.apply(made, file)
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["model"]["expert_model_parallel_size"] == 8
    with pytest.raises(WrongUse, match="experts over ep=8"):
        trimtab.apply(made, sample("accelerate", tmp_path))


def test_nanotron_gets_the_degrees(piped: Plan, tmp_path: Path) -> None:
    file = sample("nanotron", tmp_path)
    trimtab.apply(piped, file)
    degrees = yaml.safe_load(file.read_text(encoding="utf-8"))["parallelism"]
    assert (degrees["dp"], degrees["tp"], degrees["pp"]) == (4, 8, 2)


def test_a_megatron_command_gets_virtual_stages_and_no_warning_about_shards(tmp_path: Path) -> None:
    made = plan("tp=4,pp=4,virtual_stages=5,cp=1", trainer="megatron")
    assert made.choice.strategy is Strategy.DDP
    file = sample("megatron-lm", tmp_path)
    result = trimtab.apply(made, file)
    text = file.read_text(encoding="utf-8")
    for words in (
        "--tensor-model-parallel-size 4",
        "--pipeline-model-parallel-size 4",
        "--num-virtual-stages-per-pipeline-rank 5",
        "NNODES=8",
    ):
        assert words in text
    assert not any("needs less memory" in sentence for sentence in result["said"])


def test_slurm_gets_all_nodes_and_gpus(split: Plan, piped: Plan) -> None:
    for made in (split, piped):
        script = batch(made).script or ""
        assert re.search(r"#SBATCH --nodes=8\b", script)
        assert re.search(r"#SBATCH --gres=gpu:8\b", script)


def test_a_layout_that_train_cannot_run_is_not_started(split: Plan, piped: Plan) -> None:
    assert batch(split).fault == batch(piped).fault == ""
    other = plan("tp=8,pp=2,virtual_stages=1,cp=1", trainer="megatron")
    assert "pp 2 with ranks that split layers" in batch(other).fault
    assert "trainer" in {reason.subject for reason in other.reasons}
    with pytest.raises(WrongUse, match="pp 2 with ranks that split layers"):
        trimtab.train(JOB, other)


def test_layouts_of_trimtab_are_those_that_train_runs() -> None:
    ranking = trimtab.layouts(JOB, **QUESTION, trainer="trimtab", top=40)
    assert any(row.tp > 1 and row.cp > 1 for row in ranking.rows)
    assert any(row.pp > 1 for row in ranking.rows)
    assert any("gather weights in every pass" in note for note in ranking.assumptions)


@pytest.mark.parametrize(
    ("strategy", "mesh", "runs"),
    [
        (Strategy.FSDP, Mesh(dp_shard=8, tp=8), True),
        (Strategy.HSDP, Mesh(dp_replicate=2, dp_shard=8, cp=2), True),
        (Strategy.PIPELINE, Mesh(dp_replicate=4, pp=4), True),
        (Strategy.PIPELINE, Mesh(dp_shard=4, pp=4), True),
        (Strategy.PIPELINE, Mesh(dp_shard=2, tp=2, pp=2), True),
        (Strategy.PIPELINE, Mesh(dp_shard=2, ep=2, pp=2), True),
        (Strategy.FSDP, Mesh(dp_shard=4, pp=4), False),
        (Strategy.DDP, Mesh(dp_replicate=4, tp=2), False),
        (Strategy.HSDP, Mesh(dp_replicate=2, dp_shard=8, ep=4), True),
        (Strategy.FSDP, Mesh(dp_shard=8, tp=2, ep=4), True),
        (Strategy.PIPELINE, Mesh(dp_shard=1, cp=2, pp=2, ep=2), True),
        (Strategy.PIPELINE, Mesh(dp_shard=2, tp=2, pp=2, ep=2), True),
    ],
)
def test_what_train_runs(strategy: Strategy, mesh: Mesh, *, runs: bool) -> None:
    setting = Setting(strategy=strategy, mesh=mesh, micro_batch=1, global_batch=mesh.data_parallel)
    assert (find_training_refusal(setting) is None) is runs


def test_the_command_writes_a_row_as_a_plan(tmp_path: Path) -> None:
    words = [JOB, "--on", "8x8xH100", "--seq", "8192", "--global-batch", "256", "--row", "2"]
    file = tmp_path / "plan.json"
    command = [sys.executable, "-m", "trimtab", "layouts", *words, "--out", str(file), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "80"}
    )
    row, choice = json.loads(done.stdout)["rows"][1], read_plan_file(file).choice
    assert {axis: getattr(choice.mesh, axis) for axis in ("tp", "cp", "pp")} == {
        axis: row[axis] for axis in ("tp", "cp", "pp")
    }


def test_a_row_that_is_not_there_is_refused() -> None:
    with pytest.raises(WrongUse, match="1 layout"):
        plan("tp=8,pp=1,cp=1", row=2)
