"""Count the work of the blocks of a model, by which they are divided over pipeline stages.

The loss runs once on the meta device, which takes no memory and no values. An operation takes as long as its
products or its memory traffic, whichever is longer. Estimates, plans and training count in the same way, with
the same number of samples, so that they divide a model alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trimtab.engine.tensor_plan import READ_NUMBER, assume_number, run_on_meta
from trimtab.strategies.stage_split import BlockWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.engine.stage_placement import UseRecorder
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


def measure_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    run_loss: Callable[[nn.Module], Any],
    recompute: RecomputeWay,
    uses: UseRecorder,
) -> tuple[BlockWork | None, str]:
    """Return the work of the blocks and of what is around them; None and the reason if loss() fails.

    `uses` records what the blocks need of the parameters outside of them.
    """
    counter = _WorkCounter(len(blocks), uses)
    handles: list[Any] = []
    for number, block in enumerate(blocks):
        handles += [
            block.register_forward_pre_hook(counter.make_pre_hook(number), with_kwargs=True),
            block.register_forward_hook(counter.make_post_hook(number)),
        ]

    def run(model: nn.Module) -> Any:
        uses.start(model, blocks)
        return run_loss(model)

    failure = run_on_meta(model, run, counter, handles)
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

    def __init__(self, blocks: int, uses: UseRecorder) -> None:
        super().__init__()
        self.parts = [0.0] * (blocks + 2)
        self._uses = uses
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

    def make_pre_hook(self, number: int) -> Callable[..., None]:
        """Return a hook that attributes all later operations to a block."""

        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._place = 1 + number
            self._uses.enter_block(number, args, kwargs)

        return enter

    def make_post_hook(self, number: int) -> Callable[..., None]:
        """Return a hook that attributes operations after the last block to the rest."""

        def leave(_: nn.Module, __: Any, output: Any) -> None:
            # Between two blocks, work belongs to the earlier one.
            if number == len(self.parts) - 3:
                self._place = number + 2
            self._uses.leave_block(output)

        return leave

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == READ_NUMBER:
            self._uses.read_number(args[0])
            return assume_number(args[0])
        out = func(*args, **(kwargs or {}))
        self._uses.record(func, name, args, kwargs or {}, out)
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
