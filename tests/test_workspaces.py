"""Memory that kernels take for themselves, beside what an H200 really allocated (bench/op_memory.py)."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from trimtab.catalog.clusters import parse_cluster
from trimtab.spec import Precision, Setting
from trimtab.trace import (
    convolution,
    data_dependent,
    fake_ops,
    recurrent,
    worker,
    workspace_formulas,
    workspaces,
)
from trimtab.trace.kernels import Kernels
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import trace_setting
from trimtab.trace.workspaces import LAST_RESULT, RESULT

if TYPE_CHECKING:
    from pathlib import Path

AT = "meta"


def takes(name: str, args: tuple[Any, ...], out: Any = None) -> list[workspaces.MemoryRequest]:
    return workspaces.RULES[name](args, out)


def sizes(found: list[workspaces.MemoryRequest]) -> list[int]:
    return [take.size for take in found if take.size]


# ------------------------------------------------------------------------------------------ reductions


@pytest.mark.parametrize(
    ("rows", "columns", "seen"),
    [
        (131_072, 64, 16_777_216),
        (131_072, 256, 138_412_032),
        (131_072, 150, 13_516_800),
        (3136, 512, 12_845_056),
        (40_000, 40, 803_840),
        (32_768, 64, 4_194_304),
        (131_072, 32, 2_097_152),
        (512, 32, 0),
    ],
)
def test_partial_sums_over_rows_are_those_of_torch(rows: int, columns: int, seen: int) -> None:
    assert workspace_formulas.column_sum_bytes(rows, columns) == seen


def backward(gradient: torch.Tensor, source: torch.Tensor, weight: torch.Tensor, **how: Any) -> Any:
    count = weight.dim() - 2
    return (
        gradient, source, weight, [weight.shape[0]], how.get("stride", [1] * count), [0] * count, [1] * count,
        how.get("transposed", False), [0] * count, 1, how.get("wanted", [True, True, True]),
    )  # fmt: skip


def test_the_gradient_of_a_bias_is_summed_up_in_a_buffer_where_channels_are_last() -> None:
    source = torch.empty(8, 64, 128, 128, dtype=torch.bfloat16, device=AT)
    source = source.to(memory_format=torch.channels_last)
    weight = torch.empty(256, 64, 1, 1, dtype=torch.bfloat16, device=AT)
    gradient = torch.empty(8, 256, 128, 128, dtype=torch.bfloat16, device=AT)
    last = takes(
        "aten::convolution_backward",
        backward(gradient.to(memory_format=torch.channels_last), source, weight),
    )
    assert last[-2] == RESULT
    assert last[-1].size == 138_412_032
    first = takes("aten::convolution_backward", backward(gradient, source.contiguous(), weight))
    assert first[-1] == RESULT
    without = takes(
        "aten::convolution_backward", backward(gradient, source, weight, wanted=[True, True, False])
    )
    assert without.count(RESULT) == 2


def test_a_mean_over_rows_has_the_buffer_of_a_sum() -> None:
    source = torch.empty(40_000, 40, device=AT)
    for name in ("aten::sum", "aten::mean"):
        assert sizes(takes(name, (source, [0]))) == [803_840]
        assert sizes(takes(name, (source, [1]))) == []
        assert sizes(takes(name, (source,))) == []


# ------------------------------------------------------------------------------------------ dense copies


def test_a_softmax_copies_what_is_not_dense() -> None:
    dense = torch.empty(8, 150, 16, 16, device=AT)
    last = dense.to(memory_format=torch.channels_last)
    whole = dense.numel() * 4
    for name in ("aten::_softmax", "aten::_log_softmax"):
        assert sizes(takes(name, (dense, 1, False))) == []
        assert sizes(takes(name, (last, 1, False))) == [whole]
    assert sizes(takes("aten::_log_softmax_backward_data", (last, dense, 1, dense.dtype))) == [whole]
    assert sizes(takes("aten::_softmax_backward_data", (dense, dense, 1, dense.dtype))) == [whole]
    assert sizes(takes("aten::_softmax_backward_data", (last, dense, 1, dense.dtype))) == [whole, whole]


def test_the_gradient_of_an_enlarged_image_is_copied_where_it_is_a_slice() -> None:
    whole = torch.empty(8, 1024, 128, 128, device=AT)
    part = whole[:, :256]
    name, small = "aten::upsample_bilinear2d_backward", [8, 256, 64, 64]
    args = ([128, 128], small, False, None)
    assert sizes(takes(name, (part, *args))) == [134_217_728]
    assert sizes(takes(name, (part.contiguous(), *args))) == []
    assert sizes(takes(name, (part.to(memory_format=torch.channels_last), *args))) == []
    assert sizes(takes(name, (part, [128, 128], [8, 256, 128, 128], False, None))) == []


def test_sampling_an_image_with_cudnn_has_a_value_for_each_place() -> None:
    image, grid = torch.empty(2, 3, 8, 9), torch.empty(2, 5, 7, 2)
    sampled = fake_ops.RESULTS["aten::cudnn_grid_sampler"]((image, grid))
    # The same shapes as the kernels that other devices run.
    assert sampled.shape == torch.nn.functional.grid_sample(image, grid, align_corners=True).shape
    gradients = fake_ops.RESULTS["aten::cudnn_grid_sampler_backward"]((image, grid, sampled))
    assert [gradient.shape for gradient in gradients] == [image.shape, grid.shape]


def test_a_ctc_loss_has_a_dense_gradient_and_its_sums_twice() -> None:
    log_probs = torch.empty(32, 399, 1024, device=AT).transpose(0, 1)
    sums = torch.empty(32, 399, 121, device=AT)
    args = (None, log_probs, None, None, None, None, sums, 0, True)
    out = fake_ops.RESULTS["aten::_ctc_loss_backward"](args)
    assert out.is_contiguous()
    found = takes("aten::_ctc_loss_backward", args, out)
    assert sizes(found) == [6_179_712, 52_297_728, 3_089_856]
    assert found[-1] == RESULT


def test_dropout_allocates_its_mask_first() -> None:
    assert takes("aten::native_dropout", ()) == [LAST_RESULT, RESULT]


def test_a_linear_layer_of_scattered_inputs_adds_its_bias_in_place() -> None:
    made: dict[str, Any] = {}

    def keep(name: str, run: Any, key: str) -> None:
        made[name] = run
        assert key == "AutogradCUDA"

    library: Any = SimpleNamespace(impl=keep)
    fake_ops.add_bias_in_place(library)
    line, source = torch.nn.Linear(4, 6), torch.randn(3, 5, 4)
    for given in (source, source.transpose(0, 1), source[0]):
        assert torch.allclose(made["linear"](given, line.weight, line.bias), line(given))
    out = made["linear"](source.transpose(0, 1), line.weight, line.bias)
    assert out.grad_fn.name() == "AddBackward0"
    assert out._version == 1  # noqa: SLF001
    assert made["linear"](source, line.weight, line.bias)._version == 0  # noqa: SLF001


# ------------------------------------------------------------------------------------------ recurrent layers

LSTM, GRU = recurrent.LSTM, recurrent.GRU


@pytest.mark.parametrize(
    ("mode", "batch", "steps", "rows", "width", "hidden", "layers", "both", "dropout", "taken", "saved"),
    [
        (LSTM, 64, 80, 2742, 300, 512, 2, True, 0.3, 88_580_352, 63_082_752),
        (LSTM, 64, 80, 2657, 300, 512, 3, True, 0.3, 117_944_576, 95_127_808),
        (LSTM, 64, 80, 2643, 300, 512, 2, False, 0.3, 38_616_320, 30_098_688),
        (LSTM, 64, 80, 2910, 300, 512, 1, True, 0.3, 60_236_032, 29_798_656),
        (LSTM, 64, 80, 2550, 300, 64, 2, True, 0.3, 41_713_472, 7_344_896),
        (GRU, 64, 80, 2619, 300, 512, 2, True, 0.3, 76_110_080, 71_039_232),
    ],
)
def test_packed_layers_take_what_cudnn_took(  # noqa: PLR0917 - a row of facts
    mode: int, batch: int, steps: int, rows: int, width: int, hidden: int, layers: int, both: bool,
    dropout: float, taken: int, saved: int,
) -> None:  # fmt: skip
    source = torch.empty(rows, width, dtype=torch.float16, device=AT)
    packed = [batch] + [1] * (steps - 1)
    found = recurrent.workspace_bytes(
        source, mode, hidden, layers, first=False, dropout=dropout, both=both, packed=packed
    )
    assert found == taken
    out = recurrent.make_layer_result(
        (source, [], 4, None, None, None, mode, hidden, 0, layers, False, dropout, True, both, packed, None)
    )
    assert out[3].numel() == saved


@pytest.mark.parametrize(
    ("batch", "steps", "width", "hidden", "both", "taken"),
    [
        (64, 80, 300, 512, False, 60_138_240),
        (64, 80, 300, 512, True, 132_408_064),
        (64, 80, 300, 128, False, 49_648_384),
        (64, 80, 300, 64, False, 36_928_256),
    ],
)
def test_padded_layers_take_what_cudnn_took(  # noqa: PLR0917
    batch: int, steps: int, width: int, hidden: int, both: bool, taken: int
) -> None:
    source = torch.empty(steps, batch, width, dtype=torch.float16, device=AT)
    found = recurrent.workspace_bytes(source, LSTM, hidden, 2, first=False, dropout=0.3, both=both, packed=())
    assert abs(found / taken - 1) < 0.01


def test_gradients_of_recurrent_weights_lie_in_one_buffer() -> None:
    source = torch.empty(80, 64, 300, dtype=torch.float16, device=AT)
    weights = [torch.empty(2048, 300, device=AT), torch.empty(2048, 512, device=AT)]
    hidden = torch.empty(1, 64, 512, dtype=torch.float16, device=AT)
    *_, gradients = recurrent.make_layer_gradients((source, weights, 4, None, hidden, hidden))
    assert [gradient.shape for gradient in gradients] == [weight.shape for weight in weights]
    assert {gradient.dtype for gradient in gradients} == {torch.float16}
    assert gradients[0]._base is gradients[1]._base is not None  # noqa: SLF001


def test_dropout_between_recurrent_layers_keeps_random_states_once() -> None:
    kernels = Kernels.__new__(Kernels)
    kernels.target, kernels._dropout_state = parse_cluster("1xH200").devices[0], False  # noqa: SLF001
    kernels._cublas_threads = set()  # noqa: SLF001
    args = (*[None] * 11, 0.3, True)
    assert kernels.persistent_bytes("aten::_cudnn_rnn", args) == 6_488_064
    assert kernels.persistent_bytes("aten::_cudnn_rnn", args) == 0
    kernels._dropout_state = False  # noqa: SLF001
    assert kernels.persistent_bytes("aten::_cudnn_rnn", (*[None] * 11, 0.0, True)) == 0


def test_random_lengths_are_the_same_in_every_process() -> None:
    state = torch.get_rng_state(), random.getstate()
    try:
        worker.seed_random_numbers()
        first = torch.randint(80, (64,)).tolist(), random.random()  # noqa: S311
        worker.seed_random_numbers()
        assert (torch.randint(80, (64,)).tolist(), random.random()) == first  # noqa: S311
    finally:
        torch.set_rng_state(state[0])
        random.setstate(state[1])


def test_layers_that_are_skipped_at_random_are_taken_to_run() -> None:
    told: list[str] = []
    found = data_dependent.ValueTracker(told.append)
    for size in ((), (1,)):
        drawn = torch.empty(size, device=AT)
        found.compute_real(torch.ops.aten.rand.default, "aten::rand", (list(size),), {}, drawn)
        assert getattr(drawn, data_dependent.REAL_ATTRIBUTE).item() > 0.99
    several = torch.empty(1000, device=AT)
    found.compute_real(torch.ops.aten.rand.default, "aten::rand", ([1000],), {}, several)
    assert getattr(several, data_dependent.REAL_ATTRIBUTE).min() < 0.1
    assert set(told) == {"layers that are skipped at random are taken to run"}


# ------------------------------------------------------------------------------------------ sparse tensors


def matrix(rows: int, entries: int, *, in_order: bool) -> torch.Tensor:
    return fake_ops.make_sparse(
        torch.empty(2, entries, dtype=torch.int64, device=AT),
        torch.empty(entries, device=AT),
        (rows, rows),
        in_order=in_order,
    )


def test_a_sparse_product_sorts_and_copies_its_result() -> None:
    loose, tight = (matrix(40_000, 600_000, in_order=order) for order in (False, True))
    out = torch.empty(40_000, 512, device=AT)
    whole = 81_920_000
    sorting, pieces = fake_ops.sparse_product_bytes("aten::_sparse_addmm", (out, loose, out), out)
    assert sorting == 40 * 600_000
    assert pieces == [2_400_000, 9_600_000, 160_004, 2_400_000, whole]
    # A plain product has zeros to add to, and a sorted matrix needs no sorting.
    assert fake_ops.sparse_product_bytes("aten::mm", (tight, out), out) == (
        0,
        [whole, 160_004, 2_400_000, whole],
    )


def test_a_transposed_sparse_matrix_is_a_copy_out_of_order() -> None:
    given = matrix(100, 500, in_order=True)
    for name, args in (("aten::t", (given,)), ("aten::transpose", (given, 0, 1))):
        found = fake_ops.make_sparse_result(name, args, pytest.fail)
        assert fake_ops.count_nonzeros(found) == 500
        assert not found.is_coalesced()
        assert [part.numel() for part in fake_ops.list_storage_tensors(found)] == [1000, 500]
    dense = torch.empty(3, 4, device=AT)
    assert fake_ops.make_sparse_result("aten::t", (dense,), pytest.fail) is None
    assert fake_ops.list_storage_tensors(dense) == (dense,)


# ------------------------------------------------------------------------------------------ volumes


def volume(*channels: int, side: int, kernel: int, arithmetic: str = "bf16") -> convolution.ConvolutionShape:
    return convolution.ConvolutionShape(
        samples=2, in_channels=channels[0], out_channels=channels[1],
        image=(side,) * 3, out_image=(side,) * 3,
        kernel=(kernel,) * 3, stride=1, groups=1, weight_in_channels=channels[0], is_channels_last=False,
        element_bytes=4 if arithmetic == "fp32" else 2, arithmetic=arithmetic,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "phase", "seen"),
    [
        (volume(32, 4, side=96, kernel=1), "weight", 142_164_955),
        (volume(32, 32, side=32, kernel=1), "weight", 2 * 32 * 32 * 4),
        (volume(64, 32, side=96, kernel=3), "weight", 341_619_187),
        (volume(64, 128, side=24, kernel=3), "weight", 14_598_643),
        (volume(256, 128, side=24, kernel=3), "weight", 23_003_152),
        (volume(64, 32, side=96, kernel=3), "forward", 339_849_232),
        (volume(64, 64, side=48, kernel=3, arithmetic="fp32"), "weight", 113_688_592),
        (volume(4, 64, side=96, kernel=3, arithmetic="fp32"), "weight", 0),
    ],
)
def test_convolutions_over_volumes_take_what_cudnn_took(
    shape: convolution.ConvolutionShape, phase: str, seen: int
) -> None:
    assert abs(convolution.workspace_bytes(shape, phase) - seen) <= 0.01 * seen


def test_the_gradient_of_a_transposed_convolution_is_copied_once() -> None:
    whole = torch.empty(2, 64, 16, 16, 16, dtype=torch.bfloat16, device=AT)
    gradient = whole[:, :32]
    source = torch.empty(2, 64, 8, 8, 8, dtype=torch.bfloat16, device=AT)
    weight = torch.empty(64, 32, 2, 2, 2, dtype=torch.bfloat16, device=AT)
    copied = gradient.numel() * 2
    args = backward(gradient, source, weight, stride=[2, 2, 2], transposed=True, wanted=[True, True, False])
    found = takes("aten::convolution_backward", args)
    assert found[1] == workspaces.request_for_op(copied)
    assert [take.cause.beside for take in found if take.cause] == [0, 0]


def test_volumes_with_channels_last_are_seen_as_such() -> None:
    source = torch.empty(2, 8, 4, 4, 4, device=AT)
    weight = torch.empty(8, 8, 3, 3, 3, device=AT)
    assert not convolution.is_channels_last(source, weight)
    assert convolution.is_channels_last(source.to(memory_format=torch.channels_last_3d), weight)


def test_a_matrix_product_over_pixels_pads_nothing() -> None:
    shape = convolution.ConvolutionShape(
        samples=8, in_channels=256, out_channels=150, image=(128, 128), out_image=(128, 128),
        kernel=(1, 1), stride=1,
        groups=1, weight_in_channels=256, is_channels_last=True, element_bytes=2, arithmetic="bf16",
    )  # fmt: skip
    assert convolution.workspace_bytes(shape, "forward") == convolution.workspace_bytes(shape, "source") == 0
    assert convolution.workspace_bytes(shape, "weight") < 5 * 2**20


# ------------------------------------------------------------------------------------------ sorting


@pytest.mark.parametrize(
    ("rows", "length", "seen"),
    [
        (2048, 1024, [1_048_576, 2_097_152]),
        (512, 16_384, [524_288, 524_288]),
        (32, 131_072, [409_600, 32_768]),
        (8, 50_000, [200_704, 8192]),
        (64, 4096, []),
        (30_000, 64, []),
    ],
)
def test_top_k_in_several_blocks_counts_digits(rows: int, length: int, seen: list[int]) -> None:
    source, out = torch.empty(rows, length, device=AT), torch.empty(rows, 32, device=AT)
    assert sizes(takes("aten::topk", (source, 32, -1), (out, out))) == seen


@pytest.mark.parametrize(
    ("rows", "length", "seen"),
    [
        (1, 4_000_000, [32_000_000, 48_771_583]),
        (512, 16_384, [67_108_864, 100_663_551]),
        (8, 50_000, [3_200_000, 3_200_000, 1_600_000 + 4_885_503]),
        (2048, 1024, []),
    ],
)
def test_long_rows_are_sorted_into_a_second_copy(rows: int, length: int, seen: list[int]) -> None:
    source = torch.empty(rows, length, device=AT)
    found = sizes(takes("aten::sort", (source, -1), (source, source)))
    assert found == pytest.approx(seen, rel=0.02)


def test_few_indices_of_an_embedding_need_no_sorting() -> None:
    gradient = torch.empty(5120, 300, device=AT)
    ids = torch.empty(5120, dtype=torch.int64, device=AT)
    assert sizes(takes("aten::embedding_dense_backward", (gradient, ids))) == [6_758_400]
    # It requests no bytes, so that operations of both sizes have the same program.
    assert sizes(takes("aten::embedding_dense_backward", (gradient[:2048], ids[:2048]))) == []


RECURRENT_JOB = """
import torch
from torch import nn

class Reader:
    global_batch = 2
    def model(self):
        return nn.ModuleDict({"inward": nn.Linear(8, 16), "read": nn.LSTM(16, 16, 2, batch_first=True)})
    def batch(self, size):
        return torch.randn(size, 4, 8)
    def loss(self, model, batch):
        return model["read"](model["inward"](batch))[0].float().square().mean()
"""


def test_autocast_gives_recurrent_layers_fp16_from_any_input(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(RECURRENT_JOB, encoding="utf-8")
    setting = Setting(micro_batch=2, global_batch=2, precision=Precision.BF16)
    device = parse_cluster("H200").devices[0]
    trace = trace_setting(TraceRequest(job=f"{tmp_path / 'job.py'}:Reader", setting=setting, device=device))
    dtypes = {work.op: work.dtype for work in trace.works}
    assert dtypes["aten::addmm"] == "bfloat16"
    # The linear layer's result is in bf16.
    assert dtypes["aten::_cudnn_rnn"] == dtypes["aten::_cudnn_rnn_backward"] == "float16"
