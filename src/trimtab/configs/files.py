"""Write config files: all of them or none, with a lock, a numbered backup, and a way back.

    changes = [FileChange(file="train.yaml", changes={("batch_size",): 8})]
    ready = prepare_files(changes)  # read, edited and checked in memory; nothing is written
    print(ready[0].diff())
    write_files(ready, words="plan of slm on 4xH100")

Every new text is on disk before the first file is replaced, so a full disk changes nothing. Each replacement
is one rename, so a killed process leaves the old file or the new one.

    .trimtab/lock                       one writer at a time; the system releases it when the process ends
    .trimtab/backups/3/manifest.json    when, for which plan, which files
    .trimtab/backups/3/train.yaml       the file as it was before
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_in
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from trimtab.configs.formats import read_bytes, read_config
from trimtab.configs.text_edit import format_path, same_value
from trimtab.errors import BrokenFile, EnvironmentFault, UnknownName, WrongUse
from trimtab.files import sync_folder
from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FOLDER = ".trimtab"
"""Beside the files that are edited: backups and the lock."""
PATIENCE_S = 5.0
_SCRATCH = re.compile(r"\.trimtab-[0-9a-f]{12}-\d+\.tmp")


@contextmanager
def lock_folders(folders: Iterable[Path], patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Lock these folders, always in the same order, so that two processes cannot deadlock."""
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
    """Make the .trimtab folder beside the files, with a .gitignore."""
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
    """Remove what a killed process has left; the lock makes this safe."""
    for path in folder.iterdir():
        if _SCRATCH.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def scratch_path(path: Path) -> Path:
    """Return the temporary name of a file's new text."""
    short = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:12]  # a long name may leave no room for more
    return path.with_name(f".trimtab-{short}-{os.getpid()}.tmp")


def raise_os_error(path: Path, problem: OSError, what: str) -> NoReturn:
    """Raise an EnvironmentFault for a system error, with what can be done about it."""
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


MANIFEST = "manifest.json"


class SavedFile(Noun, frozen=True, kw_only=True):
    """One file of a backup."""

    file: str
    """Its name in the folder."""
    sha256: str
    """Of the copy that is kept: the file as it was before."""
    after_sha256: str
    """Of what was written then."""


class Backup(Noun, frozen=True, kw_only=True):
    """The files that one write replaced."""

    number: int
    date: str
    """When, as YYYY-MM-DDTHH:MM:SS with the offset from UTC."""
    words: str = ""
    """What was done, in a sentence."""
    plan: str = ""
    """The fingerprint of the plan that was written."""
    restored: int | None = None
    """The backup that was put back, where that was what was done."""
    files: tuple[SavedFile, ...] = ()

    def saved(self, name: str) -> SavedFile | None:
        """Return the saved file of this name."""
        return next((saved for saved in self.files if saved.file == name), None)


def hash_bytes(data: bytes) -> str:
    """Return the sha256 of a file's content."""
    return hashlib.sha256(data).hexdigest()


def backup_folder(folder: Path) -> Path:
    """Return the folder of a folder's backups."""
    return folder / FOLDER / "backups"


def list_numbers(folder: Path) -> list[int]:
    """List the numbers of all backups of a folder, broken ones included."""
    place = backup_folder(folder)
    if not place.is_dir():
        return []
    return sorted(int(path.name) for path in place.iterdir() if path.name.isascii() and path.name.isdigit())


def list_backups(file: Path) -> list[Backup]:
    """List all backups that hold a file, oldest first; one without a manifest was never finished."""
    real = file.resolve()
    manifests = [_read_manifest(real.parent, number) for number in list_numbers(real.parent)]
    return [backup for backup in manifests if backup is not None and backup.saved(real.name)]


def _read_manifest(folder: Path, number: int) -> Backup | None:
    path = backup_folder(folder) / str(number) / MANIFEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Backup)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, ValueError) as problem:
        raise BrokenFile(
            str(path),
            found=f"the backup's manifest cannot be read: {problem}",
            cure=f"The copies beside it can be put back by hand; then remove the folder {path.parent}.",
        ) from None


