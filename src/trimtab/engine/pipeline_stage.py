"""One stage of a pipeline: the model with some of its repeated blocks, and stand-ins for the others.

Every rank runs the job's own loss(). The last block before its own is a stand-in that gives what the rank
before has handed over; the first block after its own is one that takes its input for the rank after and ends
the pass. Everything outside the blocks is on every rank, and computed where it is reached: by linearity the
gradients of such parameters, summed over ranks, are those of the whole model. Nothing is asked of the job;
a model whose blocks are not one chain is refused with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn

from trimtab.engine.build import repeated_blocks
from trimtab.errors import JobFailed, WrongUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_GIVEN = "strategy pipeline"
_CURE = "Use fsdp, which cuts the weights of any model."


class Ended(BaseException):
    """The end of a stage, in the middle of loss(); not an Exception, so that a job does not catch it."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output


class RemoteValue(torch.Tensor):
    """What a block of another rank returns: it has a shape, and its values are not here."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        raise _refused(
            f"{getattr(func, '__name__', func)} computes with what a block returns that another rank has",
            f"Let only the next block use what a block returns. {_CURE}",
        )


class Relay:
    """The blocks of one stage as loss() meets them: in order, once, each with what the last one returned."""

    def __init__(  # noqa: PLR0913 - where the stage lies
        self,
        *,
        name: str,
        count: int,
        first: int,
        stop: int,
        receive: Callable[[torch.Tensor], torch.Tensor],
        strict: bool = True,
    ) -> None:
        """`receive` gives what the stage before hands over, for the tensor that is there instead.

        Not `strict`, stand-ins return what they are given, as tracing wants it.
        """
        self.name = name
        self.count = count
        self.first = first
        self.stop = stop
        """The first block after those of this stage."""
        self.receive = receive
        self._strict = strict
        self._next: int | None = None
        """The block that has to be called now; None outside of a forward pass."""
        self._came: torch.Tensor | None = None
        """What the last block returned."""

    @property
    def is_last(self) -> bool:
        """Whether the loss comes to be in this stage."""
        return self.stop == self.count

    def run(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A forward pass of this stage: the loss in the last one, what is handed over in the others."""
        self._next = 0
        try:
            found = compute()
        except Ended as ended:
            ended.__traceback__ = None
            return ended.output
        finally:
            reached, self._next, self._came = self._next, None, None
        if reached != self.count:
            raise _refused(f"loss() ended without calling {self.name}.{reached}", _CURE)
        return found

    def install(self, blocks: nn.Module) -> list[nn.Module]:
        """Put stand-ins in the place of other stages' blocks, which are returned."""
        dropped = []
        for number, (key, block) in enumerate(list(blocks.named_children())):
            if self.first <= number < self.stop:
                block.register_forward_pre_hook(self._before(number), with_kwargs=True)
                block.register_forward_hook(self._after(number))
                continue
            dropped.append(block)
            setattr(blocks, key, StandIn(block, self._stands(number)))
        return dropped

    def _before(self, number: int) -> Callable[..., None]:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._next is not None:
                self._called(number, _first(args, kwargs))

        return before

    def _after(self, number: int) -> Callable[..., None]:
        def after(_: nn.Module, __: Any, output: Any) -> None:
            # While a block is recomputed, in the backward pass, nothing is on its way.
            if self._next is None:
                return
            if not isinstance(output, torch.Tensor):
                raise _refused(
                    f"{self.name}.{number} returns a {type(output).__name__}",
                    f"Let a block return the one tensor that the next one takes. {_CURE}",
                )
            self._came = output

        return after

    def _stands(self, number: int) -> Callable[..., torch.Tensor]:
        def stand(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self._next is None:
                raise _refused(f"{self.name}.{number} of another rank is called outside of loss()", _CURE)
            given = _first(args, kwargs)
            self._called(number, given)
            if number == self.stop:
                self._hand_over(given)
            if number == self.first - 1:
                return self.receive(given)
            return given if isinstance(given, RemoteValue) or not self._strict else _elsewhere(given)

        return stand

    def _called(self, number: int, given: Any) -> None:
        if number != self._next:
            due = "they were all called" if self._next == self.count else f"{self.name}.{self._next} was due"
            raise _refused(
                f"loss() calls {self.name}.{number} when {due}: blocks are called several times, or out of "
                "order",
                f"A pipeline needs every block once, in order. {_CURE}",
            )
        if not isinstance(given, torch.Tensor) or not given.dtype.is_floating_point:
            raise _refused(
                f"{self.name}.{number} is not given a tensor first",
                f"Let a block take first what the one before it returned. {_CURE}",
            )
        self._next = number + 1

    def _hand_over(self, given: torch.Tensor) -> NoReturn:
        if given is not self._came:
            raise _refused(
                f"something is computed between {self.name}.{self.stop - 1} and {self.name}.{self.stop}",
                f"Let a block take first what the one before it returned. {_CURE}",
            )
        raise Ended(given)


class StandIn(nn.Module):
    """Stands where a block of another stage was; it has the block's plain attributes, and no weights."""

    def __init__(self, block: nn.Module, stand: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        kept = {
            name: value
            for name, value in vars(block).items()
            if not name.startswith("_") and name not in ("training", "forward")
        }
        self.__dict__.update(kept, forward=stand)


class BlockList(NamedTuple):
    """The list of blocks that a pipeline cuts."""

    name: str
    blocks: nn.Module


def chain(model: nn.Module) -> BlockList:
    """The list of repeated blocks that holds most of the model."""
    lists = [BlockList(*repeated_block) for repeated_block in repeated_blocks(model)]
    if not lists:
        raise WrongUse(
            _GIVEN,
            found="this model has no list of repeated blocks",
            cure=f"Put the blocks of the model into an nn.ModuleList. {_CURE}",
        )
    found = max(lists, key=lambda items: weights(items.blocks))
    _check_apart(model, found)
    return found


def weights(module: nn.Module) -> int:
    """Numbers that are weights of a module, trained or not."""
    return sum(parameter.numel() for parameter in module.parameters())


def _check_apart(model: nn.Module, found: BlockList) -> None:
    """Every weight of a block is its own: another rank could not have it."""
    owners: dict[int, int] = {}
    for number, block in enumerate(found.blocks.children()):
        for parameter in block.parameters():
            first = owners.setdefault(id(parameter), number)
            if first != number:
                raise _refused(f"{found.name}.{first} and {found.name}.{number} share a weight", _CURE)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in owners and not name.startswith(f"{found.name}." if found.name else ""):
            raise _refused(f"{name} is also a weight of {found.name}.{owners[id(parameter)]}", _CURE)


def head(model: nn.Module, found: BlockList) -> int:
    """Numbers that the last stage multiplies by beside its blocks: the head.

    Tables that are looked up in cost next to nothing. Where there is nothing else outside of the blocks, the
    largest table is taken to serve as the head as well.
    """
    inside = {id(parameter) for parameter in found.blocks.parameters()}
    looked_up: dict[int, int] = {}
    others: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in inside and parameter.dim() > 1:
                (looked_up if isinstance(module, nn.Embedding) else others)[id(parameter)] = parameter.numel()
    return sum(others.values()) if others else max(looked_up.values(), default=0)


def bounds(costs: Sequence[int], last: int, stages: int) -> list[int]:
    """Where each stage begins and the last one ends, so that the costliest stage costs as little as can be.

    `last` is what the last stage has to do beside its blocks. Of equal ways the one with the most blocks in
    front.

    >>> bounds([1] * 5, 0, 2), bounds([1] * 12, 3, 2), bounds([1] * 12, 3, 4)
    ([0, 3, 5], [0, 8, 12], [0, 4, 8, 11, 12])
    """
    low, high = max(costs), sum(costs) + last
    while low < high:
        middle = (low + high) // 2
        if _filled(costs, last, stages, middle)[1] <= middle:
            high = middle
        else:
            low = middle + 1
    return _filled(costs, last, stages, low)[0]


def _filled(costs: Sequence[int], last: int, stages: int, most: int) -> tuple[list[int], int]:
    """Stages filled from the front up to a cost each, and what is left for the last."""
    places = [0]
    for stage in range(stages - 1):
        stop = places[-1] + 1
        cost = costs[places[-1]]
        while stop < len(costs) - (stages - 1 - stage) and cost + costs[stop] <= most:
            cost += costs[stop]
            stop += 1
        places.append(stop)
    left = sum(costs[places[-1] :]) + last
    return [*places, len(costs)], left


def keep_stage(
    model: nn.Module,
    stage: int,
    stages: int,
    receive: Callable[[torch.Tensor], torch.Tensor],
    *,
    strict: bool = True,
) -> tuple[Relay, list[nn.Module]]:
    """Leave the blocks of one stage in a model, and stand-ins for the others, which are returned."""
    found = chain(model)
    costs = [weights(block) for block in found.blocks.children()]
    if len(costs) < stages:
        raise WrongUse(
            f"strategy pipeline over {stages} ranks",
            found=f"{found.name or 'the model'} has {len(costs)} blocks, and a stage needs one at least",
            cure=f"Use {len(costs)} ranks or fewer, or fsdp.",
        )
    places = bounds(costs, head(model, found), stages)
    relay = Relay(
        name=found.name,
        count=len(costs),
        first=places[stage],
        stop=places[stage + 1],
        receive=receive,
        strict=strict,
    )
    return relay, relay.install(found.blocks)


class TracedStage:
    """A stage by itself, as tracing runs it: whatever is handed to it has the right shape, and no values."""

    def __init__(self, model: nn.Module, stage: int, stages: int) -> None:
        found = chain(model)
        inside = {id(parameter) for parameter in found.blocks.parameters()}
        self.shared = sum(
            parameter.numel()
            for parameter in model.parameters()
            if parameter.requires_grad and id(parameter) not in inside
        )
        """Numbers that take a gradient outside of the blocks."""
        self.handed_bytes = 0
        self._relay, self.dropped = keep_stage(model, stage, stages, self._receive, strict=False)
        self._learns = any(
            parameter.requires_grad for block in self.dropped for parameter in block.parameters()
        )

    @property
    def is_last(self) -> bool:
        """Whether the loss comes to be in this stage."""
        return self._relay.is_last

    def run(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A forward pass: the loss in the last stage, what is handed over in the others."""
        found = self._relay.run(compute)
        if not self.is_last:
            self.handed_bytes = found.numel() * found.element_size()
        return found

    def _receive(self, given: torch.Tensor) -> torch.Tensor:
        self.handed_bytes = given.numel() * given.element_size()
        found = torch.empty_like(given.detach())
        return found.requires_grad_(self._learns or given.requires_grad)


def _elsewhere(given: torch.Tensor) -> RemoteValue:
    with torch._C.DisableTorchFunctionSubclass():
        found: RemoteValue = given.detach().as_subclass(RemoteValue)
        return found


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def _refused(found: str, cure: str) -> JobFailed:
    return JobFailed(_GIVEN, found=found, cure=cure)
