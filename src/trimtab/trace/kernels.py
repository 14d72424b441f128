"""Model what CUDA kernels do beyond their result shapes: kernel choice, autocast order and workspaces.

`Kernels` runs each operation on fake tensors as on the target, and returns the memory it would request.
"""

from __future__ import annotations

import re
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.catalog.devices import parse_capability
from trimtab.spec.precision import SCALED_PRODUCT
from trimtab.trace import attention, convolution, fake_ops, packed_attention, recurrent, workspaces
from trimtab.trace.common_devices import casts_last_argument_first, note_special_fact
from trimtab.trace.data_dependent import ValueTracker, patch_value_reads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.spec import Device, SizeCause


# Autocast, as it runs on the host of the target GPU.
#
# Autocast's C++ casts all arguments of an operation within one function call, and the compiler chooses the
# order of arguments. GCC evaluates them from last to first on x86-64 and from first to last on aarch64:
# `linear(input, weight)` casts the weight first on x86-64 and the input first on aarch64. The order decides
# which block of memory each copy gets, and in which order the backward pass undoes the casts. One job has
# 18.25 GiB reserved in one order and 18.23 GiB in the other. Cached casts are freed in the order of their
# addresses, which differs from run to run.
#
# Here both orders are fixed: arguments by the host of the target, and the cache by first use. The lists of
# operations are read from the header that comes with torch.


LOWER, FP32, PROMOTE = "LOWER_PRECISION_FP", "FP32", "PROMOTE"
"""Autocast policies, as the header names them."""
ENTRY = re.compile(r"_\((\w+)(?:,\s*(\w+))?\)")


class AutocastOp(NamedTuple):
    """Operation in one of autocast's lists."""

    policy: str
    name: str
    overload: str


def read_autocast_ops(header: str) -> list[AutocastOp]:
    """Return the operations that autocast handles on CUDA, from the text of autocast_mode.h."""
    operations = []
    for policy in (LOWER, FP32, PROMOTE):
        begin = re.search(rf"#define AT_FORALL_{policy}\(_\)((?:.*\\\n)*.*)", header)
        for name, overload in ENTRY.findall(begin[1] if begin else ""):
            operations.append(AutocastOp(policy, name, overload or "default"))
    return operations


class Autocast:
    """Casts the arguments of operations in a fixed order, and caches casts of weights."""

    def __init__(self, *, last_first: bool) -> None:
        self.last_first = last_first
        self._cached: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        """The weight, which may be freed, and its cast, by the id of the weight."""

    def install(self, library: torch.library.Library) -> None:
        """Replace torch's own autocast on CUDA in this process."""
        header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
        for listed in read_autocast_ops(header.read_text(encoding="utf-8")):
            packet = getattr(torch.ops.aten, listed.name, None)
            operation = getattr(packet, listed.overload, None)
            if operation is not None and (listed.policy == LOWER or _count_tensor_arguments(operation) > 1):
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
        """Return the arguments of an operation, cast as its policy requires."""
        dtype = _choose_dtype(values, policy)
        positions = range(len(values))
        out = list(values)
        for position in reversed(positions) if self.last_first else positions:
            value = values[position]
            if isinstance(value, torch.Tensor):
                out[position] = self._cast(value, dtype)
            elif isinstance(value, list | tuple):
                # A loop casts a list, from front to back on every host.
                out[position] = [self._cast(item, dtype) if _is_eligible(item) else item for item in value]
        return out

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not _is_eligible(tensor) or tensor.dtype is dtype:
            return tensor
        if not _is_cached(tensor, dtype):
            return tensor.to(dtype)
        cached = self._cached.get(id(tensor))
        if cached is not None and cached[0]() is tensor:
            return cached[1]
        cast = tensor.to(dtype)
        self._cached[id(tensor)] = weakref.ref(tensor), cast
        return cast


def _count_tensor_arguments(operation: Any) -> int:
    """Return how many arguments of an operation are tensors or lists of tensors."""
    return sum("Tensor" in str(argument.type) for argument in operation._schema.arguments)


def _is_eligible(value: Any) -> bool:
    """Whether autocast on CUDA changes the dtype of an argument."""
    if type(value) is FakeTensor and not value.fake_mode.in_kernel_invocation:
        # torch would dispatch an operation to find the device of a fake tensor.
        is_cuda = value.fake_device.type == "cuda"
    else:
        is_cuda = isinstance(value, torch.Tensor) and value.is_cuda
    return is_cuda and value.is_floating_point() and value.dtype is not torch.float64


