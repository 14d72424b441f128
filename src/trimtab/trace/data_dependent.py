"""Infer values that fake tensors do not have, such as the share of set mask entries or the range of indices.

Jobs need them for `.item()`, `nonzero`, boolean masks and branches. Results of known integers (positions,
lengths, random tokens) are computed for real on the host. Other values are derived from the operations: an
argmax over eight experts is in 0..7, so one expert gets an eighth of the tokens. Indices that the model
computes have example values, which are evenly spread. Counts, orders and offsets are computed from them for
real, so the sizes of slices add up. The rest is assumed, and the estimate lists the assumptions.
"""

from __future__ import annotations

import operator
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from trimtab.trace.result_cache import ResultCache

if TYPE_CHECKING:
    from collections.abc import Callable

HALF = 0.5
REAL_ATTRIBUTE = "_trimtab_real"
"""Attribute of a fake tensor with known values: a real tensor on the host."""
EXAMPLE_ATTRIBUTE = "_trimtab_example"
"""Attribute of a fake tensor with assumed values: an `Example`."""
SPREAD_NOTE = "indices that follow from data, such as the experts of tokens, are taken to be evenly spread"
HALF_NOTE = "half of the entries of a mask whose values follow from data are taken to be set"
ORDER_NOTE = "a check that no number of one tensor is above that of another is taken to hold"
LIMIT_NOTE = "a check that all numbers of a tensor are on one side of a limit is taken to hold"
ITEM_NOTE = "a number read from the device with .item() is taken to be 1"
EQUAL_NOTE = "a check that all numbers of two tensors are equal is taken to hold"
CONSTANT_SHARES = {"aten::isfinite": 1.0, "aten::isnan": 0.0, "aten::isinf": 0.0}
SAME_VALUE_OPS = {
    "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::alias", "aten::detach", "aten::clone",
    "aten::_to_copy", "aten::expand", "aten::unsqueeze", "aten::squeeze", "aten::slice", "aten::select",
    "aten::permute", "aten::transpose", "aten::t", "aten::split", "aten::repeat", "aten::contiguous",
    "aten::copy_",
}  # fmt: skip


class Example(NamedTuple):
    """Assumed values of a tensor."""

    values: torch.Tensor
    """A real tensor on the host."""
    note: str
    """What the user has to know once a size follows from them."""


INDEX_OPS = {"aten::topk": 2, "aten::max": 1, "aten::min": 1, "aten::sort": 1}
"""Operations that return values and indices, with the position of their `dim` argument."""
SUM_OPS = ("aten::sum", "aten::count_nonzero")
FILL_OPS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "aten::full": lambda args: args[1],
    "aten::scalar_tensor": lambda args: args[0],
    "aten::zeros": lambda _: 0,
    "aten::zeros_like": lambda _: 0,
    "aten::ones": lambda _: 1,
    "aten::ones_like": lambda _: 1,
}
"""Operations that set all entries to the same value: that value, from the arguments."""
RAGGED_ATTRIBUTE = "_trimtab_ragged"
"""Attribute of a tensor whose length depends on values that the model computes: that length."""
DRAWN_ATTRIBUTE = "_trimtab_drawn"
"""Attribute of a tensor with known values that follow from random numbers of a step."""
VALUE_ATTRIBUTES = (
    DRAWN_ATTRIBUTE, REAL_ATTRIBUTE, EXAMPLE_ATTRIBUTE, RAGGED_ATTRIBUTE, "_trimtab_value", "_trimtab_share",
    "_trimtab_range", "_trimtab_order", "_trimtab_compared",
)  # fmt: skip
"""Attributes of a fake tensor that say something about its values."""
PUT_WORDS = ("index_put", "index_add", "index_copy", "index_fill", "scatter")
"""Words in operations whose result is as long as their first argument."""
VALUE_KEEPING_OPS = {"aten::_amp_foreach_non_finite_check_and_unscale_"}
"""Operations in place that leave known values valid: this one sets a flag only on overflow."""


COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "aten::gt": operator.gt,
    "aten::ge": operator.ge,
    "aten::lt": operator.lt,
    "aten::le": operator.le,
    "aten::eq": operator.eq,
    "aten::ne": operator.ne,
}
LIMIT_OPS = {"aten::gt", "aten::ge", "aten::lt", "aten::le"}
FACTORY_OPS = {
    "aten::arange", "aten::randint", "aten::full", "aten::zeros", "aten::ones", "aten::eye",
    "aten::scalar_tensor", "aten::randperm", "aten::rand", "aten::tril_indices", "aten::triu_indices",
}  # fmt: skip
"""Operations whose result is known without any input. Random integers, and a few random floats, are really
drawn."""
MAX_REAL_INTEGERS = 2**22
"""Largest number of integers or booleans that are computed for real in addition to the fake tensor."""
MAX_REAL_FLOATS = 2**18
DRAWING_OPS = {"aten::randint", "aten::randperm", "aten::rand"}
"""Operations in FACTORY_OPS that draw random numbers."""
NMS = "torchvision::nms"
COMPARE_OPS = {
    "aten::equal": (False, "tensors that torch.equal compares are taken to differ"),
    "aten::allclose": (True, "tensors that torch.allclose compares are taken to be close"),
}
"""Operations that compare whole tensors: the assumed result, and how it is named to the user."""
NEARLY_ONE = 1 - 2**-7
"""A random number above every usual probability to skip a layer, and below 1 in all dtypes."""


