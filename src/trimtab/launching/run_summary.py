"""Write and read the summary of a finished run: summary.json and summary.txt in its folder.

    GPUs, samples, epochs, batch, runtime, samples/s, minutes per epoch, memory, GPUs left free,
    predicted against real

A stopped run has none. A resumed run counts all its attempts.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse
from trimtab.files import write_atomic
from trimtab.spec import PredictionCheck, Summary
from trimtab.training.run_folder import SUMMARY_FILE, RunFolder
from trimtab.units import format_bytes, format_duration, format_figure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trimtab.spec import Attempt, Incident, Plan

JSON, TEXT = SUMMARY_FILE, "summary.txt"
WARM_UP = 3
"""First steps of a run that say little about its speed, where there are more."""
ALL_GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU of a node, those included that a job may not use."""


def build_summary(  # noqa: PLR0913 - all that a run has left behind
    job: str,
    plan: Plan,
    attempt: Attempt,
    lines: Sequence[dict[str, Any]],
    incidents: Iterable[Incident],
    *,
    epoch_samples: int,
    device: str | None,
    gpus_there: int | None,
    now_s: float,
) -> Summary:
    """Build the summary of a run from its plan, its log and its last attempt."""
    choice, last = plan.choice, lines[-1] if lines else {}
    this_s = max(0.0, now_s - attempt.began_s)
    samples = sum(line.get("samples", 0) for line in lines)
    happened: dict[str, int] = {}
    for incident in incidents:
        happened[incident.kind.value] = happened.get(incident.kind.value, 0) + 1
    proc_s = attempt.earlier_proc_s + this_s * attempt.procs
    return Summary(
        job=job,
        device=device,
        gpus=attempt.procs if device else 0,
        processes=attempt.procs,
        nodes=attempt.nodes,
        gpus_there=gpus_there,
        strategy=choice.strategy.value,
        precision=choice.precision.value,
        micro_batch=choice.micro_batch,
        accumulation=choice.accumulation,
        global_batch=choice.global_batch,
        steps=last.get("step", 0),
        samples=samples,
        epochs=round(samples / epoch_samples, 4) if epoch_samples else 0.0,
        loss=last.get("loss"),
        runtime_s=attempt.earlier_s + this_s,
        steps_s=sum(line.get("time_s", 0.0) for line in lines),
        gpu_hours=proc_s / 3600 if device else 0.0,
        attempts=attempt.attempt,
        allocated_bytes=_highest_value(lines, "allocated_bytes"),
        reserved_bytes=_highest_value(lines, "reserved_bytes"),
        checks=_build_checks(plan, attempt, lines),
        median_of=len(_usual_steps(plan, attempt, lines)),
        incidents=happened,
        ended_on=datetime.fromtimestamp(now_s).astimezone().isoformat(timespec="seconds"),
    )


def _highest_value(lines: Sequence[dict[str, Any]], key: str) -> int | None:
    return max((line[key] for line in lines if line.get(key) is not None), default=None)


