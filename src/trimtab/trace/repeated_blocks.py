"""Find long lists of equal blocks in a model and remove most of the blocks.

Equal blocks run the same program, so a trace with a few of them gives the trace with all
(`trimtab.trace.extend_blocks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trimtab.engine.build import find_repeated_blocks
from trimtab.trace.extend_blocks import FEW_BLOCKS

if TYPE_CHECKING:
    from collections.abc import Hashable

    from trimtab.spec import Trace

MAX_LISTS = 2


class CutRule(NamedTuple):
    """When to cut a list of blocks."""

    min_length: int
    """The shortest list that is worth cutting."""
    worthwhile_share: float
    """Largest share of the whole model's work that small models may need."""


EAGER = CutRule(min_length=16, worthwhile_share=0.7)
"""Checking the small models takes time too."""
COMPILED = CutRule(min_length=8, worthwhile_share=0.99)
"""Compiling takes so much longer than checking that smaller savings are worthwhile, and the small models are
compiled side by side."""
PLAIN_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.device)
BOOKKEEPING = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


class RepeatedBlocks(NamedTuple):
    """A list of equal blocks."""

    name: str
    blocks: nn.Module
    """The list itself."""
    length: int
    leaves: int
    """Leaf modules per block: the time of a trace is assumed to be proportional to them."""


def find_cuttable_lists(model: nn.Module, rule: CutRule = EAGER) -> list[RepeatedBlocks]:
    """Return the long lists of equal blocks, if tracing small models is less work than tracing the whole.

    Every list doubles the number of small models: each is traced with few blocks and with one more.
    """
    lists = [
        RepeatedBlocks(name, blocks, len(list(blocks.children())), count_leaves(next(blocks.children())))
        for name, blocks in find_repeated_blocks(model)
        if name
    ]
    lists = [
        item for item in lists if item.length >= rule.min_length and are_blocks_equal(model, item.blocks)
    ]
    lists.sort(key=lambda item: -item.length * item.leaves)
    whole = count_leaves(model)
    best = min(range(min(len(lists), MAX_LISTS) + 1), key=lambda count: _count_work(whole, lists[:count]))
    is_worthwhile = _count_work(whole, lists[:best]) < rule.worthwhile_share * whole
    return lists[:best] if is_worthwhile else []


def has_long_list(model: nn.Module) -> bool:
    """Return whether a list is so long that compiling only a few of its blocks would save time."""
    lists = [blocks for name, blocks in find_repeated_blocks(model) if name]
    return any(len(list(blocks.children())) >= COMPILED.min_length for blocks in lists)


def _count_work(whole: int, lists: list[RepeatedBlocks]) -> float:
    """Return the number of leaf modules that run in all small models together."""
    rest = whole - sum(items.length * items.leaves for items in lists)
    return 2 ** len(lists) * (rest + sum((FEW_BLOCKS + 0.5) * items.leaves for items in lists))


def count_leaves(module: nn.Module) -> int:
    """Return the number of modules without submodules."""
    return sum(1 for submodule in module.modules() if not submodule._modules)


def are_blocks_equal(model: nn.Module, blocks: nn.Module) -> bool:
    """Return whether the blocks of a list differ only in tensor values and in their index."""
    each = list(blocks.children())
    own = [_collect_ids(block) for block in each]
    inside = set().union(*own)
    outside = _collect_ids(model, but=blocks)
    if len(inside) < sum(map(len, own)) or inside & outside:
        # Blocks share a tensor or module with each other or with the rest of the model.
        return False
    natures = [_describe_block(block) for block in each]
    if any(len(nature) != len(natures[0]) for nature in natures):
        return False
    return all(_is_same_trait(column) for column in zip(*natures, strict=True))


def _is_same_trait(column: tuple[Hashable, ...]) -> bool:
    """Return whether a trait is the same in all blocks, or is the index of each block."""
    return len(set(column)) == 1 or column == tuple(range(len(column)))


def _collect_ids(module: nn.Module, but: nn.Module | None = None) -> set[int]:
    """Return the ids of the tensors and submodules of a module, without those of `but`."""
    ids: set[int] = set()
    waiting = [module]
    while waiting:
        submodule = waiting.pop()
        if submodule is but:
            continue
        ids.add(id(submodule))
        ids |= {
            id(tensor)
            for tensor in (*submodule._parameters.values(), *submodule._buffers.values())
            if tensor is not None
        }
        waiting += [child for child in submodule._modules.values() if child is not None]
    return ids


def _describe_block(block: nn.Module) -> list[Hashable]:
    """Return everything that the program of a block can depend on, except tensor values."""
    traits: list[Hashable] = []
    for name, module in block.named_modules():
        traits.append((name, type(module)))
        for tensors in (module._parameters, module._buffers):
            traits += [(key, _tensor_layout(tensor)) for key, tensor in tensors.items()]
        for key, value in sorted(vars(module).items()):
            if key not in BOOKKEEPING:
                traits += [key, *_comparable_traits(value)]
    return traits


def _tensor_layout(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _comparable_traits(value: Any) -> list[Hashable]:
    """Return the comparable parts of a value; for parts that cannot be compared, their type."""
    if isinstance(value, PLAIN_TYPES):
        return [value]
    if isinstance(value, list | tuple):
        return [type(value), len(value), *(trait for item in value for trait in _comparable_traits(item))]
    if isinstance(value, dict):
        return [
            len(value),
            *(trait for key, item in value.items() for trait in (str(key), *_comparable_traits(item))),
        ]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return [getattr(value, "__code__", kind)]


def cut_blocks(repeated: RepeatedBlocks, count: int) -> list[nn.Module]:
    """Cut a list to its first blocks; return the others, which keep their memory while referenced."""
    taken = list(repeated.blocks.children())[count:]
    assert isinstance(repeated.blocks, nn.ModuleList | nn.Sequential)  # noqa: S101 - find_repeated_blocks returns these
    del repeated.blocks[count:]
    return taken


def list_allocations(trace: Trace) -> list[tuple[int, str, str]]:
    """Return size, operation and module of each allocation from the first step on, in order."""
    numbers = [number for number in trace.order[trace.marks["step0"] :] if number >= 0]
    return [
        (trace.sizes[number], trace.op_names[trace.ops[number]], trace.module_names[trace.modules[number]])
        for number in numbers
    ]
