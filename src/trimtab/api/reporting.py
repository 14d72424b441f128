"""The functions `report` and `watch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trimtab.pages.report_data import ReportData
    from trimtab.spec import WatchSample


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


def _with_timeline(story: ReportData) -> ReportData:
    """Return the report data with the memory timeline of a step, if the plan has a cached trace."""
    from dataclasses import replace

    from trimtab.planner.estimates import read_cached_timeline

    found = story.plan
    if found is None or not found.estimate.process_bytes:
        return story
    line, words = read_cached_timeline(found)
    if line is None:
        return replace(story, missing=(*story.missing, f"memory through a step: {words}"))
    return replace(story, timeline=line, timeline_of=words)


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
