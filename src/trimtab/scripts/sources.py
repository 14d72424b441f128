"""Find the files of a training script: its own, the local modules that it imports, and its Hydra config."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.spec.script import ScriptCommand

MOST_FILES = 60
MOST_BYTES = 2_000_000
_HYDRA = re.compile(r"@hydra\.main\(([^)]*)\)", re.DOTALL)


def read_sources(command: ScriptCommand, folder: Path | None = None) -> dict[str, str]:
    """Return the texts of a script's files by path, the script first; empty if there is no such file.

    Files are looked for in the script's folder and in `folder`, from which the command runs. Nothing is
    imported. Installed packages are not read.
    """
    folder = folder or Path.cwd()
    script = find_script(command, folder)
    if script is None:
        return {}
    sources: dict[str, str] = {}
    named = [Path(folder, word) for word in command.arguments if word.endswith(".py")]
    waiting = [script, *named]
    while waiting and len(sources) < MOST_FILES:
        file = waiting.pop(0)
        # What the command names keeps its name.
        name = str(file.relative_to(folder)) if file in named else _show_path(file, folder)
        text = _read_text(file)
        if name in sources or text is None:
            continue
        sources[name] = text
        if file.suffix == ".py":
            waiting += _list_imports(text, file, [file.parent, script.parent, folder])
            waiting += _list_configs(text, file)
    return sources


def find_script(command: ScriptCommand, folder: Path) -> Path | None:
    """Return the file that a command runs; None for an installed program."""
    if command.is_module:
        return _find_module(command.target, [folder])
    file = Path(folder, command.target)
    return file if file.is_file() and file.suffix == ".py" else None


def _show_path(file: Path, folder: Path) -> str:
    try:
        return str(file.resolve().relative_to(folder.resolve()))
    except ValueError:
        return str(file)


def _read_text(file: Path) -> str | None:
    try:
        return None if file.stat().st_size > MOST_BYTES else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _find_module(name: str, folders: list[Path]) -> Path | None:
    parts = name.split(".")
    for folder in folders:
        place = Path(folder, *parts)
        for file in (place.with_suffix(".py"), place / "__main__.py", place / "__init__.py"):
            if file.is_file():
                return file
    return None


def _list_imports(text: str, file: Path, folders: list[Path]) -> Iterator[Path]:
    """Yield the local files that a file imports."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        names: list[str] = []
        places = folders
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                places = [Path(file.parent, *[".."] * (node.level - 1))]
            base = node.module or ""
            names = [base] if base else []
            names += [f"{base}.{alias.name}".strip(".") for alias in node.names]
        for name in names:
            found = _find_module(name, places)
            if found is not None:
                yield found


def _list_configs(text: str, file: Path) -> Iterator[Path]:
    """Yield the config that @hydra.main names."""
    for arguments in _HYDRA.findall(text):
        named = dict(re.findall(r"(config_path|config_name)\s*=\s*[\"']([^\"']*)[\"']", arguments))
        name = named.get("config_name", "config")
        config = Path(file.parent, named.get("config_path", "."), name)
        yield config if config.suffix in (".yaml", ".yml") else config.with_name(f"{config.name}.yaml")
