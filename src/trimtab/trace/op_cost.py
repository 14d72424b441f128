"""Says of an operation what it computes and moves: the one description that tracing and calibrating share.

Flops are those of the arithmetic that matrix products, attention, convolutions and recurrent layers do; for
everything else the bytes tell the time. Bytes are what has to be read and written once: a tensor that is
expanded counts as large as the memory it lies in, and a table that is looked into as the rows that are taken.
"""

from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from trimtab.engine.precision import dtype_name
from trimtab.engine.sync_norm import Statistics
from trimtab.spec import Work
from trimtab.spec.trace import BROADCAST, PERMUTED, PROMOTED, STATISTICS
from trimtab.trace.data_dependent import RAGGED
from trimtab.trace.fake_ops import PRODUCTS, is_sparse, nonzeros, size_bytes
from trimtab.trace.recurrent import extent
from trimtab.trace.workspace_formulas import launches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FREE = {
    f"aten::{name}"
    for name in [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "set_",
        "resize_",
        "detach",
        "alias",
        "lift_fresh",
        "_unsafe_view",
        "_reshape_alias",
        "is_same_size",
        "_cudnn_init_dropout_state",
    ]
}
"""Operations that launch nothing."""
WAITS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal"}
REDUCTION_WORDS = [
    "softmax",
    "norm",
    "sum",
    "mean",
    "var",
    "std",
    "max",
    "min",
    "argmax",
    "argmin",
    "any",
    "all",
    "logsumexp",
    "cumsum",
    "nll_loss",
    "loss",
    "amax",
    "amin",
    "sort",
    "topk",
]
POINTWISE_THAT_SOUND_LIKE_REDUCTIONS = {
    "aten::maximum", "aten::minimum", "aten::clamp_min", "aten::clamp_max", "aten::logical_and",
    "aten::mse_loss_backward", "aten::addmm",
}  # fmt: skip
GATHER_WORDS = ("embedding", "index", "gather", "scatter", "take", "masked_select", "masked_scatter")
ATTENTION_WORDS = ("attention",)
ALIGNED = 16
HOPPER = 9
"""Its compute capability."""
MIXED = 2
"""The layout of a convolution backward whose gradient lies otherwise than its input."""
FINDS_POSITIONS = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::masked_select",
}  # fmt: skip
"""Operations that look for the positions of a mask first, as nonzero does, and wait for their number."""
POSITIONS = Work(op="aten::nonzero", kind="wait", dtype="")


