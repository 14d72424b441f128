"""Every row of docs/translation.md does what it says, with the jobs at their :tiny size."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import config_samples as samples
from test_bridge import folders as folders  # noqa: PLC0414 - a fixture is found by its name
from trimtab.cli.main import main_code

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "translation.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!there|---)(.+?) \| `([^`]*trimtab [^`]+)` \| (.*?) ?\|$", PAGE, re.MULTILINE)
BUILT_IN = re.compile(r"(?<= )(bridge|slm|naics)(?= |$)")
KNOBS: dict[str, tuple[str, Any]] = {
    "amp_dtype=bf16": ("precision", "bf16"),
    "enable_compile=false": ("compile", False),
    "batch_size=4": ("micro_batch", 4),
    "gradient_accumulation_steps=2": ("accumulation", 2),
    "dataloader_num_workers=2": ("workers", 2),
}
PIECES: dict[str, tuple[str, ...]] = {
    "trimtab detect": ("cores",),
    "trimtab launch": ("#SBATCH --", "srun", "trimtab train", "--rendezvous"),
    "trimtab doctor train.log": ("out of memory", "micro-batch"),
    "trimtab show": ("01_stage", "micro-batch"),
    "trimtab apply": ("accumulate_grad_batches",),
    "trimtab revert": ("put back as before",),
}
NEEDS = {"trimtab profile": (5, "GPU"), "trimtab cancel": (5, "Slurm"), "trimtab jobs": (5, "Slurm")}
"""Without a GPU or a cluster: the exit code, and a word of the error."""


def test_the_page_has_its_rows() -> None:
    assert len(ROWS) == PAGE.count("| `trimtab ") + PAGE.count("| `MASTER_ADDR=")
    assert len(ROWS) > 50


def small(command: str) -> str:
    return BUILT_IN.sub(r"\1:tiny", command)


@pytest.fixture
def desk(tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the rows name: models, configs, a log, runs."""
    for name, place in folders.items():
        (tmp_path / f"{name}-folder").symlink_to(place)
    conf = tmp_path / "conf"
    (conf / "curriculum").mkdir(parents=True)
    (conf / "config.yaml").write_text(samples.HYDRA)
    for number in (1, 2):
        text = samples.STAGE.format(number=number, positives=4, negatives=8)
        (conf / "curriculum" / f"{number:02}_stage.yaml").write_text(text)
    (tmp_path / "runs").mkdir()
    shutil.copy(ROOT / "tests" / "logs" / "oom-transformers.log", tmp_path / "train.log")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Exit code and both streams of a command, run in this process."""
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main_code()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue()


def row_case(there: str, here: str, note: str) -> Any:
    # Two models, or several strategies of them, are traced for seconds each. Of the plans for naics, the
    # simplest stays.
    is_heavy = "bridge" in here or "show conf --job naics" in here
    is_heavy = is_heavy or ("plan naics" in here and "`optimize_gpu_config.py --auto`" not in there)
    return pytest.param(there, here, note, marks=[pytest.mark.slow] if is_heavy else [])


PLANS = [row_case(*row) for row in ROWS if row[1].startswith("trimtab plan ")]
TRAININGS = [row for row in ROWS if "trimtab train " in row[1]]
OTHERS = [row_case(*row) for row in ROWS if not row[1].startswith("trimtab plan ") and row not in TRAININGS]


@pytest.mark.parametrize(("there", "here", "_"), PLANS)
@pytest.mark.slow
def test_a_plan_is_what_the_row_asks_for(
    there: str, here: str, _: str, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The answer goes to stdout alone with --json; what is being traced is told on stderr.
    monkeypatch.setattr(sys, "argv", shlex.split(f"{small(here)} --json"))
    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        assert main_code() == 0, told.getvalue()
    plan = json.loads(out.getvalue())
    words = shlex.split(here)
    given = dict(zip(words[3::2], words[4::2], strict=False))
    choice, estimate = plan["choice"], plan["estimate"]
    parts = choice["micro_batch"] * choice["accumulation"] * choice["data_parallel"]
    # The last micro-batch of a step may be smaller, never the global batch.
    assert parts >= choice["global_batch"]
    for word, value in itertools.pairwise(words):
        if word == "--pin":
            name, _, wanted = value.partition("=")
            assert str(choice[name]) == wanted
        if word == "--knob" and value in KNOBS:
            name, expected = KNOBS[value]
            assert choice[name] == expected
    assert choice["global_batch"] == int(given.get("--global-batch", plan["workload"]["global_batch"]))
    share = float(given.get("--memory", 0.9))
    assert estimate["band"]["high_bytes"] <= share * estimate["capacity_bytes"]
    if "--out" in given:
        assert json.loads((desk / given["--out"]).read_text())["choice"] == choice
    if "--compare" in given:
        assert [row["gpus"] for row in plan["comparison"]] == [1, 2, 4]
        assert plan["what_if"]
        assert choice["gpus"] == 1, "the fewest that meet the deadline"
    assert there


@pytest.mark.parametrize(("there", "here", "_"), OTHERS)
def test_the_row_answers(there: str, here: str, _: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if here.startswith(("trimtab apply", "trimtab revert")):
        assert called("trimtab plan naics:tiny --on A100-40GB --out plan.json", monkeypatch)[0] == 0
    if here.startswith("trimtab revert"):
        before = (desk / "conf" / "config.yaml").read_bytes()
        assert called("trimtab apply plan.json --to conf/config.yaml --yes", monkeypatch)[0] == 0
        assert (desk / "conf" / "config.yaml").read_bytes() != before
    code, said = called(small(here), monkeypatch)
    needed = next((value for start, value in NEEDS.items() if here.startswith(start)), None)
    if needed is not None and code:
        assert code in {2, needed[0]}
        assert needed[1].lower() in said.lower()
        return
    assert code in {0, 4} if here.startswith("trimtab doctor") else code == 0, said
    for start, pieces in PIECES.items():
        if here.startswith(start):
            assert [piece for piece in pieces if piece.lower() not in said.lower()] == [], said
    if here.startswith("trimtab revert"):
        assert (desk / "conf" / "config.yaml").read_bytes() == before
    assert there


@pytest.mark.slow
@pytest.mark.parametrize(("there", "here", "_"), TRAININGS)
def test_the_row_trains(there: str, here: str, _: str, desk: Path) -> None:
    line = small(here)
    # A step of each is enough; the rows that say how many keep theirs.
    line += "" if "steps" in line else " --steps 1"
    line += "" if "--out" in line else " --out runs/it"
    line = line.replace("trimtab train", f"{shlex.quote(sys.executable)} -m trimtab train", 1)
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = list((desk / "runs").rglob("log.jsonl"))
    assert logs, "a run has a log"
    for log in logs:
        steps = [json.loads(line) for line in log.read_text().splitlines()]
        assert steps
        assert all(math.isfinite(step["loss"]) for step in steps)
    assert list((desk / "runs").rglob("summary.json"))
    assert there
