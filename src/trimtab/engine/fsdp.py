"""Shard a model with FSDP2, and recover when one rank runs out of memory.

A sharded pass is a fixed sequence of collectives: weights are gathered, gradients are reduce-scattered. A
pass of one sample before the first step records this sequence. A rank that fails in the middle of a pass
frees its memory and sends zeros in the remaining collectives, so that the other ranks can finish their pass.
The status of the step then tells all ranks to discard it.

`shard_model` shards one unit at a time, so that a device never holds more than one full unit. The model is
built on the CPU. Each unit is moved to the device, gets the values of rank 0, is sharded, and its full copy
is freed before the next unit. The device then holds the shards and the memory of one unit; building on the
device would leave the whole model in the allocator's cache.

A rank of a pipeline shards the blocks of its stages, and what they need outside of the blocks, over the ranks
of the same stage. Every pass of its schedule gathers the weights that it uses and frees them again, so that a
kind of pass always has the same collectives. Stages that hold the same weights, such as a tied embedding, sum
their gradients after all passes: a sum inside of a backward pass would wait for a stage that waits for the
result of that pass.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from trimtab.engine.expert_parallel import split_experts
from trimtab.engine.gradients import sum_squares
from trimtab.engine.precision import torch_dtype
from trimtab.engine.sync_norm import widen_norms
from trimtab.engine.tensor_parallel import TensorSplitter, clear_sharding_cache
from trimtab.errors import WrongUse
from trimtab.spec import Offload
from trimtab.strategies import limits
from trimtab.strategies.schedules import Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.engine.context_parallel import ContextCollective, ContextGroup
    from trimtab.engine.expert_parallel import ExpertCollective, ExpertGroup
    from trimtab.engine.gradients import StagePass
    from trimtab.engine.pipeline_stage import BlockRelay
    from trimtab.engine.stage_placement import StageHolders
    from trimtab.engine.sync_norm import NormCollective, SharedStatistics
    from trimtab.engine.tensor_plan import TensorPlan
    from trimtab.spec import Setting

    FillTensor = Callable[[torch.Tensor, tuple[int, ...] | None], None]
    """Fills a tensor on the device with the values that all ranks must have; or, if the second argument is
    not None, all ranks of these stages of a pipeline."""
    MovedTensors = dict[int, tuple[torch.Tensor, torch.Tensor]]
    """By id: a tensor and its moved copy. Both are kept alive, so that their ids are not reused."""


_CPU_BYTES = 2**30
SETUP_METHODS = (
    (FSDPState, "_lazy_init"),
    (FSDPParam, "init_all_gather_outputs"),
    (FSDPParam, "init_unsharded_param"),
)
"""Methods of FSDP2 that do something in the first pass only."""
FORWARD = (False, False, True)
"""Key of the sequence of a forward pass without gradients."""


class Collective(NamedTuple):
    """One collective of a recorded sequence."""

    gathers: bool
    """Whether it gathers weights; else it reduce-scatters gradients."""
    group: Any
    sent: int
    """Elements that this rank sends."""
    received: int
    dtype: torch.dtype
    all_reduce_group: Any
    """Group that sums the result afterwards (replicas of shards, in HSDP); None if there is none."""
    statistics: NormCollective | ContextCollective | ExpertCollective | None = None
    """Collective of a synchronised BatchNorm layer, of split attention or of experts on other ranks; it has
    no weights or gradients."""


class CollectiveLog:
    """Recorded collectives of the current pass."""

    def __init__(self) -> None:
        self.current: list[Collective] = []
        self.mid_backward: Callable[[], None] | None = None

    def record(self, entry: Collective) -> None:
        """Record a collective, just before it is issued."""
        if self.mid_backward is not None and not entry.gathers and entry.statistics is None:
            self.mid_backward()
        self.current.append(entry)

    def record_statistics(self, exchange: NormCollective | ContextCollective | ExpertCollective) -> None:
        """Record a collective inside a layer, before it starts."""
        self.record(Collective(False, None, exchange.length, 0, exchange.dtype, None, exchange))


class _Gather(DefaultAllGather):
    def __init__(self, log: CollectiveLog) -> None:
        self._log = log

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        entry = Collective(
            True, group, input_tensor.numel(), output_tensor.numel(), output_tensor.dtype, None
        )
        self._log.record(entry)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _Scatter(DefaultReduceScatter):
    def __init__(self, log: CollectiveLog, unit: Any) -> None:
        self._log = log
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
        self._log.record(entry)
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


class StageShards(NamedTuple):
    """The stages of a rank of a pipeline whose weights are shards."""

    blocks: tuple[tuple[Any, ...], ...]
    """Sharded blocks of each stage of this rank, in order."""
    outside: tuple[Any, ...]
    """Sharded modules outside of the blocks; the root is among them."""
    shared: dict[int, tuple[Any, int]]
    """By id, the parameters that several stages hold: the process group of the ranks with the same shard, and
    the number of these ranks."""


class ShardedGradients:
    """Gradients that FSDP2 reduce-scatters. They are sums, not means: losses are weighted before."""

    equal_micro_batches = True
    sent_any = True
    """Every pass communicates, because it gathers weights: a rank never retries a micro-batch alone."""

    def __init__(  # noqa: PLR0913 - all but the model are named
        self,
        model: nn.Module,
        *,
        replicas: int,
        alone: bool,
        tensor_parallel: int = 1,
        mid_backward: Callable[[], None] | None = None,
        statistics: SharedStatistics | ContextGroup | None = None,
        experts: ExpertGroup | None = None,
        shards: StageShards | None = None,
        parameters: list[Any] | None = None,
        beside: ShardedGradients | None = None,
        device: str | None = None,
    ) -> None:
        """Prepare a sharded model.

        `replicas` is the number of copies of every shard. `alone` means that there is one rank.
        `tensor_parallel` is the number of ranks that split every layer between them. `statistics`
        runs the collectives of synchronised BatchNorm or of split attention, if there are some, and `experts`
        those of experts on other ranks. `shards` are the stages of a rank of a pipeline. `parameters`
        are those that get gradients; by default all that are trainable. `beside` is the storage of other
        parameters of the same model, if there is one. `device` is where the model computes, if its shards are
        on the host.
        """
        self._model: Any = model
        self._log: CollectiveLog = CollectiveLog() if beside is None else beside._log
        self._log.mid_backward = mid_backward
        self._sequences: dict[tuple[Any, ...], list[Collective]] = {}
        """By (does the pass send its gradients, is it the last of a step); or FORWARD; or by StagePass."""
        self._shards = shards
        if statistics is not None:
            statistics.record = self._log.record_statistics
        self._statistics = statistics
        if experts is not None:
            experts.record = self._log.record_statistics
        self._experts = experts
        self._replicas = replicas
        self._tensor_parallel = tensor_parallel
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.max_arrivals = len(self._units)
        self._parameters: list[Any] = parameters or [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self._device = self._parameters[0].device if device is None else torch.device(device)
        self._key: tuple[Any, ...] | None = None
        self._done = 0
        self._clean = True
        self._skips_finish = False
        self._alone = alone
        if beside is not None:
            return
        for module in self._units:
            if not self._is_alone(module):
                # Without it, torch divides by the number of ranks; a single one would copy to divide by 1.
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            for unit in _parameter_groups(module):
                module.set_custom_all_gather(_Gather(self._log))
                module.set_custom_reduce_scatter(_Scatter(self._log, unit))

    def _is_alone(self, module: nn.Module) -> bool:
        """Whether no other rank has gradients of the same weights, as of experts that one rank holds."""
        sizes = [unit._reduce_scatter_process_group.size() for unit in _parameter_groups(module)]
        return self._replicas == 1 and not any(size > 1 for size in sizes)

    @functools.cached_property
    def _keeps_unsharded(self) -> bool:
        """Whether unsharded gradients fit in memory while micro-batches accumulate.

        If not, every micro-batch reduce-scatters its gradients. Only steps of several micro-batches ask: a
        trace of one serves GPUs with more or less memory too.
        """
        device = self._device
        memory = (
            torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _CPU_BYTES
        )
        element = max(parameter.element_size() for parameter in self._parameters)
        return limits.keeps_whole(sum(parameter.numel() for parameter in self._parameters), memory, element)

    @property
    def is_rehearsed(self) -> bool:
        """Whether the collectives of all kinds of passes are recorded."""
        if self._shards is not None:
            return any(stage_pass.ends_step for stage_pass in self._sequences)  # type: ignore[attr-defined]
        return self._alone or len(self._sequences.keys() - {FORWARD}) > 1

    def before_forward(self) -> None:
        """Prepare for a forward pass without gradients, as gradient caching runs first."""
        self._save_sequence()
        self._key = FORWARD
        if self._experts is not None:
            self._experts.start_pass()

    def after_forward(self) -> None:
        """Reshard all weights after that pass, so that every pass has the same sequence of collectives."""
        reset_fsdp(self._model)

    def finish_forwards(self, failed_at: int | None, count: int) -> None:
        """Join the remaining collectives of `count` such passes if this rank failed in pass `failed_at`."""
        if failed_at is None:
            self._save_sequence()
            self._key = None
            return
        done = len(self._log.current)
        self.discard_micro_batch()
        # All ranks now repeat the step: this attempt sends nothing else.
        self._skips_finish = True
        if not self._alone:
            each = self._sequences[FORWARD]
            issue_collectives(each[done:] + each * (count - failed_at - 1), self._device)

    def start_attempt(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        if not self._clean:
            self._drop_unsharded_gradients()
        self._key, self._clean = None, False
        if self._statistics is not None:
            self._statistics.is_counted = True

    def prepare_micro_batch(self, number: int, count: int) -> None:
        """Prepare for micro-batch `number` of `count`."""
        self._save_sequence()
        self._key = sends, last = self._kinds(count)[number]
        if self._experts is not None:
            self._experts.start_pass()
        self._model.set_requires_gradient_sync(sends)
        # Replicas of shards sum the accumulated gradients once a step.
        self._model.set_requires_all_reduce(last)

    def start_pass(self, stage_pass: StagePass) -> None:
        """Prepare for a pass of a pipeline."""
        assert self._shards is not None  # noqa: S101 - only pipelines have passes
        self._save_sequence()
        self._key = stage_pass
        if self._experts is not None and not stage_pass.adds_gradients:
            self._experts.start_pass()
        if not stage_pass.adds_gradients:
            return
        # Other micro-batches ran forward in between: torch would gather what the pass does not need next.
        forget_forward_order(self._model)
        for modules, last in (
            (self._shards.blocks[stage_pass.place], stage_pass.ends_stage),
            (self._shards.outside, stage_pass.ends_step),
        ):
            for module in modules:
                module.set_requires_gradient_sync(last or not self._keeps_unsharded, recurse=False)
                module.set_requires_all_reduce(last, recurse=False)

    def finish_pass(self, stage_pass: StagePass) -> None:
        """Send gradients that no hook has sent: those that were computed after the backward pass.

        A hook is also missing if the last pass of a rank is that of a stage without trainable weights.
        """
        assert self._shards is not None  # noqa: S101 - only pipelines have passes
        if stage_pass.kind is Pass.WEIGHT:
            _accumulate_gradients((*self._shards.blocks[stage_pass.place], *self._shards.outside))
        if stage_pass.ends_stage or stage_pass.ends_step:
            self._model._get_fsdp_state()._root_post_backward_final_callback()

    def abandon_pass(self) -> None:
        """Free everything that a failed pass of a pipeline holds, and join its remaining collectives."""
        key = self._key
        self.discard_micro_batch()
        if key is not None:
            issue_collectives(self._sequences[key][self._done :], self._device)

    def skip_pass(self, stage_pass: StagePass) -> None:
        """Join the collectives of a pass of a pipeline that this rank does not run, because it failed."""
        issue_collectives(self._sequences[stage_pass], self._device)

    def discard_micro_batch(self) -> None:
        """Free everything that the failed micro-batch holds."""
        self._done, self._key = len(self._log.current), None
        self._log.current = []
        reset_fsdp(self._model)
        self._drop_unsharded_gradients()
        for parameter in self._parameters:
            parameter.grad = None

    def finish_attempt(self, failed_at: int | None, count: int) -> None:
        """Join the remaining collectives of the attempt if this rank failed in micro-batch `failed_at`."""
        if failed_at is None:
            self._save_sequence()
            self._clean = True
        if self._shards is not None:
            self._sum_over_stages(self._shards)
            return
        if failed_at is None:
            return
        if self._skips_finish:
            self._skips_finish = False
            return
        kinds = self._kinds(count)
        remaining = self._sequences[kinds[failed_at]][self._done :]
        for kind in kinds[failed_at + 1 :]:
            remaining = remaining + self._sequences[kind]
        if not self._alone:
            issue_collectives(remaining, self._device)

    def squared_norm(self) -> torch.Tensor:
        """Return the squared norm of this rank's shards, each divided by the number of ranks that have it."""
        by_copies: dict[int, list[Any]] = {}
        for parameter in self._parameters:
            by_copies.setdefault(self._count_copies(parameter), []).append(parameter)
        device = self._parameters[0].device
        return sum(  # type: ignore[return-value]  # there is at least one parameter
            sum_squares(_list_local_gradients(parameters), device) / copies
            for copies, parameters in by_copies.items()
        )

    def _count_copies(self, parameter: Any) -> int:
        """Return the number of ranks with the same shard of a parameter."""
        copies = self._replicas
        if self._tensor_parallel > 1 and parameter.placements[-1].is_replicate():
            copies *= self._tensor_parallel
        if self._shards is not None and id(parameter) in self._shards.shared:
            copies *= self._shards.shared[id(parameter)][1]
        return copies

    def local_gradients(self) -> list[torch.Tensor]:
        """Return this rank's shards of the gradients."""
        return _list_local_gradients(self._parameters)

    def close(self) -> None:
        """Do nothing: the model stays sharded."""

    def _sum_over_stages(self, shards: StageShards) -> None:
        """Sum the gradients of what several stages hold, after all passes; a stage without a use adds 0."""
        works = []
        for parameter in self._parameters:
            if id(parameter) in shards.shared:
                group, _ = shards.shared[id(parameter)]
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local = parameter.grad._local_tensor
                if local.numel():
                    works.append(dist.all_reduce(local, group=group, async_op=True))
        for work in works:
            if work is not None:
                work.wait()

    def _kinds(self, count: int) -> list[tuple[bool, bool]]:
        """Return for each of `count` micro-batches (does it send its gradients, is it the last)."""
        lasts = [number == count - 1 for number in range(count)]
        return [(last or not self._keeps_unsharded, last) for last in lasts]

    def _save_sequence(self) -> None:
        """Store the collectives of the pass that has just succeeded."""
        if self._key is not None:
            self._sequences[self._key] = self._log.current
        self._log.current = []

    def _drop_unsharded_gradients(self) -> None:
        for module in self._units:
            for unit in _parameter_groups(module):
                for fsdp_param in unit.fsdp_params:
                    fsdp_param.unsharded_accumulated_grad = None
                    if hasattr(fsdp_param, "_unsharded_param"):
                        fsdp_param._unsharded_param.grad = None


