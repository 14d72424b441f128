"""hsdp, branch and hybrid: what a rank holds, and which jobs and clusters they are refused for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import trimtab
from shared_jobs import shared_job
from test_estimate import JOB
from trimtab.engine.branches import AbsentModule, AbsentValue, compute_branch_loss, get_branches, keep_branch
from trimtab.errors import JobFailed, WrongUse
from trimtab.spec import Mesh
from trimtab.strategies import STRATEGIES
from trimtab.trace.job_summary import summarize_job

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.spec import Estimate

TWO = """
import torch
from torch import nn


def tower(width, depth):
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 8)).requires_grad_(False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(32, 64)
        self.adapters = nn.ModuleDict({"wide": nn.Linear(64, 64), "deep": nn.Linear(64, 64)})
        self.towers = nn.ModuleDict({"wide": tower(2048, 2), "deep": tower(512, 3)})


class Job:
    branches = {"wide": "towers.wide", "deep": "towers.deep"}

    def model(self):
        return Net()

    def batch(self, size):
        return torch.randn(size, 32), torch.randint(0, 8, (size,))

    def losses(self, model, batch):
        x, y = batch
        z = model.encoder(x)
        out = {}
        for name in self.branches:
            logits = model.towers[name](model.adapters[name](z)).float()
            out[name] = nn.functional.cross_entropy(logits, y) + logits[:, 0].mean() * 0.1
        return out

    def loss(self, model, batch):
        return sum(self.losses(model, batch).values())
"""
WIDE = 64 * 2048 + 2048 + 2 * (2048 * 2048 + 2048) + 2048 * 8 + 8
DEEP = 64 * 512 + 512 + 3 * (512 * 512 + 512) + 512 * 8 + 8
SHARED = 32 * 64 + 64 + 2 * (64 * 64 + 64)


def estimate(job: str, on: str, **options: Any) -> Estimate:
    return trimtab.estimate(job, on, micro_batch=8, precision="fp32", **options)


@pytest.mark.slow
def test_a_rank_of_a_branch_holds_its_own_frozen_part_and_all_that_learns() -> None:
    job = shared_job(TWO)
    whole = estimate(job, "H100")
    part = estimate(job, "2xH100", strategy="branch")
    assert whole.parts.weights == pytest.approx(4 * (WIDE + DEEP + SHARED), rel=0.01)
    assert part.parts.weights == pytest.approx(4 * (WIDE + SHARED), rel=0.01)
    # The adapter of the other branch learns here too: its gradient comes from the others.
    assert part.parts.optimizer == pytest.approx(8 * SHARED, rel=0.1)
    assert part.parts.gradients == pytest.approx(4 * SHARED, rel=0.1)
    assert part.parts.communication == part.nccl_bytes > 0
    assert any(
        "ranks of branch wide hold most" in assumption and "deep" in assumption
        for assumption in part.assumptions
    )
    # What the other branch needs was never on this device, not even while the model was built.
    assert part.reserved_bytes <= whole.reserved_bytes


def test_hybrid_holds_what_branch_holds() -> None:
    job = shared_job(TWO)
    hybrid, branch = estimate(job, "4xH100", strategy="hybrid"), estimate(job, "2xH100", strategy="branch")
    assert hybrid.parts.replace(communication=0) == branch.parts.replace(communication=0)
    assert hybrid.allocated_bytes == branch.allocated_bytes


@pytest.mark.slow
def test_a_rank_of_hsdp_keeps_the_share_of_its_node() -> None:
    job = shared_job(JOB)
    one = estimate(job, "H100")
    node = estimate(job, "2x4xH100", strategy="hsdp")
    all_ = estimate(job, "2x4xH100", strategy="fsdp")
    assert node.parts.optimizer == pytest.approx(one.parts.optimizer / 4, rel=0.1)
    assert all_.parts.optimizer == pytest.approx(one.parts.optimizer / 8, rel=0.1)


@pytest.mark.parametrize(
    ("how", "given", "mesh"),
    [
        ("single", {"gpus": 8}, Mesh()),
        ("ddp", {"gpus": 8}, Mesh(dp_replicate=8)),
        ("fsdp", {"gpus": 8, "nodes": 2}, Mesh(dp_shard=8)),
        ("hsdp", {"gpus": 16, "nodes": 2}, Mesh(dp_replicate=2, dp_shard=8)),
        ("branch", {"gpus": 2, "branches": 2}, Mesh(branch=2)),
        ("branch", {"gpus": 4, "branches": 2}, Mesh(branch=2, dp_replicate=2)),
        ("hybrid", {"gpus": 9, "branches": 3}, Mesh(branch=3, dp_replicate=3)),
        ("hybrid", {"gpus": 3, "branches": 2}, Mesh(branch=2, copies=(2, 1))),
        ("hybrid", {"gpus": 8, "branches": 3}, Mesh(branch=3, dp_replicate=2, copies=(3, 3, 2))),
        ("pipeline", {"gpus": 4, "nodes": 2}, Mesh(pp=4)),
    ],
)
def test_a_strategy_has_its_mesh(how: str, given: dict[str, int], mesh: Mesh) -> None:
    assert STRATEGIES[how].mesh(**given) == mesh


@pytest.mark.parametrize(
    ("how", "given", "found"),
    [
        ("pipeline", {"gpus": 1}, "there is one GPU"),
        ("hybrid", {"gpus": 2, "branches": 3}, "2 GPUs are fewer than the 3 branches"),
        ("hsdp", {"gpus": 1, "nodes": 1}, "there is one GPU"),
        ("branch", {"gpus": 1, "branches": 2}, "there is one GPU"),
        ("hsdp", {"gpus": 8, "nodes": 1}, "8 GPUs in 1 node"),
        ("hsdp", {"gpus": 2, "nodes": 2}, "2 GPUs in 2 nodes"),
        ("hsdp", {"gpus": 7, "nodes": 2}, "7 GPUs in 2 nodes"),
        ("branch", {"gpus": 4}, "the job has no branches"),
        ("hybrid", {"gpus": 4, "branches": 1}, "the job has one branch"),
        ("branch", {"gpus": 3, "branches": 2}, "3 GPUs do not divide among 2 branches"),
        ("hybrid", {"gpus": 2, "branches": 2}, "no copies of a branch"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused(how: str, given: dict[str, int], found: str) -> None:
    with pytest.raises(WrongUse, match=found) as caught:
        STRATEGIES[how].mesh(**given)
    assert caught.value.exit_code == 2


def test_a_job_without_branches_is_refused_before_tracing() -> None:
    with pytest.raises(WrongUse, match="the job has no branches"):
        estimate(shared_job(JOB), "2xH100", strategy="branch")
    with pytest.raises(JobFailed, match="the job has no branches"):
        get_branches(object())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (('"towers.deep"', '"towers.depp"'), "names the submodule 'towers.depp'"),
        (("out[name] = nn", "out['no ' + name] = nn"), "no term for branch"),
        (("logits = model", "a, b = model.towers[name](z).shape; logits = model"), "another branch than"),
    ],
)  # fmt: skip
def test_branches_that_do_not_agree_with_the_model_are_named(change: tuple[str, str], found: str) -> None:
    assert change[0] in TWO
    with pytest.raises(JobFailed, match=found):
        estimate(shared_job(TWO.replace(*change)), "2xH100", strategy="branch")


def test_a_job_says_what_it_is(tmp_path: Path) -> None:
    assert summarize_job(shared_job(TWO)).branches == ("wide", "deep")
    found = summarize_job(shared_job(JOB))
    assert (found.branches, found.global_batch, found.samples) == ((), 64, None)
    with pytest.raises(WrongUse, match="no such file"):
        summarize_job(f"{tmp_path}/missing.py:Job")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)


class PairJob:
    branches = {"left": "left", "right": "right"}  # noqa: RUF012 - as users write it

    def losses(self, model: Any, batch: torch.Tensor) -> dict[str, Any]:
        z = model.shared(batch)
        return {
            name: torch.cat([getattr(model, name)(z), z], dim=1).float()[:, 1:].square().mean() * 2 + 1
            for name in self.branches
        }


def test_the_terms_of_the_branches_and_their_gradients_add_up_to_the_whole() -> None:
    """By linearity: each group computes its own term, and the shared part's gradients are summed."""
    torch.manual_seed(0)
    whole, batch = Pair(), torch.randn(3, 4)
    sum(PairJob().losses(whole, batch).values()).backward()
    total = torch.zeros(4, 4)
    for own in PairJob.branches:
        part = Pair()
        part.load_state_dict(whole.state_dict())
        taken = keep_branch(part, get_branches(PairJob()), own)
        assert len(taken) == 1
        loss = compute_branch_loss(PairJob(), part, batch, own)
        loss.backward()
        assert part.shared.weight.grad is not None
        total += part.shared.weight.grad
        assert torch.equal(getattr(part, own).weight.grad, getattr(whole, own).weight.grad)
        assert not any(key.startswith("right" if own == "left" else "left") for key in part.state_dict())
    assert whole.shared.weight.grad is not None
    assert torch.allclose(total, whole.shared.weight.grad)


def test_a_stand_in_is_false_and_whatever_follows_from_it_is_nothing() -> None:
    absent = AbsentModule()
    assert not absent
    assert isinstance(absent(torch.zeros(2)).logits[:, 1:].float() + 1, AbsentValue)
    assert isinstance(torch.zeros(2) * absent.weight, AbsentValue)
    assert isinstance(absent.eval().train(), AbsentModule)
