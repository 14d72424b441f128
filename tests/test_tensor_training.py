"""`trimtab train` on processes that split layers: one runs out of memory, one is killed, others resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 5
JOB = """
    import torch
    from torch import nn
    import trimtab

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(64, 16)
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
            self.head = nn.Linear(16, 64)

        def forward(self, ids):
            x = self.words(ids)
            return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))

    class Job(trimtab.Job):
        additive = True
        global_batch = 8

        def model(self):
            torch.manual_seed(0)
            return Model()

        def batch(self, n):
            return torch.randint(0, 64, (n, 8))

        def loss(self, model, batch):
            return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

        def optimizer(self, parameters):
            return torch.optim.AdamW(parameters)

        def dataset(self):
            numbers = torch.Generator().manual_seed(3)
            return [torch.randint(0, 64, (8,), generator=numbers) for _ in range(64)]
"""


def train(folder: Path, procs: int, *words: str, steps: int = STEPS) -> str:
    """Run `trimtab train` and return what it prints."""
    job = folder.parent / "job.py"
    job.write_text(dedent(JOB), encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "trimtab", "train", f"{job}:Job", "--procs", str(procs)),
            *("--steps", str(steps), "--checkpoint-every", "1", "--out", str(folder), *words),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def read_losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows]


@pytest.mark.slow
def test_ranks_that_split_layers_survive_a_full_memory_a_kill_and_another_mesh(tmp_path: Path) -> None:
    alone, split = tmp_path / "alone", tmp_path / "split"
    train(alone, 1)
    faults: list[dict[str, Any]] = [
        {"kind": "out-of-memory", "step": 2, "rank": 1},
        {"kind": "kill", "step": 3, "rank": 0},
    ]
    (tmp_path / "faults.json").write_text(json.dumps(faults), encoding="utf-8")
    text = train(split, 2, "--pin", "tp=2", "--faults", str(tmp_path / "faults.json"), steps=4)
    assert "all ranks started again, with 4 samples at once" in text
    assert "fsdp 1 x tp 2" in text
    # One process goes on with the checkpoint of two.
    assert "goes on from step 4" in train(split, 1)
    assert read_losses(split) == pytest.approx(read_losses(alone), abs=1e-5)
    # Two processes go on with the checkpoint of one.
    assert "goes on from step 5" in train(alone, 2, "--pin", "tp=2", steps=6)
    assert read_losses(alone)[:STEPS] == pytest.approx(read_losses(split), abs=1e-5)
