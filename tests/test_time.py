"""Time: laws of operations, corrections from measurements, the two clocks, collectives."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from bench.gpu_queue import list_errors

import trimtab
from test_cli import trimtab_cli
from trimtab.catalog.facts import calibration_file, device_facts, facts_of, fallback_facts
from trimtab.catalog.tables import collectives, devices
from trimtab.errors import EnvironmentFault
from trimtab.predict import communication, op_time, step_time
from trimtab.predict.calibration import (
    find_speed,
    read_own_calibration,
    shipped_calibrations,
    write_own_calibration,
)
from trimtab.predict.estimate import estimate_trace
from trimtab.spec import Calibration, Mesh, Precision, Setting, Slice, Strategy, Trace, Work
from trimtab.spec.trace import GRAPH_ENTER, GRAPH_LEAVE, PERMUTED, SHARDED, WRAPPED
from trimtab.trace.op_cost import describe_work
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import trace_setting
from trimtab.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

H200 = trimtab.cluster("H200").devices[0]
RATES = op_time.device_rates(H200) or pytest.fail("the H200 has figures")
FACTS = facts_of(H200)
HOST = step_time.HostCosts(10e-6, 10e-6, 10e-6, 1e-6, 1e-6, 1e-6, 1e-6, 10e-6, 5e-6, 10e-6, FACTS.step)


def matrix(rows: int, columns: int, inner: int, alignment: int = 16, dtype: str = "bfloat16") -> Work:
    return Work(
        op="aten::mm",
        kind="matrix",
        dtype=dtype,
        flops=2 * rows * columns * inner,
        read_bytes=2 * (rows + columns) * inner,
        write_bytes=2 * rows * columns,
        dims=(1, rows, columns, inner, alignment),
    )


def copy(size: int) -> Work:
    return Work(op="aten::clone", kind="pointwise", dtype="float32", read_bytes=size, write_bytes=size)


@pytest.mark.parametrize(
    ("name", "share"),
    [("RTX4090", 1.35), ("RTX3090", 1.36), ("L40S", 0.87), ("H100-PCIe", 0.82), ("A40", 1.0)],
)
def test_products_of_a_card_are_scaled_by_what_searches_over_shapes_reached_on_it(
    name: str, share: float
) -> None:
    device = trimtab.cluster(name).devices[0]
    rates = op_time.device_rates(device)
    assert rates is not None
    assert device.peaks.bf16 is not None
    assert rates.bfloat16 / device.peaks.bf16 == pytest.approx(share, abs=0.01)


def test_a_large_product_runs_near_the_sustained_peak_and_a_copy_near_the_bandwidth() -> None:
    large = matrix(8192, 8192, 8192)
    assert large.flops / op_time.roofline_s(large, RATES) == pytest.approx(0.75 * 989e12, rel=0.05)
    assert 2 * 2**30 / op_time.roofline_s(copy(2**30), RATES) == pytest.approx(0.9 * 4.8e12, rel=0.05)


def test_whole_rounds_of_tiles_count() -> None:
    # 133 tiles on 132 multiprocessors take two rounds, nearly twice as long as 132.
    full, over = matrix(128 * 132, 256, 8192), matrix(128 * 133, 256, 8192)
    assert op_time.roofline_s(over, RATES) > 1.2 * op_time.roofline_s(full, RATES)


def test_rows_that_are_not_aligned_make_tensor_cores_slow_and_plain_fp32_not() -> None:
    assert op_time.roofline_s(matrix(8192, 50257, 768, 2), RATES) > 3 * op_time.roofline_s(
        matrix(8192, 50304, 768), RATES
    )
    plain = matrix(8192, 50257, 768, 4, "float32"), matrix(8192, 50304, 768, 16, "float32")
    assert op_time.roofline_s(plain[0], RATES) == pytest.approx(op_time.roofline_s(plain[1], RATES), rel=0.02)


def test_an_operation_that_was_measured_takes_what_was_measured() -> None:
    works = (matrix(1024, 1024, 1024), matrix(8192, 8192, 8192), copy(2**20))
    seconds = (1e-4, 2e-3, 3e-5)
    known = Calibration(device="H200 SXM 141GB", works=works, seconds=seconds)
    found = op_time.Pace(RATES, op_time.calibration_points(known, RATES))
    for work, second in zip(works, seconds, strict=True):
        assert found.seconds(work) == pytest.approx(second, rel=0.1)


def test_a_faster_device_is_faster_by_the_same_corrections() -> None:
    fast, slow = find_speed(H200), find_speed(trimtab.cluster("A100-80GB").devices[0])
    assert fast is not None
    assert slow is not None
    assert fast.own
    assert not slow.own
    large = matrix(8192, 8192, 8192)
    # 989 against 312 TFLOP/s, of which the best products reach 794.5 and 271.2.
    assert slow.pace.seconds(large) / fast.pace.seconds(large) == pytest.approx(794.5 / 271.2, rel=0.05)


def test_a_slice_of_a_gpu_that_was_measured_is_slower_by_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_CALIBRATIONS", str(tmp_path))
    share = 3 / 7
    part = H200.replace(
        slice=Slice(profile="3g.71gb", parent="GPU-1", sm_share=share), peaks=H200.peaks.scale(share)
    )
    whole, cut = find_speed(H200), find_speed(part)
    assert whole is not None
    assert cut is not None
    assert not cut.own
    large = matrix(8192, 8192, 8192)
    assert cut.pace.seconds(large) / whole.pace.seconds(large) == pytest.approx(1 / share, rel=0.1)
    # What is measured on a slice is the slice's, and no other's.
    write_own_calibration(shipped_calibrations()[0].replace(device=part.kind))
    assert read_own_calibration(H200) is None
    own = find_speed(part, read_own_calibration(part))
    assert own is not None
    assert own.own


def test_a_device_without_figures_has_no_speed() -> None:
    assert find_speed(H200.replace(bandwidth_bytes_per_s=None)) is None


class Even:
    """Every operation takes a tenth of a millisecond."""

    @staticmethod
    def seconds(_: Work) -> float:
        return 1e-4

    @staticmethod
    def recurrent_launch_s(_: Work) -> float:
        return 1e-2


def recurrent(layers: int, steps: int, batch: int, width: int, dtype: str = "float16") -> Work:
    numbers = layers * 8 * width**2
    return Work(
        op="aten::_cudnn_rnn",
        kind="recurrent",
        dtype=dtype,
        flops=2 * steps * batch * numbers,
        read_bytes=2 * steps * numbers,
        dims=(layers, steps, batch, width),
        kernels=steps * layers,
    )


def test_a_recurrent_layer_costs_the_host_its_launches_while_the_device_goes_on() -> None:
    works = [copy(1024)] * 50
    ahead = step_time.run_clocks([*works, recurrent(2, 100, 8, 64)], Even(), HOST, backward=range(0))  # type: ignore[arg-type]
    # 5 ms of the device, handed out in half a millisecond, while the host is at the 10 ms of launches.
    assert ahead.total_s == pytest.approx(1e-2, rel=0.2)
    behind = step_time.run_clocks([recurrent(2, 100, 8, 64), *works], Even(), HOST, backward=range(0))  # type: ignore[arg-type]
    assert behind.total_s == pytest.approx(1e-2 + 5e-3, rel=0.15)


def test_launches_of_recurrent_layers_are_counted_by_cells() -> None:
    two, four = recurrent(2, 128, 256, 512), recurrent(4, 128, 256, 512)
    assert (
        op_time.recurrent_launch_s(four, FACTS.law) == 2 * op_time.recurrent_launch_s(two, FACTS.law) > 1e-3
    )
    assert op_time.recurrent_launch_s(copy(1024), FACTS.law) == 0
    # Layers run beside each other, so the device waits for steps and not for layers.
    assert op_time.roofline_s(four, RATES) < 1.9 * op_time.roofline_s(two, RATES)


@pytest.mark.parametrize(
    ("work", "whole"),
    [
        (recurrent(1, 128, 64, 1024), True),
        (recurrent(2, 128, 64, 1024), False),
        (recurrent(1, 128, 64, 1152), False),
        (recurrent(1, 128, 64, 1000), False),
        (recurrent(1, 128, 256, 1024), False),
        (recurrent(1, 128, 60, 1024), False),
        (recurrent(1, 128, 64, 1024, "float32"), False),
    ],
)
def test_one_layer_in_fp16_is_one_kernel(work: Work, whole: bool) -> None:
    assert (op_time.recurrent_launch_s(work, FACTS.law) == 0) is whole


def test_a_measurement_at_the_pace_of_the_host_says_nothing_of_the_device() -> None:
    work = recurrent(3, 256, 64, 512)
    alone = op_time.recurrent_launch_s(work, FACTS.law)
    assert alone > op_time.roofline_s(work, RATES)
    for factor in (0.6, 1.5):
        known = Calibration(device="H200 SXM 141GB", works=(work,), seconds=(factor * alone,))
        found = op_time.Pace(RATES, op_time.calibration_points(known, RATES))
        assert found.recurrent_launch_s(work) == pytest.approx(factor * alone * FACTS.law.cell_in_a_step)
        assert found.seconds(work) == pytest.approx(max(1.0, factor) * op_time.roofline_s(work, RATES))


def test_code_outside_of_compiled_graphs_costs_the_host_more() -> None:
    work = copy(1024)
    enter, leave = (Work(op=op, kind="call", dtype="", kernels=0) for op in (GRAPH_ENTER, GRAPH_LEAVE))

    def host_s(works: list[Work]) -> float:
        return step_time.run_clocks(works, Even(), HOST, backward=range(0), compiled=True).host_s  # type: ignore[arg-type]

    # A trace without marks is compiled as a whole; with marks, one of two operations is.
    saved = host_s([enter, work, leave, work]) - host_s([work, work])
    assert saved == pytest.approx(HOST.forward_s - HOST.compiled_s + HOST.graph_s)


def test_a_product_of_a_shape_not_met_before_costs_the_host_more() -> None:
    known, new = [copy(1024)] * 100, [copy(1024).replace(fresh=True)] * 100
    for compiled in (False, True):
        usual, weighed = (
            step_time.run_clocks(works, Even(), HOST, backward=range(0), compiled=compiled).host_s  # type: ignore[arg-type]
            for works in (known, new)
        )
        assert weighed - usual == pytest.approx(100 * FACTS.step.fresh_s)


def recomputed_host_s(*, selective: bool, operations: int = 3, blocks: int = 2) -> float:
    """Seconds of the host for blocks that are computed again, beside what their operations cost."""
    call = Work(op="call", kind="call", dtype="", kernels=0)
    block = [call, *[copy(MIB)] * operations]
    works, begin = block * blocks, blocks * len(block)
    works += [*block, *[copy(MIB)] * 20] * blocks
    step = {"backward": range(begin, len(works)), "selective": selective}
    plain = sum(HOST.call_s if work is call else HOST.forward_s for work in works)
    return step_time.run_clocks(works, Even(), HOST, **step).host_s - HOST.step.start_s - plain  # type: ignore[arg-type]


def test_computing_again_costs_the_host_hooks_for_blocks_and_saved_tensors() -> None:
    facts = HOST.step
    saved = facts.saved_s + facts.restored_s
    assert recomputed_host_s(selective=False) == pytest.approx(2 * (3 * saved + facts.block_s))
    assert recomputed_host_s(selective=False, operations=6) == pytest.approx(2 * (6 * saved + facts.block_s))
    watched = recomputed_host_s(selective=True) - recomputed_host_s(selective=False)
    assert watched == pytest.approx(2 * 2 * 3 * facts.watched_s)


def test_products_that_are_computed_again_have_known_shapes() -> None:
    call = Work(op="call", kind="call", dtype="", kernels=0)
    product = matrix(100, 64, 64).replace(fresh=True)
    gradient = matrix(64, 100, 64).replace(fresh=True)
    works = [call, product, call, product, gradient]
    found = step_time.run_clocks(works, Even(), HOST, backward=range(2, 5)).host_s  # type: ignore[arg-type]
    stale = [work.replace(fresh=False) for work in works]
    known = step_time.run_clocks(stale, Even(), HOST, backward=range(2, 5)).host_s  # type: ignore[arg-type]
    assert found - known == pytest.approx(2 * HOST.step.fresh_s)


def test_what_autograd_does_not_record_costs_the_host_less_and_only_in_the_forward_pass() -> None:
    host = HOST._replace(forward_s=20e-6, plain_s=15e-6)
    known, unknown = [copy(1024)] * 10, [copy(1024).replace(untracked=True)] * 10
    for backward, saved_s in ((range(0), 10 * 5e-6), (range(10), 0.0)):
        recorded, left = (
            step_time.run_clocks(works, Even(), host, backward=backward).host_s  # type: ignore[arg-type]
            for works in (known, unknown)
        )
        assert recorded - left == pytest.approx(saved_s)


def test_views_cost_the_host_in_both_passes_at_their_own_price() -> None:
    host = HOST._replace(view_s=8e-6, backward_view_s=5e-6)
    views = [Work(op="aten::view", kind="view", dtype="", kernels=0)] * 10
    forward, backward = (
        step_time.run_clocks(views, Even(), host, backward=passes).host_s - HOST.step.start_s  # type: ignore[arg-type]
        for passes in (range(0), range(10))
    )
    assert [forward, backward] == pytest.approx([80e-6, 50e-6])


def test_a_slower_host_is_slower_in_all_of_its_costs() -> None:
    usual, slow = (step_time.host_costs_at(layers, FACTS) for layers in (1.0, 2.0))
    costs = [cost for cost in usual._fields if cost != "step"]
    assert usual.piece_s == FACTS.step.piece_s
    slower = 2**FACTS.host.power
    assert [getattr(slow, cost) for cost in costs] == pytest.approx(
        [slower * getattr(usual, cost) for cost in costs]
    )
    assert slow.step.block_s == pytest.approx(slower * usual.step.block_s)


def test_a_host_is_compared_by_a_bare_operation_and_a_linear_layer() -> None:
    both = {"forward_s": 8 * FACTS.host.bare_forward_s, "linear_s": 2 * FACTS.host.linear_s}
    assert step_time.compare_host(both, FACTS) == pytest.approx(4)
    # Old calibrations have only one of them, or none.
    assert step_time.compare_host({"forward_s": both["forward_s"]}, FACTS) == pytest.approx(8)
    assert step_time.scale_host_costs({}, FACTS).forward_s == FACTS.host.forward_s


def describe_group_norm(samples: int, groups: int) -> Work:
    image = torch.empty(samples, 64, 64, 64, device="meta")
    means = torch.empty(samples, groups, device="meta")
    image.fake_device = means.fake_device = torch.device("cuda")  # type: ignore[attr-defined]
    norm = torch.ops.aten.native_group_norm.default
    args = (image, None, None, samples, 64, 64 * 64, groups, 1e-5)
    work = describe_work(norm, "aten::native_group_norm", args, {}, (image, means, means))
    assert work is not None
    return work


def test_a_norm_of_few_large_groups_takes_as_long_as_one_group() -> None:
    pace = op_time.Pace(RATES)
    few, fewer, many = (describe_group_norm(samples, groups) for samples, groups in ((4, 1), (2, 1), (4, 64)))
    assert few.dims[op_time.LIMIT] == 4
    reading_s = 64 * 64 * 64 / op_time.GROUP_THREADS * FACTS.law.norm_step_s
    assert [pace.seconds(few), pace.seconds(fewer)] == pytest.approx([reading_s] * 2, rel=1e-3)
    # With many groups, bytes decide.
    assert pace.seconds(many) == op_time.roofline_s(many, RATES)
    # Older calibrations do not have the number of groups: their norms still correct these.
    assert op_time.work_coordinates(few) == op_time.work_coordinates(few.replace(dims=few.dims[:2]))


def test_compiled_kernels_that_add_into_memory_take_the_time_of_their_additions() -> None:
    kernel = copy(1024).replace(additions=34 * 10**9)
    assert op_time.Pace(RATES).seconds(kernel) == pytest.approx(34e9 / FACTS.law.additions_per_s)
    assert op_time.Pace(RATES).seconds(kernel.replace(additions=1)) == op_time.Pace(RATES).seconds(copy(1024))
    waiting = kernel.replace(waiting_additions=10**7)
    assert op_time.Pace(RATES).seconds(waiting) == pytest.approx(10**7 * FACTS.law.addition_s)


@pytest.mark.parametrize(("rows", "additions"), [(6000, 6000 * 64), (1500, 0)])
def test_adding_many_rows_to_few_takes_the_same_time_in_every_dtype(rows: int, additions: int) -> None:
    device = torch.device("cuda")
    works = []
    for dtype in (torch.float32, torch.bfloat16):
        into, source = (torch.empty(count, 64, dtype=dtype, device="meta") for count in (1000, rows))
        index = torch.empty(rows, dtype=torch.long, device="meta")
        for tensor in (into, source, index):
            tensor.fake_device = device  # type: ignore[attr-defined]
        add = torch.ops.aten.index_add_.default
        work = describe_work(add, "aten::index_add_", (into, 0, index, source), {}, into)
        assert work is not None
        assert work.additions == additions
        works.append(work.replace(additions=10**6 * work.additions))
    if additions:
        seconds = [op_time.Pace(RATES).seconds(work) for work in works]
        assert seconds == pytest.approx([10**6 * additions / FACTS.law.indexed_additions_per_s] * 2)


def test_rolling_two_dimensions_moves_everything_twice() -> None:
    image = torch.empty(4, 64, 64, 32, device="meta")
    image.fake_device = torch.device("cuda")  # type: ignore[attr-defined]
    roll = torch.ops.aten.roll.default
    rolls = [
        describe_work(roll, "aten::roll", (image, [1] * count, list(range(count))), {}, image)
        for count in (1, 2)
    ]
    seconds = [op_time.roofline_s(work, RATES) - work.kernels * FACTS.law.launch_s for work in rolls if work]
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_small_operations_run_at_the_pace_of_the_host_and_large_ones_of_the_device() -> None:
    works = [copy(1024)] * 100
    slow_host = HOST._replace(forward_s=1e-3)
    by_device = step_time.run_clocks(works, Even(), HOST, backward=range(0))  # type: ignore[arg-type]
    by_host = step_time.run_clocks(works, Even(), slow_host, backward=range(0))  # type: ignore[arg-type]
    assert by_device.total_s == pytest.approx(100 * 1e-4, rel=0.15)
    assert by_host.total_s == pytest.approx(100 * 1e-3, rel=0.15)


def test_waiting_for_a_value_adds_both_clocks() -> None:
    wait = Work(op="aten::_local_scalar_dense", kind="wait", dtype="")
    slow_host = HOST._replace(forward_s=1e-4)
    works = [copy(1024)] * 50
    free = step_time.run_clocks(works * 2, Even(), slow_host, backward=range(0))  # type: ignore[arg-type]
    waited = [step for work in works * 2 for step in (work, wait)]
    tied = step_time.run_clocks(waited, Even(), slow_host, backward=range(0))  # type: ignore[arg-type]
    assert tied.total_s > 1.8 * free.total_s


def test_the_host_cannot_run_more_than_a_queue_ahead() -> None:
    works = [copy(1024)] * 3000
    found = step_time.run_clocks(works, Even(), HOST, backward=range(0))  # type: ignore[arg-type]
    assert found.host_s < 0.2 * found.total_s
    assert found.total_s == pytest.approx(3000 * (1e-4 + FACTS.step.gap_s), rel=0.05)


def test_collectives_grow_with_size_and_are_slower_between_nodes() -> None:
    inside = communication.find_links(trimtab.cluster("8xH100"), 8)
    across = communication.find_links(trimtab.cluster("2x8xH100"), 16)
    assert inside.all_reduce_s(2**30, 1) == 0
    # The switch adds: a reduction is faster than a scatter and a gather.
    assert (
        1.3 * inside.all_gather_s(2**30, 8)
        < inside.all_reduce_s(2**30, 8)
        < 1.7 * inside.all_gather_s(2**30, 8)
    )
    assert inside.all_reduce_s(2**31, 8) > 1.8 * inside.all_reduce_s(2**30, 8)
    assert across.all_reduce_s(2**30, 16) > inside.all_reduce_s(2**30, 8)


def test_gpus_of_a_node_add_their_network_ports_up() -> None:
    """DGX H100: eight ports of 50 GB/s carry 384 GB/s between nodes, and NVLink 371 GB/s in them."""
    size, reached = 2**34, 0.98
    h100 = communication.find_links(trimtab.cluster("4x8xH100"), 32)
    assert h100.all_gather_s(size, 32) == pytest.approx(size * 31 / 32 / (371e9 * reached), rel=0.02)
    slow = communication.find_links(trimtab.cluster("4x8xH100", network="80Gb/node"), 32)
    assert slow.all_gather_s(size, 32) == pytest.approx(size * 31 / 32 / 9.6e9, rel=0.01)
    # NVLink is the limit where the network is faster.
    fast = communication.find_links(trimtab.cluster("4x8xH100", network="3200Gb/gpu"), 32)
    assert fast.all_gather_s(size, 32) == pytest.approx(h100.all_gather_s(size, 32))


def test_copies_of_a_shard_have_one_port_each() -> None:
    """hsdp over four nodes: the four copies of a shard lie on four nodes, one GPU in each."""
    size, among = 2**32, communication.find_links(trimtab.cluster("4x8xH100"), 32)
    found = among.all_reduce_s(size, 4, apart=8)
    assert found == pytest.approx(2 * size * 3 / 4 / (50e9 * collectives().network_share), rel=0.01)


def test_all_to_all_sends_a_share_to_each_rank() -> None:
    links = communication.find_links(trimtab.cluster("4x8xH100"), 32)
    assert links.all_to_all_s(2**30, 1) == 0
    # Three of four shares leave the node, each by the port of its own GPU: slower than an all-gather.
    assert links.all_to_all_s(2**30, 32) > 4 * links.all_gather_s(2**30, 32)
    assert links.all_to_all_s(2**30, 8) < 0.3 * links.all_to_all_s(2**30, 8, apart=4)


def test_the_network_that_was_taken_is_said_with_its_source() -> None:
    words = communication.describe_network(trimtab.cluster("2x8xH100"), 16)
    assert words is not None
    assert "50 GB/s (400 Gb/s) a GPU" in words
    assert "assumed: DGX H100" in words
    assert "--network" in words
    words = communication.describe_network(trimtab.cluster("2x8xH100", network="100Gb/node"), 16)
    assert words is not None
    assert words.endswith("as stated by --network 100Gb/node")
    assert communication.describe_network(trimtab.cluster("2x8xH100"), 8) is None


def trace_of(works: list[Work], **other: object) -> Trace:
    empty: dict[str, object] = dict.fromkeys(
        ("order", "sizes", "streams", "parts", "modules", "ops", "module_names", "op_names"), ()
    )
    sequence = tuple(range(len(works)))
    return Trace(**{**empty, "marks": {}, "works": tuple(works), "sequence": sequence, **other})  # type: ignore[arg-type]


def test_accumulation_repeats_the_passes_and_not_the_optimizer() -> None:
    works = [matrix(4096, 4096, 4096 + 8 * place) for place in range(20)]
    adam = Work(
        op="aten::_fused_adamw_", kind="optimizer", dtype="float32", read_bytes=2**30, dims=(10, 2**28)
    )
    trace = trace_of([*works, adam], phases={"forward": 0, "backward": 10, "optimizer": 20})
    found = find_speed(H200)
    assert found is not None
    alone = communication.Links(1.0, 1.0, 1, 1)
    once, four = (
        step_time.estimate_step(
            trace,
            Setting(micro_batch=1, accumulation=count, global_batch=count),
            found.pace,
            found.host,
            alone,
        ).total_s
        for count in (1, 4)
    )
    optimizer = found.pace.seconds(adam)
    # The host is ahead by then: a pass does not begin again.
    assert four - optimizer == pytest.approx(4 * (once - optimizer) - 3 * found.host.step.start_s, rel=0.02)


def test_reducing_gradients_is_hidden_behind_a_long_backward_pass_only() -> None:
    among = communication.find_links(trimtab.cluster("8xA100-40GB"), 8)
    setting = Setting(strategy=Strategy.DDP, mesh=Mesh(dp_replicate=8), micro_batch=1, global_batch=8)
    trace = trace_of([], trainable=10**9)
    hidden = step_time.exposed_communication_s(trace, setting, among, forward_s=1.0, backward_s=2.0)
    bare = step_time.exposed_communication_s(trace, setting, among, forward_s=0.0, backward_s=0.0)
    assert hidden < 0.01 * bare
    half = step_time.exposed_communication_s(
        trace, setting.replace(precision=Precision.BF16_TRUE), among, forward_s=0.0, backward_s=0.0
    )
    assert half == pytest.approx(bare / 2, rel=0.05)


JOB = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Job:
    def model(self):
        return nn.Sequential(*(Block() for _ in range(4)))

    def batch(self, size):
        return torch.randn(size, 256)

    def loss(self, model, batch):
        return model(batch).square().mean()
"""


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 1)])
def test_a_traced_step_has_the_flops_of_its_layers(tmp_path: Path, recompute: str, again: int) -> None:
    file = tmp_path / "job.py"
    file.write_text(textwrap.dedent(JOB), encoding="utf-8")
    setting = Setting(micro_batch=64, global_batch=64, precision=Precision.BF16, recompute=recompute)  # type: ignore[arg-type]
    trace = trace_setting(TraceRequest(job=f"{file}:Job", setting=setting, device=H200), cache=False)
    each = 2 * 64 * 256 * 1024
    # Two layers in each of four blocks, forward and twice backward; the first needs no gradient of its input.
    expected = 4 * 2 * 3 * each - each
    assert step_time.model_flops(trace) == expected
    # What comes after the last tensor that the backward pass needs is not computed again.
    assert trace.recomputed_flops == again * 4 * each
    assert {"forward", "backward", "optimizer"} == set(trace.phases)


