"""Compute result shapes of operations that FakeTensorMode does not support.

torch implements these operations only for CUDA or for real tensors: fused batch norms, CTC loss, sampling by
cuDNN, grouped matrix products, sparse tensors and TorchScript functions. Recurrent layers are in `recurrent`.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from trimtab.engine.sync_norm import accumulation_dtype
from trimtab.trace import recurrent

if TYPE_CHECKING:
    from collections.abc import Callable


def _batch_norm(args: tuple[Any, ...]) -> Any:
    source, weight = args[0], args[1]
    moments = source.new_empty((weight.numel(),), dtype=torch.float32)
    return (
        torch.empty_like(source),
        moments,
        torch.empty_like(moments),
        source.new_empty((0,), dtype=torch.uint8),
    )


def _batch_norm_backward(args: tuple[Any, ...]) -> Any:
    source, weight = args[0], args[2]
    return torch.empty_like(source), torch.empty_like(weight), torch.empty_like(weight)


def _batch_norm_stats(args: tuple[Any, ...]) -> Any:
    """Return mean and inverse deviation of each channel, for synchronised batch norm."""
    source = args[0]
    mean = source.new_empty((source.shape[1],), dtype=accumulation_dtype(source.dtype))
    return mean, torch.empty_like(mean)


def _batch_norm_gather_stats(args: tuple[Any, ...]) -> Any:
    """Return mean and inverse deviation over all ranks, from one row per rank."""
    mean = args[1].new_empty((args[1].shape[1],))
    return mean, torch.empty_like(mean)


def _batch_norm_backward_reduce(args: tuple[Any, ...]) -> Any:
    """Return two sums per channel, and the gradients of weight and bias; None for those not requested."""
    source, mean, weight = args[1], args[2], args[4]
    dtype = mean.dtype if weight is None else weight.dtype
    sums = [torch.empty_like(mean) if args[5] else None for _ in range(2)]
    gradients = [
        source.new_empty((source.shape[1],), dtype=dtype) if needed else None for needed in args[6:8]
    ]
    return (*sums, *gradients)


def _ctc_loss(args: tuple[Any, ...]) -> Any:
    """Return the loss of each sample, and the sums over its alignments (log_alpha)."""
    steps, batch = args[0].shape[0], args[0].shape[1]
    longest = args[1].shape[-1] if args[1].dim() > 1 else args[1].numel()
    return args[0].new_empty((batch,)), args[0].new_empty((batch, steps, 2 * longest + 1))


GROUPED_ROW_BYTES = 16
"""Alignment of result rows of a grouped matrix product."""


def _grouped_mm(args: tuple[Any, ...]) -> torch.Tensor:
    """Return the result of a grouped matrix product, by the sources of torch 2.11.

    torch's own shape function supports only bf16, but CUDA supports fp16 and fp32 too.
    """
    left, right, ends, _, dtype = (*args, None, None, None)[:5]
    groups = left.shape[0] if left.dim() == 3 else right.shape[0] if ends is None else ends.shape[0]  # noqa: PLR2004
    rows, columns = left.shape[-2], right.shape[-1]
    out_dtype = dtype or left.dtype
    item_bytes = out_dtype.itemsize
    row_stride = -(-columns * item_bytes // GROUPED_ROW_BYTES) * GROUPED_ROW_BYTES // item_bytes
    if left.dim() == right.dim():
        size, stride = (groups, rows, columns), (rows * row_stride, row_stride, 1)
        return torch.empty_strided(size, stride, dtype=out_dtype, device=left.device)
    return torch.empty_strided((rows, columns), (row_stride, 1), dtype=out_dtype, device=left.device)


def _sample_grid(args: tuple[Any, ...]) -> torch.Tensor:
    """Return the values of an image at the places of a grid, in the layout of cuDNN."""
    image, grid = args[0], args[1]
    sampled: torch.Tensor = image.new_empty((*image.shape[:2], *grid.shape[1:-1]))
    return sampled


def _no_result(_: tuple[Any, ...]) -> None:
    return None


COMPOSITE_WITHOUT_CUDA = (
    "silu_backward", "mish_backward", "native_channel_shuffle", "_fused_rms_norm", "_fused_rms_norm_backward",
)  # fmt: skip
"""Operations that a build without CUDA decomposes, and a build with CUDA runs as one kernel."""


def keep_composite_ops(library: torch.library.Library) -> None:
    """Register CUDA kernels for COMPOSITE_WITHOUT_CUDA, so that they are not decomposed. They never run."""

    def fail(*_: Any) -> None:
        raise AssertionError("a fake tensor reached a kernel")

    for name in COMPOSITE_WITHOUT_CUDA:
        library.impl(name, fail, "CUDA")


def multiply_into_result(library: torch.library.Library) -> None:
    """Let compiled code write products of 8-bit floats into a given tensor: torch has no fake for that."""

    def run(*_: Any, out: torch.Tensor, **__: Any) -> torch.Tensor:
        return out

    library.impl("_scaled_mm.out", run, "Meta")


def add_bias_in_place(library: torch.library.Library) -> None:
    """Let a linear layer with non-contiguous input add its bias in place, as it does for real tensors."""
    original = torch.ops.aten.linear.default

    def linear(source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if bias is None or source.dim() < 3 or source.is_contiguous():  # noqa: PLR2004
            return original.decompose(source, weight, bias)
        # For fake tensors, torch adds the bias into new memory.
        return torch.matmul(source, weight.t()).add_(bias)

    library.impl("linear", linear, "AutogradCUDA")


RESULTS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::batch_norm_stats": _batch_norm_stats,
    "aten::batch_norm_gather_stats_with_counts": _batch_norm_gather_stats,
    "aten::batch_norm_elemt": lambda args: torch.empty_like(args[0]),
    "aten::batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "aten::batch_norm_backward_elemt": lambda args: torch.empty_like(args[1]),
    **recurrent.RESULTS,
    "aten::_grouped_mm": _grouped_mm,
    "aten::_ctc_loss": _ctc_loss,
    "aten::_ctc_loss_backward": lambda args: torch.empty_like(args[1], memory_format=torch.contiguous_format),
    "aten::_use_cudnn_ctc_loss": lambda _: False,
    "aten::_use_miopen_ctc_loss": lambda _: False,
    "aten::cudnn_grid_sampler": _sample_grid,
    "aten::cudnn_grid_sampler_backward": lambda args: (
        args[0].new_empty(args[0].shape),
        torch.empty_like(args[1]),
    ),
    "aten::_fused_sgd_": _no_result,
    "aten::_fused_adagrad_": _no_result,
}


DENSE_RESULTS = {"aten::native_layer_norm", "aten::native_layer_norm_backward"}
"""Operations whose first result is contiguous on CUDA, for any input layout."""


def make_first_dense(out: Any) -> Any:
    """Return the results with the first one contiguous."""
    first = out[0]
    if first is None or first.is_contiguous():
        return out
    return (torch.empty(first.shape, dtype=first.dtype, device=first.device), *out[1:])


# Sparse tensors. torch supports these products and conversions only for real sparse tensors. A fake sparse
# tensor has known sizes and a known number of non-zeros, so every result has a known shape. Sizes of
# temporary memory follow torch's sources (SparseCUDABlas.cpp, SparseCUDATensorMath.cu) and traces of an H200.
# Compressed layouts (CSR, CSC) are traced as coordinates (COO), which is an assumption of the estimate.


PARTS_ATTRIBUTE = "_trimtab_parts"
"""Attribute of a sparse tensor that keeps its indices and values alive."""
PRODUCT_OPS = {"aten::mm", "aten::addmm", "aten::_sparse_addmm"}
MAKE_SPARSE_OP = "aten::_sparse_coo_tensor_with_dims_and_tensors"
COMPRESSED_OPS = {"aten::sparse_compressed_tensor", "aten::_sparse_compressed_tensor_unsafe"}
TO_COMPRESSED_OPS = {"aten::_to_sparse_csr", "aten::_to_sparse_csc"}
TRANSPOSE_OPS = {"aten::t", "aten::transpose"}
SPARSE_OPS = PRODUCT_OPS | COMPRESSED_OPS | TO_COMPRESSED_OPS | TRANSPOSE_OPS | {"aten::_coalesce"}
"""Operations that `make_sparse_result` may support."""
COMPRESSED_ASSUMPTION = "sparse tensors in a compressed layout (CSR, CSC) are traced as coordinates (COO)"


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse COO tensor."""
    return isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo


