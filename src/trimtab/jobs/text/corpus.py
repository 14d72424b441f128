"""Find the text to train on: a file, a folder, or the sources of Python's standard library.

A Corpus has only names and sizes; the content is read in chunks.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
import stat
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.spec.base import Noun

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = 2**20
"""Bytes per read."""
SEPARATOR = b"\0"
"""Written after every file. A file that contains it is binary."""
NOT_SOURCES = frozenset(
    ("__pycache__", "_bundled", "dist-packages", "idle_test", "site-packages", "test", "tests")
)
"""Folders of the standard library that are skipped: tests and installed packages."""
_CURE = "Name a file of text, or a folder with such files, in UTF-8."


class TextFile(Noun, frozen=True, kw_only=True):
    """One file of a corpus."""

    path: str
    size: int
    changed: int
    """Modification time in nanoseconds."""


class Corpus(Noun, frozen=True, kw_only=True):
    """Files of text in a fixed order."""

    origin: str
    """Description of the source, for messages."""
    documents: tuple[TextFile, ...]
    left_out: tuple[str, ...] = ()
    """Files of a folder that are not text."""

    @property
    def size_bytes(self) -> int:
        """Size of all files, with separators."""
        return sum(document.size + len(SEPARATOR) for document in self.documents)

    @property
    def state(self) -> str:
        """Hash that changes when a file is added, removed or written."""
        lines = "\n".join(
            f"{document.path}\t{document.size}\t{document.changed}" for document in self.documents
        )
        # File names are bytes, which may not be UTF-8.
        return hashlib.blake2b(lines.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()

    def chunks(self) -> Iterator[bytes]:
        """Yield the content in chunks that end at a line break, with a separator after each file."""
        for document in self.documents:
            yield from _read_chunks(Path(document.path))
            yield SEPARATOR


def find_text(data: str = "") -> Corpus:
    """Return the text of a file or a folder; without a name, the sources of the standard library."""
    return _find_user_text(data) if data else standard_library()


def standard_library() -> Corpus:
    """Return the sources of this Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [
        path
        for path in _list_files(root, NOT_SOURCES)
        if path.suffix == ".py" and _explain_not_text_file(path) is None
    ]
    documents = [_describe_file(path) for path in paths]
    if not any(document.size for document in documents):
        raise EnvironmentFault(
            f"the standard library's sources in {root}",
            found="this Python is installed without them",
            cure="Name your own text: --data FILE_OR_FOLDER.",
        )
    return Corpus(
        origin=f"the sources of Python {platform.python_version()}'s standard library in {root}",
        documents=tuple(documents),
    )


def _find_user_text(data: str) -> Corpus:
    place = Path(data).expanduser()
    given = f"data {data}"
    try:
        kind = place.stat().st_mode
    except FileNotFoundError:
        raise WrongUse(given, found="there is no such file or folder", cure=_CURE) from None
    except OSError as error:
        raise WrongUse(given, found=f"it cannot be read ({error.strerror})", cure=_CURE) from error
    if stat.S_ISDIR(kind):
        return _find_folder_text(place, given)
    if not stat.S_ISREG(kind):
        raise WrongUse(given, found="it is neither a file nor a folder", cure=_CURE)
    why = _explain_not_text_file(place)
    if why is not None:
        raise WrongUse(given, found=why, cure=_CURE)
    document = _describe_file(place)
    if not document.size:
        raise WrongUse(given, found="the file is empty", cure=_CURE)
    return Corpus(origin=str(place), documents=(document,))


def _find_folder_text(folder: Path, given: str) -> Corpus:
    """Return the text files in a folder and below it, without hidden and binary files."""
    documents, left_out = [], []
    try:
        files = _list_files(folder)
    except OSError as error:
        raise WrongUse(
            given,
            found=f"{error.filename or folder} cannot be read ({error.strerror})",
            cure="Make it readable, or name a folder without it.",
        ) from error
    for path in files:
        why = _explain_not_text_file(path)
        if why is None:
            documents.append(_describe_file(path))
        elif why.startswith("it cannot be read"):
            raise WrongUse(given, found=f"{path}: {why}", cure="Make it readable, or take it out.")
        else:
            left_out.append(str(path))
    if not any(document.size for document in documents):
        none = "file, which is not text" if len(left_out) == 1 else "files, and none of them is text"
        why = f"{len(left_out)} {none}"
        found = f"the folder has {why if left_out else 'no files with text in them'}"
        raise WrongUse(given, found=found, cure=_CURE)
    return Corpus(
        origin=str(folder),
        documents=tuple(document for document in documents if document.size),
        left_out=tuple(left_out),
    )


def _list_files(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """Return all regular files below a folder without hidden ones, sorted by path."""

    def fails(error: OSError) -> None:
        raise error

    paths_found = []
    for folder, below, names in os.walk(root, onerror=fails):
        below[:] = [name for name in below if name not in skipped and not name.startswith(".")]
        paths = (Path(folder) / name for name in names if not name.startswith("."))
        paths_found += [path for path in paths if path.is_file()]
    # Sort by path parts, so that the order is the same on every machine and in every locale.
    return sorted(paths_found, key=lambda path: path.relative_to(root).parts)


def _describe_file(path: Path) -> TextFile:
    info = path.stat()
    return TextFile(path=str(path.absolute()), size=info.st_size, changed=info.st_mtime_ns)


def _explain_not_text_file(path: Path) -> str | None:
    """Return why the start of a file is not text; None if it is."""
    try:
        with path.open("rb") as file:
            head = file.read(CHUNK)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return explain_not_text(head, whole=len(head) < CHUNK)


def explain_not_text(head: bytes, *, whole: bool = True) -> str | None:
    r"""Return why bytes are not text; None if they are. Unless `whole`, they may end within a character.

    >>> explain_not_text(b"a = 1"), explain_not_text(b"PK\0\0")
    (None, 'it is binary: byte 3 is zero')
    """
    if SEPARATOR in head:
        return f"it is binary: byte {head.index(SEPARATOR) + 1} is zero"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError as error:
        return f"it is not UTF-8: byte {error.start + 1} is 0x{head[error.start]:02x}"
    return None


def _read_chunks(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in chunks that end at a line break, so that no word is split."""
    pending = b""
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            pending += data
            end = pending.rfind(b"\n")
            if end > 0:
                yield _refuse_zero_bytes(pending[:end], path)
                pending = pending[end:]
            elif len(pending) > CHUNK:
                yield _refuse_zero_bytes(pending, path)
                pending = b""
    if pending:
        yield _refuse_zero_bytes(pending, path)


def _refuse_zero_bytes(piece: bytes, path: Path) -> bytes:
    if SEPARATOR in piece:
        raise WrongUse(f"data {path}", found="it has bytes that are zero: it is binary", cure=_CURE)
    return piece
