"""hf: jobs with packed or padded documents, and jobs that import a flash_attn that is not installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import trimtab
from shared_jobs import shared_job
from test_jobs import DECODER, ENCODER, written
from trimtab.catalog.clusters import parse_cluster
from trimtab.cli.options import job_options
from trimtab.errors import TrimtabError, WrongUse
from trimtab.jobs.head import IGNORE_INDEX
from trimtab.jobs.registry import job_flags
from trimtab.jobs.text.documents import make_typical_row, pack_documents, read_lengths
from trimtab.probe.detect import as_cluster
from trimtab.scripts.command import parse_command
from trimtab.scripts.estimate import estimate_script
from trimtab.spec import Precision, Setting, Trace
from trimtab.trace.flash_attn_package import NOTE
from trimtab.trace.packed_attention import count_pairs
from trimtab.trace.request import TraceRequest
from trimtab.trace.server import WorkerProcess
from trimtab.trace.tracer import family_key, trace_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = DECODER | {"head_dim": 8, "max_position_embeddings": 1024}
SETTING = Setting(micro_batch=2, global_batch=2, precision=Precision.BF16)
DEVICE = parse_cluster("H100").devices[0]


def llama(folder: Path) -> str:
    return written(folder, "LlamaConfig", SHAPE, "LlamaForCausalLM")


# ---------------------------------------------------------------------------------------------- lengths


def test_lengths_are_a_number_a_list_or_a_file(tmp_path: Path) -> None:
    lines, table = tmp_path / "lines.txt", tmp_path / "table.json"
    lines.write_text("30\n10\n\n20\n", encoding="utf-8")
    table.write_text("[30, 10, 20]", encoding="utf-8")
    for value in ([20, 10, 30], "[10, 30, 20]", str(lines), str(table)):
        assert read_lengths(value, "--packed") == (10, 20, 30)
    assert read_lengths("512", "--packed") == read_lengths(512, "--packed") == (512,)


@pytest.mark.parametrize("text", ["", "no numbers here", "[1, true]", "[1, 2.5]", "[", "10\n0\n", "10\n-3"])
def test_a_file_without_lengths_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "lengths"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(WrongUse, match="one number a line"):
        read_lengths(str(file), "--packed")


@pytest.mark.parametrize("value", ["missing.txt", "0", "-4", 0, 2.5, True, []])
def test_no_length_is_refused(value: Any) -> None:
    with pytest.raises(WrongUse, match="--packed"):
        read_lengths(value, "--packed")


def test_rows_have_every_document_once_and_are_nearly_full() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 700, (3000,), generator=generator).sort(descending=True).values.tolist()
    rows = pack_documents(lengths, 1024)
    assert sorted(length for row in rows for length in row) == sorted(lengths)
    assert all(sum(row) <= 1024 for row in rows)
    assert sum(lengths) > 0.98 * 1024 * len(rows)


def test_the_typical_row_costs_what_an_average_row_costs() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = tuple(torch.randint(10, 2000, (3000,), generator=generator).sort().values.tolist())
    row = make_typical_row(lengths, 4096)
    rows = pack_documents(list(lengths[::-1]), 4096)
    average = sum(length**2 for length in lengths) / len(rows)
    assert sum(row.lengths) == 4096
    assert sum(length**2 for length in row.lengths) == pytest.approx(average, rel=0.02)
    assert row.filled > 0.95
    assert not row.cut
    assert make_typical_row(lengths, 1000).cut == pytest.approx(0.5, abs=0.03)


# ---------------------------------------------------------------------------------------------- the job


@pytest.mark.parametrize("attention", ["", "eager"])
def test_packed_documents_have_the_loss_of_separate_ones(tmp_path: Path, attention: str) -> None:
    """Neither attention nor targets cross the end of a document."""
    job = trimtab.load(llama(tmp_path), seq=40, packed="[24, 16]", attention=attention, pretrained=False)
    torch.manual_seed(0)
    model, batch = job.model().double(), job.batch(3)
    assert job.weight(batch) == 3 * (23 + 15)
    packed = job.loss(model, batch)
    sums = torch.zeros((), dtype=torch.float64)
    for ids in batch["input_ids"]:
        for document in ids.split([24, 16]):
            loss = model(input_ids=document[None], labels=document[None]).loss
            sums += loss * (len(document) - 1)
    torch.testing.assert_close(packed.double(), sums / job.weight(batch), rtol=1e-6, atol=1e-6)


def test_flash_attention_gets_all_rows_as_one(tmp_path: Path) -> None:
    """transformers looks for documents only if the batch is one row."""
    job = trimtab.load(llama(tmp_path), seq=32, packed=16, attention="flash_attention_2")
    seen = {}

    class Model:
        def __call__(self, **batch: torch.Tensor) -> Any:
            seen.update(batch)
            return type("Out", (), {"loss": 0})

    batch = job.batch(2)
    job.loss(Model(), batch)
    assert {tensor.shape for tensor in seen.values()} == {(1, 64)}
    assert seen["position_ids"].tolist() == [[*range(16)] * 4]
    ignored = (seen["labels"] == IGNORE_INDEX).nonzero()[:, 1].tolist()
    assert ignored == [0, 16, 32, 48]


def test_padding_is_masked_and_its_share_is_said(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_text("\n".join(map(str, [10, 20, 30, 60])), encoding="utf-8")
    job = trimtab.load(llama(tmp_path), lengths=str(file))
    batch = job.batch(8)
    assert batch["input_ids"].shape == (8, 60)
    counts = batch["attention_mask"].sum(1).tolist()
    assert max(counts) == 60
    assert set(counts) == {10, 20, 30, 60}
    assert job.weight(batch) == sum(counts) - 8
    assert any("longest, 60 tokens: 50% of the tokens are padding" in note for note in job.assumptions)
    assert trimtab.load(llama(tmp_path), lengths=str(file), seq=40).batch(2)["input_ids"].shape == (2, 40)


def test_text_is_trained_in_documents(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to learn from " * 400, encoding="utf-8")
    job = trimtab.load(llama(tmp_path), seq=32, packed=12, data=str(text))
    sample = job.dataset()[0]
    assert sample["position_ids"].tolist() == [*range(12), *range(12), *range(8)]
    assert (sample["labels"] == IGNORE_INDEX).nonzero().flatten().tolist() == [0, 12, 24]
    assert any("cut at the lengths" in remark for remark in job.remarks)


def test_a_file_of_lengths_is_named_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lengths").write_text("12", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    flags = {flag.name: flag for flag in job_flags()}
    assert job_options("hf:x", None, {flags["packed"]: "lengths"}) == {"packed": str(tmp_path / "lengths")}
    assert job_options("hf:x", None, {flags["packed"]: "512"}) == {"packed": "512"}


def test_a_changed_file_of_lengths_is_traced_again(tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    keys = set()
    for text in ("12", "13"):
        file.write_text(text, encoding="utf-8")
        request = TraceRequest(job="hf:x", overrides={"packed": str(file)}, setting=SETTING, device=DEVICE)
        keys.add(family_key(request))
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packed": 8, "lengths": 8}, "packed or padded"),
        ({"attention": "flash_attention"}, "did you mean flash_attention_2"),
        ({"packed": "nowhere.txt"}, "no such file"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(WrongUse, match=message):
        trimtab.load(llama(tmp_path), **options)


def test_only_causal_models_that_take_positions_are_packed(tmp_path: Path) -> None:
    bert = trimtab.load(written(tmp_path / "bert", "BertConfig", ENCODER, "BertForMaskedLM"), packed=8)
    with pytest.raises(WrongUse, match="trained as masked LM"):
        bert.model()
    shape = {"vocab_size": 300, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    bloom = trimtab.load(written(tmp_path / "bloom", "BloomConfig", shape, "BloomForCausalLM"), packed=8)
    with pytest.raises(WrongUse, match="takes no positions"):
        bloom.model()


def test_flash_attention_without_its_package_is_refused_in_training(tmp_path: Path) -> None:
    job = trimtab.load(llama(tmp_path), attention="flash_attention_2", pretrained=False)
    with pytest.raises(WrongUse, match="Install flash-attn"):
        job.model()


# ---------------------------------------------------------------------------------------------- traces

JOB = """
import torch
from torch import nn
from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func
from flash_attn.bert_padding import pad_input, unpad_input


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x):
        qkv = self.project(x).view(2, 128, 3, 2, 32)
        plain = flash_attn_func(*qkv.unbind(2), causal=True, window_size=(31, 0))
        packed = flash_attn_qkvpacked_func(qkv)
        mask = torch.arange(128, device=x.device) < torch.tensor([[100], [60]], device=x.device)
        kept, places, ends, longest, _ = unpad_input(qkv.flatten(2), mask)
        parts = kept.view(-1, 3, 2, 32).unbind(1)
        apart = flash_attn_varlen_func(*parts, ends, ends, longest, longest, causal=True)
        return plain + packed + pad_input(apart, places, 2, 128)


