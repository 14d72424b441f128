"""Query a job in a child process that runs its code, and cache the answers.

There are three queries: can the job be trained, what are the classes of its modules, and what are its
parameters? A job whose file is
missing or whose code fails has no answer; its run reports the error.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from trimtab.cache import JOB_FAULTS, MODEL_PARAMETERS, MODULE_CLASSES
from trimtab.errors import JobFailed, TrimtabError
from trimtab.jobs.load import load_job
from trimtab.jobs.registry import comes_with_trimtab
from trimtab.spec import Noun
from trimtab.trace.job_summary import TIMEOUT_S, NamedJob, named_job_key
from trimtab.trace.server import SendAnswer, ask, serve
from trimtab.training.task import check_trainable

if TYPE_CHECKING:
    from collections.abc import Callable

TRAINABLE, CLASSES, PARAMETERS = "trainable", "classes", "parameters"
CACHES = {TRAINABLE: JOB_FAULTS, CLASSES: MODULE_CLASSES, PARAMETERS: MODEL_PARAMETERS}


class JobQuery(Noun, frozen=True, kw_only=True):
    """A query (TRAINABLE, CLASSES or PARAMETERS) and its job."""

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


class ParameterFacts(NamedTuple):
    """What is known of a parameter of the job's model."""

    numbers: int
    """How many numbers it has."""
    bytes: int
    is_trained: bool
    is_matrix: bool


def list_parameters(job: str, options: dict[str, Any], *, cache: bool = True) -> dict[str, ParameterFacts]:
    """Return the parameters of the job's model by name; empty if the job has no answer."""
    answer = _ask_job(JobQuery(what=PARAMETERS, job=job, overrides=options), cache=cache)
    facts = {name: [int(word) for word in text.split()] for name, text in answer.items()}
    return {
        name: ParameterFacts(numbers, size, bool(trained), bool(matrix))
        for name, (numbers, size, trained, matrix) in facts.items()
    }


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


def _list_parameters(job: Any, _: str) -> dict[str, str]:
    """Return numbers of each parameter, from a model on the meta device."""
    import torch

    with torch.device("meta"):
        model = job.model()
    return {
        name: f"{value.numel()} {value.numel() * value.element_size()} {int(value.requires_grad)} "
        f"{int(value.dim() > 1)}"
        for name, value in model.named_parameters()
    }


ANSWERS: dict[str, Callable[[Any, str], dict[str, str]]] = {
    TRAINABLE: _find_training_fault,
    CLASSES: _list_classes,
    PARAMETERS: _list_parameters,
}


def _serve_query(text: str, say: SendAnswer) -> None:
    query = JobQuery.from_json(text)
    job = load_job(query.job, query.overrides)
    say(msgspec.json.encode({"answer": ANSWERS[query.what](job, query.job)}))


if __name__ == "__main__":
    serve(_serve_query)
