"""The frameworks read back what `apply` wrote, with their own parsers.

`pip install 'trimtab[frameworks]'` brings all of them; what is not installed is skipped, with its reason.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

import config_samples as samples
from config_plans import GRID, LAYOUTS, plan
from framework_schemas import SCHEMAS
from trimtab.configs import formats
from trimtab.configs.plan_edits import count_nodes, draft_edits, make_exact, name_offload
from trimtab.configs.targets import builtin_targets, find_site, find_target
from trimtab.spec import LossForm, Mesh, OptimizerRule, Precision, Recompute, Setting, Strategy
from trimtab.spec.precision import BFLOAT16, without_float8

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trimtab.spec import Plan

SKIPS = "is not installed: pip install 'trimtab[frameworks]'"


def needed(module: str) -> Any:
    """A framework's module; its own warnings at import are none of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module, reason=f"{module.partition('.')[0]} {SKIPS}")


def applied(name: str, file: Path, text: str, plan: Plan) -> Path:
    """The file with the plan in it."""
    document = formats.read_config(text, file.name)
    where = find_site(document, builtin_targets(), origin=file.name, name=name)
    edits = draft_edits(where, document, plan, file=file.name).edits
    file.write_text(document.edit({edit.path: edit.after for edit in edits}, add=True), encoding="utf-8")
    return file


@contextmanager
def same_environment() -> Iterator[None]:
    """Frameworks write what they read into the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- transformers ---

SHORT_ARGUMENTS = "output_dir: out\nper_device_train_batch_size: 1\n"
FULL_ARGUMENTS = """\
output_dir: out
per_device_train_batch_size: 3
gradient_accumulation_steps: 5
fp16: true
fsdp: "shard_grad_op auto_wrap offload"
fsdp_config: {version: 1, cpu_offload: true, auto_wrap_policy: SIZE_BASED_WRAP}
auto_find_batch_size: true
dataloader_num_workers: 7
"""


OPTIMIZERS = {
    OptimizerRule.ADAMW_8BIT: "adamw_bnb_8bit",
    OptimizerRule.PAGED_ADAMW_8BIT: "paged_adamw_8bit",
    OptimizerRule.PAGED_ADAMW: "paged_adamw_32bit",
    OptimizerRule.LION_8BIT: "lion_8bit",
    OptimizerRule.ADAMW_8BIT_AO: "adamw_torch_8bit",
    OptimizerRule.ADAMW_4BIT: "adamw_torch_4bit",
    OptimizerRule.ADAFACTOR: "adafactor",
    OptimizerRule.SGD: "sgd",
}


@pytest.mark.parametrize("text", [SHORT_ARGUMENTS, FULL_ARGUMENTS], ids=["minimal", "full"])
def test_transformers_parses_the_arguments_of_the_plan(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = needed("transformers")
    arguments = needed("transformers.training_args")
    # The file is for GPUs, and this machine may have none.
    monkeypatch.setattr(arguments, "is_torch_bf16_gpu_available", lambda: True)
    monkeypatch.setattr(arguments, "is_torch_tf32_available", lambda: True)
    monkeypatch.setattr(arguments, "enable_tf32", lambda *_: None, raising=False)
    for one in GRID:
        with same_environment():
            _check_arguments(transformers, one, text, tmp_path)


def _check_arguments(transformers: Any, plan: Plan, text: str, tmp_path: Path) -> None:
    file = applied("transformers", tmp_path / "args.yaml", text, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_yaml_file(str(file))
    choice = make_exact(plan.choice, "")[0]
    assert found.per_device_train_batch_size == choice.micro_batch
    assert found.gradient_accumulation_steps == choice.accumulation
    if without_float8(choice.precision) is not Precision.BF16_TRUE:
        # A config without a key for fp8 gets the 16 bits of the rest of the model.
        assert found.bf16 is choice.dtypes.is_bf16
        assert found.fp16 is (choice.precision is Precision.FP16)
    assert found.gradient_checkpointing is (choice.recompute is not Recompute.NONE)
    assert bool(found.torch_compile) is choice.compile
    assert not found.auto_find_batch_size
    if choice.strategy is Strategy.FSDP:
        assert found.fsdp_plugin_args["fsdp_version"] == 2
        assert found.fsdp_plugin_args["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
        assert found.fsdp_plugin_args["reshard_after_forward"]
        assert bool(found.fsdp_plugin_args.get("cpu_offload")) is (name_offload(choice) != "none")
        assert not found.fsdp_plugin_args.get("activation_checkpointing")
    elif choice.strategy is not Strategy.HSDP:
        assert not found.fsdp
    if choice.optimizer_rule in OPTIMIZERS:
        assert found.optim == OPTIMIZERS[choice.optimizer_rule]
    assert found.use_liger_kernel is (choice.loss is not LossForm.WHOLE)


# --- accelerate ---


@pytest.mark.slow
@pytest.mark.parametrize("label", ["minimal", "plain", "fsdp", "contradicting"])
def test_accelerate_launches_what_the_plan_says(label: str, tmp_path: Path) -> None:
    needed("accelerate")
    for one in GRID:
        with same_environment():
            _check_launch(one, label, tmp_path)


def _check_launch(plan: Plan, label: str, tmp_path: Path) -> None:
    launch = needed("accelerate.commands.launch")
    plugins = needed("accelerate.utils.dataclasses")
    settings = needed("accelerate.commands.config.config_args")
    text = {
        "minimal": samples.MINIMAL["accelerate"][1],
        "plain": samples.ACCELERATE,
        "fsdp": samples.ACCELERATE_FSDP,
        "contradicting": samples.CONTRADICTING["accelerate"][1],
    }[label]
    file = applied("accelerate", tmp_path / "accelerate.yaml", text, plan)
    choice = make_exact(plan.choice, "")[0]
    loaded = settings.load_config_from_file(str(file))
    assert loaded.num_processes == choice.gpus
    assert loaded.num_machines == count_nodes(plan)
    known = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}
    if choice.precision in known:
        assert str(loaded.mixed_precision or "no") == known[choice.precision]
    if choice.strategy not in {Strategy.FSDP, Strategy.HSDP}:
        assert loaded.distributed_type != "FSDP"
        return
    if choice.dtypes.products_format is not None and not choice.dtypes.products_format.block:
        assert str(loaded.mixed_precision) == "fp8"
        assert loaded.fp8_config["backend"] == "AO"
    if loaded.mixed_precision == "fp8":
        return  # planned, or left for a precision without a word; this machine has no fp8 to go on with
    parser = launch.launch_command_parser()
    arguments = parser.parse_args(["--config_file", str(file), "train.py"])
    arguments, *_ = launch._validate_launch_command(arguments)  # noqa: SLF001 - what `accelerate launch` calls
    assert arguments.use_fsdp
    os.environ.update(needed("accelerate.utils.launch").prepare_multi_gpu_env(arguments))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plugin = plugins.FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.auto_wrap_policy is not None
    policy = "OffloadPolicy" if name_offload(choice) == "none" else "CPUOffloadPolicy"
    assert type(plugin.cpu_offload).__name__ == policy
    assert plugin.activation_checkpointing is (choice.recompute is not Recompute.NONE)
    assert (os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() == "inductor") is choice.compile
    if choice.strategy is Strategy.HSDP or arguments.use_parallelism_config:
        mesh = needed("accelerate.parallelism_config").ParallelismConfig()
        assert (mesh.dp_replicate_size, mesh.dp_shard_size) == (
            choice.mesh.dp_replicate,
            choice.mesh.dp_shard,
        )
        assert (mesh.tp_size, mesh.cp_size) == (1, 1)


# --- DeepSpeed ---


class Ranks:
    """As much of a process group as DeepSpeed's config asks for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_data_parallel_world_size(self) -> int:
        return self.count


