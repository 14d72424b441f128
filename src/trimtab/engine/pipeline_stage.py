"""Run pipeline stages: keep some repeated blocks of the model, and replace the others by placeholders.

A rank may hold several stages. A forward pass runs one of them; the blocks of the others are then skipped.
Every rank runs the job's own loss(). The placeholder just before a rank's own blocks returns the output of
the previous stage. The placeholder just after them takes their output for the next stage and ends the pass.
What is outside of the blocks is on the stages that need it (`trimtab.engine.stage_placement`): the embedding
on the first, the head on the last. By linearity, gradients of parameters on several stages, summed over these
stages, are those of the whole model. The job needs no changes; a model whose blocks are not one chain is
refused with the reason.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from trimtab.engine.build import find_repeated_blocks
from trimtab.engine.stage_balance import measure_blocks
from trimtab.engine.stage_placement import (
    AbsentWeight,
    StageHolders,
    UseRecorder,
    find_holders,
    make_stand_in,
    remove_absent,
)
from trimtab.engine.tensor_parallel import SEQUENCE
from trimtab.engine.weight_gradients import WeightGradients
from trimtab.errors import JobFailed, WrongUse
from trimtab.spec import RecomputeWay
from trimtab.strategies.stage_split import BlockWork, balance_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.engine.stage_placement import ParameterNeeds

_STRATEGY = "strategy pipeline"
_CURE = "Use fsdp, which cuts the weights of any model."
MOST_NAMES = 3
"""Parameters that a note names."""


class StageEnded(BaseException):
    """Ends a stage in the middle of loss(). It is not an Exception, so that the job does not catch it."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output


