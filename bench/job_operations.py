"""Time every different operation of queued cases on a GPU, and write them as calibrations.

    python bench/job_operations.py --out FOLDER [--only PATTERNS] [--workers N]     needs a GPU

Each case runs one optimizer step below the stopwatch of `trimtab calibrate`, in a fork of its own.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from trimtab.spec import Setting

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu_queue import GpuLock, matches, queue, run_forks

DEVICE = "H200 SXM 141GB"


class TimedCase(NamedTuple):
    """A case of the queue, or of the exam."""

    id: str
    job: str
    options: dict[str, Any]
    setting: Setting


def list_cases(only: str) -> list[TimedCase]:
    """Return the cases of the queue, and those of the exam with `exam-` before their names."""
    from trimtab.exams.run import read_cases

    queued = [TimedCase(case.id, case.job_name, case.options, case.setting) for case in queue()]
    exam = [
        TimedCase(
            f"exam-{case.id}", f"trimtab.exams.jobs:{case.job}", case.overrides, case.measurement.setting
        )
        for case in read_cases()
        if case.measurement.setting.gpus == 1
    ]
    return [case for case in (*queued, *exam) if matches(case.id, only) and not case.setting.compile]


def time_case(case: TimedCase, out: Path) -> None:
    """Write the times of the operations of a case."""
    import torch

    from trimtab.calibration.stopwatch import Stopwatch
    from trimtab.engine import step as steps
    from trimtab.exams.measure import _prepare_rank
    from trimtab.jobs.load import load_job
    from trimtab.spec import Calibration
    from trimtab.trace.server import import_ahead
    from trimtab.version import VERSION

    job = load_job(case.job, case.options)
    import_ahead(job)
    with GpuLock().exclusive():
        state = _prepare_rank(job, case.setting)
        batches = [steps.make_batch(job, case.setting, "cuda")]
        stopwatch = Stopwatch()
        with stopwatch:
            steps.run_step(state, batches, clip=None)
        made = Calibration(
            device=DEVICE,
            versions={"torch": str(torch.__version__), "cuda": str(torch.version.cuda), "trimtab": VERSION},
            taken_on=datetime.now(UTC).date().isoformat(),
            works=tuple(stopwatch.times),
            seconds=tuple(stopwatch.times.values()),
        )
    out.write_text(made.to_json(), encoding="utf-8")


def main() -> None:
    """Time all chosen cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder: a file for each case")
    parser.add_argument("--only", required=True)
    parser.add_argument("--workers", type=int, default=3)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    waiting = list_cases(given.only)
    run_forks(lambda case: time_case(case, given.out / f"{case.id}.json"), waiting, given.workers)


if __name__ == "__main__":
    main()
