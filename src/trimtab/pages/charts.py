"""Charts: stacked bars, columns, ratios, stacked layers, points, and lines over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.pages.svg import (
    BOLD_LETTER,
    LETTER,
    Frame,
    Labels,
    Markup,
    Scale,
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
    is_narrow,
    join_markup,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ROW = 26.0


@dataclass(frozen=True)
class BarPart:
    """A part of a whole."""

    name: str
    kind: str
    """Its class in style.css."""
    value: float
    shown: str


@dataclass(frozen=True)
class LimitLine:
    """A value that should not be exceeded, or that is worth knowing, drawn as a line."""

    value: float
    label: str
    kind: str = "limit"


@dataclass(frozen=True)
class BarColumn:
    """One upright bar."""

    label: str
    value: float | None
    """None where there is none, and `note` says why."""
    shown: str
    note: str = ""
    kind: str = "plain"


@dataclass(frozen=True)
class Ratio:
    """A value as it was predicted and as it was measured."""

    name: str
    ratio: float
    """Measured over predicted."""
    predicted: str
    measured: str


def draw_stack(  # noqa: PLR0913 - parts, limits, and the size of the drawing
    label: str,
    slices: list[BarPart],
    limits: list[LimitLine],
    *,
    whole: float,
    width: int,
    has_rows: bool = True,
) -> Markup:
    """Draw the parts of a whole in one bar, then one row a part: its name, its bar and its value.

    Without rows, the caller lists the parts itself.
    """
    across = Scale(0, whole or 1.0, 0, width - 1)
    top, thick = 30.0 if limits else 2.0, 34.0
    parts, begin = [draw_box(0, top, width - 1, thick, "outline")], 0.0
    for slice_ in slices:
        end = begin + slice_.value
        x = across.at(begin)
        parts.append(
            draw_mark(
                f"{slice_.name}: {slice_.shown}",
                draw_box(x, top, across.at(end) - x, thick, f"p-{slice_.kind}"),
            )
        )
        begin = end
    for index, limit in enumerate(limits):
        x = across.at(min(limit.value, whole))
        wide = len(limit.label) * LETTER
        anchor = "end" if x + wide > width or x > width / 2 else "start"
        y = top - 8 if index % 2 == 0 else top + thick + 16
        parts += [
            draw_line(x, top - 4, x, top + thick + 4, limit.kind),
            draw_text(
                x,
                y,
                fit_label(limit.label, x if anchor == "end" else width - x),
                class_="tick",
                anchor=anchor,
            ),
        ]
    if not has_rows:
        return draw_svg(label, width, top + thick + (24 if len(limits) > 1 else 4), *parts)
    first = top + thick + 34
    return draw_svg(label, width, first + ROW * len(slices), *parts, _draw_rows(slices, first, width))


def _draw_rows(slices: list[BarPart], first: float, width: int) -> Markup:
    """Draw one row for each part."""
    begin, end = (104.0, width - 78.0) if is_narrow(width) else (150.0, width - 110.0)
    most = max((slice_.value for slice_ in slices), default=1.0) or 1.0
    across = Scale(0, most, begin, end)
    rows = []
    for index, slice_ in enumerate(slices):
        y = first + ROW * index
        rows += [
            draw_text(0, y + 12, fit_label(slice_.name, begin - 8)),
            draw_box(begin, y + 3, max(across.at(slice_.value) - begin, 1.0), 11, f"p-{slice_.kind}"),
            draw_text(width, y + 12, slice_.shown, class_="value", anchor="end"),
        ]
    return join_markup(rows)


def draw_columns(  # noqa: PLR0913 - bars, the line across them, and the axis
    label: str,
    bars: list[BarColumn],
    limit: LimitLine | None,
    *,
    up: list[Tick],
    up_name: str,
    along_name: str,
    width: int,
) -> Markup:
    """Draw one bar for each count, its value above it, and a limit line."""
    frame = Frame(46, width - 8, 44, 250)
    highest = max(
        [tick.value for tick in up] + [bar.value or 0 for bar in bars] + ([limit.value] if limit else [])
    )
    x, y = frame.scales((-0.5, len(bars) - 0.5), (0, highest or 1.0))
    step = (frame.right - frame.left) / max(len(bars), 1)
    thick = min(step * 0.6, 72)
    parts: list[object] = [
        draw_axes(
            frame,
            x,
            y,
            along=[Tick(index, bar.label) for index, bar in enumerate(bars)],
            up=up,
            along_name=along_name,
            up_name=up_name,
            below_by=56,
        )
    ]
    parts += [_draw_column(bar, x.at(index), y, frame, thick, step) for index, bar in enumerate(bars)]
    if limit is not None:
        parts += [
            draw_line(frame.left, y.at(limit.value), frame.right, y.at(limit.value), limit.kind),
            draw_text(frame.right, y.at(limit.value) - 6, limit.label, class_="warn", anchor="end"),
        ]
    return draw_svg(label, width, frame.bottom + 64, *parts)


def _draw_column(  # noqa: PLR0913, PLR0917 - a bar and its place
    column: BarColumn, middle: float, y: Scale, frame: Frame, thick: float, step: float
) -> Markup:
    below = draw_text(middle, frame.bottom + 35, fit_label(column.note, step), class_="tick", anchor="middle")
    if column.value is None:
        shape = draw_text(
            middle, frame.bottom - 8, fit_label(column.shown, step), class_="tick", anchor="middle"
        )
        return draw_mark(f"{column.label}: {column.shown}", shape, below)
    top = y.at(column.value)
    text = ", ".join(part for part in (column.shown, column.note) if part)
    return draw_mark(
        f"{column.label}: {text}",
        draw_box(middle - thick / 2, top, thick, frame.bottom - top, f"bar {column.kind}"),
        draw_text(middle, top - 6, fit_label(column.shown, step), class_="value", anchor="middle"),
        below,
    )


def draw_ratios(label: str, rows: list[Ratio], *, width: int) -> Markup:
    """Draw measured over predicted, one row each, around the line where they are equal."""
    narrow = is_narrow(width)
    begin, end = (96.0, width - 12.0) if narrow else (150.0, width - 230.0)
    furthest = max([abs(row.ratio - 1) for row in rows] + [0.05])
    reach = min(furthest * 1.25, 1.0) if furthest <= 1 else furthest * 1.1
    across = Scale(1 - min(reach, 1.0), 1 + reach, begin, end)
    high = ROW * (1.6 if narrow else 1.2)
    bottom = 30 + high * len(rows)
    parts: list[object] = [draw_text(across.at(1), 14, "as predicted", class_="tick", anchor="middle")]
    parts.append(draw_line(across.at(1), 22, across.at(1), bottom, "axis"))
    for index, row in enumerate(rows):
        y = 40 + high * index
        says = f"{row.name}: predicted {row.predicted}, measured {row.measured} ({row.ratio - 1:+.1%})"
        parts += [
            draw_text(0, y + 4, fit_label(row.name, begin - 6)),
            draw_line(begin, y, end, y, "grid"),
            draw_mark(
                says,
                draw_line(across.at(1), y, across.at(row.ratio), y, "stem"),
                draw_dot(across.at(row.ratio), y, 6, "accent"),
            ),
        ]
        beside = f"{row.measured} ({row.ratio - 1:+.1%})"
        at, level, anchor = (begin, y + 18, "start") if narrow else (width, y + 4, "end")
        parts.append(draw_text(at, level, beside, class_="value", anchor=anchor))
    return draw_svg(label, width, bottom + 6, *parts)


MOST_MARKS = 64
"""Places along a line that can be pointed at; more would lie on one another."""
LABEL_ROOM = 15.0
"""How thick a layer is that its name fits into."""


@dataclass(frozen=True)
class Axis:
    """What an axis counts, its ticks and its range."""

    name: str
    ticks: list[Tick]
    low: float
    high: float


@dataclass(frozen=True)
class Layer:
    """One of several stacked layers."""

    name: str
    kind: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class ChartPoint:
    """A point with its text."""

    x: float
    y: float
    says: str
    kind: str = "plain"
    label: str = ""
    """Written beside it, for the few that need no pointing at."""


@dataclass(frozen=True)
class Front:
    """A line along the best points, with its name at the end."""

    name: str
    places: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ValueBand:
    """A line with its range."""

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
    notes: list[ChartPoint],
    width: int,
) -> Markup:
    """Draw stacked layers, each labelled where it is thickest."""
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
    """Draw a colour and a name for each layer; return the drawing and its height."""
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
    """Return a function that writes a layer's name at its thickest place, if it fits there."""
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
    dots: list[ChartPoint],
    fronts: list[Front],
    along: Axis,
    up: Axis,
    *,
    limit: LimitLine | None,
    width: int,
) -> Markup:
    """Draw points, with a line through those that no other point beats."""
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
    """Draw a point beyond the right end of the axis."""
    return draw_path([(right - 4, y - 5), (right + 3, y), (right - 4, y + 5)], "beyond")


