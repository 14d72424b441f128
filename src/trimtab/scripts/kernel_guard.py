"""Have the kernel refuse writes outside a scratch folder, for this process and all that it starts.

Linux 5.13 and newer can do this without privileges: Landlock. Where it is missing or switched off, an audit
hook refuses what Python itself can see; programs that the script starts are then not guarded. Landlock guards
names and contents of files, not their times and permissions.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any

from trimtab.scripts.overlay import PASSED_THROUGH, is_below, real

if TYPE_CHECKING:
    from collections.abc import Sequence

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls; the numbers are the same on x86-64 and aarch64."""
PR_SET_NO_NEW_PRIVS = 38
RULE_PATH_BENEATH = 1
VERSION_FLAG = 1
ALL_THREADS_FLAG, ALL_THREADS_SINCE = 1 << 3, 8

WRITE_FILE, REMOVE_FOLDER, REMOVE_FILE = 1 << 1, 1 << 4, 1 << 5
MAKE_ANY = sum(1 << bit for bit in range(6, 13))
"""Make a device, folder, file, socket, pipe or link."""
REFER, REFER_SINCE = 1 << 13, 2
"""Link or rename between folders."""
TRUNCATE, TRUNCATE_SINCE = 1 << 14, 3
ONLY_FOLDERS = REMOVE_FOLDER | REMOVE_FILE | MAKE_ANY | REFER
"""Rights that a rule for a single file may not contain."""

WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
AUDITED = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.mkdir": (0,),
    "os.rmdir": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.utime": (0,),
    "os.setxattr": (0,),
    "sqlite3.connect": (0,),
}
"""Audit events that change files, with the positions of the paths that they change."""


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_version() -> int:
    """Return the version of Landlock that this kernel has; 0 if none."""
    if not sys.platform.startswith("linux"):
        return 0
    version = _library().syscall(CREATE_RULESET, None, 0, VERSION_FLAG)
    return max(0, int(version))


def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def restrict_writes(folders: Sequence[str]) -> str | None:
    """Let this process and its children write only below folders, for good.

    Return None if done, else why not.
    """
    version = landlock_version()
    if version == 0:
        return "the kernel has no Landlock"
    rights = WRITE_FILE | REMOVE_FOLDER | REMOVE_FILE | MAKE_ANY
    rights |= REFER if version >= REFER_SINCE else 0
    rights |= TRUNCATE if version >= TRUNCATE_SINCE else 0
    library = _library()
    attributes = _RulesetAttributes(handled_access_fs=rights)
    ruleset = library.syscall(CREATE_RULESET, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
    if ruleset < 0:
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    try:
        for folder in folders:
            _allow(library, ruleset, folder, rights)
        if library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return f"no_new_privs: {os.strerror(ctypes.get_errno())}"
        flags = ALL_THREADS_FLAG if version >= ALL_THREADS_SINCE else 0
        if library.syscall(RESTRICT_SELF, ruleset, flags) != 0:
            return f"Landlock: {os.strerror(ctypes.get_errno())}"
    finally:
        os.close(ruleset)
    return None


def _allow(library: Any, ruleset: int, folder: str, rights: int) -> None:
    """Add a rule for a folder or file; one that does not exist needs none."""
    try:
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        allowed = rights if os.path.isdir(folder) else rights & ~ONLY_FOLDERS
        rule = _PathBeneath(allowed_access=allowed, parent_fd=descriptor)
        library.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)


def refuse_visible_writes(folders: Sequence[str]) -> None:
    """Add an audit hook that refuses writes outside folders, as far as Python sees them."""
    allowed = (*folders, *PASSED_THROUGH)

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & WRITING_FLAGS:
                return
            paths: tuple[Any, ...] = (path,)
        elif event in AUDITED:
            paths = tuple(arguments[position] for position in AUDITED[event])
        else:
            return
        for path in paths:
            if isinstance(path, str | bytes) and not _is_allowed(os.fsdecode(path), allowed):
                raise PermissionError(
                    1, "trimtab lets a script write to its scratch folder only", os.fsdecode(path)
                )

    sys.addaudithook(check)


def _is_allowed(path: str, allowed: Sequence[str]) -> bool:
    whole = os.path.normpath(path if path.startswith("/") else os.path.join(real.getcwd(), path))
    return path == ":memory:" or any(is_below(whole, folder) for folder in allowed)
