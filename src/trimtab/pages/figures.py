"""Figures of a plan or a run: what each says, how it is drawn, and the table behind it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.pages.charts import (
    Axis,
    BarColumn,
    BarPart,
    ChartPoint,
    Front,
    Layer,
    LimitLine,
    Ratio,
    ValueBand,
    draw_columns,
    draw_curve,
    draw_layers,
    draw_points,
    draw_ratios,
    draw_stack,
)
from trimtab.pages.svg import Tick, format_number, pick_byte_unit, pick_time_unit, round_ticks, round_up
from trimtab.render import describe_gradients, describe_setting
from trimtab.spec import PARTS, Comparison, Estimate, EstimatedSetting, Plan, Verdict
from trimtab.units import format_bytes, format_duration, format_figure, format_seconds, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.pages.report_data import Profile, ReportData
    from trimtab.pages.svg import Markup
    from trimtab.spec import Incident, StepTime
    from trimtab.training.step_log import StepLine

Row = tuple[str, ...]
MOST_ROWS = 60
"""Of the table behind a line of many steps."""
BEYOND = 1.5
"""Times the capacity of a GPU: what needs more is not worth room on an axis."""
FAR = 4
"""Times the largest memory looked at: a limit further off would squeeze all points into a corner."""
STATIC = ("weights", "optimizer", "gradients", "inputs", "communication", "activations", "workspace")
"""The order of layers from the ground up: what stays first, what comes and goes on top."""


@dataclass(frozen=True)
class Figure:
    """A figure with its sentence and the table behind it."""

    name: str
    """Of its file, and of its place on the page."""
    title: str
    says: str
    """What is to be seen in it, in a sentence."""
    draw: Callable[[int], Markup]
    """At a width."""
    headings: Row
    rows: tuple[Row, ...]


def list_memory_parts(estimate: Estimate) -> list[BarPart]:
    """Return the parts of a GPU's memory at the peak, and the blocks that torch keeps cached."""
    parts = {name: getattr(estimate.parts, name) for name in estimate.parts.__struct_fields__}
    parts["cached"] = max(0, estimate.process_bytes - estimate.parts.total)
    return [BarPart(name, name, value, format_bytes(value)) for name, value in parts.items() if value]


def list_time_parts(step: StepTime) -> list[BarPart]:
    """Return the parts of the time of a step."""
    names = {field: field.removesuffix("_s") for field in step.__struct_fields__}
    return [
        BarPart(name, name, getattr(step, field), format_seconds(getattr(step, field)))
        for field, name in names.items()
        if getattr(step, field)
    ]


def memory_figure(plan: Plan) -> Figure:
    """Show a GPU's memory by part."""
    estimate = plan.estimate
    slices = list_memory_parts(estimate)
    most = estimate.capacity_bytes or estimate.process_bytes
    total = max(most, estimate.band.high_bytes, sum(slice_.value for slice_ in slices))
    limits = [
        LimitLine(estimate.band.high_bytes, f"at most {format_bytes(estimate.band.high_bytes)}", "band")
    ]
    if estimate.capacity_bytes:
        allowed = plan.policy.memory_share * estimate.capacity_bytes
        limits.append(LimitLine(allowed, f"{format_bytes(allowed)} may be used"))
    says = f"The fullest GPU holds {format_bytes(estimate.process_bytes)}"
    says += f" of {format_bytes(estimate.capacity_bytes)}" if estimate.capacity_bytes else ""
    says += "; it fits only because torch releases cached blocks" * (estimate.verdict is Verdict.FITS_TIGHT)
    largest = max(slices, key=lambda slice_: slice_.value)
    says += f"; {largest.name} take{'s' * (largest.name in ('context', 'workspace', 'communication'))} most."
    says += " The parts are what is live at the moment of the peak"
    says += f"; {words}." if (words := describe_gradients(estimate)) else "."
    return Figure(
        "memory",
        "Memory by part",
        says,
        lambda width: draw_stack(
            "Memory of the fullest GPU by part", slices, limits, whole=total, width=width
        ),
        ("part", "bytes", "size", "share"),
        tuple((s.name, f"{s.value:,.0f}", s.shown, f"{s.value / total:.1%}") for s in slices),
    )


