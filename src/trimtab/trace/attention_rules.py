"""torch's conditions for each kernel of scaled_dot_product_attention on CUDA, as a table.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h. A condition has the name of
torch's function, so that you can compare the two lists; `since` is the first release that has it. Read for
torch 2.11 and 2.13; later releases count as torch's main branch of autumn 2026, and earlier ones as 2.11.
Not covered: ROCm, and flash attention 3, which a user has to switch on.
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
FOUR = 4
"""Fused kernels take batch x heads x length x head size."""
CUDNN, FLASH, EFFICIENT, MATH = "cudnn", "flash", "efficient", "math"
NAMES = {CUDNN: "cuDNN", FLASH: "flash", EFFICIENT: "memory-efficient", MATH: "math"}
NUMBERS = {0: MATH, 1: FLASH, 2: EFFICIENT, 3: CUDNN}
"""torch's numbers of its backends (torch.nn.attention.SDPBackend)."""
BUILT_IN_ORDER = (FLASH, EFFICIENT, MATH, CUDNN)
DENSE, NESTED, JAGGED = "dense", "nested", "jagged"


class Call(NamedTuple):
    """The arguments that the choice depends on."""

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
        """Whether a backward pass follows. The mask does not count, as in torch."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    @property
    def form(self) -> str:
        """dense; nested: a nested tensor of the old, strided kind; jagged: of the new kind."""
        nested = [tensor for tensor in self.tensors if tensor.is_nested]
        if not nested:
            return DENSE
        return NESTED if any(tensor.layout == torch.strided for tensor in nested) else JAGGED


class AttentionTarget(NamedTuple):
    """The GPU, and the software on it."""

    capability: tuple[int, int]
    torch: tuple[int, int]
    cudnn: int
    """As in torch.backends.cudnn.version(): 91900 is 9.19.0."""


class Condition(NamedTuple):
    """One of torch's checks."""

    check: str
    """The name of torch's function, and after a colon which part of it."""
    holds: Callable[[Call, AttentionTarget], bool]
    cause: Callable[[Call], str]
    """Completes the sentence "KERNEL ..."."""
    cure: str | Callable[[Call], str]
    form: str = ""
    """Only for inputs of this form; empty: for all."""
    since: tuple[int, int] = (0, 0)


class Loss(NamedTuple):
    """A fused kernel that refuses a call, and the first condition that fails."""

    kernel: str
    check: str
    cause: str
    cure: str


class Choice(NamedTuple):
    """The kernel that torch would run, and why not an earlier one."""

    kernel: str
    """Empty where the user has switched off every kernel that could run."""
    lost: tuple[Loss, ...]


