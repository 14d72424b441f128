"""What a run does about bad numbers: the ladder, and the search for the module that makes them."""

from __future__ import annotations

import doctest
import math
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trimtab.spec import IncidentKind
from trimtab.training import bad_steps
from trimtab.training import bad_steps as module
from trimtab.training.bad_steps import (
    GOOD_STEPS_TO_RESET,
    LEAST_LOSSES,
    BadModule,
    BadStepAction,
    BadStepPolicy,
    add_fp32_module,
    choose_action,
    compute_spike_limit,
    find_first_bad,
    keep_fp32,
    pick_earliest,
    record_good_step,
    restore_losses,
)

if TYPE_CHECKING:
    from collections.abc import Callable

NAN, SPIKE = IncidentKind.NOT_A_NUMBER, IncidentKind.LOSS_SPIKE


def climbed(kind: IncidentKind, times: int, **can: bool) -> list[BadStepAction]:
    ladder, rungs = BadStepPolicy(), []
    for _ in range(times):
        ladder, rung = choose_action(ladder, kind, **can)
        rungs.append(rung)
    return rungs


def test_the_ladder_is_climbed_rung_by_rung_while_trouble_lasts() -> None:
    assert climbed(NAN, 5) == list(BadStepAction)
    assert climbed(NAN, 7)[5:] == [BadStepAction.STOP, BadStepAction.STOP]


def test_a_spike_has_no_bad_module_and_no_checkpoint_means_no_way_back() -> None:
    assert climbed(SPIKE, 4) == [
        BadStepAction.SKIP,
        BadStepAction.LOWER_RATE,
        BadStepAction.ROLL_BACK,
        BadStepAction.STOP,
    ]
    assert climbed(NAN, 3, can_keep=False)[1] is BadStepAction.LOWER_RATE
    assert climbed(NAN, 4, can_roll_back=False)[3] is BadStepAction.STOP


def test_calm_brings_the_ladder_down_and_keeps_what_was_changed() -> None:
    ladder = BadStepPolicy()
    for _ in range(3):
        ladder, rung = choose_action(ladder, NAN)
    assert rung is BadStepAction.LOWER_RATE
    assert ladder.rate == pytest.approx(0.8)
    for _ in range(GOOD_STEPS_TO_RESET - 1):
        ladder = record_good_step(ladder, 1.0)
    assert choose_action(ladder, NAN)[1] is BadStepAction.ROLL_BACK
    ladder = record_good_step(ladder, 1.0)
    assert choose_action(ladder, NAN)[1] is BadStepAction.SKIP
    assert ladder.rate == pytest.approx(0.8)


def test_a_roll_back_keeps_what_was_learnt_and_forgets_the_losses() -> None:
    now = add_fp32_module(BadStepPolicy(height=4, calm=0, rate=0.64, losses=(9.0,)), "head")
    after = restore_losses(now, BadStepPolicy(losses=(1.0, 2.0)))
    assert (after.height, after.rate, after.kept, after.losses) == (4, 0.64, ("head",), (1.0, 2.0))


def test_a_ladder_survives_json_and_refuses_a_raised_rate() -> None:
    bad_step_policy = BadStepPolicy(height=2, rate=0.8, kept=("a.b",), losses=(1.5, 1.25))
    assert BadStepPolicy.from_json(bad_step_policy.to_json()) == bad_step_policy
    with pytest.raises(ValueError, match=r"rate is 1\.2"):
        BadStepPolicy(rate=1.2)


def test_losses_that_fall_wobble_or_have_heavy_tails_are_no_spikes() -> None:
    draw = random.Random(7)  # noqa: S311 - a curve
    curves = {
        "falling": [10 * math.exp(-step / 40) + draw.gauss(0, 0.1) for step in range(2000)],
        "noisy": [2 + draw.gauss(0, 0.5) for _ in range(2000)],
        "lognormal": [draw.lognormvariate(0, 0.5) for _ in range(2000)],
    }
    for name, losses in curves.items():
        ladder, spikes = BadStepPolicy(), 0
        for loss in losses:
            limit = compute_spike_limit(ladder.losses)
            spikes += limit is not None and loss > limit
            ladder = record_good_step(ladder, loss)
        assert spikes == 0, name


def test_a_spike_is_one_early_and_late() -> None:
    draw = random.Random(1)  # noqa: S311 - a curve
    losses = tuple(2 + draw.gauss(0, 0.05) for _ in range(LEAST_LOSSES))
    limit = compute_spike_limit(losses)
    assert limit is not None
    assert max(losses) < limit < 4
    assert compute_spike_limit(losses[1:]) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=LEAST_LOSSES, max_size=64))
