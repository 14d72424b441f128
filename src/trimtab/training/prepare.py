"""Everything between a model as its author wrote it and the first step of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from trimtab.engine.branches import compute_branch_loss, get_branches, keep_branch
from trimtab.engine.build import EntryPoints, choose_build_device, find_entries, use_build_defaults
from trimtab.engine.compile import CompileSwitch
from trimtab.engine.optimizer import choose_implementation, make_optimizer
from trimtab.engine.pipeline_stage import keep_stage
from trimtab.engine.precision import torch_dtype
from trimtab.engine.step import arrange_model
from trimtab.errors import EnvironmentFault, JobFailed, WrongUse
from trimtab.jobs.job import Job, loss_function
from trimtab.jobs.load import failed
from trimtab.planner.pins import NOT_COMPILED_SYNCHRONISED
from trimtab.spec.precision import FLOAT32
from trimtab.strategies import strategy_of
from trimtab.training import process_group
from trimtab.training.loading import rank_slice_bounds
from trimtab.training.oom_recovery import MemoryGauge, MicroBatchFitter, MicroBatchSizes
from trimtab.training.optimizer_step import OptimizerStep
from trimtab.training.pipeline import PipelineRunner
from trimtab.training.process_group import (
    Buffers,
    RankGroups,
    broadcast_tensor,
    find_running_statistics,
    synchronize_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.engine.gradients import Gradients
    from trimtab.engine.sync_norm import SharedStatistics
    from trimtab.spec import Estimate, Setting
    from trimtab.training.process_group import World

HOST_SHARE = 0.5
"""Of the host's free memory, what the copies of a model on all its ranks may take while they are built."""


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    """What prepare() was given, and by whom."""

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


@dataclass(kw_only=True)
class PreparedRun:
    """A model that is ready for its first step, and what a step needs."""

    model: Any
    updater: OptimizerStep
    wiring: Gradients
    buffers: Buffers
    fitting: MicroBatchFitter
    compiling: CompileSwitch | None
    loss: Callable[[Any, Any], Any] | None
    weight: Callable[[Any], Any] | None
    schedule: Any
    regular_share: int
    """Samples of this rank in a full global batch."""
    regular: int = 0
    """Samples in most parts."""
    pipe: PipelineRunner | None = None
    """What carries a window through the stages of a pipeline."""
    statistics: SharedStatistics | None = None
    """What synchronised BatchNorm layers share; None where there are none."""


def check_world_size(setting: Setting, here: World) -> None:
    """Whether there are the processes that a setting is for."""
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
    if setting.gpus != here.size:
        many = "one process" if here.size == 1 else f"{here.size} processes"
        raise EnvironmentFault(
            f"a plan for {setting.gpus} devices",
            found=f"there is {many}" if here.size == 1 else f"there are {many}",
            cure=f"Start one process a device, as in `torchrun --nproc-per-node {setting.gpus} ...`, or plan "
            f"for {here.size}.",
        )


def prepare(
    wanted: PrepareRequest, say: Callable[[str, str], None], mid_backward: Callable[[], None] | None
) -> PreparedRun:
    """Build or take the model, place and cast it, spread it over ranks, compile it."""
    setting, groups = wanted.setting, wanted.groups
    device = torch.device(wanted.world.device)
    sharded = strategy_of(setting).is_sharded
    model, branch, own = _place_model(wanted, device)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    stage = _StageInstaller(groups, device) if groups.stages > 1 else None
    if sharded and wanted.world.size == 1:
        process_group.connect_single(wanted.world)

    def own_prefix() -> str | None:
        return stage.pipe.relay.name if stage is not None else own

    def equalise(model: nn.Module) -> None:
        synchronize_tensors([entry for entry, _ in _list_tensors(model, groups, own_prefix())], device)

    several = groups.size > 1
    arranged = arrange_model(
        model,
        setting,
        str(device),
        optimizer=lambda parameters: _build_optimizer(wanted, model, parameters, named),
        entries=EntryPoints() if wanted.job is None else find_entries(wanted.job, model),
        install_stage=stage,
        equalise=equalise if several else None,
        fill=broadcast_tensor if several else None,
        reduced=lambda model: _list_reduced(model, groups, own_prefix()),
        mid_backward=mid_backward,
    )
    optimizer = arranged.optimizer
    buffers = [entry for entry, is_buffer in _list_tensors(model, groups, own_prefix()) if is_buffer]
    places = rank_slice_bounds(
        setting.global_batch, groups.data_parallel, [share.samples for share in setting.shares]
    )
    share = places[groups.data_rank + 1] - places[groups.data_rank]
    planned = setting.shares[groups.data_rank].micro_batch if setting.shares else setting.micro_batch
    schedule = wanted.schedule or getattr(wanted.job, "schedule", None)
    if callable(schedule) and not hasattr(schedule, "step"):
        schedule = schedule(optimizer)
    return PreparedRun(
        model=model,
        updater=OptimizerStep(
            optimizer,
            clip=wanted.clip if wanted.clip is not None else getattr(wanted.job, "clip", None),
            sharded=sharded,
            cuda=device.type == "cuda",
        ),
        wiring=arranged.gradients,
        buffers=Buffers(buffers, find_running_statistics(model)),
        fitting=MicroBatchFitter(
            MicroBatchSizes(planned=planned, current=planned),
            gauge=MemoryGauge(device) if device.type == "cuda" else None,
            estimate=wanted.estimate,
            estimated_for=planned,
            grows_beyond=not setting.compile and not wanted.pinned,
        ),
        compiling=CompileSwitch(model, say, arranged.entries) if setting.compile else None,
        loss=wanted.loss or _job_loss(wanted.job, branch),
        weight=wanted.weight or _job_weight(wanted.job),
        schedule=schedule,
        regular_share=share,
        pipe=None if stage is None else stage.pipe,
        statistics=arranged.statistics,
    )


