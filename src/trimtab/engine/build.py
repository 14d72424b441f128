"""Build a job's model and batches, and find its repeated blocks and the entry points that loss() calls."""

from __future__ import annotations

import contextlib
import inspect
import re
import textwrap
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from trimtab.engine.branches import get_branches, keep_branch
from trimtab.engine.precision import set_tf32_flags, torch_dtype
from trimtab.engine.sequence_split import choose_part, split_batch
from trimtab.errors import JobFailed
from trimtab.jobs.job import Job
from trimtab.jobs.optimizers import has_optimizers
from trimtab.spec.precision import FLOAT32
from trimtab.strategies import strategy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.spec import Dtypes, Setting


@contextlib.contextmanager
def use_build_defaults(dtypes: Dtypes, device: str) -> Iterator[None]:
    """Set the default device and dtype while the job's model() or batch() runs."""
    previous = torch.get_default_dtype()
    if dtypes.weights != FLOAT32:
        torch.set_default_dtype(torch_dtype(dtypes.weights))
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(previous)


def choose_build_device(setting: Setting, device: str) -> str:
    """Return the device to build the model on: the CPU if the device gets a part or a packed form of it."""
    return "cpu" if is_built_on_host(setting) else device


def is_built_on_host(setting: Setting) -> bool:
    """Whether the device has no room for the model as it is built, so that it is built on the CPU."""
    return strategy_of(setting).is_built_on_host or setting.base.storage.is_quantized


def make_batch(job: Any, setting: Setting, device: str, *, longest: bool = False) -> Any:
    """Return one micro-batch from the job's batch(), or from its longest().

    If ranks split sequences, it is the part of this rank: it is split on the host, as a loader does.
    """
    is_split = setting.mesh.cp > 1
    with use_build_defaults(setting.dtypes, "cpu" if is_split else device):
        batch = (job.longest if longest else job.batch)(setting.micro_batch)
    if not is_split:
        return batch
    part = split_batch(job, batch, choose_part(setting))
    return tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, part)


def build_model(  # noqa: PLR0913 - what to build, and for which rank
    job: Any,
    setting: Setting,
    device: str = "cuda",
    *,
    branch: str = "",
    dropped: list[nn.Module] | None = None,
    values: bool = True,
) -> nn.Module:
    """Build the job's model on the device that the setting needs.

    With `branch`, submodules that only other branches need are removed and appended to `dropped`. Without
    `values`, a model that would be built on the CPU is built on the meta device.
    """
    set_tf32_flags(setting.dtypes)
    place = choose_build_device(setting, device)
    with use_build_defaults(setting.dtypes, place if values or place == device else "meta"):
        model = job.model()
    if not isinstance(model, nn.Module):
        raise JobFailed(
            "model()", found=f"it returned a {type(model).__name__}", cure="Return a torch.nn.Module."
        )
    if branch:
        others = keep_branch(model, get_branches(job), branch)
        if dropped is not None:
            dropped += others
        del others
    return model


# Repeated blocks: the units of recomputation, sharding, pipeline stages and tracing.


CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward pass: hooks on them never run."""


def is_container(module: nn.Module) -> bool:
    """Return whether a module only holds other modules and cannot be called.

    >>> is_container(nn.ModuleList()), is_container(nn.Sequential())
    (True, False)
    """
    has_forward = getattr(type(module).forward, "__name__", "") != "_forward_unimplemented"
    return isinstance(module, CONTAINERS) and not has_forward


def find_repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost lists of two or more composite modules of one class, with their names.

    A list of lists is not a list of blocks: the inner lists are, because only their modules are called.
    """
    lists: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        children = list(module.children())
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1:
            composite = all(_is_composite(child) and not is_container(child) for child in children)
            if composite and len({type(child) for child in children}) == 1:
                lists.append((name, module))
                return
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", model)
    return lists


