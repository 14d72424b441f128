"""The commands that show: report."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from trimtab.cli.main import Json, _print, _print_json, app


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
    _print(render.inert(f"{done['file']}: {many} figure{'s' * (many != 1)}"))
    if done["figures"]:
        _print(render.inert(f"{figures}: {len(done['figures'])} files"))
    for line in views.notes([f"not shown: {one}" for one in done["missing"]] + done["notes"]):
        _print(line, errors=True)
