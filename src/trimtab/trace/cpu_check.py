"""Runs one small step of a job for real on the CPU, to find out whether its own code is at fault.

When tracing fails, either the job is wrong or trimtab cannot follow it. A process of its own, with no
pretended device, loads the job, builds the model and runs loss() and backward() on two samples. It has a
limit of time and memory; a model that is too large for this machine is not tried.
"""

from __future__ import annotations

import resource
import warnings
from typing import Any, NamedTuple

import msgspec

from trimtab.errors import CannotFollow, JobFailed, TrimtabError
from trimtab.jobs.load import failed, load
from trimtab.spec import Noun
from trimtab.trace.child_process import end_with_parent
from trimtab.trace.server import Say, ask_all, serve
from trimtab.units import GIB

TIMEOUT_S = 60.0
FEW_SAMPLES = 2
LARGEST_MODEL = GIB
"""Weights of more bytes are not built for this: gradients and activations come on top."""
MEMBERS = ("load", "model()", "batch()", "loss()")
"""How far a rehearsal goes, in order."""
NO_GPU = ("NVIDIA driver", "CUDA enabled", "CUDA devices are available", "CUDA_HOME", "CUDA is not available")
"""Words of errors that only say that there is no GPU here."""


class CpuCheck(Noun, frozen=True, kw_only=True):
    """A job to run, and how far."""

    job: str
    overrides: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies an empty dict given as a default
    micro_batch: int = FEW_SAMPLES
    member: str = "loss()"
    """One of MEMBERS: the last that is run."""


class CpuCheckResult(NamedTuple):
    """What a rehearsal showed."""

    failure: TrimtabError | None = None
    """What the job raised by itself."""
    untried: str = ""
    """Why it was not tried; empty where it ran."""


def check_on_cpu(request: CpuCheck, *, timeout_s: float = TIMEOUT_S) -> CpuCheckResult:
    """Run the job in a process of its own."""
    try:
        (answer, *_) = ask_all(
            "trimtab.trace.cpu_check", request, {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=timeout_s, watch=True
        )
    except TrimtabError as error:
        # Too slow, too large, or the process was killed: that says nothing about the job.
        return CpuCheckResult(untried=error.found)
    if isinstance(answer, TrimtabError):
        if any(words in answer.found for words in NO_GPU):
            return CpuCheckResult(untried="it asks for a GPU, and there is none here")
        return CpuCheckResult(failure=answer)
    return CpuCheckResult(untried=answer.get("untried", ""))


def judged(error: CannotFollow, outcome: CpuCheckResult) -> TrimtabError:
    """The error of a trace, blaming the job only where the job failed by itself."""
    if outcome.failure is not None:
        return outcome.failure
    if outcome.untried:
        said = f"Whether the job runs by itself was not tried: {outcome.untried}."
    else:
        said = "The job itself is fine: it runs on a small input on the CPU."
    return CannotFollow(error.given, found=error.found, cure=f"{said} {error.cure}")


def run(request: CpuCheck) -> dict[str, str]:
    """Run a small step in this process; raises JobFailed where the job does."""
    import torch

    try:
        job = load(request.job, request.overrides)
    except TrimtabError as error:
        if request.member == "load":
            raise
        # It was loaded before, with the pretended device.
        return {"untried": f"without a GPU it does not load ({error.found})"}
    if request.member == "load":
        return {}
    torch.manual_seed(0)
    size = _weights_bytes(job)
    if size > LARGEST_MODEL:
        return {"untried": f"its weights take {size / GIB:.1f} GiB"}
    model = _called("model()", job.model)
    if request.member == "model()":
        return {}
    small = min(FEW_SAMPLES, request.micro_batch)
    try:
        _step(job, model, small, request.member)
    except JobFailed:
        # Some jobs have a smallest batch.
        if request.micro_batch == small:
            raise
        _step(job, model, request.micro_batch, request.member)
    if request.member == "batch()":
        # A batch may fail at the size that was asked for alone.
        _called(f"batch({request.micro_batch})", job.batch, request.micro_batch)
    return {}


def _step(job: Any, model: Any, size: int, member: str) -> None:
    batch = _called(f"batch({size})", job.batch, size)
    if member != "batch()":
        loss = _called("loss()", job.loss, model, batch)
        if loss.dim() == 0 and loss.requires_grad:
            _called("loss()", loss.backward)


def _called(member: str, function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except Exception as error:
        cure = f"Fix {member}: it fails on the CPU too, on a small input and without trimtab's tracing."
        raise failed(member, error, cure) from error


def _weights_bytes(job: Any) -> int:
    """Bytes of the model's weights; 0 where the model cannot be built without memory."""
    import torch

    try:
        with torch.device("meta"):
            model = job.model()
        return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    except Exception:  # noqa: BLE001 - a model that reads its own weights cannot be built on meta
        return 0


def _work(text: str, say: Say) -> None:
    warnings.simplefilter("ignore")
    # Whatever ends the process that asks ends this one too, and it never computes for longer than it may.
    end_with_parent()
    resource.setrlimit(resource.RLIMIT_CPU, (2 * int(TIMEOUT_S), 2 * int(TIMEOUT_S)))
    say(msgspec.json.encode(run(CpuCheck.from_json(text))))


if __name__ == "__main__":
    serve(_work)
