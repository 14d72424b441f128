"""Find and open logs: files, folders and standard input, decompressed and decoded; and plain pickles.

A pickle is a program. The reader here refuses every instruction that names a class or a function, so it runs
no code. Memory snapshots and flight records of torch need only numbers, text and plain containers.
"""

from __future__ import annotations

import codecs
import io
import os
import pickle
import pickletools
import re
import sys
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

from trimtab.errors import WrongUse, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STDIN = "-"
HEAD = 1 << 16
MOST_FILES = 4096
"""Files of a folder that are read; a note counts the rest."""
MOST_OTHER_SHARE = 0.05
"""A file with more letters than this that no text has is none."""
ENDINGS = frozenset(
    ("", ".log", ".out", ".err", ".txt", ".json", ".jsonl", ".pickle", ".pkl", ".gz", ".bz2", ".xz")
)
"""Of files that are looked into when a folder is named; a file that is named itself is always read."""
_NUMBERED = re.compile(r"\.(?:[eo]\d+|log\.\d+|\d+)$")
_SKIPPED = frozenset(("checkpoints", "wandb", "__pycache__", "node_modules", "lightning_logs_cache"))
_BOMS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be", codecs.BOM_UTF8: "utf-8"}
_TEXT = bytes(byte for byte in range(256) if byte >= 32 or byte in b"\t\n\r\x0b\x0c\x08\x1b\x07")  # noqa: PLR2004


@dataclass(frozen=True, kw_only=True)
class LogSource:
    """A file or standard input to read."""

    name: str
    path: Path | None
    """None for standard input."""
    named: bool = True
    """By the user; a file that was only found in a folder may be left."""

    @contextmanager
    def open(self) -> Iterator[io.BufferedReader]:
        """Open its bytes, decompressed."""
        if self.path is None:
            if sys.stdin is None or not hasattr(sys.stdin, "buffer"):
                raise WrongUse(
                    STDIN, found="standard input is closed", cure="Send a log to it, as in ... | trimtab -"
                )
            yield _decompress(sys.stdin.buffer)
            return
        try:
            raw = self.path.open("rb")
        except OSError as error:
            raise WrongUse(
                shorten(self.name),
                found=f"it cannot be read ({error.strerror})",
                cure="Name a log, a folder of logs, or - for standard input.",
            ) from error
        with raw, _decompress(raw) as stream:
            yield stream


def _decompress(raw: Any) -> io.BufferedReader:
    """Decompress gzip, bzip2 or xz, detected by the first bytes."""
    try:
        magic = raw.peek(6)[:6]
    except OSError:
        magic = b""  # reading it will tell
    stream: Any
    if magic.startswith(b"\x1f\x8b"):
        import gzip

        stream = gzip.GzipFile(fileobj=raw)
    elif magic.startswith(b"BZh"):
        import bz2

        stream = bz2.BZ2File(raw)
    elif magic.startswith(b"\xfd7zXZ\x00"):
        import lzma

        stream = lzma.LZMAFile(raw)  # noqa: SIM115 - the caller closes it
    else:
        stream = raw
        return cast("io.BufferedReader", stream)
    return io.BufferedReader(stream, HEAD)


def read_up_to(raw: io.BufferedReader, count: int) -> tuple[bytes, str]:
    """Read up to `count` bytes; return them, and the error if the stream broke."""
    parts: list[bytes] = []
    missing = count
    try:
        while missing > 0 and (more := raw.read1(missing)):
            parts.append(more)
            missing -= len(more)
    except (EOFError, zlib.error, OSError, ValueError) as error:
        return b"".join(parts), str(error) or type(error).__name__
    except Exception as error:
        # lzma has an error of its own, which is loaded only where it is needed.
        if type(error).__name__ != "LZMAError":
            raise
        return b"".join(parts), str(error)
    return b"".join(parts), ""


def find_sources(names: Sequence[str]) -> tuple[list[LogSource], list[str]]:
    """Find the sources that the names lead to, folders walked, and notes on what was left out."""
    sources: list[LogSource] = []
    notes: list[str] = []
    for name in names:
        if name == STDIN:
            sources.append(LogSource(name="stdin", path=None))
            continue
        path = Path(name)
        try:
            is_folder = path.is_dir()
            there = is_folder or path.exists()
        except (OSError, ValueError) as error:
            raise WrongUse(
                shorten(name), found=f"it is no path ({error})", cure="Name a log or a folder of logs."
            ) from error
        if not there:
            raise WrongUse(
                shorten(name),
                found="there is no such file",
                cure="Name a log, a folder of logs, or - for standard input.",
            )
        if is_folder:
            inside = list(_walk_logs(path))
            sources += [LogSource(name=str(file), path=file, named=False) for file in inside[:MOST_FILES]]
            if len(inside) > MOST_FILES:
                notes.append(f"{name}: {len(inside)} files; the first {MOST_FILES} were read.")
            if not inside:
                notes.append(f"{name}: no logs in it ({', '.join(sorted(ENDINGS - {''}))}).")
        else:
            sources.append(LogSource(name=name, path=path))
    return sources, notes


