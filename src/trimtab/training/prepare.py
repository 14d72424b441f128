"""Prepare a run: build or take the model, place, cast, distribute and compile it, make the optimizer."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

import psutil
import torch
from torch import nn

from trimtab.engine.branches import compute_branch_loss, get_branches, keep_branch
from trimtab.engine.build import (
    EntryPoints,
    choose_build_device,
    find_entries,
    is_built_on_host,
    use_build_defaults,
)
from trimtab.engine.compile import CompileSwitch
from trimtab.engine.context_parallel import refuse_context
from trimtab.engine.in_backward import InBackwardGradients
from trimtab.engine.in_backward_rules import refuse_in_backward
from trimtab.engine.optimizer import ONLY, NamedOptimizer, choose_implementation, make_optimizers
from trimtab.engine.pipeline_stage import keep_stage
from trimtab.engine.precision import torch_dtype
from trimtab.engine.step import arrange_model, find_stand_in_form, make_meta_loss, refuse_partial_model
from trimtab.engine.tensor_parallel import gather_loss
from trimtab.errors import EnvironmentFault, JobFailed, WrongUse
from trimtab.jobs.job import Job, list_expert_modules, loss_function
from trimtab.jobs.load import job_error
from trimtab.planner.pins import NOT_COMPILED_SYNCHRONISED
from trimtab.spec.precision import FLOAT32
from trimtab.strategies import strategy_of
from trimtab.training import process_group
from trimtab.training.loading import rank_slice_bounds
from trimtab.training.oom_recovery import (
    MemoryGauge,
    MicroBatchFitter,
    MicroBatchSizes,
    restarts_after_oom,
)
from trimtab.training.optimizer_step import OptimizerStep
from trimtab.training.pipeline import PipelineRunner
from trimtab.training.process_group import (
    Buffers,
    HoldingRanks,
    RankGroups,
    broadcast_tensor,
    find_running_statistics,
    synchronize_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.engine.context_parallel import ContextGroup
    from trimtab.engine.gradients import Gradients
    from trimtab.engine.pipeline_stage import BlockRelay, StageSplit
    from trimtab.engine.sync_norm import SharedStatistics
    from trimtab.engine.update_phases import UpdatePhase
    from trimtab.spec import Estimate, Setting
    from trimtab.training.process_group import World

HOST_SHARE = 0.5
"""Share of the host's free memory that all ranks' copies of the model may take while they are built."""


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    """Arguments of prepare(), with the setting and the groups of the run."""

    job: Any
    model: Any
    optimizer: Any
    loss: Callable[[Any, Any], Any] | None
    weight: Callable[[Any], Any] | None
    clip: float | None
    schedule: Any
    setting: Setting
    world: World
    groups: RankGroups
    estimate: Estimate | None
    pinned: bool
    """Whether the micro-batch is fixed by the user, so that it may not grow beyond the plan."""


@dataclass(kw_only=True, eq=False)
class PreparedRun:
    """A model that is ready for its first step, and everything that a step needs.

    A job with several losses has one of these for each of them; they share the model and most other fields.
    """

    model: Any
    phase: UpdatePhase
    """The optimizers of this loss."""
    updater: OptimizerStep
    gradients: Gradients
    buffers: Buffers
    fitter: MicroBatchFitter
    compiling: CompileSwitch | None
    loss: Callable[[Any, Any], Any] | None
    weight: Callable[[Any], Any] | None
    schedules: dict[str, Any]
    """LR schedulers of the optimizers of this loss, by the name of the optimizer."""
    regular_share: int
    """Samples of this rank in a full global batch."""
    regular: int = 0
    """Samples in most micro-batches: the size that is compiled."""
    after_step: Callable[[Any], Any] | None = None
    """The job's after_step(), called after every update; None if it has none."""
    pipe: PipelineRunner | None = None
    """Runs the pipeline stage of this rank; None without a pipeline."""
    losses: list[PreparedRun] = field(default_factory=list)
    """This object and those of the other losses, in the order in which a step computes them."""
    statistics: SharedStatistics | None = None
    """Shared statistics of synchronised BatchNorm layers; None if there are none."""
    context: ContextGroup | None = None
    """Ranks that split sequences with this one; None if sequences are whole."""
    stage_notes: tuple[str, ...] = ()
    """What the stages of a pipeline are balanced by, or all hold, if the loss could not be followed."""


