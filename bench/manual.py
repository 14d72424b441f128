"""Write docs/reference.md, docs/glossary.md and docs/schemas/ from the program itself.

    python bench/manual.py
    python bench/manual.py --man site/man/man1    # pages for man, as `make docs` writes them

Tests compare the files with the output of this program, so every option, function, word and key is in them.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trimtab
from trimtab import api, spec
from trimtab.api.schemas import OUTPUTS
from trimtab.cli.main import COMMANDS, load_command
from trimtab.cli.manual import build_manual, read_manual_facts, render_man_page
from trimtab.spec import Noun, requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trimtab.catalog.glossary import Word

DOCS = Path(__file__).parent.parent / "docs"
MADE = "<!-- made by `python bench/manual.py`: change the program, not this page -->"

OPENING = """\
Everything that you can type, call, read or set. The [how-tos](howto.md) and the page of each command tell you
when to use it; the [glossary](glossary.md) explains the words."""
OUTPUT = """\
You can call each command as a function of `trimtab` too. You get the answer on stdout and everything else on
stderr. With `--json`, stdout is one JSON object, also in case of an error. There, sizes are bytes, times are
seconds, and unknown is null. Each command has a JSON schema of its output, which `trimtab help NAME --schema`
prints and `trimtab.schema(NAME)` returns. Later versions may add keys, but do not rename or remove them."""
REQUESTS = """\
These are the options of the commands as values, in `trimtab.spec.requests`. You can call
`trimtab.plan(request)` in place of `trimtab.plan(job, ...)`. You store a request with `to_json()`, read it
with `from_json()`, and get its JSON schema with `schema()`."""
VALUES = """\
These are the frozen value types of `trimtab.spec`. You find them in the output of `--json`, and in plans,
logs and summaries. You convert them with `to_json()` and `from_json()`."""
WORDS = """\
For each word you find what it is, what it costs, and when to change it. `trimtab explain WORD` prints the
same entry, and accepts other spellings (`trimtab explain oom`). It also explains the commands of the
[reference](reference.md#commands), the [errors](errors.md), and the findings of [doctor](doctor.md#kinds)."""


def cell(text: str) -> str:
    """Text as it can stand in a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    first = list(headings)
    lines = [first, ["---"] * len(first), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def commands() -> dict[str, Any]:
    """Every command of the program, in the order of its help."""
    return {name: load_command(name) for name in COMMANDS}


def command_text(name: str, command: Any) -> str:
    """One command: what it does, its arguments and options, and examples."""
    manual = build_manual(name)
    rows = [(f"`{entry.term}`", cell(entry.text)) for entry in manual.arguments]
    rows += [
        (", ".join(f"`{flag}`" for flag in entry.term.split(", ")), cell(entry.text))
        for entry in manual.options
    ]
    parts = [
        f"### trimtab {name}",
        ", or ".join(f"`{line}`" for line in manual.usage),
        cell_paragraphs(command.help or ""),
    ]
    if rows:
        parts.append(table(("", ""), rows))
    lines = [f"{entry.term}\n    # {entry.text.replace('`', '')}" for entry in manual.examples]
    parts.append("\n".join(["```", *lines, "```"]))
    if name in OUTPUTS:
        parts.append(f"JSON schema: [{name}.json](schemas/{name}.json)")
    return "\n\n".join(parts)


def cell_paragraphs(text: str) -> str:
    """Help as paragraphs of one line each."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def signature(value: Any) -> str:
    """Names of the arguments with their defaults, without types."""
    shown: list[str] = []
    bare = False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.name == "self":
            continue
        if (
            parameter.kind is parameter.KEYWORD_ONLY
            and not bare
            and not any(part.startswith("*") for part in shown)
        ):
            shown.append("*")
            bare = True
        star = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        shown.append(
            star
            + parameter.name
            + ("" if parameter.default is parameter.empty else f"={default_text(parameter.default)}")
        )
    return f"({', '.join(shown)})"


def default_text(value: Any) -> str:
    """A default as it would be typed."""
    if callable(value):
        return "..."
    return repr(value.value) if isinstance(value, Enum) else repr(value)


def first_line(value: Any) -> str:
    """What a docstring begins with."""
    return cell((inspect.getdoc(value) or "").split("\n\n")[0])


def functions() -> str:
    """The functions of the package, with what they take."""
    rows = []
    for name in dir(trimtab):
        value = getattr(trimtab, name)
        if inspect.isfunction(value):
            rows.append((f"`trimtab.{name}{cell(signature(value))}`", first_line(value)))
    return table(("function", "does"), rows)


def classes() -> str:
    """The classes of the package, and what Run and Job have."""
    rows = []
    for name in sorted(trimtab.__all__):
        value = getattr(trimtab, name)
        if not inspect.isclass(value):
            continue
        rows.append((f"`trimtab.{name}`", first_line(value)))
        if name not in ("Run", "Job"):
            continue
        for part, made in vars(value).items():
            if part.startswith("_") or not (inspect.isfunction(made) or isinstance(made, property)):
                continue
            shown = signature(made) if inspect.isfunction(made) else ""
            rows.append((f"`{name}.{part}{cell(shown)}`", first_line(made)))
    return table(("class", "is"), rows)


def nouns() -> str:
    """What JSON has for each noun: its fields, and what follows from them."""
    rows = []
    for name in sorted(spec.__all__):
        value = getattr(spec, name)
        if inspect.isclass(value) and issubclass(value, Noun) and value is not Noun:
            fields = [
                *value.__struct_fields__,
                *(one for one in value.derived if one not in value.__struct_fields__),
            ]
            rows.append((f"`{name}`", first_line(value), ", ".join(f"`{field}`" for field in fields)))
        elif inspect.isclass(value) and issubclass(value, Enum):
            rows.append(
                (f"`{name}`", first_line(value), "one of " + ", ".join(f"`{one.value}`" for one in value))
            )
    return table(("type", "is", "fields"), rows)


def request_rows() -> str:
    """What each request has: the arguments of its function, and the keys of its JSON."""
    rows = []
    for name, value in sorted(vars(requests).items()):
        if name.endswith("Request") and name != "CommandRequest":
            fields = ", ".join(f"`{field}`" for field in requests.list_options(value))
            rows.append((f"`{name}`", first_line(value), fields))
    return table(("request", "is", "has"), rows)


def reference() -> str:
    """The page docs/reference.md."""
    listed = commands()
    contents = [
        ("[Commands](#commands)", ", ".join(f"[{name}](#trimtab-{name})" for name in listed)),
        ("[Python](#python)", "functions, classes, value types and the keys of their JSON"),
        ("[Exit codes](#exit-codes), errors", "and [errors](errors.md)"),
        ("[Targets](#targets)", "config formats that plans are written into"),
        ("[Files](#files), [variables](#variables)", "what trimtab reads and writes"),
    ]
    codes = api.explain("exit-codes")
    from trimtab.configs.targets import builtin_targets

    facts = read_manual_facts()
    file_rows = [(file["name"], file["holds"], file["more"]) for file in facts["file"]]
    targets = [
        (f"`{builtin_target.name}`", cell(builtin_target.title)) for builtin_target in builtin_targets()
    ]
    parts = [
        "# Reference",
        MADE,
        OPENING,
        table(("", ""), contents),
        "## Commands",
        OUTPUT,
        *(command_text(name, command) for name, command in listed.items()),
        "## Python",
        "`import trimtab` is fast: names are loaded when you first use them.",
        functions(),
        classes(),
        "### Requests",
        REQUESTS,
        request_rows(),
        "### Values",
        VALUES,
        nouns(),
        "## Exit codes",
        f"{codes.what} {' '.join(codes.use)} The classes are in [errors](errors.md).",
        "## Targets",
        table(("target", "is"), targets),
        "Keys and rules of each: [configs](configs.md).",
        "## Files",
        table(("file", "holds", "more"), file_rows),
        "## Variables",
        table(
            ("variable", "says"),
            [
                (", ".join(f"`{word}`" for word in entry["name"].split(", ")), cell(entry["says"]))
                for entry in facts["variable"]
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


TITLES = {
    "knob": "Knobs",
    "precision": "Precisions",
    "recompute": "Recomputing",
    "strategy": "Strategies",
    "term": "Terms",
    "hardware": "Hardware",
}
"""Sections of the glossary. Commands and errors are on other pages."""


def anchor(name: str) -> str:
    """The name of a heading in a link, as Markdown viewers make it.

    >>> anchor("bf16-true"), anchor("WrongUse")
    ('bf16-true', 'wronguse')
    """
    return re.sub(r"[^\w-]", "", name.lower().replace(" ", "-"))


def link(word: Word) -> str:
    """Return a link to where a word is explained."""
    places = {"verb": f"reference.md#trimtab-{word.name}", "error": "errors.md"}
    return f"[{word.name}]({places.get(word.kind, f'#{anchor(word.name)}')})"


def word_text(word: Word, known: dict[str, Word]) -> str:
    """Return one entry."""
    lines = [f"### {word.name}", word.what]
    lines += [f"*{label}:* {text}" for label, text in (("Cost", word.cost), ("When", word.change)) if text]
    if word.use:
        lines.append(" ".join(word.use))
    if word.see:
        lines.append("*See* " + ", ".join(link(known[name]) for name in word.see if name in known))
    return "\n\n".join(lines)


def glossary() -> str:
    """The page docs/glossary.md."""
    known = {name: word for name, word in api.all_words().items() if word.kind != "fault"}
    parts = [
        "# Glossary",
        MADE,
        WORDS,
    ]
    for kind, title in TITLES.items():
        chosen = sorted((one for one in known.values() if one.kind == kind), key=lambda one: one.name.lower())
        parts += [f"## {title}", ", ".join(link(word) for word in chosen)]
        parts += [word_text(one, known) for one in chosen]
    return "\n\n".join(parts) + "\n"


def schema_text(verb: str) -> str:
    """The file docs/schemas/VERB.json."""
    return json.dumps(trimtab.schema(verb), indent=2) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "reference.md": reference,
    "glossary.md": glossary,
    **{f"schemas/{verb}.json": partial(schema_text, verb) for verb in OUTPUTS},
}


def write_man_pages(folder: Path) -> None:
    """Write a page for `man` of each command."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COMMANDS:
        (folder / f"trimtab-{name}.1").write_text(render_man_page(build_manual(name)), encoding="utf-8")


def main() -> None:
    """Write the pages, or with --man DIR the pages for `man`."""
    if sys.argv[1:2] == ["--man"]:
        write_man_pages(Path(sys.argv[2]))
        return
    (DOCS / "schemas").mkdir(exist_ok=True)
    for name, made in PAGES.items():
        (DOCS / name).write_text(made(), encoding="utf-8")
        print(DOCS / name)


if __name__ == "__main__":
    main()
