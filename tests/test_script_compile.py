"""What a script compiles goes through torch's own compiler, or is named in the answer."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from trimtab.probe.detect import as_cluster
from trimtab.scripts.command import parse_command
from trimtab.scripts.compile_patches import LIMIT_S, ScriptCompiler, find_model
from trimtab.scripts.estimate import estimate_script
from trimtab.spec.trace import GRAPH_ENTER

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.scripts.estimate import ScriptEstimate

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

how = sys.argv[1]


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        y = x * self.scale
        for _ in range(6):
            y = torch.tanh(y) * torch.sigmoid(y)
        return y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = Chain()
        self.head = nn.Linear(1024, 8)

    def forward(self, x):
        return self.head(self.chain(x))


model = Net().to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
step = optimizer.step


def measure(x, y):
    return F.cross_entropy(model(x), y)


if how == "module":
    model = torch.compile(model)
elif how == "method":
    model.compile(fullgraph=True)
elif how == "part":
    model.chain = torch.compile(model.chain, dynamic=False)
elif how == "function":
    measure = torch.compile(measure)
elif how == "step":
    step = torch.compile(optimizer.step)
elif how == "tuned":
    model.chain = torch.compile(model.chain, mode="max-autotune")
elif how == "tuned everywhere":
    torch._inductor.config.coordinate_descent_tuning = True
    model.chain = torch.compile(model.chain)
elif how == "eager backend":
    model = torch.compile(model, backend="eager")
elif how == "other backend":
    model = torch.compile(model, backend="onnxrt")
elif how == "disabled":
    model = torch.compile(model, disable=True)

for _ in range(4):
    x, y = torch.randn(4096, 1024).to("cuda"), torch.randint(0, 8, (4096,)).to("cuda")
    measure(x, y).backward()
    step()
    optimizer.zero_grad()
"""


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ScriptEstimate]:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT, encoding="utf-8")

    def run(how: str) -> ScriptEstimate:
        return estimate_script(
            parse_command([sys.executable, "train.py", how], environment={}), as_cluster("H200")
        )

    return run


def fact(found: ScriptEstimate, name: str) -> str:
    return next(fact.value for fact in found.script.found if fact.name == name)


def steady_bytes(found: ScriptEstimate) -> int:
    return next(phase.allocated_bytes for phase in found.phases if phase.name == "steady step")


TENSOR = 4096 * 1024 * 4


@pytest.mark.slow
def test_a_compiled_function_runs_fused_kernels(follow: Callable[[str], ScriptEstimate]) -> None:
    # Eager keeps three tensors of each link of the chain, compiled code none of them.
    found = follow("function")
    assert fact(found, "compile") == "true"
    assert fact(found, "micro_batch") == "4096"
    assert steady_bytes(found) < 8 * TENSOR
    works = [found.trace.works[number].op for number in found.trace.sequence]
    assert GRAPH_ENTER in works
    assert any("tanh" in op and "sigmoid" in op for op in works)
    assert not [text for text in found.estimate.assumptions if "eager" in text or "compiled" in text]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["module", "method", "part", "tuned", "tuned everywhere"])
def test_modules_are_compiled_in_every_way(how: str, follow: Callable[[str], ScriptEstimate]) -> None:
    found = follow(how)
    assert fact(found, "compile") == "true"
    assert steady_bytes(found) < 8 * TENSOR
    noted = any("max-autotune" in text for text in found.estimate.assumptions)
    assert noted == how.startswith("tuned")
    assert not any("eager code" in text for text in found.estimate.assumptions)


@pytest.mark.slow
def test_a_compiled_optimizer_step_is_a_step(follow: Callable[[str], ScriptEstimate]) -> None:
    found, eager = follow("step"), follow("none")
    assert found.script.found
    assert fact(found, "optimizer") == fact(eager, "optimizer")
    assert found.estimate.parts.optimizer == eager.estimate.parts.optimizer > 0
    assert steady_bytes(found) == pytest.approx(steady_bytes(eager), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager backend", "other backend", "disabled"])
def test_what_is_not_compiled_is_as_eager(how: str, follow: Callable[[str], ScriptEstimate]) -> None:
    found, eager = follow(how), follow("none")
    assert steady_bytes(found) == steady_bytes(eager)
    assert any("onnxrt is estimated as eager" in text for text in found.estimate.assumptions) == (
        how == "other backend"
    )


class Assumptions(ScriptCompiler):
    def __init__(self, left_s: float) -> None:
        super().__init__(SimpleNamespace(), left_s=left_s)  # type: ignore[arg-type]
        self.texts: list[str] = []

    def assume(self, text: str) -> None:
        self.texts.append(text)


def test_a_compilation_that_takes_too_long_is_given_up() -> None:
    compiler = Assumptions(left_s=0.001)

    def compile_forever() -> None:
        with compiler.limit_time("forward (model.py:3)"):
            while True:
                pass

    with pytest.raises(RuntimeError, match="took too long"):
        compile_forever()
    assert compiler.left_s == 0
    name, texts = "forward (model.py:3)", compiler.texts
    assert [text.partition("; ")[0] for text in texts] == [
        f"compiling took more than {LIMIT_S:g} s of processor time"
    ]
    assert f"{name} and what follows it are estimated as eager code" in texts[0]
    with pytest.raises(RuntimeError, match="took too long"), compiler.limit_time("another"):
        pytest.fail("there is no time left")
    compiler.note_failure("another", RuntimeError("no time"))
    assert len(compiler.texts) == 1


def test_time_in_which_a_compilation_waits_does_not_count() -> None:
    compiler = Assumptions(left_s=5)
    with compiler.limit_time("forward (model.py:3)"):
        time.sleep(0.5)
    assert compiler.left_s > 4.7


def test_a_failed_compilation_is_named() -> None:
    compiler = Assumptions(left_s=10)
    with compiler.limit_time("outer"), compiler.limit_time("inner"):
        pass
    assert 0 < compiler.left_s < 10
    compiler.note_failure("forward (model.py:3)", ValueError("no\n kernel"))
    assert (
        "forward (model.py:3) could not be compiled without a GPU (ValueError: no kernel)"
        in compiler.texts[0]
    )


def test_the_model_of_a_function_is_found() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.ReLU()

    def closed(x: Any) -> Any:
        return model(x)

    class Trainer:
        def __init__(self) -> None:
            self.model = model

        def step(self, x: Any) -> Any:
            return self.model(x)

    def plain(x: Any) -> Any:
        return x + 1

    assert find_model(closed, (1,), {}) is model
    assert find_model(model.forward, (), {}) is model
    assert find_model(Trainer().step, (), {}) is model
    assert find_model(plain, (other,), {"to": model}) is model
    assert find_model(plain, (other, 3), {}) is None
    assert find_model(len, ([],), {}) is None
