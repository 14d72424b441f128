"""What a CUDA kernel would do that shapes alone do not show: which one runs, and what it takes for itself."""

from __future__ import annotations

import re
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trimtab.catalog.devices import capability
from trimtab.trace import attention, convolution, fake_ops, recurrent, workspaces
from trimtab.trace.data_dependent import Values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.spec import Device


# Autocast as it runs on the host of the target GPU, in place of that of the machine that traces.
#
# Autocast's C++ casts all arguments of an operation within one function call, and C++ leaves the order of
# arguments to the compiler. GCC evaluates them from last to first on x86-64 and from first to last on
# aarch64: `linear(input, weight)` casts the weight first on the one and the input first on the other. The
# order decides which block of memory each copy takes, and in which order the backward pass undoes the
# casts; one job has 18.25 GiB reserved in one order and 18.23 GiB in the other. The casts that autocast
# caches are freed in the order of their addresses, which differs from run to run.
#
# Here both orders are fixed: arguments by the host of the target, and the cache by first use. The lists of
# operations are read from the header that comes with torch.


LOWER, FP32, WIDEST = "LOWER_PRECISION_FP", "FP32", "PROMOTE"
"""What autocast does with the arguments of an operation, as the header names it."""
GRACE = re.compile(r"\bG[HB]\d+", re.ASCII)
"""GPUs that come with an aarch64 CPU: GH200, GB200 and their like."""
ENTRY = re.compile(r"_\((\w+)(?:,\s*(\w+))?\)")


class Listed(NamedTuple):
    """An operation of one of autocast's lists."""

    policy: str
    name: str
    overload: str


def read_lists(header: str) -> list[Listed]:
    """Return the operations that autocast knows on CUDA, from the text of autocast_mode.h."""
    found = []
    for policy in (LOWER, FP32, WIDEST):
        begin = re.search(rf"#define AT_FORALL_{policy}\(_\)((?:.*\\\n)*.*)", header)
        for name, overload in ENTRY.findall(begin[1] if begin else ""):
            found.append(Listed(policy, name, overload or "default"))
    return found


def casts_last_argument_first(target: Device) -> bool:
    """Whether torch casts the last argument first on the host of a GPU: on all hosts but Grace."""
    return GRACE.search(target.name) is None


class Autocast:
    """Casts the arguments of operations in a fixed order, and caches casts of weights."""

    def __init__(self, *, last_first: bool) -> None:
        self.last_first = last_first
        self._cached: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        """By the id of the weight: the weight, which may be gone, and its cast."""

    def install(self, library: torch.library.Library) -> None:
        """Take the place of torch's own autocast on CUDA, in this process."""
        header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
        for listed in read_lists(header.read_text(encoding="utf-8")):
            packet = getattr(torch.ops.aten, listed.name, None)
            operation = getattr(packet, listed.overload, None)
            if operation is not None and (listed.policy == LOWER or _tensors(operation) > 1):
                name = operation.name().removeprefix("aten::")
                library.impl(name, self._kernel(operation, listed.policy), "AutocastCUDA")
        clear = torch.clear_autocast_cache

        def clear_both() -> None:
            self._cached.clear()
            clear()

        torch.clear_autocast_cache = clear_both

    def _kernel(self, operation: Any, policy: str) -> Callable[..., Any]:
        without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(without):
                values = self.cast([*args, *kwargs.values()], policy)
                named = dict(zip(kwargs, values[len(args) :], strict=True))
                return operation(*values[: len(args)], **named)

        return run

    def cast(self, values: Sequence[Any], policy: str) -> list[Any]:
        """Return the arguments of an operation, those that its policy is for cast."""
        dtype = _dtype(values, policy)
        places = range(len(values))
        out = list(values)
        for place in reversed(places) if self.last_first else places:
            value = values[place]
            if isinstance(value, torch.Tensor):
                out[place] = self._cast(value, dtype)
            elif isinstance(value, list | tuple):
                # A loop casts a list, from front to back on every host.
                out[place] = [self._cast(one, dtype) if _is_eligible(one) else one for one in value]
        return out

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not _is_eligible(tensor) or tensor.dtype is dtype:
            return tensor
        if not _is_cached(tensor, dtype):
            return tensor.to(dtype)
        known = self._cached.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        made = tensor.to(dtype)
        self._cached[id(tensor)] = weakref.ref(tensor), made
        return made


def _tensors(operation: Any) -> int:
    """How many arguments of an operation are tensors or lists of them."""
    return sum("Tensor" in str(argument.type) for argument in operation._schema.arguments)


