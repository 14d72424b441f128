"""Reads a log of any size, in bounded memory, for lines that tell a kind or a fact."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from trimtab.diagnosis.kinds import load_patterns
from trimtab.diagnosis.lines import find_rank, find_time, rank_from_path, split_label, strip_escapes
from trimtab.diagnosis.sieve import NeedleSieve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.diagnosis.kinds import LogPattern

FIRST_CHUNK, CHUNK = 1 << 18, 8 << 20
"""Bytes read at once. The first are few: what every line says is known after them, and not sought again."""
AHEAD = 1 << 16
"""Bytes after a place that may belong to what begins there."""
BEHIND = 1 << 14
"""Bytes before a place that may tell its time and its traceback."""
LINE = 1 << 13
"""Bytes of a line that are looked at, before and after a needle: a progress bar may be one endless line."""
MOST_SIGHTINGS = 1000
"""Of one kind in one file; it is not looked for any more after that."""
MOST_SIGNS = 20
"""More lines of progress than this after a traceback: somebody caught it. Fewer may be other ranks'."""
TRACEBACK = b"Traceback (most recent call last)"
PYTHON_ERROR, INTERRUPTED = "python-error", "interrupted"

_FRAME = re.compile(r'File "([^"\n]{1,300})", line (\d+)(?:, in (\S{1,100}))?')
_ERROR = re.compile(r"([A-Za-z_][\w.]{1,120}?)(?:: .*)?$")
_ALIVE = re.compile(
    r"(?:\b(?:loss|step|iter|iteration|epoch)\w*\b[\"']?\s*[:=]?\s*[\[\"']?\d|\d(?:\.\d+)?(?:it/s|s/it))"
)
"""What a run says that goes on."""


@dataclass(frozen=True, kw_only=True)
class Sighting:
    """A place in a log that tells a kind or a fact."""

    of: str
    file: str
    line: int
    text: str
    captured: dict[str, str] = field(default_factory=dict)
    rank: int | None = None
    at: float | None = None
    """When, by the nearest time before it; see `lines.time_of`."""
    frames: tuple[str, ...] = ()
    """The functions of the traceback that it ends, outermost first."""
    is_fact: bool = False


class LogScanner:
    """The state of reading one log."""

    def __init__(self, name: str, rank: int | None = None) -> None:
        self.name = name
        self.rank = rank if rank is not None else rank_from_path(name)
        self.counts: Counter[str] = Counter()
        self.lines = 0
        self.bytes = 0
        self._by_needle, self._sieve = _load_sieve()

    def scan(self, stream: Callable[[int], bytes], say: Callable[[int], None]) -> Iterator[Sighting]:
        """Every sighting, in the order of the log. `stream(n)` gives up to n more bytes, none at the end."""
        data, begin, line = b"", 0, 1
        while True:
            fresh = stream(CHUNK if self.bytes else FIRST_CHUNK)
            self.bytes += len(fresh)
            data += fresh
            end = max(begin, len(data) - AHEAD) if fresh else len(data)
            counted, seen = begin, set[tuple[int, str]]()
            for at, needle in self._sieve.hits(data, begin, end):
                line += data.count(b"\n", counted, at)
                counted = at
                yield from self._at(data, at, needle, line, seen)
            line += data.count(b"\n", counted, end)
            self._drop_common()
            say(self.bytes)
            if not fresh:
                self.lines = line - (data[-1:] in (b"\n", b""))
                return
            kept = max(0, end - BEHIND)
            data, begin = data[kept:], end - kept

    def _at(
        self, data: bytes, at: int, needle: bytes, line: int, seen: set[tuple[int, str]]
    ) -> Iterator[Sighting]:
        if needle == TRACEBACK:
            if self.counts[PYTHON_ERROR] < MOST_SIGHTINGS:
                yield from self._traceback(data, at, line)
            return
        start = _line_start(data, at)
        for pattern in self._by_needle[needle]:
            if (start, pattern.of) in seen or self.counts[pattern.of] >= MOST_SIGHTINGS:
                continue
            raw = data[start : _line_end(data, at, pattern.lines)]
            if not pattern.may_match(raw):
                continue
            text = strip_lines(raw.decode("utf-8", "replace"))
            match = pattern.search(text)
            if match is None:
                continue
            seen.add((start, pattern.of))
            self.counts[pattern.of] += 1
            behind = data[max(0, start - BEHIND) : start]
            yield self._sighting(pattern, match, text, line, behind)

    def _sighting(
        self, pattern: LogPattern, match: re.Match[str], text: str, line: int, behind: bytes
    ) -> Sighting:
        captured = {name: said.strip() for name, said in match.groupdict().items() if said}
        whole = text.split("\n", 1)[0]
        own = captured.get("rank", "")
        rank = int(own) if own.isdecimal() and len(own) < 8 else find_rank(whole)  # noqa: PLR2004
        earlier = strip_escapes(behind.decode("utf-8", "replace"))
        return Sighting(
            of=pattern.of,
            file=self.name,
            line=line,
            text=text.replace("\n", " ") if pattern.lines > 1 else whole,
            captured=captured,
            rank=rank if rank is not None else self.rank,
            at=find_time(whole) or find_time(earlier[-2048:]),
            frames=() if pattern.is_fact else _find_frames(earlier, split_label(whole)[0]),
            is_fact=pattern.is_fact,
        )

    def _traceback(self, data: bytes, at: int, line: int) -> Iterator[Sighting]:
        """The error that a traceback ends in, unless the run went on after it."""
        start = _line_start(data, at)
        text = data[start : at + AHEAD].decode("utf-8", "replace")
        # What a progress bar has overwritten is not read, and does not count as a line.
        lines = [
            strip_escapes(line_text.removesuffix("\r").rpartition("\r")[2]) for line_text in text.split("\n")
        ]
        label = split_label(lines[0])[0]
        frames: list[str] = []
        for number, raw in enumerate(lines[1:], 1):
            own, rest = split_label(raw)
            if own != label and own:
                continue
            rest = rest.removeprefix(" ") if own else rest
            if frame := _FRAME.search(rest):
                frames.append(f"{frame.group(1)}:{frame.group(2)}, in {frame.group(3) or '?'}")
            if not rest.strip() or rest[0] in " \t|+" or not frames:
                continue
            match = _ERROR.match(rest)
            goes_on = _count_signs_of_life(lines[number + 1 :], label)
            if match is None or goes_on > MOST_SIGNS:
                return
            self.counts[PYTHON_ERROR] += 1
            yield Sighting(
                of=INTERRUPTED if match.group(1) == "KeyboardInterrupt" else PYTHON_ERROR,
                file=self.name,
                line=line + number,
                text=rest,
                captured={
                    "error": rest,
                    "name": match.group(1),
                    "frame": frames[-1],
                    "signs_of_life": str(goes_on),
                },
                rank=find_rank(lines[0]) if label else self.rank,
                at=find_time(strip_escapes(data[max(0, start - 2048) : start].decode("utf-8", "replace"))),
                frames=tuple(frames),
            )
            return

    def _drop_common(self) -> None:
        """Stop looking for what was seen often enough: a log may say it in every line."""
        full = {name for name, count in self.counts.items() if count >= MOST_SIGHTINGS}
        if not full:
            return
        left = {
            needle: kept
            for needle, found in self._by_needle.items()
            if (kept := [pattern for pattern in found if pattern.of not in full])
        }
        if sum(map(len, left.values())) < sum(map(len, self._by_needle.values())):
            self._by_needle = left
            self._sieve = NeedleSieve([*left, *([] if PYTHON_ERROR in full else [TRACEBACK])])


