"""Get traces of a job, from the cache or from a worker process; compute cache keys of jobs and traces."""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.cache import TRACES, code_fingerprint, fingerprint, make_key
from trimtab.errors import TrimtabError
from trimtab.jobs.registry import FOLDER, base_name, comes_with_trimtab, job_flags
from trimtab.spec import Trace
from trimtab.trace.common_devices import common_facts
from trimtab.trace.forks import max_forks
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess
from trimtab.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.spec import Device, Setting
    from trimtab.trace.request import TraceRequest
    from trimtab.trace.server import Answer

TIMEOUT_S = 600.0
COMPILED_TIMEOUT_S = 1800.0
"""The compile time grows faster than the model."""
NOT_TRACED = frozenset({"micro_batch", "accumulation", "global_batch", "allocator", "workers"})
"""Fields of a Setting that are not in the cache key of a trace.

A step is traced without accumulation, and the allocator matters only when the trace is replayed. The
micro-batch is a suffix of the key, so that the traces of one family can be listed together.
"""
NOT_TRACING = frozenset(
    {
        *("api", "cli", "configs", "diagnosis", "exams", "calculator", "launching", "calibration", "pages"),
        *("planner", "predict", "probe", "render", "training", "watching"),
    }
)
"""Packages of trimtab that no trace depends on."""


SEPARATED: set[str] = set()
"""Keys of families whose traces serve one GPU only. The cache on disk has an empty entry for each."""
SEPARATED_SUFFIX = "-one-device"


def trace_setting(request: TraceRequest, *, cache: bool = True) -> Trace:
    """Return the trace of a request, from the cache if job, code and versions are unchanged."""
    (trace,) = trace_settings(
        request.job,
        [request.setting],
        request.device,
        overrides=request.overrides,
        clip=request.clip,
        cache=cache,
    )
    if isinstance(trace, TrimtabError):
        raise trace
    return trace


def trace_settings(  # noqa: PLR0913 - the fields of a TraceRequest, with several settings
    job: str,
    settings: Sequence[Setting],
    device: Device,
    *,
    overrides: dict[str, Any] | None = None,
    clip: float | None = None,
    cache: bool = True,
    worker: WorkerProcess | None = None,
    timeout_s: float | None = None,
) -> list[Trace | TrimtabError]:
    """Return the trace or the error of each setting of a job; trace settings that are not cached.

    An error that concerns all settings, such as a job that cannot be loaded, is raised. Without `worker`,
    a worker process is started for this call. All of it may take `timeout_s` seconds; None: the usual limit
    for each setting.
    """
    requests = TraceRequests(
        job=job,
        overrides=overrides or {},
        settings=tuple(settings),
        device=device,
        clip=clip,
        timeout_s=COMPILED_TIMEOUT_S if any(setting.compile for setting in settings) else TIMEOUT_S,
    )
    keys = [trace_key(request) for request in requests.each()]
    answers: dict[str, Trace | TrimtabError] = {}
    if cache:
        answers = {key: trace for key in keys if (trace := load_trace(key)) is not None}
    missing = {key: request for key, request in zip(keys, requests.each(), strict=True) if key not in answers}
    if missing:
        uncached = requests.replace(settings=tuple(request.setting for request in missing.values()))
        made = _ask_worker(uncached, worker, timeout_s)
        for (key, request), answer in zip(missing.items(), made, strict=True):
            if isinstance(answer, TrimtabError):
                answers[key] = answer
                continue
            answers[key] = trace = Trace.from_builtins(answer["trace"])
            if answer["is_for_one_device"]:
                _separate_devices(request)
            TRACES.store(trace_key(request), trace.to_json())
    return [answers[key] for key in keys]


