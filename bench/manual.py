"""Write docs/reference.md and docs/glossary.md from the program itself.

    python bench/manual.py

Tests compare both pages with the output of this program, so every option, function and word is in them.
"""

from __future__ import annotations

import inspect
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trimtab
from trimtab import api, spec
from trimtab.spec import Noun, requests

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trimtab.catalog.glossary import Word

DOCS = Path(__file__).parent.parent / "docs"
MADE = "<!-- made by `python bench/manual.py`: change the program, not this page -->"

OPENING = """\
Everything that you can type, call, read or set. The [how-tos](howto.md) and the page of each command tell you
when to use it; the [glossary](glossary.md) explains the words."""
OUTPUT = """\
You can call each command as a function of `trimtab` too. You get the answer on stdout and everything else on
stderr. With `--json`, stdout is one JSON object, also in case of an error. There, sizes are bytes, times are
seconds, and unknown is null."""
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
KINDS = {
    "int": "N",
    "integer": "N",
    "float": "NUMBER",
    "float range": "NUMBER",
    "str": "TEXT",
    "text": "TEXT",
}
"""Names of value types in the versions of typer, and the placeholder for each."""

VARIABLES = (
    ("TRIMTAB_CACHE", "folder for cached traces and tokens; default: `trimtab` in your cache folder"),
    (
        "TRIMTAB_SHARE_GPU",
        "1: several processes of `trimtab train` share a GPU through gloo, for a rehearsal",
    ),
    (
        "TRIMTAB_CALIBRATIONS",
        "folder for the measurements of `trimtab calibrate`; default: your data folder",
    ),
    ("TRIMTAB_SANDBOX", "set by trimtab while it follows a script: the folder that takes what it writes"),
    ("TRIMTAB_HOST_GIB", "host memory that tracing a job may use, in GiB; default 3"),
    ("TRIMTAB_PROGRESS", "0 turns progress messages on stderr off"),
    ("TRIMTAB_PARENT", "set by trimtab for child processes, which end when it ends"),
    (
        "TRIMTAB_CONTROL, TRIMTAB_CONTROL_SINCE, TRIMTAB_CONTROL_OWN, TRIMTAB_LEADER",
        "set by trimtab for its ranks",
    ),
    ("TRIMTAB_PLAN", "set in the pods of `trimtab launch --kubeflow`: the plan itself"),
    ("CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER", "visible GPUs and their order, as in CUDA"),
    (
        "PYTORCH_ALLOC_CONF, PYTORCH_CUDA_ALLOC_CONF",
        "set from a plan's allocator if you have not set it; checked by doctor",
    ),
    (
        "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT",
        "set by a launcher, or all of them by you",
    ),
    (
        "SLURM_*, PET_*, KUBERNETES_SERVICE_HOST, TORCHELASTIC_RUN_ID",
        "how trimtab recognises the scheduler and launcher",
    ),
    ("OMP_NUM_THREADS", "used if you set it; default: the cores that a process may use"),
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
        "in the run folder: the submitted script, its plan, the job's number",
        "[launching](launching.md)",
    ),
    (
        "`trimtab.toml`",
        "`[launch]`: defaults of your site; `[[target]]`: further config formats",
        "[site](launching.md#what-a-site-always-wants), [target](configs.md#teaching-it-another-config)",
    ),
    (
        "`.trimtab/backups/N/`",
        "next to a config that `apply` changed: earlier versions",
        "[configs](configs.md#backups)",
    ),
    ("a file from `detect --json`", "a machine, for `--on` elsewhere", "[detect](detect.md)"),
    (
        "a file from `detect --record`",
        "every query to a machine and its answer, for a bug report",
        "[detect](detect.md)",
    ),
    ("faults.json (`train --faults`)", "faults to inject", "[training](training.md#drills)"),
    (
        "cases.jsonl (`profile --keep`, `exam --cases`)",
        "measurements for the exam",
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
    from trimtab.cli.main import COMMANDS, load_command

    return {name: load_command(name) for name in COMMANDS}


def command_text(name: str, command: Any) -> str:
    """One command: what it does, and its arguments and options."""
    words, options = [], []
    for param in command.params:
        shown = param.metavar or param.name.upper()
        if param.param_type_name == "argument":
            words.append((f"`{shown.strip('{}')}`", cell(param.help or "")))
            continue
        kind = (
            ""
            if param.is_flag
            else f" {param.metavar or KINDS.get(param.type.name, param.type.name.upper())}"
        )
        default = (
            "" if param.default in (None, False, (), []) or param.is_flag else f" Default: {param.default}."
        )
        spelt = ", ".join(
            f"`{flag}{kind if flag.startswith('--') else ''}`"
            for flag in (*param.opts, *param.secondary_opts)
        )
        options.append((spelt, cell((param.help or "") + default)))
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
        table(("file", "holds", "more"), FILES),
        "## Variables",
        table(
            ("variable", "says"),
            [(", ".join(f"`{word}`" for word in names.split(", ")), cell(what)) for names, what in VARIABLES],
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


PAGES = {"reference.md": reference, "glossary.md": glossary}


def main() -> None:
    """Write the pages."""
    for name, made in PAGES.items():
        (DOCS / name).write_text(made(), encoding="utf-8")
        print(DOCS / name)


if __name__ == "__main__":
    main()
