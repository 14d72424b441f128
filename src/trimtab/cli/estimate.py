"""The command `trimtab estimate`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import typer
from msgspec.structs import asdict

from trimtab import api
from trimtab.cli.console import Json, print_json, print_text, show_status
from trimtab.cli.options import command, state_devices
from trimtab.cli.progress import progress
from trimtab.errors import TrimtabError
from trimtab.probe.detect import as_cluster
from trimtab.spec import EstimateOutput, LossForm, PeakModule, PeakMoment, Recompute, Verdict
from trimtab.spec.requests import EstimateRequest
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from trimtab.errors import NothingFits
    from trimtab.predict.memory import MemoryPeaks
    from trimtab.scripts.estimate import ScriptEstimate
    from trimtab.spec import Cluster, Device, Estimate, Setting
    from trimtab.spec.requests import PlanRequest

WORTH_SAYING = 0.01
"""Smaller savings get no line."""


@command(EstimateRequest)
def estimate(request: EstimateRequest, *, json: Json = False) -> None:
    """Show what one configuration would need, without a GPU.

    It is not run: the job's code takes a few steps on tensors without memory, as it would on the device.
    A training command after `--` is followed in the same way, as in
    `trimtab estimate --on H100 -- python train.py`. Nothing that it writes is kept.
    Exit code 3 when it does not fit, 4 when the job's code fails.
    """
    if request.command:
        _estimate_command(request, json=json)
        return
    job, options, cache = request.job, request.options, request.cache
    where, setting = api.requested_setting(state_devices(request))
    device = api.first_device(where)
    find_warnings = api.begin_batch_warnings(job, setting, options, cache=cache)
    result, details, help_lines = _estimate(request, setting, where, quiet=json)
    with progress("comparing the loss of a small batch"):
        warnings = find_warnings()
    result = result.replace(assumptions=(*warnings, *result.assumptions))
    with _status("looking up modules", quiet=json):
        classes = api.module_classes(job, [name for name, _ in details.modules], options, cache=cache)
    if json:
        print_json(make_output(result, setting, details, classes).to_builtins())
    else:
        from trimtab import render
        from trimtab.strategies import strategy_of

        heading = f"{job} on {device.name}, micro-batch {request.micro_batch}, {request.precision}"
        if setting.accumulation > 1:
            spread = strategy_of(setting).describe(setting.mesh)
            heading += f", {spread}, {setting.accumulation} micro-batches"
        print_text(
            render.render_estimate(result, details, heading=heading, help_lines=help_lines, classes=classes)
        )
    if not result.fits:
        raise typer.Exit(3)


def make_output(
    result: Estimate, setting: Setting, peaks: MemoryPeaks, classes: dict[str, str]
) -> EstimateOutput:
    """Return what --json prints: the estimate, with its setting and the modules at its peak."""
    modules = (
        PeakModule(name=name, class_name=classes.get(name), bytes=size) for name, size in peaks.modules
    )
    peak = PeakMoment(operation=peaks.operation, phase=peaks.phase, modules=tuple(modules))
    return EstimateOutput(**asdict(result), setting=setting, peak=peak)


def _estimate_command(request: EstimateRequest, *, json: bool) -> None:
    with progress("following the script on the pretended GPU") as shown:
        found = api.estimate_command(request, shown.say)
    if json:
        output = make_output(found.estimate, found.setting, found.peaks, {})
        print_json(output.replace(script=found.script, phases=tuple(found.phases)).to_builtins())
    else:
        from trimtab import render

        print_text(render.render_script(found, help_lines=help_script(found)))
    if not found.estimate.fits:
        raise typer.Exit(3)


def _estimate(
    request: EstimateRequest, setting: Setting, where: Cluster, *, quiet: bool
) -> tuple[Estimate, MemoryPeaks, tuple[str, ...]]:
    """Return the estimate, its details, and what another choice would change if that is quick to trace.

    The other choice is eager mode for compiled code, otherwise full recomputation.
    """
    device = api.first_device(where)
    asked: dict[str, Any] = {"options": request.options, "clip": request.clip, "cache": request.cache}
    settings = [setting]
    with progress("tracing the first steps on fake tensors"):
        if setting.compile and not quiet:
            settings.append(setting.replace(compile=False))
        elif setting.recompute is Recompute.NONE and not quiet:
            fuller = setting.replace(recompute=Recompute.FULL)
            if not api.is_known(request.job, setting, device, **asked) or api.is_known(
                request.job, fuller, device, **asked
            ):
                settings.append(fuller)
        first, *others = api.look_at_all(
            request.job, settings, device, where=where, always_least=quiet, **asked
        )
    if isinstance(first, TrimtabError):
        raise first
    result, details, _ = first
    compared = next((other[0] for other in others if not isinstance(other, TrimtabError)), None)
    lines = () if compared is None else _help_lines(setting, result.process_bytes, compared.process_bytes)
    if not quiet and is_nearly_full(result, device) and has_large_logits(setting, details):
        chunked = setting.replace(loss=LossForm.CHUNKED)
        with progress("tracing the loss in pieces"):
            (other,) = api.look_at_all(request.job, [chunked], device, where=where, **asked)
        lines += _help_with_logits(details, result.process_bytes, other)
    return result, details, lines


LARGE_LOGITS = 0.1
"""Share of the allocated memory from which logits are worth a line."""
LOSS_IN_PIECES = (
    "logits and their gradients take {size} of this peak, and --loss chunked is only for causal language "
    "models of transformers. In loss(), give the last hidden states and the weight of the head to "
    "torch.nn.functional.linear_cross_entropy with options=torch.nn.LinearCrossEntropyOptions() (torch "
    "2.13), or to LigerFusedLinearCrossEntropyLoss of liger-kernel: then all logits never exist together"
)
PLAN_LOSS_IN_PIECES = (
    "Logits and their gradients take {size} of the nearest: --pin loss=chunked avoids them for causal "
    "language models of transformers; in loss() of another job, torch.nn.functional.linear_cross_entropy "
    "with options=torch.nn.LinearCrossEntropyOptions() (torch 2.13) or LigerFusedLinearCrossEntropyLoss does."
)
SCRIPT_LOSS_IN_PIECES = (
    "logits and their gradients take {size} of this peak. A Trainer of transformers never holds them all "
    "with use_liger_kernel=True (package liger-kernel), SFTTrainer of TRL also with loss_type='chunked_nll'. "
    "In a loop of your own, give the last hidden states and the weight of the head to "
    "torch.nn.functional.linear_cross_entropy with options=torch.nn.LinearCrossEntropyOptions() (torch 2.13)"
)


def help_script(found: ScriptEstimate) -> tuple[str, ...]:
    """Return what a script can change if its logits are a large part of a peak that nearly fills the GPU."""
    if not is_nearly_full(found.estimate, found.device) or not has_large_logits(found.setting, found.peaks):
        return ()
    return (SCRIPT_LOSS_IN_PIECES.format(size=format_bytes(found.peaks.logits_bytes)),)


def add_logits_help(error: NothingFits, request: PlanRequest) -> None:
    """Add to an error what the logits take in the setting that misses least, and what avoids them."""
    setting: Setting | None = error.closest
    if setting is None or request.command:
        return
    from trimtab.planner.estimator import strip_device, to_traced_setting

    try:
        where = as_cluster(request.on)
        # As the plan traced it: the trace is in the cache.
        _, details, _ = api.look_closely(
            request.job,
            to_traced_setting(setting),
            strip_device(api.first_device(where)),
            where=where,
            options=request.options,
            clip=request.clip,
            cache=request.cache,
        )
    except TrimtabError:
        return
    if has_large_logits(setting, details):
        error.cure += f" {PLAN_LOSS_IN_PIECES.format(size=format_bytes(details.logits_bytes))}"


def is_nearly_full(result: Estimate, device: Device) -> bool:
    """Whether more than half of the device's memory is used, or it fits only tightly."""
    return result.verdict is not Verdict.FITS or result.process_bytes > device.memory_bytes / 2


