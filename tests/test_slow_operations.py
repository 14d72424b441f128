"""Operations that are slow for a reason of their own: how they are described and timed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import trimtab
from trimtab.predict.calibration import find_speed
from trimtab.predict.op_time import device_rates, roofline_s
from trimtab.spec import Work
from trimtab.spec.trace import CHANNELS_LAST, PERMUTED, SLICED
from trimtab.trace.op_cost import MIXED_LAYOUT

pytestmark = pytest.mark.xdist_group("slow operations")  # its fixture is made once

DESCRIBE = """
import json
import trimtab
from trimtab.trace.fake_cuda import install_fake_cuda

device = trimtab.cluster("H200").devices[0]
install_fake_cuda(device)
import torch
from torch import nn
from torch.nn import functional
from torch._subclasses.fake_tensor import FakeTensorMode
from trimtab.trace.kernels import Kernels
from trimtab.trace.recorder import Recorder

mode = FakeTensorMode(allow_non_fake_inputs=True)
recorder = Recorder(Kernels(device), mode)
recorder.records_work = True
with mode, recorder, torch.device("cuda"):
    torch._C._set_only_lift_cpu_tensors(True)
    x = torch.randn(4, 32, 8, 8, requires_grad=True)
    last = x.to(memory_format=torch.channels_last)
    loss = nn.BatchNorm2d(32)(x).sum() + nn.BatchNorm2d(32)(last).sum()
    loss = loss + nn.Conv2d(32, 16, 3)(x).square().sum()
    loss = loss + nn.Conv2d(32, 16, 3, bias=False)(x).square().sum()
    loss = loss + functional.interpolate(x, scale_factor=4, mode="bilinear").sum()
    loss = loss + functional.log_softmax(x, 1).sum() + functional.log_softmax(x, -1).sum()
    left, right = x.chunk(2, 1)
    loss = loss + torch.tanh(left).sum() + torch.sigmoid(x).sum()
    rows = torch.randint(10, (70,))
    loss = loss + torch.zeros(10, 4).index_add_(0, rows, torch.randn(70, 4, requires_grad=True)).sum()
    for image in (x, last):
        loss = loss + functional.interpolate(image, size=(4, 6), mode="bicubic").sum()
    loss.backward()
    for image, grad in ((last, x), (x, last)):
        weight = torch.randn(32, 1, 3, 3)
        sizes = ([1, 1], [1, 1], [1, 1], False, [0, 0], 32)
        torch.ops.aten.convolution_backward(
            grad.detach(), image.detach(), weight, None, *sizes, [True, True, False]
        )