def check_world_size(setting: Setting, world: World) -> None:
    """Check that this run can carry out a setting: number of processes, compile, sync_batchnorm."""
    strategy = strategy_of(setting)
    if strategy.why_not_compiled and setting.compile:
        raise WrongUse(
            f"strategy {strategy.word} with compile",
            found=strategy.why_not_compiled,
            cure="Plan with compile=false, or with fsdp.",
        )
    if setting.sync_batchnorm and setting.gpus > 1:
        found = strategy.why_not_synchronised or (NOT_COMPILED_SYNCHRONISED if setting.compile else "")
        if found:
            other = f"strategy {strategy.word}" if strategy.why_not_synchronised else "compile"
            raise WrongUse(
                f"sync_batchnorm with {other}", found=found, cure="Plan again, and leave one of the two out."
            )
    if setting.gpus != world.size:
        many = "one process" if world.size == 1 else f"{world.size} processes"
        raise EnvironmentFault(
            f"a plan for {setting.gpus} devices",
            found=f"there is {many}" if world.size == 1 else f"there are {many}",
            cure=f"Start one process a device, as in `torchrun --nproc-per-node {setting.gpus} ...`, or plan "
            f"for {world.size}.",
        )


def prepare(
    request: PrepareRequest, say: Callable[[str, str], None], on_gradient: Callable[[], None] | None
) -> PreparedRun:
    """Build or take the model, place and cast it, distribute it over ranks, compile it."""
    setting, groups = request.setting, request.groups
    refuse_partial_model(request.job, setting)
    refuse_context(request.job, setting)
    refuse_in_backward(setting, request.job, request.clip)
    device = torch.device(request.world.device)
    sharded = strategy_of(setting).is_sharded
    model, branch, own = _place_model(request, device)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    stage = _StageInstaller(groups, device, setting) if groups.stages > 1 else None
    if sharded and request.world.size == 1:
        process_group.connect_single(request.world)

    def find_holding(name: str) -> HoldingRanks:
        return stage.find_holding(name) if stage is not None else groups.find_holding(_is_inside(name, own))

    def equalise(model: nn.Module) -> None:
        synchronize_tensors([entry for entry, _ in _list_tensors(model, groups, find_holding)], device)

    several = groups.size > 1
    arranged = arrange_model(
        model,
        setting,
        str(device),
        optimizers=lambda parameters: _build_optimizers(request, model, parameters, named),
        entries=EntryPoints() if request.job is None else find_entries(request.job, model),
        install_stage=stage,
        equalise=equalise if several else None,
        fill=functools.partial(_fill_tensor, groups, stage) if several else None,
        reduced=lambda model: list_reduced(model, find_holding),
        mid_backward=on_gradient,
        follow=make_meta_loss(request.job, setting),
        expert_modules=list_expert_modules(request.job),
    )
    buffers = [entry for entry, is_buffer in _list_tensors(model, groups, find_holding) if is_buffer]
    bounds = rank_slice_bounds(
        setting.global_batch, groups.data_parallel, [share.samples for share in setting.shares]
    )
    share = bounds[groups.data_rank + 1] - bounds[groups.data_rank]
    planned = setting.shares[groups.data_rank].micro_batch if setting.shares else setting.micro_batch
    for phase in arranged.phases:
        if isinstance(phase.gradients, InBackwardGradients):
            phase.gradients.measures_norm = True
    first, *others = [
        _PhaseFields(
            phase=phase,
            updater=OptimizerStep(
                *(named.optimizer for named in phase.optimizers),
                clip=request.clip if request.clip is not None else getattr(request.job, "clip", None),
                sharded=sharded,
                # In the backward pass, weights are updated before the device knows of the whole step.
                cuda=device.type == "cuda" and not setting.optimizer_in_backward,
            ),
            gradients=phase.gradients,
            loss=_gather_losses(phase.loss or request.loss or _job_loss(request.job, branch), setting),
            schedules=_make_schedules(request, phase),
        )
        for phase in arranged.phases
    ]
    prepared = PreparedRun(
        **first,
        model=model,
        buffers=Buffers(buffers, find_running_statistics(model)),
        fitter=MicroBatchFitter(
            MicroBatchSizes(planned=planned, current=planned),
            gauge=MemoryGauge(device) if device.type == "cuda" else None,
            estimate=request.estimate,
            estimated_for=planned,
            may_exceed_plan=not setting.compile and not request.pinned,
        ),
        compiling=CompileSwitch(model, say, arranged.entries, setting.recompute.way.budget)
        if setting.compile
        else None,
        weight=request.weight or _job_weight(request.job),
        regular_share=share,
        after_step=getattr(request.job, "after_step", None),
        pipe=None if stage is None else stage.pipe,
        statistics=arranged.statistics,
        context=arranged.context,
        stage_notes=arranged.stage_notes,
    )
    prepared.losses += [prepared, *(replace(prepared, **other) for other in others)]
    return prepared


