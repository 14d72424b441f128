"""From a run to figures: loss, speed and memory over its steps, and what was predicted beside what came."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from trimtab.pages.bars import LimitLine, Ratio, draw_ratios
from trimtab.pages.curves import Axis, Point, ValueBand, draw_curve
from trimtab.pages.figures import Figure, Row, format_seconds, make_ticks, pick_evenly
from trimtab.pages.scales import format_number, pick_byte_unit, round_up
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.pages.story import Profile
    from trimtab.spec import Incident, Plan
    from trimtab.training.meters import Line

MOST_BUCKETS = 400
"""Stretches that a line of many steps is cut into."""
WARM_UP = 3
"""Steps at the beginning that say nothing about speed: kernels are chosen, memory is taken."""
MOST_EVENTS = 200
"""Marked in a figure; the table has them all."""


def loss_figure(lines: Sequence[Line], events: Sequence[Incident]) -> Figure | None:
    """The loss over steps, with validation and events."""
    told = _keep_finite((line.step, line.loss) for line in lines)
    checks = _keep_finite((line.step, line.validation_loss) for line in lines)
    if not told:
        return None
    band = bucket_steps(told)
    values = [value for _, value in checks]
    low, high = min([*band.low, *values]), max([*band.high, *values])
    # A loss near zero is drawn from zero; one that never comes near it would be a flat line there.
    base = 0.0 if 0 <= low < high / 2 else low
    (first, began), (last, ended) = told[0], told[-1]
    says = f"Loss {format_number(began)} at step {first:,}, {format_number(ended)} at step {last:,}"
    says += f"; validation {format_number(checks[-1][1])}." if checks else "."
    notes = [
        Point(step, value, f"step {step:,}: validation {format_number(value)}", "check")
        for step, value in checks
    ]
    marked = [
        Point(event.step, base, f"step {event.step:,}: {event.kind}: {event.why}; {event.done}", "warned")
        for event in events
        if event.step is not None and first <= event.step <= last
    ]
    return Figure(
        "loss",
        "Loss",
        says,
        lambda width: draw_curve(
            "Loss over steps",
            band,
            _step_axis(first, last),
            Axis("loss", make_ticks(base, high), base, high),
            says=_describe_steps("loss", band, format_number),
            notes=[notes[index] for index in pick_evenly(len(notes), MOST_EVENTS)],
            events=[marked[index] for index in pick_evenly(len(marked), MOST_EVENTS)],
            limits=[],
            width=width,
        ),
        ("step", "lowest", "mean", "highest"),
        _band_rows(band, format_number),
    )


def speed_figure(lines: Sequence[Line], plan: Plan | None) -> Figure | None:
    """Samples a second over steps, beside what the plan expects."""
    told = _keep_finite((line.step, line.samples_per_s) for line in lines)
    if not told:
        return None
    band = bucket_steps(told)
    expected = plan.estimate.samples_per_s if plan is not None else None
    usual = statistics.median(value for _, value in told[WARM_UP:] or told)
    top = round_up([*band.high, expected or 0.0])
    says = f"The median step makes {format_number(usual)} samples/s"
    says += (
        f"; the plan expects {format_number(expected)} ({usual / expected - 1:+.1%})." if expected else "."
    )
    return Figure(
        "speed",
        "Speed",
        says,
        lambda width: draw_curve(
            "Samples a second over steps",
            band,
            _step_axis(told[0][0], told[-1][0]),
            Axis("samples/s", make_ticks(0, top), 0, top),
            says=_describe_steps("samples/s", band, format_number),
            notes=[],
            events=[],
            limits=[LimitLine(expected, f"plan: {format_number(expected)}", "band")] if expected else [],
            width=width,
        ),
        ("step", "lowest", "mean", "highest"),
        _band_rows(band, format_number),
    )


def reserved_figure(lines: Sequence[Line], plan: Plan | None) -> Figure | None:
    """Memory that the allocator holds over steps, beside the plan's."""
    told = _keep_finite((line.step, line.reserved_bytes) for line in lines)
    if not told or not any(value for _, value in told):
        return None
    expected = plan.estimate.reserved_bytes if plan is not None else 0
    size, unit = pick_byte_unit(max([value for _, value in told] + [expected]))
    band = bucket_steps([(step, value / size) for step, value in told])
    top = round_up([*band.high, expected / size])
    most = max(value for _, value in told)
    says = f"At most {format_bytes(most)} were reserved"
    says += f"; the plan expects {format_bytes(expected)} ({most / expected - 1:+.1%})." if expected else "."

    def shown(value: float) -> str:
        return format_bytes(value * size)

    return Figure(
        "occupied",
        "Memory over the run",
        says,
        lambda width: draw_curve(
            "Reserved memory over steps",
            band,
            _step_axis(told[0][0], told[-1][0]),
            Axis(f"reserved, {unit}", make_ticks(0, top), 0, top),
            says=_describe_steps("reserved", band, shown),
            notes=[],
            events=[],
            limits=[LimitLine(expected / size, f"plan: {format_bytes(expected)}", "band")]
            if expected
            else [],
            width=width,
        ),
        ("step", "lowest", "mean", "highest"),
        _band_rows(band, shown),
    )