def draw_curve(  # noqa: PLR0913 - a line with its range, both axes, and what to point out
    label: str,
    band: ValueBand,
    along: Axis,
    up: Axis,
    *,
    says: list[str],
    notes: list[ChartPoint],
    events: list[ChartPoint],
    limits: list[LimitLine],
    width: int,
) -> Markup:
    """Draw a line over steps with its range, limit lines, and events along the bottom."""
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
    """Draw places along a line that show their value, as many as can be distinguished."""
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


def _draw_note(note: ChartPoint, x: Scale, y: Scale, frame: Frame, labels: Labels) -> Markup:
    return join_markup(
        (
            draw_mark(note.says, draw_dot(x.at(note.x), y.at(note.y), 5, note.kind)),
            _draw_label(note, x, y, frame, labels),
        )
    )


def _draw_label(point: ChartPoint, x: Scale, y: Scale, frame: Frame, labels: Labels) -> Markup:
    """Draw the label of a point, on the side with room and clear of other labels."""
    if not point.label:
        return Markup("")
    at, wide = x.at(point.x), len(point.label) * BOLD_LETTER
    leftward = at + 12 + wide > frame.right
    room = at - 12 - frame.left if leftward else frame.right - at - 12
    place, anchor = (at - 12, "end") if leftward else (at + 12, "start")
    text = point.label if wide <= room else fit_label(point.label, room * LETTER / BOLD_LETTER)
    level = labels.place(place, y.at(point.y) - 10, text, anchor=anchor)
    return Markup("") if level is None else draw_text(place, level, text, class_="strong", anchor=anchor)


def _draw_front_name(front: Front, x: Scale, y: Scale, frame: Frame, labels: Labels) -> Markup:
    """Draw the name of a line at its end, or nothing if there is no room; the table has it too."""
    at, level = x.at(front.places[-1][0]), y.at(front.places[-1][1]) + 4
    leftward = at + 12 + len(front.name) * BOLD_LETTER > frame.right
    place, anchor = (at - 12, "end") if leftward else (at + 12, "start")
    level_found = labels.place(place, level, front.name, anchor=anchor)
    return (
        Markup("")
        if level_found is None
        else draw_text(place, level_found, front.name, class_="front", anchor=anchor)
    )
