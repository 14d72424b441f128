"""make demo: what it shows is what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MAKEFILE = Path(__file__).parent.parent / "Makefile"
COMMANDS = re.findall(r"^\t\$\(call show,(.+)\)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)


def shown(command: str, cache: Path, venv: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *command.replace("$(VENV)", str(venv)).split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"TRIMTAB_CACHE": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(match) for match in re.findall(r"^iter \d+: loss ([\d.]+)", output, re.MULTILINE)]


def test_the_demo_detects_plans_trains_and_estimates_and_ends_with_what_is_next() -> None:
    assert [command.split()[0] for command in COMMANDS] == ["detect", "plan", "train", "estimate"]
    recipe = MAKEFILE.read_text(encoding="utf-8").partition("\ndemo: $(READY)\n")[2].partition("\n\n")[0]
    assert recipe.splitlines()[-1].lstrip().startswith('@echo; echo "next: trimtab ')
    # Start a new run: the old one has nothing left to do.
    assert "rm -rf $(VENV)/demo" in recipe


@pytest.mark.slow
def test_the_loss_of_the_demo_falls_visibly(tmp_path: Path) -> None:
    (train,) = (command for command in COMMANDS if command.startswith("train"))
    assert train.startswith("train slm:tiny ")
    found = losses(shown(train, tmp_path / "cache", tmp_path))
    assert len(found) == 15
    assert found[0] > 4
    assert sum(found[-3:]) / 3 < 3
    assert (tmp_path / "demo" / "plan.json").is_file()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("cold_start")
def test_the_whole_demo_runs_from_an_empty_cache(tmp_path: Path) -> None:
    said = [shown(command, tmp_path / "cache", tmp_path) for command in COMMANDS]
    assert "micro_batch" in said[1]
    assert "samples/s" in said[3]
