"""List the operations of one rank of a decoder under any mesh, by formulas.

A trace runs the real program and knows every operation. It takes seconds for each mesh, and a search over
thousands of GPUs has thousands of meshes. Decoders are alike: attention and a feed-forward part in each
block, split over tensor-parallel ranks as Megatron-LM splits them. So the operations of a block follow from
its sizes, and `Pace` times them as it times traced ones.

Worked example: a block of width 8192 with 64 heads and 8 key/value heads, tp 8, a micro-batch of one
sequence of 4096 tokens. Queries, keys and values are one product of 4096 x 1280 x 8192, the output
projection one of 4096 x 8192 x 1024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trimtab.predict.op_time import FLASH
from trimtab.spec import DecoderShape, Work
from trimtab.spec.precision import DTYPE_BYTES

ALIGNED = 16
"""Bytes to which matrices are aligned."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What one rank has of each block, and how many tokens it sees."""

    micro_batch: int
    sequence: int
    tp: int = 1
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks also split the tokens outside of matrix products."""
    cp: int = 1
    ep: int = 1
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that the matrix products of a rank see."""
        return self.micro_batch * self.sequence // self.cp

    @property
    def own_tokens(self) -> int:
        """Tokens of which a rank has the hidden states between the blocks."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens


class BlockPass(NamedTuple):
    """Operations of a forward and a backward pass."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]


