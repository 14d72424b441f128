"""The kinds of kinds.toml as words that `trimtab explain` knows."""

from __future__ import annotations

import re
from functools import cache

from trimtab.catalog.words import Word
from trimtab.diagnosis.kinds import load_kinds

_PLACE = re.compile(r"\{\w+\}")


@cache
def kind_words() -> dict[str, Word]:
    """An entry for each kind; what a log would say stands as dots."""
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
    """A sentence without what only a log can say.

    >>> blank_captures("The GPU ran out of memory: {tried} more were asked for.")
    'The GPU ran out of memory: ... more were asked for.'
    """
    return _PLACE.sub("...", text)
