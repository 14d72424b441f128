"""Asks a child process for Traces, and remembers the answers on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import TrimtabError
from trimtab.jobs import load
from trimtab.jobs.load import BUILT_IN, FOLDER
from trimtab.spec import Allocator, Trace
from trimtab.trace.forks import at_once
from trimtab.trace.standing import Standing
from trimtab.trace.worker import Requests
from trimtab.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.spec import Device, Noun, Setting
    from trimtab.trace.worker import Request

TIMEOUT_S = 600.0
COMPILED_TIMEOUT_S = 1800.0
"""The compiler's own work grows faster than the model does."""
MOST_CACHED = 200
"""Files of one kind that stay in the cache: traces, plans, summaries of jobs; the oldest make room."""
FAMILY = re.compile(r"[0-9a-f]{32}")
"""What the name of a trace begins with; all other kinds begin with their own name."""


def traced(request: Request, *, cache: bool = True) -> Trace:
    """The trace of a request, from the cache where job, code and versions are unchanged."""
    (found,) = traced_all(
        request.job,
        [request.setting],
        request.device,
        overrides=request.overrides,
        clip=request.clip,
        cache=cache,
    )
    if isinstance(found, TrimtabError):
        raise found
    return found


def traced_all(  # noqa: PLR0913 - what a Request has, with several settings
    job: str,
    settings: Sequence[Setting],
    device: Device,
    *,
    overrides: dict[str, Any] | None = None,
    clip: float | None = None,
    cache: bool = True,
    standing: Standing | None = None,
) -> list[Trace | TrimtabError]:
    """The traces of several settings of one job, or why there is none; one child traces what is not cached.

    What fails for all of them, such as a job that cannot be loaded, is raised. `standing` is a child that
    stays; without one, a child is started and ends.
    """
    requests = Requests(
        job=job,
        overrides=overrides or {},
        settings=tuple(settings),
        device=device,
        clip=clip,
        timeout_s=COMPILED_TIMEOUT_S if any(one.compile for one in settings) else TIMEOUT_S,
    )
    files = [cache_file(one) for one in requests.each()]
    found: dict[Path, Trace | TrimtabError] = {}
    if cache:
        found = {file: known for file in files if (known := remembered(file)) is not None}
    missing = {
        file: setting for file, setting in zip(files, requests.settings, strict=True) if file not in found
    }
    if missing:
        asked = requests.replace(settings=tuple(missing.values()))
        for file, answer in zip(missing, _asked(asked, standing), strict=True):
            found[file] = answer
            if isinstance(answer, Trace):
                remember(file, answer)
    return [found[file] for file in files]


def _asked(requests: Requests, standing: Standing | None) -> list[Trace | TrimtabError]:
    rounds = 1 + -(-len(requests.settings) // at_once())
    timeout_s = rounds * requests.timeout_s
    if standing is not None:
        answers = standing.ask_all(requests, timeout_s=timeout_s)
    else:
        with Standing() as alone:
            answers = alone.ask_all(requests, timeout_s=timeout_s)
    if len(answers) < len(requests.settings):
        # The job could not be loaded, or is not there.
        raise next(one for one in answers if isinstance(one, TrimtabError))
    return [one if isinstance(one, TrimtabError) else Trace.from_builtins(one["trace"]) for one in answers]


def remembered(file: Path) -> Trace | None:
    """A trace of the cache; one that cannot be read is removed."""
    if not file.is_file():
        return None
    try:
        return Trace.from_json(file.read_bytes(), origin=str(file))
    except TrimtabError:
        file.unlink(missing_ok=True)
        return None


def cache_file(request: Request) -> Path:
    """Where the trace of a request is kept: one name for the family of all micro-batches, then the size."""
    return cache_folder() / f"{family(request)}-{request.setting.micro_batch}.json"


def relatives(request: Request) -> dict[int, Path]:
    """The cached traces that differ from a request in the micro-batch alone, by micro-batch."""
    name = family(request)
    found = {file.stem.rpartition("-")[2]: file for file in cache_folder().glob(f"{name}-*.json")}
    return {int(text): file for text, file in sorted(found.items()) if text.isdecimal()}


def cache_folder() -> Path:
    """Where traces are kept; TRIMTAB_CACHE names another place."""
    named = os.environ.get("TRIMTAB_CACHE")
    if named:
        return Path(named)
    from platformdirs import user_cache_path

    return user_cache_path("trimtab") / "traces"


def family(request: Request) -> str:
    """A fingerprint of what a trace depends on beside the micro-batch: request, job's source and versions."""
    setting = request.setting
    # A step is traced without accumulation, and the allocator comes in when the trace is replayed.
    alike = setting.replace(
        micro_batch=1,
        accumulation=1,
        global_batch=setting.data_parallel,
        allocator=Allocator.DEFAULT,
        workers=0,
        sync_batchnorm=setting.sync_batchnorm and setting.gpus > 1,
    )
    return fingerprint(request.job, request.replace(setting=alike).to_json())


def fingerprint(job: str, question: str) -> str:
    """What an answer about a job depends on: the question, the job's source, and the versions in use."""
    from importlib.metadata import PackageNotFoundError, version

    parts = [question, VERSION, sys.version]
    for package in ("torch", "transformers", "peft"):
        try:
            parts.append(version(package))
        except PackageNotFoundError:
            parts.append("")
    parts += [_source(folder) for folder in _sources(job)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _sources(job: str) -> list[Path]:
    """The files whose text the trace depends on: trimtab's tracer, and the job's file with its neighbours."""
    here = Path(__file__).parent
    own = [*sorted(here.glob("*.py")), *sorted((here.parent / "engine").glob("*.py"))]
    if job.startswith(FOLDER) or job.partition(":")[0] in BUILT_IN:
        own += sorted(Path(load.__file__).parent.glob("*.py"))
        return [*own, Path(job.removeprefix(FOLDER)) / "config.json"] if job.startswith(FOLDER) else own
    place = Path(job.rpartition(":")[0])
    if place.suffix == ".py" and place.is_file():
        return [*own, *sorted(place.resolve().parent.glob("*.py"))[:200]]
    from importlib.util import find_spec

    try:
        found = find_spec(job.rpartition(":")[0])
    except (ImportError, ValueError):
        found = None
    return [*own, Path(found.origin)] if found and found.origin else own


def _source(file: Path) -> str:
    try:
        return f"{file}:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    except OSError:
        return str(file)


def keep(file: Path, text: str) -> None:
    """Write a file of the cache whole or not at all; a cache that cannot be written is no reason to fail."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(file)
        _make_room(file)


def _make_room(file: Path) -> None:
    """Remove the oldest files of the same kind, where there are too many; other kinds stay."""
    alike = []
    for other in file.parent.glob("*.json"):
        # Another process may remove one in between.
        with contextlib.suppress(OSError):
            if _kind(other) == _kind(file):
                alike.append((other.stat().st_mtime_ns, other.name, other))
    for _, _, old in sorted(alike)[:-MOST_CACHED]:
        old.unlink(missing_ok=True)


def _kind(file: Path) -> str:
    """Return what a file of the cache holds: trace, plan, summary and so on."""
    first = file.stem.partition("-")[0]
    return "trace" if FAMILY.fullmatch(first) else first


def remember(file: Path, found: Noun) -> None:
    """Write a trace beside the others."""
    keep(file, found.to_json())
