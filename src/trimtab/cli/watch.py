"""The command `trimtab watch`: a live picture of GPUs and runs on a terminal, or one line a sample."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from trimtab import api
from trimtab.cli.console import console
from trimtab.cli.jobs import beside, last_steps
from trimtab.errors import WrongUse
from trimtab.render import Columns, escape_control
from trimtab.units import format_bytes, format_duration, format_figure, format_gib

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from trimtab.spec import Advice, GpuReading, Incident, WatchedRun, WatchSample

BAR = 10
"""Letters of a bar."""
STATE_STYLE = {"running": "green", "stalled": "bold red", "gone": "bold red", "starting": "cyan"}
UNKNOWN = "-"
SHORTEST_S = 0.1


def clock(at_s: float) -> str:
    """Return the time of day in the local zone."""
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def picture(sample: WatchSample) -> RenderableType:
    """Return everything at one moment."""
    parts: list[RenderableType] = [Text(f"{clock(sample.at_s)}  Ctrl-C ends", style="dim"), Text()]
    if sample.gpus:
        parts.append(Padding(_gpus(sample.gpus), (0, 0, 0, 1), expand=False))
        parts += [_said(words, label, "red") for label, words in _troubles(sample.gpus)]
        parts += [_said(process, "process") for process in _processes(sample.gpus)]
    else:
        parts.append(Text(escape_control(f" no GPUs: {sample.no_gpus}"), style="dim"))
    for run in sample.runs:
        parts += [Text(), *_run(run)]
    if not sample.runs:
        parts += [
            Text(),
            Text(" no runs here: give the folder of one, as in `trimtab watch runs`", style="dim"),
        ]
    return Group(*parts)


def _gpus(gauges: tuple[GpuReading, ...]) -> Columns:
    headings = ("GPU", "memory", "", "GiB", "busy", "power", "temp", "MHz", "name")
    rows = tuple(_gpu_row(gauge) for gauge in gauges)
    kept = [index for index in range(len(headings)) if any(row[index] not in (UNKNOWN, "") for row in rows)]
    return Columns(
        tuple(headings[index] for index in kept),
        tuple(tuple(row[index] for index in kept) for row in rows),
        left=("memory", "name"),
        folds="name" if any(row[-1] != UNKNOWN for row in rows) else "GPU",
        narrowest=12,
        required=min(5, len(kept)),
    )


def _gpu_row(gauge: GpuReading) -> tuple[str, ...]:
    share = (
        gauge.used_bytes / gauge.memory_bytes if gauge.used_bytes is not None and gauge.memory_bytes else None
    )
    number = gauge.key.removeprefix("gpu").replace("/mig", ".")
    if gauge.fault:
        return (number, "", "", UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN)
    return (
        number,
        "" if share is None else _bar(share),
        "" if share is None else f"{share:.0%}",
        f"{format_gib(gauge.used_bytes or 0)}/{format_gib(gauge.memory_bytes or 0)}"
        if share is not None
        else UNKNOWN,
        UNKNOWN if gauge.busy is None else f"{gauge.busy:.0%}",
        UNKNOWN if gauge.power_w is None else f"{gauge.power_w:.0f}{_of(gauge.power_limit_w)} W",
        UNKNOWN if gauge.temperature_c is None else f"{gauge.temperature_c:.0f} C",
        UNKNOWN if gauge.clock_hz is None else f"{gauge.clock_hz / 1e6:.0f}",
        gauge.name or UNKNOWN,
    )


def _of(limit: float | None) -> str:
    return "" if limit is None else f"/{limit:.0f}"


def _bar(share: float) -> str:
    """Return a share as a bar.

    >>> _bar(0.52)
    '#####.....'
    """
    full = min(BAR, max(0, round(share * BAR)))
    return "#" * full + "." * (BAR - full)


def _troubles(gauges: tuple[GpuReading, ...]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with GPUs, for separate lines: a narrow table would drop it."""
    for gauge in gauges:
        if gauge.fault:
            yield "no answer", f"{_number(gauge)}: {gauge.fault}"
        if gauge.throttles:
            yield "held down", f"{_number(gauge)} by {', '.join(gauge.throttles)}"


def _processes(gauges: tuple[GpuReading, ...]) -> Iterator[str]:
    for gauge in gauges:
        for process in gauge.processes or ():
            memory = "" if process.used_bytes is None else f", {format_bytes(process.used_bytes)}"
            yield f"{process.pid} {process.name or 'of another user'} on {_number(gauge)}{memory}"


def _number(gauge: GpuReading) -> str:
    return gauge.key.replace("gpu", "GPU ").replace("/mig", " slice ")


def _run(run: WatchedRun) -> Iterator[RenderableType]:
    head = Text(f" {escape_control(run.folder)}", style="bold")
    head.append(f"  {run.state}", style=STATE_STYLE.get(run.state, ""))
    head.append(escape_control(f"  {run.why}") if run.why else "", style="dim")
    yield head
    if words := figures(run):
        yield Padding(Text(escape_control(", ".join(words))), (0, 0, 0, 3))
    yield from (_said(words, "damaged", "red") for words in run.damage)
    yield from (_said(event(incident), "event", "yellow") for incident in run.events)
    yield from (_said(advice(item), item.kind, "magenta") for item in run.advice)


def _said(words: str, label: str, style: str = "dim") -> RenderableType:
    return Padding(Text.assemble((f"{label}: ", style), escape_control(words)), (0, 0, 0, 3))


