"""Keep a script's writes in a scratch folder and the script off the network, in the process that runs it.

`install_sandbox` works in layers:

1. Python's functions for files are replaced. A write goes to the scratch folder, and the script finds it
   there again (overlay.py), also if it is a Python module (written_modules.py).
2. Libraries that write files in their own native code get the path in the scratch folder (native_writers.py).
3. The kernel refuses all other writes, also of programs that the script starts (kernel_guard.py).
4. Connections to other machines fail, and the usual services get their switch for offline use (offline.py).

Only for a child process that runs one script and then exits: nothing is put back.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trimtab.scripts import native_writers, offline
from trimtab.scripts.kernel_guard import refuse_visible_writes, restrict_writes
from trimtab.scripts.overlay import PASSED_THROUGH, Overlay, real
from trimtab.scripts.sandbox_record import SandboxRecord
from trimtab.scripts.written_modules import follow_written_modules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SANDBOX_VARIABLE = "TRIMTAB_SANDBOX"
"""Environment variable for Pythons that the script starts: the scratch folder, and folders that stay real."""
STARTUP = """\
import sys
try:
    from trimtab.scripts.sandbox import join_sandbox
except ImportError:
    pass  # a Python without trimtab: the kernel guards it
else:
    join_sandbox()
# This file hides another of the same name, if there is one: run that as well.
sys.path[:] = [path for path in sys.path if path != {folder!r}]
own = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = own
"""
KEEPS_BUILTINS = frozenset({"posix", "_io", "trimtab.scripts.overlay"})
"""Modules whose names are left alone: Python's importer and the overlay need the real functions."""


