"""naics: the network against a naive one, the codes and their relations, what is learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from bench.naics_naive import Naive
from torch.utils.data import default_collate

import trimtab

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def some_rows(job: Any, count: int = 5) -> Any:
    data = job.dataset()
    return default_collate([data[index] for index in range(0, 7 * count, 7)])


@pytest.mark.parametrize("curvature", [1.0, 0.4])
def test_loss_and_gradients_are_those_of_a_naive_step(curvature: float) -> None:
    job = trimtab.load("naics:tiny", curvature=curvature, balance=0.5)
    torch.manual_seed(0)
    ours = job.model().double()
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            if name.endswith(".up"):
                # They start at zero, where an adapter that is left out would not be missed.
                weight.normal_(std=0.1)
    naive: Any = Naive(ours)
    batch = some_rows(job)
    loss, slow = job.loss(ours, batch), naive(batch)
    assert loss.item() == pytest.approx(slow.item(), rel=1e-12)
    loss.backward()
    gradients = {name: one.grad.clone() for name, one in ours.named_parameters() if one.grad is not None}
    ours.zero_grad()
    slow.backward()
    for channel, encoder in naive.encoders.items():
        for number, layer in enumerate(encoder.layers):
            here = f"encoders.{channel}.layers.{number}"
            inward = (layer.query, layer.key, layer.value)
            close(gradients[f"{here}.inward.down"], torch.cat([one.a.weight.grad for one in inward]))
            close(gradients[f"{here}.inward.up"], torch.stack([one.b.weight.grad for one in inward]))
            for mine, its in (("outward", "output"), ("wide", "wide"), ("narrow", "narrow")):
                close(gradients[f"{here}.{mine}.down"], getattr(layer, its).a.weight.grad)
                close(gradients[f"{here}.{mine}.up"][0], getattr(layer, its).b.weight.grad)
    favourites = [number for number, expert in enumerate(naive.experts) if expert[0].weight.grad is not None]
    assert len(favourites) > 1
    for number, expert in enumerate(naive.experts):
        if number in favourites:
            close(gradients["mixture.inward"][number], expert[0].weight.grad.T)
            close(gradients["mixture.outward_bias"][number, 0], expert[3].bias.grad)
        else:
            assert not gradients["mixture.inward"][number].any()
    for name in ("projection.weight", "hyperbolic.weight"):
        close(gradients[name], dict(ours.named_parameters())[name].grad)
    close(gradients["mixture.gate.weight"], ours.mixture.gate.weight.grad)
    # All that learns but the poolers', which the mean of the tokens passes by.
    assert len(gradients) == sum(
        one.requires_grad and "pooler" not in name for name, one in ours.named_parameters()
    )


def close(mine: torch.Tensor, its: torch.Tensor) -> None:
    torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-12)


def test_padding_changes_nothing() -> None:
    job = trimtab.load("naics:tiny", text=12)
    torch.manual_seed(0)
    model = job.model().double()
    batch = some_rows(job, 2)
    longer = {name: torch.nn.functional.pad(ids, (0, 3)) for name, ids in batch.items()}
    assert job.loss(model, longer).item() == pytest.approx(job.loss(model, batch).item(), rel=1e-12)


def test_a_step_compiles_as_one_graph() -> None:
    job = trimtab.load("naics:tiny")
    model, batch = job.model(), some_rows(job, 2)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert compiled(batch).item() == pytest.approx(model(batch).item(), rel=1e-5)
