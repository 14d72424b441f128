"""Job naics: train hyperbolic embeddings of industry codes from four short texts per code.

Four frozen MiniLM encoders with LoRA, one per text channel; a mixture of experts over their outputs; a
projection, and a map onto the hyperboloid. The loss is contrastive: an anchor must be nearer to its positive
than to its negatives. codes.py generates the codes, pairs.py selects anchors, positives and negatives, and
stages.py reads the curriculum.
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
from trimtab.jobs.naics.codes import RESERVED, build_codes, make_tokens
from trimtab.jobs.naics.pairs import allowed_negatives, read_pairs, select_rows
from trimtab.jobs.naics.stages import find_stage, read_stages

if TYPE_CHECKING:
    from trimtab.spec.plan import Stage


# The network. Shapes do not depend on values and nothing is read back from the device, so that the host runs
# ahead and a step compiles as one graph: all texts of a channel are one encoder batch, all experts one
# batched product, and all anchors are compared with their candidates at once.


CHANNELS = ("title", "description", "excluded", "examples")
PADDING = 0
"""The padding token."""
NEAREST, FURTHEST = 1e-6, 6.0
"""Range in which the hyperbolic functions and their gradients are safe in fp32."""


class AdaptedLinear(nn.Module):
    """Frozen linear layers with the same input, computed as one, each with a LoRA adapter.

    Layer p computes W_p x + b_p + alpha / rank * U_p D_p x. U starts at zero: nothing changes at first.
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
        # Scale the narrow tensor; one block-diagonal product for all layers.
        narrow = self.scale * functional.linear(self.dropout(x), self.down)
        up = self.up[0] if len(self.up) == 1 else torch.block_diag(*self.up.unbind())
        return out + functional.linear(narrow, up).to(out.dtype)


