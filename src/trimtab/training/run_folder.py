"""Run folder: RunFolder writes it during training, read_run() reads it later without raising.

It has the run's identity, its plan, a line for each step and each event, and its checkpoints. Opening it
raises everything that can be wrong with it, before any training. Only rank 0 writes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import threading
import time
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from trimtab.errors import EnvironmentFault, TrimtabError, WrongUse
from trimtab.files import read_json_lines, write_atomic, write_synced
from trimtab.spec import Attempt, Incident, Plan, Summary
from trimtab.spec.base import LARGEST, Noun, check_minimum, remove_derived_keys, remove_unknown_keys
from trimtab.training.step_log import StepLine
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_PROBE_BYTES = 1 << 20
_DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RUN_ONLY = ("log.jsonl", "checkpoints")
"""Only runs have these; a folder with them but without a run.json was not written by trimtab."""
LOG_FILE, EVENTS_FILE, PLAN_FILE, IDENTITY_FILE, LOCK_FILE = (
    "log.jsonl",
    "events.jsonl",
    "plan.json",
    "run.json",
    "run.lock",
)
ATTEMPT_FILE = "attempt.json"
"""The last attempt: when it began, and whether it ended in order."""
SUMMARY_FILE = "summary.json"
"""Written after the last step of a run."""
READ_FILES = (LOG_FILE, EVENTS_FILE, PLAN_FILE, IDENTITY_FILE, ATTEMPT_FILE, SUMMARY_FILE)
"""Files that readers of a run open."""
STAGES_FILE = "stages.json"
"""A training in stages has this file in its folder, and its runs in subfolders."""
_USE_ANOTHER_FOLDER = "Give another folder with --out."


class RunIdentity(Noun, frozen=True, kw_only=True):
    """What two attempts must have in common to be the same run; not devices, strategy or micro-batch."""

    job: str
    """The name as given; the folder of its file is not compared."""
    options: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies an empty dict given as a default
    """Job options that were set from outside."""
    global_batch: int
    seed: int = 0
    file: str = ""
    """Path of the file with the job's code; empty if unknown, or if the job comes with trimtab."""
    digest: str = ""
    """SHA-256 of that file."""

    def faults(self) -> list[str]:
        """List what is wrong: a global batch below 1."""
        return check_minimum(1, global_batch=self.global_batch)

    def differences(self, other: RunIdentity) -> list[str]:
        """Return a phrase for each difference to another run.

        >>> run = RunIdentity(job="a.py:A", global_batch=8)
        >>> run.differences(RunIdentity(job="b/a.py:A", global_batch=16))
        ['global_batch 8, not 16']
        """
        mine, its = msgspec.to_builtins(self), msgspec.to_builtins(other)
        mine["job"], its["job"] = (values["job"].rpartition("/")[2] for values in (mine, its))
        return [
            f"{name} {value}, not {its[name]}"
            for name, value in mine.items()
            if value != its[name] and name not in ("file", "digest")
        ]

    def with_file(self, file: Path | None) -> RunIdentity:
        """Return a copy with the path and digest of the job's file; unchanged if it cannot be read."""
        if file is None:
            return self
        try:
            return self.replace(file=str(file), digest=sha256(file.read_bytes()).hexdigest())
        except OSError:
            return self

    def is_namesake(self, other: RunIdentity) -> bool:
        """Return whether another run's job has the same name but a different path and different content.

        A file that was only edited or only moved is the same job. Unknown files are not compared.
        """
        return bool(self.digest and other.digest and self.file != other.file and self.digest != other.digest)


