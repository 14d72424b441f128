"""Activations in the memory of the host between the forward and the backward pass."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import trimtab
from test_layers import JOB, whole_and_few
from test_ways_to_fit import Adapters, Whole
from trimtab.catalog.clusters import parse_cluster
from trimtab.engine import activation_offload
from trimtab.engine.activation_offload import ActivationOffload, SavedView
from trimtab.engine.step import prepare_job, run_step
from trimtab.errors import WrongUse
from trimtab.planner.pins import read_pins, read_ways
from trimtab.predict.derive import has_same_program, interpolate_trace
from trimtab.predict.host_link import count_transfers, exposed_transfers_s, find_host_link
from trimtab.predict.memory import estimate_memory
from trimtab.spec import (
    BaseFormat,
    Mesh,
    Offload,
    OptimizerImplementation,
    Precision,
    Recompute,
    Setting,
    Strategy,
    Trace,
    Work,
)
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess
from trimtab.training.run import Run
from worlds import everywhere

if TYPE_CHECKING:
    from pathlib import Path

MOVED = (Offload.ACTIVATIONS,)


# Words.


def test_words_of_offload_are_sorted_and_checked() -> None:
    pins = read_pins(["offload=Activations, params"])
    assert pins == {"offload": "params,activations"}
    assert read_ways(pins) == {"offload": ("params", "activations")}
    assert read_ways(read_pins(["offload=none"])) == {"offload": ()}
    with pytest.raises(WrongUse, match=r"nvme is none of none, params, optimizer, activations"):
        read_pins(["offload=activations,nvme"])
    with pytest.raises(WrongUse, match=r"--offload disk"):
        trimtab.estimate("slm:tiny", "H200", offload="disk")


# Training.


def train(job: Any, rounds: int = 1, **changes: Any) -> tuple[list[float], list[torch.Tensor], Any]:
    setting = Setting(
        micro_batch=4,
        accumulation=rounds,
        global_batch=4 * rounds,
        optimizer=OptimizerImplementation.PLAIN,
        **changes,
    )
    state = prepare_job(job, setting, "cpu")
    losses = [float(run_step(state, [job.batch(4)] * rounds)) for _ in range(2)]
    return losses, [parameter.detach().clone() for parameter in state.parameters], state


@pytest.mark.parametrize(
    ("job", "rounds", "changes"),
    [
        (Whole(), 1, {}),
        (Whole(), 2, {"recompute": Recompute.FULL}),
        (Adapters(), 2, {"recompute": Recompute.EVERY_2}),
        (Adapters(), 1, {"recompute": Recompute.SELECTIVE}),
        (Adapters(), 1, {"precision": Precision.FP32, "base": BaseFormat.NF4}),
    ],
)
def test_losses_and_weights_are_the_same(job: Any, rounds: int, changes: dict[str, Any]) -> None:
    losses, weights, _ = train(job, rounds, **changes)
    moved_losses, moved_weights, state = train(job, rounds, **changes, offload=MOVED)
    assert moved_losses == losses
    for weight, other in zip(weights, moved_weights, strict=True):
        assert torch.equal(weight, other)
    assert state.offload.peak_bytes > 0
    # Nothing is left after the step.
    assert state.offload.held_bytes == 0


def test_recomputed_blocks_leave_only_their_inputs() -> None:
    _, _, state = train(Whole(), recompute=Recompute.FULL, offload=MOVED)
    every = state.offload.peak_sizes
    _, _, more = train(Whole(), offload=MOVED)
    inputs = 4 * 16 * 64 * 4
    assert every.count(inputs) >= 3
    assert len(every) < len(more.offload.peak_sizes) / 3


class Tangle(nn.Module):
    """Saves views of one tensor several times, a part of another, and changes a third in place."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))
        self.register_buffer("mask", torch.rand(64, 64))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        first = (given @ self.weight).sigmoid()
        queries, keys, values = (first @ self.weight.repeat(1, 3)).chunk(3, dim=-1)
        mixed = (queries @ keys.transpose(-2, -1)).softmax(-1) @ values * self.mask
        part = mixed[:, :, 0].exp().sum()
        changed = (mixed * 2).relu_().mul(self.weight)
        return (changed.cos() @ first).sum() + part


