"""Everything between a model as its author wrote it and the first step of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from trimtab.errors import EnvironmentFault, JobFailed, WrongUse
from trimtab.jobs.job import Job, loss_function
from trimtab.jobs.load import failed
from trimtab.spec import Precision, Strategy
from trimtab.trace import step as steps
from trimtab.trace.branches import branch_loss, branches_of, keep_branch
from trimtab.trace.stages import keep_stage
from trimtab.training import world
from trimtab.training.compiling import Compiling
from trimtab.training.fitting import Fitting, Gauge
from trimtab.training.order import bounds
from trimtab.training.piping import Pipe, Staged
from trimtab.training.precision import cast_frozen
from trimtab.training.recovery import Sizes
from trimtab.training.reduce import Alone, Buffers, Groups, Reducer, make_alike, running_statistics
from trimtab.training.updating import Updater

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import Estimate, Setting
    from trimtab.training.world import World

SHARDED = (Strategy.FSDP, Strategy.HSDP)
check_loss = steps._check_loss


class Wiring(Protocol):
    """How the gradients of a rank become those of all ranks."""

    equal_parts: bool
    """Whether all ranks have to run the same number of parts."""
    arrivals: int
    """How often at most gradients come in a backward pass."""

    @property
    def sent_any(self) -> bool:
        """Whether other ranks have got something of this attempt."""

    @property
    def rehearsed(self) -> bool:
        """Whether it needs no more passes of one sample before the first step."""

    def begin(self) -> None:
        """Before an attempt: gradients are nought."""

    def before(self, number: int, count: int) -> None:
        """Before part `number` of `count`."""

    def abandon(self) -> None:
        """The part under way has failed: let go of what it holds."""

    def finish(self, failed_at: int | None, count: int) -> None:
        """After the parts: everybody has what they wait for, also where part `failed_at` failed."""

    def squares(self) -> torch.Tensor:
        """This rank's part in the squared norm of the whole gradient."""

    def gradients(self) -> list[torch.Tensor]:
        """What this rank holds of it."""

    def close(self) -> None:
        """Leave the model as it was found."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
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
    groups: Groups
    estimate: Estimate | None
    pinned: bool
    """Whether the micro-batch is fixed by the user, so that it may not grow beyond the plan."""


@dataclass(kw_only=True)
class Prepared:
    """A model that is ready for its first step, and what a step needs."""

    model: Any
    updater: Updater
    wiring: Wiring
    buffers: Buffers
    fitting: Fitting
    compiling: Compiling | None
    loss: Callable[[Any, Any], Any] | None
    weight: Callable[[Any], Any] | None
    schedule: Any
    regular_share: int
    """Samples of this rank in a full global batch."""
    regular: int = 0
    """Samples in most parts."""
    pipe: Pipe | None = None
    """What carries a window through the stages of a pipeline."""


def check(setting: Setting, here: World) -> None:
    """Whether there are the processes that a setting is for."""
    if setting.strategy is Strategy.PIPELINE and setting.compile:
        raise WrongUse(
            "strategy pipeline with compile",
            found="a stage ends in the middle of the model, where the compiler cannot follow",
            cure="Plan with compile=false, or with fsdp.",
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
    wanted: Wanted, say: Callable[[str, str], None], mid_backward: Callable[[], None] | None
) -> Prepared:
    """Build or take the model, place and cast it, spread it over ranks, compile it."""
    setting, groups = wanted.setting, wanted.groups
    device = torch.device(wanted.world.device)
    sharded = setting.strategy in SHARDED
    staged = groups.stages > 1
    model, branch, own = _model(wanted, torch.device("cpu") if sharded or staged else device)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    cast_frozen(model, setting)
    steps.recompute(model, setting.recompute)
    pipe = None
    if staged:
        # Only now, from the host: blocks of other stages are never on this device.
        pipe = Pipe(groups, device)
        pipe.relay, _ = keep_stage(model, groups.stage, groups.stages, pipe.receive)
        own = pipe.relay.name
        model.to(device)
    alike = _entries(model, groups, own)
    if groups.size > 1:
        make_alike([entry for entry, _ in alike], device)
    if sharded:
        if wanted.world.size == 1:
            world.connect_alone(wanted.world)
        steps.shard(model, setting, device.type)
    parameters = [one for one in model.parameters() if one.requires_grad]
    if not parameters:
        raise JobFailed("model()", found="no parameter of it takes a gradient", cure="Leave some unfrozen.")
    optimizer = _optimizer(wanted, model, parameters, named)
    if sharded:
        _not_fused(optimizer)
    wiring = _wiring(model, wanted, own, mid_backward)
    places = bounds(setting.global_batch, groups.data_parallel, [one.samples for one in setting.shares])
    share = places[groups.data_rank + 1] - places[groups.data_rank]
    planned = setting.shares[groups.data_rank].micro_batch if setting.shares else setting.micro_batch
    schedule = wanted.schedule or getattr(wanted.job, "schedule", None)
    if callable(schedule) and not hasattr(schedule, "step"):
        schedule = schedule(optimizer)
    return Prepared(
        model=model,
        updater=Updater(
            optimizer,
            clip=wanted.clip if wanted.clip is not None else getattr(wanted.job, "clip", None),
            sharded=sharded,
            cuda=device.type == "cuda",
        ),
        wiring=wiring,
        buffers=Buffers([entry for entry, is_buffer in alike if is_buffer], running_statistics(model)),
        fitting=Fitting(
            Sizes(planned=planned, current=planned),
            gauge=Gauge(device) if device.type == "cuda" else None,
            estimate=wanted.estimate,
            estimated_for=planned,
            grows_beyond=not setting.compile and not wanted.pinned,
        ),
        compiling=Compiling(model, say) if setting.compile else None,
        loss=wanted.loss or _job_loss(wanted.job, branch),
        weight=wanted.weight or _job_weight(wanted.job),
        schedule=schedule,
        regular_share=share,
        pipe=pipe,
    )


def _model(wanted: Wanted, device: torch.device) -> tuple[nn.Module, str, str | None]:
    """The module on its device; with branches also the one of this rank, and what only it needs."""
    job, setting = wanted.job, wanted.setting
    model = wanted.model
    if model is None:
        model = _built(job, setting, device)
    elif not isinstance(model, nn.Module):
        raise WrongUse(
            f"a model of type {type(model).__name__}", found="it is no module", cure="Give a torch.nn.Module."
        )
    branch, own = "", None
    if setting.mesh.branch > 1:
        known = branches_of(job)
        if len(known) != setting.mesh.branch:
            raise WrongUse(
                f"a plan for {setting.mesh.branch} branches",
                found=f"the job has {len(known)}",
                cure="Plan again for this job.",
            )
        branch = list(known)[wanted.groups.branch]
        own = known[branch]
        keep_branch(model, known, branch)
    if any(one.is_meta for one in model.parameters()):
        raise WrongUse(
            "a model on the meta device", found="its weights have no values", cure="Build it on the CPU."
        )
    if setting.strategy not in (*SHARDED, Strategy.PIPELINE):
        model.to(device)
    if setting.precision is Precision.BF16_TRUE:
        model.to(torch.bfloat16)
    return model, branch, own


def _built(job: Any, setting: Setting, device: torch.device) -> Any:
    if job is None:
        raise WrongUse(
            "run.prepare()",
            found="there is neither a model nor a job",
            cure="Give prepare(model), or Run(job=...).",
        )
    try:
        with steps.building(setting.precision, str(device)):
            model = job.model()
    except Exception as error:
        raise failed("model()", error, "Mend the job; it builds its model on the default device.") from error
    if not isinstance(model, nn.Module):
        raise JobFailed(
            "model()", found=f"it returned a {type(model).__name__}", cure="Return a torch.nn.Module."
        )
    return model


def _entries(
    model: nn.Module, groups: Groups, own: str | None
) -> list[tuple[tuple[torch.Tensor, Any, int], bool]]:
    """Parameters and buffers with the group that holds the same ones and its first rank; whether a buffer."""
    found: list[tuple[tuple[torch.Tensor, Any, int], bool]] = []
    for is_buffer, named in ((False, model.named_parameters()), (True, model.named_buffers())):
        for name, tensor in named:
            mine = _inside(name, own)
            if groups.size == 1 or (mine and groups.data_alone):
                place = (tensor, None, -1)
            else:
                place = (tensor, groups.data_group, groups.first) if mine else (tensor, None, groups.settles)
            found.append((place, is_buffer))
    return found


def _inside(name: str, prefix: str | None) -> bool:
    """Whether a parameter is of the submodule that only this rank's branch or stage has."""
    return prefix is not None and (not prefix or name.startswith(f"{prefix}."))


