"""Run the attention kernel that torch would choose on the target, on fake tensors.

`attention_rules` makes the choice. What torch does before and after each kernel (padding of head sizes, masks
as numbers, masks with aligned rows) follows aten/src/ATen/native/transformers/attention.cpp of torch 2.11 to
2.13.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._guards import TracingContext
from torch.nn.functional import pad

from trimtab.engine.precision import HALF
from trimtab.trace.attention_rules import (
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    AttentionTarget,
    Call,
    Choice,
    choose,
    cure,
    explain,
    first_failure,
    target_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MASK_ALIGNED = 8
"""Elements that the rows of a mask must be apart by a multiple of, for the memory-efficient kernel."""


def attend(call: Call, choice: Choice, scale: float | None) -> torch.Tensor:
    """Run the chosen kernel, on fake tensors."""
    query, key, value, mask = call.query, call.key, call.value, _additive(call)
    aten, kernel = torch.ops.aten, choice.kernel
    if kernel == CUDNN:
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.needs_grad, call.dropout, call.causal, False, scale=scale
        )[0]
    if kernel == FLASH:
        head = query.shape[-1]
        wide = [pad(one, (0, -head % 8)) if head % 8 else one for one in (query, key, value)]
        scale = head**-0.5 if scale is None else scale
        out = aten._scaled_dot_product_flash_attention(*wide, call.dropout, call.causal, False, scale=scale)[
            0
        ]
        return out[..., :head] if head % 8 else out
    if kernel == EFFICIENT:
        bias = _aligned(mask, query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, call.needs_grad, call.dropout, call.causal, scale=scale
        )[0]
    if TracingContext.try_get() is None and not any(tensor.is_nested for tensor in call.tensors):
        return _math(call, mask, scale)
    # What the compiler sees: torch's own decomposition, which adds masks out of place for fake tensors.
    return aten._scaled_dot_product_attention_math(
        query, key, value, mask, call.dropout, call.causal, None, scale=scale, enable_gqa=call.grouped
    )[0]


def _math(call: Call, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    """Plain attention as eager torch runs it on a GPU: in fp32, with the mask added in place.

    torch's own function takes another way for fake tensors: it adds the mask into new memory.
    """
    kept = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    precise = [tensor.float() if tensor.dtype in HALF and not kept else tensor for tensor in call.tensors]
    query, key, value = precise
    scale = call.query.shape[-1] ** -0.5 if scale is None else scale
    root = abs(scale) ** 0.5
    query = query * (-root if scale < 0 else root)
    if call.causal:
        if mask is not None:
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
        square = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _as_numbers(square, query.dtype)
    if call.grouped:
        key, value = (_repeated(one, query) for one in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    weights = torch.ops.aten._safe_softmax(scores, -1)
    # torch lets go of the scores here, and of everything else when it returns.
    del scores
    if call.dropout > 0:
        weights = torch.dropout(weights, call.dropout, train=True)
    out = torch.matmul(weights, value).to(call.query.dtype)
    # torch gives the weights back as well, in the dtype of the query; nobody takes them.
    weights.to(call.query.dtype)
    return out


def _repeated(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    times = query.shape[-3] // tensor.shape[-3]
    return tensor if times == 1 else tensor.repeat_interleave(times, -3)


def _additive(call: Call) -> torch.Tensor | None:
    """The mask as the numbers that are added to the scores."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    return _as_numbers(call.mask, call.query.dtype)


def _as_numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))


def _aligned(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask as the memory-efficient kernel wants it: rows padded to 8, then expanded to every head."""
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(stride % MASK_ALIGNED for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        # torch pads by 8 where the length is a multiple of 8 already and another stride is not.
        mask = pad(mask, (0, MASK_ALIGNED - length % MASK_ALIGNED))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _empty(call: Call) -> torch.Tensor:
    """The answer to inputs without elements: zeros that depend on all of them."""
    shape = (*call.query.shape[:-1], call.value.shape[-1])
    zeros = torch.zeros(shape, dtype=call.query.dtype, device=call.query.device)
    return zeros + (call.query.sum() + call.key.sum() + call.value.sum()) * 0


def lost_note(choice: Choice) -> str:
    """What a user should know of a choice; empty where a fused kernel runs."""
    if choice.kernel != MATH or not choice.lost:
        return ""
    what = "attention is not fused: it is slower and keeps a score for every pair of tokens"
    return f"{what}. {explain(choice.lost)}. Fix: {cure(choice.lost)}"


def register(
    library: torch.library.Library, capability: tuple[int, int], note: Callable[[str], None]
) -> None:
    """Put the choice in place of torch's own, which only a CUDA build can make.

    `note` is given a sentence for every call: why no fused kernel can run, or nothing.
    """
    target = target_of(capability)

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
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if target.torch >= (2, 12) and any(tensor.numel() == 0 for tensor in call.tensors):
            return _empty(call)
        choice = choose(call, target)
        if not choice.kernel:
            raise RuntimeError(f"No available kernel. {explain(choice.lost)}")
        note(lost_note(choice))
        return attend(call, choice, scale)

    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    _answer_questions(target)


def _answer_questions(target: AttentionTarget) -> None:
    """`torch.backends.cuda.can_use_*` as on the target: nested tensors of layout jagged ask it."""
    import torch.backends.cuda as questions
    import torch.nested._internal.sdpa as jagged

    def asked(kernel: str) -> Callable[..., bool]:
        def can_use(params: Any, debug: bool = False) -> bool:
            del debug
            call = Call(
                params.query,
                params.key,
                params.value,
                params.attn_mask,
                params.dropout,
                params.is_causal,
                params.enable_gqa,
            )
            return first_failure(kernel, call, target) is None

        return can_use

    names = {"flash": FLASH, "efficient": EFFICIENT, "cudnn": CUDNN}
    for name, kernel in names.items():
        for place in (questions, jagged):
            setattr(place, f"can_use_{name}_attention", asked(kernel))
