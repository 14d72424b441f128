"""The parts of `trimtab train` that need no training: lines, signals, drills, notes, other sizes."""

from __future__ import annotations

import doctest
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.api import cluster
from trimtab.errors import EnvironmentFault, JobFailed, WrongUse
from trimtab.spec import (
    Band,
    Estimate,
    Footprint,
    Incident,
    IncidentKind,
    Mesh,
    Plan,
    Setting,
    Strategy,
    Workload,
)
from trimtab.training import evaluation, loading, loop, signals, step_log, task, torchrun, worker
from trimtab.training import loop as loop_module
from trimtab.training import rank_messages as control_module
from trimtab.training import task as task_module
from trimtab.training.events import EventLog
from trimtab.training.fault_injection import Fault, FaultInjector, FaultKind, read_faults, tear_checkpoint
from trimtab.training.process_group import World
from trimtab.training.rank_messages import RankFiles
from trimtab.training.rank_messages import find_rank_files as notes_given
from trimtab.training.run_folder import RunFolder, RunIdentity
from trimtab.training.step_log import StepLine, StepLog, compute_mfu
from trimtab.training.task import RunEnding, TrainTask

if TYPE_CHECKING:
    from pathlib import Path

WORKLOAD = Workload(name="w", global_batch=16, samples=100)


def line(step: int = 1, **changes: object) -> StepLine:
    fields = {"epoch": 0, "loss": 2.5, "time_s": 0.1, "samples": 4, "samples_per_s": 40.0} | changes
    return StepLine(step=step, **fields)  # type: ignore[arg-type]


# --- lines ---


def test_a_line_can_be_grepped_whatever_is_known() -> None:
    assert line(7).text.startswith("iter 7: loss 2.5000, time 100.00ms, mfu -%, 40 samples/s")
    full = line(
        7, mfu=0.4512, tokens_per_s=572_345.0, allocated_bytes=2**30, reserved_bytes=2**31, data_wait_s=0.002
    )
    assert full.text == (
        "iter 7: loss 2.5000, time 100.00ms, mfu 45.12%, 40 samples/s, 572,345 tokens/s, "
        "allocated 1.0 GiB, reserved 2.0 GiB, data wait 2.0ms"
    )
    assert "skipped: the gradient is nan" in line(7, loss=None, skipped="the gradient is nan").text


def test_a_live_line_is_cut_to_the_terminal_at_a_comma() -> None:
    full = line(7, mfu=0.4512, tokens_per_s=572_345.0, allocated_bytes=2**30)
    assert full.fit_to_width(60) == "iter 7: loss 2.5000, time 100.00ms, mfu 45.12%, 40 samples/s"
    assert full.fit_to_width(500) == full.text


def test_lines_are_printed_every_so_many_steps_and_the_last_always() -> None:
    stream = io.StringIO()
    shown = StepLog(every=10, steps=25, stream=stream)
    for step in range(1, 24):
        shown.show_step(line(step))
    shown.close()
    assert [line.split(":")[0] for line in stream.getvalue().splitlines()] == [
        "iter 10",
        "iter 20",
        "iter 23",
    ]


