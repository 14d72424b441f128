"""How a global batch is cut into micro-batches, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import Share

if TYPE_CHECKING:
    from collections.abc import Sequence


def list_splits(global_batch: int, data_parallel: int) -> list[tuple[int, int]]:
    """Every (micro-batch, accumulation) worth trying, the largest micro-batch first.

    For a number of rounds the smallest micro-batch that covers a rank's share is the best one: any larger one
    takes more memory in as many rounds, and leaves more to be desired of the last. Hence about twice the root
    of the share instead of the whole range. All divisors are among them.

    >>> cuts(16, 2), cuts(7, 2)
    ([(8, 1), (4, 2), (3, 3), (2, 4), (1, 8)], [(4, 1), (2, 2), (1, 4)])
    """
    share = -(-global_batch // data_parallel)
    found = []
    rounds = 1
    while rounds <= share:
        micro = -(-share // rounds)
        found.append((micro, -(-share // micro)))
        # The next number of rounds at which the micro-batch shrinks.
        rounds = -(-share // (micro - 1)) if micro > 1 else share + 1
    return found


def find_split(global_batch: int, data_parallel: int, *, micro_batch: int) -> tuple[int, int] | None:
    """The cut with that micro-batch; None where it is more than a rank's share."""
    share = -(-global_batch // data_parallel)
    return (micro_batch, -(-share // micro_batch)) if micro_batch <= share else None


def is_exact(global_batch: int, data_parallel: int, micro_batch: int, accumulation: int) -> bool:
    """Whether all micro-batches are full."""
    return global_batch == data_parallel * micro_batch * accumulation


def divide_evenly(global_batch: int, data_parallel: int) -> list[int]:
    """Samples of each rank where all are alike: as even as they come, and adding up exactly.

    >>> rank_samples(10, 4)
    [3, 3, 2, 2]
    """
    base, more = divmod(global_batch, data_parallel)
    return [base + (rank < more) for rank in range(data_parallel)]


def list_micro_batches(samples: int, micro_batch: int) -> list[int]:
    """The sizes of a rank's micro-batches: the last may be smaller.

    >>> micro_batches(10, 4)
    [4, 4, 2]
    """
    return [min(micro_batch, samples - begin) for begin in range(0, samples, micro_batch)]


def divide_in_proportion(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int] | None:
    """Whole numbers in proportion to weights that add up to `total`, from one up to `most` each.

    None where that cannot be. What rounding leaves goes to those that it took most from.

    >>> in_proportion(10, [2.0, 1.0], [10, 10]), in_proportion(10, [1.0, 1.0], [4, 9])
    ([7, 3], [4, 6])
    """
    if not len(weights) <= total <= sum(most) or min(most) < 1:
        return None
    share = total / sum(weights)
    found = [max(1, min(top, int(weight * share))) for weight, top in zip(weights, most, strict=True)]
    while (left := total - sum(found)) != 0:
        step = 1 if left > 0 else -1
        room = [index for index, one in enumerate(found) if (one < most[index] if step > 0 else one > 1)]
        index = max(room, key=lambda one: step * (weights[one] * share - found[one]))
        found[index] += step
    return found


def make_share(samples: int, micro_batch: int) -> Share:
    """A rank's share, cut as evenly as its number of rounds allows."""
    rounds = -(-samples // micro_batch)
    micro = -(-samples // rounds)
    return Share(samples=samples, micro_batch=micro, accumulation=-(-samples // micro))
