"""Update phases: the losses of a step, each with the optimizers and parameters that it updates.

A job with one loss has one phase, even if it has several optimizers. A job whose optimizers have their own
losses, such as a GAN, has a phase for each loss. The phases of a step run in turn: each computes its loss
over the whole global batch and updates its parameters before the next begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trimtab.engine.gradients import Gradients
    from trimtab.engine.optimizer import NamedOptimizer


@dataclass(kw_only=True)
class UpdatePhase:
    """A loss, and the optimizers that step with its gradient."""

    optimizers: list[NamedOptimizer]
    parameters: list[Any]
    """Trainable parameters of these optimizers."""
    gradients: Gradients
    switch: GradientSwitch

    @property
    def name(self) -> str:
        """The names of the optimizers."""
        return " and ".join(named.name for named in self.optimizers)

    @property
    def loss(self) -> Callable[[Any, Any], Any] | None:
        """Function of (model, batch); None: the job's loss."""
        return self.optimizers[0].loss

    @property
    def every(self) -> int:
        """Steps between two updates of this phase: those of its most frequent optimizer."""
        return min(named.every for named in self.optimizers)

    def is_due(self, step: int) -> bool:
        """Return whether an optimizer of this phase updates in a step; steps count from 1."""
        return any(named.is_due(step) for named in self.optimizers)

    def enter(self) -> None:
        """Let only the parameters of this phase get gradients."""
        self.switch.require_only(self.parameters)

    def leave(self) -> None:
        """Let all trainable parameters get gradients again."""
        self.switch.require_all()


@dataclass
class GradientSwitch:
    """Switches gradients of trainable parameters on and off; does nothing if there is one phase."""

    parameters: list[Any]
    """All trainable parameters of the model."""
    full_copies: Callable[[], dict[int, Any]] = dict
    """Returns the gathered copies of sharded parameters that exist now, by id of the parameter."""
    is_used: bool = True
    _required: frozenset[int] | None = field(default=None, init=False)

    def require_only(self, parameters: Sequence[Any]) -> None:
        """Switch gradients on for these parameters, and off for all others."""
        self._require(frozenset(map(id, parameters)))

    def require_all(self) -> None:
        """Switch gradients on for all parameters."""
        self._require(frozenset(map(id, self.parameters)))

    def _require(self, required: frozenset[int]) -> None:
        if not self.is_used:
            return
        copies = self.full_copies()
        if required == self._required and not copies:
            return
        for parameter in self.parameters:
            is_required = id(parameter) in required
            parameter.requires_grad_(is_required)
            if id(parameter) in copies:
                copies[id(parameter)].requires_grad_(is_required)
        self._required = required


def group_by_loss(optimizers: list[NamedOptimizer]) -> list[list[NamedOptimizer]]:
    """Return the optimizers grouped by their loss, in the order in which losses first appear."""
    groups: list[list[NamedOptimizer]] = []
    for named in optimizers:
        group = next((group for group in groups if group[0].loss == named.loss), None)
        if group is None:
            groups.append([named])
        else:
            group.append(named)
    return groups


def list_parameters(optimizers: list[NamedOptimizer]) -> list[Any]:
    """Return the parameters of all groups of several optimizers."""
    return [
        parameter
        for named in optimizers
        for group in named.optimizer.param_groups
        for parameter in group["params"]
    ]
