"""What came of a run, from what it has left behind; and what an attempt knows of those before it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from trimtab.errors import WrongUse
from trimtab.launching import run_summary
from trimtab.spec import (
    Attempt,
    Band,
    Estimate,
    Footprint,
    Incident,
    IncidentKind,
    Mesh,
    Plan,
    Setting,
    Strategy,
)
from trimtab.training.events import describe_requeue, make_next_attempt

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.spec import Summary

GIB = 2**30


def a_plan(**known: Any) -> Plan:
    return Plan(
        job="slm",
        choice=Setting(
            strategy=Strategy.DDP,
            mesh=Mesh(dp_replicate=4),
            micro_batch=4,
            accumulation=1,
            global_batch=16,
        ),
        estimate=Estimate(
            allocated_bytes=2 * GIB,
            reserved_bytes=3 * GIB,
            process_bytes=4 * GIB,
            parts=Footprint(),
            band=Band(low_bytes=0, high_bytes=4 * GIB),
            **known,
        ),
    )


def lines(count: int, **more: Any) -> list[dict[str, Any]]:
    one = {"loss": 1.5, "time_s": 0.5, "samples": 16, "gpus": 4, "reserved_bytes": 2 * GIB}
    return [{"step": step, **one, **more} for step in range(1, count + 1)]


def a_summary(**changes: Any) -> Summary:
    given: dict[str, Any] = {
        "attempt": Attempt(attempt=2, procs=4, nodes=2, began_s=1000.0, earlier_s=40.0, earlier_proc_s=80.0),
        "lines": lines(10),
        "incidents": [Incident(kind=IncidentKind.REQUEUE, at_s=1.0, why="w", done="d")],
        "plan": a_plan(step_s=0.4, samples_per_s=40.0),
        "device": "NVIDIA H100",
        "gpus_there": 8,
    } | changes
    return run_summary.build_summary(
        "slm",
        given["plan"],
        given["attempt"],
        given["lines"],
        given["incidents"],
        epoch_samples=32,
        device=given["device"],
        gpus_there=given["gpus_there"],
        now_s=1010.0,
    )


def test_a_summary_sums_over_attempts() -> None:
    found = a_summary()
    assert (found.steps, found.samples, found.epochs) == (10, 160, 5)
    assert (found.runtime_s, found.steps_s) == (50, 5)
    assert found.samples_per_s == 32
    assert found.minutes_per_epoch == pytest.approx(1 / 60)
    # 40 s of two processes, then 10 s of four.
    assert found.gpu_hours == pytest.approx(120 / 3600)
    assert (found.gpus, found.gpus_there, found.gpus_free) == (4, 8, 4)
    assert (found.attempts, found.incidents) == (2, {"requeue": 1})


def test_predictions_are_set_against_what_was_measured() -> None:
    checks = {check.what: check for check in a_summary().checks}
    assert (checks["step_s"].predicted, checks["step_s"].real) == (0.4, 0.5)
    assert checks["step_s"].error == pytest.approx(-0.2)
    assert checks["samples_per_s"].real == 32
    assert checks["reserved_bytes"].error == pytest.approx(0.5)
    assert checks["allocated_bytes"].real is None
    assert checks["allocated_bytes"].error is None


def test_steps_on_other_devices_and_short_batches_are_no_check_of_the_plan() -> None:
    before = lines(5, gpus=2, time_s=9.0)
    after = [*lines(9), {**lines(1)[0], "samples": 2, "time_s": 0.01}]
    checks = {check.what: check.real for check in a_summary(lines=[*before, *after]).checks}
    assert checks["step_s"] == 0.5


def test_a_run_on_the_cpu_has_no_gpus_and_no_prediction() -> None:
    plan = a_plan()
    plain = plan.replace(estimate=plan.estimate.replace(allocated_bytes=0, reserved_bytes=0, process_bytes=0))
    none = lines(4, reserved_bytes=None)
    found = a_summary(plan=plain, lines=none, device=None, gpus_there=None)
    assert (found.gpus, found.gpu_hours, found.gpus_free) == (0, 0, None)
    assert [check.what for check in found.checks] == ["step_s", "samples_per_s"]
    assert "none: 4 processes on the CPU" in run_summary.format_summary(found)
    assert "not measured" in run_summary.format_summary(found)


def test_a_run_without_a_step_has_a_summary_without_a_speed() -> None:
    found = a_summary(lines=[])
    assert (found.samples_per_s, found.minutes_per_epoch, found.loss) == (None, None, None)
    assert "- samples/s" in run_summary.format_summary(found)


def test_a_speed_says_which_steps_it_is_of() -> None:
    text = run_summary.format_summary(a_summary())
    assert "32 samples/s over all 10 steps," in text
    assert "(of the median step of 7 after the first 3)" in text
    few = run_summary.format_summary(a_summary(lines=lines(2)))
    assert "(of the median step of 2)" in few
    assert "median" not in run_summary.format_summary(a_summary(lines=[]))


def test_the_text_has_a_line_for_each_fact_and_fits_a_terminal() -> None:
    text = run_summary.format_summary(a_summary())
    for fact in ("4 x NVIDIA H100 on 2 nodes; 4 of 8 used, 4 left free", "160 in 5 epochs", "50s, of it "):
        assert fact in text
    assert "seconds a step: 0.4, really 0.5 (-20.0%)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_summary_is_written_read_and_forgotten(tmp_path: Path) -> None:
    found = a_summary()
    run_summary.write_summary(tmp_path, found)
    assert run_summary.read_summary(tmp_path) == found
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["gpus_free"] == 4
    assert told["checks"][0]["error"] == -0.2
    run_summary.remove_summary(tmp_path)
    assert list(tmp_path.iterdir()) == []
    run_summary.remove_summary(tmp_path)


def test_a_folder_without_a_summary_says_why(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="no such folder"):
        run_summary.read_summary(tmp_path / "nowhere")
    with pytest.raises(WrongUse, match="no run's folder"):
        run_summary.read_summary(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "log.jsonl").write_text('{"step": 7}\n{"torn')
    with pytest.raises(WrongUse, match="it has taken 7 steps"):
        run_summary.read_summary(tmp_path)
    (tmp_path / "summary.json").write_text('{"job": 1}')
    with pytest.raises(WrongUse, match=r"not a Summary"):
        run_summary.read_summary(tmp_path)


def test_gpus_are_counted_by_the_driver(tmp_path: Path) -> None:
    assert run_summary.count_node_gpus(tmp_path / "nowhere") is None
    assert run_summary.count_node_gpus(tmp_path) is None
    (tmp_path / "0000:01:00.0").mkdir()
    assert run_summary.count_node_gpus(tmp_path) == 1


# attempts


def after(before: Attempt | None, env: dict[str, str] | None = None, *, seen_s: float = 0.0) -> Attempt:
    return make_next_attempt(
        before, procs=4, nodes=2, now_s=500.0, seen_s=seen_s, env=env or {}, host="h", pid=9
    )


def test_the_first_attempt_has_nothing_before_it() -> None:
    found = after(None, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "x"})
    assert (found.attempt, found.earlier_s, found.job_id, found.restarts) == (1, 0, "7", 0)
    assert after(None).job_id is None


def test_an_attempt_counts_the_time_of_those_before_it() -> None:
    ended = Attempt(attempt=2, procs=2, state="ended", began_s=100, at_s=160, earlier_s=5, earlier_proc_s=10)
    found = after(ended)
    assert (found.attempt, found.earlier_s, found.earlier_proc_s) == (3, 65, 130)


def test_an_attempt_that_was_killed_lasted_until_it_last_wrote() -> None:
    killed = Attempt(procs=2, state="running", began_s=100, at_s=101)
    assert after(killed, seen_s=150).earlier_s == 50
    assert after(killed).earlier_s == 1
    # A clock that went back makes no negative time.
    assert after(killed.replace(began_s=1e6, at_s=10)).earlier_s == 0


@pytest.mark.parametrize(
    ("before", "restarts", "is_told"),
    [
        (Attempt(job_id="7"), "1", True),
        (Attempt(job_id="7", restarts=1), "2", True),
        # torchrun has started the ranks again, not Slurm the job.
        (Attempt(job_id="7", restarts=1), "1", False),
        (Attempt(job_id="6"), "1", False),
        (Attempt(), "1", False),
        (None, "1", False),
    ],
)
def test_a_requeue_is_told_once(before: Attempt | None, restarts: str, is_told: bool) -> None:
    env = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts, "SLURM_JOB_NODELIST": "n2"}
    words = describe_requeue(before, after(before, env), env)
    assert bool(words) is is_told
    if is_told:
        assert words == f"Slurm has requeued job 7 (restart {restarts}), which now runs on n2"