def host_memory_figure(estimate: Estimate) -> Figure | None:
    """Show the host memory of a process of a job that offloads, by part."""
    host = estimate.host
    if host is None:
        return None
    parts = {
        "pinned": ("weights", host.pinned_bytes),
        "not pinned": ("optimizer", host.rank_bytes - host.pinned_bytes),
        "for checkpoints": ("workspace", host.checkpoint_bytes),
    }
    slices = [
        BarPart(name, kind, value, format_bytes(value)) for name, (kind, value) in parts.items() if value
    ]
    total = host.rank_bytes + host.checkpoint_bytes
    capacity = "" if host.capacity_bytes is None else f" of {format_bytes(host.capacity_bytes)}"
    return Figure(
        "host-memory",
        "Memory of the host",
        f"A node needs {format_bytes(host.node_bytes)}{capacity}; each process takes "
        f"{format_bytes(host.rank_bytes)}, and {format_bytes(host.checkpoint_bytes)} to write checkpoints.",
        lambda width: draw_stack(
            "Host memory of a process by part", slices, [], whole=float(total), width=width
        ),
        ("part", "bytes", "size", "share"),
        tuple((s.name, f"{s.value:,.0f}", s.shown, f"{s.value / total:.1%}") for s in slices),
    )


def step_time_figure(estimate: Estimate) -> Figure | None:
    """Show the time of a step by part."""
    step = estimate.step_time
    if step is None or not step.total_s:
        return None
    slices = list_time_parts(step)
    largest = max(slices, key=lambda slice_: slice_.value)
    return Figure(
        "step-time",
        "Time of a step",
        f"{largest.value / step.total_s:.0%} of the {format_seconds(step.total_s)} of a step are "
        f"{largest.name}.",
        lambda width: draw_stack("Time of a step by part", slices, [], whole=step.total_s, width=width),
        ("part", "seconds", "share"),
        tuple((s.name, f"{s.value:.6g}", f"{s.value / step.total_s:.1%}") for s in slices),
    )


def timeline_figure(data: ReportData) -> Figure | None:
    """Show live tensors through a step, as stacked layers."""
    line = data.timeline
    if line is None:
        return None
    order = [PARTS.index(name) for name in STATIC]
    totals = [sum(part_bytes[index] for part_bytes in line.held) for index in range(len(line.moments))]
    size, unit = pick_byte_unit(max(totals))
    top = round_up([value / size for value in totals])
    stacked = [
        Layer(PARTS[part], PARTS[part], tuple(value / size for value in line.held[part]))
        for part in order
        if any(line.held[part])
    ]
    says = [
        f"{at:,} of {line.total:,}: {format_bytes(total)}, "
        + ", ".join(f"{PARTS[p]} {format_bytes(line.held[p][i])}" for p in order if line.held[p][i])
        for i, (at, total) in enumerate(zip(line.moments, totals, strict=True))
    ]
    peak = totals[line.peak]
    notes = [
        ChartPoint(
            line.moments[line.peak],
            peak / size,
            f"peak: {says[line.peak]}",
            "accent",
            f"peak {format_bytes(peak)}",
        )
    ]
    if line.first_gradient is not None:
        near = min(range(len(line.moments)), key=lambda i: abs(line.moments[i] - (line.first_gradient or 0)))
        notes.append(
            ChartPoint(
                line.moments[near],
                totals[near] / size,
                "the first gradient is written",
                "mild",
                "first gradient",
            )
        )
    caption = f"Live tensors peak at {format_bytes(peak)}, while {line.operation or 'nothing'} runs."
    caption += f" {data.timeline_of}" if data.timeline_of else ""
    along = Axis("allocations and frees of one step, in order", make_ticks(0, line.total), 0, line.total)
    return Figure(
        "timeline",
        "Memory through a step",
        caption,
        lambda width: draw_layers(
            "Live tensors through one step",
            tuple(float(at) for at in line.moments),
            stacked,
            along,
            Axis(unit, make_ticks(0, top), 0, top),
            says=says,
            notes=notes,
            width=width,
        ),
        ("moment", "total", *(PARTS[part] for part in order)),
        tuple(
            (f"{line.moments[i]:,}", format_bytes(totals[i]), *(format_bytes(line.held[p][i]) for p in order))
            for i in pick_evenly(len(totals))
        ),
    )


