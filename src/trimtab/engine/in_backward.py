"""Update each weight in the backward pass, as soon as its gradient is complete, and free the gradient.

So the gradients of all weights never exist together. The optimizers are the job's own: each update runs their
step() on one parameter, with the options and the state that they have anyway. So results and checkpoints are
the same as without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.engine.gradients import LocalGradients
from trimtab.engine.in_backward_rules import LEAVE_OUT, OPTION
from trimtab.errors import JobFailed, WrongUse

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from trimtab.engine.optimizer import NamedOptimizer


class InBackwardGradients(LocalGradients):
    """Gradients of a single process, which the optimizers use and free during the last backward pass."""

    def __init__(self, parameters: list[nn.Parameter], optimizers: list[NamedOptimizer]) -> None:
        super().__init__(parameters)
        self._places = {
            id(parameter): (named.optimizer, index)
            for named in optimizers
            for index, group in enumerate(named.optimizer.param_groups)
            for parameter in group["params"]
        }
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._update) for parameter in parameters
        ]
        self._armed = False
        self._begun: set[int] = set()
        self._norms: list[torch.Tensor] = []
        self._checked: set[int] = set()
        self.is_enabled = True
        """Whether updates happen in the backward pass; if not, all gradients are left to the caller."""
        self.measures_norm = False
        """Whether the norm of each gradient is computed before the gradient is freed."""
        self.due: tuple[Any, ...] | None = None
        """Optimizers that update in this step; None: all."""
        self.before_update: Callable[[nn.Parameter], None] | None = None
        """Called with a parameter before its update."""

    @property
    def has_begun(self) -> bool:
        """Whether the update of any weight has begun in this attempt."""
        return bool(self._begun)

    @property
    def will_update(self) -> bool:
        """Whether the next backward pass updates the weights."""
        return self._armed

    def start_attempt(self) -> None:
        """Drop all gradients; passes update nothing until prepare_micro_batch()."""
        super().start_attempt()
        self._armed = False
        self._begun = set()
        self._norms = []

    def prepare_micro_batch(self, number: int, count: int) -> None:
        """Let the last micro-batch update the weights; earlier ones add up their gradients."""
        self._armed = self.is_enabled and number == count - 1

    def discard_micro_batch(self) -> None:
        """Drop all gradients, but not the knowledge of whether weights were changed."""
        super().start_attempt()
        self._armed = False

    def finish_attempt(self, failed_at: int | None, count: int) -> None:
        """Let no further pass update the weights."""
        del failed_at, count
        self._armed = False

    def squared_norm(self) -> torch.Tensor:
        """Return the squared norm of all gradients, also of those that were freed."""
        if not self._norms:
            return super().squared_norm()
        return torch.stack(self._norms).double().square().sum()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _update(self, parameter: nn.Parameter) -> None:
        """Update one weight and free its gradient; autograd calls this when the gradient is complete."""
        if not self._armed:
            return
        if id(parameter) in self._begun:
            raise JobFailed(
                "backward()",
                found=f"a parameter got a second gradient after its update ({OPTION})",
                cure=f"{LEAVE_OUT}, or use torch.utils.checkpoint with use_reentrant=False.",
            )
        self._begun.add(id(parameter))
        if self.before_update is not None:
            self.before_update(parameter)
        if self.measures_norm and parameter.grad is not None:
            self._norms += torch._foreach_norm([parameter.grad])
        optimizer, index = self._places.get(id(parameter), (None, 0))
        if optimizer is not None and (self.due is None or any(optimizer is due for due in self.due)):
            self._step(optimizer, index, parameter)
        parameter.grad = None

    def _step(self, optimizer: Any, index: int, parameter: nn.Parameter) -> None:
        """Run an optimizer on one parameter, with the options of its group as they are now."""
        groups = optimizer.param_groups
        alone = {**groups[index], "params": [parameter]}
        optimizer.param_groups = [alone]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        if id(optimizer) not in self._checked:
            self._checked.add(id(optimizer))
            _refuse_shared_counts(optimizer, groups[index], alone)


def _refuse_shared_counts(optimizer: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise if a step changed the options of its group: it computes something over all weights together."""
    changed = [
        name
        for name, value in after.items()
        if name != "params" and value is not before.get(name) and not _equals(value, before.get(name))
    ]
    if changed:
        raise WrongUse(
            f"{OPTION} with {type(optimizer).__name__}",
            found=f"its step() changes {', '.join(changed)} of the whole parameter group, "
            "so it cannot update weights one by one",
            cure=f"{LEAVE_OUT}, or use another optimizer.",
        )


def _equals(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(value == other)


def read_loss(loss: torch.Tensor) -> float | None:
    """Return a loss on the host before weights are updated; None if it has no value, as in a trace."""
    if isinstance(loss, FakeTensor):
        torch.ops.trimtab.wait_for_device(loss)
        return None
    return float(loss.detach())
