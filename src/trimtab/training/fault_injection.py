"""Drills: faults that strike a run on purpose, so that people can see it survive them before it has to.

`trimtab train JOB --faults FILE` reads a list of them:

    [{"kind": "out-of-memory", "step": 3, "rank": 1, "point": "backward"},
     {"kind": "not-a-number", "step": 5},
     {"kind": "kill", "step": 8, "rank": 1}]

Each strikes once, at the first chance from its step on, also when the step is computed again or the run is
restarted: the run folder remembers which have struck.
"""

from __future__ import annotations

import os
import signal
import time
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from trimtab.errors import WrongUse
from trimtab.spec.base import Noun, check_minimum

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

POINTS = ("forward", "backward", "optimizer", "gradient", "write", "checkpoint")
"""Where a fault may strike: in a step, before a checkpoint is written, and after it was."""
FAULTS_FOLDER = "faults"
"""The folder inside of a run's that remembers."""


class FaultKind(StrEnum):
    """What goes wrong."""

    OUT_OF_MEMORY = "out-of-memory"
    NOT_A_NUMBER = "not-a-number"
    """The gradient of one rank is bad, once."""
    KILL = "kill"
    """As kill -9: no last words."""
    TERMINATE = "terminate"
    """SIGTERM to one rank, as from a scheduler."""
    WARN = "warn"
    """SIGUSR1 to one rank, as from Slurm before the limit."""
    SLOW = "slow"
    """One rank stops for a while."""
    TORN_CHECKPOINT = "torn-checkpoint"
    """The newest checkpoint loses half of a file."""
    FULL_DISK = "full-disk"
    """A checkpoint cannot be written."""


POINTS_BY_KIND = {
    FaultKind.OUT_OF_MEMORY: ("forward", "backward", "optimizer"),
    FaultKind.NOT_A_NUMBER: ("gradient",),
    FaultKind.KILL: ("forward", "backward", "optimizer"),
    FaultKind.TERMINATE: ("forward", "backward", "optimizer"),
    FaultKind.WARN: ("forward", "backward", "optimizer"),
    FaultKind.SLOW: ("forward", "backward", "optimizer"),
    FaultKind.TORN_CHECKPOINT: ("checkpoint",),
    FaultKind.FULL_DISK: ("write",),
}
"""Where each kind can strike; the first is where it does unless the schedule says otherwise."""


class Fault(Noun, frozen=True, kw_only=True):
    """One thing that goes wrong, when and on which rank."""

    kind: FaultKind
    step: int
    """The optimizer step, from 1, at which it strikes, or the first chance after it."""
    rank: int = 0
    point: str = ""
    seconds: float = 1.0
    """How long a slow rank stops."""

    @property
    def place(self) -> str:
        """Where in the step it strikes."""
        return self.point or POINTS_BY_KIND[self.kind][0]

    def faults(self) -> list[str]:
        """A point that its kind has."""
        wrong = check_minimum(0, step=self.step, rank=self.rank, seconds=self.seconds)
        if self.point and self.point not in POINTS_BY_KIND[self.kind]:
            wrong.append(
                f"{self.kind} strikes at {' or '.join(POINTS_BY_KIND[self.kind])}, not at {self.point!r}"
            )
        return wrong


def read_faults(file: Path) -> tuple[Fault, ...]:
    """A schedule from its file."""
    cure = 'Write a JSON list such as [{"kind": "kill", "step": 8, "rank": 1}].'
    try:
        return msgspec.json.decode(file.read_bytes(), type=tuple[Fault, ...])
    except OSError as error:
        raise WrongUse(
            f"--faults {file}", found=f"it cannot be read ({error.strerror})", cure=cure
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WrongUse(
            f"--faults {file}", found=f"it is no schedule of faults: {error}", cure=cure
        ) from error


class FaultInjector:
    """A schedule at work in one rank. `at` is called wherever a fault may strike."""

    def __init__(self, schedule: Iterable[Fault], folder: Path) -> None:
        self.folder = folder / FAULTS_FOLDER
        self.folder.mkdir(exist_ok=True)
        done = {path.name for path in self.folder.iterdir()}
        self.left = [(f"{number:04d}", fault) for number, fault in enumerate(schedule)]
        self.left = [(name, one) for name, one in self.left if name not in done]

    def at(self, point: str, step: int, rank: int) -> str | None:
        """Strike, if something is due here: raises, stops, dies, or returns a word that the caller acts on.

        "nan" asks for a bad gradient, "tear" for a torn checkpoint.
        """
        for name, one in self.left:
            if one.place == point and one.rank == rank and one.step <= step and self._takes(name):
                self.left.remove((name, one))
                return _strike(one)
        return None

    def _takes(self, name: str) -> bool:
        """Note that a fault strikes now; False where it has before."""
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def _strike(fault: Fault) -> str | None:
    if fault.kind is FaultKind.OUT_OF_MEMORY:
        import torch

        raise torch.OutOfMemoryError(f"a drill: out of memory in {fault.place}")
    if fault.kind is FaultKind.FULL_DISK:
        import errno

        raise OSError(errno.ENOSPC, "a drill: No space left on device")
    if fault.kind is FaultKind.SLOW:
        time.sleep(fault.seconds)
        return None
    sent = {
        FaultKind.KILL: signal.SIGKILL,
        FaultKind.TERMINATE: signal.SIGTERM,
        FaultKind.WARN: signal.SIGUSR1,
    }
    if fault.kind in sent:
        os.kill(os.getpid(), sent[fault.kind])
        return None
    return "nan" if fault.kind is FaultKind.NOT_A_NUMBER else "tear"


def tear_checkpoint(checkpoints: Path) -> Path | None:
    """Cut the largest file of the newest checkpoint in half; None where there is none."""
    folders = sorted(
        (path for path in checkpoints.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime_ns
    )
    files = [path for path in folders[-1].rglob("*") if path.is_file()] if folders else []
    if not files:
        return None
    largest = max(files, key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return largest
