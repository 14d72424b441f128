"""Run the optimizer on the CPU: gradients move to the host as they arrive, updated weights move back.

The device holds the weights and, for a moment each, the gradients. The host holds a copy of the weights, all
gradients and the optimizer's states. The numbers are those of the optimizer on the device: all copies have
the dtype of the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trimtab.engine.gradients import LocalGradients, sum_squares

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

CPU = torch.device("cpu")


def make_host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory on the host for a tensor's values: pinned if a GPU copies from it, else plain."""
    return torch.empty_like(tensor, device=CPU, requires_grad=False, pin_memory=tensor.is_cuda)


class HostGradients(LocalGradients):
    """Gradients of a single process, on the host: each leaves the device when it is complete."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._copies: dict[int, torch.Tensor] = {}
        """Memory on the host, by the id of the parameter."""
        self._arrived: set[int] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._move_gradient) for parameter in parameters
        ]

    def _move_gradient(self, parameter: torch.Tensor) -> None:
        """Copy a gradient to the host, or add it to that of earlier micro-batches, and free it."""
        gradient, key = parameter.grad, id(parameter)
        if gradient is None:
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if key not in self._copies:
            self._copies[key] = make_host_copy(gradient)
        if key in self._arrived:
            self._copies[key].add_(gradient.to(CPU))
        else:
            # The copy and the next use of this memory are on the same stream, one after the other.
            self._copies[key].copy_(gradient, non_blocking=True)
            self._arrived.add(key)
        parameter.grad = None

    def start_attempt(self) -> None:
        """Forget all gradients; their memory is used again."""
        self._arrived.clear()
        super().start_attempt()

    def finish_attempt(self, failed_at: int | None, count: int) -> None:
        """Wait until all copies are on the host."""
        del failed_at, count
        if self._parameters[0].is_cuda:
            torch.cuda.current_stream(self._parameters[0].device).synchronize()

    def squared_norm(self) -> torch.Tensor:
        """Return the squared norm of all gradients, on the host."""
        return sum_squares(self.local_gradients(), CPU)

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that have arrived."""
        return [gradient for gradient in map(self.find, self._parameters) if gradient is not None]

    def find(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of a parameter on the host; None if it has none in this step."""
        return self._copies[id(parameter)] if id(parameter) in self._arrived else None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


class HostOptimizer(torch.optim.Optimizer):
    """An optimizer of device weights whose states and step are on the host.

    It has the parameter groups of the optimizer that it was made from, and `state` by parameter of the model,
    so that schedulers and checkpoints use it like any other.
    """

    def __init__(self, built: torch.optim.Optimizer, find_gradient: Callable[[Any], Any]) -> None:
        """Take over an optimizer that has made no step; `find_gradient` returns a gradient on the host."""
        self.host_weights: dict[int, torch.Tensor] = {}
        self._find_gradient = find_gradient
        self._versions: dict[int, int] = {}
        super().__init__([dict(group) for group in built.param_groups], built.defaults)
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group in built.param_groups:
            own = []
            for parameter in group["params"]:
                copy = torch.nn.Parameter(make_host_copy(parameter), requires_grad=parameter.requires_grad)
                self.host_weights[id(parameter)] = copy
                self._pairs.append((parameter, copy))
                own.append(copy)
            group["params"] = own
        self._built = built

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights on the host, and copy them to the device."""
        del closure
        for mine, own in zip(self.param_groups, self._built.param_groups, strict=True):
            own.update({name: value for name, value in mine.items() if name != "params"})
        for parameter, copy in self._pairs:
            if self._versions.get(id(parameter)) != parameter._version:
                # A checkpoint, or the job itself, has changed the weights on the device.
                copy.copy_(parameter)
            copy.grad = self._find_gradient(parameter)
            if parameter in self.state:
                self._built.state[copy] = self.state[parameter]
            else:
                self._built.state.pop(copy, None)
        self._built.step()
        for parameter, copy in self._pairs:
            if copy.grad is None:
                continue
            parameter.copy_(copy, non_blocking=True)
            self._versions[id(parameter)] = parameter._version
            copy.grad = None
            if copy in self._built.state:
                self.state[parameter] = self._built.state[copy]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, which stays on the host."""
        self._built.load_state_dict(state_dict)
        for mine, own in zip(self.param_groups, self._built.param_groups, strict=True):
            mine.update({name: value for name, value in own.items() if name != "params"})
        self.state.clear()
        self.state.update(
            {
                parameter: self._built.state[copy]
                for parameter, copy in self._pairs
                if copy in self._built.state
            }
        )