class _PhaseFields(TypedDict):
    """Fields of a PreparedRun that differ between the losses of a job."""

    phase: UpdatePhase
    updater: OptimizerStep
    gradients: Gradients
    loss: Callable[[Any, Any], Any] | None
    schedules: dict[str, Any]


def _make_schedules(request: PrepareRequest, phase: UpdatePhase) -> dict[str, Any]:
    """Return the LR scheduler of each optimizer that has one, by the optimizer's name."""
    common = request.schedule or getattr(request.job, "schedule", None)
    schedules = {}
    for named in phase.optimizers:
        schedule = named.schedule or common
        if callable(schedule) and not hasattr(schedule, "step"):
            schedule = schedule(named.optimizer)
        if schedule is not None:
            schedules[named.name] = schedule
    return schedules


class _StageInstaller:
    """Reduces a model to what this rank's stages need, and connects it to the other stages."""

    def __init__(self, groups: RankGroups, device: torch.device, setting: Setting) -> None:
        self._groups = groups
        self._form = find_stand_in_form(setting, device)
        self._holding: dict[tuple[int, ...], HoldingRanks] = {}
        """The ranks of several stages, by the numbers of these stages."""
        self.pipe = PipelineRunner(
            groups,
            device,
            setting.schedule,
            setting.virtual_stages,
            restarts=restarts_after_oom(setting.mesh),
        )

    def __call__(self, model: nn.Module, split: StageSplit) -> BlockRelay:
        groups, pipe = self._groups, self.pipe
        pipe.relay = keep_stage(
            model,
            groups.stage,
            groups.stages,
            pipe.receive,
            virtual_stages=pipe.schedule.virtual_stages,
            split=split,
            form=self._form,
        ).relay
        self._holding = groups.make_stage_groups(pipe.relay.holders.list_groups())
        if pipe.weight_gradients is not None:
            pipe.weight_gradients.install(model)
        return pipe.relay

    def find_stages(self, stages: tuple[int, ...]) -> HoldingRanks:
        """Return the ranks of some stages, of which this one has one."""
        if len(stages) == self._groups.stages:
            return self._groups.find_holding(False)
        return self._holding.get(stages) or self._groups.find_holding(True)

    def find_holding(self, name: str) -> HoldingRanks:
        """Return the ranks that hold a parameter or buffer; those of the same stage for one of a block."""
        relay = self.pipe.relay
        if _is_inside(name, relay.name):
            return self._groups.find_holding(True)
        # All stages have all buffers outside of the blocks.
        return self.find_stages(relay.holders.find(name) or tuple(range(self._groups.stages)))


