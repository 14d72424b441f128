"""Which dtypes compute and which are stored."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import nn

from trimtab.engine.additive import batch_norms
from trimtab.spec import Precision
from trimtab.strategies import strategy_of

if TYPE_CHECKING:
    from trimtab.spec import Setting

AUTOCAST = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def configure(setting: Setting) -> None:
    """Set the TF32 flags; torch reads them when it chooses a kernel."""
    torch.backends.cuda.matmul.allow_tf32 = setting.precision is Precision.TF32
    torch.backends.cudnn.allow_tf32 = setting.precision is not Precision.FP32


def autocast_dtype(setting: Setting) -> torch.dtype | None:
    """Return the dtype of autocast, or None where there is none. FSDP casts by itself."""
    return None if strategy_of(setting).is_sharded else AUTOCAST.get(setting.precision)


def cast_weights(model: nn.Module, setting: Setting) -> None:
    """Store all weights in bf16 where the precision says so; buffers stay as the model made them."""
    if setting.precision is Precision.BF16_TRUE:
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dtype is not torch.bfloat16:
                parameter.data = parameter.data.to(torch.bfloat16)


def widen_norms(model: nn.Module) -> None:
    """Let BatchNorm layers compute with fp32 weights, where fsdp gathers these in half precision.

    Their running statistics are fp32, and torch refuses weights of another dtype beside them.
    """
    for layer in batch_norms(model):
        if not issubclass(type(layer), _WideWeights):
            layer.__class__ = _with_wide_weights(type(layer))  # type: ignore[arg-type]


class _WideWeights:
    """Stands before the class of a BatchNorm layer; its weights are read in fp32."""

    _parameters: dict[str, torch.Tensor | None]
    _buffers: dict[str, torch.Tensor | None]

    @property
    def weight(self) -> torch.Tensor | None:
        """The weight, in the dtype of the running statistics."""
        return self._widened("weight")

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias, in the dtype of the running statistics."""
        return self._widened("bias")

    def _widened(self, name: str) -> torch.Tensor | None:
        parameter = self._parameters.get(name)
        half = parameter is not None and parameter.dtype in (torch.float16, torch.bfloat16)
        # A sharded parameter is only looked at, never computed with.
        if parameter is None or not half or hasattr(parameter, "full_tensor"):
            return parameter
        running = self._buffers.get("running_mean")
        return parameter.to(torch.float32 if running is None else running.dtype)


@functools.cache
def _with_wide_weights(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer of that class whose weights are read in fp32."""
    return type(kind.__name__, (_WideWeights, kind), {"__module__": kind.__module__})
