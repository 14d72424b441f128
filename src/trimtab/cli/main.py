"""The program `trimtab`: parses, calls the function of the same name, prints.

stdout carries the answer, stderr everything else. With --json stdout is one JSON object, also when the
answer is an error.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json as json_text
import os
import sys
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from trimtab.errors import EnvironmentFault, NothingFits, TrimtabError, UnknownName, WrongUse, shortened

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from trimtab.catalog.words import Word
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

USAGE_ERROR: Any = typer.BadParameter.__base__
"""What the parser raises; typer itself does not name it."""
UNDELIVERED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What writing to stdout may fail with; such an error names no file."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def main_code() -> int:
    """Run the program; the exit code says how it went."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a letter gets its number instead of a traceback.
            stream.reconfigure(errors="backslashreplace")
    try:
        return _answered()
    except TrimtabError as error:
        return _failed(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # The reader of a pipe has seen enough.
            _abandon(sys.stdout)
            return 0
        if error.errno in UNDELIVERED and error.filename is None:
            return _undelivered(error)
        return _our_bug()
    except Exception:  # noqa: BLE001 - the last door: whatever comes here is our bug
        return _our_bug()


def _answered() -> int:
    """Call the command that was asked for, and see its answer through the door."""
    if sys.stdout is None:  # a shell's >&-
        raise EnvironmentFault("stdout", found="it is closed", cure="Send it somewhere, as in > FILE.")
    try:
        code = app(prog_name="trimtab", standalone_mode=False)
    except USAGE_ERROR as error:
        if "--json" in sys.argv:
            _print_json(_as_json(_wrong_use(error)))
        error.show()
        code = error.exit_code
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        raise
    sys.stdout.flush()
    return code or 0


def _wrong_use(error: Any) -> WrongUse:
    """An error of the command line's parser, in our three parts."""
    command = error.ctx.command_path if error.ctx else "trimtab"
    return WrongUse(
        shortened(" ".join(["trimtab", *sys.argv[1:]])),
        found=error.format_message().rstrip("."),
        cure=f"See `{command} --help`.",
    )


def _failed(error: TrimtabError) -> int:
    """Show an error on both streams, as far as they take it."""
    try:
        _show_error(error)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _abandon(sys.stdout)
    return error.exit_code


def _undelivered(error: OSError) -> int:
    """The answer could not be written."""
    _abandon(sys.stdout)
    fault = EnvironmentFault(
        "stdout",
        found=f"it cannot be written to ({error.strerror})",
        cure="Make room, or send the answer somewhere else.",
    )
    with contextlib.suppress(OSError):
        from trimtab import render

        _print(render.error(fault), errors=True)
    return fault.exit_code


def _our_bug() -> int:
    import traceback

    with contextlib.suppress(OSError):
        traceback.print_exc()
        print(  # noqa: T201 - nothing else may work any more
            "\nThis is a bug in trimtab, not in what you typed. Please report the lines above.",
            file=sys.stderr,
        )
    return 1


def _abandon(stream: TextIO | None) -> None:
    """Let what is left in a stream's buffer go nowhere, so that Python's own end does not complain."""
    with contextlib.suppress(OSError, ValueError):
        if stream is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _console(*, errors: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=errors, highlight=False, soft_wrap=False)


def _print(what: RenderableType, *, errors: bool = False) -> None:
    """Print without the trailing blanks that tables are padded with."""
    from trimtab.render import WholePaths

    console = _console(errors=errors)
    with console.capture() as captured:
        console.print(WholePaths(what), crop=False)
    # Only at line feeds: other separators belong to what is shown.
    lines = (line.rstrip() for line in captured.get().removesuffix("\n").split("\n"))
    console.file.write("\n".join(lines) + "\n")


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json_text.dumps(value, indent=2) + "\n")


def _as_json(error: TrimtabError) -> dict[str, Any]:
    parts: dict[str, Any] = {"given": error.given, "found": error.found, "cure": error.cure}
    if isinstance(error, NothingFits):
        parts["nearest"] = [one.to_builtins() for one in error.nearest]
    return {"error": {**parts, "exit_code": error.exit_code}}


def _show_error(error: TrimtabError) -> None:
    from trimtab import render

    _print(render.error(error), errors=True)
    if "--json" in sys.argv and sys.stdout is not None:
        _print_json(_as_json(error))


def _version(wanted: bool) -> None:
    if wanted:
        from trimtab.version import VERSION

        typer.echo(f"trimtab {VERSION}")
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
def detect(  # noqa: PLR0913, PLR0917 - each is an option
    on: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICES",
            help="Describe these instead of this machine: H200, 4xA100-40GB, 2x8xH100, "
            "2xRTX3090+1xRTX4090, or a file from `trimtab detect --json`.",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="BANDWIDTH",
            help="State the bandwidth between nodes: 400Gb/gpu, 8x400Gb/node, 50GB/s/gpu.",
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

    _refuse_together({"--on": on is not None, "--list": names, "--record": record is not None})
    if names:
        from trimtab.catalog.describe import row_facts
        from trimtab.catalog.tables import devices

        if json:
            _print_json({"devices": [row_facts(row) for row in devices()]})
        else:
            _print(render.device_names(devices()))
        return
    found = _look(on, record)
    if network is not None:
        from trimtab import api

        found = api.stated_network(found, network)
    if json:
        _print_json(found.to_builtins())
    else:
        heading = "This machine" if on is None else f"--on {shortened(on)}"
        _print(render.cluster(found, heading=heading))
        if sources:
            _print("")
            _print(render.sources(found))
    for one in found.findings:
        _print(render.finding(one), errors=True)
    if any(one.severity.value == "error" for one in found.findings):
        raise typer.Exit(5)


def _refuse_together(options: dict[str, bool]) -> None:
    """Options of which each asks for another thing."""
    given = [option for option, is_set in options.items() if is_set]
    if len(given) > 1:
        raise WrongUse(
            " with ".join(given),
            found="--on describes other hardware, --record looks at this machine, --list shows the catalogue",
            cure="Give one of them.",
        )


def _look(on: str | None, record: Path | None) -> Cluster:
    from trimtab import api

    if on is not None:
        return api.cluster(on)
    if record is None:
        return api.detect()
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
    word: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORD]...",
            help="A knob, strategy, term, error or finding, in one or more words; none lists all.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Explain a knob, strategy, term, error or finding in plain English."""
    from trimtab import api, render

    if not word:
        known = api.all_words()
        if json:
            _print_json({"words": sorted(known)})
        else:
            _print(render.word_list(known))
        return
    entries = _entries(word)
    if json and len(entries) > 1:
        _print_json(
            {"text": "\n".join(one.text for one in entries), "words": [one.to_builtins() for one in entries]}
        )
    elif json:
        _print_json(entries[0].to_builtins())
    else:
        for number, one in enumerate(entries):
            if number:
                _print("")
            _print(render.word(one))


def _entries(typed: list[str]) -> list[Word]:
    """The entry of all words together, as in `flash attention`, or else of each of them."""
    from trimtab import api

    try:
        return [api.explain(" ".join(typed))]
    except UnknownName:
        if len(typed) == 1:
            raise
        try:
            return [api.explain(one) for one in typed]
        except UnknownName:
            pass
        raise
