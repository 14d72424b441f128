"""Functions under torch.jit.script, followed as the Python that they are written in.

The TorchScript interpreter calls operations below the level at which they are watched, and cannot run on
fake tensors. So while a job is traced, torch.jit.script and torch.jit.trace give back what they are given.
On a GPU TorchScript may fuse pointwise operations, which saves memory: an estimate says that it does not
count on that.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

called: dict[str, None] = {}
"""Names of the functions under torch.jit.script that were called, in that order."""


def follow_scripts() -> None:
    """Let torch.jit.script and torch.jit.trace leave functions and modules as they are."""
    # What torch itself does under PYTORCH_JIT=0: classes of scripts and their methods stay Python too.
    torch.jit._state.disable()
    torch.jit.script = _script
    torch.jit.trace = _trace
    torch.jit.trace_module = lambda module, *_, **__: module
    torch.jit.freeze = lambda module, *_, **__: module
    torch.jit.optimize_for_inference = lambda module, *_, **__: module


def _script(obj: Any = None, *_: Any, **__: Any) -> Any:
    """The function itself, which notes that it was called; modules and classes as they are."""
    if not inspect.isfunction(obj):
        return obj

    @functools.wraps(obj)
    def followed(*args: Any, **kwargs: Any) -> Any:
        called[obj.__qualname__] = None
        return obj(*args, **kwargs)

    return followed


def _trace(func: Any = None, *_: Any, **__: Any) -> Any:
    """What was to be traced, as it is."""
    return func


def assumptions() -> tuple[str, ...]:
    """What an estimate has to say about scripts."""
    if not called:
        return ()
    names = ", ".join(list(called)[:3]) + (", ..." if len(called) > 3 else "")  # noqa: PLR2004 - enough to find
    return (f"functions under torch.jit.script ({names}) are followed as plain Python, without its fusion",)
