"""The cache bounds each kind of file by itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trimtab.trace import tracer

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_many_traces_do_not_push_out_plans_nor_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "MOST_CACHED", 3)
    names = [f"{number:032x}-8" for number in range(5)] + [f"plan-{number:032x}" for number in range(5)]
    names += ["summary-only", "outlook-" + "-".join(["0" * 32] * 3)]
    for age, name in enumerate(names):
        file = tmp_path / f"{name}.json"
        tracer.keep(file, "{}")
        # Written in this order, whatever the clock's resolution is.
        os.utime(file, ns=(age * 10**9, age * 10**9))
    left = {file.stem for file in tmp_path.iterdir()}
    assert left == {*names[2:5], *names[7:]}


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    tracer.keep(tmp_path / "file" / "below.json", "{}")
    assert (tmp_path / "file").read_text(encoding="utf-8") == ""
