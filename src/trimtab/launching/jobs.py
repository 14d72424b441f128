"""Our jobs: those in the queue, those that run on this machine, and how far their runs have come."""

from __future__ import annotations

import errno
import fcntl
import getpass
import os
import shutil
import signal
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from trimtab.errors import EnvironmentFault, TrimtabError, UnknownName, WrongUse, shortened
from trimtab.files import read_json_lines
from trimtab.launching import queue
from trimtab.spec import Attempt, Headway, Incident, JobView, QueuedJob
from trimtab.training.folder import ATTEMPT
from trimtab.training.task import RUNS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NOTE = "launch.json"
"""In the run's folder, once it is submitted."""
RECENT = 20
"""Steps that the speed is taken from."""
TAIL = 5
"""Lines of a job's output that are shown."""
END_BYTES = 1 << 16
"""How much of the end of a file is read: a log may be larger than memory."""
LOCAL = "local-"
"""What the ids of runs on this machine begin with; the number of the process follows."""


class Desk(NamedTuple):
    """Where jobs are asked after; `desk()` is the real one."""

    ask: Callable[[Sequence[str]], str]
    """What a command of Slurm prints, or an EnvironmentFault in its own words."""
    has: Callable[[str], bool]
    """Whether there is such a command here."""
    me: str
    """The user."""


def desk() -> Desk:
    """The Slurm of this machine."""
    from trimtab.launching.doing import ask

    return Desk(ask, lambda program: shutil.which(program) is not None, getpass.getuser())


# pure: from what was read to nouns


def progress(
    folder: str,
    job: str | None,
    attempt: Attempt | None,
    lines: Sequence[dict[str, Any]],
    last: Incident | None,
) -> Headway:
    """How far a run has come, from the last lines of its log."""
    recent = [one for one in lines if one.get("time_s") and one.get("samples")][-RECENT:]
    # Steps of an attempt on other devices say nothing about this one.
    recent = [one for one in recent if one.get("gpus") == recent[-1].get("gpus")]
    took_s = sum(one["time_s"] for one in recent)
    step = int(lines[-1].get("step", 0)) if lines else 0
    steps = None if attempt is None else attempt.steps
    left = None if steps is None or not recent else max(0, steps - step) * took_s / len(recent)
    return Headway(
        folder=folder,
        job=job,
        step=step,
        steps=steps,
        loss=lines[-1].get("loss") if lines else None,
        samples_per_s=sum(one["samples"] for one in recent) / took_s if recent else None,
        recent=len(recent) or None,
        left_s=left,
        processes=None if attempt is None else attempt.procs,
        attempt=None if attempt is None else attempt.attempt,
        last_incident=last,
    )


def slurm_view(job: QueuedJob, run: Headway | None, tail: Sequence[str]) -> JobView:
    """A job in the queue, with its run."""
    ends = run is not None and run.left_s is not None and job.state == "RUNNING"
    return JobView(
        id=job.job_id,
        kind="slurm",
        state=job.state.lower(),
        why=queue.why(job),
        queued=job,
        run=run if ends or run is None else run.replace(left_s=None),
        log=job.output,
        tail=tuple(tail),
    )


def refusal(job: QueuedJob, me: str) -> str:
    """Why a job is not cancelled without force; empty where it may be."""
    if job.user and job.user != me:
        return f"it is {job.user}'s, and you are {me}"
    if not queue.is_ours(job):
        return f"trimtab did not submit it: its name is {job.name!r}"
    return ""


# hands: folders, processes, the scheduler


def look(folder: Path) -> Headway | None:
    """How far the run in a folder has come; None where there is no run in it yet."""
    attempt = last_attempt(folder)
    lines = read_json_lines(_end(folder / "log.jsonl"))
    job = _field(folder / "run.json", "job")
    if attempt is None and not lines and job is None:
        return None
    incidents = read_json_lines(_end(folder / "events.jsonl"))
    try:
        last = Incident.from_builtins(incidents[-1]) if incidents else None
    except msgspec.ValidationError:
        last = None
    return progress(str(folder), job, attempt, lines, last)


def last_attempt(folder: Path) -> Attempt | None:
    """Return what the last attempt at a run has written about itself."""
    return Attempt.from_file(folder / ATTEMPT)