class Job:
    def model(self):
        return Model()

    def batch(self, size):
        return torch.randn(size, 128, 64)

    def loss(self, model, batch):
        return model(batch).float().square().mean()

    def optimizer(self, params):
        return torch.optim.SGD(params, lr=0.1)
"""
FLASH, FLASH_BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with WorkerProcess() as process:
        yield process


def traced(worker: WorkerProcess, job: str, **options: Any) -> Trace:
    (trace,) = trace_settings(job, [SETTING], DEVICE, overrides=options, worker=worker)
    if isinstance(trace, TrimtabError):
        raise trace
    return trace


def flops(trace: Trace, word: str) -> set[int]:
    return {work.flops for work in trace.works if word in work.op}


# Rows are two, with 4 heads of 8 numbers; scores and values take 2 FLOPs for each number and pair.
SQUARE = 2 * 4 * 2 * 2 * 8 * 1024**2


def test_flash_attention_of_a_packed_job_costs_the_squares_of_documents(
    tmp_path: Path, worker: WorkerProcess
) -> None:
    trace = traced(worker, llama(tmp_path), seq=1024, packed=256, attention="flash_attention_2")
    # The documents are a quarter of a row; causal attention is half of that.
    assert flops(trace, FLASH) == {SQUARE // 4 // 2}
    assert "flash_attention_2 attention over rows of 4 packed documents" in trace.assumptions
    assert NOTE in trace.assumptions
    assert not any("mask over the whole row" in note for note in trace.assumptions)


def test_sdpa_of_a_packed_job_costs_the_square_of_the_row_and_says_so(
    tmp_path: Path, worker: WorkerProcess
) -> None:
    trace = traced(worker, llama(tmp_path), seq=1024, packed=256)
    assert min(flops(trace, "attention")) >= SQUARE
    assert "sdpa attention over rows of 4 packed documents" in trace.assumptions
    assert any("sdpa makes a mask over the whole row" in note for note in trace.assumptions)


@pytest.mark.slow
def test_flex_attention_of_a_packed_job_costs_the_blocks_of_its_mask(
    tmp_path: Path, worker: WorkerProcess
) -> None:
    trace = traced(worker, llama(tmp_path), seq=1024, packed=256, attention="flex_attention")
    # A document has two blocks of 128 tokens in both directions, of which three are computed.
    assert min(flops(trace, "trimtab::flex_attention")) == SQUARE // 64 * 4 * 3


def test_a_job_may_import_flash_attn_that_is_not_installed(worker: WorkerProcess) -> None:
    trace = traced(worker, shared_job(JOB))
    scale = 2 * 2 * 2 * 32
    pairs = {
        2 * count_pairs([(128, 128)], causal=True, window=32),
        2 * 128 * 128,
        count_pairs([(100, 100), (60, 60)], causal=True),
    }
    assert flops(trace, FLASH) == {scale * count for count in pairs}
    assert flops(trace, FLASH_BACKWARD) == {scale * count * 5 // 2 for count in pairs}
    assert NOTE in trace.assumptions


SCRIPT = """
import torch
from flash_attn import flash_attn_varlen_qkvpacked_func

