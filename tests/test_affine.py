from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.catalog.clusters import parse_cluster
from trimtab.errors import JobFailed
from trimtab.predict.derive import (
    _interpolate,
    combine_changes,
    has_same_program,
    interpolate_trace,
    is_close,
)
from trimtab.predict.memory import estimate_memory, list_step_orders
from trimtab.predict.traces import (
    _choose_ends,
    get_traces,
    interpolate_family,
    partner_micro_batch,
    with_micro_batch,
)
from trimtab.spec import Mesh, Precision, Setting, SizeCause, Strategy, Trace, Work
from trimtab.trace import convolution
from trimtab.trace.tracer import trace_settings
from trimtab.trace.workspace_formulas import (
    COLUMN_SUM,
    column_sum_bytes,
    evaluate_cause,
    flatten_shape,
    unflatten_shape,
)

MIB = 2**20


def trace(micro: int, **changes: Any) -> Trace:
    """A step that holds weights, makes activations by the sample, and sums a bias gradient."""
    rows = 1024 * micro
    cause = SizeCause(rule=COLUMN_SUM, numbers=(rows, 3072))
    made: dict[str, Any] = {
        "order": (0, 1, 2, 3, ~3, ~1, ~2),
        "sizes": (4 * MIB, 6144 * rows, 100 + 8 * micro, column_sum_bytes(rows, 3072)),
        "streams": (0, 0, 0, 0),
        "parts": (0, 3, 3, 5),
        "modules": (0, 1, 1, 0),
        "ops": (0, 1, 1, 2),
        "module_names": ("", "block"),
        "op_names": ("aten::empty", "aten::mm", "aten::sum"),
        "marks": {"build": 0, "batch": 1, "step0": 1, "end": 7},
        "causes": (cause,),
        "caused": ((3, 0),),
        "parameters": MIB,
        "recomputed_flops": 6 * rows,
        "works": (
            Work(op="aten::mm", kind="matrix", dtype="bfloat16", flops=2 * rows * 9, dims=(1, rows, 3, 3)),
            Work(op="aten::gelu", kind="pointwise", dtype="bfloat16", read_bytes=rows, write_bytes=2 * rows),
        ),
        "sequence": (0, 1, 1, 0),
        "phases": {"forward": 0, "backward": 2},
    }
    return Trace(**(made | changes))


@pytest.mark.parametrize("micro", [2, 3, 7, 12, 16, 100])
def test_two_traces_give_every_other_whole(micro: int) -> None:
    assert interpolate_trace(trace(4), trace(8), 4, 8, micro) == trace(micro)


@given(st.integers(2, 50), st.integers(1, 50), st.integers(1, 200))
def test_any_two_give_the_same(low: int, step: int, micro: int) -> None:
    found = interpolate_trace(trace(low), trace(low + step), low, low + step, micro)
    assert found == trace(micro)
    assert estimate_memory(found).reserved_bytes == estimate_memory(trace(micro)).reserved_bytes


def test_the_ends_are_themselves_and_one_trace_is_no_line() -> None:
    assert interpolate_trace(trace(4), trace(8), 4, 8, 8) == trace(8)
    assert interpolate_trace(trace(4), trace(4), 4, 4, 5) is None


def test_frees_in_a_row_may_come_in_any_order_and_others_not() -> None:
    assert has_same_program(trace(4), trace(8, order=(0, 1, 2, 3, ~2, ~3, ~1)))
    assert not has_same_program(trace(4), trace(8, order=(0, 1, 2, ~1, 3, ~3, ~2)))
    # Nor may a free move over the beginning of a phase.
    marks = {"build": 0, "batch": 1, "step0": 1, "end": 5}
    assert not has_same_program(trace(4, marks=marks), trace(8, marks=marks, order=(0, 1, 2, 3, ~2, ~3, ~1)))


