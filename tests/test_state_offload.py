"""Weights, gradients and optimizer states in host memory."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import trimtab
from trimtab.engine.fsdp import _parameter_groups
from trimtab.engine.optimizer_offload import HostGradients, HostOptimizer
from trimtab.engine.step import prepare_job, run_step
from trimtab.errors import WrongUse
from trimtab.predict.host_memory import PROCESS_BYTES, estimate_host, offloaded_state_s
from trimtab.probe.detect import as_cluster
from trimtab.spec import (
    Mesh,
    Offload,
    OptimizerImplementation,
    OptimizerRule,
    Setting,
    Strategy,
    Trace,
    Verdict,
    Work,
)
from trimtab.trace.host_state import measure_host_state
from trimtab.training.checkpoint_format import take_snapshot
from trimtab.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.spec import Cluster

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
            "once for each GPU",
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


def test_a_wrong_offload_is_refused_before_the_job_is_loaded() -> None:
    with pytest.raises(WrongUse, match="once for each GPU"):
        trimtab.estimate("nowhere.py:Job", "2xH100", strategy="ddp", offload="optimizer")


@pytest.fixture
def alone() -> Iterator[None]:
    """Be the only rank of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_shards_on_the_host_train_as_on_the_device() -> None:
    sharded = {"strategy": Strategy.FSDP, "mesh": Mesh(dp_shard=1)}
    plain, _ = train(make_setting(**sharded), clip=0.01)
    offloaded, state = train(make_setting(**sharded, offload=BOTH), clip=0.01)
    assert offloaded == plain
    units = [module for module in state.model.modules() if isinstance(module, FSDPModule)]
    assert units
    for unit in units:
        for group in _parameter_groups(unit):
            assert all(entry.offload_to_cpu for entry in group.fsdp_params)


# Host memory.


def make_trace(**changes: Any) -> Trace:
    columns: dict[str, Any] = dict.fromkeys(
        ("order", "sizes", "streams", "parts", "modules", "ops", "module_names"), ()
    )
    fields: dict[str, Any] = {"op_names": (), "marks": {}, "parameters": 1 << 30, "trainable": 1 << 30}
    return Trace(**(columns | fields | changes))


def make_cluster(ram: str | None) -> Cluster:
    return as_cluster("2xRTX4090", host_memory=ram)


def test_host_memory_is_that_of_all_processes_of_a_node() -> None:
    # Blocks of pinned memory are powers of two: 3 GiB take 4 GiB.
    trace = make_trace(pinned_sizes=(3 * GIB, 3 * GIB), host_state_bytes=4 * GIB)
    setting = make_setting(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=2), accumulation=1, offload=BOTH)
    host = estimate_host(trace, setting, make_cluster("64GiB"))
    assert host is not None
    assert host.pinned_bytes == 8 * GIB
    assert host.rank_bytes == PROCESS_BYTES + 12 * GIB
    assert host.node_bytes == 2 * host.rank_bytes
    assert host.fits
    assert not host.shortage
    # Before the steps the whole model is on the host.
    large = estimate_host(trace.replace(parameters=16 * GIB), setting, make_cluster("64GiB"))
    assert large is not None
    assert large.node_bytes == 2 * PROCESS_BYTES + 64 * GIB
    assert "68.0 GiB per node" in large.shortage
    unknown = estimate_host(trace, setting, make_cluster(None))
    assert unknown is not None
    assert unknown.fits is None
    assert estimate_host(trace, make_setting(), make_cluster("64GiB")) is None


def test_a_node_has_room_for_the_copies_of_a_checkpoint() -> None:
    shards = make_trace(pinned_sizes=(3 * GIB, 3 * GIB), host_state_bytes=6 * GIB, checkpoint_bytes=9 * GIB)
    setting = make_setting(strategy=Strategy.FSDP, mesh=Mesh(dp_shard=2), accumulation=1, offload=BOTH)
    host = estimate_host(shards, setting, make_cluster("44GiB"))
    assert host is not None
    # The steps alone would fit: 2 + 8 + 6 GiB a process.
    assert host.rank_bytes == 16 * GIB
    assert host.checkpoint_bytes == 9 * GIB
    assert host.node_bytes == 2 * (16 + 9) * GIB
    assert host.fits is False
    # Weights on the device are copied to pinned memory, in blocks of 4 GiB for 3.
    alone = estimate_host(shards, make_setting(offload=(Offload.OPTIMIZER,)), None)
    assert alone is not None
    assert alone.checkpoint_bytes == (4 + 6) * GIB


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "changes",
    [
        {"offload": (Offload.OPTIMIZER,)},
        {"offload": (Offload.ACTIVATIONS,)},
        {"offload": BOTH, "strategy": Strategy.FSDP, "mesh": Mesh(dp_shard=1)},
    ],
)
def test_a_checkpoint_copies_as_much_as_is_measured(changes: dict[str, Any]) -> None:
    _, state = train(make_setting(**changes), steps=1)
    optimizer = state.phases[0].optimizers[0].optimizer
    snapshot = take_snapshot({"model": state.model, "optimizer": optimizer})
    assert measure_host_state(state)["checkpoint_bytes"] == snapshot.size_bytes > 0


