"""What a job says of itself, read in a child process, because reading a job runs the user's code.

described("job.py:MyJob").branches
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from trimtab.errors import TrimtabError
from trimtab.jobs.load import load
from trimtab.spec import Noun
from trimtab.trace.child import Say, ask, serve
from trimtab.trace.tracer import cache_folder, fingerprint, remember

TIMEOUT_S = 120.0


class Question(Noun, frozen=True, kw_only=True):
    """Which job."""

    job: str
    overrides: dict[str, Any] = {}


class Described(Noun, frozen=True, kw_only=True):
    """The members of a job that are no functions."""

    name: str = ""
    global_batch: int | None = None
    samples: int | None = None
    epochs: int | None = None
    branches: tuple[str, ...] = ()
    """Names; empty where it has no losses()."""


def described(job: str, overrides: dict[str, Any] | None = None, *, cache: bool = True) -> Described:
    """Ask a child process, or the cache where the job is unchanged."""
    question = Question(job=job, overrides=overrides or {})
    file = cache_folder() / f"{fingerprint(job, question.to_json())}.job.json"
    if cache and file.is_file():
        with contextlib.suppress(TrimtabError):
            return Described.from_json(file.read_bytes(), origin=str(file))
    answer = ask("trimtab.trace.describe", question, {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=TIMEOUT_S)
    found = Described.from_builtins(answer["job"])
    remember(file, found)
    return found


def describe(job: Any) -> Described:
    """What a job that is loaded says."""
    branches = getattr(job, "branches", None) if callable(getattr(job, "losses", None)) else None

    def whole(name: str) -> int | None:
        value = getattr(job, name, None)
        return value if isinstance(value, int) else None

    return Described(
        name=str(getattr(job, "name", "") or ""),
        global_batch=whole("global_batch"),
        samples=whole("samples"),
        epochs=whole("epochs"),
        branches=tuple(map(str, branches)) if isinstance(branches, dict) else (),
    )


def _work(text: str, say: Say) -> None:
    question = Question.from_json(text)
    job = load(question.job, question.overrides)
    say(msgspec.json.encode({"job": describe(job)}))


if __name__ == "__main__":
    serve(_work)
