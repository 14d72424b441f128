"""Data of a report: from a plan file, a run folder, or the output of `trimtab profile --json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.errors import BrokenFile, WrongUse
from trimtab.spec import Plan, StagedPlan
from trimtab.spec.base import Noun
from trimtab.training import run_folder
from trimtab.training.run_folder import RUN_FILES, RunRecord, parse_noun

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.predict.memory import Timeline

CURE = "Give a plan from `trimtab plan --out FILE`, a run's folder, or what `trimtab profile --json` wrote."


class Profile(Noun, frozen=True, kw_only=True):
    """Predicted and measured values, as `trimtab profile --json` writes them."""

    predicted: dict[str, float | None]
    measured: dict[str, float | None]


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """Everything that is known for a report, and what is missing."""

    origin: str
    """The file or folder, as it was given."""
    plan: Plan | None = None
    run: RunRecord | None = None
    profile: Profile | None = None
    timeline: Timeline | None = None
    timeline_of: str = ""
    """What was traced, where it is not quite the plan's setting."""
    missing: tuple[str, ...] = ()
    """What cannot be shown, and why."""


def read_report_data(place: Path) -> ReportData:
    """Read the data of a file or a folder; raise if there is nothing to show."""
    if place.is_dir():
        return _read_run(place)
    try:
        if place.stat().st_size > run_folder.LARGEST_FILE:
            raise BrokenFile(f"report {place}", found="it is too large to be one of ours", cure=CURE)
        data = place.read_bytes()
    except OSError as error:
        raise WrongUse(f"report {place}", found=f"it cannot be read ({error.strerror})", cure=CURE) from error
    return _read_file(place, data)


def _read_run(place: Path) -> ReportData:
    if not any((place / name).exists() for name in RUN_FILES):
        raise WrongUse(
            f"report {place}",
            found=f"there is no {', no '.join(RUN_FILES)} in it{_name_runs_below(place)}",
            cure=CURE,
        )
    run = run_folder.read_run(place)
    if not run.lines and not run.events and run.plan is None:
        raise BrokenFile(
            f"report {place}", found=f"nothing in it can be shown: {'; '.join(run.notes)}", cure=CURE
        )
    missing = run.notes
    if not run.lines and not any(text.startswith(run_folder.LOG_FILE) for text in missing):
        missing = (*missing, f"{run_folder.LOG_FILE} is empty: the run has not taken a step")
    return ReportData(origin=str(place), plan=run.plan, run=run, missing=missing)


def _name_runs_below(place: Path) -> str:
    """Name the runs inside a folder that is not a run itself."""
    try:
        runs = sorted(log.parent for log in place.glob("*/log.jsonl"))[:3]
    except OSError:
        return ""
    return f"; there are runs in it, such as {', '.join(map(str, runs))}" if runs else ""


def _read_file(place: Path, data: bytes) -> ReportData:
    problems: list[str] = []
    plan = parse_noun(data, Plan, problems, name=place.name)
    if plan is not None:
        return ReportData(origin=str(place), plan=plan, missing=tuple(problems))
    staged = parse_noun(data, StagedPlan, [], name=place.name)
    if staged is not None and staged.stages:
        names = [stage.stage.name for stage in staged.stages]
        only = f"{len(names)} stages are planned ({', '.join(names)}); this page is about the first"
        return ReportData(
            origin=str(place), plan=staged.stages[0].plan, missing=(only,) if len(names) > 1 else ()
        )
    profile = _read_profile(data)
    if profile is not None:
        return ReportData(origin=str(place), profile=profile)
    raise BrokenFile(f"report {place}", found="; ".join(problems), cure=CURE)


def _read_profile(data: bytes) -> Profile | None:
    try:
        value: Any = msgspec.json.decode(data)
        fields = {key: value[key] for key in ("predicted", "measured")}
        return Profile.from_builtins(fields)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError):
        return None
