"""The commands that look after jobs: `trimtab jobs` and `trimtab cancel`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from trimtab.cli.main import Json, _print, _print_json, app
from trimtab.errors import WrongUse


@app.command()
def jobs(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Folders of runs, or of such folders; default: runs."),
    ] = None,
    tail: Annotated[int, typer.Option(metavar="LINES", help="Lines of a job's output to show.")] = 5,
    summary: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Instead, what came of the run in this folder, once it has ended."),
    ] = None,
    json: Json = False,
) -> None:
    """Show trimtab's jobs: the state in Slurm's queue, and how far the runs have come.

    Jobs of yours in the queue, jobs that the runs' folders tell of, and runs on this machine.
    """
    from trimtab import api
    from trimtab.cli import job_views as views

    if summary is not None:
        from trimtab.launching.run_summary import format_summary, read_summary

        if places:
            raise WrongUse(
                f"--summary {summary} with {places[0]}",
                found="they ask for two things",
                cure="Give one of them.",
            )
        found = read_summary(summary)
        if json:
            _print_json(found.to_builtins())
        else:
            typer.echo(format_summary(found), nl=False)
        return
    if tail < 0:
        raise WrongUse(f"--tail {tail}", found="it is below 0", cure="Give --tail at least 0.")
    shown, silences = api.find_jobs(*(places or []), tail=tail)
    if json:
        notes = [str(one) for one in silences]
        _print_json({"jobs": [one.to_builtins() for one in shown], "notes": notes})
    elif shown or not silences:
        _print(views.jobs(shown))
    if silences:
        from trimtab import render

        _print(render.error(silences[0]), errors=True)
        raise typer.Exit(silences[0].exit_code)


@app.command()
def cancel(
    job_id: Annotated[str, typer.Argument(help="As `trimtab jobs` shows it, or the run's folder.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also what is another's, or was not submitted by trimtab.")
    ] = False,
    json: Json = False,
) -> None:
    """Cancel a job; its run saves a checkpoint first, if Slurm's grace allows.

    Refuses jobs that trimtab did not submit, unless forced.
    """
    from trimtab import api
    from trimtab.cli import job_views as views

    found = api.cancel(job_id, force=force)
    if json:
        _print_json({"cancelled": found.to_builtins()})
    else:
        _print(views.cancelled(found))
