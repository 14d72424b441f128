"""The child process that traces: a request comes in on stdin as JSON, a Trace or an error goes out on stdout.

It pretends to have the target device, which cannot be undone, and runs the user's code: hence a process of
its own.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

from trimtab.jobs.load import failed, load
from trimtab.spec import PARTS, Device, Noun, Setting, Trace
from trimtab.trace.child import Say, serve

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 3
"""The first step makes optimizer states and workspaces, the second has all of them, the third shows how the
allocator settles."""


class Request(Noun, frozen=True, kw_only=True):
    """What to trace."""

    job: str
    overrides: dict[str, Any] = {}
    """Attributes of the job to set before it is used."""
    setting: Setting
    device: Device
    clip: float | None = None


def trace(request: Request, deliver: Callable[[Trace], None]) -> None:
    """Run the first steps of a job on fake tensors, write down what they ask for, and deliver it."""
    from trimtab.trace.imitate import imitate

    imitate(request.device)
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from trimtab.trace.compiled import watch
    from trimtab.trace.kernels import Kernels
    from trimtab.trace.recorder import Recorder

    if request.setting.gpus > 1:
        _join_fake_group(request.setting)
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(Kernels(request.device), fake_mode)
    watch(recorder)
    job = load(request.job)
    for name, value in request.overrides.items():
        setattr(job, name, value)
    with fake_mode, recorder:
        # Constants are made on the host and lifted, never copied to a device that is not there.
        torch._C._set_only_lift_cpu_tensors(True)
        counts = _steps(job, request, recorder)
        recorder.paused = True
        deliver(Trace(**_columns(recorder), **counts, assumptions=tuple(recorder.kernels.assumptions)))


def _join_fake_group(setting: Setting) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.gpus)


def _steps(job: Any, request: Request, recorder: Any) -> dict[str, Any]:
    from trimtab.trace import step as steps
    from trimtab.trace.imitate import hide_tracing

    setting = request.setting
    recorder.mark("build", "weights")
    with _blaming("model()"):
        state = steps.prepare(job, setting)
    # Only now are all libraries loaded that the model is made of.
    hide_tracing()
    for bucket in state.buckets:
        recorder.relabel(bucket, "communication")
    if not recorder.compiles:
        # Compiled code is no longer divided into modules, and hooks would be compiled with it.
        recorder.name_modules(state.model)
    recorder.mark("batch", "inputs")
    with _blaming(f"batch({setting.micro_batch})"):
        batch = steps.make_batch(job, setting, "cuda")
    for number in range(STEPS):
        recorder.mark(f"step{number}", "activations")
        recorder.working = number == STEPS - 1
        with _blaming("loss()"):
            steps.step(state, batch, clip=request.clip)
        _label(state, recorder)
    recorder.mark("end", "activations")
    recorder.working = False
    sizes = [(one.numel(), one.requires_grad) for one in state.model.parameters()]
    return {
        "parameters": sum(count for count, _ in sizes),
        "trainable": sum(count for count, learns in sizes if learns),
        "recomputed": state.recomputed,
    }


def _label(state: Any, recorder: Any) -> None:
    """Say which tensors are gradients and which are optimizer state, now that they are there."""
    import torch

    def local(tensor: Any) -> Any:
        return getattr(tensor, "_local_tensor", tensor)

    for parameter in state.parameters:
        if parameter.grad is not None:
            recorder.relabel(local(parameter.grad), "gradients")
    for held in state.optimizer.state.values():
        for value in held.values():
            if isinstance(value, torch.Tensor):
                recorder.relabel(local(value), "optimizer")


@contextlib.contextmanager
def _blaming(member: str) -> Any:
    """Whatever the user's code raises is the user's, and names the member it came from."""
    try:
        yield
    except Exception as error:
        # The compiler wraps what went wrong into an error of its own.
        inner = getattr(error, "inner_exception", error)
        if inner is not error:
            cure = "Leave compiling out; if it works on a GPU, this is a bug in trimtab: please report it."
            raise failed(f"torch.compile in {member}", inner, cure) from error
        cure = f"Mend {member}; run the job on a small input to see the whole traceback."
        raise failed(member, error, cure) from error


def _columns(recorder: Any) -> dict[str, Any]:
    names: dict[str, int] = {}
    ops: dict[str, int] = {}
    return {
        "order": tuple(recorder.order),
        "sizes": tuple(recorder.sizes),
        "streams": tuple(recorder.streams),
        "parts": tuple(PARTS.index(part) for part in recorder.parts),
        "modules": tuple(names.setdefault(name, len(names)) for name in recorder.modules),
        "ops": tuple(ops.setdefault(name, len(ops)) for name in recorder.ops),
        "module_names": tuple(names),
        "op_names": tuple(ops),
        "marks": dict(recorder.marks),
        "works": tuple(recorder.works),
        "sequence": tuple(recorder.sequence),
        "phases": recorder.phases(),
        "recomputed_flops": recorder.recomputed_flops,
    }


def _work(text: str, say: Say) -> None:
    warnings.simplefilter("ignore")
    trace(Request.from_json(text), lambda found: say({"trace": found.to_builtins()}))


if __name__ == "__main__":
    serve(_work)
