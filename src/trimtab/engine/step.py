"""Prepare a job for a setting and run optimizer steps, on fake or real tensors.

`prepare_job` does everything before the first step; `run_step` runs one optimizer step. Tracing and measuring
use both. Training uses `arrange_model` and builds its step from the same functions, with retries between them
(`trimtab.training.stepper`). So a prediction, its measurement and the training run execute the same program.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from trimtab.engine.activation_offload import enable_activation_offload
from trimtab.engine.branches import compute_branch_loss
from trimtab.engine.build import EntryPoints, build_model, find_entries, find_shard_units, make_batch
from trimtab.engine.chunked_loss import apply_loss_form
from trimtab.engine.compile import CompileSwitch
from trimtab.engine.context_parallel import (
    arrange_context,
    check_calls,
    refuse_context,
    use_whole_sequences,
)
from trimtab.engine.expert_parallel import arrange_experts, find_experts
from trimtab.engine.expert_rules import refuse_expert_split
from trimtab.engine.float8 import convert_linear_layers
from trimtab.engine.fsdp import move_module, refuse_scalars, shard_model
from trimtab.engine.gradient_caching import count_cached_samples, forward_twice
from trimtab.engine.gradients import Gradients, LocalGradients, Reducer, StagePass
from trimtab.engine.in_backward import InBackwardGradients, read_loss
from trimtab.engine.in_backward_rules import refuse_in_backward
from trimtab.engine.offload_rules import refuse_state_offload, runs_host_optimizer
from trimtab.engine.optimizer import choose_implementation, make_optimizers, use_foreach_for_shards
from trimtab.engine.optimizer_offload import HostGradients, HostOptimizer
from trimtab.engine.pipeline_stage import (
    StageSchedule,
    StageSplit,
    StandInForm,
    TracedStage,
    split_model,
)
from trimtab.engine.precision import autocast_dtype, cast_weights, torch_dtype
from trimtab.engine.quantize import quantize_frozen
from trimtab.engine.recompute import enable_recompute
from trimtab.engine.stage_balance import SAMPLES
from trimtab.engine.sync_norm import SyncReducer, synchronise_batch_norms
from trimtab.engine.tensor_parallel import gather_loss
from trimtab.engine.tensor_plan import find_tensor_plan
from trimtab.engine.tensor_rules import refuse_tensor_split
from trimtab.engine.update_phases import GradientSwitch, UpdatePhase, group_by_loss, list_parameters
from trimtab.engine.weight_gradients import flush_weight_gradients
from trimtab.errors import JobFailed, WrongUse
from trimtab.jobs.job import list_expert_modules, list_whole_model_members, loss_function
from trimtab.spec import Offload
from trimtab.strategies import STRATEGIES, strategy_of
from trimtab.strategies.base import Wrapping
from trimtab.strategies.schedules import Pass

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from trimtab.engine.activation_offload import ActivationOffload
    from trimtab.engine.context_parallel import ContextGroup
    from trimtab.engine.expert_parallel import ExpertGroup
    from trimtab.engine.fsdp import FillTensor, StageShards
    from trimtab.engine.optimizer import NamedOptimizer
    from trimtab.engine.pipeline_stage import BlockRelay
    from trimtab.engine.sync_norm import SharedStatistics
    from trimtab.engine.tensor_plan import TensorPlan
    from trimtab.spec import Setting

    Between = Callable[[], None] | None
    RunPasses = Callable[["PreparedJob", UpdatePhase, Sequence[Any], Between], torch.Tensor]
    """A function that computes the gradients of one loss, as `compute_gradients` does."""

__all__ = [
    "PreparedJob",
    "build_model",
    "make_batch",
    "prepare_job",
    "run_step",
]

ARRANGED = frozenset(
    {Wrapping.WHOLE, Wrapping.SHARDS, Wrapping.BRANCH, Wrapping.STAGE, Wrapping.STAGE_SHARDS}
)
"""What `arrange_model` can leave of a model on a device: a new `Wrapping` is added here with its code."""
LOSS_SCALE = 2.0**16
"""Factor for the loss if the precision scales it, so that small gradients do not become 0."""


@dataclass(kw_only=True)
class ArrangedModel:
    """A model as one rank trains it, with its optimizers and gradients."""

    model: nn.Module
    parameters: list[Any]
    """Trainable parameters."""
    phases: list[UpdatePhase]
    """The losses of a step, each with its optimizers and gradients; one if the job has one loss."""
    recomputed: tuple[str, ...] = ()
    """Names of the lists of blocks that are recomputed."""
    entries: EntryPoints = field(default_factory=EntryPoints)
    """Methods and submodules that loss() calls besides the model."""
    statistics: SharedStatistics | None = None
    """State shared by synchronised BatchNorm layers; None if there are none."""
    offload: ActivationOffload | None = None
    """Holds activations on the host; None if they stay on the device."""
    context: ContextGroup | None = None
    """Ranks that split sequences with this one; None if sequences are whole."""
    tensor_plan: TensorPlan | None = None
    """How ranks split layers between them; None without tensor parallelism."""
    experts: ExpertGroup | None = None
    """Ranks that hold other experts; None without expert parallelism."""
    stage_notes: tuple[str, ...] = ()
    """What pipeline stages are balanced by, if their time could not be counted, and what all of them hold."""


@dataclass(kw_only=True)
class PreparedJob(ArrangedModel):
    """A job that is ready for its first step."""

    job: Any
    setting: Setting
    device: str
    branch: str = ""
    """Branch that this rank computes; empty: all branches."""
    stage: TracedStage | None = None
    """Pipeline stages of this rank, if it has some."""
    compiling: CompileSwitch | None = None
    after_step: Callable[[nn.Module], Any] | None = None
    """The job's after_step(), called after every update; None if it has none."""


