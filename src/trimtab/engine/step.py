"""How a setting of a job is executed, on fake tensors and on real ones alike.

`prepare` does everything before the first step, `step` is one optimizer step of one micro-batch. Tracing and
measuring run both as they are. Training runs `arrange` too, and then a step out of the same pieces, with
retries between them (`trimtab.training.stepper`). A prediction, its measurement and the run that follows are
so of the same program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trimtab.engine.branches import branch_loss
from trimtab.engine.build import Entries, build, building, entries_of, make_batch, repeated_blocks
from trimtab.engine.compile import Compiling
from trimtab.engine.fsdp import place, shard
from trimtab.engine.gradient_caching import forward_twice, rows_of_step
from trimtab.engine.gradients import Gradients, OwnGradients, Reducer
from trimtab.engine.optimizer import implementation_for, make_optimizer, use_foreach_for_shards
from trimtab.engine.precision import autocast_dtype, cast_weights
from trimtab.engine.recompute import recompute
from trimtab.engine.sync_norm import SyncReducer, synchronise
from trimtab.errors import JobFailed
from trimtab.jobs.job import loss_function
from trimtab.strategies import strategy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from trimtab.engine.fsdp import Fill
    from trimtab.engine.pipeline_stage import TracedStage
    from trimtab.engine.sync_norm import Statistics
    from trimtab.spec import Setting

__all__ = ["PreparedJob", "build", "building", "make_batch", "prepare", "repeated_blocks", "step"]

SCALE = 2.0**16
"""What a loss is multiplied by where the precision scales it, so that gradients do not vanish."""


@dataclass(kw_only=True)
class Arranged:
    """A model in the form in which a rank trains it."""

    model: nn.Module
    parameters: list[Any]
    """The trainable ones."""
    optimizer: Any
    gradients: Gradients
    recomputed: tuple[str, ...] = ()
    """Names of the lists of blocks that are recomputed."""
    entries: Entries = field(default_factory=Entries)
    """What loss() calls beside the model."""
    statistics: Statistics | None = None
    """What synchronised BatchNorm layers share; None where there are none."""


@dataclass(kw_only=True)
class PreparedJob(Arranged):
    """A job that is ready for its first step."""

    job: Any
    setting: Setting
    device: str
    branch: str = ""
    """The one that this rank computes; empty: all of them."""
    stage: TracedStage | None = None
    """Of a pipeline."""
    compiling: Compiling | None = None


def prepare(
    job: Any, setting: Setting, device: str = "cuda", *, branch: str = "", values: bool = True
) -> PreparedJob:
    """Build the model, arrange recomputation and sharding, make the optimizer.

    Without `values`, a model that is built on the host has none: only its sizes matter then.
    """
    model = build(job, setting, device, branch=branch, values=values)
    return assemble(job, model, setting, device, branch=branch)


def assemble(  # noqa: PLR0913 - and as which rank
    job: Any,
    model: nn.Module,
    setting: Setting,
    device: str = "cuda",
    *,
    branch: str = "",
    stage: int | None = None,
) -> PreparedJob:
    """Do everything between building the model and the first step, as one rank of the setting.

    With `stage`, as a rank of that stage of a pipeline has it.
    """
    staged: list[TracedStage] = []

    def install_stage(model: nn.Module) -> None:
        from trimtab.engine.pipeline_stage import TracedStage

        assert stage is not None  # noqa: S101 - only then is this called
        staged.append(TracedStage(model, stage, setting.mesh.pp))

    arranged = arrange(
        model,
        setting,
        device,
        entries=entries_of(job, model),
        optimizer=lambda parameters: make_optimizer(
            job, parameters, implementation_for(model, setting.optimizer)
        ),
        install_stage=None if stage is None else install_stage,
    )
    compiling = None
    if setting.compile:
        compiling = Compiling(model, lambda *_: None, arranged.entries)
        compiling.start()
    return PreparedJob(
        **vars(arranged),
        job=job,
        setting=setting,
        device=device,
        branch=branch,
        stage=staged[0] if staged else None,
        compiling=compiling,
    )


def arrange(  # noqa: PLR0913 - what differs between tracing and training
    model: nn.Module,
    setting: Setting,
    device: str,
    *,
    optimizer: Callable[[list[Any]], Any],
    entries: Entries | None = None,
    install_stage: Callable[[nn.Module], None] | None = None,
    equalise: Callable[[nn.Module], None] | None = None,
    fill: Fill | None = None,
    reduced: Callable[[nn.Module], Sequence[tuple[Any, Any, int]]] | None = None,
    mid_backward: Callable[[], None] | None = None,
) -> Arranged:
    """Cast, recompute, stage, shard, and decide where the gradients live.

    Args:
        model: as it was built, where `build_device` says.
        setting: what to arrange it for.
        device: where it is trained.
        optimizer: makes the optimizer from the trainable parameters.
        entries: what loss() calls beside the model.
        install_stage: leaves the blocks of one stage of a pipeline in the model.
        equalise: gives an unsharded model the values that all ranks are to have.
        fill: the same for one tensor of a model that is sharded.
        reduced: the trainable parameters, each with the group that sums it and the number of ranks in that
            group; by default all ranks sum all of them.
        mid_backward: is called whenever a gradient arrives.
    """
    sharded = strategy_of(setting).is_sharded
    statistics = synchronise(model) if setting.sync_batchnorm and setting.gpus > 1 else None
    cast_weights(model, setting.dtypes)
    recomputed = recompute(model, setting.recompute)
    if install_stage is not None:
        # Blocks of other stages are never on this device.
        install_stage(model)
    if not sharded:
        place(model, device, {}, None)
    if equalise is not None and not sharded:
        equalise(model)
    entries = entries or Entries()
    if sharded:
        shard(model, setting, device, fill)
        open_entries(model, entries)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise JobFailed("model()", found="no parameter of it takes a gradient", cure="Leave some unfrozen.")
    made = optimizer(parameters)
    if sharded:
        use_foreach_for_shards(made)
    gradients = _gradients(model, setting, parameters, reduced, mid_backward, statistics)
    return Arranged(
        model=model,
        parameters=parameters,
        optimizer=made,
        gradients=gradients,
        recomputed=tuple(recomputed),
        entries=entries,
        statistics=statistics,
    )


def open_entries(model: nn.Module, entries: Entries) -> None:
    """Let FSDP gather the weights of the root also where loss() does not call the model itself."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    for name in (*entries.methods, *entries.wrappers):
        register_fsdp_forward_method(model, name)
    if not entries.children:
        return
    model.__dict__["run_entry"] = lambda call, *args, **kwargs: call(*args, **kwargs)
    register_fsdp_forward_method(model, "run_entry")
    children = dict(model.named_children())
    for name in entries.children:
        _enter_by_root(model, children[name])