def gradient_of(model: Tangle, offload: ActivationOffload | None) -> torch.Tensor:
    torch.manual_seed(1)
    given = torch.randn(8, 64, 64)
    model.weight.grad = None
    if offload is None:
        torch.autograd.backward(model(given))
    else:
        with offload.saving(given):
            loss = model(given)
        torch.autograd.backward(loss)
    gradient: Any = model.weight.grad
    return gradient.clone()  # type: ignore[no-any-return]


def test_views_and_changed_tensors_come_back_as_they_were() -> None:
    torch.manual_seed(0)
    model = Tangle()
    offload = ActivationOffload(model, "cpu")
    assert torch.equal(gradient_of(model, offload), gradient_of(model, None))
    # The three views of one product are copied once.
    assert offload.peak_sizes.count(8 * 64 * 192 * 4) == 1
    assert offload.peak_bytes == sum(offload.peak_sizes)


def test_a_tensor_that_is_saved_twice_is_copied_once() -> None:
    offload = ActivationOffload(nn.Module(), "cpu")
    weight = nn.Parameter(torch.randn(64, 64))
    hidden = [weight.sin() + number for number in range(9)]
    with offload.saving():
        sums = sum((tensor @ tensor.t()).sum() + (tensor * tensor).sum() for tensor in hidden)
    assert offload.peak_sizes == (64 * 64 * 4,) * (9 - activation_offload.NOT_STARTED)
    assert isinstance(sums, torch.Tensor)
    torch.autograd.backward(sums)


def test_what_stays_on_the_device() -> None:
    model = Tangle()
    offload = ActivationOffload(model, "cpu")
    given = torch.randn(64, 64)
    tensors: list[Any] = [model.weight, model.weight.t(), model.mask, given, torch.randn(8)]
    with offload.saving(given):
        staying = [offload.pack(tensor) for tensor in tensors]
        moved = offload.pack(torch.randn(64, 64))
    assert not any(isinstance(entry, SavedView) for entry in staying)
    assert isinstance(moved, SavedView)


def test_a_saved_tensor_that_was_changed_is_an_error() -> None:
    offload = ActivationOffload(nn.Module(), "cpu")
    weight = nn.Parameter(torch.randn(64, 64))
    with offload.saving():
        hidden = weight.exp()
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(hidden.sum())


def test_a_backward_pass_that_failed_leaves_nothing_behind() -> None:
    model = Tangle()
    offload = ActivationOffload(model, "cpu")
    weight: Any = model.weight
    handle = weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gradient_of(model, offload)
    handle.remove()
    assert torch.equal(gradient_of(model, offload), gradient_of(model, None))
    assert offload.held_bytes == 0


def test_what_cannot_be_offloaded_is_refused() -> None:
    with pytest.raises(WrongUse, match="offload of activations with compile"):
        train(Whole(), offload=MOVED, compile=True)


class Parts(Whole):
    """Calls parts of the model by themselves."""

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
        return model.lm_head(hidden).logsumexp(-1).mean()


def test_parts_of_a_model_that_the_loss_calls_are_offloaded() -> None:
    losses, _, _ = train(Parts())
    moved, _, state = train(Parts(), offload=MOVED)
    assert moved == losses
    assert len(state.offload.peak_sizes) > 20


def train_ranks() -> list[tuple[list[float], list[torch.Tensor]]]:
    """Train with every strategy, without and with offload; called on every rank."""
    meshes = {Strategy.DDP: Mesh(dp_replicate=2), Strategy.FSDP: Mesh(dp_shard=2)}
    found = []
    for strategy, mesh in meshes.items():
        for offload in ((), MOVED):
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
            setting = Setting(
                strategy=strategy,
                mesh=mesh,
                micro_batch=2,
                global_batch=4,
                recompute=Recompute.FULL,
                offload=offload,
            )
            with Run(setting, job=Whole(), join_s=60) as run:
                model, _ = run.prepare()
                losses = [run.step(Whole().batch(2)).loss for _ in range(2)]
                weights = [getattr(weight, "_local_tensor", weight) for weight in model.parameters()]
                found.append((losses, [weight.detach().clone() for weight in weights]))
    return found


@pytest.mark.slow
def test_ranks_train_the_same_with_activations_on_the_host() -> None:
    for found in everywhere(2, train_ranks):
        for (losses, weights), (moved_losses, moved_weights) in zip(found[::2], found[1::2], strict=True):
            assert moved_losses == losses
            for weight, other in zip(weights, moved_weights, strict=True):
                assert torch.equal(weight, other)


