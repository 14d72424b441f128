"""Tokenize a text once into a cached file that every process maps into memory.

The cache key depends on the files of the text and the tokenizer. The file is written to a temporary folder
and renamed; of several processes one writes and the others wait.
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
from trimtab.jobs.text.byte_pairs import BYTES, BytePairs, count_words, train_byte_pairs
from trimtab.spec.base import Noun
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trimtab.jobs.text.corpus import Corpus

    Numbers = np.ndarray[Any, np.dtype[Any]]

FORMAT = 1
"""Format version: increase it when the same text gives other tokens, or the file format changes."""
TRAINING_BYTES = 32 * 2**20
"""Bytes of text to train a vocabulary on; evenly spaced parts of a longer text."""
NARROW = 2**16
"""Vocabularies up to this size take two bytes per token."""
TOKENS, ABOUT, PAIRS = "tokens.bin", "about.json", "pairs.npy"


class Tokeniser(Protocol):
    """A tokenizer that may need training."""

    size: int
    """Tokens are below this number."""

    @property
    def fingerprint(self) -> str:
        """Cache key part that changes when the same text gives other tokens."""

    def prepare(self, corpus: Corpus, progress: TokenProgress) -> TokenEncoder:
        """Return the encoder for a text, trained on it if necessary."""


class TokenEncoder(Protocol):
    """A tokenizer that is ready to use."""

    @property
    def words(self) -> str:
        """Description for messages."""

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[Numbers]:
        """Yield the tokens of a text, chunk by chunk."""

    def save(self, folder: Path) -> None:
        """Write what is needed to decode the tokens."""


class Tokens(Noun, frozen=True, kw_only=True):
    """A tokenized text in the cache."""

    folder: str
    count: int
    kind: str
    """The numpy dtype of a token."""
    size_bytes: int
    """Size of the text."""
    origin: str
    tokeniser: str

    def array(self) -> Numbers:
        """Return the tokens, memory-mapped: read on access and shared by processes."""
        return np.memmap(Path(self.folder) / TOKENS, dtype=self.kind, mode="r")

    def byte_pairs(self) -> BytePairs:
        """Return the trained vocabulary; raise OSError if the tokenizer was a model's own."""
        return read_byte_pairs(Path(self.folder) / PAIRS)


