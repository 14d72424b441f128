"""Samples of a text: blocks of as many tokens, one after the other, without overlap; some are held out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from trimtab.errors import WrongUse
from trimtab.spec.base import Noun
from trimtab.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.jobs.text.tokens import Tokens

APART = 20
"""Of so many blocks the last is held out."""


class BlockLayout(Noun, frozen=True, kw_only=True):
    """How a text is cut, and which of its blocks a sample is.

    >>> layout = Layout(blocks=45, wanted=4)
    >>> layout.learnt, layout.held_out, [layout.block(one) for one in range(4)]
    (43, 2, [0, 10, 22, 33])
    """

    blocks: int
    """In the text."""
    wanted: int | None = None
    """Samples in an epoch; None: every block once."""

    @property
    def held_out(self) -> int:
        """Blocks that nothing is learnt from: every twentieth."""
        return self.blocks // APART

    @property
    def learnt(self) -> int:
        """The other blocks."""
        return self.blocks - self.held_out

    @property
    def samples(self) -> int:
        """In an epoch."""
        return self.learnt if self.wanted is None else self.wanted

    def block(self, sample: int) -> int:
        """The block of a sample: evenly spaced where there are fewer samples, again and again where more."""
        samples, learnt = self.samples, self.learnt
        place = sample * learnt // samples if samples < learnt else sample % learnt
        # Nineteen blocks that are learnt from, then one that is not.
        return place + place // (APART - 1)

    def held_out_block(self, sample: int, samples: int) -> int:
        """The block of one of so many samples that are held out, evenly spaced."""
        return APART * (sample * self.held_out // samples) + APART - 1

    @property
    def words(self) -> str:
        """What becomes of the text, said plainly."""
        samples, learnt = self.samples, self.learnt
        held = f"{self.held_out:,} more are held out" if self.held_out else "too few to hold any out"
        blocks = f"{plural(learnt, 'block', ',')} to learn from ({held})"
        if samples == learnt:
            return f"{blocks}, each once an epoch"
        if samples < learnt:
            return f"{blocks}, of which an epoch takes {samples:,}, evenly spaced (samples={samples})"
        least, rest = divmod(samples, learnt)
        times = f"{least:,}" if not rest else f"{least:,} or {least + 1:,}"
        return f"{blocks}, so that an epoch of {samples:,} samples has each {times} times (samples={samples})"


def laid_out(tokens: Tokens, length: int, samples: int | None) -> BlockLayout:
    """Blocks of `length` tokens; raises where the text has not one."""
    blocks = tokens.count // length
    if not blocks:
        raise WrongUse(
            f"data {tokens.origin}",
            found=f"the text has {tokens.count:,} tokens ({tokens.size_bytes:,} bytes), "
            f"and one block takes {length:,}",
            cure=f"Give a longer text, or shorter sequences: at most {max(tokens.count - 1, 0):,} tokens.",
        )
    return BlockLayout(blocks=blocks, wanted=samples)


def described(tokens: Tokens, layout: BlockLayout, length: int) -> tuple[str, ...]:
    """What is read, and how it is cut, in words."""
    return (
        f"text: {tokens.origin}",
        f"{tokens.count:,} tokens ({tokens.tokeniser}) in blocks of {length:,}: {layout.words}",
    )


class TokenBlocks(Dataset[Any]):
    """Samples made of blocks; the file is opened by each process when it first reads."""

    def __init__(
        self,
        tokens: Tokens,
        length: int,
        count: int,
        block: Callable[[int], int],
        sample: Callable[[torch.Tensor, int], Any],
    ) -> None:
        """`block` says which block a sample is, and `sample` what becomes of its tokens and its number."""
        self._tokens = tokens
        self._length = length
        self._count = count
        self._block = block
        self._sample = sample
        self._array: Any = None

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        # A mapped file would travel to worker processes by value.
        return {**self.__dict__, "_array": None}

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._array is None:
            self._array = self._tokens.array()
        number = self._block(index)
        some = self._array[number * self._length : (number + 1) * self._length].astype("int64")
        return self._sample(torch.from_numpy(some), number)
