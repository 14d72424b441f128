"""Record a script's operations on the fake GPU, and let its work on the CPU run for real.

A job is traced with all of its tensors fake. A script also reads files, tokenises and collates, and these
steps need values. So only tensors on the GPU are fake here, and the parameters of models, wherever they are.
Everything else is an ordinary tensor. What a script copies back from the GPU becomes ordinary as well, with
the values that are known, or with assumed ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from trimtab.scripts.repeated_ops import (
    RepeatedOp,
    can_repeat,
    describe_results,
    make_op_key,
    make_result,
)
from trimtab.spec import Work
from trimtab.spec.trace import SHARDED, WRAPPED
from trimtab.trace.data_dependent import MAX_REAL_FLOATS, REAL_ATTRIBUTE
from trimtab.trace.fake_ops import make_sparse
from trimtab.trace.recorder import (
    DEVICE,
    META,
    Recorder,
    find_op_name,
    is_called_by_autograd,
    is_view_op,
    list_works,
)

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from trimtab.trace.kernels import Kernels

KNOWN_NUMBERS = 2**20
"""Tensors up to this many entries keep their values when they are copied to the GPU."""
TO_COPY = torch.ops.aten._to_copy.default
COPY = torch.ops.aten.copy_.default
SHARDING_OPS = {"fsdp::all_gather_copy_in", "fsdp::chunk_cat"}
"""Operations on the parameters of a block before they are gathered, and on gradients before a reduction."""
UNSEEN: Any = object()
"""Stands for an operation that was not run before."""
FLOAT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FEW_FLOATS = 1024
"""Floating-point numbers that keep their values, such as random ones from which places in samples follow."""
WAIT = Work(op="aten::_to_copy", kind="wait", dtype="")
NUMPY_DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


class ScriptRecorder(Recorder):
    """A recorder that leaves tensors on the CPU alone."""

    def __init__(self, kernels: Kernels, fake_mode: FakeTensorMode) -> None:
        super().__init__(kernels, fake_mode)
        self._repeated: dict[Any, RepeatedOp | None] = {}
        self._watched: list[Any] = []
        self.has_written_weights = False
        """Whether an operation has changed a watched parameter in place."""

    def watch_weights(self, parameters: list[Any]) -> None:
        """Note from now on whether one of these parameters is changed; an empty list ends that."""
        self._watched, self.has_written_weights = parameters, False

    def __torch_dispatch__(  # noqa: PLR0911 - one way out for each kind of tensor
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs = kwargs or {}
        if DTensor in types and not self.paused:
            # It calls the operation again with its local tensor.
            self._add_python_work(WRAPPED, sum(isinstance(leaf, DTensor) for leaf in tree_leaves(args)))
            return NotImplemented
        if torch.is_inference_mode_enabled() and func._can_decompose():
            # Here torch passes `to`, `linear` and others as they are; elsewhere only what they consist of.
            with self:
                return func.decompose(*args, **kwargs)
        device = kwargs.get("device")
        is_fake = FakeTensor in types
        is_plain = not is_fake and all(map(_is_plain, types))
        if is_plain and (device is None or torch.device(device).type != "cuda"):
            if kwargs.get("pin_memory"):
                kwargs = kwargs | {"pin_memory": False}
            return func(*args, **kwargs)
        copy = self._find_copy(func, args, device, is_fake=is_fake)
        if copy is not None:
            return copy(*args, **kwargs)
        if is_fake and not _uses_gpu(args, list(kwargs.values())):
            return self._run_on_cpu(func, types, args, kwargs)
        if self._watched and func._schema.is_mutable:
            self._note_write(args)
        if is_fake and len(types) == 1 and not self.paused:
            return self._run_kept(func, types, args, kwargs)
        return self._run_fake(func, types, args, kwargs)

    def _note_write(self, args: tuple[Any, ...]) -> None:
        """Note whether an operation that changes its first argument, or a list of them, changes weights."""
        changed = args[0] if isinstance(args[0], list | tuple) else args[:1]
        memory = {tensor.untyped_storage()._cdata for tensor in changed if isinstance(tensor, FakeTensor)}
        watched = (getattr(tensor, "_local_tensor", tensor) for tensor in self._watched)
        if any(tensor.untyped_storage()._cdata in memory for tensor in watched):
            self.watch_weights([])
            self.has_written_weights = True

    def _run_fake(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on fake tensors; ordinary ones among its inputs become fake."""
        before, given = self.part, args
        if find_op_name(func) in SHARDING_OPS:
            self._add_python_work(SHARDED, len(args[0]))
        if FakeTensor not in types:
            # Without a fake input, torch would compute a constant on the GPU.
            args = tree_map(self._to_fake, args)
            if func is TO_COPY:
                self.part = "inputs"
        elif any(type(value) is torch.Tensor for value in args):
            args = tuple(map(self._to_fake, args))
        try:
            with self.fake_mode:
                out = self.run_operation(func, types, args, kwargs)
        finally:
            self.part = before
        if func is TO_COPY and type(given[0]) is torch.Tensor:
            self._keep_values(given[0], out)
        return out

    def _find_copy(self, func: Any, args: tuple[Any, ...], device: Any, *, is_fake: bool) -> Any:
        """Return what copies between the CPU and the GPU, if this is a copy that needs more than torch's."""
        if func is COPY and type(args[0]) is torch.Tensor:
            return self._copy_into_host
        if func is not TO_COPY:
            return None
        if not is_fake:
            return None if args[0].layout is torch.strided else self._copy_sparse_to_gpu
        to_host = device is not None and torch.device(device).type == "cpu"
        return self._copy_to_host if to_host and args[0].fake_device.type == "cuda" else None

    def _run_on_cpu(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on parameters that are on the CPU: nothing of it is recorded."""
        before, self.records_work = self.records_work, False
        try:
            return self._run_fake(func, types, args, kwargs)
        finally:
            self.records_work = before

    def record_op(self, name: str, args: tuple[Any, ...], out: Any, **known: Any) -> None:
        """Record the allocations of an operation on the GPU."""
        if _uses_gpu(args, out):
            super().record_op(name, args, out, **known)

    def _run_kept(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer an operation on fake tensors from an earlier one with the same inputs, if there was one."""
        key = make_op_key(func, args, kwargs)
        if key is None:
            return self._run_fake(func, types, args, kwargs)
        repeated = self._repeated.get(key, UNSEEN)
        if repeated is None:
            return self._run_fake(func, types, args, kwargs)
        if repeated is UNSEEN:
            out = self._run_fake(func, types, args, kwargs)
            self._repeated[key] = self._keep_op(func, args, kwargs, out)
            return out
        return self._repeat(func, args, kwargs, repeated)

    def _keep_op(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> RepeatedOp | None:
        if not can_repeat(func) or (described := describe_results(args, out)) is None:
            return None
        name = find_op_name(func)
        works = list_works(func, name, args, kwargs, out)
        # Whether torch may use TF32 can change between two calls.
        fixed = not any(work.dtype in ("float32", "tf32") and work.flops for work in works)
        recipes, container = described
        return RepeatedOp(
            recipes=recipes,
            container=container,
            works=tuple(works) if fixed else None,
            requests=tuple(self.kernels.list_requests(name, args, out)),
            is_view=is_view_op(func),
        )

    def _repeat(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], repeated: RepeatedOp) -> Any:
        """Make the results of a repeated operation, and record what it needs."""
        results = [make_result(recipe, args) for recipe in repeated.recipes]
        out: Any = results[0] if repeated.container is None else repeated.container(results)
        name = find_op_name(func)
        if self.records_work:
            works = repeated.works
            for work in list_works(func, name, args, kwargs, out) if works is None else works:
                self.add_work(work)
        if name == "aten::add" and is_called_by_autograd() and self.reuse_memory(args[0], out):
            return out
        if not repeated.is_view:
            self.record_op(name, args, out, leaves=results, requests=repeated.requests)
        return out

    def _add_python_work(self, name: str, tensors: int) -> None:
        """Record that the host spends time on so many tensors in Python."""
        if self.records_work:
            self.add_work(Work(op=name, kind="call", dtype="", kernels=0, dims=(tensors,)))

    def _to_fake(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return value
        with _disable_current_modes():
            fake = self.fake_mode.from_tensor(value)
        self._keep_values(value, fake)
        return fake

    def _copy_sparse_to_gpu(
        self, tensor: torch.Tensor, *, device: Any, dtype: torch.dtype | None = None, **_: Any
    ) -> Any:
        """Copy the positions and values of a sparse tensor; all layouts become coordinates."""
        with _disable_current_modes():
            entries = tensor.to_sparse_coo()
            positions, values = entries._indices(), entries._values().to(dtype or tensor.dtype)
            in_order = entries.is_coalesced()
        positions, values = (
            self.__torch_dispatch__(TO_COPY, (), (part,), {"device": device}) for part in (positions, values)
        )
        with self.fake_mode:
            return make_sparse(positions, values, tensor.shape, in_order=in_order)

    def _copy_to_host(self, tensor: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        """Return an ordinary tensor with the values of one on the GPU, as far as they are known."""
        if self.records_work:
            self.add_work(WAIT)
        return make_real(tensor, dtype)

    def _copy_into_host(self, target: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        with _disable_current_modes():
            return target.copy_(make_real(source, None) if isinstance(source, FakeTensor) else source)

    @staticmethod
    def _keep_values(real: torch.Tensor, out: Any) -> None:
        """Keep the values of a small tensor, so that lengths, masks and positions stay known."""
        if not isinstance(out, FakeTensor) or real.numel() > KNOWN_NUMBERS or real.device.type != "cpu":
            return
        with _disable_current_modes():
            if not real.is_floating_point() or _is_worth_keeping(real):
                setattr(out, REAL_ATTRIBUTE, real.detach().to(out.dtype).clone())


def _is_worth_keeping(real: torch.Tensor) -> bool:
    """Return whether floating-point numbers are a mask, labels, lengths, a flag, or a few of any kind.

    Many equal numbers are not: a buffer that begins with zeros changes with what the model computes.
    """
    if real.numel() > MAX_REAL_FLOATS or real.dtype not in FLOAT_DTYPES or real.layout is not torch.strided:
        return False
    if real.numel() > FEW_FLOATS and not bool((real == real.round()).all()):
        return False
    return real.numel() <= 1 or bool((real != real.flatten()[0]).any())


def _uses_gpu(*values: Any) -> bool:
    """Return whether one of the inputs or outputs of an operation is on the GPU."""
    for value in values:
        if isinstance(value, FakeTensor):
            if value.fake_device.type == "cuda":
                return True
        elif isinstance(value, list | tuple):
            if _uses_gpu(*value):
                return True
        elif isinstance(value, torch.device) and value.type == "cuda":
            return True
    return False


def _is_plain(kind: Any) -> bool:
    """Return whether tensors of a class do nothing of their own: a parameter on `meta`, for example."""
    is_plain: bool = kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return is_plain


def make_real(tensor: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """Return an ordinary tensor for a fake one: its known values, or ones for numbers and zeros for indices.

    Memory of large tensors is only reserved: the system provides it when something is read or written.
    """
    dtype = dtype or tensor.dtype
    known = getattr(tensor, REAL_ATTRIBUTE, None)
    value = getattr(tensor, "_trimtab_value", None)
    with _disable_current_modes():
        if known is not None:
            return known.to(dtype).clone()
        shape = tuple(tensor.shape)
        if math.prod(shape) > KNOWN_NUMBERS or tensor.layout is not torch.strided:
            return torch.from_numpy(np.zeros(shape, NUMPY_DTYPES[dtype.itemsize])).view(dtype)
        filler = value if value is not None else float(dtype.is_floating_point)
        return torch.full(shape, filler, dtype=dtype)
