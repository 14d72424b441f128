"""The commands that predict: estimate and exam."""

from __future__ import annotations

import functools
import sys
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.main import Json, _console, _print, _print_json, app
from trimtab.cli.progress import progress
from trimtab.cli.shape import (
    Allocator,
    Clip,
    Compile,
    Frozen,
    JobName,
    Llama,
    Lora,
    MicroBatch,
    Network,
    NoCache,
    Optimizer,
    Precision,
    Qwen,
    Recompute,
    Seq,
    Sequential,
    Set,
    SyncBatchNorm,
    job_options,
    stated_devices,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.errors import TrimtabError
    from trimtab.predict.memory import Memory
    from trimtab.spec import Device, Estimate, Setting, Trace

On = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICES", help="For which devices: H200, 4xA100-40GB, 8xH100; default: this machine."
    ),
]


@app.command()
def estimate(  # noqa: PLR0913, PLR0917 - each is an option
    job: JobName,
    on: On = None,
    network: Network = None,
    micro_batch: MicroBatch = 1,
    precision: Precision = "bf16",
    recompute: Recompute = "none",
    compile: Compile = False,  # noqa: A002
    strategy: Annotated[
        str, typer.Option(help="single, ddp, fsdp, hsdp, branch, hybrid or pipeline.")
    ] = "single",
    optimizer: Optimizer = "fused",
    allocator: Allocator = "default",
    sync_batchnorm: SyncBatchNorm = False,
    clip: Clip = None,
    given: Set = None,
    seq: Seq = None,
    lora: Lora = None,
    frozen: Frozen = False,
    llama: Llama = None,
    qwen: Qwen = None,
    sequential: Sequential = False,
    no_cache: NoCache = False,
    json: Json = False,
) -> None:
    """Show what one configuration would need, without running it and without a GPU.

    The job's own code runs for a few steps on tensors without memory, as it would on the device. Exit code 3
    when it does not fit, 4 when the job's code fails.
    """
    from trimtab import api, render
    from trimtab.strategies import strategy_of

    options = job_options(
        job, given, seq=seq, lora=lora, frozen=frozen, llama=llama, qwen=qwen, sequential=sequential
    )
    named = stated_devices(on, network)
    where = named if named is not None and not isinstance(named, str) else api.cluster(named)
    device = api.first_device(where)
    setting = api.make_setting(
        micro_batch=micro_batch,
        precision=precision,
        recompute=recompute,
        compile=compile,
        strategy=strategy,
        gpus=len(where.devices),
        optimizer=optimizer,
        allocator=allocator,
        sync_batchnorm=sync_batchnorm,
        nodes=len(where.nodes),
        **api.spread_of(job, strategy, options),
    )
    asked: dict[str, Any] = {"options": options, "clip": clip, "cache": not no_cache}
    look = functools.partial(api.look_at_all, job, where=where, always_least=json, **asked)
    known = functools.partial(api.is_known, job, **asked)
    found, details, help_lines = _looked(look, known, setting, device, quiet=json)
    with _maybe(_console(errors=True).status("comparing the loss of a small batch"), quiet=json):
        warned = api.batch_warnings(job, setting, options, cache=not no_cache)
    found = found.replace(assumptions=(*warned, *found.assumptions))
    names = [name for name, _ in details.modules]
    with _maybe(_console(errors=True).status("looking up modules"), quiet=json):
        classes = api.module_classes(job, names, options, cache=not no_cache)
    if json:
        modules = [
            {"name": name, "class": classes.get(name), "bytes": size} for name, size in details.modules
        ]
        peak = {"operation": details.operation, "phase": details.phase, "modules": modules}
        _print_json({**found.to_builtins(), "setting": setting.to_builtins(), "peak": peak})
    else:
        heading = f"{job} on {device.name}, micro-batch {micro_batch}, {precision}"
        if setting.accumulation > 1:
            spread = strategy_of(setting).describe(setting.mesh)
            heading += f", {spread}, {setting.accumulation} micro-batches"
        _print(render.estimate(found, details, heading=heading, help_lines=help_lines, classes=classes))
    if not found.fits:
        raise typer.Exit(3)


def _looked(
    look: Callable[[list[Setting], Device], list[tuple[Estimate, Memory, Trace] | TrimtabError]],
    known: Callable[[Setting, Device], bool],
    setting: Setting,
    device: Device,
    *,
    quiet: bool,
) -> tuple[Estimate, Memory, tuple[str, ...]]:
    """The estimate, and beside it what one other choice would change, where that costs little more tracing.

    For compiled code that is the same without compiling, which is quick to trace; otherwise recomputing.
    """
    from trimtab.errors import TrimtabError
    from trimtab.spec import Recompute as How

    settings = [setting]
    with progress("tracing the first steps on fake tensors"):
        if setting.compile and not quiet:
            settings.append(setting.replace(compile=False))
        elif setting.recompute is How.NONE and not quiet:
            fuller = setting.replace(recompute=How.FULL)
            if not known(setting, device) or known(fuller, device):
                settings.append(fuller)
        first, *others = look(settings, device)
    if isinstance(first, TrimtabError):
        raise first
    found, details, _ = first
    compared = [one[0] for one in others if not isinstance(one, TrimtabError)]
    return found, details, _without(found, compared) if setting.compile else _savings(found, compared)


