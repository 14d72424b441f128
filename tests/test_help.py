"""`trimtab help COMMAND`: complete, readable at 80 columns, with the same texts as --help."""

from __future__ import annotations

import doctest
import json
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from bench.manual import write_man_pages
from typer.testing import CliRunner

import trimtab
from trimtab.cli import help as help_module
from trimtab.cli import manual
from trimtab.cli.main import COMMANDS, app, load_command
from trimtab.errors import UnknownName, WrongUse

if TYPE_CHECKING:
    from pathlib import Path

ALWAYS = ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "EXAMPLES", "ENVIRONMENT", "SEE ALSO")


def show(*words: str, columns: int = 80) -> str:
    done = CliRunner().invoke(app, ["help", *words], env={"COLUMNS": str(columns)})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_manual_has_every_section_and_option_and_fits_its_columns(name: str) -> None:
    text = show(name)
    titles = [line for line in text.splitlines() if line[:1].isalpha()]
    assert [title for title in titles if title != "FILES"] == list(ALWAYS)
    assert f"trimtab {name} - " in text
    assert COMMANDS[name][1].rstrip(".")[1:20] in text
    for param in load_command(name).params:
        for flag in param.opts:
            assert param.param_type_name == "argument" or f"       {flag}" in text or f", {flag}" in text
    # Only a word that is longer than the line goes beyond it.
    assert [line for line in text.splitlines() if len(line) > 80 and " " in line.strip()] == []
    assert "\x1b" not in text


def test_exit_codes_of_a_command_stand_in_their_own_section() -> None:
    description, _, exits = show("profile").partition("EXIT STATUS")
    assert "Exit code" not in description
    assert "Exit code 3 when it runs out of memory." in exits
    assert "       3      nothing fits\n" in exits


def test_a_manual_is_not_wider_than_is_readable() -> None:
    assert max(map(len, show("plan", columns=300).splitlines())) <= manual.WIDEST
    assert show("plan", columns=120) == show("plan", columns=300)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_can_be_typed(name: str) -> None:
    examples = manual.build_manual(name).examples
    assert examples
    for example in examples:
        program, verb, *words = shlex.split(example.term.partition(" > ")[0])
        assert (program, verb) == ("trimtab", name)
        own = words[: words.index("--")] if "--" in words else words
        load_command(name).make_context(name, own)


def test_files_and_variables_name_commands_that_exist() -> None:
    facts = manual.read_manual_facts()
    named = {name for entry in (*facts["file"], *facts["variable"]) for name in entry.get("of", ())}
    assert named <= set(COMMANDS)


def test_help_without_a_command_lists_all() -> None:
    assert show() == CliRunner().invoke(app, ["--help"]).stdout


def test_help_prints_the_schema_of_a_command() -> None:
    assert json.loads(show("revert", "--schema")) == trimtab.schema("revert")


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (("dector",), UnknownName, "Did you mean doctor"),
        (("--schema",), WrongUse, "no command is named"),
        (("plan", "--schema", "--man"), WrongUse, "different things"),
        (("help", "--schema"), UnknownName, "no such command with --json"),
    ],
)
def test_a_mistake_is_named(words: tuple[str, ...], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        show(*words)


def test_titles_are_bold_on_a_terminal() -> None:
    assert help_module.style_titles("NAME\n       x\n") == "\x1b[1mNAME\x1b[0m\n       x\n"


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
def test_man_shows_the_pages_without_a_warning(tmp_path: Path) -> None:
    write_man_pages(tmp_path)
    assert {page.name for page in tmp_path.iterdir()} == {f"trimtab-{name}.1" for name in COMMANDS}
    for name in ("plan", "launch"):
        words = ["man", "--warnings=w", "-l", str(tmp_path / f"trimtab-{name}.1")]
        env = {"MANWIDTH": "80", "PATH": "/usr/bin:/bin", "LC_ALL": "C"}
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=env)
        assert done.stderr == ""
        assert f"trimtab-{name} - " in " ".join(done.stdout.split())
        assert "EXIT STATUS" in done.stdout


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(manual).failed == 0
