"""A tracing process that stays, for whoever asks several times: torch and the job are loaded once.

with Standing() as worker:
worker.ask_all(requests, timeout_s=600)
worker.ask_all(others, timeout_s=600)    # at once, where it is the same job on the same device
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Any, Self

from trimtab.catalog.torch_release import require_supported_torch
from trimtab.trace.child import PAUSE_S, died, environment, heard, too_long
from trimtab.trace.host import limit_bytes, resident_bytes, too_much

if TYPE_CHECKING:
    from trimtab.errors import TrimtabError
    from trimtab.spec import Setting
    from trimtab.trace.worker import Requests

    Answer = dict[str, Any] | TrimtabError

END = b"\n\n"
"""Follows the answers to a request."""


class Standing:
    """One process at a time; another job or device takes another one."""

    def __init__(self, module: str = "trimtab.trace.worker") -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._job = ""
        """What the process has loaded."""
        self._sent: deque[Requests] = deque()
        """Asked and not answered yet, in that order."""
        self._stock: dict[tuple[float | None, Setting], Answer] = {}
        """Answers that nobody has waited for, by clipping and setting."""
        self._unread = bytearray()
        """What came after the answer that was read last."""
        self.last: Requests | None = None
        """What was asked for last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm(self, requests: Requests) -> None:
        """Let the process load a job while the caller does something else."""
        self._send(requests.replace(settings=()))

    def expect(self, requests: Requests) -> None:
        """Let the process work on what may be asked for next, while the caller does something else.

        What is asked for instead waits until that is done, so it should be little, and likely.
        """
        self._send(requests)

    def ask_all(self, requests: Requests, *, timeout_s: float) -> list[Answer]:
        """Every answer to the requests, as `child.ask_all` gives them."""
        self.last = requests
        wanted = [(requests.clip, one) for one in requests.settings]
        try:
            self._keep_up(requests)
            coming = {(sent.clip, one) for sent in self._sent for one in sent.settings}
            missing = [key for key in wanted if key not in self._stock and key not in coming]
            if missing or not wanted:
                self._send(requests.replace(settings=tuple(one for _, one in missing)))
            ends_at = time.monotonic() + timeout_s
            while self._sent and not (wanted and all(key in self._stock for key in wanted)):
                sent = self._sent.popleft()
                lines = self._answer(requests, ends_at, timeout_s).splitlines()
                if len(lines) < len(sent.settings):
                    # The job could not be loaded.
                    return [heard(line) for line in lines]
                # What went wrong while it was only to be loaded goes wrong again, and is told then.
                for setting, line in zip(sent.settings, lines, strict=False):
                    self._stock[sent.clip, setting] = heard(line)
            # An answer is kept for one question; the same setting may come twice in that.
            taken = {key: self._stock.pop(key) for key in dict.fromkeys(wanted)}
            return [taken[key] for key in wanted]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process and all that it has started."""
        process, self._process = self._process, None
        self._sent.clear()
        self._stock.clear()
        self._unread.clear()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if self._errors is not None:
            self._errors.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _keep_up(self, requests: Requests) -> None:
        """Have a process that has loaded this job, or will."""
        job = requests.replace(settings=(), clip=None, timeout_s=1.0).to_json()
        if self._process is None or self._process.poll() is not None or job != self._job:
            self.close()
            self._start()
            self._job = job

    def _send(self, requests: Requests) -> None:
        self._keep_up(requests)
        self._sent.append(requests)
        assert self._process is not None  # noqa: S101 - it was started
        assert self._process.stdin is not None  # noqa: S101 - with a pipe
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(requests.to_json().encode() + b"\n")
            self._process.stdin.flush()

    def _start(self) -> None:
        require_supported_torch()
        self._scratch = tempfile.TemporaryDirectory(prefix="trimtab-")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment(self._scratch.name),
            start_new_session=True,
        )

    def _answer(self, requests: Requests, ends_at: float, timeout_s: float) -> bytes:
        """What it says to one request, while it stays within time and memory."""
        process, given = self._process, f"job {requests.job}"
        assert process is not None  # noqa: S101 - it was asked
        assert process.stdout is not None  # noqa: S101 - with a pipe
        said = self._unread
        # Answers are lines of JSON, so that END is in none of them.
        while (end := said.find(END)) < 0:
            if select.select([process.stdout], [], [], PAUSE_S)[0]:
                more = os.read(process.stdout.fileno(), 2**20)
                if not more:
                    raise died(given, process.wait(), self._complaints())
                said += more
            elif time.monotonic() > ends_at:
                raise too_long(given, timeout_s)
            elif resident_bytes(process.pid) > limit_bytes():
                raise too_much(given)
        answer = bytes(said[:end]).strip()
        del said[: end + len(END)]
        return answer

    def _complaints(self) -> str:
        assert self._errors is not None  # noqa: S101 - the process has them
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")