def _accumulate_gradients(modules: Sequence[Any]) -> None:
    """Add gradients that autograd has just made to those of earlier passes, in the dtype of reductions.

    Gradients that the backward pass made before have that dtype already, and FSDP sends one dtype only.
    """
    for module in modules:
        for unit in _parameter_groups(module):
            for fsdp_param in unit.fsdp_params:
                if hasattr(fsdp_param, "_unsharded_param"):
                    fsdp_param.accumulate_unsharded_grad_if_needed()
                    fsdp_param.to_accumulated_grad_if_needed()


def _list_local_gradients(parameters: list[Any]) -> list[torch.Tensor]:
    return [parameter.grad._local_tensor for parameter in parameters if parameter.grad is not None]


def _parameter_groups(module: Any) -> list[Any]:
    """Return the FSDP parameter groups of a sharded module; older versions of torch have at most one."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def find_full_copies(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return the full copies of sharded parameters that FSDP has made so far, by id of the parameter.

    FSDP reuses a copy in every pass, so that a change of `requires_grad` has to be made on both.
    """
    return {
        id(fsdp_param.sharded_param): fsdp_param._unsharded_param
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for unit in _parameter_groups(module)
        for fsdp_param in unit.fsdp_params
        if hasattr(fsdp_param, "_unsharded_param")
    }


