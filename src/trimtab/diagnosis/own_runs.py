"""Settle what `trimtab train` printed about its own runs: how each ended, and what happened on the way.

A line of trimtab's own belongs to no other kind: an out-of-memory that a run recovered from is no finding. Of
several ends of one run the last counts, unless the run was resumed after it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trimtab.diagnosis.fault_kinds import load_kinds
from trimtab.diagnosis.log_scanner import Sighting
from trimtab.spec import Severity
from trimtab.units import parse_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trimtab.spec import WatchedRun

DONE, ASKED, INCIDENT = "run-done", "run-asked-to-end", "run-incident"
ENDINGS = {
    DONE: "it was done",
    ASKED: "it was asked to end",
    "run-stopped": "bad numbers had stopped it",
    "run-failed": "it had failed",
    "run-crashed": "it had crashed",
}
"""Kinds that tell how a run ended, and what is said of those after which it was taken up again."""
RESUMED = "run-resumed"
RESUME_WORDS = ("resume", "requeue", "resize")
"""Events that tell of a run that was taken up again; of several the first tells most."""
AGAIN = (RESUMED, "run-lost-rank")
"""What a run says that is taken up again."""
STATES = (*ENDINGS, "run-ended-early", "run-gone", "run-under-way", "run-stalled", "run-unfinished")
"""Kinds that tell how a run stands: they come before what it met."""
EVENTS = "events.jsonl"


def is_own_kind(name: str) -> bool:
    """Return whether lines of `trimtab train` itself tell a kind.

    >>> is_own_kind("run-done"), is_own_kind("out-of-memory")
    (True, False)
    """
    return name.startswith("run-")


def settle_runs(sightings: Iterable[Sighting], ends: Sequence[Sighting] = ()) -> list[Sighting]:
    """Settle the sightings of trimtab's own runs; `ends` are the ends that run folders tell.

    The file of such an end is in the folder whose events it is about.
    """
    all_sightings = _tell_apart(list(sightings))
    foreign = [sighting for sighting in all_sightings if not is_own_kind(sighting.of)]
    by_file: dict[str, list[Sighting]] = {}
    for sighting in all_sightings:
        if is_own_kind(sighting.of):
            by_file.setdefault(sighting.file, []).append(sighting)
    end_by_file = {_events_file(end.file): end for end in ends}
    settled: list[Sighting] = []
    for file, own in by_file.items():
        settled += _settle_run(own, end_by_file.pop(file, None))
    settled = _join_resumes(_drop_repeated([*end_by_file.values(), *settled]))
    there = {sighting.of for sighting in (*foreign, *settled)}
    # A warning that only repeats what another kind tells better is left out; errors go below their cause.
    kept = [
        sighting
        for sighting in settled
        if _is_error(sighting) or not there & {*load_kinds()[sighting.of].after}
    ]
    return [*foreign, *_count_kinds(kept)]


def _is_error(sighting: Sighting) -> bool:
    return load_kinds()[sighting.of].severity is Severity.ERROR


def _events_file(file: str) -> str:
    """Return the events file of the folder that a file is in."""
    head, slash, _ = file.rpartition("/")
    return f"{head}{slash}{EVENTS}"


def _tell_apart(sightings: list[Sighting]) -> list[Sighting]:
    """Keep one sighting for each line of trimtab's own: an end if it tells one, never another kind."""
    best: dict[tuple[str, int], str] = {}
    for sighting in sightings:
        if is_own_kind(sighting.of) and not sighting.is_fact:
            place = (sighting.file, sighting.line)
            best[place] = sighting.of if sighting.of in ENDINGS or place not in best else best[place]
    return [
        sighting
        for sighting in sightings
        if sighting.is_fact or best.get((sighting.file, sighting.line), sighting.of) == sighting.of
    ]


def _settle_run(own: list[Sighting], end: Sighting | None) -> list[Sighting]:
    """Settle one run in one file: its last end, what happened, and ends that were not the last."""
    own = _drop_said_twice(sorted(own, key=lambda sighting: sighting.line))
    taken_up = max((sighting.line for sighting in own if sighting.of in AGAIN), default=0)
    last = next(
        (sighting for sighting in reversed(own) if sighting.of in ENDINGS and sighting.line > taken_up), None
    )
    if end is not None and (last is None or end.of != "run-ended-early"):
        # The folder knows more than the events, but for the reason why a run did not come to its end.
        last = end
    met = [
        replace(sighting, of=INCIDENT, captured=sighting.captured | {"what": ENDINGS[sighting.of]})
        if sighting.of in ENDINGS
        else sighting
        for sighting in own
        if sighting is not last
    ]
    return [*met, *([] if last is None else [last])]


