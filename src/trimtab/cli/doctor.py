"""The command `trimtab doctor`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.console import Json, print_json, print_text, show_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from trimtab.diagnosis.findings import Diagnosed, Diagnosis

MOST_CONSEQUENCES = 6
TO_SEND = (
    "If the run failed anyway, give the logs of all ranks (torchrun --log-dir LOGS --redirects 3), the "
    "scheduler's output with stderr (slurm-ID.out), or the node's `dmesg -T`: the line with the cause is in "
    "one of them. A message that is not recognised is worth a report, with the twenty lines before it."
)


def doctor(
    logs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LOG]...",
            help="Logs, folders of logs, run folders, error files of torchrun, memory snapshots, NCCL flight "
            "records; - for standard input.",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Plan to compare the measured step time with; default: the plan of the run folder.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check this machine, or name what made a run fail from its logs.

    Reads only; pickles are read without running anything in them. Exit code 0 when there is no error, 4 when
    the job is to be changed, 5 when the machine, driver, scheduler or network is, 2 when nothing can be read.
    """
    from pathlib import Path

    from trimtab import api
    from trimtab.errors import WrongUse
    from trimtab.planner.plan_files import is_plan_file

    for log in logs or ():
        if is_plan_file(Path(log)):
            raise WrongUse(
                f"doctor {log}",
                found="it is a plan, and no log of a run",
                cure=f"Give a log or a run folder, and the plan beside it: trimtab doctor LOG --plan {log}",
            )
    with _progress() as say:
        found = api.doctor(*(logs or ()), plan=plan, say=say)
    if json:
        print_json(found.to_builtins())
    else:
        print_text(_shown(found, about_logs=bool(logs)))
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def _shown(found: Diagnosis, *, about_logs: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from trimtab import render

    parts: list[RenderableType] = [
        Text(render.escape_control(_heading(found, about_logs=about_logs)), style="bold")
    ]
    for finding in found.findings:
        parts += [Text(), render.render_finding(finding), *_below(finding)]
    if not found.findings and found.read:
        said = TO_SEND if about_logs else _checked()
        parts.append(render.render_labelled("send" if about_logs else "checked", said, "cyan"))
    parts += [render.render_labelled("note", note, "cyan") for note in found.notes]
    return Group(*parts)


def _below(finding: Diagnosed) -> list[RenderableType]:
    from trimtab import render

    parts = [render.render_labelled("then", text, "dim") for text in finding.consequences[:MOST_CONSEQUENCES]]
    more = len(finding.consequences) - MOST_CONSEQUENCES
    if more > 0:
        parts.append(render.render_labelled("then", f"{more} more; --json has them all", "dim"))
    return parts


def _heading(found: Diagnosis, *, about_logs: bool) -> str:
    from trimtab.diagnosis.findings import count_severities

    if not found.read:
        return "nothing could be read"
    what = found.read[0] if len(found.read) == 1 else f"{len(found.read)} files"
    counts = count_severities(found.findings)
    if not counts:
        return f"{what}: nothing recognised" if about_logs else "This machine: nothing wrong"
    parts = [f"{number} {name}{'s' * (number > 1 and name != 'info')}" for name, number in counts.items()]
    heading = f"{what if about_logs else 'This machine'}: {', '.join(parts)}"
    if about_logs and counts.get("error", 0) > 1:
        return f"{heading}; start with the first: it happened first"
    return heading


def _checked() -> str:
    from trimtab.diagnosis.machine import CHECKED

    return "; ".join(CHECKED)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the file being read on stderr, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from trimtab import render

    with show_status("looking") as show:
        yield lambda what: show(render.escape_control(what))
