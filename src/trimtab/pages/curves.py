"""Figures of values along something: layers on one another, points, and lines over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.pages.drawing import (
    LETTER,
    Frame,
    Tick,
    axes,
    box,
    dot,
    fitted,
    is_narrow,
    line,
    mark,
    path,
    sheet,
    words,
)
from trimtab.pages.markup import Markup, join

if TYPE_CHECKING:
    from trimtab.pages.bars import Limit
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
class Dot:
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
class Band:
    """A line with the range that it runs through."""

    xs: tuple[float, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]


def layers(  # noqa: PLR0913 - layers, both axes, and what to point out
    label: str,
    xs: tuple[float, ...],
    stacked: list[Layer],
    along: Axis,
    up: Axis,
    *,
    says: list[str],
    notes: list[Dot],
    width: int,
) -> Markup:
    """Layers on one another, each named where it is thickest."""
    frame = Frame(46, width - 8, 44, 280)
    x, y = frame.scales((along.low, along.high), (up.low, up.high))
    parts: list[object] = [_axes(frame, x, y, along, up)]
    names: list[object] = []
    below = [0.0] * len(xs)
    for one in stacked:
        top = [under + value for under, value in zip(below, one.values, strict=True)]
        edge = [(x.at(at), y.at(value)) for at, value in zip(xs, top, strict=True)]
        back = [(x.at(at), y.at(value)) for at, value in zip(reversed(xs), reversed(below), strict=True)]
        parts.append(path([*edge, *back], f"p-{one.kind}", closed=True))
        names += _layer_name(one, xs, below, x, y)
        below = top
    parts += names
    parts += _places([x.at(at) for at in xs], [y.at(value) for value in below], says, frame)
    parts += [_note(one, x, y, frame) for one in notes]
    key, deep = _key(stacked, frame.bottom + 62, width)
    return sheet(label, width, frame.bottom + 54 + deep, *parts, key)


def _key(stacked: list[Layer], first: float, width: int) -> tuple[Markup, float]:
    """A colour and a name for each layer, in as many rows as they need, and how deep those are."""
    parts: list[object] = []
    at, y = 0.0, first
    for one in stacked:
        wide = 18 + len(one.name) * LETTER + 18
        if at and at + wide > width:
            at, y = 0.0, y + 20
        parts += [box(at, y - 10, 11, 11, f"p-{one.kind}"), words(at + 17, y, one.name, class_="tick")]
        at += wide
    return join(parts), y - first + 14


def _layer_name(one: Layer, xs: tuple[float, ...], below: list[float], x: Scale, y: Scale) -> list[Markup]:
    """The name of a layer at its thickest place, where it fits in."""
    if not xs:
        return []
    thickest = max(range(len(xs)), key=lambda index: one.values[index])
    tall = y.at(0) - y.at(one.values[thickest])
    if tall < LABEL_ROOM:
        return []
    half = len(one.name) * LETTER / 2 + 6
    left, right = min(x.start, x.end), max(x.start, x.end)
    middle = min(max(x.at(xs[thickest]), left + half), right - half)
    at = y.at(below[thickest] + one.values[thickest] / 2) + 4
    return [words(middle, at, one.name, class_=f"on on-{one.kind}", anchor="middle")]


def points(  # noqa: PLR0913 - points, the line along the best, both axes, and what limits them
    label: str,
    dots: list[Dot],
    fronts: list[Front],
    along: Axis,
    up: Axis,
    *,
    limit: Limit | None,
    width: int,
) -> Markup:
    """Points, with a line through those that no other beats."""
    frame = Frame(52, width - 12, 44, 300)
    x, y = frame.scales((along.low, along.high), (up.low, up.high))
    parts: list[object] = [_axes(frame, x, y, along, up)]
    if limit is not None and limit.value <= along.high:
        at = x.at(limit.value)
        anchor = "end" if at > width * 0.6 else "start"
        parts += [
            line(at, frame.top, at, frame.bottom, limit.kind),
            words(
                at + (-6 if anchor == "end" else 6), frame.top + 12, limit.label, class_="warn", anchor=anchor
            ),
        ]
    parts += [path([(x.at(one), y.at(two)) for one, two in front.places], "frontier") for front in fronts]
    # The chosen one comes last, so that it lies on top of its neighbours.
    for one in sorted(dots, key=lambda dot: (dot.kind == "accent", dot.x, dot.y)):
        shape = dot(x.at(one.x), y.at(one.y), 7 if one.kind == "accent" else 4.5, one.kind)
        parts += [
            mark(one.says, dot(x.at(one.x), y.at(one.y), 11, "reach"), shape),
            _beside(one, x, y, frame),
        ]
    for front in fronts:
        along_it, up_it = front.places[-1]
        parts.append(words(x.at(along_it) + 12, y.at(up_it) + 4, front.name, class_="tick"))
    return sheet(label, width, frame.bottom + 44, *parts)


def curve(  # noqa: PLR0913 - a line with its range, both axes, and what to point out
    label: str,
    band: Band,
    along: Axis,
    up: Axis,
    *,
    says: list[str],
    notes: list[Dot],
    events: list[Dot],
    limits: list[Limit],
    width: int,
) -> Markup:
    """A line over steps with the range around it, values to know of, and events along the bottom."""
    frame = Frame(52, width - 12, 44, 260)
    x, y = frame.scales((along.low, along.high), (up.low, up.high))
    parts: list[object] = [_axes(frame, x, y, along, up)]
    for limit in limits:
        at = y.at(limit.value)
        parts += [
            line(frame.left, at, frame.right, at, limit.kind),
            words(
                frame.right,
                at - 6,
                fitted(limit.label, frame.right - frame.left),
                class_="tick",
                anchor="end",
            ),
        ]
    over = [(x.at(at), y.at(value)) for at, value in zip(band.xs, band.high, strict=True)]
    under = [(x.at(at), y.at(value)) for at, value in zip(band.xs, band.low, strict=True)]
    middle = [(x.at(at), y.at(value)) for at, value in zip(band.xs, band.middle, strict=True)]
    parts += [path([*over, *reversed(under)], "range", closed=True), path(middle, "line")]
    if len(middle) == 1:
        parts.append(dot(*middle[0], 4, "accent"))
    parts += _places([one for one, _ in middle], [one for _, one in middle], says, frame)
    for one in notes:
        parts.append(mark(one.says, dot(x.at(one.x), y.at(one.y), 4, one.kind)))
    for one in events:
        at = x.at(one.x)
        parts.append(
            mark(one.says, line(at, frame.top, at, frame.bottom, "event"), dot(at, frame.bottom, 5, "warned"))
        )
    return sheet(label, width, frame.bottom + 44, *parts)


def _axes(frame: Frame, x: Scale, y: Scale, along: Axis, up: Axis) -> Markup:
    return axes(frame, x, y, along=along.ticks, up=up.ticks, along_name=along.name, up_name=up.name)


def _places(xs: list[float], ys: list[float], says: list[str], frame: Frame) -> list[Markup]:
    """Places along a line that say their value: as many as can be told apart."""
    every = -(-len(xs) // MOST_MARKS) or 1
    chosen = list(range(0, len(xs), every))
    marks = []
    for place, index in enumerate(chosen):
        left = frame.left if place == 0 else (xs[index] + xs[chosen[place - 1]]) / 2
        right = frame.right if index == chosen[-1] else (xs[index] + xs[chosen[place + 1]]) / 2
        marks.append(
            mark(
                says[index],
                box(left, frame.top, right - left, frame.bottom - frame.top, "reach"),
                line(xs[index], frame.top, xs[index], frame.bottom, "cursor"),
                dot(xs[index], ys[index], 4, "cursor"),
            )
        )
    return marks


def _note(one: Dot, x: Scale, y: Scale, frame: Frame) -> Markup:
    return join((mark(one.says, dot(x.at(one.x), y.at(one.y), 5, one.kind)), _beside(one, x, y, frame)))


def _beside(one: Dot, x: Scale, y: Scale, frame: Frame) -> Markup:
    """The label of a point, on the side where there is room for it."""
    if not one.label:
        return Markup("")
    at, wide = x.at(one.x), len(one.label) * LETTER
    leftward = at + 12 + wide > frame.right
    room = at - frame.left if leftward else frame.right - at
    place = at - 12 if leftward else at + 12
    return words(
        place,
        y.at(one.y) - 10,
        fitted(one.label, room),
        class_="strong",
        anchor="end" if leftward else "start",
    )


__all__ = ["Axis", "Band", "Dot", "Layer", "curve", "is_narrow", "layers", "points"]
