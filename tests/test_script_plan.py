"""Plans of training commands: the search, with a script whose memory and time follow from its options."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

import trimtab
from script_commands import SCRIPTS, make_command
from trimtab.catalog.clusters import parse_cluster
from trimtab.errors import JobFailed, NothingFits, WrongUse
from trimtab.planner.plan_files import read_checked_plan
from trimtab.render import render_plan
from trimtab.scripts.knob_values import read_split, read_word
from trimtab.scripts.knobs import find_knobs, select_knobs
from trimtab.scripts.plan import plan_script
from trimtab.spec import (
    Band,
    Estimate,
    Footprint,
    Mesh,
    PhasePeak,
    Plan,
    Policy,
    Precision,
    Recompute,
    ScriptFact,
    ScriptReport,
    Setting,
    Strategy,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import Cluster, ScriptCommand

GIB = 2**30
FULL = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--grad-accum", type=int, default=8)
parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--grad-checkpointing", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--depth", type=int, default=4)
"""


@dataclass
class Script:
    """A made-up script: what its options ask for is what a run shows."""

    text: str
    fixed: int = 10
    """GiB that do not depend on the batch."""
    each: float = 1.0
    """GiB of a sample in fp32."""
    fails: str = ""
    """A word that the script cannot run with."""
    has_times: bool = True
    sequence: int = 1
    """Tokens of a sample. If there are more, the options count the batch of a step in tokens."""
    ran: list[str] = field(default_factory=list)

    def run(
        self,
        command: ScriptCommand,
        cluster: Cluster,
        sources: dict[str, str] | None = None,
        *,
        say: Callable[[str], None],
    ) -> Any:
        say("training")
        self.ran.append(" ".join(command.words))
        if self.fails and self.fails in command.words:
            raise JobFailed("train.py", found=f"it does not work with {self.fails}", cure="Leave it out.")
        knobs = find_knobs(command, sources or {"train.py": self.text})
        split = read_split(knobs)
        precision = Precision(read_word(knobs, "precision") or "fp32")
        recompute = Recompute(read_word(knobs, "recompute") or "none")
        is_compiled = read_word(knobs, "compile") == "true"
        words = (*command.words, "--depth", "4")
        depth = int(words[words.index("--depth") + 1])
        micro, ranks = split.micro_batch or 64, command.world_size
        rounds = (split.accumulation or 1) // self.sequence
        is_narrow, is_full = precision.dtypes.is_narrow, recompute is Recompute.FULL
        bytes_each = self.each * GIB * (0.5 if is_narrow else 1) * (0.25 if is_full else 1)
        need = int(self.fixed * GIB + bytes_each * micro)
        speed = (0.5 if is_narrow else 1) * (1.3 if is_full else 1)
        seconds = rounds * (0.01 + 0.01 * micro * speed * (0.8 if is_compiled else 1)) * depth / 4
        return SimpleNamespace(
            estimate=Estimate(
                allocated_bytes=need,
                reserved_bytes=need,
                process_bytes=need,
                capacity_bytes=cluster.devices[0].memory_bytes,
                parts=Footprint(activations=need),
                band=Band(low_bytes=need, high_bytes=need),
                step_s=seconds if self.has_times else None,
            ),
            setting=Setting(
                strategy=Strategy.DDP if ranks > 1 else Strategy.SINGLE,
                mesh=Mesh(dp_replicate=ranks),
                micro_batch=micro,
                accumulation=rounds,
                global_batch=micro * rounds * ranks,
                precision=precision,
                recompute=recompute,
                compile=is_compiled,
            ),
            script=ScriptReport(
                command=" ".join(command.words),
                found=(
                    ScriptFact(name="micro_batch", value=str(micro), where="train.py:1"),
                    ScriptFact(name="sequence", value=str(self.sequence), where="train.py:1"),
                ),
            ),
            phases=(PhasePeak(name="first step", allocated_bytes=need, reserved_bytes=need),),
        )


def make_plan(script: Script, text: str, on: str = "H100", vary: tuple[str, ...] = (), **policy: Any) -> Plan:
    command = make_command(text)
    given = policy.pop("given", None)
    knobs = select_knobs(find_knobs(command, {"train.py": script.text}), command, vary)
    return plan_script(
        command,
        parse_cluster(on),
        Policy(**policy),
        knobs,
        script.run,
        given=given,
        sources={"train.py": script.text},
    )


def typed(plan: Plan) -> str:
    assert plan.script is not None
    return plan.script.command


