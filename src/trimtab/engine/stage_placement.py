"""Decide which pipeline stages hold the parameters outside of the blocks: embeddings, last norm, head.

The loss runs once on the meta device. Every tensor is labelled with the parameters outside of the blocks that
it is computed from. A block, and what follows the last one, needs those of all tensors that it reads, except
the output of the block before it, which another stage sends. So the embedding is on the first stage, the head
on the last, and a table that both of them use is on both. What a stage does not need is replaced by a
stand-in without memory: code before the blocks still runs, and its results are not used. A result that is
used nevertheless is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_leaves, tree_map_only

from trimtab.errors import JobFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    ParameterNeeds = Mapping[str, frozenset[int]]
    """Numbers of the blocks with which a parameter outside of the blocks is needed, by its first name."""

METADATA_OPS = frozenset(
    {"empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"}
)
"""Operations whose result has the form of a tensor, and does not depend on its values."""
FORM_ARGUMENTS = frozenset({"to", "type_as", "view_as", "expand_as", "reshape_as"})
"""Methods that read only the form of any argument but the first."""
VALUE_READS = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"})
"""Methods that return values and no tensor."""


class UseRecorder:
    """Records which parameters outside of the blocks each block needs, while the loss runs."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        self._names = {
            id(parameter): name for name, parameter in model.named_parameters() if id(parameter) not in inside
        }
        """First name of each parameter outside of the blocks, by its id."""
        self._first_names = {
            name: self._names[id(parameter)]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if id(parameter) in self._names
        }
        self._originals = dict(model.named_parameters())
        self._last = len(blocks) - 1
        self._labels: dict[int, tuple[Any, frozenset[str]]] = {}
        """By address of a storage: the storage, which stays alive, and the parameters that it depends on."""
        self._buffers: set[int] = set()
        self._block: int | None = None
        """The block that runs; None outside of blocks."""
        self._previous = -1
        """The last block that has ended."""
        self._needs: dict[str, set[int]] = {}
        self._everywhere: set[str] = set()
        """Parameters whose values the code reads, or that it holds in some other way than as attributes."""
        self.changes_buffer = False
        """Whether the forward pass writes to a buffer outside of the blocks."""

    def start(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Label the parameters that the model has on the meta device now."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in self._first_names:
                self._label(parameter, frozenset({self._first_names[name]}))
        for name in self._names.values():
            self._label(self._originals[name], frozenset({name, _ORIGINAL}))
        inside = {id(buffer) for block in blocks for buffer in block.buffers()}
        self._buffers = {_address(buffer) for buffer in model.buffers() if id(buffer) not in inside} - {0}

    def enter_block(self, number: int, args: Any, kwargs: Any) -> None:
        """Note that a block begins: it needs what its arguments depend on, except for the first."""
        self._block = number
        values = [*args, *kwargs.values()]
        for tensor in tree_leaves(values[1:] if number else values):
            if isinstance(tensor, torch.Tensor):
                self._need(self._find(tensor), number)

    def leave_block(self, output: Any) -> None:
        """Note that a block has ended: its output depends on nothing outside, because it is sent."""
        self._previous, self._block = self._block or 0, None
        if isinstance(output, torch.Tensor):
            self._label(output, frozenset())

    def record(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Record an operation that has run."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        labels = frozenset[str]().union(*map(self._find, inputs))
        if labels and name not in METADATA_OPS:
            self._use(labels)
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._label(leaf, labels | self._find(leaf))
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in tree_leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        self.changes_buffer |= _address(leaf) in self._buffers
                        self._label(leaf, labels | self._find(leaf))

    def read_number(self, tensor: torch.Tensor) -> None:
        """Note that the code reads a value: all stages run that code."""
        self._everywhere |= self._find(tensor)

    def finish(self) -> ParameterNeeds:
        """Return the needs of all parameters but those that every stage must hold.

        Code reads values of these, or does not use them with this batch.
        """
        if _ORIGINAL in self._needs:
            return {}
        return {
            name: frozenset(self._needs[name])
            for name in self._names.values()
            if name in self._needs and name not in self._everywhere
        }

    def _use(self, labels: frozenset[str]) -> None:
        if self._block is not None:
            self._need(labels, self._block)
        elif self._previous < 0:
            self._need(labels, 0)
        else:
            # What is between two blocks must be on the stage of both.
            self._need(labels, self._previous)
            self._need(labels, min(self._previous + 1, self._last))

    def _need(self, labels: frozenset[str], block: int) -> None:
        for name in labels:
            self._needs.setdefault(name, set()).add(block)

    def _find(self, tensor: torch.Tensor) -> frozenset[str]:
        return self._labels.get(_address(tensor), _NOTHING)[1]

    def _label(self, tensor: torch.Tensor, labels: frozenset[str]) -> None:
        storage = _get_storage(tensor)
        if storage is not None:
            self._labels[storage._cdata] = (storage, labels)


_ORIGINAL = ""
"""Label of a parameter that code has reached in another way than as an attribute of a module."""
_NOTHING: tuple[Any, frozenset[str]] = (None, frozenset())


def _get_storage(tensor: torch.Tensor) -> Any:
    """Return the storage of a tensor; None if it has none of its own, as sparse and packed ones."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _address(tensor: torch.Tensor) -> int:
    """Return a number of the storage of a tensor; 0 without one."""
    storage = _get_storage(tensor)
    return 0 if storage is None else int(storage._cdata)


class AbsentWeight(torch.Tensor):
    """A weight that this stage does not hold, or what code before the blocks computes from it: no values."""

    is_usable: ClassVar[bool] = False
    """Whether code before the blocks of a stage runs, whose results the stage does not use."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            reads_form = name in METADATA_OPS or (
                name in FORM_ARGUMENTS and not isinstance(args[0], AbsentWeight)
            )
            if reads_form or func in get_default_nowrap_functions():
                return result
            absent = tree_map_only(torch.Tensor, _make_absent, result)
        is_value = any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(absent))
        if name in VALUE_READS or (is_value and not cls.is_usable):
            raise JobFailed(
                "strategy pipeline",
                found=f"{name} uses weights of another stage; on the batch by which trimtab divided the "
                "model, they were used there only",
                cure="Let every batch use the same weights, or use fsdp, which cuts any model.",
            )
        return absent


