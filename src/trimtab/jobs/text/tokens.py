"""A text as numbers in a file: tokenised once, then mapped into memory by every process that reads it.

The file lies in the user's cache, under a name that follows from the files of the text and the tokeniser. It
is written beside its place and moved there whole; of several processes one writes and the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trimtab.cache import TOKENS as CACHE
from trimtab.errors import EnvironmentFault, TrimtabError
from trimtab.jobs.text.byte_pairs import BYTES, Pieces, count, learn
from trimtab.spec.base import Noun
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trimtab.jobs.text.corpus import Corpus

    Numbers = np.ndarray[Any, np.dtype[Any]]

FORMAT = 1
"""Counts up when the same text would become other tokens, or the files change their form."""
LEARNT_FROM = 32 * 2**20
"""Bytes of text that a vocabulary is learnt from; of a longer one, evenly spaced parts."""
NARROW = 2**16
"""Vocabularies up to this size take two bytes a token."""
TOKENS, ABOUT, PAIRS = "tokens.bin", "about.json", "pairs.npy"


class Tokeniser(Protocol):
    """What makes tokens of a text."""

    size: int
    """Tokens are below this number."""

    @property
    def fingerprint(self) -> str:
        """Changes when the same text would become other tokens."""

    def prepared(self, corpus: Corpus, tell: Tell) -> TokenEncoder:
        """Ready for a text; learns from it, where it does that."""


class TokenEncoder(Protocol):
    """A tokeniser that is ready."""

    @property
    def words(self) -> str:
        """Which one it is, for people."""

    def encoded(self, chunks: Iterable[bytes]) -> Iterator[Numbers]:
        """The tokens of a text, chunk by chunk."""

    def keep(self, folder: Path) -> None:
        """Write what is needed to read the tokens again."""


class Tokens(Noun, frozen=True, kw_only=True):
    """A text that was tokenised, and where its tokens are."""

    folder: str
    count: int
    kind: str
    """The numpy dtype of a token."""
    size_bytes: int
    """Of the text."""
    origin: str
    tokeniser: str

    def array(self) -> Numbers:
        """The tokens, mapped into memory: read when they are used, and shared by processes."""
        return np.memmap(Path(self.folder) / TOKENS, dtype=self.kind, mode="r")

    def pieces(self) -> Pieces:
        """The vocabulary that was learnt; raises where it was another's tokeniser."""
        return read_pieces(Path(self.folder) / PAIRS)


