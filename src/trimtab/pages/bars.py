"""Figures made of bars: parts of a whole, one bar a count, and predictions beside measurements."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.pages.drawing import (
    LETTER,
    Frame,
    Tick,
    draw_axes,
    draw_box,
    draw_dot,
    draw_line,
    draw_mark,
    draw_svg,
    draw_text,
    fit_label,
    is_narrow,
)
from trimtab.pages.markup import Markup, join_markup
from trimtab.pages.scales import Scale

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
    """A value that is not to be passed, or is to be known of."""

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
    """One figure as it was predicted and as it was measured."""

    name: str
    ratio: float
    """Measured over predicted."""
    predicted: str
    measured: str


def draw_stack(
    label: str, slices: list[BarPart], limits: list[LimitLine], *, whole: float, width: int
) -> Markup:
    """Parts of a whole in one bar, then one row a part: its name, its own bar and its value."""
    across = Scale(0, whole or 1.0, 0, width - 1)
    top, thick = 30.0, 34.0
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
    first = top + thick + 34
    return draw_svg(label, width, first + ROW * len(slices), *parts, _draw_rows(slices, first, width))


def _draw_rows(slices: list[BarPart], first: float, width: int) -> Markup:
    """One row a part."""
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
    """One bar a count, its value above it, and a line that is not to be passed."""
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
    said = ", ".join(part for part in (column.shown, column.note) if part)
    return draw_mark(
        f"{column.label}: {said}",
        draw_box(middle - thick / 2, top, thick, frame.bottom - top, f"bar {column.kind}"),
        draw_text(middle, top - 6, fit_label(column.shown, step), class_="value", anchor="middle"),
        below,
    )


def draw_ratios(label: str, rows: list[Ratio], *, width: int) -> Markup:
    """Measured over predicted, one row a figure, around the line where they agree."""
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
