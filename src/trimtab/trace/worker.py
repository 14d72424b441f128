"""The child process that traces: requests come in on stdin, a line of JSON each; Traces or errors go out.

It pretends to have the target device, which cannot be undone, and runs the user's code: hence a process of
its own. What all settings of a job share, imports above all, is done once; each is traced in a fork.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from trimtab.errors import CannotFollow, JobFailed, TrimtabError
from trimtab.jobs.job import Job
from trimtab.jobs.load import cannot_follow, failed, load
from trimtab.spec import PARTS, Recompute, Setting, Trace
from trimtab.spec.trace import ENTER
from trimtab.strategies import one_micro_batch, strategy_of
from trimtab.strategies.base import ALIKE, RankKind
from trimtab.trace.block_growth import FEW, extended
from trimtab.trace.child_process import end_with_parent
from trimtab.trace.cpu_check import CpuCheck, check_on_cpu, judged
from trimtab.trace.forks import forked
from trimtab.trace.request import TraceRequest, TraceRequests
from trimtab.trace.server import (
    END,
    Say,
    decode_answer,
    encode_error,
    import_ahead,
    import_modules,
    imported_since,
    redirect_stdout,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.trace.cpu_check import CpuCheckResult
    from trimtab.trace.repeated_blocks import Repeated

STEPS = 3
"""The first step makes optimizer states and workspaces, the second has all of them, the third shows how the
allocator settles."""


WHOLE, FEWER, CHECKED = "whole", "fewer", "checked"
"""How a model of many equal blocks is traced: all of them; a few for all; that, and a forward pass of all of
them beside it."""


def seed_random_numbers() -> None:
    """Draw the same random numbers in every process: an estimate asked for twice has one answer."""
    import torch

    random.seed(0)
    torch.manual_seed(0)


def ready(requests: TraceRequests) -> Any:
    """Pretend to have the device and load the job; then import what every trace will need."""
    from trimtab.trace.fake_cuda import imitate

    imitate(requests.device)
    # Jobs that draw lengths or layers at random draw the same ones for every setting.
    seed_random_numbers()
    job = load(requests.job, requests.overrides)
    import_ahead(job)
    return job


def trace(  # noqa: PLR0913 - what to trace, and how
    job: Any,
    request: TraceRequest,
    deliver: Callable[[Trace, str], None],
    *,
    rank: RankKind = ALIKE,
    how: str = CHECKED,
    timeout_s: float = 600.0,
) -> None:
    """Run the first steps of a job on fake tensors, write down what they ask for, and deliver it.

    `how` says whether a few of its equal blocks may stand for all of them, and is delivered as it came out.
    """
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
        model = _model(job, request, recorder, rank.branch)
        built = _Built(job, model, request, recorder, rank)
        found = None
        # A stage has some of the blocks only: those are traced as they are.
        if how != WHOLE and rank.stage is None and not recorder.compiles and not request.setting.compile:
            found = _from_few(built, check=how == CHECKED, timeout_s=timeout_s)
        if found is not None:
            deliver(found, how)
        else:
            deliver(_whole(built), WHOLE)


class _Built(NamedTuple):
    """A model that was built, and all that is needed to trace its steps."""

    job: Any
    model: Any
    request: TraceRequest
    recorder: Any
    rank: RankKind


def _whole(built: _Built, *, forward: bool = False) -> Trace:
    """The trace of the model as it is now; with `forward`, of its first forward pass alone."""
    from trimtab.trace import fake_ops

    recorder = built.recorder
    counts = _steps(built, forward=forward)
    recorder.paused = True
    chosen = built.job.assumptions if isinstance(built.job, Job) else ()
    assumed = (*chosen, *recorder.kernels.assumptions, *fake_ops.assumptions(), *recorder.kernels.unfused)
    compiled = counts.pop("lost_compiled", {})
    assumed += tuple(f"under torch.compile {text}" for text in compiled)
    if not forward:
        counts["no_compile_gain"] = _no_compile_gain(recorder, compiled)
    return Trace(**_columns(recorder), **counts, assumptions=assumed)


def _no_compile_gain(recorder: Any, unfused: dict[str, None]) -> str:
    """Why torch.compile would not make this step faster, as far as an eager trace shows."""
    if recorder.kernels.double_backward:
        return "the loss differentiates a gradient, which torch.compile does not support"
    calls = {work.op for work in recorder.works if work.kind == "call"}
    if calls and ENTER not in calls:
        return "loss() calls neither the model nor its methods or direct parts, so nothing is compiled"
    return "attention loses its fused kernel" if unfused else ""


def _from_few(built: _Built, *, check: bool, timeout_s: float) -> Trace | None:
    """The trace by those of the model with few of its equal blocks; None where it has to be traced whole.

    With `check` the same has to hold for a forward pass, of which the whole is traced as well: a job may do
    something at the tenth block that the first four do not show. For that the plainest setting will do.
    """
    from trimtab.trace.repeated_blocks import made, worth_cutting

    lists = worth_cutting(built.model)
    if not lists:
        return None
    given = f"job {built.request.job}"
    small = list(itertools.product((FEW, FEW + 1), repeat=len(lists)))

    def traced(built: _Built, sizes: list[tuple[int, ...]], *, forward: bool) -> list[Trace]:
        tasks = [_few(built, dict(zip(lists, size, strict=True)), forward=forward) for size in sizes]
        answers = dict(forked(tasks, given, timeout_s=timeout_s))
        return [Trace.from_json(answers[place]) for place in range(len(tasks))]

    try:
        if check:
            all_of_them = tuple(items.length for items in lists)
            *some, whole = traced(_plainly(built), [*small, all_of_them], forward=True)
            guess = _joined(some, lists)
            if guess is None or made(guess) != made(whole):
                return None
        return _joined(traced(built, small, forward=False), lists)
    except TrimtabError:
        # Whatever is wrong, the whole model will say it better, or not have it.
        return None


def _joined(some: list[Trace], lists: list[Repeated]) -> Trace | None:
    """The whole from small models: of each two neighbours, one has a block more of the last list."""
    if not lists:
        return some[0]
    *others, last = lists
    longer = [
        extended(few, more, blocks=last.name, known=FEW + 1, wanted=last.length)
        for few, more in zip(some[::2], some[1::2], strict=True)
    ]
    found = [one for one in longer if one is not None]
    return _joined(found, others) if len(found) == len(longer) else None


def _few(built: _Built, counts: dict[Repeated, int], *, forward: bool) -> Callable[[Say], None]:
    """Trace the model with the first blocks of its lists alone."""

    def task(say: Say) -> None:
        from trimtab.trace.repeated_blocks import cut

        # Those that were cut off are there all the same: they hold their memory.
        taken = [cut(key, count) for key, count in counts.items()]
        found = _whole(built, forward=forward)
        del taken
        say(msgspec.json.encode(found))

    return task


def _plainly(built: _Built) -> _Built:
    """The same model on one device, nothing recomputed."""
    setting = built.request.setting.replace(recompute=Recompute.NONE)
    if not built.rank.branch:
        setting = one_micro_batch(setting)
    return built._replace(request=built.request.replace(setting=setting))


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


def _model(job: Any, request: TraceRequest, recorder: Any, branch: str) -> Any:
    """The job's model on the pretended device."""
    from trimtab.engine import step as steps
    from trimtab.trace.fake_cuda import hide_tracing

    recorder.mark("build", "weights")
    dropped: list[Any] = []
    with _blaming("model()"):
        model = steps.build(job, request.setting, branch=branch, dropped=dropped)
    if {parameter.device.type for parameter in (*model.parameters(), *model.buffers())} == {"cpu", "cuda"}:
        # torch.Tensor(size) and the like ignore the default device; a trainer moves the model as a whole.
        model.to("cuda")
    if dropped:
        recorder.forget(dropped)
    # Only now are all libraries loaded that the model is made of.
    hide_tracing()
    return model


