"""Tell traces that serve all GPUs of one compute capability from those that serve one GPU only.

Every trace depends on the compute capability, which decides between kernels. Few depend on more: the job or
a library asks for the name, the memory or the number of multiprocessors, or cuDNN takes memory by them. All
other traces are made once for, say, H100 and H200.
"""

from __future__ import annotations

import mmap
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.spec import Device

GRACE = re.compile(r"\bG[HB]\d+", re.ASCII)
"""GPUs with an aarch64 (Grace) CPU: GH200, GB200 and similar."""


class _Notes:
    """What was noted in this process and its forks, which share the memory."""

    used = mmap.mmap(-1, 1)
    """1 as soon as code has used more than the common facts of the GPU."""


def casts_last_argument_first(device: Device) -> bool:
    """Whether torch casts the last argument first on the GPU's host: True for all hosts except Grace."""
    return GRACE.search(device.name) is None


def common_facts(device: Device) -> tuple[str, str, bool]:
    """Return the facts of a GPU that every trace depends on.

    >>> from trimtab.catalog.clusters import parse_cluster
    >>> h100, h200, t4 = (common_facts(parse_cluster(name).devices[0]) for name in ("H100", "H200", "T4"))
    >>> h100 == h200, h100 == t4
    (True, False)
    """
    return device.vendor, device.compute_capability or "", casts_last_argument_first(device)


def forget_special_facts() -> None:
    """Start with no fact noted, in memory that only this process and its later forks share."""
    _Notes.used = mmap.mmap(-1, 1)


def note_special_fact() -> None:
    """Note that more than the common facts of the GPU was used: the trace serves this GPU only."""
    _Notes.used[0] = 1


def is_for_one_device() -> bool:
    """Whether more than the common facts of the GPU was used, in this process or one of its forks."""
    return bool(_Notes.used[0])
