"""Finds the few places of a large text at which one of many needles begins.

A log is mostly lines that nobody needs. Every run of four bytes is looked up in a table of 65,536 answers:
with numpy that takes two seconds a gigabyte, however many needles there are. Small texts are searched needle
by needle, which is quicker than loading numpy. Both ways find the same.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SMALL_BYTES = 1 << 20
GRAM = 4
STRIDE = 1 << 18
"""Bytes that are looked at together: what is computed of them stays in the processor's cache."""
_HASH = 0x9E3779B1
_BITS = 16
_COMMON = {ord(letter): 4 - rank // 8 for rank, letter in enumerate(" 0e1ta2oin3s:rl.d4=5c,um/-p6[]f_789gbh")}
_HEALTHY = (
    b"{'loss': 2, 'grad_norm': 1, 'learning_rate': 5, 'epoch': 3, 'train_loss': 2} Epoch 2: loss=2 "
    b'train_loss=3, {"loss": 2, "step": 3} iter 1: loss 2, lm loss: 2, loss:  3 [Rank 0] '
    b"[rank0]: INFO step=3 loss = 2"
)
"""What the lines of a run that goes well are made of."""


class NeedleSieve:
    """Needles, ready to be looked for. None is shorter than eight bytes."""

    def __init__(self, needles: Iterable[bytes]) -> None:
        self.needles = tuple(dict.fromkeys(needles))
        self._tables: tuple[Any, Any] | None = None
        self._at: dict[bytes, list[tuple[int, bytes]]] = {}
        for needle in self.needles:
            offset = rarest_offset(needle)
            self._at.setdefault(needle[offset : offset + 2 * GRAM], []).append((offset, needle))

    def hits(self, data: bytes, begin: int, end: int) -> list[tuple[int, bytes]]:
        """Where needles begin from `begin` on and before `end`, in order; they may reach past `end`."""
        if not self.needles:
            return []
        found = self._few(data, begin, end) if end - begin < SMALL_BYTES else self._many(data, begin, end)
        return sorted(set(found))

    def _few(self, data: bytes, begin: int, end: int) -> list[tuple[int, bytes]]:
        return [
            (match.start(), needle)
            for needle in self.needles
            if data.find(needle, begin, end + len(needle)) >= 0
            for match in re.compile(re.escape(needle)).finditer(data, begin, end + len(needle) - 1)
        ]

    def _many(self, data: bytes, begin: int, end: int) -> list[tuple[int, bytes]]:
        longest = max(map(len, self.needles))
        last = min(len(data), end + longest)
        found: list[tuple[int, bytes]] = []
        for start in range(begin, last, STRIDE):
            for position in self._candidates(data, start, min(start + STRIDE, last)):
                for offset, needle in self._at.get(data[position : position + 2 * GRAM], ()):
                    at = position - offset
                    if begin <= at < end and data.startswith(needle, at):
                        found.append((at, needle))
        return found

    def _candidates(self, data: bytes, start: int, stop: int) -> Sequence[int]:
        """Places at which eight bytes look like those of a needle."""
        import numpy as np

        if self._tables is None:
            self._tables = (
                _hash_table(grams[:GRAM] for grams in self._at),
                _hash_table(grams[GRAM:] for grams in self._at),
            )
        first, second = self._tables
        places: list[int] = []
        for shift in range(GRAM):
            begin = start + shift
            # One more than the stride holds, to see what comes after the last.
            count = min(stop - begin + 2 * GRAM, len(data) - begin) // GRAM
            if count < 2:  # noqa: PLR2004 - a gram and the next
                continue
            grams = np.frombuffer(data, "<u4", count, begin)
            hashed = grams * np.uint32(_HASH)
            hashed >>= np.uint32(32 - _BITS)
            seen = np.flatnonzero(first.take(hashed[:-1]))
            seen = seen[second.take(hashed[seen + 1])]
            places += (begin + GRAM * seen).tolist()
        return places


def _hash_table(grams: Iterable[bytes]) -> Any:
    import numpy as np

    answers = np.zeros(1 << _BITS, dtype=bool)
    values = np.frombuffer(b"".join(grams), "<u4") * np.uint32(_HASH)
    answers[values >> np.uint32(32 - _BITS)] = True
    return answers


def rarest_offset(needle: bytes) -> int:
    """Where the eight bytes of a needle begin that a healthy log is least likely to have.

    >>> rarest_offset(b"error 12 CUDA OOM")
    9
    """
    weights = [_COMMON.get(byte, 0) for byte in needle]
    places = range(len(needle) - 2 * GRAM + 1)
    return min(
        places, key=lambda at: (needle[at : at + 2 * GRAM] in _HEALTHY, sum(weights[at : at + 2 * GRAM]))
    )