def _place_model(request: PrepareRequest, device: torch.device) -> tuple[nn.Module, str, str | None]:
    """Return the model on its device, this rank's branch, and the prefix of that branch's submodule."""
    job, setting = request.job, request.setting
    model = request.model
    if model is None:
        model = _build_model(request, device)
    elif not isinstance(model, nn.Module):
        raise WrongUse(
            f"a model of type {type(model).__name__}", found="it is no module", cure="Give a torch.nn.Module."
        )
    branch, own = "", None
    if setting.mesh.branch > 1:
        branches = get_branches(job)
        if len(branches) != setting.mesh.branch:
            raise WrongUse(
                f"a plan for {setting.mesh.branch} branches",
                found=f"the job has {len(branches)}",
                cure="Plan again for this job.",
            )
        branch = list(branches)[request.groups.branch]
        own = branches[branch]
        keep_branch(model, branches, branch)
    if request.model is not None and any(parameter.is_meta for parameter in model.parameters()):
        raise WrongUse(
            "a model on the meta device", found="its weights have no values", cure="Build it on the CPU."
        )
    if not is_built_on_host(setting):
        model.to(device)
    if request.model is not None and setting.dtypes.weights != FLOAT32:
        # A model that was not built under this precision: its buffers have to follow.
        model.to(torch_dtype(setting.dtypes.weights))
    return model, branch, own


def _build_model(request: PrepareRequest, device: torch.device) -> Any:
    """Build the job's model; on the meta device if the host is too small and rank 0 sends the values."""
    job, setting, world = request.job, request.setting, request.world
    # The first rank of a pipeline stage sends its ranks the values of its blocks.
    if job is not None and strategy_of(setting).is_sharded and world.rank != request.groups.stage_first:
        model = _build_on_meta(job, setting, world)
        if model is not None:
            return model
    return _build_on_device(job, setting, choose_build_device(setting, str(device)))