def _steps(built: _Built, *, forward: bool) -> dict[str, Any]:
    from trimtab.engine import step as steps

    job, model, request, recorder, rank = built
    setting = request.setting
    with _blaming("model()"):
        state = steps.assemble(job, model, setting, branch=rank.branch, stage=rank.stage)
    if state.stage is not None:
        # They are built on the host, and never come to this device.
        recorder.forget(state.stage.dropped)
        state.stage.dropped.clear()
    names = _watch_gradients(state, recorder)
    if not recorder.compiles:
        # Compiled code is no longer divided into modules, and hooks would be compiled with it.
        recorder.name_modules(state.model, state.entries)
    recorder.mark("batch", "inputs")
    seed_random_numbers()
    with _blaming(f"batch({setting.micro_batch})"):
        batch = steps.make_batch(job, setting, "cuda")
    if forward:
        recorder.mark("step0", "activations")
        with _blaming("loss()"):
            steps.forward(state, batch)
        return {}
    if not recorder.compiles:
        _note_questions(recorder.kernels)
        _note_double_backward(recorder.kernels)
    kept: list[int] = []
    for number in range(STEPS):
        if number == STEPS - 1:
            # Compiled code is still being tuned when others have settled.
            if not recorder.compiles and recorder.repeat("step0", "step1", "step2"):
                break
            recorder.forget_works()
        recorder.mark(f"step{number}", "activations")
        recorder.working = number > 0
        with _blaming("loss()"):
            steps.step(state, [batch], clip=request.clip, between=lambda: kept.append(recorder.live()))
        _label(state, recorder, names)
    recorder.mark("end", "activations")
    recorder.working = False
    lost_compiled = _lost_by_compiling(state, batch, recorder)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in state.model.parameters()]
    return {
        "parameters": sum(count for count, _ in sizes),
        "trainable": sum(count for count, learns in sizes if learns),
        "recomputed": state.recomputed,
        "part": rank.number,
        "rank": rank.words,
        "lost_compiled": lost_compiled,
        **(
            {}
            if state.stage is None
            else {
                "kept_bytes": kept[1],
                "handed_bytes": state.stage.handed_bytes,
                "shared": state.stage.shared,
            }
        ),
    }


