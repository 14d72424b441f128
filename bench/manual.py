"""Writes docs/reference.md and docs/glossary.md from the program itself.

    python bench/manual.py

Tests compare both pages with what this makes, so that no option, function or word goes without them.
"""

from __future__ import annotations

import inspect
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trimtab
from trimtab import api, spec
from trimtab.spec import Noun

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trimtab.catalog.words import Word

DOCS = Path(__file__).parent.parent / "docs"
MADE = "<!-- made by `python bench/manual.py`: change the program, not this page -->"

OPENING = """\
Everything that can be typed, called, read or set. What it is for is in the [how-tos](howto.md) and in the
page of each verb; words are in the [glossary](glossary.md)."""
OUTPUT = """\
Each command is a function of `trimtab` too. stdout has the answer, stderr everything else; with `--json`,
stdout is one JSON object, also when the answer is an error. Sizes are bytes and times seconds there;
unknown is null."""
VALUES = """\
Frozen values in `trimtab.spec`, JSON both ways by `to_json()` and `from_json()`: what `--json` prints,
and what plans, logs and summaries hold."""
WORDS = """\
The entries of `trimtab explain WORD`, which also knows other spellings of them (`trimtab explain oom`),
and the kinds of findings that are listed in [doctor](doctor.md#kinds)."""
KINDS = {
    "int": "N",
    "integer": "N",
    "float": "NUMBER",
    "float range": "NUMBER",
    "str": "TEXT",
    "text": "TEXT",
}
"""What versions of typer call a value, and what stands for it here."""
FULL = {"train": api.prepare_training, "launch": api.prepare_launch}
"""Functions that hand on what they are asked, and to whom."""

VARIABLES = (
    ("TRIMTAB_CACHE", "where traces and tokens are kept; default: `trimtab` in the user's cache folder"),
    (
        "TRIMTAB_CALIBRATIONS",
        "where `trimtab calibrate` keeps what it measured; default: the user's data folder",
    ),
    ("TRIMTAB_HOST_GIB", "host memory that tracing a job may take; 3 unless set"),
    ("TRIMTAB_PROGRESS", "0: no lines or status about progress on stderr"),
    ("TRIMTAB_PARENT", "set by trimtab for processes that end when it ends"),
    (
        "TRIMTAB_CONTROL, TRIMTAB_CONTROL_SINCE, TRIMTAB_CONTROL_OWN, TRIMTAB_LEADER",
        "set by trimtab for its ranks",
    ),
    ("TRIMTAB_PLAN", "set in the pods of `trimtab launch --kubeflow`: the plan itself"),
    ("CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER", "which GPUs there are, by CUDA's own rules"),
    (
        "PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF",
        "set from a plan's allocator where it is not set; checked by doctor",
    ),
    (
        "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        "a launcher's, or set by hand, all of them",
    ),
    (
        "SLURM_*, PET_*, KUBERNETES_SERVICE_HOST, TORCHELASTIC_RUN_ID",
        "which scheduler and launcher the process is under",
    ),
    ("OMP_NUM_THREADS", "kept where it is set; else the cores that a process may use"),
    ("COLUMNS, NO_COLOR, FORCE_COLOR", "width and colours of the output"),
)
FILES = (
    (
        "plan.json (`plan --out`)",
        "a plan; read by `apply`, `launch`, `train`, `report`, `trimtab.read_plan`",
        "[planning](planning.md#plans-are-files)",
    ),
    (
        "`runs/JOB/` (`train --out`)",
        "a run: plan, log, events, checkpoints, summary, logs of the ranks",
        "[training](training.md#the-run-folder)",
    ),
    (
        "`launch.sbatch`, `launch-plan.json`, `launch.json`",
        "in the run's folder: what was submitted, its plan, the job's number",
        "[launching](launching.md)",
    ),
    (
        "`trimtab.toml`",
        "`[launch]`: what a site always wants; `[[target]]`: further config formats",
        "[site](launching.md#what-a-site-always-wants), [target](configs.md#teaching-it-another-config)",
    ),
    (
        "`.trimtab/backups/N/`",
        "beside a config that `apply` wrote: what it was before",
        "[configs](configs.md#backups)",
    ),
    ("a file from `detect --json`", "a machine, for `--on` elsewhere", "[detect](detect.md)"),
    (
        "a file from `detect --record`",
        "every question to a machine and its answer, for a report",
        "[detect](detect.md)",
    ),
    ("faults.json (`train --faults`)", "a drill", "[training](training.md#drills)"),
    (
        "cases.jsonl (`profile --keep`, `exam --cases`)",
        "measurements to sit the exam with",
        "[memory](memory.md)",
    ),
)


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
    import typer

    from trimtab.cli.commands import app

    found: Any = typer.main.get_command(app)
    return dict(found.commands)


