"""Plans written into files and folders, stages, `show`, and the commands around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import config_samples as samples
import trimtab
from test_cli import trimtab_cli
from test_targets import ESTIMATE, FSDP, SINGLE, plan
from trimtab.configs import formats
from trimtab.configs.apply import find_layout, parse_aim, propose_edits
from trimtab.configs.files import write_files
from trimtab.configs.show import Display, build_display, find_job
from trimtab.configs.targets import builtin_targets, find_target
from trimtab.errors import NothingFits, UnknownName, WrongUse
from trimtab.planner.plan_files import rebuild_cluster
from trimtab.spec import Band, Footprint, Precision, RankPlacement, Recompute, Setting
from trimtab.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.configs.apply import Proposal
    from trimtab.spec import Estimate, Plan

STAGES = {1: (32, 24), 2: (16, 8), 3: (64, 8)}


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """The layout of a curriculum: a main config, stages in a folder of their own, and a chain."""
    folder = tmp_path / "conf"
    (folder / "curriculum").mkdir(parents=True)
    (folder / "config.yaml").write_text(samples.HYDRA, encoding="utf-8")
    (folder / "curriculum" / "chain.yaml").write_text("stages: [{name: a}, {name: b}]\n", encoding="utf-8")
    for number, (positives, negatives) in STAGES.items():
        text = samples.STAGE.format(number=number, positives=positives, negatives=negatives)
        (folder / "curriculum" / f"{number:02}_stage.yaml").write_text(text, encoding="utf-8")
    return folder


MAIN = plan(Setting(micro_batch=16, accumulation=16, global_batch=256, precision=Precision.FP16)).replace(
    options={"negatives": 24}
)


def by_negatives(options: dict[str, Any]) -> Plan:
    """Fewer negatives leave room for more anchors."""
    micro = 384 // (options["negatives"] + 2) // 6 * 6
    return plan(MAIN.choice.replace(micro_batch=micro, accumulation=-(-256 // micro)))


def proposal(*to: Path | str, plan: Plan = MAIN, name: str | None = None) -> Proposal:
    return propose_edits(
        [parse_aim(str(place)) for place in to],
        plan,
        builtin_targets(),
        opened=formats.read_config,
        name=name,
        replan=by_negatives,
    )


def values(found: Proposal) -> dict[tuple[str, str], Any]:
    return {(edit.file.rpartition("/")[2], edit.key): edit.after for edit in found.edits}


def test_stages_get_their_own_cut_of_one_global_batch(conf: Path) -> None:
    found = proposal(conf)
    wrote = values(found)
    # The main config is safe for every stage.
    assert wrote["config.yaml", "data_loader.batch_size"] == 16
    assert ("01_stage.yaml", "batch_size") not in wrote  # as the main config has it
    assert wrote["02_stage.yaml", "batch_size"] == 32
    assert wrote["02_stage.yaml", "accumulate_grad_batches"] == 8
    for stage in found.stages:
        assert stage.setting.micro_batch * stage.setting.accumulation == 256
        assert stage.estimate == ESTIMATE
    assert [stage.name for stage in found.stages] == ["01_stage", "02_stage", "03_stage"]
    assert any("only where your trainer reads them" in one for one in found.said)
    (second,) = [edited for edited in found.prepare() if edited.file.endswith("02_stage.yaml")]
    assert second.after.decode().startswith(samples.STAGE.format(number=2, positives=16, negatives=8))
    done = write_files(found.prepare(), words="a test")
    assert len(done.files) == 3
    assert values(proposal(conf)) == {}
    for file in done.files:
        trimtab.revert(file)
    assert values(proposal(conf)) == wrote


def test_positives_change_nothing_in_memory(conf: Path) -> None:
    asked: list[dict[str, Any]] = []

    def replan(options: dict[str, Any]) -> Plan:
        asked.append(options)
        return MAIN

    propose_edits([parse_aim(str(conf))], MAIN, builtin_targets(), opened=formats.read_config, replan=replan)
    assert asked == [{"negatives": 8}]  # two stages with other positives and the same negatives: once


def test_a_stage_nested_in_its_group_is_written_where_it_is(conf: Path) -> None:
    nested = "curriculum:\n  name: third\n  n_positives: 1\n  n_negatives: 8\n"
    (conf / "curriculum" / "03_stage.yaml").write_text(nested, encoding="utf-8")
    assert values(proposal(conf))["03_stage.yaml", "curriculum.batch_size"] == 32


def test_a_single_stage_can_be_named(conf: Path) -> None:
    found = proposal(conf / "curriculum" / "02_stage.yaml")
    assert values(found) == {
        ("02_stage.yaml", "batch_size"): 32,
        ("02_stage.yaml", "accumulate_grad_batches"): 8,
    }


def test_a_job_that_does_not_know_the_stages_options_runs_them_all_alike(conf: Path) -> None:
    def replan(_: dict[str, Any]) -> Plan:
        raise UnknownName("option negatives=8", found="the job has no option 'negatives'", cure="")

    found = propose_edits(
        [parse_aim(str(conf))], MAIN, builtin_targets(), opened=formats.read_config, replan=replan
    )
    assert {stage.setting.micro_batch for stage in found.stages} == {16}
    assert any("no option 'negatives'" in one for one in found.said)


def test_a_stage_for_which_nothing_fits_is_named(conf: Path) -> None:
    def replan(_: dict[str, Any]) -> Plan:
        raise NothingFits("naics on T4", found="nothing fits", cure="Use two GPUs.")

    with pytest.raises(NothingFits, match="stage 02_stage: naics on T4"):
        propose_edits(
            [parse_aim(str(conf))], MAIN, builtin_targets(), opened=formats.read_config, replan=replan
        )


def test_a_broken_stage_stops_everything(conf: Path) -> None:
    broken = "n_negatives: 8\nname: a\npositive_level: 1\npositive_level: 2\n"
    (conf / "curriculum" / "02_stage.yaml").write_text(broken, encoding="utf-8")
    before = {path: path.read_bytes() for path in conf.rglob("*.yaml")}
    with pytest.raises(WrongUse, match=r"02_stage\.yaml.*positive_level"):
        trimtab.apply(MAIN, conf)
    assert before == {path: path.read_bytes() for path in conf.rglob("*.yaml")}


def test_what_one_file_lacks_another_may_hold(tmp_path: Path) -> None:
    (tmp_path / "args.yaml").write_text(samples.ARGUMENTS_YAML, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(samples.ACCELERATE, encoding="utf-8")
    alone = proposal(tmp_path / "args.yaml", plan=plan(FSDP))
    assert any("torchrun" in one for one in alone.said)
    both = proposal(tmp_path / "args.yaml", tmp_path / "run.yaml", plan=plan(FSDP))
    assert not any("torchrun" in one or "batch_size=" in one for one in both.said)
    assert len({edit.file for edit in both.edits}) == 2


def test_the_same_file_named_twice_is_edited_once(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(samples.SLM, encoding="utf-8")
    twice = proposal(file, f"{file}:slm_config", plan=plan(SINGLE))
    assert len([edit for edit in twice.edits if edit.key == "slm_config.batch_size"]) == 1


def test_a_colon_may_be_part_of_a_name(tmp_path: Path) -> None:
    file = tmp_path / "a:b.yaml"
    file.write_text("x: 1", encoding="utf-8")
    assert parse_aim(str(file)).file == file
    found = parse_aim(f"{file}:x.y")
    assert (found.file, found.below) == (file, ("x", "y"))
    assert parse_aim("nowhere.yaml").below == ()


@pytest.mark.parametrize(
    ("name", "found"),
    [("nowhere", "no such file"), ("conf:a", "a folder has no keys"), ("empty", "none of its 0 files")],
)
def test_places_that_are_none_are_refused(conf: Path, name: str, found: str) -> None:
    (conf.parent / "empty").mkdir()
    with pytest.raises(WrongUse, match=found):
        proposal(f"{conf.parent}/{name}")


def test_a_folder_with_two_main_configs_asks_which(conf: Path) -> None:
    (conf / "other.yaml").write_text(samples.HYDRA, encoding="utf-8")
    with pytest.raises(WrongUse, match=r"it holds 2 configs: .*config.yaml.*other.yaml"):
        proposal(conf)


def test_hidden_folders_and_backups_are_not_looked_at(conf: Path) -> None:
    kept = conf / ".trimtab" / "backups" / "1"
    kept.mkdir(parents=True)
    (kept / "config.yaml").write_text(samples.HYDRA, encoding="utf-8")
    assert all(".trimtab" not in edit.file for edit in proposal(conf).edits)


@pytest.mark.parametrize(("nodes", "each"), [(1, 1), (1, 4), (2, 8)])
def test_a_plan_knows_its_devices_by_the_names_it_shows(nodes: int, each: int) -> None:
    name = "Quadro RTX 6000 24GB (Turing)"
    places = tuple(
        RankPlacement(node=node, node_name=f"node{node}", device=device, name=name)
        for node in range(nodes)
        for device in range(each)
    )
    found = rebuild_cluster(MAIN.replace(places=places))
    assert [len(node.devices) for node in found.nodes] == [each] * nodes
    assert {device.model for device in found.devices} == {name}


# --- written for real ---


def test_applied_twice_changes_nothing_and_reverted_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.py"
    file.write_text(samples.SLM, encoding="utf-8")
    done = trimtab.apply(plan(SINGLE), "config.py:slm_config")
    assert {one["key"]: (one["before"], one["after"]) for one in done["edits"]} == {
        "slm_config.batch_size": (18, 20),
        "slm_config.gradient_accumulation_steps": (None, 2),
    }
    assert done["backup"]
    wrote = file.read_text(encoding="utf-8")
    assert '"batch_size": 20,  # per GPU' in wrote
    again = trimtab.apply(plan(SINGLE), "config.py:slm_config")
    assert (again["edits"], again["backup"], again["diff"]) == ([], None, "")
    assert trimtab.revert("config.py")["restored"] == "config.py"
    assert file.read_text(encoding="utf-8") == samples.SLM


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(samples.DEEPSPEED, encoding="utf-8")
    found = trimtab.apply(plan(FSDP), file, dry=True)
    assert '+  "train_batch_size": 128' in found["diff"]
    assert found["written"] == []
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text(encoding="utf-8") == samples.DEEPSPEED


def test_a_computed_value_is_refused_or_written_beside(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text(samples.SLM.replace('"batch_size": 18', '"batch_size": 2 * 9'), encoding="utf-8")
    with pytest.raises(WrongUse, match=r"config.py:5.*2 \* 9"):
        trimtab.apply(plan(SINGLE), file)
    trimtab.apply(plan(SINGLE), file, beside=True)
    line = file.read_text(encoding="utf-8").splitlines()[4]
    assert '"batch_size": 20' in line
    assert "2 * 9" in line.partition("#")[2]


def test_a_value_that_another_key_gives_is_refused_or_replaced(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    text = samples.HYDRA.replace("batch_size: 4 ", "batch_size: ${sizes.batch} ")
    file.write_text(text, encoding="utf-8")
    with pytest.raises(WrongUse, match=r"config.yaml:9: .*worked out from sizes.batch.*--beside"):
        trimtab.apply(plan(SINGLE), file)
    assert file.read_text(encoding="utf-8") == text
    trimtab.apply(plan(SINGLE), file, beside=True)
    assert "batch_size: 20 " in file.read_text(encoding="utf-8")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A plan of a job that is not on this machine."""
    file = tmp_path / "plan.json"
    file.write_text(plan(FSDP).replace(job=f"{tmp_path}/gone.py:Mine").to_json(), encoding="utf-8")
    (tmp_path / "ds.json").write_text(samples.DEEPSPEED, encoding="utf-8")
    return file


