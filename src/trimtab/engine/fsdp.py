"""FSDP2 whose ranks survive each other's out-of-memory.

A sharded pass is a fixed sequence of collectives: weights are gathered, gradients are scattered. Every
collective goes through an object of ours, which writes the sequence down in a pass of one sample before the
first step. A rank that fails in the middle lets go of its memory and then takes part in what is left of the
sequence with empty hands, so that the others come to the end of their pass; the status tells them that it
counts for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from trimtab.engine.build import shard_units
from trimtab.engine.gradients import summed_squares
from trimtab.engine.precision import torch_dtype
from trimtab.engine.sync_norm import widen_norms
from trimtab.errors import WrongUse
from trimtab.strategies import limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.engine.sync_norm import NormCollective, Statistics
    from trimtab.spec import Setting

    Fill = Callable[[torch.Tensor], None]
    """Gives a tensor on the device the values that all ranks are to have."""
    Placed = dict[int, tuple[torch.Tensor, torch.Tensor]]
    """By id: a tensor and what it became. Both are held, so that no id is given to another tensor."""


_CPU_BYTES = 2**30
FORWARD = (False, False, True)
"""The key of a forward pass without gradients."""


class Collective(NamedTuple):
    """One entry of the sequence."""

    gathers: bool
    """Whether weights are gathered; else gradients are scattered."""
    group: Any
    given: int
    """Elements that this rank puts in."""
    got: int
    dtype: torch.dtype
    then: Any
    """The group over which the result is summed afterwards, as replicas of shards do; None for none."""
    statistics: NormCollective | None = None
    """What a synchronised BatchNorm layer exchanges; then it is neither of the other two."""


class Ledger:
    """Which collectives a pass consists of, and how far the one under way has come."""

    def __init__(self) -> None:
        self.known: dict[tuple[bool, ...], list[Collective]] = {}
        """By whether a pass sends its gradients, and whether it is the last of a step."""
        self.now: list[Collective] = []
        self.mid_backward: Callable[[], None] | None = None

    def note(self, entry: Collective) -> None:
        """Just before a collective is issued."""
        if self.mid_backward is not None and not entry.gathers and entry.statistics is None:
            self.mid_backward()
        self.now.append(entry)

    def note_statistics(self, exchange: NormCollective) -> None:
        """Just before a collective of a synchronised BatchNorm layer."""
        self.note(Collective(False, None, exchange.length, 0, exchange.dtype, None, exchange))


class _Gather(DefaultAllGather):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        entry = Collective(
            True, group, input_tensor.numel(), output_tensor.numel(), output_tensor.dtype, None
        )
        self._ledger.note(entry)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _Scatter(DefaultReduceScatter):
    def __init__(self, ledger: Ledger, unit: Any) -> None:
        self._ledger = ledger
        self._unit = unit

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        unit = self._unit
        replicas = unit._all_reduce_process_group if unit._is_hsdp and unit.all_reduce_grads else None
        entry = Collective(
            False, group, input_tensor.numel(), output_tensor.numel(), output_tensor.dtype, replicas
        )
        self._ledger.note(entry)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


class ShardedGradients:
    """Gradients that FSDP2 sums and scatters; sums, not means: losses are weighted before."""

    equal_parts = True
    sent_any = True
    """Gathering weights is sending: a rank never repeats a part alone."""

    def __init__(
        self,
        model: nn.Module,
        *,
        replicas: int,
        alone: bool,
        mid_backward: Callable[[], None] | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        """`replicas` is how many copies of every shard there are; `alone`: there is one rank.

        `statistics` is what synchronised BatchNorm layers share, where the model has some.
        """
        self._model: Any = model
        self._ledger = Ledger()
        self._ledger.mid_backward = mid_backward
        if statistics is not None:
            statistics.note = self._ledger.note_statistics
        self._statistics = statistics
        self._replicas = replicas
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.arrivals = len(self._units)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._keeps_whole = self._small()
        self._key: tuple[bool, ...] | None = None
        self._done = 0
        self._clean = True
        self._stays_out = False
        self._alone = alone
        for module in self._units:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            for unit in _groups_of(module):
                module.set_custom_all_gather(_Gather(self._ledger))
                module.set_custom_reduce_scatter(_Scatter(self._ledger, unit))

    def _small(self) -> bool:
        """Whether whole gradients may lie there while parts add up; else each part scatters its own."""
        device = self._parameters[0].device
        room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _CPU_BYTES
        element = max(parameter.element_size() for parameter in self._parameters)
        return limits.keeps_whole(sum(parameter.numel() for parameter in self._parameters), room, element)

    @property
    def rehearsed(self) -> bool:
        """Whether the sequences of all kinds of parts are known."""
        return self._alone or len(self._ledger.known.keys() - {FORWARD}) > 1

    def before_forward(self) -> None:
        """A forward pass without gradients follows, as gradient caching makes them before the parts."""
        self._learn()
        self._key = FORWARD

    def after_forward(self) -> None:
        """That pass is over: all weights are shards again, so that every pass is the same sequence."""
        reset(self._model)

    def finish_forwards(self, failed_at: int | None, count: int) -> None:
        """Take part in what is left of `count` such passes, where this rank failed in one of them."""
        if failed_at is None:
            self._learn()
            self._key = None
            return
        done = len(self._ledger.now)
        self.abandon()
        # All ranks repeat the step from here: nobody sends anything else in this attempt.
        self._stays_out = True
        if not self._alone:
            each = self._ledger.known[FORWARD]
            issue(each[done:] + each * (count - failed_at - 1), self._parameters[0].device)

    def begin(self) -> None:
        """No gradients, nothing in flight, weights in shards."""
        for parameter in self._parameters:
            parameter.grad = None
        if not self._clean:
            self._drop_whole()
        self._key, self._clean = None, False
        if self._statistics is not None:
            self._statistics.counts = True

    def before(self, number: int, count: int) -> None:
        """Part `number` of `count` follows."""
        self._learn()
        self._key = sends, last = self._kinds(count)[number]
        self._model.set_requires_gradient_sync(sends)
        # Replicas of shards sum what the parts of a step have added up, once.
        self._model.set_requires_all_reduce(last)

    def abandon(self) -> None:
        """The part under way has failed: let go of all that it holds."""
        self._done, self._key = len(self._ledger.now), None
        self._ledger.now = []
        reset(self._model)
        self._drop_whole()
        for parameter in self._parameters:
            parameter.grad = None

    def finish(self, failed_at: int | None, count: int) -> None:
        """Take part in what the others still wait for, where this rank has failed."""
        if failed_at is None:
            self._learn()
            self._clean = True
            return
        if self._stays_out:
            self._stays_out = False
            return
        kinds = self._kinds(count)
        left = self._ledger.known[kinds[failed_at]][self._done :]
        for kind in kinds[failed_at + 1 :]:
            left = left + self._ledger.known[kind]
        if not self._alone:
            issue(left, self._parameters[0].device)

    def squares(self) -> torch.Tensor:
        """The squared norm of this rank's shards; replicas share out what they all hold."""
        return summed_squares(self.gradients(), self._parameters[0].device) / self._replicas

    def gradients(self) -> list[torch.Tensor]:
        """This rank's shards of them."""
        return [parameter.grad._local_tensor for parameter in self._parameters if parameter.grad is not None]  # type: ignore[attr-defined]

    def close(self) -> None:
        """The model stays sharded."""

    def _kinds(self, count: int) -> list[tuple[bool, bool]]:
        """For each of so many parts whether it sends its gradients, and whether it is the last."""
        lasts = [number == count - 1 for number in range(count)]
        return [(last or not self._keeps_whole, last) for last in lasts]

    def _learn(self) -> None:
        """The part that has just gone well shows how such parts go."""
        if self._key is not None:
            self._ledger.known[self._key] = self._ledger.now
        self._ledger.now = []

    def _drop_whole(self) -> None:
        for module in self._units:
            for unit in _groups_of(module):
                for fsdp_param in unit.fsdp_params:
                    fsdp_param.unsharded_accumulated_grad = None
                    if hasattr(fsdp_param, "_unsharded_param"):
                        fsdp_param._unsharded_param.grad = None


