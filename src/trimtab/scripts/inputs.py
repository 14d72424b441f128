"""Record which files a followed script reads, so that its result can be cached.

The child process records: modules and small texts by their content, data by size and time of change, folders
by the names in them, and files that were looked for and are not there. The parent compares them later.
"""

from __future__ import annotations

import hashlib
import os
import stat as stat_modes
import sys
import sysconfig
from typing import TYPE_CHECKING, Any

from trimtab.scripts.overlay import real
from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_INPUTS = 20_000
"""A script that reads more files is not cached: checking them would take as long as following it."""
MOST_HASHED_BYTES = 2_000_000
MOST_NAMES = 20_000
ABSENT = "absent"
_SOURCES = (".py", ".yaml", ".yml", ".json", ".toml", ".txt", ".cfg", ".ini", ".sh", ".jinja", ".model")
"""Files that people edit: their content counts, not their time."""
_SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/usr", "/lib", "/bin", "/run", "/var/run")


class ScriptInput(Noun, frozen=True, kw_only=True):
    """A file or folder that a script read, as it was then."""

    path: str
    state: str
    """What it held: a hash of the text, size and time, a hash of the names in a folder, or absent."""


class InputRecord:
    """The files that this process reads, outside of installed packages."""

    def __init__(self, skipped: Iterable[str]) -> None:
        paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        places = (*_SYSTEM, *filter(None, paths), *skipped)
        self._skipped = tuple(f"{os.path.realpath(place)}/" for place in places)
        self.paths: dict[str, None] = {}
        self._is_busy = False

    def install(self) -> None:
        """Record every file that is opened and every folder that is listed from now on."""
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.listdir", "os.scandir") or self._is_busy:
            return
        name = arguments[0] if arguments else None
        if not isinstance(name, str | bytes) or len(self.paths) > MOST_INPUTS:
            return
        if event != "open" and _is_import_folder(name):
            # Importers list the script's folder; a new file there, such as a plan, changes nothing.
            return
        flags = arguments[2] if event == "open" and len(arguments) > 2 else 0  # noqa: PLR2004 - path, mode, flags
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
            return
        self._is_busy = True
        try:
            self.add(os.fsdecode(name))
        except (OSError, ValueError):
            return
        finally:
            self._is_busy = False

    def add(self, name: str) -> None:
        """Record a path, unless it belongs to the system or to an installed package."""
        path = os.path.abspath(name)  # noqa: PTH100 - a Path is too slow for every file
        if "__pycache__" in path or path.endswith((".pyc", ".so")) or "/site-packages/" in path:
            return
        if not f"{path}/".startswith(self._skipped):
            self.paths[path] = None

    def list_inputs(self) -> tuple[ScriptInput, ...] | None:
        """Return what was read, with its state now; None if it is too much to check."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str):
                # A module can come from a compiled file, without its source being opened.
                self.add(file)
        if len(self.paths) > MOST_INPUTS:
            return None
        return tuple(ScriptInput(path=path, state=read_state(path)) for path in sorted(self.paths))


def _is_import_folder(name: str | bytes) -> bool:
    """Return whether Python imports modules from a folder, so that importers list it."""
    folder = os.path.realpath(os.fsdecode(name))
    return any(os.path.realpath(place or ".") == folder for place in list(sys.path))


def read_state(path: str) -> str:
    """Return what decides whether a file or folder is still the same: the user's own, not a script's copy."""
    try:
        status = real.stat(path)
        if stat_modes.S_ISDIR(status.st_mode):
            names = sorted(real.listdir(path))[:MOST_NAMES]
            return f"names {_hash(chr(0).join(names).encode(errors='replace'))}"
        if status.st_size <= MOST_HASHED_BYTES and path.endswith(_SOURCES):
            with real.open_file(path, "rb") as file:
                return f"text {_hash(file.read())}"
    except OSError:
        return ABSENT
    return f"data {status.st_size} {status.st_mtime_ns}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def find_changed_input(inputs: Iterable[ScriptInput]) -> str | None:
    """Return the first path that is not as it was; None if all are."""
    return next((item.path for item in inputs if read_state(item.path) != item.state), None)
