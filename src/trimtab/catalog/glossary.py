"""The words that `trimtab explain` knows, and how to find one."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files

import msgspec

from trimtab.errors import UnknownName, nearest
from trimtab.spec import Noun

KINDS = ("knob", "precision", "recompute", "strategy", "term", "hardware", "verb", "error", "fault")
_VERB = re.compile(r"`trimtab ([a-z]+)")


class Word(Noun, frozen=True, kw_only=True):
    """A knob, strategy or term in plain English."""

    derived = ("text",)

    name: str
    kind: str
    what: str
    """What it is."""
    cost: str = ""
    """What it costs or buys."""
    change: str = ""
    """When to change it."""
    use: tuple[str, ...] = ()
    """How trimtab's verbs deal with it; each sentence names its verb, as `trimtab plan`."""
    see: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole entry as prose."""
        parts = (self.what, self.cost, self.change, *self.use)
        return " ".join(part for part in parts if part)

    def faults(self) -> list[str]:
        """The kind is one of ours."""
        return [] if self.kind in KINDS else [f"kind is {self.kind!r}, not one of {', '.join(KINDS)}"]


@cache
def _all() -> tuple[Word, ...]:
    text = files("trimtab.catalog").joinpath("words.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["word"], tuple[Word, ...])


def words(verbs: tuple[str, ...]) -> dict[str, Word]:
    """Every word that is true of a trimtab with these verbs, by name.

    The file also speaks of verbs that are still to come; those entries and sentences stay unseen until the
    verb works.
    """
    kept = [word for word in _all() if word.kind != "verb" or word.name in verbs]
    names = {word.name for word in kept}
    return {
        word.name: word.replace(
            use=tuple(one for one in word.use if _is_true(one, verbs)),
            see=tuple(one for one in word.see if one in names),
        )
        for word in kept
    }


def _is_true(sentence: str, verbs: tuple[str, ...]) -> bool:
    return all(verb in verbs for verb in _VERB.findall(sentence))


def _plain(text: str) -> str:
    return re.sub(r"[\s_]+", "-", text.strip().lower()).strip("-")


def word(text: str, verbs: tuple[str, ...], more: dict[str, Word] | None = None) -> Word:
    """The entry for what a person typed: a name or an alias, whatever its case and separators.

    `more` are entries from elsewhere: a name of ours wins over the same of theirs, and theirs over an alias.

    >>> word("BFloat16", ()).name
    'bf16'
    """
    known = words(verbs)
    by_spelling = {_plain(spelling): text for text in known.values() for spelling in text.aliases}
    by_spelling |= {_plain(name): one for names in (more or {}, known) for name, one in names.items()}
    if found := by_spelling.get(_plain(text)):
        return found
    close = list(dict.fromkeys(by_spelling[one].name for one in nearest(_plain(text), by_spelling)))
    found_text = f"no such word; the nearest are {', '.join(close)}" if close else "no such word"
    raise UnknownName(f"explain {text!r}", found=found_text, cure="`trimtab explain` alone lists every word.")
