"""A job whose logits are a large part of the peak gets a help line that works."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

import trimtab
from shared_jobs import shared_job
from trimtab.catalog.clusters import parse_cluster
from trimtab.cli.estimate import add_logits_help, has_large_logits, help_script
from trimtab.cli.main import app
from trimtab.errors import NothingFits
from trimtab.predict.memory import estimate_memory
from trimtab.scripts.command import parse_command
from trimtab.scripts.estimate import estimate_script
from trimtab.spec import LossForm, Precision, Setting, Trace
from trimtab.spec.requests import PlanRequest
from trimtab.trace.request import TraceRequest
from trimtab.trace.server import WorkerProcess
from trimtab.trace.tracer import trace_setting, trace_settings

if TYPE_CHECKING:
    from pathlib import Path

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


@pytest.mark.slow
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


@pytest.mark.skipif(not hasattr(__import__("torch").nn, "LinearCrossEntropyOptions"), reason="torch 2.13")
def test_the_loss_that_the_line_names_needs_less() -> None:
    whole, pieces = estimate_memory(trace("Job")), estimate_memory(trace("Pieces"))
    assert not has_large_logits(SETTING, pieces)
    assert pieces.allocated_bytes < whole.allocated_bytes - LOGITS


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", pytest.param("bf16-true", marks=pytest.mark.slow)])
def test_liger_needs_no_package_to_be_estimated(tmp_path: Path, precision: str) -> None:
    """It holds a piece of the logits and the gradient of the head; our own pieces have a few tensors more."""
    shape = {"vocab_size": 32_000, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    setting = Setting(micro_batch=2, global_batch=2, precision=Precision(precision))
    device = parse_cluster("H100").devices[0]
    settings = [setting.replace(loss=form) for form in LossForm]
    answers = trace_settings(f"hf:{tmp_path}", settings, device, overrides={"seq": 2048})
    traces = [answer for answer in answers if isinstance(answer, Trace)]
    whole, chunked, liger = (estimate_memory(trace).allocated_bytes for trace in traces)
    assert liger < whole - 2 * LOGITS
    assert liger <= chunked
    assert any(work.op == "trimtab::liger_cross_entropy" for work in traces[-1].works)


SCRIPT = """
import torch
from torch.nn import functional as F

embed = torch.nn.Embedding(32000, 512, device="cuda")
head = torch.nn.Linear(512, 32000, bias=False, device="cuda")
optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
for step in range(3):
    ids = torch.randint(32000, (32768,), device="cuda")
    F.cross_entropy(head(embed(ids)), ids).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_is_told_what_avoids_its_logits(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT, encoding="utf-8")
    command = parse_command([sys.executable, str(file)], environment=os.environ)
    (line,) = help_script(estimate_script(command, parse_cluster("RTX4090")))
    assert "logits and their gradients take" in line
    assert "use_liger_kernel=True" in line


@pytest.mark.parametrize(("name", "closest"), [("Job", SETTING), ("Pieces", SETTING), ("Job", None)])
def test_a_plan_that_fits_nowhere_names_the_logits(name: str, closest: Setting | None) -> None:
    error = NothingFits("a job", found="nothing fits", cure="Use more GPUs.")
    error.closest = closest
    add_logits_help(error, PlanRequest(job=shared_job(JOB, name), on="H100"))
    is_told = name == "Job" and closest is not None
    assert ("--pin loss=chunked avoids them" in error.cure) is is_told
    assert error.cure.startswith("Use more GPUs.")


@pytest.mark.slow
def test_the_logits_of_a_plan_that_fits_nowhere_need_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {"accumulation": 1, "compile": False, "recompute": "none"}
    request = PlanRequest(job=shared_job(JOB, "Job"), on="T4", global_batch=64, pins=pins)
    with pytest.raises(NothingFits) as raised:
        trimtab.plan(request)
    monkeypatch.setattr(WorkerProcess, "_start", lambda _: pytest.fail("it traces again"))
    add_logits_help(raised.value, request)
    assert "--pin loss=chunked avoids them" in raised.value.cure
