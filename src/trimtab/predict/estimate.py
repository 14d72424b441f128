"""Compute the Estimate of a trace on a device: memory by allocator replay, time by step simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trimtab.catalog.facts import facts_of
from trimtab.catalog.tables import mfu_references, nccl_memory, public_steps
from trimtab.predict import communication, step_time
from trimtab.predict.calibration import find_speed
from trimtab.predict.host_link import find_host_link
from trimtab.predict.host_memory import estimate_host, list_host_assumptions
from trimtab.predict.memory import MemoryPeaks, estimate_memory
from trimtab.predict.nccl_memory import estimate_nccl_bytes
from trimtab.spec import (
    Allocator,
    Band,
    ContextMethod,
    Estimate,
    MfuReference,
    PipelineEstimate,
    Recompute,
    StepTime,
)
from trimtab.spec.precision import DTYPE_BYTES, FLOAT16
from trimtab.strategies import strategy_of
from trimtab.units import MIB, format_bytes, format_figure

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.catalog.facts import DeviceFacts, MemoryFacts
    from trimtab.catalog.tables import PublicCorrection
    from trimtab.predict.calibration import Speed
    from trimtab.spec import Calibration, Cluster, Device, Dtypes, Setting, Trace


# An MFU is rated against published runs of the same kind of model on the same kind of GPU (catalog/mfu.toml).
# Without such runs for the device, the kind of model and the precision there is no rating.


RATINGS = ("poor", "fair", "good", "excellent")
TRANSFORMER_SHARE = 0.95
"""The smallest share of matrix products and attention in the operations of a transformer."""
MIN_PUBLIC_ROWS = 3
"""Fewer published measurements on a GPU are not shown."""
POOR_SHARE = 0.5
"""An MFU below this share of the lower end of the usual range is poor."""


def model_kind(trace: Trace) -> str | None:
    """Return the kind of model, determined from its operations; None for an unknown kind.

    A mixture of experts counts as unknown: its grouped products are slower, and we have no published runs.
    """
    flops: dict[str, int] = {}
    for number in trace.sequence:
        work = trace.works[number]
        flops[work.kind] = flops.get(work.kind, 0) + work.flops
        if "grouped_mm" in work.op:
            return None
    dense = flops.get("matrix", 0) + flops.get("attention", 0)
    is_transformer = flops.get("attention", 0) > 0 and dense >= TRANSFORMER_SHARE * sum(flops.values())
    return "transformer" if is_transformer else None


CONTEXT_NOTES = {
    ContextMethod.RING: "time: the next keys and values of a ring are on their way while the current block "
    "is computed; such a ring was never measured",
    ContextMethod.ALL_TO_ALL: "time: nothing hides the exchange of positions for heads; it was never "
    "measured",
}
"""What the time of attention over split sequences takes for granted."""
EXPERT_NOTE = (
    "time: nothing hides the exchange of tokens between experts on different GPUs; it was never measured "
    "between GPUs"
)
TENSOR_NOTE = (
    "time: what the Python of DTensor costs the host is not counted; with short blocks a step takes up to "
    "three times as long"
)
"""On an H200 (torch 2.11), a rank of tp 8 with four blocks of an 8B model took 88 ms, and 32 are predicted;
with tp 2 it took 69 ms, and 72 are predicted."""
CALLS_NOT_MEASURED = (
    "time: what the host needs to call the optimizer for each weight in the backward pass was not measured "
    "beside a GPU"
)


def find_mfu_reference(kind: str | None, device: Device, dtypes: Dtypes) -> MfuReference | None:
    """Return the MFU that published runs of such a model reach on such a device; None if unknown."""
    # The published runs compute in 16 bits.
    if DTYPE_BYTES[dtypes.compute] != DTYPE_BYTES[FLOAT16] or device.slice is not None:
        return None
    row = next((row for row in mfu_references() if row.model == kind and device.model in row.devices), None)
    if row is None:
        return None
    return MfuReference(low=row.low / 100, high=row.high / 100, model=row.model, figures=row.figures)


def rate_mfu(mfu: float, usual: MfuReference | None) -> str | None:
    """Return the rating of an MFU relative to the usual range; None without a range.

    >>> usual = MfuReference(low=0.36, high=0.46, model="transformer", figures="...")
    >>> [rate_mfu(mfu, usual) for mfu in (0.1, 0.28, 0.4, 0.5)], rate_mfu(0.4, None)
    (['poor', 'fair', 'good', 'excellent'], None)
    """
    if usual is None:
        return None
    return RATINGS[sum(mfu >= limit for limit in (POOR_SHARE * usual.low, usual.low, usual.high))]


def warn_high_mfu(mfu: float | None, usual: MfuReference | None) -> str:
    """Return a warning for a predicted MFU that no published run has reached, or an empty string.

    >>> warn_high_mfu(0.4, MfuReference(low=0.36, high=0.46, model="transformer", figures="..."))
    ''
    """
    if mfu is None or usual is None or mfu <= usual.high:
        return ""
    return (
        f"time: the predicted MFU of {mfu:.0%} is above the best published ({usual.figures}); "
        "expect the step to take longer than predicted"
    )


HOST_MATTERS = 0.1
"""Share of a step between its times on the fastest and the slowest host from which a note says so."""


def estimate_trace(  # noqa: PLR0913 - a setting, and the device that it runs on
    trace: Trace,
    setting: Setting,
    device: Device,
    *,
    cluster: Cluster | None = None,
    calibration: Calibration | None = None,
    fusing: bool = False,
) -> tuple[Estimate, MemoryPeaks]:
    """Return the estimate of a setting on a device, and the details of its memory.

    With `fusing` the trace is of the same setting without compile, and the effect of compiling is guessed.
    The cluster gives the links between devices: without it, a setting of several devices has no step time.
    """
    facts = facts_of(device)
    peaks, fullest, rank_notes = _find_largest_rank(trace, setting, facts.memory)
    nccl_bytes = 0
    if cluster is not None:
        nccl_bytes = estimate_nccl_bytes(setting, communication.find_links(cluster, setting.gpus))
        peaks = add_nccl(peaks, nccl_bytes)
    capacity = device.free_bytes if device.free_bytes is not None else device.memory_bytes
    band = peaks.band
    if fusing:
        process = peaks.process_bytes
        room = facts.memory
        high = room.guessed_high if setting.recompute is Recompute.NONE else room.guessed_again
        band = Band(low_bytes=round(process * room.guessed_low), high_bytes=round(process * high))
    host = estimate_host(trace, setting, cluster)
    timed, time_notes = _estimate_time(trace, setting, device, cluster, calibration, fusing=fusing)
    return (
        Estimate(
            allocated_bytes=peaks.allocated_bytes,
            reserved_bytes=peaks.reserved_bytes,
            process_bytes=peaks.process_bytes,
            parts=peaks.parts,
            gradients_bytes=peaks.gradients_bytes,
            band=band,
            host=host,
            fullest_rank=fullest,
            pipeline=_describe_pipeline(trace, setting, timed),
            **timed,
            assumptions=(
                *trace.assumptions,
                *rank_notes,
                *_describe_offload(trace, setting),
                *_list_assumptions(setting, device, facts, nccl_bytes),
                *list_host_assumptions(
                    setting,
                    host,
                    communication.find_links(cluster, setting.gpus) if timed and cluster else None,
                ),
                *time_notes,
            ),
        ).judge_quickly(capacity),
        peaks,
    )


def _describe_pipeline(trace: Trace, setting: Setting, timed: dict[str, Any]) -> PipelineEstimate | None:
    """Return the stages of a pipeline; None for another strategy, or a trace without them."""
    strategy = strategy_of(setting)
    if not strategy.has_schedule or not trace.stage_layers:
        return None
    first, *_, last = sorted(trace.ranks, key=lambda rank: rank.part)
    return PipelineEstimate(
        layers=trace.stage_layers,
        first_outside=first.outside,
        last_outside=last.outside,
        held_micro_batches=tuple(
            strategy.held_micro_batches(setting, rank) for rank in range(setting.mesh.pp)
        ),
        bubble_share=timed["step_time"].bubble_s / timed["step_s"] if timed else None,
    )


def _find_largest_rank(
    trace: Trace, setting: Setting, facts: MemoryFacts
) -> tuple[MemoryPeaks, str, list[str]]:
    """Return the memory of the kind of rank that needs most, its name, and a note on it."""
    peaks = [estimate_rank_memory(rank, setting, facts)[0] for rank in trace.ranks]
    most = max(range(len(peaks)), key=lambda number: peaks[number].band.high_bytes)
    if not trace.beside:
        return peaks[most], "", []
    others = ", ".join(rank.rank for number, rank in enumerate(trace.ranks) if number != most)
    named = f"the ranks of {trace.ranks[most].rank} hold most and are the ones estimated"
    return peaks[most], trace.ranks[most].rank, [f"{named}; those of {others} hold less"]


def estimate_rank_memory(
    trace: Trace, setting: Setting, facts: MemoryFacts
) -> tuple[MemoryPeaks, MemoryPeaks]:
    """Return the memory of one kind of rank, with and without what `add_in_flight` adds to the replay."""
    alone = estimate_memory(
        trace,
        facts,
        expandable=setting.allocator is Allocator.EXPANDABLE,
        sharded=strategy_of(setting).is_sharded,
        compiled=setting.compile,
    )
    return add_in_flight(alone, trace, setting, facts), alone


def add_in_flight(peaks: MemoryPeaks, trace: Trace, setting: Setting, facts: MemoryFacts) -> MemoryPeaks:
    """Add the micro-batches that a rank of a pipeline holds at the same time."""
    more = strategy_of(setting).held_micro_batches(setting, trace.part) - 1
    if more <= 0:
        return peaks
    kept, inputs = round(more * trace.kept_bytes), round(more * peaks.parts.inputs)
    size = kept + inputs
    parts = peaks.parts
    return replace(
        peaks,
        allocated_bytes=peaks.allocated_bytes + size,
        reserved_bytes=peaks.reserved_bytes + size,
        process_bytes=peaks.process_bytes + size,
        parts=parts.replace(activations=parts.activations + kept, inputs=parts.inputs + inputs),
        band=Band(
            low_bytes=peaks.band.low_bytes + round(size * facts.band_low),
            high_bytes=peaks.band.high_bytes + round(size * facts.band_high),
        ),
    )


def add_nccl(peaks: MemoryPeaks, size: int) -> MemoryPeaks:
    """Add the memory of NCCL, which is outside of torch's allocator."""
    error = nccl_memory().error
    return replace(
        peaks,
        process_bytes=peaks.process_bytes + size,
        parts=peaks.parts.replace(communication=peaks.parts.communication + size),
        band=Band(
            low_bytes=peaks.band.low_bytes + round(size * (1 - error)),
            high_bytes=peaks.band.high_bytes + round(size * (1 + error)),
        ),
    )