def install_sandbox(
    scratch: Path,
    *,
    script: str = "",
    writable: Sequence[Path] = (),
    has_network: bool = False,
    is_pretended: Callable[[Any], bool] | None = None,
) -> SandboxRecord:
    """Keep this process's writes in a scratch folder and off the network; return the record of what it tries.

    `script` is the user's file, for the lines in the record. `writable` are folders or files that stay
    real, for the caller's own results. `is_pretended` tells whether a tensor has no
    memory, so that it cannot be saved; tensors that are fake, on `meta` or not on a CPU always count.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    allowed = [str(path.absolute()) for path in writable]
    overlay = Overlay(scratch, allowed)
    record = SandboxRecord(scratch=overlay.scratch, script=script)
    record.overlay = overlay
    os.environ.update(offline.sandbox_environment(Path(overlay.scratch)))
    sys.dont_write_bytecode = True
    tempfile.tempdir = os.environ["TMPDIR"]
    replacements = _replace_functions(overlay, record)
    replacements |= native_writers.install(overlay, record, is_pretended)
    if not has_network:
        replacements |= offline.cut_network(record)
    rebind(replacements)
    _rebind_defaults(tempfile._TemporaryFileCloser, replacements)  # type: ignore[attr-defined]
    follow_written_modules(overlay)
    _guard(overlay, record, allowed)
    _reach_children(overlay, allowed)
    _name_sockets_without_files()
    return record


def _name_sockets_without_files() -> None:
    """Let worker processes meet at addresses that are no files: the path of a file may be too long for one.

    A data loader's worker that cannot open its socket would leave the script waiting for ever.
    """
    if sys.platform != "linux":
        return
    import itertools
    import multiprocessing.connection as connections

    original = connections.arbitrary_address  # type: ignore[attr-defined]
    numbers = itertools.count()
    name = os.path.basename(tempfile.mktemp(prefix="trimtab-"))  # noqa: S306 - no file is made

    def choose_address(family: str) -> Any:
        if family != "AF_UNIX":
            return original(family)
        return f"\0{name}-{os.getpid()}-{next(numbers)}"

    connections.arbitrary_address = choose_address  # type: ignore[attr-defined]


def _reach_children(overlay: Overlay, writable: Sequence[str]) -> None:
    """Have every Python that the script starts join this sandbox: it runs sitecustomize first."""
    folder = os.path.join(overlay.scratch, "python")
    os.makedirs(folder, exist_ok=True)
    with real.open_file(os.path.join(folder, "sitecustomize.py"), "w", encoding="utf-8") as file:
        file.write(STARTUP.format(folder=folder))
    os.environ[SANDBOX_VARIABLE] = os.pathsep.join([overlay.scratch, *writable])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != folder]
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *paths])


def join_sandbox() -> None:
    """Install the sandbox that the environment names, in a Python that a script started."""
    scratch, *writable = os.environ.get(SANDBOX_VARIABLE, "").split(os.pathsep)
    if scratch and os.path.isdir(scratch):
        install_sandbox(Path(scratch), writable=[Path(path) for path in writable])


def _guard(overlay: Overlay, record: SandboxRecord, writable: Sequence[str]) -> None:
    """Have the kernel or, without it, an audit hook refuse all other writes."""
    allowed = [overlay.scratch, *PASSED_THROUGH[:2], *writable]
    reason = restrict_writes(allowed)
    record.guard = "landlock" if reason is None else "audit hook"
    if reason is not None:
        refuse_visible_writes(allowed)
        record.notes.append(f"{reason}: programs that the script starts can write files")


def _rebind_defaults(cls: type, replacements: dict[int, Any]) -> None:
    """Replace functions that methods of a class hold as default values of their arguments."""
    for method in vars(cls).values():
        defaults = getattr(method, "__defaults__", None)
        if defaults:
            method.__defaults__ = tuple(replacements.get(id(value), value) for value in defaults)


def rebind(replacements: dict[int, Any]) -> None:
    """Replace functions wherever a loaded module has a name for them: `from os import makedirs`."""
    for name, module in list(sys.modules.items()):
        members = getattr(module, "__dict__", None)
        if members is None or name in KEEPS_BUILTINS or name == __name__:
            continue
        for key, value in list(members.items()):
            if id(value) in replacements and not key.startswith("__"):
                members[key] = replacements[id(value)]


def _replace_functions(overlay: Overlay, record: SandboxRecord) -> dict[int, Any]:
    """Replace the functions of builtins, io, os and shutil; return the new ones by the old ones' ids."""
    functions = RedirectedFunctions(overlay, record)
    replacements: dict[int, Any] = {id(real.open_file): functions.open_file}
    builtins.open = io.open = functions.open_file
    for name in vars(real):
        replacement = getattr(functions, name, None)
        if name != "open_file" and replacement is not None:
            original = getattr(real, name)
            replacements[id(original)] = replacement
            setattr(os, name, replacement)
            for support in (os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
                if original in support:
                    support.add(replacement)
    # Else rmtree removes by file descriptor, which names no path.
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    return replacements


def _text(path: Any) -> str | None:
    """Return a path as text; None if it is a file descriptor or no path at all."""
    if isinstance(path, int) or path is None:
        return None
    try:
        return os.fsdecode(path)
    except TypeError:
        return None


def _like(path: Any, text: str) -> Any:
    """Return a text as bytes if the path was bytes."""
    return os.fsencode(text) if isinstance(path, bytes) else text


class _Entry:
    """An entry of a folder whose content is merged: has what os.DirEntry has."""

    def __init__(self, functions: RedirectedFunctions, folder: Any, name: str) -> None:
        self._functions = functions
        self.name: Any = _like(folder, name)
        self.path: Any = os.path.join(folder, self.name)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._functions.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def _has_kind(self, kind: int, *, follow: bool) -> bool:
        try:
            return self.stat(follow_symlinks=follow).st_mode & 0o170000 == kind
        except OSError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._has_kind(0o040000, follow=follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._has_kind(0o100000, follow=follow_symlinks)

    def is_symlink(self) -> bool:
        return self._has_kind(0o120000, follow=False)

    def is_junction(self) -> bool:
        return False

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class _LinkedEntry:
    """An entry of a folder that was named through a symbolic link: its path begins with that name."""

    def __init__(self, folder: Any, entry: Any) -> None:
        self._entry = entry
        self.name: Any = entry.name
        self.path: Any = os.path.join(folder, entry.name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return repr(self._entry)


class _Entries:
    """The result of scandir: an iterator, and a context manager that does nothing."""

    def __init__(self, entries: Sequence[_Entry | _LinkedEntry]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry | _LinkedEntry]:
        return self

    def __next__(self) -> _Entry | _LinkedEntry:
        return next(self._entries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class RedirectedFunctions:
    """The functions that replace those of `os`, by the same names, and `open_file` for `open`."""

    def __init__(self, overlay: Overlay, record: SandboxRecord) -> None:
        self.overlay = overlay
        self.record = record

    def _place(self, path: Any, dir_fd: int | None = None) -> str | None:
        """Return a path as text, made absolute if it is relative to an open folder."""
        text = _text(path)
        if text is None or dir_fd is None or text.startswith("/"):
            return text
        return os.path.join(real.readlink(f"/proc/self/fd/{dir_fd}"), text)

    def _call(self, name: str, path: Any, found: str, *arguments: Any, **options: Any) -> Any:
        """Call the real function for another path; its error names the path that was given."""
        try:
            return getattr(real, name)(_like(path, found), *arguments, **options)
        except OSError as error:
            if error.filename is not None:
                error.filename = path
            raise

    def open_file(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        text = _text(file)
        opener = options.get("opener") or (arguments[5] if len(arguments) > 5 else None)  # noqa: PLR2004
        if text is None or opener is not None or not isinstance(mode, str):
            return real.open_file(file, mode, *arguments, **options)
        is_writing = any(letter in mode for letter in "wax+")
        if is_writing:
            keep = "w" not in mode
            found = self.overlay.prepare_write(text, keep=keep, exclusive="x" in mode, create="r" not in mode)
            self.record.add_write(self.overlay, text, found)
        else:
            found = self.overlay.find(text)
        if found == text:
            return real.open_file(file, mode, *arguments, **options)
        stream = self._call("open_file", file, found, mode, *arguments, **options)
        raw = getattr(stream, "buffer", stream)
        raw = getattr(raw, "raw", raw)
        raw.name = file
        return stream

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        text = self._place(path, dir_fd)
        if text is None:
            return real.open(path, flags, mode, dir_fd=dir_fd)
        if flags & getattr(os, "O_TMPFILE", 0) == getattr(os, "O_TMPFILE", -1):
            found = os.environ["TMPDIR"]
        elif flags & WRITING_FLAGS:
            found = self.overlay.prepare_write(
                text,
                keep=not flags & os.O_TRUNC,
                exclusive=bool(flags & os.O_EXCL and flags & os.O_CREAT),
                create=bool(flags & os.O_CREAT),
            )
            self.record.add_write(self.overlay, text, found)
        else:
            found = self.overlay.find(text, follow=not flags & os.O_NOFOLLOW)
        if found == text:
            return real.open(path, flags, mode, dir_fd=dir_fd)
        return self._call("open", path, found, flags, mode)

    def _look(self, name: str, path: Any, *arguments: Any, follow: bool = True, **options: Any) -> Any:
        """Call a function that only reads."""
        text = self._place(path, options.get("dir_fd"))
        found = None if text is None else self.overlay.find(text, follow=follow)
        if found is None or found == text:
            return getattr(real, name)(path, *arguments, **options)
        return self._call(name, path, found, *arguments, **{**options, "dir_fd": None})

    def stat(self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> Any:
        options = {"dir_fd": dir_fd, "follow_symlinks": follow_symlinks}
        return self._look("stat", path, follow=follow_symlinks, **options)

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> Any:
        return self._look("lstat", path, follow=False, dir_fd=dir_fd)

    def access(self, path: Any, mode: int, **options: Any) -> bool:
        text = self._place(path, options.get("dir_fd"))
        if text is not None and mode & os.W_OK:
            # The script may write anywhere: it goes to the scratch folder.
            mode &= ~os.W_OK
        return self._look("access", path, mode, **options)

    def readlink(self, path: Any, *, dir_fd: int | None = None) -> Any:
        return self._look("readlink", path, follow=False, dir_fd=dir_fd)

    def _look_plain(self, name: str, path: Any, *arguments: Any, **options: Any) -> Any:
        text = _text(path)
        found = None if text is None else self.overlay.find(text)
        if found is None or found == text:
            return getattr(real, name)(path, *arguments, **options)
        return self._call(name, path, found, *arguments, **options)

    def statvfs(self, path: Any) -> Any:
        return self._look_plain("statvfs", path)

    def getxattr(self, path: Any, attribute: Any, **options: Any) -> Any:
        return self._look_plain("getxattr", path, attribute, **options)

    def listxattr(self, path: Any = None, **options: Any) -> Any:
        return self._look_plain("listxattr", path, **options)

    def listdir(self, path: Any = ".") -> Any:
        text = _text("." if path is None else path)
        if text is None or not self.overlay.is_merged(text):
            return self._look_plain("listdir", path)
        return [_like(path, name) for name in self.overlay.listdir(text)]

    def scandir(self, path: Any = ".") -> Any:
        given = "." if path is None else path
        text = _text(given)
        if text is None:
            return real.scandir(given)
        folder = os.fspath(given)
        if not self.overlay.is_merged(text):
            found = self.overlay.find(text)
            if found == text:
                return real.scandir(given)
            with self._call("scandir", given, found) as entries:
                return _Entries([_LinkedEntry(folder, entry) for entry in entries])
        return _Entries([_Entry(self, folder, name) for name in self.overlay.listdir(text)])

    def chdir(self, path: Any) -> None:
        text = _text(path)
        if text is None:
            return real.chdir(path)
        resolved = self.overlay.resolve(text)
        lower = self.overlay.lower(resolved)
        is_users = lower == resolved and os.path.isdir(resolved)
        try:
            return real.chdir(resolved if is_users else self.overlay.find(text))
        except OSError as error:
            error.filename = path
            if not is_users:
                raise
            return real.chdir(self.overlay.upper + resolved)

    def getcwd(self) -> str:
        return self.overlay.getcwd()

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self.overlay.mkdir(self._place(path, dir_fd) or "", mode)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        text = self._place(path, dir_fd) or ""
        self.record.measure(self.overlay, text)
        self.overlay.unlink(text)

    def remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.unlink(path, dir_fd=dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self.overlay.rmdir(self._place(path, dir_fd) or "")

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        source, target = self._place(src, src_dir_fd) or "", self._place(dst, dst_dir_fd) or ""
        first = self.overlay.resolve(source, follow=False)
        self.record.follow_rename(self.overlay, source, target)
        self.overlay.rename(source, target)
        if self.overlay.is_real(first) and not self.overlay.is_real(self.overlay.resolve(target)):
            # Written as a temporary file, and moved to its place when complete.
            self.record.add_path(self.overlay.resolve(target))

    def replace(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        self.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def symlink(
        self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None
    ) -> None:
        del target_is_directory  # for Windows
        self.overlay.symlink(os.fsdecode(src), self._place(dst, dir_fd) or "")

    def link(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **_: Any
    ) -> None:
        self.overlay.link(self._place(src, src_dir_fd) or "", self._place(dst, dst_dir_fd) or "")

    def _change(self, name: str, path: Any, *arguments: Any, **options: Any) -> Any:
        """Call a function that changes a file, on a copy of the user's."""
        text = self._place(path, options.get("dir_fd"))
        if text is None:
            return getattr(real, name)(path, *arguments, **options)
        resolved = self.overlay.resolve(text)
        if not self.overlay.is_real(resolved) and self.overlay.is_folder(resolved):
            # Times and permissions of a folder of the user are not worth a copy of the folder.
            found = self.overlay.upper + resolved
            if not os.path.lexists(found):
                return None
        else:
            found = self.overlay.prepare_write(text, keep=True, create=False)
        return self._call(
            name, path, found, *arguments, **({**options, "dir_fd": None} if "dir_fd" in options else options)
        )

    def truncate(self, path: Any, length: int) -> None:
        text = _text(path)
        found = None if text is None else self.overlay.prepare_write(text, keep=True, create=False)
        if found is None or found == text:
            real.truncate(path, length)
        else:
            self._call("truncate", path, found, length)

    def utime(self, path: Any, *arguments: Any, **options: Any) -> None:
        self._change("utime", path, *arguments, **options)

    def chmod(self, path: Any, mode: int, **options: Any) -> None:
        # The script must still be able to write its copy.
        self._change("chmod", path, mode | 0o600, **options)

    def chown(self, path: Any, *arguments: Any, **options: Any) -> None:
        self._change("chown", path, *arguments, **options)

    def lchown(self, path: Any, *arguments: Any) -> None:
        self._change("lchown", path, *arguments)

    def setxattr(self, path: Any, *arguments: Any, **options: Any) -> None:
        self._change("setxattr", path, *arguments, **options)

    def removexattr(self, path: Any, *arguments: Any, **options: Any) -> None:
        self._change("removexattr", path, *arguments, **options)

    def mkfifo(self, path: Any, mode: int = 0o666, *, dir_fd: int | None = None) -> None:
        real.mkfifo(
            self.overlay.prepare_write(self._place(path, dir_fd) or "", keep=False, exclusive=True), mode
        )