class _StageInstaller:
    """Leaves the blocks of this rank's stage in a model, and carries what stages hand over."""

    def __init__(self, groups: RankGroups, device: torch.device) -> None:
        self._groups = groups
        self.pipe = PipelineRunner(groups, device)

    def __call__(self, model: nn.Module) -> None:
        groups = self._groups
        self.pipe.relay, _ = keep_stage(model, groups.stage, groups.stages, self.pipe.receive)


def _place_model(wanted: PrepareRequest, device: torch.device) -> tuple[nn.Module, str, str | None]:
    """The module on its device; with branches also the one of this rank, and what only it needs."""
    job, setting = wanted.job, wanted.setting
    model = wanted.model
    if model is None:
        model = _build_model(wanted, device)
    elif not isinstance(model, nn.Module):
        raise WrongUse(
            f"a model of type {type(model).__name__}", found="it is no module", cure="Give a torch.nn.Module."
        )
    branch, own = "", None
    if setting.mesh.branch > 1:
        known = get_branches(job)
        if len(known) != setting.mesh.branch:
            raise WrongUse(
                f"a plan for {setting.mesh.branch} branches",
                found=f"the job has {len(known)}",
                cure="Plan again for this job.",
            )
        branch = list(known)[wanted.groups.branch]
        own = known[branch]
        keep_branch(model, known, branch)
    if wanted.model is not None and any(parameter.is_meta for parameter in model.parameters()):
        raise WrongUse(
            "a model on the meta device", found="its weights have no values", cure="Build it on the CPU."
        )
    if not strategy_of(setting).is_built_on_host:
        model.to(device)
    if wanted.model is not None and setting.dtypes.weights != FLOAT32:
        # A model that was not built under this precision: its buffers have to follow.
        model.to(torch_dtype(setting.dtypes.weights))
    return model, branch, own


def _build_model(wanted: PrepareRequest, device: torch.device) -> Any:
    """Build the job's model; without values where another rank gives them and the host is too small."""
    job, setting, here = wanted.job, wanted.setting, wanted.world
    if job is not None and strategy_of(setting).is_sharded and here.rank > 0:
        model = _build_on_meta(job, setting, here)
        if model is not None:
            return model
    return _build_on_device(job, setting, choose_build_device(setting, str(device)))


def _build_on_meta(job: Any, setting: Setting, here: World) -> nn.Module | None:
    """Build the model on the meta device where the host cannot hold a copy of it for every rank.

    None where the host can, or where the model cannot be built so: tensors that are neither parameters nor
    buffers would stay without values.
    """
    try:
        model = _build_on_device(job, setting, "meta")
    except Exception:  # noqa: BLE001 - whatever it is, building with values will say it, or not have it
        return None
    if not isinstance(model, nn.Module):
        return None
    tensors = [*model.parameters(), *model.buffers()]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size * _count_local_ranks(here) <= HOST_SHARE * psutil.virtual_memory().available:
        return None
    return None if _has_loose_tensors(model) else model


def _count_local_ranks(here: World) -> int:
    """How many ranks there are on this host, as the launcher says; all of them where it does not."""
    stated = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(stated) if stated.isdecimal() else here.size


