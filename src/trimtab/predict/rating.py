"""Rate an MFU against published runs of the same kind of model on the same kind of GPU.

The figures are rows of catalog/mfu.toml. Where none are known for the device, the kind of model or the
precision, there is no rating: a bare share of the peak says more than an adjective without a ground.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.catalog.tables import mfu_references
from trimtab.spec import MfuReference
from trimtab.spec.precision import DTYPE_BYTES, FLOAT16

if TYPE_CHECKING:
    from trimtab.spec import Device, Dtypes, Trace

WORDS = ("poor", "fair", "good", "excellent")
NEARLY_ALL = 0.95
"""Of a transformer's operations, the share that is matrix products and attention."""
POOR = 0.5
"""Below this share of the usual range's lower end an MFU is poor."""


def model_kind(trace: Trace) -> str | None:
    """The kind of model that a trace is of, by what it computes; None where it is none that is known.

    A mixture of experts is left out: its grouped products reach less, and no table of such runs is known.
    """
    flops: dict[str, int] = {}
    for number in trace.sequence:
        work = trace.works[number]
        flops[work.kind] = flops.get(work.kind, 0) + work.flops
        if "grouped_mm" in work.op:
            return None
    dense = flops.get("matrix", 0) + flops.get("attention", 0)
    is_transformer = flops.get("attention", 0) > 0 and dense >= NEARLY_ALL * sum(flops.values())
    return "transformer" if is_transformer else None


def reference(kind: str | None, device: Device, dtypes: Dtypes) -> MfuReference | None:
    """What published runs of such a model reach on such a device."""
    # The published runs compute in 16 bits.
    if DTYPE_BYTES[dtypes.compute] != DTYPE_BYTES[FLOAT16] or device.slice is not None:
        return None
    row = next((row for row in mfu_references() if row.model == kind and device.model in row.devices), None)
    if row is None:
        return None
    return MfuReference(low=row.low / 100, high=row.high / 100, model=row.model, figures=row.figures)


def rating(mfu: float, usual: MfuReference | None) -> str | None:
    """The word for an MFU beside the usual range; None where there is none to compare it with.

    >>> usual = MfuReference(low=0.36, high=0.46, model="transformer", figures="...")
    >>> [rating(mfu, usual) for mfu in (0.1, 0.28, 0.4, 0.5)], rating(0.4, None)
    (['poor', 'fair', 'good', 'excellent'], None)
    """
    if usual is None:
        return None
    return WORDS[sum(mfu >= limit for limit in (POOR * usual.low, usual.low, usual.high))]


def doubt_of(mfu: float | None, usual: MfuReference | None) -> str:
    """Return a warning for a predicted MFU that no published run has reached, or an empty string.

    >>> doubt_of(0.4, MfuReference(low=0.36, high=0.46, model="transformer", figures="..."))
    ''
    """
    if mfu is None or usual is None or mfu <= usual.high:
        return ""
    return (
        f"time: the predicted MFU of {mfu:.0%} is above the best published ({usual.figures}); "
        "expect the step to take longer than predicted"
    )
