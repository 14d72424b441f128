"""Synchronised BatchNorm: real processes over gloo see what one process sees of the same samples."""

from __future__ import annotations

import copy
import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trimtab
from outlooks import workload
from trimtab import cluster
from trimtab.api.estimating import first_device, look_closely, make_setting
from trimtab.engine.sync_norm import synchronise_batch_norms
from trimtab.errors import JobFailed, WrongUse
from trimtab.planner import batch_loss_rules, pins
from trimtab.planner.space import build_space
from trimtab.predict import communication
from trimtab.spec import BatchLoss, Mesh, Policy, Recompute, Setting, Share, Strategy
from trimtab.spec.trace import STATISTICS
from trimtab.training import prepare
from trimtab.training.process_group import World
from trimtab.training.run import Run
from trimtab.training.task import divide_setting
from worlds import Drill, everywhere, world_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WHOLE = 16
STEPS = 3
NEAR = 1e-12


pytestmark = pytest.mark.usefixtures("doubles")


class NormAndAct(nn.BatchNorm1d):
    """A layer with a forward pass of its own, as image libraries have them."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, variance = self.running_mean, self.running_var
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
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


def weighted(model: Any, batch: Any) -> Any:
    far = (model(batch["x"]) - batch["x"].mean((1, 2))[:, None]).square().sum(1)
    return (far * batch["w"]).sum() / batch["w"].sum()


def weight(batch: Any) -> Any:
    return batch["w"].sum()


def data(step: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    weights = torch.rand(WHOLE, generator=made)
    # The first part of rank 0 counts for nothing, and in the second step no sample does.
    weights[:2] = 0
    return {"x": 3 + torch.randn(WHOLE, 2, 4, generator=made), "w": weights * (step != 1)}


class Pairs(trimtab.Job):
    """Compares samples of the whole batch."""

    global_batch = WHOLE

    def model(self) -> Any:
        return network()

    def batch(self, size: int) -> Any:
        return {name: value[:size] for name, value in data(0).items()}

    def embed(self, model: Any, batch: Any) -> Any:
        return model(batch["x"])

    def loss_of(self, embeddings: Any) -> Any:
        return (embeddings - embeddings.T).square().mean() + embeddings.mean().square()

    def optimizer(self, params: Any) -> Any:
        return sgd(params)


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


def expected(steps: list[Passes], loss: Any = squared) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the state of one process that has the samples of all ranks in each pass."""
    model = network()
    optimizer = sgd(model.parameters())
    losses = []
    for step, passes in enumerate(steps):
        optimizer.zero_grad(set_to_none=False)
        batch = data(step)
        total = 0.0
        if isinstance(loss, Pairs):
            found = torch.cat([loss.embed(model, {"x": batch["x"][rows]}) for rows in passes])
            order = torch.tensor([row for rows in passes for row in rows]).argsort()
            whole = loss.loss_of(found[order])
            whole.backward()
            total = whole.item()
        for rows in [] if isinstance(loss, Pairs) else passes:
            mine = {name: value[rows] for name, value in batch.items()}
            share = len(rows) / WHOLE if loss is squared else weight(mine) / weight(batch)
            part = loss(model, mine) * share
            part.backward()
            total += part.item()
        optimizer.step()
        losses.append(total)
    return losses, state_of(model)