print(json.dumps([(work.op, work.dims, work.read_bytes, work.write_bytes) for work in recorder.works]))
"""


@pytest.fixture(scope="module")
def described() -> list[list[Any]]:
    """Every operation of a small program: name, dims, bytes read and written."""
    command = [sys.executable, "-W", "ignore", "-c", DESCRIBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    listed: list[list[Any]] = json.loads(done.stdout)
    return listed


def dims_of(described: list[list[Any]], op: str) -> list[list[int]]:
    """The dims of all operations of a name."""
    return [dims for name, dims, _, _ in described if name == f"aten::{op}"]


@pytest.mark.slow
def test_a_norm_over_the_batch_has_a_block_a_channel_unless_channels_are_last(
    described: list[list[Any]],
) -> None:
    norms = [dims for name, dims, _, _ in described if "batch_norm" in name and "backward" not in name]
    assert [dims[2] for dims in norms] == [32, 0]


def test_upsampling_has_a_thread_a_pixel_and_adds_sixteen_into_one_backward(
    described: list[list[Any]],
) -> None:
    assert [dims[2] for dims in dims_of(described, "upsample_bilinear2d")] == [32 * 32]
    assert [dims[2] for dims in dims_of(described, "upsample_bilinear2d_backward")] == [16]


def test_bicubic_upsampling_has_a_thread_a_pixel_in_both_passes(described: list[list[Any]]) -> None:
    forward = dims_of(described, "upsample_bicubic2d")
    assert [dims[2] for dims in forward] == [24, 24]
    assert [dims[0] & PERMUTED for dims in forward] == [0, PERMUTED]
    assert {tuple(dims[2:]) for dims in dims_of(described, "upsample_bicubic2d_backward")} == {(1, 24)}


def test_a_convolution_runs_in_the_layout_of_its_input(described: list[list[Any]]) -> None:
    backward = [dims[4] for dims in dims_of(described, "convolution_backward") if dims[0] == 32]
    assert backward == [CHANNELS_LAST, MIXED_LAYOUT]


def test_sums_into_rows_say_how_many_go_to_one_row(described: list[list[Any]]) -> None:
    assert [dims[2] for dims in dims_of(described, "index_add_")] == [7]


def test_a_softmax_over_channels_is_another_operation(described: list[list[Any]]) -> None:
    names = [name for name, *_ in described if "log_softmax" in name and "backward" not in name]
    assert names == ["aten::_log_softmax over channels", "aten::_log_softmax"]


def test_only_a_tensor_with_gaps_is_sliced(described: list[list[Any]]) -> None:
    assert [dims[0] & SLICED for dims in dims_of(described, "tanh")] == [SLICED]
    assert [dims[0] & SLICED for dims in dims_of(described, "sigmoid")] == [0]


def test_a_bias_is_added_in_a_pass_of_its_own(described: list[list[Any]]) -> None:
    result_bytes = 4 * 16 * 6 * 6 * 4
    forward = [written for name, _, _, written in described if name == "aten::convolution"]
    backward = [
        written
        for name, dims, _, written in described
        if name == "aten::convolution_backward" and dims[0] == 1
    ]
    assert forward == [2 * result_bytes, 0]
    assert sorted(backward) == [0, result_bytes]


def norm(channels: int) -> Work:
    """A norm over the batch of 128 MiB in bf16."""
    size = 2**27
    return Work(
        op="aten::native_batch_norm", kind="reduction", dtype="bfloat16",
        read_bytes=size, write_bytes=size, dims=(0, 56, channels),
    )  # fmt: skip


def test_few_channels_leave_a_gpu_idle() -> None:
    rates = device_rates(trimtab.cluster("H200").devices[0])
    assert rates is not None
    few, many, more = (roofline_s(norm(channels), rates) for channels in (16, 512, 1024))
    assert few > 10 * many
    assert many == more


def test_depthwise_convolutions_do_not_use_tensor_cores() -> None:
    rates = device_rates(trimtab.cluster("H200").devices[0])
    assert rates is not None

    def convolution(groups: int, columns: int, inner: int) -> Work:
        return Work(
            op="aten::convolution", kind="convolution", dtype="bfloat16", flops=10**12, read_bytes=2**20,
            dims=(groups, 10**6, columns, inner, 1, 9), kernels=1,
        )  # fmt: skip

    assert roofline_s(convolution(256, 1, 9), rates) > 5 * roofline_s(convolution(1, 256, 2304), rates)


@pytest.mark.parametrize(
    ("op", "kind", "dtype", "dims", "read", "written", "milliseconds"),
    [
        # From a profile of a step of MobileNetV2 on an H200 (torch 2.11); no operation of it was timed alone.
        ("native_batch_norm_backward", "reduction", "bfloat16", (6, 112, 32), 411e6, 206e6, 5.5),
        ("native_batch_norm_backward", "reduction", "bfloat16", (6, 112, 96), 1233e6, 617e6, 5.7),
        ("native_batch_norm", "reduction", "bfloat16", (6, 112, 32), 206e6, 206e6, 2.8),
        ("native_batch_norm", "reduction", "bfloat16", (6, 112, 96), 617e6, 617e6, 3.2),
    ],
)
def test_norms_of_models_that_only_check_are_near_their_profiles(  # noqa: PLR0917
    op: str, kind: str, dtype: str, dims: tuple[int, ...], read: float, written: float, milliseconds: float
) -> None:
    speed = find_speed(trimtab.cluster("H200").devices[0])
    assert speed is not None
    work = Work(
        op=f"aten::{op}", kind=kind, dtype=dtype, read_bytes=int(read), write_bytes=int(written), dims=dims
    )
    assert speed.pace.seconds(work) * 1e3 == pytest.approx(milliseconds, rel=0.25)
