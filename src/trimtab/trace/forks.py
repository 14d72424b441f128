"""Run tasks in forks of this process, a few at a time.

Do the work that all tasks share, mainly imports, before you fork. Each fork runs one task and exits. A crash
or a memory limit affects only the answer of that task.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from trimtab.trace.child_process import (
    end_with_parent,
    exceeds_memory_limit,
    memory_limit_error,
    resident_bytes,
)
from trimtab.trace.server import answer_with, crash_error, encode_error, timeout_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.errors import TrimtabError
    from trimtab.trace.server import SendAnswer

MAX_FORKS = 2
"""Forks at a time, if there are as many cores; a fork may start as many of its own."""
CHECK_S = 0.2
"""Time between two checks of the limits of forks."""
PAUSE_S = 0.02
"""Time between two looks for an ended fork, on systems that do not report it."""

Task = Any
"""A function that takes a SendAnswer function and calls it."""


@dataclass
class Fork:
    """A running copy of this process."""

    number: int
    """Index of its task."""
    pid: int
    answer: IO[bytes]
    errors: IO[bytes]
    ends_at: float
    descriptor: int | None
    """File descriptor of the process, which is readable when it ends; None if the system has none."""
    failure: TrimtabError | None = None
    """Why we killed it, if we did."""


def max_forks() -> int:
    """Return how many forks may run at a time: no more than this process has cores."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(MAX_FORKS, cores))


def run_forked(  # noqa: PLR0913 - tasks, and their limits
    tasks: Sequence[Callable[[SendAnswer], None]],
    given: str,
    *,
    timeout_s: float,
    learn: Callable[[bytes], None] = lambda _: None,
    most: int = MAX_FORKS,
    held_bytes: int = 0,
) -> Iterator[tuple[int, bytes]]:
    """Run every task in a fork of this process; yield index and answer of each as it finishes.

    An answer is JSON for `server.decode_answer`. `given` names the job in errors. `learn` is called with each
    answer while further forks have to be started. At most `most` run at a time, and no more than cores.
    `held_bytes` of this process count as memory of the forks, which share them.
    """
    most = min(most, max_forks())
    waiting = list(enumerate(tasks))
    running: list[Fork] = []
    # Forks share memory until they write to it; collecting garbage would write everywhere.
    gc.freeze()
    while waiting or running:
        while waiting and len(running) < most:
            number, task = waiting.pop(0)
            running.append(_start_fork(number, task, timeout_s))
        _enforce_limits(running, given, timeout_s, held_bytes)
        ended = [(fork, status) for fork in running if (status := _exit_code(fork)) is not None]
        for fork, status in ended:
            running.remove(fork)
            if fork.descriptor is not None:
                os.close(fork.descriptor)
            answer = _read_answer(fork, status, given)
            if waiting:
                learn(answer)
            yield fork.number, answer
        if not ended:
            _wait_for_end(running)


def _open_process(pid: int) -> int | None:
    """Return a file descriptor of a process, which is readable when it ends; None without Linux 5.3."""
    pidfd_open = getattr(os, "pidfd_open", None)
    if pidfd_open is None:
        return None
    try:
        return int(pidfd_open(pid))
    except OSError:
        return None


def _wait_for_end(running: list[Fork]) -> None:
    """Wait until a fork ends or the limits have to be checked; without descriptors, only for a moment."""
    if any(fork.descriptor is None for fork in running):
        time.sleep(PAUSE_S)
        return
    poll = select.poll()
    for fork in running:
        if fork.descriptor is not None:
            poll.register(fork.descriptor, select.POLLIN)
    poll.poll(1000 * CHECK_S)


def _start_fork(number: int, task: Task, timeout_s: float) -> Fork:
    answer = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the fork
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Fork(number, pid, answer, errors, time.monotonic() + timeout_s, _open_process(pid))
    code = 1
    try:
        end_with_parent(parent)
        _use_one_thread()
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        answer_with(task, answer)
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must never continue the work of its parent
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _use_one_thread() -> None:
    """Compute with one thread: the threads of torch's OpenMP pool do not survive a fork.

    If the parent has computed with several threads, the fork would wait forever for threads that are gone.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _exit_code(fork: Fork) -> int | None:
    pid, status = os.waitpid(fork.pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def _enforce_limits(running: list[Fork], given: str, timeout_s: float, held_bytes: int) -> None:
    """Kill forks that exceed the time limit; if all forks exceed the memory limit, kill the largest."""
    late = [fork for fork in running if time.monotonic() > fork.ends_at]
    for fork in late:
        _kill_fork(fork, timeout_error(given, timeout_s))
    if exceeds_memory_limit(*(fork.pid for fork in running), held_bytes=held_bytes):
        _kill_fork(max(running, key=lambda fork: resident_bytes(fork.pid)), memory_limit_error(given))


def _kill_fork(fork: Fork, failure: TrimtabError) -> None:
    fork.failure = fork.failure or failure
    with contextlib.suppress(ProcessLookupError):
        os.kill(fork.pid, signal.SIGKILL)


def _read_answer(fork: Fork, status: int, given: str) -> bytes:
    with fork.answer, fork.errors:
        fork.answer.seek(0)
        answer = fork.answer.read()
        if fork.failure is None and status == 0 and answer:
            return answer
        fork.errors.seek(0)
        text = fork.errors.read().decode(errors="replace")
    return encode_error(fork.failure or crash_error(given, status, text))
