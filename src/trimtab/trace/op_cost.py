"""Compute the cost of an operation: its flops, the bytes that it reads and writes, and its kernel launches.

Tracing and calibration share this description (`Work`). Flops are counted for matrix products, attention,
convolutions and recurrent layers; the time of other operations follows from their bytes. Each byte is counted
once: an expanded tensor counts as the memory behind it, and an indexed table as the rows that are taken.
"""

from __future__ import annotations

import functools
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from trimtab.engine.context_parallel import ContextGroup
from trimtab.engine.expert_parallel import ExpertGroup
from trimtab.engine.precision import dtype_name
from trimtab.engine.sync_norm import SharedStatistics
from trimtab.spec import Work
from trimtab.spec.precision import BY_ROW, SCALED_PRODUCT
from trimtab.spec.trace import (
    BATCH_NORMS,
    BROADCAST,
    CACHED_ROW_BYTES,
    CONTEXT,
    EXPERTS,
    GROUP_NORM,
    INDEX_ADD,
    PERMUTED,
    PROMOTED,
    SLICED,
    STATISTICS,
    TENSOR_PARALLEL_OPS,
    THREAD_UPSAMPLING_BACKWARD,
    UPSAMPLING,
    ZERO_GRADIENTS,
)
from trimtab.trace.data_dependent import RAGGED_ATTRIBUTE
from trimtab.trace.fake_ops import PRODUCT_OPS, count_nonzeros, is_sparse, sparse_bytes
from trimtab.trace.packed_attention import PACKED_OPS, describe_packed
from trimtab.trace.recurrent import read_extent
from trimtab.trace.workspace_formulas import count_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

NO_LAUNCH_OPS = {
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
"""Operations that launch no kernel."""
WAIT_OPS = {
    "trimtab::wait_for_device",
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::equal",
    "aten::allclose",
    "torchvision::nms",
}
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
POINTWISE_OPS = {
    "aten::maximum", "aten::minimum", "aten::clamp_min", "aten::clamp_max", "aten::logical_and",
    "aten::mse_loss_backward", "aten::addmm",
}  # fmt: skip
UPSAMPLING_BACKWARD = {f"{name}_backward" for name in UPSAMPLING}
BICUBIC = "aten::upsample_bicubic2d"
GRADIENT_SCATTERS = {"aten::scatter", "aten::scatter_add", INDEX_ADD}
"""Operations that autograd's formulas run in place on fresh zeros, as in the gradient of gather, topk or max.
While a dispatch mode watches, as in a trace, the same formulas take the form that copies the zeros first."""
TRIANGULAR_SOLVE = "aten::linalg_solve_triangular"
ADDING_OPS = {INDEX_ADD, "aten::scatter_add", "aten::scatter_reduce", "aten::index_put"}
AVERAGE_POOLS = {
    f"aten::avg_pool{dims}d{end}": place for dims in (2, 3) for end, place in (("", 1), ("_backward", 2))
}
"""Averages of windows, with the place of the windows' sizes among the arguments."""
CHANNEL_SOFTMAX = {"aten::_softmax", "aten::_log_softmax"}
GATHER_WORDS = ("embedding", "index", "gather", "scatter", "take", "masked_select", "masked_scatter")
ATTENTION_WORDS = ("attention",)
MAX_ALIGNMENT = 16
HOPPER_CAPABILITY = 9
"""Major compute capability of Hopper."""
MIXED_LAYOUT = 2
"""Layout of a backward convolution whose gradient and input have different memory formats."""
MASK_OPS = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::masked_select",
}  # fmt: skip
"""Operations that first find the positions of a mask, as nonzero does, and wait for their number."""
LOW_BIT_UPDATES = {"trimtab::update_low_bit", "trimtab::update_compiled"}
UPDATE_INSTRUCTIONS, SEARCH_INSTRUCTIONS = 80, 50
"""Instructions of an update with states in few bits: for each weight, and for each bit of its states, which
are found by halving a table. An H200 starts 33e12 instructions a second, and updates 38e9 weights of 8-bit
AdamW or 70e9 of Lion, which has one state (bitsandbytes 0.50, tensors of 4 million weights)."""
FIND_POSITIONS = Work(op="aten::nonzero", kind="wait", dtype="")


