"""Every pipeline schedule over gloo learns what one process learns, also after failures and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from test_ways import (
    STEPS,
    WHOLE,
    Truth,
    adamw,
    among,
    data,
    evaluated_loss,
    failing,
    loss,
    network,
    out_of_memory,
    piped,
    pipeline,
    resumed,
    suspected,
)
from trimtab.engine.pipeline_stage import keep_stage
from trimtab.engine.weight_gradients import WeightGradients, flush_weight_gradients
from trimtab.errors import JobFailed, WrongUse
from trimtab.spec import Recompute, Schedule, Setting
from worlds import Drill, everywhere

pytestmark = pytest.mark.usefixtures("doubles")

LOOPED: dict[str, dict[str, Any]] = {
    "interleaved": {"schedule": Schedule.INTERLEAVED, "virtual_stages": 2},
    "zero bubble": {"schedule": Schedule.ZERO_BUBBLE},
    "zero bubble looped": {"schedule": Schedule.ZERO_BUBBLE, "virtual_stages": 2},
}


def two_ranks(folder: str, name: str) -> dict[str, Any]:
    """Train by one schedule on two ranks, with failures, and evaluate."""
    torch.set_default_dtype(torch.float64)
    given = LOOPED[name]
    found: dict[str, Any] = {}
    with among(2):
        found["plain"] = piped(pipeline(2, micro=2, **given), clip=0.3)
    with among(2):
        drill = Drill(("forward", 0, 1), ("backward", 1, 0), ("gradient", 2, 1))
        found["drill"] = piped(pipeline(2, micro=3, **given), drill=drill)
    with among(2):
        found["recomputed"] = piped(pipeline(2, micro=3, recompute=Recompute.FULL, **given))
    with among(2):
        found["loss"] = evaluated_loss(pipeline(2, micro=2, **given))
    with among(2):
        found["failing"] = failing(1, pipeline(2, **given))
    settings = [
        pipeline(2, **given),
        Setting(micro_batch=5, accumulation=2, global_batch=WHOLE),
        pipeline(2, schedule=Schedule.ONE_F_ONE_B),
        pipeline(2, micro=2, **given),
    ]
    found |= resumed(Path(folder), settings)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPED)
def test_two_ranks_learn_what_one_process_learns(name: str, tmp_path: Path) -> None:
    reports = everywhere(2, two_ranks, str(tmp_path), name, timeout_s=300)
    batches = [data(step) for step in range(STEPS)]
    plain, clipped = Truth(network(), loss, batches), Truth(network(), loss, batches, 0.3)
    with torch.no_grad():
        right = loss(network().eval(), data(7)).item()
    for rank, found in enumerate(reports):
        clipped.check(found["plain"])
        plain.check(found["drill"])
        assert [outcome.attempts for outcome in found["drill"][0]] == [2, 2, 2, 1]
        plain.check(found["recomputed"])
        assert found["loss"] == pytest.approx(right, rel=1e-12)
        assert found["failing"].startswith("ValueError" if rank == 1 else "NeighbourFailed: rank 1")
        for number, ranks in enumerate((2, 1, 2, 2)):
            truth = adamw(2 * number + 2)
            state = found[f"kept {number}"][1] if rank < ranks else {}
            for key, value in state.items():
                if not key.startswith("unused"):
                    assert (value - truth[key]).abs().max() < 1e-10, key


def four_ranks() -> dict[str, Any]:
    """Train by every schedule on four ranks: two stages with two copies each, and four stages."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    for name, given in LOOPED.items():
        with among(4):
            found[f"{name} 2 x 2"] = piped(pipeline(2, 2, micro=1, **given))
        with among(4):
            found[f"{name} 4"] = piped(pipeline(4, micro=1, **given), depth=9)
    with among(3) as here:
        if here:
            found["suspects"] = suspected(pipeline(3, **LOOPED["interleaved"]), depth=6)
    with among(3) as here:
        if here:
            found["full"] = out_of_memory(pipeline(3, micro=1, schedule=Schedule.ZERO_BUBBLE))
    return found


@pytest.mark.slow
def test_four_ranks_learn_what_one_process_learns() -> None:
    reports = everywhere(4, four_ranks, timeout_s=600)
    batches = [data(step) for step in range(STEPS)]
    few, many = Truth(network(), loss, batches), Truth(network(0, 9), loss, batches)
    for rank, found in enumerate(reports):
        for name in LOOPED:
            few.check(found[f"{name} 2 x 2"])
            many.check(found[f"{name} 4"])
        if rank < 3:
            for kind, phase in (("Endless", "forward"), ("Steep", "backward")):
                for number in range(6):
                    text = found["suspects"][f"{kind} {number}"]
                    assert (text.module, text.phase) == (f"blocks.{number}.drop", phase)
            text = "one sample at once ran out of memory" if rank == 1 else "another rank has no memory left"
            assert text in found["full"]


def read_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_weight_gradients_computed_later_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    tied = nn.Linear(5, 5)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), tied, tied, nn.Linear(5, 2, bias=False))
    value = torch.randn(2, 4, 3)
    model(value).square().sum().backward()
    expected = read_gradients(model)
    model.zero_grad()
    store = WeightGradients()
    assert store.install(model) == 3
    calls: list[int] = []
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda parameter: calls.append(id(parameter)))
    with store.collect() as products:
        model(value).square().sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    # torch calls the hooks of parameters without a gradient too.
    calls.clear()
    flush_weight_gradients(products)
    assert sorted(calls) == sorted(id(parameter) for parameter in model.parameters())
    for name, gradient in read_gradients(model).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-12), name
    # Outside of collect() the backward pass computes both.
    model.zero_grad()
    model(value).square().sum().backward()
    for name, gradient in read_gradients(model).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-12), name


def test_weight_gradients_follow_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).float()
    value = torch.randn(3, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(value)
    plain.float().square().sum().backward()
    expected = read_gradients(model)
    model.zero_grad()
    store = WeightGradients()
    store.install(model)
    with store.collect() as products:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            split = model(value)
        split.float().square().sum().backward()
    flush_weight_gradients(products)
    assert split.dtype == torch.bfloat16
    assert torch.equal(plain, split)
    for name, gradient in read_gradients(model).items():
        assert gradient.dtype == torch.float32
        assert torch.allclose(gradient, expected[name], rtol=0.02, atol=0.02), name


def test_several_stages_need_blocks_and_no_running_statistics_outside_of_them() -> None:
    def receive(given: torch.Tensor) -> torch.Tensor:
        return torch.zeros(given.shape)

    with pytest.raises(WrongUse, match="blocks has 5 blocks, and a stage needs one"):
        keep_stage(network(), 0, 3, receive, virtual_stages=2)
    normed: Any = network()
    normed.norm = nn.BatchNorm1d(8)
    with pytest.raises(JobFailed, match="norm has running statistics outside of the blocks"):
        keep_stage(normed, 0, 2, receive, virtual_stages=2)
    relay, dropped, _ = keep_stage(network(), 1, 2, receive, virtual_stages=2)
    assert [tuple(stage) for stage in relay.stages] == [(1, 2), (4, 5)]
    assert len(dropped) == 3
