"""Memory that kernels take for themselves, which no shape shows: workspaces of cuBLAS, cuDNN and torch.

Each rule was read off allocator traces of an H200 (torch 2.11, cuDNN 9.19) and names what the memory is for;
sizes it gives agree with the traces to a few hundred bytes unless it says otherwise. Not covered: the staging
buffers of large reductions, which are taken when nothing else is at its peak.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from trimtab.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

CUBLAS_HOPPER = 32 * MIB
CUBLAS_OLDER = 4096 * 1024 * 2 + 16 * 1024 * 8
"""One block a thread that runs matrix products, kept for ever."""
SPLIT_K = 132 * 128 * 1024
"""Partial sums of a weight gradient, fp32, one tile a multiprocessor: the most that was seen."""
DESCRIPTOR = 256
"""cuDNN rounds its own workspaces up to this."""
LARGE_IMAGE = 32 * 32
SMALL_IMAGE = 8 * 8
FOUR = 4


def cublas(capability: tuple[int, int]) -> int:
    """The workspace of a cuBLAS handle."""
    return CUBLAS_HOPPER if capability >= (9, 0) else CUBLAS_OLDER


def _eight(channels: int) -> int:
    return -(-channels // 8) * 8


class Convolution:
    """Sizes of one convolution, in bytes as cuDNN lays them out: channels padded to eight."""

    def __init__(self, source: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, groups: int) -> None:
        size = source.element_size()
        self.groups = groups
        self.kernel = prod(weight.shape[2:])
        self.image = prod(result.shape[2:])
        self.channels = (source.shape[1], result.shape[1])
        self.samples = source.shape[0]
        self.half = source.dtype in (torch.float16, torch.bfloat16)
        self.last = source.dim() == FOUR and source.is_contiguous(memory_format=torch.channels_last)
        self.source = self.samples * _eight(source.shape[1]) * prod(source.shape[2:]) * size
        self.result = self.samples * _eight(result.shape[1]) * self.image * size
        self.weight = _eight(weight.shape[0]) * _eight(weight.shape[1]) * self.kernel * size
        self.depthwise = groups > 1 and groups == source.shape[1]

    @property
    def moved(self) -> int:
        """Copies of input, output and weights in the layout that tensor cores want."""
        return self.source + self.result + self.weight

    def forward(self) -> int:
        """Also the gradient of the input, which is a convolution the other way."""
        if self.depthwise:
            return 0
        few = self.channels[0] % 8
        if self.last:
            return self.source + DESCRIPTOR if few and self.half else 0
        if self.channels[0] <= FOUR:
            return 0
        if self.kernel == 1:
            return self.source + self.result if self.image <= SMALL_IMAGE else 0
        return self.moved

    def weight_gradient(self) -> int:
        """Layout copies and partial sums."""
        if self.depthwise:
            return 0
        if self.last:
            return (self.source if self.channels[0] % 8 and self.half else 0) + SPLIT_K
        if self.kernel == 1 and self.image >= LARGE_IMAGE:
            return self.samples * self.channels[0] * self.channels[1] * 4
        if self.kernel == 1:
            return self.source + self.result + 2 * MIB
        return self.moved + SPLIT_K


def _convolution(args: tuple[Any, ...], out: Any) -> list[int]:
    return [Convolution(args[0], args[1], out, args[8]).forward()]


def _convolution_backward(args: tuple[Any, ...], _: Any) -> list[int]:
    gradient, source, weight, groups, wanted = args[0], args[1], args[2], args[9], args[10]
    shape = Convolution(source, weight, gradient, groups)
    return [shape.forward() if wanted[0] else 0, shape.weight_gradient() if wanted[1] else 0]


def _cudnn_attention_backward(args: tuple[Any, ...], _: Any) -> list[int]:
    """Query gradients in fp32 and a row sum; keys and values once a query head where heads are shared."""
    query, key = args[1], args[2]
    batch, heads, length, size = query.shape
    shared = 4 * batch * heads * key.shape[2] * size if key.shape[1] != heads else 0
    return [4 * batch * heads * length * size + 4 * batch * heads * length + DESCRIPTOR, shared]


def _flash_attention_backward(args: tuple[Any, ...], _: Any) -> list[int]:
    """Query gradients in fp32 with lengths padded to 128 and heads to 32, and a row sum. From the source."""
    batch, heads, length, size = args[1].shape
    padded = -(-length // 128) * 128
    wide = -(-size // 32) * 32
    return [4 * batch * heads * padded * wide + 4 * batch * heads * padded]


def _embedding_backward(args: tuple[Any, ...], _: Any) -> list[int]:
    """Partial sums over sorted indices, fp32, and the indices themselves."""
    gradient, indices = args[0], args[1]
    count = indices.numel()
    return [(count + count // 10) * gradient.shape[-1] * 4]


def _rnn(args: tuple[Any, ...], _: Any) -> list[int]:
    """From one shape only: sixteen bytes a state and step, the input, and a fixed part."""
    source, size, layers = args[0], args[7], args[9]
    steps = source.shape[0] * source.shape[1]
    del layers
    return [16 * steps * size + 2 * steps * source.shape[2] + 37_300_000]


def _rnn_backward(args: tuple[Any, ...], _: Any) -> list[int]:
    states = args[4]
    source = args[0]
    steps = source.shape[0] * source.shape[1]
    size = 16 * steps * states.shape[2] + 2 * steps * source.shape[2] + 37_300_000
    return [size, size]


RULES: dict[str, Callable[[tuple[Any, ...], Any], list[int]]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_attention_backward,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_cudnn_rnn": _rnn,
    "aten::_cudnn_rnn_backward": _rnn_backward,
}
"""Bytes that an operation takes one after the other, each given back before the next."""
