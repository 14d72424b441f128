"""Writes down what happens: rank 0 into the folder and onto the terminal, the others through rank 0."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from trimtab.errors import TrimtabError
from trimtab.spec import Incident, IncidentKind
from trimtab.training.folder import write_whole
from trimtab.training.settle import gathered
from trimtab.training.worker import is_lost

if TYPE_CHECKING:
    from trimtab.training.folder import RunFolder
    from trimtab.training.meters import Meters
    from trimtab.training.world import World

ATTEMPT = "attempt.json"
"""What the next attempt finds: whether this one ended in order."""


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


class Scribe:
    """The incidents of one attempt."""

    def __init__(self, world: World, folder: RunFolder, meters: Meters) -> None:
        self.world = world
        self.folder = folder
        self.meters = meters
        self.step = 0
        """The step that an incident strikes at where it does not say so itself."""
        self.news: list[Incident] = []
        """What happened on this rank and is not in the folder yet."""
        self.seen: list[Incident] = []
        """What has been written in this attempt."""
        self._attempt = 1

    def tell(self, kind: IncidentKind, why: str, done: str, *, step: int | None = None) -> None:
        """An incident that all ranks know of."""
        if self.world.is_main:
            at = self.step if step is None else step
            self.write(Incident(kind=kind, at_s=time.time(), step=at, rank=0, why=why, done=done))

    def write(self, one: Incident) -> None:
        """Put an incident on record, on rank 0."""
        self.seen.append(one)
        self.folder.event(one)
        self.meters.event(one)

    def hear(self, one: Incident) -> None:
        """Take what happened on this rank, where steps are counted from 0."""
        counted = one.replace(step=None if one.step is None else one.step + 1)
        if self.world.is_main:
            self.write(counted)
        else:
            self.news.append(counted)

    def share(self) -> None:
        """Bring what happened on other ranks to rank 0; all ranks call it."""
        told = gathered(self.world, [one.to_json() for one in self.news])
        self.news = []
        for text in (text for texts in told for text in texts):
            self.write(Incident.from_json(text))

    def begin(self) -> None:
        """Note that an attempt is under way, and say so where the one before ended without a word."""
        if not self.world.is_main:
            return
        before = self._before()
        self.folder.events_file.touch()
        lines = self.folder.lines()
        if before.get("state") == "running":
            self.tell(
                IncidentKind.LOST_RANK,
                f"attempt {before['attempt']}, with {_processes(before['procs'])}, "
                "ended without a word: a process was killed, or its node was lost",
                "this attempt goes on from the last checkpoint, or from the start",
                step=lines[-1]["step"] if lines else 0,
            )
        if before and before["procs"] != self.world.size:
            self.tell(
                IncidentKind.RESIZE,
                f"the last attempt had {_processes(before['procs'])}, and this one has "
                f"{_processes(self.world.size)}",
                "the same global batch is divided among them",
                step=lines[-1]["step"] if lines else 0,
            )
        self._attempt = int(before.get("attempt", 0)) + 1
        self._note("running")

    def end(self, error: BaseException | None = None) -> None:
        """Note how the attempt ended, as far as it is known."""
        if not self.world.is_main or (error is not None and is_lost(error)):
            return
        if error is not None and not isinstance(error, TrimtabError):
            what = f"{type(error).__name__}: {error}".split("\n")[0][:300]
            self.tell(IncidentKind.BUG, f"rank 0 raised {what}", "this attempt ends")
        self._note("ended")
        checkpoints = self.folder.checkpoints
        if error is not None and not self.folder.lines() and not any(checkpoints.iterdir()):
            # A run that never took a step lays no claim to its folder.
            (self.folder.root / "run.json").unlink(missing_ok=True)

    def _before(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder.root / ATTEMPT).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found

    def _note(self, state: str) -> None:
        note = {"attempt": self._attempt, "procs": self.world.size, "state": state, "at_s": time.time()}
        write_whole(self.folder.root / ATTEMPT, json.dumps(note).encode())
