"""The command that chooses: plan."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli import INTERRUPTED
from trimtab.cli.foresee import On  # noqa: TC001 - typer reads the annotations
from trimtab.cli.main import Json, _print, _print_json, app
from trimtab.cli.progress import progress
from trimtab.cli.shape import (
    Clip,
    Config,
    Frozen,
    JobName,
    Llama,
    Lora,
    Network,
    NoCache,
    Pin,
    Qwen,
    Seq,
    Sequential,
    Set,
    Stages,
    Turned,
    job_options,
    stage_folder,
    stated_devices,
    turned,
)
from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from trimtab.configs.knobs import KnobSettings
    from trimtab.spec import Plan, StagedPlan

GOES_ON = "the same command goes on from the traces made so far."


@app.command()
def plan(  # noqa: PLR0913, PLR0917 - each is an option
    job: JobName,
    on: On = None,
    network: Network = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Samples per optimizer step, instead of the job's.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Samples in an epoch, instead of the job's.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs, instead of the job's.")] = None,
    memory: Annotated[float, typer.Option(help="Share of the free memory that may be used.")] = 0.9,
    deadline: Annotated[str | None, typer.Option(help="The longest that the run may take: 12h.")] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="speed: ends soonest; gpus: fewest that meet the deadline; cost: fewest GPU-hours."
        ),
    ] = "speed",
    compare: Annotated[
        str | None, typer.Option(metavar="COUNTS", help="Set numbers of GPUs side by side: 1,2,4,8.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Of one GPU for an hour.")] = None,
    pin: Pin = None,
    clip: Clip = None,
    stages: Stages = None,
    given: Set = None,
    knob: Turned = None,
    config: Config = None,
    seq: Seq = None,
    lora: Lora = None,
    frozen: Frozen = False,
    llama: Llama = None,
    qwen: Qwen = None,
    sequential: Sequential = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the plan as JSON.")] = None,
    no_cache: NoCache = False,
    json: Json = False,
) -> None:
    """Find the best configuration that fits, with reasons, without a GPU.

    The job's own code runs for a few steps on tensors without memory. Ctrl-C gives the best plan found so
    far. Exit code 3 when nothing fits or nothing meets the deadline, 4 when the job's code fails, 130 after
    Ctrl-C.
    """
    from functools import partial

    from trimtab import api, render
    from trimtab.spec import Plan

    numbers = counts(compare)
    options = job_options(
        job, given, seq=seq, lora=lora, frozen=frozen, llama=llama, qwen=qwen, sequential=sequential
    )
    pins: Any = pin or []
    if knob or config:
        set_up = turned(
            job,
            knob,
            config,
            options=options | ({} if global_batch is None else {"global_batch": str(global_batch)}),
            pins=pins,
            flags={},
            where=api.cluster(on, network=network),
        )
        # What only the rate of a long run depends on would have the same step traced again.
        options = {name: value for name, value in set_up.options.items() if name not in set_up.spare}
        pins = set_up.pins
        samples = _horizon(job, set_up, samples, epochs)
    where = stated_devices(on, network)
    found: Plan | StagedPlan
    look = api.plan if stages is None else partial(api.plan_stages, files=stage_folder(stages))
    try:
        with progress("planning") as shown:
            found = look(
                job,
                where,
                global_batch=global_batch,
                samples=samples,
                epochs=epochs,
                memory=memory,
                deadline=deadline,
                objective=objective,
                compare=numbers,
                price=price,
                pins=pins,
                clip=clip,
                options=options,
                cache=not no_cache,
                say=shown.say,
                say_best=shown.found,
                partial=True,
            )
    except KeyboardInterrupt:
        sys.stderr.write(f"trimtab: stopped before anything that fits was found; {GOES_ON}\n")
        raise typer.Exit(INTERRUPTED) from None
    if out is not None:
        _write(found, out)
    if json:
        _print_json(found.to_builtins())
    elif isinstance(found, Plan):
        _print(render.plan(found))
    else:
        _print(render.staged_plan(found))
    if isinstance(found, Plan) and not found.complete:
        sys.stderr.write(f"trimtab: stopped: this is the best so far, not the best of all; {GOES_ON}\n")
        raise typer.Exit(INTERRUPTED)


def _horizon(job: str, set_up: KnobSettings, samples: int | None, epochs: int | None) -> int | None:
    """The samples of so many optimizer steps; says which knobs a plan does not depend on."""
    from trimtab import api

    asked = dict(set_up.train)
    steps = asked.pop("steps", None)
    if steps is not None and samples is None and epochs is None:
        subject = api.load(job, **set_up.options)
        samples = -(-steps * subject.global_batch // subject.epochs)
    if asked:
        named = ", ".join(set_up.by.get(one, f"{one}={value}") for one, value in asked.items())
        sys.stderr.write(f"trimtab: for training, not for a plan: {named}\n")
    return samples


def counts(text: str | None) -> tuple[int, ...]:
    """Numbers of devices, as in 1,2,4,8."""
    from trimtab.units import parse_whole

    if text is None:
        return ()
    found = [parse_whole(one) for one in text.split(",")]
    if not all(found):
        raise WrongUse(
            f"--compare {text}",
            found="it is no list of numbers from 1 up",
            cure="Write it like --compare 1,2,4.",
        )
    return tuple(one for one in found if one)


def _write(plan: Plan | StagedPlan, file: Path) -> None:
    try:
        file.write_text(plan.to_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise WrongUse(
            f"--out {file}",
            found=f"it cannot be written ({error.strerror})",
            cure="Name a file in a folder that exists and that you may write to.",
        ) from error