def target_of(capability: tuple[int, int]) -> AttentionTarget:
    """The target with the installed torch, or with the cuDNN that its CUDA wheels bring."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    found = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return AttentionTarget(capability, (major, minor), found or _wheel_cudnn((major, minor)))


def _wheel_cudnn(release: tuple[int, int]) -> int:
    """The cuDNN of torch's wheels: 9.19 since 2.11 (seen on an H200), 9.15.1 in 2.10, 9.10.2 before.

    Wheels for CUDA 12 keep 9.10.2, and with it another order of kernels.
    """
    cuda = (torch.version.cuda or "13").split(".")[0]
    if int(cuda) < 13 or release < (2, 10):  # noqa: PLR2004 - versions
        return 91002
    return 91900 if release >= (2, 11) else 91501


# -------------------------------------------------------------------------------- words of causes


def _strides(call: Call) -> str:
    names = ("query", "key", "value")
    wrong = [name for name, tensor in zip(names, call.tensors, strict=True) if tensor.stride(-1) != 1]
    return " and ".join(wrong)


def _stride_words(call: Call) -> str:
    if not _inputs_dense(call):
        return f"wants the last dimension of {_strides(call)} contiguous"
    last = call.mask.stride(-1) if call.mask is not None else 1
    kind = "expanded" if last == 0 else "transposed"
    return f"refuses a mask whose last dimension has stride {last} ({kind})"


def _stride_cure(call: Call) -> str:
    if not _inputs_dense(call):
        return f"Call .contiguous() on {_strides(call)} before the call."
    expanded = call.mask is not None and call.mask.stride(-1) == 0
    return EXPANDED_MASK if expanded else "Call .contiguous() on the mask before the call."


def _says(text: str) -> Callable[[Call], str]:
    return lambda _: text


def _head_words(text: str) -> Callable[[Call], str]:
    return lambda call: f"{text}; it is {_heads_shown(call)}"


def _heads_shown(call: Call) -> str:
    sizes = list(dict.fromkeys(int(tensor.shape[-1]) for tensor in call.tensors))
    return " and ".join(map(str, sizes))


def _dtype_words(call: Call) -> str:
    dtypes = list(dict.fromkeys(dtype_name(tensor.dtype) for tensor in call.tensors))
    return f"does not compute in {' and '.join(dtypes)}"


# -------------------------------------------------------------------------------- conditions


def _inputs_dense(call: Call) -> bool:
    return all(tensor.stride(-1) == 1 for tensor in call.tensors)


def _last_dim_stride_1(call: Call, *, ignore_single: bool) -> bool:
    inputs = _inputs_dense(call) or (ignore_single and call.query.shape[-1] == 1)
    return inputs and (call.mask is None or call.mask.stride(-1) == 1)


def _four_dimensions(call: Call, _: AttentionTarget) -> bool:
    return all(tensor.dim() == FOUR for tensor in call.tensors)


def _on_cuda(call: Call, _: AttentionTarget) -> bool:
    return call.query.device.type == "cuda"


def _lengths_not_zero(call: Call, _: AttentionTarget) -> bool:
    return call.query.shape[-2] != 0 and call.key.shape[-2] != 0


def _same_dtype(call: Call, allowed: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype and call.query.dtype in allowed


def _low_precision(call: Call, target: AttentionTarget) -> bool:
    return _same_dtype(call, HALF if target.capability[0] >= 8 else HALF[:1])  # noqa: PLR2004


def _efficient_dtypes(call: Call, target: AttentionTarget) -> bool:
    older = (torch.float16, torch.float32)
    return _same_dtype(call, (*older, torch.bfloat16) if target.capability[0] >= 8 else older)  # noqa: PLR2004


def _gpu_between(lowest: tuple[int, int]) -> Callable[[Call, AttentionTarget], bool]:
    return lambda _, target: lowest <= target.capability <= NEWEST_GPU


def _same_batch(call: Call, _: AttentionTarget) -> bool:
    return call.query.shape[0] == call.key.shape[0] == call.value.shape[0]


def _heads(call: Call) -> tuple[int, int, int]:
    query, key, value = (tensor.shape[-3] for tensor in call.tensors)
    return query, key, value


def _heads_fit(call: Call, target: AttentionTarget, *, groups: bool, same_keys: bool = True) -> bool:
    """`groups`: the kernel takes enable_gqa; `same_keys`: keys and values then need as many heads."""
    query, key, value = _heads(call)
    if query == key == value:
        return True
    if target.torch >= (2, 14) and key == value == 1:
        return True
    if not (call.grouped and groups) or (same_keys and key != value):
        return False
    return bool(query % key == 0 and query % value == 0)


def _flash_heads(call: Call, _: AttentionTarget) -> bool:
    query, key, value = (tensor.shape[-1] for tensor in call.tensors)
    return bool(query == key == value and query <= 256)  # noqa: PLR2004


def _flash_nested_heads(call: Call, target: AttentionTarget) -> bool:
    return _flash_heads(call, target) and call.query.shape[-1] % 8 == 0


def _small_chip_heads(call: Call, target: AttentionTarget) -> bool:
    """sm86 to sm89 and sm120 have too little shared memory for the backward pass of large heads."""
    small = (8, 6) <= target.capability <= (8, 9) or (12, 0) <= target.capability <= NEWEST_GPU
    size = call.query.shape[-1]
    awkward = 192 < size <= 224 or (size > 224 and call.dropout > 0)  # noqa: PLR2004
    return not (call.needs_grad and small and awkward)


def _square_if_causal(call: Call, _: AttentionTarget) -> bool:
    return not call.causal or call.form != DENSE or call.query.shape[-2] == call.key.shape[-2]


def alignment(call: Call, target: AttentionTarget) -> int:
    """What head sizes must be multiples of for the memory-efficient kernel."""
    half = call.query.dtype in HALF
    major = target.capability[0]
    tensor_cores = major >= 8 or (major == 7 and half)  # noqa: PLR2004
    return max(4 if major >= 8 else 1, (8 if half else 4) if tensor_cores else 1)  # noqa: PLR2004


def _efficient_heads(call: Call, target: AttentionTarget) -> bool:
    query, key, value = (tensor.shape[-1] for tensor in call.tensors)
    step = alignment(call, target)
    return bool(query == key and query % step == 0 and query > 0 and value % step == 0 and value > 0)


def _pointers_aligned(call: Call, target: AttentionTarget) -> bool:
    """A view that begins in the middle of 16 bytes; blocks of the allocator begin at 512."""
    if target.capability[0] < 8:  # noqa: PLR2004
        return True
    step = alignment(call, target)
    return all(tensor.numel() == 0 or tensor.storage_offset() % step == 0 for tensor in call.tensors)


def _mask_constant(call: Call, _: AttentionTarget) -> bool:
    return call.mask is None or not call.mask.requires_grad


def _mask_shape(call: Call, _: AttentionTarget) -> bool:
    mask = call.mask
    if mask is None:
        return True
    if mask.dim() not in (2, FOUR):
        return False
    whole = (call.query.shape[0], call.query.shape[1], call.query.shape[2], call.key.shape[2])
    pairs = zip(reversed(mask.shape), reversed(whole), strict=False)
    return all(size in (1, wanted) for size, wanted in pairs)


def _cudnn_head_limit(call: Call, target: AttentionTarget) -> int:
    """The largest head of cuDNN's kernels, by GPU and release."""
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