def issue_collectives(collectives: list[Collective], device: torch.device) -> None:
    """Join collectives with zeros, in order, and discard their results."""
    inputs: dict[torch.dtype, torch.Tensor] = {}
    outputs: dict[torch.dtype, torch.Tensor] = {}
    for dtype in {collective.dtype for collective in collectives if collective.statistics is None}:
        mine = [
            collective
            for collective in collectives
            if collective.dtype is dtype and collective.statistics is None
        ]
        inputs[dtype] = torch.zeros(max(entry.sent for entry in mine), dtype=dtype, device=device)
        outputs[dtype] = torch.zeros(max(entry.received for entry in mine), dtype=dtype, device=device)
    gather, scatter = DefaultAllGather(), DefaultReduceScatter()
    for collective in collectives:
        if collective.statistics is not None:
            collective.statistics.answer(device)
            continue
        output = outputs[collective.dtype][: collective.received]
        source = inputs[collective.dtype][: collective.sent]
        if collective.gathers:
            gather(output, source, collective.group)
            continue
        # Zero the input again: sums of earlier collectives could accumulate in it.
        source.zero_()
        scatter(output, source, collective.group, dist.ReduceOp.SUM)
        if collective.all_reduce_group is not None:
            dist.all_reduce(output, group=collective.all_reduce_group)


