"""Divide the blocks of a model over pipeline stages so that the slowest stage is as fast as possible.

The work of each block is counted by running the loss once on the meta device, which takes no memory and no
values. An operation takes as long as its products or its memory traffic, whichever is longer. What is before
the blocks (embeddings) belongs to the first stage, and what is after them (the head and the loss) to the
last. Estimates, plans and training count in the same way, with the same number of samples, so that they
divide a model alike.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trimtab.engine.tensor_plan import READ_NUMBER, assume_number, run_on_meta

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.spec import RecomputeWay

SAMPLES = 4
"""Samples of the batch whose work is counted. It is a constant, so that all micro-batches have one split."""
FLOPS_PER_ELEMENT = 400.0
"""FLOPs of products in the time of reading or writing one element: 16-bit peaks and bandwidths of A100, H200
and B200 give 400 to 560, and TF32 with its elements of twice the size as many."""
WIDE = ("softmax", "loss", "norm", "logsumexp")
"""Words of operations that run in 32 bits under autocast, after a cast."""
WIDE_FACTOR = 3
"""Reads and writes of such an operation, in 16-bit elements: it has twice the bytes, and the cast as many."""
EMBEDDING_PASSES = 8
"""Reads and writes of an embedding's gradient, in 16-bit elements of the table: it is filled with zeros, and
added to the gradient of the micro-batches before, all in 32 bits."""
ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
BACKWARD = 2.0
"""Backward passes in the time of a forward pass."""


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


def measure_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    run_loss: Callable[[nn.Module], Any],
    recompute: RecomputeWay,
) -> tuple[BlockWork | None, str]:
    """Return the work of the blocks and of what is around them; None and the reason if loss() fails."""
    counter = _WorkCounter(len(blocks))
    handles: list[Any] = []
    for number, block in enumerate(blocks):
        handles += [
            block.register_forward_pre_hook(counter.make_hook(1 + number)),
            block.register_forward_hook(counter.make_hook(2 + number, after=True)),
        ]
    failure = run_on_meta(model, run_loss, counter, handles)
    if failure:
        return None, failure
    before, *inside, rest = counter.parts
    if not all(inside):
        return None, "loss() does not call every block"
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    covered = {id(module) for block in blocks for module in block.modules()}
    before_tables = sum(
        table.weight.numel() for table in tables if id(table) not in covered and table.weight.requires_grad
    )
    again = 0.0 if recompute.keeps_products else 1.0
    return BlockWork(
        before * (1 + BACKWARD) + EMBEDDING_PASSES * before_tables,
        tuple(
            work * (1 + BACKWARD + again * recompute.has_block(number)) for number, work in enumerate(inside)
        ),
        rest * (1 + BACKWARD),
    ), ""


class _WorkCounter(TorchDispatchMode):
    """Adds up the time of operations: before the blocks, in each of them, after them."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.parts = [0.0] * (blocks + 2)
        self._place = 0
        self._attention = _FusedAttention(self)
        self.is_muted = False
        """Whether operations are part of one that was counted already."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._attention.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._attention.__exit__(*error)
        super().__exit__(*error)

    def add(self, elements: float) -> None:
        """Add the time of an operation to the part that runs now."""
        self.parts[self._place] += elements

    def make_hook(self, place: int, *, after: bool = False) -> Callable[..., None]:
        """Return a hook that attributes all later operations to a part; after the last block, to the rest."""

        def enter(*_: Any) -> None:
            # Between two blocks, work belongs to the earlier one.
            if not after or place == len(self.parts) - 1:
                self._place = place

        return enter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == READ_NUMBER:
            return assume_number(args[0])
        out = func(*args, **(kwargs or {}))
        if not self.is_muted:
            self.add(_count_elements(func, name, args, kwargs or {}, out))
        return out


class _FusedAttention(TorchFunctionMode):
    """Counts attention as one kernel: on the meta device torch runs it in steps, with the whole matrix."""

    def __init__(self, counter: _WorkCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not functional.scaled_dot_product_attention or self._counter.is_muted:
            return func(*args, **(kwargs or {}))
        self._counter.is_muted = True
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self._counter.is_muted = False
        named = dict(zip(ATTENTION_ARGUMENTS, args, strict=False)) | (kwargs or {})
        query, key, value = named["query"], named["key"], named["value"]
        flops = 2.0 * query.numel() * key.shape[-2] * (1 + value.shape[-1] / query.shape[-1])
        # Under a causal mask, a fused kernel skips half of the products.
        flops /= 2 if named.get("is_causal") else 1
        moved = sum(tensor.numel() for tensor in (query, key, value, out))
        self._counter.add(max(moved, flops / FLOPS_PER_ELEMENT))
        return out


def _count_elements(func: Any, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> float:
    """Return the time of an operation, in reads and writes of one element."""
    schema = func._schema
    if any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):
        return 0.0
    results = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    if name == "embedding":
        return 2.0 * sum(results)
    inputs = [leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    moved = float(sum(inputs) + sum(results)) * (WIDE_FACTOR if any(word in name for word in WIDE) else 1)
    count = flop_registry.get(func.overloadpacket)
    if count is None:
        return moved
    return max(moved, count(*args, **kwargs, out_val=out) / FLOPS_PER_ELEMENT)


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
