"""Measure what a job that offloads has on the host after the traced steps, and what a checkpoint copies."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.engine.offload_rules import has_offloaded_state
from trimtab.engine.optimizer_offload import HostGradients, HostOptimizer
from trimtab.trace.workspaces import tensor_bytes


def measure_host_state(state: Any) -> dict[str, Any]:
    """Return the fields of a Trace for state on the host; empty if nothing is offloaded."""
    if not state.setting.offload:
        return {}
    optimizers = [named.optimizer for phase in state.phases for named in phase.optimizers]
    tensors = [value for made in optimizers for entry in made.state.values() for value in entry.values()]
    saved = [*state.model.parameters(), *state.model.buffers(), *tensors]
    checkpoint = {"checkpoint_bytes": sum(map(_count_local_bytes, saved))}
    if not has_offloaded_state(state.setting):
        return checkpoint
    return {
        **checkpoint,
        # Weights and gradients side by side, so that an additional block is one insertion.
        "pinned_sizes": tuple(
            size for parameter in state.model.parameters() for size in _list_pinned(state, parameter)
        ),
        "host_state_bytes": sum(map(_count_host_bytes, tensors)),
    }


def _list_pinned(state: Any, parameter: Any) -> list[int]:
    """Return the bytes of a parameter on the host, and of its gradient."""
    weight, gradient = parameter, parameter.grad
    for phase in state.phases:
        for named in phase.optimizers:
            if isinstance(named.optimizer, HostOptimizer):
                weight = named.optimizer.host_weights.get(id(parameter), weight)
        if isinstance(phase.gradients, HostGradients):
            gradient = phase.gradients.find(parameter) if gradient is None else gradient
    sizes = [_count_host_bytes(tensor) for tensor in (weight, gradient)]
    return [size for size in sizes if size]


def _count_local_bytes(tensor: Any) -> int:
    """Return the bytes of this rank's part of a tensor, on whatever device."""
    local = getattr(tensor, "_local_tensor", tensor)
    return tensor_bytes(local) if isinstance(local, torch.Tensor) else 0


def _count_host_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor's memory if it is on the host, with the padding of a shard."""
    local = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(local, torch.Tensor) or local.device.type != "cpu":
        return 0
    return int(local.untyped_storage().nbytes())
