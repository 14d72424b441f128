"""What a line of a log says beside its message, and the line without power over a terminal."""

from __future__ import annotations

import re
from functools import cache

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


def strip_escapes(text: str) -> str:
    r"""A line without colours, cursor movements and invisible letters.

    >>> strip_escapes("\x1b[31mboom\x1b[0m\x07")
    'boom'
    """
    return _CONTROLS.sub("", _ESCAPES.sub("", text)) if not text.isprintable() else text


def shorten_line(text: str) -> str:
    """A line as evidence: trimmed, and cut where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 4]} ..."


def split_label(text: str) -> tuple[str, str]:
    """A line's label (whose line it is) and the rest; a time before either is taken off.

    >>> split_label("[rank3]: Traceback"), split_label("2026-11-15 10:00:00,1 1: [rank3]:[E x]")
    (('[rank3]:', ' Traceback'), ('1: [rank3]:', '[E x]'))
    """
    label, _, rest = _split_line(text)
    return label, rest


def _split_line(text: str) -> tuple[str, int | None, str]:
    """Label, rank and rest. Of several labels the innermost tells the rank: a launcher's may be its node."""
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
    """The rank that a line is of, by its label or by what it says.

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
    """The rank that a file is of, by its name.

    >>> rank_from_path("logs/none_abc/attempt_0/3/stderr.log"), rank_from_path("nccl_trace_rank_12")
    (3, 12)
    """
    match = _IN_PATH.search(path)
    return _parse_rank(match) if match else None


def _parse_rank(match: re.Match[str]) -> int | None:
    digits = next(group for group in match.groups() if group)
    return int(digits) if len(digits) < 8 else None  # noqa: PLR2004 - no world is that large


def find_time(text: str) -> float | None:
    """Seconds since the start of the year, by the last time that a text tells; good for comparing only.

    >>> find_time("[E1115 12:43:00.5 x]") == find_time("2026-11-15 12:43:00,500")
    True
    """
    found = None
    for match in (*_ISO.finditer(text), *_GLOG.finditer(text)):
        month, day, hour, minute, second = (int(digits) for digits in match.groups()[:5])
        part = float(f"0.{match.group(6) or 0}")
        found = (((month * 31 + day) * 24 + hour) * 60 + minute) * 60 + second + part
    return found
