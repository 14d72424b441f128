"""List and cancel jobs: those in Slurm's queue, those that run on this machine, and their progress.

squeue     jobs that wait or run
scontrol   one job, also some minutes after its end, and where its output goes
sacct      old jobs, where the cluster keeps accounts
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import struct
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from trimtab.errors import EnvironmentFault, TrimtabError, UnknownName, WrongUse, shorten
from trimtab.files import read_json_lines
from trimtab.probe.scheduler import parse_node_list
from trimtab.spec import Attempt, Incident, JobProgress, JobView, QueuedJob
from trimtab.spec.base import LARGEST
from trimtab.training.run_folder import is_step_object, list_damage, read_attempt
from trimtab.training.task import RUNS_FOLDER
from trimtab.units import parse_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIELD, RECORD = "\x1f", "\x1e"
"""Between fields and after records: names and comments may have anything else in them, line feeds too."""
SQUEUE_FIELDS = {
    "job_id": "%i",
    "state": "%T",
    "reason": "%r",
    "num_nodes": "%D",
    "nodes": "%N",
    "ran_s": "%M",
    "limit_s": "%l",
    "starts": "%S",
    "partition": "%P",
    "user": "%u",
    "name": "%j",
    "comment": "%k",
    "script": "%o",
    "work_dir": "%Z",
}
SACCT_FIELDS = {
    "job_id": "JobIDRaw",
    "state": "State",
    "reason": "Reason",
    "num_nodes": "NNodes",
    "nodes": "NodeList",
    "ran_s": "ElapsedRaw",
    "starts": "Start",
    "partition": "Partition",
    "user": "User",
    "name": "JobName",
    "comment": "Comment",
    "work_dir": "WorkDir",
}
SCONTROL_KEYS = {
    "JobId": "job_id",
    "JobName": "name",
    "UserId": "user",
    "JobState": "state",
    "Reason": "reason",
    "Restarts": "restarts",
    "RunTime": "ran_s",
    "TimeLimit": "limit_s",
    "StartTime": "starts",
    "Partition": "partition",
    "NodeList": "nodes",
    "NumNodes": "num_nodes",
    "Command": "script",
    "WorkDir": "work_dir",
    "Comment": "comment",
    "StdOut": "output",
}
"""Our fields by Slurm's words for them."""
WHOLE_LINES = ("Command", "WorkDir", "Comment", "StdErr", "StdIn", "StdOut")
"""What scontrol writes on a line of its own, since it may have spaces in it."""
NOTHING = (
    "",
    "(null)",
    "None",
    "N/A",
    "n/a",
    "Unknown",
    "UNLIMITED",
    "NOT_SET",
    "INVALID",
    "Partition_Limit",
)
JOB_COMMENT_PREFIX = "trimtab:"
"""What the comments of our jobs begin with; the run's folder follows."""
JOB_NAME_PREFIX = "trimtab-"
"""What the names of our jobs begin with, for clusters that write comments of their own."""
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "SUSPENDED")
GOING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING")
"""Slurm's states before the end."""
REASONS = {
    "Priority": "jobs of higher priority come first",
    "Resources": "it is next, and waits until enough nodes and GPUs are free",
    "BeginTime": "it may not start earlier; Slurm holds back a job that it has queued again",
    "Dependency": "it waits for another job",
    "DependencyNeverSatisfied": "the job that it waits for has failed, so that it never starts: cancel it",
    "JobHeldUser": "it is held: scontrol release {job_id}",
    "JobHeldAdmin": "an administrator holds it",
    "JobHoldMaxRequeue": "it was queued again too often, and is held: scontrol release {job_id}",
    "launch failed requeued held": "it could not be started, and is held: scontrol release {job_id}",
    "PartitionDown": "the partition {partition} is down",
    "PartitionInactive": "the partition {partition} starts no jobs at present",
    "PartitionNodeLimit": "it asks for more nodes than the partition {partition} gives to one job",
    "PartitionTimeLimit": "its time limit is above that of the partition {partition}",
    "PartitionConfig": "the partition {partition} cannot give what it asks for",
    "ReqNodeNotAvail*": "nodes that it could use are down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "BadConstraints": "no node can ever give what it asks for: cancel it, and ask for less",
    "Licenses": "it waits for a licence",
    "Reservation": "it waits for its reservation",
    "AccountNotAllowed": "its account may not use the partition {partition}",
    "InvalidAccount": "its account does not exist",
    "InvalidQOS": "its quality of service (qos) does not exist",
    "QOSNotAllowed": "its quality of service (qos) may not be used there",
    "QOSJobLimit": "you have as many jobs as its quality of service (qos) allows",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as its quality of service (qos) allows",
    "QOSMax*PerUser*": "your jobs use as much as its quality of service (qos) allows one user",
    "QOSMax*PerJob*": "it asks for more than its quality of service (qos) gives to one job",
    "QOSMaxWallDurationPerJobLimit": "its time limit is above that of its quality of service (qos)",
    "QOSGrp*": "its quality of service (qos) is used up by all its jobs together",
    "Assoc*Job*Limit": "your account has as many jobs as it may",
    "AssocGrp*": "your account uses as much as it may",
    "AssocMax*": "it asks for more than your account may use at once",
    "Cleaning": "its last attempt is being cleared away",
    "Prolog": "the node is being prepared",
}
"""Why a job waits, by Slurm's word or the shape of it; the first that fits counts."""
ENDINGS = {
    "COMPLETED": "it ran to its end",
    "FAILED": "its program failed",
    "CANCELLED": "it was cancelled",
    "TIMEOUT": "it reached its time limit",
    "NODE_FAIL": "a node was lost",
    "PREEMPTED": "another job took its nodes",
    "OUT_OF_MEMORY": "it used more host memory than it had asked for",
    "BOOT_FAIL": "its node could not be started",
    "DEADLINE": "its deadline passed",
    "REVOKED": "another cluster has it",
}


