"""Signals that ask a run to end: the step is finished, the state saved, then the process ends.

    SIGTERM   a scheduler or a person wants the machine back
    SIGUSR1   Slurm's warning before the time limit, as in `#SBATCH --signal=USR1@120`
    SIGINT    Ctrl-C
    SIGHUP    the terminal is gone; with nohup it is not heard

One rank that is asked is enough: the request travels with the status of the step, and all ranks end after
the same one. A second request that comes later than an echo of the first ends the process at once; so does a
first one when no step ends any more, because another rank is gone and a collective waits for it.
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
"""A scheduler signals every process of a job, and torchrun passes its own copy on: within this time, two
are one."""
SILENCE_S = 20.0
"""How long after a request no step may end before the process gives up on ending well."""
FIELD_SIZE = 10_000
"""More ranks than the packed request can tell apart."""


def handled_signals() -> list[signal.Signals]:
    """The signals that this process answers: not what nohup had it ignore."""
    return [
        one for one in STOP_SIGNALS if one is not signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN
    ]


def exit_code(asked: signal.Signals) -> int:
    """What a process that ended by request leaves with, as shells count: 128 and the signal's number.

    >>> exit_code(signal.SIGTERM)
    143
    """
    return 128 + asked


def original_signal(asked: signal.Signals, noted: signal.Signals | None) -> signal.Signals:
    """The signal that whoever wants the end gave, where ranks got another.

    The parent of ranks passes Ctrl-C and a lost terminal on as SIGTERM, and has noted before which it was.

    >>> meant(signal.SIGTERM, signal.SIGINT).name, meant(signal.SIGTERM, signal.SIGUSR1).name
    ('SIGINT', 'SIGTERM')
    """
    passed_on = asked is signal.SIGTERM and noted in (signal.SIGINT, signal.SIGHUP)
    return noted if passed_on and noted is not None else asked


def describe_stop(asked: signal.Signals) -> tuple[IncidentKind, str]:
    """What a request to end is as an incident, and who asked, in words.

    >>> described(signal.SIGINT)[1], described(signal.SIGTERM)[1]
    ('Ctrl-C (SIGINT)', 'SIGTERM')
    """
    return {
        signal.SIGUSR1: (IncidentKind.TIME_LIMIT, "SIGUSR1"),
        signal.SIGINT: (IncidentKind.INTERRUPT, "Ctrl-C (SIGINT)"),
        signal.SIGHUP: (IncidentKind.INTERRUPT, "a terminal that is gone (SIGHUP)"),
    }.get(asked, (IncidentKind.PREEMPTION, asked.name))


class StopRequest(NamedTuple):
    """What ranks tell each other beside the status of a step."""

    asked: signal.Signals | None = None
    """A signal to end by."""
    news: bool = False
    """Whether a rank has incidents that rank 0 does not know yet."""
    checkpoint: bool = False
    """Whether rank 0's clock says that a checkpoint is due."""


def pack_request(stop_request: StopRequest) -> float:
    """A request as one number that can be summed over ranks.

    Whole numbers are exact in 64 bits up to 9e15: from the right, there are four digits for ranks that were
    asked to end, four for those that were warned, four for those with news, and the rest for the checkpoint.
    """
    ended = stop_request.asked is not None and stop_request.asked is not signal.SIGUSR1
    fields = (ended, stop_request.asked is signal.SIGUSR1, stop_request.news, stop_request.checkpoint)
    return float(sum(int(field) * FIELD_SIZE**place for place, field in enumerate(fields)))


def unpack_requests(total: float) -> StopRequest:
    """What ranks asked for together.

    >>> unpacked(packed(Request(signal.SIGUSR1)) + packed(Request(checkpoint=True))).checkpoint
    True
    """
    left, ended = divmod(round(total), FIELD_SIZE)
    left, warned = divmod(left, FIELD_SIZE)
    checkpoint, news = divmod(left, FIELD_SIZE)
    asked = signal.SIGTERM if ended else signal.SIGUSR1 if warned else None
    return StopRequest(asked, news > 0, checkpoint > 0)


class Signals:
    """Listens while a run goes on: `with Signals() as signals: ... signals.asked`.

    A thread reads the signals as they come, since Python's own handlers wait for the main thread, and that
    may be inside a collective that never ends.
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
            # Python hears signals in its main thread alone: whoever has that answers them.
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
            signal.signal(key, handler)  # type: ignore[arg-type] # what signal() gave, it takes
        with contextlib.suppress(OSError):
            self._receiver.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=1.0)
        self._receiver.close()
        self._sender.close()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """While a checkpoint is written or the run evaluates, no step ends, and that is well."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
            self.note_step_end()

    def note_step_end(self) -> None:
        """Tell the listener that the run moves."""
        self._last_step_s = time.monotonic()

    def _ignore(self, number: int, _: FrameType | None) -> None:
        """Python asks for a handler before it writes to the listener; the work is done there."""

    def _listen(self) -> None:
        while True:
            self._receiver.settimeout(1.0 if self.asked is not None else None)
            try:
                heard = self._receiver.recv(1)
            except TimeoutError:
                self._give_up_if_silent()
                continue
            except OSError:
                return
            if not heard:
                return
            if heard[0] in {int(one) for one in STOP_SIGNALS}:
                self._handle(signal.Signals(heard[0]))

    def _handle(self, signals: signal.Signals) -> None:
        now = time.monotonic()
        if self.asked in (None, signal.SIGUSR1):
            # Slurm warns first and ends later: what was begun at the warning goes on.
            self._first_s = now if self.asked is None or signals is not signal.SIGUSR1 else self._first_s
            self.asked = self.asked if signals is signal.SIGUSR1 and self.asked else signals
        elif now - self._first_s > ECHO_S and signals is not signal.SIGUSR1:
            os._exit(exit_code(signals))

    def _give_up_if_silent(self) -> None:
        since = max(self._first_s, self._last_step_s)
        if self.asked is not None and not self._is_busy and time.monotonic() - since > self.silence_s:
            os._exit(exit_code(self.asked))