@functools.cache
def read_schema_traits(func: Any) -> tuple[bool, frozenset[int]]:
    """Return whether an operation only returns a view, and the positions of arguments that it writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False, frozenset()
    written = {
        position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    view = not written and any(result.alias_info is not None for result in schema.returns)
    return view, frozenset(written)


def describe_work(  # noqa: C901, PLR0911, PLR0912 - one way out for each kind
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Work | None:
    """Return the work of an operation that returned `out`, or None if it does not use the device."""
    view, written = read_schema_traits(func)
    if view or name in NO_LAUNCH_OPS:
        return Work(op=name, kind="view", dtype="", kernels=0)
    inputs = _list_tensors((args, kwargs))
    results = _list_tensors(out)
    if not any(_is_on_device(tensor) for tensor in (*inputs, *results)):
        return None
    if name in COPIES and (transfer := _describe_transfer(name, args, kwargs, out)) is not None:
        return transfer
    if name in WAIT_OPS:
        return Work(op=name, kind="wait", dtype="", read_bytes=sum(map(count_bytes, inputs)))
    if any(map(is_sparse, (*inputs, *results))):
        return _describe_sparse(name, inputs, results)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(name, args, out)
    if name in SHARD_COPIES:
        return _describe_shard_copy(name, args, kwargs)
    if name.startswith(("c10d::", *TENSOR_PARALLEL_OPS)):
        return _describe_collective(name, inputs, results)
    if name in PACKED_OPS:
        return describe_packed(func, name, args, kwargs)
    if any(word in name for word in ATTENTION_WORDS):
        return _describe_attention(name, args)
    if name in LOW_BIT_UPDATES:
        update = _describe_multi_tensor(name, args, inputs, results, written)
        return update.replace(flops=_count_update_instructions(args), dtype="float32")
    if "_foreach_" in name or "_fused_" in name or "_amp_foreach" in name:
        return _describe_multi_tensor(name, args, inputs, results, written)
    if name in GRADIENT_SCATTERS:
        return _describe_scatter(name, args, inputs, results)
    return _describe_elementwise(name, args, inputs, results, written)


def read_work_state(name: str) -> Hashable:
    """Return what the work of an operation depends on besides its arguments: TF32, or the backward pass."""
    if name in _RULES or "attention" in name:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return _runs_in_backward() if name in GRADIENT_SCATTERS else None


def _runs_in_backward() -> bool:
    """Return whether autograd's engine runs the current operation."""
    engine: Any = torch._C
    return bool(engine._current_graph_task_id() != -1)


COPIES = {"aten::copy_", "aten::_to_copy"}
"""Operations that may copy between device and host."""
NON_BLOCKING = 2
"""Place of the argument non_blocking of aten::copy_."""


def _describe_transfer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work | None:
    """Return the work of a copy between device and host that nobody waits for; None for another copy."""
    waits = not (kwargs.get("non_blocking") or (len(args) > NON_BLOCKING and args[NON_BLOCKING]))
    source = args[1] if name == "aten::copy_" else args[0]
    if waits or not isinstance(source, torch.Tensor) or _is_on_device(source) == _is_on_device(out):
        return None
    moved, outward = count_bytes(source), _is_on_device(source)
    return Work(
        op=name,
        kind="transfer",
        dtype="",
        read_bytes=moved if outward else 0,
        write_bytes=0 if outward else moved,
        kernels=0,
    )


def _count_update_instructions(args: tuple[Any, ...]) -> int:
    """Return the instructions of an update with states in few bits; 0 if no table is searched."""
    searched_bits = args[3] if len(args) > 3 else 0  # noqa: PLR2004 - the last argument has a default
    if not searched_bits:
        return 0
    count: int = args[0].numel()
    return count * (UPDATE_INSTRUCTIONS + SEARCH_INSTRUCTIONS * searched_bits)


