"""Rules for the temporary memory of operations: workspaces of cuBLAS, cuDNN and torch's kernels.

Each rule comes from allocator traces of an H200 (torch 2.11, cuDNN 9.19), which bench/op_memory.py records.
Its sizes agree with the traces to a few hundred bytes unless it says otherwise. Not covered: reductions other
than over rows.
"""

from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trimtab.spec import SizeCause
from trimtab.trace import convolution, convolution_search, recurrent, workspace_formulas
from trimtab.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

CUBLAS_HOPPER = 32 * MIB
CUBLAS_OLDER = 4096 * 1024 * 2 + 16 * 1024 * 8
"""Bytes for each thread that runs matrix products, never freed."""
CUBLAS_LT = MIB
"""Bytes for each thread that runs products of 8-bit floats, never freed (H200, torch 2.11)."""
WARP = 32
FP32_BYTES = 4
CUDNN_ROUNDING = 256
"""cuDNN rounds its workspaces up to a multiple of this."""


class MemoryRequest(NamedTuple):
    """One allocation of an operation. A list of them is in the order of the allocations."""

    kind: str
    """hold: freed at the end of the operation; brief: freed at once; result: the next of its results; last
    result: the last of its remaining results; search: cuDNN's trials, freed at once with the allocator's
    cache."""
    size: int = 0
    cause: SizeCause | None = None
    """Formula of a size that does not grow linearly with the micro-batch."""
    smaller: tuple[int, ...] = ()
    """Sizes of a search if memory is short, largest first."""


RESULT = MemoryRequest("result")
LAST_RESULT = MemoryRequest("last result")


def request_for_op(size: int) -> MemoryRequest:
    """Request memory until the end of the operation."""
    return MemoryRequest("hold", size)


def request_temporary(size: int) -> MemoryRequest:
    """Request memory for one kernel of the operation."""
    return MemoryRequest("brief", size)


def request_by_formula(
    rule: str, numbers: tuple[int, ...], word: str = "", *, beside: int = 0
) -> MemoryRequest:
    """Request memory for one kernel, by a formula of `workspace_formulas`. It is recorded even if it is 0."""
    cause = SizeCause(rule=rule, numbers=numbers, word=word, beside=beside)
    return MemoryRequest("brief", workspace_formulas.evaluate_cause(cause) or 0, cause)


def _request_convolution(
    shape: convolution.ConvolutionShape, phase: str, *, beside: int = 0
) -> MemoryRequest:
    return request_by_formula(
        workspace_formulas.CONVOLUTION + phase,
        workspace_formulas.flatten_shape(shape),
        shape.arithmetic,
        beside=beside,
    )


def _request_search(
    ends: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, phase: str, *, stride: Any, groups: int
) -> list[MemoryRequest]:
    """Request the workspace of cuDNN's search for the fastest kernel, if `cudnn.benchmark` is on.

    `ends` are input and output as cuDNN sees them: to it, a transposed convolution is the input gradient of
    the convolution that it transposes.
    """
    if not torch.backends.cudnn.benchmark:
        return []
    shape = convolution.read_shape(ends[0], weight, ends[1], stride, groups)
    size, *smaller = convolution_search.list_search_bytes(shape, phase) or [0]
    numbers = workspace_formulas.flatten_shape(shape)
    cause = SizeCause(rule=workspace_formulas.SEARCH + phase, numbers=numbers, word=shape.arithmetic)
    return [MemoryRequest("search", size, cause, tuple(smaller))] if size else []


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of the workspace of a cuBLAS handle."""
    return CUBLAS_HOPPER if capability >= (9, 0) else CUBLAS_OLDER


def dropout_state_bytes(multiprocessors: int) -> int:
    """Return the bytes of random states for cuDNN's recurrent dropout: 24 per thread, never freed."""
    return 24 * workspace_formulas.MULTIPROCESSOR_THREADS * multiprocessors


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a dense tensor's elements."""
    return tensor.numel() * tensor.element_size()


def _copy_bytes(tensor: torch.Tensor, layout: torch.memory_format = torch.contiguous_format) -> int:
    """Return the bytes of a kernel's copy of an input with another layout; 0 if the layout fits."""
    return 0 if tensor.is_contiguous(memory_format=layout) else tensor_bytes(tensor)


