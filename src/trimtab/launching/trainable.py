"""Whether a job can be trained at all, asked of a child process before anything is started or queued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from trimtab.errors import JobFailed, TrimtabError
from trimtab.jobs.load import BUILT_IN, FOLDER, load
from trimtab.trace.child import Say, ask, serve
from trimtab.trace.summary import TIMEOUT_S, Named, fingerprint
from trimtab.trace.tracer import cache_folder, keep
from trimtab.training.task import check_trainable


def fault_of(job: str, options: dict[str, Any], *, cache: bool = True) -> JobFailed | None:
    """Why a run of the job would end before its first step; None where nothing is known against it.

    A job whose file is not here, or whose code fails, is not judged: its run will tell.
    """
    place = job.rpartition(":")[0]
    if job.startswith(FOLDER) or job.partition(":")[0] in BUILT_IN:
        return None
    if place.endswith(".py") and not Path(place).is_file():
        return None
    named = Named(job=job, overrides=options)
    try:
        said = _said(named, cache=cache)
    except TrimtabError:
        return None
    return JobFailed(**said) if said else None


def _said(named: Named, *, cache: bool) -> dict[str, str]:
    file = cache_folder() / f"trainable-{fingerprint(named)}.json"
    if cache and file.is_file():
        try:
            return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
        except (OSError, msgspec.DecodeError):
            file.unlink(missing_ok=True)
    answer = ask("trimtab.launching.trainable", named, {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=TIMEOUT_S)
    found = msgspec.convert(answer["fault"], dict[str, str])
    keep(file, msgspec.json.encode(found).decode())
    return found


def _work(text: str, say: Say) -> None:
    named = Named.from_json(text)
    job = load(named.job, named.overrides)
    fault: dict[str, str] = {}
    try:
        check_trainable(job, named.job)
    except JobFailed as error:
        fault = {"given": error.given, "found": error.found, "cure": error.cure}
    say(msgspec.json.encode({"fault": fault}))


if __name__ == "__main__":
    serve(_work)
