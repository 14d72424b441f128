"""Small jobs with experts."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

import trimtab

VOCABULARY, LENGTH = 32, 6


class StackedExperts(nn.Module):
    """Experts as a user may write them: nothing but the weights says how many there are."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.inward = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.outward = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for expert in range(self.inward.shape[0]):
            token, choice = torch.where(index == expert)
            inner = functional.gelu(hidden[token] @ self.inward[expert]) @ self.outward[expert]
            weighted = inner * weights[token, choice, None]
            output = output.index_add(0, token, weighted.to(output.dtype))
        return output


class Block(nn.Module):
    def __init__(self, experts: int, width: int, favourite: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts)
        self.feed = StackedExperts(experts, width)
        # A large number sends all tokens to the same experts.
        self.favourite = favourite
        self.weight_dtype: torch.dtype | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(hidden).flatten(0, 1)
        scores = self.router(tokens)
        scores = scores - self.favourite * torch.arange(scores.shape[-1], dtype=scores.dtype)
        weights, index = torch.topk(torch.softmax(scores, -1, dtype=self.weight_dtype), 2)
        fed: torch.Tensor = self.feed(tokens, index, weights)
        return hidden + fed.view_as(hidden)


class Decoder(nn.Module):
    def __init__(self, experts: int, width: int, favourite: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(experts, width, favourite) for _ in range(2)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> Any:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Named(trimtab.Job):
    """A job that names its experts."""

    name = "named"
    global_batch = 8
    samples = 64
    experts, width, favourite = 4, 8, 0.0
    expert_modules: ClassVar[tuple[str, ...]] = ("blocks.*.feed",)

    def model(self) -> nn.Module:
        return Decoder(self.experts, self.width, self.favourite)

    def batch(self, size: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (size, LENGTH))

    def loss(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        scores = model(batch)
        scores = getattr(scores, "logits", scores)[:, :-1]
        return functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def dataset(self) -> list[torch.Tensor]:
        torch.manual_seed(1)
        return [self.batch(1)[0] for _ in range(self.samples)]


class Float32Router(Named):
    """The weights of the choices are float32, whatever the dtype of the tokens."""

    def model(self) -> nn.Module:
        model = super().model()
        for block in model.get_submodule("blocks").children():
            assert isinstance(block, Block)
            block.weight_dtype = torch.float32
        return model


class Lonely(Named):
    """All tokens choose the first two experts."""

    favourite = 100.0


class Mixtral(Named):
    """A Mixtral of transformers, whose experts are found by their form."""

    expert_modules: ClassVar[tuple[str, ...]] = ()
    implementation = "eager"
    key_value_heads = 1

    def model(self) -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=self.key_value_heads,
            num_local_experts=self.experts,
            use_cache=False,
        )
        model = MixtralForCausalLM(config)  # type: ignore[no-untyped-call]
        model.set_experts_implementation(self.implementation)
        return model


class Splittable(Mixtral):
    """The same with heads that two ranks can split."""

    key_value_heads = 2


class Grouped(Mixtral):
    """The same with grouped matrix products, which torch has in 32 bits at most."""

    implementation = "grouped_mm"
    width = 16