def _watch_gradients(state: Any, recorder: Any) -> dict[int, str]:
    """Note what gradients are kept in, and where they come and go; return the names of parameters by id."""
    from trimtab.engine.gradients import OwnGradients

    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    if isinstance(state.gradients, OwnGradients):
        for parameter in state.parameters:
            recorder.watch_gradient(parameter, names[id(parameter)])
    else:
        for held in state.gradients.gradients():
            recorder.relabel(held, "gradients")
    return names


def _note_double_backward(kernels: Any) -> None:
    """Note from now on whether a gradient is computed in a way that it can be differentiated again."""
    import torch

    def noting(whole: Callable[..., Any], place: int) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            create_graph = kwargs.get("create_graph", args[place] if len(args) > place else False)
            kernels.double_backward = kernels.double_backward or bool(create_graph)
            return whole(*args, **kwargs)

        return called

    torch.autograd.grad = noting(torch.autograd.grad, 4)
    torch.autograd.backward = noting(torch.autograd.backward, 3)


def _note_questions(kernels: Any) -> None:
    """Note from now on whether code outside of torch asks if it is being compiled."""
    import sys

    import torch

    whole = torch.compiler.is_compiling

    def is_compiling() -> bool:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            kernels.asked_compiling = True
        return whole()

    torch.compiler.is_compiling = is_compiling


def _lost_by_compiling(state: Any, batch: Any, recorder: Any) -> dict[str, None]:
    """Why attention would not be fused in compiled code, where it is in eager code.

    Libraries ask torch whether they are being compiled, and build other masks then. One more forward pass in
    which torch says so shows it. The compiler itself would take a minute.
    """
    import torch

    from trimtab.engine import step as steps

    before = recorder.kernels.unfused
    if recorder.compiles or not (recorder.kernels.attended and recorder.kernels.asked_compiling):
        return {}
    found: dict[str, None] = {}
    recorder.kernels.unfused = found
    asked, torch.compiler.is_compiling = torch.compiler.is_compiling, lambda: True
    try:
        with recorder.unnoticed():
            steps.forward(state, batch)
    except Exception:  # noqa: BLE001 - code that only a compiler can run says nothing
        found.clear()
    finally:
        torch.compiler.is_compiling = asked
        recorder.kernels.unfused = before
    return {text: None for text in found if text not in before}


