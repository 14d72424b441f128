"""Run torch's own compiler for what a script compiles, on the fake GPU, within a time limit.

`torch.compile`, `Module.compile` and compiled optimizer steps all end in dynamo and inductor. Both are
torch's own here, as for jobs (`trimtab.trace.compiled`): graph breaks, fusion and saved tensors are those of
the installed torch. What cannot be compiled here, or takes too long, runs as eager code, and the answer says
so.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import logging
import pkgutil
import sys
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

import trimtab.scripts
from trimtab.scripts.observer import has_parameters, put
from trimtab.trace.compiled import prepare_compiler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.scripts.observer import Observer

LIMIT_S = 300.0
"""Seconds of processor time that a script's compilations may take together; what is left then runs as eager
code."""
MOST_WAITING = 3
"""How many times as long as its processor time a compilation may take on a busy machine."""
PAUSE_S = 0.05
"""Shortest time between two looks at how long a compilation has computed."""
OTHER_BACKENDS = ("eager", "aot_eager")
"""Backends that run the same operations as eager code."""


class CompileTimeout(BaseException):
    """Raised in the middle of a compilation that takes too long; no handler of torch catches it."""


@dataclass
class ScriptCompiler:
    """Compiles what a script asks for, and keeps count of it."""

    observer: Observer
    left_s: float = LIMIT_S
    _depth: int = 0
    _is_ready: bool = False

    def assume(self, text: str) -> None:
        """Add a line to the answer, once."""
        self.observer.recorder.kernels.assume(text)

    def prepare(self) -> None:
        """Prepare torch's compiler at the first use."""
        if self._is_ready:
            return
        self._is_ready = True
        recorder = self.observer.recorder
        recorder.uses_compile = True
        prepare_compiler(recorder)
        _watch_compiler(self)

    @contextlib.contextmanager
    def limit_time(self, name: str) -> Iterator[None]:
        """Run a compilation and count its time; raise an error once all of them took too long."""
        if self._depth:
            yield
            return
        if self.left_s <= 0:
            raise RuntimeError("compiling took too long")
        # The last line that a script prints is shown as progress.
        sys.stdout.write(f"trimtab: compiling {name}\n")
        sys.stdout.flush()
        begin = time.process_time()
        alarm = _Alarm(self.left_s)
        self._depth += 1
        try:
            with alarm:
                yield
        except CompileTimeout:
            self.assume(
                f"compiling took more than {LIMIT_S:g} s of processor time; {name} and what follows it are "
                "estimated as eager code, which takes more memory and more time"
            )
            raise RuntimeError("compiling took too long") from None
        finally:
            self._depth -= 1
            self.left_s = 0.0 if alarm.has_rung else self.left_s - (time.process_time() - begin)

    def note_failure(self, name: str, error: BaseException) -> None:
        """Say in the answer what could not be compiled."""
        if self.left_s <= 0:
            return
        inner = getattr(error, "inner_exception", error)
        text = " ".join(str(inner).split())[:120] or "no message"
        self.assume(
            f"{name} could not be compiled without a GPU ({type(inner).__name__}: {text}); it is estimated "
            "as eager code, which takes more memory and more time"
        )


class _Alarm:
    """Raises CompileTimeout in the thread that enters it, once this process has computed for so long."""

    def __init__(self, seconds: float) -> None:
        self.has_rung = False
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._ends_at = time.process_time() + seconds
        self._waits_until = time.monotonic() + MOST_WAITING * seconds
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._watcher.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over.set()

    def _watch(self) -> None:
        while (left := min(self._ends_at - time.process_time(), self._waits_until - time.monotonic())) > 0:
            if self._is_over.wait(max(left, PAUSE_S)):
                return
        with self._lock:
            if not self._is_over.is_set():
                self.has_rung = True
                number = ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(CompileTimeout))


NEVER_COMPILED = "bitsandbytes."
"""Package that compiles functions for machines without a GPU when it is imported; a GPU runs none of them."""


