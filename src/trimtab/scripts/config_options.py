"""Read the options that a training command sets in a config file which it names: YAML, JSON or TOML.

Each style of command line has its own way to override a key of the file: `--key value` for TrlParser,
`--section.key value` for LightningCLI, `section.key=value` for OmegaConf. Where there is none, a plan changes
a copy of the file, which only the followed script sees.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import msgspec

from trimtab.configs.formats import read_config
from trimtab.errors import TrimtabError
from trimtab.scripts.script_options import OptionForm, OptionValue, ScriptOption

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from trimtab.scripts.script_options import Sources
    from trimtab.spec.script import ScriptCommand

CONFIG_SUFFIXES = (".yaml", ".yml", ".json", ".toml")
MOST_BYTES = 200_000
"""A larger file is data."""
_CONFIG_FLAG = re.compile(r"conf|cfg|args|params|hparam|recipe|yaml|settings|^c$|^f$", re.IGNORECASE)
_OTHER_FLAG = re.compile(
    r"deepspeed|^ds_|model|token|data|train_file|eval|valid|test_|lora|peft|fsdp|accelerate|vocab|output|log",
    re.IGNORECASE,
)
"""Flags whose file is something else than the options of the training."""
_FILE_WINS = re.compile(r"set_defaults\(\s*\*\*|configargparse|ConfigArgParser|jsonargparse")
"""Marks of parsers that take a file's values as defaults, so that flags override them."""


