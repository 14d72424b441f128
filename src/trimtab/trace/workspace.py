"""Memory that kernels take for themselves, which no shape shows: workspaces of cuBLAS, cuDNN and torch.

Each rule was read off allocator traces of an H200 (torch 2.11, cuDNN 9.19) and names what the memory is for;
sizes it gives agree with the traces to a few hundred bytes unless it says otherwise. Not covered: reductions
other than sums over rows, and convolutions over volumes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trimtab.spec import Cause
from trimtab.trace import convolution, formulas
from trimtab.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

CUBLAS_HOPPER = 32 * MIB
CUBLAS_OLDER = 4096 * 1024 * 2 + 16 * 1024 * 8
"""One block a thread that runs matrix products, kept for ever."""
WARP = 32
FP32 = 4
DESCRIPTOR = 256
"""cuDNN rounds its own workspaces up to this."""


class Take(NamedTuple):
    """One thing that an operation asks the allocator for, in order."""

    kind: str
    """hold: to the end of the operation; brief: given back at once; result: the next of its results."""
    size: int = 0
    cause: Cause | None = None
    """What a size follows from that is no straight line in the micro-batch."""


RESULT = Take("result")


def hold(size: int) -> Take:
    """Memory for the whole operation."""
    return Take("hold", size)


def brief(size: int) -> Take:
    """Memory for one kernel of it."""
    return Take("brief", size)


def caused(rule: str, numbers: tuple[int, ...], word: str = "", *, beside: int = 0) -> Take:
    """Memory for one kernel of it, by a formula; written down even where it is nothing."""
    cause = Cause(rule=rule, numbers=numbers, word=word, beside=beside)
    return Take("brief", formulas.size(cause) or 0, cause)


def _cudnn(shape: convolution.Shape, phase: str, *, beside: int = 0) -> Take:
    return caused(formulas.CONVOLUTION + phase, formulas.flat(shape), shape.precision, beside=beside)


def cublas(capability: tuple[int, int]) -> int:
    """The workspace of a cuBLAS handle."""
    return CUBLAS_HOPPER if capability >= (9, 0) else CUBLAS_OLDER


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copied(tensor: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> int:
    """The copy that a kernel makes of an input that does not lie as it wants; 0 where it does."""
    return 0 if tensor.is_contiguous(memory_format=layout) else _bytes(tensor)


def _layout(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    last = convolution.channels_last(source, weight)
    return torch.channels_last if last else torch.contiguous_format


def _convolution(args: tuple[Any, ...], out: Any) -> list[Take]:
    source, weight = args[0], args[1]
    shape = convolution.shape_of(source, weight, out, args[3], args[8])
    moved = _copied(source, _layout(source, weight))
    return [hold(moved), RESULT, _cudnn(shape, "forward")]


def _convolution_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    gradient, source, weight, stride, groups, wanted = args[0], args[1], args[2], args[4], args[9], args[10]
    layout = _layout(source, weight)
    shape = convolution.shape_of(source, weight, gradient, stride, groups)
    moved, given = _copied(source, layout) if wanted[1] else 0, _copied(gradient, layout)
    # A gradient in the other memory format is copied once; a slice is copied for each of the two.
    once = given if given and _looks_last(gradient) != (layout is torch.channels_last) else 0
    each = given - once
    takes = [hold(moved), hold(once)]
    if wanted[0]:
        takes += [RESULT, _cudnn(shape, "source", beside=each)]
    if wanted[1]:
        takes += [RESULT, _cudnn(shape, "weight", beside=each)]
    return takes


def _looks_last(tensor: torch.Tensor) -> bool:
    strides = tensor.stride()
    return tensor.dim() > 2 and strides[1] == 1 and tensor.shape[1] > 1 and strides[-1] != 1  # noqa: PLR2004


def _cudnn_attention_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    """Query gradients in fp32 and a row sum; keys and values once a query head where heads are shared."""
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    shared = 4 * batch * heads * key.shape[2] * size if key.shape[1] != heads else 0
    own = 4 * batch * heads * length * size + 4 * batch * heads * length + DESCRIPTOR
    return [RESULT, RESULT, RESULT, brief(own), brief(shared)]


def _flash_attention_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    """Query gradients in fp32 with lengths padded to 128 and heads to 32, and a row sum. From the source."""
    batch, heads, length, size = args[1].shape
    padded = -(-length // 128) * 128
    wide = -(-size // 32) * 32
    own = 4 * batch * heads * padded * wide + 4 * batch * heads * padded
    return [RESULT, RESULT, RESULT, brief(own)]


def _efficient_attention(args: tuple[Any, ...], _: Any, __: tuple[int, int]) -> list[Take]:
    """Results in fp32, where a head of values is too large for registers. From the source."""
    query, value = args[0], args[2]
    batch, heads, length, _size = query.shape
    wide = value.shape[-1] > 128 and query.element_size() < FP32  # noqa: PLR2004
    return [RESULT, RESULT, hold(FP32 * batch * heads * length * value.shape[-1] if wide else 0)]


def _efficient_attention_backward(args: tuple[Any, ...], _: Any, capability: tuple[int, int]) -> list[Take]:
    """A row sum, and query gradients in fp32 in whole tiles. From the source.

    A window of 49 queries with heads of 32 takes a tile of 64 x 64: 16,400 bytes for 3,136 of gradients.
    """
    given, query, key, value, bias = args[:5]
    batch, heads, length, size = query.shape
    half = query.element_size() < FP32
    tiles = efficient_tiles(max(size, value.shape[-1]), capability, half=half)
    elements = -(-length // tiles.rows) * -(-size // tiles.columns) * (tiles.rows * tiles.columns + 4)
    if half and not tiles.in_registers:
        splits = max(1, min(-(-key.shape[2] // tiles.columns), 200 // (batch * heads)))
        wide = sum(-(-one // tiles.rows) * tiles.rows for one in (size, value.shape[-1]))
        elements += splits * tiles.columns * wide
    results = [RESULT] * (4 if bias is not None and args[10][3] else 3)
    product = [] if half else [brief(_bytes(given))]
    sums = hold(FP32 * batch * heads * length)
    own = hold(FP32 * batch * heads * (-(-elements // 4) * 4))
    return [hold(_copied(given.transpose(1, 2))), *results, *product, sums, own]


class Tiles(NamedTuple):
    """The blocks that the memory-efficient kernel works in, backward."""

    rows: int
    columns: int
    in_registers: bool
    """Whether gradients of keys and values need no memory of their own."""


def efficient_tiles(size: int, capability: tuple[int, int], *, half: bool) -> Tiles:
    """The kernel for a head size, of those that torch generates (mem_eff_attention/kernels)."""
    most = next(limit for limit in (32, 64, 128, 2**16) if size <= limit)
    little_memory = capability == (7, 5) or (8, 6) <= capability <= (8, 9) or capability[0] == 12  # noqa: PLR2004
    large = capability >= (8, 0) or (capability >= (7, 0) and half)
    rows = 128 if most > 64 and large and not little_memory else 64  # noqa: PLR2004
    in_registers = half and most <= rows
    columns = 128 if in_registers and capability >= (8, 0) and most > 64 else 64  # noqa: PLR2004
    return Tiles(rows, columns, in_registers)


def _embedding_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    """Partial sums over sorted indices, fp32."""
    count = args[1].numel()
    return [RESULT, brief((count + count // 10) * args[0].shape[-1] * 4)]


def _rnn_size(source: torch.Tensor, hidden: int, layers: int, *, first: bool, dropout: float) -> int:
    """Gates and states of a step for every step, weights, and 8 MiB a layer: LSTMs, one way."""
    batch, steps = (source.shape[0], source.shape[1]) if first else (source.shape[1], source.shape[0])
    size, width = source.element_size(), source.shape[2]
    weights = sum(4 * hidden * ((hidden if layer else width) + hidden) for layer in range(layers))
    per_step = 5 * hidden + width + (hidden if dropout else 0)
    fixed = 10 * layers * batch * hidden + weights
    return size * (batch * steps * per_step + fixed) + 8 * MIB * layers + 8 * batch + DESCRIPTOR


def _rnn(args: tuple[Any, ...], _: Any) -> list[Take]:
    source, size, layers, first, dropout = args[0], args[7], args[9], args[10], args[11]
    return [brief(_rnn_size(source, size, layers, first=first, dropout=dropout))]


def _rnn_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    """Once for the gradients of inputs, once for those of weights."""
    source, size, layers, first, dropout = args[0], args[11], args[13], args[14], args[15]
    taken = brief(_rnn_size(source, size, layers, first=first, dropout=dropout))
    return [RESULT, RESULT, RESULT, taken, taken]


def _softmax_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    return [RESULT, brief(_bytes(args[0]))]


def _safe_softmax(args: tuple[Any, ...], _: Any) -> list[Take]:
    """Which rows are masked out whole: a byte a number."""
    return [RESULT, brief(args[0].numel())]


def _layer_norm(args: tuple[Any, ...], _: Any) -> list[Take]:
    return [hold(_copied(args[0]))]


def _layer_norm_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    return [hold(_copied(args[0])), hold(_copied(args[1]))]


def _column_sum(args: tuple[Any, ...], out: Any) -> list[Take]:
    source = args[0]
    columns = out.numel()
    if not source.is_contiguous() or columns < WARP or not _sums_rows(source, args[1], columns):
        return [RESULT]
    return [RESULT, caused(formulas.COLUMN_SUM, (source.numel() // columns, columns))]


def _sums_rows(source: torch.Tensor, dims: Any, columns: int) -> bool:
    """Whether the summed dimensions are the leading ones."""
    summed = sorted(dim % source.dim() for dim in dims or range(source.dim()))
    return columns > 1 and summed == list(range(len(summed))) and len(summed) < source.dim()


RULES: dict[str, Callable[[tuple[Any, ...], Any], list[Take]]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_cudnn_rnn": _rnn,
    "aten::_cudnn_rnn_backward": _rnn_backward,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::sum": _column_sum,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
}
"""What an operation asks for and in what order; results that no rule places come last."""

BY_GPU: dict[str, Callable[[tuple[Any, ...], Any, tuple[int, int]], list[Take]]] = {
    "aten::_scaled_dot_product_efficient_attention": _efficient_attention,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
}
"""The same, for operations whose memory depends on the GPU's compute capability."""