def forget_forward_order(model: Any) -> None:
    """Clear the order of forward passes, by which FSDP gathers weights ahead in the backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._get_fsdp_state()._comm_ctx.post_forward_order.clear()
            for unit in _parameter_groups(module):
                unit._post_forward_indices.clear()


def end_root_forward(model: Any, output: torch.Tensor) -> torch.Tensor:
    """Do what FSDP does after the root's forward pass, for one that an exception ended; return its output."""
    state = model._get_fsdp_state()
    if state._training_state is not TrainingState.FORWARD:
        return output
    result: torch.Tensor = state._post_forward(model, (), output)
    return result


def reset_fsdp(model: Any) -> None:
    """Reset FSDP's state after an exception in a pass: nothing in flight, all weights sharded."""
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:
        reset_fsdp_manually(model)


def reset_fsdp_manually(model: Any) -> None:
    """Do the same for versions of torch before 2.12, which have no method for it."""
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
        # Operations in flight may still read memory that is freed below.
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
            for unit in _parameter_groups(module):
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


def shard_model(  # noqa: PLR0913 - who splits what, last
    model: nn.Module,
    setting: Setting,
    device: str,
    fill: FillTensor | None = None,
    *,
    units: Sequence[nn.Module],
    relay: BlockRelay | None = None,
    plan: TensorPlan | None = None,
    experts: ExpertGroup | None = None,
) -> StageShards | None:
    """Move a model to the device and shard it: unit by unit, then the rest.

    Units that are not in the model any more are left out. With `relay`, the model has the stages of one rank
    of a pipeline, which are returned; else None. With `plan`, the ranks of a tensor-parallel group split
    the layers of each unit first. With `experts`, each rank keeps its experts of a unit, sharded over the
    ranks with the same experts.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    dtypes = setting.dtypes
    cast = None if dtypes.autocast is None else torch_dtype(dtypes.autocast)
    # Without autocast, gradients have the dtype of their weights, which the job may have chosen.
    keeps_dtype = cast is None and dtypes.reductions == dtypes.gradients
    reduce_dtype = None if keeps_dtype else torch_dtype(dtypes.reductions)
    policy = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=reduce_dtype)
    if cast is not None:
        widen_norms(model)
    mesh, tensor_mesh, stage_mesh = make_device_mesh(setting, device)
    splitter = None if plan is None else TensorSplitter(model, plan, tensor_mesh, experts)
    # Memory can only be pinned for a GPU.
    is_offloaded = Offload.PARAMS in setting.offload
    offload = CPUOffloadPolicy(pin_memory=device != "cpu") if is_offloaded else OffloadPolicy()

    def shard(module: nn.Module, mesh: Any, shards: int) -> None:
        def placement(parameter: nn.Parameter) -> Any:
            local = getattr(parameter, "_local_tensor", parameter)
            return choose_shard_placement(local.shape, shards)

        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            shard_placement_fn=placement,
            offload_policy=offload,
            # None: not the root, whose backward pass follows at once; in a pipeline it does not.
            reshard_after_forward=None if relay is None else True,
        )

    if experts is not None:
        experts.input_dtype = cast
    moved_tensors: MovedTensors = {}
    names = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}
    present = set(names.values())
    # Experts of other pipeline stages are not in the model.
    expert_modules = set() if experts is None else {names[name] for name in experts.layers if name in names}
    blocks = [] if relay is None else list(relay.get_blocks(model).children())
    inside = {id(module) for block in blocks for module in block.modules()}
    present -= _list_inside(
        model, [] if experts is None else [name for name in experts.layers if name in names]
    )
    holders = {} if relay is None else _find_holders(model, relay)
    for unit in (*(unit for unit in units if id(unit) in present), model):
        rest = None if relay is None or id(unit) not in inside else ()
        fill_unit = None if fill is None else functools.partial(_fill_tensor, fill, holders, rest)
        move_module(unit, device, moved_tensors, fill_unit)
        if splitter is not None:
            splitter.split_module(unit)
            splitter.release()
            # The parameters from before the split are not needed any more.
            moved_tensors.clear()
        for module in unit.modules():
            if experts is not None and id(module) in expert_modules:
                split_experts(module, experts)
                moved_tensors.clear()
                shard(module, experts.shard_mesh, setting.mesh.expert_ranks // setting.mesh.ep)
                expert_modules.remove(id(module))
        shard(unit, mesh, setting.mesh.shards)
        moved_tensors.clear()
    if relay is None:
        return None
    relay.tensor_mesh = tensor_mesh
    return _connect_stages(model, relay, blocks, stage_mesh)


def _list_inside(model: nn.Module, experts: list[str]) -> set[int]:
    """Return the ids of all modules inside of modules of experts, which are no units of their own."""
    owners = map(model.get_submodule, experts)
    return {id(module) for owner in owners for module in owner.modules() if module is not owner}


def _find_holders(model: nn.Module, relay: BlockRelay) -> dict[int, tuple[int, ...]]:
    """Return the stages that hold each parameter outside of the blocks, by id of the parameter."""
    return {id(parameter): relay.holders.find(name) for name, parameter in model.named_parameters()}


def _fill_tensor(
    fill: FillTensor,
    holders: dict[int, tuple[int, ...]],
    rest: tuple[int, ...] | None,
    tensor: torch.Tensor,
    moved: torch.Tensor,
) -> None:
    fill(moved, holders.get(id(tensor), rest))


def _connect_stages(
    model: nn.Module, relay: BlockRelay, blocks: list[nn.Module], stage_mesh: Any
) -> StageShards:
    """Let FSDP know where a stage ends and what it gathers next, and return the shards of the stages."""
    relay.end_forward = functools.partial(end_root_forward, model)
    own: list[tuple[Any, ...]] = [tuple(blocks[first:stop]) for first, stop in relay.stages]
    for stage in own:
        for before, block in pairwise(stage):
            block.set_modules_to_backward_prefetch([before])
    inside = {id(module) for block in blocks for module in block.modules()}
    shared_groups = _make_shared_groups(relay.holders, stage_mesh)
    return StageShards(
        blocks=tuple(
            tuple(module for block in stage for module in block.modules() if isinstance(module, FSDPModule))
            for stage in own
        ),
        outside=tuple(
            module
            for module in model.modules()
            if isinstance(module, FSDPModule) and id(module) not in inside
        ),
        shared={
            id(parameter): (shared_groups[ranks], len(ranks))
            for name, parameter in model.named_parameters()
            if len(ranks := relay.holders.find(name)) > 1
        },
    )


def _make_shared_groups(holders: StageHolders, stage_mesh: Any) -> dict[tuple[int, ...], Any]:
    """Return the process groups of the ranks with the same shards, by the stages that hold a parameter.

    Every rank creates all of them, in the same order.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    stages, size = stage_mesh.size(), dist.get_world_size()
    each = size // stages
    own: dict[tuple[int, ...], Any] = {tuple(range(stages)): stage_mesh.get_group()}
    with _disable_current_modes():
        for ranks in holders.list_groups():
            for place in range(each):
                group = dist.new_group([stage * each + place for stage in ranks])
                if dist.get_rank() % each == place:
                    own[ranks] = group
    return own