class RemoteValue(torch.Tensor):
    """Output of a block on another rank: it has a shape, but no values on this rank."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        raise _make_error(
            f"{getattr(func, '__name__', func)} uses the output of a block on another rank",
            f"Only the next block may use the output of a block. {_CURE}",
        )


class BlockRange(NamedTuple):
    """Blocks of one stage."""

    first: int
    stop: int
    """Number of the first block after the stage."""


class StageSchedule(NamedTuple):
    """What the stages of a rank depend on, of a schedule."""

    virtual_stages: int = 1
    splits_backward: bool = False


class BlockRelay:
    """Run the blocks of one stage inside loss(), and check that they form a chain.

    Every block must be called once, in order, with the output of the block before it.
    """

    def __init__(  # noqa: PLR0913 - position of the rank
        self,
        *,
        name: str,
        count: int,
        stages: Sequence[BlockRange],
        layers: tuple[int, ...],
        receive: Callable[[torch.Tensor], torch.Tensor],
        strict: bool = True,
    ) -> None:
        """Set up the stages of this rank, out of `count` blocks.

        `receive` takes a local tensor of the right shape and returns the output of the previous stage. If
        not `strict`, placeholders return their input, as tracing needs it.
        """
        self.name = name
        self.count = count
        self.stages = tuple(stages)
        """Blocks of each stage of this rank."""
        self.layers = layers
        """Number of blocks of each stage, on all ranks."""
        self.first, self.stop = stages[0]
        """The first block of the stage that runs now, and the first block after it."""
        self.receive = receive
        self.end_forward: Callable[[torch.Tensor], torch.Tensor] = _return_output
        """Called with the output of a pass that ended in the middle of the model; returns it."""
        self.tensor_mesh: Any = None
        """Device mesh of the ranks that split layers with this one; None if none do."""
        self.holders = StageHolders({}, 1)
        """Ranks that hold each parameter outside of the blocks."""
        self._strict = strict
        self._next: int | None = None
        """Number of the block that must be called next; None outside of a forward pass."""
        self._last_output: torch.Tensor | None = None
        """Output of the last block."""

    @property
    def is_last(self) -> bool:
        """Whether the stage that runs now computes the loss."""
        return self.stop == self.count

    def get_blocks(self, model: nn.Module) -> nn.Module:
        """Return the list of blocks of a model."""
        return model.get_submodule(self.name)

    def run(self, compute: Callable[[], torch.Tensor], stage: int = 0) -> torch.Tensor:
        """Run a forward pass of a stage of this rank; return the loss in the last stage, else the output."""
        self.first, self.stop = self.stages[stage]
        self._next = 0
        AbsentWeight.is_usable = self.first > 0
        try:
            loss = compute()
        except StageEnded as end:
            end.__traceback__ = None
            return self.end_forward(end.output)
        finally:
            reached, self._next, self._last_output = self._next, None, None
            AbsentWeight.is_usable = False
        if reached != self.count:
            raise _make_error(f"loss() ended without calling {self.name}.{reached}", _CURE)
        return loss

    def install(self, blocks: nn.Module) -> list[nn.Module]:
        """Replace the blocks of other ranks by placeholders; return the replaced blocks."""
        dropped = []
        for number, (key, block) in enumerate(list(blocks.named_children())):
            if any(first <= number < stop for first, stop in self.stages):
                block.register_forward_pre_hook(self._make_pre_hook(number), with_kwargs=True)
                block.register_forward_hook(self._make_post_hook(number))
                if len(self.stages) > 1:
                    self._skip_in_other_stages(block, number)
                continue
            dropped.append(block)
            setattr(blocks, key, RemoteBlock(block, self._make_placeholder(number)))
        return dropped

    def _skip_in_other_stages(self, block: Any, number: int) -> None:
        """Let a block of this rank return its input while another stage runs, without calling any hook."""
        skip = self._make_placeholder(number)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._next is None or self.first <= number < self.stop:
                return block._call_impl(*args, **kwargs)
            return skip(*args, **kwargs)

        # nn.Module calls this instead of forward() and the hooks, as for compiled modules.
        block.__dict__["_compiled_call_impl"] = call

    def _make_pre_hook(self, number: int) -> Callable[..., None]:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._next is not None:
                self._check_call(number, _first_argument(args, kwargs))

        return before

    def _make_post_hook(self, number: int) -> Callable[..., None]:
        def after(_: nn.Module, __: Any, output: Any) -> None:
            # A block that is recomputed in the backward pass is not part of the chain.
            if self._next is None:
                return
            if not isinstance(output, torch.Tensor):
                raise _make_error(
                    f"{self.name}.{number} returns a {type(output).__name__}",
                    f"A block must return the one tensor that the next block takes. {_CURE}",
                )
            self._last_output = output

        return after

    def _make_placeholder(self, number: int) -> Callable[..., torch.Tensor]:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self._next is None:
                raise _make_error(f"{self.name}.{number} of another rank is called outside of loss()", _CURE)
            value = _first_argument(args, kwargs)
            self._check_call(number, value)
            if number == self.stop:
                self._end_stage(value)
            if number == self.first - 1:
                AbsentWeight.is_usable = False
                return self.receive(value)
            return value if isinstance(value, RemoteValue) or not self._strict else _make_remote_value(value)

        return forward

    def _check_call(self, number: int, value: Any) -> None:
        if number != self._next:
            due = "they were all called" if self._next == self.count else f"{self.name}.{self._next} was due"
            raise _make_error(
                f"loss() calls {self.name}.{number} when {due}: blocks are called several times, or out of "
                "order",
                f"A pipeline needs every block once, in order. {_CURE}",
            )
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            raise _make_error(
                f"the first argument of {self.name}.{number} is not a floating-point tensor",
                f"The first argument of a block must be the output of the block before it. {_CURE}",
            )
        self._next = number + 1

    def _end_stage(self, value: torch.Tensor) -> NoReturn:
        if value is not self._last_output:
            raise _make_error(
                f"something is computed between {self.name}.{self.stop - 1} and {self.name}.{self.stop}",
                f"The first argument of a block must be the output of the block before it. {_CURE}",
            )
        raise StageEnded(value)


class RemoteBlock(nn.Module):
    """Placeholder for a block of another stage: it has the block's plain attributes, and no weights."""

    def __init__(self, block: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        attributes = {
            name: value
            for name, value in vars(block).items()
            if not name.startswith("_") and name not in ("training", "forward")
        }
        self.__dict__.update(attributes, forward=forward)


class BlockList(NamedTuple):
    """List of blocks that a pipeline splits into stages."""

    name: str
    blocks: nn.Module


def find_block_chain(model: nn.Module) -> BlockList:
    """Return the list of repeated blocks that holds most of the weights."""
    lists = [BlockList(*repeated_block) for repeated_block in find_repeated_blocks(model)]
    if not lists:
        raise WrongUse(
            _STRATEGY,
            found="this model has no list of repeated blocks",
            cure=f"Put the blocks of the model into an nn.ModuleList. {_CURE}",
        )
    block_list = max(lists, key=lambda items: count_weights(items.blocks))
    _check_no_shared_weights(model, block_list)
    return block_list


def count_weights(module: nn.Module) -> int:
    """Return the number of parameters of a module, trainable or not."""
    return sum(parameter.numel() for parameter in module.parameters())


def _check_no_shared_weights(model: nn.Module, block_list: BlockList) -> None:
    """Raise JobFailed if a block shares a weight: the other owner may be on another rank."""
    owners: dict[int, int] = {}
    for number, block in enumerate(block_list.blocks.children()):
        for parameter in block.parameters():
            first = owners.setdefault(id(parameter), number)
            if first != number:
                raise _make_error(
                    f"{block_list.name}.{first} and {block_list.name}.{number} share a weight", _CURE
                )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in owners and not name.startswith(f"{block_list.name}." if block_list.name else ""):
            raise _make_error(f"{name} is also a weight of {block_list.name}.{owners[id(parameter)]}", _CURE)


def count_head_weights(model: nn.Module, block_list: BlockList) -> int:
    """Return the number of weights of the head, which the last stage computes besides its blocks.

    Embedding tables cost almost nothing, so they are not counted. If nothing else is outside of the blocks,
    the largest table is assumed to be the head too.
    """
    inside = {id(parameter) for parameter in block_list.blocks.parameters()}
    embeddings: dict[int, int] = {}
    others: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in inside and parameter.dim() > 1:
                (embeddings if isinstance(module, nn.Embedding) else others)[id(parameter)] = (
                    parameter.numel()
                )
    return sum(others.values()) if others else max(embeddings.values(), default=0)


class StageSplit(NamedTuple):
    """Number of blocks of each stage of a pipeline, and the work that they follow from."""

    layers: tuple[int, ...] = ()
    """Empty: not decided yet."""
    work: tuple[float, ...] = ()
    """Shares of the time of a micro-batch: before the blocks, of each block, and after them."""
    note: str = ""
    """What the work was taken to be, if it could not be counted."""
    needs: ParameterNeeds = MappingProxyType({})
    """Blocks with which parameters outside of the blocks are needed; every stage holds all others."""
    held_note: str = ""
    """Parameters outside of the blocks that every stage holds, and why; empty if there are none."""

    def shorten(self, layers: tuple[int, ...]) -> StageSplit:
        """Return the split of a model with fewer blocks, whose stages hold the same outside of the blocks."""
        old, new = (list(accumulate(counts, initial=0)) for counts in (self.layers, layers))

        def move(block: int) -> int:
            stage = bisect_right(old, block) - 1
            return new[stage] + min(block - old[stage], layers[stage] - 1)

        needs = {name: frozenset(map(move, blocks)) for name, blocks in self.needs.items()}
        return self._replace(layers=layers, needs=needs)


def split_model(
    model: nn.Module,
    ranks: int,
    virtual_stages: int = 1,
    *,
    recompute: RecomputeWay | None = None,
    run_loss: Callable[[nn.Module], Any] | None = None,
) -> StageSplit:
    """Balance the blocks of a model over stages by their time; by their weights if loss() cannot be followed.

    `run_loss` computes the loss of a batch on the meta device.
    """
    block_list = find_block_chain(model)
    blocks = list(block_list.blocks.children())
    work, failure = None, "there is no job whose loss() could be followed"
    uses = UseRecorder(model, blocks)
    if run_loss is not None:
        work, failure = measure_blocks(model, blocks, run_loss, recompute or RecomputeWay(), uses)
    note = ""
    needs: ParameterNeeds = {} if work is None else uses.finish()
    if work is None:
        note = f"pipeline: stages are balanced by their weights, because {failure}"
        weights = tuple(float(count_weights(block)) for block in blocks)
        work = BlockWork(0.0, weights, float(count_head_weights(model, block_list)))
    layers: tuple[int, ...] = ()
    if len(blocks) >= ranks * virtual_stages:
        layers = balance_stages(work, ranks, virtual_stages)
        if not note and (uses.changes_buffer or _find_running_statistics(model, block_list)):
            failure = "the forward pass changes buffers outside of the blocks"
        needs = {} if failure else needs
        failure = failure or find_holders(model, blocks, needs, layers, ranks)[1]
    return StageSplit(layers, work.to_tuple(), note, needs, _describe_held(model, blocks, needs, failure))


def _describe_held(model: nn.Module, blocks: Sequence[nn.Module], needs: ParameterNeeds, failure: str) -> str:
    """Return a note on the parameters outside of the blocks that every stage holds; empty without any."""
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    names = [
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in inside and (failure or name not in needs)
    ]
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMES} more" * (len(names) > MOST_NAMES)
    why = failure or "loss() reads their values, or does not use them"
    return f"pipeline: every stage holds {', '.join(names[:MOST_NAMES])}{more}, because {why}"


