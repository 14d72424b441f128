"""Figures of values along something: layers on one another, points, and lines over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.pages.drawing import (
    BOLD_LETTER,
    LETTER,
    Frame,
    Labels,
    Tick,
    draw_axes,
    draw_box,
    draw_dot,
    draw_line,
    draw_mark,
    draw_path,
    draw_svg,
    draw_text,
    fit_label,
)
from trimtab.pages.markup import Markup, join_markup

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.pages.bars import LimitLine
    from trimtab.pages.scales import Scale

MOST_MARKS = 64
"""Places along a line that can be pointed at; more would lie on one another."""
LABEL_ROOM = 15.0
"""How thick a layer is that its name fits into."""


@dataclass(frozen=True)
class Axis:
    """What is counted along or up a figure, and its round numbers."""

    name: str
    ticks: list[Tick]
    low: float
    high: float


@dataclass(frozen=True)
class Layer:
    """One of the layers that lie on one another."""

    name: str
    kind: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """A point with its words."""

    x: float
    y: float
    says: str
    kind: str = "plain"
    label: str = ""
    """Written beside it, for the few that need no pointing at."""


@dataclass(frozen=True)
class Front:
    """A line along the best of some points, with its name at the end."""

    name: str
    places: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ValueBand:
    """A line with the range that it runs through."""

    xs: tuple[float, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]


def draw_layers(  # noqa: PLR0913 - layers, both axes, and what to point out
    label: str,
    xs: tuple[float, ...],
    stacked: list[Layer],
    along: Axis,
    up: Axis,
    *,
    says: list[str],
    notes: list[Point],
    width: int,
) -> Markup:
    """Layers on one another, each named where it is thickest."""
    frame = Frame(46, width - 8, 44, 280)
    x, y = frame.scales((along.low, along.high), (up.low, up.high))
    parts: list[object] = [_draw_axes(frame, x, y, along, up)]
    names: list[Callable[[Labels], Markup | None]] = []
    below = [0.0] * len(xs)
    for layer in stacked:
        top = [under + value for under, value in zip(below, layer.values, strict=True)]
        edge = [(x.at(at), y.at(value)) for at, value in zip(xs, top, strict=True)]
        back = [(x.at(at), y.at(value)) for at, value in zip(reversed(xs), reversed(below), strict=True)]
        parts.append(draw_path([*edge, *back], f"p-{layer.kind}", closed=True))
        names += _label_layer(layer, xs, below, x, y)
        below = top
    labels = Labels(frame.left, frame.right + 8, 14, frame.bottom)
    marked = [_draw_note(note, x, y, frame, labels) for note in notes]
    # What is pointed out comes first; a layer that finds no room for its name has it in the key below.
    parts += [word for name in names if (word := name(labels))]
    parts += _draw_places([x.at(at) for at in xs], [y.at(value) for value in below], says, frame)
    parts += marked
    key, deep = _draw_key(stacked, frame.bottom + 62, width)
    return draw_svg(label, width, frame.bottom + 54 + deep, *parts, key)


def _draw_key(stacked: list[Layer], first: float, width: int) -> tuple[Markup, float]:
    """A colour and a name for each layer, in as many rows as they need, and how deep those are."""
    parts: list[object] = []
    at, y = 0.0, first
    for layer in stacked:
        wide = 18 + len(layer.name) * LETTER + 18
        if at and at + wide > width:
            at, y = 0.0, y + 20
        parts += [
            draw_box(at, y - 10, 11, 11, f"p-{layer.kind}"),
            draw_text(at + 17, y, layer.name, class_="tick"),
        ]
        at += wide
    return join_markup(parts), y - first + 14


def _label_layer(
    layer: Layer, xs: tuple[float, ...], below: list[float], x: Scale, y: Scale
) -> list[Callable[[Labels], Markup | None]]:
    """What writes the name of a layer at its thickest place, where it fits in and nothing else is written."""
    if not xs:
        return []
    thickest = max(range(len(xs)), key=lambda index: layer.values[index])
    tall = y.at(0) - y.at(layer.values[thickest])
    if tall < LABEL_ROOM:
        return []
    half = len(layer.name) * LETTER / 2 + 6
    left, right = min(x.start, x.end), max(x.start, x.end)
    middle = min(max(x.at(xs[thickest]), left + half), right - half)
    at = y.at(below[thickest] + layer.values[thickest] / 2) + 4

    def write(labels: Labels) -> Markup | None:
        # Moved up or down it would lie on another layer.
        if labels.place(middle, at, layer.name, anchor="middle") != at:
            return None
        return draw_text(middle, at, layer.name, class_=f"on on-{layer.kind}", anchor="middle")

    return [write]


def draw_points(  # noqa: PLR0913 - points, the line along the best, both axes, and what limits them
    label: str,
    dots: list[Point],
    fronts: list[Front],
    along: Axis,
    up: Axis,
    *,
    limit: LimitLine | None,
    width: int,
) -> Markup:
    """Points, with a line through those that no other beats."""
    frame = Frame(52, width - 12, 44, 300)
    x, y = frame.scales((along.low, along.high), (up.low, up.high))
    parts: list[object] = [_draw_axes(frame, x, y, along, up)]
    labels = Labels(0, frame.right + 12, frame.top - 24, frame.bottom)
    labels.place(frame.left - 8, frame.top - 12, up.name)
    if limit is not None and limit.value <= along.high:
        at = x.at(limit.value)
        place, anchor = (at - 6, "end") if at > width * 0.6 else (at + 6, "start")
        level = labels.place(place, frame.top - 4, limit.label, anchor=anchor)
        parts.append(draw_line(at, frame.top, at, frame.bottom, limit.kind))
        if level is not None:
            parts.append(draw_text(place, level, limit.label, class_="warn", anchor=anchor))
    parts += [
        draw_path([(x.at(across), y.at(two)) for across, two in front.places], "frontier") for front in fronts
    ]
    # The chosen one comes last, so that it lies on top of its neighbours.
    for point in sorted(dots, key=lambda dot: (dot.kind == "accent", dot.x, dot.y)):
        shape = (
            _draw_arrow(frame.right, y.at(point.y))
            if point.x > along.high
            else draw_dot(x.at(point.x), y.at(point.y), 7 if point.kind == "accent" else 4.5, point.kind)
        )
        reach = min(x.at(point.x), frame.right)
        parts += [
            draw_mark(point.says, draw_dot(reach, y.at(point.y), 11, "reach"), shape),
        ]
    parts += [_draw_label(point, x, y, frame, labels) for point in dots if point.kind == "accent"]
    parts += [_draw_label(point, x, y, frame, labels) for point in dots if point.kind != "accent"]
    parts += [_draw_front_name(front, x, y, frame, labels) for front in fronts]
    return draw_svg(label, width, frame.bottom + 44, *parts)


def _draw_arrow(right: float, y: float) -> Markup:
    """A point beyond the right end of the axis."""
    return draw_path([(right - 4, y - 5), (right + 3, y), (right - 4, y + 5)], "beyond")


def draw_curve(  # noqa: PLR0913 - a line with its range, both axes, and what to point out
    label: str,
    band: ValueBand,
    along: Axis,
    up: Axis,
    *,
    says: list[str],
    notes: list[Point],
    events: list[Point],
    limits: list[LimitLine],
    width: int,
) -> Markup:
    """A line over steps with the range around it, values to know of, and events along the bottom."""
    frame = Frame(52, width - 12, 44, 260)
    x, y = frame.scales((along.low, along.high), (up.low, up.high))
    parts: list[object] = [_draw_axes(frame, x, y, along, up)]
    for limit in limits:
        at = y.at(limit.value)
        parts += [
            draw_line(frame.left, at, frame.right, at, limit.kind),
            draw_text(
                frame.right,
                at - 6,
                fit_label(limit.label, frame.right - frame.left),
                class_="tick",
                anchor="end",
            ),
        ]
    over = [(x.at(at), y.at(value)) for at, value in zip(band.xs, band.high, strict=True)]
    under = [(x.at(at), y.at(value)) for at, value in zip(band.xs, band.low, strict=True)]
    middle = [(x.at(at), y.at(value)) for at, value in zip(band.xs, band.middle, strict=True)]
    parts += [draw_path([*over, *reversed(under)], "range", closed=True), draw_path(middle, "line")]
    if len(middle) == 1:
        parts.append(draw_dot(*middle[0], 4, "accent"))
    parts += _draw_places([across for across, _ in middle], [level for _, level in middle], says, frame)
    for note in notes:
        parts.append(draw_mark(note.says, draw_dot(x.at(note.x), y.at(note.y), 4, note.kind)))
    for event in events:
        at = x.at(event.x)
        parts.append(
            draw_mark(
                event.says,
                draw_line(at, frame.top, at, frame.bottom, "event"),
                draw_dot(at, frame.bottom, 5, "warned"),
            )
        )
    return draw_svg(label, width, frame.bottom + 44, *parts)


def _draw_axes(frame: Frame, x: Scale, y: Scale, along: Axis, up: Axis) -> Markup:
    return draw_axes(frame, x, y, along=along.ticks, up=up.ticks, along_name=along.name, up_name=up.name)


def _draw_places(xs: list[float], ys: list[float], says: list[str], frame: Frame) -> list[Markup]:
    """Places along a line that say their value: as many as can be told apart."""
    every = -(-len(xs) // MOST_MARKS) or 1
    chosen = list(range(0, len(xs), every))
    marks = []
    for place, index in enumerate(chosen):
        left = frame.left if place == 0 else (xs[index] + xs[chosen[place - 1]]) / 2
        right = frame.right if index == chosen[-1] else (xs[index] + xs[chosen[place + 1]]) / 2
        marks.append(
            draw_mark(
                says[index],
                draw_box(left, frame.top, right - left, frame.bottom - frame.top, "reach"),
                draw_line(xs[index], frame.top, xs[index], frame.bottom, "cursor"),
                draw_dot(xs[index], ys[index], 4, "cursor"),
            )
        )
    return marks


def _draw_note(note: Point, x: Scale, y: Scale, frame: Frame, labels: Labels) -> Markup:
    return join_markup(
        (
            draw_mark(note.says, draw_dot(x.at(note.x), y.at(note.y), 5, note.kind)),
            _draw_label(note, x, y, frame, labels),
        )
    )


def _draw_label(point: Point, x: Scale, y: Scale, frame: Frame, labels: Labels) -> Markup:
    """The label of a point, on the side where there is room for it and clear of other labels."""
    if not point.label:
        return Markup("")
    at, wide = x.at(point.x), len(point.label) * BOLD_LETTER
    leftward = at + 12 + wide > frame.right
    room = at - 12 - frame.left if leftward else frame.right - at - 12
    place, anchor = (at - 12, "end") if leftward else (at + 12, "start")
    said = point.label if wide <= room else fit_label(point.label, room * LETTER / BOLD_LETTER)
    level = labels.place(place, y.at(point.y) - 10, said, anchor=anchor)
    return Markup("") if level is None else draw_text(place, level, said, class_="strong", anchor=anchor)


def _draw_front_name(front: Front, x: Scale, y: Scale, frame: Frame, labels: Labels) -> Markup:
    """The name of a line at its end, on the side where there is room, or nowhere: the table has it too."""
    at, level = x.at(front.places[-1][0]), y.at(front.places[-1][1]) + 4
    leftward = at + 12 + len(front.name) * BOLD_LETTER > frame.right
    place, anchor = (at - 12, "end") if leftward else (at + 12, "start")
    found = labels.place(place, level, front.name, anchor=anchor)
    return Markup("") if found is None else draw_text(place, found, front.name, class_="front", anchor=anchor)
