"""Pages about plans and runs, and a live view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.api.planning import devices_of
from trimtab.api.predicting import make_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from trimtab.pages.story import Story
    from trimtab.predict.timeline import Timeline
    from trimtab.spec import (
        Plan,
        Sample,
    )


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

    from trimtab.pages.writing import write

    folder = None if figures is None else Path(figures)
    return write(Path(place), Path(out), figures=folder, complete=_with_timeline, say=say)


def _with_timeline(story: Story) -> Story:
    """The story with the memory of a step, where a trace of the plan's setting is at hand."""
    from dataclasses import replace

    found = story.plan
    if found is None or not found.estimate.process_bytes:
        return story
    line, words = step_of(found)
    if line is None:
        return replace(story, missing=(*story.missing, f"memory through a step: {words}"))
    return replace(story, timeline=line, timeline_of=words)


def step_of(found: Plan) -> tuple[Timeline | None, str]:
    """What a step of a plan holds at every moment, from traces that are kept; and a word on them, or why not.

    Nothing is traced for it, and no code of the job's is run.
    """
    from trimtab.errors import TrimtabError
    from trimtab.planner.foresight import plain_device, traced_as
    from trimtab.predict.derive import derived, simpler
    from trimtab.predict.timeline import timeline
    from trimtab.predict.traces import kept

    again = f"`trimtab plan {found.job}` for the same devices traces it again"
    asked = traced_as(found.choice)
    trace = None
    # Its shards may have been traced as they are, or derived from other numbers of them.
    for direct in ({asked.mesh.dp_shard}, set[int]()):
        try:
            device = plain_device(devices_of(found).devices[0])
            parts = [
                kept(make_request(found.job, one, device, options=found.options, clip=None))
                for one in simpler(asked, direct)
            ]
        except TrimtabError as error:
            return None, f"its devices are not known here ({error.found})"
        held = [one for one in parts if one is not None]
        if trace is None and held and len(held) == len(parts):
            trace = derived(asked, held)
    line = None if trace is None else timeline(trace)
    if line is None:
        return None, f"no trace of the setting is kept on this machine; {again}"
    words = [f"One micro-batch of {found.choice.micro_batch}"]
    words += ["without compiling, which may need less"] if found.choice.compile else []
    words += [f"of {found.choice.accumulation} a step"] if found.choice.accumulation > 1 else []
    return line, f"{', '.join(words)}."


def watch(
    runs: Sequence[Path | str] = (), *, interval_s: float = 2.0, samples: int | None = None
) -> Iterator[Sample]:
    """GPUs of this machine and runs in some folders, one sample each interval.

    for sample in trimtab.watch(["runs/slm"]):
        print(sample.gpus[0].busy, sample.runs[0].loss, sample.runs[0].advice)
    """
    from pathlib import Path

    from trimtab.probe.world import here
    from trimtab.watching.watch import Watcher

    return Watcher(world=here(), places=[Path(one) for one in runs]).samples(interval_s, samples)