def squeue_command(*, user: str | None = None, job_id: str | None = None) -> tuple[str, ...]:
    """Build the squeue command for one user's jobs, or for one job."""
    form = FIELD.join(SQUEUE_FIELDS.values()) + RECORD
    whose = () if user is None else (f"--user={user}",)
    # One job is also told of for some minutes after its end.
    which = () if job_id is None else (f"--jobs={job_id}", "--states=all")
    return ("squeue", "--noheader", *whose, *which, f"--format={form}")


def scontrol_command(job_id: str) -> tuple[str, ...]:
    """Build the scontrol command for one job."""
    return ("scontrol", "show", "job", job_id)


def sacct_command(job_ids: Sequence[str]) -> tuple[str, ...]:
    """Build the sacct command for old jobs."""
    form = ",".join(SACCT_FIELDS.values())
    jobs = ",".join(job_ids)
    return (
        "sacct",
        "--noheader",
        "--allocations",
        "--parsable2",
        f"--delimiter={FIELD}",
        f"--jobs={jobs}",
        f"--format={form}",
    )


def read_squeue(text: str) -> tuple[QueuedJob, ...]:
    """Parse the output of squeue; skip broken records."""
    return _parse_records(text.split(RECORD), tuple(SQUEUE_FIELDS))


def read_sacct(text: str) -> tuple[QueuedJob, ...]:
    """Parse the output of sacct, one job a line."""
    return _parse_records(text.split("\n"), tuple(SACCT_FIELDS))


def _parse_records(records: Sequence[str], names: tuple[str, ...]) -> tuple[QueuedJob, ...]:
    jobs = []
    for record in records:
        values = record.removeprefix("\n").split(FIELD)
        if len(values) == len(names):
            jobs.append(_parse_job(dict(zip(names, values, strict=True))))
    return tuple(job for job in jobs if job is not None)


