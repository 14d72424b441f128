"""Estimate: predicted memory and speed of a setting, with its error band."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from trimtab.spec.base import Noun, check_minimum
from trimtab.units import format_bytes


class Footprint(Noun, frozen=True, kw_only=True):
    """Bytes at peak memory on the fullest device, by purpose."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    inputs: int = 0
    workspace: int = 0
    communication: int = 0
    context: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, part) for part in self.__struct_fields__)

    def faults(self) -> list[str]:
        """Check that no part is negative."""
        return check_minimum(0, **{part: getattr(self, part) for part in self.__struct_fields__})


class Band(Noun, frozen=True, kw_only=True):
    """Predicted interval of process memory."""

    low_bytes: int
    high_bytes: int

    def faults(self) -> list[str]:
        """Check that low is not above high."""
        wrong = check_minimum(0, low_bytes=self.low_bytes)
        if self.low_bytes > self.high_bytes:
            wrong.append(f"low_bytes {self.low_bytes} is above high_bytes {self.high_bytes}")
        return wrong


class StepTime(Noun, frozen=True, kw_only=True):
    """Seconds of one optimizer step, by purpose."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0
    communication_s: float = 0.0
    """Only communication that does not overlap with computation."""
    input_s: float = 0.0
    bubble_s: float = 0.0
    offload_s: float = 0.0
    """Copies between device and host that do not overlap with computation, and an optimizer on the CPU."""

    @property
    def total_s(self) -> float:
        """Sum of all parts."""
        return float(sum(getattr(self, part) for part in self.__struct_fields__))

    def faults(self) -> list[str]:
        """Check that no part is negative."""
        return check_minimum(0, **{part: getattr(self, part) for part in self.__struct_fields__})


class PipelineEstimate(Noun, frozen=True, kw_only=True):
    """How a pipeline divides the layers, and what its schedule makes of them."""

    layers: tuple[int, ...]
    """Layers of each stage; with v virtual stages, rank r has the stages r, r + ranks, and so on."""
    held_micro_batches: tuple[float, ...]
    """The most micro-batches whose activations each rank holds at a time."""
    bubble_share: float | None = None
    """Share of the step in which the slowest rank waits for others that compute; None without a step time."""
    first_outside: int | None = None
    """Parameters outside of the layers on the first rank, such as the embedding; None if unknown."""
    last_outside: int | None = None
    """Parameters outside of the layers on the last rank, such as the head; None if unknown."""

    def faults(self) -> list[str]:
        """Check that there are layers and ranks, and that no number is negative."""
        wrong = check_minimum(
            0,
            bubble_share=self.bubble_share,
            first_outside=self.first_outside,
            last_outside=self.last_outside,
        )
        if not self.layers or not self.held_micro_batches or len(self.layers) % len(self.held_micro_batches):
            wrong.append("the stages are no multiple of the ranks")
        return wrong


class HostMemory(Noun, frozen=True, kw_only=True):
    """Predicted memory of the host for a job that offloads."""

    rank_bytes: int
    """Memory of one process in the steps."""
    pinned_bytes: int
    """The part of it that is pinned: the system cannot swap it, nor use it otherwise."""
    node_bytes: int
    """Memory of the fullest node: all its processes and their copies for a checkpoint, or the model while it
    is built."""
    checkpoint_bytes: int = 0
    """Copy of weights and optimizer states that one process makes to write a checkpoint, and keeps."""
    capacity_bytes: int | None = None
    """Usable memory of the smallest node; None if unknown."""
    fits: bool | None = None
    """Whether the node has enough; None if its memory is unknown."""

    @property
    def shortage(self) -> str:
        """Why the job does not run on the host; empty if it does, or if nobody knows."""
        if self.fits is not False or self.capacity_bytes is None:
            return ""
        return (
            f"the host needs {format_bytes(self.node_bytes)} per node, "
            f"{format_bytes(self.pinned_bytes)} per process pinned, and has "
            f"{format_bytes(self.capacity_bytes)}"
        )

    def faults(self) -> list[str]:
        """Check that sizes are possible and agree with each other."""
        wrong = check_minimum(0, pinned_bytes=self.pinned_bytes, checkpoint_bytes=self.checkpoint_bytes)
        if not self.pinned_bytes <= self.rank_bytes <= self.node_bytes:
            wrong.append("pinned_bytes <= rank_bytes <= node_bytes does not hold")
        if (self.fits is None) != (self.capacity_bytes is None):
            wrong.append("fits and capacity_bytes are both known, or neither")
        elif self.capacity_bytes is not None and self.fits != (self.node_bytes <= self.capacity_bytes):
            wrong.append(f"fits is {self.fits}, and {self.node_bytes} of {self.capacity_bytes} are needed")
        return wrong


class MfuReference(Noun, frozen=True, kw_only=True):
    """Range of MFU in published runs of such a model on such a device."""

    low: float
    high: float
    """From 0 to 1; an MFU above it is rated excellent."""
    model: str
    """Kind of model, such as transformer."""
    figures: str
    """Source of the range."""

    def faults(self) -> list[str]:
        """Check that the range is within 0 to 1."""
        return (
            []
            if 0 < self.low <= self.high <= 1
            else [f"{self.low} to {self.high} is not a range within 0 to 1"]
        )


class Verdict(StrEnum):
    """Whether a setting runs on a device, judged by the upper end of the band."""

    FITS = "fits"
    """The memory that torch would reserve on a larger device is within the capacity."""
    FITS_TIGHT = "fits-tight"
    """It is above the capacity, but torch can release cached blocks and run; this may be slower."""
    DOES_NOT_FIT = "does-not-fit"
    """Out of memory, even after every cached block is released."""


class Estimate(Noun, frozen=True, kw_only=True):
    """Predicted memory and speed of one setting on one cluster. Unknown is None."""

    allocated_bytes: int
    """Peak of live tensors, as torch.cuda.max_memory_allocated counts them."""
    reserved_bytes: int
    """Peak memory of the caching allocator on a device that is large enough. On a smaller device it may
    release cached blocks and reserve less, down to `least_bytes`."""
    process_bytes: int
    """Memory of the whole process, as the driver shows it."""
    capacity_bytes: int | None = None
    """Usable memory of the device; None if no device was named."""
    fits: bool | None = None
    """Whether it runs: true for the verdicts fits and fits-tight."""
    verdict: Verdict | None = None
    """fits, fits-tight or does-not-fit, by the upper end of the band. None if no device was named, or if
    torch would reserve too much and trimtab did not check whether the job can run with less."""
    verdict_reason: str = ""
    """Why it is fits-tight or does-not-fit, in bytes, and what would help; empty if it fits."""
    least_bytes: int | None = None
    """Smallest capacity at which the job is predicted to run by releasing cached blocks: the memory that
    torch then reserves, plus the CUDA context, without the band. None if not computed: a plan computes it
    only for settings that do not fit otherwise."""
    releases_per_step: float | None = None
    """How often a steady step must release cached blocks and call cudaMalloc again at this capacity, by the
    upper end of the band: 0 if it fits. None if it does not run, or was not computed."""
    parts: Footprint
    """Live bytes at the moment of peak memory. Gradients may be 0 then and large at another moment."""
    gradients_bytes: int | None = None
    """Peak bytes of gradients at any moment of a step."""
    band: Band
    host: HostMemory | None = None
    """Memory of the host; None for a job that offloads nothing."""
    fullest_rank: str = ""
    """The ranks that need most memory, and that this estimate is of; empty if all ranks need the same."""
    pipeline: PipelineEstimate | None = None
    """Stages of a pipeline; None for other strategies."""
    step_s: float | None = None
    step_time: StepTime | None = None
    samples_per_s: float | None = None
    mfu: float | None = None
    """Model FLOPS utilization, from 0 to 1: model operations per second over the dense peak of the dtype."""
    mfu_rating: str | None = None
    """poor, fair, good or excellent, relative to `mfu_reference`; None without a comparable reference."""
    mfu_reference: MfuReference | None = None
    """Range that the rating compares with."""
    hardware_utilization: float | None = None
    """Like `mfu`, but counts recomputed operations too; above `mfu` if activations are recomputed."""
    hours: float | None = None
    """Hours of the whole job: all its epochs."""
    gpu_hours: float | None = None
    verified: bool = False
    """Whether torch's compiler ran for the figures of a compiled setting; else they are derived."""
    assumptions: tuple[str, ...] = ()

    @property
    def need_bytes(self) -> int:
        """Free memory that a device needs to run it, by the upper end of the band.

        This is the memory that torch would reserve; if that is too much, the least that it can run in.
        """
        if self.verdict not in (Verdict.FITS_TIGHT, Verdict.DOES_NOT_FIT):
            return self.band.high_bytes
        least = self.least_possible_bytes if self.least_bytes is None else self.least_bytes
        return min(self.band.high_bytes, self.with_band(least))

    @property
    def least_possible_bytes(self) -> int:
        """Lower bound of `least_bytes`: live tensors, the CUDA context and NCCL."""
        return self.process_bytes - self.reserved_bytes + self.allocated_bytes

    @property
    def nccl_bytes(self) -> int:
        """Memory of NCCL: the process without what torch reserves and the CUDA context."""
        return max(0, self.process_bytes - self.reserved_bytes - self.parts.context)

    def with_band(self, size: int) -> int:
        """Return process memory `size` scaled to the upper end of the band."""
        return -(-size * self.band.high_bytes // max(1, self.process_bytes))

    def judge_quickly(self, capacity_bytes: int) -> Self:
        """Return the estimate with a verdict from the memory that torch reserves on a large device.

        Either it fits, or `fits` is false and the verdict stays None: see `trimtab.predict.capacity`.
        """
        shortage = self.host.shortage if self.host is not None else ""
        if shortage and self.least_possible_bytes > capacity_bytes:
            least = format_bytes(self.least_possible_bytes)
            shortage += f"; the GPU needs {least} or more, and has {format_bytes(capacity_bytes)}"
        if shortage:
            return self.replace(
                capacity_bytes=capacity_bytes,
                fits=False,
                verdict=Verdict.DOES_NOT_FIT,
                verdict_reason=shortage,
                least_bytes=None,
                releases_per_step=None,
            )
        fits = self.band.high_bytes <= capacity_bytes
        return self.replace(
            capacity_bytes=capacity_bytes,
            fits=fits,
            verdict=Verdict.FITS if fits else None,
            verdict_reason="",
            least_bytes=None,
            releases_per_step=0.0 if fits else None,
        )

    def faults(self) -> list[str]:
        """Check that allocated <= reserved <= process memory, and that the verdict agrees."""
        wrong = check_minimum(
            0,
            allocated_bytes=self.allocated_bytes,
            process_bytes=self.process_bytes,
            capacity_bytes=self.capacity_bytes,
            step_s=self.step_s,
            samples_per_s=self.samples_per_s,
            mfu=self.mfu,
            hours=self.hours,
            gpu_hours=self.gpu_hours,
            releases_per_step=self.releases_per_step,
        )
        if self.verdict is not None and self.fits is not (self.verdict is not Verdict.DOES_NOT_FIT):
            wrong.append(f"fits {self.fits} contradicts the verdict {self.verdict}")
        if (
            self.least_bytes is not None
            and not self.allocated_bytes <= self.least_bytes <= self.process_bytes
        ):
            wrong.append(
                f"allocated {self.allocated_bytes} <= least {self.least_bytes} <= process "
                f"{self.process_bytes} does not hold"
            )
        if not self.allocated_bytes <= self.reserved_bytes <= self.process_bytes:
            wrong.append(
                f"allocated {self.allocated_bytes} <= reserved {self.reserved_bytes} <= process "
                f"{self.process_bytes} does not hold"
            )
        return wrong
