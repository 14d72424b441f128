"""Config files edited on disk: all of them or none, with a backup, and back again.

    wanted = [Wanted(file="train.yaml", changes={("batch_size",): 8})]
    ready = prepared(wanted)        # read, edited and checked in memory; nothing is written
    print(ready[0].diff())
    write(ready, words="plan of slm on 4xH100")

Every new text is on the disk before the first file is replaced, so that a full disk changes nothing, and each
replacement is one rename, so that a process that is killed leaves the old file or the new one.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_in
from pathlib import Path
from typing import Any

from trimtab.configs import backups, documents, texts
from trimtab.configs.backups import MANIFEST, Backup, SavedFile, hash_bytes
from trimtab.configs.locks import lock_folders, raise_os_error, scratch_path
from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.spec.base import Noun

_DIFF_LINES = 40
"""As many of a diff as an error shows."""
Replace = Callable[[Path, Path], Any]


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """What is to change in one file."""

    file: str
    """As the user wrote it, or as it was found in a folder that the user named."""
    changes: Mapping[tuple[str | int, ...], Any]
    beside: bool = False
    """Write a literal in place of a computed value, and keep that in a comment."""
    add: bool = False
    """Add keys that are missing."""
    kind: str | None = None
    """The format, where the name of the file does not tell it."""
    named: bool = True
    """Whether the user named the file itself."""


class WriteResult(Noun, frozen=True, kw_only=True):
    """What was done."""

    files: tuple[str, ...] = ()
    """Those that are new now."""
    unchanged: tuple[str, ...] = ()
    """Those that were so already, and were not touched."""
    backups: tuple[str, ...] = ()
    """Folders with the old texts."""
    said: tuple[str, ...] = ()
    """What the user should know."""


class RevertResult(Noun, frozen=True, kw_only=True):
    """What was put back."""

    file: str
    number: int
    """Of the backup that the file is like now."""
    backup: str | None = None
    """The folder that holds what was there before; None where the file was like that already."""
    diff: str = ""


@dataclass(frozen=True, kw_only=True)
class PreparedFile:
    """A file before and after, with nothing written yet."""

    file: str
    real: Path
    """The file itself, where a link was named."""
    before: bytes
    after: bytes

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return self.before != self.after

    def diff(self) -> str:
        """The change as a unified diff; empty where there is none."""
        return unified_diff(self.before, self.after, self.file)


def unified_diff(before: bytes, after: bytes, name: str) -> str:
    """A unified diff of two texts, each line as `diff -u` shows it."""
    old, new = (text.decode(errors="replace").splitlines(keepends=True) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"{name} (now)", f"{name} (new)")
    return "".join(
        line.replace("\r\n", "\n") if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in lines
    )


def prepare_files(
    wanted: Sequence[FileChange], *, folder: Path | None = None, roots: Sequence[Path] = ()
) -> list[PreparedFile]:
    """Every file read, edited and checked; an error for one is an error for all.

    `folder` is where the user stands, `roots` are folders that the user named.
    """
    merged: dict[Path, FileChange] = {}
    for request in wanted:
        real = locate_file(request, folder or Path.cwd(), roots)
        merged[real] = _merge_changes(merged[real], request) if real in merged else request
    return [_prepare_file(real, request) for real, request in merged.items()]


def locate_file(wanted: FileChange, folder: Path, roots: Sequence[Path] = ()) -> Path:
    """The file itself, links followed; outside of the current folder only where the user said so."""
    named = Path(os.path.normpath(folder / wanted.file))
    real = named.resolve()
    inside = real.is_relative_to(folder.resolve())
    said_so = wanted.named and not named.is_relative_to(folder)
    below = any(real.is_relative_to((folder / root).resolve()) for root in roots)
    if inside or said_so or below:
        return real
    how = "it leads to" if wanted.named else "it was found, not named, and is"
    raise WrongUse(
        wanted.file,
        found=f"{how} {real}, outside of the current folder",
        cure=f"Name {real} itself if that is the file to change.",
    )


def _merge_changes(first: FileChange, second: FileChange) -> FileChange:
    """Two wishes for one file as one."""
    for path in first.changes.keys() & second.changes.keys():
        if not texts.same_value(first.changes[path], second.changes[path]):
            raise WrongUse(
                f"{second.file}: {texts.format_path(path)}",
                found=f"both {first.changes[path]!r} and {second.changes[path]!r} are wanted",
                cure="Name the file once.",
            )
    return replace_in(
        first,
        changes={**first.changes, **second.changes},
        beside=first.beside or second.beside,
        add=first.add or second.add,
        kind=first.kind or second.kind,
    )


def _prepare_file(real: Path, wanted: FileChange) -> PreparedFile:
    before = documents.read_bytes(real, wanted.file)
    page = documents.read_config(before, wanted.file, wanted.kind)
    after = page.edit(wanted.changes, beside=wanted.beside, add=wanted.add).encode()
    return PreparedFile(file=wanted.file, real=real, before=before, after=after)


def write_files(
    ready: Sequence[PreparedFile],
    *,
    words: str = "",
    fingerprint: str = "",
    clock: Callable[[], float] = time.time,
    replace: Replace = os.replace,
) -> WriteResult:
    """Replace the files that change, with a backup of each; nothing at all where none does."""
    changed = [file for file in ready if file.changed]
    unchanged = tuple(file.file for file in ready if not file.changed)
    if not changed:
        return WriteResult(
            unchanged=unchanged, said=("Nothing to change: the files hold these values already.",)
        )
    note = Backup(number=0, date=_format_date(clock), words=words, plan=fingerprint)
    said = tuple(sentence for file in changed for sentence in _warn_hard_links(file))
    made = _replace_files(changed, note, replace)
    return WriteResult(
        files=tuple(file.file for file in changed),
        unchanged=unchanged,
        backups=tuple(map(str, made)),
        said=said,
    )


def revert_file(  # noqa: PLR0913 - which, whether, and how a test sees it
    file: str,
    *,
    number: int | None = None,
    force: bool = False,
    write: bool = True,
    clock: Callable[[], float] = time.time,
    replace: Replace = os.replace,
) -> RevertResult:
    """Put back what a backup holds; what is there becomes a backup too. Without `write`, only the diff."""
    real = Path(file).resolve()
    before = documents.read_bytes(real, file) if real.exists() else b""
    backup = backups.choose_backup(real, number, hash_bytes(before))
    ready = PreparedFile(file=file, real=real, before=before, after=backups.read_backup(real, backup))
    if not ready.changed:
        return RevertResult(file=file, number=backup.number)
    _refuse_edited(ready, backup, force=force)
    if not write:
        return RevertResult(file=file, number=backup.number, diff=ready.diff())
    words = f"put back as it was before write {backup.number}"
    note = Backup(number=0, date=_format_date(clock), words=words, restored=backup.number)
    (made,) = _replace_files([ready], note, replace)
    return RevertResult(file=file, number=backup.number, backup=str(made), diff=ready.diff())


def _refuse_edited(ready: PreparedFile, backup: Backup, *, force: bool) -> None:
    """A file that somebody has edited since holds work that no backup has."""
    now = hash_bytes(ready.before)
    history = backups.drop_unfinished(backups.list_backups(ready.real), ready.real.name, now)
    last = history[-1] if history else backup
    saved = last.saved(ready.real.name)
    if force or (saved and saved.after_sha256 == now):
        return
    lines = ready.diff().splitlines()
    shown = "\n".join(
        lines[:_DIFF_LINES] + ([f"... {len(lines) - _DIFF_LINES} more lines"] * (len(lines) > _DIFF_LINES))
    )
    raise WrongUse(
        ready.file,
        found=f"it was edited after trimtab wrote it; going back would change\n{shown}",
        cure="Give --force to go back all the same: what is there now is kept as a backup.",
    )


def _format_date(clock: Callable[[], float]) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(clock()))


def _warn_hard_links(file: PreparedFile) -> list[str]:
    links = file.real.stat().st_nlink
    if links > 1:
        return [f"{file.file} has {links} names on this disk (hard links): the others keep the old text."]
    return []


def _replace_files(ready: Sequence[PreparedFile], note: Backup, replace: Replace) -> list[Path]:
    """The folders of the backups that were made."""
    for file in ready:
        _refuse_read_only(file)
    with lock_folders(file.real.parent for file in ready):
        for file in ready:
            _refuse_changed(file)
        made: list[Path] = []
        try:
            for file in ready:
                _write_scratch(file)
            for folder in sorted({file.real.parent for file in ready}):
                _write_backup(folder, [file for file in ready if file.real.parent == folder], note, made)
        except BaseException:
            _remove_scratch(ready, made)
            raise
        _rename_files(ready, made, replace)
        return made


def _refuse_read_only(target: PreparedFile) -> None:
    """Both by the marks on file and folder, which a user means even where the system would let it pass."""
    everyone = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
    for path, name in ((target.real, "the file"), (target.real.parent, f"the folder {target.real.parent}")):
        about = path.stat() if path.exists() else None
        if about is not None and (not about.st_mode & everyone or not os.access(path, os.W_OK)):
            raise EnvironmentFault(
                target.file,
                found=f"{name} is read-only. Nothing was changed",
                cure="Make it writable (chmod u+w), or copy the file to another place and name that.",
            )


def _refuse_changed(target: PreparedFile) -> None:
    """The file may have changed while the user looked at the diff."""
    now = target.real.read_bytes() if target.real.exists() else b""
    if now != target.before:
        raise WrongUse(
            target.file,
            found="it has changed since it was read. Nothing was written",
            cure="Look at the new diff: run the command again.",
        )


def _write_scratch(target: PreparedFile) -> None:
    """The new text beside the old, safely on the disk, with its rights, owner and attributes."""
    path = scratch_path(target.real)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(target.after)
            file.flush()
            if target.real.exists():
                _copy_owner(target, handle, path)
            else:
                os.fchmod(handle, 0o644)
            os.fsync(handle)
    except OSError as problem:
        raise_os_error(target.real, problem, "the new text cannot be written")


def _copy_owner(target: PreparedFile, handle: int, path: Path) -> None:
    about = target.real.stat()
    new = os.fstat(handle)
    if (new.st_uid, new.st_gid) != (about.st_uid, about.st_gid):
        try:
            os.fchown(handle, about.st_uid, about.st_gid)
        except PermissionError:
            raise EnvironmentFault(
                target.file,
                found="it belongs to another user or group, and would be yours after the change",
                cure="Ask its owner to apply the plan, or copy the file and name the copy.",
            ) from None
    os.fchmod(handle, stat.S_IMODE(about.st_mode))
    _copy_attributes(target.real, path)


def _copy_attributes(source: Path, target: Path) -> None:
    """Access lists and other attributes, as far as the disk has them."""
    if not hasattr(os, "listxattr"):
        return
    with contextlib.suppress(OSError):
        for name in os.listxattr(source):
            with contextlib.suppress(OSError):
                os.setxattr(target, name, os.getxattr(source, name))


def _write_backup(folder: Path, ready: Sequence[PreparedFile], note: Backup, made: list[Path]) -> None:
    """A numbered backup; its manifest comes last, and says that the rest is whole."""
    place = backups.backup_folder(folder)
    number = max(backups.list_numbers(folder), default=0) + 1
    home = place / str(number)
    try:
        home.mkdir(parents=True)
        made.append(home)
        for target in ready:
            _write_new(
                home / target.real.name,
                target.before,
                target.real.stat().st_mode if target.real.exists() else 0o600,
            )
        saved = [
            SavedFile(file=x.real.name, sha256=hash_bytes(x.before), after_sha256=hash_bytes(x.after))
            for x in ready
        ]
        manifest = note.replace(number=number, files=tuple(saved))
        _write_new(home / f"{MANIFEST}.new", manifest.to_json().encode(), 0o644)
        (home / f"{MANIFEST}.new").replace(home / MANIFEST)
        _sync_folder(home)
        _sync_folder(place)
    except OSError as problem:
        raise_os_error(home, problem, "the backup cannot be written")


def _write_new(path: Path, data: bytes, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(handle, stat.S_IMODE(mode))
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """The names in a folder, on the disk as well; some disks do not offer that."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _rename_files(ready: Sequence[PreparedFile], made: list[Path], replace: Replace) -> None:
    """Rename each new text over the old one; if one of them fails, put the others back."""
    done: list[PreparedFile] = []
    try:
        for target in ready:
            replace(scratch_path(target.real), target.real)
            done.append(target)
    except BaseException as problem:
        for target in done:
            _write_scratch(
                PreparedFile(file=target.file, real=target.real, before=target.after, after=target.before)
            )
            scratch_path(target.real).replace(target.real)
        _remove_scratch(ready, made)
        if isinstance(problem, OSError):
            raise_os_error(ready[len(done)].real, problem, "the file cannot be replaced")
        raise
    for folder in {target.real.parent for target in ready}:
        with contextlib.suppress(OSError):  # the files are in place: an error here would only mislead
            _sync_folder(folder)


def _remove_scratch(ready: Sequence[PreparedFile], made: list[Path]) -> None:
    for target in ready:
        with contextlib.suppress(OSError):
            scratch_path(target.real).unlink()
    for home in made:
        shutil.rmtree(home, ignore_errors=True)
