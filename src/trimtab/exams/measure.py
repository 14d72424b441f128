"""Measure a setting on the GPU of this machine in a child process: memory and step time.

It runs the same program as the tracer (`trimtab.engine.step`), on real tensors. Out of memory is a result,
not an error.
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
from trimtab.spec import Allocator, BaseFormat, Measurement, Noun, Recompute, Versions
from trimtab.trace.request import TraceRequest
from trimtab.trace.server import SendAnswer, ask, serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from trimtab.spec import Estimate, Setting

WARM_UP, TIMED = 3, 5
TIMEOUT_S = 900


class StepMeasurement(Noun, frozen=True, kw_only=True):
    """Measured memory and time of a setting."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    step_s: float | None = None
    """Median of the timed steps."""
    loss: float | None = None
    out_of_memory: str = ""
    """torch's message if memory ran out, else empty."""
    device: str = ""
    torch: str = ""


class ProfileFigures(Noun, frozen=True, kw_only=True):
    """Memory and time of a step. Unknown is None."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    step_s: float | None = None


class ProfileErrors(Noun, frozen=True, kw_only=True):
    """Predicted / measured - 1 of each figure; None if either is unknown."""

    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    process_bytes: float | None = None
    step_s: float | None = None


class ProfileOutput(Noun, frozen=True, kw_only=True):
    """Output of `trimtab profile --json`."""

    predicted: ProfileFigures
    measured: ProfileFigures
    error: ProfileErrors
    run: StepMeasurement


def compare_measurement(predicted: Estimate, measured: StepMeasurement) -> ProfileOutput:
    """Return a prediction beside a measurement."""
    names = ProfileFigures.__struct_fields__
    guess = {name: getattr(predicted, name) for name in names}
    truth = {name: getattr(measured, name) for name in names}
    error = {name: guess[name] / truth[name] - 1 if guess[name] and truth[name] else None for name in names}
    return ProfileOutput(
        predicted=ProfileFigures(**guess),
        measured=ProfileFigures(**truth),
        error=ProfileErrors(**error),
        run=measured,
    )


def measure_in_child(request: TraceRequest) -> StepMeasurement:
    """Run the request in a child process and return its measurement."""
    conf = "expandable_segments:True" if request.setting.allocator is Allocator.EXPANDABLE else ""
    # The old name of the variable works with every torch version that trimtab supports.
    env = {"PYTORCH_CUDA_ALLOC_CONF": conf}
    answer = ask("trimtab.exams.measure", request, env, timeout_s=TIMEOUT_S)
    return StepMeasurement.from_builtins(answer["measured"])


def make_case(request: TraceRequest, measured: StepMeasurement) -> Case:
    """Make a case of the exam from a measurement."""
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
            device=measured.device,
            versions=Versions(torch=measured.torch),
            allocated_bytes=measured.allocated_bytes or 0,
            reserved_bytes=measured.reserved_bytes or 0,
            process_bytes=measured.process_bytes,
            step_s=measured.step_s,
            samples_per_s=setting.micro_batch / measured.step_s if measured.step_s else None,
            taken_on=datetime.now(UTC).date().isoformat(),
        ),
    )


def measure_here(request: TraceRequest) -> StepMeasurement:
    """Build the job on the GPU, run its steps and read the counters. The process must do nothing else."""
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
        raise job_error(f"job {request.job}", error, "Fix the job.") from error


def measure_rank(
    job: Any,
    setting: Setting,
    *,
    clip: float | None = None,
    timing: Callable[[], AbstractContextManager[None]] | None = None,
) -> dict[str, Any]:
    """Run the steps of a setting on this GPU and read the counters.

    A setting of several GPUs runs as rank 0 of a fake process group: memory and computation are those of a
    rank, sharded weights have no values, and collectives transfer nothing. `timing` is a context manager for
    the timed steps.
    """
    import torch

    from trimtab.engine import step as steps
    from trimtab.strategies import strategy_of

    if setting.gpus > 1:
        _join_fake_group(setting.gpus)
    state = _prepare_rank(job, setting)
    has_values = setting.gpus == 1 or not strategy_of(setting).is_sharded
    batches = [steps.make_batch(job, setting, "cuda")] * setting.accumulation
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()

    def time_step() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        steps.run_step(state, batches, clip=clip)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        time_step()
    with timing() if timing is not None else nullcontext():
        times = [time_step() for _ in range(TIMED)]
        loss = float(steps.run_step(state, batches, clip=clip))
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "process_bytes": _process_bytes(),
        **(_measure_host() if setting.offload else {}),
        # Arithmetic on weights without values is faster than on real ones, so it is not reported.
        "step_s": statistics.median(times) if has_values else None,
        **({} if has_values else {"step_s_without_values": statistics.median(times)}),
        "loss": loss,
    }


def _measure_host() -> dict[str, int]:
    """Return the peak memory of this process on the host, and what of it torch has pinned, if it says so."""
    import resource

    import torch

    found = {"host_rank_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if hasattr(torch.cuda, "host_memory_stats"):
        found["host_pinned_bytes"] = int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))
    return found


def _prepare_rank(job: Any, setting: Setting) -> Any:
    """Prepare a job on this GPU. A model that is built on the host is built here first, which is faster."""
    import torch

    from trimtab.engine import step as steps
    from trimtab.engine.build import is_built_on_host

    if setting.gpus > 1 or not is_built_on_host(setting):
        return steps.prepare_job(job, setting, values=setting.gpus == 1)
    model = steps.build_model(job, setting.replace(base=BaseFormat.NONE)).cpu()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return steps.assemble_job(job, model, setting)


def _join_fake_group(ranks: int) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def _process_bytes() -> int | None:
    """Return the memory that the driver reports for this process; None if it does not."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return None
    return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)


def _serve_request(text: str, say: SendAnswer) -> None:
    say({"measured": measure_here(TraceRequest.from_json(text)).to_builtins()})


if __name__ == "__main__":
    serve(_serve_request)