def _ask_worker(
    requests: TraceRequests, worker: WorkerProcess | None, timeout_s: float | None
) -> list[Answer]:
    rounds = 1 + -(-len(requests.settings) // max_forks())
    timeout_s = rounds * requests.timeout_s if timeout_s is None else timeout_s
    if worker is not None:
        answers = worker.ask_all(requests, timeout_s=timeout_s)
    else:
        with WorkerProcess() as own_worker:
            answers = own_worker.ask_all(requests, timeout_s=timeout_s)
    if len(answers) < len(requests.settings):
        # The job could not be loaded, or does not exist.
        raise next(answer for answer in answers if isinstance(answer, TrimtabError))
    return answers


def trace_key(request: TraceRequest) -> str:
    """Return the cache key of a trace: its family, then the micro-batch."""
    return f"{family_key(request)}-{request.setting.micro_batch}"


def load_trace(key: str) -> Trace | None:
    """Return a trace from the cache; None on a cache miss."""
    return TRACES.load(key, Trace.from_json)


def cached_family(request: TraceRequest) -> dict[int, Trace]:
    """Return the cached traces that differ from a request in the micro-batch alone, by micro-batch."""
    family = family_key(request)
    sizes = (key.removeprefix(f"{family}-") for key in TRACES.keys(f"{family}-"))
    traces = {int(size): load_trace(f"{family}-{size}") for size in sizes if size.isdecimal()}
    return {size: trace for size, trace in traces.items() if trace is not None}


def family_key(request: TraceRequest) -> str:
    """Return a cache key of everything that a trace depends on, except the micro-batch.

    GPUs of one compute capability share it, unless the trace is known to serve one of them only.
    """
    shared = _shared_key(request)
    if request.setting.compile or shared in SEPARATED or TRACES.has(shared + SEPARATED_SUFFIX):
        return fingerprint(shared, make_key(request.device))
    return shared


def _shared_key(request: TraceRequest) -> str:
    setting = request.setting
    # One device has no other ranks to synchronise with.
    alone = {"sync_batchnorm"} if setting.gpus == 1 else set()
    return job_key(
        request.job,
        make_key(request, frozenset({"setting", "device"})),
        common_facts(request.device),
        make_key(setting, NOT_TRACED | alone),
        files=list_option_files(request.job, request.overrides),
    )


def _separate_devices(request: TraceRequest) -> None:
    """Give the traces of a request's family a key for each GPU from now on."""
    shared = _shared_key(request)
    SEPARATED.add(shared)
    TRACES.store(shared + SEPARATED_SUFFIX, "{}")


def list_option_files(job: str, overrides: dict[str, Any]) -> list[Path]:
    """Return the files that options of a built-in job name, and whose content shapes its batch."""
    flags = {flag.attribute for flag in job_flags() if flag.may_be_file and base_name(job) in flag.jobs}
    texts = [value for name, value in overrides.items() if name in flags and isinstance(value, str)]
    return [file for text in texts if (file := Path(text).expanduser()).is_file()]


def job_key(job: str, *question: Any, files: Sequence[Path] = ()) -> str:
    """Return a cache key for a question about a job; it changes with the job, our code and versions.

    `files` are further files that the answer depends on.
    """
    versions = {"trimtab": VERSION, "python": sys.version}
    versions |= {package: _find_version(package) for package in ("torch", "transformers", "peft")}
    sources = {str(file): _digest(file) for file in (*_sources(job), *files)}
    return fingerprint(job, question, versions, code_fingerprint(NOT_TRACING), sources)


@cache
def _find_version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _sources(job: str) -> list[Path]:
    """Return the files of a job outside of trimtab: its file with its neighbours, or its config.json."""
    if job.startswith(FOLDER):
        return [Path(job.removeprefix(FOLDER)) / "config.json"]
    if comes_with_trimtab(job):
        return []
    place = Path(job.rpartition(":")[0])
    if place.suffix == ".py" and place.is_file():
        return sorted(place.resolve().parent.glob("*.py"))[:200]
    from importlib.util import find_spec

    try:
        spec = find_spec(job.rpartition(":")[0])
    except (ImportError, ValueError):
        spec = None
    return [Path(spec.origin)] if spec and spec.origin else []


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
