"""Split the layers of a model over the ranks of a tensor-parallel group, with sequence parallelism.

All parameters become DTensors on the tensor-parallel axis of the device mesh: parts of the layers that are
split, copies of all others. Between split layers, each rank has a part of the sequence: norms, dropout and
residual sums run on that part only. Before a column layer the parts are gathered, once for all layers that
read the same tensor; after a row layer the sums are scattered again.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map

from trimtab.engine.tensor_plan import Role

if TYPE_CHECKING:
    from trimtab.engine.expert_parallel import ExpertGroup
    from trimtab.engine.tensor_plan import TensorPlan

SEQUENCE = 1
"""Dimension of the sequence in the activations between layers: samples, sequence, features."""
GATHERED = "_trimtab_gathered"
"""Attribute of a tensor that holds its gathered copy, as long as the tensor itself lives."""


class TensorSplitter:
    """Splits modules by a plan; each rank keeps its part."""

    def __init__(
        self, model: nn.Module, plan: TensorPlan, mesh: Any, experts: ExpertGroup | None = None
    ) -> None:
        """Take the plan, the mesh of the ranks, and the experts, whose weights stay as they are."""
        self._mesh = mesh
        # Modules of other pipeline stages are in the plan, and not in the model.
        modules = dict(model.named_modules(remove_duplicate=False))
        self._left_alone: set[int] = set()
        if experts is not None:
            experts.tensor_mesh = mesh
            for name in filter(modules.__contains__, experts.layers):
                self._left_alone |= {id(module) for module in modules[name].modules()}
                # Its parent chooses the experts of every token, which it mostly does for a list of tokens.
                parent = modules[name.rpartition(".")[0]]
                parent.register_forward_pre_hook(_gather_inputs, with_kwargs=True)
                # Else the gradient comes in parts of the sequence, which older torch cannot make a list of.
                parent.register_forward_hook(_scatter_outputs)
        self._roles = {id(modules[name]): role for name, role in plan.roles.items() if name in modules}
        self._split: dict[int, tuple[Any, nn.Parameter]] = {}
        """By id: a parameter and what it became. Both are kept alive, so that their ids are not reused."""
        enable_mixed_tensors()

    def split_module(self, module: nn.Module) -> None:
        """Turn all parameters of a module on the device into DTensors, except those that are already."""
        for owner in module.modules():
            if id(owner) in self._left_alone:
                continue
            role = self._roles.get(id(owner), Role.REPLICATED)
            is_new = False
            for name, parameter in owner._parameters.items():
                if parameter is None or isinstance(parameter, DTensor):
                    continue
                is_new = True
                key = id(parameter)
                if key not in self._split:
                    self._split[key] = (parameter, self._split_parameter(parameter, _get_dim(role, name)))
                owner._parameters[name] = self._split[key][1]
            if is_new:
                self._add_hooks(owner, role)
        # First: other hooks compare the output with what the next module gets.
        module.register_forward_hook(_wrap_views, prepend=True)

    def release(self) -> None:
        """Free the parameters from before."""
        self._split.clear()

    def _split_parameter(self, parameter: nn.Parameter, dim: int | None) -> nn.Parameter:
        data = parameter.detach()
        if dim is not None:
            # A copy: a view would keep all of it in memory.
            data = data.chunk(self._mesh.size(), dim)[self._mesh.get_local_rank()].clone(
                memory_format=torch.contiguous_format
            )
        placement = Replicate() if dim is None else Shard(dim)
        whole = DTensor.from_local(
            data, self._mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        split = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        for name, value in vars(parameter).items():
            vars(split).setdefault(name, value)
        return split

    def _add_hooks(self, module: nn.Module, role: Role) -> None:
        if role in {Role.COLUMN, Role.GATHERED, Role.HEAD}:
            module.register_forward_pre_hook(_gather_input)
        if role is Role.GATHERED:
            module.register_forward_hook(_gather_output)
        if role in {Role.ROW, Role.EMBEDDING}:
            module.register_forward_hook(_scatter_output)
        if isinstance(module, nn.Embedding) and role is Role.EMBEDDING and module.padding_idx is not None:
            # The part of a rank has other indices; what is left to do is to give that entry no gradient.
            module.register_forward_hook(functools.partial(_stop_gradient_at, module.padding_idx))
            module.padding_idx = None


def _get_dim(role: Role, name: str) -> int | None:
    """Return the dimension along which a parameter of a layer is split; None: it is not."""
    if role in {Role.COLUMN, Role.GATHERED, Role.HEAD, Role.EMBEDDING}:
        return 0
    return 1 if role is Role.ROW and name == "weight" else None


def _gather_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    source = args[0]
    if not isinstance(source, DTensor) or all(placement.is_replicate() for placement in source.placements):
        return None
    gathered = getattr(source, GATHERED, None)
    if gathered is None or gathered.requires_grad is not source.requires_grad:
        gathered = source.redistribute(placements=[Replicate()])
        setattr(source, GATHERED, gathered)
    return (gathered, *args[1:])


def _gather_inputs(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather the parts of the sequence in all inputs of a module."""

    def gather(value: Any) -> Any:
        return value.redistribute(placements=[Replicate()]) if isinstance(value, DTensor) else value

    return tree_map(gather, (args, kwargs))


