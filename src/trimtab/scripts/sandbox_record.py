"""What a script tried to write and to reach on the network, each with the line of the script that did it."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.scripts.overlay import real

if TYPE_CHECKING:
    from types import FrameType

    from trimtab.scripts.overlay import Overlay

MOST_RECORDED = 1000
"""Later writes to new paths are only counted."""
SCRIPT, OTHER, LIBRARY = 0, 1, 2
"""Kinds of files, the one that says most to the user first."""
OWN_FOLDER = str(Path(__file__).parent.parent)
LIBRARY_FOLDERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {"<frozen", "<string"}
)


def find_user_line(script: str = "") -> str:
    """Return the file and line of the user's code that is running: `train.py:41`.

    That is the innermost frame of the script itself, else of a file outside Python and its installed
    packages, else the innermost frame outside trimtab.
    """
    candidates = _find_lines(sys._getframe(1), script)
    main = threading.main_thread()
    if candidates.keys() == {LIBRARY} and threading.current_thread() is not main:
        # A thread of a library writes for the script: say where the script is now. No name is given to the
        # frame here, or it would keep the script's open files alive.
        candidates |= _find_lines(sys._current_frames().get(main.ident or 0), script)
    return candidates[min(candidates)] if candidates else ""


def _find_lines(frame: FrameType | None, script: str) -> dict[int, str]:
    """Return the innermost line of each kind of file, from a frame outwards."""
    wanted = os.path.basename(script)
    candidates: dict[int, str] = {}
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(OWN_FOLDER):
            is_library = name.startswith(LIBRARY_FOLDERS) or "/site-packages/" in name
            is_script = wanted and os.path.basename(name) == wanted
            kind = LIBRARY if is_library else SCRIPT if is_script else OTHER
            candidates.setdefault(kind, f"{_shorten(name)}:{frame.f_lineno}")
        frame = frame.f_back
    return candidates


def _shorten(name: str) -> str:
    """Return a path as seen from the working directory, if that is shorter."""
    folder = real.getcwd() + "/"
    return name.removeprefix(folder)


@dataclass
class ScriptWrite:
    """A file that the script wrote, or would have written."""

    path: str
    where: str
    bytes: int | None = None
    """Size of the file, or for a placeholder the size that it stands for."""
    is_placeholder: bool = False
    """Only recorded: it holds tensors that have no memory here."""
    is_removed: bool = False


@dataclass
class NetworkAttempt:
    """A connection to another machine that was refused."""

    address: str
    where: str


@dataclass
class SandboxRecord:
    """What a script tried to write and to reach."""

    scratch: str
    script: str = ""
    guard: str = ""
    """What refuses writes that the replaced functions do not see: landlock, or audit hook."""
    writes: dict[str, ScriptWrite] = field(default_factory=dict)
    """By the path that the script used, made absolute."""
    more_writes: int = 0
    """Files written after the first thousand."""
    network: list[NetworkAttempt] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    overlay: Overlay | None = None

    def add_write(self, overlay: Overlay, path: str, found: str) -> ScriptWrite | None:
        """Record that a path is opened for writing; files that stay real are not recorded."""
        if not found.startswith(overlay.upper):
            return None
        return self.add_path(overlay.resolve(path))

    def add_path(self, resolved: str) -> ScriptWrite | None:
        """Record a write to a resolved path; None if there are too many."""
        known = self.writes.get(resolved)
        if known is not None:
            known.is_removed = False
            return known
        if len(self.writes) >= MOST_RECORDED:
            self.more_writes += 1
            return None
        self.writes[resolved] = ScriptWrite(resolved, find_user_line(self.script))
        return self.writes[resolved]

    def add_network(self, address: str) -> None:
        """Record an attempt to reach an address; a repeated one from the same line only once."""
        attempt = NetworkAttempt(address, find_user_line(self.script))
        if attempt not in self.network and len(self.network) < MOST_RECORDED:
            self.network.append(attempt)

    def measure(self, overlay: Overlay, path: str) -> None:
        """Keep the size of a file before the script removes it."""
        resolved = overlay.resolve(path, follow=False)
        write = self.writes.get(resolved)
        if write is not None:
            self._measure(overlay, write)
            write.is_removed = True

    def _measure(self, overlay: Overlay, write: ScriptWrite) -> None:
        if write.is_placeholder or write.is_removed:
            return
        with suppress(OSError):
            write.bytes = real.stat(overlay.upper + write.path).st_size

    def follow_rename(self, overlay: Overlay, source: str, target: str) -> None:
        """Record written files under their new paths."""
        first, second = overlay.resolve(source, follow=False), overlay.resolve(target, follow=False)
        for path in [path for path in self.writes if path == first or path.startswith(first + "/")]:
            write = self.writes.pop(path)
            write.path = second + path[len(first) :]
            self.writes[write.path] = write

    def to_builtins(self) -> dict[str, Any]:
        """Return the record as plain dicts and lists, with the sizes of the files as they are now."""
        for write in self.writes.values():
            if self.overlay is not None:
                self._measure(self.overlay, write)
        return {
            "guard": self.guard,
            "writes": [vars(write).copy() for write in self.writes.values()],
            "more_writes": self.more_writes,
            "network": [vars(attempt).copy() for attempt in self.network],
            "notes": list(self.notes),
        }