@settings(max_examples=50)
def test_no_loss_that_was_good_is_a_spike_afterwards(losses: list[float]) -> None:
    limit = compute_spike_limit(tuple(losses))
    assert limit is not None
    assert max(losses) <= limit


def test_the_report_says_what_was_tried() -> None:
    text = module.describe_stop_by_policy(
        BadStepPolicy(rate=0.8, kept=("head",), losses=(1.0,)), NAN, 12, "the gradient is nan", ("a",)
    )
    for part in (
        "step 12",
        "the gradient is nan",
        "head computed in fp32",
        "0.8",
        "median of 1",
        "Before that: a",
    ):
        assert part in text


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(bad_steps).failed == 0


class Blow(nn.Module):
    """Overflows fp16, and is harmless in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1e4 * 1e4) / 1e8


class Root(nn.Module):
    """Its gradient at 0 is not finite; its output is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(x - x)


def chain(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), middle), nn.Linear(4, 1))


def passed(compute: Callable[[], Any]) -> Callable[[], torch.Tensor]:
    def whole() -> torch.Tensor:
        loss: torch.Tensor = compute()
        torch.autograd.backward(loss)
        return loss

    return whole


def found_in(model: nn.Module, batch: torch.Tensor) -> BadModule | None:
    return find_first_bad(model, [passed(lambda: model(batch).float().mean())], [batch])


def test_the_first_bad_module_is_found_forward() -> None:
    found = found_in(chain(Blow()).half(), torch.ones(3, 4).half())
    assert found is not None
    assert (found.module, found.kind, found.phase) == ("1.1", "Blow", "forward")
    assert "1.1 (Blow)" in found.text


def test_the_first_bad_module_is_found_backward() -> None:
    found = found_in(chain(Root()), torch.ones(3, 4))
    assert found is not None
    assert (found.module, found.phase) == ("1.1", "backward")


def test_a_bad_batch_a_bad_loss_and_a_good_step_are_told_apart() -> None:
    model = chain(nn.Tanh())
    assert found_in(model, torch.ones(3, 4)) is None
    nan = found_in(model, torch.full((3, 4), math.nan))
    assert nan is not None
    assert nan.phase == "batch"
    loss = find_first_bad(model, [passed(lambda: model(torch.ones(3, 4)).mean() / 0)])
    assert loss is not None
    assert loss.phase == "loss"


def test_every_pass_is_run_whatever_was_found_before() -> None:
    model, ran = chain(nn.Tanh()), []
    bad = torch.full((3, 4), math.nan)

    def run() -> None:
        # As in a stage whose loss is on another rank; others may wait for what it does.
        ran.append(model(torch.ones(3, 4)).mean().backward())

    found = find_first_bad(model, [run, run], [bad])
    assert found is not None
    assert found.phase == "batch"
    assert len(ran) == 2


def test_no_hook_is_left_behind() -> None:
    model = chain(Blow())
    found_in(model, torch.ones(3, 4))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())  # noqa: SLF001


def test_ranks_agree_on_the_earliest() -> None:
    late = BadModule(module="a", phase="backward", order=0)
    early = BadModule(module="b", phase="forward", order=5)
    assert pick_earliest([None, late, early, BadModule(module="c", phase="forward", order=6)]) == early
    assert pick_earliest([None, None]) is None


@pytest.mark.parametrize("autocast", [False, True])
def test_a_module_kept_in_fp32_is_finite_and_learns(autocast: bool) -> None:
    model = chain(Blow()) if autocast else chain(Blow()).half()
    batch = torch.ones(3, 4, dtype=torch.float32 if autocast else torch.float16)
    assert keep_fp32(model, "1.1")
    assert keep_fp32(model, "1.1")
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
        loss = model(batch).float().mean()
    assert torch.isfinite(loss)
    loss.backward()
    assert all(
        parameter.grad is not None and parameter.grad.dtype is parameter.dtype
        for parameter in model.parameters()
    )


def test_weights_keep_their_dtype_while_their_module_computes_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).bfloat16()
    weight = model[0].weight
    assert keep_fp32(model, "0")
    out = model(torch.ones(2, 4, dtype=torch.bfloat16))
    out.sum().backward()
    assert out.dtype is torch.bfloat16
    assert model[0].weight is weight
    assert weight.grad is not None
    assert weight.grad.dtype is torch.bfloat16
    assert not keep_fp32(model, "no.such")


def test_a_run_that_never_went_back_does_not_say_so() -> None:
    said = module.describe_stop_by_policy(BadStepPolicy(), NAN, 3, "the loss is nan", (), went_back=False)
    assert "checkpoint" not in said
    assert "checkpoint" in module.describe_stop_by_policy(
        BadStepPolicy(), NAN, 3, "the loss is nan", (), went_back=True
    )
