"""Whether a loss is additive over samples is found out on a small batch."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trimtab
from trimtab.trace import loss_check
from trimtab.trace.loss_check import check_job, check_small_batch

if TYPE_CHECKING:
    from trimtab.spec import BatchLoss


class Net(nn.Module):
    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, 5)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.last(self.dropout(torch.relu(self.norm(self.first(batch)))))


class Classes(trimtab.Job):
    """Cross-entropy, a mean over samples."""

    global_batch = 32
    dropout = 0.0
    norm = False

    def model(self) -> Any:
        return Net(dropout=self.dropout, norm=self.norm)

    def batch(self, size: int) -> Any:
        return {"x": torch.randn(size, 8), "y": torch.randint(5, (size,))}

    def loss(self, model: Any, batch: Any) -> Any:
        return functional.cross_entropy(model(batch["x"]), batch["y"])


class Summed(Classes):
    def loss(self, model: Any, batch: Any) -> Any:
        return functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


class Dropping(Classes):
    dropout = 0.5


class Normed(Classes):
    norm = True


class Tokens(Classes):
    """A mean over tokens, of which samples have more or fewer."""

    def batch(self, size: int) -> Any:
        lengths = torch.randint(1, 7, (size, 1))
        return {"x": torch.randn(size, 6, 8), "mask": torch.arange(6) < lengths}

    def loss(self, model: Any, batch: Any) -> Any:
        return (model(batch["x"]).square().mean(-1) * batch["mask"]).sum() / batch["mask"].sum()

    def weight(self, batch: Any) -> Any:
        return batch["mask"].sum()


class Unweighted(Tokens):
    def weight(self, batch: Any) -> Any:
        return len(batch["x"])


class Contrastive(Classes):
    def loss(self, model: Any, batch: Any) -> Any:
        one = functional.normalize(model(batch["x"]), dim=-1)
        other = functional.normalize(model(batch["x"] + 0.1), dim=-1)
        return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


class Triplets(Classes):
    """Batch-hard triplets: the farthest of the same class and the nearest of another."""

    def batch(self, size: int) -> Any:
        return {"x": torch.randn(size, 8), "y": torch.arange(size) % 2}

    def loss(self, model: Any, batch: Any) -> Any:
        far = torch.cdist(model(batch["x"]), model(batch["x"]))
        same = batch["y"][:, None] == batch["y"][None]
        hardest = (far * same).amax(1) - (far + 1e3 * same).amin(1)
        return functional.relu(hardest + 1.0).mean()


class Decorrelated(Classes):
    """A variance over the batch, as VICReg has it."""

    def loss(self, model: Any, batch: Any) -> Any:
        found = model(batch["x"])
        return functional.relu(1 - found.var(0).sqrt()).mean() + found.square().mean()


class Ranked(Classes):
    """Every pair of samples in the right order."""

    def loss(self, model: Any, batch: Any) -> Any:
        score = model(batch["x"])[:, 0]
        return functional.softplus(
            -(score[:, None] - score[None]) * (batch["y"][:, None] - batch["y"])
        ).mean()


class Diffusion(Classes):
    """Noise and times drawn at random for each sample."""

    def loss(self, model: Any, batch: Any) -> Any:
        times = torch.randint(0, 10, (len(batch["x"]),))
        noise = torch.randn_like(batch["x"]) * torch.rand(len(times), 1)
        return (model(batch["x"] + noise * times[:, None]) - noise[:, :5]).square().mean()


class Balanced(Classes):
    """A small term over the batch, as mixtures of experts have it."""

    def loss(self, model: Any, batch: Any) -> Any:
        found = model(batch["x"])
        share = found.softmax(-1).mean(0)
        return functional.cross_entropy(found, batch["y"]) + 0.01 * (share * share).sum()


class Narrowing(Classes):
    """A mean in float32, whatever the precision of the model, as state space models compute."""

    def loss(self, model: Any, batch: Any) -> Any:
        return functional.cross_entropy(model(batch["x"]).float(), batch["y"])


def verdict(job: Any) -> BatchLoss:
    torch.manual_seed(0)
    return check_job(job)


@pytest.mark.parametrize("job", [Classes, Dropping, Normed, Tokens, Diffusion])
def test_a_mean_over_samples_or_tokens_is_additive(job: Any) -> None:
    found = verdict(job())
    assert found.additive is True
    assert found.gap is not None
    assert found.gap < 1e-9
    assert found.batch_norms == (job is Normed)


def test_rounding_to_float32_is_no_small_difference() -> None:
    found = verdict(Narrowing())
    assert found.additive is True
    assert found.gap is not None
    assert 1e-8 < found.gap < 1e-6
    assert not found.is_near


@pytest.mark.parametrize("job", [Contrastive, Triplets, Decorrelated, Ranked])
def test_a_loss_over_the_batch_is_not(job: Any) -> None:
    found = verdict(job())
    assert found.additive is False
    assert not found.is_sum
    assert found.why.startswith("the loss of 8 samples is ")
    assert "compares samples" in found.why


def test_a_sum_over_samples_is_said_to_be_one() -> None:
    found = verdict(Summed())
    assert found.additive is False
    assert found.is_sum
    assert "a sum over samples, not a mean" in found.why


@pytest.mark.parametrize("job", [Balanced, Unweighted])
def test_a_small_difference_is_named_and_accepted(job: Any) -> None:
    found = verdict(job())
    assert found.additive is True
    assert found.is_near
    assert "a small term depends on the whole batch, or the loss is a mean over" in found.why


def test_chance_that_does_not_repeat_leaves_it_unknown() -> None:
    import itertools

    class Numpy(Classes):
        draws = itertools.count()

        def loss(self, model: Any, batch: Any) -> Any:
            return model(batch["x"]).square().mean() * (-1) ** next(self.draws)

    found = verdict(Numpy())
    assert found.additive is None


def test_a_check_that_computes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Classes):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            try:
                while True:
                    super().loss(model, batch)
            except Exception:  # noqa: BLE001 - as a job may do
                return super().loss(model, batch)

    monkeypatch.setattr(loss_check, "CPU_LIMIT_S", 0.2)
    with pytest.raises(loss_check.CheckTooLong):
        loss_check._check_in_time(Endless())  # noqa: SLF001 - it runs in a process of its own
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_large_model_keeps_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deep(Contrastive):
        seq = 4096

        def model(self) -> Any:
            blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(50)]
            return nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 5))

    monkeypatch.setattr(loss_check, "MAX_PARAMETERS", 500)
    job = Deep()
    assert verdict(job).additive is False
    assert job.seq == loss_check.SHORT_SEQ
    monkeypatch.setattr(loss_check, "MAX_PARAMETERS", 50)
    found = verdict(Deep())
    assert found.additive is None
    assert "too many to run on the CPU" in found.why


@pytest.mark.parametrize("name", ["slm:tiny", "bridge:tiny", "naics:tiny"])
def test_the_jobs_that_come_with_trimtab_are_additive_as_they_say(name: str) -> None:
    job = trimtab.load(name)
    assert job.additive is True
    torch.manual_seed(0)
    assert check_small_batch(job).additive is True


def test_what_a_job_says_wins_but_a_loss_of_its_own_does_not_inherit_it() -> None:
    class Stated(Contrastive):
        additive = True

    class Other(Stated):
        def loss(self, model: Any, batch: Any) -> Any:
            return Contrastive.loss(self, model, batch)

    assert check_job(Stated()).why == "the job says additive = True"
    assert verdict(Other()).additive is False
