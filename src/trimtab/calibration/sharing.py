"""Read a calibration that somebody else measured, and refuse one that cannot be right.

A wrong calibration makes every estimate of its device wrong, so a shared file is checked before it is stored:
its format, that the catalogue has the device, that each time is possible, and that the whole is a measurement
of this device and not of another one.
"""

from __future__ import annotations

import math
import statistics
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING

from trimtab.catalog.tables import devices
from trimtab.errors import BrokenFile, WrongUse, find_nearest, shorten
from trimtab.predict.calibration import find_catalogue_name, find_rates
from trimtab.predict.op_time import roofline_s, work_coordinates
from trimtab.spec import Calibration
from trimtab.spec.precision import FLOAT32
from trimtab.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trimtab.predict.op_time import Rates

MAX_FILE_BYTES = 64 * MIB
SHORTEST_S, LONGEST_S = 1e-9, 60.0
"""Range of a measured operation. The longest of the menu takes about a second on a slow GPU."""
SLOWEST = 10_000
"""Most times that an operation may take as long as by the datasheet; the most on an H200 was 203."""
LARGE_FLOPS = 10**10
"""Matrix products with more operations show how near a device gets to its peak."""
PRODUCT_SHARES = (0.1, 1.2)
"""Share of the dense peak that the fastest large matrix product of a dtype may reach."""
USUAL_RATIOS = (0.25, 16.0)
"""Range of the median of measured times over those of the datasheet; on an H200 it is 1.3."""
HOST_S = (1e-8, 1e-2)
COPY_RATES = (1e8, 4e12)
MAX_TEXT = 120
SHOWN_FAULTS = 3
CURE = "Ask its owner for the file that `trimtab calibrate` wrote, or to measure again on an idle GPU."


def read_shared_calibration(file: Path) -> Calibration:
    """Read a calibration from someone else; raise BrokenFile with what is wrong with it."""
    given = f"--import {file}"
    try:
        size = file.stat().st_size
        text = file.read_bytes() if size <= MAX_FILE_BYTES else b""
    except OSError as error:
        raise WrongUse(
            given,
            found=f"it cannot be read: {error.strerror}",
            cure="Name a file that `trimtab calibrate` wrote.",
        ) from error
    if size > MAX_FILE_BYTES:
        raise BrokenFile(
            given, found=f"it has {size // MIB} MiB; a calibration has less than 1 MiB", cure=CURE
        )
    calibration = Calibration.from_json(text, origin=given)
    wrong = list(list_faults(calibration))
    if wrong:
        more = f"; and {len(wrong) - SHOWN_FAULTS} more" if len(wrong) > SHOWN_FAULTS else ""
        raise BrokenFile(given, found="; ".join(wrong[:SHOWN_FAULTS]) + more, cure=CURE)
    # A driver's name would be stored under a name that predictions do not look for.
    return calibration.replace(device=find_catalogue_name(calibration.device))


def list_faults(calibration: Calibration) -> Iterator[str]:
    """Yield what is wrong with a calibration, as sentences."""
    texts = [calibration.device, calibration.owner, *calibration.versions, *calibration.versions.values()]
    if any(len(text) > MAX_TEXT or not text.isprintable() for text in texts):
        yield f"a name in it has more than {MAX_TEXT} characters or some that cannot be printed"
        return
    rates = find_rates(calibration.device)
    if rates is None:
        near = find_nearest(calibration.device, [device.name for device in devices()])
        yield f"the catalogue has no {calibration.device!r}" + (f"; near: {', '.join(near)}" if near else "")
        return
    if not calibration.works and not calibration.collectives:
        yield "it has no measurement"
    yield from _list_date_faults(calibration.taken_on)
    yield from _list_range_faults("host", calibration.host, HOST_S)
    yield from _list_range_faults("copy_bytes_per_s", calibration.copy_bytes_per_s, COPY_RATES)
    yield from _list_range_faults("link_bytes_per_s", calibration.link_bytes_per_s, COPY_RATES)
    wrong = list(_list_time_faults(calibration, rates))
    yield from wrong
    if calibration.works and not wrong:
        yield from _list_device_faults(calibration, rates)


def _list_date_faults(taken_on: str) -> Iterator[str]:
    try:
        day = date.fromisoformat(taken_on)
    except ValueError:
        yield f"taken_on is {shorten(taken_on, 40)!r}, not a date such as 2026-11-17"
        return
    # The owner may be a day ahead.
    if (day - datetime.now(UTC).date()).days > 1:
        yield f"taken_on is {taken_on}, which is in the future"


def _list_range_faults(field: str, values: dict[str, float], limits: tuple[float, float]) -> Iterator[str]:
    least, most = limits
    for name, value in values.items():
        if not least <= value <= most:
            yield f"{field}.{shorten(name, 40)} is {value:g}, not between {least:g} and {most:g}"


def _list_time_faults(calibration: Calibration, rates: Rates) -> Iterator[str]:
    """Yield a sentence for each operation that has impossible sizes or an impossible time."""
    for place, (work, seconds) in enumerate(zip(calibration.works, calibration.seconds, strict=True)):
        name = f"operation {place + 1} ({shorten(work.op, 60)})"
        try:
            expected = roofline_s(work, rates)
            sizes = work_coordinates(work)
        except (ValueError, IndexError, OverflowError, ZeroDivisionError):
            yield f"{name} has impossible sizes {shorten(str(work.dims), 60)}"
            continue
        if not all(map(math.isfinite, sizes)) or not SHORTEST_S <= seconds <= LONGEST_S:
            yield f"{name} took {seconds:g} s"
        elif seconds > SLOWEST * expected:
            yield f"{name} took {seconds:.3g} s, {seconds / expected:.0f} times as long as by the datasheet"


def _list_device_faults(calibration: Calibration, rates: Rates) -> Iterator[str]:
    """Yield a sentence if the times are not those of the device that the file names."""
    pairs = list(zip(calibration.works, calibration.seconds, strict=True))
    best: dict[str, float] = {}
    for work, seconds in pairs:
        if work.kind == "matrix" and work.flops > LARGE_FLOPS:
            best[work.dtype] = max(best.get(work.dtype, 0.0), work.flops / seconds)
    least, most = PRODUCT_SHARES
    for dtype, rate in best.items():
        share = rate / rates.peak(dtype)
        # A dtype that the device does not have is emulated, at a rate that no datasheet states.
        if not least <= share <= most and (dtype == FLOAT32 or rates.peak(dtype) != rates.float32):
            yield (
                f"its best {dtype} product ran at {rate / 1e12:.0f} TFLOP/s, {share:.0%} of the peak of "
                f"{calibration.device}: another GPU was measured, or a busy one"
            )
            return
    ratio = statistics.median(seconds / roofline_s(work, rates) for work, seconds in pairs)
    if not USUAL_RATIOS[0] <= ratio <= USUAL_RATIOS[1]:
        yield (
            f"half of its operations took over {ratio:.2g} times as long as by the datasheet of "
            f"{calibration.device}: another GPU was measured, or a busy one"
        )
