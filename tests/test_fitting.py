"""The micro-batch follows what is measured; on a GPU of numbers and a clock that tests wind."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.spec import Band, Estimate, Footprint
from trimtab.training.oom_recovery import MemoryGauge, MicroBatchFitter, MicroBatchSizes

GIB = 2**30


class Numbers(MemoryGauge):
    """A GPU of which only numbers are there."""

    def __init__(self, *, fixed: int, sample: int, limit: int, fitting: Any = None) -> None:
        self.fixed, self.sample, self.most = fixed, sample, limit
        self.fitting = fitting
        self.given_back = 0

    def allocated(self) -> int:
        return self.fixed

    def peak(self) -> int:
        return int(self.fixed + self.sample * self.fitting.sizes.current)

    def limit(self) -> int:
        return self.most

    def reset(self) -> None: ...

    def empty_cache(self) -> None:
        self.given_back += 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fitted(current: int, **numbers: Any) -> tuple[MicroBatchFitter, Clock]:
    gauge, clock = Numbers(**numbers), Clock()
    fitting = MicroBatchFitter(
        MicroBatchSizes(planned=current, current=current),
        gauge=gauge,
        estimate=None,
        estimated_for=current,
        may_exceed_plan=True,
        clock=clock,
    )
    gauge.fitting = fitting
    return fitting, clock


@pytest.mark.parametrize(("slowness", "end"), [(1.0, 22), (1.1, 8)])
def test_much_room_is_used_unless_that_is_slower(slowness: float, end: int) -> None:
    fitting, clock = fitted(8, fixed=20 * GIB, sample=4 * GIB, limit=140 * GIB)
    moves = []
    for step in range(1, 200):
        clock.now += slowness if fitting.sizes.current > 8 else 1.0
        move = fitting.after_step(share=64, step=step)
        if move is not None:
            moves.append(move)
            fitting.apply(move)
    assert fitting.sizes.current == end
    assert moves[0].sizes.current == 22
    assert len(moves) == (1 if end == 22 else 2)


def test_a_peak_close_to_the_limit_shrinks_before_it_fails() -> None:
    fitting, _ = fitted(8, fixed=20 * GIB, sample=10 * GIB, limit=101 * GIB)
    moves = [fitting.after_step(share=64, step=step) for step in range(1, 51)]
    assert moves[-1] is not None
    assert moves[-1].sizes.current == 7
    assert moves[:-1] == [None] * 49


@pytest.mark.parametrize("nccl_gib", [0, 4])
def test_before_anything_was_measured_the_estimate_of_the_plan_says_where_to_go(nccl_gib: int) -> None:
    """NCCL has its memory already: the limit is what it leaves."""
    gauge = Numbers(fixed=GIB, sample=0, limit=100 * GIB)
    parts = Footprint(
        weights=2 * GIB,
        gradients=2 * GIB,
        optimizer=4 * GIB,
        activations=256 * GIB,
        communication=nccl_gib * GIB,
    )
    total = parts.total
    estimate = Estimate(
        allocated_bytes=total - nccl_gib * GIB,
        reserved_bytes=total - nccl_gib * GIB,
        process_bytes=total,
        parts=parts,
        band=Band(low_bytes=0, high_bytes=total),
    )
    sizes = MicroBatchSizes(planned=64, current=64)
    fitting = MicroBatchFitter(sizes, gauge=gauge, estimate=estimate, estimated_for=64, may_exceed_plan=False)
    fitting.release()
    move = fitting.shrink_after_oom(size=64, share=64, step=0)
    assert gauge.given_back == 1
    assert move is not None
    # 4 GiB a sample, and 8 GiB of 100 are for what is not there yet in the first step.
    assert move.sizes.current == fitting.sizes.current == 22


def test_without_a_gauge_it_is_half() -> None:
    sizes = MicroBatchSizes(planned=8, current=8)
    fitting = MicroBatchFitter(sizes, gauge=None, estimate=None, estimated_for=8, may_exceed_plan=True)
    move = fitting.shrink_after_oom(size=8, share=8, step=0)
    assert move is not None
    assert move.sizes.current == 4
    assert "nothing is known of its memory" in move.why
