"""fp8: which layers multiply in 8 bits, what they compute, what is predicted for them, and where they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from shared_jobs import shared_job
from trimtab.catalog.clusters import parse_cluster
from trimtab.catalog.devices import has_fp8
from trimtab.engine.float8 import Float8Linear, _list_names, convert_linear_layers, describe_conversion
from trimtab.engine.recompute import _saved_ops
from trimtab.engine.step import prepare_job, run_step
from trimtab.errors import WrongUse
from trimtab.predict.op_time import device_rates
from trimtab.spec import Device, Precision, Setting, Vendor
from trimtab.spec.precision import ProductsFormat

TENSOR, ROW = Precision.FP8_TENSORWISE, Precision.FP8_ROWWISE
BOTH = [TENSOR, ROW]
OUTPUTS, INPUTS = 4112, 1040
"""Sizes that both recipes convert."""
JOB = """\
import torch
from torch import nn


class Job:
    name, global_batch, samples, epochs, additive = "wide", 32, 64, 1, True

    def model(self):
        return nn.Sequential(nn.Linear(1040, 4112), nn.ReLU(), nn.Linear(4112, 8))

    def batch(self, count):
        return torch.randn(count, 1040), torch.randint(0, 8, (count,))

    def dataset(self):
        drawn = torch.Generator().manual_seed(0)
        rows = torch.randn(64, 1040, generator=drawn)
        return [(row, row[:8].argmax()) for row in rows]

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=1e-3)
"""


def convert(model: nn.Module, precision: Precision) -> None:
    convert_linear_layers(model, precision.dtypes, "cpu")


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


class Model(nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(5008, INPUTS)
        self.blocks = nn.ModuleList(nn.Linear(INPUTS, OUTPUTS) for _ in range(2))
        self.narrow = nn.Linear(OUTPUTS, 64)
        self.odd = nn.Linear(INPUTS, OUTPUTS + 1)
        self.frozen = nn.Linear(INPUTS, OUTPUTS).requires_grad_(requires_grad=False)
        self.attention = nn.MultiheadAttention(2064, 2)
        self.head = nn.Linear(INPUTS, 5008)


def test_large_trainable_layers_are_converted_and_the_others_named() -> None:
    model = Model()
    hooked: list[Any] = []
    model.blocks[0].register_forward_hook(lambda *_: hooked.append(1))
    before = dict(model.named_parameters())
    assert describe_conversion(model, Precision.BF16.dtypes) == ""
    note = describe_conversion(model, ROW.dtypes)
    assert convert_linear_layers(model, ROW.dtypes, "cpu") == 2
    assert [name for name, layer in model.named_modules() if isinstance(layer, Float8Linear)] == [
        "blocks.0",
        "blocks.1",
    ]
    # Weights and their names stay, and so do hooks.
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == {
        name: id(parameter) for name, parameter in before.items()
    }
    model.blocks[0](torch.ones(1, INPUTS))
    assert hooked == [1]
    assert note == (
        "fp8: 2 of 6 linear layers multiply in 8 bits; in 16 bits: too small to gain: narrow; "
        "a size is no multiple of 16: odd; frozen: frozen; the head of the model: head"
    )
    # The same after the layers were converted, for a training run.
    assert describe_conversion(model, ROW.dtypes) == note


def test_the_head_that_a_model_names_stays() -> None:
    model = Model()
    model.get_output_embeddings = lambda: model.blocks[1]  # type: ignore[assignment]
    assert "the head of the model: blocks.1" in describe_conversion(model, TENSOR.dtypes)


def test_a_model_without_large_layers_is_said_to_run_as_bf16() -> None:
    model = nn.Linear(64, 64)
    assert convert_linear_layers(model, TENSOR.dtypes, "cpu") == 0
    assert describe_conversion(model, TENSOR.dtypes) == (
        "fp8: no linear layer multiplies in 8 bits, so this is bf16 (too small to gain: the model itself)"
    )
    assert "so this is bf16" in describe_conversion(nn.ReLU(), TENSOR.dtypes)


def test_many_names_are_cut() -> None:
    names = [f"blocks.{block}.{part}" for block in range(4) for part in ("q", "k", "v", "o")]
    assert _list_names(names) == "blocks.*.q (4), blocks.*.k (4), blocks.*.v (4), and 1 more"


@pytest.mark.parametrize(
    ("precision", "outputs", "inputs", "gains"),
    [
        (TENSOR, 1024, 4096, False),
        (TENSOR, 1040, 4096, True),
        (TENSOR, 1024, 4112, True),
        (ROW, 2048, 8192, False),
        (ROW, 8192, 1024, False),
        (ROW, 4096, 2048, False),
        (ROW, 4096, 2064, True),
        (ROW, 4112, 2048, True),
    ],
)
def test_sizes_that_gain(precision: Precision, outputs: int, inputs: int, gains: bool) -> None:
    form = precision.dtypes.products_format
    assert form is not None
    assert form.gains(outputs, inputs) is gains


@pytest.mark.parametrize("wrong", [{"values": "bfloat16"}, {"too_small": ((-1, 0),)}], ids=str)
def test_a_format_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ProductsFormat"):
        ProductsFormat(**wrong)


@pytest.mark.parametrize("precision", BOTH)
def test_small_integers_are_multiplied_exactly(precision: Precision) -> None:
    # 7 is the largest value: scaled by a power of two (rows), or by 64 exactly (whole matrix).
    torch.manual_seed(0)
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-7, 8, layer.weight.shape))
        layer.weight[:, 0] = 7
        layer.weight[0] = 7
    given = torch.randint(-7, 8, (3, 5, INPUTS)).float()
    given[..., 0] = 7
    given[0, 0] = 7
    given.requires_grad_()
    above = torch.randint(-3, 4, (3, 5, OUTPUTS)).float()
    above[..., 0] = 3.5
    above[0, 0] = 3.5
    wanted = nn.functional.linear(given, layer.weight)
    exact = torch.autograd.grad(wanted, [given, layer.weight], above)
    convert(layer, precision)
    found = layer(given)
    assert torch.equal(found, wanted)
    for gradient, other in zip(torch.autograd.grad(found, [given, layer.weight], above), exact, strict=True):
        assert torch.equal(gradient, other)


@pytest.mark.parametrize("precision", BOTH)
@pytest.mark.parametrize("tokens", [32, 13])
def test_products_are_close_to_those_in_16_bits(precision: Precision, tokens: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(INPUTS, OUTPUTS)
    given = torch.randn(tokens, INPUTS, requires_grad=True)
    above = torch.randn(tokens, OUTPUTS)
    parts = [given, layer.weight, layer.bias]
    wanted = layer(given)
    exact = torch.autograd.grad(wanted, parts, above)
    convert(layer, precision)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(given)
    assert found.dtype is torch.bfloat16
    assert distance(found, wanted) < 0.05
    gradients = torch.autograd.grad(found, parts, above.bfloat16())
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 3
    errors = [distance(*pair) for pair in zip(gradients, exact, strict=True)]
    # e5m2 has two bits of fraction, e4m3 three.
    most = 0.1 if precision is TENSOR else 0.06
    assert min(errors[:2]) > 0.01
    assert max(errors) < most


def test_a_scale_per_row_saves_small_rows() -> None:
    torch.manual_seed(0)
    given = torch.randn(16, INPUTS)
    given[0] *= 1e6
    layer = nn.Linear(INPUTS, OUTPUTS, bias=False)
    wanted = layer(given)
    layers = {precision: nn.Linear(INPUTS, OUTPUTS, bias=False) for precision in BOTH}
    for precision, other in layers.items():
        other.weight = layer.weight
        convert(other, precision)
    errors = {precision: distance(other(given)[1:], wanted[1:]) for precision, other in layers.items()}
    assert errors[ROW] < 0.05
    assert errors[TENSOR] > 0.3


@pytest.mark.parametrize("precision", BOTH)
def test_zeros_no_rows_and_infinities(precision: Precision) -> None:
    layer = nn.Linear(INPUTS, OUTPUTS)
    convert(layer, precision)
    assert torch.equal(layer(torch.zeros(2, INPUTS)), layer.bias.expand(2, -1))
    assert layer(torch.zeros(0, INPUTS)).shape == (0, OUTPUTS)
    # A bad value must show in the loss, as in 16 bits.
    assert not layer(torch.full((2, INPUTS), torch.inf)).isfinite().any()


@pytest.mark.slow
# Warnings come from inside of the compiler.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", BOTH)
def test_compiled_layers_compute_what_uncompiled_ones_do(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The graphs of forward and backward with their decompositions; only the kernels are those of eager mode.
    monkeypatch.setattr(ProductsFormat, "gains", lambda *_: True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.SiLU(), nn.Linear(64, 16, bias=False))
    convert(model, precision)
    given = torch.randn(16, 32)
    found: list[list[torch.Tensor]] = []
    torch.compiler.reset()
    for call in (model, torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False)):
        out = call(given)
        found.append([out, *torch.autograd.grad(out.square().mean(), list(model.parameters()))])
    for expected, compiled in zip(*found, strict=True):
        assert distance(compiled, expected) < 0.01


def test_results_of_products_are_kept_by_selective_recomputation() -> None:
    assert "aten::_scaled_mm" in {op.name() for op in _saved_ops()}


@pytest.fixture
def job() -> str:
    return shared_job(JOB)


@pytest.mark.parametrize("precision", BOTH)
def test_losses_are_close_to_those_of_bf16(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProductsFormat, "gains", lambda *_: True)
    narrow = trimtab.load(shared_job(JOB.replace("1040", "64").replace("4112", "128")))
    losses = {}
    for chosen in (Precision.BF16, precision):
        torch.manual_seed(0)
        state = prepare_job(narrow, Setting(micro_batch=32, global_batch=32, precision=chosen), "cpu")
        torch.manual_seed(1)
        batch = narrow.batch(32)
        losses[chosen] = [float(run_step(state, [batch])) for _ in range(20)]
    assert losses[precision] == pytest.approx(losses[Precision.BF16], rel=0.03, abs=0.01)
    assert losses[precision] != losses[Precision.BF16]
    assert losses[precision][-1] < losses[precision][0] * 0.8


def test_an_estimate_multiplies_at_the_peak_of_fp8(job: str) -> None:
    found = {
        precision: trimtab.estimate(job, "H200", micro_batch=16384, precision=precision)
        for precision in ("bf16", "fp8-tensorwise")
    }
    wide, narrow = found["bf16"], found["fp8-tensorwise"]
    assert "fp8: 1 of 2 linear layers multiply in 8 bits; in 16 bits: a size is no multiple of 16: 2" in (
        narrow.assumptions
    )
    assert "fp8: MFU is a share of the peak in bfloat16" in narrow.assumptions
    assert not any("fp8" in note for note in wide.assumptions)
    assert narrow.parts.optimizer == wide.parts.optimizer
    assert wide.step_time is not None
    assert narrow.step_time is not None
    assert narrow.step_time.compute_s < 0.75 * wide.step_time.compute_s
    # In eager mode, scaling and casting move more bytes.
    assert narrow.step_time.memory_s > wide.step_time.memory_s


@pytest.mark.slow
@pytest.mark.parametrize("precision", BOTH)
def test_the_compiler_fuses_scaling_and_casts(job: str, precision: Precision) -> None:
    eager, compiled = (
        trimtab.estimate(job, "H200", micro_batch=16384, precision=precision.value, compile=on)
        for on in (False, True)
    )
    assert eager.step_time is not None
    assert compiled.step_time is not None
    assert compiled.step_time.memory_s < 0.8 * eager.step_time.memory_s
    assert compiled.step_time.compute_s == pytest.approx(eager.step_time.compute_s, rel=0.2)
    assert any("multiply in 8 bits" in note for note in compiled.assumptions)


def test_ranks_that_gather_weights_say_that_they_do_it_in_16_bits(job: str) -> None:
    made = trimtab.estimate(job, "2xH200", micro_batch=16, precision="fp8-rowwise", strategy="fsdp")
    assert any("ranks gather weights in 16 bits" in note for note in made.assumptions)


def test_rates_have_fp8() -> None:
    h200, a100 = (parse_cluster(name).devices[0] for name in ("H200", "A100-40GB"))
    rates = device_rates(h200)
    assert rates is not None
    assert rates.peak("float8_e4m3fn") == rates.peak("float8_e5m2") == h200.peaks.fp8
    older = device_rates(a100)
    assert older is not None
    assert older.peak("float8_e4m3fn") == a100.peaks.fp32


def test_older_devices_are_refused(job: str) -> None:
    with pytest.raises(WrongUse, match="A100 40GB SXM4 has no fp8") as refused:
        trimtab.estimate(job, "A100-40GB", precision="fp8-tensorwise")
    assert "compute capability 8.9" in str(refused.value)
    with pytest.raises(WrongUse, match="has no fp8"):
        trimtab.plan(job, "A100-40GB", pins=["precision=fp8-rowwise"])


def test_which_devices_have_fp8() -> None:
    names = {
        "RTX4090": True,
        "H100": True,
        "L4": True,
        "A100-40GB": False,
        "V100-32GB": False,
        "MI300X": False,
    }
    assert {name: has_fp8(parse_cluster(name).devices[0]) for name in names} == names
    # What is unknown may have it.
    assert has_fp8(Device(index=0, name="new", memory_bytes=2**34))
    assert not has_fp8(Device(index=0, name="new", memory_bytes=2**34, vendor=Vendor.AMD))
