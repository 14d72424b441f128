"""Let the large linear layers of a model multiply in 8-bit floats (`ProductsFormat` in `spec/precision.py`).

A layer keeps its weight as it is. For each of its three products (result, gradient of the input, gradient of
the weight) it scales both matrices, casts them to 8 bits, and multiplies them by `torch._scaled_mm`. Scales
come from the values themselves (dynamic scaling). The recipes are those of torchao, `tensorwise` and
`rowwise`. On a device without 8-bit products, such as the CPU, the layer multiplies the same 8-bit numbers in
float32: results are those of a GPU but for rounding in sums, and nothing is faster.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._guards import detect_fake_mode

from trimtab.engine.mx_format import BlockProduct, make_refusal
from trimtab.engine.precision import torch_dtype
from trimtab.errors import EnvironmentFault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trimtab.spec import Dtypes
    from trimtab.spec.precision import ProductsFormat

MULTIPLE = 16
"""8-bit products need sizes that are multiples of this."""
FIRST_CAPABILITY, FIRST_BLOCKS = (8, 9), (10, 0)
"""The first compute capability with 8-bit products: Ada; then Hopper. Blackwell has those of MX blocks."""
SMALLEST = 1e-12
"""Smallest absolute value that a scale is made for, so that a matrix of zeros gets one."""
MOST_NAMES = 3
"""Names of layers that a note lists for each reason."""
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

HEAD = "the head of the model"
FROZEN = "frozen"
UNALIGNED = "a size is no multiple of {}"
SMALL = "too small to gain"


class _Recipe(NamedTuple):
    """A products format with torch's dtypes, as plain values that torch.compile can read."""

    values: torch.dtype
    gradients: torch.dtype
    scales_rows: bool
    rounds_scales: bool
    is_emulated: bool
    block: int = 0


class _Scaled(NamedTuple):
    """A matrix in 8 bits, and the factors that restore its values: one, or one per row or column."""

    data: torch.Tensor
    factors: torch.Tensor

    def t(self) -> _Scaled:
        """Return the transposed matrix, without a copy."""
        return _Scaled(self.data.t(), self.factors.t())


def _cast(matrix: torch.Tensor, dtype: torch.dtype, recipe: _Recipe, dim: int) -> _Scaled:
    """Scale a matrix into the range of a dtype and cast it; `dim` is what a row sums over in the product."""
    over = (dim,) if recipe.scales_rows else (0, 1)
    # The norm reads the matrix once; abs() would first write a copy of it.
    largest = torch.linalg.vector_norm(matrix, float("inf"), dim=over, keepdim=True)
    scale = torch.finfo(dtype).max / largest.float().clamp_(min=SMALLEST)
    if recipe.rounds_scales:
        scale = scale.log2_().floor_().exp2_()
    # The scale has two dimensions, so that the result is in float32. It needs no limit: the largest value
    # rounds to the largest number of the dtype.
    return _Scaled(torch.mul(matrix, scale).to(dtype), scale.reciprocal())


def _turn(matrix: torch.Tensor) -> torch.Tensor:
    """Return the transposed matrix as a copy, with zeros behind rows of other lengths than products need."""
    turned = matrix.t()
    missing = -turned.shape[1] % MULTIPLE
    if not missing:
        return turned.contiguous()
    # Not all operations know 8-bit floats; a byte of 0 is 0.0.
    padded = nn.functional.pad(turned.view(torch.uint8), (0, missing))
    return padded.view(matrix.dtype)


def _multiply(
    left: _Scaled, right: _Scaled, dtype: torch.dtype, recipe: _Recipe, *, fast: bool
) -> torch.Tensor:
    """Multiply two 8-bit matrices; the right one is stored by columns. `fast` sums with fewer bits."""
    if recipe.is_emulated:
        product = left.data.float() @ right.data.float()
        out = product.mul_(left.factors).mul_(right.factors)
    else:
        # With scales per row, torch gives bf16 only.
        out = torch._scaled_mm(
            left.data,
            right.data,
            scale_a=left.factors,
            scale_b=right.factors,
            out_dtype=torch.bfloat16 if recipe.scales_rows else dtype,
            use_fast_accum=fast,
        )
    # A cast to the same dtype returns the same tensor. Under torch.compile of torch 2.11, the result of the
    # autograd function then counted as unused, and all gradients were 0.
    return out if out.dtype == dtype else out.to(dtype)


