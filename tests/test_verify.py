"""`trimtab plan --verify`: torch's compiler runs for the choice, and its figures replace derived ones."""

from __future__ import annotations

import pytest

import trimtab
from shared_jobs import shared_job
from test_cli import trimtab_cli
from test_compiled import JOB
from trimtab.planner.estimator import scale_time
from trimtab.planner.verify import note_unverified
from trimtab.spec import Band, Estimate, Footprint, Plan, Setting, StepTime

ESTIMATE = Estimate(
    allocated_bytes=10,
    reserved_bytes=20,
    process_bytes=30,
    parts=Footprint(weights=10),
    band=Band(low_bytes=20, high_bytes=40),
    step_s=0.5,
    step_time=StepTime(compute_s=0.3, launch_s=0.2),
    samples_per_s=8.0,
    mfu=0.4,
)


def test_a_scaled_estimate_takes_longer_and_says_so() -> None:
    scaled = scale_time(ESTIMATE, 2.0)
    assert (scaled.step_s, scaled.samples_per_s, scaled.mfu) == (1.0, 4.0, 0.2)
    assert scaled.step_time is not None
    assert scaled.step_time.total_s == pytest.approx(1.0)
    assert scaled.process_bytes == ESTIMATE.process_bytes
    assert scaled.assumptions == (
        "compiled: time is 2.00 times the derived one, as verified at another micro-batch",
    )


@pytest.mark.parametrize(
    ("compiled", "verified", "notes"),
    [(True, False, ("compiled: not verified, no time",)), (True, True, ()), (False, False, ())],
)
def test_only_derived_figures_of_compiled_code_are_noted(
    *, compiled: bool, verified: bool, notes: tuple[str, ...]
) -> None:
    choice = Setting(micro_batch=4, global_batch=4, compile=compiled)
    plan = Plan(job="job", choice=choice, estimate=ESTIMATE.replace(verified=verified))
    assert note_unverified(plan, "no time").estimate.assumptions == notes


def test_no_time_to_verify_is_refused() -> None:
    answer = trimtab_cli("plan", "slm:tiny", "--on", "H200", "--verify", "0")
    assert answer.returncode == 2
    assert "--verify" in answer.stderr


@pytest.mark.slow
def test_a_verified_plan_has_the_figures_of_the_compiler() -> None:
    job = shared_job(JOB, "Job")
    pins = {"compile": True, "micro_batch": 64}
    derived = trimtab.plan(job, "H200", pins=pins)
    verified = trimtab.plan(job, "H200", pins=pins, verify=600)
    asked = trimtab.estimate(job, "H200", micro_batch=64, compile=True)
    assert not derived.estimate.verified
    assert any("asks the compiler itself" in note for note in derived.estimate.assumptions)
    assert verified.estimate.verified
    assert verified.choice.replace(allocator=derived.choice.allocator) == derived.choice
    assert verified.estimate.allocated_bytes == asked.allocated_bytes
    assert verified.estimate.step_s == asked.step_s
    (why,) = [reason.why for reason in verified.reasons if reason.subject == "compile"]
    assert "verified: torch's compiler ran" in why


@pytest.mark.slow
def test_a_plan_that_has_no_time_to_compile_says_so() -> None:
    plan = trimtab.plan(shared_job(JOB, "Chain"), "H200", pins={"compile": True, "micro_batch": 32}, verify=1)
    assert not plan.estimate.verified
    assert any(note.startswith("compiled: not verified, ") for note in plan.estimate.assumptions)
