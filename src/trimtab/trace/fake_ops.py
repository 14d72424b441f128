"""Results of operations that fake tensors cannot answer for: torch describes them only in its CUDA half."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from trimtab.engine.sync_norm import accumulated
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


def _moments(args: tuple[Any, ...]) -> Any:
    """Mean and inverse deviation of each channel, of a batch that is spread over ranks."""
    source = args[0]
    found = source.new_empty((source.shape[1],), dtype=accumulated(source.dtype))
    return found, torch.empty_like(found)


def _combined(args: tuple[Any, ...]) -> Any:
    """The same of all ranks, from one row a rank."""
    found = args[1].new_empty((args[1].shape[1],))
    return found, torch.empty_like(found)


def _sums_of_gradients(args: tuple[Any, ...]) -> Any:
    """Two sums of each channel, and the gradients of weight and bias where they are asked for."""
    source, mean, weight = args[1], args[2], args[4]
    kind = mean.dtype if weight is None else weight.dtype
    sums = [torch.empty_like(mean) if args[5] else None for _ in range(2)]
    own = [source.new_empty((source.shape[1],), dtype=kind) if asked else None for asked in args[6:8]]
    return (*sums, *own)


def _ctc_loss(args: tuple[Any, ...]) -> Any:
    """The loss of each sample, and the sums over all ways to read it."""
    steps, batch = args[0].shape[0], args[0].shape[1]
    longest = args[1].shape[-1] if args[1].dim() > 1 else args[1].numel()
    return args[0].new_empty((batch,)), args[0].new_empty((batch, steps, 2 * longest + 1))


ROW_BYTES = 16
"""What rows of the result of a grouped matrix product are aligned to."""


def _grouped_product(args: tuple[Any, ...]) -> torch.Tensor:
    """A matrix product for each group of rows or columns; by torch's sources of version 2.11.

    The shapes that torch's own Python half gives are for bf16 alone, and CUDA takes fp16 and fp32 too.
    """
    left, right, ends, _, dtype = (*args, None, None, None)[:5]
    groups = left.shape[0] if left.dim() == 3 else right.shape[0] if ends is None else ends.shape[0]  # noqa: PLR2004
    rows, columns = left.shape[-2], right.shape[-1]
    kind = dtype or left.dtype
    wide = -(-columns * kind.itemsize // ROW_BYTES) * ROW_BYTES // kind.itemsize
    if left.dim() == right.dim():
        size, stride = (groups, rows, columns), (rows * wide, wide, 1)
        return torch.empty_strided(size, stride, dtype=kind, device=left.device)
    return torch.empty_strided((rows, columns), (wide, 1), dtype=kind, device=left.device)


def _nothing(_: tuple[Any, ...]) -> None:
    return None


COMPOSITE_WITHOUT_CUDA = ("silu_backward", "mish_backward", "native_channel_shuffle")
"""Operations that a build without CUDA takes apart, and a build with CUDA runs as one kernel."""


def keep_whole(library: torch.library.Library) -> None:
    """Give those operations a CUDA kernel, so that they are not taken apart. It is never run."""

    def never(*_: Any) -> None:
        raise AssertionError("a fake tensor reached a kernel")

    for name in COMPOSITE_WITHOUT_CUDA:
        library.impl(name, never, "CUDA")


def add_bias_in_place(library: torch.library.Library) -> None:
    """Let a linear layer of scattered inputs add its bias to the product, as it does to real tensors."""
    whole = torch.ops.aten.linear.default

    def linear(source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if bias is None or source.dim() < 3 or source.is_contiguous():  # noqa: PLR2004
            return whole.decompose(source, weight, bias)
        # To fake tensors torch adds it into new memory.
        return torch.matmul(source, weight.t()).add_(bias)

    library.impl("linear", linear, "AutogradCUDA")


RESULTS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::batch_norm_stats": _moments,
    "aten::batch_norm_gather_stats_with_counts": _combined,
    "aten::batch_norm_elemt": lambda args: torch.empty_like(args[0]),
    "aten::batch_norm_backward_reduce": _sums_of_gradients,
    "aten::batch_norm_backward_elemt": lambda args: torch.empty_like(args[1]),
    **recurrent.RESULTS,
    "aten::_grouped_mm": _grouped_product,
    "aten::_ctc_loss": _ctc_loss,
    "aten::_ctc_loss_backward": lambda args: torch.empty_like(args[1], memory_format=torch.contiguous_format),
    "aten::_use_cudnn_ctc_loss": lambda _: False,
    "aten::_use_miopen_ctc_loss": lambda _: False,
    "aten::_fused_sgd_": _nothing,
    "aten::_fused_adagrad_": _nothing,
}


DENSE_RESULTS = {"aten::native_layer_norm", "aten::native_layer_norm_backward"}
"""Operations whose first result is dense on CUDA, however its input lies."""


def with_dense_first(out: Any) -> Any:
    """The results with the first one dense."""
    first = out[0]
    if first is None or first.is_contiguous():
        return out
    return (torch.empty(first.shape, dtype=first.dtype, device=first.device), *out[1:])


# Sparse tensors: products and conversions that torch describes for real sparse tensors alone.
#
# A fake sparse tensor knows its rows, columns and non-zeros, so every result has a known shape. Sizes of
# temporary memory follow torch's sources (SparseCUDABlas.cpp, SparseCUDATensorMath.cu) and traces of an H200.
# Compressed layouts (CSR, CSC) are traced as coordinates (COO), which is an assumption of the estimate.


PARTS = "_trimtab_parts"
"""The attribute of a sparse tensor that keeps its indices and values alive."""
PRODUCTS = {"aten::mm", "aten::addmm", "aten::_sparse_addmm"}
MAKES = "aten::_sparse_coo_tensor_with_dims_and_tensors"
COMPRESSED = {"aten::sparse_compressed_tensor", "aten::_sparse_compressed_tensor_unsafe"}
TO_COMPRESSED = {"aten::_to_sparse_csr", "aten::_to_sparse_csc"}
TRANSPOSES = {"aten::t", "aten::transpose"}
NAMES = PRODUCTS | COMPRESSED | TO_COMPRESSED | TRANSPOSES | {"aten::_coalesce"}
"""Operations that `result` may answer for."""
AS_COORDINATES = "sparse tensors in a compressed layout (CSR, CSC) are traced as coordinates (COO)"


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse tensor in coordinates."""
    return isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo


