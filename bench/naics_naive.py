"""The step of naics as it is written when nobody thinks of the GPU, to be beaten and to be equal to.

Three calls of every encoder (anchors, positives, negatives), a module of its own for every linear layer and
its adapter, recomputation of every layer, a loop over experts that picks rows by masks, a loop over anchors.
It takes the weights of the job's model, so that both compute the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trimtab.jobs.naics.job import CHANNELS, FURTHEST, NEAREST, PADDING

if TYPE_CHECKING:
    from trimtab.jobs.naics.job import AdaptedLinear, EncoderLayer, Naics, NaicsModel, TextEncoder


class Lora(nn.Module):
    """A frozen linear layer, and an adapter beside it."""

    def __init__(self, whole: AdaptedLinear, layer: int, dropout: float) -> None:
        super().__init__()
        wide_out, rank = whole.up.shape[1:]
        wide_in = whole.weight.shape[1]
        rows, narrow = (
            slice(layer * wide_out, (layer + 1) * wide_out),
            slice(layer * rank, (layer + 1) * rank),
        )
        like: dict[str, Any] = {"device": whole.weight.device, "dtype": whole.weight.dtype}
        self.base = nn.Linear(wide_in, wide_out, **like).requires_grad_(False)
        self.a = nn.Linear(wide_in, rank, bias=False, **like)
        self.b = nn.Linear(rank, wide_out, bias=False, **like)
        self.dropout = nn.Dropout(dropout)
        self.scale = whole.scale
        with torch.no_grad():
            self.base.weight.copy_(whole.weight[rows])
            self.base.bias.copy_(whole.bias[rows])
            self.a.weight.copy_(whole.down[narrow])
            self.b.weight.copy_(whole.up[layer])

    def forward(self, x: torch.Tensor) -> Any:  # noqa: D102
        return self.base(x) + self.b(self.a(self.dropout(x.to(self.a.weight.dtype)))) * self.scale


class Layer(nn.Module):
    """A layer of BERT."""

    def __init__(self, ours: EncoderLayer, job: Naics) -> None:
        super().__init__()
        self.heads = job.heads
        self.query, self.key, self.value = (Lora(ours.inward, number, job.dropout) for number in range(3))
        self.output = Lora(ours.outward, 0, job.dropout)
        self.norm = ours.norm
        self.wide = Lora(ours.wide, 0, job.dropout)
        self.narrow = Lora(ours.narrow, 0, job.dropout)
        self.last_norm = ours.last_norm

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:  # noqa: D102
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = self.norm(x + self.output(seen.transpose(1, 2).flatten(2)))
        return self.last_norm(x + self.narrow(functional.gelu(self.wide(x))))


class Encoder(nn.Module):
    """One channel's."""

    def __init__(self, ours: TextEncoder, job: Naics, *, recompute: bool) -> None:
        super().__init__()
        self.words, self.positions, self.kinds, self.norm = ours.words, ours.positions, ours.kinds, ours.norm
        self.layers = nn.ModuleList(Layer(layer, job) for layer in ours.layers)  # type: ignore[arg-type]
        self.recompute = recompute

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:  # noqa: D102
        places = torch.arange(ids.size(1), device=ids.device)
        x = self.norm(self.words(ids) + self.positions(places) + self.kinds(torch.zeros_like(ids)))
        attended = mask[:, None, None, :].bool()
        for layer in self.layers:
            x = checkpoint(layer, x, attended, use_reentrant=False) if self.recompute else layer(x, attended)
        kept = mask[..., None].to(x.dtype)
        return (x * kept).sum(dim=1) / kept.sum(dim=1)


