"""Finds the blocks of a model: what is recomputed, sharded, staged, or traced once for many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward pass of their own: hooks on them never run."""


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others, and cannot be called itself.

    >>> is_container(nn.ModuleList()), is_container(nn.Sequential())
    (True, False)
    """
    callable_itself = getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"
    return isinstance(module, CONTAINERS) and not callable_itself


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost lists of two or more composite modules of one class, with their names.

    A list of lists is not a list of blocks: the inner lists are, because only their modules are called.
    """
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        children = list(module.children())
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1:
            composite = all(_is_composite(child) and not is_container(child) for child in children)
            if composite and len({type(child) for child in children}) == 1:
                found.append((name, module))
                return
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", model)
    return found


def shard_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP gathers one at a time, innermost first; the root is not among them.

    These are the repeated blocks and, where lists are nested or hold modules of several classes, the
    nearest composite modules inside that have a forward pass.
    """
    units = [block for _, blocks in repeated_blocks(model) for block in blocks.children()]
    covered = {id(module) for unit in units for module in unit.modules()}
    for module in model.modules():
        if is_container(module) and any(map(is_container, module.children())):
            for unit in _nearest_callable(module):
                if id(unit) not in covered and _is_composite(unit) and not _holds(unit, covered):
                    units.append(unit)
                    covered |= {id(inner) for inner in unit.modules()}
    return units


def _nearest_callable(container: nn.Module) -> Iterator[nn.Module]:
    for child in container.children():
        if is_container(child):
            yield from _nearest_callable(child)
        else:
            yield child


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _holds(module: nn.Module, covered: set[int]) -> bool:
    return any(id(inner) in covered for inner in module.modules())