def _gather_output(_: nn.Module, __: Any, output: Any) -> Any:
    return output.redistribute(placements=[Replicate()]) if isinstance(output, DTensor) else output


def _scatter_output(_: nn.Module, __: Any, output: Any) -> Any:
    """Sum over ranks, and leave each rank its part of the sequence where all parts are equal."""
    if not isinstance(output, DTensor):
        return output
    has_sequence = output.dim() > SEQUENCE + 1
    if has_sequence and output.shape[SEQUENCE] % output.device_mesh.size() == 0:
        return output.redistribute(placements=[Shard(SEQUENCE)])
    return output.redistribute(placements=[Replicate()])


def _scatter_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    """Scatter all outputs of a module that have a sequence."""

    def scatter(value: Any) -> Any:
        has_sequence = isinstance(value, DTensor) and value.dim() > SEQUENCE + 1
        return _scatter_output(module, args, value) if has_sequence else value

    return tree_map(scatter, output)


def _wrap_views(_: nn.Module, __: Any, output: Any) -> Any:
    """Return outputs that are no views: FSDP would lose its hook on a view that is changed in place."""

    def wrap(value: Any) -> Any:
        if not isinstance(value, DTensor) or not value._is_view():
            return value
        if any(placement.is_partial() for placement in value.placements):
            return value
        return DTensor.from_local(
            value.to_local(),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )

    return tree_map(wrap, output)


def _stop_gradient_at(entry: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return torch.where((args[0] == entry).unsqueeze(-1), output.detach(), output)


def gather_loss(loss: Any) -> Any:
    """Return a loss as a plain tensor with the value that all ranks of the group agree on."""
    # A copy: after an error the loss is detached in place, which views cannot be.
    return loss.full_tensor().clone() if isinstance(loss, DTensor) else loss


def clear_sharding_cache() -> None:
    """Let DTensor forget what it knows of operations: entries of an earlier mesh name its process groups."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


@functools.cache
def enable_mixed_tensors() -> None:
    """Let plain tensors take part in operations with DTensors, as copies that all ranks have.

    It also adds operations that DTensor does not have: attention on the CPU, and a loss over logits that may
    or may not be split over the vocabulary.
    """
    DTensor._op_dispatcher._allow_implicit_replication = True
    _register_cpu_attention()
    _register_losses()


def _register_cpu_attention() -> None:
    """Let DTensor split the attention of the CPU by heads or by samples."""
    from torch.distributed.tensor.experimental import register_sharding

    aten = torch.ops.aten
    ways = (Replicate(), Shard(0), Shard(1))

    def list_ways(results: int, sources: int, rest: list[Any], mask: Any) -> Any:
        """Return for each way the splits of results, then of arguments: sources, numbers, mask, scale."""
        # A mask may differ between samples, so that it does not go with a split by samples.
        chosen = ways if mask is None else ways[::2]
        last = [None if mask is None else Replicate(), None]
        return [([way] * results, [*[way] * sources, *rest, *last]) for way in chosen]

    def list_forward(*args: Any, attn_mask: Any = None, **_: Any) -> Any:
        return list_ways(2, 3, [None] * (len(args) - 3), attn_mask)

    def list_backward(*args: Any, attn_mask: Any = None, **_: Any) -> Any:
        return list_ways(3, 6, [None] * (len(args) - 6), attn_mask)

    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)(list_forward)
    register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)(list_backward)


def _register_losses() -> None:
    """Compute cross entropy by parts where logits are split over the vocabulary, else whole on every rank."""
    from torch.distributed.tensor.parallel import loss

    aten = torch.ops.aten
    rows = {
        aten._log_softmax.default: (loss._log_softmax_handler, 0),
        aten._log_softmax_backward_data.default: (loss._log_softmax_backward_handler, 1),
        aten.nll_loss_forward.default: (loss._nll_loss_forward_handler, 0),
        aten.nll_loss_backward.default: (loss._nll_loss_backward_handler, 1),
    }
    for operation, (handler, place) in rows.items():
        DTensor._op_dispatcher._custom_op_handlers[operation] = functools.partial(
            _run_loss_operation, handler, place
        )


def _run_loss_operation(
    by_parts: Any, place: int, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation of a loss on DTensors; the argument at `place` has the classes in dimension 1."""
    logits = args[place]
    is_flat = isinstance(logits, DTensor) and logits.dim() == 2  # noqa: PLR2004 - tokens, classes
    if is_flat and any(placement.is_shard(1) for placement in logits.placements):
        return by_parts(operation, args, kwargs)
    mesh = next(value.device_mesh for value in args if isinstance(value, DTensor))

    def make_plain(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return value.redistribute(placements=[Replicate()] * mesh.ndim)._local_tensor

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)

    plain = tree_map(make_plain, (args, kwargs))
    return tree_map(wrap, operation(*plain[0], **plain[1]))
