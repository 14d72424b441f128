"""Many answers from one start: a process forks a copy of itself for every task, a few at a time.

The process has done what all tasks share, imports above all. Each fork works on its own task and ends. If it
crashes or takes too much memory, that is the answer of its task alone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from trimtab.trace.child_process import end_with_parent, limit_bytes, resident_bytes, too_much
from trimtab.trace.server import answer_with, encode_error, process_died, took_too_long

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.errors import TrimtabError
    from trimtab.trace.server import Say

AT_ONCE = 2
"""Forks at a time, if there are as many cores; a fork may have as many of its own."""
PAUSE_S = 0.02

Task = Any
"""A function that is given the way to answer, and answers."""


@dataclass
class Fork:
    """A running copy of this process."""

    number: int
    """The number of its task."""
    pid: int
    answer: IO[bytes]
    errors: IO[bytes]
    ends_at: float
    failure: TrimtabError | None = None
    """Why we killed it, if we did."""


def at_once() -> int:
    """Return how many forks may run at a time: no more than this process has cores."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return max(1, min(AT_ONCE, cores))


def forked(
    tasks: Sequence[Callable[[Say], None]],
    given: str,
    *,
    timeout_s: float,
    learn: Callable[[bytes], None] = lambda _: None,
) -> Iterator[tuple[int, bytes]]:
    """Run every task in a fork of this process; yield number and answer of each, as they come.

    An answer is JSON as `server.decode_answer` reads it. `given` names the job in errors. `learn` sees each
    answer while there are forks yet to be made.
    """
    most = at_once()
    waiting = list(enumerate(tasks))
    running: list[Fork] = []
    # Forks share memory until they write to it; collecting garbage would write everywhere.
    gc.freeze()
    while waiting or running:
        while waiting and len(running) < most:
            number, task = waiting.pop(0)
            running.append(_fork(number, task, timeout_s))
        _watch(running, given, timeout_s)
        ended = [(fork, status) for fork in running if (status := _status(fork)) is not None]
        for fork, status in ended:
            running.remove(fork)
            answer = _answer(fork, status, given)
            if waiting:
                learn(answer)
            yield fork.number, answer
        if not ended:
            time.sleep(PAUSE_S)


def _fork(number: int, task: Task, timeout_s: float) -> Fork:
    answer = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the copy
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Fork(number, pid, answer, errors, time.monotonic() + timeout_s)
    code = 1
    try:
        end_with_parent(parent)
        _use_one_thread()
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        answer_with(task, answer)
        code = 0
    except BaseException:  # noqa: BLE001 - a copy must never go on with what its original was doing
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def _use_one_thread() -> None:
    """Compute with one thread: the threads of torch's OpenMP pool do not survive a fork.

    If the original has computed with several threads, the copy would wait forever for threads that are gone.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _status(fork: Fork) -> int | None:
    pid, status = os.waitpid(fork.pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def _watch(running: list[Fork], given: str, timeout_s: float) -> None:
    """Kill a fork that takes too long, and the largest if they take too much memory together."""
    late = [fork for fork in running if time.monotonic() > fork.ends_at]
    for fork in late:
        _end(fork, took_too_long(given, timeout_s))
    sizes = {fork.pid: resident_bytes(fork.pid) for fork in running}
    if sum(sizes.values()) > limit_bytes():
        _end(max(running, key=lambda fork: sizes[fork.pid]), too_much(given))


def _end(fork: Fork, failure: TrimtabError) -> None:
    fork.failure = fork.failure or failure
    with contextlib.suppress(ProcessLookupError):
        os.kill(fork.pid, signal.SIGKILL)


def _answer(fork: Fork, status: int, given: str) -> bytes:
    with fork.answer, fork.errors:
        fork.answer.seek(0)
        said = fork.answer.read()
        if fork.failure is None and status == 0 and said:
            return said
        fork.errors.seek(0)
        text = fork.errors.read().decode(errors="replace")
    return encode_error(fork.failure or process_died(given, status, text))
