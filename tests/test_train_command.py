"""`trimtab train` from the command line: what it prints, writes, resumes, survives and refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from trimtab import api
from trimtab.cli.main import main_code
from trimtab.spec import Band, Estimate, Footprint, Mesh, Plan, RankPlacement, Setting, Strategy
from trimtab.training.checkpoints import CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("train command")  # its fixture is made once

JOB = """
import torch
from torch.utils.data import TensorDataset


def data(samples, seed):
    x = torch.randn(samples, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Small:
    name = "small"
    global_batch, epochs, samples = 8, 2, 50
    clip = 1.0

    def model(self):
        layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
        return torch.nn.Sequential(*layers).double()

    def batch(self, size):
        return [torch.randn(size, 8, dtype=torch.float64), torch.randn(size, 1, dtype=torch.float64)]

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def dataset(self):
        return data(self.samples, 0)

    def optimizer(self, params):
        return torch.optim.AdamW(params, lr=1e-2)

    def schedule(self, optimizer):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 14)


class Judged(Small):
    def validation(self):
        return data(21, 1)


class Unlike(Small):
    # How items are not like batch(): keys, dtypes and shapes, or nothing that the loss minds.
    how = "keys"

    def batch(self, size):
        x, y = super().batch(size)
        return {"x": x, "y": y}

    def loss(self, model, batch):
        return super().loss(model, [batch["x"], batch["y"]])

    def dataset(self):
        items = [{"x": x, "y": y} for x, y in super().dataset()]
        if self.how == "keys":
            return [{"x": one["x"], "label": one["y"]} for one in items]
        if self.how == "kind":
            return super().dataset()
        if self.how == "dtype":
            return [{"x": one["x"].float(), "y": one["y"]} for one in items]
        if self.how == "shape":
            return [{"x": one["x"][:7], "y": one["y"]} for one in items]
        return [{"x": one["x"], "y": one["y"].float(), "index": 1} for one in items]


class NoData(Small):
    dataset = None


class Vector(Small):
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square()


class Raises(Small):
    def loss(self, model, batch):
        raise KeyError("answer")


class RaisesLate(Small):
    seen = 0

    def loss(self, model, batch):
        RaisesLate.seen += 1
        if RaisesLate.seen > 4:
            raise KeyError("answer")
        return super().loss(model, batch)


class BadData(Small):
    def dataset(self):
        raise OSError("no such disk")


class Stream(Small):
    def dataset(self):
        class Endless(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(())

        return Endless()


class Diverges(Small):
    epochs = 20
    calls, since, until, factor = 0, 11, 10**9, float("nan")

    def loss(self, model, batch):
        self.calls += 1
        bad = self.since <= self.calls < self.until
        return super().loss(model, batch) * (self.factor if bad else 1.0)


class Spikes(Diverges):
    # The step, and its repetition.
    since, until, factor = 41, 43, 1e4


class Overflow(torch.nn.Module):
    def forward(self, x):
        return (x * 1e4 * 1e4) / 1e8


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(4)])
        self.blocks[2].last = Overflow()
        self.out = torch.nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.last = torch.nn.Linear(8, 8), torch.nn.Tanh()

    def forward(self, x):
        return self.last(self.one(x))


class Narrow(Small):
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 16), Overflow(), torch.nn.Linear(16, 1))

    def loss(self, model, batch):
        return (model(batch[0].float()) - batch[1]).square().mean()


class Staged(Narrow):
    def model(self):
        return Blocks()
"""

ITER = re.compile(r"^iter (\d+): loss (\S+), time (\S+)ms, mfu (\S+)%")


class Told(NamedTuple):
    code: int
    out: str
    err: str


def command(*arguments: str | Path) -> Told:
    """The program, in this process: torch is here already."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["trimtab", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main_code()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    return Told(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("job")
    (place / "job.py").write_text(JOB, encoding="utf-8")
    return place


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


