"""What came of a run: summary.json and summary.txt in its folder, once it has taken its last step.

    GPUs, samples, epochs, batch, runtime, samples/s, minutes per epoch, memory, GPUs left free,
    predicted against real

A run that was stopped has none; one that was resumed counts all its attempts.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from trimtab.errors import WrongUse
from trimtab.files import write_atomic
from trimtab.spec import Check, Summary
from trimtab.training.folder import RunFolder
from trimtab.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trimtab.spec import Attempt, Incident, Plan

JSON, TEXT = "summary.json", "summary.txt"
WARM_UP = 3
"""First steps of a run that say little about its speed, where there are more."""
ALL_GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU of a node, those included that a job may not use."""


def summed(  # noqa: PLR0913 - all that a run has left behind
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
    """The summary of a run from its plan, its log and its last attempt."""
    choice, last = plan.choice, lines[-1] if lines else {}
    this_s = max(0.0, now_s - attempt.began_s)
    samples = sum(one.get("samples", 0) for one in lines)
    happened: dict[str, int] = {}
    for one in incidents:
        happened[one.kind.value] = happened.get(one.kind.value, 0) + 1
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
        steps_s=sum(one.get("time_s", 0.0) for one in lines),
        gpu_hours=proc_s / 3600 if device else 0.0,
        attempts=attempt.attempt,
        allocated_bytes=_highest(lines, "allocated_bytes"),
        reserved_bytes=_highest(lines, "reserved_bytes"),
        checks=_checks(plan, attempt, lines),
        median_of=len(_usual(plan, attempt, lines)),
        incidents=happened,
        ended_on=datetime.fromtimestamp(now_s).astimezone().isoformat(timespec="seconds"),
    )


def _highest(lines: Sequence[dict[str, Any]], key: str) -> int | None:
    return max((one[key] for one in lines if one.get(key) is not None), default=None)


