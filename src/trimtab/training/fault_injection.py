"""Fault injection: let a run fail on purpose, to see that it recovers.

`trimtab train JOB --faults FILE` reads a list of faults:

    [{"kind": "out-of-memory", "step": 3, "rank": 1, "point": "backward"},
     {"kind": "not-a-number", "step": 5},
     {"kind": "kill", "step": 8, "rank": 1}]

Each fault happens once, at its step or the first chance after it. The run folder records which have happened,
so that none is repeated when a step is computed again or the run is restarted.
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
"""Where a fault may happen: in a step, before a checkpoint is written (write), after it (checkpoint)."""
FAULTS_FOLDER = "faults"
"""Folder in the run folder with an empty file for each fault that has happened."""


class FaultKind(StrEnum):
    """What goes wrong."""

    OUT_OF_MEMORY = "out-of-memory"
    NOT_A_NUMBER = "not-a-number"
    """The gradient of one rank is NaN once."""
    KILL = "kill"
    """SIGKILL to one rank, as with kill -9."""
    TERMINATE = "terminate"
    """SIGTERM to one rank, as from a scheduler."""
    WARN = "warn"
    """SIGUSR1 to one rank, as from Slurm before the time limit."""
    SLOW = "slow"
    """One rank sleeps for `seconds`."""
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
"""Where each kind can happen; the first is the default."""


class Fault(Noun, frozen=True, kw_only=True):
    """One fault of a schedule: what, when and on which rank."""

    kind: FaultKind
    step: int
    """The optimizer step, from 1, at which it happens, or the first chance after it."""
    rank: int = 0
    point: str = ""
    seconds: float = 1.0
    """How long a slow rank sleeps."""

    @property
    def place(self) -> str:
        """The point at which it happens."""
        return self.point or POINTS_BY_KIND[self.kind][0]

    def faults(self) -> list[str]:
        """List what is wrong: negative numbers, or a point that its kind does not have."""
        wrong = check_minimum(0, step=self.step, rank=self.rank, seconds=self.seconds)
        if self.point and self.point not in POINTS_BY_KIND[self.kind]:
            wrong.append(
                f"{self.kind} strikes at {' or '.join(POINTS_BY_KIND[self.kind])}, not at {self.point!r}"
            )
        return wrong


def read_faults(file: Path) -> tuple[Fault, ...]:
    """Read a schedule of faults from a file."""
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
    """Injects the faults of a schedule into one rank; `at` is called wherever a fault may happen."""

    def __init__(self, schedule: Iterable[Fault], folder: Path) -> None:
        self.folder = folder / FAULTS_FOLDER
        self.folder.mkdir(exist_ok=True)
        done = {path.name for path in self.folder.iterdir()}
        numbered = [(f"{number:04d}", fault) for number, fault in enumerate(schedule)]
        self.pending = [(name, fault) for name, fault in numbered if name not in done]

    def at(self, point: str, step: int, rank: int) -> str | None:
        """Inject the fault that is due here, if any: raise, sleep or send a signal.

        Returns "nan" if the caller has to make the gradient bad, "tear" if it has to damage a checkpoint.
        """
        for name, fault in self.pending:
            if fault.place == point and fault.rank == rank and fault.step <= step and self._claim(name):
                self.pending.remove((name, fault))
                return _inject(fault)
        return None

    def _claim(self, name: str) -> bool:
        """Record that a fault happens now; return False if it has happened before."""
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def _inject(fault: Fault) -> str | None:
    if fault.kind is FaultKind.OUT_OF_MEMORY:
        import torch

        raise torch.OutOfMemoryError(f"a drill: out of memory in {fault.place}")
    if fault.kind is FaultKind.FULL_DISK:
        import errno

        raise OSError(errno.ENOSPC, "a drill: No space left on device")
    if fault.kind is FaultKind.SLOW:
        time.sleep(fault.seconds)
        return None
    signals = {
        FaultKind.KILL: signal.SIGKILL,
        FaultKind.TERMINATE: signal.SIGTERM,
        FaultKind.WARN: signal.SIGUSR1,
    }
    if fault.kind in signals:
        os.kill(os.getpid(), signals[fault.kind])
        return None
    return "nan" if fault.kind is FaultKind.NOT_A_NUMBER else "tear"


def tear_checkpoint(checkpoints: Path) -> Path | None:
    """Cut the largest file of the newest checkpoint in half; return it, or None if there is none."""
    folders = sorted(
        (path for path in checkpoints.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime_ns
    )
    files = [path for path in folders[-1].rglob("*") if path.is_file()] if folders else []
    if not files:
        return None
    largest = max(files, key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return largest
