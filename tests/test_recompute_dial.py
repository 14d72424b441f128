"""Steps between no and full recomputation: traces of some recomputed blocks follow from none and all."""

from __future__ import annotations

import pytest

from trimtab.catalog.clusters import parse_cluster
from trimtab.planner.search import RECOMPUTES
from trimtab.planner.space import SEARCHED_RECOMPUTES
from trimtab.predict.mix_recompute import RecomputeMix, TracesDiffer
from trimtab.spec import Precision, Recompute, Setting, Trace
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess

pytestmark = pytest.mark.xdist_group("recompute dial")  # its fixture is made once

PARTIAL = [way for way in Recompute if way.way.is_partial]
JOB = """
import torch
from torch import nn
import trimtab

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(7)), nn.Linear(64, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

class Dial(trimtab.Job):
    name, global_batch, samples = "dial", 8, 64
    def model(self): return Net()
    def batch(self, size): return torch.randn(size, 32, 64)
    def loss(self, model, batch): return model(batch).square().mean()
"""


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[Recompute, Trace]:
    """Traces of one job under every way of recomputing blocks."""
    job = tmp_path_factory.mktemp("dial") / "job.py"
    job.write_text(JOB, encoding="utf-8")
    ways = [Recompute.NONE, Recompute.FULL, *PARTIAL]
    settings = tuple(
        Setting(micro_batch=8, global_batch=8, precision=Precision.BF16, recompute=way) for way in ways
    )
    asked = TraceRequests(job=f"{job}:Dial", settings=settings, device=parse_cluster("H100").devices[0])
    with WorkerProcess() as worker:
        answers = worker.ask_all(asked, timeout_s=300)
    traced = [Trace.from_builtins(answer["trace"]) for answer in answers if isinstance(answer, dict)]
    return dict(zip(ways, traced, strict=True))


def live_bytes(trace: Trace) -> list[tuple[int, int]]:
    """Return for every allocation its size and all that is live after it."""
    live, curve = 0, []
    for number in trace.order:
        live += trace.sizes[number] if number >= 0 else -trace.sizes[~number]
        if number >= 0:
            curve.append((trace.sizes[number], live))
    return curve


@pytest.mark.slow
@pytest.mark.parametrize("way", PARTIAL)
def test_a_mixed_trace_is_the_traced_one(way: Recompute, traces: dict[Recompute, Trace]) -> None:
    mixed = RecomputeMix(traces[Recompute.NONE], traces[Recompute.FULL]).mix(way.way)
    assert live_bytes(mixed) == live_bytes(traces[way])
    assert mixed.marks == traces[way].marks


def test_memory_falls_as_more_blocks_are_recomputed(traces: dict[Recompute, Trace]) -> None:
    order = [way for way in RECOMPUTES if way in traces]
    peaks = [max(live for _, live in live_bytes(traces[way])) for way in order]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def test_traces_of_other_programs_are_not_mixed(traces: dict[Recompute, Trace]) -> None:
    none, full = traces[Recompute.NONE], traces[Recompute.FULL]
    with pytest.raises(TracesDiffer):
        RecomputeMix(none.replace(sizes=(*none.sizes[:-1], none.sizes[-1] + 512)), full)
    with pytest.raises(TracesDiffer):
        RecomputeMix(none, none)
    with pytest.raises(TracesDiffer):
        RecomputeMix(none.replace(beside=(none,)), full)


def test_the_shares_are_those_of_the_blocks() -> None:
    for way in PARTIAL:
        counted = [way.way.has_block(number) for number in range(12)]
        assert sum(counted) / 12 == pytest.approx(way.way.share)
        assert counted[0]


def test_every_way_is_searched_and_ordered() -> None:
    assert set(PARTIAL) < set(SEARCHED_RECOMPUTES)
    assert set(RECOMPUTES) >= set(SEARCHED_RECOMPUTES)
    blocks = [way for way in RECOMPUTES if way is not Recompute.SELECTIVE and way.way.budget is None]
    shares = [way.way.share for way in blocks]
    assert shares == sorted(shares)
