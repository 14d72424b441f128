"""The command that trains."""

from __future__ import annotations

import os
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated, Any

import typer

from trimtab.cli.main import app
from trimtab.cli.progress import progress
from trimtab.cli.shape import (
    Config,
    Data,
    Frozen,
    JobName,
    Llama,
    Lora,
    Pin,
    Qwen,
    Rendezvous,
    Restarts,
    RunOut,
    Seq,
    Sequential,
    Set,
    Stages,
    Steps,
    Turned,
    job_options,
    stage_folder,
    turned,
)


@app.command()
def train(  # noqa: PLR0913, PLR0917 - each is an option
    job: JobName,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="From `trimtab plan --out`; without, one is made here."),
    ] = None,
    steps: Steps = None,
    procs: Annotated[
        int | None, typer.Option(help="Processes on this machine; without, as many as the plan has GPUs.")
    ] = None,
    out: RunOut = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the first weights and of the order of samples; default 0.")
    ] = None,
    pin: Pin = None,
    stages: Stages = None,
    given: Set = None,
    data: Data = None,
    knob: Turned = None,
    config: Config = None,
    seq: Seq = None,
    lora: Lora = None,
    frozen: Frozen = False,
    llama: Llama = None,
    qwen: Qwen = None,
    sequential: Sequential = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="STEPS", help="Steps between checkpoints.")
    ] = None,
    checkpoint_minutes: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Minutes between checkpoints; default 10.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Checkpoints kept beside the best; default 3.")
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS", help="Steps between evaluations, for a job with validation(); default an epoch."
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(metavar="STEPS", help="Steps between printed lines; default 1, or 10 in long runs."),
    ] = None,
    nodes: Annotated[
        str, typer.Option(metavar="MIN:MAX", help="Nodes, for a run that goes on with what is left.")
    ] = "1",
    rendezvous: Rendezvous = None,
    restarts: Restarts = None,
    timeout_min: Annotated[
        float, typer.Option(metavar="MINUTES", help="How long processes wait for one that is silent.")
    ] = 10.0,
    faults: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A drill: faults to survive; see docs/training.md.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line: steps, then events.")
    ] = False,
) -> None:
    """Train a job, elastically: plans for this machine if no plan is given.

    The job's own code is run. Out of memory, numbers that are not finite, lost processes and signals are
    answered and written to events.jsonl. Exit code 143 or 138 when SIGTERM or SIGUSR1 ended it, with a
    checkpoint saved; the same command resumes.
    """
    from trimtab import api

    set_up = turned(
        job,
        knob,
        config,
        options=job_options(
            job,
            given,
            seq=seq,
            lora=lora,
            frozen=frozen,
            data=data,
            llama=llama,
            qwen=qwen,
            sequential=sequential,
        ),
        pins=pin or [],
        flags={
            "steps": steps,
            "seed": seed,
            "checkpoint_steps": checkpoint_every,
            "evaluate_steps": evaluate_every,
            "every": every,
        },
        where=api.detect() if knob or config else None,
        ranks=processes(procs, nodes),
    )
    flags = set_up.train | {"seed": set_up.train["seed"] or 0}
    asked: dict[str, Any] = flags | {
        "procs": procs,
        "nodes": nodes,
        "rendezvous": rendezvous,
        "restarts": restarts,
        "pins": set_up.pins,
        "out": out,
        "checkpoint_s": None if checkpoint_minutes is None else 60 * checkpoint_minutes,
        "keep": keep,
        "faults": faults,
        "timeout_min": timeout_min,
        "options": set_up.options,
        "json": json,
    }
    if stages is not None:
        code = api.train_stages(job, plan, files=stage_folder(stages), **asked).exit_code
    else:
        with progress("planning") as shown:
            say = shown.say
            task = api.prepare_training(job, plan, say=say, **asked)
        code = api.run_training(*task).exit_code
    if code:
        raise typer.Exit(code)


def processes(procs: int | None, nodes: str) -> int | None:
    """How many processes will train, where the command line or a launcher says it."""
    launched = os.environ.get("WORLD_SIZE", "") or os.environ.get("SLURM_NTASKS", "")
    if procs is None:
        return int(launched) if launched.isdigit() and "LOCAL_RANK" in os.environ else None
    return procs * (int(nodes) if nodes.isdigit() else 1)
