"""The numbered backups beside a config: what each holds, and which one `revert` takes.

.trimtab/backups/3/manifest.json    when, for which plan, which files
.trimtab/backups/3/train.yaml       the file as it was before
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec

from trimtab.configs.locks import FOLDER
from trimtab.errors import BrokenFile, UnknownName, WrongUse
from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
    """What one write replaced."""

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
        """The file of this name."""
        return next((saved for saved in self.files if saved.file == name), None)


def hash_bytes(data: bytes) -> str:
    """The sha256 of a file's content."""
    return hashlib.sha256(data).hexdigest()


def backup_folder(folder: Path) -> Path:
    """Where the backups of a folder lie."""
    return folder / FOLDER / "backups"


def list_numbers(folder: Path) -> list[int]:
    """Of all backups of a folder, those of broken ones included."""
    place = backup_folder(folder)
    if not place.is_dir():
        return []
    return sorted(int(path.name) for path in place.iterdir() if path.name.isascii() and path.name.isdigit())


def list_backups(file: Path) -> list[Backup]:
    """All backups that hold a file, oldest first; one without a manifest was never finished."""
    real = file.resolve()
    found = [_read_manifest(real.parent, number) for number in list_numbers(real.parent)]
    return [backup for backup in found if backup is not None and backup.saved(real.name)]


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
    """The file as a backup holds it."""
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
    """The writes that took place. One that was killed between backup and replace left the file as it was."""
    kept = []
    for number, backup in enumerate(history):
        saved = backup.saved(name)
        later = history[number + 1].saved(name) if number + 1 < len(history) else None
        then = later.sha256 if later else now
        if saved and (then != saved.sha256 or then == saved.after_sha256):
            kept.append(backup)
    return kept


def list_undoable(history: Sequence[Backup]) -> list[int]:
    """The backups that `revert` would take, one call after the other, nearest last.

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
    """The backup that was named, or that of the last write that still stands; `now` is the file's sha256."""
    history = list_backups(file)
    known = ", ".join(f"{backup.number} ({backup.date[:16].replace('T', ' ')})" for backup in history[-5:])
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
        raise UnknownName(given, found="there is no such backup", cure=f"There are {known}.")
    stack = list_undoable(drop_unfinished(history, file.resolve().name, now))
    if not stack:
        raise WrongUse(
            str(file),
            found="every write of trimtab to it has been taken back already",
            cure=f"Name a backup to go to with --backup N: there are {known}.",
        )
    return next(backup for backup in history if backup.number == stack[-1])
