"""Sits the exam: predicts every recorded case again and sets it against what was measured.

Covers memory (allocated, reserved, process) and the time of a step.
"""

from __future__ import annotations

import fnmatch
import statistics
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import TYPE_CHECKING

from trimtab.catalog.clusters import parse_cluster
from trimtab.catalog.devices import find_reported_device
from trimtab.errors import TrimtabError, WrongUse
from trimtab.jobs.registry import BUILT_IN
from trimtab.predict.estimate import estimate_trace
from trimtab.spec import Calibration, Estimate, Measurement, Noun
from trimtab.trace.request import TraceRequest
from trimtab.trace.tracer import trace_setting

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FIGURES = ("allocated_bytes", "reserved_bytes", "process_bytes", "step_s")
WORKERS = 2


class Case(Noun, frozen=True, kw_only=True):
    """One recorded run."""

    id: str
    job: str
    """The class in trimtab.exams.jobs, or a job as it is named on the command line."""
    overrides: dict[str, str | int | float | bool | list[int] | None] = {}
    clip: float | None = None
    measurement: Measurement


class CaseResult(Noun, frozen=True, kw_only=True):
    """A case predicted again."""

    case: str
    predicted: dict[str, float]
    measured: dict[str, float]
    error: dict[str, float]
    """Predicted over measured, less one."""
    failed: str = ""
    """Why there is no prediction."""


class ExamResult(Noun, frozen=True, kw_only=True):
    """The exam as a whole: sizes of errors, as shares."""

    cases: tuple[CaseResult, ...]
    median: dict[str, float]
    worst: dict[str, float]
    """Largest size of an error."""
    lowest: dict[str, float]
    """The prediction that was furthest too low."""


def read_cases(only: str = "*", own: Path | None = None) -> tuple[Case, ...]:
    """Recorded cases whose id matches a pattern: trimtab's, or those of a file that `profile` kept."""
    if own is None:
        text = files("trimtab.exams").joinpath("cases.jsonl").read_text(encoding="utf-8")
    else:
        try:
            text = own.read_text(encoding="utf-8")
        except OSError as error:
            raise WrongUse(
                f"--cases {own}",
                found=f"it cannot be read: {error.strerror}",
                cure="Keep some with `trimtab profile JOB --keep FILE`.",
            ) from error
    every = [Case.from_json(line, origin=own.name if own else "cases.jsonl") for line in text.splitlines()]
    found = tuple(one for one in every if fnmatch.fnmatch(one.id, only))
    if not found:
        raise WrongUse(f"--only {only}", found="no case matches it", cure="Leave it out to see every case.")
    return found


def run_exam(
    only: str = "*",
    *,
    own: Path | None = None,
    cache: bool = True,
    done: Callable[[CaseResult], None] = lambda _: None,
) -> ExamResult:
    """Predict the cases and mark the answers; `done` is told of each as it comes."""
    chosen = read_cases(only, own)

    def answer(case: Case) -> CaseResult:
        found = _predict_and_compare(case, cache=cache)
        done(found)
        return found

    with ThreadPoolExecutor(WORKERS) as pool:
        return summarize_results(tuple(pool.map(answer, chosen)))


def summarize_results(answers: tuple[CaseResult, ...]) -> ExamResult:
    """The marks of some answers."""
    known = {
        name: [answer.error[name] for answer in answers if not answer.failed and name in answer.error]
        for name in FIGURES
    }
    known = {name: errors for name, errors in known.items() if errors}
    return ExamResult(
        cases=answers,
        median={name: statistics.median(map(abs, errors)) for name, errors in known.items()},
        worst={name: max(map(abs, errors)) for name, errors in known.items()},
        lowest={name: min(errors) for name, errors in known.items()},
    )


def is_full_name(job: str) -> bool:
    """Whether a case names its job as the command line does."""
    return ":" in job or job in BUILT_IN


def append_case(case: Case, file: Path) -> None:
    """Add a case to a file of them."""
    try:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{case.to_json()}\n")
    except OSError as error:
        raise WrongUse(
            f"--keep {file}", found=f"it cannot be written: {error.strerror}", cure="Name another file."
        ) from error


def predict_case(case: Case, *, cache: bool = True, calibration: Calibration | None = None) -> Estimate:
    """Today's estimate of a recorded case, by another calibration if one is given."""
    row = find_reported_device(case.measurement.device)
    if row is None:
        raise WrongUse(
            f"case {case.id}",
            found=f"the catalogue has no {case.measurement.device}",
            cure="See `trimtab detect --list` for what it has.",
        )
    where = parse_cluster(f"{case.measurement.setting.gpus}x{row.name}")
    device = where.devices[0]
    request = TraceRequest(
        job=case.job if is_full_name(case.job) else f"trimtab.exams.jobs:{case.job}",
        overrides=case.overrides,
        setting=case.measurement.setting,
        device=device,
        clip=case.clip,
    )
    setting = case.measurement.setting
    trace = trace_setting(request, cache=cache)
    found = estimate_trace(trace, setting, device, cluster=where, calibration=calibration)[0]
    if found.step_s is None or found.step_time is None:
        return found
    # Ranks of many were measured alone, with collectives that move nothing.
    return found.replace(step_s=found.step_s - found.step_time.communication_s)


def _predict_and_compare(case: Case, *, cache: bool) -> CaseResult:
    seen = {name: getattr(case.measurement, name) for name in FIGURES}
    measured = {name: value for name, value in seen.items() if value is not None}
    try:
        found = predict_case(case, cache=cache)
    except TrimtabError as reason:
        return CaseResult(case=case.id, predicted={}, measured=measured, error={}, failed=str(reason))
    guessed = {name: getattr(found, name) for name in FIGURES}
    predicted = {name: value for name, value in guessed.items() if value is not None}
    error = {name: predicted[name] / value - 1 for name, value in measured.items() if name in predicted}
    return CaseResult(case=case.id, predicted=predicted, measured=measured, error=error)