class KeptStage(NamedTuple):
    """What is left of a model on one rank of a pipeline, and what is not."""

    relay: BlockRelay
    dropped: list[nn.Module]
    """Blocks of other ranks."""
    absent: list[nn.Parameter]
    """Parameters outside of the blocks that other ranks hold."""


class StandInForm(NamedTuple):
    """How parameters that a rank does not hold are replaced."""

    device: Any = "cpu"
    dtype: torch.dtype | None = None
    """None: that of the parameter."""


ON_HOST = StandInForm()


def keep_stage(  # noqa: PLR0913 - position of the rank
    model: nn.Module,
    stage: int,
    stages: int,
    receive: Callable[[torch.Tensor], torch.Tensor],
    *,
    virtual_stages: int = 1,
    strict: bool = True,
    split: StageSplit | None = None,
    form: StandInForm = ON_HOST,
) -> KeptStage:
    """Keep what one rank needs in a model: its blocks, and what they need outside of the blocks.

    `stage` of `stages` is the position of the rank. With several virtual stages it has every `stages`-th
    stage, beginning with that number. `split` has the blocks of each stage; without it, or if it is of
    another model or number of stages, they are balanced by their weights.
    """
    block_list = find_block_chain(model)
    blocks = list(block_list.blocks.children())
    count = len(blocks)
    total = stages * virtual_stages
    if count < total:
        product = f" with {virtual_stages} virtual stages each" * (virtual_stages > 1)
        raise WrongUse(
            f"strategy pipeline over {stages} ranks{product}",
            found=f"{block_list.name or 'the model'} has {count} blocks, and a stage needs one at least",
            cure=f"Use {max(1, count // virtual_stages)} ranks or fewer"
            f"{', or fewer virtual stages' * (virtual_stages > 1)}, or fsdp.",
        )
    if virtual_stages > 1 and (name := _find_running_statistics(model, block_list)):
        raise _make_error(
            f"{name} has running statistics outside of the blocks, and a rank with several stages would "
            "update them several times",
            "Use one virtual stage a rank.",
        )
    if split is None or len(split.layers) != total or sum(split.layers) != count:
        split = split_model(model, stages, virtual_stages)
    places = list(accumulate(split.layers, initial=0))
    relay = BlockRelay(
        name=block_list.name,
        count=count,
        stages=[BlockRange(*places[number : number + 2]) for number in range(stage, total, stages)],
        layers=tuple(stop - first for first, stop in pairwise(places)),
        receive=receive,
        strict=strict,
    )
    relay.holders, _ = find_holders(model, blocks, split.needs, split.layers, stages)
    absent = remove_absent(
        model, relay.holders, stage, lambda parameter: make_stand_in(parameter, *form, strict=strict)
    )
    return KeptStage(relay, relay.install(block_list.blocks), absent)