class Learnt:
    """Byte pairs learnt from the text itself; 256 are the bytes, and nothing has to be learnt."""

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def fingerprint(self) -> str:
        """The size is all that can be chosen."""
        return f"byte pairs {FORMAT}, {self.size}"

    def prepared(self, corpus: Corpus, tell: Tell) -> TokenEncoder:
        """With the vocabulary learnt."""
        if self.size <= BYTES:
            return Own(Pieces())
        apart = -(-corpus.size_bytes // LEARNT_FROM)
        some = (chunk for number, chunk in enumerate(corpus.chunks()) if number % apart == 0)
        words = count(tell.through(some, corpus.size_bytes // apart, "counting words"))
        return Own(learn(words, self.size, lambda known: tell.at(known / self.size, "learning pieces")))


class Own:
    """Byte pairs, ready."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self.words = f"{pieces.size:,} byte pairs learnt from it" if pieces.rounds else "bytes"
        self.encoded = pieces.encoded

    def keep(self, folder: Path) -> None:
        """The pairs, each with its round."""
        rounds = self._pieces.rounds
        rows = [np.column_stack([np.full(len(one), number), one]) for number, one in enumerate(rounds)]
        table = np.concatenate(rows) if rows else np.zeros((0, 3), dtype=np.int64)
        np.save(folder / PAIRS, table, allow_pickle=False)


def read_pieces(file: Path) -> Pieces:
    """The vocabulary that was kept."""
    table = np.load(file, allow_pickle=False)
    last = int(table[-1, 0]) if len(table) else -1
    return Pieces([table[table[:, 0] == number, 1:] for number in range(last + 1)])


def tokenised(corpus: Corpus, tokeniser: Tokeniser) -> Tokens:
    """The tokens of a text, from the cache where they are there."""
    question = f"{FORMAT}\n{corpus.state}\n{tokeniser.fingerprint}"
    key = hashlib.blake2b(question.encode(), digest_size=12).hexdigest()
    home = CACHE.folder
    place = home / key
    found = _kept(place)
    if found is not None:
        return found
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _locked(home / f"{key}.lock"):
            # Another process may have done it while this one waited.
            return _kept(place) or _made(place, corpus, tokeniser)
    except OSError as error:
        raise EnvironmentFault(
            f"the cache of tokens in {home}",
            found=f"it cannot be written ({error.strerror})",
            cure="Free some room there, or name another folder in the variable TRIMTAB_CACHE.",
        ) from error


def _kept(place: Path) -> Tokens | None:
    """What lies in the cache, if it is whole."""
    try:
        found = Tokens.from_json((place / ABOUT).read_bytes(), origin=str(place))
        size = (place / TOKENS).stat().st_size
    except (OSError, TrimtabError):
        return None
    # The cache may have been moved since.
    whole = size == found.count * np.dtype(found.kind).itemsize
    return found.replace(folder=str(place)) if whole else None


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process at a time; the system lets go of the lock of a process that is killed."""
    with file.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Not an error of ours, so nobody is told: the process that has the lock shows its progress.
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _made(place: Path, corpus: Corpus, tokeniser: Tokeniser) -> Tokens:
    """Tokenise, and move the whole folder to its place."""
    kind = np.dtype(np.uint16 if tokeniser.size <= NARROW else np.uint32)
    _check_room(place.parent, corpus.size_bytes * kind.itemsize)
    for old in (place, *place.parent.glob(f".{place.name}.*")):
        # Damaged, or left by a process that was killed: nobody else is here, under the lock.
        shutil.rmtree(old, ignore_errors=True)
    beside = place.parent / f".{place.name}.{os.getpid()}"
    beside.mkdir()
    tell = Tell(f"tokenising {corpus.origin}, {format_bytes(corpus.size_bytes)}, once")
    try:
        encoder = tokeniser.prepared(corpus, tell)
        number = 0
        with (beside / TOKENS).open("wb") as file:
            chunks = tell.through(corpus.chunks(), corpus.size_bytes, "writing tokens")
            for some in encoder.encoded(chunks):
                some.astype(kind).tofile(file)
                number += len(some)
        encoder.keep(beside)
        found = Tokens(
            folder=str(place),
            count=number,
            kind=kind.name,
            size_bytes=corpus.size_bytes,
            origin=corpus.origin,
            tokeniser=encoder.words,
        )
        (beside / ABOUT).write_text(found.to_json(), encoding="utf-8")
        beside.rename(place)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    tell.done(f"{number:,} tokens kept in {place}")
    return found


def _check_room(home: Path, need: int) -> None:
    free = shutil.disk_usage(home).free
    if free < need:
        raise EnvironmentFault(
            f"the cache of tokens in {home}",
            found=f"{format_bytes(free)} are free, and the tokens take up to {format_bytes(need)}",
            cure="Free some room there, or name another folder in the variable TRIMTAB_CACHE.",
        )


class Tell:
    """Progress on stderr: a line that changes on a terminal, a line at both ends elsewhere."""

    QUICK_S = 0.5
    """Nothing is said about what takes less."""
    APART_S = 0.1

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = self._last = time.monotonic()
        self._said = False

    def at(self, share: float, doing: str) -> None:
        """So much of what is being done is done."""
        now = time.monotonic()
        if now - self._began < self.QUICK_S or now - self._last < self.APART_S:
            return
        self._last = now
        if sys.stderr.isatty():
            self._write(f"\r\x1b[Ktrimtab: {doing}: {min(share, 1.0):.0%}")
        elif not self._said:
            self._write(f"trimtab: {self._what}\n")
        self._said = True

    def through(self, chunks: Iterable[bytes], total: int, doing: str) -> Iterator[bytes]:
        """The same chunks, with progress by their bytes."""
        done = 0
        for chunk in chunks:
            yield chunk
            done += len(chunk)
            self.at(done / max(1, total), doing)

    def done(self, result: str) -> None:
        """The end, where it was worth a beginning."""
        if self._said:
            clear = "\r\x1b[K" if sys.stderr.isatty() else ""
            took = time.monotonic() - self._began
            self._write(f"{clear}trimtab: {result}, in {took:.1f} s\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
