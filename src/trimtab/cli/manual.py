"""The manual of each command, from the same data as --help and docs/reference.md."""

from __future__ import annotations

import inspect
import re
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from trimtab import api
from trimtab.cli.main import COMMANDS, SCRIPT_COMMANDS, load_command
from trimtab.errors import UnknownName, find_nearest
from trimtab.version import VERSION

KINDS = {
    "int": "N",
    "integer": "N",
    "float": "NUMBER",
    "float range": "NUMBER",
    "str": "TEXT",
    "text": "TEXT",
}
"""Names of value types in the versions of typer, and the placeholder for each."""
INDENT, TEXT_INDENT = " " * 7, " " * 14
WIDEST = 100
"""Columns of the text on a wide terminal: longer lines are hard to read."""


@dataclass(frozen=True)
class ManualEntry:
    """A term with its text: an option, a file, a variable, an exit code or an example."""

    term: str
    text: str


@dataclass(frozen=True)
class CommandManual:
    """The manual of a command, section by section."""

    name: str
    summary: str
    usage: tuple[str, ...]
    description: tuple[str, ...]
    """Paragraphs."""
    arguments: tuple[ManualEntry, ...]
    options: tuple[ManualEntry, ...]
    exits: str
    """What its own exit codes mean; empty if it has none."""
    examples: tuple[ManualEntry, ...]
    files: tuple[ManualEntry, ...]
    variables: tuple[ManualEntry, ...]
    related: tuple[str, ...]

    def sections(self) -> list[tuple[str, list[str | ManualEntry]]]:
        """Return the titles and the contents of the sections that are not empty."""
        see = ", ".join(f"trimtab help {name}" for name in self.related)
        more = "docs/reference.md"
        sections: dict[str, list[str | ManualEntry]] = {
            "NAME": [f"trimtab {self.name} - {self.summary[:1].lower()}{self.summary[1:].rstrip('.')}"],
            "SYNOPSIS": list(self.usage),
            "DESCRIPTION": list(self.description),
            "OPTIONS": [*self.arguments, *self.options],
            "EXIT STATUS": [*([self.exits] if self.exits else []), *list_exit_codes()],
            "EXAMPLES": list(self.examples),
            "FILES": list(self.files),
            "ENVIRONMENT": list(self.variables),
            "SEE ALSO": [f"{see}, {more}" if see else more],
        }
        return [(title, parts) for title, parts in sections.items() if parts]


@cache
def read_manual_facts() -> dict[str, Any]:
    """Return the examples, files and variables of the commands."""
    return tomllib.loads(files("trimtab.cli").joinpath("manual.toml").read_text(encoding="utf-8"))


def build_manual(name: str) -> CommandManual:
    """Return the manual of a command; an unknown name raises an error with the nearest one."""
    if name not in COMMANDS:
        near = find_nearest(name, COMMANDS)
        raise UnknownName(
            f"trimtab help {name}",
            found="there is no such command",
            cure=f"Did you mean {near[0]}?" if near else "See `trimtab help` for all commands.",
        )
    command, facts = load_command(name), read_manual_facts()
    arguments, options = list_parameters(command)
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(command.help or "").split("\n\n")]
    text, exits = split_exit_codes(paragraphs[1:])
    words = api.all_words()
    seen = words[name].see if name in words else ()
    return CommandManual(
        name=name,
        summary=paragraphs[0],
        usage=write_usage(name, arguments),
        description=tuple(text) or (paragraphs[0],),
        arguments=arguments,
        options=options,
        exits=exits,
        examples=tuple(
            ManualEntry(entry["command"], entry["does"]) for entry in facts["example"] if entry["of"] == name
        ),
        files=tuple(
            ManualEntry(strip_marks(entry["name"]), entry["holds"])
            for entry in facts["file"]
            if name in entry["of"]
        ),
        variables=tuple(
            ManualEntry(entry["name"], strip_marks(entry["says"]))
            for entry in facts["variable"]
            if name in entry.get("of", COMMANDS)
        ),
        related=tuple(word for word in seen if word in COMMANDS),
    )


def strip_marks(text: str) -> str:
    """Return a text without the backquotes of Markdown."""
    return text.replace("`", "")


