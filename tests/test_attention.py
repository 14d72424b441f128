"""The attention kernel that torch would choose: each of its conditions, and what follows from the choice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import trimtab
from shared_jobs import shared_job
from trimtab.catalog.clusters import parse_cluster
from trimtab.spec import Setting
from trimtab.trace import attention_rules as rules
from trimtab.trace.attention_rules import CUDNN, EFFICIENT, FLASH, MATH, AttentionCall, AttentionTarget
from trimtab.trace.fake_cuda import CUDNN_VERSION, VERSION_HOOKS, list_hook_answers
from trimtab.trace.request import TraceRequests
from trimtab.trace.server import WorkerProcess
from trimtab.trace.workspaces import AttentionTiles, choose_efficient_tiles

HOPPER, AMPERE, ADA, TURING, BLACKWELL = (9, 0), (8, 0), (8, 9), (7, 5), (10, 0)
TODAY = (2, 13)
FUSED = (CUDNN, FLASH, EFFICIENT)


def target(
    capability: tuple[int, int] = HOPPER, torch_: tuple[int, int] = TODAY, cudnn: int = 91900
) -> AttentionTarget:
    return AttentionTarget(capability, torch_, cudnn)


@pytest.fixture(autouse=True)
def tensors_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conditions look at shapes and strides alone; meta tensors have both, on every machine."""
    monkeypatch.setattr(rules, "_is_on_cuda", lambda *_: True)
    patched = {
        kernel: tuple(
            one._replace(holds=lambda *_: True) if one.check == "check_all_tensors_on_device" else one
            for one in found
        )
        for kernel, found in rules.CONDITIONS.items()
    }
    monkeypatch.setattr(rules, "CONDITIONS", patched)


def qkv(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape or (2, 4, 64, 64), dtype=dtype, device="meta", requires_grad=grad)


def mask(*shape: int, grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape or (2, 4, 64, 64), dtype=dtype, device="meta", requires_grad=grad)


def call(query: torch.Tensor | None = None, given: torch.Tensor | None = None, **more: Any) -> AttentionCall:
    query = qkv() if query is None else query
    keys = {"key": query, "value": query} | {
        name: more.pop(name) for name in ("key", "value") if name in more
    }
    return AttentionCall(query, keys["key"], keys["value"], given, **more)


def failed(kernel: str, asked: AttentionCall, where: AttentionTarget) -> str:
    found = rules.find_refusal(kernel, asked, where)
    return found.check if found else ""


def expanded_mask() -> torch.Tensor:
    return torch.empty(1, 1, 64, 1, dtype=torch.bool, device="meta").expand(2, 1, 64, 64)


def transposed() -> torch.Tensor:
    return qkv(2, 4, 64, 64).transpose(-2, -1)


