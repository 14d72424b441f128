"""Options of training commands that a config file sets: found, overridden, and changed in the file."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import trimtab
from script_commands import LIGHTNING, NANO, TRAINER
from test_script_plan import Script
from trimtab.catalog.clusters import parse_cluster
from trimtab.errors import UnknownName, WrongUse
from trimtab.planner.plan_files import read_checked_plan
from trimtab.scripts.apply import edit_text, list_missing_edits
from trimtab.scripts.command import parse_command
from trimtab.scripts.follow import follow_script
from trimtab.scripts.knob_values import read_split, read_word, write_setting
from trimtab.scripts.knobs import find_knobs, select_knobs
from trimtab.scripts.plan import plan_script
from trimtab.scripts.sources import read_sources
from trimtab.spec import Policy, ScriptCommand, Setting

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.scripts.knobs import KnobSet
    from trimtab.spec import Cluster, Plan

TRL = "from trl import TrlParser, SFTConfig\nparser = TrlParser((ScriptArguments, SFTConfig))\n"
JSON_ONLY = TRAINER + "if sys.argv[1].endswith('.json'):\n    parser.parse_json_file(sys.argv[1])\n"
PLAIN = """
import argparse, yaml
parser = argparse.ArgumentParser()
parser.add_argument("--config", default="conf.yaml")
"""
PLAIN_CONFIG = """# mine
train:
  batch_size: 8  # samples
  grad_accum: 8
  precision: fp32
  compile: false
val:
  batch_size: 99
