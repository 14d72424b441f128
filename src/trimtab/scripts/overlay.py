"""Show a script the user's files with its own changes on top, while the changes go to a scratch folder.

A file that the script writes at PATH is stored at SCRATCH/files/PATH, and found there when it is read again.
A file of the user that is removed or renamed is only hidden. The functions are named as in `os`, and so are
their errors.

`real` holds the functions of `os` as they were before a sandbox replaced them; nothing here calls `os.path`
functions that look at the disk, because these call the replaced ones.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat as stat_modes
from contextlib import suppress
from os.path import dirname, join, normpath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

REAL_NAMES = (
    "open stat lstat access listdir scandir readlink chdir getcwd mkdir rename replace remove unlink rmdir "
    "symlink link truncate utime chmod chown lchown statvfs mkfifo setxattr removexattr getxattr listxattr"
)
real: Any = SimpleNamespace(
    **{name: getattr(os, name) for name in REAL_NAMES.split() if hasattr(os, name)}, open_file=open
)

PASSED_THROUGH = ("/dev", "/proc", "/sys")
"""Devices, pipes and the kernel's own files stay real."""
MOST_COPIED_BYTES = 256 * 2**20
"""A larger file is not copied before it is changed."""
MOST_LINKS = 40
"""As many symbolic links in a path as Linux follows."""


