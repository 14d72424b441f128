"""Kinds of training: averaged weights after every step, an evaluation of the job's own, a longest batch."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from shared_jobs import shared_job
from trimtab.engine.step import refuse_partial_model
from trimtab.errors import JobFailed, WrongUse
from trimtab.planner.batch_loss_rules import explain_refusal
from trimtab.spec import Mesh, Setting, Strategy, Workload
from trimtab.training.evaluation import evaluate_run
from trimtab.training.run import Run
from worlds import Drill, everywhere

WHOLE = 8
STEPS = 4

pytestmark = pytest.mark.usefixtures("doubles")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, batch: torch.Tensor) -> Any:
        return batch + self.down(torch.tanh(self.up(batch)))


class Averaged(nn.Module):
    """A network and the moving average of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), *[Block(8) for _ in range(3)], nn.Linear(8, 1))
        self.average = copy.deepcopy(self.net).requires_grad_(requires_grad=False)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.net(batch)


class Ema(trimtab.Job):
    global_batch = WHOLE

    def model(self) -> Any:
        torch.manual_seed(0)
        return Averaged()

    def batch(self, size: int) -> Any:
        return data(0, size)

    def loss(self, model: Any, batch: Any) -> Any:
        return (model(batch["x"]) - batch["y"]).square().mean()

    def optimizer(self, params: Any) -> Any:
        return torch.optim.AdamW(params, lr=0.01)

    def after_step(self, model: Any) -> None:
        for average, weight in zip(model.average.parameters(), model.net.parameters(), strict=True):
            average.lerp_(weight, 0.1)

    def evaluate(self, model: Any, batch: Any) -> Any:
        error = model.average(batch["x"]) - batch["y"]
        return {"loss": error.square().mean(), "distance": error.abs().mean()}


def data(step: int, count: int = WHOLE) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    x = torch.randn(count, 6, generator=made, dtype=torch.get_default_dtype())
    return {"x": x, "y": x.sum(1, keepdim=True).sin()}


def cut(batch: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    return {name: value[start:stop] for name, value in batch.items()}


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.named_parameters()
    }