def choose_shard_placement(shape: torch.Size, shards: int) -> Any:
    """Return the dimension to shard a parameter along; None for the first one, which is the default.

    Weights of experts are stacked: their first dimension is the number of experts. Sharding along it would
    leave 56 of 64 ranks empty with 8 experts, and the others with an eighth each. Instead, the first
    dimension that divides evenly is used; torch requires even division for all dimensions but the first.
    """
    from torch.distributed.tensor import Shard

    if not shape or shape[0] >= shards:
        return None
    even = (dim for dim in range(1, len(shape)) if shape[dim] % shards == 0)
    dim = next(even, None)
    return None if dim is None else Shard(dim)


def refuse_scalars(model: nn.Module, setting: Setting) -> None:
    """Raise an error that names parameters without a dimension: torch's fully_shard refuses them."""
    scalars = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise WrongUse(
            f"strategy {setting.strategy}",
            found=f"torch cannot shard parameters without a dimension: {', '.join(scalars[:3])}",
            cure="Give them one dimension, as in torch.ones(1), or choose another strategy.",
        )


def move_module(
    module: nn.Module,
    device: str,
    moved_tensors: MovedTensors,
    fill: Callable[[torch.Tensor, torch.Tensor], None] | None,
) -> None:
    """Move the parameters and buffers of a module to a device, except those already sharded.

    `moved_tensors` makes sure that a tensor with two names stays one tensor. A tensor on the meta device has
    no values: it gets memory, and `fill`, which gets both, writes the values of rank 0.
    """
    from torch.distributed.tensor import DTensor

    for owner in module.modules():
        both: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for tensors in both:
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, DTensor):
                    continue
                if id(tensor) not in moved_tensors:
                    moved = _move_tensor(tensor, device)
                    moved_tensors[id(tensor)] = moved_tensors[id(moved)] = (tensor, moved)
                    if fill is not None:
                        fill(tensor, moved)
                tensors[name] = moved_tensors[id(tensor)][1]


