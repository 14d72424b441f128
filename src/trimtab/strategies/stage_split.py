"""Divide the blocks of a model over pipeline stages so that the slowest stage is as fast as possible.

What is before the blocks (embeddings) belongs to the first stage, and what is after them (the head and the
loss) to the last. Training counts the time of blocks (`trimtab.engine.stage_balance`); formulas predict it.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class BlockWork(NamedTuple):
    """Relative time of the parts of a model, forward and backward."""

    before: float
    """Of what is before the first block."""
    blocks: tuple[float, ...]
    after: float
    """Of what is after the last block: the head and the loss."""

    def to_tuple(self) -> tuple[float, ...]:
        """Return all parts in order, as shares of their sum."""
        parts = (self.before, *self.blocks, self.after)
        total = sum(parts) or 1.0
        return tuple(round(part / total, 6) for part in parts)


def balance_stages(work: BlockWork, ranks: int, virtual_stages: int = 1) -> tuple[int, ...]:
    """Return the number of blocks of each stage, so that the slowest rank takes the least time.

    Of several such splits, the sum of squares is least. Every stage has a block. Of equal splits, later
    stages get the larger part: they hold fewer micro-batches.

    >>> balance_stages(BlockWork(0.0, (1.0,) * 12, 0.0), 4)
    (3, 3, 3, 3)
    >>> balance_stages(BlockWork(0.5, (1.0,) * 12, 5.0), 4), balance_stages(BlockWork(0, (1, 4, 1, 4), 0), 2)
    ((3, 4, 4, 1), (2, 2))
    """
    before, *blocks, after = work.to_tuple()
    stages = ranks * virtual_stages
    cost = _make_cost(BlockWork(before, tuple(blocks), after), stages)
    count = len(blocks)
    least = _find_least_maximum(before, blocks, after, stages) * (1 + 1e-9)
    # best[stop] is the least sum of squares of the stages so far, with their bounds.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (squares, bounds) in best.items():
            for stop in range(first + 1, count - (stages - 1 - stage) + 1):
                seconds = cost(stage, first, stop)
                if seconds > least:
                    break
                total = (round(squares + seconds**2, 12), (*bounds, stop))
                following[stop] = min(total, following.get(stop, total))
        best = following
    bounds = best[count][1]
    if virtual_stages > 1:
        bounds = _balance_ranks(bounds, cost, ranks)
    return tuple(stop - first for first, stop in pairwise(bounds))


def _make_cost(work: BlockWork, stages: int) -> Callable[[int, int, int], float]:
    """Return the time of a stage from its number, its first block and the first block after it."""
    sums = list(accumulate(work.blocks, initial=0.0))

    def cost(stage: int, first: int, stop: int) -> float:
        around = work.before * (stage == 0) + work.after * (stage == stages - 1)
        return sums[stop] - sums[first] + around

    return cost


def _balance_ranks(
    bounds: tuple[int, ...], cost: Callable[[int, int, int], float], ranks: int
) -> tuple[int, ...]:
    """Move blocks from stage to stage as long as the slowest rank gets faster: it has several stages."""

    def rate(bounds: tuple[int, ...]) -> tuple[float, float, float, tuple[int, ...]]:
        stages = [cost(stage, *pair) for stage, pair in enumerate(pairwise(bounds))]
        loads = [sum(stages[rank::ranks]) for rank in range(ranks)]
        squares = [sum(value**2 for value in values) for values in (loads, stages)]
        return round(max(loads), 9), round(squares[0], 9), round(squares[1], 9), bounds

    current = rate(bounds)
    while True:
        moved = []
        # A block that leaves a stage for another moves all bounds between them.
        for first in range(1, len(bounds) - 1):
            for stop in range(first + 1, len(bounds)):
                for step in (-1, 1):
                    places = current[3]
                    shifted = tuple(place + step * (first <= at < stop) for at, place in enumerate(places))
                    if all(end > start for start, end in pairwise(shifted)):
                        moved.append(rate(shifted))
        nearest = min(moved, default=current)
        if nearest[:3] >= current[:3]:
            return current[3]
        current = nearest


def _find_least_maximum(before: float, blocks: Sequence[float], after: float, stages: int) -> float:
    """Return the least time of the longest stage, to a part in 10^12."""
    parts = [*blocks]
    parts[0] += before
    parts[-1] += after
    low, high = max(parts), sum(parts)
    if _fits(parts, stages, low):
        return low
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(parts, stages, middle) else (middle, high)
    return high


def _fits(parts: Sequence[float], stages: int, most: float) -> bool:
    """Whether so many stages, each with a block at least, can all take no longer than `most`."""
    needed, current = 1, 0.0
    for part in parts:
        if current + part > most * (1 + 1e-12):
            needed, current = needed + 1, 0.0
        current += part
    return needed <= stages
