"""What accumulation adds to the peak of a step that was traced without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.spec import PARTS, Estimate
from trimtab.strategies import strategy_of
from trimtab.strategies.limits import keeps_whole

if TYPE_CHECKING:
    from trimtab.spec import Setting, Trace


def accumulated(estimate: Estimate, trace: Trace, setting: Setting) -> Estimate:
    """The estimate of a step with several micro-batches.

    From the second micro-batch on, the gradients of the earlier ones lie there all the while, also where a
    step with one micro-batch has none yet. Each new gradient lies beside the sum until it is added; a
    compiled backward pass hands over all of them at once. Under fsdp, small gradients stay whole, in fp32,
    until the last micro-batch.
    """
    if setting.accumulation == 1:
        return estimate
    more = max(sum(gradients(one)) if setting.compile else _risen(one) for one in trace.ranks)
    if strategy_of(setting).is_sharded and keeps_whole(trace.trainable, estimate.capacity_bytes or 0):
        more += 4 * trace.trainable
    if not more:
        return estimate
    band = estimate.band
    risen = estimate.replace(
        allocated_bytes=estimate.allocated_bytes + more,
        reserved_bytes=estimate.reserved_bytes + more,
        process_bytes=estimate.process_bytes + more,
        parts=estimate.parts.replace(gradients=estimate.parts.gradients + more),
        gradients_bytes=max(estimate.gradients_bytes or 0, estimate.parts.gradients + more),
        band=band.replace(low_bytes=band.low_bytes, high_bytes=band.high_bytes + more),
        assumptions=(
            *estimate.assumptions,
            "gradients lie beside the activations while micro-batches add up",
        ),
    )
    return risen if risen.capacity_bytes is None else risen.judge_quickly(risen.capacity_bytes)


def gradients(trace: Trace) -> list[int]:
    """Bytes of each gradient of one step."""
    begin, end = trace.marks.get("step1", 0), trace.marks.get("step2", len(trace.order))
    kind = PARTS.index("gradients")
    return [
        trace.sizes[number]
        for number in trace.order[begin:end]
        if number >= 0 and trace.parts[number] == kind
    ]


def _risen(trace: Trace) -> int:
    """How much higher the peak of a step is when the gradients of earlier micro-batches are there."""
    begin, end = trace.marks.get("step1", 0), trace.marks.get("step2", len(trace.order))
    kind = PARTS.index("gradients")
    whole = sum(gradients(trace))
    live = own = plain = summed = 0
    for position, number in enumerate(trace.order[:end]):
        allocation = number if number >= 0 else ~number
        size = trace.sizes[allocation] if number >= 0 else -trace.sizes[allocation]
        is_gradient = trace.parts[allocation] == kind
        live += size
        # A gradient counts for itself while it is new; then it is a part of the sum.
        new = size if is_gradient and number >= 0 else 0
        own += size if is_gradient else 0
        if position >= begin:
            plain = max(plain, live)
            summed = max(summed, live - own + new + whole)
    return max(0, summed - plain)
