"""Find which options of a training command set batch size, precision and the like, and set them.

    knobs = find_knobs(command, read_sources(command))
    changed, notes = write_setting(command, knobs, setting)

What the usual names mean is data: knobs.toml. `select_knobs` reads --vary, for names that are not usual.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

from trimtab.errors import UnknownName, WrongUse, find_nearest
from trimtab.scripts.command_options import find_value, is_true, list_typed_options
from trimtab.scripts.config_options import ConfigStyle, find_style, list_unread_configs, read_config_options
from trimtab.scripts.script_options import (
    OptionForm,
    OptionValue,
    ScriptOption,
    find_assignments,
    find_families,
    is_divided_by_ranks,
    read_options,
)
from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trimtab.scripts.script_options import Sources
    from trimtab.spec.script import ScriptCommand

COUNTS = {
    "micro_batch": "samples of one process in one forward pass",
    "round_batch": "samples of all processes in one forward pass",
    "rank_batch": "samples of one process in an optimizer step",
    "global_batch": "samples of all processes in an optimizer step",
    "accumulation": "forward passes of one process in an optimizer step",
    "total_accumulation": "forward passes of all processes in an optimizer step",
    "processes": "processes on a node",
    "total_processes": "processes on all nodes",
    "nodes": "nodes",
}
"""Fields that are whole numbers, and what they count."""
WORDS = ("precision", "recompute", "compile")
"""Fields that are words of ours."""
VALUES = "values"
"""The field of an option that --vary gives values for, and whose meaning is not known."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16-true")
_OFF = ("none", "off", "no", "false", "disabled", "0")
_FULL = ("full", "on", "yes", "true", "enabled", "1", "all", "block")
SWITCHES = (OptionValue.SWITCH, OptionValue.PAIR, OptionValue.BOOLEAN, OptionValue.OPTIONAL_BOOLEAN)


class ScriptKnob(Noun, frozen=True, kw_only=True):
    """An option of a training command, and what it sets."""

    field: str
    """One of COUNTS or WORDS, or VALUES."""
    option: ScriptOption
    is_launcher: bool = False
    """Whether it is an option of torchrun or accelerate, before the script."""
    words: dict[str, str] = {}
    """What is written for each word of ours; `true` and `false` for switches."""
    current: str | None = None
    """Its value on the command line, else its default; None if unknown."""
    is_given: bool = False
    """Whether the command line has it."""
    leaves_others: bool = False
    """Whether it says nothing about words that it does not have: --tf32 with bf16."""
    meaning: str = ""
    """Why this meaning was assumed, if the name alone does not say."""
    values: tuple[str, ...] = ()
    """Values that --vary allows; empty: any."""
    unit: int = 1
    """What it counts for one sample: 1,024 for an option that counts tokens in sequences of 1,024."""

    @property
    def name(self) -> str:
        """The option as typed."""
        return self.option.name


class KnobSet(Noun, frozen=True, kw_only=True):
    """The knobs of a training command."""

    knobs: tuple[ScriptKnob, ...] = ()
    options: tuple[ScriptOption, ...] = ()
    """All options of the script that could be read."""
    world_size: int = 1
    nodes: int = 1
    varied: tuple[str, ...] | None = None
    """Names that --vary gives; None: every knob may change."""
    observed: dict[str, str] = {}
    """What a run of the script showed, for fields without a knob: accumulation 4."""
    in_source: dict[str, str] = {}
    """Fields without an option that the script's own text sets: 'batch_size = 64 in train.py:12'."""
    notes: tuple[str, ...] = ()
    """What was assumed, for the user to see."""

    def of(self, *fields: str) -> tuple[ScriptKnob, ...]:
        """Return the knobs of some fields."""
        return tuple(knob for knob in self.knobs if knob.field in fields)

    def may_vary(self, *fields: str) -> bool:
        """Return whether there is a knob of a field that the user lets change."""
        return any(self.varied is None or knob.name in self.varied for knob in self.of(*fields))

    @property
    def has_accumulation(self) -> bool:
        """Whether the command can set gradient accumulation."""
        if self.of("accumulation", "total_accumulation"):
            return True
        return bool(self.of("micro_batch", "round_batch") and self.of("global_batch", "rank_batch"))


class KnobRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A [[knob]] of knobs.toml."""

    field: str
    names: tuple[str, ...]
    words: dict[str, str] = {}
    spelling: str = ""


class KnobFamily(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A [[family]] of knobs.toml."""

    name: str
    title: str
    value: OptionValue
    is_typed: bool = True
    """Whether it is known by options on the command line too, if the script cannot be read."""
    options: dict[str, str]


class KnobTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of knobs.toml."""

    skip: tuple[str, ...]
    spellings: dict[str, dict[str, str]]
    knob: tuple[KnobRow, ...]
    family: tuple[KnobFamily, ...]
    style: tuple[ConfigStyle, ...]
    launcher: tuple[dict[str, str | tuple[str, ...]], ...]

    def find(self, name: str) -> KnobRow | None:
        """Return the row of a name as typed; None for names of evaluation and unknown ones."""
        dotted = name.lstrip("-").lower().replace("-", "_").split(".")
        parts = {part for piece in dotted for part in piece.split("_")}
        if parts & set(self.skip):
            return None
        last = re.sub(r"^(?:no|disable)_", "", dotted[-1])
        return next((row for row in self.knob if last in row.names), None)


@cache
def load_knob_table() -> KnobTable:
    """Load knobs.toml."""
    text = files("trimtab.scripts").joinpath("knobs.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), KnobTable)


def find_knobs(command: ScriptCommand, sources: Sources | None = None) -> KnobSet:
    """Return the knobs of a command: those on its command line, and those in the script's own text.

    `sources` are the texts of the script and of its local modules, the script first.
    """
    sources = sources or {}
    table = load_knob_table()
    options = list(read_options(sources, command.arguments))
    style = find_style(command, sources, table.style)
    families = find_families(sources)
    if style.family and not families & {"transformers", "trl"}:
        families |= {style.family}
    options += _family_options(families, command, options)
    options = read_config_options(command, sources, options, style)
    options += list_typed_options(command, options, lambda name: table.find(name) is not None)
    knobs: list[ScriptKnob] = []
    notes = list_unread_configs(command, sources)
    for option in options:
        row = _find_row(table, option)
        if row is None or (option.names[0] == "-b" and len(option.names) == 1 and row.field != "batch"):
            continue
        knob = _make_knob(option, row, command, sources, families)
        if knob is None and row.field in WORDS and option.where != "the command line":
            notes.append(
                f"{option.name}: its values are not known; to try some, give --vary {option.name}=A,B"
            )
        elif knob is not None:
            knobs.append(knob)
    knobs = _settle_batches(_choose_knobs(_settle_autocast(knobs)), sources, families)
    knobs += _launcher_knobs(command)
    notes += [f"{knob.name}: {knob.meaning}" for knob in knobs if knob.meaning]
    found = {knob.field for knob in knobs}
    return KnobSet(
        knobs=tuple(knobs),
        options=tuple(options),
        world_size=_count_processes(command, knobs),
        nodes=command.nodes,
        in_source=_find_in_source(found, sources, table),
        notes=tuple(notes),
    )


def _find_row(table: KnobTable, option: ScriptOption) -> KnobRow | None:
    """Return what an option sets; the sections around a key of a config file count too."""
    if option.file:
        dotted = option.name.rpartition(":")[2]
        row = table.find(dotted)
        sections = set(re.split(r"[._-]", dotted.lower())[:-1])
        is_weight_dtype = row is not None and row.field == "precision" and sections & _WEIGHT_SECTIONS
        return None if is_weight_dtype else row
    return table.find(option.variable) or next(filter(None, map(table.find, option.names)), None)


_WEIGHT_SECTIONS = {"model", "tokenizer", "quantization", "bnb", "generation", "encoder", "decoder"}
"""Sections of a config in which a dtype is that of weights, and not of the training."""


def _count_processes(command: ScriptCommand, knobs: list[ScriptKnob]) -> int:
    """Return the processes of a command; Lightning starts them itself, by --trainer.devices."""
    own = {knob.field: knob.current or "" for knob in knobs if not knob.is_launcher}
    if command.world_size == 1 and own.get("processes", "").isdigit():
        nodes = own.get("nodes", "1")
        return max(1, int(own["processes"])) * (int(nodes) if nodes.isdigit() else 1)
    return command.world_size


def _family_options(
    families: frozenset[str], command: ScriptCommand, options: Sequence[ScriptOption]
) -> list[ScriptOption]:
    """Return the options that frameworks add to the script's own."""
    known = {name for option in options for name in option.names}
    flags = [word[2:].partition("=")[0] for word in command.arguments if word.startswith("--")]
    typed = {flag.replace("-", "_") for flag in flags}
    added = []
    # A script that says its framework does not have the options of another one too.
    for family in sorted(load_knob_table().family, key=lambda family: family.name not in families):
        marks = {name for name in family.options if "per_device" in name or name.startswith("trainer.")}
        if family.name not in families and not (typed & marks and family.is_typed):
            continue
        for name, default in family.options.items():
            if f"--{name}" in known:
                continue
            known.add(f"--{name}")
            is_switch = default in ("True", "False", "None")
            value = OptionValue.INTEGER if default.isdigit() else OptionValue.TEXT
            if is_switch:
                # A switch without a default needs its value: --tf32 true.
                value = OptionValue.BOOLEAN if default == "None" else family.value
            dashed = f"--{name.replace('_', '-')}"
            added.append(
                ScriptOption(
                    names=(f"--{name}",) if dashed == f"--{name}" else (f"--{name}", dashed),
                    value=value,
                    default=None if default == "None" else default,
                    where=family.title,
                    variable=name,
                )
            )
    return added