def candidates_figure(plan: Plan) -> Figure | None:
    """Show speed against memory of all candidates, with the best line for each number of GPUs."""
    looks = [look for look in _collect_looks(plan) if look.samples_per_s is not None]
    if not looks:
        return None
    capacity = plan.estimate.capacity_bytes
    allowed = plan.policy.memory_share * capacity if capacity else None
    size, unit = pick_byte_unit(max(look.process_bytes for look in looks))
    best = {
        gpus: find_frontier([look for look in looks if look.setting.gpus == gpus])
        for gpus in sorted({look.setting.gpus for look in looks})
    }
    unbeaten = {look.setting for ahead in best.values() for look in ahead}
    dots = [_candidate_point(look, plan, size) for look in looks]
    furthest = max(dot.x for dot in dots)
    # Settings that fit nowhere would squeeze those that matter into a corner: they are shown as arrows.
    end = BEYOND * capacity / size if capacity else furthest
    off = [dot.x for dot in dots if dot.x > end]
    furthest = max([dot.x for dot in dots if dot.x <= end], default=end)
    near = allowed is not None and allowed / size < FAR * furthest
    right = round_up([furthest, allowed / size if allowed is not None and near else 0.0])
    off = [x for x in off if x > right]
    top = round_up([dot.y for dot in dots])
    many = sum(look.fits for look in looks)
    return Figure(
        "candidates",
        "Speed against memory",
        f"{many:,} of the {len(looks):,} settings that were estimated fit. A line joins settings with the "
        "same number of GPUs that no other beats in both speed and memory."
        + (
            f" Arrows at the right edge: {len(off):,} that need more than the axis shows, up to "
            f"{format_bytes(max(off) * size)}."
            if off
            else ""
        ),
        lambda width: draw_points(
            "Samples a second against memory of the fullest GPU",
            dots,
            [_frontier_line(gpus, ahead, size) for gpus, ahead in best.items() if ahead],
            Axis(f"memory of the fullest GPU, {unit}", make_ticks(0, right), 0, right),
            Axis("samples/s", make_ticks(0, top), 0, top),
            limit=LimitLine(allowed / size, f"{format_bytes(allowed)} may be used")
            if near and allowed
            else None,
            width=width,
        ),
        ("setting", "memory", "at most", "samples/s", "fits", "unbeaten"),
        tuple(
            (
                describe_setting(look.setting),
                format_bytes(look.process_bytes),
                format_bytes(look.high_bytes),
                format_number(look.samples_per_s or 0),
                "yes" if look.fits else "no",
                "yes" if look.setting in unbeaten else "",
            )
            for look in sorted(looks, key=lambda look: -(look.samples_per_s or 0))[: 4 * MOST_ROWS]
        ),
    )


def _candidate_point(look: EstimatedSetting, plan: Plan, size: int) -> ChartPoint:
    rate = look.samples_per_s or 0.0
    memory, speed = format_bytes(look.process_bytes), format_number(rate)
    words = f"{describe_setting(look.setting)}: {memory}, {speed} samples/s"
    chosen = look.setting == plan.choice
    return ChartPoint(
        look.process_bytes / size,
        rate,
        words if look.fits else f"{words}; does not fit",
        "accent" if chosen else "plain" if look.fits else "hollow",
        "chosen" if chosen else "",
    )


def _frontier_line(gpus: int, ahead: list[EstimatedSetting], size: int) -> Front:
    places = tuple((look.process_bytes / size, look.samples_per_s or 0.0) for look in ahead)
    return Front(plural(gpus, "GPU"), places)


def _collect_looks(plan: Plan) -> list[EstimatedSetting]:
    """Return all candidates that were looked at; plans of earlier versions keep fewer."""
    looks = {look.setting: look for look in plan.looked_at}
    settings = [
        (plan.choice, plan.estimate),
        *((runner_up.setting, runner_up.estimate) for runner_up in plan.runners_up),
    ]
    settings += [(row.setting, row.estimate) for row in plan.comparison if row.setting and row.estimate]
    for setting, estimate in settings:
        looks.setdefault(
            setting,
            EstimatedSetting(
                setting=setting,
                process_bytes=estimate.process_bytes,
                high_bytes=estimate.band.high_bytes,
                samples_per_s=estimate.samples_per_s,
                fits=True,
            ),
        )
    return list(looks.values())