def test_json_lines_have_what_the_contract_names(capsys: pytest.CaptureFixture[str]) -> None:
    shown = StepLog(every=1, steps=2, as_json=True)
    shown.show_step(line(1))
    shown.show_event(Incident(kind=IncidentKind.RESIZE, at_s=1.0, step=1, why="a", done="b"))
    shown.show_step(line(2, mfu=0.5))
    shown.close()
    told = capsys.readouterr()
    rows = [json.loads(line) for line in told.out.splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert {"step", "loss", "samples_per_s", "mfu", "allocated_bytes", "reserved_bytes"} <= set(rows[0])
    assert "resize at step 1: a; b" in told.err


def test_mfu_follows_from_the_plans_by_time_devices_and_samples() -> None:
    known = Estimate(
        allocated_bytes=1,
        reserved_bytes=1,
        process_bytes=1,
        parts=Footprint(),
        band=Band(low_bytes=1, high_bytes=1),
        mfu=0.4,
        step_s=2.0,
    )
    assert compute_mfu(known, 4, 4, 1.0, 2.0) == pytest.approx(0.4)
    assert compute_mfu(known, 4, 2, 0.5, 2.0) == pytest.approx(0.4)
    assert compute_mfu(known, 4, 4, 1.0, 1.0) == pytest.approx(0.8)
    assert compute_mfu(known.replace(mfu=None), 4, 4, 1.0, 1.0) is None
    assert compute_mfu(None, 1, 1, 1.0, 1.0) is None


# --- signals ---


@given(
    st.lists(st.sampled_from([None, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]), max_size=900),
    st.booleans(),
)
def test_requests_of_many_ranks_are_read_back_from_their_sum(
    heard: list[signal.Signals | None], due: bool
) -> None:
    requests = [signals.StopRequest(one, news=number == 3) for number, one in enumerate(heard)]
    requests.append(signals.StopRequest(checkpoint=due))
    total = torch.tensor([signals.pack_request(request) for request in requests], dtype=torch.float64).sum()
    together = signals.unpack_requests(float(total))
    assert together.checkpoint is due
    assert together.news is (len(heard) > 3)
    assert (together.asked is None) == all(signals is None for signals in heard)
    if together.asked is signal.SIGUSR1:
        assert not {signal.SIGTERM, signal.SIGINT} & set(heard)


def test_a_signal_is_noted_and_what_was_there_before_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals.Signals() as listening:
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: listening.asked is signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: listening.asked is signal.SIGTERM)
        # An echo, from a scheduler and torchrun each.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    assert signal.getsignal(signal.SIGTERM) is before


def wait_for(what: object, seconds: float = 5.0) -> None:
    until = time.monotonic() + seconds
    assert callable(what)
    while not what():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.01)


BLOCKED = """
import sys, threading, time
from trimtab.training.signals import Signals
import trimtab.training.signals as module
module.ECHO_S = 0.2
with Signals(silence_s={silence}) as signals:
    print("ready", flush=True)
    # As a collective does: a wait that no Python code can end.
    lock = threading.Lock(); lock.acquire(); lock.acquire()
"""


@pytest.mark.parametrize("silence_s", [0.5, 60.0])
def test_a_process_whose_collective_hangs_ends_by_itself_or_at_the_second_request(silence_s: float) -> None:
    code = BLOCKED.format(silence=silence_s)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        if silence_s > 1:
            time.sleep(0.5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143


# --- drills ---


def test_a_fault_strikes_once_at_its_rank_and_place_also_after_a_restart(tmp_path: Path) -> None:
    schedule = [Fault(kind=FaultKind.OUT_OF_MEMORY, step=3, rank=1, point="backward")]
    faults = FaultInjector(schedule, tmp_path)
    for place, step, rank in (("backward", 2, 1), ("forward", 3, 1), ("backward", 3, 0)):
        assert faults.at(place, step, rank) is None
    with pytest.raises(torch.OutOfMemoryError, match="drill"):
        faults.at("backward", 3, 1)
    assert faults.at("backward", 3, 1) is None
    assert FaultInjector(schedule, tmp_path).at("backward", 4, 1) is None


def test_every_kind_of_fault_does_what_it_says(tmp_path: Path) -> None:
    schedule = [
        Fault(kind=FaultKind.NOT_A_NUMBER, step=1),
        Fault(kind=FaultKind.TORN_CHECKPOINT, step=1),
        Fault(kind=FaultKind.FULL_DISK, step=1),
        Fault(kind=FaultKind.SLOW, step=1, seconds=0.05),
        Fault(kind=FaultKind.TERMINATE, step=2),
    ]
    faults = FaultInjector(schedule, tmp_path)
    assert faults.at("gradient", 1, 0) == "nan"
    assert faults.at("checkpoint", 1, 0) == "tear"
    with pytest.raises(OSError, match="drill") as caught:
        faults.at("write", 1, 0)
    assert caught.value.errno == errno.ENOSPC
    began = time.monotonic()
    assert faults.at("forward", 1, 0) is None
    assert time.monotonic() - began >= 0.05
    with signals.Signals() as listening:
        faults.at("forward", 2, 0)
        wait_for(lambda: listening.asked is signal.SIGTERM)


def test_the_largest_file_of_the_newest_checkpoint_is_torn(tmp_path: Path) -> None:
    assert tear_checkpoint(tmp_path) is None
    for number, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "small").write_bytes(b"x" * 10)
        (tmp_path / name / "large").write_bytes(b"x" * 100)
        os.utime(tmp_path / name, ns=(number, number))
    assert tear_checkpoint(tmp_path) == tmp_path / "new" / "large"
    assert (tmp_path / "new" / "large").stat().st_size == 50
    assert (tmp_path / "old" / "large").stat().st_size == 100


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("nonsense", "it is no schedule"),
        ('[{"kind": "meteor", "step": 1}]', "it is no schedule"),
        ('[{"kind": "kill", "step": -1}]', "must be at least 0"),
        ('[{"kind": "kill", "step": 1, "point": "write"}]', "kill strikes at"),
        ('{"kind": "kill"}', "it is no schedule"),
    ],
)
def test_a_schedule_that_cannot_be_read_is_refused(tmp_path: Path, text: str, found: str) -> None:
    file = tmp_path / "faults.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(WrongUse, match=found):
        read_faults(file)
    with pytest.raises(WrongUse, match="cannot be read"):
        read_faults(tmp_path / "none.json")