class BytePairTokenizer:
    """Tokenizer of byte pairs trained on the text; a size of 256 needs no training."""

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def fingerprint(self) -> str:
        """Cache key part: format version and size."""
        return f"byte pairs {FORMAT}, {self.size}"

    def prepare(self, corpus: Corpus, progress: TokenProgress) -> TokenEncoder:
        """Train the vocabulary and return the encoder."""
        if self.size <= BYTES:
            return BytePairEncoder(BytePairs())
        step = -(-corpus.size_bytes // TRAINING_BYTES)
        sample = (chunk for number, chunk in enumerate(corpus.chunks()) if number % step == 0)
        words = count_words(progress.track(sample, corpus.size_bytes // step, "counting words"))
        return BytePairEncoder(
            train_byte_pairs(
                words, self.size, lambda size: progress.update(size / self.size, "training the tokenizer")
            )
        )


class BytePairEncoder:
    """Encoder with trained byte pairs."""

    def __init__(self, byte_pairs: BytePairs) -> None:
        self._byte_pairs = byte_pairs
        self.words = f"{byte_pairs.size:,} byte pairs trained on it" if byte_pairs.rounds else "bytes"
        self.encode_chunks = byte_pairs.encode_chunks

    def save(self, folder: Path) -> None:
        """Write the pairs, each with its round."""
        rounds = self._byte_pairs.rounds
        rows = [np.column_stack([np.full(len(pairs), number), pairs]) for number, pairs in enumerate(rounds)]
        table = np.concatenate(rows) if rows else np.zeros((0, 3), dtype=np.int64)
        np.save(folder / PAIRS, table, allow_pickle=False)


def read_byte_pairs(file: Path) -> BytePairs:
    """Read the vocabulary that BytePairEncoder.save() wrote."""
    table = np.load(file, allow_pickle=False)
    last = int(table[-1, 0]) if len(table) else -1
    return BytePairs([table[table[:, 0] == number, 1:] for number in range(last + 1)])


def tokenize(corpus: Corpus, tokeniser: Tokeniser) -> Tokens:
    """Return the tokens of a text, from the cache if possible."""
    inputs = f"{FORMAT}\n{corpus.state}\n{tokeniser.fingerprint}"
    key = hashlib.blake2b(inputs.encode(), digest_size=12).hexdigest()
    home = CACHE.folder
    place = home / key
    cached = _read_cached(place)
    if cached is not None:
        return cached
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _lock_file(home / f"{key}.lock"):
            # Another process may have done it while this one waited.
            return _read_cached(place) or _write_tokens(place, corpus, tokeniser)
    except OSError as error:
        raise EnvironmentFault(
            f"the cache of tokens in {home}",
            found=f"it cannot be written ({error.strerror})",
            cure="Free some room there, or name another folder in the variable TRIMTAB_CACHE.",
        ) from error


def _read_cached(place: Path) -> Tokens | None:
    """Return the cached tokens; None if they are missing or incomplete."""
    try:
        tokens = Tokens.from_json((place / ABOUT).read_bytes(), origin=str(place))
        size = (place / TOKENS).stat().st_size
    except (OSError, TrimtabError):
        return None
    # The cache may have been moved since.
    is_complete = size == tokens.count * np.dtype(tokens.kind).itemsize
    return tokens.replace(folder=str(place)) if is_complete else None


@contextlib.contextmanager
def _lock_file(file: Path) -> Iterator[None]:
    """Hold an exclusive file lock; the system releases the lock of a killed process."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Wait silently: the process with the lock shows its progress.
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_tokens(place: Path, corpus: Corpus, tokeniser: Tokeniser) -> Tokens:
    """Tokenize into a temporary folder and rename it."""
    kind = np.dtype(np.uint16 if tokeniser.size <= NARROW else np.uint32)
    _check_room(place.parent, corpus.size_bytes * kind.itemsize)
    for old in (place, *place.parent.glob(f".{place.name}.*")):
        # Damaged, or left by a killed process; the lock excludes other writers.
        shutil.rmtree(old, ignore_errors=True)
    temporary = place.parent / f".{place.name}.{os.getpid()}"
    temporary.mkdir()
    progress = TokenProgress(f"tokenising {corpus.origin}, {format_bytes(corpus.size_bytes)}, once")
    try:
        encoder = tokeniser.prepare(corpus, progress)
        number = 0
        with (temporary / TOKENS).open("wb") as file:
            chunks = progress.track(corpus.chunks(), corpus.size_bytes, "writing tokens")
            for part in encoder.encode_chunks(chunks):
                part.astype(kind).tofile(file)
                number += len(part)
        encoder.save(temporary)
        tokens = Tokens(
            folder=str(place),
            count=number,
            kind=kind.name,
            size_bytes=corpus.size_bytes,
            origin=corpus.origin,
            tokeniser=encoder.words,
        )
        (temporary / ABOUT).write_text(tokens.to_json(), encoding="utf-8")
        temporary.rename(place)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    progress.finish(f"{number:,} tokens kept in {place}")
    return tokens


def _check_room(home: Path, need: int) -> None:
    free = shutil.disk_usage(home).free
    if free < need:
        raise EnvironmentFault(
            f"the cache of tokens in {home}",
            found=f"{format_bytes(free)} are free, and the tokens take up to {format_bytes(need)}",
            cure="Free some room there, or name another folder in the variable TRIMTAB_CACHE.",
        )


class TokenProgress:
    """Progress on stderr: an updated line on a terminal, otherwise a line at the start and at the end."""

    QUICK_S = 0.5
    """Shorter work prints nothing."""
    APART_S = 0.1

    def __init__(self, title: str) -> None:
        self._title = title
        self._began = self._last = time.monotonic()
        self._printed = False

    def update(self, share: float, doing: str) -> None:
        """Show the share of the current work that is done."""
        now = time.monotonic()
        if now - self._began < self.QUICK_S or now - self._last < self.APART_S:
            return
        self._last = now
        if sys.stderr.isatty():
            self._write(f"\r\x1b[Ktrimtab: {doing}: {min(share, 1.0):.0%}")
        elif not self._printed:
            self._write(f"trimtab: {self._title}\n")
        self._printed = True

    def track(self, chunks: Iterable[bytes], total: int, doing: str) -> Iterator[bytes]:
        """Yield the chunks and show progress by their bytes."""
        done = 0
        for chunk in chunks:
            yield chunk
            done += len(chunk)
            self.update(done / max(1, total), doing)

    def finish(self, result: str) -> None:
        """Print the result, if progress was printed."""
        if self._printed:
            clear = "\r\x1b[K" if sys.stderr.isatty() else ""
            took = time.monotonic() - self._began
            self._write(f"{clear}trimtab: {result}, in {took:.1f} s\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
