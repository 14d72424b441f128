"""The commands `trimtab exam`, `trimtab profile` and `trimtab calibrate`: predictions and measurements."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict

from trimtab import api
from trimtab.cli.console import Json, print_json, print_text
from trimtab.cli.options import command
from trimtab.errors import WrongUse
from trimtab.spec import (
    CalibrateOutput,
    CalibrationsOutput,
    ImportOutput,
    LinksOutput,
    MeasuredWork,
    RemoveOutput,
)
from trimtab.spec.requests import ProfileRequest

if TYPE_CHECKING:
    from trimtab.spec import Calibration


def exam(  # noqa: PLR0913, PLR0917 - options
    only: Annotated[
        str, typer.Option(metavar="PATTERN", help="Only cases whose names match, as in 'gpt-*'.")
    ] = "*",
    own: Annotated[
        Path | None,
        typer.Option("--cases", metavar="FILE", help="File of cases that `trimtab profile --keep` wrote."),
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Trace every case again.")] = False,
    outside: Annotated[
        bool, typer.Option("--outside", help="Predict what other people measured and published.")
    ] = False,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --outside: only this source, such as vTrain.")
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="With --outside: trace its jobs again; takes minutes.")
    ] = False,
    json: Json = False,
) -> None:
    """Predict every recorded measurement again, and show the errors.

    Takes some minutes the first time. Needs transformers and peft for some of the cases. With --outside,
    predicts the measurements of public sources, in seconds: their fine-tuning jobs have recorded
    predictions, and --replay traces them again.
    """
    if source is not None and not outside:
        raise WrongUse(f"--source {source}", found="only --outside has sources", cure="Add --outside.")
    if replay and not outside:
        raise WrongUse("--replay", found="only --outside has jobs to replay", cure="Add --outside.")
    if outside:
        if only != "*" or own is not None or no_cache:
            raise WrongUse(
                "--outside",
                found="--only, --cases and --no-cache are for trimtab's own cases",
                cure="Leave them out, or name a source with --source.",
            )
        _show_outside(source, replay=replay, json=json)
        return
    from trimtab.exams.run import run_exam

    def done(answer: Any) -> None:
        if not json:
            print(f"  {answer.case}", file=sys.stderr)  # noqa: T201 - progress

    marks = run_exam(only, own=own, cache=not no_cache, done=done)
    if json:
        print_json(marks.to_builtins())
    else:
        from trimtab import render

        print_text(render.render_exam(marks))


def _show_outside(source: str | None, *, replay: bool, json: bool) -> None:
    """Predict other people's measurements, and print the errors by source."""
    from trimtab.exams.outside import run_outside

    def show_done(name: str, count: int) -> None:
        if not json:
            print(f"  {name}: {count} rows", file=sys.stderr)  # noqa: T201 - progress

    if replay:
        from trimtab.catalog.torch_release import require_supported_torch

        require_supported_torch()
    result = run_outside(source, replay=replay, done=show_done)
    if json:
        print_json(result.to_builtins())
    else:
        from trimtab import render

        print_text(render.render_outside(result))


@command(ProfileRequest)
def profile(request: ProfileRequest, *, json: Json = False) -> None:
    """Run a configuration for a few steps and check the prediction.

    Needs a GPU. Exit code 3 when it runs out of memory.
    """
    device = api.gpu_here()
    setting = api.make_setting(
        micro_batch=request.micro_batch,
        precision=request.precision,
        base=request.base,
        loss=request.loss,
        recompute=request.recompute,
        offload=request.offload,
        compile=request.compile,
        strategy="single",
        gpus=1,
        optimizer=request.optimizer,
        optimizer_in_backward=request.optimizer_in_backward,
        allocator=request.allocator,
    )
    result = api.profile(
        request.job, setting, device, options=request.options, clip=request.clip, keep=request.keep
    )
    if json:
        print_json(result)
    else:
        heading = f"{request.job} on {device.name}, micro-batch {request.micro_batch}, {request.precision}"
        from trimtab import render

        print_text(render.render_profile(result, heading=heading))
    if result["run"]["out_of_memory"]:
        raise typer.Exit(3)