def _enter_by_root(model: Any, child: nn.Module) -> None:
    inside = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return child._call_impl(*args, **kwargs)
        inside = True
        try:
            return model.run_entry(child._call_impl, *args, **kwargs)
        finally:
            inside = False

    child.__dict__["_compiled_call_impl"] = call


def _gradients(  # noqa: PLR0913, PLR0917 - what arrange() knows
    model: nn.Module,
    setting: Setting,
    parameters: list[Any],
    reduced: Callable[[nn.Module], Sequence[tuple[Any, Any, int]]] | None,
    mid_backward: Callable[[], None] | None,
    statistics: Statistics | None,
) -> Gradients:
    """Where the gradients live: scattered, in buckets that ranks sum, or where autograd puts them."""
    if strategy_of(setting).is_sharded:
        from trimtab.engine.fsdp import ShardedGradients

        return ShardedGradients(
            model,
            replicas=setting.mesh.dp_replicate,
            alone=setting.gpus == 1,
            mid_backward=mid_backward,
            statistics=statistics,
        )
    if mid_backward is not None:
        called = mid_backward
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: called())
    if setting.gpus == 1:
        return OwnGradients(parameters)
    summed = (
        reduced(model)
        if reduced is not None
        else [(parameter, None, setting.gpus) for parameter in parameters]
    )
    if statistics is not None:
        return SyncReducer(summed, statistics)
    return Reducer(summed, equal_parts=setting.mesh.pp > 1)


