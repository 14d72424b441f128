"""Jobs as Slurm tells of them: the questions, and its answers as nouns. Pure; `launching/jobs.py` asks.

squeue     jobs that wait or run
scontrol   one job, some minutes after its end too, and where its output goes
sacct      jobs of old, where the cluster keeps accounts
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from trimtab.probe.scheduler import node_names
from trimtab.spec import QueuedJob
from trimtab.units import parse_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

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
OURS = "trimtab:"
"""What the comments of our jobs begin with; the run's folder follows."""
OUR_NAME = "trimtab-"
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
    """The question for one user's jobs, or for one job."""
    form = FIELD.join(SQUEUE_FIELDS.values()) + RECORD
    whose = () if user is None else (f"--user={user}",)
    # One job is also told of for some minutes after its end.
    which = () if job_id is None else (f"--jobs={job_id}", "--states=all")
    return ("squeue", "--noheader", *whose, *which, f"--format={form}")


def scontrol_command(job_id: str) -> tuple[str, ...]:
    """The question for all that is known of a job."""
    return ("scontrol", "show", "job", job_id)


def sacct_command(job_ids: Sequence[str]) -> tuple[str, ...]:
    """The question for jobs of old."""
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
    """What squeue printed; a record that is none is left out."""
    return _parse_records(text.split(RECORD), tuple(SQUEUE_FIELDS))


def read_sacct(text: str) -> tuple[QueuedJob, ...]:
    """What sacct printed, one job a line."""
    return _parse_records(text.split("\n"), tuple(SACCT_FIELDS))


def _parse_records(records: Sequence[str], names: tuple[str, ...]) -> tuple[QueuedJob, ...]:
    found = []
    for record in records:
        values = record.removeprefix("\n").split(FIELD)
        if len(values) == len(names):
            found.append(_parse_job(dict(zip(names, values, strict=True))))
    return tuple(job for job in found if job is not None)


def read_scontrol(text: str) -> QueuedJob | None:
    """What `scontrol show job` printed of one job; None where it is none."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, rest = line.strip().partition("=")
        if equals and key in WHOLE_LINES:
            values.setdefault(SCONTROL_KEYS.get(key, key), rest.rstrip())
            continue
        # "JobId=7 JobName=my job": a value ends where the next word with a sign begins.
        for name, value in re.findall(r"(?:^|\s)([A-Za-z/:]+)=(.*?)(?=\s+[A-Za-z/:]+=|$)", line):
            if name in SCONTROL_KEYS:
                values.setdefault(SCONTROL_KEYS[name], value)
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
        return tuple(node_names(listed))
    except ValueError:
        return (listed,)


def parse_slurm_time(text: str | None) -> float | None:
    """A time as Slurm writes it: DAYS-HH:MM:SS, HH:MM:SS, MM:SS, or seconds alone; None for anything else.

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
    """Whether a job has ended for good."""
    return job.state not in WAITING + GOING


def is_ours(job: QueuedJob) -> bool:
    """Whether trimtab submitted a job."""
    return job.comment.startswith(OURS) or job.name.startswith(OUR_NAME)


def run_folder_of(job: QueuedJob) -> str | None:
    """The run's folder, which the comment of a job of ours names.

    >>> run_folder_of(QueuedJob(job_id="7", state="RUNNING", comment="trimtab:/home/me/runs/a"))
    '/home/me/runs/a'
    """
    folder = job.comment.removeprefix(OURS)
    return folder if job.comment.startswith(OURS) and folder.startswith("/") else None


def explain_state(job: QueuedJob) -> str:
    """Plain words for a job's state, where there is more to say than the state.

    >>> explain_state(QueuedJob(job_id="7", state="PENDING", reason="Resources"))
    'it is next, and waits until enough nodes and GPUs are free'
    """
    if is_over(job):
        known = ENDINGS.get(job.state, "")
        # What is left of a cancelled job's reason is why it had waited.
        told = job.reason not in (None, "NonZeroExitCode") and job.state == "FAILED"
        return f"{known} ({job.reason})" if told and known else known
    if job.state not in WAITING or job.reason is None:
        return ""
    fitting = (words for shape, words in REASONS.items() if fnmatchcase(job.reason, shape))
    words = next(fitting, None)
    if words is None:
        return f"Slurm says {job.reason}"
    said = words.format(job_id=job.job_id, partition=job.partition)
    if job.reason == "BeginTime" and job.starts:
        return f"until {job.starts.replace('T', ' ')} {said}"
    return said
