"""A training script is followed as it is: its memory, its steps, and what it uses."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

import pytest

import trimtab
from trimtab.errors import CannotFollow, JobFailed, WrongUse
from trimtab.probe.detect import as_cluster
from trimtab.scripts.command import parse_command
from trimtab.scripts.estimate import estimate_script
from trimtab.spec.trace import SHARDED, WRAPPED
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.scripts.estimate import ScriptEstimate

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptEstimate]:
    monkeypatch.chdir(tmp_path)

    def run(*words: str, on: str = "H200", script: str | None = None) -> ScriptEstimate:
        if script is not None:
            Path("train.py").write_text(script, encoding="utf-8")
        typed = [str(SCRIPTS / word) if (SCRIPTS / word).is_file() else word for word in words]
        command = parse_command([sys.executable, *typed], environment=os.environ)
        return estimate_script(command, as_cluster(on))

    return run


def facts_of(found: ScriptEstimate) -> dict[str, str]:
    return {fact.name: fact.value for fact in found.script.found}


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(),
                                                  nn.Linear(1024, 256)) for _ in range(4))
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
"""

LOOP = (
    MODEL
    + """
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
while True:
    tokens = torch.randint(0, 1000, (16, 64)).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"loss {loss.item():.3f}")
"""
)

JOB = (
    MODEL
    + """
class Job:
    global_batch = 16
    def model(self): return Net()
    def batch(self, size): return torch.randint(0, 1000, (size, 64))
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    def optimizer(self, params): return torch.optim.AdamW(params, fused=True)
"""
)


@pytest.mark.slow
def test_a_script_needs_what_the_same_training_needs_as_a_job(follow: Callable[..., ScriptEstimate]) -> None:
    Path("job.py").write_text(JOB, encoding="utf-8")
    job = trimtab.estimate("job.py:Job", "H200", micro_batch=16, precision="bf16")
    found = follow("train.py", script=LOOP).estimate
    # The job keeps its batch for all steps; the script makes a new one while the old one is still there.
    assert abs(found.allocated_bytes - job.allocated_bytes) < 2**19
    assert found.parts.weights == job.parts.weights
    assert found.parts.optimizer == job.parts.optimizer
    assert found.step_s == pytest.approx(job.step_s, rel=0.15)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("key_value.py", {"accumulation": "4", "precision": "bf16", "sequence": "64"}),
        ("gan.py", {"accumulation": "1", "precision": "fp32", "optimizer": "Adam (foreach)"}),
        ("accumulate.py", {"accumulation": "2", "precision": "fp16"}),
        ("lengths.py", {"micro_batch": "8", "optimizer": "RMSprop (foreach)"}),
    ],
)
def test_a_script_shows_how_it_trains(
    name: str, expected: dict[str, str], follow: Callable[..., ScriptEstimate]
) -> None:
    found = follow(name)
    assert expected.items() <= facts_of(found).items()
    assert [phase.name for phase in found.phases][:2] == ["first step", "steady step"]
    assert found.estimate.step_s is not None


@pytest.mark.slow
def test_rank_0_of_several_processes_is_followed(follow: Callable[..., ScriptEstimate]) -> None:
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    replicated = follow(*launch, "ddp.py", "3", "1", on="2xH100")
    assert {"gpus": "2", "strategy": "ddp"}.items() <= facts_of(replicated).items()
    assert replicated.setting.data_parallel == 2
    sharded = follow(*launch, "fsdp2.py", on="2xH100")
    assert {"gpus": "2", "strategy": "fsdp"}.items() <= facts_of(sharded).items()
    works = [sharded.trace.works[number] for number in sharded.trace.sequence]
    sharded_at = [place for place, work in enumerate(works) if work.op == SHARDED]
    # Blocks are gathered in the forward pass, and gathered and reduced in the backward pass.
    assert sharded_at[0] < sharded.trace.phases["backward"] < sharded_at[-1]
    # DTensors are stepped and clipped together, as torch does on a GPU.
    assert max(work.dims[0] for work in works if work.op == WRAPPED) > 1


