"""Trace: every allocation and free of a job's first steps, with what each was for."""

from __future__ import annotations

from trimtab.spec.base import Noun

PARTS = ("weights", "gradients", "optimizer", "activations", "inputs", "workspace", "communication")
"""What memory is for, in the order of Footprint; the context is no allocation of torch's."""


class Trace(Noun, frozen=True, kw_only=True):
    """What a step asks of the caching allocator, in order. Columns have one entry an allocation."""

    order: tuple[int, ...]
    """An allocation is its number, counted from 0; a free is the number inverted (~number)."""
    sizes: tuple[int, ...]
    """Bytes asked for."""
    streams: tuple[int, ...]
    parts: tuple[int, ...]
    """Index into PARTS."""
    modules: tuple[int, ...]
    """Index into module_names."""
    ops: tuple[int, ...]
    """Index into op_names."""
    module_names: tuple[str, ...]
    op_names: tuple[str, ...]
    marks: dict[str, int]
    """Position in `order` where a phase begins: build, batch, step0, step1, step2, end."""
    parameters: int = 0
    """Numbers that are weights."""
    trainable: int = 0
    """Numbers that take a gradient."""
    recomputed: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    def faults(self) -> list[str]:
        """Columns are equally long, and every number in `order` exists."""
        count = len(self.sizes)
        columns = ("streams", "parts", "modules", "ops")
        wrong = [
            f"{name} has another length than sizes" for name in columns if len(getattr(self, name)) != count
        ]
        if self.order and not -count <= min(self.order) <= max(self.order) < count:
            wrong.append("order names an allocation that is not there")
        return wrong