"""
HYDRA = "@hydra.main(version_base=None, config_path='conf', config_name='main')\ndef main(cfg): ...\n"
HF_CONFIG = "per_device_train_batch_size: 8\ngradient_accumulation_steps: 4\nbf16: true\n"


def write_files(**texts: str) -> None:
    for name, text in texts.items():
        file = Path(name.replace("__", "/").replace("_dot_", "."))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def read_command(text: str) -> ScriptCommand:
    words = shlex.split(text)
    if words[0] in ("trl", "llamafactory-cli", "axolotl"):
        # The program itself is not installed here.
        return ScriptCommand(
            words=tuple(words),
            launcher="console",
            interpreter="python",
            target=f"/bin/{words[0]}",
            arguments=tuple(words[1:]),
        )
    return parse_command(words, environment={"PATH": "/nowhere"})


def find(text: str) -> tuple[ScriptCommand, KnobSet]:
    command = read_command(text)
    return command, find_knobs(command, read_sources(command))


STYLES = {
    "TrlParser": (
        {"train_dot_py": TRL, "a_dot_yaml": HF_CONFIG},
        "python train.py --config a.yaml",
        (8, 4, "bf16"),
        "python train.py --config a.yaml --per_device_train_batch_size 32 --gradient_accumulation_steps 1",
        (
            "per_device_train_batch_size: 32 instead of 8 in a.yaml",
            "gradient_accumulation_steps: 1 instead of 4 in a.yaml",
        ),
    ),
    "trl": (
        {"a_dot_yaml": HF_CONFIG},
        "trl sft --config a.yaml",
        (8, 4, "bf16"),
        "trl sft --config a.yaml --per_device_train_batch_size 32 --gradient_accumulation_steps 1",
        (
            "per_device_train_batch_size: 32 instead of 8 in a.yaml",
            "gradient_accumulation_steps: 1 instead of 4 in a.yaml",
        ),
    ),
    "a flag counts more than the file": (
        {"train_dot_py": TRL, "a_dot_yaml": "per_device_train_batch_size: 8\nbf16: false\n"},
        "python train.py --config a.yaml --per_device_train_batch_size 2 --gradient_accumulation_steps=3",
        (2, 3, "fp32"),
        "python train.py --config a.yaml --per_device_train_batch_size 6 --gradient_accumulation_steps=1",
        (
            "--per_device_train_batch_size 6 instead of --per_device_train_batch_size 2",
            "--gradient_accumulation_steps=1 instead of --gradient_accumulation_steps=3",
        ),
    ),
    "HfArgumentParser": (
        {"train_dot_py": JSON_ONLY, "a_dot_json": '{"per_device_train_batch_size": 8, "fp16": true}'},
        "python train.py a.json",
        (8, 1, "fp16"),
        None,
        (),
    ),
    "LightningCLI": (
        {
            "train_dot_py": LIGHTNING,
            "a_dot_yaml": "trainer:\n  precision: 16-mixed\n  accumulate_grad_batches: 4\n"
            "model:\n  dtype: float32\ndata:\n  batch_size: 8\n",
        },
        "python train.py fit --config a.yaml",
        (8, 4, "fp16"),
        "python train.py fit --config a.yaml --trainer.accumulate_grad_batches 1 --data.batch_size 32",
        (
            "trainer.accumulate_grad_batches: 1 instead of 4 in a.yaml",
            "data.batch_size: 32 instead of 8 in a.yaml",
        ),
    ),
    "LLaMA-Factory": (
        {"a_dot_yaml": "stage: sft\n" + HF_CONFIG},
        "llamafactory-cli train a.yaml",
        (8, 4, "bf16"),
        "llamafactory-cli train a.yaml per_device_train_batch_size=32 gradient_accumulation_steps=1",
        (
            "per_device_train_batch_size: 32 instead of 8 in a.yaml",
            "gradient_accumulation_steps: 1 instead of 4 in a.yaml",
        ),
    ),
    "axolotl": (
        {"a_dot_yaml": "base_model: m\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nfp16: true\n"},
        "axolotl train a.yaml",
        (2, 4, "fp16"),
        "axolotl train a.yaml",
        (
            "micro_batch_size: 8 instead of 2 in a.yaml",
            "gradient_accumulation_steps: 1 instead of 4 in a.yaml",
        ),
    ),
    "Hydra": (
        {
            "train_dot_py": HYDRA,
            "conf__main_dot_yaml": "defaults:\n  - data: small\n  - _self_\ntrainer:\n  accumulate: 4\n",
            "conf__data__small_dot_yaml": "batch_size: 8\nval_batch_size: 1\n",
            "conf__data__large_dot_yaml": "batch_size: 16\n",
        },
        "python train.py data=large",
        (16, 4, None),
        "python train.py data=large trainer.accumulate=1 data.batch_size=64",
        (
            "trainer.accumulate: 1 instead of 4 in conf/main.yaml",
            "batch_size: 64 instead of 16 in conf/data/large.yaml",
        ),
    ),
    "nanoGPT": (
        {"train_dot_py": NANO.partition("gradient_accumulation_steps //")[0], "a_dot_py": "batch_size = 6\n"},
        "python train.py a.py --gradient_accumulation_steps=2",
        (6, 2, None),
        "python train.py a.py --gradient_accumulation_steps=1 --batch_size=12",
        (
            "batch_size: 12 instead of 6 in a.py",
            "--gradient_accumulation_steps=1 instead of --gradient_accumulation_steps=2",
        ),
    ),
    "a file that only the script names": (
        {"train_dot_py": PLAIN, "conf_dot_yaml": PLAIN_CONFIG},
        "python train.py",
        (8, 8, "fp32"),
        "python train.py",
        ("train.batch_size: 64 instead of 8 in conf.yaml", "train.grad_accum: 1 instead of 8 in conf.yaml"),
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_a_config_file_is_read_overridden_and_changed(
    style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files, text, (micro, rounds, precision), typed, changes = STYLES[style]
    write_files(**files)
    command, knobs = find(text)
    assert read_split(knobs) == (micro, rounds)
    if precision is not None:
        assert read_word(knobs, "precision") == precision
    if typed is None:
        return
    setting = Setting(micro_batch=micro * rounds, accumulation=1, global_batch=micro * rounds)
    written, _ = write_setting(command, knobs, setting, now=setting)
    assert shlex.join(written.words) == typed
    _, notes = write_setting(command, knobs, setting, now=setting, in_files=True)
    assert notes == changes


def test_what_is_no_config_of_the_training_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(
        train_dot_py=PLAIN.replace("conf.yaml", "none.yaml"),
        data_dot_json='{"batch_size": 3}',
        broken_dot_yaml="a: [1",
        model_dot_yaml="batch_size: 4",
    )
    command = "python train.py --train_file data.json --config broken.yaml --model_config model.yaml"
    knobs = find(command)[1]
    assert knobs.of("micro_batch", "round_batch", "global_batch") == ()
    assert knobs.notes[0].startswith("the keys of broken.yaml are not used as options: broken.yaml:2")


def write_plain() -> None:
    write_files(train_dot_py=PLAIN, conf_dot_yaml=PLAIN_CONFIG)


@pytest.mark.parametrize("name", ["grad_accum", "train.grad_accum", "conf.yaml:train.grad_accum"])
def test_vary_names_a_key_in_several_ways(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_plain()
    command, knobs = find("python train.py")
    chosen = select_knobs(knobs, command, [f"{name}=4,8"])
    assert chosen.varied == ("conf.yaml:train.grad_accum",)
    with pytest.raises(WrongUse, match="is given twice"):
        select_knobs(knobs, command, ["train.grad_accum=4", f"{name}=2"])


def test_vary_refuses_keys_that_are_not_there_or_not_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(train_dot_py=PLAIN, conf_dot_yaml=PLAIN_CONFIG + "a:\n  depth: 1\nb:\n  depth: 2\n")
    command, knobs = find("python train.py")
    with pytest.raises(UnknownName, match=r"the nearest are .*train\.grad_accum"):
        select_knobs(knobs, command, ["train.grad_acum=1"])
    with pytest.raises(WrongUse, match=r"2 keys have this name: conf.yaml:a.depth, conf.yaml:b.depth"):
        select_knobs(knobs, command, ["depth=1,2"])
    assert select_knobs(knobs, command, ["b.depth=1,2"]).varied == ("conf.yaml:b.depth",)


def plan_plain(text: str = "python train.py") -> Plan:
    """Plan with a made-up script whose options are in conf.yaml."""
    command, knobs = find(text)
    sources = read_sources(command)

    def run(changed: ScriptCommand, cluster: Cluster, *, say: Callable[[str], None]) -> Any:
        config = edit_text(sources["conf.yaml"], "conf.yaml", changed.changes)
        files = {"train.py": PLAIN, "conf.yaml": config}
        return replace(Script(PLAIN)).run(changed, cluster, sources=files, say=say)

    return plan_script(command, parse_cluster("H100"), Policy(), knobs, run, sources=sources)


def test_a_plan_changes_a_config_that_no_option_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_plain()
    plan = plan_plain()
    assert plan.script is not None
    assert plan.script.command == "python train.py"
    assert [change.text for change in plan.script.edits] == [
        "train.batch_size: 64 instead of 8 in conf.yaml",
        "train.grad_accum: 1 instead of 8 in conf.yaml",
        "train.precision: bf16 instead of fp32 in conf.yaml",
        "train.compile: true instead of false in conf.yaml",
    ]
    assert plan.recommendation.startswith("Change the config as above")
    Path("plan.json").write_text(plan.to_json(), encoding="utf-8")
    assert len(list_missing_edits(plan)) == 4
    trimtab.apply("plan.json")
    assert Path("conf.yaml").read_text(encoding="utf-8") == PLAIN_CONFIG.replace(
        "batch_size: 8  #", "batch_size: 64  #"
    ).replace("grad_accum: 8", "grad_accum: 1").replace("fp32", "bf16").replace("false", "true")
    # The plan still holds for the files that it changed, and for no others.
    assert list_missing_edits(read_checked_plan(Path("plan.json"))[0]) == []
    assert trimtab.apply("plan.json")["diff"] == ""
    trimtab.revert("conf.yaml")
    read_checked_plan(Path("plan.json"))
    write_files(conf_dot_yaml=PLAIN_CONFIG.replace("99", "98"))
    with pytest.raises(WrongUse, match=r"conf\.yaml has changed"):
        read_checked_plan(Path("plan.json"))


def test_a_plan_overrides_a_config_where_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(
        train_dot_py=TRL, a_dot_yaml="per_device_train_batch_size: 8\ngradient_accumulation_steps: 8\n"
    )
    command, knobs = find("python train.py --config a.yaml")
    sources = read_sources(command)

    def run(changed: ScriptCommand, cluster: Cluster, *, say: Callable[[str], None]) -> Any:
        return Script(TRL).run(changed, cluster, sources=sources, say=say)

    plan = plan_script(command, parse_cluster("H100"), Policy(), knobs, run, sources=sources)
    assert plan.script is not None
    assert plan.script.command.startswith("python train.py --config a.yaml --per_device_train_batch_size ")
    assert plan.script.command_after_apply == "python train.py --config a.yaml"
    assert {change.file for change in plan.script.edits} == {"a.yaml"}
    assert [change.after for change in plan.script.edits if change.key == ("bf16",)] == [True]


SCRIPT = """
import torch, yaml
size = yaml.safe_load(open("conf.yaml"))["train"]["batch_size"]
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(size, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_script_finds_the_changed_config_and_the_user_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.chdir(tmp_path)
    write_files(train_dot_py=SCRIPT, conf_dot_yaml=PLAIN_CONFIG)
    command = parse_command([sys.executable, "train.py"], environment={})
    knobs = find_knobs(command, read_sources(command))
    setting = Setting(micro_batch=4, accumulation=16, global_batch=64)
    changed, _ = write_setting(command, knobs, setting, now=setting)
    result = follow_script(changed, parse_cluster("H100").devices[0])
    assert result.micro_batches[0][0] == 4
    assert Path("conf.yaml").read_text(encoding="utf-8") == PLAIN_CONFIG