def calibrate(  # noqa: PLR0913, PLR0917 - options
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds that the measurements may take.")
    ] = 120.0,
    links: Annotated[
        bool,
        typer.Option("--links", help="Measure collectives between GPUs instead of operations."),
    ] = False,
    procs: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="With --links: processes to start; default: one for each GPU of this machine."
        ),
    ] = None,
    shared: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE", help="Check and store a calibration that someone shared."),
    ] = None,
    owner: Annotated[
        str | None, typer.Option(metavar="NAME", help="Your name in the file, or the owner's with --import.")
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--list", help="Show the stored calibrations and whose they are.")
    ] = False,
    remove: Annotated[
        str | None, typer.Option(metavar="NAME", help="Remove a stored calibration, by its name in --list.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure the GPU of this machine once, for predictions of time.

    Runs the operations of common models over sizes and precisions, in about two minutes. With --links,
    measures all-reduce, all-gather, reduce-scatter, all-to-all and send between the GPUs of this machine,
    or between all processes that torchrun or srun started it in. The file that it writes can be shared:
    --import takes such a file, and predictions for its GPU use it.
    """
    ways = {
        "--links": links,
        "--import": shared is not None,
        "--list": show_all,
        "--remove": remove is not None,
    }
    chosen = [name for name, given in ways.items() if given]
    if len(chosen) > 1:
        raise WrongUse(" ".join(chosen), found="each is a command of its own", cure="Give one of them.")
    if procs is not None and not links:
        raise WrongUse(f"--procs {procs}", found="only --links starts processes", cure="Add --links.")
    if links:
        _calibrate_links(procs, json=json)
        return
    if shared is not None:
        _import_calibration(shared, owner or "", json=json)
        return
    if show_all:
        _list_calibrations(json=json)
        return
    if remove is not None:
        file = api.remove_calibration(remove)
        print_json(RemoveOutput(removed=str(file)).to_builtins()) if json else print_text(f"removed {file}")
        return
    calibration, file = api.calibrate(budget_s=budget, owner=owner or "")
    if json:
        print_json(describe_measured(calibration, file).to_builtins())
    else:
        from trimtab import render

        print_text(render.render_calibration(calibration, file))


def describe_measured(calibration: Calibration, file: Path) -> CalibrateOutput:
    """Return a calibration that was just measured, with its file."""
    curves = (
        MeasuredWork(**asdict(work), seconds=seconds)
        for work, seconds in zip(calibration.works, calibration.seconds, strict=True)
    )
    return CalibrateOutput(
        device=calibration.device,
        curves=tuple(curves),
        file=str(file),
        host=calibration.host,
        copy_bytes_per_s=calibration.copy_bytes_per_s,
        left_out=calibration.left_out,
    )


def _calibrate_links(procs: int | None, *, json: bool) -> None:
    """Measure collectives, and print what the first process stored."""
    calibration, file = api.calibrate_links(procs=procs)
    if file is None:
        return
    if json:
        found = LinksOutput(device=calibration.device, file=str(file), collectives=calibration.collectives)
        print_json(found.to_builtins())
    else:
        from trimtab import render

        print_text(render.render_links(calibration, file))


def _import_calibration(shared: Path, owner: str, *, json: bool) -> None:
    """Store someone's calibration, and print what it is used for."""
    calibration, file = api.import_calibration(shared, owner=owner)
    described = api.describe_calibration(file, calibration)
    if json:
        print_json(ImportOutput.from_builtins({**described, "file": str(file)}).to_builtins())
        return
    from trimtab import render

    print_text(render.render_calibrations([described]))
    print_text(f"  kept in {file}\n  `trimtab calibrate --remove {file.stem}` removes it")


def _list_calibrations(*, json: bool) -> None:
    """Print the stored calibrations."""
    stored = [api.describe_calibration(file, calibration) for file, calibration in api.list_calibrations()]
    if json:
        print_json(CalibrationsOutput.from_builtins({"calibrations": stored}).to_builtins())
        return
    from trimtab import render

    print_text(render.render_calibrations(stored))