@pytest.mark.slow
def test_the_command_shows_a_diff_and_writes_only_with_a_yes(saved: Path) -> None:
    config = saved.parent / "ds.json"
    done = trimtab_cli("apply", str(saved), "--to", str(config))
    assert done.returncode == 0, done.stderr
    assert '+  "train_batch_size": 128,' in done.stdout
    assert "nothing was written; --yes writes" in done.stderr
    # A path is never broken, however long the folder's name is.
    gone = f"{saved.parent}/gone.py"
    assert f"{gone} is not here" in " ".join(done.stderr.split())
    assert gone in done.stderr
    assert config.read_text(encoding="utf-8") == samples.DEEPSPEED
    assert max(map(len, (done.stdout + done.stderr).splitlines())) <= 80 + len(str(config))
    told = json.loads(trimtab_cli("apply", str(saved), "--to", str(config), "--yes", "--json").stdout)
    assert told["backup"]
    assert {"file", "key", "before", "after"} <= set(told["edits"][0])
    assert json.loads(config.read_text(encoding="utf-8"))["train_batch_size"] == 128
    again = trimtab_cli("apply", str(saved), "--to", str(config), "--yes")
    assert "nothing to write" in again.stdout.replace("\n", " ")
    back = json.loads(trimtab_cli("revert", str(config), "--json").stdout)
    assert back["restored"] == str(config)
    assert config.read_text(encoding="utf-8") == samples.DEEPSPEED


