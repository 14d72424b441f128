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
from trimtab.configs.backups import MANIFEST, Backup, Saved, digest
from trimtab.configs.locks import locked, refuse, scratch
from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.files import sync_folder
from trimtab.spec.base import Noun

_DIFF_LINES = 40
"""As many of a diff as an error shows."""
Replace = Callable[[Path, Path], Any]


@dataclass(frozen=True, kw_only=True)
class Wanted:
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


class Written(Noun, frozen=True, kw_only=True):
    """What was done."""

    files: tuple[str, ...] = ()
    """Those that are new now."""
    unchanged: tuple[str, ...] = ()
    """Those that were so already, and were not touched."""
    backups: tuple[str, ...] = ()
    """Folders with the old texts."""
    said: tuple[str, ...] = ()
    """What the user should know."""


class Restored(Noun, frozen=True, kw_only=True):
    """What was put back."""

    file: str
    number: int
    """Of the backup that the file is like now."""
    backup: str | None = None
    """The folder that holds what was there before; None where the file was like that already."""
    diff: str = ""


@dataclass(frozen=True, kw_only=True)
class Prepared:
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
        return difference(self.before, self.after, self.file)


def difference(before: bytes, after: bytes, name: str) -> str:
    """A unified diff of two texts, each line as `diff -u` shows it."""
    old, new = (text.decode(errors="replace").splitlines(keepends=True) for text in (before, after))
    lines = difflib.unified_diff(old, new, f"{name} (now)", f"{name} (new)")
    return "".join(
        line.replace("\r\n", "\n") if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in lines
    )


def prepared(
    wanted: Sequence[Wanted], *, folder: Path | None = None, roots: Sequence[Path] = ()
) -> list[Prepared]:
    """Every file read, edited and checked; an error for one is an error for all.

    `folder` is where the user stands, `roots` are folders that the user named.
    """
    merged: dict[Path, Wanted] = {}
    for one in wanted:
        real = located(one, folder or Path.cwd(), roots)
        merged[real] = _merged(merged[real], one) if real in merged else one
    return [_edited(real, one) for real, one in merged.items()]


def located(wanted: Wanted, folder: Path, roots: Sequence[Path] = ()) -> Path:
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


def _merged(first: Wanted, second: Wanted) -> Wanted:
    """Two wishes for one file as one."""
    for path in first.changes.keys() & second.changes.keys():
        if not texts.same(first.changes[path], second.changes[path]):
            raise WrongUse(
                f"{second.file}: {texts.dotted(path)}",
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


def _edited(real: Path, wanted: Wanted) -> Prepared:
    before = documents.contents(real, wanted.file)
    page = documents.read(before, wanted.file, wanted.kind)
    after = page.edited(wanted.changes, beside=wanted.beside, add=wanted.add).encode()
    return Prepared(file=wanted.file, real=real, before=before, after=after)


def write(
    ready: Sequence[Prepared],
    *,
    words: str = "",
    fingerprint: str = "",
    clock: Callable[[], float] = time.time,
    replace: Replace = os.replace,
) -> Written:
    """Replace the files that change, with a backup of each; nothing at all where none does."""
    changed = [one for one in ready if one.changed]
    unchanged = tuple(one.file for one in ready if not one.changed)
    if not changed:
        return Written(unchanged=unchanged, said=("Nothing to change: the files hold these values already.",))
    note = Backup(number=0, date=_date(clock), words=words, plan=fingerprint)
    said = tuple(sentence for one in changed for sentence in _warnings(one))
    made = _replaced(changed, note, replace)
    return Written(
        files=tuple(one.file for one in changed),
        unchanged=unchanged,
        backups=tuple(map(str, made)),
        said=said,
    )


def revert(  # noqa: PLR0913 - which, whether, and how a test sees it
    file: str,
    *,
    number: int | None = None,
    force: bool = False,
    write: bool = True,
    clock: Callable[[], float] = time.time,
    replace: Replace = os.replace,
) -> Restored:
    """Put back what a backup holds; what is there becomes a backup too. Without `write`, only the diff."""
    real = Path(file).resolve()
    before = documents.contents(real, file) if real.exists() else b""
    backup = backups.chosen(real, number, digest(before))
    ready = Prepared(file=file, real=real, before=before, after=backups.content(real, backup))
    if not ready.changed:
        return Restored(file=file, number=backup.number)
    _refuse_edited(ready, backup, force=force)
    if not write:
        return Restored(file=file, number=backup.number, diff=ready.diff())
    words = f"put back as it was before write {backup.number}"
    note = Backup(number=0, date=_date(clock), words=words, restored=backup.number)
    (made,) = _replaced([ready], note, replace)
    return Restored(file=file, number=backup.number, backup=str(made), diff=ready.diff())


def _refuse_edited(ready: Prepared, backup: Backup, *, force: bool) -> None:
    """A file that somebody has edited since holds work that no backup has."""
    now = digest(ready.before)
    history = backups.stood(backups.backups(ready.real), ready.real.name, now)
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


def _date(clock: Callable[[], float]) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(clock()))