def _optimizer(
    wanted: Wanted, model: nn.Module, parameters: list[nn.Parameter], named: dict[int, str]
) -> Any:
    """The optimizer over the parameters as they are now."""
    given = wanted.optimizer
    if not isinstance(given, torch.optim.Optimizer):
        maker = wanted.job if given is None else _Maker(given)
        return steps.make_optimizer(maker, parameters, wanted.setting.optimizer)
    foreign = [one for group in given.param_groups for one in group["params"] if id(one) not in named]
    if foreign:
        raise WrongUse(
            "prepare(model, optimizer)",
            found=f"{len(foreign)} parameters of the optimizer are not the model's",
            cure="Make the optimizer from model.parameters(), or give a function that makes it.",
        )
    if wanted.setting.strategy not in (*SHARDED, Strategy.PIPELINE):
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
        groups, **{name: value for name, value in given.defaults.items() if name in _takes(given)}
    )


def _not_fused(optimizer: Any) -> None:
    """Of the fused optimizers, torch has Adam's alone for sharded parameters."""
    if isinstance(optimizer, torch.optim.Adam):
        return
    for options in (optimizer.defaults, *optimizer.param_groups):
        if options.get("fused"):
            options.update(fused=False, foreach=True)
    optimizer._step_supports_amp_scaling = False


