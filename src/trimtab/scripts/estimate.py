"""Turn what a script did on the pretended GPU into an estimate."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import TrimtabError, WrongUse
from trimtab.planner.estimates import refuse_emulated, smallest_device
from trimtab.planner.plan_files import rebuild_cluster
from trimtab.predict.allocator import AllocatorConfig, replay
from trimtab.predict.calibration import read_own_calibration
from trimtab.predict.capacity import judge_fully
from trimtab.predict.estimate import estimate_trace
from trimtab.predict.memory import allocator_events
from trimtab.scripts.command import format_command, set_processes
from trimtab.scripts.follow import find_followed, follow_script
from trimtab.scripts.script_search import LONGEST, need_with_longest
from trimtab.spec import (
    Allocator,
    BaseFormat,
    OptimizerImplementation,
    PhasePeak,
    Precision,
    Recompute,
    ScriptFact,
    ScriptReport,
    Setting,
    Strategy,
    Verdict,
)
from trimtab.spec.precision import BY_ROW, ROWWISE, SCALED_PRODUCT, TENSORWISE, ProductsFormat
from trimtab.strategies import STRATEGIES, usual_strategy
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.predict.allocator import Event
    from trimtab.predict.memory import MemoryPeaks
    from trimtab.scripts.result import ScriptResult
    from trimtab.spec import Cluster, Device, Estimate, Plan, ScriptCommand, Trace

SEEN_FACTS = (
    "precision",
    "base",
    "optimizer",
    "optimizers",
    "optimizer_in_backward",
    "recompute",
    "compile",
    "gpus",
    "strategy",
    "tensor_parallel",
    "loader",
)
"""What the script's own calls show, in the order in which it is listed."""
PHASES = ("first step", "steady step", "evaluation", "save")


@dataclass(frozen=True, kw_only=True)
class ScriptEstimate:
    """The estimate of a training command, and what was found out about it."""

    command: ScriptCommand
    estimate: Estimate
    peaks: MemoryPeaks
    trace: Trace
    setting: Setting
    script: ScriptReport
    phases: tuple[PhasePeak, ...]
    device: Device


def estimate_script(
    command: ScriptCommand,
    cluster: Cluster,
    *,
    say: Callable[[str], None] | None = None,
    cache: bool = True,
) -> ScriptEstimate:
    """Follow a command on the smallest device of a cluster, and estimate it there."""
    command, device, devices = _place_command(command, cluster)
    refuse_too_few(command, cluster)
    result = follow_script(command, device, devices=devices, say=say, cache=cache)
    return estimate_result(command, result, cluster)


def _place_command(command: ScriptCommand, cluster: Cluster) -> tuple[ScriptCommand, Device, int]:
    """Return a command with its processes on a cluster, the device that it sees, and how many of them."""
    per_node = max(len(node.devices) for node in cluster.nodes)
    if command.processes_follow_gpus:
        command = set_processes(command, per_node)
    devices = command.processes if command.launcher != "python" else per_node
    return command, smallest_device(cluster), devices


def read_followed_trace(plan: Plan) -> Trace | None:
    """Return the trace of a plan's command from the cache; None if it is not there."""
    import contextlib
    import os

    from trimtab.scripts.command import parse_command

    if plan.script is None or not Path(plan.folder or ".").is_dir():
        return None
    with contextlib.chdir(plan.folder or "."):
        try:
            command = parse_command(plan.script.words, environment=os.environ)
            command, device, devices = _place_command(command, rebuild_cluster(plan))
            changes = [change for change in plan.script.edits if change.form == "config"]
            result = find_followed(command.replace(changes=tuple(changes)), device, devices=devices)
        except TrimtabError:
            return None
    return None if result is None else result.trace


def refuse_too_few(command: ScriptCommand, cluster: Cluster) -> None:
    """Raise if a command starts more processes than there are GPUs."""
    have = len(cluster.devices)
    if command.world_size > have:
        raise WrongUse(
            format_command(command),
            found=f"it starts {command.world_size} processes, and --on names {have} GPU{'s' * (have > 1)}",
            cure=f"Name the GPUs that it runs on, as in --on {command.world_size}xH100.",
        )


