"""Scan a log of any size, in bounded memory, for lines that match a kind or a fact.

Most lines of a log are irrelevant. A sieve finds the few places where one of many search strings begins: it
looks every four bytes up in a table of 65,536 entries, two seconds a gigabyte with numpy, however many
strings there are. Small texts are searched string by string, which is faster than loading numpy.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from trimtab.diagnosis.fault_kinds import load_patterns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from trimtab.diagnosis.fault_kinds import LogPattern

MOST_SHOWN = 300
"""Letters of a line that are shown as evidence."""

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours and cursor
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles and links
    r"|\x1b[@-Z\\-_]"
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")

_STAMP = re.compile(r"\s{0,8}\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?Z?\]?(?: |$)")
_LABEL = re.compile(
    r"\s{0,8}\[rank(\d+)\]:"  # torch's own, before its messages and before tracebacks
    r"|\s{0,8}\[[A-Za-z_]+(\d+)\]:"  # torchrun --tee: [default3]:
    r"|\s{0,8}\(\w+ pid=(\d+)\) (?=\[rank)"  # Ray
)
_TASK = re.compile(r"\s{0,8}(\d+): ")
"""srun --label. Only first in a line: elsewhere a number and a colon may be anything."""
_IN_TEXT = re.compile(r"\[(?:PG [^\]]*)?[Rr]ank (\d+)\]|\brank=(\d+)\b|\b[Rr]ank (\d+):")
_IN_PATH = re.compile(
    r"attempt_\d+/(\d+)/(?:stdout\.log|stderr\.log|error\.json)$|rank[_-]?(\d+)\D*$|/(\d+)/(?:stdout|stderr)\.log$"
)

_ISO = re.compile(r"\d{4}-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_GLOG = re.compile(r"\b[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})\b")

_DIGITS = re.compile(r"[\d.]+")
_NUMBER = re.compile(r"\d{1,300}(?:\.\d*)?|\.\d+")


def strip_escapes(text: str) -> str:
    r"""Remove colours, cursor movements and invisible letters from a line.

    >>> strip_escapes("\x1b[31mboom\x1b[0m\x07")
    'boom'
    """
    return _CONTROLS.sub("", _ESCAPES.sub("", text)) if not text.isprintable() else text


def shorten_line(text: str) -> str:
    """Shorten a line to serve as evidence."""
    text = " ".join(text.split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 4]} ..."


def split_label(text: str) -> tuple[str, str]:
    """Split a line into its label (whose line it is) and the rest; drop a time before either.

    >>> split_label("[rank3]: Traceback"), split_label("2026-11-15 10:00:00,1 1: [rank3]:[E x]")
    (('[rank3]:', ' Traceback'), ('1: [rank3]:', '[E x]'))
    """
    label, _, rest = _split_line(text)
    return label, rest


def _split_line(text: str) -> tuple[str, int | None, str]:
    """Split a line into label, rank and rest. Only the innermost label surely has the rank."""
    parts: list[str] = []
    rank: int | None = None
    while True:
        if stamp := _STAMP.match(text):
            text = text[stamp.end() :]
        match = _LABEL.match(text) or (None if parts else _TASK.match(text))
        if match is None or len(parts) > 3:  # noqa: PLR2004 - nobody nests launchers deeper
            return " ".join(parts), rank, text
        parts.append(match.group(0).strip())
        rank = _parse_rank(match)
        text = text[match.end() :]


def find_rank(text: str) -> int | None:
    """Find the rank of a line, by its label or its text.

    >>> find_rank("[rank3]: Traceback"), find_rank("E1115 [PG ID 0 Rank 12] Exception"), find_rank("loss 2.0")
    (3, 12, None)
    """
    rank = _split_line(text)[1]
    if rank is not None:
        return rank
    match = _IN_TEXT.search(text)
    return _parse_rank(match) if match else None


@cache
def rank_from_path(path: str) -> int | None:
    """Return the rank of a file, by its name.

    >>> rank_from_path("logs/none_abc/attempt_0/3/stderr.log"), rank_from_path("nccl_trace_rank_12")
    (3, 12)
    """
    match = _IN_PATH.search(path)
    return _parse_rank(match) if match else None


def _parse_rank(match: re.Match[str]) -> int | None:
    digits = next(group for group in match.groups() if group)
    return int(digits) if len(digits) < 8 else None  # noqa: PLR2004 - no world is that large


def find_time(text: str) -> float | None:
    """Return seconds since the start of the year, by the last time in a text; for comparisons only.

    >>> find_time("[E1115 12:43:00.5 x]") == find_time("2026-11-15 12:43:00,500")
    True
    """
    seconds = None
    for match in (*_ISO.finditer(text), *_GLOG.finditer(text)):
        month, day, hour, minute, second = (int(digits) for digits in match.groups()[:5])
        part = float(f"0.{match.group(6) or 0}")
        seconds = (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second + part
    return seconds


SMALL_BYTES = 1 << 20
GRAM = 4
STRIDE = 1 << 18
"""Bytes that are looked at together: what is computed of them stays in the processor's cache."""
_HASH = 0x9E3779B1
_BITS = 16
_COMMON = {ord(letter): 4 - rank // 8 for rank, letter in enumerate(" 0e1ta2oin3s:rl.d4=5c,um/-p6[]f_789gbh")}
_HEALTHY = (
    b"{'loss': 2, 'grad_norm': 1, 'learning_rate': 5, 'epoch': 3, 'train_loss': 2} Epoch 2: loss=2 "
    b'train_loss=3, {"loss": 2, "step": 3} iter 1: loss 2, lm loss: 2, loss:  3 [Rank 0] '
    b"[rank0]: INFO step=3 loss = 2"
)
"""What the lines of a run that goes well are made of."""


class NeedleSieve:
    """Finds many search strings at once. None is shorter than eight bytes."""

    def __init__(self, needles: Iterable[bytes]) -> None:
        self.needles = tuple(dict.fromkeys(needles))
        self._tables: tuple[Any, Any] | None = None
        self._at: dict[bytes, list[tuple[int, bytes]]] = {}
        for needle in self.needles:
            offset = rarest_offset(needle)
            self._at.setdefault(needle[offset : offset + 2 * GRAM], []).append((offset, needle))

    def hits(self, data: bytes, begin: int, end: int) -> list[tuple[int, bytes]]:
        """Return where needles begin, from `begin` to before `end`, in order; they may reach past `end`."""
        if not self.needles:
            return []
        places = self._few(data, begin, end) if end - begin < SMALL_BYTES else self._many(data, begin, end)
        return sorted(set(places))

    def _few(self, data: bytes, begin: int, end: int) -> list[tuple[int, bytes]]:
        return [
            (match.start(), needle)
            for needle in self.needles
            if data.find(needle, begin, end + len(needle)) >= 0
            for match in re.compile(re.escape(needle)).finditer(data, begin, end + len(needle) - 1)
        ]

    def _many(self, data: bytes, begin: int, end: int) -> list[tuple[int, bytes]]:
        longest = max(map(len, self.needles))
        last = min(len(data), end + longest)
        places: list[tuple[int, bytes]] = []
        for start in range(begin, last, STRIDE):
            for position in self._candidates(data, start, min(start + STRIDE, last)):
                for offset, needle in self._at.get(data[position : position + 2 * GRAM], ()):
                    at = position - offset
                    if begin <= at < end and data.startswith(needle, at):
                        places.append((at, needle))
        return places

    def _candidates(self, data: bytes, start: int, stop: int) -> Sequence[int]:
        """Return the places at which eight bytes look like those of a needle."""
        import numpy as np

        if self._tables is None:
            self._tables = (
                _hash_table(grams[:GRAM] for grams in self._at),
                _hash_table(grams[GRAM:] for grams in self._at),
            )
        first, second = self._tables
        places: list[int] = []
        for shift in range(GRAM):
            begin = start + shift
            # One more than the stride holds, to see what comes after the last.
            count = min(stop - begin + 2 * GRAM, len(data) - begin) // GRAM
            if count < 2:  # noqa: PLR2004 - a gram and the next
                continue
            grams = np.frombuffer(data, "<u4", count, begin)
            hashed = grams * np.uint32(_HASH)
            hashed >>= np.uint32(32 - _BITS)
            seen = np.flatnonzero(first.take(hashed[:-1]))
            seen = seen[second.take(hashed[seen + 1])]
            places += (begin + GRAM * seen).tolist()
        return places


def _hash_table(grams: Iterable[bytes]) -> Any:
    import numpy as np

    answers = np.zeros(1 << _BITS, dtype=bool)
    values = np.frombuffer(b"".join(grams), "<u4") * np.uint32(_HASH)
    answers[values >> np.uint32(32 - _BITS)] = True
    return answers


def rarest_offset(needle: bytes) -> int:
    """Return the offset of the eight bytes of a needle that a healthy log is least likely to have.

    >>> rarest_offset(b"error 12 CUDA OOM")
    9
    """
    weights = [_COMMON.get(byte, 0) for byte in needle]
    places = range(len(needle) - 2 * GRAM + 1)
    return min(
        places, key=lambda at: (needle[at : at + 2 * GRAM] in _HEALTHY, sum(weights[at : at + 2 * GRAM]))
    )


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
    """A place in a log that matches a kind or a fact."""

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


def _is_broken_number(text: str | None) -> bool:
    """Return whether a text has the letters of a number but is none, as 1.2.3 in a damaged log.

    >>> _is_broken_number("1.2.3"), _is_broken_number("1.5"), _is_broken_number("bf16")
    (True, False, False)
    """
    return text is not None and _DIGITS.fullmatch(text) is not None and _NUMBER.fullmatch(text) is None


class LogScanner:
    """Scanner of one log."""

    def __init__(self, name: str, rank: int | None = None) -> None:
        self.name = name
        self.rank = rank if rank is not None else rank_from_path(name)
        self.counts: Counter[str] = Counter()
        self.lines = 0
        self.bytes = 0
        self._by_needle, self._sieve = _load_sieve()

    def scan(self, stream: Callable[[int], bytes], say: Callable[[int], None]) -> Iterator[Sighting]:
        """Yield every sighting in order. `stream(n)` gives up to n more bytes, none at the end."""
        data, begin, line = b"", 0, 1
        while True:
            fresh = stream(CHUNK if self.bytes else FIRST_CHUNK)
            self.bytes += len(fresh)
            data += fresh
            end = max(begin, len(data) - AHEAD) if fresh else len(data)
            counted, seen, tried = begin, set[tuple[int, str]](), dict[tuple[int, str], int]()
            for at, needle in self._sieve.hits(data, begin, end):
                line += data.count(b"\n", counted, at)
                counted = at
                yield from self._at(data, at, needle, line, seen, tried)
            line += data.count(b"\n", counted, end)
            self._drop_common()
            say(self.bytes)
            if not fresh:
                self.lines = line - (data[-1:] in (b"\n", b""))
                return
            kept = max(0, end - BEHIND)
            data, begin = data[kept:], end - kept

    def _at(  # noqa: PLR0913, PLR0917 - a place, and what was done before it
        self,
        data: bytes,
        at: int,
        needle: bytes,
        line: int,
        seen: set[tuple[int, str]],
        tried: dict[tuple[int, str], int],
    ) -> Iterator[Sighting]:
        """Yield what is seen at a place; `tried` has where in a line a pattern is next tried."""
        if needle == TRACEBACK:
            if self.counts[PYTHON_ERROR] < MOST_SIGHTINGS:
                yield from self._traceback(data, at, line)
            return
        start = _line_start(data, at)
        # All parts of a line that is longer than what is read of a line count as one.
        place = start if data[max(0, start - 1) : start] in (b"", b"\n", b"\r") else -line
        for pattern in self._by_needle[needle]:
            if (place, pattern.of) in seen or self.counts[pattern.of] >= MOST_SIGHTINGS:
                continue
            if at < tried.get((place, pattern.text), 0):
                continue
            tried[place, pattern.text] = at + LINE // 2
            raw = data[start : _line_end(data, at, pattern.lines)]
            if not pattern.may_match(raw):
                continue
            text = strip_lines(raw.decode("utf-8", "replace"))
            match = pattern.search(text)
            if match is None or (pattern.is_fact and any(map(_is_broken_number, match.groups()))):
                continue
            seen.add((place, pattern.of))
            self.counts[pattern.of] += 1
            behind = data[max(0, start - BEHIND) : start]
            yield self._sighting(pattern, match, text, line, behind)

    def _sighting(
        self, pattern: LogPattern, match: re.Match[str], text: str, line: int, behind: bytes
    ) -> Sighting:
        captured = {name: value.strip() for name, value in match.groupdict().items() if value}
        first_line = text.split("\n", 1)[0]
        own = captured.get("rank", "")
        rank = int(own) if own.isdecimal() and len(own) < 8 else find_rank(first_line)  # noqa: PLR2004
        earlier = strip_escapes(behind.decode("utf-8", "replace"))
        return Sighting(
            of=pattern.of,
            file=self.name,
            line=line,
            text=text.replace("\n", " ") if pattern.lines > 1 else first_line,
            captured=captured,
            rank=rank if rank is not None else self.rank,
            at=find_time(first_line) or find_time(earlier[-2048:]),
            frames=() if pattern.is_fact else _find_frames(earlier, split_label(first_line)[0]),
            is_fact=pattern.is_fact,
        )

    def _traceback(self, data: bytes, at: int, line: int) -> Iterator[Sighting]:
        """Yield the error that a traceback ends in, unless the run continued after it."""
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
    """Load all patterns by their needles, and the sieve for those; both are never changed."""
    by_needle: dict[bytes, list[LogPattern]] = {}
    for pattern in load_patterns():
        by_needle.setdefault(pattern.needle, []).append(pattern)
    return by_needle, NeedleSieve([*by_needle, TRACEBACK])


def _line_start(data: bytes, at: int) -> int:
    lowest = max(0, at - LINE)
    return max(data.rfind(b"\n", lowest, at), data.rfind(b"\r", lowest, at), lowest - 1) + 1


def _line_end(data: bytes, at: int, lines: int) -> int:
    """Return the end of a number of lines. Carriage returns end lines, since progress bars use them."""
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
    """Remove escapes from lines, and keep the line feeds."""
    parts = text.rstrip("\r\n").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return "\n".join(strip_escapes(part) for part in parts)


def _find_frames(earlier: str, label: str) -> tuple[str, ...]:
    """Return the functions of the traceback that ends here, of the same rank."""
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
    """Count lines after a traceback that show a run that continues.

    torch labels a traceback with [rankN]: only where nobody caught it: then there is no life after it.
    """
    if "[rank" in label:
        return 0
    parted = (split_label(raw) for raw in after)
    return sum(
        own == label and not rest.startswith(("    ", "\t")) and _ALIVE.search(rest) is not None
        for own, rest in parted
    )
