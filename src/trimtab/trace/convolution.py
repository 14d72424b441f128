"""What cuDNN takes for a convolution, by the algorithm it would choose.

The sizes follow from the algorithms: copies of input, output and weights in the layout that tensor cores
want, partial sums of weight gradients, tiles of Winograd and FFT transforms. Which algorithm is chosen is
cuDNN's secret: those conditions were read off 1395 calls on an H200 (cuDNN 9.19, torch 2.11; 14 jobs and 484
swept shapes), where sizes come out within 2 % for nine calls in ten. Volumes: 720 calls of 240 shapes, eight
in ten within 3 % of the tensors or 1 MiB. Grouped convolutions other than depthwise ones are covered poorly.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MULTIPROCESSORS = 132
FOUR = 4
FEW_CHANNELS = 4
VOLUME = 3
"""Dimensions of an image that is a volume."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One convolution, forward or as a gradient."""

    samples: int
    source: int
    """Channels in."""
    result: int
    """Channels out."""
    image: tuple[int, ...]
    made: tuple[int, ...]
    """Size of the output image."""
    kernel: tuple[int, ...]
    stride: int
    groups: int
    weight_source: int
    """Channels in of the weight: of one group."""
    last: bool
    """Channels last in memory."""
    bytes: int
    arithmetic: str
    """How it multiplies: fp32, tf32, fp16 or bf16, as the fields of Peaks are called."""

    @property
    def window(self) -> int:
        """Numbers in the kernel, one channel."""
        return prod(self.kernel)

    @property
    def pixels(self) -> int:
        """Numbers in the output image, one channel."""
        return prod(self.made)

    def copies(self, align: int, *, weight: bool = True) -> int:
        """Input, output and weights, with channels padded."""
        source = self.samples * _up(self.source, align) * prod(self.image)
        result = self.samples * _up(self.result, align) * self.pixels
        weights = _up(self.result, align) * _up(self.weight_source, align) * self.window
        return (source + result + (weights if weight else 0)) * self.bytes

    def padded(self, channels: int, pixels: int, align: int) -> int:
        """One tensor with channels padded."""
        return self.samples * _up(channels, align) * pixels * self.bytes


