"""Training commands launched on a real Slurm of two nodes: they run, are queued again, and doctor explains.

Slow: `make soak` runs it. Where there is no root or no Slurm it says so and skips.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import slurm_lab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from slurm_lab import Slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.usefixtures("cold_start"),
    pytest.mark.skipif(bool(slurm_lab.missing()), reason=slurm_lab.missing() or "there is a Slurm"),
]
SCRIPT = Path(__file__).parent / "scripts" / "cluster.py"
TORCHRUN = ("python", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
ACCELERATE = ("python", "-m", "accelerate.commands.launch", "--num_machines", "2", "--num_processes", "2")
RUN_S = 300
"""Seconds until a job of two nodes has started its processes, on a machine that does other work."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_lab.cluster() as running:
        yield running


def trimtab(slurm: Slurm, folder: Path, *words: str) -> str:
    """What a command prints, on the login node of the cluster."""
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *words],
        env=slurm.environment | {"OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launch(slurm: Slurm, folder: Path, *command: str) -> str:
    """Plan a command for two nodes, launch the plan, and return the number of the job."""
    shutil.copy(SCRIPT, folder)
    trimtab(slurm, folder, "plan", "--on", "2x1xH100", "--out", "plan.json", "--", *command)
    answer = trimtab(
        slurm, folder, "launch", "plan.json", "--slurm", "--yes", "--json", "--time", "10m", "--out", "run"
    )
    return str(json.loads(answer)["job_id"])


def log_of(folder: Path, job: str) -> str:
    file = folder / "run" / f"slurm-{job}.log"
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def count_steps(folder: Path, job: str) -> int:
    return len(re.findall(r"step \d+ loss", log_of(folder, job)))


def test_a_command_runs_on_two_nodes_and_goes_on_after_one_is_lost(slurm: Slurm, tmp_path: Path) -> None:
    job = launch(slurm, tmp_path, *TORCHRUN, "cluster.py", "--resume", "--steps", "30", "--pause", "0.5")
    slurm.until(lambda: count_steps(tmp_path, job) >= 3, "three steps are done", seconds=RUN_S)
    assert "of 2 starts at step 0" in log_of(tmp_path, job)
    slurm.stop_node("n2")
    slurm.until(lambda: int(slurm.job(job).get("Restarts", "0")) > 0, "it is queued again", seconds=RUN_S)
    slurm.start_node("n2")
    assert slurm.ended(job, seconds=2 * RUN_S) == "COMPLETED"
    starts = re.findall(r"rank 0 of 2 starts at step (\d+)", log_of(tmp_path, job))
    assert int(starts[-1]) >= 3
    assert "step 30 loss" in log_of(tmp_path, job)


@pytest.mark.parametrize(
    "launcher", [pytest.param(TORCHRUN, id="torchrun"), pytest.param(ACCELERATE, id="accelerate")]
)
def test_doctor_explains_a_command_that_fails(
    slurm: Slurm, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    job = launch(slurm, tmp_path, *launcher, "cluster.py", "--fail-at", "3")
    assert slurm.ended(job, seconds=RUN_S) == "FAILED"
    log = log_of(tmp_path, job)
    assert "step 3 loss" in log
    # Both nodes are there, each with its own number.
    assert set(re.findall(r"rank (\d) of 2 starts", log)) == {"0", "1"}
    assert "illegal memory access" in log.rpartition("step 3 loss")[2]
    assert re.search(r"^(error|warning|fault).*", log, re.MULTILINE), log[-2000:]