def is_alive(folder: Path, attempt: Attempt) -> bool:
    """Whether an attempt goes on, on this machine: its first rank holds the folder's lock until it ends."""
    if attempt.state != "running" or attempt.host != socket.gethostname():
        return False
    try:
        with (folder / "run.lock").open("rb") as file:
            asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, *_ = struct.unpack("hhqqi", fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return False
    return bool(kind != fcntl.F_UNLCK)


def find_folders(places: Sequence[Path]) -> list[Path]:
    """Folders of runs: those given, or those inside of them; without any, those in ./runs."""
    found: list[Path] = []
    for place in places or [RUNS]:
        if places and not place.is_dir():
            raise WrongUse(
                shortened(str(place)),
                found="there is no such folder",
                cure="Give the folder of a run, or one that has such folders in it.",
            )
        inside = [place, *sorted(place.iterdir())] if place.is_dir() else []
        found += [one.absolute() for one in inside if (one / "run.json").exists() or (one / NOTE).exists()]
    return found


def listed(
    at: Desk, places: Sequence[Path] = (), *, lines: int = TAIL
) -> tuple[list[JobView], list[TrimtabError]]:
    """Our jobs: those in Slurm's queue, those that folders tell of, and those that run on this machine.

    Beside them what could not be asked: a Slurm that does not answer hides no run on this machine.
    """
    folders = find_folders(places)
    try:
        queued = queued_jobs(at)
    except EnvironmentFault as error:
        return _local_views(folders), [error]
    views = [_with_run(job, at, lines) for job in queued]
    known = {one.id for one in views} | {one.run.folder for one in views if one.run is not None}
    for folder in folders:
        job_id = job_of(folder)
        if job_id is not None and job_id not in known and str(folder) not in known and at.has("squeue"):
            ended = recall(job_id, at)
            views += [] if ended is None else [_with_run(ended, at, lines, folder)]
    return [*views, *_local_views(folders)], []


def _local_views(folders: Sequence[Path]) -> list[JobView]:
    """Runs that go on on this machine, and are no job of a scheduler's."""
    attempts = [(folder, last_attempt(folder)) for folder in folders]
    return [
        _local_view(folder, attempt)
        for folder, attempt in attempts
        if attempt is not None and attempt.job_id is None and is_alive(folder, attempt)
    ]


def _local_view(folder: Path, attempt: Attempt) -> JobView:
    return JobView(id=f"{LOCAL}{attempt.pid}", kind="local", state="running", run=look(folder))


def queued_jobs(at: Desk) -> list[QueuedJob]:
    """Our jobs in the queue; none where there is no Slurm."""
    if not at.has("squeue"):
        return []
    try:
        jobs = queue.read_squeue(at.ask(queue.squeue_command(user=at.me)))
    except EnvironmentFault as error:
        raise _silent(error) from error
    return [job for job in jobs if queue.is_ours(job)]


def recall(job_id: str, at: Desk) -> QueuedJob | None:
    """A job that may have ended, from whoever remembers it; None where nobody does."""
    try:
        found = queue.read_squeue(at.ask(queue.squeue_command(job_id=job_id)))
    except EnvironmentFault as error:
        if "invalid job id" not in error.found.lower():
            raise _silent(error) from error
    else:
        if found:
            return found[0]
    if not at.has("sacct"):
        return None
    try:
        found = queue.read_sacct(at.ask(queue.sacct_command([job_id])))
    except EnvironmentFault:
        # A cluster that keeps no accounts.
        return None
    return found[0] if found else None


def output_of(job_id: str, at: Desk) -> QueuedJob | None:
    """A job with the file that its output goes to; None where Slurm has forgotten it."""
    try:
        return queue.read_scontrol(at.ask(queue.scontrol_command(job_id)))
    except EnvironmentFault:
        return None


def _silent(error: EnvironmentFault) -> EnvironmentFault:
    """Slurm does not answer; the question itself would tell nobody anything."""
    return EnvironmentFault("Slurm's queue", found=error.found, cure=error.cure)


def cancel(job_id: str, at: Desk, *, force: bool = False, places: Sequence[Path] = ()) -> JobView:
    """End a job: a number of Slurm, the id of a local run, or a run's folder. What it was."""
    given = f"job {shortened(job_id)}"
    folder = Path(job_id).absolute()
    if (folder / "run.json").exists() or (folder / NOTE).exists():
        attempt, number = last_attempt(folder), job_of(folder)
        here = attempt is not None and attempt.job_id is None and is_alive(folder, attempt)
        if here or number is None:
            return _end_local(folder, given)
        job_id = number
    if job_id.startswith(LOCAL):
        for place in find_folders(places):
            attempt = last_attempt(place)
            if attempt is not None and f"{LOCAL}{attempt.pid}" == job_id:
                return _end_local(place, given)
        raise UnknownName(
            given,
            found="no run on this machine has that id",
            cure="See `trimtab jobs`, or give the run's folder.",
        )
    if not (job_id.isascii() and job_id.isdigit()):
        raise WrongUse(
            given,
            found="it is neither a number of Slurm's, nor the id of a local run, nor a run's folder",
            cure="Give what `trimtab jobs` shows as id.",
        )
    return _end_slurm(job_id, given, at, force=force)


def _end_local(folder: Path, given: str) -> JobView:
    attempt = last_attempt(folder)
    if attempt is None or not is_alive(folder, attempt):
        raise WrongUse(
            given, found=f"nothing trains into {folder} on this machine", cure="See `trimtab jobs`."
        )
    view = _local_view(folder, attempt)
    try:
        if attempt.pid <= 1:
            raise ProcessLookupError(errno.ESRCH, "it is no process of a run")
        os.kill(attempt.pid, signal.SIGTERM)
    except OSError as error:
        raise EnvironmentFault(
            given,
            found=f"process {attempt.pid} cannot be told to end ({error.strerror})",
            cure="End it by hand.",
        ) from error
    return view


def _end_slurm(job_id: str, given: str, at: Desk, *, force: bool) -> JobView:
    if not at.has("scancel"):
        raise EnvironmentFault(
            given, found="there is no Slurm on this machine", cure="Run it on a login node of the cluster."
        )
    job = recall(job_id, at)
    if job is None:
        yours = ", ".join(one.job_id for one in queued_jobs(at))
        raise UnknownName(
            given,
            found=f"Slurm knows no such job; yours are {yours}" if yours else "Slurm knows no such job",
            cure="See `trimtab jobs`.",
        )
    if queue.is_over(job):
        raise WrongUse(
            given,
            found=f"it has ended already: {queue.why(job) or job.state}",
            cure="There is nothing to do.",
        )
    refused = refusal(job, at.me)
    if refused and not force:
        raise WrongUse(given, found=refused, cure="If it is meant, cancel it with --force.")
    view = _with_run(job, at, 0)
    at.ask(("scancel", job_id))
    return view


def _with_run(job: QueuedJob, at: Desk, lines: int, folder: Path | None = None) -> JobView:
    """A job with all that its folder and its output say."""
    if job.output is None:
        full = output_of(job.job_id, at)
        job = job if full is None else job.replace(output=full.output, restarts=full.restarts)
    named = queue.folder_of(job)
    where = folder or (None if named is None else Path(named))
    run = None if where is None else look(where)
    tail = _tail(Path(job.output), lines) if job.output else []
    return slurm_view(job, run, tail)


def job_of(folder: Path) -> str | None:
    """Slurm's number of the job that a run was last handed to; None for a run on this machine."""
    attempt = last_attempt(folder)
    submitted = _field(folder / NOTE, "job_id")
    numbers = [one for one in (attempt and attempt.job_id, submitted) if one and one.isdigit()]
    # Numbers grow: what was submitted again comes after what ran.
    return max(numbers, key=int, default=None)


def _field(file: Path, key: str) -> str | None:
    try:
        value = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


def _end(file: Path) -> bytes:
    """The last part of a file, from the beginning of a line on."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - END_BYTES))
            data = stream.read(END_BYTES)
    except OSError:
        return b""
    return data if size <= END_BYTES else data.partition(b"\n")[2]


def _tail(file: Path, lines: int) -> list[str]:
    """The last lines of a text that are not empty."""
    # A progress bar writes over its line: the last of it counts.
    text = _end(file).decode("utf-8", "replace")
    shown = [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    return [line for line in shown if line][-lines:] if lines else []
