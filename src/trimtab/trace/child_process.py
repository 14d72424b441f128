"""Child processes: end them with their parent, and limit their memory and time.

A parent that is killed cannot end its children. So every child asks the system for a signal when its parent
ends (Linux), or checks for the parent twice a second in a thread (other systems).
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
"""Environment variable with the process id of the parent."""
PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl."""
POLL_S = 0.5


def parent_variable() -> dict[str, str]:
    """Return the environment variable that tells a child process its parent."""
    return {PARENT: str(os.getpid())}


def end_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends; at once if the parent is already gone.

    `parent` is the process id of the parent; default: from the environment.
    """
    variable = os.environ.get(PARENT, "")
    first = parent or os.getppid()
    parent = parent or (int(variable) if variable.isdecimal() else first)
    signalled = _ask_for_signal()
    # The parent may have ended before the signal was set up.
    if _is_gone(parent, first):
        _end_process()
    if not signalled:
        threading.Thread(target=_watch_parent, args=(parent, first), daemon=True).start()


def _ask_for_signal() -> bool:
    """Ask Linux to kill this process when its parent ends; return False if that is not possible."""
    if sys.platform != "linux":
        return False
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == 0)
    return False


def _watch_parent(parent: int, first: int) -> None:
    while not _is_gone(parent, first):
        time.sleep(POLL_S)
    _end_process()


def _is_gone(parent: int, first: int) -> bool:
    """Return whether the parent has ended: this process has a new parent, or the parent does not exist."""
    if os.getppid() != first:
        return True
    if parent == first:
        return False
    # Another process is between the two, such as a script that starts Python.
    try:
        os.kill(parent, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _end_process() -> None:
    """End this process, and its session if it leads one, with all processes that the job has started."""
    if os.getpgrp() == os.getpid() == os.getsid(0):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


# Host memory of tracing processes.
#
# Fake tensors have no memory, so a trace needs little. Only the job's own code can need much, with numpy or
# with tensors that it makes before tracing starts. Kernel limits (ulimit) do not help: they count addresses,
# of which torch's libraries reserve many, and not memory. So the parent watches its processes.


LIMIT_VARIABLE = "TRIMTAB_HOST_GIB"
LIMIT_GIB = 3.0
"""Below 4 GiB with the interpreter and torch; a trace of a large model needs a tenth of it."""


def memory_limit_bytes() -> int:
    """Return the memory limit of all tracing processes together; TRIMTAB_HOST_GIB overrides it."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        gib = float(text) if text else LIMIT_GIB
    except ValueError:
        gib = 0.0
    if not gib > 0:
        raise WrongUse(
            f"{LIMIT_VARIABLE}={text}",
            found="it is no number above 0",
            cure=f"Leave it out: {LIMIT_GIB:g} GiB.",
        )
    return int(min(gib, 2**20) * GIB)


def exceeds_memory_limit(*pids: int, held_bytes: int = 0) -> bool:
    """Return whether processes together have more private memory than tracing may take.

    `held_bytes` are added: memory that they share and that is not private to any of them.
    The system walks through all pages of a process to find its private ones, which takes long for a large
    process. So they are only counted if all pages that belong to no file are too many.
    """
    limit = memory_limit_bytes() - held_bytes
    return sum(map(_anonymous_bytes, pids)) > limit and sum(map(resident_bytes, pids)) > limit


def _anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that belongs to no file, with what it shares with its parent."""
    try:
        _, resident, mapped, *_ = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    except OSError:
        return resident_bytes(pid)
    return (int(resident) - int(mapped)) * mmap.PAGESIZE


def resident_bytes(pid: int) -> int:
    """Return the private memory of a process, without memory shared with its parent and with files.

    0 for a process that has ended.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0 if Path("/proc/self/smaps_rollup").exists() else _psutil_resident_bytes(pid)
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


def _psutil_resident_bytes(pid: int) -> int:
    """Return all memory of a process, on systems that do not report shared memory."""
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


# Time limits.
#
# On a busy machine, a process takes longer without doing more. So the time in which it waits for a CPU does
# not count, up to a limit: a process that never gets a CPU has to end as well.


LONGEST_WAIT = 3
"""How many times its time limit a process may wait for a CPU."""


def has_timed_out(taken_s: float, waited_s: float, timeout_s: float) -> bool:
    """Return whether a process took too long, apart from the time in which it waited for a CPU."""
    return taken_s - min(waited_s, LONGEST_WAIT * timeout_s) > timeout_s


def read_waited_s(process: int) -> float:
    """Return how long a process was ready and waited for a CPU; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def memory_limit_error(given: str) -> JobFailed:
    """Return the error of a job that takes too much host memory while it is traced."""
    return JobFailed(
        given,
        found=(
            f"it took more than {memory_limit_bytes() / GIB:g} GiB of this host's memory while it was traced"
        ),
        cure=(
            "Make tensors in model() and batch() with torch on the default device, where they take none, or "
            f"allow more with {LIMIT_VARIABLE}=N."
        ),
    )
