"""Compiled models with few blocks give the trace of the compiled model with all of them."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from test_layers import Writer
from trimtab.catalog.clusters import parse_cluster
from trimtab.predict.memory import estimate_memory
from trimtab.spec import Setting, Trace
from trimtab.spec.trace import GRADIENT
from trimtab.trace.compiled import sort_gradient_marks
from trimtab.trace.extend_blocks import extend_blocks
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = parse_cluster("H100").devices[0]
SETTING = Setting(micro_batch=2, global_batch=2, compile=True)
SLACK = 1e-3
"""Of the peak: which of several equal allocations is freed changes how the allocator fills its gaps."""


def live_bytes(trace: Trace) -> list[int]:
    """Return the bytes that are live after each allocation."""
    changes = [trace.sizes[event] if event >= 0 else -trace.sizes[~event] for event in trace.order]
    return [live for live, event in zip(accumulate(changes), trace.order, strict=True) if event >= 0]


def list_kernels(trace: Trace) -> list[tuple[Any, ...]]:
    """Return the operations that run on the device; dropout kernels read the seeds of all blocks."""
    works = [trace.works[number] for number in trace.sequence]
    return [(work.replace(read_bytes=0), f"{work.read_bytes:.4g}") for work in works if work.kind != "view"]


def check_same(composed: Trace, whole: Trace) -> None:
    """Check that two traces allocate, free and compute the same."""
    assert live_bytes(composed) == live_bytes(whole)
    assert composed.sizes == whole.sizes
    assert composed.parts == whole.parts
    assert composed.marks == whole.marks
    assert list_kernels(composed) == list_kernels(whole)
    assert composed.parameters == whole.parameters
    peaks = [estimate_memory(trace).allocated_bytes for trace in (composed, whole)]
    assert peaks[0] == pytest.approx(peaks[1], rel=SLACK)


def swapping(count: int) -> Trace:
    """Blocks that write into two buffers in turn: their number decides which of the two is freed first."""
    writer = Writer()
    writer.marks["step0"] = 0
    buffers = [writer.alloc(4), writer.alloc(4)]
    for block in range(count):
        writer.alloc(3, f"layers.{block}")
        writer.work("aten::mm", 4, 4)
    for buffer in (buffers[count % 2], buffers[1 - count % 2]):
        writer.free(buffer)
        writer.free(writer.alloc(1))
    writer.marks["end"] = len(writer.order)
    return writer.trace({"forward": 0}, 10 * count)


def test_buffers_in_turn_need_the_rule_for_code_that_reuses_memory() -> None:
    few, more = swapping(3), swapping(4)
    assert extend_blocks(few, more, blocks="layers", traced=4, total=9) is None
    composed = extend_blocks(few, more, blocks="layers", traced=4, total=9, reuses=True)
    assert composed is not None
    assert live_bytes(composed) == live_bytes(swapping(9))
    assert list_kernels(composed) == list_kernels(swapping(9))
    assert composed.module_names == swapping(9).module_names


def test_a_larger_block_is_no_repetition_for_code_that_reuses_memory_either() -> None:
    more = swapping(4)
    strange = more.replace(sizes=tuple(5 if number == 4 else size for number, size in enumerate(more.sizes)))
    assert extend_blocks(swapping(3), strange, blocks="layers", traced=4, total=9, reuses=True) is None


def pairing(count: int, *, named: bool = True) -> Trace:
    """Blocks of which every second one writes the sum that the two before it have made."""
    writer = Writer()
    writer.marks["step0"] = 0
    waiting: list[int] = []
    for block in range(count):
        name = f"layers.{block}" if named else ""
        waiting.append(writer.alloc(3, name))
        writer.work("aten::mm", 4, 4)
        if block % 2:
            writer.alloc(7, name)
            writer.work("aten::add", 8, 8)
            for number in reversed(waiting):
                writer.free(number)
            waiting.clear()
    writer.marks["end"] = len(writer.order)
    return writer.trace({"forward": 0}, 10 * count)


@pytest.mark.parametrize("named", [True, False])
def test_blocks_that_take_turns_repeat_in_pairs(*, named: bool) -> None:
    traces = {count: pairing(count, named=named) for count in (3, 4, 6, 12)}
    assert extend_blocks(traces[3], traces[4], blocks="layers", traced=4, total=12, reuses=True) is None
    composed = extend_blocks(traces[4], traces[6], blocks="layers", traced=6, total=12, reuses=True, step=2)
    assert composed is not None
    assert live_bytes(composed) == live_bytes(traces[12])
    assert list_kernels(composed) == list_kernels(traces[12])
    assert composed.parameters == traces[12].parameters
    assert composed.module_names == traces[12].module_names
    assert composed.modules == traces[12].modules


def test_an_odd_number_of_blocks_has_no_pairs() -> None:
    pairs = pairing(4), pairing(6)
    assert extend_blocks(*pairs, blocks="layers", traced=6, total=11, reuses=True, step=2) is None


def test_gradients_that_are_complete_at_once_are_in_the_order_of_a_backward_pass() -> None:
    ops = ["mm", *[GRADIENT] * 3, "mm", *[GRADIENT] * 2]
    modules = ["", "b", "a", "c", "", "a", "b"]
    order = [event for number in range(len(ops)) for event in (number, ~number)]
    recorder: Any = SimpleNamespace(order=order, ops=ops, modules=modules)
    sort_gradient_marks(recorder, ["a", "b", "c"])
    assert recorder.modules == ["", "c", "b", "a", "", "b", "a"]


def ask(worker: WorkerProcess, job: str, *, whole: bool, **overrides: int) -> tuple[Trace, str]:
    requests = TraceRequests(
        job=job, overrides=overrides, settings=(SETTING,), device=DEVICE, clip=1.0, whole=whole
    )
    (answer,) = worker.ask_all(requests, timeout_s=600)
    assert isinstance(answer, dict), answer
    return Trace.from_builtins(answer["trace"]), str(answer["how"])


JOB = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.mix, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.scale = 1.0

    def forward(self, x):
        x = x + self.mix(torch.tanh(x))
        return x + self.scale * F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Breaking(Block):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return torch.sin(x)


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 64), nn.Linear(64, 100, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(kind(number) for number in range(17))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Job:
    kind = Block

    def model(self):
        return Net(self.kind)

    def batch(self, size):
        return torch.randint(0, 100, (size, 32))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


class Breaks(Job):
    kind = Breaking
"""


@pytest.mark.slow
def test_a_compiled_job_with_graph_breaks_is_the_same_by_few_blocks_and_by_all(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(JOB, encoding="utf-8")
    with WorkerProcess() as worker:
        composed, how = ask(worker, f"{file}:Breaks", whole=False)
        whole, _ = ask(worker, f"{file}:Breaks", whole=True)
    assert how == "checked"
    note = "torch.compile ran on models with 3 and 4 of the 17 blocks in blocks"
    assert any(assumption.startswith(note) for assumption in composed.assumptions)
    check_same(composed, whole)