def _usual(plan: Plan, attempt: Attempt, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The whole steps of as many processes as the last attempt had, without the first ones."""
    alike = [one for one in lines if one.get("gpus") == attempt.procs]
    counted = alike[WARM_UP:] or alike
    return [one for one in counted if one.get("samples") == plan.choice.global_batch] or counted


def _checks(plan: Plan, attempt: Attempt, lines: Sequence[dict[str, Any]]) -> tuple[Check, ...]:
    """Predictions against what was measured on as many processes as were planned for."""
    known = plan.estimate
    alike = [one for one in lines if one.get("gpus") == attempt.procs]
    whole = _usual(plan, attempt, lines)
    step_s = median(one["time_s"] for one in whole) if whole else None
    rate = plan.choice.global_batch / step_s if step_s else None
    found = [
        Check(what="step_s", predicted=known.step_s, real=step_s),
        Check(what="samples_per_s", predicted=known.samples_per_s, real=rate),
        # A plan without an estimate has zeros for bytes.
        Check(
            what="allocated_bytes",
            predicted=known.allocated_bytes or None,
            real=_highest(alike, "allocated_bytes"),
        ),
        Check(
            what="reserved_bytes",
            predicted=known.reserved_bytes or None,
            real=_highest(alike, "reserved_bytes"),
        ),
    ]
    return tuple(one for one in found if one.predicted is not None or one.real is not None)


def text(one: Summary) -> str:
    """The summary as people read it, a fact a line."""
    rows = {
        "job": one.job,
        "GPUs": _devices(one),
        "strategy": f"{one.strategy}, {one.precision}",
        "batch": f"{one.global_batch} samples a step: micro-batch {one.micro_batch} x {one.accumulation} on "
        f"{one.processes} process{'es' * (one.processes > 1)}",
        "steps": f"{one.steps:,}" + ("" if one.loss is None else f", last loss {one.loss:.4f}"),
        "samples": f"{one.samples:,} in {one.epochs:g} epochs",
        "runtime": _runtime(one),
        "speed": f"{_number(one.samples_per_s)} samples/s{_over(one)}, "
        f"{_number(one.minutes_per_epoch)} minutes an epoch",
        "memory": _memory(one),
    }
    if one.gpu_hours:
        rows["GPU-hours"] = f"{one.gpu_hours:.2f}"
    if one.incidents:
        rows["happened"] = ", ".join(f"{count} x {kind}" for kind, count in one.incidents.items())
    lines = [f"{name:<10} {value}" for name, value in rows.items()]
    lines += [
        f"{'' if number else 'predicted':<10} {_checked(check)}" for number, check in enumerate(one.checks)
    ]
    if one.median_of:
        after = f" after the first {WARM_UP}" if one.median_of + WARM_UP <= one.steps else ""
        lines.append(f"{'':<10} (of the median step of {one.median_of:,}{after})")
    return "\n".join([*lines, f"{'ended':<10} {one.ended_on}, done"]) + "\n"


def _over(one: Summary) -> str:
    """The steps that the speed is of: `watch` tells that of the last ones, a check that of the median."""
    return f" over all {one.steps:,} steps" if one.steps > 1 else ""


def _devices(one: Summary) -> str:
    if not one.gpus:
        return f"none: {one.processes} process{'es' * (one.processes > 1)} on the CPU"
    used = f"{one.gpus} x {one.device}" + (f" on {one.nodes} nodes" if one.nodes > 1 else "")
    if one.gpus_there is None:
        return used
    return f"{used}; {one.gpus} of {one.gpus_there} used, {one.gpus_free} left free"


def _runtime(one: Summary) -> str:
    whole = f"{format_duration(one.runtime_s)} ({one.runtime_s:.0f} s, {one.runtime_s / 3600:.2f} h)"
    several = f", in {one.attempts} attempts" if one.attempts > 1 else ""
    return f"{whole}, of it {format_duration(one.steps_s)} in steps{several}"


def _memory(one: Summary) -> str:
    if one.reserved_bytes is None:
        return "not measured"
    allocated = "" if one.allocated_bytes is None else f"{format_bytes(one.allocated_bytes)} allocated, "
    return f"{allocated}{format_bytes(one.reserved_bytes)} reserved at the peak, on the first rank"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"  # noqa: PLR2004


def _checked(one: Check) -> str:
    shown = format_bytes if one.what.endswith("_bytes") else _number
    words = {"step_s": "seconds a step", "samples_per_s": "samples/s"}
    name = words.get(one.what, one.what.removesuffix("_bytes") + " memory")
    before = "not predicted" if one.predicted is None else shown(one.predicted)
    real = "not measured" if one.real is None else shown(one.real)
    return f"{name}: {before}, really {real}" + ("" if one.error is None else f" ({one.error:+.1%})")


def gpus_on_node(folder: Path = ALL_GPUS) -> int | None:
    """How many GPUs this node has, in use or not; None where no driver says."""
    try:
        return len(list(folder.iterdir())) or None
    except OSError:
        return None


def write(folder: Path, one: Summary) -> None:
    """Put a summary into a run's folder."""
    write_atomic(folder / JSON, one.to_json(indent=2).encode() + b"\n", sync=True)
    write_atomic(folder / TEXT, text(one).encode(), sync=True)


def forget(folder: Path) -> None:
    """Take an earlier summary away: the run goes on."""
    for name in (JSON, TEXT):
        (folder / name).unlink(missing_ok=True)


def read(folder: Path) -> Summary:
    """The summary of a run's folder; an error that says why there is none."""
    given, file = str(folder), folder / JSON
    if file.exists():
        return Summary.from_json(file.read_bytes(), origin=str(file))
    if not folder.is_dir():
        raise WrongUse(given, found="there is no such folder", cure="Give the folder of a run, as in runs/a.")
    if not (folder / "run.json").exists():
        raise WrongUse(given, found="it is no run's folder", cure="Give the folder of a run, as in runs/a.")
    lines = RunFolder(root=folder, main=False).lines()
    raise WrongUse(
        given,
        found=f"the run has not ended: it has taken {lines[-1]['step'] if lines else 0} steps",
        cure="A summary is written after the last step; `trimtab train` with the same --out goes on.",
    )
