"""Child processes that run the user's code: a request goes in as JSON, an answer or an error comes out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec

from trimtab import errors
from trimtab.catalog.torch_release import require_supported_torch
from trimtab.errors import JobFailed, TrimtabError
from trimtab.trace.host import limit_bytes, resident_bytes, too_much

if TYPE_CHECKING:
    from collections.abc import Callable


Say = Any
"""A function that takes the answer and ends the process."""
PAUSE_S = 0.05
REPEATABLE = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
"""Nothing is downloaded by a job that is only looked at; sets have the same order every time."""


def environment(scratch: str) -> dict[str, str]:
    """What a process that traces finds.

    No GPU is touched, and what torch.compile leaves lies in a scratch folder, where no real run finds it.
    """
    return os.environ | REPEATABLE | {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": scratch}


class Asked(Protocol):
    """What a child process can be asked: a noun about a job."""

    @property
    def job(self) -> str:
        """For messages."""
        ...

    def to_json(self, *, indent: int = 0) -> str:
        """For the child."""
        ...


def ask(
    module: str, request: Asked, env: dict[str, str], *, timeout_s: float, show: bool = False
) -> dict[str, Any]:
    """Run a module on a request; what it says, or its end, as an answer or an error."""
    (answer,) = ask_all(module, request, env, timeout_s=timeout_s, show=show)
    if isinstance(answer, TrimtabError):
        raise answer
    return answer


def ask_all(  # noqa: PLR0913 - who is asked what, and how long
    module: str,
    request: Asked,
    env: dict[str, str],
    *,
    timeout_s: float,
    watch: bool = False,
    show: bool = False,
) -> list[dict[str, Any] | TrimtabError]:
    """Run a module on a request; every line that it says, as an answer or an error.

    With `watch`, it is ended when it takes more memory of this host than tracing may. With `show`, it speaks
    to the user on stderr while it runs.
    """
    require_supported_torch()
    job = f"job {request.job}"
    # A session of its own: whatever it starts ends with it.
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if show else subprocess.PIPE,
        env=os.environ | REPEATABLE | env,
        start_new_session=True,
    )
    try:
        out, err = _conversed(process, request, job, timeout_s=timeout_s, watch=watch)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    try:
        answers = [heard(line) for line in out.splitlines()]
    except ValueError:
        answers = []
    if not answers:
        raise died(job, process.returncode, (err or b"").decode(errors="replace"))
    return answers


def _conversed(
    process: subprocess.Popen[bytes], request: Asked, job: str, *, timeout_s: float, watch: bool
) -> tuple[bytes, bytes]:
    """All that a process says, while it stays within time and memory."""
    text: bytes | None = request.to_json().encode()
    ends_at = time.monotonic() + timeout_s
    while True:
        try:
            return process.communicate(text, timeout=PAUSE_S)
        except subprocess.TimeoutExpired as error:
            text = None
            if time.monotonic() > ends_at:
                raise too_long(job, timeout_s) from error
        if watch and resident_bytes(process.pid) > limit_bytes():
            raise too_much(job)


def told(error: TrimtabError) -> bytes:
    """An error as a line that `heard` reads."""
    parts = {"given": error.given, "found": error.found, "cure": error.cure}
    return json.dumps({"error": {**parts, "kind": type(error).__name__}}).encode()


def heard(line: bytes) -> dict[str, Any] | TrimtabError:
    """An answer or an error from a line."""
    answer: dict[str, Any] = msgspec.json.decode(line)
    if not isinstance(answer, dict):
        raise ValueError(line)  # noqa: TRY004 - the same as a line that is no JSON
    if "error" not in answer:
        return answer
    parts = answer["error"]
    error: TrimtabError = getattr(errors, parts["kind"])(
        parts["given"], found=parts["found"], cure=parts["cure"]
    )
    return error


def died(job: str, status: int, said: str) -> JobFailed:
    """The error of a process that ended without an answer."""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
    how = f"signal {-status}" if status < 0 else f"exit code {status}"
    return JobFailed(
        job,
        found=f"the process that ran it ended with {how}: {last.strip()[:300]}",
        cure="If the job runs on a GPU, this is a bug in trimtab: please report it with the job.",
    )


def too_long(job: str, timeout_s: float) -> JobFailed:
    """The error of a job whose first steps do not end."""
    return JobFailed(
        job,
        found=f"its first steps took more than {timeout_s:.0f} s",
        cure="Try a smaller --micro-batch, or look for loops over data in loss().",
    )


def answering(work: Callable[[Say], None], answer: IO[bytes]) -> None:
    """Let `work` answer into a file; an error of ours that it raises is an answer too."""

    def say(what: dict[str, Any] | bytes) -> NoReturn:
        answer.write(what if isinstance(what, bytes) else msgspec.json.encode(what))
        answer.close()
        # No destructors: what a worker put into torch must outlive everything.
        os._exit(0)

    try:
        work(say)
    except TrimtabError as error:
        say(told(error))


def serve(work: Callable[[str, Say], None]) -> None:
    """Be such a process: give `work` the request's text and the way to answer."""
    answer = apart()
    answering(lambda say: work(sys.stdin.read(), say), answer)


def apart() -> IO[bytes]:
    """The real stdout, for answers; whatever the user's code prints goes to stderr from now on."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answer