def _is_cached(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast caches the cast until it ends, which it does only for weights."""
    return (
        dtype is torch.get_autocast_dtype("cuda")
        and tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )


def _choose_dtype(values: Sequence[Any], policy: str) -> torch.dtype:
    """Return the dtype that an operation runs in."""
    lower = torch.get_autocast_dtype("cuda")
    if policy == FP32:
        return torch.float32
    if policy == LOWER:
        return lower
    flat = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
    has_fp32 = any(item.dtype is torch.float32 for item in flat if _is_eligible(item))
    return torch.float32 if has_fp32 else lower


BLOCK_PRODUCT = "trimtab::product_blocks"
MATRIX_OPS = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", SCALED_PRODUCT,
    BLOCK_PRODUCT,
}  # fmt: skip


VECTOR_OPS = {
    "aten::mv", "aten::addmv", "aten::addmv_", "aten::dot", "aten::vdot", "aten::linalg_lu_solve",
    "aten::linalg_solve_triangular", "aten::triangular_solve", "aten::cholesky_solve",
    "aten::_linalg_solve_ex",
}  # fmt: skip
"""Other operations that need a cuBLAS handle, and with it its workspace."""
CUBLAS_OPS = frozenset({*MATRIX_OPS, *VECTOR_OPS})


SEARCH_NOTE = (
    "torch.backends.cudnn.benchmark is on: in the first step cuDNN tries its kernels (cudnn_search), and "
    "later steps take less; which kernels it tries is not documented, so the band begins without them"
)


DETERMINISTIC_NOTE = (
    "time: deterministic algorithms are on; the slower kernels that they take, such as those of attention's "
    "backward pass, were not measured"
)


class Kernels:
    """Runs operations as the target's kernels would, and collects the assumptions made."""

    def __init__(self, target: Device) -> None:
        self.target = target
        self.capability = parse_capability(target.compute_capability or "9.0") or (9, 0)
        self.assumptions: dict[str, None] = {}
        self.values = ValueTracker(self.assume)
        self._cublas_threads: set[int] = set()
        self._scaled_threads: set[int] = set()
        """Threads that have multiplied 8-bit floats."""
        self._dropout_state = False
        """Whether cuDNN has allocated its random states for dropout in recurrent layers."""
        self._library = torch.library.Library("aten", "IMPL")
        Autocast(last_first=casts_last_argument_first(target)).install(self._library)
        self._searched: set[SizeCause | None] = set()
        """Convolutions whose fastest kernel cuDNN has searched."""
        self.uses_attention = False
        """Whether torch's function for attention was called."""
        self.double_backward = False
        """Whether a gradient was computed with create_graph, so that it can be differentiated again."""
        self.checks_compiling = False
        """Whether code outside of torch checked if it is being compiled."""
        self.unfused_notes: dict[str, None] = {}
        """Reasons why attention is not fused, one sentence each, in order."""
        attention.register_attention(self._library, self.capability, self._note_attention)
        recurrent.register_recurrent(self._library, self.assume)
        fake_ops.keep_composite_ops(self._library)
        fake_ops.add_bias_in_place(self._library)
        fake_ops.multiply_into_result(self._library)
        patch_value_reads(self._library, self.values)

    def assume(self, text: str) -> None:
        """Add an assumption to the list, once."""
        self.assumptions[text] = None

    def list_assumptions(self) -> tuple[str, ...]:
        """Return all assumptions about the steps that ran."""
        mode = (DETERMINISTIC_NOTE,) if torch.are_deterministic_algorithms_enabled() else ()
        return (*self.assumptions, *mode, *self.unfused_notes)

    def _note_attention(self, text: str) -> None:
        self.uses_attention = True
        if text:
            self.unfused_notes[text] = None

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on fake tensors, including those that FakeTensorMode does not support."""
        self.values.results.current = None
        rule = fake_ops.RESULTS.get(name)
        sparse = fake_ops.make_sparse_result(name, args, self.assume) if name in fake_ops.SPARSE_OPS else None
        if sparse is not None:
            return sparse
        out = self.values.run(func, name, args, kwargs) if rule is None else rule(args)
        fake_ops.keep_parts_alive(name, args, out)
        if name in fake_ops.DENSE_RESULTS:
            out = fake_ops.make_first_dense(out)
        if name in packed_attention.PACKED_OPS and (
            note := packed_attention.note_lengths(func, args, kwargs)
        ):
            self.assume(note)
        self.values.record_values(name, args, out)
        self.values.carry_ragged(name, args, kwargs, out)
        if rule is None:
            self.values.compute_real(func, name, args, kwargs, out)
        return out

    def list_requests(self, name: str, args: tuple[Any, ...], out: Any) -> list[workspaces.MemoryRequest]:
        """Return the memory that the operation requests besides its results, in order."""
        if name in packed_attention.BACKWARD_OPS:
            return packed_attention.request_packed_backward(args, out)
        if name in fake_ops.PRODUCT_OPS and fake_ops.has_sparse(args):
            sorting, buffers = fake_ops.sparse_product_bytes(name, args, out)
            return [
                workspaces.RESULT,
                workspaces.request_temporary(sorting),
                *map(workspaces.request_for_op, buffers),
            ]
        gpu_rule = workspaces.GPU_RULES.get(name)
        if gpu_rule is not None:
            return gpu_rule(args, out, self.capability)
        rule = workspaces.RULES.get(name)
        if rule is None:
            return []
        requests = rule(args, out)
        return self._drop_known_searches(requests) if torch.backends.cudnn.benchmark else requests

    def _drop_known_searches(
        self, requests: list[workspaces.MemoryRequest]
    ) -> list[workspaces.MemoryRequest]:
        """Drop searches for convolutions that cuDNN has seen: torch keeps its choice for each shape."""
        kept = []
        for request in requests:
            if request.kind == "search":
                if request.cause in self._searched:
                    continue
                self._searched.add(request.cause)
                self.assume(SEARCH_NOTE)
            kept.append(request)
        return kept

    def persistent_bytes(self, name: str, args: tuple[Any, ...]) -> int:
        """Return the bytes that a library allocates now and never frees: cuBLAS per thread, cuDNN dropout."""
        if name == "aten::_cudnn_rnn" and args[11] and args[12] and not self._dropout_state:
            self._dropout_state = True
            note_special_fact()
            return workspaces.dropout_state_bytes(
                self.target.multiprocessors or convolution.reference_multiprocessors()
            )
        if name not in CUBLAS_OPS:
            return 0
        thread = threading.get_ident()
        persistent = 0
        if name in (SCALED_PRODUCT, BLOCK_PRODUCT) and thread not in self._scaled_threads:
            self._scaled_threads.add(thread)
            persistent = workspaces.CUBLAS_LT
        if thread in self._cublas_threads:
            return persistent
        self._cublas_threads.add(thread)
        return persistent + workspaces.cublas_workspace_bytes(self.capability)
