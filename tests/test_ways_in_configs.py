"""Quantised bases, low-bit optimizers, offload and losses in pieces: what configs say and get."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import config_samples as samples
from config_plans import plan
from trimtab.api.estimating import requested_setting
from trimtab.api.planning import make_policy, pin_stored_base
from trimtab.configs import formats, interpret
from trimtab.configs.plan_edits import draft_edits
from trimtab.configs.show import read_options
from trimtab.configs.targets import builtin_targets, find_site
from trimtab.errors import WrongUse
from trimtab.jobs.stored_base import find_stored_base, read_base_format
from trimtab.spec import (
    BaseFormat,
    LossForm,
    Mesh,
    Offload,
    OptimizerRule,
    Precision,
    Recompute,
    Setting,
    Strategy,
)
from trimtab.spec.requests import EstimateRequest

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.configs.interpret import Reading

SFT = "per_device_train_batch_size: 1\n"
AXOLOTL = "base_model: ./model\nmicro_batch_size: 1\n"
FACTORY = "model_name_or_path: ./model\nstage: sft\n"
TUNE = """\
model: {{_component_: torchtune.models.llama3_1.{model}}}
optimizer: {{_component_: {optimizer}}}
batch_size: 1
"""
TITAN = "[training]\nlocal_batch_size = 1\nseq_len = 64\n"
ACCELERATE = "compute_environment: LOCAL_MACHINE\nnum_processes: 4\ndistributed_type: FSDP\n"


def read(text: str, file: str) -> tuple[Setting, Reading]:
    """What a config says, on the GPUs that it names or on one."""
    document = formats.read_config(text, file)
    found = interpret.interpret_config(
        find_site(document, builtin_targets(), origin=file), document.entries(), gpus=1
    )
    return interpret.make_setting(found), found


def tune(model: str = "llama3_1_8b", optimizer: str = "torch.optim.AdamW", more: str = "") -> str:
    return TUNE.format(model=model, optimizer=optimizer) + more


def python(*keywords: str) -> str:
    call = f"config = BitsAndBytesConfig({', '.join(keywords)})\n" if keywords else ""
    return f"{call}args = TrainingArguments(per_device_train_batch_size=4)\n"


@pytest.mark.parametrize(
    ("file", "text", "base"),
    [
        ("a.py", python(), "none"),
        ("a.py", python("load_in_4bit=True"), "fp4"),
        ("a.py", python("load_in_4bit=True", 'bnb_4bit_quant_type="nf4"'), "nf4"),
        ("a.py", samples.QLORA_PY, "nf4-double"),
        ("a.py", python("load_in_8bit=True"), "int8"),
        ("a.py", "from_pretrained(a=1)\nx.from_pretrained(load_in_4bit=True)\n" + python(), "nf4"),
        ("a.yaml", SFT + "use_peft: true\n", "none"),
        ("a.yaml", SFT + "use_peft: true\nload_in_4bit: true\n", "nf4"),
        ("a.yaml", SFT + "use_peft: true\nload_in_8bit: true\n", "int8"),
        ("a.yaml", SFT + "load_in_4bit: true\nbnb_4bit_quant_type: fp4\n", "fp4"),
        ("a.yaml", samples.TRL_YAML, "nf4-double"),
        (
            "a.json",
            '{"per_device_train_batch_size": 1, "quantization_config": {"load_in_4bit": true}}',
            "fp4",
        ),
        ("a.yaml", AXOLOTL + "adapter: qlora\nload_in_4bit: true\n", "nf4-double"),
        ("a.yaml", AXOLOTL + "adapter: lora\nload_in_8bit: true\n", "int8"),
        ("a.yaml", AXOLOTL + "adapter: lora\n", "none"),
        (
            "a.yaml",
            AXOLOTL + "adapter: qlora\nload_in_4bit: true\n"
            "bnb_config_kwargs: {bnb_4bit_use_double_quant: false, bnb_4bit_quant_type: fp4}\n",
            "fp4",
        ),
        ("a.yaml", FACTORY + "quantization_bit: 4\n", "nf4-double"),
        ("a.yaml", FACTORY + "quantization_bit: 8\nquantization_method: bnb\n", "int8"),
        ("a.yaml", FACTORY + "quantization_bit: 4\ndouble_quantization: false\n", "nf4"),
        ("a.yaml", tune("qlora_llama3_1_8b"), "nf4-ao"),
        ("a.yaml", tune("lora_llama3_1_8b"), "none"),
        ("a.yaml", tune("lora_llama3_1_8b").replace("8b}", "8b, quantize_base: True}"), "nf4-ao"),
        ("a.yaml", tune("qlora_llama3_1_8b").replace("8b}", "8b, quantize_base: False}"), "none"),
    ],
)
def test_the_storage_of_frozen_weights_is_read(file: str, text: str, base: str) -> None:
    setting, found = read(text, file)
    assert setting.base.value == base
    assert not [note for note in found.said if "contradicts" in note or "not one of the words" in note]


@pytest.mark.parametrize(
    ("file", "text", "rule"),
    [
        ("a.yaml", SFT, "job"),
        *(
            ("a.yaml", f"{SFT}optim: {word}\n", rule)
            for word, rule in (
                ("adamw_torch", "job"),
                ("adamw_8bit", "adamw8bit"),
                ("adamw_bnb_8bit", "adamw8bit"),
                ("paged_adamw_8bit", "paged-adamw8bit"),
                ("paged_adamw_32bit", "paged-adamw"),
                ("lion_8bit", "lion8bit"),
                ("adamw_torch_8bit", "adamw8bit-ao"),
                ("adamw_torch_4bit", "adamw4bit"),
                ("adafactor", "adafactor"),
            )
        ),
        ("a.yaml", AXOLOTL + "optimizer: muon\n", "muon"),
        ("a.yaml", AXOLOTL + "optimizer: ao_adamw_fp8\n", "adamw-fp8"),
        ("a.yaml", FACTORY + "optim: paged_adamw_8bit\n", "paged-adamw8bit"),
        ("a.yaml", FACTORY + "use_muon: true\n", "muon"),
        ("a.yaml", tune(optimizer="bitsandbytes.optim.PagedAdamW8bit"), "paged-adamw8bit"),
        ("a.yaml", tune(optimizer="torchao.prototype.low_bit_optim.AdamW8bit"), "adamw8bit-ao"),
        ("a.json", '{"train_batch_size": 8, "optimizer": {"type": "Lion"}}', "lion"),
        ("a.json", '{"train_batch_size": 8, "optimizer": {"type": "AdamW"}}', "job"),
        ("a.toml", TITAN + '[optimizer]\nname = "AdamW"\n', "job"),
    ],
)
def test_the_optimizer_is_read(file: str, text: str, rule: str) -> None:
    assert read(text, file)[0].optimizer_rule.value == rule


@pytest.mark.parametrize("word", ["galore_adamw", "schedule_free_adamw"])
def test_an_optimizer_that_is_not_known_is_named(word: str) -> None:
    setting, found = read(f"{SFT}optim: {word}\n", "a.yaml")
    assert setting.optimizer_rule is OptimizerRule.JOB
    assert any(word in note for note in found.said)


ZERO = '{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{"stage": 3, {offload}}}}}'


@pytest.mark.parametrize(
    ("file", "text", "offload"),
    [
        ("a.json", ZERO.format(offload='"offload_optimizer": {"device": "cpu"}'), "optimizer"),
        ("a.json", ZERO.format(offload='"offload_param": {"device": "cpu"}'), "params"),
        (
            "a.json",
            ZERO.format(
                offload='"offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "cpu"}'
            ),
            "params+optimizer",
        ),
        ("a.yaml", ACCELERATE + "fsdp_config: {fsdp_offload_params: true}\n", "params+optimizer"),
        ("a.yaml", ACCELERATE + "fsdp_config: {fsdp_offload_params: false}\n", ""),
        (
            "a.toml",
            TITAN.replace("[training]\n", "[training]\nenable_cpu_offload = true\n"),
            "params+optimizer",
        ),
        ("a.yaml", tune(more="fsdp_cpu_offload: True\n"), "params+optimizer"),
        ("a.yaml", tune(optimizer="torchao.optim.CPUOffloadOptimizer"), "optimizer"),
        (
            "a.yaml",
            tune(optimizer="torchao.prototype.low_bit_optim.CPUOffloadOptimizer"),
            "optimizer",
        ),
        ("a.yaml", AXOLOTL + "fsdp_config: {fsdp_version: 2, offload_params: true}\n", "params+optimizer"),
        ("a.yaml", samples.TORCHTUNE.replace("offloading: False", "offloading: True"), "activations"),
        ("a.yaml", SFT + "activation_offloading: true\n", "activations"),
        ("a.yaml", AXOLOTL + "gradient_checkpointing: offload\n", "activations"),
        ("a.yaml", AXOLOTL + "gradient_checkpointing: true\nactivation_offloading: true\n", "activations"),
    ],
)
def test_what_lies_on_the_host_is_read(file: str, text: str, offload: str) -> None:
    assert "+".join(read(text, file)[0].offload) == offload


@pytest.mark.parametrize(
    ("file", "text", "loss"),
    [
        ("a.yaml", SFT, "whole"),
        ("a.yaml", SFT + "use_liger_kernel: true\n", "liger"),
        ("a.yaml", SFT + "loss_type: chunked_nll\n", "chunked"),
        ("a.py", samples.QLORA_PY, "chunked"),
        ("a.py", samples.QLORA_PY.replace("bf16=True", 'loss_type="nll"'), "whole"),
        ("a.py", samples.QLORA_PY.replace("bf16=True", "use_liger_kernel=True"), "liger"),
        ("a.yaml", AXOLOTL + "liger_fused_linear_cross_entropy: true\n", "liger"),
        ("a.yaml", AXOLOTL + "cut_cross_entropy: true\n", "liger"),
        ("a.yaml", FACTORY + "enable_liger_kernel: true\n", "liger"),
        ("a.yaml", samples.TORCHTUNE, "whole"),
    ],
)
def test_the_form_of_the_loss_is_read(file: str, text: str, loss: str) -> None:
    setting, found = read(text, file)
    assert setting.loss.value == loss
    assert not [note for note in found.said if "contradicts" in note]


@pytest.mark.parametrize(
    ("file", "text", "key"),
    [
        (
            "a.yaml",
            ACCELERATE + "mixed_precision: fp8\n",
            "fp8_config.enable_fsdp_float8_all_gather",
        ),
        ("a.yaml", ACCELERATE + "mixed_precision: fp8\nfp8_config: {backend: TE}\n", "fp8_config.backend"),
        ("a.yaml", AXOLOTL + "adapter: lora\nfp8: true\n", "fp8"),
        ("a.yaml", FACTORY + "fp8: true\n", "fp8"),
        ("a.toml", TITAN + '[model]\nconverters = ["quantize.grouped_mm.mx"]\n', "model.converters"),
        ("a.yaml", FACTORY + "quantization_bit: 4\nquantization_method: hqq\n", "quantization_bit"),
        ("a.yaml", AXOLOTL + "adapter: lora\nload_in_4bit: true\n", "load_in_4bit"),
        ("a.yaml", samples.TORCHTUNE, "loss._component_"),
        (
            "a.json",
            ZERO.format(offload='"offload_optimizer": {"device": "cpu"}'),
            "zero_optimization.offload_optimizer.pin_memory",
        ),
        (
            "a.json",
            ZERO.format(
                offload='"offload_param": {"device": "cpu", "pin_memory": true}, '
                '"stage3_gather_16bit_weights_on_model_save": true'
            ),
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
        ("a.json", ZERO.format(offload='"cpu_offload": true'), "zero_optimization.cpu_offload"),
        (
            "a.yaml",
            ACCELERATE + "fsdp_config: {fsdp_offload_params: true, fsdp_cpu_ram_efficient_loading: false}\n",
            "fsdp_config.fsdp_cpu_ram_efficient_loading",
        ),
        (
            "a.yaml",
            ACCELERATE + "fsdp_config: {fsdp_offload_params: true, fsdp_state_dict_type: FULL_STATE_DICT}\n",
            "fsdp_config.fsdp_state_dict_type",
        ),
        (
            "a.yaml",
            AXOLOTL + "fsdp_config: {fsdp_version: 2, offload_params: true, cpu_offload_pin_memory: false}\n",
            "fsdp_config.cpu_offload_pin_memory",
        ),
        ("a.yaml", tune(optimizer="torchao.optim.CPUOffloadOptimizer"), "optimizer.offload_gradients"),
    ],
)
def test_what_is_read_and_not_estimated_is_said(file: str, text: str, key: str) -> None:
    assert key in {warning.key for warning in read(text, file)[1].warnings}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (
            "a.json",
            ZERO.format(
                offload='"offload_optimizer": {"device": "cpu", "pin_memory": true}, '
                '"offload_param": {"device": "cpu", "pin_memory": true}'
            ),
        ),
        (
            "a.yaml",
            ACCELERATE
            + "fsdp_config: {fsdp_offload_params: true, fsdp_cpu_ram_efficient_loading: true, "
            + "fsdp_state_dict_type: SHARDED_STATE_DICT}\n",
        ),
        # What would be another memory of the host counts only with offload.
        (
            "a.yaml",
            ACCELERATE
            + "fsdp_config: {fsdp_offload_params: false, fsdp_cpu_ram_efficient_loading: false, "
            + "fsdp_state_dict_type: FULL_STATE_DICT}\n",
        ),
        ("a.json", ZERO.format(offload='"stage3_gather_16bit_weights_on_model_save": true')),
    ],
)
def test_nothing_is_said_of_a_host_that_is_as_estimated(file: str, text: str) -> None:
    assert [warning.key for warning in read(text, file)[1].warnings if warning.field == "offload"] == []


FULL_FACTORY = FACTORY + "finetuning_type: full\n"
TUNE_ROWS = "dtype: bf16\nenable_fp8_training: True\nfp8_recipe_name: rowwise\n"
OLD_TITAN = TITAN + '[model]\nconverters = ["float8"]\n'
NEW_TITAN = TITAN + '[model]\nconverters = ["quantize.linear.float8"]\n'


@pytest.mark.parametrize(
    ("file", "text", "precision"),
    [
        ("a.toml", TITAN, "bf16"),
        ("a.toml", OLD_TITAN, "fp8-tensorwise"),
        ("a.toml", OLD_TITAN + '[float8]\nrecipe_name = "rowwise"\n', "fp8-rowwise"),
        ("a.toml", NEW_TITAN, "fp8-tensorwise"),
        ("a.toml", NEW_TITAN.replace("[model]", 'dtype = "bfloat16"\n[model]'), "fp8-tensorwise-true"),
        ("a.toml", NEW_TITAN.replace("float8", "mx"), "mxfp8"),
        ("a.yaml", AXOLOTL + "bf16: true\nfp8: true\n", "fp8-tensorwise-true"),
        ("a.yaml", AXOLOTL + "bf16: true\nfp8: false\n", "bf16-true"),
        ("a.yaml", FULL_FACTORY + "bf16: true\nfp8: true\n", "fp8-tensorwise"),
        ("a.yaml", FULL_FACTORY + "bf16: true\npure_bf16: true\nfp8: true\n", "fp8-tensorwise-true"),
        ("a.yaml", FULL_FACTORY + "bf16: true\n", "bf16"),
        ("a.yaml", tune(more="dtype: bf16\nenable_fp8_training: True\n"), "fp8-tensorwise-true"),
        ("a.yaml", tune(more=TUNE_ROWS), "fp8-rowwise-true"),
        ("a.yaml", tune(more="dtype: bf16\n"), "bf16-true"),
        ("a.toml", NEW_TITAN + '[quantize.linear.float8]\nrecipe_name = "rowwise"\n', "fp8-rowwise"),
        (
            "a.toml",
            NEW_TITAN + '[quantize.linear.float8]\nrecipe_name = "rowwise_with_gw_hp"\n',
            "fp8-rowwise",
        ),
        # A recipe that nothing uses.
        ("a.toml", TITAN + '[quantize.linear.float8]\nrecipe_name = "rowwise"\n', "bf16"),
        ("a.yaml", ACCELERATE + "mixed_precision: fp8\n", "fp8-tensorwise"),
        ("a.yaml", ACCELERATE + "mixed_precision: fp8\nfp8_config: {backend: AO}\n", "fp8-tensorwise"),
        ("a.yaml", ACCELERATE + "mixed_precision: bf16\nfp8_config: {backend: AO}\n", "bf16"),
    ],
)
def test_products_in_8_bits_are_read(file: str, text: str, precision: str) -> None:
    setting, found = read(text, file)
    assert setting.precision.value == precision
    assert not [note for note in found.said if "contradicts" in note or "not one of the words" in note]


# --- what is written ---

QLORA = Setting(
    micro_batch=2,
    global_batch=2,
    precision=Precision.BF16,
    base=BaseFormat.NF4,
    recompute=Recompute.FULL,
    loss=LossForm.CHUNKED,
    optimizer_rule=OptimizerRule.PAGED_ADAMW_8BIT,
)
SHARDED = Setting(
    strategy=Strategy.FSDP,
    mesh=Mesh(dp_shard=4),
    micro_batch=1,
    global_batch=4,
    precision=Precision.BF16_TRUE,
    recompute=Recompute.FULL,
    offload=(Offload.PARAMS, Offload.OPTIMIZER),
)


def write(setting: Setting, text: str, file: str) -> tuple[dict[str, Any], str, str]:
    """The values that are written by key, all notes and warnings, and the new text."""
    document = formats.read_config(text, file)
    draft = draft_edits(
        find_site(document, builtin_targets(), origin=file), document, plan(setting), file=file
    )
    after = document.edit({edit.path: edit.after for edit in draft.edits}, add=True)
    return {edit.key: edit.after for edit in draft.edits}, "\n".join(draft.texts()), after


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "a.yaml",
            SFT + "use_peft: true\n",
            {"load_in_4bit": True, "optim": "paged_adamw_8bit", "use_liger_kernel": True},
        ),
        (
            "a.py",
            python("load_in_8bit=True"),
            {
                "BitsAndBytesConfig.load_in_8bit": False,
                "BitsAndBytesConfig.load_in_4bit": True,
                "BitsAndBytesConfig.bnb_4bit_quant_type": "nf4",
                "TrainingArguments.optim": "paged_adamw_8bit",
            },
        ),
        (
            "a.yaml",
            AXOLOTL + "adapter: lora\nload_in_8bit: true\n",
            {
                "adapter": "qlora",
                "load_in_8bit": False,
                "load_in_4bit": True,
                "bnb_config_kwargs.bnb_4bit_use_double_quant": False,
                "optimizer": "paged_adamw_8bit",
                "liger_fused_linear_cross_entropy": True,
            },
        ),
        (
            "a.yaml",
            FACTORY,
            {
                "quantization_bit": 4,
                "double_quantization": False,
                "optim": "paged_adamw_8bit",
                "enable_liger_kernel": True,
            },
        ),
        (
            "a.yaml",
            tune("lora_llama3_1_8b"),
            {"model.quantize_base": True, "optimizer._component_": "bitsandbytes.optim.PagedAdamW8bit"},
        ),
    ],
)
def test_a_plan_for_adapters_on_4_bits_is_written(file: str, text: str, expected: dict[str, Any]) -> None:
    edits, _, after = write(QLORA, text, file)
    assert {key: edits.get(key) for key in expected} == expected
    setting, _ = read(after, file)
    assert setting.base.storage.bits == 4
    assert setting.optimizer_rule is OptimizerRule.PAGED_ADAMW_8BIT


@pytest.mark.parametrize(
    ("file", "text", "sentences"),
    [
        ("a.py", python(), ("quantization_config=BitsAndBytesConfig(...)", "liger-kernel")),
        ("a.yaml", AXOLOTL, ("only beside adapter: lora or qlora", "LigerPlugin")),
        ("a.yaml", tune(), ("a component whose name starts with lora_", "more memory than planned")),
        ("a.yaml", tune("lora_llama3_1_8b", more="optimizer.fused: 1\n"), ("larger buffers to restore",)),
        ("a.toml", TITAN, ("no frozen weights", "not paged-adamw8bit", "0.2 has no loss in pieces")),
        ("a.json", '{"train_batch_size": 2}', ("holds no model (nf4)", "no name for the optimizer paged")),
        ("a.yaml", ACCELERATE, ("holds no model (nf4)", "create paged-adamw8bit in your code")),
        ("a.yaml", samples.LIGHTNING, ("BitsAndBytesConfig", "create paged-adamw8bit", "in pieces")),
    ],
)
def test_what_a_file_cannot_hold_is_said_with_what_to_do(
    file: str, text: str, sentences: tuple[str, ...]
) -> None:
    _, said, _ = write(QLORA, text, file)
    assert [sentence for sentence in sentences if sentence not in said] == []


def test_offload_is_written_with_what_it_needs() -> None:
    zero = '{"train_micro_batch_size_per_gpu": 1}'
    edits, _, after = write(SHARDED, zero, "a.json")
    assert edits["zero_optimization.stage"] == 3
    assert edits["zero_optimization.offload_param.device"] == "cpu"
    for word in ("offload_param", "offload_optimizer"):
        assert edits[f"zero_optimization.{word}.pin_memory"] is True
    assert read(after, "a.json")[0].offload == SHARDED.offload
    single = QLORA.replace(offload=(Offload.OPTIMIZER,))
    edits = write(single, zero, "a.json")[0]
    assert edits["zero_optimization.stage"] == 2
    assert edits["zero_optimization.offload_optimizer.pin_memory"] is True
    assert "zero_optimization.offload_param.pin_memory" not in edits
    for text, words in ((tune(), "CPUOffloadOptimizer moves"), (FACTORY, "through a deepspeed file")):
        assert words in write(single, text, "a.yaml")[1]
    host_states = tune(optimizer="torchao.optim.CPUOffloadOptimizer")
    edits, said, after = write(single.replace(optimizer_rule=OptimizerRule.JOB), host_states, "a.yaml")
    assert "fsdp_cpu_offload" not in edits
    assert "optimizer.offload_gradients" in said
    assert read(after, "a.yaml")[0].offload == single.offload
    edits, said, _ = write(SHARDED.replace(offload=(Offload.OPTIMIZER,)), ACCELERATE, "a.yaml")
    assert edits["fsdp_config.fsdp_offload_params"] is True
    assert "not optimizer alone" in said
    edits, said, _ = write(QLORA.replace(offload=(Offload.ACTIVATIONS,)), samples.TORCHTUNE, "a.yaml")
    assert edits["enable_activation_offloading"] is True
    without = single.replace(offload=(Offload.ACTIVATIONS,), recompute=Recompute.NONE)
    for text, key in ((AXOLOTL, "activation_offloading"), (tune(), "enable_activation_offloading")):
        edits, said, _ = write(without, text, "a.yaml")
        assert key not in edits
        assert "only where it recomputes them: plan with --pin recompute=full" in said
        assert write(without, f"{text}{key}: true\n", "a.yaml")[0][key] is False  # else it is refused


@pytest.mark.parametrize("precision", [Precision.FP8_TENSORWISE, Precision.FP8_ROWWISE])
@pytest.mark.parametrize("text", [TITAN, OLD_TITAN, NEW_TITAN])
def test_products_in_8_bits_are_written_for_torchtitan(text: str, precision: Precision) -> None:
    setting = SHARDED.replace(precision=precision, offload=())
    _, said, after = write(setting, text, "a.toml")
    assert read(after, "a.toml")[0].precision is precision
    assert "No key here says" not in said
    # Names of an older version stay.
    assert ("quantize.linear" in after) is (text is not OLD_TITAN)


@pytest.mark.parametrize("way", [Recompute.BUDGET_1, Recompute.BUDGET_5, Recompute.BUDGET_8])
def test_a_budget_of_activations_is_written_for_torchtitan_and_read_back(way: Recompute) -> None:
    setting = Setting(micro_batch=1, global_batch=1, precision=Precision.BF16, recompute=way, compile=True)
    _, said, after = write(setting, TITAN, "a.toml")
    assert 'mode = "memory_budget"' in after
    found, _ = read(after, "a.toml")
    assert (found.recompute, found.compile) == (way, True)
    assert "recompute" not in said
    # Others recompute every block.
    edits, said, _ = write(setting, SFT, "a.yaml")
    assert edits["gradient_checkpointing"] is True
    assert "recomputes every block or none" in said


def test_torchtitans_own_budget_is_its_default_and_others_are_said() -> None:
    mode = TITAN + '[compile]\nenable = true\n[activation_checkpoint]\nmode = "memory_budget"\n'
    assert read(mode, "a.toml")[0].recompute is Recompute.BUDGET_5
    assert read(mode + "memory_budget = 0.3\n", "a.toml")[0].recompute is Recompute.BUDGET_3
    _, found = read(mode + "memory_budget = 0.35\n", "a.toml")
    assert any("0.35" in text for text in found.said)


@pytest.mark.parametrize(
    ("text", "file", "precision"),
    [
        (TITAN, "a.toml", Precision.FP8_ROWWISE_TRUE),
        (TITAN, "a.toml", Precision.MXFP8),
        (AXOLOTL, "a.yaml", Precision.FP8_TENSORWISE_TRUE),
        (FULL_FACTORY, "a.yaml", Precision.FP8_TENSORWISE),
        (FULL_FACTORY, "a.yaml", Precision.FP8_TENSORWISE_TRUE),
        (tune(more="dtype: fp32\n"), "a.yaml", Precision.FP8_ROWWISE_TRUE),
        (tune(more="dtype: fp32\n"), "a.yaml", Precision.FP8_TENSORWISE_TRUE),
    ],
)
def test_products_in_8_bits_are_written_and_read_back(text: str, file: str, precision: Precision) -> None:
    setting = Setting(micro_batch=1, global_batch=1, precision=precision)
    _, said, after = write(setting, text, file)
    assert read(after, file)[0].precision is precision
    assert "No key here says" not in said


def test_products_in_8_bits_stay_if_the_plan_did_not_choose_them() -> None:
    plain = Setting(micro_batch=1, global_batch=1, precision=Precision.BF16_TRUE)
    for text in (AXOLOTL + "fp8: true\n", FULL_FACTORY + "fp8: true\n"):
        edits, said, _ = write(plain, text, "a.yaml")
        assert "fp8" not in edits
        assert "fp8 stays true: the plan multiplies in 16 bits" in said
    edits, said, _ = write(plain, tune(more=TUNE_ROWS), "a.yaml")
    assert "enable_fp8_training" not in edits
    assert "enable_fp8_training stays true: the plan multiplies in 16 bits" in said


def test_what_differs_in_8_bits_is_said() -> None:
    shared = TITAN + "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n"
    setting = SHARDED.replace(precision=Precision.FP8_TENSORWISE, offload=())
    edits, said, _ = write(setting, shared, "a.toml")
    assert edits["quantize.linear.float8.enable_fsdp_float8_all_gather"] is False
    assert "the plan gathers them in 16" in said
    edits, said, after = write(
        setting.replace(precision=Precision.FP8_ROWWISE), ACCELERATE + "fp8_config: {backend: TE}\n", "a.yaml"
    )
    assert (edits["mixed_precision"], edits["fp8_config.backend"]) == ("fp8", "AO")
    assert "from_recipe_name('rowwise')" in said
    assert "enable_fsdp_float8_all_gather stays true by default" in said
    assert read(after, "a.yaml")[0].precision is Precision.FP8_TENSORWISE
    edits, said, _ = write(setting.replace(precision=Precision.BF16), OLD_TITAN, "a.toml")
    assert "model.converters" not in edits
    assert "model.converters stays ['float8']: the plan multiplies in 16 bits" in said


def test_what_changes_the_training_stays_if_the_plan_did_not_choose_it() -> None:
    plain = Setting(micro_batch=2, global_batch=2, precision=Precision.BF16)
    edits, said, _ = write(plain, samples.TRL_YAML, "a.yaml")
    assert not {"load_in_4bit", "optim", "loss_type"} & set(edits)
    assert "load_in_4bit stays true" in said
    assert "optim stays adamw_bnb_8bit" in said
    assert "loss_type stays chunked_nll" in said
    assert edits["activation_offloading"] is False  # this changes only how the job runs
    assert said.count("adamw_bnb_8bit") == 1


def test_the_adapters_of_a_python_file_are_read() -> None:
    document = formats.read_config(samples.QLORA_PY, "a.py")
    site = find_site(document, builtin_targets(), origin="a.py")
    assert read_options(site.target.subject, site.root, document.entries()) == {"lora": 32}
    bare = formats.read_config(samples.QLORA_PY.replace("r=32, ", ""), "a.py")
    assert read_options(site.target.subject, site.root, bare.entries()) == {"lora": 8}


# --- hf:FOLDER with a quantization_config ---


@pytest.fixture
def folder(tmp_path: Path) -> str:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}
    config["quantization_config"] |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}  # type: ignore[operator]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return f"hf:{tmp_path}"


def test_a_folder_with_4_bit_weights_has_its_format_as_the_base(folder: str, tmp_path: Path) -> None:
    assert find_stored_base(folder) is BaseFormat.NF4
    assert find_stored_base("slm") is find_stored_base(f"hf:{tmp_path}/gone") is BaseFormat.NONE
    assert requested_setting(EstimateRequest(job=folder, on="T4"))[1].base is BaseFormat.NF4
    asked = EstimateRequest(job=folder, on="T4", base="int8")
    assert requested_setting(asked)[1].base is BaseFormat.INT8
    policy = make_policy(0.9, None, "speed", None, ())
    assert pin_stored_base(policy, folder).pins == {"base": "nf4"}
    pinned = make_policy(0.9, None, "speed", None, ("base=none",))
    assert pin_stored_base(pinned, folder).pins == {"base": "none"}


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        ("4bit", "is no table"),
        ({"quant_method": "gptq"}, "GPTQ rounds weights"),
        ({"quant_method": "quark"}, "only formats of bitsandbytes"),
        ({"quant_method": "bitsandbytes"}, "neither load_in_4bit"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf2"}, "nf4 and fp4 are known"),
    ],
)
def test_other_formats_are_refused_with_a_reason(quantization: Any, found: str) -> None:
    with pytest.raises(WrongUse, match=found):
        read_base_format(quantization, "job hf:x")


@pytest.mark.parametrize(
    ("text", "file", "key"),
    [
        (tune(), "a.yaml", "optimizer_in_bwd"),
        (TITAN, "a.toml", "optimizer.early_step_in_backward"),
    ],
)
def test_updates_in_the_backward_pass_are_written_and_read(text: str, file: str, key: str) -> None:
    setting = Setting(
        micro_batch=1, global_batch=1, precision=Precision.BF16_TRUE, optimizer_in_backward=True
    )
    edits, said, after = write(setting, text, file)
    assert edits[key] is True
    assert "clip" in said
    assert read(after, file)[0].optimizer_in_backward
    edits, _, without = write(setting.replace(optimizer_in_backward=False), after, file)
    assert edits[key] is False
    assert not read(without, file)[0].optimizer_in_backward
    # On several GPUs no plan has it.
    several = setting.replace(
        strategy=Strategy.FSDP, mesh=Mesh(dp_shard=2), global_batch=2, optimizer_in_backward=False
    )
    assert write(several, after, file)[0][key] is False


def test_updates_in_the_backward_pass_beside_what_torchtune_refuses() -> None:
    _, found = read(tune(more="optimizer_in_bwd: True\nclip_grad_norm: 1.0\n"), "a.yaml")
    assert [note for note in found.warnings if "clipping needs all gradients" in note.text]
    setting, found = read(tune(more="optimizer_in_bwd: True\ncompile: True\n"), "a.yaml")
    assert not setting.optimizer_in_backward
    assert [note for note in found.warnings if "saves nothing" in note.text]


def test_a_trainer_without_updates_in_the_backward_pass_is_told_how() -> None:
    setting = QLORA.replace(optimizer_in_backward=True)
    _, said, _ = write(setting, SFT, "a.yaml")
    assert "register_post_accumulate_grad_hook" in said