def read_scontrol(text: str) -> QueuedJob | None:
    """Parse the output of `scontrol show job`; None if it is no job."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        first, equals, rest = line.strip().partition("=")
        if equals and first in WHOLE_LINES:
            values.setdefault(SCONTROL_KEYS.get(first, first), rest.rstrip())
            continue
        # "JobId=7 JobName=my job": a value ends where the next word with a sign begins.
        keys = list(re.finditer(r"(?:^|\s)([A-Za-z/:]+)=", line))
        ends = [key.start() for key in keys[1:]] + [len(line)]
        for key, end in zip(keys, ends, strict=False):
            if key[1] in SCONTROL_KEYS:
                values.setdefault(SCONTROL_KEYS[key[1]], line[key.end() : end].rstrip())
    values["user"] = values.get("user", "").partition("(")[0]
    return _parse_job(values)


def _parse_job(values: dict[str, str]) -> QueuedJob | None:
    given = {name: (None if value in NOTHING else value) for name, value in values.items()}
    job_id, state = given.get("job_id"), given.get("state")
    if job_id is None or state is None:
        return None
    return QueuedJob(
        job_id=job_id,
        # sacct says who: "CANCELLED by 0".
        state=state.split()[0].rstrip("+"),
        reason=given.get("reason"),
        num_nodes=parse_whole((given.get("num_nodes") or "").partition("-")[0]),
        nodes=_parse_nodes(given.get("nodes")),
        ran_s=parse_slurm_time(given.get("ran_s")),
        limit_s=parse_slurm_time(given.get("limit_s")),
        starts=given.get("starts"),
        partition=given.get("partition") or "",
        user=given.get("user") or "",
        name=given.get("name") or "",
        comment=given.get("comment") or "",
        script=given.get("script"),
        work_dir=given.get("work_dir"),
        output=given.get("output"),
        restarts=parse_whole(given.get("restarts") or ""),
    )


def _parse_nodes(listed: str | None) -> tuple[str, ...]:
    # sacct's word for a job that never had any.
    if not listed or listed == "None assigned":
        return ()
    try:
        return tuple(parse_node_list(listed))
    except ValueError:
        return (listed,)


def parse_slurm_time(text: str | None) -> float | None:
    """Parse a time of Slurm: DAYS-HH:MM:SS, HH:MM:SS, MM:SS, or seconds; None for anything else.

    >>> parse_slurm_time("1-02:03:04"), parse_slurm_time("5:00"), parse_slurm_time("UNLIMITED")
    (93784.0, 300.0, None)
    """
    match = re.fullmatch(r"(?:([0-9]{1,5})-)?([0-9]{1,9})(?::([0-9]{2}))?(?::([0-9]{2}))?", text or "")
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(number) for number in rest if number is not None]
    while len(parts) < 3:  # noqa: PLR2004 - hours, minutes, seconds
        # After days it is hours that come first, and else seconds that come last.
        parts = [*parts, 0] if days is not None else [0, *parts]
    hours, minutes, last = parts
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + last)


def is_over(job: QueuedJob) -> bool:
    """Return whether a job has ended for good."""
    return job.state not in WAITING + GOING


def is_ours(job: QueuedJob) -> bool:
    """Return whether trimtab submitted a job."""
    return job.comment.startswith(JOB_COMMENT_PREFIX) or job.name.startswith(JOB_NAME_PREFIX)


def run_folder_of(job: QueuedJob) -> str | None:
    """Return the run folder that the comment of a job of ours names.

    >>> run_folder_of(QueuedJob(job_id="7", state="RUNNING", comment="trimtab:/home/me/runs/a"))
    '/home/me/runs/a'
    """
    folder = job.comment.removeprefix(JOB_COMMENT_PREFIX)
    return folder if job.comment.startswith(JOB_COMMENT_PREFIX) and folder.startswith("/") else None


def explain_state(job: QueuedJob) -> str:
    """Explain a job's state in plain words, if there is more to say than the state.

    >>> explain_state(QueuedJob(job_id="7", state="PENDING", reason="Resources"))
    'it is next, and waits until enough nodes and GPUs are free'
    """
    if is_over(job):
        ending = ENDINGS.get(job.state, "")
        # What is left of a cancelled job's reason is why it had waited.
        has_reason = job.reason not in (None, "NonZeroExitCode") and job.state == "FAILED"
        return f"{ending} ({job.reason})" if has_reason and ending else ending
    if job.state not in WAITING or job.reason is None:
        return ""
    fitting = (words for shape, words in REASONS.items() if fnmatchcase(job.reason, shape))
    words = next(fitting, None)
    if words is None:
        return f"Slurm says {job.reason}"
    text = words.format(job_id=job.job_id, partition=job.partition)
    if job.reason == "BeginTime" and job.starts:
        return f"until {job.starts.replace('T', ' ')} {text}"
    return text


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


class SlurmClient(NamedTuple):
    """Access to Slurm; `submit.real_slurm()` is the real one."""

    ask: Callable[[Sequence[str]], str]
    """What a command of Slurm prints, or an EnvironmentFault in its own words."""
    has: Callable[[str], bool]
    """Whether there is such a command here."""
    me: str
    """The user."""


# Pure functions: from what was read to values.


def measure_progress(
    folder: str,
    job: str | None,
    attempt: Attempt | None,
    lines: Sequence[dict[str, Any]],
    last: Incident | None,
) -> JobProgress:
    """Measure the progress of a run from the last lines of its log."""
    recent = [line for line in lines if line.get("time_s") and line.get("samples")][-RECENT:]
    # Steps of an attempt on other devices say nothing about this one.
    recent = [line for line in recent if line.get("gpus") == recent[-1].get("gpus")]
    took_s = sum(line["time_s"] for line in recent)
    step = int(lines[-1].get("step", 0)) if lines else 0
    steps = None if attempt is None else attempt.steps
    left = None if steps is None or not recent else max(0, steps - step) * took_s / len(recent)
    if left is not None and not 0 <= left < LARGEST:
        left = None
    return JobProgress(
        folder=folder,
        job=job,
        step=step,
        steps=steps,
        loss=lines[-1].get("loss") if lines else None,
        samples_per_s=sum(line["samples"] for line in recent) / took_s if recent else None,
        recent=len(recent) or None,
        left_s=left,
        processes=None if attempt is None else attempt.procs,
        attempt=None if attempt is None else attempt.attempt,
        last_incident=last,
    )


def view_slurm_job(job: QueuedJob, run: JobProgress | None, tail: Sequence[str]) -> JobView:
    """Build the view of a job in the queue, with its run."""
    ends = run is not None and run.left_s is not None and job.state == "RUNNING"
    return JobView(
        id=job.job_id,
        kind="slurm",
        state=job.state.lower(),
        why=explain_state(job),
        queued=job,
        run=run if ends or run is None else run.replace(left_s=None),
        log=job.output,
        tail=tuple(tail),
    )


def why_not_cancel(job: QueuedJob, me: str) -> str:
    """Return why a job is not cancelled without force; empty if it may be."""
    if job.user and job.user != me:
        return f"it is {job.user}'s, and you are {me}"
    if not is_ours(job):
        return f"trimtab did not submit it: its name is {job.name!r}"
    return ""


# Functions with effects: folders, processes, the scheduler.


def read_progress(folder: Path) -> JobProgress | None:
    """Read the progress of the run in a folder; None if there is no run in it yet."""
    attempt = read_attempt(folder)
    lines = [line for line in read_json_lines(_read_end(folder / "log.jsonl")) if is_step_object(line)]
    job = _read_field(folder / "run.json", "job")
    if attempt is None and not lines and job is None:
        return None
    incidents = read_json_lines(_read_end(folder / "events.jsonl"))
    try:
        last = Incident.from_builtins(incidents[-1]) if incidents else None
    except (msgspec.ValidationError, RecursionError):
        last = None
    return measure_progress(str(folder), job, attempt, lines, last).replace(damage=list_damage(folder))


def is_alive(folder: Path, attempt: Attempt) -> bool:
    """Return whether an attempt runs on this machine: its first rank holds the folder's lock."""
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
    """Find run folders: those given, or those inside of them; by default those in ./runs."""
    folders: list[Path] = []
    for place in places or [RUNS_FOLDER]:
        if places and not place.is_dir():
            raise WrongUse(
                shorten(str(place)),
                found="there is no such folder",
                cure="Give the folder of a run, or one that has such folders in it.",
            )
        inside = [place, *sorted(place.iterdir())] if place.is_dir() else []
        folders += [
            path.absolute() for path in inside if (path / "run.json").exists() or (path / NOTE).exists()
        ]
    return folders


