"""Take off what people put before a training command: variables, `env`, `srun`, `uv run`, `nohup`, `time`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from trimtab.errors import WrongUse
from trimtab.scripts.interpreters import find_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)
NUMBER_OPTION = re.compile(r"^-\d+$")

CHANGES_FOLDER = frozenset({"-C", "--chdir", "-D", "--directory", "--cwd", "--project"})


class Wrapper(NamedTuple):
    """How to find the end of a wrapper's own options."""

    valued: frozenset[str] = frozenset()
    """Options that take the next word as their value."""
    flags: frozenset[str] | None = None
    """If given: the options without a value; all others take one."""
    positionals: int = 0
    """Words of its own before the command."""
    subcommand: str = ""
    """The word that must follow it: `run` of uv and poetry."""


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


SRUN_FLAGS = word_set(
    "--exclusive -O --overcommit -s --oversubscribe -l --label -u --unbuffered -Q --quiet -v --verbose -E "
    "--preserve-env -X --disable-status -H --hold -I --immediate --pty --overlap --exact --multi-prog -Z "
    "--no-allocate --contiguous -k --no-kill -K --kill-on-bad-exit --requeue --spread-job --use-min-nodes "
    "--propagate --whole -b --nice --reboot --external"
)
UV_VALUED = word_set(
    "--with --with-editable --with-requirements --extra --no-extra --group --no-group --only-group "
    "--env-file --python -p --directory --project --index --default-index -i --index-url --extra-index-url "
    "-f --find-links --cache-dir --package --config-file --python-preference --color --refresh-package "
    "--upgrade-package -P --reinstall-package --resolution --prerelease --exclude-newer --link-mode "
    "--config-setting -C --index-strategy --keyring-provider --no-build-package --no-binary-package "
    "--allow-insecure-host"
)

WRAPPERS: dict[str, Wrapper] = {
    "nohup": Wrapper(),
    "time": Wrapper(word_set("-f --format -o --output")),
    "nice": Wrapper(word_set("-n --adjustment")),
    "ionice": Wrapper(word_set("-c -n --class --classdata")),
    "setsid": Wrapper(),
    "exec": Wrapper(),
    "command": Wrapper(),
    "unbuffer": Wrapper(),
    "stdbuf": Wrapper(word_set("-i -o -e --input --output --error")),
    "taskset": Wrapper(positionals=1),
    "timeout": Wrapper(word_set("-s --signal -k --kill-after"), positionals=1),
    "numactl": Wrapper(
        word_set("-i --interleave -p --preferred -m --membind -N --cpunodebind -C --physcpubind")
    ),
    "srun": Wrapper(flags=SRUN_FLAGS),
    "uv": Wrapper(UV_VALUED, subcommand="run"),
    "poetry": Wrapper(subcommand="run"),
    "pdm": Wrapper(word_set("-p --project --venv"), subcommand="run"),
    "pipenv": Wrapper(subcommand="run"),
    "hatch": Wrapper(subcommand="run"),
    "rye": Wrapper(subcommand="run"),
    "pixi": Wrapper(word_set("-e --environment --manifest-path"), subcommand="run"),
    "conda": Wrapper(word_set("-n --name -p --prefix --cwd"), subcommand="run"),
    "mamba": Wrapper(word_set("-n --name -p --prefix --cwd"), subcommand="run"),
    "micromamba": Wrapper(word_set("-n --name -p --prefix --cwd"), subcommand="run"),
}
PROJECT_RUNNERS = frozenset({"uv", "poetry", "pdm", "pipenv", "rye"})
"""Run a command in the virtual environment of the project, usually `.venv` in a folder above."""
CONDA_RUNNERS = frozenset({"conda", "mamba", "micromamba"})


@dataclass
class Prefixes:
    """What stood before the program."""

    rest: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interpreter: str | None = None
    """The Python of the project or of the conda environment, if a prefix chooses one."""
    is_module: bool = False
    """`uv run -m` was typed: the next word is a module."""
    tasks: dict[str, int] = field(default_factory=dict)
    """Of srun: ntasks, nodes, ntasks-per-node, as far as they are given."""


def drop_prefixes(words: Sequence[str], environment: Mapping[str, str]) -> Prefixes:
    """Return the words without their prefixes, and what the prefixes say."""
    found = Prefixes(rest=tuple(words))
    while found.rest and not found.is_module:
        name = os.path.basename(found.rest[0])  # noqa: PTH119 - a word, not a path
        if match := ASSIGNMENT.match(found.rest[0]):
            found.environment[match[1]] = match[2]
            found.rest = found.rest[1:]
        elif name == "env":
            _drop_env(found)
        elif name in WRAPPERS and _is_wrapping(name, found.rest):
            _drop_wrapper(name, found, environment)
        else:
            break
    return found