def _up(value: int, align: int) -> int:
    return -(-value // align) * align


def _ceil(value: int, by: int) -> int:
    return -(-value // by)


def channels_last(source: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch hands cuDNN this convolution with channels last."""
    import torch
    from torch._prims_common import suggest_memory_format

    wanted = {FOUR: torch.channels_last, FOUR + 1: torch.channels_last_3d}.get(source.dim())
    if wanted is None:
        return False

    # By strides alone, as torch does: a tensor of one channel may lie both ways at once.
    return any(suggest_memory_format(one) is wanted for one in (source, weight))


def shape_of(
    source: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, stride: Any, groups: int
) -> Shape:
    """The shape of a call; strides of one dimension stand for all."""
    import torch

    names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    plain = "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"
    return Shape(
        samples=source.shape[0],
        source=source.shape[1],
        result=result.shape[1],
        image=tuple(source.shape[2:]),
        made=tuple(result.shape[2:]),
        kernel=tuple(weight.shape[2:]),
        stride=stride[0] if isinstance(stride, list | tuple) else stride,
        groups=groups,
        weight_source=weight.shape[1],
        last=channels_last(source, weight),
        bytes=source.element_size(),
        arithmetic=names.get(source.dtype, plain),
    )


def workspace(shape: Shape, phase: str) -> int:
    """Bytes of workspace; phase is forward, source (its gradient) or weight (its gradient)."""
    if shape.groups > 1 and shape.groups == shape.source:
        return 0
    return _exact(shape, phase) if shape.arithmetic == "fp32" else _tensor_cores(shape, phase)


def _exact(shape: Shape, phase: str) -> int:
    """fp32 without TF32: FFT forward, tiled FFT and Winograd backward, or nothing."""
    transform = _transform(shape, phase)
    weight = shape.window > 1
    if shape.last:
        if phase == "weight":
            return shape.copies(1, weight=weight) + transform if transform else 0
        if phase == "forward" and min(shape.source, shape.result) <= FEW_CHANNELS:
            return 0
        return shape.copies(1, weight=weight) + transform
    if transform or phase != "weight" or shape.groups > 1:
        return transform
    return _exact_weight(shape)


def _exact_weight(shape: Shape) -> int:
    """fp32 gradients of weights where nothing is transformed: copies in another layout, or nothing."""
    if len(shape.image) == 1:
        long = shape.window >= 3 and shape.source * shape.result * shape.window > 450_000  # noqa: PLR2004
        return shape.copies(1) if long else 0
    if len(shape.image) == VOLUME:
        return shape.copies(1) if shape.window > 1 and shape.source > FEW_CHANNELS else 0
    small = shape.pixels <= 196 and shape.source >= 256  # noqa: PLR2004
    strided = shape.stride > 1 or shape.window == 1
    return shape.copies(1, weight=shape.window > 1) if small and strided else 0


def _transform(shape: Shape, phase: str) -> int:
    """Transformed tiles; 0 where cuDNN multiplies directly."""
    if len(shape.image) != 2 or shape.stride != 1 or shape.window == 1 or shape.groups > 1:  # noqa: PLR2004
        return 0
    if phase == "forward":
        return _fft(shape)
    if phase == "source":
        return _tiled_fft(shape)
    return _winograd(shape)


def _fft(shape: Shape) -> int:
    few, many = sorted((shape.source, shape.result))
    side, kernel, batch = max(shape.image), shape.kernel[0], shape.samples
    if kernel != 3 or side > 32 or few < 32:  # noqa: PLR2004
        return 0
    if batch >= 96:  # noqa: PLR2004
        growing, shrinking = shape.result > shape.source, shape.result < shape.source
        chosen = not (side <= 8 and growing) and not (side > 8 and shrinking)  # noqa: PLR2004
        chosen = chosen and 2 * shape.result >= shape.source
    else:
        chosen = side >= 28 and few * many <= 128 * 256  # noqa: PLR2004
    tile = max(16, 1 << (side + kernel - 2).bit_length())
    spectrum = 2 * (batch + shape.result) * tile * (tile + 2)
    return 4 * shape.source * (shape.window * shape.result + spectrum) if chosen else 0


def _tiled_fft(shape: Shape) -> int:
    few, side, kernel = min(shape.source, shape.result), max(shape.image), shape.kernel[0]
    product = shape.source * shape.result
    wide = few >= 32 or shape.source >= 128  # noqa: PLR2004
    large = side >= 28 or (side >= 16 and product >= 768 * 256)  # noqa: PLR2004
    if kernel > 5 or shape.samples == 1 or not wide or not large:  # noqa: PLR2004
        return 0
    tiles = 1 if side + kernel - 1 <= 32 else 2  # noqa: PLR2004
    return 4352 * (product + tiles * shape.samples * (shape.source + shape.result))


def _winograd(shape: Shape) -> int:
    side, kernel = max(shape.image), shape.kernel[0]
    few = min(shape.source, shape.result)
    wide = few >= 16 or shape.source >= 128  # noqa: PLR2004
    if kernel not in (3, 5) or not wide or (side >= 128 and shape.source < 64):  # noqa: PLR2004
        return 0
    output, tile = {3: (4, 36), 5: (9, 169)}[kernel]
    count = shape.samples * prod(_ceil(one, output) for one in shape.made)
    return 4 * tile * (count * (shape.source + shape.result) + shape.source * shape.result)


def _partial_sums(shape: Shape) -> int:
    """fp32 weight gradients, one copy a group of multiprocessors that shares the work."""
    gradient = shape.result * shape.weight_source * shape.window * 4
    if len(shape.image) == 1 and shape.arithmetic == "fp16" and min(shape.source, shape.result) > 256:  # noqa: PLR2004
        return 0
    if shape.arithmetic == "tf32":
        tiles = shape.window * _ceil(shape.source, 128) * _ceil(shape.result, 128)
        parts = MULTIPROCESSORS // tiles
        return parts * gradient if parts > 1 else MULTIPROCESSORS * 2**16
    work = shape.samples * shape.pixels
    if len(shape.image) == VOLUME:
        product = shape.source * shape.result
        few = 4 if product <= 128 * 64 else 2 if product <= 128 * 128 else 0
        return few * gradient if work > 128 * 128 else 0
    tiles = shape.window * _ceil(shape.source, 256) * _ceil(shape.result, 128)
    if work >= 90_000 or (shape.source >= 256 and work >= 65_536):  # noqa: PLR2004
        parts = (MULTIPROCESSORS if tiles > 9 else 117) // tiles  # noqa: PLR2004
    else:
        parts = 54 // tiles
    return parts * gradient if parts > 1 else 0


def _tensor_cores(shape: Shape, phase: str) -> int:
    stem = shape.arithmetic == "fp16" and shape.source <= FEW_CHANNELS and shape.window == 49  # noqa: PLR2004
    align = 4 if shape.arithmetic == "tf32" or (stem and phase != "source") else 8
    if shape.last:
        return _already_last(shape, phase, align)
    if shape.window == 1 and shape.stride == 1:
        return _pointwise(shape, phase, align)
    if shape.source <= FEW_CHANNELS:
        return _few_channels(shape, phase, align)
    if phase == "forward" and shape.arithmetic == "tf32" and _small_output_stays(shape):
        source = shape.padded(shape.source, prod(shape.image), align)
        return source + _up(shape.result, align) * _up(shape.weight_source, align) * shape.window * 4
    moved = shape.copies(align, weight=shape.window > 1)
    return moved + (_partial_sums(shape) if phase == "weight" else 0)


def _small_output_stays(shape: Shape) -> bool:
    if len(shape.image) != 2:  # noqa: PLR2004
        return False
    narrow = shape.source <= 64 and shape.result <= 128  # noqa: PLR2004
    small = shape.stride == 2 or (shape.samples <= 32 and shape.pixels <= 56 * 56)  # noqa: PLR2004
    thin = shape.result <= 24 and shape.samples * shape.pixels <= 32768  # noqa: PLR2004
    return (narrow and small) or thin


def _already_last(shape: Shape, phase: str, align: int) -> int:
    total = 0
    if shape.window == 1 and shape.stride == 1 and shape.bytes == 2 and shape.source > FEW_CHANNELS:  # noqa: PLR2004
        # A matrix product, which pads nothing but the input of a weight gradient.
        padded = shape.source % align and phase == "weight"
        total = shape.padded(shape.source, prod(shape.image), align) if padded else 0
        return total + (4_456_720 if phase == "weight" else 0)
    if shape.source % align:
        total += shape.padded(shape.source, prod(shape.image), align)
    if shape.result % align:
        total += shape.padded(shape.result, shape.pixels, align)
    if shape.source <= FEW_CHANNELS and phase == "forward":
        if shape.arithmetic == "tf32":
            total = shape.padded(shape.source, prod(shape.image), 1) if shape.window > 1 else 0
        elif shape.window <= 9:  # noqa: PLR2004
            total = 0
    if phase != "weight":
        return total
    if shape.window > 1:
        return total + _partial_sums(shape)
    return total + (MULTIPROCESSORS * 2**17 if shape.bytes == FOUR else 4_456_720)


def _pointwise(shape: Shape, phase: str, align: int) -> int:
    moved = shape.copies(align, weight=False)
    if phase == "weight":
        if len(shape.image) == VOLUME and (shape.source % align or shape.result % align):
            return moved
        direct = shape.pixels >= 14 * 14 and not (shape.bytes == 2 and shape.pixels == 256)  # noqa: PLR2004
        return shape.samples * shape.source * shape.result * 4 if direct else moved
    small = shape.pixels <= (64 if phase == "forward" else 49)
    return moved if small else 0


def _few_channels(shape: Shape, phase: str, align: int) -> int:
    moved = shape.copies(align)
    plain = shape.arithmetic == "tf32"
    if phase == "forward":
        return 0 if shape.window <= 9 or (plain and len(shape.image) == 1) else moved  # noqa: PLR2004
    if plain and shape.window <= 10:  # noqa: PLR2004
        return 0
    if phase == "source":
        return moved if shape.bytes == 2 or shape.window == 49 else 0  # noqa: PLR2004
    if len(shape.image) == 1:
        moved -= shape.padded(shape.source, prod(shape.image), align)
    return moved + _partial_sums(shape)
