"""Between our words and a framework's: what a value in a config means, and what to write for a choice."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trimtab.configs.targets import WORDS

if TYPE_CHECKING:
    from trimtab.configs.targets import Knob

_TRUTHS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def format_value(value: Any) -> str:
    """A value as the tables of targets spell it.

    >>> format_value(True), format_value(16), format_value(None), format_value("bf16-mixed")
    ('true', '16', 'null', 'bf16-mixed')
    """
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def same_meaning(value: Any, other: Any) -> bool:
    """Whether two values of a config say the same, however they are written.

    >>> same_meaning("False", False), same_meaning("16", 16), same_meaning("no", "no")
    (True, True, True)
    >>> same_meaning(1, True), same_meaning(None, False)
    (False, False)
    """
    if isinstance(value, bool) or isinstance(other, bool):
        return _parse_truth(value) is not None and _parse_truth(value) == _parse_truth(other)
    return format_value(value).strip().lower() == format_value(other).strip().lower()


def _parse_truth(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return _TRUTHS.get(value.strip().lower()) if isinstance(value, str) else None


def is_auto(knob: Knob, value: Any) -> bool:
    """Whether the framework decides by itself."""
    return any(type(value) is type(word) and same_meaning(value, word) for word in knob.auto)


def parse_count(knob: Knob, value: Any) -> int | None:
    """The whole number that a value is, in any of the ways that configs write one; None where it is none."""
    if isinstance(value, str):
        return _count_in_text(knob, value.strip())
    if isinstance(value, list):
        return len(value) if knob.listed else None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _count_in_text(knob: Knob, value: str) -> int | None:
    if knob.pattern:
        found = re.fullmatch(knob.pattern, value)
        return int(found["n"]) if found else None
    if knob.listed and "," in value:
        return len([part for part in value.split(",") if part.strip()])
    return int(value) if re.fullmatch(r"[+-]?\d[\d_]*", value) else None


def format_count(knob: Knob, before: Any, wanted: int) -> Any:
    """What is written for a number, in place of what is there."""
    if knob.pattern and isinstance(before, str) and (found := re.fullmatch(knob.pattern, before.strip())):
        return f"{before.strip()[: found.start('n')]}{wanted}{before.strip()[found.end('n') :]}"
    return wanted


def words_of_value(knob: Knob, value: Any) -> list[str]:
    """Our words that a value stands for; none where nobody here knows it."""
    found = [word for word, written in knob.words.items() if same_meaning(written, value)]
    return found + [
        word for said, word in knob.reads.items() if same_meaning(said, value) and word not in found
    ]


def unspoken_words(knob: Knob) -> list[str]:
    """Our words of which the key says nothing: it is left alone for them, and does not speak against them."""
    return [word for word in WORDS[knob.field] if word not in knob.words and word not in knob.near]


def word_to_write(knob: Knob, word: str) -> tuple[Any, bool]:
    """What is written for one of our words, and whether anything is."""
    word = knob.near.get(word, word)
    return knob.words.get(word), word in knob.words
