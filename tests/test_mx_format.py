"""MXFP8: 8-bit floats with a scale for every 32 numbers, as a prediction for Blackwell GPUs."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import trimtab
from trimtab.catalog.clusters import parse_cluster
from trimtab.catalog.devices import explain_no_products, has_products
from trimtab.catalog.tables import devices
from trimtab.engine.float8 import Float8Linear, convert_linear_layers, describe_conversion
from trimtab.engine.mx_format import BlockProduct
from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.spec import Precision, Work
from trimtab.trace.op_cost import describe_work

if TYPE_CHECKING:
    from pathlib import Path

MX = Precision.MXFP8
BLOCK = 32
FORM = MX.dtypes.products_format


def convert(layer: nn.Linear) -> Any:
    assert convert_linear_layers(layer, MX.dtypes, "cpu") == 1
    assert isinstance(layer, Float8Linear)
    return layer


def test_a_block_has_the_scale_of_its_largest_number() -> None:
    matrix = torch.zeros(2, 64)
    matrix[0, 3], matrix[0, 40], matrix[1, 0] = 448.0, 1.0, -3.0
    numbers, scales = torch.ops.trimtab.cast_blocks(matrix, False, BLOCK, torch.float8_e4m3fn)
    assert (numbers.shape, scales.shape) == ((2, 64), (2, 2))
    assert numbers.element_size() == scales.element_size() == 1
    # 448 and 1 are 2**8 and 2**0 at least; 2**8 is the largest power of two of the format.
    assert (scales[:, 0] - 127.0).tolist()[0] == 0
    assert numbers[0, 3].float() == 448.0
    assert numbers[0, 40].float() * 2.0 ** (float(scales[0, 1]) - 127) == 1.0
    assert numbers[1, 0].float() * 2.0 ** (float(scales[1, 0]) - 127) == -3.0


def test_a_transposed_cast_has_blocks_along_the_other_side_and_fills_the_last() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(40, 64)
    numbers, scales = torch.ops.trimtab.cast_blocks(matrix, True, BLOCK, torch.float8_e4m3fn)
    assert (numbers.shape, scales.shape) == ((64, 64), (64, 2))
    straight = torch.ops.trimtab.cast_blocks(
        nn.functional.pad(matrix.t(), (0, 24)), False, BLOCK, torch.float8_e4m3fn
    )
    assert torch.equal(numbers.view(torch.uint8), straight[0].view(torch.uint8))
    assert torch.equal(scales, straight[1])


@pytest.mark.parametrize("rows", [1, 33, 64])
def test_results_and_gradients_are_near_those_of_16_bits(rows: int) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(96, 64)
    layer = convert(nn.Linear(96, 64))
    layer.load_state_dict(plain.state_dict())
    given = torch.randn(rows, 96)
    for other in (plain, layer):
        batch = given.clone().requires_grad_()
        other(batch).square().sum().backward()
        other.given = batch.grad
    assert isinstance(plain.given, torch.Tensor)
    assert plain.weight.grad is not None
    for wide, narrow in ((plain.weight.grad, layer.weight.grad), (plain.given, layer.given)):
        assert (narrow - wide).norm() / wide.norm() < 0.08


def test_sizes_have_to_be_multiples_of_a_block() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(64, 64))
    said = describe_conversion(model, MX.dtypes)
    assert said == "fp8: 1 of 2 linear layers multiply in 8 bits; in 16 bits: a size is no multiple of 32: 0"


class RecordWorks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the work of every operation of ours."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name().startswith("trimtab::"):
            work = describe_work(func, func.name(), args, kwargs or {}, out)
            assert work is not None
            self.works.append(work)
        return out


def record_layer(rows: int, inputs: int, outputs: int) -> list[Work]:
    """Return the casts and products of a layer on a GPU without values, forward and backward."""
    recorder = RecordWorks()
    # Autograd itself would need a GPU.
    saved = SimpleNamespace(needs_input_grad=(True, True))
    saved.save_for_backward = lambda *tensors: setattr(saved, "saved_tensors", tensors)
    with FakeTensorMode(), recorder:
        given, weight = (
            torch.empty(size, inputs, dtype=torch.bfloat16, device="cuda") for size in (rows, outputs)
        )
        out = BlockProduct.forward(saved, given, weight, BLOCK, torch.float8_e4m3fn)
        for_input, for_weight, *_ = BlockProduct.backward(saved, out)
        assert for_input is not None
        assert for_weight is not None
        assert (for_input.shape, for_weight.shape) == (given.shape, weight.shape)
    return recorder.works


def test_a_layer_casts_each_matrix_twice_and_multiplies_at_the_peak_of_fp8() -> None:
    rows, inputs, outputs = 128, 64, 256
    works = record_layer(rows, inputs, outputs)
    products = [work for work in works if work.kind == "matrix"]
    assert [work.flops for work in products] == [2 * rows * inputs * outputs] * 3
    assert {work.dtype for work in products} == {"float8_e4m3fn"}
    casts = sorted((work.read_bytes, work.write_bytes) for work in works if work.kind == "pointwise")
    sizes = sorted(2 * [rows * inputs, outputs * inputs, rows * outputs])
    # 16 bits are read; 8 bits, and 8 bits for every 32 numbers, are written.
    assert casts == [(2 * size, size + size // BLOCK) for size in sizes]


def test_only_blackwell_has_it_and_others_say_which_do() -> None:
    names = {"B200": True, "RTX5090": True, "H200": False, "RTX4090": False, "MI300X": False}
    assert {name: has_products(parse_cluster(name).devices[0], FORM) for name in names} == names
    said = explain_no_products(parse_cluster("H200").devices[0], FORM)
    blackwell = [row.typed[0] for row in devices() if row.compute_capability.startswith(("10.", "12."))]
    assert len(blackwell) > 5
    assert all(name in said for name in ("H200", *blackwell))
    assert "NVIDIA" in explain_no_products(parse_cluster("MI300X").devices[0], FORM)


class Wide(trimtab.Job):
    name, global_batch, samples = "wide", 4, 8

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def batch(self, size: int) -> torch.Tensor:
        return torch.randn(size, 64)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss


def test_estimates_on_other_gpus_are_refused() -> None:
    with pytest.raises(WrongUse, match=r"no mxfp8: it needs Blackwell \(B200"):
        trimtab.estimate(Wide(), "H200", micro_batch=4, precision="mxfp8")


@pytest.mark.slow
def test_the_estimate_is_faster_and_says_that_it_was_not_measured(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    lines = ("from typing import Any", "import torch", "from torch import nn", "import trimtab")
    text = "\n".join((*lines, inspect.getsource(Wide)))
    file.write_text(text.replace("(64, 64)", "(8192, 8192)").replace("size, 64", "4096 * size, 8192"))
    found = {
        name: trimtab.estimate(f"{file}:Wide", "B200", micro_batch=4, precision=name)
        for name in ("bf16", "fp8-rowwise", "mxfp8")
    }
    rowwise, mx = (found[name].step_s or 0.0 for name in ("fp8-rowwise", "mxfp8"))
    assert 0 < mx < rowwise
    assert found["mxfp8"].allocated_bytes == pytest.approx(found["fp8-rowwise"].allocated_bytes, rel=0.1)
    assert any("mxfp8 was measured on no GPU" in text for text in found["mxfp8"].assumptions)


def test_training_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(64, 64)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(EnvironmentFault, match=r"compute capability 10\.0"):
        convert_linear_layers(model, MX.dtypes, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(EnvironmentFault, match="predicts mxfp8, and has no kernels"):
        convert_linear_layers(model, MX.dtypes, "cuda")
