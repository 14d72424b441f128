"""Which dtypes compute, and the loss scale that fp16 needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.spec import Allocator, Precision, Strategy
from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.spec import Setting

LEAST_SCALE = 2.0**-10
MOST_SCALE = 2.0**24
GROWS_AFTER = 2000
"""Updates without an overflow before the loss scale is doubled."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


class LossScale(Noun, frozen=True, kw_only=True):
    """What a loss is multiplied by so that fp16 gradients do not vanish; 1 for every other precision.

    Gradients are summed over ranks before they are judged, so that all ranks have the same scale always.
    """

    value: float = 1.0
    good: int = 0
    """Updates since it last changed."""

    @property
    def can_shrink(self) -> bool:
        """Whether a gradient that is not finite may be an overflow of this scale."""
        return self.value > LEAST_SCALE and self.value != 1.0

    def halved(self) -> LossScale:
        """After an overflow."""
        return LossScale(value=self.value / 2)

    def after_good(self) -> LossScale:
        """After an update: doubled where there was no overflow for long."""
        if self.value == 1.0:
            return self
        if self.good + 1 < GROWS_AFTER or self.value >= MOST_SCALE:
            return LossScale(value=self.value, good=self.good + 1)
        return LossScale(value=self.value * 2)


def first_scale(precision: Precision) -> LossScale:
    """The scale that a run begins with."""
    return LossScale(value=2.0**16) if precision is Precision.FP16 else LossScale()


def allocator_variables(setting: Setting, env: Mapping[str, str]) -> dict[str, str]:
    """What has to be in the environment before CUDA starts, so that the allocator is the planned one.

    >>> from trimtab.spec import Setting
    >>> plan = Setting(micro_batch=1, global_batch=1, allocator=Allocator.EXPANDABLE)
    >>> allocator_variables(plan, {})["PYTORCH_CUDA_ALLOC_CONF"]
    'expandable_segments:True'
    """
    if setting.allocator is not Allocator.EXPANDABLE:
        return {}
    changed = {}
    for name in ALLOCATOR_VARIABLES:
        there = env.get(name, "")
        if "expandable_segments" not in there:
            changed[name] = f"{there},{_EXPANDABLE}" if there else _EXPANDABLE
    return changed


def configure(setting: Setting) -> None:
    """TF32 as the precision says; the flags are read when a kernel is chosen."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = setting.precision is Precision.TF32
    torch.backends.cudnn.allow_tf32 = setting.precision is not Precision.FP32


def autocast_dtype(setting: Setting) -> Any:
    """The dtype of autocast; None where there is none. FSDP casts by itself."""
    from trimtab.trace.step import AUTOCAST

    if setting.strategy in (Strategy.FSDP, Strategy.HSDP):
        return None
    return AUTOCAST.get(setting.precision)


def cast_frozen(model: Any, setting: Setting) -> int:
    """Keep frozen weights in the dtype in which autocast would use them anyway; bytes saved.

    Only weights of linear layers and convolutions: autocast casts these at every use, so that the results
    stay the same bit for bit, and the casts are saved too. Weights that another kind of module shares stay.
    """
    import torch
    from torch import nn

    half = autocast_dtype(setting)
    if half is not torch.bfloat16:
        return 0
    cast, keep = {}, set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd) and not parameter.requires_grad:
                cast[id(parameter)] = parameter
            else:
                keep.add(id(parameter))
    saved = 0
    for key, parameter in cast.items():
        if key not in keep and parameter.dtype is torch.float32:
            saved += parameter.numel() * 2
            parameter.data = parameter.data.to(half)
    return saved
