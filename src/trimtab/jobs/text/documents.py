"""Lengths of documents, and how they share rows: packed one after another, or padded to the longest."""

from __future__ import annotations

import bisect
import json
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from trimtab.errors import WrongUse

MOST_LENGTHS = 20_000
"""A longer list of lengths is thinned out evenly, shortest to longest."""
FORMS = "Give a number of tokens, or a file with one number a line or a JSON list of numbers."


class DocumentRow(NamedTuple):
    """The documents of a typical row."""

    lengths: tuple[int, ...]
    """Tokens of each document; they fill the row."""
    filled: float = 1.0
    """Share of an average row that has documents in it."""
    cut: float = 0.0
    """Share of the documents that are longer than a row and are cut."""

    @property
    def positions(self) -> list[int]:
        """Position of every token in its document.

        >>> DocumentRow(lengths=(3, 2)).positions
        [0, 1, 2, 0, 1]
        """
        return [position for length in self.lengths for position in range(length)]

    @property
    def starts(self) -> list[int]:
        """Place of the first token of every document.

        >>> DocumentRow(lengths=(3, 2)).starts
        [0, 3]
        """
        return [0, *accumulate(self.lengths[:-1])]


def read_lengths(value: Any, flag: str) -> tuple[int, ...]:
    """Return lengths of documents in ascending order: of a number, a list, or a file of numbers.

    >>> read_lengths(512, "--packed"), read_lengths("[300, 20]", "--packed")
    ((512,), (20, 300))
    """
    text = str(value)
    given = f"{flag} {text}"
    content = text.strip()
    if isinstance(value, str) and not content.startswith("[") and not content.lstrip("-").isdecimal():
        try:
            content = Path(text).expanduser().read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            raise WrongUse(given, found="there is no such file, and it is no number", cure=FORMS) from None
        except (OSError, UnicodeDecodeError) as error:
            raise WrongUse(given, found=f"the file cannot be read ({error})", cure=FORMS) from error
    try:
        entries = json.loads(content) if content.startswith("[") else content.split()
        lengths = sorted(_read_length(entry) for entry in entries)
    except ValueError as error:
        raise WrongUse(given, found=f"it is no list of lengths: {error}", cure=FORMS) from None
    if not lengths:
        raise WrongUse(given, found="it has no lengths", cure=FORMS)
    return tuple(lengths)


def _read_length(entry: object) -> int:
    if isinstance(entry, bool) or not isinstance(entry, int | str):
        raise ValueError(f"{entry!r} is no whole number")  # noqa: TRY004 - for the caller, a wrong value
    try:
        length = int(entry)
    except ValueError:
        raise ValueError(f"{entry!r} is no whole number") from None
    if length < 1:
        raise ValueError(f"{length} is below 1")
    return length


def make_typical_row(lengths: tuple[int, ...], size: int) -> DocumentRow:
    """Return the documents of a row of `size` tokens whose attention costs what an average row's costs.

    Documents of one length fill the row, the last one cut to what is left. Documents of several lengths are
    packed as packers do it: longest first, each into the fullest row that has room.

    >>> make_typical_row((512,), 1200).lengths
    (512, 512, 176)
    """
    cut = sum(length > size for length in lengths) / len(lengths)
    if len(lengths) == 1:
        each = min(lengths[0], size)
        last = (size % each,) if size % each else ()
        return DocumentRow(lengths=(each,) * (size // each) + last, cut=cut)
    step = max(1, len(lengths) // MOST_LENGTHS)
    rows = pack_documents([min(length, size) for length in lengths[::-step]], size)
    costs = [sum(length * length for length in row) for row in rows]
    average = sum(costs) / len(rows)
    number = min(range(len(rows)), key=lambda number: abs(costs[number] - average))
    row = rows[number]
    rest = size - sum(row)
    return DocumentRow(
        lengths=(*row, rest) if rest else tuple(row),
        filled=sum(map(sum, rows)) / (size * len(rows)),
        cut=cut,
    )


def pack_documents(lengths: list[int], size: int) -> list[list[int]]:
    """Return rows of documents; each goes into the fullest row that has room for it.

    >>> pack_documents([5, 4, 3, 2, 1], 6)
    [[5, 1], [4, 2], [3]]
    """
    rows: list[list[int]] = []
    # Rows by the room that they have, in ascending order.
    rooms: list[tuple[int, int]] = []
    for length in lengths:
        place = bisect.bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = size, len(rows)
            rows.append([])
        rows[number].append(length)
        if room > length:
            bisect.insort(rooms, (room - length, number))
    return rows
