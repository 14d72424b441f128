"""How a setting of a job is executed, on fake tensors and on real ones alike.

`prepare` does everything before the first step, `step` is one optimizer step without accumulation. Tracing
and measuring both use it, so that a prediction and its measurement are of the same program.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trimtab.engine.cached import forward_twice, rows_of_step
from trimtab.errors import JobFailed, WrongUse
from trimtab.jobs.job import loss_function
from trimtab.spec import OptimizerImplementation, Precision, Recompute, Strategy
from trimtab.trace.branches import branch_loss, branches_of, keep_branch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trimtab.spec import Setting
    from trimtab.trace.stages import Stage

AUTOCAST = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
FLAGS = {
    OptimizerImplementation.FUSED: {"fused": True, "foreach": False},
    OptimizerImplementation.FOREACH: {"fused": False, "foreach": True},
    OptimizerImplementation.PLAIN: {"fused": False, "foreach": False},
}
KEPT_OPS = (
    "mm addmm bmm baddbmm _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math"
)
"""What selective recomputation keeps: matrix products and attention."""


@dataclass
class Prepared:
    """A job that is ready for its first step."""

    job: Any
    model: Any
    """What the job's loss() is called with."""
    parameters: list[Any]
    """The trainable ones."""
    optimizer: Any
    scaler: Any
    autocast: torch.dtype | None
    device: str
    buckets: list[torch.Tensor]
    """What gradients are copied into before they are reduced, under ddp."""
    recomputed: tuple[str, ...] = ()
    """Names of the lists of blocks that are recomputed."""
    branch: str = ""
    """The one that this rank computes; empty: all of them."""
    stage: Stage | None = None
    """Of a pipeline."""
    whole: int = 0
    """Samples in the loss of a step that gradient caching cuts; 0 for a step of plain passes."""


@contextlib.contextmanager
def building(precision: Precision, device: str) -> Iterator[None]:
    """Default device and dtype, for the job's model() and batch() alone."""
    before = torch.get_default_dtype()
    if precision is Precision.BF16_TRUE:
        torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def make_batch(job: Any, setting: Setting, device: str) -> Any:
    """One micro-batch, as the job makes it."""
    with building(setting.precision, device):
        return job.batch(setting.micro_batch)


def build(
    job: Any,
    setting: Setting,
    device: str = "cuda",
    *,
    branch: str = "",
    dropped: list[nn.Module] | None = None,
) -> nn.Module:
    """The job's model.

    With `branch`, as a rank of that branch has it; what only other branches need goes to `dropped`.
    """
    torch.backends.cuda.matmul.allow_tf32 = setting.precision is Precision.TF32
    torch.backends.cudnn.allow_tf32 = setting.precision is not Precision.FP32
    with building(setting.precision, device):
        model = job.model()
    if not isinstance(model, nn.Module):
        raise JobFailed(
            "model()", found=f"it returned a {type(model).__name__}", cure="Return a torch.nn.Module."
        )
    if branch:
        others = keep_branch(model, branches_of(job), branch)
        if dropped is not None:
            dropped += others
        del others
    return model


def prepare(job: Any, setting: Setting, device: str = "cuda", *, branch: str = "") -> Prepared:
    """Build the model, arrange recomputation and sharding, make the optimizer."""
    return arrange(job, build(job, setting, device, branch=branch), setting, device, branch=branch)


def arrange(  # noqa: PLR0913 - and as which rank
    job: Any,
    model: nn.Module,
    setting: Setting,
    device: str = "cuda",
    *,
    branch: str = "",
    stage: int | None = None,
) -> Prepared:
    """Everything between building the model and the first step.

    With `stage`, as a rank of that stage of a pipeline has it.
    """
    recomputed = recompute(model, setting.recompute)
    staged = None
    if stage is not None:
        from trimtab.trace.stages import Stage

        staged = Stage(model, stage, setting.mesh.pp)
    autocast = AUTOCAST.get(setting.precision)
    if setting.strategy in (Strategy.FSDP, Strategy.HSDP):
        shard(model, setting, device)
        autocast = None
    parameters = [one for one in model.parameters() if one.requires_grad]
    if not parameters:
        raise JobFailed("model()", found="no parameter of it takes a gradient", cure="Leave some unfrozen.")
    optimizer = make_optimizer(job, parameters, setting.optimizer)
    buckets = []
    if setting.strategy in (Strategy.DDP, Strategy.BRANCH, Strategy.HYBRID, Strategy.PIPELINE):
        # Branches and stages sum the gradients of what they share in the same way.
        buckets = [torch.empty_like(one) for one in parameters]
    scaler = torch.amp.GradScaler(device) if setting.precision is Precision.FP16 else None
    runs: Any = torch.compile(model) if setting.compile else model
    whole = rows_of_step(job, setting.micro_batch, setting.gpus)
    return Prepared(
        job, runs, parameters, optimizer, scaler, autocast, device, buckets, tuple(recomputed), branch,
        staged, whole,
    )  # fmt: skip