def _make_knob(
    option: ScriptOption, row: KnobRow, command: ScriptCommand, sources: Sources, families: frozenset[str]
) -> ScriptKnob | None:
    """Return the knob of an option; None if it is not clear what to write."""
    if row.field in ("processes", "nodes") and "trainer." not in option.name and "lightning" not in families:
        return None
    if families & {"transformers", "trl"} and option.variable in ("dtype", "torch_dtype"):
        # It is the dtype of the weights that are loaded; --bf16 sets how they are trained.
        return None
    typed = find_value(command, option)
    current = option.default if typed is None else typed
    words: dict[str, str] = {}
    if row.field in WORDS:
        found = _find_words(option, row, current, sources)
        if found is None:
            return None
        option, words = found
        current = "true" if current is not None and is_true(current) else current
        if option.file and current == "auto":
            # The framework decides: a run shows what it takes.
            current = None
        if option.value in SWITCHES and current is not None:
            current = str(is_true(current)).lower()
    return ScriptKnob(
        field=row.field,
        option=option,
        words=words,
        leaves_others=option.value in SWITCHES,
        current=current,
        is_given=typed is not None,
    )


def _find_words(
    option: ScriptOption, row: KnobRow, current: str | None, sources: Sources
) -> tuple[ScriptOption, dict[str, str]] | None:
    """Return what an option writes for each word of ours, and the option with what kind of value it takes."""
    is_off = any(re.match(r"-*(?:no|disable)[-_]", name) for name in option.names)
    if option.value in SWITCHES and row.words:
        words = dict(row.words)
        if row.field == "precision" and words.get("bf16") == words.get("fp16") == "true":
            words = _autocast_words(words, sources)
        if is_off:
            words = {ours: "false" if text == "true" else "true" for ours, text in words.items()}
        return option, words
    if row.spelling:
        spelled = _choose_spelling(option, row.spelling, current)
        return None if spelled is None else (option, spelled)
    choices = {choice.lower(): choice for choice in option.choices}
    if row.field == "recompute" and choices:
        words = {
            ours: choices[text]
            for ours, texts in (("none", _OFF), ("full", _FULL), ("selective", ("selective", "op")))
            for text in texts
            if text in choices
        }
        return (option, words) if len(words) > 1 else None
    if option.default in ("0", "1", "true", "false", "True", "False") or (current or "").lower() in (
        *_OFF,
        *_FULL,
        *(("auto",) if option.file else ()),
    ):
        # It takes a number or a text that stands for a truth value.
        return option.replace(value=OptionValue.BOOLEAN), dict(row.words)
    return None


