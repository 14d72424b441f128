"""The page: words, figures and tables put together into one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from trimtab.pages import figures, run_figures
from trimtab.pages.drawing import NARROW, WIDE
from trimtab.pages.markup import Markup, join, tag
from trimtab.pages.scales import byte_unit, short
from trimtab.planner.stale import used
from trimtab.render import setting_words
from trimtab.units import format_duration
from trimtab.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.pages.figures import Figure, Row
    from trimtab.pages.story import Story
    from trimtab.spec import Incident, Plan, WhatIf
    from trimtab.training.record import Record

FIGURE = re.compile(r"[-+]?[\d,.]*(e[-+]?\d+)?( ?(%|[KMGT]?i?B|ms|s))?|(\d+[dhms])+")
"""What is set to the right in a table: a number, perhaps with its unit."""
MOST_EVENTS = 500
"""Listed; the file has the rest."""


@cache
def asset(name: str) -> str:
    """The page's own style or script."""
    return files("trimtab.pages").joinpath(name).read_text(encoding="utf-8")


def drawn(story: Story) -> list[Figure]:
    """Every figure that there is something for: what happened first, then what was planned."""
    found: list[Figure | None] = []
    plan, run = story.plan, story.run
    if run is not None:
        found.append(run_figures.loss(run.lines, run.events))
        found.append(run_figures.compared(run_figures.pairs_of_run(run.lines, plan)))
        found.append(run_figures.speed(run.lines, plan))
        found.append(run_figures.occupied(run.lines, plan))
    if story.profile is not None:
        found.append(run_figures.compared(run_figures.pairs_of_profile(story.profile)))
    if plan is not None and plan.estimate.process_bytes:
        found += [figures.memory(plan), figures.through_a_step(story), figures.candidates(plan)]
        found += [figures.scaling(plan), figures.step_time(plan.estimate)]
    return [one for one in found if one is not None]


