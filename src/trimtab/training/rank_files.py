"""Notes between the process that people started and the ranks it started in turn.

torchrun restarts ranks that fail, whatever they fail of, and tells its parent no more than that. So ranks
leave a note where a restart would not help, and their successors find it and end at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.errors import TrimtabError, error_from_dict
from trimtab.units import parse_whole

if TYPE_CHECKING:
    from pathlib import Path

FOLDER_VARIABLE = "TRIMTAB_CONTROL"
"""The variable that names the folder to the ranks."""
LEADER_VARIABLE = "TRIMTAB_LEADER"
"""The variable that names the process which ends the whole run when it is asked to."""
SINCE_VARIABLE = "TRIMTAB_CONTROL_SINCE"
"""From when on notes count, where the folder is older than the attempt."""
OWN_VARIABLE = "TRIMTAB_CONTROL_OWN"
"""What the notes of one node are called, where several share the folder."""
LAUNCHER_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "GROUP_RANK")
"""Variables of a launcher, which must not leak into what is launched from here."""
LOST_PEER_CODE = 75
"""Exit code of a rank whose peers are gone: try again, as sysexits.h has it."""
LOST_PEER_MESSAGES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "timeout waiting for",
    "nccl communicator was aborted",
    "remote process has exited",
    "watchdog caught collective operation timeout",
)
"""How torch's backends say that another rank is gone."""
REPEATED_CRASHES = 3
"""Crashes alike in a row, with no step between them, that make a bug."""


class RankFailure(NamedTuple):
    """The rank that failed first, and what it had to say."""

    rank: int | None
    host: str
    trace: str


class RankFiles:
    """A folder of notes; those from before `since_ns` are of an earlier attempt."""

    def __init__(self, folder: Path, *, since_ns: int = 0, own: str = "") -> None:
        self.folder = folder
        self.since_ns = since_ns
        self.own = own

    def variables(self) -> dict[str, str]:
        """What ranks need to find it."""
        return {FOLDER_VARIABLE: str(self.folder), SINCE_VARIABLE: str(self.since_ns), OWN_VARIABLE: self.own}

    def is_over(self) -> bool:
        """Whether a rank that starts now has nothing to do."""
        return self._has("error") or self._has("stopping")

    def stop_signal(self) -> signal.Signals | None:
        """The signal by which the parent was asked to end."""
        try:
            return signal.Signals(int(self._read("stopping")))
        except (OSError, ValueError):
            return None

    def request_stop(self, asked: signal.Signals) -> None:
        """Let no rank start any more."""
        self._write("stopping", str(int(asked)))

    def mark_done(self) -> None:
        """The run has come to its end, whatever was asked meanwhile."""
        self._write("done", "")

    def is_done(self) -> bool:
        """Whether the run has come to its end."""
        return self._has("done")

    def write_error(self, error: TrimtabError, *, trace: str = "") -> None:
        """An error that would come again; the first rank to say so is heard."""
        if not self._has("error"):
            self._write("error", json.dumps(error.to_dict() | _describe_rank(trace)))

    def read_error(self) -> TrimtabError | None:
        """What a rank failed of, for good."""
        try:
            note = json.loads(self._read("error"))
        except (OSError, ValueError):
            return None
        # Every node prints it: which of them it is about must be in the error itself.
        where = (
            f" (rank {note['rank']} on {note['host']})" if self.own and note.get("rank") is not None else ""
        )
        return error_from_dict(note | {"found": note["found"] + where})

    def add_crash(self, text: str, step: int, *, trace: str = "") -> bool:
        """Note that a rank raised something unforeseen at a step; True where that has happened often enough.

        A crash that comes again at the same step will go on to do so.
        """
        note = {"text": text, "step": step}
        with self._crash_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(note | _describe_rank(trace)) + "\n")
        return [{key: one[key] for key in note} for one in self._read_crashes()].count(
            note
        ) >= REPEATED_CRASHES

    def last_crash(self) -> str | None:
        """The last thing that a rank raised."""
        crashed = self._read_crashes()
        return str(crashed[-1]["text"]) if crashed else None

    def first_failure(self) -> RankFailure | None:
        """Who failed for good; or else who crashed first in the last attempt that did."""
        try:
            note = json.loads(self._read("error"))
        except (OSError, ValueError):
            note = {}
        crashed = self._read_crashes()
        if not note.get("trace") and crashed:
            last = crashed[-1]
            note = next(one for one in crashed if (one["text"], one["step"]) == (last["text"], last["step"]))
        return (
            RankFailure(note.get("rank"), note.get("host", ""), note["trace"]) if note.get("trace") else None
        )

    def note_lost_rank(self, rank: int, code: int) -> None:
        """Note that torchrun has given up on a rank, which ended with a code; below 0, by a signal."""
        with contextlib.suppress(ValueError):
            name = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            self._write("lost", f"rank {rank} was {name}" if code < 0 else f"rank {rank} {name}")

    def lost_rank(self) -> str | None:
        """How the rank ended that torchrun gave up on."""
        return self._read("lost") if self._has("lost") else None

    @property
    def _crash_file(self) -> Path:
        return self._file(f"crashes{self.own}")

    def _read_crashes(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in self._crash_file.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):
            return []

    def _has(self, name: str) -> bool:
        try:
            return self._file(name).stat().st_mtime_ns >= self.since_ns
        except OSError:
            return False

    def _read(self, name: str) -> str:
        """The text of a note; FileNotFoundError where there is none that counts."""
        if not self._has(name):
            raise FileNotFoundError(name)
        return self._file(name).read_text(encoding="utf-8")

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


def find_rank_files() -> RankFiles | None:
    """The notes of the parent that started this rank; None where people or a scheduler started it."""
    from pathlib import Path

    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return None
    # Nanoseconds since 1970 have more digits than parse_whole takes for a count.
    told = os.environ.get(SINCE_VARIABLE, "")
    since = int(told) if told.isascii() and told.isdigit() else 0
    return RankFiles(Path(folder), since_ns=since, own=os.environ.get(OWN_VARIABLE, ""))


def _describe_rank(trace: str) -> dict[str, Any]:
    """Which rank of which node says it."""
    return {"rank": parse_whole(os.environ.get("RANK", "")), "host": socket.gethostname(), "trace": trace}


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another rank is gone.

    >>> is_lost(RuntimeError("[..pair.cc:553] Connection closed by peer [127.0.0.1]:4711"))
    True
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return bool(kinds & {"DistBackendError", "DistNetworkError", "NeighbourFailed"}) or any(
        words in text for words in LOST_PEER_MESSAGES
    )