def _make_absent(value: torch.Tensor) -> AbsentWeight:
    """Return a tensor as one without meaning; of one that ranks split, only its shape."""
    if isinstance(value, DTensor):
        value = torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)
    return value.as_subclass(AbsentWeight)


class StageHolders(NamedTuple):
    """Which ranks of a pipeline hold the parameters outside of the blocks."""

    ranks: dict[str, tuple[int, ...]]
    """Positions along the pipeline of the ranks that hold each parameter, by its first name."""
    stages: int
    """Number of ranks along the pipeline."""

    def find(self, name: str) -> tuple[int, ...]:
        """Return the ranks that hold a parameter; none for one of a block, which one rank holds."""
        return self.ranks.get(name, ())

    def list_groups(self) -> list[tuple[int, ...]]:
        """Return each set of several ranks, but not all, that hold the same parameters."""
        return sorted({ranks for ranks in self.ranks.values() if 1 < len(ranks) < self.stages})


def find_holders(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    needs: ParameterNeeds,
    layers: Sequence[int],
    stages: int,
) -> tuple[StageHolders, str]:
    """Return the ranks that hold each parameter outside of the blocks; every rank, where it is not known.

    `layers` has the blocks of each stage; stage s is on rank s % stages. If a rank would have nothing to
    train, every rank holds all, and the reason is returned too.
    """
    rank_of = [stage % stages for stage, count in enumerate(layers) for _ in range(count)]
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in inside}
    everyone = tuple(range(stages))
    ranks = {
        name: tuple(sorted({rank_of[block] for block in needs[name]})) if name in needs else everyone
        for name in outside
    }
    trained = {rank for name in outside if outside[name].requires_grad for rank in ranks[name]}
    for rank, block in zip(rank_of, blocks, strict=True):
        if rank not in trained and any(parameter.requires_grad for parameter in block.parameters()):
            trained.add(rank)
    empty = sorted({*everyone} - trained)
    if empty:
        why = f"stage {empty[0] + 1} would have nothing to train"
        return StageHolders(dict.fromkeys(outside, everyone), stages), why
    return StageHolders(ranks, stages), ""


def remove_absent(
    model: nn.Module, holders: StageHolders, rank: int, make: Callable[[nn.Parameter], torch.Tensor]
) -> list[nn.Parameter]:
    """Replace the parameters that a rank does not hold by stand-ins; return the parameters."""
    absent = {
        id(parameter): parameter
        for name, parameter in model.named_parameters()
        if name in holders.ranks and rank not in holders.ranks[name]
    }
    made = {key: make(parameter) for key, parameter in absent.items()}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in absent:
                del module._parameters[name]
                # Not a buffer: buffers are moved and saved.
                module.__dict__[name] = made[id(parameter)]
    return list(absent.values())


def make_stand_in(
    parameter: nn.Parameter, device: Any, dtype: torch.dtype | None = None, *, strict: bool = True
) -> torch.Tensor:
    """Return a tensor like a parameter with the memory of one element; if not `strict`, a plain one."""
    is_wide = parameter.dtype.is_floating_point
    single = torch.zeros((), dtype=dtype if dtype is not None and is_wide else parameter.dtype, device=device)
    value = single.expand(parameter.shape)
    return value.as_subclass(AbsentWeight) if strict else value