def find_public_correction(device: Device) -> PublicCorrection | None:
    """Return the factor of published steps on a device for layouts by formulas; None if it has none."""
    return next((row.correction for row in public_steps() if row.name == device.model), None)


def describe_public_steps(device: Device) -> list[str]:
    """Return how published steps on a device compare with predictions; empty if there are too few."""
    rows = (row for row in public_steps() if row.name == device.model and row.rows >= MIN_PUBLIC_ROWS)
    return [f"time: {row.describe()}" for row in rows]


def _list_time_notes(
    trace: Trace, setting: Setting, device: Device, pace: Speed, *, fusing: bool
) -> list[str]:
    """Return what the time of compiled code, of unmeasured kernels and of 8-bit products is based on."""
    notes = []
    if fusing and trace.no_compile_gain:
        notes.append(
            f"compiled: {trace.no_compile_gain}; time and memory are taken to be as without; "
            "`trimtab estimate --compile` asks the compiler itself"
        )
    elif fusing:
        notes.append(
            "compiled: memory is taken to be as without compiling, time by what could be fused; "
            "`trimtab estimate --compile` asks the compiler itself"
        )
    if setting.recompute.way.budget is not None:
        notes.append(
            f"recompute {setting.recompute}: torch's own partitioner decided what is stored, and another "
            "release of torch may store other tensors; MFU counts products that are computed again"
        )
    if not pace.own:
        name = device.kind if device.slice else device.name
        notes.append(f"time: {name} was not calibrated; its datasheet with the efficiencies of {pace.source}")
        notes += describe_public_steps(device)
    if pace.imported:
        notes.append(f"time: by the calibration of {pace.source} from {pace.imported}")
    if unmeasured := pace.pace.list_unmeasured(trace.works):
        notes.append(
            f"time: no calibrated kernel is {' or '.join(unmeasured)}: taken to be as efficient as "
            "attention over whole rows"
        )
    form = setting.dtypes.products_format
    if form is not None:
        notes.append(f"fp8: MFU is a share of the peak in {setting.dtypes.reference_products}")
    if form is not None and form.block:
        notes.append(
            "mxfp8 was measured on no GPU: products run at the fp8 peak as efficiently as fp8-rowwise, casts "
            "as fast as they move memory; trimtab predicts it, and does not train with it on a GPU"
        )
    elif form is not None and not setting.compile:
        notes.append("fp8 without --compile: scaling and casting run as kernels of their own")
    return notes