def _drop_said_twice(own: list[Sighting]) -> list[Sighting]:
    """Drop an end that is repeated in other words, as by an event and by the error after it."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for sighting in own:
        key = (sighting.of, sighting.captured.get("step", ""))
        if sighting.of not in ENDINGS or key not in seen:
            kept.append(sighting)
        seen.add(key)
        if sighting.of in AGAIN:
            seen.clear()
    return kept


def _drop_repeated(settled: list[Sighting]) -> list[Sighting]:
    """Drop what two files tell alike, as a folder and printed lines do; the folder wins."""
    seen: dict[tuple[str, str, str], str] = {}
    kept = []
    for sighting in sorted(settled, key=lambda sighting: not _is_in_folder(sighting)):
        at = sighting.captured.get("steps" if sighting.of == DONE else "step", "")
        first = seen.setdefault((sighting.of, at, sighting.captured.get("why", "")), sighting.file)
        if first == sighting.file or _is_in_folder(sighting):
            kept.append(sighting)
    return kept


def _join_resumes(settled: list[Sighting]) -> list[Sighting]:
    """Keep one sighting for each time that a run was resumed.

    A run that is queued again says so when it ends and when it resumes, and one that resumes on another
    number of GPUs says that too: three lines at one step, and one resume.
    """
    kept: list[Sighting] = []
    said: dict[tuple[str, str], set[str]] = {}
    for sighting in settled:
        if sighting.of != RESUMED:
            kept.append(sighting)
            continue
        place = (sighting.file, sighting.captured.get("step", ""))
        word = next((word for word in RESUME_WORDS if f"{word} at step" in sighting.text), RESUME_WORDS[0])
        words = said.setdefault(place, set())
        if not words or word in words:
            said[place] = {word}
            kept.append(sighting)
            continue
        words.add(word)
        if word == RESUME_WORDS[0]:
            # What it went on from is worth more than that it would go on.
            number = max(
                at for at, other in enumerate(kept) if other.of == RESUMED and other.file == sighting.file
            )
            kept[number] = sighting
    return kept


def _is_in_folder(sighting: Sighting) -> bool:
    return sighting.file.rpartition("/")[2] in {EVENTS, "attempt.json", "log.jsonl"}


def _count_kinds(settled: list[Sighting]) -> list[Sighting]:
    """Add how often each kind occurred, and at which steps; keep the last answer."""
    counted: list[Sighting] = []
    for name in dict.fromkeys(sighting.of for sighting in settled):
        alike = [sighting for sighting in settled if sighting.of == name]
        last = alike[-1].captured if name not in STATES else {}
        words = {key: text.rstrip(".") for key, text in last.items()} | {
            "times": format_times(len(alike), [sighting.captured.get("step", "") for sighting in alike])
        }
        counted += [
            replace(sighting, captured=load_kinds()[name].defaults | sighting.captured | words)
            for sighting in alike
        ]
    return counted


def format_times(count: int, steps: Iterable[str]) -> str:
    """Say how often, and at which steps.

    >>> format_times(1, ["3"]), format_times(3, ["3", "5", "5"]), format_times(2, ["", ""])
    ('once, at step 3', '3 times, at steps 3 to 5', '2 times')
    """
    numbers = sorted({number for step in steps if (number := parse_whole(step)) is not None})
    often = "once" if count == 1 else f"{count} times"
    if not numbers:
        return often
    if len(numbers) == 1:
        return f"{often}, at step {numbers[0]}"
    return f"{often}, at steps {numbers[0]} to {numbers[-1]}"


def describe_end(run: WatchedRun, *, alive: bool | None, host: str, file: str) -> Sighting:
    """Describe the state of a run by its folder; `alive` is None if its process cannot be seen."""
    step = "0" if run.step is None else str(run.step)
    steps = "an unknown number" if run.steps is None else str(run.steps)
    if run.state == "done" and run.step is not None:
        of = DONE
    elif run.state in ("done", "ended"):
        of = "run-ended-early"
    elif run.state == "gone":
        of = "run-gone"
    elif alive is None:
        of = "run-unfinished"
    else:
        of = "run-stalled" if run.state == "stalled" else "run-under-way"
    words = {"step": step, "steps": steps, "state": run.why, "folder": run.folder}
    return Sighting(
        of=of,
        file=file,
        line=1,
        text=f"{'ended' if run.state == 'done' else run.state} at step {step} of {steps}",
        captured=words | ({"host": host} if host else {}),
    )
