"""The network of naics: four texts of a code to a point on a hyperboloid, and the contrast between points.

Shapes never follow from values and nothing is read back from the device, so that the host runs ahead of it
and a step compiles as one graph: all texts of a channel go through its encoder at once, all experts are one
batched product, all anchors are compared with their candidates in one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from trimtab.jobs.naics.job import Naics

CHANNELS = ("title", "description", "excluded", "examples")
PADDING = 0
"""The token that fills a text up to the length of its channel."""
NEAREST, FURTHEST = 1e-6, 6.0
"""Between these the hyperbolic functions and their gradients are safe in fp32."""


class Adapted(nn.Module):
    """Frozen linear layers that read one input, computed as one, with a narrow trained pair beside each.

    Of layer p: W_p x + b_p + alpha / rank * U_p D_p x. U starts at zero, so that nothing changes at first.
    """

    def __init__(self, wide_in: int, wide_out: int, job: Naics, *, layers: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(layers * wide_out, wide_in), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(layers * wide_out), requires_grad=False)
        self.down = nn.Parameter(torch.empty(layers * job.rank, wide_in))
        self.up = nn.Parameter(torch.zeros(layers, wide_out, job.rank))
        self.dropout = nn.Dropout(job.dropout)
        self.scale = job.alpha / job.rank
        nn.init.normal_(self.weight, std=job.spread)
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = functional.linear(x, self.weight, self.bias)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.down.dtype)
        # Scaled where it is narrow; one product for all layers, whose other blocks are zero.
        narrow = self.scale * functional.linear(self.dropout(x), self.down)
        up = self.up[0] if len(self.up) == 1 else torch.block_diag(*self.up.unbind())
        return out + functional.linear(narrow, up).to(out.dtype)


class EncoderLayer(nn.Module):
    """Attention, then two layers on every token; each added to its input and normed, as in BERT."""

    def __init__(self, job: Naics) -> None:
        super().__init__()
        self.heads = job.heads
        self.inward = Adapted(job.width, job.width, job, layers=3)
        self.outward = Adapted(job.width, job.width, job)
        self.norm = nn.LayerNorm(job.width)
        self.wide = Adapted(job.width, job.wide, job)
        self.narrow = Adapted(job.wide, job.width, job)
        self.last_norm = nn.LayerNorm(job.width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inward(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = halved(self.norm(x + self.outward(seen.transpose(1, 2).flatten(2))))
        return halved(self.last_norm(x + self.narrow(functional.gelu(self.wide(x)))))


class TextEncoder(nn.Module):
    """A MiniLM-L6: a BERT of six narrow layers, frozen, with adapters."""

    def __init__(self, job: Naics) -> None:
        super().__init__()
        self.words = nn.Embedding(job.vocab, job.width)
        self.positions = nn.Embedding(job.positions, job.width)
        self.kinds = nn.Embedding(2, job.width)
        self.norm = nn.LayerNorm(job.width)
        for table in (self.words, self.positions, self.kinds):
            nn.init.normal_(table.weight, std=job.spread)
        self.layers = nn.ModuleList(EncoderLayer(job) for _ in range(job.layers))
        # Part of the original, and of no use to the mean of the tokens: it never gets a gradient.
        self.pooler = Adapted(job.width, job.width, job)
        for name, weight in self.named_parameters():
            weight.requires_grad_(name.endswith((".down", ".up")))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean of the tokens that are not padding."""
        said = ids != PADDING
        positions = self.positions.weight[: ids.size(1)]
        x = halved(self.norm(self.words(ids) + positions + self.kinds.weight[0]))
        mask = said[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        # Ones and noughts are exact in any dtype, as shares are not.
        return torch.einsum("nt,ntw->nw", said.to(x.dtype), x) / said.sum(dim=1, keepdim=True)


class Mixture(nn.Module):
    """Several experts, of which the gate's favourites count.

    All of them run, on a vector a code: that is cheap, and asks no questions of the device.
    """

    def __init__(self, job: Naics) -> None:
        super().__init__()
        width = job.width * len(CHANNELS)
        self.favourites = job.favourites
        self.gate = nn.Linear(width, job.experts)
        self.inward = nn.Parameter(_uniform((job.experts, width, job.expert_width), width))
        self.inward_bias = nn.Parameter(_uniform((job.experts, 1, job.expert_width), width))
        self.outward = nn.Parameter(_uniform((job.experts, job.expert_width, width), job.expert_width))
        self.outward_bias = nn.Parameter(_uniform((job.experts, 1, width), job.expert_width))
        self.dropout = nn.Dropout(job.dropout)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The mixed output, and for each expert how likely it was and how much it counted."""
        likely = torch.softmax(exact(self.gate(x)), dim=-1)
        best, which = likely.topk(self.favourites, dim=-1)
        counted = torch.zeros_like(likely).scatter(-1, which, best / best.sum(dim=-1, keepdim=True))
        for_each = x.expand(len(self.inward), *x.shape)
        hidden = self.dropout(functional.relu(torch.baddbmm(self.inward_bias, for_each, self.inward)))
        said = torch.baddbmm(self.outward_bias, hidden, self.outward)
        return (said * counted.T[..., None]).sum(dim=0), likely, counted


class NaicsModel(nn.Module):
    """From the texts of anchors and their candidates to the loss."""

    def __init__(self, job: Naics) -> None:
        super().__init__()
        self.job = job
        self.encoders = nn.ModuleDict({channel: TextEncoder(job) for channel in CHANNELS})
        self.mixture = Mixture(job)
        self.projection = nn.Linear(job.width * len(CHANNELS), job.width)
        self.hyperbolic = nn.Linear(job.width, job.width + 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The mean over anchors of the contrastive loss and of what uneven use of experts costs.

        Texts [anchors, codes, tokens] by channel; of the codes the first is the anchor, the second its
        positive, and the others are its negatives.
        """
        points, likely, counted = self.embed(batch)
        distances = lorentz_distance(points[:, :1], points[:, 1:], self.job.curvature)
        contrast = -functional.log_softmax(-distances / self.job.temperature, dim=-1)[:, 0]
        # Anchor by anchor, so that the loss of a batch is the mean of the losses of its halves.
        uneven = self.job.experts * (likely.mean(dim=1) * counted.mean(dim=1)).sum(dim=-1)
        return (contrast + self.job.balance * uneven).mean()

    def embed(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Points [anchors, codes, width + 1] with the gate's choices [anchors, codes, experts]."""
        rows = batch[CHANNELS[0]].shape[:2]
        pooled = [self.encoders[channel](batch[channel].flatten(0, 1)) for channel in CHANNELS]
        mixed, likely, counted = self.mixture(torch.cat(pooled, dim=-1))
        tangent = self.hyperbolic(self.projection(mixed.to(pooled[0].dtype)))
        points = on_hyperboloid(tangent, self.job.curvature)
        return points.unflatten(0, rows), likely.unflatten(0, rows), counted.unflatten(0, rows)


def halved(x: torch.Tensor) -> torch.Tensor:
    """The sum that every layer adds to, in the dtype of autocast.

    A norm leaves it in fp32, at twice the traffic; normed after every addition as it is here, it cannot
    overflow in fp16 either.
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def exact(x: torch.Tensor) -> torch.Tensor:
    """At least fp32, whatever autocast made of it."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _uniform(shape: tuple[int, ...], inputs: int) -> torch.Tensor:
    """As torch draws the weights of a linear layer with so many inputs."""
    return torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5)


def on_hyperboloid(tangent: torch.Tensor, curvature: float = 1.0) -> torch.Tensor:
    """The exponential map at the origin: (cosh n, sinh n * v / |v|) / sqrt(c) with n = sqrt(c) |v|.

    v is the tangent without its time, and -c the curvature.
    """
    root = math.sqrt(curvature)
    space = root * exact(tangent[..., 1:])
    length = space.norm(dim=-1, keepdim=True).clamp(NEAREST, FURTHEST)
    direction = functional.normalize(space, dim=-1)
    return torch.cat([length.cosh(), length.sinh() * direction], dim=-1) / root


def lorentz_distance(anchor: torch.Tensor, others: torch.Tensor, curvature: float = 1.0) -> torch.Tensor:
    """arcosh(c (t t' - x . x')) / sqrt(c) between each anchor and its others.

    From the difference of the points, whose Lorentz square is 2 / c (arcosh's argument - 1): in fp32 the
    product of two points far out cancels to nothing.
    """
    apart = (anchor - others).square()
    beyond = (curvature / 2 * (apart[..., 1:].sum(dim=-1) - apart[..., 0])).clamp(min=NEAREST)
    return torch.log1p(beyond + (beyond * (beyond + 2)).sqrt()) / math.sqrt(curvature)
