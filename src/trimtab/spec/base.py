"""Base class of all data types: frozen values that are validated and convert to and from JSON."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args, get_type_hints

import msgspec

from trimtab.errors import BrokenFile

if TYPE_CHECKING:
    from pathlib import Path

SOURCE_KINDS = ("detected", "measured", "catalogued", "derived", "assumed", "stated")
"""How a fact is known. `derived`: computed from detected facts by a rule; `assumed`: a default, with its
reason after the colon."""


LARGEST = 1e30
"""No count, size or time of a job is larger; sums and products of smaller ones stay finite."""


class Noun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Frozen value: base class of all data types here.

    `replace` returns a changed copy; `to_json` and `from_json` convert it. Subclasses list in `derived` the
    properties that the JSON also contains. They are written, and ignored when read, so that they always agree
    with the fields.
    """

    derived: ClassVar[tuple[str, ...]] = ()
    may_lack: ClassVar[tuple[str, ...]] = ()
    """Keys that some writers leave out of the JSON if there is nothing to say."""

    def __post_init__(self) -> None:
        """Raise ValueError with all faults, if there are any."""
        wrong = self.faults()
        if wrong:
            raise ValueError(f"{type(self).__name__}: " + "; ".join(wrong))

    def faults(self) -> list[str]:
        """Return a sentence for each invalid value; empty if all values are valid."""
        return []

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated again."""
        return msgspec.structs.replace(self, **changes)

    def to_builtins(self) -> dict[str, Any]:
        """Return the value as plain dicts and lists, with derived properties."""
        names = zip(self.json_fields(), self.__struct_fields__ + self.derived, strict=True)
        return {key: _to_plain(getattr(self, name)) for key, name in names}

    def to_json(self, *, indent: int = 0) -> str:
        """Return the value as JSON text; unknown is null."""
        text = msgspec.json.encode(self.to_builtins())
        return (msgspec.json.format(text, indent=indent) if indent else text).decode()

    @classmethod
    def json_fields(cls) -> tuple[str, ...]:
        """Return the keys of the JSON object: the fields, then the derived properties."""
        return cls.__struct_encode_fields__ + cls.derived

    @classmethod
    def from_builtins(cls, value: Any) -> Self:
        """Return the value from plain dicts and lists, validated; raise msgspec.ValidationError."""
        return msgspec.convert(remove_derived_keys(value, cls), cls)

    @classmethod
    def from_json(cls, text: str | bytes, *, origin: str = "JSON") -> Self:
        """Return the value from JSON text; raise BrokenFile, which names `origin`."""
        name = cls.__name__
        cure = f"Give a complete file that trimtab wrote, or make the {name} again."
        try:
            return cls.from_builtins(msgspec.json.decode(text))
        except msgspec.ValidationError as error:
            found = f"it is JSON, but not a {name}: {error}"
            if "unknown field" in str(error):
                cure = (
                    "It may have been written by another version of trimtab: read it with that version, or "
                    f"make the {name} again with this one."
                )
        except RecursionError:
            found = f"it is nested deeper than any {name}"
        except (msgspec.DecodeError, ValueError) as error:
            found = f"it is not JSON: {error}"
        raise BrokenFile(origin, found=found, cure=cure)

    @classmethod
    def from_file(cls, file: Path) -> Self | None:
        """Return the value in a file; None if the file is missing or broken."""
        try:
            return cls.from_json(file.read_bytes(), origin=str(file))
        except (OSError, BrokenFile):
            return None

    def fingerprint(self) -> str:
        """Return twelve hex digits that change when any field changes.

        >>> from trimtab.spec import Reason
        >>> Reason(subject="gpus", value="1", why="one is enough").fingerprint()
        'b7c28d7d68fe'
        """
        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:12]


def _to_plain(value: Any) -> Any:
    if isinstance(value, Noun):
        return value.to_builtins()
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    return msgspec.to_builtins(value)


def remove_derived_keys(value: Any, cls: type[Noun]) -> Any:
    """Return the plain value without the derived keys of `cls` and of the values inside it."""
    if not isinstance(value, dict):
        return value
    nested = _nested_classes(cls)
    remaining = {key: item for key, item in value.items() if key not in cls.derived}
    for key, inner in nested.items():
        member = remaining.get(key)
        if isinstance(member, list):
            remaining[key] = [remove_derived_keys(item, inner) for item in member]
        elif isinstance(member, dict):
            remaining[key] = remove_derived_keys(member, inner)
    return remaining


def remove_unknown_keys(value: Any, cls: type[Noun]) -> Any:
    """Return the plain value without the keys that `cls` and the values inside it do not have.

    Use this to display a file that a later version wrote. To act on a file, read it in full instead.

    >>> from trimtab.spec import Reason
    >>> remove_unknown_keys({"subject": "gpus", "mood": "good"}, Reason)
    {'subject': 'gpus'}
    """
    if not isinstance(value, dict):
        return value
    nested = _nested_classes(cls)
    remaining = {key: item for key, item in value.items() if key in cls.__struct_fields__}
    for key, inner in nested.items():
        member = remaining.get(key)
        if isinstance(member, list):
            remaining[key] = [remove_unknown_keys(item, inner) for item in member]
        elif isinstance(member, dict):
            remaining[key] = remove_unknown_keys(member, inner)
    return remaining


@cache
def _nested_classes(cls: type[Noun]) -> dict[str, type[Noun]]:
    """Return the class of each field that holds another frozen value, or a tuple of them."""

    def inner(hint: Any) -> type[Noun] | None:
        if isinstance(hint, type) and issubclass(hint, Noun):
            return hint
        return next((nested for argument in get_args(hint) if (nested := inner(argument))), None)

    hints = get_type_hints(cls)
    pairs = ((field, inner(hints[field])) for field in cls.__struct_fields__)
    return {field: nested for field, nested in pairs if nested is not None}


def check_minimum(minimum: float, **values: float | None) -> list[str]:
    """Return a sentence for each value that is known and below the minimum.

    >>> check_minimum(1, micro_batch=0, accumulation=None)
    ['micro_batch is 0, and must be at least 1']
    """
    return [
        f"{name} is {_format_large(value)}, and must be below {LARGEST:g}"
        if value >= LARGEST
        else f"{name} is {value}, and must be at least {minimum}"
        for name, value in values.items()
        if value is not None and not minimum <= value < LARGEST
    ]


def _format_large(value: float) -> str:
    """Return a number for a message; an integer beyond all floats only as such."""
    try:
        return f"{value:g}"
    except OverflowError:
        return "a number of hundreds of digits"


def check_sources(sources: dict[str, str], fields: tuple[str, ...]) -> list[str]:
    """Return a sentence for each source that names no field or has no valid kind."""
    wrong = [f"sources names {key!r}, which is no field" for key in sources if key not in fields]
    return wrong + [
        f"the source of {key} is {text!r}, and must begin with one of {', '.join(SOURCE_KINDS)}"
        for key, text in sources.items()
        if text.split(":")[0] not in SOURCE_KINDS
    ]
