"""Attention over packed documents costs the squares of their lengths, in jobs and in scripts."""

from __future__ import annotations

import pytest

from shared_jobs import shared_job
from trimtab.catalog.clusters import parse_cluster
from trimtab.predict.estimate import estimate_trace
from trimtab.predict.op_time import Pace, Point, device_rates, work_coordinates
from trimtab.spec import Precision, Setting, Trace
from trimtab.trace.packed_attention import count_pairs
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import trace_setting

JOB = """
import torch
from torch import nn
from torch.nn import functional as F

MIXES = {"even": [256] * 4, "uneven": [512, 256, 128, 128], "whole": [1024]}


class Packed(nn.Module):
    def __init__(self, way, lengths, known):
        super().__init__()
        self.way, self.lengths, self.known = way, lengths, known
        self.project = nn.Linear(128, 384, bias=False)

    def forward(self, x):
        q, k, v = self.project(x).view(1024, 3, 2, 64).unbind(1)
        return getattr(self, self.way)(q, k, v)

    def ends(self, device):
        counts = torch.tensor([0, *self.lengths], device=device)
        if not self.known:
            # Values that follow from the data: nobody knows them before the run.
            counts = counts + torch.randn(len(counts), device=device).round().long() * 0
        return counts.cumsum(0).int()

    def varlen(self, q, k, v):
        from torch.nn.attention.varlen import varlen_attn

        ends, most = self.ends(q.device), max(self.lengths)
        return varlen_attn(q, k, v, ends, ends, most, most, window_size=(-1, 0))

    def flash(self, q, k, v):
        ends, most = self.ends(q.device), max(self.lengths)
        return torch.ops.aten._flash_attention_forward(q, k, v, ends, ends, most, most, 0.0, True, False)[0]

    def jagged(self, q, k, v):
        ends = self.ends(q.device)
        sizes = {"min_seqlen": min(self.lengths), "max_seqlen": max(self.lengths)}
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(part.contiguous(), ends, **sizes).transpose(1, 2)
            for part in (q, k, v)
        )
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).values()

    def flex(self, q, k, v):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        counts = torch.tensor(self.lengths, device=q.device)
        document = torch.repeat_interleave(torch.arange(len(self.lengths), device=q.device), counts)

        def same(b, h, query, key):
            return (query >= key) & (document[query] == document[key])

        mask = create_block_mask(same, None, None, 1024, 1024, device=q.device)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        return flex_attention(q, k, v, block_mask=mask)


class All(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(
            Packed(way, lengths, True)
            for way in ("varlen", "flash", "jagged", "flex")
            for lengths in MIXES.values()
        )
        self.parts.append(Packed("varlen", [400, 400, 224], False))

    def forward(self, x):
        return sum(part(x).square().mean() for part in self.parts)


class Job:
    def model(self):
        return All()

    def batch(self, size):
        return {"x": torch.randn(1024, 128)}

    def loss(self, model, batch):
        return model(batch["x"])

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)
"""
SETTING = Setting(micro_batch=1, global_batch=1, precision=Precision.BF16)
PAIRS = {"even": 4 * 256**2, "uneven": 512**2 + 256**2 + 2 * 128**2, "whole": 1024**2}
HEADS, SIZE, TOKENS = 2, 64, 1024
KERNELS = {
    "torch_attn::_varlen_attn": "torch_attn::_varlen_attn_backward",
    "aten::_flash_attention_forward": "aten::_flash_attention_backward",
}


@pytest.fixture(scope="module")
def packed() -> Trace:
    device = parse_cluster("H100").devices[0]
    return trace_setting(TraceRequest(job=shared_job(JOB), setting=SETTING, device=device))


def flops(trace: Trace, op: str) -> list[int]:
    """The different costs of an operation, smallest first."""
    return sorted(work.flops for work in trace.works if work.op == op)


@pytest.mark.parametrize("forward", KERNELS)
def test_packed_attention_costs_the_squares_of_the_lengths(packed: Trace, forward: str) -> None:
    # Causal: half of the pairs; scores and values: twice 2 FLOPs for each number of a head.
    expected = [2 * HEADS * pairs // 2 * 2 * SIZE for pairs in sorted(PAIRS.values())]
    assert set(expected) <= set(flops(packed, forward))
    assert {cost * 5 // 2 for cost in expected} <= set(flops(packed, KERNELS[forward]))


def test_jagged_tensors_reach_the_kernel_for_packed_rows(packed: Trace) -> None:
    """Jagged attention and a direct call are the same operations, so that they are listed once."""
    assert len(flops(packed, "aten::_flash_attention_forward")) == len(PAIRS)
    assert not any("math" in work.op or work.op == "aten::_softmax" for work in packed.works)


def test_flex_attention_costs_the_blocks_of_its_mask(packed: Trace) -> None:
    """Blocks are 128 tokens wide: 4 documents of 2 blocks each have 3 causal blocks."""
    blocks = {"even": 4 * 3, "uneven": 10 + 3 + 1 + 1, "whole": 8 * 9 // 2}
    full = 2 * HEADS * TOKENS**2 * 2 * SIZE
    expected = sorted(round(full * count / 64) for count in blocks.values())
    assert flops(packed, "trimtab::flex_attention") == pytest.approx(expected, rel=1e-4)


def test_kernels_that_borrow_their_efficiency_are_said(packed: Trace) -> None:
    device = parse_cluster("H200").devices[0]
    names = "FlexAttention or flash attention over packed rows or varlen attention"
    said = estimate_trace(packed, SETTING, device)[0].assumptions
    assert [text for text in said if "no calibrated kernel" in text] == [
        f"time: no calibrated kernel is {names}: taken to be as efficient as attention over whole rows"
    ]
    # A calibration that has such a kernel is used for it.
    (flex,) = [work for work in packed.works if work.op == "trimtab::flex_attention"][:1]
    rates = device_rates(device)
    assert rates is not None
    own = Pace(rates, [Point("attention", flex.op, flex.dtype, work_coordinates(flex), 0.0)])
    assert own.list_unmeasured(packed.works) == names.removeprefix("FlexAttention or ").split(" or ")


def test_unknown_lengths_are_taken_to_be_equal_and_said(packed: Trace) -> None:
    assert any("3 of 342 tokens" in note for note in packed.assumptions)
    equal = 2 * HEADS * count_pairs([(342, 342)] * 3, causal=True) * 2 * SIZE
    assert equal in flops(packed, "torch_attn::_varlen_attn")


def test_backward_memory_has_room_after_each_document(packed: Trace) -> None:
    """4 documents: query gradients in fp32 for 1024 + 4 x 128 tokens; 1 document: for 1024 + 128."""
    sizes = {
        size
        for size, op in zip(packed.sizes, packed.ops, strict=True)
        if packed.op_names[op] == "torch_attn::_varlen_attn_backward"
    }
    assert {4 * HEADS * (TOKENS + 128 * count) * SIZE for count in (1, 3, 4)} <= sizes
    # Nothing is as large as the scores of all pairs.
    assert max(sizes) < HEADS * TOKENS**2


def test_pairs_of_windows_and_cross_attention() -> None:
    assert count_pairs([(10, 20)], causal=False) == 200
    assert count_pairs([(100, 100)], causal=False, window=21) == 2100
    # A window as long as the document changes nothing.
    assert count_pairs([(100, 100)], causal=True, window=100) == count_pairs([(100, 100)], causal=True)
    assert count_pairs([], causal=True) == 0
