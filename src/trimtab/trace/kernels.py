"""What a CUDA kernel would do that shapes alone do not show: which one runs, and what it takes for itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from trimtab.catalog.describe import capability
from trimtab.trace import attention, convolution, recurrent, shapes, sparse, workspace
from trimtab.trace.autocast import Autocast, casts_last_argument_first
from trimtab.trace.values import Values

if TYPE_CHECKING:
    from trimtab.spec import Device

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
        shapes.keep_whole(self._library)
        shapes.add_bias_in_place(self._library)

    def assume(self, text: str) -> None:
        """Note an assumption once."""
        self.assumptions[text] = None

    def _lose(self, text: str) -> None:
        self.attended = True
        if text:
            self.unfused[text] = None

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, with an answer for those whose result depends on values."""
        result = shapes.RESULTS.get(name)
        known = sparse.result(name, args, self.assume) if name in sparse.NAMES else None
        if known is not None:
            return known
        out = self.values.run(func, name, args, kwargs) if result is None else result(args)
        sparse.keep_parts(name, args, out)
        if name in shapes.DENSE_RESULTS:
            out = shapes.with_dense_first(out)
        self.values.learn(name, args, out)
        self.values.trail(name, args, kwargs, out)
        if result is None:
            self.values.follow(func, name, args, kwargs, out)
        return out

    def takes(self, name: str, args: tuple[Any, ...], out: Any) -> list[workspace.Take]:
        """What the operation asks the allocator for beside its results, and in what order."""
        if name in sparse.PRODUCTS and sparse.has_sparse(args):
            sorting, pieces = sparse.product_bytes(name, args, out)
            return [workspace.RESULT, workspace.brief(sorting), *map(workspace.hold, pieces)]
        by_gpu = workspace.BY_GPU.get(name)
        if by_gpu is not None:
            return by_gpu(args, out, self.capability)
        rule = workspace.RULES.get(name)
        return rule(args, out) if rule else []

    def kept(self, name: str, args: tuple[Any, ...]) -> int:
        """Bytes that a library takes now and keeps: cuBLAS once a thread, cuDNN's dropout once."""
        if name == "aten::_cudnn_rnn" and args[11] and args[12] and not self._dropout_state:
            self._dropout_state = True
            return workspace.dropout_state(self.target.multiprocessors or convolution.multiprocessors())
        thread = threading.get_ident()
        if name not in CUBLAS_OPS or thread in self._cublas_threads:
            return 0
        self._cublas_threads.add(thread)
        return workspace.cublas(self.capability)
