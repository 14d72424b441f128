"""End a process when its parent ends, whatever ends the parent.

A parent that is killed cannot end its children. So every child asks the system for a signal when its parent
is gone (Linux), or looks for the parent twice a second in a thread (other systems).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

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
