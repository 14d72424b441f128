"""A job whose logits are a large part of the peak gets a help line that works."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from shared_jobs import shared_job
from trimtab.catalog.clusters import parse_cluster
from trimtab.cli.estimate import count_loss_pieces, has_large_logits
from trimtab.cli.main import app
from trimtab.predict.memory import estimate_memory
from trimtab.spec import LossForm, Setting, Trace
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import trace_setting

JOB = """
import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 32000


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 512)
        self.head = nn.Linear(512, VOCABULARY, bias=False)


class Job:
    def model(self):
        return Model()

    def batch(self, size):
        return torch.randint(VOCABULARY, (size, 2048))

    def loss(self, model, batch):
        logits = model.head(model.embed(batch))
        return F.cross_entropy(logits.view(-1, VOCABULARY), batch.view(-1))

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)


class Pieces(Job):
    def loss(self, model, batch):
        hidden = model.embed(batch).flatten(0, 1)
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(hidden, model.head.weight, batch.flatten(), options=options)
"""
LOGITS = 2048 * 32000 * 4
SETTING = Setting(micro_batch=1, global_batch=1)


def trace(name: str) -> Trace:
    device = parse_cluster("H100").devices[0]
    return trace_setting(TraceRequest(job=shared_job(JOB, name), setting=SETTING, device=device))


def test_a_plain_job_is_told_which_loss_to_use() -> None:
    """trimtab cannot change a loss that the job computes itself, so it names functions that can."""
    options = ["--on", "RTX4090", "--micro-batch", "16", "--precision", "fp32"]
    answer = CliRunner().invoke(app, ["estimate", shared_job(JOB), *options])
    assert answer.exit_code in (0, 3), answer.output
    text = " ".join(answer.output.split())
    assert "logits and their gradients take" in text
    assert "torch.nn.functional.linear_cross_entropy with" in text


def test_logits_are_counted_at_the_peak() -> None:
    """In the backward pass: the logits, their log-softmax, and the gradients of both."""
    traced = trace("Job")
    peaks = estimate_memory(traced)
    assert 2 * LOGITS <= peaks.logits_bytes <= 4 * LOGITS
    assert has_large_logits(SETTING, peaks)
    assert not has_large_logits(SETTING.replace(loss=LossForm.CHUNKED), peaks)
    assert count_loss_pieces(traced) == 64


@pytest.mark.skipif(not hasattr(__import__("torch").nn, "LinearCrossEntropyOptions"), reason="torch 2.13")
def test_the_loss_that_the_line_names_needs_less() -> None:
    whole, pieces = estimate_memory(trace("Job")), estimate_memory(trace("Pieces"))
    assert not has_large_logits(SETTING, pieces)
    assert pieces.allocated_bytes < whole.allocated_bytes - LOGITS
