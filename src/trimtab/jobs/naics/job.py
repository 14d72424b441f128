"""naics: embeddings of industry codes, from four short texts a code, in a hyperbolic space.

Four frozen MiniLM encoders with LoRA, one a channel of text; a mixture of experts over their outputs; a
projection, and a map onto the hyperboloid. The loss is contrastive: an anchor must lie nearer to its
positive than to its negatives. model.py has the network, codes.py the codes, pairs.py which of them are set
against which, stages.py the curriculum.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from trimtab.errors import WrongUse
from trimtab.jobs.job import Job
from trimtab.jobs.naics.codes import RESERVED, codes, tokens
from trimtab.jobs.naics.pairs import negatives_of, read_pairs, rows
from trimtab.jobs.naics.stages import find_stage, read_stages

if TYPE_CHECKING:
    from trimtab.spec.plan import Stage


# The network of naics: four texts of a code to a point on a hyperboloid, and the contrast between points.
#
# Shapes never follow from values and nothing is read back from the device, so that the host runs ahead of it
# and a step compiles as one graph: all texts of a channel go through its encoder at once, all experts are one
# batched product, all anchors are compared with their candidates in one.


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


OF_STAGES = ("pairs", "positives", "negatives", "epochs", "rate")
"""What differs from stage to stage; all else that files say is said once, of the whole training."""


class Naics(Job):
    """105,542,277 parameters, of which 14,689,413 learn; 2,125 codes with 32 positives each."""

    name = "naics"
    additive = True
    global_batch = 256
    samples: int | None = None
    """Rows in an epoch; None: every anchor with its positives."""
    epochs = 5
    codes = 2125
    positives = 32
    """Rows that an anchor has in an epoch, each with another positive while there are others: one positive
    goes through the model with an anchor."""
    negatives = 24
    """Negatives of a row, all of which go through the model."""
    pairs: ClassVar[dict[str, Any]] = {}
    """Which codes may be anchors, positives and negatives: levels, relations, distances, margins."""
    title = 24
    """Tokens of a title; every text is cut off or filled up to its channel's length."""
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
    alpha = 16.0
    dropout = 0.1
    experts = 4
    favourites = 2
    expert_width = 1024
    temperature = 0.07
    curvature = 1.0
    balance = 0.01
    rate = 2e-4
    warmup = 500
    """Steps in which the rate rises to its value."""
    decay = 0.01
    clip = 1.0
    pace = 1.0
    """Times every rate: a small model takes larger steps."""
    stage_files = ""
    """A folder with a curriculum of the user's own; empty: the one that ships."""
    stage = ""
    """The stage to be in: it sets positives, negatives, pairs, rate and epochs that are not given."""
    unfelt: ClassVar[tuple[str, ...]] = (
        "pairs",
        "positives",
        "samples",
        "epochs",
        "rate",
        "warmup",
        "pace",
        "stage",
        "stage_files",
    )
    """Options that change neither the memory nor the time of a step."""
    tiny: ClassVar[dict[str, Any]] = {
        "global_batch": 16,
        "samples": 320,
        "epochs": 2,
        "codes": 120,
        "positives": 4,
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
        "alpha": 8.0,
        "dropout": 0.0,
        "expert_width": 64,
        "pace": 15.0,
        "warmup": 0,
    }

    def stages(self) -> tuple[Stage, ...]:
        """The curriculum: parts of the training, one after the other."""
        found = read_stages(self.stage_files)
        return tuple(self._fitted(one) for one in found)

    def _fitted(self, stage: Stage) -> Stage:
        """A stage as what it changes of this job; a small one keeps its sizes."""
        small = self.name.endswith(":tiny")
        kept = {
            key: value
            for key, value in stage.options.items()
            if getattr(self, key) != value and (not small or key in OF_STAGES)
        }
        return stage.replace(options=kept)

    def settle(self, given: frozenset[str]) -> None:
        """A stage stands for what it sets."""
        if self.stage and "stage" in given:
            chosen = find_stage(self.stage, self.stages())
            for name, value in chosen.options.items():
                if name not in given:
                    setattr(self, name, value)
        self._check()

    def model(self) -> NaicsModel:
        """The whole, with frozen encoders."""
        self._check()
        return NaicsModel(self)

    def batch(self, size: int) -> dict[str, torch.Tensor]:
        """Random texts of anchors, each with its positive and its negatives."""
        self._check()
        return {channel: self._random_texts(size, self.length(channel)) for channel in CHANNELS}

    def _random_texts(self, size: int, long: int) -> torch.Tensor:
        ids = torch.randint(RESERVED, self.vocab, (size, 2 + self.negatives, long), dtype=torch.int32)
        lengths = torch.randint(long // 2, long + 1, (*ids.shape[:2], 1))
        return ids * (torch.arange(long) < lengths)

    def length(self, channel: str) -> int:
        """Tokens of a text of that channel."""
        return self.title if channel == "title" else self.text

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        """The mean over anchors."""
        return model(batch)

    def weight(self, batch: dict[str, torch.Tensor]) -> int:
        """Anchors."""
        return len(batch["title"])

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(params, lr=self.rate * self.pace, weight_decay=self.decay)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """The rate rises in a straight line, and stays."""
        warmup = max(1, self.warmup)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))

    def dataset(self) -> Rows:
        """The codes that ship, as rows of an anchor, a positive and negatives."""
        self._check()
        return Rows(self)

    def _check(self) -> None:
        """Raise for sizes that cannot be."""
        if self.negatives < 1:
            raise WrongUse(
                f"n_negatives of {self.negatives}",
                found="an anchor is told from its negatives: without one the loss is zero, always",
                cure="Give negatives=1 or more.",
            )
        if self.positives < 1:
            raise WrongUse(
                f"n_positives of {self.positives}",
                found="that leaves no rows to learn from",
                cure="Give positives=1 or more.",
            )
        if max(self.title, self.text) > self.positions:
            raise WrongUse(
                f"texts of {max(self.title, self.text)} tokens",
                found=f"the encoders have {self.positions} positions",
                cure=f"Give title and text of at most {self.positions}, or more positions.",
            )


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of an epoch; number 7 is the same whenever and wherever it is made."""

    def __init__(self, job: Naics) -> None:
        self.tree = codes(job.codes)
        self.pairs = read_pairs(job.pairs)
        self.anchors, self.positives = rows(self.tree, self.pairs, job.positives)
        if not len(self.anchors):
            raise WrongUse(
                f"pairs {job.pairs}",
                found=f"of {job.codes} codes, none is an anchor that has a positive and a negative",
                cure="Allow more levels, relations or distances, or smaller margins.",
            )
        self.negatives = job.negatives
        self.count = job.samples or len(self.anchors)
        self.sizes = {channel: (job.codes, channel, job.length(channel), job.vocab) for channel in CHANNELS}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        chosen = self.chosen(index)
        return {channel: torch.from_numpy(tokens(*size)[chosen]) for channel, size in self.sizes.items()}

    def chosen(self, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The codes of a row: anchor, positive, negatives; these repeat where there are too few."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        place = index % len(self.anchors)
        anchor, positive = int(self.anchors[place]), int(self.positives[place])
        allowed = negatives_of(self.tree, self.pairs, anchor, positive)
        draw = np.random.default_rng(index)
        negatives = draw.choice(allowed, self.negatives, replace=len(allowed) < self.negatives)
        return np.array([anchor, positive, *negatives], dtype=np.int64)