class ConfigStyle(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A [[style]] of knobs.toml: how a command line overrides its config file."""

    name: str
    form: OptionForm
    programs: tuple[str, ...] = ()
    """Installed programs, or modules."""
    marks: str = ""
    """A pattern in the script's own text."""
    family: str = ""
    """The options that it takes beside those in the file."""


PLAIN = ConfigStyle(name="config", form=OptionForm.CONFIG)


def list_named_configs(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command that name its config files, in their order.

    >>> list_named_configs(["fit", "--config", "a.yaml", "--train_file=d.json", "b.yml", "--model", "m.json"])
    ['a.yaml', 'b.yml']
    """
    files = []
    for number, word in enumerate(arguments):
        flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        if not equals and not word.startswith("-") and number and arguments[number - 1].startswith("-"):
            previous = arguments[number - 1]
            flag = "" if "=" in previous else previous
        if not value.endswith(CONFIG_SUFFIXES) or (word.startswith("-") and not equals):
            continue
        name = flag.lstrip("-").replace("-", "_")
        if not name or (_CONFIG_FLAG.search(name) and not _OTHER_FLAG.search(name)):
            files.append(value)
    return files


def list_default_configs(text: str) -> list[str]:
    """Return the config files that a script's text names: the default of --config, or a constant file.

    >>> list_default_configs("parser.add_argument('--config', default='conf/a.yaml'); open('b.toml')")
    ['conf/a.yaml', 'b.toml']
    """
    names = re.findall(r"[\"']([\w./-]+\.(?:yaml|yml|toml|json))[\"']", text)
    return [
        name
        for name in dict.fromkeys(names)
        if not name.endswith(".json") or re.search(r"conf|cfg|args|param", PurePath(name).name)
    ]


def find_style(command: ScriptCommand, sources: Sources, styles: Iterable[ConfigStyle]) -> ConfigStyle:
    """Return how a command overrides its config file."""
    program = PurePath(command.target).name
    text = "\n".join(text for path, text in sources.items() if path.endswith(".py"))
    for style in styles:
        if program in style.programs or (style.marks and re.search(style.marks, text)):
            return style
    return PLAIN


def read_config_options(
    command: ScriptCommand, sources: Sources, options: Sequence[ScriptOption], style: ConfigStyle
) -> list[ScriptOption]:
    """Return the options with what the config files of a command set, the last file first."""
    files = _choose_files(command, sources)
    if not files:
        return list(options)
    # Keys that the file does not have yet can be added to it.
    merged = [_offer_key(option, files[-1], style) if style is not PLAIN else option for option in options]
    text = "\n".join(text for path, text in sources.items() if path.endswith(".py"))
    is_default = bool(_FILE_WINS.search(text))
    for file in files:
        for key, value in _read_values(sources[file], file):
            merged = _merge_key(merged, file, key, value, style=style, is_default=is_default)
    return merged


def list_unread_configs(command: ScriptCommand, sources: Sources) -> list[str]:
    """Return a note on each config file that a command names and whose keys cannot be read."""
    notes = []
    for file in list_named_configs(command.arguments):
        try:
            read_config(sources.get(file, "{}"), file)
        except TrimtabError as error:
            notes.append(f"the keys of {file} are not used as options: {error.given}: {error.found}")
    return notes


def _choose_files(command: ScriptCommand, sources: Sources) -> list[str]:
    """Return the config files of a command; if it names none, those that the script's text names."""
    named = [file for file in list_named_configs(command.arguments) if file in sources]
    if named:
        return named
    if any("@hydra.main" in text for text in sources.values()):
        return []
    return [path for path in sources if path.endswith(CONFIG_SUFFIXES)]


def _read_values(text: str, file: str) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the keys of a config file and their values; nothing of a file that is no config."""
    try:
        entries = read_config(text, file).entries()
    except TrimtabError:
        return
    for entry in entries:
        is_section = entry.path and all(isinstance(key, str) for key in entry.path)
        if is_section and not entry.computed and isinstance(entry.value, bool | int | float | str):
            yield entry.path, entry.value


def _merge_key(  # noqa: PLR0913 - a key of a file, and what is known of the script
    options: list[ScriptOption],
    file: str,
    key: tuple[str | int, ...],
    value: Any,
    *,
    style: ConfigStyle,
    is_default: bool,
) -> list[ScriptOption]:
    """Return the options with one key of a config file."""
    dotted = ".".join(map(str, key))
    in_file = {"file": file, "key": key, "in_file": value, "default": str(value)}
    form = style.form
    if form is not OptionForm.CONFIG or is_default:
        names = {dotted, f"--{dotted}", f"--{dotted.replace('_', '-')}"}
        for number, option in enumerate(options):
            if names & set(option.names) or (is_default and option.variable == dotted):
                options[number] = option.replace(**in_file)
                return options
    if form is OptionForm.CONFIG:
        last = str(key[-1])
        # The file holds it, and it is not known whether a flag of the same name would count.
        options = [
            option
            for option in options
            if option.variable != last or option.file or option.form is OptionForm.VARIABLE
        ]
        name = f"{file}:{dotted}"
    else:
        name = dotted if form is OptionForm.KEY else f"--{dotted}"
    kind = OptionValue.TEXT
    if isinstance(value, bool):
        kind = OptionValue.BOOLEAN
    elif isinstance(value, int):
        kind = OptionValue.INTEGER
    return [
        *(option for option in options if option.names != (name,)),
        ScriptOption(names=(name,), form=form, value=kind, where=file, variable=str(key[-1]), **in_file),
    ]


def _offer_key(option: ScriptOption, file: str, style: ConfigStyle) -> ScriptOption:
    """Return an option of a framework with the place that it would have in the config file."""
    if option.file or option.form is OptionForm.VARIABLE or not option.where.endswith(_FRAMEWORK):
        return option
    name = option.name.lstrip("-")
    key = tuple(name.split("."))
    if style.form is OptionForm.CONFIG:
        kind = OptionValue.BOOLEAN if option.value is OptionValue.OPTIONAL_BOOLEAN else option.value
        return option.replace(
            names=(f"{file}:{name}",), form=OptionForm.CONFIG, file=file, key=key, value=kind
        )
    if style.form is OptionForm.KEY:
        kind = OptionValue.BOOLEAN if option.value is OptionValue.OPTIONAL_BOOLEAN else option.value
        return option.replace(names=(name,), form=OptionForm.KEY, file=file, key=key, value=kind)
    return option.replace(file=file, key=key)


_FRAMEWORK = ("TrainingArguments", "config", "LightningCLI", "LLaMA-Factory", "axolotl")
"""How the titles of families in knobs.toml end."""
