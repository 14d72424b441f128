"""The same question has the same answer on every machine: traces do not depend on the host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab import cluster
from trimtab.spec import Precision, Setting, Trace
from trimtab.trace import kernels
from trimtab.trace.common_devices import casts_last_argument_first
from trimtab.trace.kernels import FP32, LOWER, PROMOTE, Autocast, read_autocast_ops
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import trace_setting

if TYPE_CHECKING:
    from trimtab.spec import Device

JOB = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.wide, self.back = nn.Linear(64, 512), nn.Linear(512, 64)

    def forward(self, x):
        return x + self.back(torch.relu(self.wide(self.norm(x))))


class Small:
    def model(self):
        first = nn.Conv1d(16, 64, 3, padding=1)
        return nn.Sequential(first, nn.Flatten(2), Block(), Block(), nn.Linear(64, 10))

    def batch(self, size):
        return torch.randn(size, 16, 64), torch.randn(size, 64, 10)

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1].half())
"""

JUNK = """
import builtins, random
draw = random.Random(5)
builtins.junk = [bytes(draw.randrange(16, 3000)) for _ in range(20_000)]
del builtins.junk[::2]
"""
"""What Python runs first in every process: the heap is then laid out otherwise."""


def device(name: str) -> Device:
    return cluster(name).nodes[0].devices[0]


def trace_of(job: Path, name: str = "H200") -> Trace:
    setting = Setting(micro_batch=8, global_batch=8, precision=Precision.BF16)
    return trace_setting(TraceRequest(job=f"{job}:Small", setting=setting, device=device(name)), cache=False)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("job") / "job.py"
    file.write_text(JOB, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def on_h200(job: Path) -> Trace:
    return trace_of(job)


def test_a_trace_is_the_same_whatever_the_process_is_like(
    job: Path, on_h200: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    junk = tmp_path / "a folder with a long name" / ("long" * 30)
    junk.mkdir(parents=True)
    (junk / "sitecustomize.py").write_text(JUNK, encoding="utf-8")
    others = {
        "PYTHONPATH": str(junk),
        "TMPDIR": str(junk),
        "PYTHONHASHSEED": "12345",
        "OMP_NUM_THREADS": "3",
        "MALLOC_ARENA_MAX": "1",
        "LC_ALL": "C",
        "TZ": "Pacific/Chatham",
        "HOME": str(junk / "home"),
    }
    for variable, value in others.items():
        monkeypatch.setenv(variable, value)
    assert trace_of(job).to_json() == on_h200.to_json()


def casts(trace: Trace, module: str) -> list[int]:
    """The sizes of the casts that a module makes in the first step, in order."""
    begin, end = trace.marks["step0"], trace.marks["step1"]
    taken = [one for one in trace.order[begin:end] if one >= 0]
    names = [(trace.module_names[trace.modules[one]], trace.op_names[trace.ops[one]]) for one in taken]
    return [
        trace.sizes[one] for one, name in zip(taken, names, strict=True) if name == (module, "aten::_to_copy")
    ]


def test_casts_come_in_the_order_of_the_targets_host(job: Path, on_h200: Trace) -> None:
    # As an H200 beside an x86-64 CPU was seen to do it: the bias first, then the weight, then the input.
    bias, weight, given = 2 * 512, 2 * 64 * 512, 2 * 8 * 64 * 64
    assert casts(on_h200, "2.wide") == [bias, weight, given]
    assert casts(trace_of(job, "GH200"), "2.wide") == [given, weight, bias]


@pytest.mark.parametrize(
    ("name", "last_first"),
    [("H200", True), ("A100-40GB", True), ("RTX4090", True), ("GH200", False), ("GB200", False)],
)
def test_only_grace_hosts_cast_the_first_argument_first(name: str, last_first: bool) -> None:
    assert casts_last_argument_first(device(name)) is last_first


class Noted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the shapes of what is cast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name() == "aten::_to_copy":
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the host are cast as those of a GPU would be."""
    monkeypatch.setattr(
        kernels,
        "_is_eligible",
        lambda kernel: isinstance(kernel, torch.Tensor) and kernel.is_floating_point(),
    )


@pytest.mark.usefixtures("on_host")
def test_arguments_are_cast_from_last_to_first_and_lists_from_front_to_back() -> None:
    values = [torch.zeros(1), [torch.zeros(2), torch.zeros(3)], 7, torch.zeros(4, dtype=torch.int64), None]
    half = torch.get_autocast_dtype("cuda")
    for last_first, shapes in ((True, [(2,), (3,), (1,)]), (False, [(1,), (2,), (3,)])):
        with Noted() as noted:
            out = Autocast(last_first=last_first).cast(values, LOWER)
        assert noted.shapes == shapes
        assert [out[0].dtype, out[1][0].dtype, out[1][1].dtype] == [half] * 3
        assert out[2] == 7
        assert out[3].dtype is torch.int64


@pytest.mark.usefixtures("on_host")
def test_policies_choose_the_dtype_as_autocast_does() -> None:
    half = torch.get_autocast_dtype("cuda")
    wide, narrow = torch.zeros(1), torch.zeros(1, dtype=half)
    cast = Autocast(last_first=True).cast
    assert [one.dtype for one in cast([narrow, wide], FP32)] == [torch.float32] * 2
    assert [one.dtype for one in cast([narrow, wide], LOWER)] == [half] * 2
    assert [one.dtype for one in cast([narrow, wide], PROMOTE)] == [torch.float32] * 2
    assert [one.dtype for one in cast([narrow, narrow], PROMOTE)] == [half] * 2


@pytest.mark.usefixtures("on_host")
def test_the_cast_of_a_weight_is_cached_and_that_of_an_activation_is_not() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    activation = weight * 2
    cast = Autocast(last_first=True).cast
    for tensor, cached in ((weight, True), (activation, False), (weight[:1], False)):
        assert (cast([tensor], LOWER)[0] is cast([tensor], LOWER)[0]) is cached


def test_the_lists_of_autocast_are_read_from_the_header_of_torch() -> None:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    found = {
        (read_items.policy, read_items.name, read_items.overload)
        for read_items in read_autocast_ops(header.read_text(encoding="utf-8"))
    }
    assert {
        (LOWER, "linear", "default"),
        (LOWER, "conv_transpose2d", "input"),
        (LOWER, "scaled_dot_product_attention", "default"),
        (FP32, "mse_loss", "default"),
        (FP32, "pow", "Tensor_Tensor"),
        (PROMOTE, "addcmul", "default"),
    } <= found
