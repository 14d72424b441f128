"""Shard a model with FSDP2, one unit at a time, so that a device never holds more than one unit whole.

The model is built on the host. Each unit is moved to the device, given the values of rank 0, sharded, and its
whole copy is freed before the next unit comes. On the device this leaves the shards and the memory of one
unit; building there would leave the whole model in the allocator's cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trimtab.engine.blocks import shard_units
from trimtab.engine.precision import torch_dtype
from trimtab.engine.sync_norm import widen_norms
from trimtab.errors import WrongUse

if TYPE_CHECKING:
    from collections.abc import Callable

    from trimtab.spec import Setting

    Fill = Callable[[torch.Tensor], None]
    """Gives a tensor on the device the values that all ranks are to have."""
    Placed = dict[int, tuple[torch.Tensor, torch.Tensor]]
    """By id: a tensor and what it became. Both are held, so that no id is given to another tensor."""


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
