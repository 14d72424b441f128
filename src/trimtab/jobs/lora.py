"""LoRA: beside every frozen linear layer, a narrow pair of trained ones."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


class LoRALayer(nn.Module):
    """inner(x) + alpha / rank * up(down(x)); up starts at zero, so that nothing changes at first."""

    def __init__(self, inner: nn.Module, rank: int, *, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        wide_in, wide_out = features(inner)
        # On the device and in the dtype of the day: the frozen layer's own dtype is often a narrower one.
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(wide_in, rank, bias=False)
        self.up = nn.Linear(rank, wide_out, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.scale = alpha / rank
        self.counts = True
        """Whether the trained pair has a part in the output."""
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    @property
    def weight(self) -> Any:
        """The frozen layer's: models ask for its dtype."""
        return self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        if not self.counts:
            return out
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.down.weight.dtype)
        beside = self.up(self.down(self.dropout(x)))
        return out + (self.scale * beside).to(out.dtype)


def features(layer: nn.Module) -> tuple[int, int]:
    """How wide a linear layer's input and output are."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    # transformers' Conv1D, which GPT-2 is made of, keeps its weight the other way round.
    weight: Any = layer.weight
    return int(weight.shape[0]), int(weight.shape[1])


def is_linear(layer: nn.Module) -> bool:
    """A layer that adapters go beside."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def adapt(
    model: nn.Module, rank: int, *, alpha: float, dropout: float = 0.0, but: Collection[nn.Module] = ()
) -> int:
    """Freeze a model and put adapters beside its linear layers; `but` and what is in it get none.

    Says how many there are.
    """
    model.requires_grad_(False)
    left_out = {id(part) for module in but for part in module.modules()}
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_linear(child) and id(child) not in left_out
    ]
    for parent, name, child in found:
        setattr(parent, name, LoRALayer(child, rank, alpha=alpha, dropout=dropout))
    return len(found)


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it was before adapt(), for as long as the context lasts."""
    found = [module for module in model.modules() if isinstance(module, LoRALayer)]
    for one in found:
        one.counts = False
    try:
        yield
    finally:
        for one in found:
            one.counts = True
