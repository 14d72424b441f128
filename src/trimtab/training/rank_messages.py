"""Files by which ranks and the `trimtab train` that started them exchange errors and stop requests.

torchrun restarts ranks after any failure and does not say what failed. So a rank writes a file if a restart
would not help; restarted ranks see it and end at once.
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
"""Environment variable with the folder of the files."""
LEADER_VARIABLE = "TRIMTAB_LEADER"
"""Environment variable with the id of the process that ends the whole run when it gets a signal."""
SINCE_VARIABLE = "TRIMTAB_CONTROL_SINCE"
"""Environment variable with a time in ns: older files are of an earlier attempt and are ignored."""
OWN_VARIABLE = "TRIMTAB_CONTROL_OWN"
"""Environment variable with a name for the files of this node, if several nodes share the folder."""
LAUNCHER_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "GROUP_RANK")
"""Variables of a launcher, which child processes must not inherit."""
LOST_PEER_CODE = 75
"""Exit code of a rank whose peers are gone: EX_TEMPFAIL ("try again") of sysexits.h."""
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
"""Parts of the messages of torch's backends when another rank is gone."""
REPEATED_CRASHES = 3
"""Equal crashes at the same step after which no restart is tried."""


class RankFailure(NamedTuple):
    """The rank that failed first, with its traceback."""

    rank: int | None
    host: str
    trace: str


class RankFiles:
    """A folder of files between ranks; those from before `since_ns` are of an earlier attempt."""

    def __init__(self, folder: Path, *, since_ns: int = 0, own: str = "") -> None:
        self.folder = folder
        self.since_ns = since_ns
        self.own = own

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which ranks find the folder."""
        return {FOLDER_VARIABLE: str(self.folder), SINCE_VARIABLE: str(self.since_ns), OWN_VARIABLE: self.own}

    def is_over(self) -> bool:
        """Return whether the run has failed or is stopping, so that a new rank must end at once."""
        return self._has("error") or self._has("stopping")

    def stop_signal(self) -> signal.Signals | None:
        """Return the signal that the parent process got; None if it got none."""
        try:
            return signal.Signals(int(self._read("stopping")))
        except (OSError, ValueError):
            return None

    def request_stop(self, asked: signal.Signals) -> None:
        """Record that the run has to stop because of a signal; no rank starts any more."""
        self._write("stopping", str(int(asked)))

    def add_rank(self) -> None:
        """Record the id of this process, so that it can be found if torchrun itself is killed."""
        self._write(f"rank{self.own}-{os.getpid()}", "")

    def list_ranks(self) -> list[tuple[int, float]]:
        """Return the process ids of this node's ranks, dead ones too, with the time of their record."""
        prefix = f"rank{self.own}-"
        names = [file.name for file in self.folder.glob(f"{prefix}*") if self._has(file.name)]
        ids = [(name, parse_whole(name.removeprefix(prefix))) for name in names]
        return [(pid, self._file(name).stat().st_mtime) for name, pid in ids if pid is not None]

    def mark_done(self) -> None:
        """Record that the run is finished, even if a stop was requested meanwhile."""
        self._write("done", "")

    def is_done(self) -> bool:
        """Return whether the run is finished."""
        return self._has("done")

    def write_error(self, error: TrimtabError, *, trace: str = "") -> None:
        """Record an error that a restart would not fix; only the first is kept."""
        if not self._has("error"):
            self._write("error", json.dumps(error.to_dict() | _describe_rank(trace)))

    def read_error(self) -> TrimtabError | None:
        """Return the error that a restart would not fix; None if there is none."""
        try:
            note = json.loads(self._read("error"))
        except (OSError, ValueError):
            return None
        # Every node prints the error, so it has to name the rank and the node.
        where = (
            f" (rank {note['rank']} on {note['host']})" if self.own and note.get("rank") is not None else ""
        )
        return error_from_dict(note | {"found": note["found"] + where})

    def add_crash(self, text: str, step: int, *, trace: str = "") -> bool:
        """Record an unexpected error; return True if the same one has occurred REPEATED_CRASHES times.

        An error that repeats at the same step will not go away by a restart.
        """
        note = {"text": text, "step": step}
        with self._crash_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(note | _describe_rank(trace)) + "\n")
        return [{key: crash[key] for key in note} for crash in self._read_crashes()].count(
            note
        ) >= REPEATED_CRASHES

    def last_crash(self) -> str | None:
        """Return the text of the last recorded crash; None if there is none."""
        crashes = self._read_crashes()
        return str(crashes[-1]["text"]) if crashes else None

    def first_failure(self) -> RankFailure | None:
        """Return the rank with the final error, or else the first rank with the last recorded crash."""
        try:
            note = json.loads(self._read("error"))
        except (OSError, ValueError):
            note = {}
        crashes = self._read_crashes()
        if not note.get("trace") and crashes:
            last = crashes[-1]
            note = next(
                crash for crash in crashes if (crash["text"], crash["step"]) == (last["text"], last["step"])
            )
        return (
            RankFailure(note.get("rank"), note.get("host", ""), note["trace"]) if note.get("trace") else None
        )

    def note_lost_rank(self, rank: int, code: int) -> None:
        """Record the exit code of the rank that torchrun gave up on; a negative code is a signal."""
        with contextlib.suppress(ValueError):
            name = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            self.note_lost(f"rank {rank} was {name}" if code < 0 else f"rank {rank} {name}")

    def note_lost(self, what: str) -> None:
        """Record what was lost for good."""
        self._write("lost", what)

    def lost_rank(self) -> str | None:
        """Return how the rank ended that torchrun gave up on; None if it did not give up."""
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
        """Return the text of a file; raise FileNotFoundError if there is none of this attempt."""
        if not self._has(name):
            raise FileNotFoundError(name)
        return self._file(name).read_text(encoding="utf-8")

    def _file(self, name: str) -> Path:
        return self.folder / name

    def _write(self, name: str, text: str) -> None:
        """Write a file atomically, because another process may be reading it."""
        temporary = self._file(f"{name}.{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._file(name))


def end_with_parent() -> None:
    """Ask Linux for SIGTERM when the parent dies, so that no rank outlives a killed `trimtab train`."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG


def find_rank_files() -> RankFiles | None:
    """Return the files of the `trimtab train` that started this rank; None if something else started it."""
    from pathlib import Path

    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder or not Path(folder).is_dir():
        return None
    # Not parse_whole: nanoseconds since 1970 have more digits than it accepts.
    text = os.environ.get(SINCE_VARIABLE, "")
    since = int(text) if text.isascii() and text.isdigit() else 0
    return RankFiles(Path(folder), since_ns=since, own=os.environ.get(OWN_VARIABLE, ""))


def _describe_rank(trace: str) -> dict[str, Any]:
    """Return rank, host and traceback, as crash and error files have them."""
    return {"rank": parse_whole(os.environ.get("RANK", "")), "host": socket.gethostname(), "trace": trace}


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error only says that another rank is gone.

    >>> is_lost_peer(RuntimeError("[..pair.cc:553] Connection closed by peer [127.0.0.1]:4711"))
    True
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error).lower()
    return bool(kinds & {"DistBackendError", "DistNetworkError", "NeighbourFailed"}) or any(
        words in text for words in LOST_PEER_MESSAGES
    )
