"""Shorten what a script computes without gradients: evaluation, hand-written generation, teachers.

A model that is called without gradients may be called thousands of times before the third optimizer step.
Calls with inputs of the same shapes are followed twice, and once more in each step that they belong to.
Inputs may also differ in size from call to call, as in a loop that generates a text token by token. Once
enough sizes were seen to tell how the outputs depend on them, only clearly larger inputs are followed.
A call that is not followed returns tensors of the right shapes, and its work counts in the step.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.scripts.recorder import ScriptRecorder

FOLLOWED_CALLS = 2
"""Calls with inputs of the same shapes that are followed."""
FOLLOWED_SIZES = 16
"""Calls with inputs of different sizes that are followed before outputs are predicted."""
GROWTH = 1.125
"""Inputs that are larger than all before by this factor are followed all the same."""
SIZES_NOTE = (
    "calls without gradients whose inputs differ only in size: the first are followed, then those that are "
    "12.5% larger than any before; the others repeat their work"
)
Sizes = tuple[int, ...]


def list_leaves(value: Any) -> Iterator[Any]:
    """List the tensors and other values in containers and dataclasses."""
    for part in _list_parts(value) or ():
        yield from list_leaves(part)
    if _list_parts(value) is None:
        yield value


def _list_parts(value: Any) -> list[Any] | None:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, part.name, None) for part in dataclasses.fields(value)]
    return None


def replace_leaves(value: Any, leaves: Iterator[Any]) -> Any:
    """Return a copy of containers and dataclasses with other leaves, in the order of `list_leaves`."""
    parts = _list_parts(value)
    if parts is None:
        return next(leaves)
    changed = [replace_leaves(part, leaves) for part in parts]
    if isinstance(value, tuple):
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    like: Any = copy.copy(value)
    if isinstance(value, list):
        like[:] = changed
    elif isinstance(value, dict):
        for name, part in zip(value, changed, strict=True):
            like[name] = part
    else:
        for part, item in zip(dataclasses.fields(value), changed, strict=True):
            object.__setattr__(like, part.name, item)
    return like


def describe_leaf(leaf: Any) -> tuple[Any, Sizes]:
    """Return the kind of a value, and its sizes: the shape of a tensor, or a whole number itself."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, leaf.dim(), leaf.device.type, leaf.requires_grad), tuple(leaf.shape)
    if isinstance(leaf, int) and not isinstance(leaf, bool):
        return int, (leaf,)
    return (leaf if isinstance(leaf, float | str | bool | None) else id(leaf)), ()


def describe_call(args: Any, kwargs: Any) -> tuple[Any, Sizes, int]:
    """Return the kinds of a call's inputs, their sizes, and how many numbers its tensors have."""
    kinds: list[Any] = []
    sizes: list[int] = []
    numbers = 0
    for leaf in list_leaves((args, kwargs)):
        kind, leaf_sizes = describe_leaf(leaf)
        kinds.append(kind)
        sizes.extend(leaf_sizes)
        numbers += leaf.numel() if isinstance(leaf, torch.Tensor) else 0
    return (tuple(kwargs), tuple(kinds)), tuple(sizes), numbers


@dataclass
class FollowedCall:
    """A call that was followed: its outputs without memory, and its work."""

    outputs: Any
    output_kinds: tuple[Any, ...]
    output_sizes: Sizes
    work: tuple[list[int], list[bool]]
    count: int = 1
    step: int = 0
    """The step in which it was followed last."""


@dataclass
class CallKind:
    """All followed calls of a model whose inputs differ only in size."""

    calls: dict[Sizes, FollowedCall] = field(default_factory=dict)
    largest: int = 0
    last: FollowedCall | None = None

    def predict_sizes(self, sizes: Sizes) -> Sizes | None:
        """Return the sizes of the outputs of a new call; None if the calls so far do not determine them.

        Each is taken to be constant, or an input's size plus a constant: whichever all calls agree on.
        """
        if self.last is None or len({call.output_kinds for call in self.calls.values()}) != 1:
            return None
        inputs = list(self.calls)
        outputs = [call.output_sizes for call in self.calls.values()]
        predicted = []
        for column in zip(*outputs, strict=True):
            size = _predict_size(inputs, column, sizes)
            if size is None:
                return None
            predicted.append(size)
        return tuple(predicted)


