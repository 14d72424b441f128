"""An operation that was seen before gives the same results without running again."""

# ruff: noqa: SLF001 - operations and attributes of torch

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trimtab.scripts.repeated_ops import can_repeat, describe_results, make_op_key, make_result

if TYPE_CHECKING:
    from collections.abc import Callable

aten = torch.ops.aten


@pytest.fixture
def make() -> Callable[..., Any]:
    mode = FakeTensorMode()

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        with mode:
            return torch.empty(shape, dtype=dtype)

    return make


def describe(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.device


@pytest.mark.parametrize(
    ("func", "plain"),
    [
        (aten.mm.default, ()),
        (aten.add.Tensor, ()),
        (aten.native_layer_norm.default, ([8], None, None, 1e-5)),
        (aten.slice.Tensor, (0, 2, 6)),
        (aten.t.default, ()),
        (aten._unsafe_view.default, ([64],)),
        (aten.split.Tensor, (4,)),
        (aten.mul_.Tensor, (2.0,)),
    ],
)
def test_results_are_made_again(make: Callable[..., Any], func: Any, plain: tuple[Any, ...]) -> None:
    binary = func in (aten.mm.default, aten.add.Tensor)

    def arguments() -> tuple[Any, ...]:
        return (make(8, 8), *((make(8, 8),) if binary else ()), *plain)

    first, second = arguments(), arguments()
    out = func(*first)
    assert make_op_key(func, first, {}) == make_op_key(func, second, {}) is not None
    described = describe_results(first, out)
    assert described is not None
    recipes, container = described
    again = [make_result(recipe, second) for recipe in recipes]
    expected = func(*second)
    results = list(expected) if container is not None else [expected]
    assert [describe(result) for result in again] == [describe(result) for result in results]
    for mine, theirs in zip(again, results, strict=True):
        assert type(mine) is FakeTensor
        shared = theirs.untyped_storage()._cdata == second[0].untyped_storage()._cdata
        assert (mine.untyped_storage()._cdata == second[0].untyped_storage()._cdata) == shared
    if func is aten.mul_.Tensor:
        assert again[0] is second[0]


def test_other_shapes_layouts_and_numbers_are_other_operations(make: Callable[..., Any]) -> None:
    whole = make(8, 8)
    keys = [
        make_op_key(aten.mul.Tensor, (tensor, number), {})
        for tensor in (whole, make(4, 8), whole.t(), make(8, 8, dtype=torch.bfloat16), make(9, 8)[1:])
        for number in (1, 1.0, True)
    ]
    assert len(set(keys)) == len(keys)


def test_known_values_and_unknown_arguments_are_not_kept(make: Callable[..., Any]) -> None:
    known = make(4)
    known._trimtab_real = torch.zeros(4)
    assert make_op_key(aten.neg.default, (known,), {}) is None
    assert make_op_key(aten.neg.default, (torch.zeros(4),), {}) is None
    assert make_op_key(aten.mm.out, (make(4, 4), make(4, 4)), {"out": make(4, 4)}) is None
    assert make_op_key(aten.bernoulli.default, (make(4),), {"generator": torch.Generator()}) is None
    assert make_op_key(aten._foreach_neg.default, ([make(4)] * 20,), {}) is None


def test_results_that_share_new_memory_are_not_kept(make: Callable[..., Any]) -> None:
    whole = make(8)
    assert describe_results((), (whole, whole[:4])) is None
    assert describe_results((), 3) is None
    # An operation that returns a tensor out of a list.
    assert describe_results(([whole],), whole) is None


def test_operations_whose_results_follow_from_values_are_not_kept() -> None:
    assert can_repeat(aten.mm.default)
    assert not can_repeat(aten.nonzero.default)
    assert not can_repeat(aten.resize_.default)
    assert not can_repeat(torch.ops.prim.device.default)
