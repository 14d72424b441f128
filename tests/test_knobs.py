"""The knobs of small trainers: every one sets something here, or is refused with the reason."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest

from test_cli import trimtab_cli
from trimtab import api
from trimtab.cli.options import add_knobs
from trimtab.cli.plan import plan_with_knobs
from trimtab.configs import knobs
from trimtab.configs.knobs import apply_knobs
from trimtab.errors import TrimtabError, UnknownName, WrongUse
from trimtab.jobs.options import list_options
from trimtab.planner.pins import KEYS
from trimtab.spec.requests import PlanRequest, TrainRequest
from trimtab.training.task import TrainTask

GLOSSARY = (
    *("enable_tf32", "enable_amp", "amp_dtype", "enable_compile", "max_length", "batch_size", "eval_steps"),
    *("logging_steps", "eval_iters", "dataloader_num_workers", "dataloader_pin_memory", "learning_rate"),
    *("dataloader_persistent_workers", "PYTORCH_CUDA_ALLOC_CONF", "warmup_steps", "weight_decay", "betas"),
    *("max_steps", "gradient_accumulation_steps", "save_steps", "seed", "vocab_size", "n_layer"),
)
CONFIG = """\
slm_config = {
    "max_length": 32,
    "batch_size": 4,  # of each process
    "gradient_accumulation_steps": 2,
    "enable_tf32": False,
    "enable_amp": False,
    "learning_rate": 1e-3,
    "warmup_steps": 3,
    "weight_decay": 0.01,
    "adam_beta1": 0.8,
    "max_steps": 8,
    "eval_steps": 4,
    "eval_iters": 2,
    "logging_steps": 2,
    "save_steps": 4,
    "seed": 1337,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": True,
    "dataloader_persistent_workers": True,
    "use_wandb": False,
}
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))


def test_the_examples_are_true() -> None:
    assert doctest.testmod(knobs).failed == 0


def test_every_knob_of_the_glossary_is_known_and_sets_something_that_there_is() -> None:
    assert not set(GLOSSARY) - set(knobs.load_knobs())
    of_slm, of_training = set(list_options(api.load("slm"))), set(TrainTask.__struct_fields__)
    for knob in knobs.load_knobs().values():
        assert not knob.option or knob.option in of_slm, knob.name
        assert not knob.pin or knob.pin in KEYS, knob.name
        assert not knob.train or knob.train in of_training, knob.name
        sets = bool(knob.option or knob.pin or knob.train) or knob.name in (
            *knobs.AMP,
            "adam_beta1",
            "adam_beta2",
        )
        assert sets or knob.cure, f"{knob.name} does nothing and is not refused"
        assert knob.why.endswith("."), knob.name