@dataclass(kw_only=True)
class RunFolder:
    """An open run folder.

    folder = RunFolder.open("runs/a", identity=identity, plan=plan)
    folder.log_step({"step": 1, "loss": 2.5})
    folder.log_event(incident)
    """

    root: Path
    main: bool = True
    """Whether this process writes; other ranks only use the paths."""
    damage: tuple[str, ...] = ()
    """What its files had lost when it was opened."""
    _lock: int | None = field(default=None, repr=False)
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(  # noqa: PLR0913 - by keyword
        cls,
        out: str | Path,
        *,
        identity: RunIdentity,
        plan: Noun,
        main: bool = True,
        needs_bytes: int = 0,
        patience_s: float = 15.0,
    ) -> RunFolder:
        """Create the folder or reopen it; raise what is wrong with it.

        `needs_bytes` must be free on its disk. If another process has the folder locked, wait up to
        `patience_s`: an earlier attempt may be ending.
        """
        folder = cls(root=Path(out).absolute(), main=main)
        if not main:
            return folder
        folder._claim(identity, needs_bytes, patience_s)
        folder.damage = list_damage(folder.root)
        try:
            folder._write_run_files(identity, plan)
        except BaseException:
            folder.close()
            raise
        return folder

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.root / "checkpoints"

    @property
    def plan_file(self) -> Path:
        """File with the current plan."""
        return self.root / PLAN_FILE

    @property
    def log_file(self) -> Path:
        """File with a JSON line for each step."""
        return self.root / LOG_FILE

    @property
    def events_file(self) -> Path:
        """File with a JSON line for each incident."""
        return self.root / EVENTS_FILE

    def log_step(self, line: dict[str, Any]) -> None:
        """Append the line of a step."""
        self._append(self.log_file, msgspec.json.encode(line))

    def log_event(self, incident: Incident) -> None:
        """Append an incident; may be called from any thread."""
        self._append(self.events_file, incident.to_json().encode())

    def read_lines(self) -> list[dict[str, Any]]:
        """Return the logged steps, in order; skip lines that are no steps."""
        return [line for line in _read_objects(self.log_file) if is_step_object(line)]

    def read_events(self) -> list[Incident]:
        """Return the incidents, in order; skip lines of other versions that cannot be read."""
        events = []
        for line in _read_objects(self.events_file):
            try:
                events.append(Incident.from_builtins(line))
            except (msgspec.ValidationError, RecursionError):
                continue
        return events

    def rewind(self, step: int) -> int:
        """Remove the log lines of steps after `step`, which will be repeated; return how many there were."""
        if not self.main or not self.log_file.exists():
            return 0
        lines = self.read_lines()
        remaining = [line for line in lines if line.get("step", 0) <= step]
        if len(remaining) < len(lines):
            text = b"".join(msgspec.json.encode(line) + b"\n" for line in remaining)
            write_atomic(self.log_file, text, sync=True)
        return len(lines) - len(remaining)

    def write_plan(self, plan: Noun) -> None:
        """Write the plan that the run has from now on."""
        if self.main:
            write_atomic(self.plan_file, plan.to_json(indent=2).encode() + b"\n", sync=True)

    def close(self) -> None:
        """Release the lock, so that another process can open the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self, identity: RunIdentity, needs_bytes: int, patience_s: float) -> None:
        """Create and lock the folder; raise if it belongs to another run, cannot be written or is full."""
        given = f"--out {self.root}"
        if self.root.exists() and not self.root.is_dir():
            raise WrongUse(given, found="it is a file", cure=_USE_ANOTHER_FOLDER)
        try:
            self._refuse_others(identity)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_file(self.root / LOCK_FILE, patience_s)
            probe = self.root / f".probe-{os.getpid()}"
            try:
                write_synced(probe, bytes(_PROBE_BYTES))
            finally:
                probe.unlink(missing_ok=True)
            free = shutil.disk_usage(self.root).free
        except OSError as error:
            self.close()
            raise make_folder_error(given, error) from error
        if self._lock is None:
            holder = _read_text(self.root / LOCK_FILE) or "another process"
            raise EnvironmentFault(
                given,
                found=f"{holder} is training into it",
                cure="Wait for it to end, stop it, or give another folder with --out.",
            )
        if free < needs_bytes:
            self.close()
            raise EnvironmentFault(
                given,
                found=f"{format_bytes(free)} are free there, and the checkpoints of this run take "
                f"{format_bytes(needs_bytes)}",
                cure="Free some room, or give a folder on another disk with --out.",
            )

    def _refuse_others(self, identity: RunIdentity) -> None:
        """Raise if the folder belongs to another run."""
        given, file = f"--out {self.root}", self.root / IDENTITY_FILE
        if (self.root / STAGES_FILE).exists():
            raise WrongUse(given, found="it is the folder of a training in stages", cure=_USE_ANOTHER_FOLDER)
        if not file.exists():
            strange = [name for name in _RUN_ONLY if (self.root / name).exists()]
            # A first attempt may have been killed after it created the folder and before it wrote run.json.
            if "checkpoints" in strange and not any((self.root / "checkpoints").iterdir()):
                strange.remove("checkpoints")
            if strange:
                raise WrongUse(
                    given,
                    found=f"there is a {strange[0]} in it that no run of ours wrote",
                    cure=_USE_ANOTHER_FOLDER,
                )
            return
        before = RunIdentity.from_json(file.read_bytes(), origin=str(file))
        differences = before.differences(identity)
        if differences:
            raise WrongUse(
                given,
                found=f"it is another run's: that one has {'; '.join(differences)}",
                cure="Give another folder with --out, or resume with what that run has.",
            )
        if before.is_namesake(identity) and not any(self.checkpoints.glob("step-*")):
            # With a checkpoint, loading checks whether the weights match.
            raise WrongUse(
                given,
                found=f"a run of {before.file} was begun in it, which ended before its first checkpoint; you "
                f"asked for {identity.file}, another job of the same name",
                cure="Give another folder with --out, or remove this one if that run is not wanted any more.",
            )

    def _write_run_files(self, identity: RunIdentity, plan: Noun) -> None:
        try:
            file = self.root / IDENTITY_FILE
            before = RunIdentity.from_json(file.read_bytes(), origin=str(file)) if file.exists() else None
            # Written again if the job's file was moved or edited, so that run.json has its current path.
            if before is None or (before != identity and not before.is_namesake(identity)):
                write_atomic(file, identity.to_json(indent=2).encode() + b"\n", sync=True)
            self.write_plan(plan)
            for file in (self.log_file, self.events_file):
                _remove_torn_line(file)
        except OSError as error:
            raise make_folder_error(f"--out {self.root}", error) from error

    def _append(self, file: Path, line: bytes) -> None:
        """Append a line with a single write: a crash can only leave the last line incomplete."""
        if not self.main:
            return
        with self._writing:
            handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(handle, line + b"\n")
            except OSError as error:
                # A full disk must not stop training because of a log line; checkpoints report it.
                if error.errno not in _DISK_FULL_CODES:
                    raise
            finally:
                os.close(handle)


def make_folder_error(given: str, error: OSError) -> TrimtabError:
    """Turn an OSError on a run folder into a TrimtabError."""
    if error.errno in _DISK_FULL_CODES:
        return EnvironmentFault(
            given,
            found="its disk is full, or your share of it is",
            cure="Free some room, or give a folder on another disk with --out.",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentFault(
            given, found=f"it cannot be written: {error.strerror}", cure=_USE_ANOTHER_FOLDER
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return WrongUse(given, found="a part of its path is a file, not a folder", cure=_USE_ANOTHER_FOLDER)
    return EnvironmentFault(given, found=f"it cannot be used: {error.strerror}", cure=_USE_ANOTHER_FOLDER)


def is_disk_full(error: OSError) -> bool:
    """Return whether an error means that the disk or the quota is full."""
    return error.errno in _DISK_FULL_CODES


def _lock_file(file: Path, patience_s: float, wait: Callable[[float], None] = time.sleep) -> int | None:
    """Lock a file; return its handle, or None if another process does not release it in time.

    POSIX locks belong to the process: forked workers do not hold the lock after its end.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                return handle  # the file system has no locks
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                os.close(handle)
                raise
            if time.monotonic() >= deadline:
                os.close(handle)
                return None
            wait(min(0.2, patience_s))
        else:
            os.ftruncate(handle, 0)
            os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
            return handle


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _read_objects(file: Path) -> list[dict[str, Any]]:
    return read_json_lines(file.read_bytes()) if file.exists() else []