def _predict_size(inputs: list[Sizes], column: tuple[int, ...], sizes: Sizes) -> int | None:
    if len(set(column)) == 1:
        return column[0]
    for place, size in enumerate(sizes):
        differences = {out - seen[place] for out, seen in zip(column, inputs, strict=True)}
        if len(differences) == 1:
            return size + differences.pop()
    return None


class InferenceCalls:
    """The calls of models without gradients."""

    def __init__(self, recorder: ScriptRecorder, notes: dict[str, None]) -> None:
        self._recorder = recorder
        self._notes = notes
        self._kinds: dict[Any, CallKind] = {}

    def call(
        self,
        run: Callable[[], Any],
        module: Any,
        inputs: tuple[Any, Any],
        *,
        step: int | None,
    ) -> Any:
        """Run a model, or return outputs like its earlier ones.

        `step` is the number of the step that the call belongs to; None in an evaluation.
        """
        outline, sizes, numbers = describe_call(*inputs)
        kind = self._kinds.setdefault((id(module), outline), CallKind())
        same = kind.calls.get(sizes)
        if same is not None:
            if same.count >= FOLLOWED_CALLS and step in (None, same.step):
                return self._repeat(same, same.output_sizes, counts=step is not None)
        elif (
            len(kind.calls) >= FOLLOWED_SIZES
            and numbers <= GROWTH * kind.largest
            and (predicted := kind.predict_sizes(sizes)) is not None
            and kind.last is not None
        ):
            self._notes[SIZES_NOTE] = None
            return self._repeat(kind.last, predicted, counts=step is not None)
        out, call = self._follow(run, counts=step is not None)
        call.count += same.count if same is not None else 0
        call.step = -1 if step is None else step
        kind.calls[sizes] = kind.last = call
        kind.largest = max(kind.largest, numbers)
        return out

    def _follow(self, run: Callable[[], Any], *, counts: bool) -> tuple[Any, FollowedCall]:
        recorder = self._recorder
        before, begin = recorder.records_work, len(recorder.sequence)
        recorder.records_work = before and counts
        try:
            out = run()
        finally:
            recorder.records_work = before
        work = (recorder.sequence[begin:], recorder.by_engine[begin:])
        leaves = list(list_leaves(out))
        described = [describe_leaf(leaf) for leaf in leaves]
        return out, FollowedCall(
            replace_leaves(out, map(forget_memory, leaves)),
            tuple(kind for kind, _ in described),
            tuple(size for _, sizes in described for size in sizes),
            work,
        )

    def _repeat(self, call: FollowedCall, sizes: Sizes, *, counts: bool) -> Any:
        recorder = self._recorder
        if counts and recorder.records_work:
            recorder.sequence.extend(call.work[0])
            recorder.by_engine.extend(call.work[1])
        remaining = iter(sizes)

        def make(leaf: Any) -> Any:
            own = [next(remaining) for _ in describe_leaf(leaf)[1]]
            if isinstance(leaf, torch.Tensor):
                is_same = tuple(own) == tuple(leaf.shape)
                return torch.empty_like(leaf) if is_same else leaf.new_empty(own)
            return own[0] if own else leaf

        return replace_leaves(call.outputs, map(make, list(list_leaves(call.outputs))))


def forget_memory(leaf: Any) -> Any:
    """Return a tensor like this one without memory on the GPU, for calls that repeat it."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    with _disable_current_modes(), leaf.fake_mode:
        like: Any = torch.empty_like(leaf, requires_grad=False)
    like._trimtab_needs_graph = leaf.requires_grad
    return like
