"""Predict and measure the smallest memory limit at which jobs run.

    python bench/least_cap.py predict [CASE ...] > predicted.json      # no GPU; about 20 s a case
    python bench/least_cap.py measure predicted.json [CASE ...]        # one line of JSON a case

The limit is `torch.cuda.set_per_process_memory_fraction`: it counts what torch reserves, without the CUDA
context. Each try builds the job again, takes `STEPS` steps, and either runs or is out of memory. One process
serves the tries of a case; it is replaced when a try leaves memory behind. A case takes 8 to 12 tries; a
compiled one compiles in each of them, after the first one from torch's cache on disk.

`error` is predicted over measured, less one: the issue asks for at most 3 %, and no less than -1 %.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.catalog.clusters import parse_cluster
from trimtab.exams.run import is_full_name, read_cases
from trimtab.spec import Allocator

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.exams.run import Case
    from trimtab.trace.request import TraceRequest

CASES = (
    "gpt-bf16-b16",
    "gpt-full-bf16-b32",
    "hfgpt2-bf16-b8",
    "conformer-bf16-b32",
    "wave-fp16-b16",
    "unet-bf16-b64",
    "resnet50-bf16-cl-b256",
    "lstm-fp16-b128",
    "peft-full-bf16-b16",
    "llama4-full-expandable-b8",
    "gpt-compile-b16",
    "unet-compile-bf16-b64",
    "conformer-compile-bf16-b32",
    "fsdp16-gpt-fp32-b8",
    "fsdp8-llama8-bf16-b4",
    "fsdp8-bert-bf16-full-b64",
)
"""Recorded cases of `trimtab exam`: ten eager, three compiled, three sharded as rank 0 of a fake group."""
STEPS = 12
"""As many as the prediction replays: some jobs take three steps in little memory and fail in the fifth."""
TOLERANCE = 0.003
"""How close the measured limit is found."""
FIRST = (0.99, 1.03)
"""The first limits that are tried, as shares of the predicted one: what the issue allows."""
ABOVE = (1.01, 1.03)
"""Limits above the smallest one that are tried last: they must run too."""
LEFT = 64 << 20
"""Bytes that a try may leave behind before its process is replaced."""
TRY_TIMEOUT_S = 300.0


def case_named(name: str) -> Case:
    """The recorded case of that name."""
    (found,) = read_cases(name)
    return found


def request_of(case: Case) -> TraceRequest:
    """What the tracer and the GPU are asked to run."""
    from trimtab.trace.request import TraceRequest

    setting = case.measurement.setting
    return TraceRequest(
        job=case.job if is_full_name(case.job) else f"trimtab.exams.jobs:{case.job}",
        overrides=case.overrides,
        setting=setting,
        device=parse_cluster(f"{setting.gpus}xH200").devices[0],
        clip=case.clip,
    )


def predict_least_cap(case: Case) -> dict[str, Any]:
    """The smallest limit by replay, with the peaks of a run without one."""
    from trimtab.predict.capacity import find_least_capacity, replay_within, training_steps
    from trimtab.trace.tracer import trace_setting

    request = request_of(case)
    expandable = request.setting.allocator is Allocator.EXPANDABLE
    steps = training_steps(trace_setting(request))
    free = replay_within(steps, None, expandable=expandable)
    least = find_least_capacity(steps, expandable=expandable, by_fraction=True)
    tight = replay_within(steps, least, expandable=expandable, by_fraction=True)
    return {
        "case": case.id,
        "allocated_bytes": free.allocated_bytes,
        "reserved_bytes": free.reserved_bytes,
        "least_bytes": least,
        "releases_per_step": tight.releases,
    }


@dataclass
class Tries:
    """A process that runs a case under one limit after another."""

    name: str
    process: subprocess.Popen[str] | None = None
    many: int = 0

    def run(self, limit_bytes: int) -> dict[str, Any]:
        """Whether the case runs under a limit, 0 being none, and its peaks."""
        if self.process is None:
            expandable = case_named(self.name).measurement.setting.allocator is Allocator.EXPANDABLE
            conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if expandable else {}
            self.process = subprocess.Popen(
                [sys.executable, __file__, "serve", self.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | conf,
            )
        assert self.process.stdin is not None  # noqa: S101 - both are pipes
        assert self.process.stdout is not None  # noqa: S101
        self.many += 1
        self.process.stdin.write(f"{limit_bytes}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if found["left_bytes"] > LEFT:
            self.close()
        return found

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.communicate(timeout=TRY_TIMEOUT_S)
            self.process = None


def measure_least_cap(name: str, predicted: dict[str, Any]) -> dict[str, Any]:
    """The smallest limit at which a case really runs, beside the predicted one."""
    begin = time.perf_counter()
    tries = Tries(name)
    free = tries.run(0)
    low, high = free["allocated_bytes"], free["reserved_bytes"]
    low, high = search_limit(
        lambda limit: bool(tries.run(limit)["runs"]), low, high, guess=predicted["least_bytes"]
    )
    above = [limit for share in ABOVE if (limit := round(high * share)) < free["reserved_bytes"]]
    fails_above = [limit for limit in above if not tries.run(limit)["runs"]]
    tries.close()
    return {
        "case": name,
        "allocated_bytes": free["allocated_bytes"],
        "reserved_bytes": free["reserved_bytes"],
        "least_bytes": high,
        "fails_at_bytes": low,
        "fails_above_bytes": fails_above,
        "predicted": predicted,
        "error": predicted["least_bytes"] / high - 1,
        "tries": tries.many,
        "wall_s": round(time.perf_counter() - begin, 1),
        "machine": platform.machine(),
        **{key: free[key] for key in ("torch", "device")},
    }


def search_limit(runs: Callable[[int], bool], low: int, high: int, *, guess: int) -> tuple[int, int]:
    """The largest limit that was seen to fail and the smallest that was seen to run, close together.

    `high` is taken to run and `low` to fail. The first tries are around the guess.

    >>> low, high = search_limit(lambda limit: limit >= 1234, 1000, 2000, guess=1250)
    >>> low < 1234 <= high <= 1238
    True
    """
    for share in FIRST:
        limit = round(guess * share)
        if low < limit < high:
            if runs(limit):
                high = limit
            else:
                low = limit
    while high - low > high * TOLERANCE:
        middle = (low + high) // 2
        if runs(middle):
            high = middle
        else:
            low = middle
    return low, high


def serve(name: str) -> None:
    """Run the case under every limit that comes in on stdin, one a line; answers are lines of JSON."""
    import torch

    case = case_named(name)
    setting = case.measurement.setting
    if setting.gpus > 1:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.gpus)
    _, total = torch.cuda.mem_get_info()
    answers = os.fdopen(os.dup(1), "w")
    # Whatever a job prints is no answer.
    os.dup2(2, 1)
    for line in sys.stdin:
        limit = int(line)
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total) if limit else 1.0)
        found = try_once(case)
        found |= {"torch": str(torch.__version__), "device": torch.cuda.get_device_name()}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def try_once(case: Case) -> dict[str, Any]:
    """Build the job, take the steps, and clean up."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    why = _steps(case)
    found = {
        "runs": not why,
        "why": why,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }
    torch.compiler.reset()
    gc.collect()
    # Workspaces of cuBLAS come from the same allocator, and stay.
    torch._C._cuda_clearCublasWorkspaces()  # noqa: SLF001 - there is no public name
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_accumulated_memory_stats()
    return found | {"left_bytes": torch.cuda.memory_reserved()}


def _steps(case: Case) -> str:
    """Empty where all steps ran, or what torch said when it was out of memory."""
    import torch

    from trimtab.engine import step as steps
    from trimtab.jobs.load import load_job

    request = request_of(case)
    try:
        job = load_job(request.job, request.overrides)
        state = steps.prepare_job(job, request.setting, values=request.setting.gpus == 1)
        batch = steps.make_batch(job, request.setting, "cuda")
        for _ in range(STEPS):
            steps.run_step(state, [batch], clip=request.clip)
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        return str(error).split("\n")[0]
    return ""


def main() -> None:
    """Read the command line."""
    verb, *rest = sys.argv[1:] or [""]
    if verb == "serve":
        serve(rest[0])
    elif verb == "predict":
        json.dump([predict_least_cap(case_named(name)) for name in rest or CASES], sys.stdout, indent=1)
        print()
    elif verb == "measure" and rest:
        known = json.loads(Path(rest[0]).read_text(encoding="utf-8"))
        predicted = {one["case"]: one for one in known}
        for name in rest[1:] or predicted:
            print(json.dumps(measure_least_cap(name, predicted[name])), flush=True)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
