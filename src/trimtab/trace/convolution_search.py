"""Estimate the workspace of cuDNN's search for the fastest convolution (`torch.backends.cudnn.benchmark`).

At the first call of each shape, torch asks cuDNN for all kernels that can compute it, allocates the largest
workspace that any of them needs, times them, frees the workspace and empties the allocator's cache. A kernel
that needs more than the largest free block is left out, so a search does not run out of memory.

The sizes follow from the algorithms: tiles of FFT and Winograd transforms, copies in another layout, partial
sums. They were compared with the sizes that cuDNN 9.19 reports on an H200 for 452 convolutions: those of FFT
and Winograd kernels agree to 1 %. Which kernels cuDNN proposes for a shape is not documented. The limits here
give the largest workspace within 8 % for about nine in ten of the searches that take 200 MB or more.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from trimtab.trace.convolution import reference_multiprocessors

if TYPE_CHECKING:
    from trimtab.trace.convolution import ConvolutionShape

FLAT = 2
"""Dimensions of an image. Signals and volumes are not transformed."""
SMALLEST_TRANSFORM, LARGEST_TRANSFORM = 16, 256
"""Sides of an FFT over a whole image: powers of two."""
TILE = 32
"""Side of the tiles of the FFT for input gradients."""
TILE_BYTES = 8 * TILE * (TILE // 2 + 1)
"""A transformed tile: complex numbers, without the half that is redundant."""
LARGEST_TILED = 2**31
"""cuDNN offers no tiled FFT with a larger workspace."""
MANY_SAMPLES = 64
"""From here on, kernels of one pixel are transformed as well."""
FEW_CHANNELS = 16
"""Up to this many output channels, gradients of weights are not transformed over the whole image."""
STEM_CHANNELS, STEM_WINDOW = 4, 49
"""Input channels (at most) and kernel size of the first layer of many image models, which has own kernels."""
WINOGRAD_TILES = {3: (4, 36), 5: (9, 169)}
"""Kernel, output pixels of a tile's side, and numbers in a transformed tile."""
HALF_BYTES = 2


def list_search_bytes(shape: ConvolutionShape, phase: str) -> list[int]:
    """Return the workspaces of the kernels that cuDNN tries, largest first; empty if it is not asked.

    `phase` is forward, source (input gradient) or weight (its gradient).
    """
    if shape.groups > 1 and shape.groups == shape.in_channels:
        # torch has its own kernels for depthwise convolutions.
        return []
    sizes = [_direct_bytes(shape, phase)]
    if shape.element_bytes > HALF_BYTES and len(shape.image) == FLAT:
        sizes += _transform_sizes(shape, phase)
    return sorted(sizes, reverse=True)


def _transform_sizes(shape: ConvolutionShape, phase: str) -> list[int]:
    """Return the workspaces of FFT and Winograd kernels, which compute in fp32."""
    if phase == "source":
        size = _tiled_fft_bytes(shape)
        return [size] if max(shape.kernel) >= 3 and size <= LARGEST_TILED else []  # noqa: PLR2004
    if shape.stride != 1:
        return []
    side = _transform_side(shape)
    if phase == "forward":
        tried = shape.window > 1 or shape.samples >= MANY_SAMPLES
        return [_fft_bytes(shape, side)] if tried and side <= LARGEST_TRANSFORM else []
    sizes = [_winograd_bytes(shape)]
    if (shape.out_channels > FEW_CHANNELS or shape.window == 1) and side <= LARGEST_TRANSFORM:
        sizes.append(_weight_fft_bytes(shape, side))
    return sizes


def _transform_side(shape: ConvolutionShape) -> int:
    """Return the side of an FFT over the padded image."""
    padded = max(out + kernel - 1 for out, kernel in zip(shape.out_image, shape.kernel, strict=True))
    return max(SMALLEST_TRANSFORM, 1 << (padded - 1).bit_length())


def _group_channels(shape: ConvolutionShape) -> tuple[int, int]:
    return shape.in_channels // shape.groups, shape.out_channels // shape.groups


def _layout_bytes(shape: ConvolutionShape) -> int:
    """Return the copies for kernels that need channels first and one group."""
    if not shape.is_channels_last and shape.groups == 1:
        return 0
    return shape.copy_bytes(1, weight=shape.is_channels_last and shape.window > 1)


