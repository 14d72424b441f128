"""Find a device's catalogue row by its driver name or typed name, and derive peaks and bandwidth.

Full names are compared, without case, vendor words and punctuation: A10 does not match A100, and
an RTX 4090 Laptop GPU is not an RTX 4090.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from trimtab.catalog.tables import DeviceRow, ambiguous_names, devices
from trimtab.errors import UnknownName, WrongUse, find_nearest, shorten
from trimtab.spec import CatalogDevice, Peaks, Vendor

if TYPE_CHECKING:
    from trimtab.catalog.tables import DeviceRow
    from trimtab.spec import Device
    from trimtab.spec.precision import ProductsFormat


_VENDOR_WORDS = re.compile(r"\b(nvidia|geforce|tesla|quadro|amd|instinct|radeon|generation)\b|\(tm\)|\(r\)")
_PUNCTUATION = re.compile(r"[^a-z0-9]")
# A size is a separate word: the G of "A100-40G" is a unit, the G of "A10G" is not.
_SIZE_SUFFIX = re.compile(r"(?<![a-z0-9])(\d+)\s*(gib|gb|g)(?![a-z0-9])")
# NVIDIA's names of MIG slices: 1g.5gb, 3g.20gb, 1g.10gb+me.
_SLICE = re.compile(r"(?<![a-z0-9])(mig(?![a-z0-9])|[1-7]g\.\d+gb)", re.IGNORECASE)
_COUNT_LAST = re.compile(r"(.+?)\s*[xX*]\s*(\d+)")


def plain_name(name: str) -> str:
    """Return a name without case, vendor words and punctuation.

    >>> plain_name("NVIDIA A100-SXM4-40GB"), plain_name("a100 sxm4 40g"), plain_name("rtx-4090")
    ('a100sxm440', 'a100sxm440', 'rtx4090')
    """
    lower = name.lower().replace("_", "-")
    lower = _SIZE_SUFFIX.sub(r"\1", lower)
    return _PUNCTUATION.sub("", _VENDOR_WORDS.sub(" ", lower))


@cache
def _rows_by_driver() -> dict[str, DeviceRow]:
    return {plain_name(driver): row for row in devices() for driver in row.drivers}


@cache
def _rows_by_typed() -> dict[str, tuple[DeviceRow, str]]:
    """Return row and note of that spelling by plain name, driver names included."""
    rows = {plain_name(typed): (row, row.taken.get(typed, "")) for row in devices() for typed in row.typed}
    for driver, row in _rows_by_driver().items():
        # "Quadro RTX 6000" and "RTX 6000" have the same plain name; the typed one has the note.
        rows.setdefault(driver, (row, ""))
    for row in devices():
        # Names from plans and tables can be typed too.
        rows.setdefault(plain_name(row.name), (row, ""))
    return rows


def find_reported_device(name: str) -> DeviceRow | None:
    """Return the row of a device by its driver name; None if it is not in the catalogue."""
    return _rows_by_driver().get(plain_name(name))


def find_typed_device(name: str, *, given: str = "") -> tuple[DeviceRow, str]:
    """Return the row for a typed name, and a note on the choice if the name is ambiguous.

    >>> find_typed_device("4090")[0].name
    'GeForce RTX 4090'
    >>> find_typed_device("RTX 6000")[1][:31]
    'RTX 6000 is the Turing card of '
    """
    plain = plain_name(name)
    if found := _rows_by_typed().get(plain):
        row, note = found
        # The full driver name is not ambiguous.
        return row, "" if name in row.drivers else note
    given = given or f"device {name!r}"
    for entry in ambiguous_names():
        if plain == plain_name(entry.typed):
            raise WrongUse(
                given,
                found=f"{entry.typed} comes in {len(entry.choices)} sizes: {', '.join(entry.choices)}",
                cure=f"Say which, as in {entry.choices[0]}.",
            )
    backwards = _COUNT_LAST.fullmatch(name)
    if backwards and plain_name(backwards.group(1)) in _rows_by_typed():
        raise WrongUse(
            given,
            found="the count is after the name",
            cure=f"Write {backwards.group(2)}x{backwards.group(1)}.",
        )
    if _SLICE.search(name):
        raise WrongUse(
            given,
            found="a MIG slice cannot be named: its size depends on how its GPU is partitioned",
            cure="Run on the machine that has it: trimtab detect --json > FILE, then --on FILE.",
        )
    raise _unknown_device_error(name, given)


def _unknown_device_error(name: str, given: str) -> UnknownName:
    names = [row.typed[0] for row in devices()]
    close = find_nearest(name, names) or find_nearest(plain_name(name), names)
    listing = "`trimtab detect --list` shows every name."
    if not close:
        return UnknownName(given, found=f"no device is called {shorten(name)!r}", cure=listing)
    return UnknownName(
        given,
        found=f"no device is called {shorten(name)!r}; the nearest are {', '.join(close)}",
        cure=f"Use one of those; {listing}",
    )


# Peaks and bandwidth of a device, from its row or derived from its properties.


FLOP_PER_CLOCK = {
    "7.0": 1024,
    "7.5": 1024,
    "8.0": 2048,
    "8.6": 1024,
    "8.9": 1024,
    "9.0": 4096,
    "10.0": 8192,
    "10.3": 8192,
    "12.0": 1024,
}
"""Dense fp16 operations per clock and multiprocessor with fp32 accumulation, by compute capability.
Multiplied by multiprocessors and specified clock, it is within 1.2 % of the catalogue on every row
marked A. GeForce parts run at half of it, and so do the L40 and the A10G, which have their own rows."""

CORES_PER_MULTIPROCESSOR = {
    "7": 64, "7.5": 64, "8.0": 64, "8": 128, "9": 128, "10": 128, "12": 128,
    "gfx90a": 64, "gfx942": 128, "gfx950": 128,
}  # fmt: skip
"""fp32 lanes per multiprocessor, by compute capability, exact before major."""
ISSUED_PER_CLOCK = {Vendor.NVIDIA: 128, Vendor.AMD: 64}
"""Threads for which a multiprocessor starts an instruction in a clock, on every generation here: four groups
of 32 on NVIDIA since Volta, four of 16 on AMD Instinct. There may be fewer fp32 lanes, as on an A100."""

FIRST_BF16_MAJOR = 8
"""Ampere. Older devices emulate bf16: PyTorch reports it as supported, but it is slow."""
FIRST_FP8 = (8, 9)
"""Ada."""
FIRST_MX = (10, 0)
"""Blackwell."""


def parse_capability(text: str) -> tuple[int, int] | None:
    """Return NVIDIA's compute capability as numbers; None for an AMD name.

    >>> parse_capability("8.6"), parse_capability("gfx942")
    ((8, 6), None)
    """
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else None


def has_fp8(device: Device) -> bool:
    """Whether trimtab multiplies in 8-bit floats on a device; unknown counts as yes, AMD as no."""
    if device.vendor is not Vendor.NVIDIA:
        return False
    capability = parse_capability(device.compute_capability or "")
    if capability is not None:
        return capability >= FIRST_FP8
    known = any(getattr(device.peaks, name) for name in device.peaks.__struct_fields__)
    return device.peaks.fp8 is not None or not known


def explain_no_fp8(device: Device) -> str:
    """Return why a device does not multiply in 8-bit floats."""
    if device.vendor is not Vendor.NVIDIA:
        return f"trimtab runs fp8 on NVIDIA GPUs only, and {device.kind} is not one"
    capability = device.compute_capability
    stated = f" ({device.kind} has {capability})" if capability else ""
    return f"{device.kind} has no fp8: it needs compute capability 8.9 or newer{stated}"


def has_products(device: Device, form: ProductsFormat | None) -> bool:
    """Whether trimtab multiplies in an 8-bit format on a device; unknown counts as yes."""
    if form is None:
        return True
    capability = parse_capability(device.compute_capability or "")
    return has_fp8(device) and (not form.block or capability is None or capability >= FIRST_MX)


def explain_no_products(device: Device, form: ProductsFormat | None) -> str:
    """Return why a device does not multiply in an 8-bit format."""
    if form is None or not form.block:
        return explain_no_fp8(device)
    if device.vendor is not Vendor.NVIDIA:
        return f"trimtab predicts mxfp8 on NVIDIA GPUs only, and {device.kind} is not one"
    names = [
        row.typed[0] for row in devices() if (parse_capability(row.compute_capability) or (0, 0)) >= FIRST_MX
    ]
    return f"{device.kind} has no mxfp8: it needs Blackwell ({', '.join(names)})"


def has_bf16(compute_capability: str) -> bool:
    """Return whether the hardware has bf16: from sm_80 up, and on every AMD Instinct in the catalogue."""
    numbers = parse_capability(compute_capability)
    return numbers is None or numbers[0] >= FIRST_BF16_MAJOR


def cores_per_multiprocessor(compute_capability: str) -> int | None:
    """Return fp32 lanes per multiprocessor; None for an unknown generation."""
    major = compute_capability.split(".", maxsplit=1)[0]
    table = CORES_PER_MULTIPROCESSOR
    return table.get(compute_capability, table.get(major))


def instruction_rate(device: Device) -> float | None:
    """Return how many instructions of single threads a device starts in a second; None without its peak.

    It is multiprocessors x clock x ISSUED_PER_CLOCK, with multiprocessors x clock from the fp32 peak.
    """
    if device.peaks.fp32 is None:
        return None
    issued = ISSUED_PER_CLOCK.get(device.vendor, ISSUED_PER_CLOCK[Vendor.NVIDIA])
    lanes = cores_per_multiprocessor(device.compute_capability or "") or issued
    return device.peaks.fp32 / 2 / lanes * issued


@cache
def matmul_share(model: str | None) -> float | None:
    """Return the share of the bf16 peak that the best products reach on a device; None if nobody measured it.

    Without bf16 it is that of fp16. The figures are the best of many shapes. Those of A100 to B300 and of AMD
    are from stas00/ml-engineering (2026-08), those of 12 GeForce, workstation and PCIe cards from
    mag-/gpu_benchmark (2024-10), those of T4, V100, H20, RTX 50 and other GeForce cards from
    zzc0721/torch-performance-test-data (2026-01), which has squares of 1,024 to 10,240 only. Where two have
    a card, they differ by up to 7 %. An A100 reaches 0.87 of its peak, an H200 0.80, a T4 0.66, and GeForce
    cards, which run above their specified boost clock, 1.08 and more.

    >>> round(matmul_share("A100 80GB SXM4"), 3), round(matmul_share("GeForce RTX 4090"), 3)
    (0.869, 1.082)
    >>> matmul_share("A40") is None
    True
    """
    row = next((row for row in devices() if row.name == model), None)
    peak = row and (row.bf16 or row.fp16)
    return row.matmul_tflops / peak if row and row.matmul_tflops and peak else None


@cache
def matmul_fp32_share(model: str | None) -> float | None:
    """Return the share of the fp32 peak that the best fp32 products reach; None if nobody measured it.

    An A100 reaches nearly all of it, an H200 three quarters, an L40S half.

    >>> round(matmul_fp32_share("A100 80GB SXM4"), 2), round(matmul_fp32_share("H200 SXM 141GB"), 2)
    (0.98, 0.77)
    """
    row = next((row for row in devices() if row.name == model), None)
    return row.matmul_fp32_tflops / row.fp32 if row and row.matmul_fp32_tflops and row.fp32 else None


def row_peaks(row: DeviceRow) -> Peaks:
    """Return the row's peaks in operations per second."""
    rates = {key: getattr(row, key) for key in Peaks.__struct_fields__}
    return Peaks(**{key: rate * 1e12 if rate else None for key, rate in rates.items()})


