"""From a plan to figures: what each one says, how it is drawn, and the table behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.pages.bars import Column, Limit, Slice, columns, stack
from trimtab.pages.curves import Axis, Dot, Front, Layer, layers, points
from trimtab.pages.drawing import Tick
from trimtab.pages.scales import byte_unit, short, ticks, time_unit, upper
from trimtab.render import gradient_words, setting_words
from trimtab.spec import PARTS, Comparison, Estimate, Look, Plan, Verdict
from trimtab.units import format_bytes, format_duration, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.pages.markup import Markup
    from trimtab.pages.story import Story

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
    """A figure with its words and the table behind it."""

    name: str
    """Of its file, and of its place on the page."""
    title: str
    says: str
    """What is to be seen in it, in a sentence."""
    draw: Callable[[int], Markup]
    """At a width."""
    headings: Row
    rows: tuple[Row, ...]


def memory(plan: Plan) -> Figure:
    """The bar of a GPU's memory by what it is for."""
    one = plan.estimate
    parts = {name: getattr(one.parts, name) for name in one.parts.__struct_fields__}
    cached = max(0, one.process_bytes - one.parts.total)
    slices = [Slice(name, name, value, format_bytes(value)) for name, value in parts.items() if value]
    if cached:
        slices.append(Slice("cached", "cached", cached, format_bytes(cached)))
    most = one.capacity_bytes or one.process_bytes
    whole = max(most, one.band.high_bytes, sum(slice_.value for slice_ in slices))
    limits = [Limit(one.band.high_bytes, f"at most {format_bytes(one.band.high_bytes)}", "band")]
    if one.capacity_bytes:
        allowed = plan.policy.memory_share * one.capacity_bytes
        limits.append(Limit(allowed, f"{format_bytes(allowed)} may be used"))
    says = f"The fullest GPU holds {format_bytes(one.process_bytes)}"
    says += f" of {format_bytes(one.capacity_bytes)}" if one.capacity_bytes else ""
    says += "; it fits only because torch releases cached blocks" * (one.verdict is Verdict.FITS_TIGHT)
    largest = max(slices, key=lambda slice_: slice_.value)
    says += f"; {largest.name} take{'s' * (largest.name in ('context', 'workspace', 'communication'))} most."
    says += " The parts are what is live at the moment of the peak"
    says += f": {words}." if (words := gradient_words(one)) else "."
    return Figure(
        "memory",
        "Memory by part",
        says,
        lambda width: stack("Memory of the fullest GPU by part", slices, limits, whole=whole, width=width),
        ("part", "bytes", "size", "share"),
        tuple((s.name, f"{s.value:,.0f}", s.shown, f"{s.value / whole:.1%}") for s in slices),
    )


def step_time(estimate: Estimate) -> Figure | None:
    """The bar of a step's seconds by what they are spent on."""
    one = estimate.step_time
    if one is None or not one.total_s:
        return None
    names = {field: field.removesuffix("_s") for field in one.__struct_fields__}
    slices = [
        Slice(name, name, getattr(one, field), in_seconds(getattr(one, field)))
        for field, name in names.items()
        if getattr(one, field)
    ]
    largest = max(slices, key=lambda slice_: slice_.value)
    return Figure(
        "step-time",
        "Time of a step",
        f"{largest.value / one.total_s:.0%} of the {in_seconds(one.total_s)} of a step are {largest.name}.",
        lambda width: stack("Time of a step by part", slices, [], whole=one.total_s, width=width),
        ("part", "seconds", "share"),
        tuple((s.name, f"{s.value:.6g}", f"{s.value / one.total_s:.1%}") for s in slices),
    )


def through_a_step(story: Story) -> Figure | None:
    """Live tensors through a step, layer on layer."""
    line = story.timeline
    if line is None:
        return None
    order = [PARTS.index(name) for name in STATIC]
    totals = [sum(held[index] for held in line.held) for index in range(len(line.moments))]
    size, unit = byte_unit(max(totals))
    top = upper([value / size for value in totals])
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
        Dot(
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
            Dot(
                line.moments[near],
                totals[near] / size,
                "the first gradient is written",
                "mild",
                "first gradient",
            )
        )
    caption = f"Live tensors peak at {format_bytes(peak)}, while {line.operation or 'nothing'} runs."
    caption += f" {story.timeline_of}" if story.timeline_of else ""
    along = Axis("allocations and frees of one step, in order", axis_ticks(0, line.total), 0, line.total)
    return Figure(
        "timeline",
        "Memory through a step",
        caption,
        lambda width: layers(
            "Live tensors through one step",
            tuple(float(at) for at in line.moments),
            stacked,
            along,
            Axis(unit, axis_ticks(0, top), 0, top),
            says=says,
            notes=notes,
            width=width,
        ),
        ("moment", "total", *(PARTS[part] for part in order)),
        tuple(
            (f"{line.moments[i]:,}", format_bytes(totals[i]), *(format_bytes(line.held[p][i]) for p in order))
            for i in spread(len(totals))
        ),
    )


