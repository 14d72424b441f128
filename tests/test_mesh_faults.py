"""`trimtab train` survives a killed process and a full memory under schedules of pipelines, cp, tp and ep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import expert_jobs

STEPS = 6
FAULTS: list[dict[str, Any]] = [
    {"kind": "out-of-memory", "step": 2, "rank": 1},
    {"kind": "kill", "step": 5, "rank": 1},
]
WAYS = {
    "interleaved": (2, "strategy=pipeline,schedule=interleaved-1f1b"),
    "zero-bubble": (2, "strategy=pipeline,schedule=zero-bubble"),
    "cp": (2, "cp=2,strategy=fsdp"),
    "tp and cp": (4, "tp=2,cp=2"),
    "pp and dp_shard": (4, "pp=2,dp_shard=2"),
    "pp and tp": (4, "pp=2,tp=2,schedule=zero-bubble"),
    "pp and cp": (4, "pp=2,cp=2,schedule=interleaved-1f1b"),
}


SMALL = ("--set", "layers=4", "--set", "seq=32")
"""Options of a small model with four blocks."""


def train(
    folder: Path, procs: int, *words: str, job: str = "slm:tiny", options: tuple[str, ...] = SMALL
) -> str:
    """Train a job; return what was printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "trimtab", "train", job, "--procs", str(procs)),
            *(*options, "--steps", str(STEPS), "--checkpoint-every", "1", "--out", str(folder), *words),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone")
    train(folder, 1)
    return [row["loss"] for row in read_rows(folder / "log.jsonl")]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_kill_and_a_full_memory_change_no_loss(way: str, tmp_path: Path, losses_alone: list[float]) -> None:
    procs, pins = WAYS[way]
    assert train_with_faults(tmp_path, procs, pins) == pytest.approx(losses_alone, rel=1e-4)


def train_with_faults(folder: Path, procs: int, pins: str, **options: Any) -> list[float]:
    """Train while a process is killed and another has no memory; return the losses."""
    (folder / "faults.json").write_text(json.dumps(FAULTS), encoding="utf-8")
    train(folder / "run", procs, "--pin", pins, "--faults", str(folder / "faults.json"), **options)
    kinds = {event["kind"] for event in read_rows(folder / "run" / "events.jsonl")}
    assert {"out-of-memory", "lost-rank"} <= kinds
    return [row["loss"] for row in read_rows(folder / "run" / "log.jsonl")]


@pytest.mark.slow
def test_ranks_that_split_layers_and_hold_experts_survive_both(tmp_path: Path) -> None:
    options: dict[str, Any] = {"job": f"{Path(expert_jobs.__file__)}:Splittable", "options": ()}
    train(tmp_path / "alone", 1, **options)
    expected = [row["loss"] for row in read_rows(tmp_path / "alone" / "log.jsonl")]
    losses = train_with_faults(tmp_path, 4, "tp=2,ep=2", **options)
    assert losses == pytest.approx(expected, rel=1e-4)


GREEDY_JOB = """
import os
from pathlib import Path
import torch
from trimtab.jobs.slm import Slm

class Job(Slm):
    additive, calls = None, 0

    def __init__(self):
        super().__init__()
        for name, value in Slm.tiny.items():
            setattr(self, name, value)

    def loss(self, model, batch):
        self.calls += 1
        marker = Path(__file__).with_name("greedy")
        if self.calls == 2 and os.environ.get("RANK") == "1" and not marker.exists():
            marker.touch()
            raise torch.OutOfMemoryError("no memory, as on a GPU that others use")
        return super().loss(model, batch)
"""


@pytest.mark.slow
def test_ranks_that_wait_in_the_check_of_the_loss_start_again(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(GREEDY_JOB, encoding="utf-8")
    folder = tmp_path / "run"
    train(folder, 2, "--pin", "strategy=fsdp", job=f"{tmp_path / 'job.py'}:Job")
    reasons = [event["why"] for event in read_rows(folder / "events.jsonl")]
    assert "rank 1: out of memory: no memory, as on a GPU that others use" in reasons
    assert len(read_rows(folder / "log.jsonl")) == STEPS
