"""A diffusion transformer (DiT-XL/2: 28 blocks, 1152 wide) on latents of 32 x 32, to plan."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DiffusionBlock(nn.Module):
    """A transformer block whose norms are scaled and shifted by the time step and the class."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)])
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:  # noqa: D102
        first, second = self.modulation(condition)[:, None].chunk(2, dim=-1)
        shift, scale, gate = first.chunk(3, dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.into(self.norms[0](tokens) * (1 + scale) + shift).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens = tokens + gate * self.out(mixed)
        shift, scale, gate = second.chunk(3, dim=-1)
        out: Tensor = tokens + gate * self.layers(self.norms[1](tokens) * (1 + scale) + shift)
        return out


class DiffusionTransformer(nn.Module):
    """Patches of latents, blocks, and the noise of each patch."""

    def __init__(self, width: int, blocks: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.places = nn.Parameter(torch.zeros(1, 256, width), requires_grad=False)
        self.steps, self.classes = nn.Embedding(1000, width), nn.Embedding(1001, width)
        self.blocks = nn.ModuleList([DiffusionBlock(width, heads) for _ in range(blocks)])
        self.head = nn.Linear(width, 16)

    def forward(self, latents: Tensor, steps: Tensor, classes: Tensor) -> Tensor:  # noqa: D102
        tokens = self.patches(latents).flatten(2).transpose(1, 2) + self.places
        condition = self.steps(steps) + self.classes(classes)
        for block in self.blocks:
            tokens = block(tokens, condition)
        noise: Tensor = self.head(tokens)
        return noise


class Pictures:
    """Denoise latents of pictures of 256 x 256."""

    global_batch = 256
    samples, epochs = 1_281_167, 1

    def model(self) -> nn.Module:
        """Return DiT-XL/2."""
        return DiffusionTransformer(1152, 28, 16)

    def batch(self, size: int) -> dict[str, Tensor]:
        """Return latents, steps, classes and the noise that was added."""
        return {
            "latents": torch.randn(size, 4, 32, 32),
            "steps": torch.randint(0, 1000, (size,)),
            "classes": torch.randint(0, 1000, (size,)),
            "noise": torch.randn(size, 256, 16),
        }

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean squared error of the noise."""
        guess = model(batch["latents"], batch["steps"], batch["classes"])
        return nn.functional.mse_loss(guess.float(), batch["noise"])
