"""Run the exam: predict every recorded case again and compare it with what was measured.

It covers memory (allocated, reserved, process) and step time.
"""

from __future__ import annotations

import fnmatch
import statistics
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import TYPE_CHECKING

from trimtab.catalog.clusters import parse_cluster
from trimtab.catalog.devices import find_reported_device
from trimtab.catalog.torch_release import require_supported_torch
from trimtab.errors import TrimtabError, WrongUse
from trimtab.jobs.registry import BUILT_IN
from trimtab.predict.communication import find_links
from trimtab.predict.estimate import estimate_trace
from trimtab.predict.nccl_memory import estimate_nccl_bytes
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
    """A class in trimtab.exams.jobs, or a job as on the command line."""
    overrides: dict[str, str | int | float | bool | list[int] | None] = {}
    clip: float | None = None
    measurement: Measurement


class CaseResult(Noun, frozen=True, kw_only=True):
    """Prediction and measurement of a case."""

    case: str
    predicted: dict[str, float]
    measured: dict[str, float]
    error: dict[str, float]
    """Predicted / measured - 1."""
    failed: str = ""
    """Why there is no prediction; empty if there is one."""


class ExamResult(Noun, frozen=True, kw_only=True):
    """Results of all cases, with statistics of the relative errors by figure."""

    cases: tuple[CaseResult, ...]
    median: dict[str, float]
    worst: dict[str, float]
    """Largest absolute error."""
    lowest: dict[str, float]
    """Lowest (most negative) error: the prediction that was furthest too low."""


def read_cases(only: str = "*", own: Path | None = None) -> tuple[Case, ...]:
    """Read the recorded cases whose id matches a pattern: trimtab's, or those of a `profile --keep` file."""
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
    matching = tuple(case for case in every if fnmatch.fnmatch(case.id, only))
    if not matching:
        raise WrongUse(f"--only {only}", found="no case matches it", cure="Leave it out to see every case.")
    return matching


def run_exam(
    only: str = "*",
    *,
    own: Path | None = None,
    cache: bool = True,
    done: Callable[[CaseResult], None] = lambda _: None,
) -> ExamResult:
    """Predict the cases and return the results; `done` is called with each as it is ready."""
    require_supported_torch()
    chosen = read_cases(only, own)

    def run_case(case: Case) -> CaseResult:
        result = _predict_and_compare(case, cache=cache)
        done(result)
        return result

    with ThreadPoolExecutor(WORKERS) as pool:
        return summarize_results(tuple(pool.map(run_case, chosen)))


def summarize_results(results: tuple[CaseResult, ...]) -> ExamResult:
    """Return the results with median, worst and lowest errors."""
    errors_by_figure = {
        name: [result.error[name] for result in results if not result.failed and name in result.error]
        for name in FIGURES
    }
    errors_by_figure = {name: errors for name, errors in errors_by_figure.items() if errors}
    return ExamResult(
        cases=results,
        median={name: statistics.median(map(abs, errors)) for name, errors in errors_by_figure.items()},
        worst={name: max(map(abs, errors)) for name, errors in errors_by_figure.items()},
        lowest={name: min(errors) for name, errors in errors_by_figure.items()},
    )


def is_full_name(job: str) -> bool:
    """Return whether a case names its job as on the command line."""
    return ":" in job or job in BUILT_IN


def append_case(case: Case, file: Path) -> None:
    """Append a case to a file of cases."""
    try:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(f"{case.to_json()}\n")
    except OSError as error:
        raise WrongUse(
            f"--keep {file}", found=f"it cannot be written: {error.strerror}", cure="Name another file."
        ) from error


def predict_case(case: Case, *, cache: bool = True, calibration: Calibration | None = None) -> Estimate:
    """Estimate a recorded case with the current predictor, and with `calibration` if given."""
    row = find_reported_device(case.measurement.device)
    if row is None:
        raise WrongUse(
            f"case {case.id}",
            found=f"the catalogue has no {case.measurement.device}",
            cure="See `trimtab detect --list` for what it has.",
        )
    cluster = parse_cluster(f"{case.measurement.setting.gpus}x{row.name}")
    device = cluster.devices[0]
    request = TraceRequest(
        job=case.job if is_full_name(case.job) else f"trimtab.exams.jobs:{case.job}",
        overrides=case.overrides,
        setting=case.measurement.setting,
        device=device,
        clip=case.clip,
    )
    setting = case.measurement.setting
    trace = trace_setting(request, cache=cache)
    result = estimate_trace(trace, setting, device, cluster=cluster, calibration=calibration)[0]
    # Cases with several GPUs were measured on one rank, with collectives that transfer nothing.
    nccl_bytes = estimate_nccl_bytes(setting, find_links(cluster, setting.gpus))
    result = result.replace(process_bytes=result.process_bytes - nccl_bytes)
    if result.step_s is None or result.step_time is None:
        return result
    return result.replace(step_s=result.step_s - result.step_time.communication_s)


def _predict_and_compare(case: Case, *, cache: bool) -> CaseResult:
    figures = {name: getattr(case.measurement, name) for name in FIGURES}
    measured = {name: value for name, value in figures.items() if value is not None}
    try:
        prediction = predict_case(case, cache=cache)
    except TrimtabError as reason:
        return CaseResult(case=case.id, predicted={}, measured=measured, error={}, failed=str(reason))
    estimates = {name: getattr(prediction, name) for name in FIGURES}
    predicted = {name: value for name, value in estimates.items() if value is not None}
    error = {name: predicted[name] / value - 1 for name, value in measured.items() if name in predicted}
    return CaseResult(case=case.id, predicted=predicted, measured=measured, error=error)
