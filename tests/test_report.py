"""`trimtab report`: what is on the page, that nothing in it can act, and what a broken run still shows."""

from __future__ import annotations

import contextlib
import functools
import html
import html.parser
import io
import json
import math
import re
import statistics
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import run_samples as samples
from browser import CHROMIUM, WHY_NOT, Browser
from nouns import plans
from trimtab import api
from trimtab.cli.main import main_code
from trimtab.errors import BrokenFile, WrongUse
from trimtab.pages import page, report
from trimtab.pages.figures import candidates_figure, find_frontier, pick_evenly
from trimtab.pages.report_data import ReportData, read_report_data
from trimtab.pages.svg import Scale, format_number, round_ticks, round_up
from trimtab.predict.memory import Timeline, build_timeline, estimate_memory
from trimtab.spec import PARTS, EstimatedSetting, HostMemory, Plan, PlannedStage, Stage, StagedPlan, Trace
from trimtab.training.run_folder import JsonLineTail, RunRecord
from trimtab.training.step_log import StepLine
from trimtab.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

NASTY = (
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "\x1b[31mred\x1b[0m\nline two\r\0",
    "</title></style></script><svg onload=alert(1)>",
    "&lt;already&gt; &amp; {{ 7*7 }} ${x}",
    "\u202eright to left\u2028",
    "\ud800",
)