def needs_positions(name: str, args: tuple[Any, ...]) -> bool:
    """Whether an operation waits to find the positions of a mask, or the group sizes, on the device."""
    if name == "aten::_grouped_mm":
        return _runs_group_by_group(args[0])
    if name not in MASK_OPS:
        return False
    if "index_put" in name and args[2].numel() == 1 and not (len(args) > 3 and args[3]):  # noqa: PLR2004
        # A single value is written through the mask, without positions.
        return False
    return any(
        _is_on_device(tensor) and tensor.dtype in (torch.bool, torch.uint8)
        for tensor in _list_tensors(args[1])
    )


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_on_device(tensor: torch.Tensor) -> bool:
    # Reading `device` of a fake tensor would dispatch an operation.
    device = getattr(tensor, "fake_device", None)
    return bool((tensor.device if device is None else device).type == "cuda")


def count_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of memory that reading a tensor once touches."""
    counts = (
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0 or size == 0
    )
    return prod(counts) * tensor.element_size()


def matrix_dtype(tensor: torch.Tensor, *, convolution: bool = False) -> str:
    """Return the dtype that tensor cores compute in: tf32 if torch may use it for fp32."""
    name = dtype_name(tensor.dtype)
    backend = torch.backends.cudnn if convolution else torch.backends.cuda.matmul
    return "tf32" if name == "float32" and backend.allow_tf32 else name


def _describe_matrix(name: str, args: tuple[Any, ...], out: Any) -> Work:
    left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
    batch = left.shape[0] if left.dim() > 2 else 1  # noqa: PLR2004 - a batch of matrices
    rows, inner = left.shape[-2], left.shape[-1]
    columns = right.shape[-1]
    extra = count_bytes(args[0]) if name in ("aten::addmm", "aten::baddbmm") else 0
    return Work(
        op=name,
        kind="matrix",
        dtype=matrix_dtype(left),
        flops=2 * batch * rows * columns * inner,
        read_bytes=count_bytes(left) + count_bytes(right) + extra,
        write_bytes=count_bytes(out),
        dims=(batch, rows, columns, inner, min(map(_alignment, (left, right, out)))),
        fresh=hasattr(left, RAGGED_ATTRIBUTE) or hasattr(right, RAGGED_ATTRIBUTE),
    )


def _describe_sparse(name: str, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> Work:
    """Return the work on sparse tensors: a product reads a row of the dense matrix for each non-zero."""
    if name == "aten::clone":
        # Autograd keeps a sparse gradient without copying it. It copies fake ones, which Python refers to.
        return Work(op=name, kind="view", dtype="", kernels=0)
    sparse = next((tensor for tensor in inputs if is_sparse(tensor)), None)
    reads, writes = (
        sum(sparse_bytes(tensor) if is_sparse(tensor) else count_bytes(tensor) for tensor in tensors)
        for tensors in (inputs, results)
    )
    lead = next((tensor for tensor in (*results, *inputs) if not is_sparse(tensor)), None)
    flops = 0
    if name in PRODUCT_OPS and sparse is not None and lead is not None:
        entries = count_nonzeros(sparse) * lead.shape[-1]
        flops, reads = 2 * entries, sparse_bytes(sparse) + entries * lead.element_size()
    return Work(
        op=name,
        kind="gather",
        dtype=dtype_name((lead if lead is not None else inputs[0]).dtype),
        flops=flops,
        read_bytes=reads,
        write_bytes=writes,
        dims=(0, lead.shape[-1] if lead is not None and lead.dim() else 1),
    )


def _describe_scatter(
    name: str, args: tuple[Any, ...], inputs: list[torch.Tensor], results: list[torch.Tensor]
) -> Work:
    """Return the work of a scatter, which a gradient's formula runs in place on zeros."""
    if _runs_in_backward() and _count_added(inputs, results[0]) < results[0].numel():
        return _describe_elementwise(f"{name}_", args, inputs, [args[0]], {0})
    return _describe_elementwise(name, args, inputs, results, ())


