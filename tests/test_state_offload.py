"""Weights, gradients and optimizer states in host memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import trimtab
from trimtab.engine.optimizer_offload import HostGradients, HostOptimizer
from trimtab.engine.step import prepare_job, run_step
from trimtab.errors import WrongUse
from trimtab.spec import Mesh, Offload, OptimizerImplementation, OptimizerRule, Setting, Strategy

BOTH = (Offload.PARAMS, Offload.OPTIMIZER)


class Layers(trimtab.Job):
    """A few linear layers."""

    name = "layers"
    global_batch = 8

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 1))

    def batch(self, size: int) -> torch.Tensor:
        torch.manual_seed(1)
        return torch.randn(size, 8)

    def loss(self, model: Any, batch: torch.Tensor) -> Any:
        return model(batch).square().mean()


def make_setting(**changes: Any) -> Setting:
    return Setting(**({"micro_batch": 4, "accumulation": 2, "global_batch": 8} | changes))


def train(setting: Setting, steps: int = 4, clip: float | None = None) -> tuple[list[float], Any]:
    job = Layers()
    state = prepare_job(job, setting, "cpu")
    batches = [job.batch(4), job.batch(4) * 2][: setting.accumulation]
    return [float(run_step(state, batches, clip=clip)) for _ in range(steps)], state


@pytest.mark.parametrize("implementation", list(OptimizerImplementation))
@pytest.mark.parametrize("clip", [None, 0.01])
def test_losses_are_those_of_the_optimizer_on_the_device(
    implementation: OptimizerImplementation, clip: float | None
) -> None:
    plain, _ = train(make_setting(optimizer=implementation), clip=clip)
    offloaded, state = train(make_setting(optimizer=implementation, offload=(Offload.OPTIMIZER,)), clip=clip)
    assert offloaded == plain
    assert plain[-1] < plain[0]
    (phase,) = state.phases
    assert isinstance(phase.gradients, HostGradients)
    assert isinstance(phase.optimizers[0].optimizer, HostOptimizer)
    assert all(parameter.grad is None for parameter in state.parameters)
    assert len(phase.gradients.local_gradients()) == len(state.parameters)


def test_weights_changed_outside_of_the_optimizer_are_read_again() -> None:
    _, state = train(make_setting(offload=(Offload.OPTIMIZER,)), steps=1)
    with torch.no_grad():
        state.parameters[0].fill_(3.0)
    job = Layers()
    run_step(state, [job.batch(4), job.batch(4)])
    assert (state.parameters[0] - 3.0).abs().max() < 0.01


def test_the_state_is_saved_and_loaded_like_that_of_another_optimizer() -> None:
    _, first = train(make_setting(offload=(Offload.OPTIMIZER,)), steps=2)
    _, second = train(make_setting(offload=(Offload.OPTIMIZER,)), steps=1)
    old, new = (state.phases[0].optimizers[0].optimizer for state in (first, second))
    second.model.load_state_dict(first.model.state_dict())
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    assert {id(key) for key in new.state} == {id(parameter) for parameter in second.parameters}
    job = Layers()
    for _ in range(2):
        for state in (first, second):
            run_step(state, [job.batch(4), job.batch(4)])
        for mine, other in zip(first.parameters, second.parameters, strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offload": (Offload.PARAMS,)}, "only shards of weights"),
        (
            {
                "offload": (Offload.OPTIMIZER,),
                "strategy": Strategy.DDP,
                "mesh": Mesh(dp_replicate=2),
                "accumulation": 1,
            },
            "sum gradients on the GPU",
        ),
        (
            {
                "offload": (Offload.OPTIMIZER,),
                "strategy": Strategy.FSDP,
                "mesh": Mesh(dp_shard=2),
                "accumulation": 1,
            },
            "together",
        ),
        ({"offload": (Offload.OPTIMIZER,), "optimizer_rule": OptimizerRule.ADAMW_8BIT}, "runs on a GPU"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(WrongUse, match=words):
        prepare_job(Layers(), make_setting(**changes), "cpu")
