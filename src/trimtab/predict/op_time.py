"""How long one operation takes on a device: a law of its cause, corrected by what was measured nearby.

The law is a roofline: arithmetic at the dense peak of its dtype, in whole tiles over the multiprocessors, or
bytes at the memory's bandwidth, and a launch. How far real kernels stay from it was measured (`trimtab
calibrate`); the correction of an operation is the mean of the nearest measured ones of its kind, by the
logarithms of its sizes. A device that was not calibrated takes the corrections of one that was.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from trimtab.catalog.facts import facts_of
from trimtab.spec.precision import BFLOAT16, FLOAT16
from trimtab.spec.trace import BROADCAST, PERMUTED, PROMOTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.catalog.facts import LawFacts
    from trimtab.spec import Calibration, Device, Work

MOST_LAUNCHES = 4
CELL_LAUNCHES = {"aten::_cudnn_rnn": 2, "aten::_cudnn_rnn_backward": 3}
"""Kernels of one step of one recurrent layer: a matrix product and the gates, and backward a sum of the
product's parts. Products that need not wait for the step before are done for many steps at once."""
PERSISTENT_WIDTH, PERSISTENT_BATCH = 1024, 128
"""Up to here torch asks cuDNN to run one layer in one direction as a single kernel, in fp16."""
SPLITS = (1, 2, 4, 8, 16)
LEAST_SPLIT = 256
"""The sum over k is split between multiprocessors where that leaves so much for each."""
HALF = {FLOAT16, BFLOAT16}
NEAREST = 5
OTHER_OP, OTHER_DTYPE = 16.0, 6.0
"""Squared distance between operations of different name or dtype, in doublings of a size."""
SOFTNESS = 0.02
DEFAULT_MULTIPROCESSORS = 100


class Rates(NamedTuple):
    """What the law needs to know of a device: operations a second by dtype, bytes a second."""

    float32: float
    tf32: float
    float16: float
    bfloat16: float
    bandwidth: float
    multiprocessors: int
    law: LawFacts

    def peak(self, dtype: str) -> float:
        """Of a dtype as torch names it; others run as fp32 does."""
        known = {"tf32": self.tf32, "float16": self.float16, "bfloat16": self.bfloat16}
        return known.get(dtype, self.float32)


def rates(device: Device) -> Rates | None:
    """The device's figures; None where the catalogue has no bandwidth or no peak for it."""
    plain = device.peaks.fp32
    if device.bandwidth_bytes_per_s is None or plain is None:
        return None
    return Rates(
        float32=plain,
        tf32=device.peaks.tf32 or plain,
        float16=device.peaks.fp16 or plain,
        # Where bf16 is emulated it runs as fp32 does.
        bfloat16=device.peaks.bf16 or plain,
        bandwidth=device.bandwidth_bytes_per_s,
        multiprocessors=device.multiprocessors or DEFAULT_MULTIPROCESSORS,
        law=facts_of(device).law,
    )


def law(work: Work, device: Rates) -> float:
    """Seconds, were every kernel as good as large ones are."""
    facts = device.law
    moving = (work.read_bytes + work.write_bytes) / (device.bandwidth * facts.streamed)
    computing = 0.0
    if work.flops:
        peak = device.peak(work.dtype) * facts.sustained
        computing = _product(work, peak, device) if work.kind == "matrix" else work.flops / peak
    if work.kind == "recurrent" and work.dims:
        computing += work.dims[1] * CELL_LAUNCHES.get(work.op, 2) * facts.cell_kernel_s
    return facts.launch_s * min(work.kernels, MOST_LAUNCHES) + max(moving, computing)


def handing_out(work: Work, facts: LawFacts) -> float:
    """Seconds that the host is busy with the launches of a recurrent layer, of which there are thousands."""
    if work.kind != "recurrent" or not work.dims or _persistent(work):
        return 0.0
    layers, steps, *_ = work.dims
    return layers * steps * CELL_LAUNCHES.get(work.op, 2) * facts.cell_launch_s


def _persistent(work: Work) -> bool:
    """Whether all steps of a recurrent layer are one kernel, by torch's own rule for recent devices."""
    layers, _, batch, width = work.dims
    fits = width <= PERSISTENT_WIDTH and batch <= PERSISTENT_BATCH
    return work.dtype == "float16" and layers == 1 and fits and not width % 128 and not batch % 8


