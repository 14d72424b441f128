"""Cache slow results on disk by kind and key, and in memory.

    plan = PLANS.load(key, Plan.from_json)    # None on a cache miss
    PLANS.store(key, plan.to_json())

A key is a fingerprint of everything that the result depends on. It contains all fields of a value except
those left out by name, so a field that is added later changes the key by default.

The folder is the one in TRIMTAB_CACHE, or `trimtab` in the user's cache folder. Every kind has a subfolder
and its own limit; beyond the limit the oldest entries are removed. Any failure to read is a cache miss.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import operator
import os
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from trimtab.files import write_atomic
from trimtab.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")

OLD_NAME = re.compile(r"([0-9a-f]{32}|plan|outlook|summary|additive|trainable|classes)-[0-9a-f-]+\.json")
"""Names of entries in the layout before subfolders, when all kinds were in one folder."""
ABANDONED_S = 3600.0
"""A temporary file that is older was left by a process that was killed."""


def cache_folder() -> Path:
    """Return the folder of all caches: TRIMTAB_CACHE, or `trimtab` in the user's cache folder."""
    folder = os.environ.get("TRIMTAB_CACHE")
    if folder:
        return Path(folder)
    from platformdirs import user_cache_path

    return user_cache_path("trimtab")


@dataclass(frozen=True)
class CacheKind:
    """Entries of one kind on disk, with their limits."""

    name: str
    max_entries: int | None = 200
    max_bytes: int | None = None

    @property
    def folder(self) -> Path:
        """The folder of these entries."""
        return cache_folder() / self.name

    def file(self, key: str) -> Path:
        """Return the file of an entry, whether it exists or not."""
        return self.folder / f"{key}.json"

    def has(self, key: str) -> bool:
        """Whether there is an entry; it may turn out to be damaged when it is loaded."""
        return self.file(key).is_file()

    def keys(self, prefix: str) -> list[str]:
        """Return the keys of all entries that begin with a prefix."""
        return sorted(file.stem for file in self.folder.glob(f"{prefix}*.json"))

    def load(self, key: str, decode: Callable[[bytes], T]) -> T | None:
        """Return the decoded entry; None on a cache miss. A damaged entry is a miss, and is removed."""
        file = self.file(key)
        try:
            data = file.read_bytes()
        except OSError:
            return None
        try:
            return decode(data)
        except Exception:  # noqa: BLE001 - a damaged entry is computed again
            with contextlib.suppress(OSError):
                file.unlink()
            return None

    def store(self, key: str, data: str | bytes) -> None:
        """Write an entry and evict the oldest ones; do nothing if the cache cannot be written."""
        with contextlib.suppress(OSError):
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                _remove_old_layout()
            write_atomic(self.file(key), data)
            self._evict()

    def _evict(self) -> None:
        """Remove the oldest entries beyond the limits, and temporary files of killed processes."""
        entries = []
        for file in self.folder.iterdir():
            # Another process may remove one in between.
            with contextlib.suppress(OSError):
                about = file.stat()
                if file.suffix == ".json":
                    entries.append((about.st_mtime_ns, file.name, about.st_size, file))
                elif file.suffix == ".tmp" and time.time() - about.st_mtime > ABANDONED_S:
                    file.unlink()
        total = 0
        for count, (_, _, size, file) in enumerate(sorted(entries, reverse=True), start=1):
            total += size
            too_many = self.max_entries is not None and count > self.max_entries
            # The newest entry stays, however large it is.
            if too_many or (self.max_bytes is not None and total > self.max_bytes and count > 1):
                with contextlib.suppress(OSError):
                    file.unlink()


def _remove_old_layout() -> None:
    """Remove entries that earlier versions left outside of subfolders."""
    for file in cache_folder().glob("*.json"):
        if OLD_NAME.fullmatch(file.name):
            with contextlib.suppress(OSError):
                file.unlink()


TRACES = CacheKind("traces", max_bytes=2 * GIB)
"""Traces by request. Earlier versions had all kinds in this folder: the limit removes what they left."""
FOLLOWED_SCRIPTS = CacheKind("scripts", max_bytes=1 * GIB)
"""What training commands did on the pretended GPU."""
PLANS = CacheKind("plans")
ESTIMATES = CacheKind("estimates", max_bytes=256 * MIB)
"""All estimates of one job by the planner, one entry a job."""
SEARCHES = CacheKind("searches", max_bytes=256 * MIB)
"""Searches of one question, which another deadline, price or run length has in common with it."""
LAYOUTS = CacheKind("layouts", max_bytes=64 * MIB)
"""Layouts of decoders that formulas have ranked."""
WORKLOADS = CacheKind("workloads")
"""Workloads that jobs describe."""
BATCH_LOSSES = CacheKind("batch_losses")
"""Whether the losses of jobs are additive over samples."""
JOB_FAULTS = CacheKind("job_faults")
"""Reasons why jobs cannot be trained."""
MODULE_CLASSES = CacheKind("module_classes")
MODEL_PARAMETERS = CacheKind("model_parameters")
"""Sizes of the parameters of jobs' models."""
NUMBER_OPTIONS = CacheKind("number_options")
"""Whole-number options of jobs, with their limits."""
TOKENS = CacheKind("text", max_entries=None)
"""Tokenised texts, a folder each. They have no limit: running jobs map them into memory."""


def fingerprint(*parts: Any) -> str:
    """Return 32 hex digits that change with any of the parts, in every field.

    >>> fingerprint("slm", {"seq": 8, "layers": 2}) == fingerprint("slm", {"layers": 2, "seq": 8})
    True
    """
    text = msgspec.json.encode(parts, enc_hook=str, order="deterministic")
    return hashlib.sha256(text).hexdigest()[:32]


def make_key(value: msgspec.Struct, leave_out: frozenset[str] = frozenset()) -> str:
    """Return a text of all fields of a value except those left out; a new field is included by default."""
    return _ENCODER.encode(_getter(type(value), leave_out)(value)).decode()


_ENCODER = msgspec.json.Encoder(enc_hook=str, order="deterministic")


@functools.cache
def _getter(kind: type[msgspec.Struct], leave_out: frozenset[str]) -> Callable[[Any], Any]:
    unknown = leave_out.difference(kind.__struct_fields__)
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(sorted(unknown))}")
    return operator.attrgetter(*(name for name in kind.__struct_fields__ if name not in leave_out))


@functools.cache
def code_fingerprint(leave_out: frozenset[str]) -> str:
    """Return a fingerprint of trimtab's own files; a package that is not left out by name is in it."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for entry in sorted(package.iterdir()):
        if entry.stem in leave_out or entry.name == "__pycache__":
            continue
        for file in sorted(entry.rglob("*")) if entry.is_dir() else [entry]:
            if file.suffix != ".pyc" and file.is_file():
                digest.update(f"\0{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:32]


class MemoryCache(Generic[T]):
    """A limited number of results in memory; the oldest is removed first."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the entry; compute it on a cache miss."""
        # Keys may be long tuples that are slow to hash, so look up once.
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = compute()
            if len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)
        return entry