# --- notes between processes, and the command line of torchrun ---


def test_notes_travel_between_processes(tmp_path: Path) -> None:
    notes = RankFiles(tmp_path)
    assert not notes.is_over()
    assert notes.read_error() is None
    assert notes.stop_signal() is None
    notes.write_error(JobFailed("loss()", found="a", cure="b"))
    notes.write_error(WrongUse("late", found="c", cure="d"))
    error = notes.read_error()
    assert isinstance(error, JobFailed)
    assert (error.given, error.exit_code) == ("loss()", 4)
    assert notes.is_over()
    other = RankFiles(tmp_path / "other")
    other.folder.mkdir()
    other.request_stop(signal.SIGUSR1)
    assert other.is_over()
    assert other.stop_signal() is signal.SIGUSR1


def test_the_same_crash_at_the_same_step_is_a_bug_and_others_are_not(tmp_path: Path) -> None:
    notes = RankFiles(tmp_path)
    assert [notes.add_crash("boom", step) for step in (1, 1, 2, 1)] == [False, False, False, True]
    assert notes.last_crash() == "boom"


def test_a_rank_that_starts_after_the_end_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(control_module.FOLDER_VARIABLE, str(tmp_path))
    RankFiles(tmp_path).request_stop(signal.SIGTERM)
    assert worker.main(["/no/such/task"]) == 0


def test_torchrun_is_told_what_to_start(tmp_path: Path) -> None:
    alone = torchrun.build_arguments(
        torchrun.TorchrunOptions(procs=2, restarts=3), tmp_path / "task.json", "id"
    )
    assert alone[:2] == ["--standalone", "--nnodes=1"]
    assert alone[2:4] == ["--nproc-per-node=2", "--max-restarts=3"]
    assert alone[4:] == [
        "--monitor-interval=0.5",
        "-m",
        "trimtab.training.worker",
        str(tmp_path / "task.json"),
    ]
    logged = torchrun.build_arguments(torchrun.TorchrunOptions(procs=3, logs="runs/a/logs"), tmp_path, "id")
    # The first rank of a node prints on the terminal.
    assert logged[5:7] == ["--log-dir=runs/a/logs", "--redirects=1:3,2:3"]
    several = torchrun.build_arguments(
        torchrun.TorchrunOptions(procs=8, nodes="1:4", rendezvous="head:1"), tmp_path, "id"
    )
    assert several[:4] == ["--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=head:1", "--rdzv-id=id"]
    placed = torchrun.TorchrunOptions(procs=8, nodes="2", rendezvous="head:1", address="10.0.0.2")
    assert "--local-addr=10.0.0.2" in torchrun.build_arguments(placed, tmp_path, "id")
    for hosts, said in (
        (None, []),
        (True, ["--rdzv-conf=is_host=true"]),
        (False, ["--rdzv-conf=is_host=false"]),
    ):
        words = torchrun.build_arguments(placed.replace(hosts=hosts), tmp_path, "id")
        assert [word for word in words if "is_host" in word] == said


