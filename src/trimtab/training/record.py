"""A run's folder as those read it who do not train: whatever is in it, and what is wrong with it.

A run may be under way, ended, killed in the middle of a line, of another version, or no run at all. Nothing
here raises for what a file holds; what could not be read is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from trimtab.spec import Attempt, Incident, Plan
from trimtab.spec.base import Noun, known_only, without_derived
from trimtab.training.folder import RunIdentity
from trimtab.training.meters import Line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

N = TypeVar("N", bound=Noun)

LOG, EVENTS, PLAN, IDENTITY, ATTEMPT, LOCK = (
    "log.jsonl",
    "events.jsonl",
    "plan.json",
    "run.json",
    "attempt.json",
    "run.lock",
)
MARKS = (LOG, EVENTS, PLAN)
"""What a folder has at least one of if it is a run's."""
LONGEST_LINE = 1 << 20
"""No line of ours is longer; whatever is, is read past in pieces."""
LARGEST_STEP = 2**53
"""Beyond it a step is no number that could be drawn."""
LARGEST_FILE = 64 << 20
"""A plan is far smaller; what is larger is not read."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run's folder says."""

    root: Path
    plan: Plan | None = None
    identity: RunIdentity | None = None
    attempt: Attempt | None = None
    lines: tuple[Line, ...] = ()
    """In the order of steps, each step once."""
    events: tuple[Incident, ...] = ()
    said: tuple[str, ...] = ()
    """What is missing or could not be read."""


@dataclass
class Tail:
    """A file of JSON lines that grows: each asking gives what has come since the last."""

    file: Path
    at: int = 0
    unread: int = 0
    """Lines that were no JSON object."""
    torn: bool = False
    """Whether the last line has no end yet."""
    example: str = ""
    """The first line that was JSON and nothing of ours."""

    def fresh(self, kind: type[N]) -> Iterator[N | None]:
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
                    yield from self._harder(piece, kind)

    def _harder(self, piece: bytes, kind: type[N]) -> Iterator[N | None]:
        """A line that is not just what this version writes."""
        value = _object(piece)
        if value is None:
            self.unread += bool(piece.strip())
            return
        try:
            yield kind.from_builtins(known_only(value, kind))
        except (msgspec.ValidationError, ValueError):
            self.example = self.example or _short(value)
            yield None


def _object(piece: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(piece)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_step(line: Line | None) -> bool:
    """Whether a line is of a step that can be counted."""
    return line is not None and 0 <= line.step < LARGEST_STEP


def read(root: Path) -> Record:
    """All that a run's folder says."""
    said: list[str] = []
    lines, events = _lines(root, said), _events(root, said)
    plan = _noun(root / PLAN, Plan, said)
    return Record(
        root=root,
        plan=plan,
        identity=_noun(root / IDENTITY, RunIdentity, said),
        attempt=attempt_of(root),
        lines=lines,
        events=events,
        said=tuple(said),
    )


def attempt_of(root: Path) -> Attempt | None:
    """What the last attempt noted; None where there is no such note, which is no loss to speak of."""
    return _noun(root / ATTEMPT, Attempt, [])


def plan_of(root: Path) -> Plan | None:
    """The plan that a run is under; None where it cannot be read."""
    return _noun(root / PLAN, Plan, [])


def _lines(root: Path, said: list[str]) -> tuple[Line, ...]:
    told = _told(root / LOG, Line, said)
    # A step that was taken again counts as it was taken last.
    found = {one.step: one for one in told if one is not None and is_step(one)}
    return tuple(found[step] for step in sorted(found))


def _events(root: Path, said: list[str]) -> tuple[Incident, ...]:
    return tuple(one for one in _told(root / EVENTS, Incident, said) if one is not None)


def _told(file: Path, kind: type[N], said: list[str]) -> list[N | None]:
    """The nouns of a file of lines, and what is wrong with it."""
    tail = Tail(file)
    try:
        found = list(tail.fresh(kind))
    except FileNotFoundError:
        said.append(f"{file.name} is missing")
        return []
    except OSError as error:
        said.append(f"{file.name} cannot be read ({error.strerror})")
        return []
    foreign = sum(one is None or (isinstance(one, Line) and not is_step(one)) for one in found)
    if foreign:
        such = f", such as {tail.example}" if tail.example else ""
        many = "a line is" if foreign == 1 else f"{foreign:,} lines are"
        said.append(f"{file.name}: {many} no {'step' if kind is Line else 'event'} of a run{such}")
    if tail.unread:
        many = "1 line" if tail.unread == 1 else f"{tail.unread:,} lines"
        said.append(f"{file.name}: {many} could not be read")
    if tail.torn:
        said.append(f"{file.name}: the last line is not whole and is left out")
    return found


def _short(value: dict[str, Any], most: int = 80) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= most else f"{text[:most]}..."


def _noun(file: Path, kind: type[N], said: list[str]) -> N | None:
    """A noun from its file; None, and a word about it, where there is none."""
    try:
        if file.stat().st_size > LARGEST_FILE:
            said.append(f"{file.name} is too large to be one of ours")
            return None
        data = file.read_bytes()
    except FileNotFoundError:
        said.append(f"{file.name} is missing")
        return None
    except OSError as error:
        said.append(f"{file.name} cannot be read ({error.strerror})")
        return None
    return noun_of(data, kind, said, name=file.name)


def noun_of(data: bytes, kind: type[N], said: list[str], *, name: str) -> N | None:
    """A noun from text, of another version too where only fields were added; None where it is none."""
    value = _object(data)
    if value is None:
        said.append(f"{name} is no JSON object, or not a whole one")
        return None
    kept = known_only(value, kind)
    try:
        found = kind.from_builtins(kept)
    except (msgspec.ValidationError, ValueError) as error:
        said.append(f"{name} is no {kind.__name__} of this version of trimtab: {error}")
        return None
    if kept != without_derived(value, kind):
        said.append(
            f"{name} was written by another version of trimtab; what this one does not know is left out"
        )
    return found