def find_shard_units(model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP gathers one at a time, innermost first; the root is not among them.

    These are the repeated blocks and, where lists are nested or hold modules of several classes, the
    nearest composite modules inside that have a forward pass.
    """
    units = [block for _, blocks in find_repeated_blocks(model) for block in blocks.children()]
    covered = {id(module) for unit in units for module in unit.modules()}
    for module in model.modules():
        if is_container(module) and any(map(is_container, module.children())):
            for unit in _iterate_nearest_callable(module):
                if id(unit) not in covered and _is_composite(unit) and not _contains_any(unit, covered):
                    units.append(unit)
                    covered |= {id(inner) for inner in unit.modules()}
    return units


def _iterate_nearest_callable(container: nn.Module) -> Iterator[nn.Module]:
    for child in container.children():
        if is_container(child):
            yield from _iterate_nearest_callable(child)
        else:
            yield child


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _contains_any(module: nn.Module, covered: set[int]) -> bool:
    return any(id(inner) in covered for inner in module.modules())


# Entry points: FSDP gathers weights, and torch.compile compiles, only when `model(...)` is called. A loss
# may also call `model.encode(...)`, `model.training_step(...)` or `model.backbone(...)`. These names are read
# from the source of loss() and of the functions that it calls in the same file.


LOSS_MEMBERS = ("loss", "losses", "embed", "evaluate")
_CALLED = re.compile(r"\.(\w+)(?:\[[^\]]*\])?\(")
_CALLS_ITSELF = re.compile(r"\bself\(")
_DEPTH = 3


class EntryPoints(NamedTuple):
    """Methods and submodules of a model that loss() calls, besides the model itself."""

    methods: tuple[str, ...] = ()
    """Methods of the model that do not call the model itself."""
    wrappers: tuple[str, ...] = ()
    """Methods that call the model, such as a training_step()."""
    children: tuple[str, ...] = ()
    """Direct submodules."""


def find_entries(job: Any, model: nn.Module) -> EntryPoints:
    """Return the entry points of the model that the source of the job's loss() calls.

    For a job with optimizers(), all its methods are read: each may be the loss of an optimizer.
    """
    names: set[str] = set()
    for member in (*LOSS_MEMBERS, *_list_own_methods(job)):
        function = getattr(job, member, None)
        if function is not None:
            for source in _iterate_sources(function, _DEPTH):
                names |= set(_CALLED.findall(source))
    return classify_entries(names, model)


def _list_own_methods(job: Any) -> list[str]:
    """Return the names of the methods of a job with optimizers(), without those of trimtab.Job."""
    if not has_optimizers(job):
        return []
    own = [cls for cls in type(job).__mro__ if cls not in (Job, object)]
    return [name for cls in own for name, value in vars(cls).items() if isinstance(value, types.FunctionType)]


def classify_entries(names: set[str], model: nn.Module) -> EntryPoints:
    """Sort called names into methods and submodules of a model; ignore other names."""
    own = {name: function for name in names if (function := _find_own_method(model, name)) is not None}
    wrappers = {name for name, function in own.items() if _calls_model(function, model)}
    return EntryPoints(
        methods=tuple(sorted(own.keys() - wrappers)),
        wrappers=tuple(sorted(wrappers)),
        children=tuple(sorted(name for name in names if name in dict(model.named_children()))),
    )


def _find_own_method(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """Return the function of a public method that the model's class defines; None for any other name."""
    if name.startswith("_") or name == "forward" or hasattr(nn.Module, name):
        return None
    member = inspect.getattr_static(type(model), name, None)
    return member if isinstance(member, types.FunctionType) else None


def _calls_model(function: Callable[..., Any], model: nn.Module, depth: int = _DEPTH) -> bool:
    source = _read_source(function)
    if _CALLS_ITSELF.search(source) or "self.forward(" in source:
        return True
    if not depth:
        return False
    methods = (_find_own_method(model, name) for name in set(_CALLED.findall(source)))
    return any(_calls_model(method, model, depth - 1) for method in methods if method not in (None, function))


def _iterate_sources(function: Any, depth: int) -> Iterator[str]:
    """Yield the source of a function, and of functions in the same file that it calls by name."""
    source = _read_source(function)
    yield source
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    owner = getattr(function, "__self__", None)
    if not depth:
        return
    for name in set(re.findall(r"\b(\w+)\(", source)):
        helper = scope.get(name) or (getattr(type(owner), name, None) if owner is not None else None)
        if isinstance(helper, types.FunctionType) and helper is not getattr(function, "__func__", function):
            yield from _iterate_sources(helper, depth - 1)


def _read_source(function: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
