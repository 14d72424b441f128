"""One look after the other at GPUs and runs."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.probe.gauges import gauges
from trimtab.spec import Sample
from trimtab.watching.advice import advise
from trimtab.watching.runs import UNDER_WAY, RunFollower, find_runs, recent_runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trimtab.probe.world import World
    from trimtab.spec import Gauge, WatchedRun

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

    world: World
    places: Sequence[Path] = ()
    """Runs, or folders that runs are in; none: those below the current one that are not long over."""
    now: Callable[[], float] = time.time
    wait: Callable[[float], None] = time.sleep
    followers: dict[Path, RunFollower] = field(default_factory=dict)
    looks: dict[str, deque[Gauge]] = field(default_factory=dict)
    _found_s: float | None = None

    def sample(self) -> Sample:
        """Everything, now."""
        now = self.now()
        found, why = gauges(self.world)
        for gauge in found:
            self.looks.setdefault(gauge.key, deque(maxlen=KEPT_LOOKS)).append(gauge)
        if self._found_s is None or now - self._found_s >= FIND_EVERY_S:
            self._found_s = now
            found_runs = find_runs(self.places) if self.places else recent_runs(find_runs([Path()]), now)
            for place in found_runs:
                self.followers.setdefault(place, RunFollower(place))
        runs = tuple(self._view(follower, now, found) for follower in self.followers.values())
        return Sample(at_s=now, gpus=found, no_gpus=why, runs=runs)

    def _view(self, follower: RunFollower, now: float, found: Sequence[Gauge]) -> WatchedRun:
        view = follower.look(now, self.world, found)
        return view.replace(advice=advise(view, follower.plan, self.looks, steps=follower.seen))

    def samples(self, interval_s: float, most: int | None = None) -> Iterator[Sample]:
        """One sample each interval: for ever, so many, or until all runs that were named have ended."""
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
