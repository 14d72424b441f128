"""What accumulation adds to the peak of a step that was traced without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import PARTS, Estimate

if TYPE_CHECKING:
    from trimtab.spec import Setting, Trace


def accumulated(estimate: Estimate, trace: Trace, setting: Setting) -> Estimate:
    """The estimate of a step with several micro-batches.

    From the second micro-batch on, the gradients of the earlier ones lie there all the while, also where a
    step with one micro-batch has none yet. At most they add what was not already counted at the peak: an
    upper bound, and exact where the peak lies before the backward pass.
    """
    if setting.accumulation == 1:
        return estimate
    more = max(0, gradient_bytes(trace) - estimate.parts.gradients)
    if not more:
        return estimate
    band = estimate.band
    return estimate.replace(
        allocated_bytes=estimate.allocated_bytes + more,
        reserved_bytes=estimate.reserved_bytes + more,
        process_bytes=estimate.process_bytes + more,
        parts=estimate.parts.replace(gradients=estimate.parts.gradients + more),
        band=band.replace(low_bytes=band.low_bytes, high_bytes=band.high_bytes + more),
        fits=None if estimate.capacity_bytes is None else band.high_bytes + more <= estimate.capacity_bytes,
        assumptions=(
            *estimate.assumptions,
            "gradients lie beside the activations while micro-batches add up",
        ),
    )


def gradient_bytes(trace: Trace) -> int:
    """All gradients of one step together."""
    begin, end = trace.marks.get("step1", 0), trace.marks.get("step2", len(trace.order))
    kind = PARTS.index("gradients")
    return sum(
        trace.sizes[number]
        for number in trace.order[begin:end]
        if number >= 0 and trace.parts[number] == kind
    )