def _find_running_statistics(model: nn.Module, block_list: BlockList) -> str:
    """Return the first layer outside of the blocks that counts batches; empty if there is none."""
    inside = {id(module) for module in block_list.blocks.modules()}
    return next(
        (
            name
            for name, module in model.named_modules()
            if id(module) not in inside and getattr(module, "track_running_stats", False)
        ),
        "",
    )


class TracedStage:
    """The stages of one rank alone, for tracing: inputs have the right shape and no values."""

    def __init__(  # noqa: PLR0913, PLR0917 - position of the rank
        self,
        model: nn.Module,
        stage: int,
        stages: int,
        schedule: StageSchedule,
        split: StageSplit,
        form: StandInForm,
    ) -> None:
        self.handed_bytes = 0
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.relay, self.dropped, self.absent = keep_stage(
            model,
            stage,
            stages,
            self._receive,
            virtual_stages=schedule.virtual_stages,
            strict=False,
            split=split,
            form=form,
        )
        shared = {
            name: ranks
            for name, ranks in self.relay.holders.ranks.items()
            if len(ranks) > 1 and stage in ranks and name in trainable
        }
        holders = self.relay.holders.ranks
        self.outside = sum(sizes[name] for name, ranks in holders.items() if stage in ranks)
        """Parameters of this rank outside of the blocks."""
        self.shared = sum(sizes[name] for name in shared)
        """Trainable parameters of this rank that other stages hold too."""
        self.shared_stages = max(map(len, shared.values()), default=0)
        """Stages that hold them, at most."""
        self.split = split
        self._needs_gradient = any(
            parameter.requires_grad
            for parameter in (
                *self.absent,
                *(parameter for block in self.dropped for parameter in block.parameters()),
            )
        )
        self.weight_gradients: WeightGradients | None = None
        """Computes weight gradients after the backward pass; None if the backward pass does."""
        self.note: Callable[[str], None] = _ignore_phase
        """Called with the name of a phase that begins: weights, and then optimizer."""
        if schedule.splits_backward:
            self.weight_gradients = WeightGradients()
            self.weight_gradients.install(model)

    @property
    def count(self) -> int:
        """Number of stages of this rank."""
        return len(self.relay.stages)

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of blocks of each stage, on all ranks."""
        return self.relay.layers

    def is_last(self, stage: int) -> bool:
        """Whether a stage of this rank computes the loss."""
        return self.relay.stages[stage].stop == self.relay.count

    def run(self, compute: Callable[[], torch.Tensor], stage: int = 0) -> torch.Tensor:
        """Run a forward pass; return the loss in the last stage, else the output to send."""
        output = self.relay.run(compute, stage)
        if not self.is_last(stage):
            self.handed_bytes = _count_local_bytes(output)
        return output

    def _receive(self, local: torch.Tensor) -> torch.Tensor:
        mesh, layout = self.relay.tensor_mesh, None
        received = local.detach()
        if mesh is None or isinstance(local, DTensor):
            received = torch.empty_like(received)
        else:
            # What is before the blocks was computed from stand-ins, which are not split.
            received, layout = allocate_part(received, mesh.size())
        self.handed_bytes = _count_local_bytes(received)
        received.requires_grad_(self._needs_gradient or local.requires_grad)
        return wrap_input(received, layout, mesh)


def _return_output(output: torch.Tensor) -> torch.Tensor:
    """Leave the output as it is."""
    return output


def _ignore_phase(_: str) -> None:
    """Record nothing."""


class StageLayout(NamedTuple):
    """How the ranks that split layers hold a tensor that stages send each other: each sends its own part."""

    dim: int | None
    """Dimension along which each rank has a part; None: each rank has all of it."""
    size: int
    """Length of all parts along that dimension; 0 without one."""


def unwrap_output(output: torch.Tensor) -> tuple[torch.Tensor, StageLayout | None]:
    """Return this rank's part of a stage's output, and its layout; None if ranks do not split layers."""
    if not isinstance(output, DTensor):
        return output, None
    if any(placement.is_partial() for placement in output.placements):
        output = output.redistribute(placements=[Replicate()])
    dim = next((placement.dim for placement in output.placements if isinstance(placement, Shard)), None)
    layout = StageLayout(dim, 0 if dim is None else output.shape[dim])
    return output.to_local(), layout


def wrap_input(part: torch.Tensor, layout: StageLayout | None, mesh: Any) -> torch.Tensor:
    """Return the tensor of which the previous stage has sent a part to each rank that splits layers."""
    if layout is None:
        return part
    shape = list(part.shape)
    if layout.dim is not None:
        shape[layout.dim] = layout.size
    placement = Replicate() if layout.dim is None else Shard(layout.dim)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
    )


def allocate_part(hidden: torch.Tensor, ranks: int) -> tuple[torch.Tensor, StageLayout]:
    """Return memory for this rank's part of hidden states that ranks split between them, and its layout."""
    length = hidden.shape[SEQUENCE] if hidden.dim() > SEQUENCE + 1 else 0
    if not length or length % ranks:
        return torch.empty_like(hidden), StageLayout(None, 0)
    shape = list(hidden.shape)
    shape[SEQUENCE] //= ranks
    return hidden.new_empty(shape), StageLayout(SEQUENCE, length)


def _count_local_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of this rank's part of a tensor."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.numel() * part.element_size()


def _make_remote_value(local: torch.Tensor) -> RemoteValue:
    if isinstance(local, DTensor):
        # All of its shape, and memory for one element.
        local = torch.empty(1, dtype=local.dtype, device=local.device).expand(local.shape)
    with torch._C.DisableTorchFunctionSubclass():
        value: RemoteValue = local.detach().as_subclass(RemoteValue)
        return value


def _first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else next(iter(kwargs.values()), None)


def _make_error(found: str, cure: str) -> JobFailed:
    return JobFailed(_STRATEGY, found=found, cure=cure)
