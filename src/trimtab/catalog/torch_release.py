"""Check that the installed torch release is supported."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

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


def require_supported_torch() -> None:
    """Raise EnvironmentFault if torch is missing or its release is not supported."""
    row = torch_releases()
    cure = f"Install a supported one: pip install '{requirement()}'."
    try:
        release = version("torch")
    except PackageNotFoundError:
        raise EnvironmentFault("torch", found="it is not installed", cure=cure) from None
    if not is_supported(release):
        raise EnvironmentFault(
            f"torch {release}",
            found=f"trimtab supports torch {row.oldest} to {row.newest}",
            cure=cure,
        )


def _major_minor(release: str) -> tuple[int, ...]:
    """Return the major and minor number of a release.

    >>> _major_minor("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int(match) for match in re.findall(r"\d+", release)[:2])
