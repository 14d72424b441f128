"""The real Estimator: estimates from traces of the job, as few of them as will do.

Results are for one question, and not carried over to the next: then bounds and runners-up would depend on
earlier questions. Caches on disk hold traces, plans, and estimates. A cached estimate is only used where it
would be computed now, so that it saves time and changes no answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from trimtab.cache import make_key
from trimtab.errors import TrimtabError
from trimtab.planner.protocol import LowerBound, available_bytes
from trimtab.predict import communication, step_time
from trimtab.predict.calibration import find_speed
from trimtab.predict.capacity import judge_fully
from trimtab.predict.derive import derive_trace
from trimtab.predict.estimate import estimate_trace as judge
from trimtab.predict.memory import add_accumulation
from trimtab.spec import PARTS, Allocator, Estimate, Recompute
from trimtab.spec.precision import BFLOAT16, FLOAT16
from trimtab.strategies import one_micro_batch, one_replica, strategy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.planner.protocol import Layout
    from trimtab.spec import Calibration, Device, Setting, Trace

    Answer = Trace | TrimtabError
    TraceAll = Callable[[Sequence[Setting], Device, dict[str, Any]], list[Answer]]
    """The traces of several settings on a device, with members of the job changed, or why there is none."""
    Clock = Callable[[Trace, Setting, Layout, Calibration | None], float | None]
    KnownTime = Callable[[Setting, Layout], float | None]

STATIC_SLACK = 0.98
"""Of static memory, for the bound from below: small tensors may not be cut evenly."""
EVENNESS = 0.95
"""A sample takes no less than this share of its time at the largest micro-batch traced: larger ones run
better, but for the last wave of blocks on the multiprocessors."""
NOT_COMPUTE = ("collective", "wait")
"""Kinds of work that a bound on computing leaves out."""
UNUSED = frozenset({"workers", "shares"})
"""Fields of a Setting that no estimate depends on."""
UNUSED_WITH_BATCH = UNUSED | {"global_batch"}
LINK_UNUSED = frozenset({"devices"})
"""Fields of a Link that no estimate depends on: how many devices it joins matters, not which."""
LINK_WITHIN_UNUSED = LINK_UNUSED | {"source"}
STATIC_PARTS = (PARTS.index("weights"), PARTS.index("optimizer"))


def compute_step_s(trace: Trace, setting: Setting, layout: Layout, own: Calibration | None) -> float | None:
    """Seconds of an optimizer step, without the replay of its memory; None where too little is known."""
    known = find_speed(layout.device, own)
    if known is None or not trace.sequence:
        return None
    among = communication.find_links(layout.cluster, setting.gpus)
    return step_time.estimate_step(
        trace, setting, known.pace, known.host, among, fusing=setting.compile
    ).total_s


@dataclass
class QuestionResults:
    """Results for one question."""

    estimates: dict[str, Estimate] = field(default_factory=dict)
    times: dict[str, float | None] = field(default_factory=dict)
    failures: dict[str, TrimtabError] = field(default_factory=dict)
    static_bytes: dict[str, int] = field(default_factory=dict)
    """Weights and optimizer state of the whole model, by precision."""
    rates: dict[str, float] = field(default_factory=dict)
    """Seconds of forward and backward for one sample at the largest micro-batch traced, by `_pace`."""
    limits: dict[str, float] = field(default_factory=dict)
    """Seconds that the same would take at the peak of the device, by kind of device and precision."""


@dataclass
class EstimateCache:
    """Estimates and times of earlier questions about a job, for the caller to load and store.

    An entry is only used if the traces are at hand from which it would be computed again.
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
    """Estimates of one job, traced when they are first needed."""

    trace_all: TraceAll
    calibration_of: Callable[[Device], Calibration | None] = lambda _: None
    """The user's own calibration of a device."""
    clock: Clock = compute_step_s
    results: QuestionResults = field(default_factory=QuestionResults)
    cache: EstimateCache = field(default_factory=EstimateCache)
    say: Callable[[str], None] = lambda _: None
    """Told what is being traced."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Members of the job that are other than the job has them."""
    traces: dict[str, Answer] = field(default_factory=dict)
    lines: dict[str, set[int]] = field(default_factory=dict)
    """Micro-batches that were traced, by all else that a trace depends on."""
    derived: dict[str, Answer | None] = field(default_factory=dict)
    """Those that follow from them."""
    failures_by_family: dict[str, list[TrimtabError]] = field(default_factory=dict)
    """What went wrong, by family: after two micro-batches a third is not tried."""
    untimed: set[str] = field(default_factory=set)
    """Kinds of devices whose speed is not known."""
    family_times: dict[str, dict[tuple[int, int], float]] = field(default_factory=dict)
    """Times of settings that differ in micro-batch and accumulation alone."""
    direct: set[int] = field(default_factory=set)
    """Numbers of shards that are traced as they are, instead of derived from two others."""
    judged: dict[str, Estimate] = field(default_factory=dict)
    """Verdicts of replays within a limit."""
    names: dict[Layout, str] = field(default_factory=dict)
    """What the key of an estimate says of a layout."""

    def has_traces(self, setting: Setting, layout: Layout) -> bool:
        """Whether an estimate follows from what was traced for this question, itself or by a line.

        What an earlier question left on disk has no say: the same question gets the same answer on any day.
        """
        device = strip_device(layout.device)
        return self._has_result(setting, layout) or all(
            self._trace_key(part, device) in self.traces
            or (part.micro_batch > 1 and len(self.lines.get(self._line_key(part, device), set()) - {1}) > 1)
            for part in self._trace_parts(setting)
        )

    def with_changes(self, **changes: int) -> TraceEstimator:
        """The same job with some members changed; with results of its own."""
        return replace(
            self,
            changes={**self.changes, **changes},
            results=QuestionResults(),
            cache=EstimateCache(),
            traces={},
            derived={},
            lines={},
            failures_by_family={},
            untimed=set(),
            family_times={},
            judged={},
        )

    def prepare(self, asked: Sequence[tuple[Setting, Layout]]) -> None:
        """Trace what is not known yet, one batch of requests for each kind of device."""
        by_device: dict[str, tuple[Layout, dict[str, Setting]]] = {}
        family_times: dict[str, str] = {}
        for setting, layout in asked:
            if self._has_result(setting, layout):
                continue
            device = strip_device(layout.device)
            for part in self._trace_parts(setting):
                key = self._trace_key(part, device)
                if key not in self.traces:
                    by_device.setdefault(device.kind, (layout, {}))[1][key] = part
                    family_times[key] = self._family_key(setting, layout)
        for layout, settings in by_device.values():
            first, *others = settings.values()
            self.say(f"tracing {describe_setting(first)}" + f" and {len(others)} more" * bool(others))
            answers = self.trace_all(list(settings.values()), strip_device(layout.device), self.changes)
            for key, answer in zip(settings, answers, strict=True):
                self.traces[key] = answer
                line = self._line_key(settings[key], strip_device(layout.device))
                self.lines.setdefault(line, set()).add(settings[key].micro_batch)
                if isinstance(answer, TrimtabError):
                    self.failures_by_family.setdefault(family_times[key], []).append(answer)
                else:
                    self._record_rates(answer, settings[key], layout)

    def estimate(self, setting: Setting, layout: Layout) -> Estimate:
        """Return the estimate, from earlier results or from a trace."""
        key = self._estimate_key(setting, layout)
        if key in self.results.failures:
            raise self.results.failures[key]
        known = self.results.estimates.get(key)
        if known is None:
            # Through plain values, as a cached one comes: then both are equal to the last digit.
            known = Estimate.from_builtins(self._compute_estimate(setting, layout, key).to_builtins())
            # The key changes where the number of shards turned out to lie on no line.
            self.results.estimates[self._estimate_key(setting, layout)] = known
        return known.judge_quickly(available_bytes(layout.device))

    def judge_within(
        self, setting: Setting, layout: Layout, limit_bytes: int, *, explain: bool = False
    ) -> Estimate:
        """The estimate with its verdict within so many bytes, by replays of the trace."""
        key = f"{self._estimate_key(setting, layout)} {limit_bytes} {explain}"
        if key not in self.judged:
            found = self.estimate(setting, layout)
            trace = self._derive_trace(setting, layout)
            if trace is None or isinstance(trace, TrimtabError):
                return found
            self.judged[key] = judge_fully(found, trace, setting, limit_bytes=limit_bytes, explain=explain)
        return self.judged[key]

    def _compute_estimate(self, setting: Setting, layout: Layout, key: str) -> Estimate:
        failures_by_family = self.failures_by_family.get(self._family_key(setting, layout), [])
        if len(failures_by_family) > 1:
            raise failures_by_family[0]
        self.prepare([(setting, layout)])
        known = self.cache.estimates.get(key)
        if known is not None and self._traced_time(setting, layout) is not None:
            return Estimate.from_builtins(known)
        trace = self._derive_trace(setting, layout)
        is_sharded = strategy_of(setting).is_sharded
        if trace is None and is_sharded and setting.mesh.dp_shard not in self.direct:
            # No line leads to this number of shards: its micro-batches are traced and lie on lines of their
            # own.
            self.direct.add(setting.mesh.dp_shard)
            self.derived = {name: known for name, known in self.derived.items() if known is not None}
            return self._compute_estimate(setting, layout, self._estimate_key(setting, layout))
        on_a_line = trace is not None
        if trace is None:
            one, device = to_traced_setting(setting), strip_device(layout.device)
            (trace,) = self.trace_all([one], device, self.changes)
            self.derived[self._trace_key(one, device)] = trace
        if isinstance(trace, TrimtabError):
            self.results.failures[key] = trace
            raise trace
        device = layout.device
        found, _ = judge(
            trace,
            setting,
            device,
            cluster=layout.cluster,
            calibration=self.calibration_of(device),
            fusing=setting.compile,
        )
        # One clock for bounds and estimates, so that a bound that is exact stays so.
        seconds = self._compute_time(setting, layout, lambda: trace, keep=on_a_line)
        whole = add_accumulation(found, trace, setting).replace(step_s=seconds)
        if on_a_line:
            self.cache.estimates[key] = whole.to_builtins()
            self.cache.changed = True
        return whole

    def _derive_trace(self, setting: Setting, layout: Layout) -> Answer | None:
        """The trace of a setting from those at hand; None where one is missing."""
        one, device = to_traced_setting(setting), strip_device(layout.device)
        key = self._trace_key(one, device)
        if key not in self.derived:
            needed = strategy_of(one).trace_parts(one, self.direct)
            parts = [self.traces.get(self._trace_key(part, device)) for part in needed]
            wrong = next((part for part in parts if isinstance(part, TrimtabError)), None)
            known = [part for part in parts if part is not None and not isinstance(part, TrimtabError)]
            if wrong is None and len(known) < len(parts):
                return None
            self.derived[key] = wrong or derive_trace(one, known)
        return self.derived[key]

    def _has_anchors(self, setting: Setting, layout: Layout) -> bool:
        """Whether the traces are at hand that a setting's would follow from."""
        device = strip_device(layout.device)
        parts = [self.traces.get(self._trace_key(part, device)) for part in self._trace_parts(setting)]
        return not any(part is None or isinstance(part, TrimtabError) for part in parts)

    def lower_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """The true time where a trace gives it; else what other traces of the same job say at least."""
        return self._make_bound(setting, layout, self._traced_time)

    def cached_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """The same with times that were worked out before alone."""
        return self._make_bound(setting, layout, self._stored_time)

    def _make_bound(self, setting: Setting, layout: Layout, known: KnownTime) -> LowerBound:
        if layout.device.kind in self.untimed:
            return LowerBound(step_s=None, need_bytes=self._least_bytes(setting))
        seconds = known(setting, layout)
        if seconds is None:
            seconds = self._bound_time(setting, layout, known)
        return LowerBound(step_s=seconds, need_bytes=self._least_bytes(setting))

    def tighten_bound(self, setting: Setting, layout: Layout) -> LowerBound:
        """The bound with the time of the same setting without recomputing, where two traces give that one."""
        if strategy_of(setting).is_bounded_by_one_device:
            # Its bound is as good as what is known of one device with the same micro-batches.
            alone = keep_one_device(layout)
            if self._traced_time(one_replica(setting), alone) is None:
                self.tighten_bound(one_replica(setting), alone)
            return self.lower_bound(setting, layout)
        none = setting.replace(recompute=Recompute.NONE)
        if none.micro_batch == 1 and none.accumulation > 1:
            # One sample has to be traced for itself; two take less for each, and bound it from above.
            rounds = -(-none.accumulation // 2)
            none = none.replace(
                micro_batch=2, accumulation=rounds, global_batch=2 * rounds * none.data_parallel, shares=()
            )
        device = strip_device(layout.device)
        lines = [self.lines.get(self._line_key(part, device), set()) for part in self._trace_parts(none)]
        if all(len(line) > 1 for line in lines) and self._traced_time(none, layout) is None:
            self.prepare([(none, layout)])
        return self.lower_bound(setting, layout)

    def _trace_parts(self, setting: Setting) -> list[Setting]:
        """The settings whose traces give this one's."""
        traced = to_traced_setting(setting)
        return strategy_of(traced).trace_parts(traced, self.direct)

    def _line_key(self, setting: Setting, device: Device) -> str:
        return self._trace_key(setting.replace(micro_batch=1, global_batch=setting.data_parallel), device)

    def _bound_time(self, setting: Setting, layout: Layout, known_time: KnownTime) -> float:
        """A time that the setting cannot beat, though it was never traced.

        Recomputing takes no less than not recomputing; spreading over devices no less than the samples of one
        rank take by themselves; and nothing less than its operations take at the peak of the device. A rank
        that runs a part of the model does other work: its strategy says what follows from the whole.
        """
        none = setting.replace(recompute=Recompute.NONE)
        known = known_time(none, layout) if none != setting else None
        above = max(self._bound_by_larger(one, layout) for one in (setting, none))
        strategy = strategy_of(setting)
        if not strategy.runs_whole_model:
            shared = strategy.least_step_s(setting, lambda: self._bound_alone(setting, layout, known_time))
            return max(known or 0.0, above if shared is None else STATIC_SLACK * shared)
        samples = setting.micro_batch * setting.accumulation
        rates = [self.results.rates.get(_rate_key(one, layout.device), 0.0) for one in (setting, none)]
        limit = self.results.limits.get(_peak_key(setting, layout.device), 0.0)
        return max(known or 0.0, above, samples * limit, samples * max(rates) * EVENNESS)

    def _bound_alone(self, setting: Setting, layout: Layout, known_time: KnownTime) -> float:
        """What the samples of one replica take at least on one device."""
        one, alone = one_replica(setting), keep_one_device(layout)
        known = known_time(one, alone)
        return self._bound_time(one, alone, known_time) if known is None else known

    def _bound_by_larger(self, setting: Setting, layout: Layout) -> float:
        """What larger micro-batches of the same family take: smaller ones are taken to be no faster.

        They may be by a per cent or two, where a smaller one suits a cache or the multiprocessors better;
        that is not worth a trace of each.
        """
        samples = setting.micro_batch * setting.accumulation
        known = self.family_times.get(self._family_key(setting, layout), {})
        return max(
            (
                seconds * min(1.0, samples / (micro * rounds))
                for (micro, rounds), seconds in known.items()
                if micro > setting.micro_batch
            ),
            default=0.0,
        )

    def _family_key(self, setting: Setting, layout: Layout) -> str:
        one = setting.replace(
            micro_batch=1,
            accumulation=1,
            global_batch=setting.data_parallel,
            allocator=Allocator.DEFAULT,
            shares=(),
        )
        return self._estimate_key(one, layout)

    def _stored_time(self, setting: Setting, layout: Layout) -> float | None:
        return self.results.times.get(
            self._estimate_key(setting.replace(allocator=Allocator.DEFAULT), layout)
        )

    def _traced_time(self, setting: Setting, layout: Layout) -> float | None:
        """The time that a trace at hand gives, without replaying its memory."""
        key = self._estimate_key(setting.replace(allocator=Allocator.DEFAULT), layout)
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
        """The time by a trace; what was traced for its own sake is not kept, as no line leads to it."""

        def compute() -> float | None:
            found = trace()
            assert found is not None  # noqa: S101 - the caller has seen to it
            assert not isinstance(found, TrimtabError)  # noqa: S101
            return self.clock(found, setting, layout, self.calibration_of(layout.device))

        key = self._estimate_key(setting.replace(allocator=Allocator.DEFAULT), layout)
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
        """What a trace of the whole model says of settings that were not traced."""
        strategy = strategy_of(setting)
        if not strategy.runs_whole_model:
            return
        if setting.precision.value not in self.results.static_bytes:
            shares = strategy.weight_shares(setting.mesh) or 1
            self.results.static_bytes[setting.precision.value] = count_static_bytes(trace) * shares
        alone, one = keep_one_device(layout), one_micro_batch(setting)
        for compiled in (False, True):
            like = one.replace(compile=compiled)
            key = f"{self._trace_key(setting, strip_device(layout.device))} {compiled}"
            clock = partial(self.clock, keep_compute(trace), like, alone, self.calibration_of(layout.device))
            seconds = self.cache.time(key, clock)
            if seconds is None:
                self.untimed.add(layout.device.kind)
                return
            pace = _rate_key(setting.replace(compile=compiled), layout.device)
            _store_minimum(self.results.rates, pace, seconds / setting.micro_batch)
        if setting.recompute is not Recompute.NONE:
            return
        limit = compute_peak_s(trace, layout.device) / setting.micro_batch
        _store_minimum(self.results.limits, _peak_key(setting, layout.device), limit)

    def _least_bytes(self, setting: Setting) -> int:
        """What a rank holds at least, where any trace has told."""
        shares = strategy_of(setting).weight_shares(setting.mesh)
        if shares is None:
            return 0
        return int(STATIC_SLACK * self.results.static_bytes.get(setting.precision.value, 0) / shares)

    def _has_result(self, setting: Setting, layout: Layout) -> bool:
        key = self._estimate_key(setting, layout)
        return key in self.results.estimates or key in self.results.failures

    def _trace_key(self, setting: Setting, device: Device) -> str:
        return f"{device.fingerprint()} {setting_key(setting)}"

    def _estimate_key(self, setting: Setting, layout: Layout) -> str:
        """What an estimate depends on, what is free at the moment left out."""
        if layout not in self.names:
            nodes = tuple(len(node.devices) for node in layout.cluster.nodes)
            # An estimate says where the network's bandwidth is from, and nothing of links within a node.
            links = tuple(
                (len(link.devices), make_key(link, LINK_UNUSED if link.node is None else LINK_WITHIN_UNUSED))
                for link in layout.cluster.links
            )
            self.names[layout] = f"{strip_device(layout.device).fingerprint()} {nodes} {links}"
        is_direct = strategy_of(setting).is_sharded and setting.mesh.dp_shard in self.direct
        direct = " direct" if is_direct else ""
        return f"{self.names[layout]} {setting_key(setting)}{direct}"


def _store_minimum(known: dict[str, float], key: str, seconds: float) -> None:
    known[key] = min(seconds, known.get(key, seconds))


def _rate_key(setting: Setting, device: Device) -> str:
    """What the time of a sample depends on, beside the micro-batch."""
    return f"{_peak_key(setting, device)} {setting.recompute} {setting.compile}"


def _peak_key(setting: Setting, device: Device) -> str:
    return f"{device.kind} {setting.precision}"


def count_static_bytes(trace: Trace) -> int:
    """Weights and optimizer state of the traced rank, once the first step has made all of them."""
    alive: set[int] = set()
    for number in trace.order[: trace.marks.get("step1", len(trace.order))]:
        if number >= 0:
            alive.add(number)
        else:
            alive.discard(~number)
    return sum(trace.sizes[number] for number in alive if trace.parts[number] in STATIC_PARTS)


def keep_compute(trace: Trace) -> Trace:
    """The forward and backward pass alone: no optimizer, no collectives."""
    end = trace.phases.get("optimizer", len(trace.sequence))
    kept = tuple(one for one in trace.sequence[:end] if trace.works[one].kind not in NOT_COMPUTE)
    return trace.replace(sequence=kept, phases={**trace.phases, "optimizer": len(kept)})


def compute_peak_s(trace: Trace, device: Device) -> float:
    """Seconds of the operations of forward and backward at the dense peak of the device."""
    known = [one for one in (device.peaks.tf32, device.peaks.fp32) if one]
    total = 0.0
    for number in keep_compute(trace).sequence:
        work = trace.works[number]
        half = device.peaks.get_rate(work.dtype) if work.dtype in (FLOAT16, BFLOAT16) else None
        rate = half or max(known, default=None)
        total += work.flops / rate if rate else 0.0
    return total


def keep_one_device(layout: Layout) -> Layout:
    """The fullest device of a layout by itself."""
    node = layout.cluster.nodes[0].replace(devices=(layout.device,))
    return replace(layout, places=layout.places[:1], cluster=layout.cluster.replace(nodes=(node,), links=()))


def setting_key(setting: Setting) -> str:
    """Return a setting as a key: every field but those that no estimate depends on."""
    # If branches have different numbers of copies, the rounds of each depend on the whole batch.
    return make_key(setting, UNUSED if setting.mesh.copies else UNUSED_WITH_BATCH)


def strip_device(device: Device) -> Device:
    """A device without what has no say in a trace."""
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


def to_traced_setting(setting: Setting) -> Setting:
    """The setting whose trace serves: what has no say in it is put back to one value.

    What compiling changes is guessed from the eager step: the compiler takes longer than planning may.
    """
    strategy, mesh = strategy_of(setting).traced_as(setting.mesh)
    return setting.replace(
        strategy=strategy,
        mesh=mesh,
        accumulation=1,
        global_batch=setting.micro_batch * mesh.data_parallel,
        compile=False,
        allocator=Allocator.DEFAULT,
        workers=0,
        # One device has nobody to synchronise with.
        sync_batchnorm=setting.sync_batchnorm and setting.gpus > 1,
        shares=(),
    )


def describe_setting(setting: Setting) -> str:
    """A setting in few words, for whoever waits."""
    compiled = ", compiled" if setting.compile else ""
    again = "" if setting.recompute is Recompute.NONE else f", recompute {setting.recompute}"
    return f"{setting.strategy}, micro-batch {setting.micro_batch}, {setting.precision}{again}{compiled}"