class Naive(nn.Module):
    """The whole, over a batch of the job."""

    def __init__(self, ours: NaicsModel, *, recompute: bool = True) -> None:
        super().__init__()
        job = self.job = ours.job
        self.encoders = nn.ModuleDict(
            {
                channel: Encoder(ours.encoders[channel], job, recompute=recompute)  # type: ignore[arg-type]
                for channel in CHANNELS
            }
        )
        self.gate = ours.mixture.gate
        self.experts = nn.ModuleList(_expert(ours, number) for number in range(job.experts))
        self.projection, self.hyperbolic = ours.projection, ours.hyperbolic

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:  # noqa: D102
        anchors = len(batch[CHANNELS[0]])
        roles = [
            {channel: ids[:, part].flatten(0, 1).long() for channel, ids in batch.items()}
            for part in (slice(0, 1), slice(1, 2), slice(2, None))
        ]
        (anchor, *_), (positive, *_), (negative, *_) = embedded = [self.embed(role) for role in roles]
        each = len(negative) // anchors
        losses = []
        for number in range(anchors):
            near = self.distance(anchor[number], positive[number])
            far = [self.distance(anchor[number], negative[number * each + index]) for index in range(each)]
            scores = -torch.stack([near, *far]) / self.job.temperature
            losses.append(
                functional.cross_entropy(scores[None], torch.zeros(1, dtype=torch.long, device=near.device))
            )
        return torch.stack(losses).mean() + self.job.balance * self.uneven(embedded, anchors)

    def embed(self, texts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Points, and the gate's choices."""
        pooled = [
            self.encoders[channel](texts[channel], (texts[channel] != PADDING).long()) for channel in CHANNELS
        ]
        x = torch.cat(pooled, dim=-1)
        logits = self.gate(x)
        likely = torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)
        best, which = likely.topk(self.job.favourites, dim=-1)
        best = best / best.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(x)
        counted = torch.zeros_like(likely)
        for number, expert in enumerate(self.experts):
            for place in range(self.job.favourites):
                rows = which[:, place] == number
                if rows.any():
                    mixed[rows] += (best[rows, place, None] * expert(x[rows])).to(mixed.dtype)
                    counted[rows, number] = best[rows, place]
        return self.point(self.hyperbolic(self.projection(mixed))), likely, counted

    def point(self, tangent: torch.Tensor) -> Any:
        """The exponential map at the origin."""
        root = self.job.curvature**0.5
        space = root * (tangent if tangent.dtype == torch.float64 else tangent.float())[:, 1:]
        length = space.norm(dim=-1, keepdim=True).clamp(NEAREST, FURTHEST)
        return torch.cat([length.cosh(), length.sinh() * functional.normalize(space, dim=-1)], dim=-1) / root

    def distance(self, tensor: torch.Tensor, other: torch.Tensor) -> Any:
        """Between two points."""
        product = self.job.curvature * (tensor[0] * other[0] - (tensor[1:] * other[1:]).sum())
        return torch.acosh(product.clamp(min=1 + NEAREST)) / self.job.curvature**0.5

    def uneven(self, embedded: Any, anchors: int) -> torch.Tensor:
        """What uneven use of the experts costs, anchor by anchor."""
        losses = []
        for number in range(anchors):
            shares = []
            for part in (1, 2):
                of_roles = [one[part].unflatten(0, (anchors, -1))[number] for one in embedded]
                shares.append(torch.cat(of_roles).mean(dim=0))
            losses.append(self.job.experts * (shares[0] * shares[1]).sum())
        return torch.stack(losses).mean()


def _expert(ours: NaicsModel, number: int) -> nn.Sequential:
    whole = ours.mixture
    wide_in, wide_out = whole.inward.shape[1:]
    like: dict[str, Any] = {"device": whole.inward.device, "dtype": whole.inward.dtype}
    first, last = nn.Linear(wide_in, wide_out, **like), nn.Linear(wide_out, wide_in, **like)
    with torch.no_grad():
        first.weight.copy_(whole.inward[number].T)
        first.bias.copy_(whole.inward_bias[number, 0])
        last.weight.copy_(whole.outward[number].T)
        last.bias.copy_(whole.outward_bias[number, 0])
    return nn.Sequential(first, nn.ReLU(), nn.Dropout(ours.job.dropout), last)