def _remove_torn_line(file: Path) -> None:
    """Remove an incomplete last line, so that the next line is not appended to it."""
    if not file.exists():
        return
    data = file.read_bytes()
    if data and not data.endswith(b"\n"):
        write_atomic(file, data[: data.rfind(b"\n") + 1], sync=True)


# Below: the read-only, fault-tolerant view. A run may be in progress, ended, killed in the middle of a line,
# or written by another version. Nothing here raises because of a file's content; problems go to `notes`.

N = TypeVar("N", bound=Noun)

RUN_FILES = (LOG_FILE, EVENTS_FILE, PLAN_FILE)
"""A run folder has at least one of these."""
LONGEST_LINE = 1 << 20
"""trimtab writes no longer line; a longer one is skipped in pieces of this size."""
LARGEST_STEP = 2**53
"""Larger step numbers are invalid: a float64 cannot represent them exactly."""
_STEP_NUMBERS = (
    "loss",
    "time_s",
    "samples",
    "samples_per_s",
    "tokens_per_s",
    "allocated_bytes",
    "reserved_bytes",
    "data_wait_s",
    "gpus",
)
"""Fields of a step that readers calculate with."""
_TORN = "the last line is not whole and is left out"
LARGEST_FILE = 64 << 20
"""Larger JSON files are not read; a plan is far smaller."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The content of a run folder."""

    root: Path
    plan: Plan | None = None
    identity: RunIdentity | None = None
    attempt: Attempt | None = None
    lines: tuple[StepLine, ...] = ()
    """In the order of steps, each step once."""
    events: tuple[Incident, ...] = ()
    notes: tuple[str, ...] = ()
    """What is missing or could not be read, in sentences."""


