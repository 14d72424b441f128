"""Watch GPUs and runs: find run folders, follow their logs, and say whether each run still makes progress."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import WrongUse
from trimtab.probe.nvml import read_gauges
from trimtab.spec import Incident, WatchedRun, WatchSample
from trimtab.training.run_folder import (
    EVENTS_FILE,
    IDENTITY_FILE,
    LOCK_FILE,
    LOG_FILE,
    PLAN_FILE,
    JsonLineTail,
    is_step,
    list_damage,
    read_attempt,
    read_run_plan,
)
from trimtab.training.step_log import StepLine
from trimtab.units import format_duration, parse_whole
from trimtab.watching.advice import advise

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.probe.machine import Machine
    from trimtab.spec import Attempt, GpuReading, Plan

DEEPEST = 3
"""Folders below the one given, in which runs are looked for."""
MOST_FOLDERS = 3000
"""Looked into; a home directory has many more, and a run is not hidden that deep."""
RECENT_S, MOST_UNNAMED = 86_400.0, 12
"""Runs that nobody named are shown for a day, and at most so many of them."""
RECENT = 50
"""Steps that speed and waiting are taken from."""
FIRST_BYTES = 1 << 20
"""Of a log that was there already: as many of its last bytes are read, which is more than RECENT lines."""
SILENT_STEPS, SILENT_S = 20, 60.0
"""A run stalls that has said nothing for this many of its own steps, and at least for so long: a checkpoint
or an evaluation may be between two lines."""
SHOWN_EVENTS = 3
UNDER_WAY = ("starting", "running", "stalled")


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's."""
    return (folder / LOG_FILE).is_file() or (folder / IDENTITY_FILE).is_file()


def find_runs(given: Sequence[Path]) -> list[Path]:
    """Find the runs among and below the folders given; raise for a missing folder."""
    runs: dict[Path, None] = {}
    for folder in given:
        if not folder.is_dir():
            raise WrongUse(
                f"watch {folder}",
                found="it is a file" if folder.exists() else "there is no such folder",
                cure="Give the folder of a run (trimtab train --out), or one that runs are in.",
            )
        if is_run(folder):
            runs[folder] = None
        else:
            runs |= dict.fromkeys(_runs_below(folder))
    return list(runs)


def _runs_below(root: Path) -> list[Path]:
    """Find runs in a folder, to a limited depth and number of folders."""
    runs, level, looked = [], [root], 0
    for _ in range(DEEPEST):
        deeper: list[Path] = []
        for folder in level:
            try:
                inside = sorted(
                    entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)
                )
            except OSError:
                continue
            looked += len(inside)
            children = [Path(path) for path in inside if not Path(path).name.startswith(".")]
            runs += [child for child in children if is_run(child)]
            deeper += [child for child in children if not is_run(child)]
        if looked > MOST_FOLDERS:
            break
        level = deeper
    return runs


def recent_runs(runs: Sequence[Path], now: float) -> list[Path]:
    """Keep the latest of the runs that wrote something in the last day."""
    ages = {
        run: age for run in runs if (age := _file_age(run / LOG_FILE, now)) is not None and age < RECENT_S
    }
    kept = sorted(ages, key=lambda run: ages[run])[:MOST_UNNAMED]
    return [run for run in runs if run in kept]