WIDE = qkv(2, 4, 64, 100)
SINGLE = qkv(2, 4, 1, 64)
CASES: list[tuple[str, str, AttentionCall, AttentionTarget]] = [
    (CUDNN, "can_use_cudnn_attention: version", call(dropout=0.5), target(cudnn=91200)),
    (CUDNN, "check_tensor_shapes", call(qkv(2, 64, 64)), target()),
    (CUDNN, "check_dtypes_low_precision", call(qkv(dtype=torch.float32)), target()),
    (CUDNN, "check_attn_mask_shape: gradient", call(given=mask(grad=True)), target()),
    (CUDNN, "check_attn_mask_shape", call(given=mask(2, 64, 64)), target()),
    (CUDNN, "check_attn_mask_shape", call(given=mask(2, 2, 64, 64)), target()),
    (CUDNN, "check_cudnn_hardware_support", call(qkv(dtype=torch.float16)), target(TURING)),
    (CUDNN, "check_cudnn_dropout", call(dropout=0.1), target()),
    (CUDNN, "check_nonzero_sequence_lengths_dense", call(qkv(2, 4, 0, 64)), target()),
    (CUDNN, "check_last_dim_stride_equals_1_dense", call(transposed()), target()),
    (CUDNN, "check_last_dim_stride_equals_1_dense", call(given=expanded_mask()), target()),
    (CUDNN, "check_batch_size_and_num_heads_dense: batch", call(key=qkv(1, 4, 64, 64)), target()),
    (CUDNN, "check_batch_size_and_num_heads_dense: heads", call(key=qkv(2, 2, 64, 64)), target()),
    (CUDNN, "check_cudnn_tensor_shapes: counts", call(qkv(65536, 1, 8, 64)), target()),
    (CUDNN, "check_cudnn_tensor_shapes: head size", call(qkv(2, 4, 64, 160)), target(BLACKWELL)),
    (CUDNN, "check_cudnn_tensor_shapes: head size by 8", call(WIDE), target()),
    (CUDNN, "check_cudnn_tensor_shapes: lengths", call(SINGLE), target()),
    (CUDNN, "check_cudnn_d256_bprop_head_dim", call(qkv(2, 4, 64, 160)), target(torch_=(2, 15), cudnn=92300)),
    (FLASH, "check_tensor_shapes", call(qkv(2, 64, 64)), target()),
    (FLASH, "check_for_attn_mask", call(given=mask()), target()),
    (FLASH, "check_head_dim_size_flash", call(qkv(2, 4, 64, 264)), target()),
    (FLASH, "check_head_dim_size_flash", call(value=qkv(2, 4, 64, 128)), target()),
    (FLASH, "check_flash_attention_hardware_support", call(qkv(dtype=torch.float16)), target(TURING)),
    (
        FLASH,
        "check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120",
        call(qkv(2, 4, 64, 200)),
        target(ADA),
    ),
    (
        FLASH,
        "check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120",
        call(qkv(2, 4, 64, 256), dropout=0.5),
        target((12, 0)),
    ),
    (
        FLASH,
        "check_flash_causal_non_square_seqlens",
        call(SINGLE, key=qkv(), value=qkv(), causal=True),
        target(),
    ),
    (FLASH, "check_dtypes_flash_attention", call(qkv(dtype=torch.float32)), target()),
    (FLASH, "check_batch_size_and_num_heads_dense: batch", call(key=qkv(1, 4, 64, 64)), target()),
    (
        FLASH,
        "check_batch_size_and_num_heads_dense: heads",
        call(key=qkv(2, 2, 64, 64), grouped=True),
        target(),
    ),
    (FLASH, "check_nonzero_sequence_lengths_dense", call(qkv(2, 4, 0, 64)), target()),
    (FLASH, "check_last_dim_stride_equals_1_dense", call(transposed()), target()),
    (EFFICIENT, "check_mem_efficient_hardware_support", call(), target((13, 0))),
    (EFFICIENT, "check_tensor_shapes", call(qkv(2, 64, 64)), target()),
    (EFFICIENT, "check_head_dim_size_mem_efficient", call(WIDE), target()),
    (EFFICIENT, "check_data_ptr_alignment_mem_efficient", call(qkv(2, 4, 64, 72)[..., 4:68]), target()),
    (EFFICIENT, "check_nonzero_sequence_lengths_dense", call(qkv(2, 4, 0, 64)), target()),
    (EFFICIENT, "check_last_dim_stride_equals_1_dense", call(given=expanded_mask()), target()),
    (EFFICIENT, "check_batch_size_and_num_heads_dense: batch", call(key=qkv(1, 4, 64, 64)), target()),
    (
        EFFICIENT,
        "check_batch_size_and_num_heads_dense: heads",
        call(key=qkv(2, 2, 64, 64), grouped=True),
        target(),
    ),
    (EFFICIENT, "check_tensor_dtype", call(qkv(dtype=torch.float64)), target()),
    (EFFICIENT, "check_tensor_dtype", call(), target(TURING)),
]


@pytest.mark.parametrize(
    ("kernel", "check", "asked", "where"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES]
)
def test_a_kernel_is_refused_by_the_condition(
    kernel: str, check: str, asked: AttentionCall, where: AttentionTarget
) -> None:
    assert failed(kernel, asked, where) == check


@pytest.mark.parametrize("kernel", FUSED)
def test_every_condition_passes_for_a_plain_call(kernel: str) -> None:
    assert not failed(kernel, call(causal=True), target())


SWITCHES = {CUDNN: "cudnn", FLASH: "flash", EFFICIENT: "mem_efficient"}


@pytest.mark.parametrize("kernel", FUSED)
def test_a_kernel_that_the_user_has_switched_off_is_refused(kernel: str) -> None:
    others = [
        sdpbackend
        for sdpbackend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION)
        if kernel != FLASH or sdpbackend != SDPBackend.FLASH_ATTENTION
    ]
    with sdpa_kernel(others):
        assert failed(kernel, call(), target()) == f"check_runtime_disabled_{SWITCHES[kernel]}"


