"""The program `trimtab`: parses, calls the function of the same name, prints.

stdout carries the answer, stderr everything else. With --json stdout is one JSON object, also when the
answer is an error.
"""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from trimtab.errors import TrimtabError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from trimtab.spec import Cluster

app = typer.Typer(
    name="trimtab",
    help="Fits any PyTorch training job to whatever GPUs there are.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def run() -> NoReturn:
    """Run the program and leave with the exit code that says how it went."""
    try:
        app()
    except TrimtabError as error:
        _show_error(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader of a pipe has seen enough.
        sys.stderr.close()
        sys.exit(0)
    except Exception:  # noqa: BLE001 - the last door: whatever comes here is our bug
        import traceback

        traceback.print_exc()
        print(  # noqa: T201 - nothing else may work any more
            "\nThis is a bug in trimtab, not in what you typed. Please report the lines above.",
            file=sys.stderr,
        )
        sys.exit(1)
    sys.exit(0)


def _console(*, errors: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=errors, highlight=False, soft_wrap=False)


def _print(what: RenderableType, *, errors: bool = False) -> None:
    """Print without the trailing blanks that tables are padded with."""
    console = _console(errors=errors)
    with console.capture() as captured:
        console.print(what)
    lines = (line.rstrip() for line in captured.get().splitlines())
    console.file.write("\n".join(lines) + "\n")


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json_text.dumps(value, indent=2) + "\n")


def _show_error(error: TrimtabError) -> None:
    from trimtab import render

    if "--json" in sys.argv:
        parts = {"given": error.given, "found": error.found, "cure": error.cure}
        _print_json({"error": {**parts, "exit_code": error.exit_code}})
    _print(render.error(error), errors=True)


def _version(wanted: bool) -> None:
    if wanted:
        from trimtab import __version__

        typer.echo(f"trimtab {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Fits any PyTorch training job to whatever GPUs there are."""


@app.command()
def detect(
    on: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICES",
            help="Describe these instead of this machine: H200, 4xA100-40GB, 2x8xH100, "
            "2xRTX3090+1xRTX4090, or a file from `trimtab detect --json`.",
        ),
    ] = None,
    json: Json = False,
    sources: Annotated[bool, typer.Option(help="Also say where each fact comes from.")] = False,
    names: Annotated[bool, typer.Option("--list", help="List every device name that is known.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Save every question and answer, for a report about a machine that looks wrong.",
        ),
    ] = None,
) -> None:
    """Show the hardware that this process may use.

    As the scheduler, cgroups, CUDA_VISIBLE_DEVICES and MIG leave it. Exit code 5 when it is not in order.
    """
    from trimtab import render

    if names:
        from trimtab.catalog.tables import devices

        _print(render.device_names(devices()))
        return
    found = _look(on, record)
    if json:
        _print_json(found.to_builtins())
    else:
        _print(render.cluster(found, heading=f"--on {on}" if on is not None else "This machine"))
        if sources:
            _print("")
            _print(render.sources(found))
    for one in found.findings:
        _print(render.finding(one), errors=True)
    if any(one.severity.value == "error" for one in found.findings):
        raise typer.Exit(5)


def _look(on: str | None, record: Path | None) -> Cluster:
    from trimtab import api

    if on is not None:
        return api.cluster(on)
    if record is None:
        return api.detect()
    from trimtab.errors import WrongUse
    from trimtab.probe.detect import detect as look
    from trimtab.probe.world import here, recorded

    world, notes = recorded(here())
    found = look(world)
    try:
        record.write_text(json_text.dumps(notes, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise WrongUse(
            f"--record {record}",
            found=f"it cannot be written ({error.strerror})",
            cure="Name a file in a folder that exists and that you may write to.",
        ) from error
    return found


@app.command()
def explain(
    word: Annotated[str | None, typer.Argument(help="A knob, strategy or term; none lists all.")] = None,
    json: Json = False,
) -> None:
    """Explain a knob, strategy or term in plain English."""
    from trimtab import api, render

    if word is None:
        from trimtab.catalog.words import words

        known = words(api.VERBS)
        if json:
            _print_json({"words": sorted(known)})
        else:
            _print(render.word_list(known))
        return
    found = api.explain(word)
    if json:
        _print_json(found.to_builtins())
    else:
        _print(render.word(found))
