"""Long plans show how far they are, and Ctrl-C gives the best so far."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import trimtab.api
import trimtab.cli.progress as shown
from outlooks import Law, workload
from trimtab.catalog.clusters import parse_cluster
from trimtab.cli.main import app
from trimtab.cli.progress import progress
from trimtab.planner.decision import PlanQuestion, choose_plan
from trimtab.planner.layout_candidates import propose_layouts
from trimtab.planner.plan import describe_layout
from trimtab.spec import Policy
from trimtab.spec.requests import PlanRequest


class Interrupted(Law):
    """Answers some questions; then somebody presses Ctrl-C."""

    left = 10**9

    def estimate(self, setting: Any, layout: Any) -> Any:
        if self.left <= 0:
            raise KeyboardInterrupt
        self.left -= 1
        return super().estimate(setting, layout)


def question(compare: tuple[int, ...] = ()) -> PlanQuestion:
    return PlanQuestion(
        job="fake", workload=workload(), cluster=parse_cluster("4xH100"), policy=Policy(), compare=compare
    )


def interrupted(after: int, compare: tuple[int, ...] = (), **law: Any) -> Any:
    outlook = Interrupted(bounds=False, **law)
    outlook.left = after
    return choose_plan(question(compare), outlook)


def asked_in_all() -> int:
    law = Law(bounds=False)
    choose_plan(question(), law)
    return len(law.asked)


def test_an_interrupted_search_gives_the_best_so_far_and_says_so() -> None:
    whole = choose_plan(question(), Law(bounds=False))
    assert whole.complete
    plan = interrupted(20)
    assert not plan.complete
    assert plan.estimate.fits
    assert plan.estimate.step_s is not None
    assert whole.estimate.step_s is not None
    # Of two that are within 2 % the complete search takes the simpler.
    assert whole.estimate.step_s <= plan.estimate.step_s * 1.021
    best = min(one.samples_per_s or 0.0 for one in plan.looked_at if one.setting == plan.choice)
    assert all((one.samples_per_s or 0.0) <= best * 1.0001 for one in plan.looked_at if one.fits)


def test_an_interrupt_before_anything_fits_is_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(0)


def test_an_interrupt_while_gpus_are_compared_keeps_the_choice() -> None:
    plan = interrupted(asked_in_all() + 1, compare=(1, 2, 3, 4))
    assert plan.choice == choose_plan(question((1, 2, 3, 4)), Law(bounds=False)).choice
    assert not plan.complete


def test_every_better_setting_is_noticed_once() -> None:
    noticed: list[Any] = []
    plan = choose_plan(question(), Law(bounds=False), notice=noticed.append)
    times = [item.estimate.step_s for item in noticed]
    assert times
    assert times == sorted(times, key=lambda time: -(time or 0.0))
    assert times[-1] is not None
    assert plan.estimate.step_s is not None
    # Between equals the simpler is chosen.
    assert plan.estimate.step_s <= times[-1] * 1.021


def test_a_log_gets_lines_with_what_is_done_and_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(shown.VARIABLE, "1")
    monkeypatch.setattr(shown, "FIRST_S", 0.0)
    monkeypatch.setattr(shown, "EVERY_S", 0.01)
    wrote: list[str] = []
    monkeypatch.setattr(shown.ProgressState, "line", _noted(wrote, shown.ProgressState.line))
    with progress("planning") as state:
        state.say("tracing ddp, micro-batch 8, bf16")
        state.found("single, micro-batch 4, bf16 on 1 GPU, 12 samples/s")
        while not any("best" in text for text in wrote):
            pass
    err = capsys.readouterr().err
    assert (
        "planning: tracing ddp, micro-batch 8, bf16; best so far: single, micro-batch 4, bf16 on 1 GPU, "
        "12 samples/s\n" in err
    )


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_square_brackets_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script prints, and the name of a file, may look like markup."""
    monkeypatch.setenv(shown.VARIABLE, "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with progress("following train[fast].py") as state:
        state.say("<s>[INST] hello [/INST]")
    assert "following train[fast].py: <s>[INST] hello [/INST]" in terminal.getvalue()


def test_the_first_best_is_written_at_once_and_later_ones_with_the_next_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(shown.VARIABLE, "1")
    monkeypatch.setattr(shown, "FIRST_S", 0.0)
    # No other line would come before the test runs out of time.
    monkeypatch.setattr(shown, "EVERY_S", 600.0)
    wrote: list[str] = []
    monkeypatch.setattr(shown.ProgressState, "line", _noted(wrote, shown.ProgressState.line))
    with progress("planning") as state:
        while not wrote:
            pass
        state.found("single on 1 GPU, 12 samples/s (none above 15)")
        while len(wrote) < 2:
            pass
        state.found("ddp on 2 GPUs, 14 samples/s (none above 15)")
    err = capsys.readouterr().err
    assert "best so far: single on 1 GPU, 12 samples/s (none above 15)\n" in err
    assert "ddp" not in err


def test_a_noticed_setting_has_a_bound_that_no_setting_beats() -> None:
    noticed: list[Any] = []
    choose_plan(question(), Law(bounds=True), notice=noticed.append)
    bounds = [item.least_s for item in noticed if item.least_s is not None]
    assert bounds
    assert max(bounds) <= min(item.estimate.step_s for item in noticed)


def test_formulas_give_a_first_answer_before_anything_is_traced() -> None:
    folder = Path(__file__).parent.parent / "bench" / "models" / "llama-8b"
    job = f"hf:{folder}"
    large = PlanQuestion(
        job=job,
        workload=workload(global_batch=512, sample_length=4096),
        cluster=parse_cluster("2x8xH100"),
        policy=Policy(),
    )
    noticed: list[Any] = []
    propose_layouts(large, {}, notice=noticed.append)
    (first,) = noticed
    text = describe_layout(first)
    assert "on 16 GPUs, about" in text
    assert "samples/s by formulas (error 10%)" in text


def _noted(wrote: list[str], line: Any) -> Any:
    def noting(self: Any) -> str:
        wrote.append(line(self))
        return wrote[-1]

    return noting


def test_what_is_quick_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(shown.VARIABLE, "1")
    monkeypatch.setattr(shown, "FIRST_S", 600.0)
    with progress("planning") as state:
        state.say("reading the job")
    assert not capsys.readouterr().err


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A plan of 20 questions, then Ctrl-C."""
    after = [20]

    def plan(request: PlanRequest) -> Any:
        request.say_best("something")
        return interrupted(after[0])

    monkeypatch.setattr(trimtab.api, "plan", plan)
    return after


@pytest.mark.usefixtures("planned")
def test_the_command_prints_the_best_so_far_and_leaves_with_130(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = CliRunner().invoke(app, ["plan", "fake", "--on", "4xH100", "--out", str(file)])
    assert done.exit_code == 130
    assert "best so far" in done.stdout
    assert "this is the best so far" in done.stderr
    assert json.loads(file.read_text(encoding="utf-8"))["complete"] is False
    done = CliRunner().invoke(app, ["plan", "fake", "--on", "4xH100", "--json"])
    assert "something" not in done.stderr
    assert (done.exit_code, json.loads(done.stdout)["complete"]) == (130, False)


def test_the_command_says_that_nothing_was_found_yet(planned: list[int]) -> None:
    planned[0] = 0
    done = CliRunner().invoke(app, ["plan", "fake", "--on", "4xH100"])
    assert done.exit_code == 130
    assert done.stderr == (
        "trimtab: stopped before anything that fits was found; run the same command again to continue from "
        "the traces made so far.\n"
    )
    assert "Traceback" not in done.output
    assert not done.stdout
