"""The machine that a benchmark ran on, in words: every program here prints them above its figures."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version

from trimtab.units import plural


def machine() -> str:
    """Return architecture, cores and versions, such as "aarch64, 2 cores, Python 3.11.7, torch 2.13.0"."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    many = plural(cores, "core")
    return f"{platform.machine()}, {many}, Python {platform.python_version()}, torch {version('torch')}"
