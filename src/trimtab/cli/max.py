"""The command `trimtab max`."""

from __future__ import annotations

from trimtab import api
from trimtab.cli.console import Json, print_json, print_text
from trimtab.cli.options import command, state_devices
from trimtab.cli.progress import progress
from trimtab.spec.requests import MaxRequest


@command(MaxRequest)
def max(request: MaxRequest, *, json: Json = False) -> None:  # noqa: A001 - named as the command
    """Find the largest micro-batch, sequence or other number that fits.

    The job's code takes a few steps on tensors without memory, at a few values. You also get what twice as
    much would need. Exit code 3 when not even the smallest value fits, 4 when the job's code fails.
    """
    request = state_devices(request)
    with progress(f"looking for the largest {request.of}") as shown:
        result = api.max(request.replace(say=shown.say))
    if json:
        print_json(result.to_builtins())
    else:
        from trimtab import render

        print_text(render.render_largest(result))
