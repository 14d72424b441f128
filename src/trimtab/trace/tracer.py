"""Asks a child process for a Trace, and remembers the answer on disk."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab import __version__, errors
from trimtab.errors import JobFailed, TrimtabError
from trimtab.spec import Trace

if TYPE_CHECKING:
    from trimtab.trace.worker import Request

TIMEOUT_S = 600
MOST_CACHED = 200
"""Traces kept on disk; the oldest make room."""


def traced(request: Request, *, cache: bool = True) -> Trace:
    """The trace of a request, from the cache where job, code and versions are unchanged."""
    file = cache_folder() / f"{_fingerprint(request)}.json"
    if cache and file.is_file():
        try:
            return Trace.from_json(file.read_bytes(), origin=str(file))
        except TrimtabError:
            file.unlink(missing_ok=True)
    found = _ask(request)
    _remember(file, found)
    return found


def _ask(request: Request) -> Trace:
    """Run the child, and turn what it says, or its end, into a Trace or an error."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trimtab.trace.worker"],
            input=request.to_json(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            # Nothing is downloaded while planning, and no GPU is touched.
            env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
    except subprocess.TimeoutExpired as error:
        raise JobFailed(
            f"job {request.job}",
            found=f"tracing two steps took more than {TIMEOUT_S} s",
            cure="Try a smaller --micro-batch, or look for loops over data in loss().",
        ) from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise _died(request, done) from None
    if "error" in answer:
        told = answer["error"]
        raise getattr(errors, told["kind"])(told["given"], found=told["found"], cure=told["cure"])
    return Trace.from_builtins(answer["trace"])


def _died(request: Request, done: subprocess.CompletedProcess[str]) -> JobFailed:
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing")
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return JobFailed(
        f"job {request.job}",
        found=f"the process that traced it ended with {how}: {last.strip()[:300]}",
        cure="If the job runs on a GPU, this is a bug in trimtab: please report it with the job.",
    )


def cache_folder() -> Path:
    """Where traces are kept; TRIMTAB_CACHE names another place."""
    named = os.environ.get("TRIMTAB_CACHE")
    if named:
        return Path(named)
    from platformdirs import user_cache_path

    return user_cache_path("trimtab") / "traces"


def _fingerprint(request: Request) -> str:
    """What the answer depends on: the request, the job's source, and the versions that take part."""
    from importlib.metadata import PackageNotFoundError, version

    parts = [request.to_json(), __version__, sys.version]
    for package in ("torch", "transformers", "peft"):
        try:
            parts.append(version(package))
        except PackageNotFoundError:
            parts.append("")
    parts += [_source(folder) for folder in _sources(request.job)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _sources(job: str) -> list[Path]:
    """The files whose text the trace depends on: trimtab's tracer, and the job's file with its neighbours."""
    own = sorted(Path(__file__).parent.glob("*.py"))
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


def _remember(file: Path, found: Trace) -> None:
    """Write the trace beside the others; a cache that cannot be written is no reason to fail."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(found.to_json(), encoding="utf-8")
        scratch.replace(file)
        kept = sorted(file.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)
        for old in kept[:-MOST_CACHED]:
            old.unlink(missing_ok=True)
    except OSError:
        return
