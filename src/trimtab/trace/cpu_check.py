"""Run one small step of a job on the CPU, to find out whether its own code is at fault.

When tracing fails, either the job has a bug or trimtab cannot follow it. A separate process, without a fake
device, loads the job, builds the model and runs loss() and backward() on two samples. Time and memory are
limited; a model that is too large for this machine is not tried.
"""

from __future__ import annotations

import itertools
import resource
import warnings
from typing import Any, NamedTuple

import msgspec

from trimtab.errors import CannotFollow, JobFailed, TrimtabError
from trimtab.jobs.job import has_longest
from trimtab.jobs.load import job_error, load_job
from trimtab.jobs.optimizers import collect_losses
from trimtab.spec import Noun
from trimtab.trace.child_process import end_with_parent
from trimtab.trace.server import SendAnswer, ask_all, serve
from trimtab.units import GIB

TIMEOUT_S = 60.0
FEW_SAMPLES = 2
LARGEST_MODEL = GIB
"""Models with more bytes of weights are not tried: gradients and activations need memory too."""
MEMBERS = ("load", "model()", "batch()", "loss()")
"""Stages of a check, in order."""
NO_GPU = ("NVIDIA driver", "CUDA enabled", "CUDA devices are available", "CUDA_HOME", "CUDA is not available")
"""Parts of error messages that only report a missing GPU."""


class CpuCheck(Noun, frozen=True, kw_only=True):
    """A job to run, and the last stage to run."""

    job: str
    overrides: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies an empty dict given as a default
    micro_batch: int = FEW_SAMPLES
    member: str = "loss()"
    """One of MEMBERS: the last stage to run."""


class CpuCheckResult(NamedTuple):
    """Result of a check."""

    failure: TrimtabError | None = None
    """The error of the job itself."""
    untried: str = ""
    """Why it was not tried; empty if it ran."""


def check_on_cpu(request: CpuCheck, *, timeout_s: float = TIMEOUT_S) -> CpuCheckResult:
    """Run the check in a separate process."""
    try:
        (answer, *_) = ask_all(
            "trimtab.trace.cpu_check", request, {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=timeout_s, watch=True
        )
    except TrimtabError as error:
        # Too slow, too large, or killed: the job may still be correct.
        return CpuCheckResult(untried=error.found)
    if isinstance(answer, TrimtabError):
        if any(words in answer.found for words in NO_GPU):
            return CpuCheckResult(untried="it asks for a GPU, and there is none here")
        return CpuCheckResult(failure=answer)
    return CpuCheckResult(untried=answer.get("untried", ""))


def blame_error(error: CannotFollow, outcome: CpuCheckResult) -> TrimtabError:
    """Return the error to report for a failed trace: the job's own error only if it fails by itself."""
    if outcome.failure is not None:
        return outcome.failure
    if outcome.untried:
        note = f"Whether the job runs by itself was not tried: {outcome.untried}."
    else:
        note = "The job itself is fine: it runs on a small input on the CPU."
    return CannotFollow(error.given, found=error.found, cure=f"{note} {error.cure}")


def run_small_step(request: CpuCheck) -> dict[str, str]:
    """Run a small step in this process; raise JobFailed if the job fails."""
    import torch

    try:
        job = load_job(request.job, request.overrides)
    except TrimtabError as error:
        if request.member == "load":
            raise
        # It was loaded before, with the fake device.
        return {"untried": f"without a GPU it does not load ({error.found})"}
    if request.member == "load":
        return {}
    torch.manual_seed(0)
    size = _weights_bytes(job)
    if size > LARGEST_MODEL:
        return {"untried": f"its weights take {size / GIB:.1f} GiB"}
    model = _call_member("model()", job.model)
    if request.member == "model()":
        return {}
    small = min(FEW_SAMPLES, request.micro_batch)
    try:
        _run_step(job, model, small, request.member)
    except JobFailed:
        # Some jobs have a smallest batch.
        if request.micro_batch == small:
            raise
        _run_step(job, model, request.micro_batch, request.member)
    if request.member == "batch()":
        # A batch may fail only at the requested size.
        _call_member(f"batch({request.micro_batch})", job.batch, request.micro_batch)
        if has_longest(job):
            _call_member(f"longest({request.micro_batch})", job.longest, request.micro_batch)
    return {}


def _run_step(job: Any, model: Any, size: int, member: str) -> None:
    import torch

    batches = [_call_member(f"batch({size})", job.batch, size)]
    if has_longest(job):
        batches.append(_call_member(f"longest({size})", job.longest, size))
    if member == "batch()":
        return
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    losses = _call_member("optimizers()", collect_losses, job, named)
    for batch, (name, compute) in itertools.product(batches, losses):
        loss = _call_member(name, compute, model, batch)
        if loss.dim() == 0 and loss.requires_grad:
            _call_member(name, loss.backward)
    if callable(getattr(job, "after_step", None)):
        _call_member("after_step()", torch.no_grad()(job.after_step), model)


def _call_member(member: str, function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        cure = f"Fix {member}: it fails on the CPU too, on a small input and without trimtab's tracing."
        raise job_error(member, error, cure) from error


def _weights_bytes(job: Any) -> int:
    """Return the bytes of the model's weights; 0 if the model cannot be built on the meta device."""
    import torch

    try:
        with torch.device("meta"):
            model = job.model()
        return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    except Exception:  # noqa: BLE001 - a model that reads its own weights cannot be built on meta
        return 0


def _answer_request(text: str, say: SendAnswer) -> None:
    warnings.simplefilter("ignore")
    # End with the parent process, and limit the CPU time.
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_CPU, (2 * int(TIMEOUT_S), 2 * int(TIMEOUT_S)))
    say(msgspec.json.encode(run_small_step(CpuCheck.from_json(text))))


if __name__ == "__main__":
    serve(_answer_request)
