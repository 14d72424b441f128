"""Print answers: text for people through rich, or one JSON object."""

from __future__ import annotations

import contextlib
import json as json_text
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from rich.console import Console, RenderableType

    from trimtab.spec import Plan, StagedPlan


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def console(*, errors: bool = False) -> Console:
    """Return a console on stdout, or on stderr for `errors`."""
    from rich.console import Console

    return Console(stderr=errors, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def show_status(text: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal what is being done; yields a function that shows another text.

    Texts are plain: what a script prints, such as [/INST], is no markup.
    """
    from rich.text import Text

    with console(errors=True).status(Text(text)) as status:
        yield lambda what: status.update(Text(what))


def print_text(what: RenderableType, *, errors: bool = False) -> None:
    """Print without the trailing blanks that tables are padded with."""
    from trimtab.render import WholePaths

    target = console(errors=errors)
    with target.capture() as captured:
        target.print(WholePaths(what), crop=False)
    # Only at line feeds: other separators belong to what is shown.
    lines = (line.rstrip() for line in captured.get().removesuffix("\n").split("\n"))
    target.file.write("\n".join(lines) + "\n")


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(json_text.dumps(value, indent=2) + "\n")


def print_notes(notes: Iterable[str], *, label: str = "note", style: str = "yellow") -> None:
    """Print remarks on stderr, each after a label."""
    from trimtab.render import render_labelled

    for note in notes:
        print_text(render_labelled(label, note, style), errors=True)


def say(text: str) -> None:
    """Write a line about the command on stderr."""
    sys.stderr.write(f"trimtab: {text}\n")


class ScriptWords:
    """The training command that was typed after `--`."""

    typed: tuple[str, ...] | None = None
    """None if there was no `--`."""


def split_words(words: list[str], commands: frozenset[str]) -> tuple[list[str], tuple[str, ...] | None]:
    """Return trimtab's own words and those after `--`, for the commands that take a training command.

    >>> split_words(["estimate", "--on", "H200", "--", "python", "train.py"], frozenset({"estimate"}))
    (['estimate', '--on', 'H200'], ('python', 'train.py'))
    >>> split_words(["train", "--", "python"], frozenset({"estimate"}))
    (['train', '--', 'python'], None)
    """
    if not words or words[0] not in commands or "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def write_plan_file(plan: Plan | StagedPlan, file: Path) -> None:
    """Write a plan as JSON."""
    try:
        file.write_text(plan.to_json(indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise WrongUse(
            f"--out {file}",
            found=f"it cannot be written ({error.strerror})",
            cure="Name a file in a folder that exists and that you may write to.",
        ) from error