def _is_eligible(value: Any) -> bool:
    """Whether autocast on CUDA changes the dtype of an argument."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.is_cuda and value.is_floating_point() and value.dtype is not torch.float64


def _is_cached(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast keeps the cast until it ends: of weights alone."""
    return (
        dtype is torch.get_autocast_dtype("cuda")
        and tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )


def _dtype(values: Sequence[Any], policy: str) -> torch.dtype:
    """The dtype that an operation is to run in."""
    lower = torch.get_autocast_dtype("cuda")
    if policy == FP32:
        return torch.float32
    if policy == LOWER:
        return lower
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    wide = any(one.dtype is torch.float32 for one in flat if _is_eligible(one))
    return torch.float32 if wide else lower


MATRIX_OPS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::_grouped_mm",
}  # fmt: skip


VECTOR_OPS = {
    "aten::mv", "aten::addmv", "aten::addmv_", "aten::dot", "aten::vdot", "aten::linalg_lu_solve",
    "aten::linalg_solve_triangular", "aten::triangular_solve", "aten::cholesky_solve",
    "aten::_linalg_solve_ex",
}  # fmt: skip
"""Operations beside matrix products that ask for a cuBLAS handle, and with it for its workspace."""
CUBLAS_OPS = frozenset({*MATRIX_OPS, *VECTOR_OPS})


class Kernels:
    """The target's choices, and what had to be assumed."""

    def __init__(self, target: Device) -> None:
        self.target = target
        self.capability = capability(target.compute_capability or "9.0") or (9, 0)
        self.assumptions: dict[str, None] = {}
        self.values = Values(self.assume)
        self._cublas_threads: set[int] = set()
        self._dropout_state = False
        """Whether cuDNN has its random numbers for dropout in recurrent layers."""
        self._library = torch.library.Library("aten", "IMPL")
        Autocast(last_first=casts_last_argument_first(target)).install(self._library)
        self.attended = False
        """Whether torch's function for attention was called."""
        self.double_backward = False
        """Whether a gradient was computed in a way that it can be differentiated again."""
        self.asked_compiling = False
        """Whether code outside of torch asked if it is being compiled."""
        self.unfused: dict[str, None] = {}
        """Why attention is not fused, where it is not: one sentence a cause."""
        attention.register(self._library, self.capability, self._lose)
        recurrent.register(self._library, self.assume)
        fake_ops.keep_whole(self._library)
        fake_ops.add_bias_in_place(self._library)

    def assume(self, text: str) -> None:
        """Note an assumption once."""
        self.assumptions[text] = None

    def _lose(self, text: str) -> None:
        self.attended = True
        if text:
            self.unfused[text] = None

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, with an answer for those whose result depends on values."""
        result = fake_ops.RESULTS.get(name)
        known = fake_ops.result(name, args, self.assume) if name in fake_ops.NAMES else None
        if known is not None:
            return known
        out = self.values.run(func, name, args, kwargs) if result is None else result(args)
        fake_ops.keep_parts(name, args, out)
        if name in fake_ops.DENSE_RESULTS:
            out = fake_ops.with_dense_first(out)
        self.values.learn(name, args, out)
        self.values.trail(name, args, kwargs, out)
        if result is None:
            self.values.follow(func, name, args, kwargs, out)
        return out

    def takes(self, name: str, args: tuple[Any, ...], out: Any) -> list[workspaces.Take]:
        """What the operation asks the allocator for beside its results, and in what order."""
        if name in fake_ops.PRODUCTS and fake_ops.has_sparse(args):
            sorting, pieces = fake_ops.product_bytes(name, args, out)
            return [workspaces.RESULT, workspaces.brief(sorting), *map(workspaces.hold, pieces)]
        by_gpu = workspaces.BY_GPU.get(name)
        if by_gpu is not None:
            return by_gpu(args, out, self.capability)
        rule = workspaces.RULES.get(name)
        return rule(args, out) if rule else []

    def kept(self, name: str, args: tuple[Any, ...]) -> int:
        """Bytes that a library takes now and keeps: cuBLAS once a thread, cuDNN's dropout once."""
        if name == "aten::_cudnn_rnn" and args[11] and args[12] and not self._dropout_state:
            self._dropout_state = True
            return workspaces.dropout_state(self.target.multiprocessors or convolution.multiprocessors())
        thread = threading.get_ident()
        if name not in CUBLAS_OPS or thread in self._cublas_threads:
            return 0
        self._cublas_threads.add(thread)
        return workspaces.cublas(self.capability)
