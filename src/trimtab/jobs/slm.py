"""slm: a small language model trained from nothing, of the kind that fits one GPU."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from trimtab.jobs.head import mean_token_loss
from trimtab.jobs.job import Job
from trimtab.jobs.synthetic import Synthetic, walk


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
    global_batch = 40
    samples: int | None = 2_400_000
    layers = 12
    heads = 12
    width = 768
    vocab = 30_000
    seq = 1024
    dropout = 0.1
    rate = 3e-4
    pieces = 8
    """In how many pieces the logits are made; 1 for all of them at once."""
    tiny: ClassVar[dict[str, Any]] = {
        "global_batch": 16,
        "samples": 1600,
        "layers": 2,
        "heads": 2,
        "width": 64,
        "vocab": 256,
        "seq": 64,
        "dropout": 0.0,
        "rate": 3e-3,
        "pieces": 2,
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
            {"params": [one for one in params if one.dim() > 1], "weight_decay": 0.1},
            {"params": [one for one in params if one.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95))

    def dataset(self) -> Synthetic:
        """Walks over the vocabulary."""
        return Synthetic(self.samples or 0, self._sample)

    def _sample(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = walk(generator, self.seq + 1, self.vocab)
        return tokens[:-1], tokens[1:]