@functools.cache
def traits(func: Any) -> tuple[bool, frozenset[int]]:
    """Whether an operation only returns a view, and which of its arguments it writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False, frozenset()
    written = {
        place
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    view = not written and any(one.alias_info is not None for one in schema.returns)
    return view, frozenset(written)


def work(  # noqa: PLR0911 - one way out for each kind
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Work | None:
    """The work of an operation that gave `out`; None where it is nothing on the device and on the host."""
    view, written = traits(func)
    if view or name in FREE:
        return Work(op=name, kind="view", dtype="", kernels=0)
    given = _tensors((args, kwargs))
    results = _tensors(out)
    if not any(_on_device(tensor) for tensor in (*given, *results)):
        return None
    if name in WAITS:
        return Work(op=name, kind="wait", dtype="", read_bytes=sum(map(_bytes, given)))
    if any(map(is_sparse, (*given, *results))):
        return _sparse(name, given, results)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(name, args, out)
    if name.startswith(("c10d::", "_c10d_functional::")):
        return _collective(name, given, results)
    if any(word in name for word in ATTENTION_WORDS):
        return _attention(name, args)
    if "_foreach_" in name or "_fused_" in name or "_amp_foreach" in name:
        return _many(name, args, given, results, written)
    return _elementwise(name, args, given, results, written)


def finds_positions(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation is given a mask on the device, and has to find the positions it stands for.

    Or sizes of groups on the device that the host has to know.
    """
    if name == "aten::_grouped_mm":
        return _one_by_one(args[0])
    if name not in FINDS_POSITIONS:
        return False
    if "index_put" in name and args[2].numel() == 1 and not (len(args) > 3 and args[3]):  # noqa: PLR2004
        # One value into all of them needs no positions.
        return False
    return any(
        _on_device(tensor) and tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1])
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _on_device(tensor: torch.Tensor) -> bool:
    # A fake tensor's `device` is an operation of its own.
    device = getattr(tensor, "fake_device", None)
    return bool((tensor.device if device is None else device).type == "cuda")


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes that have to be touched to read a tensor once."""
    counts = (
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0
    )
    return prod(counts) * tensor.element_size()


def matrix_dtype(tensor: torch.Tensor, *, convolution: bool = False) -> str:
    """The dtype that tensor cores compute in: tf32 where torch may use it for fp32."""
    name = dtype_name(tensor.dtype)
    backend = torch.backends.cudnn if convolution else torch.backends.cuda.matmul
    return "tf32" if name == "float32" and backend.allow_tf32 else name


def _matrix(name: str, args: tuple[Any, ...], out: Any) -> Work:
    left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
    batch = left.shape[0] if left.dim() > 2 else 1  # noqa: PLR2004 - a batch of matrices
    rows, inner = left.shape[-2], left.shape[-1]
    columns = right.shape[-1]
    extra = _bytes(args[0]) if name in ("aten::addmm", "aten::baddbmm") else 0
    return Work(
        op=name,
        kind="matrix",
        dtype=matrix_dtype(left),
        flops=2 * batch * rows * columns * inner,
        read_bytes=_bytes(left) + _bytes(right) + extra,
        write_bytes=_bytes(out),
        dims=(batch, rows, columns, inner, min(map(_alignment, (left, right, out)))),
        fresh=hasattr(left, RAGGED) or hasattr(right, RAGGED),
    )


def _sparse(name: str, given: list[torch.Tensor], results: list[torch.Tensor]) -> Work:
    """An operation on sparse tensors: a product reads a row of the dense matrix for each non-zero."""
    sparse = next((tensor for tensor in given if is_sparse(tensor)), None)
    reads, writes = (
        sum(size_bytes(one) if is_sparse(one) else _bytes(one) for one in some) for some in (given, results)
    )
    lead = next((result for result in (*results, *given) if not is_sparse(result)), None)
    flops = 0
    if name in PRODUCTS and sparse is not None and lead is not None:
        entries = nonzeros(sparse) * lead.shape[-1]
        flops, reads = 2 * entries, size_bytes(sparse) + entries * lead.element_size()
    return Work(
        op=name,
        kind="gather",
        dtype=dtype_name((lead if lead is not None else given[0]).dtype),
        flops=flops,
        read_bytes=reads,
        write_bytes=writes,
        dims=(0, lead.shape[-1] if lead is not None and lead.dim() else 1),
    )


def _one_by_one(tensor: torch.Tensor) -> bool:
    """Whether torch runs a grouped matrix product group by group: it has one kernel for bf16 from Hopper on.

    It waits for the sizes of the groups first.
    """
    return tensor.dtype != torch.bfloat16 or torch.cuda.get_device_capability()[0] < HOPPER


def _grouped(name: str, args: tuple[Any, ...], out: Any) -> Work:
    """A matrix product for each expert; groups are taken to be equally large."""
    left, right = args[0], args[1]
    ends = args[2] if len(args) > 2 else None  # noqa: PLR2004 - it may be left out
    groups = max(1, ends.shape[0] if isinstance(ends, torch.Tensor) else left.shape[0])
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    if left.dim() == right.dim() == 2:  # noqa: PLR2004 - matrices, cut along what is summed over
        inner = -(-inner // groups)
    elif left.dim() == 2:  # noqa: PLR2004
        rows = -(-rows // groups)
    elif right.dim() == 2:  # noqa: PLR2004
        columns = -(-columns // groups)
    return Work(
        op=name,
        kind="matrix",
        dtype=matrix_dtype(left),
        flops=2 * groups * rows * columns * inner,
        read_bytes=_bytes(left) + _bytes(right),
        write_bytes=_bytes(out),
        dims=(groups, rows, columns, inner, min(map(_alignment, (left, right, out)))),
        kernels=groups if _one_by_one(left) else 1,
    )


def _alignment(tensor: torch.Tensor) -> int:
    """Bytes that rows of a matrix are aligned to, 16 at most: what fast loads ask for."""
    apart = max(tensor.stride()[-2:]) * tensor.element_size()
    return min(apart & -apart, ALIGNED) if apart else ALIGNED


def _convolution(name: str, args: tuple[Any, ...], out: Any) -> Work:
    backward = name.endswith("_backward")
    if backward:
        result, source, weight, groups, wanted = args[0], args[1], args[2], args[9], args[10]
        passes = sum(map(bool, wanted[:2]))
    else:
        source, weight, result, groups, passes = args[0], args[1], out, args[8], 1
    transposed = bool(args[7 if backward else 6])
    narrow, wide = (source, result) if transposed else (result, source)
    spots = narrow.shape[0] * prod(narrow.shape[2:])
    inner = weight[0].numel()
    each = 2 * spots * weight.shape[0] * inner
    layouts = {_channels_last(one) for one in ((source, result) if backward else (source,))}
    layout = MIXED if len(layouts) > 1 else int(layouts.pop())
    moved = _bytes(narrow) + _bytes(wide) + _bytes(weight)
    return Work(
        op=name,
        kind="convolution",
        dtype=matrix_dtype(source, convolution=True),
        flops=each * passes,
        read_bytes=moved * passes,
        write_bytes=0,
        dims=(groups, spots, weight.shape[0] // groups, inner, layout, prod(weight.shape[2:])),
        kernels=passes,
    )


def _channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)  # noqa: PLR2004


def _attention(name: str, args: tuple[Any, ...]) -> Work:
    backward = "backward" in name
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 4]  # noqa: PLR2004
    query, key, value = tensors[1:4] if backward else tensors[:3]
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    if "_efficient_attention_forward" in name or name == "aten::_flash_attention_forward":
        batch, queries, heads, size = query.shape
        keys = key.shape[1]
    causal = _is_causal(name, args)
    flops = 2 * batch * heads * queries * keys * (size + value.shape[-1])
    if causal:
        flops //= 2
    if backward:
        flops = flops * 5 // 2
    moved = _bytes(query) + _bytes(key) + _bytes(value)
    bias = next((tensor for tensor in tensors[3:4] if not backward), None)
    return Work(
        op=name,
        kind="attention",
        dtype=matrix_dtype(query),
        flops=flops,
        read_bytes=moved * (2 if backward else 1) + (_bytes(bias) if bias is not None else 0),
        write_bytes=moved if backward else _bytes(query),
        dims=(batch, heads, queries, keys, size, int(causal)),
        kernels=3 if backward else 1,
    )


def _is_causal(name: str, args: tuple[Any, ...]) -> bool:
    """`is_causal` is the only pair of answers in these schemas that follows the dropout."""
    schema = _SCHEMAS.get(name)
    if schema is None:
        return False
    for place, one in enumerate(schema):
        if one == "is_causal":
            return bool(args[place]) if place < len(args) else False
    return False


def _schemas() -> dict[str, tuple[str, ...]]:
    found = {}
    for short in [
        "flash_attention",
        "flash_attention_backward",
        "efficient_attention",
        "efficient_attention_backward",
        "cudnn_attention",
        "cudnn_attention_backward",
        "fused_attention_overrideable",
    ]:
        overload = getattr(torch.ops.aten, f"_scaled_dot_product_{short}", None)
        if overload is not None:
            found[f"aten::_scaled_dot_product_{short}"] = tuple(
                argument.name for argument in overload.default._schema.arguments
            )
    return found


_SCHEMAS = _schemas()


def _recurrent(name: str, args: tuple[Any, ...], _: Any) -> Work:
    backward = name.endswith("_backward")
    source, weights = args[0], args[1]
    size, layers, first, both, packed = (
        (args[11], args[13], args[14], args[17], args[18])
        if backward
        else (args[7], args[9], args[10], args[13], args[14])
    )
    batch, steps, inputs = extent(source, packed, batch_first=first)
    matrices = [weight for weight in weights if weight.dim() == 2]  # noqa: PLR2004 - not biases
    numbers = sum(matrix.numel() for matrix in matrices)
    flops = 2 * inputs * numbers * (2 if backward else 1)
    return Work(
        op=name,
        kind="recurrent",
        dtype=matrix_dtype(source, convolution=True),
        flops=flops,
        read_bytes=steps * sum(map(_bytes, matrices)) + _bytes(source),
        write_bytes=inputs * size * source.element_size() * layers,
        dims=(layers * (2 if both else 1), steps, batch, size),
        kernels=steps * layers * (2 if both else 1),
    )


def _many(
    name: str,
    args: tuple[Any, ...],
    given: list[torch.Tensor],
    results: list[torch.Tensor],
    written: Iterable[int],
) -> Work:
    lead = _tensors(args[0]) if args else given
    changed = [tensor for place in written if place < len(args) for tensor in _tensors(args[place])]
    norm = "norm" in name
    numbers = sum(one.numel() for one in lead)
    return Work(
        op=name,
        kind="optimizer",
        dtype=dtype_name(lead[0].dtype) if lead else "",
        read_bytes=sum(map(_bytes, given)),
        write_bytes=0 if norm else sum(map(_bytes, changed)) + sum(map(_bytes, results)),
        dims=(len(lead), numbers),
        kernels=launches(len(lead), numbers),
    )


def _collective(name: str, given: list[torch.Tensor], results: list[torch.Tensor]) -> Work:
    sizes = [_bytes(tensor) for tensor in (*given, *results)]
    return Work(
        op=f"{STATISTICS} {name}" if Statistics.is_talking else name,
        kind="collective",
        dtype=dtype_name(given[0].dtype) if given else "",
        read_bytes=max(sizes, default=0),
        write_bytes=min(sizes, default=0),
    )


def _elementwise(
    name: str,
    args: tuple[Any, ...],
    given: list[torch.Tensor],
    results: list[torch.Tensor],
    written: Iterable[int],
) -> Work:
    changed = [tensor for place in written if place < len(args) for tensor in _tensors(args[place])]
    made = {id(one): one for one in (*changed, *results)}
    writes = sum(map(_bytes, made.values()))
    lead = next(iter(made.values()), given[0] if given else None)
    base = name.partition("::")[2]
    words = set(base.strip("_").split("_"))
    kind = "pointwise"
    reads = sum(map(_bytes, given))
    if any(word in base for word in GATHER_WORDS):
        kind = "gather"
        if "dense_backward" not in base and not changed:
            # Only the rows that are taken are read.
            tables = max((_bytes(tensor) for tensor in given), default=0)
            reads = reads - tables + min(tables, writes)
        elif changed:
            # And only those that are put are written.
            put = sum(_bytes(tensor) for tensor in given if all(tensor is not other for other in changed))
            reads, writes = put, min(writes, put)
    elif name not in POINTWISE_THAT_SOUND_LIKE_REDUCTIONS and words & set(REDUCTION_WORDS):
        kind = "reduction"
    if "nll_loss_forward" in base:
        # One number a row is picked.
        reads = _bytes(given[1])
    elif "nll_loss_backward" in base:
        reads = _bytes(given[0])
    elif name in ("aten::zero_", "aten::fill_", "aten::zeros", "aten::ones", "aten::full", "aten::new_zeros",
                "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::uniform_", "aten::normal_",
                "aten::bernoulli_", "aten::arange"):  # fmt: skip
        reads = 0
    elif "copy_" in base and changed:
        # What is overwritten is not read.
        reads -= sum(_bytes(one) for one in changed)
    largest = max(given, key=torch.Tensor.numel, default=lead)
    return Work(
        op=name,
        kind=kind,
        dtype=dtype_name(largest.dtype) if largest is not None else "",
        read_bytes=max(0, reads),
        write_bytes=writes,
        dims=(_obstacles(given, lead), largest.shape[-1] if largest is not None and largest.dim() else 1),
    )


def _obstacles(given: list[torch.Tensor], lead: torch.Tensor | None) -> int:
    """Whether inputs lie otherwise than the result, are stretched to it, or are of another dtype."""
    if lead is None:
        return 0
    order, found = _order(lead), 0
    for tensor in given:
        if tensor.shape == lead.shape and _order(tensor) != order:
            found |= PERMUTED
        if 1 < tensor.numel() < lead.numel() or 0 in _strides(tensor):
            found |= BROADCAST
        if tensor.dim() and tensor.is_floating_point() and tensor.dtype != given[0].dtype:
            found |= PROMOTED
    return found


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions by stride, those of one element or none left out."""
    strides = [
        (-stride, place)
        for place, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1 and stride
    ]
    return tuple(place for _, place in sorted(strides))


_RULES: dict[str, Callable[[str, tuple[Any, ...], Any], Work]] = {
    "aten::mm": _matrix,
    "aten::addmm": _matrix,
    "aten::bmm": _matrix,
    "aten::baddbmm": _matrix,
    "aten::_grouped_mm": _grouped,
    "transformers::grouped_mm_fallback": _grouped,
    "aten::convolution": _convolution,
    "aten::cudnn_convolution": _convolution,
    "aten::convolution_backward": _convolution,
    "aten::_cudnn_rnn": _recurrent,
    "aten::_cudnn_rnn_backward": _recurrent,
}
