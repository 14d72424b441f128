"""Finds text: a file, a folder, or what is on every machine with Python: its standard library's own sources.

Only names and sizes are looked at here; what the files hold is read piece by piece.
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
"""Bytes that are read at a time."""
SEPARATOR = b"\0"
"""Stands after every file. It is in no text: a file that has one is binary."""
NOT_SOURCES = frozenset(
    ("__pycache__", "_bundled", "dist-packages", "idle_test", "site-packages", "test", "tests")
)
"""Folders of the standard library that are not read: tests, and what others have installed there."""
_CURE = "Name a file of text, or a folder with such files, in UTF-8."


class TextFile(Noun, frozen=True, kw_only=True):
    """One file of a corpus."""

    path: str
    size: int
    changed: int
    """When it was last written, as the file system says it."""


class Corpus(Noun, frozen=True, kw_only=True):
    """Files of text in a fixed order."""

    origin: str
    """Where it came from, in words."""
    documents: tuple[TextFile, ...]
    left_out: tuple[str, ...] = ()
    """Files of a folder that are not text."""

    @property
    def size_bytes(self) -> int:
        """Of all files, with what stands between them."""
        return sum(document.size + len(SEPARATOR) for document in self.documents)

    @property
    def state(self) -> str:
        """Changes when a file comes, goes or is written."""
        lines = "\n".join(
            f"{document.path}\t{document.size}\t{document.changed}" for document in self.documents
        )
        # Names of files are bytes, and need not be UTF-8.
        return hashlib.blake2b(lines.encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()

    def chunks(self) -> Iterator[bytes]:
        """What the files hold, a separator after each, in pieces that end before the start of a line."""
        for document in self.documents:
            yield from _lines(Path(document.path))
            yield SEPARATOR


def find(data: str = "") -> Corpus:
    """The text of a file or a folder; without a name, the sources of Python's standard library."""
    return _of_user(data) if data else standard_library()


def standard_library() -> Corpus:
    """The sources of this Python's standard library, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path for path in _files(root, NOT_SOURCES) if path.suffix == ".py" and _refusal(path) is None]
    documents = [_document(path) for path in found]
    if not any(document.size for document in documents):
        raise EnvironmentFault(
            f"the standard library's sources in {root}",
            found="there are none: this Python came without them",
            cure="Name a text of your own: --data FILE_OR_FOLDER.",
        )
    return Corpus(
        origin=f"the sources of Python {platform.python_version()}'s standard library in {root}",
        documents=tuple(documents),
    )


def _of_user(data: str) -> Corpus:
    place = Path(data).expanduser()
    given = f"data {data}"
    try:
        kind = place.stat().st_mode
    except FileNotFoundError:
        raise WrongUse(given, found="there is no such file or folder", cure=_CURE) from None
    except OSError as error:
        raise WrongUse(given, found=f"it cannot be read ({error.strerror})", cure=_CURE) from error
    if stat.S_ISDIR(kind):
        return _of_folder(place, given)
    if not stat.S_ISREG(kind):
        raise WrongUse(given, found="it is neither a file nor a folder", cure=_CURE)
    why = _refusal(place)
    if why is not None:
        raise WrongUse(given, found=why, cure=_CURE)
    one = _document(place)
    if not one.size:
        raise WrongUse(given, found="the file is empty", cure=_CURE)
    return Corpus(origin=str(place), documents=(one,))


def _of_folder(folder: Path, given: str) -> Corpus:
    """The texts in a folder and below it; hidden ones and what is not text are left out."""
    kept, left_out = [], []
    try:
        files = _files(folder)
    except OSError as error:
        raise WrongUse(
            given,
            found=f"{error.filename or folder} cannot be read ({error.strerror})",
            cure="Make it readable, or name a folder without it.",
        ) from error
    for path in files:
        why = _refusal(path)
        if why is None:
            kept.append(_document(path))
        elif why.startswith("it cannot be read"):
            raise WrongUse(given, found=f"{path}: {why}", cure="Make it readable, or take it out.")
        else:
            left_out.append(str(path))
    if not any(one.size for one in kept):
        none = "file, and it is no text" if len(left_out) == 1 else "files, and none of them is text"
        why = f"{len(left_out)} {none}"
        found = f"the folder has {why if left_out else 'no files with text in them'}"
        raise WrongUse(given, found=found, cure=_CURE)
    return Corpus(
        origin=str(folder),
        documents=tuple(one for one in kept if one.size),
        left_out=tuple(left_out),
    )


def _files(root: Path, skipped: frozenset[str] = frozenset()) -> list[Path]:
    """All ordinary files below a folder, hidden ones left out, in the order of their names."""

    def fails(error: OSError) -> None:
        raise error

    found = []
    for folder, below, names in os.walk(root, onerror=fails):
        below[:] = [one for one in below if one not in skipped and not one.startswith(".")]
        paths = (Path(folder) / name for name in names if not name.startswith("."))
        found += [path for path in paths if path.is_file()]
    # By parts, so that the order is that of the folders on every machine and in every locale.
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _document(path: Path) -> TextFile:
    about = path.stat()
    return TextFile(path=str(path.absolute()), size=about.st_size, changed=about.st_mtime_ns)


def _refusal(path: Path) -> str | None:
    """Why a file is no text, by its beginning; None where it is one."""
    try:
        with path.open("rb") as file:
            head = file.read(CHUNK)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return refusal(head, whole=len(head) < CHUNK)


def refusal(head: bytes, *, whole: bool = True) -> str | None:
    r"""Why bytes are no text; None where they are. Only what is not `whole` may end within a letter.

    >>> refusal(b"a = 1"), refusal(b"PK\0\0")
    (None, 'it is binary: byte 3 is zero')
    """
    if SEPARATOR in head:
        return f"it is binary: byte {head.index(SEPARATOR) + 1} is zero"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError as error:
        return f"it is not UTF-8: byte {error.start + 1} is 0x{head[error.start]:02x}"
    return None


def _lines(path: Path) -> Iterator[bytes]:
    """The bytes of a file in pieces that end before the start of a line, so that no word is cut."""
    held = b""
    with path.open("rb") as file:
        while read := file.read(CHUNK):
            held += read
            end = held.rfind(b"\n")
            if end > 0:
                yield _checked(held[:end], path)
                held = held[end:]
            elif len(held) > CHUNK:
                yield _checked(held, path)
                held = b""
    if held:
        yield _checked(held, path)


def _checked(piece: bytes, path: Path) -> bytes:
    if SEPARATOR in piece:
        raise WrongUse(f"data {path}", found="it has bytes that are zero: it is binary", cure=_CURE)
    return piece
