"""Record a script's operations on the fake GPU, and let its work on the CPU run for real.

A job is traced with all of its tensors fake. A script also reads files, tokenises and collates, and these
steps need values. So only tensors on the GPU are fake here, and the parameters of models, wherever they are.
Everything else is an ordinary tensor. What a script copies back from the GPU becomes ordinary as well, with
the values that are known, or with assumed ones.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from trimtab.spec import Work
from trimtab.trace.data_dependent import REAL_ATTRIBUTE
from trimtab.trace.fake_ops import make_sparse
from trimtab.trace.recorder import Recorder

KNOWN_NUMBERS = 2**20
"""Tensors up to this many entries keep their values when they are copied to the GPU."""
TO_COPY = torch.ops.aten._to_copy.default
COPY = torch.ops.aten.copy_.default
WAIT = Work(op="aten::_to_copy", kind="wait", dtype="")
NUMPY_DTYPES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


class ScriptRecorder(Recorder):
    """A recorder that leaves tensors on the CPU alone."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
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
        before, given, records_work = self.part, args, self.records_work
        # Parameters that are still on the CPU, or stay there, are fake as well.
        self.records_work = records_work and (not is_fake or _uses_gpu(args, list(kwargs.values())))
        if not is_fake:
            # Without a fake input, torch would compute a constant on the GPU.
            args = tree_map(self._to_fake, args)
            if func is TO_COPY:
                self.part = "inputs"
        elif any(type(value) is torch.Tensor for value in args):
            args = tuple(map(self._to_fake, args))
        try:
            with self.fake_mode:
                out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.part, self.records_work = before, records_work
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

    def _record_op(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        if _uses_gpu(args, out):
            super()._record_op(name, args, out)

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
        if isinstance(out, FakeTensor) and real.numel() <= KNOWN_NUMBERS and not real.is_floating_point():
            with _disable_current_modes():
                setattr(out, REAL_ATTRIBUTE, real.detach().to(out.dtype).clone())


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