def read_backup(file: Path, backup: Backup) -> bytes:
    """Read the file as a backup holds it."""
    real = file.resolve()
    saved = backup.saved(real.name)
    path = backup_folder(real.parent) / str(backup.number) / real.name
    try:
        data = path.read_bytes()
    except OSError as problem:
        raise BrokenFile(
            str(path), found=f"the copy cannot be read: {problem.strerror}", cure=_OTHER
        ) from None
    if saved is None or hash_bytes(data) != saved.sha256:
        raise BrokenFile(str(path), found="the copy is not what was saved: its checksum differs", cure=_OTHER)
    return data


_OTHER = "Name another backup with --backup N."


def drop_unfinished(history: Sequence[Backup], name: str, now: str) -> list[Backup]:
    """Keep the writes that took place; a process killed before the rename changed nothing."""
    kept = []
    for number, backup in enumerate(history):
        saved = backup.saved(name)
        later = history[number + 1].saved(name) if number + 1 < len(history) else None
        then = later.sha256 if later else now
        if saved and (then != saved.sha256 or then == saved.after_sha256):
            kept.append(backup)
    return kept


def list_undoable(history: Sequence[Backup]) -> list[int]:
    """List the backups that `revert` would take, one call after the other, nearest last.

    Each write that was not taken back adds one; taking backup N back leads to where things stood before it.
    """
    before: dict[int, list[int]] = {}
    stack: list[int] = []
    for backup in history:
        before[backup.number] = list(stack)
        stack = (
            list(before.get(backup.restored, [])) if backup.restored is not None else [*stack, backup.number]
        )
    return stack


def choose_backup(file: Path, number: int | None, now: str) -> Backup:
    """Return the backup named, or that of the last write that still stands; `now` is the file's sha256."""
    history = list_backups(file)
    listed = ", ".join(f"{backup.number} ({backup.date[:16].replace('T', ' ')})" for backup in history[-5:])
    if not history:
        raise WrongUse(
            str(file),
            found="there is no backup of it",
            cure="Only what trimtab apply has written can be put back.",
        )
    if number is not None:
        for backup in history:
            if backup.number == number:
                return backup
        given = f"{file} --backup {number}"
        raise UnknownName(given, found="there is no such backup", cure=f"There are {listed}.")
    stack = list_undoable(drop_unfinished(history, file.resolve().name, now))
    if not stack:
        raise WrongUse(
            str(file),
            found="every write of trimtab to it has been taken back already",
            cure=f"Name a backup to go to with --backup N: there are {listed}.",
        )
    return next(backup for backup in history if backup.number == stack[-1])


_DIFF_LINES = 40
"""As many of a diff as an error shows."""
Replace = Callable[[Path, Path], Any]


@dataclass(frozen=True, kw_only=True)
class FileChange:
    """The changes of one file."""

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
    """The files that were written, and those that were not."""

    files: tuple[str, ...] = ()
    """Those that are new now."""
    unchanged: tuple[str, ...] = ()
    """Those that were so already, and were not touched."""
    backups: tuple[str, ...] = ()
    """Folders with the old texts."""
    said: tuple[str, ...] = ()
    """What the user should know."""


class RevertResult(Noun, frozen=True, kw_only=True):
    """The file that was put back."""

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
        """Return the change as a unified diff; empty if there is none."""
        return unified_diff(self.before, self.after, self.file)


def unified_diff(before: bytes, after: bytes, name: str) -> str:
    """Return a unified diff of two texts, as `diff -u` shows it."""
    old, new = (text.decode(errors="replace").splitlines(keepends=True) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"{name} (now)", f"{name} (new)")
    return "".join(
        line.replace("\r\n", "\n") if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in lines
    )


