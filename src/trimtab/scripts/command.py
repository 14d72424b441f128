"""Take a training command apart as its owner types it, and put it together again with other arguments.

Understood: `python train.py`, `python -m package.train`, `torchrun`, `accelerate launch`, installed
programs written in Python, and variables or `srun`, `uv run`, `nohup` before them. Anything else is refused
with what to type instead. This module does not import torch, and runs nothing but the command's interpreter,
to ask which environment it belongs to.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import WrongUse, find_nearest, shorten
from trimtab.launching.launcher_options import (
    ACCELERATE_FLAGS,
    ACCELERATE_MODULES,
    ACCELERATE_VALUED,
    TORCHRUN_FLAGS,
    TORCHRUN_MODULES,
    TORCHRUN_VALUED,
    LauncherOptions,
    read_options,
)
from trimtab.scripts.interpreters import (
    can_import_trimtab,
    find_program,
    find_shim_target,
    is_own_environment,
    is_python,
    read_head,
    read_shebang,
)
from trimtab.scripts.launchers import (
    ProcessCount,
    count_accelerate_processes,
    count_torchrun_processes,
    launcher_environment,
)
from trimtab.scripts.prefixes import ASSIGNMENT, drop_prefixes, word_set
from trimtab.spec.script import ScriptCommand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "can_import_trimtab",
    "format_command",
    "launcher_environment",
    "parse_command",
    "set_processes",
    "with_arguments",
    "with_environment",
]

EXAMPLES = "python train.py ..., torchrun --nproc-per-node 8 train.py ..., accelerate launch train.py ..."
SHELLS = word_set("sh bash zsh fish dash ksh csh tcsh")
CONTAINERS = word_set("docker podman singularity apptainer enroot kubectl")
MPI_LAUNCHERS = word_set("mpirun mpiexec horovodrun orterun")
SUBMITTERS = word_set("sbatch salloc qsub bsub")
PYTHON_VALUED = ("-W", "-X", "--check-hash-based-pycs")
PRINTS_ONLY = frozenset(
    {"-V", "-VV", "--version", "-h", "-?", "--help", "--help-all", "--help-env", "--help-xoptions"}
)


@dataclass
class _Reader:
    """The parts of a command that were read so far."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    """The variables around the command, with those that it sets."""
    own: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interpreter: str | None = None
    interpreter_options: tuple[str, ...] = ()
    tasks: dict[str, int] = field(default_factory=dict)


def parse_command(words: Sequence[str], *, environment: Mapping[str, str]) -> ScriptCommand:
    """Return a training command taken apart; raise WrongUse with what to type instead.

    `environment` is what the command would see: PATH finds its interpreter, HF_HOME accelerate's config file.
    """
    typed, notes = _split_quoted(tuple(words))
    prefixes = drop_prefixes(typed, environment)
    reader = _Reader(
        typed,
        {**environment, **prefixes.environment},
        own=dict(prefixes.environment),
        notes=[*notes, *prefixes.notes],
        interpreter=prefixes.interpreter,
        tasks=prefixes.tasks,
    )
    rest = prefixes.rest
    if not rest:
        raise WrongUse(
            f"-- {shlex.join(typed)}".rstrip(),
            found="there is no training command" + (" after the variables and prefixes" if typed else ""),
            cure=f"Type it after the two dashes, as you start it: {EXAMPLES}",
        )
    if prefixes.is_module:
        return _read_module(reader, rest)
    return _read_program(reader, rest)


def _split_quoted(words: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """Split a command that was typed between quotes, and so is one word."""
    if len(words) != 1 or not any(character.isspace() for character in words[0]) or Path(words[0]).exists():
        return words, []
    try:
        split = tuple(shlex.split(words[0]))
    except ValueError as error:
        raise WrongUse(
            shorten(words[0]),
            found=f"its quotes do not match: {error}",
            cure="Type the command without quotes.",
        ) from None
    return split, ["the command was given as one word, and is split as a shell would"] if split else []


def _read_program(reader: _Reader, rest: tuple[str, ...]) -> ScriptCommand:
    """Read a command from its first real word on."""
    program, name = rest[0], os.path.basename(rest[0])  # noqa: PTH119 - a word, not a path yet
    _refuse_program(name, rest)
    if is_python(program):
        reader.interpreter = _find_python(reader, program)
        return _read_python(reader, rest[1:])
    if name == "torchrun":
        reader.interpreter = _find_launcher_python(reader, program)
        return _read_torchrun(reader, rest[1:], adds_rank=False)
    if name in ("accelerate", "accelerate-launch"):
        return _read_accelerate_program(reader, rest)
    file = find_program(program, reader.environment)
    if file is None and Path(program).suffix == ".py" and reader.interpreter:
        # `uv run train.py` runs a file without the word python.
        return _finish_file(reader, "python", rest)
    if file is None:
        raise _missing_program(rest)
    return _read_installed(reader, find_shim_target(file, reader.environment), rest)


def _refuse_program(name: str, rest: tuple[str, ...]) -> None:
    """Raise if a program is known not to be followed, with what to type instead."""
    given, script = shlex.join(rest), _first_script(rest)
    target = script or "train.py"
    found = cure = ""
    if name == "trimtab":
        found = "it is trimtab itself"
        cure = f"Type the command that trains: {EXAMPLES}"
    elif name in SHELLS:
        found = "a shell script can start anything, and trimtab follows Python only"
        cure = "Type the line of it that starts Python, with its values filled in: " + EXAMPLES
    elif name in ("deepspeed", "ds"):
        found = "trimtab cannot follow DeepSpeed's launcher"
        cure = f"If {target} also runs with torchrun, type: torchrun --nproc-per-node GPUS {target} ..."
    elif name in CONTAINERS:
        found = "trimtab cannot look into a container from outside"
        cure = f"Run trimtab in it: {name} ... trimtab estimate -- python {target} ..."
    elif name in MPI_LAUNCHERS:
        found = "trimtab does not follow MPI"
        cure = f"If {target} also runs with torchrun, type: torchrun --nproc-per-node GPUS {target} ..."
    elif name in SUBMITTERS:
        found = "it submits a job, and starts no training here"
        cure = "Type the line of the job script that starts Python: " + EXAMPLES
    if found:
        raise WrongUse(shorten(given), found=found, cure=cure)


def _first_script(words: Sequence[str]) -> str:
    return next((word for word in words if word.endswith(".py")), "")


def _missing_program(rest: tuple[str, ...]) -> WrongUse:
    program = rest[0]
    path = Path(program)
    if path.is_dir():
        return _directory_error(path)
    if path.is_file():
        how = f"python {shlex.join(rest)}" if path.suffix == ".py" else f"python -m ..., or {EXAMPLES}"
        found = "it is a file, but not a program that a shell would run"
        return WrongUse(program, found=found, cure=f"Type: {how}")
    near = _near_files(path)
    found = "there is no such program on PATH" if "/" not in program else "there is no such file"
    return WrongUse(
        program,
        found=found + (f"; near it: {', '.join(near)}" if near else ""),
        cure=f"Install it, activate its environment, or type how you start training: {EXAMPLES}",
    )


def _near_files(path: Path) -> list[str]:
    """Return files beside a missing one whose names are similar."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.is_file() and entry.suffix == ".py"]
    except OSError:
        return []
    return [str(path.parent / name) for name in find_nearest(path.name, names)]