# Prediction.

H100 = parse_cluster("H100").devices[0]


SETTING = Setting(micro_batch=4, global_batch=4, precision=Precision.BF16)


@pytest.mark.slow
def test_few_blocks_show_what_all_copy(tmp_path: Path) -> None:
    # With full recomputation, copies of several blocks are on their way together: all blocks are traced.
    whole, few = whole_and_few(tmp_path, "Job", SETTING.replace(offload=MOVED))
    assert has_same_program(whole, few)
    assert few.sizes == whole.sizes
    assert few.host_sizes == whole.host_sizes
    assert [few.works[place] for place in few.sequence] == [whole.works[place] for place in whole.sequence]


@pytest.mark.slow
def test_an_estimate_follows_activations_to_the_host(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB.replace("range(17)", "range(6)"), encoding="utf-8")
    settings = (SETTING, SETTING.replace(offload=MOVED))
    asked = TraceRequests(job=f"{job}:Job", settings=settings, device=H100, whole=True)
    with WorkerProcess() as worker:
        answers = worker.ask_all(asked, timeout_s=300)
    plain, moved = (Trace.from_builtins(answer["trace"]) for answer in answers if isinstance(answer, dict))
    assert not plain.host_sizes
    out, back = count_transfers(moved)
    assert out == sum(moved.host_sizes)
    # The last tensors that are copied are still on the device when the backward pass begins.
    latest = activation_offload.IN_FLIGHT - activation_offload.NOT_STARTED
    assert back == sum(moved.host_sizes[:-latest])
    # 6 blocks save the same tensors, of which the newest are not copied.
    hidden = 4 * 32 * 64 * 2
    assert moved.host_sizes.count(hidden) >= 5 * 3
    assert activations_of(moved) < 0.5 * activations_of(plain)
    saved = activations_of(plain) - activations_of(moved)
    assert 0.7 * back < saved < 1.1 * back


def activations_of(trace: Trace) -> int:
    return estimate_memory(trace).parts.activations


def test_host_memory_is_in_powers_of_two_and_follows_the_micro_batch() -> None:
    def made(micro: int) -> Trace:
        empty: dict[str, Any] = dict.fromkeys(("order", "sizes", "streams", "parts", "modules", "ops"), ())
        return Trace(**empty, module_names=(), op_names=(), marks={}, host_sizes=(100 * micro, 4096))

    assert made(1).host_bytes == 128 + 4096
    found = interpolate_trace(made(1), made(2), 1, 2, 5)
    assert found is not None
    assert found.host_sizes == (500, 4096)
    assert found.host_bytes == 512 + 4096


def test_copies_take_the_time_that_computing_does_not_hide() -> None:
    empty: dict[str, Any] = dict.fromkeys(("order", "sizes", "streams", "parts", "modules", "ops"), ())
    works = tuple(
        Work(op="aten::copy_", kind="transfer", dtype="", read_bytes=out, write_bytes=back, kernels=0)
        for out, back in ((40, 0), (0, 30))
    )
    trace = Trace(**empty, module_names=(), op_names=(), marks={}, works=works, sequence=(0, 0, 1))
    assert count_transfers(trace) == (80, 30)
    assert exposed_transfers_s(trace, 10.0, forward_s=6.0, backward_s=1.0) == 2.0 + 2.0
    assert exposed_transfers_s(trace, 10.0, forward_s=9.0, backward_s=3.0) == 0.0
    assert exposed_transfers_s(trace, None, forward_s=0.0, backward_s=0.0) == 0.0


def test_the_link_to_the_host_is_that_of_the_device() -> None:
    rates = {name: find_host_link(parse_cluster(name).devices[0]) for name in ("A100-40GB", "H100", "GH200")}
    assert [round(link.bytes_per_s / 1e9) for link in rates.values()] == [25, 50, 360]
    assert rates["GH200"].name == "NVLink-C2C"
    narrow = find_host_link(H100.replace(pcie_width=8))
    assert narrow.bytes_per_s == rates["H100"].bytes_per_s / 2
    assert "unknown" in find_host_link(H100.replace(pcie_generation=None)).name
