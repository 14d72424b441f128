"""What every figure is drawn with: the sheet, axes, words, and marks that say their value.

A mark can be pointed at and reached by keys; its words are there for those who see no figure. Looks are in
style.css alone, by class.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.pages.markup import Markup, join_markup, tag
from trimtab.pages.scales import Scale

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
    """The place within the axes."""

    left: float
    right: float
    top: float
    bottom: float

    def scales(self, x: tuple[float, float], y: tuple[float, float]) -> tuple[Scale, Scale]:
        """From values to places, along and up."""
        return Scale(*x, self.left, self.right), Scale(*y, self.bottom, self.top)


class Labels:
    """Places for labels that do not lie on one another."""

    TALL = 14.0
    TRIES = (0, -1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6)
    """Lines further up or down, the nearest first."""

    def __init__(self, left: float, right: float, top: float, bottom: float) -> None:
        self._bounds = left, right, top, bottom
        self._taken: list[tuple[float, float, float, float]] = []

    def place(self, x: float, y: float, said: str, *, anchor: str = "start") -> float | None:
        """The baseline nearest to `y` where the label is inside and overlaps no other; None if none is."""
        left, right, top, bottom = self._bounds
        wide = len(said) * BOLD_LETTER
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
    """Whether a drawing is for a phone."""
    return width < (WIDE + NARROW) / 2


def draw_svg(label: str, width: int, height: float, *parts: object) -> Markup:
    """A whole drawing; the first of its marks is the one that the tab key comes to."""
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
    """Shapes that stand for a value, with the words for it."""
    return tag("g", *shapes, tag("title", says), class_="mark", tabindex=-1, role="img", aria_label=says)


def draw_text(x: float, y: float, said: object, *, class_: str = "label", anchor: str = "start") -> Markup:
    """A label."""
    return tag(
        "text",
        said,
        x=float(x),
        y=float(y),
        class_=class_,
        text_anchor=None if anchor == "start" else anchor,
    )


def draw_line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return tag("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=class_)


def draw_box(x: float, y: float, width: float, height: float, class_: str) -> Markup:
    """A rectangle; none has less than nothing."""
    return tag(
        "rect",
        x=float(x),
        y=float(y),
        width=float(max(width, 0.0)),
        height=float(max(height, 0.0)),
        class_=class_,
    )


def draw_dot(x: float, y: float, radius: float, class_: str) -> Markup:
    """A point."""
    return tag("circle", cx=float(x), cy=float(y), r=float(radius), class_=class_)


def draw_path(points: list[tuple[float, float]], class_: str, *, closed: bool = False) -> Markup:
    """A line through points; with fewer than two there is none."""
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
    """Lines across at every number of the upright axis, numbers, and what is counted in what unit."""
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


def fit_label(said: str, room: float) -> str:
    """As much of a label as there is room for.

    >>> fit_label("activations", 45), fit_label("activations", 100)
    ('activa…', 'activations')
    """
    most = int(room / LETTER)
    return said if len(said) <= most else said[: max(most - 1, 0)].rstrip() + "…"
