"""Estimate the workspace that cuDNN takes for a convolution.

The sizes follow from the algorithms: copies of input, output and weights in the layout for tensor cores,
partial sums of weight gradients, tiles of Winograd and FFT transforms. cuDNN's choice of algorithm is not
documented. The thresholds used here were measured; `catalog/calibrations/h200.toml` has them and their
errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from trimtab.catalog.facts import fallback_facts

if TYPE_CHECKING:
    import torch

    from trimtab.catalog.facts import ConvolutionFacts

IMAGE_DIMS = 4
VOLUME_DIMS = 3
"""Spatial dimensions of a volume."""


@dataclass(frozen=True, kw_only=True)
class ConvolutionShape:
    """Shape of a convolution. The order of the fields is stored in traces (`workspace_formulas`)."""

    samples: int
    in_channels: int
    out_channels: int
    image: tuple[int, ...]
    out_image: tuple[int, ...]
    """Size of the output image."""
    kernel: tuple[int, ...]
    stride: int
    groups: int
    weight_in_channels: int
    """Input channels of one group."""
    is_channels_last: bool
    element_bytes: int
    arithmetic: str
    """Number format of the multiplications: fp32, tf32, fp16 or bf16, as in the fields of Peaks."""

    @property
    def window(self) -> int:
        """Elements of the kernel, for one channel."""
        return prod(self.kernel)

    @property
    def pixels(self) -> int:
        """Elements of the output image, for one channel."""
        return prod(self.out_image)

    def copy_bytes(self, align: int, *, weight: bool = True) -> int:
        """Return the bytes of input, output and weights with padded channels."""
        source = self.samples * _round_up(self.in_channels, align) * prod(self.image)
        result = self.samples * _round_up(self.out_channels, align) * self.pixels
        weights = (
            _round_up(self.out_channels, align) * _round_up(self.weight_in_channels, align) * self.window
        )
        return (source + result + (weights if weight else 0)) * self.element_bytes

    def padded_bytes(self, channels: int, pixels: int, align: int) -> int:
        """Return the bytes of one tensor with padded channels."""
        return self.samples * _round_up(channels, align) * pixels * self.element_bytes


def _round_up(value: int, align: int) -> int:
    return -(-value // align) * align


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)


def is_channels_last(source: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch passes this convolution to cuDNN in a channels-last format."""
    import torch
    from torch._prims_common import suggest_memory_format

    last = {IMAGE_DIMS: torch.channels_last, IMAGE_DIMS + 1: torch.channels_last_3d}.get(source.dim())
    if last is None:
        return False
    # By strides alone, as torch does: a tensor with one channel may have both formats at once.
    return any(suggest_memory_format(tensor) is last for tensor in (source, weight))


def read_shape(
    source: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, stride: Any, groups: int
) -> ConvolutionShape:
    """Return the shape of a call. The stride of the first dimension is used for all."""
    import torch

    names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    plain = "tf32" if torch.backends.cudnn.allow_tf32 else "fp32"
    return ConvolutionShape(
        samples=source.shape[0],
        in_channels=source.shape[1],
        out_channels=result.shape[1],
        image=tuple(source.shape[2:]),
        out_image=tuple(result.shape[2:]),
        kernel=tuple(weight.shape[2:]),
        stride=stride[0] if isinstance(stride, list | tuple) else stride,
        groups=groups,
        weight_in_channels=weight.shape[1],
        is_channels_last=is_channels_last(source, weight),
        element_bytes=source.element_size(),
        arithmetic=names.get(source.dtype, plain),
    )


def reference_multiprocessors() -> int:
    """Return the number of multiprocessors of the GPU whose workspaces were measured."""
    return fallback_facts().workspace.multiprocessors


def workspace_bytes(shape: ConvolutionShape, phase: str) -> int:
    """Return the bytes of workspace; phase is forward, source (input gradient) or weight (its gradient)."""
    if shape.groups > 1 and shape.groups == shape.in_channels:
        return 0
    estimate = _fp32_bytes if shape.arithmetic == "fp32" else _tensor_core_bytes
    return estimate(shape, phase, fallback_facts().convolution)


def _fp32_bytes(shape: ConvolutionShape, phase: str, facts: ConvolutionFacts) -> int:
    """Return the workspace in fp32 without TF32: FFT forward, tiled FFT and Winograd backward, or nothing."""
    transform = _transform_bytes(shape, phase, facts)
    weight = shape.window > 1
    if shape.is_channels_last:
        if phase == "weight":
            return shape.copy_bytes(1, weight=weight) + transform if transform else 0
        if phase == "forward" and min(shape.in_channels, shape.out_channels) <= facts.few_channels:
            return 0
        return shape.copy_bytes(1, weight=weight) + transform
    if transform or phase != "weight" or shape.groups > 1:
        return transform
    return _fp32_weight_bytes(shape, facts)


