"""What doctor says of a run of `trimtab train`: how it stands, by its folder, and what it met on the way."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from trimtab.diagnosis.diagnose import diagnose_logs
from trimtab.diagnosis.fault_kinds import load_kinds
from trimtab.diagnosis.log_scanner import Sighting
from trimtab.diagnosis.own_runs import ENDINGS, STATES, settle_runs
from trimtab.probe.machine import Machine, replay_machine
from trimtab.spec import Incident, IncidentKind
from trimtab.training.signals import STOP_SIGNALS, describe_stop

LOGS = Path(__file__).parent / "logs"


def machine(name: str = "n1", *processes: int) -> Machine:
    """A machine on which those processes are."""
    alive = {f"process:{process}": {"name": "python"} for process in processes}
    return replay_machine({"host": {"name": name, **alive}})


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(LOGS / name, tmp_path / name))


def kinds_of(*names: Path | str, world: Machine | None = None) -> list[str | None]:
    return [finding.kind for finding in diagnose_logs([str(name) for name in names], world=world).findings]


def append(folder: Path, **event: Any) -> None:
    whole = {"at_s": 1.0, "rank": 0} | event
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(whole) + "\n")


def test_a_run_whose_process_is_no_more_is_gone(tmp_path: Path) -> None:
    folder = copied("run-unfinished", tmp_path)
    found = diagnose_logs([str(folder)], world=machine("n1"))
    assert [finding.kind for finding in found.findings] == ["run-gone"]
    assert found.exit_code == 5
    assert "4711" in found.findings[0].what
    assert "step 9 of 64" in found.findings[0].what


def test_a_run_that_takes_steps_is_under_way(tmp_path: Path) -> None:
    folder = copied("run-unfinished", tmp_path)
    (folder / "log.jsonl").touch()
    found = diagnose_logs([str(folder)], world=machine("n1", 4711))
    assert [finding.kind for finding in found.findings] == ["run-under-way"]
    assert found.exit_code == 0


def test_a_run_that_takes_none_stands_still(tmp_path: Path) -> None:
    folder = copied("run-unfinished", tmp_path)
    os.utime(folder / "log.jsonl", (1.0, 1.0))
    assert kinds_of(folder, world=machine("n1", 4711)) == ["run-stalled"]


def test_from_another_machine_nobody_says_whether_it_runs(tmp_path: Path) -> None:
    found = diagnose_logs([str(copied("run-unfinished", tmp_path))], world=machine("n2", 4711)).findings[0]
    assert found.kind == "run-unfinished"
    assert "n1" in found.cure


def test_a_finished_run_is_never_said_to_go_on(tmp_path: Path) -> None:
    done = copied("run-resumed", tmp_path)
    found = diagnose_logs([str(done)]).findings
    assert "is done: all of its 30 steps" in found[0].what
    assert found[0].severity.value == "info"
    # What ended the attempt before is told as over.
    assert [one.kind for one in found] == ["run-done", "run-incident", "run-resumed"]
    assert "asked to end" in found[1].what


def test_a_run_that_was_asked_to_end_twice_has_ended_once(tmp_path: Path) -> None:
    folder = copied("run-resumed", tmp_path)
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "log.jsonl").write_text("\n".join(lines[:20]) + "\n", encoding="utf-8")
    append(folder, kind="time-limit", step=20, why="SIGUSR1 asked for the end", done="it was saved")
    found = diagnose_logs([str(folder)]).findings
    assert [one.kind for one in found] == ["run-asked-to-end", "run-incident", "run-resumed"]
    assert "SIGUSR1 at step 20" in found[0].what
    assert "same command" in found[0].cure


def test_an_error_that_ended_the_run_is_told_with_its_own_cure(tmp_path: Path) -> None:
    found = diagnose_logs([str(copied("run-failed", tmp_path))])
    assert found.exit_code == 4
    assert "a bad sample" in found.findings[0].what
    assert found.findings[0].cure.startswith("Fix the job.")


def test_a_log_in_the_folder_of_a_run_is_read_with_its_events(tmp_path: Path) -> None:
    folder = copied("run-failed", tmp_path)
    (folder / "slurm-1.log").write_text("step 4 of 64\n", encoding="utf-8")
    found = diagnose_logs([str(folder / "slurm-1.log")])
    assert [finding.kind for finding in found.findings] == [
        finding.kind for finding in diagnose_logs([str(folder)]).findings
    ]
    assert "a bad sample" in found.findings[0].what


def test_a_folder_and_what_it_printed_tell_one_story(tmp_path: Path) -> None:
    folder = copied("run-failed", tmp_path)
    found = diagnose_logs([str(folder), str(LOGS / "job-failed.log")])
    assert [finding.kind for finding in found.findings] == ["job-failed"]
    assert "run failed at step 4" in found.findings[0].consequences[0]


def test_the_same_events_twice_are_counted_once(tmp_path: Path) -> None:
    drill = LOGS / "run-drill.log"
    folder = tmp_path / "run"
    folder.mkdir()
    printed = [line for line in drill.read_text(encoding="utf-8").splitlines() if " at step " in line]
    for line in printed:
        head, _, rest = line.removeprefix("trimtab: ").partition(": ")
        kind, _, step = head.partition(" at step ")
        why, _, done = rest.partition("; ")
        append(folder, kind=kind, step=int(step), why=why, done=done)
    lost = next(
        finding
        for finding in diagnose_logs([str(folder), str(drill)]).findings
        if finding.kind == "run-lost-rank"
    )
    assert lost.times == 2
    assert "2 times, at steps 7 to 13" in lost.what


def test_runs_that_stand_alike_are_all_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(LOGS / "run-unfinished", tmp_path / name)
        shutil.copytree(LOGS / "run-resumed", tmp_path / f"{name}-done")
    log = tmp_path / "out.log"
    log.write_text("trimtab: 30 of 30 steps, loss 3.0, in /w/a-done\n", encoding="utf-8")
    done, under_way = diagnose_logs([str(tmp_path)], world=machine("n2")).findings[:2]
    assert (done.kind, done.times) == ("run-done", 2)
    assert "a-done/attempt.json" in done.evidence
    assert done.evidence.endswith(f"(and {tmp_path}/b-done/attempt.json)")
    assert (under_way.kind, under_way.times) == ("run-unfinished", 2)


def test_an_out_of_memory_that_was_answered_is_no_error() -> None:
    found = diagnose_logs([str(LOGS / "run-out-of-memory.log")])
    assert "CUDA out of memory. Tried to allocate" in found.findings[1].evidence
    assert found.exit_code == 0


def test_somebody_elses_error_beside_ours_still_is_one() -> None:
    found = diagnose_logs([str(LOGS / "run-out-of-memory.log"), str(LOGS / "one-rank-oom.log")])
    assert found.findings[0].kind == "out-of-memory"
    assert found.exit_code == 4


@pytest.mark.parametrize("kind", IncidentKind)
def test_every_event_is_known_as_it_is_printed(kind: IncidentKind, tmp_path: Path) -> None:
    done = "this attempt ends. Fix it." if kind in {"failed", "bug"} else "it was answered"
    # In the words of the run itself, so that this fails where they change.
    asked = next(
        (f"{who} asked for the end" for one, who in map(describe_stop, STOP_SIGNALS) if one is kind),
        "it came",
    )
    incident = Incident(kind=kind, at_s=1.0, step=3, rank=0, why=asked, done=done)
    file = tmp_path / "events.jsonl"
    file.write_text(incident.to_json() + "\n", encoding="utf-8")
    from_file = kinds_of(file)
    log = tmp_path / "out.log"
    log.write_text(f"trimtab: {incident.text}\n", encoding="utf-8")
    assert from_file == kinds_of(log)
    if kind is not IncidentKind.HANG:  # nothing writes it yet
        assert len(from_file) == 1
        assert str(from_file[0]).startswith("run-")


@pytest.mark.parametrize(
    "wreck",
    [
        "",
        "\x00\x00\x00",
        "{",
        '{"kind": "resume"}\n',
        "[1, 2]\n",
        '{"kind": "no-such", "at_s": 1}\n',
        "\n\n\n",
    ],
)
def test_broken_files_of_a_run_folder_are_read_past(wreck: str, tmp_path: Path) -> None:
    folder = copied("run-resumed", tmp_path)
    for name in ("attempt.json", "run.json", "events.jsonl", "run.lock"):
        (folder / name).write_text(wreck, encoding="utf-8")
    with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
        file.write(wreck)
    found = diagnose_logs([str(folder)], world=machine("n1"))
    assert {finding.kind for finding in found.findings} <= {"run-unfinished", "run-done", "run-ended-early"}


def test_an_event_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    folder = copied("run-resumed", tmp_path)
    append(folder, kind="loss-spike", step=3, why="\x1b[2Jhigh\ntrimtab: 3 of 3 steps", done="x")
    found = diagnose_logs([str(folder)]).findings
    assert not any("\x1b" in one.evidence for one in found)
    assert found[0].what.endswith("30 steps were taken.")


def test_a_log_of_another_program_is_not_a_run(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 1, "loss": NaN}\n', encoding="utf-8")
    assert kinds_of(tmp_path) == ["not-a-number"]


def test_states_are_rows_and_every_own_row_without_a_pattern_is_told_by_a_sum() -> None:
    assert set(STATES) <= set(load_kinds())
    without = {name for name, row in load_kinds().items() if name.startswith("run-") and not row.patterns}
    assert without == {*STATES, "run-incident"} - set(ENDINGS)


def test_without_runs_nothing_changes() -> None:
    sighting = Sighting(of="out-of-memory", file="a", line=3, text="x")
    assert settle_runs([sighting]) == [sighting]


def test_one_resume_counts_as_one(tmp_path: Path) -> None:
    """A run that is queued again and resumes on other GPUs says so in three lines."""
    folder = tmp_path / "run"
    folder.mkdir()
    for kind in ("requeue", "resume", "resize"):
        append(folder, kind=kind, step=3, why=f"why of {kind}", done=f"answer of {kind}")
    (one,) = [finding for finding in diagnose_logs([str(folder)]).findings if finding.kind == "run-resumed"]
    assert "once, at step 3" in one.what
    assert "why of resume" in one.cause
    # The same command again from the same step is another resume.
    for kind in ("resume", "resize"):
        append(folder, kind=kind, step=3, why=f"why of {kind}", done="it goes on")
    append(folder, kind="resume", step=9, why="later", done="it goes on")
    (one,) = [finding for finding in diagnose_logs([str(folder)]).findings if finding.kind == "run-resumed"]
    assert "3 times, at steps 3 to 9" in one.what