@dataclass
class JsonLineTail:
    """Follows a growing file of JSON lines: each call of read_new() returns the lines since the last."""

    file: Path
    at: int = 0
    unread: int = 0
    """Lines that were no JSON object."""
    torn: bool = False
    """Whether the last line is incomplete."""
    example: str = ""
    """The first line that was a JSON object but could not be converted."""

    def read_new(self, kind: type[N]) -> Iterator[N | None]:
        """Yield the objects of new complete lines, None for a JSON object of another kind; raise OSError."""
        decoder = msgspec.json.Decoder(kind)
        with self.file.open("rb") as stream:
            size = stream.seek(0, 2)
            if size < self.at:
                # The file was rewritten, as a resumed run does: read it from the start.
                self.at, self.unread = 0, 0
            stream.seek(self.at)
            self.torn = False
            while piece := stream.readline(LONGEST_LINE):
                if not piece.endswith(b"\n") and len(piece) < LONGEST_LINE:
                    self.torn = True
                    return
                self.at = stream.tell()
                try:
                    yield decoder.decode(piece)
                except (msgspec.DecodeError, ValueError, RecursionError):
                    yield from self._decode_leniently(piece, kind)

    def _decode_leniently(self, piece: bytes, kind: type[N]) -> Iterator[N | None]:
        """Decode a line that strict decoding rejects: it may have fields of another version."""
        value = _parse_object(piece)
        if value is None:
            self.unread += bool(piece.strip())
            return
        try:
            yield kind.from_builtins(remove_unknown_keys(value, kind))
        except (msgspec.ValidationError, ValueError):
            self.example = self.example or _shorten(value)
            yield None


def _parse_object(piece: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(piece)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_step_object(value: dict[str, Any]) -> bool:
    """Return whether a JSON object can be a line of log.jsonl, of this version or another.

    >>> is_step_object({"step": 3, "loss": None}), is_step_object({"step": 3, "time_s": "soon"})
    (True, False)
    """
    step = value.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < LARGEST_STEP:
        return False
    numbers = (value.get(name) for name in _STEP_NUMBERS)
    return all(
        number is None or (isinstance(number, int | float) and abs(number) < LARGEST) for number in numbers
    )


def is_step(line: StepLine | None) -> bool:
    """Return whether a line has a valid step number."""
    return line is not None and 0 <= line.step < LARGEST_STEP


def read_run(root: Path) -> RunRecord:
    """Read a run folder; never raises because of its content."""
    notes: list[str] = []
    lines, events = _read_steps(root, notes), _read_events(root, notes)
    plan = _read_noun(root / PLAN_FILE, Plan, notes)
    identity = _read_noun(root / IDENTITY_FILE, RunIdentity, notes)
    attempt = _read_optional(root / ATTEMPT_FILE, Attempt, notes)
    _compare_summary(root, lines[-1].step if lines else 0, len(events), notes)
    return RunRecord(
        root=root,
        plan=plan,
        identity=identity,
        attempt=attempt,
        lines=lines,
        events=events,
        notes=tuple(notes),
    )


def read_attempt(root: Path) -> Attempt | None:
    """Return the record of the last attempt; None if it is missing or cannot be read."""
    return _read_noun(root / ATTEMPT_FILE, Attempt, [])


def read_run_plan(root: Path) -> Plan | None:
    """Return the run's current plan; None if it is missing or cannot be read."""
    return _read_noun(root / PLAN_FILE, Plan, [])


def list_damage(root: Path) -> tuple[str, ...]:
    """List what the files of a run have lost, without reading a long log: files and lines that are cut.

    A file that is missing is not listed: the run may not have written it yet. Files that have not changed
    since are not read again.
    """
    return _find_damage(root, tuple(_stamp(root / name) for name in READ_FILES))


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return what changes with a file: the time of its last change, and its size; None without a file."""
    try:
        state = file.stat()
    except OSError:
        return None
    return state.st_ctime_ns, state.st_size


@lru_cache(maxsize=1024)
def _find_damage(root: Path, _: tuple[tuple[int, int] | None, ...]) -> tuple[str, ...]:
    notes: list[str] = []
    for name, kind in ((PLAN_FILE, Plan), (IDENTITY_FILE, RunIdentity), (ATTEMPT_FILE, Attempt)):
        _read_optional(root / name, kind, notes)
    step, events = 0, 0
    lines = _read_last_lines(root / LOG_FILE, notes)
    if (root / SUMMARY_FILE).exists():
        for line in read_json_lines(lines):
            step = line["step"] if is_step_object(line) else step
        events = sum(event is not None for event in _read_nouns(root / EVENTS_FILE, Incident, []))
    _read_last_lines(root / EVENTS_FILE, notes)
    _compare_summary(root, step, events, notes)
    return tuple(notes)


def _read_last_lines(file: Path, notes: list[str]) -> bytes:
    """Return the last lines of a file; append to `notes` that the last one is incomplete."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - LONGEST_LINE))
            data = stream.read(LONGEST_LINE)
    except FileNotFoundError:
        return b""
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror})")
        return b""
    if data and not data.endswith(b"\n"):
        notes.append(f"{file.name}: {_TORN}")
    return data[: data.rfind(b"\n") + 1]