def list_jobs(
    at: SlurmClient, places: Sequence[Path] = (), *, lines: int = TAIL
) -> tuple[list[JobView], list[TrimtabError]]:
    """List our jobs: in Slurm's queue, noted in run folders, and running on this machine.

    Beside them what could not be asked: a Slurm that does not answer hides no run on this machine.
    """
    folders = find_folders(places)
    try:
        queued = queued_jobs(at)
    except EnvironmentFault as error:
        return _local_views(folders), [error]
    views = [_view_with_run(job, at, lines) for job in queued]
    listed = {view.id for view in views} | {view.run.folder for view in views if view.run is not None}
    for folder in folders:
        job_id = slurm_job_of(folder)
        if job_id is not None and job_id not in listed and str(folder) not in listed and at.has("squeue"):
            ended = find_slurm_job(job_id, at)
            views += [] if ended is None else [_view_with_run(ended, at, lines, folder)]
    return [*views, *_local_views(folders)], []


def _local_views(folders: Sequence[Path]) -> list[JobView]:
    """List runs on this machine that no scheduler started."""
    attempts = [(folder, read_attempt(folder)) for folder in folders]
    return [
        _local_view(folder, attempt)
        for folder, attempt in attempts
        if attempt is not None and attempt.job_id is None and is_alive(folder, attempt)
    ]


