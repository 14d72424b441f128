"""Estimator: whoever can say what a setting would need and how long a step would take.

The search asks through this door only. The real one traces the job (see foresight.py); tests give one with
laws that are made up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trimtab.spec import Cluster, Device, Estimate, RankPlacement, Setting


@dataclass(frozen=True)
class Layout:
    """The devices that a setting would run on."""

    places: tuple[RankPlacement, ...]
    cluster: Cluster = field(compare=False, repr=False)
    """Those devices alone, with the links between them."""

    @property
    def gpus(self) -> int:
        """How many there are."""
        return len(self.places)

    @property
    def device(self) -> Device:
        """The one with the least memory to give."""
        return min(self.cluster.devices, key=available_bytes)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The different devices, by name."""
        return tuple(dict.fromkeys(place.name for place in self.places))


def available_bytes(device: Device) -> int:
    """What a device can give: what is free now, or all of it where nobody looked."""
    return device.memory_bytes if device.free_bytes is None else device.free_bytes


@dataclass(frozen=True)
class LowerBound:
    """What a setting takes at the very least."""

    step_s: float | None = 0.0
    """None where the time will not be known even after a closer look."""
    need_bytes: int = 0


class Estimator(Protocol):
    """What the search may ask."""

    def lower_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """A bound from below that costs nothing to know now; it may rise as more becomes known.

        Zero is always right. The search looks closely at what no bound rules out, and at nothing else.
        """

    def cached_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """As `floor`, with nothing worked out for it: for what is out of the race, and is only told of."""

    def tighten_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """The same bound, as good as it can be had without finding out anything that takes long."""

    def prepare(self, asked: Sequence[tuple[Setting, Layout]]) -> None:
        """What will be asked for next, so that it can be found out in one go."""

    def estimate(self, setting: Setting, layout: Layout) -> Estimate:
        """The estimate, against all that the fullest device has free; raises TrimtabError where it cannot."""

    def judge_within(
        self, setting: Setting, layout: Layout, limit_bytes: int, *, explain: bool = False
    ) -> Estimate:
        """The estimate with its verdict within so many bytes, where torch may release cached blocks.

        Raises as `estimate` does. With `explain` the reason says whether another allocator would help.
        """

    def has_traces(self, setting: Setting, layout: Layout) -> bool:
        """Whether an estimate costs next to nothing: runners-up are worth no more than that."""

    def with_changes(self, **changes: int) -> Estimator:
        """The estimator of the job with some of its members changed, such as a shorter `seq`."""
