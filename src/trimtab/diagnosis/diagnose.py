"""doctor with logs: everything that a failed run left behind, read once, and what it says together."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.diagnosis import log_files, torch_records
from trimtab.diagnosis.findings import Diagnosis, judge_sightings
from trimtab.diagnosis.log_files import MOST_BYTES, NotPlainPickle, load_plain_pickle
from trimtab.diagnosis.log_scanner import LogScanner, Sighting, strip_escapes
from trimtab.diagnosis.own_runs import EVENTS, describe_end, settle_runs
from trimtab.errors import TrimtabError, WrongUse
from trimtab.spec import Incident, Plan
from trimtab.training.run_folder import ATTEMPT_FILE, IDENTITY_FILE, LOCK_FILE, LOG_FILE
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trimtab.diagnosis.findings import Diagnosed
    from trimtab.probe.machine import Machine
    from trimtab.training.step_log import StepLine

MOST_JSON = 256 << 20
"""A larger JSON file is read as lines."""
PICKLE = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
ARCHIVES = {
    b"PK\x03\x04": "a zip archive, as torch.save writes checkpoints",
    b"\x7fELF": "a program or a core dump",
    b"\x89PNG": "a picture",
    b"%PDF": "a PDF",
}
RUN_FILES = (LOG_FILE, ATTEMPT_FILE, IDENTITY_FILE, LOCK_FILE, "summary.json", "summary.txt")
"""Files of a run's folder that say together how the run stands."""