def _autocast_words(words: dict[str, str], sources: Sources) -> dict[str, str]:
    """Return the words of --amp with the dtype of autocast that the script's text names."""
    text = "\n".join(sources.values())
    if re.search(r"[\"'-](?:amp|autocast)[-_]dtype|[\"'-]dtype[\"']", text):
        return words
    other = "fp16" if "bfloat16" in text else "bf16"
    return {ours: value for ours, value in words.items() if ours != other}


def _choose_spelling(option: ScriptOption, usual: str, current: str | None) -> dict[str, str] | None:
    """Return the words for precisions that an option takes: by its choices, its value, or its name."""
    spellings = load_knob_table().spellings
    if option.choices:
        choices = {choice.lower(): choice for choice in option.choices}
        words = {
            ours: choices[text.lower()]
            for spelling in (spellings[usual], *spellings.values())
            for ours, text in spelling.items()
            if text.lower() in choices
        }
        return words if len(words) > 1 else None
    sample = current or option.default
    ordered = [spellings[usual], *spellings.values()]
    if sample is None:
        return dict(ordered[0])
    return next((dict(words) for words in ordered if sample in words.values()), None)


def _settle_autocast(knobs: list[ScriptKnob]) -> list[ScriptKnob]:
    """Let --amp-dtype say nothing where a switch such as --amp turns autocast off."""
    is_switched = any(
        knob.field == "precision" and knob.words.get("bf16") == knob.words.get("fp16") == "true"
        for knob in knobs
    )
    return [
        knob.replace(
            words={word: text for word, text in knob.words.items() if word != "fp32"}, leaves_others=True
        )
        if is_switched and knob.field == "precision" and knob.option.value not in SWITCHES
        else knob
        for knob in knobs
    ]


def _choose_knobs(knobs: list[ScriptKnob]) -> list[ScriptKnob]:
    """Return the knobs with one for each count: the one that is given, else a flag before a variable."""
    chosen: dict[str, ScriptKnob] = {}
    others: list[ScriptKnob] = []
    for knob in knobs:
        if knob.field in WORDS:
            others.append(knob)
            continue
        best = chosen.get(knob.field)
        if best is None or _knob_rank(knob) < _knob_rank(best):
            chosen[knob.field] = knob
    return [*chosen.values(), *others]


def _knob_rank(knob: ScriptKnob) -> tuple[bool, bool]:
    return (not knob.is_given, knob.option.form is OptionForm.VARIABLE)


_TOTAL = re.compile(
    r"\b(?:total|global|overall|effective|all (?:the )?(?:gpus|devices|ranks|processes|workers))\b"
)
_EACH = re.compile(
    r"\bper[- _]?(?:gpu|device|rank|process|worker)|\b(?:each|every|one|a single) (?:gpu|device|rank)"
)


def _settle_batches(knobs: list[ScriptKnob], sources: Sources, families: frozenset[str]) -> list[ScriptKnob]:
    """Decide what a plain `batch_size` counts, and an accumulation that the script divides."""
    fields = {knob.field for knob in knobs}
    settled = []
    for knob in knobs:
        if knob.field == "batch":
            field, why = _batch_meaning(knob, fields, sources, families)
            settled.append(knob.replace(field=field, meaning=why))
        elif knob.field == "global_batch" and not fields & {"micro_batch", "batch", "accumulation"}:
            settled.append(
                knob.replace(field="round_batch", meaning="taken as samples of all GPUs in one forward pass")
            )
        elif knob.field == "accumulation" and (at := is_divided_by_ranks(knob.option.variable, sources)):
            why = f"taken as forward passes of all processes: {at} divides it by their number"
            settled.append(knob.replace(field="total_accumulation", meaning=why))
        else:
            settled.append(knob)
    return settled


