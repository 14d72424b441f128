"""Write files atomically, and read JSON lines that a crash may have damaged."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


def write_atomic(file: Path, data: str | bytes, *, sync: bool = False) -> None:
    """Replace a file by new contents in one step; its folder has to exist.

    With `sync`, return only when the contents and the name are on the disk.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    content = data.encode() if isinstance(data, str) else data
    try:
        if sync:
            write_synced(temporary, content)
        else:
            temporary.write_bytes(content)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_folder(file.parent)


def read_json_lines(data: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects in lines; skip other lines, such as one that a crash has cut off."""
    objects = []
    for line in data.split(b"\n"):
        try:
            value = msgspec.json.decode(line) if line else None
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def is_file(path: Path) -> bool:
    """Return whether a path is a file; False for one that cannot be, as with a name that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def write_synced(file: Path, data: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems sync names automatically and refuse the call.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)
