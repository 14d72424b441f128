"""Follow Triton kernels: count what a launch reads and writes, and run nothing.

Libraries choose another code path where Triton is missing, with more memory and other operations. torch for
CUDA brings Triton, so jobs and scripts find it here as well: the installed one, or a stand-in without a
compiler.
A launch allocates nothing. Its time follows from the tensors that the kernel's source loads from and stores
to; each is counted once, in full.
"""

from __future__ import annotations

import ast
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
import textwrap
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.engine.precision import dtype_name
from trimtab.spec import Work
from trimtab.trace.data_dependent import VALUE_ATTRIBUTES
from trimtab.trace.fake_cuda import MODULE_PATCHES
from trimtab.trace.op_cost import count_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.trace.recorder import Recorder

TRITON = "triton"
STAND_IN_VERSION = "3.6.0"
"""Version that the stand-in gives itself: that of torch 2.11 for CUDA."""
PRODUCTS = {"dot", "dot_scaled"}
"""Functions of triton.language that multiply matrices."""
LAUNCH_NOTE = "time: Triton kernels are counted by the tensors that they load and store, each once"
PRODUCT_NOTE = "time: the FLOPs of Triton kernels that multiply matrices are not counted ({name})"


def patch_triton(find_recorder: Callable[[], Recorder | None]) -> None:
    """Record launches of Triton kernels, whether Triton is installed or not.

    `find_recorder` returns the recorder of the running trace; without one, a launch does nothing.
    """

    def launch(function: Any, names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        recorder = find_recorder()
        if recorder is not None:
            record_launch(recorder, function, names, args, kwargs)
        return Anything()

    if importlib.util.find_spec(TRITON) is None:
        _install_stand_in(launch)
    else:
        MODULE_PATCHES["triton.runtime.jit"] = functools.partial(_patch_launches, launch)
        MODULE_PATCHES["triton.runtime.autotuner"] = _patch_autotuner
        for name in ("triton.runtime.jit", "triton.runtime.autotuner"):
            if name in sys.modules:
                MODULE_PATCHES[name](sys.modules[name])


def record_launch(
    recorder: Recorder, function: Any, names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Record the work of a launch, and forget the values of tensors that the kernel stores to."""
    given = dict(zip(names, args, strict=False)) | kwargs
    tensors = {name: value for name, value in given.items() if is_on_gpu(value)}
    if not tensors or recorder.paused:
        return
    uses = find_pointer_uses(function)
    read = [tensor for name, tensor in tensors.items() if uses is None or name in uses.loaded]
    written = [tensor for name, tensor in tensors.items() if uses is None or name in uses.stored]
    recorder.kernels.assume(LAUNCH_NOTE)
    if uses is not None and uses.multiplies:
        recorder.kernels.assume(PRODUCT_NOTE.format(name=function.__name__))
    record_kernel(recorder, f"{TRITON}::{getattr(function, '__name__', 'kernel')}", read, written)


def is_on_gpu(value: Any) -> bool:
    """Return whether a value is a tensor on the fake device."""
    return isinstance(value, FakeTensor) and value.fake_device.type == "cuda"


def record_kernel(recorder: Recorder, op: str, read: Sequence[Any], written: Sequence[Any]) -> None:
    """Record a kernel that reads and writes tensors in full; forget the values of those it writes."""
    for tensor in written:
        for attribute in VALUE_ATTRIBUTES:
            tensor.__dict__.pop(attribute, None)
    if recorder.records_work and (read or written):
        largest = max((*read, *written), key=count_bytes)
        recorder.add_work(
            Work(
                op=op,
                kind="pointwise",
                dtype=dtype_name(largest.dtype),
                read_bytes=sum(map(count_bytes, read)),
                write_bytes=sum(map(count_bytes, written)),
                dims=(0, largest.shape[-1] if largest.dim() else 1),
            )
        )


# Which tensors a kernel loads from and stores to, read from its source


@dataclass
class PointerUses:
    """Parameters of a kernel by what it does with the memory that they point to."""

    loaded: set[str] = field(default_factory=set)
    stored: set[str] = field(default_factory=set)
    multiplies: bool = False


@functools.lru_cache(maxsize=1024)
def find_pointer_uses(function: Any) -> PointerUses | None:
    """Return what a kernel loads and stores; None if its source cannot be read.

    A pointer that is passed on to another function counts as loaded and stored.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    kernel = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    if kernel is None:
        return None
    parameters = [*kernel.args.posonlyargs, *kernel.args.args, *kernel.args.kwonlyargs]
    origins = {parameter.arg: {parameter.arg} for parameter in parameters}
    # Twice: a variable of a loop may be used above the line that sets it.
    for _ in range(2):
        for node in ast.walk(kernel):
            _note_assignment(node, origins)
    uses = PointerUses()
    for node in ast.walk(kernel):
        if isinstance(node, ast.Call):
            _note_call(node, origins, uses)
    return uses


def _note_assignment(node: ast.AST, origins: dict[str, set[str]]) -> None:
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AugAssign | ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return
    for target in targets:
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                origins.setdefault(name.id, set()).update(_find_origins(value, origins))


def _find_origins(node: ast.AST, origins: dict[str, set[str]]) -> set[str]:
    """Return the parameters that an address is computed from; what is loaded from memory is no address."""
    if isinstance(node, ast.Name):
        return origins.get(node.id, set())
    if isinstance(node, ast.Call) and _called_name(node) == "load":
        return set()
    return set().union(*(_find_origins(child, origins) for child in ast.iter_child_nodes(node)))


def _called_name(call: ast.Call) -> str:
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def _note_call(call: ast.Call, origins: dict[str, set[str]], uses: PointerUses) -> None:
    name = _called_name(call)
    uses.multiplies = uses.multiplies or name in PRODUCTS
    # `descriptor.load([...])`, or `tl.load(pointer)`
    owner = _find_origins(call.func.value, origins) if isinstance(call.func, ast.Attribute) else set()
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    address = owner or (_find_origins(arguments[0], origins) if arguments else set())
    if name == "load":
        uses.loaded |= address
    elif name == "store":
        uses.stored |= address
    elif name.startswith("atomic_"):
        uses.loaded |= address
        uses.stored |= address
    elif isinstance(call.func, ast.Name) and name != "range":
        passed = set().union(*(_find_origins(argument, origins) for argument in arguments))
        uses.loaded |= passed
        uses.stored |= passed


# The installed Triton


def _patch_launches(launch: Callable[..., Any], module: Any) -> None:
    def run(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        del grid, warmup
        return launch(kernel.fn, kernel.arg_names, args, kwargs)

    module.JITFunction.run = run


def _patch_autotuner(module: Any) -> None:
    """Let an autotuner take its first configuration: nothing runs, so nothing can be compared."""

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return tuner.fn.run(*args, **kwargs | tuner.configs[0].all_kwargs())

    module.Autotuner.run = run


# The stand-in


class Anything:
    """Answers every attribute and call with itself, for what the stand-in does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Return itself."""
        return self

    def __getitem__(self, _: Any) -> Any:
        return self


class StandInKernel:
    """A function under triton.jit: a launch is recorded."""

    def __init__(self, function: Any, launch: Callable[..., Any]) -> None:
        self.fn = function
        self.arg_names = list(inspect.signature(function).parameters)
        self._launch = launch
        functools.update_wrapper(self, function)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.run, grid=grid)

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> Any:
        """Record a launch."""
        del grid, warmup
        return self._launch(self.fn, self.arg_names, args, kwargs)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise what Triton raises: a kernel is launched with a grid."""
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


class StandInConfig:
    """A configuration of triton.autotune."""

    def __init__(self, kwargs: dict[str, Any], **options: Any) -> None:
        self.kwargs = kwargs
        self.__dict__.update(options)


class StandInModule(types.ModuleType):
    """A module of the stand-in: what it does not define is Anything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `triton` and every module below it."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return a spec for modules of Triton."""
        del path, target
        if fullname.partition(".")[0] != TRITON:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        """Return a module of the stand-in."""
        return StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Give the top module and triton.runtime what libraries use at import."""
        if module.__name__ in (TRITON, "triton.runtime", "triton.runtime.jit", "triton.runtime.autotuner"):
            module.__dict__.update(self.names)
        elif module.__name__ == "triton.language":
            module.__dict__["constexpr"] = StandInConstant


class StandInConstant:
    """triton.language.constexpr: an annotation, or a constant at the top of a file."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def divide_up(numerator: int, denominator: int) -> int:
    """Return a quotient, rounded up."""
    return -(-numerator // denominator)


def round_up_to_power(number: int) -> int:
    """Return the smallest power of 2 that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


def _install_stand_in(launch: Callable[..., Any]) -> None:
    def jit(function: Any = None, **_: Any) -> Any:
        return StandInKernel(function, launch) if function is not None else jit

    def decorate(*_: Any, **__: Any) -> Any:
        return lambda kernel: kernel

    names = {
        "__version__": STAND_IN_VERSION,
        "jit": jit,
        "autotune": decorate,
        "heuristics": decorate,
        "Config": StandInConfig,
        "JITFunction": StandInKernel,
        "KernelInterface": StandInKernel,
        "cdiv": divide_up,
        "next_power_of_2": round_up_to_power,
    }
    # torch stays without Triton: it would use more of it than the stand-in has.
    from torch.utils import _triton

    _triton.has_triton_package()
    _hide_from_torch()
    sys.meta_path.append(StandInFinder(names))


def _hide_from_torch() -> None:
    """Let modules of torch find no Triton when they are imported."""
    original = importlib.machinery.SourceFileLoader.exec_module

    def exec_module(loader: Any, module: Any) -> None:
        if module.__name__.partition(".")[0] != torch.__name__:
            original(loader, module)
            return
        missing = object()
        before: Any = sys.modules.get(TRITON, missing)
        sys.modules[TRITON] = None  # type: ignore[assignment]
        try:
            original(loader, module)
        finally:
            if before is missing:
                del sys.modules[TRITON]
            else:
                sys.modules[TRITON] = before

    importlib.machinery.SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign,assignment]
