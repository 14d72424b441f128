"""Split a global batch exactly into ranks, micro-batches and accumulation rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import Share

if TYPE_CHECKING:
    from collections.abc import Sequence


def list_splits(global_batch: int, data_parallel: int) -> list[tuple[int, int]]:
    """Return every (micro-batch, accumulation) worth trying, the largest micro-batch first.

    For a number of rounds, only the smallest micro-batch that covers a rank's share is listed: a larger one
    takes more memory for as many rounds, and its last micro-batch is emptier. This gives about twice the
    square root of the share instead of the full range. All divisors are included.

    >>> list_splits(16, 2), list_splits(7, 2)
    ([(8, 1), (4, 2), (3, 3), (2, 4), (1, 8)], [(4, 1), (2, 2), (1, 4)])
    """
    share = -(-global_batch // data_parallel)
    splits = []
    rounds = 1
    while rounds <= share:
        micro = -(-share // rounds)
        splits.append((micro, -(-share // micro)))
        # The next number of rounds at which the micro-batch shrinks.
        rounds = -(-share // (micro - 1)) if micro > 1 else share + 1
    return splits


def find_split(global_batch: int, data_parallel: int, *, micro_batch: int) -> tuple[int, int] | None:
    """Return (micro-batch, accumulation) for a micro-batch; None if it is larger than a rank's share."""
    share = -(-global_batch // data_parallel)
    return (micro_batch, -(-share // micro_batch)) if micro_batch <= share else None


def is_exact(global_batch: int, data_parallel: int, micro_batch: int, accumulation: int) -> bool:
    """Whether all micro-batches are full."""
    return global_batch == data_parallel * micro_batch * accumulation


def divide_evenly(global_batch: int, data_parallel: int) -> list[int]:
    """Return the samples of each rank, as even as possible; they add up to the global batch.

    >>> divide_evenly(10, 4)
    [3, 3, 2, 2]
    """
    base, more = divmod(global_batch, data_parallel)
    return [base + (rank < more) for rank in range(data_parallel)]


def list_micro_batches(samples: int, micro_batch: int) -> list[int]:
    """Return the sizes of a rank's micro-batches; the last may be smaller.

    >>> list_micro_batches(10, 4)
    [4, 4, 2]
    """
    return [min(micro_batch, samples - begin) for begin in range(0, samples, micro_batch)]


def divide_in_proportion(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int] | None:
    """Return whole numbers in proportion to weights that add up to `total`, from 1 to `most` each.

    Return None if that is impossible. The remainder goes to the numbers that rounding reduced most.

    >>> divide_in_proportion(10, [2.0, 1.0], [10, 10]), divide_in_proportion(10, [1.0, 1.0], [4, 9])
    ([7, 3], [4, 6])
    """
    if not len(weights) <= total <= sum(most) or min(most) < 1:
        return None
    share = total / sum(weights)
    numbers = [max(1, min(top, int(weight * share))) for weight, top in zip(weights, most, strict=True)]
    while (left := total - sum(numbers)) != 0:
        step = 1 if left > 0 else -1
        movable = [
            index
            for index, number in enumerate(numbers)
            if (number < most[index] if step > 0 else number > 1)
        ]
        index = max(movable, key=lambda index: step * (weights[index] * share - numbers[index]))
        numbers[index] += step
    return numbers


def make_share(samples: int, micro_batch: int) -> Share:
    """Return a rank's share, with micro-batches as even as its number of rounds allows."""
    rounds = -(-samples // micro_batch)
    micro = -(-samples // rounds)
    return Share(samples=samples, micro_batch=micro, accumulation=-(-samples // micro))