def estimate_result(command: ScriptCommand, result: ScriptResult, cluster: Cluster) -> ScriptEstimate:
    """Return the estimate of what a script did."""
    device = smallest_device(cluster)
    trace = result.trace
    assert trace is not None  # noqa: S101 - a result without an error has a trace
    setting, facts, notes = describe_setting(command, result)
    refuse_emulated(setting, device, cure="Change the script's precision, or look at another GPU.")
    found, peaks = estimate_trace(
        trace,
        setting,
        device,
        cluster=cluster,
        calibration=read_own_calibration(device),
        fusing=setting.compile and not result.compiled_graphs,
    )
    found = judge_fully(found, trace, setting)
    found = found.replace(assumptions=(*notes, *found.assumptions))
    longest = scale_longest(found, result)
    if longest is not None:
        found = judge_longest(found, longest)
    return ScriptEstimate(
        command=command,
        estimate=found,
        peaks=peaks,
        trace=trace,
        setting=setting,
        script=ScriptReport(
            command=format_command(command),
            found=facts,
            writes=result.writes,
            notes=tuple(notes),
            is_cached=result.is_cached,
        ),
        phases=(*measure_phases(trace, result), *([longest] if longest is not None else [])),
        device=device,
    )


def scale_longest(found: Estimate, result: ScriptResult) -> PhasePeak | None:
    """Return the peak of a step with the longest batch that the data set can give; None if it was seen.

    Activations and inputs are scaled with the length. Attention that keeps its scores grows with the square
    of the length, and is underestimated; the note says so. 6 GiB of activations at 512 tokens are 12 GiB
    at 1,024.
    """
    seen = max((length for length, _ in result.lengths), default=0)
    if result.longest is None or not seen or result.longest.length <= seen:
        return None
    factor = result.longest.length / seen
    grows = found.parts.activations + found.parts.inputs
    allocated = found.allocated_bytes + int(grows * (factor - 1))
    reserved = found.reserved_bytes + int(
        grows * (factor - 1) * found.reserved_bytes / max(1, found.allocated_bytes)
    )
    return PhasePeak(
        name=LONGEST,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        note=f"{result.longest.length:,} tokens ({result.longest.where}), scaled from {seen:,}; attention "
        "without a fused kernel needs more",
    )


def judge_longest(found: Estimate, longest: PhasePeak) -> Estimate:
    """Return the estimate with a verdict that counts the longest batch too."""
    need = need_with_longest(found, (longest,))
    if not found.fits or found.capacity_bytes is None or need <= found.capacity_bytes:
        return found
    return found.replace(
        fits=False,
        verdict=Verdict.DOES_NOT_FIT,
        verdict_reason=f"the batches that were seen fit, and the longest of the data set should need "
        f"{format_bytes(need)} of {format_bytes(found.capacity_bytes)}: {longest.note}",
    )


