"""The page: words, figures and tables put together into one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from trimtab.pages import figures
from trimtab.pages.svg import NARROW, WIDE, Markup, format_number, join_markup, pick_byte_unit, tag
from trimtab.planner.plan_files import describe_places
from trimtab.render import describe_setting
from trimtab.units import format_duration, format_figure, format_seconds
from trimtab.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.pages.figures import Figure, Row
    from trimtab.pages.report_data import ReportData
    from trimtab.spec import HostMemory, Incident, Plan, WhatIf
    from trimtab.training.run_folder import RunRecord

FIGURE = re.compile(r"[-+]?[\d,.]*(e[-+]?\d+)?( ?(%|[KMGT]?i?B|ms|s))?|(\d+[dhms])+")
"""What is set to the right in a table: a number, perhaps with its unit."""
MOST_EVENTS = 500
"""Listed; the file has the rest."""


@cache
def read_asset(name: str) -> str:
    """Read the page's own style or script."""
    return files("trimtab.pages").joinpath(name).read_text(encoding="utf-8")


def draw_figures(data: ReportData) -> list[Figure]:
    """Return every figure that has data: the run first, then the plan."""
    figures_found: list[Figure | None] = []
    plan, run = data.plan, data.run
    if run is not None:
        figures_found.append(figures.loss_figure(run.lines, run.events))
        figures_found.append(figures.comparison_figure(figures.compare_run(run.lines, plan)))
        figures_found.append(figures.speed_figure(run.lines, plan))
        figures_found.append(figures.reserved_figure(run.lines, plan))
    if data.profile is not None:
        figures_found.append(figures.comparison_figure(figures.compare_profile(data.profile)))
    if plan is not None and plan.estimate.process_bytes:
        figures_found += [
            figures.memory_figure(plan),
            figures.host_memory_figure(plan.estimate),
            figures.timeline_figure(data),
            figures.candidates_figure(plan),
        ]
        figures_found += [figures.scaling_figure(plan), figures.step_time_figure(plan.estimate)]
    return [figure for figure in figures_found if figure is not None]


def build_page(data: ReportData, shown: Sequence[Figure]) -> str:
    """Build the whole HTML file."""
    style, script = read_asset("style.css"), read_asset("script.js")
    policy = make_policy()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{_title(data)} · trimtab"),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("main", *_build_sections(data, shown)),
        tag("footer", f"trimtab {VERSION} · {data.origin}"),
        tag("div", id="tip", role="status", aria_live="polite"),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def make_policy() -> str:
    """Return the policy of the page: its own style and script, and nothing from anywhere else."""
    style, script = read_asset("style.css"), read_asset("script.js")
    return f"default-src 'none'; style-src '{_csp_hash(style)}'; script-src '{_csp_hash(script)}'"


