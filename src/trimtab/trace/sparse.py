"""Sparse tensors: products and conversions that torch describes for real sparse tensors alone.

A fake sparse tensor knows its rows, columns and non-zeros, so every result has a known shape. Sizes of
temporary memory follow torch's sources (SparseCUDABlas.cpp, SparseCUDATensorMath.cu) and traces of an H200.
Compressed layouts (CSR, CSC) are traced as coordinates (COO), which is an assumption of the estimate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

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
    return any(is_sparse(one) for one in tree_leaves(tree))


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
        given = next((one for one in tree_leaves(args) if hasattr(one, PARTS)), None)
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
