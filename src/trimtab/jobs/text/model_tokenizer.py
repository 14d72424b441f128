"""The tokenizer that comes with a model's folder."""

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
    from trimtab.jobs.text.tokens import Tell

    Numbers = np.ndarray[Any, np.dtype[Any]]

WHOLE = "tokenizer.json"
ABOUT = "tokenizer_config.json"
PARTS = (
    *("vocab.txt", "vocab.json", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
"""Files of tokenizers that are not written as one."""
_CURE = f"Add the tokenizer's files, or take {ABOUT} out: tokens are then learnt from the text."


def tokenizer_in(folder: Path, size: int, end: int | None) -> Foreign | None:
    """The tokenizer of a folder; None where it has none. `end` is the token that stands after a document."""
    given = f"the tokenizer of {folder}"
    parts = [name for name in PARTS if (folder / name).is_file()]
    if (folder / WHOLE).is_file():
        return Foreign(folder, (WHOLE,), size, end)
    if parts:
        return Foreign(folder, tuple(parts), size, end)
    if (folder / ABOUT).is_file():
        raise WrongUse(
            given, found=f"there is {ABOUT}, and none of {', '.join((WHOLE, *PARTS[:4]))}", cure=_CURE
        )
    return None


class Foreign:
    """Tokens as the model was trained with."""

    def __init__(self, folder: Path, files: tuple[str, ...], size: int, end: int | None) -> None:
        self.folder = folder
        self.files = files
        self.size = size
        self.end = end
        self._library: Any = None

    @property
    def fingerprint(self) -> str:
        """Changes with the files."""
        held = hashlib.blake2b(digest_size=12)
        for name in self.files:
            held.update((self.folder / name).read_bytes())
        return f"{self.folder.absolute()} {held.hexdigest()} {self.size} {self.end}"

    @property
    def words(self) -> str:
        """Which one it is, for people."""
        return f"the tokenizer in {self.folder}"

    def prepared(self, corpus: Corpus, tell: Tell) -> Foreign:  # noqa: ARG002 - the text has no say
        """Read from its files; nothing is learnt."""
        tell.at(0.0, "reading the tokenizer")
        self.library()
        return self

    def library(self) -> Any:
        """The tokenizer itself, from whichever library reads it."""
        if self._library is None:
            self._library = self._whole() if self.files == (WHOLE,) else self._parts()
        return self._library

    def _whole(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise EnvironmentFault(
                f"the tokenizer of {self.folder}",
                found=f"it needs the package 'tokenizers', which cannot be imported here ({error})",
                cure="Install it: pip install 'trimtab[jobs]'",
            ) from error
        try:
            found = Tokenizer.from_file(str(self.folder / WHOLE))
        except Exception as error:  # the library raises bare exceptions
            raise self._broken(error) from error
        found.no_truncation()
        found.no_padding()
        return found

    def _parts(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(self.folder), local_files_only=True)
        except Exception as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> WrongUse:
        why = (str(error).strip().split("\n") or [""])[0][:200]
        files = ", ".join(self.files)
        return WrongUse(f"the tokenizer of {self.folder}", found=f"{files} cannot be read: {why}", cure=_CURE)

    def mask(self) -> int | None:
        """The token for what is hidden; None where there is none."""
        library = self.library()
        if self.files != (WHOLE,):
            found = library.mask_token_id
        else:
            known = map(library.token_to_id, ("[MASK]", "<mask>"))
            found = next((one for one in known if one is not None), None)
        return found if found is not None and found < self.size else None

    def encoded(self, chunks: Iterable[bytes]) -> Iterator[Numbers]:
        """The tokens of a text, chunk by chunk; what ends within a letter waits for the rest of it."""
        library = self.library()
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for chunk in chunks:
            if chunk == SEPARATOR:
                yield np.array([] if self.end is None else [self.end], dtype=np.int64)
                continue
            found = library.encode(decoder.decode(chunk), add_special_tokens=False)
            numbers = np.array(found if isinstance(found, list) else found.ids, dtype=np.int64)
            if numbers.max(initial=0) >= self.size:
                raise WrongUse(
                    self.words,
                    found=f"it gives token {numbers.max()}, and config.json has vocab_size {self.size}",
                    cure="Put the tokenizer and the config of the same model into the folder.",
                )
            yield numbers

    def keep(self, folder: Path) -> None:
        """The folder has it already."""
