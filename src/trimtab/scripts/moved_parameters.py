"""Move parameters without memory between devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from trimtab.trace.data_dependent import REAL_ATTRIBUTE

if TYPE_CHECKING:
    from collections.abc import Callable

MOVED = "_trimtab_moved"
"""Attribute of a parameter that was moved to another device: the parameter there."""
PARAMETER_CLASS = "_trimtab_class"
"""Attribute of a parameter of a library's own class, such as one that holds 4-bit weights."""
LAZY_DEVICE = "_trimtab_device"
"""Attribute of a parameter without a shape: the device that it was moved to."""


def apply_to_module(module: Any, change: Callable[[Any], Any], recurse: bool = True) -> Any:
    """Implement `Module.to`, `.half` and similar methods for parameters without memory.

    On a GPU a parameter stays the same object when it is moved, so an optimizer and tied layers still have
    it. A fake tensor cannot change its device: they find the new one through an attribute of the old.
    """
    if recurse:
        for child in module.children():
            child._apply(change)
    for name, parameter in module._parameters.items():
        if parameter is not None and not _move_lazily(parameter, change):
            module._parameters[name] = _move_parameter(parameter, change)
    for name, buffer in module._buffers.items():
        if buffer is not None and not _move_lazily(buffer, change):
            module._buffers[name] = _forget_floats(change(buffer))
    return module


def _forget_floats(buffer: Any) -> Any:
    """Return a buffer without its values, if they are several and change with what the model computes."""
    if buffer.is_floating_point() and buffer.numel() > 1:
        buffer.__dict__.pop(REAL_ATTRIBUTE, None)
    return buffer


def _move_parameter(parameter: Any, change: Callable[[Any], Any]) -> Any:
    """Return the parameter that a parameter becomes, with its gradient."""
    current = follow_moves(parameter)
    with torch.no_grad():
        changed = change(current)
    if changed is current:
        moved = current
    elif PARAMETER_CLASS in changed.__dict__:
        # The library's own class has made a new parameter already.
        moved = changed
        setattr(current, MOVED, moved)
    elif changed.device == current.device and isinstance(changed, FakeTensor):
        current.data = changed
        moved = current
    else:
        moved = torch.nn.Parameter(changed, current.requires_grad)
        moved.__dict__.update({key: value for key, value in current.__dict__.items() if key[0] != "_"})
        setattr(current, MOVED, moved)
    if parameter.grad is not None and moved.grad is None:
        with torch.no_grad():
            moved.grad = change(parameter.grad)
    return moved


def _move_lazily(tensor: Any, change: Callable[[Any], Any]) -> bool:
    """Note where a tensor without a shape is moved to; return whether it is one."""
    if is_lazy(tensor):
        setattr(tensor, LAZY_DEVICE, change(torch.empty(0)).device)
        return True
    return False


def follow_moves(tensor: Any) -> Any:
    """Return the parameter that a parameter has become."""
    while (moved := getattr(tensor, MOVED, None)) is not None:
        tensor = moved
    return tensor
