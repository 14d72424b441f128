"""Searches that another deadline, price or run length has in common with an earlier question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from outlooks import Law, workload
from trimtab.catalog.clusters import parse_cluster
from trimtab.planner.decision import PlanQuestion, choose_plan
from trimtab.planner.search import TIE, compute_run_s
from trimtab.planner.search_cache import SearchCache, StoredQuestion, drop_run
from trimtab.spec import Objective, Policy
from trimtab.units import GIB

if TYPE_CHECKING:
    from trimtab.spec import Plan

CLUSTER = parse_cluster("4xA100-40GB")


def ask(law: Law, *, run: dict[str, Any] | None = None, compare: tuple[int, ...] = (), **policy: Any) -> Plan:
    question = PlanQuestion(
        job="fake",
        workload=workload().replace(**run or {}),
        cluster=CLUSTER,
        policy=Policy(**policy),
        compare=compare,
    )
    return choose_plan(question, law)


def reload(searches: SearchCache) -> SearchCache:
    """Return what a later process reads of what was stored."""
    return SearchCache(msgspec.json.decode(msgspec.json.encode(searches.new), type=StoredQuestion))


@pytest.mark.parametrize("static", [4 * GIB, 60 * GIB])
@pytest.mark.parametrize(
    "changes",
    [
        {"deadline_s": 1e8},
        {"price_per_gpu_hour": 2.5},
        {"run": {"samples": 12_345, "epochs": 7}},
        {"deadline_s": 1e8, "price_per_gpu_hour": 1.0, "run": {"samples": 99_000}},
    ],
)
def test_another_run_gets_the_plan_of_a_new_search_and_searches_nothing(
    changes: dict[str, Any], static: int
) -> None:
    first = Law(static_bytes=static)
    ask(first, compare=(2, 4))
    second = Law(static_bytes=static, searches=reload(first.searches))
    assert ask(second, compare=(2, 4), **changes) == ask(Law(static_bytes=static), compare=(2, 4), **changes)
    assert second.asked == []


def test_a_deadline_within_a_tie_is_searched_again() -> None:
    first = Law()
    plan = ask(first)
    total = compute_run_s(workload(), plan.estimate.step_s)
    assert total is not None
    within = total * (1 + TIE / 2)
    second = Law(searches=reload(first.searches))
    assert ask(second, deadline_s=within) == ask(Law(), deadline_s=within)
    assert second.asked
    assert not second.searches.new.searches, "it holds for this deadline only"


def test_results_of_this_question_are_not_used_in_it() -> None:
    law = Law()
    ask(law)
    count = len(law.asked)
    ask(law)
    assert len(law.asked) == 2 * count


@pytest.mark.parametrize("objective", [Objective.GPUS, Objective.COST])
def test_the_search_for_few_gpus_or_little_cost_depends_on_the_deadline(objective: Objective) -> None:
    late, early = (Policy(objective=objective, deadline_s=seconds) for seconds in (1e6, 1e5))
    job = workload()
    assert drop_run(late, job) != drop_run(early, job)
    assert drop_run(late, job) == drop_run(late.replace(price_per_gpu_hour=3.0), job)
    free = Policy(objective=objective)
    assert drop_run(free, job) == drop_run(free, job.replace(samples=5, epochs=3))


def test_failures_are_stored_with_their_words() -> None:
    first = Law(fails_compiled=True)
    plan = ask(first)
    second = Law(fails_compiled=True, searches=reload(first.searches))
    assert ask(second) == plan
    assert second.asked == []
