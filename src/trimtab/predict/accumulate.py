"""What accumulation adds to the peak of a step that was traced without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import PARTS, Estimate

if TYPE_CHECKING:
    from trimtab.spec import Setting, Trace


def accumulated(estimate: Estimate, trace: Trace, setting: Setting) -> Estimate:
    """The estimate of a step with several micro-batches.

    From the second micro-batch on, the gradients of the earlier ones lie there all the while, also where a
    step with one micro-batch has none yet: they add what was not already counted at the peak. Each new
    gradient lies beside the sum until it is added, so the largest comes on top; a compiled backward pass
    hands over all of them at once. An upper bound, and exact where the peak lies at the end of the backward
    pass.
    """
    if setting.accumulation == 1:
        return estimate
    each = gradients(trace)
    early = max(0, sum(each) - estimate.parts.gradients)
    more = sum(each) if setting.compile else early + max(each, default=0)
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


def gradients(trace: Trace) -> list[int]:
    """Bytes of each gradient of one step."""
    begin, end = trace.marks.get("step1", 0), trace.marks.get("step2", len(trace.order))
    kind = PARTS.index("gradients")
    return [
        trace.sizes[number]
        for number in trace.order[begin:end]
        if number >= 0 and trace.parts[number] == kind
    ]