def test_cudnn_is_refused_where_results_must_be_deterministic() -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert failed(CUDNN, call(), target()) == "check_cudnn_deterministic"
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        assert not failed(CUDNN, call(), target())
    finally:
        torch.use_deterministic_algorithms(mode=False)


class Nested:
    """A nested tensor of the strided kind, as far as conditions look at it."""

    is_nested, layout, dtype, requires_grad, device = (
        True,
        torch.strided,
        torch.bfloat16,
        True,
        torch.device("cuda"),
    )

    def __init__(
        self, lengths: tuple[int, ...] = (5, 7), heads: int = 4, head: int = 64, *, grad: bool = True
    ) -> None:
        self.sizes = torch.tensor([[heads, length, head] for length in lengths])
        self.shape, self.requires_grad = (len(lengths), heads, max(lengths), head), grad

    def dim(self) -> int:
        return 4

    def size(self, place: int) -> int:
        return self.shape[place]

    def _nested_tensor_size(self) -> torch.Tensor:
        return self.sizes


NESTED = [
    (CUDNN, "check_for_nested_inputs", Nested(), Nested()),
    (FLASH, "", Nested(), Nested()),
    (FLASH, "check_batch_size_nested", Nested(), Nested((5,))),
    (FLASH, "check_head_dim_size_flash_nested", Nested(head=36), Nested(head=36)),
    (FLASH, "check_for_seq_len_0_nested_tensor", Nested((0, 7)), Nested((0, 7))),
    (EFFICIENT, "check_requires_grad_and_nested", Nested(), Nested()),
    (EFFICIENT, "check_batch_size_nested", Nested((5, 7), grad=False), Nested((5, 7, 9), grad=False)),
    (EFFICIENT, "check_for_seq_len_0_nested_tensor", Nested((0, 7), grad=False), Nested((0, 7), grad=False)),
]


@pytest.mark.parametrize(
    ("kernel", "check", "query", "key"), NESTED, ids=[f"{one[0]}-{one[1]}" for one in NESTED]
)
def test_nested_tensors_have_conditions_of_their_own(kernel: str, check: str, query: Any, key: Any) -> None:
    assert failed(kernel, AttentionCall(query, key, key), target()) == check


def test_every_condition_has_a_case() -> None:
    shared = {"check_all_tensors_on_device", "check_cudnn_deterministic"}
    switches = {(kernel, f"check_runtime_disabled_{word}") for kernel, word in SWITCHES.items()}
    tried = {(case[0], case[1]) for case in (*CASES, *NESTED)} | switches
    known = {(kernel, one.check) for kernel, found in rules.CONDITIONS.items() for one in found}
    assert {one for one in known - tried if one[1] not in shared} == set()


def test_the_conditions_are_those_that_torch_declares() -> None:
    """Those of the header that comes with torch; the rest is in a source file that does not."""
    header = Path(torch.__file__).parent / "include/ATen/native/transformers/sdp_utils_cpp.h"
    declared = set(re.findall(r"inline bool (check_\w+)\(", header.read_text(encoding="utf-8")))
    # For the CPU's kernels, or called by another one of these.
    others = {
        "check_nested_tensor", "check_for_dropout", "check_safe_kv_broadcast",
        "check_grouped_query_attention", "check_for_seq_len_0_and_consistent_head_dim_nested_tensor_helper",
    }  # fmt: skip
    ours = {one.check.partition(":")[0] for found in rules.CONDITIONS.values() for one in found}
    assert declared - others <= ours


@pytest.mark.parametrize(
    ("capability", "torch_", "cudnn", "first"),
    [
        (HOPPER, (2, 13), 91900, CUDNN),
        (HOPPER, (2, 13), 91002, FLASH),
        (HOPPER, (2, 9), 91002, CUDNN),
        (BLACKWELL, (2, 13), 91900, CUDNN),
        (AMPERE, (2, 13), 91900, FLASH),
        ((12, 0), (2, 13), 91900, FLASH),
    ],
)
def test_cudnn_comes_first_on_hopper_and_datacenter_blackwell(
    capability: tuple[int, int], torch_: tuple[int, int], cudnn: int, first: str
) -> None:
    assert rules.choose_kernel(call(causal=True), target(capability, torch_, cudnn)).kernel == first


