"""Watch a script train: where its steps begin and end, what it uses, and when it has shown enough.

A step ends when the optimizer that stepped first has stepped again. If hooks call optimizers in the backward
pass, it ends with that pass. Between two steps there may be several
backward passes. If they repeat the same work, they are the micro-batches of gradient accumulation: after
two of them the others are skipped, because they need the same memory and the same time.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.engine.quantize import count_weights
from trimtab.jobs.library_files import is_library_file
from trimtab.scripts.inference_calls import InferenceCalls, forget_memory
from trimtab.spec import PARTS, ScriptFact, Trace
from trimtab.trace.recorder import CALL_WORK, ENTER_WORK, LEAVE_WORK, OWN_FOLDER, UPDATE_WORK
from trimtab.trace.repeated_steps import repeat_step

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from trimtab.scripts.recorder import ScriptRecorder

STEPS = 3
"""The first step creates optimizer states and workspaces, the second has all of them, the third is steady."""
EXTRA_STEPS = 2
"""Steps that a script may take after the third, with batches that it had loaded ahead, before it is ended."""
AFTER_S = 45.0
"""How long a script may go on after its third step: for its evaluation and its checkpoint."""
WAIT_STEPS, WAIT_S = 12, 30.0
"""Further steps, and the time for them, that may pass until every optimizer has stepped."""
LAST_EPOCHS, LAST_EPOCHS_S = 8, 10.0
"""Further epochs of one batch that a script may begin after its third step, and the time for that."""
EMPTY_PASSES = 1_000
"""Passes over a loader without a batch, before the first step, after which the script is ended."""
REPORT_S = 20.0
"""How often to show that backward passes go on without an optimizer step."""
LOW_BIT_PACKAGES = ("bitsandbytes", "torchao")
"""Packages whose optimizers store states in few bits; some have the names of torch's classes."""
TRAINS = "_trimtab_trains"
"""Attribute of a loader whose batches are trained on."""
IDLE_SHARE = 0.05
"""Share of parameters without a gradient that is worth a note."""
UNUSED_CALLS = 3
"""Calls in evaluation mode with a graph that are followed if the script drops their results."""
EDGE_ROWS = 2
"""Rows of a tensor with the edges of a graph: where they begin and where they end."""
FIRST, STEADY, EVALUATION, SAVE = "first step", "steady step", "evaluation", "save"


def put(owner: Any, name: str, value: Any) -> None:
    """Replace an attribute of a module or class."""
    setattr(owner, name, value)


def find_script_line() -> str:
    """Return the file and line of the script that is running: the innermost frame outside of packages.

    If there is none, because a package runs the loop, it is the outermost call into that package.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_script_file(file):
            return f"{_short_path(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@functools.lru_cache(maxsize=4096)
def is_script_file(file: str) -> bool:
    """Return whether a file of Python code is the user's: not of trimtab, nor of a package or of Python."""
    return not file.startswith(("<", OWN_FOLDER)) and not is_library_file(file)


@functools.lru_cache(maxsize=256)
def _short_path(file: str) -> str:
    """Return a path from this folder on, else from the folder that Python imports it from."""
    path = Path(file)
    folders = [Path.cwd(), *sorted(map(Path, filter(None, sys.path)), key=lambda folder: -len(folder.parts))]
    return str(next((path.relative_to(folder) for folder in folders if path.is_relative_to(folder)), path))


@dataclass(frozen=True)
class MicroBatchWork:
    """The work of one backward pass and the forward pass before it."""

    begin: int
    end: int
    update: int
    """Work between `begin` and here belongs to an optimizer that stepped before this micro-batch."""
    part: int
    """Micro-batches with the same number have no change of the weights between them."""
    calls: tuple[Any, ...]
    """The calls of models in it, with their inputs."""
    forward: int
    """Hash of the work of its forward pass."""
    skipped: bool

    def repeats(self, other: MicroBatchWork) -> bool:
        """Return whether it does the same work; a first backward pass adds to no earlier gradients."""
        return self.calls == other.calls and self.forward == other.forward

    @property
    def outline(self) -> tuple[Any, ...]:
        """The called models and the kinds of their inputs, without sizes."""
        return tuple(
            (module, tuple((len(leaf[0]), leaf[1]) for leaf in inputs if isinstance(leaf, tuple)))
            for module, inputs in self.calls
        )


@dataclass(eq=False)
class CallSizes:
    """The sizes of a training call's inputs."""

    samples: int | None = None
    length: int | None = None


@dataclass
class UnusedCalls:
    """Calls of a model in evaluation mode with a graph and equal inputs, which no backward pass has used."""

    count: float = 0
    outputs: Any = None
    """Without memory, as in CachedCall."""
    work: tuple[list[int], list[bool]] = ([], [])
    graph: Any = None
    """Weak reference to what the graph of the last call holds."""

    def can_repeat(self) -> bool:
        """Return whether the next call need not be followed: the script dropped the graphs of the others."""
        return self.count >= UNUSED_CALLS and self.graph() is None


@dataclass
class PhaseWindow:
    """A part of the recorded events that belongs to one phase."""

    name: str
    begin: int
    end: int = -1


@dataclass
class CachedCall:
    """The last training call of a module with the same inputs."""

    signature: Any
    outputs: Any