@dataclass
class RunFollower:
    """Follows the folder of one run."""

    folder: Path
    lines: deque[StepLine] = field(default_factory=lambda: deque(maxlen=RECENT))
    events: deque[Incident] = field(default_factory=lambda: deque(maxlen=SHOWN_EVENTS))
    seen: int = 0
    """Steps that have been read."""
    plan: Plan | None = None
    _log: JsonLineTail | None = None
    _told: JsonLineTail | None = None
    _plan_at: float | None = None

    def look(self, now: float, world: Machine, gauges: Sequence[GpuReading]) -> WatchedRun:
        """Return the state of the run now; devices only if they are certain."""
        self._read()
        note = read_attempt(self.folder)
        plan, last = self.plan, self.lines[-1] if self.lines else None
        steps = _total_steps(note, plan)
        silent = _file_age(self.folder / LOG_FILE, now)
        typical = statistics.median(line.time_s for line in self.lines) if self.lines else None
        state, why = self._state(note, steps, silent, typical, world)
        taken = sum(line.time_s for line in self.lines)
        waits = [line.data_wait_s for line in self.lines if line.data_wait_s is not None]
        mfu = _median([line.mfu for line in self.lines])
        return WatchedRun(
            folder=str(self.folder),
            job=plan.job if plan is not None else "",
            state=state,
            why=why,
            step=last.step if last is not None else None,
            steps=steps,
            loss=last.loss if last is not None else None,
            step_s=typical,
            samples_per_s=_median([line.samples_per_s for line in self.lines]),
            recent=len(self.lines) or None,
            planned_samples_per_s=plan.estimate.samples_per_s if plan is not None else None,
            mfu=mfu,
            mfu_rating=_rate_mfu(mfu, plan),
            reserved_bytes=max(
                (line.reserved_bytes for line in self.lines if line.reserved_bytes), default=None
            ),
            planned_reserved_bytes=(plan.estimate.reserved_bytes or None) if plan is not None else None,
            data_wait=min(1.0, sum(waits) / taken) if waits and taken > 0 else None,
            left_s=_seconds_left(last, steps, typical) if state in UNDER_WAY else None,
            silent_s=silent,
            events=tuple(self.events),
            devices=self._devices(world, gauges) if state in UNDER_WAY else (),
            damage=list_damage(self.folder),
        )

    def _read(self) -> None:
        """Read what is new in the folder."""
        self._log = self._log or _open_at_end(self.folder / LOG_FILE)
        self._told = self._told or _open_at_end(self.folder / EVENTS_FILE)
        before = self._log.at
        try:
            for line in self._log.read_new(StepLine):
                if self._log.at < before:
                    # The file was rewritten: discard what was read before.
                    self.lines.clear()
                    before = 0
                if line is not None and is_step(line):
                    self.lines.append(line)
                    self.seen += 1
            self.events += [event for event in self._told.read_new(Incident) if event is not None]
        except OSError:
            pass  # a file that is not there yet, or not for us to read
        changed = _file_age(self.folder / PLAN_FILE, 0.0)
        if changed != self._plan_at:
            self._plan_at = changed
            self.plan = read_run_plan(self.folder)

    def _state(
        self,
        note: Attempt | None,
        steps: int | None,
        silent: float | None,
        typical: float | None,
        world: Machine,
    ) -> tuple[str, str]:
        """Return the state of the run, and its reason if it is not obvious."""
        step = self.lines[-1].step if self.lines else 0
        said_end = note is not None and note.state == "ended"
        if (steps is not None and step >= steps) or (said_end and steps is None):
            return "done", f"{step:,} steps"
        if said_end:
            return "ended", f"at step {step:,} of {steps:,}: the same command resumes it"
        pid, host = read_lock_holder(self.folder)
        if pid and host == world.host("name") and world.host(f"process:{pid}") is None:
            return "gone", f"its process {pid} is no more, and it did not say that it ended"
        return _progress_state(silent, typical)

    def _devices(self, world: Machine, gauges: Sequence[GpuReading]) -> tuple[str, ...]:
        """Return this machine's GPUs that the run uses: by its process, the others by its plan.

        The plan counts GPUs as its process saw them, so it is believed only where it has the first one right.
        """
        pid, host = read_lock_holder(self.folder)
        if not pid or host != world.host("name"):
            return ()
        own = [gauge for gauge in gauges if any(process.pid == pid for process in gauge.processes or ())]
        places = self.plan.places if self.plan is not None else ()
        here = [place.device for place in places if place.node == places[0].node]
        if own and here and own[0].index == here[0]:
            return tuple(gauge.key for gauge in gauges if gauge.index in here and "/" not in gauge.key) or (
                own[0].key,
            )
        if not own and here and len(here) == len(gauges):
            # In a container processes have other numbers; a run that uses every GPU uses these.
            return tuple(gauge.key for gauge in gauges)
        return tuple(gauge.key for gauge in own)


def _progress_state(silent: float | None, typical: float | None) -> tuple[str, str]:
    """Return whether steps still come, for a run that has not ended."""
    if typical is None:
        return "starting", "no step has been taken yet"
    if silent is not None and silent > max(SILENT_S, SILENT_STEPS * typical):
        return "stalled", f"no step for {format_duration(silent)}, they took {format_duration(typical)} each"
    return "running", ""