def test_the_fastest_command_that_fits_is_found_in_few_runs() -> None:
    script = Script(FULL)
    plan = make_plan(script, "python train.py --batch-size 2 --grad-accum 256")
    # 71.3 GiB may be used: 10 and 0.5 for each of 64 samples fit, and 128 do not.
    assert typed(plan) == "python train.py --batch-size 64 --grad-accum 8 --precision bf16 --compile"
    assert plan.choice.global_batch == 512
    assert plan.script is not None
    assert plan.script.changes == (
        "--batch-size 64 instead of --batch-size 2",
        "--grad-accum 8 instead of --grad-accum 256",
        "--precision bf16 added",
        "--compile added",
    )
    assert len(script.ran) <= 8
    assert script.ran[0] == "python train.py --batch-size 2 --grad-accum 256"
    reasons = {reason.subject: reason.why for reason in plan.reasons}
    assert "128 should need" in reasons["micro_batch"]
    assert "keeps the global batch of 512" in reasons["accumulation"]
    assert "fp32 takes" in reasons["precision"]
    assert "times as fast as given" in plan.recommendation
    assert plan.phases


def test_a_total_batch_in_tokens_is_understood() -> None:
    text = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--total-batch-size", type=int, default=131072)
"""
    plan = make_plan(Script(text, sequence=1024), "torchrun --nproc-per-node 2 train.py", on="2xH100")
    assert (plan.choice.global_batch, plan.choice.micro_batch, plan.choice.accumulation) == (128, 32, 2)
    assert plan.estimate.step_s is not None
    assert plan.estimate.samples_per_s == pytest.approx(128 / plan.estimate.step_s)
    # The option keeps its tokens.
    assert "--total-batch-size" not in typed(plan) or "--total-batch-size 131072" in typed(plan)
    assert "--batch-size 32" in typed(plan)


def test_a_command_that_is_the_best_stays() -> None:
    script = Script(FULL)
    text = "python train.py --batch-size 64 --grad-accum 1 --precision bf16 --compile"
    plan = make_plan(script, text)
    assert typed(plan) == text
    assert plan.recommendation.startswith("Keep the command as it is")
    assert script.ran == [text, text.removesuffix(" --compile")]


def test_recomputing_is_used_where_nothing_fits_without() -> None:
    script = Script(FULL, fixed=40, each=70)
    plan = make_plan(script, "python train.py")
    assert "--grad-checkpointing" in typed(plan)
    assert plan.choice.recompute is Recompute.FULL
    assert plan.choice.global_batch == 64
    assert any("needs" in rejection.why for rejection in plan.rejected)


def test_recomputing_is_used_for_a_larger_micro_batch_only_if_that_pays() -> None:
    plan = make_plan(Script(FULL), "python train.py --precision bf16")
    assert plan.choice.recompute is Recompute.NONE
    assert (
        any(rejection.why.startswith("recompute full") for rejection in plan.rejected)
        or plan.choice.micro_batch == 64
    )


def test_without_accumulation_the_batch_stays_unless_it_is_varied() -> None:
    script = Script(SCRIPTS["imagenet"], each=0.5)
    plan = make_plan(script, "python train.py -b 64")
    assert typed(plan) == "python train.py -b 64"
    reasons = {reason.subject: reason.why for reason in plan.reasons}
    assert "would change the global batch" in reasons["micro_batch"]
    assert len(script.ran) == 1
    varied = make_plan(script, "python train.py -b 64", vary=("--batch-size",))
    assert typed(varied) == "python train.py -b 64"
    script = Script(SCRIPTS["imagenet"], each=0.25)
    varied = make_plan(script, "python train.py -b 64", vary=("--batch-size",))
    assert typed(varied) == "python train.py -b 128"
    assert varied.choice.global_batch == 128
    assert any("instead of 64" in reason.why for reason in varied.reasons)


def test_vary_limits_what_changes() -> None:
    script = Script(FULL)
    plan = make_plan(script, "python train.py", vary=("--batch-size=4,16,32",))
    assert plan.choice.micro_batch == 32
    assert plan.choice.precision is Precision.FP32
    assert "options that --vary does not name" in plan.left_out[0]
    assert all("--compile" not in line for line in script.ran)
    with pytest.raises(WrongUse, match="none of them divides"):
        make_plan(Script(FULL), "python train.py", vary=("--batch-size=7,9",))


def test_values_of_an_option_without_a_meaning_are_tried() -> None:
    script = Script(FULL)
    plan = make_plan(script, "python train.py", vary=("--depth=8,2",))
    assert "--depth 2" in typed(plan)
    assert any(reason.subject == "--depth" for reason in plan.reasons)
    with pytest.raises(WrongUse, match="9 combinations"):
        make_plan(Script(FULL), "python train.py", vary=("--depth=1,2,3,4,5,6,7,8,9",))


def test_the_processes_follow_the_gpus_and_the_global_batch_stays() -> None:
    script = Script(FULL)
    plan = make_plan(script, "torchrun --nproc-per-node 8 train.py --batch-size 8 --grad-accum 2", "4xH100")
    assert plan.choice.global_batch == 128
    assert plan.choice.gpus == 4
    assert typed(plan).startswith("torchrun --nproc-per-node 4 train.py --batch-size 32 --grad-accum 1")
    assert plan.script is not None
    assert any("4 processes instead of 8" in note for note in plan.script.notes)
    assert len(plan.places) == 4
    assert "as given" not in plan.recommendation
    assert not any(candidate.why.startswith("as given") for candidate in plan.runners_up)


def test_a_command_without_a_launcher_keeps_to_a_gpu() -> None:
    plan = make_plan(Script(FULL), "python train.py", "4xH100")
    assert plan.choice.gpus == 1
    assert plan.script is not None
    assert any("torchrun or accelerate launch" in note for note in plan.script.notes)


def test_a_batch_that_does_not_divide_keeps_the_processes() -> None:
    plan = make_plan(
        Script(SCRIPTS["words"]), "torchrun --nproc-per-node 2 train.py --batch_size 5", "4xH100"
    )
    assert plan.choice.gpus == 2
    with pytest.raises(WrongUse, match="does not divide over 3 GPUs"):
        make_plan(Script(SCRIPTS["words"]), "torchrun --nproc-per-node 4 train.py --batch_size 5", "3xH100")


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"micro_batch": 4}, "--batch-size 4 --grad-accum 16"),
        ({"accumulation": 4}, "--batch-size 16 --grad-accum 4"),
        ({"precision": "fp32", "compile": False}, "python train.py --batch-size 32 --grad-accum 2"),
        ({"recompute": "full"}, "--grad-checkpointing"),
    ],
)
def test_pins_hold(pins: dict[str, Any], expected: str) -> None:
    assert expected in typed(make_plan(Script(FULL), "python train.py", pins=pins))


@pytest.mark.parametrize(
    ("pins", "found"),
    [
        ({"strategy": "fsdp"}, "makes this choice itself"),
        ({"micro_batch": 7}, "does not divide"),
        ({"accumulation": 7}, "no micro-batch makes"),
        ({"gpus": 9}, "there are 1 GPUs"),
    ],
)
def test_pins_that_cannot_be_are_refused(pins: dict[str, Any], found: str) -> None:
    with pytest.raises(WrongUse) as raised:
        make_plan(Script(FULL), "python train.py", pins=pins)
    assert found in raised.value.found


def test_another_global_batch_can_be_asked_for() -> None:
    plan = make_plan(
        Script(FULL), "python train.py", given={"global_batch": 32, "samples": 3600, "epochs": 2}
    )
    assert plan.choice.global_batch == 32
    assert plan.estimate.hours is not None
    assert plan.estimate.step_s is not None
    assert plan.estimate.hours == pytest.approx(7200 / 32 * plan.estimate.step_s / 3600)
    with pytest.raises(WrongUse, match="gradient accumulation"):
        make_plan(Script(SCRIPTS["words"]), "python train.py", given={"global_batch": 32})


def test_a_way_in_which_the_script_fails_is_left_out() -> None:
    plan = make_plan(Script(FULL, fails="--compile"), "python train.py")
    assert "--compile" not in typed(plan)
    assert any("it does not work with --compile" in rejection.why for rejection in plan.rejected)
    plan = make_plan(Script(FULL, fails="bf16"), "python train.py")
    assert plan.choice.precision is Precision.FP32


def test_a_script_that_fails_as_given_raises_its_error() -> None:
    with pytest.raises(JobFailed):
        make_plan(Script(FULL, fails="--depth"), "python train.py --depth 4")


def test_what_fits_nowhere_says_what_would_help() -> None:
    with pytest.raises(NothingFits) as raised:
        make_plan(Script(SCRIPTS["imagenet"], fixed=90), "python train.py")
    assert "nothing fits" in raised.value.found
    assert "--vary --batch-size allows another global batch" in raised.value.cure
    with pytest.raises(NothingFits) as raised:
        make_plan(Script(SCRIPTS["constants"], fixed=90), "python train.py")
    assert "BATCH_SIZE = 64 in train.py:2" in raised.value.cure
    with pytest.raises(NothingFits) as raised:
        make_plan(Script(FULL, fixed=90), "python train.py", vary=("--batch-size",))
    assert "--vary --grad-checkpointing" in raised.value.cure


def test_without_times_the_largest_micro_batch_is_taken() -> None:
    plan = make_plan(Script(FULL, has_times=False), "python train.py --precision bf16")
    assert plan.choice.micro_batch == 64


def test_ctrl_c_gives_the_best_so_far() -> None:
    script = Script(FULL)

    def run(command: ScriptCommand, cluster: Cluster, *, say: Callable[[str], None]) -> Any:
        if len(script.ran) == 2:
            raise KeyboardInterrupt
        return script.run(command, cluster, say=say)

    command = make_command("python train.py")
    knobs = find_knobs(command, {"train.py": FULL})
    plan = plan_script(command, parse_cluster("H100"), Policy(), knobs, run)
    assert not plan.complete


def test_a_plan_is_shown_and_read_back() -> None:
    plan = make_plan(Script(FULL), "python train.py --batch-size 2 --grad-accum 32")
    assert Plan.from_json(plan.to_json()) == plan
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_plan(plan))
    text = console.export_text()
    assert "type this" in text
    assert "--grad-accum" in text
    assert "--batch-size 64 instead of --batch-size 2" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_plan_is_stale_when_the_script_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(FULL, encoding="utf-8")
    plan = make_plan(Script(FULL), "python train.py")
    Path("plan.json").write_text(plan.to_json(), encoding="utf-8")
    assert read_checked_plan(Path("plan.json")) == (plan, "")
    Path("train.py").write_text(FULL + "# more", encoding="utf-8")
    with pytest.raises(WrongUse, match="has changed") as raised:
        read_checked_plan(Path("plan.json"))
    assert "--out plan.json -- python train.py" in raised.value.cure


def test_a_plan_of_a_command_trains_no_job(tmp_path: Path) -> None:
    plan = make_plan(Script(FULL), "python train.py")
    file = tmp_path / "plan.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    for given in (plan, file):
        with pytest.raises(WrongUse, match="training command"):
            trimtab.train("slm:tiny", given, steps=1, out=tmp_path / "run")


def test_a_plan_without_files_is_typed() -> None:
    plan = make_plan(Script(FULL), "python train.py")
    applied = trimtab.apply(plan)
    assert applied["command"] == typed(plan)
    assert applied["edits"] == []


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"objective": "cost"}, "it is for a job"),
        ({"compare": [1, 2]}, "it is for a job"),
        ({"deadline": "2h"}, "not known how many samples"),
        ({"vary": ["--nothing"]}, "the script has no such option"),
    ],
)
def test_options_that_a_command_does_not_have_are_refused(
    options: dict[str, Any], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(FULL, encoding="utf-8")
    with pytest.raises(WrongUse) as raised:
        trimtab.plan(on="H100", command=["python", "train.py"], **options)
    assert found in raised.value.found
    with pytest.raises(WrongUse, match="a job was given"):
        trimtab.plan("slm:tiny", "H100", vary=["--batch-size"])


TALKS = """
import argparse, time
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
args = parser.parse_args()
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("\\x1b[31m[/INST] loading\\x1b[0m", flush=True)
time.sleep(1)
for _ in range(4):
    model(torch.randn(args.batch_size, 64).cuda()).sum().backward()
    optimizer.step()
"""


def test_a_plan_shows_what_its_script_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TALKS, encoding="utf-8")
    said: list[str] = []
    trimtab.plan(on="H200", command=[sys.executable, "train.py"], say=said.append)
    assert said[:2] == [
        "run 1: the command as it is",
        "run 1: the command as it is, printing: [/INST] loading",
    ]


@pytest.mark.slow
def test_a_real_script_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search is tested above; here a script is followed for each of its runs."""
    monkeypatch.chdir(Path(__file__).parent / "scripts")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    line = "python accumulate.py --batch_size 2 --accumulation_steps 4 --gradient_checkpointing"
    plan = trimtab.plan(on="H200", command=line.split())
    assert typed(plan) == "python accumulate.py --batch_size 8 --accumulation_steps 1"
    assert plan.choice.global_batch == 8
    assert plan.script is not None
    assert {"micro_batch", "precision"} <= {fact.name for fact in plan.script.found}
    assert plan.phases