class ValueTracker:
    """Tracks known values, shares of set mask entries and ranges of indices from operation to operation."""

    def __init__(self, assume: Callable[[str], None]) -> None:
        self.assume = assume
        self.results = ResultCache()
        self.has_ragged = False
        """Whether any tensor has a length that depends on computed values."""
        self.is_training = False
        """Whether steps run: random numbers of the batch are the same in every step."""
        self.has_drawn_sizes = False
        """Whether a size in a step followed from random numbers of that step."""
        self._answers: set[int] = set()
        """Integers that were read from example values."""

    def carry_ragged(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Mark results whose length comes from an input with a length that depends on computed values."""
        if name == "aten::split_with_sizes" and len(args[1]) > 1 and self._answers.issuperset(args[1]):
            self.has_ragged = True
            for piece in out:
                setattr(piece, RAGGED_ATTRIBUTE, piece.shape[args[2] if len(args) > 2 else 0])  # noqa: PLR2004
        if not self.has_ragged:
            return
        puts = name.endswith("_") or any(word in name for word in PUT_WORDS)
        inputs = tree_leaves(args[:1] if puts else (args, kwargs))
        lengths = {getattr(leaf, RAGGED_ATTRIBUTE) for leaf in inputs if hasattr(leaf, RAGGED_ATTRIBUTE)}
        if not lengths:
            return
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and lengths.intersection(leaf.shape):
                setattr(leaf, RAGGED_ATTRIBUTE, max(lengths.intersection(leaf.shape)))

    def _mark_ragged(self, mask: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Mark a result whose length is the number of set mask entries, unless it is equal in all steps.

        Other known masks depend only on the batch, and a measured run uses one batch.
        """
        if not hasattr(mask, "_trimtab_real") or hasattr(mask, DRAWN_ATTRIBUTE):
            self.has_ragged = True
            setattr(out, RAGGED_ATTRIBUTE, self.count_set(mask))
        return out

    def estimate_share(self, mask: torch.Tensor) -> float:
        """Return the share of a mask's entries that are set; one half if nothing is known."""
        share = getattr(mask, "_trimtab_share", None)
        if hasattr(mask, "_trimtab_real"):
            with _disable_current_modes():
                return float(mask._trimtab_real.double().mean())
        if share is None:
            self.assume(HALF_NOTE)
            return HALF
        return float(share)

    def compute_real(  # noqa: C901 - one case for each kind
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Compute the result for real on the host if all inputs are known: positions, lengths, masks."""
        if args and type(args[0]) is FakeTensor and not _has_values(args[0]):
            # Most operations end here: their first argument is not known.
            return
        changes = name.endswith("_")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        has_known_inputs = all(_is_known(tensor, in_place=changes) for tensor in inputs)
        if not has_known_inputs or not (inputs or name in FACTORY_OPS):
            if changes and args:
                _forget_values(args[0])
            return
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not results or not all(_is_worth_computing(result) for result in results):
            return
        notes = [example.note for tensor in inputs if (example := read_example(tensor)) is not None]
        if changes and notes and hasattr(args[0], REAL_ATTRIBUTE):
            # Values that do not depend on data must not change where views of them are known.
            with _disable_current_modes():
                setattr(
                    args[0], EXAMPLE_ATTRIBUTE, Example(getattr(args[0], REAL_ATTRIBUTE).clone(), notes[0])
                )
            delattr(args[0], REAL_ATTRIBUTE)
        try:
            real = _run_on_host(func, name, args, kwargs)
        except Exception:  # noqa: BLE001 - a value that cannot be computed stays unknown
            return
        if name == "aten::rand" and isinstance(real, torch.Tensor) and real.numel() == 1:
            # Models draw a number and skip a layer if it is small. The step with the peak skips none.
            self.assume("layers that are skipped at random are taken to run")
            with _disable_current_modes():
                real.fill_(NEARLY_ONE)
        is_drawn = self.is_training and name in DRAWING_OPS and out.numel() > 1
        is_drawn = is_drawn or any(hasattr(tensor, DRAWN_ATTRIBUTE) for tensor in inputs)
        for fake, value in zip(results, tree_leaves(real), strict=False):
            if isinstance(value, torch.Tensor) and value.shape == fake.shape:
                if is_drawn:
                    setattr(fake, DRAWN_ATTRIBUTE, True)
                if notes:
                    setattr(fake, EXAMPLE_ATTRIBUTE, Example(value, notes[0]))
                else:
                    setattr(fake, REAL_ATTRIBUTE, value)

    def record_values(  # noqa: C901, PLR0912 - one case for each kind
        self, name: str, args: tuple[Any, ...], out: Any
    ) -> None:
        """Record what follows from an operation about the values of its result."""
        if name in INDEX_OPS:
            if isinstance(out, tuple | list) and len(out) == 2:  # noqa: PLR2004 - values and indices
                position = INDEX_OPS[name]
                dim = args[position] if len(args) > position else -1
                reach = args[0].shape[dim] if args[0].dim() else 1
                _set_range(out[1], reach)
                if not _has_values(args[0]):
                    keeps_dim = out[1].dim() == args[0].dim()
                    _set_spread_indices(out[1], reach, dim if keeps_dim else -1, chooses=name != "aten::sort")
            return
        if (
            name.endswith("_")
            and name not in VALUE_KEEPING_OPS
            and args
            and hasattr(args[0], "_trimtab_value")
        ):
            del args[0]._trimtab_value
        if not isinstance(out, torch.Tensor):
            return
        if name == "aten::argmax":
            reach = args[0].shape[args[1]] if len(args) > 1 and args[1] is not None else args[0].numel()
            _set_range(out, reach)
            if not _has_values(args[0]):
                _set_spread_indices(out, reach)
        elif name in ("aten::bincount", "aten::histc"):
            if not _has_values(args[0]) and not any(isinstance(arg, torch.Tensor) for arg in args[1:2]):
                _set_counts(out, args[0].numel(), SPREAD_NOTE)
        elif name in ("aten::scatter", "aten::scatter_") and not isinstance(args[3], torch.Tensor):
            self._record_one_hot(args, out)
        elif name == "aten::randint":
            _set_range(out, args[0] if isinstance(args[0], int) else 0)
        elif name in FILL_OPS:
            out._trimtab_value = value = FILL_OPS[name](args)  # type: ignore[attr-defined]
            out._trimtab_share = float(bool(value))  # type: ignore[attr-defined]
        elif name in SAME_VALUE_OPS and args and isinstance(args[0], torch.Tensor):
            source = args[1] if name == "aten::copy_" else args[0]
            for tag in ("_trimtab_share", "_trimtab_range", "_trimtab_value"):
                if hasattr(source, tag):
                    setattr(out, tag, getattr(source, tag))
        elif name in SUM_OPS and not _has_values(args[0]):
            share = getattr(args[0], "_trimtab_share", HALF if args[0].dtype == torch.bool else None)
            if share is not None and not out.dtype.is_floating_point:
                note = SPREAD_NOTE if hasattr(args[0], "_trimtab_share") else HALF_NOTE
                _set_counts(out, round(share * args[0].numel()), note)
        elif out.dtype == torch.bool:
            self._record_mask(name, args, out)

    def _record_one_hot(self, args: tuple[Any, ...], out: torch.Tensor) -> None:
        """Record the share of entries that get a value, where all others are zero."""
        target, dim, index, value = args[:4]
        is_zero = getattr(target, "_trimtab_value", None) == 0 or getattr(target, "_trimtab_share", None) == 0
        if is_zero and value and index.numel() and not isinstance(dim, torch.Tensor):
            for tensor in {id(target): target, id(out): out}.values():
                if tensor is out or out is target:
                    tensor._trimtab_share = index.shape[dim] / target.shape[dim]

    def _record_mask(  # noqa: C901, PLR0912 - one case for each kind
        self, name: str, args: tuple[Any, ...], out: torch.Tensor
    ) -> None:
        share: float | None = CONSTANT_SHARES.get(name)
        if name in COMPARISONS and (answer := _compare_number(name, args)) is not None:
            # The same as of the number that `.item()` would read.
            out._trimtab_compared, share = True, float(answer)  # type: ignore[attr-defined]
        elif name in {"aten::eq", "aten::ne"}:
            reach = getattr(args[0], "_trimtab_range", None) or getattr(args[1], "_trimtab_range", None)
            value = getattr(args[0], "_trimtab_value", None)
            if reach:
                share = 1 / reach if name == "aten::eq" else 1 - 1 / reach
            elif value is not None and not isinstance(args[1], torch.Tensor):
                share = float((value == args[1]) == (name == "aten::eq"))
            elif name == "aten::eq" and _are_floats(args[:2]):
                out._trimtab_order = EQUAL_NOTE  # type: ignore[attr-defined]
        elif name in ("aten::logical_not", "aten::bitwise_not"):
            opposite = getattr(args[0], "_trimtab_share", None)
            share = None if opposite is None else 1 - opposite
        elif name in ("aten::any", "aten::logical_or", "aten::bitwise_or"):
            source_share = getattr(args[0], "_trimtab_share", HALF)
            reduction = args[0].numel() / max(1, out.numel())
            share = min(1.0, source_share * max(reduction, 1))
        elif name in ("aten::ge", "aten::le") and isinstance(args[1], torch.Tensor):
            out._trimtab_order = ORDER_NOTE  # type: ignore[attr-defined]
        elif name in LIMIT_OPS and _are_floats(args[:1]):
            out._trimtab_order = LIMIT_NOTE  # type: ignore[attr-defined]
        elif name == "aten::all" and (note := getattr(args[0], "_trimtab_order", "")):
            self.assume(note)
            share = 1.0
        elif name == "aten::all":
            # In an unknown mask, some entries are set and some are not.
            share = float(getattr(args[0], "_trimtab_share", HALF) == 1)
        elif name in ("aten::ones", "aten::ones_like"):
            share = 1.0
        elif name in ("aten::zeros", "aten::zeros_like"):
            share = 0.0
        if share is not None:
            out._trimtab_share = share  # type: ignore[attr-defined]

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation; if its result depends on values, return an inferred or assumed result."""
        constant = getattr(args[0], "constant", None) if name == "aten::_to_copy" and args else None
        if constant is not None:
            # A constant is a real tensor on the host; it cannot be copied to the fake device.
            args[0].constant = None
        try:
            out = self.results.run(func, args, kwargs)
        except DataDependentOutputException:
            if name in ("aten::_local_scalar_dense", "aten::item"):
                return self._answer_item(args[0])
            if name == "aten::is_nonzero":
                return bool(self._answer_item(args[0]))
            if name in COMPARE_OPS:
                return self._answer_comparison(func, name, args, kwargs)
            raise
        except DynamicOutputShapeException:
            result = self._make_dynamic_result(func, name, args, kwargs)
            if result is None:
                raise
            return result
        if constant is not None and constant.numel() == 1:
            with _disable_current_modes():
                out._trimtab_value = constant.item()
        return out

    def read_values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return known or assumed values on the host; None if there are none."""
        example = read_example(tensor)
        if example is None:
            return getattr(tensor, REAL_ATTRIBUTE, None)
        self.assume(example.note)
        with _disable_current_modes():
            if not example.values.dtype.is_floating_point:
                self._answers.update(map(int, example.values.unique()))
        return example.values

    def _note_drawn(self, tensor: torch.Tensor) -> None:
        self.has_drawn_sizes = self.has_drawn_sizes or hasattr(tensor, DRAWN_ATTRIBUTE)

    def _answer_item(self, tensor: torch.Tensor) -> float | int | bool:
        """Return the known or assumed result of `.item()`."""
        if hasattr(tensor, "_trimtab_real"):
            self._note_drawn(tensor)
            with _disable_current_modes():
                return tensor._trimtab_real.item()
        if hasattr(tensor, "_trimtab_value"):
            return tensor._trimtab_value
        if read_example(tensor) is not None and (values := self.read_values(tensor)) is not None:
            with _disable_current_modes():
                return values.item()
        if tensor.dtype == torch.bool:
            if hasattr(tensor, "_trimtab_compared"):
                self.assume(ITEM_NOTE)
            return self.estimate_share(tensor) >= HALF
        reach = getattr(tensor, "_trimtab_range", None)
        if reach:
            return int(reach - 1)
        self.assume(ITEM_NOTE)
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _answer_comparison(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return the known or assumed result of a comparison of two whole tensors."""
        if args[0] is args[1]:
            return True
        if all(hasattr(tensor, REAL_ATTRIBUTE) for tensor in args[:2]):
            with _disable_current_modes():
                return bool(func(*map(_to_real, args), **kwargs))
        answer, note = COMPARE_OPS[name]
        self.assume(note)
        return answer

    def count_set(self, mask: torch.Tensor) -> int:
        """Return the known or assumed number of set entries of a mask."""
        if hasattr(mask, "_trimtab_real"):
            self._note_drawn(mask)
            with _disable_current_modes():
                return int(torch.count_nonzero(mask._trimtab_real))
        example = read_example(mask)
        if example is not None:
            self.assume(example.note)
            with _disable_current_modes():
                return int(torch.count_nonzero(example.values))
        if mask.dtype != torch.bool and not hasattr(mask, "_trimtab_share"):
            self.assume("half of the entries of a tensor passed to nonzero are taken to be non-zero")
            return max(1, mask.numel() // 2)
        return max(1, round(self.estimate_share(mask) * mask.numel()))

    def _make_dynamic_result(  # noqa: PLR0911 - one return for each operation
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of an operation whose result size depends on values; None if not supported."""
        if name == "aten::nonzero":
            count = self.count_set(args[0])
            positions = torch.empty((count, args[0].dim()), dtype=torch.int64, device=args[0].device)
            return self._mark_ragged(args[0], positions)
        if name == "aten::masked_select":
            count = self.count_set(args[1])
            return self._mark_ragged(args[1], args[0].new_empty((count,)))
        if name == "aten::index":
            taken = func(args[0], self.replace_masks(args[1]), **kwargs)
            for mask in filter(_is_mask, args[1]):
                self._mark_ragged(mask, taken)
            return taken
        if all(map(_has_values, (leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)))):
            return self._make_known_result(func, name, args, kwargs)
        if name in ("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"):
            self.assume("all entries of a tensor passed to unique are taken to differ")
            size = args[0].numel()
            empty = args[0].new_empty
            return (empty((size,)), empty((size,), dtype=torch.int64), empty((size,), dtype=torch.int64))
        if name == "aten::bincount":
            reach = getattr(args[0], "_trimtab_range", None) or (args[2] if len(args) > 2 else 1)  # noqa: PLR2004
            return torch.empty((max(1, reach),), dtype=torch.int64, device=args[0].device)
        if name == NMS:
            self.assume("half of the boxes are taken to be left by non-maximum suppression")
            self.has_ragged = True
            kept = args[0].new_empty((max(1, len(args[0]) // 2),), dtype=torch.int64)
            setattr(kept, RAGGED_ATTRIBUTE, len(kept))
            _set_range(kept, len(args[0]))
            return kept
        if name == "aten::repeat_interleave":
            self.assume("repeat_interleave with counts from the device is taken to double its input")
            return args[0].new_empty((2 * args[0].numel(),))
        return None

    def _make_known_result(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return fake results of the sizes that an operation has with the known or assumed values."""
        for leaf in tree_leaves(args):
            if isinstance(leaf, torch.Tensor):
                self._note_drawn(leaf)
                if (example := read_example(leaf)) is not None:
                    self.assume(example.note)
                    self.has_ragged = True
        real = _run_on_host(func, name, args, kwargs)
        return tree_map_only(
            torch.Tensor, lambda result: args[0].new_empty(tuple(result.shape), dtype=result.dtype), real
        )

    def replace_masks(self, indices: Any) -> list[Any]:
        """Return the indices with each boolean mask replaced by fake positions."""
        replaced: list[Any] = []
        for index in indices:
            if _is_mask(index):
                count = self.count_set(index)
                replaced += [
                    torch.empty((count,), dtype=torch.int64, device=index.device) for _ in range(index.dim())
                ]
            else:
                replaced.append(index)
        return replaced


def patch_value_reads(library: torch.library.Library, values: ValueTracker) -> None:
    """Let `Tensor.numpy()`, formatting and `tensor_split` read known or assumed values on the host."""
    read_array, format_tensor = torch.Tensor.numpy, torch.Tensor.__format__
    split = torch.ops.aten.tensor_split

    def numpy(tensor: FakeTensor, *, force: bool = False) -> Any:
        is_readable = force or tensor.fake_device.type == "cpu"
        read = values.read_values(tensor) if is_readable else None
        if read is None:
            return read_array(tensor, force=force)
        with _disable_current_modes():
            return read.clone().numpy()

    def format_number(tensor: FakeTensor, spec: str) -> str:
        # Names such as f"expert_{index}" and printed losses read the number from the device.
        return format_tensor(tensor, spec) if tensor.dim() else format(tensor.detach().item(), spec)

    def tensor_split(source: torch.Tensor, places: torch.Tensor, dim: int = 0) -> Any:
        read = values.read_values(places)
        if read is None:
            return split.tensor_indices_or_sections.decompose(source, places, dim)
        with _disable_current_modes():
            listed = read.tolist()
        return split.indices(source, listed, dim) if isinstance(listed, list) else split(source, listed, dim)

    FakeTensor.numpy = numpy  # type: ignore[method-assign,assignment]
    FakeTensor.__format__ = format_number  # type: ignore[method-assign,assignment]
    library.impl("tensor_split.tensor_indices_or_sections", tensor_split, "AutogradCUDA")


def read_known_values(tensor: torch.Tensor) -> list[Any] | None:
    """Return the values of a tensor, or None if they are unknown without running the job."""
    real = getattr(tensor, REAL_ATTRIBUTE, None)
    if real is None:
        real = getattr(tensor, "constant", None) if isinstance(tensor, FakeTensor) else tensor
    if real is None:
        return None
    with _disable_current_modes():
        values: list[Any] = real.tolist()
    return values


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _is_worth_computing(tensor: torch.Tensor) -> bool:
    is_integer = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return tensor.numel() <= (MAX_REAL_INTEGERS if is_integer else MAX_REAL_FLOATS)


def read_example(tensor: Any) -> Example | None:
    """Return the assumed values of a tensor; None if it has none, or has known values."""
    return None if hasattr(tensor, REAL_ATTRIBUTE) else getattr(tensor, EXAMPLE_ATTRIBUTE, None)


def _are_floats(values: tuple[Any, ...]) -> bool:
    """Whether all values are tensors of floating-point numbers: equal ones are copies of each other."""
    return all(isinstance(value, torch.Tensor) and value.dtype.is_floating_point for value in values)


def _compare_number(name: str, args: tuple[Any, ...]) -> bool | None:
    """Return how a number that the model computes compares with a plain one, if it is taken to be 1.

    None for masks: several numbers, or one of which more is known.
    """
    tensor, limit = args[:2]
    if isinstance(limit, torch.Tensor):
        # A number that is not equal to itself would not be a number.
        return name == "aten::eq" if limit is tensor and name in ("aten::eq", "aten::ne") else None
    has_more = any(hasattr(tensor, tag) for tag in ("_trimtab_value", "_trimtab_range", EXAMPLE_ATTRIBUTE))
    if tensor.numel() != 1 or tensor.dtype == torch.bool or tensor.dtype.is_complex or has_more:
        return None
    return COMPARISONS[name](1.0, float(limit))


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor has known or assumed values."""
    return REAL_ATTRIBUTE in tensor.__dict__ or EXAMPLE_ATTRIBUTE in tensor.__dict__


def _forget_values(tensor: Any) -> None:
    for name in (REAL_ATTRIBUTE, EXAMPLE_ATTRIBUTE, DRAWN_ATTRIBUTE):
        if hasattr(tensor, name):
            delattr(tensor, name)


def _is_known(tensor: torch.Tensor, *, in_place: bool) -> bool:
    """Whether the values of an input are known or assumed, or are those of a list in torch.tensor().

    An operation in place would change a real tensor that belongs to the job.
    """
    return _has_values(tensor) or (type(tensor) is torch.Tensor and not in_place)


def _run_on_host(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on known or assumed values."""
    with _disable_current_modes():
        host = _to_real(args)
        dtype = None
        if name == "aten::histc" and not host[0].dtype.is_floating_point:
            # The host counts floating point numbers only.
            dtype, host = host[0].dtype, (host[0].double(), *host[1:])
        real = func(*host, **_to_real({k: v for k, v in kwargs.items() if k != "pin_memory"}))
        return real if dtype is None else real.to(dtype)


def _to_real(value: Any) -> Any:
    """Return arguments with each fake tensor replaced by its values, and the device by the host."""
    if isinstance(value, torch.Tensor):
        example = read_example(value)
        return getattr(value, REAL_ATTRIBUTE, value) if example is None else example.values
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list | tuple):
        return type(value)(_to_real(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_real(item) for key, item in value.items()}
    return value


def _set_spread_indices(indices: torch.Tensor, reach: int, dim: int = -1, *, chooses: bool = True) -> None:
    """Give indices below `reach` evenly spread example values, which differ along `dim` for `topk`.

    `sort` puts all places in an order: it is taken to change nothing.
    """
    if not reach or not _is_worth_computing(indices):
        return
    with _disable_current_modes():
        shape = tuple(indices.shape)
        if indices.dim() and shape[dim] > 1 and (not chooses or shape[dim] <= reach):
            last = [*shape[:dim], *shape[dim:][1:]]
            rows = torch.arange(prod(last)).view(*last, 1) if chooses else torch.zeros(*last, 1).long()
            along = torch.arange(shape[dim]) * (max(1, reach // shape[dim]) if chooses else 1)
            values = ((rows + along) % reach).movedim(-1, dim).contiguous()
        else:
            values = (torch.arange(prod(shape)) % reach).view(shape)
        example = Example(values.to(indices.dtype), SPREAD_NOTE)
    setattr(indices, EXAMPLE_ATTRIBUTE, example)


def _set_counts(out: torch.Tensor, total: int, note: str) -> None:
    """Give counts whose sum is known equal example values."""
    bins = out.numel()
    if not bins or not _is_worth_computing(out):
        return
    with _disable_current_modes():
        values = torch.full((bins,), total // bins, dtype=out.dtype)
        values[: total % bins] += 1
        example = Example(values.view(tuple(out.shape)), note)
    setattr(out, EXAMPLE_ATTRIBUTE, example)


def _set_range(indices: torch.Tensor, reach: int) -> None:
    if reach:
        indices._trimtab_range = int(reach)  # type: ignore[attr-defined]