class _ScaledProduct(torch.autograd.Function):
    """A linear layer in 8 bits. Between the passes it keeps its input in 16 bits, as other layers do."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, recipe: _Recipe) -> torch.Tensor:
        """Return the product of the rows with the weight of (outputs, inputs)."""
        ctx.save_for_backward(given, weight)
        ctx.recipe = recipe
        rows = _cast(given, recipe.values, recipe, 1)
        columns = _cast(weight, recipe.values, recipe, 1).t()
        return _multiply(rows, columns, given.dtype, recipe, fast=True)

    @staticmethod
    def backward(ctx: Any, *above: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the input and of the weight."""
        (gradient,) = above
        given, weight = ctx.saved_tensors
        recipe = ctx.recipe
        for_input = for_weight = rows = None
        if ctx.needs_input_grad[0]:
            rows = _cast(gradient, recipe.gradients, recipe, 1)
            columns = _cast(weight, recipe.values, recipe, 0)
            columns = _Scaled(_turn(columns.data).t(), columns.factors)
            for_input = _multiply(rows, columns, gradient.dtype, recipe, fast=False)
            del columns
        if ctx.needs_input_grad[1]:
            if rows is None or recipe.scales_rows:
                # The sum is now over samples, and a row of the other direction has another scale.
                rows = _cast(gradient, recipe.gradients, recipe, 0)
            rows = _Scaled(_turn(rows.data), rows.factors.t())
            columns = _cast(given, recipe.values, recipe, 0)
            columns = _Scaled(_turn(columns.data).t(), columns.factors)
            for_weight = _multiply(rows, columns, gradient.dtype, recipe, fast=False)
        return for_input, for_weight, None


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in 8 bits; its parameters and their names are those of nn.Linear."""

    recipe: _Recipe

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        """Return the product in the dtype of autocast or of the input."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        rows = input.to(dtype).reshape(-1, self.in_features)
        if not rows.shape[0]:
            # No rows have no largest value.
            return super().forward(input)
        with torch.autocast(kind, enabled=False):
            recipe = self.recipe
            out: torch.Tensor = (
                BlockProduct.apply(rows, self.weight, recipe.block, recipe.values)
                if recipe.block
                else _ScaledProduct.apply(rows, self.weight, recipe)
            )
            if self.bias is not None:
                out = out + self.bias.to(dtype)
        return out.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Describe the layer in the printed model."""
        emulated = ", emulated" * self.recipe.is_emulated
        block = f"{self.recipe.block} numbers" if self.recipe.block else ""
        scales = block or ("row" if self.recipe.scales_rows else "matrix")
        return f"{super().extra_repr()}, multiplies in 8 bits with a scale per {scales}{emulated}"


def convert_linear_layers(model: nn.Module, dtypes: Dtypes, device: str) -> int:
    """Let the large linear layers of a model multiply in 8 bits, if the precision does; return their number.

    The layers stay the same objects, so that hooks and references to them stay.
    """
    form = dtypes.products_format
    if form is None:
        return 0
    recipe = _Recipe(
        values=torch_dtype(form.values),
        gradients=torch_dtype(form.gradients),
        scales_rows=form.scales_rows,
        rounds_scales=form.rounds_scales,
        is_emulated=not has_float8_products(device, FIRST_BLOCKS if form.block else FIRST_CAPABILITY),
        block=form.block,
    )
    if form.block and not recipe.is_emulated and detect_fake_mode(list(model.parameters())) is None:
        raise make_refusal()
    converted = [layer for _, layer, reason in _list_layers(model, form) if not reason]
    for layer in converted:
        layer.__class__ = Float8Linear
        layer.recipe = recipe
    return len(converted)


def has_float8_products(device: str, first: tuple[int, int] = FIRST_CAPABILITY) -> bool:
    """Whether a device multiplies in 8 bits; raise for a GPU that would only emulate it."""
    if torch.device(device).type != "cuda":
        return False
    if torch.version.hip is None and torch.cuda.get_device_capability() >= first:
        return True
    raise EnvironmentFault(
        f"8-bit products on {torch.cuda.get_device_name()}",
        found="this needs an NVIDIA GPU of compute capability {}.{} or newer".format(*first),
        cure="Use --precision bf16.",
    )


def _list_layers(model: nn.Module, form: ProductsFormat) -> Iterator[tuple[str, Any, str]]:
    """Yield the name of every linear layer, the layer, and why it is not converted; empty if it is.

    Subclasses are left out: they compute something else, or others read their weight directly.
    """
    heads = _find_heads(model)
    for name, layer in model.named_modules():
        if type(layer) not in (nn.Linear, Float8Linear):
            continue
        sizes = (layer.out_features, layer.in_features)
        if layer in heads:
            yield name, layer, HEAD
        elif not layer.weight.requires_grad:
            yield name, layer, FROZEN
        elif any(size % form.multiple for size in sizes):
            yield name, layer, UNALIGNED.format(form.multiple)
        else:
            yield name, layer, "" if form.gains(*sizes) else SMALL


def _find_heads(model: nn.Module) -> set[nn.Module]:
    """Return the layers that give scores of tokens: they stay in 16 bits, because the loss depends on them.

    A model of transformers names its head. In others it is a layer of the size of an embedding.
    """
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    if isinstance(head, nn.Module):
        return set(head.modules())
    tables = {
        (module.num_embeddings, module.embedding_dim)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    }
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return {layer for layer in linear if (layer.out_features, layer.in_features) in tables}


def describe_conversion(model: nn.Module, dtypes: Dtypes) -> str:
    """Return a sentence on which linear layers multiply in 8 bits and which do not; empty without 8 bits."""
    form = dtypes.products_format
    if form is None:
        return ""
    layers = list(_list_layers(model, form))
    kept: dict[str, list[str]] = {}
    for name, _, reason in layers:
        if reason:
            kept.setdefault(reason, []).append(name)
    count = len(layers) - sum(map(len, kept.values()))
    reasons = [f"{reason}: {_list_names(names)}" for reason, names in kept.items()]
    if not count:
        why = f" ({'; '.join(reasons)})" if reasons else ""
        return f"fp8: no linear layer multiplies in 8 bits, so this is bf16{why}"
    others = f"; in 16 bits: {'; '.join(reasons)}" if reasons else ""
    return f"fp8: {count} of {len(layers)} linear layers multiply in 8 bits{others}"


def _list_names(names: list[str]) -> str:
    """Return names in short: those of repeated blocks once, and of many the first few.

    >>> _list_names(["layers.0.k", "layers.1.k", "head"])
    'layers.*.k (2), head'
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(NUMBER.sub("*", name), []).append(name or "the model itself")
    words = [same[0] if len(same) == 1 else f"{short} ({len(same)})" for short, same in alike.items()]
    more = [f"and {len(words) - MOST_NAMES} more"] if len(words) > MOST_NAMES else []
    return ", ".join([*words[:MOST_NAMES], *more])
