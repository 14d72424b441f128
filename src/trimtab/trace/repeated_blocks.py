"""Finds the long list of equal blocks that most of a large model is, and takes most of them out.

What runs for one block runs for all of them (`trimtab.trace.block_growth`), so that a few tell the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trimtab.engine.build import repeated_blocks
from trimtab.trace.block_growth import FEW

if TYPE_CHECKING:
    from collections.abc import Hashable

    from trimtab.spec import Trace

MANY = 16
"""From here on a list is long."""
MOST_LISTS = 2
WORTH = 0.7
"""Share of the work of the whole that small models may take: checking them takes some as well."""
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
BOOKKEEPING = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


class Repeated(NamedTuple):
    """A list of equal blocks."""

    name: str
    blocks: nn.Module
    """The list itself."""
    length: int
    leaves: int
    """Modules without modules in one block: what a trace of it takes is taken to go with them."""


def worth_cutting(model: nn.Module) -> list[Repeated]:
    """The long lists of equal blocks, where small models with a few of them are less work than the whole.

    Every list doubles the number of small models: each goes with few of its blocks and with one more.
    """
    found = [
        Repeated(name, one, len(list(one.children())), leaves(next(one.children())))
        for name, one in repeated_blocks(model)
        if name
    ]
    found = [one for one in found if one.length >= MANY and are_equal(model, one.blocks)]
    found.sort(key=lambda one: -one.length * one.leaves)
    whole = leaves(model)
    best = min(range(min(len(found), MOST_LISTS) + 1), key=lambda count: _work(whole, found[:count]))
    return found[:best] if _work(whole, found[:best]) < WORTH * whole else []


def _work(whole: int, lists: list[Repeated]) -> float:
    """Leaves that are run in all of the small models."""
    rest = whole - sum(items.length * items.leaves for items in lists)
    return 2 ** len(lists) * (rest + sum((FEW + 0.5) * items.leaves for items in lists))


def leaves(module: nn.Module) -> int:
    """Modules that have no modules inside."""
    return sum(1 for one in module.modules() if not one._modules)


def are_equal(model: nn.Module, blocks: nn.Module) -> bool:
    """Whether the blocks of a list differ in nothing but their values and their number."""
    each = list(blocks.children())
    own = [_held(block) for block in each]
    inside = set().union(*own)
    outside = _held(model, but=blocks)
    if len(inside) < sum(map(len, own)) or inside & outside:
        # Something belongs to two of them, or to one and to the rest of the model.
        return False
    natures = [_nature(block) for block in each]
    if any(len(nature) != len(natures[0]) for nature in natures):
        return False
    return all(_same(column) for column in zip(*natures, strict=True))


def _same(column: tuple[Hashable, ...]) -> bool:
    """Whether a trait is the same in all blocks, or the number of the block in each."""
    return len(set(column)) == 1 or column == tuple(range(len(column)))


def _held(module: nn.Module, but: nn.Module | None = None) -> set[int]:
    """The tensors and modules of a module, by identity."""
    found: set[int] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if one is but:
            continue
        found.add(id(one))
        found |= {
            id(tensor) for tensor in (*one._parameters.values(), *one._buffers.values()) if tensor is not None
        }
        waiting += [child for child in one._modules.values() if child is not None]
    return found


def _nature(block: nn.Module) -> list[Hashable]:
    """All that the program of a block can depend on, save values of tensors."""
    found: list[Hashable] = []
    for name, module in block.named_modules():
        found.append((name, type(module)))
        for tensors in (module._parameters, module._buffers):
            found += [(key, _layout(tensor)) for key, tensor in tensors.items()]
        for key, value in sorted(vars(module).items()):
            if key not in BOOKKEEPING:
                found += [key, *_traits(value)]
    return found


def _layout(tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _traits(value: Any) -> list[Hashable]:
    """A value as far as it can be compared; of what cannot, the type."""
    if isinstance(value, PLAIN):
        return [value]
    if isinstance(value, list | tuple):
        return [type(value), len(value), *(trait for one in value for trait in _traits(one))]
    if isinstance(value, dict):
        return [len(value), *(trait for key, one in value.items() for trait in (str(key), *_traits(one)))]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return [getattr(value, "__code__", kind)]


def cut(repeated: Repeated, count: int) -> list[nn.Module]:
    """Leave the first blocks of a list; the others are returned, and hold their memory while they live."""
    taken = list(repeated.blocks.children())[count:]
    assert isinstance(repeated.blocks, nn.ModuleList | nn.Sequential)  # noqa: S101 - as they are found
    del repeated.blocks[count:]
    return taken


def made(trace: Trace) -> list[tuple[int, str, str]]:
    """What is allocated from the first step on, in order: size, operation and module."""
    numbers = [one for one in trace.order[trace.marks["step0"] :] if one >= 0]
    return [
        (trace.sizes[number], trace.op_names[trace.ops[number]], trace.module_names[trace.modules[number]])
        for number in numbers
    ]
