"""Verify the choice of a plan with torch's compiler, and search again with the figures that it gives.

The search derives compiled settings from eager traces. Here the compiler runs for the choice, and then for
other compiled micro-batches that are nearly as fast. Its figures replace the derived ones, and the derived
times of other micro-batches are scaled by the same ratio. Then the search runs again on the traces that it
has. It may choose another compiled setting, which is verified too, until the time is up.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from trimtab.planner.estimator import is_guessed, setting_key, summarize_setting

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.planner.estimator import TraceAll, TraceEstimator
    from trimtab.spec import Plan, Setting

MOST_ROUNDS = 4
"""Settings of one plan that are verified at most."""
NEARLY_AS_FAST = 1.1
"""A runner-up is verified if its step takes at most this times as long as that of the choice."""


def verify_choice(  # noqa: PLR0913 - a plan, and how to make another
    plan: Plan,
    search: Callable[[], Plan],
    estimator: TraceEstimator,
    trace_all: TraceAll,
    *,
    ends_at: float,
    say: Callable[[str], None],
) -> Plan:
    """Return a plan whose choice is verified, or which says why it is not.

    `search` makes the plan again. `trace_all` compiles; it fails at the moment `ends_at` of `monotonic()`.
    """
    failures: dict[str, str] = {}
    for _ in range(MOST_ROUNDS):
        left = [setting for setting in list_doubtful(plan) if setting_key(setting) not in failures]
        if not left or monotonic() > ends_at:
            break
        say(f"compiling {summarize_setting(left[0])}")
        error = estimator.verify(left[0], trace_all)
        if error is None:
            plan = search()
        else:
            failures[setting_key(left[0])] = error.found
    return note_unverified(plan, failures.get(setting_key(plan.choice), "the time of --verify is up"))


def list_doubtful(plan: Plan) -> list[Setting]:
    """Return the settings to verify: the choice, then compiled micro-batches that are nearly as fast."""
    most = NEARLY_AS_FAST * (plan.estimate.step_s or 0.0)
    near = [
        entry
        for entry in plan.runners_up
        if entry.setting.recompute is plan.choice.recompute and (entry.estimate.step_s or most + 1.0) <= most
    ]
    every = [(plan.choice, plan.estimate), *((entry.setting, entry.estimate) for entry in near)]
    return [setting for setting, estimate in every if is_guessed(setting) and not estimate.verified]


def note_unverified(plan: Plan, why: str) -> Plan:
    """Add to a plan why the figures of its choice are derived, unless they are verified or not compiled."""
    if not is_guessed(plan.choice) or plan.estimate.verified:
        return plan
    notes = (*plan.estimate.assumptions, f"compiled: not verified, {why}")
    return plan.replace(estimate=plan.estimate.replace(assumptions=notes))