def _estimate_time(  # noqa: PLR0913 - as above
    trace: Trace,
    setting: Setting,
    device: Device,
    cluster: Cluster | None,
    calibration: Calibration | None,
    *,
    fusing: bool,
) -> tuple[dict[str, Any], list[str]]:
    """Return the time fields of an Estimate and their assumptions; empty if the speed is unknown."""
    pace = find_speed(device, calibration)
    alone = setting.gpus == 1
    if pace is None or not trace.sequence or (cluster is None and not alone):
        return {}, []
    among = (
        communication.find_links(cluster, setting.gpus, calibration)
        if cluster is not None
        else communication.Links(1.0, 1.0, 1, 1)
    )
    link = find_host_link(device)

    def time_step(host: step_time.HostCosts) -> step_time.Step:
        return step_time.estimate_step(
            trace, setting, pace.pace, host, among, fusing=fusing, host_bytes_per_s=link.bytes_per_s
        )

    parts = time_step(pace.host)
    seconds = parts.total_s
    peak = device.peaks.get_rate(setting.dtypes.reference_products) or device.peaks.fp32
    flops = step_time.device_flops(trace, setting)
    once = step_time.model_flops(trace)
    mfu = flops / (seconds * peak) if peak else None
    usual = find_mfu_reference(model_kind(trace), device, setting.dtypes)
    notes = _list_time_notes(trace, setting, device, pace, fusing=fusing)
    if not pace.host_measured:
        notes += _describe_host_speed(device, parts, lambda host: time_step(host).total_s)
    if setting.offload:
        notes.append(link.describe())
    notes += [CALLS_NOT_MEASURED] * setting.optimizer_in_backward
    notes += strategy_of(setting).time_assumptions
    notes += [TENSOR_NOTE] * (setting.mesh.tp > 1)
    notes += [EXPERT_NOTE] * (setting.mesh.ep > 1)
    if setting.mesh.cp > 1:
        notes.append(CONTEXT_NOTES[setting.cp_method])
    if not alone and cluster is not None:
        notes.append(communication.describe_collectives(cluster, calibration))
    if not (alone and pace.own) and (doubt := warn_high_mfu(mfu, usual)):
        notes.append(doubt)
    if cluster is not None and (network := communication.describe_network(cluster, setting.gpus)):
        notes.append(network)
    return {
        "step_s": seconds,
        "step_time": StepTime(
            compute_s=parts.compute_s,
            memory_s=parts.memory_s,
            launch_s=parts.launch_s,
            communication_s=parts.communication_s,
            bubble_s=parts.bubble_s,
            offload_s=parts.offload_s,
        ),
        "samples_per_s": setting.global_batch / seconds,
        "mfu": mfu,
        "mfu_rating": rate_mfu(mfu, usual) if mfu is not None else None,
        "mfu_reference": usual if mfu is not None else None,
        "hardware_utilization": mfu and mfu * (once + trace.recomputed_flops) / once,
    }, notes


