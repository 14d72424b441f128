"""torchrun itself is killed while its ranks train: real processes, which save and go on or say how to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

JOB = """
import os, signal, time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

MARK = Path(__file__).with_name("killed")


class Job:
    name = "job"
    global_batch, epochs = 8, 100
    calls, kill_at, by = 0, 0, 9

    def model(self):
        return torch.nn.Linear(4, 1).double()

    def batch(self, size):
        return [torch.randn(size, 4, dtype=torch.float64), torch.randn(size, 1, dtype=torch.float64)]

    def loss(self, model, batch):
        self.calls += 1
        time.sleep(0.1)  # the run must not be over before the ranks get their signal
        if self.kill_at and self.calls > self.kill_at and os.environ["RANK"] == "0" and not MARK.exists():
            MARK.touch()
            os.kill(os.getppid(), self.by)
        return (model(batch[0]) - batch[1]).square().mean()

    def dataset(self):
        x = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True).sin())
"""
STEPS = 12


def train(folder: Path, *options: str, procs: int = 2) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(JOB, encoding="utf-8")
    command = [sys.executable, "-m", "trimtab", "train", f"{folder}/job.py:Job", "--steps", str(STEPS)]
    command += ["--procs", str(procs), "--out", str(folder / "run"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_killed_agent_is_started_again_and_the_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    calm.mkdir()
    killed.mkdir()
    assert train(calm, procs=1).returncode == 0
    done = train(killed, "--set", "kill_at=5")
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL; its ranks have ended; it is started again (1 of 10)" in done.stderr
    kinds = [event["kind"] for event in read_lines(killed, "events.jsonl")]
    assert kinds == ["preemption", "lost-rank", "resume"], "the ranks saved before they ended"
    losses, expected = (
        [(line["step"], line["loss"]) for line in read_lines(folder, "log.jsonl")]
        for folder in (killed, calm)
    )
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert [loss for _, loss in losses] == pytest.approx([loss for _, loss in expected], rel=1e-12)


@pytest.mark.slow
def test_without_restarts_a_killed_agent_leaves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    done = train(tmp_path, "--set", "kill_at=5", "--restarts", "0")
    assert done.returncode == 5
    assert "torchrun, process" in done.stderr
    assert "the same command resumes from the last checkpoint" in " ".join(done.stderr.split())
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    assert step == read_lines(tmp_path, "log.jsonl")[-1]["step"], "no finished step is lost"
    assert train(tmp_path, "--set", "kill_at=5").returncode == 0
    assert [line["step"] for line in read_lines(tmp_path, "log.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_an_agent_that_is_asked_to_end_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    done = train(tmp_path, "--set", "kill_at=5", "--set", f"by={int(signal.SIGTERM)}")
    assert done.returncode == 128 + signal.SIGTERM
    assert "the same command resumes" in done.stderr
    assert any((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_an_event_of_a_rank_that_is_killed_one_step_later_is_not_lost(tmp_path: Path) -> None:
    faults = [
        {"kind": "out-of-memory", "step": 3, "rank": 1, "point": "backward"},
        {"kind": "kill", "step": 4, "rank": 1},
    ]
    (tmp_path / "faults.json").write_text(json.dumps(faults), encoding="utf-8")
    done = train(tmp_path, "--faults", str(tmp_path / "faults.json"))
    assert done.returncode == 0, done.stderr
    events = [(event["kind"], event["step"], event["rank"]) for event in read_lines(tmp_path, "events.jsonl")]
    assert events[0] == ("out-of-memory", 3, 1)
    assert "lost-rank" in [kind for kind, _, _ in events]