class _SkippedBackward(torch.autograd.Function):
    """Return an output whose backward pass ends here: the skipped micro-batch adds to existing gradients.

    After the third step there may be none. Then it leaves some, because a loss scaler wants them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, like: torch.Tensor, trained: list[Any]) -> torch.Tensor:
        ctx.trained = trained
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        with torch.no_grad():
            for reference in ctx.trained:
                parameter = reference()
                if parameter is not None and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
        return None, None, None


@dataclass
class Observer:
    """Collects what a script does with the recorder's events."""

    recorder: ScriptRecorder
    finish: Callable[[], None]
    """Send the result and end the process; does not return."""
    facts: dict[str, ScriptFact] = field(default_factory=dict)
    roots: dict[int, Any] = field(default_factory=dict)
    """Models that the script calls itself, by id."""
    optimizers: dict[int, Any] = field(default_factory=dict)
    steps: int = 0
    windows: list[PhaseWindow] = field(default_factory=list)
    units: list[MicroBatchWork] = field(default_factory=list)
    accumulation: int = 1
    is_mean: bool = False
    """Whether the micro-batches of a step differ in size, and the one nearest to their mean is timed."""
    sequence: tuple[int, ...] = ()
    engine: tuple[bool, ...] = ()
    """The work of the last complete step: one micro-batch and the optimizer."""
    recomputed_flops: int = 0
    is_over: bool = False
    """Whether the third step is done: loaders end now, and only evaluation and saving are watched."""
    micro_batches: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    """Training calls by the first and by the second side of their first input."""
    unused_sizes: set[CallSizes] = field(default_factory=set)
    """Sizes of calls with a graph that no backward pass has used, or not yet."""
    passes: int = 0
    """Backward passes."""
    passes_of_step: int = 0
    """Backward passes in the last complete step."""
    fetched: dict[int, int] = field(default_factory=dict)
    """Batches that loaders gave during training, by their number of samples."""
    training_loader: Any = None
    """The first loader that gave batches for training."""
    loader_s: float = 0.0
    loader_batches: int = 0
    empty_passes: dict[str, int] = field(default_factory=dict)
    """How often a loader gave no batch at all, by what it loads and where."""
    last_loader: Any = None
    """The loader that gave the last batch."""
    _batch_begin: int = 0
    """Where the events after that batch begin."""
    notes: dict[str, None] = field(default_factory=dict)
    _first: int = 0
    """Id of the optimizer that stepped first."""
    _updated: Any = None
    """The optimizer that stepped first in the current backward pass; None if none did."""
    _depth: int = 0
    _names: dict[int, str] = field(default_factory=dict)
    _main: int = field(default_factory=threading.get_ident)
    _calls: dict[tuple[int, int], CachedCall] = field(default_factory=dict)
    _unused: dict[Any, UnusedCalls] = field(default_factory=dict)
    """Calls of models in evaluation mode with a graph, by model and inputs."""
    _call_number: int = 0
    _inputs: list[Any] = field(default_factory=list)
    """Models that were called with a graph in the current micro-batch, and their inputs."""
    _forward_begin: int = 0
    _forward_end: int = 0
    _over_at: float = 0.0
    _last_epochs: int = 0
    _extra_steps: int = 0
    _trained: list[Any] = field(default_factory=list)
    """Weak references to the parameters that had a gradient in the third step; empty before."""
    _is_skipped: bool = False
    """Whether a call of the current micro-batch was skipped."""
    _backward_depth: int = 0
    _has_backward: bool = False
    _has_outer_call: bool = False
    """Whether a model was called in the current micro-batch on inputs that need no gradient."""
    _is_inner: bool = False
    """Whether the coming backward pass ends at inputs of a later call, as of the chunks of a loss: the
    micro-batch goes on, and passes their gradients back through the earlier call."""
    _described: Any = None
    """The model of the last training call."""
    _line_of_call: str = ""
    """The script's line of the first training call."""
    compiled_graphs: int = 0
    """Graphs that torch's compiler compiled for the script."""
    saved_sizes: dict[str, int] = field(default_factory=dict)
    """Bytes that a file written with torch.save would have, by its path."""
    made_optimizers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """Optimizers of torch.optim that the script has made, and still has."""
    _step_counts: dict[int, int] = field(default_factory=dict)
    _stepped: set[int] = field(default_factory=set)
    """Optimizers that have stepped since the first one did."""
    _timed: set[int] = field(default_factory=set)
    """Optimizers that stepped in the last complete step."""
    _units_stepped: int = 0
    """Micro-batches of the current step before the last change of the weights."""
    _update_end: int = 0
    """Where the work of that change ends."""
    _with_gradient: set[int] = field(default_factory=set)
    """Ids of the parameters that had a gradient when their optimizer stepped."""
    _first_in_step: int | None = None
    """How many micro-batches there were when the running optimizer step began; None if none runs."""
    _waited: int = 0
    _waits_until: float = 0.0
    _reported_at: float = 0.0
    """When the backward passes without an optimizer step were last shown."""
    decoding: Any = None
    """Shortens the generation of texts: the Decoding of generation_patches."""
    run_waiting: Callable[[], None] | None = None
    """Run the first training process that the script has started and does not wait for."""
    has_optimizer: bool = False
    """Whether the script has made an optimizer of torch.optim."""
    inference: InferenceCalls = field(init=False)
    """Shortens what is called without gradients."""

    def __post_init__(self) -> None:
        self.inference = InferenceCalls(self.recorder, self.notes)

    def learn(self, name: str, value: Any, how: str = "", line: str | None = None) -> None:
        """Record a fact, how it was seen and at which line; what is seen first stays."""
        if name not in self.facts:
            where = ", ".join(filter(None, (how, find_script_line() if line is None else line)))
            self.facts[name] = ScriptFact(name=name, value=str(value), where=where)

    # Modules

    def call_module(self, call: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Run a module, or return what it returned before if the call only repeats others."""
        if threading.get_ident() != self._main or self.recorder.paused:
            return self._enter(call, module, args, kwargs)
        if self._depth:
            self.note_precision()
        if self._depth or self._backward_depth or not has_parameters(module):
            return self._enter(call, module, args, kwargs)
        self._begin_root(module)
        # Some scripts evaluate without torch.no_grad; their models are then in evaluation mode.
        # One that is not called for its own sake, but for gradients of its inputs, may be in it always.
        training = torch.is_grad_enabled() and (
            module.training or not self.is_over or any(map(_needs_gradient, tree_leaves((args, kwargs))))
        )
        if training and self._has_backward and not self.has_optimizer:
            # The script changes its parameters itself: what it did after the backward pass was its step.
            self._has_backward = False
            self.end_step(None)
        if not training and self.decoding is not None and self.decoding.is_decoding(kwargs):
            self._note_phase(training=False)
            run = functools.partial(self._enter, call, module, args, kwargs, root=True)
            return self.decoding.call(run, kwargs)
        if not training:
            self.check_time()
            run = functools.partial(self._call_without_graph, call, module, args, kwargs)
            return self.inference.call(run, module, (args, kwargs), step=self._find_step_of_call())
        if module.training:
            return self._call_root(call, module, args, kwargs)
        return self._call_in_evaluation_mode(call, module, args, kwargs)

    def _call_in_evaluation_mode(self, call: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Run a model in evaluation mode, or repeat a call if the graphs of others were dropped.

        Some scripts evaluate without torch.no_grad before they train, in thousands of calls.
        """
        recorder, passes, begin = self.recorder, self.passes, len(self.recorder.sequence)
        inputs = describe_inputs(args, kwargs)
        unused = self._unused.setdefault((id(module), is_trained(module), inputs), UnusedCalls())
        if unused.can_repeat():
            self.notes[
                f"a model is called in evaluation mode with a graph that nothing uses: {UNUSED_CALLS} calls "
                "with the same inputs were followed, and the others repeat their work"
            ] = None
            if recorder.records_work:
                recorder.sequence.extend(unused.work[0])
                recorder.by_engine.extend(unused.work[1])
            return self._repeat_outputs(module, unused.outputs, (args, kwargs))
        out = self._call_root(call, module, args, kwargs)

        def forget(_: Any) -> None:
            unused.count = -math.inf

        nodes = {tensor.grad_fn for tensor in find_tensors(out) if tensor.grad_fn is not None}
        for node in nodes:
            node.register_prehook(forget)
        if self.passes != passes or not nodes:
            forget(None)
        unused.count += 1
        unused.outputs, unused.graph = tree_map(forget_memory, out), weakref.ref(forget)
        unused.work = (recorder.sequence[begin:], recorder.by_engine[begin:])
        return out

    def _call_without_graph(self, call: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        self._note_phase(training=False)
        return self._enter(call, module, args, kwargs, root=True)

    def _find_step_of_call(self) -> int | None:
        """Return the step that a call without a graph belongs to; None if it evaluates.

        A teacher, or a reference model, gets the batches that are trained on. An evaluation has a loader of
        its own, which no backward pass has followed.
        """
        is_evaluation = self.last_loader is not None and not getattr(self.last_loader, TRAINS, False)
        return None if self.is_over or (self.steps and is_evaluation) else self.steps

    def _call_root(self, call: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Run a model that the script trains, unless the call repeats one before."""
        takes_gradients = wants_input_gradients(args, kwargs)
        self._is_inner |= takes_gradients and self._has_outer_call
        self._has_outer_call |= not takes_gradients
        key = (id(module), self._call_number)
        self._call_number += 1
        inputs = describe_inputs(args, kwargs)
        signature = (is_trained(module), inputs)
        if not self._inputs and self.recorder.has_written_weights:
            # Between two passes of a step, as sharpness-aware minimization does.
            self._note_changed_weights()
        self.recorder.watch_weights([])
        if not self._inputs:
            self._forward_begin = len(self.recorder.sequence)
        self._inputs.append((id(module), inputs))
        cached = self._calls.get(key)
        if cached is None or cached.signature != signature:
            cached = self._calls[key] = CachedCall(signature, None)
        elif self.can_skip() and not takes_gradients:
            self._is_skipped = True
            return self._repeat_outputs(module, cached.outputs, (args, kwargs))
        before, passes, begin = self._copy_noted(), self.passes, len(self.recorder.order)
        sizes = CallSizes()
        if not self._is_inner:
            self._described = module
            self.note_precision()
            sizes = find_sizes(args, kwargs)
        self._note_phase(training=True)
        cached.outputs = None
        out = self._enter(call, module, args, kwargs, root=True)
        is_on_cpu = len(self.recorder.order) == begin
        if self.passes == passes and (is_on_cpu or not may_need_gradients(out)):
            # A trial on the CPU, or a model that is frozen or turns gradients off itself: no training.
            self._restore_noted(before)
        else:
            self._count_when_used(out, sizes)
        cached.outputs = tree_map(forget_memory, out)
        return out

    def note_precision(self, *, is_last: bool = False) -> None:
        """Note the precision of the training call; where autocast is off, an inner call may turn it on."""
        if "precision" in self.facts or self._described is None:
            return
        self._line_of_call = self._line_of_call or find_script_line()
        if is_last or torch.is_autocast_enabled("cuda"):
            value, how = describe_precision(self._described)
            where = ", ".join(filter(None, (how, self._line_of_call)))
            self.facts["precision"] = ScriptFact(name="precision", value=value, where=where)

    def _copy_noted(self) -> tuple[Any, ...]:
        """Return what a training call may change of what is noted."""
        return self._described, self._line_of_call, self.facts.get("precision")

    def _restore_noted(self, before: tuple[Any, ...]) -> None:
        self._described, self._line_of_call, precision = before
        if precision is None:
            self.facts.pop("precision", None)

    def _repeat_outputs(self, module: Any, outputs: Any, inputs: Any) -> Any:
        # A frozen model passes gradients on to its inputs.
        anchor = next(filter(_needs_gradient, (*module.parameters(), *tree_leaves(inputs))), None)

        def again(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if anchor is not None and getattr(leaf, "_trimtab_needs_graph", False):
                return _SkippedBackward.apply(anchor, leaf, self._trained)
            return torch.empty_like(leaf)

        return tree_map(again, outputs)

    def can_skip(self) -> bool:
        """Return whether the coming micro-batch repeats the ones before it."""
        units = self.units
        if self.is_over:
            return self.has_optimizer
        if self._first_in_step is not None and len(units) > self._first_in_step:
            # The optimizer calls the model itself, and again: these passes are no accumulation.
            return False
        # What comes after the step of another optimizer repeats none of what came before.
        count = len(units) - self._units_stepped
        if self.steps == STEPS - 1 and self.accumulation > 1:
            # The step before showed how memory grows in the second micro-batch.
            return count > 0
        return count > 1 and units[-1].repeats(units[-2])

    def _enter(
        self, call: Callable[..., Any], module: Any, args: Any, kwargs: Any, root: bool = False
    ) -> Any:
        recorder, main = self.recorder, threading.get_ident() == self._main
        before = recorder.module
        recorder.module = self._names.get(id(module), before)
        if recorder.records_work:
            recorder.add_work(ENTER_WORK if root else CALL_WORK)
        self._depth += main
        try:
            return call(module, *args, **kwargs)
        finally:
            self._depth -= main
            recorder.module = before
            if root and recorder.records_work:
                recorder.add_work(LEAVE_WORK)

    def _begin_root(self, module: Any) -> None:
        if id(module) not in self.roots:
            self.roots[id(module)] = module
            for name, part in module.named_modules():
                self._names[id(part)] = name
        self._begin_first_step()

    def _begin_first_step(self) -> None:
        """Note that the first step begins, unless it has begun."""
        if "step0" not in self.recorder.marks:
            self.label_weights()
            self.recorder.mark_phase("step0", "activations")
            self.windows.append(PhaseWindow(FIRST, len(self.recorder.order)))
            self.recorder.records_work = True

    def _note_phase(self, *, training: bool) -> None:
        current = self.windows[-1]
        if not training:
            self.check_time()
        if not training and current.name != EVALUATION:
            self.open_window(EVALUATION)
        elif training and current.name in (EVALUATION, SAVE):
            self.open_window(self._name_step())

    def _name_step(self) -> str:
        return FIRST if not self.steps else STEADY

    def note_batch(self, loader: Any) -> None:
        """Note that a loader is about to give a batch."""
        self.last_loader = loader
        self._batch_begin = len(self.recorder.order)

    def _claim_calls_for_step(self) -> None:
        """Count calls without a graph on the batch that is trained on, such as an encoder's, to the step."""
        if self.last_loader is None or self.is_over:
            return
        for window in self.windows:
            if window.name == EVALUATION and window.begin >= self._batch_begin:
                window.name = self._name_step()

    def open_window(self, name: str) -> None:
        """End the current phase and begin another."""
        at = len(self.recorder.order)
        if self.windows:
            self.windows[-1].end = at
        self.windows.append(PhaseWindow(name, at))

    def _count_when_used(self, out: Any, sizes: CallSizes) -> None:
        """Count a training call once a backward pass reaches its result.

        An agent that acts, or a model that makes samples, may be called with a graph that nothing uses.
        """
        nodes = {tensor.grad_fn for tensor in find_tensors(out) if tensor.grad_fn is not None}
        self.unused_sizes.add(sizes)
        if not nodes:
            self._count_sizes(sizes)
        for node in nodes:
            node.register_prehook(lambda _: self._count_sizes(sizes))

    def _count_sizes(self, sizes: CallSizes) -> None:
        """Count the sizes of a training call that was not counted yet."""
        if sizes not in self.unused_sizes:
            return
        self.unused_sizes.remove(sizes)
        for counts, size in ((self.micro_batches, sizes.samples), (self.lengths, sizes.length)):
            if size is not None:
                counts[size] = counts.get(size, 0) + 1

    def uses_gpu(self) -> bool:
        """Return whether the training steps did anything on the GPU."""
        marks = self.recorder.marks
        return "step0" in marks and len(self.recorder.order) > marks["step0"]

    def sends_gradients(self, sent: list[Any]) -> bool:
        """Return whether tensors that ranks add up are gradients: after the backward pass, they are.

        In it, a hook may send a gradient; a layer that is split over ranks sends activations.
        """
        if not self._backward_depth:
            return self._has_backward and not self._depth
        groups = (group for optimizer in self.made_optimizers for group in optimizer.param_groups)
        gradients = {id(parameter.grad) for group in groups for parameter in group["params"]}
        return any(id(tensor) in gradients for tensor in sent)

    # Steps

    def begin_backward(self) -> None:
        """Note that a backward pass begins on the main thread.

        Some scripts call no model, but `forward` or functions of tensors: then the first step begins here.
        """
        if self.has_optimizer:
            self._begin_first_step()
        self._forward_end = len(self.recorder.sequence)
        self._backward_depth += 1
        self._has_backward = True

    def end_backward(self) -> None:
        """Note that a backward pass has ended: it ends a micro-batch."""
        self._backward_depth -= 1
        if self._backward_depth or "step0" not in self.recorder.marks:
            return
        self._claim_calls_for_step()
        updated, self._updated = self._updated, None
        if self._is_inner and updated is None:
            self._is_inner = False
            return
        if self.is_over:
            self._begin_micro_batch()
            if updated is not None:
                self._finish_step(updated)
            return
        self.passes += 1
        self._report_passes()
        sequence = self.recorder.sequence
        begin = self.units[-1].end if self.units else 0
        skipped, self._is_skipped = self._is_skipped, False
        calls = self.units[-1].calls if skipped else tuple(self._inputs)
        forward = hash(tuple(sequence[self._forward_begin : self._forward_end]))
        self.units.append(
            MicroBatchWork(
                begin,
                len(sequence),
                update=max(begin, self._update_end),
                part=self._units_stepped,
                calls=calls,
                forward=self.units[-1].forward if skipped else forward,
                skipped=skipped,
            )
        )
        self._begin_micro_batch()
        self.recorder.watch_weights(self._list_stepped())
        if updated is not None:
            self.label_weights()
            self._finish_step(updated)

    def _report_passes(self) -> None:
        """Show now and then how many backward passes the script ran without an optimizer step."""
        now = time.monotonic()
        self._reported_at = self._reported_at or now
        if now - self._reported_at > REPORT_S:
            self._reported_at = now
            text = f"trimtab: {len(self.units) + 1} backward passes without an optimizer step"
            print(text, file=sys.__stderr__, flush=True)

    def _begin_micro_batch(self) -> None:
        self._call_number = 0
        self._inputs = []
        self._has_outer_call = self._is_inner = False

    def _note_optimizer(self, optimizer: Any) -> None:
        self.note_precision(is_last=True)
        if optimizer is None:
            self.learn("optimizer", "none", "the script changes its parameters itself")
        else:
            # Once the script has shown its steps, loaders end early: how often each steps means nothing.
            self._step_counts[id(optimizer)] = self._step_counts.get(id(optimizer), 0) + (not self.is_over)
            self._stepped.add(id(optimizer))
            if id(optimizer) not in self.optimizers:
                self.optimizers[id(optimizer)] = optimizer
                package = type(optimizer).__module__.partition(".")[0]
                how = package if package in LOW_BIT_PACKAGES else ""
                self.learn("optimizer", describe_optimizer(optimizer), how)
            self._label_optimizer(optimizer)

    def _note_idle_parameters(self) -> None:
        """Note that parameters had no gradient in any step: a script may train them later only."""
        groups = (group for optimizer in self.optimizers.values() for group in optimizer.param_groups)
        trained = {
            id(tensor): tensor for group in groups for tensor in group["params"] if tensor.requires_grad
        }
        idle = sum(tensor.numel() for key, tensor in trained.items() if key not in self._with_gradient)
        total = sum(tensor.numel() for tensor in trained.values())
        if idle > IDLE_SHARE * total:
            self.notes[
                f"{idle:,} of the {total:,} parameters of optimizers had no gradient in the steps that were "
                "followed: if they are trained later, gradients and optimizer states grow then"
            ] = None

    def note_optimizers(self) -> None:
        """Note every optimizer that stepped, if there are several, and parameters that none has stepped."""
        self._note_idle_parameters()
        if not self.micro_batches:
            # Backward passes that show nothing, as through an object that is no tensor.
            for sizes in list(self.unused_sizes):
                self._count_sizes(sizes)
        counts = [self._step_counts[number] for number in self.optimizers]
        # The last step of the first optimizer ends what is followed, so that others may have one less.
        is_uneven = max(counts, default=0) - min(counts, default=0) > 1
        kinds = Counter(
            (type(optimizer).__name__, self._step_counts[number] * is_uneven)
            for number, optimizer in self.optimizers.items()
        )
        texts = [
            f"{count} x " * (count > 1) + name + f" {steps}x" * is_uneven
            for (name, steps), count in kinds.items()
        ]
        if is_uneven:
            self.notes[
                f"the script's {len(counts)} optimizers step at different rates: the step time is that of a "
                f"step of the first one in which {len(self._timed)} of them step"
            ] = None
        if len(self.optimizers) > 1:
            how = "all that stepped" + ", and how often" * is_uneven
            self.learn("optimizers", ", ".join(texts), how, "")

    def _list_stepped(self) -> list[Any]:
        """Return the parameters that optimizers change."""
        groups = (group for optimizer in self.made_optimizers for group in optimizer.param_groups)
        return [tensor for group in groups for tensor in group["params"]]

    def _note_changed_weights(self) -> None:
        """Note that the weights have changed: passes from here on repeat none of those before."""
        self._units_stepped, self._update_end = len(self.units), len(self.recorder.sequence)

    def begin_step(self) -> None:
        """Note that an optimizer begins its step; it may call a closure with backward passes."""
        self._first_in_step = len(self.units)
        self.recorder.watch_weights([])

    def _join_passes_of_step(self) -> None:
        """Take several backward passes within one optimizer step, such as those of L-BFGS, for one."""
        first, self._first_in_step = self._first_in_step, None
        if first is None or len(self.units) - first <= 1:
            return
        own = self.units[first:]
        calls = tuple(call for unit in own for call in unit.calls)
        forward = hash(tuple(unit.forward for unit in own))
        self.units[first:] = [replace(own[0], end=own[-1].end, calls=calls, forward=forward)]

    def end_step(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped; None if the script changes its parameters without one."""
        self._join_passes_of_step()
        self._note_changed_weights()
        if "step0" not in self.recorder.marks:
            return
        if self._backward_depth:
            self._note_update_in_backward(optimizer)
            return
        self.label_weights()
        self._note_optimizer(optimizer)
        self._finish_step(optimizer)

    def _note_update_in_backward(self, optimizer: Any) -> None:
        """Note that a hook has called an optimizer; the step ends with the backward pass."""
        self._updated = self._updated or optimizer
        if self.is_over:
            return
        self._note_optimizer(optimizer)
        self.learn(
            "optimizer_in_backward", "true", "a hook of a parameter calls the optimizer in the backward pass"
        )
        if self.recorder.records_work:
            self.recorder.add_work(UPDATE_WORK)

    def _finish_step(self, optimizer: Any) -> None:
        """End a step if this is the optimizer that stepped first."""
        self._first = self._first or id(optimizer)
        if id(optimizer) != self._first:
            return
        if self.is_over:
            self._extra_steps += 1
            if self._extra_steps > EXTRA_STEPS:
                self.finish()
            return
        self._close_step()
        if self._waits_for_optimizers():
            return
        self.steps += 1
        recorder = self.recorder
        # Compiled code may still be compiled again and tuned in the second step.
        is_eager = not recorder.uses_compile
        if self.steps == STEPS - 1 and is_eager and repeat_step(recorder, "step0", "step1", "step2"):
            # The second step left exactly what it found: a third would be the same.
            self.steps = STEPS
        recorder.mark_phase("end" if self.steps == STEPS else f"step{self.steps}", "activations")
        if self.steps == STEPS:
            self.is_over = True
            self._over_at = time.monotonic()
            recorder.records_work = False
            self._trained = self._list_trained()
            self.open_window("")
        elif self.windows[-1].name in (FIRST, STEADY, ""):
            self.open_window(STEADY)

    def _waits_for_optimizers(self) -> bool:
        """Return whether to see more of this step: another optimizer, which steps less often, is still due.

        The second step needs the states of every optimizer, the third their second step.
        """
        due = [
            optimizer
            for optimizer in self.made_optimizers
            if self.steps and self._step_counts.get(id(optimizer), 0) < self.steps
        ]
        if not due:
            return False
        self._waits_until = self._waits_until or time.monotonic() + WAIT_S
        self._waited += 1
        if self._waited <= WAIT_STEPS and time.monotonic() < self._waits_until:
            return True
        kinds = ", ".join(sorted({describe_optimizer(optimizer) for optimizer in due}))
        fewest = min(self._step_counts.get(id(optimizer), 0) for optimizer in due)
        self.notes[
            f"of the script's optimizers, {kinds} stepped {fewest} times while the first one stepped "
            f"{self._step_counts[self._first]} times: what its step needs may be missing here"
        ] = None
        return False

    def _list_trained(self) -> list[Any]:
        parameters = (parameter for module in self.roots.values() for parameter in module.parameters())
        return [weakref.ref(parameter) for parameter in parameters if parameter.grad is not None]

    def _close_step(self) -> None:
        """Keep the work of the step: one micro-batch and the optimizer, or all if the passes differ."""
        recorder, units = self.recorder, self.units
        sequence, engine = recorder.sequence, recorder.by_engine
        kinds: dict[Any, list[MicroBatchWork]] = {}
        for unit in units:
            kinds.setdefault((unit.part, unit.outline), []).append(unit)
        # Generator and discriminator may each accumulate: so many times the step does all that it does.
        self.accumulation = rounds = math.gcd(*map(len, kinds.values())) or 1
        # The same inputs may still differ in work: a sum of losses begins with a number, not a tensor.
        self.is_mean = rounds > 1 and any(
            unit.calls != own[0].calls for own in kinds.values() for unit in own
        )
        if rounds > 1:
            shown = [
                unit for own in kinds.values() for unit in [self._find_typical(own)] * (len(own) // rounds)
            ]
            spans = [*((unit.update, unit.end) for unit in shown), *_list_updates(units, len(sequence))]
        else:
            spans = [*_repeat_skipped(units), (units[-1].end if units else 0, len(sequence))]
        self.sequence = tuple(itertools.chain.from_iterable(sequence[begin:end] for begin, end in spans))
        self.engine = tuple(itertools.chain.from_iterable(engine[begin:end] for begin, end in spans))
        passes = len(units) // rounds
        self.passes_of_step = len(units)
        followed = max(1, sum(not unit.skipped for unit in units))
        self.recomputed_flops = recorder.recomputed_flops * passes // followed
        self.units, self._units_stepped, self._update_end = [], 0, 0
        self._timed, self._stepped = self._stepped, set()
        self._reported_at = 0.0
        self._begin_micro_batch()
        recorder.sequence, recorder.by_engine = [], []
        recorder.recomputed_flops = 0

    def _find_typical(self, units: list[MicroBatchWork]) -> MicroBatchWork:
        """Return one of several micro-batches: any if they are equal, else the one nearest to their mean."""
        return units[0] if all(unit.repeats(units[0]) for unit in units) else self._find_mean(units)

    def _find_mean(self, units: list[MicroBatchWork]) -> MicroBatchWork:
        """Return the micro-batch whose work is nearest to the mean: FLOPs, or bytes if there are none."""
        works = list(self.recorder.works)
        sequence = self.recorder.sequence
        amounts = [
            tuple(
                sum(getattr(works[number], name) for number in sequence[unit.begin : unit.end])
                for name in ("flops", "read_bytes")
            )
            for unit in units
            if not unit.skipped
        ]
        means = [sum(column) / len(amounts) for column in zip(*amounts, strict=True)]
        ran = [unit for unit in units if not unit.skipped]
        nearest = min(
            range(len(ran)),
            key=lambda place: [abs(amounts[place][column] - means[column]) for column in range(2)],
        )
        return ran[nearest]

    def note_fetch(self, samples: int) -> None:
        """Note that a loader gave a batch of so many samples."""
        if torch.is_grad_enabled() and not self.is_over:
            self.fetched[samples] = self.fetched.get(samples, 0) + 1

    def note_empty_pass(self, loader: Any) -> None:
        """Note that a loader gave no batch; end a script that goes on like this without a step."""
        text = f"{describe_samples(loader)} (read at {find_script_line()})"
        self.empty_passes[text] = self.empty_passes.get(text, 0) + 1
        if not self.steps and self.empty_passes[text] >= EMPTY_PASSES:
            self.finish()

    def check_time(self) -> None:
        """End the script if it goes on for long after its third step."""
        if self.is_over and time.monotonic() - self._over_at > AFTER_S:
            self.finish()

    def note_last_epoch(self) -> None:
        """End the script if it begins epoch after epoch after its third step."""
        self._last_epochs += 1
        self._extra_steps = 0
        if self._last_epochs > LAST_EPOCHS or time.monotonic() - self._over_at > LAST_EPOCHS_S:
            self.finish()

    def label_weights(self) -> None:
        """Label parameters and their gradients in the recorder."""
        recorder = self.recorder
        if not self.roots:
            for tensor in self._list_stepped():
                _relabel(recorder, tensor, "weights")
        for module in self.roots.values():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                _relabel(recorder, tensor, "weights")
                if getattr(tensor, "grad", None) is not None:
                    _relabel(recorder, tensor.grad, "gradients", name)

    def label(self, tensor: Any, part: str) -> None:
        """Label a tensor in the recorder, if it is on the GPU."""
        _relabel(self.recorder, tensor, part)

    def _label_optimizer(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                _relabel(self.recorder, tensor, "weights")
                if tensor.grad is not None:
                    self._with_gradient.add(id(tensor))
                    _relabel(self.recorder, tensor.grad, "gradients")
        for state in optimizer.state.values():
            for value in tree_leaves(state):
                if isinstance(value, torch.Tensor):
                    _relabel(self.recorder, value, "optimizer")

    # The result

    def make_trace(self) -> Trace:
        """Return the trace of everything that the script did on the GPU."""
        recorder = self.recorder
        names: dict[str, int] = {}
        ops: dict[str, int] = {}
        places: dict[Any, int] = {}
        used: dict[int, int] = {}
        sequence = tuple(used.setdefault(number, len(used)) for number in self.sequence)
        works = tuple(recorder.works)
        modules = list(self.roots.values())
        parameters = {id(p): p for module in modules for p in module.parameters()}
        parameters = parameters or {id(tensor): tensor for tensor in self._list_stepped()}
        sizes = [(count_weights(parameter), parameter.requires_grad) for parameter in parameters.values()]
        return Trace(
            order=tuple(recorder.order),
            sizes=tuple(recorder.sizes),
            streams=tuple(recorder.streams),
            parts=tuple(PARTS.index(part) for part in recorder.parts),
            modules=tuple(names.setdefault(name, len(names)) for name in recorder.modules),
            ops=tuple(ops.setdefault(name, len(ops)) for name in recorder.ops),
            module_names=tuple(names),
            op_names=tuple(ops),
            marks=dict(recorder.marks),
            caused=tuple(
                (number, places.setdefault(cause, len(places))) for number, cause in recorder.causes.items()
            ),
            causes=tuple(places),
            works=tuple(works[number] for number in used),
            sequence=sequence,
            phases=find_phases(self.engine),
            parameters=sum(count for count, _ in sizes),
            trainable=sum(count for count, learns in sizes if learns),
            recomputed_flops=self.recomputed_flops,
            assumptions=(*self.notes, *recorder.kernels.list_assumptions()),
        )


def find_phases(engine: tuple[bool, ...]) -> dict[str, int]:
    """Return where forward, backward and optimizer begin in the work of a step."""
    if True not in engine:
        return {"forward": 0}
    last = len(engine) - engine[::-1].index(True)
    return {"forward": 0, "backward": engine.index(True), "optimizer": last}


def _relabel(recorder: ScriptRecorder, tensor: Any, part: str, module: str | None = None) -> None:
    tensor = getattr(tensor, "_local_tensor", tensor)
    if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
        recorder.relabel(tensor, part, module)


def _repeat_skipped(units: list[MicroBatchWork]) -> list[tuple[int, int]]:
    """Return where the work of each micro-batch is; a skipped one did the work of the one before it."""
    spans: list[tuple[int, int]] = []
    followed: MicroBatchWork | None = None
    for unit in units:
        if not unit.skipped or followed is None:
            followed = unit
            spans.append((unit.begin, unit.end))
        else:
            spans.append((followed.update, followed.end))
    return spans


def _list_updates(units: list[MicroBatchWork], end: int) -> list[tuple[int, int]]:
    """Return where the work of optimizers is: between the micro-batches of a step, and after them."""
    return [*((unit.begin, unit.update) for unit in units if unit.update > unit.begin), (units[-1].end, end)]


def has_parameters(module: Any) -> bool:
    """Return whether a module has parameters of its own or in a part of it."""
    return next(iter(module.parameters()), None) is not None


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def is_trained(module: Any) -> bool:
    """Return whether a parameter of a module gets gradients; scripts turn that off and on."""
    return any(parameter.requires_grad for parameter in module.parameters())


def wants_input_gradients(args: Any, kwargs: Any) -> bool:
    """Return whether a backward pass leaves gradients at an input of a call, for the script to use."""
    return any(
        isinstance(leaf, torch.Tensor)
        and leaf.requires_grad
        and leaf.is_leaf
        and not isinstance(leaf, torch.nn.Parameter)
        for leaf in tree_leaves((args, kwargs))
    )


def find_tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors among values, and those that objects among them hold."""
    leaves = []
    for leaf in tree_leaves(values):
        is_object = not isinstance(leaf, torch.Tensor | torch.nn.Module | type) and hasattr(leaf, "__dict__")
        leaves += tree_leaves(list(vars(leaf).values())) if is_object else [leaf]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def may_need_gradients(out: Any) -> bool:
    """Return whether a result has a graph of gradients, as far as its tensors show; True if it shows none."""
    tensors = find_tensors(out)
    return not tensors or any(tensor.requires_grad for tensor in tensors)


def find_sizes(args: Any, kwargs: Any) -> CallSizes:
    """Return how many samples the inputs of a training call have, and how many tokens a sample has."""
    sizes = CallSizes()
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    shaped = [tensor for tensor in tensors if tensor.dim() > 0]
    if not shaped:
        return sizes
    # Indices show the length as well; other indices, such as the edges of a graph, have no samples.
    indices = (tensor for tensor in shaped if not tensor.is_floating_point())
    first = next((tensor for tensor in indices if tensor.shape[0] == shaped[0].shape[0]), shaped[0])
    # A vector of numbers is one sample without a batch dimension.
    sizes.samples = 1 if first.dim() == 1 and first.is_floating_point() else first.shape[0]
    # Samples x positions, or samples x choices x positions; labels may come first, and have one side.
    sides = (2,) if any(tensor.is_floating_point() for tensor in shaped) else (2, 3)
    tokens = [tensor for tensor in shaped if tensor.dim() in sides and not tensor.is_floating_point()]
    # The edges of a graph are two rows, of any length.
    if tokens and (tokens[0].shape[0] == first.shape[0] or tokens[0].shape[0] != EDGE_ROWS):
        sizes.length = tokens[0].shape[-1]
    return sizes


def describe_samples(loader: Any) -> str:
    """Return how many samples a loader has, and how it makes batches of them."""
    try:
        samples = f"{len(loader.sampler):,} samples"
    except (AttributeError, TypeError, NotImplementedError):
        samples = "an iterable data set"
    return f"{samples}, batch_size={loader.batch_size}, drop_last={loader.drop_last}"


def describe_inputs(args: Any, kwargs: Any) -> Any:
    """Return what decides which work a call does: shapes and dtypes of tensors, values of the rest."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.device.type, leaf.requires_grad)
        if isinstance(leaf, torch.Tensor)
        else leaf
        if isinstance(leaf, int | float | str | bool | None)
        else id(leaf)
        for leaf in tree_leaves((args, kwargs))
    )


def describe_precision(module: Any) -> tuple[str, str]:
    """Return the precision that a training call runs in, and what shows it."""
    dtypes: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if not is_lazy(parameter) and parameter.is_floating_point():
            dtypes[parameter.dtype] = dtypes.get(parameter.dtype, 0) + parameter.numel()
    weights = max(dtypes, key=lambda dtype: dtypes[dtype], default=torch.float32)
    if torch.is_autocast_enabled("cuda"):
        lower = torch.get_autocast_dtype("cuda")
        word = "fp16" if lower is torch.float16 else "bf16"
        return ("bf16-true" if weights is torch.bfloat16 else word), f"autocast to {lower}"
    if weights is torch.bfloat16:
        return "bf16-true", f"weights in {weights}"
    if weights is torch.float16:
        return "fp16", f"weights in {weights}"
    if torch.get_float32_matmul_precision() != "highest" or torch.backends.cuda.matmul.allow_tf32:
        return "tf32", f"weights in {weights}, TF32 allowed"
    return "fp32", f"weights in {weights}, no autocast"


def describe_optimizer(optimizer: Any) -> str:
    """Return the class of an optimizer, and how it runs; one without torch's switches runs in a loop.

    bitsandbytes has one class for states of any size, so its options are named too: paged 8-bit AdamW.
    """
    group = optimizer.param_groups[0]
    can_use_foreach = group.get("foreach", False) is not False
    how = "fused" if group.get("fused") else "foreach" if can_use_foreach else "loop"
    name = type(optimizer).__name__
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    if isinstance(bits, int) and "bit" not in name:
        name = f"{bits}-bit {name}"
    is_paged = getattr(optimizer, "is_paged", False) and "Paged" not in name
    return f"{'paged ' * bool(is_paged)}{name} ({how})"