def _fp32_weight_bytes(shape: ConvolutionShape, facts: ConvolutionFacts) -> int:
    """Return the workspace of fp32 weight gradients without a transform: copies in another layout, or 0."""
    if len(shape.image) == 1:
        numbers = shape.in_channels * shape.out_channels * shape.window
        long = shape.window >= facts.line_copy_window and numbers > facts.line_copy_numbers
        return shape.copy_bytes(1) if long else 0
    if len(shape.image) == VOLUME_DIMS:
        return shape.copy_bytes(1) if shape.window > 1 and shape.in_channels > facts.few_channels else 0
    small = shape.pixels <= facts.image_copy_pixels and shape.in_channels >= facts.image_copy_channels
    strided = shape.stride > 1 or shape.window == 1
    return shape.copy_bytes(1, weight=shape.window > 1) if small and strided else 0


def _transform_bytes(shape: ConvolutionShape, phase: str, facts: ConvolutionFacts) -> int:
    """Return the bytes of transformed tiles; 0 if cuDNN multiplies directly."""
    if len(shape.image) != 2 or shape.stride != 1 or shape.window == 1 or shape.groups > 1:  # noqa: PLR2004
        return 0
    if phase == "forward":
        return _fft_bytes(shape, facts)
    if phase == "source":
        return _tiled_fft_bytes(shape, facts)
    return _winograd_bytes(shape, facts)


def _fft_bytes(shape: ConvolutionShape, facts: ConvolutionFacts) -> int:
    few, many = sorted((shape.in_channels, shape.out_channels))
    side, kernel, batch = max(shape.image), shape.kernel[0], shape.samples
    if kernel != facts.fft_kernel or side > facts.fft_side or few < facts.fft_channels:
        return 0
    if batch >= facts.fft_many_samples:
        small = side <= facts.fft_small_side
        growing, shrinking = shape.out_channels > shape.in_channels, shape.out_channels < shape.in_channels
        chosen = not (small and growing) and not (not small and shrinking)
        chosen = chosen and 2 * shape.out_channels >= shape.in_channels
    else:
        chosen = side >= facts.fft_few_samples_side and few * many <= facts.fft_few_samples_product
    tile = max(16, 1 << (side + kernel - 2).bit_length())
    spectrum = 2 * (batch + shape.out_channels) * tile * (tile + 2)
    return 4 * shape.in_channels * (shape.window * shape.out_channels + spectrum) if chosen else 0


def _tiled_fft_bytes(shape: ConvolutionShape, facts: ConvolutionFacts) -> int:
    few, side, kernel = min(shape.in_channels, shape.out_channels), max(shape.image), shape.kernel[0]
    product = shape.in_channels * shape.out_channels
    wide = few >= facts.tiled_channels or shape.in_channels >= facts.tiled_source
    many = side >= facts.tiled_small_side and product >= facts.tiled_small_side_product
    large = side >= facts.tiled_side or many
    if kernel > facts.tiled_kernel or shape.samples == 1 or not wide or not large:
        return 0
    tiles = 1 if side + kernel - 1 <= 32 else 2  # noqa: PLR2004
    return 4352 * (product + tiles * shape.samples * (shape.in_channels + shape.out_channels))


def _winograd_bytes(shape: ConvolutionShape, facts: ConvolutionFacts) -> int:
    side, kernel = max(shape.image), shape.kernel[0]
    few = min(shape.in_channels, shape.out_channels)
    wide = few >= facts.winograd_channels or shape.in_channels >= facts.winograd_source
    large = side >= facts.winograd_large_side and shape.in_channels < facts.winograd_large_side_source
    if kernel not in (3, 5) or not wide or large:
        return 0
    output, tile = {3: (4, 36), 5: (9, 169)}[kernel]
    count = shape.samples * prod(_ceil_div(side, output) for side in shape.out_image)
    product = shape.in_channels * shape.out_channels
    return 4 * tile * (count * (shape.in_channels + shape.out_channels) + product)


def _partial_sum_bytes(shape: ConvolutionShape, facts: ConvolutionFacts) -> int:
    """Return the bytes of fp32 partial gradients: one copy per group of multiprocessors."""
    gradient = shape.out_channels * shape.weight_in_channels * shape.window * 4
    few = min(shape.in_channels, shape.out_channels)
    if len(shape.image) == 1 and shape.arithmetic == "fp16" and few > facts.line_fp16_channels:
        return 0
    if shape.arithmetic == "tf32":
        tiles = shape.window * _ceil_div(shape.in_channels, 128) * _ceil_div(shape.out_channels, 128)
        parts = reference_multiprocessors() // tiles
        return parts * gradient if parts > 1 else reference_multiprocessors() * 2**16
    work = shape.samples * shape.pixels
    if len(shape.image) == VOLUME_DIMS:
        product = shape.in_channels * shape.out_channels
        copies = 4 if product <= facts.volume_product else 2 if product <= 2 * facts.volume_product else 0
        return copies * gradient if work > facts.volume_work else 0
    tiles = shape.window * _ceil_div(shape.in_channels, 256) * _ceil_div(shape.out_channels, 128)
    deep = shape.in_channels >= facts.wave_channels and work >= facts.wave_channels_work
    if work >= facts.wave_work or deep:
        parts = (reference_multiprocessors() if tiles > facts.wave_tiles else facts.wave_blocks) // tiles
    else:
        parts = facts.small_wave_blocks // tiles
    return parts * gradient if parts > 1 else 0


