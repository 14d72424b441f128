"""Query a job in a child process that runs its code, and cache the answers.

There are two queries: can the job be trained, and what are the classes of its modules? A job whose file is
missing or whose code fails has no answer; its run reports the error.
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
    """A query (TRAINABLE or CLASSES) and its job."""

    what: str
    job: str
    overrides: dict[str, Any]


def find_job_fault(job: str, options: dict[str, Any], *, cache: bool = True) -> JobFailed | None:
    """Return the error that a run of the job would end with before its first step; None if none is known."""
    if comes_with_trimtab(job):
        return None
    error = _ask_job(JobQuery(what=TRAINABLE, job=job, overrides=options), cache=cache)
    return JobFailed(**error) if error else None


def list_module_classes(job: str, options: dict[str, Any], *, cache: bool = True) -> dict[str, str]:
    """Return the class of every module of the job's model by its path; empty if the job has no answer."""
    return _ask_job(JobQuery(what=CLASSES, job=job, overrides=options), cache=cache)


def _ask_job(query: JobQuery, *, cache: bool) -> dict[str, str]:
    place = query.job.rpartition(":")[0]
    if place.endswith(".py") and not Path(place).is_file():
        return {}
    kind, key = CACHES[query.what], named_job_key(NamedJob(job=query.job, overrides=query.overrides))
    cached = kind.load(key, msgspec.json.Decoder(dict[str, str]).decode) if cache else None
    if cached is not None:
        return cached
    try:
        reply = ask("trimtab.training.job_queries", query, {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=TIMEOUT_S)
    except TrimtabError:
        return {}
    answer = msgspec.convert(reply["answer"], dict[str, str])
    kind.store(key, msgspec.json.encode(answer))
    return answer


def _find_training_fault(job: Any, name: str) -> dict[str, str]:
    """Return the three parts of the error of a job that cannot be trained; else an empty dict."""
    try:
        check_trainable(job, name)
    except JobFailed as error:
        return {"given": error.given, "found": error.found, "cure": error.cure}
    return {}


def _list_classes(job: Any, _: str) -> dict[str, str]:
    """Return the module classes by path, from a model on the meta device."""
    import torch

    with torch.device("meta"):
        model = job.model()
    return {path: type(module).__name__ for path, module in model.named_modules() if path}


ANSWERS: dict[str, Callable[[Any, str], dict[str, str]]] = {
    TRAINABLE: _find_training_fault,
    CLASSES: _list_classes,
}


def _serve_query(text: str, say: SendAnswer) -> None:
    query = JobQuery.from_json(text)
    job = load_job(query.job, query.overrides)
    say(msgspec.json.encode({"answer": ANSWERS[query.what](job, query.job)}))


if __name__ == "__main__":
    serve(_serve_query)
