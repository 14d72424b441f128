"""The memory and the kernels of optimizers with states in few bits, for tensors without values.

bitsandbytes and torchao have the real ones, which `engine/optimizer.py` makes for a training run. Tracing
needs only the sizes of their states and the bytes that an update moves, so an estimate needs neither package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.spec import OptimizerRule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trimtab.spec.optimizer_rule import OptimizerStates

UPDATE, UPDATE_COMPILED = "update_low_bit", "update_compiled"
"""Updates of one tensor: by a kernel of bitsandbytes, or by one that torch.compile made."""
UPDATE_ARGUMENTS = "(Tensor(a!) parameter, Tensor gradient, Tensor(b!)[] states, int searched_bits=0) -> ()"
"""`searched_bits` is the number of bits of a weight's states that are found in a table."""
WAIT = "wait_for_device(Tensor parameter) -> ()"
LIBRARY = torch.library.Library("trimtab", "FRAGMENT")
for update in (UPDATE, UPDATE_COMPILED):
    LIBRARY.define(update + UPDATE_ARGUMENTS)
LIBRARY.define(WAIT)
for operation in (UPDATE, UPDATE_COMPILED, "wait_for_device"):
    LIBRARY.impl(operation, lambda *_: None, "Meta")

LEVELS = {8: 256, 4: 16}
"""Values in the table of a format, by bits."""


class LowBitOptimizer(torch.optim.Optimizer):
    """An optimizer that allocates the states of a row and updates each tensor with one kernel."""

    def __init__(self, params: Iterable[Any], stored: OptimizerStates, **options: Any) -> None:
        super().__init__(params, {"lr": 1e-3, **options})
        self.stored = stored
        self._tables: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make the states that are missing, and update every tensor that has a gradient."""
        del closure
        update = getattr(torch.ops.trimtab, UPDATE_COMPILED if self.stored.compiled else UPDATE)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter not in self.state:
                    self.state[parameter] = self._make_states(parameter)
                states = list(self.state[parameter].values())
                update(parameter, parameter.grad, states, self._count_searched_bits(parameter))
                if self.stored.waits:
                    torch.ops.trimtab.wait_for_device(parameter)

    def _has_few_bits(self, parameter: torch.Tensor) -> bool:
        """Whether the states of a tensor are stored in few bits: not if it is small or has a rest."""
        stored, count = self.stored, parameter.numel()
        is_whole = not stored.whole_blocks or count % stored.block == 0
        return stored.bits <= 8 and count >= stored.least and is_whole  # noqa: PLR2004 - a byte

    def _count_searched_bits(self, parameter: torch.Tensor) -> int:
        """Return the bits of a weight's states that an update finds in a table, also if they are paged."""
        stored = self.stored
        return stored.states * stored.bits if stored.has_table and self._has_few_bits(parameter) else 0

    def _make_states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        stored, count = self.stored, parameter.numel()
        names = [f"state{number}" for number in range(stored.states)]
        if not self._has_few_bits(parameter):
            # bitsandbytes keeps small states in float32, torchao in the dtype of the weights.
            dtype = parameter.dtype if stored.whole_blocks else torch.float32
            if stored.paged_from and count >= stored.paged_from:
                return {}
            return {name: torch.zeros_like(parameter, dtype=dtype) for name in names}
        if not self._tables and not stored.whole_blocks:
            self._tables = [parameter.new_empty(LEVELS[8], dtype=torch.float32) for _ in names]
        states = {}
        for name in names:
            if not stored.paged_from or count < stored.paged_from:
                states[name] = parameter.new_zeros(count * stored.bits // 8, dtype=torch.uint8)
            if stored.whole_blocks:
                # Each state of torchao has its own table of values.
                states[f"{name}_scale"] = parameter.new_zeros(count // stored.block, dtype=torch.float32)
                if stored.has_table:
                    states[f"{name}_table"] = parameter.new_empty(LEVELS[stored.bits], dtype=torch.float32)
        if not stored.whole_blocks:
            for name in names:
                blocks = -(-count // stored.block)
                states[f"{name}_scale"] = parameter.new_zeros(blocks, dtype=torch.float32)
        return states


TORCHAO_RULES = {
    "8bit": OptimizerRule.ADAMW_8BIT_AO,
    "4bit": OptimizerRule.ADAMW_4BIT,
    "Fp8": OptimizerRule.ADAMW_FP8,
}
"""Rows of torchao's optimizers by the end of their class names; Adam's states are those of AdamW."""


def find_states(optimizer: Any) -> OptimizerStates | None:
    """Return how an optimizer of bitsandbytes or torchao stores its states; None for any other."""
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    if package == "torchao":
        rules = [rule for end, rule in TORCHAO_RULES.items() if kind.__name__.endswith(end)]
        return rules[0].stored if rules else None
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    if package != "bitsandbytes" or not isinstance(bits, int):
        return None
    paged = optimizer.is_paged
    rule = OptimizerRule.PAGED_ADAMW_8BIT if paged else OptimizerRule.ADAMW_8BIT
    has_one = any(parent.__name__ == "Optimizer1State" for parent in kind.__mro__)
    return rule.stored.replace(bits=bits, states=1 if has_one else 2, least=optimizer.args.min_8bit_size)


def imitate_optimizer(optimizer: Any) -> Any:
    """Return an optimizer with the memory and kernels of a job's own, if its tensors have no values.

    The real ones call kernels that need a GPU. Other optimizers are returned as they are.
    """
    stored = find_states(optimizer)
    if stored is None or not isinstance(optimizer.param_groups[0]["params"][0], FakeTensor):
        return optimizer
    return LowBitOptimizer(optimizer.param_groups, stored)
