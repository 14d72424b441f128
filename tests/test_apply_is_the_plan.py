"""After `apply`, `show` gives back the plan's setting and sequence length, or warnings say what differs."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import config_samples as samples
import trimtab
from config_plans import GRID, plan
from trimtab.api import plan_from
from trimtab.configs import formats, interpret
from trimtab.configs.apply import find_layout, parse_aim
from trimtab.configs.plan_edits import (
    count_nodes,
    draft_edits,
    find_differences,
    make_exact,
    plan_sequence_length,
)
from trimtab.configs.show import find_job, read_options
from trimtab.configs.targets import builtin_targets, find_site
from trimtab.planner import plan_files
from trimtab.spec import Mesh, Precision, Recompute, Setting, Strategy, Workload

if TYPE_CHECKING:
    from trimtab.configs.apply import OpenedConfig
    from trimtab.configs.interpret import Reading
    from trimtab.configs.plan_edits import Draft
    from trimtab.configs.targets import ConfigTarget
    from trimtab.spec import Plan

FILES = {
    **{f"{name}, minimal": (name, *held) for name, held in samples.MINIMAL.items()},
    **{f"{name}, contradicting": (name, *held) for name, held in samples.CONTRADICTING.items()},
    **{
        f"{name}, {file}": (name, file, text) for name, all_ in samples.SAMPLES.items() for file, text in all_
    },
    **{
        f"{name}, empty {kind}": (name, f"empty.{kind}", "{}\n" if kind == "json" else "")
        for name, kind in (
            *(("transformers", "yaml"), ("transformers", "json"), ("accelerate", "yaml")),
            *(("deepspeed", "json"), ("lightning", "yaml"), ("torchtitan", "toml")),
            *(("axolotl", "yaml"), ("llama-factory", "yaml")),
        )
    },
}
PARTIAL = {"slurm", "environment"}
"""Targets that start a job, and are not its config."""
SAME_AS = {"mesh": "strategy", "global_batch": "micro_batch", "accumulation": "micro_batch"}
"""A warning about the one covers the other, which follows from it."""


def applied(name: str, file: str, text: str, plan: Plan) -> tuple[str, Draft]:
    """The file's text after the plan is written into it."""
    document = formats.read_config(text, file)
    where = find_site(document, builtin_targets(), origin=file, name=name)
    draft = draft_edits(where, document, plan, file=file)
    return document.edit({edit.path: edit.after for edit in draft.edits}, add=True), draft


def shown(name: str, file: str, text: str, plan: Plan) -> Reading:
    """What the file says to `show`, on the plan's GPUs."""
    document = formats.read_config(text, file)
    where = find_site(document, builtin_targets(), origin=file, name=name)
    return interpret.interpret_config(
        where, document.entries(), gpus=plan.choice.gpus, nodes=count_nodes(plan)
    )


@pytest.mark.slow
@pytest.mark.parametrize("label", FILES)
def test_a_file_reads_back_as_the_plan_or_every_difference_is_warned_of(label: str) -> None:
    name, file, text = FILES[label]
    for one in GRID:
        after, draft = applied(name, file, text, one)
        found = shown(name, file, after, one)
        choice, _ = make_exact(one.choice, "plan")
        warned = {warning.field for warning in (*draft.warnings, *draft.missing.values())}
        left = find_differences(
            choice,
            interpret.make_setting(found, gpus=choice.gpus),
            plan_sequence_length(one),
            found.number("seq"),
        )
        if name in PARTIAL:
            left = [row for row in left if row[0] in {"gpus", "allocator"}]
        unsaid = [row for row in left if row[0] not in warned and SAME_AS.get(row[0]) not in warned]
        assert not unsaid, (label, choice, unsaid, sorted(warned), after)
        # What the file says that no plan has is warned of too, under the same key.
        keys = {warning.key for warning in draft.warnings}
        assert not [warning for warning in found.warnings if not any(warning.key in key for key in keys)]
        again, more = applied(name, file, after, one)
        assert (again, more.edits) == (after, [])


def test_the_grid_has_every_pair_of_choices() -> None:
    pairs = {
        (left, right)
        for one in GRID
        for left, right in product(
            (one.choice.strategy.value, one.choice.precision.value),
            (one.choice.recompute.value, one.choice.compile),
        )
    }
    assert len(pairs) == (4 + len(Precision)) * (3 + 2)


# --- what a user met ---

TWO = Setting(
    strategy=Strategy.FSDP,
    mesh=Mesh(dp_shard=8),
    micro_batch=2,
    accumulation=4,
    global_batch=64,
    precision=Precision.BF16,
    recompute=Recompute.FULL,
)


def changed(name: str, plan: Plan, held: tuple[str, str]) -> tuple[dict[str, object], dict[str, str]]:
    """What is written by key, and every warning by key."""
    _, draft = applied(name, *held, plan)
    return {edit.key: edit.after for edit in draft.edits}, {
        warning.key: warning.text for warning in draft.warnings
    }


def test_torchtitan_gets_the_plans_sequence_length() -> None:
    edits, _ = changed("torchtitan", plan(TWO, seq=4096), samples.CONTRADICTING["torchtitan"])
    assert edits["training.seq_len"] == 4096
    assert edits["training.enable_cpu_offload"] is False