def test_on_slurm_they_meet_on_the_first_node_whoever_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = torchrun.TorchrunOptions(procs=1, nodes="2", rendezvous="127.0.0.1:29677")
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert torchrun.locate_node(fleet)[0].hosts is False
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert torchrun.locate_node(fleet)[0].hosts is not False


def test_ranks_get_their_share_of_cores_and_no_other_launchers_variables(tmp_path: Path) -> None:
    env = torchrun.build_environment(
        {"RANK": "3", "PATH": "p"}, torchrun.TorchrunOptions(procs=4), RankFiles(tmp_path), cores=10
    )
    assert "RANK" not in env
    assert (env["PATH"], env["OMP_NUM_THREADS"], env[control_module.FOLDER_VARIABLE]) == (
        "p",
        "2",
        str(tmp_path),
    )
    assert (
        torchrun.build_environment(
            {"OMP_NUM_THREADS": "7"}, torchrun.TorchrunOptions(procs=4), RankFiles(tmp_path), 1
        )["OMP_NUM_THREADS"]
        == "7"
    )


@pytest.mark.parametrize("text", ["0", "4:2", "x", "1:", ":2", "1:2:3", "-1"])
def test_nodes_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(WrongUse, match="neither a number of nodes"):
        torchrun.check_nodes(text, "a:1")


def test_several_nodes_need_a_place_to_meet() -> None:
    assert torchrun.check_nodes("1", None) == ("1", "")
    with pytest.raises(WrongUse, match="a place to meet"):
        torchrun.check_nodes("1:4", None)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[../pair.cc:553] Connection closed by peer [127.0.0.1]:4711", True),
        ("NCCL communicator was aborted on rank 1", True),
        ("shapes do not match", False),
    ],
)
def test_a_lost_peer_is_told_from_a_bug(text: str, lost: bool) -> None:
    assert control_module.is_lost_peer(RuntimeError(text)) is lost


def test_the_end_of_a_run_is_an_exit_code() -> None:
    assert RunEnding(step=1, out="x").exit_code == 0
    assert [
        RunEnding(step=1, out="x", asked=name).exit_code for name in ("SIGTERM", "SIGUSR1", "SIGINT")
    ] == [
        143,
        138,
        130,
    ]


# --- another number of processes ---


