"""Turns the pretended CUDA device off while installed packages are imported.

Packages ask torch for its CUDA at import: for its version, for a driver, for kernels to load. On a build of
torch without CUDA such a question fails, or a package loads code that is not there. The job's own files, and
all code after it was imported, go on seeing the device. So do torch and the libraries that are known to
import well with it, because they choose kernels by what they see at import.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SEES_CUDA = {"torch", "triton", "transformers", "trimtab"}
"""Top-level packages that are imported with the pretended device."""
INSTALLED = ("site-packages", "dist-packages")


@functools.cache
def _library_folders() -> tuple[Path, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({Path(sysconfig.get_path(name)).resolve() for name in names})


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python or to an installed package, and not to the job.

    >>> is_installed("/usr/lib/python3/dist-packages/numpy/__init__.py"), is_installed("/home/me/job.py")
    (True, False)
    """
    path = Path(file)
    return any(part in INSTALLED for part in path.parts) or any(
        folder in path.parents for folder in _library_folders()
    )


def _match_without_values(module: Any) -> None:
    """Let scipy's linear_sum_assignment answer for costs without values: the sizes are what matters.

    Losses of detection match what a model found with what is there. Any matching has as many pairs.
    """
    whole = module.linear_sum_assignment

    @functools.wraps(whole)
    def linear_sum_assignment(cost_matrix: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(cost_matrix, "fake_mode"):
            return whole(cost_matrix, *args, **kwargs)
        import numpy as np

        pairs = min(cost_matrix.shape)
        return np.arange(pairs), np.arange(pairs)

    module.linear_sum_assignment = linear_sum_assignment


STAND_INS: dict[str, Callable[[Any], None]] = {"scipy.optimize": _match_without_values}
"""What is changed in a module after it was imported."""


def turn_off_at_import(turn: Callable[[bool], bool]) -> None:
    """From now on call `turn(False)` before a module of an installed package runs, and undo it afterwards.

    `turn` says whether the device was seen before.
    """
    whole = importlib.machinery.SourceFileLoader.exec_module

    def exec_module(loader: Any, module: Any) -> None:
        name, file = module.__name__, getattr(loader, "path", "") or ""
        sees = name.partition(".")[0] in SEES_CUDA or not is_installed(str(file))
        before = turn(sees)
        try:
            whole(loader, module)
        finally:
            turn(before)
        if name in STAND_INS:
            STAND_INS[name](module)

    importlib.machinery.SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign,assignment]
