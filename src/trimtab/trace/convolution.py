"""What cuDNN takes for a convolution, by the algorithm it would choose.

The sizes follow from the algorithms: copies of input, output and weights in the layout that tensor cores
want, partial sums of weight gradients, tiles of Winograd and FFT transforms. Which algorithm cuDNN chooses is
not documented: the limits that were read off calls, and how well they hold, are in
`catalog/calibrations/h200.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from trimtab.catalog.facts import fallback_facts

if TYPE_CHECKING:
    import torch

    from trimtab.catalog.facts import ConvolutionFacts

FOUR = 4
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


def multiprocessors() -> int:
    """Return those of the GPU whose workspaces were measured."""
    return fallback_facts().workspace.multiprocessors


def workspace(shape: Shape, phase: str) -> int:
    """Bytes of workspace; phase is forward, source (its gradient) or weight (its gradient)."""
    if shape.groups > 1 and shape.groups == shape.source:
        return 0
    by_algorithm = _exact if shape.arithmetic == "fp32" else _tensor_cores
    return by_algorithm(shape, phase, fallback_facts().convolution)


def _exact(shape: Shape, phase: str, facts: ConvolutionFacts) -> int:
    """fp32 without TF32: FFT forward, tiled FFT and Winograd backward, or nothing."""
    transform = _transform(shape, phase, facts)
    weight = shape.window > 1
    if shape.last:
        if phase == "weight":
            return shape.copies(1, weight=weight) + transform if transform else 0
        if phase == "forward" and min(shape.source, shape.result) <= facts.few_channels:
            return 0
        return shape.copies(1, weight=weight) + transform
    if transform or phase != "weight" or shape.groups > 1:
        return transform
    return _exact_weight(shape, facts)


def _exact_weight(shape: Shape, facts: ConvolutionFacts) -> int:
    """fp32 gradients of weights where nothing is transformed: copies in another layout, or nothing."""
    if len(shape.image) == 1:
        numbers = shape.source * shape.result * shape.window
        long = shape.window >= facts.line_copy_window and numbers > facts.line_copy_numbers
        return shape.copies(1) if long else 0
    if len(shape.image) == VOLUME:
        return shape.copies(1) if shape.window > 1 and shape.source > facts.few_channels else 0
    small = shape.pixels <= facts.image_copy_pixels and shape.source >= facts.image_copy_channels
    strided = shape.stride > 1 or shape.window == 1
    return shape.copies(1, weight=shape.window > 1) if small and strided else 0


def _transform(shape: Shape, phase: str, facts: ConvolutionFacts) -> int:
    """Transformed tiles; 0 where cuDNN multiplies directly."""
    if len(shape.image) != 2 or shape.stride != 1 or shape.window == 1 or shape.groups > 1:  # noqa: PLR2004
        return 0
    if phase == "forward":
        return _fft(shape, facts)
    if phase == "source":
        return _tiled_fft(shape, facts)
    return _winograd(shape, facts)


def _fft(shape: Shape, facts: ConvolutionFacts) -> int:
    few, many = sorted((shape.source, shape.result))
    side, kernel, batch = max(shape.image), shape.kernel[0], shape.samples
    if kernel != facts.fft_kernel or side > facts.fft_side or few < facts.fft_channels:
        return 0
    if batch >= facts.fft_many_samples:
        small = side <= facts.fft_small_side
        growing, shrinking = shape.result > shape.source, shape.result < shape.source
        chosen = not (small and growing) and not (not small and shrinking)
        chosen = chosen and 2 * shape.result >= shape.source
    else:
        chosen = side >= facts.fft_few_samples_side and few * many <= facts.fft_few_samples_product
    tile = max(16, 1 << (side + kernel - 2).bit_length())
    spectrum = 2 * (batch + shape.result) * tile * (tile + 2)
    return 4 * shape.source * (shape.window * shape.result + spectrum) if chosen else 0


def _tiled_fft(shape: Shape, facts: ConvolutionFacts) -> int:
    few, side, kernel = min(shape.source, shape.result), max(shape.image), shape.kernel[0]
    product = shape.source * shape.result
    wide = few >= facts.tiled_channels or shape.source >= facts.tiled_source
    many = side >= facts.tiled_small_side and product >= facts.tiled_small_side_product
    large = side >= facts.tiled_side or many
    if kernel > facts.tiled_kernel or shape.samples == 1 or not wide or not large:
        return 0
    tiles = 1 if side + kernel - 1 <= 32 else 2  # noqa: PLR2004
    return 4352 * (product + tiles * shape.samples * (shape.source + shape.result))


def _winograd(shape: Shape, facts: ConvolutionFacts) -> int:
    side, kernel = max(shape.image), shape.kernel[0]
    few = min(shape.source, shape.result)
    wide = few >= facts.winograd_channels or shape.source >= facts.winograd_source
    large = side >= facts.winograd_large_side and shape.source < facts.winograd_large_side_source
    if kernel not in (3, 5) or not wide or large:
        return 0
    output, tile = {3: (4, 36), 5: (9, 169)}[kernel]
    count = shape.samples * prod(_ceil(one, output) for one in shape.made)
    return 4 * tile * (count * (shape.source + shape.result) + shape.source * shape.result)


def _partial_sums(shape: Shape, facts: ConvolutionFacts) -> int:
    """fp32 weight gradients, one copy a group of multiprocessors that shares the work."""
    gradient = shape.result * shape.weight_source * shape.window * 4
    few = min(shape.source, shape.result)
    if len(shape.image) == 1 and shape.arithmetic == "fp16" and few > facts.line_fp16_channels:
        return 0
    if shape.arithmetic == "tf32":
        tiles = shape.window * _ceil(shape.source, 128) * _ceil(shape.result, 128)
        parts = multiprocessors() // tiles
        return parts * gradient if parts > 1 else multiprocessors() * 2**16
    work = shape.samples * shape.pixels
    if len(shape.image) == VOLUME:
        product = shape.source * shape.result
        copies = 4 if product <= facts.volume_product else 2 if product <= 2 * facts.volume_product else 0
        return copies * gradient if work > facts.volume_work else 0
    tiles = shape.window * _ceil(shape.source, 256) * _ceil(shape.result, 128)
    deep = shape.source >= facts.wave_channels and work >= facts.wave_channels_work
    if work >= facts.wave_work or deep:
        parts = (multiprocessors() if tiles > facts.wave_tiles else facts.wave_blocks) // tiles
    else:
        parts = facts.small_wave_blocks // tiles
    return parts * gradient if parts > 1 else 0


def _tensor_cores(shape: Shape, phase: str, facts: ConvolutionFacts) -> int:
    few = shape.source <= facts.few_channels
    stem = shape.arithmetic == "fp16" and few and shape.window == facts.stem_window
    align = 4 if shape.arithmetic == "tf32" or (stem and phase != "source") else 8
    if shape.last:
        return _already_last(shape, phase, align, facts)
    if shape.window == 1 and shape.stride == 1:
        return _pointwise(shape, phase, align, facts)
    if few:
        return _few_channels(shape, phase, align, facts)
    if phase == "forward" and shape.arithmetic == "tf32" and _small_output_stays(shape, facts):
        source = shape.padded(shape.source, prod(shape.image), align)
        return source + _up(shape.result, align) * _up(shape.weight_source, align) * shape.window * 4
    moved = shape.copies(align, weight=shape.window > 1)
    return moved + (_partial_sums(shape, facts) if phase == "weight" else 0)


def _small_output_stays(shape: Shape, facts: ConvolutionFacts) -> bool:
    if len(shape.image) != 2:  # noqa: PLR2004
        return False
    narrow = shape.source <= facts.stays_source and shape.result <= facts.stays_result
    little = shape.samples <= facts.stays_samples and shape.pixels <= facts.stays_pixels
    thin = shape.result <= facts.thin_result and shape.samples * shape.pixels <= facts.thin_work
    return (narrow and (shape.stride == 2 or little)) or thin  # noqa: PLR2004 - every other pixel


def _already_last(shape: Shape, phase: str, align: int, facts: ConvolutionFacts) -> int:
    total, few = 0, shape.source <= facts.few_channels
    if shape.window == 1 and shape.stride == 1 and shape.bytes == 2 and not few:  # noqa: PLR2004
        # A matrix product, which pads nothing but the input of a weight gradient.
        padded = shape.source % align and phase == "weight"
        total = shape.padded(shape.source, prod(shape.image), align) if padded else 0
        return total + (facts.matrix_workspace_bytes if phase == "weight" else 0)
    if shape.source % align:
        total += shape.padded(shape.source, prod(shape.image), align)
    if shape.result % align:
        total += shape.padded(shape.result, shape.pixels, align)
    if few and phase == "forward":
        if shape.arithmetic == "tf32":
            total = shape.padded(shape.source, prod(shape.image), 1) if shape.window > 1 else 0
        elif shape.window <= facts.few_forward_window:
            total = 0
    if phase != "weight":
        return total
    if shape.window > 1:
        return total + _partial_sums(shape, facts)
    return total + (multiprocessors() * 2**17 if shape.bytes == FOUR else facts.matrix_workspace_bytes)


def _pointwise(shape: Shape, phase: str, align: int, facts: ConvolutionFacts) -> int:
    moved = shape.copies(align, weight=False)
    if phase == "weight":
        if len(shape.image) == VOLUME and (shape.source % align or shape.result % align):
            return moved
        indirect = shape.bytes == 2 and shape.pixels == facts.indirect_half_pixels  # noqa: PLR2004
        direct = shape.pixels >= facts.direct_pixels and not indirect
        return shape.samples * shape.source * shape.result * 4 if direct else moved
    most = facts.copied_forward_pixels if phase == "forward" else facts.copied_backward_pixels
    return moved if shape.pixels <= most else 0


def _few_channels(shape: Shape, phase: str, align: int, facts: ConvolutionFacts) -> int:
    moved = shape.copies(align)
    plain = shape.arithmetic == "tf32"
    if phase == "forward":
        in_place = shape.window <= facts.few_forward_window or (plain and len(shape.image) == 1)
        return 0 if in_place else moved
    if plain and shape.window <= facts.few_backward_window:
        return 0
    if phase == "source":
        return moved if shape.bytes == 2 or shape.window == facts.stem_window else 0  # noqa: PLR2004
    if len(shape.image) == 1:
        moved -= shape.padded(shape.source, prod(shape.image), align)
    return moved + _partial_sums(shape, facts)