def _batch_meaning(
    knob: ScriptKnob, fields: set[str], sources: Sources, families: frozenset[str]
) -> tuple[str, str]:
    """Return the field of a plain `batch_size`, and why."""
    text = knob.option.help.lower()
    if "micro_batch" in fields:
        at = is_divided_by_ranks(knob.option.variable, sources)
        whole = "global" if at or "global_batch" not in fields else "rank"
        return f"{whole}_batch", (
            f"taken as {COUNTS[f'{whole}_batch']}, since the script has a micro-batch option too"
        )
    if match := _EACH.search(text):
        return "micro_batch", f"taken as samples of one process, by its help text ({match[0]!r})"
    if match := _TOTAL.search(text):
        return "round_batch", f"taken as samples of all processes, by its help text ({match[0]!r})"
    if at := is_divided_by_ranks(knob.option.variable, sources):
        return "round_batch", f"taken as samples of all processes: {at} divides it by their number"
    if "split batches" in families:
        return "round_batch", "taken as samples of all processes: the script sets split_batches=True"
    return "micro_batch", ""


def _launcher_knobs(command: ScriptCommand) -> list[ScriptKnob]:
    """Return the options of the launcher that a plan may set."""
    row = next((row for row in load_knob_table().launcher if row["name"] == command.launcher), {})
    knobs = []
    for field, names in row.items():
        if field == "name":
            continue
        count = field != "precision"
        option = ScriptOption(
            names=tuple(names),
            value=OptionValue.INTEGER if count else OptionValue.TEXT,
            where=f"{command.launcher}",
        )
        typed = find_value(command, option, launcher=True)
        defaults = {
            "processes": command.processes,
            "total_processes": command.world_size,
            "nodes": command.nodes,
        }
        if typed is None and not count:
            # Without the flag, accelerate's own config file decides.
            continue
        words = {} if count else dict(load_knob_table().spellings["accelerate"])
        current = str(defaults[field]) if count else typed
        knobs.append(
            ScriptKnob(
                field=field,
                option=option,
                is_launcher=True,
                words=words,
                current=current,
                is_given=typed is not None,
            )
        )
    return knobs


def _find_in_source(found: set[str], sources: Sources, table: KnobTable) -> dict[str, str]:
    """Return the fields without a knob that the script's own text sets to a constant."""
    if found & {"micro_batch", "round_batch", "rank_batch", "global_batch"}:
        found = found | {"batch", "micro_batch", "global_batch"}
    if "total_accumulation" in found:
        found = found | {"accumulation"}
    rows = {
        name: row for row in table.knob if row.field not in found and row.field in COUNTS | {"batch": ""}
        for name in row.names if name != "b"
    }  # fmt: skip
    assigned = find_assignments(frozenset(rows), sources)
    return {
        rows[name].field.replace("batch", "micro_batch") if rows[name].field == "batch" else rows[name].field:
        f"{text} in {where}"
        for name, (text, where) in assigned.items()
    }  # fmt: skip


def select_knobs(knobs: KnobSet, command: ScriptCommand, texts: Iterable[str]) -> KnobSet:
    """Return the knobs with what --vary allows: only the options that it names may change.

    Raises UnknownName for an option that the script does not have.
    """
    given = list(texts)
    if not given:
        return knobs
    chosen: dict[str, ScriptKnob] = {}
    notes: list[str] = []
    for text in given:
        name, equals, listed = text.partition("=")
        values = tuple(value for value in listed.split(",") if value) if equals else ()
        if equals and not values:
            raise WrongUse(
                f"--vary {text}", found="no value follows the =", cure=f"Write it like --vary {name}=8,16."
            )
        knob = _find_named(knobs, command, name, values)
        if knob.name in chosen:
            raise WrongUse(
                f"--vary {text}", found=f"{name} is given twice", cure="Give it once, with all values."
            )
        if knob.meaning and knob not in knobs.knobs:
            notes.append(f"{knob.name}: {knob.meaning}")
        _check_values(knob, values, text)
        chosen[knob.name] = knob.replace(values=values)
    kept = [chosen.pop(knob.name) if knob.name in chosen else knob for knob in knobs.knobs]
    new = list(chosen.values())
    taken = {knob.field for knob in new if knob.field in COUNTS}
    kept = [knob for knob in kept if knob.field not in taken]
    varied = tuple(knob.name for knob in (*kept, *new) if any(_matches(knob, text) for text in given))
    return knobs.replace(knobs=(*kept, *new), varied=varied, notes=(*knobs.notes, *notes))


