"""What a Triton kernel loads and stores is read from its source."""

from __future__ import annotations

from typing import Any

from trimtab.scripts.triton_patches import find_pointer_uses

tl: Any = None
helper: Any = None


def fold(x_ptr: Any, targets_ptr: Any, out_ptr: Any, stride: int, size: int) -> None:
    row = tl.program_id(0)
    begin = x_ptr + row * stride
    target = tl.load(targets_ptr + row)
    for start in range(0, size, 16):
        values = tl.load(begin + start)
        tl.store(out_ptr + target, values)


def accumulate(sum_ptr: Any, x_ptr: Any) -> None:
    block = tl.make_block_ptr(base=x_ptr, shape=(1,))
    tl.atomic_add(sum_ptr, tl.sum(tl.dot(tl.load(block), tl.load(block))))


def pass_on(x_ptr: Any, y_ptr: Any) -> None:
    helper(x_ptr)
    tl.store(y_ptr, 0)


def describe(descriptor: Any, out: Any) -> None:
    out.store([0], descriptor.load([0]))


def test_loads_and_stores_are_told_apart() -> None:
    uses = find_pointer_uses(fold)
    assert uses is not None
    # The value that was loaded from `targets_ptr` is an offset into `out_ptr`, no address of its own.
    assert uses.loaded & {"x_ptr", "targets_ptr", "out_ptr"} == {"x_ptr", "targets_ptr"}
    assert uses.stored & {"x_ptr", "targets_ptr", "out_ptr"} == {"out_ptr"}
    assert not uses.multiplies


def test_atomics_block_pointers_and_products_are_seen() -> None:
    uses = find_pointer_uses(accumulate)
    assert uses is not None
    assert (uses.loaded, uses.stored) == ({"x_ptr", "sum_ptr"}, {"sum_ptr"})
    assert uses.multiplies


def test_a_pointer_that_is_passed_on_counts_as_both() -> None:
    uses = find_pointer_uses(pass_on)
    assert uses is not None
    assert (uses.loaded, uses.stored) == ({"x_ptr"}, {"x_ptr", "y_ptr"})


def test_descriptors_load_and_store_themselves() -> None:
    uses = find_pointer_uses(describe)
    assert uses is not None
    assert (uses.loaded, uses.stored) == ({"descriptor"}, {"out"})


def test_a_kernel_without_source_says_nothing() -> None:
    assert find_pointer_uses(eval("lambda x: x")) is None  # noqa: S307 - a function without a file