project = torch.nn.Linear(64, 192, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(project.parameters())
ends = torch.tensor([0, 100, 160], dtype=torch.int32, device="cuda")
for step in range(4):
    qkv = project(torch.randn(160, 64, device="cuda", dtype=torch.bfloat16)).view(160, 3, 2, 32)
    loss = flash_attn_varlen_qkvpacked_func(qkv, ends, 100, causal=True).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_may_import_flash_attn_that_is_not_installed(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT, encoding="utf-8")
    command = parse_command([sys.executable, str(file)], environment=os.environ)
    found = estimate_script(command, as_cluster("H200"))
    pairs = count_pairs([(100, 100), (60, 60)], causal=True)
    assert flops(found.trace, FLASH) == {2 * 2 * 2 * 32 * pairs}
    assert any(NOTE in note for note in found.estimate.assumptions)


HUB_PACKAGE = """
def get_kernel(repo_id, *, revision=None, version=None):
    raise OSError(f"no network: {repo_id}")
def has_kernel(repo_id):
    return False
"""
HUB_SCRIPT = """
import kernels, torch
from torch.nn import functional

assert kernels.has_kernel("kernels-community/flash-attn3") and not kernels.has_kernel("some/activation")
try:
    kernels.get_kernel("some/activation")
except OSError:
    pass
third = kernels.get_kernel("kernels-community/flash-attn3").flash_attn_interface
second = kernels.get_kernel("kernels-community/flash-attn2")

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(64, 192, device="cuda")

    def forward(self, x):
        qkv = functional.linear(x.bfloat16(), self.project.weight.bfloat16()).view(2, 128, 3, 2, 32)
        out = third.flash_attn_func(*qkv.unbind(2), causal=True, window_size=(31, 0))
        return out + second.flash_attn_func(*qkv.unbind(2), 0.1, causal=True)

model = Attention()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.randn(2, 128, 64, device="cuda")).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_may_load_flash_attention_from_the_hub(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(HUB_PACKAGE, encoding="utf-8")
    file = tmp_path / "train.py"
    file.write_text(HUB_SCRIPT, encoding="utf-8")
    command = parse_command([sys.executable, str(file)], environment=os.environ)
    found = estimate_script(command, as_cluster("H200"))
    rows = [(128, 128)] * 2
    pairs = {count_pairs(rows, causal=True, window=32), count_pairs(rows, causal=True)}
    assert flops(found.trace, FLASH) == {2 * 2 * 2 * 32 * count for count in pairs}
    notes = "\n".join(found.estimate.assumptions)
    assert "flash-attn3 of the Hugging Face Hub was not loaded" in notes
    assert "some/activation of the Hugging Face Hub could not be loaded here (no network" in notes
    assert NOTE not in notes
    # The weights are in fp32, and the layer casts them itself.
    assert found.setting.precision is Precision.BF16
    (fact,) = [fact for fact in found.script.found if fact.name == "precision"]
    assert "of the arithmetic is in torch.bfloat16, by casts of its own" in fact.where


STATE_SPACE = """
import torch


class StateSpace:
    global_batch, samples, epochs = 4, 100, 1

    def model(self):
        from transformers import Mamba2Config, Mamba2ForCausalLM

        sizes = {"hidden_size": 32, "num_heads": 2, "head_dim": 32, "state_size": 8, "vocab_size": 64}
        return Mamba2ForCausalLM(Mamba2Config(num_hidden_layers=1, n_groups=1, **sizes))

    def batch(self, size):
        return torch.randint(0, 64, (size, 64))

    def loss(self, model, batch):
        return model(batch, labels=batch).loss
"""


def test_functions_that_transformers_runs_without_their_kernels_are_named(worker: WorkerProcess) -> None:
    if importlib.util.find_spec("mamba_ssm") is not None:
        pytest.skip("the kernels are installed")
    trace = traced(worker, shared_job(STATE_SPACE, "StateSpace"))
    notes = [note for note in trace.assumptions if note.startswith("transformers runs ")]
    assert any(
        "mamba_chunk_scan_combined as plain torch code, because mamba_ssm is not" in note for note in notes
    )


STRICT = """
import torch


class Strict:
    global_batch, samples, epochs = 4, 100, 1

    def model(self):
        torch.use_deterministic_algorithms(True, warn_only=True)
        return torch.nn.Linear(64, 4)

    def batch(self, size):
        return torch.randn(size, 64)

    def loss(self, model, batch):
        return model(batch).square().mean()
"""


def test_deterministic_algorithms_are_named_as_not_timed(worker: WorkerProcess) -> None:
    trace = traced(worker, shared_job(STRICT, "Strict"))
    assert "time: deterministic algorithms are on" in "\n".join(trace.assumptions)