def _has_loose_tensors(model: nn.Module) -> bool:
    """Whether a module keeps tensors as plain attributes."""

    def holds(value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(holds, value.values()))
        if isinstance(value, list | tuple | set):
            return any(map(holds, value))
        return isinstance(value, torch.Tensor)

    known = {"_parameters", "_buffers", "_modules"}
    return any(
        holds(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in known
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
        raise failed("model()", error, "Mend the job; it builds its model on the default device.") from error
    if not isinstance(model, nn.Module):
        raise JobFailed(
            "model()", found=f"it returned a {type(model).__name__}", cure="Return a torch.nn.Module."
        )
    return model


def _list_tensors(
    model: nn.Module, groups: RankGroups, own: str | None
) -> list[tuple[tuple[torch.Tensor, Any, int], bool]]:
    """Parameters and buffers with the group that holds the same ones and its first rank; whether a buffer."""
    found: list[tuple[tuple[torch.Tensor, Any, int], bool]] = []
    for is_buffer, named in ((False, model.named_parameters()), (True, model.named_buffers())):
        for name, tensor in named:
            mine = _is_inside(name, own)
            if groups.size == 1 or (mine and groups.data_alone):
                place = (tensor, None, -1)
            else:
                place = (tensor, groups.data_group, groups.first) if mine else (tensor, None, groups.settles)
            found.append((place, is_buffer))
    return found


def _is_inside(name: str, prefix: str | None) -> bool:
    """Whether a parameter is of the submodule that only this rank's branch or stage has."""
    return prefix is not None and (not prefix or name.startswith(f"{prefix}."))


def _build_optimizer(
    wanted: PrepareRequest, model: nn.Module, parameters: list[nn.Parameter], named: dict[int, str]
) -> Any:
    """The optimizer over the parameters as they are now."""
    given = wanted.optimizer
    if not isinstance(given, torch.optim.Optimizer):
        maker = wanted.job if given is None else _OptimizerFactory(given)
        return make_optimizer(maker, parameters, choose_implementation(model, wanted.setting.optimizer))
    foreign = [one for group in given.param_groups for one in group["params"] if id(one) not in named]
    if foreign:
        raise WrongUse(
            "prepare(model, optimizer)",
            found=f"{len(foreign)} parameters of the optimizer are not the model's",
            cure="Make the optimizer from model.parameters(), or give a function that makes it.",
        )
    if not strategy_of(wanted.setting).is_built_on_host:
        return given
    if given.state:
        raise WrongUse(
            "prepare(model, optimizer)",
            found="the optimizer has a state already, and the parameters are spread over ranks now",
            cure="Prepare before the first step, and load the state afterwards.",
        )
    now = dict(model.named_parameters())
    groups = [
        {**group, "params": [now[named[id(one)]] for one in group["params"] if named[id(one)] in now]}
        for group in given.param_groups
    ]
    return type(given)(
        groups, **{name: value for name, value in given.defaults.items() if name in _init_parameters(given)}
    )


def _init_parameters(optimizer: Any) -> Any:
    import inspect

    return inspect.signature(type(optimizer).__init__).parameters


class _OptimizerFactory:
    """A function that makes an optimizer, as a job has it."""

    def __init__(self, make: Any) -> None:
        if not callable(make):
            raise WrongUse(
                f"an optimizer of type {type(make).__name__}",
                found="it is neither one nor makes one",
                cure="Give a torch.optim.Optimizer, or a function of parameters that returns one.",
            )
        self.optimizer = make


def _list_reduced(
    model: nn.Module, groups: RankGroups, own: str | None
) -> list[tuple[nn.Parameter, Any, int]]:
    """The trainable parameters, each with the group that sums its gradients and the ranks in it."""
    entries: list[tuple[nn.Parameter, Any, int]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mine = _is_inside(name, own)
            entry = (groups.data_group, groups.data_parallel) if mine else (None, groups.size)
            entries.append((parameter, *entry))
    return entries


def _job_loss(job: Any, branch: str) -> Callable[[Any, Any], Any] | None:
    if job is None:
        return None
    if branch:
        return lambda model, batch: compute_branch_loss(job, model, batch, branch)
    loss: Callable[[Any, Any], Any] = loss_function(job)
    return loss


def _job_weight(job: Any) -> Callable[[Any], Any] | None:
    """The job's own weight(); None where it counts samples, which are known without looking."""
    if getattr(type(job), "weight", None) in (None, Job.weight):
        return None
    weight: Callable[[Any], Any] = job.weight
    return weight