def _describe_host_speed(
    device: Device, step: step_time.Step, time_step: Callable[[step_time.HostCosts], float]
) -> list[str]:
    """Return a note if a step waits for a host that was not measured: its time with others."""
    facts = facts_of(device)
    host = facts.host
    threshold_s = HOST_MATTERS * step.total_s
    most_s = time_step(step_time.host_costs_at(host.slowest, facts))
    # No host saves more than all that the device waits for it; timing a step again takes long.
    if most_s - (step.total_s - step.launch_s) < threshold_s:
        return []
    least_s = time_step(step_time.host_costs_at(host.fastest, facts))
    if most_s - least_s < threshold_s:
        return []
    fast, slow, assumed = (
        f"{layers * host.bare_forward_s * 1e6:.0f}" for layers in (host.fastest, host.slowest, host.usual)
    )
    least, most = format_figure(least_s * 1e3), format_figure(most_s * 1e3)
    note = (
        f"time: the device waits for the host, which was not measured: a step takes {least} to {most} ms "
        f"on hosts that need {fast} to {slow} us for a bare operation; {assumed} us are assumed. "
        "`trimtab calibrate` on that machine measures it"
    )
    return [note]


def mix_times(none: Estimate, full: Estimate, share: float) -> dict[str, Any]:
    """Return the time fields with this share of the blocks recomputed, between none and all of them.

    Every recomputed block adds the same operations, so each part of the time is on a line. The
    steps of a Llama that were measured on an H200 are within 1 % of it.
    """
    if none.step_time is None or full.step_time is None or not none.step_s or not none.samples_per_s:
        return {}

    def line(low: float, high: float) -> float:
        return low + share * (high - low)

    names = StepTime.__struct_fields__
    parts = StepTime(
        **{name: line(getattr(none.step_time, name), getattr(full.step_time, name)) for name in names}
    )
    seconds = sum(getattr(parts, name) for name in names)
    slower = seconds / none.step_s
    times: dict[str, Any] = {
        "step_s": seconds,
        "step_time": parts,
        "samples_per_s": none.samples_per_s / slower,
    }
    if none.mfu and full.mfu and none.hardware_utilization and full.hardware_utilization:
        mfu = none.mfu / slower
        more = line(none.hardware_utilization / none.mfu, full.hardware_utilization / full.mfu)
        times |= {
            "mfu": mfu,
            "mfu_rating": rate_mfu(mfu, none.mfu_reference),
            "hardware_utilization": mfu * more,
        }
    return times


def _describe_offload(trace: Trace, setting: Setting) -> list[str]:
    """Return a note on the memory of the host that activations take."""
    most = max(
        round(rank.host_bytes * strategy_of(setting).held_micro_batches(setting, rank.part))
        for rank in trace.ranks
    )
    if not most:
        return []
    return [f"activations on the host: {format_bytes(most)} of its memory for every rank, pinned"]


def _list_assumptions(setting: Setting, device: Device, facts: DeviceFacts, nccl_bytes: int) -> list[str]:
    notes = []
    if device.model != facts.device:
        notes.append(
            f"the CUDA context is taken to be as large as on {facts.spoken} "
            f"({facts.memory.context_bytes // MIB} MiB); it was not measured here"
        )
    if nccl_bytes:
        notes.append(
            f"NCCL takes {format_bytes(nccl_bytes)} for its kernels and buffers, by its source code; only "
            "the part of one rank was measured"
        )
    elif setting.gpus > 1:
        notes.append("NCCL's own buffers are not counted: they take 0.2 to 4 GiB, by GPUs and topology")
    return notes