def _takes(optimizer: Any) -> Any:
    import inspect

    return inspect.signature(type(optimizer).__init__).parameters


class _Maker:
    """A function that makes an optimizer, as a job has it."""

    def __init__(self, make: Any) -> None:
        if not callable(make):
            raise WrongUse(
                f"an optimizer of type {type(make).__name__}",
                found="it is neither one nor makes one",
                cure="Give a torch.optim.Optimizer, or a function of parameters that returns one.",
            )
        self.optimizer = make


def _wiring(
    model: nn.Module, wanted: Wanted, own: str | None, mid_backward: Callable[[], None] | None
) -> Wiring:
    setting, groups = wanted.setting, wanted.groups
    parameters = [one for one in model.parameters() if one.requires_grad]
    if setting.strategy in SHARDED:
        from trimtab.training.sharding import Sharded

        return Sharded(model, setting, groups, mid_backward)
    if mid_backward is not None:
        called = mid_backward
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: called())
    if groups.size == 1:
        return Alone(parameters)
    entries: list[tuple[nn.Parameter, Any, int]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mine = _inside(name, own)
            entry = (groups.data_group, groups.data_parallel) if mine else (None, groups.size)
            entries.append((parameter, *entry))
    return Staged(entries) if groups.stages > 1 else Reducer(entries)


def _job_loss(job: Any, branch: str) -> Callable[[Any, Any], Any] | None:
    if job is None:
        return None
    if branch:
        return lambda model, batch: branch_loss(job, model, batch, branch)
    loss: Callable[[Any, Any], Any] = loss_function(job)
    return loss


def _job_weight(job: Any) -> Callable[[Any], Any] | None:
    """The job's own weight(); None where it counts samples, which are known without looking."""
    if getattr(type(job), "weight", None) in (None, Job.weight):
        return None
    weight: Callable[[Any], Any] = job.weight
    return weight
