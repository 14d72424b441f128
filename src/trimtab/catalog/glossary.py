"""Look up the glossary entries that `trimtab explain` prints."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files

import msgspec

from trimtab.errors import UnknownName, find_nearest
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
    """How trimtab's commands use it; each sentence names its command, such as `trimtab plan`."""
    see: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The complete entry as one text."""
        parts = (self.what, self.cost, self.change, *self.use)
        return " ".join(part for part in parts if part)

    def faults(self) -> list[str]:
        """Return a fault if the kind is unknown."""
        return [] if self.kind in KINDS else [f"kind is {self.kind!r}, not one of {', '.join(KINDS)}"]


class ExplainedWords(Noun, frozen=True, kw_only=True):
    """Output of `trimtab explain --json` with several words."""

    text: str
    """The entries as one text."""
    words: tuple[Word, ...]


@cache
def _load_words() -> tuple[Word, ...]:
    text = files("trimtab.catalog").joinpath("words.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["word"], tuple[Word, ...])


def words(verbs: tuple[str, ...]) -> dict[str, Word]:
    """Return the entries by name that apply to these verbs.

    Entries and sentences of the file about other verbs are left out.
    """
    entries = [word for word in _load_words() if word.kind != "verb" or word.name in verbs]
    names = {word.name for word in entries}
    return {
        word.name: word.replace(
            use=tuple(sentence for sentence in word.use if _verbs_exist(sentence, verbs)),
            see=tuple(name for name in word.see if name in names),
        )
        for word in entries
    }


def _verbs_exist(sentence: str, verbs: tuple[str, ...]) -> bool:
    return all(verb in verbs for verb in _VERB.findall(sentence))


def _normalize(text: str) -> str:
    return re.sub(r"[\s_]+", "-", text.strip().lower()).strip("-")


def find_word(text: str, verbs: tuple[str, ...], more: dict[str, Word] | None = None) -> Word:
    """Return the entry for a name or an alias, in any case and with any separators.

    `more` are additional entries: glossary names take precedence over them, and they over aliases.

    >>> find_word("BFloat16", ()).name
    'bf16'
    """
    entries = words(verbs)
    by_spelling = {_normalize(alias): entry for entry in entries.values() for alias in entry.aliases}
    by_spelling |= {
        _normalize(name): entry for table in (more or {}, entries) for name, entry in table.items()
    }
    plain = _normalize(text)
    if entry := by_spelling.get(plain):
        return entry
    close = list(dict.fromkeys(by_spelling[name].name for name in find_nearest(plain, by_spelling)))
    fault = f"no such word; the nearest are {', '.join(close)}" if close else "no such word"
    raise UnknownName(f"explain {text!r}", found=fault, cure="`trimtab explain` alone lists every word.")