def test_a_build_with_cudnn_keeps_its_version_and_others_report_that_of_the_wheels() -> None:
    """The order of the kernels depends on it: a version of 9.10 puts flash attention first."""
    without, own = (list_hook_answers(has_cudnn=has_cudnn) for has_cudnn in (False, True))
    assert without.keys() - own.keys() == set(VERSION_HOOKS)
    assert {without[name] for name in VERSION_HOOKS} == {CUDNN_VERSION}
    assert torch.version.cuda is not None or rules.make_target(HOPPER).cudnn == CUDNN_VERSION
    assert rules.prefers_cudnn(target(HOPPER, (2, 13), CUDNN_VERSION))


def test_cudnn_can_be_deprioritized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert rules.choose_kernel(call(), target()).kernel == FLASH


def test_the_order_that_a_user_sets_is_taken() -> None:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert rules.choose_kernel(call(), target()).kernel == EFFICIENT


def test_nothing_is_chosen_where_the_only_kernel_that_is_on_refuses() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found = rules.choose_kernel(call(given=mask()), target())
    assert not found.kernel
    assert "flash: takes no mask" in rules.explain_refusals(found.refusals)


@pytest.mark.parametrize(
    ("asked", "capability", "kernel"),
    [
        (call(given=mask(2, 1, 64, 64)), HOPPER, CUDNN),
        (call(given=mask(2, 1, 64, 64)), AMPERE, EFFICIENT),
        (call(given=mask(grad=True)), HOPPER, EFFICIENT),
        (call(given=mask(1, 64, 64, 4, grad=True).permute(0, 3, 1, 2)), HOPPER, MATH),
        (call(given=expanded_mask()), HOPPER, MATH),
        (call(qkv(dtype=torch.float32)), HOPPER, EFFICIENT),
        (call(qkv(dtype=torch.float64)), HOPPER, MATH),
        (call(qkv(2, 4, 64, 160)), HOPPER, CUDNN),
        (call(qkv(2, 4, 64, 160)), BLACKWELL, FLASH),
        (call(WIDE), HOPPER, FLASH),
        (call(WIDE, mask()), HOPPER, MATH),
        (call(key=qkv(2, 2, 64, 64), value=qkv(2, 2, 64, 64), grouped=True), AMPERE, FLASH),
        (call(key=qkv(2, 2, 64, 64), value=qkv(2, 2, 64, 64), grouped=True, given=mask()), AMPERE, MATH),
        (call(qkv(dtype=torch.float16)), TURING, EFFICIENT),
        (call(qkv(2, 64, 64)), HOPPER, MATH),
    ],
)  # fmt: skip
def test_the_kernel_of_common_calls(asked: AttentionCall, capability: tuple[int, int], kernel: str) -> None:
    assert rules.choose_kernel(asked, target(capability)).kernel == kernel


def test_a_lost_kernel_has_a_cause_and_a_cure() -> None:
    found = rules.choose_kernel(call(given=expanded_mask()), target())
    words = rules.explain_refusals(found.refusals)
    cause = "refuses a mask whose last dimension has stride 0 (expanded)"
    assert words == f"cuDNN and memory-efficient: {cause}; flash: takes no mask"
    assert ".contiguous()" in rules.suggest_fix(found.refusals)
    assert "attention_mask" in rules.suggest_fix(found.refusals)


@pytest.mark.parametrize(
    ("size", "capability", "half", "tiles"),
    [
        (32, HOPPER, True, AttentionTiles(64, 64, in_registers=True)),
        (64, AMPERE, False, AttentionTiles(64, 64, in_registers=False)),
        (128, HOPPER, True, AttentionTiles(128, 128, in_registers=True)),
        (128, ADA, True, AttentionTiles(64, 64, in_registers=False)),
        (256, HOPPER, True, AttentionTiles(128, 64, in_registers=False)),
    ],
)
def test_tiles_of_the_memory_efficient_kernel(
    size: int, capability: tuple[int, int], half: bool, tiles: AttentionTiles
) -> None:
    assert choose_efficient_tiles(size, capability, half=half) == tiles


# ----------------------------------------------------------------------------------- traced

