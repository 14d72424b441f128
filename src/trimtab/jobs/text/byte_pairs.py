"""Train and apply a byte-pair encoding, in numpy and reproducible on every machine.

A text is split into words, and words into pieces. At first every byte is a piece. In each round, the most
frequent pairs of neighbours become one piece each; pairs of a round never overlap, so that a round is
vectorised. The same text gives the same pieces on every machine: only integers are compared, ties are
resolved by piece numbers, and words are split by bytes, independent of the Unicode version.
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
"""Number of single-byte pieces, which every vocabulary has."""
WORD = re.compile(
    rb" ?[A-Za-z\x80-\xff]{1,48}"  # letters; all bytes beyond ASCII count as letters
    rb"| ?[0-9]{1,3}"
    rb"|\r?\n[ \t]{0,64}"  # an indentation belongs to its line
    rb"|[ \t]{1,64}"
    rb"| ?[^A-Za-z0-9\x80-\xff\s\x00]{1,16}"
    rb"|[\s\x00]"
)
"""Every byte is in exactly one match."""
ROUND_RATIO = 2
"""A round takes pairs that occur at least as often as the most frequent one divided by this."""
FEWEST_OCCURRENCES = 2
"""Minimum occurrences of a pair that becomes a piece."""
MOST_CACHED_WORDS = 1_000_000
"""Maximum words in the cache while a text is encoded."""
_SHIFT = 24
"""Bits for the right piece of a pair."""


class BytePairs:
    """A vocabulary: the bytes, and rounds of merged pairs."""

    def __init__(self, rounds: Iterable[Numbers] = ()) -> None:
        """Each round is an array of pairs; piece 256 is the first pair of the first round, and so on."""
        self.rounds = [np.asarray(pairs, dtype=np.int64).reshape(-1, 2) for pairs in rounds]
        starts = BYTES + np.cumsum([0, *(len(pairs) for pairs in self.rounds)])
        self.size = int(starts[-1])
        """Number of pieces."""
        self._merges = [_Merge(pairs, int(start)) for pairs, start in zip(self.rounds, starts, strict=False)]

    def encode_words(self, words: list[bytes]) -> tuple[Numbers, Numbers]:
        """Return the pieces of all words in one array, and the number of pieces of each word."""
        lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
        flat = np.frombuffer(b"".join(words), dtype=np.uint8).astype(np.int64)
        owner = np.repeat(np.arange(len(words)), lengths)
        for merge in self._merges:
            flat, owner = merge.apply(flat, owner)
        return flat, np.bincount(owner, minlength=len(words))

    def encode(self, text: bytes) -> Numbers:
        """Return the pieces of a text."""
        arrays = list(self.encode_chunks([text]))
        return arrays[0] if arrays else np.zeros(0, dtype=np.int64)

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[Numbers]:
        """Yield the pieces of a long text, chunk by chunk; the pieces of a word are cached."""
        if not self.rounds:
            for chunk in chunks:
                yield np.frombuffer(chunk, dtype=np.uint8).astype(np.int64)
            return
        number: dict[bytes, int] = {}
        lengths, starts, pool = (np.zeros(0, dtype=np.int64) for _ in range(3))
        for chunk in chunks:
            words = WORD.findall(chunk)
            if len(number) > MOST_CACHED_WORDS:
                number, lengths, starts, pool = {}, lengths[:0], starts[:0], pool[:0]
            fresh = [word for word in dict.fromkeys(words) if word not in number]
            if fresh:
                flat, counts = self.encode_words(fresh)
                number.update(zip(fresh, range(len(number), len(number) + len(fresh)), strict=True))
                starts = np.concatenate([starts, len(pool) + np.cumsum(counts) - counts])
                lengths = np.concatenate([lengths, counts])
                pool = np.concatenate([pool, flat])
            which = np.fromiter(map(number.__getitem__, words), dtype=np.int64, count=len(words))
            counts = lengths[which]
            ends = np.cumsum(counts)
            within = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
            yield pool[np.repeat(starts[which], counts) + within]

    @cached_property
    def texts(self) -> list[bytes]:
        """The bytes of each piece."""
        texts = [bytes([index]) for index in range(BYTES)]
        for pairs in self.rounds:
            texts += [texts[left] + texts[right] for left, right in pairs.tolist()]
        return texts

    def decode(self, pieces: Iterable[int]) -> bytes:
        """Return the text of pieces; numbers outside the vocabulary are skipped."""
        texts = self.texts
        return b"".join(texts[piece] for piece in map(int, pieces) if 0 <= piece < len(texts))


class _Merge:
    """A round of pairs that are merged."""

    def __init__(self, pairs: Numbers, start: int) -> None:
        keys = (pairs[:, 0] << _SHIFT) | pairs[:, 1]
        order = np.argsort(keys, kind="stable")
        self._keys, self._pieces = keys[order], (start + np.arange(len(pairs)))[order]
        self._begins = np.zeros(start, dtype=bool)
        self._begins[pairs[:, 0]] = True

    def apply(self, flat: Numbers, owner: Numbers) -> tuple[Numbers, Numbers]:
        """Return the pieces, and the words they belong to, after this round."""
        # Most pieces start no pair of the round, which is a cheap check.
        places = np.flatnonzero(self._begins[flat[:-1]] & (owner[1:] == owner[:-1]))
        keys = (flat[places] << _SHIFT) | flat[places + 1]
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        hit = self._keys[at] == keys
        places, made = places[hit], self._pieces[at[hit]]
        chosen = _every_other(places, flat[places] == flat[places + 1])
        places, made = places[chosen], made[chosen]
        flat = flat.copy()
        flat[places] = made
        merged = np.zeros(len(flat), dtype=bool)
        merged[places + 1] = True
        return flat[~merged], owner[~merged]


def _every_other(places: Numbers, twins: Any) -> Any:
    """Return which pairs to merge: all, but of equal pairs in a row (aaaa) only every other."""
    chosen = np.ones(len(places), dtype=bool)
    rows = places[twins]
    if len(rows):
        fresh = np.ones(len(rows), dtype=bool)
        fresh[1:] = np.diff(rows) != 1
        first = np.maximum.accumulate(np.where(fresh, rows, 0))
        chosen[twins] = (rows - first) % 2 == 0
    return chosen


def count_words(chunks: Iterable[bytes]) -> Counter[bytes]:
    """Return how often each word occurs."""
    counts: Counter[bytes] = Counter()
    for chunk in chunks:
        counts.update(WORD.findall(chunk))
    return counts


def train_byte_pairs(
    words: Counter[bytes], size: int, report: Callable[[int], None] = lambda _: None
) -> BytePairs:
    """Train a vocabulary of at most `size` pieces; fewer if no pair occurs often enough.

    `report` is called with the current size after each round.
    """
    repeated = sorted(word for word, times in words.items() if times >= FEWEST_OCCURRENCES and len(word) > 1)
    times = np.array([words[word] for word in repeated], dtype=np.int64)
    lengths = np.array([len(word) for word in repeated], dtype=np.int64)
    flat = np.frombuffer(b"".join(repeated), dtype=np.uint8).astype(np.int64)
    owner = np.repeat(np.arange(len(repeated)), lengths)
    rounds: list[Numbers] = []
    vocabulary = BYTES
    while vocabulary < size and len(flat):
        pairs = _choose_pairs(flat, owner, times, size - vocabulary)
        if not len(pairs):
            break
        flat, owner = _Merge(pairs, vocabulary).apply(flat, owner)
        rounds.append(pairs)
        vocabulary += len(pairs)
        # Drop words that have become one piece: they have no pairs left.
        unfinished = np.bincount(owner, minlength=len(repeated))[owner] > 1
        flat, owner = flat[unfinished], owner[unfinished]
        report(vocabulary)
    return BytePairs(rounds)


def _choose_pairs(flat: Numbers, owner: Numbers, times: Numbers, most: int) -> Numbers:
    """Return the pairs of the next round: the most frequent; none starts with the end of another."""
    together = owner[1:] == owner[:-1]
    keys = ((flat[:-1] << _SHIFT) | flat[1:])[together]
    unique, inverse = np.unique(keys, return_inverse=True)
    # Exact: sums of integers below 2**53.
    occurrences = np.bincount(inverse, weights=times[owner[:-1][together]]).astype(np.int64)
    if not len(occurrences) or occurrences.max() < FEWEST_OCCURRENCES:
        return np.zeros((0, 2), dtype=np.int64)
    order = np.lexsort((unique, -occurrences))
    order = order[occurrences[order] >= max(FEWEST_OCCURRENCES, int(occurrences.max()) // ROUND_RATIO)]
    begins: set[int] = set()
    ends: set[int] = set()
    chosen = []
    for key in unique[order].tolist():
        left, right = key >> _SHIFT, key & ((1 << _SHIFT) - 1)
        if left in ends or right in begins or (left == right and left in begins):
            continue
        begins.add(left)
        ends.add(right)
        chosen.append((left, right))
        if len(chosen) == most:
            break
    return np.array(chosen, dtype=np.int64)
