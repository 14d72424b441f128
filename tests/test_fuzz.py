"""Damaged inputs for everything that reads foreign bytes: refused in trimtab's own words, or read."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path

import pytest
from bench.fuzz import READERS, run_inputs
from rich.console import Console

from run_samples import plan as sample_plan
from trimtab.configs.apply import Aim, find_layout
from trimtab.configs.formats import read_config
from trimtab.configs.knobs import apply_knobs
from trimtab.configs.show import build_display, find_job
from trimtab.configs.targets import list_targets
from trimtab.diagnosis.diagnose import diagnose_logs
from trimtab.diagnosis.log_scanner import LogScanner
from trimtab.errors import BrokenFile, TrimtabError, WrongUse
from trimtab.files import read_json_lines
from trimtab.jobs.model_sizes import ModelSizes, read_job_sizes
from trimtab.launching.defaults import read_defaults
from trimtab.launching.jobs import measure_progress, read_progress, read_scontrol
from trimtab.planner.plan_files import is_plan_file, read_checked_plan
from trimtab.render import render_plan
from trimtab.spec import Attempt, Node, Plan
from trimtab.training.checkpoint_format import Manifest

INPUTS = 100


@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_foreign_bytes_never_raises_anything_but_our_errors(name: str) -> None:
    tally = run_inputs(READERS[name], seed=1, numbers=range(INPUTS))
    assert tally.tracebacks == {}
    assert tally.hangs == []
    assert tally.accepted + tally.refused == INPUTS


# Each of these was a traceback or a hang that bench/fuzz.py found.


def show_config(file: Path) -> None:
    layout = find_layout(Aim(file), list_targets([file]), opened=read_config, name=None)
    assert layout.main is not None
    target = layout.main.site.target
    job, sought = find_job(target, layout.main)
    build_display(layout, target, job=job, gpus=8, device="H100", seer=None, sought=sought)


def test_a_count_of_thousands_of_digits_is_no_count(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    text = {"train_micro_batch_size_per_gpu": "9" * 5000, "zero_optimization": {"stage": 2}}
    file.write_text(json.dumps(text), encoding="utf-8")
    show_config(file)
    script = tmp_path / "job.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH --gres=gpu:{'9' * 5000}\nsrun x\n", encoding="utf-8")
    read_config(script).entries()


def test_a_model_folder_with_a_name_that_is_too_long_is_not_found(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"base_model: {'m' * 5000}\nmicro_batch_size: 2\nadapter: lora\n", encoding="utf-8")
    show_config(file)
    assert not is_plan_file(tmp_path / ("p" * 5000 + ".json"))


def test_sizes_of_a_model_that_no_model_has_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 10**400, "num_hidden_layers": 2}))
    sizes = read_job_sizes(f"hf:{tmp_path}", {})
    assert (sizes.hidden, sizes.layers) == (None, 2)
    assert read_job_sizes("slm", {"hidden": "9" * 5000}) == ModelSizes()
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert read_job_sizes(f"hf:{tmp_path}", {}) == ModelSizes()


def test_a_knob_that_is_infinite_is_refused() -> None:
    with pytest.raises(WrongUse, match="not a whole number"):
        apply_knobs({"batch_size": float("inf")})


def test_a_plan_with_impossible_figures_or_paths_is_refused(tmp_path: Path) -> None:
    whole = sample_plan().to_builtins()
    for part, change in (("estimate", {"hours": -1.0}), ("estimate", {"gpu_hours": 1e300})):
        with pytest.raises(BrokenFile, match="hours"):
            Plan.from_json(json.dumps(whole | {part: whole[part] | change}))
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(whole | {"folder": "a\0b"}), encoding="utf-8")
    with pytest.raises(BrokenFile, match="folder has a zero byte"):
        read_checked_plan(file)
    file.write_text(json.dumps(whole | {"job": f"{'j' * 5000}.py:Job"}), encoding="utf-8")
    assert "is not here" in read_checked_plan(file)[1]
    file.write_text("[" * 100_000, encoding="utf-8")
    assert not is_plan_file(file)


def test_a_number_of_thousands_of_digits_makes_a_broken_file() -> None:
    with pytest.raises(BrokenFile, match="out of range"):
        Attempt.from_json('{"procs": ' + "9" * 5000 + "}")


def test_lines_of_a_run_that_are_not_utf8_or_no_steps_are_skipped(tmp_path: Path) -> None:
    assert read_json_lines(b'{"a": 1}\n{"a": "\xff"}\n' + b"[" * 100_000 + b'\n{"b": 2}') == [
        {"a": 1},
        {"b": 2},
    ]
    (tmp_path / "log.jsonl").write_bytes(
        b'{"step": 1, "loss": 2.0}\n{"step": 2, "time_s": "x", "samples": 1}\n'
    )
    (tmp_path / "run.json").write_bytes(b'{"job": "\xff"}')
    progress = read_progress(tmp_path)
    assert progress is not None
    assert (progress.step, progress.job) == (1, None)


def test_numbers_with_two_points_in_a_log_are_no_facts(tmp_path: Path) -> None:
    file = tmp_path / "train.log"
    line = "iter 1: loss 2.0, time 1.2.3ms, mfu 1.2.3%, 9 samples/s, data wait 4.5.6ms\n"
    file.write_text(line + "trimtab: out-of-memory at step " + "9" * 5000 + ": x; y\n", encoding="utf-8")
    diagnose_logs([str(file)])


def test_a_snapshot_with_sizes_that_no_memory_has_is_read(tmp_path: Path) -> None:
    segment = {"device": 0, "total_size": 10**400, "allocated_size": 10**30, "blocks": []}
    value = {"segments": [segment], "device_traces": [[{"action": "oom", "size": 10**400}]]}
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(value))
    assert [finding.kind for finding in diagnose_logs([str(file)]).findings] == ["out-of-memory"]


def test_a_long_line_of_a_shell_script_takes_linear_time(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("export N=4\necho " + "a" * 1_000_000 + "\nexport M=5\n", encoding="utf-8")
    assert [entry.path for entry in read_config(file).entries()] == [("N",), ("M",)]


def test_a_line_of_scontrol_without_a_sign_takes_linear_time() -> None:
    text = "JobId=7 JobName=" + "a " * 200_000 + "\n" + "a" * 200_000 + "\nJobState=RUNNING Reason=None\n"
    job = read_scontrol(text)
    assert job is not None
    assert job.state == "RUNNING"


def test_deeply_nested_toml_and_keys_with_one_quote_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    for text in ("a." * 5000 + "a = 1\n", "a = " + "[" * 5000, '"a\\" = 1\n"b = 2\n'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(BrokenFile):
            read_config(file).entries()


def test_a_pickle_that_numbers_more_objects_than_it_has_bytes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(b"\x80\x04]r\xff\xff\xff\x0f.")
    assert "more objects than it can have" in diagnose_logs([str(file)]).notes[0]


def test_a_plan_whose_parts_are_larger_than_its_memory_is_drawn() -> None:
    whole = sample_plan().to_builtins()
    parts = whole["estimate"]["parts"] | {"weights": 10**17}
    plan = Plan.from_json(json.dumps(whole | {"estimate": whole["estimate"] | {"parts": parts}}))
    console = Console(file=io.StringIO(), width=80)
    console.print(render_plan(plan))
    compared = [row | {"setting": None, "estimate": None, "why": ""} for row in whole["comparison"]]
    Console(file=io.StringIO(), width=80).print(
        render_plan(Plan.from_json(json.dumps(whole | {"comparison": compared})))
    )
    with pytest.raises(BrokenFile, match="epoch_s"):
        Plan.from_json(json.dumps(whole | {"comparison": [whole["comparison"][0] | {"epoch_s": -1.0}]}))


def test_an_error_does_not_repeat_a_megabyte_of_input() -> None:
    error = TrimtabError("x" * 10**6, found="y" * 10**6, cure="z")
    assert len(str(error)) < 10_000


def test_a_long_line_of_a_log_is_not_seen_thousands_of_times(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("trimtab: slm, ddp, micro-batch 8 x 2 x 2" * 2000, encoding="utf-8")
    with (tmp_path / "train.log").open("rb") as log:
        sightings = list(LogScanner("train.log").scan(log.read, lambda _: None))
    # A few for each stretch that is read at once, not one for each of the 2,000 places.
    assert 0 < len(sightings) < 20


def test_launch_defaults_that_are_nested_deeply_or_huge_are_refused(tmp_path: Path) -> None:
    for text in ("a = " + "[" * 5000, "a = " + "1" * 5000, ".".join("a" * 300) + " = 1"):
        (tmp_path / "trimtab.toml").write_text(text, encoding="utf-8")
        with pytest.raises(BrokenFile, match="it is not TOML"):
            read_defaults(tmp_path)


def test_a_path_with_a_zero_byte_names_no_file() -> None:
    assert Manifest.from_file(Path("a\0b")) is None


def test_memory_of_hundreds_of_digits_is_refused() -> None:
    with pytest.raises(ValueError, match="ram_free_bytes is a number of hundreds of digits"):
        Node(name="n", ram_free_bytes=10**400)


def test_steps_that_take_longer_than_anything_leave_the_end_unknown() -> None:
    attempt = Attempt(attempt=1, began_s=0.0, procs=1, steps=10**9)
    lines = [{"step": 1, "time_s": 1e29, "samples": 1, "gpus": 1}]
    assert measure_progress("run", None, attempt, lines, None).left_s is None
