"""From values to places on a drawing, and the round numbers to write beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.units import GIB, KIB, MIB


@dataclass(frozen=True)
class Scale:
    """A straight line from values to places.

    >>> Scale(0, 10, 100, 200).at(5)
    150.0
    """

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Where a value lies; all in the middle where there is one value only."""
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high, about as many as asked.

    >>> round_ticks(0, 38)
    [0.0, 10.0, 20.0, 30.0]
    >>> round_ticks(1.2, 1.9)
    [1.2, 1.4, 1.6, 1.8]
    """
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low] if math.isfinite(low) else []
    rough = span / max(count, 1)
    if rough < abs(high) * 1e-12 or rough < 1e-300:  # noqa: PLR2004 - floats have no finer steps to offer
        return [low, high]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # Three tenths are not 0.30000000000000004.
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def round_up(values: list[float]) -> float:
    """A round number at or above all of them, for an axis that begins at zero.

    >>> round_up([3.0, 17.2]), round_up([])
    (20.0, 1.0)
    """
    most = max(values, default=0.0)
    if most <= 0:
        return 1.0
    steps = round_ticks(0, most)
    step = steps[1] - steps[0] if len(steps) > 1 else most
    return math.ceil(most / step - 1e-9) * step


def pick_byte_unit(most: float) -> tuple[int, str]:
    """The unit that an axis of bytes is written in.

    >>> pick_byte_unit(3 * 2**30)
    (1073741824, 'GiB')
    """
    known = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    return next(((size, name) for size, name in known if most >= size), (1, "B"))


def pick_time_unit(most_s: float) -> tuple[float, str]:
    """The unit that an axis of time is written in.

    >>> pick_time_unit(7200), pick_time_unit(0.2)
    ((3600.0, 'hours'), (0.001, 'ms'))
    """
    known = ((86400.0 * 2, 86400.0, "days"), (3600.0, 3600.0, "hours"), (120.0, 60.0, "minutes"))
    longer = next(((size, name) for least, size, name in known if most_s >= least), None)
    return longer or ((1.0, "s") if most_s >= 1 else (1e-3, "ms"))


def format_number(value: float) -> str:
    """A number on an axis or in a table, in as few digits as it needs.

    >>> [format_number(value) for value in (1200.0, 0.25, 3.0, 1e-7, 2.5e9)]
    ['1,200', '0.25', '3', '1e-07', '2.5e+09']
    """
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:  # noqa: PLR2004 - beyond these, powers of ten read better
        return f"{value:.3g}"
    if size >= 100 or value == int(value):  # noqa: PLR2004 - three digits are enough
        return f"{value:,.0f}"
    return f"{value:.4g}" if size < 1 else f"{value:.3g}"
