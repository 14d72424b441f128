"""Text passages from Python's help(), and simple tokenizers for any vocabulary size.

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

SHORTEST_PARAGRAPH = 40
"""Minimum characters of a paragraph that starts a passage."""
LONGEST_PIECE = 8
FEWEST_WORDS = 4096
"""A smaller vocabulary uses letters as tokens: too many words would have the same hash."""
_PIECES = re.compile(rf"\w{{1,{LONGEST_PIECE}}}|[^\w\s]")


class Passage(NamedTuple):
    """A text and its topic."""

    topic: str
    text: str


@cache
def load_passages() -> tuple[Passage, ...]:
    """Return every paragraph with the next ones of its topic, in the same order on every machine."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise EnvironmentFault(
            "text to train on",
            found="this Python comes without pydoc_data, the texts of help()",
            cure="Install the whole standard library (python3-full, libpython3-stdlib).",
        ) from error
    passages = []
    for topic, text in sorted(topics.items()):
        parts = [" ".join(part.split()) for part in text.split("\n\n")]
        for number, part in enumerate(parts):
            if len(part) >= SHORTEST_PARAGRAPH:
                passages.append(Passage(topic, " ".join(parts[number : number + 8])))
    # With a stride, most neighbours are from different topics.
    count = len(passages)
    stride = _coprime_stride(count)
    return tuple(passages[number * stride % count] for number in range(count))


def _coprime_stride(count: int) -> int:
    """Return a stride of about 0.618 x count that is coprime to it, so that it visits all places."""
    step = max(1, round(count * 0.618))
    while math.gcd(step, count) != 1:
        step += 1
    return step


def make_hash_tokenizer(vocab: int) -> Tokenise:
    """Return a tokenizer that hashes words, or letters for a small vocabulary, to numbers below `vocab`.

    >>> make_hash_tokenizer(100_000)("to be or not to be")
    [2756, 94925, 62439, 10293, 2756, 94925]
    >>> make_hash_tokenizer(1000)("to be")
    [752, 980, 277, 681, 794]
    """
    has_words = vocab >= FEWEST_WORDS

    def tokens(text: str) -> list[int]:
        pieces = _PIECES.findall(text) if has_words else text
        return [zlib.crc32(piece.encode()) % vocab for piece in pieces]

    return tokens


def wrap_tokenizer(tokenizer: Any) -> Tokenise:
    """Wrap a tokenizer of transformers, without special tokens."""

    def tokens(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return tokens
