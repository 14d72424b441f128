"""Which doors loss() takes into a model: its forward pass, other methods, or submodules called directly.

FSDP gathers weights, and torch.compile compiles, only behind `model(...)`. A loss that calls
`model.encode(...)`, `model.training_step(...)` or `model.backbone(...)` enters elsewhere. The names are read
from the source of loss() and of the functions it calls in the same file.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MEMBERS = ("loss", "losses", "embed")
_CALLED = re.compile(r"\.(\w+)(?:\[[^\]]*\])?\(")
_CALLS_ITSELF = re.compile(r"\bself\(")
_DEPTH = 3


class Entries(NamedTuple):
    """Names by which loss() enters a model, beside calling it."""

    methods: tuple[str, ...] = ()
    """Methods of the model that do not call the model itself."""
    wrappers: tuple[str, ...] = ()
    """Methods of the model that do, as a training_step() does."""
    children: tuple[str, ...] = ()
    """Direct submodules."""


def entries_of(job: Any, model: nn.Module) -> Entries:
    """Read how a job's loss() enters its model."""
    names: set[str] = set()
    for member in MEMBERS:
        function = getattr(job, member, None)
        if function is not None:
            for source in _sources(function, _DEPTH):
                names |= set(_CALLED.findall(source))
    return entries_named(names, model)


def entries_named(names: set[str], model: nn.Module) -> Entries:
    """Sort called names into methods and submodules of a model; other names are not entries."""
    own = {name: function for name in names if (function := _own_method(model, name)) is not None}
    wrappers = {name for name, function in own.items() if _calls_the_model(function, model)}
    return Entries(
        methods=tuple(sorted(own.keys() - wrappers)),
        wrappers=tuple(sorted(wrappers)),
        children=tuple(sorted(name for name in names if name in dict(model.named_children()))),
    )


def _own_method(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """The function behind a public method that the model's author wrote; None for any other name."""
    if name.startswith("_") or name == "forward" or hasattr(nn.Module, name):
        return None
    found = inspect.getattr_static(type(model), name, None)
    return found if isinstance(found, types.FunctionType) else None


def _calls_the_model(function: Callable[..., Any], model: nn.Module, depth: int = _DEPTH) -> bool:
    source = _source(function)
    if _CALLS_ITSELF.search(source) or "self.forward(" in source:
        return True
    if not depth:
        return False
    inner = (_own_method(model, name) for name in set(_CALLED.findall(source)))
    return any(_calls_the_model(one, model, depth - 1) for one in inner if one not in (None, function))


def _sources(function: Any, depth: int) -> Iterator[str]:
    """The source of a function, and of functions of the same file that it calls by name."""
    source = _source(function)
    yield source
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    owner = getattr(function, "__self__", None)
    if not depth:
        return
    for name in set(re.findall(r"\b(\w+)\(", source)):
        helper = scope.get(name) or (getattr(type(owner), name, None) if owner is not None else None)
        if isinstance(helper, types.FunctionType) and helper is not getattr(function, "__func__", function):
            yield from _sources(helper, depth - 1)


def _source(function: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
