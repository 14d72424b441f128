"""Which dtypes compute and which are stored: the rows of `spec/precision.py`, carried out with torch."""

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
    """Return the dtype that torch calls so.

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that torch has for a dtype, without the module: bfloat16."""
    return str(dtype).removeprefix("torch.")


def configure(dtypes: Dtypes) -> None:
    """Set the TF32 flags; torch reads them when it chooses a kernel."""
    torch.backends.cuda.matmul.allow_tf32 = dtypes.tf32_products
    torch.backends.cudnn.allow_tf32 = dtypes.tf32_convolutions


def autocast_dtype(setting: Setting) -> torch.dtype | None:
    """Return the dtype of autocast, or None where there is none. FSDP casts by itself."""
    name = setting.dtypes.autocast
    return None if name is None or strategy_of(setting).is_sharded else torch_dtype(name)


def cast_weights(model: nn.Module, dtypes: Dtypes) -> None:
    """Store weights in other dtypes than float32 where the precision says so; buffers stay as they are."""
    if dtypes.weights == dtypes.frozen_weights == FLOAT32:
        # Weights that a job builds in another dtype stay in it.
        return
    for parameter in model.parameters():
        dtype = torch_dtype(dtypes.weights if parameter.requires_grad else dtypes.frozen_weights)
        if parameter.is_floating_point() and parameter.dtype is not dtype:
            parameter.data = parameter.data.to(dtype)
