"""The command `trimtab plan`."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab import api
from trimtab.cli import INTERRUPTED
from trimtab.cli.console import Json, print_json, print_text, say, write_plan_file
from trimtab.cli.estimate import add_logits_help
from trimtab.cli.options import Config, Knobs, Stages, add_knobs, command, stage_folder, state_devices
from trimtab.cli.progress import progress
from trimtab.errors import NothingFits, WrongUse
from trimtab.spec import Plan
from trimtab.spec.requests import PlanRequest

if TYPE_CHECKING:
    from trimtab.configs.knobs import KnobSettings
    from trimtab.spec import StagedPlan

CONTINUES = "run the same command again to continue from the traces made so far."


@command(PlanRequest)
def plan(  # noqa: PLR0913 - each is an option
    request: PlanRequest,
    *,
    stages: Stages = None,
    knob: Knobs = None,
    config: Config = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the plan as JSON.")] = None,
    json: Json = False,
) -> None:
    """Find the best configuration that fits, without a GPU.

    The plan comes with reasons. The job's own code runs for a few steps on tensors without memory. For a
    training command after `--` the plan is the command line to type instead, as in
    `trimtab plan --on H100 -- python train.py`. Ctrl-C gives the best plan found so far. Exit code 3 when
    nothing fits or nothing meets the deadline, 4 when the job's code fails, 130 after Ctrl-C.
    """
    request = state_devices(request)
    if request.command and (knob or config or stages):
        raise WrongUse(
            "--knob, --config or --stages with a training command",
            found="they are for a job",
            cure="Leave them out: --vary names the command's own options.",
        )
    if knob or config:
        request = plan_with_knobs(request, knob, config)
    result: Plan | StagedPlan
    try:
        with progress("planning") as shown:
            request = request.replace(say=shown.say, partial=True)
            # With --json, the only answer is the last one.
            request = request if json else request.replace(say_best=shown.found)
            if stages is None:
                result = api.plan(request)
            else:
                result = api.plan_stages(**request.arguments(), files=stage_folder(stages))
    except NothingFits as error:
        add_logits_help(error, request)
        raise
    except KeyboardInterrupt:
        say(f"stopped before anything that fits was found; {CONTINUES}")
        raise typer.Exit(INTERRUPTED) from None
    if out is not None:
        write_plan_file(result, out)
    if json:
        print_json(result.to_builtins())
    else:
        from trimtab import render

        print_text(
            render.render_plan(result) if isinstance(result, Plan) else render.render_staged_plan(result)
        )
    if isinstance(result, Plan) and not result.complete:
        say(f"stopped: this is the best so far, not the best of all; {CONTINUES}")
        raise typer.Exit(INTERRUPTED)


def plan_with_knobs(request: PlanRequest, knobs: list[str] | None, config: str | None) -> PlanRequest:
    """Return the request with what --knob and --config set."""
    from trimtab.probe.detect import as_cluster

    if request.global_batch is not None:
        options = (request.options or {}) | {"global_batch": str(request.global_batch)}
        request = request.replace(options=options)
    request, wired = add_knobs(request, knobs, config, where=as_cluster(request.on))
    samples = _samples(request, wired)
    # Options that only affect the learning rate over a long run would trace the same step again.
    options = {name: value for name, value in (request.options or {}).items() if name not in wired.spare}
    return request.replace(options=options, samples=samples)


def _samples(request: PlanRequest, wired: KnobSettings) -> int | None:
    """Return the samples per epoch that a number of steps takes; name the knobs that no plan depends on."""
    others = dict(wired.train)
    steps = others.pop("steps", None)
    samples = request.samples
    if steps is not None and samples is None and request.epochs is None:
        job = api.load(request.job, **(request.options or {}))
        samples = -(-steps * job.global_batch // job.epochs)
    if others:
        named = ", ".join(wired.by.get(name, f"{name}={value}") for name, value in others.items())
        say(f"for training, not for a plan: {named}")
    return samples
