"""The command `trimtab launch`: show what would be run, and run it."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab import api
from trimtab.cli.console import Json, print_json, print_notes, say
from trimtab.cli.options import command, state_devices
from trimtab.cli.progress import progress
from trimtab.errors import WrongUse
from trimtab.launching import submit
from trimtab.launching.quoting import format_comment, shell_assignment, shell_line
from trimtab.spec import LaunchesOutput
from trimtab.spec.requests import LaunchRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.spec import Launch


@command(LaunchRequest)
def launch(
    request: LaunchRequest,
    *,
    write: Annotated[
        bool, typer.Option("--write", help="Write the script and its files, and start nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Show exactly what would be run for a plan; --yes runs it.

    By torchrun on this machine, or as a script or manifest for a scheduler: stdout has the text and nothing
    else. Defaults of your site or project are in [launch] of trimtab.toml.
    """
    counts = tuple(request.compare)
    if request.yes and len(counts) > 1:
        raise WrongUse(
            f"--yes with --compare {','.join(map(str, counts))}",
            found="those are several launches, and one is wanted",
            cure="Give --write, look at them, and submit one; or --compare with one number.",
        )
    with progress("planning") as shown:
        launches = api.prepare_launch(state_devices(request).replace(say=shown.say))
    if request.yes:
        submit.check_startable(launches[0])
    if not json:
        _show(launches)
    if write and not request.yes:
        files = [name for launch in launches for name in submit.write_launch_files(launch)]
        say(f"wrote {', '.join(files)}" if files else "there is no file to write")
    runs_here = request.yes and launches[0].script is None
    if runs_here:
        launches = tuple(launch.replace(job_id=str(os.getpid())) for launch in launches)
    elif request.yes:
        launches = tuple(submit.submit_launch(launch) for launch in launches)
        say(f"submitted: job {launches[0].job_id}")
    if json:
        print_json((LaunchesOutput(launches=tuple(launches)) if counts else launches[0]).to_builtins())
    if runs_here:
        submit.exec_launch(launches[0], os.environ, quiet=json)
    if not (request.yes or write or json):
        say(_what_next(launches[0]))


def _what_next(launch: Launch) -> str:
    if launch.kind in submit.RUNS:
        return "nothing was started or written: --yes starts it, --write writes the files that it names"
    return f"nothing was written or started{'; --write writes' if launch.script is not None else ''}"


def _show(launches: Sequence[Launch]) -> None:
    for launch in launches:
        sys.stdout.write(launch_text(launch, several=len(launches) > 1))
    sys.stdout.flush()
    print_notes(launch_notes(launches))


def launch_text(launch: Launch, *, several: bool) -> str:
    """Return what a launch would run, as a shell takes it: the script, or the command with its variables."""
    head = f"{format_comment(launch.script_file or '')}\n" if several else ""
    if launch.script is not None:
        return head + launch.script
    sets = [f"{shell_assignment(name, value)} \\\n" for name, value in launch.environment.items()]
    return head + "".join(sets) + shell_line(launch.command) + "\n"


def launch_notes(launches: Sequence[Launch]) -> list[str]:
    """Return the remarks about launches, each once."""
    lines: dict[str, None] = {}
    for launch in launches:
        if launch.fault:
            lines[f"this run would end at once: {launch.fault}"] = None
        if launch.script is None:
            lines |= {f"{name}: {why}": None for name, why in launch.why.items()}
        if launch.starts:
            lines[f"which starts: {shlex.join(launch.starts)}"] = None
        lines |= dict.fromkeys(launch.notes)
    return list(lines)