JOB = """
import torch
from torch import nn
from torch.nn import functional as F


def expanded(x):
    length = x.shape[1]
    return torch.ones(1, 1, length, 1, dtype=torch.bool, device=x.device).expand(len(x), 1, -1, length)


class Net(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.qkv, self.mask = nn.Linear(64, 192), mask
        self.bias = nn.Parameter(torch.zeros(49, 49, 2))

    def forward(self, x):
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        mask = None
        if self.mask == "expanded":
            mask = expanded(x)
        elif self.mask == "asked":
            # As transformers does: it builds a mask that it does not need, where it is compiled.
            mask = expanded(x) if torch.compiler.is_compiling() else None
        elif self.mask == "window":
            mask = self.bias.permute(2, 0, 1).contiguous()[None]
        elif self.mask == "permuted":
            mask = self.bias.permute(2, 0, 1)[None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


class Job:
    global_batch, mask = 64, "plain"

    def model(self):
        return Net(self.mask)

    def batch(self, size):
        return torch.randn(size, 49, 64)

    def loss(self, model, batch):
        return model(batch).mean()
"""
MASKS = ("plain", "expanded", "asked", "window", "permuted")


@pytest.fixture
def job() -> str:
    classes = "".join(f"\n\nclass {mask.title()}(Job):\n    mask = {mask!r}\n" for mask in MASKS)
    return shared_job(JOB + classes).rpartition(":")[0]


def estimated(job: str, name: str, **more: Any) -> trimtab.Estimate:
    return trimtab.estimate(f"{job}:{name}", on="H200", micro_batch=64, precision="bf16", **more)


def unfused(found: trimtab.Estimate) -> list[str]:
    return [line for line in found.assumptions if "attention is not fused" in line]


def test_an_eager_estimate_says_that_attention_is_not_fused_and_why(job: str) -> None:
    (line,) = unfused(estimated(job, "Expanded"))
    assert "stride 0" in line
    assert "Fix: Call .contiguous()" in line
    assert not unfused(estimated(job, "Plain"))


def test_a_learned_mask_is_fused_where_it_is_contiguous(job: str) -> None:
    window, permuted = estimated(job, "Window"), estimated(job, "Permuted")
    assert not unfused(window)
    (line,) = unfused(permuted)
    assert "stride 2 (transposed)" in line
    # Scores of 64 x 2 windows of 49 x 49 in fp32, kept twice.
    assert permuted.allocated_bytes > window.allocated_bytes + 64 * 2 * 49 * 49 * 4


@pytest.mark.slow
def test_compiled_code_loses_the_kernel_to_an_expanded_mask(job: str) -> None:
    found, plain = (estimated(job, name, compile=True) for name in ("Expanded", "Plain"))
    (line,) = unfused(found)
    assert "stride 0" in line
    assert not unfused(plain)
    assert found.allocated_bytes > plain.allocated_bytes


def test_an_eager_estimate_says_that_compiling_would_lose_the_kernel(job: str) -> None:
    found = estimated(job, "Asked")
    (line,) = unfused(found)
    assert line.startswith("under torch.compile attention is not fused")
    plain = estimated(job, "Plain")
    assert (found.allocated_bytes, found.reserved_bytes) == (plain.allocated_bytes, plain.reserved_bytes)


COUNTING = """

class Counting(Net):
    def forward(self, x):
        if torch.compiler.is_compiling():
            with open({log!r}, "a") as log:
                log.write("x")
        return super().forward(x)


class Counted(Job):
    def model(self):
        return Counting({mask!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "passes"), [("plain", [1, 1, 2]), ("asked", [1, 2, 3])])
def test_a_compiled_forward_pass_is_run_again_only_if_it_may_lose_the_kernel(
    mask: str, passes: list[int], tmp_path: Path
) -> None:
    file, log = tmp_path / "job.py", tmp_path / "log"
    file.write_text(JOB + COUNTING.format(log=str(log), mask=mask), encoding="utf-8")
    asked = TraceRequests(job=f"{file}:Counted", settings=(), device=parse_cluster("H200").devices[0])
    counts, notes = [], []
    with WorkerProcess() as worker:
        # One sample may need another mask.
        for micro in (4, 8, 1):
            setting = Setting(micro_batch=micro, global_batch=micro)
            (answer,) = worker.ask_all(asked.replace(settings=(setting,)), timeout_s=300)
            assert isinstance(answer, dict), answer
            lines = answer["trace"]["assumptions"]
            notes.append(any(line.startswith("under torch.compile attention") for line in lines))
            counts.append(len(log.read_text(encoding="utf-8")))
    assert counts == passes
    assert notes == [mask == "asked"] * 3
