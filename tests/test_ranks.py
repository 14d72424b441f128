"""Real processes over gloo: what they learn together is what one process learns from the whole batch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from trimtab.engine import fsdp as fsdp_gradients
from trimtab.errors import NothingFits
from trimtab.spec import IncidentKind, Mesh, Setting, Share, Strategy
from trimtab.strategies import limits
from trimtab.training.run import Run
from worlds import Drill, everywhere

WHOLE = 10
STEPS = 5


pytestmark = pytest.mark.usefixtures("doubles")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, batch: torch.Tensor) -> Any:
        return batch + self.down(torch.relu(self.up(batch)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.unused = nn.Linear(3, 3)
        self.blocks = nn.ModuleList([Block(16) for _ in range(3)])
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.last = nn.Linear(16, 1)

    def forward(self, batch: torch.Tensor) -> Any:
        found = self.first(batch)
        for block in self.blocks:
            found = block(found)
        return self.last(self.frozen(found))


def network(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def squared(model: Any, batch: Any) -> Any:
    return model(batch["x"]).square().mean()


def masked(model: Any, batch: Any) -> Any:
    return (model(batch["x"]).square() * batch["mask"]).sum() / batch["mask"].sum()


def tokens(batch: Any) -> Any:
    return batch["mask"].sum()


def data(step: int, count: int = WHOLE) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    mask = torch.rand(count, 5, generator=made) > 0.5
    # Some samples count for nothing at all.
    mask[count // 3] = False
    return {"x": torch.randn(count, 8, generator=made), "mask": mask.double()}


def blank_first(step: int) -> dict[str, torch.Tensor]:
    """The same, but that nothing at all counts in the first step."""
    found = data(step)
    return found | {"mask": found["mask"] * (step > 0)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def cut(batch: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    return {name: value[start:stop] for name, value in batch.items()}


def expected(loss: Any = squared, clip: float | None = None) -> tuple[list[float], list[torch.Tensor]]:
    model = network()
    optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found = loss(model, data(step))
        found.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(found.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


class Report:
    """What a rank found in one run of several steps."""

    def __init__(self, run: Run, model: Any, outcomes: list[Any], seen: list[Any]) -> None:
        self.losses = [outcome.loss for outcome in outcomes]
        self.attempts = [outcome.attempts for outcome in outcomes]
        self.parts = [outcome.parts for outcome in outcomes]
        self.skipped = [outcome.skipped for outcome in outcomes]
        self.samples = [outcome.samples for outcome in outcomes]
        self.kinds = [item.kind for item in seen]
        whole = [
            parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            for parameter in model.parameters()
        ]
        self.weights = [one.detach().clone() for one in whole]
        self.rank = run.rank


_RUNS = 0


def together(
    setting: Setting, places: list[int], *, drill: Any = None, batches: Any = data, **prepared: Any
) -> Report:
    """One run on the ranks that there are, each with its samples of the batch of every step."""
    global _RUNS  # noqa: PLW0603 - the next run in these processes meets at another port
    _RUNS += 1
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    seen: list[Any] = []
    with Run(setting, faults=drill, listen=seen.append, join_s=60) as run:
        # Another seed on every rank: the first rank's weights count.
        model, _ = run.prepare(network(run.rank), sgd, **({"loss": squared} | prepared))
        mine = run.groups.data_rank
        outcomes = [run.step(cut(batches(step), places[mine], places[mine + 1])) for step in range(STEPS)]
        return Report(run, model, outcomes, seen)


def close(report: Report, loss: Any = squared, clip: float | None = None) -> None:
    losses, weights = expected(loss, clip)
    far = max((a - b).abs().max().item() for a, b in zip(report.weights, weights, strict=True))
    assert far < 1e-12
    assert report.losses == pytest.approx(losses, rel=1e-12)
    assert set(report.samples) == {WHOLE}
    assert not any(report.skipped)


def ddp(size: int, micro: int = 2) -> Setting:
    rounds = -(-WHOLE // (micro * size))
    return Setting(
        strategy=Strategy.DDP, mesh=Mesh(dp_replicate=size), micro_batch=micro, accumulation=rounds,
        global_batch=WHOLE,
    )  # fmt: skip


def three_ranks() -> dict[str, Report | str]:
    torch.set_default_dtype(torch.float64)
    places, sparse = [0, 3, 7, 10], [0, 0, 9, 10]
    lonely = Drill(("forward", 1, 1), ("backward", 2, 2), ("optimizer", 3, 0))
    found: dict[str, Report | str] = {
        "uneven": together(ddp(3), places, clip=0.5),
        "an empty share": together(ddp(3), sparse),
        "tokens": together(ddp(3), sparse, loss=masked, weight=tokens),
        "alone": together(ddp(3), places, drill=lonely),
        "nan": together(ddp(3), places, drill=Drill(("gradient", 2, 1))),
    }
    limits.BUCKET_BYTES = 1
    drill = Drill(("backward", 1, 1), ("backward", 3, 0), ("backward", 3, 2), ("forward", 3, 1))
    # One part a rank: the pass that fails is the one that sends.
    found["after buckets were sent"] = together(ddp(3, 4), places, drill=drill)
    sharded = ddp(3).replace(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=3))
    found["sharded"] = together(sharded, places, clip=0.5)
    found["sharded tokens"] = together(sharded, [0, 1, 9, 10], loss=masked, weight=tokens)
    # The whole share of rank 1 counts for nothing, in every step.
    void = [0, 3, 4, 10]
    found["sharded void"] = together(sharded, void, loss=masked, weight=tokens)
    found["sharded empty"] = together(sharded, sparse)
    found["sharded empty tokens"] = together(sharded, sparse, loss=masked, weight=tokens)
    for name, setting in (("blank", ddp(3)), ("sharded blank", sharded)):
        found[name] = together(setting, void, loss=masked, weight=tokens, batches=blank_first)
    drill = Drill(
        ("forward", 0, 2), ("backward", 1, 1), ("optimizer", 1, 0), ("forward", 3, 0), ("backward", 3, 2),
        ("gradient", 4, 1),
    )  # fmt: skip
    found["sharded drill"] = together(sharded, places, drill=drill)
    limits.KEEPS_WHOLE = 0.0
    fsdp_gradients.reset_fsdp = fsdp_gradients.reset_fsdp_manually
    drill = Drill(("forward", 0, 2), ("backward", 1, 1), ("backward", 3, 0))
    found["sharded by hand"] = together(sharded, places, drill=drill)
    try:
        together(ddp(3), places, drill=Full())
    except NothingFits as error:
        found["full"] = str(error)
    return found


class Full:
    """Rank 1 has no memory for anything."""

    def at(self, point: str, step: int, rank: int) -> None:
        del step
        if point == "forward" and rank == 1:
            raise torch.OutOfMemoryError("full")


@pytest.mark.slow
def test_three_ranks_learn_what_one_learns_whatever_fails() -> None:
    reports = everywhere(3, three_ranks)
    for rank, found in enumerate(reports):
        close(found["uneven"], clip=0.5)
        close(found["an empty share"])
        assert found["an empty share"].parts[0] == [0, 5, 1][rank]
        close(found["tokens"], masked)
        close(found["alone"])
        # Nobody else has to repeat anything.
        assert found["alone"].attempts == [[1] * 5, [1, 2, 1, 1, 1], [1, 1, 2, 1, 1]][rank]
        close(found["nan"])
        assert found["nan"].attempts == [1, 1, 2, 1, 1]
        assert found["nan"].kinds == ([IncidentKind.NOT_A_NUMBER] if rank == 0 else [])
        close(found["after buckets were sent"])
        assert found["after buckets were sent"].attempts[1] == 2
        close(found["sharded"], clip=0.5)
        # All gather as often: one rank has four samples, and parts are of two.
        assert found["sharded"].parts == [2] * 5
        close(found["sharded tokens"], masked)
        close(found["sharded void"], masked)
        close(found["sharded empty"])
        close(found["sharded empty tokens"], masked)
        # A step in which nothing counts moves nothing, however the ranks share the weights.
        assert not any(found["blank"].skipped + found["sharded blank"].skipped)
        assert found["sharded blank"].losses == pytest.approx(found["blank"].losses, rel=1e-12)
        for weight, other in zip(found["sharded blank"].weights, found["blank"].weights, strict=True):
            assert (weight - other).abs().max() < 1e-12
        close(found["sharded drill"])
        assert found["sharded drill"].attempts == [2, 2, 1, 2, 2]
        close(found["sharded by hand"])
        assert found["sharded by hand"].attempts == [2, 2, 1, 2, 1]
        text = "one sample at once ran out of memory" if rank == 1 else "another rank has no memory left"
        assert text in found["full"]


class Bridge(trimtab.Job):
    """Two frozen towers with a trainable head each, and a part that both share."""

    global_batch = WHOLE
    branches = {"left": "left", "right": "right"}  # noqa: RUF012 - as jobs have it

    follows = True
    """Whether there are statistics of the batches; in one branch more than in the other."""

    def model(self) -> Any:
        torch.manual_seed(0)
        towers = {
            name: nn.Sequential(nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 1))
            for name in self.branches
        }
        if self.follows:
            towers["left"].insert(1, nn.BatchNorm1d(16))
        return nn.ModuleDict({"shared": nn.Linear(8, 16), "norm": nn.BatchNorm1d(16), **towers})

    def batch(self, size: int) -> Any:
        return data(0, size)

    def losses(self, model: Any, batch: Any) -> Any:
        held = model["norm"](model["shared"](batch["x"]))
        return {name: model[name](held).square().mean() for name in self.branches if model[name]}

    def loss(self, model: Any, batch: Any) -> Any:
        return sum(self.losses(model, batch).values())

    def optimizer(self, params: Any) -> Any:
        return sgd(params)


class Calm(Bridge):
    """The same without what parts of a batch change."""

    follows = False

    def losses(self, model: Any, batch: Any) -> Any:
        held = model["shared"](batch["x"]).tanh()
        return {name: model[name](held).square().mean() for name in self.branches if model[name]}


def four_ranks() -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    places = [0, 4, 10]
    port = int(os.environ["MASTER_PORT"])
    found: dict[str, Any] = {}
    plan = Setting(
        strategy=Strategy.HYBRID, mesh=Mesh(branch=2, dp_replicate=2), micro_batch=2, accumulation=3,
        global_batch=WHOLE,
    )  # fmt: skip
    limits.BUCKET_BYTES = 600
    drills: list[Any] = [None, Drill(("forward", 0, 3), ("backward", 1, 0), ("gradient", 2, 1))]
    for number, (job, drill) in enumerate([(Calm(), drills[0]), (Calm(), drills[1]), (Bridge(), None)]):
        os.environ["MASTER_PORT"] = str(port + 100 + number)
        with Run(plan, job=job, faults=drill, join_s=60) as run:
            model, _ = run.prepare(clip=0.5)
            mine = run.groups.data_rank
            outcomes = [run.step(cut(data(step), places[mine], places[mine + 1])) for step in range(STEPS)]
            state = {name: value.detach().clone() for name, value in model.state_dict().items()}
            found[f"branch {number}"] = (outcomes, state)
    os.environ["MASTER_PORT"] = str(port)
    hybrid = Setting(
        strategy=Strategy.HSDP, mesh=Mesh(dp_replicate=2, dp_shard=2), micro_batch=1, accumulation=3,
        global_batch=WHOLE,
    )  # fmt: skip
    drill = Drill(("forward", 1, 3), ("backward", 2, 0))
    for keeps in (0.05, 0.0):
        limits.KEEPS_WHOLE = keeps
        drill = Drill(("forward", 1, 3), ("backward", 2, 0))
        found[f"hsdp {keeps}"] = together(hybrid, [0, 3, 5, 8, 10], drill=drill, clip=0.5)
    unlike = ddp(4, 3).replace(
        shares=tuple(Share(samples=some, micro_batch=micro, accumulation=-(-some // micro))
                     for some, micro in ((1, 1), (2, 1), (1, 1), (6, 3))),
        accumulation=2,
    )  # fmt: skip
    found["unlike"] = together(unlike, [0, 1, 3, 4, 10])
    return found


@pytest.mark.slow
def test_four_ranks_in_branches_and_replicas_of_shards() -> None:
    job = Calm()
    model: Any = job.model()
    optimizer = sgd([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = job.loss(model, data(step))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(loss.item())
    reports = everywhere(4, four_ranks)
    for rank, found in enumerate(reports):
        for number in (0, 1):
            outcomes, state = found[f"branch {number}"]
            own = ("left", "right")[rank // 2]
            assert {name.partition(".")[0] for name in state} == {"shared", "norm", own}
            for name, value in state.items():
                if not name.startswith("norm"):
                    assert (value - model.state_dict()[name]).abs().max() < 1e-12, name
            assert [outcome.loss for outcome in outcomes] == pytest.approx(losses, rel=1e-12)
            assert [outcome.grad_norm for outcome in outcomes] == pytest.approx(norms, rel=1e-12)
            assert {outcome.samples for outcome in outcomes} == {WHOLE}
        # What normalisation has seen is the first rank's everywhere.
        for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
            assert torch.equal(found["branch 2"][1][name], reports[0]["branch 2"][1][name])
        if own == "left":
            for name in ("left.1.running_mean", "left.1.num_batches_tracked"):
                assert torch.equal(found["branch 2"][1][name], reports[0]["branch 2"][1][name])
            assert int(found["branch 2"][1]["left.1.num_batches_tracked"]) > STEPS
        for keeps in (0.05, 0.0):
            close(found[f"hsdp {keeps}"], clip=0.5)
            assert found[f"hsdp {keeps}"].attempts == [1, 2, 2, 1, 1]
        close(found["unlike"])
        assert found["unlike"].parts[0] == [1, 2, 1, 2][rank]
