"""Memory that kernels take for themselves, which no shape shows: workspaces of cuBLAS, cuDNN and torch.

Each rule was read off allocator traces of an H200 (torch 2.11, cuDNN 9.19) and names what the memory is for;
sizes it gives agree with the traces to a few hundred bytes unless it says otherwise (bench/op_memory.py
records such traces). Not covered: reductions other than over rows.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trimtab.spec import Cause
from trimtab.trace import convolution, recurrent, workspace_formulas
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
FEW_INDICES = 3072
"""Up to so many, the gradient of an embedding needs no sorting (Embedding.cu)."""


class Take(NamedTuple):
    """One thing that an operation asks the allocator for, in order."""

    kind: str
    """hold: to the end of the operation; brief: given back at once; result: the next of its results; last
    result: the last of those that are left."""
    size: int = 0
    cause: Cause | None = None
    """What a size follows from that is no straight line in the micro-batch."""


RESULT = Take("result")
LAST_RESULT = Take("last result")


def hold(size: int) -> Take:
    """Memory for the whole operation."""
    return Take("hold", size)


def brief(size: int) -> Take:
    """Memory for one kernel of it."""
    return Take("brief", size)


def caused(rule: str, numbers: tuple[int, ...], word: str = "", *, beside: int = 0) -> Take:
    """Memory for one kernel of it, by a formula; written down even where it is nothing."""
    cause = Cause(rule=rule, numbers=numbers, word=word, beside=beside)
    return Take("brief", workspace_formulas.size(cause) or 0, cause)


def _cudnn(shape: convolution.Shape, phase: str, *, beside: int = 0) -> Take:
    return caused(
        workspace_formulas.CONVOLUTION + phase,
        workspace_formulas.flat(shape),
        shape.arithmetic,
        beside=beside,
    )


def cublas(capability: tuple[int, int]) -> int:
    """The workspace of a cuBLAS handle."""
    return CUBLAS_HOPPER if capability >= (9, 0) else CUBLAS_OLDER


def dropout_state(multiprocessors: int) -> int:
    """Random states for dropout in cuDNN's recurrent layers: 24 bytes a thread, kept for ever."""
    return 24 * workspace_formulas.MULTIPROCESSOR_THREADS * multiprocessors


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copied(tensor: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> int:
    """The copy that a kernel makes of an input that does not lie as it wants; 0 where it does."""
    return 0 if tensor.is_contiguous(memory_format=layout) else _bytes(tensor)


def _layout(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    if not convolution.channels_last(source, weight):
        return torch.contiguous_format
    return torch.channels_last if source.dim() == 4 else torch.channels_last_3d  # noqa: PLR2004


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
    # A gradient in the other memory format is copied once; a slice is copied for each of the two, unless the
    # convolution is a transposed one.
    transposed = args[7]
    other_format = _looks_last(gradient) != (layout is not torch.contiguous_format)
    once = given if given and (transposed or other_format) else 0
    each = given - once
    takes = [hold(moved), hold(once)]
    if wanted[0]:
        takes += [RESULT, _cudnn(shape, "source", beside=each)]
    if wanted[1]:
        takes += [RESULT, _cudnn(shape, "weight", beside=each)]
    if wanted[2]:
        # torch sums up the gradient of the bias itself, over all dimensions but the channels.
        takes += [RESULT, *_partial_sums(gradient, [dim for dim in range(gradient.dim()) if dim != 1])]
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
    if count <= FEW_INDICES:
        return []
    return [RESULT, brief((count + count // 10) * args[0].shape[-1] * 4)]


def _rnn(args: tuple[Any, ...], _: Any) -> list[Take]:
    """Output and last states, then a workspace while what the backward pass needs is allocated."""
    source, mode, size, layers, first, dropout, both, packed = (
        args[place] for place in (0, 6, 7, 9, 10, 11, 13, 14)
    )
    taken = recurrent.workspace(
        source, mode, size, layers, first=first, dropout=dropout, both=both, packed=packed
    )
    return [RESULT, RESULT, RESULT, hold(taken)]


def _rnn_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    """A workspace once for the gradients of inputs, once for those of weights."""
    source, mode, size, layers, first, dropout, both, packed = (
        args[place] for place in (0, 10, 11, 13, 14, 15, 17, 18)
    )
    taken = recurrent.workspace(
        source, mode, size, layers, first=first, dropout=dropout, both=both, packed=packed
    )
    return [RESULT, RESULT, RESULT, brief(taken), RESULT, brief(taken)]


def _softmax(args: tuple[Any, ...], _: Any) -> list[Take]:
    """The kernels read a dense input: one with channels last is copied."""
    return [RESULT, hold(_copied(args[0]))]


def _softmax_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    """The product of gradient and result, and a dense copy of it and of the result where they are not."""
    gradient, result = args[0], args[1]
    return [RESULT, hold(_bytes(gradient)), hold(_copied(gradient)), hold(_copied(result))]


def _log_softmax_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    return [RESULT, hold(_copied(args[0])), hold(_copied(args[1]))]


def _safe_softmax(args: tuple[Any, ...], _: Any) -> list[Take]:
    """Which rows are masked out whole: a byte a number."""
    return [RESULT, brief(args[0].numel())]


def _ctc_loss_backward(args: tuple[Any, ...], out: Any) -> list[Take]:
    """The sums read backwards, and the gradient once more where infinite losses are set to zero."""
    sums, without_infinite = _bytes(args[6]), args[8] if len(args) > 8 else False  # noqa: PLR2004
    return [hold(sums), hold(_bytes(out) if without_infinite else 0), brief(sums // 2), RESULT]


def _layer_norm(args: tuple[Any, ...], _: Any) -> list[Take]:
    return [hold(_copied(args[0]))]


def _layer_norm_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    return [hold(_copied(args[0])), hold(_copied(args[1]))]


def _column_sum(args: tuple[Any, ...], _: Any) -> list[Take]:
    return [RESULT, *_partial_sums(args[0], args[1] if len(args) > 1 else None)]


def _partial_sums(source: torch.Tensor, dims: Any) -> list[Take]:
    """The buffer of a reduction whose kept dimensions lie closest together in memory; else there is none."""
    given = [dims] if isinstance(dims, int) else dims
    reduced = {dim % source.dim() for dim in given or range(source.dim())} if source.dim() else set()
    steps = {dim: source.stride(dim) for dim in range(source.dim()) if source.shape[dim] > 1}
    kept = [steps[dim] for dim in steps if dim not in reduced]
    over = [steps[dim] for dim in steps if dim in reduced]
    if not kept or not over or max(kept) >= min(over) or min(kept) != 1:
        return []
    rows = prod(source.shape[dim] for dim in reduced)
    return [caused(workspace_formulas.COLUMN_SUM, (rows, source.numel() // rows))]


def _dropout(_: tuple[Any, ...], __: Any) -> list[Take]:
    """The mask comes first."""
    return [LAST_RESULT, RESULT]


def _upsample_backward(args: tuple[Any, ...], _: Any) -> list[Take]:
    """The kernels read a dense gradient, in either memory format; at equal sizes they only copy it."""
    gradient, made, given = args[:3]
    last = gradient.dim() == 4 and gradient.is_contiguous(memory_format=torch.channels_last)  # noqa: PLR2004
    equal = list(made) == list(given[2:])
    return [RESULT, hold(0 if last or equal else _copied(gradient))]


TOPK_COUNTS, TOPK_THREADS, TOPK_BLOCKS = 256, 256, 6
"""Of torch's top-k in several blocks: counts a pass, threads a block, and blocks a multiprocessor."""
MANY_BLOCKS = ((20, 20_000), (40, 10_000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (2**31, 400))
"""Up to so many rows, top-k takes several blocks from that length on (TensorTopK.cu)."""


def _topk(args: tuple[Any, ...], out: Any) -> list[Take]:
    """Counts of each radix for each block (2 bytes) and their sums (4 bytes), where rows are long."""
    source, count = args[0], out[0].numel()
    if not count or not source.dim():
        return []
    dim = args[2] if len(args) > 2 else -1  # noqa: PLR2004
    length = source.shape[dim]
    rows = source.numel() // length
    if length < next(least for most, least in MANY_BLOCKS if rows <= most):
        return []
    each = -(-source.numel() // (convolution.multiprocessors() * TOPK_BLOCKS * TOPK_THREADS))
    blocks = -(-length // (min(max(each, 4), 64) * TOPK_THREADS))
    return [RESULT, RESULT, hold(2 * TOPK_COUNTS * rows * blocks), hold(4 * TOPK_COUNTS * rows)]


SMALL_SORT, MANY_ROWS = 4096, 128
"""Rows up to this length are sorted in place; fewer rows than that are sorted all at once."""


def _sort(args: tuple[Any, ...], out: Any) -> list[Take]:
    """Positions before the sort, and a second copy of values and positions to sort into."""
    numbers, size = args[0].numel(), args[0].element_size()
    length = max(out[0].shape[-1:], default=1)
    if length <= SMALL_SORT:
        return []
    whole = [] if length == numbers or numbers // length >= MANY_ROWS else [hold(8 * numbers)]
    beside = size * numbers if whole else 0
    return [RESULT, RESULT, hold(8 * numbers), *whole, brief(beside + (8 + size) * numbers)]


RULES: dict[str, Callable[[tuple[Any, ...], Any], list[Take]]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_cudnn_rnn": _rnn,
    "aten::_cudnn_rnn_backward": _rnn_backward,
    "aten::_softmax": _softmax,
    "aten::_log_softmax": _softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_log_softmax_backward_data": _log_softmax_backward,
    "aten::_safe_softmax": _safe_softmax,
    "aten::_ctc_loss_backward": _ctc_loss_backward,
    "aten::sum": _column_sum,
    "aten::mean": _column_sum,
    "aten::native_dropout": _dropout,
    "aten::topk": _topk,
    "aten::sort": _sort,
    "aten::upsample_bilinear2d_backward": _upsample_backward,
    "aten::upsample_nearest2d_backward": _upsample_backward,
    "aten::upsample_bicubic2d_backward": _upsample_backward,
    "aten::upsample_linear1d_backward": _upsample_backward,
    "aten::upsample_trilinear3d_backward": _upsample_backward,
    "aten::upsample_nearest3d_backward": _upsample_backward,
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
}
"""What an operation asks for and in what order; results that no rule places come last."""

BY_GPU: dict[str, Callable[[tuple[Any, ...], Any, tuple[int, int]], list[Take]]] = {
    "aten::_scaled_dot_product_efficient_attention": _efficient_attention,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
}
"""The same, for operations whose memory depends on the GPU's compute capability."""
