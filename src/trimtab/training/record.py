"""A run's folder as those read it who do not train: whatever is in it, and what is wrong with it.

A run may be under way, ended, killed in the middle of a line, of another version, or no run at all. Nothing
here raises for what a file holds; what could not be read is said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from trimtab.spec import Incident, Plan
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


class Attempt(Noun, frozen=True, kw_only=True):
    """What the last attempt noted of itself."""

    attempt: int = 1
    procs: int = 1
    state: str = ""
    """running or ended."""
    at_s: float | None = None


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

    def fresh(self) -> Iterator[dict[str, Any]]:
        """The objects of new whole lines; raises OSError where the file cannot be read."""
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
                value = _object(piece)
                if value is not None:
                    yield value
                elif piece.strip():
                    self.unread += 1


def _object(piece: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(piece)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def line_of(value: dict[str, Any]) -> Line | None:
    """The line of a step, whatever else a later version may have put into it; None where it is none."""
    try:
        found = Line.from_builtins(known_only(value, Line))
    except (msgspec.ValidationError, ValueError):
        return None
    return found if 0 <= found.step < LARGEST_STEP else None


def event_of(value: dict[str, Any]) -> Incident | None:
    """The incident of a line; None where it is none."""
    try:
        return Incident.from_builtins(known_only(value, Incident))
    except (msgspec.ValidationError, ValueError):
        return None


def read(root: Path) -> Record:
    """All that a run's folder says."""
    said: list[str] = []
    lines, events = _lines(root, said), _events(root, said)
    plan = _noun(root / PLAN, Plan, said)
    return Record(
        root=root,
        plan=plan,
        identity=_noun(root / IDENTITY, RunIdentity, said),
        attempt=_noun(root / ATTEMPT, Attempt, said, wanted=False),
        lines=lines,
        events=events,
        said=tuple(said),
    )


def _lines(root: Path, said: list[str]) -> tuple[Line, ...]:
    found: dict[int, Line] = {}
    foreign = []
    for value in _told(root / LOG, said):
        one = line_of(value)
        if one is None:
            foreign.append(value)
        else:
            # A step that was taken again counts as it was taken last.
            found[one.step] = one
    said += _foreign(LOG, "step", foreign)
    return tuple(found[step] for step in sorted(found))


def _events(root: Path, said: list[str]) -> tuple[Incident, ...]:
    told = [(value, event_of(value)) for value in _told(root / EVENTS, said)]
    said += _foreign(EVENTS, "event", [value for value, one in told if one is None])
    return tuple(one for _, one in told if one is not None)


def _foreign(name: str, what: str, values: list[dict[str, Any]]) -> list[str]:
    """A word on lines that are JSON and not ours, with the first of them."""
    if not values:
        return []
    many = "a line is" if len(values) == 1 else f"{len(values):,} lines are"
    return [f"{name}: {many} no {what} of a run, such as {_short(values[0])}"]


def _told(file: Path, said: list[str]) -> list[dict[str, Any]]:
    """The objects of a file of lines, and what is wrong with it."""
    tail = Tail(file)
    try:
        found = list(tail.fresh())
    except FileNotFoundError:
        said.append(f"{file.name} is missing")
        return []
    except OSError as error:
        said.append(f"{file.name} cannot be read ({error.strerror})")
        return []
    if tail.unread:
        many = f"{tail.unread} line{'s' * (tail.unread > 1)}"
        said.append(
            f"{file.name}: {many} could not be read and {'are' if tail.unread > 1 else 'is'} left out"
        )
    if tail.torn:
        said.append(f"{file.name}: the last line is not whole and is left out")
    return found


def _short(value: dict[str, Any], most: int = 80) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= most else f"{text[:most]}..."


def _noun(file: Path, kind: type[N], said: list[str], *, wanted: bool = True) -> N | None:
    """A noun from its file; None, and a word about it, where there is none."""
    try:
        if file.stat().st_size > LARGEST_FILE:
            said.append(f"{file.name} is too large to be one of ours")
            return None
        data = file.read_bytes()
    except FileNotFoundError:
        said += [f"{file.name} is missing"] * wanted
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