def _directory_error(path: Path) -> WrongUse:
    main = path / "__main__.py"
    scripts = sorted(str(file) for file in path.glob("*.py"))[:4]
    if main.is_file():
        cure = f"Type the file in it that Python runs: python {main}"
    elif scripts:
        cure = f"Type one of its files: {', '.join(scripts)}"
    else:
        cure = f"Type the file that trains: {EXAMPLES}"
    return WrongUse(str(path), found="it is a folder", cure=cure)


def _find_python(reader: _Reader, word: str) -> str:
    """Return the path of the Python that a word names."""
    if reader.interpreter and "/" not in word:
        return reader.interpreter
    file = find_program(word, reader.environment)
    if file is not None:
        return str(find_shim_target(file, reader.environment))
    if "/" in word:
        raise WrongUse(
            word,
            found="there is no such program, or it may not be run",
            cure="Give the path of a Python that exists, or `python` for the one on PATH.",
        )
    return _own_python(reader, word)


def _own_python(reader: _Reader, word: str) -> str:
    reader.notes.append(f"{word} is not on PATH: the Python of trimtab is used, {sys.executable}")
    return sys.executable


def _find_launcher_python(reader: _Reader, word: str) -> str:
    """Return the Python behind torchrun or accelerate."""
    if reader.interpreter and "/" not in word:
        return reader.interpreter
    file = find_program(word, reader.environment)
    if file is None:
        return _own_python(reader, word)
    file = find_shim_target(file, reader.environment)
    python = read_shebang(file, reader.environment)
    beside = file.parent / "python"
    if python is None and beside.exists():
        python = beside
    return str(python) if python is not None else _own_python(reader, word)