def _choose_memory_format(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    if not convolution.is_channels_last(source, weight):
        return torch.contiguous_format
    return torch.channels_last if source.dim() == 4 else torch.channels_last_3d  # noqa: PLR2004


def _convolution(args: tuple[Any, ...], out: Any) -> list[MemoryRequest]:
    source, weight = args[0], args[1]
    shape = convolution.read_shape(source, weight, out, args[3], args[8])
    copy = _copy_bytes(source, _choose_memory_format(source, weight))
    ends, phase = ((out, source), "source") if args[6] else ((source, out), "forward")
    search = _request_search(ends, weight, phase, stride=args[3], groups=args[8])
    return [request_for_op(copy), RESULT, *search, _request_convolution(shape, "forward")]


def _convolution_backward(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    gradient, source, weight, stride, groups, needed = args[0], args[1], args[2], args[4], args[9], args[10]
    layout = _choose_memory_format(source, weight)
    shape = convolution.read_shape(source, weight, gradient, stride, groups)
    source_copy = _copy_bytes(source, layout) if needed[1] else 0
    gradient_copy = _copy_bytes(gradient, layout)
    # A gradient in the other memory format is copied once; a slice is copied for each of the two, unless the
    # convolution is a transposed one.
    transposed = args[7]
    other_format = _is_channels_last(gradient) != (layout is not torch.contiguous_format)
    once = gradient_copy if gradient_copy and (transposed or other_format) else 0
    each = gradient_copy - once
    requests = [request_for_op(source_copy), request_for_op(once)]
    ends, phase = ((gradient, source), "forward") if transposed else ((source, gradient), "source")
    search = functools.partial(_request_search, ends, weight, stride=stride, groups=groups)
    if needed[0]:
        requests += [RESULT, *search(phase), _request_convolution(shape, "source", beside=each)]
    if needed[1]:
        requests += [RESULT, *search("weight"), _request_convolution(shape, "weight", beside=each)]
    if needed[2]:
        # torch itself sums the gradient of the bias, over all dimensions except the channels.
        requests += [
            RESULT,
            *_request_partial_sums(gradient, [dim for dim in range(gradient.dim()) if dim != 1]),
        ]
    return requests


def _is_channels_last(tensor: torch.Tensor) -> bool:
    strides = tensor.stride()
    return tensor.dim() > 2 and strides[1] == 1 and tensor.shape[1] > 1 and strides[-1] != 1  # noqa: PLR2004


def _cudnn_attention_backward(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Request query gradients in fp32 and a row sum; if heads are shared, keys and values per query head."""
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    shared = 4 * batch * heads * key.shape[2] * size if key.shape[1] != heads else 0
    own = 4 * batch * heads * length * size + 4 * batch * heads * length + CUDNN_ROUNDING
    return [RESULT, RESULT, RESULT, request_temporary(own), request_temporary(shared)]


def _flash_attention_backward(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Request query gradients in fp32 (lengths padded to 128, heads to 32) and a row sum. From the source."""
    batch, heads, length, size = args[1].shape
    padded = -(-length // 128) * 128
    wide = -(-size // 32) * 32
    own = 4 * batch * heads * padded * wide + 4 * batch * heads * padded
    return [RESULT, RESULT, RESULT, request_temporary(own)]


def _efficient_attention(args: tuple[Any, ...], _: Any, __: tuple[int, int]) -> list[MemoryRequest]:
    """Request results in fp32 if a head of values is too large for registers. From the source."""
    query, value = args[0], args[2]
    batch, heads, length, _size = query.shape
    wide = value.shape[-1] > 128 and query.element_size() < FP32_BYTES  # noqa: PLR2004
    return [
        RESULT,
        RESULT,
        request_for_op(FP32_BYTES * batch * heads * length * value.shape[-1] if wide else 0),
    ]


def _efficient_attention_backward(
    args: tuple[Any, ...], _: Any, capability: tuple[int, int]
) -> list[MemoryRequest]:
    """Request a row sum, and query gradients in fp32 in full tiles. From the source.

    A window of 49 queries with heads of 32 takes a tile of 64 x 64: 16,400 bytes for 3,136 of gradients.
    """
    gradient, query, key, value, bias = args[:5]
    batch, heads, length, size = query.shape
    half = query.element_size() < FP32_BYTES
    tiles = choose_efficient_tiles(max(size, value.shape[-1]), capability, half=half)
    elements = -(-length // tiles.rows) * -(-size // tiles.columns) * (tiles.rows * tiles.columns + 4)
    if half and not tiles.in_registers:
        splits = max(1, min(-(-key.shape[2] // tiles.columns), 200 // (batch * heads)))
        padded = sum(-(-width // tiles.rows) * tiles.rows for width in (size, value.shape[-1]))
        elements += splits * tiles.columns * padded
    results = [RESULT] * (4 if bias is not None and args[10][3] else 3)
    product = [] if half else [request_temporary(tensor_bytes(gradient))]
    sums = request_for_op(FP32_BYTES * batch * heads * length)
    own = request_for_op(FP32_BYTES * batch * heads * (-(-elements // 4) * 4))
    return [request_for_op(_copy_bytes(gradient.transpose(1, 2))), *results, *product, sums, own]


class AttentionTiles(NamedTuple):
    """Tile sizes of the backward memory-efficient kernel."""

    rows: int
    columns: int
    in_registers: bool
    """Whether gradients of keys and values need no extra memory."""


def choose_efficient_tiles(size: int, capability: tuple[int, int], *, half: bool) -> AttentionTiles:
    """Return the tiles of the kernel for a head size, among those of torch (mem_eff_attention/kernels)."""
    max_size = next(limit for limit in (32, 64, 128, 2**16) if size <= limit)
    little_memory = capability == (7, 5) or (8, 6) <= capability <= (8, 9) or capability[0] == 12  # noqa: PLR2004
    large = capability >= (8, 0) or (capability >= (7, 0) and half)
    rows = 128 if max_size > 64 and large and not little_memory else 64  # noqa: PLR2004
    in_registers = half and max_size <= rows
    columns = 128 if in_registers and capability >= (8, 0) and max_size > 64 else 64  # noqa: PLR2004
    return AttentionTiles(rows, columns, in_registers)


def _embedding_backward(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Request partial sums over sorted indices, in fp32."""
    numbers = (args[1].numel(), args[0].shape[-1])
    return [RESULT, request_by_formula(workspace_formulas.SORTED_SUM, numbers)]


def _rnn(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Request output and last states, then a workspace; the saved values for the backward pass come last."""
    source, mode, size, layers, first, dropout, both, packed = (
        args[place] for place in (0, 6, 7, 9, 10, 11, 13, 14)
    )
    taken = recurrent.workspace_bytes(
        source, mode, size, layers, first=first, dropout=dropout, both=both, packed=packed
    )
    return [RESULT, RESULT, RESULT, request_for_op(taken)]


def _rnn_backward(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Request a workspace for the gradients of inputs, then another for those of weights."""
    source, mode, size, layers, first, dropout, both, packed = (
        args[place] for place in (0, 10, 11, 13, 14, 15, 17, 18)
    )
    taken = recurrent.workspace_bytes(
        source, mode, size, layers, first=first, dropout=dropout, both=both, packed=packed
    )
    return [RESULT, RESULT, RESULT, request_temporary(taken), RESULT, request_temporary(taken)]


def _softmax(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Request a copy of an input that is not contiguous, such as one with channels last."""
    return [RESULT, request_for_op(_copy_bytes(args[0]))]


def _softmax_backward(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Request the product of gradient and result, and copies of both where they are not contiguous."""
    gradient, result = args[0], args[1]
    return [
        RESULT,
        request_for_op(tensor_bytes(gradient)),
        request_for_op(_copy_bytes(gradient)),
        request_for_op(_copy_bytes(result)),
    ]


def _log_softmax_backward(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    return [RESULT, request_for_op(_copy_bytes(args[0])), request_for_op(_copy_bytes(args[1]))]


def _safe_softmax(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Request the mask of fully masked rows: one byte per number."""
    return [RESULT, request_temporary(args[0].numel())]


def _ctc_loss_backward(args: tuple[Any, ...], out: Any) -> list[MemoryRequest]:
    """Request the backward sums (log_beta), and a second gradient if infinite losses are set to zero."""
    sums, without_infinite = tensor_bytes(args[6]), args[8] if len(args) > 8 else False  # noqa: PLR2004
    return [
        request_for_op(sums),
        request_for_op(tensor_bytes(out) if without_infinite else 0),
        request_temporary(sums // 2),
        RESULT,
    ]


def _layer_norm(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    return [request_for_op(_copy_bytes(args[0]))]


def _layer_norm_backward(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    return [request_for_op(_copy_bytes(args[0])), request_for_op(_copy_bytes(args[1]))]


def _column_sum(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    return [RESULT, *_request_partial_sums(args[0], args[1] if len(args) > 1 else None)]


def _column_norm(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    return [RESULT, *_request_partial_sums(args[0], args[2] if len(args) > 2 else None)]  # noqa: PLR2004


def _request_partial_sums(source: torch.Tensor, dims: Any) -> list[MemoryRequest]:
    """Request the buffer of a reduction if the remaining dimensions have the smallest strides."""
    dim_list = [dims] if isinstance(dims, int) else dims
    reduced = {dim % source.dim() for dim in dim_list or range(source.dim())} if source.dim() else set()
    strides = {dim: source.stride(dim) for dim in range(source.dim()) if source.shape[dim] > 1}
    remaining_strides = [strides[dim] for dim in strides if dim not in reduced]
    reduced_strides = [strides[dim] for dim in strides if dim in reduced]
    if not remaining_strides or not reduced_strides:
        return []
    if max(remaining_strides) >= min(reduced_strides) or min(remaining_strides) != 1:
        return []
    rows = prod(source.shape[dim] for dim in reduced)
    return [request_by_formula(workspace_formulas.COLUMN_SUM, (rows, source.numel() // rows))]


def _dropout(_: tuple[Any, ...], __: Any) -> list[MemoryRequest]:
    """Request the mask first, then the output."""
    return [LAST_RESULT, RESULT]


def _upsample_backward(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Request a copy of a gradient that is dense in neither memory format, unless the sizes are equal."""
    gradient, out_size, in_shape = args[:3]
    last = gradient.dim() == 4 and gradient.is_contiguous(memory_format=torch.channels_last)  # noqa: PLR2004
    equal = list(out_size) == list(in_shape[2:])
    return [RESULT, request_for_op(0 if last or equal else _copy_bytes(gradient))]


TOPK_COUNTS, TOPK_THREADS, TOPK_BLOCKS = 256, 256, 6
"""torch's multi-block top-k: counts per pass, threads per block, and blocks per multiprocessor."""
MULTI_BLOCK_LENGTHS = (
    (20, 20_000),
    (40, 10_000),
    (80, 8000),
    (199, 5000),
    (799, 3000),
    (4000, 800),
    (2**31, 400),
)
"""Rows (at most) and the row length from which top-k uses several blocks (TensorTopK.cu)."""


def _topk(args: tuple[Any, ...], out: Any) -> list[MemoryRequest]:
    """Request counts of each radix for each block (2 bytes) and their sums (4 bytes), if rows are long."""
    source, count = args[0], out[0].numel()
    if not count or not source.dim():
        return []
    dim = args[2] if len(args) > 2 else -1  # noqa: PLR2004
    length = source.shape[dim]
    rows = source.numel() // length
    if length < next(min_length for max_rows, min_length in MULTI_BLOCK_LENGTHS if rows <= max_rows):
        return []
    each = -(-source.numel() // (convolution.reference_multiprocessors() * TOPK_BLOCKS * TOPK_THREADS))
    blocks = -(-length // (min(max(each, 4), 64) * TOPK_THREADS))
    return [
        RESULT,
        RESULT,
        request_for_op(2 * TOPK_COUNTS * rows * blocks),
        request_for_op(4 * TOPK_COUNTS * rows),
    ]


SMALL_SORT, SEGMENTED_SORT_ROWS = 4096, 128
"""Rows up to the first length are sorted in place; fewer rows than the second are sorted in one call."""


def _sort(args: tuple[Any, ...], out: Any) -> list[MemoryRequest]:
    """Request positions before the sort, and a second copy of values and positions to sort into."""
    numbers, size = args[0].numel(), args[0].element_size()
    length = max(out[0].shape[-1:], default=1)
    if length <= SMALL_SORT:
        return []
    sorts_at_once = length != numbers and numbers // length < SEGMENTED_SORT_ROWS
    segments = [request_for_op(8 * numbers)] if sorts_at_once else []
    extra = size * numbers if sorts_at_once else 0
    return [
        RESULT,
        RESULT,
        request_for_op(8 * numbers),
        *segments,
        request_temporary(extra + (8 + size) * numbers),
    ]


def _quantize_rows(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Scales, numbers, then a mask of the values from the limit on, by their absolute values."""
    values, limit = args[0], args[1]
    if not limit:
        return []
    return [RESULT, RESULT, request_for_op(values.numel()), request_temporary(tensor_bytes(values)), RESULT]


def _flex_backward(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Request a row sum, before the gradients."""
    return [request_for_op(tensor_bytes(args[5])), RESULT, RESULT, RESULT]


RULES: dict[str, Callable[[tuple[Any, ...], Any], list[MemoryRequest]]] = {
    "trimtab::flex_attention_backward": _flex_backward,
    "trimtab::quantize_rows": _quantize_rows,
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
    "aten::linalg_vector_norm": _column_norm,
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
"""Rule of each operation: its requests in order. Results that a rule does not list come last."""

GPU_RULES: dict[str, Callable[[tuple[Any, ...], Any, tuple[int, int]], list[MemoryRequest]]] = {
    "aten::_scaled_dot_product_efficient_attention": _efficient_attention,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
}
"""Rules of operations whose memory depends on the GPU's compute capability."""
