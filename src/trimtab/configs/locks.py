"""One writer at a time in a folder, and whole files or none.

A lock is held on an open file, so that the system lets go of it when its process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NoReturn

from trimtab.errors import EnvironmentFault

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

FOLDER = ".trimtab"
"""Beside the files that are edited: backups and the lock."""
PATIENCE_S = 5.0
_SCRATCH = re.compile(r"\.trimtab-[0-9a-f]{12}-\d+\.tmp")


@contextmanager
def lock_folders(folders: Iterable[Path], patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold these folders, always in the same order, so that two who want both cannot wait for each other."""
    with ExitStack() as stack:
        for folder in sorted(set(folders)):
            stack.enter_context(_hold_lock(folder, patience_s))
            _remove_leftovers(folder)
        yield


@contextmanager
def _hold_lock(folder: Path, patience_s: float) -> Iterator[None]:
    path = make_home(folder) / "lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as problem:
        raise_os_error(path, problem, "the lock cannot be made")
    try:
        _wait_for_lock(handle, path, patience_s)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _wait_for_lock(handle: int, path: Path, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno not in (errno.EAGAIN, errno.EACCES):
                raise_os_error(path, problem, "the lock cannot be taken")
            if time.monotonic() >= until:
                owner = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
                raise EnvironmentFault(
                    str(path.parent.parent),
                    found=f"another trimtab, process {owner}, is writing here",
                    cure="Wait until it has finished, then try again.",
                ) from None
            time.sleep(0.02)
        else:
            return


def make_home(folder: Path) -> Path:
    """Our folder beside the files, made where it is missing; version control is told to pass it over."""
    path = folder / FOLDER
    try:
        path.mkdir(exist_ok=True)
        ignore = path / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")
    except OSError as problem:
        raise_os_error(path, problem, "the folder for backups cannot be made")
    return path


def _remove_leftovers(folder: Path) -> None:
    """Remove what a process that was killed has left: nobody else writes while the lock is ours."""
    for path in folder.iterdir():
        if _SCRATCH.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def scratch_path(path: Path) -> Path:
    """The name under which the new text of a file lies until it replaces the old."""
    short = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:12]  # a long name may leave no room for more
    return path.with_name(f".trimtab-{short}-{os.getpid()}.tmp")


def raise_os_error(path: Path, problem: OSError, what: str) -> NoReturn:
    """An error of the system, with what can be done about it."""
    cures = {
        errno.ENOSPC: "Free some space on this disk, then try again.",
        errno.EDQUOT: "Your quota on this disk is used up: free some of it, then try again.",
        errno.EFBIG: "The system limits the size of files (ulimit -f): raise the limit, then try again.",
        errno.EROFS: "The disk is mounted read-only: copy the file to another place and name that.",
        errno.EACCES: "Ask for the right to write there, or copy the file to another place and name that.",
        errno.EPERM: "Ask for the right to write there, or copy the file to another place and name that.",
    }
    raise EnvironmentFault(
        str(path),
        found=f"{what}: {problem.strerror or problem}. Nothing was changed",
        cure=cures.get(problem.errno or 0, "See to the cause, then try again."),
    ) from problem
