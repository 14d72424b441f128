"""Cache what followed commands did: the same command, files, versions and options give the same result."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.cache import FOLLOWED_SCRIPTS, code_fingerprint, fingerprint
from trimtab.scripts.inputs import find_changed_input
from trimtab.scripts.result import ScriptResult

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trimtab.scripts.result import ScriptRequest

NOT_FOLLOWING = frozenset(
    {
        *("api", "cli", "configs", "diagnosis", "exams", "launching", "calibration", "pages", "planner"),
        *("predict", "probe", "render", "training", "watching", "integrations", "strategies"),
    }
)
"""Packages of trimtab that no followed script depends on."""
_IGNORED = frozenset(
    {"_", "SHLVL", "OLDPWD", "PWD", "COLUMNS", "LINES", "DISPLAY", "LS_COLORS", "PS1", "STY"}
)
_IGNORED_PREFIXES = (
    "TERM",
    "SSH_",
    "XDG_SESSION",
    "DBUS_",
    "WINDOW",
    "TMUX",
    "TRIMTAB_",
    "PYTEST_",
    "VSCODE_",
)
"""Variables of the terminal, which no training depends on."""


def make_followed_key(request: ScriptRequest) -> str:
    """Return the cache key of a request: all but the scratch folder and the files that the script reads."""
    # The words and the files say what the changes do.
    command = request.command.replace(changes=(), notes=())
    return fingerprint(
        request.replace(command=command, scratch="-").to_builtins(),
        str(Path.cwd()),
        _list_variables(os.environ),
        _list_packages(request.command.interpreter),
        sys.version if request.command.interpreter == sys.executable else "",
        code_fingerprint(NOT_FOLLOWING),
    )


def _list_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name not in _IGNORED and not name.startswith(_IGNORED_PREFIXES)
    }


def _list_packages(interpreter: str) -> list[str]:
    """Return the packages beside an interpreter and on PYTHONPATH, with their versions."""
    prefix = Path(interpreter).parent.parent
    folders = [*prefix.glob("lib/python*/site-packages")]
    if interpreter == sys.executable:
        folders = [Path(path) for path in sys.path if path.endswith("-packages")]
    folders += [Path(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return sorted(
        f"{folder}/{name.name}"
        for folder in folders
        if folder.is_dir()
        for name in folder.glob("*.dist-info")
    )


def load_followed(key: str) -> ScriptResult | None:
    """Return the cached result, if all files that the script read are as they were."""
    result = FOLLOWED_SCRIPTS.load(key, ScriptResult.from_json)
    if result is None or result.inputs is None or find_changed_input(result.inputs) is not None:
        return None
    return result.replace(is_cached=True)


def store_followed(key: str, result: ScriptResult) -> None:
    """Store a result; not that of a script whose files are not known."""
    if result.inputs is not None and not result.error:
        FOLLOWED_SCRIPTS.store(key, result.to_json())
