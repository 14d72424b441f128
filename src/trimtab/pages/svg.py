"""Draw SVG: markup, scales, axes, labels, and marks that say their value.

Text is escaped on its way into markup, so that nothing in it can become markup. You can point at a mark or
reach it with the keyboard; screen readers get its text. All looks are in style.css, by class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from trimtab.render import escape_control
from trimtab.units import GIB, KIB, MIB

VOID = ("meta", "br")
"""Elements without an end."""


class Markup(str):
    """Text that is HTML already; everything else is escaped when it is put into markup."""

    __slots__ = ()


def escape_text(value: object) -> Markup:
    r"""Escape a value: markup in it is shown as text, control characters are spelt out.

    >>> escape_text('<b>"hi"</b>\x1b[31m')
    '&lt;b&gt;&quot;hi&quot;&lt;/b&gt;\\x1b[31m'
    """
    return value if isinstance(value, Markup) else Markup(escape(escape_control(str(value)), quote=True))


def join_markup(parts: object, between: str = "") -> Markup:
    """Join several parts."""
    return Markup(between.join(escape_text(part) for part in parts))  # type: ignore[attr-defined]


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """Build an element. `class_` is the attribute class, underscores are hyphens, None omits an attribute.

    >>> tag("p", "1 < 2", class_="note", data_tip='"')
    '<p class="note" data-tip="&quot;">1 &lt; 2</p>'
    """
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(escape_text(child) for child in children if child is not None)
    if not inner and name in VOID:
        return Markup(f"<{name}{attribute_text}>")
    return Markup(f"<{name}{attribute_text}>{inner}</{name}>")


def _attribute(value: object) -> str:
    return (
        format_coordinate(value)
        if isinstance(value, float)
        else escape(escape_control(str(value)), quote=True)
    )


def format_coordinate(value: float) -> str:
    """Format a coordinate, short and the same on every machine.

    >>> format_coordinate(1.0), format_coordinate(2.345), format_coordinate(-0.001)
    ('1', '2.3', '0')
    """
    short = f"{value:.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


@dataclass(frozen=True)
class Scale:
    """A linear scale from values to places.

    >>> Scale(0, 10, 100, 200).at(5)
    150.0
    """

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the place of a value; the middle if the scale has a single value."""
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers from low to high, about `count` of them.

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
    """Return a round number at or above all values, for an axis that begins at zero.

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
    """Pick the unit for an axis of bytes.

    >>> pick_byte_unit(3 * 2**30)
    (1073741824, 'GiB')
    """
    units = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
    return next(((size, name) for size, name in units if most >= size), (1, "B"))


def pick_time_unit(most_s: float) -> tuple[float, str]:
    """Pick the unit for an axis of time.

    >>> pick_time_unit(7200), pick_time_unit(0.2)
    ((3600.0, 'hours'), (0.001, 'ms'))
    """
    units = ((86400.0 * 2, 86400.0, "days"), (3600.0, 3600.0, "hours"), (120.0, 60.0, "minutes"))
    longer = next(((size, name) for least, size, name in units if most_s >= least), None)
    return longer or ((1.0, "s") if most_s >= 1 else (1e-3, "ms"))


def format_number(value: float) -> str:
    """Format a number for an axis or a table, in as few digits as it needs.

    >>> [format_number(value) for value in (1200.0, 0.25, 3.0, 1e-7, 2.5e9)]
    ['1,200', '0.25', '3', '1e-07', '2.5e+09']
    """
    size = abs(value)
    if size >= 1e7 or 0 < size < 1e-4:  # noqa: PLR2004 - beyond these, powers of ten read better
        return f"{value:.3g}"
    if size >= 100 or value == int(value):  # noqa: PLR2004 - three digits are enough
        return f"{value:,.0f}"
    return f"{value:.4g}" if size < 1 else f"{value:.3g}"


LETTER = 6.3
"""About the width of a letter in a label."""
BOLD_LETTER = 7.2
"""The same where letters are bold, with room to the next label."""
WIDE, NARROW = 840, 360
"""Widths that figures are drawn for: a page or a window, and a phone."""


@dataclass(frozen=True)
class Tick:
    """A round number beside an axis."""

    value: float
    label: str


@dataclass(frozen=True)
class Frame:
    """The area within the axes."""

    left: float
    right: float
    top: float
    bottom: float

    def scales(self, x: tuple[float, float], y: tuple[float, float]) -> tuple[Scale, Scale]:
        """Return the scales along and up."""
        return Scale(*x, self.left, self.right), Scale(*y, self.bottom, self.top)


class Labels:
    """Places for labels that do not overlap."""

    TALL = 14.0
    TRIES = (0, -1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6)
    """Lines further up or down, the nearest first."""

    def __init__(self, left: float, right: float, top: float, bottom: float) -> None:
        self._bounds = left, right, top, bottom
        self._taken: list[tuple[float, float, float, float]] = []

    def place(self, x: float, y: float, text: str, *, anchor: str = "start") -> float | None:
        """Return the baseline nearest to `y` where the label fits and overlaps no other, or None."""
        left, right, top, bottom = self._bounds
        wide = len(text) * BOLD_LETTER
        begin = x if anchor == "start" else x - wide if anchor == "end" else x - wide / 2
        if begin < left or begin + wide > right:
            return None
        for step in self.TRIES:
            base = y + step * self.TALL
            area = (begin, begin + wide, base - self.TALL + 3, base + 3)
            if (
                area[2] >= top
                and area[3] <= bottom
                and not any(_overlap(area, other) for other in self._taken)
            ):
                self._taken.append(area)
                return base
        return None


def _overlap(area: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return area[0] < other[1] and other[0] < area[1] and area[2] < other[3] and other[2] < area[3]


def is_narrow(width: int) -> bool:
    """Return whether a drawing is for a phone."""
    return width < (WIDE + NARROW) / 2


def draw_svg(label: str, width: int, height: float, *parts: object) -> Markup:
    """Draw a whole SVG; the tab key reaches the first of its marks."""
    inner = Markup(join_markup(parts).replace('tabindex="-1"', 'tabindex="0"', 1))
    return tag(
        "svg",
        inner,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height:.0f}",
        width=width,
        height=f"{height:.0f}",
        role="group",
        aria_label=label,
        class_=f"chart {'narrow' if is_narrow(width) else 'wide'}",
    )


def draw_mark(says: str, *shapes: object) -> Markup:
    """Draw shapes that stand for a value, with its text."""
    return tag("g", *shapes, tag("title", says), class_="mark", tabindex=-1, role="img", aria_label=says)


def draw_text(x: float, y: float, text: object, *, class_: str = "label", anchor: str = "start") -> Markup:
    """Draw a label."""
    return tag(
        "text",
        text,
        x=float(x),
        y=float(y),
        class_=class_,
        text_anchor=None if anchor == "start" else anchor,
    )


def draw_line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Draw a straight line."""
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def draw_box(x: float, y: float, width: float, height: float, class_: str) -> Markup:
    """Draw a rectangle; negative sizes become zero."""
    return tag(
        "rect",
        x=float(x),
        y=float(y),
        width=float(max(width, 0.0)),
        height=float(max(height, 0.0)),
        class_=class_,
    )


