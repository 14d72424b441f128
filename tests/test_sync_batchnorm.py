"""Synchronised BatchNorm: real processes over gloo see what one process sees of the same samples."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from trimtab.spec import Mesh, Setting, Share, Strategy
from trimtab.training.run import Run
from worlds import Drill, everywhere

if TYPE_CHECKING:
    from collections.abc import Iterator

WHOLE = 16
STEPS = 3
NEAR = 1e-12


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class NormAndAct(nn.BatchNorm1d):
    """A layer with a forward pass of its own, as image libraries have them."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, variance = self.running_mean, self.running_var
        return torch.relu(
            functional.batch_norm(
                batch, mean, variance, self.weight, self.bias, self.training, self.momentum or 0.0, self.eps
            )
        )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.line = nn.Linear(width, width)
        self.norm = NormAndAct(width)

    def forward(self, batch: torch.Tensor) -> Any:
        return batch + self.norm(self.line(batch))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 6, 3)
        self.norm = nn.BatchNorm1d(6, momentum=None)
        self.plain = nn.BatchNorm1d(6, affine=False)
        self.middle = nn.Linear(12, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(2)])
        self.last = nn.Linear(8, 1)

    def forward(self, batch: torch.Tensor) -> Any:
        found = torch.relu(self.plain(self.norm(self.first(batch))))
        found = self.middle(found.flatten(1))
        for block in self.blocks:
            found = block(found)
        return self.last(found)


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def squared(model: Any, batch: Any) -> Any:
    return (model(batch["x"]) - batch["x"].mean((1, 2))[:, None]).square().mean()


def data(step: int) -> dict[str, torch.Tensor]:
    return {"x": 3 + torch.randn(WHOLE, 2, 4, generator=torch.Generator().manual_seed(step))}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def state_of(model: Any) -> dict[str, torch.Tensor]:
    found = model.state_dict()
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone()
        for name, one in found.items()
    }


Passes = list[list[int]]
"""Of each pass of a step, the samples of all ranks in it."""


def expected(steps: list[Passes]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the state of one process that has the samples of all ranks in each pass."""
    model = network()
    optimizer = sgd(model.parameters())
    losses = []
    for step, passes in enumerate(steps):
        optimizer.zero_grad()
        total = 0.0
        for rows in passes:
            loss = squared(model, {"x": data(step)["x"][rows]}) * (len(rows) / WHOLE)
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, state_of(model)


def passes(places: list[int], micro: int) -> Passes:
    """The samples of all ranks in each pass, where ranks have the samples between places."""
    shares = [list(range(start, stop)) for start, stop in itertools.pairwise(places)]
    rounds = max(-(-len(one) // micro) for one in shares)
    return [
        [row for share in shares for row in share[number * micro : (number + 1) * micro]]
        for number in range(rounds)
    ]


Report = tuple[list[float], dict[str, torch.Tensor], list[int]]


def trained(setting: Setting, places: list[int], drill: Any = None) -> Report:
    """Losses, state and attempts of a run on the ranks that there are."""
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    with Run(setting, faults=drill, join_s=60) as run:
        model, _ = run.prepare(network(), sgd, loss=squared)
        start, stop = places[run.rank], places[run.rank + 1]
        outcomes = [run.step({"x": data(step)["x"][start:stop]}) for step in range(STEPS)]
        assert not any(one.skipped for one in outcomes)
        return [one.loss for one in outcomes], state_of(model), [one.attempts for one in outcomes]


def close(found: Report, steps: list[Passes], near: float = NEAR) -> None:
    losses, state = expected(steps)
    assert found[0] == pytest.approx(losses, rel=near)
    assert found[1].keys() == state.keys()
    for name, value in state.items():
        assert (found[1][name] - value).abs().max().item() < near, name


def ddp(size: int, micro: int) -> Setting:
    return Setting(
        strategy=Strategy.DDP, mesh=Mesh(dp_replicate=size), micro_batch=micro,
        accumulation=-(-WHOLE // (micro * size)), global_batch=WHOLE, sync_batchnorm=True,
    )  # fmt: skip


def fsdp(size: int, micro: int) -> Setting:
    return ddp(size, micro).replace(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=size))


EVEN, UNEVEN, EMPTY = [0, 8, 16], [0, 6, 16], [0, 0, 16]


def two_ranks() -> dict[str, Report]:
    torch.set_default_dtype(torch.float64)
    shares = (
        Share(samples=6, micro_batch=3, accumulation=2),
        Share(samples=10, micro_batch=10, accumulation=1),
    )
    mixed = ddp(2, 8).replace(shares=shares, micro_batch=10, accumulation=2)
    found = {
        "whole": trained(ddp(2, 8), EVEN),
        "rounds": trained(ddp(2, 2), EVEN),
        "uneven": trained(ddp(2, 5), UNEVEN),
        "empty": trained(ddp(2, 8), EMPTY),
        "mixed": trained(mixed, UNEVEN),
        "sharded": trained(fsdp(2, 8), EVEN),
        "sharded uneven": trained(fsdp(2, 5), UNEVEN),
    }
    for name, setting in (("ddp", ddp(2, 8)), ("fsdp", fsdp(2, 8))):
        # A failure makes the micro-batch of both ranks smaller: 8, then 4.
        found[f"{name} forward"] = trained(setting, EVEN, Drill(("forward", 1, 1)))
        both = Drill(("backward", 1, 0), ("forward", 1, 1), ("gradient", 2, 1))
        found[f"{name} both"] = trained(setting, EVEN, both)
        lone = Drill(("backward", 0, 0), ("forward", 1, 1), ("backward", 2, 1))
        found[f"{name} lone"] = trained(setting.replace(micro_batch=1, accumulation=8), EVEN, lone)
    return found


def test_two_ranks_see_the_statistics_of_one_process_whatever_fails() -> None:
    for found in everywhere(2, two_ranks, timeout_s=100):
        one_pass, halves = passes(EVEN, 8), passes(EVEN, 4)
        assert one_pass == [list(range(WHOLE))]
        close(found["whole"], [one_pass] * 3)
        close(found["sharded"], [one_pass] * 3)
        close(found["rounds"], [passes(EVEN, 2)] * 3)
        close(found["uneven"], [passes(UNEVEN, 5)] * 3)
        close(found["sharded uneven"], [passes(UNEVEN, 5)] * 3)
        close(found["empty"], [passes(EMPTY, 8)] * 3)
        close(found["mixed"], [[[0, 1, 2, *range(6, 16)], [3, 4, 5]]] * 3)
        for name in ("ddp", "fsdp"):
            close(found[f"{name} forward"], [one_pass, halves, halves])
            assert found[f"{name} forward"][2] == [1, 2, 1]
            # Both ranks fail in one attempt.
            close(found[f"{name} both"], [one_pass, halves, halves])
            assert found[f"{name} both"][2] == [1, 2, 2]
            # A single sample is tried again: nothing changes. Two samples a pass magnify rounding.
            close(found[f"{name} lone"], [passes(EVEN, 1)] * 3, near=1e-8)
            assert found[f"{name} lone"][2] == [2, 2, 2]