class LogReader:
    """Reads sources and collects what they say."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.sightings: list[Sighting] = []
        self.flights: list[tuple[str, dict[str, Any]]] = []
        self.read: list[str] = []
        self.notes: list[str] = []
        self.facts: dict[str, int] = {}
        self.fixed_bytes = 0
        self.is_compared = False
        """Whether the steps of a run were compared with its plan."""

    def read_source(self, source: log_files.LogSource) -> None:
        """Read one source of any kind."""
        with source.open() as raw:
            head, broken = log_files.read_up_to(raw, log_files.HEAD)
            if not head:
                if broken or source.named:  # a folder of logs has many empty ones
                    why = f"it is broken ({broken})" if broken else "it is empty"
                    self.notes.append(f"{source.name}: {why}.")
                return
            if broken:
                self.notes.append(f"{source.name}: it ends too early ({broken}); what was there was read.")
            if head.startswith(PICKLE):
                self._read_pickle(source.name, head, raw)
            elif (what := _name_binary(head)) and log_files.detect_encoding(head) == "utf-8":
                self.notes.append(f"{source.name}: it is {what}, not a log; it was left.")
            elif (
                source.path is not None
                and source.path.name in RUN_FILES
                and _is_run_folder(source.path.parent)
            ):
                self.read.append(source.name)  # `runs` tells what they come to
            elif not self._read_json(source, head, raw):
                self._read_text(source.name, head, raw)

    def _read_text(self, name: str, head: bytes, raw: io.BufferedReader) -> None:
        stream = log_files.Utf8Stream(raw, head, log_files.detect_encoding(head))
        scanner = LogScanner(name)
        self.sightings += scanner.scan(
            stream.read_chunk, lambda count: self.say(f"reading {name}: {format_bytes(count)}")
        )
        self.read.append(name)
        if stream.broken:
            self.notes.append(f"{name}: it ends too early ({stream.broken}); what was there was read.")

    def _read_pickle(self, name: str, head: bytes, raw: io.BufferedReader) -> None:
        rest, _ = log_files.read_up_to(raw, MOST_BYTES)
        if len(rest) == MOST_BYTES:
            self.notes.append(f"{name}: it is a pickle of more than {format_bytes(MOST_BYTES)}; it was left.")
            return
        self.say(f"reading {name}: {format_bytes(len(rest))}")
        try:
            value = load_plain_pickle(io.BytesIO(head + rest))
        except NotPlainPickle as error:
            self.notes.append(f"{name}: it is a pickle that is not read: {strip_escapes(str(error))}.")
            return
        if not self._read_record(name, value):
            self.notes.append(f"{name}: it is a pickle, but neither a memory snapshot nor a flight record.")

    def _read_record(self, name: str, value: Any) -> bool:
        kind = torch_records.detect_record(value)
        if kind == "snapshot":
            self.sightings += torch_records.read_snapshot(value, name)
        elif kind == "flight":
            self.flights.append((name, value))
        elif kind == "error":
            self.sightings += torch_records.read_error_file(value, name)
        else:
            return False
        self.read.append(name)
        return True

    def _read_json(self, source: log_files.LogSource, head: bytes, raw: io.BufferedReader) -> bool:
        """Read a file that is one JSON value, or trimtab's own; return False to read it as lines."""
        file = Path(source.name).name
        if head.lstrip()[:1] != b"{" or file == "log.jsonl":
            return False
        size = source.path.stat().st_size if source.path else MOST_JSON + 1
        if size > MOST_JSON:
            return False
        rest, _ = log_files.read_up_to(raw, MOST_JSON)
        if file == EVENTS:
            self._read_events(source.name, head + rest)
            return True
        try:
            value = msgspec.json.decode(head + rest)
        except (msgspec.DecodeError, ValueError, RecursionError):
            self._read_text(source.name, head + rest, raw)
            return True
        if file == "plan.json" and self._read_plan(source.name, head + rest):
            return True
        if not self._read_record(source.name, value):
            self._read_text(source.name, head + rest, raw)
        return True

    def _read_plan(self, name: str, text: bytes) -> bool:
        """Read the plan of a run folder: its batch, and the memory that does not grow with the batch."""
        try:
            plan = Plan.from_json(text, origin=name)
        except TrimtabError:
            return False
        self.facts |= {
            "micro_batch": plan.choice.micro_batch,
            "accumulation": plan.choice.accumulation,
            "world_size": plan.choice.gpus,
        }
        parts = plan.estimate.parts if plan.estimate is not None else None
        if parts is not None:
            self.fixed_bytes = sum(
                getattr(parts, name) or 0 for name in ("weights", "gradients", "optimizer", "communication")
            )
        self.read.append(name)
        return True

    def _read_events(self, name: str, data: bytes) -> None:
        """Read the events of a run as the lines that `trimtab train` prints for them."""
        lines = []
        for line in data.split(b"\n"):
            try:
                incident = Incident.from_builtins(msgspec.json.decode(line))
            except (msgspec.DecodeError, ValueError, RecursionError):
                lines.append("")  # so that the others keep their numbers
                continue
            step = incident.step if incident.step is not None else 0
            lines.append(f"trimtab: {' '.join(strip_escapes(incident.replace(step=step).text).split())}")
        text = "\n".join(lines).encode()
        sightings = LogScanner(name).scan(io.BytesIO(text).read, lambda _: None)
        self.sightings += [
            replace(sighting, text=sighting.text.removeprefix("trimtab: ")) for sighting in sightings
        ]
        self.read.append(name)

    def _compare_run(
        self, folder: Path, lines: Iterable[StepLine], plan: Plan | None, *, stated: bool
    ) -> None:
        """Compare the step time of a run with its plan, or with the one that the user stated."""
        from trimtab.diagnosis.step_times import compare_step, measure_run

        measured = measure_run(list(lines), str(folder / LOG_FILE))
        if measured is None or plan is None:
            return
        self.is_compared = True
        if plan.estimate.step_s is None and not stated:
            # A plan for a CPU has no times.
            return
        found, note = compare_step(measured, plan)
        self.sightings += found
        self.notes += [f"{folder}: {note}."] if note else []

    def compare_logs(self, plan: Plan, name: str) -> None:
        """Compare the step time that logs tell with a plan that the user named."""
        from trimtab.diagnosis.step_times import compare_step, measure_log

        measured = measure_log(self.sightings, plan)
        if measured is None:
            if not self.is_compared:
                self.notes.append(f"{name}: no step time was found to compare with it.")
            return
        found, note = compare_step(measured, plan)
        self.sightings += found
        self.notes += [f"{name}: {note}."] if note else []

    def read_runs(
        self, folders: Iterable[Path], world: Machine | None, plan: Plan | None = None
    ) -> list[Sighting]:
        """Describe the state of the runs in these folders, and compare their steps with their plans.

        `plan` takes the place of the plans in the folders.
        """
        from trimtab.probe.machine import this_machine
        from trimtab.watching.watch import RunFollower, read_lock_holder

        ends = []
        for folder in folders:
            where = world or this_machine()
            follower = RunFollower(folder)
            run = follower.look(time.time(), where, ())
            self.notes += [f"{folder}: {words}." for words in run.damage]
            self._compare_run(folder, follower.lines, plan or follower.plan, stated=plan is not None)
            pid, host = read_lock_holder(folder)
            seen = bool(pid) and host == where.host("name")
            alive = seen and where.host(f"process:{pid}") is not None
            note = folder / ATTEMPT_FILE
            file = note if note.is_file() else folder / LOG_FILE
            ends.append(describe_end(run, alive=alive if seen else None, host=host, file=str(file)))
        return ends


