"""Estimate: what a setting would need and how fast it would run, with the band it claims."""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from trimtab.spec.base import Noun, below


class Footprint(Noun, frozen=True, kw_only=True):
    """Bytes at the peak on the fullest device, by what they are for."""

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
        """All parts together."""
        return sum(getattr(self, part) for part in self.__struct_fields__)

    def faults(self) -> list[str]:
        """No part is negative."""
        return below(0, **{part: getattr(self, part) for part in self.__struct_fields__})


class Band(Noun, frozen=True, kw_only=True):
    """The interval a prediction claims for process memory."""

    low_bytes: int
    high_bytes: int

    def faults(self) -> list[str]:
        """Low is not above high."""
        wrong = below(0, low_bytes=self.low_bytes)
        if self.low_bytes > self.high_bytes:
            wrong.append(f"low_bytes {self.low_bytes} is above high_bytes {self.high_bytes}")
        return wrong


class StepTime(Noun, frozen=True, kw_only=True):
    """Seconds of one optimizer step, by what they are spent on."""

    compute_s: float = 0.0
    memory_s: float = 0.0
    launch_s: float = 0.0
    communication_s: float = 0.0
    """Only what is not hidden behind computing."""
    input_s: float = 0.0
    bubble_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All parts together."""
        return float(sum(getattr(self, part) for part in self.__struct_fields__))

    def faults(self) -> list[str]:
        """No part is negative."""
        return below(0, **{part: getattr(self, part) for part in self.__struct_fields__})


class MfuReference(Noun, frozen=True, kw_only=True):
    """The range of MFU that published runs of such a model reach on such a device."""

    low: float
    high: float
    """From 0 to 1: above it an MFU is excellent."""
    model: str
    """The kind of model: transformer."""
    figures: str
    """Where the range comes from."""

    def faults(self) -> list[str]:
        """The range lies within 0 to 1."""
        return [] if 0 < self.low <= self.high <= 1 else [f"{self.low} to {self.high} is no range of shares"]


class Verdict(StrEnum):
    """Whether a setting runs on a device. All three are by the upper end of the band."""

    FITS = "fits"
    """What torch would reserve on a larger device is within the capacity."""
    FITS_TIGHT = "fits-tight"
    """It is not, but torch can release cached blocks and run; that may be slower."""
    DOES_NOT_FIT = "does-not-fit"
    """Out of memory, even after every cached block is released."""


class Estimate(Noun, frozen=True, kw_only=True):
    """Memory and speed of one setting on one cluster. Unknown is None."""

    allocated_bytes: int
    """Peak of live tensors, as torch.cuda.max_memory_allocated counts them."""
    reserved_bytes: int
    """Peak of what the caching allocator holds on a device that is large enough. On a smaller one it may
    release cached blocks and hold less, down to `least_bytes`."""
    process_bytes: int
    """What the driver shows for the whole process."""
    capacity_bytes: int | None = None
    """What the device can give; None where no device was named."""
    fits: bool | None = None
    """Whether it runs: true for the verdicts fits and fits-tight."""
    verdict: Verdict | None = None
    """fits, fits-tight or does-not-fit, by the upper end of the band. None where no device was named, and
    where `fits` is false by what torch would reserve and nobody asked whether it can run with less."""
    verdict_reason: str = ""
    """Why it is fits-tight or does-not-fit, in bytes, and what would help; empty where it fits."""
    least_bytes: int | None = None
    """The smallest capacity at which the job is predicted to run, by releasing cached blocks: what torch then
    reserves, with the CUDA context. The band is not included. None where it was not computed: a plan computes
    it only for what does not fit otherwise."""
    releases_per_step: float | None = None
    """How often a steady step has to release cached blocks and call cudaMalloc again at this capacity, by the
    upper end of the band: 0 where it fits. None where it does not run, or was not computed."""
    parts: Footprint
    """What is live at the moment of the peak: gradients may be 0 then, and large at another moment."""
    gradients_bytes: int | None = None
    """The most that gradients hold at any moment of a step."""
    band: Band
    step_s: float | None = None
    step_time: StepTime | None = None
    samples_per_s: float | None = None
    mfu: float | None = None
    """Model operations over the dense peak of the dtype in use, from 0 to 1."""
    mfu_rating: str | None = None
    """poor, fair, good or excellent beside `mfu_reference`; None where nothing comparable is known."""
    mfu_reference: MfuReference | None = None
    """What the rating is against."""
    hardware_utilization: float | None = None
    """The same with what is computed again counted; above mfu where activations are recomputed."""
    hours: float | None = None
    """To the horizon of the job."""
    gpu_hours: float | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def need_bytes(self) -> int:
        """What a device must have free for it to run, with the upper part of the band.

        What torch would reserve; where that was found to be too much, the least that it can run in.
        """
        if self.verdict not in (Verdict.FITS_TIGHT, Verdict.DOES_NOT_FIT):
            return self.band.high_bytes
        least = self.least_possible_bytes if self.least_bytes is None else self.least_bytes
        return min(self.band.high_bytes, self.with_band(least))

    @property
    def least_possible_bytes(self) -> int:
        """A bound from below for `least_bytes`: live tensors, and the context."""
        return self.process_bytes - self.reserved_bytes + self.allocated_bytes

    def with_band(self, size: int) -> int:
        """Process memory with as large a share of it on top as the band ends above the estimate."""
        return -(-size * self.band.high_bytes // max(1, self.process_bytes))

    def judge_quickly(self, capacity_bytes: int) -> Self:
        """The estimate with the verdict by what torch reserves on a large device.

        Either it fits, or `fits` is false and the verdict stays open: see `trimtab.predict.capacity`.
        """
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
        """Live tensors fit in what is reserved, and that in the process."""
        wrong = below(
            0,
            allocated_bytes=self.allocated_bytes,
            step_s=self.step_s,
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
