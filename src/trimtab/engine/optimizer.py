"""Make the optimizer in the implementation that a setting asks for."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from trimtab.spec import OptimizerImplementation

FLAGS = {
    OptimizerImplementation.FUSED: {"fused": True, "foreach": False},
    OptimizerImplementation.FOREACH: {"fused": False, "foreach": True},
    OptimizerImplementation.PLAIN: {"fused": False, "foreach": False},
}


def make_optimizer(job: Any, parameters: list[Any], implementation: OptimizerImplementation) -> Any:
    """Return the job's optimizer, or AdamW; in the given implementation if the optimizer supports it."""
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


def choose_implementation(
    model: torch.nn.Module, implementation: OptimizerImplementation
) -> OptimizerImplementation:
    """Return the implementation to use for a model: fused optimizers refuse sparse gradients."""
    sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
    return OptimizerImplementation.PLAIN if sparse else implementation


def use_foreach_for_shards(optimizer: Any) -> None:
    """Turn fused implementations off for sharded parameters, except Adam's: torch has no other."""
    if isinstance(optimizer, torch.optim.Adam):
        return
    for options in (optimizer.defaults, *optimizer.param_groups):
        if options.get("fused"):
            options.update(fused=False, foreach=True)
    optimizer._step_supports_amp_scaling = False