class EncoderLayer(nn.Module):
    """Post-norm transformer layer, as in BERT."""

    def __init__(self, job: Naics) -> None:
        super().__init__()
        self.heads = job.heads
        self.inward = AdaptedLinear(job.width, job.width, job, layers=3)
        self.outward = AdaptedLinear(job.width, job.width, job)
        self.norm = nn.LayerNorm(job.width)
        self.wide = AdaptedLinear(job.width, job.wide, job)
        self.narrow = AdaptedLinear(job.wide, job.width, job)
        self.last_norm = nn.LayerNorm(job.width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inward(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = to_autocast_dtype(self.norm(x + self.outward(attended.transpose(1, 2).flatten(2))))
        return to_autocast_dtype(self.last_norm(x + self.narrow(functional.gelu(self.wide(x)))))


class TextEncoder(nn.Module):
    """A frozen MiniLM-L6, a BERT of six narrow layers, with LoRA adapters."""

    def __init__(self, job: Naics) -> None:
        super().__init__()
        self.words = nn.Embedding(job.vocab, job.width)
        self.positions = nn.Embedding(job.positions, job.width)
        self.kinds = nn.Embedding(2, job.width)
        self.norm = nn.LayerNorm(job.width)
        for table in (self.words, self.positions, self.kinds):
            nn.init.normal_(table.weight, std=job.spread)
        self.layers = nn.ModuleList(EncoderLayer(job) for _ in range(job.layers))
        # Part of the original model, but not used for the mean of the tokens: it never gets a gradient.
        self.pooler = AdaptedLinear(job.width, job.width, job)
        for name, weight in self.named_parameters():
            weight.requires_grad_(name.endswith((".down", ".up")))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean over the tokens that are not padding."""
        valid = ids != PADDING
        positions = self.positions.weight[: ids.size(1)]
        x = to_autocast_dtype(self.norm(self.words(ids) + positions + self.kinds.weight[0]))
        mask = valid[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        # Ones and zeros are exact in any dtype; shares are not.
        return torch.einsum("nt,ntw->nw", valid.to(x.dtype), x) / valid.sum(dim=1, keepdim=True)


class Mixture(nn.Module):
    """Mixture of experts with a top-k gate.

    All experts run, on one vector per code: that is cheap and needs no synchronisation with the device.
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
        """Return the mixed output, and per expert its gate probability and its weight."""
        probability = torch.softmax(to_fp32(self.gate(x)), dim=-1)
        best, which = probability.topk(self.favourites, dim=-1)
        counted = torch.zeros_like(probability).scatter(-1, which, best / best.sum(dim=-1, keepdim=True))
        for_each = x.expand(len(self.inward), *x.shape)
        hidden = self.dropout(functional.relu(torch.baddbmm(self.inward_bias, for_each, self.inward)))
        outputs = torch.baddbmm(self.outward_bias, hidden, self.outward)
        return (outputs * counted.T[..., None]).sum(dim=0), probability, counted


class NaicsModel(nn.Module):
    """Compute the loss from the texts of anchors and their candidates."""

    def __init__(self, job: Naics) -> None:
        super().__init__()
        self.job = job
        self.encoders = nn.ModuleDict({channel: TextEncoder(job) for channel in CHANNELS})
        self.mixture = Mixture(job)
        self.projection = nn.Linear(job.width * len(CHANNELS), job.width)
        self.hyperbolic = nn.Linear(job.width, job.width + 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over anchors of the contrastive loss plus the load-balancing loss of the experts.

        `batch` has texts [anchors, codes, tokens] by channel; the first code is the anchor, the second its
        positive, and the others are its negatives.
        """
        points, probability, counted = self.embed(batch)
        distances = lorentz_distance(points[:, :1], points[:, 1:], self.job.curvature)
        contrast = -functional.log_softmax(-distances / self.job.temperature, dim=-1)[:, 0]
        # Per anchor, so that the loss of a batch is the mean of its parts' losses.
        uneven = self.job.experts * (probability.mean(dim=1) * counted.mean(dim=1)).sum(dim=-1)
        return (contrast + self.job.balance * uneven).mean()

    def embed(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return points [anchors, codes, width + 1], and gate outputs [anchors, codes, experts]."""
        rows = batch[CHANNELS[0]].shape[:2]
        pooled = [self.encoders[channel](batch[channel].flatten(0, 1)) for channel in CHANNELS]
        mixed, probability, counted = self.mixture(torch.cat(pooled, dim=-1))
        tangent = self.hyperbolic(self.projection(mixed.to(pooled[0].dtype)))
        points = on_hyperboloid(tangent, self.job.curvature)
        return points.unflatten(0, rows), probability.unflatten(0, rows), counted.unflatten(0, rows)


def to_autocast_dtype(x: torch.Tensor) -> torch.Tensor:
    """Cast the residual stream to the dtype of autocast.

    A norm returns fp32, at twice the memory traffic. The stream is normed after every addition, so it cannot
    overflow in fp16 either.
    """
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def to_fp32(x: torch.Tensor) -> torch.Tensor:
    """Cast to at least fp32, for operations after autocast."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _uniform(shape: tuple[int, ...], inputs: int) -> torch.Tensor:
    """Draw weights like those of a torch linear layer with this many inputs."""
    return torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5)


def on_hyperboloid(tangent: torch.Tensor, curvature: float = 1.0) -> torch.Tensor:
    """Return the exponential map at the origin: (cosh n, sinh n * v / |v|) / sqrt(c) with n = sqrt(c) |v|.

    v is the tangent without its time component, and -c the curvature.
    """
    root = math.sqrt(curvature)
    space = root * to_fp32(tangent[..., 1:])
    length = space.norm(dim=-1, keepdim=True).clamp(NEAREST, FURTHEST)
    direction = functional.normalize(space, dim=-1)
    return torch.cat([length.cosh(), length.sinh() * direction], dim=-1) / root


def lorentz_distance(anchor: torch.Tensor, others: torch.Tensor, curvature: float = 1.0) -> torch.Tensor:
    """Return arcosh(c (t t' - x . x')) / sqrt(c) between each anchor and its others.

    Computed from the difference of the points, whose Lorentz square is 2 / c (arcosh's argument - 1): in fp32
    the product of two points far from the origin would cancel.
    """
    apart = (anchor - others).square()
    beyond = (curvature / 2 * (apart[..., 1:].sum(dim=-1) - apart[..., 0])).clamp(min=NEAREST)
    return torch.log1p(beyond + (beyond * (beyond + 2)).sqrt()) / math.sqrt(curvature)


STAGE_OPTIONS = ("pairs", "positives", "negatives", "epochs", "rate")
"""Options that differ between stages; all other keys of the files apply to the whole training."""


class Naics(Job):
    """105,542,277 parameters, 14,689,413 of them trained; 2,125 codes with 32 positives each."""

    name = "naics"
    additive = True
    global_batch = 256
    samples: int | None = None
    """Rows per epoch; None: every anchor with its positives."""
    epochs = 5
    codes = 2125
    positives = 32
    """Rows per anchor and epoch, with different positives as far as possible: a row has one positive."""
    negatives = 24
    """Negatives per row."""
    pairs: ClassVar[dict[str, Any]] = {}
    """Which codes may be anchors, positives and negatives: levels, relations, distances, margins."""
    title = 24
    """Tokens of a title; every text is truncated or padded to its channel's length."""
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
    """Steps of linear learning-rate warm-up."""
    decay = 0.01
    clip = 1.0
    pace = 1.0
    """Factor on every learning rate: a small model takes larger steps."""
    stage_files = ""
    """Folder with your own curriculum; empty for the built-in one."""
    stage = ""
    """Current stage: it sets positives, negatives, pairs, rate and epochs unless they are given."""
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
        """Return the stages of the curriculum in order."""
        return tuple(self._reduce_options(stage) for stage in read_stages(self.stage_files))

    def _reduce_options(self, stage: Stage) -> Stage:
        """Return a stage with only the options that differ from this job; naics:tiny keeps its sizes."""
        small = self.name.endswith(":tiny")
        options = {
            key: value
            for key, value in stage.options.items()
            if getattr(self, key) != value and (not small or key in STAGE_OPTIONS)
        }
        return stage.replace(options=options)

    def settle(self, given: frozenset[str]) -> None:
        """Set the options of the chosen stage, and check all options."""
        if self.stage and "stage" in given:
            chosen = find_stage(self.stage, self.stages())
            for name, value in chosen.options.items():
                if name not in given:
                    setattr(self, name, value)
        self._check()

    def model(self) -> NaicsModel:
        """Return the model with frozen encoders."""
        self._check()
        return NaicsModel(self)

    def batch(self, size: int) -> dict[str, torch.Tensor]:
        """Return random texts of anchors, positives and negatives."""
        self._check()
        return {channel: self._random_texts(size, self.length(channel)) for channel in CHANNELS}

    def _random_texts(self, size: int, length: int) -> torch.Tensor:
        ids = torch.randint(RESERVED, self.vocab, (size, 2 + self.negatives, length), dtype=torch.int32)
        lengths = torch.randint(length // 2, length + 1, (*ids.shape[:2], 1))
        return ids * (torch.arange(length) < lengths)

    def length(self, channel: str) -> int:
        """Return the tokens per text of a channel."""
        return self.title if channel == "title" else self.text

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> Any:
        """Return the mean loss over anchors."""
        return model(batch)

    def weight(self, batch: dict[str, torch.Tensor]) -> int:
        """Return the number of anchors."""
        return len(batch["title"])

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(params, lr=self.rate * self.pace, weight_decay=self.decay)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return a schedule with linear warm-up, then a constant rate."""
        warmup = max(1, self.warmup)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))

    def dataset(self) -> Rows:
        """Return the built-in codes as rows of an anchor, a positive and negatives."""
        self._check()
        return Rows(self)

    def _check(self) -> None:
        """Raise WrongUse for invalid sizes."""
        if self.negatives < 1:
            raise WrongUse(
                f"n_negatives of {self.negatives}",
                found="at least one negative is needed; without it the loss is always zero",
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
    """Rows of an epoch; a row depends only on its index."""

    def __init__(self, job: Naics) -> None:
        self.tree = build_codes(job.codes)
        self.pairs = read_pairs(job.pairs)
        self.anchors, self.positives = select_rows(self.tree, self.pairs, job.positives)
        if not len(self.anchors):
            raise WrongUse(
                f"pairs {job.pairs}",
                found=f"none of {job.codes} codes is an anchor with a positive and a negative",
                cure="Allow more levels, relations or distances, or smaller margins.",
            )
        self.negatives = job.negatives
        self.count = job.samples or len(self.anchors)
        self.sizes = {channel: (job.codes, channel, job.length(channel), job.vocab) for channel in CHANNELS}

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        codes = self.row_codes(index)
        return {channel: torch.from_numpy(make_tokens(*size)[codes]) for channel, size in self.sizes.items()}

    def row_codes(self, index: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the codes of a row: anchor, positive, negatives; negatives repeat if there are too few."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        place = index % len(self.anchors)
        anchor, positive = int(self.anchors[place]), int(self.positives[place])
        allowed = allowed_negatives(self.tree, self.pairs, anchor, positive)
        draw = np.random.default_rng(index)
        negatives = draw.choice(allowed, self.negatives, replace=len(allowed) < self.negatives)
        return np.array([anchor, positive, *negatives], dtype=np.int64)
