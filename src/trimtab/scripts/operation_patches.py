"""Run operations that torch cannot run on tensors without memory: as something else with the same cost."""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trimtab.scripts.moved_parameters import LAZY_DEVICE
from trimtab.scripts.observer import put
from trimtab.scripts.recorder import make_real
from trimtab.trace.flash_attn_package import stand_in_for_flash_attn
from trimtab.trace.flex_attention import patch_flex_attention
from trimtab.trace.hub_kernels import stand_in_for_hub_kernels


def patch_operations() -> None:
    """Patch everything of this module."""
    _patch_tensor_of_scalars()
    _patch_ctc_loss()
    patch_flex_attention()
    stand_in_for_flash_attn()
    stand_in_for_hub_kernels()
    _patch_lazy_parameters()


def _patch_tensor_of_scalars() -> None:
    """Let `torch.tensor` take a list of numbers on the GPU, as in torch.tensor(losses)."""
    original = torch.tensor

    @functools.wraps(original)
    def tensor(data: Any, *args: Any, **kwargs: Any) -> Any:
        # Lists of tokens are long: Python's own functions look through them.
        if isinstance(data, list | tuple) and FakeTensor in set(map(type, data)):
            data = [
                make_real(value, None).tolist() if isinstance(value, FakeTensor) else value for value in data
            ]
        return original(data, *args, **kwargs)

    put(torch, "tensor", tensor)


def _patch_ctc_loss() -> None:
    """Give CTC loss its lengths as numbers: torch allows them and the targets to be on the CPU."""
    original = torch.ctc_loss

    @functools.wraps(original)
    def ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any) -> Any:
        lengths = (_read_numbers(input_lengths), _read_numbers(target_lengths))
        return original(log_probs, targets.to(log_probs.device), *lengths, *rest)

    put(torch, "ctc_loss", ctc_loss)


def _read_numbers(values: Any) -> Any:
    if isinstance(values, FakeTensor):
        return make_real(values, None).tolist()
    return values.tolist() if isinstance(values, torch.Tensor) else values


def _patch_lazy_parameters() -> None:
    """Give lazy modules parameters without memory when they learn their shapes."""
    mixin: Any = torch.nn.UninitializedParameter.__mro__[1]

    def materialize(parameter: Any, shape: Any, device: Any = None, dtype: torch.dtype | None = None) -> None:
        device = device or getattr(parameter, LAZY_DEVICE, None) or parameter.data.device
        data = torch.empty(shape, device=device, dtype=dtype or parameter.data.dtype)
        is_parameter = isinstance(parameter, torch.nn.Parameter)
        made = torch.nn.Parameter(data, parameter.requires_grad) if is_parameter else data
        # The parameter cannot become one without memory, so that the module gets another.
        for owner in gc.get_referrers(parameter):
            if isinstance(owner, dict):
                for name in [name for name, value in owner.items() if value is parameter]:
                    owner[name] = made

    put(mixin, "materialize", materialize)
