"""What all nouns share: frozen, validated, and JSON both ways."""

from __future__ import annotations

import hashlib
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args, get_type_hints

import msgspec

from trimtab.errors import BrokenFile

if TYPE_CHECKING:
    from pathlib import Path

SOURCE_KINDS = ("detected", "measured", "catalogued", "derived", "assumed", "stated")
"""How a fact came to be known. `derived`: computed from detected facts by a rule; `assumed`: nobody
said, and the text after the colon says on what ground."""


class Noun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A frozen value. `replace` varies it, `to_json` and `from_json` carry it.

    Subclasses name in `derived` the properties that readers of the JSON want and that follow from the
    fields: they are written, and ignored when read back, so that they can never disagree.
    """

    derived: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Say what is wrong with the values; nothing where there is nothing to check."""
        wrong = self.faults()
        if wrong:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(wrong))

    def faults(self) -> list[str]:
        """Sentences about values that cannot be; empty when all is well."""
        return []

    def replace(self, **changes: Any) -> Self:
        """The same value with some fields changed, validated again."""
        return msgspec.structs.replace(self, **changes)

    def to_builtins(self) -> dict[str, Any]:
        """The value as plain dicts and lists, derived properties included."""
        return {field: _plain(getattr(self, field)) for field in self.json_fields()}

    def to_json(self, *, indent: int = 0) -> str:
        """The value as JSON text; unknown is null."""
        text = msgspec.json.encode(self.to_builtins())
        return (msgspec.json.format(text, indent=indent) if indent else text).decode()

    @classmethod
    def json_fields(cls) -> tuple[str, ...]:
        """The keys of the JSON object: the fields, then what is derived from them."""
        return cls.__struct_fields__ + cls.derived

    @classmethod
    def from_builtins(cls, value: Any) -> Self:
        """The value from plain dicts and lists, validated; raises msgspec.ValidationError."""
        return msgspec.convert(without_derived(value, cls), cls)

    @classmethod
    def from_json(cls, text: str | bytes, *, origin: str = "JSON") -> Self:
        """The value from JSON text; `origin` names the text in the error."""
        name = cls.__name__
        cure = f"Give a file that trimtab wrote, whole, or make the {name} again."
        try:
            return cls.from_builtins(msgspec.json.decode(text))
        except msgspec.ValidationError as error:
            found = f"it is JSON, but not a {name}: {error}"
            if "unknown field" in str(error):
                cure = (
                    "It may have been written by another version of trimtab: read it with that one, or make "
                    f"the {name} again with this one."
                )
        except RecursionError:
            found = f"it is nested deeper than any {name}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            found = f"it is not JSON: {error}"
        raise BrokenFile(origin, found=found, cure=cure)

    @classmethod
    def from_file(cls, file: Path) -> Self | None:
        """Return the value in a file; None if there is none that can be read."""
        try:
            return cls.from_json(file.read_bytes(), origin=str(file))
        except (OSError, BrokenFile):
            return None

    def fingerprint(self) -> str:
        """Twelve hex digits that change when any field does.

        >>> from trimtab.spec import Reason
        >>> Reason(subject="gpus", value="1", why="one is enough").fingerprint()
        'b7c28d7d68fe'
        """
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:12]


def _plain(value: Any) -> Any:
    if isinstance(value, Noun):
        return value.to_builtins()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return msgspec.to_builtins(value)


def without_derived(value: Any, cls: type[Noun]) -> Any:
    """The plain value with the derived keys of `cls` and of the nouns inside it taken out."""
    if not isinstance(value, dict):
        return value
    nested = _nested_nouns(cls)
    kept = {key: one for key, one in value.items() if key not in cls.derived}
    for key, inner in nested.items():
        one = kept.get(key)
        if isinstance(one, list):
            kept[key] = [without_derived(item, inner) for item in one]
        elif isinstance(one, dict):
            kept[key] = without_derived(one, inner)
    return kept


def known_only(value: Any, cls: type[Noun]) -> Any:
    """The plain value without the keys that `cls` and the nouns inside it do not have.

    A file that a later version wrote can be looked at with this; who acts on it must insist on all of it.

    >>> from trimtab.spec import Reason
    >>> known_only({"subject": "gpus", "mood": "good"}, Reason)
    {'subject': 'gpus'}
    """
    if not isinstance(value, dict):
        return value
    nested = _nested_nouns(cls)
    kept = {key: one for key, one in value.items() if key in cls.__struct_fields__}
    for key, inner in nested.items():
        one = kept.get(key)
        if isinstance(one, list):
            kept[key] = [known_only(item, inner) for item in one]
        elif isinstance(one, dict):
            kept[key] = known_only(one, inner)
    return kept


@cache
def _nested_nouns(cls: type[Noun]) -> dict[str, type[Noun]]:
    """Which fields of a noun hold another noun, or a tuple of them."""

    def inner(hint: Any) -> type[Noun] | None:
        if isinstance(hint, type) and issubclass(hint, Noun):
            return hint
        return next((noun for get_arg in get_args(hint) if (noun := inner(get_arg))), None)

    hints = get_type_hints(cls)
    found = ((field, inner(hints[field])) for field in cls.__struct_fields__)
    return {field: noun for field, noun in found if noun is not None}


def below(minimum: float, **values: float | None) -> list[str]:
    """A sentence for each value that is known and below the minimum.

    >>> below(1, micro_batch=0, accumulation=None)
    ['micro_batch is 0, and must be at least 1']
    """
    return [
        f"{name} is {value}, and must be at least {minimum}"
        for name, value in values.items()
        if value is not None and not minimum <= value < inf
    ]


def bad_sources(sources: dict[str, str], fields: tuple[str, ...]) -> list[str]:
    """A sentence for each source that names no field, or does not say how the fact is known."""
    wrong = [f"sources names {key!r}, which is no field" for key in sources if key not in fields]
    return wrong + [
        f"the source of {key} is {text!r}, and must begin with one of {', '.join(SOURCE_KINDS)}"
        for key, text in sources.items()
        if text.split(":")[0] not in SOURCE_KINDS
    ]