def _usual_steps(plan: Plan, attempt: Attempt, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the full steps with as many processes as the last attempt, without the first ones."""
    alike = [line for line in lines if line.get("gpus") == attempt.procs]
    counted = alike[WARM_UP:] or alike
    return [line for line in counted if line.get("samples") == plan.choice.global_batch] or counted


def _build_checks(
    plan: Plan, attempt: Attempt, lines: Sequence[dict[str, Any]]
) -> tuple[PredictionCheck, ...]:
    """Compare predictions with measurements on as many processes as were planned."""
    estimate = plan.estimate
    alike = [line for line in lines if line.get("gpus") == attempt.procs]
    steps = _usual_steps(plan, attempt, lines)
    step_s = median(line["time_s"] for line in steps) if steps else None
    rate = plan.choice.global_batch / step_s if step_s else None
    checks = [
        PredictionCheck(what="step_s", predicted=estimate.step_s, real=step_s),
        PredictionCheck(what="samples_per_s", predicted=estimate.samples_per_s, real=rate),
        # A plan without an estimate has zeros for bytes.
        PredictionCheck(
            what="allocated_bytes",
            predicted=estimate.allocated_bytes or None,
            real=_highest_value(alike, "allocated_bytes"),
        ),
        PredictionCheck(
            what="reserved_bytes",
            predicted=estimate.reserved_bytes or None,
            real=_highest_value(alike, "reserved_bytes"),
        ),
    ]
    return tuple(check for check in checks if check.predicted is not None or check.real is not None)


def format_summary(summary: Summary) -> str:
    """Format the summary for people, one fact a line."""
    rows = {
        "job": summary.job,
        "GPUs": _format_devices(summary),
        "strategy": f"{summary.strategy}, {summary.precision}",
        "batch": f"{summary.global_batch} samples a step: micro-batch {summary.micro_batch} x "
        f"{summary.accumulation} on {summary.processes} process{'es' * (summary.processes > 1)}",
        "steps": f"{summary.steps:,}" + ("" if summary.loss is None else f", last loss {summary.loss:.4f}"),
        "samples": f"{summary.samples:,} in {summary.epochs:g} epochs",
        "runtime": _format_runtime(summary),
        "speed": f"{_format_number(summary.samples_per_s)} samples/s{_format_steps(summary)}, "
        f"{_format_number(summary.minutes_per_epoch)} minutes an epoch",
        "memory": _format_memory(summary),
    }
    if summary.gpu_hours:
        rows["GPU-hours"] = f"{summary.gpu_hours:.2f}"
    if summary.incidents:
        rows["happened"] = ", ".join(f"{count} x {kind}" for kind, count in summary.incidents.items())
    lines = [f"{name:<10} {value}" for name, value in rows.items()]
    lines += [
        f"{'' if number else 'predicted':<10} {_format_check(check)}"
        for number, check in enumerate(summary.checks)
    ]
    if summary.median_of:
        after = f" after the first {WARM_UP}" if summary.median_of + WARM_UP <= summary.steps else ""
        lines.append(f"{'':<10} (of the median step of {summary.median_of:,}{after})")
    return "\n".join([*lines, f"{'ended':<10} {summary.ended_on}, done"]) + "\n"


def _format_steps(summary: Summary) -> str:
    """Say which steps the speed is of: `watch` uses the last ones, a check the median."""
    return f" over all {summary.steps:,} steps" if summary.steps > 1 else ""


def _format_devices(summary: Summary) -> str:
    if not summary.gpus:
        return f"none: {summary.processes} process{'es' * (summary.processes > 1)} on the CPU"
    used = f"{summary.gpus} x {summary.device}" + (f" on {summary.nodes} nodes" if summary.nodes > 1 else "")
    if summary.gpus_there is None:
        return used
    return f"{used}; {summary.gpus} of {summary.gpus_there} used, {summary.gpus_free} left free"


def _format_runtime(summary: Summary) -> str:
    several = f", in {summary.attempts} attempts" if summary.attempts > 1 else ""
    return f"{format_duration(summary.runtime_s)}, of it {format_duration(summary.steps_s)} in steps{several}"


def _format_memory(summary: Summary) -> str:
    if summary.reserved_bytes is None:
        return "not measured"
    allocated = (
        "" if summary.allocated_bytes is None else f"{format_bytes(summary.allocated_bytes)} allocated, "
    )
    return f"{allocated}{format_bytes(summary.reserved_bytes)} reserved at the peak, on the first rank"


def _format_number(value: float | None) -> str:
    return "-" if value is None else format_figure(value)


def _format_check(check: PredictionCheck) -> str:
    shown = format_bytes if check.what.endswith("_bytes") else _format_number
    words = {"step_s": "seconds a step", "samples_per_s": "samples/s"}
    name = words.get(check.what, check.what.removesuffix("_bytes") + " memory")
    before = "not predicted" if check.predicted is None else shown(check.predicted)
    real = "not measured" if check.real is None else shown(check.real)
    return f"{name}: {before}, really {real}" + ("" if check.error is None else f" ({check.error:+.1%})")


def count_node_gpus(folder: Path = ALL_GPUS) -> int | None:
    """Return how many GPUs this node has, in use or not; None without a driver."""
    try:
        return len(list(folder.iterdir())) or None
    except OSError:
        return None


def write_summary(folder: Path, summary: Summary) -> None:
    """Write a summary into a run folder."""
    write_atomic(folder / JSON, summary.to_json(indent=2).encode() + b"\n", sync=True)
    write_atomic(folder / TEXT, format_summary(summary).encode(), sync=True)


def remove_summary(folder: Path) -> None:
    """Remove an earlier summary because the run continues."""
    for name in (JSON, TEXT):
        (folder / name).unlink(missing_ok=True)


def read_summary(folder: Path) -> Summary:
    """Read the summary of a run folder; raise an error that says why there is none."""
    given, file = str(folder), folder / JSON
    if file.exists():
        return Summary.from_json(file.read_bytes(), origin=str(file))
    if not folder.is_dir():
        raise WrongUse(given, found="there is no such folder", cure="Give the folder of a run, as in runs/a.")
    if not (folder / "run.json").exists():
        raise WrongUse(given, found="it is no run's folder", cure="Give the folder of a run, as in runs/a.")
    lines = RunFolder(root=folder, main=False).read_lines()
    raise WrongUse(
        given,
        found=f"the run has not ended: it has taken {lines[-1]['step'] if lines else 0} steps",
        cure="A summary is written after the last step; `trimtab train` with the same --out goes on.",
    )
