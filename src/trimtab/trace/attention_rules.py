"""torch's conditions for each kernel of scaled_dot_product_attention on CUDA, as a table.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h. Each condition has the name
of torch's function, so that you can compare the two lists; `since` is the first release that has it. Checked
against torch 2.11 and 2.13. Later releases are treated as torch's main branch of autumn 2026, earlier ones as
2.11. Not covered: ROCm, and flash attention 3, which is opt-in.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NamedTuple

import torch

from trimtab.engine.precision import HALF, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

NEWEST_GPU = (12, 1)
ATTENTION_DIMS = 4
"""Fused kernels take batch x heads x length x head size."""
CUDNN, FLASH, EFFICIENT, MATH = "cudnn", "flash", "efficient", "math"
KERNEL_NAMES = {CUDNN: "cuDNN", FLASH: "flash", EFFICIENT: "memory-efficient", MATH: "math"}
BACKEND_NUMBERS = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}
"""torch's numbers of its backends (torch.nn.attention.SDPBackend)."""
BUILT_IN_ORDER = (FLASH, EFFICIENT, MATH, CUDNN)
DENSE, NESTED, JAGGED = "dense", "nested", "jagged"


class AttentionCall(NamedTuple):
    """Arguments of an attention call that the kernel choice depends on."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    """enable_gqa: fewer heads of keys and values than of queries."""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass follows. As in torch, the mask is ignored."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    @property
    def form(self) -> str:
        """Layout of the inputs: "dense", "nested" (strided nested tensors) or "jagged" (the newer kind)."""
        nested = [tensor for tensor in self.tensors if tensor.is_nested]
        if not nested:
            return DENSE
        return NESTED if any(tensor.layout == torch.strided for tensor in nested) else JAGGED


class AttentionTarget(NamedTuple):
    """Compute capability of the GPU, and the versions of torch and cuDNN on it."""

    capability: tuple[int, int]
    torch: tuple[int, int]
    cudnn: int
    """As in torch.backends.cudnn.version(): 91900 is 9.19.0."""


class KernelCondition(NamedTuple):
    """One of torch's checks for a fused kernel."""

    check: str
    """The name of torch's function, and after a colon which part of it."""
    holds: Callable[[AttentionCall, AttentionTarget], bool]
    cause: Callable[[AttentionCall], str]
    """Completes the sentence "KERNEL ..."."""
    fix: str | Callable[[AttentionCall], str]
    form: str = ""
    """Layout of inputs that it applies to; empty: all."""
    since: tuple[int, int] = (0, 0)


class KernelRefusal(NamedTuple):
    """Fused kernel that cannot run a call, and its first condition that fails."""

    kernel: str
    check: str
    cause: str
    fix: str


class KernelChoice(NamedTuple):
    """Kernel that torch would run, and the reasons why kernels before it cannot run."""

    kernel: str
    """Empty if the user has switched off every kernel that could run."""
    refusals: tuple[KernelRefusal, ...]