def prepare_job(
    job: Any, setting: Setting, device: str = "cuda", *, branch: str = "", values: bool = True
) -> PreparedJob:
    """Build the model, set up recomputation and sharding, and make the optimizer.

    Without `values`, a model that is built on the CPU gets no values: use this if only sizes matter.
    """
    model = build_model(job, setting, device, branch=branch, values=values)
    return assemble_job(job, model, setting, device, branch=branch)


def assemble_job(  # noqa: PLR0913 - also for which rank
    job: Any,
    model: nn.Module,
    setting: Setting,
    device: str = "cuda",
    *,
    branch: str = "",
    stage: int | None = None,
    split: StageSplit | None = None,
) -> PreparedJob:
    """Do everything between building the model and the first step, for one rank of the setting.

    With `stage`, keep only the blocks of that pipeline stage; `split` has the blocks of all stages, if they
    are known.
    """
    refuse_partial_model(job, setting)
    refuse_context(job, setting)
    refuse_in_backward(setting, job)
    stages: list[TracedStage] = []

    def install_stage(model: nn.Module, split: StageSplit) -> BlockRelay:
        assert stage is not None  # noqa: S101 - called only with a stage
        schedule = StageSchedule(setting.virtual_stages, setting.schedule.splits_backward)
        form = find_stand_in_form(setting, device)
        stages.append(TracedStage(model, stage, setting.mesh.pp, schedule, split, form))
        return stages[0].relay

    arranged = arrange_model(
        model,
        setting,
        device,
        entries=find_entries(job, model),
        optimizers=lambda named: make_optimizers(
            job, named, choose_implementation(model, setting.optimizer), setting.optimizer_rule
        ),
        install_stage=None if stage is None else install_stage,
        follow=make_meta_loss(job, setting),
        split=split,
        expert_modules=list_expert_modules(job),
    )
    compiling = None
    if setting.compile:
        budget = setting.recompute.way.budget
        compiling = CompileSwitch(model, lambda *_: None, arranged.entries, budget)
        compiling.start()
    return PreparedJob(
        **vars(arranged),
        job=job,
        setting=setting,
        device=device,
        branch=branch,
        stage=stages[0] if stages else None,
        compiling=compiling,
        after_step=getattr(job, "after_step", None),
    )


def refuse_partial_model(job: Any, setting: Setting) -> None:
    """Raise if a job has members that need the whole model, and ranks of the setting hold only a part."""
    members = list_whole_model_members(job)
    if members and not strategy_of(setting).runs_whole_model:
        allowed = [strategy.word for strategy in STRATEGIES.values() if strategy.runs_whole_model]
        raise WrongUse(
            f"strategy {setting.strategy}",
            found=f"the job has {' and '.join(members)}, and a rank would hold only a part of the model",
            cure=f"Use one of the strategies {', '.join(allowed)}.",
        )