def passes(places: list[int], micro: int) -> Passes:
    """The samples of all ranks in each pass, where ranks have the samples between places."""
    shares = [list(range(start, stop)) for start, stop in itertools.pairwise(places)]
    rounds = max(-(-len(share) // micro) for share in shares)
    return [
        [row for share in shares for row in share[number * micro : (number + 1) * micro]]
        for number in range(rounds)
    ]


Report = tuple[list[float], dict[str, torch.Tensor], list[int]]


def trained(setting: Setting, places: list[int], drill: Any = None, loss: Any = squared) -> Report:
    """Losses, state and attempts of a run on the ranks that there are."""
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    with Run(setting, job=loss if isinstance(loss, Pairs) else None, faults=drill, join_s=60) as run:
        if isinstance(loss, Pairs):
            model, _ = run.prepare()
        else:
            model, _ = run.prepare(network(), sgd, loss=loss, weight=weight if loss is weighted else None)
        start, stop = places[run.rank], places[run.rank + 1]
        outcomes = [
            run.step({name: value[start:stop] for name, value in data(step).items()}) for step in range(STEPS)
        ]
        assert not any(outcome.skipped for outcome in outcomes)
        return (
            [outcome.loss for outcome in outcomes],
            state_of(model),
            [outcome.attempts for outcome in outcomes],
        )


def close(found: Report, steps: list[Passes], loss: Any = squared, near: float = NEAR) -> None:
    losses, state = expected(steps, loss)
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
        again = setting.replace(recompute=Recompute.FULL)
        found[f"{name} recomputed"] = trained(again, EVEN, Drill(("backward", 1, 0)))
        lone = Drill(("backward", 0, 0), ("forward", 1, 1), ("backward", 2, 1))
        found[f"{name} lone"] = trained(setting.replace(micro_batch=1, accumulation=8), EVEN, lone)
        halved = setting.replace(micro_batch=4, accumulation=2)
        found[f"{name} cached"] = trained(halved, UNEVEN, loss=Pairs())
        # In the pass without gradients, and in the one with them.
        both = Drill(("forward", 1, 1), ("backward", 2, 0))
        found[f"{name} cached drill"] = trained(setting, EVEN, both, loss=Pairs())
    found["weighted"] = trained(ddp(2, 2), EVEN, loss=weighted)
    return found


@pytest.mark.slow
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
            # Running statistics see no sample twice.
            close(found[f"{name} recomputed"], [one_pass, halves, halves])
            # Both ranks fail in one attempt.
            close(found[f"{name} both"], [one_pass, halves, halves])
            assert found[f"{name} both"][2] == [1, 2, 2]
            # A single sample is tried again: nothing changes. Two samples a pass magnify rounding.
            close(found[f"{name} lone"], [passes(EVEN, 1)] * 3, near=1e-8)
            assert found[f"{name} lone"][2] == [2, 2, 2]
            close(found[f"{name} cached"], [passes(UNEVEN, 4)] * 3, Pairs())
            close(found[f"{name} cached drill"], [one_pass, halves, passes(EVEN, 2)], Pairs(), near=1e-10)
            assert found[f"{name} cached drill"][2] == [1, 2, 2]
        left = [[2, 3, 8, 9], [4, 5, 10, 11], [6, 7, 12, 13], [14, 15]]
        close(found["weighted"], [left, [], left], weighted, near=1e-10)


LAYERS: list[tuple[Any, tuple[int, ...]]] = [
    (lambda: nn.BatchNorm1d(5), (7, 5)),
    (lambda: nn.BatchNorm2d(5, momentum=None), (3, 5, 4, 4)),
    (lambda: nn.BatchNorm3d(5, affine=False), (3, 5, 2, 2, 2)),
    (lambda: nn.BatchNorm1d(5, track_running_stats=False), (3, 5, 6)),
    (lambda: nn.SyncBatchNorm(5), (3, 5, 4, 4)),
    (lambda: NormAndAct(5), (7, 5)),
]


@pytest.fixture
def lone_world(tmp_path: Path) -> Iterator[None]:
    with world_of(1, 0, tmp_path / "store"):
        yield


@pytest.mark.usefixtures("lone_world")
@pytest.mark.parametrize("number", range(len(LAYERS)))
def test_a_layer_of_one_rank_is_the_layer_itself(number: int) -> None:
    make, shape = LAYERS[number]
    plain = make()
    synced = copy.deepcopy(plain)
    holder = nn.Sequential(synced)
    assert synchronise_batch_norms(holder) is not None
    assert isinstance(synced, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001 - what libraries look for
    if isinstance(plain, nn.SyncBatchNorm):
        # torch's own one refuses CPU tensors.
        plain = nn.BatchNorm2d(5)
    assert synced.state_dict().keys() == plain.state_dict().keys()
    values = 100 + torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for training in (True, True, False):
        outputs = []
        for layer in (plain, copy.deepcopy(synced) if not training else synced):
            layer.train(training)
            given = values.clone().requires_grad_()
            layer.zero_grad()
            output = layer(given)
            (output * values.sin()).sum().backward()
            outputs.append(
                [output.detach(), given.grad, *(parameter.grad for parameter in layer.parameters())]
            )
        for one, other in zip(*outputs, strict=True):
            assert (one - other).abs().max() < 1e-9
    for buffer, other in zip(plain.buffers(), synced.buffers(), strict=True):
        assert (buffer - other).abs().max() < 1e-10


@pytest.mark.usefixtures("lone_world")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_statistics_in_float32(dtype: torch.dtype) -> None:
    plain: Any = nn.BatchNorm1d(5, dtype=torch.float32)
    synced: Any = nn.Sequential(copy.deepcopy(plain))
    synchronise_batch_norms(synced)
    values = (100 + torch.randn(64, 5)).to(dtype)
    output = synced(values)
    assert output.dtype is dtype
    assert torch.allclose(output.float(), plain(values.float()), atol=0.05)
    assert torch.allclose(synced[0].running_var, plain.running_var, rtol=1e-4)
    whole: Any = nn.Sequential(nn.BatchNorm1d(5, dtype=dtype))
    synchronise_batch_norms(whole)
    whole(values)
    assert torch.allclose(whole[0].running_var.float(), plain.running_var, rtol=0.02)


class Stubborn(nn.BatchNorm1d):
    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (batch - batch.mean(0)) / batch.std(0)


@pytest.mark.usefixtures("lone_world")
def test_a_layer_that_computes_statistics_in_its_own_way_is_refused() -> None:
    model = nn.Sequential(Stubborn(5))
    synchronise_batch_norms(model)
    with pytest.raises(JobFailed, match="class Stubborn: its forward"):
        model(torch.randn(4, 5))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"strategy": Strategy.PIPELINE, "mesh": Mesh(pp=2), "accumulation": 2},
            "strategy pipeline: pipeline with",
        ),
        ({"compile": True}, "sync_batchnorm with compile"),
    ],
)
def test_a_run_refuses_what_cannot_be_synchronised(changes: dict[str, Any], words: str) -> None:
    setting = ddp(2, 8).replace(**changes)
    with pytest.raises(WrongUse, match=words):
        prepare.check_world_size(setting, World(size=2))