def describe_setting(
    command: ScriptCommand, result: ScriptResult
) -> tuple[Setting, tuple[ScriptFact, ...], list[str]]:
    """Return the setting that a script trains with, the facts that show it, and what was assumed."""
    seen = {fact.name: fact for fact in result.facts}
    if (precision := _read_own_casts(seen.get("precision"), result.trace)) is not None:
        seen["precision"] = precision
    notes = [*command.notes, *result.notes]
    gpus = int(seen["gpus"].value) if "gpus" in seen else 1
    tensor_parallel = int(seen["tensor_parallel"].value) if "tensor_parallel" in seen else 1
    if tensor_parallel > 1:
        gpus = max(1, gpus // tensor_parallel)
        notes.append(
            f"tensor parallelism over {tensor_parallel} GPUs: memory is that of one of them; the step time "
            "leaves out what they send to each other"
        )
    strategy = Strategy(seen["strategy"].value) if "strategy" in seen and gpus > 1 else usual_strategy(1)[0]
    started = max(gpus, command.world_size // tensor_parallel)
    if not STRATEGIES[strategy].needs_several_gpus and started > 1:
        notes.append(
            f"{started} processes were started, and no DistributedDataParallel or FSDP was seen: the "
            "estimate is of one of them, training by itself"
        )
        gpus = 1
    mesh = STRATEGIES[strategy].mesh(gpus, nodes=command.nodes if gpus > 1 else 1, branches=0)
    micro_batch = count_samples(result)
    setting = Setting(
        strategy=strategy,
        mesh=mesh,
        micro_batch=micro_batch,
        accumulation=result.accumulation,
        global_batch=micro_batch * result.accumulation * mesh.data_parallel,
        precision=Precision(seen["precision"].value) if "precision" in seen else Precision.FP32,
        base=BaseFormat(seen["base"].value) if "base" in seen else BaseFormat.NONE,
        recompute=Recompute.FULL if "recompute" in seen else Recompute.NONE,
        compile="compile" in seen,
        optimizer=_implementation(seen),
        optimizer_in_backward="optimizer_in_backward" in seen,
        allocator=_allocator(command),
    )
    notes += _note_lengths(result)
    if result.steps < 3:  # noqa: PLR2004 - as many as are followed
        notes.append(f"the script took only {result.steps} optimizer step{'s' * (result.steps > 1)}")
    return setting, _list_facts(setting, result, seen), notes


def _read_own_casts(fact: ScriptFact | None, trace: Trace | None) -> ScriptFact | None:
    """Return the precision of a script whose layers cast themselves: to 16 bits, or to 8 for products."""
    if fact is None or trace is None:
        return None
    flops, scaled = Counter[str](), Counter[ProductsFormat]()
    for number in trace.sequence:
        work = trace.works[number]
        flops[work.dtype] += work.flops
        if work.op.startswith(SCALED_PRODUCT):
            scaled[ROWWISE if work.op.endswith(BY_ROW) else TENSORWISE] += work.flops
    found, total, shares = Precision(fact.value), flops.total(), []
    if not found.dtypes.is_narrow:
        narrow = max(Precision.BF16, Precision.FP16, key=lambda precision: flops[precision.dtypes.compute])
        share = flops[narrow.dtypes.compute]
        # Layers that multiply in 8 bits take and return 16.
        if 2 * (share + scaled.total()) > total:
            found = narrow
            shares.append(f"{share / total:.0%} of the arithmetic is in torch.{narrow.dtypes.compute}")
    if 2 * scaled.total() > total:
        dtypes = found.dtypes.replace(products_format=scaled.most_common(1)[0][0])
        found = next((precision for precision in Precision if precision.dtypes == dtypes), found)
    if scaled:
        of = "" if shares else " of the arithmetic is"
        shares.append(f"{scaled.total() / total:.0%}{of} in 8 bits")
    if not shares:
        return None
    return fact.replace(value=found.value, where=f"{fact.where}; {', '.join(shares)}, by casts of its own")


PREFETCHED = 2
"""Batches that a framework may have loaded ahead of the passes that use them."""


def count_samples(result: ScriptResult) -> int:
    """Return the samples of a micro-batch: the rows of the model's input, unless a collator joined samples.

    Packing puts all samples into one row, and graphs or several views of a sample become many rows. Then the
    samples are those that the loader fetched, if it fetched one batch for each backward pass. A script may
    also give its model one batch in parts, as with cached gradients.
    """
    samples = _most_common(result.fetched) or 1
    rows = _most_common(result.micro_batches) or samples
    batches = sum(count for _, count in result.fetched)
    is_joined = samples > 1 and (rows == 1 or rows > samples)
    if is_joined and 0 <= batches - result.passes <= PREFETCHED:
        return samples
    return samples if _is_in_parts(result) else rows


def _is_in_parts(result: ScriptResult) -> bool:
    """Return whether the backward passes of a step, which differ, share one batch of the loader."""
    rows, samples = _most_common(result.micro_batches), _most_common(result.fetched)
    if rows is None or samples is None or rows >= samples:
        return False
    if result.accumulation > 1 or result.passes_of_step <= 1:
        return False
    steps = result.passes // result.passes_of_step
    return 0 <= sum(count for _, count in result.fetched) - steps <= PREFETCHED


def _note_lengths(result: ScriptResult) -> list[str]:
    """Note what a length costs that attention has not had before."""
    trace = result.trace
    if len(result.lengths) < 2 or trace is None:  # noqa: PLR2004 - all inputs have the same length
        return []
    if not any("cudnn_attention" in work.op for work in trace.works):
        return []
    note = (
        f"time: inputs had {len(result.lengths)} different lengths. cuDNN prepares its attention for each, "
        "which takes about 0.16 s once (measured on an H200); the step time is that of lengths seen before"
    )
    return [note]


def _implementation(seen: dict[str, ScriptFact]) -> OptimizerImplementation:
    text = seen["optimizer"].value if "optimizer" in seen else ""
    if "(fused)" in text:
        return OptimizerImplementation.FUSED
    return OptimizerImplementation.PLAIN if "(loop)" in text else OptimizerImplementation.FOREACH


def _allocator(command: ScriptCommand) -> Allocator:
    import os

    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    text = " ".join(command.environment.get(name, os.environ.get(name, "")) for name in names)
    return Allocator.EXPANDABLE if "expandable_segments:True" in text else Allocator.DEFAULT


def _most_common(counts: tuple[tuple[int, int], ...]) -> int | None:
    """Return the value that was seen most often; the largest of equals."""
    return max(counts, key=lambda pair: (pair[1], pair[0]))[0] if counts else None


def _list_facts(
    setting: Setting, result: ScriptResult, seen: dict[str, ScriptFact]
) -> tuple[ScriptFact, ...]:
    """Return what was found out, in the order that people ask for."""
    inputs = "the first side of the model's input in training"
    facts = [
        ScriptFact(name="micro_batch", value=str(setting.micro_batch), where=_where_samples(setting, result))
    ]
    if len(result.micro_batches) > 1:
        sizes = ", ".join(str(size) for size, _ in sorted(result.micro_batches))
        facts.append(ScriptFact(name="micro_batches_seen", value=sizes, where=inputs))
    where = "backward passes between two optimizer steps that repeat the same work"
    if result.is_mean:
        where = "backward passes between two optimizer steps; their sizes differ, one of mean size is timed"
    facts.append(ScriptFact(name="accumulation", value=str(setting.accumulation), where=where))
    facts.append(
        ScriptFact(
            name="global_batch",
            value=str(setting.global_batch),
            where=f"{setting.micro_batch} x {setting.accumulation} x {setting.data_parallel} ranks",
        )
    )
    if result.lengths:
        longest = max(length for length, _ in result.lengths)
        where = "the longest input of indices in training"
        facts.append(ScriptFact(name="sequence", value=str(longest), where=where))
        possible = result.longest
        value = "unknown" if possible is None else str(max(longest, possible.length))
        why = "the data set does not say how long its samples are" if possible is None else possible.where
        facts.append(ScriptFact(name="longest_possible", value=value, where=why))
    facts += [seen[name] for name in SEEN_FACTS if name in seen]
    for name, nothing in (("recompute", "none"), ("compile", "false"), ("gpus", "1"), ("strategy", "single")):
        if name not in seen:
            facts.append(ScriptFact(name=name, value=nothing, where="nothing of the kind was called"))
    if result.loader_s is not None:
        text = f"{result.loader_s * 1000:.0f} ms a batch"
        facts.append(ScriptFact(name="loading", value=text, where="measured on this machine's CPU"))
    return tuple(facts)


def _where_samples(setting: Setting, result: ScriptResult) -> str:
    """Return where the micro-batch was seen."""
    rows = _most_common(result.micro_batches)
    if rows is None:
        loaded = "the data loader's samples in a batch" if result.fetched else "taken to be 1"
        return f"{loaded}; no tensor was seen as the input of a model"
    if rows == setting.micro_batch:
        return "the first side of the model's input in training"
    if _is_in_parts(result):
        return f"the data loader's samples in a batch; the model gets them in parts of {rows}"
    longest = max((length for length, _ in result.lengths), default=0)
    shape = f"{rows} row{'s' * (rows > 1)}" + (f" of up to {longest:,} tokens" if longest else "")
    return f"the data loader's samples in a batch; the model gets {shape} made of them"


def measure_phases(trace: Trace, result: ScriptResult) -> tuple[PhasePeak, ...]:
    """Return the peak of each phase of the script, of all its occurrences the largest."""
    # Requests of 0 bytes reach no allocator, so that positions of events differ from those of the order.
    # What comes after a phase and belongs to none, such as a fourth step, does not count for it.
    spans = [(begin, end if end >= 0 else len(trace.order)) for _, begin, end in result.windows]
    events: list[Event] = []
    positions: dict[int, int] = {}
    last = 0
    for cut in sorted({cut for span in spans for cut in span}):
        events += allocator_events(trace, trace.order[last:cut])
        positions[cut], last = len(events), cut
    events += allocator_events(trace, trace.order[last:])
    begins = [positions[begin] for begin, _ in spans]
    ends = [positions[end] for _, end in spans]
    resets = sorted(set(positions.values()))
    windows = replay(events, AllocatorConfig(), reset_peak_at=resets).windows
    by_begin = dict(zip(resets, windows[1:], strict=False))
    peaks: dict[str, PhasePeak] = {}
    for (name, _, _), begin, end in zip(result.windows, begins, ends, strict=True):
        window = by_begin.get(begin)
        # A step without events has not begun: an evaluation came first. A save needs no memory of its own.
        if window is None or (begin == end and name.endswith(" step")):
            continue
        known = peaks.get(name)
        if known is None or window.allocated > known.allocated_bytes:
            peaks[name] = PhasePeak(
                name=name, allocated_bytes=window.allocated, reserved_bytes=window.reserved
            )
    return tuple(peaks[name] for name in PHASES if name in peaks)
