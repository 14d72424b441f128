"""The folder of a run: who it belongs to, its plan, one line a step, one line an event, its checkpoints.

Everything that can be wrong with a folder is notes when it is opened, before any training. Only the first
rank writes.
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
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from trimtab.errors import EnvironmentFault, TrimtabError, WrongUse
from trimtab.files import read_json_lines, write_atomic, write_synced
from trimtab.spec import Attempt, Incident, Plan
from trimtab.spec.base import Noun, check_minimum, remove_derived_keys, remove_unknown_keys
from trimtab.training.step_log import StepLine
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_PROBE_BYTES = 1 << 20
_DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RUN_ONLY = ("log.jsonl", "checkpoints")
"""What only a run leaves behind; a folder with them and without a run.json is somebody else's."""
ATTEMPT_FILE = "attempt.json"
"""What the next attempt finds: whether the last one ended in order."""
STAGES_FILE = "stages.json"
"""What a training in stages leaves in its folder; its runs are in folders below."""
_USE_ANOTHER_FOLDER = "Give another folder with --out."


class RunIdentity(Noun, frozen=True, kw_only=True):
    """What makes two trainings the same run. Devices, strategy and micro-batch do not."""

    job: str
    """As it was named; the folder that its file is in does not count."""
    options: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies an empty dict given as a default
    """Members of the job that were set from outside."""
    global_batch: int
    seed: int = 0
    file: str = ""
    """That the job is written in, with its folder; empty where it is not known, or the job is ours."""
    digest: str = ""
    """Of what is in that file."""

    def faults(self) -> list[str]:
        """A step takes something."""
        return check_minimum(1, global_batch=self.global_batch)

    def differences(self, other: RunIdentity) -> list[str]:
        """A phrase for each thing in which another run differs.

        >>> one = RunIdentity(job="a.py:A", global_batch=8)
        >>> one.differences(RunIdentity(job="b/a.py:A", global_batch=16))
        ['global_batch 8, not 16']
        """
        mine, its = msgspec.to_builtins(self), msgspec.to_builtins(other)
        mine["job"], its["job"] = (one["job"].rpartition("/")[2] for one in (mine, its))
        return [
            f"{name} {told}, not {its[name]}"
            for name, told in mine.items()
            if told != its[name] and name not in ("file", "digest")
        ]

    def with_file(self, file: Path | None) -> RunIdentity:
        """With the file that the job is written in, as it is now; without, where it cannot be read."""
        if file is None:
            return self
        try:
            return self.replace(file=str(file), digest=sha256(file.read_bytes()).hexdigest())
        except OSError:
            return self

    def is_namesake(self, other: RunIdentity) -> bool:
        """Whether the job of another run only has the same name: another file, with something else in it.

        A file that was edited, or moved as it is, is the same; what is not known does not count.
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
    """Whether this process writes; the others only know where things are."""
    _lock: int | None = field(default=None, repr=False)
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(  # noqa: PLR0913 - all that an opening asks, by name
        cls,
        out: str | Path,
        *,
        identity: RunIdentity,
        plan: Noun,
        main: bool = True,
        needs_bytes: int = 0,
        patience_s: float = 15.0,
    ) -> RunFolder:
        """Make the folder or take it up again; raises what is wrong with it.

        `needs_bytes` have to be free on its disk. Another process that still holds the folder is given
        `patience_s` to end: an earlier attempt may be on its way out.
        """
        folder = cls(root=Path(out).absolute(), main=main)
        if not main:
            return folder
        folder._claim(identity, needs_bytes, patience_s)
        try:
            folder._write_run_files(identity, plan)
        except BaseException:
            folder.close()
            raise
        return folder

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are kept."""
        return self.root / "checkpoints"

    @property
    def plan_file(self) -> Path:
        """The plan that the run is under now."""
        return self.root / "plan.json"

    @property
    def log_file(self) -> Path:
        """One JSON line a step."""
        return self.root / "log.jsonl"

    @property
    def events_file(self) -> Path:
        """One JSON line an incident."""
        return self.root / "events.jsonl"

    def log_step(self, line: dict[str, Any]) -> None:
        """Add the line of a step."""
        self._append(self.log_file, msgspec.json.encode(line))

    def log_event(self, incident: Incident) -> None:
        """Add an incident; any thread may."""
        self._append(self.events_file, incident.to_json().encode())

    def read_lines(self) -> list[dict[str, Any]]:
        """What was logged, in order."""
        return _read_objects(self.log_file)

    def read_events(self) -> list[Incident]:
        """What happened, in order; lines of other versions that cannot be read are left out."""
        found = []
        for line in _read_objects(self.events_file):
            try:
                found.append(Incident.from_builtins(line))
            except msgspec.ValidationError:
                continue
        return found

    def rewind(self, step: int) -> int:
        """Drop the log lines of steps after `step`, which will be taken again; how many there were."""
        if not self.main or not self.log_file.exists():
            return 0
        lines = self.read_lines()
        kept = [line for line in lines if line.get("step", 0) <= step]
        if len(kept) < len(lines):
            write_atomic(self.log_file, b"".join(msgspec.json.encode(one) + b"\n" for one in kept), sync=True)
        return len(lines) - len(kept)

    def write_plan(self, plan: Noun) -> None:
        """Write the plan that the run is under from now on."""
        if self.main:
            write_atomic(self.plan_file, plan.to_json(indent=2).encode() + b"\n", sync=True)

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self, identity: RunIdentity, needs_bytes: int, patience_s: float) -> None:
        """The folder is there, may be written, has room, is of this run, and no one else's now."""
        given = f"--out {self.root}"
        if self.root.exists() and not self.root.is_dir():
            raise WrongUse(given, found="it is a file", cure=_USE_ANOTHER_FOLDER)
        try:
            self._refuse_others(identity)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_file(self.root / "run.lock", patience_s)
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
            holder = _read_text(self.root / "run.lock") or "another process"
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
        """An error where the folder is of another run."""
        given, file = f"--out {self.root}", self.root / "run.json"
        if (self.root / STAGES_FILE).exists():
            raise WrongUse(given, found="it is the folder of a training in stages", cure=_USE_ANOTHER_FOLDER)
        if not file.exists():
            strange = [name for name in _RUN_ONLY if (self.root / name).exists()]
            # A first attempt that was ended between making the folder and writing run.json left it empty.
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
            # With a checkpoint, its weights would tell whether they fit.
            raise WrongUse(
                given,
                found=f"a run of {before.file} was begun in it, which ended before its first checkpoint; you "
                f"asked for {identity.file}, another job of the same name",
                cure="Give another folder with --out, or remove this one if that run is not wanted any more.",
            )

    def _write_run_files(self, identity: RunIdentity, plan: Noun) -> None:
        try:
            file = self.root / "run.json"
            before = RunIdentity.from_json(file.read_bytes(), origin=str(file)) if file.exists() else None
            # Again where the job has moved or was edited since, so that it is known where it is now.
            if before is None or (before != identity and not before.is_namesake(identity)):
                write_atomic(file, identity.to_json(indent=2).encode() + b"\n", sync=True)
            self.write_plan(plan)
            for file in (self.log_file, self.events_file):
                _remove_torn_line(file)
        except OSError as error:
            raise make_folder_error(f"--out {self.root}", error) from error

    def _append(self, file: Path, line: bytes) -> None:
        """One line in one write: a crash leaves it whole or leaves it out, or torn at the very end."""
        if not self.main:
            return
        with self._writing:
            handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(handle, line + b"\n")
            except OSError as error:
                # Nothing that is only told may stop what is being told of; a full disk is notes elsewhere.
                if error.errno not in _DISK_FULL_CODES:
                    raise
            finally:
                os.close(handle)