def test_no_batch_norm_no_change() -> None:
    assert synchronise_batch_norms(nn.Linear(2, 2)) is None


NORMED = BatchLoss(additive=True, batch_norms=3, global_batch=WHOLE)


def legal(**fixed: Any) -> Any:
    known = workload(global_batch=WHOLE, batch_loss=NORMED)
    return build_space(known, cluster("4xA100-40GB"), Policy(pins={"sync_batchnorm": True, **fixed}))


def test_only_layouts_whose_ranks_run_the_same_layers_are_legal() -> None:
    assert pins.read_pins(["sync-batchnorm=yes"]) == {"sync_batchnorm": True}
    found = legal()
    assert {family.strategy for family in found.families} == {Strategy.SINGLE, Strategy.DDP, Strategy.FSDP}
    assert all(family.setting(family.splits[0]).sync_batchnorm for family in found.families)
    assert {family.layout.gpus for family in found.families if family.compile} == {1}
    causes = [one.why for one in found.refused]
    assert any(why.startswith("pipeline with sync_batchnorm") for why in causes)
    assert any(why.startswith("sync_batchnorm with compile") for why in causes)
    for wrong in ({"strategy": "pipeline"}, {"compile": True, "gpus": 2}):
        with pytest.raises(WrongUse, match=r"with sync_batchnorm|sync_batchnorm with compile"):
            legal(**wrong)


