"""The command `trimtab help`."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Annotated

import typer

from trimtab.cli.completion import complete_commands
from trimtab.cli.console import print_json
from trimtab.errors import WrongUse


def help(  # noqa: A001 - named as the command
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[COMMAND]",
            autocompletion=complete_commands,
            help="A command of trimtab; none lists all commands.",
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of what the command prints with --json.")
    ] = False,
    man: Annotated[
        bool, typer.Option("--man", help="Print the manual as roff: trimtab help plan --man | man -l -")
    ] = False,
) -> None:
    """Show the manual of a command, or the JSON schema of its output.

    The manual has what --help has, and also exit codes, examples, files and environment variables.
    """
    if name is None:
        if schema or man:
            raise WrongUse(
                f"help {'--schema' if schema else '--man'}",
                found="no command is named",
                cure="Name one, as in `trimtab help plan --schema`.",
            )
        from trimtab.cli.main import show_commands

        show_commands()
        return
    if schema and man:
        raise WrongUse("--schema with --man", found="they print different things", cure="Give one of them.")
    from trimtab import api
    from trimtab.cli.manual import build_manual, render_man_page, render_manual

    manual = build_manual(name)
    if schema:
        print_json(api.schema(name))
    elif man:
        sys.stdout.write(render_man_page(manual))
    else:
        text = render_manual(manual, shutil.get_terminal_size((80, 24)).columns)
        sys.stdout.write(style_titles(text) if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text)


def style_titles(text: str) -> str:
    """Return a manual with its titles in bold, for a terminal."""
    lines = text.split("\n")
    return "\n".join(typer.style(line, bold=True) if line[:1].isalpha() else line for line in lines)