def figures(run: WatchedRun) -> list[str]:
    """Return the figures of a run, in a few words each; unknown ones are left out."""
    words = []
    if run.step is not None:
        words.append(f"step {run.step:,}" + (f" of {run.steps:,}" if run.steps else ""))
    if run.loss is not None:
        words.append(f"loss {run.loss:.4g}")
    if run.samples_per_s is not None:
        plan = f"plan {format_figure(run.planned_samples_per_s)}" if run.planned_samples_per_s else ""
        words.append(f"{format_figure(run.samples_per_s)} samples/s{beside(last_steps(run.recent), plan)}")
    if run.mfu is not None:
        words.append(f"MFU {run.mfu:.1%}" + (f" ({run.mfu_rating})" if run.mfu_rating else ""))
    if run.reserved_bytes is not None:
        planned = run.planned_reserved_bytes
        words.append(
            f"reserved {format_bytes(run.reserved_bytes)}"
            + (f" (plan {format_bytes(planned)})" if planned else "")
        )
    if run.left_s is not None:
        words.append(f"{format_duration(run.left_s)} left")
    return words


def event(incident: Incident) -> str:
    """Return what happened, in a line."""
    at = "" if incident.step is None else f" at step {incident.step:,}"
    return f"{incident.kind}{at}: {incident.why}; {incident.done}"


def advice(item: Advice) -> str:
    """Return what would help, in a line."""
    return f"{item.where} {item.what}; {item.cure}".strip()


def gpu_line(gauge: GpuReading) -> str:
    """Return a GPU in a line, for a log."""
    if gauge.fault:
        return f"{_number(gauge)}: does not answer: {gauge.fault}"
    words = []
    if gauge.used_bytes is not None and gauge.memory_bytes:
        words.append(f"{format_bytes(gauge.used_bytes)} of {format_bytes(gauge.memory_bytes)}")
    words += [f"busy {gauge.busy:.0%}"] if gauge.busy is not None else []
    words += [f"{gauge.power_w:.0f}{_of(gauge.power_limit_w)} W"] if gauge.power_w is not None else []
    words += [f"{gauge.temperature_c:.0f} C"] if gauge.temperature_c is not None else []
    words += [f"{gauge.clock_hz / 1e6:.0f} MHz"] if gauge.clock_hz is not None else []
    words += [f"held down by {', '.join(gauge.throttles)}"] if gauge.throttles else []
    many = len(gauge.processes or ())
    words += [f"{many} process{'es' * (many > 1)}"] if many else []
    return f"{_number(gauge)} {gauge.name}: {', '.join(words) or 'no data'}"


@dataclass
class Lines:
    """Samples as lines of a log: figures every time, states, events and advice when they are new."""

    known: dict[str, set[str]] = field(default_factory=dict)

    def of(self, sample: WatchSample) -> Iterator[str]:
        """Yield the lines of a sample."""
        at = clock(sample.at_s)
        first = not self.known
        started = self.known.setdefault("", set())
        if first and not sample.gpus:
            yield f"{at} no GPUs: {sample.no_gpus}"
        if first and not sample.runs:
            yield f"{at} no runs here: give the folder of one, as in `trimtab watch runs`"
        started.add("begun")
        yield from (f"{at} {gpu_line(gauge)}" for gauge in sample.gpus)
        for run in sample.runs:
            yield from (f"{at} {run.folder}: {line}" for line in self._run(run))

    def _run(self, run: WatchedRun) -> Iterator[str]:
        known = self.known.setdefault(run.folder, set())
        # A run that is over is said once, and not again with every sample.
        over = f"{run.state}: {run.why}"
        if run.state not in ("running", "starting"):
            if over not in known:
                yield ", ".join([over, *figures(run)])
        else:
            yield ", ".join([run.state, *figures(run)])
        fresh = {over}
        for label, words in (
            *(("damaged", words) for words in run.damage),
            *(("event", event(incident)) for incident in run.events),
            *((item.kind, advice(item)) for item in run.advice),
        ):
            # Numbers in advice change all the time; that it is given is what is new.
            key = words if label in ("event", "damaged") else label
            fresh.add(key)
            if key not in known:
                yield f"{label}: {words}"
        self.known[run.folder] = fresh


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN_DIR]...",
            help="Run folders, or folders that contain them; default: all below the current folder.",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds between two samples.")] = 2.0,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="Stop after this many samples; default: at Ctrl-C.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per sample, one per line.")
    ] = False,
) -> None:
    """Show GPUs and runs live, with advice.

    Memory, use, power, loss, speed, time left, and what would help. On a terminal a picture that changes;
    elsewhere lines. Ends at Ctrl-C, after --samples, or when all runs that were named have ended.
    """
    if not interval >= SHORTEST_S:
        raise WrongUse(
            f"--interval {interval:g}",
            found=f"it is below {SHORTEST_S:g} s",
            cure="Give at least a tenth of a second; drivers average over about that long.",
        )
    if samples is not None and samples < 1:
        raise WrongUse(f"--samples {samples}", found="it is below 1", cure="Give at least 1.")
    each = api.watch(runs or (), interval_s=interval, samples=samples)
    try:
        if json:
            _as_json_lines(each)
        elif sys.stdout.isatty():
            _as_picture(each)
        else:
            _as_lines(each)
    except KeyboardInterrupt:
        # It is how a watch is meant to end.
        sys.stdout.flush()


def _as_json_lines(each: Iterator[WatchSample]) -> None:
    for sample in each:
        sys.stdout.write(sample.to_json() + "\n")
        sys.stdout.flush()


def _as_lines(each: Iterator[WatchSample]) -> None:
    lines = Lines()
    for sample in each:
        for line in lines.of(sample):
            sys.stdout.write(f"{escape_control(line)}\n")
        sys.stdout.flush()


def _as_picture(each: Iterator[WatchSample]) -> None:
    from rich.live import Live

    with Live(console=console(), auto_refresh=False, vertical_overflow="ellipsis") as live:
        for sample in each:
            live.update(picture(sample), refresh=True)
