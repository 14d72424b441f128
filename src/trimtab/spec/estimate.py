"""Estimate: what a setting would need and how fast it would run, with the band it claims."""

from __future__ import annotations

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


class Estimate(Noun, frozen=True, kw_only=True):
    """Memory and speed of one setting on one cluster. Unknown is None."""

    allocated_bytes: int
    """Peak of live tensors, as torch.cuda.max_memory_allocated counts them."""
    reserved_bytes: int
    """Peak of what the caching allocator holds."""
    process_bytes: int
    """What the driver shows for the whole process."""
    capacity_bytes: int | None = None
    """What the device can give; None where no device was named."""
    fits: bool | None = None
    """Whether the upper band stays within capacity."""
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

    def faults(self) -> list[str]:
        """Live tensors fit in what is reserved, and that in the process."""
        wrong = below(0, allocated_bytes=self.allocated_bytes, step_s=self.step_s)
        if not self.allocated_bytes <= self.reserved_bytes <= self.process_bytes:
            wrong.append(
                f"allocated {self.allocated_bytes} <= reserved {self.reserved_bytes} <= process "
                f"{self.process_bytes} does not hold"
            )
        return wrong
