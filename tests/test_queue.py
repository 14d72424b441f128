"""Jobs in Slurm's queue and runs in their folders, from recorded answers and real folders."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import EnvironmentFault, UnknownName, WrongUse
from trimtab.launching import jobs
from trimtab.launching.jobs import (
    SlurmClient,
    cancel_job,
    find_folders,
    is_alive,
    list_jobs,
    measure_progress,
    why_not_cancel,
)
from trimtab.spec import Attempt, QueuedJob

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWERS = Path(__file__).parent / "slurm_answers"


def answer(name: str) -> str:
    return (ANSWERS / f"{name}.txt").read_text(encoding="utf-8")


def by_id() -> dict[str, QueuedJob]:
    return {one.job_id: one for one in jobs.read_squeue(answer("squeue"))}


def test_every_job_of_a_recorded_queue_is_read() -> None:
    jobs = by_id()
    assert {job.name: (job.state, job.reason) for job in jobs.values()} == {
        "trimtab-slm-tiny": ("RUNNING", None),
        "trimtab-big": ("PENDING", "Resources"),
        "next": ("PENDING", "Priority"),
        "trimtab-held": ("PENDING", "JobHeldUser"),
        "line\nfeed | bar": ("PENDING", "BeginTime"),
        "after": ("PENDING", "Dependency"),
    }
    running = jobs["1"]
    assert running.nodes == ("n1", "n2")
    assert (running.ran_s, running.limit_s, running.num_nodes) == (6, 60, 2)
    assert running.work_dir == "/home/me"
    assert jobs["2"].nodes == ()
    assert jobs["5"].comment == "two\nlines; $(x)"


def test_ours_are_those_whose_comment_or_name_says_so_and_the_comment_names_the_folder() -> None:
    queued = by_id()
    assert {number for number, job in queued.items() if jobs.is_ours(job)} == {"1", "2", "4"}
    assert jobs.run_folder_of(queued["1"]) == "/home/me/runs/a b"
    assert jobs.run_folder_of(queued["5"]) is None
    assert jobs.run_folder_of(queued["1"].replace(comment="trimtab:runs/a")) is None


def test_scontrol_says_where_the_output_goes() -> None:
    job = jobs.read_scontrol(answer("scontrol-running"))
    assert job is not None
    assert job.output == "/home/me/logs/rec-1.log"
    assert job.comment == "trimtab:/home/me/runs/a b"
    assert (job.state, job.user, job.restarts, job.limit_s) == ("RUNNING", "root", 0, 60)
    failed = jobs.read_scontrol(answer("scontrol-failed"))
    assert failed is not None
    assert jobs.is_over(failed)
    assert jobs.explain_state(failed) == "its program failed"
    odd = jobs.read_scontrol(answer("scontrol-odd"))
    assert odd is not None
    assert odd.output == "/home/me/logs/rec-5.log"


def test_sacct_is_read_with_its_own_words() -> None:
    fields = {
        "JobIDRaw": "7",
        "State": "CANCELLED by 0",
        "NodeList": "None assigned",
        "ElapsedRaw": "3725",
        "JobName": "trimtab-a",
    }
    line = jobs.FIELD.join(fields.get(name, "") for name in jobs.SACCT_FIELDS.values())
    (job,) = jobs.read_sacct(line + "\n")
    assert (job.state, job.nodes, job.ran_s) == ("CANCELLED", (), 3725)
    assert jobs.explain_state(job) == "it was cancelled"


@pytest.mark.parametrize("text", ["", "\n", "garbage", "a\x1fb\x1e", "JobId=\n", "slurm_load_jobs error"])
def test_what_is_no_answer_gives_no_job(text: str) -> None:
    assert jobs.read_squeue(text) == ()
    assert jobs.read_sacct(text) == ()
    assert jobs.read_scontrol(text) is None


@settings(max_examples=60)
@given(text=st.text(max_size=60))
def test_no_text_makes_the_readers_fail(text: str) -> None:
    jobs.read_squeue(text + jobs.RECORD)
    jobs.read_sacct(text)
    jobs.read_scontrol(f"JobId=1 JobName={text}\n   JobState={text}\n   StdOut={text}")
    jobs.parse_slurm_time(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:06", 6),
        ("1:02:03", 3723),
        ("2-00:00:00", 172800),
        ("1-12", 129600),
        ("45", 45),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("-1", None),
        (None, None),
    ],
)
def test_slurms_times_are_seconds(text: str | None, expected: float | None) -> None:
    assert jobs.parse_slurm_time(text) == expected


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "it is next"),
        ("Priority", "higher priority"),
        ("JobHeldUser", "scontrol release 4"),
        ("QOSMaxGRESPerUser", "allows one user"),
        ("QOSGrpGRES", "all its jobs together"),
        ("AssocGrpCpuLimit", "your account uses as much"),
        ("ReqNodeNotAvail, UnavailableNodes:n2", "down, drained or reserved"),
        ("PartitionTimeLimit", "above that of the partition batch"),
        ("SomethingNew", "Slurm says SomethingNew"),
    ],
)
def test_a_pending_job_says_why_in_plain_words(reason: str, words: str) -> None:
    job = QueuedJob(job_id="4", state="PENDING", reason=reason, partition="batch")
    assert words in jobs.explain_state(job)


def test_a_requeued_job_says_until_when_it_is_held_back() -> None:
    assert jobs.explain_state(by_id()["5"]).startswith("until 2026-11-15 14:08:22 it may not start earlier")


def test_a_running_job_needs_no_reason() -> None:
    assert jobs.explain_state(by_id()["1"]) == ""


# runs in folders


def a_line(step: int, *, gpus: int = 4, time_s: float = 0.5) -> dict[str, object]:
    return {"step": step, "loss": 2.0 / step, "time_s": time_s, "samples": 16, "gpus": gpus}


def test_progress_counts_the_steps_on_the_devices_there_are_now() -> None:
    lines = [a_line(step, gpus=4, time_s=0.1) for step in range(1, 10)]
    lines += [a_line(step, gpus=2, time_s=0.5) for step in range(10, 13)]
    found = measure_progress("/r", "slm:tiny", Attempt(procs=2, steps=100), lines, None)
    assert (found.step, found.steps, found.samples_per_s) == (12, 100, 32)
    assert found.left_s == pytest.approx(44)
    assert found.recent == 3
    empty = measure_progress("/r", None, None, [], None)
    assert (empty.step, empty.steps, empty.samples_per_s, empty.left_s) == (0, None, None, None)


class Answers:
    """A Slurm that says what it was told to, and remembers what it was asked."""

    def __init__(self, **told: str) -> None:
        self.told = told
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, command: Sequence[str]) -> str:
        self.asked.append(tuple(command))
        name = command[0]
        if name == "squeue":
            wanted = next((text.partition("=")[2] for text in command if text.startswith("--jobs=")), None)
            records = self.told["squeue"].split(jobs.RECORD)
            if wanted is not None:
                records = [record for record in records if record.strip().split(jobs.FIELD)[0] == wanted]
                if not records:
                    raise EnvironmentFault("squeue", found="Invalid job id specified", cure="-")
            return jobs.RECORD.join(records)
        if name not in self.told:
            raise EnvironmentFault(name, found="Slurm accounting storage is disabled", cure="-")
        return self.told[name]


def at(answers: Answers, me: str = "root") -> SlurmClient:
    return SlurmClient(answers, lambda _: True, me)


def a_run(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"job": "slm:tiny", "global_batch": 16}', encoding="utf-8")
    note = Attempt(procs=4, steps=40, host=socket.gethostname(), pid=os.getpid()).replace(**changes)
    (folder / "attempt.json").write_text(note.to_json(), encoding="utf-8")
    lines = "".join(json.dumps(a_line(step)) + "\n" for step in range(1, 11))
    (folder / "log.jsonl").write_text(lines + '{"torn', encoding="utf-8")
    return folder


def test_jobs_of_ours_are_listed_with_their_runs_and_the_end_of_their_output(tmp_path: Path) -> None:
    run, log = a_run(tmp_path / "runs" / "a"), tmp_path / "out.log"
    log.write_text("one\n\ntwo\rthree\nfour\n", encoding="utf-8")
    told = Answers(
        squeue=answer("squeue").replace("/home/me/runs/a b", str(run)),
        scontrol=answer("scontrol-running").replace("/home/me/logs/rec-1.log", str(log)),
    )
    views, silent = list_jobs(at(told), [tmp_path / "runs"], lines=2)
    assert not silent
    assert [(view.id, view.state) for view in views] == [("2", "pending"), ("4", "pending"), ("1", "running")]
    mine = views[-1]
    assert mine.tail == ("three", "four")
    assert mine.run is not None
    assert (mine.run.step, mine.run.steps, mine.run.samples_per_s, mine.run.left_s) == (10, 40, 32, 15)
    assert views[0].run is None
    assert "waits until enough nodes" in views[0].why


def test_a_slurm_that_does_not_answer_hides_no_run_on_this_machine(tmp_path: Path) -> None:
    def broken(_: Sequence[str]) -> str:
        raise EnvironmentFault("squeue --format=...", found="Unable to contact slurm controller", cure="-")

    run = a_run(tmp_path / "a")
    with held(run):
        views, silent = list_jobs(SlurmClient(broken, lambda _: True, "root"), [tmp_path])
    assert [view.kind for view in views] == ["local"]
    assert str(silent[0]).startswith("Slurm's queue: Unable to contact")


class held:  # noqa: N801 - reads as a word
    """Another process holds the folder, as a run does."""

    def __init__(self, folder: Path, *, for_s: float = 30) -> None:
        code = (
            "import fcntl, os, sys, time\n"
            "handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
            "fcntl.lockf(handle, fcntl.LOCK_EX)\n"
            "print('held', flush=True)\n"
            "time.sleep(float(sys.argv[2]))\n"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(folder / "run.lock"), str(for_s)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_local_run_is_alive_while_its_first_rank_holds_the_folder(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a")
    attempt = Attempt.from_json((run / "attempt.json").read_bytes())
    assert not is_alive(run, attempt)
    with held(run) as holder:
        assert is_alive(run, attempt)
        assert not is_alive(run, attempt.replace(host="elsewhere"))
        assert not is_alive(run, attempt.replace(state="ended"))
        # Looking at it does not take it away.
        with (run / "run.lock").open("rb+") as file, pytest.raises(OSError, match="temporarily unavailable"):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        told = Answers(squeue="")
        (run / "attempt.json").write_text(attempt.replace(pid=holder.pid).to_json(), encoding="utf-8")
        assert [list_job.id for list_job in list_jobs(at(told), [tmp_path])[0]] == [f"local-{holder.pid}"]
        assert cancel_job(f"local-{holder.pid}", at(told), places=[tmp_path]).kind == "local"
        assert holder.wait(timeout=240) == -signal.SIGTERM
    assert list_jobs(at(told), [tmp_path])[0] == []
    with pytest.raises(WrongUse, match="nothing trains into"):
        cancel_job(str(run), at(told))


def test_a_job_that_has_ended_is_known_by_its_runs_folder(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", job_id="7", state="ended")
    line = jobs.FIELD.join(
        {"JobIDRaw": "7", "State": "TIMEOUT", "User": "root"}.get(name, "")
        for name in jobs.SACCT_FIELDS.values()
    )
    (view,) = list_jobs(at(Answers(squeue="", sacct=line)), [tmp_path])[0]
    assert (view.id, view.state, view.why) == ("7", "timeout", "it reached its time limit")
    assert view.run is not None
    assert view.run.folder == str(run)
    # A cluster that keeps no accounts has forgotten it.
    assert list_jobs(at(Answers(squeue="")), [tmp_path])[0] == []


def test_jobs_are_looked_for_where_runs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_folders([]) == []
    a_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "notes").mkdir()
    assert find_folders([]) == [tmp_path / "runs" / "a"]
    assert find_folders([tmp_path / "runs" / "a"]) == [tmp_path / "runs" / "a"]
    with pytest.raises(WrongUse, match="there is no such folder"):
        find_folders([tmp_path / "nowhere"])


# cancelling


def test_a_job_of_ours_is_cancelled() -> None:
    told = Answers(squeue=answer("squeue"), scontrol=answer("scontrol-running"), scancel="")
    assert cancel_job("1", at(told)).state == "running"
    assert told.asked[-1] == ("scancel", "1")


@pytest.mark.parametrize(
    ("job_id", "me", "error", "words"),
    [
        ("99", "root", UnknownName, "Slurm knows no such job; yours are 2, 4, 1"),
        ("3", "root", WrongUse, "trimtab did not submit it: its name is 'next'"),
        ("1", "me", WrongUse, "it is root's, and you are me"),
        ("abc", "root", WrongUse, "neither a number"),
        ("1; rm -rf /", "root", WrongUse, "neither a number"),
        ("\u00b2", "root", WrongUse, "neither a number"),
        ("", "root", WrongUse, "neither a number"),
        ("--me", "root", WrongUse, "neither a number"),
        ("local-4194305", "root", UnknownName, "no run on this machine"),
    ],
)
def test_what_is_not_ours_is_not_cancelled(job_id: str, me: str, error: type[Exception], words: str) -> None:
    told = Answers(squeue=answer("squeue"), scontrol=answer("scontrol-running"), scancel="")
    with pytest.raises(error, match=words):
        cancel_job(job_id, at(told, me))
    assert not [one for one in told.asked if one[0] == "scancel"]


def test_force_cancels_what_is_not_ours() -> None:
    told = Answers(squeue=answer("squeue"), scontrol=answer("scontrol-running"), scancel="")
    cancel_job("3", at(told), force=True)
    assert told.asked[-1] == ("scancel", "3")


def test_a_job_that_has_ended_is_not_cancelled_again() -> None:
    told = Answers(squeue=answer("squeue").replace("RUNNING", "COMPLETED"), scancel="")
    with pytest.raises(WrongUse, match="it has ended already: it ran to its end"):
        cancel_job("1", at(told), force=True)


def test_without_slurm_there_are_no_jobs_and_nothing_to_cancel() -> None:
    none = SlurmClient(Answers(), lambda _: False, "root")
    assert list_jobs(none) == ([], [])
    with pytest.raises(EnvironmentFault, match="there is no Slurm on this machine"):
        cancel_job("1", none)


def test_a_name_of_another_user_does_not_make_a_job_ours() -> None:
    job = QueuedJob(job_id="1", state="RUNNING", user="other", name="trimtab-x UserId=me(1)")
    assert why_not_cancel(job, "me") == "it is other's, and you are me"