def make_target(capability: tuple[int, int]) -> AttentionTarget:
    """Return the target with the installed torch and cuDNN; without cuDNN, that of torch's CUDA wheels."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    installed = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return AttentionTarget(capability, (major, minor), installed or _wheel_cudnn((major, minor)))


def _wheel_cudnn(release: tuple[int, int]) -> int:
    """Return the cuDNN of torch's wheels: 9.19 since 2.11 (seen on an H200), 9.15.1 in 2.10, else 9.10.2.

    Wheels for CUDA 12 still have 9.10.2, for which torch tries the kernels in another order.
    """
    cuda = (torch.version.cuda or "13").split(".")[0]
    if int(cuda) < 13 or release < (2, 10):  # noqa: PLR2004 - versions
        return 91002
    return 91900 if release >= (2, 11) else 91501


# -------------------------------------------------------------------------------- texts of causes


def _list_strided_inputs(call: AttentionCall) -> str:
    names = ("query", "key", "value")
    strided = [name for name, tensor in zip(names, call.tensors, strict=True) if tensor.stride(-1) != 1]
    return " and ".join(strided)


def _describe_strides(call: AttentionCall) -> str:
    if not _has_dense_inputs(call):
        return f"needs the last dimension of {_list_strided_inputs(call)} contiguous"
    last = call.mask.stride(-1) if call.mask is not None else 1
    kind = "expanded" if last == 0 else "transposed"
    return f"refuses a mask whose last dimension has stride {last} ({kind})"


def _suggest_stride_fix(call: AttentionCall) -> str:
    if not _has_dense_inputs(call):
        return f"Call .contiguous() on {_list_strided_inputs(call)} before the call."
    expanded = call.mask is not None and call.mask.stride(-1) == 0
    return FIX_EXPANDED_MASK if expanded else "Call .contiguous() on the mask before the call."


def _fixed_cause(text: str) -> Callable[[AttentionCall], str]:
    return lambda _: text


def _head_size_cause(text: str) -> Callable[[AttentionCall], str]:
    return lambda call: f"{text}; it is {_format_head_sizes(call)}"


def _format_head_sizes(call: AttentionCall) -> str:
    sizes = list(dict.fromkeys(int(tensor.shape[-1]) for tensor in call.tensors))
    return " and ".join(map(str, sizes))


def _describe_dtypes(call: AttentionCall) -> str:
    dtypes = list(dict.fromkeys(dtype_name(tensor.dtype) for tensor in call.tensors))
    return f"does not compute in {' and '.join(dtypes)}"


# -------------------------------------------------------------------------------- conditions


def _has_dense_inputs(call: AttentionCall) -> bool:
    return all(tensor.stride(-1) == 1 for tensor in call.tensors)


def _has_last_stride_1(call: AttentionCall, *, ignore_single: bool) -> bool:
    inputs = _has_dense_inputs(call) or (ignore_single and call.query.shape[-1] == 1)
    return inputs and (call.mask is None or call.mask.stride(-1) == 1)


def _has_four_dimensions(call: AttentionCall, _: AttentionTarget) -> bool:
    return all(tensor.dim() == ATTENTION_DIMS for tensor in call.tensors)


def _is_on_cuda(call: AttentionCall, _: AttentionTarget) -> bool:
    return call.query.device.type == "cuda"


def _has_nonzero_lengths(call: AttentionCall, _: AttentionTarget) -> bool:
    return call.query.shape[-2] != 0 and call.key.shape[-2] != 0


def _has_same_dtype(call: AttentionCall, allowed: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype and call.query.dtype in allowed


def _is_low_precision(call: AttentionCall, target: AttentionTarget) -> bool:
    return _has_same_dtype(call, HALF if target.capability[0] >= 8 else HALF[:1])  # noqa: PLR2004


def _has_efficient_dtype(call: AttentionCall, target: AttentionTarget) -> bool:
    older = (torch.float16, torch.float32)
    return _has_same_dtype(call, (*older, torch.bfloat16) if target.capability[0] >= 8 else older)  # noqa: PLR2004


def _is_gpu_at_least(lowest: tuple[int, int]) -> Callable[[AttentionCall, AttentionTarget], bool]:
    return lambda _, target: lowest <= target.capability <= NEWEST_GPU


def _has_same_batch(call: AttentionCall, _: AttentionTarget) -> bool:
    return call.query.shape[0] == call.key.shape[0] == call.value.shape[0]


def _head_counts(call: AttentionCall) -> tuple[int, int, int]:
    query, key, value = (tensor.shape[-3] for tensor in call.tensors)
    return query, key, value


def _has_matching_heads(
    call: AttentionCall, target: AttentionTarget, *, groups: bool, same_keys: bool = True
) -> bool:
    """Whether the numbers of heads suit a kernel.

    `groups`: the kernel supports enable_gqa. `same_keys`: it then needs as many heads of keys as of values.
    """
    query, key, value = _head_counts(call)
    if query == key == value:
        return True
    if target.torch >= (2, 14) and key == value == 1:
        return True
    if not (call.grouped and groups) or (same_keys and key != value):
        return False
    return bool(query % key == 0 and query % value == 0)


def _has_flash_head_size(call: AttentionCall, _: AttentionTarget) -> bool:
    query, key, value = (tensor.shape[-1] for tensor in call.tensors)
    return bool(query == key == value and query <= 256)  # noqa: PLR2004


def _has_flash_nested_head_size(call: AttentionCall, target: AttentionTarget) -> bool:
    return _has_flash_head_size(call, target) and call.query.shape[-1] % 8 == 0


def _fits_small_shared_memory(call: AttentionCall, target: AttentionTarget) -> bool:
    """Whether the backward pass fits in shared memory: sm86-89 and sm120 have too little for large heads."""
    small = (8, 6) <= target.capability <= (8, 9) or (12, 0) <= target.capability <= NEWEST_GPU
    size = call.query.shape[-1]
    too_large = 192 < size <= 224 or (size > 224 and call.dropout > 0)  # noqa: PLR2004
    return not (call.needs_grad and small and too_large)


def _is_square_if_causal(call: AttentionCall, _: AttentionTarget) -> bool:
    return not call.causal or call.form != DENSE or call.query.shape[-2] == call.key.shape[-2]


def head_size_step(call: AttentionCall, target: AttentionTarget) -> int:
    """Return the number that head sizes must be multiples of for the memory-efficient kernel."""
    half = call.query.dtype in HALF
    major = target.capability[0]
    tensor_cores = major >= 8 or (major == 7 and half)  # noqa: PLR2004
    return max(4 if major >= 8 else 1, (8 if half else 4) if tensor_cores else 1)  # noqa: PLR2004


def _has_efficient_head_size(call: AttentionCall, target: AttentionTarget) -> bool:
    query, key, value = (tensor.shape[-1] for tensor in call.tensors)
    step = head_size_step(call, target)
    return bool(query == key and query % step == 0 and query > 0 and value % step == 0 and value > 0)


def _has_aligned_pointers(call: AttentionCall, target: AttentionTarget) -> bool:
    """Whether inputs begin at multiples of 16 bytes. Blocks of the allocator do (512); views may not."""
    if target.capability[0] < 8:  # noqa: PLR2004
        return True
    step = head_size_step(call, target)
    return all(tensor.numel() == 0 or tensor.storage_offset() % step == 0 for tensor in call.tensors)


def _is_mask_constant(call: AttentionCall, _: AttentionTarget) -> bool:
    return call.mask is None or not call.mask.requires_grad


def _has_mask_shape(call: AttentionCall, _: AttentionTarget) -> bool:
    mask = call.mask
    if mask is None:
        return True
    if mask.dim() not in (2, ATTENTION_DIMS):
        return False
    scores = (call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2])
    pairs = zip(reversed(mask.shape), reversed(scores), strict=False)
    return all(size in (1, full_size) for size, full_size in pairs)


def _cudnn_head_limit(call: AttentionCall, target: AttentionTarget) -> int:
    """Return the largest head size of cuDNN's kernels for this GPU and release."""
    datacenter = target.capability == (9, 0) or target.capability[0] == 10  # noqa: PLR2004
    sizes = (call.query.shape[-1], call.value.shape[-1])
    if target.torch >= (2, 14):
        if datacenter and target.cudnn > 92200:  # noqa: PLR2004
            return 256
        return 192 if datacenter and target.cudnn >= 91100 and sizes == (192, 128) else 128  # noqa: PLR2004
    if target.capability == (9, 0) and target.cudnn >= 91000:  # noqa: PLR2004
        return 256
    if target.capability[0] == 10 and target.cudnn >= 91100 and sizes == (192, 128):  # noqa: PLR2004
        return 192
    return 128


