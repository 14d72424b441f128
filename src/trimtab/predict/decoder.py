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
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from trimtab.predict.op_time import CUDNN
from trimtab.spec import DecoderShape, Work
from trimtab.spec.precision import BY_ROW, DTYPE_BYTES, SCALED_PRODUCT

FLASH = "flash-attention"
STORED_KINDS = ("matrix", "attention")
"""Kinds of operations whose results are stored where a block is recomputed in part."""
ALIGNED = 16
"""Bytes to which matrices are aligned."""


class BlockRecompute(StrEnum):
    """What a block computes again in its backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    """As torchtitan does it by operation: attention and every second product are stored, the rest is not."""
    FULL = "full"
    """All of it: a block stores only its input."""


class Float8(StrEnum):
    """Scales of linear layers in 8 bits."""

    NONE = "none"
    TENSOR = "tensorwise"
    ROW = "rowwise"
    FUSED = "fused"
    """Casts are part of the kernels before them, with scales of earlier steps or of small blocks."""


@dataclass(frozen=True, kw_only=True)
class BlockKernels:
    """Kernels of the trainer's code, where trainers differ."""

    fused: bool = True
    """Whether norms, rotary positions and the gate are one kernel each; else float32 copies are made."""
    attention: str = CUDNN
    """Operation of the attention kernel: `CUDNN`, or `FLASH` of a stated rate."""
    fused_loss: bool = True
    """Whether the loss makes no copy of its scores in float32."""
    float8: Float8 = Float8.NONE
    stops_early: bool = False
    """Whether recomputation of a block ends before its last product, whose result nobody needs: torch's
    checkpoint without re-entrance does."""


FUSED_KERNELS = BlockKernels()


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """What one rank has of each block, and how many tokens it sees."""

    micro_batch: int
    sequence: int
    tp: int = 1
    sequence_parallel: bool = True
    """Whether tensor-parallel ranks also split the tokens outside of matrix products."""
    overlaps_tp: bool = False
    """Whether products run on the parts of their input that were gathered, while others are on their way."""
    cp: int = 1
    balanced: bool = True
    """Whether context-parallel ranks have equal parts of the scores; else the last has those of all parts."""
    ep: int = 1
    dtype: str = "bfloat16"
    kernels: BlockKernels = FUSED_KERNELS

    @cached_property
    def _hash(self) -> int:
        # Estimates of a block are looked up by it many times.
        return hash((self.micro_batch, self.sequence, self.tp, self.cp, self.ep, self.dtype, self.kernels))

    def __hash__(self) -> int:
        return self._hash

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch that the matrix products of a rank see."""
        return self.micro_batch * self.sequence // self.cp

    @property
    def own_tokens(self) -> int:
        """Tokens of which a rank has the hidden states between the blocks."""
        return self.tokens // self.gathered_from

    @property
    def gathered_from(self) -> int:
        """Ranks from which the tokens of a matrix product are gathered."""
        return self.tp if self.sequence_parallel else 1


class BlockPass(NamedTuple):
    """Operations of a forward and a backward pass."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]