def forward(state: PreparedJob, batch: Any) -> torch.Tensor:
    """The loss of one micro-batch."""
    half = autocast_dtype(state.setting)
    with torch.autocast(state.device, dtype=half, enabled=half is not None):
        if state.branch:
            loss = branch_loss(state.job, state.model, batch, state.branch)
        elif state.stage is not None:
            loss = state.stage.run(lambda: state.job.loss(state.model, batch))
            if not state.stage.is_last:
                # No loss yet, but what the next stage is handed.
                return loss
        elif whole := rows_of_step(state.job, state.setting.micro_batch, state.setting.gpus):
            loss = forward_twice(state.job, state.model, batch, whole, check_loss)
        else:
            loss = loss_function(state.job)(state.model, batch)
    check_loss(loss)
    return loss


def step(
    state: PreparedJob,
    batches: Sequence[Any],
    *,
    clip: float | None = None,
    between: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Take one optimizer step over micro-batches of one size; return the mean loss.

    `between` is called between the forward and the backward pass of each.
    """
    scale = SCALE if state.setting.dtypes.scales_loss else 1.0
    count = len(batches)
    state.gradients.begin()
    losses = []
    for number, batch in enumerate(batches):
        state.gradients.before(number, count)
        if state.compiling is not None:
            state.compiling.use(state.setting.micro_batch, state.setting.micro_batch)
        loss = forward(state, batch)
        if between is not None:
            between()
        _backward(state, loss, scale / count)
        losses.append(loss.detach())
        del loss
    state.gradients.finish(None, count)
    update(state, scale, clip)
    return losses[0] if count == 1 else torch.stack(losses).mean()


def _backward(state: PreparedJob, loss: torch.Tensor, weight: float) -> None:
    if state.stage is not None and not state.stage.is_last:
        # The gradient comes from the next stage, in memory of its own.
        loss.backward(torch.empty_like(loss))
    else:
        (loss if weight == 1.0 else loss * weight).backward()


def update(state: PreparedJob, scale: float, clip: float | None) -> None:
    """Unscale and clip the gradients, in the optimizer's own kernel where it can; then step."""
    optimizer = state.optimizer
    device = state.parameters[0].device
    divisor = None
    if clip is not None:
        norm = state.gradients.squares().sqrt() / scale
        divisor = scale * torch.clamp(norm / clip, min=1.0)
    elif scale != 1.0:
        divisor = torch.full((), scale, dtype=torch.float64, device=device)
    fused = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    if divisor is None:
        optimizer.step()
    elif fused and device.type == "cuda" and not strategy_of(state.setting).is_sharded:
        # The kernel reads both on the device, so that the host does not wait.
        optimizer.grad_scale = divisor.float()
        optimizer.found_inf = torch.zeros((), device=device)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
    else:
        held = state.gradients.gradients()
        torch._foreach_mul_(held, (1.0 / divisor).to(held[0].dtype))
        optimizer.step()


def check_loss(loss: Any) -> None:
    """Refuse what cannot be differentiated."""
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        if not isinstance(loss, torch.Tensor):
            found = f"it returned a {type(loss).__name__}"
        elif loss.dim():
            found = f"it returned a tensor of shape {tuple(loss.shape)}"
        else:
            found = "it returned a number that no parameter has a part in"
        raise JobFailed("loss()", found=found, cure="Return a scalar tensor that depends on the model.")
