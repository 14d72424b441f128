"""Compute the cost of attention over documents of different lengths that lie in one row.

Kernels for packed rows get the ends of the documents (`cu_seqlens`). A token attends to tokens of its own
document only, so the cost is the sum of the squares of the lengths, not the square of the sum. The lengths
are read from the tensor of ends where its values are known without a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from trimtab.engine.precision import dtype_name
from trimtab.spec import Work
from trimtab.trace.data_dependent import read_known_values
from trimtab.trace.workspaces import (
    FP32_BYTES,
    RESULT,
    MemoryRequest,
    request_for_op,
    request_temporary,
    tensor_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

PACKED_OPS = frozenset({
    "torch_attn::_varlen_attn",
    "torch_attn::_varlen_attn_backward",
    "aten::_flash_attention_forward",
    "aten::_flash_attention_backward",
    "aten::_efficient_attention_forward",
    "aten::_efficient_attention_backward",
    "aten::_cudnn_attention_forward",
    "aten::_cudnn_attention_backward",
})  # fmt: skip
"""Operations that take the ends of documents. Without ends they are attention over whole rows."""
BACKWARD_OPS = frozenset({"torch_attn::_varlen_attn_backward", "aten::_flash_attention_backward"})
"""Those that run the flash kernel backward."""
QUERY_ENDS = ("cu_seq_q", "cum_seq_q", "cu_seqlens_q")
KEY_ENDS = ("cu_seq_k", "cum_seq_k", "cu_seqlens_k")
EQUAL_NOTE = (
    "packed documents whose lengths follow from data are taken to be equally long: {count} of {length} tokens"
)
PADDING = 128
"""The flash kernel's backward pass leaves room for so many tokens after each document."""
HEAD_STEP = 32
"""It rounds head sizes up to a multiple of this."""


class PackedCall(NamedTuple):
    """Arguments of an attention operation, as far as its cost depends on them."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    lengths: tuple[tuple[int, int], ...]
    """Queries and keys of each document."""
    causal: bool
    window: int
    """Keys before and after a query that it attends to; 0: all."""
    assumed: str
    """Note for the user if lengths are unknown; else empty."""


def read_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PackedCall:
    """Return the call of one of PACKED_OPS."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    queries, keys = (
        next((given[name] for name in ends if given.get(name) is not None), None)
        for ends in (QUERY_ENDS, KEY_ENDS)
    )
    # custom_mask_type: 1 and 2 are causal.
    causal = bool(given.get("is_causal") or given.get("custom_mask_type"))
    sides = given.get("window_size") or (given.get("window_size_left"), given.get("window_size_right"))
    left, right = sides if isinstance(sides, list | tuple) else (sides, sides)
    causal = causal or right == 0
    unlimited = left is None or left < 0
    window = 0 if unlimited else left + 1 + (0 if causal or right is None or right < 0 else right)
    if queries is None or queries.numel() < 2:  # noqa: PLR2004 - whole rows have no ends
        rows = query.shape[0] if query.dim() > 3 else 1  # noqa: PLR2004 - a batch of rows
        each = ((query.shape[-3], key.shape[-3]),)
        return PackedCall(query, key, value, each * rows, causal, window, "")
    lengths, assumed = _read_lengths(queries, keys, query.shape[-3], key.shape[-3])
    return PackedCall(query, key, value, lengths, causal, window, assumed)


def _read_lengths(
    queries: torch.Tensor, keys: torch.Tensor | None, total: int, total_keys: int
) -> tuple[tuple[tuple[int, int], ...], str]:
    """Return the queries and keys of each document, and a note if they are unknown."""
    known = read_known_values(queries)
    known_keys = known if keys is None or keys is queries else read_known_values(keys)
    if known is not None and known_keys is not None and len(known) == len(known_keys):
        lengths = tuple(
            (max(0, int(end - begin)), max(0, int(key_end - key_begin)))
            for begin, end, key_begin, key_end in zip(
                known, known[1:], known_keys, known_keys[1:], strict=False
            )
        )
        return lengths, ""
    count = queries.numel() - 1
    each = -(-total // count), -(-total_keys // count)
    return (each,) * count, EQUAL_NOTE.format(count=count, length=each[0])


def note_lengths(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what is assumed about the lengths of a call of one of PACKED_OPS; empty if they are known."""
    return read_call(func, args, kwargs).assumed


def count_pairs(lengths: Sequence[tuple[int, int]], *, causal: bool, window: int = 0) -> int:
    """Return the pairs of a query and a key that attention computes.

    >>> count_pairs([(4, 4), (2, 2)], causal=False), count_pairs([(4, 4), (2, 2)], causal=True)
    (20, 10)
    >>> count_pairs([(100, 100)], causal=True, window=10)
    950
    """
    pairs = 0
    for queries, keys in lengths:
        if window and window < keys:
            # The first queries of a causal document see fewer keys than a window has.
            pairs += queries * window - (window * window // 2 if causal else 0)
        else:
            pairs += queries * keys // 2 if causal else queries * keys
    return pairs


def describe_packed(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
    """Return the work of one of PACKED_OPS.

    `dims` has the length of the document that an average token is in, and as many documents of that length
    as make the row.
    """
    call = read_call(func, args, kwargs)
    backward = "backward" in name
    heads, size = call.query.shape[-2:]
    pairs = count_pairs(call.lengths, causal=call.causal, window=call.window)
    flops = 2 * heads * pairs * (size + call.value.shape[-1])
    total = max(1, sum(queries for queries, _ in call.lengths))
    usual = max(1, sum(queries * queries for queries, _ in call.lengths) // total)
    keys = max(1, sum(queries * keys for queries, keys in call.lengths) // total)
    moved = sum(tensor_bytes(tensor) for tensor in (call.query, call.key, call.value))
    return Work(
        op=name,
        kind="attention",
        dtype=dtype_name(call.query.dtype),
        flops=flops * 5 // 2 if backward else flops,
        read_bytes=moved * (2 if backward else 1),
        write_bytes=moved if backward else tensor_bytes(call.query),
        dims=(max(1, round(total / usual)), heads, usual, keys, size, int(call.causal)),
        kernels=3 if backward else 1,
    )


def request_packed_backward(args: tuple[Any, ...], _: Any) -> list[MemoryRequest]:
    """Request query gradients in fp32 and a row sum, with room after each document. From torch's source.

    If heads are shared, gradients of keys and values exist per query head first.
    """
    query, key, value, ends = args[1], args[2], args[3], args[6]
    heads, size = query.shape[-2:]
    documents = ends.numel() - 1 if ends is not None and ends.numel() > 1 else query.shape[0]
    tokens = query.numel() // (heads * size) + PADDING * documents
    wide = -(-size // HEAD_STEP) * HEAD_STEP
    repeat = heads // max(1, key.shape[-2])
    shared = (tensor_bytes(key) + tensor_bytes(value)) * repeat if repeat > 1 else 0
    own = FP32_BYTES * heads * tokens
    return [
        RESULT,
        RESULT,
        RESULT,
        request_for_op(own),
        request_for_op(own * wide),
        request_temporary(shared),
    ]