def _local_view(folder: Path, attempt: Attempt) -> JobView:
    return JobView(id=f"{LOCAL}{attempt.pid}", kind="local", state="running", run=read_progress(folder))


def queued_jobs(at: SlurmClient) -> list[QueuedJob]:
    """List our jobs in the queue; none if there is no Slurm."""
    if not at.has("squeue"):
        return []
    try:
        jobs = read_squeue(at.ask(squeue_command(user=at.me)))
    except EnvironmentFault as error:
        raise _slurm_error(error) from error
    return [job for job in jobs if is_ours(job)]


def find_slurm_job(job_id: str, at: SlurmClient) -> QueuedJob | None:
    """Find a job that may have ended, by squeue, then sacct; None if both have forgotten it."""
    try:
        jobs = read_squeue(at.ask(squeue_command(job_id=job_id)))
    except EnvironmentFault as error:
        if "invalid job id" not in error.found.lower():
            raise _slurm_error(error) from error
    else:
        if jobs:
            return jobs[0]
    if not at.has("sacct"):
        return None
    try:
        jobs = read_sacct(at.ask(sacct_command([job_id])))
    except EnvironmentFault:
        # A cluster that keeps no accounts.
        return None
    return jobs[0] if jobs else None


def read_job_output(job_id: str, at: SlurmClient) -> QueuedJob | None:
    """Find the output file of a job; None if Slurm has forgotten it."""
    try:
        return read_scontrol(at.ask(scontrol_command(job_id)))
    except EnvironmentFault:
        return None


