"""Read the whole-number options of a job and their limits in a child process; cached."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec

from trimtab.cache import NUMBER_OPTIONS
from trimtab.errors import JobFailed
from trimtab.jobs.load import load_job
from trimtab.jobs.options import list_numbers
from trimtab.spec import Noun
from trimtab.trace.job_summary import TIMEOUT_S, NamedJob, named_job_key
from trimtab.trace.server import SendAnswer, ask, serve


class NumberOptions(Noun, frozen=True, kw_only=True):
    """The whole-number options of a job."""

    values: dict[str, int | None]
    """By name; None if not set."""
    limits: dict[str, int]
    """The largest value of an option, as far as the job states it."""
    reasons: dict[str, str]
    """What sets each limit, in words."""
    sample_length: int | None = None
    """Tokens per sample, given or assumed."""


def read_number_options(
    job: str, overrides: dict[str, Any] | None = None, *, cache: bool = True
) -> NumberOptions:
    """Return the whole-number options of a job, from the cache if its source is unchanged."""
    named = NamedJob(job=job, overrides=overrides or {})
    key = named_job_key(named)
    cached = NUMBER_OPTIONS.load(key, NumberOptions.from_json) if cache else None
    if cached is not None:
        return cached
    answer = ask(
        "trimtab.trace.number_options",
        named,
        {"CUDA_VISIBLE_DEVICES": ""},
        timeout_s=TIMEOUT_S,
        only_reads=True,
    )
    options = NumberOptions.from_builtins(answer["options"])
    NUMBER_OPTIONS.store(key, options.to_json())
    return options


def describe_numbers(job: Any, name: str) -> NumberOptions:
    """Return the whole-number options of a loaded job.

    A job may state `limits`: the largest value of an option, or a pair of that value and what sets it.
    """
    stated = getattr(job, "limits", None) or {}
    limits, reasons = {}, {}
    for option, limit in stated.items() if isinstance(stated, dict) else [("it", str(stated))]:
        value, reason = limit if isinstance(limit, tuple | list) and len(limit) == 2 else (limit, "")  # noqa: PLR2004
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise JobFailed(
                f"limits of job {name}",
                found=f"{option} is {limit!r}",
                cure='State them as limits = {"seq": 2048}.',
            )
        limits[str(option)] = value
        reasons[str(option)] = str(reason) or f"the job states {value} as the limit of {option}"
    length = getattr(job, "sample_length", None)
    return NumberOptions(
        values=list_numbers(job),
        limits=limits,
        reasons=reasons,
        sample_length=length if type(length) is int and length > 0 else None,
    )


def _answer_request(text: str, say: SendAnswer) -> None:
    warnings.simplefilter("ignore")
    named = NamedJob.from_json(text)
    numbers = describe_numbers(load_job(named.job, named.overrides), named.job)
    say(msgspec.json.encode({"options": numbers.to_builtins()}))


if __name__ == "__main__":
    serve(_answer_request)