def test_accelerate_gets_all_that_fsdp_2_needs() -> None:
    edits, _ = changed("accelerate", plan(TWO), samples.MINIMAL["accelerate"])
    assert edits["distributed_type"] == "FSDP"
    assert edits["fsdp_config.fsdp_version"] == 2
    assert edits["fsdp_config.fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert edits["fsdp_config.fsdp_reshard_after_forward"] is True
    assert edits["fsdp_config.fsdp_activation_checkpointing"] is True


def test_deepspeed_offloads_no_longer() -> None:
    edits, warned = changed("deepspeed", plan(TWO), samples.CONTRADICTING["deepspeed"])
    assert edits["zero_optimization.offload_optimizer.device"] == "none"
    assert edits["zero_optimization.offload_param.device"] == "none"
    assert "optimizer.type" in warned  # another optimizer is another training


def test_a_qlora_config_of_axolotl_is_read_as_it_runs() -> None:
    file, text = samples.CONTRADICTING["axolotl"]
    document = formats.read_config(text, file)
    found = interpret.interpret_config(
        find_site(document, builtin_targets(), origin=file), document.entries(), gpus=1
    )
    assert found.facts["precision"] == "bf16"  # bf16: auto, with the adapter's weights in fp32
    assert found.facts["seq"] == 77
    assert {"sample_packing", "rl"} <= {warning.key for warning in found.warnings}
    assert found.facts["base"] == "nf4-double"  # Axolotl's own default
    assert found.facts["offload_activations"] == "true"
    whole = text.replace("adapter: qlora\n", "").replace("load_in_4bit: true", "load_in_4bit: false")
    document = formats.read_config(whole, file)
    where = find_site(document, builtin_targets(), origin=file)
    assert interpret.interpret_config(where, document.entries(), gpus=1).facts["precision"] == "bf16-true"
    # Without an adapter its rank counts for nothing.
    assert read_options(where.target.subject, (), document.entries()) == {}
    older = formats.read_config(whole.replace("bf16: auto", "bf16: auto\nfp16: true"), file)
    assert interpret.interpret_config(where, older.entries(), gpus=1).facts["precision"] == "fp16"


def test_an_adapter_that_the_plan_does_not_have_is_warned_of() -> None:
    one = plan(TWO, job="hf:model")
    assert (
        "the plan was made for lora none" in changed("axolotl", one, ("a.yaml", samples.AXOLOTL))[1]["lora_r"]
    )
    same = one.replace(options={"lora": 16})
    assert "lora_r" not in changed("axolotl", same, ("a.yaml", samples.AXOLOTL))[1]


def test_warnings_are_in_the_answer_beside_what_was_said(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(samples.CONTRADICTING["deepspeed"][1], encoding="utf-8")
    found = trimtab.apply(plan(TWO, seq=512), file, dry=True)
    keys = {one["key"]: one for one in found["warnings"]}
    assert keys["optimizer.type"]["value"] == "OneBitAdam"
    assert {"file", "key", "value", "field", "planned", "text"} <= set(keys["optimizer.type"])
    assert all(one["text"] in found["said"] for one in found["warnings"])


RUN_CLM = "output_dir: out\nper_device_train_batch_size: 4\nblock_size: 512\nmodel_name_or_path: {folder}\n"


@pytest.mark.parametrize("beside", [True, False], ids=["beside the file", "in the current folder"])
def test_show_finds_the_models_folder(beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    model = (elsewhere if beside else here) / "models" / "small"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(here)
    file = elsewhere / "run_clm.yaml"
    file.write_text(RUN_CLM.format(folder="models/small"), encoding="utf-8")
    job, sought = find_job(*opened(file))
    assert job is not None
    assert not sought
    assert Path(job.removeprefix("hf:")).resolve() == model


def test_show_says_where_it_looked_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    file = tmp_path / "conf" / "run_clm.yaml"
    file.write_text(RUN_CLM.format(folder="gone"), encoding="utf-8")
    job, sought = find_job(*opened(file))
    assert job is None
    looked = f"{tmp_path}/gone or in {tmp_path}/conf/gone"
    assert sought == f"model_name_or_path is gone, and there is no config.json in {looked}"
    found = trimtab.show(file, "T4")
    assert found.seq == 512
    assert any(sought in one and "--job hf:FOLDER" in one for one in found.said)


def opened(file: Path) -> tuple[ConfigTarget, OpenedConfig]:
    layout = find_layout(parse_aim(str(file)), builtin_targets(), opened=formats.read_config)
    assert layout.main is not None
    return layout.main.site.target, layout.main


def test_a_plan_finds_its_job_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Workload(name="mine", global_batch=8)
    monkeypatch.setattr(plan_files, "summarize_job", lambda *_: told)
    made, other, plans = (tmp_path / name for name in ("made", "other", "plans"))
    for folder in (made, other, plans):
        folder.mkdir()
    (made / "job.py").touch()
    setting = Setting(micro_batch=8, global_batch=8)
    one = plan(setting, job="job.py:Mine").replace(folder=str(made))
    file = plans / "plan.json"
    file.write_text(one.to_json(), encoding="utf-8")
    monkeypatch.chdir(other)
    found, note = plan_from(file)
    assert found.job == f"{made}/job.py:Mine"
    assert note == f"job.py is {made}/job.py: paths in a plan start where it was made."
    # Another file of that name in the current folder is not the plan's job.
    (other / "job.py").touch()
    assert plan_from(file)[0].job == f"{made}/job.py:Mine"
    (other / "job.py").unlink()
    (made / "job.py").rename(plans / "job.py")
    assert plan_from(file)[0].job == f"{plans}/job.py:Mine"
    (plans / "job.py").unlink()
    _, note = plan_from(file)
    assert note.startswith(
        "job.py is not here: whether the plan still holds for it was not checked. Looked in"
    )
    assert all(str(folder) in note for folder in (made, other, plans))
