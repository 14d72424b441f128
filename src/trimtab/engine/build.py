"""Build a job's model and its batches on a device."""

from __future__ import annotations

import contextlib
import inspect
import re
import textwrap
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from trimtab.engine.branches import branches_of, keep_branch
from trimtab.engine.precision import configure, torch_dtype
from trimtab.errors import JobFailed
from trimtab.spec.precision import FLOAT32
from trimtab.strategies import strategy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.spec import Dtypes, Setting


@contextlib.contextmanager
def building(dtypes: Dtypes, device: str) -> Iterator[None]:
    """Default device and dtype, for the job's model() and batch() alone."""
    before = torch.get_default_dtype()
    if dtypes.weights != FLOAT32:
        torch.set_default_dtype(torch_dtype(dtypes.weights))
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def build_device(setting: Setting, device: str) -> str:
    """Return where the model is built: on the host where the device gets only a share of it."""
    return "cpu" if strategy_of(setting).is_built_on_host else device


def make_batch(job: Any, setting: Setting, device: str) -> Any:
    """Make one micro-batch, as the job makes it."""
    with building(setting.dtypes, device):
        return job.batch(setting.micro_batch)


def build(  # noqa: PLR0913 - what to build, and as which rank
    job: Any,
    setting: Setting,
    device: str = "cuda",
    *,
    branch: str = "",
    dropped: list[nn.Module] | None = None,
    values: bool = True,
) -> nn.Module:
    """Build the job's model where the setting wants it built.

    With `branch`, as a rank of that branch has it; what only other branches need goes to `dropped`. Without
    `values`, a model that would be built on the host is built on the meta device.
    """
    configure(setting.dtypes)
    place = build_device(setting, device)
    with building(setting.dtypes, place if values or place == device else "meta"):
        model = job.model()
    if not isinstance(model, nn.Module):
        raise JobFailed(
            "model()", found=f"it returned a {type(model).__name__}", cure="Return a torch.nn.Module."
        )
    if branch:
        others = keep_branch(model, branches_of(job), branch)
        if dropped is not None:
            dropped += others
        del others
    return model


# Finds the blocks of a model: what is recomputed, sharded, staged, or traced once for many.


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


# Which doors loss() takes into a model: its forward pass, other methods, or submodules called directly.
#
# FSDP gathers weights, and torch.compile compiles, only behind `model(...)`. A loss that calls
# `model.encode(...)`, `model.training_step(...)` or `model.backbone(...)` enters elsewhere. The names are
# read from the source of loss() and of the functions it calls in the same file.


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