def comparison_figure(pairs: Sequence[tuple[str, float, float]]) -> Figure | None:
    """Predicted beside measured, as shares of what was predicted."""
    rows = [
        Ratio(
            _field_name(field),
            measured / predicted,
            _format_field(field, predicted),
            _format_field(field, measured),
        )
        for field, predicted, measured in pairs
        if predicted > 0 and measured > 0
    ]
    if not rows:
        return None
    furthest = max(rows, key=lambda row: abs(row.ratio - 1))
    return Figure(
        "compared",
        "Predicted against measured",
        f"Furthest from the prediction is {furthest.name}: {furthest.ratio - 1:+.1%}.",
        lambda width: draw_ratios("Measured as a share of predicted", rows, width=width),
        ("figure", "predicted", "measured", "difference"),
        tuple((row.name, row.predicted, row.measured, f"{row.ratio - 1:+.2%}") for row in rows),
    )


def compare_run(lines: Sequence[Line], plan: Plan | None) -> list[tuple[str, float, float]]:
    """What the plan expects and what the steps of a run came to, where both are known.

    Steps of another batch than the plan's say nothing about its step, so only those count that have its
    samples, its processes and no second attempt.
    """
    if plan is None:
        return []
    estimate, choice = plan.estimate, plan.choice
    alike = [
        line
        for line in lines[WARM_UP:] or lines
        if line.gpus == choice.gpus
        and line.samples == choice.global_batch
        and line.attempts == 1
        and not line.skipped
    ]
    found: list[tuple[str, float | None, float | None]] = [
        ("step_s", estimate.step_s, _median([line.time_s for line in alike])),
        ("samples_per_s", estimate.samples_per_s, _median([line.samples_per_s for line in alike])),
    ]
    for field in ("allocated_bytes", "reserved_bytes"):
        seen = [value for line in alike if (value := getattr(line, field)) is not None]
        found.append((field, getattr(estimate, field), max(seen, default=None)))
    return [(field, guess, truth) for field, guess, truth in found if guess and truth]


def compare_profile(found: Profile) -> list[tuple[str, float, float]]:
    """The figures that were both predicted and measured."""
    return [
        (field, guess, truth)
        for field, guess in found.predicted.items()
        if guess is not None and (truth := found.measured.get(field)) is not None
    ]


def bucket_steps(told: Sequence[tuple[int, float]], most: int = MOST_BUCKETS) -> ValueBand:
    """A line through many steps as the mean of stretches, with the lowest and highest of each.

    >>> bucket_steps([(1, 4.0), (2, 2.0), (3, 3.0)], most=2)
    ValueBand(xs=(2.0, 3.0), low=(2.0, 3.0), middle=(3.0, 3.0), high=(4.0, 3.0))
    """
    size = max(1, -(-len(told) // most))
    stretches = [told[begin : begin + size] for begin in range(0, len(told), size)]
    values = [[value for _, value in stretch] for stretch in stretches]
    return ValueBand(
        tuple(float(stretch[-1][0]) for stretch in stretches),
        tuple(min(group) for group in values),
        tuple(math.fsum(group) / len(group) for group in values),
        tuple(max(group) for group in values),
    )


def _keep_finite(told: object) -> list[tuple[int, float]]:
    """Those with a value that can be drawn."""
    return [
        (step, float(value))
        for step, value in told  # type: ignore[attr-defined]
        if value is not None and math.isfinite(value)
    ]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _step_axis(first: int, last: int) -> Axis:
    whole = [tick for tick in make_ticks(first, last) if tick.value == int(tick.value)]
    return Axis("optimizer steps", whole, float(first), float(last))


def _describe_steps(name: str, band: ValueBand, shown: Callable[[float], str]) -> list[str]:
    """What each place along a line says."""
    return [
        f"step {at:,.0f}: {name} {shown(middle)}"
        + (f" ({shown(low)} to {shown(high)})" if low < high else "")
        for at, low, middle, high in zip(band.xs, band.low, band.middle, band.high, strict=True)
    ]


def _band_rows(band: ValueBand, shown: Callable[[float], str]) -> tuple[Row, ...]:
    return tuple(
        (f"{band.xs[i]:,.0f}", shown(band.low[i]), shown(band.middle[i]), shown(band.high[i]))
        for i in pick_evenly(len(band.xs))
    )


def _field_name(field: str) -> str:
    return {"step_s": "step time", "samples_per_s": "samples/s"}.get(
        field, field.removesuffix("_bytes").replace("_", " ")
    )


def _format_field(field: str, value: float) -> str:
    if field.endswith("_bytes"):
        return format_bytes(value)
    return format_number(value) if field.endswith("per_s") else format_seconds(value)
