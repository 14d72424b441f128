"""Which samples an optimizer step takes, and which of them a rank takes: pure sums.

The order of an epoch is one permutation of the samples, drawn from the seed and the epoch alone. A step takes
the next `global_batch` of them and ranks share that out, so the number of ranks, the micro-batch and the
workers have no say in what is learnt from when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trimtab.spec.base import Noun, below

if TYPE_CHECKING:
    from collections.abc import Sequence

    Indices = np.ndarray[Any, np.dtype[np.int64]]
    Words = np.ndarray[Any, np.dtype[np.uint64]]

_MASK = 2**64 - 1
_ROUNDS = 8
_SORTED = 4096
"""Datasets up to this size are put in the order of a hash of each number: a network over few bits has too few
permutations to be fair to them."""


class Order(Noun, frozen=True, kw_only=True):
    """What decides the order of samples, and nothing else does.

    >>> order = Order(samples=10, global_batch=4, seed=1)
    >>> [len(order.batch(step).indices) for step in range(4)]
    [4, 4, 2, 4]
    """

    derived = ("steps_per_epoch",)

    samples: int
    """In the dataset."""
    global_batch: int
    """Samples an optimizer step; the last step of an epoch takes what is left."""
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every sample once."""
        return -(-self.samples // self.global_batch)

    def faults(self) -> list[str]:
        """An epoch holds at least one global batch."""
        wrong = below(1, global_batch=self.global_batch)
        if self.samples < self.global_batch:
            wrong.append(f"{self.samples} samples do not make one global_batch of {self.global_batch}")
        return wrong

    def batch(self, step: int) -> Batch:
        """The samples of an optimizer step, counted from 0 over all epochs."""
        epoch, within = divmod(step, self.steps_per_epoch)
        start = within * self.global_batch
        stop = min(start + self.global_batch, self.samples)
        return Batch(step, epoch, epoch_order(self.seed, epoch, self.samples, start, stop))


class Batch(NamedTuple):
    """The samples of one optimizer step."""

    step: int
    epoch: int
    indices: Indices


def epoch_order(seed: int, epoch: int, samples: int, start: int = 0, stop: int | None = None) -> Indices:
    """Places start to stop of the permutation of an epoch.

    A Feistel network keyed by seed and epoch permutes the numbers below a power of two; a number that lands
    outside of the dataset is sent through again until it lands inside, which keeps it a permutation. Each
    place is computed alone: a step of a dataset of 10^12 costs what a step of 10^4 does, and no rank ever
    holds the whole order. Small datasets are sorted by a hash instead.

    >>> sorted(epoch_order(seed=3, epoch=0, samples=5).tolist())
    [0, 1, 2, 3, 4]
    """
    stop = samples if stop is None else stop
    if samples <= _SORTED:
        keyed = _hashed(np.arange(samples, dtype=np.uint64), mixed(seed, epoch))
        return np.argsort(keyed, kind="stable")[start:stop].astype(np.int64)
    values = np.arange(start, stop, dtype=np.uint64)
    bits = (samples - 1).bit_length()
    keys = [mixed(seed, epoch, number) for number in range(_ROUNDS)]
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _permuted(values[outside], bits, keys)
        outside = values >= samples
    return values.astype(np.int64)


def _permuted(values: Words, bits: int, keys: Sequence[int]) -> Words:
    """The Feistel network: each half in turn is changed by a hash of the other."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number, key in enumerate(keys):
        if number % 2:
            low = low ^ (_hashed(high, key) & low_mask)
        else:
            high = high ^ (_hashed(low, key) & high_mask)
    return (high << low_bits) | low


def _hashed(values: Words, key: int) -> Words:
    """The finalizer of splitmix64, over keyed words; numpy's unsigned words wrap around silently."""
    words = values + np.uint64(key)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def mixed(*numbers: int) -> int:
    """One word of 64 bits from several whole numbers: the same on every machine and version.

    >>> mixed(1, 2) == mixed(1, 2), mixed(1, 2) == mixed(2, 1)
    (True, False)
    """
    word = 0
    for number in numbers:
        word = (word ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
        word ^= word >> 31
    return word


def bounds(samples: int, data_parallel: int, shares: Sequence[int] = ()) -> list[int]:
    """Where the share of each rank begins, and where the last one ends.

    Ranks that are alike differ by one sample at most. `shares` are the samples of a full global batch that
    unlike ranks take: a full batch is shared out exactly so, a short one in proportion.

    >>> bounds(10, 4), bounds(40, 2, shares=[30, 10]), bounds(10, 2, shares=[30, 10])
    ([0, 2, 5, 7, 10], [0, 30, 40], [0, 7, 10])
    """
    weights = list(shares) or [1] * data_parallel
    assert len(weights) == data_parallel  # noqa: S101 - a Setting checks its shares
    total, before = sum(weights), 0
    places = [0]
    for weight in weights:
        before += weight
        places.append(samples * before // total)
    return places


def share_of(indices: Indices, rank: int, data_parallel: int, shares: Sequence[int] = ()) -> Indices:
    """What one data-parallel rank takes of a batch: a run of it, empty where there are too few samples."""
    places = bounds(len(indices), data_parallel, shares)
    return indices[places[rank] : places[rank + 1]]
