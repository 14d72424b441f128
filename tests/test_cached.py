"""Gradient caching: losses over the batch, cut over micro-batches and ranks, are those of one large batch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.engine import fsdp as fsdp_module
from trimtab.errors import JobFailed, NothingFits, WrongUse
from trimtab.spec import Mesh, Precision, Recompute, Setting, Strategy
from trimtab.strategies import limits
from trimtab.training.micro_batches import CachedSteps
from trimtab.training.run import Run
from worlds import Drill, everywhere

WHOLE = 10
STEPS = 4


pytestmark = pytest.mark.usefixtures("doubles")


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch: torch.Tensor) -> Any:
        return batch + self.down(self.dropout(torch.relu(self.up(batch))))


class Towers(nn.Module):
    """Two encoders, and a temperature that only the loss uses."""

    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.image = nn.Linear(8, 16)
        self.text = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([Block(16, dropout) for _ in range(3)])
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.logit_scale = nn.Parameter(torch.ones(1) * 2.0)
        self.unused = nn.Linear(3, 3)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> Any:
        found = []
        for hidden in (self.image(image), self.text(text)):
            for block in self.blocks:
                hidden = block(hidden)  # noqa: PLW2901 - the same hidden state, one block later
            found.append(functional.normalize(self.norm(hidden), dim=-1))
        return found


class Clip(trimtab.Job):
    """Image and text embeddings, compared over the whole batch; loss_of() takes the model."""

    global_batch = WHOLE
    dropout = 0.0
    norm = False

    def model(self) -> Any:
        torch.manual_seed(0)
        return Towers(dropout=self.dropout, norm=self.norm)

    def batch(self, size: int) -> Any:
        return data(0, size)

    def embed(self, model: Any, batch: Any) -> Any:
        image, text = model(batch["image"], batch["text"])
        return {"image": image, "text": text, "label": batch["label"]}

    def loss_of(self, model: Any, embeddings: Any) -> Any:
        logits = model.logit_scale.exp() * embeddings["image"] @ embeddings["text"].T
        same = embeddings["label"][:, None] == embeddings["label"][None]
        wanted = same / same.sum(1, keepdim=True)
        return (functional.cross_entropy(logits, wanted) + functional.cross_entropy(logits.T, wanted)) / 2

    def optimizer(self, params: Any) -> Any:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class SimClr(Clip):
    """Two views of a sample in one tensor; loss_of() takes embeddings alone."""

    def embed(self, model: Any, batch: Any) -> Any:
        return torch.stack(model(batch["image"], batch["text"]), dim=1)

    def loss_of(self, embeddings: Any) -> Any:  # type: ignore[override]
        views = embeddings.flatten(0, 1)
        logits = (views @ views.T / 0.5).fill_diagonal_(-1e9)
        return functional.cross_entropy(logits, torch.arange(len(views)) ^ 1)


def data(step: int, count: int = WHOLE) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    dtype = torch.get_default_dtype()
    return {
        "image": torch.randn(count, 8, generator=made, dtype=dtype),
        "text": torch.randn(count, 6, generator=made, dtype=dtype),
        "label": torch.randint(0, 6, (count,), generator=made),
    }


def cut(batch: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    return {name: value[start:stop] for name, value in batch.items()}


def expected(job: Any, clip: float | None = None) -> tuple[list[float], list[torch.Tensor]]:
    """One large batch, by torch alone."""
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = job.loss(model, data(step))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach() for parameter in model.parameters()]


Report = tuple[list[float], list[torch.Tensor], list[int]]


def trained(
    setting: Setting, places: list[int], job: Any, drill: Any = None, clip: float | None = None
) -> Report:
    """Losses, weights and attempts of a run on the ranks that there are."""
    if setting.gpus > 1:
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    with Run(setting, job=job, faults=drill, join_s=60) as run:
        model, _ = run.prepare(clip=clip)
        mine = run.groups.data_rank
        outcomes = [run.step(cut(data(step), places[mine], places[mine + 1])) for step in range(STEPS)]
        assert {outcome.samples for outcome in outcomes} == {WHOLE}
        assert not any(outcome.skipped for outcome in outcomes)
        whole = [
            parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            for parameter in model.parameters()
        ]
        return (
            [outcome.loss for outcome in outcomes],
            [one.detach().clone() for one in whole],
            [outcome.attempts for outcome in outcomes],
        )


def close(found: Report, job: Any, clip: float | None = None, within: float = 1e-12) -> None:
    losses, weights = expected(job, clip)
    assert found[0] == pytest.approx(losses, rel=within)
    far = max((one - other).abs().max().item() for one, other in zip(found[1], weights, strict=True))
    assert far < within


def alone(micro: int, **others: Any) -> Setting:
    return Setting(micro_batch=micro, accumulation=-(-WHOLE // micro), global_batch=WHOLE, **others)


def ddp(size: int, micro: int) -> Setting:
    rounds = -(-WHOLE // (micro * size))
    return Setting(
        strategy=Strategy.DDP, mesh=Mesh(dp_replicate=size), micro_batch=micro, accumulation=rounds,
        global_batch=WHOLE,
    )  # fmt: skip


def fsdp(size: int, micro: int) -> Setting:
    return ddp(size, micro).replace(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=size))


@pytest.mark.parametrize("make", [Clip, SimClr])
@pytest.mark.parametrize("micro", range(1, WHOLE + 1))
def test_every_micro_batch_gives_the_step_of_the_whole_batch(make: Any, micro: int) -> None:
    close(trained(alone(micro), [0, WHOLE], make(), clip=0.3), make(), clip=0.3)


def test_the_loss_of_a_job_without_loss_is_that_of_its_embeddings() -> None:
    job = Clip()
    model = job.model()
    assert job.loss(model, data(0)).item() == job.loss_of(model, job.embed(model, data(0))).item()


def test_float32_and_recomputation_agree_to_a_millionth() -> None:
    torch.set_default_dtype(torch.float32)
    close(trained(alone(3), [0, WHOLE], Clip()), Clip(), within=1e-6)
    close(trained(alone(3, recompute=Recompute.FULL), [0, WHOLE], Clip()), Clip(), within=1e-6)


def test_under_autocast_the_loss_is_computed_in_float32_and_a_cut_changes_nothing() -> None:
    torch.set_default_dtype(torch.float32)
    kinds = []

    class Seen(Clip):
        def loss_of(self, model: Any, embeddings: Any) -> Any:
            kinds.append((embeddings["image"].dtype, torch.is_autocast_enabled("cpu")))
            return super().loss_of(model, embeddings)

    found = [trained(alone(micro, precision=Precision.BF16), [0, WHOLE], Seen()) for micro in (WHOLE, 5)]
    assert set(kinds) == {(torch.float32, False)}
    # The same bf16 products, in other sums.
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["forward", "backward", "optimizer", "gradient"])
def test_a_fault_anywhere_changes_nothing(point: str) -> None:
    found = trained(alone(4), [0, WHOLE], Clip(), Drill((point, 1, 0), (point, 3, 0)))
    close(found, Clip())
    assert found[2][1] == (1 if point == "optimizer" else 2)


def test_dropout_is_the_same_in_both_passes() -> None:
    class Dropping(SimClr):
        dropout = 0.5

    job = Dropping()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    torch.set_rng_state(state)
    parts = [job.embed(model, cut(data(0), start, min(start + 4, WHOLE))) for start in range(0, WHOLE, 4)]
    loss = job.loss_of(torch.cat(parts))
    loss.backward()
    optimizer.step()
    with Run(alone(4), job=job) as run:
        other, _ = run.prepare()
        torch.set_rng_state(state)
        outcome = run.step(data(0))
    assert outcome.loss == pytest.approx(loss.item(), rel=1e-12)
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        assert (parameter - same).abs().max() < 1e-12


def test_batch_statistics_are_followed_once() -> None:
    class Normed(SimClr):
        norm = True

    job = Normed()
    plain = job.model()
    for start in (0, 5):
        job.embed(plain, cut(data(0), start, start + 5))
    with Run(alone(5), job=job) as run:
        model, _ = run.prepare()
        run.step(data(0))
    assert model.norm.num_batches_tracked == plain.norm.num_batches_tracked
    assert (model.norm.running_mean - plain.norm.running_mean).abs().max() < 1e-12


def test_memory_that_the_loss_itself_lacks_is_said_so() -> None:
    class Large(SimClr):
        def loss_of(self, embeddings: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
            raise torch.OutOfMemoryError("a drill")

    with pytest.raises(NothingFits, match=r"loss_of\(\) cannot be cut, and the 10 samples"):
        trained(alone(5), [0, WHOLE], Large())


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda *_: 3, "it returned int"),
        (lambda model, batch: model(batch["image"], batch["text"])[0].sum(), "tensors of shapes"),
        (lambda model, batch: torch.cat(model(batch["image"], batch["text"])), "10 rows for 5 samples"),
        (lambda _, batch: batch["image"], "any trainable parameter"),
    ],
)
def test_embeddings_that_are_none_are_an_error_that_says_so(returned: Any, text: str) -> None:
    class Wrong(SimClr):
        def embed(self, model: Any, batch: Any) -> Any:
            return returned(model, batch)

        def loss_of(self, embeddings: Any) -> Any:  # type: ignore[override]
            return embeddings.square().mean()

    with pytest.raises(JobFailed, match=text):
        trained(alone(5), [0, WHOLE], Wrong())


def test_a_strategy_without_the_whole_model_on_a_rank_is_refused() -> None:
    class Staged:
        setting = ddp(2, 1).replace(strategy=Strategy.PIPELINE, mesh=Mesh(pp=2), accumulation=10)

    with pytest.raises(WrongUse, match="gradient caching needs ranks"):
        CachedSteps(Staged(), Clip())  # type: ignore[arg-type]


class Uncut(trimtab.Job):
    """A contrastive loss without embed()."""

    global_batch = WHOLE

    def model(self) -> Any:
        return Towers()

    def batch(self, size: int) -> Any:
        return data(0, size)

    def loss(self, model: Any, batch: Any) -> Any:
        image, text = model(batch["image"], batch["text"])
        return functional.cross_entropy(image @ text.T / 0.1, torch.arange(len(image)))


def test_a_run_that_would_cut_such_a_loss_is_refused_before_the_first_step() -> None:
    with pytest.raises(WrongUse, match="compares samples of a batch with each other") as error:
        trained(alone(5), [0, WHOLE], Uncut())
    assert error.value.given == "micro_batch 5 x accumulation 2 x data_parallel 1"
    assert "micro_batch 10, the whole global batch" in error.value.cure

    class Stated(Uncut):
        additive = False

    with pytest.raises(WrongUse, match="the job says additive = False"):
        trained(alone(5), [0, WHOLE], Stated())
    trained(alone(WHOLE), [0, WHOLE], Stated())

    class Accepted(Uncut):
        additive = True

    trained(alone(5), [0, WHOLE], Accepted())


def test_a_batch_in_one_piece_that_cannot_be_cut_is_not_cut_by_lack_of_memory() -> None:
    with pytest.raises(NothingFits, match="the batch of 10 samples ran out of memory and cannot be cut"):
        trained(alone(WHOLE), [0, WHOLE], Uncut(), Drill(("backward", 1, 0)))


def two_ranks() -> dict[str, Report]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for micro in (1, 3, 5):
        found[f"ddp {micro}"] = trained(ddp(2, micro), [0, 5, 10], Clip(), clip=0.3)
        found[f"fsdp {micro}"] = trained(fsdp(2, micro), [0, 5, 10], Clip(), clip=0.3)
    found["uneven"] = trained(ddp(2, 4), [0, 3, 10], SimClr())
    found["uneven fsdp"] = trained(fsdp(2, 4), [0, 3, 10], SimClr())
    found["empty"] = trained(ddp(2, 4), [0, 0, 10], Clip())
    found["empty fsdp"] = trained(fsdp(2, 4), [0, 0, 10], Clip())
    return found


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns() -> None:
    for found in everywhere(2, two_ranks):
        for name, report in found.items():
            clipped = name.split()[0] in ("ddp", "fsdp")
            close(report, SimClr() if "uneven" in name else Clip(), clip=0.3 if clipped else None)


def four_ranks() -> dict[str, Report]:
    torch.set_default_dtype(torch.float64)
    places = [0, 3, 5, 8, 10]
    limits.BUCKET_BYTES = 600
    due = (
        ("forward", 0, 3), ("backward", 1, 1), ("forward", 2, 0), ("backward", 2, 2), ("gradient", 3, 1),
    )  # fmt: skip
    hsdp = fsdp(4, 2).replace(strategy=Strategy.HSDP, mesh=Mesh(dp_replicate=2, dp_shard=2))
    found = {
        "ddp": trained(ddp(4, 2), places, Clip(), Drill(*due), clip=0.3),
        "fsdp": trained(fsdp(4, 2), places, Clip(), Drill(*due), clip=0.3),
        "hsdp": trained(hsdp, places, Clip(), Drill(*due), clip=0.3),
    }
    limits.KEEPS_WHOLE = 0.0
    fsdp_module.reset_fsdp = fsdp_module.reset_fsdp_manually
    found["by hand"] = trained(fsdp(4, 2), places, SimClr(), Drill(*due), clip=0.3)
    return found


@pytest.mark.slow
def test_four_ranks_survive_each_others_faults() -> None:
    for found in everywhere(4, four_ranks):
        for name, report in found.items():
            close(report, SimClr() if name == "by hand" else Clip(), clip=0.3)
            # The third step fails twice: in the first pass of one rank, then in the second of another.
            assert report[2] == [2, 2, 3, 2]
