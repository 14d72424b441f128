"""Many settings from one child: what one costs, and what one that goes wrong does to the others."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

import trimtab
from test_estimate import JOB, job_file
from trimtab import api
from trimtab.cache import TRACES
from trimtab.errors import JobFailed, TrimtabError, WrongUse
from trimtab.spec import Setting, Trace
from trimtab.trace import child_process
from trimtab.trace.child_process import exceeds_memory_limit, memory_limit_bytes, resident_bytes
from trimtab.trace.server import imported_modules
from trimtab.trace.tracer import trace_settings

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30
DEVICE = api.first_device(api.cluster("H200"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))


def settings(*micros: int) -> list[Setting]:
    return [Setting(micro_batch=micro, global_batch=micro) for micro in micros]


def forked(body: str, **env: str) -> list[str]:
    """What a fresh process prints that forks `tasks`, one line an answer in the order of tasks.

    A process of its own, because whoever runs these tests has threads.
    """
    program = (
        "import os, time\nfrom trimtab.trace.forks import run_forked\n"
        + textwrap.dedent(body)
        + "\nanswers = dict(run_forked(tasks, 'job j', timeout_s=3))\n"
        + "print(*[answers[n].decode() for n in range(len(tasks))], sep='\\n')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ | env
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_copy_computes_after_its_original_has_computed_with_several_threads() -> None:
    lines = forked("""
    import torch
    torch.set_num_threads(2)
    def total():
        return (torch.ones(2_000_000) * 2).sum().item()
    total()
    def work(say):
        say({"total": total()})
    tasks = [work, work]
    """)
    assert lines == ['{"total":4000000.0}'] * 2


def test_answers_belong_to_their_tasks_whatever_the_order_of_their_ends() -> None:
    lines = forked("""
    def task(number):
        def work(say):
            time.sleep(0.3 if number == 0 else 0)
            say({"number": number})
        return work
    tasks = [task(number) for number in range(5)]
    """)
    assert lines == [f'{{"number":{number}}}' for number in range(5)]


@pytest.mark.slow
def test_a_crash_a_silence_an_exception_and_a_hang_are_errors_of_their_own_task() -> None:
    lines = forked("""
    tasks = [
        lambda say: os.abort(),
        lambda say: None,
        lambda say: 1 / 0,
        lambda say: time.sleep(60),
        lambda say: say({"fine": True}),
    ]
    """)
    crash, silence, raised, hang, fine = lines
    assert "signal 6" in crash
    assert "exit code 0: it said nothing" in silence
    assert "ZeroDivisionError" in raised
    assert "took more than 3 s" in hang
    assert fine == '{"fine":true}'


def test_a_task_that_takes_memory_is_ended_and_its_neighbour_is_not() -> None:
    lines = forked(
        """
        def greedy(say):
            held = []
            while True:
                held.append(bytearray(b"x") * 2**24)
                time.sleep(0.01)
        def modest(say):
            time.sleep(1)
            say({"fine": True})
        tasks = [greedy, modest]
        """,
        TRIMTAB_HOST_GIB="0.6",
    )
    assert "took more than 0.6 GiB of this host's memory" in lines[0]
    assert lines[1] == '{"fine":true}'


def test_several_settings_are_traced_with_one_import_and_each_is_cached(tmp_path: Path) -> None:
    text = JOB.replace(
        "import torch\n", f"import torch\nopen({str(tmp_path / 'log')!r}, 'a').write('x')\n", 1
    )
    job = job_file(tmp_path, text)
    found = trace_settings(job, settings(2, 3, 4), DEVICE)
    assert all(isinstance(one, Trace) for one in found)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "x"
    assert len(list(TRACES.folder.glob("*.json"))) == 3
    assert trace_settings(job, settings(4, 2), DEVICE) == [found[2], found[0]]
    assert (tmp_path / "log").read_text(encoding="utf-8") == "x"
    assert trace_settings(job, [], DEVICE) == []


def test_one_setting_that_crashes_or_fails_leaves_the_others(tmp_path: Path) -> None:
    text = JOB.replace(
        "def batch(self, size):",
        "def batch(self, size):\n        import os\n        if size == 3: os.abort()\n"
        "        if size == 5: raise KeyError('five')",
    )
    two, three, five, seven = trace_settings(job_file(tmp_path, text), settings(2, 3, 5, 7), DEVICE)
    assert isinstance(two, Trace)
    assert isinstance(seven, Trace)
    assert isinstance(three, JobFailed)
    assert "signal 6" in three.found
    assert isinstance(five, JobFailed)
    assert "KeyError: 'five'" in five.found


def test_a_job_that_cannot_be_loaded_fails_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(TrimtabError, match="it lacks model"):
        trace_settings(job_file(tmp_path, JOB.replace("def model", "def mdel")), settings(2, 3), DEVICE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["import torch\n", "    def model(self):\n", "    def batch(self, size):\n"]
)
def test_ten_gib_of_real_memory_end_in_an_error_and_not_in_a_dead_machine(tmp_path: Path, where: str) -> None:
    """At import, in model() and in batch()."""
    indent = " " * (len(where) - len(where.lstrip()) + 4 * where.endswith(":\n"))
    text = JOB.replace(where, f"{where}{indent}import numpy; held = numpy.ones(10 * 2**30 // 8)\n", 1)
    with pytest.raises(JobFailed, match="took more than 3 GiB of this host's memory") as caught:
        trimtab.estimate(job_file(tmp_path, text), "H200", micro_batch=2, cache=False)
    assert caught.value.exit_code == 4


def test_memory_that_is_only_promised_is_not_counted(tmp_path: Path) -> None:
    text = JOB.replace("return Net()", "import numpy; self.held = numpy.zeros(2**30); return Net()")
    assert trimtab.estimate(job_file(tmp_path, text), "H200", micro_batch=2, cache=False).fits


def test_the_limit_can_be_moved_and_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_limit_bytes() == 3 * GIB
    monkeypatch.setenv("TRIMTAB_HOST_GIB", "8")
    assert memory_limit_bytes() == 8 * GIB
    for text in ("lots", "0", "-1", "nan"):
        monkeypatch.setenv("TRIMTAB_HOST_GIB", text)
        with pytest.raises(WrongUse, match="no number above 0"):
            memory_limit_bytes()


def test_a_process_that_is_gone_holds_nothing() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert resident_bytes(done.pid) == 0
    assert resident_bytes(os.getpid()) > 0
    assert not exceeds_memory_limit(done.pid)


def test_private_memory_is_counted_only_if_all_memory_is_above_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = []

    def count_private(pid: int) -> int:
        counted.append(pid)
        return GIB

    monkeypatch.setattr(child_process, "resident_bytes", count_private)
    monkeypatch.setattr(child_process, "_anonymous_bytes", lambda _: 2 * GIB)
    monkeypatch.setenv("TRIMTAB_HOST_GIB", "5")
    assert not exceeds_memory_limit(1, 2)
    assert counted == []
    monkeypatch.setenv("TRIMTAB_HOST_GIB", "3")
    assert not exceeds_memory_limit(1, 2), "half of it is shared"
    assert counted == [1, 2]
    assert exceeds_memory_limit(1, 2, held_bytes=GIB + 1), "what they share counts too"
    monkeypatch.setenv("TRIMTAB_HOST_GIB", "1.5")
    assert exceeds_memory_limit(1, 2)


def test_the_memory_of_this_process_is_above_a_small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_HOST_GIB", "0.001")
    assert exceeds_memory_limit(os.getpid())


def test_imports_inside_a_member_are_read_off_its_source() -> None:
    def model() -> None:
        import json.decoder  # noqa: F401
        from collections import OrderedDict, deque  # noqa: F401

    assert list(imported_modules(model)) == [("json.decoder", ()), ("collections", ("OrderedDict", "deque"))]
    assert list(imported_modules(None)) == list(imported_modules(len)) == []


@pytest.mark.slow
def test_another_micro_batch_is_answered_without_tracing(tmp_path: Path) -> None:
    job = job_file(tmp_path)
    first = trimtab.estimate(job, "H200", micro_batch=8)
    assert not any("line through" in assumption for assumption in first.assumptions)
    assert sorted(file.stem.rpartition("-")[2] for file in TRACES.folder.glob("*.json")) == ["16", "8"]
    second = trimtab.estimate(job, "H200", micro_batch=11)
    assert len(list(TRACES.folder.glob("*.json"))) == 2
    assert "sizes are read off a line through traces at micro-batches 8 and 16" in second.assumptions
    real = trimtab.estimate(job, "H200", micro_batch=11, cache=False)
    assert (second.allocated_bytes, second.reserved_bytes) == (real.allocated_bytes, real.reserved_bytes)
    assert not any("line through" in assumption for assumption in real.assumptions)


def test_the_allocator_and_accumulation_need_no_trace_of_their_own(tmp_path: Path) -> None:
    job = job_file(tmp_path)
    trimtab.estimate(job, "H200", micro_batch=8)
    before = set(TRACES.folder.iterdir())
    trimtab.estimate(job, "H200", micro_batch=8, allocator="expandable")
    assert set(TRACES.folder.iterdir()) == before
