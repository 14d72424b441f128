"""Store the frozen linear layers of a model in 4 or 8 bits (see `spec/base_format.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from trimtab.engine import low_bit, plain_low_bit
from trimtab.errors import WrongUse
from trimtab.jobs.lora import is_linear, layer_widths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.spec import BaseFormat
    from trimtab.spec.base_format import BaseStorage

ops = torch.ops.trimtab


class _RestoredProduct(torch.autograd.Function):
    """A linear layer whose weights are restored in forward and again in backward, and never kept between."""

    @staticmethod
    def forward(
        ctx: Any,
        given: torch.Tensor,
        bias: torch.Tensor | None,
        restore: Callable[[torch.dtype], torch.Tensor],
        multiply: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None,
    ) -> torch.Tensor:
        """Return the product; keep only the function that restores the weights."""
        ctx.restore = restore
        ctx.has_bias = bias is not None and bias.requires_grad
        if multiply is not None:
            return multiply(given, bias)
        return nn.functional.linear(given, restore(given.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the input and of the bias."""
        (gradient,) = above
        for_input = gradient @ ctx.restore(gradient.dtype) if ctx.needs_input_grad[0] else None
        for_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        return for_input, for_bias, None, None


class QuantizedLinear(nn.Module):
    """A frozen linear layer in the storage of a base format."""

    def __init__(self, layer: nn.Module, storage: BaseStorage, device: str) -> None:
        super().__init__()
        self.in_features, self.out_features = layer_widths(layer)
        self.storage = storage
        self.is_transposed = not isinstance(layer, nn.Linear)
        weight: Any = layer.weight
        bias: Any = getattr(layer, "bias", None)
        self.bias = None if bias is None else nn.Parameter(_move(bias, device), bias.requires_grad)
        matrix = _move(weight, device)
        if self.is_transposed:
            matrix = matrix.t().contiguous()
        for name, tensor in self._quantize(matrix).items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)
        del matrix
        # The number of weights before they were packed, for the count of parameters.
        vars(self.weight)["weights"] = self.in_features * self.out_features

    def _quantize(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the stored tensors of a matrix by name."""
        storage = self.storage
        if storage.is_plain and storage.codebook:
            return plain_low_bit.store_nf4(matrix, storage.block, storage.scale_block)
        if storage.is_plain:
            return plain_low_bit.store_int8(matrix)
        if not storage.codebook:
            numbers, scales, _ = ops.quantize_rows(matrix.half(), 0.0)
            return {"weight": numbers, "scales": scales}
        packed, scales = ops.quantize_4bit(matrix, storage.block, storage.codebook)
        if not storage.scale_block:
            return {"weight": packed, "scales": scales}
        codes, second, mean = ops.quantize_scales(scales, storage.scale_block)
        return {"weight": packed, "scales": codes, "scale_scales": second, "scale_mean": mean}

    def restore(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights as a matrix of (out_features, in_features)."""
        storage = self.storage
        tensors: Any = self
        if storage.is_plain and storage.codebook:
            shape = (self.out_features, self.in_features)
            return plain_low_bit.restore_nf4(self, shape, storage.block, dtype)
        if storage.is_plain:
            plain: torch.Tensor = tensors.weight.to(dtype) * tensors.scales.to(dtype).unsqueeze(1)
            return plain
        if not storage.codebook:
            scale = tensors.scales.unsqueeze(1).mul(1 / low_bit.LARGEST_INT8)
            restored: torch.Tensor = tensors.weight.to(dtype, copy=True).mul_(scale)
            return restored
        scales = tensors.scales
        if storage.scale_block:
            scales = ops.dequantize_scales(
                scales, tensors.scale_scales, tensors.scale_mean, storage.scale_block
            )
        matrix: torch.Tensor = ops.dequantize_4bit(
            tensors.weight,
            scales,
            storage.block,
            storage.codebook,
            [self.out_features, self.in_features],
            dtype,
        )
        return matrix

    def _multiply(self, given: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply 8-bit integers; columns with large activations are multiplied in the input's dtype."""
        tensors: Any = self
        rows = given.reshape(-1, given.shape[-1])
        numbers, row_scales, columns = ops.quantize_rows(rows.half(), self.storage.outliers)
        product = ops.product_int8(numbers, tensors.weight)
        del numbers
        out = ops.scale_product(product, row_scales, tensors.scales)
        del product
        out = out.to(given.dtype) if bias is None else out.to(given.dtype).add_(bias)
        if columns.numel():
            scale = tensors.scales.unsqueeze(1).mul(1 / low_bit.LARGEST_INT8)
            restored = (tensors.weight[:, columns].float() * scale).to(given.dtype)
            out = out.addmm(rows[:, columns], restored.t())
        return cast("torch.Tensor", out.view(*given.shape[:-1], self.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with the restored weights, in the dtype of autocast or of the input."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        multiply = None if self.storage.codebook else self._multiply
        with torch.autocast(kind, enabled=False):
            if self.storage.is_plain and not self.storage.codebook:
                product: torch.Tensor = plain_low_bit.Int8Product.apply(x.to(dtype), self.weight, self.scales)
                return product if bias is None else product + bias
            out: torch.Tensor = _RestoredProduct.apply(x.to(dtype), bias, self.restore, multiply)
        return out

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        kind = self.storage.codebook or f"int{self.storage.bits}"
        return f"in_features={self.in_features}, out_features={self.out_features}, stored as {kind}"


def _move(tensor: torch.Tensor, device: str) -> torch.Tensor:
    data = tensor.detach()
    return torch.empty_like(data, device=device) if data.is_meta else data.to(device)


def quantize_frozen(model: nn.Module, base: BaseFormat, device: str) -> int:
    """Store the frozen linear layers of a model in a base format, on the device; return their number.

    Layers are moved and quantized one at a time, so that the device never holds more than one whole layer.
    The head stays as it is, and so do layers that share their weight or that the model keeps in float32.
    """
    if not base.storage.is_quantized:
        return 0
    layers = list(_list_layers(model))
    if not layers:
        raise WrongUse(
            f"--base {base}",
            found="the model has no frozen linear layer besides its head",
            cure="Freeze the base model, as with --lora 16 or in model(); or leave --base out.",
        )
    for parent, name, layer in layers:
        setattr(parent, name, QuantizedLinear(layer, base.storage, device))
    return len(layers)


def _list_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the parent, name and module of every layer to quantize."""
    kept = {id(module) for module in _kept_modules(model)}
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for parent_name, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if not is_linear(child) or id(child) in kept:
                continue
            weight: Any = child.weight
            is_shared = owners[id(weight)] > 1
            if weight.requires_grad or is_shared or not weight.is_floating_point():
                continue
            if not _is_kept_name(model, f"{parent_name}.{name}"):
                yield parent, name, child


def _kept_modules(model: nn.Module) -> list[nn.Module]:
    """Return the head of the model, if it can name it."""
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    return [] if head is None else list(head.modules())


def _is_kept_name(model: nn.Module, name: str) -> bool:
    """Whether a model of transformers keeps a layer in float32, because it overflows otherwise."""
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    return any(part in kept for part in name.split("."))


def count_weights(parameter: torch.Tensor) -> int:
    """Return the number of weights that a parameter stands for, also if several are packed in a byte."""
    return int(getattr(parameter, "weights", parameter.numel()))