def _csp_hash(content: str) -> str:
    """Return the hash by which the page's policy allows a script; no other script runs."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _build_sections(data: ReportData, shown: Sequence[Figure]) -> list[Markup]:
    plan, run = data.plan, data.run
    parts = [_build_header(data)]
    if data.missing:
        parts.append(_listing("missing", "Not shown", data.missing, class_="missing"))
    for figure in shown:
        parts.append(_build_figure(figure))
        if figure.name == "loss" and run is not None:
            parts.append(_build_events(run.events))
    if run is not None and not any(figure.name == "loss" for figure in shown):
        parts.append(_build_events(run.events))
    if plan is not None:
        parts += _build_plan_tables(plan)
    return parts


def _title(data: ReportData) -> str:
    if data.plan is not None:
        return data.plan.workload.name if data.plan.workload else data.plan.job
    if data.run is not None and data.run.identity is not None:
        return data.run.identity.job
    return data.origin


def _build_header(data: ReportData) -> Markup:
    plan = data.plan
    lead = plan.recommendation if plan is not None else ""
    so_far = _run_tiles(data.run) if data.run is not None else []
    planned = _plan_tiles(plan) if plan is not None and plan.estimate.process_bytes else []
    return tag(
        "header",
        tag("p", _page_kind(data), class_="kind"),
        tag("h1", _title(data)),
        tag("p", _describe_setting(plan), class_="setting") if plan is not None else None,
        tag("p", lead, class_="lead") if lead else None,
        _build_tiles("So far", so_far) if so_far else None,
        _build_tiles("Planned" if so_far else "", planned) if planned else None,
    )


def _describe_setting(plan: Plan) -> str:
    """Describe the setting and its devices; a plan for the CPU has none."""
    words = describe_setting(plan.choice)
    return f"{words} · {describe_places(plan.places)}" if plan.places else words.partition(", ")[2]


def _build_tiles(name: str, tiles: Sequence[tuple[str, str]]) -> Markup:
    group = tag("p", name, class_="group") if name else Markup("")
    return join_markup(
        (group, tag("dl", *(tag("div", tag("dt", label), tag("dd", value)) for label, value in tiles)))
    )


def _page_kind(data: ReportData) -> str:
    return "Run" if data.run is not None else "Plan" if data.plan is not None else "Profile"


def _plan_tiles(plan: Plan) -> list[tuple[str, str]]:
    estimate = plan.estimate
    size, unit = pick_byte_unit(max(estimate.process_bytes, estimate.capacity_bytes or 0))
    free = f" of {estimate.capacity_bytes / size:.1f}" if estimate.capacity_bytes else ""
    tiles: list[tuple[str, str | None]] = [
        ("GPUs", str(plan.choice.gpus)),
        ("memory", f"{estimate.process_bytes / size:.1f}{free} {unit}"),
        ("host memory", None if estimate.host is None else _describe_node(estimate.host)),
        ("step", None if estimate.step_s is None else format_seconds(estimate.step_s)),
        ("samples/s", None if estimate.samples_per_s is None else format_number(estimate.samples_per_s)),
        (
            "MFU",
            None
            if estimate.mfu is None
            else f"{estimate.mfu:.1%}{f', {estimate.mfu_rating}' if estimate.mfu_rating else ''}",
        ),
        ("whole run", None if estimate.hours is None else format_duration(3600 * estimate.hours)),
        ("GPU-hours", None if estimate.gpu_hours is None else format_figure(estimate.gpu_hours)),
        ("cost", None if plan.cost is None else f"{plan.cost:,.2f}"),
    ]
    return [(name, value) for name, value in tiles if value is not None]


def _describe_node(host: HostMemory) -> str:
    """Return the host memory of a node, with its capacity if that is known."""
    size, unit = pick_byte_unit(max(host.node_bytes, host.capacity_bytes or 0))
    capacity = f" of {host.capacity_bytes / size:.1f}" if host.capacity_bytes else ""
    return f"{host.node_bytes / size:.1f}{capacity} {unit}"


def _run_tiles(run: RunRecord) -> list[tuple[str, str]]:
    if not run.lines:
        return []
    last = run.lines[-1]
    steps = run.attempt.steps if run.attempt is not None else None
    tiles = [("steps taken", f"{last.step:,}" + (f" of {steps:,}" if steps else ""))]
    tiles += [("loss", format_number(last.loss))] if last.loss is not None else []
    spent = sum(line.time_s for line in run.lines)
    tiles.append(("time in steps", format_duration(max(spent, 0.0))))
    tiles.append(("events", str(len(run.events))))
    return tiles


def _build_figure(figure: Figure) -> Markup:
    heading = f"{figure.name}-title"
    return tag(
        "section",
        tag("h2", figure.title, id=heading),
        tag("p", figure.says, class_="says"),
        tag("figure", figure.draw(WIDE), figure.draw(NARROW)),
        tag(
            "details",
            tag("summary", f"The numbers: {figure.title.lower()}"),
            _build_table(figure.headings, figure.rows),
        ),
        id=figure.name,
        aria_labelledby=heading,
        class_="figure",
    )


def _build_table(headings: Row, rows: Sequence[Row]) -> Markup:
    """Build a table; columns of numbers are right-aligned."""
    numeric = [all(FIGURE.fullmatch(row[index]) for row in rows) for index in range(len(headings))]
    sides = ["number" if is_number else None for is_number in numeric]
    return tag(
        "div",
        tag(
            "table",
            tag(
                "thead",
                tag(
                    "tr",
                    *(
                        tag("th", name, scope="col", class_=side)
                        for name, side in zip(headings, sides, strict=True)
                    ),
                ),
            ),
            tag(
                "tbody",
                *(
                    tag("tr", *(tag("td", cell, class_=side) for cell, side in zip(row, sides, strict=True)))
                    for row in rows
                ),
            ),
        ),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=", ".join(headings),
    )


def _build_events(events: Sequence[Incident]) -> Markup:
    if not events:
        what = tag("p", "Nothing was put on record: no retry, no restart, no skipped step.", class_="says")
        return _section("events", "Events", what)
    rows = [
        (
            _format_time(event.at_s),
            "-" if event.step is None else f"{event.step:,}",
            event.kind.value,
            event.why,
            event.done,
        )
        for event in events
    ]
    hidden = len(rows) - MOST_EVENTS
    more = tag("p", f"{hidden:,} more are in events.jsonl.", class_="says") if hidden > 0 else Markup("")
    return _section(
        "events",
        "Events",
        join_markup((_build_table(("when (UTC)", "step", "what", "why", "done"), rows[:MOST_EVENTS]), more)),
    )


def _format_time(at_s: float) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return f"{at_s:g} s"


def _build_plan_tables(plan: Plan) -> list[Markup]:
    parts = []
    if plan.reasons:
        rows = [(reason.subject.replace("_", " "), reason.value, reason.why) for reason in plan.reasons]
        parts.append(
            _section("choices", "Choices and their reasons", _build_table(("choice", "value", "why"), rows))
        )
    if plan.what_if:
        parts.append(
            _section(
                "what-if",
                "What if",
                _build_table(
                    ("change", "GPUs", "how", "total", "in time"),
                    [_what_if_row(change) for change in plan.what_if],
                ),
            )
        )
    if plan.rejected:
        rejected = [(f"{group.count:,}", group.why) for group in plan.rejected]
        parts.append(_section("rejected", "Rejected", _build_table(("settings", "why"), rejected)))
    if plan.estimate.assumptions or plan.left_out:
        parts.append(
            _listing("assumed", "Assumed and left out", (*plan.estimate.assumptions, *plan.left_out))
        )
    return parts


def _what_if_row(change: WhatIf) -> Row:
    hours = change.estimate.hours if change.estimate else None
    return (
        change.change,
        str(change.gpus),
        _describe_change(change),
        "-" if hours is None else format_duration(3600 * hours),
        "-" if change.meets_deadline is None else "yes" if change.meets_deadline else "no",
    )


def _describe_change(change: WhatIf) -> str:
    """Describe the setting, and the pin that it could not keep."""
    if change.setting is None:
        return change.why
    return describe_setting(change.setting) + (f"; {change.why}" if change.unpinned else "")


def _section(name: str, title: str, *inner: Markup) -> Markup:
    return tag("section", tag("h2", title), *inner, id=name)


def _listing(name: str, title: str, lines: Sequence[str], class_: str | None = None) -> Markup:
    return tag(
        "section", tag("h2", title), tag("ul", *(tag("li", line) for line in lines)), id=name, class_=class_
    )