def arrange_model(  # noqa: PLR0913 - hooks for the differences between tracing and training
    model: nn.Module,
    setting: Setting,
    device: str,
    *,
    optimizers: Callable[[list[tuple[str, Any]]], list[NamedOptimizer]],
    entries: EntryPoints | None = None,
    install_stage: Callable[[nn.Module, StageSplit], BlockRelay] | None = None,
    equalise: Callable[[nn.Module], None] | None = None,
    fill: FillTensor | None = None,
    reduced: Callable[[nn.Module], Sequence[tuple[Any, Any, int]]] | None = None,
    mid_backward: Callable[[], None] | None = None,
    follow: Callable[[nn.Module], Any] | None = None,
    split: StageSplit | None = None,
    expert_modules: Sequence[str] = (),
) -> ArrangedModel:
    """Cast, recompute, stage and shard a model; make its optimizers and gradient storage.

    Args:
        model: the model, built on the device that `choose_build_device` returns.
        setting: the setting to train with.
        device: the device to train on.
        optimizers: makes the optimizers from the trainable parameters and their names.
        entries: methods and submodules that loss() calls besides the model.
        install_stage: keeps only the blocks of one pipeline stage in the model, by the blocks of each stage.
        equalise: gives an unsharded model the same values on all ranks.
        fill: does the same for one tensor of a sharded model.
        reduced: returns the trainable parameters, each with the group that sums it and the number of ranks
            in that group; by default all ranks sum all parameters.
        mid_backward: called whenever a gradient arrives.
        follow: computes the loss of a batch on the meta device, to split layers or balance stages.
        split: the blocks of each pipeline stage; by default they are balanced.
        expert_modules: names of the modules of experts; without them, they are found by their form.
    """
    _refuse_combinations(model, setting)
    sharded = strategy_of(setting).is_sharded
    split = StageSplit() if install_stage is None else split or find_stage_split(model, setting, follow)
    context = arrange_context(model, setting)
    statistics = synchronise_batch_norms(model) if setting.sync_batchnorm and setting.gpus > 1 else None
    cast_weights(model, setting.dtypes)
    quantize_frozen(model, setting.base, "cpu" if sharded else device)
    convert_linear_layers(model, setting.dtypes, device)
    apply_loss_form(model, setting.loss)
    counts = find_experts(model, expert_modules) if max(setting.mesh.tp, setting.mesh.ep) > 1 else {}
    tensor_plan = find_tensor_plan(model, setting.mesh.tp, follow, [*counts]) if setting.mesh.tp > 1 else None
    experts = arrange_experts(model, setting, device, counts)
    recomputed, entries = enable_recompute(model, setting.recompute), entries or EntryPoints()
    moves = Offload.ACTIVATIONS in setting.offload
    offload = enable_activation_offload(model, entries, device, compiled=setting.compile) if moves else None
    # Without the blocks of other stages, the list is none of equal blocks any more.
    units = find_shard_units(model) if sharded else []
    relay, shards = None if install_stage is None else install_stage(model, split), None
    if not sharded:
        move_module(model, device, {}, None)
        if equalise is not None:
            equalise(model)
    else:
        shards = shard_model(
            model, setting, device, fill, units=units, relay=relay, plan=tensor_plan, experts=experts
        )
        register_entries(model, entries)
    built = optimizers(named := _list_trainable(model))
    if sharded:
        for optimizer in built:
            use_foreach_for_shards(optimizer.optimizer)
    parameters = [parameter for _, parameter in named]
    return ArrangedModel(
        model=model,
        parameters=parameters,
        phases=_make_phases(
            model,
            setting,
            device,
            built,
            parameters,
            reduced=reduced,
            mid_backward=mid_backward,
            statistics=context or statistics,
            experts=experts,
            shards=shards,
        ),
        recomputed=tuple(recomputed),
        entries=entries,
        statistics=statistics,
        offload=offload,
        context=context,
        tensor_plan=tensor_plan,
        experts=experts,
        stage_notes=tuple(filter(None, (split.note, split.held_note))),
    )


def find_stand_in_form(setting: Setting, device: Any) -> StandInForm:
    """Return the form of weights that a rank of a pipeline does not hold: FSDP gathers others in 16 bits."""
    cast = setting.dtypes.autocast if strategy_of(setting).is_sharded else None
    return StandInForm(device, None if cast is None else torch_dtype(cast))


def find_stage_split(
    model: nn.Module, setting: Setting, follow: Callable[[nn.Module], Any] | None
) -> StageSplit:
    """Return the blocks of each pipeline stage: those of the setting, or balanced by their time."""
    split = split_model(
        model, setting.mesh.pp, setting.virtual_stages, recompute=setting.recompute.way, run_loss=follow
    )
    blocks = max(0, len(split.work) - 2)
    if len(setting.stage_layers) == len(split.layers) and sum(setting.stage_layers) == blocks:
        return split._replace(layers=setting.stage_layers)
    return split


