"""Split a text into blocks of equal length without overlap, and hold some out for validation."""

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

HELD_OUT_EVERY = 20
"""The last of this many blocks is held out."""


class BlockLayout(Noun, frozen=True, kw_only=True):
    """The mapping from samples to blocks of a text.

    >>> layout = BlockLayout(blocks=45, epoch_samples=4)
    >>> layout.training_blocks, layout.held_out, [layout.block(sample) for sample in range(4)]
    (43, 2, [0, 10, 22, 33])
    """

    blocks: int
    """Blocks in the text."""
    epoch_samples: int | None = None
    """Samples per epoch as chosen; None: every block once."""

    @property
    def held_out(self) -> int:
        """Blocks for validation: every twentieth."""
        return self.blocks // HELD_OUT_EVERY

    @property
    def training_blocks(self) -> int:
        """Blocks for training."""
        return self.blocks - self.held_out

    @property
    def samples(self) -> int:
        """Samples per epoch."""
        return self.training_blocks if self.epoch_samples is None else self.epoch_samples

    def block(self, sample: int) -> int:
        """Return the block of a sample: evenly spaced for fewer samples than blocks, else repeated."""
        samples, blocks = self.samples, self.training_blocks
        place = sample * blocks // samples if samples < blocks else sample % blocks
        # Nineteen training blocks, then one that is held out.
        return place + place // (HELD_OUT_EVERY - 1)

    def held_out_block(self, sample: int, samples: int) -> int:
        """Return the block of a held-out sample; `samples` of them are evenly spaced."""
        return HELD_OUT_EVERY * (sample * self.held_out // samples) + HELD_OUT_EVERY - 1

    @property
    def description(self) -> str:
        """How the text is used, for a message."""
        samples, blocks = self.samples, self.training_blocks
        held_out = f"{self.held_out:,} more are held out" if self.held_out else "too few to hold any out"
        text = f"{plural(blocks, 'block', ',')} to learn from ({held_out})"
        if samples == blocks:
            return f"{text}, each once an epoch"
        if samples < blocks:
            return f"{text}, of which an epoch takes {samples:,}, evenly spaced (samples={samples})"
        least, rest = divmod(samples, blocks)
        times = f"{least:,}" if not rest else f"{least:,} or {least + 1:,}"
        return f"{text}, so that an epoch of {samples:,} samples has each {times} times (samples={samples})"


def lay_out_blocks(tokens: Tokens, length: int, samples: int | None) -> BlockLayout:
    """Return the layout for blocks of `length` tokens; raise WrongUse if the text is shorter."""
    blocks = tokens.count // length
    if not blocks:
        raise WrongUse(
            f"data {tokens.origin}",
            found=f"the text has {tokens.count:,} tokens ({tokens.size_bytes:,} bytes), "
            f"and one block takes {length:,}",
            cure=f"Give a longer text, or shorter sequences: at most {max(tokens.count - 1, 0):,} tokens.",
        )
    return BlockLayout(blocks=blocks, epoch_samples=samples)


def describe_text(tokens: Tokens, layout: BlockLayout, length: int) -> tuple[str, ...]:
    """Return lines that describe the text and its blocks."""
    return (
        f"text: {tokens.origin}",
        f"{tokens.count:,} tokens ({tokens.tokeniser}) in blocks of {length:,}: {layout.description}",
    )


class TokenBlocks(Dataset[Any]):
    """Dataset of token blocks; each process opens the file on first access."""

    def __init__(
        self,
        tokens: Tokens,
        length: int,
        count: int,
        block: Callable[[int], int],
        sample: Callable[[torch.Tensor, int], Any],
    ) -> None:
        """`block` maps a sample to its block; `sample` makes the item from its tokens and block number."""
        self._tokens = tokens
        self._length = length
        self._count = count
        self._block = block
        self._sample = sample
        self._array: Any = None

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a mapped file for a worker process would copy its content.
        return {**self.__dict__, "_array": None}

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._array is None:
            self._array = self._tokens.array()
        number = self._block(index)
        tokens = self._array[number * self._length : (number + 1) * self._length].astype("int64")
        return self._sample(torch.from_numpy(tokens), number)
