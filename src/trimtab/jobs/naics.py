"""naics: embeddings of industry codes, from four short texts a code, in a hyperbolic space.

Four frozen MiniLM encoders with LoRA, one a channel of text; a mixture of experts over their outputs; a
projection, and a map onto the hyperboloid. The loss is contrastive: an anchor must lie nearer to its
positive than to its negatives.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from trimtab.jobs.job import Job
from trimtab.jobs.lora import adapt
from trimtab.jobs.synthetic import Synthetic, integer

CHANNELS = ("title", "description", "excluded", "examples")
RESERVED = 100
"""Tokens at the start of the vocabulary that are no words."""
NEAREST, FURTHEST = 1e-6, 6.0
"""Between these the hyperbolic functions and their gradients are safe in fp32."""


class EncoderLayer(nn.Module):
    """Attention, then two layers on every token; each added to its input and normed, as in BERT."""

    def __init__(self, job: Naics) -> None:
        super().__init__()
        self.heads = job.heads
        self.query = nn.Linear(job.width, job.width)
        self.key = nn.Linear(job.width, job.width)
        self.value = nn.Linear(job.width, job.width)
        self.output = nn.Linear(job.width, job.width)
        self.norm = nn.LayerNorm(job.width)
        self.wide = nn.Linear(job.width, job.wide)
        self.narrow = nn.Linear(job.wide, job.width)
        self.last_norm = nn.LayerNorm(job.width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = self.norm(x + self.output(seen.transpose(1, 2).flatten(2)))
        return self.last_norm(x + self.narrow(functional.gelu(self.wide(x))))


class TextEncoder(nn.Module):
    """A MiniLM-L6: a BERT of six narrow layers."""

    def __init__(self, job: Naics) -> None:
        super().__init__()
        self.words = nn.Embedding(job.vocab, job.width)
        self.positions = nn.Embedding(job.positions, job.width)
        self.kinds = nn.Embedding(2, job.width)
        self.norm = nn.LayerNorm(job.width)
        self.layers = nn.ModuleList(EncoderLayer(job) for _ in range(job.layers))
        # Part of the checkpoint, and of no use to the mean of the tokens: it never gets a gradient.
        self.pooler = nn.Linear(job.width, job.width)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=job.spread)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The mean of the tokens that are not padding."""
        positions = torch.arange(ids.size(1), device=ids.device)
        x = self.norm(self.words(ids) + self.positions(positions) + self.kinds.weight[0])
        attended = mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, attended)
        share = (mask / mask.sum(dim=1, keepdim=True)).to(x.dtype)
        return torch.einsum("nt,ntw->nw", share, x)


class Mixture(nn.Module):
    """Several experts, of which the gate's favourites count.

    All of them run, on a vector a sample: that is cheap, and asks no questions of the device.
    """

    def __init__(self, job: Naics) -> None:
        super().__init__()
        width = job.width * len(CHANNELS)
        self.favourites = job.favourites
        self.gate = nn.Linear(width, job.experts)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, job.expert_width),
                nn.ReLU(),
                nn.Dropout(job.dropout),
                nn.Linear(job.expert_width, width),
            )
            for _ in range(job.experts)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mixed output, and for each expert how likely it was and how much it counted."""
        likely = torch.softmax(self.gate(x).float(), dim=-1)
        best, which = likely.topk(self.favourites, dim=-1)
        counted = torch.zeros_like(likely).scatter(-1, which, best / best.sum(dim=-1, keepdim=True))
        said = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return (said * counted[..., None, :]).sum(dim=-1), likely, counted


class NaicsModel(nn.Module):
    """From four texts to a point on the hyperboloid."""

    def __init__(self, job: Naics) -> None:
        super().__init__()
        self.job = job
        self.encoders = nn.ModuleDict({channel: TextEncoder(job) for channel in CHANNELS})
        adapt(self.encoders, job.rank, alpha=2 * job.rank, dropout=job.dropout)
        self.mixture = Mixture(job)
        self.projection = nn.Linear(job.width * len(CHANNELS), job.width)
        self.hyperbolic = nn.Linear(job.width, job.width + 1)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """The mean over anchors of the contrastive loss and of what uneven use of experts costs."""
        # Three calls, as one has to: there are as many negatives as everything else many times over.
        embedded = [self.embed(batch[role]) for role in ("anchor", "positive", "negatives")]
        (anchor, *_), (positive, *_), (negatives, *_) = embedded
        others = torch.cat([positive, negatives], dim=1)
        nearness = -lorentz_distance(anchor, others) / self.job.temperature
        contrast = -functional.log_softmax(nearness, dim=-1)[:, 0]
        likely, counted = (torch.cat([one[part] for one in embedded], dim=1) for part in (1, 2))
        # Sample by sample, so that the loss of a batch is the mean of the losses of its halves.
        uneven = self.job.experts * (likely.mean(dim=1) * counted.mean(dim=1)).sum(dim=-1)
        return (contrast + self.job.balance * uneven).mean()

    def embed(self, texts: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Points [samples, texts, width + 1] of texts [samples, texts, tokens], with the gate's choices."""
        first = texts[CHANNELS[0]]["ids"].shape[:2]
        pooled = [
            self.encoders[channel](texts[channel]["ids"].flatten(0, 1), texts[channel]["mask"].flatten(0, 1))
            for channel in CHANNELS
        ]
        mixed, likely, counted = self.mixture(torch.cat(pooled, dim=-1))
        tangent = self.hyperbolic(self.projection(mixed.to(pooled[0].dtype)))
        return tuple(one.unflatten(0, first) for one in (on_hyperboloid(tangent), likely, counted))


