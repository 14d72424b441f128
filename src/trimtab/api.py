"""The verbs of trimtab as functions; `trimtab.detect()` and the command `trimtab detect` are one thing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def cluster(on: str) -> Cluster:
    """The cluster that a string or a detect file describes, without the hardware.

    >>> len(cluster("4xA100-40GB").nodes[0].devices)
    4
    """
    from trimtab.catalog.clusters import stated

    return stated(on)


def explain(word: str) -> Word:
    """A knob, strategy or term in plain English.

    >>> explain("oom").name
    'out-of-memory'
    """
    from trimtab.catalog.words import word as look_up

    return look_up(word, VERBS)