class Parts(html.parser.HTMLParser):
    """The elements of a page with the names of their attributes, its text, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.words: list[str] = []
        self.links: list[str | None] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        # Columns of figures are set to the right, by class: that words look like a number is no harm.
        named = tuple(name for name, _ in attrs if (tag, name) not in {("td", "class"), ("th", "class")})
        self.elements.append((tag, named))
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def made(story: ReportData) -> str:
    return page.build_page(story, page.draw_figures(story))


def full(words: str) -> ReportData:
    """A story with the same words wherever words can come from outside."""
    plan = samples.plan(words, words=words)
    record = RunRecord(
        root=Path("run"),
        plan=plan,
        lines=tuple(StepLine.from_builtins(samples.line(step)) for step in range(1, 9)),
        events=(samples.incident(3, why=words, done=words),),
        notes=(words,),
    )
    return ReportData(origin=words, plan=plan, run=record, missing=(words,), timeline_of=words)


def only(words: str) -> bool:
    return bool(words.strip())


@functools.cache
def plain_elements() -> list[tuple[str, tuple[str, ...]]]:
    return Parts(made(full("words"))).elements


@example("0")
@settings(max_examples=40, deadline=None)
@given(st.one_of(st.sampled_from(NASTY), st.text(min_size=1, max_size=60).filter(only)))
def test_words_from_outside_change_no_element_and_no_attribute_of_the_page(words: str) -> None:
    found = Parts(made(full(words)))
    assert found.elements == plain_elements()
    assert found.open == []
    assert found.links == []


@pytest.mark.parametrize("words", NASTY)
def test_what_is_nasty_is_shown_as_it_is_with_control_characters_spelt_out(words: str) -> None:
    text = made(full(words))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", text)
    assert words not in text
    from trimtab.render import escape_control

    assert escape_control(words) in "".join(Parts(text).words)
    text.encode()


def test_the_page_has_one_script_and_a_policy_that_lets_no_other_run() -> None:
    text = html.unescape(made(full("words")))
    assert text.count("<script") == 1
    assert "default-src 'none'" in text
    assert "unsafe" not in text
    assert " style=" not in text


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans)
def test_every_plan_makes_a_page(plan: Plan) -> None:
    found = Parts(made(ReportData(origin="plan.json", plan=plan)))
    assert found.open == []


def test_a_page_is_the_same_every_time(tmp_path: Path) -> None:
    place = samples.run(tmp_path / "run", steps=40)
    for name in ("one.html", "two.html"):
        api.report(place, tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_every_figure_has_marks_with_words_a_table_and_a_drawing_for_phones() -> None:
    story = full("words")
    found = page.draw_figures(story)
    assert [one.name for one in found] == [
        "loss",
        "compared",
        "speed",
        "occupied",
        "memory",
        "candidates",
        "scaling",
        "step-time",
    ]
    for one in found:
        for width in (840, 360):
            drawing = ET.fromstring(one.draw(width))  # noqa: S314 - our own
            marks = [g for g in drawing.iter("{http://www.w3.org/2000/svg}g") if g.get("class") == "mark"]
            assert marks
            assert all(g.get("aria-label") for g in marks)
            assert [g.get("tabindex") for g in marks].count("0") == 1
            assert all(float(g.get("x", 0)) <= width for g in drawing.iter() if g.get("x"))
        assert one.rows
        assert all(len(row) == len(one.headings) for row in one.rows)


def test_a_plan_that_offloads_shows_the_memory_of_the_host() -> None:
    story = full("words")
    assert story.plan is not None
    estimate = story.plan.estimate
    host = HostMemory(
        rank_bytes=12 << 30,
        pinned_bytes=8 << 30,
        node_bytes=44 << 30,
        checkpoint_bytes=10 << 30,
        capacity_bytes=64 << 30,
        fits=True,
    )
    assert estimate.step_time is not None
    time = estimate.step_time.replace(offload_s=0.1)
    plan = story.plan.replace(estimate=estimate.replace(host=host, step_time=time))
    text = made(ReportData(origin="words", plan=plan))
    shown = " ".join(Parts(text).words)
    assert "44.0 of 64.0 GiB" in shown
    assert "each process takes 12.0 GiB, and 10.0 GiB to write checkpoints" in shown
    # Every part of a bar has a colour.
    kinds = set(re.findall(r"\bp-[a-z]+", text.partition("</style>")[2]))
    assert kinds >= {"p-offload", "p-weights"}
    assert kinds <= set(re.findall(r"\bp-[a-z]+", page.read_asset("style.css")))


def test_the_numbers_on_the_page_are_those_of_the_plan_and_the_run() -> None:
    text = " ".join(Parts(made(full("words"))).words)
    for shown in ("20.0 of 40.0 GiB", "36.0 GiB may be used", "deadline 2h", "40.0%, good", "chosen"):
        assert shown in text
    assert "1h23m" in text
    rate = statistics.median(32 / (0.52 + 0.02 * math.sin(step)) for step in range(4, 9))
    assert f"samples/s: predicted 64, measured {rate:.3g} ({rate / 64 - 1:+.1%})" in text


def looks(figures: list[tuple[int, float, bool]]) -> list[EstimatedSetting]:
    return [
        EstimatedSetting(
            setting=samples.setting(1, index + 1, 1),
            process_bytes=size,
            high_bytes=size,
            samples_per_s=rate,
            fits=fits,
        )
        for index, (size, rate, fits) in enumerate(figures)
    ]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9).map(float), st.booleans()), max_size=12))
def test_the_frontier_is_what_nothing_beats(figures: list[tuple[int, float, bool]]) -> None:
    every = looks(figures)
    best = find_frontier(every)
    rate = [one.samples_per_s or 0.0 for one in best]
    assert rate == sorted(set(rate))
    for look in (look for look in every if look.fits):
        as_good = [
            two
            for two in best
            if two.process_bytes <= look.process_bytes
            and (two.samples_per_s or 0) >= (look.samples_per_s or 0)
        ]
        assert as_good
        if look in best:
            assert as_good == [look]
    assert all(one.fits for one in best)


def tiny_trace(*, gradients: bool = True) -> Trace:
    """Weights of 1 KiB; in each step activations of 2 and 3 KiB, and a gradient of 1 KiB until the next."""
    sizes, parts, order = [1024], [PARTS.index("weights")], [0]
    marks = {"build": 0, "batch": 1}
    for step in range(3):
        marks[f"step{step}"] = len(order)
        first = len(sizes)
        sizes += [2048, 3000, 1024]
        parts += [PARTS.index("activations")] * 2 + [PARTS.index("gradients" if gradients else "inputs")]
        kept = [~(first - 1)] if step else []
        order += [*kept, first, first + 1, ~(first + 1), first + 2, ~first]
    marks["end"] = len(order)
    return Trace(
        order=tuple(order),
        sizes=tuple(sizes),
        streams=(0,) * len(sizes),
        parts=tuple(parts),
        modules=(0,) * len(sizes),
        ops=tuple(index % 2 for index in range(len(sizes))),
        module_names=("",),
        op_names=("aten::mm", "aten::add"),
        marks=marks,
    )


@pytest.mark.parametrize("moments", [1, 2, 3, 100])
def test_the_timeline_of_a_step_keeps_its_peak_however_few_moments_there_are(moments: int) -> None:
    trace = tiny_trace()
    line = build_timeline(trace, moments)
    assert line is not None
    totals = [sum(held[index] for held in line.held) for index in range(len(line.moments))]
    assert len(totals) <= min(moments, 6)
    # 1024 of weights, 2048 and 3072 of activations: the allocator rounds 3000 up.
    assert totals[line.peak] == max(totals) == 1024 + 2048 + 3072 == estimate_memory(trace).allocated_bytes
    assert line.operation == "mm"
    assert line.first_gradient == 5
    assert line.total == 6


def test_a_step_without_gradients_and_a_trace_without_a_last_step() -> None:
    line = build_timeline(tiny_trace(gradients=False))
    assert line is not None
    assert line.first_gradient is None
    assert build_timeline(tiny_trace().replace(marks={})) is None


@given(st.floats(-1e12, 1e12), st.floats(1e-6, 1e12), st.integers(2, 9))
def test_ticks_are_few_round_and_within(low: float, span: float, count: int) -> None:
    high = low + span
    found = round_ticks(low, high, count)
    assert len(found) <= 2 * count + 2
    slack = max(abs(low), abs(high)) * 1e-6
    assert all(low - slack <= one <= high + slack for one in found)
    assert all(format_number(one) for one in found)


def test_ticks_of_nothing_and_of_what_cannot_be_drawn() -> None:
    assert round_ticks(3, 3) == [3]
    assert round_ticks(float("nan"), 1) == []
    assert round_ticks(0, float("inf")) == [0]
    assert round_up([]) == 1
    assert Scale(2, 2, 0, 10).at(2) == 5


@given(st.integers(0, 5000), st.integers(2, 80))
def test_rows_are_thinned_out_evenly_and_end_at_the_end(count: int, most: int) -> None:
    found = pick_evenly(count, most)
    assert len(found) <= most
    assert found == sorted(set(found))
    if count:
        assert found[0] == 0
        assert found[-1] == count - 1


# Broken folders and files


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def broken(root: Path, name: str) -> Path:
    """A run's folder with one thing wrong with it."""
    place = samples.run(root / "run", steps=20)
    log, events, plan = (place / name for name in ("log.jsonl", "events.jsonl", "plan.json"))
    value = json.loads(plan.read_text())
    changes: dict[str, Any] = {
        "no plan": plan.unlink,
        "no log": log.unlink,
        "no events": events.unlink,
        "empty log": lambda: log.write_bytes(b""),
        "torn line": lambda: log.write_bytes(log.read_bytes()[:-40]),
        "torn in the middle": lambda: log.write_bytes(b'{"step": 1, "lo\n' + log.read_bytes()),
        "binary log": lambda: log.write_bytes(bytes(range(256)) * 50 + b"\n" + log.read_bytes()),
        "foreign lines": lambda: log.write_text('{"a": 1}\n[1]\nnull\n"x"\n' + log.read_text()),
        "later lines": lambda: log.write_text(log.read_text().replace('"epoch"', '"mood": 1, "epoch"')),
        "wild numbers": lambda: log.write_text(
            log.read_text()
            + json.dumps(samples.line(10**30))
            + "\n"
            + json.dumps(samples.line(-5))
            + "\n"
            + json.dumps(samples.line(21, loss=1e308, samples_per_s=0, time_s=0))
            + "\n"
            + json.dumps(samples.line(22, loss=-1e308))
            + "\n"
        ),
        "half a plan": lambda: plan.write_bytes(plan.read_bytes()[:500]),
        "plan of a later version": lambda: plan.write_text(json.dumps(value | {"mood": "good"})),
        "plan of another kind": lambda: plan.write_text('{"job": 1}'),
        "plan is a folder": lambda: as_folder(plan),
        "log is a folder": lambda: as_folder(log),
        "foreign events": lambda: events.write_text('{"kind": "party"}\n' + events.read_text()),
        "foreign files": lambda: (place / "core.1234").write_bytes(b"\0" * 100),
    }
    changes[name]()
    return place


