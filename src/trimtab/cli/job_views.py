"""Jobs as people read them on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from trimtab.render import _indented, inert
from trimtab.units import format_duration, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from trimtab.spec import Headway, JobView, QueuedJob

_STYLES = {"running": "green", "pending": "yellow", "completed": "cyan"}


def jobs(found: Sequence[JobView]) -> RenderableType:
    """A paragraph a job."""
    if not found:
        return Text("no job of trimtab's in the queue, and no run on this machine")
    parts: list[RenderableType] = []
    for one in found:
        parts += [*([Text()] if parts else []), *_job(one)]
    return Group(*parts)


def cancelled(one: JobView) -> RenderableType:
    """What was cancelled, and what is left of it."""
    if one.run is None:
        return Text(inert(f"{_named(one)} is cancelled; no run has begun"))
    return Group(
        Text(inert(f"{_named(one)} is told to end; it saves the step it is at")),
        _indented("at", _progress(one.run), "dim"),
        _indented("run", one.run.folder, "dim"),
    )


def _named(one: JobView) -> str:
    return one.id if one.kind == "local" else f"job {one.id}"


def _job(one: JobView) -> list[RenderableType]:
    style = _STYLES.get(one.state, "red")
    words = "" if one.queued is None else _queue_words(one.queued)
    parts: list[RenderableType] = [
        Text.assemble((inert(_named(one)), "bold"), "  ", (inert(one.state), style), inert(words))
    ]
    if one.why:
        parts.append(_indented("why", one.why, style))
    if one.run is not None:
        parts += [_indented("at", _progress(one.run), "dim"), _indented("run", one.run.folder, "dim")]
        last = one.run.last_incident
        if last is not None:
            parts.append(
                _indented("last", f"{last.kind} at step {last.step}: {last.why}; {last.done}", "dim")
            )
    if one.log is not None:
        parts.append(_indented("log", one.log, "dim"))
    parts += [Text(f"    {inert(line)}", style="dim", no_wrap=True, overflow="ellipsis") for line in one.tail]
    return parts


def _queue_words(job: QueuedJob) -> str:
    """Where it runs and for how long, or what it waits for."""
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
    """The steps that a speed is of; a summary's is of all of them.

    >>> last_steps(50), last_steps(1), last_steps(None)
    ('last 50 steps', 'last step', '')
    """
    return "" if not count else "last step" if count == 1 else f"last {count} steps"


def beside(*words: str) -> str:
    """What is worth saying of a number, in brackets behind it.

    >>> beside("last 50 steps", "plan 64"), beside("", "")
    (' (last 50 steps, plan 64)', '')
    """
    said = ", ".join(filter(None, words))
    return f" ({said})" if said else ""


def _progress(run: Headway) -> str:
    parts = [run.job] if run.job else []
    parts.append(f"step {run.step}" + (f" of {run.steps}" if run.steps else ""))
    if run.loss is not None:
        parts.append(f"loss {run.loss:.4f}")
    if run.samples_per_s is not None:
        rate = run.samples_per_s
        number = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"  # noqa: PLR2004
        parts.append(f"{number} samples/s{beside(last_steps(run.recent))}")
    if run.left_s:
        parts.append(f"{format_duration(run.left_s)} left")
    return ", ".join(parts)
