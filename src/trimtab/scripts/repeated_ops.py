"""Answer operations that were seen before: same inputs, so the same results, work and memory requests.

A model repeats its layers and its steps, and torch's fake tensors take 0.3 ms for each operation. An
operation is kept if its inputs are tensors of which no values are known and plain arguments, and if its
results are new tensors, views of an input, or an input itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.trace.data_dependent import VALUE_ATTRIBUTES
from trimtab.trace.fake_ops import PARTS_ATTRIBUTE

if TYPE_CHECKING:
    from trimtab.spec import Work
    from trimtab.trace.workspaces import MemoryRequest

KNOWN_ATTRIBUTES = frozenset({*VALUE_ATTRIBUTES, PARTS_ATTRIBUTE})
PLAIN_TYPES = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
NEW_MEMORY, NOT_FOUND_AGAIN = -1, -2
"""Instead of the position of an argument: a result is new, or shares memory with something else."""
MOST_TENSORS = 8
"""Longer lists of tensors are those of optimizers, which step once."""
CHANGING_OPS = {"aten::set_", "aten::resize_", "aten::resize_as_"}
"""Operations that give their argument another memory or size."""
NOT_REPEATED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


class _NotKept(Exception):  # noqa: N818 - no error: the operation takes the usual way
    """An argument or result by which an operation cannot be found again."""


class TensorRecipe(NamedTuple):
    """How to make a result."""

    shape: Any
    stride: Any
    dtype: Any
    offset: Any
    source: int
    """Position of the argument that it is a view of, or NEW_MEMORY."""
    is_argument: bool
    """Whether it is that argument itself."""
    attributes: dict[str, Any]
    """Attributes of a fake tensor."""
    device: Any
    nbytes: int


class RepeatedOp(NamedTuple):
    """What an operation returns and needs."""

    recipes: tuple[TensorRecipe | None, ...]
    container: Any
    """list or tuple; None for a single tensor."""
    works: tuple[Work, ...] | None
    """None if the work depends on more than the arguments."""
    requests: tuple[MemoryRequest, ...]
    is_view: bool


def make_op_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what decides the result of an operation; None if it is not kept."""
    try:
        described = tuple(map(_describe, args))
        if kwargs:
            if any(type(value) is FakeTensor for value in kwargs.values()):
                # Such as `out`, which the operation returns.
                return None
            return func, described, tuple((name, _describe(value)) for name, value in kwargs.items())
    except _NotKept:
        return None
    return func, described


def _describe(value: Any) -> Any:
    kind = type(value)
    if kind is FakeTensor:
        attributes = value.__dict__
        if not KNOWN_ATTRIBUTES.isdisjoint(attributes) or attributes["constant"] is not None:
            raise _NotKept
        return value.shape, value.stride(), value.dtype, value.storage_offset(), value.fake_device
    if kind in PLAIN_TYPES:
        return kind, value
    if kind in (list, tuple) and len(value) <= MOST_TENSORS:
        return tuple(map(_describe, value))
    raise _NotKept


def can_repeat(func: Any) -> bool:
    """Return whether an operation's results follow from shapes alone."""
    if getattr(func, "namespace", "") != "aten" or func.name().partition(".")[0] in CHANGING_OPS:
        return False
    return not any(tag in func.tags for tag in NOT_REPEATED)


def describe_results(args: tuple[Any, ...], out: Any) -> tuple[tuple[TensorRecipe | None, ...], Any] | None:
    """Return how to make the results of an operation again, and what holds them; None if it is unknown."""
    container = type(out) if type(out) in (list, tuple) else None
    results = out if container is not None else (out,)
    storages: dict[int, int] = {}
    for place, value in enumerate(args):
        if type(value) is FakeTensor:
            storages.setdefault(value.untyped_storage()._cdata, place)
        elif type(value) in (list, tuple):
            for item in value:
                if type(item) is FakeTensor:
                    storages.setdefault(item.untyped_storage()._cdata, NOT_FOUND_AGAIN)
    try:
        recipes = tuple(_describe_result(result, args, storages) for result in results)
    except _NotKept:
        return None
    return recipes, container


def _describe_result(result: Any, args: tuple[Any, ...], storages: dict[int, int]) -> TensorRecipe | None:
    if result is None:
        return None
    if type(result) is not FakeTensor or result.dtype.is_complex or result.layout is not torch.strided:
        raise _NotKept
    attributes = result.__dict__
    same = next((place for place, value in enumerate(args) if value is result), -1)
    if same < 0 and (not KNOWN_ATTRIBUTES.isdisjoint(attributes) or attributes["constant"] is not None):
        raise _NotKept
    storage = result.untyped_storage()
    source = same if same >= 0 else storages.get(storage._cdata, NEW_MEMORY)
    if source == NEW_MEMORY:
        with torch.utils._python_dispatch._disable_current_modes():
            like = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
        if result.storage_offset() or like.untyped_storage().nbytes() != storage.nbytes():
            raise _NotKept
        # A second result with the same memory, such as a view of this one, is not kept.
        storages[storage._cdata] = NOT_FOUND_AGAIN
    elif source == NOT_FOUND_AGAIN:
        raise _NotKept
    return TensorRecipe(
        shape=result.shape,
        stride=result.stride(),
        dtype=result.dtype,
        offset=result.storage_offset(),
        source=source,
        is_argument=same >= 0,
        attributes={} if same >= 0 else dict(attributes),
        device=result.fake_device,
        nbytes=storage.nbytes(),
    )


def make_result(recipe: TensorRecipe | None, args: tuple[Any, ...]) -> Any:
    """Return a result of a repeated operation."""
    if recipe is None:
        return None
    if recipe.is_argument:
        return args[recipe.source]
    source = args[recipe.source] if recipe.source >= 0 else None
    if source is not None and torch.is_inference_mode_enabled() and not source.is_inference():
        # As in torch, a view of an ordinary tensor stays an ordinary one.
        with torch.inference_mode(mode=False):
            made = _make_fake(recipe, source)
    else:
        made = _make_fake(recipe, source)
    # As in the constructor of fake tensors, which this replaces.
    if recipe.attributes["fake_mode"]._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    made.__dict__.update(recipe.attributes)
    return made


def _make_fake(recipe: TensorRecipe, source: Any) -> Any:
    """Return a fake tensor without its attributes: a view of `source`, or with memory of its own."""
    inner = torch.empty_strided(recipe.shape, recipe.stride, dtype=recipe.dtype, device="meta")
    if source is not None:
        inner.set_(source.untyped_storage(), recipe.offset, recipe.shape, recipe.stride)
    return torch.Tensor._make_subclass(
        FakeTensor, inner, False, dispatch_device=True, device_for_backend_keys=recipe.device
    )