@cache
def _load_sieve() -> tuple[dict[bytes, list[LogPattern]], NeedleSieve]:
    """All patterns by their needles, and the sieve for those: replaced by a scanner, and never changed."""
    found: dict[bytes, list[LogPattern]] = {}
    for pattern in load_patterns():
        found.setdefault(pattern.needle, []).append(pattern)
    return found, NeedleSieve([*found, TRACEBACK])


def _line_start(data: bytes, at: int) -> int:
    lowest = max(0, at - LINE)
    return max(data.rfind(b"\n", lowest, at), data.rfind(b"\r", lowest, at), lowest - 1) + 1


def _line_end(data: bytes, at: int, lines: int) -> int:
    """Where a line ends, or so many. Carriage returns end lines: progress bars are made of them."""
    stop, limit = at, min(len(data), at + LINE)
    for _ in range(lines):
        feed = data.find(b"\n", stop, limit)
        bar = data.find(b"\r", stop, limit if feed < 0 else feed)
        stop = bar if bar >= 0 else feed
        if stop < 0:
            return limit
        stop += 1
    return stop


def strip_lines(text: str) -> str:
    """Lines without escapes, the line feeds kept."""
    parts = text.rstrip("\r\n").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(strip_escapes(part) for part in parts)


def _find_frames(earlier: str, label: str) -> tuple[str, ...]:
    """The functions of the traceback that ends here, of the same rank."""
    _, head, body = earlier.rpartition(TRACEBACK.decode())
    if not head:
        return ()
    own = (line for line in body.split("\n") if split_label(line)[0] in (label, ""))
    return tuple(
        f"{match.group(1)}:{match.group(2)}, in {match.group(3) or '?'}"
        for match in map(_FRAME.search, own)
        if match
    )


def _count_signs_of_life(after: list[str], label: str) -> int:
    """How many lines after a traceback are those of a run that goes on.

    torch labels a traceback with [rankN]: only where nobody caught it: then there is no life after it.
    """
    if "[rank" in label:
        return 0
    parted = (split_label(raw) for raw in after)
    return sum(
        own == label and not rest.startswith(("    ", "\t")) and _ALIVE.search(rest) is not None
        for own, rest in parted
    )
