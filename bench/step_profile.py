"""Profile steps of queued cases on a GPU by operation, to find which operation a prediction gets wrong.

    python bench/step_profile.py run --out FOLDER [--only PATTERNS] [--workers N]      needs a GPU
    python bench/step_profile.py compare --out FOLDER [--only PATTERNS] [--rows N]     needs no GPU

`run` writes a JSON file a case: the time of a step, how long the GPU was busy, and each kind of kernel with
the operations that called it. `compare` predicts the same step and prints the operations with the largest
differences, measured and predicted, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu_queue import DEVICE, GpuLock, QueuedCase, matches, queue, run_forks

STEPS = 3


def profile_case(case: QueuedCase) -> dict[str, Any]:
    """Return what the kernels of a step take, by the operations that called them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from trimtab.engine import step as steps
    from trimtab.exams.measure import _prepare_rank
    from trimtab.jobs.load import load_job
    from trimtab.trace.server import import_ahead

    job = load_job(case.job_name, case.options)
    import_ahead(job)
    with GpuLock().exclusive():
        state = _prepare_rank(job, case.setting)
        batches = [steps.make_batch(job, case.setting, "cuda")] * case.setting.accumulation
        for _ in range(3):
            steps.run_step(state, batches, clip=None)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            steps.run_step(state, batches, clip=None)
        torch.cuda.synchronize()
        step_s = (time.perf_counter() - began) / STEPS
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, record_shapes=True, acc_events=True) as recorded:
            steps.run_step(state, batches, clip=None)
            torch.cuda.synchronize()
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in recorded.events():
        for kernel in event.kernels:
            callers: list[Any] = []
            caller: Any = event
            while caller is not None:
                if caller.name.startswith("aten::"):
                    callers.append([caller.name[6:], caller.input_shapes])
                caller = caller.cpu_parent
            key = json.dumps([[name, shapes] for name, shapes in reversed(callers)] + [kernel.name[:120]])
            rows[key][0] += 1
            rows[key][1] += kernel.duration
    busy_us = sum(value[1] for value in rows.values())
    kernels = [[*json.loads(key), *value] for key, value in rows.items()]
    return {"id": case.id, "step_s": step_s, "busy_s": busy_us / 1e6, "kernels": kernels}


def run(out: Path, only: str, workers: int) -> None:
    """Profile each case in a fork of its own."""
    out.mkdir(parents=True, exist_ok=True)
    waiting = [case for case in queue() if matches(case.id, only) and not (out / f"{case.id}.json").exists()]

    def write_profile(case: QueuedCase) -> None:
        (out / f"{case.id}.json").write_text(json.dumps(profile_case(case)), encoding="utf-8")

    run_forks(write_profile, waiting, workers)


def compare(out: Path, only: str, rows: int) -> None:
    """Print the operations of each profiled step whose time is predicted worst."""
    from trimtab.catalog.clusters import parse_cluster
    from trimtab.predict.calibration import find_speed
    from trimtab.trace.request import TraceRequest
    from trimtab.trace.tracer import trace_setting

    device = parse_cluster(DEVICE).devices[0]
    speed = find_speed(device)
    for case in queue():
        file = out / f"{case.id}.json"
        if speed is None or not matches(case.id, only) or not file.exists():
            continue
        trace = trace_setting(
            TraceRequest(job=case.job_name, overrides=case.options, setting=case.setting, device=device)
        )
        predicted: defaultdict[str, float] = defaultdict(float)
        for work in (trace.works[number] for number in trace.sequence):
            if work.kernels and work.kind not in {"wait", "collective"}:
                predicted[work.op.partition("::")[2]] += speed.pace.seconds(work) * 1e3
        profile = json.loads(file.read_text(encoding="utf-8"))
        measured: defaultdict[str, float] = defaultdict(float)
        for *callers, kernel, _, micros in profile["kernels"]:
            names = [name for name, _ in callers]
            lead = next((name for name in names if name in predicted), names[0] if names else kernel[:40])
            measured[lead] += micros / 1e3
        print(
            f"{case.id}: busy {profile['busy_s'] * 1e3:.1f} ms of {profile['step_s'] * 1e3:.1f}, "
            f"predicted {sum(predicted.values()):.1f}"
        )
        for name in sorted({*predicted, *measured}, key=lambda name: -abs(predicted[name] - measured[name]))[
            :rows
        ]:
            print(f"    {name:50} measured {measured[name]:8.2f}  predicted {predicted[name]:8.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=["run", "compare"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="time-*")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    given = parser.parse_args()
    if given.verb == "run":
        run(given.out, given.only, given.workers)
    else:
        compare(given.out, given.only, given.rows)
