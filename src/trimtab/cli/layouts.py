"""The command `trimtab layouts`."""

from __future__ import annotations

from trimtab import api
from trimtab.cli.console import Json, print_json, print_text
from trimtab.cli.options import command, state_devices
from trimtab.cli.progress import progress
from trimtab.spec.requests import LayoutsRequest


@command(LayoutsRequest)
def layouts(request: LayoutsRequest, *, json: Json = False) -> None:
    """Rank the degrees of parallelism for a large language model.

    You get tensor, context, expert, pipeline and data parallel degrees. Time and memory come from formulas
    over the sizes in config.json, not from a trace, so an answer takes seconds for up to 16,384 GPUs. Exit
    code 3 when no layout fits.
    """
    request = state_devices(request)
    with progress("ranking layouts"):
        ranking = api.layouts(request)
    if json:
        print_json(ranking.to_builtins())
    else:
        from trimtab import render

        print_text(render.render_layouts(ranking))
