"""Where the micro-batch goes: pure sums."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.spec import Allocator, Precision, Setting
from trimtab.training.oom_recovery import (
    RETRY_AFTER_STEPS,
    MemoryBudget,
    MicroBatchSizes,
    adjust_micro_batch,
    even_micro_batch,
    grow_micro_batch,
    is_out_of_memory,
    revert_if_slower,
    shrink_micro_batch,
)
from trimtab.training.optimizer_step import GROW_AFTER_UPDATES, LossScale, initial_scale
from trimtab.training.torchrun import allocator_variables

GIB = 2**30


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_out_of_memory_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)
    wrapped = ValueError("in the loss")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error", [None, ValueError("out of memory"), RuntimeError("mat1 and mat2 do not match"), KeyError("x")]
)
def test_another_error_is_not_out_of_memory(error: BaseException | None) -> None:
    assert not is_out_of_memory(error)


def test_an_error_that_is_its_own_cause_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


@given(size=st.integers(1, 300), share=st.integers(1, 300))
def test_even_parts_are_as_few_and_differ_little(size: int, share: int) -> None:
    found = even_micro_batch(size, share)
    assert 1 <= found <= size
    passes = len(range(0, share, found))
    assert passes == len(range(0, share, size))
    # No smaller size makes as few micro-batches.
    assert found == 1 or len(range(0, share, found - 1)) > passes


def test_less_than_a_byte_a_sample_is_no_measure() -> None:
    assert MemoryBudget(limit_bytes=1, fixed_bytes=0, sample_bytes=5e-324).max_micro_batch is None
    assert MemoryBudget(limit_bytes=10**6, fixed_bytes=0, sample_bytes=1.0).max_micro_batch is not None


@given(
    size=st.integers(2, 500),
    share=st.integers(1, 500),
    limit=st.none() | st.integers(0, 10**12),
    fixed=st.none() | st.integers(0, 10**12),
    sample=st.none() | st.floats(0, 1e10),
)
def test_after_a_failure_it_is_always_smaller_and_never_nothing(
    size: int, share: int, limit: int | None, fixed: int | None, sample: float | None
) -> None:
    budget = MemoryBudget(limit_bytes=limit, fixed_bytes=fixed, sample_bytes=sample)
    sizes = MicroBatchSizes(planned=size, current=size)
    for step in range(40):
        move = shrink_micro_batch(sizes, size=sizes.current, share=share, budget=budget, step=step)
        if move is None:
            assert sizes.current == 1
            return
        assert 1 <= move.sizes.current < sizes.current
        sizes = move.sizes
    pytest.fail("it did not come to an end")


def test_the_estimate_says_where_to_go_rather_than_half() -> None:
    budget = MemoryBudget(limit_bytes=100 * GIB, fixed_bytes=17 * GIB, sample_bytes=2 * GIB)
    move = shrink_micro_batch(
        MicroBatchSizes(planned=64, current=64), size=64, share=64, budget=budget, step=0
    )
    assert move is not None
    # 40 fit, and two parts of 32 are as few as 40 and 24, and alike.
    assert move.sizes.current == 32
    assert "40 are expected to fit (100.0 GiB in all" in move.why
    tight = budget.replace(sample_bytes=7 * GIB)
    move = shrink_micro_batch(
        MicroBatchSizes(planned=64, current=64), size=64, share=64, budget=tight, step=0
    )
    assert move is not None
    assert move.sizes.current == 11


def test_an_estimate_that_was_wrong_gives_way_in_small_steps_and_then_in_halves() -> None:
    budget = MemoryBudget(limit_bytes=100 * GIB, fixed_bytes=0, sample_bytes=1.0)
    first = shrink_micro_batch(
        MicroBatchSizes(planned=64, current=64), size=64, share=1000, budget=budget, step=0
    )
    assert first is not None
    assert first.sizes.current == even_micro_batch(48, 1000)
    again = shrink_micro_batch(first.sizes.replace(current=64), size=64, share=1000, budget=budget, step=60)
    assert again is not None
    assert again.sizes.current == even_micro_batch(32, 1000)


def test_it_grows_back_after_a_while_and_waits_twice_as_long_after_each_failure() -> None:
    sizes = MicroBatchSizes(planned=8, current=8)
    budget = MemoryBudget()
    waited = []
    step = 0
    for _ in range(3):
        move = shrink_micro_batch(sizes, size=8, share=16, budget=budget, step=step)
        assert move is not None
        sizes, began = move.sizes, step
        while (
            back := grow_micro_batch(sizes, share=16, budget=budget, step=step)
        ) is None or back.sizes.current < 8:
            sizes = sizes if back is None else back.sizes
            step += 1
        sizes = back.sizes
        waited.append(step - began)
    assert waited[0] >= RETRY_AFTER_STEPS
    assert waited[1] >= 2 * RETRY_AFTER_STEPS
    assert waited[2] >= 4 * RETRY_AFTER_STEPS


def test_it_does_not_grow_to_what_is_known_not_to_fit() -> None:
    budget = MemoryBudget(limit_bytes=10 * GIB, fixed_bytes=GIB, sample_bytes=2 * GIB)
    assert grow_micro_batch(MicroBatchSizes(planned=8, current=4), share=8, budget=budget, step=1000) is None
    roomy = budget.replace(sample_bytes=GIB)
    move = grow_micro_batch(MicroBatchSizes(planned=8, current=4), share=8, budget=roomy, step=1000)
    assert move is not None
    assert move.sizes.current == 8


def test_much_room_grows_and_little_room_shrinks_and_both_say_why() -> None:
    sizes = MicroBatchSizes(planned=4, current=4)
    budget = MemoryBudget(limit_bytes=100 * GIB, fixed_bytes=10 * GIB, sample_bytes=4 * GIB)
    more = adjust_micro_batch(sizes, share=64, budget=budget, peak_bytes=26 * GIB, step=200)
    assert more is not None
    assert more.sizes.current == even_micro_batch(21, 64) == 16
    assert "the peak is 26.0 GiB of 100.0 GiB" in more.why
    full = MemoryBudget(limit_bytes=100 * GIB, fixed_bytes=10 * GIB, sample_bytes=22.3 * GIB)
    less = adjust_micro_batch(sizes, share=64, budget=full, peak_bytes=99 * GIB, step=200)
    assert less is not None
    assert less.sizes.current == 3
    assert "close to the limit" in less.why
    assert adjust_micro_batch(sizes, share=64, budget=budget, peak_bytes=80 * GIB, step=200) is None
    assert adjust_micro_batch(sizes, share=64, budget=budget, peak_bytes=26 * GIB, step=10) is None


def test_a_larger_micro_batch_that_is_slower_is_taken_back_for_good() -> None:
    before, now = MicroBatchSizes(planned=4, current=4), MicroBatchSizes(planned=4, current=16)
    back = revert_if_slower(now, before, seconds=1.1, seconds_before=1.0, step=300)
    assert back is not None
    assert back.sizes.current == 4
    assert back.sizes.is_blocked(16, 10**9)
    assert revert_if_slower(now, before, seconds=1.0, seconds_before=1.0, step=300) is None


def test_the_loss_scale_halves_and_grows_and_is_one_without_fp16() -> None:
    scale = initial_scale(Setting(micro_batch=1, global_batch=1, precision=Precision.FP16).dtypes)
    assert scale.after_overflow().value == scale.value / 2
    for _ in range(GROW_AFTER_UPDATES):
        scale = scale.after_update()
    assert scale.value == 2.0**17
    assert LossScale().after_update() == LossScale()
    assert not LossScale().can_shrink


def test_the_allocator_is_set_by_variables_that_keep_what_is_there() -> None:
    plan = Setting(micro_batch=1, global_batch=1, allocator=Allocator.EXPANDABLE)
    there = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    found = allocator_variables(plan, there)
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:True"
    assert allocator_variables(plan.replace(allocator=Allocator.DEFAULT), there) == {}