def _label(state: Any, recorder: Any, names: dict[int, str]) -> None:
    """Say which tensors are gradients, of which parameter, and which are optimizer state."""
    import torch

    def local(tensor: Any) -> Any:
        return getattr(tensor, "_local_tensor", tensor)

    for parameter in state.parameters:
        if parameter.grad is not None:
            recorder.relabel(local(parameter.grad), "gradients", names.get(id(parameter)))
    for held in state.optimizer.state.values():
        for value in held.values():
            if isinstance(value, torch.Tensor):
                recorder.relabel(local(value), "optimizer")


@contextlib.contextmanager
def _blaming(member: str) -> Any:
    """Name the operation that could not be traced; whether the job is at fault is found out later."""
    try:
        yield
    except TrimtabError:
        raise
    except Exception as error:
        # The compiler wraps what went wrong into an error of its own.
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, ImportError):
            raise failed(member, inner, "Install what the job needs on this machine too.") from error
        if REFUSES_AUTOCAST in str(inner):
            cure = "Use --precision tf32 or fp32, or a loss of logits, which autocast allows."
            raise failed(member, inner, cure) from error
        if inner is not error:
            cure = "Leave compiling out; if it works on a GPU, this is a bug in trimtab: please report it."
            raise cannot_follow(f"torch.compile in {member}", inner, cure) from error
        cure = (
            "Write that part with other operations, or measure the job on a GPU with `trimtab profile`. "
            "Please report it, with the operation."
        )
        raise cannot_follow(member, inner, cure) from error


REFUSES_AUTOCAST = "unsafe to autocast"
"""What torch says of a loss that may not run in half precision."""


