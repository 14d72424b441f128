"""Apply a precision with torch: dtypes, TF32 flags, autocast and weight casts (see `spec/precision.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trimtab.spec.precision import FLOAT32
from trimtab.strategies import strategy_of

if TYPE_CHECKING:
    from torch import nn

    from trimtab.spec import Dtypes, Setting

HALF = (torch.float16, torch.bfloat16)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name.

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def set_tf32_flags(dtypes: Dtypes) -> None:
    """Set the TF32 flags; torch reads them when it chooses a kernel."""
    torch.backends.cuda.matmul.allow_tf32 = dtypes.tf32_products
    torch.backends.cudnn.allow_tf32 = dtypes.tf32_convolutions


def autocast_dtype(setting: Setting) -> torch.dtype | None:
    """Return the autocast dtype; None without autocast, and for FSDP, which casts by itself."""
    name = setting.dtypes.autocast
    return None if name is None or strategy_of(setting).is_sharded else torch_dtype(name)


def cast_weights(model: nn.Module, dtypes: Dtypes) -> None:
    """Cast weights to the dtypes of the precision; buffers are not changed."""
    if dtypes.weights == dtypes.frozen_weights == FLOAT32:
        # Keep weights that the job built in another dtype.
        return
    for parameter in model.parameters():
        dtype = torch_dtype(dtypes.weights if parameter.requires_grad else dtypes.frozen_weights)
        if parameter.is_floating_point() and parameter.dtype is not dtype:
            parameter.data = parameter.data.to(dtype)