def _cudnn_heads(call: Call, target: AttentionTarget) -> bool:
    most = _cudnn_head_limit(call, target)
    return bool(call.query.shape[-1] <= most and call.value.shape[-1] <= most)


def _cudnn_head_steps(call: Call, _: AttentionTarget) -> bool:
    return bool(call.query.shape[-1] % 8 == 0 and call.value.shape[-1] % 8 == 0)


def _cudnn_large_heads_backward(call: Call, target: AttentionTarget) -> bool:
    sizes = (call.query.shape[-1], call.value.shape[-1])
    if not call.needs_grad or _cudnn_head_limit(call, target) < 256:  # noqa: PLR2004
        return True
    return max(sizes) <= 128 or sizes in ((192, 128), (256, 256))  # noqa: PLR2004


def _cudnn_counts(call: Call, _: AttentionTarget) -> bool:
    most = 65535
    return bool(call.query.shape[0] <= most and call.query.shape[1] <= most)


def _cudnn_lengths(call: Call, _: AttentionTarget) -> bool:
    return bool(call.key.shape[2] != 1 and not (call.dropout and call.query.shape[2] == 1))


def _not_deterministic(_: Call, __: AttentionTarget) -> bool:
    strict = not torch.is_deterministic_algorithms_warn_only_enabled()
    return not (torch.are_deterministic_algorithms_enabled() and strict)


def _nested_batches(call: Call, _: AttentionTarget) -> bool:
    sizes = [tensor.size(0) for tensor in call.tensors]
    if len(set(sizes)) == 1:
        return True
    return not call.needs_grad and all(size in (1, max(sizes)) for size in sizes)


def _nested_lengths(call: Call, _: AttentionTarget) -> bool:
    """No sample is empty, and every one has as many heads."""
    for tensor in call.tensors:
        if tensor.is_nested:
            sizes = tensor._nested_tensor_size()
            if bool((sizes[:, 1] == 0).any()) or len(set(sizes[:, 0].tolist())) > 1:
                return False
    return True


def _cudnn_takes_nested(call: Call, target: AttentionTarget) -> bool:
    allowed = os.environ.get("TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED") == "1"
    return call.form != NESTED or (allowed and target.capability[0] in (9, 10))


def _switch(name: str) -> Callable[[Call, AttentionTarget], bool]:
    return lambda _, __: bool(getattr(torch.backends.cuda, name)())