def has_sparse(tree: Any) -> bool:
    """Whether arguments or results contain a sparse tensor."""
    return any(is_sparse(leaf) for leaf in tree_leaves(tree))


def count_nonzeros(tensor: torch.Tensor) -> int:
    """Return the number of entries of a sparse tensor; duplicate indices count separately."""
    return int(tensor._nnz())


def sparse_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of indices and values."""
    count = count_nonzeros(tensor)
    dense = tensor.shape[tensor.sparse_dim() :].numel()
    return count * (8 * tensor.sparse_dim() + dense * tensor.element_size())


def make_sparse_result(name: str, args: tuple[Any, ...], assume: Callable[[str], None]) -> Any:
    """Return the result of an operation on sparse tensors, or None if torch can compute it itself."""
    if name in COMPRESSED_OPS:
        assume(COMPRESSED_ASSUMPTION)
        values, size = args[2], args[3]
        return make_sparse(values.new_empty((2, values.shape[0]), dtype=torch.int64), values, size)
    if name in TO_COMPRESSED_OPS:
        assume(COMPRESSED_ASSUMPTION)
        return _copy_sparse(args[0])
    if name == "aten::_coalesce":
        return _copy_sparse(args[0])
    if name in TRANSPOSE_OPS and is_sparse(args[0]):
        # torch copies the entries and swaps rows and columns, which leaves them out of order.
        first, second = args[1:3] if name == "aten::transpose" else (0, 1)
        size = list(args[0].shape)
        size[first], size[second] = size[second], size[first]
        return _copy_sparse(args[0], size, in_order=False)
    if name in PRODUCT_OPS:
        left, right = args[-2:] if name == "aten::mm" else args[1:3]
        if is_sparse(left) or is_sparse(right):
            dense = right if is_sparse(left) else left
            return dense.new_empty((left.shape[0], right.shape[1]))
    return None


def _copy_sparse(
    tensor: torch.Tensor, size: list[int] | None = None, *, in_order: bool = True
) -> torch.Tensor:
    """Return the same entries in new memory. Assumes few duplicate indices."""
    count, sparse_dims = count_nonzeros(tensor), tensor.sparse_dim()
    device, dense = tensor.device, tensor.shape[sparse_dims:]
    indices = torch.empty((sparse_dims, count), dtype=torch.int64, device=device)
    values = torch.empty((count, *dense), dtype=tensor.dtype, device=device)
    return make_sparse(indices, values, size or tensor.shape, in_order=in_order)


def make_sparse(
    indices: torch.Tensor, values: torch.Tensor, size: Any, *, in_order: bool = True
) -> torch.Tensor:
    """Return a sparse tensor of these entries, which keeps indices and values alive."""
    sparse: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        indices.shape[0], values.dim() - 1, list(size), indices, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device, is_coalesced=in_order,
    )  # fmt: skip
    setattr(sparse, PARTS_ATTRIBUTE, (indices, values))
    return sparse


def list_storage_tensors(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors that own a tensor's memory: indices and values if sparse, else the tensor itself."""
    return getattr(value, PARTS_ATTRIBUTE, ()) if is_sparse(value) else (value,)