@pytest.mark.parametrize("label", ["minimal", "full", "contradicting"])
def test_deepspeed_reads_the_batch_and_the_stage_of_the_plan(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = needed("deepspeed.runtime.config")
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    for one in GRID:
        with same_environment():
            _check_deepspeed(config, one, label, tmp_path)


def _check_deepspeed(config: Any, plan: Plan, label: str, tmp_path: Path) -> None:
    text = {
        "minimal": samples.MINIMAL["deepspeed"][1],
        "full": samples.DEEPSPEED,
        "contradicting": samples.CONTRADICTING["deepspeed"][1],
    }[label]
    file = applied("deepspeed", tmp_path / "ds.json", text, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        choice = make_exact(plan.choice, "")[0]
        found = config.DeepSpeedConfig(str(file), mpu=Ranks(choice.gpus))
    assert found.train_batch_size == choice.global_batch
    assert found.train_micro_batch_size_per_gpu == choice.micro_batch
    assert found.gradient_accumulation_steps == choice.accumulation
    zero = found.zero_config
    if choice.strategy is not Strategy.HSDP:
        stages = {"none": 0, "optimizer": 2}
        sharded = choice.strategy is Strategy.FSDP
        assert int(zero.stage) == (3 if sharded else stages.get(name_offload(choice), 3))
    for word, offload in (("optimizer", zero.offload_optimizer), ("params", zero.offload_param)):
        device = "none" if offload is None else str(getattr(offload.device, "value", offload.device))
        assert device == ("cpu" if word in choice.offload else "none")
        # The estimate is for copies of pinned memory.
        assert device == "none" or offload.pin_memory is True
    if without_float8(choice.precision) is not Precision.BF16_TRUE:
        # Products in 8 bits are beside bf16.
        assert found.bfloat16_config.enabled is (choice.dtypes.autocast == BFLOAT16)
        assert found.float16_config.enabled is (choice.precision is Precision.FP16)


# --- Lightning ---


@pytest.mark.parametrize("label", ["minimal", "full"])
def test_the_lightning_cli_parses_the_trainer_of_the_plan(label: str, tmp_path: Path) -> None:
    needed("jsonargparse")
    needed("lightning")
    for one in GRID:
        with same_environment():
            _check_trainer(one, label, tmp_path)


def _check_trainer(plan: Plan, label: str, tmp_path: Path) -> None:
    lightning = needed("lightning.pytorch")
    cli = needed("lightning.pytorch.cli")
    text = {
        "minimal": samples.MINIMAL["lightning"][1],
        "full": samples.LIGHTNING.partition("model:")[0],
    }[label]
    file = applied("lightning", tmp_path / "cli.yaml", text, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parser = cli.LightningArgumentParser()
        parser.add_argument("--seed_everything", type=int)
        parser.add_lightning_class_args(lightning.Trainer, "trainer")
        found = parser.parse_path(str(file))["trainer"]
    choice = make_exact(plan.choice, "")[0]
    devices = found.devices if isinstance(found.devices, int) else len(found.devices)
    assert (int(devices) * found.num_nodes, found.num_nodes) == (choice.gpus, count_nodes(plan))
    assert found.accumulate_grad_batches == choice.accumulation
    words = next(
        knob for knob in find_target("lightning", builtin_targets()).knobs if knob.field == "precision"
    ).words
    precision = "fp32" if choice.precision is Precision.TF32 else choice.precision.value
    assert str(found.precision or "32-true") in {words[precision], "32"}
    if choice.strategy is Strategy.FSDP:
        assert found.strategy == "fsdp"
        registry = needed("lightning.pytorch.strategies").StrategyRegistry
        assert "fsdp" in registry


def test_a_plan_in_json_reads_as_in_yaml(tmp_path: Path) -> None:
    transformers = needed("transformers")
    setting = Setting(
        strategy=LAYOUTS[1][0],
        mesh=Mesh(dp_replicate=4),
        micro_batch=2,
        accumulation=3,
        global_batch=24,
        recompute=Recompute.FULL,
    )
    file = applied(
        "transformers", tmp_path / "args.json", '{"output_dir": "out", "bf16": false}', plan(setting)
    )
    (found,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_json_file(str(file))
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (2, 3)
    assert json.loads(file.read_text(encoding="utf-8"))["gradient_checkpointing"] is True


# --- torchtitan, Axolotl and LLaMA-Factory: their schemas, as data ---


def kind_fits(kind: Any, value: Any) -> bool:
    """Whether a key of that kind takes the value."""
    if isinstance(kind, tuple):
        return any(type(value) is type(one) and value == one for one in kind)
    return value is None or type(value) is kind


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_key_is_one_that_the_framework_has_with_its_default_and_kind(name: str) -> None:
    schema, older = SCHEMAS[name]
    trained = {field.name for field in dataclasses.fields(needed("transformers").TrainingArguments)}
    target = find_target(name, builtin_targets())
    for knob in target.knobs:
        unknown = [key for key in knob.keys if key not in {*schema, *older}]
        assert all(name == "llama-factory" and key in trained for key in unknown), unknown
        key = knob.keys[0]
        if key not in schema:
            continue
        kind, default = schema[key]
        # What is added is the current name, and what is written is of its kind.
        assert all(kind_fits(kind, value) for value in knob.words.values()), key
        if knob.default is not None and default is not None:
            assert knob.default == default, key
    for requirement in target.requires:
        for key in requirement.keys:
            assert key in {*schema, *older} or (name == "llama-factory" and key in trained), key
        if (key := requirement.keys[0]) in schema:
            kind, default = schema[key]
            if requirement.write is not None:
                assert kind_fits(kind, requirement.write), key
            if requirement.default is not None and default is not None:
                assert requirement.default == default, key
    for key in (*target.subject.folders(), *target.subject.options.values()):
        assert key in schema


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("label", ["minimal", "contradicting"])
def test_what_is_written_is_of_the_kind_that_the_framework_takes(name: str, label: str) -> None:
    schema, _ = SCHEMAS[name]
    file, text = (samples.MINIMAL if label == "minimal" else samples.CONTRADICTING)[name]
    document = formats.read_config(text, file)
    where = find_site(document, builtin_targets(), origin=file)
    for one in GRID:
        for edit in draft_edits(where, document, one, file=file).edits:
            if edit.key in schema:
                assert kind_fits(schema[edit.key][0], edit.after), (edit.key, edit.after)
