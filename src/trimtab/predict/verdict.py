"""Say whether an estimate fits a capacity: fits, fits only by releasing cached blocks, or does not fit.

    found.judge_quickly(capacity_bytes)    # by what torch reserves on a large device
    judge_fully(found, trace, setting)     # and, where that is too much, by replays within the capacity

All three verdicts are by the upper end of the band. The band is a share of the predicted process memory, and
the same share is added to the smallest capacity that runs: where the band ends 5 % above the prediction, a
job fits tightly if it is predicted to run on a device that has 5 % less to give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.catalog.facts import fallback_facts
from trimtab.predict.capacity import least_capacity, run_within, training_steps
from trimtab.predict.estimate import rank_memory
from trimtab.spec import Allocator, Verdict
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from trimtab.predict.capacity import Run, TrainingSteps
    from trimtab.spec import Estimate, Setting, Trace


def judge_fully(  # noqa: PLR0913 - an estimate with what it was made from, and what is asked
    found: Estimate,
    trace: Trace,
    setting: Setting,
    *,
    limit_bytes: int | None = None,
    always_least: bool = False,
    explain: bool = True,
) -> Estimate:
    """Judge by replays within the capacity, where what torch would reserve is beyond it.

    Args:
        found: the estimate of the setting, with everything that is added to its trace.
        trace: of the setting, or of the one that it was derived from.
        setting: the one that was estimated.
        limit_bytes: how much may be used, where that is less than the capacity of the estimate.
        always_least: find `least_bytes` also where it fits, and where nothing can make it fit.
        explain: try expandable segments too, for `verdict_reason`.
    """
    capacity = found.capacity_bytes
    limit = capacity if limit_bytes is None else limit_bytes
    if capacity is None or limit is None:
        return found
    fits = found.band.high_bytes <= limit
    if fits and not always_least:
        return found.judge_quickly(capacity)
    usable = _usable(found, limit)
    if found.least_possible_bytes > usable and not always_least:
        return _refused(found, limit)
    ranks = _ranks(found, trace, setting)
    expandable = setting.allocator is Allocator.EXPANDABLE
    least = min(found.process_bytes, max(one.least(expandable=expandable) for one in ranks))
    if fits:
        return found.judge_quickly(capacity).replace(least_bytes=least)
    if least > usable:
        found = _refused(found, limit, least)
    else:
        runs = [one.run(usable, expandable=expandable) for one in ranks]
        releases = max(one.releases for one in runs)
        found = found.replace(
            fits=True,
            verdict=Verdict.FITS_TIGHT,
            verdict_reason=_tight_reason(found, limit, least, releases),
            least_bytes=least,
            releases_per_step=releases,
        )
    if explain and not expandable:
        return found.replace(verdict_reason=f"{found.verdict_reason}; {_expandable(found, ranks, limit)}")
    return found


def _usable(found: Estimate, limit: int) -> int:
    """The most process memory that stays within a limit with its band."""
    return limit * found.process_bytes // max(1, found.band.high_bytes)


@dataclass(frozen=True)
class _Rank:
    """One kind of rank: what its trace asks for, and what it has beside that."""

    steps: TrainingSteps
    beside_bytes: int
    """The context, micro-batches on their way through a pipeline, gradients that add up."""

    def least(self, *, expandable: bool) -> int:
        return least_capacity(self.steps, expandable=expandable) + self.beside_bytes

    def reserved(self, *, expandable: bool) -> int:
        return run_within(self.steps, None, expandable=expandable).reserved_bytes + self.beside_bytes

    def run(self, usable: int, *, expandable: bool) -> Run:
        return run_within(self.steps, max(0, usable - self.beside_bytes), expandable=expandable)


def _ranks(found: Estimate, trace: Trace, setting: Setting) -> list[_Rank]:
    """Every kind of rank. What accumulation adds is the same for all of them."""
    facts = fallback_facts().memory.with_context(found.parts.context)
    replayed = [rank_memory(one, setting, facts) for one in trace.ranks]
    added = found.process_bytes - max(one.process_bytes for one, _ in replayed)
    return [
        _Rank(training_steps(one), memory.process_bytes - alone.reserved_bytes + max(0, added))
        for one, (memory, alone) in zip(trace.ranks, replayed, strict=True)
    ]


def _refused(found: Estimate, limit: int, least: int | None = None) -> Estimate:
    need = found.with_band(found.least_possible_bytes if least is None else least)
    why = (
        f"{format_bytes(found.allocated_bytes)} allocated, {format_bytes(found.reserved_bytes)} reserved; "
        f"even after releasing cached blocks it needs {format_bytes(need)}{' or more' * (least is None)} "
        f"of {format_bytes(limit)}, with context and band"
    )
    return found.replace(
        fits=False,
        verdict=Verdict.DOES_NOT_FIT,
        verdict_reason=why,
        least_bytes=least,
        releases_per_step=None,
    )


def _tight_reason(found: Estimate, limit: int, least: int, releases: float) -> str:
    often = "in the first steps only, and later steps run at full speed"
    if releases:
        times = "about once" if round(releases) <= 1 else f"about {round(releases)} times"
        often = (
            f"{times} in every step; each time it waits for the GPU, gives unused memory back to the "
            "driver and asks for new memory, so that steps take longer than predicted"
        )
    return (
        f"it would reserve {format_bytes(found.band.high_bytes)} of {format_bytes(limit)}, with context and "
        f"band; torch can release cached blocks and run in {format_bytes(found.with_band(least))}: {often}"
    )


def _expandable(found: Estimate, ranks: list[_Rank], limit: int) -> str:
    """What expandable segments would change."""
    need = found.with_band(max(one.reserved(expandable=True) for one in ranks))
    if need <= limit:
        return f"--allocator expandable: fits in {format_bytes(need)}"
    least = found.with_band(max(one.least(expandable=True) for one in ranks))
    if least <= limit:
        return f"--allocator expandable: runs in {format_bytes(least)}, by releasing memory too"
    return f"--allocator expandable: does not fit either, {format_bytes(least)}"
