"""Compute weight gradients of linear layers later than the gradients of their inputs (zero-bubble schedules).

The backward pass of a linear layer is two matrix products. The previous pipeline stage waits for the gradient
of the input; nobody waits for the gradient of the weight before the optimizer runs. So the backward pass
stores what the second product needs, and `flush_weight_gradients` computes it when the rank would wait.
Only layers of the class nn.Linear are split; the backward pass of all others computes both.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterator

Products = dict[nn.Parameter, list[tuple[torch.Tensor, torch.Tensor | None]]]
"""For each parameter, the pairs whose products add up to its gradient: the gradient of the output, and the
input, which is None for a bias."""


class WeightGradients:
    """Stores the products of a backward pass until they are computed."""

    def __init__(self) -> None:
        self._open: Products | None = None

    def install(self, model: nn.Module) -> int:
        """Split the backward pass of all linear layers with trainable weights; return their number."""
        layers = [
            module
            for module in model.modules()
            if type(module) is nn.Linear
            and module.weight.requires_grad
            and "forward" not in vars(module)
            and not module._forward_hooks
        ]
        for layer in layers:
            layer.__dict__["forward"] = self._make_forward(layer)
        return len(layers)

    def _make_forward(self, layer: nn.Linear) -> Any:
        def forward(value: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                return functional.linear(value, layer.weight, layer.bias)
            if torch.is_autocast_enabled(value.device.type):
                value = value.to(torch.get_autocast_dtype(value.device.type))
            result: torch.Tensor = _SplitLinear.apply(value, layer.weight, layer.bias, self)
            return result

        return forward

    @contextlib.contextmanager
    def collect(self) -> Iterator[Products]:
        """Store the products of the backward passes inside; outside, they are computed at once."""
        products: Products = {}
        self._open = products
        try:
            yield products
        finally:
            self._open = None

    def add(self, parameter: nn.Parameter, gradient: torch.Tensor, value: torch.Tensor | None) -> bool:
        """Store a product; return False if it has to be computed at once."""
        if self._open is None:
            return False
        self._open.setdefault(parameter, []).append((gradient, value))
        return True


def flush_weight_gradients(products: Products) -> None:
    """Compute the products, add them to the gradients, and call the hooks of the parameters."""
    while products:
        parameter, pairs = products.popitem()
        total: torch.Tensor | None = None
        for gradient, value in pairs:
            product = _multiply(gradient, value).to(parameter.dtype)
            total = product if total is None else total.add_(product)
        pairs.clear()
        torch.autograd.backward([parameter], [total])


def _multiply(gradient: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
    rows = gradient.flatten(0, -2) if gradient.dim() > 1 else gradient[None]
    if value is None:
        return rows.sum(0)
    return rows.t() @ (value.flatten(0, -2) if value.dim() > 1 else value[None])


class _SplitLinear(torch.autograd.Function):
    """A linear layer whose backward pass may leave the gradients of its parameters for later."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        store: WeightGradients,
    ) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx.weight, ctx.bias, ctx.store = weight, bias, store
        with torch.autocast(value.device.type, enabled=False):
            return functional.linear(
                value, weight.to(value.dtype), None if bias is None else bias.to(value.dtype)
            )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        (value,) = ctx.saved_tensors
        weight, bias, store = ctx.weight, ctx.bias, ctx.store
        of_value = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        of_weight = of_bias = None
        if ctx.needs_input_grad[1] and not store.add(weight, gradient, value):
            of_weight = _multiply(gradient, value).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2] and not store.add(bias, gradient, None):
            of_bias = _multiply(gradient, None).to(bias.dtype)
        return of_value, of_weight, of_bias, None