def _describe_triangular(name: str, args: tuple[Any, ...], out: Any) -> Work:
    """Return the work of triangular systems: each row of a solution waits for the rows before it."""
    matrices, sides = args[0], args[1]
    return Work(
        op=name,
        kind="pointwise",
        dtype=dtype_name(matrices.dtype),
        flops=out.numel() * matrices.shape[-1],
        # The right sides are copied into the result first.
        read_bytes=count_bytes(matrices) + count_bytes(sides) + count_bytes(out),
        write_bytes=2 * count_bytes(out),
        dims=(0, out.shape[-1]),
    )


def _runs_group_by_group(tensor: torch.Tensor) -> bool:
    """Whether torch runs a grouped matrix product group by group, after it has waited for the group sizes.

    From Hopper on, torch has one kernel for all groups in bf16.
    """
    return tensor.dtype != torch.bfloat16 or torch.cuda.get_device_capability()[0] < HOPPER_CAPABILITY


def _describe_grouped(name: str, args: tuple[Any, ...], out: Any) -> Work:
    """Return the work of a matrix product per expert; all groups are assumed to have the same size."""
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
        read_bytes=count_bytes(left) + count_bytes(right),
        write_bytes=count_bytes(out),
        dims=(groups, rows, columns, inner, min(map(_alignment, (left, right, out)))),
        kernels=groups if _runs_group_by_group(left) else 1,
    )


def _alignment(tensor: torch.Tensor) -> int:
    """Return the alignment of matrix rows in bytes, at most the 16 that fast loads need."""
    row_bytes = max(tensor.stride()[-2:]) * tensor.element_size()
    return min(row_bytes & -row_bytes, MAX_ALIGNMENT) if row_bytes else MAX_ALIGNMENT


def _describe_convolution(name: str, args: tuple[Any, ...], out: Any) -> Work:
    backward = name.endswith("_backward")
    if backward:
        result, source, weight, groups, needed = args[0], args[1], args[2], args[9], args[10]
        passes = sum(map(bool, needed[:2]))
        # The gradient of the bias is a sum over the gradient of the result.
        bias_bytes = count_bytes(result) if needed[2] else 0
    else:
        source, weight, result, groups, passes = args[0], args[1], out, args[8], 1
        # A bias is added by a kernel of its own, which reads and writes the result.
        bias_bytes = 2 * count_bytes(result) if isinstance(args[2], torch.Tensor) else 0
    transposed = bool(args[7 if backward else 6])
    narrow, wide = (source, result) if transposed else (result, source)
    pixels = narrow.shape[0] * prod(narrow.shape[2:])
    inner = weight[0].numel()
    pass_flops = 2 * pixels * weight.shape[0] * inner
    # Where the input has channels last, so do cuDNN's kernels: a gradient with others is copied before.
    layout = int(_is_channels_last(source))
    if backward and not layout and _is_channels_last(result):
        layout = MIXED_LAYOUT
    moved = count_bytes(narrow) + count_bytes(wide) + count_bytes(weight)
    return Work(
        op=name,
        kind="convolution",
        dtype=matrix_dtype(source, convolution=True),
        flops=pass_flops * passes,
        read_bytes=moved * passes,
        write_bytes=bias_bytes,
        dims=(groups, pixels, weight.shape[0] // groups, inner, layout, prod(weight.shape[2:])),
        kernels=passes,
    )


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)  # noqa: PLR2004


def _describe_attention(name: str, args: tuple[Any, ...]) -> Work:
    backward = "backward" in name
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 4]  # noqa: PLR2004
    query, key, value = tensors[1:4] if backward else tensors[:3]
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    causal = bool(_read_argument(name, args, "is_causal"))
    bias = _read_argument(name, args, "attn_bias")
    dropped = bool(_read_argument(name, args, "dropout_p"))
    flops = 2 * batch * heads * queries * keys * (size + value.shape[-1])
    if causal:
        flops //= 2
    if backward:
        flops = flops * 5 // 2
    moved = count_bytes(query) + count_bytes(key) + count_bytes(value)
    masked = isinstance(bias, torch.Tensor)
    return Work(
        op=name,
        kind="attention",
        dtype=matrix_dtype(query),
        flops=flops,
        read_bytes=moved * (2 if backward else 1) + (count_bytes(bias) if masked else 0),
        write_bytes=moved if backward else count_bytes(query),
        dims=(batch, heads, queries, keys, size, int(causal), int(masked), int(dropped)),
        kernels=3 if backward else 1,
    )


