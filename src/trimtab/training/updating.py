"""The optimizer step: skipped by the device itself where it can be, tried again where it changed nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trimtab.training.recovery import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TRIES = 3


class Interrupted(Exception):  # noqa: N818 - it reads as a sentence in `raise`
    """The optimizer ran out of memory after it had changed something."""


class Updater:
    """Runs the optimizer, and knows whether a failed step has left a trace."""

    def __init__(self, optimizer: Any, *, clip: float | None, sharded: bool, cuda: bool) -> None:
        self.optimizer = optimizer
        self.clip = clip
        # A fused optimizer reads on the device whether to do anything. Sharded parameters do not mix with
        # plain tensors in one call.
        amp = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._called_off_on_device = amp and cuda and not sharded
        self.before: Callable[[], Any] | None = None
        """Called before every try: a drill may raise from it."""
        self._of: Any = None
        self._states = -1
        self._ready: frozenset[int] = frozenset()
        self._tensors: list[torch.Tensor] = []

    @property
    def on_device(self) -> bool:
        """Whether the device itself can call the step off, so that the host need not wait before it."""
        # The first step of SGD leaves its momentum as it found the memory where it is called off.
        begun = bool(self.optimizer.state) or isinstance(self.optimizer, torch.optim.Adam)
        return self._called_off_on_device and begun

    def launch(
        self, found_bad: torch.Tensor, divisor: torch.Tensor | None, release: Callable[[], None]
    ) -> None:
        """Start the step before the host knows whether it is wanted; `found_bad` decides on the device."""
        optimizer = self.optimizer
        optimizer.found_inf = found_bad
        optimizer.grad_scale = divisor
        try:
            self.step(release)
        finally:
            del optimizer.found_inf, optimizer.grad_scale

    def apply(
        self, gradients: list[torch.Tensor], norm: float, scale: float, release: Callable[[], None]
    ) -> None:
        """Clip and unscale, then step; the host knows that it is wanted."""
        factor = 1.0 / scale
        if self.clip is not None:
            factor *= min(1.0, self.clip / (norm + 1e-6))
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self.step(release)

    def step(self, release: Callable[[], None]) -> None:
        """The step, again after an out-of-memory that changed nothing; Interrupted after one that did."""
        watched = self._watched()
        versions = [one._version for one in watched]
        for attempt in range(_TRIES):
            try:
                if self.before is not None:
                    self.before()
                self.optimizer.step()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if versions != [one._version for one in watched]:
                    raise Interrupted(str(error)) from error
                if attempt == _TRIES - 1:
                    raise
            else:
                return
            self._forget_half_made()
            release()
            if attempt:
                self._plainly()

    def _watched(self) -> list[torch.Tensor]:
        """Parameters and states, whose versions count up with every change in place.

        States that a step makes are not among them: where it fails, they are thrown away.
        """
        state = self.optimizer.state
        if self._of is not state or self._states != len(state):
            self._of, self._states = state, len(state)
            self._ready = frozenset(id(parameter) for parameter in state)
            found = [one for group in self.optimizer.param_groups for one in group["params"]]
            found += [one for held in state.values() for one in _tensors(held)]
            self._tensors = [getattr(one, "_local_tensor", one) for one in found]
        return self._tensors

    def _forget_half_made(self) -> None:
        """A state without all of its tensors would be taken for a whole one."""
        state = self.optimizer.state
        for parameter in [one for one in state if id(one) not in self._ready]:
            del state[parameter]

    def _plainly(self) -> None:
        """One parameter after the other: without the copies that a step over all of them at once makes."""
        for group in self.optimizer.param_groups:
            if group.get("foreach") is not False and not group.get("fused"):
                group["foreach"] = False


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, dict):
        for one in state.values():
            if isinstance(one, torch.Tensor):
                yield one