def has_large_logits(setting: Setting, details: MemoryPeaks) -> bool:
    """Whether a loss in pieces would save much."""
    return setting.loss is LossForm.WHOLE and details.logits_bytes > LARGE_LOGITS * details.allocated_bytes


def _help_with_logits(details: MemoryPeaks, bytes_now: int, chunked: Any) -> tuple[str, ...]:
    """Return what a loss in pieces would save, or what to change in the job if trimtab cannot do it.

    `chunked` is the estimate of the loss in pieces with its details, or its error.
    """
    if isinstance(chunked, TrimtabError):
        return (LOSS_IN_PIECES.format(size=format_bytes(details.logits_bytes)),)
    bytes_then = chunked[0].process_bytes
    change = bytes_then / bytes_now - 1
    return (f"--loss chunked: {format_bytes(bytes_then)}, {change:.0%}",) if -change >= WORTH_SAYING else ()


def _status(text: str, *, quiet: bool) -> Any:
    """Show on a terminal what is being done."""
    if quiet or not sys.stderr.isatty():
        return contextlib.nullcontext()
    return show_status(text)


def _help_lines(setting: Setting, bytes_now: int, bytes_then: int) -> tuple[str, ...]:
    """Return what the other choice would change: eager mode always, recomputation if it saves memory."""
    change = bytes_then / bytes_now - 1
    if setting.compile:
        line = f"without --compile: {format_bytes(bytes_then)}, {change:+.0%}"
        return (f"{line}; compiling costs memory here" if change < 0 else line,)
    return (f"--recompute full: {format_bytes(bytes_then)}, {change:.0%}",) if -change >= WORTH_SAYING else ()