SWITCHED_OFF = "Switch it on again: it was disabled by sdpa_kernel() or torch.backends.cuda.enable_*_sdp()."
NEWER_GPU = "Use a GPU with compute capability 8.0 (Ampere) or newer."
EXPANDED_MASK = (
    "Call .contiguous() on the mask. A Hugging Face model that is compiled builds such a mask where it is "
    "given none: pass it an attention_mask (all ones will do), or do not compile it."
)
LOW_PRECISION = "Train in bf16 or fp16 (--precision bf16)."
FOUR_DIMENSIONS = "Give query, key and value as batch x heads x length x head size."
SAME_HEADS = "Repeat keys and values to the heads of the query, or pass enable_gqa=True and no mask."
SAME_BATCH = "Expand query, key and value to one batch size before the call."
NO_EMPTY = "Leave out sequences of length 0."
LEARNED_MASK = "Compute the mask without a gradient, or take the memory-efficient kernel (contiguous mask)."
HEAD_STEPS = "Choose a head size that is a multiple of 8."


def _shared(switch: str) -> tuple[Condition, ...]:
    return (
        Condition(switch, _switch(_SWITCHES[switch]), _says("is switched off"), SWITCHED_OFF),
        Condition(
            "check_all_tensors_on_device", _on_cuda, _says("wants GPU tensors"), "Move them to the GPU."
        ),
        Condition(
            "check_tensor_shapes", _four_dimensions, _says("wants 4 dimensions"), FOUR_DIMENSIONS
        ),
    )  # fmt: skip


_SWITCHES = {
    "check_runtime_disabled_cudnn": "cudnn_sdp_enabled",
    "check_runtime_disabled_flash": "flash_sdp_enabled",
    "check_runtime_disabled_mem_efficient": "mem_efficient_sdp_enabled",
}
_BATCH = Condition(
    "check_batch_size_and_num_heads_dense: batch",
    _same_batch,
    _says("wants the same batch size of query, key and value"),
    SAME_BATCH,
    DENSE,
)
_NOT_EMPTY = Condition(
    "check_nonzero_sequence_lengths_dense",
    _lengths_not_zero,
    _says("takes no empty sequence"),
    NO_EMPTY,
    DENSE,
)


def _stride_condition(*, ignore_single: bool) -> Condition:
    return Condition(
        "check_last_dim_stride_equals_1_dense",
        lambda call, _: _last_dim_stride_1(call, ignore_single=ignore_single),
        _stride_words,
        _stride_cure,
        DENSE,
    )


def _heads_condition(
    holds: Callable[[Call, AttentionTarget], bool],
    cause: str = "wants as many heads of keys and values as of queries",
) -> Condition:
    return Condition(
        "check_batch_size_and_num_heads_dense: heads", holds, _says(cause), SAME_HEADS, DENSE
    )  # fmt: skip


