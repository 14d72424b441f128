"""Results of operations that fake tensors cannot answer for: torch describes them only in its CUDA half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trimtab.engine.sync_norm import accumulated
from trimtab.trace import recurrent

if TYPE_CHECKING:
    from collections.abc import Callable


def _batch_norm(args: tuple[Any, ...]) -> Any:
    source, weight = args[0], args[1]
    moments = source.new_empty((weight.numel(),), dtype=torch.float32)
    return (
        torch.empty_like(source),
        moments,
        torch.empty_like(moments),
        source.new_empty((0,), dtype=torch.uint8),
    )


def _batch_norm_backward(args: tuple[Any, ...]) -> Any:
    source, weight = args[0], args[2]
    return torch.empty_like(source), torch.empty_like(weight), torch.empty_like(weight)


def _moments(args: tuple[Any, ...]) -> Any:
    """Mean and inverse deviation of each channel, of a batch that is spread over ranks."""
    source = args[0]
    found = source.new_empty((source.shape[1],), dtype=accumulated(source.dtype))
    return found, torch.empty_like(found)


def _combined(args: tuple[Any, ...]) -> Any:
    """The same of all ranks, from one row a rank."""
    found = args[1].new_empty((args[1].shape[1],))
    return found, torch.empty_like(found)


def _sums_of_gradients(args: tuple[Any, ...]) -> Any:
    """Two sums of each channel, and the gradients of weight and bias where they are asked for."""
    source, mean, weight = args[1], args[2], args[4]
    kind = mean.dtype if weight is None else weight.dtype
    sums = [torch.empty_like(mean) if args[5] else None for _ in range(2)]
    own = [source.new_empty((source.shape[1],), dtype=kind) if asked else None for asked in args[6:8]]
    return (*sums, *own)


def _ctc_loss(args: tuple[Any, ...]) -> Any:
    """The loss of each sample, and the sums over all ways to read it."""
    steps, batch = args[0].shape[0], args[0].shape[1]
    longest = args[1].shape[-1] if args[1].dim() > 1 else args[1].numel()
    return args[0].new_empty((batch,)), args[0].new_empty((batch, steps, 2 * longest + 1))


ROW_BYTES = 16
"""What rows of the result of a grouped matrix product are aligned to."""


def _grouped_product(args: tuple[Any, ...]) -> torch.Tensor:
    """A matrix product for each group of rows or columns; by torch's sources of version 2.11.

    The shapes that torch's own Python half gives are for bf16 alone, and CUDA takes fp16 and fp32 too.
    """
    left, right, ends, _, dtype = (*args, None, None, None)[:5]
    groups = left.shape[0] if left.dim() == 3 else right.shape[0] if ends is None else ends.shape[0]  # noqa: PLR2004
    rows, columns = left.shape[-2], right.shape[-1]
    kind = dtype or left.dtype
    wide = -(-columns * kind.itemsize // ROW_BYTES) * ROW_BYTES // kind.itemsize
    if left.dim() == right.dim():
        size, stride = (groups, rows, columns), (rows * wide, wide, 1)
        return torch.empty_strided(size, stride, dtype=kind, device=left.device)
    return torch.empty_strided((rows, columns), (wide, 1), dtype=kind, device=left.device)


def _nothing(_: tuple[Any, ...]) -> None:
    return None


COMPOSITE_WITHOUT_CUDA = ("silu_backward", "mish_backward", "native_channel_shuffle")
"""Operations that a build without CUDA takes apart, and a build with CUDA runs as one kernel."""


def keep_whole(library: torch.library.Library) -> None:
    """Give those operations a CUDA kernel, so that they are not taken apart. It is never run."""

    def never(*_: Any) -> None:
        raise AssertionError("a fake tensor reached a kernel")

    for name in COMPOSITE_WITHOUT_CUDA:
        library.impl(name, never, "CUDA")


def add_bias_in_place(library: torch.library.Library) -> None:
    """Let a linear layer of scattered inputs add its bias to the product, as it does to real tensors."""
    whole = torch.ops.aten.linear.default

    def linear(source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if bias is None or source.dim() < 3 or source.is_contiguous():  # noqa: PLR2004
            return whole.decompose(source, weight, bias)
        # To fake tensors torch adds it into new memory.
        return torch.matmul(source, weight.t()).add_(bias)

    library.impl("linear", linear, "AutogradCUDA")


RESULTS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::batch_norm_stats": _moments,
    "aten::batch_norm_gather_stats_with_counts": _combined,
    "aten::batch_norm_elemt": lambda args: torch.empty_like(args[0]),
    "aten::batch_norm_backward_reduce": _sums_of_gradients,
    "aten::batch_norm_backward_elemt": lambda args: torch.empty_like(args[1]),
    **recurrent.RESULTS,
    "aten::_grouped_mm": _grouped_product,
    "aten::_ctc_loss": _ctc_loss,
    "aten::_ctc_loss_backward": lambda args: torch.empty_like(args[1], memory_format=torch.contiguous_format),
    "aten::_use_cudnn_ctc_loss": lambda _: False,
    "aten::_use_miopen_ctc_loss": lambda _: False,
    "aten::_fused_sgd_": _nothing,
    "aten::_fused_adagrad_": _nothing,
}


DENSE_RESULTS = {"aten::native_layer_norm", "aten::native_layer_norm_backward"}
"""Operations whose first result is dense on CUDA, however its input lies."""


def with_dense_first(out: Any) -> Any:
    """The results with the first one dense."""
    first = out[0]
    if first is None or first.is_contiguous():
        return out
    return (torch.empty(first.shape, dtype=first.dtype, device=first.device), *out[1:])