def test_every_file_of_measured_figures_names_a_device_and_one_is_the_fallback() -> None:
    known = {row.name for row in devices()}
    assert all(facts.device in known for facts in device_facts())
    assert [facts.fallback for facts in device_facts()] == [True] + [False] * (len(device_facts()) - 1)
    for facts in device_facts():
        assert all(calibration_file(name).is_file() for name in facts.operations)
        assert all(table.source for table in (facts.host, facts.step, facts.law, facts.memory))


def test_a_second_measured_device_is_a_file_and_others_take_the_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a100, t4 = trimtab.cluster("A100-40GB").devices[0], trimtab.cluster("T4").devices[0]
    assert facts_of(a100) is fallback_facts()
    memory = fallback_facts().memory.with_context(400 * MIB)
    second = msgspec.structs.replace(fallback_facts(), device="A100 40GB SXM4", fallback=False, memory=memory)
    monkeypatch.setattr("trimtab.catalog.facts.device_facts", lambda: (FACTS, second))
    assert facts_of(a100) is second
    assert facts_of(t4) is FACTS
    setting = Setting(micro_batch=1, global_batch=1)
    own, other = (estimate_trace(trace_of([]), setting, device)[0] for device in (a100, t4))
    assert (own.parts.context, other.parts.context) == (400 * MIB, 760 * MIB)
    assert not any("CUDA context" in words for words in own.assumptions)
    assert any("as on an H200 (760 MiB)" in words for words in other.assumptions)


