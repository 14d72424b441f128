"""Sits the exam: predicts every recorded case again and sets it against what was measured.

Covers memory (allocated, reserved, process) and the time of a step.
"""

from __future__ import annotations

import fnmatch
import statistics
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import TYPE_CHECKING

from trimtab.catalog.clusters import stated
from trimtab.catalog.lookup import reported
from trimtab.errors import TrimtabError, WrongUse
from trimtab.predict.estimate import estimate
from trimtab.spec import Calibration, Estimate, Measurement, Noun
from trimtab.trace.tracer import traced
from trimtab.trace.worker import Request

if TYPE_CHECKING:
    from collections.abc import Callable

FIGURES = ("allocated_bytes", "reserved_bytes", "process_bytes", "step_s")
WORKERS = 2


class Case(Noun, frozen=True, kw_only=True):
    """One recorded run."""

    id: str
    job: str
    """The class in trimtab.exams.jobs."""
    overrides: dict[str, str | int | float | bool | list[int] | None] = {}
    clip: float | None = None
    measurement: Measurement


class Answer(Noun, frozen=True, kw_only=True):
    """A case predicted again."""

    case: str
    predicted: dict[str, float]
    measured: dict[str, float]
    error: dict[str, float]
    """Predicted over measured, less one."""
    failed: str = ""
    """Why there is no prediction."""


class Marks(Noun, frozen=True, kw_only=True):
    """The exam as a whole: sizes of errors, as shares."""

    cases: tuple[Answer, ...]
    median: dict[str, float]
    worst: dict[str, float]
    """Largest size of an error."""
    lowest: dict[str, float]
    """The prediction that was furthest too low."""


def cases(only: str = "*") -> tuple[Case, ...]:
    """Recorded cases whose id matches a pattern."""
    text = files("trimtab.exams").joinpath("cases.jsonl").read_text(encoding="utf-8")
    every = [Case.from_json(line, origin="cases.jsonl") for line in text.splitlines()]
    found = tuple(one for one in every if fnmatch.fnmatch(one.id, only))
    if not found:
        raise WrongUse(f"--only {only}", found="no case matches it", cure="Leave it out to see every case.")
    return found


def sit(only: str = "*", *, cache: bool = True, done: Callable[[Answer], None] = lambda _: None) -> Marks:
    """Predict the cases and mark the answers; `done` is told of each as it comes."""
    chosen = cases(only)

    def answer(case: Case) -> Answer:
        found = _answer(case, cache=cache)
        done(found)
        return found

    with ThreadPoolExecutor(WORKERS) as pool:
        return mark(tuple(pool.map(answer, chosen)))


def mark(answers: tuple[Answer, ...]) -> Marks:
    """The marks of some answers."""
    right = [one for one in answers if not one.failed]
    return Marks(
        cases=answers,
        median={name: statistics.median(abs(one.error[name]) for one in right) for name in FIGURES}
        if right
        else {},
        worst={name: max(abs(one.error[name]) for one in right) for name in FIGURES} if right else {},
        lowest={name: min(one.error[name] for one in right) for name in FIGURES} if right else {},
    )


def predict(case: Case, *, cache: bool = True, calibration: Calibration | None = None) -> Estimate:
    """Today's estimate of a recorded case, by another calibration if one is given."""
    row = reported(case.measurement.device)
    assert row is not None  # noqa: S101 - cases are recorded on catalogued devices
    where = stated(f"{case.measurement.setting.gpus}x{row.name}")
    device = where.devices[0]
    request = Request(
        job=f"trimtab.exams.jobs:{case.job}",
        overrides=case.overrides,
        setting=case.measurement.setting,
        device=device,
        clip=case.clip,
    )
    setting = case.measurement.setting
    trace = traced(request, cache=cache)
    found = estimate(trace, setting, device, cluster=where, calibration=calibration)[0]
    if found.step_s is None or found.step_time is None:
        return found
    # Ranks of many were measured alone, with collectives that move nothing.
    return found.replace(step_s=found.step_s - found.step_time.communication_s)


def _answer(case: Case, *, cache: bool) -> Answer:
    measured = {name: getattr(case.measurement, name) for name in FIGURES}
    try:
        found = predict(case, cache=cache)
    except TrimtabError as reason:
        return Answer(case=case.id, predicted={}, measured=measured, error={}, failed=str(reason))
    predicted = {name: getattr(found, name) for name in FIGURES}
    error = {name: predicted[name] / measured[name] - 1 for name in FIGURES}
    return Answer(case=case.id, predicted=predicted, measured=measured, error=error)
