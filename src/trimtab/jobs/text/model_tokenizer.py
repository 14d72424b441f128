"""Use the tokenizer of a model's folder."""

from __future__ import annotations

import codecs
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab.errors import EnvironmentFault, WrongUse
from trimtab.jobs.text.corpus import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from trimtab.jobs.text.corpus import Corpus
    from trimtab.jobs.text.tokens import TokenProgress

    Numbers = np.ndarray[Any, np.dtype[Any]]

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
VOCABULARY_FILES = (
    *("vocab.txt", "vocab.json", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
"""Files of tokenizers that have no tokenizer.json."""
_CURE = f"Add the tokenizer's files, or remove {TOKENIZER_CONFIG}: a tokenizer is then trained on the text."


def find_tokenizer(folder: Path, size: int, end: int | None) -> ModelTokenizer | None:
    """Return the tokenizer of a folder; None if it has none. `end` is the token after a document."""
    given = f"the tokenizer of {folder}"
    files = [name for name in VOCABULARY_FILES if (folder / name).is_file()]
    if (folder / TOKENIZER_JSON).is_file():
        return ModelTokenizer(folder, (TOKENIZER_JSON,), size, end)
    if files:
        return ModelTokenizer(folder, tuple(files), size, end)
    if (folder / TOKENIZER_CONFIG).is_file():
        raise WrongUse(
            given,
            found=f"there is {TOKENIZER_CONFIG}, and none of "
            f"{', '.join((TOKENIZER_JSON, *VOCABULARY_FILES[:4]))}",
            cure=_CURE,
        )
    return None


class ModelTokenizer:
    """The tokenizer that the model was trained with."""

    def __init__(self, folder: Path, files: tuple[str, ...], size: int, end: int | None) -> None:
        self.folder = folder
        self.files = files
        self.size = size
        self.end = end
        self._loaded: Any = None

    @property
    def fingerprint(self) -> str:
        """Cache key part that changes with the files."""
        digest = hashlib.blake2b(digest_size=12)
        for name in self.files:
            digest.update((self.folder / name).read_bytes())
        return f"{self.folder.absolute()} {digest.hexdigest()} {self.size} {self.end}"

    @property
    def words(self) -> str:
        """Description for messages."""
        return f"the tokenizer in {self.folder}"

    def prepare(self, corpus: Corpus, progress: TokenProgress) -> ModelTokenizer:  # noqa: ARG002 - not trained
        """Load the tokenizer's files and return it."""
        progress.update(0.0, "reading the tokenizer")
        self.load()
        return self

    def load(self) -> Any:
        """Return the tokenizer of the library tokenizers or transformers, loaded once."""
        if self._loaded is None:
            self._loaded = self._load_json() if self.files == (TOKENIZER_JSON,) else self._load_files()
        return self._loaded

    def _load_json(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise EnvironmentFault(
                f"the tokenizer of {self.folder}",
                found=f"it needs the package 'tokenizers', which cannot be imported here ({error})",
                cure="Install it: pip install 'trimtab[jobs]'",
            ) from error
        try:
            tokenizer = Tokenizer.from_file(str(self.folder / TOKENIZER_JSON))
        except Exception as error:  # the library raises bare exceptions
            raise self._unreadable_error(error) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _load_files(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True)
        except Exception as error:
            raise self._unreadable_error(error) from error

    def _unreadable_error(self, error: Exception) -> WrongUse:
        why = (str(error).strip().split("\n") or [""])[0][:200]
        files = ", ".join(self.files)
        return WrongUse(f"the tokenizer of {self.folder}", found=f"{files} cannot be read: {why}", cure=_CURE)

    def mask_token(self) -> int | None:
        """Return the mask token; None if there is none."""
        tokenizer = self.load()
        if self.files != (TOKENIZER_JSON,):
            mask = tokenizer.mask_token_id
        else:
            ids = map(tokenizer.token_to_id, ("[MASK]", "<mask>"))
            mask = next((token for token in ids if token is not None), None)
        return mask if mask is not None and mask < self.size else None

    def encode_chunks(self, chunks: Iterable[bytes]) -> Iterator[Numbers]:
        """Yield the tokens of a text, chunk by chunk; a split character waits for its other bytes."""
        tokenizer = self.load()
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for chunk in chunks:
            if chunk == SEPARATOR:
                yield np.array([] if self.end is None else [self.end], dtype=np.int64)
                continue
            encoding = tokenizer.encode(decoder.decode(chunk), add_special_tokens=False)
            numbers = np.array(encoding if isinstance(encoding, list) else encoding.ids, dtype=np.int64)
            if numbers.max(initial=0) >= self.size:
                raise WrongUse(
                    self.words,
                    found=f"it gives token {numbers.max()}, and config.json has vocab_size {self.size}",
                    cure="Put the tokenizer and the config of the same model into the folder.",
                )
            yield numbers

    def save(self, folder: Path) -> None:
        """Do nothing: the model's folder has the tokenizer."""