def has_sparse(tree: Any) -> bool:
    """Whether there is a sparse tensor among arguments or results."""
    return any(is_sparse(leaf) for leaf in tree_leaves(tree))


def nonzeros(tensor: torch.Tensor) -> int:
    """How many entries a sparse tensor has, equal places counted apart."""
    return int(tensor._nnz())


def size_bytes(tensor: torch.Tensor) -> int:
    """Bytes of indices and values."""
    count = nonzeros(tensor)
    dense = tensor.shape[tensor.sparse_dim() :].numel()
    return count * (8 * tensor.sparse_dim() + dense * tensor.element_size())


def result(name: str, args: tuple[Any, ...], assume: Callable[[str], None]) -> Any:
    """The result of an operation on sparse tensors; None where torch knows it by itself."""
    if name in COMPRESSED:
        assume(AS_COORDINATES)
        values, size = args[2], args[3]
        return coordinates(values.new_empty((2, values.shape[0]), dtype=torch.int64), values, size)
    if name in TO_COMPRESSED:
        assume(AS_COORDINATES)
        return _copy(args[0])
    if name == "aten::_coalesce":
        return _copy(args[0])
    if name in TRANSPOSES and is_sparse(args[0]):
        # torch copies the entries and swaps rows and columns; they are out of order then.
        first, second = args[1:3] if name == "aten::transpose" else (0, 1)
        size = list(args[0].shape)
        size[first], size[second] = size[second], size[first]
        return _copy(args[0], size, in_order=False)
    if name in PRODUCTS:
        left, right = args[-2:] if name == "aten::mm" else args[1:3]
        if is_sparse(left) or is_sparse(right):
            dense = right if is_sparse(left) else left
            return dense.new_empty((left.shape[0], right.shape[1]))
    return None