def expected_average() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training by torch alone, with the whole batch."""
    job = Ema()
    model = job.model()
    optimizer = job.optimizer(model.net.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = job.loss(model, data(step))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            job.after_step(model)
        losses.append(loss.item())
    return losses, weights_of(model)


Result = tuple[list[float], dict[str, torch.Tensor]]


def trained(setting: Setting, job: Any, drill: Any = None) -> Result:
    """Losses and weights of a run on the ranks that there are."""
    if setting.gpus > 1:
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    with Run(setting, job=job, faults=drill, join_s=60) as run:
        model, _ = run.prepare()
        share = WHOLE // run.groups.data_parallel
        start = share * run.groups.data_rank
        outcomes = [run.step(cut(data(step), start, start + share)) for step in range(STEPS)]
        assert not any(outcome.skipped for outcome in outcomes)
        return [outcome.loss for outcome in outcomes], weights_of(model)


def assert_close(result: Result, reference: Result, within: float = 1e-12) -> None:
    assert result[0] == pytest.approx(reference[0], rel=within)
    assert result[1].keys() == reference[1].keys()
    for name, weight in reference[1].items():
        assert (result[1][name] - weight).abs().max().item() < within, name


def alone(micro: int, **others: Any) -> Setting:
    return Setting(micro_batch=micro, accumulation=WHOLE // micro, global_batch=WHOLE, **others)


def ddp(size: int, micro: int) -> Setting:
    return Setting(
        strategy=Strategy.DDP, mesh=Mesh(dp_replicate=size), micro_batch=micro,
        accumulation=WHOLE // (micro * size), global_batch=WHOLE,
    )  # fmt: skip


def fsdp(size: int, micro: int) -> Setting:
    return ddp(size, micro).replace(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=size))


# --- after_step ---


@pytest.mark.parametrize("micro", [8, 2])
@pytest.mark.parametrize("point", ["", "forward", "backward", "optimizer", "gradient"])
@pytest.mark.slow
def test_averaged_weights_are_those_of_a_plain_loop_through_every_fault(micro: int, point: str) -> None:
    drill = Drill((point, 1, 0), (point, 3, 0)) if point else None
    assert_close(trained(alone(micro), Ema(), drill), expected_average())


def average_on_ranks(size: int) -> list[Result]:
    """Under ddp and fsdp, with and without a rank that runs out of memory."""
    torch.set_default_dtype(torch.float64)
    points = (None, "forward", "backward")
    return [
        trained(make(size, 2), Ema(), point and Drill((point, 1, size - 1)))
        for make in (ddp, fsdp)
        for point in points
    ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_averaged_weights_are_the_same_on_every_number_of_ranks(size: int) -> None:
    for results in everywhere(size, average_on_ranks, size):
        for result in results:
            assert_close(result, expected_average())


def test_after_step_is_not_called_after_a_step_that_changed_nothing() -> None:
    class Counting(Ema):
        calls = 0

        def after_step(self, model: Any) -> None:  # noqa: ARG002
            assert not torch.is_grad_enabled()
            Counting.calls += 1

        def loss(self, model: Any, batch: Any) -> Any:
            return super().loss(model, batch) * float("nan")

    with Run(alone(8), job=Counting()) as run:
        run.prepare()
        assert run.step(data(0)).skipped == "the loss is nan"
    assert Counting.calls == 0


def test_an_error_in_after_step_names_it() -> None:
    class Failing(Ema):
        def after_step(self, model: Any) -> None:
            raise KeyError(model.absent)

    with Run(alone(8), job=Failing()) as run:
        run.prepare()
        with pytest.raises(JobFailed, match="no attribute 'absent'") as error:
            run.step(data(0))
    assert error.value.given == "after_step()"


@pytest.mark.parametrize(
    ("strategy", "mesh"), [(Strategy.PIPELINE, Mesh(pp=2)), (Strategy.BRANCH, Mesh(branch=2))]
)
def test_a_strategy_whose_ranks_hold_a_part_of_the_model_is_refused(strategy: Strategy, mesh: Mesh) -> None:
    setting = Setting(strategy=strategy, mesh=mesh, micro_batch=8, global_batch=8)
    with pytest.raises(WrongUse, match=r"the job has after_step\(\) and evaluate\(\), and a rank would hold"):
        refuse_partial_model(Ema(), setting)
    workload = Workload(name="ema", global_batch=8, whole_model=("after_step()",))
    why = f"{strategy}: a rank would hold only a part of the model, and the job has after_step()"
    assert explain_refusal(workload, strategy, mesh) == why
    assert not explain_refusal(workload, Strategy.FSDP, Mesh(dp_shard=2))
    refuse_partial_model(object(), setting)


# --- evaluate ---


class Samples(list[Any]):
    """A dataset of single samples."""

    def __init__(self, count: int) -> None:
        super().__init__({name: value[0] for name, value in data(step, 1).items()} for step in range(count))


def test_own_metrics_are_means_over_all_samples() -> None:
    samples = Samples(7)
    whole = {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "y")}
    with Run(alone(4), job=Ema()) as run:
        model, _ = run.prepare()
        metrics = evaluate_run(run, samples)
        right = Ema().evaluate(model, whole)
        assert model.training
    assert metrics == pytest.approx({name: value.item() for name, value in right.items()}, rel=1e-12)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda _: {}, "no metric"),
        (lambda _: {"error": "much"}, "error is a str, not a number"),
        (lambda batch: batch["x"], "loss is a Tensor, not a number"),
        (lambda batch: {f"metric{len(batch['x'])}": 1.0}, "metric3, which are not those of an earlier batch"),
    ],
)
def test_metrics_that_are_none_are_refused(returned: Any, text: str) -> None:
    class Wrong(Ema):
        def evaluate(self, model: Any, batch: Any) -> Any:  # noqa: ARG002
            return returned(batch)

    with Run(alone(4), job=Wrong()) as run:
        run.prepare()
        with pytest.raises(JobFailed, match=text):
            evaluate_run(run, Samples(7))


# --- longest ---

READER = """
    import torch
    from torch import nn


    class Job:
        global_batch = 8

        def model(self):
            return nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))

        def batch(self, size):
            return torch.randn(size, 64, 1024)

        def loss(self, model, batch):
            return model(batch).square().mean()


    class Longest(Job):
        def longest(self, size):
            return torch.randn(size, 256, 1024)


    class Long(Job):
        def batch(self, size):
            return torch.randn(size, 256, 1024)


    class Wrong(Job):
        def longest(self, size):
            return torch.randn(size, 256, 1023)


    class Failing(Job):
        def after_step(self, model):
            model.absent.zero_()
"""


@pytest.mark.slow
def test_memory_is_that_of_the_longest_batch_and_time_that_of_the_usual() -> None:
    usual, longest, long = (
        trimtab.estimate(shared_job(READER, name), "H200", micro_batch=64)
        for name in ("Job", "Longest", "Long")
    )
    assert longest.allocated_bytes == long.allocated_bytes > 1.5 * usual.allocated_bytes
    assert longest.parts == long.parts
    assert longest.step_s == usual.step_s
    assert long.step_s is not None
    assert longest.step_s is not None
    assert long.step_s > 1.2 * longest.step_s
    note = "memory is that of longest(), the longest batch of the job; time is that of batch()"
    assert note in longest.assumptions
    assert note not in long.assumptions


@pytest.mark.slow
def test_an_error_of_the_longest_batch_and_of_the_hook_is_the_jobs() -> None:
    with pytest.raises(JobFailed, match="mat1 and mat2 shapes"):
        trimtab.estimate(shared_job(READER, "Wrong"), "H200", micro_batch=8)
    with pytest.raises(JobFailed, match="no attribute 'absent'") as error:
        trimtab.estimate(shared_job(READER, "Failing"), "H200", micro_batch=8)
    assert error.value.given == "after_step()"
