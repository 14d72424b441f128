"""Make the optimizers of a job in the implementation that a setting asks for."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trimtab.engine.low_bit_optimizer import LowBitOptimizer, imitate_optimizer
from trimtab.errors import EnvironmentFault, JobFailed, WrongUse
from trimtab.jobs.optimizers import has_optimizers, is_optimizer, read_optimizers
from trimtab.spec import OptimizerImplementation, OptimizerRule

if TYPE_CHECKING:
    from collections.abc import Callable

ONLY = "optimizer"
"""Name of the optimizer of a job without optimizers()."""

MATRIX = 2
"""Dimensions of a matrix."""

FLAGS = {
    OptimizerImplementation.FUSED: {"fused": True, "foreach": False},
    OptimizerImplementation.FOREACH: {"fused": False, "foreach": True},
    OptimizerImplementation.PLAIN: {"fused": False, "foreach": False},
}


@dataclass(frozen=True, kw_only=True)
class NamedOptimizer:
    """An optimizer that is ready to step, with its loss and frequency."""

    name: str
    optimizer: Any
    loss: Callable[[Any, Any], Any] | None = None
    """Function of (model, batch); None: the job's loss."""
    every: int = 1
    schedule: Callable[[Any], Any] | None = None

    def is_due(self, step: int) -> bool:
        """Return whether it updates in a step; steps count from 1."""
        return step % self.every == 0


def make_optimizers(
    job: Any,
    named_parameters: list[tuple[str, Any]],
    implementation: OptimizerImplementation,
    rule: OptimizerRule = OptimizerRule.JOB,
) -> list[NamedOptimizer]:
    """Return the job's optimizers; one called `optimizer` if it has no optimizers().

    With another rule than the job's own, its class takes over the parameter groups and options.
    """
    if rule is not OptimizerRule.JOB:
        return _make_by_rule(job, named_parameters, implementation, rule)
    if not has_optimizers(job):
        parameters = [parameter for _, parameter in named_parameters]
        return [NamedOptimizer(name=ONLY, optimizer=make_optimizer(job, parameters, implementation))]
    return [
        NamedOptimizer(
            name=name,
            optimizer=_use_implementation(part.optimizer, implementation),
            loss=part.loss,
            every=part.every,
            schedule=part.schedule,
        )
        for name, part in read_optimizers(job, named_parameters).items()
    ]


def make_optimizer(job: Any, parameters: list[Any], implementation: OptimizerImplementation) -> Any:
    """Return the job's optimizer, or AdamW; in the given implementation if the optimizer supports it."""
    own = getattr(job, "optimizer", None)
    built = own(parameters) if own is not None else torch.optim.AdamW(parameters, lr=1e-4)
    if not is_optimizer(built):
        raise JobFailed(
            "optimizer()",
            found="it returned None" if built is None else f"it returned a {type(built).__name__}",
            cure="Return one torch.optim.Optimizer. For several, give the job optimizers(named_parameters).",
        )
    return _use_implementation(built, implementation)


def _make_by_rule(
    job: Any,
    named_parameters: list[tuple[str, Any]],
    implementation: OptimizerImplementation,
    rule: OptimizerRule,
) -> list[NamedOptimizer]:
    """Return the optimizer of a rule with the groups and options of the job's own."""
    if has_optimizers(job):
        raise WrongUse(
            f"--optimizer {rule}",
            found="the job makes its optimizers by optimizers()",
            cure="Leave --optimizer out, and change optimizers() instead.",
        )
    parameters = [parameter for _, parameter in named_parameters]
    own = make_optimizer(job, parameters, implementation)
    groups = [
        {name: group[name] for name in ("params", *rule.stored.options) if name in group}
        for group in own.param_groups
    ]
    if not rule.stored.matrices_only:
        return [NamedOptimizer(name=ONLY, optimizer=_make_rule(rule, groups, implementation))]
    made = []
    for name, of_rule, is_matrix in ((rule.value, rule, True), ("adamw", OptimizerRule.ADAMW, False)):
        chosen = [
            {**group, "params": [entry for entry in group["params"] if (entry.dim() == MATRIX) is is_matrix]}
            for group in groups
        ]
        if chosen := [group for group in chosen if group["params"]]:
            made.append(NamedOptimizer(name=name, optimizer=_make_rule(of_rule, chosen, implementation)))
    return made


def _make_rule(
    rule: OptimizerRule, groups: list[dict[str, Any]], implementation: OptimizerImplementation
) -> Any:
    """Return the optimizer of a rule; for tensors without values, one that has its memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    stored = rule.stored
    if stored.bits and isinstance(groups[0]["params"][0], FakeTensor):
        return LowBitOptimizer(groups, stored)
    module, _, name = stored.place.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise EnvironmentFault(
            f"--optimizer {rule}",
            found=f"{stored.library} has no {name} here ({error})",
            cure=f"Install {stored.library} with `pip install {stored.library}`, or use another optimizer.",
        ) from error
    return _use_implementation(made(groups), implementation)


def _use_implementation(built: Any, implementation: OptimizerImplementation) -> Any:
    """Return an optimizer like a new one, in the given implementation if its class supports it."""
    built = imitate_optimizer(built)
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
