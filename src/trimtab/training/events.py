"""Event log of a run: rank 0 writes the incidents of all ranks to the run folder and the terminal."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError
from trimtab.files import write_atomic
from trimtab.spec import Attempt, Incident, IncidentKind
from trimtab.training.rank_messages import LEADER_VARIABLE, is_lost_peer
from trimtab.training.run_folder import ATTEMPT_FILE
from trimtab.training.task import count_nodes, gather_values
from trimtab.units import parse_whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trimtab.training.process_group import World
    from trimtab.training.run_folder import RunFolder
    from trimtab.training.step_log import StepLog

STOPPED = "the run is stopped"
"""Start of the text of the incident that ends a run because of bad steps."""
LONGEST_ERROR = 500
"""Characters of an error that an event repeats."""


def _format_processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


def make_next_attempt(  # noqa: PLR0913 - what an attempt knows of itself
    before: Attempt | None,
    *,
    procs: int,
    nodes: int,
    now_s: float,
    seen_s: float,
    env: Mapping[str, str],
    host: str,
    pid: int,
) -> Attempt:
    """Make the record of a new attempt; `before` is the last one, which wrote its log last at `seen_s`."""
    attempt = Attempt(
        procs=procs,
        nodes=nodes,
        began_s=now_s,
        at_s=now_s,
        job_id=env.get("SLURM_JOB_ID") or None,
        restarts=parse_whole(env.get("SLURM_RESTART_COUNT", "")) or 0,
        host=host,
        pid=pid,
    )
    if before is None:
        return attempt
    # An attempt that was killed is taken to have ended when it last wrote something.
    took_s = max(0.0, (before.at_s if before.state == "ended" else max(before.at_s, seen_s)) - before.began_s)
    return attempt.replace(
        attempt=before.attempt + 1,
        earlier_s=before.earlier_s + took_s,
        earlier_proc_s=before.earlier_proc_s + took_s * before.procs,
    )


def describe_requeue(before: Attempt | None, now: Attempt, env: Mapping[str, str]) -> str:
    """Describe how the scheduler started the job again; return '' if it did not.

    >>> last = Attempt(job_id="7", state="ended")
    >>> describe_requeue(last, last.replace(restarts=1), {"SLURM_JOB_NODELIST": "n1"})
    'Slurm has requeued job 7 (restart 1), which now runs on n1'
    """
    if before is None or now.job_id is None or before.job_id != now.job_id or now.restarts <= before.restarts:
        return ""
    where = env.get("SLURM_JOB_NODELIST", "")
    return f"Slurm has requeued job {now.job_id} (restart {now.restarts})" + (
        f", which now runs on {where}" if where else ""
    )


class EventLog:
    """The incidents of one attempt."""

    def __init__(self, world: World, folder: RunFolder, step_log: StepLog) -> None:
        self.world = world
        self.folder = folder
        self.step_log = step_log
        self.step = 0
        """The step of incidents that do not name one."""
        self.pending: list[Incident] = []
        """Incidents of this rank that rank 0 does not have yet."""
        self.written: list[Incident] = []
        """Incidents that were written in this attempt."""
        self.attempt = Attempt()

    def record(self, kind: IncidentKind, why: str, done: str, *, step: int | None = None) -> None:
        """Record an incident that all ranks know of; only rank 0 writes it."""
        if self.world.is_main:
            at = self.step if step is None else step
            self.write(Incident(kind=kind, at_s=time.time(), step=at, rank=0, why=why, done=done))

    def write(self, incident: Incident) -> None:
        """Write an incident to the folder and the terminal; called on rank 0 only."""
        self.written.append(incident)
        self.folder.log_event(incident)
        self.step_log.show_event(incident)

    def record_local(self, incident: Incident) -> None:
        """Record an incident of this rank, whose step counts from 0."""
        counted = incident.replace(step=None if incident.step is None else incident.step + 1)
        if self.world.is_main:
            self.write(counted)
        else:
            self.pending.append(counted)

    def gather_incidents(self) -> None:
        """Send the incidents of other ranks to rank 0, which writes them; all ranks call it."""
        gathered = gather_values(self.world, [incident.to_json() for incident in self.pending])
        self.pending = []
        for text in (text for texts in gathered for text in texts):
            self.write(Incident.from_json(text))

    def begin_attempt(self) -> None:
        """Write that an attempt has begun; record whether the last one was killed, requeued or resized."""
        if not self.world.is_main:
            return
        for words in self.folder.damage:
            self.step_log.say(f"{self.folder.root} is damaged: {words}")
        before = self._read_attempt()
        self.folder.events_file.touch()
        lines = self.folder.read_lines()
        at = self.step = lines[-1]["step"] if lines else 0
        self.attempt = make_next_attempt(
            before,
            procs=self.world.size,
            nodes=count_nodes(self.world),
            now_s=time.time(),
            seen_s=_read_write_time(self.folder.log_file),
            env=os.environ,
            host=socket.gethostname(),
            pid=parse_whole(os.environ.get(LEADER_VARIABLE, "")) or os.getpid(),
        )
        if before is not None and before.state == "running":
            self.record(
                IncidentKind.LOST_RANK,
                f"attempt {before.attempt}, with {_format_processes(before.procs)}, "
                "ended without a word: a process was killed, or its node was lost",
                "this attempt goes on from the last checkpoint, or from the start",
                step=at,
            )
        again = describe_requeue(before, self.attempt, os.environ)
        if again:
            self.record(IncidentKind.REQUEUE, again, "this attempt takes the run up where it was", step=at)
        if before is not None and before.procs != self.world.size:
            self.record(
                IncidentKind.RESIZE,
                f"the last attempt had {_format_processes(before.procs)}, and this one has "
                f"{_format_processes(self.world.size)}",
                "the same global batch is divided among them",
                step=at,
            )
        self._write_attempt("running")

    def set_total_steps(self, steps: int) -> None:
        """Write the number of steps of the run, for readers of its folder."""
        if self.world.is_main:
            self.attempt = self.attempt.replace(steps=steps)
            self._write_attempt("running")

    def end_attempt(self, error: BaseException | None = None) -> None:
        """Write that the attempt ended, and why."""
        if not self.world.is_main or (error is not None and is_lost_peer(error)):
            return
        if isinstance(error, TrimtabError):
            self._log_failure(error)
        elif error is not None:
            what = f"{type(error).__name__}: {error}".split("\n")[0][:300]
            self.record(IncidentKind.BUG, f"rank 0 raised {what}", "this attempt ends")
        self._write_attempt("ended")
        checkpoints = self.folder.checkpoints
        if error is not None and not self.folder.read_lines() and not any(checkpoints.iterdir()):
            # A run without a step does not own its folder: another job may use it.
            (self.folder.root / "run.json").unlink(missing_ok=True)

    def _log_failure(self, error: TrimtabError) -> None:
        """Write an error to the folder; the stop because of bad steps is written already."""
        if self.written and STOPPED in self.written[-1].done:
            return
        why = " ".join(f"{error.given}: {error.found}".split())[:LONGEST_ERROR]
        done = f"this attempt ends. {error.cure}"
        self.folder.log_event(
            Incident(kind=IncidentKind.FAILED, at_s=time.time(), step=self.step, rank=0, why=why, done=done)
        )

    def _read_attempt(self) -> Attempt | None:
        return Attempt.from_file(self.folder.root / ATTEMPT_FILE)

    def _write_attempt(self, state: str) -> None:
        self.attempt = self.attempt.replace(state=state, at_s=time.time())
        write_atomic(self.folder.root / ATTEMPT_FILE, self.attempt.to_json().encode(), sync=True)


def _read_write_time(file: Path) -> float:
    """Return when a file was last written, in seconds since 1970; 0 if there is none."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
