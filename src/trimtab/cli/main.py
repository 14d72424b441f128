"""The program `trimtab`: finds the command, runs it, and turns errors into exit codes.

stdout carries the answer, stderr everything else. With --json stdout is one JSON object, also when the
answer is an error. A command's module is loaded when the command is used, so that help stays quick.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from importlib import import_module
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from trimtab.cli.console import ScriptWords, print_json, print_text, split_words
from trimtab.errors import EnvironmentFault, NothingFits, TrimtabError, WrongUse, shorten

COMMANDS = {
    "detect": ("detect", "Show the hardware that this process may use."),
    "explain": ("detect", "Explain a knob, strategy, term, error or finding."),
    "estimate": ("estimate", "Show what one configuration would need, without a GPU."),
    "exam": ("exam", "Predict every recorded measurement again, and show the errors."),
    "profile": (
        "exam",
        "Run a configuration for a few steps and check the prediction.",
    ),
    "calibrate": ("exam", "Measure the GPU of this machine once, for predictions of time."),
    "plan": ("plan", "Find the best configuration that fits, without a GPU."),
    "layouts": ("layouts", "Rank the degrees of parallelism for a large language model."),
    "max": ("max", "Find the largest micro-batch, sequence or other number that fits."),
    "explore": ("explore", "Try configurations of a job on a page in your browser."),
    "apply": ("apply", "Write a plan into your own config files, with a backup."),
    "show": ("apply", "Show what a config would use, and what would be better."),
    "revert": ("apply", "Put back the config that `trimtab apply` saved before it wrote."),
    "train": ("train", "Train a job by a plan, or by one that is made for this machine."),
    "launch": ("launch", "Show exactly what would be run for a plan; --yes runs it."),
    "jobs": ("jobs", "Show trimtab's jobs and how far their runs have come."),
    "cancel": ("jobs", "Cancel a job; its run saves a checkpoint first."),
    "doctor": ("doctor", "Check this machine, or name what made a run fail from its logs."),
    "report": ("report", "Write one self-contained HTML page about a plan or a run."),
    "watch": ("watch", "Show GPUs and runs live, with advice."),
    "help": ("help", "Show the manual of a command, or the JSON schema of its output."),
}
"""For each command its module and what help says of it, in the order of help."""
SCRIPT_COMMANDS = frozenset({"estimate", "plan", "launch"})
"""Commands that take a training command after `--`."""
CONTEXT = {"help_option_names": ["-h", "--help"]}


class LazyGroup(TyperGroup):
    """The commands of `trimtab`, each loaded when it is used."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Suggestions for a misspelled command are made from these names.
        self.commands: Any = dict.fromkeys(COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the base class's signature
        """Return the names in the order of help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Load a command."""
        if cmd_name in COMMANDS and self.commands[cmd_name] is None:
            self.commands[cmd_name] = load_command(cmd_name)
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """List the commands without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def load_command(name: str) -> Any:
    """Return a command as the parser takes it."""
    function = getattr(import_module(f"trimtab.cli.{COMMANDS[name][0]}"), name)
    single = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=CONTEXT)
    single.command(name)(function)
    return typer.main.get_command(single)


app = typer.Typer(
    name="trimtab",
    cls=LazyGroup,
    help="Fits any PyTorch training job to whatever GPUs there are.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


def show_commands() -> None:
    """Print what `trimtab --help` prints."""
    app(["--help"], prog_name="trimtab", standalone_mode=False)


USAGE_ERROR: Any = typer.BadParameter.__base__
"""What the parser raises; typer itself does not name it."""
UNDELIVERED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""What writing to stdout may fail with; such an error names no file."""


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
    except Exception as error:  # noqa: BLE001 - the last door: whatever comes here is our bug
        return _missing_torch() if getattr(error, "name", "") == "torch" else _our_bug()


def _answered() -> int:
    """Call the command that was asked for, and see its answer through the door."""
    if sys.stdout is None:  # a shell's >&-
        raise EnvironmentFault("stdout", found="it is closed", cure="Send it somewhere, as in > FILE.")
    try:
        own, ScriptWords.typed = split_words(sys.argv[1:], SCRIPT_COMMANDS)
        code = app(own, prog_name="trimtab", standalone_mode=False)
    except USAGE_ERROR as error:
        if _wants_json():
            print_json(_as_json(_wrong_use(error)))
        error.show()
        code = error.exit_code
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        raise
    sys.stdout.flush()
    return code or 0


def _wants_json() -> bool:
    return "--json" in split_words(sys.argv[1:], SCRIPT_COMMANDS)[0]


def _wrong_use(error: Any) -> WrongUse:
    """Convert a parser error to a WrongUse with given, found and fix."""
    command = error.ctx.command_path if error.ctx else "trimtab"
    return WrongUse(
        shorten(" ".join(["trimtab", *sys.argv[1:]])),
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
    """Report that the output could not be written, and return the exit code."""
    _abandon(sys.stdout)
    fault = EnvironmentFault(
        "stdout",
        found=f"it cannot be written to ({error.strerror})",
        cure="Make room, or send the answer somewhere else.",
    )
    with contextlib.suppress(OSError):
        from trimtab import render

        print_text(render.render_error(fault), errors=True)
    return fault.exit_code


def _missing_torch() -> int:
    """Report that a command needs torch, and what is wrong with it here."""
    from trimtab.catalog.torch_release import require_supported_torch

    try:
        require_supported_torch()
    except TrimtabError as error:
        return _failed(error)
    return _our_bug()


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


def _as_json(error: TrimtabError) -> dict[str, Any]:
    from trimtab.spec import ErrorDetails, ErrorOutput

    nearest = tuple(error.nearest) if isinstance(error, NothingFits) else None
    details = ErrorDetails(
        given=error.given, found=error.found, cure=error.cure, nearest=nearest, exit_code=error.exit_code
    )
    written = ErrorOutput(error=details).to_builtins()
    if nearest is None:
        del written["error"]["nearest"]
    return written


def _show_error(error: TrimtabError) -> None:
    from trimtab import render

    for note in getattr(error, "__notes__", ()):
        # What the user's own program printed before it failed.
        print(note, file=sys.stderr)  # noqa: T201 - as it was printed
    print_text(render.render_error(error), errors=True)
    if _wants_json() and sys.stdout is not None:
        print_json(_as_json(error))


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
