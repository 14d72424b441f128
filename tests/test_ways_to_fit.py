"""Frozen layers in few bits, other optimizers, losses in pieces, and steps of the recomputation dial."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import trimtab
from trimtab.engine import low_bit
from trimtab.engine.bf16_adamw import Bf16AdamW
from trimtab.engine.chunked_loss import apply_loss_form, count_pieces, sum_fused
from trimtab.engine.low_bit_optimizer import LowBitOptimizer, find_states, imitate_optimizer
from trimtab.engine.optimizer import make_optimizers
from trimtab.engine.quantize import QuantizedLinear, count_weights, quantize_frozen
from trimtab.engine.recompute import enable_recompute
from trimtab.engine.step import prepare_job, run_step
from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.jobs.lora import LoRALayer, add_adapters
from trimtab.predict.calibration import find_speed
from trimtab.spec import (
    BaseFormat,
    LossForm,
    OptimizerImplementation,
    OptimizerRule,
    Recompute,
    Setting,
    Work,
)
from trimtab.trace.op_cost import describe_work

QUANTIZED = [base for base in BaseFormat if base.storage.is_quantized]
WIDTH, WORDS, TOKENS = 64, 96, 16


def tiny_llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "vocab_size": WORDS, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | changes)))  # type: ignore[no-untyped-call]


class Adapters(trimtab.Job):
    """LoRA on a frozen Llama."""

    name = "adapters"
    global_batch = 4

    def model(self) -> Any:
        model = tiny_llama()
        add_adapters(model, 4, alpha=8, exclude=[model.lm_head])
        return model

    def batch(self, size: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        ids = torch.randint(0, WORDS, (size, TOKENS))
        return {"input_ids": ids, "labels": ids}

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        return model(**batch).loss


class Whole(Adapters):
    """The same Llama, all of it trained."""

    name = "whole"

    def model(self) -> Any:
        return tiny_llama()


def train(job: Any, steps: int = 3, **changes: Any) -> list[float]:
    setting = Setting(micro_batch=4, global_batch=4, optimizer=OptimizerImplementation.PLAIN, **changes)
    state = prepare_job(job, setting, "cpu")
    return [float(run_step(state, [job.batch(4)])) for _ in range(steps)]


# Storage.


@pytest.mark.parametrize(
    ("base", "bits"),
    [
        ("nf4", 4.5),
        ("nf4-double", 4.126953125),
        ("fp4", 4.5),
        ("fp4-double", 4.126953125),
        ("int8", 8.0078125),
        ("nf4-ao", 4.126953125),
        ("int8-ao", 8.0078125),
    ],
)
def test_a_stored_layer_has_the_bytes_of_its_format(base: str, bits: float) -> None:
    layer = nn.Linear(4096, 1024, bias=False).requires_grad_(False)
    stored = QuantizedLinear(layer, BaseFormat(base).storage, "cpu")
    found = sum(tensor.numel() * tensor.element_size() for tensor in stored.parameters())
    # The mean of the scales is a number of its own; torchao stores the values of nf4 with every layer.
    mean = {"nf4-double": 4, "fp4-double": 4, "nf4-ao": 4 + 16 * 4}.get(base, 0)
    assert found == BaseFormat(base).storage.count_bytes(1024, 4096) + mean
    assert (found - mean) * 8 / (4096 * 1024) == pytest.approx(bits)
    assert count_weights(dict(stored.named_parameters())["weight"]) == 4096 * 1024


@pytest.mark.parametrize(
    ("base", "error"),
    [("nf4", 0.1), ("nf4-double", 0.1), ("fp4", 0.15), ("int8", 0.01), ("nf4-ao", 0.1), ("int8-ao", 0.01)],
)
def test_restored_weights_are_near_the_weights(base: str, error: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 128, bias=False).requires_grad_(False)
    torch.nn.init.normal_(layer.weight, std=0.02)
    stored = QuantizedLinear(layer, BaseFormat(base).storage, "cpu")
    restored = stored.restore(torch.float32)
    assert restored.shape == layer.weight.shape
    relative = (restored - layer.weight).norm() / layer.weight.norm()
    assert 0 < relative < error


def test_the_formats_of_torchao_take_zeros_and_every_size() -> None:
    for base in (BaseFormat.NF4_AO, BaseFormat.INT8_AO):
        layer = nn.Linear(24, 10, bias=False).requires_grad_(False)
        layer.weight[3:] = 0
        restored = QuantizedLinear(layer, base.storage, "cpu").restore(torch.float32)
        assert restored.isfinite().all()
        assert (restored - layer.weight).abs().max() < 0.03


def test_restoring_nf4_as_torchao_does_takes_14_bytes_a_weight() -> None:
    sizes: list[int] = []

    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            shares = isinstance(out, torch.Tensor) and any(
                isinstance(given, torch.Tensor)
                and given.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
                for given in args
            )
            sizes.append(0 if shares else out.numel() * out.element_size())
            return out

    stored = QuantizedLinear(
        nn.Linear(512, 256, bias=False).requires_grad_(False).bfloat16(), BaseFormat.NF4_AO.storage, "cpu"
    )
    with Count():  # type: ignore[no-untyped-call]
        stored.restore(torch.bfloat16)
    # Besides: two results of shifts and two repeated scales, which go at once, and the scales themselves.
    temporary = 2 * 0.5 + 2 * 1
    assert sum(sizes) / (512 * 256) == pytest.approx(14 + temporary, abs=0.3)


def test_values_of_the_codebook_are_restored_exactly() -> None:
    for codebook, values in low_bit.CODEBOOKS.items():
        weight = torch.tensor(values).repeat(8).view(2, 64)
        packed, scales = torch.ops.trimtab.quantize_4bit(weight, 64, codebook)
        back = torch.ops.trimtab.dequantize_4bit(packed, scales, 64, codebook, [2, 64], torch.float32)
        torch.testing.assert_close(back, weight)


def test_the_first_weight_of_a_byte_is_in_its_high_bits() -> None:
    weight = torch.zeros(64)
    weight[0], weight[1] = 1.0, -1.0
    packed, _ = torch.ops.trimtab.quantize_4bit(weight, 64, "nf4")
    assert int(packed[0]) == 15 << 4 | 0


def test_scales_in_eight_bits_have_256_different_values() -> None:
    codes = low_bit.dynamic_codes()
    assert len(set(codes.tolist())) == 256
    assert codes.min() == pytest.approx(-0.9929687)
    assert codes.max() == 1.0
    assert 0.0 in codes


def test_large_activations_are_multiplied_outside_of_eight_bits() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32).requires_grad_(False)
    stored = QuantizedLinear(layer, BaseFormat.INT8.storage, "cpu")
    given = torch.randn(8, 64)
    given[:, 5] = 60.0
    exact = given @ stored.restore(torch.float32).t() + layer.bias
    assert (stored(given) - exact).norm() / exact.norm() < 0.01
    # With the large column in eight bits, the other values of a row would nearly vanish.
    numbers, _, columns = torch.ops.trimtab.quantize_rows(given.half(), 6.0)
    assert columns.tolist() == [5]
    assert not numbers[:, 5].any()


@pytest.mark.parametrize("base", QUANTIZED)
def test_gradients_are_those_of_the_restored_weights(base: BaseFormat) -> None:
    torch.manual_seed(0)
    stored = QuantizedLinear(nn.Linear(64, 32).requires_grad_(False), base.storage, "cpu")
    given = torch.randn(4, 7, 64, requires_grad=True)
    other = given.detach().clone().requires_grad_()
    above = torch.randn(4, 7, 32)
    torch.autograd.backward(stored(given), above)
    torch.autograd.backward(nn.functional.linear(other, stored.restore(torch.float32), stored.bias), above)
    torch.testing.assert_close(given.grad, other.grad)


# Which layers.


def test_the_head_and_trainable_layers_stay_as_they_are() -> None:
    model = Adapters().model()
    assert quantize_frozen(model, BaseFormat.NF4, "cpu") == 3 * 7
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["lm_head"] is nn.Linear
    assert kinds["model.layers.0.mlp.up_proj"] is LoRALayer
    assert kinds["model.layers.0.mlp.up_proj.inner"] is QuantizedLinear
    assert kinds["model.layers.0.mlp.up_proj.down"] is nn.Linear


def test_a_weight_with_two_owners_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    model[2].weight = model[0].weight
    assert quantize_frozen(model, BaseFormat.NF4, "cpu") == 1
    assert isinstance(model[1], QuantizedLinear)


def test_a_transposed_layer_of_transformers_is_quantized() -> None:
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(32, 64)  # type: ignore[no-untyped-call]
    given = torch.randn(4, 64)
    model = nn.ModuleList([layer]).requires_grad_(False)
    quantize_frozen(model, BaseFormat.INT8, "cpu")
    expected = given @ layer.weight + layer.bias
    assert (model[0](given) - expected).norm() / expected.norm() < 0.02


def test_a_model_without_frozen_layers_is_refused() -> None:
    with pytest.raises(WrongUse, match="no frozen linear layer"):
        quantize_frozen(tiny_llama(), BaseFormat.NF4, "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("base", QUANTIZED)
def test_adapters_on_a_quantized_base_learn(base: BaseFormat) -> None:
    plain, losses = train(Adapters(), steps=6), train(Adapters(), steps=6, base=base)
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(plain[0], rel=0.02)
    assert losses[0] != plain[0]


# Optimizers.


def test_states_in_bf16_are_half_as_large_and_survive_a_checkpoint() -> None:
    torch.manual_seed(0)
    before = torch.randn(64, 32)
    gradients = [torch.randn(64, 32) for _ in range(4)]

    def update(optimizer: Any, parameter: nn.Parameter, chosen: list[torch.Tensor]) -> None:
        for gradient in chosen:
            parameter.grad = gradient.clone()
            optimizer.step()

    weights = [nn.Parameter(before.clone()) for _ in range(3)]
    whole = torch.optim.AdamW([weights[0]], lr=1e-2, betas=(0.9, 0.95))
    stored, resumed = (Bf16AdamW([weight], lr=1e-2, betas=(0.9, 0.95)) for weight in weights[1:])
    update(whole, weights[0], gradients[:1])
    update(stored, weights[1], gradients[:1])
    # The first update is computed before anything is rounded.
    torch.testing.assert_close(weights[1], weights[0])
    update(whole, weights[0], gradients[1:])
    update(stored, weights[1], gradients[1:2])
    with torch.no_grad():
        weights[2].copy_(weights[1])
    resumed.load_state_dict(copy.deepcopy(stored.state_dict()))
    update(stored, weights[1], gradients[2:])
    update(resumed, weights[2], gradients[2:])
    assert torch.equal(weights[1], weights[2])
    difference = (weights[1] - weights[0]).abs().max()
    assert 0 < difference < 0.01 * (weights[0] - before).abs().max()
    states = [value for value in resumed.state[weights[2]].values() if isinstance(value, torch.Tensor)]
    assert sum(state.numel() * state.element_size() for state in states) == 4 * before.numel()


@pytest.mark.parametrize("rule", ["adamw", "adamw-bf16", "adafactor", "muon", "sgd"])
def test_other_optimizers_of_torch_update_the_weights(rule: str) -> None:
    losses = train(Whole(), steps=2, optimizer_rule=OptimizerRule(rule))
    assert losses[-1] < losses[0]


def test_muon_takes_matrices_and_adamw_the_rest() -> None:
    named = list(tiny_llama().named_parameters())
    made = make_optimizers(Whole(), named, OptimizerImplementation.PLAIN, OptimizerRule.MUON)
    assert [entry.name for entry in made] == ["muon", "adamw"]
    counts = [len(entry.optimizer.param_groups[0]["params"]) for entry in made]
    assert sum(counts) == len(named)
    assert counts[1] == 2 * 3 + 1


def test_an_optimizer_takes_over_the_options_of_the_job() -> None:
    class Rated(Whole):
        def optimizer(self, params: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(params, lr=0.03, weight_decay=0.2)

    named = list(tiny_llama().named_parameters())
    (made,) = make_optimizers(Rated(), named, OptimizerImplementation.PLAIN, OptimizerRule.SGD)
    assert isinstance(made.optimizer, torch.optim.SGD)
    group = made.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.03, 0.2)


def test_a_job_with_its_own_optimizers_keeps_them() -> None:
    class Several(Whole):
        def optimizers(self, named_parameters: Any) -> Any:
            return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)

    with pytest.raises(WrongUse, match=r"by optimizers\(\)"):
        make_optimizers(Several(), [], OptimizerImplementation.PLAIN, OptimizerRule.ADAMW)


def test_a_missing_package_is_named() -> None:
    pytest.importorskip("torch")
    try:
        import bitsandbytes  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        with pytest.raises(EnvironmentFault, match="pip install bitsandbytes"):
            train(Whole(), optimizer_rule=OptimizerRule.ADAMW_8BIT)


def states_of(rule: OptimizerRule, count: int, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes of states of a tensor."""
    parameter = nn.Parameter(torch.zeros(count, dtype=dtype, device="meta"))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = LowBitOptimizer([parameter], rule.stored)
    optimizer.step()
    return sum(state.numel() * state.element_size() for state in optimizer.state[parameter].values())


