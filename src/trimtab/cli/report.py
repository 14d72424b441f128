"""The command `trimtab report`."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from trimtab import api, render
from trimtab.cli.console import Json, print_json, print_notes, print_text
from trimtab.units import plural


def report(
    place: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN_OR_RUN",
            help="A plan from `trimtab plan --out`, a run's folder, or what `trimtab profile --json` wrote.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.html", help="File to write the page to.")],
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write each figure as SVG, and as PNG where that can be done."),
    ] = None,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page about a plan or a run.

    It needs no network. It shows what there is of a run that is under way or broken, and says what
    is missing. Nothing is run and nothing is traced.
    """

    def say(what: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"trimtab: drawing {what}\n")

    done = api.report(place, out, figures=figures, say=say)
    if json:
        print_json(done)
        return
    many = len(done["shown"])
    print_text(render.escape_control(f"{done['file']}: {plural(many, 'figure')}"))
    if done["figures"]:
        print_text(render.escape_control(f"{figures}: {len(done['figures'])} files"))
    print_notes([f"not shown: {part}" for part in done["missing"]] + done["notes"])