def _read_argument(name: str, args: tuple[Any, ...], argument: str) -> Any:
    """Return an argument of an attention operation by its name; None if it is left out or does not exist."""
    schema = _ATTENTION_SCHEMAS.get(name, ())
    position = schema.index(argument) if argument in schema else len(args)
    return args[position] if position < len(args) else None


def _read_attention_schemas() -> dict[str, tuple[str, ...]]:
    schemas = {}
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
            schemas[f"aten::_scaled_dot_product_{short}"] = tuple(
                argument.name for argument in overload.default._schema.arguments
            )
    return schemas


_ATTENTION_SCHEMAS = _read_attention_schemas()


def _describe_recurrent(name: str, args: tuple[Any, ...], _: Any) -> Work:
    backward = name.endswith("_backward")
    source, weights = args[0], args[1]
    size, layers, first, both, packed = (
        (args[11], args[13], args[14], args[17], args[18])
        if backward
        else (args[7], args[9], args[10], args[13], args[14])
    )
    batch, steps, inputs = read_extent(source, packed, batch_first=first)
    matrices = [weight for weight in weights if weight.dim() == 2]  # noqa: PLR2004 - not biases
    numbers = sum(matrix.numel() for matrix in matrices)
    flops = 2 * inputs * numbers * (2 if backward else 1)
    return Work(
        op=name,
        kind="recurrent",
        dtype=matrix_dtype(source, convolution=True),
        flops=flops,
        read_bytes=steps * sum(map(count_bytes, matrices)) + count_bytes(source),
        write_bytes=inputs * size * source.element_size() * layers,
        dims=(layers * (2 if both else 1), steps, batch, size),
        kernels=steps * layers * (2 if both else 1),
    )


def _describe_multi_tensor(
    name: str,
    args: tuple[Any, ...],
    inputs: list[torch.Tensor],
    results: list[torch.Tensor],
    written: Iterable[int],
) -> Work:
    lead = _list_tensors(args[0]) if args else inputs
    changed = [tensor for place in written if place < len(args) for tensor in _list_tensors(args[place])]
    norm, zero = "norm" in name, name == ZERO_GRADIENTS
    numbers = sum(tensor.numel() for tensor in lead)
    return Work(
        op=name,
        kind="optimizer",
        dtype=dtype_name(lead[0].dtype) if lead else "",
        read_bytes=0 if zero else sum(map(count_bytes, inputs)),
        write_bytes=0 if norm else sum(map(count_bytes, changed)) + sum(map(count_bytes, results)),
        dims=(len(lead), numbers),
        kernels=count_launches(len(lead), numbers),
    )


