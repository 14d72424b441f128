"""Tell files of Python and of installed packages from the user's own."""

from __future__ import annotations

import functools
import sys
import sysconfig
from pathlib import Path

PACKAGE_FOLDERS = ("site-packages", "dist-packages")


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({Path(sysconfig.get_path(name)).resolve() for name in names})


def is_library_file(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package, instead of the job.

    >>> is_library_file("/usr/lib/python3/dist-packages/numpy/__init__.py")
    True
    >>> is_library_file("/home/me/job.py")
    False
    """
    path = Path(file)
    return any(part in PACKAGE_FOLDERS for part in path.parts) or any(
        folder in path.parents for folder in (*_library_folders(), *_target_folders(tuple(sys.path)))
    )


@functools.lru_cache(maxsize=8)
def _target_folders(search_path: tuple[str, ...]) -> tuple[Path, ...]:
    """Return the folders on Python's path that packages were installed to, as `pip --target` does."""
    folders = [Path(entry) for entry in search_path if entry and Path(entry).is_dir()]
    return tuple(folder.resolve() for folder in folders if next(folder.glob("*.dist-info"), None))
