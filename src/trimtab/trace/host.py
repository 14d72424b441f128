"""How much memory of this host a tracing process really holds, and how much it may.

Fake tensors have no memory, so a trace needs little: whoever takes much is the job's own code, with numpy or
with tensors that it makes before anything is traced. Limits of the kernel do not help here: they count
addresses, of which torch's libraries take many, and not memory. So the processes are watched from outside.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from trimtab.errors import JobFailed, WrongUse
from trimtab.units import GIB

VARIABLE = "TRIMTAB_HOST_GIB"
LIMIT_GIB = 3.0
"""With the interpreter and torch that is under 4 GiB; a trace of a large model takes a tenth of it."""

SMALL = GIB // 2


def limit_bytes() -> int:
    """What tracing may hold in all; TRIMTAB_HOST_GIB says otherwise."""
    text = os.environ.get(VARIABLE, "")
    try:
        gib = float(text) if text else LIMIT_GIB
    except ValueError:
        gib = 0.0
    if not gib > 0:
        raise WrongUse(
            f"{VARIABLE}={text}", found="it is no number above 0", cure=f"Leave it out: {LIMIT_GIB:g} GiB."
        )
    return int(min(gib, 2**20) * GIB)


def resident_bytes(pid: int) -> int:
    """Memory that a process has for itself; what it shares with its original and with files is left out.

    0 for a process that is gone. Below half a GiB it is not asked what is shared, which takes time.
    """
    try:
        _, resident, mapped, *_ = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
        held = (int(resident) - int(mapped)) * mmap.PAGESIZE
        if held <= SMALL:
            return held
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0 if Path("/proc/self/smaps_rollup").exists() else _resident(pid)
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


def _resident(pid: int) -> int:
    """All memory of a process, on systems that do not say what is shared."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def too_much(given: str) -> JobFailed:
    """The error of a job that takes real memory while it is only looked at."""
    return JobFailed(
        given,
        found=f"it took more than {limit_bytes() / GIB:g} GiB of this host's memory while it was traced",
        cure=(
            "Make tensors in model() and batch() with torch on the default device, where they take none, or "
            f"allow more with {VARIABLE}=N."
        ),
    )