def _has_cudnn_head_size(call: AttentionCall, target: AttentionTarget) -> bool:
    most = _cudnn_head_limit(call, target)
    return bool(call.query.shape[-1] <= most and call.value.shape[-1] <= most)


def _has_cudnn_head_step(call: AttentionCall, _: AttentionTarget) -> bool:
    return bool(call.query.shape[-1] % 8 == 0 and call.value.shape[-1] % 8 == 0)


def _has_cudnn_backward(call: AttentionCall, target: AttentionTarget) -> bool:
    sizes = (call.query.shape[-1], call.value.shape[-1])
    if not call.needs_grad or _cudnn_head_limit(call, target) < 256:  # noqa: PLR2004
        return True
    return max(sizes) <= 128 or sizes in ((192, 128), (256, 256))  # noqa: PLR2004


def _has_cudnn_counts(call: AttentionCall, _: AttentionTarget) -> bool:
    most = 65535
    return bool(call.query.shape[0] <= most and call.query.shape[1] <= most)


def _has_cudnn_lengths(call: AttentionCall, _: AttentionTarget) -> bool:
    return bool(call.key.shape[2] != 1 and not (call.dropout and call.query.shape[2] == 1))


def _may_be_nondeterministic(_: AttentionCall, __: AttentionTarget) -> bool:
    strict = not torch.is_deterministic_algorithms_warn_only_enabled()
    return not (torch.are_deterministic_algorithms_enabled() and strict)