CONDITIONS: dict[str, tuple[Condition, ...]] = {
    CUDNN: (
        Condition(
            "can_use_cudnn_attention: version",
            lambda call, target: not (call.dropout > 0 and 91100 < target.cudnn < 91400),  # noqa: PLR2004
            _says("takes no dropout in versions 9.11 to 9.13"),
            "Install a newer cuDNN.",
        ),
        *_shared("check_runtime_disabled_cudnn"),
        Condition(
            "check_for_nested_inputs",
            _cudnn_takes_nested,
            _says("takes no nested tensors"),
            "Set TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED=1 on Hopper and datacenter Blackwell.",
        ),
        Condition(
            "check_cudnn_deterministic",
            _not_deterministic,
            _says("is not deterministic"),
            "Call torch.use_deterministic_algorithms(True, warn_only=True), or leave it out.",
        ),
        Condition("check_dtypes_low_precision", _low_precision, _dtype_words, LOW_PRECISION),
        Condition(
            "check_attn_mask_shape: gradient",
            _mask_constant,
            _says("takes no mask with a gradient"),
            LEARNED_MASK,
        ),
        Condition(
            "check_attn_mask_shape",
            _mask_shape,
            _says("wants a mask of 2 or 4 dimensions that fit, or are 1"),
            "Give the mask as (length, keys) or (batch or 1, heads or 1, length or 1, keys or 1).",
        ),
        Condition(
            "check_cudnn_hardware_support",
            _gpu_between((8, 0)),
            _says("needs compute capability 8.0 to 12.1"),
            NEWER_GPU,
        ),
        Condition(
            "check_cudnn_dropout",
            lambda call, _: call.dropout * 16 == math.floor(call.dropout * 16),
            _says("takes a dropout in steps of 1/16 only"),
            "Use a dropout of 0, 0.0625, 0.125, ... for the attention.",
            since=(2, 12),
        ),
        _NOT_EMPTY,
        _stride_condition(ignore_single=True),
        _BATCH,
        _heads_condition(lambda call, target: _heads_fit(call, target, groups=True, same_keys=False)),
        Condition(
            "check_cudnn_tensor_shapes: counts",
            _cudnn_counts,
            _says("takes at most 65535 samples and heads"),
            "Use a smaller micro-batch, or fewer windows in a batch.",
            DENSE,
            since=(2, 12),
        ),
        Condition(
            "check_cudnn_tensor_shapes: head size",
            _cudnn_heads,
            _head_words("has a limit on the head size (128; on Hopper 256)"),
            "Use smaller heads, and more of them.",
            DENSE,
        ),
        Condition(
            "check_cudnn_tensor_shapes: head size by 8",
            _cudnn_head_steps,
            _head_words("wants a head size that is a multiple of 8"),
            HEAD_STEPS,
            DENSE,
        ),
        Condition(
            "check_cudnn_tensor_shapes: lengths",
            _cudnn_lengths,
            _says("takes no single key, and no single query with dropout"),
            "Use more than one key.",
            DENSE,
        ),
        Condition(
            "check_cudnn_d256_bprop_head_dim",
            _cudnn_large_heads_backward,
            _head_words("has a backward pass for heads up to 128, of 192 (values 128) and of 256"),
            "Use one of these head sizes.",
            DENSE,
            since=(2, 14),
        ),
    ),
    FLASH: (
        *_shared("check_runtime_disabled_flash"),
        Condition(
            "check_for_attn_mask",
            lambda call, _: call.mask is None,
            _says("takes no mask"),
            "Pass no mask where nothing is masked, and is_causal=True instead of a causal mask.",
        ),
        Condition(
            "check_head_dim_size_flash",
            _flash_heads,
            _head_words("wants one head size of 256 at most for query, key and value"),
            "Use smaller heads, and more of them; pad the values to the head size of the queries.",
        ),
        Condition(
            "check_flash_attention_hardware_support",
            _gpu_between((8, 0)),
            _says("needs compute capability 8.0 to 12.1"),
            NEWER_GPU,
        ),
        Condition(
            "check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120",
            _small_chip_heads,
            _head_words("does not train heads of 193 to 224, nor larger ones with dropout, on this GPU"),
            "Use a head size of 192 at most, or 256 without dropout.",
        ),
        Condition(
            "check_flash_causal_non_square_seqlens",
            _square_if_causal,
            _says("takes is_causal only for as many queries as keys"),
            "Give as many queries as keys.",
        ),
        Condition("check_dtypes_flash_attention", _low_precision, _dtype_words, LOW_PRECISION),
        Condition(
            "check_batch_size_nested",
            _nested_batches,
            _says("wants one batch size of nested tensors"),
            SAME_BATCH,
            NESTED,
        ),
        Condition(
            "check_head_dim_size_flash_nested",
            _flash_nested_heads,
            _head_words("wants a head size that is a multiple of 8 for nested tensors"),
            HEAD_STEPS,
            NESTED,
        ),
        Condition(
            "check_for_seq_len_0_nested_tensor",
            _nested_lengths,
            _says("takes no empty sample in a nested tensor, and no ragged number of heads"),
            NO_EMPTY,
            NESTED,
        ),
        _BATCH,
        _heads_condition(
            lambda call, target: _heads_fit(call, target, groups=True),
            "wants as many heads of keys as of values, that divide those of queries (with enable_gqa=True)",
        ),
        _NOT_EMPTY,
        _stride_condition(ignore_single=True),
    ),
    EFFICIENT: (
        *_shared("check_runtime_disabled_mem_efficient")[:2],
        Condition(
            "check_mem_efficient_hardware_support",
            _gpu_between((5, 0)),
            _says("needs compute capability 5.0 to 12.1"),
            NEWER_GPU,
        ),
        _shared("check_runtime_disabled_mem_efficient")[2],
        Condition(
            "check_head_dim_size_mem_efficient",
            _efficient_heads,
            _head_words("wants a head size that is a multiple of 8 (of 4 in fp32)"),
            HEAD_STEPS,
        ),
        Condition(
            "check_data_ptr_alignment_mem_efficient",
            _pointers_aligned,
            _says("wants query, key and value to begin at a multiple of 16 bytes"),
            "Call .contiguous() on the slice that begins in between.",
            DENSE,
            since=(2, 13),
        ),
        Condition(
            "check_requires_grad_and_nested",
            lambda call, _: not call.needs_grad,
            _says("does not train with nested tensors"),
            "Use nested tensors of layout torch.jagged.",
            NESTED,
        ),
        Condition(
            "check_batch_size_nested",
            _nested_batches,
            _says("wants one batch size of nested tensors"),
            SAME_BATCH,
            NESTED,
        ),
        Condition(
            "check_for_seq_len_0_nested_tensor",
            _nested_lengths,
            _says("takes no empty sample in a nested tensor, and no ragged number of heads"),
            NO_EMPTY,
            NESTED,
        ),
        _NOT_EMPTY,
        _stride_condition(ignore_single=False),
        _BATCH,
        _heads_condition(lambda call, target: _heads_fit(call, target, groups=target.torch >= (2, 14))),
        Condition("check_tensor_dtype", _efficient_dtypes, _dtype_words, LOW_PRECISION),
    ),
}
"""What each fused kernel asks, in torch's order."""


