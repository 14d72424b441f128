"""Which dtypes compute and which are stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trimtab.spec import Precision, Strategy

if TYPE_CHECKING:
    from torch import nn

    from trimtab.spec import Setting

AUTOCAST = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
SHARDED = (Strategy.FSDP, Strategy.HSDP)


def configure(setting: Setting) -> None:
    """Set the TF32 flags; torch reads them when it chooses a kernel."""
    torch.backends.cuda.matmul.allow_tf32 = setting.precision is Precision.TF32
    torch.backends.cudnn.allow_tf32 = setting.precision is not Precision.FP32


def autocast_dtype(setting: Setting) -> torch.dtype | None:
    """Return the dtype of autocast, or None where there is none. FSDP casts by itself."""
    return None if setting.strategy in SHARDED else AUTOCAST.get(setting.precision)


def cast_weights(model: nn.Module, setting: Setting) -> None:
    """Store all weights in bf16 where the precision says so; buffers stay as the model made them."""
    if setting.precision is Precision.BF16_TRUE:
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dtype is not torch.bfloat16:
                parameter.data = parameter.data.to(torch.bfloat16)
