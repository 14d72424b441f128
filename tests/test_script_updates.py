"""Scripts without torch.optim, with nn.DataParallel, with checkpoints, evaluations and generated texts."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from trimtab.errors import CannotFollow, JobFailed
from trimtab.probe.detect import as_cluster
from trimtab.scripts.command import parse_command
from trimtab.scripts.deepspeed_patches import patch_calls
from trimtab.scripts.estimate import estimate_script
from trimtab.scripts.follow import _wait
from trimtab.scripts.observer import describe_optimizer
from trimtab.scripts.sandbox_record import SandboxRecord
from trimtab.scripts.torch_patches import is_read_by_loop
from trimtab.scripts.worker import describe_failure, list_writes
from trimtab.trace.child_process import has_timed_out, read_waited_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.scripts.estimate import ScriptEstimate

SCRIPTS = Path(__file__).parent / "scripts"
GIB = 2**30


def follow(script: str, *arguments: str, on: str = "H200", launcher: tuple[str, ...] = ()) -> ScriptEstimate:
    words = [sys.executable, *launcher, str(SCRIPTS / script), *arguments]
    return estimate_script(parse_command(words, environment=os.environ), as_cluster(on))


@pytest.fixture(autouse=True)
def in_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_script_without_an_optimizer_is_followed_by_its_backward_passes() -> None:
    found = follow("by_hand.py", "--batch_size", "16")
    facts = {fact.name: fact for fact in found.script.found}
    assert facts["optimizer"].value == "none"
    assert "itself" in facts["optimizer"].where
    assert found.estimate.parts.optimizer == 0
    assert found.estimate.parts.weights > 0
    assert not [note for note in found.estimate.assumptions if "failed" in note]


@pytest.mark.slow
def test_data_parallel_on_one_gpu_passes_its_inputs_on() -> None:
    plain, wrapped = (follow("classifier.py", *flags) for flags in ((), ("--data-parallel",)))
    assert wrapped.estimate.allocated_bytes == plain.estimate.allocated_bytes


def test_data_parallel_on_two_gpus_is_refused() -> None:
    with pytest.raises(CannotFollow, match="DataParallel"):
        follow("classifier.py", "--data-parallel", on="2xH200")


@pytest.mark.slow
def test_fully_shard_moves_a_model_from_the_cpu() -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    plain, moved = (
        follow("fsdp2.py", *flags, on="2xH200", launcher=torchrun) for flags in ((), ("--build-on-cpu",))
    )
    assert moved.estimate.parts.weights == plain.estimate.parts.weights
    assert moved.estimate.parts.optimizer == plain.estimate.parts.optimizer > 0


SAVES = """
import io, os, shutil
import torch
from safetensors.torch import load_file, save_file
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    model(torch.randn(4, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "last.pt")
    shutil.copyfile("last.pt", "best.pt")
    with open("whole.pt", "wb") as file:
        torch.save(model, file)
    loaded = torch.load("best.pt", map_location="cuda")
    assert loaded["step"] == step and os.path.getsize("whole.pt") > 0
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    model.load_state_dict(torch.load("whole.pt", weights_only=False).state_dict())
    save_file(model.state_dict(), "model.safetensors", metadata={"format": "pt"})
    assert os.path.getsize("model.safetensors") > 4 * 72
    model.load_state_dict(load_file("model.safetensors", device="cuda"))
    buffer = io.BytesIO()
    torch.save(torch.arange(3), buffer)
    buffer.seek(0)
    assert torch.load(buffer).tolist() == [0, 1, 2]
"""


def test_a_script_saves_and_loads_between_its_steps(tmp_path: Path) -> None:
    Path("saves.py").write_text(SAVES, encoding="utf-8")
    found = follow(str(tmp_path / "saves.py"))
    assert "save" in {phase.name for phase in found.phases}
    assert not [note for note in found.estimate.assumptions if "failed" in note]


LOADS = """
import torch
device = torch.device("cuda", 0)
table = torch.load("table.pt", map_location=device)
assert table.device == device
assert torch.load("table.pt", "cuda:0").device == device
assert torch.load("table.pt").device.type == "cpu"
assert torch.load("table.pt", {"cpu": "cuda:0"}).device == device
with open("state.pt", "rb") as file:
    state = torch.load(file, map_location="cuda")
assert state["step"] == 3 and state["0.weight"].device == device
assert state["0.weight"] is state["1.weight"] and isinstance(state["0.weight"], torch.nn.Parameter)
assert torch.load("model.pt", device, weights_only=False).weight.device == device
model = torch.nn.Linear(1024, 1024, bias=False).to(device)
optimizer = torch.optim.SGD(model.parameters())
for step in range(4):
    labels = torch.randint(0, 100, (8,), device=device)
    torch.where(labels >= 0, table[labels], torch.zeros_like(labels))
    model(torch.randn(8, 1024, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_files_are_loaded_onto_the_device_that_the_script_names(tmp_path: Path) -> None:
    tied = torch.nn.Parameter(torch.zeros(1024, 1024))
    torch.save(torch.arange(100), tmp_path / "table.pt")
    torch.save({"0.weight": tied, "1.weight": tied, "step": 3}, tmp_path / "state.pt")
    torch.save(torch.nn.Linear(1024, 1024), tmp_path / "model.pt")
    (tmp_path / "loads.py").write_text(LOADS, encoding="utf-8")
    peak = follow(str(tmp_path / "loads.py")).estimate.allocated_bytes
    # The weights of the model, their gradient, and the tied tensor of the file once.
    assert peak > 3 * 4 * 2**20


CLIPS = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model.cuda()
for step in range(4):
    model(torch.randn(4, 8).cuda()).sum().backward()
    gradients = [tensor.grad for group in optimizer.param_groups for tensor in group["params"]]
    assert step > 2 or all(gradient is not None for gradient in gradients)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_an_optimizer_made_before_the_model_moved_sees_its_gradients(tmp_path: Path) -> None:
    Path("clips.py").write_text(CLIPS, encoding="utf-8")
    assert follow(str(tmp_path / "clips.py")).estimate.parts.optimizer > 0


RETURNS = """
import torch
model = torch.nn.Linear(1024, 4096, bias=False).cuda()
optimizer = torch.optim.Adam(model.parameters())
for step in range(5):
    model(torch.randn(8, 1024).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(model.cpu().state_dict(), "model.pt")
    model.cuda()
"""


def test_a_model_that_returns_to_the_gpu_is_held_once(tmp_path: Path) -> None:
    Path("returns.py").write_text(RETURNS, encoding="utf-8")
    parts = follow(str(tmp_path / "returns.py")).estimate.parts
    assert parts.weights == 4 * 1024 * 4096
    assert 2 * parts.weights <= parts.optimizer < 2.1 * parts.weights


EVALUATES = """
import torch
from torch.utils.data import DataLoader
class Lower(torch.nn.Sequential):
    def forward(self, batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return super().forward(batch)
model = torch.nn.Sequential(torch.nn.LayerNorm(64), Lower(torch.nn.Linear(64, 64), torch.nn.ReLU())).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training, validation = (DataLoader(torch.randn(64, 64), batch_size=8) for _ in range(2))
for epoch in range(3):
    for batch in training:
        model(batch.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    losses = []
    for batch in validation:
        with torch.no_grad():
            losses.append(model(batch.cuda()).sum())
    print(torch.stack(losses).mean().item())
"""


def test_an_evaluation_after_the_third_step_gets_its_batches(tmp_path: Path) -> None:
    Path("evaluates.py").write_text(EVALUATES, encoding="utf-8")
    found = follow(str(tmp_path / "evaluates.py"))
    facts = {fact.name: fact for fact in found.script.found}
    assert facts["precision"].value == "bf16"
    assert facts["precision"].where.endswith("evaluates.py:13")
    assert "evaluation" in {phase.name for phase in found.phases}
    assert not [note for note in found.estimate.assumptions if "failed" in note]


GENERATES = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=200, bos_token_id=0, eos_token_id=100)
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
lengths = []
model.register_forward_hook(lambda *call: lengths.append(call[-1].past_key_values.get_seq_length()))
while True:
    questions = torch.randint(1, 100, (2, 4)).cuda()
    texts = model.generate(questions, max_new_tokens=6, do_sample=True, pad_token_id=0)
    # The question, two tokens, and the last, with the keys and values of all before it.
    assert lengths == [4, 5, 6, 9], lengths
    answers = texts[:, 4:]
    ends = (answers == 100).any(dim=1)
    assert not ends.any() and all(len(answer[answer != 0]) == 6 for answer in answers.cpu())
    model(texts, labels=texts, use_cache=True).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    lengths.clear()
"""


@pytest.mark.slow
def test_generated_texts_are_as_long_as_they_may_get(tmp_path: Path) -> None:
    Path("generates.py").write_text(GENERATES, encoding="utf-8")
    found = follow(str(tmp_path / "generates.py"))
    assert {fact.name: fact.value for fact in found.script.found}["sequence"] == "10"
    assert [note for note in found.estimate.assumptions if "as long as they may get" in note]


def test_a_refused_download_is_named_as_the_cause() -> None:
    record = SandboxRecord(scratch="")
    missing = RuntimeError("the tokenizer cannot be loaded")
    missing.__cause__ = RuntimeError("a part of it cannot be loaded")
    missing.__cause__.__cause__ = OSError("Cannot reach the hub: offline mode is enabled.")
    error = describe_failure(missing, record)
    assert isinstance(error, JobFailed)
    assert "once without trimtab" in error.cure
    assert "because of OSError: Cannot reach the hub" in error.found
    assert "once without trimtab" not in describe_failure(FileNotFoundError("data.bin"), record).cure
    record.add_network("huggingface.co:443")
    assert "once without trimtab" in describe_failure(FileNotFoundError("data.bin"), record).cure


def test_deepspeed_is_refused_when_it_is_used_or_missing() -> None:
    missing = PackageNotFoundError("The 'deepspeed>=0.9.3' distribution was not found and is required.")
    error = describe_failure(missing, SandboxRecord(scratch=""))
    assert isinstance(error, CannotFollow)
    assert "--fsdp full_shard" in error.cure
    # A script may import the package and leave it out: then it only has to be installed.
    absent = ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")
    assert "Install what is missing" in describe_failure(absent, SandboxRecord(scratch="")).cure
    package: Any = SimpleNamespace(initialize=None, zero=SimpleNamespace(Init=None))
    patch_calls(package)
    for use in (package.initialize, package.zero.Init):
        with pytest.raises(CannotFollow, match="cannot follow DeepSpeed"):
            use(config={})


class Batches:
    """An iterator that answers whether a loop reads it."""

    count = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> bool:
        self.count += 1
        if self.count > 2:
            raise StopIteration
        return is_read_by_loop()


def read_all(batches: Batches) -> Iterator[bool]:
    for batch in batches:  # noqa: UP028 - a loop in a generator, as scripts have it
        yield batch


def test_an_evaluation_ends_early_only_where_a_loop_reads_the_loader() -> None:
    for batches in (Batches(), read_all(Batches())):
        for _, is_read in enumerate(batches):
            assert is_read
    assert count_reads(read_all(Batches())) == 2
    assert not next(Batches())
    assert not next(read_all(Batches()))


def count_reads(batches: Iterator[bool]) -> int:
    return sum(batches)


def test_the_time_in_which_a_script_waits_for_a_cpu_does_not_count() -> None:
    assert has_timed_out(901, 0, 900)
    assert not has_timed_out(2_000, 1_500, 900)
    assert has_timed_out(4_000, 3_900, 900)
    assert read_waited_s(os.getpid()) >= 0
    assert read_waited_s(2**30) == 0


@pytest.mark.parametrize(("printed", "end"), [("", "; it printed nothing"), ("a\nb\n", "; its last line: b")])
def test_a_script_that_takes_too_long_is_quoted(printed: str, end: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(printed, encoding="utf-8")
    command = parse_command([sys.executable, str(SCRIPTS / "accumulate.py")], environment=os.environ)
    running: Any = SimpleNamespace(poll=lambda: None, pid=2**30)
    with pytest.raises(JobFailed) as caught:
        _wait(running, command, log, timeout_s=0, say=None)
    assert caught.value.found.endswith(end)


def test_files_that_are_not_written_are_grouped_by_folder() -> None:
    writes = [
        {"path": path, "where": "train.py:9", "bytes": size, "is_removed": path.endswith("old")}
        for path, size in (
            ("/x/small", 1),
            ("/out/a", 2**30),
            ("/out/b", 2**30),
            ("/out/old", 9),
            ("/c.lock", 0),
        )
    ]
    assert list_writes(writes) == ["/out/ (2 files, 2.0 GiB), train.py:9", "/x/small (1 B), train.py:9"]
    here = [write | {"path": str(Path.cwd() / f"file_{place}")} for place, write in enumerate(writes[:2])]
    assert list_writes(here)[0].startswith("./ (2 files, ")


def test_an_optimizer_without_switches_runs_in_a_loop() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    assert describe_optimizer(torch.optim.SparseAdam([parameter])) == "SparseAdam (loop)"
    assert describe_optimizer(torch.optim.SGD([parameter])) == "SGD (foreach)"
    assert describe_optimizer(torch.optim.AdamW([parameter], fused=True)) == "AdamW (fused)"