SAID = {
    "no plan": "plan.json is missing",
    "no log": "log.jsonl is missing",
    "no events": "events.jsonl is missing",
    "empty log": "log.jsonl is empty",
    "torn line": "the last line is not whole",
    "torn in the middle": "1 line could not be read",
    "binary log": "could not be read",
    "foreign lines": "3 lines could not be read",
    "later lines": "",
    "wild numbers": "lines are no step of a run",
    "half a plan": "plan.json is no JSON object",
    "plan of a later version": "another version of trimtab",
    "plan of another kind": "plan.json is no Plan",
    "plan is a folder": "plan.json cannot be read",
    "log is a folder": "log.jsonl cannot be read",
    "foreign events": "no event of a run",
    "foreign files": "",
}


@pytest.mark.parametrize("name", SAID)
def test_a_broken_run_shows_what_can_be_shown_and_says_what_is_missing(tmp_path: Path, name: str) -> None:
    place = broken(tmp_path, name)
    done = api.report(place, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert Parts(text).open == []
    others = [one for one in done["missing"] if not one.startswith("memory through a step")]
    if SAID[name]:
        assert any(SAID[name] in one for one in others), others
        assert "Not shown" in text
    else:
        assert others == []
    has_log = name not in ("no log", "empty log", "log is a folder")
    assert ("loss" in done["shown"]) == has_log
    has_plan = "plan" not in name or name == "plan of a later version"
    assert ("memory" in done["shown"]) == has_plan


def test_lines_that_were_read_before_a_tear_are_all_there(tmp_path: Path) -> None:
    story = read_report_data(broken(tmp_path, "torn line"))
    assert story.run is not None
    assert [line.step for line in story.run.lines] == list(range(1, 20))


def test_a_file_that_grows_is_read_on_from_where_reading_ended(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    first, second = (json.dumps(samples.line(step)) + "\n" for step in (1, 2))
    file.write_text(first + second[:20])
    tail = JsonLineTail(file)

    def steps() -> list[int]:
        return [one.step for one in tail.read_new(StepLine) if one is not None]

    assert steps() == [1]
    assert tail.torn
    with file.open("a") as stream:
        stream.write(second[20:])
    assert steps() == [2]
    assert steps() == []
    file.write_text(first)
    assert steps() == [1]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda _: None, WrongUse, "No such file"),
        (lambda place: place.mkdir(), WrongUse, "no log.jsonl, no events.jsonl, no plan.json"),
        (lambda place: samples.run(place / "a"), WrongUse, "there are runs in it"),
        (lambda place: place.write_bytes(b""), BrokenFile, "no JSON object"),
        (lambda place: place.write_bytes(b"\xff\xfe{}"), BrokenFile, "no JSON object"),
        (lambda place: place.write_text("[" * 100_000), BrokenFile, "no JSON object"),
        (lambda place: place.write_text('{"predicted": 1, "measured": 2}'), BrokenFile, "no Plan"),
        (lambda place: (place.mkdir(), (place / "log.jsonl").write_text("x\n")), BrokenFile, "nothing in it"),
    ],
)
def test_where_there_is_nothing_to_show_an_error_says_so(
    tmp_path: Path, make: Any, error: type[Exception], words: str
) -> None:
    place = tmp_path / "given"
    make(place)
    with pytest.raises(error, match=re.escape(words)):
        api.report(place, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_what_profile_wrote_becomes_a_page_of_predicted_and_measured(tmp_path: Path) -> None:
    figures = {"allocated_bytes": 2**30, "reserved_bytes": 2**31, "process_bytes": None, "step_s": 0.5}
    measured = {**figures, "allocated_bytes": 1.1 * 2**30, "step_s": None}
    told = {"predicted": figures, "measured": measured, "error": {}, "run": {"out_of_memory": ""}}
    (tmp_path / "profile.json").write_text(json.dumps(told))
    done = api.report(tmp_path / "profile.json", tmp_path / "page.html")
    assert done["shown"] == ["compared"]
    text = (tmp_path / "page.html").read_text()
    assert "predicted 1.0 GiB, measured 1.1 GiB (+10.0%)" in text


def test_a_plan_of_stages_is_shown_by_its_first_and_says_so(tmp_path: Path) -> None:
    both = [PlannedStage(stage=Stage(name=name), plan=samples.plan(words=name)) for name in ("one", "two")]
    (tmp_path / "plan.json").write_text(StagedPlan(job="job", stages=tuple(both)).to_json())
    done = api.report(tmp_path / "plan.json", tmp_path / "page.html")
    assert done["missing"][0] == "2 stages are planned (one, two); this page is about the first"
    assert "memory" in done["shown"]


def command(*args: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["trimtab", *args]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return main_code(), out.getvalue(), err.getvalue()
    finally:
        sys.argv = before


def test_the_command_says_what_it_wrote_and_json_names_the_file(tmp_path: Path) -> None:
    place = samples.run(tmp_path / "run", steps=10)
    out = tmp_path / "a page.html"
    code, said, noted = command("report", str(place), "-o", str(out))
    assert code == 0
    assert re.sub(r"\s+", " ", said).strip().endswith("page.html: 8 figures")
    assert "not shown: memory through a step" in re.sub(r"\s+", " ", noted)
    code, said, _ = command("report", str(place), "-o", str(out), "--json")
    assert json.loads(said)["file"] == str(out)


@pytest.mark.parametrize("out", ["missing/page.html", "."])
def test_a_page_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path: Path, out: str) -> None:
    place = samples.run(tmp_path / "run", steps=10)
    before = sorted(tmp_path.iterdir())
    code, said, noted = command("report", str(place), "-o", str(tmp_path / out), "--json")
    assert code == 2
    assert "cannot be written" in json.loads(said)["error"]["found"]
    assert "cannot be written" in noted
    assert sorted(tmp_path.iterdir()) == before


def test_figures_are_svg_that_needs_nothing() -> None:
    story = full("words")
    for draw_figure in page.draw_figures(story):
        text = report.build_svg_file(draw_figure)
        root = ET.fromstring(text)  # noqa: S314 - our own
        assert root.tag.endswith("svg")
        assert "var(" not in text
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_without_a_converter_the_png_is_left_out_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    files, notes = report.write_figures(page.draw_figures(full("words"))[:1], tmp_path / "figures")
    assert [file.name for file in files] == ["loss.svg"]
    assert "pip install cairosvg" in notes[0]


@pytest.mark.slow
@pytest.mark.skipif(report.find_png_converter() is None, reason="nothing here turns SVG into PNG")
def test_a_png_is_the_figure_at_twice_its_size(tmp_path: Path) -> None:
    files, notes = report.write_figures(page.draw_figures(full("words"))[:1], tmp_path / "figures")
    assert notes == []
    data = next(file for file in files if file.suffix == ".png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == 2 * (840 + 40)


# In a real browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(WHY_NOT)
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


def test_the_page_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(made(full(NASTY[1])))
    browser.said.clear()
    browser.asked.clear()
    browser.size(1280)
    browser.media()
    browser.open(file)
    assert browser.said == []
    assert browser.asked == [file.resolve().as_uri()]
    ink = "getComputedStyle(document.body).color"
    light = browser.asks(ink)
    shown = "[...document.querySelectorAll('svg')].filter(one => one.getClientRects().length)"
    assert browser.asks(f"{shown}.every(one => one.classList.contains('wide'))")

    # Pointing at a mark shows its words.
    mark = f"{shown}[0].querySelectorAll('.mark')[5]"
    browser.asks(f"{mark}.scrollIntoView({{block: 'center'}})")
    middle = "[r.x + r.width / 2, r.y + r.height / 2]"
    at = browser.asks(f"(() => {{ const r = {mark}.getBoundingClientRect(); return {middle} }})()")
    browser.point(*at)
    tip = "getComputedStyle(tip).display + ' ' + tip.textContent"
    label = browser.asks(f"{mark}.getAttribute('aria-label')")
    assert browser.asks(tip) == f"block {label}"

    # So do the keys: tab comes to the first mark of a figure, arrows go on from there.
    browser.asks("document.activeElement.blur()")
    browser.key("Tab", 9)
    first = browser.asks("document.activeElement.getAttribute('aria-label')")
    assert first.startswith("step 1: loss")
    assert browser.asks("getComputedStyle(document.activeElement.querySelector('.cursor')).opacity") == "0.75"
    browser.key("ArrowRight", 39)
    assert browser.asks("document.activeElement.getAttribute('aria-label')").startswith("step 2: loss")
    assert browser.asks("tip.textContent").startswith("step 2: loss")
    browser.key("End", 35)
    assert "out-of-memory" in browser.asks("tip.textContent")
    browser.key("Escape", 27)
    assert browser.asks("getComputedStyle(tip).display") == "none"
    browser.key("Tab", 9)
    assert browser.asks("document.activeElement.tagName") == "SUMMARY"

    # On a phone, and in the dark.
    browser.size(400)
    browser.media("", "dark")
    assert browser.asks("document.documentElement.scrollWidth") <= 400
    assert browser.asks(f"{shown}.every(one => one.classList.contains('narrow'))")
    assert browser.asks(ink) != light
    # On paper: light, without what only a screen is good for.
    browser.media("print", "dark")
    assert browser.asks(ink) == light
    assert browser.asks("getComputedStyle(document.querySelector('details')).display") == "none"
    browser.media()
    browser.size(1280)
    assert browser.printed().startswith(b"%PDF")
    assert browser.said == []


LABELS = """[...document.querySelectorAll('svg')].filter(svg => svg.getClientRects().length).map(svg => ({
  name: svg.getAttribute('aria-label'), right: svg.getBoundingClientRect().right,
  labels: [...svg.querySelectorAll('text')].filter(one => one.textContent.trim()).map(one => {
    const box = one.getBoundingClientRect(), kind = [...one.classList].find(name => name.startsWith('on-'));
    const layer = kind && svg.querySelector('path.p-' + kind.slice(3));
    return {said: one.textContent, box: [box.left, box.right, box.top, box.bottom],
      ink: getComputedStyle(one).fill,
      ground: layer ? getComputedStyle(layer).fill : getComputedStyle(document.body).backgroundColor}})}))"""
"""The labels of all figures that are shown: where they are, their colour, and the colour that they lie on."""


def brightness(colour: str) -> float:
    """Relative luminance, as WCAG 2 has it."""
    parts = [int(match) / 255 for match in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(text: str, other: str) -> float:
    high, low = sorted((brightness(text), brightness(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def crowded() -> Plan:
    """A plan with lines for eight numbers of GPUs, and settings that need 15 times what a GPU has."""
    looks = [
        EstimatedSetting(
            setting=samples.setting(gpus, micro, 2),
            process_bytes=round((3 + 0.3 * gpus + 4.5 * micro) * GIB),
            high_bytes=round(1.05 * (3 + 0.3 * gpus + 4.5 * micro) * GIB),
            samples_per_s=12 * gpus * micro / (micro + 3),
            fits=micro < 8,
        )
        for gpus in range(1, 9)
        for micro in (1, 2, 4, 8, 16, 32, 64, 128)
    ]
    return samples.plan().replace(looked_at=tuple(looks))


FLAT = Timeline(
    moments=(0, 50, 100),
    held=tuple((GIB, 2 * GIB, GIB) for _ in PARTS),
    total=100,
    peak=1,
    operation="add",
    first_gradient=48,
)
"""A step in which every part is thick enough for its name, and two labels are wanted at one place."""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["everything", "crowded"])
def test_labels_do_not_overlap_and_can_be_read(browser: Browser, tmp_path: Path, what: str) -> None:
    file = tmp_path / "page.html"
    crowd = ReportData(origin="plan.json", plan=crowded(), timeline=FLAT)
    story = full("words") if what == "everything" else crowd
    file.write_text(made(story))
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            browser.size(width)
            browser.media("", scheme)
            browser.open(file)
            figures = browser.asks(LABELS)
            assert len(figures) > 2
            for figure in figures:
                labels = figure["labels"]
                for number, label in enumerate(labels):
                    left, right, top, bottom = label["box"]
                    assert left >= 0, (width, figure["name"], label["said"])
                    assert right <= width, (width, figure["name"], label["said"])
                    assert contrast(label["ink"], label["ground"]) >= 4.5, (
                        scheme,
                        figure["name"],
                        label["said"],
                    )
                    for other in labels[number + 1 :]:
                        begin, end, above, below = other["box"]
                        apart = (
                            end <= left + 1 or right <= begin + 1 or below <= top + 3 or bottom <= above + 3
                        )
                        assert apart, (width, figure["name"], label["said"], other["said"])


def test_an_axis_ends_where_it_matters_and_says_what_lies_beyond() -> None:
    figure = candidates_figure(crowded())
    assert figure is not None
    drawn = str(figure.draw(840))
    numbers = [int(match) for match in re.findall(r'class="tick"[^>]*>(\d+)<', drawn)]
    # 40 GiB of capacity, and settings of up to 581.
    assert max(numbers) <= 100
    assert drawn.count('class="beyond"') == 32
    assert "32 that need more than the axis shows, up to 581" in figure.says


def test_a_script_that_came_in_as_text_would_not_run_even_if_it_got_in(
    browser: Browser, tmp_path: Path
) -> None:
    """The second lock: the policy by hash, tried with the first one left open."""
    file = tmp_path / "page.html"
    text = made(full("words"))
    hole = "<script>window.bad = 1</script><img src=x onerror='window.bad = 2'><style>body{color:red}</style>"
    file.write_text(text.replace("<footer>", f"{hole}<footer>"))
    browser.said.clear()
    browser.size(1280)
    browser.media()
    browser.open(file)
    assert browser.asks("typeof window.bad") == "undefined"
    assert browser.asks("getComputedStyle(document.body).color") != "rgb(255, 0, 0)"
    assert any("Content Security Policy" in one for one in browser.said)
