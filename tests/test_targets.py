"""What a config means to its framework, and that a plan written into it comes out the same."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import tomllib
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import config_samples as samples
from trimtab.configs import formats, interpret, plan_edits, targets
from trimtab.configs.plan_edits import count_nodes, make_exact
from trimtab.configs.targets import FIELDS, ConfigTarget, Knob, builtin_targets, find_site
from trimtab.errors import BrokenFile, UnknownName, WrongUse
from trimtab.spec import (
    Band,
    Estimate,
    Footprint,
    Mesh,
    OptimizerImplementation,
    Plan,
    Precision,
    RankPlacement,
    Recompute,
    Setting,
    Share,
    Strategy,
)

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.configs.plan_edits import Edit
    from trimtab.configs.text_edit import ParsedConfig

ESTIMATE = Estimate(
    allocated_bytes=1,
    reserved_bytes=1,
    process_bytes=1,
    parts=Footprint(),
    band=Band(low_bytes=1, high_bytes=1),
)
ALL = [(name, file, text) for name, held in samples.SAMPLES.items() for file, text in held]
IDS = [f"{name}: {file}" for name, file, _ in ALL]


def plan(setting: Setting, nodes: int = 1) -> Plan:
    places = tuple(
        RankPlacement(node=index * nodes // setting.gpus, node_name="n", device=index, name="T4")
        for index in range(setting.gpus)
    )
    return Plan(job="job.py:Mine", choice=setting, estimate=ESTIMATE, places=places)


def written(text: str, file: str, plan: Plan) -> tuple[ParsedConfig, list[Edit], list[str]]:
    """The document after the plan is in it."""
    before = formats.read_config(text, file)
    where = find_site(before, builtin_targets(), origin=file)
    draft = plan_edits.draft_edits(where, before, plan, file=file)
    changed, said = draft.edits, draft.texts()
    return (
        formats.read_config(before.edit({x.path: x.after for x in changed}, add=True), file),
        changed,
        said,
    )


FSDP = Setting(
    strategy=Strategy.FSDP,
    mesh=Mesh(dp_shard=4),
    micro_batch=8,
    accumulation=4,
    global_batch=128,
    precision=Precision.BF16,
    recompute=Recompute.FULL,
    workers=6,
)
SINGLE = Setting(micro_batch=20, accumulation=2, global_batch=40, precision=Precision.BF16)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    nodes = draw(st.sampled_from([1, 1, 2]))
    each = draw(st.sampled_from([1, 2, 3, 8]))
    gpus = nodes * each
    strategy = Strategy.SINGLE
    mesh = Mesh()
    if gpus > 1:
        strategy = draw(st.sampled_from([Strategy.DDP, Strategy.FSDP, Strategy.HSDP]))
        mesh = Mesh(dp_replicate=gpus)
        if strategy is Strategy.FSDP:
            mesh = Mesh(dp_shard=gpus)
        if strategy is Strategy.HSDP:
            mesh = Mesh(dp_shard=each, dp_replicate=nodes)
    micro, rounds = draw(st.integers(1, 64)), draw(st.integers(1, 16))
    less = draw(st.integers(0, micro - 1)) if rounds > 1 or micro > 1 else 0
    return plan(
        Setting(
            strategy=strategy,
            mesh=mesh,
            micro_batch=micro,
            accumulation=rounds,
            global_batch=(micro * rounds - less) * gpus,
            precision=draw(st.sampled_from(Precision)),
            recompute=draw(st.sampled_from(Recompute)),
            compile=draw(st.booleans()),
            optimizer=draw(st.sampled_from(OptimizerImplementation)),
            workers=draw(st.integers(0, 8)),
        ),
        nodes,
    )


@pytest.mark.parametrize(("name", "file", "text"), ALL, ids=IDS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans())
def test_a_config_reads_back_as_the_plan_that_was_written_into_it(
    name: str, file: str, text: str, plan: Plan
) -> None:
    after, _, said = written(text, file, plan)
    choice, _ = make_exact(plan.choice, "")
    where = find_site(after, builtin_targets(), origin=file)
    assert where.target.name == name
    nodes = count_nodes(plan)
    found = interpret.interpret_config(where, after.entries(), gpus=choice.gpus, nodes=nodes)
    wanted = plan_edits.list_facts(choice, nodes)
    told = " ".join(said)
    fields = where.target.fields()
    for field in ("global_batch", "micro_batch", "accumulation", "gpus", "nodes", "gpus_per_node"):
        if field in found.facts:
            assert found.facts[field] == wanted[field], field
    if fields & {"micro_batch"} and "auto" not in text and name != "accelerate":
        assert found.number("global_batch") == choice.global_batch
    for field in ("precision", "recompute", "compile", "strategy"):
        if field not in fields or field not in found.facts or found.facts[field] == wanted[field]:
            continue
        if field == "strategy" and {found.facts[field], wanted[field]} <= {"single", "ddp"}:
            continue
        # Not the same: then it has been said why.
        lacks = {sentence for knob in where.target.knobs for sentence in knob.lacks.values()}
        if field == "precision":
            lacks.add(f"No key here says {wanted[field]}: ")
        lacks = {sentence.replace("{value}", str(wanted[field])) for sentence in lacks}
        assert any(sentence in told for sentence in lacks), (field, found.facts[field], wanted[field], said)
    again, more, _ = written(after.edit({}), file, plan)
    assert more == []
    assert again.edit({}) == after.edit({})


@pytest.mark.parametrize(("name", "file", "text"), ALL, ids=IDS)
def test_a_config_is_known_by_its_keys_and_every_comment_survives(name: str, file: str, text: str) -> None:
    after, changed, _ = written(text, file, plan(FSDP))
    assert find_site(formats.read_config(text, file), builtin_targets(), origin=file).target.name == name
    comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line and "SBATCH" not in line]
    assert all(comment in after.edit({}) for comment in comments)
    assert {one.path for one in changed} <= {entry.path for entry in after.entries()}


def edit_of(text: str, file: str, plan: Plan) -> tuple[dict[str, Any], list[str]]:
    _, changed, said = written(text, file, plan)
    return {edit.key: edit.after for edit in changed}, said


def test_each_framework_gets_its_own_meaning_of_batch() -> None:
    one = plan(FSDP)
    assert edit_of(samples.HYDRA, "c.yaml", one)[0]["training.trainer.accumulate_grad_batches"] == 4
    found, _ = edit_of(samples.DEEPSPEED, "ds.json", one)
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (128, 8)
    found, _ = edit_of(samples.TORCHTITAN, "t.toml", one)
    assert found["training.global_batch_size"] == 128
    assert "training.local_batch_size" not in found  # it is 8 already
    assert edit_of(samples.SLM, "c.py", plan(SINGLE))[0]["slm_config.batch_size"] == 20


def test_fp8_is_written_as_bf16_and_said() -> None:
    found, said = edit_of(samples.HYDRA, "c.yaml", plan(FSDP.replace(precision=Precision.FP8_ROWWISE)))
    wide, _ = edit_of(samples.HYDRA, "c.yaml", plan(FSDP))
    assert found == wide
    assert any("No key here says fp8-rowwise: bf16 is written" in sentence for sentence in said)


def test_minus_one_stays_where_it_stands_for_what_is_wanted() -> None:
    found, _ = edit_of(samples.TORCHTITAN, "t.toml", plan(FSDP))
    assert "parallelism.data_parallel_shard_degree" not in found
    found, _ = edit_of(
        samples.TORCHTITAN,
        "t.toml",
        plan(FSDP.replace(strategy=Strategy.DDP, mesh=Mesh(dp_replicate=4))),
    )
    assert "parallelism.data_parallel_shard_degree" not in found  # what is left of 4 is 1
    assert found["parallelism.data_parallel_replicate_degree"] == 4


def test_a_split_of_the_model_that_the_plan_does_not_have_is_taken_out_and_said() -> None:
    found, said = edit_of(samples.TORCHTITAN, "t.toml", plan(FSDP))
    assert found["parallelism.tensor_parallel_degree"] == 1
    assert any("tensor_parallel_degree becomes 1" in one for one in said)


def test_every_auto_is_left_and_said() -> None:
    found, said = edit_of(samples.DEEPSPEED_AUTO, "ds.json", plan(FSDP))
    assert found == {}
    assert sum("stays auto" in one for one in said) == 5


def test_two_of_deepspeeds_three_batches_are_enough() -> None:
    text = '{"train_batch_size": 8, "gradient_accumulation_steps": 1}'
    found, _ = edit_of(text, "ds.json", plan(FSDP.replace(precision=Precision.FP32)))
    assert found["train_batch_size"] == 128
    assert found["gradient_accumulation_steps"] == 4
    assert "train_micro_batch_size_per_gpu" not in found


def test_what_a_config_cannot_hold_is_said() -> None:
    _, said = edit_of(samples.SLM, "c.py", plan(FSDP))
    text = "\n".join(said)
    assert "torchrun --nnodes 1 --nproc-per-node 4" in text
    assert "no key for recomputing (full)" in text
    assert "the global batch will be 4 times too small" in text
    assert "no key for the strategy (fsdp)" in text
    _, said = edit_of(samples.ACCELERATE, "a.yaml", plan(FSDP))
    assert any("batch_size=8" in one for one in said)


def test_another_optimizer_is_another_training_and_stays() -> None:
    found, said = edit_of(samples.AXOLOTL, "a.yaml", plan(FSDP))
    assert "optimizer" not in found
    assert any("optimizer stays adamw_bnb_8bit" in one for one in said)


def test_a_key_that_counts_only_when_sharding_is_left_otherwise() -> None:
    single = plan(SINGLE.replace(recompute=Recompute.FULL))
    assert (
        "fsdp_config.fsdp_activation_checkpointing"
        not in edit_of(samples.ACCELERATE_FSDP, "a.yaml", single)[0]
    )
    sharded, _ = edit_of(samples.ACCELERATE_FSDP, "a.yaml", plan(FSDP))
    assert sharded["fsdp_config.fsdp_activation_checkpointing"] is True


def test_a_table_where_a_word_was_expected_is_left_and_said() -> None:
    whole = "strategy:\n    class_path: FSDPStrategy\n    init_args: {sharding_strategy: FULL_SHARD}\n"
    text = samples.LIGHTNING.replace("strategy: ddp\n", whole)
    found, said = edit_of(text, "cli.yaml", plan(FSDP))
    assert not [key for key in found if "strategy" in key]
    assert "trainer.strategy holds a table, and stays; planned: fsdp." in said
    assert "strategy" not in read(text, "cli.yaml").facts


def test_slurm_headers_keep_the_name_of_the_gpu() -> None:
    after, _, said = written(samples.SBATCH, "a.sbatch", plan(FSDP))
    assert after.edit({}) == samples.SBATCH.replace("a100:2", "a100:4")
    assert said == ["Slurm headers ask for devices: batch and precision belong into the job's own config."]
    short = samples.SBATCH.replace("--nodes=1", "-N 1").replace("--gres=gpu:a100:2", "--gpus-per-node=2")
    two_nodes = plan(FSDP, nodes=2)
    assert "-N 2\n#SBATCH --gpus-per-node=2\n" in written(short, "a.sbatch", two_nodes)[0].edit({})


def test_a_number_inside_a_text_is_replaced_alone() -> None:
    knob = Knob(field="gpus", keys=("a",), pattern=r"cuda:(?P<n>\d+) devices")
    assert interpret.parse_count(knob, "cuda:2 devices") == 2
    assert interpret.format_count(knob, "cuda:2 devices", 8) == "cuda:8 devices"
    assert interpret.parse_count(knob, "cpu") is None


def test_micro_batches_are_full_and_the_global_batch_stays() -> None:
    uneven = Setting(micro_batch=34, accumulation=3, global_batch=100)
    found, said = make_exact(uneven, "plan")
    assert (found.micro_batch, found.accumulation, found.global_batch) == (25, 4, 100)
    assert "25 x 4" in said
    prime = Setting(micro_batch=4, accumulation=2, global_batch=7)
    assert make_exact(prime, "plan")[0].micro_batch == 1


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (
            Setting(
                strategy=Strategy.DDP,
                mesh=Mesh(dp_replicate=3),
                micro_batch=4,
                accumulation=9,
                global_batch=100,
            ),
            "cannot be cut into 3 equal parts",
        ),
        (
            Setting(strategy=Strategy.BRANCH, mesh=Mesh(branch=2), micro_batch=4, global_batch=4),
            "its strategy is branch",
        ),
        (
            Setting(
                strategy=Strategy.DDP,
                mesh=Mesh(dp_replicate=2),
                micro_batch=3,
                global_batch=4,
                shares=(
                    Share(samples=3, micro_batch=3, accumulation=1),
                    Share(samples=1, micro_batch=1, accumulation=1),
                ),
            ),
            "unlike shares",
        ),
    ],
)
def test_what_would_change_the_global_batch_is_refused(setting: Setting, found: str) -> None:
    with pytest.raises(WrongUse, match=found):
        written(samples.HYDRA, "c.yaml", plan(setting))


# --- which target it is ---


def test_a_config_that_two_frameworks_could_read_is_refused_with_both() -> None:
    text = "num_processes: 2\nmixed_precision: bf16\ntrain_batch_size: 8\n"
    with pytest.raises(
        WrongUse, match=r"accelerate or of deepspeed.*--target accelerate or --target deepspeed"
    ):
        find_site(formats.read_config(text, "a.yaml"), builtin_targets(), origin="a.yaml")
    named = find_site(
        formats.read_config(text, "a.yaml"), builtin_targets(), origin="a.yaml", name="deepspeed"
    )
    assert named.target.name == "deepspeed"


def test_a_config_that_nobody_knows_is_refused_with_the_names() -> None:
    with pytest.raises(WrongUse, match=r"none of its keys.*hydra-lightning, slm-config.*trimtab.toml"):
        find_site(formats.read_config("a: 1\n", "a.yaml"), builtin_targets(), origin="a.yaml")


def test_an_unknown_target_gives_the_nearest() -> None:
    with pytest.raises(UnknownName, match="the nearest is deepspeed"):
        find_site(
            formats.read_config("a: 1\n", "a.yaml"), builtin_targets(), origin="a.yaml", name="deepsped"
        )


def test_a_target_that_was_named_has_to_be_there() -> None:
    document = formats.read_config("a: {b: 1}\n", "a.yaml")
    with pytest.raises(WrongUse, match="none of the keys of deepspeed"):
        find_site(document, builtin_targets(), origin="a.yaml", name="deepspeed")
    # Unless somebody says where it is to go.
    assert find_site(document, builtin_targets(), origin="a.yaml", name="deepspeed", below=("a",)).root == (
        "a",
    )


def test_two_configs_in_a_file_are_told_apart_by_their_place() -> None:
    text = samples.SLM + samples.SLM.replace("slm_config", "tiny_config").partition("\n")[2]
    document = formats.read_config(text, "c.py")
    with pytest.raises(WrongUse, match=r"2 configs of slm-config.*c.py:slm_config, c.py:tiny_config"):
        find_site(document, builtin_targets(), origin="c.py")
    with pytest.raises(WrongUse, match="2 configs of slm-config"):
        find_site(document, builtin_targets(), origin="c.py", name="slm-config")
    assert find_site(document, builtin_targets(), origin="c.py", below=("tiny_config",)).root == (
        "tiny_config",
    )


def test_arguments_are_found_wherever_they_are_nested() -> None:
    text = "run:\n  args:\n    per_device_train_batch_size: 4\n"
    assert find_site(formats.read_config(text, "a.yaml"), builtin_targets(), origin="a.yaml").root == (
        "run",
        "args",
    )


# --- the frameworks themselves, where they are installed ---


def test_the_optimizers_and_formats_of_transformers_are_its_own() -> None:
    transformers = pytest.importorskip("transformers")
    names = {name.value for name in pytest.importorskip("transformers.training_args").OptimizerNames}
    arguments = inspect.signature(transformers.BitsAndBytesConfig).parameters
    knobs = targets.find_target("transformers", builtin_targets()).knobs
    rules = [knob for knob in knobs if knob.field == "optimizer_rule"]
    assert rules
    assert {word for knob in rules for word in knob.words.values()} <= names
    calls = [key for knob in knobs for key in knob.keys if key.startswith("/BitsAndBytesConfig.")]
    assert {key.partition(".")[2] for key in calls} <= set(arguments)
    for knob in knobs:
        if knob.keys[0].startswith("/BitsAndBytesConfig.bnb") and knob.default is not None:
            default = arguments[knob.keys[0].partition(".")[2]].default
            assert (default or type(knob.default)()) == knob.default


def test_the_keys_for_transformers_are_fields_of_its_arguments_with_those_defaults() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    fields = {field.name: field for field in dataclasses.fields(arguments)}
    for knob in targets.find_target("transformers", builtin_targets()).knobs:
        if knob.field in {"seq", "base", "offload", "offload_activations"} or knob.keys == ("loss_type",):
            continue  # TRL, scripts, BitsAndBytesConfig or fsdp_config hold it, and TrainingArguments do not
        (key,) = knob.keys
        assert key in fields
        if knob.default is not None:
            # No value at all is how newer versions spell false.
            assert (fields[key].default or type(knob.default)()) == knob.default, key
        for value in knob.words.values():
            assert knob.field in {"optimizer", "optimizer_rule"} or isinstance(value, bool)
    names = pytest.importorskip("transformers.training_args").OptimizerNames
    knob = next(
        knob
        for knob in targets.find_target("transformers", builtin_targets()).knobs
        if knob.field == "optimizer"
    )
    assert {names(word).value for word in knob.words.values()} == set(knob.words.values())


@pytest.mark.parametrize("text", [samples.ACCELERATE, samples.ACCELERATE_FSDP])
def test_accelerate_reads_the_plan_from_its_edited_config(text: str, tmp_path: Path) -> None:
    config = pytest.importorskip("accelerate.commands.config.config_args").ClusterConfig
    file = tmp_path / "config.yaml"
    file.write_text(written(text, "a.yaml", plan(FSDP, nodes=2))[0].edit({}), encoding="utf-8")
    found = config.from_yaml_file(str(file))
    assert (found.num_processes, found.num_machines) == (4, 2)
    assert found.mixed_precision == "bf16"
    assert str(found.distributed_type).endswith("FSDP")


# --- reading ---


def read(text: str, file: str, gpus: int | None = None) -> interpret.Reading:
    document = formats.read_config(text, file)
    return interpret.interpret_config(
        find_site(document, builtin_targets(), origin=file), document.entries(), gpus=gpus
    )


def test_defaults_of_the_framework_count_where_a_key_is_missing() -> None:
    found = read(samples.ARGUMENTS_JSON, "a.json", gpus=2)
    assert found.facts["accumulation"] == 1
    assert found.facts["precision"] == "fp32"
    assert found.facts["global_batch"] == 32
    assert read(samples.LLAMA_FACTORY, "a.yaml").facts["recompute"] == "full"


def test_the_number_of_devices_follows_from_deepspeeds_batches() -> None:
    assert read(samples.DEEPSPEED, "ds.json").facts["gpus"] == 8


def test_a_contradiction_is_said() -> None:
    text = samples.DEEPSPEED.replace('"train_batch_size": 64', '"train_batch_size": 63')
    assert any("does not make" in one for one in read(text, "ds.json", gpus=8).said)


@pytest.mark.parametrize("value", ["twelve", "-4", "0", "true", "1.5"])
def test_a_batch_that_is_none_is_said_and_not_believed(value: str) -> None:
    text = samples.ARGUMENTS_YAML.replace("batch_size: 4", f"batch_size: {value}")
    found = read(text, "a.yaml", gpus=1)
    assert "micro_batch" not in found.facts
    assert any("no number" in one for one in found.said)


def test_both_precisions_at_once_are_said() -> None:
    text = samples.ARGUMENTS_YAML + "bf16: true\n"
    assert any("contradicts" in one for one in read(text, "a.yaml").said)


def test_a_computed_value_is_open() -> None:
    found = read(samples.SLM.replace('"batch_size": 18', '"batch_size": 2 * 9'), "c.py", gpus=1)
    assert "micro_batch" not in found.facts
    assert any("computed in line 5 (2 * 9)" in one for one in found.said)


def test_words_are_read_as_people_write_them() -> None:
    knob = next(knob for knob in builtin_targets()[0].knobs if knob.field == "precision")
    assert interpret.words_of_value(knob, 16) == ["fp16"]
    assert interpret.words_of_value(knob, "BF16-mixed") == ["bf16"]
    assert interpret.words_of_value(knob, "64-true") == []
    devices = next(knob for knob in builtin_targets()[0].knobs if knob.field == "gpus_per_node")
    assert [interpret.parse_count(devices, one) for one in ([0, 3], "0,1,2", "4", 2, True, None, 2.0)] == [
        2,
        3,
        4,
        2,
        None,
        None,
        2,
    ]


# --- trimtab.toml ---

OURS = """
[[target]]
name = "ours"
title = "our trainer"
marks = [["optim.per_rank"]]