def prepare_files(
    wanted: Sequence[FileChange], *, folder: Path | None = None, roots: Sequence[Path] = ()
) -> list[PreparedFile]:
    """Read, edit and check every file; an error in one is an error for all.

    `folder` is where the user stands, `roots` are folders that the user named.
    """
    merged: dict[Path, FileChange] = {}
    for request in wanted:
        real = locate_file(request, folder or Path.cwd(), roots)
        merged[real] = _merge_changes(merged[real], request) if real in merged else request
    return [_prepare_file(real, request) for real, request in merged.items()]


def locate_file(wanted: FileChange, folder: Path, roots: Sequence[Path] = ()) -> Path:
    """Resolve a file's links; leave the current folder only if the user named such a path."""
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
    """Merge two changes of one file."""
    for path in first.changes.keys() & second.changes.keys():
        if not same_value(first.changes[path], second.changes[path]):
            raise WrongUse(
                f"{second.file}: {format_path(path)}",
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
    before = read_bytes(real, wanted.file)
    page = read_config(before, wanted.file, wanted.kind)
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
    """Replace the files that change, with a backup of each; do nothing if none changes."""
    changed = [file for file in ready if file.changed]
    unchanged = tuple(file.file for file in ready if not file.changed)
    if not changed:
        return WriteResult(
            unchanged=unchanged, said=("Nothing to change: the files hold these values already.",)
        )
    note = Backup(number=0, date=_format_date(clock), words=words, plan=fingerprint)
    warnings = tuple(sentence for file in changed for sentence in _warn_hard_links(file))
    made = _replace_files(changed, note, replace)
    return WriteResult(
        files=tuple(file.file for file in changed),
        unchanged=unchanged,
        backups=tuple(map(str, made)),
        said=warnings,
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
    """Put a backup back, and back up what is there now. Without `write`, return only the diff."""
    real = Path(file).resolve()
    before = read_bytes(real, file) if real.exists() else b""
    backup = choose_backup(real, number, hash_bytes(before))
    ready = PreparedFile(file=file, real=real, before=before, after=read_backup(real, backup))
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
    """Refuse to overwrite a file that was edited since: no backup has that work."""
    now = hash_bytes(ready.before)
    history = drop_unfinished(list_backups(ready.real), ready.real.name, now)
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
    """Replace the files; return the folders of the backups."""
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
    """Refuse read-only files and folders, even where the system would allow the write."""
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
    """Refuse a file that has changed while the user looked at the diff."""
    now = target.real.read_bytes() if target.real.exists() else b""
    if now != target.before:
        raise WrongUse(
            target.file,
            found="it has changed since it was read. Nothing was written",
            cure="Look at the new diff: run the command again.",
        )


def _write_scratch(target: PreparedFile) -> None:
    """Write the new text beside the old one and sync it, with mode, owner and attributes."""
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
    """Copy access lists and other attributes, as far as the disk has them."""
    if not hasattr(os, "listxattr"):
        return
    with contextlib.suppress(OSError):
        for name in os.listxattr(source):
            with contextlib.suppress(OSError):
                os.setxattr(target, name, os.getxattr(source, name))


def _write_backup(folder: Path, ready: Sequence[PreparedFile], note: Backup, made: list[Path]) -> None:
    """Write a numbered backup; the manifest comes last and marks it complete."""
    place = backup_folder(folder)
    number = max(list_numbers(folder), default=0) + 1
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
        sync_folder(home)
        sync_folder(place)
    except OSError as problem:
        raise_os_error(home, problem, "the backup cannot be written")


def _write_new(path: Path, data: bytes, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(handle, stat.S_IMODE(mode))
        os.fsync(file.fileno())


def _rename_files(ready: Sequence[PreparedFile], made: list[Path], replace: Replace) -> None:
    """Rename each new text over the old one; if one fails, put the others back."""
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
            sync_folder(folder)


def _remove_scratch(ready: Sequence[PreparedFile], made: list[Path]) -> None:
    for target in ready:
        with contextlib.suppress(OSError):
            scratch_path(target.real).unlink()
    for home in made:
        shutil.rmtree(home, ignore_errors=True)