def on_hyperboloid(tangent: torch.Tensor) -> torch.Tensor:
    """The exponential map at the origin: (cosh n, sinh n * v / n), for v the tangent without its time."""
    space = tangent[..., 1:].float()
    length = space.norm(dim=-1, keepdim=True).clamp(NEAREST, FURTHEST)
    direction = functional.normalize(space, dim=-1)
    return torch.cat([length.cosh(), length.sinh() * direction], dim=-1)


def lorentz_distance(anchor: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """arcosh(t * t' - x . x') between each anchor and its others."""
    product = anchor * others
    return torch.acosh((product[..., 0] - product[..., 1:].sum(dim=-1)).clamp(min=1 + NEAREST))


class Naics(Job):
    """105,542,277 parameters, of which 14,689,413 learn; 2,125 codes with 32 positives each."""

    name = "naics"
    global_batch = 256
    samples: int | None = 68_000
    epochs = 5
    codes = 2125
    negatives = 24
    title = 24
    """Tokens of a title; every text is padded to its channel's length."""
    text = 512
    """Tokens of each of the other three channels."""
    vocab = 30_522
    positions = 512
    layers = 6
    heads = 12
    width = 384
    wide = 1536
    spread = 0.02
    """Standard deviation of the frozen encoders' weights."""
    rank = 8
    dropout = 0.1
    experts = 4
    favourites = 2
    expert_width = 1024
    temperature = 0.07
    balance = 0.01
    rate = 2e-4
    tiny: ClassVar[dict[str, Any]] = {
        "global_batch": 16,
        "samples": 320,
        "epochs": 2,
        "codes": 40,
        "negatives": 4,
        "title": 8,
        "text": 16,
        "vocab": 512,
        "positions": 16,
        "layers": 2,
        "heads": 2,
        "width": 32,
        "wide": 64,
        "spread": 0.2,
        "rank": 4,
        "dropout": 0.0,
        "expert_width": 64,
        "rate": 3e-3,
    }

    def model(self) -> NaicsModel:
        """The whole, with frozen encoders."""
        return NaicsModel(self)

    def batch(self, size: int) -> dict[str, Any]:
        """Random texts of an anchor, a positive and the negatives."""
        return {
            role: {channel: self._random_texts(size, count, channel) for channel in CHANNELS}
            for role, count in self._roles()
        }

    def _random_texts(self, size: int, count: int, channel: str) -> dict[str, torch.Tensor]:
        long = self._length(channel)
        lengths = torch.randint(long // 2, long + 1, (size, count, 1))
        return {
            "ids": torch.randint(self.vocab, (size, count, long)),
            "mask": (torch.arange(long) < lengths).long(),
        }

    def _roles(self) -> tuple[tuple[str, int], ...]:
        return ("anchor", 1), ("positive", 1), ("negatives", self.negatives)

    def _length(self, channel: str) -> int:
        return self.title if channel == "title" else self.text

    def loss(self, model: Any, batch: dict[str, Any]) -> Any:
        """The mean over anchors."""
        return model(batch)

    def weight(self, batch: dict[str, Any]) -> int:
        """Anchors."""
        return int(batch["anchor"]["title"]["ids"].shape[0])

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(params, lr=self.rate, weight_decay=0.01)

    def dataset(self) -> Synthetic:
        """Codes with words of their own."""
        return Synthetic(self.samples or 0, self._sample)

    def _sample(self, generator: torch.Generator) -> dict[str, Any]:
        code = integer(generator, 0, self.codes)
        strangers = torch.randint(1, self.codes, (self.negatives,), generator=generator)
        codes = {
            "anchor": torch.tensor([code]),
            "positive": torch.tensor([code]),
            "negatives": (code + strangers) % self.codes,
        }
        return {
            role: {channel: self._texts(generator, codes[role], channel) for channel in CHANNELS}
            for role, _ in self._roles()
        }

    def _texts(
        self, generator: torch.Generator, codes: torch.Tensor, channel: str
    ) -> dict[str, torch.Tensor]:
        """Texts of some codes: each word is one of the twelve that its code may use."""
        long = self._length(channel)
        words = torch.randint(12, (len(codes), long), generator=generator)
        lengths = torch.randint(long // 2, long + 1, (len(codes), 1), generator=generator)
        said = torch.arange(long) < lengths
        ids = RESERVED + (codes[:, None] * 7 + words) % (self.vocab - RESERVED)
        return {"ids": ids.masked_fill(~said, 0), "mask": said.long()}