def at_a_terminal(answer: str, *args: str) -> subprocess.CompletedProcess[bytes]:
    """The command as a person runs it, who types an answer."""
    ours, theirs = os.openpty()
    try:
        os.write(ours, answer.encode())
        return subprocess.run(
            [sys.executable, "-m", "trimtab", *args],
            stdin=theirs,
            capture_output=True,
            check=True,
            timeout=300,
        )
    finally:
        os.close(ours)
        os.close(theirs)


def test_going_back_asks_a_person_as_writing_does_and_not_a_script(saved: Path) -> None:
    config = saved.parent / "ds.json"
    at_a_terminal("y\n", "apply", str(saved), "--to", str(config))
    written = config.read_bytes()
    assert written != samples.DEEPSPEED.encode()
    refused = at_a_terminal("n\n", "revert", str(config))
    assert b'-  "train_batch_size": 128,' in refused.stdout
    assert b"Write this? [y/N]" in refused.stderr
    assert b"nothing was written; --yes writes" in refused.stderr
    assert config.read_bytes() == written
    assert b"put back" in at_a_terminal("y\n", "revert", str(config)).stdout
    assert config.read_bytes() == samples.DEEPSPEED.encode()


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["apply"], 2, "there is no PLAN"),
        (["apply", "plan.json"], 2, "no config file is named"),
        (["apply", "nowhere.json", "--to", "ds.json"], 2, "cannot be read"),
        (["apply", "ds.json", "--to", "ds.json"], 2, "not a Plan"),
        (["apply", "plan.json", "--to", "nowhere.yaml"], 2, "no such file"),
        (["apply", "plan.json", "--to", "ds.json", "--target", "deepsped"], 2, "the nearest is deepspeed"),
        (["show", "nowhere"], 2, "no such file"),
        (["revert", "ds.json"], 2, "ds.json"),
    ],
)
def test_wrong_use_of_the_commands_is_an_error_in_three_parts(
    saved: Path, args: list[str], code: int, said: str
) -> None:
    there = [str(saved.parent / arg) if arg.endswith((".json", ".yaml", "where")) else arg for arg in args]
    done = trimtab_cli(*there, "--json")
    assert done.returncode == code, done.stderr
    error = json.loads(done.stdout)["error"]
    assert said in f"{error['given']} {error['found']}"
    assert error["cure"]