def _list_trainable(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the trainable parameters with their names; raise if there are none."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise JobFailed(
            "model()", found="none of its parameters is trainable", cure="Leave some parameters unfrozen."
        )
    return named


def make_meta_loss(job: Any, setting: Setting) -> Callable[[nn.Module], Any] | None:
    """Return a function that computes the loss of one micro-batch on the meta device; None without a job."""
    if job is None:
        return None

    def compute_meta_loss(model: nn.Module) -> Any:
        # Stages are the same for all micro-batches.
        samples = SAMPLES if setting.mesh.pp > 1 else setting.micro_batch
        ranks = setting.mesh.data_parallel
        single = setting.replace(micro_batch=samples, accumulation=1, global_batch=samples * ranks, shares=())
        batch = make_batch(job, single, "meta")
        # Nothing can be sent on the meta device.
        with torch.device("meta"), use_whole_sequences():
            return loss_function(job)(model, batch)

    return compute_meta_loss


def _refuse_combinations(model: nn.Module, setting: Setting) -> None:
    """Raise if parts of a setting do not go together, or not with the model."""
    if (wrapping := strategy_of(setting).wrapping) not in ARRANGED:
        raise NotImplementedError(f"arrange_model does not know {wrapping}")
    if strategy_of(setting).is_sharded:
        # On all ranks, before each of them has a part of the model.
        refuse_scalars(model, setting)
    refuse_state_offload(setting)
    _refuse_eager_budget(setting)
    refuse_tensor_split(setting)
    refuse_expert_split(setting)


def _refuse_eager_budget(setting: Setting) -> None:
    """Raise if a setting has a budget of the compiler, and nothing is compiled."""
    if setting.recompute.way.budget is not None and not setting.compile:
        raise WrongUse(
            f"recompute {setting.recompute}",
            found="only torch.compile has a budget of activations, and compile is off",
            cure="Add compile, or use recompute selective, every-2 or full.",
        )


def register_entries(model: nn.Module, entries: EntryPoints) -> None:
    """Let FSDP gather the weights of the root also if loss() does not call the model itself."""
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


def _make_phases(  # noqa: PLR0913 - state of arrange_model()
    model: nn.Module,
    setting: Setting,
    device: str,
    optimizers: list[NamedOptimizer],
    parameters: list[Any],
    *,
    reduced: Callable[[nn.Module], Sequence[tuple[Any, Any, int]]] | None,
    mid_backward: Callable[[], None] | None,
    statistics: SharedStatistics | ContextGroup | None,
    experts: ExpertGroup | None,
    shards: StageShards | None,
) -> list[UpdatePhase]:
    """Return a phase for each loss of the optimizers, with the gradient storage of its parameters."""
    groups = group_by_loss(optimizers)
    _refuse_several_losses(setting, len(groups))
    switch = GradientSwitch(parameters, is_used=len(groups) > 1)
    if strategy_of(setting).is_sharded and switch.is_used:
        from trimtab.engine.fsdp import find_full_copies

        switch.full_copies = lambda: find_full_copies(model)
    phases: list[UpdatePhase] = []
    for group in groups:
        own = list_parameters(group) if switch.is_used else parameters
        beside = phases[0].gradients if phases else None
        gradients = _make_gradients(
            model, setting, device, own, reduced, mid_backward, statistics, experts, shards, beside
        )
        if setting.optimizer_in_backward:
            gradients = InBackwardGradients(own, group)
        if isinstance(gradients, HostGradients):
            find = gradients.find
            group = [  # noqa: PLW2901 - the same optimizers, on the host
                replace(named, optimizer=HostOptimizer(named.optimizer, find)) for named in group
            ]
        phases.append(UpdatePhase(optimizers=group, parameters=own, gradients=gradients, switch=switch))
    return phases


def _refuse_several_losses(setting: Setting, count: int) -> None:
    """Raise if a setting cannot run several losses in turn."""
    is_synchronised = setting.sync_batchnorm and setting.gpus > 1
    options = {
        "compile": setting.compile,
        "sync_batchnorm": is_synchronised,
        "optimizer_in_backward": setting.optimizer_in_backward,
    }
    option = next((name for name, is_used in options.items() if is_used), "")
    if count < 2 or not option:  # noqa: PLR2004 - several
        return
    raise WrongUse(
        f"{option} for a job with {count} losses",
        found=f"its optimizers have their own losses, which trimtab does not run with {option}",
        cure=f"Leave {option} out.",
    )


