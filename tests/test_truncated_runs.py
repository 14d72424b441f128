"""Run folders whose files lost their ends: every reader reports them, and a run resumes or is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench import truncated_runs
from bench.truncated_runs import READERS, Reading, list_cuts, make_run, read_cuts, resume_cuts

if TYPE_CHECKING:
    from pathlib import Path

TOLERANT = ("report", "watch", "doctor", "jobs")
"""Readers that show what is left of a damaged folder."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("truncated")
    make_run(folder)
    return folder


def test_a_file_is_cut_at_every_byte_or_at_some() -> None:
    assert list(list_cuts(5)) == [0, 1, 2, 3, 4]
    assert len(list_cuts(100_000)) == 100_000
    assert len(list_cuts(100_000, most=50)) == 50


def test_every_reader_reports_a_cut_file_or_refuses_it(home: Path, tmp_path: Path) -> None:
    counts, faults = read_cuts(home / "run", tmp_path / "cut", most=5)
    assert faults == {}
    for reader in TOLERANT:
        assert counts[f"{reader}: reported"] > 20
        assert not counts[f"{reader}: refused"], "the other files can be shown"
    assert counts["jobs --summary: refused"] == counts["plan file: refused"] == 5
    assert counts["checkpoint: reported"] > 30


@pytest.mark.slow
def test_every_reader_reports_a_cut_at_every_byte_or_refuses_it(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=2)
    # bench/truncated_runs.py has no such limits, and takes seven minutes.
    counts, faults = read_cuts(run, tmp_path / "cut", limits={"resume": 20, "doctor": 100})
    assert faults == {}
    sizes = {name: (run / name).stat().st_size for name in ("plan.json", "summary.json")}
    # The last byte is the end of the line: nothing is lost with it.
    assert counts["plan file: refused"] == sizes["plan.json"] - 1
    assert counts["jobs --summary: refused"] == sizes["summary.json"] - 1
    data = sum(file.stat().st_size for file in (run / "checkpoints").rglob("*") if file.is_file())
    assert counts["checkpoint: reported"] == data


def test_a_reader_that_loses_data_without_a_word_is_a_fault(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_silently(folder: Path) -> Reading:
        return Reading((folder / "log.jsonl").read_bytes())

    monkeypatch.setattr(truncated_runs, "READERS", {"silent": read_silently})
    counts, faults = read_cuts(home / "run", tmp_path / "cut", most=5)
    assert counts["silent: silent"] == 5
    assert [*faults] == ["silent, log.jsonl: silent"]


def test_a_log_cut_between_two_lines_is_reported(home: Path, tmp_path: Path) -> None:
    lines = (home / "run" / "log.jsonl").read_bytes().splitlines(keepends=True)
    target = tmp_path / "cut"
    truncated_runs.cut_copy(home / "run", target, "log.jsonl", sum(map(len, lines[:-1])))
    for reader in TOLERANT:
        notes = " ".join(READERS[reader](target).notes)
        assert "log.jsonl ends at step 3, but summary.json counts 4 steps" in notes


def test_a_run_with_a_cut_file_resumes_or_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken: list[str] = []
    monkeypatch.setattr("trimtab.training.step_log.StepLog.say", lambda _, text: spoken.append(text))
    names = ["log.jsonl", "events.jsonl", "attempt.json", "plan.json"]
    for name in names:
        spoken.clear()
        counts, failures = resume_cuts(home, home / "run", tmp_path / "cut", [name])
        assert failures == {}
        assert counts["train resumes"] == 3
        assert sum("is damaged" in text and name in text for text in spoken) >= 2
    counts, failures = resume_cuts(home, home / "run", tmp_path / "cut", ["run.json"])
    assert failures == {}
    assert counts["train refuses it"], "whose run it is cannot be known"