def _product(work: Work, peak: float, device: Rates) -> float:
    """A matrix product; where it is several kernels, such as one for each expert, one after another."""
    if work.kernels <= 1:
        return _tiled(work, peak, device)
    batch, *rest = work.dims
    each = work.replace(dims=(-(-batch // work.kernels), *rest), kernels=1)
    return work.kernels * (_tiled(each, peak, device) + device.law.launch_s)


def _tiled(work: Work, peak: float, device: Rates) -> float:
    """A matrix product in whole rounds of tiles."""
    batch, rows, columns, inner = work.dims[:4]
    alignment = work.dims[4] if len(work.dims) > 4 else 16  # noqa: PLR2004 - it may be left out
    # Plain fp32 loads numbers one by one anyway.
    loading = 1.0 if work.dtype in ("float32", "float64") else device.law.loading(alignment)
    each = peak / device.multiprocessors * loading
    best = math.inf
    for height, width, share in device.law.tiles:
        tiles = batch * math.ceil(rows / height) * math.ceil(columns / width)
        for split in SPLITS:
            if split > 1 and inner / split < LEAST_SPLIT:
                break
            rounds = math.ceil(tiles * split / device.multiprocessors)
            time = rounds * 2 * height * width * math.ceil(inner / split) / (each * share)
            if split > 1:
                time += device.law.launch_s + batch * rows * columns * 4 * split / device.bandwidth
            best = min(best, time)
    return best


def _log(count: float) -> float:
    return math.log2(max(count, 1))


def place(work: Work) -> tuple[float, ...]:
    """Where an operation lies among those of its kind: sizes in doublings, traits some doublings apart."""
    dims = work.dims
    if work.kind == "matrix":
        batch, rows, columns, inner, *rest = dims
        alignment = 16 if work.dtype == "float32" or not rest else rest[0]
        return (_log(batch), _log(rows), _log(columns), _log(inner), 2 * _log(alignment))
    if work.kind == "attention":
        batch, heads, queries, keys, size, *rest = dims
        ragged = 2.0 if queries % 8 else 0.0
        return (_log(batch * heads) / 2, _log(queries), _log(keys), 2 * _log(size), 2 * sum(rest), ragged)
    if work.kind == "convolution":
        groups, spots, columns, inner, layout, area = dims
        return (_log(groups), _log(spots) / 2, _log(columns), _log(inner), 3.0 * layout, _log(area))
    if work.kind == "recurrent":
        return tuple(map(_log, dims))
    if work.kind == "optimizer":
        tensors, numbers = dims
        return (_log(tensors) / 2, _log(numbers), _log(numbers / max(1, tensors)) / 2)
    moved = work.read_bytes + work.write_bytes
    obstacles, last = (*dims, 0, 0)[:2]
    narrow = _log(last) / 3 if work.kind == "reduction" else 0.0
    traits = [3.0 * bool(obstacles & one) for one in (PERMUTED, BROADCAST, PROMOTED)]
    return (_log(moved) / 2, 4 * work.read_bytes / max(moved, 1), narrow, *traits)


def _alone(work: Work, device: Rates) -> float:
    """What a stopwatch would see of one operation: the device, or the host where that takes longer."""
    return max(law(work, device), handing_out(work, device.law))


class Point(NamedTuple):
    """A measured operation."""

    kind: str
    op: str
    dtype: str
    at: tuple[float, ...]
    correction: float
    """Logarithm of measured over law."""


def points(calibration: Calibration, measured_on: Rates) -> list[Point]:
    """A calibration as corrections of the law."""
    return [
        Point(work.kind, work.op, work.dtype, place(work), math.log(seconds / _alone(work, measured_on)))
        for work, seconds in zip(calibration.works, calibration.seconds, strict=True)
    ]


def _alike(point: Point, work: Work) -> bool:
    """Whether dtypes are the same; autocast always hands recurrent layers to cuDNN in fp16."""
    return point.dtype == work.dtype or (work.kind == "recurrent" and {point.dtype, work.dtype} <= HALF)


class Pace:
    """Seconds of operations on one device."""

    def __init__(self, target: Rates, points: Sequence[Point] = ()) -> None:
        self.target = target
        self._by_kind: dict[str, list[Point]] = {}
        for point in points:
            self._by_kind.setdefault(point.kind, []).append(point)
        self.seconds = lru_cache(maxsize=None)(self._seconds)
        self.handing_out = lru_cache(maxsize=None)(self._handing_out)

    def _seconds(self, work: Work) -> float:
        """What the device is busy."""
        seconds = law(work, self.target)
        correction = self._correction(work)
        # Where the host set the pace, kernels were no faster than their law: they waited.
        waited = handing_out(work, self.target.law) > seconds
        return seconds * math.exp(max(0.0, correction) if waited else correction)

    def _handing_out(self, work: Work) -> float:
        """What the host is busy with the launches of a recurrent layer."""
        facts = self.target.law
        seconds = handing_out(work, facts)
        return seconds * math.exp(self._correction(work)) * facts.cell_in_a_step if seconds else 0.0

    def _correction(self, work: Work) -> float:
        known = self._by_kind.get(work.kind)
        if not known:
            return 0.0
        at = place(work)
        same = [point for point in known if point.op == work.op]
        found = sorted(
            (
                math.dist(at, point.at) ** 2
                + OTHER_OP * (point.op != work.op)
                + OTHER_DTYPE * (not _alike(point, work)),
                point.correction,
            )
            for point in (same if len(same) >= NEAREST else known)
        )[:NEAREST]
        weights = [1 / (distance + SOFTNESS) for distance, _ in found]
        return sum(weight * correction for weight, (_, correction) in zip(weights, found, strict=True)) / sum(
            weights
        )
