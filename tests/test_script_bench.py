"""bench/scripts.py runs a script unmodified, records its steps, and compares them with predictions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from bench import scripts as bench  # noqa: E402


def test_cases_have_their_own_names_and_known_repositories() -> None:
    cases = bench.cases()
    assert len({case.id for case in cases}) == len(cases)
    assert {case.repository for case in cases} <= set(bench.ORIGINS)


def test_a_rank_is_started_without_its_launcher() -> None:
    case = bench.ScriptCase("x", "y", ".", "torchrun --standalone --nproc_per_node=2 train.py --steps 3")
    assert bench.rank_words(case) == [sys.executable, "train.py", "--steps", "3"]


@pytest.mark.slow
def test_a_script_is_measured_as_it_is_and_ended_after_its_steps(tmp_path: Path) -> None:
    case = bench.ScriptCase("loop", "scripts", ".", "python classifier.py --samples 40000 -b 4", steps=4)
    folder = bench.prepare(case, ROOT / "tests", tmp_path)
    found = bench.measure(case, folder, None)
    assert [sorted(step) for step in found["steps"]] == [["loader_s", "wall_s"]] * 4
    assert found["step_s"] > 0
    assert found["loader_s"] > 0
    assert (tmp_path / "loop" / "scripts" / "classifier.py").is_file()


@pytest.mark.slow
def test_a_script_that_ends_before_its_steps_says_why(tmp_path: Path) -> None:
    case = bench.ScriptCase("loop", "scripts", ".", "python breaks.py import")
    folder = bench.prepare(case, ROOT / "tests", tmp_path)
    assert "a_module_that_nobody_has" in bench.measure(case, folder, None)["failed"]


def test_a_repository_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="check out karpathy/nanoGPT"):
        bench.prepare(bench.cases()[0], tmp_path, tmp_path / "work")


def test_errors_are_compared_by_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (case.id for case in bench.cases()[:2])
    measured = {"id": first, "allocated_bytes": 2**30, "reserved_bytes": 2**30, "step_s": 0.1}
    predicted = {"id": first, "allocated_bytes": 2**30 * 1.02, "reserved_bytes": 2**30, "step_s": 0.09}
    files = tmp_path / "measured", tmp_path / "predicted"
    rows: Any = ([measured, {"id": second, "failed": "no GPU"}], [predicted, {**predicted, "id": second}])
    for file, lines in zip(files, rows, strict=True):
        file.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    bench.compare(*files, "*")
    text = capsys.readouterr().out
    assert "+2.0%" in text
    assert "-10.0%" in text
    assert "not measured" in text
    assert "allocated_bytes: 1 scripts, median 2.0%, worst 2.0%" in text