def _read_python(reader: _Reader, rest: tuple[str, ...]) -> ScriptCommand:
    """Read what follows `python`: its options, then a file or `-m module`."""
    words, options = list(rest), []
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word in PRINTS_ONLY:
            raise WrongUse(f"python {word}", found="it trains nothing", cure=f"Type: {EXAMPLES}")
        letters = "" if word.startswith("--") else word[1:]
        code = min((letters.find(letter) for letter in "mc" if letter in letters), default=-1)
        value = min((letters.find(letter) for letter in "WX" if letter in letters), default=-1)
        if code >= 0 and (value < 0 or code < value):
            options += [f"-{letters[:code]}"] if code else []
            attached = letters[code + 1 :]
            reader.interpreter_options = tuple(options)
            return _read_option_target(
                reader, letters[code], ((attached,) if attached else ()) + tuple(words)
            )
        options.append(word)
        if word in PYTHON_VALUED or (value >= 0 and value == len(letters) - 1):
            options += [words.pop(0)] if words else []
    reader.interpreter_options = tuple(options)
    if not words or words[0] == "-":
        raise WrongUse(shlex.join(reader.words), found="it names no file to run", cure=f"Type: {EXAMPLES}")
    return _finish_file(reader, "python", tuple(words))


def _read_option_target(reader: _Reader, letter: str, rest: tuple[str, ...]) -> ScriptCommand:
    if letter == "c":
        raise WrongUse(
            "python -c",
            found="trimtab needs a file or a module",
            cure="Put the code into a file: python FILE.py",
        )
    return _read_module(reader, rest)


def _read_module(reader: _Reader, rest: tuple[str, ...]) -> ScriptCommand:
    """Read what follows `python -m`."""
    if reader.interpreter is None:
        reader.interpreter = _find_python(reader, "python")
    if not rest:
        raise WrongUse("python -m", found="it names no module", cure="Type: python -m package.module ...")
    module = rest[0]
    if module.partition(".")[0] == "trimtab":
        _refuse_program("trimtab", rest)
    if module.startswith("deepspeed"):
        _refuse_program("deepspeed", rest)
    if module in TORCHRUN_MODULES:
        return _read_torchrun(reader, rest[1:], adds_rank=module.endswith("launch"))
    if module in ACCELERATE_MODULES:
        return _read_accelerate(reader, rest[1:])
    if module.endswith(".py") or "/" in module:
        name = module.removesuffix(".py").strip("./").replace("/", ".")
        raise WrongUse(
            f"python -m {module}",
            found="-m takes the name of a module, not a file",
            cure=f"Type: python {module} ..., or python -m {name} ...",
        )
    return _finish(reader, "python", module, rest[1:], is_module=True)


