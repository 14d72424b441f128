"""Move parameters without memory between devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Callable

MOVED = "_trimtab_moved"
"""Attribute of a parameter that was moved to another device: the parameter there."""


def apply_to_module(module: Any, change: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Implement `Module.to`, `.half` and similar methods for parameters without memory.

    On a GPU a parameter stays the same object when it is moved, so an optimizer and tied layers still have
    it. A fake tensor cannot change its device: they find the new one through an attribute of the old.
    """
    if recurse:
        for child in module.children():
            child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        current = follow_moves(parameter)
        with torch.no_grad():
            changed = change(current)
        if changed is current:
            module._parameters[name] = current
        elif changed.device == current.device and isinstance(changed, FakeTensor):
            current.data = changed
            module._parameters[name] = current
        else:
            moved = torch.nn.Parameter(changed, current.requires_grad)
            moved.__dict__.update({key: value for key, value in current.__dict__.items() if key[0] != "_"})
            setattr(current, MOVED, moved)
            module._parameters[name] = moved
        if parameter.grad is not None and module._parameters[name].grad is None:
            with torch.no_grad():
                module._parameters[name].grad = change(parameter.grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = change(buffer)
    return module


def follow_moves(tensor: Any) -> Any:
    """Return the parameter that a parameter has become."""
    while (moved := getattr(tensor, MOVED, None)) is not None:
        tensor = moved
    return tensor