def write_usage(name: str, arguments: tuple[ManualEntry, ...]) -> tuple[str, ...]:
    """Return the ways in which a command is typed."""
    words = [entry.term for entry in arguments if not entry.term.startswith("--")]
    line = " ".join(["trimtab", name, *words])
    script = (f"trimtab {name} [OPTIONS] -- COMMAND...",) if name in SCRIPT_COMMANDS else ()
    return (f"{line} [OPTIONS]", *script)


def list_parameters(command: Any) -> tuple[tuple[ManualEntry, ...], tuple[ManualEntry, ...]]:
    """Return the arguments and the options of a command, each as it is typed and with its help."""
    arguments, options = [], []
    for param in command.params:
        if param.param_type_name == "argument":
            shown = param.metavar or param.name.upper()
            arguments.append(ManualEntry(shown.strip("{}"), " ".join((param.help or "").split())))
            continue
        value = param.metavar or KINDS.get(param.type.name, param.type.name.upper())
        kind = "" if param.is_flag else f" {value}"
        unset = param.default in (None, False, (), []) or param.is_flag
        default = "" if unset else f" Default: {param.default}."
        spelt = ", ".join(
            f"{flag}{kind if flag.startswith('--') else ''}" for flag in (*param.opts, *param.secondary_opts)
        )
        options.append(ManualEntry(spelt, " ".join(((param.help or "") + default).split())))
    return tuple(arguments), tuple(options)


def split_exit_codes(paragraphs: list[str]) -> tuple[list[str], str]:
    """Return the paragraphs without the sentence about exit codes, and that sentence.

    >>> split_exit_codes(["Needs a GPU. Exit code 3 when it runs out of memory."])
    (['Needs a GPU.'], 'Exit code 3 when it runs out of memory.')
    """
    texts, exits = [], ""
    for paragraph in paragraphs:
        text, mark, rest = paragraph.partition("Exit code ")
        exits = f"{mark}{rest}" if mark else exits
        texts += [text.strip()] if text.strip() else []
    return texts, exits


def list_exit_codes() -> list[ManualEntry]:
    """Return what the exit codes of all commands mean, from the glossary.

    >>> list_exit_codes()[0]
    ManualEntry(term='0', text='done')
    """
    text = api.explain("exit-codes").what.partition(": ")[2].rstrip(".")
    pairs = (re.fullmatch(r"([\d, and]*\d) (.+)", part) for part in text.split("; "))
    return [ManualEntry(match[1], match[2]) for match in pairs if match]


def render_manual(manual: CommandManual, width: int) -> str:
    """Return a manual as plain text, wrapped to a number of columns."""
    columns = max(40, min(width, WIDEST))
    lines: list[str] = []
    for title, parts in manual.sections():
        lines.append(title)
        for number, part in enumerate(parts):
            if isinstance(part, str):
                lines += [*([""] if number else []), *wrap_text(part, columns, INDENT)]
                continue
            text = wrap_text(part.text, columns, TEXT_INDENT)
            # Exit codes have their text beside them; other entries are apart.
            beside = part.term.isdecimal() and isinstance(parts[number - 1], ManualEntry)
            lines += [""] if number and not beside else []
            if part.term.isdecimal():
                lines += [f"{INDENT}{part.term:<7}{text[0].strip()}", *text[1:]]
            else:
                lines += [*wrap_text(part.term, columns, INDENT), *text]
        lines.append("")
    return "\n".join(lines)


def wrap_text(text: str, columns: int, indent: str) -> list[str]:
    """Return the lines of an indented text; a word is never broken."""
    return textwrap.wrap(
        text,
        columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def render_man_page(manual: CommandManual) -> str:
    """Return a manual as a page for `man`, in roff."""
    lines = [f'.TH "TRIMTAB\\-{escape_roff(manual.name.upper())}" "1" "" "trimtab {VERSION}" "trimtab"']
    for title, parts in manual.sections():
        lines.append(f'.SH "{title}"')
        for number, part in enumerate(parts):
            if isinstance(part, str):
                text = part.replace(f"trimtab {manual.name} -", f"trimtab-{manual.name} -", 1)
                lines += [*([".PP"] if number else []), escape_roff(text if title == "NAME" else part)]
            else:
                lines += [".TP", f"\\fB{escape_roff(part.term)}\\fR", escape_roff(part.text)]
    return "\n".join(lines) + "\n"


def escape_roff(text: str) -> str:
    r"""Return a text that roff prints as it is.

    >>> print(escape_roff(".x --on"))
    \&.x \-\-on
    """
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
