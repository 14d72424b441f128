"""Launched jobs on a real Slurm of two nodes: they train, are cancelled, warned, preempted, lost, and finish.

Slow: `make soak` runs it. Where there is no root or no Slurm it says so and skips.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

import slurm_lab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from slurm_lab import Slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.usefixtures("cold_start"),
    pytest.mark.skipif(bool(slurm_lab.missing()), reason=slurm_lab.missing() or "there is a Slurm"),
]
WAIT_S = 300
"""How long to wait for something before the test fails: far more than a slow, busy machine needs."""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_lab.cluster() as running:
        yield running


@pytest.fixture(autouse=True)
def _clean(slurm: Slurm) -> Iterator[None]:
    """Every test finds both nodes idle, whatever the one before it did."""
    for name in slurm_lab.NODES:
        if name not in slurm.daemons:
            slurm.start_node(name)
    slurm.until(lambda: slurm.idle(*slurm_lab.NODES), "both nodes are idle", seconds=WAIT_S)
    yield
    slurm.ask("scancel", "--user=root", "--signal=KILL", "--full", check=False)
    slurm.ask("scancel", "--user=root", check=False)
    slurm.until(lambda: not slurm.ask("squeue", "--noheader").strip(), "the queue is empty", seconds=WAIT_S)


def trimtab(slurm: Slurm, *words: str, code: int = 0) -> str:
    """What a command prints, on the login node of the cluster."""
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *words],
        env=slurm.environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def launched(slurm: Slurm, run: Path, job: str, steps: int, *words: str, nodes: str = "2") -> str:
    """The number of a job of two processes on each node."""
    told = trimtab(
        slurm,
        *("launch", job, "--slurm", "--yes", "--json", "--nodes", nodes, "--procs", "2"),
        *("--steps", str(steps), "--out", str(run), "--time", "10m", *words),
        *("--", "--checkpoint-every", "20"),
    )
    return str(json.loads(told)["job_id"])


def lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a log that may be being written."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]]


def step_of(run: Path) -> int:
    found = lines(run / "log.jsonl")
    return int(found[-1]["step"]) if found else 0


def kinds(run: Path) -> list[str]:
    return [line["kind"] for line in lines(run / "events.jsonl")]


def output(run: Path) -> str:
    return "".join(file.read_text() for file in run.glob("slurm-*.log"))


def reaches(slurm: Slurm, run: Path, step: int) -> float:
    try:
        return slurm.until(lambda: step_of(run) >= step, f"step {step}", seconds=WAIT_S)
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{output(run)[-3000:]}") from None


def finished(slurm: Slurm, run: Path, job_id: str) -> None:
    assert slurm.ended(job_id, seconds=2 * WAIT_S) == "COMPLETED", output(run)[-4000:]


def started_again(slurm: Slurm, job_id: str, restarts: int) -> None:
    """Wait for a requeue, and let it not wait for the two minutes that Slurm holds such a job back."""
    slurm.until(lambda: slurm.job(job_id).get("Restarts") == str(restarts), "requeued", seconds=WAIT_S)
    slurm.until(lambda: slurm.state(job_id) == "PENDING", "pending", seconds=WAIT_S)
    # Not at once: a node still takes the credential of that second for the attempt that was ended.
    slurm.ask("scontrol", "update", f"jobid={job_id}", "starttime=now+3")
    slurm.until(lambda: slurm.state(job_id) == "RUNNING", "running again", seconds=WAIT_S)


def workers(slurm: Slurm) -> list[psutil.Process]:
    """The ranks of the runs on the cluster."""
    found = []
    for name in slurm_lab.NODES:
        for pid in slurm.processes_on(name):
            try:
                process = psutil.Process(pid)
                if "trimtab.training.worker" in process.cmdline():
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
    return found


JOB = """
import os
import time

import torch

import trimtab


