"""Handle signals that ask a run to end: it finishes the step, saves a checkpoint and exits.

    SIGTERM   a scheduler or a person wants the machine back
    SIGUSR1   Slurm's warning before the time limit, as in `#SBATCH --signal=USR1@120`
    SIGINT    Ctrl-C
    SIGHUP    the terminal is gone; ignored under nohup

A signal to one rank is enough: the request is reduced with the status of the step, and all ranks end after
the same step. A second signal later than ECHO_S ends the process at once. So does the first one if no step
ends for SILENCE_S, because another rank is gone and a collective waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Self

from trimtab.spec import IncidentKind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
ECHO_S = 3.0
"""Signals within this time count as one: a scheduler signals every process of a job, and torchrun forwards
its own copy."""
SILENCE_S = 20.0
"""After a request, the process exits if no step ends for this long."""
FIELD_SIZE = 10_000
"""Each field of the packed request counts up to this many ranks, exclusive."""


def handled_signals() -> list[signal.Signals]:
    """Return the stop signals that this process handles; not SIGHUP under nohup."""
    return [
        number
        for number in STOP_SIGNALS
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


def exit_code(asked: signal.Signals) -> int:
    """Return the exit code of a process that ended because of a signal, as in shells: 128 + its number.

    >>> exit_code(signal.SIGTERM)
    143
    """
    return 128 + asked


def original_signal(asked: signal.Signals, noted: signal.Signals | None) -> signal.Signals:
    """Return the signal that the parent process got, if it forwarded it to this rank as SIGTERM.

    The parent forwards Ctrl-C and a lost terminal as SIGTERM, and records the original (`noted`) before.

    >>> original_signal(signal.SIGTERM, signal.SIGINT).name
    'SIGINT'
    >>> original_signal(signal.SIGTERM, signal.SIGUSR1).name
    'SIGTERM'
    """
    passed_on = asked is signal.SIGTERM and noted in (signal.SIGINT, signal.SIGHUP)
    return noted if passed_on and noted is not None else asked


def describe_stop(asked: signal.Signals) -> tuple[IncidentKind, str]:
    """Return the kind of incident of a stop signal, and its description.

    >>> describe_stop(signal.SIGINT)[1], describe_stop(signal.SIGTERM)[1]
    ('Ctrl-C (SIGINT)', 'SIGTERM')
    """
    return {
        signal.SIGUSR1: (IncidentKind.TIME_LIMIT, "SIGUSR1"),
        signal.SIGINT: (IncidentKind.INTERRUPT, "Ctrl-C (SIGINT)"),
        signal.SIGHUP: (IncidentKind.INTERRUPT, "a terminal that is gone (SIGHUP)"),
    }.get(asked, (IncidentKind.PREEMPTION, asked.name))


class StopRequest(NamedTuple):
    """What ranks send each other with the status of a step."""

    asked: signal.Signals | None = None
    """The stop signal; None if there was none."""
    news: bool = False
    """Whether a rank has incidents that rank 0 does not have yet."""
    checkpoint: bool = False
    """Whether rank 0's clock says that a checkpoint is due."""


def pack_request(stop_request: StopRequest) -> float:
    """Pack a request into one number that can be summed over ranks.

    A float64 holds whole numbers exactly up to 9e15. From the right: four digits count the ranks that got a
    stop signal, four those that got SIGUSR1, four those with news, and the rest those with a due checkpoint.
    """
    ended = stop_request.asked is not None and stop_request.asked is not signal.SIGUSR1
    fields = (ended, stop_request.asked is signal.SIGUSR1, stop_request.news, stop_request.checkpoint)
    return float(sum(int(field) * FIELD_SIZE**place for place, field in enumerate(fields)))


def unpack_requests(total: float) -> StopRequest:
    """Unpack the sum of all ranks' requests into one request.

    >>> total = pack_request(StopRequest(signal.SIGUSR1)) + pack_request(StopRequest(checkpoint=True))
    >>> unpack_requests(total).checkpoint
    True
    """
    left, ended = divmod(round(total), FIELD_SIZE)
    left, warned = divmod(left, FIELD_SIZE)
    checkpoint, news = divmod(left, FIELD_SIZE)
    asked = signal.SIGTERM if ended else signal.SIGUSR1 if warned else None
    return StopRequest(asked, news > 0, checkpoint > 0)


class Signals:
    """Listens for stop signals during a run: `with Signals() as signals: ... signals.asked`.

    A thread receives the signals, because Python's handlers run in the main thread, which may be inside a
    collective that never ends.
    """

    def __init__(self, *, silence_s: float = SILENCE_S) -> None:
        self.asked: signal.Signals | None = None
        self.silence_s = silence_s
        self._is_busy = False
        self._first_s = 0.0
        self._last_step_s = time.monotonic()
        self._before: dict[signal.Signals, object] = {}
        self._receiver, self._sender = socket.socketpair()
        self._thread = threading.Thread(target=self._listen, name="trimtab-signals", daemon=True)
        self._wakeup = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            # Python allows signal handlers only in the main thread; whatever runs there handles signals.
            return self
        self._sender.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for handled_signal in handled_signals():
            self._before[handled_signal] = signal.signal(handled_signal, self._ignore)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup)
        for key, handler in self._before.items():
            signal.signal(key, handler)  # type: ignore[arg-type] # a value that signal() returned
        with contextlib.suppress(OSError):
            self._receiver.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=1.0)
        self._receiver.close()
        self._sender.close()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Do not exit for lack of steps while a checkpoint is written or the run evaluates."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
            self.note_step_end()

    def note_step_end(self) -> None:
        """Take note that a step has ended."""
        self._last_step_s = time.monotonic()

    def _ignore(self, number: int, _: FrameType | None) -> None:
        """Do nothing: Python needs a handler to write to the wakeup socket, and `_listen` does the work."""

    def _listen(self) -> None:
        while True:
            self._receiver.settimeout(1.0 if self.asked is not None else None)
            try:
                received = self._receiver.recv(1)
            except TimeoutError:
                self._give_up_if_silent()
                continue
            except OSError:
                return
            if not received:
                return
            if received[0] in set(map(int, STOP_SIGNALS)):
                self._handle(signal.Signals(received[0]))

    def _handle(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.asked in (None, signal.SIGUSR1):
            # Slurm sends SIGUSR1 first and SIGTERM later: the save that SIGUSR1 started goes on.
            self._first_s = now if self.asked is None or number is not signal.SIGUSR1 else self._first_s
            self.asked = self.asked if number is signal.SIGUSR1 and self.asked else number
        elif now - self._first_s > ECHO_S and number is not signal.SIGUSR1:
            os._exit(exit_code(number))

    def _give_up_if_silent(self) -> None:
        since = max(self._first_s, self._last_step_s)
        if self.asked is not None and not self._is_busy and time.monotonic() - since > self.silence_s:
            os._exit(exit_code(self.asked))
