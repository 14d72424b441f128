"""Run.over(): the host a step ahead of the device, with the same results as one step after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from trimtab.spec import Setting
from trimtab.training import optimizer_step
from trimtab.training.run import Run
from trimtab.training.step_log import StepClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.training.loading import Window

STEPS = 12
POISON = 123.0
"""A value that marks a bad sample."""


class Job:
    """Dropout and running statistics: what a repetition has to put back."""

    name = "ahead"
    global_batch = 4

    def __init__(self) -> None:
        self.calls = 0
        self.strike: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, loss: loss

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.strike(self.calls, model(batch).square().mean())

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.05)

    def dataset(self) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(1)
        return [torch.randn(3, generator=made) for _ in range(4 * STEPS)]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused optimizer of a CPU decides by itself as well, only nobody gains from it."""
    plain = optimizer_step.OptimizerStep.__init__

    def init(self: optimizer_step.OptimizerStep, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self._can_skip_on_device = True

    monkeypatch.setattr(optimizer_step.OptimizerStep, "__init__", init)


class Trained:
    """A run of STEPS steps, and what came of it."""

    def __init__(
        self,
        strike: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
        *,
        ahead: bool,
        settles: Callable[[Window], bool] | None = None,
        micro_batch: int = 4,
    ) -> None:
        job = Job()
        if strike is not None:
            job.strike = strike
        self.events: list[Any] = []
        self.ahead: list[bool] = []
        torch.manual_seed(0)
        setting = Setting(micro_batch=micro_batch, accumulation=4 // micro_batch, global_batch=4)
        with Run(setting, job=job, listen=self.events.append) as run:
            run.prepare()
            windows = run.loader(job.dataset()).windows(STEPS)
            if ahead:
                found = []
                for window, outcome in run.over(windows, settles):
                    assert window.step == outcome.step
                    self.ahead.append(run.ahead)
                    found.append(outcome)
            else:
                found = [run.step(window) for window in windows]
            self.outcomes = found
            self.losses = [one.loss for one in found]
            self.state = {name: one.clone() for name, one in run.model.state_dict().items()}
            self.calls = job.calls


def same(trained: Trained, other: Trained) -> None:
    assert trained.losses == other.losses
    for name, value in trained.state.items():
        assert torch.equal(value, other.state[name]), name


@pytest.mark.usefixtures("on_device")
def test_ahead_is_the_same_as_step_by_step() -> None:
    plain, ahead = Trained(ahead=False), Trained(ahead=True)
    same(plain, ahead)
    # The first step shows which buffers change; after the last there is nothing to be ahead with.
    assert ahead.ahead == [False, *[True] * (STEPS - 2), False]
    assert [outcome.step for outcome in ahead.outcomes] == list(range(STEPS))


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("at", [1, 2, 5, STEPS])
def test_a_passing_bad_loss_leaves_no_trace(at: int) -> None:
    def once(call: int, loss: torch.Tensor) -> torch.Tensor:
        return loss * float("nan") if call == at else loss

    bad = Trained(once, ahead=True)
    same(Trained(ahead=False), bad)
    assert [outcome.attempts for outcome in bad.outcomes].count(2) == 1
    assert len(bad.events) == 1


@pytest.mark.usefixtures("on_device")
def test_a_loss_that_stays_bad_is_skipped_as_step_by_step() -> None:
    class Poisoned(Job):
        def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
            loss = super().loss(model, batch)
            return loss * float("nan") if (batch == POISON).any() else loss

        def dataset(self) -> list[torch.Tensor]:
            samples = super().dataset()
            samples[17] = torch.full((3,), POISON)
            return samples

    runs = []
    for ahead in (False, True):
        torch.manual_seed(0)
        job = Poisoned()
        with Run(Setting(micro_batch=4, global_batch=4), job=job) as run:
            run.prepare()
            windows = run.loader(job.dataset()).windows(STEPS)
            outcomes = (
                [one for _, one in run.over(windows)] if ahead else [run.step(window) for window in windows]
            )
            runs.append((outcomes, {name: one.clone() for name, one in run.model.state_dict().items()}))
    (plain, plain_state), (fast, fast_state) = runs
    assert [bool(one.skipped) for one in plain].count(True) == 1
    assert [one.skipped for one in plain] == [one.skipped for one in fast]
    assert [one.loss for one in plain if not one.skipped] == [one.loss for one in fast if not one.skipped]
    for name, value in plain_state.items():
        assert torch.equal(value, fast_state[name]), name


@pytest.mark.usefixtures("on_device")
def test_out_of_memory_ahead_is_split_as_step_by_step() -> None:
    def once(call: int, loss: torch.Tensor) -> torch.Tensor:
        if call == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss

    plain, ahead = Trained(once, ahead=False), Trained(once, ahead=True)
    same(plain, ahead)
    assert ahead.outcomes[4].attempts == 2
    assert ahead.outcomes[-1].micro_batch == plain.outcomes[-1].micro_batch == 2


@pytest.mark.usefixtures("on_device")
def test_it_waits_where_it_is_asked_to() -> None:
    found = Trained(ahead=True, settles=lambda window: window.step % 3 == 2)
    same(Trained(ahead=False), found)
    assert [step for step, ahead in enumerate(found.ahead) if not ahead] == [0, 2, 5, 8, 11]


@pytest.mark.usefixtures("on_device")
def test_what_was_computed_ahead_is_dropped_when_the_run_goes_back() -> None:
    torch.manual_seed(0)
    job = Job()
    taken: list[int] = []
    with Run(Setting(micro_batch=4, global_batch=4), job=job) as run:
        run.prepare()
        loader = run.loader(job.dataset())
        saved: dict[str, Any] = {}
        for window, _ in run.over(loader.windows(STEPS), lambda window: window.step == 3):
            taken.append(window.step)
            if window.step == 3 and not saved:
                saved = {"run": run.state(), "loader": loader.state_dict()}
            if window.step == 6 and taken.count(6) == 1:
                loader.load_state_dict(saved["loader"])
                run.load_state(saved["run"])
    assert taken == [*range(7), *range(4, STEPS)]


def test_without_an_optimizer_that_decides_by_itself_it_is_step_by_step() -> None:
    same(Trained(ahead=False), Trained(ahead=True))
    assert not any(Trained(ahead=True).ahead)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("settling", [STEPS + 1, 4])
def test_every_step_is_timed_by_when_it_ended(settling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host hears of a step when the passes of the next are handed out, and of the last one at once.

    By the host's clock the last step took no time, and so did every step before which it settled; the step
    after took two.
    """
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def pass_takes_a_second(_: int, loss: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += 1.0
        return loss

    job = Job()
    job.strike = pass_takes_a_second
    setting = Setting(micro_batch=2, accumulation=2, global_batch=4)
    with Run(setting, job=job) as run:
        run.prepare()
        windows = run.loader(job.dataset()).windows(STEPS)
        clock = StepClock()
        steps = run.over(
            windows, lambda window: window.step % settling == settling - 1 or window.step == STEPS - 1
        )
        times = [clock.lap(outcome.ended_s) for _, outcome in steps]
    # The first step rehearses.
    assert times[1:] == [2.0] * (STEPS - 1)


def test_a_clock_never_runs_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    clock = StepClock()
    now = 12.0
    assert clock.lap(11.5) == 1.5
    assert clock.lap() == 0.5
    # Ended before the clock was restarted, or after now: neither can be meant.
    assert clock.lap(9.0) == 0.0
    assert clock.lap(99.0) == 0.0