def make_folder_error(given: str, error: OSError) -> TrimtabError:
    """What an error of the file system means for a folder."""
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
    """Whether there was no room left."""
    return error.errno in _DISK_FULL_CODES


def _lock_file(file: Path, patience_s: float, wait: Callable[[float], None] = time.sleep) -> int | None:
    """Hold a file for this process alone; None where another one does not let go of it in time.

    A lock of this kind is the process's own: workers that it forked do not hold it after its end.
    """
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                return handle  # a file system without locks: nothing to be learnt from it
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
    """Take a torn last line off, so that the next one does not run into it."""
    if not file.exists():
        return
    data = file.read_bytes()
    if data and not data.endswith(b"\n"):
        write_atomic(file, data[: data.rfind(b"\n") + 1], sync=True)


# A run's folder as those read it who do not train: whatever is in it, and what is wrong with it.
#
# A run may be under way, ended, killed in the middle of a line, of another version, or no run at all. Nothing
# here raises for what a file holds; what could not be read is notes.


N = TypeVar("N", bound=Noun)

LOG_FILE, EVENTS_FILE, PLAN_FILE, IDENTITY_FILE, ATTEMPT_FILE, LOCK_FILE = (
    "log.jsonl",
    "events.jsonl",
    "plan.json",
    "run.json",
    "attempt.json",
    "run.lock",
)
RUN_FILES = (LOG_FILE, EVENTS_FILE, PLAN_FILE)
"""What a folder has at least one of if it is a run's."""
LONGEST_LINE = 1 << 20
"""No line of ours is longer; whatever is, is read past in pieces."""
LARGEST_STEP = 2**53
"""Beyond it a step is no number that could be drawn."""
LARGEST_FILE = 64 << 20
"""A plan is far smaller; what is larger is not read."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run's folder says."""

    root: Path
    plan: Plan | None = None
    identity: RunIdentity | None = None
    attempt: Attempt | None = None
    lines: tuple[StepLine, ...] = ()
    """In the order of steps, each step once."""
    events: tuple[Incident, ...] = ()
    notes: tuple[str, ...] = ()
    """What is missing or could not be read."""