def _has_nested_batches(call: AttentionCall, _: AttentionTarget) -> bool:
    sizes = [tensor.size(0) for tensor in call.tensors]
    if len(set(sizes)) == 1:
        return True
    return not call.needs_grad and all(size in (1, max(sizes)) for size in sizes)


def _has_nested_lengths(call: AttentionCall, _: AttentionTarget) -> bool:
    """Whether no sample is empty and all samples have the same number of heads."""
    for tensor in call.tensors:
        if tensor.is_nested:
            sizes = tensor._nested_tensor_size()
            if bool((sizes[:, 1] == 0).any()) or len(set(sizes[:, 0].tolist())) > 1:
                return False
    return True


def _can_cudnn_use_nested(call: AttentionCall, target: AttentionTarget) -> bool:
    allowed = os.environ.get("TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED") == "1"
    return call.form != NESTED or (allowed and target.capability[0] in (9, 10))


def _is_enabled(name: str) -> Callable[[AttentionCall, AttentionTarget], bool]:
    return lambda _, __: bool(getattr(torch.backends.cuda, name)())


FIX_ENABLE = "Switch it on again: it was disabled by sdpa_kernel() or torch.backends.cuda.enable_*_sdp()."
FIX_NEWER_GPU = "Use a GPU with compute capability 8.0 (Ampere) or newer."
FIX_EXPANDED_MASK = (
    "Call .contiguous() on the mask. A Hugging Face model that is compiled builds such a mask where it is "
    "given none: pass it an attention_mask (all ones will do), or do not compile it."
)
FIX_PRECISION = "Train in bf16 or fp16 (--precision bf16)."
FIX_DIMENSIONS = "Give query, key and value as batch x heads x length x head size."
FIX_HEADS = "Repeat keys and values to the heads of the query, or pass enable_gqa=True and no mask."
FIX_BATCH = "Expand query, key and value to one batch size before the call."
FIX_EMPTY = "Leave out sequences of length 0."
FIX_LEARNED_MASK = (
    "Compute the mask without a gradient, or take the memory-efficient kernel (contiguous mask)."
)
FIX_HEAD_SIZE = "Choose a head size that is a multiple of 8."


def _common_conditions(switch: str) -> tuple[KernelCondition, ...]:
    return (
        KernelCondition(switch, _is_enabled(_SWITCHES[switch]), _fixed_cause("is switched off"), FIX_ENABLE),
        KernelCondition(
            "check_all_tensors_on_device",
            _is_on_cuda,
            _fixed_cause("needs GPU tensors"),
            "Move them to the GPU.",
        ),
        KernelCondition(
            "check_tensor_shapes", _has_four_dimensions, _fixed_cause("needs 4 dimensions"), FIX_DIMENSIONS
        ),
    )  # fmt: skip


