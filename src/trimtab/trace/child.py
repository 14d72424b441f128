"""Child processes that run the user's code: a request goes in as JSON, an answer or an error comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from trimtab import errors
from trimtab.errors import JobFailed, TrimtabError

if TYPE_CHECKING:
    from collections.abc import Callable


Say = Any
"""A function that takes the answer and ends the process."""


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
    """Run a module on a request; what it says, or its end, as an answer or an error.

    `show` lets it speak to the user on stderr while it runs.
    """
    job = f"job {request.job}"
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", module],
            input=request.to_json(),
            stdout=subprocess.PIPE,
            stderr=None if show else subprocess.PIPE,
            text=True,
            timeout=timeout_s,
            check=False,
            # Nothing is downloaded by a job that is only looked at.
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | env,
        )
    except subprocess.TimeoutExpired as error:
        raise JobFailed(
            job,
            found=f"its first steps took more than {timeout_s:.0f} s",
            cure="Try a smaller --micro-batch, or look for loops over data in loss().",
        ) from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise _died(job, done) from None
    if "error" in answer:
        told = answer["error"]
        raise getattr(errors, told["kind"])(told["given"], found=told["found"], cure=told["cure"])
    return answer


def _died(job: str, done: subprocess.CompletedProcess[str]) -> JobFailed:
    last = next(
        (line for line in reversed((done.stderr or "").splitlines()) if line.strip()), "it said nothing"
    )
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return JobFailed(
        job,
        found=f"the process that ran it ended with {how}: {last.strip()[:300]}",
        cure="If the job runs on a GPU, this is a bug in trimtab: please report it with the job.",
    )


def serve(work: Callable[[str, Say], None]) -> None:
    """Be such a process: give `work` the request's text and the way to answer."""
    # The answer goes out on the real stdout; whatever the user's code prints goes to stderr.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(what: dict[str, Any]) -> NoReturn:
        answer.write(json.dumps(what))
        answer.close()
        # No destructors: what a worker put into torch must outlive everything.
        os._exit(0)

    try:
        work(sys.stdin.read(), say)
    except TrimtabError as error:
        parts = {"given": error.given, "found": error.found, "cure": error.cure}
        say({"error": {**parts, "kind": type(error).__name__}})
