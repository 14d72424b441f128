"""The command that launches: shows what would be run, and runs it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.choose import counts
from trimtab.cli.foresee import On  # noqa: TC001 - typer reads the annotations
from trimtab.cli.main import Json, _print, _print_json, app
from trimtab.cli.progress import progress
from trimtab.cli.shape import (
    Frozen,
    Llama,
    Lora,
    Network,
    NoCache,
    Pin,
    Qwen,
    Rendezvous,
    Restarts,
    RunOut,
    Seq,
    Sequential,
    Set,
    Steps,
    job_options,
    stated_devices,
)
from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from trimtab.spec import Launch


def _kind(**chosen: bool) -> str:
    named = [name for name, is_set in chosen.items() if is_set]
    if len(named) > 1:
        raise WrongUse(
            " ".join(f"--{one}" for one in named),
            found="a launch is for one of them",
            cure="Give one; without any, torchrun starts it on this machine.",
        )
    return named[0] if named else "torchrun"


@app.command()
def launch(  # noqa: PLR0913, PLR0917 - each is an option
    plan_or_job: Annotated[
        str,
        typer.Argument(
            metavar="PLAN_OR_JOB",
            help="A plan that `trimtab plan --out` wrote, or a job, which is planned first.",
        ),
    ],
    extra: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- WORDS", help="Further options of `trimtab train`, or words for --script."),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="An sbatch script, checked against the cluster.")
    ] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="A manifest: an Indexed Job and its Service.")
    ] = False,
    kubeflow: Annotated[bool, typer.Option("--kubeflow", help="A manifest: a TrainJob.")] = False,
    sky: Annotated[bool, typer.Option("--sky", help="A task of SkyPilot.")] = False,
    accelerate: Annotated[
        bool, typer.Option("--accelerate", help="The line of `accelerate launch` for your own --script.")
    ] = False,
    deepspeed: Annotated[
        bool, typer.Option("--deepspeed", help="The line of `deepspeed` for your own --script.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Run it, or submit it.")] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Write the script and its files, and start nothing.")
    ] = False,
    out: RunOut = None,
    on: On = None,
    network: Network = None,
    nodes: Annotated[
        str | None,
        typer.Option(metavar="MIN:MAX", help="Nodes: 2, or 1:2 for a run that goes on with what is left."),
    ] = None,
    procs: Annotated[
        int | None, typer.Option(help="Processes on each node, for a job; default: the plan's.")
    ] = None,
    rendezvous: Rendezvous = None,
    restarts: Restarts = None,
    steps: Steps = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit, as in 12h; default: the estimate and a quarter more.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(help="Of the Slurm cluster; default: the cluster's.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="That Slurm charges.")] = None,
    qos: Annotated[str | None, typer.Option(help="Slurm's quality of service.")] = None,
    activate: Annotated[
        str | None, typer.Option(metavar="VENV", help="The virtual environment that a Slurm job activates.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Of containers.")] = None,
    script: Annotated[
        str | None, typer.Option(metavar="FILE", help="Your own script, for accelerate and deepspeed.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="COUNTS", help="One launch for each number of GPUs: 1,2,4.")
    ] = None,
    pin: Pin = None,
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
    """Show exactly what would be run for a plan; --yes runs it.

    By torchrun on this machine, or as a script or manifest for a scheduler: stdout has the text and nothing
    else. What a site always wants is in [launch] of trimtab.toml.
    """
    from trimtab import api

    kind = _kind(
        slurm=slurm,
        kubernetes=kubernetes,
        kubeflow=kubeflow,
        sky=sky,
        accelerate=accelerate,
        deepspeed=deepspeed,
    )
    numbers = counts(compare)
    if yes and len(numbers) > 1:
        raise WrongUse(
            f"--yes with --compare {compare}",
            found="those are several launches, and one is wanted",
            cure="Give --write, look at them, and submit one; or --compare with one number.",
        )
    with progress("planning") as shown:
        say = shown.say
        found = api.prepare_launch(
            plan_or_job,
            kind=kind,
            on=stated_devices(on, network),
            nodes=nodes,
            procs=procs,
            rendezvous=rendezvous,
            restarts=restarts,
            out=out,
            steps=steps,
            time=time,
            partition=partition,
            account=account,
            qos=qos,
            activate=activate,
            image=image,
            script=script,
            compare=numbers,
            pins=pin or [],
            extra=extra or [],
            options=job_options(
                plan_or_job,
                given,
                seq=seq,
                lora=lora,
                frozen=frozen,
                llama=llama,
                qwen=qwen,
                sequential=sequential,
            ),
            cache=not no_cache,
            say=say,
        )
    _answer(found, yes=yes, write=write, json=json, several=bool(numbers))


def _answer(found: tuple[Launch, ...], *, yes: bool, write: bool, json: bool, several: bool) -> None:
    """Show the launches, and do what was asked with them."""
    from trimtab.launching import submit

    if yes:
        submit.check_startable(found[0])
    if not json:
        _show(found)
    if write and not yes:
        written = [name for one in found for name in submit.write_launch_files(one)]
        _say(f"wrote {', '.join(written)}" if written else "there is no file to write")
    runs_here = yes and found[0].script is None
    if runs_here:
        found = tuple(one.replace(job_id=str(os.getpid())) for one in found)
    elif yes:
        found = tuple(submit.submit_launch(one) for one in found)
        _say(f"submitted: job {found[0].job_id}")
    if json:
        _print_json({"launches": [one.to_builtins() for one in found]} if several else found[0].to_builtins())
    if runs_here:
        submit.exec_launch(found[0], os.environ, quiet=json)
    if not (yes or write or json):
        can_run = found[0].kind in submit.RUNS
        _say(
            "nothing was started or written: --yes starts it, --write writes the files that it names"
            if can_run
            else f"nothing was written or started{_writes(found)}"
        )


def _writes(found: tuple[Launch, ...]) -> str:
    return "; --write writes" if found[0].script is not None else ""


def _show(found: tuple[Launch, ...]) -> None:
    from trimtab.cli import views

    for one in found:
        sys.stdout.write(views.launch_text(one, several=len(found) > 1))
    sys.stdout.flush()
    for line in views.launch_notes(found):
        _print(line, errors=True)


def _say(text: str) -> None:
    sys.stderr.write(f"trimtab: {text}\n")
