"""An Estimator with laws that are made up and consistent: no job, no trace, no time lost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trimtab.errors import JobFailed
from trimtab.planner.estimator_interface import LowerBound, available_bytes
from trimtab.planner.search_cache import SearchCache
from trimtab.spec import Allocator, Band, Estimate, Footprint, Recompute, Strategy, Verdict, Workload
from trimtab.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.planner.estimator_interface import Layout
    from trimtab.spec import Device, Setting, Trace

KEPT = {way: 1.0 - 0.8 * way.way.share for way in Recompute} | {Recompute.SELECTIVE: 0.6}
AGAIN = {way: 1.0 + 0.33 * way.way.share for way in Recompute} | {Recompute.SELECTIVE: 1.1}


def traced_ends(setting: Setting) -> list[Setting]:
    """The settings whose traces give this one's."""
    ends = (Recompute.NONE, Recompute.FULL) if setting.recompute.way.is_partial else (setting.recompute,)
    return [setting.replace(recompute=end) for end in ends]


@dataclass
class Law:
    """Memory: weights and their like, cut where they are sharded, and activations per sample. Time: rounds of
    computing, one optimizer step, one exchange of gradients.
    """

    static_bytes: int = 4 * GIB
    sample_bytes: int = GIB
    sample_flops: float = 1e13
    launch_s: float = 0.01
    branch_share: float = 0.5
    """Of static memory and work that one branch needs."""
    bounds: bool = True
    """Whether floors tell anything."""
    timed: bool = True
    seq: int = 1024
    asked: list[Setting] = field(default_factory=list)
    prepared: list[Setting] = field(default_factory=list)
    prefetched: list[Setting] = field(default_factory=list)
    cached_share: float = 0.0
    """Of reserved memory, what torch could release."""
    fails: bool = False
    fails_compiled: bool = False
    fails_with: Callable[[Setting], bool] = lambda _: False
    """Settings that fail by a cause of their own."""
    cause: Callable[[Setting], str] = lambda setting: f"it refuses {setting.precision}"
    traced: set[Any] = field(default_factory=set)
    searches: SearchCache = field(default_factory=SearchCache)
    """Families whose true times are known."""

    def family(self, setting: Setting, layout: Layout) -> Any:
        return (layout, setting.mesh, setting.strategy, setting.precision, setting.recompute, setting.compile)

    def need_bytes(self, setting: Setting) -> int:
        static = self.static_bytes / setting.mesh.dp_shard / setting.mesh.pp
        if setting.mesh.branch > 1:
            static *= self.branch_share
        kept = setting.micro_batch * self.sample_bytes * self.seq / 1024 * KEPT[setting.recompute]
        kept *= 0.7 if setting.compile else 1.0
        pieces = 1.0 if setting.allocator is Allocator.EXPANDABLE else 1.08
        gathered = self.static_bytes / 32 if setting.mesh.dp_shard > 1 else 0
        return int(static + gathered + kept * pieces + 700 * MIB)

    def round_s(self, setting: Setting, device: Device) -> float:
        peak = device.peaks.bf16 or device.peaks.fp16 or 1e13
        work = setting.micro_batch * self.sample_flops / peak * AGAIN[setting.recompute]
        work *= self.branch_share if setting.mesh.branch > 1 else 1.0
        # Stages share the work, and wait for each other.
        rounds, stages = setting.accumulation, setting.mesh.pp
        work *= (rounds + stages - 1) / rounds / stages
        return work * (0.8 if setting.compile else 1.0) + self.launch_s * (0.2 if setting.compile else 1.0)

    def step_s(self, setting: Setting, layout: Layout) -> float:
        device = layout.device
        rounds = setting.accumulation * self.round_s(setting, device)
        optimizer = self.static_bytes / setting.mesh.dp_shard / (device.bandwidth_bytes_per_s or 1e12)
        return rounds + optimizer + self.exchange_s(setting, layout)

    def exchange_s(self, setting: Setting, layout: Layout) -> float:
        if setting.gpus == 1:
            return 0.0
        speeds = [link.bandwidth_bytes_per_s or 1e9 for link in layout.cluster.links] or [1e9]
        rounds = setting.accumulation if setting.strategy in (Strategy.FSDP, Strategy.HSDP) else 1
        return rounds * self.static_bytes / 4 / min(speeds)

    # --- the door

    def lower_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        if not self.timed:
            return LowerBound(step_s=None)
        if not self.bounds:
            return LowerBound()
        if all(self.family(end, layout) in self.traced for end in traced_ends(setting)):
            need = self.need_bytes(setting.replace(allocator=Allocator.EXPANDABLE))
            known = int(0.9 * need) if setting.recompute.way.is_partial else 0
            return LowerBound(step_s=self.step_s(setting, layout), need_bytes=known)
        none = setting.replace(recompute=Recompute.NONE)
        least = none.accumulation * self.round_s(none, layout.device)
        return LowerBound(step_s=least, need_bytes=int(self.static_bytes / setting.mesh.size))

    def cached_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        return self.lower_bound(setting, layout)

    def tighten_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        return self.lower_bound(setting, layout)

    def prepare(self, asked: Sequence[tuple[Setting, Layout]]) -> None:
        self.prepared += [setting for setting, _ in asked]
        self.traced |= {self.family(end, layout) for setting, layout in asked for end in traced_ends(setting)}

    def can_prefetch(self) -> bool:
        return True

    def prefetch(self, asked: Sequence[tuple[Setting, Layout]]) -> bool:
        self.prefetched += [setting for setting, _ in asked]
        return True

    def estimate(self, setting: Setting, layout: Layout) -> Estimate:
        if self.fails or (self.fails_compiled and setting.compile):
            raise JobFailed("loss()", found="it raised", cure="Fix it.")
        if self.fails_with(setting):
            raise JobFailed("loss()", found=self.cause(setting), cure="Change it.")
        self.asked.append(setting)
        need = self.need_bytes(setting)
        room = available_bytes(layout.device)
        return Estimate(
            allocated_bytes=need - 700 * MIB,
            reserved_bytes=need - 700 * MIB,
            process_bytes=need,
            parts=Footprint(activations=need - 700 * MIB, context=700 * MIB),
            band=Band(low_bytes=int(need * 0.95), high_bytes=int(need * 1.05)),
            step_s=self.step_s(setting, layout) if self.timed else None,
        ).judge_quickly(room)

    def judge_within(
        self, setting: Setting, layout: Layout, limit_bytes: int, *, explain: bool = False
    ) -> Estimate:
        """The made-up allocator keeps `cached_share` of the activations for later, and can release it."""
        found = self.estimate(setting, layout)
        if found.band.high_bytes <= limit_bytes:
            return found
        least = int(found.process_bytes - self.cached_share * (found.reserved_bytes))
        runs = found.with_band(least) <= limit_bytes
        return found.replace(
            allocated_bytes=min(found.allocated_bytes, least),
            fits=runs,
            verdict=Verdict.FITS_TIGHT if runs else Verdict.DOES_NOT_FIT,
            verdict_reason="cached blocks are released" + ", explained" * explain,
            least_bytes=least,
            releases_per_step=1.0 if runs else None,
        )

    def has_traces(self, setting: Setting, layout: Layout) -> bool:
        return self.family(setting, layout) in self.traced

    def get_trace(self, setting: Setting, layout: Layout) -> Trace | None:  # noqa: ARG002 - as the interface
        return None

    def with_changes(self, **changes: Any) -> Law:
        return replace(self, **changes, traced=set())


def workload(**changes: Any) -> Workload:
    known = {"name": "fake", "global_batch": 64, "samples": 10_000, "epochs": 3}
    return Workload(**{**known, **changes})