def draw_dot(x: float, y: float, radius: float, class_: str) -> Markup:
    """Draw a point."""
    return tag("circle", cx=float(x), cy=float(y), r=float(radius), class_=class_)


def draw_path(points: list[tuple[float, float]], class_: str, *, closed: bool = False) -> Markup:
    """Draw a line through points; fewer than two draw nothing."""
    if len(points) < 2:  # noqa: PLR2004 - a line has two ends
        return Markup("")
    steps = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return tag("path", d=f"M{steps}{'Z' * closed}", class_=class_)


def draw_axes(  # noqa: PLR0913 - two axes, each with its numbers and its name
    frame: Frame,
    x: Scale,
    y: Scale,
    *,
    along: list[Tick],
    up: list[Tick],
    along_name: str,
    up_name: str,
    below_by: float = 36,
) -> Markup:
    """Draw grid lines, ticks, and the names and units of both axes."""
    across = [
        join_markup(
            (
                draw_line(frame.left, y.at(tick.value), frame.right, y.at(tick.value), "grid"),
                draw_text(frame.left - 8, y.at(tick.value) + 4, tick.label, class_="tick", anchor="end"),
            )
        )
        for tick in up
    ]
    below = [
        draw_text(x.at(tick.value), frame.bottom + 18, tick.label, class_="tick", anchor="middle")
        for tick in along
    ]
    return join_markup(
        (
            *across,
            draw_line(frame.left, frame.bottom, frame.right, frame.bottom, "axis"),
            *below,
            draw_text(frame.right, frame.bottom + below_by, along_name, class_="name", anchor="end"),
            draw_text(frame.left - 8, frame.top - 12, up_name, class_="name", anchor="start"),
        )
    )


def fit_label(text: str, room: float) -> str:
    """Cut a label to the room that there is.

    >>> fit_label("activations", 45), fit_label("activations", 100)
    ('activa…', 'activations')
    """
    most = int(room / LETTER)
    return text if len(text) <= most else text[: max(most - 1, 0)].rstrip() + "…"