def _describe_collective(name: str, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> Work:
    sizes = [count_bytes(tensor) for tensor in (*inputs, *results)]
    prefix = f"{STATISTICS} " if SharedStatistics.in_collective else ""
    if ContextGroup.method_in_flight is not None:
        prefix = f"{CONTEXT} {ContextGroup.method_in_flight} "
    if ExpertGroup.step_in_flight is not None:
        prefix = f"{EXPERTS} {ExpertGroup.step_in_flight} "
    return Work(
        op=prefix + name,
        kind="collective",
        dtype=dtype_name(inputs[0].dtype) if inputs else "",
        read_bytes=max(sizes, default=0),
        write_bytes=min(sizes, default=0),
    )


SHARD_COPIES = {"fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat"}
"""Copies of FSDP2 into the buffers of its collectives, and out of them."""


def _describe_shard_copy(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work:
    """Return the work of a copy around a collective.

    Before weights are gathered, a rank copies its own shard into the buffer of all of them, not the rest.
    """
    inputs, results = _list_tensors(args[0]), _list_tensors(kwargs.get("out"))
    reads = sum(map(count_bytes, inputs))
    return Work(
        op=name,
        kind="pointwise",
        dtype=dtype_name(inputs[0].dtype) if inputs else "",
        read_bytes=reads,
        write_bytes=sum(map(count_bytes, results)) or reads,
        dims=(0, max((tensor.numel() for tensor in inputs), default=1)),
    )


def _describe_elementwise(
    name: str,
    args: tuple[Any, ...],
    inputs: list[torch.Tensor],
    results: list[torch.Tensor],
    written: Iterable[int],
) -> Work:
    changed = [tensor for place in written if place < len(args) for tensor in _list_tensors(args[place])]
    outputs = {id(tensor): tensor for tensor in (*changed, *results)}
    writes = sum(map(count_bytes, outputs.values()))
    lead = next(iter(outputs.values()), inputs[0] if inputs else None)
    base = name.partition("::")[2]
    words = set(base.strip("_").split("_"))
    kind = "pointwise"
    reads = sum(map(count_bytes, inputs))
    if any(word in base for word in GATHER_WORDS):
        kind = "gather"
        if "dense_backward" not in base and not changed:
            # Only the rows that are taken are read.
            tables = max((count_bytes(tensor) for tensor in inputs), default=0)
            reads = reads - tables + min(tables, writes)
        elif changed:
            # Only the rows that are put are written.
            put = sum(
                count_bytes(tensor) for tensor in inputs if all(tensor is not other for other in changed)
            )
            reads, writes = put, min(writes, put)
    elif name not in POINTWISE_OPS and words & set(REDUCTION_WORDS):
        kind = "reduction"
    if "nll_loss_forward" in base:
        # One number per row is read.
        reads = count_bytes(inputs[1])
    elif "nll_loss_backward" in base:
        reads = count_bytes(inputs[0])
    elif name in ("aten::zero_", "aten::fill_", "aten::zeros", "aten::ones", "aten::full", "aten::new_zeros",
                "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::uniform_", "aten::normal_",
                "aten::bernoulli_", "aten::arange"):  # fmt: skip
        reads = 0
    elif name == "aten::logsumexp":
        # The maximum, the difference, its exponential and the sum of that are kernels of their own.
        reads, writes = 4 * reads, 2 * reads + writes
    elif "copy_" in base and changed:
        # Overwritten tensors are not read.
        reads -= sum(map(count_bytes, changed))
    largest = max(inputs, key=torch.Tensor.numel, default=lead)
    return Work(
        op=f"{name} over channels" if _is_over_channels(name, args) else name,
        kind=kind,
        dtype=dtype_name(largest.dtype) if largest is not None else "",
        read_bytes=max(0, reads),
        write_bytes=writes,
        dims=(
            _find_obstacles(inputs, lead) | _find_strided_reads(name, inputs),
            largest.shape[-1] if largest is not None and largest.dim() else 1,
            *_find_limit(name, args, inputs, results, changed),
        ),
        additions=_count_additions(name, inputs, changed or results),
    )


def _is_over_channels(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a softmax is not over the last dimension, as in a loss for each pixel: another kernel."""
    if name.removesuffix("_backward_data") not in CHANNEL_SOFTMAX:
        return False
    dim = args[2] if name.endswith("_backward_data") else args[1]
    return bool(dim % args[0].dim() != args[0].dim() - 1)


def _find_limit(  # noqa: PLR0911 - a rule for each kind of operation
    name: str,
    args: tuple[Any, ...],
    inputs: list[torch.Tensor],
    results: list[torch.Tensor],
    changed: list[torch.Tensor],
) -> tuple[int, ...]:
    """Return what some operations wait for, more than for memory; nothing for others.

    A norm over the batch has one thread block a channel, one over groups of channels one for each group of a
    sample, and upsampling one thread a pixel of the result, unless channels are last (0). Where numbers are
    added into others, it matters how many go to one place; in an average of windows, how large they are.
    """
    if name in BATCH_NORMS:
        lead = inputs[0]
        return (0 if _has_channels_last(lead) else lead.shape[1],)
    if name == GROUP_NORM:
        # Its second result is the mean of each group.
        return (results[1].numel(),)
    if name in UPSAMPLING:
        is_last = "bilinear" in name and _has_channels_last(inputs[0])
        return (0 if is_last else prod(results[0].shape[2:]),)
    if name in UPSAMPLING_BACKWARD:
        gathered = max(1, inputs[0].numel() // max(1, results[0].numel()))
        threads = prod(inputs[0].shape[2:])
        return (gathered, threads) if name in THREAD_UPSAMPLING_BACKWARD else (gathered,)
    if name in AVERAGE_POOLS:
        return (prod(args[AVERAGE_POOLS[name]]),)
    if name.rstrip("_") in ADDING_OPS:
        into = changed[0] if changed else results[0]
        return (max(1, _count_added(inputs, into) // max(1, into.numel())),)
    return ()


def _count_added(inputs: list[torch.Tensor], into: torch.Tensor) -> int:
    return max((tensor.numel() for tensor in inputs if tensor.shape != into.shape), default=1)


def _count_additions(name: str, inputs: list[torch.Tensor], targets: list[torch.Tensor]) -> int:
    """Return the additions of index_add, whatever their dtype, if several numbers go to one place; else 0."""
    if name.rstrip("_") != INDEX_ADD:
        return 0
    added = _count_added(inputs, targets[0])
    return added if added >= 2 * targets[0].numel() else 0


def _has_channels_last(tensor: torch.Tensor) -> bool:
    # With a single pixel, both layouts are the same, and torch takes the usual one.
    return prod(tensor.shape[2:]) > 1 and tensor.shape[1] > 1 and tensor.stride(1) == 1


def _find_obstacles(inputs: list[torch.Tensor], lead: torch.Tensor | None) -> int:
    """Return flags: whether inputs have another layout than the result, are broadcast, or change dtype."""
    if lead is None:
        return 0
    order, flags = _stride_order(lead), 0
    for tensor in inputs:
        if tensor.shape == lead.shape and _stride_order(tensor) != order:
            flags |= PERMUTED
        if 1 < tensor.numel() < lead.numel() or 0 in _strides(tensor):
            flags |= BROADCAST
        if tensor.dim() and tensor.is_floating_point() and tensor.dtype != inputs[0].dtype:
            flags |= PROMOTED
        if tensor.numel() == lead.numel() and _is_sliced(tensor):
            flags |= SLICED
    return flags


def _find_strided_reads(name: str, inputs: list[torch.Tensor]) -> int:
    """Return a flag for bicubic upsampling with channels last: neighbouring threads read distant pixels."""
    return PERMUTED if name == BICUBIC and _has_channels_last(inputs[0]) else 0


def _is_sliced(tensor: torch.Tensor) -> bool:
    """Whether there are gaps in a tensor's memory, as in a part of the columns of another one."""
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1 and stride
    ):
        if stride > expected:
            return True
        expected = stride * size
    return False


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _stride_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions with more than one element, by descending stride; stride 0 is left out."""
    strides = [
        (-stride, dim)
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if size > 1 and stride
    ]
    return tuple(dim for _, dim in sorted(strides))


def _describe_int8(name: str, args: tuple[Any, ...], out: Any) -> Work:
    """Return the work of a product of 8-bit integers."""
    left, right = args[0], args[1]
    rows, inner, columns = left.shape[0], left.shape[1], right.shape[0]
    return Work(
        op=name,
        kind="matrix",
        dtype="int8",
        flops=2 * rows * columns * inner,
        read_bytes=count_bytes(left) + count_bytes(right),
        write_bytes=count_bytes(out),
        dims=(1, rows, columns, inner, MAX_ALIGNMENT),
    )


def _describe_scaled(name: str, args: tuple[Any, ...], out: Any) -> Work:
    """Return the work of a product of 8-bit floats; scales per row make another kernel."""
    left, right, scale = args[0], args[1], args[2]
    rows, inner, columns = left.shape[0], left.shape[1], right.shape[1]
    return Work(
        op=name if scale.numel() == 1 else name + BY_ROW,
        kind="matrix",
        dtype=dtype_name(left.dtype),
        flops=2 * rows * columns * inner,
        read_bytes=count_bytes(left) + count_bytes(right),
        write_bytes=count_bytes(out),
        dims=(1, rows, columns, inner, min(map(_alignment, (left, right, out)))),
    )


def _describe_blocks(_: str, args: tuple[Any, ...], out: Any) -> Work:
    """Return the work of a product in MXFP8, which is taken to be as efficient as with a scale per row."""
    left, left_scales, right, right_scales = args[:4]
    rows, inner, columns = left.shape[0], left.shape[1], right.shape[0]
    return Work(
        op=SCALED_PRODUCT + BY_ROW,
        kind="matrix",
        dtype=dtype_name(left.dtype),
        flops=2 * rows * columns * inner,
        read_bytes=sum(map(count_bytes, (left, left_scales, right, right_scales))),
        write_bytes=count_bytes(out),
        dims=(1, rows, columns, inner, min(map(_alignment, (left, right, out)))),
    )


def _describe_roll(name: str, args: tuple[Any, ...], out: Any) -> Work:
    """Return the work of a roll: torch rolls one dimension after the other, a kernel for each."""
    source = args[0]
    passes = max(1, len(args[2]) if len(args) > 2 else 1)  # noqa: PLR2004 - it may be left out
    return Work(
        op=name,
        kind="pointwise",
        dtype=dtype_name(source.dtype),
        read_bytes=count_bytes(source),
        write_bytes=count_bytes(out),
        dims=(0, source.shape[-1] if source.dim() else 1),
        kernels=passes,
    )


FLEX_MILLION = 1_000_000


def _describe_flex(name: str, args: tuple[Any, ...], _: Any) -> Work:
    """Return the work of FlexAttention: of the blocks that its mask leaves."""
    backward = name.endswith("_backward")
    query, key, value = args[1:4] if backward else args[:3]
    share = args[-1] / FLEX_MILLION
    batch, heads, queries, size = query.shape
    flops = round(2 * batch * heads * queries * key.shape[2] * (size + value.shape[-1]) * share)
    moved = count_bytes(query) + count_bytes(key) + count_bytes(value)
    return Work(
        op=name,
        kind="attention",
        dtype=matrix_dtype(query),
        flops=flops * 5 // 2 if backward else flops,
        read_bytes=moved * (2 if backward else 1),
        write_bytes=moved if backward else count_bytes(query),
        dims=(batch, heads, queries, max(1, round(key.shape[2] * share)), size, 0),
        kernels=2 if backward else 1,
    )


def _describe_slopes(name: str, args: tuple[Any, ...], out: Any) -> Work:
    """Return the work of a loss that overwrites its logits: long rows are read from memory twice."""
    logits = args[0]
    moved, row_bytes = count_bytes(logits), logits.shape[-1] * logits.element_size()
    return Work(
        op=name,
        kind="reduction",
        dtype=dtype_name(logits.dtype),
        read_bytes=moved * (2 if row_bytes > CACHED_ROW_BYTES else 1),
        write_bytes=moved + count_bytes(out),
    )


_RULES: dict[str, Callable[[str, tuple[Any, ...], Any], Work]] = {
    "trimtab::flex_attention": _describe_flex,
    "trimtab::flex_attention_backward": _describe_flex,
    "trimtab::token_loss_slopes": _describe_slopes,
    "trimtab::product_int8": _describe_int8,
    "aten::_scaled_mm": _describe_scaled,
    "trimtab::product_blocks": _describe_blocks,
    "aten::mm": _describe_matrix,
    "aten::addmm": _describe_matrix,
    "aten::bmm": _describe_matrix,
    "aten::baddbmm": _describe_matrix,
    "aten::_grouped_mm": _describe_grouped,
    "transformers::grouped_mm_fallback": _describe_grouped,
    "aten::convolution": _describe_convolution,
    "aten::cudnn_convolution": _describe_convolution,
    "aten::convolution_backward": _describe_convolution,
    "aten::roll": _describe_roll,
    TRIANGULAR_SOLVE: _describe_triangular,
    "aten::_cudnn_rnn": _describe_recurrent,
    "aten::_cudnn_rnn_backward": _describe_recurrent,
}
