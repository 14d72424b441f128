"""Estimate the time of one operation on a device: a roofline, corrected by nearby measurements.

The roofline is the larger of arithmetic at the dense peak of its dtype, in whole tiles over the
multiprocessors, and bytes at the memory's bandwidth; plus a launch. `trimtab calibrate` measures how far real
kernels are from it. The correction of an operation is the weighted mean of the nearest measured ones of its
kind, by the logarithms of its sizes. An uncalibrated device uses the corrections of a calibrated one.
"""

from __future__ import annotations

import math
from functools import lru_cache
from heapq import nsmallest
from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.devices import instruction_rate, matmul_fp32_share, matmul_share
from trimtab.catalog.facts import facts_of
from trimtab.spec.precision import BFLOAT16, DTYPE_BYTES, FLOAT8, FLOAT16
from trimtab.spec.trace import (
    BATCH_NORMS,
    BROADCAST,
    CHANNELS_LAST,
    GROUP_NORM,
    INDEX_ADD,
    LAYER_NORM_BACKWARD,
    PERMUTED,
    PROMOTED,
    SLICED,
    THREAD_UPSAMPLING_BACKWARD,
    UPSAMPLING,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trimtab.catalog.facts import LawFacts
    from trimtab.spec import Calibration, Device, Work

MAX_LAUNCHES = 4
CELL_LAUNCHES = {"aten::_cudnn_rnn": 2, "aten::_cudnn_rnn_backward": 3}
"""Kernels per time step of a recurrent layer: a matrix product and the gates; backward, also a sum of the
product's parts. Products that do not depend on the previous time step run for many steps at once."""
PERSISTENT_WIDTH, PERSISTENT_BATCH = 1024, 128
"""Largest sizes for which torch asks cuDNN to run one layer in one direction as a single kernel, in fp16."""
SPLITS = (1, 2, 4, 8, 16)
LIMIT, THREADS = 2, 3
"""Places in the dims of a work: what an operation waits for, and if that is something else, its threads."""
THREADS_AT_ONCE = {
    **dict.fromkeys(BATCH_NORMS, 2),
    **dict.fromkeys((*UPSAMPLING, *THREAD_UPSAMPLING_BACKWARD), 512),
}
"""How many keep a multiprocessor busy: thread blocks of norms over the batch, threads of upsampling."""
GROUP_THREADS = 512
"""Threads that share a group of a norm over groups of channels."""
NORM_COLUMNS, MANY_NORM_ROWS = 32, 65_536
"""Columns that share a thread block in the gradient of a layer norm's weight; with more rows than this, rows
are divided between blocks too, if columns alone leave more than half of the multiprocessors without work
(torch 2.11, layer_norm_kernel.cu)."""
FULL_LOAD = 8
"""Channels of a convolution that are multiples of this fill the loads of tensor cores."""
MIN_GROUP_CHANNELS = 8
"""Fewer channels a group than this leave tensor cores without work."""
MIN_SPLIT = 256
"""The sum over k is split between multiprocessors if each gets at least this many terms."""
TOPK, TRIANGULAR_SOLVE = "aten::topk", "aten::linalg_solve_triangular"
TOPK_SHAPES = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
"""Up to so many rows, rows of at least so many numbers are divided between thread blocks (torch 2.11,
TensorTopK.cu: should_use_multi_block); with more rows, rows of at least `TOPK_LEAST`."""
TOPK_LEAST, TOPK_THREADS, TOPK_MOST_NUMBERS, TOPK_RESIDENT = 400, 256, 64, 6
"""The least numbers in a row; threads of a block, the most numbers of each, blocks on a multiprocessor."""
TOPK_DIGIT_BYTES, TOPK_LAST_PASSES = 1, 2
"""A pass for each byte of a number, and a last one, which takes as long as two."""
TOPK_FULL = 64
"""Blocks for each multiprocessor from which launches do not matter."""
HALF_DTYPES = {FLOAT16, BFLOAT16}
WIDE_DTYPES = {"float32", "tf32"}
NEAREST_POINTS = 5
OTHER_OP, OTHER_DTYPE = 16.0, 6.0
"""Squared distance between operations of different name or dtype, in doublings of a size."""
SOFTNESS = 0.02
DEFAULT_MULTIPROCESSORS = 100
FLASH = "aten::_scaled_dot_product_flash_attention"
CUDNN = "aten::_scaled_dot_product_cudnn_attention"
EFFICIENT = "aten::_scaled_dot_product_efficient_attention"
AMPERE_KERNELS = {name + end for name in (FLASH, EFFICIENT) for end in ("", "_backward")}
"""Kernels that multiply with the instructions of an A100 on every GPU."""
AMPERE_SHARES = {"9": 0.6, "10": 0.6}
"""Share of the tensor cores' peak that these instructions reach, by compute capability. FlashAttention 2
reaches 335 of 989 TFLOP/s on an H100, and 0.6 of the peak of an A100. For a B200 it is assumed."""
ATTENTION_TILES = {CUDNN: 128, **dict.fromkeys(AMPERE_KERNELS, 64)}
"""Queries and keys that a thread block of an attention kernel multiplies at once: cuDNN's forward kernel
takes 17 ns for each head of each sample with 8 to 64 tokens, as with 128."""
CUDNN_BACKWARD, SHORT, FIXED = f"{CUDNN}_backward", 128, 41
"""Up to `SHORT` tokens, cuDNN's backward kernel takes 0.5 ns for each token of each head of each sample, and
as long as for `FIXED` tokens besides."""
CAUSAL_PLACE, CAUSAL, CAUSAL_TILE = 5, 1, 128
"""Where the dims of an attention say that it is causal, and tokens of the tiles that are left out above the
diagonal."""
SAME_KERNELS = {
    "torch_attn::_varlen_attn": FLASH,
    "torch_attn::_varlen_attn_backward": f"{FLASH}_backward",
    "aten::_flash_attention_forward": FLASH,
    "aten::_flash_attention_backward": f"{FLASH}_backward",
    "trimtab::flex_attention": FLASH,
    "trimtab::flex_attention_backward": f"{FLASH}_backward",
    "aten::_efficient_attention_forward": EFFICIENT,
    "aten::_efficient_attention_backward": f"{EFFICIENT}_backward",
}
"""Operations that are corrected by measurements of another one, which runs the same or a similar kernel."""
UNMEASURED_NAMES = {
    "torch_attn::_varlen_attn": "varlen attention",
    "aten::_flash_attention_forward": "flash attention over packed rows",
    "aten::_efficient_attention_forward": "memory-efficient attention over packed rows",
    "aten::_cudnn_attention_forward": "cuDNN's attention over packed rows",
    "trimtab::flex_attention": "FlexAttention",
}
"""Names of the operations that take their efficiency from others, for people."""

FUSED_NORMS = {"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"}
"""Layers that are described like updates of the optimizer: their measurements correct no update."""


class Rates(NamedTuple):
    """Inputs of the roofline: operations per second by dtype, bytes per second, multiprocessors."""

    float32: float
    tf32: float
    float16: float
    bfloat16: float
    bandwidth: float
    multiprocessors: int
    law: LawFacts
    float8: float | None = None
    instructions: float | None = None
    """Instructions of single threads that are started in a second; None: as many as fp32 operations."""
    ampere: float = 1.0
    """Share of the peak that kernels with an A100's instructions reach."""
    split: float | None = None
    """Products of fp32 made of three in tf32; None: as fast as plain fp32."""
    products32: float | None = None
    """Plain fp32 products; None: the peak of other fp32 operations."""

    def peak(self, dtype: str) -> float:
        """Return the peak of a dtype, by torch's name; unlisted dtypes run like fp32."""
        peaks = {"tf32": self.tf32, "float16": self.float16, "bfloat16": self.bfloat16}
        # Tensor cores multiply 8-bit integers twice as fast as fp16.
        peaks["int8"] = 2 * self.float16
        if dtype in FLOAT8:
            return self.float8 or self.float32
        return peaks.get(dtype, self.products32 or self.float32)


def device_rates(device: Device) -> Rates | None:
    """Return the rates of a device; None if its bandwidth or peak is not in the catalogue."""
    plain = device.peaks.fp32
    if device.bandwidth_bytes_per_s is None or plain is None:
        return None
    facts = facts_of(device)
    # The law and its corrections are those of the calibrated device: others reach more or less of their peak.
    relative, plainly = (
        own / calibrated if (own := share(device.model)) and (calibrated := share(facts.device)) else 1.0
        for share in (matmul_share, matmul_fp32_share)
    )
    peaks = device.peaks
    return Rates(
        float32=plain,
        tf32=peaks.tf32 * relative if peaks.tf32 else plain,
        float16=peaks.fp16 * relative if peaks.fp16 else plain,
        # Emulated bf16 runs like fp32.
        bfloat16=peaks.bf16 * relative if peaks.bf16 else plain,
        bandwidth=device.bandwidth_bytes_per_s,
        multiprocessors=device.multiprocessors or DEFAULT_MULTIPROCESSORS,
        law=facts.law,
        float8=peaks.fp8 * relative if peaks.fp8 else None,
        instructions=instruction_rate(device),
        ampere=ampere_share(device),
        split=peaks.tf32 * relative / 3 if peaks.tf32 else None,
        products32=plain * plainly,
    )


def ampere_share(device: Device) -> float:
    """Return the share of the peak that products with the instructions of an A100 reach on a device."""
    return AMPERE_SHARES.get((device.compute_capability or "").split(".", maxsplit=1)[0], 1.0)


def roofline_s(work: Work, device: Rates) -> float:  # noqa: C901 - a rule for each kind of operation
    """Return the seconds of an operation if every kernel were as efficient as large ones."""
    facts = device.law
    if _is_generated(work):
        return facts.launch_s + _generated_s(work, device)
    if work.kind == "convolution":
        return facts.launch_s * min(work.kernels, MAX_LAUNCHES) + _convolution_s(work, device)
    if work.op == LAYER_NORM_BACKWARD:
        return facts.launch_s * 3 + _layer_norm_backward_s(work, device)
    moving = (work.read_bytes + work.write_bytes) / (device.bandwidth * facts.streamed)
    at_once = THREADS_AT_ONCE.get(work.op)
    place = THREADS if work.op in THREAD_UPSAMPLING_BACKWARD else LIMIT
    if at_once and len(work.dims) > place and work.dims[place]:
        moving *= max(1.0, at_once * device.multiprocessors / work.dims[place])
    if work.kind == "pointwise":
        # Each kernel of an operation such as roll moves all of it.
        moving *= max(1, work.kernels)
    computing = 0.0
    if work.kind == "optimizer":
        # Updates with states in few bits search tables: the instructions of that are counted, not arithmetic.
        computing = work.flops / (device.instructions or device.float32)
    elif work.op == TRIANGULAR_SOLVE:
        computing = work.flops / (device.float32 * facts.solved)
    elif work.flops:
        peak = device.peak(work.dtype) * facts.sustained
        if work.kind == "matrix":
            computing = _product_s(work, peak, device)
        elif work.kind == "attention":
            computing = _attention_s(work, peak, device)
        else:
            computing = work.flops / peak
    if work.kind == "recurrent" and work.dims:
        computing += work.dims[1] * CELL_LAUNCHES.get(work.op, 2) * facts.cell_kernel_s
    return facts.launch_s * min(work.kernels, MAX_LAUNCHES) + max(moving, computing)


def _attention_s(work: Work, peak: float, device: Rates) -> float:
    """Return the seconds of the arithmetic of fused attention, in whole tiles of queries and keys."""
    _, _, queries, keys, *_ = work.dims
    flops = work.flops * _pad(queries, work.op) * _pad(keys, work.op) / (queries * keys)
    if work.op == CUDNN_BACKWARD and max(queries, keys) < SHORT:
        tokens = (queries + keys) / 2
        flops *= SHORT**2 * (tokens + FIXED) / (SHORT + FIXED) / (queries * keys)
    if CAUSAL in work.dims[CAUSAL_PLACE : CAUSAL_PLACE + 1]:
        # Tiles on the diagonal are multiplied whole.
        tiles = math.ceil(keys / CAUSAL_TILE)
        flops *= (tiles + 1) / tiles
    if SAME_KERNELS.get(work.op, work.op) in AMPERE_KERNELS:
        # The only fused kernel for fp32 makes each product of three in tf32, whatever torch allows elsewhere.
        split = device.split if work.dtype in WIDE_DTYPES else None
        peak = (split * device.law.sustained if split else peak) * device.ampere
    return flops / peak


def _pad(tokens: int, op: str) -> int:
    """Return so many queries or keys of an attention in whole tiles."""
    tile = ATTENTION_TILES.get(SAME_KERNELS.get(op, op), 1)
    return -(-tokens // tile) * tile


def _is_generated(work: Work) -> bool:
    """Return whether a compiler generates the kernel; torch's own operations have a namespace."""
    return "::" not in work.op and work.kind in {"pointwise", "reduction"}


def _generated_s(work: Work, device: Rates) -> float:
    """Return the seconds of a kernel that torch.compile generates: its bytes or its instructions."""
    facts = device.law
    is_tiled = bool(work.dims) and work.dims[0] & PERMUTED
    share = facts.generated_tiled if is_tiled else facts.generated_streamed
    moving = (work.read_bytes + work.write_bytes) / (device.bandwidth * share)
    issued = (device.instructions or device.float32) * facts.generated_issued
    return max(moving, work.instructions / issued)


def _layer_norm_backward_s(work: Work, device: Rates) -> float:
    """Return the seconds of the backward pass of a layer norm: the input's gradient, then the weight's.

    Both read the input and the gradient. The second kernel sums columns: if rows are not divided, few columns
    leave most of the device without work. 65,536 rows of 384 numbers take 353 us, 200,704 rows 413 us.
    """
    facts, columns = device.law, work.dims[1]
    bandwidth = device.bandwidth * facts.streamed
    # It writes the gradients of weight and bias too.
    rows = max(1, round(work.write_bytes / (columns * DTYPE_BYTES.get(work.dtype, 4))) - 2)
    seconds = max((work.read_bytes + work.write_bytes) / bandwidth, rows / facts.norm_rows_per_s)
    if work.dims[0] & PERMUTED:
        # The gradient is copied first.
        seconds += work.read_bytes / bandwidth
    blocks = math.ceil(columns / NORM_COLUMNS)
    reading = work.read_bytes / bandwidth
    if rows > MANY_NORM_ROWS and blocks < device.multiprocessors / 2:
        return seconds + reading + facts.norm_sums_s
    rounds = math.ceil(blocks / device.multiprocessors)
    return seconds + max(reading, rows * rounds * facts.norm_column_step_s)


def _convolution_s(work: Work, device: Rates) -> float:
    """Return the seconds of a convolution: its arithmetic or its bytes, then layouts and bias.

    Tensor cores multiply matrices: with few channels a group, other units do the arithmetic. They take
    channels last, so that other layouts are converted before and after, unless the kernel is one pixel.
    """
    groups, _, columns, inner, layout, area = work.dims
    bandwidth = device.bandwidth * device.law.streamed
    is_narrow = groups > 1 and min(columns, inner // max(1, area)) < MIN_GROUP_CHANNELS
    peak = device.float32 if is_narrow else device.peak(work.dtype)
    seconds = max(work.flops / (peak * device.law.sustained), work.read_bytes / bandwidth)
    if work.dtype != "float32" and layout != CHANNELS_LAST and area > 1 and not is_narrow:
        seconds += 2 * work.read_bytes / bandwidth
    return seconds + work.write_bytes / bandwidth


def recurrent_launch_s(work: Work, facts: LawFacts) -> float:
    """Return the seconds that the host needs for the thousands of launches of a recurrent layer."""
    if work.kind != "recurrent" or not work.dims or _is_persistent(work):
        return 0.0
    layers, steps, *_ = work.dims
    return layers * steps * CELL_LAUNCHES.get(work.op, 2) * facts.cell_launch_s


def _is_persistent(work: Work) -> bool:
    """Return whether all steps of a recurrent layer are one kernel, by torch's rule for recent devices."""
    layers, _, batch, width = work.dims
    fits = width <= PERSISTENT_WIDTH and batch <= PERSISTENT_BATCH
    return work.dtype == "float16" and layers == 1 and fits and not width % 128 and not batch % 8


def _product_s(work: Work, peak: float, device: Rates) -> float:
    """Return the seconds of a matrix product; several kernels, such as one per expert, run in sequence."""
    if work.kernels <= 1:
        return _tiled_s(work, peak, device)
    batch, *rest = work.dims
    each = work.replace(dims=(-(-batch // work.kernels), *rest), kernels=1)
    return work.kernels * (_tiled_s(each, peak, device) + device.law.launch_s)


def _tiled_s(work: Work, peak: float, device: Rates) -> float:
    """Return the seconds of a matrix product in whole rounds of tiles."""
    batch, rows, columns, inner = work.dims[:4]
    alignment = work.dims[4] if len(work.dims) > 4 else 16  # noqa: PLR2004 - it may be left out
    # Plain fp32 loads numbers one by one, so alignment does not matter.
    loading = 1.0 if work.dtype in ("float32", "float64") else device.law.loading(alignment)
    each = peak / device.multiprocessors * loading
    best = math.inf
    for height, width, share in device.law.tiles:
        tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
        for split in SPLITS:
            if split > 1 and inner / split < MIN_SPLIT:
                break
            rounds = math.ceil(tiles * split / device.multiprocessors)
            time = rounds * 2 * height * width * math.ceil(inner / split) / (each * share)
            if split > 1:
                time += device.law.launch_s + batch * rows * columns * 4 * split / device.bandwidth
            best = min(best, time)
    return best


def _additions_s(work: Work, facts: LawFacts) -> float:
    """Return the least seconds for what an operation adds into memory, one number at a time."""
    is_indexed = work.op.startswith(INDEX_ADD)
    rate = facts.indexed_additions_per_s if is_indexed else facts.additions_per_s
    return max(work.additions / rate, work.waiting_additions * facts.addition_s)


def _group_norm_s(work: Work, facts: LawFacts) -> float:
    """Return the least seconds of a norm over groups of channels: a thread reads number after number.

    One thread block has a whole group, so few large groups leave most of the device without work.
    """
    if work.op != GROUP_NORM or len(work.dims) <= LIMIT:
        return 0.0
    numbers = work.read_bytes / DTYPE_BYTES.get(work.dtype, 4)
    return numbers / work.dims[LIMIT] / GROUP_THREADS * facts.norm_step_s


def _search_s(work: Work, device: Rates) -> float | None:
    """Return the seconds of topk where it divides rows between many thread blocks; None for others.

    Each pass counts one byte of every number, the highest first; a last one gathers what is above the limit.
    16,384 rows of 49,152 numbers in bf16 took 5.9 ms, 32,768 rows of 1,024 in fp32 1.0 ms.
    """
    if work.op != TOPK or len(work.dims) < LIMIT or not work.dims[1]:
        return None
    size, last = DTYPE_BYTES.get(work.dtype, 4), work.dims[1]
    numbers = work.read_bytes / size
    rows = max(1, round(numbers / last))
    least = next((shape[1] for shape in TOPK_SHAPES if rows <= shape[0]), TOPK_LEAST)
    at_once = device.multiprocessors * TOPK_RESIDENT * TOPK_THREADS
    each = TOPK_THREADS * min(TOPK_MOST_NUMBERS, math.ceil(numbers / at_once))
    blocks = rows * math.ceil(last / each)
    if last < least or blocks < TOPK_FULL * device.multiprocessors:
        return None
    passes = size / TOPK_DIGIT_BYTES + TOPK_LAST_PASSES
    pass_s = numbers / device.law.searched_per_s + blocks * device.law.search_block_s
    return max(passes * pass_s, passes * work.read_bytes / (device.bandwidth * device.law.streamed))


def _log(count: float) -> float:
    return math.log2(max(count, 1))


def work_coordinates(work: Work) -> tuple[float, ...]:
    """Return the coordinates of an operation among those of its kind: log2 of sizes, and weighted traits."""
    dims = work.dims
    if work.kind == "matrix":
        batch, rows, columns, inner, *rest = dims
        alignment = 16 if work.dtype == "float32" or not rest else rest[0]
        return (_log(batch), _log(rows), _log(columns), _log(inner), 2 * _log(alignment))
    if work.kind == "attention":
        batch, heads, queries, keys, size, *rest = dims
        ragged = 2.0 if queries % 8 else 0.0
        # Older calibrations do not say whether there is a mask or dropout.
        causal, masked, dropped = (*rest, 0, 0, 0)[:3]
        variant = 2.0 * causal, 3.0 * masked, 3.0 * dropped, ragged
        tokens = _log(_pad(queries, work.op)), _log(_pad(keys, work.op))
        return (_log(batch * heads) / 2, *tokens, 2 * _log(size), *variant)
    if work.kind == "convolution":
        groups, spots, columns, inner, layout, area = dims
        odd = 3.0 * bool(columns % FULL_LOAD), 3.0 * bool(inner // max(1, area) % FULL_LOAD)
        biased = 2.0 * bool(work.write_bytes)
        sizes = _log(groups), _log(spots) / 2, _log(columns), _log(inner), 3.0 * layout, _log(area)
        return (*sizes, biased, *odd)
    if work.kind == "recurrent":
        return tuple(map(_log, dims))
    if work.kind == "optimizer":
        tensors, numbers = dims
        return (_log(tensors) / 2, _log(numbers), _log(numbers / max(1, tensors)) / 2)
    moved = work.read_bytes + work.write_bytes
    obstacles, last, limit, threads = (*dims, 0, 0, 0, 0)[:4]
    narrow = _log(last) / 3 if work.kind == "reduction" else 0.0
    traits = [3.0 * bool(obstacles & flag) for flag in (PERMUTED, BROADCAST, PROMOTED, SLICED)]
    # Calibrations before 2026-11-18 do not have the number of groups, which matters only if it is small.
    waiting = 0.0 if work.op == GROUP_NORM else 3 * bool(limit) + _log(limit)
    return (_log(moved) / 2, 4 * work.read_bytes / max(moved, 1), narrow, *traits, waiting, _log(threads))


def _stopwatch_s(work: Work, device: Rates) -> float:
    """Return the measured time of a single operation: of the device, or of the host if that is longer."""
    return max(roofline_s(work, device), recurrent_launch_s(work, device.law))


class Point(NamedTuple):
    """A measured operation."""

    kind: str
    op: str
    dtype: str
    at: tuple[float, ...]
    correction: float
    """Logarithm of measured time over roofline."""


def calibration_points(calibration: Calibration, measured_on: Rates) -> list[Point]:
    """Return a calibration as corrections of the roofline."""
    return [
        Point(
            work.kind,
            work.op,
            work.dtype,
            work_coordinates(work),
            math.log(seconds / _stopwatch_s(work, measured_on)),
        )
        for work, seconds in zip(calibration.works, calibration.seconds, strict=True)
    ]


def _has_like_dtype(point: Point, work: Work) -> bool:
    """Return whether an operation runs the same kernels in both dtypes.

    Autocast always runs recurrent layers of cuDNN in fp16; fused attention ignores whether tf32 is allowed.
    """
    alike = {"recurrent": HALF_DTYPES, "attention": WIDE_DTYPES}.get(work.kind, set())
    return point.dtype == work.dtype or {point.dtype, work.dtype} <= alike


class Pace:
    """Times of operations on one device, in seconds."""

    def __init__(self, target: Rates, points: Sequence[Point] = ()) -> None:
        self.target = target
        self._by_kind: dict[str, list[Point]] = {}
        self._by_op: dict[tuple[str, str], list[Point]] = {}
        for point in points:
            self._by_kind.setdefault(point.kind, []).append(point)
            self._by_op.setdefault((point.kind, point.op), []).append(point)
        self._groups: dict[tuple[str, str, str], list[tuple[tuple[float, float], list[Point]]]] = {}
        self.seconds = lru_cache(maxsize=None)(self._seconds)
        self.recurrent_launch_s = lru_cache(maxsize=None)(self._recurrent_launch_s)

    def with_rates(self, target: Rates) -> Pace:
        """Return the times with the same corrections on a device of other rates."""
        return Pace(target, [point for points in self._by_kind.values() for point in points])

    def _seconds(self, work: Work) -> float:
        """Return the seconds that the device is busy."""
        searched = _search_s(work, self.target)
        if searched is not None:
            return searched
        seconds = roofline_s(work, self.target)
        correction = self._correction(work)
        # If the host was the bottleneck, kernels waited: they were not faster than the roofline.
        waited = recurrent_launch_s(work, self.target.law) > seconds
        seconds *= math.exp(max(0.0, correction) if waited else correction)
        return max(seconds, _additions_s(work, self.target.law), _group_norm_s(work, self.target.law))

    def list_unmeasured(self, works: Iterable[Work]) -> list[str]:
        """Return the kernels among works whose efficiency is taken from measurements of other kernels."""
        measured = {point.op for points in self._by_kind.values() for point in points}
        names = {UNMEASURED_NAMES[work.op] for work in works if work.op in UNMEASURED_NAMES.keys() - measured}
        return sorted(names)

    def _recurrent_launch_s(self, work: Work) -> float:
        """Return the seconds that the host needs for the launches of a recurrent layer in a step."""
        facts = self.target.law
        seconds = recurrent_launch_s(work, facts)
        return seconds * math.exp(self._correction(work)) * facts.cell_in_a_step if seconds else 0.0

    def _group_points(self, work: Work) -> list[tuple[tuple[float, float], list[Point]]]:
        """Return the points for an operation by what another operation and dtype add, the nearest first."""
        op = SAME_KERNELS.get(work.op, work.op)
        key = work.kind, op, work.dtype
        if key not in self._groups:
            measured, same = self._by_kind[work.kind], self._by_op.get((work.kind, op), [])
            if len(same) >= NEAREST_POINTS:
                alike = [point for point in same if _has_like_dtype(point, work)]
                # cuDNN has other kernels for every dtype: depthwise ones in fp32 take up to 34 times as long.
                is_enough = work.kind == "convolution" and len(alike) >= NEAREST_POINTS
                measured = alike if is_enough else same
            elif op not in FUSED_NORMS:
                measured = [point for point in measured if point.op not in FUSED_NORMS]
            groups: dict[tuple[float, float], list[Point]] = {}
            for point in measured:
                added = OTHER_OP * (point.op != op), OTHER_DTYPE * (not _has_like_dtype(point, work))
                groups.setdefault(added, []).append(point)
            self._groups[key] = sorted(groups.items(), key=lambda group: sum(group[0]))
        return self._groups[key]

    def _correction(self, work: Work) -> float:
        measured = self._by_kind.get(work.kind)
        if not measured or (work.kind == "optimizer" and work.flops) or _is_generated(work):
            # What an update with states in few bits takes was measured directly, and is unlike other updates.
            # Generated kernels are unlike those of single operations.
            return 0.0
        at = work_coordinates(work)
        nearest: list[tuple[float, float]] = []
        for (by_op, by_dtype), points in self._group_points(work):
            # No point of a group is nearer than what its operation and dtype add.
            if len(nearest) == NEAREST_POINTS and nearest[-1][0] < by_op + by_dtype:
                break
            nearest += [
                (math.dist(at, point.at) ** 2 + by_op + by_dtype, point.correction) for point in points
            ]
            nearest = nsmallest(NEAREST_POINTS, nearest)
        weights = [1 / (distance + SOFTNESS) for distance, _ in nearest]
        return sum(
            weight * correction for weight, (_, correction) in zip(weights, nearest, strict=True)
        ) / sum(weights)