def patch_compile(observer: Observer) -> None:
    """Let torch's compiler work for a script on the fake GPU."""
    compiler = ScriptCompiler(observer)
    original: Any = torch.compile

    @functools.wraps(original)
    def compile_on_fake_gpu(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile_on_fake_gpu(function, **options)
        if options.get("disable") or getattr(model, "__module__", "").startswith(NEVER_COMPILED):
            return original(model, **options)
        backend = options.get("backend") or "inductor"
        if backend != "inductor" and backend not in OTHER_BACKENDS:
            name = getattr(backend, "__name__", backend)
            observer.learn("compile", "true", f"torch.compile with the backend {name}")
            compiler.assume(f"torch.compile with the backend {name} is estimated as eager code")
            return model
        compiler.prepare()
        mode = options.pop("mode", None)
        how = "torch.compile" if mode in (None, "default") else f"torch.compile, mode {mode}"
        observer.learn("compile", "true", how)
        settings = _choose_settings(compiler, mode, options.pop("options", None))
        # Our own hooks may end a graph, where the script alone would not.
        options.pop("fullgraph", None)
        compiled = original(model, options=settings or None, **options)
        return compiled if isinstance(model, torch.nn.Module) else _watch_calls(observer, model, compiled)

    put(torch, "compile", compile_on_fake_gpu)


def _watch_calls(observer: Observer, function: Any, compiled: Any) -> Any:
    """Let a compiled function that runs a model count as a call of that model."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        model = find_model(function, args, kwargs)
        if model is None:
            return compiled(*args, **kwargs)
        return observer.call_module(lambda _, *a, **k: compiled(*a, **k), model, args, kwargs)

    return call


def find_model(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the first module with parameters that a function gets or refers to; None if there is none."""
    owner = getattr(function, "__self__", None)
    code = getattr(inspect.unwrap(function), "__code__", None)
    cells: Any = getattr(inspect.unwrap(function), "__closure__", None) or ()
    names: Any = getattr(inspect.unwrap(function), "__globals__", {})
    known = [
        *tree_leaves((args, kwargs)),
        owner,
        *getattr(owner, "__dict__", {}).values(),
        *(cell.cell_contents for cell in cells if cell != types.CellType()),
        *(names.get(name) for name in (code.co_names if code is not None else ())),
    ]
    return next(
        (value for value in known if isinstance(value, torch.nn.Module) and has_parameters(value)), None
    )


TUNING = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
CUDA_GRAPHS = "triton.cudagraphs"


def _choose_settings(compiler: ScriptCompiler, mode: str | None, options: Any) -> dict[str, Any]:
    """Return inductor's settings for a mode, without what needs a real GPU."""
    from torch._inductor import config

    settings = dict(options or {})
    if mode not in (None, "default"):
        from torch._inductor import list_mode_options

        settings |= list_mode_options(mode)
    # Scripts also set them for everything that they compile.
    has_graphs = bool(config.triton.cudagraphs)
    if settings.pop(CUDA_GRAPHS, has_graphs):
        compiler.assume(
            "CUDA graphs keep their memory for themselves; what this adds to reserved memory is not counted"
        )
    settings |= {CUDA_GRAPHS: False} if has_graphs else {}
    everywhere = {name for name in TUNING if getattr(config, name, False)}
    if [name for name in TUNING if settings.pop(name, name in everywhere)]:
        compiler.assume(
            "time: with max-autotune or coordinate descent tuning, matrix products are taken to be as fast "
            "as cuBLAS's; the trials of kernels while it compiles are not counted"
        )
    settings |= dict.fromkeys(everywhere, False)
    return settings


# Hooks into torch's compiler


def _watch_compiler(compiler: ScriptCompiler) -> None:
    import torch._dynamo.config as settings

    if not hasattr(torch._C, "_cuda_CUDAAllocator_AllocatorState"):
        # The module of CUDA graphs names this type, which only torch for CUDA has.
        put(torch._C, "_cuda_CUDAAllocator_AllocatorState", object)
    for module in pkgutil.iter_modules(trimtab.scripts.__path__, "trimtab.scripts."):
        torch._dynamo.trace_rules.add(module.name)
    # A frame that cannot be compiled runs as eager code.
    put(settings, "suppress_errors", True)
    logging.getLogger("torch._dynamo.convert_frame").setLevel(logging.ERROR)
    _watch_frames(compiler)
    _watch_graphs(compiler)
    _watch_optimizer_states(compiler)
    _watch_recomputing(compiler)


def _watch_frames(compiler: ScriptCompiler) -> None:
    """Limit the time of dynamo, show what it compiles, and hide our own hooks from it."""
    import torch._dynamo.convert_frame as frames
    from torch._dynamo.variables import nn_module

    plain_call = vars(nn_module)["unpatched_nn_module_call"]
    compile_frame: Any = frames._compile
    observer = compiler.observer

    @functools.wraps(compile_frame)
    def compile_watched(code: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{code.co_name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
        observer.note_precision()
        watched: Any = torch.nn.Module.__call__
        put(torch.nn.Module, "__call__", plain_call)
        try:
            with compiler.limit_time(name):
                return compile_frame(code, *args, **kwargs)
        except Exception as error:
            if not _is_usual(error):
                compiler.note_failure(name, error)
            raise
        finally:
            put(torch.nn.Module, "__call__", watched)

    put(frames, "_compile", compile_watched)


def _watch_optimizer_states(compiler: ScriptCompiler) -> None:
    """Record the states that an optimizer creates while its step is compiled."""
    from torch._dynamo.variables.optimizer import OptimizerVariable

    original: Any = OptimizerVariable.call_method
    recorder = compiler.observer.recorder

    @functools.wraps(original)
    def call_method(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        optimizer = variable.value
        if name != "_init_group" or not hasattr(optimizer, name):
            return original(variable, tx, name, args, kwargs)
        create = optimizer._init_group

        def create_recorded(*args: Any, **kwargs: Any) -> Any:
            before, recorder.paused = recorder.paused, False
            with _disable_current_modes():
                _push_mode(recorder)
                try:
                    return create(*args, **kwargs)
                finally:
                    _pop_mode()
                    recorder.paused = before

        optimizer.__dict__["_init_group"] = create_recorded
        try:
            return original(variable, tx, name, args, kwargs)
        finally:
            del optimizer.__dict__["_init_group"]

    put(OptimizerVariable, "call_method", call_method)


def _watch_recomputing(compiler: ScriptCompiler) -> None:
    """Note activation checkpointing, which dynamo replaces by an operator of its own."""
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    original: Any = TagActivationCheckpoint.__call__

    @functools.wraps(original)
    def call(operator: Any, *args: Any, **kwargs: Any) -> Any:
        compiler.observer.learn("recompute", "full", "torch.utils.checkpoint")
        return original(operator, *args, **kwargs)

    put(TagActivationCheckpoint, "__call__", call)


def _is_usual(error: Exception) -> bool:
    """Return whether dynamo raises an error for code that it leaves to Python on a real GPU as well."""
    from torch._dynamo import exc

    names = ("Unsupported", "SkipFrame", "UncapturedHigherOrderOpError", "RecompileLimitExceeded")
    return isinstance(error, tuple(getattr(exc, name) for name in names if hasattr(exc, name)))


def _watch_graphs(compiler: ScriptCompiler) -> None:
    """Compile the graphs of dynamo; run those that fail, or are not for the GPU, one operation at a time."""
    import torch._inductor.compile_fx as inductor
    from torch._functorch._aot_autograd.utils import make_boxed_func

    compile_model: Any = inductor.compile_fx
    compile_graph: Any = inductor.compile_fx_inner

    @functools.wraps(compile_graph)
    def compile_safely(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        if not _uses_gpu(graph):
            return make_boxed_func(graph)
        backward = kwargs.get("is_backward", False)
        name = "a backward pass" if backward else "a graph"
        try:
            with compiler.limit_time(name):
                compiled = compile_graph(graph, inputs, **kwargs)
        except Exception as error:
            if not backward:
                raise
            compiler.note_failure(name, error)
            return make_boxed_func(graph)
        compiler.observer.compiled_graphs += 1
        return compiled

    @functools.wraps(compile_model)
    def compile_fx(model: Any, inputs: Any, inner_compile: Any = compile_safely, **kwargs: Any) -> Any:
        return compile_model(model, inputs, inner_compile=inner_compile, **kwargs)

    put(inductor, "compile_fx", compile_fx)


def _uses_gpu(graph: Any) -> bool:
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)
