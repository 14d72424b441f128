"""Budgets of activations: torch.compile stores a share of them and recomputes the rest."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import config as partitioner

import trimtab
from trimtab.engine.compile import CompileSwitch
from trimtab.engine.step import prepare_job
from trimtab.errors import WrongUse
from trimtab.planner.pins import find_contradictions
from trimtab.planner.search import RECOMPUTES
from trimtab.planner.space import SEARCHED_RECOMPUTES
from trimtab.spec import Recompute, Setting, Workload
from trimtab.training.task import build_cpu_setting

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
BUDGETS = [way for way in Recompute if way.way.budget is not None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + down


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Dial(trimtab.Job):
    name, global_batch, samples = "dial", 4, 8

    def model(self) -> nn.Module:
        return Net()

    def batch(self, size: int) -> torch.Tensor:
        return torch.randn(size, 16, 32)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss


@pytest.fixture(autouse=True)
def partition_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile with torch's own partitioner, and run the graphs without generated kernels."""
    torch.compiler.reset()
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    )


def run_compiled(budget: float | None) -> tuple[int, list[torch.Tensor]]:
    """Return the bytes that a compiled forward pass stores beside the weights, and the gradients."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, batch = Net(), torch.randn(4, 16, 32)
    switch = CompileSwitch(model, lambda *_: None, budget=budget)
    switch.prepare_for(4, 4)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    stored: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            stored[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(batch).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return sum(stored.values()), gradients


@pytest.mark.slow
def test_a_budget_stores_less_and_computes_the_same() -> None:
    whole, expected = run_compiled(None)
    sizes = []
    for budget in (0.6, 0.1):
        size, gradients = run_compiled(budget)
        sizes.append(size)
        torch.testing.assert_close(gradients, expected)
        assert partitioner.activation_memory_budget == 1.0
    assert sizes == sorted(sizes, reverse=True)
    assert whole >= sizes[0] > sizes[-1]
    assert sizes[-1] < 0.5 * whole


def test_a_failed_compilation_says_that_the_budget_is_gone() -> None:
    said: list[tuple[str, str]] = []
    switch = CompileSwitch(Net(), lambda why, done: said.append((why, done)), budget=0.5)
    switch.prepare_for(4, 4)
    assert switch.handle_error(RuntimeError("no compiler"))
    assert "stores all activations" in said[-1][1]


def test_rows_have_the_budget_of_their_name_and_are_not_searched() -> None:
    assert [f"budget-{way.way.budget}" for way in BUDGETS] == [way.value for way in BUDGETS]
    assert sorted(way.way.budget or 0 for way in BUDGETS) == [number / 10 for number in range(1, 10)]
    assert not set(BUDGETS) & set(SEARCHED_RECOMPUTES)
    assert set(RECOMPUTES) == set(Recompute)


def test_eager_mode_has_no_budget() -> None:
    eager = Setting(micro_batch=4, global_batch=4, recompute=Recompute.BUDGET_5)
    with pytest.raises(WrongUse, match="compile is off"):
        prepare_job(Dial(), eager, "cpu")
    with pytest.raises(WrongUse, match="--compile is not given"):
        trimtab.estimate(Dial(), on="H200", micro_batch=4, recompute="budget-0.5")
    prepared = prepare_job(Dial(), eager.replace(compile=True), "cpu")
    assert prepared.recomputed == ()


def test_pins_of_a_budget_compile_and_contradict_eager_mode_and_offload() -> None:
    workload = Workload(name="dial", global_batch=4)
    pins: dict[str, Any] = {"recompute": "budget-0.4"}
    assert build_cpu_setting(workload, 1, pins).compile
    ((why, _),) = find_contradictions(pins | {"compile": False}, workload, 1)
    assert "compile=false" in why
    ((why, _),) = find_contradictions(pins | {"offload": "activations"}, workload, 1)
    assert "activations on the host" in why


@pytest.mark.slow
def test_a_plan_with_a_budget_refuses_shards() -> None:
    with pytest.raises(WrongUse, match="without shards"):
        trimtab.plan(Dial(), on="2xH200", pins={"recompute": "budget-0.5", "strategy": "fsdp"})


@pytest.mark.slow
def test_estimates_and_plans_ask_the_partitioner(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    file = tmp_path / "job.py"
    source = inspect.getsource
    parts = "\n\n".join(map(source, (Block, Net, Dial)))
    lines = ("from typing import Any", "import torch", "from torch import nn", "import trimtab", parts)
    file.write_text("\n".join(lines).replace("16, 32)", "16384, 32)"), encoding="utf-8")
    job = f"{file}:Dial"
    asked: dict[str, Any] = {"on": "H200", "micro_batch": 4, "compile": True}
    found = {
        way: trimtab.estimate(job, recompute=way, **asked) for way in ("none", "budget-0.8", "budget-0.1")
    }
    sizes = [estimate.allocated_bytes for estimate in found.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0]
    assert any("partitioner" in text for text in found["budget-0.1"].assumptions)
    plan = trimtab.plan(job, on="H200", pins={"recompute": "budget-0.1", "micro_batch": 4})
    assert plan.choice.compile
    assert plan.estimate.allocated_bytes == pytest.approx(sizes[-1], rel=0.01)