@given(
    st.integers(1, 512),
    st.integers(1, 64),
    st.integers(1, 16),
    st.integers(1, 24),
    st.sampled_from([Strategy.DDP, Strategy.FSDP, Strategy.HSDP, Strategy.BRANCH, Strategy.HYBRID]),
)
def test_the_global_batch_is_the_same_on_any_number_of_processes(
    batch: int, micro: int, before: int, after: int, strategy: Strategy
) -> None:
    mesh = Mesh(dp_replicate=before)
    micro = min(micro, -(-batch // before))
    share = -(-batch // before)
    rounds = -(-share // micro)
    first = Setting(
        strategy=Strategy.SINGLE if before == 1 else strategy,
        mesh=mesh,
        micro_batch=micro,
        accumulation=rounds,
        global_batch=batch,
    )
    found, words = task_module.divide_setting(
        first, after, nodes=2 if after % 2 == 0 and after > 2 else 1, branches=2
    )
    assert found.global_batch == batch
    assert found.gpus == after
    assert found.micro_batch <= first.micro_batch
    assert f"-> {after} processes" in words


def test_a_strategy_gives_way_to_its_kin_where_the_number_does_not_allow_it() -> None:
    branch = Setting(
        strategy=Strategy.HYBRID,
        mesh=Mesh(branch=2, dp_replicate=2),
        micro_batch=4,
        accumulation=2,
        global_batch=16,
    )
    assert [task_module.divide_setting(branch, many, branches=2)[0].strategy for many in (1, 2, 3, 4)] == [
        Strategy.SINGLE,
        Strategy.BRANCH,
        Strategy.HYBRID,
        Strategy.HYBRID,
    ]


def test_a_pipeline_keeps_its_stages_where_it_can() -> None:
    piped = Setting(
        strategy=Strategy.PIPELINE, mesh=Mesh(pp=2), micro_batch=4, accumulation=4, global_batch=16
    )
    found = [task_module.divide_setting(piped, many)[0] for many in (1, 2, 3, 4)]
    assert [one.strategy for one in found] == ["single", "pipeline", "fsdp", "pipeline"]
    assert found[3].mesh == Mesh(pp=2, dp_replicate=2)
    four = piped.replace(mesh=Mesh(pp=4))
    assert task_module.divide_setting(four, 3)[0].mesh == Mesh(pp=3)
    begun = task_module.build_cpu_setting(WORKLOAD, 2, {"strategy": "pipeline"})
    assert (begun.mesh, begun.micro_batch, begun.accumulation) == (Mesh(pp=2), 4, 4)


def test_a_machine_without_a_gpu_gets_a_plain_plan() -> None:
    plan = task_module.build_cpu_plan("slm:tiny", WORKLOAD, 3, {}, {})
    assert (plan.choice.strategy, plan.choice.micro_batch, plan.choice.accumulation) == (Strategy.DDP, 6, 1)
    assert "not predicted" in plan.estimate.assumptions[0]
    assert Plan.from_json(plan.to_json()) == plan
    pinned = task_module.build_cpu_setting(WORKLOAD, 2, {"micro_batch": 3, "precision": "bf16", "workers": 1})
    assert (pinned.micro_batch, pinned.accumulation, pinned.precision, pinned.workers) == (3, 3, "bf16", 1)
    assert task_module.build_cpu_setting(WORKLOAD, 2, {"accumulation": 4}).micro_batch == 2


@pytest.mark.parametrize(
    ("procs", "pins", "found"),
    [
        (2, {"strategy": "branch"}, "the job has no branches"),
        (4, {"pp": 2, "dp_shard": 3}, r"they make 6 ranks, and there are 4 processes.*Use dp_shard=2"),
        (4, {"pp": 3}, r"it makes 3 ranks, which do not divide 4 processes.*Use pp=2 or 4"),
        (4, {"pp": 2, "ep": 3}, r"experts share the 2 ranks of dp_shard x cp x tp, which 3 does not divide"),
        (1, {"strategy": "ddp"}, "needs several processes"),
        (2, {"micro_batch": 9}, "share of the global batch 16 is 8"),
        (2, {"accumulation": 7}, "cannot be cut"),
        (2, {"gpus": 3}, "there are 2 processes"),
        (17, {"strategy": "ddp"}, "17 data-parallel processes for a global batch of 16"),
    ],
)
def test_pins_that_cannot_be_are_refused_without_a_gpu_too(
    procs: int, pins: dict[str, object], found: str
) -> None:
    with pytest.raises(WrongUse, match=found):
        task_module.build_cpu_setting(WORKLOAD, procs, pins)


def test_a_task_survives_json() -> None:
    train_task = TrainTask(
        job="slm:tiny",
        plan=task_module.build_cpu_plan("slm:tiny", WORKLOAD, 1, {}, {}),
        out="x",
        steps=3,
        faults_due=(Fault(kind=FaultKind.KILL, step=1),),
    )
    assert TrainTask.from_json(train_task.to_json()) == train_task


@pytest.mark.parametrize(
    "module", [loop_module, evaluation, loading, step_log, signals, torchrun, task, worker]
)
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_an_unhelpful_end_is_an_error_of_the_environment(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="a rank ended without a word; 3 restarts did not help"):
        torchrun._judge_end(1, RankFiles(tmp_path), torchrun.TorchrunOptions(procs=2, restarts=3))  # noqa: SLF001


# --- settling, and writing down ---


def test_a_plan_for_other_processes_is_divided_and_said_so() -> None:
    plan = task_module.build_cpu_plan("slm:tiny", WORKLOAD, 4, {"micro_batch": 2}, {})
    asked = TrainTask(job="slm:tiny", plan=plan, out="x")
    found, words = task_module.agree_on_plan(asked, object(), World())
    assert (found.choice.gpus, found.choice.global_batch, found.choice.micro_batch) == (1, 16, 2)
    assert "4 -> 1 processes, ddp -> single, micro-batch 2 x 2 -> 2 x 8" in words
    assert "times are scaled" in found.estimate.assumptions[-1]
    same, nothing = task_module.agree_on_plan(asked.replace(plan=found), object(), World())
    assert (same, nothing) == (found, "")
    with pytest.raises(WrongUse, match="rank 0 was given no plan"):
        task_module.agree_on_plan(asked.replace(plan=None), object(), World())


def opened(place: Path, size: int = 1) -> tuple[EventLog, io.StringIO]:
    identity = RunIdentity(job="a", global_batch=16)
    folder = RunFolder.open(
        place, identity=identity, plan=task_module.build_cpu_plan("a", WORKLOAD, 1, {}, {})
    )
    stream = io.StringIO()
    world = World(size=size, address="a", port=1) if size > 1 else World()
    return EventLog(world, folder, StepLog(every=1, steps=1, stream=stream)), stream


def kinds(scribe: EventLog) -> list[str]:
    return [event.kind.value for event in scribe.folder.read_events()]


def test_an_attempt_says_how_the_one_before_it_ended(tmp_path: Path) -> None:
    first, _ = opened(tmp_path)
    first.begin_attempt()
    assert first.folder.events_file.exists()
    first.folder.log_step({"step": 7, "loss": 1.0})
    first.folder.close()
    second, _ = opened(tmp_path)
    second.begin_attempt()
    assert kinds(second) == ["lost-rank"]
    assert second.folder.read_events()[0].step == 7
    second.end_attempt()
    second.folder.close()
    third, _ = opened(tmp_path, size=3)
    third.begin_attempt()
    assert kinds(third) == ["lost-rank", "resize"]
    third.end_attempt(RuntimeError("what was that"))
    assert kinds(third)[-1] == "bug"
    third.folder.close()
    fourth, _ = opened(tmp_path, size=3)
    fourth.begin_attempt()
    assert len(kinds(fourth)) == 3
    fourth.end_attempt(RuntimeError("Connection closed by peer"))
    fourth.folder.close()
    fifth, _ = opened(tmp_path, size=3)
    fifth.begin_attempt()
    assert kinds(fifth)[-1] == "lost-rank"


def test_a_run_that_never_took_a_step_leaves_its_folder_to_others(tmp_path: Path) -> None:
    scribe, _ = opened(tmp_path)
    scribe.begin_attempt()
    scribe.end_attempt(JobFailed("loss()", found="a", cure="b"))
    scribe.folder.close()
    assert not (tmp_path / "run.json").exists()
    again, _ = opened(tmp_path)
    again.begin_attempt()
    again.folder.log_step({"step": 1, "loss": 1.0})
    again.end_attempt(JobFailed("loss()", found="a", cure="b"))
    assert (tmp_path / "run.json").exists()


def test_steps_of_the_engine_are_counted_as_people_do(tmp_path: Path) -> None:
    scribe, _ = opened(tmp_path)
    scribe.record_local(
        Incident(kind=IncidentKind.OUT_OF_MEMORY, at_s=1.0, step=0, rank=0, why="a", done="b")
    )
    assert scribe.folder.read_events()[0].step == 1


def test_a_reader_that_goes_away_does_not_end_a_training() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:  # noqa: ARG002 - as a stream has it
            raise BrokenPipeError

    shown = StepLog(every=1, steps=5, stream=Gone())
    for step in range(1, 6):
        shown.show_step(line(step))
    shown.close()


def test_errors_of_a_job_are_told_from_ours(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text("def loss():\n    return {}['answer']\n", encoding="utf-8")
    theirs: dict[str, Any] = {}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), theirs)  # noqa: S102 - a job's code
    with pytest.raises(KeyError) as caught:
        theirs["loss"]()
    assert loop.is_job_error(caught.value)
    error = KeyError("ours")
    assert not loop.is_job_error(error)


def test_evaluation_makes_as_many_passes_on_every_rank() -> None:
    assert evaluation.count_passes(10, 3, 2) == 2
    assert evaluation.count_passes(1, 4, 2) == 1
    with pytest.raises(JobFailed, match="is empty, or has no __len__"):
        evaluation.build_validation_set(type("Job", (), {"validation": lambda _: []})())
    assert evaluation.build_validation_set(object()) is None


def test_ranks_do_not_take_the_notes_of_an_earlier_attempt_for_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RankFiles(tmp_path).request_stop(signal.SIGUSR1)
    later = (tmp_path / "stopping").stat().st_mtime_ns + 1
    for name, value in RankFiles(tmp_path, since_ns=later, own="a-1").variables().items():
        monkeypatch.setenv(name, value)
    heard = notes_given()
    assert heard is not None
    assert heard.since_ns == later
    assert not heard.is_over()
    heard.write_error(JobFailed("loss()", found="sour", cure="Fix it."))
    error = heard.read_error()
    assert error is not None
    assert error.found.startswith("sour")


@pytest.mark.slow
def test_a_run_on_other_nodes_is_planned_again_with_the_batch_of_its_plan() -> None:
    one = cluster("2xH100")
    there = task_module.repeat_node(one, 2)
    before = task_module.build_cpu_plan(
        "slm:tiny", WORKLOAD.replace(global_batch=24), 1, {"precision": "bf16"}, {}
    )
    asked = TrainTask(job="slm:tiny", plan=before, out="x")
    found = task_module.replan_in_child(asked, before, 4, there)
    assert found is not None
    assert (found.choice.gpus, found.choice.global_batch, found.choice.precision) == (4, 24, "bf16")
    assert {place.node for place in found.places} == {0, 1}
    # What cannot be planned is divided instead, and nothing is raised.
    assert task_module.replan_in_child(asked, before, 64, there) is None


def test_batches_are_set_side_by_side_in_words() -> None:
    made = {"x": (torch.zeros(2, 3), torch.zeros(2)), "names": ["a", "b"], "meta": {"k": 1}}
    same = {"x": [torch.zeros(5, 3), torch.zeros(5)], "names": ("c",), "meta": {"k": 7}}
    assert loading.compare_batches(made, same) == []
    other = {"x": [torch.zeros(5, 3, 1), torch.zeros(())], "names": torch.zeros(5), "meta": {}}
    assert loading.compare_batches(made, other) == [
        "batch['x'][0] is float32 (n, 3) from batch() and float32 (n, 3, 1) from dataset()",
        "batch['x'][1] is float32 (n) from batch() and float32 () from dataset()",
        "batch['names'] is [str, str] from batch() and float32 (n) from dataset()",
        "batch['meta'] has k from batch() and nothing from dataset()",
    ]
    assert loading.compare_batches([torch.zeros(1)], [torch.zeros(1)] * 2) == [
        "batch is [float32 (n)] from batch() and [float32 (n), float32 (n)] from dataset()"
    ]
    assert loading.compare_batches(torch.zeros(1), None) == [
        "batch is float32 (n) from batch() and NoneType from dataset()"
    ]
    assert "and 2 more" in loading.describe_batch([torch.zeros(1)] * 10)
