"""Compare the measured time of a step with the predicted one, and name where the difference is.

Each bucket is named only with evidence for it: seconds that were measured, or a counter that rose. If the
evidence covers less than half of the difference, the buckets that nothing rules out are listed, each with
what to run to tell them apart. A step within the error of predictions gives a line that says so.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trimtab.diagnosis.findings import FEWEST, late_median
from trimtab.diagnosis.log_scanner import Sighting
from trimtab.units import format_duration, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from trimtab.spec import Estimate, Plan
    from trimtab.training.step_log import StepLine

SLOWER = 1.18
"""A step that takes this many times its prediction is slow: 1 / 0.85, as in `trimtab watch`."""
FASTER = 0.8
"""A step below this share of its prediction is called faster."""
DECIDES = 0.5
"""Share of the difference that evidence must cover to name a bucket alone."""
COUNTS = 0.1
"""Share of the difference below which a bucket is not mentioned."""
HELD_DOWN = 0.9
"""Share of the highest clock below which a GPU is slowed down."""
HARMLESS = ("idle", "application clocks setting", "display clock setting", "sync boost")
"""Reasons for a lower clock that somebody chose."""
BUSY, IDLE = 0.9, 0.75
"""Share of time in which a kernel runs: above the first the host keeps up, below the second it does not."""
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
TIME = re.compile(r"(?<![\w.])([\d.]+)(us|ms|s)(?!\w)")
SELF_CUDA = 3
"""Place of "Self CUDA" among the times of a row of torch's profiler."""

LOADER, COMMUNICATION, OFFLOAD, LAUNCHES, THROTTLED, RECOMPILING = (
    "slow-loader",
    "slow-communication",
    "slow-offload",
    "slow-launches",
    "slow-clock",
    "slow-recompiling",
)
UNDECIDED, AS_PREDICTED = "slow-step", "step-as-predicted"
BUCKET_KINDS = (LOADER, COMMUNICATION, OFFLOAD, LAUNCHES, THROTTLED, RECOMPILING, UNDECIDED)
NAMES = {
    LOADER: "waiting for data",
    COMMUNICATION: "communication that nothing hides",
    OFFLOAD: "copies to and from the host",
    LAUNCHES: "launches of the host",
    THROTTLED: "a lower clock",
    RECOMPILING: "recompilation",
}
TESTS = {
    LOADER: "train some steps on one batch that is repeated: if they are fast, it is the loader",
    COMMUNICATION: "run on one GPU with the same micro-batch: if a micro-batch is faster there, it is "
    "communication (NCCL_DEBUG=INFO names the links)",
    OFFLOAD: "run a few steps without offload, or look for Memcpy HtoD and DtoH in torch.profiler",
    LAUNCHES: "look at the GPU's utilisation with `trimtab watch` or nvidia-smi: below 75 % without a wait "
    "for data, it is launches",
    THROTTLED: "look at clocks and throttle reasons with `nvidia-smi -q -d PERFORMANCE,CLOCK`",
    RECOMPILING: "run with TORCH_LOGS=recompiles: a line for each recompilation",
}


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """Measured seconds of an optimizer step, and what else was measured. Unknown is None."""

    step_s: float
    """Median of the later half of the steps."""
    how: str
    """What the time comes from, in words."""
    file: str
    line: int = 1
    data_wait_s: float | None = None
    clock_share: float | None = None
    """The clock as a share of the highest."""
    throttles: tuple[str, ...] = ()
    busy: float | None = None
    """Share of the time in which the GPU ran a kernel."""
    recompilations: int | None = None
    """Graphs that were compiled after the first steps."""
    lost_to_slow_steps_s: float = 0.0
    """Mean minus median of the later steps: what rare slow steps cost each step."""
    profile: ProfiledStep | None = None
    offloads: bool | None = None
    gpus: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProfiledStep:
    """Seconds of a step in a table of torch's profiler, beyond what computing hides. None without a table."""

    communication_s: float | None = None
    copies_s: float | None = None
    """Copies between host and device."""
    idle_s: float | None = None
    """Time in which the device had nothing to run."""