def _matches(knob: ScriptKnob, text: str) -> bool:
    return is_named(knob.option, text.partition("=")[0])


def is_named(option: ScriptOption, name: str) -> bool:
    """Return whether a name that --vary gives is that of an option: --flag, a key, or FILE:key."""
    if name in option.names or name == option.variable:
        return True
    dotted = ".".join(map(str, option.key))
    return bool(option.file) and name in (dotted, f"{option.file}:{dotted}")


def _find_named(knobs: KnobSet, command: ScriptCommand, name: str, values: tuple[str, ...]) -> ScriptKnob:
    """Return the knob that --vary names; a new one for an option whose meaning is not known."""
    for knob in knobs.knobs:
        if is_named(knob.option, name):
            return knob
    options = [option for option in knobs.options if is_named(option, name)]
    exact = [option for option in options if name != option.variable or name in option.names]
    if len(options) > 1 and not exact and all(option.file for option in options):
        raise WrongUse(
            f"--vary {name}",
            found=f"{len(options)} keys have this name: "
            + ", ".join(f"{option.file}:{'.'.join(map(str, option.key))}" for option in options[:4]),
            cure="Give the whole key.",
        )
    option = next(iter(exact or options), None)
    option = option or next(iter(list_typed_options(command, (), lambda typed: typed == name)), None)
    if option is None:
        names = [known for option in knobs.options for known in option.names]
        names += [".".join(map(str, option.key)) for option in knobs.options if option.file]
        if names or not name:
            close = find_nearest(name, names, count=3)
            nearest = f"; the nearest are {', '.join(close)}" if close else ""
            raise UnknownName(
                f"--vary {name}",
                found=f"the script has no such option{nearest}",
                cure="Name an option or an environment variable that the script reads.",
            )
        form = OptionForm.FLAG if name.startswith("-") else OptionForm.VARIABLE
        option = ScriptOption(names=(name,), form=form)
    typed = find_value(command, option)
    current = option.default if typed is None else typed
    knob = ScriptKnob(field=VALUES, option=option, current=current, is_given=typed is not None)
    if values:
        return knob
    is_number = option.value is OptionValue.INTEGER or (current or "").isdigit()
    if is_number and not knobs.of("micro_batch", "round_batch", "rank_batch"):
        return knob.replace(
            field="micro_batch", meaning="taken as samples of one process in one forward pass"
        )
    if option.value in SWITCHES:
        return knob.replace(values=("false", "true"))
    raise WrongUse(
        f"--vary {name}",
        found="it is not known what it sets",
        cure=f"Give the values to try: --vary {name}=A,B.",
    )


def _check_values(knob: ScriptKnob, values: tuple[str, ...], text: str) -> None:
    """Raise if --vary gives values that the option does not take."""
    for value in values:
        if knob.field in COUNTS and (not value.isdigit() or int(value) < 1):
            raise WrongUse(
                f"--vary {text}",
                found=f"{value} is no whole number from 1, and {knob.name} sets {COUNTS[knob.field]}",
                cure=f"Write it like --vary {knob.name}=8,16.",
            )
        if knob.option.choices and value not in knob.option.choices:
            raise WrongUse(
                f"--vary {text}",
                found=f"{value} is none of {', '.join(knob.option.choices)}",
                cure="Give values that the script takes.",
            )
        if knob.field in WORDS and find_word(knob, value) is None:
            raise WrongUse(
                f"--vary {text}",
                found=f"{knob.name} does not take {value}",
                cure=f"Give some of {', '.join(dict.fromkeys(knob.words.values()))}.",
            )


def find_word(knob: ScriptKnob, value: str) -> str | None:
    """Return our word for a value of a knob; None if there is none."""
    if knob.option.value in SWITCHES:
        value = str(is_true(value)).lower() if value.lower() in (*_OFF, *_FULL) else value
    return next((ours for ours, text in knob.words.items() if text == value), None)
