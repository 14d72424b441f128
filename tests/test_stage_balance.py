"""Blocks are divided over pipeline stages by the time that they take, alike in estimates and in training."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from trimtab.engine.pipeline_stage import StageSplit, find_block_chain, keep_stage, split_model
from trimtab.engine.stage_balance import measure_blocks
from trimtab.engine.stage_placement import UseRecorder
from trimtab.engine.step import find_stage_split, make_meta_loss
from trimtab.spec import Mesh, Recompute, Setting, Strategy
from trimtab.strategies.stage_split import BlockWork, balance_stages

WIDTH = 64


class Layer(nn.Module):
    """A block with attention and a feed-forward part of any width."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide = nn.Linear(WIDTH, hidden)
        self.narrow = nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inward(x).chunk(3, dim=-1)
        x = x + functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = x + self.narrow(torch.relu(self.wide(x)))
        return result


class Decoder(nn.Module):
    """An embedding, blocks of the given widths, and a head."""

    def __init__(self, widths: list[int], vocabulary: int = 100) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList([Layer(width) for width in widths])
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class DecoderJob:
    """A job that trains a decoder on 512 tokens."""

    def __init__(self, widths: list[int], vocabulary: int = 100, *, reads_value: bool = False) -> None:
        self.widths, self.vocabulary, self.reads_value = widths, vocabulary, reads_value

    def model(self) -> Decoder:
        return Decoder(self.widths, self.vocabulary)

    def batch(self, count: int) -> torch.Tensor:
        return torch.zeros(count, 512, dtype=torch.int64)

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        if self.reads_value:
            batch.tolist()
        return functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def measure(job: DecoderJob, recompute: Recompute = Recompute.NONE) -> BlockWork:
    model = job.model()
    setting = Setting(strategy=Strategy.PIPELINE, mesh=Mesh(pp=2), micro_batch=1, global_batch=1)
    blocks = list(find_block_chain(model).blocks.children())
    run_loss = make_meta_loss(job, setting)
    assert run_loss is not None
    uses = UseRecorder(model, blocks)
    work, failure = measure_blocks(model, blocks, run_loss, recompute.way, uses)
    assert work is not None, failure
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    return work


def find_best(work: BlockWork, stages: int) -> tuple[float, float]:
    """Return the least time of the longest stage, and the least sum of squares with it, by trying all."""
    count = len(work.blocks)
    rated = []
    for inner in combinations(range(1, count), stages - 1):
        times = [sum(work.blocks[first:stop]) for first, stop in pairwise((0, *inner, count))]
        times[0] += work.before
        times[-1] += work.after
        rated.append((round(max(times), 9), sum(time**2 for time in times)))
    return min(rated)


@pytest.mark.parametrize(
    ("work", "stages"),
    [
        (BlockWork(0.0, (1.0,) * 7, 0.0), 3),
        (BlockWork(0.5, (1.0,) * 12, 5.0), 8),
        (BlockWork(3.0, (1.0,) * 9, 0.0), 4),
        (BlockWork(0.1, (1.0, 5.0) * 5, 2.0), 4),
        (BlockWork(0.1, (7.0, 1.0, 1.0, 3.0, 2.0, 2.0, 9.0, 1.0), 0.5), 5),
        (BlockWork(0.0, (1.0, 1.0), 0.0), 2),
    ],
)
def test_the_longest_stage_is_shortest_and_then_the_squares(work: BlockWork, stages: int) -> None:
    layers = balance_stages(work, stages)
    assert len(layers) == stages
    assert sum(layers) == len(work.blocks)
    bounds = [sum(layers[:stage]) for stage in range(stages + 1)]
    times = [sum(work.blocks[first:stop]) for first, stop in pairwise(bounds)]
    times[0] += work.before
    times[-1] += work.after
    longest, squares = find_best(work, stages)
    assert max(times) == pytest.approx(longest)
    assert sum(time**2 for time in times) == pytest.approx(squares, rel=1e-5)


def test_with_virtual_stages_the_slowest_rank_counts() -> None:
    # The last of 4 ranks has the head; its other stage gets one block.
    work = BlockWork(0.0, (1.0,) * 12, 3.0)
    layers = balance_stages(work, 4, 2)
    assert layers[3] == layers[7] == 1
    loads = [layers[rank] + layers[rank + 4] for rank in range(4)]
    assert sorted(loads[:3]) == [3, 3, 4]


def test_work_follows_from_products_and_not_from_the_number_of_weights() -> None:
    work = measure(DecoderJob([64, 640, 64, 640]))
    narrow, wide, *others = work.blocks
    assert others == [narrow, wide]
    assert wide > 1.5 * narrow
    # A large table costs little where it is looked up, and much as a head.
    large = measure(DecoderJob([64, 640, 64, 640], vocabulary=5000))
    assert large.blocks == work.blocks
    assert large.after > 10 * work.after
    assert large.before < large.after / 10
    # Attention over 512 tokens is one kernel: a matrix of 512 x 512 in memory would cost more than the rest.
    assert narrow < 3 * 4 * 512 * (WIDTH * 60)


def test_recomputed_blocks_take_another_forward_pass() -> None:
    job = DecoderJob([64] * 4)
    none, full, half = (measure(job, way) for way in (Recompute.NONE, Recompute.FULL, Recompute.EVERY_2))
    assert full.after == none.after
    assert [again / once for again, once in zip(full.blocks, none.blocks, strict=True)] == [4 / 3] * 4
    assert [again > once for again, once in zip(half.blocks, none.blocks, strict=True)] == [
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("micro_batch", [1, 2, 16])
def test_every_micro_batch_has_the_same_stages_and_a_plan_keeps_its_own(micro_batch: int) -> None:
    job = DecoderJob([64, 640] * 4, vocabulary=2000)
    setting = Setting(
        strategy=Strategy.PIPELINE, mesh=Mesh(pp=3), micro_batch=micro_batch, global_batch=micro_batch
    )
    model = job.model()
    split = find_stage_split(model, setting, make_meta_loss(job, setting))
    assert split.layers == (3, 4, 1)
    assert sum(split.work) == pytest.approx(1, abs=1e-4)
    planned = setting.replace(stage_layers=(2, 2, 4))
    assert find_stage_split(model, planned, make_meta_loss(job, planned)).layers == (2, 2, 4)
    relay = keep_stage(model, 1, 3, lambda given: given, split=StageSplit((2, 2, 4))).relay
    assert [tuple(stage) for stage in relay.stages] == [(2, 4)]
    # Of another model: it is not used.
    other = setting.replace(stage_layers=(2, 2, 5))
    assert find_stage_split(job.model(), other, make_meta_loss(job, other)).layers == (3, 4, 1)


def test_a_loss_that_cannot_be_followed_is_balanced_by_weights_and_says_so() -> None:
    job = DecoderJob([64] * 4, reads_value=True)
    setting = Setting(strategy=Strategy.PIPELINE, mesh=Mesh(pp=2), micro_batch=1, global_batch=1)
    split = split_model(job.model(), 2, run_loss=make_meta_loss(job, setting))
    assert split.layers == (2, 2)
    assert split.note.startswith("pipeline: stages are balanced by their weights, because loss() fails on")
    assert "no job" in split_model(job.model(), 2).note
