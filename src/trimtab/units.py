"""Parse and format sizes, durations and rates.

All other modules count in bytes, seconds and operations; GiB, hours and TFLOP/s exist only here. A GiB is
2**30 bytes and a GB is 10**9: 80 GB is 74.5 GiB.
"""

from __future__ import annotations

import math
import re

from trimtab.errors import WrongUse, shorten

KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

_BYTES_PER = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_AMBIGUOUS = {"k": "K", "m": "M", "g": "G", "t": "T"}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)\s*")

_SECONDS_PER = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(
    r"\s*(?:(\d+(?:\.\d+)?)\s*d)?\s*(?:(\d+(?:\.\d+)?)\s*h)?"
    r"\s*(?:(\d+(?:\.\d+)?)\s*m)?\s*(?:(\d+(?:\.\d+)?)\s*s)?\s*",
    re.IGNORECASE,
)
_SIZE_CURE = "Write a number and a unit: 80GB (10^9 bytes) or 74.5GiB (2^30 bytes)."
_DURATION_CURE = "Write it like 12h, 90m, 45s or 1d6h."


def parse_bytes(text: str) -> int:
    """Return the bytes of a size that a user typed.

    >>> parse_bytes("80GB"), parse_bytes("1.5 GiB"), parse_bytes("512")
    (80000000000, 1610612736, 512)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise WrongUse(f"size {text!r}", found="it is not a size", cure=_SIZE_CURE)
    number, unit = match.group(1), match.group(2).lower()
    if unit in _AMBIGUOUS:
        letter = _AMBIGUOUS[unit]
        raise WrongUse(
            f"size {text!r}",
            found=f"{letter} may mean {letter}B (decimal) or {letter}iB (binary)",
            cure=f"Write {number}{letter}B or {number}{letter}iB.",
        )
    if unit and unit not in _BYTES_PER:
        raise WrongUse(f"size {text!r}", found=f"{match.group(2)} is not a unit", cure=_SIZE_CURE)
    return round(float(number) * _BYTES_PER.get(unit, 1))


LARGEST_COUNT = 10**18
"""Larger numbers count nothing in a training: they are mistakes or damage."""


def parse_whole(text: str) -> int | None:
    """Return a whole number from 0 up in ASCII digits; None for anything else.

    >>> parse_whole(" 12 "), parse_whole(chr(0xB2)), parse_whole("-1"), parse_whole("9" * 30)
    (12, None, None, None)
    """
    match = re.fullmatch(r"\s*([0-9]{1,18})\s*", text)
    return int(match.group(1)) if match else None


def parse_duration(text: str, option: str = "duration") -> float:
    """Return the seconds of a duration that a user typed; an error names the option.

    >>> parse_duration("12h"), parse_duration("90m"), parse_duration("1d6h")
    (43200.0, 5400.0, 108000.0)
    """
    given, cure = f"{option} {shorten(text)!r}", _DURATION_CURE
    match = _DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        found = "it has no unit" if _is_number(text) else "it is not a duration"
        raise WrongUse(given, found=found, cure=cure)
    seconds = sum(
        float(number) * _SECONDS_PER[unit]
        for number, unit in zip(match.groups(), "dhms", strict=True)
        if number
    )
    if seconds <= 0:
        raise WrongUse(given, found="it is no time at all", cure=cure)
    return seconds


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def format_bytes(count: float, *, digits: int = 1) -> str:
    """Return bytes in the largest binary unit in which they are at least 1.

    >>> format_bytes(85 * 10**9), format_bytes(512), format_bytes(-3 * 2**20)
    ('79.2 GiB', '512 B', '-3.0 MiB')
    """
    units = ((1, "B"), (KIB, "KiB"), (MIB, "MiB"), (GIB, "GiB"), (TIB, "TiB"))
    # Compare what would be printed: 1023.96 MiB prints as 1.0 GiB, not as 1024.0 MiB.
    fitting = (unit for unit in units[:-1] if round(abs(count) / unit[0], digits) < KIB)
    size, name = next(fitting, units[-1])
    return f"{count:.0f} B" if size == 1 else f"{count / size:.{digits}f} {name}"


def format_gib(count: float) -> str:
    """Return bytes as a number of GiB without the unit, for columns with the heading GiB.

    >>> format_gib(85 * 10**9)
    '79.2'
    """
    return f"{count / GIB:.1f}"


def format_duration(seconds: float) -> str:
    """Return a duration in its one or two largest units; parse_duration reads it back.

    >>> format_duration(43200), format_duration(108000), format_duration(0.0123)
    ('12h', '1d6h', '0.012s')
    """
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"a duration is a number of seconds from 0 up, not {seconds}")
    if seconds < 1:
        return f"{seconds:.3f}s"
    if seconds < 10:  # noqa: PLR2004 - below ten seconds a tenth is worth showing
        short = f"{seconds:.1f}s"
        return short.replace(".0s", "s")
    whole = round(seconds)
    parts = [
        (whole // 86400, "d"),
        (whole % 86400 // 3600, "h"),
        (whole % 3600 // 60, "m"),
        (whole % 60, "s"),
    ]
    first = next(index for index, (number, _) in enumerate(parts) if number)
    return "".join(f"{number}{unit}" for number, unit in parts[first : first + 2] if number)


def format_flops(per_second: float) -> str:
    """Return an operation rate in TFLOP/s or PFLOP/s.

    >>> format_flops(989.4e12), format_flops(2.25e15), format_flops(8.1e12)
    ('989 TFLOP/s', '2.25 PFLOP/s', '8.1 TFLOP/s')
    """
    tera = per_second / 1e12
    if tera >= 1000:  # noqa: PLR2004
        return f"{tera / 1000:.2f} PFLOP/s"
    return f"{tera:.0f} TFLOP/s" if tera >= 100 else f"{tera:.1f} TFLOP/s"  # noqa: PLR2004


def format_figure(value: float) -> str:
    """Return a speed or another figure with three digits, and thousands separators.

    >>> format_figure(572_345.0), format_figure(31.27), format_figure(0.0532), format_figure(999.6)
    ('572,345', '31.3', '0.0532', '1,000')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004 - no decimals from there on


def format_seconds(seconds: float) -> str:
    """Return a short time with three digits.

    >>> format_seconds(0.04213), format_seconds(1.5), format_seconds(1390.4)
    ('42.1 ms', '1.5 s', '1,390 s')
    """
    return f"{format_figure(seconds * 1000)} ms" if seconds < 1 else f"{format_figure(seconds)} s"


def format_bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth in GB/s or TB/s, in decimal units as vendors state it.

    >>> format_bandwidth(3.35e12), format_bandwidth(31e9), format_bandwidth(1e12)
    ('3.35 TB/s', '31 GB/s', '1 TB/s')
    """
    giga = bytes_per_second / 1e9
    return f"{giga / 1000:.3g} TB/s" if giga >= 1000 else f"{giga:.3g} GB/s"  # noqa: PLR2004


def plural(count: int, noun: str, spec: str = "") -> str:
    """Return a count with its noun; `spec` formats the number.

    >>> plural(1, "GPU"), plural(4, "GPU"), plural(0, "node"), plural(1200, "block", ",")
    ('1 GPU', '4 GPUs', '0 nodes', '1,200 blocks')
    """
    return f"{count:{spec}} {noun}{'' if count == 1 else 's'}"


def format_value(value: object) -> str:
    """Return a value as users type it.

    >>> format_value(False), format_value(4)
    ('false', '4')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)
