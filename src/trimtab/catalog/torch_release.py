"""Find torch without importing it, and check that its release is supported."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from trimtab.catalog.tables import torch_releases
from trimtab.errors import EnvironmentFault


def requirement() -> str:
    """Return the supported releases as a pip requirement."""
    row = torch_releases()
    major, minor = row.newest.split(".")
    return f"torch>={row.oldest},<{major}.{int(minor) + 1}"


def is_supported(release: str) -> bool:
    """Return whether trimtab supports a release of torch, such as 2.13.0+cu130."""
    row = torch_releases()
    first = _major_minor(release)
    return _major_minor(row.oldest) <= first <= _major_minor(row.newest)


def find_torch_release() -> str | None:
    """Return the release of the installed torch without importing it; None if there is no torch.

    A torch that was built in its own folder has no package metadata: its version.py states the release.
    """
    try:
        return version("torch")
    except PackageNotFoundError:
        spec = find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        file = Path(folder, "version.py")
        match = file.is_file() and re.search(r"__version__ = '([^']+)'", file.read_text(encoding="utf-8"))
        if match:
            return match[1]
    return None


def require_supported_torch() -> None:
    """Raise EnvironmentFault if torch is missing or its release is not supported."""
    row, release = torch_releases(), find_torch_release()
    if release is None:
        raise EnvironmentFault(
            "torch",
            found=f"torch is not installed for {sys.executable}",
            cure=f"Activate the environment that has it, or install it: pip install '{requirement()}'.",
        )
    if not is_supported(release):
        raise EnvironmentFault(
            f"torch {release}",
            found=f"trimtab supports torch {row.oldest} to {row.newest}, and {sys.executable} has {release}",
            cure=f"Install a supported one: pip install '{requirement()}'.",
        )


def _major_minor(release: str) -> tuple[int, ...]:
    """Return the major and minor number of a release.

    >>> _major_minor("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int(match) for match in re.findall(r"\d+", release)[:2])
