"""Estimate settings from as few traces of the job as possible.

Results belong to one plan question: bounds and runners-up do not depend on earlier questions. Caches on disk
hold traces, plans and estimates. A cached estimate is only used where it would be computed now, so that it
saves time and changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from trimtab.cache import make_key
from trimtab.errors import CannotFollow, TrimtabError
from trimtab.planner.estimator_interface import LowerBound, available_bytes
from trimtab.planner.search import predict_on_line
from trimtab.planner.search_cache import SearchCache
from trimtab.predict import communication, step_time
from trimtab.predict.calibration import find_speed
from trimtab.predict.capacity import judge_fully
from trimtab.predict.derive import derive_trace
from trimtab.predict.estimate import estimate_trace as judge
from trimtab.predict.estimate import mix_times
from trimtab.predict.host_link import find_host_link
from trimtab.predict.memory import add_accumulation
from trimtab.predict.mix_recompute import RecomputeMix, TracesDiffer
from trimtab.spec import PARTS, Allocator, Estimate, Offload, Recompute
from trimtab.spec.precision import BFLOAT16, FLOAT8, FLOAT16
from trimtab.strategies import one_micro_batch, one_replica, strategy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from trimtab.planner.estimator_interface import Layout
    from trimtab.spec import Calibration, Device, Setting, Trace

    Answer = Trace | TrimtabError
    TraceAll = Callable[[Sequence[Setting], Device, dict[str, Any]], list[Answer]]
    """Trace several settings on a device with some job options changed; an error where a trace failed."""
    Prefetch = Callable[[Sequence[Setting], Device], bool]
    """Start tracing several settings on a device, and return at once; False if others are being traced."""
    Clock = Callable[[Trace, Setting, Layout, Calibration | None], float | None]
    IsDerivable = Callable[[Setting, Device, dict[str, Any], Collection[int]], bool]
    KnownTime = Callable[[Setting, Layout], float | None]

STATIC_SLACK = 0.98
"""Factor of the lower bound on static memory: small tensors may not be sharded evenly."""
EVENNESS = 0.95
"""A sample takes at least this share of its time at the largest traced micro-batch. Larger micro-batches are
faster per sample, except for the last wave of blocks on the multiprocessors."""
NOT_COMPUTE = ("collective", "transfer", "wait", "optimizer")
"""Kinds of operations that a bound on compute time leaves out."""
UNUSED = frozenset({"workers", "shares"})
"""Fields of a Setting that no estimate depends on."""
UNUSED_WITH_BATCH = UNUSED | {"global_batch"}
LINK_UNUSED = frozenset({"devices"})
"""Fields of a Link that no estimate depends on: only the number of devices that it joins matters."""
LINK_WITHIN_UNUSED = LINK_UNUSED | {"source"}
MIXED_SLACK = 0.9
"""Factor of the lower bound on memory with some blocks recomputed."""
MAX_SETTINGS = 2**16
"""Settings whose keys and variants are remembered."""
STATIC_PARTS = (PARTS.index("weights"), PARTS.index("optimizer"))


def compute_step_s(trace: Trace, setting: Setting, layout: Layout, own: Calibration | None) -> float | None:
    """Return the seconds of an optimizer step, without a memory replay; None without speed data."""
    speed = find_speed(layout.device, own)
    if speed is None or not trace.sequence:
        return None
    links = communication.find_links(layout.cluster, setting.gpus, own)
    return step_time.estimate_step(
        trace,
        setting,
        speed.pace,
        speed.host,
        links,
        fusing=is_guessed(setting),
        host_bytes_per_s=find_host_link(layout.device).bytes_per_s,
    ).total_s


@dataclass
class QuestionResults:
    """Results for one plan question."""

    estimates: dict[str, Estimate] = field(default_factory=dict)
    times: dict[str, float | None] = field(default_factory=dict)
    failures: dict[str, TrimtabError] = field(default_factory=dict)
    static_bytes: dict[str, int] = field(default_factory=dict)
    """Weights and optimizer state of the whole model, by `_stored_key`."""
    weight_bytes: dict[str, int] = field(default_factory=dict)
    """Weights alone, by `_weights_key`: other optimizers have the same."""
    rates: dict[str, float] = field(default_factory=dict)
    """Seconds of forward and backward for one sample at the largest micro-batch traced, by `_rate_key`."""
    compiled_rates: dict[str, list[Callable[[], float]]] = field(default_factory=dict)
    """Functions that compute such seconds of compiled code, which takes long, when they are needed."""
    limits: dict[str, float] = field(default_factory=dict)
    """Seconds of the same at the peak rate of the device, by kind of device and precision."""


@dataclass
class EstimateCache:
    """Estimates and times of earlier questions about a job, for the caller to load and store.

    An entry is only used if the traces are loaded from which it would be computed again.
    """

    estimates: dict[str, dict[str, Any]] = field(default_factory=dict)
    times: dict[str, float | None] = field(default_factory=dict)
    changed: bool = False

    def time(self, key: str, compute: Callable[[], float | None]) -> float | None:
        """Return a time; compute it on a cache miss."""
        if key not in self.times:
            self.times[key] = compute()
            self.changed = True
        return self.times[key]


@dataclass
class TraceEstimator:
    """Estimates of one job; traces are made when they are first needed."""

    trace_all: TraceAll
    calibration_of: Callable[[Device], Calibration | None] = lambda _: None
    """The user's own calibration of a device."""
    clock: Clock = compute_step_s
    results: QuestionResults = field(default_factory=QuestionResults)
    cache: EstimateCache = field(default_factory=EstimateCache)
    searches: SearchCache = field(default_factory=SearchCache)
    prefetch_all: Prefetch = lambda *_: True
    can_prefetch: Callable[[], bool] = lambda: False
    """Whether settings may be traced ahead now."""
    is_derivable: IsDerivable = lambda *_: True
    """Whether traces at some micro-batches give the trace of a setting."""
    say: Callable[[str], None] = lambda _: None
    """Called with a text about each activity."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Changed options of the job."""
    traces: dict[str, Answer] = field(default_factory=dict)
    lines: dict[str, set[int]] = field(default_factory=dict)
    """Traced micro-batches, by everything else that a trace depends on."""
    on_lines: dict[tuple[str, int], bool] = field(default_factory=dict)
    """Whether a trace follows from those at so many other micro-batches."""
    derived: dict[str, Answer | None] = field(default_factory=dict)
    """Traces derived from those, or errors."""
    failures_by_family: dict[str, list[TrimtabError]] = field(default_factory=dict)
    """Errors by family: after two failed micro-batches a third is not tried."""
    untimed: set[str] = field(default_factory=set)
    """Kinds of devices without speed data."""
    family_times: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)
    """Times of settings that differ only in micro-batch and accumulation, by family."""
    direct: set[int] = field(default_factory=set)
    """Numbers of shards that are traced directly instead of derived from two others."""
    judged: dict[str, Estimate] = field(default_factory=dict)
    """Estimates judged by replays within a memory limit."""
    mixes: bool = False
    """Whether traces with some blocks recomputed are derived from those with none and with all."""
    matched: dict[str, RecomputeMix | TrimtabError] = field(default_factory=dict)
    """Traces with none and with all blocks recomputed, by the key of the first."""
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Numbers of the blocks that full recomputation repeats, by everything but the micro-batch."""
    needs: dict[str, dict[int, int]] = field(default_factory=dict)
    """Bytes of estimated settings by micro-batch, by family."""
    names: dict[Layout, str] = field(default_factory=dict)
    """The layout's part of an estimate key."""
    alone: dict[Layout, Layout] = field(default_factory=dict)
    """Layouts of only one of their devices."""
    stripped: dict[Layout, Device] = field(default_factory=dict)
    """Devices without the fields that no trace depends on."""
    device_keys: dict[int, tuple[Device, str]] = field(default_factory=dict)
    """Fingerprints of devices, by the identity of the device."""
    estimate_keys: dict[tuple[Setting, Layout, int], str] = field(default_factory=dict)
    """Keys of estimates; the last part is the size of `direct`, which only grows."""
    parts: dict[tuple[Setting, int], list[Setting]] = field(default_factory=dict)
    """Settings to trace for a traced setting; the last part of a key is the size of `direct`."""
    recomputed_shares: dict[tuple[Setting, Layout], float] = field(default_factory=dict)
    """Share of blocks that a setting recomputes."""
    unknown_shares: dict[tuple[Setting, Layout], int] = field(default_factory=dict)
    """Settings whose share does not follow from this many traces."""
    unknown: dict[tuple[Setting, Layout], int] = field(default_factory=dict)
    """Settings whose time does not follow from this many traces."""
    layouts: dict[str, Layout] = field(default_factory=dict)
    """Where each setting was last estimated, by `setting_key`."""
    verified: dict[str, tuple[Estimate, Trace]] = field(default_factory=dict)
    """Estimates of settings that were compiled, with their traces, by `setting_key`."""
    ratios: dict[str, float] = field(default_factory=dict)
    """Verified time over derived time, by everything but the micro-batch and the allocator."""

    def has_traces(self, setting: Setting, layout: Layout) -> bool:
        """Whether an estimate follows from traces of this question, directly or by a line.

        Traces that an earlier question left on disk do not count, so that the same question always gets the
        same plan.
        """
        device = self._strip(layout)
        return self._has_result(setting, layout) or all(
            self._trace_key(part, device) in self.traces or self._is_on_line(part, device)
            for part in self._trace_parts(setting)
        )

    def _is_on_line(self, part: Setting, device: Device) -> bool:
        """Whether a trace follows from traces of this question at other micro-batches."""
        sizes = self.lines.get(self._line_key(part, device), set())
        if part.micro_batch == 1 or len(sizes - {1}) < 2:  # noqa: PLR2004 - a line
            return False
        # Deriving a trace takes long, and sizes are only added.
        key = self._trace_key(part, device), len(sizes)
        if key not in self.on_lines:
            self.on_lines[key] = self.is_derivable(part, device, self.changes, sizes)
        return self.on_lines[key]

    def get_trace(self, setting: Setting, layout: Layout) -> Trace | None:
        """Return the trace of a setting if this question's traces give it; None otherwise."""
        trace = self._derive_trace(setting, layout)
        return None if isinstance(trace, TrimtabError) else trace

    def with_changes(self, **changes: int) -> TraceEstimator:
        """Return an estimator of the job with some options changed, with empty results."""
        return replace(
            self,
            changes={**self.changes, **changes},
            results=QuestionResults(),
            cache=EstimateCache(),
            searches=SearchCache(),
            traces={},
            derived={},
            lines={},
            on_lines={},
            failures_by_family={},
            untimed=set(),
            family_times={},
            judged={},
            matched={},
            blocks={},
            needs={},
            unknown={},
            recomputed_shares={},
            unknown_shares={},
            layouts={},
            verified={},
            ratios={},
        )

    def prepare(self, requests: Sequence[tuple[Setting, Layout]]) -> None:
        """Trace what has no result yet, one batch of requests for each kind of device."""
        by_device: dict[str, tuple[Layout, dict[str, Setting]]] = {}
        family_times: dict[str, str] = {}
        for setting, layout in requests:
            if self._has_result(setting, layout):
                continue
            device = self._strip(layout)
            for part in self._trace_parts(setting):
                key = self._trace_key(part, device)
                if key not in self.traces:
                    by_device.setdefault(device.kind, (layout, {}))[1][key] = part
                    family_times[key] = self._family_key(setting, layout)
        for layout, settings in by_device.values():
            first, *others = settings.values()
            self.say(f"tracing {summarize_setting(first)}" + f" and {len(others)} more" * bool(others))
            answers = self.trace_all(list(settings.values()), self._strip(layout), self.changes)
            for key, answer in zip(settings, answers, strict=True):
                self.traces[key] = answer
                line = self._line_key(settings[key], self._strip(layout))
                self.lines.setdefault(line, set()).add(settings[key].micro_batch)
                if isinstance(answer, TrimtabError):
                    self.failures_by_family.setdefault(family_times[key], []).append(answer)
                else:
                    self._record_rates(answer, settings[key], layout)

    def prefetch(self, requests: Sequence[tuple[Setting, Layout]]) -> bool:
        """Start tracing settings that are estimated later; False if others are being traced."""
        by_device: dict[str, tuple[Device, list[Setting]]] = {}
        for setting, layout in requests:
            device = self._strip(layout)
            parts = self._trace_parts(setting)
            missing = [part for part in parts if self._trace_key(part, device) not in self.traces]
            by_device.setdefault(device.kind, (device, []))[1].extend(missing)
        return all(self.prefetch_all(settings, device) for device, settings in by_device.values())

    def estimate(self, setting: Setting, layout: Layout) -> Estimate:
        """Return the estimate, from earlier results, from a trace, or as the compiler verified it."""
        own_key = setting_key(setting)
        self.layouts[own_key] = layout
        if own_key in self.verified:
            estimate = self.verified[own_key][0]
        else:
            estimate = self._derive_estimate(setting, layout)
            ratio = self._find_ratio(setting)
            estimate = estimate if ratio is None else scale_time(estimate, ratio)
        return estimate.judge_quickly(available_bytes(layout.device))

    def _derive_estimate(self, setting: Setting, layout: Layout) -> Estimate:
        """Return the estimate by an eager trace, without a verdict."""
        key = self._estimate_key(setting, layout)
        if key in self.results.failures:
            raise self.results.failures[key]
        estimate = self.results.estimates.get(key)
        if estimate is None:
            # Convert as a cached estimate is converted, so that both are equal to the last digit.
            estimate = Estimate.from_builtins(self._compute_estimate(setting, layout, key).to_builtins())
            # The key changes if this number of shards could not be derived from others.
            self.results.estimates[self._estimate_key(setting, layout)] = estimate
            needs = self.needs.setdefault(self._family_key(setting, layout), {})
            needs[setting.micro_batch] = estimate.need_bytes
        return estimate

    def verify(self, setting: Setting, trace_all: TraceAll) -> TrimtabError | None:
        """Estimate a compiled setting with torch's compiler, and use that from now on; return an error."""
        traced = to_traced_setting(setting).replace(compile=True)
        layout = self.layouts.get(setting_key(setting))
        if traced.gpus > 1 or layout is None:
            why = "compiled code is traced on one device only"
            return CannotFollow(
                summarize_setting(setting),
                found=why if traced.gpus > 1 else "it was estimated by another search",
                cure="Measure it with `trimtab profile`.",
            )
        device = layout.device
        (answer,) = trace_all([traced], strip_device(device), self.changes)
        if isinstance(answer, TrimtabError):
            return answer
        trace = derive_trace(setting, [answer])
        assert trace is not None  # noqa: S101 - only shards are interpolated
        derived = self._derive_estimate(setting, layout).step_s
        calibration = self.calibration_of(device)
        estimate, _ = judge(trace, setting, device, cluster=layout.cluster, calibration=calibration)
        total = add_accumulation(estimate, trace, setting).replace(verified=True)
        self.verified[setting_key(setting)] = total, trace
        self.judged.clear()
        if derived and total.step_s:
            self.ratios[setting_key(with_one_sample(setting))] = total.step_s / derived
        return None

    def _scale_bound(self, setting: Setting, seconds: float) -> float:
        """Return a bound from derived times, lowered where the compiler found less time."""
        if not self.ratios:
            return seconds
        plain = use_default_allocator(setting)
        times = [
            estimate.step_s
            for allocator in Allocator
            if (entry := self.verified.get(setting_key(plain.replace(allocator=allocator)))) is not None
            and (estimate := entry[0]).step_s is not None
        ]
        return min([seconds * min(1.0, self._find_ratio(setting) or 1.0), *times])

    def _find_ratio(self, setting: Setting) -> float | None:
        """Return the ratio of verified to derived time: of the family, or of that without recomputation."""
        if not self.ratios:
            return None
        family = with_one_sample(setting)
        keys = (setting_key(family), setting_key(set_recompute(family, Recompute.NONE)))
        return next((self.ratios[key] for key in keys if key in self.ratios), None)

    def judge_within(
        self, setting: Setting, layout: Layout, limit_bytes: int, *, explain: bool = False
    ) -> Estimate:
        """Return the estimate with a verdict for a memory limit, by replays of the trace."""
        key = f"{self._estimate_key(setting, layout)} {limit_bytes} {explain}"
        if key not in self.judged:
            estimate = self.estimate(setting, layout)
            _, compiled = self.verified.get(setting_key(setting), (None, None))
            trace = compiled or self._derive_trace(setting, layout)
            if trace is None or isinstance(trace, TrimtabError):
                return estimate
            self.judged[key] = judge_fully(estimate, trace, setting, limit_bytes=limit_bytes, explain=explain)
        return self.judged[key]

    def _compute_estimate(self, setting: Setting, layout: Layout, key: str) -> Estimate:
        failures_by_family = self.failures_by_family.get(self._family_key(setting, layout), [])
        if len(failures_by_family) > 1:
            raise failures_by_family[0]
        self.prepare([(setting, layout)])
        cached = self.cache.estimates.get(key)
        if cached is not None and self._traced_time(setting, layout) is not None:
            return Estimate.from_builtins(cached)
        trace = self._derive_trace(setting, layout)
        is_sharded = strategy_of(setting).is_sharded
        if trace is None and is_sharded and setting.mesh.dp_shard not in self.direct:
            # This number of shards cannot be derived from others: trace its micro-batches directly.
            self.direct.add(setting.mesh.dp_shard)
            self.derived = {name: derived for name, derived in self.derived.items() if derived is not None}
            return self._compute_estimate(setting, layout, self._estimate_key(setting, layout))
        on_a_line = trace is not None
        if trace is None:
            traced, device = to_traced_setting(setting), self._strip(layout)
            (trace,) = self.trace_all([traced], device, self.changes)
            self.derived[self._trace_key(traced, device)] = trace
        if isinstance(trace, TrimtabError):
            self.results.failures[key] = trace
            raise trace
        device = layout.device
        estimate, _ = judge(
            trace,
            setting,
            device,
            cluster=layout.cluster,
            calibration=self.calibration_of(device),
            fusing=is_guessed(setting),
        )
        # Bounds and estimates use the same clock, so that an exact bound stays exact.
        seconds = self._compute_time(setting, layout, lambda: trace, keep=on_a_line)
        total = add_accumulation(estimate, trace, setting).replace(step_s=seconds)
        if self._is_mixed(setting):
            total = total.replace(**self._mix_times(setting, layout))
        if on_a_line:
            self.cache.estimates[key] = total.to_builtins()
            self.cache.changed = True
        return total

    def _derive_trace(self, setting: Setting, layout: Layout) -> Answer | None:
        """Return the trace of a setting derived from loaded traces; None if one is missing."""
        traced, device = to_traced_setting(setting), self._strip(layout)
        key = self._trace_key(traced, device)
        if key not in self.derived and self._is_mixed(setting):
            mix = self._match(setting, layout)
            if mix is None:
                return None
            self.derived[key] = mix if isinstance(mix, TrimtabError) else mix.mix(setting.recompute.way)
        if key not in self.derived:
            parts = [self.traces.get(self._trace_key(part, device)) for part in self._list_parts(traced)]
            wrong = next((part for part in parts if isinstance(part, TrimtabError)), None)
            traces = [part for part in parts if part is not None and not isinstance(part, TrimtabError)]
            if wrong is None and len(traces) < len(parts):
                return None
            self.derived[key] = wrong or derive_trace(traced, traces)
        return self.derived[key]

    def _is_mixed(self, setting: Setting) -> bool:
        """Whether the trace of a setting is derived from those with none and with all blocks recomputed."""
        return self.mixes and setting.recompute.way.is_partial

    def _match(self, setting: Setting, layout: Layout) -> RecomputeMix | TrimtabError | None:
        """Return the traces with none and with all blocks recomputed, matched; None if one is missing."""
        none, full = set_recompute(setting, Recompute.NONE), set_recompute(setting, Recompute.FULL)
        device = self._strip(layout)
        key = self._trace_key(to_traced_setting(none), device)
        if key not in self.matched:
            ends = [self._derive_trace(end, layout) for end in (none, full)]
            if any(end is None for end in ends):
                return None
            wrong = next((end for end in ends if isinstance(end, TrimtabError)), None)
            first, second = ends
            if wrong is not None:
                self.matched[key] = wrong
            else:
                assert first is not None and not isinstance(first, TrimtabError)  # noqa: S101, PT018
                assert second is not None and not isinstance(second, TrimtabError)  # noqa: S101, PT018
                self.matched[key] = _match_traces(first, second)
        return self.matched[key]

    def _recomputed_share(self, setting: Setting, layout: Layout) -> float | None:
        """Return the share of blocks that a setting recomputes; None if their number is not known yet."""
        share = self.recomputed_shares.get((setting, layout))
        if share is not None or self.unknown_shares.get((setting, layout)) == len(self.traces):
            return share
        share = self._count_recomputed(setting, layout)
        if share is None:
            self.unknown_shares[setting, layout] = len(self.traces)
        else:
            self.recomputed_shares[setting, layout] = share
        return share

    def _count_recomputed(self, setting: Setting, layout: Layout) -> float | None:
        # Blocks are as many at every micro-batch and number of shards.
        device = self._strip(layout)
        first, *_ = self._list_parts(to_traced_setting(set_recompute(setting, Recompute.NONE)))
        line = self._line_key(first, device)
        if line not in self.blocks:
            mix = self._match(setting, layout)
            if mix is None or isinstance(mix, TrimtabError):
                return None
            self.blocks[line] = mix.blocks
        blocks = self.blocks[line]
        return sum(map(setting.recompute.way.has_block, blocks)) / len(blocks)

    def _mixed_time(self, setting: Setting, layout: Layout, known_time: KnownTime) -> float | None:
        """Return the time on the line between none and all blocks recomputed; None if an end is missing."""
        share = self._recomputed_share(setting, layout)
        none = known_time(set_recompute(setting, Recompute.NONE), layout)
        full = known_time(set_recompute(setting, Recompute.FULL), layout)
        return None if share is None or none is None or full is None else none + share * (full - none)

    def _mix_times(self, setting: Setting, layout: Layout) -> dict[str, Any]:
        """Return the time fields of an estimate with some blocks recomputed."""
        none, full = (
            self._derive_estimate(set_recompute(setting, end), layout)
            for end in (Recompute.NONE, Recompute.FULL)
        )
        return mix_times(none, full, self._recomputed_share(setting, layout) or 0.0)

    def _least_mixed_bytes(self, setting: Setting, layout: Layout) -> int:
        """Return a lower bound on memory with some blocks recomputed; 0 if it is not known.

        Memory is nearly on the line between none and all, and somewhat below it where the peaks are at
        different places.
        """
        share = self._recomputed_share(setting, layout)
        if share is None:
            return 0
        ends = []
        for recompute in (Recompute.NONE, Recompute.FULL):
            points = self.needs.get(self._family_key(set_recompute(setting, recompute), layout), {})
            need = points.get(setting.micro_batch) or predict_on_line(points, setting.micro_batch)
            if need is None:
                return 0
            ends.append(need)
        return int(MIXED_SLACK * (ends[0] + share * (ends[1] - ends[0])))

    def _has_anchors(self, setting: Setting, layout: Layout) -> bool:
        """Whether the traces are loaded from which a setting's trace is derived."""
        device = self._strip(layout)
        parts = [self.traces.get(self._trace_key(part, device)) for part in self._trace_parts(setting)]
        return not any(part is None or isinstance(part, TrimtabError) for part in parts)

    def lower_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """Return the time if loaded traces give it, else a lower bound from other traces of the job."""
        return self._make_bound(setting, layout, self._traced_time)

    def cached_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """Return the same from times that were already computed."""
        return self._make_bound(setting, layout, self._stored_time)

    def _make_bound(self, setting: Setting, layout: Layout, known_time: KnownTime) -> LowerBound:
        if layout.device.kind in self.untimed:
            return LowerBound(step_s=None, need_bytes=self._least_bytes(setting))
        need = self._least_bytes(setting)
        if self._is_mixed(setting):
            need = max(need, self._least_mixed_bytes(setting, layout))
        seconds = known_time(setting, layout)
        if seconds is None:
            seconds = self._bound_time(setting, layout, known_time)
        return LowerBound(step_s=self._scale_bound(setting, seconds), need_bytes=need)

    def tighten_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """Return the bound after computing the time without recompute, if two traces give it."""
        if strategy_of(setting).is_bounded_by_one_device:
            # Its bound comes from the time of one device with the same micro-batches.
            alone = self._keep_one(layout)
            if self._traced_time(one_replica(setting), alone) is None:
                self.tighten_bound(one_replica(setting), alone)
            return self.lower_bound(setting, layout)
        none = set_recompute(setting, Recompute.NONE)
        if none.micro_batch == 1 and none.accumulation > 1:
            # One sample needs its own trace. Two take less time per sample, and so bound it.
            rounds = -(-none.accumulation // 2)
            none = none.replace(
                micro_batch=2, accumulation=rounds, global_batch=2 * rounds * none.data_parallel, shares=()
            )
        device = self._strip(layout)
        lines = [self.lines.get(self._line_key(part, device), set()) for part in self._trace_parts(none)]
        if all(len(line) > 1 for line in lines) and self._traced_time(none, layout) is None:
            self.prepare([(none, layout)])
        return self.lower_bound(setting, layout)

    def _trace_parts(self, setting: Setting) -> list[Setting]:
        """Return the settings whose traces give this setting's trace."""
        traced = to_traced_setting(setting)
        ends = (Recompute.NONE, Recompute.FULL) if self._is_mixed(setting) else (setting.recompute,)
        return [part for end in ends for part in self._list_parts(set_recompute(traced, end))]

    def _list_parts(self, traced: Setting) -> list[Setting]:
        """Return the settings whose traces give that of a traced setting."""
        key = traced, len(self.direct)
        if key not in self.parts:
            self.parts[key] = strategy_of(traced).trace_parts(traced, self.direct)
        return self.parts[key]

    def _line_key(self, setting: Setting, device: Device) -> str:
        return self._trace_key(trace_one_sample(setting), device)

    def _bound_time(self, setting: Setting, layout: Layout, known_time: KnownTime) -> float:
        """Return a lower bound on the time of a setting that was not traced.

        Recompute takes at least the time without it; several devices take at least the time of one rank's
        samples alone; and all take at least the time of the operations at the peak rate of the device. If a
        rank runs only a part of the model, its strategy gives the bound from the whole model.
        """
        # Activations on the host take longer to copy if more of them are stored.
        is_slower = Offload.ACTIVATIONS not in setting.offload
        none = set_recompute(setting, Recompute.NONE) if is_slower else setting
        without = known_time(none, layout) if none != setting else None
        above = above_none = self._bound_by_larger(none, layout)
        if none is not setting:
            above = max(above, self._bound_by_larger(setting, layout))
        strategy = strategy_of(setting)
        if not strategy.runs_whole_model:
            shared = strategy.least_step_s(setting, lambda: self._bound_alone(setting, layout, known_time))
            return max(without or 0.0, above if shared is None else STATIC_SLACK * shared)
        samples = setting.micro_batch * setting.accumulation
        rates = [self._find_rate(_rate_key(either, layout.device.kind)) for either in (setting, none)]
        limit = self.results.limits.get(_peak_key(setting, layout.device.kind), 0.0)
        mixed = 0.0
        if self._is_mixed(setting):
            # On the line to the time of full recomputation; at least the named share of blocks is recomputed.
            full = set_recompute(setting, Recompute.FULL)
            at_rate = samples * self._find_rate(_rate_key(full, layout.device.kind)) * EVENNESS
            least = without or max(above_none, samples * rates[1] * EVENNESS)
            more = (known_time(full, layout) or at_rate) - least
            mixed = least + setting.recompute.way.share * max(0.0, more)
        return max(without or 0.0, above, mixed, samples * limit, samples * max(rates) * EVENNESS)

    def _bound_alone(self, setting: Setting, layout: Layout, known_time: KnownTime) -> float:
        """Return a lower bound on the time of one replica's samples on one device."""
        replica, alone = one_replica(setting), self._keep_one(layout)
        seconds = known_time(replica, alone)
        return self._bound_time(replica, alone, known_time) if seconds is None else seconds

    def _bound_by_larger(self, setting: Setting, layout: Layout) -> float:
        """Return a bound from larger micro-batches of the same family: smaller ones are assumed no faster.

        They may be 1 to 2 % faster if they suit a cache or the multiprocessors better, which is not worth a
        trace of each.
        """
        times = self.family_times.get(self._family_key(setting, layout))
        if times is None:
            return 0.0
        samples = setting.micro_batch * setting.accumulation
        return max(
            (
                seconds * min(1.0, samples / (micro * rounds))
                for (micro, rounds), seconds in times.items()
                if micro > setting.micro_batch
            ),
            default=0.0,
        )

    def _family_key(self, setting: Setting, layout: Layout) -> str:
        return self._estimate_key(with_one_sample(setting), layout)

    def _stored_time(self, setting: Setting, layout: Layout) -> float | None:
        return self.results.times.get(self._estimate_key(use_default_allocator(setting), layout))

    def _traced_time(self, setting: Setting, layout: Layout) -> float | None:
        """Return the time from loaded traces, without a memory replay; None if a trace is missing."""
        if self.unknown.get((setting, layout)) == len(self.traces):
            return None
        seconds = self._time_from_traces(setting, layout)
        if seconds is None:
            self.unknown[setting, layout] = len(self.traces)
        return seconds

    def _time_from_traces(self, setting: Setting, layout: Layout) -> float | None:
        key = self._estimate_key(use_default_allocator(setting), layout)
        if key not in self.results.times and self._is_mixed(setting):
            seconds = self._mixed_time(setting, layout, self._traced_time)
            if seconds is None:
                return None
            self.results.times[key] = seconds
        if key not in self.results.times:
            if not (key in self.cache.times and self._has_anchors(setting, layout)):
                trace = self._derive_trace(setting, layout)
                if trace is None or isinstance(trace, TrimtabError):
                    return None
            self._compute_time(setting, layout, lambda: self._derive_trace(setting, layout))
        return self.results.times.get(key)

    def _compute_time(
        self, setting: Setting, layout: Layout, trace: Callable[[], Answer | None], *, keep: bool = True
    ) -> float | None:
        """Return the time by a trace; with `keep`, also store it in the cache."""

        def compute() -> float | None:
            answer = trace()
            assert answer is not None  # noqa: S101 - the caller has checked it
            assert not isinstance(answer, TrimtabError)  # noqa: S101
            return self.clock(answer, setting, layout, self.calibration_of(layout.device))

        key = self._estimate_key(use_default_allocator(setting), layout)
        if key not in self.results.times:
            self.results.times[key] = self.cache.time(key, compute) if keep else compute()
        seconds = self.results.times[key]
        if seconds is None:
            self.untimed.add(layout.device.kind)
        else:
            times = self.family_times.setdefault(self._family_key(setting, layout), {})
            times[setting.micro_batch, setting.accumulation] = seconds
        return seconds

    def _record_rates(self, trace: Trace, setting: Setting, layout: Layout) -> None:
        """Record the static memory and rates of a whole-model trace, for the bounds of other settings."""
        strategy = strategy_of(setting)
        if not strategy.runs_whole_model:
            return
        stored = _stored_key(setting)
        if stored not in self.results.static_bytes:
            shares = strategy.weight_shares(setting.mesh) or 1
            weights, state = count_static_bytes(trace)
            self.results.static_bytes[stored] = (weights + state) * shares
            self.results.weight_bytes[_weights_key(setting)] = weights * shares
        alone, single = self._keep_one(layout), one_micro_batch(setting)

        def compute(*, compiled: bool) -> float | None:
            like = single.replace(compile=compiled)
            key = f"{self._trace_key(setting, self._strip(layout))} {compiled}"
            clock = partial(self.clock, keep_compute(trace), like, alone, self.calibration_of(layout.device))
            seconds = self.cache.time(key, clock)
            return None if seconds is None else seconds / setting.micro_batch

        rate = compute(compiled=False)
        if rate is None:
            self.untimed.add(layout.device.kind)
            return
        plain, fused = (
            _rate_key(setting.replace(compile=compiled), layout.device.kind) for compiled in (False, True)
        )
        _store_minimum(self.results.rates, plain, rate)
        # A device on which eager code has a time has one for compiled code.
        self.results.compiled_rates.setdefault(fused, []).append(lambda: compute(compiled=True) or rate)
        if setting.recompute is not Recompute.NONE:
            return
        limit = compute_peak_s(trace, layout.device) / setting.micro_batch
        _store_minimum(self.results.limits, _peak_key(setting, layout.device.kind), limit)

    def _find_rate(self, key: str) -> float:
        """Return the seconds of a sample, computed now if the code is compiled; 0 if they are not known."""
        for compute in self.results.compiled_rates.pop(key, ()):
            _store_minimum(self.results.rates, key, compute())
        return self.results.rates.get(key, 0.0)

    def _least_bytes(self, setting: Setting) -> int:
        """Return a lower bound on the static memory of a rank; 0 before the first trace."""
        shares = strategy_of(setting).weight_shares(setting.mesh)
        if shares is None:
            return 0
        least = self.results.static_bytes.get(_stored_key(setting))
        if least is None:
            least = self.results.weight_bytes.get(_weights_key(setting), 0)
        return int(STATIC_SLACK * least / shares)

    def _has_result(self, setting: Setting, layout: Layout) -> bool:
        key = self._estimate_key(setting, layout)
        return key in self.results.estimates or key in self.results.failures

    def _trace_key(self, setting: Setting, device: Device) -> str:
        # Encoding a device takes longer than all the rest, and there are only a few.
        known = self.device_keys.get(id(device))
        if known is None:
            known = self.device_keys[id(device)] = device, device.fingerprint()
        return f"{known[1]} {setting_key(setting)}"

    def _estimate_key(self, setting: Setting, layout: Layout) -> str:
        """Return the key of an estimate: all that it depends on, without the memory that is free now."""
        question = setting, layout, len(self.direct)
        key = self.estimate_keys.get(question)
        if key is None:
            key = self.estimate_keys[question] = self._make_estimate_key(setting, layout)
        return key

    def _make_estimate_key(self, setting: Setting, layout: Layout) -> str:
        if layout not in self.names:
            nodes = tuple(len(node.devices) for node in layout.cluster.nodes)
            # An estimate names the source of the network bandwidth, but not of links within a node.
            links = tuple(
                (len(link.devices), make_key(link, LINK_UNUSED if link.node is None else LINK_WITHIN_UNUSED))
                for link in layout.cluster.links
            )
            host = tuple((node.ram_bytes, node.cpu_cores) for node in layout.cluster.nodes)
            measured = tuple(map(make_key, layout.cluster.collectives))
            name = f"{self._strip(layout).fingerprint()} {nodes} {links} {host}"
            self.names[layout] = f"{name} {measured}" if measured else name
        is_direct = strategy_of(setting).is_sharded and setting.mesh.dp_shard in self.direct
        direct = " direct" if is_direct else ""
        return f"{self.names[layout]} {setting_key(setting)}{direct}"

    def _strip(self, layout: Layout) -> Device:
        if layout not in self.stripped:
            self.stripped[layout] = strip_device(layout.device)
        return self.stripped[layout]

    def _keep_one(self, layout: Layout) -> Layout:
        if layout not in self.alone:
            self.alone[layout] = keep_one_device(layout)
        return self.alone[layout]


def _match_traces(none: Trace, full: Trace) -> RecomputeMix | TrimtabError:
    try:
        return RecomputeMix(none, full)
    except TracesDiffer:
        return CannotFollow(
            "recompute of some blocks",
            found="memory with some blocks recomputed does not follow from the traces with none and all of "
            "them recomputed: only by pin",
            cure="Pin it to have it traced, as in --pin recompute=every-2.",
        )


def _store_minimum(times: dict[str, float], key: str, seconds: float) -> None:
    times[key] = min(seconds, times.get(key, seconds))


@lru_cache(maxsize=MAX_SETTINGS)
def _rate_key(setting: Setting, kind: str) -> str:
    """Return the key of a rate: all that the time of a sample depends on, except the micro-batch."""
    moved = Offload.ACTIVATIONS in setting.offload
    return f"{_peak_key(setting, kind)} {setting.recompute} {setting.compile} {moved}"


@lru_cache(maxsize=MAX_SETTINGS)
def _peak_key(setting: Setting, kind: str) -> str:
    # A rank computes a part of every layer or sequence only, if others compute the rest.
    split = f"{setting.mesh.tp} {setting.mesh.cp} {setting.cp_method}"
    split += f" {setting.mesh.ep} {setting.expert_imbalance}"
    return f"{kind} {_stored_key(setting)} {setting.loss} {split}"


@lru_cache(maxsize=MAX_SETTINGS)
def _stored_key(setting: Setting) -> str:
    """Return the key of the static memory of a whole model: all that it depends on."""
    # Activations are no part of it.
    kept = " ".join(word for word in setting.offload if word is not Offload.ACTIVATIONS)
    return f"{setting.precision} {setting.base} {setting.optimizer_rule} {kept}".strip()


@lru_cache(maxsize=MAX_SETTINGS)
def _weights_key(setting: Setting) -> str:
    """Return the key of the weights of a whole model: all that they depend on."""
    return f"{setting.precision} {setting.base} {Offload.PARAMS in setting.offload}"


def count_static_bytes(trace: Trace) -> tuple[int, int]:
    """Return the bytes of weights and of optimizer state of the traced rank after the first step."""
    alive: set[int] = set()
    for number in trace.order[: trace.marks.get("step1", len(trace.order))]:
        if number >= 0:
            alive.add(number)
        else:
            alive.discard(~number)
    weights, state = (
        sum(trace.sizes[number] for number in alive if trace.parts[number] == part) for part in STATIC_PARTS
    )
    return weights, state


def keep_compute(trace: Trace) -> Trace:
    """Return the trace with only forward and backward: no optimizer, no collectives."""
    end = trace.phases.get("optimizer", len(trace.sequence))
    sequence = tuple(number for number in trace.sequence[:end] if trace.works[number].kind not in NOT_COMPUTE)
    return trace.replace(sequence=sequence, phases={**trace.phases, "optimizer": len(sequence)})


def compute_peak_s(trace: Trace, device: Device) -> float:
    """Return the seconds of forward and backward at the dense peak rate of the device."""
    peaks = [peak for peak in (device.peaks.tf32, device.peaks.fp32) if peak]
    total = 0.0
    for number in keep_compute(trace).sequence:
        work = trace.works[number]
        narrow = device.peaks.get_rate(work.dtype) if work.dtype in (FLOAT16, BFLOAT16, *FLOAT8) else None
        rate = narrow or max(peaks, default=None)
        total += work.flops / rate if rate else 0.0
    return total


def keep_one_device(layout: Layout) -> Layout:
    """Return a layout of only the device with the least available memory."""
    node = layout.cluster.nodes[0].replace(devices=(layout.device,))
    return replace(layout, places=layout.places[:1], cluster=layout.cluster.replace(nodes=(node,), links=()))


@lru_cache(maxsize=MAX_SETTINGS)
def setting_key(setting: Setting) -> str:
    """Return a setting as a key: every field but those that no estimate depends on."""
    # If branches have different numbers of copies, the rounds of each depend on the whole batch.
    return make_key(setting, UNUSED if setting.mesh.copies else UNUSED_WITH_BATCH)


def strip_device(device: Device) -> Device:
    """Return a device without the fields that no trace depends on."""
    return device.replace(
        index=0,
        free_bytes=None,
        uuid=None,
        bus_id=None,
        processes=None,
        numa_node=None,
        power_limit_w=None,
        sources={},
    )


def scale_time(estimate: Estimate, ratio: float) -> Estimate:
    """Return an estimate whose step takes `ratio` times as long."""

    def divide(value: float | None) -> float | None:
        return None if value is None else value / ratio

    parts = estimate.step_time
    note = f"compiled: time is {ratio:.2f} times the derived one, as verified at another micro-batch"
    return estimate.replace(
        step_s=None if estimate.step_s is None else estimate.step_s * ratio,
        step_time=None
        if parts is None
        else parts.replace(**{name: getattr(parts, name) * ratio for name in parts.__struct_fields__}),
        samples_per_s=divide(estimate.samples_per_s),
        mfu=divide(estimate.mfu),
        hardware_utilization=divide(estimate.hardware_utilization),
        assumptions=(*estimate.assumptions, note),
    )


def is_guessed(setting: Setting) -> bool:
    """Whether a setting is compiled, and its trace is not."""
    return setting.compile and not to_traced_setting(setting).compile


@lru_cache(maxsize=MAX_SETTINGS)
def set_recompute(setting: Setting, recompute: Recompute) -> Setting:
    """Return the setting with another way of recomputing."""
    return setting if setting.recompute is recompute else setting.replace(recompute=recompute)


@lru_cache(maxsize=MAX_SETTINGS)
def use_default_allocator(setting: Setting) -> Setting:
    """Return the setting with the default allocator, on which no time depends."""
    return setting.replace(allocator=Allocator.DEFAULT)


@lru_cache(maxsize=MAX_SETTINGS)
def trace_one_sample(setting: Setting) -> Setting:
    """Return a traced setting at micro-batch 1."""
    return setting.replace(micro_batch=1, global_batch=setting.data_parallel)


@lru_cache(maxsize=MAX_SETTINGS)
def with_one_sample(setting: Setting) -> Setting:
    """Return the setting at micro-batch 1, without accumulation: the same for a whole family."""
    return setting.replace(
        micro_batch=1,
        accumulation=1,
        global_batch=setting.data_parallel,
        allocator=Allocator.DEFAULT,
        shares=(),
    )


@lru_cache(maxsize=MAX_SETTINGS)
def to_traced_setting(setting: Setting) -> Setting:
    """Return the setting to trace: fields that do not affect the trace get a fixed value.

    The effect of compiling is predicted from the eager step, because compiling takes too long for planning.
    Only the compiler knows what it stores within a budget: such a setting is compiled.
    """
    strategy, mesh = strategy_of(setting).traced_as(setting.mesh)
    return setting.replace(
        strategy=strategy,
        mesh=mesh,
        accumulation=1,
        global_batch=setting.micro_batch * mesh.data_parallel,
        compile=setting.recompute.way.budget is not None,
        allocator=Allocator.DEFAULT,
        workers=0,
        # One device has nothing to synchronise.
        sync_batchnorm=setting.sync_batchnorm and setting.gpus > 1,
        shares=(),
    )


def summarize_setting(setting: Setting) -> str:
    """Return a setting in a few words, for progress messages."""
    compiled = ", compiled" if setting.compile else ""
    again = "" if setting.recompute is Recompute.NONE else f", recompute {setting.recompute}"
    return f"{setting.strategy}, micro-batch {setting.micro_batch}, {setting.precision}{again}{compiled}"
