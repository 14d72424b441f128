"""What learns in the job bridge: from bytes to latents, and from latents to what a frozen model reads."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from trimtab.jobs.bridge import Bridge

BYTES = 256


class Pooler(nn.Module):
    """A few learned queries, and what they find in a long sequence."""

    def __init__(self, latents: int, width: int, heads: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(latents, width) / math.sqrt(width))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.gate = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.last_norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        queries = self.queries.expand(x.size(0), -1, -1)
        found, _ = self.attention(queries, x, x, key_padding_mask=padded, need_weights=False)
        x = self.norm(queries + torch.sigmoid(self.gate(found)) * found)
        return self.last_norm(x + self.narrow(functional.gelu(self.wide(x))))


class Encoder(nn.Module):
    """From bytes to latents."""

    waves: torch.Tensor

    def __init__(self, job: Bridge) -> None:
        super().__init__()
        width = job.latent_width
        self.bytes = nn.Embedding(BYTES, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, job.encoder_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(job.encoder_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.pooler = Pooler(job.latents, width, job.encoder_heads)
        self.register_buffer("waves", _waves(job.source, width), persistent=False)

    def forward(self, source: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        padded = torch.arange(source.size(1), device=source.device) >= length[:, None]
        x = self.bytes(source) + self.waves
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padded)
        return self.pooler(self.norm(x), padded)


def _waves(length: int, width: int) -> torch.Tensor:
    """Sines and cosines of every position, from fast to slow."""
    speeds = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(length)[:, None] * speeds
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Adapter(nn.Module):
    """From latents to a prefix that a frozen model reads as if it were words."""

    def __init__(self, job: Bridge, width: int, spread: float) -> None:
        super().__init__()
        narrow = job.latent_width
        self.position = nn.Parameter(torch.randn(job.latents, narrow) * 0.02)
        self.length = nn.Linear(1, narrow)
        self.norm = nn.LayerNorm(narrow)
        self.deep = nn.Sequential(
            nn.Linear(narrow, 2 * narrow),
            nn.GELU(),
            nn.Linear(2 * narrow, 2 * narrow),
            nn.GELU(),
            nn.Linear(2 * narrow, width),
        )
        self.skip = nn.Linear(narrow, width)
        self.film_scale = nn.Linear(narrow, width)
        self.film_shift = nn.Linear(narrow, width)
        self.last_norm = nn.LayerNorm(width)
        # One number in a list: fsdp shards lists alone.
        self.scale = nn.Parameter(torch.full((1,), spread))

    @torch.no_grad()
    def as_large_as(self, words: torch.Tensor) -> None:
        """Begin with prefixes of the size of the words that a model is used to.

        Their root mean square is found once, when the model is built. A slice at a time: a table in bf16 of
        half a billion numbers would be another two GiB in fp32.
        """
        squares = sum(some.float().square().sum() for some in words.split(8192))
        self.scale.copy_((squares / words.numel()) ** 0.5)

    def forward(self, latents: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """`share` is how long the answer is, of the longest."""
        x = self.norm(latents + self.position + self.length(share[:, None])[:, None])
        whole = x.mean(dim=1, keepdim=True)
        y = self.deep(x) + self.skip(x)
        y = y * (1 + self.film_scale(whole)) + self.film_shift(whole)
        return self.last_norm(y) * self.scale


class Refiner(nn.Module):
    """A few more layers over the latents alone, which then know of each other."""

    def __init__(self, job: Bridge) -> None:
        super().__init__()
        width = job.latent_width
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, job.encoder_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True
            )
            for _ in range(job.refiner)
        )

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            latents = layer(latents)
        return latents


class DeepPrefix(nn.Module):
    """Keys and values of a prefix for every layer of a frozen model, made from the prefix itself."""

    def __init__(self, width: int, layers: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.shape = layers, 2, heads, head_width
        self.mix = nn.Linear(width, width, bias=False)
        self.spread = nn.Linear(width, math.prod(self.shape), bias=False)

    def forward(self, prefix: torch.Tensor) -> torch.Tensor:
        """In the shape (layer, key or value, sample, head, position, width)."""
        found = self.spread(functional.gelu(self.mix(prefix)))
        return found.unflatten(-1, self.shape).permute(2, 3, 0, 4, 1, 5)


class GivenKeys:
    """A deep prefix as attention asks for what came before; asking changes nothing, so it can be repeated."""

    is_compileable = False

    def __init__(self, made: torch.Tensor) -> None:
        self.made = made

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a layer, after those of the prefix."""
        before = self.made[layer]
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)

    def mask(self, length: int) -> torch.Tensor:
        """What a sequence of that length may look at: all of the prefix, and itself up to each position."""
        given = self.made.size(4)
        seen = torch.ones(length, given + length, dtype=torch.bool, device=self.made.device)
        return seen.tril(diagonal=given)[None, None]