def test_the_shipped_calibration_has_every_kind_and_dtype() -> None:
    (h200,) = shipped_calibrations()
    kinds = {work.kind for work in h200.works}
    assert {"matrix", "attention", "convolution", "recurrent", "pointwise", "reduction", "gather"} <= kinds
    assert {"bfloat16", "float16", "tf32", "float32"} <= {
        work.dtype for work in h200.works if work.kind == "matrix"
    }
    assert h200.host["forward_s"] > 1e-6


def test_a_calibration_is_found_again_and_a_broken_one_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_CALIBRATIONS", str(tmp_path))
    assert read_own_calibration(H200) is None
    own = Calibration(device="H200 SXM 141GB", works=(copy(2**20),), seconds=(1e-5,))
    file = write_own_calibration(own)
    assert read_own_calibration(H200) == own
    file.write_text("{", encoding="utf-8")
    assert read_own_calibration(H200) is None


def test_a_folder_that_cannot_be_written_is_an_error_with_a_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("TRIMTAB_CALIBRATIONS", str(tmp_path / "file"))
    with pytest.raises(EnvironmentFault, match="TRIMTAB_CALIBRATIONS"):
        write_own_calibration(Calibration(device="x"))


def test_calibrating_without_a_gpu_leaves_with_exit_code_5() -> None:
    done = trimtab_cli("calibrate", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 5
    assert "no GPU" in done.stderr


EXPERTS = """
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        self.head = nn.Linear(16, 24, bias=False)

    def forward(self, x, kept):
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            ROWS
        out[chosen == 0] = 0
        return self.head(out)


class Job:
    def model(self):
        return Experts()

    def batch(self, size):
        return torch.randn(size, 16), torch.randint(0, 4, (size,))

    def loss(self, model, batch):
        return model(*batch).square().mean()
"""
BY_POSITIONS = "rows = (chosen == number).nonzero().squeeze(-1); out.index_add_(0, rows, expert(x[rows]))"
BY_MASK = "out[chosen == number] = expert(x[chosen == number])"
BY_THE_BATCH = "out[kept == number] = expert(x[kept == number])"


@pytest.mark.parametrize(
    ("rows", "fresh", "waits"),
    [
        # Forward, the gradient of the weight, and none of the input, which is the batch.
        (BY_POSITIONS, 4 * 2, 4),
        # Twice forward and twice backward; what the first puts into is zeros, which take no gradient.
        (BY_MASK, 4 * 2, 4 * 4 - 1),
        # One batch, one shape.
        (BY_THE_BATCH, 0, 4 * 4 - 1),
    ],
)
def test_products_over_rows_that_the_model_chooses_are_fresh_and_no_others(
    tmp_path: Path, rows: str, fresh: int, waits: int
) -> None:
    file = tmp_path / "job.py"
    file.write_text(EXPERTS.replace("ROWS", rows), encoding="utf-8")
    # A quarter of 64 rows are 16, as many as the model is wide.
    setting = Setting(micro_batch=64, global_batch=64, precision=Precision.FP32)
    trace = trace_setting(TraceRequest(job=f"{file}:Job", setting=setting, device=H200), cache=False)
    works = [trace.works[number] for number in trace.sequence]
    assert sum(work.fresh for work in works) == fresh
    assert all(work.kind == "matrix" for work in works if work.fresh)
    assert sum(work.kind == "wait" for work in works) == waits


CHOOSES = """
import torch
from torch import nn


class Job:
    def model(self):
        return nn.Linear(16, 1)

    def batch(self, size):
        return torch.randn(size, 16)

    def loss(self, model, batch):
        for _ in range(5):
            batch = batch.sin()
        with torch.no_grad():
            weight = model.weight.cos()
        return (model(batch) * weight.mean()).mean()
"""


def test_a_trace_knows_which_operations_autograd_does_not_record(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(CHOOSES, encoding="utf-8")
    setting = Setting(micro_batch=8, global_batch=8, precision=Precision.FP32)
    trace = trace_setting(TraceRequest(job=f"{file}:Job", setting=setting, device=H200), cache=False)
    forward = [trace.works[number] for number in trace.sequence[: trace.phases["backward"]]]
    unrecorded = [work.op for work in forward if work.untracked]
    assert unrecorded.count("aten::sin") == 5
    assert {"aten::cos", "aten::mean"} <= set(unrecorded)
    assert not any(work.untracked for work in forward if work.kind == "matrix")
    assert sum(work.op == "aten::mean" and not work.untracked for work in forward) == 1
    assert not any(
        trace.works[number].untracked
        for number in trace.sequence[trace.phases["backward"] : trace.phases["optimizer"]]
    )


RECURRENT = """
import torch
from torch import nn


class Job:
    def model(self):
        return nn.GRU(16, 32, num_layers=2, bidirectional=True, batch_first=True)

    def batch(self, size):
        return torch.randn(size, 12, 16)

    def loss(self, model, batch):
        return model(batch)[0].float().square().mean()
"""


def test_autocast_hands_recurrent_layers_fp16_whatever_it_is_set_to(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(RECURRENT, encoding="utf-8")
    setting = Setting(micro_batch=8, global_batch=8, precision=Precision.BF16)
    trace = trace_setting(TraceRequest(job=f"{file}:Job", setting=setting, device=H200), cache=False)
    layers = [work for work in trace.works if work.kind == "recurrent"]
    assert [layer.op for layer in layers] == ["aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"]
    assert {layer.dtype for layer in layers} == {"float16"}
    # Two layers, both ways, twelve steps.
    assert {layer.kernels for layer in layers} == {2 * 2 * 12}


def test_the_python_of_dtensor_and_fsdp_counts_as_host_time() -> None:
    host = step_time.scale_host_costs({}, FACTS)
    pace = op_time.Pace(RATES)

    def seconds(*works: Work) -> float:
        return step_time.run_clocks(list(works), pace, host, backward=range(0)).host_s

    none = seconds()
    gathered = Work(op=SHARDED, kind="call", dtype="", kernels=0, dims=(12,))
    wrapped = Work(op=WRAPPED, kind="call", dtype="", kernels=0, dims=(100,))
    assert seconds(gathered) - none == pytest.approx(12 * FACTS.host.sharded_s)
    assert seconds(wrapped) - none == pytest.approx(FACTS.host.dtensor_op_s + 100 * FACTS.host.dtensor_s)


def _layer_norm_backward(rows: int, columns: int) -> Work:
    size = rows * columns * 4
    return Work(
        op="aten::native_layer_norm_backward",
        kind="reduction",
        dtype="float32",
        read_bytes=2 * size,
        write_bytes=size + 2 * columns * 4,
        dims=(0, columns),
    )


def test_a_layer_norm_of_more_rows_can_take_less_time_backward() -> None:
    """From 65,537 rows on, the sums of the weight's gradient are divided between thread blocks."""
    few, many = (op_time.roofline_s(_layer_norm_backward(rows, 384), RATES) for rows in (65_536, 65_537))
    assert few == pytest.approx(65_536 * FACTS.law.norm_column_step_s, rel=0.4)
    assert many < 0.6 * few


def test_generated_kernels_take_their_bytes_or_their_instructions() -> None:
    kernel = Work(op="fused_gelu", kind="pointwise", dtype="bfloat16", read_bytes=10**9, dims=(0, 64))
    slow = kernel.replace(instructions=10**12)
    pace = op_time.Pace(RATES, [op_time.Point("pointwise", "aten::gelu", "bfloat16", (0.0,) * 9, 3.0)])
    seconds = [pace.seconds(work) for work in (kernel, kernel.replace(dims=(PERMUTED, 64)), slow)]
    moving = 10**9 / RATES.bandwidth
    assert seconds[0] == pytest.approx(moving / FACTS.law.generated_streamed, rel=0.05)
    assert seconds[1] == pytest.approx(moving / FACTS.law.generated_tiled, rel=0.05)
    assert seconds[2] > 10 * seconds[0]


def test_attention_with_a_mask_is_far_from_attention_without() -> None:
    plain, masked, dropped = (
        op_time.work_coordinates(
            Work(op=op_time.CUDNN, kind="attention", dtype="bfloat16", dims=(8, 12, 512, 512, 64, 0, *traits))
        )
        for traits in ((), (1, 0), (0, 1))
    )
    assert math.dist(plain, masked) == math.dist(plain, dropped) == pytest.approx(3.0)


def search(rows: int, last: int, dtype: str = "bfloat16") -> Work:
    size = {"bfloat16": 2, "float32": 4}[dtype]
    return Work(
        op="aten::topk", kind="reduction", dtype=dtype, read_bytes=rows * last * size, write_bytes=rows * 640,
        dims=(0, last),
    )  # fmt: skip


def test_topk_over_long_rows_takes_a_pass_for_each_byte_of_a_number() -> None:
    found = find_speed(H200)
    assert found is not None
    half, single = (found.pace.seconds(search(16_384, 49_152, dtype)) for dtype in ("bfloat16", "float32"))
    # A profile of a sparse autoencoder on an H200.
    assert half == pytest.approx(5.9e-3, rel=0.05)
    assert single == pytest.approx(half * (4 + 2) / (2 + 2))
    # Few numbers: launches matter, which the menu knows.
    few = search(1, 30_000)
    assert found.pace.seconds(few) > 10 * few.read_bytes / RATES.bandwidth


def test_rows_of_a_triangular_system_wait_for_each_other() -> None:
    matrices, sides = (
        torch.empty(1024, 64, columns, device="meta", dtype=torch.float32) for columns in (64, 256)
    )
    matrices.fake_device = sides.fake_device = torch.device("cuda")  # type: ignore[attr-defined]
    solve = torch.ops.aten.linalg_solve_triangular.default
    work = describe_work(solve, "aten::linalg_solve_triangular", (matrices, sides), {}, sides)
    assert work is not None
    # With the copy of the right sides, in a profile of a linear attention on an H200.
    assert op_time.Pace(RATES).seconds(work) == pytest.approx(0.44e-3, rel=0.1)


GATHERED = """
import torch
from torch import nn
import trimtab

class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4096)

    def forward(self, source, places):
        made = self.layer(source)
        copied = torch.zeros_like(made).scatter_add(1, places, source[:, :1])
        return made.gather(1, places).mean() + copied.mean()

class Job(trimtab.Job):
    name = "chosen"
    def model(self): return Chosen()
    def batch(self, size):
        return {"source": torch.randn(size, 16), "places": torch.randint(0, 4096, (size, 1))}
    def loss(self, model, batch): return model(**batch)
"""


def test_the_gradient_of_gather_adds_in_place(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(GATHERED, encoding="utf-8")
    setting = Setting(micro_batch=512, global_batch=512)
    trace = trace_setting(TraceRequest(job=f"{file}:Job", setting=setting, device=H200), cache=False)
    adds = {work.op: work for work in trace.works if work.op.startswith("aten::scatter_add")}
    # The forward pass asked for a copy of what it adds into; the gradient of gather owns its zeros.
    assert set(adds) == {"aten::scatter_add", "aten::scatter_add_"}
    assert adds["aten::scatter_add"].write_bytes >= 512 * 4096 * 2
    assert adds["aten::scatter_add_"].write_bytes < 512 * 64


def test_an_estimate_says_how_long_a_step_takes_on_other_hosts() -> None:
    small = [matrix(64, 64, 64).replace(flops=place) for place in range(1000)]
    large = [matrix(8192, 8192, 8192)] * 20
    cluster = trimtab.cluster("H200")
    setting = Setting(micro_batch=1, global_batch=1)
    phases = {"forward": 0, "backward": 500, "optimizer": 1000}
    waiting, _ = estimate_trace(trace_of(small, phases=phases), setting, H200, cluster=cluster)
    busy, _ = estimate_trace(trace_of(large, phases={"forward": 0}), setting, H200, cluster=cluster)
    notes = [note for note in waiting.assumptions if "waits for the host" in note]
    assert len(notes) == 1
    assert "6 to 15 us for a bare operation; 11 us are assumed" in notes[0]
    assert not any("waits for the host" in note for note in busy.assumptions)
    # A calibration of this machine has measured its host.
    own = shipped_calibrations()[0].replace(device=H200.name)
    measured, _ = estimate_trace(
        trace_of(small, phases=phases), setting, H200, cluster=cluster, calibration=own
    )
    assert not any("waits for the host" in note for note in measured.assumptions)
    scale = (step_time.compare_host(own.host, FACTS) / FACTS.host.usual) ** FACTS.host.power
    assert measured.step_s == pytest.approx((waiting.step_s or 0.0) * scale, rel=0.02)


def test_errors_of_a_step_are_also_given_for_the_host_that_was_measured() -> None:
    host = {"forward_s": 0.75 * FACTS.host.bare_forward_s, "linear_s": 0.75 * FACTS.host.linear_s}
    line = {"step_s": 0.03, "allocated_bytes": 100, "host": host}
    predicted = {"step_s": 0.06, "allocated_bytes": 110, "step_s_by_host": [[0.5, 0.02], [1.5, 0.06]]}
    errors = list_errors(line, predicted)
    assert errors == pytest.approx({"step_s": 1.0, "allocated_bytes": 0.1, "step_s with its host": 0.0})
    # Predictions and results of other days have no host.
    assert set(list_errors({"step_s": 0.03}, predicted)) == {"step_s"}
    assert set(list_errors(line, {"step_s": 0.06})) == {"step_s"}