def _move_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    data = tensor.detach()
    new = torch.empty_like(data, device=device) if data.is_meta else data.to(device)
    if not isinstance(tensor, nn.Parameter):
        return tensor if new is data else new
    if new is data:
        return tensor
    parameter = nn.Parameter(new, requires_grad=tensor.requires_grad)
    # Copy attributes that were set on the old tensor; do not overwrite those of the new one.
    for name, value in vars(tensor).items():
        vars(parameter).setdefault(name, value)
    return parameter


def make_device_mesh(setting: Setting, device: str) -> tuple[Any, Any, Any]:
    """Return the device meshes over which a sharded setting shards, splits layers, and has pipeline stages.

    The last two are None if there is one rank along that axis. Ranks that split sequences hold different
    shards: weights are cut over both, as in torchtitan. A mesh holds real tensors even while tracing.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils._python_dispatch import _disable_current_modes

    clear_sharding_cache()
    mesh = setting.mesh
    axes = {"dp_shard_cp": mesh.shards}
    if mesh.dp_replicate > 1:
        axes = {"dp_replicate": mesh.dp_replicate, **axes}
    data_axes = tuple(axes)
    if mesh.tp > 1:
        # The last axis: the ranks that split a layer are neighbours.
        axes["tp"] = mesh.tp
    if mesh.pp > 1:
        # The first axis: stages send each other the least.
        axes = {"pp": mesh.pp, **axes}
    with _disable_current_modes():
        every = init_device_mesh(torch.device(device).type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        data = every if tuple(axes) == data_axes else every[data_axes]
        return data, every["tp"] if mesh.tp > 1 else None, every["pp"] if mesh.pp > 1 else None
