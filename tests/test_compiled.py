from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch

import trimtab
from shared_jobs import shared_job
from test_cli import trimtab_cli
from trimtab.catalog.clusters import device_from_row
from trimtab.catalog.devices import find_reported_device
from trimtab.errors import JobFailed, WrongUse
from trimtab.exams.run import predict_case, read_cases
from trimtab.spec import PARTS, Device, Estimate, Precision, Setting
from trimtab.spec.trace import GRAPH_ENTER
from trimtab.trace.compiled import (
    CostClock,
    KernelTuning,
    MemoryBalance,
    count_additions,
    count_instructions,
    count_waiting_additions,
)
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import trace_setting

if TYPE_CHECKING:
    from pathlib import Path


JOB = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up = nn.Linear(256, 1024)
        self.down = nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(256, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Job:
    global_batch = 64

    def model(self):
        return Net()

    def batch(self, size):
        return torch.randn(size, 128, 256), torch.randint(0, 10, (size, 128))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


class Chain(Job):
    # Eager keeps every step of the chain, compiled code one number of it.
    def model(self):
        class Many(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(256))

            def forward(self, x):
                y = x * self.scale
                for _ in range(8):
                    y = torch.tanh(y) * torch.sigmoid(y)
                return y
        return Many()

    def loss(self, model, batch):
        return model(batch[0]).mean()


class Dropping(Job):
    # What attention drops forward has to be dropped again when the block is recomputed.
    def model(self):
        class Attend(Block):
            def forward(self, x):
                y = self.norm(x).unflatten(-1, (4, 64)).transpose(1, 2)
                y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.1)
                return super().forward(x + y.transpose(1, 2).flatten(-2))

        net = Net()
        net.blocks = nn.ModuleList(Attend() for _ in range(2))
        return net


class Packaged(Job):
    # The package flash_attn registers operators, which split no graph.
    def model(self):
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        class Attend(Block):
            def forward(self, x):
                y = self.norm(x).bfloat16().unflatten(-1, (4, 64))
                ends = torch.arange(0, y.shape[0] * 128 + 1, 128, dtype=torch.int32, device=x.device)
                z = flash_attn_varlen_func(*[y.flatten(0, 1)] * 3, ends, ends, 128, 128, causal=True)
                y = flash_attn_func(y, y, y, causal=True) + z.unflatten(0, y.shape[:2])
                return super().forward(x + y.flatten(-2))

        net = Net()
        net.blocks = nn.ModuleList(Attend() for _ in range(2))
        return net


class Broken(Job):
    # A number read from the device ends the graph; the rest is another one.
    def model(self):
        class Reads(Net):
            def forward(self, x):
                x = self.blocks[0](x)
                if x.sum().item() < 0:
                    x = -x
                return self.head(self.blocks[1](x))
        return Reads()


class Recurrent(Job):
    # torch leaves recurrent layers out of compiled code.
    def model(self):
        class Steps(nn.Module):
            def __init__(self):
                super().__init__()
                self.cells = nn.LSTM(256, 256, batch_first=True)
                self.head = nn.Linear(256, 10)

            def forward(self, x):
                return self.head(torch.relu(self.cells(x)[0]))
        return Steps()


class Own(Job):
    def model(self):
        return torch.compile(Net(), mode="max-autotune")


