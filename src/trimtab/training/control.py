"""Notes between the process that people started and the ranks it started in turn.

torchrun restarts ranks that fail, whatever they fail of, and tells its parent no more than that. So ranks
leave a note where a restart would not help, and their successors find it and end at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING

from trimtab import errors
from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "TRIMTAB_CONTROL"
"""The variable that names the folder to the ranks."""
LEADER = "TRIMTAB_LEADER"
"""The variable that names the process which ends the whole run when it is asked to."""
SAME = 3
"""Crashes alike in a row, with no step between them, that make a bug."""


class Control:
    """A folder of notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_over(self) -> bool:
        """Whether a rank that starts now has nothing to do."""
        return self._file("error").exists() or self._file("stopping").exists()

    def stopping(self) -> signal.Signals | None:
        """The signal by which the parent was asked to end."""
        try:
            return signal.Signals(int(self._file("stopping").read_text(encoding="ascii")))
        except (OSError, ValueError):
            return None

    def stop(self, asked: signal.Signals) -> None:
        """Let no rank start any more."""
        self._write("stopping", str(int(asked)))

    def done(self) -> None:
        """The run has come to its end, whatever was asked meanwhile."""
        self._write("done", "")

    def is_done(self) -> bool:
        """Whether the run has come to its end."""
        return self._file("done").exists()

    def fail(self, error: TrimtabError) -> None:
        """An error that would come again; the first rank to say so is heard."""
        known = type(error).__name__ if getattr(errors, type(error).__name__, None) else "TrimtabError"
        note = {"kind": known, "given": error.given, "found": error.found, "cure": error.cure}
        if not self._file("error").exists():
            self._write("error", json.dumps(note))

    def error(self) -> TrimtabError | None:
        """What a rank failed of, for good."""
        try:
            note = json.loads(self._file("error").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        kind: type[TrimtabError] = getattr(errors, note["kind"], TrimtabError)
        return kind(note["given"], found=note["found"], cure=note["cure"])

    def crash(self, text: str, step: int) -> bool:
        """Note that a rank raised something unforeseen at a step; True where that has happened often enough.

        A crash that comes again at the same step will go on to do so.
        """
        line = json.dumps({"text": text, "step": step})
        with self._file("crashes").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return self._file("crashes").read_text(encoding="utf-8").splitlines().count(line) >= SAME

    def last_crash(self) -> str | None:
        """The last thing that a rank raised."""
        try:
            lines = self._file("crashes").read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        return str(json.loads(lines[-1])["text"]) if lines else None

    def _file(self, name: str) -> Path:
        return self.folder / name

    def _write(self, name: str, text: str) -> None:
        """All or nothing: another process may be reading."""
        beside = self._file(f"{name}.{os.getpid()}")
        beside.write_text(text, encoding="utf-8")
        beside.replace(self._file(name))


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent dies, so that no rank outlives a killed `trimtab train`."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG


def given() -> Control | None:
    """The notes of the parent that started this rank; None where people or a scheduler started it."""
    from pathlib import Path

    folder = os.environ.get(FOLDER)
    return Control(Path(folder)) if folder and Path(folder).is_dir() else None
