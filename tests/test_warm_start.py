"""Processes that start warm are like those that start cold, as far as the tests can tell."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

import warm_start

if TYPE_CHECKING:
    from pathlib import Path

SAY = "# worlds.be_rank\nimport os, sys\n"
"""The first line makes a program one that starts warm."""


@pytest.fixture(params=["warm", "cold"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "cold":
        monkeypatch.setattr(subprocess, "Popen", warm_start._Popen)  # noqa: SLF001 - the real one

    def begin(program: str, *words: str, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SAY + program, *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, **{**pipes, **more})

    return begin


def test_words_folder_environment_and_streams(start: Any, tmp_path: Path) -> None:
    program = "print(sys.argv[1:], os.getcwd(), os.environ['ONLY'], sys.stdin.read(), __name__)"
    process = start(program, "a", "b c", cwd=tmp_path, env=os.environ | {"ONLY": "this"})
    out, err = process.communicate("read", timeout=240)
    assert (out, err) == (f"['a', 'b c'] {tmp_path} this read __main__\n", "")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('why')", 1, "why"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os._exit(9)", 9, ""),
        ("os.abort()", -signal.SIGABRT, ""),
        ("import atexit; atexit.register(print, 'last', file=sys.stderr)", 0, "last"),
    ],
)
def test_ends(start: Any, program: str, code: int, said: str) -> None:
    process = start(program)
    _, err = process.communicate(timeout=240)
    assert process.returncode == code
    assert said in err


def test_a_session_of_its_own_and_signals(start: Any) -> None:
    program = "print(os.getsid(0) == os.getpid(), os.getppid(), flush=True)\nimport time\ntime.sleep(60)"
    for own in (True, False):
        process = start(program, start_new_session=own)
        assert process.stdout.readline() == f"{own} {os.getpid()}\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=240)
        assert process.returncode == -signal.SIGINT
        assert "KeyboardInterrupt" in err


def test_a_child_of_a_child_is_waited_for(start: Any) -> None:
    inner = SAY + "sys.exit(int(sys.argv[1]))"
    program = f"import subprocess\nprint(subprocess.run([sys.executable, '-c', {inner!r}, '7']).returncode)"
    process = start(program, stdin=subprocess.DEVNULL)
    out, err = process.communicate(timeout=240)
    assert (out, err) == ("7\n", "")


def test_nothing_is_left_when_a_session_is_killed() -> None:
    command = [sys.executable, "-c", SAY + "print('ready', flush=True)\nimport time\ntime.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=240)
    ends_at = time.monotonic() + 240
    while time.monotonic() < ends_at:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        # Orphans of the session are ours now.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-process.pid, os.WNOHANG)
        time.sleep(0.01)
    pytest.fail("something of the session is left")


@pytest.mark.parametrize("module", warm_start.IMPORTED)
def test_what_is_imported_ahead_is_there(module: str) -> None:
    if module.startswith("transformers"):
        pytest.importorskip("transformers")
    assert importlib.util.find_spec(module) is not None
