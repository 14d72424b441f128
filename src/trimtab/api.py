"""The verbs of trimtab as functions; `trimtab.detect()` and the command `trimtab detect` are one thing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from trimtab.catalog.words import Word
    from trimtab.spec import Cluster

VERBS = ("detect", "explain")
"""What works today."""


def detect() -> Cluster:
    """The hardware that this process may use.

    >>> trimtab.detect().nodes[0].devices  # doctest: +SKIP
    (Device(index=0, name='NVIDIA H200', ...),)
    """
    from trimtab.probe.detect import detect as look

    return look()


def cluster(on: str | Path | None = None) -> Cluster:
    """The cluster that a string or a detect file describes, without the hardware; None is this machine.

    >>> len(cluster("4xA100-40GB").nodes[0].devices)
    4
    """
    from os import PathLike, fspath
    from pathlib import Path

    from trimtab.catalog.clusters import from_file, stated
    from trimtab.errors import WrongUse

    if on is None:
        return detect()
    if isinstance(on, PathLike):
        return from_file(Path(fspath(on)))
    if not isinstance(on, str):
        raise WrongUse(
            f"cluster({on!r})",
            found=f"it is of type {type(on).__name__}",
            cure="Give a string such as '4xA100-40GB', the path of a detect file, or None for this machine.",
        )
    return stated(on)


def explain(word: str) -> Word:
    """A knob, strategy or term in plain English.

    >>> explain("oom").name
    'out-of-memory'
    """
    from trimtab.catalog.words import word as look_up

    return look_up(word, VERBS)
