"""What a step holds at every moment, by what it is for: the curve whose highest point the estimate names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.predict.memory import rounded
from trimtab.spec import PARTS, Noun

if TYPE_CHECKING:
    from trimtab.spec import Trace

MOMENTS = 240
"""Kept of a step: as many as a figure can show."""


class Timeline(Noun, frozen=True, kw_only=True):
    """Bytes of live tensors through one step, at some moments of it."""

    moments: tuple[int, ...]
    """How many allocations and frees of the step have passed."""
    held: tuple[tuple[int, ...], ...]
    """One a part, in the order of PARTS: bytes at each moment."""
    total: int
    """Allocations and frees in the step."""
    peak: int
    """Which of the moments holds most."""
    operation: str
    """That was running then."""
    first_gradient: int | None = None
    """When the first gradient was written; None where the step makes none."""

    def faults(self) -> list[str]:
        """Every part has a value for every moment."""
        wrong = [] if len(self.held) == len(PARTS) else ["held has another length than there are parts"]
        return wrong + [
            f"{name} has another length than moments"
            for name, one in zip(PARTS, self.held, strict=False)
            if len(one) != len(self.moments)
        ]


def timeline(trace: Trace, moments: int = MOMENTS) -> Timeline | None:
    """The last step of a trace, in which nothing is new any more; None where the trace has none.

    The step is cut into stretches, and of each the moment that holds most is kept: no peak is lost.
    """
    begin, end = trace.marks.get("step2"), trace.marks.get("end")
    if begin is None or end is None or end <= begin:
        return None
    now = _held_before(trace, begin)
    stretch = max(1, -(-(end - begin) // moments))
    kept: list[tuple[int, tuple[int, ...]]] = []
    first = None
    gradients = PARTS.index("gradients")
    best = -1
    for position in range(begin, end):
        number = trace.order[position]
        fresh = number >= 0
        number = number if fresh else ~number
        part = trace.parts[number]
        now[part] += rounded(trace.sizes[number]) if fresh else -rounded(trace.sizes[number])
        if fresh and part == gradients and first is None:
            first = position - begin + 1
        if (position - begin) % stretch == 0:
            best = -1
            kept.append((position - begin + 1, tuple(now)))
        if sum(now) > best:
            best = sum(now)
            kept[-1] = (position - begin + 1, tuple(now))
    peak = max(range(len(kept)), key=lambda index: sum(kept[index][1]))
    return Timeline(
        moments=tuple(at for at, _ in kept),
        held=tuple(zip(*(held for _, held in kept), strict=True)),
        total=end - begin,
        peak=peak,
        operation=_operation(trace, begin + kept[peak][0] - 1),
        first_gradient=first,
    )


def _held_before(trace: Trace, begin: int) -> list[int]:
    """Bytes by part when the step begins."""
    held = [0] * len(PARTS)
    for number in trace.order[:begin]:
        one = number if number >= 0 else ~number
        held[trace.parts[one]] += rounded(trace.sizes[one]) if number >= 0 else -rounded(trace.sizes[one])
    return held


def _operation(trace: Trace, position: int) -> str:
    number = trace.order[position]
    return trace.op_names[trace.ops[number if number >= 0 else ~number]].removeprefix("aten::")