def _slurm_error(error: EnvironmentFault) -> EnvironmentFault:
    """Return an error that Slurm does not answer, without the long command."""
    return EnvironmentFault("Slurm's queue", found=error.found, cure=error.cure)


def cancel_job(job_id: str, at: SlurmClient, *, force: bool = False, places: Sequence[Path] = ()) -> JobView:
    """Cancel a job by Slurm id, local id or run folder; return its last view."""
    given = f"job {shorten(job_id)}"
    folder = Path(job_id).absolute()
    if (folder / "run.json").exists() or (folder / NOTE).exists():
        attempt, number = read_attempt(folder), slurm_job_of(folder)
        here = attempt is not None and attempt.job_id is None and is_alive(folder, attempt)
        if here or number is None:
            return _end_local(folder, given)
        job_id = number
    if job_id.startswith(LOCAL):
        for place in find_folders(places):
            attempt = read_attempt(place)
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
    attempt = read_attempt(folder)
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
            found=f"process {attempt.pid} cannot be sent a signal ({error.strerror})",
            cure="End it by hand.",
        ) from error
    return view


def _end_slurm(job_id: str, given: str, at: SlurmClient, *, force: bool) -> JobView:
    if not at.has("scancel"):
        raise EnvironmentFault(
            given, found="there is no Slurm on this machine", cure="Run it on a login node of the cluster."
        )
    job = find_slurm_job(job_id, at)
    if job is None:
        yours = ", ".join(job.job_id for job in queued_jobs(at))
        raise UnknownName(
            given,
            found=f"Slurm knows no such job; yours are {yours}" if yours else "Slurm knows no such job",
            cure="See `trimtab jobs`.",
        )
    if is_over(job):
        raise WrongUse(
            given,
            found=f"it has ended already: {explain_state(job) or job.state}",
            cure="There is nothing to do.",
        )
    refused = why_not_cancel(job, at.me)
    if refused and not force:
        raise WrongUse(given, found=refused, cure="If it is meant, cancel it with --force.")
    view = _view_with_run(job, at, 0)
    at.ask(("scancel", job_id))
    return view


def _view_with_run(job: QueuedJob, at: SlurmClient, lines: int, folder: Path | None = None) -> JobView:
    """Build the view of a job with its folder and its output."""
    if job.output is None:
        full = read_job_output(job.job_id, at)
        job = job if full is None else job.replace(output=full.output, restarts=full.restarts)
    named = run_folder_of(job)
    where = folder or (None if named is None else Path(named))
    run = None if where is None else read_progress(where)
    tail = _read_tail(Path(job.output), lines) if job.output else []
    return view_slurm_job(job, run, tail)


def slurm_job_of(folder: Path) -> str | None:
    """Return the Slurm id that a run was last submitted as; None for a run on this machine."""
    attempt = read_attempt(folder)
    submitted = _read_field(folder / NOTE, "job_id")
    numbers = [number for number in (attempt and attempt.job_id, submitted) if number and number.isdigit()]
    # Numbers grow: what was submitted again comes after what ran.
    return max(numbers, key=int, default=None)


def _read_field(file: Path, key: str) -> str | None:
    try:
        value = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError, ValueError, RecursionError):
        return None
    text = value.get(key) if isinstance(value, dict) else None
    return text if isinstance(text, str) else None


def _read_end(file: Path) -> bytes:
    """Read the end of a file, from the beginning of a line."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - END_BYTES))
            data = stream.read(END_BYTES)
    except OSError:
        return b""
    return data if size <= END_BYTES else data.partition(b"\n")[2]


def _read_tail(file: Path, lines: int) -> list[str]:
    """Read the last lines of a text that are not empty."""
    # A progress bar writes over its line: the last of it counts.
    text = _read_end(file).decode("utf-8", "replace")
    shown = [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    return [line for line in shown if line][-lines:] if lines else []
