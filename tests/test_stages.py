"""Stages: a curriculum from YAML, planned with one global batch, trained one after the other."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import trimtab
from test_targets import ESTIMATE
from trimtab.cli.options import job_options
from trimtab.errors import TrimtabError, UnknownName, WrongUse
from trimtab.jobs.naics.pairs import read_pairs
from trimtab.jobs.naics.stages import SHIPPED, find_stage, read_stages
from trimtab.jobs.yaml_files import read_yaml
from trimtab.spec import IncidentKind, Plan, PlannedStage, Setting, Stage, StagedPlan
from trimtab.training.run_folder import RunFolder
from trimtab.training.stages import StageChain, run_stages
from trimtab.training.task import RunEnding

if TYPE_CHECKING:
    from pathlib import Path

CHAIN = "chain_default.yaml"
ONE = "n_positives: 8\n"
"""Enough for a file to be a stage."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return shutil.copytree(SHIPPED, tmp_path / "conf")


def write(conf: Path, name: str, text: str) -> Path:
    file = conf / "curriculum" / name
    file.write_text(text, encoding="utf-8")
    return conf


# YAML


def test_numbers_are_numbers_and_lines_are_known(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("rate: 2e-4\nmore:\n  - {n: 8, text: '8'}\n  - yes\nempty:\n", encoding="utf-8")
    page = read_yaml(file)
    assert page.values == {"rate": 2e-4, "more": [{"n": 8, "text": "8"}, True], "empty": None}
    assert page.at("more", 0, "n").endswith("line 3")
    assert page.at("more").endswith("line 2")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", "c occurs twice, on lines 3 and 5"),
        ("a: [1\n", "line 2.*expected"),
        ("- a\n- b\n", "contains a list"),
        ("a: !odd 1\n", "the tag !odd is not supported"),
        ("<<: {a: 1}\nb: 2\n", "is not supported.*Write the keys out"),
        ("[a, b]: 2\n", "is not supported"),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
        ("a: &x [*x]\n", "too deep|recursive"),
        ("a: \x01\n", "not allowed|cannot|special characters|unacceptable|control"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, found: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(WrongUse, match=found):
        read_yaml(file)


def test_a_bomb_of_aliases_and_a_file_that_is_no_text_are_refused(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    for number in range(1, 9):
        bomb += f"a{number}: &a{number} [{', '.join([f'*a{number - 1}'] * 9)}]\n"
    (tmp_path / "bomb.yaml").write_text(bomb, encoding="utf-8")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(WrongUse, match="too large or too deep"):
        read_yaml(tmp_path / "bomb.yaml")
    with pytest.raises(WrongUse, match="not text"):
        read_yaml(tmp_path / "bytes.yaml")
    with pytest.raises(WrongUse, match="cannot be read"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n", encoding="utf-8")
    assert read_yaml(tmp_path / "empty.yaml").values == {}


# stage files


def test_the_stages_that_ship_are_those_on_record() -> None:
    found = read_stages("")
    assert [one.name for one in found] == [f"0{number}_stage" for number in range(1, 6)]
    assert [(one.options["positives"], one.options["negatives"]) for one in found] == [
        (32, 24),
        *[(16, 8)] * 4,
    ]
    assert [(one.epochs, one.rate) for one in found][:3] == [(5, 2e-4), (8, 1e-4), (10, 5e-5)]
    assert {one.options["global_batch"] for one in found} == {256}
    # Their main config says what the job is by itself: only what a stage changes is left to say.
    own = trimtab.load("naics").stages()
    assert set(own[0].options) == {"pairs"}
    assert set(own[1].options) == {"pairs", "positives", "negatives", "rate", "epochs"}
    for one in own:
        assert len(trimtab.load("naics:tiny", **one.options).dataset()) == 320


def test_the_shapes_of_real_files_are_understood(conf: Path) -> None:
    write(
        conf,
        "03_stage.yaml",
        "name: 03_stage\ncurriculum:\n  n_positives: 4\n  n_negatives: 6\n  anchor_level: [5, 6]\n",
    )
    write(conf, "04_stage.yaml", "n_negatives: 3\nn_positives: 2\npositive_relation: [1, 3]\nbatch_size: 7\n")
    (conf / "curriculum").rename(conf / "text_curriculum")
    main = conf / "config.yaml"
    more = "defaults: [_self_]\ndirs: {logs: ./logs}\n"
    main.write_text(
        more + main.read_text(encoding="utf-8").replace("max_epochs: 5", "devices: 2\n    max_epochs: 5")
    )
    found = {read_stage.name: read_stage for read_stage in read_stages(str(conf))}
    assert found["03_stage"].options["pairs"] == {"anchor_level": [5, 6]}
    assert found["04_stage"].options["positives"] == 2
    assert read_pairs(found["04_stage"].options["pairs"]).positive_relation == (
        "child",
        "sibling",
    )
    assert found["04_stage"].options["global_batch"] == 512


def test_without_a_chain_stages_come_in_the_order_of_their_names(conf: Path) -> None:
    (conf / "curriculum" / "chain_default.yaml").unlink()
    found = read_stages(str(conf / "curriculum"))
    assert [one.name for one in found] == [f"0{number}_stage" for number in range(1, 6)]
    assert found[0].epochs is None
    assert {read_stage.epochs for read_stage in read_stages(str(conf))} == {5}


@pytest.mark.parametrize(
    ("name", "text", "error", "found"),
    [
        (
            "02_stage.yaml",
            "positive_level: 5\nn_negatives: 8\npositive_level: 6\n",
            WrongUse,
            "lines 1 and 3",
        ),
        ("02_stage.yaml", "n_negatives: 0\n", WrongUse, "line 1: n_negatives: 0: at least one negative"),
        ("02_stage.yaml", "n_positives: 0\n", WrongUse, "leaves no rows"),
        ("02_stage.yaml", "n_negatives: eight\n", WrongUse, "not a whole number"),
        ("02_stage.yaml", "n_negatives: true\n", WrongUse, "not a whole number"),
        (
            "02_stage.yaml",
            f"n_negative: 8\n{ONE}",
            UnknownName,
            "line 1: .*n_negative; did you mean n_negatives",
        ),
        ("02_stage.yaml", f"{ONE}positive_relation: sibbling\n", UnknownName, "line 2.*did you mean sibling"),
        ("02_stage.yaml", f"{ONE}positive_relation: 99\n", UnknownName, "no such relation"),
        ("02_stage.yaml", f"{ONE}anchor_level: 7\n", WrongUse, "line 2.*not one of 2 to 6"),
        ("02_stage.yaml", f"{ONE}anchor_level: []\n", WrongUse, "the list is empty"),
        ("02_stage.yaml", f"{ONE}distance_margin: far\n", WrongUse, "not one of 0 to 10"),
        ("02_stage.yaml", f"{ONE}name: ../up\n", WrongUse, "cannot be the name of a folder"),
        ("02_stage.yaml", f"{ONE}name: 01_stage\n", WrongUse, "both have this name"),
        ("06_notes.yaml", "remember: this\n", WrongUse, "is in a folder of stages"),
        (CHAIN, "chain_name: x\nstages: []\n", WrongUse, "no list of stages"),
        (CHAIN, "stages:\n  - name: 01_stages\n", UnknownName, "did you mean 01_stage"),
        (CHAIN, "stages:\n  - max_epochs: 3\n", WrongUse, "has no name"),
        (CHAIN, "stages:\n  - {name: 01_stage, epochs: 3}\n", UnknownName, "did you mean max_epochs"),
        (CHAIN, "stages:\n  - {name: 01_stage, max_epochs: 0}\n", WrongUse, "above 0"),
        (CHAIN, "stages:\n  - {name: 01_stage, learning_rate: '2e-4'}\n", WrongUse, "text, in quotes"),
        (CHAIN, "stages:\n  - {name: 01_stage, learning_rate: -1}\n", WrongUse, "above 0"),
    ],
)
def test_a_stage_or_chain_that_cannot_be_is_refused(
    conf: Path, name: str, text: str, error: type[TrimtabError], found: str
) -> None:
    with pytest.raises(error, match=found):
        read_stages(str(write(conf, name, text)))


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        (
            "batch_size: 4",
            "batch_sizes: 4",
            "no key data_loader.batch_sizes; did you mean data_loader.batch_size",
        ),
        (
            "batch_size: 4",
            "batch_size: auto",
            "line 7: data_loader.batch_size: auto: it is not a whole number",
        ),
        ("learning_rate: 2e-4", "learning_rate: fast", "training.learning_rate: fast: it is not a number"),
        ("r: 8", "r: 0", "above 0"),
    ],
)
def test_a_main_config_that_cannot_be_is_refused(conf: Path, before: str, after: str, found: str) -> None:
    file = conf / "config.yaml"
    file.write_text(file.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
    with pytest.raises(WrongUse, match=found):
        read_stages(str(conf))


def test_a_folder_that_has_no_stages_is_refused(tmp_path: Path) -> None:
    for place, found in (
        (tmp_path / "none", "no such folder"),
        (SHIPPED / "config.yaml", "it is a file"),
        (tmp_path, "none of its 0 YAML files"),
    ):
        with pytest.raises(WrongUse, match=found):
            read_stages(str(place))


def test_a_stage_is_found_by_the_beginning_of_its_name_and_stands_for_its_options() -> None:
    job = trimtab.load("naics", stage="02")
    assert (job.negatives, job.positives, job.rate, job.epochs) == (8, 16, 1e-4, 8)
    assert trimtab.load("naics", negatives=3, stage="02").negatives == 3
    with pytest.raises(UnknownName, match=r"several start with it.*01_stage, 02_stage"):
        find_stage("0", read_stages(""))
    with pytest.raises(UnknownName, match="none of that name; did you mean"):
        trimtab.load("naics", stage="2_stage")


def test_what_a_stage_stands_for_is_written_out_for_caches_and_plans(conf: Path) -> None:
    given = [f"stage_files={conf}", "stage=02", "positives=5"]
    assert job_options("naics", given)["negatives"] == 8
    file = conf / "curriculum" / "02_stage.yaml"
    file.write_text(
        file.read_text(encoding="utf-8").replace("n_negatives: 8", "n_negatives: 7"), encoding="utf-8"
    )
    found = job_options("naics", given)
    assert (found["negatives"], found["positives"], found["rate"]) == (7, "5", 1e-4)
    assert found["pairs"]["anchor_level"] == [4, 5, 6]
    assert job_options("naics", ["negatives=3"]) == {"negatives": "3"}


@pytest.mark.parametrize("option", ["negatives", "positives"])
def test_nothing_to_tell_apart_is_refused_before_anything_is_built(option: str) -> None:
    with pytest.raises(WrongUse, match=f"n_{option} of 0"):
        trimtab.load("naics", **{option: 0})


# the chain


def ended(step: int, asked: str = "") -> RunEnding:
    return RunEnding(step=step, loss=0.5, out="-", asked=asked)


def test_stages_follow_each_other_and_go_on_where_they_ended(tmp_path: Path) -> None:
    chain = StageChain(job="naics", stages=(Stage(name="a"), Stage(name="b"), Stage(name="c")))
    seen: list[tuple[str, str]] = []
    stops = {"b"}

    def train(stage: Stage, place: Path, before: Path | None) -> RunEnding:
        assert place.name == stage.name
        seen.append((stage.name, before.name if before else ""))
        asked = "SIGTERM" if stage.name in stops else ""
        stops.discard(stage.name)
        return ended(3, asked)

    told: list[str] = []
    first = run_stages(chain, tmp_path / "out", train, told.append)
    assert first.asked == "SIGTERM"
    assert seen == [("a", ""), ("b", "a")]
    assert run_stages(chain, tmp_path / "out", train, told.append).step == 3
    assert seen[2:] == [("b", "a"), ("c", "b")]
    assert "stage a (1 of 3) has ended already" in told
    events = RunFolder(root=tmp_path / "out", main=False).read_events()
    assert [event.kind for event in events] == [IncidentKind.STAGE] * 3
    assert [event.why.split()[1] for event in events] == ["a", "b", "c"]
    # All of them have ended: nothing is trained.
    run_stages(chain, tmp_path / "out", train, told.append)
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"seed": 1}, "seed differ"),
        ({"steps": 9}, "steps differ"),
        ({"stages": (Stage(name="a"),)}, "the stages differ"),
        ({"stages": (Stage(name="a", rate=0.5), Stage(name="b"))}, "stage a differ"),
    ],
)
def test_a_folder_of_other_stages_is_refused(tmp_path: Path, change: dict[str, Any], found: str) -> None:
    chain = StageChain(job="naics", stages=(Stage(name="a"), Stage(name="b")))
    run_stages(chain, tmp_path, lambda *_: ended(1), lambda _: None)
    with pytest.raises(WrongUse, match=found):
        run_stages(chain.replace(**change), tmp_path, lambda *_: ended(1), lambda _: None)


