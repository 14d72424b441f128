"""The interface between the search and the estimates of memory and step time.

`TraceEstimator` in estimator.py implements it with traces of the job; tests implement it with made-up
formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trimtab.spec import Cluster, Device, Estimate, RankPlacement, Setting, Trace


@dataclass(frozen=True)
class Layout:
    """The devices that a setting would run on."""

    places: tuple[RankPlacement, ...]
    cluster: Cluster = field(compare=False, repr=False)
    """A cluster of these devices only, with the links between them."""

    @property
    def gpus(self) -> int:
        """Number of devices."""
        return len(self.places)

    @cached_property
    def device(self) -> Device:
        """The device with the least available memory."""
        return min(self.cluster.devices, key=available_bytes)

    @cached_property
    def _hash(self) -> int:
        return hash(self.places)

    def __hash__(self) -> int:
        return self._hash

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the different kinds of devices."""
        return tuple(dict.fromkeys(place.name for place in self.places))


def available_bytes(device: Device) -> int:
    """Return the free memory of a device; all of its memory if the free memory is unknown."""
    return device.memory_bytes if device.free_bytes is None else device.free_bytes


@dataclass(frozen=True)
class LowerBound:
    """Lower bounds on the step time and memory of a setting."""

    step_s: float | None = 0.0
    """None if even an estimate would not give a time."""
    need_bytes: int = 0


class CachedSearches(Protocol):
    """Results of searches of this question and of earlier ones: `SearchCache` in search_cache.py."""

    def search(self, space: Any, compute: Callable[[], Any], *, margin: float | None = None) -> Any:
        """Return the result of a search in a space; compute it on a cache miss."""

    def list_ways(self, setting: Setting, compute: Callable[[], Iterable[Any]]) -> list[Any]:
        """Return what ways to fit would buy for a setting; compute it on a cache miss."""


class Estimator(Protocol):
    """Estimates settings for the search."""

    @property
    def searches(self) -> CachedSearches:
        """Results of searches with this estimator."""

    def lower_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """Return a lower bound without tracing; it may rise as more is traced.

        Zero is always valid. The search estimates only the settings that no bound rules out.
        """

    def cached_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """Return a lower bound from stored times only: for settings that are only reported."""

    def tighten_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """Return the best lower bound that takes no long computation."""

    def prepare(self, requests: Sequence[tuple[Setting, Layout]]) -> None:
        """Trace several settings together, before their estimates are requested."""

    def can_prefetch(self) -> bool:
        """Whether settings that are likely to be estimated may be traced now: nothing else is traced."""

    def prefetch(self, requests: Sequence[tuple[Setting, Layout]]) -> bool:
        """Start tracing settings that are estimated later; False if others are being traced."""

    def estimate(self, setting: Setting, layout: Layout) -> Estimate:
        """Return the estimate, judged by the memory that is free on the fullest device.

        Raise TrimtabError if it fails.
        """

    def judge_within(
        self, setting: Setting, layout: Layout, limit_bytes: int, *, explain: bool = False
    ) -> Estimate:
        """Return the estimate with a verdict for a memory limit, where torch may release cached blocks.

        It raises as `estimate` does. With `explain`, the reason says whether another allocator would help.
        """

    def has_traces(self, setting: Setting, layout: Layout) -> bool:
        """Whether an estimate needs no new trace; only such settings become runners-up."""

    def get_trace(self, setting: Setting, layout: Layout) -> Trace | None:
        """Return the trace of a setting if this question's traces give it; None otherwise."""

    def with_changes(self, **changes: int) -> Estimator:
        """Return an estimator of the job with some options changed, such as a shorter `seq`."""