def _fft_bytes(shape: ConvolutionShape, side: int) -> int:
    """Return the spectra of inputs and weights, or of the outputs if they are more; and the weights."""
    inputs, outputs = _group_channels(shape)
    weights = inputs * outputs
    spectra = max(shape.samples * inputs + weights, shape.samples * outputs)
    each = 4 * shape.window * weights + 8 * spectra * side * (side + 2)
    return shape.groups * each + _layout_bytes(shape)


def _weight_fft_bytes(shape: ConvolutionShape, side: int) -> int:
    """Return two buffers of spectra, and a copy of the output's gradient."""
    inputs, outputs = _group_channels(shape)
    spectra = 2 * max(inputs * outputs, shape.samples * (inputs + outputs))
    each = 8 * side * (side // 2 + 1) * spectra + 4 * shape.samples * outputs * shape.pixels
    return shape.groups * each + _layout_bytes(shape)


def _winograd_bytes(shape: ConvolutionShape) -> int:
    """Return the transformed tiles of inputs, outputs and weights; 0 for other kernel sizes."""
    if shape.kernel[0] not in WINOGRAD_TILES:
        return 0
    inputs, outputs = _group_channels(shape)
    output, numbers = WINOGRAD_TILES[shape.kernel[0]]
    tiles = shape.samples * prod(-(-side // output) for side in shape.out_image)
    each = 4 * numbers * (tiles * (inputs + outputs) + inputs * outputs)
    return shape.groups * each + _layout_bytes(shape)


def _tiled_fft_bytes(shape: ConvolutionShape) -> int:
    """Return the transformed tiles of inputs, outputs and weights.

    A stride divides the input and the kernel into a part for each remainder; these are copied beside.
    """
    inputs, outputs = _group_channels(shape)
    samples, stride = shape.samples, shape.stride
    if stride == 1:
        tiles = 1 if max(shape.image) + shape.kernel[0] - 1 <= TILE else 2
        each = TILE_BYTES * (inputs * outputs + tiles * samples * (inputs + outputs))
        return shape.groups * each + _layout_bytes(shape)
    inputs, outputs = -(-inputs // 2) * 2, -(-outputs // 8) * 8
    kernel = -(-shape.kernel[0] // stride)
    tiles = 1 if max(shape.out_image) + kernel - 1 <= TILE else 2
    parts = stride * stride
    each = TILE_BYTES * (inputs * outputs * parts + tiles * samples * (inputs * parts + outputs))
    image = prod(stride * -(-side // stride) for side in shape.image)
    result = prod(side + kernel - 1 for side in shape.out_image)
    each += 4 * samples * (inputs * image + outputs * result)
    each += 4 * inputs * outputs * (stride * kernel) ** 2
    return shape.groups * each


def _direct_bytes(shape: ConvolutionShape, phase: str) -> int:
    """Return the workspace of kernels without a transform: copies in another layout, and partial sums."""
    if shape.arithmetic == "fp32":
        return shape.copy_bytes(1) if shape.is_channels_last or phase == "weight" else 0
    half = shape.element_bytes == HALF_BYTES
    copies = shape.copy_bytes(8 if half else 4)
    if phase == "forward":
        return _stem_bytes(shape, copies) if half and shape.in_channels <= STEM_CHANNELS else copies
    if phase == "source":
        return copies + (_fp32_gradient_bytes(shape) if half else 0)
    if half and shape.is_channels_last:
        copies = 0
    # One tile of partial sums for each multiprocessor.
    return copies + reference_multiprocessors() * (2**17 if half else 2**16)


def _stem_bytes(shape: ConvolutionShape, copies: int) -> int:
    """Return the workspace of a forward pass over few channels in half precision: its output in fp32."""
    result = 4 * shape.samples * shape.out_channels * shape.pixels
    if shape.window == STEM_WINDOW and not shape.is_channels_last:
        return copies + result
    return result + shape.padded_bytes(shape.in_channels, prod(shape.image), 8)


def _fp32_gradient_bytes(shape: ConvolutionShape) -> int:
    """Return the bytes of input gradients that are added up in fp32; 0 if no kernel does that."""
    if shape.is_channels_last or shape.stride > 2:  # noqa: PLR2004
        return 0
    if shape.window == 1 or (shape.in_channels <= STEM_CHANNELS and shape.window >= STEM_WINDOW):
        return 0
    if shape.stride == 1:
        narrow = shape.in_channels <= 64 and shape.out_channels >= 32  # noqa: PLR2004
        small = max(shape.image) <= 64  # noqa: PLR2004
        if not narrow or not small:
            return 0
    return 4 * shape.samples * -(-shape.in_channels // 32) * 32 * prod(shape.image)
