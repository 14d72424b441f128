"""What a calibration program is, and the precisions that it runs in."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch

from trimtab.engine.build import use_build_defaults
from trimtab.engine.precision import set_tf32_flags, torch_dtype
from trimtab.spec import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class CalibrationProgram(NamedTuple):
    """A program: its name, the memory it needs, and the function that runs it."""

    name: str
    need_bytes: int
    run: Callable[[], None]


@contextlib.contextmanager
def use_precision(name: str) -> Iterator[None]:
    """Set autocast, default dtype and TF32 as trimtab does for a precision."""
    dtypes = Precision(name).dtypes
    set_tf32_flags(dtypes)
    half = None if dtypes.autocast is None else torch_dtype(dtypes.autocast)
    with use_build_defaults(dtypes, "cuda"), torch.autocast("cuda", dtype=half, enabled=half is not None):
        yield
