"""The workspace of cuDNN's search for the fastest kernel, beside what an H200 reported (cuDNN 9.19)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimtab.predict.memory import allocator_events, estimate_memory
from trimtab.scripts.estimate import measure_phases
from trimtab.scripts.result import ScriptResult
from trimtab.spec import PARTS, SizeCause, Trace
from trimtab.spec.trace import EMPTY_CACHE, SEARCH
from trimtab.trace import workspace_formulas, workspaces
from trimtab.trace.convolution import ConvolutionShape
from trimtab.trace.convolution_search import list_search_bytes
from trimtab.trace.kernels import SEARCH_NOTE, Kernels
from trimtab.trace.recorder import Recorder
from trimtab.units import GIB, MIB


def shape_of(
    samples: int, channels: tuple[int, int], image: int, out: int, kernel: int, **other: Any
) -> ConvolutionShape:
    groups = other.pop("groups", 1)
    usual: dict[str, Any] = {
        "stride": 1, "is_channels_last": False, "element_bytes": 4, "arithmetic": "tf32"
    }  # fmt: skip
    return ConvolutionShape(
        samples=samples,
        in_channels=channels[0],
        out_channels=channels[1],
        image=(image, image),
        out_image=(out, out),
        kernel=(kernel, kernel),
        groups=groups,
        weight_in_channels=channels[0] // groups,
        **usual | other,
    )


HALF = {"element_bytes": 2, "arithmetic": "bf16"}
MEASURED = [
    # FFT over the image: forward and weight gradient.
    ("forward", shape_of(64, (64, 64), 32, 32, 3), 276_971_520),
    ("forward", shape_of(64, (1, 64), 32, 32, 3), 138_414_336),
    ("forward", shape_of(64, (64, 64), 32, 30, 3), 71_450_624),
    ("forward", shape_of(128, (192, 256), 128, 128, 1, is_channels_last=True), 13_572_964_368),
    ("forward", shape_of(64, (64, 64), 32, 32, 3, groups=2), 241_246_240),
    ("weight", shape_of(64, (512, 64), 32, 32, 3), 1_262_485_504),
    ("weight", shape_of(64, (64, 64), 32, 33, 2), 294_666_240),
    # Tiled FFT: input gradients, with and without a stride. The last one is the largest of a DCGAN.
    ("source", shape_of(64, (64, 64), 32, 32, 3), 89_128_960),
    ("source", shape_of(64, (64, 64), 7, 4, 3, stride=2), 162_152_464),
    ("source", shape_of(64, (64, 3), 32, 16, 3, stride=2), 99_846_160),
    ("source", shape_of(128, (128, 256), 16, 8, 4, stride=2), 1_028_128_784),
    # Winograd, where the output has too few channels for an FFT.
    ("weight", shape_of(64, (64, 3), 32, 32, 3), 39_545_856),
    # Copies in another layout and partial sums.
    ("source", shape_of(64, (64, 256), 56, 56, 1), 256_966_672),
    ("forward", shape_of(64, (64, 64), 224, 112, 3, stride=2, **HALF), 513_876_352),
    ("forward", shape_of(64, (3, 64), 224, 112, 7, stride=2, **HALF), 359_912_623),
    ("source", shape_of(64, (64, 64), 64, 32, 3, stride=2, **HALF), 109_748_399),
    ("weight", shape_of(64, (64, 64), 112, 56, 3, stride=2, **HALF), 145_564_383),
    ("weight", shape_of(64, (64, 64), 56, 56, 3, is_channels_last=True, **HALF), 17_040_079),
]


@pytest.mark.parametrize(("phase", "shape", "measured"), MEASURED)
def test_the_largest_trial_is_as_large_as_on_an_h200(
    phase: str, shape: ConvolutionShape, measured: int
) -> None:
    sizes = list_search_bytes(shape, phase)
    assert sizes[0] == pytest.approx(measured, rel=0.03)
    assert sizes == sorted(sizes, reverse=True)


def test_what_cudnn_does_not_offer_is_not_counted() -> None:
    # A tiled FFT of more than 2 GiB, transforms with a stride, and depthwise convolutions.
    assert list_search_bytes(shape_of(128, (256, 512), 8, 4, 4, stride=2), "source")[0] < 32 * MIB
    assert len(list_search_bytes(shape_of(64, (64, 64), 32, 16, 3, stride=2), "forward")) == 1
    assert list_search_bytes(shape_of(64, (64, 64), 32, 32, 3, groups=64), "forward") == []


@pytest.fixture
def benchmark() -> Any:
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    yield
    torch.backends.cudnn.benchmark = before


def convolve(transposed: bool) -> tuple[tuple[Any, ...], torch.Tensor]:
    source = torch.empty(128, 256, 8, 8, device="meta")
    if transposed:
        weight, out = torch.empty(256, 128, 4, 4, device="meta"), torch.empty(128, 128, 16, 16, device="meta")
    else:
        weight, out = torch.empty(512, 256, 4, 4, device="meta"), torch.empty(128, 512, 4, 4, device="meta")
    return (source, weight, None, [2, 2], [1, 1], [1, 1], transposed, [0, 0], 1), out


def searches(requests: list[workspaces.MemoryRequest]) -> list[tuple[str, int]]:
    return [
        (request.cause.rule, request.size)
        for request in requests
        if request.kind == "search" and request.cause is not None
    ]


@pytest.mark.usefixtures("benchmark")
def test_a_transposed_convolution_is_searched_as_an_input_gradient() -> None:
    args, out = convolve(transposed=True)
    ((rule, size),) = searches(workspaces.RULES["aten::convolution"](args, out))
    assert rule == "search source"
    assert size == pytest.approx(1_028_128_784, rel=0.001)
    gradient = (out, *args[:2], None, *args[3:9], [True, True, False])
    found = searches(workspaces.RULES["aten::convolution_backward"](gradient, None))
    assert [rule for rule, _ in found] == ["search forward", "search weight"]


def test_nothing_is_searched_by_default() -> None:
    assert not torch.backends.cudnn.benchmark
    args, out = convolve(transposed=False)
    assert searches(workspaces.RULES["aten::convolution"](args, out)) == []


@pytest.mark.usefixtures("benchmark")
def test_each_shape_is_searched_once() -> None:
    # Without its constructor, which replaces kernels of this process.
    kernels = object.__new__(Kernels)
    vars(kernels).update(_searched=set(), assumptions={})
    args, out = convolve(transposed=False)
    first, again = (kernels.list_requests("aten::convolution", args, out) for _ in range(2))
    assert [rule for rule, _ in searches(first)] == ["search forward"]
    assert searches(again) == []
    assert list(kernels.assumptions) == [SEARCH_NOTE]


def test_the_size_at_another_micro_batch_is_computed() -> None:
    shape = shape_of(128, (128, 256), 16, 8, 4, stride=2)
    numbers = workspace_formulas.flatten_shape(shape)
    cause = SizeCause(rule="search source", numbers=numbers, word="tf32")
    assert workspace_formulas.evaluate_cause(cause) == list_search_bytes(shape, "source")[0]


def search(memory_bytes: int, *sizes: int) -> list[tuple[str, int]]:
    """Return what a search records beside 1 GiB of weights."""
    kernels: Any = SimpleNamespace(target=SimpleNamespace(memory_bytes=memory_bytes))
    recorder = Recorder(kernels, None)  # type: ignore[arg-type]
    recorder.sizes, recorder.order = [GIB], [0]
    for column in (recorder.parts, recorder.modules, recorder.ops):
        column.append("weights")
    recorder.streams.append(0)
    request = workspaces.MemoryRequest("search", sizes[0], None, sizes[1:])
    recorder.record_search(request)
    return list(zip(recorder.ops, recorder.sizes, strict=True))[1:]


def test_a_search_takes_what_fits() -> None:
    assert search(100 * GIB, 3 * GIB, GIB) == [(SEARCH, 3 * GIB), (EMPTY_CACHE, 0)]
    assert search(4 * GIB, 3 * GIB, GIB) == [(SEARCH, GIB), (EMPTY_CACHE, 0)]
    assert search(GIB, 3 * GIB, GIB) == [(SEARCH, 0), (EMPTY_CACHE, 0)]


def test_a_search_counts_in_its_phase_and_empties_the_cache() -> None:
    # A block of 100 MiB stays; 50 MiB are cached when a search of 300 MiB begins, and are gone afterwards.
    names = ("", SEARCH, EMPTY_CACHE)
    trace = Trace(
        order=(0, 1, ~1, 2, ~2, 3, ~3, 4, ~4),
        sizes=(100 * MIB, 50 * MIB, 300 * MIB, 0, 20 * MIB),
        streams=(0,) * 5,
        parts=(PARTS.index("workspace"),) * 5,
        modules=(0,) * 5,
        ops=(0, 0, 1, 2, 0),
        module_names=("",),
        op_names=names,
        marks={"step0": 0, "step1": 7, "end": 9},
    )
    kinds = [event[0] for event in allocator_events(trace, trace.order)]
    assert kinds == ["alloc", "alloc", "free", "alloc", "free", "empty_cache", "alloc", "free"]
    peaks = estimate_memory(trace)
    assert (peaks.operation, peaks.phase) == (SEARCH, "step0")
    assert peaks.allocated_bytes == 400 * MIB
    assert peaks.band.low_bytes < 0.8 * peaks.process_bytes
    windows = (("first step", 0, 7), ("steady step", 7, 9))
    first, steady = measure_phases(trace, ScriptResult(trace=trace, windows=windows))
    assert (first.allocated_bytes, steady.allocated_bytes) == (400 * MIB, 120 * MIB)
    assert steady.reserved_bytes == 120 * MIB
