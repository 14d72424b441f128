"""The worker process that traces, asked for real."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from trimtab.catalog.clusters import parse_cluster
from trimtab.errors import JobFailed, UnknownName
from trimtab.spec import Setting
from trimtab.trace import server
from trimtab.trace.job_summary import NamedJob
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess, timeout_error

if TYPE_CHECKING:
    from pathlib import Path

LONG_S = 300.0


def asked(*micro_batches: int, clip: float | None = None, job: str = "slm:tiny") -> TraceRequests:
    settings = tuple(
        Setting(micro_batch=micro_batch, global_batch=micro_batch) for micro_batch in micro_batches
    )
    return TraceRequests(job=job, settings=settings, device=parse_cluster("H100").devices[0], clip=clip)


def test_a_job_that_is_slow_to_read_is_not_said_to_take_slow_steps() -> None:
    error = timeout_error("job job.py:Job", 120.0, only_reads=True)
    assert "dataset()" in error.found
    assert "steps" not in str(error)


def totals(worker: WorkerProcess, requests: TraceRequests) -> list[int]:
    answers = worker.ask_all(requests, timeout_s=LONG_S)
    whole = [answer for answer in answers if isinstance(answer, dict)]
    assert len(whole) == len(requests.settings), answers
    return [sum(one["trace"]["sizes"]) for one in whole]


def test_prefetched_answers_are_used_and_anything_else_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []
    send = WorkerProcess._send  # noqa: SLF001 - to see what is sent

    def noting(self: WorkerProcess, requests: TraceRequests) -> None:
        sent.extend(setting.micro_batch for setting in requests.settings)
        send(self, requests)

    monkeypatch.setattr(WorkerProcess, "_send", noting)
    with WorkerProcess() as worker:
        worker.load_job(asked())
        worker.prefetch(asked(2, 4))
        first = totals(worker, asked(3, 2))
        assert sent == [2, 4, 3]
        assert first[0] > first[1], "each answer belongs to its setting"
        both = totals(worker, asked(4, 4))
        assert sent == [2, 4, 3], "it was there"
        assert both[0] == both[1] > first[0]
        assert totals(worker, asked(2)) == first[1:]
        assert sent == [2, 4, 3, 2], "an answer is for one question"
        worker.prefetch(asked(4))
        clipped = totals(worker, asked(4, clip=1.0))
        assert clipped != both[:1], "with gradients clipped it is another question"
        assert totals(worker, asked(4)) == both[:1]
        assert sent == [2, 4, 3, 2, 4, 4]
        wrong: Any = worker.ask_all(asked(2, job="slm:huge"), timeout_s=LONG_S)
        assert [type(one) for one in wrong] == [UnknownName]
        assert totals(worker, asked(2)) == first[1:], "and back to the first job"


STUB = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)["settings"]
    print(*(json.dumps({"micro": one["micro_batch"]}) for one in asked), sep="\\n", end="\\n\\n", flush=True)
    open(sys.argv[0] + ".answered", "a").write("x")
"""


def test_answers_that_came_together_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quick_stub.py").write_text(STUB, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with WorkerProcess("quick_stub") as worker:
        worker.load_job(asked())
        worker.prefetch(asked(2, 3))
        worker.prefetch(asked(4))
        marks = tmp_path / "quick_stub.py.answered"
        ends_at = time.monotonic() + 240
        while not (marks.exists() and marks.read_text(encoding="utf-8") == "xxx"):
            assert time.monotonic() < ends_at
            time.sleep(0.01)
        for wanted in ((4,), (3,), (5, 2)):
            found: Any = worker.ask_all(asked(*wanted), timeout_s=60)
            assert [entry["micro"] for entry in found] == list(wanted)


def test_what_was_prefetched_is_not_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quick_stub.py").write_text(STUB, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with WorkerProcess("quick_stub") as worker:
        worker.prefetch(asked(2, 3))
        worker.prefetch(asked(3))
        worker.prefetch(asked(3, 4))
        found: Any = worker.ask_all(asked(5), timeout_s=60)
        assert [entry["micro"] for entry in found] == [5]
        marks = (tmp_path / "quick_stub.py.answered").read_text(encoding="utf-8")
        # The last mark may come after the answer.
        assert 3 <= len(marks) + 1 <= 4
        assert worker.ask_all(asked(2, 3, 4), timeout_s=60) == [{"micro": 2}, {"micro": 3}, {"micro": 4}]


def test_the_time_in_which_a_child_waits_for_a_cpu_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "read_waited_s", lambda _: 9.0)
    asked_for = NamedJob(job="job.py:Job")
    program = [sys.executable, "-S", "-c", "import time; time.sleep(2)"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        begin = time.monotonic()
        with pytest.raises(JobFailed, match=r"importing its file.* took more than 0 s"):
            server._exchange(process, asked_for, {"timeout_s": 0.2, "only_reads": True})  # noqa: SLF001 - no job
        taken_s = time.monotonic() - begin
        process.kill()
    assert taken_s > 0.8, "it may wait for three times its limit"
