"""What can be said of values that fake tensors do not have: how full a mask is, how far indices reach.

Jobs ask such things with `.item()`, `nonzero`, boolean masks and branches. What follows from known whole
numbers (positions, lengths, random tokens) is computed for real on the host; what follows from the operations
(an argmax over eight experts lies in 0..7, so one expert gets an eighth of the tokens) is derived; the rest
is assumed, and the assumption is kept for the estimate to list.
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

if TYPE_CHECKING:
    from collections.abc import Callable

HALF = 0.5
REAL = "_trimtab_real"
"""The attribute of a tensor whose values are known: a tensor on the host that has them."""
ALWAYS = {"aten::isfinite": 1.0, "aten::isnan": 0.0, "aten::isinf": 0.0}
SAME_VALUES = {
    "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::alias", "aten::detach", "aten::clone",
    "aten::_to_copy", "aten::expand", "aten::unsqueeze", "aten::squeeze", "aten::slice", "aten::select",
    "aten::permute", "aten::transpose", "aten::t", "aten::split", "aten::repeat", "aten::contiguous",
    "aten::copy_",
}  # fmt: skip


INDEXING = {"aten::topk": 2, "aten::max": 1, "aten::min": 1, "aten::sort": 1}
"""Operations that return values and indices, with the place of the dimension among their arguments."""
FILLED: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "aten::full": lambda args: args[1],
    "aten::scalar_tensor": lambda args: args[0],
    "aten::zeros": lambda _: 0,
    "aten::zeros_like": lambda _: 0,
    "aten::ones": lambda _: 1,
    "aten::ones_like": lambda _: 1,
}
"""Operations that give every entry one value."""
RAGGED = "_trimtab_ragged"
"""The attribute of a tensor with a length that follows from what the model computes: that length."""
PUTS = ("index_put", "index_add", "index_copy", "index_fill", "scatter")
"""Words in operations whose result is as long as what something is put into."""
KEEPS_VALUES = {"aten::_amp_foreach_non_finite_check_and_unscale_"}
"""Writes a flag that is raised only when numbers overflow, which a trace never sees."""


FACTORIES = {
    "aten::arange", "aten::randint", "aten::full", "aten::zeros", "aten::ones", "aten::eye",
    "aten::scalar_tensor", "aten::randperm", "aten::rand", "aten::tril_indices", "aten::triu_indices",
}  # fmt: skip
"""Operations whose result is known without any input; random whole numbers, and a few random real ones, are
drawn for real."""
MOST_REAL = 2**22
"""Whole numbers and truth values up to this many are computed for real beside the fake tensor."""
MOST_REAL_FLOATS = 2**18
NEARLY_ONE = 1 - 2**-7
"""A random number that is above every usual chance to skip a layer, and below 1 in all dtypes."""


class Values:
    """Shares of set entries and ranges of indices, carried from operation to operation."""

    def __init__(self, assume: Callable[[str], None]) -> None:
        self.assume = assume
        self._ragged = False
        """Whether there is such a tensor at all."""

    def trail(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Carry on which tensors have a length that follows from what the model computes."""
        if not self._ragged:
            return
        puts = name.endswith("_") or any(word in name for word in PUTS)
        given = args[:1] if puts else (args, kwargs)
        lengths = {getattr(leaf, RAGGED) for leaf in tree_leaves(given) if hasattr(leaf, RAGGED)}
        if not lengths:
            return
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and lengths.intersection(leaf.shape):
                setattr(leaf, RAGGED, max(lengths.intersection(leaf.shape)))

    def _as_long_as(self, mask: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Note that a result is as long as a mask has entries set, unless those are known.

        Masks of known numbers follow from the batch, of which a measured run has one.
        """
        if not hasattr(mask, "_trimtab_real"):
            self._ragged = True
            setattr(out, RAGGED, self.count(mask))
        return out

    def share(self, mask: torch.Tensor) -> float:
        """The share of a mask's entries that are set; one half where nothing is known."""
        known = getattr(mask, "_trimtab_share", None)
        if hasattr(mask, "_trimtab_real"):
            with _disable_current_modes():
                return float(mask._trimtab_real.double().mean())
        if known is None:
            self.assume("half of the entries of a mask whose values follow from data are taken to be set")
            return HALF
        return float(known)

    def follow(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Compute for real, on the host, what follows from known whole numbers: positions, lengths, masks."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = all(hasattr(input_, "_trimtab_real") for input_ in inputs)
        if not known or not (inputs or name in FACTORIES):
            if name.endswith("_") and args and hasattr(args[0], "_trimtab_real"):
                del args[0]._trimtab_real
            return
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if not results or not all(_worth_computing(result) for result in results):
            return
        try:
            with _disable_current_modes():
                real = func(*_real(args), **_real({k: v for k, v in kwargs.items() if k != "pin_memory"}))
        except Exception:  # noqa: BLE001 - a value that cannot be had stays unknown
            return
        if name == "aten::rand" and isinstance(real, torch.Tensor) and real.numel() == 1:
            # Models draw one number to skip a layer where it is small. The largest step skips nothing.
            self.assume("layers that are skipped at random are taken to run")
            with _disable_current_modes():
                real.fill_(NEARLY_ONE)
        for fake, value in zip(results, tree_leaves(real), strict=False):
            if isinstance(value, torch.Tensor) and value.shape == fake.shape:
                fake._trimtab_real = value  # type: ignore[attr-defined]

    def learn(self, name: str, args: tuple[Any, ...], out: Any) -> None:  # noqa: C901 - one case a kind
        """Note what an operation says about the values of its result."""
        if name in INDEXING:
            if isinstance(out, tuple | list) and len(out) == 2:  # noqa: PLR2004 - values and indices
                place = INDEXING[name]
                dim = args[place] if len(args) > place else -1
                _set_range(out[1], args[0].shape[dim] if args[0].dim() else 1)
            return
        if name.endswith("_") and name not in KEEPS_VALUES and args and hasattr(args[0], "_trimtab_value"):
            del args[0]._trimtab_value
        if not isinstance(out, torch.Tensor):
            return
        if name == "aten::argmax":
            _set_range(
                out, args[0].shape[args[1]] if len(args) > 1 and args[1] is not None else args[0].numel()
            )
        elif name == "aten::randint":
            _set_range(out, args[0] if isinstance(args[0], int) else 0)
        elif name in FILLED:
            out._trimtab_value = value = FILLED[name](args)  # type: ignore[attr-defined]
            out._trimtab_share = float(bool(value))  # type: ignore[attr-defined]
        elif name in SAME_VALUES and args and isinstance(args[0], torch.Tensor):
            source = args[1] if name == "aten::copy_" else args[0]
            for tag in ("_trimtab_share", "_trimtab_range", "_trimtab_value"):
                if hasattr(source, tag):
                    setattr(out, tag, getattr(source, tag))
        elif out.dtype == torch.bool:
            self._learn_mask(name, args, out)

    def _learn_mask(  # noqa: C901 - one case a kind
        self, name: str, args: tuple[Any, ...], out: torch.Tensor
    ) -> None:
        share: float | None = ALWAYS.get(name)
        if name in {"aten::eq", "aten::ne"}:
            reach = getattr(args[0], "_trimtab_range", None) or getattr(args[1], "_trimtab_range", None)
            value = getattr(args[0], "_trimtab_value", None)
            if reach:
                share = 1 / reach if name == "aten::eq" else 1 - 1 / reach
            elif value is not None and not isinstance(args[1], torch.Tensor):
                share = float((value == args[1]) == (name == "aten::eq"))
        elif name in ("aten::logical_not", "aten::bitwise_not"):
            known = getattr(args[0], "_trimtab_share", None)
            share = None if known is None else 1 - known
        elif name in ("aten::any", "aten::logical_or", "aten::bitwise_or"):
            known = getattr(args[0], "_trimtab_share", HALF)
            times = args[0].numel() / max(1, out.numel())
            share = min(1.0, known * max(times, 1))
        elif name in ("aten::ge", "aten::le") and isinstance(args[1], torch.Tensor):
            out._trimtab_order = True  # type: ignore[attr-defined]
        elif name == "aten::all" and getattr(args[0], "_trimtab_order", False):
            self.assume("a check that no number of one tensor is above that of another is taken to hold")
            share = 1.0
        elif name == "aten::all":
            # Of a mask about which nothing is known, some entries are set and some are not.
            share = float(getattr(args[0], "_trimtab_share", HALF) == 1)
        elif name in ("aten::ones", "aten::ones_like"):
            share = 1.0
        elif name in ("aten::zeros", "aten::zeros_like"):
            share = 0.0
        if share is not None:
            out._trimtab_share = share  # type: ignore[attr-defined]

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and answer for it where the result depends on values."""
        constant = getattr(args[0], "constant", None) if name == "aten::_to_copy" and args else None
        if constant is not None:
            # A constant is a real tensor on the host: it cannot be copied to a device that is not there.
            args[0].constant = None
        try:
            out = func(*args, **kwargs)
        except DataDependentOutputException:
            if name == "aten::_local_scalar_dense":
                return self._scalar(args[0])
            if name == "aten::equal":
                return False
            raise
        except DynamicOutputShapeException:
            found = self._of_unknown_length(func, name, args, kwargs)
            if found is None:
                raise
            return found
        if constant is not None and constant.numel() == 1:
            with _disable_current_modes():
                out._trimtab_value = constant.item()
        return out

    def _scalar(self, tensor: torch.Tensor) -> float | int | bool:
        """A stand-in for `.item()`."""
        if hasattr(tensor, "_trimtab_real"):
            with _disable_current_modes():
                return tensor._trimtab_real.item()
        if hasattr(tensor, "_trimtab_value"):
            return tensor._trimtab_value
        if tensor.dtype == torch.bool:
            return self.share(tensor) >= HALF
        reach = getattr(tensor, "_trimtab_range", None)
        if reach:
            return int(reach - 1)
        self.assume("a number read from the device with .item() is taken to be 1")
        return 1.0 if tensor.dtype.is_floating_point else 1

    def count(self, mask: torch.Tensor) -> int:
        """How many entries of a mask are taken to be set."""
        if hasattr(mask, "_trimtab_real"):
            with _disable_current_modes():
                return int(torch.count_nonzero(mask._trimtab_real))
        if mask.dtype != torch.bool and not hasattr(mask, "_trimtab_share"):
            self.assume("half of the entries of a tensor passed to nonzero are taken to be non-zero")
            return max(1, mask.numel() // 2)
        return max(1, round(self.share(mask) * mask.numel()))

    def _of_unknown_length(  # noqa: PLR0911 - one answer an operation
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Operations whose result is as long as a mask has entries set."""
        if name == "aten::nonzero":
            found = self.count(args[0])
            made = torch.empty((found, args[0].dim()), dtype=torch.int64, device=args[0].device)
            return self._as_long_as(args[0], made)
        if name == "aten::masked_select":
            found = self.count(args[1])
            return self._as_long_as(args[1], args[0].new_empty((found,)))
        if name == "aten::index":
            taken = func(args[0], self.without_masks(args[1]), **kwargs)
            for mask in filter(_is_mask, args[1]):
                self._as_long_as(mask, taken)
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
            self.assume("repeat_interleave with counts from the device is taken to double its input")
            return args[0].new_empty((2 * args[0].numel(),))
        return None

    def without_masks(self, indices: Any) -> list[Any]:
        """Indices with each boolean mask replaced by the positions it would stand for."""
        replaced: list[Any] = []
        for index in indices:
            if _is_mask(index):
                found = self.count(index)
                replaced += [
                    torch.empty((found,), dtype=torch.int64, device=index.device) for _ in range(index.dim())
                ]
            else:
                replaced.append(index)
        return replaced


def known_values(tensor: torch.Tensor) -> list[Any] | None:
    """The values of a tensor, where they are known without running the job."""
    real = getattr(tensor, REAL, None)
    if real is None:
        real = getattr(tensor, "constant", None) if isinstance(tensor, FakeTensor) else tensor
    if real is None:
        return None
    with _disable_current_modes():
        values: list[Any] = real.tolist()
    return values


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _worth_computing(tensor: torch.Tensor) -> bool:
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return tensor.numel() <= (MOST_REAL if whole else MOST_REAL_FLOATS)


def _real(value: Any) -> Any:
    """Arguments with each fake tensor replaced by its real values, and the device by the host."""
    if isinstance(value, torch.Tensor):
        return value._trimtab_real  # type: ignore[attr-defined]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, list | tuple):
        return type(value)(_real(one) for one in value)
    if isinstance(value, dict):
        return {key: _real(one) for key, one in value.items()}
    return value


def _set_range(indices: torch.Tensor, reach: int) -> None:
    if reach:
        indices._trimtab_range = int(reach)  # type: ignore[attr-defined]