def _groups_of(module: Any) -> list[Any]:
    """The parameter groups of a sharded module; older versions of torch have one at most."""
    state = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    if found is not None:
        return list(found)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def issue(left: list[Collective], device: torch.device) -> None:
    """Take part in collectives with zeros, in their order, and forget what comes of them."""
    given: dict[torch.dtype, torch.Tensor] = {}
    got: dict[torch.dtype, torch.Tensor] = {}
    for dtype in {collective.dtype for collective in left if collective.statistics is None}:
        mine = [
            collective for collective in left if collective.dtype is dtype and collective.statistics is None
        ]
        given[dtype] = torch.zeros(max(one.given for one in mine), dtype=dtype, device=device)
        got[dtype] = torch.zeros(max(one.got for one in mine), dtype=dtype, device=device)
    gather, scatter = DefaultAllGather(), DefaultReduceScatter()
    for collective in left:
        if collective.statistics is not None:
            collective.statistics.answer(device)
            continue
        into, of = got[collective.dtype][: collective.got], given[collective.dtype][: collective.given]
        if collective.gathers:
            gather(into, of, collective.group)
            continue
        # Sums of zeros with what the others sent would grow from one collective to the next.
        of.zero_()
        scatter(into, of, collective.group, dist.ReduceOp.SUM)
        if collective.then is not None:
            dist.all_reduce(into, group=collective.then)


def reset(model: Any) -> None:
    """After an exception in a pass: nothing under way, all weights in shards."""
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:
        reset_by_hand(model)


