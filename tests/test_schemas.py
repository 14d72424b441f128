"""What a command prints with --json is what its published schema says."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import config_samples
import trimtab
from nouns import NOUNS
from trimtab.api import schemas
from trimtab.api.schemas import LINES, OUTPUTS, list_outputs
from trimtab.cli.exam import describe_measured
from trimtab.cli.main import COMMANDS, app, load_command
from trimtab.errors import UnknownName
from trimtab.exams.measure import StepMeasurement, compare_measurement
from trimtab.exams.run import CaseResult, summarize_results
from trimtab.predict.calibration import shipped_calibrations
from trimtab.spec import Band, Estimate, Footprint, schema
from trimtab.spec.schema import find_output

if TYPE_CHECKING:
    from trimtab.spec import Noun

ROOT = Path(__file__).parent.parent
ALL_OUTPUTS = list(dict.fromkeys(noun for verb in OUTPUTS for noun in list_outputs(verb)))


def print_output(*words: str) -> str:
    """Run a command in this process; return the name of the data type that it printed."""
    done = CliRunner().invoke(app, [*words, "--json"])
    # 5: `jobs` prints what it can though Slurm gives no answer.
    assert done.exit_code in (0, 3, 5), done.output
    texts = done.stdout.splitlines() if words[0] in LINES else [done.stdout]
    kinds = [find_output(json.loads(text), list_outputs(words[0])).__name__ for text in texts]
    return kinds[-1]


def test_every_command_with_json_has_a_schema() -> None:
    with_json = {
        name for name in COMMANDS if any("--json" in param.opts for param in load_command(name).params)
    }
    assert with_json == set(OUTPUTS)


@pytest.mark.parametrize("noun", ALL_OUTPUTS, ids=lambda noun: noun.__name__)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_of_an_output_is_what_its_schema_says(noun: type[Noun], data: st.DataObject) -> None:
    written = json.loads(data.draw(NOUNS[noun]).to_json())
    assert find_output(written, [noun]) is noun
    with pytest.raises(ValueError, match="surprise"):
        find_output(written | {"surprise": 1}, [noun])
    first = next(key for key in noun.json_fields() if key not in noun.may_lack)
    with pytest.raises(ValueError, match=first):
        find_output({key: value for key, value in written.items() if key != first}, [noun])


def test_a_schema_describes_derived_keys_and_keys_with_other_names() -> None:
    parts = trimtab.schema("plan")["$defs"]
    assert parts["Setting"]["properties"]["gpus"]["type"] == "integer"
    assert "gpus" in parts["Setting"]["required"]
    module = trimtab.schema("estimate")["$defs"]["PeakModule"]
    assert list(module["properties"]) == ["name", "class", "bytes"]
    assert "Path of the module" in module["properties"]["name"]["description"]
    assert "metrics" not in trimtab.schema("train")["$defs"]["StepLine"]["required"]


def test_the_examples_in_the_docstrings_hold() -> None:
    assert [doctest.testmod(module).failed for module in (schemas, schema)] == [0, 0]


def test_a_command_without_json_has_no_schema() -> None:
    with pytest.raises(UnknownName, match="Did you mean estimate"):
        trimtab.schema("estimat")


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("detect",), "Cluster"),
        (("detect", "--list"), "DevicesOutput"),
        (("explain", "bf16"), "Word"),
        (("explain", "bf16", "fp32"), "ExplainedWords"),
        (("explain",), "WordNames"),
        (("layouts", f"hf:{ROOT}/bench/models/llama-8b", "--on", "8xH100"), "LayoutRanking"),
        (("exam", "--outside", "--source", "vTrain"), "OutsideResult"),
        (("apply", "--list-targets"), "TargetsOutput"),
        (("jobs",), "JobsOutput"),
        (("doctor",), "Diagnosis"),
        (("watch", "--samples", "1"), "WatchSample"),
        (("calibrate", "--list"), "CalibrationsOutput"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value).replace("/", "."),
)
def test_a_command_prints_what_its_schema_says(
    words: tuple[str, ...], printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMTAB_CALIBRATIONS", str(tmp_path))
    assert print_output(*words) == printed


@pytest.mark.slow
def test_a_plan_and_all_that_is_made_from_it_are_what_their_schemas_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(config_samples.DEEPSPEED, encoding="utf-8")
    assert print_output("plan", "slm:tiny", "--on", "2xA30", "--out", "plan.json") == "Plan"
    assert print_output("apply", "plan.json", "--to", "ds.json", "--yes") == "ApplyOutput"
    assert print_output("show", "ds.json") == "Display"
    assert print_output("revert", "ds.json") == "RevertOutput"
    assert print_output("launch", "plan.json") == "Launch"
    assert print_output("report", "plan.json", "-o", "plan.html") == "ReportOutput"
    assert print_output("estimate", "slm:tiny", "--on", "A30", "--micro-batch", "2") == "EstimateOutput"


def test_an_imported_calibration_is_what_its_schema_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_CALIBRATIONS", str(tmp_path / "store"))
    file = tmp_path / "shared.json"
    file.write_text(shipped_calibrations()[0].to_json(), encoding="utf-8")
    assert print_output("calibrate", "--import", str(file)) == "ImportOutput"
    assert print_output("calibrate", "--list") == "CalibrationsOutput"
    (name,) = (stored.stem for stored in (tmp_path / "store").iterdir())
    assert print_output("calibrate", "--remove", name) == "RemoveOutput"


def test_an_error_is_what_every_schema_says() -> None:
    words = [sys.executable, "-m", "trimtab", "detect", "--on", "4xH1000", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    for verb in OUTPUTS:
        assert find_output(json.loads(done.stdout), list_outputs(verb)).__name__ == "ErrorOutput"


def test_what_only_a_gpu_can_measure_is_put_into_the_output_of_its_schema() -> None:
    """`profile` and `calibrate` need a GPU; here their outputs are made from recorded figures."""
    measured = StepMeasurement(allocated_bytes=200, reserved_bytes=300, step_s=0.5, device="x", torch="2.13")
    guess = Estimate(
        allocated_bytes=100,
        reserved_bytes=300,
        process_bytes=400,
        capacity_bytes=1000,
        fits=True,
        parts=Footprint(weights=100),
        band=Band(low_bytes=100, high_bytes=100),
        step_s=0.4,
    )
    profile = compare_measurement(guess, measured).to_builtins()
    assert profile["error"] == {
        "allocated_bytes": -0.5,
        "reserved_bytes": 0.0,
        "process_bytes": None,
        "step_s": pytest.approx(-0.2),
    }
    measured_works = describe_measured(shipped_calibrations()[0], Path("h200.json")).to_builtins()
    assert {"op", "flops", "seconds"} <= set(measured_works["curves"][0])
    case = CaseResult(case="x", predicted={"step_s": 1.0}, measured={"step_s": 2.0}, error={"step_s": -0.5})
    outputs: dict[str, Any] = {
        "profile": profile,
        "calibrate": measured_works,
        "exam": summarize_results((case,)).to_builtins(),
    }
    for verb, written in outputs.items():
        assert find_output(json.loads(json.dumps(written)), list_outputs(verb)).__name__ != "ErrorOutput"


@pytest.mark.slow
def test_what_takes_longer_prints_what_its_schema_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIMTAB_CALIBRATIONS", str(tmp_path / "store"))
    assert print_output("max", "slm:tiny", "--on", "A30", "--of", "micro_batch") == "LargestValue"
    assert print_output("calibrate", "--links", "--procs", "2") == "LinksOutput"
    words = [sys.executable, "-m", "trimtab", "train", "slm:tiny", "--steps", "2", "--out", "run", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    kinds = [
        find_output(json.loads(line), list_outputs("train")).__name__ for line in done.stdout.splitlines()
    ]
    assert kinds == ["StepLine", "StepLine", "TrainOutput"]
    assert print_output("jobs", "--summary", "run") == "Summary"