_SWITCHES = {
    "check_runtime_disabled_cudnn": "cudnn_sdp_enabled",
    "check_runtime_disabled_flash": "flash_sdp_enabled",
    "check_runtime_disabled_mem_efficient": "mem_efficient_sdp_enabled",
}
_BATCH = KernelCondition(
    "check_batch_size_and_num_heads_dense: batch",
    _has_same_batch,
    _fixed_cause("needs the same batch size of query, key and value"),
    FIX_BATCH,
    DENSE,
)
_NOT_EMPTY = KernelCondition(
    "check_nonzero_sequence_lengths_dense",
    _has_nonzero_lengths,
    _fixed_cause("takes no empty sequence"),
    FIX_EMPTY,
    DENSE,
)


def _stride_condition(*, ignore_single: bool) -> KernelCondition:
    return KernelCondition(
        "check_last_dim_stride_equals_1_dense",
        lambda call, _: _has_last_stride_1(call, ignore_single=ignore_single),
        _describe_strides,
        _suggest_stride_fix,
        DENSE,
    )


def _heads_condition(
    holds: Callable[[AttentionCall, AttentionTarget], bool],
    cause: str = "needs as many heads of keys and values as of queries",
) -> KernelCondition:
    return KernelCondition(
        "check_batch_size_and_num_heads_dense: heads", holds, _fixed_cause(cause), FIX_HEADS, DENSE
    )  # fmt: skip