def _read_torchrun(reader: _Reader, rest: tuple[str, ...], *, adds_rank: bool) -> ScriptCommand:
    options = read_options(rest, TORCHRUN_FLAGS, TORCHRUN_VALUED, "torchrun")
    count = count_torchrun_processes(options.values, reader.environment, reader.own)
    # The old launcher passes the rank as an argument, unless it is asked to use a variable.
    added = ("--local-rank=0",) if adds_rank and not options.has_flag("--use-env") else ()
    return _finish_launched(reader, "torchrun", options, count, added)


def _read_accelerate_program(reader: _Reader, rest: tuple[str, ...]) -> ScriptCommand:
    """Read `accelerate launch` or `accelerate-launch`."""
    reader.interpreter = _find_launcher_python(reader, rest[0])
    if rest[0].endswith("accelerate-launch"):
        return _read_accelerate(reader, rest[1:])
    if len(rest) > 1 and rest[1] == "launch":
        return _read_accelerate(reader, rest[2:])
    raise WrongUse(
        shorten(shlex.join(rest)),
        found="of accelerate's commands, only `accelerate launch` trains",
        cure="Type: accelerate launch train.py ...",
    )


def _read_accelerate(reader: _Reader, rest: tuple[str, ...]) -> ScriptCommand:
    options = read_options(rest, ACCELERATE_FLAGS, ACCELERATE_VALUED, "accelerate launch")
    count = count_accelerate_processes(options.values, reader.environment, reader.own)
    return _finish_launched(reader, "accelerate", options, count, ())


def _finish_launched(
    reader: _Reader, launcher: str, options: LauncherOptions, count: ProcessCount, added: tuple[str, ...]
) -> ScriptCommand:
    """Return the command of a launcher, from the script or module after its options."""
    name = "torchrun" if launcher == "torchrun" else "accelerate launch"
    if options.has_flag("-h", "--help"):
        raise WrongUse(f"{name} --help", found="it trains nothing", cure=f"Type: {EXAMPLES}")
    if not options.rest:
        raise WrongUse(
            shlex.join(reader.words),
            found=f"{name} gets no file to run",
            cure=f"Type: {name} ... train.py ...",
        )
    reader.notes += [*options.notes, *count.notes]
    reader.tasks = {}
    rest, is_module = options.rest, options.has_flag("-m", "--module")
    if options.has_flag("--no-python"):
        inner = _read_program(reader, rest)
        if inner.launcher not in ("python", "console"):
            raise WrongUse(
                shlex.join(rest),
                found=f"it is a launcher inside {name}",
                cure=f"Type one of them: {EXAMPLES}",
            )
        target, arguments, is_module = inner.target, inner.arguments, inner.is_module
    else:
        target, arguments = rest[0], rest[1:]
    command = (
        _finish(reader, launcher, target, arguments, is_module=True)
        if is_module
        else _finish_file(reader, launcher, (target, *arguments))
    )
    return command.replace(
        processes=count.processes,
        nodes=count.nodes,
        processes_follow_gpus=count.follows_gpus,
        launcher_arguments=options.words,
        added_arguments=added,
    )


def _read_installed(reader: _Reader, file: Path, rest: tuple[str, ...]) -> ScriptCommand:
    """Read a program that is a file: an installed program, or a script that is marked as executable."""
    python = read_shebang(file, reader.environment)
    if python is None:
        kind = "no Python program" if read_head(file) else "a binary"
        raise WrongUse(
            shorten(shlex.join(rest)),
            found=f"{file} is {kind}, and trimtab follows Python only",
            cure=f"Type how Python is started: {EXAMPLES}",
        )
    reader.interpreter = str(python)
    if "/" in rest[0] and Path(rest[0]).suffix == ".py":
        return _finish_file(reader, "python", rest)
    return _finish(reader, "console", str(file), rest[1:])