def _tensor_core_bytes(shape: ConvolutionShape, phase: str, facts: ConvolutionFacts) -> int:
    few = shape.in_channels <= facts.few_channels
    stem = shape.arithmetic == "fp16" and few and shape.window == facts.stem_window
    align = 4 if shape.arithmetic == "tf32" or (stem and phase != "source") else 8
    if shape.is_channels_last:
        return _channels_last_bytes(shape, phase, align, facts)
    if shape.window == 1 and shape.stride == 1:
        return _pointwise_bytes(shape, phase, align, facts)
    if few:
        return _few_channel_bytes(shape, phase, align, facts)
    if phase == "forward" and shape.arithmetic == "tf32" and _keeps_small_output(shape, facts):
        weights = _round_up(shape.out_channels, align) * _round_up(shape.weight_in_channels, align)
        return shape.padded_bytes(shape.in_channels, prod(shape.image), align) + weights * shape.window * 4
    moved = shape.copy_bytes(align, weight=shape.window > 1)
    return moved + (_partial_sum_bytes(shape, facts) if phase == "weight" else 0)


def _keeps_small_output(shape: ConvolutionShape, facts: ConvolutionFacts) -> bool:
    """Whether a small output is written directly, without a copy in another layout."""
    if len(shape.image) != 2:  # noqa: PLR2004
        return False
    narrow = shape.in_channels <= facts.stays_source and shape.out_channels <= facts.stays_result
    small = shape.samples <= facts.stays_samples and shape.pixels <= facts.stays_pixels
    thin = shape.out_channels <= facts.thin_result and shape.samples * shape.pixels <= facts.thin_work
    return (narrow and (shape.stride == 2 or small)) or thin  # noqa: PLR2004 - every other pixel


def _channels_last_bytes(shape: ConvolutionShape, phase: str, align: int, facts: ConvolutionFacts) -> int:
    total, few = 0, shape.in_channels <= facts.few_channels
    if shape.window == 1 and shape.stride == 1 and shape.element_bytes == 2 and not few:  # noqa: PLR2004
        # A matrix product: it pads only the input of a weight gradient.
        padded = shape.in_channels % align and phase == "weight"
        total = shape.padded_bytes(shape.in_channels, prod(shape.image), align) if padded else 0
        return total + (facts.matrix_workspace_bytes if phase == "weight" else 0)
    if shape.in_channels % align:
        total += shape.padded_bytes(shape.in_channels, prod(shape.image), align)
    if shape.out_channels % align:
        total += shape.padded_bytes(shape.out_channels, shape.pixels, align)
    if few and phase == "forward":
        if shape.arithmetic == "tf32":
            total = shape.padded_bytes(shape.in_channels, prod(shape.image), 1) if shape.window > 1 else 0
        elif shape.window <= facts.few_forward_window:
            total = 0
    if phase != "weight":
        return total
    if shape.window > 1:
        return total + _partial_sum_bytes(shape, facts)
    return total + (
        reference_multiprocessors() * 2**17
        if shape.element_bytes == IMAGE_DIMS
        else facts.matrix_workspace_bytes
    )


def _pointwise_bytes(shape: ConvolutionShape, phase: str, align: int, facts: ConvolutionFacts) -> int:
    moved = shape.copy_bytes(align, weight=False)
    if phase == "weight":
        if len(shape.image) == VOLUME_DIMS and (shape.in_channels % align or shape.out_channels % align):
            return moved
        indirect = shape.element_bytes == 2 and shape.pixels == facts.indirect_half_pixels  # noqa: PLR2004
        direct = shape.pixels >= facts.direct_pixels and not indirect
        return shape.samples * shape.in_channels * shape.out_channels * 4 if direct else moved
    most = facts.copied_forward_pixels if phase == "forward" else facts.copied_backward_pixels
    return moved if shape.pixels <= most else 0


def _few_channel_bytes(shape: ConvolutionShape, phase: str, align: int, facts: ConvolutionFacts) -> int:
    moved = shape.copy_bytes(align)
    plain = shape.arithmetic == "tf32"
    if phase == "forward":
        in_place = shape.window <= facts.few_forward_window or (plain and len(shape.image) == 1)
        return 0 if in_place else moved
    if plain and shape.window <= facts.few_backward_window:
        return 0
    if phase == "source":
        return moved if shape.element_bytes == 2 or shape.window == facts.stem_window else 0  # noqa: PLR2004
    if len(shape.image) == 1:
        moved -= shape.padded_bytes(shape.in_channels, prod(shape.image), align)
    return moved + _partial_sum_bytes(shape, facts)
