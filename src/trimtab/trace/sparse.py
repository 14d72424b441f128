"""Sparse tensors: products and conversions that torch describes for real sparse tensors alone.

A fake sparse tensor knows its rows, columns and non-zeros, so every result has a known shape. Sizes of
temporary memory follow torch's sources (SparseCUDABlas.cpp, SparseCUDATensorMath.cu); they were not measured.
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
NAMES = PRODUCTS | COMPRESSED | TO_COMPRESSED | {"aten::_coalesce"}
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
        return _coordinates(values.new_empty((2, values.shape[0]), dtype=torch.int64), values, size)
    if name in TO_COMPRESSED:
        assume(AS_COORDINATES)
        return _copy(args[0])
    if name == "aten::_coalesce":
        return _copy(args[0])
    if name in PRODUCTS:
        left, right = args[-2:] if name == "aten::mm" else args[1:3]
        if is_sparse(left) or is_sparse(right):
            dense = right if is_sparse(left) else left
            return dense.new_empty((left.shape[0], right.shape[1]))
    return None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """The same entries in new memory, sorted; equal places are taken to be few."""
    count, places = nonzeros(tensor), tensor.sparse_dim()
    device, dense = tensor.device, tensor.shape[places:]
    indices = torch.empty((places, count), dtype=torch.int64, device=device)
    values = torch.empty((count, *dense), dtype=tensor.dtype, device=device)
    return _coordinates(indices, values, tensor.shape)


def _coordinates(indices: torch.Tensor, values: torch.Tensor, size: Any) -> torch.Tensor:
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        indices.shape[0], values.dim() - 1, list(size), indices, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device, is_coalesced=True,
    )  # fmt: skip


def keep_parts(name: str, args: tuple[Any, ...], out: Any) -> None:
    """Let indices and values live as long as the sparse tensor that was made of them."""
    if name == MAKES:
        setattr(out, PARTS, args[3:5])
    elif is_sparse(out) and not hasattr(out, PARTS):
        given = next((one for one in tree_leaves(args) if hasattr(one, PARTS)), None)
        if given is not None:
            setattr(out, PARTS, getattr(given, PARTS))


def temporary_bytes(tensor: torch.Tensor) -> int:
    """What a product takes for a moment: row numbers in 32 bits, row starts, and a sorted copy."""
    count, rows = nonzeros(tensor), tensor.shape[0]
    sorted_copy = 0 if tensor.is_coalesced() else size_bytes(tensor) + 3 * 8 * count
    return 2 * 4 * count + 4 * (rows + 1) + sorted_copy