@dataclass(frozen=True, kw_only=True)
class BucketEvidence:
    """Seconds of a step that are in a bucket beyond the prediction, and what shows it."""

    kind: str
    seconds: float
    text: str


@dataclass
class _Judgement:
    evidence: list[BucketEvidence] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)
    """Buckets that measurements rule out."""


def measure_run(lines: Sequence[StepLine], file: str) -> MeasuredSteps | None:
    """Return the measured step of a run folder from its last steps; None if there are too few."""
    plain = [
        line
        for line in lines
        if line.attempts == 1 and not line.skipped and line.validation_loss is None and line.metrics is None
    ]
    times = [line.time_s for line in plain]
    step_s = late_median(times)
    if step_s is None or step_s <= 0:
        return None
    later = plain[len(plain) // 2 :]
    shares = [line.clock_hz / line.top_clock_hz for line in later if line.clock_hz and line.top_clock_hz]
    graphs = [line.compiled_graphs for line in later if line.compiled_graphs is not None]
    waits = [line.data_wait_s for line in later if line.data_wait_s is not None]
    busy = [line.gpu_busy for line in later if line.gpu_busy is not None]
    slowed = [set(line.throttles) for line in later if line.clock_hz]
    return MeasuredSteps(
        step_s=step_s,
        how=f"median of steps {later[0].step} to {later[-1].step}",
        file=file,
        line=max(1, later[-1].step),
        data_wait_s=statistics.median(waits) if waits else None,
        clock_share=statistics.median(shares) if shares else None,
        throttles=tuple(sorted(set.intersection(*slowed))) if slowed else (),
        busy=statistics.median(busy) if busy else None,
        recompilations=graphs[-1] - graphs[0] if graphs else None,
        lost_to_slow_steps_s=max(0.0, statistics.fmean(line.time_s for line in later) - step_s),
        gpus=later[-1].gpus,
        micro_batch=later[-1].micro_batch,
    )


def measure_log(sightings: Iterable[Sighting], plan: Plan) -> MeasuredSteps | None:
    """Return the measured step from the facts of logs; None if no line has a time.

    Trainers print the time of an optimizer step, of a micro-batch, or a rate. A time of a micro-batch is
    multiplied by the plan's accumulation.
    """
    facts: dict[str, list[Sighting]] = {}
    for sighting in sightings:
        if sighting.is_fact:
            facts.setdefault(sighting.of, []).append(sighting)
    timed = _read_time(facts, plan)
    if timed is None:
        return None
    step_s, how, last = timed
    waits = [float(seen.captured["value"]) / 1e3 for seen in facts.get("data_wait", ())]
    recompilations = facts.get("recompilation", [])
    return MeasuredSteps(
        step_s=step_s,
        how=how,
        file=last.file,
        line=last.line,
        data_wait_s=late_median(waits),
        recompilations=len(recompilations) if recompilations else None,
        offloads=True if facts.get("offload") else None,
        profile=_read_profile(facts),
    )


def _read_time(facts: Mapping[str, Sequence[Sighting]], plan: Plan) -> tuple[float, str, Sighting] | None:
    """Return the seconds of a step, what they come from, and the last line that says so."""
    rounds, batch = plan.choice.accumulation, plan.choice.global_batch
    each = f" x {rounds} micro-batches" if rounds > 1 else ""
    readings: tuple[tuple[str, Callable[[float], float], str], ...] = (
        ("step_ms", lambda value: value / 1e3, "median of the later steps"),
        ("iteration_ms", lambda value: rounds * value / 1e3, f"median of the later iterations{each}"),
        ("batches_per_s", lambda value: rounds / value, f"rate of the progress bar{each}"),
        ("seconds_per_batch", lambda value: rounds * value, f"rate of the progress bar{each}"),
        ("steps_per_s", lambda value: 1 / value, "mean of the whole run, evaluation and saving included"),
        ("samples_per_s", lambda value: batch / value, f"samples per second at a global batch of {batch}"),
    )
    for name, convert, how in readings:
        found = facts.get(name, ())
        values = [convert(float(seen.captured["value"])) for seen in found if _is_positive(seen)]
        # A rate is printed seldom, and is a mean already.
        needed = FEWEST if name in ("step_ms", "iteration_ms") else 1
        if len(values) >= needed:
            return statistics.median(values[len(values) // 2 :]), how, found[-1]
    calls, total = _profiled_steps(facts), facts.get("profile_cpu", ())
    if calls and total:
        seconds = _in_seconds(total[-1]) / calls
        how = f"mean of {calls} steps under torch.profiler, which slows the host down"
        return seconds, how, total[-1]
    return None


def _is_positive(sighting: Sighting) -> bool:
    try:
        return float(sighting.captured["value"]) > 0
    except ValueError:
        return False


def _in_seconds(sighting: Sighting) -> float:
    return float(sighting.captured["value"]) * UNITS[sighting.captured["unit"]]


def _profiled_steps(facts: Mapping[str, Sequence[Sighting]]) -> int | None:
    """Return the steps of a table of torch's profiler: the calls of ProfilerStep*."""
    for row in facts.get("profile_step", ()):
        words = row.captured["value"].split()
        if words and words[-1].isdecimal() and int(words[-1]) > 0:
            return int(words[-1])
    return None


def _read_profile(facts: Mapping[str, Sequence[Sighting]]) -> ProfiledStep:
    """Return where the time of a profiled step went; empty if no table has steps and totals."""
    calls = _profiled_steps(facts)
    if not calls or not facts.get("profile_cpu") or not facts.get("profile_cuda"):
        return ProfiledStep()
    step_s = _in_seconds(facts["profile_cpu"][-1]) / calls
    kernels_s = _in_seconds(facts["profile_cuda"][-1]) / calls
    spent = {}
    for name in ("profile_nccl", "profile_copy"):
        rows = [TIME.findall(row.captured["value"]) for row in facts.get(name, ())]
        times = [float(row[SELF_CUDA][0]) * UNITS[row[SELF_CUDA][1]] for row in rows if len(row) > SELF_CUDA]
        spent[name] = sum(times) / calls
    nccl_s, copies_s = spent["profile_nccl"], spent["profile_copy"]
    # Computing hides communication and copies on other streams: at most what it leaves can be exposed.
    left_s = max(0.0, step_s - max(0.0, kernels_s - nccl_s - copies_s))
    return ProfiledStep(
        communication_s=min(nccl_s, left_s),
        copies_s=min(copies_s, left_s),
        idle_s=max(0.0, left_s - nccl_s - copies_s),
    )


def compare_step(measured: MeasuredSteps, plan: Plan) -> tuple[list[Sighting], str]:
    """Return sightings of the buckets that a slow step is in, and a note if it cannot be compared."""
    estimate, choice = plan.estimate, plan.choice
    predicted_s = estimate.step_s if estimate is not None else None
    if not predicted_s:
        return [], "the plan predicts no step time, so the measured one was not compared"
    if measured.gpus is not None and measured.gpus != choice.gpus:
        return [], (
            f"the plan is for {choice.gpus} GPUs and the run has {measured.gpus} processes, so the step time "
            "was not compared"
        )
    words = {
        "measured": format_duration(measured.step_s),
        "predicted": format_duration(predicted_s),
        "gap": format_duration(abs(measured.step_s - predicted_s)),
        "ratio": f"{measured.step_s / predicted_s:.2f}",
    }
    text = f"{words['measured']} a step ({measured.how})"
    if measured.step_s <= SLOWER * predicted_s:
        is_faster = measured.step_s < FASTER * predicted_s
        verdict = "It is faster than predicted" if is_faster else "It is as predicted"
        return [_see(AS_PREDICTED, measured, text, words | {"verdict": verdict})], ""
    gap_s = measured.step_s - predicted_s
    judged = _judge(measured, plan, estimate, gap_s)
    named = [found for found in judged.evidence if found.seconds >= COUNTS * gap_s]
    covered = sum(found.seconds for found in named)
    if named and covered >= DECIDES * gap_s:
        named.sort(key=lambda found: -found.seconds)
        return [
            _see(
                found.kind,
                measured,
                text,
                words | {"evidence": found.text, "part": format_duration(min(found.seconds, gap_s))},
            )
            for found in named
        ], ""
    return [_undecided(measured, text, words, judged, plan)], ""


def _see(kind: str, measured: MeasuredSteps, text: str, words: dict[str, str]) -> Sighting:
    return Sighting(of=kind, file=measured.file, line=measured.line, text=text, captured=words)


def _undecided(
    measured: MeasuredSteps, text: str, words: dict[str, str], judged: _Judgement, plan: Plan
) -> Sighting:
    """Return a sighting that lists the buckets that nothing rules out, with what tells them apart."""
    left = [kind for kind in NAMES if kind not in judged.excluded]
    partly = [found.text for found in judged.evidence if found.seconds > 0]
    seen = f"{' '.join(partly)} That explains less than half of it. " if partly else ""
    out = [NAMES[kind] for kind in NAMES if kind in judged.excluded]
    ruled = f"Ruled out: {'; '.join(out)}. " if out else ""
    changed = ""
    if measured.micro_batch is not None and measured.micro_batch != plan.choice.micro_batch:
        changed = (
            f"The run used micro-batch {measured.micro_batch} in place of {plan.choice.micro_batch}, which "
            "makes more and smaller steps of the same batch. "
        )
    if not left:
        left_text = "no bucket: the prediction itself may be off on this device"
        tests = "measure the device with `trimtab calibrate`, then make the plan again"
    else:
        left_text = " or ".join(NAMES[kind] for kind in left)
        tests = "; ".join(TESTS[kind] for kind in left)
    return _see(
        UNDECIDED,
        measured,
        text,
        words | {"buckets": left_text, "evidence": f"{changed}{seen}{ruled}".strip() or "-", "tests": tests},
    )


def _judge(measured: MeasuredSteps, plan: Plan, estimate: Estimate, gap_s: float) -> _Judgement:
    """Collect evidence for each bucket, and rule out those that measurements do not allow."""
    judged = _Judgement()
    for check in (
        _check_loader,
        _check_clock,
        _check_recompilation,
        _check_communication,
        _check_offload,
        _check_launches,
    ):
        check(judged, measured, plan, estimate, gap_s)
    return judged


def _check_loader(
    judged: _Judgement, measured: MeasuredSteps, plan: Plan, estimate: Estimate, gap_s: float
) -> None:
    if measured.data_wait_s is None:
        return
    predicted = estimate.step_time.input_s if estimate.step_time is not None else 0.0
    waited = max(0.0, measured.data_wait_s - predicted)
    if waited < COUNTS * gap_s:
        judged.excluded.add(LOADER)
        return
    workers = plan.choice.workers
    judged.evidence.append(
        BucketEvidence(
            kind=LOADER,
            seconds=min(waited, gap_s),
            text=f"The host waited {format_duration(measured.data_wait_s)} a step for data "
            f"({plural(workers, 'loader worker')} in the plan).",
        )
    )


def _check_clock(
    judged: _Judgement, measured: MeasuredSteps, _: Plan, estimate: Estimate, gap_s: float
) -> None:
    share = measured.clock_share
    if share is None:
        return
    reasons = [reason for reason in measured.throttles if reason not in HARMLESS]
    if share >= HELD_DOWN:
        judged.excluded.add(THROTTLED)
        return
    # Matrix products slow down with the clock; what waits for memory or the host hardly does.
    compute_s = estimate.step_time.compute_s if estimate.step_time is not None else estimate.step_s or 0.0
    why = f": {' and '.join(reasons)}" if reasons else ", for no reason that the driver gives"
    judged.evidence.append(
        BucketEvidence(
            kind=THROTTLED,
            seconds=min(compute_s * (1 / share - 1), gap_s),
            text=f"The GPU ran at {share:.0%} of its highest clock{why}.",
        )
    )


def _check_recompilation(
    judged: _Judgement, measured: MeasuredSteps, plan: Plan, _: Estimate, gap_s: float
) -> None:
    if measured.recompilations is None:
        if not plan.choice.compile:
            judged.excluded.add(RECOMPILING)
        return
    if measured.recompilations == 0:
        judged.excluded.add(RECOMPILING)
        return
    # The median leaves out rare slow steps; if most steps compile, the gap itself is the cost.
    often = measured.lost_to_slow_steps_s < COUNTS * gap_s
    judged.evidence.append(
        BucketEvidence(
            kind=RECOMPILING,
            seconds=gap_s if often else min(measured.lost_to_slow_steps_s, gap_s),
            text=f"torch.compile compiled {measured.recompilations} more graphs after the first steps.",
        )
    )


def _check_communication(
    judged: _Judgement, measured: MeasuredSteps, plan: Plan, estimate: Estimate, gap_s: float
) -> None:
    if plan.choice.gpus == 1:
        judged.excluded.add(COMMUNICATION)
        return
    spent = None if measured.profile is None else measured.profile.communication_s
    if spent is None:
        return
    predicted = estimate.step_time.communication_s if estimate.step_time is not None else 0.0
    more = spent - predicted
    if more < COUNTS * gap_s:
        judged.excluded.add(COMMUNICATION)
        return
    judged.evidence.append(
        BucketEvidence(
            kind=COMMUNICATION,
            seconds=min(more, gap_s),
            text=f"Up to {format_duration(spent)} of NCCL kernels a step are not hidden by computing; "
            f"{format_duration(predicted)} were predicted.",
        )
    )


def _check_offload(
    judged: _Judgement, measured: MeasuredSteps, plan: Plan, _: Estimate, gap_s: float
) -> None:
    offloads = measured.offloads or bool(getattr(plan.choice, "offload", None))
    copies_s = None if measured.profile is None else measured.profile.copies_s
    if copies_s is not None:
        if copies_s < COUNTS * gap_s:
            judged.excluded.add(OFFLOAD)
        else:
            judged.evidence.append(
                BucketEvidence(
                    kind=OFFLOAD,
                    seconds=min(copies_s, gap_s),
                    text=f"Up to {format_duration(copies_s)} of copies between host and GPU a step are not "
                    "hidden by computing.",
                )
            )
    elif not offloads:
        judged.excluded.add(OFFLOAD)


def _check_launches(
    judged: _Judgement, measured: MeasuredSteps, _: Plan, estimate: Estimate, gap_s: float
) -> None:
    predicted = estimate.step_time.launch_s if estimate.step_time is not None else 0.0
    if measured.profile is not None and measured.profile.idle_s is not None:
        idle, how = measured.profile.idle_s, "torch.profiler"
    elif measured.busy is not None:
        if measured.busy >= BUSY:
            judged.excluded.add(LAUNCHES)
            return
        if measured.busy > IDLE:
            return
        idle, how = (1 - measured.busy) * measured.step_s, "the driver"
    else:
        return
    # A GPU that waits for data is idle too.
    more = idle - predicted - (measured.data_wait_s or 0.0)
    if more < COUNTS * gap_s:
        judged.excluded.add(LAUNCHES)
        return
    judged.evidence.append(
        BucketEvidence(
            kind=LAUNCHES,
            seconds=min(more, gap_s),
            text=f"The GPU ran nothing for {format_duration(idle)} a step by {how}, although data was there.",
        )
    )
