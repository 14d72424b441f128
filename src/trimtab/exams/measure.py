"""Runs a setting for real on the GPU of this machine, in a child process, and says what it used.

The same program as the tracer runs (`trimtab.engine.step`), on real tensors. Out of memory is an answer, not
a crash.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from trimtab.errors import EnvironmentFault
from trimtab.exams.run import Case
from trimtab.jobs.load import job_error, load_job
from trimtab.spec import Allocator, Measurement, Noun, Recompute, Versions
from trimtab.trace.request import TraceRequest
from trimtab.trace.server import SendAnswer, ask, serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from trimtab.spec import Setting

WARM_UP, TIMED = 3, 5
TIMEOUT_S = 900


class StepMeasurement(Noun, frozen=True, kw_only=True):
    """What a setting really used."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    step_s: float | None = None
    """Median of the timed steps."""
    loss: float | None = None
    out_of_memory: str = ""
    """torch's own words, where it ran out."""
    device: str = ""
    torch: str = ""


def measure_in_child(request: TraceRequest) -> StepMeasurement:
    """Run the request in a child process and read its answer."""
    conf = "expandable_segments:True" if request.setting.allocator is Allocator.EXPANDABLE else ""
    # The old name of the variable is read by every torch that trimtab runs with.
    env = {"PYTORCH_CUDA_ALLOC_CONF": conf}
    answer = ask("trimtab.exams.measure", request, env, timeout_s=TIMEOUT_S)
    return StepMeasurement.from_builtins(answer["measured"])


def make_case(request: TraceRequest, found: StepMeasurement) -> Case:
    """A run as a case of the exam."""
    setting = request.setting
    short = request.job.rpartition("/")[2]
    again = "" if setting.recompute is Recompute.NONE else f"-{setting.recompute}"
    compiled = "-compile" if setting.compile else ""
    return Case(
        id=f"{short}-{setting.precision}{again}{compiled}-b{setting.micro_batch}",
        job=request.job,
        overrides=request.overrides,
        clip=request.clip,
        measurement=Measurement(
            job=request.job,
            setting=setting,
            device=found.device,
            versions=Versions(torch=found.torch),
            allocated_bytes=found.allocated_bytes or 0,
            reserved_bytes=found.reserved_bytes or 0,
            process_bytes=found.process_bytes,
            step_s=found.step_s,
            samples_per_s=setting.micro_batch / found.step_s if found.step_s else None,
            taken_on=datetime.now(UTC).date().isoformat(),
        ),
    )


def measure_here(request: TraceRequest) -> StepMeasurement:
    """Build the job on the GPU, take its steps and read the counters. Only in a process of its own."""
    import torch

    if not torch.cuda.is_available():
        raise EnvironmentFault(
            "profile", found="torch finds no GPU here", cure="Use `trimtab estimate`, which needs none."
        )
    if request.setting.gpus > 1:
        raise EnvironmentFault(
            "profile", found="only one GPU can be profiled yet", cure="Leave --strategy at single."
        )
    named: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": str(torch.__version__)}
    job = load_job(request.job, request.overrides)
    try:
        return StepMeasurement(**measure_rank(job, request.setting, clip=request.clip), **named)
    except torch.OutOfMemoryError as error:
        return StepMeasurement(out_of_memory=str(error).split("\n")[0], **named)
    except Exception as error:
        raise job_error(f"job {request.job}", error, "Mend the job; the line is where it failed.") from error


def measure_rank(
    job: Any,
    setting: Setting,
    *,
    clip: float | None = None,
    timing: Callable[[], AbstractContextManager[None]] | None = None,
) -> dict[str, Any]:
    """Take the steps of a setting on this GPU and read the counters.

    Of several GPUs, as rank 0 of a fake process group: it holds and computes what a rank does, sharded
    weights have no values, and collectives move nothing. `timing` is entered for the steps that are timed.
    """
    import torch

    from trimtab.engine import step as steps
    from trimtab.strategies import strategy_of

    if setting.gpus > 1:
        _join_fake_group(setting.gpus)
    state = steps.prepare_job(job, setting, values=setting.gpus == 1)
    has_values = setting.gpus == 1 or not strategy_of(setting).is_sharded
    batch = steps.make_batch(job, setting, "cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()

    def timed() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        steps.run_step(state, [batch], clip=clip)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        timed()
    with timing() if timing is not None else nullcontext():
        times = [timed() for _ in range(TIMED)]
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "process_bytes": _process_bytes(),
        # Arithmetic on weights without values is faster than on real ones.
        "step_s": statistics.median(times) if has_values else None,
        "loss": float(steps.run_step(state, [batch], clip=clip)),
    }


def _join_fake_group(ranks: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def _process_bytes() -> int | None:
    """What the driver shows for this process; None where it does not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    return next((one.usedGpuMemory for one in listed if one.pid == os.getpid()), None)


def _serve_request(text: str, say: SendAnswer) -> None:
    say({"measured": measure_here(TraceRequest.from_json(text)).to_builtins()})


if __name__ == "__main__":
    serve(_serve_request)