def candidates(plan: Plan) -> Figure | None:
    """Speed against memory of all that was looked at, and for each number of GPUs the line nothing beats."""
    looks = [one for one in _looks(plan) if one.samples_per_s is not None]
    if not looks:
        return None
    capacity = plan.estimate.capacity_bytes
    allowed = plan.policy.memory_share * capacity if capacity else None
    size, unit = byte_unit(max(one.process_bytes for one in looks))
    best = {
        gpus: frontier([one for one in looks if one.setting.gpus == gpus])
        for gpus in sorted({one.setting.gpus for one in looks})
    }
    unbeaten = {one.setting for ahead in best.values() for one in ahead}
    dots = [_dot(one, plan, size) for one in looks]
    furthest = max(one.x for one in dots)
    # Settings that fit nowhere would squeeze those that matter into a corner: they are shown as arrows.
    end = BEYOND * capacity / size if capacity else furthest
    off = [one.x for one in dots if one.x > end]
    furthest = max([one.x for one in dots if one.x <= end], default=end)
    near = allowed is not None and allowed / size < FAR * furthest
    right = upper([furthest, allowed / size if allowed is not None and near else 0.0])
    off = [one for one in off if one > right]
    top = upper([one.y for one in dots])
    many = sum(one.fits for one in looks)
    return Figure(
        "candidates",
        "Speed against memory",
        f"{many:,} of the {len(looks):,} settings that were estimated fit. A line joins those of one number "
        "of GPUs that no other beats in both."
        + (
            f" Arrows at the right edge: {len(off):,} that need more than the axis shows, up to "
            f"{format_bytes(max(off) * size)}."
            if off
            else ""
        ),
        lambda width: points(
            "Samples a second against memory of the fullest GPU",
            dots,
            [_front(gpus, ahead, size) for gpus, ahead in best.items() if ahead],
            Axis(f"memory of the fullest GPU, {unit}", axis_ticks(0, right), 0, right),
            Axis("samples/s", axis_ticks(0, top), 0, top),
            limit=Limit(allowed / size, f"{format_bytes(allowed)} may be used") if near and allowed else None,
            width=width,
        ),
        ("setting", "memory", "at most", "samples/s", "fits", "unbeaten"),
        tuple(
            (
                setting_words(one.setting),
                format_bytes(one.process_bytes),
                format_bytes(one.high_bytes),
                short(one.samples_per_s or 0),
                "yes" if one.fits else "no",
                "yes" if one.setting in unbeaten else "",
            )
            for one in sorted(looks, key=lambda look: -(look.samples_per_s or 0))[: 4 * MOST_ROWS]
        ),
    )


def _dot(one: Look, plan: Plan, size: int) -> Dot:
    rate = one.samples_per_s or 0.0
    words = f"{setting_words(one.setting)}: {format_bytes(one.process_bytes)}, {short(rate)} samples/s"
    chosen = one.setting == plan.choice
    return Dot(
        one.process_bytes / size,
        rate,
        words if one.fits else f"{words}; does not fit",
        "accent" if chosen else "plain" if one.fits else "hollow",
        "chosen" if chosen else "",
    )


def _front(gpus: int, ahead: list[Look], size: int) -> Front:
    places = tuple((one.process_bytes / size, one.samples_per_s or 0.0) for one in ahead)
    return Front(plural(gpus, "GPU"), places)


def _looks(plan: Plan) -> list[Look]:
    """All that is known of what was looked at; plans of earlier versions keep fewer."""
    found = {one.setting: one for one in plan.looked_at}
    told = [(plan.choice, plan.estimate), *((one.setting, one.estimate) for one in plan.runners_up)]
    told += [(one.setting, one.estimate) for one in plan.comparison if one.setting and one.estimate]
    for setting, estimate in told:
        found.setdefault(
            setting,
            Look(
                setting=setting,
                process_bytes=estimate.process_bytes,
                high_bytes=estimate.band.high_bytes,
                samples_per_s=estimate.samples_per_s,
                fits=True,
            ),
        )
    return list(found.values())


def frontier(looks: Sequence[Look]) -> list[Look]:
    """Those that fit and that no other beats in both memory and speed, from small to large."""
    best: list[Look] = []
    for one in sorted(
        (one for one in looks if one.fits), key=lambda look: (look.process_bytes, -(look.samples_per_s or 0))
    ):
        if not best or (one.samples_per_s or 0) > (best[-1].samples_per_s or 0):
            best.append(one)
    return best


