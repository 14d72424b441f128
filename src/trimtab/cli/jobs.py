"""The commands `trimtab jobs` and `trimtab cancel`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.text import Text

from trimtab import api, render
from trimtab.cli.console import Json, print_json, print_text
from trimtab.errors import WrongUse
from trimtab.render import escape_control, render_labelled
from trimtab.spec import CancelOutput, JobsOutput
from trimtab.units import format_duration, format_figure, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from trimtab.spec import JobProgress, JobView, QueuedJob

_STYLES = {"running": "green", "pending": "yellow", "completed": "cyan"}


def jobs(
    places: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR", help="Run folders, or folders that contain them; default: runs."),
    ] = None,
    tail: Annotated[
        int, typer.Option(metavar="LINES", help="How many lines of each job's output to show.")
    ] = 5,
    summary: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Show instead how the run in this folder ended."),
    ] = None,
    json: Json = False,
) -> None:
    """Show trimtab's jobs and how far their runs have come.

    Your jobs in Slurm's queue, jobs recorded in run folders, and runs on this machine.
    """
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
            print_json(found.to_builtins())
        else:
            typer.echo(format_summary(found), nl=False)
        return
    if tail < 0:
        raise WrongUse(f"--tail {tail}", found="it is below 0", cure="Give --tail at least 0.")
    views, silences = api.find_jobs(*(places or []), tail=tail)
    if json:
        notes = tuple(str(silence) for silence in silences)
        print_json(JobsOutput(jobs=tuple(views), notes=notes).to_builtins())
    elif views or not silences:
        print_text(show_jobs(views))
    if silences:
        print_text(render.render_error(silences[0]), errors=True)
        raise typer.Exit(silences[0].exit_code)


def cancel(
    job_id: Annotated[
        str, typer.Argument(help="Number of the job as `trimtab jobs` shows it, or the run's folder.")
    ],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also cancel a job of another user, or one that trimtab did not submit."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Cancel a job; its run saves a checkpoint first.

    The checkpoint needs the grace time that Slurm gives. Jobs that trimtab did not submit are refused,
    unless forced.
    """
    found = api.cancel(job_id, force=force)
    if json:
        print_json(CancelOutput(cancelled=found).to_builtins())
    else:
        print_text(show_cancelled(found))


def show_jobs(jobs: Sequence[JobView]) -> RenderableType:
    """Return a paragraph for each job."""
    if not jobs:
        return Text("no job of trimtab's in the queue, and no run on this machine")
    parts: list[RenderableType] = []
    for job in jobs:
        parts += [*([Text()] if parts else []), *_job(job)]
    return Group(*parts)


def show_cancelled(job: JobView) -> RenderableType:
    """Return what was cancelled, and how far it had come."""
    if job.run is None:
        return Text(escape_control(f"{_named(job)} is cancelled; no run has begun"))
    return Group(
        Text(escape_control(f"{_named(job)} is ending; it saves the current step first")),
        render_labelled("at", _progress(job.run), "dim"),
        render_labelled("run", job.run.folder, "dim"),
    )


def _named(job: JobView) -> str:
    return job.id if job.kind == "local" else f"job {job.id}"


def _job(job: JobView) -> list[RenderableType]:
    style = _STYLES.get(job.state, "red")
    words = "" if job.queued is None else _queue_words(job.queued)
    parts: list[RenderableType] = [
        Text.assemble(
            (escape_control(_named(job)), "bold"),
            "  ",
            (escape_control(job.state), style),
            escape_control(words),
        )
    ]
    if job.why:
        parts.append(render_labelled("why", job.why, style))
    if job.run is not None:
        parts += [
            render_labelled("at", _progress(job.run), "dim"),
            render_labelled("run", job.run.folder, "dim"),
        ]
        parts += [render_labelled("damaged", words, "red") for words in job.run.damage]
        last = job.run.last_incident
        if last is not None:
            parts.append(
                render_labelled("last", f"{last.kind} at step {last.step}: {last.why}; {last.done}", "dim")
            )
    if job.log is not None:
        parts.append(render_labelled("log", job.log, "dim"))
    parts += [
        Text(f"    {escape_control(line)}", style="dim", no_wrap=True, overflow="ellipsis")
        for line in job.tail
    ]
    return parts


def _queue_words(job: QueuedJob) -> str:
    """Return where it runs and for how long, or what it waits for."""
    parts = [f"partition {job.partition}"] if job.partition else []
    if job.nodes:
        parts.append(f"on {_few(job.nodes)}")
    elif job.num_nodes:
        parts.append(f"for {plural(job.num_nodes, 'node')}")
    if job.ran_s:
        limit = "" if job.limit_s is None else f" of {format_duration(job.limit_s)}"
        parts.append(f"{format_duration(job.ran_s)}{limit}")
    if job.restarts:
        parts.append(f"restart {job.restarts}")
    return "".join(f", {part}" for part in parts)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"  # noqa: PLR2004 - a line's worth


def last_steps(count: int | None) -> str:
    """Return the steps that a speed was measured over; empty for all steps.

    >>> last_steps(50), last_steps(1), last_steps(None)
    ('last 50 steps', 'last step', '')
    """
    return "" if not count else "last step" if count == 1 else f"last {count} steps"


def beside(*words: str) -> str:
    """Join remarks on a number in parentheses.

    >>> beside("last 50 steps", "plan 64"), beside("", "")
    (' (last 50 steps, plan 64)', '')
    """
    remarks = ", ".join(filter(None, words))
    return f" ({remarks})" if remarks else ""


def _progress(run: JobProgress) -> str:
    parts = [run.job] if run.job else []
    parts.append(f"step {run.step}" + (f" of {run.steps}" if run.steps else ""))
    if run.loss is not None:
        parts.append(f"loss {run.loss:.4f}")
    if run.samples_per_s is not None:
        number = format_figure(run.samples_per_s)
        parts.append(f"{number} samples/s{beside(last_steps(run.recent))}")
    if run.left_s:
        parts.append(f"{format_duration(run.left_s)} left")
    return ", ".join(parts)