def page(story: Story, shown: Sequence[Figure]) -> str:
    """The whole file."""
    style, script = asset("style.css"), asset("script.js")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{_title(story)} · trimtab"),
        tag("style", Markup(style)),
    )
    body = tag(
        "body",
        tag("main", *_sections(story, shown)),
        tag("footer", f"trimtab {VERSION} · {story.origin}"),
        tag("div", id="tip", role="status", aria_live="polite"),
        tag("script", Markup(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _hash(content: str) -> str:
    """What the page's policy knows a script by: no other one runs."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _sections(story: Story, shown: Sequence[Figure]) -> list[Markup]:
    plan, run = story.plan, story.run
    parts = [_header(story)]
    if story.missing:
        parts.append(_listing("missing", "Not shown", story.missing, class_="missing"))
    for one in shown:
        parts.append(_figure(one))
        if one.name == "loss" and run is not None:
            parts.append(_events(run.events))
    if run is not None and not any(one.name == "loss" for one in shown):
        parts.append(_events(run.events))
    if plan is not None:
        parts += _plan_tables(plan)
    return parts


def _title(story: Story) -> str:
    if story.plan is not None:
        return story.plan.workload.name if story.plan.workload else story.plan.job
    if story.run is not None and story.run.identity is not None:
        return story.run.identity.job
    return story.origin


def _header(story: Story) -> Markup:
    plan = story.plan
    lead = plan.recommendation if plan is not None else ""
    so_far = _run_tiles(story.run) if story.run is not None else []
    planned = _plan_tiles(plan) if plan is not None and plan.estimate.process_bytes else []
    return tag(
        "header",
        tag("p", _kind(story), class_="kind"),
        tag("h1", _title(story)),
        tag("p", _how(plan), class_="setting") if plan is not None else None,
        tag("p", lead, class_="lead") if lead else None,
        _tiles("So far", so_far) if so_far else None,
        _tiles("Planned" if so_far else "", planned) if planned else None,
    )


def _how(plan: Plan) -> str:
    """The setting and its devices; a plan for the CPU has none."""
    words = setting_words(plan.choice)
    return f"{words} · {used(plan.places)}" if plan.places else words.partition(", ")[2]


def _tiles(name: str, tiles: Sequence[tuple[str, str]]) -> Markup:
    group = tag("p", name, class_="group") if name else Markup("")
    return join((group, tag("dl", *(tag("div", tag("dt", one), tag("dd", value)) for one, value in tiles))))


def _kind(story: Story) -> str:
    return "Run" if story.run is not None else "Plan" if story.plan is not None else "Profile"


def _plan_tiles(plan: Plan) -> list[tuple[str, str]]:
    one = plan.estimate
    size, unit = byte_unit(max(one.process_bytes, one.capacity_bytes or 0))
    free = f" of {one.capacity_bytes / size:.1f}" if one.capacity_bytes else ""
    tiles: list[tuple[str, str | None]] = [
        ("GPUs", str(plan.choice.gpus)),
        ("memory", f"{one.process_bytes / size:.1f}{free} {unit}"),
        ("step", None if one.step_s is None else figures.in_seconds(one.step_s)),
        ("samples/s", None if one.samples_per_s is None else short(one.samples_per_s)),
        (
            "MFU",
            None if one.mfu is None else f"{one.mfu:.1%}{f', {one.mfu_rating}' if one.mfu_rating else ''}",
        ),
        ("whole run", None if one.hours is None else format_duration(3600 * one.hours)),
        ("GPU-hours", None if one.gpu_hours is None else f"{one.gpu_hours:.3g}"),
        ("cost", None if plan.cost is None else f"{plan.cost:,.2f}"),
    ]
    return [(name, value) for name, value in tiles if value is not None]


def _run_tiles(run: Record) -> list[tuple[str, str]]:
    if not run.lines:
        return []
    last = run.lines[-1]
    whole = run.attempt.steps if run.attempt is not None else None
    tiles = [("steps taken", f"{last.step:,}" + (f" of {whole:,}" if whole else ""))]
    tiles += [("loss", short(last.loss))] if last.loss is not None else []
    spent = sum(one.time_s for one in run.lines)
    tiles.append(("time in steps", format_duration(max(spent, 0.0))))
    tiles.append(("events", str(len(run.events))))
    return tiles


def _figure(one: Figure) -> Markup:
    heading = f"{one.name}-title"
    return tag(
        "section",
        tag("h2", one.title, id=heading),
        tag("p", one.says, class_="says"),
        tag("figure", one.draw(WIDE), one.draw(NARROW)),
        tag(
            "details",
            tag("summary", f"The numbers: {one.title.lower()}"),
            _table(one.headings, one.rows),
        ),
        id=one.name,
        aria_labelledby=heading,
        class_="figure",
    )


def _table(headings: Row, rows: Sequence[Row]) -> Markup:
    """A table; columns of figures are set to the right."""
    numeric = [all(FIGURE.fullmatch(row[index]) for row in rows) for index in range(len(headings))]
    sides = ["number" if one else None for one in numeric]
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


def _events(events: Sequence[Incident]) -> Markup:
    if not events:
        what = tag("p", "Nothing was put on record: no retry, no restart, no skipped step.", class_="says")
        return _section("events", "Events", what)
    rows = [
        (_moment(one.at_s), "-" if one.step is None else f"{one.step:,}", one.kind.value, one.why, one.done)
        for one in events
    ]
    hidden = len(rows) - MOST_EVENTS
    more = tag("p", f"{hidden:,} more are in events.jsonl.", class_="says") if hidden > 0 else Markup("")
    return _section(
        "events",
        "Events",
        join((_table(("when (UTC)", "step", "what", "why", "done"), rows[:MOST_EVENTS]), more)),
    )


def _moment(at_s: float) -> str:
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return f"{at_s:g} s"


def _plan_tables(plan: Plan) -> list[Markup]:
    parts = []
    if plan.reasons:
        rows = [(one.subject.replace("_", " "), one.value, one.why) for one in plan.reasons]
        parts.append(
            _section("choices", "Choices and their reasons", _table(("choice", "value", "why"), rows))
        )
    if plan.what_if:
        parts.append(
            _section(
                "what-if",
                "What if",
                _table(
                    ("change", "GPUs", "how", "total", "in time"), [_what_if(one) for one in plan.what_if]
                ),
            )
        )
    if plan.rejected:
        rejected = [(f"{one.count:,}", one.why) for one in plan.rejected]
        parts.append(_section("rejected", "Rejected", _table(("settings", "why"), rejected)))
    if plan.estimate.assumptions or plan.left_out:
        parts.append(
            _listing("assumed", "Assumed and left out", (*plan.estimate.assumptions, *plan.left_out))
        )
    return parts


def _what_if(one: WhatIf) -> Row:
    hours = one.estimate.hours if one.estimate else None
    return (
        one.change,
        str(one.gpus),
        _kept_or_not(one),
        "-" if hours is None else format_duration(3600 * hours),
        "-" if one.meets_deadline is None else "yes" if one.meets_deadline else "no",
    )


def _kept_or_not(one: WhatIf) -> str:
    """The setting, and the pin that it could not keep."""
    if one.setting is None:
        return one.why
    return setting_words(one.setting) + (f"; {one.why}" if one.unpinned else "")


def _section(name: str, title: str, *inner: Markup) -> Markup:
    return tag("section", tag("h2", title), *inner, id=name)


def _listing(name: str, title: str, lines: Sequence[str], class_: str | None = None) -> Markup:
    return tag(
        "section", tag("h2", title), tag("ul", *(tag("li", one) for one in lines)), id=name, class_=class_
    )
