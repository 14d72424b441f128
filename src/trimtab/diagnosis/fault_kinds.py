"""Kinds of faults: the rows of kinds.toml, their patterns, and their entries in `trimtab explain`."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from trimtab.catalog.glossary import Word
from trimtab.errors import shorten
from trimtab.spec import Severity

if TYPE_CHECKING:
    from collections.abc import Mapping

JOB, ENVIRONMENT = "job", "environment"
SHORTEST_NEEDLE = 8
"""The sieve looks at eight bytes at once; a pattern has to promise as many."""
MOST_CAPTURED = 240
"""Letters of a captured text that are repeated in a sentence."""
_PLACE = re.compile(r"\{(\w+)\}")
_CAPTURE = re.compile(r"\(\?P<\w+>([^()|]*)\)(?![?*{+])")
"""A capture that is always there and holds no alternatives: as if its brackets were not."""
_TOKEN = re.compile(r"(\\x..|\\.|\[\^?\]?[^\]]*\]|\((?:\?(?::|P<\w+>|<?[=!]))?|.)([*+?]\??|\{[^}]*\})?")
"""A letter, class or bracket of a regular expression, and how often it may be."""
_CLASSES = frozenset("wWdDsSbBAZx")
"""Letters that mean a class or a place when a backslash is before them."""


class DiagnosisKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that can go wrong: how it shows, why it happens and what to do.

    `what`, `cause` and `cure` may name captures of the patterns in braces; `defaults` stands in for those
    that a pattern does not have.
    """

    name: str
    severity: Severity = Severity.ERROR
    realm: str = JOB
    """Whether the job is to be changed (its code, settings, data) or what it runs on."""
    what: str
    patterns: tuple[str, ...] = ()
    """Regular expressions, any of which tells it; none where a sum finds it."""
    cause: str
    cure: str
    source: str
    """Where the wording of the message comes from."""
    follows: bool = False
    """Whether it is what other ranks and launchers say once something else has failed."""
    after: tuple[str, ...] = ()
    """Kinds that explain it; it is listed below them."""
    times: int = 1
    """How often it has to be seen before it is worth a word."""
    lines: int = 1
    """How many lines of the log its message may take."""
    defaults: dict[str, str] = {}

    def fill_template(self, template: str, captured: Mapping[str, str]) -> str:
        """Fill a sentence of the row with what the log said."""
        values = self.defaults | {name: shorten(text, MOST_CAPTURED) for name, text in captured.items()}
        return _PLACE.sub(lambda place: values.get(place.group(1), "?"), template)


class LogFact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fact about a run that logs print; each pattern captures it as `value`."""

    name: str
    patterns: tuple[str, ...]
    source: str


class LogPattern(NamedTuple):
    """A pattern of a kind or a fact."""

    of: str
    """The kind or fact that it tells."""
    needle: bytes
    """What every text that it matches contains."""
    text: str
    lines: int
    is_fact: bool

    def search(self, line: str) -> re.Match[str] | None:
        """Search a line; the pattern is compiled at its first use, since most are never needed."""
        return _compiled(self.text).search(line)

    def may_match(self, line: bytes) -> bool:
        """Return False for a line that cannot match; costs a fifth of decoding the line."""
        if b"\x1b" in line or not line.isascii():
            return True
        return _compiled_bytes(self.text).search(line.rstrip(b"\r\n")) is not None


@cache
def _compiled(text: str) -> re.Pattern[str]:
    return re.compile(text)


@cache
def _compiled_bytes(text: str) -> re.Pattern[bytes]:
    return re.compile(text.encode("ascii"), re.MULTILINE)


class KindTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of kinds.toml."""

    kind: tuple[DiagnosisKind, ...]
    fact: tuple[LogFact, ...]


@cache
def load_table() -> KindTable:
    """Load the rows, once."""
    text = files("trimtab.diagnosis").joinpath("kinds.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), KindTable)


@cache
def load_kinds() -> dict[str, DiagnosisKind]:
    """Load every kind, by name."""
    return {row.name: row for row in load_table().kind}


@cache
def load_patterns() -> tuple[LogPattern, ...]:
    """Load every pattern of kinds and facts."""
    rows = [(row.name, pattern, row.lines, False) for row in load_table().kind for pattern in row.patterns]
    rows += [(row.name, pattern, 1, True) for row in load_table().fact for pattern in row.patterns]
    return tuple(LogPattern(of, find_needle(text), text, lines, is_fact) for of, text, lines, is_fact in rows)


def find_needle(pattern: str) -> bytes:
    r"""Return the longest text that every match of a regular expression contains, without running it.

    What stands in classes, or in groups with alternatives, does not count; a pattern with alternatives at its
    top promises nothing, and is refused.

    >>> find_needle(r"NCCL (?:WARN|INFO) .* (?P<what>port error) (\d+)")
    b' port error '
    """
    runs, run, depth = [], "", 0
    for part, quantifier in _TOKEN.findall(_CAPTURE.sub(r"\1", pattern)):
        depth += (part[0] == "(") - (part == ")")
        if part == "|" and not depth:
            raise ValueError(f"{pattern!r} has alternatives at its top")
        literal = _literal_letter(part)
        if literal and not depth and quantifier[:1] not in ("*", "?", "{"):
            run += literal
            if not quantifier:
                continue
        runs.append(run)
        run = ""
    longest = max([*runs, run], key=len).encode()
    if len(longest) < SHORTEST_NEEDLE:
        raise ValueError(f"{pattern!r} promises only {longest!r}, and {SHORTEST_NEEDLE} bytes are needed")
    return longest


def _literal_letter(token: str) -> str:
    """Return the letter that a token of a regular expression means; empty if it means several."""
    if token[0] == "\\":
        return "" if token[1] in _CLASSES else token[1]
    return "" if token[0] in ".^$|()[" else token


@cache
def kind_words() -> dict[str, Word]:
    """Build a glossary entry for each kind, with dots for what a log would say."""
    return {
        name: Word(
            name=name,
            kind="fault",
            what=blank_captures(row.what),
            cost=blank_captures(row.cause),
            change=blank_captures(row.cure),
            use=("`trimtab doctor LOG` recognises it.",),
        )
        for name, row in load_kinds().items()
    }


def blank_captures(text: str) -> str:
    """Replace the captures in a sentence by dots.

    >>> blank_captures("The GPU ran out of memory: {tried} more were asked for.")
    'The GPU ran out of memory: ... more were asked for.'
    """
    return _PLACE.sub("...", text)