def _maybe(spinner: Any, *, quiet: bool) -> Any:
    import contextlib

    return contextlib.nullcontext() if quiet or not sys.stderr.isatty() else spinner


def _savings(found: Estimate, others: list[Estimate]) -> tuple[str, ...]:
    """What recomputing every repeated block would change, where the model has any."""
    from trimtab.units import format_bytes

    if not others:
        return ()
    less = others[0].process_bytes
    saved = 1 - less / found.process_bytes
    if saved < 0.01:  # noqa: PLR2004 - not worth a line
        return ()
    return (f"--recompute full: {format_bytes(less)}, -{saved:.0%}",)


def _without(found: Estimate, others: list[Estimate]) -> tuple[str, ...]:
    """What the same would need without --compile, and a warning where that is less."""
    from trimtab.units import format_bytes

    if not others:
        return ()
    eager = others[0].process_bytes
    change = eager / found.process_bytes - 1
    line = f"without --compile: {format_bytes(eager)}, {change:+.0%}"
    return (f"{line}; compiling costs memory here" if change < 0 else line,)


@app.command()
def exam(
    only: Annotated[str, typer.Option(metavar="PATTERN", help="Only cases that match, as in 'gpt-*'.")] = "*",
    own: Annotated[
        Path | None, typer.Option("--cases", metavar="FILE", help="Cases that `profile --keep` wrote.")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Trace every case again.")] = False,
    json: Json = False,
) -> None:
    """Predict every recorded measurement again, and show the errors.

    Takes some minutes the first time. Needs transformers and peft for some of the cases.
    """
    from trimtab import render
    from trimtab.exams.sit import sit

    def done(answer: Any) -> None:
        if not json:
            print(f"  {answer.case}", file=sys.stderr)  # noqa: T201 - progress

    found = sit(only, own=own, cache=not no_cache, done=done)
    if json:
        _print_json(found.to_builtins())
    else:
        _print(render.marks(found))


@app.command()
def profile(  # noqa: PLR0913, PLR0917 - each is an option
    job: JobName,
    micro_batch: MicroBatch = 1,
    precision: Precision = "bf16",
    recompute: Recompute = "none",
    compile: Compile = False,  # noqa: A002
    optimizer: Optimizer = "fused",
    allocator: Allocator = "default",
    clip: Clip = None,
    given: Set = None,
    seq: Seq = None,
    lora: Lora = None,
    frozen: Frozen = False,
    llama: Llama = None,
    qwen: Qwen = None,
    sequential: Sequential = False,
    keep: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Add the run to a file of cases, for `trimtab exam`.")
    ] = None,
    json: Json = False,
) -> None:
    """Run a configuration for real for a few steps, and set it against the prediction.

    Needs a GPU. Exit code 3 when it runs out of memory.
    """
    from trimtab import api, render

    options = job_options(
        job, given, seq=seq, lora=lora, frozen=frozen, llama=llama, qwen=qwen, sequential=sequential
    )
    device = api.gpu_here()
    setting = api.make_setting(
        micro_batch=micro_batch,
        precision=precision,
        recompute=recompute,
        compile=compile,
        strategy="single",
        gpus=1,
        optimizer=optimizer,
        allocator=allocator,
    )
    found = api.profile(job, setting, device, options=options, clip=clip, keep=keep)
    if json:
        _print_json(found)
    else:
        _print(
            render.profile(found, heading=f"{job} on {device.name}, micro-batch {micro_batch}, {precision}")
        )
    if found["run"]["out_of_memory"]:
        raise typer.Exit(3)


@app.command()
def calibrate(
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Time for the measurements.")] = 50.0,
    json: Json = False,
) -> None:
    """Measure the GPU of this machine once, and remember it for predictions of time.

    Runs the operations of common models over sizes and precisions, in under a minute.
    """
    from trimtab import api, render

    found, file = api.calibrate(budget_s=budget)
    if json:
        curves = [
            {**work.to_builtins(), "seconds": seconds}
            for work, seconds in zip(found.works, found.seconds, strict=True)
        ]
        host = {"host": found.host, "copy_bytes_per_s": found.copy_bytes_per_s, "left_out": found.left_out}
        _print_json({"device": found.device, "curves": curves, "file": str(file), **host})
    else:
        _print(render.calibration(found, file))
