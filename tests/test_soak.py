"""A hundred faults in one run, and nothing lost: kill -9, out of memory, not a number, SIGTERM, torn and
unwritable checkpoints, a slow rank; on two processes, and then on three.

The run is compared with one of a single process that nothing happened to.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from trimtab.training.fault_injection import Fault, FaultKind

if TYPE_CHECKING:
    from pathlib import Path

STEPS, HALF = 120, 60
SAMPLES, BATCH = 400, 64
STUCK_S = 240.0

JOB = f"""
import torch
from torch.utils.data import TensorDataset


class Soak:
    name = "soak"
    global_batch, epochs = {BATCH}, 1000

    def model(self):
        layers = [torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)]
        return torch.nn.Sequential(*layers).double()

    def batch(self, size):
        return [torch.randn(size, 8, dtype=torch.float64), torch.randn(size, 1, dtype=torch.float64)]

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def dataset(self):
        x = torch.randn({SAMPLES}, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True).sin())

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=3e-3)

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {STEPS})
"""


def schedule(draw: random.Random, steps: range, ranks: int) -> list[Fault]:
    """Fifty faults, spread over some steps and ranks."""

    def at() -> dict[str, Any]:
        return {"step": draw.choice(steps), "rank": draw.randrange(ranks)}

    found = [
        *(
            Fault(kind=FaultKind.OUT_OF_MEMORY, point=draw.choice(["forward", "backward"]), **at())
            for _ in range(6)
        ),
        *(Fault(kind=FaultKind.OUT_OF_MEMORY, point="optimizer", **at()) for _ in range(6)),
        # Two at one step would be one that lasts, and a step that is skipped.
        *(
            Fault(kind=FaultKind.NOT_A_NUMBER, step=step, rank=draw.randrange(ranks))
            for step in draw.sample(steps, 11)
        ),
        *(Fault(kind=FaultKind.SLOW, seconds=draw.uniform(0.05, 0.5), **at()) for _ in range(9)),
        *(Fault(kind=FaultKind.FULL_DISK, step=draw.choice(steps)) for _ in range(4)),
        *(Fault(kind=FaultKind.KILL, point=draw.choice(["forward", "backward"]), **at()) for _ in range(5)),
        *(Fault(kind=FaultKind.TERMINATE, **at()) for _ in range(2)),
        Fault(kind=FaultKind.WARN, **at()),
    ]
    for step in draw.sample(steps[:-6], 3):
        # A torn checkpoint is only noticed by who has to read it.
        found.append(Fault(kind=FaultKind.TORN_CHECKPOINT, step=step))
        found.append(Fault(kind=FaultKind.KILL, step=step + 5, rank=draw.randrange(ranks)))
    assert len(found) == 50
    return found


def run(folder: Path, *options: str) -> None:
    """Train, and watch that it never stands still for long."""
    command = [sys.executable, "-m", "trimtab", "train", f"{folder}/job.py:Soak", *options]
    log = folder / "output.txt"
    with log.open("ab") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        seen: Any = None
        since = time.monotonic()
        while process.poll() is None:
            now = signs_of_life(folder / "run")
            if now != seen:
                seen, since = now, time.monotonic()
            if time.monotonic() - since > STUCK_S:
                process.kill()
                pytest.fail(
                    f"nothing happened for {STUCK_S:.0f} s: {log.read_text(encoding='utf-8')[-4000:]}"
                )
            time.sleep(0.2)
        assert process.returncode == 0, log.read_text(encoding="utf-8")[-4000:]


def signs_of_life(run: Path) -> Any:
    files = [run / "log.jsonl", run / "events.jsonl", run / "attempt.json"]
    struck = run / "faults"
    return (
        [(file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()],
        len(list(struck.iterdir())) if struck.exists() else 0,
    )


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_a_hundred_faults_change_nothing(tmp_path: Path) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    calm, soaked = tmp_path / "calm", tmp_path / "soaked"
    for folder in (calm, soaked):
        folder.mkdir()
        (folder / "job.py").write_text(JOB, encoding="utf-8")
    run(calm, "--steps", str(STEPS), "--out", str(calm / "run"))

    draw = random.Random(20)  # noqa: S311 - a drill
    faults = [*schedule(draw, range(1, HALF), 2), *schedule(draw, range(HALF + 1, STEPS), 3)]
    file = soaked / "faults.json"
    file.write_text(json.dumps([fault.to_builtins() for fault in faults]), encoding="utf-8")
    common = (
        "--out",
        str(soaked / "run"),
        "--faults",
        str(file),
        "--checkpoint-every",
        "4",
        "--restarts",
        "60",
    )
    run(soaked, "--steps", str(HALF), "--procs", "2", *common)
    run(soaked, "--steps", str(STEPS), "--procs", "3", *common)

    struck = {int(path.name) for path in (soaked / "run" / "faults").iterdir()}
    assert struck == set(range(100)), f"never struck: {[faults[index] for index in set(range(100)) - struck]}"

    told, expected = lines(soaked / "run"), lines(calm / "run")
    assert [one["step"] for one in told] == list(range(1, STEPS + 1))
    assert not any(one["skipped"] for one in told)
    assert told[-1]["loss"] == pytest.approx(expected[-1]["loss"], abs=1e-6)
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(told, expected, strict=True)) < 1e-6

    epochs: dict[int, list[int]] = {}
    for one in told:
        assert len(one["indices"]) == one["samples"]
        epochs.setdefault(one["epoch"], []).extend(one["indices"])
    whole = [epoch for epoch, seen in epochs.items() if epoch < max(epochs)]
    assert whole
    for epoch in whole:
        assert sorted(epochs[epoch]) == list(range(SAMPLES))
    assert len(set(epochs[max(epochs)])) == len(epochs[max(epochs)])

    kinds = {json.loads(line)["kind"] for line in (soaked / "run" / "events.jsonl").read_text().splitlines()}
    assert {
        "out-of-memory",
        "not-a-number",
        "lost-rank",
        "preemption",
        "bad-checkpoint",
        "full-disk",
    } <= kinds
