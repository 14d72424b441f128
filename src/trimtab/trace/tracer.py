"""Asks a child process for a Trace, and remembers the answer on disk."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab import __version__
from trimtab.errors import TrimtabError
from trimtab.spec import Trace
from trimtab.trace.child import ask

if TYPE_CHECKING:
    from trimtab.trace.worker import Request

TIMEOUT_S = 600
COMPILED_TIMEOUT_S = 1800
"""The compiler's own work grows faster than the model does."""
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
    with tempfile.TemporaryDirectory(prefix="trimtab-") as scratch:
        # No GPU is touched, and torch.compile leaves nothing that a real run could find.
        env = {"CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_CACHE_DIR": scratch}
        limit = COMPILED_TIMEOUT_S if request.setting.compile else TIMEOUT_S
        answer = ask("trimtab.trace.worker", request, env, timeout_s=limit)
    found = Trace.from_builtins(answer["trace"])
    _remember(file, found)
    return found


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