def _make_gradients(  # noqa: PLR0913, PLR0917 - state of arrange_model()
    model: nn.Module,
    setting: Setting,
    device: str,
    parameters: list[Any],
    reduced: Callable[[nn.Module], Sequence[tuple[Any, Any, int]]] | None,
    mid_backward: Callable[[], None] | None,
    statistics: SharedStatistics | ContextGroup | None,
    experts: ExpertGroup | None,
    shards: StageShards | None,
    beside: Any,
) -> Gradients:
    """Return the gradient storage: sharded, in buckets that ranks sum, or as autograd makes them."""
    if strategy_of(setting).is_sharded:
        from trimtab.engine.fsdp import ShardedGradients

        return ShardedGradients(
            model,
            replicas=setting.mesh.dp_replicate,
            alone=setting.gpus == 1,
            tensor_parallel=setting.mesh.tp,
            mid_backward=mid_backward,
            statistics=statistics,
            experts=experts,
            shards=shards,
            parameters=parameters,
            beside=beside,
            device=device,
        )
    if mid_backward is not None:
        callback = mid_backward
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: callback())
    if setting.gpus == 1:
        return HostGradients(parameters) if runs_host_optimizer(setting) else LocalGradients(parameters)
    own = set(map(id, parameters))
    summed = (
        [entry for entry in reduced(model) if id(entry[0]) in own]
        if reduced is not None
        else [(parameter, None, setting.gpus) for parameter in parameters]
    )
    if statistics is not None:
        return SyncReducer(summed, statistics)
    return Reducer(summed, equal_micro_batches=setting.mesh.pp > 1)


def compute_loss(
    state: PreparedJob, batch: Any, own: Callable[[Any, Any], Any] | None = None, stage: int = 0
) -> torch.Tensor:
    """Compute the loss of one micro-batch; for a pipeline stage but the last, its output.

    `own` is the loss of an optimizer, by default the job's loss. `stage` is one of the stages of this rank.
    """
    half = autocast_dtype(state.setting)
    with check_calls(state.context), torch.autocast(state.device, dtype=half, enabled=half is not None):
        if state.branch:
            loss = compute_branch_loss(state.job, state.model, batch, state.branch)
        elif state.stage is not None:
            loss = state.stage.run(lambda: state.job.loss(state.model, batch), stage)
            if not state.stage.is_last(stage):
                # This is the input of the next stage, not a loss.
                return loss
        elif samples := count_cached_samples(state.job, state.setting.micro_batch, state.setting.gpus):
            loss = forward_twice(state.job, state.model, batch, samples, check_loss)
        else:
            loss = (own or loss_function(state.job))(state.model, batch)
    check_loss(loss)
    return gather_loss(loss)


def run_step(
    state: PreparedJob,
    batches: Sequence[Any],
    *,
    clip: float | None = None,
    between: Callable[[], None] | None = None,
    run_passes: RunPasses | None = None,
) -> torch.Tensor:
    """Run one optimizer step over micro-batches of one size; return the mean loss, of the first loss.

    If the job has several losses, all of them are computed, in turn. `between` is called between the forward
    and the backward pass of each micro-batch. `run_passes` runs instead of these passes.
    """
    refuse_in_backward(state.setting, clip=clip)
    losses = []
    for phase in state.phases:
        phase.enter()
        phase.gradients.start_attempt()
        losses.append((run_passes or compute_gradients)(state, phase, batches, between))
        if not isinstance(phase.gradients, InBackwardGradients):
            update_weights(state, phase, _loss_scale(state), clip)
        phase.leave()
    if state.after_step is not None:
        with torch.no_grad():
            state.after_step(state.model)
    return losses[0]


def _loss_scale(state: PreparedJob) -> float:
    return LOSS_SCALE if state.setting.dtypes.scales_loss else 1.0