def find_frontier(looks: Sequence[EstimatedSetting]) -> list[EstimatedSetting]:
    """Return the candidates that fit and that no other beats in memory and speed, smallest first."""
    best: list[EstimatedSetting] = []
    for look in sorted(
        (look for look in looks if look.fits),
        key=lambda look: (look.process_bytes, -(look.samples_per_s or 0)),
    ):
        if not best or (look.samples_per_s or 0) > (best[-1].samples_per_s or 0):
            best.append(look)
    return best


def scaling_figure(plan: Plan) -> Figure | None:
    """Show the length of the run by number of GPUs, and the deadline."""
    rows = plan.comparison
    if not rows:
        return None
    hours = [row.estimate.hours for row in rows if row.estimate and row.estimate.hours is not None]
    if not hours:
        return _rate_figure(plan)
    deadline = plan.policy.deadline_s
    size, unit = pick_time_unit(max([3600 * value for value in hours] + ([deadline] if deadline else [])))
    bars = [_scaling_bar(row, plan, size) for row in rows]
    limit = LimitLine(deadline / size, f"deadline {format_duration(deadline)}") if deadline else None
    late = [row for row in rows if row.meets_deadline is False]
    says = f"The whole run on {_list_counts(rows)} GPUs"
    says += (
        f"; {_list_counts(late)} would be late."
        if late
        else "; all of them are in time."
        if deadline
        else "."
    )
    return _columns_figure(plan, says, "Length of the run by number of GPUs", bars, unit, limit)


def _rate_figure(plan: Plan) -> Figure | None:
    """Show samples a second by number of GPUs, for a job without a number of samples."""
    rates = [row.estimate.samples_per_s if row.estimate else None for row in plan.comparison]
    if not any(rates):
        return None
    bars = [
        BarColumn(
            str(row.gpus),
            rate,
            format_number(rate) if rate else row.why or "-",
            _format_efficiency(row),
            "accent" if row.gpus == plan.choice.gpus else "plain",
        )
        for row, rate in zip(plan.comparison, rates, strict=True)
    ]
    says = "Samples a second by number of GPUs; the job does not say how many samples there are."
    return _columns_figure(plan, says, "Samples a second by number of GPUs", bars, "samples/s")


def _columns_figure(  # noqa: PLR0913, PLR0917 - bars, their axis, and the sentence
    plan: Plan, says: str, label: str, bars: list[BarColumn], unit: str, limit: LimitLine | None = None
) -> Figure:
    """Show one bar for each number of GPUs."""
    top = round_up([bar.value or 0 for bar in bars] + ([limit.value] if limit else []))
    return Figure(
        "scaling",
        "Scaling",
        says,
        lambda width: draw_columns(
            label,
            bars,
            limit,
            up=make_ticks(0, top),
            up_name=unit,
            along_name="GPUs, and how well they scale",
            width=width,
        ),
        ("GPUs", "how", "memory", "samples/s", "total", "GPU-hours", "in time", "scaling"),
        tuple(_scaling_row(row) for row in plan.comparison),
    )


def _scaling_bar(row: Comparison, plan: Plan, size: float) -> BarColumn:
    if row.estimate is None or row.estimate.hours is None:
        return BarColumn(str(row.gpus), None, row.why or "not known")
    seconds = 3600 * row.estimate.hours
    kind = "accent" if row.gpus == plan.choice.gpus else "late" if row.meets_deadline is False else "plain"
    return BarColumn(str(row.gpus), seconds / size, format_duration(seconds), _format_efficiency(row), kind)


def _format_efficiency(row: Comparison) -> str:
    return "" if row.scaling_efficiency is None else f"{row.scaling_efficiency:.0%}"


def _scaling_row(row: Comparison) -> Row:
    estimate = row.estimate
    if estimate is None:
        return (str(row.gpus), row.why or "nothing fits", "-", "-", "-", "-", "-", "-")
    late = "-" if row.meets_deadline is None else "yes" if row.meets_deadline else "no"
    return (
        str(row.gpus),
        describe_setting(row.setting) if row.setting else row.why,
        format_bytes(estimate.process_bytes),
        "-" if estimate.samples_per_s is None else format_number(estimate.samples_per_s),
        "-" if estimate.hours is None else format_duration(3600 * estimate.hours),
        "-" if estimate.gpu_hours is None else format_figure(estimate.gpu_hours),
        late,
        _format_efficiency(row) or "-",
    )