@dataclass
class JsonLineTail:
    """A file of JSON lines that grows: each asking gives what has come since the last."""

    file: Path
    at: int = 0
    unread: int = 0
    """Lines that were no JSON object."""
    torn: bool = False
    """Whether the last line has no end yet."""
    example: str = ""
    """The first line that was JSON and nothing of ours."""

    def read_new(self, kind: type[N]) -> Iterator[N | None]:
        """The nouns of new whole lines, None for one that is JSON and no such noun; raises OSError."""
        decoder = msgspec.json.Decoder(kind)
        with self.file.open("rb") as stream:
            size = stream.seek(0, 2)
            if size < self.at:
                # Written anew, as a resumed run does: what is known of it is void.
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
        """A line that is not just what this version writes."""
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_step(line: StepLine | None) -> bool:
    """Whether a line is of a step that can be counted."""
    return line is not None and 0 <= line.step < LARGEST_STEP


def read_run(root: Path) -> RunRecord:
    """All that a run's folder says."""
    notes: list[str] = []
    lines, events = _read_steps(root, notes), _read_events(root, notes)
    plan = _read_noun(root / PLAN_FILE, Plan, notes)
    return RunRecord(
        root=root,
        plan=plan,
        identity=_read_noun(root / IDENTITY_FILE, RunIdentity, notes),
        attempt=read_attempt(root),
        lines=lines,
        events=events,
        notes=tuple(notes),
    )


def read_attempt(root: Path) -> Attempt | None:
    """What the last attempt noted; None where there is no such note, which is no loss to speak of."""
    return _read_noun(root / ATTEMPT_FILE, Attempt, [])


def read_run_plan(root: Path) -> Plan | None:
    """The plan that a run is under; None where it cannot be read."""
    return _read_noun(root / PLAN_FILE, Plan, [])


def _read_steps(root: Path, notes: list[str]) -> tuple[StepLine, ...]:
    told = _read_nouns(root / LOG_FILE, StepLine, notes)
    # A step that was taken again counts as it was taken last.
    found = {n.step: n for n in told if n is not None and is_step(n)}
    return tuple(found[step] for step in sorted(found))


def _read_events(root: Path, notes: list[str]) -> tuple[Incident, ...]:
    return tuple(one for one in _read_nouns(root / EVENTS_FILE, Incident, notes) if one is not None)


def _read_nouns(file: Path, kind: type[N], notes: list[str]) -> list[N | None]:
    """The nouns of a file of lines, and what is wrong with it."""
    tail = JsonLineTail(file)
    try:
        found = list(tail.read_new(kind))
    except FileNotFoundError:
        notes.append(f"{file.name} is missing")
        return []
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror})")
        return []
    foreign = sum(one is None or (isinstance(one, StepLine) and not is_step(one)) for one in found)
    if foreign:
        such = f", such as {tail.example}" if tail.example else ""
        many = "a line is" if foreign == 1 else f"{foreign:,} lines are"
        notes.append(f"{file.name}: {many} no {'step' if kind is StepLine else 'event'} of a run{such}")
    if tail.unread:
        many = "1 line" if tail.unread == 1 else f"{tail.unread:,} lines"
        notes.append(f"{file.name}: {many} could not be read")
    if tail.torn:
        notes.append(f"{file.name}: the last line is not whole and is left out")
    return found


def _shorten(value: dict[str, Any], most: int = 80) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= most else f"{text[:most]}..."


def _read_noun(file: Path, kind: type[N], notes: list[str]) -> N | None:
    """A noun from its file; None, and a word about it, where there is none."""
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
    """A noun from text, of another version too where only fields were added; None where it is none."""
    value = _parse_object(data)
    if value is None:
        notes.append(f"{name} is no JSON object, or not a whole one")
        return None
    kept = remove_unknown_keys(value, kind)
    try:
        found = kind.from_builtins(kept)
    except (msgspec.ValidationError, ValueError) as error:
        notes.append(f"{name} is no {kind.__name__} of this version of trimtab: {error}")
        return None
    if kept != remove_derived_keys(value, kind):
        notes.append(
            f"{name} was written by another version of trimtab; what this one does not know is left out"
        )
    return found
