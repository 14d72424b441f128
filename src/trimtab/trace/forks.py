"""Many answers from one start: a process forks a copy of itself for every task, a few at a time.

The process has done what all tasks share, imports above all. Each copy works on its own task and ends; what
goes wrong in one, a crash or too much memory, is the answer of that task alone.
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

from trimtab.trace.host import limit_bytes, resident_bytes, too_much
from trimtab.trace.lifeline import end_with_parent
from trimtab.trace.server import answer_with, encode_error, process_died, took_too_long

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.errors import TrimtabError
    from trimtab.trace.server import Say

AT_ONCE = 2
"""Copies of a process at a time, where there are as many cores; a copy may have as many of its own."""
PAUSE_S = 0.02

Task = Any
"""A function that is given the way to answer, and answers."""


@dataclass
class Fork:
    """A copy at work."""

    number: int
    """Which task."""
    pid: int
    answer: IO[bytes]
    errors: IO[bytes]
    ends_at: float
    failure: TrimtabError | None = None
    """Why it was ended, where we ended it."""


def at_once() -> int:
    """How many copies may run at a time: one a core that this process may use."""
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
    """Run every task in a copy of this process; number and answer of each, as they come.

    An answer is JSON as `server.decode_answer` reads it. `given` names the job in errors. `learn` sees each
    answer while there are copies yet to be made.
    """
    most = at_once()
    waiting = list(enumerate(tasks))
    running: list[Fork] = []
    # Copies share memory until one of them writes; collecting garbage would write everywhere.
    gc.freeze()
    while waiting or running:
        while waiting and len(running) < most:
            number, task = waiting.pop(0)
            running.append(_fork(number, task, timeout_s))
        _watch(running, given, timeout_s)
        ended = [(one, status) for one in running if (status := _status(one)) is not None]
        for one, status in ended:
            running.remove(one)
            answer = _answer(one, status, given)
            if waiting:
                learn(answer)
            yield one.number, answer
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


def _status(one: Fork) -> int | None:
    pid, status = os.waitpid(one.pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def _watch(running: list[Fork], given: str, timeout_s: float) -> None:
    """End the copy that takes too long, and the largest one where they take too much memory together."""
    late = [one for one in running if time.monotonic() > one.ends_at]
    for one in late:
        _end(one, took_too_long(given, timeout_s))
    sizes = {one.pid: resident_bytes(one.pid) for one in running}
    if sum(sizes.values()) > limit_bytes():
        _end(max(running, key=lambda one: sizes[one.pid]), too_much(given))


def _end(one: Fork, failure: TrimtabError) -> None:
    one.failure = one.failure or failure
    with contextlib.suppress(ProcessLookupError):
        os.kill(one.pid, signal.SIGKILL)


def _answer(one: Fork, status: int, given: str) -> bytes:
    with one.answer, one.errors:
        one.answer.seek(0)
        said = one.answer.read()
        if one.failure is None and status == 0 and said:
            return said
        one.errors.seek(0)
        text = one.errors.read().decode(errors="replace")
    return encode_error(one.failure or process_died(given, status, text))
