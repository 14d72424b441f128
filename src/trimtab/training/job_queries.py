"""Small questions to a job, asked of a child process that runs its code; answers are cached.

Whether it can be trained, before anything is started or queued; and of which classes its modules are, where
their names alone tell nobody which is meant. A job whose file is not here, or whose code fails, has no
answer: its run will tell.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.cache import JOB_FAULTS, MODULE_CLASSES
from trimtab.errors import JobFailed, TrimtabError
from trimtab.jobs.load import load_job
from trimtab.jobs.registry import comes_with_trimtab
from trimtab.spec import Noun
from trimtab.trace.job_summary import TIMEOUT_S, NamedJob, named_job_key
from trimtab.trace.server import SendAnswer, ask, serve
from trimtab.training.task import check_trainable

if TYPE_CHECKING:
    from collections.abc import Callable

TRAINABLE, CLASSES = "trainable", "classes"
CACHES = {TRAINABLE: JOB_FAULTS, CLASSES: MODULE_CLASSES}


class JobQuery(Noun, frozen=True, kw_only=True):
    """What is asked of which job."""

    what: str
    job: str
    overrides: dict[str, Any]


def find_job_fault(job: str, options: dict[str, Any], *, cache: bool = True) -> JobFailed | None:
    """Why a run of the job would end before its first step; None where nothing is known against it."""
    if comes_with_trimtab(job):
        return None
    said = _ask_job(JobQuery(what=TRAINABLE, job=job, overrides=options), cache=cache)
    return JobFailed(**said) if said else None


def list_module_classes(job: str, options: dict[str, Any], *, cache: bool = True) -> dict[str, str]:
    """The class of every module of the job's model, by its path; empty where that cannot be told."""
    return _ask_job(JobQuery(what=CLASSES, job=job, overrides=options), cache=cache)


def _ask_job(question: JobQuery, *, cache: bool) -> dict[str, str]:
    place = question.job.rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        return {}
    kind, key = CACHES[question.what], named_job_key(NamedJob(job=question.job, overrides=question.overrides))
    cached = kind.load(key, msgspec.json.Decoder(dict[str, str]).decode) if cache else None
    if cached is not None:
        return cached
    try:
        said = ask(
            "trimtab.training.job_queries", question, {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=TIMEOUT_S
        )
    except TrimtabError:
        return {}
    found = msgspec.convert(said["answer"], dict[str, str])
    kind.store(key, msgspec.json.encode(found))
    return found


def _find_training_fault(job: Any, name: str) -> dict[str, str]:
    """The error of a job that cannot be trained, in its three parts."""
    try:
        check_trainable(job, name)
    except JobFailed as error:
        return {"given": error.given, "found": error.found, "cure": error.cure}
    return {}


def _list_classes(job: Any, _: str) -> dict[str, str]:
    """Built without memory: only the names are wanted."""
    import torch

    with torch.device("meta"):
        model = job.model()
    return {path: type(module).__name__ for path, module in model.named_modules() if path}


ANSWERS: dict[str, Callable[[Any, str], dict[str, str]]] = {
    TRAINABLE: _find_training_fault,
    CLASSES: _list_classes,
}


def _serve_query(text: str, say: SendAnswer) -> None:
    question = JobQuery.from_json(text)
    job = load_job(question.job, question.overrides)
    say(msgspec.json.encode({"answer": ANSWERS[question.what](job, question.job)}))


if __name__ == "__main__":
    serve(_serve_query)