def row_vendor(row: DeviceRow) -> Vendor:
    """Return the vendor of a row."""
    return Vendor(row.vendor)


def row_facts(row: DeviceRow) -> CatalogDevice:
    """Return a row in bytes and operations per second, with its source."""
    return CatalogDevice(
        name=row.typed[0],
        model=row.name,
        also=(*row.typed[1:], *(driver for driver in row.drivers if driver not in row.typed)),
        vendor=row.vendor,
        compute_capability=row.compute_capability,
        bf16=has_bf16(row.compute_capability),
        memory_bytes=row.usable_bytes,
        bandwidth_bytes_per_s=row.bandwidth_gbs * 1e9,
        peaks=row_peaks(row),
        source=row.source,
        memory_source=row.usable_source or None,
        verification=tuple(row.verification),
    )


WITHOUT_TENSOR_CORES = re.compile(
    r"\b(GTX 16\d\d|MX ?[45]\d\d|T(400|500|550|600|1000|1200|2000))\b", re.IGNORECASE
)
"""Turing chips of compute capability 7.5 that have no tensor cores (TU116, TU117), by their names."""


def derive_peaks(name: str, compute_capability: str, multiprocessors: int, clock_hz: float) -> Peaks | None:
    """Derive the peaks of an NVIDIA device that is not in the catalogue from its properties.

    multiprocessors x clock x FLOP_PER_CLOCK, halved for a GeForce; bf16 equals fp16 from sm_80, tf32 is half
    of it (on a GeForce that equals fp32), fp8 twice it from sm_89. None for a generation with no known rate;
    fp32 alone for the Turing chips without tensor cores.
    The clock a driver reports is the highest, not the specified one: 8 % above it on an H100, 23 % on an
    RTX 4090, so the peaks are too high by as much.

    >>> derive_peaks("NVIDIA H100", "9.0", 132, 1.83e9).bf16 / 1e12
    989.42976
    """
    rate, lanes = FLOP_PER_CLOCK.get(compute_capability), cores_per_multiprocessor(compute_capability)
    numbers = parse_capability(compute_capability)
    if rate is None or lanes is None or numbers is None:
        return None
    if compute_capability == "7.5" and WITHOUT_TENSOR_CORES.search(name):
        return Peaks(fp32=multiprocessors * clock_hz * lanes * 2)
    half = "geforce" in name.lower()
    fp16 = multiprocessors * clock_hz * rate / (2 if half else 1)
    ampere = numbers[0] >= FIRST_BF16_MAJOR
    return Peaks(
        fp32=multiprocessors * clock_hz * lanes * 2,
        tf32=fp16 / 2 if ampere else None,
        fp16=fp16,
        bf16=fp16 if ampere else None,
        fp8=fp16 * 2 if numbers >= FIRST_FP8 else None,
    )


def derive_bandwidth(bus_width_bits: int, memory_clock_hz: float) -> float:
    """Derive memory bandwidth from bus width and memory clock, with two transfers per clock.

    The driver's memory clock already includes the factors of GDDR6X and HBM3e.

    >>> round(derive_bandwidth(384, 10501e6) / 1e9), round(derive_bandwidth(5120, 1593e6) / 1e9)
    (1008, 2039)
    """
    return bus_width_bits / 8 * memory_clock_hz * 2
