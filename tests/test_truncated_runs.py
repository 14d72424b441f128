"""Run folders whose files lost their ends: every reader reports them, and a run resumes or is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from bench.truncated_runs import list_cuts, make_run, read_cuts, resume_cuts

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("truncated")
    make_run(folder)
    return folder


def test_small_files_are_cut_at_every_byte_and_large_ones_at_some() -> None:
    assert list(list_cuts(5)) == [0, 1, 2, 3, 4]
    assert len(list(list_cuts(100_000, most=50))) == 50


def test_a_run_with_a_cut_file_is_read_by_every_reader(home: Path, tmp_path: Path) -> None:
    counts, failures = read_cuts(home / "run", tmp_path / "cut", most=5)
    assert failures == {}
    assert counts["report reads it"] == counts["watch reads it"] == counts["doctor reads it"] > 50
    assert counts["jobs refuses it"], "a summary that is cut is refused, not read"


def test_a_run_with_a_cut_file_resumes_or_is_refused(home: Path, tmp_path: Path) -> None:
    names = ["log.jsonl", "events.jsonl", "attempt.json", "plan.json"]
    counts, failures = resume_cuts(home, home / "run", tmp_path / "cut", names)
    assert failures == {}
    assert counts["train resumes"] == 3 * len(names)
    counts, failures = resume_cuts(home, home / "run", tmp_path / "cut", ["run.json"])
    assert failures == {}
    assert counts["train refuses it"], "whose run it is cannot be known"
