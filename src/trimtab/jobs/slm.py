"""slm: a small language model trained from nothing on text, of the kind that fits one GPU."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from trimtab.errors import WrongUse
from trimtab.jobs.head import mean_token_loss
from trimtab.jobs.job import Job
from trimtab.jobs.text.blocks import TokenBlocks, described, laid_out
from trimtab.jobs.text.byte_pairs import BYTES
from trimtab.jobs.text.corpus import find
from trimtab.jobs.text.tokens import Learnt, tokenised

if TYPE_CHECKING:
    from trimtab.jobs.text.blocks import BlockLayout
    from trimtab.jobs.text.tokens import Tokens

LOWEST = 0.1
"""Share of the learning rate that is left at the end."""


class Attention(nn.Module):
    """Every token looks at itself and at those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.inward = nn.Linear(width, 3 * width, bias=False)
        self.outward = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inward(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        return self.outward(seen.transpose(1, 2).flatten(2))


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by the tanh that GPT-2 uses.

    (1 + tanh u) / 2 is the sigmoid of 2u. Compiled, that is one exponential an element, where tanh and erf
    are long enough programs to keep a kernel from the memory's pace: 4 % of a step on an H200. Uncompiled,
    it would be six kernels instead of one.
    """
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(x * (_SLOPE + _CUBE * x * x))
    return functional.gelu(x, approximate="tanh")


_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBE = 0.044715 * _SLOPE


class Block(nn.Module):
    """Attention, then two layers on every token by itself; each on a normed copy, added to the original."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, dropout)
        self.wide_norm = nn.LayerNorm(width, bias=False)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.narrow(_gelu(self.wide(self.wide_norm(x)))))


class LanguageModel(nn.Module):
    """A decoder with learned positions, whose head is its table of tokens."""

    def __init__(self, job: Slm) -> None:
        super().__init__()
        self.pieces = job.pieces
        self.tokens = nn.Embedding(job.vocab, job.width)
        self.positions = nn.Embedding(job.seq, job.width)
        self.dropout = nn.Dropout(job.dropout)
        self.blocks = nn.ModuleList(Block(job.width, job.heads, job.dropout) for _ in range(job.layers))
        self.norm = nn.LayerNorm(job.width, bias=False)
        for name, weight in self.named_parameters():
            # What is added to the stream of each of the 2 x layers is scaled down, so that the sum is not.
            onto_stream = name.endswith(("outward.weight", "narrow.weight"))
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02 / (2 * job.layers) ** 0.5 if onto_stream else 0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of a token."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16:
            # Else the sum that every block adds to stays in fp32, at twice the traffic. fp16 could overflow.
            x = x.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return mean_token_loss(self.norm(x), self.tokens.weight, targets, pieces=self.pieces)


class Slm(Job):
    """A GPT of 108.8 million parameters: 60,000 steps of 40 sequences of 1024 tokens."""

    name = "slm"
    additive = True
    global_batch = 40
    samples: int | None = 2_400_000
    """In an epoch; more than the text has blocks read it several times, none reads it once."""
    data = ""
    """A file of text, or a folder with such files; empty for the sources of Python's standard library."""
    layers = 12
    heads = 12
    width = 768
    vocab = 30_000
    seq = 1024
    dropout = 0.1
    rate = 3e-4
    warmup = 500
    """Optimizer steps over which the learning rate rises."""
    horizon: int | None = None
    """Optimizer steps at whose end the rate has fallen to a tenth; by default all of the job's."""
    decay = 0.1
    """Of weights, by AdamW."""
    betas = (0.9, 0.95)
    clip: float | None = 1.0
    validation_batches = 100
    """Global batches of held-out text that an evaluation takes, as far as there is so much."""
    pieces = 8
    """In how many pieces the logits are made; 1 for all of them at once."""
    tiny: ClassVar[dict[str, Any]] = {
        "global_batch": 16,
        "samples": 4800,
        "layers": 2,
        "heads": 2,
        "width": 64,
        "vocab": 256,
        "seq": 64,
        "dropout": 0.0,
        "rate": 3e-3,
        "warmup": 10,
        "validation_batches": 8,
        "pieces": 2,
    }
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "medium": {
            "global_batch": 12,
            "samples": 720_000,
            "layers": 24,
            "heads": 16,
            "width": 1024,
            "rate": 3e-5,
        }
    }

    def model(self) -> LanguageModel:
        """The model with fresh weights."""
        return LanguageModel(self)

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, and for each the one that comes next."""
        tokens = torch.randint(self.vocab, (size, self.seq + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """The mean over tokens."""
        return model(*batch)

    def weight(self, batch: tuple[torch.Tensor, torch.Tensor]) -> int:
        """Tokens."""
        return batch[1].numel()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """AdamW that decays matrices and tables, and leaves norms alone."""
        params = list(params)
        groups = [
            {"params": [param for param in params if param.dim() > 1], "weight_decay": self.decay},
            {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.rate, betas=self._betas)

    @property
    def _betas(self) -> tuple[float, float]:
        wrong = [beta for beta in self.betas if not isinstance(beta, int | float) or not 0 <= beta < 1]
        if len(self.betas) != 2 or wrong:  # noqa: PLR2004 - of the mean and of the square
            raise WrongUse(
                f"betas {list(self.betas)}",
                found="AdamW has two, each from 0 to below 1",
                cure="Write them like [0.9, 0.95].",
            )
        return self.betas

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        """A rise over the warm-up, then half a cosine down to a tenth."""
        horizon = self.horizon
        if horizon is None:
            samples = len(self.dataset()) if self.samples is None else self.samples
            horizon = -(-samples // self.global_batch) * self.epochs
        share = partial(share_of_rate, warmup=self.warmup, horizon=horizon)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, share)

    def dataset(self) -> TokenBlocks:
        """Blocks of the text, without those that are held out."""
        tokens, layout = self._text()
        return TokenBlocks(tokens, self.seq + 1, layout.samples, layout.block, shifted)

    def validation(self) -> TokenBlocks | None:
        """Blocks that are held out, evenly spaced; None where the text is too short for any."""
        tokens, layout = self._text()
        count = min(layout.held_out, self.validation_batches * self.global_batch)
        if count < 1:
            return None
        block = partial(layout.held_out_block, samples=count)
        return TokenBlocks(tokens, self.seq + 1, count, block, shifted)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is trained on, in words."""
        tokens, layout = self._text()
        return described(tokens, layout, self.seq + 1)

    def _text(self) -> tuple[Tokens, BlockLayout]:
        if self.vocab < BYTES:
            raise WrongUse(
                f"vocab {self.vocab}",
                found=f"text is made of {BYTES} kinds of bytes, and each needs a token",
                cure=f"Give a vocabulary of {BYTES} or more.",
            )
        tokens = tokenised(find(self.data), Learnt(self.vocab))
        return tokens, laid_out(tokens, self.seq + 1, self.samples)


def shifted(tokens: torch.Tensor, _: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and for each the one that comes next."""
    return tokens[:-1], tokens[1:]


def share_of_rate(step: int, *, warmup: int, horizon: int) -> float:
    """The share of the full learning rate in a step that comes after so many.

    >>> [round(share_of_rate(step, warmup=2, horizon=10), 3) for step in (0, 1, 2, 6, 10, 99)]
    [0.333, 0.667, 1.0, 0.55, 0.1, 0.1]
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    way = min(1.0, (step - warmup) / max(1, horizon - warmup))
    return LOWEST + (1 - LOWEST) * (1 + math.cos(math.pi * way)) / 2