class _Operations:
    """Make operations for one dtype."""

    def __init__(self, dtype: str, name: str = "aten::mm") -> None:
        self.dtype, self.name = dtype, name
        self.bytes = DTYPE_BYTES.get(dtype, 1)

    def product(self, rows: int, columns: int, inner: int, *, biased: bool = False) -> Work:
        """Return a product of (rows, inner) with (inner, columns)."""
        return Work(
            op="aten::addmm" if biased else self.name,
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


def list_linear(  # noqa: PLR0913 - sizes
    rows: int,
    columns: int,
    inner: int,
    make: _Operations,
    *,
    biased: bool = False,
    float8: Float8 = Float8.NONE,
    gathered: tuple[int, int] = (1, 1),
) -> BlockPass:
    """Return a linear layer: backward, a product for the input's gradient and one for the weight's.

    Its inputs, and the gradients of its outputs, are gathered from so many ranks.
    """
    if float8 is not Float8.NONE:
        return _list_float8_linear((rows, columns, inner), make, float8, gathered)
    backward = [make.product(rows, inner, columns), make.product(columns, inner, rows)]
    if biased:
        backward.append(make.pointwise("aten::sum", rows * columns, columns, columns, kind="reduction"))
    return BlockPass((make.product(rows, columns, inner, biased=biased),), tuple(backward))


def _list_float8_linear(
    sizes: tuple[int, int, int], make: _Operations, scales: Float8, gathered: tuple[int, int]
) -> BlockPass:
    """Return a linear layer in 8 bits, with the kernels that scale and cast its inputs (torchao, compiled).

    A scale of a whole tensor needs its maximum first, so its numbers are read twice. With such a scale, a
    rank casts its own part of weights, inputs and gradients before they are gathered; its part of the weights
    is small. Scales of rows need one pass, but every product needs them along its own inner axis, so each
    tensor is cast twice, after it was gathered. Fused casts write both orders of a tensor at once, and
    weights are cast once for all micro-batches.
    """
    rows, columns, inner = sizes
    small = _Operations("float8_e4m3fn", SCALED_PRODUCT + BY_ROW * (scales is Float8.ROW))

    def cast(count: int, last: int) -> list[Work]:
        written = count // make.bytes
        if scales is Float8.ROW:
            return [make.pointwise("aten::_to_copy", count, written, last)]
        most = make.pointwise("aten::amax", count, 1, last, kind="reduction")
        return [most, make.pointwise("aten::_to_copy", count, written, last)]

    if scales is Float8.FUSED:
        inputs = make.pointwise("aten::_to_copy", rows * inner, rows * inner, inner)
        gradients = make.pointwise("aten::_to_copy", rows * columns, rows * columns, columns)
        products = small.product(rows, inner, columns), small.product(columns, inner, rows)
        return BlockPass((inputs, small.product(rows, columns, inner)), (gradients, *products))
    is_row = scales is Float8.ROW
    weight = cast(columns * inner, inner) if is_row else []
    inputs_from, gradients_from = (1, 1) if is_row else gathered
    forward = [*cast(rows * inner // inputs_from, inner), *weight, small.product(rows, columns, inner)]
    backward = [*cast(rows * columns // gradients_from, columns), small.product(rows, inner, columns)]
    if is_row:
        backward += [*weight, *cast(rows * columns, columns), *cast(rows * inner, inner)]
    else:
        turned = [make.pointwise("aten::clone", rows * inner // 2, rows * inner // 2, inner)]
        turned += [make.pointwise("aten::clone", rows * columns // 2, rows * columns // 2, columns)]
        backward += turned
    return BlockPass(tuple(forward), (*backward, small.product(columns, inner, rows)))


def list_attention(shape: DecoderShape, share: RankShare) -> BlockPass:
    """Return attention over the heads of a rank; with context parallelism, one kernel for each part of keys.

    With the causal mask halves of the scores are computed, evenly over the context-parallel ranks.
    """
    make = _Operations(share.dtype)
    heads, size, values = shape.heads // share.tp, shape.head_size, shape.values
    batch = share.micro_batch
    queries, keys = share.sequence // share.cp, share.sequence // share.cp
    if shape.flash:
        works: list[list[Work]] = [[], []]
        # Forward, scores and values; backward, scores again, then gradients of all three and of scores.
        for way, sizes in ((0, 2 * (size + values)), (1, 2 * (3 * size + 2 * values))):
            for causal in (True, False)[: share.cp]:
                # Of all other parts, half of the queries or half of the keys are before the mask.
                scores = queries * keys / (2 if causal or share.balanced else 1)
                work = Work(
                    op=share.kernels.attention + "_backward" * way,
                    kind="attention",
                    dtype=make.dtype,
                    flops=int(sizes * batch * heads * scores),
                    read_bytes=(3 + 3 * way) * batch * heads * queries * size * make.bytes,
                    write_bytes=(1 + 2 * way) * batch * heads * queries * size * make.bytes,
                    dims=(batch, heads, queries, keys if causal else max(1, keys // 2), size, int(causal)),
                )
                works[way] += [work] * (1 if causal else share.cp - 1)
        # Results of the parts are put together in float32.
        numbers = batch * heads * queries * values
        merge = [make.pointwise("aten::add", 4 * numbers, 2 * numbers, values)] * (share.cp - 1)
        return BlockPass((*works[0], *merge), (*works[1], *merge))
    count = batch * heads
    scores = count * queries * share.sequence
    # Megatron-LM's kernels read only the half of the scores that the mask leaves.
    soft = make.pointwise("aten::_softmax", scores // 2, scores, share.sequence, kind="reduction")
    soft_back = make.pointwise(
        "aten::_softmax_backward_data", scores, scores, share.sequence, kind="reduction"
    )
    drop = [make.pointwise("aten::native_dropout", scores, scores * 3 // 2, share.sequence)] * shape.dropout
    drop_back = [
        make.pointwise("aten::native_dropout_backward", scores * 3 // 2, scores, share.sequence)
    ] * shape.dropout
    query = make.products(count, queries, share.sequence, size)
    value = make.products(count, queries, values, share.sequence)
    copy = make.pointwise("aten::clone", count * queries * size, count * queries * size, size)
    return BlockPass(
        (copy, query, soft, *drop, value, copy),
        (
            copy,
            make.products(count, share.sequence, values, queries),
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
    if share.kernels.fused or not shape.gated:
        return BlockPass(
            (make.pointwise("aten::native_layer_norm", numbers, numbers, last, kind=kind),),
            (make.pointwise("aten::native_layer_norm_backward", 2 * numbers, numbers, last, kind=kind),),
        )
    # A mean of squares in float32, as written out: copy, square, mean, scale, copy back, times the weights.
    plain = _Operations("float32")
    copy = make.pointwise("aten::_to_copy", 2 * numbers, 2 * numbers, last)
    square = plain.pointwise("aten::pow", numbers, numbers, last)
    mean = plain.pointwise("aten::mean", numbers, share.own_tokens, last, kind=kind)
    scale = plain.pointwise("aten::mul", numbers, numbers, last)
    weigh = make.pointwise("aten::mul", numbers, numbers, last)
    sums = plain.pointwise("aten::sum", numbers, share.own_tokens, last, kind=kind)
    both = plain.pointwise("aten::mul", 2 * numbers, numbers, last)
    return BlockPass(
        (copy, square, mean, scale, copy, weigh),
        (
            weigh,
            make.pointwise("aten::sum", numbers, last, last, kind=kind),
            copy,
            both,
            sums,
            both,
            both,
            copy,
        ),
    )


def list_rotation(shape: DecoderShape, share: RankShare, make: _Operations) -> BlockPass:
    """Return the rotary positions of queries and keys."""
    if not shape.rotary:
        return BlockPass((), ())
    size = shape.rope_size or shape.head_size
    heads = (shape.heads + (1 if shape.key_value_rank else shape.key_value_heads)) // share.tp
    numbers = share.tokens * heads * size
    turn = make.pointwise("aten::mul", numbers, numbers, size)
    if share.kernels.fused:
        return BlockPass((turn,), (turn,))
    plain = _Operations("float32")
    copy = make.pointwise("aten::_to_copy", numbers * 3 // 2, numbers * 3 // 2, size)
    works = (copy, plain.pointwise("aten::mul", numbers, numbers, size), copy)
    return BlockPass(works, works)


def list_residual(shape: DecoderShape, share: RankShare, make: _Operations) -> BlockPass:
    """Return the addition to the residual stream, with dropout where the model has it."""
    numbers = share.own_tokens * shape.width
    forward = [make.pointwise("aten::add", 2 * numbers, numbers, shape.width)]
    backward = [make.pointwise("aten::add", 2 * numbers, numbers, shape.width)]
    if shape.dropout:
        # Bias, dropout and addition are one kernel, which also writes the mask.
        forward = [make.pointwise("aten::native_dropout", 2 * numbers, numbers * 3 // 2, shape.width)]
        backward.append(
            make.pointwise("aten::native_dropout_backward", numbers * 3 // 2, numbers, shape.width)
        )
    return BlockPass(tuple(forward), tuple(backward))


def list_feed_forward(
    shape: DecoderShape, share: RankShare, make: _Operations, *, dense: bool = False
) -> BlockPass:
    """Return the feed-forward part of a rank: dense, or its experts with the tokens that they get."""
    width, inner = shape.width, shape.feed_forward
    wide = 2 if shape.gated else 1
    parts: list[BlockPass] = []
    if dense or not shape.experts:
        hidden = (shape.dense_feed_forward if dense else inner) // share.tp
        parts += _list_dense(shape, share, hidden, make)
    else:
        if shape.shared_experts:
            parts += _list_dense(shape, share, shape.shared_experts * inner // share.tp, make)
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


def _list_dense(shape: DecoderShape, share: RankShare, hidden: int, make: _Operations) -> list[BlockPass]:
    rows, width, wide = share.tokens, shape.width, 2 if shape.gated else 1
    float8 = share.kernels.float8
    if shape.gated and not share.kernels.fused:
        multiply = make.pointwise("aten::mul", 2 * rows * hidden, rows * hidden, hidden)
        activation = BlockPass(
            (make.pointwise("aten::silu", rows * hidden, rows * hidden, hidden), multiply),
            (
                multiply,
                multiply,
                make.pointwise("aten::silu_backward", 2 * rows * hidden, rows * hidden, hidden),
            ),
        )
    else:
        moved = (wide + 1) * rows * hidden
        activation = BlockPass(
            (make.pointwise("aten::gelu", wide * rows * hidden, rows * hidden, hidden),),
            (make.pointwise("aten::gelu_backward", moved, wide * rows * hidden, hidden),),
        )
    return [
        list_linear(
            rows,
            wide * hidden,
            width,
            make,
            biased=shape.biased,
            float8=float8,
            gathered=(share.gathered_from, 1),
        ),
        activation,
        list_linear(
            rows, width, hidden, make, biased=shape.biased, float8=float8, gathered=(1, share.gathered_from)
        ),
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


def list_projections(shape: DecoderShape, share: RankShare, make: _Operations) -> BlockPass:
    """Return the products that make queries, keys and values."""
    float8 = share.kernels.float8
    queries = shape.heads // share.tp * shape.head_size
    if not shape.key_value_rank:
        columns = queries + max(1, shape.key_value_heads // share.tp) * (shape.head_size + shape.values)
        return list_linear(
            share.tokens,
            columns,
            shape.width,
            make,
            biased=shape.biased,
            float8=float8,
            gathered=(share.gathered_from, 1),
        )
    # Ranks compress the tokens that they have between blocks, and expand those of all for their own heads.
    compressed = shape.key_value_rank + shape.rope_size
    expanded = shape.expanded_columns // share.tp
    parts = [list_linear(share.own_tokens, compressed, shape.width, make, float8=float8)]
    if shape.query_rank:
        parts.append(list_linear(share.own_tokens, shape.query_rank, shape.width, make, float8=float8))
    parts.append(list_linear(share.tokens, queries, shape.query_rank or shape.width, make, float8=float8))
    parts.append(list_linear(share.tokens, expanded, shape.key_value_rank, make, float8=float8))
    # Keys are put together of their own part and of the part with positions.
    keys = share.tokens * queries
    copy = make.pointwise("aten::cat", keys, keys, shape.head_size)
    return _join([*parts, BlockPass((copy, copy), (copy, copy))])


def list_block(shape: DecoderShape, share: RankShare, *, dense: bool = False) -> BlockPass:
    """Return the operations of one block on one rank; `dense`: of a first block without experts."""
    make = _Operations(share.dtype)
    outputs = shape.heads // share.tp * shape.values
    return _join(
        [
            list_norm(shape, share, make),
            list_projections(shape, share, make),
            list_rotation(shape, share, make),
            list_attention(shape, share),
            list_linear(
                share.tokens,
                shape.width,
                outputs,
                make,
                biased=shape.biased,
                float8=share.kernels.float8,
                gathered=(1, share.gathered_from),
            ),
            list_residual(shape, share, make),
            list_norm(shape, share, make),
            list_feed_forward(shape, share, make, dense=dense),
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


def count_stored(
    shape: DecoderShape,
    share: RankShare,
    *,
    recompute: BlockRecompute = BlockRecompute.NONE,
    dense: bool = False,
) -> int:
    """Return the numbers that a block stores for its backward pass on one rank.

    Without recomputation: the input and the result of both norms, queries, keys and values, the result of
    attention, both halves of the feed-forward part and their product. Norms and activations count as fused
    kernels, which store no copies in float32; eager code stores more.
    """
    hidden = share.own_tokens * shape.width
    if recompute is BlockRecompute.FULL:
        return hidden
    rows, inner = share.tokens, shape.dense_feed_forward if dense else shape.feed_forward
    queries, outputs = (shape.heads * size // share.tp for size in (shape.head_size, shape.values))
    groups = max(shape.key_value_heads // share.tp, 1)
    if recompute is BlockRecompute.SELECTIVE:
        # The input, queries, values, the result of attention, the gate and the result of the block.
        return 2 * hidden + rows * (queries + groups * shape.values + outputs + inner // share.tp)
    attention = rows * (queries + groups * (shape.head_size + shape.values) + outputs)
    if shape.key_value_rank:
        attention += 2 * share.own_tokens * (shape.query_rank + shape.key_value_rank)
    if not shape.flash:
        scores = share.micro_batch * shape.heads // share.tp * share.sequence**2 // share.cp
        attention += scores * (5 if shape.dropout else 2) // 2
    wide = 3 if shape.gated else 2
    if not share.kernels.fused and shape.gated:
        # The activated gate, beside the gate; both norms keep copies in float32 and the scaled input.
        wide, hidden = wide + 1, 2 * hidden
    if dense or not shape.experts:
        return 4 * hidden + attention + rows * wide * inner // share.tp
    shared = rows * wide * shape.shared_experts * inner // share.tp
    sent = share.own_tokens * shape.experts_per_token
    chosen = sent * (wide * inner + shape.width)
    return 4 * hidden + attention + shared + chosen


def list_again(block: BlockPass, recompute: BlockRecompute, kernels: BlockKernels) -> tuple[Work, ...]:
    """Return the operations that run a second time before the backward pass of a block."""
    if recompute is BlockRecompute.NONE:
        return ()
    places = [number for number, work in enumerate(block.forward) if work.kind == "matrix"]
    if recompute is BlockRecompute.FULL:
        # Layers in 8 bits store their inputs after their product.
        ends = kernels.stops_early and kernels.float8 is Float8.NONE
        return block.forward[: places[-1]] if ends else block.forward
    # Keys, the output projection and one of both products up; they cost as much as every second product here.
    again = {*places[1::2], *(n for n, work in enumerate(block.forward) if work.kind not in STORED_KINDS)}
    return tuple(work for number, work in enumerate(block.forward) if number in again)
