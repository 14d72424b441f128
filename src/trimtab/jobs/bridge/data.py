"""Passages of text that is on every machine with Python, and tokens of them for any vocabulary.

The text is Python's own language reference, as `help()` shows it: 70 to 80 topics of plain English.
"""

from __future__ import annotations

import math
import re
import zlib
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.errors import EnvironmentFault

if TYPE_CHECKING:
    from collections.abc import Callable

    Tokenise = Callable[[str], list[int]]

SHORTEST = 40
"""Characters of a paragraph that is worth a passage."""
LONGEST_PIECE = 8
FEWEST_WORDS = 4096
"""A vocabulary below this spells: too many words would fall together."""
_PIECES = re.compile(rf"\w{{1,{LONGEST_PIECE}}}|[^\w\s]")


class Passage(NamedTuple):
    """Some text, and what it is about."""

    topic: str
    text: str


@cache
def passages() -> tuple[Passage, ...]:
    """Every paragraph with what follows it in its topic, in one order on every machine."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise EnvironmentFault(
            "text to train on",
            found="this Python comes without pydoc_data, the texts of help()",
            cure="Install the whole standard library (python3-full, libpython3-stdlib).",
        ) from error
    found = []
    for topic, text in sorted(topics.items()):
        parts = [" ".join(part.split()) for part in text.split("\n\n")]
        for number, part in enumerate(parts):
            if len(part) >= SHORTEST:
                found.append(Passage(topic, " ".join(parts[number : number + 8])))
    # Neighbours come from different topics, as far as a stride can do that.
    stride = _stride(len(found))
    return tuple(found[number * stride % len(found)] for number in range(len(found)))


def _stride(count: int) -> int:
    """A step that visits all of so many places, about 0.618 of the way at a time."""
    step = max(1, round(count * 0.618))
    while math.gcd(step, count) != 1:
        step += 1
    return step


def made_up(vocab: int) -> Tokenise:
    """Text as numbers below `vocab`, for a model that has no tokenizer: words, or letters where it knows few.

    >>> made_up(100_000)("to be or not to be")
    [76417, 48313, 33229, 52921, 76417, 48313]
    >>> made_up(1000)("to be")
    [696, 671, 192, 588, 606]
    """
    whole = vocab >= FEWEST_WORDS

    def tokens(text: str) -> list[int]:
        pieces = _PIECES.findall(text) if whole else text
        return [zlib.crc32(piece.encode()) % vocab for piece in pieces]

    return tokens


def from_tokenizer(tokenizer: Any) -> Tokenise:
    """A tokenizer of transformers, without the marks that it puts around a text."""

    def tokens(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    return tokens