def _is_run_folder(folder: Path) -> bool:
    """Return whether `trimtab train` wrote a folder: others write a log.jsonl as well."""
    return (folder / ATTEMPT_FILE).is_file()


def _name_binary(head: bytes) -> str:
    """Name what a binary file is; empty for a text."""
    for magic, what in ARCHIVES.items():
        if head.startswith(magic):
            return what
    return "" if log_files.is_text(head) else "no text"


def _read_stated_plan(file: str) -> Plan:
    """Return the plan of --plan; raise WrongUse if it cannot be read."""
    cure = "Name a file that `trimtab plan --out` wrote."
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise WrongUse(f"--plan {file}", found=f"it cannot be read ({error.strerror})", cure=cure) from error
    try:
        return Plan.from_json(data, origin=file)
    except TrimtabError as error:
        raise WrongUse(f"--plan {file}", found=error.found, cure=cure) from error


def _drop_vaguer(findings: tuple[Diagnosed, ...]) -> tuple[Diagnosed, ...]:
    """Leave out what a comparison with the plan tells better: a low MFU, and a share of waiting."""
    from trimtab.diagnosis.step_times import BUCKET_KINDS, LOADER

    kinds = {finding.kind for finding in findings}
    vaguer = {"low-mfu"} if kinds & {*BUCKET_KINDS} else set()
    vaguer |= {"waits-for-data"} if LOADER in kinds else set()
    return tuple(finding for finding in findings if finding.kind not in vaguer)


def diagnose_logs(
    names: Sequence[str],
    say: Callable[[str], None] = lambda _: None,
    *,
    plan: str | None = None,
    world: Machine | None = None,
) -> Diagnosis:
    """Diagnose the named logs, folders and records together.

    `plan` names a plan whose step time the measured one is compared with; a run folder has its own. `world`
    replaces this machine in tests.
    """
    stated = None if plan is None else _read_stated_plan(plan)
    sources, notes = log_files.find_sources(names)
    reader = LogReader(say)
    folders = dict.fromkeys(source.path.parent for source in sources if source.path is not None)
    runs = [folder for folder in folders if _is_run_folder(folder)]
    # A log that lies in the folder of a run is of that run, and its events say the rest.
    named = {source.path for source in sources}
    events = [
        folder / EVENTS for folder in runs if (folder / EVENTS).is_file() and folder / EVENTS not in named
    ]
    beside = [log_files.LogSource(name=str(file), path=file, named=False) for file in events]
    for source in (*sources, *beside):
        try:
            reader.read_source(source)
        except WrongUse as error:
            if source.named:
                raise
            reader.notes.append(f"{source.name}: {error.found}; it was left.")
    reader.sightings += torch_records.compare_flights(reader.flights)
    ends = reader.read_runs(runs, world, stated)
    if stated is not None and plan is not None:
        reader.compare_logs(stated, plan)
    findings = judge_sightings(
        settle_runs(reader.sightings, ends), known=reader.facts, fixed_bytes=reader.fixed_bytes
    )
    return Diagnosis(
        findings=_drop_vaguer(findings),
        read=tuple(reader.read),
        notes=(*notes, *reader.notes),
    )