@pytest.mark.parametrize(
    ("chosen", "value", "words"),
    [
        (ddp(2, 8).replace(sync_batchnorm=False), "sees 8 samples",
         "--pin sync_batchnorm=true computes them over all 2 ranks together, 16 samples"),
        (ddp(2, 8), "sees 16 samples", "the whole global batch, as in one piece"),
        (ddp(2, 2), "sees 4 samples", "one micro-batch of all 2 ranks together (sync_batchnorm), not over"),
        (Setting(micro_batch=4, accumulation=4, global_batch=16, sync_batchnorm=True), "sees 4 samples",
         "of a micro-batch, not over the global batch of 16"),
    ],
)  # fmt: skip
def test_a_plan_offers_it_and_says_what_it_does(chosen: Setting, value: str, words: str) -> None:
    (found,) = batch_loss_rules.explain_batch_loss(workload(global_batch=WHOLE, batch_loss=NORMED), chosen)
    assert found.value == value
    assert words in found.why
    (none,) = batch_loss_rules.explain_batch_loss(
        workload(global_batch=WHOLE, batch_loss=BatchLoss(additive=True)), ddp(2, 8)
    )
    assert (none.subject, none.value) == ("sync_batchnorm", "no effect")


def test_an_estimate_says_what_the_layers_see() -> None:
    (offer,) = batch_loss_rules.list_warnings(NORMED, ddp(2, 4).replace(sync_batchnorm=False))
    assert offer.endswith("--sync-batchnorm lets them see those of all 2 GPUs")
    (said,) = batch_loss_rules.list_warnings(NORMED, ddp(2, 4))
    assert (
        said == "3 BatchNorm layers see the 8 samples of one micro-batch of all 2 GPUs together, "
        "not the global batch of 16"
    )


def test_fewer_processes_stay_synchronised_and_more_do_not_compile() -> None:
    assert divide_setting(ddp(2, 8), 4)[0].sync_batchnorm
    alone = Setting(micro_batch=16, global_batch=16, compile=True, sync_batchnorm=True)
    found, said = divide_setting(alone, 2)
    assert (found.compile, found.sync_batchnorm) == (False, True)
    assert "not compiled any more" in said


class Images(trimtab.Job):
    name, global_batch = "images", WHOLE

    def model(self) -> Any:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))

    def batch(self, size: int) -> Any:
        return torch.randn(size, 3, 16, 16)

    def loss(self, model: Any, batch: Any) -> Any:
        return model(batch).float().square().mean()


@pytest.mark.slow
def test_a_trace_has_its_collectives_and_the_time_counts_them() -> None:
    torch.set_default_dtype(torch.float32)
    where = cluster("4xA100-40GB")
    given: dict[str, Any] = {
        "micro_batch": 4, "precision": "bf16", "recompute": "none", "compile": False, "gpus": 4,
        "optimizer": "fused", "allocator": "default",
    }  # fmt: skip
    seen = {}
    for strategy, synced in (("ddp", False), ("ddp", True), ("fsdp", True)):
        setting = make_setting(strategy=strategy, sync_batchnorm=synced, **given)
        found, _, trace = look_closely(Images, setting, first_device(where), where=where)
        talks = [trace.works[one].op for one in trace.sequence if trace.works[one].op.startswith(STATISTICS)]
        assert len(talks) == 4 * synced
        assert sum("gather" in talk for talk in talks) == 2 * synced
        seen[strategy, synced] = found
    plain, synced_ = seen["ddp", False], seen["ddp", True]
    assert plain.step_time is not None
    assert synced_.step_time is not None
    among = communication.find_links(where, 4)
    # Two layers gather 17 numbers a rank forward, and sum 16 backward.
    talk_s = 2 * (among.all_gather_s(17 * 4 * 4, 4) + among.all_reduce_s(16 * 4, 4))
    assert synced_.step_time.communication_s - plain.step_time.communication_s == pytest.approx(
        talk_s, rel=0.01
    )
    assert synced_.allocated_bytes == pytest.approx(plain.allocated_bytes, rel=0.02)