def forward(state: Prepared, batch: Any) -> torch.Tensor:
    """The loss of one micro-batch."""
    with torch.autocast(state.device, dtype=state.autocast, enabled=state.autocast is not None):
        if state.branch:
            loss = branch_loss(state.job, state.model, batch, state.branch)
        elif state.stage is not None:
            loss = state.stage.run(lambda: state.job.loss(state.model, batch))
            if not state.stage.is_last:
                # No loss yet, but what the next stage is handed.
                return loss
        elif state.whole:
            loss = forward_twice(state.job, state.model, batch, state.whole, _check_loss)
        else:
            loss = loss_function(state.job)(state.model, batch)
    _check_loss(loss)
    return loss


def step(
    state: Prepared,
    batch: Any,
    *,
    clip: float | None = None,
    between: Callable[[], None] | None = None,
) -> torch.Tensor:
    """One optimizer step; `between` is called between its forward and its backward pass."""
    state.optimizer.zero_grad(set_to_none=True)
    loss = forward(state, batch)
    scaler = state.scaler
    if between is not None:
        between()
    if state.stage is not None and not state.stage.is_last:
        # The gradient comes from the next stage, in memory of its own.
        loss.backward(torch.empty_like(loss))
    else:
        (loss if scaler is None else scaler.scale(loss)).backward()
    if state.branch or state.stage is not None:
        # What only other branches or stages use has its gradient from them.
        for parameter in state.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    if clip is not None:
        if scaler is not None:
            scaler.unscale_(state.optimizer)
        nn.utils.clip_grad_norm_(state.parameters, clip)
    if scaler is None:
        state.optimizer.step()
    else:
        scaler.step(state.optimizer)
        scaler.update()
    return loss.detach()


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        if not isinstance(loss, torch.Tensor):
            found = f"it returned a {type(loss).__name__}"
        elif loss.dim():
            found = f"it returned a tensor of shape {tuple(loss.shape)}"
        else:
            found = "it returned a number that no parameter has a part in"
        raise JobFailed("loss()", found=found, cure="Return a scalar tensor that depends on the model.")


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost lists of two or more composite modules of one class, with their names."""
    found: list[tuple[str, nn.Module]] = []

    def visit(name: str, module: nn.Module) -> None:
        children = list(module.children())
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1:
            composite = all(any(True for _ in child.children()) for child in children)
            if composite and len({type(child) for child in children}) == 1:
                found.append((name, module))
                return
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", model)
    return found


def recompute(model: nn.Module, how: Recompute) -> list[str]:
    """Wrap the repeated blocks in place, or turn the model's own switch; names what is recomputed."""
    if how is Recompute.NONE:
        return []
    own = getattr(model, "gradient_checkpointing_enable", None)
    if how is Recompute.FULL and own is not None:
        own(gradient_checkpointing_kwargs={"use_reentrant": False})
        return ["the model's own switch"]
    lists = repeated_blocks(model)
    if not lists:
        raise WrongUse(
            f"--recompute {how}",
            found="this model has no list of repeated blocks",
            cure="Use --recompute none, or put the blocks of the model into an nn.ModuleList.",
        )
    for _, blocks in lists:
        for block in blocks.children():
            _recompute_block(block, selective=how is Recompute.SELECTIVE)
    return [f"{name} ({len(list(blocks.children()))} blocks)" for name, blocks in lists]


def _recompute_block(block: nn.Module, *, selective: bool) -> None:
    inner = block.forward
    context: dict[str, Any] = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)}
    extra = context if selective else {}

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **extra, **kwargs)

    block.forward = forward


@functools.cache
def _kept() -> frozenset[Any]:
    aten = torch.ops.aten
    return frozenset(getattr(aten, name).default for name in KEPT_OPS.split() if hasattr(aten, name))


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _kept() else CheckpointPolicy.PREFER_RECOMPUTE


def shard(model: nn.Module, setting: Setting, device: str) -> None:
    """FSDP2 over every repeated block and the root, in the process group that there is."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if setting.precision in AUTOCAST:
        half = AUTOCAST[setting.precision]
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    mesh = device_mesh(setting, device)
    for _, blocks in repeated_blocks(model):
        for block in blocks.children():
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def device_mesh(setting: Setting, device: str) -> Any:
    """The mesh of a sharded setting; made of real numbers even while tracing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils._python_dispatch import _disable_current_modes

    mesh = setting.mesh
    with _disable_current_modes():
        if mesh.dp_replicate > 1:
            return init_device_mesh(
                device, (mesh.dp_replicate, mesh.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
            )
        return init_device_mesh(device, (mesh.dp_shard,), mesh_dim_names=("dp_shard",))


def make_optimizer(job: Any, parameters: list[Any], implementation: OptimizerImplementation) -> Any:
    """The job's optimizer, or AdamW; in the implementation asked for, where it takes that flag."""
    own = getattr(job, "optimizer", None)
    built = own(parameters) if own is not None else torch.optim.AdamW(parameters, lr=1e-4)
    accepted = inspect.signature(type(built).__init__).parameters
    flags: dict[str, Any] = {name: value for name, value in FLAGS[implementation].items() if name in accepted}
    if not flags:
        return built
    options = {
        name: value for name, value in built.defaults.items() if name in accepted and name not in flags
    }
    groups = [
        {name: value for name, value in group.items() if name not in flags} for group in built.param_groups
    ]
    return type(built)(groups, **options, **flags)
