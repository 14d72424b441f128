"""Reads a pickle that nobody vouches for: numbers, texts and plain containers, and nothing that runs code.

A pickle is a program. This reader refuses every instruction that names a class or a function, which is all
that such a program could do harm with; memory snapshots and flight records of torch need none.
"""

from __future__ import annotations

import pickle
from typing import IO, Any, NoReturn

MOST_BYTES = 1 << 30
"""A larger file is refused: its objects would take ten times as much memory."""


class NotPlain(ValueError):  # noqa: N818 - reads as a sentence in `except`
    """The pickle holds something that is no plain value, or is broken."""


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise NotPlain(f"it names {module}.{name}, and only plain values are read")

    def persistent_load(self, _: Any) -> NoReturn:
        raise NotPlain("it refers to something outside of itself, as checkpoints do")


def load(stream: IO[bytes]) -> Any:
    """The plain value in a pickle; raises NotPlain for anything else, whatever its bytes are."""
    try:
        return _Plain(stream, encoding="utf-8", errors="replace").load()
    except NotPlain:
        raise
    except MemoryError:
        raise NotPlain("it asks for more memory than there is") from None
    except RecursionError:
        raise NotPlain("it is nested too deeply") from None
    except Exception as error:  # broken pickles raise nearly anything
        raise NotPlain(f"it is broken: {type(error).__name__}") from error
