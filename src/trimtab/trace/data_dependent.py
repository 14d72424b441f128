"""Infer values that fake tensors do not have, such as the share of set mask entries or the range of indices.

Jobs need them for `.item()`, `nonzero`, boolean masks and branches. Results of known integers (positions,
lengths, random tokens) are computed for real on the host. Other values are derived from the operations: an
argmax over eight experts is in 0..7, so one expert gets an eighth of the tokens. The rest is assumed, and the
estimate lists the assumptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from trimtab.trace.result_cache import ResultCache

if TYPE_CHECKING:
    from collections.abc import Callable

HALF = 0.5
REAL_ATTRIBUTE = "_trimtab_real"
"""Attribute of a fake tensor with known values: a real tensor on the host."""
CONSTANT_SHARES = {"aten::isfinite": 1.0, "aten::isnan": 0.0, "aten::isinf": 0.0}
SAME_VALUE_OPS = {
    "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::alias", "aten::detach", "aten::clone",
    "aten::_to_copy", "aten::expand", "aten::unsqueeze", "aten::squeeze", "aten::slice", "aten::select",
    "aten::permute", "aten::transpose", "aten::t", "aten::split", "aten::repeat", "aten::contiguous",
    "aten::copy_",
}  # fmt: skip


INDEX_OPS = {"aten::topk": 2, "aten::max": 1, "aten::min": 1, "aten::sort": 1}
"""Operations that return values and indices, with the position of their `dim` argument."""
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
VALUE_ATTRIBUTES = (
    REAL_ATTRIBUTE, RAGGED_ATTRIBUTE, "_trimtab_value", "_trimtab_share", "_trimtab_range", "_trimtab_order",
)  # fmt: skip
"""Attributes of a fake tensor that say something about its values."""
PUT_WORDS = ("index_put", "index_add", "index_copy", "index_fill", "scatter")
"""Words in operations whose result is as long as their first argument."""
VALUE_KEEPING_OPS = {"aten::_amp_foreach_non_finite_check_and_unscale_"}
"""Operations in place that leave known values valid: this one sets a flag only on overflow."""


FACTORY_OPS = {
    "aten::arange", "aten::randint", "aten::full", "aten::zeros", "aten::ones", "aten::eye",
    "aten::scalar_tensor", "aten::randperm", "aten::rand", "aten::tril_indices", "aten::triu_indices",
}  # fmt: skip
"""Operations whose result is known without any input. Random integers, and a few random floats, are really
drawn."""
MAX_REAL_INTEGERS = 2**22
"""Largest number of integers or booleans that are computed for real in addition to the fake tensor."""
MAX_REAL_FLOATS = 2**18
NEARLY_ONE = 1 - 2**-7
"""A random number above every usual probability to skip a layer, and below 1 in all dtypes."""


class ValueTracker:
    """Tracks known values, shares of set mask entries and ranges of indices from operation to operation."""

    def __init__(self, assume: Callable[[str], None]) -> None:
        self.assume = assume
        self.results = ResultCache()
        self.has_ragged = False
        """Whether any tensor has a length that depends on computed values."""

    def carry_ragged(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Mark results whose length comes from an input with a length that depends on computed values."""
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
        """Mark a result whose length is the number of set mask entries, unless the mask is known.

        Known masks depend only on the batch, and a measured run uses one batch.
        """
        if not hasattr(mask, "_trimtab_real"):
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
            self.assume("half of the entries of a mask whose values follow from data are taken to be set")
            return HALF
        return float(share)

    def compute_real(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Compute the result for real on the host if all inputs are known: positions, lengths, masks."""
        if args and type(args[0]) is FakeTensor and REAL_ATTRIBUTE not in args[0].__dict__:
            # Most operations end here: their first argument is not known.
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        has_known_inputs = all(_is_known(tensor, in_place=name.endswith("_")) for tensor in inputs)
        if not has_known_inputs or not (inputs or name in FACTORY_OPS):
            if name.endswith("_") and args and hasattr(args[0], "_trimtab_real"):
                del args[0]._trimtab_real
            return
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not results or not all(_is_worth_computing(result) for result in results):
            return
        try:
            with _disable_current_modes():
                real = func(
                    *_to_real(args), **_to_real({k: v for k, v in kwargs.items() if k != "pin_memory"})
                )
        except Exception:  # noqa: BLE001 - a value that cannot be computed stays unknown
            return
        if name == "aten::rand" and isinstance(real, torch.Tensor) and real.numel() == 1:
            # Models draw a number and skip a layer if it is small. The step with the peak skips none.
            self.assume("layers that are skipped at random are taken to run")
            with _disable_current_modes():
                real.fill_(NEARLY_ONE)
        for fake, value in zip(results, tree_leaves(real), strict=False):
            if isinstance(value, torch.Tensor) and value.shape == fake.shape:
                fake._trimtab_real = value  # type: ignore[attr-defined]

    def record_values(self, name: str, args: tuple[Any, ...], out: Any) -> None:  # noqa: C901 - one case for each kind
        """Record what follows from an operation about the values of its result."""
        if name in INDEX_OPS:
            if isinstance(out, tuple | list) and len(out) == 2:  # noqa: PLR2004 - values and indices
                position = INDEX_OPS[name]
                dim = args[position] if len(args) > position else -1
                _set_range(out[1], args[0].shape[dim] if args[0].dim() else 1)
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
            _set_range(
                out, args[0].shape[args[1]] if len(args) > 1 and args[1] is not None else args[0].numel()
            )
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
        elif out.dtype == torch.bool:
            self._record_mask(name, args, out)

    def _record_mask(  # noqa: C901 - one case for each kind
        self, name: str, args: tuple[Any, ...], out: torch.Tensor
    ) -> None:
        share: float | None = CONSTANT_SHARES.get(name)
        if name in {"aten::eq", "aten::ne"}:
            reach = getattr(args[0], "_trimtab_range", None) or getattr(args[1], "_trimtab_range", None)
            value = getattr(args[0], "_trimtab_value", None)
            if reach:
                share = 1 / reach if name == "aten::eq" else 1 - 1 / reach
            elif value is not None and not isinstance(args[1], torch.Tensor):
                share = float((value == args[1]) == (name == "aten::eq"))
        elif name in ("aten::logical_not", "aten::bitwise_not"):
            opposite = getattr(args[0], "_trimtab_share", None)
            share = None if opposite is None else 1 - opposite
        elif name in ("aten::any", "aten::logical_or", "aten::bitwise_or"):
            source_share = getattr(args[0], "_trimtab_share", HALF)
            reduction = args[0].numel() / max(1, out.numel())
            share = min(1.0, source_share * max(reduction, 1))
        elif name in ("aten::ge", "aten::le") and isinstance(args[1], torch.Tensor):
            out._trimtab_order = True  # type: ignore[attr-defined]
        elif name == "aten::all" and getattr(args[0], "_trimtab_order", False):
            self.assume("a check that no number of one tensor is above that of another is taken to hold")
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
            if name == "aten::equal":
                return False
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

    def _answer_item(self, tensor: torch.Tensor) -> float | int | bool:
        """Return the known or assumed result of `.item()`."""
        if hasattr(tensor, "_trimtab_real"):
            with _disable_current_modes():
                return tensor._trimtab_real.item()
        if hasattr(tensor, "_trimtab_value"):
            return tensor._trimtab_value
        if tensor.dtype == torch.bool:
            return self.estimate_share(tensor) >= HALF
        reach = getattr(tensor, "_trimtab_range", None)
        if reach:
            return int(reach - 1)
        self.assume("a number read from the device with .item() is taken to be 1")
        return 1.0 if tensor.dtype.is_floating_point else 1

    def count_set(self, mask: torch.Tensor) -> int:
        """Return the known or assumed number of set entries of a mask."""
        if hasattr(mask, "_trimtab_real"):
            with _disable_current_modes():
                return int(torch.count_nonzero(mask._trimtab_real))
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
        if name in ("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"):
            self.assume("all entries of a tensor passed to unique are taken to differ")
            size = args[0].numel()
            empty = args[0].new_empty
            return (empty((size,)), empty((size,), dtype=torch.int64), empty((size,), dtype=torch.int64))
        if name == "aten::bincount":
            reach = getattr(args[0], "_trimtab_range", None) or (args[2] if len(args) > 2 else 1)  # noqa: PLR2004
            return torch.empty((max(1, reach),), dtype=torch.int64, device=args[0].device)
        if name == "aten::repeat_interleave":
            counts = read_known_values(args[0])
            if counts is not None:
                return args[0].new_empty((sum(counts),))
            self.assume("repeat_interleave with counts from the device is taken to double its input")
            return args[0].new_empty((2 * args[0].numel(),))
        return None

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


def _is_known(tensor: torch.Tensor, *, in_place: bool) -> bool:
    """Whether the values of an input are known: computed before, or those of a list in torch.tensor().

    An operation in place would change a real tensor that belongs to the job.
    """
    return hasattr(tensor, REAL_ATTRIBUTE) or (type(tensor) is torch.Tensor and not in_place)


def _to_real(value: Any) -> Any:
    """Return arguments with each fake tensor replaced by its real values, and the device by the host."""
    if isinstance(value, torch.Tensor):
        return getattr(value, REAL_ATTRIBUTE, value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list | tuple):
        return type(value)(_to_real(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_real(item) for key, item in value.items()}
    return value


def _set_range(indices: torch.Tensor, reach: int) -> None:
    if reach:
        indices._trimtab_range = int(reach)  # type: ignore[attr-defined]
