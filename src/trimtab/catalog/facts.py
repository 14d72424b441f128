"""Read the measured figures of a device from calibration TOML files.

    facts_of(device).step.gap_s        # from the device's own file, or from the fallback
    device_facts()                     # every measured device, the fallback first

To add a measured GPU, add a file in `calibrations/`; h200.toml explains each figure.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from trimtab.spec import Device


class Facts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures with one source: a program or a document."""

    source: str


class HostFacts(Facts, frozen=True, kw_only=True):
    """Host seconds per kind of work in a step."""

    bare_forward_s: float
    linear_s: float
    power: float
    usual: float
    fastest: float
    slowest: float
    forward_s: float
    backward_s: float
    plain_s: float
    view_s: float
    backward_view_s: float
    call_s: float
    tensor_s: float
    wait_s: float
    compiled_s: float
    graph_s: float
    dtensor_op_s: float
    dtensor_s: float
    sharded_s: float
    update_s: float


class StepFacts(Facts, frozen=True, kw_only=True):
    """Step costs in addition to its operations: launches, gaps, throttling."""

    queue: int
    gap_s: float
    start_s: float
    saved_s: float
    restored_s: float
    watched_s: float
    block_s: float
    fresh_s: float
    piece_s: float
    pieces: tuple[tuple[str, int], ...]
    throttled: float
    throttles_from: float
    throttles_at: float

    def pieces_of(self, operation: str) -> int:
        """Return how many launches an operation takes on the host."""
        return next((count for name, count in self.pieces if name == operation), 1)


class LawFacts(Facts, frozen=True, kw_only=True):
    """The figures of the roofline that operations are compared with."""

    sustained: float
    streamed: float
    launch_s: float
    tiles: tuple[tuple[int, int, float], ...]
    misaligned: tuple[tuple[int, float], ...]
    cell_kernel_s: float
    cell_launch_s: float
    cell_in_a_step: float
    additions_per_s: float
    indexed_additions_per_s: float
    addition_s: float
    norm_step_s: float
    norm_rows_per_s: float
    norm_column_step_s: float
    norm_sums_s: float
    generated_streamed: float
    generated_tiled: float
    generated_issued: float
    searched_per_s: float
    search_block_s: float
    solved: float

    def loading(self, alignment: int) -> float:
        """Return the share of full speed with rows aligned to this many bytes."""
        return next((share for size, share in self.misaligned if size == alignment), 1.0)


class MemoryFacts(Facts, frozen=True, kw_only=True):
    """Memory of a process in addition to its tensors, and the error bands of memory predictions."""

    context_bytes: int
    sharded_context_bytes: int
    band_low: float
    band_high: float
    compiled_band_low: float
    guessed_low: float
    guessed_high: float
    guessed_again: float

    def with_context(self, size: int) -> MemoryFacts:
        """Return the same figures with a context of this many bytes."""
        return msgspec.structs.replace(self, context_bytes=size, sharded_context_bytes=size)


class WorkspaceFacts(Facts, frozen=True, kw_only=True):
    """Device property that workspace sizes depend on, in addition to shapes."""

    multiprocessors: int


class ConvolutionFacts(Facts, frozen=True, kw_only=True):
    """The limits by which cuDNN chooses an algorithm for a convolution."""

    few_channels: int
    matrix_workspace_bytes: int
    line_copy_window: int
    line_copy_numbers: int
    image_copy_pixels: int
    image_copy_channels: int
    fft_kernel: int
    fft_side: int
    fft_channels: int
    fft_many_samples: int
    fft_small_side: int
    fft_few_samples_side: int
    fft_few_samples_product: int
    tiled_kernel: int
    tiled_channels: int
    tiled_source: int
    tiled_side: int
    tiled_small_side: int
    tiled_small_side_product: int
    winograd_channels: int
    winograd_source: int
    winograd_large_side: int
    winograd_large_side_source: int
    line_fp16_channels: int
    wave_blocks: int
    wave_tiles: int
    small_wave_blocks: int
    wave_work: int
    wave_channels: int
    wave_channels_work: int
    volume_work: int
    volume_product: int
    stays_source: int
    stays_result: int
    stays_samples: int
    stays_pixels: int
    thin_result: int
    thin_work: int
    direct_pixels: int
    indirect_half_pixels: int
    copied_forward_pixels: int
    copied_backward_pixels: int
    few_forward_window: int
    few_backward_window: int
    stem_window: int


class CellFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values per hidden unit in cuDNN's workspace: per input, and per sample of each layer."""

    padded: tuple[int, int]
    padded_both: tuple[int, int]
    packed: tuple[int, int]
    packed_both: tuple[int, int]

    def numbers(self, *, packed: bool, both: bool) -> tuple[int, int]:
        """Return the pair for packed or padded sequences, in one direction or both."""
        one_way, two_ways = (self.packed, self.packed_both) if packed else (self.padded, self.padded_both)
        return two_ways if both else one_way


class RecurrentFacts(Facts, frozen=True, kw_only=True):
    """Workspaces of recurrent layers, by kind of cell."""

    kernel_bytes: int
    narrow: int
    lstm: CellFacts
    gru: CellFacts
    plain: CellFacts


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All figures that were measured on one device."""

    device: str
    """A row of devices.toml."""
    spoken: str
    """Name of the device for messages."""
    fallback: bool = False
    """Whether devices without a file use these figures; true in exactly one file."""
    taken_on: str
    versions: dict[str, str]
    operations: tuple[str, ...]
    """Files with the seconds of single operations."""
    host: HostFacts
    step: StepFacts
    law: LawFacts
    memory: MemoryFacts
    workspace: WorkspaceFacts
    convolution: ConvolutionFacts
    recurrent: RecurrentFacts


def calibration_file(name: str) -> Traversable:
    """Return a file of the calibrations folder."""
    return files("trimtab.catalog").joinpath("calibrations").joinpath(name)


@cache
def device_facts() -> tuple[DeviceFacts, ...]:
    """Read the figures of every measured device, the fallback first."""
    texts = [
        file.read_text(encoding="utf-8")
        for file in sorted(files("trimtab.catalog").joinpath("calibrations").iterdir(), key=lambda f: f.name)
        if file.name.endswith(".toml")
    ]
    calibrations = [msgspec.convert(tomllib.loads(text), DeviceFacts) for text in texts]
    return tuple(sorted(calibrations, key=lambda facts: not facts.fallback))


def fallback_facts() -> DeviceFacts:
    """Return the figures for devices without their own file."""
    return device_facts()[0]


def facts_of(device: Device) -> DeviceFacts:
    """Return the figures of a device's own file, or of the fallback."""
    own = (facts for facts in device_facts() if facts.device in (device.model, device.name))
    return next(own, fallback_facts())
