"""Refuse a torch that trimtab does not support, before anything is run with it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from trimtab.catalog.tables import torch_releases
from trimtab.errors import EnvironmentFault


def requirement() -> str:
    """Return the supported releases as pip takes them."""
    row = torch_releases()
    major, minor = row.newest.split(".")
    return f"torch>={row.oldest},<{major}.{int(minor) + 1}"


def is_supported(release: str) -> bool:
    """Return whether trimtab supports a release of torch, such as 2.13.0+cu130."""
    row = torch_releases()
    first = _numbers(release)
    return _numbers(row.oldest) <= first <= _numbers(row.newest)


def require_supported_torch() -> None:
    """Raise EnvironmentFault where torch is missing, or of a release that trimtab does not support."""
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


def _numbers(release: str) -> tuple[int, ...]:
    """Major and minor number of a release.

    >>> _numbers("2.13.0+cpu")
    (2, 13)
    """
    return tuple(int(match) for match in re.findall(r"\d+", release)[:2])
