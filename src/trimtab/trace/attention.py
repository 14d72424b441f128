"""Run the attention kernel that torch would choose on the target, on fake tensors.

`attention_rules` chooses the kernel. The steps around each kernel (padded head sizes, additive masks, aligned
mask rows) follow aten/src/ATen/native/transformers/attention.cpp of torch 2.11 to 2.13.
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
    AttentionCall,
    AttentionTarget,
    KernelChoice,
    choose_kernel,
    explain_refusals,
    find_refusal,
    make_target,
    suggest_fix,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MASK_ALIGNMENT = 8
"""The memory-efficient kernel needs mask strides that are multiples of this many elements."""


def run_attention_kernel(call: AttentionCall, choice: KernelChoice, scale: float | None) -> torch.Tensor:
    """Run the chosen kernel on fake tensors and return its output."""
    query, key, value, mask = call.query, call.key, call.value, _additive_mask(call)
    aten, kernel = torch.ops.aten, choice.kernel
    if kernel == CUDNN:
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.needs_grad, call.dropout, call.causal, False, scale=scale
        )[0]
    if kernel == FLASH:
        head = query.shape[-1]
        padded = [pad(tensor, (0, -head % 8)) if head % 8 else tensor for tensor in call.tensors]
        scale = head**-0.5 if scale is None else scale
        out = aten._scaled_dot_product_flash_attention(
            *padded, call.dropout, call.causal, False, scale=scale
        )[0]
        return out[..., :head] if head % 8 else out
    if kernel == EFFICIENT:
        bias = _align_mask(mask, query, key)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, call.needs_grad, call.dropout, call.causal, scale=scale
        )[0]
    if TracingContext.try_get() is None and not any(tensor.is_nested for tensor in call.tensors):
        return _run_math_attention(call, mask, scale)
    # The compiler sees torch's own decomposition, which adds masks out of place for fake tensors.
    return aten._scaled_dot_product_attention_math(
        query, key, value, mask, call.dropout, call.causal, None, scale=scale, enable_gqa=call.grouped
    )[0]


def _run_math_attention(call: AttentionCall, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    """Run plain attention as eager torch does on a GPU: in fp32, with the mask added in place.

    torch's own function behaves differently for fake tensors: it adds the mask into new memory.
    """
    keep_half = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    query, key, value = (
        tensor.float() if tensor.dtype in HALF and not keep_half else tensor for tensor in call.tensors
    )
    scale = call.query.shape[-1] ** -0.5 if scale is None else scale
    root = abs(scale) ** 0.5
    query = query * (-root if scale < 0 else root)
    if call.causal:
        if mask is not None:
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
        lower = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _to_additive(lower, query.dtype)
    if call.grouped:
        key, value = (_repeat_heads(tensor, query) for tensor in (key, value))
    scores = torch.matmul(query, key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    weights = torch.ops.aten._safe_softmax(scores, -1)
    # torch frees the scores here, and everything else when it returns.
    del scores
    if call.dropout > 0:
        weights = torch.dropout(weights, call.dropout, train=True)
    out = torch.matmul(weights, value).to(call.query.dtype)
    # torch also returns the weights in the dtype of the query; they are not used.
    weights.to(call.query.dtype)
    return out


def _repeat_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    times = query.shape[-3] // tensor.shape[-3]
    return tensor if times == 1 else tensor.repeat_interleave(times, -3)


def _additive_mask(call: AttentionCall) -> torch.Tensor | None:
    """Return the mask as numbers to add to the scores, or None if there is no mask."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    return _to_additive(call.mask, call.query.dtype)


def _to_additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device))


def _align_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Return the mask for the memory-efficient kernel: rows padded to 8, expanded to every head."""
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(stride % MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        # If the length is already a multiple of 8 but another stride is not, torch pads by 8.
        mask = pad(mask, (0, MASK_ALIGNMENT - length % MASK_ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _make_empty_result(call: AttentionCall) -> torch.Tensor:
    """Return the result for inputs without elements: zeros that depend on all inputs."""
    shape = (*call.query.shape[:-1], call.value.shape[-1])
    zeros = torch.zeros(shape, dtype=call.query.dtype, device=call.query.device)
    return zeros + (call.query.sum() + call.key.sum() + call.value.sum()) * 0


def describe_unfused(choice: KernelChoice) -> str:
    """Return a note for the user if attention is not fused, else an empty string."""
    if choice.kernel != MATH or not choice.refusals:
        return ""
    effect = "attention is not fused: it is slower and keeps a score for every pair of tokens"
    return f"{effect}. {explain_refusals(choice.refusals)}. Fix: {suggest_fix(choice.refusals)}"


def register_attention(
    library: torch.library.Library, capability: tuple[int, int], note: Callable[[str], None]
) -> None:
    """Replace torch's own kernel choice, which only a CUDA build can make.

    `note` is called once per attention call, with the reason why it is not fused or an empty string.
    """
    target = make_target(capability)

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
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if target.torch >= (2, 12) and any(tensor.numel() == 0 for tensor in call.tensors):
            return _make_empty_result(call)
        choice = choose_kernel(call, target)
        if not choice.kernel:
            raise RuntimeError(f"No available kernel. {explain_refusals(choice.refusals)}")
        note(describe_unfused(choice))
        return run_attention_kernel(call, choice, scale)

    library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
    _patch_can_use(target)


def _patch_can_use(target: AttentionTarget) -> None:
    """Make `torch.backends.cuda.can_use_*` answer as on the target; jagged nested tensors call it."""
    import torch.backends.cuda as cuda_backend
    import torch.nested._internal.sdpa as jagged

    def make_check(kernel: str) -> Callable[..., bool]:
        def can_use(params: Any, debug: bool = False) -> bool:
            del debug
            call = AttentionCall(
                params.query,
                params.key,
                params.value,
                params.attn_mask,
                params.dropout,
                params.is_causal,
                params.enable_gqa,
            )
            return find_refusal(kernel, call, target) is None

        return can_use

    names = {"flash": FLASH, "efficient": EFFICIENT, "cudnn": CUDNN}
    for name, kernel in names.items():
        for module in (cuda_backend, jagged):
            setattr(module, f"can_use_{name}_attention", make_check(kernel))
