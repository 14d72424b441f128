"""What a Triton kernel loads and stores is read from its source, and launches in jobs are recorded."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from shared_jobs import shared_job
from trimtab.catalog.clusters import parse_cluster
from trimtab.spec import Precision, Setting, Trace
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import trace_setting
from trimtab.trace.triton_kernels import find_pointer_uses

tl: Any = None
helper: Any = None


def fold(x_ptr: Any, targets_ptr: Any, out_ptr: Any, stride: int, size: int) -> None:
    row = tl.program_id(0)
    begin = x_ptr + row * stride
    target = tl.load(targets_ptr + row)
    for start in range(0, size, 16):
        values = tl.load(begin + start)
        tl.store(out_ptr + target, values)


def accumulate(sum_ptr: Any, x_ptr: Any) -> None:
    block = tl.make_block_ptr(base=x_ptr, shape=(1,))
    tl.atomic_add(sum_ptr, tl.sum(tl.dot(tl.load(block), tl.load(block))))


def pass_on(x_ptr: Any, y_ptr: Any) -> None:
    helper(x_ptr)
    tl.store(y_ptr, 0)


def describe(descriptor: Any, out: Any) -> None:
    out.store([0], descriptor.load([0]))


def test_loads_and_stores_are_told_apart() -> None:
    uses = find_pointer_uses(fold)
    assert uses is not None
    # The value that was loaded from `targets_ptr` is an offset into `out_ptr`, no address of its own.
    assert uses.loaded & {"x_ptr", "targets_ptr", "out_ptr"} == {"x_ptr", "targets_ptr"}
    assert uses.stored & {"x_ptr", "targets_ptr", "out_ptr"} == {"out_ptr"}
    assert not uses.multiplies


def test_atomics_block_pointers_and_products_are_seen() -> None:
    uses = find_pointer_uses(accumulate)
    assert uses is not None
    assert (uses.loaded, uses.stored) == ({"x_ptr", "sum_ptr"}, {"sum_ptr"})
    assert uses.multiplies


def test_a_pointer_that_is_passed_on_counts_as_both() -> None:
    uses = find_pointer_uses(pass_on)
    assert uses is not None
    assert (uses.loaded, uses.stored) == ({"x_ptr"}, {"x_ptr", "y_ptr"})


def test_descriptors_load_and_store_themselves() -> None:
    uses = find_pointer_uses(describe)
    assert uses is not None
    assert (uses.loaded, uses.stored) == ({"descriptor"}, {"out"})


def test_a_kernel_without_source_says_nothing() -> None:
    assert find_pointer_uses(eval("lambda x: x")) is None  # noqa: S307 - a function without a file


KERNEL_JOB = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def double_kernel(source_ptr, out_ptr, size, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, 2 * tl.load(source_ptr + place))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source):
        out = torch.empty_like(source)
        double_kernel[(triton.cdiv(source.numel(), 256),)](source, out, source.numel(), BLOCK=256)
        return out

    @staticmethod
    def backward(ctx, gradient):
        # A constant on the device, in the thread of the backward pass, as Liger makes it.
        return gradient * torch.tensor(2.0, device=gradient.device)


class Job:
    def model(self):
        return nn.Linear(64, 1024)

    def batch(self, size):
        return torch.randn(size, 64)

    def loss(self, model, batch):
        return Double.apply(model(batch)).square().mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)
"""
LIGER_JOB = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, WIDTH, TOKENS = 8000, 64, 512


class Job:
    liger = True

    def model(self):
        if self.liger:
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()
        sizes = {"hidden_size": WIDTH, "intermediate_size": 128, "vocab_size": VOCABULARY}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes, **heads))

    def batch(self, size):
        ids = torch.randint(VOCABULARY, (size, TOKENS))
        return {"input_ids": ids, "labels": ids.clone()}

    def loss(self, model, batch):
        return model(**batch).loss

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)


class Plain(Job):
    liger = False
"""


def trace(job: str) -> Trace:
    setting = Setting(micro_batch=1, global_batch=1, precision=Precision.BF16)
    return trace_setting(TraceRequest(job=job, setting=setting, device=parse_cluster("H100").devices[0]))


def count_alike(traced: Trace, size: int) -> int:
    """Return how many allocations have a size, or its double, as in fp32."""
    return sum(traced.sizes.count(factor * size) for factor in (1, 2))


def test_a_job_may_launch_triton_kernels() -> None:
    """Triton need not be installed: nothing runs, and a launch moves what the kernel loads and stores."""
    traced = trace(shared_job(KERNEL_JOB))
    (launch,) = [work for work in traced.works if work.op == "triton::double_kernel"]
    assert (launch.read_bytes, launch.write_bytes) == (1024 * 2, 1024 * 2)
    assert any("Triton kernels are counted" in note for note in traced.assumptions)


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs the package liger-kernel")
def test_ligers_loss_never_holds_all_logits() -> None:
    """Liger takes as many tokens at a time as give a chunk of logits the size of all hidden states."""
    liger, plain = trace(shared_job(LIGER_JOB)), trace(shared_job(LIGER_JOB, "Plain"))
    logits = 512 * 8000 * 2
    # ceil(8000 / 64) = 125 parts of 512 tokens: 5 tokens, rounded up to 8.
    (loss,) = [work for work in liger.works if work.op == "triton::liger_cross_entropy_kernel"]
    assert 8 * 8000 * 2 <= loss.read_bytes < 8 * 8000 * 2 + 1024
    assert count_alike(plain, logits)
    assert not count_alike(liger, logits)
    assert any(work.op == "triton::_rms_norm_forward_kernel" for work in liger.works)
