"""The command `trimtab layouts`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from trimtab import api
from trimtab.cli.console import Json, print_json, print_text, write_plan_file
from trimtab.cli.options import command, state_devices
from trimtab.cli.progress import progress
from trimtab.spec.requests import LayoutsRequest


@command(LayoutsRequest)
def layouts(
    request: LayoutsRequest,
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the first layout, or --row, as a plan.")
    ] = None,
    json: Json = False,
) -> None:
    """Rank the degrees of parallelism for a large language model.

    You get tensor, context, expert, pipeline and data parallel degrees. Time and memory come from formulas
    over the sizes in config.json, not from a trace, so an answer takes seconds for up to 16,384 GPUs. With
    --out, a layout becomes a plan for `trimtab apply` and `trimtab launch`. Exit code 3 when no layout fits.
    """
    request = state_devices(request)
    with progress("ranking layouts"):
        study = api.study_request(request)
        ranking = api.describe_study(request, study)
        if out is not None:
            write_plan_file(api.plan_study(request, study), out)
    if json:
        print_json(ranking.to_builtins())
    else:
        from trimtab import render

        print_text(render.render_layouts(ranking))