def test_a_folder_of_a_plain_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    with pytest.raises(WrongUse, match="a run without stages"):
        run_stages(
            StageChain(job="a", stages=(Stage(name="a"),)), tmp_path, lambda *_: ended(1), lambda _: None
        )


@pytest.fixture
def two(conf: Path) -> Path:
    """The first stage, and the second with 6 negatives."""
    write(conf, "chain_default.yaml", "stages: [{name: 01_stage}, {name: 02_stage, learning_rate: 1e-4}]\n")
    file = conf / "curriculum" / "02_stage.yaml"
    file.write_text(
        file.read_text(encoding="utf-8").replace("n_negatives: 8", "n_negatives: 6"), encoding="utf-8"
    )
    return conf


def losses(folder: Path) -> list[float]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_training_over_two_stages_learns_survives_and_is_the_same(two: Path, tmp_path: Path) -> None:
    drill = tmp_path / "faults.json"
    drill.write_text('[{"kind": "terminate", "step": 5, "rank": 0}]', encoding="utf-8")
    out, calm = tmp_path / "out", tmp_path / "calm"

    def train(place: Path, **asked: Any) -> RunEnding:
        return trimtab.train_stages("naics:tiny", files=two, out=place, steps=16, **asked)

    # Each stage is asked to end at its fifth step, once.
    assert [train(out, faults=drill).asked for _ in range(3)] == ["SIGTERM", "SIGTERM", ""]
    assert train(calm).step == 16
    for name in ("01_stage", "02_stage"):
        assert losses(out / name) == pytest.approx(losses(calm / name), rel=1e-6)
    first, second = losses(calm / "01_stage"), losses(calm / "02_stage")
    assert sum(first[-4:]) < 0.4 * sum(first[:4])
    assert sum(second[-4:]) < 0.8 * sum(second[:4])
    kinds = [event.kind for event in RunFolder(root=out / "02_stage", main=False).read_events()]
    assert kinds.count(IncidentKind.STAGE) == 1
    assert len(RunFolder(root=out, main=False).read_events()) == 2
    # Weights are carried on: the same stage from fresh weights begins elsewhere.
    alone = json.loads((out / "02_stage" / "run.json").read_text(encoding="utf-8"))["options"]
    trimtab.train("naics:tiny", options=alone, out=tmp_path / "alone", steps=1)
    assert losses(tmp_path / "alone")[0] != pytest.approx(second[0], rel=1e-3)