class _Operations:
    """Make operations for one dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.bytes = DTYPE_BYTES[dtype]

    def product(self, rows: int, columns: int, inner: int, *, biased: bool = False) -> Work:
        """Return a product of (rows, inner) with (inner, columns)."""
        return Work(
            op="aten::addmm" if biased else "aten::mm",
            kind="matrix",
            dtype=self.dtype,
            flops=2 * rows * columns * inner,
            read_bytes=(rows * inner + inner * columns) * self.bytes,
            write_bytes=rows * columns * self.bytes,
            dims=(1, rows, columns, inner, ALIGNED),
        )

    def products(self, count: int, rows: int, columns: int, inner: int, op: str = "aten::bmm") -> Work:
        """Return `count` products in one kernel."""
        return Work(
            op=op,
            kind="matrix",
            dtype=self.dtype,
            flops=2 * count * rows * columns * inner,
            read_bytes=count * (rows * inner + inner * columns) * self.bytes,
            write_bytes=count * rows * columns * self.bytes,
            dims=(count, rows, columns, inner, ALIGNED),
        )

    def pointwise(self, op: str, reads: int, writes: int, last: int, *, kind: str = "pointwise") -> Work:
        """Return an operation that reads and writes so many numbers."""
        return Work(
            op=op,
            kind=kind,
            dtype=self.dtype,
            read_bytes=reads * self.bytes,
            write_bytes=writes * self.bytes,
            dims=(0, last),
        )


def list_linear(rows: int, columns: int, inner: int, make: _Operations, *, biased: bool = False) -> BlockPass:
    """Return a linear layer: backward, a product for the input's gradient and one for the weight's."""
    backward = [make.product(rows, inner, columns), make.product(columns, inner, rows)]
    if biased:
        backward.append(make.pointwise("aten::sum", rows * columns, columns, columns, kind="reduction"))
    return BlockPass((make.product(rows, columns, inner, biased=biased),), tuple(backward))


def list_attention(shape: DecoderShape, share: RankShare) -> BlockPass:
    """Return attention over the heads of a rank; with context parallelism, one kernel for each part of keys.

    With the causal mask halves of the scores are computed, evenly over the context-parallel ranks.
    """
    make = _Operations(share.dtype)
    heads, size = shape.heads // share.tp, shape.head_size
    batch = share.micro_batch
    queries, keys = share.sequence // share.cp, share.sequence // share.cp
    if shape.flash:
        works: list[list[Work]] = [[], []]
        for number in range(share.cp):
            causal = number == 0
            # Of all other parts, half of the queries or half of the keys are before the mask.
            scores = queries * keys / 2
            for way, factor in ((0, 4), (1, 10)):
                works[way].append(
                    Work(
                        op=FLASH + "_backward" * way,
                        kind="attention",
                        dtype=make.dtype,
                        flops=int(factor * batch * heads * scores * size),
                        read_bytes=(3 + 3 * way) * batch * heads * queries * size * make.bytes,
                        write_bytes=(1 + 2 * way) * batch * heads * queries * size * make.bytes,
                        dims=(
                            batch,
                            heads,
                            queries,
                            keys if causal else max(1, keys // 2),
                            size,
                            int(causal),
                        ),
                    )
                )
        # Results of the parts are put together in float32.
        numbers = batch * heads * queries * size
        merge = [make.pointwise("aten::add", 4 * numbers, 2 * numbers, size)] * (share.cp - 1)
        return BlockPass((*works[0], *merge), (*works[1], *merge))
    count = batch * heads
    scores = count * queries * share.sequence
    soft = make.pointwise("aten::_softmax", scores, scores, share.sequence, kind="reduction")
    soft_back = make.pointwise(
        "aten::_softmax_backward_data", 2 * scores, scores, share.sequence, kind="reduction"
    )
    drop = [make.pointwise("aten::native_dropout", scores, scores * 3 // 2, share.sequence)] * shape.dropout
    drop_back = [
        make.pointwise("aten::native_dropout_backward", scores * 3 // 2, scores, share.sequence)
    ] * shape.dropout
    query = make.products(count, queries, share.sequence, size)
    value = make.products(count, queries, size, share.sequence)
    copy = make.pointwise("aten::clone", count * queries * size, count * queries * size, size)
    return BlockPass(
        (copy, query, soft, *drop, value, copy),
        (
            copy,
            make.products(count, share.sequence, size, queries),
            query,
            *drop_back,
            soft_back,
            value,
            make.products(count, share.sequence, size, queries),
            copy,
        ),
    )


def list_norm(shape: DecoderShape, share: RankShare, make: _Operations) -> BlockPass:
    """Return a normalisation of hidden states."""
    numbers = share.own_tokens * shape.width
    kind, last = "reduction", shape.width
    return BlockPass(
        (make.pointwise("aten::native_layer_norm", numbers, numbers, last, kind=kind),),
        (make.pointwise("aten::native_layer_norm_backward", 2 * numbers, numbers, last, kind=kind),),
    )


def list_residual(shape: DecoderShape, share: RankShare, make: _Operations) -> BlockPass:
    """Return the addition to the residual stream, with dropout where the model has it."""
    numbers = share.own_tokens * shape.width
    forward = [make.pointwise("aten::add", 2 * numbers, numbers, shape.width)]
    backward = [make.pointwise("aten::add", 2 * numbers, numbers, shape.width)]
    if shape.dropout:
        forward.append(make.pointwise("aten::native_dropout", numbers, numbers * 3 // 2, shape.width))
        backward.append(
            make.pointwise("aten::native_dropout_backward", numbers * 3 // 2, numbers, shape.width)
        )
    return BlockPass(tuple(forward), tuple(backward))


def list_feed_forward(shape: DecoderShape, share: RankShare, make: _Operations) -> BlockPass:
    """Return the feed-forward part of a rank: dense, or its experts with the tokens that they get."""
    width, inner = shape.width, shape.feed_forward
    wide = 2 if shape.gated else 1
    parts: list[BlockPass] = []
    if not shape.experts:
        parts += _list_dense(share.tokens, width, inner // share.tp, wide, make, biased=shape.biased)
    else:
        if shape.shared_experts:
            hidden = shape.shared_experts * inner // share.tp
            parts += _list_dense(share.tokens, width, hidden, wide, make, biased=False)
        parts.append(list_linear(share.own_tokens, shape.experts, width, make))
        experts = max(1, shape.experts // share.ep)
        rows = (
            share.tokens * shape.experts_per_token // share.tp
            if share.ep > 1
            else share.tokens * shape.experts_per_token
        )
        hidden = inner if share.ep > 1 else inner // share.tp
        each = max(1, rows // experts)
        moved = make.pointwise("aten::index", rows * width, rows * width, width, kind="gather")
        parts += [
            BlockPass((moved,), (moved,)),
            _list_grouped(experts, each, wide * hidden, width, make),
            BlockPass(
                (make.pointwise("aten::mul", wide * rows * hidden, rows * hidden, hidden),),
                (make.pointwise("aten::mul", 2 * wide * rows * hidden, wide * rows * hidden, hidden),),
            ),
            _list_grouped(experts, each, width, hidden, make),
            BlockPass((moved,), (moved,)),
        ]
    return _join(parts)


def _list_dense(  # noqa: PLR0913 - sizes
    rows: int, width: int, hidden: int, wide: int, make: _Operations, *, biased: bool
) -> list[BlockPass]:
    return [
        list_linear(rows, wide * hidden, width, make, biased=biased),
        BlockPass(
            (make.pointwise("aten::gelu", wide * rows * hidden, rows * hidden, hidden),),
            (
                make.pointwise(
                    "aten::gelu_backward", (wide + 1) * rows * hidden, wide * rows * hidden, hidden
                ),
            ),
        ),
        list_linear(rows, width, hidden, make, biased=biased),
    ]


def _list_grouped(count: int, rows: int, columns: int, inner: int, make: _Operations) -> BlockPass:
    op = "aten::_grouped_mm"
    return BlockPass(
        (make.products(count, rows, columns, inner, op),),
        (make.products(count, rows, inner, columns, op), make.products(count, columns, inner, rows, op)),
    )


def _join(parts: list[BlockPass]) -> BlockPass:
    """Return the passes one after the other; backward in the opposite order."""
    return BlockPass(
        tuple(work for part in parts for work in part.forward),
        tuple(work for part in reversed(parts) for work in part.backward),
    )


def list_block(shape: DecoderShape, share: RankShare) -> BlockPass:
    """Return the operations of one block on one rank."""
    make = _Operations(share.dtype)
    size = shape.head_size
    query_columns = (shape.heads // share.tp + 2 * max(1, shape.key_value_heads // share.tp)) * size
    return _join(
        [
            list_norm(shape, share, make),
            list_linear(share.tokens, query_columns, shape.width, make, biased=shape.biased),
            list_attention(shape, share),
            list_linear(share.tokens, shape.width, shape.heads // share.tp * size, make, biased=shape.biased),
            list_residual(shape, share, make),
            list_norm(shape, share, make),
            list_feed_forward(shape, share, make),
            list_residual(shape, share, make),
        ]
    )


def list_embedding(shape: DecoderShape, share: RankShare) -> BlockPass:
    """Return the embedding of tokens on the first stage."""
    make = _Operations(share.dtype)
    numbers = share.tokens * shape.width
    table = shape.table_weights // share.tp
    return BlockPass(
        (make.pointwise("aten::embedding", numbers, numbers, shape.width, kind="gather"),),
        (make.pointwise("aten::embedding_dense_backward", numbers, table, shape.width, kind="gather"),),
    )


def list_head(shape: DecoderShape, share: RankShare) -> BlockPass:
    """Return the last norm, the head and the loss on the last stage."""
    make, plain = _Operations(share.dtype), _Operations("float32")
    columns = -(-shape.vocabulary // share.tp)
    scores = share.tokens * columns
    loss = BlockPass(
        (
            make.pointwise("aten::_to_copy", 2 * scores, 2 * scores, columns),
            plain.pointwise("aten::_log_softmax", scores, scores, columns, kind="reduction"),
        ),
        (
            plain.pointwise(
                "aten::_log_softmax_backward_data", 2 * scores, scores, columns, kind="reduction"
            ),
            make.pointwise("aten::_to_copy", 2 * scores, 2 * scores, columns),
        ),
    )
    return _join(
        [
            list_norm(shape, share, make),
            list_linear(share.tokens, columns, shape.width, make),
            loss,
        ]
    )


def count_stored(shape: DecoderShape, share: RankShare, *, full_recompute: bool) -> int:
    """Return the numbers that a block stores for its backward pass on one rank.

    Without recomputation: the input and the result of both norms, queries, keys and values, the result of
    attention, both halves of the feed-forward part and their product. Norms and activations count as fused
    kernels, which store no copies in float32; eager code stores more.
    """
    hidden = share.own_tokens * shape.width
    if full_recompute:
        return hidden
    heads = shape.heads + 2 * max(shape.key_value_heads, share.tp)
    attention = share.tokens * (heads + shape.heads) * shape.head_size // share.tp
    if not shape.flash:
        scores = share.micro_batch * shape.heads // share.tp * share.sequence**2 // share.cp
        attention += scores * (5 if shape.dropout else 2) // 2
    wide = 3 if shape.gated else 2
    rows, inner = share.tokens, shape.feed_forward
    if not shape.experts:
        return 4 * hidden + attention + rows * wide * inner // share.tp
    shared = rows * wide * shape.shared_experts * inner // share.tp
    sent = share.own_tokens * shape.experts_per_token
    chosen = sent * (wide * inner + 2 * shape.width)
    return 4 * hidden + attention + shared + chosen
