"""Reads a pickle that nobody vouches for: numbers, texts and plain containers, and nothing that runs code.

A pickle is a program. This reader refuses every instruction that names a class or a function, which is all
that such a program could do harm with; memory snapshots and flight records of torch need none.
"""

from __future__ import annotations

import pickle
from typing import IO, Any, NoReturn

MOST_BYTES = 1 << 30
"""A larger file is refused: its objects would take ten times as much memory."""


class NotPlainPickle(ValueError):  # noqa: N818 - reads as a sentence in `except`
    """The pickle holds something that is no plain value, or is broken."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise NotPlainPickle(f"it names {module}.{name}, and only plain values are read")

    def persistent_load(self, _: Any) -> NoReturn:
        raise NotPlainPickle("it refers to something outside of itself, as checkpoints do")


def load_plain_pickle(stream: IO[bytes]) -> Any:
    """The plain value in a pickle; raises NotPlain for anything else, whatever its bytes are."""
    try:
        return _PlainUnpickler(stream, encoding="utf-8", errors="replace").load()
    except NotPlainPickle:
        raise
    except MemoryError:
        raise NotPlainPickle("it asks for more memory than there is") from None
    except RecursionError:
        raise NotPlainPickle("it is nested too deeply") from None
    except Exception as error:  # broken pickles raise nearly anything
        raise NotPlainPickle(f"it is broken: {type(error).__name__}") from error
