"""Tracing processes end with the process that started them, whatever ends it."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

WORKER = """
import os, sys, time
from pathlib import Path

sys.modules.setdefault("silent_worker", sys.modules["__main__"])
from trimtab.trace import child_process, worker
from trimtab.trace.forks import run_forked

if os.environ.get("NO_SIGNAL"):
    child_process._ask_for_signal = lambda: False

def note(name):
    scratch = Path("note." + name)
    scratch.write_text(str(os.getpid()))
    scratch.rename("pid." + name)

def inner(say):
    note("fork-of-fork")
    while True:
        time.sleep(0.01)

def outer(say):
    note("fork")
    list(run_forked([inner], "job", timeout_s=600))

def answers(job, requests, sure):
    note("worker")
    list(run_forked([outer], "job", timeout_s=600))

worker.prepare_job = lambda requests: None
worker._answer_requests = answers
worker._serve_requests()
"""
PARENT = """
import os
from pathlib import Path
from trimtab.api.detecting import cluster
from trimtab.trace.server import WorkerProcess
from trimtab.trace.request import TraceRequests

Path("pid.parent").write_text(str(os.getpid()))
with WorkerProcess(module="silent_worker") as worker:
    worker.ask_all(
        TraceRequests(job="slm", settings=(), device=cluster("H100").devices[0]), timeout_s=600
    )
"""
TERMINAL = """
import os, pty, sys, time

pid, terminal = pty.fork()
if not pid:
    os.execv(sys.executable, [sys.executable, "parent.py"])
while True:
    time.sleep(0.01)
"""
Start = Callable[..., subprocess.Popen[bytes]]
NAMES = ("worker", "fork", "fork-of-fork")
WITHIN_S = 60.0
PATIENCE_S = 240.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("silent_worker", WORKER), ("parent", PARENT), ("terminal", TERMINAL)):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    started = []

    def begin(program: str, **variables: str) -> subprocess.Popen[bytes]:
        env = os.environ | {"PYTHONPATH": str(folder)} | variables
        process = subprocess.Popen(
            [sys.executable, f"{program}.py"],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
    for file in folder.glob("pid.*"):
        if is_running(int(file.read_text(encoding="ascii"))):
            os.kill(int(file.read_text(encoding="ascii")), signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    # A process that has ended may wait for its new parent to notice.
    return state not in ("Z", "X")


def started_pids(folder: Path) -> list[int]:
    """The process ids of the three, once all have begun."""
    ends_at = time.monotonic() + PATIENCE_S
    files = [folder / f"pid.{name}" for name in NAMES]
    while not all(file.exists() for file in files):
        assert time.monotonic() < ends_at, "the processes did not start"
        time.sleep(0.02)
    return [int(file.read_text(encoding="ascii")) for file in files]


def assert_all_end(pids: list[int]) -> None:
    # Another process may have the cores: what counts is the time that was there to end in.
    ends_at = time.monotonic() + WITHIN_S
    while any(map(is_running, pids)) and time.monotonic() < ends_at:
        time.sleep(0.02)
    left = {name for name, pid in zip(NAMES, pids, strict=True) if is_running(pid)}
    assert not left


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_workers_end_when_a_signal_ends_their_parent(how: signal.Signals, folder: Path, start: Start) -> None:
    parent = start("parent")
    pids = started_pids(folder)
    parent.send_signal(how)
    assert_all_end(pids)


def test_workers_end_when_the_terminal_is_closed(folder: Path, start: Start) -> None:
    terminal = start("terminal")
    pids = started_pids(folder)
    terminal.kill()
    assert_all_end(pids)


def test_workers_end_when_the_caller_times_out(folder: Path, start: Start) -> None:
    parent = start("parent")
    pids = started_pids(folder)
    with pytest.raises(subprocess.TimeoutExpired):
        parent.communicate(timeout=0.01)
    # As subprocess.run does then.
    parent.kill()
    assert_all_end(pids)


def test_workers_end_where_the_system_sends_no_signal(folder: Path, start: Start) -> None:
    parent = start("parent", NO_SIGNAL="1")
    pids = started_pids(folder)
    parent.kill()
    assert_all_end(pids)


def test_a_fork_ends_when_the_worker_is_killed(folder: Path, start: Start) -> None:
    start("parent")
    pids = started_pids(folder)
    os.kill(pids[0], signal.SIGKILL)
    assert_all_end(pids)


def test_a_process_whose_parent_has_gone_does_not_begin(tmp_path: Path) -> None:
    code = "from trimtab.trace.child_process import end_with_parent; end_with_parent(); print('began')"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    env = os.environ | {"TRIMTAB_PARENT": str(gone.pid)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"")
