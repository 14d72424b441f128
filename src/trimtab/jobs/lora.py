"""LoRA adapters for frozen linear layers."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


class LoRALayer(nn.Module):
    """Compute inner(x) + alpha / rank * up(down(x)); up starts at zero, so nothing changes at first."""

    def __init__(self, inner: nn.Module, rank: int, *, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        wide_in, wide_out = layer_widths(inner)
        # On the default device and in the default dtype: the frozen layer often has a narrower dtype.
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(wide_in, rank, bias=False)
        self.up = nn.Linear(rank, wide_out, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.scale = alpha / rank
        self.active = True
        """Whether the adapter is active."""
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    @property
    def weight(self) -> Any:
        """The frozen layer's weight; models read its dtype."""
        return self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        if not self.active:
            return out
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.down.weight.dtype)
        adapted = self.up(self.down(self.dropout(x)))
        return out + (self.scale * adapted).to(out.dtype)


def layer_widths(layer: nn.Module) -> tuple[int, int]:
    """Return the widths of a linear layer's input and output."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    # The weight of transformers' Conv1D, as in GPT-2, is transposed.
    weight: Any = layer.weight
    return int(weight.shape[0]), int(weight.shape[1])


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer can have an adapter."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def add_adapters(
    model: nn.Module, rank: int, *, alpha: float, dropout: float = 0.0, exclude: Collection[nn.Module] = ()
) -> int:
    """Freeze a model, add adapters to its linear layers outside of `exclude`, and return their number."""
    model.requires_grad_(False)
    excluded = {id(part) for module in exclude for part in module.modules()}
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_linear(child) and id(child) not in excluded
    ]
    for parent, name, child in layers:
        setattr(parent, name, LoRALayer(child, rank, alpha=alpha, dropout=dropout))
    return len(layers)


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable all adapters of a model within the context."""
    adapters = [module for module in model.modules() if isinstance(module, LoRALayer)]
    for adapter in adapters:
        adapter.active = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.active = True
