"""The child process that traces: requests come in on stdin as JSON, Traces or errors go out on stdout.

It pretends to have the target device, which cannot be undone, and runs the user's code: hence a process of
its own. What all settings of a job share, imports above all, is done once; each is traced in a fork.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.jobs.job import Job
from trimtab.jobs.load import failed, load
from trimtab.spec import PARTS, Device, Noun, Setting, Strategy, Trace
from trimtab.trace.ahead import import_ahead, import_as_well, imported_since
from trimtab.trace.child import Say, serve
from trimtab.trace.forks import forked

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 3
"""The first step makes optimizer states and workspaces, the second has all of them, the third shows how the
allocator settles."""


class Request(Noun, frozen=True, kw_only=True):
    """What to trace."""

    job: str
    overrides: dict[str, Any] = {}
    """Options of the job, set before it is used; unknown ones are an error."""
    setting: Setting
    device: Device
    clip: float | None = None


class Requests(Noun, frozen=True, kw_only=True):
    """Settings of one job to trace for one device."""

    job: str
    overrides: dict[str, Any] = {}
    settings: tuple[Setting, ...]
    device: Device
    clip: float | None = None
    timeout_s: float = 600.0
    """For each of them."""

    def each(self) -> list[Request]:
        """The requests one by one."""
        return [
            Request(job=self.job, overrides=self.overrides, setting=one, device=self.device, clip=self.clip)
            for one in self.settings
        ]


def ready(requests: Requests) -> Any:
    """Pretend to have the device and load the job; then import what every trace will need."""
    from trimtab.trace.imitate import imitate

    imitate(requests.device)
    # Jobs that draw lengths or layers at random draw the same ones for every setting.
    random.seed(0)
    job = load(requests.job, requests.overrides)
    import_ahead(job)
    return job


def trace(job: Any, request: Request, deliver: Callable[[Trace], None], *, branch: str = "") -> None:
    """Run the first steps of a job on fake tensors, write down what they ask for, and deliver it."""
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
    if _may_compile(job):
        # Again, now that torch.compile is watched: a file may call it while it is loaded.
        job = load(request.job, request.overrides)
    with fake_mode, recorder:
        # Constants are made on the host and lifted, never copied to a device that is not there.
        torch._C._set_only_lift_cpu_tensors(True)
        counts = _steps(job, request, recorder, branch)
        recorder.paused = True
        chosen = job.assumptions if isinstance(job, Job) else ()
        assumed = (*chosen, *recorder.kernels.assumptions)
        deliver(Trace(**_columns(recorder), **counts, assumptions=assumed))


def _may_compile(job: Any) -> bool:
    """Whether the file that a job comes from speaks of compiling."""
    file = getattr(sys.modules.get(type(job).__module__), "__file__", None)
    try:
        return file is None or "compile" in Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True


def _join_fake_group(setting: Setting) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.gpus)


def _steps(job: Any, request: Request, recorder: Any, branch: str) -> dict[str, Any]:
    from trimtab.trace import step as steps
    from trimtab.trace.imitate import hide_tracing

    setting = request.setting
    recorder.mark("build", "weights")
    with _blaming("model()"):
        dropped: list[Any] = []
        state = steps.prepare(job, setting, branch=branch, dropped=dropped)
    if dropped:
        recorder.forget(dropped)
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
        **_causes(recorder),
        "works": tuple(recorder.works),
        "sequence": tuple(recorder.sequence),
        "phases": recorder.phases(),
        "recomputed_flops": recorder.recomputed_flops,
    }


def _causes(recorder: Any) -> dict[str, Any]:
    places: dict[Any, int] = {}
    caused = tuple(
        (number, places.setdefault(cause, len(places))) for number, cause in recorder.causes.items()
    )
    return {"causes": tuple(places), "caused": caused}


class _Learnt(msgspec.Struct):
    """The part of an answer that helps the next fork."""

    imported: list[str] = []


def _work(text: str, say: Say) -> None:
    warnings.simplefilter("ignore")
    requests = Requests.from_json(text)
    job = ready(requests)
    before = frozenset(sys.modules)

    def task(request: Request, branch: str) -> Callable[[Say], None]:
        def tell(say: Say, found: Trace) -> None:
            say(msgspec.json.encode({"trace": found, "imported": imported_since(before)}))

        return lambda say: trace(job, request, functools.partial(tell, say), branch=branch)

    def learn(answer: bytes) -> None:
        import_as_well(msgspec.json.decode(answer, type=_Learnt).imported)

    parts = [
        (number, one, branch) for number, one in enumerate(requests.each()) for branch in _ranks(job, one)
    ]
    tasks = [task(one, branch) for _, one, branch in parts]
    answers = dict(forked(tasks, f"job {requests.job}", timeout_s=requests.timeout_s, learn=learn))
    lines: dict[int, dict[str, bytes]] = {}
    for place, (number, _, branch) in enumerate(parts):
        lines.setdefault(number, {})[branch] = answers[place]
    say(b"\n".join(map(_fullest, lines.values())))


def _ranks(job: Any, request: Request) -> list[str]:
    """The kinds of ranks of a setting, which differ in what they hold: one a branch."""
    strategy = request.setting.strategy
    if strategy not in (Strategy.BRANCH, Strategy.HYBRID):
        return [""]
    from trimtab.trace.branches import branches_of

    return list(branches_of(job))


def _fullest(answers: dict[str, bytes]) -> bytes:
    """The trace of the rank that holds most, which it says, or the first error."""
    if len(answers) == 1:
        return next(iter(answers.values()))
    heard = {branch: msgspec.json.decode(line) for branch, line in answers.items()}
    wrong = [branch for branch, one in heard.items() if "error" in one]
    if wrong:
        return answers[wrong[0]]
    traces = {branch: one["trace"] for branch, one in heard.items()}
    most = max(traces, key=lambda branch: _peak(traces[branch]))
    others = ", ".join(branch for branch in traces if branch != most)
    said = f"the ranks of branch {most} hold most and are the ones estimated; those of {others} hold less"
    traces[most]["assumptions"].append(said)
    return msgspec.json.encode({"trace": traces[most]})


def _peak(found: dict[str, Any]) -> int:
    """The most that is allocated at any time of the steps."""
    alive = most = 0
    for position, number in enumerate(found["order"]):
        alive += found["sizes"][number] if number >= 0 else -found["sizes"][~number]
        if position >= found["marks"]["step0"]:
            most = max(most, alive)
    return most


if __name__ == "__main__":
    serve(_work)