OWN_SENDING = (
    MODEL
    + """
import sys
import torch.distributed as dist
dist.init_process_group("nccl")
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
where = sys.argv[1]

def send(parameter):
    dist.all_reduce(parameter.grad)

if where == "hook":
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(send)
for step in range(3):
    out = net(torch.randint(0, 1000, (16, 64), device="cuda"))
    loss = out.square().mean()
    loss.backward()
    if where == "shards":
        for parameter in net.parameters():
            shard = torch.empty(parameter.numel() // 2, device="cuda")
            dist.reduce_scatter_tensor(shard, parameter.grad.flatten())
    dist.all_reduce(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    if where == "metrics":
        dist.all_reduce(torch.zeros(10, device="cuda"))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "function"), [("hook", "all_reduce"), ("shards", "reduce_scatter_tensor"), ("metrics", "")]
)
def test_ranks_whose_gradients_the_script_adds_up_are_counted(
    where: str, function: str, follow: Callable[..., ScriptEstimate]
) -> None:
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    found = follow(*launch, "train.py", where, on="2xH100", script=OWN_SENDING)
    notes = [note for note in found.estimate.assumptions if "adds up the gradients" in note]
    assert facts_of(found).get("strategy", "single") == ("ddp" if function else "single")
    assert found.setting.global_batch == (32 if function else 16)
    if function:
        assert f"with torch.distributed.{function} (train.py:" in notes[0]
        assert found.estimate.step_time is not None
        assert found.estimate.step_time.communication_s > 0
    else:
        assert not notes


UNITS = (
    MODEL
    + """
import functools
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

dist.init_process_group("nccl")
wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential})
net = FullyShardedDataParallel(Net(), auto_wrap_policy=wrap, device_id=0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    net(torch.randint(0, 1000, (16, 64), device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


def test_a_model_on_the_cpu_is_moved_by_its_sharded_units(follow: Callable[..., ScriptEstimate]) -> None:
    found = follow(
        "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", on="2xH100", script=UNITS
    )
    assert facts_of(found)["strategy"] == "fsdp"
    whole = 4 * (2 * 1000 * 256 + 1000 + 4 * (2 * 256 * 1024 + 256 + 1024 + 2 * 256))
    assert found.estimate.parts.weights == pytest.approx(whole / 2, rel=0.02)


EIGHT_BITS = """
import torch
from torch import nn

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return multiply(x, weight.t())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return multiply(gradient, weight), multiply(gradient.t(), x)

def multiply(left, right):
    scale = torch.ones((), device="cuda")
    narrow = left.contiguous().to(torch.float8_e4m3fn), right.t().contiguous().to(torch.float8_e4m3fn).t()
    return torch._scaled_mm(*narrow, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

weight = nn.Parameter(torch.randn(1024, 1024, device="cuda", dtype=torch.float32))
head = nn.Linear(1024, 64, device="cuda")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.head = weight, head
    def forward(self, x):
        return self.head(Product.apply(x.bfloat16(), self.weight.bfloat16()).float())

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    net(torch.randn(512, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


OWN_CUDA = (
    MODEL
    + """
SOURCE = '''
extern "C" __global__ void scale(const float* __restrict__ x, float* out, float by, int count) { }
'''
scale = torch.cuda._compile_kernel(SOURCE, "scale", compute_capability="90")
scale.set_shared_memory_config(100_000)

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        scale((x.numel() // 256,), (256,), (x, out, 2.0, x.numel()), shared_mem=100_000)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    Scale.apply(net(torch.randint(0, 1000, (16, 64), device="cuda"))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


def test_a_cuda_kernel_that_the_script_compiles_is_counted_by_its_tensors(
    follow: Callable[..., ScriptEstimate],
) -> None:
    found = follow("train.py", script=OWN_CUDA)
    works = [found.trace.works[number] for number in found.trace.sequence]
    (launch,) = [work for work in works if work.op == "cuda::scale"]
    assert (launch.read_bytes, launch.write_bytes) == (2 * 4 * 16 * 64 * 1000, 4 * 16 * 64 * 1000)
    assert any("CUDA kernels that the code compiles itself" in note for note in found.estimate.assumptions)


def test_layers_that_multiply_in_8_bits_are_named(follow: Callable[..., ScriptEstimate]) -> None:
    found = follow("train.py", script=EIGHT_BITS)
    (fact,) = [fact for fact in found.script.found if fact.name == "precision"]
    assert fact.value == "fp8-tensorwise"
    assert re.search(r"\d+% (of the arithmetic is )?in 8 bits, by casts of its own", fact.where)


def test_more_processes_than_gpus_are_refused(follow: Callable[..., ScriptEstimate]) -> None:
    with pytest.raises(WrongUse, match="it starts 2 processes, and --on names 1 GPU"):
        follow("-m", "torch.distributed.run", "--nproc-per-node", "2", "ddp.py", on="H100")


@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [
        ("loss", JobFailed, r"ValueError: loss is not finite .*breaks.py, line \d+"),
        ("data", JobFailed, r"FileNotFoundError: .*shard-0001\.tar.*breaks\.py, line \d+"),
        ("import", JobFailed, "a_module_that_nobody_has"),
        ("arguments", WrongUse, "exit code 2"),
        ("no-step", CannotFollow, "without an optimizer step"),
    ],
)
def test_a_script_that_fails_is_blamed_with_its_line(
    where: str, kind: Any, message: str, follow: Callable[..., ScriptEstimate]
) -> None:
    with pytest.raises(kind, match=message) as raised:
        follow("breaks.py", where)
    assert type(raised.value) is kind


NO_BATCH = (
    MODEL
    + """
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.utils.data.TensorDataset(torch.zeros(3, 8, dtype=torch.long))
loader = torch.utils.data.DataLoader(tokens, batch_size=4, drop_last=True)

def cycle(batches):
    while True:
        yield from batches

batches = cycle(loader) if "--endless" in sys.argv else loader
for (x,) in batches:
    model(x.cuda()).sum().backward()
    optimizer.step()
"""
)


@pytest.mark.parametrize(("words", "times"), [(("--endless",), " 1,000 times"), ((), "")])
def test_a_loader_without_a_batch_is_named_and_ends_the_script(
    words: tuple[str, ...], times: str, follow: Callable[..., ScriptEstimate]
) -> None:
    loader = r"3 samples, batch_size=4, drop_last=True \(read at train.py:\d+\)"
    with pytest.raises(CannotFollow, match=f"a data loader gave no batch{times}: {loader}") as raised:
        follow("train.py", *words, script=f"import sys\n{NO_BATCH}")
    assert "a smaller batch" in raised.value.cure


NO_STEP = (
    MODEL
    + """
from trimtab.scripts import observer
observer.REPORT_S = 0.0
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.zeros(2, 8, dtype=torch.long).cuda()).sum().backward()
"""
)


def test_backward_passes_without_a_step_are_shown(follow: Callable[..., ScriptEstimate]) -> None:
    with pytest.raises(CannotFollow, match="without an optimizer step") as raised:
        follow("train.py", script=NO_STEP)
    assert "trimtab: 5 backward passes without an optimizer step" in raised.value.__notes__[0]


def test_an_optimizer_and_tied_weights_survive_the_move_to_the_gpu(
    follow: Callable[..., ScriptEstimate],
) -> None:
    script = (
        MODEL
        + """
net = Net()
net.head.weight = net.embed.weight
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net.cuda()
assert net.head.weight is net.embed.weight
while True:
    loss = net(torch.randint(0, 1000, (4, 8), device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    found = follow("train.py", script=script)
    assert found.estimate.parts.weights > found.trace.trainable * 4 * 0.99
    assert found.trace.trainable == 1000 * 256 + 4 * (2 * 256 + 2 * 256 * 1024 + 1024 + 256) + 1000


def test_values_that_a_script_reads_are_ordinary_numbers(follow: Callable[..., ScriptEstimate]) -> None:
    script = (
        MODEL
        + """
import math
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    tokens = torch.arange(32).view(4, 8)
    out = net(tokens.cuda())
    loss = out.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    host = out.detach().cpu()
    assert type(host) is torch.Tensor and host.numpy().shape == (4, 8, 1000)
    assert math.isfinite(loss.item()) and f"{loss:.2f}" and loss.tolist() == loss.item()
    # Integers that came from the CPU keep their values.
    assert tokens.cuda()[2].cpu().tolist() == list(range(16, 24))
    assert int((tokens.cuda() > 29).sum()) == 2
    # Ranks compare their weights with those of rank 0; classes that are predicted differ from the right ones.
    assert (net.head.weight == net.head.weight.clone()).all()
    assert not (out.argmax(-1).flatten() == out.flatten(0, 1).argmax(-1)).all()
    # A parameter on `meta` stays an ordinary one.
    hollow = nn.Linear(8, 8, device="meta")
    hollow.bias.data = nn.functional.pad(hollow.bias.data, (0, 0))
    # Libraries make another parameter of the same class.
    weight = net.head.weight
    frozen = type(weight)(weight.data, requires_grad=False)
    assert isinstance(frozen, nn.Parameter) and not frozen.requires_grad
    assert type(weight)(weight.data).requires_grad
"""
    )
    found = follow("train.py", script=script)
    assert found.estimate.allocated_bytes > 0
    assert "a check that all numbers of two tensors are equal is taken to hold" in found.estimate.assumptions


def test_a_script_leaves_the_folder_as_it_was(follow: Callable[..., ScriptEstimate], tmp_path: Path) -> None:
    script = (
        MODEL
        + """
import os, pathlib
net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
os.makedirs("out", exist_ok=True)
pathlib.Path("notes.txt").write_text("mine, changed")
for step in range(3):
    net(torch.randint(0, 1000, (4, 8), device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, "out/last.pt")
assert os.path.exists("out/last.pt") and open("notes.txt").read() == "mine, changed"
net.load_state_dict(torch.load("out/last.pt")["model"])
"""
    )
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    found = follow("train.py", script=script)
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "train.py"]
    assert [line for line in found.script.writes if "last.pt" in line and "train.py:" in line]
    assert "save" in [phase.name for phase in found.phases]
    assert not [note for note in found.estimate.assumptions if "failed" in note]


PICKLED = (
    MODEL
    + """
import copy, pickle
net = Net().cuda()
net.tied = net.embed.weight
optimizer = torch.optim.AdamW(net.parameters())
for step in range(3):
    net(torch.randint(0, 1000, (4, 8), device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with open("snapshot.pkl", "wb") as file:
    pickle.dump({"net": net, "optimizer": optimizer, "rates": [0.1]}, file)
with open("snapshot.pkl", "rb") as file:
    loaded = pickle.load(file)
weight = loaded["net"].embed.weight
assert weight.is_cuda and isinstance(weight, nn.Parameter) and weight is loaded["net"].tied
loaded["net"](torch.randint(0, 1000, (4, 8), device="cuda"))
shared = copy.copy(net.embed.weight)
assert isinstance(shared, nn.Parameter)
assert shared.untyped_storage()._cdata == net.embed.weight.untyped_storage()._cdata
"""
)


def test_a_model_is_pickled_by_its_shapes(follow: Callable[..., ScriptEstimate]) -> None:
    found = follow("train.py", script=PICKLED)
    (write,) = found.script.writes
    weights = 4 * (1000 * 256 + 4 * (512 + 2 * 256 * 1024 + 1024 + 256) + 256 * 1000 + 1000)
    assert write.startswith(f"snapshot.pkl ({format_bytes(3 * weights)}), train.py:")
    assert "save" in [phase.name for phase in found.phases]
    assert not [note for note in found.script.notes if "failed" in note]


def test_a_line_of_code_elsewhere_is_named_as_it_is_imported(
    follow: Callable[..., ScriptEstimate], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere" / "somewhere"
    (elsewhere / "trainers").mkdir(parents=True)
    (elsewhere / "trainers" / "plain.py").write_text(f"def run():\n{indent(LOOP, '    ')}\n", "utf-8")
    there = tmp_path / "here"
    there.mkdir()
    os.chdir(there)
    script = f"import sys\nsys.path.insert(0, {str(elsewhere)!r})\nfrom trainers import plain\nplain.run()\n"
    found = follow("train.py", script=script)
    wheres = {fact.name: fact.where for fact in found.script.found}
    assert wheres["optimizer"].startswith("trainers/plain.py:")


def test_an_evaluation_with_a_graph_is_no_training_step(follow: Callable[..., ScriptEstimate]) -> None:
    script = (
        MODEL
        + """
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    net(torch.randint(0, 1000, (4, 8), device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
net.eval()
kept = [net(torch.randint(0, 1000, (64, 64), device="cuda")) for _ in range(2)]
"""
    )
    peaks = {phase.name: phase.allocated_bytes for phase in follow("train.py", script=script).phases}
    assert peaks["evaluation"] > 4 * peaks["steady step"]


PACKED = """
import torch
from torch import nn

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:
    @triton.jit
    def scale_rows(out_ptr, x_ptr, width, BLOCK: tl.constexpr):
        at = tl.program_id(0) * width + tl.arange(0, BLOCK)
        values = tl.load(x_ptr + at)
        pointer = out_ptr + at
        tl.store(pointer, values * 2)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if triton is None:
            return (x.double() * 2).to(x.dtype)
        out = torch.empty_like(x)
        scale_rows[(x.shape[0],)](out, x, x.shape[-1], BLOCK=triton.next_power_of_2(x.shape[-1]))
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 512)
        self.head = nn.Linear(512, 1000)

    def forward(self, tokens):
        return self.head(Scale.apply(self.embed(tokens)))


def pack(samples):
    return torch.cat(samples).unsqueeze(0)


samples = [torch.randint(0, 1000, (40 + 9 * number,)) for number in range(64)]
loader = torch.utils.data.DataLoader(samples, batch_size=4, collate_fn=pack)
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for number, tokens in enumerate(loader, 1):
    tokens = tokens.cuda()
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    if number % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_triton_kernel_takes_no_memory_and_packed_samples_are_counted(
    follow: Callable[..., ScriptEstimate],
) -> None:
    found = follow("train.py", script=PACKED)
    facts = facts_of(found)
    assert (facts["micro_batch"], facts["accumulation"], facts["global_batch"]) == ("4", "2", "8")
    where = {fact.name: fact.where for fact in found.script.found}
    assert "1 row of up to" in where["micro_batch"]
    assert "mean size" in where["accumulation"]
    works = [found.trace.works[number] for number in found.trace.sequence]
    launch = next(work for work in works if work.op == "triton::scale_rows")
    assert launch.read_bytes == launch.write_bytes > 0
    assert not any(work.dtype == "float64" for work in works)
    # One micro-batch and the optimizer: as many launches as a pass has.
    assert sum(work.op == "triton::scale_rows" for work in works) == 1
    assert any("Triton kernels" in note for note in found.estimate.assumptions)


CHUNKED_LOSS = """
import torch
from torch import nn

class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(1000, 256), nn.Linear(256, 256)

    def forward(self, tokens):
        return self.layer(self.embed(tokens))

body, head = Body().cuda(), nn.Linear(256, 1000).cuda()
optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()])
for step in range(5):
    for part in range(3):
        tokens = torch.randint(0, 1000, (6, 64), device="cuda")
        hidden = body(tokens)
        gradients = []
        for chunk, labels in zip(hidden.chunk(4, 1), tokens.chunk(4, 1)):
            chunk = chunk.detach().requires_grad_()
            nn.functional.cross_entropy(head(chunk).flatten(0, 1), labels.flatten()).backward()
            assert chunk.grad is not None
            gradients.append(chunk.grad)
        hidden.backward(torch.cat(gradients, 1))
    optimizer.step()
    optimizer.zero_grad()
"""


def test_backward_passes_of_the_chunks_of_a_loss_are_part_of_a_micro_batch(
    follow: Callable[..., ScriptEstimate],
) -> None:
    found = follow("train.py", script=CHUNKED_LOSS)
    facts = facts_of(found)
    assert (facts["micro_batch"], facts["accumulation"], facts["global_batch"]) == ("6", "3", "18")
    ran = [found.trace.works[number] for number in found.trace.sequence]
    # Four chunks of the head and one layer, forward and twice backward; the layer's input needs a gradient.
    assert sum(work.kind == "matrix" for work in ran) == 4 * 3 + 3


CACHED_GRADIENTS = """
import torch
from torch import nn

model = nn.Sequential(nn.Embedding(1000, 64), nn.Flatten(), nn.Linear(16 * 64, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
texts = torch.randint(0, 1000, (320, 16))
for batch in torch.utils.data.DataLoader(texts, batch_size=40):
    parts = batch.cuda().split(8)
    with torch.no_grad():
        vectors = torch.cat([model(part) for part in parts])
    vectors.requires_grad_()
    (vectors @ vectors.T).logsumexp(-1).mean().backward()
    for part, gradient in zip(parts, vectors.grad.split(8)):
        (model(part) * gradient).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_every_part_of_a_batch_with_cached_gradients_counts(follow: Callable[..., ScriptEstimate]) -> None:
    found = follow("train.py", script=CACHED_GRADIENTS)
    assert facts_of(found).items() >= {"micro_batch": "40", "accumulation": "1", "global_batch": "40"}.items()
    where = {fact.name: fact.where for fact in found.script.found}
    assert "the model gets them in parts of 8" in where["micro_batch"]
    ran = [found.trace.works[number] for number in found.trace.sequence]
    # Five parts: once without a graph, then forward and twice backward. Then the similarities.
    assert sum(work.kind == "matrix" for work in ran) == 5 * 4 + 3


OWN_LOADER = """
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

class OwnIterator(_SingleProcessDataLoaderIter):
    pass

class OwnLoader(DataLoader):
    def _get_iterator(self):
        return (_MultiProcessingDataLoaderIter if self.num_workers else OwnIterator)(self)

class Samples(IterableDataset):
    def __iter__(self):
        assert get_worker_info().num_workers == 2
        yield from torch.randn(1000, 64)

loader = OwnLoader(Samples(), batch_size=8, num_workers=2)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
assert type(iter(loader)) is OwnIterator
for batch in loader:
    model(batch.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_loader_with_iterators_of_its_own_loads_without_worker_processes(
    follow: Callable[..., ScriptEstimate],
) -> None:
    found = follow("train.py", script=OWN_LOADER)
    facts = facts_of(found)
    assert facts["micro_batch"] == "8"
    assert "num_workers=2" in facts["loader"]


ENDLESS_LOADER = """
import torch
from torch.utils.data import DataLoader

class Endless(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.iterator = super().__iter__()

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)

class Checked(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model.eval()

    @torch.inference_mode()
    def forward(self, image):
        with torch.autocast("cuda", enabled=False):
            return self.model(image)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.anchors = torch.nn.Parameter(torch.rand(3, 64))
        self.line = torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.line(x) + sum(self.anchors[place] for place in (0, 1, 2, 1, 1))

model = Net()
model(torch.rand(2, 64))
model.cuda()
image = torch.rand(1, 64).cuda()
with torch.autocast("cuda"):
    half = Checked(model)(image)
low_precision = torch.allclose(Checked(model)(image), half, atol=0.1)
model.train()
data = torch.randn(640, 64)
optimizer = torch.optim.SGD(model.parameters())
for batch in Endless(data, batch_size=16):
    with torch.autocast("cuda", enabled=low_precision):
        loss = model(batch.cuda()).float().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    for batch in Endless(data, batch_size=64):
        model(batch.cuda())
torch.save(model.state_dict(), "model.pt")
"""


def test_a_check_of_low_precision_holds_and_a_generator_ends_with_its_loader(
    follow: Callable[..., ScriptEstimate],
) -> None:
    found = follow("train.py", script=ENDLESS_LOADER)
    facts = facts_of(found)
    # Neither the trial on the CPU nor the check without gradients is a training call.
    assert facts["micro_batch"] == "16"
    assert "micro_batches_seen" not in facts
    assert facts["precision"] == "fp16"
    assert [phase.name for phase in found.phases] == [
        "first step",
        "steady step",
        "evaluation",
        "save",
    ]
    notes = " ".join(found.script.notes)
    assert "tensors that torch.allclose compares are taken to be close" in " ".join(
        found.estimate.assumptions
    )
    assert "failed" not in notes


EPOCHS = """
import torch
from torch.utils.data import DataLoader

encoder, model = torch.nn.Linear(64, 4096).cuda(), torch.nn.Linear(4096, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
loader = DataLoader(torch.randn(32, 64), batch_size=16)
for epoch in range(6):
    total = batches = 0
    for batch in loader:
        with torch.no_grad():
            x = encoder(batch.cuda())
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total, batches = total + loss.item(), batches + 1
    print(total / batches)
"""
CHECK = """
model.eval()
with torch.no_grad():
    for batch in DataLoader(torch.randn(64, 64), batch_size=64):
        model(encoder(batch.cuda()))
"""


@pytest.mark.parametrize(("check", "last"), [("", []), (CHECK, ["evaluation"])])
def test_epochs_have_batches_and_an_encoder_belongs_to_the_step(
    check: str, last: list[str], follow: Callable[..., ScriptEstimate]
) -> None:
    found = follow("train.py", script=EPOCHS + check)
    assert [phase.name for phase in found.phases] == ["first step", "steady step", *last]
    assert not [note for note in found.script.notes if "failed" in note]
    assert facts_of(found)["micro_batch"] == "16"


CONTRASTIVE = """
import torch
from torch import nn

class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.later = nn.Linear(16, 32), nn.Linear(100, 10)

    def forward(self, x, edges):
        x = self.layer(x)
        return x.index_add(0, edges[1], x[edges[0]])

net = GraphNet().cuda()
critic = nn.Linear(32, 1).cuda().eval().requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
edges = torch.randint(0, 8, (2, 40)).cuda()
labels = torch.arange(4).repeat(2)
same = (labels[:, None] == labels).float().cuda()
others = ~torch.eye(8, dtype=torch.bool).cuda()
for step in range(9):
    rows = nn.functional.normalize(net(torch.randn(8, 16).cuda(), edges))
    similar = (rows @ rows.T)[others].view(8, 7)
    positives = similar[same[others].view(8, 7).bool()].view(8, -1)
    assert positives.shape == (8, 1)
    places = (torch.rand(8).cuda() * torch.full((8,), 9).cuda()).long()
    assert rows[0, places[0] : places[0] + 4].shape == (4,)
    loss = critic(rows).mean() - positives.mean()
    if loss != loss or torch.max(loss) > 1e8:
        raise ValueError("the loss is not finite")
    assert (similar.exp() >= 0).all()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_checks_of_values_hold_and_masks_of_floats_are_known(follow: Callable[..., ScriptEstimate]) -> None:
    found = follow("train.py", script=CONTRASTIVE)
    assert not [note for note in found.script.notes if "failed" in note]
    assert facts_of(found)["micro_batch"] == "8"
    assert [note for note in found.estimate.assumptions if note.startswith("1,010 of the 1,554 parameters")]
    # Edges have no sequence.
    assert "sequence" not in facts_of(found)


ADVERSARIAL = """
import sys
import torch
from torch import nn

rounds = int(sys.argv[1])
maker, critic = nn.Linear(8, 64).cuda(), nn.Linear(64, 1).cuda()
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, maker)]
for step in range(4):
    for net, optimizer in zip((critic, maker), optimizers):
        optimizer.zero_grad()
        for _ in range(rounds):
            critic(maker(torch.randn(4, 8).cuda())).mean().backward()
        assert all(parameter.grad is not None for parameter in net.parameters())
        optimizer.step()
        critic.zero_grad()
        maker.zero_grad()
"""


@pytest.mark.parametrize("rounds", [1, 3])
def test_passes_of_another_optimizer_repeat_nothing(
    follow: Callable[..., ScriptEstimate], rounds: int
) -> None:
    found = follow("train.py", str(rounds), script=ADVERSARIAL)
    facts = facts_of(found)
    assert facts["optimizers"] == "2 x SGD"
    assert (facts["accumulation"], facts["global_batch"]) == (str(rounds), str(4 * rounds))
    # One pass for the critic and one for the maker: forward and backward of two layers, without the input's.
    works = [found.trace.works[number] for number in found.trace.sequence]
    assert sum(work.kind == "matrix" for work in works) == 2 * 5
    updates = works[found.trace.phases["optimizer"] :]
    assert sum("foreach_add" in work.op for work in updates) == (1 if rounds == 1 else 2)


PERTURBED = """
import sys
import torch
from torch import nn

rounds = int(sys.argv[1])
model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    for ascends in (True, False):
        for _ in range(rounds):
            model(torch.randn(4, 8).cuda()).square().mean().backward()
        if ascends:
            with torch.no_grad():
                for parameter in model.parameters():
                    WRITE(0.05 * parameter.grad)
            optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(("write", "rounds"), [("parameter.add_", 1), ("parameter.data.add_", 2)])
def test_passes_with_perturbed_weights_are_no_accumulation(
    follow: Callable[..., ScriptEstimate], write: str, rounds: int
) -> None:
    found = follow("train.py", str(rounds), script=PERTURBED.replace("WRITE", write))
    assert facts_of(found)["accumulation"] == str(rounds)
    works = [found.trace.works[number] for number in found.trace.sequence]
    assert sum(work.kind == "matrix" for work in works) == 2 * 2


ACTING = """
import torch
from torch import nn

model = nn.Linear(8, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    for _ in range(5):
        action = model(torch.randn(1, 8).cuda()).argmax().cpu()
    model(torch.randn(32, 8).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_calls_that_no_backward_pass_uses_have_no_micro_batch(follow: Callable[..., ScriptEstimate]) -> None:
    facts = facts_of(follow("train.py", script=ACTING))
    assert facts["micro_batch"] == "32"
    assert "micro_batches_seen" not in facts


EVALUATED_FIRST = """
import torch
from torch import nn

class Counted(nn.Linear):
    calls = 0
    def forward(self, x):
        Counted.calls += not self.training
        return super().forward(x)

model = Counted(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.eval()
total = sum(model(torch.randn(8, 64).cuda()).square().mean().item() for _ in range(200))
assert Counted.calls == 3, Counted.calls
losses = [model(torch.randn(16, 64).cuda()).mean() for _ in range(6)]
assert Counted.calls == 9, "their graphs are in use"
# Trained in evaluation mode, as to keep the statistics of normalization.
for step in range(4):
    sum(losses).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses = [model(torch.randn(16, 64).cuda()).mean()]
assert Counted.calls > 9
"""


def test_few_evaluations_before_training_are_followed(follow: Callable[..., ScriptEstimate]) -> None:
    found = follow("train.py", script=EVALUATED_FIRST)
    assert facts_of(found)["micro_batch"] == "16"
    assert [
        note for note in found.estimate.assumptions if "3 calls with the same inputs were followed" in note
    ]


FORWARD_ONLY = """
import torch
from torch import nn

class Layer(nn.Linear):
    def forward(self, x):
        return (x @ self.weight.T + self.bias).relu()

layer = Layer(512, 512).cuda()
optimizer = torch.optim.Adam(layer.parameters())
x = torch.randn(64, 512).cuda()
for epoch in range(10_000_000):
    layer.forward(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_calls_no_model_is_followed(follow: Callable[..., ScriptEstimate]) -> None:
    found = follow("train.py", script=FORWARD_ONLY)
    assert found.estimate.parts.weights == 4 * (512 * 512 + 512)
    assert found.estimate.parts.optimizer >= 2 * found.estimate.parts.weights
    assert found.trace.trainable == 512 * 512 + 512
    works = [found.trace.works[number] for number in found.trace.sequence]
    assert sum(work.kind == "matrix" for work in works) == 2


ITERATIVE = """
import torch
from torch import nn

net = nn.Linear(512, 512).cuda()
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4, history_size=10)
x = torch.rand(8, 512).cuda()

def closure():
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()
    return loss

for step in range(6):
    optimizer.step(closure)
"""


def test_l_bfgs_takes_all_its_iterations_and_its_memory(follow: Callable[..., ScriptEstimate]) -> None:
    found = follow("train.py", script=ITERATIVE)
    assert facts_of(found)["accumulation"] == "1"
    # Directions and steps, both ten times; and one each that is about to be added.
    assert found.estimate.parts.optimizer >= 20 * 4 * (512 * 512 + 512)
    products = [number for number in found.trace.sequence if found.trace.works[number].flops > 8 * 512 * 512]
    assert len(products) >= 4 * 2
