"""Let a script import Python files that it wrote itself: they are in the scratch folder.

Python's importer looks at the disk with functions of its own, which the sandbox leaves alone. Libraries that
write a module and import it, such as `evaluate` and `trust_remote_code` of transformers, need this.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import TYPE_CHECKING, Any

from trimtab.scripts.overlay import real

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from trimtab.scripts.overlay import Overlay


class WrittenModuleFinder:
    """Finds modules in the scratch folder's version of each folder that Python searches."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is that the script wrote; None if it wrote none of this name."""
        folders = [folder for entry in sys.path if path is None for folder in self._list_folders(entry)]
        folders += [folder for entry in path or () for folder in self._list_folders(entry)]
        if not folders:
            return None
        found = PathFinder.find_spec(name, folders, target)
        if found is None:
            return None
        if found.loader is None and PathFinder.find_spec(name, path, target) is not None:
            # A folder without __init__.py, and the user has a module or package of this name.
            return None
        if found.submodule_search_locations is not None:
            locations = list(found.submodule_search_locations)
            users = [self._overlay.absolute(location) for location in locations]
            found.submodule_search_locations = [*locations, *users]
        return found

    def _list_folders(self, entry: Any) -> list[str]:
        """Return the scratch folder's version of a folder, if there is one."""
        if not isinstance(entry, str):
            return []
        try:
            resolved = self._overlay.resolve(self._overlay.absolute(entry or "."))
            folder = self._overlay.upper + resolved
            real.listdir(folder)
        except OSError:
            return []
        return [] if self._overlay.is_real(resolved) else [folder]


def follow_written_modules(overlay: Overlay) -> None:
    """Let Python import modules that the script writes, by name and by the path of their file."""
    sys.meta_path.insert(0, WrittenModuleFinder(overlay))
    loaders: Any = SourceFileLoader
    original = loaders.get_data

    def get_data(loader: Any, path: str) -> Any:
        return original(loader, overlay.find(path))

    loaders.get_data = get_data
