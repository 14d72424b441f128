"""What a step of a small batch costs the host: forward, backward and update, for models of bench/zoo.py.

    python bench/host_steps.py --out FILE [--only PATTERNS] [--workers N] [--compiled]      needs a GPU

With few samples the device waits for the host, whose time depends on the operations and not on their sizes.
A line of JSON has the seconds of the host for each phase (no waiting for the device), and of the whole step.
Beside them it has what `trimtab calibrate` measures of the host, right before and after: shared hosts change
their speed within minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import itertools

from bench.gpu_queue import GpuLock, QueuedCase, matches, queue, run_forks

SAMPLES, WARM_UP, STEPS = 2, 4, 8


def measure_phases(case: QueuedCase) -> dict[str, Any]:
    """Return the host's seconds for each phase of a step with few samples."""
    import torch

    from trimtab.calibration.host import measure_host_costs
    from trimtab.engine import step as steps
    from trimtab.exams.measure import _prepare_rank
    from trimtab.jobs.load import load_job
    from trimtab.trace.server import import_ahead

    job = load_job(case.job_name, case.options)
    import_ahead(job)
    small = replace(case, micro_batch=min(case.micro_batch, SAMPLES))
    times: dict[str, list[float]] = {"forward_s": [], "backward_s": [], "update_s": [], "step_s": []}
    original: Any = steps._backward  # noqa: SLF001 - to see where the phases begin
    marks: list[float] = []

    def backward(*args: Any, **options: Any) -> None:
        marks.append(time.perf_counter())
        original(*args, **options)
        marks.append(time.perf_counter())

    lock = GpuLock()
    with lock.shared() if case.compile else lock.exclusive():
        state = _prepare_rank(job, small.setting)
        batches = [steps.make_batch(job, small.setting, "cuda")]
        for _ in range(WARM_UP):
            steps.run_step(state, batches, clip=None)
    with lock.exclusive():
        steps._backward = backward  # noqa: SLF001
        before = measure_host_costs()
        for _ in range(STEPS):
            marks.clear()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            steps.run_step(state, batches, clip=None)
            update = time.perf_counter()
            torch.cuda.synchronize()
            end = time.perf_counter()
            edges = [begin, *marks[:2], update]
            for name, (start, stop) in zip(times, itertools.pairwise(edges), strict=False):
                times[name].append(stop - start)
            times["step_s"].append(end - begin)
        after = measure_host_costs()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {"id": case.id, **medians, "before": before, "after": after}


def main() -> None:
    """Measure each case in a fork of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="time-*")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--compiled", action="store_true", help="the compiled cases instead of the others")
    given = parser.parse_args()

    def write_line(case: Any) -> None:
        line = measure_phases(case)
        with given.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    cases = [case for case in queue() if matches(case.id, given.only) and case.compile is given.compiled]
    run_forks(write_line, cases, given.workers)


if __name__ == "__main__":
    main()
