"""`trimtab plan` from the outside, on a job small enough to trace for real."""

from __future__ import annotations

import io
import json
import os
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

import trimtab
from outlooks import Law, workload
from test_cli import trimtab_cli
from test_planner import planned
from trimtab import render
from trimtab.errors import WrongUse
from trimtab.jobs.job import Job
from trimtab.predict.calibration import shipped_calibrations, write_own_calibration
from trimtab.spec import Objective, Plan, Rejection
from trimtab.trace.job_summary import describe_job
from trimtab.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("plan command")  # its fixture is made once

JOB = """
import torch
from sizes import WIDTH


class Tiny:
    name = "tiny"
    global_batch, samples, epochs = 6, 100, 2

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))

    def batch(self, size):
        return torch.randn(size, WIDTH)

    def loss(self, model, batch):
        return model(batch).square().mean()


class Zero(Tiny):
    global_batch = 0


class Broken(Tiny):
    def loss(self, model, batch):
        raise RuntimeError("no such thing")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("job")
    (place / "job.py").write_text(JOB, encoding="utf-8")
    (place / "sizes.py").write_text("WIDTH = 64\n", encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**os.environ, "TRIMTAB_CACHE": str(tmp_path_factory.mktemp("cache"))}


PINS = ("--pin", "gpus=1", "--pin", "recompute=none", "--pin", "compile=false", "--pin", "micro_batch=6")


def test_a_plan_is_made_written_and_read_back(
    folder: Path, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "plan.json"
    job = f"{folder}/job.py:Tiny"
    done = trimtab_cli("plan", job, "--on", "2xA100-40GB", *PINS, "--json", "--out", str(out), env=env)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["choice"]["micro_batch"] == 6
    assert told["choice"]["gpus"] == 1
    assert set(told["workload"]["files"]) == {"job.py", "sizes.py"}
    assert Plan.from_json(out.read_text(encoding="utf-8")).to_builtins() == told
    monkeypatch.setenv("TRIMTAB_CACHE", env["TRIMTAB_CACHE"])
    assert trimtab.read_plan(out, on="A100-40GB").to_builtins() == told
    with pytest.raises(WrongUse, match="the plan needs 1 x A100 40GB SXM4, and there is 1 x Tesla T4"):
        trimtab.read_plan(out, on="T4")
    with pytest.raises(WrongUse, match=r"the job was job.py:Tiny, and is job.py:Broken"):
        trimtab.read_plan(out, job=f"{folder}/job.py:Broken")
    (folder / "sizes.py").write_text("WIDTH = 32\n", encoding="utf-8")
    with pytest.raises(WrongUse, match=r"it is stale: sizes.py has changed.*trimtab plan"):
        trimtab.read_plan(out)


@pytest.mark.slow
def test_a_plan_is_made_anew_once_the_user_has_calibrated(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRIMTAB_CALIBRATIONS", str(tmp_path / "calibrations"))

    def step_s() -> float | None:
        pins = {"gpus": 1, "recompute": "none", "compile": False, "micro_batch": 6}
        return trimtab.plan(f"{folder}/job.py:Tiny", "H200", pins=pins).estimate.step_s

    by_the_shipped_one = step_s()
    own = next(one for one in shipped_calibrations() if one.device == "H200 SXM 141GB")
    write_own_calibration(own.replace(host={**own.host, "forward_s": 10 * own.host["forward_s"]}))
    slower = step_s()
    assert slower is not None
    assert by_the_shipped_one is not None
    assert slower > 1.5 * by_the_shipped_one


def test_a_plan_prints_within_eighty_columns(folder: Path, env: dict[str, str]) -> None:
    done = trimtab_cli("plan", f"{folder}/job.py:Tiny", "--on", "2xA100-40GB", *PINS, env=env)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "6 x 1 x 1 data-parallel = 6, exactly" in done.stdout


@pytest.mark.slow
def test_what_was_asked_before_changes_no_plan(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runners-up, bounds and rejections are those of the space, on a cold cache and on a warm one."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    job, pins = f"{folder}/job.py:Tiny", ("recompute=none",)
    found = [
        trimtab.plan(job, "2xA100-40GB", pins=pins),
        trimtab.plan(job, "2xA100-40GB", pins=pins, price=2.0),
        trimtab.plan(job, "2xA100-40GB", pins=pins, deadline="12h", compare=(1, 2)),
    ]
    told = [(one.choice, [row.setting for row in one.runners_up], one.rejected, one.reasons) for one in found]
    assert len(told[0][1]) == 5
    assert told[1] == told[0]
    assert told[2] == told[0]


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (("--global-batch", "0"), 2, "--global-batch 0"),
        (("--memory", "1.5"), 2, "no share"),
        (("--deadline", "12"), 2, "--deadline '12' found: it has no unit"),
        (("--deadline", "banana"), 2, "--deadline 'banana' found: it is not a duration"),
        (("--objective", "glory"), 2, "speed, gpus, cost"),
        (("--compare", "1,x"), 2, "no list of numbers"),
        (("--compare", "5"), 2, "there are 2 GPUs"),
        (("--price", "-1"), 2, "--price -1 found: it is below 0"),
        (("--price", "nan"), 2, "--price nan found: it is no amount of money"),
        (("--pin", "gpus=3"), 2, "there are 2"),
        (("--pin", "strategy=single", "--pin", "gpus=2"), 2, "runs on one GPU"),
        (("--samples", "0"), 2, "below 1"),
    ],
)
def test_bad_input_is_refused_with_the_cure(
    folder: Path, env: dict[str, str], args: tuple[str, ...], code: int, said: str
) -> None:
    done = trimtab_cli("plan", f"{folder}/job.py:Tiny", "--on", "2xA100-40GB", *args, env=env)
    assert done.returncode == code, done.stderr
    assert said in " ".join(done.stderr.split())
    assert "do:" in done.stderr


def test_a_job_without_a_batch_is_refused(folder: Path, env: dict[str, str]) -> None:
    done = trimtab_cli("plan", f"{folder}/job.py:Zero", "--on", "T4", "--json", env=env)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["found"] == "it is 0"


def test_a_job_whose_code_fails_ends_with_four(folder: Path, env: dict[str, str]) -> None:
    done = trimtab_cli("plan", f"{folder}/job.py:Broken", "--on", "T4", *PINS, env=env)
    assert done.returncode == 4
    assert "no such thing" in done.stderr


def test_a_file_that_cannot_be_written_is_refused(folder: Path, env: dict[str, str]) -> None:
    done = trimtab_cli(
        "plan", f"{folder}/job.py:Tiny", "--on", "T4", *PINS, "--out", f"{folder}/no/plan.json", env=env
    )
    assert done.returncode == 2
    assert "cannot be written" in done.stderr


class Said(Job):
    global_batch = 4
    branches = {"a": "left", "b": "right"}  # noqa: RUF012 - as users write it
    seq = 128

    def dataset(self) -> list[int]:
        return [1, 2, 3]


class Branching(Said):
    def losses(self) -> None:
        """Only that it is there."""


def test_a_job_is_described_by_what_it_says() -> None:
    found = describe_job(Said(), "x.py:Said")
    assert (found.name, found.global_batch, found.samples, found.epochs) == ("Said", 4, 3, 1)
    assert found.seq == 128
    assert found.branches == ()
    assert describe_job(Branching(), "x.py:Branching").branches == ("a", "b")


@pytest.mark.parametrize(("member", "value"), [("global_batch", 2.5), ("samples", 0), ("epochs", True)])
def test_a_job_that_says_what_cannot_be_is_refused(member: str, value: object) -> None:
    job = Said()
    setattr(job, member, value)
    with pytest.raises(WrongUse, match=member):
        describe_job(job, "x.py:Said")


@pytest.mark.parametrize("width", [60, 80, 140])
def test_every_part_of_a_plan_is_shown_at_any_width(width: int) -> None:
    plan = planned(
        "8xA100-40GB",
        Law(static_bytes=2 * GIB),
        workload(),
        compare=(1, 2, 4, 8),
        deadline_s=3600,
        objective=Objective.GPUS,
        price_per_gpu_hour=2.0,
    )
    text = io.StringIO()
    Console(file=text, width=width).print(render.render_plan(plan))
    shown = text.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    for heading in ("GPUs side by side", "what if", "runners-up", "rejected", "is enough"):
        assert heading in " ".join(shown.split())
    if width >= 140:
        # Not "free 88%", which reads as memory.
        assert "unused" in shown
        assert "7 GPUs" in shown


def test_the_most_frequent_causes_of_rejection_are_shown_and_like_ones_are_one_row() -> None:
    plan = planned("4xA100-40GB", Law(static_bytes=2 * GIB), workload())
    illegal = [row for row in plan.rejected if row.why.startswith("interleaved-1f1b on 4 ranks")]
    assert [row.count > 1 and "other numbers of micro-batches" in row.why for row in illegal] == [True]
    rare = [Rejection(why=f"rare cause {number}", count=1) for number in range(render.MOST_REJECTED)]
    text = io.StringIO()
    Console(file=text, width=200).print(render.render_plan(plan.replace(rejected=(*rare, *plan.rejected))))
    assert max(plan.rejected, key=lambda row: row.count).why in text.getvalue()


def test_gradients_of_one_size_are_not_compared() -> None:
    estimate = planned("A100-40GB", Law(static_bytes=2 * GIB), workload()).estimate
    parts = estimate.parts.replace(gradients=GIB)
    same = estimate.replace(parts=parts, gradients_bytes=GIB + 1024)
    assert render.describe_gradients(same) == ""
    assert "up to 2.0 GiB" in render.describe_gradients(same.replace(gradients_bytes=2 * GIB))


@pytest.mark.parametrize("is_cut_short", [True, False])
def test_a_plan_says_at_its_top_that_not_all_layouts_were_traced(*, is_cut_short: bool) -> None:
    plan = planned("2xA100-40GB", Law(static_bytes=2 * GIB), workload())
    text = io.StringIO()
    Console(file=text, width=200).print(render.render_plan(plan.replace(is_cut_short=is_cut_short)))
    top = text.getvalue().partition(plan.recommendation)[0]
    assert (render.CUT_SHORT in top) == is_cut_short