[[target.knobs]]
field = "rank_batch"
keys = ["optim.per_rank"]

[[target.knobs]]
field = "micro_batch"
keys = ["optim.chunk"]

[[target.knobs]]
field = "precision"
keys = ["optim.dtype"]
words = { fp32 = "float", bf16 = "brain" }
"""
OUR_CONFIG = "optim:\n  per_rank: 16  # samples\n  chunk: 4\n  dtype: float\n"


def test_a_project_teaches_its_own_config(tmp_path: Path) -> None:
    (tmp_path / "trimtab.toml").write_text(OURS, encoding="utf-8")
    file = tmp_path / "conf" / "train.yaml"
    file.parent.mkdir()
    file.write_text(OUR_CONFIG, encoding="utf-8")
    known = targets.list_targets([file])
    document = formats.read_config(file)
    where = find_site(document, known, origin="train.yaml")
    assert where.target.name == "ours"
    draft = plan_edits.draft_edits(where, document, plan(FSDP), file="train.yaml")
    changed, said = draft.edits, draft.texts()
    assert {one.key: one.after for one in changed} == {
        "optim.per_rank": 32,
        "optim.chunk": 8,
        "optim.dtype": "brain",
    }
    assert any("recompute: the plan has full" in one for one in said)


def test_a_target_of_the_same_name_takes_the_place_of_the_built_in(tmp_path: Path) -> None:
    (tmp_path / "trimtab.toml").write_text(OURS.replace('"ours"', '"deepspeed"'), encoding="utf-8")
    found = [
        list_target.title
        for list_target in targets.list_targets([tmp_path])
        if list_target.name == "deepspeed"
    ]
    assert found == ["our trainer"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[[target]", "not TOML"),
        ("target = 3", "no list of tables"),
        (OURS.replace('"rank_batch"', '"rank_bach"'), "did you mean rank_batch"),
        (OURS.replace("bf16 =", "bf17 ="), "'bf17' is no precision"),
        (OURS.replace('marks = [["optim.per_rank"]]', "marks = []"), "no marks"),
        (OURS.replace('name = "ours"', 'name = "our trainer"'), "is no name"),
        (OURS.replace("title", "titel"), "titel"),
        (OURS + 'pattern = "("\n', "no regular expression"),
        (OURS + 'pattern = "[0-9]+"\n', "no group"),
        (OURS.replace('words = { fp32 = "float", bf16 = "brain" }', ""), "needs words"),
    ],
)
def test_a_mapping_that_is_not_right_is_refused_with_the_reason(
    tmp_path: Path, text: str, found: str
) -> None:
    file = tmp_path / "trimtab.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BrokenFile) as problem:
        targets.list_targets([tmp_path])
    assert found in str(problem.value)
    assert str(file) in problem.value.given


def test_a_mapping_in_no_known_letters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trimtab.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(BrokenFile, match="not UTF-8"):
        targets.list_targets([tmp_path])


def test_the_targets_that_come_with_trimtab_are_whole() -> None:
    names = [builtin_target.name for builtin_target in builtin_targets()]
    assert len(names) == len(set(names))
    assert set(names) == set(samples.SAMPLES)
    for builtin_target in builtin_targets():
        assert set(builtin_target.beats) <= set(names)
        assert builtin_target.fields() <= set(FIELDS)
        assert builtin_target.source
    text = (files("trimtab.configs") / "targets.toml").read_text(encoding="utf-8")
    assert msgspec.convert(tomllib.loads(text)["target"], tuple[ConfigTarget, ...]) == builtin_targets()


def test_a_knob_for_nothing_of_ours_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="did you mean micro_batch"):
        Knob(field="micro_bach", keys=("a",))


@pytest.mark.parametrize("module", [interpret, plan_edits, targets], ids=lambda one: one.__name__)
def test_the_examples_in_the_docstrings_hold(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
