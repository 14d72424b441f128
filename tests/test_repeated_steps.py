"""Traces whose second step copies the passes of the first equal those whose steps all ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trimtab.catalog.clusters import parse_cluster
from trimtab.spec import Mesh, OptimizerRule, Precision, Recompute, Setting, Strategy
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess

if TYPE_CHECKING:
    from pathlib import Path

JOBS = '''
import torch
from torch import nn
from torch.nn import functional
from trimtab import Job


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.back, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

    def forward(self, x):
        return x + self.back(functional.gelu(self.wide(self.norm(x))))


class Stack(nn.Module):
    """Blocks; `says` is called in each forward pass."""

    def __init__(self, says=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.embed = nn.Embedding(50, 64)
        self.says = says
        self.calls = 0

    def forward(self, tokens):
        self.calls += 1
        x = self.embed(tokens)
        if self.says is not None:
            x = self.says(self, x)
        for block in self.blocks:
            x = block(x)
        return x


def add_table(model, x):
    """Compute a table in the first pass, and keep it."""
    if not hasattr(model, "table"):
        model.table = torch.arange(64, device=x.device).float().cos()
    return x + model.table


def keep_last(model, x):
    """Keep what every pass computes until the next one."""
    model.last = x.detach() * 2
    return x


def warm_up(model, x):
    """Do more in the first pass."""
    return (x * 2).tanh() if model.calls == 1 else x


class Plain(Job):
    says = None

    def model(self):
        return Stack(type(self).says)

    def batch(self, n):
        return torch.randint(0, 50, (n, 16))

    def loss(self, model, batch):
        return functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


class Table(Plain):
    says = add_table


class Last(Plain):
    says = keep_last


class WarmUp(Plain):
    says = warm_up


class Accumulated(Plain):
    """Two uses of one weight, whose gradients autograd adds."""

    def loss(self, model, batch):
        return super().loss(model, batch) + super().loss(model, batch.flip(0))
'''


def make_setting(micro_batch: int, **changes: Any) -> Setting:
    ranks = changes.get("mesh", Mesh()).data_parallel
    return Setting(
        micro_batch=micro_batch, global_batch=micro_batch * ranks, **{"precision": Precision.BF16, **changes}
    )


SHARDED = {"strategy": Strategy.FSDP, "mesh": Mesh(dp_shard=2)}
REPLICATED = {"strategy": Strategy.DDP, "mesh": Mesh(dp_replicate=2)}


def trace_each(job: str, settings: list[Setting], clip: float | None) -> tuple[list[Any], list[bool]]:
    """Return the traces, one request after the other, and which steps were copied."""

    def ask(worker: WorkerProcess, setting: Setting) -> Any:
        requests = TraceRequests(
            job=job, settings=(setting,), device=parse_cluster("H100").devices[0], clip=clip, whole=True
        )
        (answer,) = worker.ask_all(requests, timeout_s=300)
        assert isinstance(answer, dict), answer
        return answer

    with WorkerProcess() as worker:
        answers = [ask(worker, setting) for setting in settings]
    return [answer["trace"] for answer in answers], [answer["repeats"] for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "clip", "repeats"),
    [
        ("Plain", {}, 1.0, True),
        ("Plain", {"optimizer_rule": OptimizerRule.ADAMW_BF16}, None, True),
        ("Plain", SHARDED, None, True),
        ("Plain", REPLICATED, 1.0, True),
        ("Accumulated", {"precision": Precision.FP16}, 1.0, True),
        ("Table", {}, None, False),
        ("Last", {}, None, False),
        ("WarmUp", {}, None, False),
    ],
    ids=str,
)
def test_a_copied_step_is_the_one_that_would_have_run(
    tmp_path: Path, name: str, changes: dict[str, Any], clip: float | None, *, repeats: bool
) -> None:
    (tmp_path / "jobs.py").write_text(JOBS, encoding="utf-8")
    job = f"{tmp_path / 'jobs.py'}:{name}"
    settings = [make_setting(2, **changes), make_setting(6, **changes, recompute=Recompute.FULL)]
    together, known = trace_each(job, settings, clip)
    assert known == [repeats] * len(settings)
    (alone,), _ = trace_each(job, settings[1:], clip)
    assert together[1] == alone
