"""The functions `report` and `watch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trimtab.pages.report_data import ReportData
    from trimtab.predict.memory import Timeline
    from trimtab.spec import Plan, WatchSample


def report(
    place: Path | str,
    out: Path | str,
    *,
    figures: Path | str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Write one self-contained page about a plan's file, a run's folder or a profile; `figures` is a folder.

    trimtab.report("plan.json", "plan.html")["file"]
    trimtab.report("runs/slm", "slm.html", figures="figures")["missing"]
    """
    from pathlib import Path

    from trimtab.pages.report import write_report

    folder = None if figures is None else Path(figures)
    return write_report(Path(place), Path(out), figures=folder, complete=_with_timeline, say=say)


def build_plan_page(plan: Plan, origin: str) -> str:
    """Return the page about a plan as HTML; `origin` says where the plan is from."""
    from trimtab.pages import page
    from trimtab.pages.report_data import ReportData

    data = _with_timeline(ReportData(origin=origin, plan=plan))
    return page.build_page(data, page.draw_figures(data))


def _with_timeline(story: ReportData) -> ReportData:
    """Return the report data with the memory timeline of a step, if the plan has a cached trace."""
    from dataclasses import replace

    from trimtab.planner.estimates import read_cached_timeline

    found = story.plan
    if found is None or not found.estimate.process_bytes:
        return story
    line, words = _read_script_timeline(found) if found.script is not None else read_cached_timeline(found)
    if line is None:
        return replace(story, missing=(*story.missing, f"memory through a step: {words}"))
    return replace(story, timeline=line, timeline_of=words)


def _read_script_timeline(plan: Plan) -> tuple[Timeline | None, str]:
    """Return the memory through one step of a training command that was followed before, with a note."""
    from trimtab.planner.plan_files import write_plan_command
    from trimtab.predict.memory import build_timeline
    from trimtab.scripts.estimate import read_followed_trace

    trace = read_followed_trace(plan)
    line = None if trace is None else build_timeline(trace)
    if line is None:
        again = write_plan_command(plan)
        return None, f"the command was not followed on this machine with these files; `{again}` follows it"
    return line, f"A step of the command: {plan.choice.accumulation} x {plan.choice.micro_batch} samples."


def watch(
    runs: Sequence[Path | str] = (), *, interval_s: float = 2.0, samples: int | None = None
) -> Iterator[WatchSample]:
    """Watch the GPUs of this machine and runs in some folders; yield a sample each interval.

    for sample in trimtab.watch(["runs/slm"]):
        print(sample.gpus[0].busy, sample.runs[0].loss, sample.runs[0].advice)
    """
    from pathlib import Path

    from trimtab.probe.machine import this_machine
    from trimtab.watching.watch import RunWatcher

    return RunWatcher(world=this_machine(), places=[Path(run) for run in runs]).samples(interval_s, samples)