@pytest.mark.parametrize(
    "change",
    [
        {"order": (0, 1, 2, 3, ~3, ~1)},
        {"streams": (0, 1, 0, 0)},
        {"parts": (0, 3, 3, 3)},
        {"op_names": ("aten::empty", "aten::bmm", "aten::sum")},
        {"module_names": ("", "other")},
        {"marks": {"build": 0, "step0": 1, "end": 7}},
        {"caused": ()},
        {"causes": (SizeCause(rule="another", numbers=(1, 2)),)},
        {"sequence": (0, 1, 0, 1)},
        {"works": (Work(op="aten::mm", kind="matrix", dtype="float32"),) * 2},
        {"phases": {"forward": 0}},
        {"recomputed": ("blocks (4 blocks)",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_program_gives_no_answer(change: dict[str, Any]) -> None:
    assert interpolate_trace(trace(4), trace(8, **change), 4, 8, 6) is None


def test_a_size_never_falls_below_zero() -> None:
    low, high = trace(4, sizes=(1, 100, 1, 0)), trace(8, sizes=(1, 300, 1, 0))
    found = interpolate_trace(low, high, 4, 8, 1)
    assert found is not None
    assert found.sizes[1] == 0


def test_names_are_compared_and_not_their_places() -> None:
    turned = trace(8, ops=(2, 1, 1, 0), op_names=("aten::sum", "aten::mm", "aten::empty"))
    assert has_same_program(trace(4), turned)


def test_a_rule_that_is_not_known_falls_back_to_the_line() -> None:
    causes = (SizeCause(rule="of a later version", numbers=(1, 2)),)
    low, high = trace(4, causes=causes, sizes=(1, 1, 1, 40)), trace(8, causes=causes, sizes=(1, 1, 1, 80))
    found = interpolate_trace(low, high, 4, 8, 6)
    assert found is not None
    assert found.sizes[3] == 60


def test_shards_are_a_line_in_one_over_their_number() -> None:
    def shard(ranks: int) -> Trace:
        return trace(4, sizes=(64 * MIB // ranks, 8 * MIB, 108, column_sum_bytes(4096, 3072)))

    found = interpolate_trace(shard(4), shard(16), Fraction(1, 4), Fraction(1, 16), Fraction(1, 8))
    assert found == shard(8)


def test_partial_sums_grow_and_then_stay() -> None:
    sizes = [column_sum_bytes(rows, 3072) for rows in (16, 256, 4096, 8192, 65536)]
    assert sizes[:2] == [0, 0]
    assert 0 < sizes[2] < sizes[3]
    # A straight line through the first two that are something would be far off.
    assert sizes[4] < 2 * sizes[3]


@pytest.mark.parametrize("image", [(14, 14), (400,), (4, 8, 8)])
def test_a_convolution_survives_being_written_down(image: tuple[int, ...]) -> None:
    shape = convolution.ConvolutionShape(
        samples=3,
        in_channels=64,
        out_channels=128,
        image=image,
        out_image=image,
        kernel=(3,) * len(image),
        stride=1,
        groups=1,
        weight_in_channels=64,
        is_channels_last=len(image) == 2,
        element_bytes=2,
        arithmetic="bf16",
    )
    assert unflatten_shape(flatten_shape(shape), "bf16") == shape
    cause = SizeCause(rule="convolution weight", numbers=flatten_shape(shape), word="bf16", beside=7)
    assert evaluate_cause(cause) == 7 + convolution.workspace_bytes(shape, "weight")


def test_a_family_answers_from_its_nearest_two() -> None:
    known = {micro: trace(micro) for micro in (2, 4, 16, 32)}
    found = interpolate_family(known, 8)
    assert isinstance(found, Trace)
    assert found.sizes == trace(8).sizes
    assert found.assumptions == ("sizes are read off a line through traces at micro-batches 4 and 16",)
    assert interpolate_family(known, 16) is known[16]
    far = interpolate_family(known, 64)
    assert isinstance(far, Trace)
    assert far.sizes == trace(64).sizes


def test_a_family_that_cannot_tell_says_so() -> None:
    assert interpolate_family({}, 8) is None
    assert interpolate_family({4: trace(4)}, 8) is None
    # One sample may take another way through the program.
    assert interpolate_family({4: trace(4), 8: trace(8)}, 1) is None
    assert interpolate_family({4: trace(4), 8: trace(8, parts=(0, 3, 3, 3))}, 6) is None


def test_a_small_change_of_the_program_does_not_break_the_line() -> None:
    """Few rows take another kernel, with another workspace: all other sizes stay on the line."""
    plain = trace(2)
    other = plain.replace(parts=(0, 3, 3, 3))
    known = {2: other, 16: trace(16), 32: trace(32)}
    assert interpolate_trace(other, trace(32), 2, 32, 8) is None
    found = interpolate_family(known, 8)
    assert isinstance(found, Trace)
    assert found.sizes == trace(8).sizes
    assert found.assumptions == ("sizes are read off a line through traces at micro-batches 16 and 32",)
    # A program that allocates much more is another one, and two traces of it are missing.
    large = other.replace(sizes=tuple(2 * size for size in plain.sizes))
    assert interpolate_family({2: large, 16: trace(16), 32: trace(32)}, 8) is None
    assert interpolate_family({2: other, 16: trace(16)}, 8) is None


def test_a_third_trace_off_the_line_forbids_the_line() -> None:
    bent = trace(16, sizes=(4 * MIB, 2 * trace(16).sizes[1], 228, trace(16).sizes[3]))
    assert interpolate_family({4: trace(4), 8: trace(8), 16: bent}, 6) is None
    assert interpolate_family({4: trace(4), 8: trace(8), 16: trace(16)}, 6) is not None
    assert not is_close(bent, trace(16))
    assert not is_close(None, trace(16))


def test_what_fails_at_every_size_is_not_tried_again() -> None:
    error = JobFailed("model()", found="no", cure="Fix it.")
    assert interpolate_family({4: error, 8: error}, 6) is error
    assert interpolate_family({4: error, 8: trace(8), 16: trace(16)}, 4) is error


def test_the_smallest_and_the_largest_are_traced_and_one_sample_for_itself() -> None:
    assert _choose_ends([]) == []
    assert _choose_ends([1]) == [1]
    assert _choose_ends([1, 2, 4, 8]) == [1, 2, 8]
    assert _choose_ends([2, 4, 8]) == [2, 8]
    assert (partner_micro_batch(8), partner_micro_batch(1)) == (16, 4)


def test_a_resized_setting_keeps_everything_but_the_batch() -> None:
    setting = Setting(
        strategy=Strategy.DDP, mesh=Mesh(dp_replicate=4), micro_batch=2, accumulation=3, global_batch=24
    )
    other = with_micro_batch(setting, 16)
    assert (other.micro_batch, other.accumulation, other.global_batch) == (16, 1, 64)
    assert other.mesh == setting.mesh


def test_a_trace_whose_causes_are_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="caused names an allocation or a cause that is not there"):
        trace(4, caused=((9, 0),))
    with pytest.raises(ValueError, match="caused names"):
        trace(4, caused=((0, 5),))


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.fractions(-4, 4, max_denominator=64))
def test_between_rounds_as_fractions_do(number: int, other: int, share: Fraction) -> None:
    assert _interpolate(number, other, share) == max(0, round(number + (other - number) * share))


@given(low=st.integers(2, 9), step=st.integers(1, 40), few=st.integers(1, 8), more=st.integers(1, 56))
def test_three_corners_give_the_fourth(low: int, step: int, few: int, more: int) -> None:
    def with_shards(micro: int, shards: int) -> Trace:
        return trace(micro, sizes=(4 * MIB // shards, *trace(micro).sizes[1:]))

    corners = [with_shards(micro, shards) for shards in (few, few + more) for micro in (low, low + step)]
    origin, longer, thinner, both = corners
    assert combine_changes(origin, longer, thinner) == both


@pytest.mark.parametrize("change", [{"phases": {"forward": 0}}, {"sequence": (0, 1, 0, 1)}])
def test_corners_of_another_program_give_no_answer(change: dict[str, Any]) -> None:
    assert combine_changes(trace(2), trace(4, **change), trace(2)) is None
    assert combine_changes(trace(2), trace(4), trace(2, **change)) is None


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_of_two_micro_batches_at_two_numbers_of_shards_three_are_traced() -> None:
    settings = [
        Setting(
            strategy=Strategy.FSDP,
            mesh=Mesh(dp_shard=shards),
            micro_batch=micro,
            global_batch=micro * shards,
            precision=Precision.BF16,
        )
        for shards in (4, 16)
        for micro in (2, 6)
    ]
    device = parse_cluster("H100").devices[0]
    found = [trace for trace in get_traces("slm:tiny", settings, device) if isinstance(trace, Trace)]
    said = [any("another number of shards" in text for text in one.assumptions) for one in found]
    assert said == [False, False, False, True]
    assert get_traces("slm:tiny", settings[-1:], device) == found[-1:], "it is remembered like any other"
    (real,) = trace_settings("slm:tiny", settings[-1:], device, cache=False)
    assert isinstance(real, Trace)
    assert found[-1].replace(assumptions=()) == real.replace(assumptions=())


# -------------------------------------------------------------------- sizes that follow from random numbers


def test_reserved_memory_is_the_median_of_orders_of_steps() -> None:
    """Each size is larger than all before it, or the largest comes first and makes room for all others."""
    lengths = (64, 80, 100, 120, 90)
    order: list[int] = []
    marks = {"build": 0, "batch": 0}
    for number, name in enumerate(("step0", "drawn0", "drawn1", "step1", "step2")):
        marks[name] = len(order)
        order += [number, ~number]
    columns = (0,) * len(lengths)
    drawn = Trace(
        order=tuple(order),
        sizes=tuple(length * MIB for length in lengths),
        streams=columns,
        parts=(3,) * len(lengths),
        modules=columns,
        ops=columns,
        module_names=("",),
        op_names=("aten::mm",),
        marks=marks | {"end": len(order)},
    )
    orders = list_step_orders(drawn)
    assert [trace.sizes[1] // MIB for trace in orders] == [100, 120, 90]
    assert all(sorted(trace.sizes) == sorted(drawn.sizes) for trace in orders)
    peaks = estimate_memory(drawn)
    assert peaks.allocated_bytes == 120 * MIB
    # As traced: 64 + 80 + 100 + 120. Rotated: 64 + 100 + 120, 64 + 120, and 64 + 90 + 100 + 120.
    assert peaks.reserved_bytes == (284 + 364) * MIB // 2
    # Without the marks, the order is that of the trace.
    plain = drawn.replace(marks={name: at for name, at in drawn.marks.items() if "drawn" not in name})
    assert list_step_orders(plain) == []
    assert estimate_memory(plain).reserved_bytes == 364 * MIB