def test_the_targets_are_listed() -> None:
    done = trimtab_cli("apply", "--list-targets", "--json")
    assert [load["name"] for load in json.loads(done.stdout)["targets"]] == [
        builtin_target.name for builtin_target in builtin_targets()
    ]
    plain = trimtab_cli("apply", "--list-targets").stdout
    assert max(map(len, plain.splitlines())) <= 80
    assert "hydra-lightning" in plain


# --- show ---


class Oracle:
    """Memory and time by made-up laws: 1 GiB a sample of an anchor with 26 texts, less with fewer."""

    def __init__(self, gib: float = 24.0, *, knows: bool = True) -> None:
        self.gib, self.knows = gib, knows
        self.asked: list[Setting] = []

    def estimate(self, options: dict[str, Any], setting: Setting) -> Estimate:
        self.asked.append(setting)
        if options and not self.knows:
            raise UnknownName("option negatives=24", found="the job has no option", cure="")
        texts = (options.get("negatives", 24) + 2) / 26
        need = int((1 + setting.micro_batch * texts) * GIB)
        room = int(self.gib * GIB)
        return ESTIMATE.replace(
            process_bytes=need,
            capacity_bytes=room,
            fits=need <= room,
            band=Band(low_bytes=need, high_bytes=need),
            parts=Footprint(),
            step_s=setting.accumulation * (0.1 + 0.01 * setting.micro_batch),
            mfu_rating="fair",
        )

    def better(self, options: dict[str, Any], setting: Setting) -> Plan:
        for micro in range(setting.global_batch, 0, -1):
            choice = setting.replace(micro_batch=micro, accumulation=-(-setting.global_batch // micro))
            found = self.estimate(options, choice)
            if found.fits and setting.global_batch % micro == 0:
                return plan(choice).replace(estimate=found)
        raise NothingFits("it", found="nothing", cure="Use two GPUs.")


def shown(place: Path | str, oracle: Oracle | None, gpus: int | None = 1) -> Display:
    layout = find_layout(parse_aim(str(place)), builtin_targets(), opened=formats.read_config)
    target = layout.main.site.target if layout.main else find_target("hydra-lightning", builtin_targets())
    return build_display(layout, target, job="naics" if oracle else None, gpus=gpus, device="T4", seer=oracle)


def test_what_a_layouts_model_does_without_a_key_is_assumed_and_said(conf: Path) -> None:
    found = shown(conf, Oracle())
    assert {stage.setting.recompute for stage in found.stages} == {Recompute.FULL}
    assert any("recompute full is assumed" in one for one in found.said)


def test_every_stage_is_shown_with_its_memory_and_advice_with_numbers(conf: Path) -> None:
    found = shown(conf, Oracle())
    first, second, _ = found.stages
    assert found.global_batch == 64
    assert (first.name, first.memory_bytes) == ("01_stage", 5 * GIB)
    assert first.utilization == pytest.approx(5 / 24)
    assert second.memory_bytes is not None
    assert second.memory_bytes < 5 * GIB  # fewer negatives, fewer texts
    (advice,) = first.advice
    assert advice == (
        "micro-batch 4 x 16 uses 21% of this GPU: micro-batch 16 x 4 keeps 64 exactly and uses 71% of this "
        "GPU; it would be 2.2 x as fast (1s a step instead of 2.2s)"
    )
    assert first.options["negatives"] == 24
    assert first.options["rank"] == 8


def test_a_stage_that_does_not_fit_says_what_would(conf: Path) -> None:
    file = conf / "config.yaml"
    file.write_text(samples.HYDRA.replace("batch_size: 4", "batch_size: 64"), encoding="utf-8")
    first = shown(conf, Oracle()).stages[0]
    assert (first.fits, first.rating) == (False, "does not fit")
    assert "needs 65.0 GiB of 24.0 GiB: micro-batch 16 x 64 keeps 1024 exactly" in first.advice[0]
    nothing = shown(conf, Oracle(gib=1.5)).stages[0]
    assert nothing.advice == ("nothing fits with a global batch of 1024: Use two GPUs.",)


def test_what_is_as_good_as_it_gets_is_left_alone(conf: Path) -> None:
    file = conf / "config.yaml"
    text = samples.HYDRA.replace("batch_size: 4", "batch_size: 16").replace("batches: 16", "batches: 4")
    file.write_text(text, encoding="utf-8")
    assert "is as fast as anything that keeps 64" in shown(file, Oracle()).stages[0].advice[0]


def test_a_job_without_the_options_is_estimated_without_them_and_that_is_said(conf: Path) -> None:
    found = shown(conf, Oracle(knows=False))
    assert found.stages[0].memory_bytes == 5 * GIB
    assert any("negatives=24 is left out" in one for one in found.said)


def test_without_a_job_the_settings_are_shown_and_the_job_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(samples.DEEPSPEED, encoding="utf-8")
    found = shown(file, None, gpus=4)
    assert found.stages[0].memory_bytes is None
    assert any("--job" in one for one in found.said)
    assert any("asks for 8 GPUs, and there are 4" in one for one in found.said)
    assert {one.key for one in found.found} >= {"train_batch_size", "zero_optimization.stage"}


def test_the_folder_of_a_model_is_its_job(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yaml"
    file.write_text(samples.AXOLOTL, encoding="utf-8")
    layout = find_layout(parse_aim(str(file)), builtin_targets(), opened=formats.read_config)
    assert layout.main is not None
    assert find_job(layout.main.site.target, layout.main)[0] is None
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    assert find_job(layout.main.site.target, layout.main)[0] == f"hf:{tmp_path}/model"


SHARDED = '{"output_dir": "o", "per_device_train_batch_size": 4, "fsdp": "full_shard auto_wrap"}'


@pytest.mark.parametrize(
    ("text", "gpus", "said"),
    [
        (SHARDED, None, "strategy is fsdp, and the file does not say on how many GPUs: without --on one is"),
        (SHARDED, 1, "strategy is fsdp, and one GPU is looked at: on one it runs as single. --on"),
        (SHARDED, 4, None),
        (SHARDED.replace("full_shard auto_wrap", ""), None, None),
    ],
)
def test_a_sharded_config_on_one_gpu_says_why_it_runs_as_single(
    text: str, gpus: int | None, said: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "args.json"
    file.write_text(text, encoding="utf-8")
    target = find_target("transformers", builtin_targets())
    layout = find_layout(
        parse_aim(str(file)), builtin_targets(), opened=formats.read_config, name="transformers"
    )
    shown = build_display(layout, target, job=None, gpus=gpus, device=None, seer=None)
    assert shown.stages[0].setting.strategy == ("fsdp" if gpus == 4 else "single")
    told = [one for one in shown.said if "strategy" in one]
    assert len(told) == (said is not None)
    assert all(str(said) in one for one in told)


@pytest.mark.slow
def test_show_estimates_a_config_for_real(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    keys = ("n_layer", "n_head", "n_embd", "max_length")
    small = dict(zip(keys, (2, 2, 64, 64), strict=True))
    lines = [f'    "{key}": {value},' for key, value in small.items()]
    text = "slm_config = {\n" + "\n".join(lines) + '\n    "batch_size": 2,\n    "enable_amp": True,\n}\n'
    file.write_text(text, encoding="utf-8")
    done = trimtab_cli("show", str(file), "--on", "T4", "--job", "slm:tiny", "--json")
    assert done.returncode == 0, done.stderr
    (stage,) = json.loads(done.stdout)["stages"]
    assert stage["memory_bytes"] > 0
    assert 0 < stage["utilization"] < 1
    assert stage["advice"]
    plain = trimtab_cli("show", str(file), "--on", "T4", "--job", "slm:tiny")
    assert max(map(len, plain.stdout.splitlines())) <= 80 + len(str(tmp_path))
    file.write_text(text.replace("}", '    "amp_dtype": "bf16",\n}'), encoding="utf-8")
    emulated = trimtab_cli("show", str(file), "--on", "T4", "--job", "slm:tiny")
    assert emulated.returncode == 0
    assert "does not compute in bf16" in emulated.stdout.replace("\n        ", " ")