@pytest.fixture(scope="module")
def calm(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run on one process, to which nothing happens."""
    run = tmp_path_factory.mktemp("calm") / "run"
    done = command("train", f"{home}/job.py:Judged", "--out", run, "--checkpoint-every", "5", "--keep", "2")
    assert done.code == 0, done.err
    printed = [ITER.match(line) for line in done.out.splitlines()]
    assert [int(one[1]) for one in printed if one] == list(range(1, 15))
    assert len(printed) == 14
    assert all(len(line) <= 200 for line in done.out.splitlines())
    assert "1 process without a GPU" in done.err
    return run


def test_a_run_leaves_its_plan_its_log_its_events_and_its_checkpoints(calm: Path) -> None:
    assert {"plan.json", "log.jsonl", "events.jsonl", "checkpoints"} <= {path.name for path in calm.iterdir()}
    assert Plan.from_json((calm / "plan.json").read_bytes()).choice.global_batch == 8
    told = lines(calm)
    names = (
        "step loss samples_per_s tokens_per_s mfu allocated_bytes reserved_bytes data_wait_s grad_norm lr "
    )
    assert {*names.split(), "micro_batch"} <= set(told[0])
    assert [(mapping["step"], mapping["epoch"], mapping["samples"]) for mapping in told[5:8]] == [
        (6, 0, 8),
        (7, 0, 2),
        (8, 1, 8),
    ]
    assert [mapping["lr"] for mapping in told[:2]] == pytest.approx([1e-2, 1e-2 * 0.9874639560909117])
    kept = sorted(path.name for path in (calm / "checkpoints").iterdir())
    best = min(
        (mapping for mapping in told if mapping["validation_loss"]),
        key=lambda mapping: mapping["validation_loss"],
    )
    assert kept == [f"step-{step:08d}" for step in sorted({10, 14, best["step"]})]


def test_evaluation_is_of_every_sample_once_an_epoch_and_never_at_the_start(home: Path, calm: Path) -> None:
    judged = {
        line["step"]: line["validation_loss"] for line in lines(calm) if line["validation_loss"] is not None
    }
    assert list(judged) == [7, 14]
    job = api.load(f"{home}/job.py:Judged")
    model = job.model()
    CheckpointManager(calm / "checkpoints").load_latest({"model": model})
    whole = torch.utils.data.default_collate(list(job.validation()))
    assert judged[14] == pytest.approx(float(job.loss(model, whole).detach()), abs=1e-12)


@pytest.mark.slow
def test_a_finished_run_says_so_and_a_longer_one_goes_on(home: Path, calm: Path, tmp_path: Path) -> None:
    job = f"{home}/job.py:Judged"
    again = command("train", job, "--out", calm, "--checkpoint-every", "5")
    assert again.code == 0
    assert "has its 14 steps already" in again.err
    assert again.out == ""
    run = tmp_path / "run"
    assert command("train", job, "--out", run, "--steps", "6").code == 0
    more = command("train", job, "--out", run, "--json", "--pin", "micro_batch=3")
    assert more.code == 0
    rows = [json.loads(line) for line in more.out.splitlines()]
    assert [row["step"] for row in rows if "step" in row] == list(range(7, 15))
    assert {"step", "loss", "samples_per_s", "mfu", "allocated_bytes", "reserved_bytes"} <= set(rows[0])
    assert [row["kind"] for row in rows[-1]["events"]] == ["resume"]
    assert losses(run) == pytest.approx(losses(calm), abs=1e-9)


def test_steps_that_no_checkpoint_covers_are_taken_again(home: Path, calm: Path, tmp_path: Path) -> None:
    run, job = tmp_path / "run", f"{home}/job.py:Small"
    faults = tmp_path / "faults.json"
    faults.write_text(
        '[{"kind": "full-disk", "step": 6}, {"kind": "torn-checkpoint", "step": 4}]', encoding="utf-8"
    )
    first = command("train", job, "--out", run, "--steps", "6", "--checkpoint-every", "2", "--faults", faults)
    assert first.code == 0
    second = command("train", job, "--out", run, "--steps", "14")
    assert second.code == 0
    kinds = [event["kind"] for event in events(run)]
    assert kinds == ["full-disk", "bad-checkpoint", "resume"]
    assert "4 steps after it will be taken again" in events(run)[-1]["done"]
    assert [line["step"] for line in lines(run)] == list(range(1, 15))
    assert losses(run) == pytest.approx(losses(calm), abs=1e-12)


def test_a_run_that_diverges_climbs_the_ladder_and_stops_with_a_report(home: Path, tmp_path: Path) -> None:
    done = command("train", f"{home}/job.py:Diverges", "--out", tmp_path / "run", "--checkpoint-every", "2")
    assert done.code == 4
    assert "after the step was skipped, the rate was multiplied by 0.8" in " ".join(done.err.split())
    told = events(tmp_path / "run")
    answers = [mapping["done"] for mapping in told if not mapping["done"].endswith("once more")]
    for answer, part in zip(
        answers,
        ("is skipped: the weights", "0.8 of the", "goes back", "goes on from step 10", "is stopped"),
        strict=True,
    ):
        assert part in answer
    assert lines(tmp_path / "run")[-1]["step"] == 10
    seen = command("doctor", tmp_path / "run")
    assert seen.code == 4
    assert "error: The run was stopped at step" in seen.out


def test_a_spike_is_skipped_and_the_run_goes_on(home: Path, tmp_path: Path) -> None:
    done = command("train", f"{home}/job.py:Spikes", "--out", tmp_path / "run", "--steps", "45")
    assert done.code == 0
    told = lines(tmp_path / "run")
    assert [mapping["step"] for mapping in told if mapping["skipped"]] == [41]
    assert [event["kind"] for event in events(tmp_path / "run")] == ["loss-spike", "loss-spike"]
    seen = command("doctor", tmp_path / "run")
    assert seen.code == 0
    assert "info: The run is done: all of its 45 steps were taken." in seen.out
    assert "2 times, at step 41" in seen.out


def test_an_error_that_ends_a_run_is_in_its_folder_too(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert command("train", f"{home}/job.py:RaisesLate", "--out", run).code == 4
    (failed,) = events(run)
    assert failed["kind"] == "failed"
    assert "KeyError" in failed["why"]
    assert failed["step"] == len(lines(run)) > 0
    seen = command("doctor", run, "--json")
    assert seen.code == 4
    (one,) = json.loads(seen.out)["findings"]
    assert one["kind"] == "run-failed"
    assert "KeyError" in one["what"]


def test_a_module_that_overflows_is_found_and_kept_in_fp32(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = ("train", f"{home}/job.py:Narrow", "--out", run, "--pin", "precision=fp16")
    assert command(*job, "--steps", "4").code == 0
    told = lines(run)
    assert [bool(mapping["skipped"]) for mapping in told] == [True, True, False, False]
    (kept,) = [event for event in events(run) if "fp32" in event["done"]]
    assert "1 (Overflow) is the first whose forward is not finite" in kept["why"]
    # The resumed run knows.
    assert command(*job, "--steps", "6").code == 0
    assert not any(line["skipped"] for line in lines(run)[2:])


@pytest.mark.slow
def test_a_module_of_a_later_stage_that_overflows_is_found_and_kept_in_fp32(
    home: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = (f"{home}/job.py:Staged", "--out", run, "--procs", "2", "--pin", "strategy=pipeline")
    with started("train", *job, "--pin", "precision=fp16", "--steps", "4") as process:
        _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert [bool(line["skipped"]) for line in lines(run)] == [True, True, False, False]
    (kept,) = [event for event in events(run) if "fp32" in event["done"]]
    assert "blocks.2.last (Overflow) is the first whose forward is not finite" in kept["why"]


# --- several processes ---


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def started(*arguments: str | Path, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    program = [sys.executable, *launcher, "-m", "trimtab", *map(str, arguments)]
    return subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def test_two_processes_survive_a_drill_and_end_where_one_would(
    home: Path, calm: Path, tmp_path: Path
) -> None:
    drill = [
        {"kind": "out-of-memory", "step": 2, "rank": 1, "point": "backward"},
        {"kind": "not-a-number", "step": 3, "rank": 1},
        # Time enough for the checkpoint of step 4 to be written.
        {"kind": "slow", "step": 6, "rank": 0, "seconds": 2.0},
        {"kind": "kill", "step": 7, "rank": 1},
        {"kind": "out-of-memory", "step": 8, "rank": 0, "point": "optimizer"},
    ]
    (tmp_path / "faults.json").write_text(json.dumps(drill), encoding="utf-8")
    run = tmp_path / "run"
    with started(
        "train", f"{home}/job.py:Judged", "--out", run, "--procs", "2", "--checkpoint-every", "4", "--json",
        "--faults", tmp_path / "faults.json",
    ) as process:  # fmt: skip
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    rows = [json.loads(line) for line in out.splitlines()]
    # What happens to rank 1 is written a step later.
    kinds = [row["kind"] for row in sorted(rows[-1]["events"], key=lambda row: row["at_s"])]
    assert kinds[:4] == ["out-of-memory", "not-a-number", "lost-rank", "resume"]
    assert [row["step"] for row in rows if row.get("step", 0) > 4][-10:] == list(range(5, 15))
    assert losses(run) == pytest.approx(losses(calm), abs=1e-9)
    first = [index for line in lines(run)[:7] for index in line["indices"]]
    assert sorted(first) == list(range(50))


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_saves_and_goes_on_with_another_number_of_processes(
    home: Path, calm: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    slow = [{"kind": "slow", "step": step, "seconds": 0.5} for step in range(1, 15)]
    (tmp_path / "faults.json").write_text(json.dumps(slow), encoding="utf-8")
    with started(
        "train", f"{home}/job.py:Judged", "--out", run, "--procs", "2", "--pin", "strategy=fsdp",
        "--faults", tmp_path / "faults.json",
    ) as process:  # fmt: skip
        wait_for_step(process, run)
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 138, err
    stopped = lines(run)[-1]["step"]
    assert 1 <= stopped < 14
    assert "SIGUSR1 asked for the end" in events(run)[-1]["why"]
    assert events(run)[-1]["kind"] == "time-limit"
    assert f"asked to end by SIGUSR1 at step {stopped}," in command("doctor", run).out.replace("\n", " ")
    with started("train", f"{home}/job.py:Judged", "--out", run, "--procs", "2", "--json",
                 "--faults", tmp_path / "faults.json") as process:  # fmt: skip
        wait_for_step(process, run, stopped + 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    last = json.loads(out.splitlines()[-1])
    assert last["asked"] == "SIGINT"
    assert (events(run)[-1]["kind"], events(run)[-1]["why"]) == (
        "interrupt", "Ctrl-C (SIGINT) asked for the end"
    )  # fmt: skip
    assert "preemption" not in err + out
    # It has saved: no step of it is taken again.
    stopped = lines(run)[-1]["step"]
    assert f"checkpoint of step {stopped} kept" in events(run)[-1]["done"]
    done = command("train", f"{home}/job.py:Judged", "--out", run)
    assert done.code == 0, done.err
    assert [event["kind"] for event in events(run)[-2:]] == ["resize", "resume"]
    assert events(run)[-1]["done"] == f"the run goes on from step {stopped}"
    assert losses(run) == pytest.approx(losses(calm), abs=1e-9)


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int = 1) -> None:
    until = time.monotonic() + 240
    while not (run / "log.jsonl").exists() or len((run / "log.jsonl").read_bytes().splitlines()) < step:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
def test_ranks_that_torchrun_started_train_as_well(home: Path, calm: Path, tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    with started(
        "train", f"{home}/job.py:Judged", "--out", tmp_path / "run", "--steps", "3", launcher=torchrun
    ) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert [int(line[1]) for line in map(ITER.match, out.splitlines()) if line] == [1, 2, 3]
    assert losses(tmp_path / "run") == pytest.approx(losses(calm)[:3], abs=1e-9)


# --- what cannot be meant ---


@pytest.mark.parametrize(
    ("job", "options", "code", "found"),
    [
        ("NoData", (), 4, "it has no dataset()"),
        ("Vector", (), 4, "it returned a tensor of shape (8, 1)"),
        ("Raises", (), 4, "KeyError: 'answer'"),
        ("Unlike", (), 4, "KeyError: 'y'"),
        ("Unlike", (), 4, "batch has x, y from batch() and x, label from dataset()"),
        (
            "Unlike",
            ("--set", "how=kind"),
            4,
            "y: float64 (n, 1)} from batch() and [float64 (n, 8), float64 (n, 1)] from dataset()",
        ),
        (
            "Unlike",
            ("--set", "how=dtype"),
            4,
            "batch['x'] is float64 (n, 8) from batch() and float32 (n, 8) from dataset()",
        ),
        (
            "Unlike",
            ("--set", "how=shape"),
            4,
            "batch['x'] is float64 (n, 8) from batch() and float64 (n, 7) from dataset()",
        ),
        ("BadData", (), 4, "OSError: no such disk"),
        ("Stream", (), 4, "only its own order of samples"),
        ("Small", ("--set", "samples=5"), 2, "one optimizer step takes global_batch 8"),
        ("Small", ("--set", "global_batch=51"), 2, "one optimizer step takes global_batch 51"),
        ("Small", ("--steps", "0"), 2, "it is below 1"),
        ("Small", ("--procs", "0"), 2, "it is below 1"),
        ("Small", ("--seed", "-1"), 2, "it is below 0"),
        ("Small", ("--checkpoint-minutes", "-1"), 2, "--checkpoint-minutes -1 found: it is below 0"),
        ("Small", ("--timeout-min", "nan"), 2, "--timeout-min nan found: it is no finite number"),
        ("Small", ("--pin", "strategy=branch", "--procs", "2"), 2, "the job has no branches"),
        ("Small", ("--pin", "micro_batch=9"), 2, "a rank's share of the global batch 8 is 8"),
        ("Small", ("--pin", "colour=red"), 2, "nothing is called colour"),
        ("Small", ("--faults", "/no/such/file"), 2, "it cannot be read"),
        ("Small", ("--plan", "/no/such/file"), 2, "it cannot be read"),
        ("Small", ("--nodes", "2"), 2, "several nodes need a place to meet"),
        ("Nobody", (), 2, "has no Nobody"),
    ],
)
def test_what_cannot_be_trained_is_said_at_once_and_leaves_nothing(  # noqa: PLR0917 - a table
    home: Path, tmp_path: Path, job: str, options: tuple[str, ...], code: int, found: str
) -> None:
    out = tmp_path / "run"
    done = command("train", f"{home}/job.py:{job}", "--out", out, *options)
    assert done.code == code, done.err
    assert found in " ".join(done.err.split())
    assert not (out / "run.json").exists()
    with_json = command("train", f"{home}/job.py:{job}", "--out", out, *options, "--json")
    assert json.loads(with_json.out)["error"]["exit_code"] == code


def test_items_unlike_batch_are_named_when_a_step_fails_and_only_then(home: Path, tmp_path: Path) -> None:
    job = f"{home}/job.py"
    works = command("train", f"{job}:Unlike", "--out", tmp_path / "a", "--steps", "2", "--set", "how=extra")
    assert works.code == 0, works.err
    assert "not like" not in works.err
    fails = command("train", f"{job}:Raises", "--out", tmp_path / "b")
    assert "not like" not in fails.err
    unlike = command("train", f"{job}:Unlike", "--out", tmp_path / "c")
    assert "let the items of dataset() collate to what batch() makes" in " ".join(unlike.err.split())


def test_a_folder_that_is_a_file_or_another_runs_or_cannot_be_is_refused(
    home: Path, calm: Path, tmp_path: Path
) -> None:
    job = f"{home}/job.py:Judged"
    before = (calm / "log.jsonl").read_bytes()
    other = command("train", job, "--out", calm, "--seed", "1")
    assert other.code == 2
    assert "it is another run's: that one has seed 0, not 1" in " ".join(other.err.split())
    batch = command("train", job, "--out", calm, "--set", "global_batch=16")
    assert batch.code == 2
    assert "global_batch 8, not 16" in " ".join(batch.err.split())
    assert (calm / "log.jsonl").read_bytes() == before
    (tmp_path / "file").write_text("x", encoding="utf-8")
    assert command("train", job, "--out", tmp_path / "file").code == 2
    nowhere = command("train", job, "--out", "/proc/trimtab")
    assert nowhere.code == 5, nowhere.err
    assert "--out /proc/trimtab" in nowhere.err


def test_a_folder_that_a_namesake_left_without_a_checkpoint_is_refused_and_the_same_job_goes_on(
    home: Path, tmp_path: Path
) -> None:
    run, text = tmp_path / "run", (home / "job.py").read_text(encoding="utf-8")
    for name in ("mine", "theirs", "moved"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.py").write_text(text, encoding="utf-8")
    mine, theirs, moved = (tmp_path / name / "job.py" for name in ("mine", "theirs", "moved"))
    theirs.write_text(text.replace("16", "12"), encoding="utf-8")
    assert command("train", f"{mine}:Small", "--out", run, "--steps", "2").code == 0
    # As if it had been killed before.
    shutil.rmtree(run / "checkpoints")
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    done = command("train", f"{theirs}:Small", "--out", run, "--steps", "2")
    assert done.code == 2
    told = "".join(done.err.split())
    for part in (f"--out {run}", f"a run of {mine} was begun in it", f"asked for {theirs}", "another folder"):
        assert "".join(part.split()) in told
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    # Moved as it is, and then edited where it is now: still the same job.
    for edit in ("", "\nEDITED = True\n"):
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        moved.write_text(text + edit, encoding="utf-8")
        done = command("train", f"{moved}:Small", "--out", run, "--steps", "2")
        assert done.code == 0, done.err
    # With a checkpoint it is the weights that tell.
    done = command("train", f"{theirs}:Small", "--out", run, "--steps", "3")
    assert done.code == 2, done.err
    assert "there and [1, 12] here" in " ".join(done.err.split())


def test_a_plan_for_more_gpus_than_there_are_is_refused(home: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the plan is for a machine without a GPU to refuse")
    plan = Plan(
        job=f"{home}/job.py:Small",
        choice=Setting(strategy=Strategy.DDP, mesh=Mesh(dp_replicate=4), micro_batch=2, global_batch=8),
        estimate=Estimate(
            allocated_bytes=1,
            reserved_bytes=1,
            process_bytes=1,
            parts=Footprint(),
            band=Band(low_bytes=1, high_bytes=1),
        ),
        places=tuple(RankPlacement(node=0, node_name="a", device=index, name="H100") for index in range(4)),
    )
    (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    done = command("train", plan.job, "--plan", tmp_path / "plan.json", "--out", tmp_path / "run")
    assert done.code == 2
    assert "the plan needs 4 x H100, and there is no GPU" in " ".join(done.err.split())
    assert not (tmp_path / "run").exists()
    both = command("train", plan.job, "--plan", tmp_path / "plan.json", "--pin", "compile=false")
    assert both.code == 2
    assert "the plan has made its choices" in both.err


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "0"},
        {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"},
    ],
)
def test_half_set_ranks_are_an_error_at_once(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    done = command("train", f"{home}/job.py:Small", "--out", tmp_path / "run")
    assert done.code == 5, done.err
    assert time.monotonic() - began < 50


def test_a_rank_does_not_start_ranks(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    done = command("train", f"{home}/job.py:Small", "--procs", "2")
    assert done.code == 2
    assert "this process is rank 0 of 1 already" in " ".join(done.err.split())


def test_training_is_a_function_too(home: Path, tmp_path: Path) -> None:
    import trimtab

    ended = trimtab.train(f"{home}/job.py:Small", steps=2, out=tmp_path / "run")
    assert (ended.step, ended.exit_code) == (2, 0)
    assert ended.loss == losses(tmp_path / "run")[-1]
