"""Byte pairs: a vocabulary learnt from a text, on top of the 256 bytes, so that any text comes back whole.

A text is cut into words, and words into pieces. At first every byte is a piece. In each round the pairs of
neighbours that occur most become one piece each; pairs of a round never overlap, so that the whole round is
done at once, in numpy. The same text gives the same pieces on every machine: only whole numbers are compared,
ties go by the numbers of the pieces, and words are found by bytes, which no version of Unicode moves.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Numbers = np.ndarray[Any, np.dtype[np.int64]]

BYTES = 256
"""Pieces that every vocabulary has."""
WORD = re.compile(
    rb" ?[A-Za-z\x80-\xff]{1,48}"  # letters, which all bytes of letters beyond ASCII count as
    rb"| ?[0-9]{1,3}"
    rb"|\r?\n[ \t]{0,64}"  # an indentation belongs to its line
    rb"|[ \t]{1,64}"
    rb"| ?[^A-Za-z0-9\x80-\xff\s\x00]{1,16}"
    rb"|[\s\x00]"
)
"""Every byte is in exactly one match."""
STEEP = 2
"""A round takes pairs that occur at least as often as the most frequent one divided by this."""
LEAST = 2
"""Occurrences of a pair that is worth a piece."""
REMEMBERED = 1_000_000
"""Words whose pieces are kept while a text is encoded."""
_SHIFT = 24
"""Bits for the right one of a pair."""


class Pieces:
    """A vocabulary: bytes, and rounds of pairs that became one."""

    def __init__(self, rounds: Iterable[Numbers] = ()) -> None:
        """Each round is an array of pairs; piece 256 is the first pair of the first round, and so on."""
        self.rounds = [np.asarray(one, dtype=np.int64).reshape(-1, 2) for one in rounds]
        starts = BYTES + np.cumsum([0, *(len(one) for one in self.rounds)])
        self.size = int(starts[-1])
        """How many pieces there are."""
        self._merges = [_Merge(pairs, int(start)) for pairs, start in zip(self.rounds, starts, strict=False)]

    def words(self, words: list[bytes]) -> tuple[Numbers, Numbers]:
        """The pieces of words, one after the other, and how many each word has."""
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        flat = np.frombuffer(b"".join(words), dtype=np.uint8).astype(np.int64)
        owner = np.repeat(np.arange(len(words)), lengths)
        for merge in self._merges:
            flat, owner = merge.done(flat, owner)
        return flat, np.bincount(owner, minlength=len(words))

    def encode(self, text: bytes) -> Numbers:
        """The pieces of a text."""
        found = list(self.encoded([text]))
        return found[0] if found else np.zeros(0, dtype=np.int64)

    def encoded(self, chunks: Iterable[bytes]) -> Iterator[Numbers]:
        """The pieces of a long text, chunk by chunk; a word is cut into pieces once."""
        if not self.rounds:
            for chunk in chunks:
                yield np.frombuffer(chunk, dtype=np.uint8).astype(np.int64)
            return
        number: dict[bytes, int] = {}
        lengths, starts, pool = (np.zeros(0, dtype=np.int64) for _ in range(3))
        for chunk in chunks:
            words = WORD.findall(chunk)
            if len(number) > REMEMBERED:
                number, lengths, starts, pool = {}, lengths[:0], starts[:0], pool[:0]
            fresh = [word for word in dict.fromkeys(words) if word not in number]
            if fresh:
                flat, counts = self.words(fresh)
                number.update(zip(fresh, range(len(number), len(number) + len(fresh)), strict=True))
                starts = np.concatenate([starts, len(pool) + np.cumsum(counts) - counts])
                lengths = np.concatenate([lengths, counts])
                pool = np.concatenate([pool, flat])
            which = np.fromiter(map(number.__getitem__, words), dtype=np.int64, count=len(words))
            many = lengths[which]
            ends = np.cumsum(many)
            within = np.arange(int(many.sum())) - np.repeat(ends - many, many)
            yield pool[np.repeat(starts[which], many) + within]

    @cached_property
    def texts(self) -> list[bytes]:
        """What each piece stands for."""
        found = [bytes([index]) for index in range(BYTES)]
        for pairs in self.rounds:
            found += [found[left] + found[right] for left, right in pairs.tolist()]
        return found

    def decode(self, pieces: Iterable[int]) -> bytes:
        """The text of pieces; those that were never learnt stand for nothing."""
        texts = self.texts
        return b"".join(texts[piece] for piece in map(int, pieces) if 0 <= piece < len(texts))


class _Merge:
    """One round: pairs that become one piece."""

    def __init__(self, pairs: Numbers, start: int) -> None:
        keys = (pairs[:, 0] << _SHIFT) | pairs[:, 1]
        order = np.argsort(keys, kind="stable")
        self._keys, self._pieces = keys[order], (start + np.arange(len(pairs)))[order]
        self._begins = np.zeros(start, dtype=bool)
        self._begins[pairs[:, 0]] = True

    def done(self, flat: Numbers, owner: Numbers) -> tuple[Numbers, Numbers]:
        """Pieces and the words they belong to, after this round."""
        # A piece that begins no pair of the round is most often the case, and quick to see.
        places = np.flatnonzero(self._begins[flat[:-1]] & (owner[1:] == owner[:-1]))
        keys = (flat[places] << _SHIFT) | flat[places + 1]
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        hit = self._keys[at] == keys
        places, made = places[hit], self._pieces[at[hit]]
        wanted = _every_other(places, flat[places] == flat[places + 1])
        places, made = places[wanted], made[wanted]
        flat = flat.copy()
        flat[places] = made
        gone = np.zeros(len(flat), dtype=bool)
        gone[places + 1] = True
        return flat[~gone], owner[~gone]


def _every_other(places: Numbers, twins: Any) -> Any:
    """Which pairs to join: all, but of twins in a row (aaaa) the first, the third and so on."""
    wanted = np.ones(len(places), dtype=bool)
    rows = places[twins]
    if len(rows):
        fresh = np.ones(len(rows), dtype=bool)
        fresh[1:] = np.diff(rows) != 1
        first = np.maximum.accumulate(np.where(fresh, rows, 0))
        wanted[twins] = (rows - first) % 2 == 0
    return wanted


def count(chunks: Iterable[bytes]) -> Counter[bytes]:
    """How often each word occurs."""
    found: Counter[bytes] = Counter()
    for chunk in chunks:
        found.update(WORD.findall(chunk))
    return found


def learn(words: Counter[bytes], size: int, say: Callable[[int], None] = lambda _: None) -> Pieces:
    """A vocabulary of at most `size` pieces; of fewer where the words have no more pairs that come again.

    `say` is told how many there are, now and then.
    """
    several = sorted(word for word, times in words.items() if times >= LEAST and len(word) > 1)
    times = np.array([words[word] for word in several], dtype=np.int64)
    lengths = np.array([len(word) for word in several], dtype=np.int64)
    flat = np.frombuffer(b"".join(several), dtype=np.uint8).astype(np.int64)
    owner = np.repeat(np.arange(len(several)), lengths)
    rounds: list[Numbers] = []
    known = BYTES
    while known < size and len(flat):
        pairs = _chosen(flat, owner, times, size - known)
        if not len(pairs):
            break
        flat, owner = _Merge(pairs, known).done(flat, owner)
        rounds.append(pairs)
        known += len(pairs)
        # A word that has become one piece has no pairs left.
        open_ones = np.bincount(owner, minlength=len(several))[owner] > 1
        flat, owner = flat[open_ones], owner[open_ones]
        say(known)
    return Pieces(rounds)


def _chosen(flat: Numbers, owner: Numbers, times: Numbers, most: int) -> Numbers:
    """The pairs of the next round: those that occur most, none beginning with what another ends with."""
    together = owner[1:] == owner[:-1]
    keys = ((flat[:-1] << _SHIFT) | flat[1:])[together]
    found, inverse = np.unique(keys, return_inverse=True)
    # Exact: a sum of whole numbers below 2 to the 53rd.
    often = np.bincount(inverse, weights=times[owner[:-1][together]]).astype(np.int64)
    if not len(often) or often.max() < LEAST:
        return np.zeros((0, 2), dtype=np.int64)
    order = np.lexsort((found, -often))
    order = order[often[order] >= max(LEAST, int(often.max()) // STEEP)]
    begins: set[int] = set()
    ends: set[int] = set()
    chosen = []
    for key in found[order].tolist():
        left, right = key >> _SHIFT, key & ((1 << _SHIFT) - 1)
        if left in ends or right in begins or (left == right and left in begins):
            continue
        begins.add(left)
        ends.add(right)
        chosen.append((left, right))
        if len(chosen) == most:
            break
    return np.array(chosen, dtype=np.int64)