def _copy(tensor: torch.Tensor, size: list[int] | None = None, *, in_order: bool = True) -> torch.Tensor:
    """The same entries in new memory; equal places are taken to be few."""
    count, places = nonzeros(tensor), tensor.sparse_dim()
    device, dense = tensor.device, tensor.shape[places:]
    indices = torch.empty((places, count), dtype=torch.int64, device=device)
    values = torch.empty((count, *dense), dtype=tensor.dtype, device=device)
    return coordinates(indices, values, size or tensor.shape, in_order=in_order)


def coordinates(
    indices: torch.Tensor, values: torch.Tensor, size: Any, *, in_order: bool = True
) -> torch.Tensor:
    """Return a sparse tensor of these entries, which keeps them alive."""
    made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        indices.shape[0], values.dim() - 1, list(size), indices, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device, is_coalesced=in_order,
    )  # fmt: skip
    setattr(made, PARTS, (indices, values))
    return made


def parts(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold a tensor's numbers: indices and values of a sparse one, else itself."""
    return getattr(value, PARTS, ()) if is_sparse(value) else (value,)


def keep_parts(name: str, args: tuple[Any, ...], out: Any) -> None:
    """Let indices and values live as long as the sparse tensor that was made of them."""
    if name == MAKES:
        setattr(out, PARTS, args[3:5])
    elif is_sparse(out) and not hasattr(out, PARTS):
        given = next((leaf for leaf in tree_leaves(args) if hasattr(leaf, PARTS)), None)
        if given is not None:
            setattr(out, PARTS, getattr(given, PARTS))


def product_bytes(name: str, args: tuple[Any, ...], out: torch.Tensor) -> tuple[int, list[int]]:
    """What a product with a sparse matrix takes: bytes for sorting, which come back first, then pieces.

    An unsorted matrix is sorted by 40 bytes an entry (three columns of whole numbers and their second copy)
    into a new one. Then row starts and columns in 32 bits, and the result once more in the layout that
    cuSPARSE writes. A plain product also begins with zeros to add to. Seen on an H200: with 600,000 entries
    and a result of 82 MB, a product takes 176 MB for a moment.
    """
    pieces = [out.numel() * out.element_size()] if name == "aten::mm" else []
    sorting = 0
    for tensor in filter(is_sparse, args):
        count = nonzeros(tensor)
        if not tensor.is_coalesced():
            sorting += 40 * count
            pieces += [count * tensor.element_size(), 8 * tensor.sparse_dim() * count]
        pieces += [4 * (tensor.shape[0] + 1), 4 * count]
    return sorting, [*pieces, out.numel() * out.element_size()]


# Functions under torch.jit.script, followed as the Python that they are written in.
#
# The TorchScript interpreter calls operations below the level at which they are watched, and cannot run on
# fake tensors. So while a job is traced, torch.jit.script and torch.jit.trace give back what they are given.
# On a GPU TorchScript may fuse pointwise operations, which saves memory: an estimate says that it does not
# count on that.


called: dict[str, None] = {}
"""Names of the functions under torch.jit.script that were called, in that order."""


def follow_scripts() -> None:
    """Let torch.jit.script and torch.jit.trace leave functions and modules as they are."""
    # What torch itself does under PYTORCH_JIT=0: classes of scripts and their methods stay Python too.
    torch.jit._state.disable()
    torch.jit.script = _script
    torch.jit.trace = _trace
    torch.jit.trace_module = lambda module, *_, **__: module
    torch.jit.freeze = lambda module, *_, **__: module
    torch.jit.optimize_for_inference = lambda module, *_, **__: module


def _script(obj: Any = None, *_: Any, **__: Any) -> Any:
    """The function itself, which notes that it was called; modules and classes as they are."""
    if not inspect.isfunction(obj):
        return obj

    @functools.wraps(obj)
    def followed(*args: Any, **kwargs: Any) -> Any:
        called[obj.__qualname__] = None
        return obj(*args, **kwargs)

    return followed


def _trace(func: Any = None, *_: Any, **__: Any) -> Any:
    """What was to be traced, as it is."""
    return func


def assumptions() -> tuple[str, ...]:
    """What an estimate has to say about scripts."""
    if not called:
        return ()
    names = ", ".join(list(called)[:3]) + (", ..." if len(called) > 3 else "")  # noqa: PLR2004 - enough to find
    return (f"functions under torch.jit.script ({names}) are followed as plain Python, without its fusion",)
