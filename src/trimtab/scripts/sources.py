"""Find the files of a training script: its own, the local modules that it imports, and its config files."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.scripts.config_options import MOST_BYTES as MOST_CONFIG_BYTES
from trimtab.scripts.config_options import list_default_configs, list_named_configs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trimtab.spec.script import ScriptCommand

MOST_FILES = 60
MOST_BYTES = 2_000_000
MOST_GROUPS = 6
"""Levels of Hydra groups that choose others."""
_HYDRA = re.compile(r"@hydra\.main\(([^)]*)\)", re.DOTALL)


def read_sources(command: ScriptCommand, folder: Path | None = None) -> dict[str, str]:
    """Return the texts of a script's files by path, the script first; empty if there is no such file.

    Files are looked for in the script's folder and in `folder`, from which the command runs. Nothing is
    imported. Installed packages are not read.
    """
    folder = folder or Path.cwd()
    script = find_script(command, folder)
    sources: dict[str, str] = {}
    if script is None:
        _add_configs(sources, list_named_configs(command.arguments), [folder])
        return sources
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
            waiting += list_hydra_files(text, file, command.arguments)
    named_configs = list_named_configs(command.arguments)
    _add_configs(sources, named_configs, [folder])
    if not any(name in sources for name in named_configs):
        _add_configs(sources, list_default_configs(next(iter(sources.values()), "")), [folder, script.parent])
    return sources


def _add_configs(sources: dict[str, str], names: Sequence[str], folders: Sequence[Path]) -> None:
    """Add the config files that are there; they keep the names that the command or the script gives them."""
    for name in names:
        for folder in folders:
            file = Path(folder, name)
            if not file.is_file() or file.stat().st_size > MOST_CONFIG_BYTES:
                continue
            text = _read_text(file)
            # Seen from the folder in which the command runs.
            shown = name if folder == folders[0] else _show_path(file, folders[0])
            if text is not None and shown not in sources:
                sources[shown] = text
            break


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


def list_hydra_files(text: str, file: Path, arguments: Sequence[str]) -> list[Path]:
    """Return the config that @hydra.main names and the groups that it chooses, those that win first."""
    files: list[Path] = []
    options = dict(re.findall(r"(?<!\S)(--config-name|-cn|--config-path|-cp)[= ](\S+)", " ".join(arguments)))
    chosen = dict(word.lstrip("+").split("=", 1) for word in arguments if "=" in word and word[:1] != "-")
    for inner in _HYDRA.findall(text):
        named = dict(re.findall(r"(config_path|config_name)\s*=\s*[\"']([^\"']*)[\"']", inner))
        name = options.get("--config-name") or options.get("-cn") or named.get("config_name") or "config"
        place = options.get("--config-path") or options.get("-cp") or named.get("config_path") or "."
        files += _compose(Path(file.parent, place), name, chosen)
    return files


def _compose(root: Path, name: str, chosen: Mapping[str, str], depth: int = 0) -> list[Path]:
    """Return a config of a Hydra folder and those of its defaults list."""
    file = root / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    text = _read_text(file)
    if text is None or depth > MOST_GROUPS:
        return []
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return [file]
    defaults = content.get("defaults") if isinstance(content, dict) else None
    groups: list[Path] = []
    wanted = dict(chosen) if depth == 0 else {}
    for item in defaults if isinstance(defaults, list) else []:
        pairs = item.items() if isinstance(item, dict) else [("", item)]
        for group, value in pairs:
            group_name = re.sub(r"^(?:override|optional)\s+|@.*$", "", str(group)).strip()
            choice = wanted.pop(group_name, value) if group_name else value
            inner = f"{group_name}/{choice}" if group_name else str(choice)
            if str(choice) not in ("_self_", "None", "null"):
                groups += _compose(root, inner, chosen, depth + 1)
    for group, choice in wanted.items():
        if (root / group).is_dir():
            # An override such as +experiment=large adds a group, and its keys win.
            groups = [*_compose(root, f"{group}/{choice}", chosen, depth + 1), *groups]
    is_first = isinstance(defaults, list) and defaults[:1] == ["_self_"] and len(defaults) > 1
    return [*groups, file] if is_first else [file, *groups]
