"""Job slm: train a small language model from scratch on text."""

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
from trimtab.jobs.text.blocks import TokenBlocks, describe_text, lay_out_blocks
from trimtab.jobs.text.byte_pairs import BYTES
from trimtab.jobs.text.corpus import find_text
from trimtab.jobs.text.tokens import BytePairTokenizer, tokenize

if TYPE_CHECKING:
    from trimtab.jobs.text.blocks import BlockLayout
    from trimtab.jobs.text.tokens import Tokens

FINAL_RATE_SHARE = 0.1
"""Share of the learning rate at the end of the schedule."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.inward = nn.Linear(width, 3 * width, bias=False)
        self.outward = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() and _is_plain(self.inward):
            # Three products: their gradients need not be copied into one tensor, 1 % of a step on an H200.
            parts = [functional.linear(x, weight) for weight in self.inward.weight.chunk(3)]
            query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        else:
            query, key, value = self.inward(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropped = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropped, is_causal=True
        )
        return self.outward(attended.transpose(1, 2).flatten(2))


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer is a linear layer whose weights are whole, and nothing changes its calls."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks  # noqa: SLF001 - torch has no other way
    return type(layer) is nn.Linear and not hooks and not hasattr(layer.weight, "placements")


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """Return GELU in the tanh approximation of GPT-2.

    (1 + tanh u) / 2 is the sigmoid of 2u. Compiled, that is one exponential per element; tanh and erf are
    slow enough to keep a kernel from memory speed: 4 % of a step on an H200. Uncompiled, it would be six
    kernels instead of one.
    """
    if torch.compiler.is_compiling():
        return x * torch.sigmoid(x * (_SLOPE + _CUBE * x * x))
    return functional.gelu(x, approximate="tanh")


_SLOPE = 2 * math.sqrt(2 / math.pi)
_CUBE = 0.044715 * _SLOPE


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a two-layer MLP."""

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
    """A decoder with learned positions and a head tied to the token embedding."""

    def __init__(self, job: Slm) -> None:
        super().__init__()
        self.pieces = job.pieces
        self.tokens = nn.Embedding(job.vocab, job.width)
        self.positions = nn.Embedding(job.seq, job.width)
        self.dropout = nn.Dropout(job.dropout)
        self.blocks = nn.ModuleList(Block(job.width, job.heads, job.dropout) for _ in range(job.layers))
        self.norm = nn.LayerNorm(job.width, bias=False)
        for name, weight in self.named_parameters():
            # Scale down the 2 x layers outputs that are added to the residual stream, as in GPT-2.
            on_residual = name.endswith(("outward.weight", "narrow.weight"))
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02 / (2 * job.layers) ** 0.5 if on_residual else 0.02)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean loss per token; `positions` are those of the tokens, if they are not all."""
        if positions is None:
            positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16:
            # Otherwise the residual stream stays in fp32, at twice the memory traffic. fp16 could overflow.
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
    """Samples per epoch; more than the text has blocks repeat them, None reads each block once."""
    data = ""
    """Text file, or folder of text files; empty for the sources of Python's standard library."""
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
    """Optimizer steps until the rate has fallen to a tenth; default: all steps of the job."""
    decay = 0.1
    """Weight decay of AdamW."""
    betas = (0.9, 0.95)
    clip: float | None = 1.0
    validation_batches = 100
    """Maximum global batches of held-out text per evaluation."""
    pieces = 8
    """Number of pieces in which logits are computed; 1 for all at once."""
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
        """Return the model with random weights."""
        return LanguageModel(self)

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return random tokens, and the next token of each."""
        tokens = torch.randint(self.vocab, (size, self.seq + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, model: Any, batch: tuple[torch.Tensor, ...]) -> Any:
        """Return the mean loss per token."""
        return model(*batch)

    def split_sequence(self, batch: tuple[torch.Tensor, torch.Tensor], part: Any) -> tuple[torch.Tensor, ...]:
        """Return one rank's part of the sequences; targets are shifted already."""
        tokens, targets = batch
        positions = part.positions(tokens.shape[1]).to(tokens.device).expand(tokens.shape[0], -1)
        return part.select(tokens), part.select(targets), positions

    def weight(self, batch: tuple[torch.Tensor, ...]) -> int:
        """Return the number of tokens."""
        return batch[1].numel()

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        """Return AdamW with weight decay for matrices and embeddings, not for norms."""
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
        """Return a schedule with linear warm-up, then cosine decay to a tenth."""
        horizon = self.horizon
        if horizon is None:
            samples = len(self.dataset()) if self.samples is None else self.samples
            horizon = -(-samples // self.global_batch) * self.epochs
        share = partial(learning_rate_share, warmup=self.warmup, horizon=horizon)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, share)

    def dataset(self) -> TokenBlocks:
        """Return the training blocks of the text."""
        tokens, layout = self._text()
        return TokenBlocks(tokens, self.seq + 1, layout.samples, layout.block, shift_tokens)

    def validation(self) -> TokenBlocks | None:
        """Return held-out blocks, evenly spaced; None if the text is too short."""
        tokens, layout = self._text()
        count = min(layout.held_out, self.validation_batches * self.global_batch)
        if count < 1:
            return None
        block = partial(layout.held_out_block, samples=count)
        return TokenBlocks(tokens, self.seq + 1, count, block, shift_tokens)

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes on the training data."""
        tokens, layout = self._text()
        return describe_text(tokens, layout, self.seq + 1)

    def _text(self) -> tuple[Tokens, BlockLayout]:
        if self.vocab < BYTES:
            raise WrongUse(
                f"vocab {self.vocab}",
                found=f"text is made of {BYTES} kinds of bytes, and each needs a token",
                cure=f"Give a vocabulary of {BYTES} or more.",
            )
        tokens = tokenize(find_text(self.data), BytePairTokenizer(self.vocab))
        return tokens, lay_out_blocks(tokens, self.seq + 1, self.samples)


def shift_tokens(tokens: torch.Tensor, _: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, and the next token of each."""
    return tokens[:-1], tokens[1:]


def learning_rate_share(step: int, *, warmup: int, horizon: int) -> float:
    """Return the share of the full learning rate after this many steps.

    >>> [round(learning_rate_share(step, warmup=2, horizon=10), 3) for step in (0, 1, 2, 6, 10, 99)]
    [0.333, 0.667, 1.0, 0.55, 0.1, 0.1]
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, horizon - warmup))
    return FINAL_RATE_SHARE + (1 - FINAL_RATE_SHARE) * (1 + math.cos(math.pi * progress)) / 2
