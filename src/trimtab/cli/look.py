"""The commands that show: report and watch."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.main import Json, _console, _print, _print_json, app
from trimtab.errors import WrongUse
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.spec import Sample

SHORTEST_S = 0.1


@app.command()
def report(
    place: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN_OR_RUN",
            help="A plan from `trimtab plan --out`, a run's folder, or what `trimtab profile --json` wrote.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.html", help="Where the page is written.")],
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write each figure as SVG, and as PNG where that can be done."),
    ] = None,
    json: Json = False,
) -> None:
    """Write one page about a plan or a run: self-contained, for any browser, without a network.

    Shows what can be shown of a run that is under way, broken or half written, and says what is missing.
    Nothing is run and nothing is traced.
    """
    from trimtab import api, render
    from trimtab.cli import views

    def say(what: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"trimtab: drawing {what}\n")

    done = api.report(place, out, figures=figures, say=say)
    if json:
        _print_json(done)
        return
    many = len(done["shown"])
    _print(render.inert(f"{done['file']}: {plural(many, 'figure')}"))
    if done["figures"]:
        _print(render.inert(f"{figures}: {len(done['figures'])} files"))
    for line in views.notes([f"not shown: {one}" for one in done["missing"]] + done["notes"]):
        _print(line, errors=True)


@app.command()
def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN_DIR]...", help="Runs, or folders with runs in them; none: those below this folder."
        ),
    ] = None,
    interval: Annotated[float, typer.Option(metavar="SECONDS", help="Between two samples.")] = 2.0,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="Stop after so many; without, at Ctrl-C.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a sample, one a line.")] = False,
) -> None:
    """Show GPUs and runs live: memory, use, power, loss, speed, time left, and what would help.

    Reads only. On a terminal a picture that changes; elsewhere lines. Ends at Ctrl-C, after --samples, or
    when all runs that were named have ended.
    """
    from trimtab import api

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


def _as_json_lines(each: Iterator[Sample]) -> None:
    for one in each:
        sys.stdout.write(one.to_json() + "\n")
        sys.stdout.flush()


def _as_lines(each: Iterator[Sample]) -> None:
    from trimtab.cli.screen import Lines
    from trimtab.render import inert

    lines = Lines()
    for one in each:
        for line in lines.of(one):
            sys.stdout.write(f"{inert(line)}\n")
        sys.stdout.flush()


def _as_picture(each: Iterator[Sample]) -> None:
    from rich.live import Live

    from trimtab.cli.screen import picture

    with Live(console=_console(), auto_refresh=False, vertical_overflow="ellipsis") as live:
        for one in each:
            live.update(picture(one), refresh=True)