CONDITIONS: dict[str, tuple[KernelCondition, ...]] = {
    CUDNN: (
        KernelCondition(
            "can_use_cudnn_attention: version",
            lambda call, target: not (call.dropout > 0 and 91100 < target.cudnn < 91400),  # noqa: PLR2004
            _fixed_cause("takes no dropout in versions 9.11 to 9.13"),
            "Install a newer cuDNN.",
        ),
        *_common_conditions("check_runtime_disabled_cudnn"),
        KernelCondition(
            "check_for_nested_inputs",
            _can_cudnn_use_nested,
            _fixed_cause("takes no nested tensors"),
            "Set TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED=1 on Hopper and datacenter Blackwell.",
        ),
        KernelCondition(
            "check_cudnn_deterministic",
            _may_be_nondeterministic,
            _fixed_cause("is not deterministic"),
            "Call torch.use_deterministic_algorithms(True, warn_only=True), or leave it out.",
        ),
        KernelCondition("check_dtypes_low_precision", _is_low_precision, _describe_dtypes, FIX_PRECISION),
        KernelCondition(
            "check_attn_mask_shape: gradient",
            _is_mask_constant,
            _fixed_cause("takes no mask with a gradient"),
            FIX_LEARNED_MASK,
        ),
        KernelCondition(
            "check_attn_mask_shape",
            _has_mask_shape,
            _fixed_cause("needs a mask of 2 or 4 dimensions that fit, or are 1"),
            "Give the mask as (length, keys) or (batch or 1, heads or 1, length or 1, keys or 1).",
        ),
        KernelCondition(
            "check_cudnn_hardware_support",
            _is_gpu_at_least((8, 0)),
            _fixed_cause("needs compute capability 8.0 to 12.1"),
            FIX_NEWER_GPU,
        ),
        KernelCondition(
            "check_cudnn_dropout",
            lambda call, _: call.dropout * 16 == math.floor(call.dropout * 16),
            _fixed_cause("takes a dropout in steps of 1/16 only"),
            "Use a dropout of 0, 0.0625, 0.125, ... for the attention.",
            since=(2, 12),
        ),
        _NOT_EMPTY,
        _stride_condition(ignore_single=True),
        _BATCH,
        _heads_condition(
            lambda call, target: _has_matching_heads(call, target, groups=True, same_keys=False)
        ),
        KernelCondition(
            "check_cudnn_tensor_shapes: counts",
            _has_cudnn_counts,
            _fixed_cause("takes at most 65535 samples and heads"),
            "Use a smaller micro-batch, or fewer windows in a batch.",
            DENSE,
            since=(2, 12),
        ),
        KernelCondition(
            "check_cudnn_tensor_shapes: head size",
            _has_cudnn_head_size,
            _head_size_cause("has a limit on the head size (128; on Hopper 256)"),
            "Use smaller heads, and more of them.",
            DENSE,
        ),
        KernelCondition(
            "check_cudnn_tensor_shapes: head size by 8",
            _has_cudnn_head_step,
            _head_size_cause("needs a head size that is a multiple of 8"),
            FIX_HEAD_SIZE,
            DENSE,
        ),
        KernelCondition(
            "check_cudnn_tensor_shapes: lengths",
            _has_cudnn_lengths,
            _fixed_cause("takes no single key, and no single query with dropout"),
            "Use more than one key.",
            DENSE,
        ),
        KernelCondition(
            "check_cudnn_d256_bprop_head_dim",
            _has_cudnn_backward,
            _head_size_cause("has a backward pass for heads up to 128, of 192 (values 128) and of 256"),
            "Use one of these head sizes.",
            DENSE,
            since=(2, 14),
        ),
    ),
    FLASH: (
        *_common_conditions("check_runtime_disabled_flash"),
        KernelCondition(
            "check_for_attn_mask",
            lambda call, _: call.mask is None,
            _fixed_cause("takes no mask"),
            "Pass no mask where nothing is masked, and is_causal=True instead of a causal mask.",
        ),
        KernelCondition(
            "check_head_dim_size_flash",
            _has_flash_head_size,
            _head_size_cause("needs one head size of 256 at most for query, key and value"),
            "Use smaller heads, and more of them; pad the values to the head size of the queries.",
        ),
        KernelCondition(
            "check_flash_attention_hardware_support",
            _is_gpu_at_least((8, 0)),
            _fixed_cause("needs compute capability 8.0 to 12.1"),
            FIX_NEWER_GPU,
        ),
        KernelCondition(
            "check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120",
            _fits_small_shared_memory,
            _head_size_cause("does not train heads of 193 to 224, nor larger ones with dropout, on this GPU"),
            "Use a head size of 192 at most, or 256 without dropout.",
        ),
        KernelCondition(
            "check_flash_causal_non_square_seqlens",
            _is_square_if_causal,
            _fixed_cause("takes is_causal only for as many queries as keys"),
            "Give as many queries as keys.",
        ),
        KernelCondition("check_dtypes_flash_attention", _is_low_precision, _describe_dtypes, FIX_PRECISION),
        KernelCondition(
            "check_batch_size_nested",
            _has_nested_batches,
            _fixed_cause("needs one batch size of nested tensors"),
            FIX_BATCH,
            NESTED,
        ),
        KernelCondition(
            "check_head_dim_size_flash_nested",
            _has_flash_nested_head_size,
            _head_size_cause("needs a head size that is a multiple of 8 for nested tensors"),
            FIX_HEAD_SIZE,
            NESTED,
        ),
        KernelCondition(
            "check_for_seq_len_0_nested_tensor",
            _has_nested_lengths,
            _fixed_cause("takes no empty sample in a nested tensor, and no ragged number of heads"),
            FIX_EMPTY,
            NESTED,
        ),
        _BATCH,
        _heads_condition(
            lambda call, target: _has_matching_heads(call, target, groups=True),
            "needs as many heads of keys as of values, that divide those of queries (with enable_gqa=True)",
        ),
        _NOT_EMPTY,
        _stride_condition(ignore_single=True),
    ),
    EFFICIENT: (
        *_common_conditions("check_runtime_disabled_mem_efficient")[:2],
        KernelCondition(
            "check_mem_efficient_hardware_support",
            _is_gpu_at_least((5, 0)),
            _fixed_cause("needs compute capability 5.0 to 12.1"),
            FIX_NEWER_GPU,
        ),
        _common_conditions("check_runtime_disabled_mem_efficient")[2],
        KernelCondition(
            "check_head_dim_size_mem_efficient",
            _has_efficient_head_size,
            _head_size_cause("needs a head size that is a multiple of 8 (of 4 in fp32)"),
            FIX_HEAD_SIZE,
        ),
        KernelCondition(
            "check_data_ptr_alignment_mem_efficient",
            _has_aligned_pointers,
            _fixed_cause("needs query, key and value to begin at a multiple of 16 bytes"),
            "Call .contiguous() on the slice that begins in between.",
            DENSE,
            since=(2, 13),
        ),
        KernelCondition(
            "check_requires_grad_and_nested",
            lambda call, _: not call.needs_grad,
            _fixed_cause("does not train with nested tensors"),
            "Use nested tensors of layout torch.jagged.",
            NESTED,
        ),
        KernelCondition(
            "check_batch_size_nested",
            _has_nested_batches,
            _fixed_cause("needs one batch size of nested tensors"),
            FIX_BATCH,
            NESTED,
        ),
        KernelCondition(
            "check_for_seq_len_0_nested_tensor",
            _has_nested_lengths,
            _fixed_cause("takes no empty sample in a nested tensor, and no ragged number of heads"),
            FIX_EMPTY,
            NESTED,
        ),
        _NOT_EMPTY,
        _stride_condition(ignore_single=False),
        _BATCH,
        _heads_condition(
            lambda call, target: _has_matching_heads(call, target, groups=target.torch >= (2, 14))
        ),
        KernelCondition("check_tensor_dtype", _has_efficient_dtype, _describe_dtypes, FIX_PRECISION),
    ),
}
"""Conditions of each fused kernel, in torch's order."""