@pytest.mark.slow
def test_every_stage_is_planned_with_one_global_batch(two: Path) -> None:
    pins = {"compile": False, "recompute": "none", "precision": "fp32"}
    found = trimtab.plan_stages("naics:tiny", "T4", files=two, options={"samples": 160}, pins=pins)
    assert [stage.stage.name for stage in found.stages] == ["01_stage", "02_stage"]
    assert {stage.plan.choice.global_batch for stage in found.stages} == {16} == {found.global_batch}
    first, second = (stage.plan for stage in found.stages)
    assert first.workload is not None
    assert second.workload is not None
    assert (first.workload.samples, second.workload.epochs) == (160, 5)
    assert second.options["negatives"] == 6
    assert first.estimate.hours is not None
    assert found.hours == pytest.approx(first.estimate.hours + (second.estimate.hours or 0))
    again = StagedPlan.from_json(found.to_json())
    assert again == found
    with pytest.raises(WrongUse, match="the plan is for other stages: 01_stage, 02_stage"):
        trimtab.train_stages("naics:tiny", found)
    with pytest.raises(WrongUse, match=r"no\.json: it cannot be read"):
        trimtab.train_stages("naics", "no.json")


def test_stages_of_one_plan_have_one_global_batch_and_a_name_each() -> None:
    def planned(name: str, batch: int) -> PlannedStage:
        setting = Setting(micro_batch=batch, global_batch=batch)
        return PlannedStage(stage=Stage(name=name), plan=Plan(job="a", choice=setting, estimate=ESTIMATE))

    both = StagedPlan(job="a", stages=(planned("a", 8), planned("b", 8)))
    assert (both.global_batch, both.hours) == (8, None)
    with pytest.raises(ValueError, match="global_batch differs between stages: \\[8, 16\\]"):
        StagedPlan(job="a", stages=(planned("a", 8), planned("b", 16)))
    with pytest.raises(ValueError, match="two stages are named a"):
        StagedPlan(job="a", stages=(planned("a", 8), planned("a", 8)))
    with pytest.raises(ValueError, match="no stage"):
        StagedPlan(job="a", stages=())
    with pytest.raises(WrongUse, match="the plan is for other stages: a, b"):
        trimtab.train_stages("naics:tiny", both)


def test_a_job_without_stages_and_a_rank_of_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WrongUse, match=r"it has no stages\(\)"):
        trimtab.plan_stages("slm:tiny", "T4")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WrongUse, match="a rank already"):
        trimtab.train_stages("naics:tiny")