def _is_wrapping(name: str, words: Sequence[str]) -> bool:
    needed = WRAPPERS[name].subcommand
    return not needed or needed in words[1:]


def _drop_env(found: Prefixes) -> None:
    """Take off `env` with its options; its variables are taken off like any others."""
    words = list(found.rest[1:])
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option in ("-u", "--unset") or option.startswith("--unset="):
            name = option.partition("=")[2] or (words.pop(0) if words else "")
            found.notes.append(f"`env {option}`: the variable {name} stays as it is in your shell")
        elif option in ("-i", "-", "--ignore-environment"):
            found.notes.append(f"`env {option}`: the variables of your shell stay set")
        elif option in ("-C", "--chdir") or option.startswith("--chdir="):
            raise _folder_error(f"env {option}")
        elif option == "-S":
            words = [*words.pop(0).split(), *words] if words else []
    found.rest = tuple(words)


def _folder_error(option: str) -> WrongUse:
    return WrongUse(
        option,
        found="it runs the command in another folder",
        cure="Go to that folder first (cd FOLDER), and type the command as you would there.",
    )


def _drop_wrapper(name: str, found: Prefixes, environment: Mapping[str, str]) -> None:
    wrapper = WRAPPERS[name]
    rest = list(found.rest[1:])
    if wrapper.subcommand:
        while rest and rest.pop(0) != wrapper.subcommand:
            pass
    options, rest = _split_options(wrapper, rest)
    for option in options:
        if option in CHANGES_FOLDER and name not in ("numactl", "stdbuf"):
            raise _folder_error(f"{name} {option}")
    dropped = found.rest[: len(found.rest) - len(rest)]
    found.rest = tuple(rest)
    found.notes.append(f"`{' '.join(dropped)}` is left out: trimtab starts the command itself")
    if name == "srun":
        found.tasks |= _read_tasks(options)
    elif name in PROJECT_RUNNERS:
        found.is_module = name == "uv" and bool({"-m", "--module"} & options.keys())
        found.interpreter = _find_project_python(environment)
    elif name in CONDA_RUNNERS:
        found.interpreter = _find_conda_python(name, options, environment)


def _split_options(wrapper: Wrapper, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the wrapper's own options with their values, and the words after them."""
    options: dict[str, str] = {}
    rest, left = list(words), wrapper.positionals
    while rest:
        word = rest[0]
        if word == "--":
            rest.pop(0)
            break
        if not word.startswith("-") or word == "-":
            if left == 0:
                break
            left -= 1
            rest.pop(0)
            continue
        rest.pop(0)
        name, has_value, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2 and not NUMBER_OPTION.match(word):  # noqa: PLR2004 - -n8
            name, has_value, value = word[:2], "attached", word[2:]
        if not has_value and _takes_value(wrapper, name) and rest:
            value = rest.pop(0)
        options[name] = value
    return options, rest


def _takes_value(wrapper: Wrapper, option: str) -> bool:
    return option in wrapper.valued if wrapper.flags is None else option not in wrapper.flags


TASK_OPTIONS = {
    "ntasks": ("-n", "--ntasks"),
    "nodes": ("-N", "--nodes"),
    "ntasks-per-node": ("--ntasks-per-node", "--tasks-per-node"),
}


def _read_tasks(options: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers of tasks and nodes that srun's options give."""
    given = {}
    for name, spellings in TASK_OPTIONS.items():
        for spelling in spellings:
            text = options.get(spelling, "").partition("-")[0]
            if text.isdigit() and int(text) > 0:
                given[name] = int(text)
    return given


def _find_project_python(environment: Mapping[str, str]) -> str | None:
    """Return the Python of the project's virtual environment, as uv and poetry find it."""
    folders = [Path.cwd() / ".venv", *(parent / ".venv" for parent in Path.cwd().parents)]
    if named := environment.get("UV_PROJECT_ENVIRONMENT"):
        folders.insert(0, Path(named))
    if active := environment.get("VIRTUAL_ENV"):
        folders.append(Path(active))
    return next(
        (str(folder / "bin" / "python") for folder in folders if (folder / "bin" / "python").exists()), None
    )


def _find_conda_python(name: str, options: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    """Return the Python of the conda environment that the options name."""
    prefix = options.get("-p") or options.get("--prefix")
    chosen = options.get("-n") or options.get("--name")
    program = environment.get("CONDA_EXE") or find_program(name, environment)
    if not prefix and chosen and program:
        prefix = str(Path(program).parent.parent / "envs" / chosen)
    python = Path(prefix) / "bin" / "python" if prefix else None
    return str(python) if python and python.exists() else None
