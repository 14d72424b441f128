"""AdamW with both states in bfloat16, whatever the dtype of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


MOMENTS = ("exp_avg", "exp_avg_sq")


class Bf16AdamW(torch.optim.Optimizer):
    """AdamW whose moments are rounded to bfloat16 after each update, which computes in float32.

    A second moment shrinks by less than its rounding if beta2 is above 0.996: it can then only grow.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, one at a time: temporary memory is that of one."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states; torch casts them to the dtype of the weights, and here they become bfloat16 again."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in MOMENTS:
                if name in state:
                    state[name] = state[name].to(torch.bfloat16)

    def _update(self, parameter: Any, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        gradient = parameter.grad.float()
        mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        state["exp_avg"].copy_(mean)
        square = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        state["exp_avg_sq"].copy_(square)
        divisor = square.div_(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, divisor, value=-group["lr"] / (1 - beta1 ** state["step"]))