class Windowed(Job):
    # Attention is compiled by the job itself, in a loop over layers, with a mask made in the forward pass.
    def model(self):
        from torch.nn.attention import flex_attention as flex

        def is_near(batch, head, row, column):
            return (row >= column) & (row - column < 128)

        class Attend(nn.Module):
            def __init__(self):
                super().__init__()
                self.inward = nn.Linear(256, 3 * 256)

            def forward(self, x, mask):
                heads = self.inward(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
                attend = torch.compile(flex.flex_attention, dynamic=False)
                return x + attend(*heads.unbind(), block_mask=mask).transpose(1, 2).flatten(2)

        class Window(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(Attend() for _ in range(2))

            def forward(self, x):
                mask = flex.create_block_mask(is_near, None, None, 512, 512, device=x.device.type)
                for layer in self.layers:
                    x = layer(x, mask)
                return x
        return Window()

    def batch(self, size):
        return torch.randn(size, 512, 256), None

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


class Asking(Job):
    # What the device can do is a constant of compiled code.
    def model(self):
        class Asks(Net):
            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                    if torch.cuda.get_device_properties(0).multi_processor_count < 2:
                        x = -x
                return self.head(x)
        return Asks()


class Checking(Job):
    # Models of transformers ask for fake tensors, of which a real run has none.
    def model(self):
        from transformers.utils import import_utils

        class Checks(Net):
            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                    if import_utils.is_fake_tensor(x):
                        x = -x
                return self.head(x)
        return Checks()


class Host(Job):
    # Part of the graph is for the CPU: nothing is compiled for it, and it takes no device memory.
    def model(self):
        class Waves(Net):
            def forward(self, x):
                return super().forward(x * torch.arange(256).float().cos().to(x.device))
        return Waves()


class Constant(Job):
    def model(self):
        class Scaled(Net):
            def forward(self, x):
                return super().forward(x * torch.tensor(16.0, dtype=x.dtype, device=x.device))
        return Scaled()


class Wrong(Job):
    def batch(self, size):
        return torch.randn(size, 128, 250), torch.randint(0, 10, (size, 128))
"""


def estimate(name: str = "Job", **options: Any) -> Estimate:
    return trimtab.estimate(shared_job(JOB, name), "H200", **{"micro_batch": 64, **options})


def activations(found: Estimate) -> int:
    return int(found.parts.activations)


def h200() -> Device:
    row = find_reported_device("NVIDIA H200")
    assert row is not None
    return device_from_row(row, 0, "the test")


@pytest.mark.slow
def test_fused_steps_are_never_stored() -> None:
    eager, compiled = (estimate("Chain", compile=one, micro_batch=512) for one in (False, True))
    sample = 512 * 128 * 256 * 2
    assert activations(eager) > 16 * sample
    assert activations(compiled) < 6 * sample


@pytest.mark.slow
def test_what_the_optimizer_keeps_is_the_same_as_without() -> None:
    eager, compiled = (estimate(compile=one, micro_batch=1) for one in (False, True))
    assert compiled.parts.weights == eager.parts.weights
    assert compiled.band.low_bytes < compiled.process_bytes < compiled.band.high_bytes


@pytest.mark.slow
def test_recomputation_is_compiled_too() -> None:
    kept, again = (estimate(compile=True, recompute=name) for name in ("none", "full"))
    hidden = 64 * 128 * 1024 * 2
    assert activations(kept) - activations(again) > hidden


@pytest.mark.slow
def test_randomness_is_recomputed_under_the_compiler() -> None:
    kept, again = (estimate("Dropping", compile=True, recompute=name) for name in ("none", "full"))
    assert activations(again) < activations(kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Broken", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Recurrent", "Host"))]
)
def test_what_the_compiler_leaves_out_is_counted_as_it_runs(name: str) -> None:
    found = estimate(name, compile=True)
    assert activations(found) > 64 * 128 * 256 * 2
    read = any(".item()" in assumption for assumption in found.assumptions)
    assert read == (name == "Broken")


@pytest.mark.slow
def test_a_number_made_a_tensor_of_the_device_is_compiled() -> None:
    found = estimate("Constant", compile=True)
    assert activations(found) == pytest.approx(activations(estimate(compile=True)), rel=0.1)


@pytest.mark.slow
def test_a_job_that_compiles_itself_needs_no_option() -> None:
    own, asked = estimate("Own"), estimate(compile=True)
    assert own.allocated_bytes == asked.allocated_bytes
    assert any("default mode, not max-autotune" in assumption for assumption in own.assumptions)


@pytest.mark.slow
def test_flex_attention_is_a_part_of_the_compiled_model() -> None:
    setting = Setting(micro_batch=4, global_batch=4, precision=Precision.BF16, compile=True)
    trace = trace_setting(TraceRequest(job=shared_job(JOB, "Windowed"), setting=setting, device=h200()))
    counts = Counter(trace.works[number].op for number in trace.sequence)
    assert counts["trimtab::flex_attention"] == counts["trimtab::flex_attention_backward"] == 2
    # One graph makes the mask; the layers are one graph forward and one backward.
    assert counts[GRAPH_ENTER] == 3
    assert not any("flex_attention" in text for text in trace.assumptions)
    # A row of 4 blocks has 1, 2, 2 and 2 of them.
    share = 7 / 16
    (attention,) = [work for work in trace.works if work.op == "trimtab::flex_attention"]
    assert attention.flops == pytest.approx(share * 4 * 4 * 512**2 * 64 * 4, rel=1e-4)


@pytest.mark.slow
def test_the_package_flash_attn_does_not_split_compiled_code() -> None:
    setting = Setting(micro_batch=4, global_batch=4, precision=Precision.BF16, compile=True)
    trace = trace_setting(TraceRequest(job=shared_job(JOB, "Packaged"), setting=setting, device=h200()))
    counts = Counter(trace.works[number].op for number in trace.sequence)
    assert counts[GRAPH_ENTER] == 2
    assert counts["aten::_flash_attention_forward"] == counts["aten::_flash_attention_backward"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Asking", "Checking"])
def test_questions_about_the_device_do_not_split_compiled_code(name: str) -> None:
    if name == "Checking":
        pytest.importorskip("transformers")
    setting = Setting(micro_batch=4, global_batch=4, precision=Precision.BF16, compile=True)
    trace = trace_setting(TraceRequest(job=shared_job(JOB, name), setting=setting, device=h200()))
    counts = Counter(trace.works[number].op for number in trace.sequence)
    # One graph forward and one backward.
    assert counts[GRAPH_ENTER] == 2


@pytest.mark.usefixtures("own_cache")
@pytest.mark.slow
def test_nothing_is_left_for_a_real_run_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(theirs))
    estimate(compile=True, micro_batch=2)
    assert not theirs.exists()


@pytest.mark.slow
def test_a_job_that_does_not_compile_is_told_where() -> None:
    with pytest.raises(JobFailed, match=r"job\.py, line"):
        estimate("Wrong", compile=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_devices_are_refused_with_the_way_out(strategy: str) -> None:
    with pytest.raises(WrongUse, match="one device only") as caught:
        trimtab.estimate(shared_job(JOB), "8xH100", compile=True, strategy=strategy)
    assert "Leave one of the two out" in str(caught.value)


@pytest.mark.slow
def test_the_command_says_what_it_would_be_without() -> None:
    call = ("estimate", shared_job(JOB, "Chain"), "--on", "H200", "--micro-batch", "512", "--compile")
    done = trimtab_cli(*call)
    assert done.returncode == 0, done.stderr
    assert "without --compile:" in done.stdout
    assert "compiling costs memory" not in done.stdout
    found = json.loads(trimtab_cli(*call, "--json").stdout)
    assert found["setting"]["compile"] is True
    assert set(found["parts"]) == {*PARTS, "context"}


@pytest.mark.slow
def test_a_recorded_compiled_run_is_predicted() -> None:
    (case,) = read_cases("llama2-compile-bf16true-b4")
    found = predict_case(case)
    assert found.allocated_bytes == pytest.approx(case.measurement.allocated_bytes, rel=0.02)
    assert found.reserved_bytes == pytest.approx(case.measurement.reserved_bytes, rel=0.04)


@pytest.mark.slow
@pytest.mark.xdist_group("exam")  # they share their traces with the exam
def test_every_recorded_compiled_run_is_predicted() -> None:
    for case in read_cases("*-compile-*"):
        found = predict_case(case)
        assert found.allocated_bytes == pytest.approx(case.measurement.allocated_bytes, rel=0.05), case.id
        assert found.reserved_bytes == pytest.approx(case.measurement.reserved_bytes, rel=0.15), case.id
        assert case.measurement.process_bytes is not None
        assert found.band.low_bytes <= case.measurement.process_bytes <= found.band.high_bytes, case.id


# What the compiler tries out.


def seconds(rows: int, inner: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> float:
    clock = CostClock(h200())
    with clock:
        torch.mm(
            torch.empty(rows, inner, dtype=dtype, device="meta"),
            torch.empty(inner, columns, dtype=dtype, device="meta"),
        )
    return clock.seconds


def test_matrix_products_of_odd_sides_are_slow() -> None:
    even, odd = seconds(8192, 768, 50264), seconds(8192, 768, 50257)
    assert odd > 2 * even
    assert seconds(8192, 768, 50264, torch.float32) > 5 * even


def test_views_take_no_time() -> None:
    clock = CostClock(h200())
    with clock:
        torch.empty(8, 8, device="meta").t()
    before = clock.seconds
    with clock:
        torch.empty(8, 8, device="meta").t()
    assert clock.seconds == pytest.approx(2 * before)


KERNEL = """
import triton

@triton_heuristics.{kind}(
    size_hints={hints},
    {more}filename=__file__,
    triton_meta={{'signature': {{'in_out_ptr0': '*bf16'}}, 'device': DeviceProperties(type='cuda', index=0,
        multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, warp_size=32), 'constants': {{}}}},
    inductor_meta={{'mutated_arg_names': ['in_out_ptr0'], 'optimize_mem': False, 'autotune_hints': set(),
        'num_load': 1, 'num_store': 1, 'num_reduction': 1, 'kernel_name': 'k', 'grid_type': 'Grid1D'}},
)
@triton.jit
def kernel(in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
"""


def test_torch_itself_says_how_many_configurations_are_tried() -> None:
    found = KernelTuning(KERNEL.format(kind="pointwise", hints="{'x': 1048576}", more=""))
    assert found.configurations >= 1
    assert found.mutated == ("in_out_ptr0",)
    assert found.copies_on_host is False


@pytest.mark.parametrize(
    "source", ["", "def kernel(): pass", "@triton_heuristics.no_such(\n    x=1\n)\ndef k(): pass"]
)
def test_a_kernel_that_is_not_understood_is_not_tuned(source: str) -> None:
    assert KernelTuning(source).configurations == 1


ADDING = """
def triton_poi_fused_put(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 4096
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    tl.atomic_add(out_ptr0 + (tl.broadcast_to(tmp0, [XBLOCK])), tmp1, None, sem='relaxed')
    tl.atomic_add(out_ptr0 + (tl.broadcast_to(tmp2, [XBLOCK])), tmp1, None, sem='relaxed')
"""


def test_numbers_that_a_kernel_adds_into_memory_are_counted() -> None:
    assert count_additions(ADDING) == 2 * 4096
    assert count_additions(ADDING.replace("tl.atomic_add", "tl.store")) == 0
    # Sizes that are only known when the kernel runs are not in its source.
    assert count_additions(ADDING.replace("    xnumel = 4096\n", "")) == 0


def test_additions_to_the_same_number_are_counted() -> None:
    few, many = torch.empty(8, 4), torch.empty(8192)
    assert count_waiting_additions(ADDING, {"out_ptr0": few, "in_ptr0": many}) == 2 * 4096 // 32
    assert count_waiting_additions(ADDING, {"out_ptr0": many}) == 1
    assert count_waiting_additions(ADDING.replace("tl.atomic_add", "tl.store"), {"out_ptr0": few}) == 0


def test_a_copy_must_not_raise_the_peak() -> None:
    class Recorded:
        order = (0, 1, ~1)
        sizes = (100, 50)

    balance = MemoryBalance(Recorded())  # type: ignore[arg-type]
    assert balance.headroom() == 50
    assert balance.headroom() == 50


def test_costly_calls_of_a_generated_kernel_are_several_instructions() -> None:
    plain = "def triton_(in_ptr0):\n    xnumel = 1000\n    tmp0 = tl.load(in_ptr0)\n    tmp1 = tmp0 * tmp0\n"
    assert count_instructions(plain) == 1000
    assert count_instructions(plain + "    tmp2 = libdevice.erf(tmp1)\n") == (1 + 1 + 35) * 1000
    assert count_instructions(plain + "    tmp2 = tl.rand(tmp1, tmp0)\n") == (1 + 1 + 100) * 1000
    # Sizes that are arguments are not known.
    assert count_instructions(plain.replace("    xnumel = 1000\n", "")) == 0
