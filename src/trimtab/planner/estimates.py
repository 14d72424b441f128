"""Estimate given settings of a job, without a search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.catalog.devices import explain_no_products, has_products
from trimtab.errors import TrimtabError, WrongUse
from trimtab.planner.estimator import strip_device, to_traced_setting
from trimtab.planner.plan_files import rebuild_cluster, write_plan_command
from trimtab.predict.calibration import read_own_calibration
from trimtab.predict.capacity import judge_fully
from trimtab.predict.derive import derive_trace
from trimtab.predict.estimate import estimate_trace
from trimtab.predict.memory import add_accumulation, build_timeline
from trimtab.predict.traces import cached_trace, get_traces
from trimtab.strategies import strategy_of
from trimtab.trace.request import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.predict.memory import MemoryPeaks, Timeline
    from trimtab.spec import Cluster, Device, Estimate, Plan, Setting, Trace

    Estimated = tuple[Estimate, MemoryPeaks, Trace]


def smallest_device(cluster: Cluster) -> Device:
    """Return the device that an estimate is for: the one with the least available memory."""
    if not cluster.devices:
        raise WrongUse(
            "no --on", found="this machine has no GPU", cure="Name one, as in --on H200 or --on 4xA100-40GB."
        )
    return min(cluster.devices, key=lambda device: device.free_bytes or device.memory_bytes)


def refuse_emulated(setting: Setting, device: Device, *, cure: str) -> None:
    """Raise if a setting computes in bf16 or fp8 and the device only emulates it."""
    form = setting.dtypes.products_format
    if not has_products(device, form):
        raise WrongUse(
            f"{setting.precision} on {device.name}",
            found=explain_no_products(device, form),
            cure="Use --precision bf16, or look at another GPU.",
        )
    if device.bf16 is False and setting.dtypes.is_bf16:
        raise WrongUse(
            f"{setting.precision} on {device.name}",
            found=f"{device.name} does not compute in bf16",
            cure=cure,
        )


def estimate_settings(  # noqa: PLR0913 - a job, its settings and a device
    job: str,
    settings: Sequence[Setting],
    device: Device,
    *,
    cluster: Cluster | None = None,
    overrides: dict[str, Any] | None = None,
    clip: float | None = None,
    cache: bool = True,
    always_least: bool = False,
    get: Callable[..., list[Trace | TrimtabError]] = get_traces,
    quick: bool = False,
) -> list[Estimated | TrimtabError]:
    """Return the estimate, memory peaks and trace of each setting, or the error.

    One worker process traces all that is not cached. With `always_least`, also find the smallest capacity
    for settings that fit, which takes several replays. `get` replaces `get_traces`, for a caller that keeps
    a worker process; it returns eager traces of compiled settings, and the effect of compiling is predicted.
    With `quick`, the verdict of what torch cannot reserve at once stays None, which saves its replays.
    """
    for setting in settings:
        refuse_emulated(setting, device, cure="Use --precision fp16 or fp32, or look at another GPU.")
    calibration = read_own_calibration(device)
    answers = get(job, settings, device, overrides=overrides, clip=clip, cache=cache)
    estimates: list[Estimated | TrimtabError] = []
    for trace, setting in zip(answers, settings, strict=True):
        if isinstance(trace, TrimtabError):
            estimates.append(trace)
            continue
        fusing = setting.compile and get is not get_traces
        step, memory = estimate_trace(
            trace, setting, device, cluster=cluster, calibration=calibration, fusing=fusing
        )
        total = add_accumulation(step, trace, setting)
        if not quick:
            total = judge_fully(total, trace, setting, always_least=always_least)
        estimates.append((total, memory, trace))
    return estimates


def read_cached_timeline(plan: Plan) -> tuple[Timeline | None, str]:
    """Return the memory through one step of a plan from cached traces, with a note on them or why it is None.

    It traces nothing, and runs no code of the job.
    """
    again = f"`{write_plan_command(plan)}` traces it again"
    setting = to_traced_setting(plan.choice)
    trace = None
    # This number of shards may have been traced directly, or derived from two others.
    for direct in ({setting.mesh.dp_shard}, set[int]()):
        try:
            device = strip_device(rebuild_cluster(plan).devices[0])
            request = TraceRequest(job=plan.job, overrides=plan.options, setting=setting, device=device)
            needed = strategy_of(setting).trace_parts(setting, direct)
            parts = [cached_trace(request.replace(setting=part)) for part in needed]
        except TrimtabError as error:
            return None, f"its devices are not known here ({error.found})"
        traced = [part for part in parts if part is not None]
        if trace is None and traced and len(traced) == len(parts):
            trace = derive_trace(setting, traced)
    line = None if trace is None else build_timeline(trace)
    if line is None:
        return None, f"no trace of the setting is kept on this machine; {again}"
    words = [f"One micro-batch of {plan.choice.micro_batch}"]
    words += ["without compiling, which may need less"] if plan.choice.compile else []
    words += [f"of {plan.choice.accumulation} a step"] if plan.choice.accumulation > 1 else []
    return line, f"{', '.join(words)}."