def test_every_knob_is_in_the_documentation() -> None:
    page = (Path(__file__).parent.parent / "docs" / "knobs.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    assert listed == set(knobs.load_knobs())


@pytest.mark.parametrize(
    ("given", "place", "expected"),
    [
        ({"max_length": "1_024"}, "options", {"seq": 1024}),
        ({"max_length": 512, "n_positions": 512}, "options", {"seq": 512}),
        ({"learning_rate": "3e-4"}, "options", {"rate": 3e-4}),
        ({"weight_decay": 0}, "options", {"decay": 0.0}),
        ({"betas": "[0.9, 0.99]"}, "options", {"betas": [0.9, 0.99]}),
        ({"adam_beta2": 0.99}, "options", {"betas": [0.9, 0.99]}),
        ({"eval_iters": 50}, "options", {"validation_batches": 50}),
        ({"max_steps": 60_000}, "options", {"horizon": 60_000}),
        ({"max_steps": 60_000}, "train", {"steps": 60_000}),
        ({"eval_steps": 2000, "logging_steps": 100}, "train", {"evaluate_steps": 2000, "every": 100}),
        ({"save_steps": 10, "seed": 0}, "train", {"checkpoint_steps": 10, "seed": 0}),
        ({"enable_compile": "True"}, "pins", {"compile": True}),
        ({"gradient_checkpointing": True}, "pins", {"recompute": "full"}),
        ({"dataloader_num_workers": 6}, "pins", {"workers": 6}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "pins", {"allocator": "expandable"}),
        ({"enable_amp": True}, "pins", {"precision": "bf16"}),
        ({"amp_dtype": "torch.float16"}, "pins", {"precision": "fp16"}),
        ({"enable_amp": False, "enable_tf32": True}, "pins", {"precision": "tf32"}),
        ({"enable_amp": False, "amp_dtype": "bf16"}, "pins", {"precision": "fp32"}),
        ({"enable_tf32": False}, "pins", {"precision": "fp32"}),
        ({"dataloader_pin_memory": True, "use_wandb": "no"}, "pins", {}),
    ],
)
def test_a_knob_sets_what_the_table_says(given: dict[str, Any], place: str, expected: dict[str, Any]) -> None:
    assert getattr(apply_knobs(given), place) == expected


def test_a_batch_of_one_process_makes_the_global_batch() -> None:
    found = apply_knobs({"batch_size": 12, "gradient_accumulation_steps": 2}, ranks=4)
    assert found.options == {"global_batch": 96}
    assert found.pins == {"micro_batch": 12, "accumulation": 2}
    assert "global batch 96: batch_size 12 x 2 x 4 processes" in found.said
    assert apply_knobs({"batch_size": 12}, ranks=4, joint=False).options == {}


def test_bf16_becomes_fp16_where_there_is_none_and_that_is_said() -> None:
    found = apply_knobs({"enable_amp": True, "amp_dtype": "bf16"}, bf16=False)
    assert found.pins == {"precision": "fp16"}
    assert any("only emulated" in one for one in found.said)
    assert api.turn_knobs("slm", ["amp_dtype=bf16"], where=api.cluster("T4")).pins == {"precision": "fp16"}
    assert api.turn_knobs("slm", ["amp_dtype=bf16"], where=api.cluster("A30")).pins == {"precision": "bf16"}


@pytest.mark.parametrize(
    ("given", "error", "found"),
    [
        (["batch_size=0"], WrongUse, "below 1"),
        (["batch_size=2.5"], WrongUse, "not a whole number"),
        (["batch_size=many"], WrongUse, "not a whole number"),
        (["batch_size"], WrongUse, "not NAME=VALUE"),
        (["=3"], WrongUse, "not NAME=VALUE"),
        (["batch_size=1", "batch_size=2"], WrongUse, "batch_size is also 1"),
        (["batchsize=3"], UnknownName, "no such knob; the nearest are batch_size"),
        (["learning_rate=nan"], WrongUse, "not a number"),
        (["learning_rate=-1"], WrongUse, "below 0"),
        (["enable_amp=maybe"], WrongUse, "not true or false"),
        (["amp_dtype=fp8"], WrongUse, "not one of bf16"),
        (["betas=[0.9]"], WrongUse, "two numbers"),
        (["betas=0.9"], WrongUse, "two numbers"),
        (["betas=["], WrongUse, "two numbers"),
        (["adam_beta1=1.5"], WrongUse, "not below 1"),
        (["dataloader_pin_memory=false"], WrongUse, "always read into pinned memory"),
        (["dataloader_persistent_workers=False"], WrongUse, "always live as long as the run"),
        (["dataloader_prefetch_factor=8"], WrongUse, "always has two windows"),
        (["use_wandb=true"], WrongUse, "calls no service.*log.jsonl"),
        (["eval_batch_size=4"], WrongUse, "takes the micro-batch.*eval_iters"),
        (["PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64"], WrongUse, "not one of expandable_segments:True"),
        (["max_length=512", "n_positions=1024"], WrongUse, "both set the same"),
        (["foo=1", "use_wandb=true", "seed=-1"], WrongUse, "3 knobs.*foo.*calls no service.*below 0"),
    ],
)
def test_a_knob_that_cannot_be_is_refused(given: list[str], error: type[TrimtabError], found: str) -> None:
    with pytest.raises(error, match=found) as caught:
        api.turn_knobs("slm", given)
    assert caught.value.exit_code == 2


def test_nothing_is_said_twice_and_every_job_says_what_it_lacks() -> None:
    with pytest.raises(WrongUse, match="max_length=64: --set seq is given too"):
        api.turn_knobs("slm", ["max_length=64"], options={"seq": "32"})
    with pytest.raises(WrongUse, match="batch_size=4: --pin micro_batch is given too"):
        api.turn_knobs("slm", ["batch_size=4"], pins=["micro-batch=8"])
    with pytest.raises(WrongUse, match="sets the option 'warmup', which the job bridge does not have"):
        api.turn_knobs("bridge", ["warmup_steps=8"])
    # The horizon of the rate is set where the job has one; the steps are set everywhere.
    found = api.turn_knobs("naics", ["max_steps=8"])
    assert (found.options, found.train) == ({}, {"steps": 8})
    assert api.turn_knobs("slm", ["batch_size=4"], pins=["gpus=2"]).options == {"global_batch": 8}
    assert api.turn_knobs("slm", ["batch_size=4"], options={"global_batch": 32}).options == {}


def test_a_config_is_read_and_a_knob_counts_before_it(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(CONFIG + "tokens = {'vocab': 3}\n", encoding="utf-8")
    found = api.turn_knobs("slm:tiny", ["max_length=16"], config=file, ranks=2)
    assert found.options["seq"] == 16
    assert found.options["global_batch"] == 16
    assert api.turn_knobs("slm:tiny", config=f"{file}:slm_config").options["seq"] == 32
    (tmp_path / "c.yaml").write_text("training:\n  batch_size: 4\n  betas: [0.9, 0.95]\n", encoding="utf-8")
    assert api.turn_knobs("slm", config=tmp_path / "c.yaml").options == {
        "betas": [0.9, 0.95],
        "global_batch": 4,
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1\n", "one table with knobs.*has none"),
        ("a = {'batch_size': 1}\nb = {'batch_size': 2}\n", "2 tables.*config.py:slm_config"),
        (
            "a = {'batch_size': N * 2}\n",
            r"batch_size in line 1.*computed \(N \* 2\).*--knob batch_size=",
        ),
        ("a = {'batch_size': 1, 'sizes': {'x': 1}}\n", "sizes in line 1.*a table"),
        ("a = {'batch_size': 1, 'temperature': 1}\n", "no such knob"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(tmp_path: Path, text: str, found: str) -> None:
    file = tmp_path / "config.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(WrongUse, match=found):
        api.turn_knobs("slm", config=file)
    with pytest.raises(WrongUse, match="no such file"):
        api.turn_knobs("slm", config=tmp_path / "absent.py")


def test_a_run_does_what_the_knobs_of_a_config_say(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 900, encoding="utf-8")
    given = ("slm:tiny", "--config", str(tmp_path / "config.py"), "--data", str(tmp_path / "text.txt"))
    out = tmp_path / "run"
    done = trimtab_cli("train", *given, "--out", str(out))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert {line["micro_batch"] for line in lines} == {4}
    assert {line["samples"] for line in lines} == {8}
    # Never at step 0, and every fourth step.
    assert [line["step"] for line in lines if line["validation_loss"] is not None] == [4, 8]
    assert [line["lr"] for line in lines[:4]] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])
    assert 1e-4 < lines[-1]["lr"] < 3e-4
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [f"iter {n}" for n in (2, 4, 6, 8)]
    assert len(list((out / "checkpoints").glob("step-*"))) == 2
    assert json.loads((out / "run.json").read_text())["seed"] == 1337
    assert "global batch 8: batch_size 4 x 2 x 1 process" in done.stderr
    assert str(tmp_path / "text.txt") in done.stderr


def test_a_knob_and_a_flag_that_say_the_same_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    knobs = ["max_steps=8", "eval_steps=2", "batch_size=4"]

    def asked(**fields: Any) -> TrainRequest:
        request = TrainRequest("slm:tiny", options={"seq": "8"}, pins=("gpus=2",), **fields)
        return add_knobs(request, knobs, None, where=None)[0]

    with pytest.raises(WrongUse, match="max_steps=8: --steps 3 is given too"):
        asked(steps=3)
    with pytest.raises(WrongUse, match="eval_steps=2: --evaluate-every 5 is given too"):
        asked(evaluate_steps=5)
    capsys.readouterr()
    found = asked(seed=3)
    assert (found.steps, found.evaluate_steps, found.seed) == (8, 2, 3)
    assert found.pins == {"gpus": "2", "micro_batch": 4}
    assert found.options == {"seq": "8", "horizon": 8, "global_batch": 8}
    assert capsys.readouterr().err == "trimtab: global batch 8: batch_size 4 x 1 x 2 processes\n"


def test_knobs_of_a_plan_give_its_samples(capsys: pytest.CaptureFixture[str]) -> None:
    knobs = ["max_steps=8", "eval_steps=2", "batch_size=4", "seed=3"]
    request = PlanRequest("slm:tiny", "2xA30", options={"seq": "8"}, pins=("gpus=2",))
    assert plan_with_knobs(request, knobs, None).samples == 64
    assert plan_with_knobs(request.replace(samples=10), knobs, None).samples == 10
    assert "not for a plan: eval_steps=2, seed=3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_takes_the_knobs_that_concern_it_and_names_the_others() -> None:
    done = trimtab_cli(
        *("plan", "slm:tiny", "--on", "2xA30", "--json", "--pin", "compile=false", "--pin", "recompute=none"),
        *("--knob", "batch_size=4", "--knob", "amp_dtype=fp16", "--knob", "max_steps=100"),
        *("--knob", "eval_steps=50"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["choice"]["global_batch"] == 8
    assert found["choice"]["precision"] == "fp16"
    assert found["choice"]["micro_batch"] == 4
    assert found["workload"]["samples"] * found["workload"]["epochs"] == 800
    assert "not for a plan: eval_steps=50" in done.stderr