def compute_gradients(
    state: PreparedJob, phase: UpdatePhase, batches: Sequence[Any], between: Between
) -> torch.Tensor:
    """Compute the gradients of one loss over all micro-batches; return the mean loss."""
    scale = _loss_scale(state)
    count = len(batches)
    losses = []
    for number, batch in enumerate(batches):
        if state.stage is not None:
            losses.append(_run_stages(state, state.stage, phase, batch, scale / count, between=between))
            continue
        phase.gradients.prepare_micro_batch(number, count)
        if state.compiling is not None:
            state.compiling.prepare_for(state.setting.micro_batch, state.setting.micro_batch)
        loss = compute_loss(state, batch, phase.loss)
        if between is not None:
            between()
        if isinstance(phase.gradients, InBackwardGradients):
            # Training reads the loss here: a bad one must not update any weight.
            read_loss(loss)
        _backward(state, loss, scale / count)
        losses.append(loss.detach())
        del loss
    phase.gradients.finish_attempt(None, count)
    return losses[0] if count == 1 else torch.stack(losses).mean()


def _backward(state: PreparedJob, loss: torch.Tensor, weight: float, stage: int = 0) -> None:
    if state.stage is not None and not state.stage.is_last(stage):
        # The gradient comes from the next stage, in its own memory.
        loss.backward(torch.empty_like(loss))
    else:
        (loss if weight == 1.0 else loss * weight).backward()


def _run_stages(  # noqa: PLR0913 - as _run_phase(), and the stages
    state: PreparedJob,
    stages: TracedStage,
    phase: UpdatePhase,
    batch: Any,
    weight: float,
    *,
    between: Callable[[], None] | None,
) -> torch.Tensor:
    """Run one micro-batch through all stages of this rank, there and back; return the last output."""
    gradients = phase.gradients
    outputs = []
    for stage in range(stages.count):
        gradients.start_pass(StagePass(Pass.FORWARD, stage))
        outputs.append(compute_loss(state, batch, phase.loss, stage))
    last = outputs[-1].detach()
    if between is not None:
        between()
    split = stages.weight_gradients
    backward = Pass.BACKWARD if split is None else Pass.INPUT
    all_products = []
    for stage in reversed(range(stages.count)):
        # Only the last pass completes the gradients, and sends them.
        stage_pass = StagePass(backward, stage, split is None, split is None and stage == 0)
        gradients.start_pass(stage_pass)
        with contextlib.ExitStack() as stack:
            if split is not None:
                all_products.append((stage, stack.enter_context(split.collect())))
            _backward(state, outputs.pop(), weight, stage)
        gradients.finish_pass(stage_pass)
    if all_products:
        stages.note("weights")
        for stage, products in all_products:
            stage_pass = StagePass(Pass.WEIGHT, stage, True, stage == 0)
            gradients.start_pass(stage_pass)
            flush_weight_gradients(products)
            gradients.finish_pass(stage_pass)
        stages.note("optimizer")
    return last


def update_weights(state: PreparedJob, phase: UpdatePhase, scale: float, clip: float | None) -> None:
    """Unscale and clip the gradients (in the optimizers' kernels if all support that), then update."""
    optimizers = [named.optimizer for named in phase.optimizers]
    device = phase.parameters[0].device
    divisor = None
    if clip is not None:
        norm = phase.gradients.squared_norm().sqrt() / scale
        divisor = scale * torch.clamp(norm / clip, min=1.0)
    elif scale != 1.0:
        divisor = torch.full((), scale, dtype=torch.float64, device=device)
    fused = all(getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers)
    in_kernel = fused and device.type == "cuda" and not strategy_of(state.setting).is_sharded
    if divisor is not None and not in_kernel:
        gradients = phase.gradients.local_gradients()
        torch._foreach_mul_(gradients, (1.0 / divisor).to(gradients[0].device, gradients[0].dtype))
    for optimizer in optimizers:
        if divisor is None or not in_kernel:
            optimizer.step()
            continue
        # The kernel reads both on the device, so that the host does not wait.
        optimizer.grad_scale = divisor.float()
        optimizer.found_inf = torch.zeros((), device=device)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf


def check_loss(loss: Any) -> None:
    """Raise JobFailed if the loss is not a scalar tensor with a gradient."""
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        cure = "Return a scalar tensor that depends on the model"
        if not isinstance(loss, torch.Tensor):
            found = "it returned None" if loss is None else f"it returned a {type(loss).__name__}"
            cure += ", such as the sum of several losses" * isinstance(loss, dict | list | tuple)
        elif loss.dim():
            found = f"it returned a tensor of shape {tuple(loss.shape)}"
            cure += ", such as its mean()"
        else:
            found = "it returned a number that does not depend on any parameter"
        raise JobFailed("loss()", found=found, cure=f"{cure}.")