def _columns(recorder: Any) -> dict[str, Any]:
    names: dict[str, int] = {}
    ops: dict[str, int] = {}
    return {
        # What goes when all is over is nobody's business.
        "order": tuple(recorder.order[: recorder.marks.get("end")]),
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
    """The part of an answer that matters for other copies of this process."""

    imported: list[str] = []
    how: str = ""
    """Whether a few blocks stood for all."""


class _Part(NamedTuple):
    """What one copy of this process traces: a request, as a rank of some kind sees it."""

    number: int
    """Which of the requests."""
    request: TraceRequest
    rank: RankKind


class Sure:
    """What is known of a job's blocks."""

    few: bool | None = None
    """Whether a few of them stand for all; None while nobody has checked."""
    outcome: CpuCheckResult | None = None
    """What the job did when it was run by itself; None while nobody has tried."""


def _stay() -> None:
    """Answer requests about one job, a line each, until there are no more."""
    end_with_parent()
    warnings.simplefilter("ignore")
    answer, job, sure = redirect_stdout(), None, Sure()
    for line in sys.stdin.buffer:
        requests = TraceRequests.from_json(line)
        try:
            job = ready(requests) if job is None else job
            said = _answers(job, requests, sure)
        except TrimtabError as error:
            said = encode_error(_blamed_at_import(error, requests))
        answer.write(said + END)
        answer.flush()
    os._exit(0)


def _answers(job: Any, requests: TraceRequests, sure: Sure) -> bytes:
    """A line for each request; none where it was only to be made ready."""
    if not requests.settings:
        return b""
    sure.few = False if requests.whole else sure.few
    parts = [
        _Part(number, one, rank) for number, one in enumerate(requests.each()) for rank in _ranks(job, one)
    ]
    lines: dict[int, dict[RankKind, bytes]] = {}
    for part, answer in zip(parts, _traced(job, requests, parts, sure), strict=True):
        lines.setdefault(part.number, {})[part.rank] = _judged(answer, part.request, sure)
    return b"\n".join(map(_together, lines.values()))


def _judged(answer: bytes, request: TraceRequest, sure: Sure) -> bytes:
    """The answer; where tracing failed, the job is run by itself to find out whose fault it is."""
    if not answer.startswith(b'{"error"'):
        return answer
    error = decode_answer(answer)
    if not isinstance(error, CannotFollow):
        return answer
    small = CpuCheck(job=request.job, overrides=request.overrides, micro_batch=request.setting.micro_batch)
    if error.given.startswith("batch("):
        # It may fail at this size alone.
        return encode_error(judged(error, check_on_cpu(small.replace(member="batch()"))))
    if sure.outcome is None:
        sure.outcome = check_on_cpu(small)
    return encode_error(judged(error, sure.outcome))


def _blamed_at_import(error: TrimtabError, requests: TraceRequests) -> TrimtabError:
    """The error of loading a job: ours, where the job can be loaded without the pretended device."""
    if type(error) is not JobFailed:
        return error
    outcome = check_on_cpu(CpuCheck(job=requests.job, overrides=requests.overrides, member="load"))
    if outcome.failure is not None or outcome.untried:
        return outcome.failure or error
    cure = (
        "Without the GPU that trimtab pretends to have, it loads. Ask for CUDA inside model(), not at import."
    )
    return CannotFollow(error.given, found=error.found, cure=cure)


def _traced(job: Any, requests: TraceRequests, parts: list[_Part], sure: Sure) -> list[bytes]:
    """The answer to each part; those that few blocks gave are taken back if the check comes out otherwise."""
    ways = [WHOLE if sure.few is False else FEWER] * len(parts)
    if sure.few is None:
        ways[0] = CHECKED
    answers = _told(job, requests, list(zip(parts, ways, strict=True)))
    came = [msgspec.json.decode(answer, type=_Learnt).how for answer in answers]
    if ways[0] == CHECKED and came[0]:
        sure.few = came[0] == CHECKED
    doubtful = [place for place, how in enumerate(came) if how == FEWER]
    if sure.few or not doubtful:
        return answers
    again = _told(job, requests, [(parts[place], WHOLE) for place in doubtful])
    for place, answer in zip(doubtful, again, strict=True):
        answers[place] = answer
    return answers


def _told(job: Any, requests: TraceRequests, parts: list[tuple[_Part, str]]) -> list[bytes]:
    """What copies of this process say of each part, traced in the way asked for."""
    before = frozenset(sys.modules)

    def task(part: _Part, how: str) -> Callable[[Say], None]:
        def work(say: Say) -> None:
            def tell(found: Trace, came: str) -> None:
                say(msgspec.json.encode({"trace": found, "imported": imported_since(before), "how": came}))

            trace(job, part.request, tell, rank=part.rank, how=how, timeout_s=requests.timeout_s)

        return work

    def learn(answer: bytes) -> None:
        import_modules(msgspec.json.decode(answer, type=_Learnt).imported)

    tasks = [task(*part) for part in parts]
    given = f"job {requests.job}"
    answers = dict(forked(tasks, given, timeout_s=requests.timeout_s, learn=learn))
    return [answers[place] for place in range(len(parts))]


def _ranks(job: Any, request: TraceRequest) -> list[RankKind]:
    """The kinds of ranks of a setting, which differ in what they hold."""
    strategy = strategy_of(request.setting)
    branches: list[str] = []
    if strategy.needs_branches:
        from trimtab.engine.branches import branches_of

        branches = list(branches_of(job))
    return strategy.rank_kinds(request.setting.mesh, branches)


def _together(answers: dict[RankKind, bytes]) -> bytes:
    """The trace of the first kind of ranks with the others beside it, or the first error."""
    if len(answers) == 1:
        return next(iter(answers.values()))
    said = [msgspec.json.decode(line) for line in answers.values()]
    for line, one in zip(answers.values(), said, strict=True):
        if "error" in one:
            return line
    first, *others = [one["trace"] for one in said]
    return msgspec.json.encode({"trace": {**first, "beside": others}})


if __name__ == "__main__":
    _stay()