class Slow(trimtab.Job):
    name = "slow"
    global_batch, samples, epochs, calls = 16, 1000, 10, 0

    def model(self):
        layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
        return torch.nn.Sequential(*layers).double()

    def batch(self, size):
        return torch.randn(size, 8, dtype=torch.float64)

    def dataset(self):
        return torch.randn(1000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(self, model, batch):
        time.sleep(float(os.environ.get("PAUSE_S", "0.08")))
        return (model(batch) - batch.sum(1, keepdim=True).sin()).square().mean()


class Fails(Slow):
    def loss(self, model, batch):
        self.calls += 1
        if os.environ.get("RANK") == "3" and self.calls == 4:
            raise ValueError("the fourth batch is sour")
        return super().loss(model, batch)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with jobs whose steps take a tenth of a second, in numbers of 64 bits."""
    file = tmp_path_factory.mktemp("jobs") / "job.py"
    file.write_text(JOB)
    return file


def alone(job: str, steps: int, run: Path) -> dict[int, float]:
    """The losses of a job in one process, without a scheduler, by step."""
    command = [sys.executable, "-m", "trimtab", "train", job, "--steps", str(steps), "--out", str(run)]
    env = os.environ | {"PAUSE_S": "0"}
    subprocess.run(command, check=True, capture_output=True, timeout=300, env=env)
    return {line["step"]: line["loss"] for line in lines(run / "log.jsonl")}


def agrees(run: Path, job: str, steps: int) -> None:
    """Every step once, on the same global batch, with the loss of one process."""
    found = lines(run / "log.jsonl")
    assert [mapping["step"] for mapping in found] == list(range(1, steps + 1))
    expected = alone(job, steps, run.with_name("alone"))
    for mapping in found:
        assert mapping["loss"] == pytest.approx(expected[mapping["step"]], rel=1e-6), mapping
    assert {mapping["samples"] for mapping in found} <= {16, 1000 % 16}


def test_two_nodes_of_two_processes_train_as_one_process_does(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "a run"
    since = time.monotonic()
    # Numbers of 32 bits, summed in another order: after more steps the differences grow.
    steps = 12
    job_id = launched(slurm, run, "slm:tiny", steps)
    reaches(slurm, run, 1)
    first_s = time.monotonic() - since
    finished(slurm, run, job_id)
    with capsys.disabled():
        print(f"\n[lab] from launch to the first step: {first_s:.1f} s")  # noqa: T201
    agrees(run, "slm:tiny", steps)
    assert kinds(run) == []
    found = json.loads((run / "summary.json").read_text())
    assert (found["processes"], found["nodes"], found["steps"], found["attempts"]) == (4, 2, steps, 1)
    assert trimtab(slurm, "jobs", "--summary", str(run)) == (run / "summary.txt").read_text()
    (told,) = json.loads(trimtab(slurm, "jobs", str(run), "--json"))["jobs"]
    assert (told["id"], told["state"], told["run"]["step"]) == (job_id, "completed", steps)


def test_a_time_limit_and_a_lost_node_leave_the_run_to_finish_on_the_rest(
    slurm: Slurm, tmp_path: Path, job: Path
) -> None:
    run, name, steps = tmp_path / "run", f"{job}:Slow", 500
    job_id = launched(slurm, run, name, steps, nodes="1:2")
    reaches(slurm, run, 5)
    # Two minutes before the limit it is warned; Slurm looks at limits every half minute.
    slurm.ask("scontrol", "update", f"jobid={job_id}", "timelimit=2")
    slurm.until(lambda: "time-limit" in kinds(run), "warned", seconds=WAIT_S)
    slurm.ask("scontrol", "update", f"jobid={job_id}", "timelimit=10")
    started_again(slurm, job_id, 1)
    warned_at = step_of(run)
    reaches(slurm, run, warned_at + 5)
    slurm.stop_node("n2")
    started_again(slurm, job_id, 2)
    finished(slurm, run, job_id)
    agrees(run, name, steps)
    assert slurm.job(job_id)["NodeList"] == "n1"
    told = kinds(run)
    assert told[:3] == ["time-limit", "requeue", "resume"]
    assert told[3:] == ["lost-rank", "requeue", "resize", "resize", "resume"]
    assert lines(run / "log.jsonl")[-1]["gpus"] == 2
    found = json.loads((run / "summary.json").read_text())
    assert (found["attempts"], found["processes"], found["nodes"]) == (3, 2, 1)
    assert found["incidents"]["requeue"] == 2


def test_a_preempted_job_is_queued_again_and_goes_on(slurm: Slurm, tmp_path: Path, job: Path) -> None:
    run, name, steps = tmp_path / "run", f"{job}:Slow", 120
    job_id = launched(slurm, run, name, steps)
    reaches(slurm, run, 5)
    script = tmp_path / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 1\n")
    options = ("--partition=urgent", "--nodes=2", "--exclusive", f"--output={tmp_path}/urgent.log")
    urgent = slurm.submit(script, *options)
    slurm.ended(urgent, seconds=WAIT_S)
    started_again(slurm, job_id, 1)
    finished(slurm, run, job_id)
    agrees(run, name, steps)
    assert kinds(run) == ["preemption", "requeue", "resume"]


def test_a_killed_worker_is_replaced_and_a_cancelled_job_keeps_its_last_step(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    job_id = launched(slurm, run, "slm:tiny", 100_000)
    waiting = launched(slurm, tmp_path / "next", "slm:tiny", 10)
    reaches(slurm, run, 25)
    since = time.monotonic()
    workers(slurm)[-1].send_signal(signal.SIGKILL)
    slurm.until(lambda: "resume" in kinds(run), "resumed", seconds=WAIT_S)
    resumed_at = next(line["step"] for line in lines(run / "events.jsonl") if line["kind"] == "resume")
    reaches(slurm, run, resumed_at + 1)
    again_s = time.monotonic() - since
    with capsys.disabled():
        print(f"\n[lab] from a worker's death to the next step: {again_s:.1f} s")  # noqa: T201
    assert kinds(run)[:2] == ["lost-rank", "resume"]

    reaches(slurm, run, resumed_at + 40)
    told = {load["id"]: load for load in json.loads(trimtab(slurm, "jobs", str(run), "--json"))["jobs"]}
    mine = told[job_id]
    assert (mine["state"], mine["queued"]["nodes"]) == ("running", ["n1", "n2"])
    assert mine["run"]["steps"] == 100_000
    assert mine["run"]["samples_per_s"] > 0
    assert mine["run"]["left_s"] > 0
    assert any(line.startswith("iter ") for line in mine["tail"])
    assert told[waiting]["state"] == "pending"
    assert told[waiting]["why"] == "it is next, and waits until enough nodes and GPUs are free"
    assert "step " in trimtab(slurm, "jobs", str(run))

    foreign = slurm.ask("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").strip()
    assert "trimtab did not submit it" in trimtab(slurm, "cancel", foreign, code=2)
    assert "Slurm knows no such job" in trimtab(slurm, "cancel", "99999", code=2)
    trimtab(slurm, "cancel", foreign, "--force")
    trimtab(slurm, "cancel", waiting)
    trimtab(slurm, "cancel", job_id)
    assert slurm.ended(job_id, seconds=WAIT_S) == "CANCELLED"
    assert not (run / "summary.json").exists()
    slurm.until(lambda: kinds(run)[-1] == "preemption", "it has saved", seconds=WAIT_S)
    assert f"step-{step_of(run):08d}" in {path.name for path in (run / "checkpoints").iterdir()}
    assert "it has ended already: it was cancelled" in trimtab(slurm, "cancel", job_id, code=2)


def test_a_failing_rank_and_its_cause_are_in_the_last_lines_and_nothing_is_queued_again(
    slurm: Slurm, tmp_path: Path, job: Path
) -> None:
    run = tmp_path / "run"
    job_id = launched(slurm, run, f"{job}:Fails", 20)
    assert slurm.ended(job_id, seconds=WAIT_S) == "FAILED"
    last = "\n".join(output(run).splitlines()[-20:])
    assert "the fourth batch is sour" in last
    assert "rank 3" in last.lower()
    assert slurm.job(job_id)["Restarts"] == "0"


def test_gpus_are_asked_for_and_seen_in_the_step(slurm: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = trimtab(
        slurm, "launch", "slm:tiny", "--on", "2x2xH100", "--pin", "gpus=4", "--slurm", "--out", str(run)
    )
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert [line for line in asked if "gpu" in line]
    kept = [line for line in asked if "--output" not in line]
    script = tmp_path / "look.sh"
    look = "srun bash -c 'echo \"$SLURMD_NODENAME sees $CUDA_VISIBLE_DEVICES of $SLURM_GPUS_ON_NODE\"'"
    script.write_text("\n".join(["#!/bin/bash", *kept, look, ""]))
    job_id = slurm.submit(script, f"--output={tmp_path}/look.log")
    assert slurm.ended(job_id, seconds=WAIT_S) == "COMPLETED"
    seen = sorted((tmp_path / "look.log").read_text().splitlines())
    assert seen == ["n1 sees 0,1 of 2", "n2 sees 0,1 of 2"]
    assert "gpu:h100:2" in slurm.job(job_id)["TresPerNode"]


def test_no_daemon_outlives_its_cluster() -> None:
    with slurm_lab.cluster() as second:
        pids = [daemon.pid for daemon in second.daemons.values()]
        folder = second.folder
    assert not folder.exists()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