def _warnings(one: Prepared) -> list[str]:
    links = one.real.stat().st_nlink
    if links > 1:
        return [f"{one.file} has {links} names on this disk (hard links): the others keep the old text."]
    return []


def _replaced(ready: Sequence[Prepared], note: Backup, replace: Replace) -> list[Path]:
    """The folders of the backups that were made."""
    for one in ready:
        _refuse_read_only(one)
    with locked(one.real.parent for one in ready):
        for one in ready:
            _refuse_moved_on(one)
        made: list[Path] = []
        try:
            for one in ready:
                _lay_down(one)
            for folder in sorted({one.real.parent for one in ready}):
                _keep(folder, [one for one in ready if one.real.parent == folder], note, made)
        except BaseException:
            _clear(ready, made)
            raise
        _swap(ready, made, replace)
        return made


def _refuse_read_only(one: Prepared) -> None:
    """Both by the marks on file and folder, which a user means even where the system would let it pass."""
    everyone = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
    for path, name in ((one.real, "the file"), (one.real.parent, f"the folder {one.real.parent}")):
        about = path.stat() if path.exists() else None
        if about is not None and (not about.st_mode & everyone or not os.access(path, os.W_OK)):
            raise EnvironmentFault(
                one.file,
                found=f"{name} is read-only. Nothing was changed",
                cure="Make it writable (chmod u+w), or copy the file to another place and name that.",
            )


def _refuse_moved_on(one: Prepared) -> None:
    """The file may have changed while the user looked at the diff."""
    now = one.real.read_bytes() if one.real.exists() else b""
    if now != one.before:
        raise WrongUse(
            one.file,
            found="it has changed since it was read. Nothing was written",
            cure="Look at the new diff: run the command again.",
        )


def _lay_down(one: Prepared) -> None:
    """The new text beside the old, safely on the disk, with its rights, owner and attributes."""
    path = scratch(one.real)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(one.after)
            file.flush()
            if one.real.exists():
                _like(one, handle, path)
            else:
                os.fchmod(handle, 0o644)
            os.fsync(handle)
    except OSError as problem:
        refuse(one.real, problem, "the new text cannot be written")


def _like(one: Prepared, handle: int, path: Path) -> None:
    about = one.real.stat()
    new = os.fstat(handle)
    if (new.st_uid, new.st_gid) != (about.st_uid, about.st_gid):
        try:
            os.fchown(handle, about.st_uid, about.st_gid)
        except PermissionError:
            raise EnvironmentFault(
                one.file,
                found="it belongs to another user or group, and would be yours after the change",
                cure="Ask its owner to apply the plan, or copy the file and name the copy.",
            ) from None
    os.fchmod(handle, stat.S_IMODE(about.st_mode))
    _copy_attributes(one.real, path)


def _copy_attributes(source: Path, target: Path) -> None:
    """Access lists and other attributes, as far as the disk has them."""
    if not hasattr(os, "listxattr"):
        return
    with contextlib.suppress(OSError):
        for name in os.listxattr(source):
            with contextlib.suppress(OSError):
                os.setxattr(target, name, os.getxattr(source, name))


def _keep(folder: Path, ready: Sequence[Prepared], note: Backup, made: list[Path]) -> None:
    """A numbered backup; its manifest comes last, and says that the rest is whole."""
    place = backups.folder_of(folder)
    number = max(backups.numbers(folder), default=0) + 1
    home = place / str(number)
    try:
        home.mkdir(parents=True)
        made.append(home)
        for one in ready:
            _put(home / one.real.name, one.before, one.real.stat().st_mode if one.real.exists() else 0o600)
        saved = [
            Saved(file=x.real.name, sha256=digest(x.before), after_sha256=digest(x.after)) for x in ready
        ]
        manifest = note.replace(number=number, files=tuple(saved))
        _put(home / f"{MANIFEST}.new", manifest.to_json().encode(), 0o644)
        (home / f"{MANIFEST}.new").replace(home / MANIFEST)
        sync_folder(home)
        sync_folder(place)
    except OSError as problem:
        refuse(home, problem, "the backup cannot be written")


def _put(path: Path, data: bytes, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(handle, stat.S_IMODE(mode))
        os.fsync(file.fileno())


def _swap(ready: Sequence[Prepared], made: list[Path], replace: Replace) -> None:
    """Rename each new text over the old one; if one of them fails, put the others back."""
    done: list[Prepared] = []
    try:
        for one in ready:
            replace(scratch(one.real), one.real)
            done.append(one)
    except BaseException as problem:
        for one in done:
            _lay_down(Prepared(file=one.file, real=one.real, before=one.after, after=one.before))
            scratch(one.real).replace(one.real)
        _clear(ready, made)
        if isinstance(problem, OSError):
            refuse(ready[len(done)].real, problem, "the file cannot be replaced")
        raise
    for folder in {one.real.parent for one in ready}:
        with contextlib.suppress(OSError):  # the files are in place: an error here would only mislead
            sync_folder(folder)


def _clear(ready: Sequence[Prepared], made: list[Path]) -> None:
    for one in ready:
        with contextlib.suppress(OSError):
            scratch(one.real).unlink()
    for home in made:
        shutil.rmtree(home, ignore_errors=True)
