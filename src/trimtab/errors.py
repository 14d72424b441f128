"""The errors that a user can get, each in three parts: what was given, what was found, what to do.

    TrimtabError            1   a bug of trimtab, if nothing more precise applies
    |- CannotFollow         1   an operation of the job that trimtab cannot trace
    |- WrongUse             2   a wrong flag, name, file or value
    |  |- UnknownName       2   no such device, word or key; the nearest are listed
    |  `- BrokenFile        2   a file of trimtab that cannot be read
    |- NothingFits          3   no configuration fits; the nearest change that would fit is named
    |- JobFailed            4   the job's own code raised
    `- EnvironmentFault     5   a problem of a driver, a variable or a machine

The number is the exit code of the command line.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


LONGEST_PART = 4000
"""Characters of a part of an error; longer ones are shortened in the middle."""


class TrimtabError(Exception):
    """An error with what was given, what was found, and what to do."""

    exit_code: ClassVar[int] = 1

    def __init__(self, given: str, *, found: str, cure: str) -> None:
        # A name or a value from a damaged file may be a megabyte long.
        parts = [shorten(part, LONGEST_PART) for part in (given, found, cure)]
        super().__init__(*parts)
        self.given, self.found, self.cure = parts

    def __str__(self) -> str:
        return f"{self.given}: {self.found}. {self.cure}"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _rebuild, (type(self), self.given, self.found, self.cure)

    def to_dict(self) -> dict[str, str]:
        """Return the kind and the three parts, as `error_from_dict` reads them."""
        return {"kind": type(self).__name__, "given": self.given, "found": self.found, "cure": self.cure}


def error_from_dict(parts: Mapping[str, str]) -> TrimtabError:
    """Return the error that `to_dict` described; a plain TrimtabError if its kind is unknown."""
    kind = globals().get(parts["kind"])
    cls = kind if isinstance(kind, type) and issubclass(kind, TrimtabError) else TrimtabError
    return cls(parts["given"], found=parts["found"], cure=parts["cure"])


def _rebuild(cls: type[TrimtabError], given: str, found: str, cure: str) -> TrimtabError:
    return cls(given, found=found, cure=cure)


class WrongUse(TrimtabError, ValueError):  # noqa: N818 - the names read as sentences in `raise`
    """A wrong flag, name, file or value."""

    exit_code = 2


class UnknownName(WrongUse, LookupError):  # noqa: N818
    """An unknown name; the nearest known names are in `found`."""


class BrokenFile(WrongUse):
    """A file of trimtab that cannot be read or decoded."""


class NothingFits(TrimtabError):  # noqa: N818
    """No configuration fits; the nearest changes that would fit are in `cure`, and as values in `nearest`."""

    exit_code = 3
    nearest: tuple[Any, ...] = ()
    closest: Any = None
    """The setting that misses least; None if it is not known."""


class JobFailed(TrimtabError):  # noqa: N818
    """The user's own job raised."""

    exit_code = 4


class CannotFollow(TrimtabError):  # noqa: N818
    """Tracing failed at an operation of the job, and the job is not known to be at fault."""


class EnvironmentFault(TrimtabError):  # noqa: N818
    """A problem of the machine, its drivers or its environment variables."""

    exit_code = 5


def shorten(text: str, most: int = 120) -> str:
    """Return a text for an error message, shortened in the middle if it is too long.

    >>> shorten("4xH100"), shorten("x" * 500, 9)
    ('4xH100', 'xx ... xx')
    """
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def find_nearest(name: str, known: Iterable[str], *, count: int = 4) -> list[str]:
    """Return the known names that are most similar to a name, best first.

    >>> find_nearest("H1000", ["H100", "H200", "T4"])
    ['H100', 'H200']
    """
    by_lower = {text.lower(): text for text in known}
    matches = get_close_matches(name.lower(), list(by_lower), n=count, cutoff=0.5)
    return [by_lower[match] for match in matches]