def test_states_in_few_bits_have_the_bytes_of_their_library() -> None:
    million = 2**20
    blocks = million // 256
    assert states_of(OptimizerRule.ADAMW_8BIT, million) == 2 * (million + 4 * blocks)
    # Pages of the driver are not torch's memory; their scales are.
    assert states_of(OptimizerRule.PAGED_ADAMW_8BIT, million) == 2 * 4 * blocks
    assert states_of(OptimizerRule.LION_8BIT, million) == million + 4 * blocks
    assert states_of(OptimizerRule.ADAMW_8BIT_AO, million) == 2 * (million + 4 * blocks + 4 * 256)
    assert states_of(OptimizerRule.ADAMW_4BIT, million) == 2 * (million // 2 + 4 * million // 128 + 4 * 16)
    assert states_of(OptimizerRule.ADAMW_FP8, million) == 2 * (million + 4 * blocks)


def test_small_tensors_have_states_in_full_precision() -> None:
    assert states_of(OptimizerRule.ADAMW_8BIT, 4095, torch.bfloat16) == 2 * 4 * 4095
    assert states_of(OptimizerRule.ADAMW_8BIT_AO, 4095, torch.bfloat16) == 2 * 2 * 4095
    # torchao quantizes whole blocks only.
    assert states_of(OptimizerRule.ADAMW_8BIT_AO, 8193) == 2 * 4 * 8193


# Losses.


@pytest.mark.parametrize("words", [WORDS, 32, 700])
def test_a_loss_in_pieces_is_the_whole_loss(words: int) -> None:
    whole, pieces = (tiny_llama(vocab_size=words).double() for _ in range(2))
    apply_loss_form(pieces, LossForm.CHUNKED)
    torch.manual_seed(3)
    ids = torch.randint(0, words, (3, TOKENS))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    counted = int((labels[:, 1:] != -100).sum())
    for extra, divisor in (({}, counted), ({"num_items_in_batch": 17}, 17)):
        # The model's own loss is in float32.
        logits = whole(input_ids=ids).logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        losses = [total / divisor, pieces(input_ids=ids, labels=labels, **extra).loss]
        torch.testing.assert_close(*losses, rtol=1e-10, atol=0)
        for model, loss in zip((whole, pieces), losses, strict=True):
            model.zero_grad()
            loss.backward()
        for first, second in zip(whole.parameters(), pieces.parameters(), strict=True):
            torch.testing.assert_close(first.grad, second.grad, rtol=1e-8, atol=1e-10)


def test_without_labels_the_logits_are_whole() -> None:
    model = tiny_llama()
    ids = torch.arange(5)[None]
    before = model(input_ids=ids).logits
    apply_loss_form(model, LossForm.CHUNKED)
    torch.testing.assert_close(model(input_ids=ids).logits, before)
    assert model(input_ids=ids, labels=ids).logits is None


def test_pieces_follow_the_vocabulary_and_the_length() -> None:
    assert [count_pieces(words, 2048, 2048) for words in (128_256, 8000, 2048, 7)] == [8, 4, 1, 1]
    assert [count_pieces(128_256, 2048, tokens) for tokens in (8192, 32_768, 2**17, 2**20)] == [
        8,
        32,
        128,
        128,
    ]


@pytest.mark.parametrize("words", [WORDS, 32, 700])
@pytest.mark.parametrize("extra", [{}, {"num_items_in_batch": 17}], ids=["mean", "sum"])
def test_the_program_of_liger_gives_the_whole_loss(words: int, extra: dict[str, Any]) -> None:
    """Training needs Liger's kernels; its program in plain torch is what estimates follow."""
    model = tiny_llama(vocab_size=words).double()
    torch.manual_seed(3)
    ids = torch.randint(0, words, (3, TOKENS))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
    hidden = torch.randn(3, TOKENS, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    weight = model.lm_head.weight.detach().requires_grad_()
    total = nn.functional.cross_entropy(
        (hidden[:, :-1] @ weight.t()).flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    whole = total / extra.get("num_items_in_batch", int((labels[:, 1:] != -100).sum()))
    fused = sum_fused(hidden, weight, labels, **extra)
    # Liger adds up losses in float32.
    torch.testing.assert_close(fused.double(), whole, rtol=1e-6, atol=1e-6)
    expected = torch.autograd.grad(3 * whole, (hidden, weight))
    for mine, gradient in zip(torch.autograd.grad(3 * fused, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(mine, gradient, rtol=1e-6, atol=1e-8)


def test_liger_is_refused_without_a_gpu() -> None:
    with pytest.raises(EnvironmentFault, match="Liger's kernels run on a GPU"):
        apply_loss_form(tiny_llama(), LossForm.LIGER)


def test_models_that_change_their_logits_are_refused() -> None:
    model = tiny_llama()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(WrongUse, match="final_logit_softcapping"):
        apply_loss_form(model, LossForm.CHUNKED)


def test_models_without_a_loss_of_their_own_are_refused() -> None:
    with pytest.raises(WrongUse, match="no causal language model of transformers"):
        apply_loss_form(nn.Sequential(nn.Linear(4, 4)), LossForm.CHUNKED)


# Recomputation.


@pytest.mark.parametrize(("way", "count"), [("every-2", 2), ("every-4", 1), ("all-but-3", 2)])
def test_some_blocks_are_recomputed_and_losses_stay(way: str, count: int) -> None:
    model = tiny_llama()
    assert enable_recompute(model, Recompute(way)) == [f"model.layers ({count} blocks)"]
    assert train(Whole(), recompute=Recompute(way)) == train(Whole())


@pytest.mark.parametrize(
    ("package", "name", "options", "bits", "states"),
    [
        ("bitsandbytes.optim", "AdamW8bit", {}, 8, 2),
        ("bitsandbytes.optim", "PagedAdamW8bit", {}, 8, 2),
        ("bitsandbytes.optim", "AdamW", {"optim_bits": 32}, 32, 2),
        ("bitsandbytes.optim", "Lion8bit", {}, 8, 1),
        ("torchao.optim", "AdamW4bit", {}, 4, 2),
        ("torchao.optim", "AdamWFp8", {}, 8, 2),
    ],
)
def test_a_low_bit_optimizer_of_a_job_is_recognised(
    package: str, name: str, options: dict[str, Any], bits: int, states: int
) -> None:
    library = pytest.importorskip(package)
    parameter = nn.Parameter(torch.zeros(128, 64))
    built = getattr(library, name)([parameter], lr=1e-3, **options)
    found = find_states(built)
    assert found is not None
    assert (found.bits, found.states, bool(found.paged_from)) == (bits, states, "Paged" in name)
    assert imitate_optimizer(built) is built  # Tensors with values keep the real one.
    hollow = FakeTensorMode().from_tensor(parameter)
    made = imitate_optimizer(getattr(library, name)([hollow], lr=1e-3, **options))
    assert isinstance(made, LowBitOptimizer)
    assert made.param_groups[0]["params"][0] is hollow


def test_optimizers_of_torch_are_not_taken_for_others() -> None:
    assert find_states(torch.optim.AdamW([nn.Parameter(torch.zeros(2))])) is None


class RecordUpdates(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Record the work of every update with states in few bits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name().startswith("trimtab::update"):
            work = describe_work(func, func.name(), args, kwargs or {}, out)
            assert work is not None
            self.works.append(work)
        return out


def describe_update(rule: OptimizerRule, count: int) -> Work:
    """Return the work of the update of one bf16 tensor on a GPU without values."""
    recorder = RecordUpdates()
    with FakeTensorMode(), recorder:
        parameter = nn.Parameter(torch.zeros(count, dtype=torch.bfloat16, device="cuda"))
        parameter.grad = torch.zeros_like(parameter)
        LowBitOptimizer([parameter], rule.stored).step()
    (work,) = recorder.works
    return work


@pytest.mark.parametrize(
    ("rule", "instructions"),
    [
        (OptimizerRule.ADAMW_8BIT, 880),
        # Paged states are no tensors of the GPU, but are searched all the same.
        (OptimizerRule.PAGED_ADAMW_8BIT, 880),
        (OptimizerRule.LION_8BIT, 480),
        (OptimizerRule.ADAMW_4BIT, 480),
        # 8-bit floats are cast, and states of 32 bits are read.
        (OptimizerRule.ADAMW_FP8, 0),
        (OptimizerRule.LION, 0),
    ],
)
def test_an_update_counts_the_tables_that_it_searches(rule: OptimizerRule, instructions: int) -> None:
    million = 2**20
    assert describe_update(rule, million).flops == instructions * million
    assert describe_update(rule, 1024).flops == 0


def update_rate(device: str, rule: OptimizerRule = OptimizerRule.ADAMW_8BIT) -> float:
    """Return the weights that a device updates in a second."""
    count = 2**22
    speed = find_speed(trimtab.cluster(device).devices[0])
    assert speed is not None
    return count / speed.pace.seconds(describe_update(rule, count))


def test_updates_in_few_bits_take_what_was_measured_on_an_h200() -> None:
    assert update_rate("H200") == pytest.approx(38e9, rel=0.05)
    assert update_rate("H200", OptimizerRule.LION_8BIT) == pytest.approx(70e9, rel=0.05)


def test_updates_in_few_bits_scale_by_multiprocessors_and_clock_not_by_fp32_lanes() -> None:
    # An A100 has half the fp32 lanes of an H200 in a multiprocessor, but starts as many instructions.
    a100 = update_rate("A100-80GB") / update_rate("H200")
    assert a100 == pytest.approx(108 * 1.41 / (132 * 1.98), rel=0.05)
    rtx4090 = update_rate("RTX4090") / update_rate("H200")
    assert rtx4090 == pytest.approx(128 * 2.52 / (132 * 1.98), rel=0.05)
    # An MI300X starts half as many in a clock.
    mi300x = update_rate("MI300X") / update_rate("H200")
    assert mi300x == pytest.approx(304 * 2.1 / 2 / (132 * 1.98), rel=0.05)


def test_casts_to_fp8_states_are_bound_by_memory() -> None:
    bandwidths = [trimtab.cluster(name).devices[0].bandwidth_bytes_per_s for name in ("A100-80GB", "H200")]
    rates = [update_rate(name, OptimizerRule.ADAMW_FP8) for name in ("A100-80GB", "H200")]
    assert all(bandwidths)
    assert rates[0] / rates[1] == pytest.approx((bandwidths[0] or 0) / (bandwidths[1] or 1), rel=0.2)