def _list_counts(rows: Sequence[Comparison]) -> str:
    names = [str(row.gpus) for row in rows]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def make_ticks(low: float, high: float) -> list[Tick]:
    """Return the ticks of an axis."""
    return [Tick(value, format_number(value)) for value in round_ticks(low, high)]


def pick_evenly(count: int, most: int = MOST_ROWS) -> list[int]:
    """Pick at most `most` of `count` indices, evenly spread, the last one included.

    >>> pick_evenly(3), pick_evenly(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    every = max(1, -(-(count - 1) // (most - 1))) if count > 1 else 1
    indices = list(range(0, count, every))
    return indices if not count or indices[-1] == count - 1 else [*indices[: most - 1], count - 1]


MOST_BUCKETS = 400
"""Stretches that a line of many steps is cut into."""
WARM_UP = 3
"""Steps at the beginning that say nothing about speed: kernels are chosen, memory is taken."""
MOST_EVENTS = 200
"""Marked in a figure; the table has them all."""


def loss_figure(lines: Sequence[StepLine], events: Sequence[Incident]) -> Figure | None:
    """Show the loss over steps, with validation and events."""
    values_by_step = _keep_finite((line.step, line.loss) for line in lines)
    checks = _keep_finite((line.step, line.validation_loss) for line in lines)
    if not values_by_step:
        return None
    band = bucket_steps(values_by_step)
    values = [value for _, value in checks]
    low, high = min([*band.low, *values]), max([*band.high, *values])
    # A loss near zero is drawn from zero; one that never comes near it would be a flat line there.
    base = 0.0 if 0 <= low < high / 2 else low
    (first, began), (last, ended) = values_by_step[0], values_by_step[-1]
    says = f"Loss {format_number(began)} at step {first:,}, {format_number(ended)} at step {last:,}"
    says += f"; validation {format_number(checks[-1][1])}." if checks else "."
    notes = [
        ChartPoint(step, value, f"step {step:,}: validation {format_number(value)}", "check")
        for step, value in checks
    ]
    marked = [
        ChartPoint(
            event.step, base, f"step {event.step:,}: {event.kind}: {event.why}; {event.done}", "warned"
        )
        for event in events
        if event.step is not None and first <= event.step <= last
    ]
    return _step_figure(
        ("loss", "Loss", says, "Loss over steps"),
        band,
        (first, last),
        Axis("loss", make_ticks(base, high), base, high),
        ("loss", format_number),
        notes=notes,
        events=marked,
    )


def speed_figure(lines: Sequence[StepLine], plan: Plan | None) -> Figure | None:
    """Show samples a second over steps, against the plan."""
    values_by_step = _keep_finite((line.step, line.samples_per_s) for line in lines)
    if not values_by_step:
        return None
    band = bucket_steps(values_by_step)
    expected = plan.estimate.samples_per_s if plan is not None else None
    usual = statistics.median(value for _, value in values_by_step[WARM_UP:] or values_by_step)
    top = round_up([*band.high, expected or 0.0])
    says = f"The median step makes {format_number(usual)} samples/s"
    says += (
        f"; the plan expects {format_number(expected)} ({usual / expected - 1:+.1%})." if expected else "."
    )
    return _step_figure(
        ("speed", "Speed", says, "Samples a second over steps"),
        band,
        (values_by_step[0][0], values_by_step[-1][0]),
        Axis("samples/s", make_ticks(0, top), 0, top),
        ("samples/s", format_number),
        limits=[LimitLine(expected, f"plan: {format_number(expected)}", "band")] if expected else [],
    )


def reserved_figure(lines: Sequence[StepLine], plan: Plan | None) -> Figure | None:
    """Show reserved memory over steps, against the plan."""
    values_by_step = _keep_finite((line.step, line.reserved_bytes) for line in lines)
    if not values_by_step or not any(value for _, value in values_by_step):
        return None
    expected = plan.estimate.reserved_bytes if plan is not None else 0
    size, unit = pick_byte_unit(max([value for _, value in values_by_step] + [expected]))
    band = bucket_steps([(step, value / size) for step, value in values_by_step])
    top = round_up([*band.high, expected / size])
    most = max(value for _, value in values_by_step)
    says = f"At most {format_bytes(most)} were reserved"
    says += f"; the plan expects {format_bytes(expected)} ({most / expected - 1:+.1%})." if expected else "."

    def shown(value: float) -> str:
        return format_bytes(value * size)

    limit = [LimitLine(expected / size, f"plan: {format_bytes(expected)}", "band")] if expected else []
    return _step_figure(
        ("occupied", "Memory over the run", says, "Reserved memory over steps"),
        band,
        (values_by_step[0][0], values_by_step[-1][0]),
        Axis(f"reserved, {unit}", make_ticks(0, top), 0, top),
        ("reserved", shown),
        limits=limit,
    )


def _step_figure(  # noqa: PLR0913 - a line over steps, its axes, and what to point out
    texts: tuple[str, str, str, str],
    band: ValueBand,
    steps: tuple[int, int],
    axis: Axis,
    value: tuple[str, Callable[[float], str]],
    *,
    notes: Sequence[ChartPoint] = (),
    events: Sequence[ChartPoint] = (),
    limits: Sequence[LimitLine] = (),
) -> Figure:
    """Show values over steps. `texts` are name, title, sentence and label; `value` its name and format."""
    name, title, says, label = texts
    what, shown = value
    return Figure(
        name,
        title,
        says,
        lambda width: draw_curve(
            label,
            band,
            _step_axis(*steps),
            axis,
            says=_describe_steps(what, band, shown),
            notes=[notes[index] for index in pick_evenly(len(notes), MOST_EVENTS)],
            events=[events[index] for index in pick_evenly(len(events), MOST_EVENTS)],
            limits=list(limits),
            width=width,
        ),
        ("step", "lowest", "mean", "highest"),
        _band_rows(band, shown),
    )


def comparison_figure(pairs: Sequence[tuple[str, float, float]]) -> Figure | None:
    """Show measured values as shares of the predicted ones."""
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


def compare_run(lines: Sequence[StepLine], plan: Plan | None) -> list[tuple[str, float, float]]:
    """Return the values that the plan predicts and the run measured, where both are known.

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
    pairs: list[tuple[str, float | None, float | None]] = [
        ("step_s", estimate.step_s, _median([line.time_s for line in alike])),
        ("samples_per_s", estimate.samples_per_s, _median([line.samples_per_s for line in alike])),
    ]
    for field in ("allocated_bytes", "reserved_bytes"):
        seen = [value for line in alike if (value := getattr(line, field)) is not None]
        pairs.append((field, getattr(estimate, field), max(seen, default=None)))
    return [(field, guess, truth) for field, guess, truth in pairs if guess and truth]