@pytest.mark.parametrize("words", ["much", "512G"])
def test_a_wrong_size_of_the_host_is_refused(words: str) -> None:
    with pytest.raises(WrongUse):
        make_cluster(words)


def test_the_time_of_a_step_has_the_copies_and_the_update() -> None:
    trace = make_transfers(backward=(4, 0), update=(0, 4)).replace(host_state_bytes=8 * GIB)
    common = {"hidden_forward_s": 0.0, "hidden_backward_s": 0.0}
    setting = make_setting(accumulation=1, micro_batch=8, offload=(Offload.OPTIMIZER,))
    seconds = offloaded_state_s(trace, setting, 4 * GIB, 28 * GIB, **common)
    # Gradients and weights of 4 GiB each way; an update touches 28 bytes a weight.
    assert seconds == pytest.approx(2.0 + 1.0)
    assert offloaded_state_s(trace, make_setting(), 4 * GIB, 28 * GIB, **common) is None


def make_transfers(**phases: tuple[int, int]) -> Trace:
    """Return a trace with copies to the host and back, in GiB by phase, and nothing else."""
    works: list[Work] = []
    starts: dict[str, int] = {}
    for phase in ("forward", "backward", "update"):
        starts["optimizer" if phase == "update" else phase] = len(works)
        outward, back = phases.get(phase, (0, 0))
        common: dict[str, Any] = {"op": "aten::copy_", "kind": "transfer", "dtype": "", "kernels": 0}
        works += [
            Work(**common, read_bytes=outward * GIB, write_bytes=0),
            Work(**common, read_bytes=0, write_bytes=back * GIB),
        ]
    return make_trace(works=tuple(works), sequence=tuple(range(len(works))), phases=starts)


def time_copies(trace: Trace, hidden_s: float, **changes: Any) -> float:
    setting = make_setting(**({"accumulation": 1, "micro_batch": 8} | changes))
    found = offloaded_state_s(
        trace, setting, GIB, float("inf"), hidden_forward_s=hidden_s, hidden_backward_s=hidden_s
    )
    assert found is not None
    return found


def test_weights_and_activations_share_the_link() -> None:
    sharded = {"strategy": Strategy.FSDP, "mesh": Mesh(dp_shard=1), "offload": BOTH}
    weights = make_transfers(forward=(0, 4), backward=(2, 4))
    activations = {"forward": (3, 0), "backward": (0, 3)}
    both = make_transfers(forward=(3, 4), backward=(2, 4 + 3))
    assert time_copies(weights, 0, **sharded) == 4 + 4
    assert time_copies(make_transfers(**activations), 0, **sharded) == 3 + 3
    # In the forward pass they move in opposite directions, in the backward pass both move to the device.
    assert time_copies(both, 0, **sharded) == 4 + 7
    # Each alone is hidden by 5 s of computation, both together are not.
    assert time_copies(weights, 5, **sharded) == time_copies(make_transfers(**activations), 5, **sharded) == 0
    assert time_copies(both, 5, **sharded) == 2
    # On a single device the computation waits for gradients and new weights, and hides activations.
    alone = make_transfers(forward=(3, 0), backward=(2, 3), update=(0, 2))
    assert time_copies(alone, 5, offload=(Offload.OPTIMIZER, Offload.ACTIVATIONS)) == 2 + 2
    assert time_copies(alone, 1, offload=(Offload.OPTIMIZER, Offload.ACTIVATIONS)) == 2 + 2 + 2 + 2


def test_an_estimate_refuses_a_host_that_is_too_small() -> None:
    options: dict[str, Any] = {"strategy": "fsdp", "offload": "params", "micro_batch": 2}
    small = trimtab.estimate("slm:tiny", "4xH100", host_memory="1GiB", **options)
    assert small.verdict is Verdict.DOES_NOT_FIT
    assert "the host needs 8.0 GiB per node" in small.verdict_reason
    assert small.host is not None
    assert 0 < small.host.pinned_bytes < small.host.rank_bytes
    # Weights and two states of AdamW, of one of four shards, the root's among them.
    assert small.host.checkpoint_bytes == pytest.approx(12 * 119_104 / 4, rel=0.01)
    assert small.host.pinned_bytes >= 8 * 119_104 / 4
    assert small.step_time is not None
    assert small.step_time.offload_s > 0
    assert any("FSDP2 moves weights" in note for note in small.assumptions)
    both = small.judge_quickly(1 << 20)
    assert "; the GPU needs " in both.verdict_reason
    # Weights and optimizer states are not on the device.
    assert small.parts.optimizer == 0
    large = trimtab.estimate("slm:tiny", "4xH100", host_memory="64GiB", **options)
    assert large.fits