def is_below(path: str, folder: str) -> bool:
    """Return whether a path is a folder or in it.

    >>> is_below("/a/b", "/a"), is_below("/ab", "/a")
    (True, False)
    """
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def put_files(texts: Mapping[str, str], scratch: Path) -> None:
    """Put texts where an overlay of this scratch folder finds them in place of the user's files."""
    for path, text in texts.items():
        place = join(os.path.realpath(scratch), "files") + os.path.realpath(path)
        os.makedirs(dirname(place), exist_ok=True)
        with open(place, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def make_error(number: int, *paths: str) -> OSError:
    """Return the error that the kernel would give for a path."""
    text = os.strerror(number)
    return (
        OSError(number, text, paths[0])
        if len(paths) == 1
        else OSError(number, text, paths[0], None, paths[1])
    )


class Overlay:
    """The user's files with the script's changes on top."""

    def __init__(self, scratch: Path, writable: Sequence[str] = ()) -> None:
        self.passed_through = (*PASSED_THROUGH, *map(os.path.realpath, writable))
        self.scratch = os.path.realpath(scratch)
        self.upper = join(self.scratch, "files")
        self.hidden: set[str] = set()
        """Paths whose real file the script removed or replaced; everything below is hidden as well."""
        self.moved: dict[str, str] = {}
        """Real file or folder that the script moved to a path."""
        self.links: dict[str, str] = {}
        """Symbolic links that the script made."""
        self._targets: dict[str, str | None] = {}
        self._folders: dict[str, str] = {}
        """Resolved paths of folders; emptied by every change of a link or a name."""
        _make_folders(self.upper)

    # Paths.

    def is_real(self, path: str) -> bool:
        """Return whether an absolute path is left alone: devices, and what is in the scratch folder."""
        if is_below(path, self.scratch):
            return not is_below(path, self.upper)
        return any(is_below(path, folder) for folder in self.passed_through)

    def absolute(self, path: str) -> str:
        """Return an absolute path as the script knows it; links are only resolved if it goes up with `..`."""
        whole = path if path.startswith("/") else f"{self.getcwd()}/{path}"
        if ".." in whole.split("/"):
            return self.resolve(whole, follow=False)
        whole = normpath(whole)
        if is_below(whole, self.upper):
            return whole[len(self.upper) :] or "/"
        return whole

    def resolve(self, path: str, *, follow: bool = True) -> str:
        """Return the absolute path without symbolic links, as the script sees it.

        A link at the end of the path stays with `follow=False`.
        """
        whole = path if path.startswith("/") else f"{self.getcwd()}/{path}"
        parent, _, name = whole.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            return self._walk("", whole, follow=follow)
        if parent not in self._folders:
            self._folders[parent] = self._walk("", parent, follow=True).rstrip("/")
        return self._walk(self._folders[parent], name, follow=follow)

    def _walk(self, current: str, path: str, *, follow: bool) -> str:
        """Go from a resolved folder along a path, and return where it ends."""
        left, links = path.split("/")[::-1], 0
        while left:
            part = left.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if current and not self.is_folder(current):
                    raise self.missing_error(f"{current}/..", path)
                current = current.rpartition("/")[0]
                continue
            step = f"{current}/{part}"
            target = self._link_target(step) if left or follow else None
            if target is None:
                current = step
                continue
            links += 1
            if links > MOST_LINKS:
                raise make_error(errno.ELOOP, path)
            left.extend(target.split("/")[::-1])
            current = "" if target.startswith("/") else current
        current = current or "/"
        return current[len(self.upper) :] or "/" if is_below(current, self.upper) else current

    def _link_target(self, path: str) -> str | None:
        if path in self.links:
            return self.links[path]
        lower = self.lower(path)
        if lower is None:
            return None
        if lower not in self._targets:
            try:
                self._targets[lower] = real.readlink(lower)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    return None
                self._targets[lower] = None
        target = self._targets[lower]
        is_replaced = target is not None and _lstat(self.upper + path) is not None
        return None if is_replaced else target

    def lower(self, path: str) -> str | None:
        """Return the user's own file behind a resolved path; None if the script removed it."""
        if not self.hidden and not self.moved:
            return path
        place = path
        while True:
            if place in self.moved:
                return self.moved[place] + path[len(place) :]
            if place in self.hidden:
                return None
            if place in ("/", ""):
                return path
            place = dirname(place)

    def find(self, path: str, *, follow: bool = True) -> str:
        """Return where the file of a path really is, to read it."""
        whole = self.absolute(path)
        if self.is_real(whole):
            return path
        resolved = self.resolve(whole, follow=follow)
        if self.is_real(resolved):
            return resolved
        upper = self.upper + resolved
        if _lstat(upper) is not None:
            return upper
        lower = self.lower(resolved)
        # A path that does not exist, so that the caller gets the usual error.
        return upper if lower is None else path if lower == whole else lower

    def state(self, resolved: str) -> os.stat_result | None:
        """Return the status of a resolved path as the script sees it; None if it does not exist."""
        status = _lstat(self.upper + resolved)
        if status is None and (lower := self.lower(resolved)) is not None:
            status = _lstat(lower)
        return status

    def missing_error(self, resolved: str, *paths: str) -> OSError:
        """Return the error for a path that does not exist; it differs if a file is in place of a folder."""
        parent = dirname(resolved)
        while parent != "/" and self.state(parent) is None:
            parent = dirname(parent)
        return make_error(errno.ENOENT if self.is_folder(parent) else errno.ENOTDIR, *paths)

    def is_folder(self, resolved: str) -> bool:
        """Return whether a resolved path is a folder for the script."""
        status = self.state(resolved)
        return status is not None and stat_modes.S_ISDIR(status.st_mode)

    # Changes.

    def prepare_write(self, path: str, *, keep: bool, exclusive: bool = False, create: bool = True) -> str:
        """Return where to write a path: in the scratch folder, after the user's content if it is kept."""
        whole = self.absolute(path)
        if self.is_real(whole):
            return path
        resolved = self.resolve(whole)
        if self.is_real(resolved):
            return resolved
        status = self.state(resolved)
        if exclusive and (status is not None or self.state(self.resolve(whole, follow=False)) is not None):
            raise make_error(errno.EEXIST, path)
        if status is None and not create:
            raise self.missing_error(resolved, path)
        if status is not None and not stat_modes.S_ISREG(status.st_mode):
            if stat_modes.S_ISDIR(status.st_mode):
                raise make_error(errno.EISDIR, path)
            return path  # a pipe, a socket or a device
        upper = self.upper + resolved
        is_new = _lstat(upper) is None
        self._make_parents(resolved, path)
        if keep and is_new and (lower := self.lower(resolved)) is not None and status is not None:
            self._copy(lower, upper, status.st_size)
        return upper

    def _copy(self, lower: str, upper: str, size: int) -> None:
        """Copy a file of the user; of a very large one, only its length."""
        if size > MOST_COPIED_BYTES:
            with real.open_file(upper, "wb") as target:
                target.truncate(size)
            return
        with real.open_file(lower, "rb") as source, real.open_file(upper, "wb") as target:
            shutil.copyfileobj(source, target, 2**20)

    def _make_parents(self, resolved: str, path: str) -> None:
        parent = dirname(resolved)
        if not self.is_folder(parent):
            raise self.missing_error(resolved, path)
        _make_folders(self.upper + parent)

    def make_folder(self, resolved: str) -> None:
        """Make the script's own version of a folder that exists for it."""
        _make_folders(self.upper + resolved)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        """Make a folder."""
        whole = self.absolute(path)
        resolved = self.resolve(whole, follow=False)
        if self.is_real(whole) or self.is_real(resolved):
            return real.mkdir(path, mode)
        if self.state(resolved) is not None:
            raise make_error(errno.EEXIST, path)
        self._make_parents(resolved, path)
        self._folders.clear()
        return real.mkdir(self.upper + resolved)

    def unlink(self, path: str) -> None:
        """Remove a file or a symbolic link."""
        whole = self.absolute(path)
        resolved = self.resolve(whole, follow=False)
        if self.is_real(whole) or self.is_real(resolved):
            return real.unlink(path)
        status = self.state(resolved)
        if status is None:
            raise self.missing_error(resolved, path)
        if stat_modes.S_ISDIR(status.st_mode):
            raise make_error(errno.EISDIR, path)
        if _lstat(self.upper + resolved) is not None:
            real.unlink(self.upper + resolved)
        return self._hide(resolved)

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        whole = self.absolute(path)
        resolved = self.resolve(whole, follow=False)
        if self.is_real(whole) or self.is_real(resolved):
            return real.rmdir(path)
        if not self.is_folder(resolved):
            is_missing = self.state(resolved) is None
            raise self.missing_error(resolved, path) if is_missing else make_error(errno.ENOTDIR, path)
        if self.listdir(resolved):
            raise make_error(errno.ENOTEMPTY, path)
        if _lstat(self.upper + resolved) is not None:
            real.rmdir(self.upper + resolved)
        return self._hide(resolved)

    def _hide(self, resolved: str) -> None:
        """Hide the user's own file at a path, and forget what was moved or linked there."""
        self.links.pop(resolved, None)
        self.moved.pop(resolved, None)
        self._folders.clear()
        lower = self.lower(resolved)
        if lower is not None and _lstat(lower) is not None:
            self.hidden.add(resolved)

    def rename(self, source: str, target: str) -> None:
        """Move a file or folder, over an existing file if there is one."""
        first, second = self.resolve(source, follow=False), self.resolve(target, follow=False)
        if self.is_real(first) and self.is_real(second):
            return real.rename(source, target)
        if self.is_real(first) or self.is_real(second):
            return self._move_across(source, target, first, second)
        status, before = self.state(first), self.state(second)
        if status is None:
            raise self.missing_error(first, source, target)
        if first == second:
            return None
        if second.startswith(first + "/"):
            raise make_error(errno.EINVAL, source, target)
        if first.startswith(second + "/"):
            raise make_error(errno.ENOTEMPTY, source, target)
        self._check_target(stat_modes.S_ISDIR(status.st_mode), before, second, (source, target))
        self._make_parents(second, target)
        if before is not None:
            _remove(self.upper + second)
            self._hide(second)
        lower = self.lower(first)
        if lower is not None and _lstat(lower) is not None:
            self.moved[second] = lower
        self._rekey(first, second)
        if _lstat(self.upper + first) is not None:
            _make_folders(dirname(self.upper + second))
            _move(self.upper + first, self.upper + second)
        return self._hide(first)

    def _check_target(
        self, is_folder: bool, before: os.stat_result | None, second: str, paths: tuple[str, str]
    ) -> None:
        """Raise as the kernel does if something at the target is in the way."""
        if before is None:
            return
        if stat_modes.S_ISDIR(before.st_mode):
            if not is_folder:
                raise make_error(errno.EISDIR, *paths)
            if self.listdir(second):
                raise make_error(errno.ENOTEMPTY, *paths)
        elif is_folder:
            raise make_error(errno.ENOTDIR, *paths)

    def _rekey(self, first: str, second: str) -> None:
        """Let everything below a moved folder follow it."""
        for path in [path for path in self.hidden if path.startswith(first + "/")]:
            self.hidden.add(second + path[len(first) :])
        for table in (self.moved, self.links):
            for path in [path for path in table if is_below(path, first) and path != second]:
                table[second + path[len(first) :]] = table.pop(path)

    def _move_across(self, source: str, target: str, first: str, second: str) -> None:
        """Move between the scratch folder itself (temporary files) and the rest."""
        if self.is_real(first):
            if _is_folder(first):
                raise make_error(errno.EXDEV, source, target)
            _move(first, self.prepare_write(second, keep=False))
            return
        found = self.find(first, follow=False)
        if _is_folder(found):
            raise make_error(errno.EXDEV, source, target)
        with real.open_file(found, "rb") as stream, real.open_file(second, "wb") as copy:
            shutil.copyfileobj(stream, copy)
        self.unlink(first)

    def symlink(self, target: str, path: str) -> None:
        """Make a symbolic link."""
        resolved = self.resolve(path, follow=False)
        if self.is_real(resolved):
            return real.symlink(target, path)
        if self.state(resolved) is not None:
            raise make_error(errno.EEXIST, target, path)
        self._make_parents(resolved, path)
        real.symlink(target, self.upper + resolved)
        self.links[resolved] = target
        self._folders.clear()
        return None

    def link(self, source: str, path: str) -> None:
        """Make a second name for a file; of a file of the user, for its copy."""
        first, second = self.resolve(source, follow=False), self.resolve(path, follow=False)
        found = self.find(first, follow=False)
        if self.is_real(second):
            return real.link(found, path)
        if _lstat(found) is None:
            raise self.missing_error(first, source, path)
        if self.state(second) is not None:
            raise make_error(errno.EEXIST, source, path)
        kind = stat_modes.S_IFMT(real.lstat(found).st_mode)
        if kind == stat_modes.S_IFDIR:
            raise make_error(errno.EPERM, source, path)
        if kind == stat_modes.S_IFLNK:
            return self.symlink(real.readlink(found), path)
        self._make_parents(second, path)
        if not is_below(found, self.scratch):
            found = self.prepare_write(first, keep=True, create=False)
        return real.link(found, self.upper + second)

    # Folders.

    def listdir(self, path: str) -> list[str]:
        """Return the names in a folder: the user's that are not hidden, and the script's."""
        resolved = self.resolve(path)
        lower = None if self.is_real(resolved) else self.lower(resolved)
        status = self.state(resolved)
        if status is None:
            raise self.missing_error(resolved, path)
        if not stat_modes.S_ISDIR(status.st_mode):
            raise make_error(errno.ENOTDIR, path)
        names: dict[str, None] = {}
        prefix = "/" if resolved == "/" else resolved + "/"
        if lower is not None and _is_folder(lower):
            names |= {name: None for name in real.listdir(lower) if prefix + name not in self.hidden}
        if _is_folder(self.upper + resolved):
            names |= dict.fromkeys(real.listdir(self.upper + resolved))
        names |= {place[len(prefix) :]: None for place in self.moved if dirname(place) == resolved}
        return list(names)

    def is_merged(self, path: str) -> bool:
        """Return whether a folder differs from the user's own."""
        resolved = self.resolve(path)
        if self.is_real(resolved):
            return False
        return (
            _lstat(self.upper + resolved) is not None
            or self.lower(resolved) != resolved
            or any(dirname(place) == resolved for place in (*self.hidden, *self.moved))
        )

    def getcwd(self) -> str:
        """Return the working directory as the script knows it."""
        folder: str = real.getcwd()
        return (folder[len(self.upper) :] or "/") if is_below(folder, self.upper) else folder

    def written(self) -> Iterator[tuple[str, int]]:
        """Yield every file that the script left, with its size."""
        yield from _walk_files(self.upper, len(self.upper))


def _walk_files(folder: str, prefix: int) -> Iterator[tuple[str, int]]:
    with real.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk_files(entry.path, prefix)
            elif entry.is_file(follow_symlinks=False):
                yield entry.path[prefix:], entry.stat(follow_symlinks=False).st_size


def _lstat(path: str) -> os.stat_result | None:
    try:
        status: os.stat_result = real.lstat(path)
    except (OSError, ValueError):
        return None
    return status


def _is_folder(path: str) -> bool:
    try:
        return stat_modes.S_ISDIR(real.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _make_folders(path: str) -> None:
    """Make a folder and those above it, if they are missing."""
    if _lstat(path) is None:
        _make_folders(dirname(path))
        with suppress(FileExistsError):  # another process of the script was faster
            real.mkdir(path)


def _remove(path: str) -> None:
    """Remove a file or an empty folder, if it exists."""
    status = _lstat(path)
    if status is not None:
        remove: Callable[[str], None] = real.rmdir if stat_modes.S_ISDIR(status.st_mode) else real.unlink
        remove(path)


def _move(source: str, target: str) -> None:
    """Rename in the scratch folder; copy where the kernel's guard does not allow renames between folders."""
    try:
        return real.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    if _is_folder(source):
        _make_folders(target)
        for name in real.listdir(source):
            _move(join(source, name), join(target, name))
        real.rmdir(source)
        return None
    with real.open_file(source, "rb") as stream, real.open_file(target, "wb") as copy:
        shutil.copyfileobj(stream, copy)
    return real.unlink(source)