def find_refusal(kernel: str, call: AttentionCall, target: AttentionTarget) -> KernelRefusal | None:
    """Return the first condition of a fused kernel that a call does not meet, or None if it can run."""
    for condition in CONDITIONS[kernel]:
        applies = condition.since <= target.torch and condition.form in ("", call.form)
        if applies and not condition.holds(call, target):
            fix = condition.fix if isinstance(condition.fix, str) else condition.fix(call)
            return KernelRefusal(kernel, condition.check, condition.cause(call), fix)
    return None


def prefers_cudnn(target: AttentionTarget) -> bool:
    """Whether torch tries cuDNN first: Hopper and datacenter Blackwell, with cuDNN after 9.15."""
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or target.capability[0] not in (9, 10):
        return False
    return target.torch < (2, 10) or target.cudnn > 91500  # noqa: PLR2004


def kernel_order(target: AttentionTarget) -> list[str]:
    """Return the kernels in the order in which torch tries them. Users can change it with sdpa_kernel()."""
    kernels = [
        BACKEND_NUMBERS[number] for number in torch._C._get_sdp_priority_order() if number in BACKEND_NUMBERS
    ]
    if tuple(kernels) == BUILT_IN_ORDER and prefers_cudnn(target):
        return [CUDNN, FLASH, EFFICIENT, MATH]
    return kernels


def choose_kernel(call: AttentionCall, target: AttentionTarget) -> KernelChoice:
    """Return the kernel that torch would run."""
    refusals: list[KernelRefusal] = []
    for kernel in kernel_order(target):
        if kernel == MATH:
            if torch.backends.cuda.math_sdp_enabled():
                return KernelChoice(MATH, tuple(refusals))
            continue
        refusal = find_refusal(kernel, call, target)
        if refusal is None:
            return KernelChoice(kernel, tuple(refusals))
        refusals.append(refusal)
    return KernelChoice("", tuple(refusals))


def explain_refusals(refusals: tuple[KernelRefusal, ...]) -> str:
    """Return why no fused kernel runs, such as "cuDNN and memory-efficient: ...; flash: takes no mask"."""
    by_cause: dict[str, list[str]] = {}
    for refusal in refusals:
        by_cause.setdefault(refusal.cause, []).append(KERNEL_NAMES[refusal.kernel])
    return "; ".join(f"{' and '.join(kernels)}: {cause}" for cause, kernels in by_cause.items())


def suggest_fix(refusals: tuple[KernelRefusal, ...]) -> str:
    """Return the fix for the kernel with the fewest conditions: memory-efficient, then flash, then cuDNN."""
    for kernel in (EFFICIENT, FLASH, CUDNN):
        for refusal in refusals:
            if refusal.kernel == kernel:
                return refusal.fix
    return ""
