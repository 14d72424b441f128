"""A job whose model uses what is outside of its blocks in several ways, for tests of pipeline stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import trimtab

WIDTH, TOKENS, WORDS, DEPTH = 16, 8, 48, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, beside: Any = None) -> Any:
        inner = self.norm(hidden) if beside is None else self.norm(hidden) * beside
        return hidden + self.down(functional.gelu(self.up(inner)))


class Network(nn.Module):
    """A decoder; `how` says what is special about its parts outside of the blocks."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) / 10)
        self.layers = nn.ModuleList([Layer() for _ in range(DEPTH)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if how == "tied":
            self.head.weight = self.words.weight
        if how == "statistics":
            self.before = nn.BatchNorm1d(TOKENS)
        if how == "frozen":
            for parameter in (*self.layers[:3].parameters(), self.words.weight, self.places, self.scale):
                parameter.requires_grad_(False)

    def forward(self, ids: torch.Tensor, *, again: bool = False) -> Any:
        hidden, beside = self.words(ids) + self.places, None
        if self.how == "statistics":
            hidden = self.before(hidden)
        if self.how == "decides" and self.scale.sum() > 0:
            hidden = hidden * 2
        if self.how in {"beside", "third"}:
            # A copy of the form of hidden states, which does not depend on their values.
            beside = torch.zeros_like(hidden) + self.scale
        if self.how == "written":
            blank = torch.zeros_like(hidden)
            blank[:, 1:] += self.scale
            hidden = hidden + blank
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, beside if self.how == "beside" or number == 2 else None)
        logits = self.head(self.norm(hidden))
        return logits + self.words(ids).mean() if again else logits


class DecoderJob(trimtab.Job):
    additive = True

    def __init__(self, how: str = "") -> None:
        self.how = how

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Network(self.how)

    def batch(self, n: int) -> Any:
        return torch.randint(0, WORDS, (n, TOKENS))

    def loss(self, model: Any, batch: Any) -> Any:
        return functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(-1, 1).flatten())

    def optimizer(self, parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