def _compare_summary(root: Path, step: int, events: int, notes: list[str]) -> None:
    """Append to `notes` that a finished run has lost steps or events which its summary counts."""
    summary = _read_optional(root / SUMMARY_FILE, Summary, notes)
    if summary is None:
        return
    if step < summary.steps:
        notes.append(f"{LOG_FILE} ends at step {step:,}, but {SUMMARY_FILE} counts {summary.steps:,} steps")
    counted = sum(summary.incidents.values())
    if events < counted:
        notes.append(f"{EVENTS_FILE} has {events:,} events, but {SUMMARY_FILE} counts {counted:,}")


def _read_optional(file: Path, kind: type[N], notes: list[str]) -> N | None:
    """Read an object from a file that a run may not have written yet."""
    return _read_noun(file, kind, notes) if file.exists() else None


def _read_steps(root: Path, notes: list[str]) -> tuple[StepLine, ...]:
    lines = _read_nouns(root / LOG_FILE, StepLine, notes)
    # Of a step that was repeated, the last line counts.
    by_step = {line.step: line for line in lines if line is not None and is_step(line)}
    return tuple(by_step[step] for step in sorted(by_step))


def _read_events(root: Path, notes: list[str]) -> tuple[Incident, ...]:
    return tuple(event for event in _read_nouns(root / EVENTS_FILE, Incident, notes) if event is not None)


def _read_nouns(file: Path, kind: type[N], notes: list[str]) -> list[N | None]:
    """Return the objects of a file of JSON lines; append what is wrong with it to `notes`."""
    tail = JsonLineTail(file)
    try:
        nouns = list(tail.read_new(kind))
    except FileNotFoundError:
        notes.append(f"{file.name} is missing")
        return []
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror})")
        return []
    foreign = sum(noun is None or (isinstance(noun, StepLine) and not is_step(noun)) for noun in nouns)
    if foreign:
        such = f", such as {tail.example}" if tail.example else ""
        many = "a line is" if foreign == 1 else f"{foreign:,} lines are"
        notes.append(f"{file.name}: {many} no {'step' if kind is StepLine else 'event'} of a run{such}")
    if tail.unread:
        many = "1 line" if tail.unread == 1 else f"{tail.unread:,} lines"
        notes.append(f"{file.name}: {many} could not be read")
    if tail.torn:
        notes.append(f"{file.name}: {_TORN}")
    return nouns


def _shorten(value: dict[str, Any], most: int = 80) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= most else f"{text[:most]}..."


def _read_noun(file: Path, kind: type[N], notes: list[str]) -> N | None:
    """Read an object from its JSON file; if that fails, return None and append the reason to `notes`."""
    try:
        if file.stat().st_size > LARGEST_FILE:
            notes.append(f"{file.name} is too large to be one of ours")
            return None
        data = file.read_bytes()
    except FileNotFoundError:
        notes.append(f"{file.name} is missing")
        return None
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror})")
        return None
    return parse_noun(data, kind, notes, name=file.name)


def parse_noun(data: bytes, kind: type[N], notes: list[str], *, name: str) -> N | None:
    """Parse an object from JSON text; ignore fields that other versions added.

    If that fails, return None and append the reason to `notes`.
    """
    value = _parse_object(data)
    if value is None:
        notes.append(f"{name} is no JSON object, or not a whole one")
        return None
    recognized = remove_unknown_keys(value, kind)
    try:
        noun = kind.from_builtins(recognized)
    except (msgspec.ValidationError, ValueError) as error:
        notes.append(f"{name} is no {kind.__name__} of this version of trimtab: {error}")
        return None
    if recognized != remove_derived_keys(value, kind):
        notes.append(
            f"{name} was written by another version of trimtab; what this one does not know is left out"
        )
    return noun