def _walk_logs(folder: Path) -> Iterator[Path]:
    """Yield files of a folder that may be logs, in order; links to folders are not followed."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            folder for folder in folders if folder not in _SKIPPED and not folder.startswith(".")
        )
        for name in sorted(names):
            path = Path(root) / name
            if (
                (path.suffix.lower() in ENDINGS or _NUMBERED.search(name))
                and not name.startswith(".")
                and path.is_file()
            ):
                yield path


def is_text(head: bytes) -> bool:
    """Return whether the first bytes of a file are text; a crash may leave blocks of zeros in it."""
    if not head.strip(b"\x00"):
        return not head
    other = len(head.replace(b"\x00" * 64, b"").translate(None, _TEXT))
    return other <= MOST_OTHER_SHARE * len(head)


def detect_encoding(head: bytes) -> str:
    """Detect the encoding by its mark or by its zeros; anything but UTF-16 is read as UTF-8.

    >>> [detect_encoding("loss".encode(name)) for name in ("utf-16", "utf-8", "utf-16-le")]
    ['utf-16-le', 'utf-8', 'utf-16-le']
    """
    for mark, name in _BOMS.items():
        if head.startswith(mark):
            return name
    pairs = head[:4096]
    if len(pairs) >= 8 and len(pairs) % 2 == 0:  # noqa: PLR2004 - a few letters
        even, odd = pairs[::2].count(0), pairs[1::2].count(0)
        half = len(pairs) // 2
        if odd > 0.9 * half and even < 0.1 * half:
            return "utf-16-le"
        if even > 0.9 * half and odd < 0.1 * half:
            return "utf-16-be"
    return "utf-8"


class Utf8Stream:
    """A stream that gives UTF-8 and keeps the error if it ended too early."""

    def __init__(self, raw: io.BufferedReader, head: bytes, encoding: str) -> None:
        self._raw = raw
        self._head = head
        self._decoder = None if encoding == "utf-8" else codecs.getincrementaldecoder(encoding)("replace")
        self.broken = ""

    def read_chunk(self, count: int) -> bytes:
        """Read about `count` more bytes; none at the end."""
        while True:
            data, self._head = self._head, b""
            if not data and not self.broken:
                data, self.broken = read_up_to(self._raw, count)
            if self._decoder is None or not data:
                return data
            text = self._decoder.decode(data)
            if text:
                return text.encode("utf-8", "replace")


MOST_BYTES = 1 << 30
"""A larger file is refused: its objects would take ten times as much memory."""


class NotPlainPickle(ValueError):  # noqa: N818 - reads as a sentence in `except`
    """Raised for a pickle that is broken or holds more than plain values."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise NotPlainPickle(f"it names {module}.{name}, and only plain values are read")

    def persistent_load(self, _: Any) -> NoReturn:
        raise NotPlainPickle("it refers to something outside of itself, as checkpoints do")


_CHECKED_BYTES = 4 << 20
"""Smaller pickles are checked first; for a larger one a memo of a few GiB is no long time."""


def _check_memo(data: bytes) -> None:
    """Raise if a pickle numbers its objects higher than its length: the reader would allocate them all."""
    for code, argument, _ in pickletools.genops(data):
        if code.name in ("LONG_BINPUT", "PUT") and isinstance(argument, int) and argument > len(data):
            raise NotPlainPickle("it is broken: it numbers more objects than it can have")


def load_plain_pickle(stream: IO[bytes]) -> Any:
    """Load the plain value in a pickle; raise NotPlainPickle for anything else."""
    try:
        data = stream.read(_CHECKED_BYTES)
        if len(data) < _CHECKED_BYTES:
            _check_memo(data)
            stream = io.BytesIO(data)
        else:
            stream.seek(0)
        return _PlainUnpickler(stream, encoding="utf-8", errors="replace").load()
    except NotPlainPickle:
        raise
    except MemoryError:
        raise NotPlainPickle("it asks for more memory than there is") from None
    except RecursionError:
        raise NotPlainPickle("it is nested too deeply") from None
    except Exception as error:  # broken pickles raise nearly anything
        raise NotPlainPickle(f"it is broken: {type(error).__name__}") from error