def compare_profile(profile: Profile) -> list[tuple[str, float, float]]:
    """Return the values that were both predicted and measured."""
    return [
        (field, guess, truth)
        for field, guess in profile.predicted.items()
        if guess is not None and (truth := profile.measured.get(field)) is not None
    ]


def bucket_steps(points: Sequence[tuple[int, float]], most: int = MOST_BUCKETS) -> ValueBand:
    """Reduce many steps to the mean of stretches, with the lowest and highest of each.

    >>> bucket_steps([(1, 4.0), (2, 2.0), (3, 3.0)], most=2)
    ValueBand(xs=(2.0, 3.0), low=(2.0, 3.0), middle=(3.0, 3.0), high=(4.0, 3.0))
    """
    size = max(1, -(-len(points) // most))
    stretches = [points[begin : begin + size] for begin in range(0, len(points), size)]
    values = [[value for _, value in stretch] for stretch in stretches]
    return ValueBand(
        tuple(float(stretch[-1][0]) for stretch in stretches),
        tuple(min(group) for group in values),
        tuple(math.fsum(group) / len(group) for group in values),
        tuple(max(group) for group in values),
    )


def _keep_finite(values: object) -> list[tuple[int, float]]:
    """Keep the values that can be drawn."""
    return [
        (step, float(value))
        for step, value in values  # type: ignore[attr-defined]
        if value is not None and math.isfinite(value)
    ]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _step_axis(first: int, last: int) -> Axis:
    ticks = [tick for tick in make_ticks(first, last) if tick.value == int(tick.value)]
    return Axis("optimizer steps", ticks, float(first), float(last))


def _describe_steps(name: str, band: ValueBand, shown: Callable[[float], str]) -> list[str]:
    """Return the text for each place along a line."""
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
