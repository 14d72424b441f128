"""While the loss of a job is checked, the search begins: it changes no plan."""

from pathlib import Path
from typing import Any

import pytest

import trimtab
from outlooks import Law
from trimtab.catalog.clusters import parse_cluster
from trimtab.planner import plan as plans
from trimtab.planner.decision import PlanQuestion, choose_plan
from trimtab.planner.plan import add_batch_loss
from trimtab.spec import BatchLoss, Plan, Policy, Recompute, Strategy, Workload
from trimtab.units import GIB

JOB = """
import torch
from torch import nn

class Mean:
    global_batch = 64
    samples, epochs = 6400, 1

    def model(self):
        return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def batch(self, size):
        return torch.randn(size, 64)

    def loss(self, model, batch):
        return model(batch).square().mean()

class Contrast(Mean):
    def loss(self, model, batch):
        out = nn.functional.normalize(model(batch))
        return nn.functional.cross_entropy(out @ out.T / 0.1, torch.arange(len(out), device=out.device))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "additive"), [("Mean", True), ("Contrast", False)])
def test_a_plan_is_the_same_with_and_without_a_search_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, additive: bool
) -> None:
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    searched: list[bool] = []
    search_ahead = plans._search_ahead  # noqa: SLF001 - to see that it ran

    def search_noted(question: Any, *args: Any, **kwargs: Any) -> None:
        searched.append(question.workload.batch_loss is None)
        search_ahead(question, *args, **kwargs)

    monkeypatch.setattr(plans, "_search_ahead", search_noted)
    made = []
    for quick_s in (0.0, 600.0):
        monkeypatch.setattr(plans, "QUICK_CHECK_S", quick_s)
        pins = {"compile": False, "recompute": "none"}
        made.append(trimtab.plan(f"{tmp_path / 'job.py'}:{name}", "2xA30", pins=pins, cache=False))
    assert searched == [True]
    assert made[0] == made[1]
    assert (made[0].choice.accumulation == 1) or additive
    assert additive or "whole batch" in [reason.value for reason in made[0].reasons]


def test_a_slow_check_calls_meanwhile_and_its_result_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "QUICK_CHECK_S", 0.0)
    calls: list[str] = []

    def check(job: str, *_: Any, **__: Any) -> BatchLoss:
        while not calls:
            pass
        return BatchLoss(additive=False, why=f"{job} compares samples")

    def search(is_over: Any) -> None:
        calls.append("searched" if not is_over() else "late")
        while not is_over():
            pass

    monkeypatch.setattr("trimtab.trace.loss_check.check_batch_loss", check)
    workload = add_batch_loss("job", {}, Workload(name="job", global_batch=8), meanwhile=search)
    assert calls == ["searched"]
    assert workload.is_indivisible


def test_an_error_of_the_check_is_raised_where_the_plan_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: Any, **__: Any) -> BatchLoss:
        raise trimtab.TrimtabError("job", found="it is broken", cure="Repair it.")

    monkeypatch.setattr("trimtab.trace.loss_check.check_batch_loss", check)
    with pytest.raises(trimtab.TrimtabError, match="it is broken"):
        add_batch_loss("job", {}, Workload(name="job", global_batch=8))


TIGHT: dict[str, Any] = {"static_bytes": 30 * GIB, "sample_bytes": 4 * GIB}
"""A job of which one device holds little more than the weights."""


def plan_by(law: Law) -> Plan:
    workload = Workload(name="x", global_batch=64, samples=6400, epochs=1)
    question = PlanQuestion(job="x", workload=workload, cluster=parse_cluster("2xA100-40GB"), policy=Policy())
    return choose_plan(question, law, notice=lambda _: None)


def test_what_cannot_win_is_not_traced_with_other_recomputation() -> None:
    law = Law(**TIGHT)
    plan_by(law)
    recomputed = {setting.strategy for setting in law.prepared if setting.recompute is not Recompute.NONE}
    assert Strategy.FSDP in recomputed
    assert Strategy.SINGLE not in recomputed, "one device takes twice as long as two"


def test_runners_up_cost_no_estimates_of_micro_batches_beyond_the_line() -> None:
    law = Law(**TIGHT)
    plan = plan_by(law)
    assert len(plan.runners_up) == 5
    too_large = [setting for setting in law.asked if law.need_bytes(setting) > 60 * GIB]
    families: dict[Any, set[int]] = {}
    for setting in too_large:
        family = (setting.strategy, setting.gpus, setting.recompute, setting.compile)
        families.setdefault(family, set()).add(setting.micro_batch)
    assert max(map(len, families.values())) <= 2, "two show how large the others are"


class IdleLaw(Law):
    """It may trace ahead only until the first answer."""

    def can_prefetch(self) -> bool:
        return not self.prefetched


def test_the_family_that_has_its_turn_next_is_traced_ahead_and_changes_no_plan() -> None:
    law, quiet = IdleLaw(**TIGHT), Law(**TIGHT)
    plan = plan_by(law)
    ahead = [setting for setting in law.prefetched if setting.loss is plan.choice.loss]
    assert ahead
    assert {setting.recompute for setting in ahead} == {Recompute.SELECTIVE}
    assert set(ahead) <= {*law.prepared, *law.asked}
    quiet.can_prefetch = lambda: False  # type: ignore[method-assign]
    assert plan_by(quiet) == plan