def reset_by_hand(model: Any) -> None:
    """The same for a torch that cannot do it itself (before 2.12)."""
    root = model._get_fsdp_state()
    context = root._comm_ctx
    streams = [
        getattr(context, name)
        for name in ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream",
                     "all_reduce_stream")
        if hasattr(context, name)
    ]  # fmt: skip
    current = root._device_handle.current_stream()
    for stream in streams:
        # What is in flight may still read memory that is about to be given back.
        current.wait_stream(stream)
    if hasattr(context, "all_gather_state"):
        context.all_gather_state = None
    if isinstance(getattr(context, "reduce_scatter_states", None), list):
        context.reduce_scatter_states.clear()
    elif hasattr(context, "reduce_scatter_state"):
        context.reduce_scatter_state = None
    context.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        getattr(state, "_modules_to_run_forward", set()).clear()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for unit in _groups_of(module):
                _reset_group(unit)
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def _reset_group(unit: Any) -> None:
    result = unit._all_gather_result
    if result is not None and hasattr(result.all_gather_work, "wait"):
        result.all_gather_work.wait()
    for name in ("_all_gather_result", "_post_reduce_event", "_all_reduce_state",
                 "_reshard_after_forward_event", "_partial_reduce_output"):  # fmt: skip
        if hasattr(unit, name):
            setattr(unit, name, None)
    unit._post_forward_indices.clear()
    unit._training_state = TrainingState.IDLE
    unit._to_sharded()


# Shard a model with FSDP2, one unit at a time, so that a device never holds more than one unit whole.
#
# The model is built on the host. Each unit is moved to the device, given the values of rank 0, sharded, and
# its whole copy is freed before the next unit comes. On the device this leaves the shards and the memory of
# one unit; building there would leave the whole model in the allocator's cache.


def shard(model: nn.Module, setting: Setting, device: str, fill: Fill | None = None) -> None:
    """Move a model to the device and shard it, unit by unit and then the rest."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _refuse_scalars(model, setting)
    dtypes = setting.dtypes
    cast = None if dtypes.autocast is None else torch_dtype(dtypes.autocast)
    # Without a cast, gradients come in the dtype of their weights, which a job may have chosen.
    as_they_come = cast is None and dtypes.reductions == dtypes.gradients
    summed = None if as_they_come else torch_dtype(dtypes.reductions)
    policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=summed)
    if cast is not None:
        widen_norms(model)
    mesh = device_mesh(setting, device)

    def placement(parameter: nn.Parameter) -> Any:
        return shard_placement(parameter.shape, setting.mesh.dp_shard)

    placed: Placed = {}
    for unit in shard_units(model):
        place(unit, device, placed, fill)
        fully_shard(unit, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)
        placed.clear()
    place(model, device, placed, fill)
    fully_shard(model, mesh=mesh, mp_policy=policy, shard_placement_fn=placement)


def shard_placement(shape: torch.Size, shards: int) -> Any:
    """Return along which dimension to shard a parameter; None for the first one, which is the default.

    Weights of experts are stacked: their first dimension is the number of experts. Sharded along it, 8
    experts over 64 ranks would leave 56 ranks empty and the others with an eighth each. The first dimension
    that divides evenly is taken instead, as torch asks of all but the first.
    """
    from torch.distributed.tensor import Shard

    if not shape or shape[0] >= shards:
        return None
    even = (dim for dim in range(1, len(shape)) if shape[dim] % shards == 0)
    dim = next(even, None)
    return None if dim is None else Shard(dim)


def _refuse_scalars(model: nn.Module, setting: Setting) -> None:
    """Name the parameters without a dimension: torch's fully_shard refuses them."""
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise WrongUse(
            f"strategy {setting.strategy}",
            found=f"torch cannot shard parameters without a dimension: {', '.join(scalars[:3])}",
            cure="Give them one dimension, as in torch.ones(1), or choose another strategy.",
        )


def place(module: nn.Module, device: str, placed: Placed, fill: Fill | None) -> None:
    """Put the parameters and buffers of a module on a device, except those that are sharded already.

    `placed` keeps a tensor with two names one tensor. A tensor on the meta device has no values: it gets
    memory, and `fill` gives it the values of rank 0.
    """
    from torch.distributed.tensor import DTensor

    for owner in module.modules():
        both: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if id(tensor) not in placed:
                    moved = _moved(tensor, device)
                    placed[id(tensor)] = placed[id(moved)] = (tensor, moved)
                    if fill is not None:
                        fill(moved)
                tensors[name] = placed[id(tensor)][1]


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    data = tensor.detach()
    new = torch.empty_like(data, device=device) if data.is_meta else data.to(device)
    if not isinstance(tensor, nn.Parameter):
        return tensor if new is data else new
    if new is data:
        return tensor
    parameter = nn.Parameter(new, requires_grad=tensor.requires_grad)
    # What somebody has hung on the tensor goes along; what the new one has by itself stays.
    for name, value in vars(tensor).items():
        vars(parameter).setdefault(name, value)
    return parameter


def device_mesh(setting: Setting, device: str) -> Any:
    """Return the mesh of a sharded setting; made of real numbers even while tracing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils._python_dispatch import _disable_current_modes

    mesh = setting.mesh
    with _disable_current_modes():
        if mesh.dp_replicate > 1:
            return init_device_mesh(
                device, (mesh.dp_replicate, mesh.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
            )
        return init_device_mesh(device, (mesh.dp_shard,), mesh_dim_names=("dp_shard",))