def first_failure(kernel: str, call: Call, target: AttentionTarget) -> Loss | None:
    """The first condition of a fused kernel that a call does not meet; None: the kernel can run."""
    for condition in CONDITIONS[kernel]:
        applies = condition.since <= target.torch and condition.form in ("", call.form)
        if applies and not condition.holds(call, target):
            words = condition.cure if isinstance(condition.cure, str) else condition.cure(call)
            return Loss(kernel, condition.check, condition.cause(call), words)
    return None


def prefers_cudnn(target: AttentionTarget) -> bool:
    """Whether torch tries cuDNN first: Hopper and datacenter Blackwell, with cuDNN after 9.15."""
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or target.capability[0] not in (9, 10):
        return False
    return target.torch < (2, 10) or target.cudnn > 91500  # noqa: PLR2004


def order(target: AttentionTarget) -> list[str]:
    """The kernels in the order in which torch tries them; a user may have set it (sdpa_kernel)."""
    kernels = [NUMBERS[number] for number in torch._C._get_sdp_priority_order() if number in NUMBERS]
    if tuple(kernels) == BUILT_IN_ORDER and prefers_cudnn(target):
        return [CUDNN, FLASH, EFFICIENT, MATH]
    return kernels


def choose(call: Call, target: AttentionTarget) -> Choice:
    """The kernel that torch would run."""
    lost: list[Loss] = []
    for kernel in order(target):
        if kernel == MATH:
            if torch.backends.cuda.math_sdp_enabled():
                return Choice(MATH, tuple(lost))
            continue
        failure = first_failure(kernel, call, target)
        if failure is None:
            return Choice(kernel, tuple(lost))
        lost.append(failure)
    return Choice("", tuple(lost))


def explain(lost: tuple[Loss, ...]) -> str:
    """Why no fused kernel runs: "cuDNN and memory-efficient refuse a mask ..., flash takes no mask"."""
    by_cause: dict[str, list[str]] = {}
    for loss in lost:
        by_cause.setdefault(loss.cause, []).append(NAMES[loss.kernel])
    return "; ".join(f"{' and '.join(kernels)}: {cause}" for cause, kernels in by_cause.items())


def cure(lost: tuple[Loss, ...]) -> str:
    """What to do about it: what the kernel asks that takes most, or all where the user has a choice."""
    for kernel in (EFFICIENT, FLASH, CUDNN):
        for loss in lost:
            if loss.kernel == kernel:
                return loss.cure
    return ""
