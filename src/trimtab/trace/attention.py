"""Which attention kernel the target would run, and the calls that give its shapes.

The rules are those of torch 2.11 to 2.13 on CUDA: cuDNN first on sm_90 and sm_100, then flash, then
memory-efficient, then plain arithmetic, each if its conditions hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

HALF = (torch.float16, torch.bfloat16)
FLASH_HEAD = 256
FOUR = 4
"""Fused kernels take batch x heads x length x head size."""


class Call(NamedTuple):
    """The arguments that the choice depends on."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool


def choose(call: Call, capability: tuple[int, int]) -> str:
    """cudnn, flash, efficient or math."""
    order = [(_cudnn_can, "cudnn"), (_flash_can, "flash"), (_efficient_can, "efficient")]
    if capability not in ((9, 0), (10, 0)):
        order = order[1:]
    return next((name for can, name in order if can(call, capability)), "math")


def _same_shape(call: Call) -> bool:
    tensors = (call.query, call.key, call.value)
    if any(one.dim() != FOUR or 0 in one.shape for one in tensors):
        return False
    return len({one.shape[0] for one in tensors}) == 1


def _last_dim_dense(call: Call) -> bool:
    return all(one.stride(-1) == 1 for one in (call.query, call.key, call.value))


def _heads_fit(call: Call, *, grouped: bool) -> bool:
    heads = {one.shape[1] for one in (call.query, call.key, call.value)}
    return len(heads) == 1 or (grouped and call.grouped and call.key.shape[1] == call.value.shape[1])


def _low_precision(call: Call, capability: tuple[int, int]) -> bool:
    return call.query.dtype == torch.float16 or (call.query.dtype == torch.bfloat16 and capability >= (8, 0))


def _cudnn_can(call: Call, capability: tuple[int, int]) -> bool:
    if not (_same_shape(call) and _last_dim_dense(call) and _low_precision(call, capability)):
        return False
    head, length = call.query.shape[-1], call.key.shape[-2]
    most = FLASH_HEAD if capability == (9, 0) else 128
    fits = head <= most and call.value.shape[-1] <= most and head % 8 == 0 and call.value.shape[-1] % 8 == 0
    return fits and length > 1 and _heads_fit(call, grouped=True) and not _mask_learns(call)


def _mask_learns(call: Call) -> bool:
    return call.mask is not None and call.mask.requires_grad


def _flash_can(call: Call, capability: tuple[int, int]) -> bool:
    if call.mask is not None or capability < (8, 0) or not _same_shape(call):
        return False
    head = call.query.shape[-1]
    if not (_last_dim_dense(call) and _low_precision(call, capability) and head <= FLASH_HEAD):
        return False
    if call.causal and call.query.shape[-2] != call.key.shape[-2]:
        return False
    small_chip = (8, 6) <= capability <= (8, 9) or capability[0] == 12  # noqa: PLR2004 - shared memory is smaller
    awkward = 192 < head <= 224 or (head > 224 and call.dropout > 0)  # noqa: PLR2004
    same_head = head == call.key.shape[-1] == call.value.shape[-1]
    return same_head and not (small_chip and awkward) and _heads_fit(call, grouped=True)


def _efficient_can(call: Call, capability: tuple[int, int]) -> bool:
    if not (_same_shape(call) and _last_dim_dense(call) and _heads_fit(call, grouped=False)):
        return False
    if _mask_learns(call):
        # Seen on an H200: a mask that takes a gradient goes to plain arithmetic.
        return False
    half = call.query.dtype in HALF
    if call.query.dtype == torch.float64 or (call.query.dtype == torch.bfloat16 and capability < (8, 0)):
        return False
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and half)
    align = (8 if half else 4) if tensor_cores else 1
    return call.query.shape[-1] % align == 0 and call.value.shape[-1] % align == 0


def attend(call: Call, capability: tuple[int, int], scale: float | None, *, needs_grad: bool) -> torch.Tensor:
    """Run the kernel that would be chosen, on fake tensors."""
    kernel = choose(call, capability)
    query, key, value, mask = call.query, call.key, call.value, _additive(call)
    aten = torch.ops.aten
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, needs_grad, call.dropout, call.causal, False, scale=scale
        )[0]
    if kernel == "flash":
        head = query.shape[-1]
        wide = [pad(one, (0, -head % 8)) if head % 8 else one for one in (query, key, value)]
        scale = head**-0.5 if scale is None else scale
        out = aten._scaled_dot_product_flash_attention(*wide, call.dropout, call.causal, False, scale=scale)[
            0
        ]
        return out[..., :head] if head % 8 else out
    if kernel == "efficient":
        bias = _aligned(mask, query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_grad, call.dropout, call.causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, mask, call.dropout, call.causal, None, scale=scale, enable_gqa=call.grouped
    )[0]


def _additive(call: Call) -> torch.Tensor | None:
    """A boolean mask as the numbers that are added to the scores."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    return torch.where(call.mask, 0.0, float("-inf")).to(call.query.dtype)


def _aligned(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask as the memory-efficient kernel wants it: rows padded to 16, expanded to every head."""
    if mask is None:
        return None
    length = mask.shape[-1]
    if length % 16 or (mask.dim() > 1 and mask.stride(-2) % 16):
        mask = pad(mask, (0, -length % 16))[..., :length]
    shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return mask.expand(shape)


def register(library: torch.library.Library, capability: tuple[int, int]) -> None:
    """Put the choice in place of torch's own, which only a CUDA build can make."""

    def attention(  # noqa: PLR0913, PLR0917 - torch's own signature
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        return attend(call, capability, scale, needs_grad=needs_grad)

    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
