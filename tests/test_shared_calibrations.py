"""Calibrations that people share: checked, stored, used by predictions, listed and removed."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import trimtab
from trimtab import api
from trimtab.cli.main import app
from trimtab.errors import BrokenFile, UnknownName, WrongUse
from trimtab.predict.calibration import find_rates, find_speed, read_own_calibration, shipped_calibrations
from trimtab.predict.op_time import roofline_s
from trimtab.spec import Calibration

if TYPE_CHECKING:
    from pathlib import Path

A100 = "A100 80GB SXM4"


@cache
def make_shared() -> Calibration:
    """Return what an A100 might measure: operations of the H200's menu at 0.7 of the A100's datasheet."""
    rates = find_rates(A100)
    assert rates is not None
    works = [work for work in shipped_calibrations()[0].works if "float8" not in work.dtype][::7]
    return Calibration(
        device=A100,
        versions={"torch": "2.13.0", "cuda": "13.0"},
        taken_on="2026-11-01",
        works=tuple(works),
        seconds=tuple(roofline_s(work, rates) / 0.7 for work in works),
        host={"forward_s": 9e-6},
        owner="Jane at ETH",
    )


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMTAB_CALIBRATIONS", str(tmp_path / "store"))
    return tmp_path / "store"


def write_shared(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "shared.json"
    file.write_text(json.dumps({**make_shared().to_builtins(), **changes}), encoding="utf-8")
    return file


def test_an_imported_calibration_is_used_for_its_device_and_says_whose_it_is(tmp_path: Path) -> None:
    device = trimtab.cluster(A100).devices[0]
    before = find_speed(device, read_own_calibration(device))
    assert before is not None
    assert (before.own, before.imported) == (False, "")
    api.import_calibration(write_shared(tmp_path))
    after = find_speed(device, read_own_calibration(device))
    assert after is not None
    assert after.own
    assert after.imported.startswith("Jane at ETH, taken on 2026-11-01, imported on ")
    shared = make_shared()
    place = next(number for number, work in enumerate(shared.works) if work.kind == "matrix")
    assert after.pace.seconds(shared.works[place]) == pytest.approx(shared.seconds[place], rel=0.02)
    # The driver's name of the device leads to the same calibration; another device keeps its speed.
    calibration, _ = api.import_calibration(write_shared(tmp_path, device="NVIDIA A100-SXM4-80GB"))
    assert calibration.device == A100
    assert read_own_calibration(trimtab.cluster("H100").devices[0]) is None


def test_layouts_use_an_imported_calibration_and_say_so(tmp_path: Path) -> None:
    config = tmp_path / "model"
    config.mkdir()
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 32000,
    }
    sizes |= {"intermediate_size": 4096, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (config / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    api.import_calibration(write_shared(tmp_path))
    text = CliRunner().invoke(app, ["layouts", f"hf:{config}", "--on", f"8x{A100}", "--json"]).stdout
    notes = json.loads(text)["assumptions"]
    assert any("calibration of A100 80GB SXM4 from Jane at ETH" in note for note in notes)
    assert not any("not calibrated" in note for note in notes)


def test_what_this_machine_measured_comes_first_and_is_never_overwritten(tmp_path: Path, store: Path) -> None:
    store.mkdir()
    own = make_shared().replace(owner="", host={"forward_s": 5e-6})
    (store / "a100-80gb-sxm4.json").write_text(own.to_json(), encoding="utf-8")
    _, file = api.import_calibration(write_shared(tmp_path))
    device = trimtab.cluster(A100).devices[0]
    assert read_own_calibration(device) == own
    assert "comes first" in api.describe_calibration(file, Calibration.from_file(file))["use"]
    api.remove_calibration("a100-80gb-sxm4")
    stored = read_own_calibration(device)
    assert stored is not None
    assert stored.owner == "Jane at ETH"


def damage_text(text: str, damage: str) -> str:
    """Return a file that was cut, or that has a value that JSON does not have."""
    if damage == "cut":
        return text[: len(text) // 2]
    if damage == "empty":
        return ""
    return text.replace('"seconds": [', f'"seconds": [{damage}, ', 1)


@pytest.mark.parametrize("damage", ["cut", "empty", "NaN", "1e999", "-1.0", '"fast"', "0"])
def test_a_damaged_file_is_refused_and_nothing_is_stored(tmp_path: Path, store: Path, damage: str) -> None:
    file = write_shared(tmp_path)
    file.write_text(damage_text(file.read_text(encoding="utf-8"), damage), encoding="utf-8")
    with pytest.raises(BrokenFile, match=r"--import"):
        api.import_calibration(file)
    assert not store.exists()


def change_first(**changes: Any) -> dict[str, Any]:
    """Return the works of the file with other values in the first matrix product."""
    works = [work.to_builtins() for work in make_shared().works]
    place = next(number for number, work in enumerate(works) if work["kind"] == "matrix")
    works[place] |= changes
    return {"works": works}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format is 2, and this version of trimtab reads 1"),
        ({"from_later": 1}, "unknown field"),
        ({"device": "A101"}, "the catalogue has no 'A101'"),
        ({"device": "T4"}, "another GPU was measured"),
        ({"device": "B200"}, "another GPU was measured"),
        ({"device": "\x1b[31mA100"}, "cannot be printed"),
        ({"taken_on": "soon"}, "not a date"),
        ({"taken_on": "2999-01-01"}, "in the future"),
        ({"host": {"forward_s": 10.0}}, "host.forward_s is 10, not between"),
        ({"host": {"forward_s": -1.0}}, "forward_s is -1.0"),
        ({"copy_bytes_per_s": {"to_host": 5.0}}, "copy_bytes_per_s.to_host is 5"),
        ({"works": [], "seconds": []}, "it has no measurement"),
        ({"seconds": [1e-6]}, "works have 1 times"),
        ({"seconds": [100.0] * len(make_shared().works)}, r"took 100 s; .* and \d+ more"),
        ({"seconds": [1e-12] * len(make_shared().works)}, "took 1e-12 s"),
        ({"seconds": [50.0 * s for s in make_shared().seconds]}, "another GPU was measured, or a busy one"),
        (change_first(dims=[1, 2]), r"impossible sizes \(1, 2\)"),
        (change_first(dims=[10**400] * 5), r"impossible sizes|not JSON|not a Calibration"),
        (change_first(flops=-5), "flops is -5"),
        (change_first(kind="magic"), "kind is 'magic'"),
    ],
)
def test_a_calibration_that_cannot_be_right_is_refused_with_the_reason(
    tmp_path: Path, store: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BrokenFile, match=message):
        api.import_calibration(write_shared(tmp_path, **changes))
    assert not store.exists()


def test_the_calibration_that_ships_with_trimtab_passes_the_checks(tmp_path: Path) -> None:
    file = tmp_path / "h200.json"
    file.write_text(shipped_calibrations()[0].to_json(), encoding="utf-8")
    calibration, _ = api.import_calibration(file, owner="the lab")
    assert calibration.owner == "the lab"


def test_the_command_imports_lists_and_removes(tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert "no calibration is stored" in run(app, ["calibrate", "--list"]).stdout
    text = run(app, ["calibrate", "--import", str(write_shared(tmp_path))]).stdout
    assert "from Jane at ETH, taken on 2026-11-01" in text
    assert f"predictions for {A100} use it" in text
    entry = json.loads(run(app, ["calibrate", "--list", "--json"]).stdout)["calibrations"][0]
    assert (entry["name"], entry["owner"]) == ("imported-a100-80gb-sxm4", "Jane at ETH")
    assert entry["operations"] == len(make_shared().works)
    assert "removed" in run(app, ["calibrate", "--remove", entry["name"]]).stdout
    assert json.loads(run(app, ["calibrate", "--list", "--json"]).stdout)["calibrations"] == []


def test_wrong_options_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="cannot be read"):
        api.import_calibration(tmp_path / "missing.json")
    with pytest.raises(WrongUse, match="cannot be read"):
        api.import_calibration(tmp_path)
    api.import_calibration(write_shared(tmp_path))
    with pytest.raises(UnknownName, match="imported-a100-80gb-sxm4"):
        api.remove_calibration("a100")
    both = CliRunner().invoke(app, ["calibrate", "--list", "--remove", "a100"])
    assert isinstance(both.exception, WrongUse)
    assert both.exception.found == "each is a command of its own"


def test_a_stored_file_that_breaks_later_is_listed_and_not_used(tmp_path: Path) -> None:
    _, file = api.import_calibration(write_shared(tmp_path))
    file.write_text("{", encoding="utf-8")
    assert read_own_calibration(trimtab.cluster(A100).devices[0]) is None
    text = CliRunner().invoke(app, ["calibrate", "--list"]).stdout
    assert "not used: it is broken" in text