def _build_on_meta(job: Any, setting: Setting, world: World) -> nn.Module | None:
    """Build the model on the meta device, if the host has no memory for a copy on every rank.

    Return None if it has, or if the model cannot be built so: tensors that are neither parameters nor buffers
    would stay without values.
    """
    try:
        model = _build_on_device(job, setting, "meta")
    except Exception:  # noqa: BLE001 - the normal build succeeds or gives a better message
        return None
    if not isinstance(model, nn.Module):
        return None
    tensors = [*model.parameters(), *model.buffers()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size * _count_local_ranks(world) <= HOST_SHARE * psutil.virtual_memory().available:
        return None
    return None if _has_loose_tensors(model) else model


def _count_local_ranks(world: World) -> int:
    """Return the number of ranks on this host; all ranks if the launcher does not say."""
    stated = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(stated) if stated.isdecimal() else world.size


def _has_loose_tensors(model: nn.Module) -> bool:
    """Return whether a module has tensors as plain attributes."""

    def has_tensor(value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(has_tensor, value.values()))
        if isinstance(value, list | tuple | set):
            return any(map(has_tensor, value))
        return isinstance(value, torch.Tensor)

    registered = {"_parameters", "_buffers", "_modules"}
    return any(
        has_tensor(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in registered
    )


def _build_on_device(job: Any, setting: Setting, device: str) -> Any:
    if job is None:
        raise WrongUse(
            "run.prepare()",
            found="there is neither a model nor a job",
            cure="Give prepare(model), or Run(job=...).",
        )
    try:
        with use_build_defaults(setting.dtypes, device):
            model = job.model()
    except Exception as error:
        raise job_error(
            "model()", error, "Fix the job; it builds its model on the default device."
        ) from error
    if not isinstance(model, nn.Module):
        raise JobFailed(
            "model()", found=f"it returned a {type(model).__name__}", cure="Return a torch.nn.Module."
        )
    return model


def _list_tensors(
    model: nn.Module, groups: RankGroups, find_holding: Callable[[str], HoldingRanks]
) -> list[tuple[tuple[torch.Tensor, Any, int], bool]]:
    """Return each parameter and buffer with its process group and source rank, and whether it is a buffer."""
    tensors: list[tuple[tuple[torch.Tensor, Any, int], bool]] = []
    for is_buffer, named in ((False, model.named_parameters()), (True, model.named_buffers())):
        for name, tensor in named:
            holding = find_holding(name)
            is_alone = groups.size == 1 or holding.ranks == 1
            entry = (tensor, None, -1) if is_alone else (tensor, holding.group, holding.source)
            tensors.append((entry, is_buffer))
    return tensors


def _fill_tensor(
    groups: RankGroups, stage: _StageInstaller | None, tensor: torch.Tensor, stages: tuple[int, ...] | None
) -> None:
    """Give all ranks, or all ranks of some pipeline stages, the first one's values of a tensor."""
    if stage is None or stages is None or len(stages) == groups.stages:
        broadcast_tensor(tensor)
    elif len(stages) > 1:
        holding = stage.find_stages(stages)
        broadcast_tensor(tensor, holding.source, holding.group)
    elif groups.stage_ranks > 1:
        broadcast_tensor(tensor, groups.stage_first, groups.stage_group)


def _is_inside(name: str, prefix: str | None) -> bool:
    """Return whether a parameter belongs to the submodule of this rank's branch or stage."""
    return prefix is not None and (not prefix or name.startswith(f"{prefix}."))


def _build_optimizers(
    request: PrepareRequest, model: nn.Module, parameters: list[tuple[str, Any]], named: dict[int, str]
) -> list[NamedOptimizer]:
    """Return the optimizers over the current parameters: the job's, or the one that prepare() was given."""
    optimizer = request.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        maker = request.job if optimizer is None else _OptimizerFactory(optimizer)
        setting = request.setting
        implementation = choose_implementation(model, setting.optimizer)
        return make_optimizers(maker, parameters, implementation, setting.optimizer_rule)
    return [NamedOptimizer(name=ONLY, optimizer=_rebuild_optimizer(request, optimizer, model, named))]


def _rebuild_optimizer(
    request: PrepareRequest, optimizer: torch.optim.Optimizer, model: nn.Module, named: dict[int, str]
) -> Any:
    """Return a given optimizer, over the sharded parameters if the model is sharded."""
    foreign = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in named
    ]
    if foreign:
        raise WrongUse(
            "prepare(model, optimizer)",
            found=f"{len(foreign)} parameters of the optimizer are not the model's",
            cure="Make the optimizer from model.parameters(), or give a function that makes it.",
        )
    if not is_built_on_host(request.setting):
        return optimizer
    if optimizer.state:
        raise WrongUse(
            "prepare(model, optimizer)",
            found="the optimizer has a state already, and the parameters are now distributed over ranks",
            cure="Prepare before the first step, and load the state afterwards.",
        )
    now = dict(model.named_parameters())
    groups = [
        {
            **group,
            "params": [
                now[named[id(parameter)]] for parameter in group["params"] if named[id(parameter)] in now
            ],
        }
        for group in optimizer.param_groups
    ]
    return type(optimizer)(
        groups,
        **{name: value for name, value in optimizer.defaults.items() if name in _init_parameters(optimizer)},
    )


def _init_parameters(optimizer: Any) -> Any:
    import inspect

    return inspect.signature(type(optimizer).__init__).parameters


class _OptimizerFactory:
    """Wraps a function that makes an optimizer, in the form of a job."""

    def __init__(self, make: Any) -> None:
        if not callable(make):
            raise WrongUse(
                f"an optimizer of type {type(make).__name__}",
                found="it is neither an optimizer nor a function",
                cure="Give a torch.optim.Optimizer, or a function of parameters that returns one.",
            )
        self.optimizer = make


def list_reduced(
    model: nn.Module, find_holding: Callable[[str], HoldingRanks]
) -> list[tuple[nn.Parameter, Any, int]]:
    """Return the trainable parameters, each with its reduction group and its number of ranks."""
    return [
        (parameter, (holding := find_holding(name)).group, holding.ranks)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def _job_loss(job: Any, branch: str) -> Callable[[Any, Any], Any] | None:
    if job is None:
        return None
    if branch:
        return lambda model, batch: compute_branch_loss(job, model, batch, branch)
    loss: Callable[[Any, Any], Any] = loss_function(job)
    return loss


def _gather_losses(
    loss: Callable[[Any, Any], Any] | None, setting: Setting
) -> Callable[[Any, Any], Any] | None:
    """Return a loss that is a plain tensor also if ranks split layers between them."""
    if loss is None or setting.mesh.tp == 1:
        return loss
    return lambda model, batch: gather_loss(loss(model, batch))


def _job_weight(job: Any) -> Callable[[Any], Any] | None:
    """Return the job's weight(); None if it is the default, which counts samples."""
    if getattr(type(job), "weight", None) in (None, Job.weight):
        return None
    weight: Callable[[Any], Any] = job.weight
    return weight
