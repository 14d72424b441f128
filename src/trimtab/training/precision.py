"""The loss scale that fp16 needs, and the environment of the planned allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import Allocator
from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.spec import Dtypes, Setting

LEAST_SCALE = 2.0**-10
MOST_SCALE = 2.0**24
GROWS_AFTER = 2000
"""Updates without an overflow before the loss scale is doubled."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


class LossScale(Noun, frozen=True, kw_only=True):
    """What a loss is multiplied by so that fp16 gradients do not vanish; 1 where the loss is not scaled.

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


def first_scale(dtypes: Dtypes) -> LossScale:
    """The scale that a run begins with."""
    return LossScale(value=2.0**16) if dtypes.scales_loss else LossScale()


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