def _finish_file(reader: _Reader, launcher: str, rest: tuple[str, ...]) -> ScriptCommand:
    """Return the command that runs a file, after a check that the file exists."""
    path = Path(rest[0])
    if path.is_dir():
        raise _directory_error(path)
    if not path.is_file():
        near = _near_files(path)
        raise WrongUse(
            rest[0],
            found=f"there is no such file in {Path.cwd()}"
            if not path.is_absolute()
            else "there is no such file",
            cure=f"Did you mean {', '.join(near)}?" if near else "Give the path as seen from this folder.",
        )
    if path.suffix in (".sh", ".bash", ".ipynb"):
        kind = "a notebook" if path.suffix == ".ipynb" else "a shell script"
        raise WrongUse(
            rest[0],
            found=f"it is {kind}, not a Python file",
            cure="Save its cells as a file first: jupyter nbconvert --to script FILE"
            if path.suffix == ".ipynb"
            else f"Type the line of it that starts Python: {EXAMPLES}",
        )
    return _finish(reader, launcher, rest[0], rest[1:])


def _finish(
    reader: _Reader, launcher: str, target: str, arguments: tuple[str, ...], *, is_module: bool = False
) -> ScriptCommand:
    """Return the command, with a note if its Python is not trimtab's."""
    interpreter = reader.interpreter or _find_python(reader, "python")
    notes = list(reader.notes)
    if not is_own_environment(interpreter):
        notes.append(f"the command's Python is {interpreter}, in another environment than trimtab's")
    command = ScriptCommand(
        words=reader.words,
        launcher=launcher,
        interpreter=interpreter,
        target=target,
        is_module=is_module,
        arguments=arguments,
        environment=dict(reader.own),
        interpreter_options=reader.interpreter_options,
        notes=tuple(notes),
    )
    return _apply_tasks(command, reader.tasks)


def _apply_tasks(command: ScriptCommand, tasks: Mapping[str, int]) -> ScriptCommand:
    """Return the command with the processes that srun starts, and the variables of Slurm for rank 0."""
    each, total = tasks.get("ntasks-per-node"), tasks.get("ntasks")
    nodes = tasks.get("nodes") or (-(-total // each) if total and each else 1)
    each = each or max(1, (total or nodes) // nodes)
    if each * nodes == 1:
        return command
    variables = {
        "SLURM_NTASKS": str(each * nodes),
        "SLURM_NPROCS": str(each * nodes),
        "SLURM_NTASKS_PER_NODE": str(each),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
    }
    return command.replace(processes=each, nodes=nodes, environment={**variables, **command.environment})


def set_processes(command: ScriptCommand, gpus: int) -> ScriptCommand:
    """Return the command with a process for each GPU of a node, if its launcher counts them."""
    return command.replace(processes=gpus) if command.processes_follow_gpus else command


def format_command(command: ScriptCommand) -> str:
    """Return the command as one line for a shell.

    >>> from trimtab.spec.script import ScriptCommand
    >>> words = ("NAME=a b", "python", "train.py", "--text", "it's")
    >>> command = ScriptCommand(words=words, launcher="python", interpreter="", target="train.py")
    >>> print(format_command(command))
    NAME='a b' python train.py --text 'it'"'"'s'
    """
    texts, is_start = [], True
    for word in command.words:
        match = ASSIGNMENT.match(word) if is_start else None
        is_start = match is not None
        texts.append(
            f"{match[1]}={shlex.quote(match[2]) if match[2] else ''}" if match else shlex.quote(word)
        )
    return " ".join(texts)


def with_arguments(command: ScriptCommand, arguments: Sequence[str]) -> ScriptCommand:
    """Return the command with other arguments for its script; everything before them stays."""
    kept = command.words[: len(command.words) - len(command.arguments)]
    return command.replace(words=(*kept, *arguments), arguments=tuple(arguments))


def with_environment(command: ScriptCommand, variables: Mapping[str, str]) -> ScriptCommand:
    """Return the command with variables set: changed where it sets them already, else in front."""
    words, missing = list(command.words), dict(variables)
    end = len(words) - len(command.arguments)
    for position, word in enumerate(words[:end]):
        match = ASSIGNMENT.match(word)
        if match and match[1] in missing and match[1] in command.environment:
            words[position] = f"{match[1]}={missing.pop(match[1])}"
    front = [f"{name}={value}" for name, value in missing.items()]
    return command.replace(words=(*front, *words), environment={**command.environment, **variables})
