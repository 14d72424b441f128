"""End a process when its parent ends, whatever ends the parent.

A parent that is killed cannot end its children. So every child asks the system for a signal when its parent
is gone (Linux), or looks for the parent twice a second in a thread (other systems).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
import time
from pathlib import Path

from trimtab.errors import JobFailed, WrongUse
from trimtab.units import GIB

PARENT = "TRIMTAB_PARENT"
"""Environment variable: the process id of whoever started this process."""
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl."""
LOOK_S = 0.5


def parent_variable() -> dict[str, str]:
    """Return what a child process needs in its environment to know its parent."""
    return {PARENT: str(os.getpid())}


def end_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends; at once if the parent is already gone.

    `parent` is the process id of the parent; without it, the environment says so.
    """
    told = os.environ.get(PARENT, "")
    first = parent or os.getppid()
    parent = parent or (int(told) if told.isdecimal() else first)
    signalled = _ask_for_signal()
    # The parent may have ended before the system was asked.
    if _is_gone(parent, first):
        _end()
    if not signalled:
        threading.Thread(target=_watch, args=(parent, first), daemon=True).start()


def _ask_for_signal() -> bool:
    """Ask Linux to kill this process when its parent ends; False where that is not possible."""
    if sys.platform != "linux":
        return False
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == 0)
    return False


def _watch(parent: int, first: int) -> None:
    while not _is_gone(parent, first):
        time.sleep(LOOK_S)
    _end()


def _is_gone(parent: int, first: int) -> bool:
    """Whether the parent has ended: this process has another parent now, or there is no such process."""
    if os.getppid() != first:
        return True
    if parent == first:
        return False
    # Something stands between the two, such as a script that starts Python.
    try:
        os.kill(parent, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _end() -> None:
    """End this process, and its session where it leads one: whatever the job has started ends with it."""
    if os.getpgrp() == os.getpid() == os.getsid(0):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


# How much memory of this host a tracing process really holds, and how much it may.
#
# Fake tensors have no memory, so a trace needs little: whoever takes much is the job's own code, with numpy
# or with tensors that it makes before anything is traced. Limits of the kernel do not help here: they count
# addresses, of which torch's libraries take many, and not memory. So the processes are watched from
# outside.


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
