"""How well a compiled step is guessed from the trace of the eager one, as `trimtab plan` does.

    python bench/compiled_guess.py [-v] [JOB..]

Sets the guess against every compiled step that was measured on an H200: the compiled cases of the exam, and
the compiled candidates of plan_quality.json. Takes some minutes the first time; no GPU is needed. With `-v`
the eager candidates are shown beside them.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import TYPE_CHECKING, NamedTuple

import plan_quality  # type: ignore[import-not-found] # beside this file

from trimtab.catalog.clusters import parse_cluster
from trimtab.exams.run import is_full_name, read_cases
from trimtab.predict.estimate import estimate_trace
from trimtab.predict.memory import add_accumulation
from trimtab.spec import Trace
from trimtab.trace.tracer import trace_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.errors import TrimtabError
    from trimtab.spec import Setting

DEVICE = parse_cluster("H200").devices[0]
CONTEXT = 760 * 2**20


class Row(NamedTuple):
    """A compiled step: what it is, seconds and bytes as measured, and as guessed."""

    name: str
    measured_s: float
    guessed_s: float
    measured_bytes: int
    """Of the whole process."""
    high_bytes: int
    """The upper end of the guess."""

    @property
    def error(self) -> float:
        """Of the time."""
        return self.guessed_s / self.measured_s - 1


def guess(
    name: str, setting: Setting, trace: Trace | TrimtabError, *, seconds: float, process: int
) -> Row | None:
    """One row; None where the eager step could not be traced."""
    if not isinstance(trace, Trace):
        print(f"{name}: {trace}")
        return None
    found = add_accumulation(
        estimate_trace(trace, setting, DEVICE, fusing=setting.compile)[0], trace, setting
    )
    return Row(name, seconds, found.step_s or 0.0, process, found.band.high_bytes)


def of_exam() -> Iterator[Row | None]:
    """The compiled cases of the exam."""
    for case in read_cases():
        measured = case.measurement
        if not measured.setting.compile or measured.step_s is None:
            continue
        job = case.job if is_full_name(case.job) else f"trimtab.exams.jobs:{case.job}"
        eager = measured.setting.replace(compile=False)
        (trace,) = trace_settings(job, [eager], DEVICE, overrides=case.overrides, clip=case.clip)
        yield guess(
            case.id,
            measured.setting,
            trace,
            seconds=measured.step_s,
            process=measured.process_bytes or 0,
        )


def of_plans(key: str, measured: list[dict[str, object]], *, eager: bool = False) -> Iterator[Row | None]:
    """The compiled candidates of one job of plan_quality.json, or with `eager` the others."""
    job = plan_quality.JOBS[key]
    known = [row for row in measured if "samples_per_s" in row and row["compile"] is not eager]
    settings = [plan_quality.setting_of(job, row) for row in known]
    alone = [s.replace(compile=False, accumulation=1, global_batch=s.micro_batch) for s in settings]
    traces = trace_settings(plan_quality.name_of(job), alone, DEVICE, overrides=job["options"])
    for row, setting, trace in zip(known, settings, traces, strict=True):
        name = f"{key} {row['micro_batch']} {row['precision']} {row['recompute']}"
        seconds = job["batch"] / float(str(row["samples_per_s"]))
        process = int(str(row["reserved_bytes"])) + CONTEXT
        yield guess(name, setting, trace, seconds=seconds, process=process)


def summary(name: str, rows: list[Row]) -> str:
    """Median and worst error of the time, and how often the memory was above its band."""
    sizes = [abs(row.error) for row in rows]
    above = sum(row.measured_bytes > row.high_bytes for row in rows)
    return (
        f"| {name} | {len(rows)} | {statistics.median(sizes):.1%} | "
        f"{max(rows, key=lambda row: abs(row.error)).error:+.1%} | {above} |"
    )


def ranking(rows: list[Row]) -> str:
    """How often the faster of two settings of a job is guessed to be the faster one, ties of 3 % left out."""
    right = every = 0
    for place, row in enumerate(rows):
        for other in rows[:place]:
            apart = row.measured_s / other.measured_s
            if 1 / 1.03 < apart < 1.03:  # noqa: PLR2004 - as the docstring says
                continue
            every += 1
            right += (row.guessed_s > other.guessed_s) == (apart > 1)
    return f"{right} of {every} pairs in the right order"


def main(chosen: list[str]) -> None:
    """Print every row, then the table."""
    results = json.loads(plan_quality.RESULTS.read_text(encoding="utf-8"))
    found: dict[str, list[Row]] = {}
    orders = []
    chosen = [text for text in chosen if text != "-v"]
    if not chosen or "exam" in chosen:
        found["exam"] = [row for row in of_exam() if row is not None]
    for key, result in results.items():
        if chosen and key not in chosen:
            continue
        found[key] = [row for row in of_plans(key, result["candidates"]) if row is not None]
        others = [row for row in of_plans(key, result["candidates"], eager=True) if row is not None]
        if "-v" in sys.argv:
            found[f"{key} eager"] = others
        orders.append(f"{key}: {ranking(found[key] + others)}, compiled and eager; "
                      f"{ranking(found[key])}, compiled")  # fmt: skip
    for rows in found.values():
        for row in rows:
            memory = f"{row.measured_bytes / 2**30:.1f} of {row.high_bytes / 2**30:.1f} GiB"
            print(f"{row.name:36} {row.measured_s * 1e3:8.1f} ms {row.error:+7.1%}   {memory}")
    print("| | steps | median error | worst | above the band |\n|---|--:|--:|--:|--:|")
    for key, rows in found.items():
        print(summary(key, rows))
    print(summary("all", [row for rows in found.values() for row in rows]))
    print("\n".join(orders))


if __name__ == "__main__":
    main(sys.argv[1:])
