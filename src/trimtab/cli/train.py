"""The command `trimtab train`."""

from __future__ import annotations

import os

import typer

from trimtab import api
from trimtab.cli.options import Config, Knobs, Stages, add_knobs, command, stage_folder
from trimtab.cli.progress import progress
from trimtab.spec.requests import TrainRequest


@command(TrainRequest)
def train(request: TrainRequest, *, stages: Stages = None, knob: Knobs = None, config: Config = None) -> None:
    """Train a job by a plan, or by one that is made for this machine.

    Training is elastic, and the job's own code is run. Out of memory, numbers that are not finite, lost
    processes and signals are handled and written to events.jsonl. Exit code 143 or 138 when SIGTERM or
    SIGUSR1 ended it, with a checkpoint saved; the same command resumes.
    """
    if knob or config:
        ranks = count_processes(request.procs, request.nodes)
        request, _ = add_knobs(request, knob, config, where=api.detect(), ranks=ranks)
    if stages is not None:
        code = api.train_stages(**request.arguments(), files=stage_folder(stages)).exit_code
    else:
        with progress("planning") as shown:
            task = api.prepare_training(request.replace(say=shown.say))
        code = api.run_training(*task).exit_code
    if code:
        raise typer.Exit(code)


def count_processes(procs: int | None, nodes: str) -> int | None:
    """Return how many processes will train, if the command line or a launcher says it."""
    launched = os.environ.get("WORLD_SIZE", "") or os.environ.get("SLURM_NTASKS", "")
    if procs is None:
        return int(launched) if launched.isdigit() and "LOCAL_RANK" in os.environ else None
    return procs * (int(nodes) if nodes.isdigit() else 1)
