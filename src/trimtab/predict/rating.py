"""Whether a share of the peak is good for a GPU: beside what measured jobs reach there.

An MFU of 30 % is poor for a large transformer on one card and excellent for any job on another, because
cards differ in how much arithmetic they offer for each byte they move. So the jobs of the exam are the
yardstick: what they took on an H200, split into arithmetic and bytes, is rescaled to the card, and the rating
is the quarter that a job falls into.
"""

from __future__ import annotations

import statistics
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from trimtab.catalog.clusters import row_device
from trimtab.catalog.tables import devices
from trimtab.spec import Noun, Precision

if TYPE_CHECKING:
    from trimtab.spec import Device

WORDS = ("poor", "fair", "good", "excellent")
PEAK_OF = {
    Precision.FP32: "fp32",
    Precision.TF32: "tf32",
    Precision.FP16: "fp16",
    Precision.BF16: "bf16",
    Precision.BF16_TRUE: "bf16",
}
"""The dense peak that MFU is a share of."""


class Yardstick(Noun, frozen=True, kw_only=True):
    """A measured job: operations of the model in a step, and where its time went."""

    case: str
    device: str
    precision: Precision
    flops: int
    arithmetic_s: float
    other_s: float


@cache
def yardsticks() -> tuple[Yardstick, ...]:
    """The jobs of the exam."""
    text = files("trimtab.catalog").joinpath("yardsticks.jsonl").read_text(encoding="utf-8")
    return tuple(Yardstick.from_json(line, origin="yardsticks.jsonl") for line in text.splitlines())


def rating(mfu: float, device: Device, precision: Precision) -> str | None:
    """The word for an MFU; None where the device's figures are not known."""
    limits = quartiles(device, precision)
    return WORDS[sum(mfu >= limit for limit in limits)] if limits else None


def quartiles(device: Device, precision: Precision) -> tuple[float, ...]:
    """What a quarter, half and three quarters of the measured jobs stay below on a device."""
    reached = [share for one in yardsticks() if (share := _reached(one, device, precision)) is not None]
    return tuple(statistics.quantiles(reached, n=4)) if len(reached) > len(WORDS) else ()


def _reached(one: Yardstick, device: Device, precision: Precision) -> float | None:
    """The MFU of a measured job, rescaled to a device."""
    wide = (Precision.FP32, Precision.TF32)
    if (one.precision in wide) != (precision in wide):
        return None
    there = next(row_device(row, 0, "yardsticks") for row in devices() if row.name == one.device)
    before = getattr(there.peaks, PEAK_OF[one.precision])
    now = getattr(device.peaks, PEAK_OF[precision]) or device.peaks.fp32
    bandwidth, here = there.bandwidth_bytes_per_s, device.bandwidth_bytes_per_s
    if not before or not now or not bandwidth or not here:
        return None
    seconds = one.arithmetic_s * before / now + one.other_s * bandwidth / here
    return float(one.flops / (seconds * now))
