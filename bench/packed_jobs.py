"""Jobs with documents of different lengths in one row (`gpu_queue.py`)."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import nn

import trimtab

MIXES = {
    "even": (1024,) * 16,
    "short": (128,) * 96 + (512,) * 8,
    "long": (8192, 4096, 2048, 1024, 512, 256, 128, 128),
}
"""Documents of a row of 16,384 tokens."""


class Packed(trimtab.Job):
    """A decoder without head over one row of documents; attention stays within a document."""

    name = "packed"
    global_batch = 8
    samples, epochs = 1000, 1
    width, heads, layers, mix, way = 2048, 16, 8, "even", "varlen"

    def model(self) -> nn.Module:
        """Return the blocks."""
        return _PackedModel(self.width, self.heads, self.layers, MIXES[self.mix], self.way)

    def batch(self, size: int) -> torch.Tensor:
        """Return rows of vectors; only one row is packed."""
        return torch.randn(size, sum(MIXES[self.mix]), self.width)

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        """Return the mean square of the result."""
        out: torch.Tensor = model(batch.flatten(0, 1))
        return out.float().square().mean()


class _PackedModel(nn.Module):
    def __init__(self, width: int, heads: int, layers: int, lengths: tuple[int, ...], way: str) -> None:
        super().__init__()
        self.lengths, self.way = lengths, way
        self.blocks = nn.ModuleList(_PackedBlock(width, heads, way) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the vectors after all blocks; the row may have several copies of the documents."""
        copies = x.shape[0] // sum(self.lengths)
        lengths = self.lengths * copies
        ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=x.device)
        mask = _make_mask(lengths, x.device) if self.way == "flex" else None
        for block in self.blocks:
            x = block(x, ends, max(lengths), mask)
        return x


def _make_mask(lengths: tuple[int, ...], device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    counts = torch.tensor(lengths, device=device)
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts)

    def is_seen(_: Any, __: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (document[query] == document[key])

    total = sum(lengths)
    return create_block_mask(is_seen, None, None, total, total, device=str(device))


class _PackedBlock(nn.Module):
    def __init__(self, width: int, heads: int, way: str) -> None:
        super().__init__()
        self.heads, self.way = heads, way
        self.norm, self.norm_ff = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, ends: torch.Tensor, longest: int, mask: Any) -> torch.Tensor:
        """Return the vectors after attention and two linear layers."""
        tokens, width = x.shape
        query, key, value = self.qkv(self.norm(x)).view(tokens, 3, self.heads, width // self.heads).unbind(1)
        if self.way == "flex":
            out = _attend_by_mask(query, key, value, mask)
        else:
            out = _attend_by_ends(query, key, value, ends, longest)
        x = x + self.out(out.reshape(tokens, width))
        wide: torch.Tensor = torch.nn.functional.gelu(self.up(self.norm_ff(x)))
        return x + self.down(wide)  # type: ignore[no-any-return]


def _attend_by_ends(query: Any, key: Any, value: Any, ends: torch.Tensor, longest: int) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.10 has is_causal, later releases a window.
    takes: Any = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"is_causal": True} if "is_causal" in takes else {"window_size": (-1, 0)}
    out: Any = varlen_attn(query, key, value, ends, ends, longest, longest, **causal)
    return out  # type: ignore[no-any-return]


def _attend_by_mask(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    rows = [part.transpose(0, 1)[None] for part in (query, key, value)]
    run: Any = torch.compile(flex_attention)
    out: torch.Tensor = run(*rows, block_mask=mask)[0].transpose(0, 1)
    return out