def command_text(name: str, command: Any) -> str:
    """One command: what it does, and its arguments and options."""
    words, options = [], []
    for one in command.params:
        shown = one.metavar or one.name.upper()
        if one.param_type_name == "argument":
            words.append((f"`{shown.strip('{}')}`", cell(one.help or "")))
            continue
        kind = "" if one.is_flag else f" {one.metavar or KINDS.get(one.type.name, one.type.name.upper())}"
        default = "" if one.default in (None, False, (), []) or one.is_flag else f" Default: {one.default}."
        spelt = ", ".join(
            f"`{flag}{kind if flag.startswith('--') else ''}`" for flag in (*one.opts, *one.secondary_opts)
        )
        options.append((spelt, cell((one.help or "") + default)))
    usage = " ".join(["trimtab", name, *(word.strip("`") for word, _ in words)])
    parts = [f"### trimtab {name}", f"`{usage} [OPTIONS]`", cell_paragraphs(command.help or "")]
    if words or options:
        parts.append(table(("", ""), [*words, *options]))
    return "\n\n".join(parts)


def cell_paragraphs(text: str) -> str:
    """Help as paragraphs of one line each."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def signature(value: Any) -> str:
    """Names of the arguments with their defaults, without types."""
    shown: list[str] = []
    bare = False
    for one in inspect.signature(value).parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not bare and not any(part.startswith("*") for part in shown):
            shown.append("*")
            bare = True
        star = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(one.kind.name, "")
        shown.append(star + one.name + ("" if one.default is one.empty else f"={default_text(one.default)}"))
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
    for name in sorted(trimtab.__all__):
        value = getattr(trimtab, name)
        if inspect.isfunction(value):
            taken = signature(value)
            if name in FULL:
                first, rest = taken.rpartition("**")[0], signature(FULL[name]).partition("*, ")[2]
                taken = f"{first.removesuffix('*, ')}{'' if '*, ' in first else '*, '}{rest}"
            rows.append((f"`trimtab.{name}{cell(taken)}`", first_line(value)))
    return table(("function", "gives"), rows)


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
            rows.append((f"`{name}`", first_line(value), ", ".join(f"`{one}`" for one in fields)))
        elif inspect.isclass(value) and issubclass(value, Enum):
            rows.append(
                (f"`{name}`", first_line(value), "one of " + ", ".join(f"`{one.value}`" for one in value))
            )
    return table(("noun", "is", "has"), rows)


def reference() -> str:
    """The page docs/reference.md."""
    listed = commands()
    contents = [
        ("[Commands](#commands)", ", ".join(f"[{name}](#trimtab-{name})" for name in listed)),
        ("[Python](#python)", "functions, classes, nouns and the keys of their JSON"),
        ("[Exit codes](#exit-codes), errors", "and [errors](errors.md)"),
        ("[Targets](#targets)", "config formats that plans are written into"),
        ("[Files](#files), [variables](#variables)", "what is read and written"),
    ]
    codes = api.explain("exit-codes")
    from trimtab.configs.targets import builtin_targets

    targets = [(f"`{one.name}`", cell(one.title)) for one in builtin_targets()]
    parts = [
        "# Reference",
        MADE,
        OPENING,
        table(("", ""), contents),
        "## Commands",
        OUTPUT,
        *(command_text(name, command) for name, command in listed.items()),
        "## Python",
        "`import trimtab` costs nothing: names are loaded when they are first used.",
        functions(),
        classes(),
        "### Nouns",
        VALUES,
        nouns(),
        "## Exit codes",
        f"{codes.what} {' '.join(codes.use)} The classes are in [errors](errors.md).",
        "## Targets",
        table(("target", "is"), targets),
        "Keys and rules of each: [configs](configs.md).",
        "## Files",
        table(("file", "holds", "more"), FILES),
        "## Variables",
        table(
            ("variable", "says"),
            [(", ".join(f"`{one}`" for one in names.split(", ")), cell(what)) for names, what in VARIABLES],
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
    "verb": "Verbs",
    "error": "Errors",
}


def anchor(name: str) -> str:
    """The name of a heading in a link, as Markdown viewers make it.

    >>> anchor("bf16-true"), anchor("WrongUse")
    ('bf16-true', 'wronguse')
    """
    return re.sub(r"[^\w-]", "", name.lower().replace(" ", "-"))


def word_text(word: Word, known: dict[str, Word]) -> str:
    """One entry."""
    lines = [f"### {word.name}", word.what]
    lines += [f"*{label}:* {text}" for label, text in (("Cost", word.cost), ("When", word.change)) if text]
    if word.use:
        lines.append(" ".join(word.use))
    if word.see:
        lines.append("*See* " + ", ".join(f"[{one}](#{anchor(one)})" for one in word.see if one in known))
    return "\n\n".join(lines)


def glossary() -> str:
    """The page docs/glossary.md."""
    known = {name: one for name, one in api.all_words().items() if one.kind != "fault"}
    parts = [
        "# Glossary",
        MADE,
        WORDS,
    ]
    for kind, title in TITLES.items():
        chosen = sorted((one for one in known.values() if one.kind == kind), key=lambda one: one.name.lower())
        parts += [f"## {title}", ", ".join(f"[{one.name}](#{anchor(one.name)})" for one in chosen)]
        parts += [word_text(one, known) for one in chosen]
    return "\n\n".join(parts) + "\n"


PAGES = {"reference.md": reference, "glossary.md": glossary}


def main() -> None:
    """Write the pages."""
    for name, made in PAGES.items():
        (DOCS / name).write_text(made(), encoding="utf-8")
        print(DOCS / name)


if __name__ == "__main__":
    main()