def scaling(plan: Plan) -> Figure | None:
    """How long the run takes by the number of GPUs, and until when it has to be done."""
    rows = plan.comparison
    if not rows:
        return None
    hours = [one.estimate.hours for one in rows if one.estimate and one.estimate.hours is not None]
    if not hours:
        return _rates(plan)
    deadline = plan.policy.deadline_s
    size, unit = time_unit(max([3600 * one for one in hours] + ([deadline] if deadline else [])))
    bars = [_bar(one, plan, size) for one in rows]
    limit = Limit(deadline / size, f"deadline {format_duration(deadline)}") if deadline else None
    top = upper([one.value or 0 for one in bars] + ([limit.value] if limit else []))
    late = [one for one in rows if one.meets_deadline is False]
    says = f"The whole run on {_listed(rows)} GPUs"
    says += f"; {_listed(late)} would be late." if late else "; all of them are in time." if deadline else "."
    return Figure(
        "scaling",
        "Scaling",
        says,
        lambda width: columns(
            "Length of the run by number of GPUs",
            bars,
            limit,
            up=axis_ticks(0, top),
            up_name=unit,
            along_name="GPUs, and how well they scale",
            width=width,
        ),
        ("GPUs", "how", "memory", "samples/s", "total", "GPU-hours", "in time", "scaling"),
        tuple(_comparison(one) for one in rows),
    )


def _rates(plan: Plan) -> Figure | None:
    """Samples a second by the number of GPUs, where the job does not say how many samples it has."""
    rates = [one.estimate.samples_per_s if one.estimate else None for one in plan.comparison]
    if not any(rates):
        return None
    bars = [
        Column(
            str(one.gpus),
            rate,
            short(rate) if rate else one.why or "-",
            _efficiency(one),
            "accent" if one.gpus == plan.choice.gpus else "plain",
        )
        for one, rate in zip(plan.comparison, rates, strict=True)
    ]
    top = upper([one.value or 0 for one in bars])
    return Figure(
        "scaling",
        "Scaling",
        "Samples a second by number of GPUs; the job does not say how many samples there are.",
        lambda width: columns(
            "Samples a second by number of GPUs",
            bars,
            None,
            up=axis_ticks(0, top),
            up_name="samples/s",
            along_name="GPUs, and how well they scale",
            width=width,
        ),
        ("GPUs", "how", "memory", "samples/s", "total", "GPU-hours", "in time", "scaling"),
        tuple(_comparison(one) for one in plan.comparison),
    )


def _bar(one: Comparison, plan: Plan, size: float) -> Column:
    if one.estimate is None or one.estimate.hours is None:
        return Column(str(one.gpus), None, one.why or "not known")
    seconds = 3600 * one.estimate.hours
    kind = "accent" if one.gpus == plan.choice.gpus else "late" if one.meets_deadline is False else "plain"
    return Column(str(one.gpus), seconds / size, format_duration(seconds), _efficiency(one), kind)


def _efficiency(one: Comparison) -> str:
    return "" if one.scaling_efficiency is None else f"{one.scaling_efficiency:.0%}"


def _comparison(one: Comparison) -> Row:
    estimate = one.estimate
    if estimate is None:
        return (str(one.gpus), one.why or "nothing fits", "-", "-", "-", "-", "-", "-")
    late = "-" if one.meets_deadline is None else "yes" if one.meets_deadline else "no"
    return (
        str(one.gpus),
        setting_words(one.setting) if one.setting else one.why,
        format_bytes(estimate.process_bytes),
        "-" if estimate.samples_per_s is None else short(estimate.samples_per_s),
        "-" if estimate.hours is None else format_duration(3600 * estimate.hours),
        "-" if estimate.gpu_hours is None else f"{estimate.gpu_hours:.3g}",
        late,
        _efficiency(one) or "-",
    )


def _listed(rows: Sequence[Comparison]) -> str:
    names = [str(one.gpus) for one in rows]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def axis_ticks(low: float, high: float) -> list[Tick]:
    """The round numbers of an axis."""
    return [Tick(value, short(value)) for value in ticks(low, high)]


def spread(count: int, most: int = MOST_ROWS) -> list[int]:
    """At most so many of a row of indices, evenly, the last one included.

    >>> spread(3), spread(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    every = max(1, -(-(count - 1) // (most - 1))) if count > 1 else 1
    found = list(range(0, count, every))
    return found if not count or found[-1] == count - 1 else [*found[: most - 1], count - 1]


def in_seconds(value: float) -> str:
    """A short time with three digits that matter."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