def read_lock_holder(folder: Path) -> tuple[int, str]:
    """Return process and machine that train into a folder, by its lock; 0 if it does not say."""
    try:
        words = (folder / LOCK_FILE).read_text(encoding="utf-8", errors="replace")[:300].split()
    except OSError:
        return 0, ""
    if len(words) != 4 or words[0] != "process" or words[2] != "on":  # noqa: PLR2004 - process 12 on host
        return 0, ""
    return parse_whole(words[1]) or 0, words[3]


def _seconds_left(last: StepLine | None, steps: int | None, typical: float | None) -> float | None:
    """Return the seconds to the end of the run, at the speed of the last steps."""
    if last is None or steps is None or typical is None:
        return None
    return max(0, steps - last.step) * typical


def _total_steps(note: Attempt | None, plan: Plan | None) -> int | None:
    """Return the steps of the whole run: from its note, or from its plan."""
    if note is not None and note.steps:
        return note.steps
    return plan.workload.steps if plan is not None and plan.workload is not None else None


def _open_at_end(file: Path) -> JsonLineTail:
    """Return a tail that skips most of a file; it begins within a line, which is left out."""
    try:
        size = file.stat().st_size
    except OSError:
        return JsonLineTail(file)
    return JsonLineTail(file, at=max(0, size - FIRST_BYTES))


def _file_age(file: Path, now: float) -> float | None:
    """Return the seconds since a file was written; None if there is none."""
    try:
        written = file.stat().st_mtime
    except OSError:
        return None
    return max(0.0, now - written) if now else written


def _median(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def _rate_mfu(mfu: float | None, plan: Plan | None) -> str | None:
    """Return the rating of a measured MFU, against the plan's reference."""
    from trimtab.predict.estimate import rate_mfu

    return None if mfu is None or plan is None else rate_mfu(mfu, plan.estimate.mfu_reference)


KEPT_LOOKS = 10
"""Looks at a GPU that are kept: what is said of it holds for all of them, not for one unlucky moment."""
FIND_EVERY_S = 5.0
"""Between two searches for new runs."""


@dataclass
class RunWatcher:
    """Samples a machine and the runs in some folders.

    watcher = Watcher(world=here(), places=[Path("runs")])
    for sample in watcher.samples(interval_s=2.0): ...
    """

    world: Machine
    places: Sequence[Path] = ()
    """Runs, or folders that runs are in; none: those below the current one that are not long over."""
    now: Callable[[], float] = time.time
    wait: Callable[[float], None] = time.sleep
    followers: dict[Path, RunFollower] = field(default_factory=dict)
    looks: dict[str, deque[GpuReading]] = field(default_factory=dict)
    _found_s: float | None = None

    def sample(self) -> WatchSample:
        """Sample everything now."""
        now = self.now()
        gauges_found, why = read_gauges(self.world)
        for gauge in gauges_found:
            self.looks.setdefault(gauge.key, deque(maxlen=KEPT_LOOKS)).append(gauge)
        if self._found_s is None or now - self._found_s >= FIND_EVERY_S:
            self._found_s = now
            found_runs = find_runs(self.places) if self.places else recent_runs(find_runs([Path()]), now)
            for place in found_runs:
                self.followers.setdefault(place, RunFollower(place))
        runs = tuple(self._view(follower, now, gauges_found) for follower in self.followers.values())
        return WatchSample(at_s=now, gpus=gauges_found, no_gpus=why, runs=runs)

    def _view(self, follower: RunFollower, now: float, gauges_found: Sequence[GpuReading]) -> WatchedRun:
        view = follower.look(now, self.world, gauges_found)
        return view.replace(advice=advise(view, follower.plan, self.looks, steps=follower.seen))

    def samples(self, interval_s: float, most: int | None = None) -> Iterator[WatchSample]:
        """Yield one sample each interval: forever, `most` times, or until all named runs have ended."""
        count = 0
        begun = self.now()
        while True:
            sample = self.sample()
            yield sample
            count += 1
            over = self.places and sample.runs and not any(run.state in UNDER_WAY for run in sample.runs)
            if over or (most is not None and count >= most):
                return
            # By the clock and not by the last sample, so that slow samples do not add up.
            self.wait(max(0.0, begun + count * interval_s - self.now()))