def keep_parts_alive(name: str, args: tuple[Any, ...], out: Any) -> None:
    """Keep indices and values alive as long as a sparse result that uses them."""
    if name == MAKE_SPARSE_OP:
        setattr(out, PARTS_ATTRIBUTE, args[3:5])
    elif is_sparse(out) and not hasattr(out, PARTS_ATTRIBUTE):
        source = next((leaf for leaf in tree_leaves(args) if hasattr(leaf, PARTS_ATTRIBUTE)), None)
        if source is not None:
            setattr(out, PARTS_ATTRIBUTE, getattr(source, PARTS_ATTRIBUTE))


def sparse_product_bytes(name: str, args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, list[int]]:
    """Return the temporary bytes of a product with a sparse matrix: for sorting, then a list of buffers.

    The bytes for sorting are freed before the buffers are allocated. An unsorted matrix is sorted into a new
    one with 40 bytes per entry (three columns of integers, twice). The buffers are row starts and columns in
    32 bits, and a second result in the layout that cuSPARSE writes. A plain product also allocates zeros to
    add to. Seen on an H200: with 600,000 entries and a result of 82 MB, a product takes 176 MB for a moment.
    """
    buffers = [out.numel() * out.element_size()] if name == "aten::mm" else []
    sorting = 0
    for tensor in filter(is_sparse, args):
        count = count_nonzeros(tensor)
        if not tensor.is_coalesced():
            sorting += 40 * count
            buffers += [count * tensor.element_size(), 8 * tensor.sparse_dim() * count]
        buffers += [4 * (tensor.shape[0] + 1), 4 * count]
    return sorting, [*buffers, out.numel() * out.element_size()]


# TorchScript. Its interpreter cannot run on fake tensors, and calls operations below the level at which they
# are recorded. So while a job is traced, torch.jit.script and torch.jit.trace return their argument
# unchanged, and the functions run as Python. On a GPU TorchScript may fuse pointwise operations, which saves
# memory; the estimate states that this is not counted.


called_scripts: dict[str, None] = {}
"""Names of called functions under torch.jit.script, in the order of first calls."""


def disable_scripting() -> None:
    """Make torch.jit.script and torch.jit.trace return functions and modules unchanged."""
    # As torch itself does under PYTORCH_JIT=0: script classes and their methods stay Python too.
    torch.jit._state.disable()
    torch.jit.script = _fake_script
    torch.jit.trace = _fake_trace
    torch.jit.trace_module = lambda module, *_, **__: module
    torch.jit.freeze = lambda module, *_, **__: module
    torch.jit.optimize_for_inference = lambda module, *_, **__: module


def _fake_script(obj: Any = None, *_: Any, **__: Any) -> Any:
    """Return a function that records its calls; return modules and classes unchanged."""
    if not inspect.isfunction(obj):
        return obj

    @functools.wraps(obj)
    def run_recorded(*args: Any, **kwargs: Any) -> Any:
        called_scripts[obj.__qualname__] = None
        return obj(*args, **kwargs)

    return run_recorded


def _fake_trace(func: Any = None, *_: Any, **__: Any) -> Any:
    """Return the function or module unchanged."""
    return func


def list_script_assumptions() -> tuple[str, ...]:
    """Return the assumption about called scripts for the estimate, if any was called."""
    if not called_scripts:
        return ()
    names = ", ".join(list(called_scripts)[:3]) + (", ..." if len(called_scripts) > 3 else "")  # noqa: PLR2004 - enough to find
    return (f"functions under torch.jit.script ({names}) are followed as plain Python, without its fusion",)
