"""From a trace and a device to an Estimate: memory by replay, time by the clocks of host and device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trimtab.catalog.facts import facts_of
from trimtab.catalog.tables import mfu_references
from trimtab.predict import communication, step_time
from trimtab.predict.calibration import speed
from trimtab.predict.memory import MemoryPeaks, memory
from trimtab.spec import Allocator, Band, Estimate, MfuReference, Recompute, StepTime
from trimtab.spec.precision import DTYPE_BYTES, FLOAT16
from trimtab.strategies import strategy_of
from trimtab.units import MIB

if TYPE_CHECKING:
    from trimtab.catalog.facts import DeviceFacts, MemoryFacts
    from trimtab.spec import Calibration, Cluster, Device, Dtypes, Setting, Trace


# Rate an MFU against published runs of the same kind of model on the same kind of GPU.
#
# The figures are rows of catalog/mfu.toml. Where none are known for the device, the kind of model or the
# precision, there is no rating: a bare share of the peak says more than an adjective without a ground.


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


def estimate(  # noqa: PLR0913 - a setting, where it runs, and what is known of that
    trace: Trace,
    setting: Setting,
    device: Device,
    *,
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
    fusing: bool = False,
) -> tuple[Estimate, MemoryPeaks]:
    """What the setting would need on the device, how fast it would run, and the details behind it.

    With `fusing` the trace is of the same setting without compile, and what compiling changes is guessed. The
    cluster tells the links between devices; without one a setting of several devices has no time.
    """
    facts = facts_of(device)
    found, said_of_ranks = _fullest(trace, setting, facts.memory)
    capacity = device.free_bytes if device.free_bytes is not None else device.memory_bytes
    band = found.band
    if fusing:
        process = found.process_bytes
        room = facts.memory
        high = room.guessed_high if setting.recompute is Recompute.NONE else room.guessed_again
        band = Band(low_bytes=round(process * room.guessed_low), high_bytes=round(process * high))
    timed, said = _timed(trace, setting, device, cluster, calibration, fusing=fusing)
    return (
        Estimate(
            allocated_bytes=found.allocated_bytes,
            reserved_bytes=found.reserved_bytes,
            process_bytes=found.process_bytes,
            parts=found.parts,
            gradients_bytes=found.gradients_bytes,
            band=band,
            **timed,
            assumptions=(*trace.assumptions, *said_of_ranks, *_assumed(setting, device, facts), *said),
        ).judge_quickly(capacity),
        found,
    )


def _fullest(trace: Trace, setting: Setting, facts: MemoryFacts) -> tuple[MemoryPeaks, list[str]]:
    """The memory of the kind of ranks that needs most, and which one that is."""
    found = [rank_memory(rank, setting, facts)[0] for rank in trace.ranks]
    most = max(range(len(found)), key=lambda number: found[number].band.high_bytes)
    if not trace.beside:
        return found[most], []
    others = ", ".join(rank.rank for number, rank in enumerate(trace.ranks) if number != most)
    named = f"the ranks of {trace.ranks[most].rank} hold most and are the ones estimated"
    return found[most], [f"{named}; those of {others} hold less"]


def rank_memory(trace: Trace, setting: Setting, facts: MemoryFacts) -> tuple[MemoryPeaks, MemoryPeaks]:
    """The memory of one kind of rank; and the same without what `in_flight` adds to the replay."""
    alone = memory(
        trace,
        facts,
        expandable=setting.allocator is Allocator.EXPANDABLE,
        sharded=strategy_of(setting).is_sharded,
        compiled=setting.compile,
    )
    return in_flight(alone, trace, setting, facts), alone


def in_flight(found: MemoryPeaks, trace: Trace, setting: Setting, facts: MemoryFacts) -> MemoryPeaks:
    """The memory of a rank with all the micro-batches that it holds at the same time, as in a pipeline."""
    more = strategy_of(setting).held_micro_batches(setting, trace.part) - 1
    if more < 1:
        return found
    kept, inputs = more * trace.kept_bytes, more * found.parts.inputs
    size = kept + inputs
    parts = found.parts
    return replace(
        found,
        allocated_bytes=found.allocated_bytes + size,
        reserved_bytes=found.reserved_bytes + size,
        process_bytes=found.process_bytes + size,
        parts=parts.replace(activations=parts.activations + kept, inputs=parts.inputs + inputs),
        band=Band(
            low_bytes=found.band.low_bytes + round(size * facts.band_low),
            high_bytes=found.band.high_bytes + round(size * facts.band_high),
        ),
    )


def _timed(  # noqa: PLR0913 - as above
    trace: Trace,
    setting: Setting,
    device: Device,
    cluster: Cluster | None,
    calibration: Calibration | None,
    *,
    fusing: bool,
) -> tuple[dict[str, Any], list[str]]:
    """The figures of time, and what was assumed for them; none where too little is known."""
    pace = speed(device, calibration)
    alone = setting.gpus == 1
    if pace is None or not trace.sequence or (cluster is None and not alone):
        return {}, []
    among = (
        communication.links(cluster, setting.gpus)
        if cluster is not None
        else communication.Links(1.0, 1.0, 1, 1)
    )
    parts = step_time.step(trace, setting, pace.pace, pace.host, among, fusing=fusing)
    seconds = parts.total_s
    peak = device.peaks.of(setting.dtypes.products) or device.peaks.fp32
    flops = step_time.device_flops(trace, setting)
    once = step_time.model_flops(trace)
    mfu = flops / (seconds * peak) if peak else None
    usual = reference(model_kind(trace), device, setting.dtypes)
    said = []
    if fusing and trace.no_compile_gain:
        said.append(
            f"compiled: {trace.no_compile_gain}; time and memory are taken to be as without; "
            "`trimtab estimate --compile` asks the compiler itself"
        )
    elif fusing:
        said.append(
            "compiled: memory is taken to be as without compiling, time by what could be fused; "
            "`trimtab estimate --compile` asks the compiler itself"
        )
    if not pace.own:
        name = device.kind if device.slice else device.name
        said.append(f"time: {name} was not calibrated; its datasheet with the efficiencies of {pace.source}")
    said += strategy_of(setting).time_assumptions
    if not alone:
        said.append("time: collectives by the bandwidth of the links, not measured")
    if not (alone and pace.own) and (doubt := doubt_of(mfu, usual)):
        said.append(doubt)
    if cluster is not None and (network := communication.network_words(cluster, setting.gpus)):
        said.append(network)
    return {
        "step_s": seconds,
        "step_time": StepTime(
            compute_s=parts.compute_s,
            memory_s=parts.memory_s,
            launch_s=parts.launch_s,
            communication_s=parts.communication_s,
            bubble_s=parts.bubble_s,
        ),
        "samples_per_s": setting.global_batch / seconds,
        "mfu": mfu,
        "mfu_rating": rating(mfu, usual) if mfu is not None else None,
        "mfu_reference": usual if mfu is not None else None,
        "hardware_utilization": mfu and mfu * (once + trace.recomputed_flops) / once,
    }, said


def _assumed(setting: Setting, device: Device, facts: DeviceFacts) -> list[str]:
    said = []
    if device.model != facts.device:
        said.append(
            f"the CUDA context is taken to be as large as on {facts.spoken} "
            f"({facts.memory.context_bytes // MIB} MiB); it was not measured here"
        )
    if setting.gpus > 1:
        said.append("NCCL's own buffers are not counted: they take 0.2 to 2 GiB, by GPUs and topology")
    return said
