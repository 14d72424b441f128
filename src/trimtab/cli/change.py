"""The commands that touch the user's own config files: apply, show and revert."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.foresee import On  # noqa: TC001 - typer reads the annotations
from trimtab.cli.main import Json, _print, _print_json, app
from trimtab.cli.progress import progress
from trimtab.cli.shape import Network, NoCache, Set, job_options, stated_devices
from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from collections.abc import Sequence

TargetName = Annotated[
    str | None,
    typer.Option("--target", metavar="NAME", help="Which framework reads the file, where it cannot be told."),
]


@app.command()
def apply(  # noqa: PLR0913, PLR0917 - each is an option
    plan: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="A plan that `trimtab plan --out` wrote.")
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE[:PATH]",
            help="A config, a place in it (config.py:slm_config), or a folder with stages. Can be repeated.",
        ),
    ] = None,
    target: TargetName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write without asking.")] = False,
    beside: Annotated[
        bool, typer.Option("--beside", help="Replace computed values too; each stays in a comment.")
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(metavar="DEVICES", help="For which devices stages are planned; default: the plan's."),
    ] = None,
    network: Network = None,
    list_targets: Annotated[
        bool, typer.Option("--list-targets", help="List the configs that are understood.")
    ] = False,
    no_cache: NoCache = False,
    json: Json = False,
) -> None:
    """Write a plan into your own config files: a diff first, a backup always.

    Comments, order and formatting stay. Nothing is written if any file fails, or without a yes. What a config
    cannot hold is said.
    """
    from trimtab import api
    from trimtab.cli import views

    if list_targets:
        _list_targets(to or [], json=json)
        return
    if plan is None or not to:
        raise WrongUse(
            "trimtab apply",
            found="there is no PLAN" if plan is None else "there is no --to",
            cure="Write it like: trimtab apply plan.json --to config.yaml",
        )
    if network is not None and on is None:
        raise WrongUse(
            f"--network {network}",
            found="the plan holds the devices and their network already",
            cure="Give --on DEVICES too, or state it where the plan is made: trimtab plan --network.",
        )
    found, unchecked = api.plan_from(plan)
    where = stated_devices(on, network)
    with progress("planning") as shown:
        say = shown.say
        proposal = api.propose(found, to, target=target, on=where, beside=beside, cache=not no_cache, say=say)
    proposal.said += [unchecked] if unchecked else []
    ready = proposal.prepare(beside=beside)
    preview = api.applied(proposal, ready, None)
    if not json:
        _show_proposal(preview, proposal.stages)
        for line in (*views.notes(proposal.said), *views.warnings(proposal.warnings)):
            _print(line, errors=True)
    changes = bool(preview["diff"])
    written = api.write_plan(ready, found) if changes and (yes or (not json and _asked())) else None
    if json:
        _print_json(api.applied(proposal, ready, written))
    elif written:
        _print(views.written(written))
    elif changes:
        _print("nothing was written; --yes writes", errors=True)


def _show_proposal(preview: dict[str, Any], stages: Sequence[Any]) -> None:
    from trimtab.cli import views

    if stages:
        _print(views.stage_plans(stages))
        _print("")
    if preview["diff"]:
        sys.stdout.write(preview["diff"]) if not sys.stdout.isatty() else _print(views.diff(preview["diff"]))
    else:
        _print(f"{', '.join(preview['files'])}: says what the plan does already; nothing to write")


def _asked() -> bool:
    """A yes at the prompt, where there is somebody to give it."""
    if not sys.stdin.isatty():
        return False
    sys.stdout.flush()
    sys.stderr.write("Write this? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _list_targets(to: Sequence[str], *, json: bool) -> None:
    from trimtab.cli import views
    from trimtab.configs.apply import parse_aim
    from trimtab.configs.targets import list_targets

    found = list_targets([parse_aim(one).file for one in to] or [parse_aim(".").file])
    if json:
        _print_json({"targets": [one.to_builtins() for one in found]})
    else:
        _print(views.targets(found))


@app.command()
def show(  # noqa: PLR0913, PLR0917 - each is an option
    file: Annotated[str, typer.Argument(metavar="FILE_OR_FOLDER", help="A config, FILE:PATH, or a folder.")],
    on: On = None,
    network: Network = None,
    job: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="The job that the config is for, where the file does not tell."),
    ] = None,
    target: TargetName = None,
    given: Set = None,
    no_cache: NoCache = False,
    json: Json = False,
) -> None:
    """Show what a config would use, stage by stage, and what would be better.

    Reads only: nothing is written. Exit code 3 when a stage does not fit.
    """
    from trimtab import api
    from trimtab.cli import views

    options = job_options(job or "", given)
    where = stated_devices(on, network)
    with progress("planning") as shown:
        say = shown.say
        found = api.show(file, where, job=job, target=target, options=options, cache=not no_cache, say=say)
    if json:
        _print_json(found.to_builtins())
    else:
        _print(views.display(found))
    if any(one.fits is False for one in found.stages):
        raise typer.Exit(3)


@app.command()
def revert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A config that `trimtab apply` wrote.")],
    backup: Annotated[int | None, typer.Option(metavar="N", help="Which backup; default: the last.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also where the file was edited since; see the diff first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write without asking at a terminal.")] = False,
    json: Json = False,
) -> None:
    """Put back the config that `trimtab apply` saved before it wrote.

    At a terminal the diff is shown and a yes is asked for; a script is not asked. What was there is kept.
    """
    from trimtab import api
    from trimtab.cli import views

    asks = sys.stdin.isatty() and not (yes or json)
    done = api.revert(file, backup=backup, force=force, write=not asks)
    if json:
        _print_json(done)
        return
    if done["diff"]:
        sys.stdout.write(done["diff"]) if not sys.stdout.isatty() else _print(views.diff(done["diff"]))
    if asks and done["diff"]:
        if not _asked():
            _print("nothing was written; --yes writes", errors=True)
            return
        done = api.revert(file, backup=done["number"], force=force)
    before = f"as before write {done['number']}"
    if done["restored"]:
        _print(f"{file}: put back {before}; what was there is kept in {done['backup']}")
    else:
        _print(f"{file}: is {before} already; nothing was written")
